"""The method of a command: its layer, and its options."""

from collections.abc import Sequence
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.patches import BACKGROUND
from pytorch_grad_cam_pcasvm.cli.training import layers_for_maps, training_set
from pytorch_grad_cam_pcasvm.model.preparation import Preparation

_COMPARED = 50  # images, for --layer auto
_NAMED = 3  # layers, where another is to be chosen


def choose_layers(options: Any, model: Any, methods: Sequence[type] = ()) -> list[str]:
    """Return the target layers: those named, of the model, or recommended after comparing them on the images.

    Args:
        options: ``layer`` and what is needed to compare.
        model: the model.
        methods: whose maps are wanted; those of several layers are only compared if one of them can join them.

    Raises:
        ValueError: there are no images to compare layers on.
    """
    if options.layer != ["auto"]:
        return list(dict.fromkeys(options.layer or model.layers))
    if options.images is None:
        raise ValueError("--layer auto compares layers on photos: name their folder")
    net, preparation = model.net, model.preparation
    from pytorch_grad_cam_pcasvm import evaluation
    from pytorch_grad_cam_pcasvm.data.images import Images
    from pytorch_grad_cam_pcasvm.network.modules import device_of

    images = Images(preparation.folder(options.images), thumbnails=0)
    x = next((batch.images for row in range(len(images)) if (batch := images.read([row])).rows), None)
    if x is None:
        raise ValueError(f"none of the {len(images)} images in {options.images} can be read")
    x = x.to(device_of(net))
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
    from pytorch_grad_cam_pcasvm.methods.starts import BaselineCAM

    common = {"reshape_transform": "tokens"} if model.tokens else {}
    start = {"baseline": options.baseline}
    if options.baseline != "zero" and any(issubclass(method, BaselineCAM) for method in methods):
        add_means(options, model, layers)
    return {method: common | (start if issubclass(method, BaselineCAM) else {}) for method in methods}


def choose_targets(options: Any, net: Any) -> list[Any]:
    """Return what is explained: components, as many as are wanted, and the decision.

    The decision is the predicted class, or what speaks for any other than the normal one; of a head that decides at
    every position each class but the background; of one that was fitted on good parts alone, how anomalous an image
    is. Of these, components are only explained if they are asked for.

    Raises:
        ValueError: an option is out of range, names no class, or is only for heads that decide at every position.
    """
    from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies
    from pytorch_grad_cam_pcasvm.network.pools import is_dense
    from pytorch_grad_cam_pcasvm.targets import default_decision

    dense, anomalies = is_dense(net.pool), tells_anomalies(net.head)
    if options.at is not None and not dense:
        raise ValueError("--at names a position, but this head decides once for each image: leave it out")
    if options.components is not None and options.components < 0:
        raise ValueError(f"--components must be at least 0, got {options.components}")
    position = net.head.component_position
    most = 0 if position is None else net.head.stages[position - 1].n_outputs
    if options.components is not None and options.components > most:
        raise ValueError(f"--components {options.components}, but the head has {most} components")
    count, at = options.components or 0, "max" if options.at is None and dense else options.at
    if options.components is None and not dense and not anomalies:
        count = most
    category, versus = (_label(getattr(options, name), name, net.head) for name in ("category", "versus"))
    if category is not None and category == versus:
        raise ValueError(f"--class and --versus are both {category}: name two classes")
    decisions: list[Any] = [] if net.head.decision_position is None else [default_decision(net.head)]
    if category is not None or versus is not None:
        decisions = [package.SVMTarget(category, versus=versus, at=at)]
    elif anomalies and net.head.decision_position is None:
        decisions = [package.ResidualTarget(at=at)]
    elif anomalies:
        decisions = [package.SVMTarget(sign="-", at=at)]
    elif dense and net.head.classes_ is not None:
        absent = (BACKGROUND, net.head.normal)
        decisions = [package.SVMTarget(name, at=at) for name in net.head.classes_.tolist() if name not in absent]
    return [*(package.PCATarget(b, at=options.at) for b in range(count)), *decisions]


def _label(typed: str | None, name: str, head: Any) -> Any:
    """Return the class of a head that was typed; None: none was."""
    if typed is None:
        return None
    names = [] if head.classes_ is None else head.classes_.tolist()
    for label in names:
        if str(label) == typed:
            return label
    option = "--class" if name == "category" else f"--{name}"
    classes = f"its classes are {', '.join(map(str, names))}" if names else "it has no classes"
    raise ValueError(f"{option}: this head has no class {typed!r}, {classes}")


def add_means(options: Any, model: Any, layers: Sequence[str]) -> None:
    """Add to the head the means of layers that it neither has nor knows from its features.

    Raises:
        ValueError: there are no training images to take them from, or a layer does not run before the features.
    """
    net, means = model.net, model.net.head.training_set.means
    derived = None if model.tokens or net.pool != "mean" else net.layer
    missing = [layer for layer in layers if layer not in means and layer != derived]
    if not missing:
        return
    _refuse_behind(net, missing, model.preparation)  # where training images are of no help
    if options.train is None:
        raise ValueError(
            f"contributions at {', '.join(map(repr, missing))} start near the mean of the training images there, which "
            f"{options.model} does not hold{_held(means)}: name the folder it was fitted on, --train FOLDER, or start "
            "elsewhere, --baseline zero"
        )
    backbone, _ = net.feature_source()
    layer = list(net.layer) if isinstance(net.layer, tuple) else net.layer
    with training_set(options, options.train, backbone, model.preparation, layer, net.pool, missing) as training:
        found = training.means
    for layer in missing:
        if layer not in found:
            raise ValueError(f"the layer {layer!r} has no positions on the image: name another")
        means[layer] = found[layer]


def _refuse_behind(net: Any, layers: Sequence[str], preparation: Preparation) -> None:
    """Refuse layers that do not run before the features."""
    import torch
    from PIL import Image

    from pytorch_grad_cam_pcasvm.network.features import output_of
    from pytorch_grad_cam_pcasvm.network.modules import device_of, evaluating
    from pytorch_grad_cam_pcasvm.runtime.hooks import hooked

    x = preparation.transform(Image.new("RGB", preparation.enlarge(480, 320)))[None].to(device_of(net))
    backbone, source = net.feature_source(x)
    names = [name for name, _ in backbone.named_modules() if name]
    before: list[str] = []
    with evaluating(backbone), torch.no_grad(), hooked() as hooks:
        for name in {*names, *layers}:
            hooks.after_call(backbone, name, lambda name, _: before.append(name))
        output_of(backbone, source, x, ends=True)
    behind = [layer for layer in layers if layer not in before]
    if behind and before:
        block = before[-1].rpartition(".")[0]
        last = [name for name in dict.fromkeys(before) if name.rpartition(".")[0] == block][-_NAMED:]
        raise ValueError(
            f"--layer {behind[0]} does not run before the features, {source}: name a layer that does, such as "
            f"{', '.join(last)}"
        )


def _held(means: Any) -> str:
    return f" (it has those at {', '.join(map(repr, means))})" if means else ""
