"""The model of a command, read from its file, or put together from a head and a backbone; and its method."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.head import storage
from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies
from pytorch_grad_cam_pcasvm.methods.baseline import BaselineCAM
from pytorch_grad_cam_pcasvm.network.auto_layers import refuse_unmappable
from pytorch_grad_cam_pcasvm.network.features import FeatureSource
from pytorch_grad_cam_pcasvm.network.layer_means import BlockMeans
from pytorch_grad_cam_pcasvm.network.modules import find_device, find_layer_name, find_network
from pytorch_grad_cam_pcasvm.network.pools import parse_pool, write_pool
from pytorch_grad_cam_pcasvm.network.tiles import TiledNet
from pytorch_grad_cam_pcasvm.studio.cli.arguments import BACKGROUND, FitOptions, ModelOptions
from pytorch_grad_cam_pcasvm.studio.cli.preparation import choose_preparation
from pytorch_grad_cam_pcasvm.studio.cli.refusals import refuse_targets
from pytorch_grad_cam_pcasvm.studio.data.images import Images
from pytorch_grad_cam_pcasvm.studio.model.backbones import allow_own_modules, make_backbone
from pytorch_grad_cam_pcasvm.studio.model.description import read_description
from pytorch_grad_cam_pcasvm.targets import default_decision


def open_model(options: ModelOptions) -> Any:
    """Return the model that was named, on the device.

    Raises:
        ValueError: it is a head alone, and what is needed besides is not typed; or an option contradicts the model.
    """
    description = read_description(options.model)
    if description is None:
        return _model_of_head_alone(options)
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
    for name, value in fitted.items():
        typed = typed_pool if name == "pool" else getattr(options, name)
        _refuse_other(name.replace("_", "-"), typed or None, value)
    if options.tokens and not model.tokens:
        raise ValueError("--tokens is for transformers, but the layers of this model give no tokens: leave it out")
    if model.preparation is None:
        raise ValueError(
            f"{options.model} was fitted with a transform of your own, or none, which no file can hold: name the "
            "function that returns the backbone and this transform, --backbone module:function"
        )
    page = getattr(options, "tiff_page", None)
    if page is not None:  # photos may come from another program than those of the fit
        model.preparation.page = page
    check_layers(model.net.backbone, options.layer)
    if isinstance(model.net.backbone, TiledNet):  # by the names behind tiles, by which means are known
        first_names = {name: find_layer_name(model.net.backbone, name) for name in options.layer if name != "auto"}
        options.layer = [first_names.get(name) or name for name in options.layer]
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


def _model_of_head_alone(options: ModelOptions) -> Any:
    """Return the model of a head alone, behind a backbone that is typed."""
    from pytorch_grad_cam_pcasvm.studio.model.fitting import assemble_model

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
    network = make_named(options, None if recorded is None or "steps" not in recorded else tuple(recorded["size"]))
    check_layers(network.net, options.layer)
    preparation = choose_preparation(network, options, recorded)
    blocks = BlockMeans(network.net, FeatureSource.of(network.net, layer, pool))
    blocks.begin_batch(first_image(preparation))
    layers = [name for name in options.layer if name != "auto"] or blocks.last
    model = assemble_model(
        network, head, blocks.first, layer, pool, layers=layers, means={}, preparation=preparation, about={}
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
    return preparation.transform(Image.new("RGB", preparation.enlarge(480, 320)))[None]


def check_layers(backbone: Any, layers: Sequence[str]) -> None:
    """Refuse names of layers that there are not, before anything else takes long."""
    for layer in layers if layers != ["auto"] else ():
        find_layer_name(find_network(backbone), layer)


def choose_device(typed: str | None) -> str:
    """Return the device that was typed, or the usual one."""
    return typed or ("cuda" if torch.cuda.is_available() else "cpu")


def make_named(options: ModelOptions | FitOptions, size: tuple[int, int] | None = None) -> Any:
    """Return the backbone that was typed, for images (H, W), on the CPU."""
    assert options.backbone is not None
    return make_backbone(options.backbone, options.weights, size=size)


def read_head(path: Path, trusted: Sequence[str] = ()) -> Any:
    """Return the head in a file, which may have estimators of trusted types."""
    allow_own_modules()
    return (
        storage.from_skops(path.read_bytes(), trusted) if path.suffix == ".skops" else package.Head.load(path, trusted)
    )


_COMPARED = 50  # images, for --layer auto


def choose_layers(options: Any, model: Any, methods: Sequence[type] = ()) -> list[str]:
    """Return the target layers: named ones, the model's, or the recommended ones of a comparison on the images.

    Args:
        options: ``layer`` and what is needed to compare.
        model: the model.
        methods: whose maps are wanted; those of several layers are only compared if one of them can join them.
    """
    if options.layer != ["auto"]:
        return list(dict.fromkeys(options.layer or model.layers))
    net, preparation = model.net, model.preparation
    from pytorch_grad_cam_pcasvm.studio import evaluation
    from pytorch_grad_cam_pcasvm.studio.cli.training import layers_for_maps

    images = Images(preparation.folder(options.images), thumbnails=0)
    x = images.first().to(find_device(net))
    backbone, features = net.feature_source(x)
    candidates = layers_for_maps(backbone, features, x)
    if images.names is None:
        print(f"layer: {candidates[-1]}, the last; to compare layers, give one folder of images per class")
        return candidates[-1:]
    add_means(options, model, candidates)
    reshape = "tokens" if model.tokens else None
    settings = {"images": _COMPARED, "batch_size": min(options.batch_size, 16)}
    joined = any(issubclass(method, package.ContributionCAM) for method in methods)
    groups = None if joined else candidates
    compared = evaluation.layers(net, images.data, groups, reshape_transform=reshape, combine=["shared"], **settings)
    print(compared.question)
    return list(compared.settings["recommended"])


def find_coarsest(net: Any, layers: Sequence[str]) -> str:
    """Return the layer that runs last."""
    order = [name for name, _ in net.feature_source()[0].named_modules()]
    return max(layers, key=lambda name: max(n for n, inner in enumerate(order) if f"{inner}.".startswith(f"{name}.")))


def choose_options(
    options: Any, methods: Sequence[type], model: Any, layers: Sequence[str]
) -> dict[type, dict[str, Any]]:
    """Return the options of each method; the head gets the means of the layers if it lacks them."""
    common = {"reshape_transform": "tokens"} if model.tokens else {}
    start = {"baseline": options.baseline}
    if options.baseline != "zero" and any(issubclass(method, BaselineCAM) for method in methods):
        add_means(options, model, layers)
    elif options.train is not None:
        print("--train is not needed: these maps do not start at means")
    return {method: common | (start if issubclass(method, BaselineCAM) else {}) for method in methods}


def make_cam(options: Any, model: Any) -> Any:
    """Return the method that was typed, at the layers that were typed or are chosen."""
    method = getattr(package, options.method)
    layers = choose_layers(options, model, [method])
    return method(model.net, layers, **choose_options(options, [method], model, layers)[method])


def choose_targets(options: Any, net: Any) -> list[Any]:
    """Return the targets: components, as many as are wanted, and the decision.

    The decision is the predicted class, or what speaks for any other than the normal one; of a head that decides at
    every position each class but the background; of one that was fitted on good parts alone, how anomalous an image
    is. Of these, components are only explained if they are asked for.

    Raises:
        ValueError: an option is out of range, names no class, or is only for heads that decide at every position.
    """
    dense, anomalies = net.is_dense, tells_anomalies(net.head)
    position, classes = net.head.component_position, net.head.classes_
    most = 0 if position is None else net.head.stages[position - 1].n_outputs
    labels = [] if classes is None else classes.tolist()
    refuse_targets(options, labels, most, dense=dense)
    count, at = options.components or 0, "max" if options.at is None and dense else options.at
    if options.components is None and not dense and not anomalies:
        count = most
    by_name = {str(label): label for label in labels} | {None: None}
    category, versus = by_name[options.category], by_name[options.versus]
    decisions: list[Any] = [] if net.head.decision_position is None else [default_decision(net.head)]
    if category is not None or versus is not None:
        decisions = [package.SVMTarget(category, versus=versus, at=at)]
    elif anomalies:
        decisions = [anomaly_target(net.head, at)]
    elif dense and net.head.classes_ is not None:
        absent = [name for name in (net.head.normal, BACKGROUND) if name in labels]
        # Of more than two classes a margin may be above 0 where the normal one is ahead.
        rival = absent[0] if absent and len(labels) > 2 else None
        decisions = [package.SVMTarget(name, versus=rival, at=at) for name in labels if name not in absent]
    return [*(package.PCATarget(b, at=options.at) for b in range(count)), *decisions]


def anomaly_target(head: Any, at: Any = None) -> Any:
    """Return the target of how anomalous an image, or a position of it, is; None of a head that does not tell."""
    if not tells_anomalies(head):
        return None
    return package.ResidualTarget(at=at) if head.decision_position is None else package.SVMTarget(sign="-", at=at)


def add_means(options: Any, model: Any, layers: Sequence[str]) -> None:
    """Add to the head the means of layers that it neither has nor knows from its features.

    Raises:
        ValueError: there are no training images to take them from, or a layer does not run before the features.
    """
    net, means = model.net, model.net.head.training_set.means
    derived = None if model.tokens or net.pool != "mean" else net.layer
    missing = [layer for layer in layers if layer not in means and layer != derived]
    if not missing:
        if options.train is not None:
            print("--train is not needed: the means of these layers are known")
        return
    x = first_image(model.preparation).to(find_device(net))
    backbone, source = net.feature_source(x)
    refuse_unmappable(backbone, source, missing, x, "--layer {}")  # where training images are of no help
    if options.train is None:
        raise ValueError(
            f"contributions at {', '.join(map(repr, missing))} start near the mean of the training images there, which "
            f"{options.model} does not hold{_held(means)}: name the folder it was fitted on, --train FOLDER, or start "
            "elsewhere, --baseline zero"
        )
    from pytorch_grad_cam_pcasvm.studio.cli.training import training_set  # with the atlas, which is not needed before

    backbone, _ = net.feature_source()
    layer = list(net.layer) if isinstance(net.layer, tuple) else net.layer
    with training_set(options, options.train, backbone, model.preparation, layer, net.pool, missing) as training:
        stored_means = training.means
    for layer in missing:
        if layer not in stored_means:
            raise ValueError(f"the layer {layer!r} has no positions on the image: name another")
        means[layer] = stored_means[layer]


def _held(means: Any) -> str:
    return f" (it has those at {', '.join(map(repr, means))})" if means else ""
