"""Heads in files: tensors as safetensors, the rest as JSON in the file's header. No pickle.

A part of a head (stage, kernel, calibration) is written as its type and the arguments of its constructor, which every
part keeps as attributes of the same names; a vote as its kind, with the arguments of the function that made it.
Estimators without a gradient are written by skops, as one tensor of bytes, and read with a list of the types that they
may be made of. Heads of the formats 2 and 3 are read: an argument that a file lacks has its default, and old names of
arguments are in ``_RENAMED``.
"""

import base64
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialised
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import decisions, distances, elementwise, kernels, stages, vote
from pytorch_grad_cam_pcasvm.head.covariance_pca import CovariancePCA
from pytorch_grad_cam_pcasvm.head.enumerated import Enumerated
from pytorch_grad_cam_pcasvm.head.stage import Facts, Stage
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse, warn
from pytorch_grad_cam_pcasvm.runtime.files import atomically
from pytorch_grad_cam_pcasvm.runtime.formats import MODEL, MODEL_RESAMPLED

HEAD_2 = "pytorch_grad_cam_pcasvm head 2"
HEAD_3 = "pytorch_grad_cam_pcasvm head 3"  # says how pictures are prepared, which earlier versions would not obey
HEAD_4 = "pytorch_grad_cam_pcasvm head 4"  # has resampled heads
MAPS_1 = "pytorch_grad_cam_pcasvm maps 1"  # of version 0.2

# Tensors beside those of the stages, which have numbers: earlier versions read heads without them, and they are in no
# digest of a head, as nothing is computed with them.
_EXAMPLES, _PREPARATION, _MEANS, _FACTS, _ESTIMATORS = "examples", "preparation", "activations/", "seen", "estimators"
_REFITS, _OF_REFIT, _SUMS = "resampled", "resampled/", "sums/"
_CHANNEL_MEANS = "means/"  # of files up to version 0.5: the same for all positions

# Arguments that had other names in files of earlier versions.
_RENAMED = {"scores_are_margins": "scores_are_means"}

# Besides those that skops trusts by itself, what estimators in a file may be made of.
_TRUSTED = {
    "catboost.core.CatBoostClassifier",
    "catboost.core.CatBoostRegressor",
    "collections.OrderedDict",
    "lightgbm.basic.Booster",
    "lightgbm.sklearn.LGBMClassifier",
    "lightgbm.sklearn.LGBMRegressor",
    "sklearn.calibration._CalibratedClassifier",
    "sklearn.calibration._SigmoidCalibration",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.metrics._dist_metrics.EuclideanDistance64",
    "sklearn.neighbors._kd_tree.KDTree",
    "sklearn.tree._tree.Tree",
    "sklearn.utils._bunch.Bunch",
    "xgboost.core.Booster",
    "xgboost.sklearn.XGBClassifier",
    "xgboost.sklearn.XGBRegressor",
}


class Example(NamedTuple):
    """A training image: its name, and a small picture of it, a WebP or JPEG file.

    Example:
        >>> net.head.examples[0] = Example("cat/7.jpg", picture)  # doctest: +SKIP
    """

    name: str
    picture: bytes = b""


# Parts by name: classes, whose instances keep the arguments of their constructors, and functions that make votes.
_PARTS: dict[str, Callable[..., Any]] = vote.KINDS | {
    part.__name__: part
    for module in (stages, elementwise, distances, decisions, kernels)
    for part in vars(module).values()
    if isinstance(part, type) and part.__module__ == module.__name__
}


