"""ONNX files: an explanation that onnxruntime computes, on servers, phones and web pages, with what it is of."""

import json
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.cams.base import ClosedFormCAM
from pytorch_grad_cam_pcasvm.cams.doubts import Doubts
from pytorch_grad_cam_pcasvm.errors import NoProgramError
from pytorch_grad_cam_pcasvm.export.explainer import FORMAT, KEY
from pytorch_grad_cam_pcasvm.export.graph import outputs_of, traced_program
from pytorch_grad_cam_pcasvm.export.operators import decompositions
from pytorch_grad_cam_pcasvm.maps import SignedMaps
from pytorch_grad_cam_pcasvm.model.features import checked_images
from pytorch_grad_cam_pcasvm.model.modules import device_of
from pytorch_grad_cam_pcasvm.model.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime.digests import described, digest_of_module
from pytorch_grad_cam_pcasvm.runtime.files import atomically
from pytorch_grad_cam_pcasvm.runtime.pictures import colour_table
from pytorch_grad_cam_pcasvm.targets import (
    HotellingTarget,
    LogRatioTarget,
    PCATarget,
    ProbabilityTarget,
    ResidualTarget,
    ScoreTarget,
    SVMTarget,
    Target,
)
from pytorch_grad_cam_pcasvm.version import __version__

_MOST_BYTES = 2_000_000_000  # protobuf's limit
_MOST = 1e-3  # difference from explain, as a part of the largest value, which nobody would see on a map
# What is 0 but for rounding is compared with what it is subtracted from.
_BESIDE = {"baseline_values": "values", "remainder": "values"}


def onnx(
    cam: ClosedFormCAM,
    images: Tensor,
    path: str | PathLike[str],
    targets: Sequence[Target] | Target | None = None,
    *,
    size: Sequence[int] | None = None,
    opset: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    resize: int | None = None,
    interpolation: str = "bilinear",
) -> dict[str, Any]:
    """Write what ``cam.explain(images, targets)`` computes into one file for onnxruntime, for any number of images.

    The file is run on the given images, on the first of them alone and on noise, and compared with ``explain``, before
    it is written. Its input is ``images`` (N, ...), float32; its outputs are those of :func:`program`, by name. It has
    standard operators only. The network and the maps are in single precision, the head in double; erfcx, which ONNX
    lacks, is a rational function, right to 2e-15.

    Metadata say what it is of, as JSON under the key ``"pytorch_grad_cam_pcasvm"``: ``method``, ``options``,
    ``targets`` and their ``titles``, ``classes``, ``target_layers``, ``features``, ``input`` (``shape``, and how a
    picture becomes one), ``versions``, ``digest`` of network and head as they are now, ``colours`` of the figures from
    -nu to nu, as ``rrggbb``, and ``differences`` from ``explain``, the largest by output, as parts of the largest value
    (of ``nu``, its logarithm).

    Args:
        cam: a method, but Score-CAM, Ablation-CAM and ShapCAM.
        images: images to try it on, as the network takes them, shape (N, ...).
        path: the file.
        targets: K targets, each for all images; None: every component, then the predicted class.
        size: (H, W) to upsample maps to; None: their own resolution.
        opset: version of ONNX's operators; None: torch's own choice.
        mean: what was subtracted from each channel of pictures in [0, 1] for the network, for those who read the file.
        std: what they were divided by then.
        resize: the shorter side of a picture, of which the middle is cut out; None: pictures are brought to the size of
            the images, whatever their shape.
        interpolation: ``"bilinear"`` or ``"bicubic"``, both smoothed as by Pillow.

    Returns:
        The metadata.

    Raises:
        ImportError: the ``[export]`` extra is not installed.
        NoProgramError: the method, a target or the network needs to look at numbers, or autograd; an operator is not
            in ONNX; or onnxruntime gives other numbers.
        TypeError: it is not a method.
        ValueError: as in ``explain``, or precision is not single.

    Example:
        >>> from pytorch_grad_cam_pcasvm import export
        >>> told = export.onnx(cam, images, "explainer.onnx")
        >>> told["targets"], max(told["differences"].values()) < 1e-5
        (['PCATarget(0)', 'PCATarget(1)', 'PCATarget(2)', 'SVMTarget()'], True)
    """
    runtime = _runtime()
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if interpolation not in ("bilinear", "bicubic"):
        raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {interpolation!r}")
    program, made = traced_program(cam, images, targets, size)
    if resize is not None and resize < max(images.shape[2:]):
        raise ValueError(f"resize={resize} is smaller than the images, {tuple(images.shape[2:])}, that are cut out")
    for name, numbers in (("mean", mean), ("std", std)):
        if numbers is not None and len(numbers) != images.shape[1]:
            raise ValueError(f"{name} needs {images.shape[1]} numbers, one for each channel, got {len(numbers)}")
    mean, std = (None if each is None else [float(x) for x in each] for each in (mean, std))
    pictures = {"mean": mean, "std": std, "resize": resize, "interpolation": interpolation}
    if sum(value.nbytes for value in (*cam.model.parameters(), *cam.model.buffers())) > _MOST_BYTES:
        raise NoProgramError("a network of more than 2 GB does not fit into one ONNX file", "use export.program")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's own, about itself
            converted = torch.onnx.export(
                program.run_decompositions(decompositions()), dynamo=True, opset_version=opset, verbose=False,
                input_names=["images"], output_names=[*outputs_of(made, size)], external_data=False,
            )  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        raise NoProgramError(
            f"torch cannot bring this network to ONNX ({str(error.__cause__ or error).splitlines()[0]})",
            "use export.program, which needs no ONNX",
            "pass another opset",
        ) from error
    assert converted is not None
    given = checked_images(images).to(device_of(cam.model))
    told = _metadata(cam, made, given, pictures)
    model = converted.model_proto
    symbol = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = dim.dim_param.replace(symbol, "N")
    told["differences"] = _differences(runtime, model.SerializeToString(), cam, made, given, size)
    model.metadata_props.add(key=KEY, value=json.dumps(told))
    with atomically(path) as file:
        file.write(model.SerializeToString())
    return told


