"""Models read from their files: nothing in a file is run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import Head, storage
from pytorch_grad_cam_pcasvm.network.features import output_of
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_layer_name
from pytorch_grad_cam_pcasvm.network.pools import parse_pool
from pytorch_grad_cam_pcasvm.network.tiles import tile_network
from pytorch_grad_cam_pcasvm.runtime.digests import digest_of_weights
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse
from pytorch_grad_cam_pcasvm.runtime.rollback import hooked
from pytorch_grad_cam_pcasvm.studio.model.backbones import Backbone, make_backbone
from pytorch_grad_cam_pcasvm.studio.model.description import AGAIN, Description, Origin, parse_origin
from pytorch_grad_cam_pcasvm.studio.model.fitting import attach_head, take_backbone
from pytorch_grad_cam_pcasvm.studio.model.model import Model
from pytorch_grad_cam_pcasvm.studio.model.preparation import read_preparation, record_preparation, with_transform
from pytorch_grad_cam_pcasvm.studio.model.writing import make_noise, place_images, probe_features

_SAME = 1e-4  # relative difference of features that is rounding, on a GPU as well
_SAME_HALF = 1e-2  # that of features in half precision


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
    if not path.exists():
        raise FileNotFoundError(f"there is no model {path}: make one with fit_model(...).save(path)")
    stages, training, written = storage.load(path, trusted, "model.save(path)")
    if written is None:
        raise ValueError(
            f"{path} is the file of a head alone, which does not say what it was fitted behind: "
            "PCASVMNet(backbone, Head.load(path), layer=..., pool=...)"
        )
    try:
        described = Description.from_json(written)
        pool, stored = parse_pool(described.pool), read_preparation(training.preparation)
        head = Head.restore(stages, training)
        training = head.training_set
        labels = [] if head.classes_ is None else head.classes_.tolist()
        if labels != described.classes:
            raise ValueError(f"its classes are {described.classes!r:.40}, but those of the head {labels!r:.40}")
        if head.normal is not None and head.normal not in labels:
            raise ValueError(f"its normal class is {head.normal!r:.40}, which the head has not")
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or no valid model: {error}; {AGAIN}") from error
    network = _make(path, described, backbone, weights)
    if described.tiles is not None:
        network = replace(network, net=tile_network(network.net, described.tiles))
    if transform is None and network.own and stored is None:  # which comes with a user's function
        transform = network.transform
    preparation = stored if transform is None else with_transform(training.preparation, transform)
    net = attach_head(network.net, head, described.layer, pool)
    model = Model(
        net, preparation, tuple(described.layers), described.tokens, network.origin, described.inputs, described.about
    )
    _compare(model, described, path)
    if stored is None:
        record_preparation(training, preparation)
    return model


def _make(
    path: Path, described: Description, backbone: nn.Module | str | None, weights: str | PathLike[str] | None
) -> Backbone:
    """Return the backbone of a model: the one that is given, or the one that its file names."""
    origin = described.backbone
    if backbone is not None and not isinstance(backbone, str):
        return replace(take_backbone(backbone, None), origin=origin)
    if backbone is None and origin.typed is None:
        refuse(
            ValueError,
            f"{path} was fitted behind a {described.kind} that was passed as a module, which is not in the file",
            Fix("pass it, load_model(path, backbone)", "backbone"),
        )
    if backbone is None and origin.library == "function":
        refuse(
            ValueError,
            f"{path} names a backbone that runs code of yours, {origin.name}, which is not run because a file says so",
            Fix(f"name it yourself, load_model(path, {origin.name!r})", "backbone"),
        )
    file = _find_weights(path, origin, weights)
    return make_backbone(origin if backbone in (None, origin.typed) else parse_origin(backbone), file, size=origin.size)


def _find_weights(path: Path, origin: Origin, weights: str | PathLike[str] | None) -> Path | None:
    """Return the file of a backbone's weights: the one that is given, beside the model, or where it was; or None."""
    if weights is not None or origin.file is None:
        return None if weights is None else Path(weights)
    stored_file = Path(origin.file)
    places = [path.parent / stored_file.name, stored_file]
    for place in places:
        if place.is_file():
            return place
    refuse(
        FileNotFoundError,
        f"the backbone's weights, {stored_file.name}, are neither beside {path} nor at {stored_file}",
        "put the file beside the model",
        Fix("say where it is, load_model(path, weights=FILE)", "weights"),
    )


def _compare(model: Model, described: Description, path: Path) -> None:
    """Refuse a backbone that is not the one that a head was fitted behind, or another preparation of pictures."""
    backbone, _ = model.net.feature_source()
    if digest_of_weights(backbone) != described.weights:
        raise ValueError(
            f"the {type(backbone).__name__} has other weights, or another dtype, than the {described.backbone.name} "
            f"behind which {path} was fitted: load these weights, or fit the model again"
        )
    half = next((p.dtype for p in backbone.parameters()), None) in (torch.float16, torch.bfloat16)
    limit = _SAME_HALF if half else _SAME
    try:
        for layer in (*model.layers, *model.means):
            find_layer_name(backbone, layer)
        probe, shapes = probe_features(model), _measure_outputs(model, model.means)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the {type(backbone).__name__} does not run on what {path} was fitted on ({error}): the code of the "
            f"backbone has changed, or the file is damaged; {AGAIN}"
        ) from error
    for name, means in model.means.items():
        shape = shapes.get(name, ())[1:]
        fits = means.is_floating_point() and means.dim() == len(shape) and any(map(int.__eq__, means.shape, shape))
        if not fits or not bool(means.isfinite().all()):
            raise ValueError(f"{path} is damaged: its means of {name!r} are not those of this backbone; {AGAIN}")
    if "picture" in probe and "picture" not in described.probe and model.preparation and model.preparation.steps:
        raise ValueError(f"{path} is damaged: its probe has no picture, but it says how these are prepared; {AGAIN}")
    names = {"noise": "noise", "picture": "a picture, which the transform prepares,"}
    for name, numbers in described.probe.items():
        if name not in probe:  # no transform is known now
            continue
        stored, current = np.array(numbers), np.array(probe[name])
        if stored.shape != current.shape or not np.linalg.norm(stored - current) <= limit * np.linalg.norm(stored):
            raise ValueError(
                f"the features of {names[name]} are others than when {path} was fitted, though the weights are the "
                "same: the code of the backbone, its hooks, or the transform have changed; fit the model again"
            )


def _measure_outputs(model: Model, layers: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the outputs of all layers that run and give a tensor, by name."""
    backbone, _ = model.net.feature_source()
    x, shapes = place_images(make_noise(model.inputs, np.random.default_rng(0)), backbone), dict[str, tuple[int, ...]]()

    def note(name: str, output: Any) -> None:
        shapes[name] = tuple(output.shape) if isinstance(output, Tensor) else ()

    with evaluation_mode(backbone), torch.no_grad(), hooked() as hooks:
        for name in layers:
            hooks.after_call(backbone, name, note)
        output_of(backbone, None, x)
    return shapes
