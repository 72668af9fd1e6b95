"""The method of a command: its layer, and its options."""

from collections.abc import Sequence
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.models import first_image
from pytorch_grad_cam_pcasvm.cli.patches import BACKGROUND
from pytorch_grad_cam_pcasvm.cli.refusals import refuse_targets
from pytorch_grad_cam_pcasvm.cli.training import layers_for_maps, training_set

_COMPARED = 50  # images, for --layer auto


def choose_layers(options: Any, model: Any, methods: Sequence[type] = ()) -> list[str]:
    """Return the target layers: named ones, the model's, or the recommended ones of a comparison on the images.

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
    from pytorch_grad_cam_pcasvm.network.modules import find_device

    images = Images(preparation.folder(options.images), thumbnails=0)
    x = next((batch.images for row in range(len(images)) if (batch := images.read([row])).rows), None)
    if x is None:
        raise ValueError(f"none of the {len(images)} images in {options.images} can be read")
    x = x.to(find_device(net))
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
    elif options.train is not None:
        print("--train is not needed: these maps do not start at means")
    return {method: common | (start if issubclass(method, BaselineCAM) else {}) for method in methods}


def choose_targets(options: Any, net: Any) -> list[Any]:
    """Return the targets: components, as many as are wanted, and the decision.

    The decision is the predicted class, or what speaks for any other than the normal one; of a head that decides at
    every position each class but the background; of one that was fitted on good parts alone, how anomalous an image
    is. Of these, components are only explained if they are asked for.

    Raises:
        ValueError: an option is out of range, names no class, or is only for heads that decide at every position.
    """
    from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies
    from pytorch_grad_cam_pcasvm.targets import default_decision

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
    from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies

    if not tells_anomalies(head):
        return None
    return package.ResidualTarget(at=at) if head.decision_position is None else package.SVMTarget(sign="-", at=at)


def add_means(options: Any, model: Any, layers: Sequence[str]) -> None:
    """Add to the head the means of layers that it neither has nor knows from its features.

    Raises:
        ValueError: there are no training images to take them from, or a layer does not run before the features.
    """
    from pytorch_grad_cam_pcasvm.network.auto_layers import refuse_unmappable
    from pytorch_grad_cam_pcasvm.network.modules import find_device

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
    backbone, _ = net.feature_source()
    layer = list(net.layer) if isinstance(net.layer, tuple) else net.layer
    with training_set(options, options.train, backbone, model.preparation, layer, net.pool, missing) as training:
        found = training.means
    for layer in missing:
        if layer not in found:
            raise ValueError(f"the layer {layer!r} has no positions on the image: name another")
        means[layer] = found[layer]


def _held(means: Any) -> str:
    return f" (it has those at {', '.join(map(repr, means))})" if means else ""