def write(path: str | PathLike[str], tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors and strings to a safetensors file, with a checksum."""
    path = Path(path).resolve()  # what a link points to, not the link
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save in: make it first")
    # Clones: the format has no views.
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    written = memoryview(serialised(tensors, metadata | {"sha256": _digest_file(metadata, tensors)}))
    # The library writes the strings in an order of its own, another one every time.
    length = int.from_bytes(written[:8], "little")
    header = json.dumps(json.loads(bytes(written[8 : 8 + length])), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    with atomically(path) as file:
        for part in (len(header).to_bytes(8, "little"), header, written[8 + length :]):
            file.write(part)


def read(path: str | PathLike[str], writer: str, formats: Sequence[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the strings and the tensors, on the CPU, of a file that :func:`write` wrote.

    Args:
        path: the file.
        writer: what writes such files, for messages.
        formats: those that can be read, the newest last.

    Raises:
        ValueError: the file is truncated, was changed, or has another format.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: name the file that {writer} wrote")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {
                name: file.get_tensor(name).clone()  # aligned as any other tensor: else the last bit may differ
                for name in file.keys()  # noqa: SIM118
            }
    except SafetensorError as error:
        problem = f"{path} is not a safetensors file, or is truncated or damaged ({error})"
        raise ValueError(f"{problem}: make one with {writer}") from error
    file_format = metadata.get("format", "")
    if file_format not in formats:
        if any(file_format.startswith(accepted[:-1]) for accepted in formats):
            raise ValueError(f"{path} was written by a newer version, or is damaged: update pytorch_grad_cam_pcasvm")
        raise ValueError(f"{path} is not a file that {writer} wrote, or is damaged: write it again")
    if file_format == MAPS_1:
        problem = f"{path} is of version 0.2 and has no checksum, by which damage would be seen"
        warn(f"{problem}: write it again with {writer}", UserWarning)
    elif metadata.get("sha256") != _digest_file(metadata, tensors):
        problem = f"{path} was changed since it was written: its checksum does not match"
        raise ValueError(f"{problem}; write it again with {writer}")
    return metadata, tensors


@dataclass
class TrainingSet:
    """What is known of the images that a head was fitted on, besides its stages.

    Attributes:
        examples: names and small pictures of training images, by row.
        preparation: how pictures became images: ``resize`` (``"stretch"``, ``"pad"``, ``"crop"``, or None for a
            transform of the user's), ``white_level`` and ``float_white``, as in ``export.onnx``, and ``exif`` where
            photos are turned as EXIF says; of heads from the command line also the layers of the ``features`` and
            their ``pool``, and of ``fit --normal`` the ``normal`` class. None: not known.
        means: of layers, by name: the means over images, in the shape of the layer's output for one image; of images
            of several sizes with one number a channel in the place of all positions. Contributions start near them.
        resamples: the resampled heads, see :attr:`.Head.resamples`.
        sums: of the features of good photos, a :class:`.CovariancePCA`, so that more can be added; None: not kept.

    Example:
        >>> TrainingSet(means={"layer2": torch.zeros(8, 7, 7)}).means["layer2"].shape
        torch.Size([8, 7, 7])
    """

    examples: dict[int, Example] = field(default_factory=dict)
    preparation: dict[str, Any] | None = None
    means: dict[str, Tensor] = field(default_factory=dict)
    resamples: Any = None
    sums: CovariancePCA | None = None


def save(parts: list[Stage], path: str | PathLike[str], training: TrainingSet, model: str | None = None) -> None:
    """Write the stages of a head, and the facts about its training images, to a file: see ``Head.save``.

    Args:
        parts: the stages.
        path: the file.
        training: what is known of the training images.
        model: of the file of a model, what it says besides, as JSON.
    """
    tensors: dict[str, Tensor] = {}
    head = json.dumps(_encode(parts, tensors))
    if training.examples:
        tensors[_EXAMPLES] = _as_tensor([
            [row, name, base64.b64encode(picture).decode()] for row, (name, picture) in training.examples.items()
        ])
    if training.preparation is not None:
        tensors[_PREPARATION] = _as_tensor(training.preparation)
    last = parts[-1]
    if last.asked_estimators:
        tensors[_ESTIMATORS] = torch.frombuffer(bytearray(_as_skops(last)), dtype=torch.uint8)
    tensors |= {_MEANS + name: means for name, means in training.means.items()}
    if training.sums is not None:
        tensors |= _encode_sums(training.sums)
    statistics = [stage.facts.to_numbers() for stage in _list_stages(parts)]
    if any(statistics):
        tensors[_FACTS] = _as_tensor(statistics)
    is_new = training.preparation is not None or last.asked_estimators
    file_format = (HEAD_3 if is_new else HEAD_2) if model is None else MODEL
    if training.resamples is not None:
        tensors |= encode_refits([list(refit.stages) for refit in training.resamples.heads])
        file_format = HEAD_4 if model is None else MODEL_RESAMPLED
    strings = {"format": file_format, "head": head}
    write(path, tensors, strings if model is None else strings | {"model": model})


def _encode_sums(sums: CovariancePCA) -> dict[str, Tensor]:
    """Return sums as tensors: of their scatter a triangle, in single precision, which is exact enough to add to."""
    triangle = sums.scatter_[np.triu_indices(len(sums.mean_))]
    return {
        _SUMS + "count": torch.tensor(sums.n_samples_seen_),
        _SUMS + "mean": torch.from_numpy(sums.mean_),
        _SUMS + "scatter": torch.from_numpy(triangle).float(),
    }


def _decode_sums(tensors: Mapping[str, Tensor]) -> CovariancePCA | None:
    if _SUMS + "count" not in tensors:
        return None
    count, mean, triangle = (tensors[_SUMS + name] for name in ("count", "mean", "scatter"))
    scatter = np.zeros((len(mean), len(mean)))
    scatter[np.triu_indices(len(mean))] = triangle.double().numpy()
    return CovariancePCA().add_sums(int(count), mean.numpy(), scatter + np.triu(scatter, 1).T)


def encode_refits(refits: Sequence[list[Stage]]) -> dict[str, Tensor]:
    """Return resampled heads as tensors, in single precision: their spread needs no more digits."""
    encoded, tensors = [], dict[str, Tensor]()
    for number, parts in enumerate(refits):
        own: dict[str, Tensor] = {}
        encoded.append(_encode(parts, own))
        if parts[-1].asked_estimators:
            own[_ESTIMATORS] = torch.frombuffer(bytearray(_as_skops(parts[-1])), dtype=torch.uint8)
        tensors |= {
            f"{_OF_REFIT}{number}/{name}": tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in own.items()
        }
    return tensors | {_REFITS: _as_tensor(encoded)}


def _split_refits(tensors: Mapping[str, Tensor]) -> list[tuple[list[Any], dict[str, Tensor]]]:
    """Return the entries and tensors of resampled heads in a file."""
    refits = []
    for number, entries in enumerate(_from_tensor(tensors.get(_REFITS), [])):
        prefix = f"{_OF_REFIT}{number}/"
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        refits.append((
            entries,
            {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in own.items()},
        ))
    return refits


def _decode_stages(entries: Any, tensors: Mapping[str, Tensor]) -> tuple[list[Stage], dict[str, Any] | None]:
    """Return stages by their entries in a file, and the entry of estimators without a gradient behind them, or None."""
    enumerated = None
    match entries:
        case [*_, {"part": "Enumerated"}]:
            enumerated = entries.pop()
    parts = [_decode(part, tensors) for part in entries]
    if not all(isinstance(part, Stage) for part in parts):
        raise ValueError("its parts are not stages")
    if enumerated is not None and (_ESTIMATORS not in tensors or not isinstance(enumerated.get("n_inputs"), int)):
        raise ValueError("it has no estimators")
    return parts, enumerated


def _as_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(tensor: Tensor | None, missing: Any) -> Any:
    return missing if tensor is None else json.loads(tensor.numpy().tobytes())


def _list_stages(parts: Sequence[Stage]) -> list[Stage]:
    """Return stages and the stages inside them, in an order that is the same in every process."""
    return [module for part in parts for module in part.modules() if isinstance(module, Stage)]


def digest_stages(parts: list[Stage]) -> str:
    """Return the digest of the stages of a head, which is also stored in its file."""
    tensors: dict[str, Tensor] = {}
    return _digest_file({"head": json.dumps(_encode(parts, tensors))}, tensors)


def load(
    path: str | PathLike[str], trusted: Sequence[str] = (), writer: str = "net.head.save(path)"
) -> tuple[list[Stage], TrainingSet, str | None]:
    """Read a head's stages, on the CPU, the facts about its training images, and a model's description.

    Args:
        path: the file.
        trusted: types of estimators that may be read.
        writer: what writes such files, for messages.

    Returns:
        The stages, the training set, and the description of a model, or None.

    Raises:
        ValueError: the file is damaged.
    """
    _refuse_pickles(Path(path))
    metadata, tensors = read(path, writer, [MODEL, MODEL_RESAMPLED, HEAD_2, HEAD_3, HEAD_4])
    try:
        parts, enumerated = _decode_stages(json.loads(metadata["head"]), tensors)
        heads = [(parts, enumerated, tensors)]
        heads += [(*_decode_stages(entries, own), own) for entries, own in _split_refits(tensors)]
        listed = _from_tensor(tensors.get(_EXAMPLES), [])
        training = TrainingSet(
            {int(row): Example(str(name), base64.b64decode(picture)) for row, name, picture in listed},
            _from_tensor(tensors.get(_PREPARATION), None),
            {name.removeprefix(_MEANS): means for name, means in tensors.items() if name.startswith(_MEANS)},
            sums=_decode_sums(tensors),
        )
        for stage, numbers in zip(_list_stages(parts), _from_tensor(tensors.get(_FACTS), []), strict=False):
            stage.facts = Facts.from_numbers(numbers)
        if not isinstance(training.preparation, dict | None):
            raise ValueError("its preparation is no mapping")
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or no valid head: {error}; write it again with {writer}") from error
    left_out = [name.removeprefix(_CHANNEL_MEANS) for name in tensors if name.startswith(_CHANNEL_MEANS)]
    if left_out:
        warn(
            f"{path} is of version 0.5 or older, which kept one mean a channel of the layers {', '.join(left_out)}, "
            "and not one for each position: these means are left out, and maps of these layers start as without a "
            "mean. Fit the model again, or pass mean=mean_activations(net, loader, layer)",
            UserWarning,
        )
    for stages_, decision, own in heads:
        if decision is not None:
            stages_.append(_enumerated(own[_ESTIMATORS], trusted, **decision))
    training.resamples = [refit for refit, _, _ in heads[1:]] or None
    return parts, training, metadata.get("model")


def skops_io() -> Any:
    """Return ``skops.io``.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how.
    """
    try:
        from skops import io
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "heads without a gradient and .skops files need skops: pip install 'pytorch_grad_cam_pcasvm[trees]'"
        ) from error
    return io


def _as_skops(decision: Stage) -> bytes:
    return skops_io().dumps(decision.asked_estimators)


def own_types(parts: Sequence[Stage]) -> list[str]:
    """Return the types in a head that are read from its file only where they are ``trusted``."""
    last = parts[-1]
    return _find_unknown_types(_as_skops(last)) if last.asked_estimators else []


def _find_unknown_types(data: bytes) -> list[str]:
    return sorted(set(skops_io().get_untrusted_types(data=data)) - _TRUSTED)


def from_skops(data: bytes, trusted: Sequence[str] = ()) -> Any:
    """Return fitted estimators from a file of skops, of types that are known to be harmless, or ``trusted``.

    Raises:
        ModuleNotFoundError: skops is not installed.
        ValueError: there are others.
    """
    trusted = [trusted] if isinstance(trusted, str) else trusted
    unknown = [name for name in _find_unknown_types(data) if name not in trusted]
    if unknown:
        refuse(
            ValueError,
            f"the head has parts of the types {', '.join(unknown)}, which are not read from files, "
            "as they may run code",
            Fix(f"if you trust them and the file, load it with trusted={unknown}", "trusted"),
        )
    return skops_io().loads(data, trusted=[*_TRUSTED, *trusted])


def _enumerated(
    data: Tensor, trusted: Sequence[str], part: str, fingerprint: str, n_inputs: int, reason: str,
    ways_out: Sequence[str], names: Sequence[str] | None = None,
) -> Enumerated:  # fmt: skip
    """Return the decision of the estimators in a file, if it has the values that it had when it was written."""
    decision = Enumerated.of(from_skops(data.numpy().tobytes(), trusted), n_inputs, reason, ways_out)
    if decision.fingerprint() != fingerprint:
        refuse(
            ValueError,
            f"the {decision.predictor.name} in it has other values than when it was written, by another version of its "
            "library",
            "install that version",
            "fit the head again",
        )
    if names is not None:
        decision.classes = list(names)
    return decision


def _refuse_pickles(path: Path) -> None:
    """Refuse a file of joblib or pickle, which would be run, not read."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        begin = file.read(9)
    # A safetensors file begins with the length of its header, eight bytes, and the header with a brace.
    is_pickle = begin[:2] in (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")
    if begin[8:] != b"{" and (is_pickle or path.suffix in (".joblib", ".pkl", ".pickle")):
        raise ValueError(
            f"{path} is a pickle, as joblib writes it, which would run code when it is read: if you trust it, load it "
            f"in Python, fitted = joblib.load({path.name!r}), and pass it to PCASVMNet(backbone, fitted), or write a "
            "head for the command line with Head.of(fitted).save('head.safetensors')"
        )


def constants(parts: list[Stage]) -> str:
    """Return the parts of a state dict that are not tensors as JSON; "" if a stage is not of this package."""
    try:
        return json.dumps(_encode(parts, {}))
    except TypeError:
        return ""


def compute_same(parts: list[Stage], others: list[Stage]) -> bool:
    """Return whether stages compute the same values to the last bit."""
    if parts == others:  # the same stages
        return True
    # What a Projection knows of its inverse, which one from an earlier version's file does not, changes nothing.
    one, two = (
        {
            name: x
            for name, x in nn.ModuleList(stages_).state_dict().items()
            if name.split(".")[-1] not in stages.Projection.beside
        }
        for stages_ in (parts, others)
    )
    return (
        agree(constants(parts), constants(others))
        and one.keys() == two.keys()
        and all(torch.equal(x.cpu(), two[name].cpu()) for name, x in one.items())
    )


def agree(state: str, expected: str) -> bool:
    """Return whether two heads have the same ``constants``, but for entries that earlier versions lack."""
    if not state or not expected:
        return state == expected
    return _within(*(json.loads(part, object_hook=_without_tensors) for part in (state, expected)))


def _without_tensors(entry: dict[str, Any]) -> dict[str, Any] | None:
    return None if entry.keys() == {"tensor"} else {_RENAMED.get(key, key): value for key, value in entry.items()}


def _within(part: Any, whole: Any) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return part.keys() <= whole.keys() and all(_within(value, whole[key]) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(_within, part, whole))
    return part == whole


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON; tensors go to ``tensors``, under their numbers."""
    match value:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value.detach().cpu()
            return {"tensor": name}
        case np.ndarray() if value.dtype.kind in "mM":
            raise TypeError(f"class labels of type {value.dtype} cannot be saved: fit on their strings")
        case np.ndarray():
            return {"labels": value.tolist(), "dtype": "object" if value.dtype == object else value.dtype.str}
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple() | nn.ModuleList():
            return [_encode(item, tensors) for item in value]
        case vote.Vote() if value.kind:
            arguments = {name: _encode(argument, tensors) for name, argument in value.arguments.items()}
            return {"part": value.kind, "arguments": arguments}
        case Enumerated():
            attributes = {name: getattr(value, name) for name in ("n_inputs", "reason", "ways_out")}
            if value.names is not None:
                attributes["names"] = value.names
            return {"part": "Enumerated", "fingerprint": value.fingerprint(), **attributes}
    part_type: Any = type(value)
    if _PARTS.get(part_type.__name__) != part_type:
        raise TypeError(f"a head with a {part_type.__name__} cannot be saved: only the package's own parts can")
    names = inspect.signature(part_type).parameters
    return {"part": part_type.__name__, "arguments": {name: _encode(getattr(value, name), tensors) for name in names}}


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"tensor": name}:
            if name not in tensors:
                raise ValueError(f"it has no tensor {name!r}")
            return tensors[name]
        case {"labels": labels, "dtype": dtype}:
            return np.array(labels, dtype=dtype)
        case {"part": name, "arguments": arguments}:
            if name not in _PARTS:
                raise ValueError(f"it has an unknown part, {name!r}")
            keywords = {_RENAMED.get(key, key): _decode(argument, tensors) for key, argument in arguments.items()}
            return _PARTS[name](**keywords)
        case list():
            return [_decode(item, tensors) for item in value]
    return value


def _digest_file(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    # Of a head its JSON, which says what is in which tensor, and no more: older files and atlases have that digest.
    entries = {key: value for key, value in metadata.items() if key != "sha256"}
    text = metadata.get("head") or json.dumps([entries, sorted(tensors)], sort_keys=True)
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors, key=lambda name: (len(name), name)):  # 10 after 9
        tensor = tensors[name]
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
