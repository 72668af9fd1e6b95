"""A study: all measures on the same images; layers compared by them, and Quantus."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.methods import ContributionCAM
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.auto_layers import find_last_blocks
from pytorch_grad_cam_pcasvm.network.extraction import mean_activations
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_layer_name
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime.log import progress_bar
from pytorch_grad_cam_pcasvm.studio.evaluation.faithfulness import KINDS
from pytorch_grad_cam_pcasvm.studio.evaluation.faithfulness import faithfulness as _faithfulness
from pytorch_grad_cam_pcasvm.studio.evaluation.localisation import localisation as _localisation
from pytorch_grad_cam_pcasvm.studio.evaluation.report import report as _report
from pytorch_grad_cam_pcasvm.studio.evaluation.result import Result
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import BLIND, RANDOM
from pytorch_grad_cam_pcasvm.studio.evaluation.sanity import completeness as _completeness
from pytorch_grad_cam_pcasvm.studio.evaluation.sanity import sensitivity as _sensitivity
from pytorch_grad_cam_pcasvm.studio.evaluation.sanity import stability as _stability
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject, explained, find_target_layer, heat, name_methods
from pytorch_grad_cam_pcasvm.targets import SVMTarget


class Study(Subject):
    """A network, images, and the methods that explain them, shared by all measures.

    Each measure gives the same result as the function of its name. Maps and controls that one measure has computed are
    reused by the next, as far as they fit into 256 MB, so do not change the network in between. Localisation explains
    classes, whatever the target.

    Args:
        net: the network.
        data: tensors (N, C, H, W), ``(images, labels)``, or a data set as for ``atlas.build``.
        target_layers: one layer.
        methods: classes, ``(class, options)`` pairs, or a dict of these by name.
        target: the target to explain; None: the class predicted for the whole image.
        images: number of images, chosen at random; None: all.
        batch_size: number of images at a time.
        seed: random seed of all draws.
        progress: show progress bars.
        transform: turns a PIL image into a tensor for the network; for a folder or a data set of PIL images.
        normal: the class that is an absence, such as ``"good"``. Then the default target is the evidence for any other
            class against it, and faithfulness and localisation leave out decisions for it. None: the one that the head
            knows, if any.
        stop_early: look at what decides after a quarter and a half of the images, and stop if it is clear, or can
            hardly become clear. Confidence intervals allow for three looks: they are of 99.5 % at the first two, and of
            96 % at the last, instead of 95 %, so that at most 5 % of the answers of a row are wrong. Localisation by
            masks always takes all images.
        minutes: how long a report, or a measure, may take, by the clock on the wall; None: as long as it takes. Then
            the looks of ``stop_early`` are taken, with the same intervals, and the time decides only how many of them
            are reached, never what is looked at. The checks of a report take turns.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are too few images, a layer is unknown, two methods have the same name, or the head has
            nothing to explain.

    Example:
        >>> study = evaluation.Study(net, (training_images, labels), ["layer2"], images=6, progress=False)
        >>> study.stability().check
        'stability'
    """

    faithfulness = _faithfulness
    localisation = _localisation
    sensitivity = _sensitivity
    completeness = _completeness
    stability = _stability
    report = _report


def quantus_explainer(
    method: type[ClosedFormCAM], net: PCASVMNet, target_layers: Sequence[nn.Module | str], **options: Any
) -> Callable[..., np.ndarray]:
    """Return an ``explain_func`` for Quantus' metrics that uses a method of this package.

    Quantus passes its own model, a copy of the network in which it may have randomised modules; that copy is explained,
    at the layer of the same name. Its randomisation (MPRT) calls ``reset_parameters`` of modules, which a head does not
    have, so the head is left unchanged; :func:`.sensitivity` randomises it.

    Args:
        method: a class of :mod:`~pytorch_grad_cam_pcasvm.methods`.
        net: the network.
        target_layers: one layer.
        **options: options of the method.

    Returns:
        A function of ``model``, ``inputs`` (numpy, (N, C, H, W)) and ``targets`` (N positions in the head's
        ``classes_``) that returns the signed maps of these classes' margins, (N, 1, H, W), at the size of the inputs.

    Raises:
        TypeError: the method is not a class of this package, an option is unknown to it, or the network is not a
            PCASVMNet.
        ValueError: there is not exactly one target layer, the layer is the backbone itself, or the head has no classes.

    Example:
        >>> explainer = evaluation.quantus_explainer(ContributionCAM, net, ["layer2"])
    """
    name_methods([method])
    name = find_target_layer(net, target_layers)
    if net.head.classes_ is None:
        raise ValueError("Quantus explains classes, but the head has none")
    if isinstance(name, nn.Module) or not name:
        raise ValueError("the target layer is the backbone itself: choose one of its layers")

    method(net, [name], **options)  # options that the method does not have are refused now

    def explain(model: PCASVMNet, inputs: Any, targets: Any, **_: Any) -> np.ndarray:
        parameter = next(model.parameters())
        x = torch.as_tensor(np.asarray(inputs)).to(find_device(model), parameter.dtype)
        classes = model.head.classes_.tolist()  # type: ignore[union-attr]
        positions = np.asarray(targets).reshape(-1)
        if (
            len(positions) != len(x)
            or positions.dtype.kind not in "iu"
            or not np.isin(positions, range(len(classes))).all()
        ):
            raise ValueError(
                f"targets must be {len(x)} positions in classes_, one for each input, from 0 to {len(classes) - 1}, "
                f"got {targets!r:.80}"
            )
        maps = explained(method(model, [name], **options), x, [SVMTarget(classes[index]) for index in positions])
        return heat(maps, x.shape[2:])[:, None].astype(np.float32)

    return explain


PATCHES = 14  # on the longer side of an image
_AMONG = 4  # of the coarsest map sizes, unless candidates are given
COMBINED = "shared", "mean"
_TOGETHER = 2, 3  # of these, the coarsest


def layers(
    net: PCASVMNet,
    data: Any,
    candidates: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    reshape_transform: Any = None,
    images: int | None = 200,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Any = None,
    combine: Sequence[str] = COMBINED,
) -> Result:
    """Compare target layers for contributions, and recommend one or several.

    All candidates are measured on the same images, by deletion and insertion of patches of one size, a fourteenth of
    the image's longer side, and, if there are labels, by two images side by side and by a small image pasted into one
    of another class. The recommended candidate is the one that gains most over the last layer, image by image, in
    deletion and insertion together, if the gain is more than a standard error and neither of the two loses a standard
    error; otherwise, it is the last layer. Use images that the head was not fitted on.

    Args:
        net: the network.
        data: as for :class:`Study`.
        candidates: layers, lists of layers whose maps become one, or a dict of these by name; None: the last block of
            each of the four coarsest map sizes (for a transformer, the norms before its last attention layers), and the
            two and the three coarsest together.
        reshape_transform: as for the methods.
        images: number of images, chosen at random; None: all.
        batch_size: number of images at a time.
        seed: random seed of all draws.
        progress: show progress bars.
        transform: turns a PIL image into a tensor for the network; for a folder or a data set of PIL images.
        combine: how several layers become one map, ``"shared"`` and ``"mean"``, or one of these.

    Returns:
        The numbers of every candidate; ``settings["recommended"]`` is a list of layers, ``settings["combine"]`` is how
        several become one map, and ``question`` gives the reason in a sentence.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are too few images, a layer or a way to combine several is unknown, or the head has nothing to
            explain.

    Example:
        >>> result = evaluation.layers(net, (training_images, labels), images=6, progress=False)
        >>> cam = ContributionCAM(net, result.settings["recommended"])
    """
    if not combine or not set(combine) <= set(COMBINED):
        raise ValueError(f"combine must name some of {', '.join(COMBINED)}, got {combine!r}")
    common = {"images": images, "batch_size": batch_size, "seed": seed, "progress": progress, "transform": transform}
    subject = Subject(net, data, [next(iter(net.backbone.children()))], **common)
    x = subject.read(subject.rows[:2].tolist())[0]
    backbone, source = net.feature_source(x)
    if candidates is None:
        with evaluation_mode(net):
            blocks = find_last_blocks(backbone, source, x)[-_AMONG:]
        candidates = [*blocks, *(blocks[-number:] for number in _TOGETHER if number <= len(blocks))]
    groups = _name_groups(backbone, candidates)
    means = _average_layers(net, subject, groups, x[0].numel())
    methods: dict[str, Any] = {}
    for title, names in groups.items():
        options: dict[str, Any] = {"target_layers": names, "reshape_transform": reshape_transform}
        options["mean"] = [means[name] for name in names] if _lacks(net, names) else None
        for how in combine if len(names) > 1 else COMBINED[:1]:
            of_several = {} if how == COMBINED[0] else {"combine": how}
            methods[title + ", mean" * bool(of_several)] = ContributionCAM, options | of_several
    # A container ends with the last layer in it.
    places = [name for name, _ in backbone.named_modules()]
    ends = {
        name: max(n for n, inner in enumerate(places) if f"{inner}.".startswith(f"{name}."))
        for name in dict.fromkeys(layer for layers in groups.values() for layer in layers)
    }
    unfit = _unfit(net, subject, methods)
    for title in unfit:
        del methods[title]
        groups.pop(title, None)
    if not groups:
        raise ValueError(f"no candidate can be explained: {next(iter(unfit.values()))}")
    last = max(groups, key=lambda title: (len(groups[title]) == 1, ends[groups[title][-1]]))
    study = Subject(net, data, groups[last][-1:], methods, **common)
    result = _faithfulness(study, patches=PATCHES, rivals=(RANDOM, BLIND, last))
    for layout in ("side by side", "pasted"):
        for title, method in methods.items():
            # On its own: one may refuse what others explain.
            alone = Subject(net, data, groups[last][-1:], {title: method}, **common)
            alone.title = f"{title}, {layout}: "
            try:
                more = _localisation(alone, pasted=layout == "pasted", rivals=(RANDOM,))
            except ValueError as error:
                result.settings[f"not {layout}"] = f"{title}: {error}"
                continue
            result.rows += [
                replace(row, measure=f"{layout}: {row.measure}") for row in more.rows if row.method == title
            ]
    chosen, why = _recommended(result, methods, last)
    result.check, result.question = "layers", f"Recommended: {chosen}. On {len(study.rows)} images, {why}."
    options = methods[chosen][1]
    result.settings |= {f"not {title}": reason for title, reason in unfit.items()}
    result.settings |= {"recommended": options["target_layers"], "combine": options.get("combine", "shared")}
    return result


def _average_layers(net: PCASVMNet, subject: Subject, groups: dict[str, list[str]], numbers: int) -> dict[str, Tensor]:
    """Return the means of the layers of all candidates for which the head does not have them all.

    Where it has them, the start does not depend on these images.
    """
    lacking = [names for names in groups.values() if _lacks(net, names)]
    batches: Any = None
    if lacking and len(subject.rows) * numbers < 1 << 27:
        parts = subject.parts(subject.rows.tolist(), "mean activations", "image")
        batches = [subject.read(rows)[0] for rows in parts]
    means = {}
    for name in dict.fromkeys(name for names in lacking for name in names):
        of_layer = batches or (subject.read(rows)[0] for rows in subject.parts(subject.rows.tolist(), name, "image"))
        means[name] = mean_activations(net, of_layer, name, progress=False)
    return means


def _lacks(net: PCASVMNet, layers: Sequence[str]) -> bool:
    """Return whether the head does not have the means of all these layers."""
    return not net.head.training_set.means.keys() >= set(layers)


def _unfit(net: PCASVMNet, subject: Subject, methods: dict[str, Any]) -> dict[str, str]:
    """Return which methods cannot explain an image of each target, and why."""
    firsts: dict[Any, Any] = {}
    for rows in subject.parts(subject.rows.tolist(), "targets", "image"):
        x = subject.read(rows)[0]
        for n, target in enumerate(subject.targets(x)):
            firsts.setdefault(target, x[n : n + 1])
    unfit = {}
    with progress_bar(
        subject.progress, total=len(methods) * len(firsts), desc="which layers can be explained?", unit="map"
    ) as bar:
        for title, (method, options) in methods.items():
            try:
                cam = method(net, **options)
                for target, image in firsts.items():
                    cam.explain(image, [target])
                    bar.update(1)
            except ValueError as error:
                unfit[title] = str(error)
    return unfit


def _recommended(result: Result, methods: dict[str, Any], last: str) -> tuple[str, str]:
    """Return the title of the best candidate, and the reason."""
    ahead = {title: [result[title, measure, last] for measure in KINDS] for title in methods if title != last}
    gains = {title: sum(gain.mean for gain in both) for title, both in ahead.items()}
    spread = {title: math.hypot(*(gain.standard_error for gain in both)) for title, both in ahead.items()}
    better = [
        title
        for title, both in ahead.items()
        if gains[title] > spread[title] and all(gain.mean >= -gain.standard_error for gain in both)
    ]
    chosen = max(better, key=lambda title: gains[title], default=last)
    if chosen == last:
        why = f"no other gains a standard error over {last} in deletion and insertion together without a loss in either"
    else:
        why = f"it gains {gains[chosen]:.2f} ± {spread[chosen]:.2f} sd over {last} in deletion and insertion together"
    return chosen, why


def _name_groups(backbone: nn.Module, candidates: Any) -> dict[str, list[str]]:
    """Return the names of the layers of every candidate, by title."""
    pairs = list(candidates.items()) if isinstance(candidates, Mapping) else [(None, group) for group in candidates]
    groups: dict[str, list[str]] = {}
    for title, group in pairs:
        names = [find_layer_name(backbone, layer) for layer in (group if isinstance(group, list | tuple) else [group])]
        if None in names or not names:
            raise ValueError(f"a candidate must be a layer or a list of layers of the backbone, got {group!r:.80}")
        groups[title or " + ".join(map(str, names))] = [str(name) for name in names]
    if not groups:
        raise ValueError("candidates is empty: name at least one layer, or pass None")
    return groups
