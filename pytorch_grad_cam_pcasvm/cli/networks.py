"""Networks: a backbone by its name, with its transform, and the head behind it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.preparation import preparation_of
from pytorch_grad_cam_pcasvm.model.backbones import Backbone, allow_own_modules, make_backbone
from pytorch_grad_cam_pcasvm.model.preparation import Preparation

RUN = "python -m pytorch_grad_cam_pcasvm"


def network(options: Any) -> tuple[Any, Preparation]:
    """Return a backbone with its head, and the preparation of pictures that the head was fitted with.

    Raises:
        ValueError: there is no such backbone, or none of the layers named.
    """
    head = head_of(options.head, options.trust)  # before weights are downloaded
    if isinstance(head, package.Head):  # and not of skops, which says nothing
        as_fitted(options, head.training_set.preparation or {})
    made = backbone_of(options)
    _check_layers(made.net, options.layer)
    net = package.PCASVMNet(made.net, head, source(options), pool=pool(options))
    return net, preparation_of(made.transform, made.own, options, net.head.training_set.preparation)


def _check_layers(backbone: Any, layers: Sequence[str]) -> None:
    """Refuse names of layers that there are not, before anything else takes long."""
    from pytorch_grad_cam_pcasvm.network.features import FeatureSource
    from pytorch_grad_cam_pcasvm.network.modules import network_of

    for layer in layers if layers != ["auto"] else ():
        FeatureSource.of(network_of(backbone), layer)


def as_fitted(options: Any, recorded: Mapping[str, Any]) -> None:
    """Take the layers of the features, and their pool, from what a head says.

    Raises:
        ValueError: other ones were typed.
    """
    for name in ("features", "pool"):
        typed, of_head = getattr(options, name), recorded.get(name)
        if typed is not None and of_head not in (None, typed):
            words = [" ".join(value) if isinstance(value, list) else value for value in (typed, of_head)]
            raise ValueError(
                f"--{name} {words[0]}, but the head was fitted with {words[1]}: leave it out, or fit again"
            )
        setattr(options, name, typed if of_head is None else of_head)


def source(options: Any) -> str | list[str]:
    """Return the name of the layer that the features come from, or the names of several."""
    layers = [options.layer] if isinstance(options.layer, str) else options.layer
    if layers == ["auto"] and not options.features:
        raise ValueError("--layer auto finds the layer of the maps: name that of the features with --features")
    if len(layers) > 1 and not options.features:
        raise ValueError("--layer names several layers of the maps: name that of the features with --features")
    names = options.features or layers
    return names[0] if len(names) == 1 else names


def pool(options: Any) -> Any:
    """Return how features are pooled.

    Raises:
        ValueError: there is no such pool.
    """
    from pytorch_grad_cam_pcasvm.network.pools import parse_pool

    return parse_pool(options.pool or "mean")


def head_of(path: Path, trusted: Sequence[str] = ()) -> Any:
    """Return the head in a file, which may have estimators of trusted types."""
    from pytorch_grad_cam_pcasvm.head.storage import from_skops

    allow_own_modules()
    if not path.is_file():
        raise FileNotFoundError(f"there is no head {path}: make one with '{RUN} fit', or net.head.save(path)")
    return from_skops(path.read_bytes(), trusted) if path.suffix == ".skops" else package.Head.load(path, trusted)


def backbone_of(options: Any) -> Backbone:
    """Return the network that was named, on the device."""
    import torch

    made = make_backbone(options.backbone, options.weights)
    made.net.to(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return made
