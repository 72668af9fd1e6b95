"""Outputs of programs and files: their names and titles, and how far they are from ``explain``."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.anomalies import (
    anomaly_range,
    compare_residual,
    count_expressing,
    measure_anomaly,
    split_anomaly,
    tells_anomalies,
    usual_reach,
)
from pytorch_grad_cam_pcasvm.head.stages import Projection
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.methods.warn_once import WarnOnce
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput, HeadRun
from pytorch_grad_cam_pcasvm.runtime.errors import NoProgramError
from pytorch_grad_cam_pcasvm.runtime.pictures import COLOURS, colour_table, heat_table
from pytorch_grad_cam_pcasvm.studio.export.explainer import (
    BLOCKS,
    MOST,
    sample_image,
    sampled_differences,
    sampled_outputs,
)
from pytorch_grad_cam_pcasvm.studio.pictures.answers import BACKGROUND, EXPRESSED
from pytorch_grad_cam_pcasvm.targets import (
    DensityTarget,
    HotellingTarget,
    LogRatioTarget,
    PCATarget,
    ProbabilityTarget,
    ResidualTarget,
    ScoreTarget,
    SVMTarget,
    Target,
)
from pytorch_grad_cam_pcasvm.targets.catalogue import describe_anomaly, describe_meaning
from pytorch_grad_cam_pcasvm.targets.places import describe_place

# What a program gives, where there is some.
OUTPUTS = (
    "scores", "label", "components", "anomaly", "outside", "parts", "evidence", "values", "nu", "log_scale", "maps",
    "opposite", "baseline_values", "remainder", "error", "values_error",
)  # fmt: skip
ERRORS = "error", "values_error"  # NaN of components that are not stable
_NOTHING = 1e-4  # of the largest value: less is rounding
_OF_FEATURES = "components", "anomaly", "outside", "parts"
_OF_VALUES = "scores", "values", "baseline_values", "values_error"
# What is 0 but for rounding is compared with what it is subtracted from.
_BESIDE = {"baseline_values": "values", "remainder": "values", "error": "maps", "values_error": "values"}


def name_outputs(maps: SignedMaps, size: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Return a program's outputs for maps, by name."""
    outputs: dict[str, Any] = {name: getattr(maps, name, None) for name in OUTPUTS}
    output = maps.output
    if isinstance(output, HeadOutput | HeadRun):
        head, count = output.head, 1 if output.grid is None else output.grid.count
        outputs["outside"] = compare_residual(head, output.head_trace, count)
        outputs["parts"] = split_anomaly(head, output.head_trace, count)
        outputs["scores"], outputs["components"] = head.scores(output.head_trace), output.components
        if tells_anomalies(head) and (output.grid is not None or head.threshold is not None):
            outputs["anomaly"] = measure_anomaly(head, output.head_trace)
        if head.decision_position is not None and head.classes_ is not None:
            outputs["label"] = head.voting.predicted(output.head_trace.values[head.decision_position])
        if output.grid is not None:
            outputs["evidence"] = _evidence(maps)
            outputs["scores"] = output.grid.placed(outputs["scores"])
            if outputs["label"] is not None:
                outputs["label"] = outputs["label"].unflatten(0, (-1, *output.grid.shape))
            if outputs["anomaly"] is not None:
                outputs["anomaly"] = outputs["anomaly"].unflatten(0, (-1, *output.grid.shape))
    elif isinstance(output, Tensor) and output.dim() == 2:
        outputs["scores"], outputs["label"] = output, output.argmax(-1)
    for name in ("maps", "opposite", "error"):
        if size is not None and outputs[name] is not None:
            outputs[name] = upsample_maps(outputs[name], size)
    return {name: tensor for name, tensor in outputs.items() if tensor is not None}


def list_strongest(targets: Sequence[Any]) -> list[int]:
    """Return the numbers of the targets that are about the strongest position of each image."""
    return [k for k, target in enumerate(targets) if getattr(target, "at", None) == "max"]


def _evidence(maps: SignedMaps) -> Tensor | None:
    """Return the values at every position of the targets that are about the strongest one, (N, K, *grid)."""
    output, strongest = maps.output, list_strongest(maps.targets)
    if not strongest:
        return None
    whole = HeadRun(output.head, output.head_trace)
    values = [maps.targets[k].unplaced.value(whole).unflatten(0, (-1, *output.grid.shape)) for k in strongest]
    return torch.stack(values, 1)


