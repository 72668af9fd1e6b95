"""Files of models: a head's file with the backbone's name and a digest of its weights; nothing in it is run."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import Head, storage
from pytorch_grad_cam_pcasvm.model.backbones import Backbone, Origin, make_backbone
from pytorch_grad_cam_pcasvm.model.fitting import take_backbone
from pytorch_grad_cam_pcasvm.model.model import Model
from pytorch_grad_cam_pcasvm.model.preparation import read_preparation
from pytorch_grad_cam_pcasvm.network.features import features_of
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, each
from pytorch_grad_cam_pcasvm.network.modules import device_of, evaluating
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.pools import parse_pool, write_pool
from pytorch_grad_cam_pcasvm.network.tiles import TiledNet, tile_network
from pytorch_grad_cam_pcasvm.runtime.digests import digest_of_weights
from pytorch_grad_cam_pcasvm.runtime.errors import Way, refuse
from pytorch_grad_cam_pcasvm.runtime.numerics import full_precision

_SAME = 1e-4  # relative difference of features that is rounding, on a GPU as well
_SAME_HALF = 1e-2  # that of features in half precision


def write_model(model: Model, path: Path) -> None:
    """Write a model: see :meth:`.Model.save`."""
    net = model.net
    if callable(net.pool):
        raise ValueError(
            "the pool is a function, which no file can hold: move it into the backbone, whose output then is the "
            "features, or use pool='mean'"
        )
    layer = list(net.layer) if isinstance(net.layer, tuple) else net.layer
    backbone, _ = net.feature_source()
    about = {
        "backbone": model.origin.to_json(),
        "class": type(backbone).__name__,
        "weights": digest_of_weights(backbone),
        "probe": _probe(model),
        "layer": layer,
        "pool": write_pool(net.pool),
        "tiles": backbone.describe() if isinstance(backbone, TiledNet) else None,
        "layers": list(model.layers),
        "tokens": model.tokens,
        "inputs": model.inputs,
        "about": model.about,
    }
    net.head.tell_of_fit(always=True)
    storage.save(net.head.stages, path, net.head.training_set, json.dumps(about))


def load_model(
    path: str | PathLike[str],
    backbone: nn.Module | str | None = None,
    transform: Callable[[Any], Tensor] | None = None,
    *,
    weights: str | PathLike[str] | None = None,
    trusted: Sequence[str] = (),
) -> Model:
    """Return a model from a file that :meth:`.Model.save` or the command line's ``fit`` wrote.

    A backbone of torchvision or timm is made by its name, with the weights of their exact name; a file of weights is
    looked for beside the model, then where it was. Its weights are compared with those that the head was fitted
    behind, and the features of a picture with what they were then; later, nothing is compared.

    Args:
        path: the file.
        backbone: the network; None: the one named in the file. It is needed for a module that was passed to
            :func:`fit_model`, and, as ``"module:function"``, to run a function of that name.
        transform: turns a PIL image into an image; None: the one described in the file.
        weights: the file of the backbone's weights, if it is at another place.
        trusted: types of estimators without a gradient that may be read, as for :meth:`.Head.load`.

    Returns:
        The model, on the CPU or the device of a backbone that is passed.

    Raises:
        FileNotFoundError: the file, or that of the weights, does not exist.
        ValueError: the file is damaged or has no model; the backbone is needed; or it has other weights, or prepares
            pictures in another way, than when the head was fitted.

    Example:
        >>> model = load_model("model.safetensors")  # doctest: +SKIP
        >>> model.explain("photos/test").maps.shape  # doctest: +SKIP
        torch.Size([80, 17, 7, 7])
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no model {path}: make one with fit_model(...).save(path)")
    stages, training, written = storage.load(path, trusted)
    if written is None:
        raise ValueError(
            f"{path} is the file of a head alone, which does not say what it was fitted behind: "
            "PCASVMNet(backbone, Head.load(path), layer=..., pool=...)"
        )
    described = json.loads(written)
    head = Head(stages)
    head.training_set = training
    made = _make(path, _read_origin(described["backbone"]), described["class"], backbone, weights)
    if described.get("tiles") is not None:
        made = replace(made, net=tile_network(made.net, described["tiles"]))
    preparation = read_preparation(training.preparation, transform or _own_transform(made, training.preparation))
    layer = described["layer"]
    net = PCASVMNet(made.net, head, layer, pool=parse_pool(described["pool"])).eval()
    model = Model(
        net, preparation, tuple(described["layers"]), described["tokens"], made.origin, described["inputs"],
        described["about"],
    )  # fmt: skip
    _compare(model, described, path)
    return model


def _read_origin(written: Mapping[str, Any]) -> Origin:
    """Return where a backbone comes from; files before version 0.5 say no size."""
    size = written.get("size")
    return Origin(**{**written, "size": None if size is None else tuple(size)})