def _runtime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError as error:
        raise ImportError(f"export.onnx needs {error.name}: pip install 'pytorch_grad_cam_pcasvm[export]'") from error
    return onnxruntime


def _metadata(cam: ClosedFormCAM, made: SignedMaps, images: Tensor, pictures: dict[str, Any]) -> dict[str, Any]:
    net = cam.model
    head = net.head if isinstance(net, PCASVMNet) else None
    classes = None if head is None or head.classes_ is None else head.classes_.tolist()
    backbone, source = net.feature_source(images) if isinstance(net, PCASVMNet) else (net, None)
    digest = {"network": digest_of_module(backbone)} | ({} if head is None else {"head": head.digest()})
    names = ("baseline", "combine", "attention")
    return {
        "format": FORMAT,
        "method": type(cam).__name__,
        "options": {name: described(getattr(cam, name)) for name in names if hasattr(cam, name)},
        "targets": [repr(target) for target in made.targets],
        "titles": [_title(target, classes) for target in made.targets],
        "classes": classes,
        "pairwise_scores": getattr(getattr(head, "voting", None), "pairwise_scores", False),
        "target_layers": list(made.layers),
        "features": repr(source),
        "input": {"shape": list(images.shape[1:])} | pictures,
        "colours": colour_table(),
        "versions": {"pytorch_grad_cam_pcasvm": __version__, "torch": torch.__version__},
        "digest": digest,
    }


def _title(target: Target, classes: Sequence[Any] | None) -> str:
    """Return what a target is, in a few words."""
    kinds = {
        LogRatioTarget: "log-ratio of ",
        ProbabilityTarget: "probability of ",
        HotellingTarget: "T\N{SUPERSCRIPT TWO}",
    }
    words = kinds.get(type(target), "")  # type: ignore[arg-type]
    if isinstance(target, PCATarget):
        words = f"component {target.component + 1}"
    elif isinstance(target, ResidualTarget):
        words = "Q"
    elif isinstance(target, SVMTarget | LogRatioTarget | ProbabilityTarget | ScoreTarget):
        category, versus = target.category, getattr(target, "versus", None)
        words += str(category) if category is not None else "value" if classes is None else "predicted class"
        rivals = versus if isinstance(versus, tuple) else () if versus is None else (versus,)
        words += " / " * bool(rivals) + ", ".join(map(str, rivals))
    return "against " * (getattr(target, "sign", "+") == "-") + (words or repr(target))


def _differences(
    runtime: Any, model: bytes, cam: ClosedFormCAM, made: SignedMaps, images: Tensor, size: Sequence[int] | None
) -> dict[str, float]:
    """Return the largest difference of every output from ``explain``, as a part of its largest value."""
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((3, *images.shape[1:]), generator=generator).to(images) * images.std() + images.mean()
    largest: dict[str, float] = {}
    for x in (images, images[:1], noise):
        doubts, cam._doubts = cam._doubts, Doubts()  # of noise, nothing is to be told or remembered
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = outputs_of(cam.explain(x, made.targets), size)
        finally:
            cam._doubts = doubts
        found = dict(zip(expected, session.run([*expected], {"images": x.cpu().numpy()}), strict=True))
        for name, difference in _compared(found, expected).items():
            largest[name] = float(np.maximum(largest.get(name, 0.0), difference))  # NaN stays
    worst = max(largest, key=lambda name: np.nan_to_num(largest[name], nan=np.inf))
    if not largest[worst] <= _MOST:
        raise NoProgramError(
            f"onnxruntime gives {worst} that differ from explain by {largest[worst]:.1g} of the largest",
            "use export.program, or report this network",
        )
    return largest


def _compared(found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far outputs are from what is expected, for images of the same predicted class."""
    wanted: dict[str, Any] = {name: tensor.double().cpu().numpy() for name, tensor in expected.items()}
    given = {name: np.asarray(array, np.float64) for name, array in found.items()}
    same = np.ones(len(wanted["values"]), bool)
    if "label" in wanted:  # which of two equals is the larger one, rounding says
        same = wanted.pop("label") == given.pop("label")
    for name in ("nu", "log_scale"):
        if np.isnan(given[name]).any():
            return {name: np.nan}
    # What was factored out is a matter of taste. Far from all support vectors, the last bit of a feature changes the
    # size of a map more than its shape: sizes are compared by their logarithms.
    shift = given.pop("log_scale") - wanted["log_scale"]
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes, scale = np.log(wanted["nu"]), np.log(given.pop("nu")) - np.log(wanted.pop("nu"))
    scale, sizes = np.nan_to_num(scale + shift), np.nan_to_num(sizes + wanted.pop("log_scale"), neginf=0.0)
    result = {"nu": float((np.abs(scale) / np.maximum(1, np.abs(sizes)))[same].max(initial=0.0))}
    for name, factor in (("maps", shift - scale), ("opposite", shift - scale), ("remainder", shift)):
        if name in given:
            given[name] = given[name] * np.exp(factor).reshape(*factor.shape, *[1] * (given[name].ndim - 2))
    for name, numbers in wanted.items():
        if not same.any():
            continue
        size = np.abs(wanted[_BESIDE.get(name, name)][same]).max(initial=0.0)
        error = np.abs(given[name] - numbers)[same].max(initial=0.0)
        result[name] = float(error / size) if size else float(error)
    return result