def checked(
    run: Callable[[Tensor], Mapping[str, Any]], cam: ClosedFormCAM, maps: SignedMaps, images: Tensor,
    size: Sequence[int] | None, by: str, ways_out: Sequence[str],
) -> dict[str, float]:  # fmt: skip
    """Return the largest difference of every output from ``explain``, as a part of its largest value.

    Args:
        run: computes the outputs of images, by name.
        cam: the method.
        maps: its maps of the images, whose targets are explained.
        images: shape (N, ...).
        size: of maps, as in ``program``.
        by: what it is that runs.
        ways_out: what to do where the numbers differ.

    Raises:
        NoProgramError: an output differs by more than anyone would overlook.
        ValueError: ``explain`` does not take the images.
    """
    if maps.baseline_values is not None:
        gap = (maps.sums + maps.baseline_values - maps.values).abs().amax(0)
        most = MOST * (maps.values.abs() + maps.baseline_values.abs()).amax(0)
        if bool((gap > most).any()):
            raise NoProgramError(
                f"the maps of explain do not add up to their values, by {float(gap.max()):.1g}", "see cam.check(images)"
            )
    noise = torch.randn((3, *images.shape[1:]), generator=torch.Generator().manual_seed(0), device="cpu").to(images)
    variants = {"changed": _changed(images), "noise": noise * images.std() + images.mean()}
    expected: dict[str, Any] = {}
    for name, x in {"images": images, "the first": images[:1], **variants}.items():
        try:
            outputs = _explained(cam, x, maps, size)
        except ValueError:
            if name not in variants:  # a network need not be defined everywhere
                raise
            continue
        if name not in variants or _finite(outputs):
            expected[name] = x, outputs
    # Photos that are in the training set have distances of 0, which says nothing of how large these are.
    sizes = measure_sizes([expected[name][1] for name in ("images", "changed") if name in expected])
    largest: dict[str, float] = {}
    for x, outputs in expected.values():
        for name, difference in compared(run(x), outputs, sizes).items():
            largest[name] = float(np.maximum(largest.get(name, 0.0), difference))  # NaN stays
    worst = max(largest, key=lambda name: np.nan_to_num(largest[name], nan=np.inf))
    if not largest[worst] <= MOST:
        magnified = _magnified(cam.model)
        if magnified is not None:
            raise NoProgramError(
                f"whitening divides component {magnified} by so little that it is nothing but rounding, which "
                f"{by} does otherwise",
                "fit fewer components, or on more images",
                "leave out whiten=True",
            )
        raise NoProgramError(
            f"{by} gives {worst} that differ from explain by {largest[worst]:.1g} of the largest", *ways_out
        )
    return largest