def _own_transform(made: Backbone, recorded: Any) -> Any:
    """Return the transform that comes with a user's function, where the file describes none."""
    return made.transform if made.own and (recorded or {}).get("steps") is None else None


def _make(
    path: Path, origin: Origin, class_name: str, backbone: nn.Module | str | None, weights: str | PathLike[str] | None
) -> Backbone:
    """Return the backbone of a model: the one that is given, or the one that its file names."""
    if backbone is not None and not isinstance(backbone, str):
        return replace(take_backbone(backbone, None), origin=origin)
    if backbone is None and origin.typed is None:
        refuse(
            ValueError,
            f"{path} was fitted behind a {class_name} that was passed as a module, which is not in the file",
            Way("pass it, load_model(path, backbone)", "backbone"),
        )
    if backbone is None and origin.library == "function":
        refuse(
            ValueError,
            f"{path} names a backbone that runs code of yours, {origin.name}, which is not run because a file says so",
            Way(f"name it yourself, load_model(path, {origin.name!r})", "backbone"),
        )
    file = _find_weights(path, origin, weights)
    same = backbone is None or backbone == origin.typed
    exactly = origin.weights if same and not file else None
    return make_backbone(backbone or origin.typed or "", file, exactly=exactly, size=origin.size)


def _find_weights(path: Path, origin: Origin, weights: str | PathLike[str] | None) -> Path | None:
    """Return the file of a backbone's weights: the one that is given, beside the model, or where it was; or None."""
    if weights is not None or origin.file is None:
        return None if weights is None else Path(weights)
    then = Path(origin.file)
    places = [path.parent / then.name, then]
    for place in places:
        if place.is_file():
            return place
    refuse(
        FileNotFoundError,
        f"the backbone's weights, {then.name}, are neither beside {path} nor at {then}",
        "put the file beside the model",
        Way("say where it is, load_model(path, weights=FILE)", "weights"),
    )


def _compare(model: Model, described: dict[str, Any], path: Path) -> None:
    """Refuse a backbone that is not the one that a head was fitted behind, or another preparation of pictures."""
    backbone, _ = model.net.feature_source()
    if digest_of_weights(backbone) != described["weights"]:
        raise ValueError(
            f"the {type(backbone).__name__} has other weights, or another dtype, than the one behind which {path} was "
            "fitted: load these weights, or fit the model again"
        )
    half = next((p.dtype for p in backbone.parameters()), None) in (torch.float16, torch.bfloat16)
    limit = _SAME_HALF if half else _SAME
    probe, names = _probe(model), {"noise": "noise", "picture": "a picture, which the transform prepares,"}
    for name, numbers in described["probe"].items():
        if name not in probe:  # no transform is known now
            continue
        then, now = np.array(numbers), np.array(probe[name])
        if then.shape != now.shape or not np.linalg.norm(then - now) <= limit * np.linalg.norm(then):
            raise ValueError(
                f"the features of {names[name]} are others than when {path} was fitted, though the weights are the "
                "same: the code of the backbone, its hooks, or the transform have changed; fit the model again"
            )


def _probe(model: Model) -> dict[str, list[float]]:
    """Return some features of noise, and of a picture as it is prepared: what the code of a network makes of them."""
    noise, images = np.random.default_rng(0), dict[str, Any]()
    images["noise"] = _make_noise(model.inputs, noise)
    if model.transform is not None:
        pixels = noise.integers(0, 256, (48, 64, 3), np.uint8)
        assert model.preparation is not None
        picture = Image.fromarray(pixels).resize(model.preparation.enlarge(320, 240))
        images["picture"] = model.transform(picture)[None]
    backbone, _ = model.net.feature_source()
    dtype, device = (
        next((p.dtype for p in backbone.parameters() if p.is_floating_point()), torch.float32),
        device_of(backbone),
    )
    rows = {}
    with evaluating(backbone), torch.no_grad(), full_precision(device):
        for name, x in images.items():
            x = each(lambda one: one.to(device, dtype) if one.is_floating_point() else one.to(device), x)
            _, source = model.net.feature_source(x)
            rows[name] = features_of(backbone, source, x).double().cpu().flatten()[:64].tolist()
    return rows


def _make_noise(inputs: Sequence[Mapping[str, Any]], noise: np.random.Generator) -> Any:
    """Return one image, or one row of several inputs, of noise; zeros where numbers are integers."""
    tensors = [
        torch.from_numpy(noise.standard_normal((1, *one["shape"])))
        if one["dtype"].startswith(("float", "bfloat"))
        else torch.zeros((1, *one["shape"]), dtype=getattr(torch, one["dtype"]))
        for one in inputs
    ]
    if len(tensors) == 1 and inputs[0]["name"] is None:
        return tensors[0]
    names = [one["name"] for one in inputs]
    return Inputs(tensors if None in names else dict(zip(names, tensors, strict=True)))
