"""The model of a command: read from its file, or put together from a head and a backbone."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.arguments import OF_HEADS, FitOptions, ModelOptions
from pytorch_grad_cam_pcasvm.cli.preparation import choose_preparation
from pytorch_grad_cam_pcasvm.model.description import read_description


def open_model(options: ModelOptions) -> Any:
    """Return the model that was named, on the device.

    Raises:
        ValueError: it is a head alone, and what is needed besides is not typed; or an option contradicts the model.
    """
    from pytorch_grad_cam_pcasvm.network.modules import find_layer_name
    from pytorch_grad_cam_pcasvm.network.pools import parse_pool, write_pool
    from pytorch_grad_cam_pcasvm.network.tiles import TiledNet

    description = read_description(options.model)
    if description is None:
        return _put_together(options)
    typed = description.backbone.typed
    backbone = options.backbone or (typed if typed in options.trust else None)
    model = package.load_model(options.model, backbone, weights=options.weights, trusted=options.trust)
    layer, recorded = model.net.layer, model.net.head.training_set.preparation or {}
    fitted = {
        "features": [layer] if isinstance(layer, str) else list(layer or ()),
        "pool": description.pool,
        "resize": recorded.get("resize"),
        "white_level": recorded.get("white_level"),
    }
    typed_pool = None if options.pool is None else write_pool(parse_pool(options.pool))
    for entry in fields(options):
        if entry.metadata.get("group") == OF_HEADS and entry.name in fitted:
            value = typed_pool if entry.name == "pool" else getattr(options, entry.name)
            _refuse_other(entry.name.replace("_", "-"), value or None, fitted[entry.name])
    if options.tokens and not model.tokens:
        raise ValueError("--tokens is for transformers, but the layers of this model give no tokens: leave it out")
    if model.preparation is None:
        raise ValueError(
            f"{options.model} was fitted with a transform of your own, or none, which no file can hold: name the "
            "function that returns the backbone and this transform, --backbone module:function"
        )
    check_layers(model.net.backbone, options.layer)
    if isinstance(model.net.backbone, TiledNet):  # by the names behind tiles, by which means are known
        known = {name: find_layer_name(model.net.backbone, name) for name in options.layer if name != "auto"}
        options.layer = [known.get(name) or name for name in options.layer]
    model.net.to(choose_device(options.device))
    return model


def _refuse_other(name: str, typed: Any, fitted: Any) -> None:
    """Refuse an option that differs from the fit of a model."""
    if typed not in (None, fitted):
        words = [_write(value) for value in (typed, fitted)]
        raise ValueError(f"--{name} {words[0]}, but the model was fitted with {words[1]}: leave it out, or fit again")


def _write(value: Any) -> str:
    """Return the value of an option as it is typed."""
    if isinstance(value, list):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def _put_together(options: ModelOptions) -> Any:
    """Return the model of a head alone, behind a backbone that is typed."""
    from pytorch_grad_cam_pcasvm.model.fitting import assemble_model
    from pytorch_grad_cam_pcasvm.network.block_means import BlockMeans
    from pytorch_grad_cam_pcasvm.network.features import FeatureSource
    from pytorch_grad_cam_pcasvm.network.pools import parse_pool

    head = read_head(options.model, options.trust)  # before weights are downloaded
    recorded = head.training_set.preparation if isinstance(head, package.Head) else None  # skops says nothing
    if "tiled" in (recorded or {}):
        raise ValueError(f"{options.model} is a head alone, which was fitted on tiles: name the model that 'fit' wrote")
    features = _agree("features", options.features or None, (recorded or {}).get("features"))
    pool = parse_pool(_agree("pool", options.pool, (recorded or {}).get("pool")) or "mean")
    if features is None:
        if len(options.layer) > 1:
            raise ValueError("--layer names several layers of the maps: name that of the features with --features")
        if options.layer == ["auto"]:
            raise ValueError("--layer auto finds the layer of the maps: name that of the features with --features")
        if not options.layer:
            raise ValueError(f"{options.model} does not say which layer its features come from: add --features NAME")
        features = options.layer
    layer = features[0] if len(features) == 1 else features
    made = make_named(options, None if recorded is None or "steps" not in recorded else tuple(recorded["size"]))
    check_layers(made.net, options.layer)
    preparation = choose_preparation(made, options, recorded)
    blocks = BlockMeans(made.net, FeatureSource.of(made.net, layer, pool))
    blocks.begin(first_image(preparation))
    layers = [name for name in options.layer if name != "auto"] or blocks.last
    model = assemble_model(
        made, head, blocks.first, layer, pool, layers=layers, means={}, preparation=preparation, about={}
    )
    model.net.head.training_set.preparation = recorded  # what the head says, and no more
    model.tokens = model.tokens or options.tokens
    model.net.to(choose_device(options.device))
    return model


def _agree(name: str, typed: Any, of_head: Any) -> Any:
    """Return the typed value, or else the head's; refuse a contradiction."""
    if of_head is not None:
        _refuse_other(name, typed, of_head)
    return typed if of_head is None else of_head


def first_image(preparation: Any) -> Any:
    """Return an image of a black photo, (1, C, H, W), to try a network on."""
    from PIL import Image

    return preparation.transform(Image.new("RGB", preparation.enlarge(480, 320)))[None]


def check_layers(backbone: Any, layers: Sequence[str]) -> None:
    """Refuse names of layers that there are not, before anything else takes long."""
    from pytorch_grad_cam_pcasvm.network.modules import find_layer_name, find_network

    for layer in layers if layers != ["auto"] else ():
        find_layer_name(find_network(backbone), layer)


def choose_device(typed: str | None) -> str:
    """Return the device that was typed, or the usual one."""
    import torch

    return typed or ("cuda" if torch.cuda.is_available() else "cpu")


def make_named(options: ModelOptions | FitOptions, size: tuple[int, int] | None = None) -> Any:
    """Return the backbone that was typed, for images (H, W), on the CPU."""
    from pytorch_grad_cam_pcasvm.model.backbones import make_backbone

    assert options.backbone is not None
    return make_backbone(options.backbone, options.weights, size=size)


def read_head(path: Path, trusted: Sequence[str] = ()) -> Any:
    """Return the head in a file, which may have estimators of trusted types."""
    from pytorch_grad_cam_pcasvm.head import storage
    from pytorch_grad_cam_pcasvm.model.backbones import allow_own_modules

    allow_own_modules()
    return (
        storage.from_skops(path.read_bytes(), trusted) if path.suffix == ".skops" else package.Head.load(path, trusted)
    )