def _changed(images: Tensor) -> Tensor:
    """Return images that are in no training set: these, a seventh of their sides moved, with noise."""
    generator = torch.Generator().manual_seed(1)
    axes = tuple(range(2, images.dim()))
    rolled = images.roll([max(1, images.shape[axis] // 7) for axis in axes], axes)
    return rolled + 0.25 * images.std() * torch.randn(images.shape, generator=generator, device="cpu").to(images)


def describe_sample(
    run: Callable[[Tensor], Mapping[str, Any]], cam: ClosedFormCAM, maps: SignedMaps, images: Tensor,
    size: Sequence[int] | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the metadata of a sample, on which a file can be compared with ``explain`` wherever it is.

    It is the first image in at most eight blocks along each side, with noise; nobody is recognised in it.

    Args:
        run: as in :func:`checked`.
        cam: as in :func:`checked`.
        maps: as in :func:`checked`.
        images: as in :func:`checked`.
        size: as in :func:`checked`.

    Returns:
        ``sample``; nothing if ``explain`` does not take such an image, or rounding alone changes its outputs.
    """
    image, shape = images[0].double().cpu(), list(images.shape[1:])
    blocks = image.numpy()
    for axis, side in enumerate(shape[1:], 1):
        starts = -(-np.arange(count := min(BLOCKS, side)) * side // count)  # where sample_image begins another one
        blocks = np.add.reduceat(blocks, starts, axis) / np.diff([*starts, side]).reshape(
            -1, *[1] * (len(shape) - 1 - axis)
        )
    sample: dict[str, Any] = {"blocks": blocks.tolist(), "noise": [0.0] * shape[0]}
    rest = image - torch.from_numpy(sample_image(sample, shape)[0]).double()
    sample["noise"] = (3**0.5 * rest.flatten(1).std(1, correction=0)).tolist()
    x = torch.from_numpy(sample_image(sample, shape)).to(images)
    try:
        expected = _explained(cam, x, maps, size)
    except ValueError:
        return {}
    if not _finite(expected):
        return {}
    sizes = measure_sizes([name_outputs(maps, size), expected]) | {"maps": 1.0}
    numbers = sampled_outputs({name: tensor.cpu().numpy() for name, tensor in expected.items()})
    sample["outputs"] = {
        name: {"numbers": array.tolist(), "size": float(sizes[name])} for name, array in numbers.items()
    }
    differences = sampled_differences(sampled_outputs(dict(run(x))), sample["outputs"])
    return {"sample": sample} if max(differences.values()) <= MOST / 10 else {}


def _explained(cam: ClosedFormCAM, x: Tensor, maps: SignedMaps, size: Sequence[int] | None) -> dict[str, Tensor]:
    """Return the outputs of images by ``explain``, for the targets of maps."""
    previous, cam._warnings = cam._warnings, WarnOnce()  # of noise, nothing is to be told or remembered
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return name_outputs(cam.explain(x, maps.targets), size)
    finally:
        cam._warnings = previous


def _finite(outputs: Mapping[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for name, tensor in outputs.items() if name not in ERRORS)


def measure_sizes(outputs: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return the largest absolute number of each output."""
    differences: dict[str, float] = {}
    for of_images in outputs:
        for name, tensor in of_images.items():
            differences[name] = max(differences.get(name, 0.0), float(tensor.double().abs().nan_to_num(nan=0.0).max()))
    return differences


def _magnified(model: Any) -> int | None:
    """Return the component of which whitening makes the features' rounding larger than anyone would overlook."""
    for stage in model.head.stages if isinstance(model, PCASVMNet) else ():
        if isinstance(stage, Projection):
            size = stage.mean.square().sum().sqrt() + stage.divisor.max()
            rounding = torch.finfo(torch.float32).eps * size
            component = int(stage.divisor.argmin())
            if bool(16 * rounding > MOST * stage.divisor[component]):
                return component
    return None


def compared(
    outputs: Mapping[str, Any], expected: Mapping[str, Tensor], sizes: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return how far outputs are from expected ones: components, and the rest for images of the same class.

    Of a label that differs it is by how much the score of the right one is ahead: rounding may choose between equals.
    Maps of values that are nothing but rounding are not compared: at a point of the training set, a distance has no
    direction.

    Args:
        outputs: by name.
        expected: by name.
        sizes: the largest number of each output on more images, which differences are parts of; None: of these.
    """
    wanted: dict[str, Any] = {name: tensor.cpu().double().numpy() for name, tensor in expected.items()}
    actual = {name: torch.as_tensor(array).cpu().double().numpy() for name, array in outputs.items()}
    largest = {} if sizes is None else sizes
    everywhere = same = np.ones(len(wanted["values"]), bool)
    result = {}
    if "label" in wanted:
        count, scores = len(everywhere), wanted["scores"]
        label, other = (numbers.pop("label").astype(int).reshape(count, -1) for numbers in (wanted, actual))
        scores = scores.reshape(count, scores.shape[1], -1)
        same = (label == other).all(1)
        if not same.all():
            of_classes = max(label.max(), other.max()) < scores.shape[1]  # and not of pairs of classes
            rows, places = np.nonzero(label != other)
            right, wrong = (classes[rows, places] for classes in (label, other))
            ahead = np.abs(scores[rows, right, places] - scores[rows, wrong, places]) if of_classes else np.inf
            result["label"] = float(np.max(ahead) / max(np.abs(scores).max(), largest.get("scores", 0.0)))
    values = np.abs(wanted["values"])
    nothing = (values <= _NOTHING * max(values.max(initial=0.0), largest.get("values", 0.0))).any(1)
    shown = same & ~nothing
    for name in ("nu", "log_scale"):
        if np.isnan(actual[name]).any():
            return {name: np.nan}
    # What was factored out is a matter of taste. Far from all support vectors, the last bit of a feature changes the
    # size of a map more than its shape: sizes are compared by their logarithms.
    shift = actual.pop("log_scale") - wanted["log_scale"]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs, scale = np.log(wanted["nu"]), np.log(actual.pop("nu")) - np.log(wanted.pop("nu"))
    scale, logs = np.nan_to_num(scale + shift), np.nan_to_num(logs + wanted.pop("log_scale"), neginf=0.0)
    result["nu"] = float((np.abs(scale) / np.maximum(1, np.abs(logs)))[shown].max(initial=0.0))
    for name in ("maps", "opposite", "error", "remainder"):
        factor = shift if name == "remainder" else shift - scale
        if name in actual:
            actual[name] = actual[name] * np.exp(factor).reshape(*factor.shape, *[1] * (actual[name].ndim - 2))
    for name, numbers in wanted.items():
        rows = everywhere if name in _OF_FEATURES else same if name in _OF_VALUES else shown
        of = _BESIDE.get(name, name)
        size = max(np.abs(wanted[of][rows]).max(initial=0.0), largest.get(of, 0.0) * bool(rows.any()))
        unknown = name in ERRORS and np.isnan(actual[name]) & np.isnan(numbers)
        error = np.where(unknown, 0.0, np.abs(actual[name] - numbers))[rows].max(initial=0.0)
        result[name] = float(error / size) if size else float(error)
    return result


def about(targets: Sequence[Target], net: nn.Module) -> dict[str, Any]:
    """Return the description for :class:`.Sheets`: ``titles`` of targets, ``classes``, ``colours`` of figures.

    ``meanings`` are what the targets' values are, in words; of a head that tells anomalies, ``anomaly`` what these are.
    Where it is known, ``threshold`` is the largest anomaly with which a photo passes. Of a PCA's distance,
    ``expressing`` is how many components have 95 % of the variance of good photos, and ``usually_outside`` which part
    of the anomaly of those that were left out lies outside of these. For dense features also
    ``label_colours`` of classes, ``absent``, those that have none, ``heat``, the colours of anomalies and margins, and
    ``strongest``, the numbers of the targets that are about the strongest position.
    """
    head, dense = (net.head, net.is_dense) if isinstance(net, PCASVMNet) else (None, False)
    classes = None if head is None or head.classes_ is None else head.classes_.tolist()
    anomalies = head is not None and tells_anomalies(head)
    description = {
        "titles": [_title(target, classes, anomalies) for target in targets],
        "meanings": [describe_meaning(target, head, dense) for target in targets],
        "classes": classes,
        "colours": colour_table(),
    }
    if head is None:
        return description
    if anomalies:
        description["anomaly"] = describe_anomaly(head, dense)
    if (expressing := count_expressing(head, EXPRESSED)) is not None:
        good = (head.training_set.preparation or {})["good"]
        description |= {"expressing": expressing, "usually_outside": good.get("outside")}
    if anomalies and head.threshold is not None:
        description["threshold"] = head.threshold
    if head.normal is not None:
        description["normal"] = head.normal
    if dense:
        description["label_colours"] = [colour.lstrip("#") for colour in COLOURS]
        description |= {"heat": heat_table(), "strongest": list_strongest(targets)}
        description["absent"] = [name for name in classes or () if name in (BACKGROUND, head.normal)]
    return description


def describe_range(head: Head, anomalies: Iterable[Any]) -> dict[str, Any]:
    """Return where the colours of anomalies start and end, for :class:`.Sheets`: by the training set, if it is known.

    Args:
        head: the head.
        anomalies: of some images, which decide where the training set is not known; without any, {} is returned there.
    """
    ends, usual = anomaly_range(head), usual_reach(head)
    if ends is not None and usual is not None:  # both or none
        return {"anomaly_range": list(ends), "usual": usual}
    bounds = [(float(part.min()), float(part.max())) for part in anomalies]
    return {"anomaly_range": [min(bounds)[0], max(high for _, high in bounds)]} if bounds else {}


def _title(target: Target, classes: Sequence[Any] | None, anomalies: bool = False) -> str:
    """Return a target in a few words; of a head that tells anomalies, whose value is minus the anomaly."""
    if anomalies and isinstance(target, SVMTarget) and target.category is None:
        return ("anomaly" if target.sign == "-" else "normality") + describe_place(target)
    if isinstance(target, DensityTarget):
        return ("anomaly" if target.sign == "-" else "log-density") + describe_place(target)
    kinds: dict[Any, str] = {
        LogRatioTarget: "log-ratio of ",
        ProbabilityTarget: "probability of ",
        HotellingTarget: "T\N{SUPERSCRIPT TWO}",
    }
    words = kinds.get(type(target), "")
    if isinstance(target, PCATarget):
        words = f"component {target.component + 1}"
    elif isinstance(target, ResidualTarget):
        words = "Q"
    elif isinstance(target, SVMTarget | LogRatioTarget | ProbabilityTarget | ScoreTarget):
        category, versus = target.category, getattr(target, "versus", None)
        if category is None and _is_class(versus, classes):  # the strongest other one
            return (
                ("for " if getattr(target, "sign", "+") == "-" else "against ") + str(versus) + describe_place(target)
            )
        predicted = "predicted class" if getattr(target, "at", None) is None else "decided class"
        words += str(category) if category is not None else "value" if classes is None else predicted
        rivals = versus if isinstance(versus, tuple) else () if versus is None else (versus,)
        words += " / " * bool(rivals) + ", ".join(map(str, rivals))
    return "against " * (getattr(target, "sign", "+") == "-") + (words or repr(target)) + describe_place(target)


def _is_class(versus: Any, classes: Sequence[Any] | None) -> bool:
    return isinstance(versus, str | int | float) and versus in (classes or ())
