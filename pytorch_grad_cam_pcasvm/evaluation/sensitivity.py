"""Sensitivity: do maps change when what was learned is taken away?"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.evaluation.faithfulness import BLIND
from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.statistics import Estimate, rank_correlations
from pytorch_grad_cam_pcasvm.evaluation.subject import DEFAULT, Methods, Subject, seeded, signed, with_head
from pytorch_grad_cam_pcasvm.modules import layer_name
from pytorch_grad_cam_pcasvm.net import PCASVMNet
from pytorch_grad_cam_pcasvm.targets import Target

COMPONENTS, LABELS = "components rotated", "labels permuted, head refitted"
LIKENESS = "likeness"
ENOUGH = 0.5  # a map that keeps more of its order than this looks the same to the eye


def sensitivity(
    net: PCASVMNet,
    data: Any,
    target_layers: Sequence[nn.Module | str],
    methods: Methods = DEFAULT,
    target: Target | None = None,
    *,
    refitted: Callable[[int], Any] | None = None,
    layers: int = 3,
    images: int | None = 100,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Callable[[Any], Tensor] | None = None,
) -> Result:
    """Measure how much maps stay the same when the head, and then the layers from the top down, are randomised.

    The sanity checks of Adebayo et al. (arXiv 1810.03292), extended to a head: the absolute rank correlation of each
    map with the randomised network's map of the same target. A map that stays the same does not show what was learned.

    Args:
        net: the network, which is not changed.
        data: tensors (N, C, H, W), ``(images, labels)``, or a data set as for ``atlas.build``.
        target_layers: one layer.
        methods: classes, ``(class, options)``, or a dict of these by name.
        target: what to explain; None: the class predicted for the whole image.
        refitted: a function from a seed to a head refitted on permuted labels, such as
            ``lambda seed: clone(pipeline).fit(features, np.random.default_rng(seed).permutation(labels))``; None: skip
            this check.
        layers: number of layers with weights to randomise, from the top of the backbone down, one after the other (by
            their ``reset_parameters``), each in addition to those before.
        images: how many, chosen at random; None: all.
        batch_size: number of images at a time.
        seed: random seed of the choice and the randomisation.
        progress: show a progress bar.
        transform: from a PIL image to a tensor for the network, for a folder or a data set of PIL images.

    Returns:
        A row for each method and randomisation, and for the blind map; passed if the correlation is below 0.5. Also how
        similar each method's maps are to the blind map, without a pass mark: near 1 the target hardly matters.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: too few images, or nothing to explain.
    """
    subject = Subject(
        net, data, target_layers, methods, target,
        images=images, batch_size=batch_size, seed=seed, progress=progress, transform=transform,
    )  # fmt: skip
    rotated = subject.randomised()
    others: dict[str, PCASVMNet] = {} if rotated is None else {COMPONENTS: rotated}
    if refitted is not None:
        others[LABELS] = with_head(net, refitted(seed))
    target_layer = str(layer_name(net.feature_source()[0], target_layers[0]))
    others |= _cascade(net, layers, seed)
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    subject.layer = target_layer
    subjects = {name: copy.copy(subject) for name in others}
    for name, other in others.items():
        subjects[name].net, subjects[name]._cams = other, {}
    for x, _, images_of in subject.batches("sensitivity"):
        targets, blind = subject.targets(x), subject.blind(x).cpu().numpy()
        for method in subject.methods:
            maps = subject.explained(method, x, targets)
            seen = subject.seen(method, maps)
            before = signed(maps).cpu().numpy()
            alike = {name: signed(subjects[name].explained(method, x, targets)).cpu().numpy() for name in others}
            alike[BLIND] = blind
            kept = {name: np.abs(rank_correlations(before, after)) for name, after in alike.items()}
            for name, each in kept.items():
                found.setdefault((method, name), []).append(np.where(seen, each, np.nan))
            changed = [kept[name] for name in others] or [np.full(len(x), np.nan)]
            subject.worst[method].add(np.where(seen, np.mean(changed, 0), np.nan), images_of, x, maps)
        before = blind
        for name in others:
            after = subjects[name].blind(x).cpu().numpy()
            found.setdefault((BLIND, name), []).append(np.abs(rank_correlations(before, after)))
    rows = []
    for (method, name), parts in found.items():
        estimate = Estimate.of(np.concatenate(parts))
        if name == BLIND:
            rows.append(Row(method, LIKENESS, BLIND, estimate))
            continue
        passed = estimate.n > 1 and estimate.mean + 2 * estimate.standard_error < ENOUGH
        rows.append(Row(method, name, "", estimate, None if method == BLIND else passed))
    return subject.result(
        "sensitivity",
        "do maps change when what was learned is randomised? (absolute rank correlation of the maps before and after; "
        "near 1 the map does not show what was learned)",
        rows,
        target_layer=target_layer,
    )


def _cascade(net: PCASVMNet, count: int, seed: int) -> dict[str, PCASVMNet]:
    """Return networks in which one more layer is random each, from the top of what runs down."""
    backbone, source = net.feature_source()
    names = [name for name, module in backbone.named_modules() if _has_weights(module)]
    if source.layer is not None:  # what follows it does not run
        inside = [name for name in names if name == source.layer or name.startswith(f"{source.layer}.")]
        last = names.index(inside[-1]) if inside else None
        order = [name for name, _ in backbone.named_modules()]
        names = (
            names[: last + 1]
            if last is not None
            else [name for name in names if order.index(name) < order.index(source.layer)]
        )
    found: dict[str, PCASVMNet] = {}
    random = copy.deepcopy(net)
    for number, name in enumerate(reversed(names)):
        if number == count:
            break
        with seeded(7919 + seed + number):  # not 0, from which many networks begin
            random.feature_source()[0].get_submodule(name).reset_parameters()  # type: ignore[operator]
        found[f"layers from {name} up random"] = copy.deepcopy(random)
    return found


def _has_weights(module: nn.Module) -> bool:
    norm = isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm)
    return not norm and callable(getattr(module, "reset_parameters", None)) and bool(list(module.parameters(False)))
