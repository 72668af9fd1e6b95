"""The method of a command: its layer, and its options."""

from collections.abc import Sequence
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.networks import source

_COMPARED = 50  # images, for --layer auto


def layer_of(options: Any, net: Any, transform: Any) -> str:
    """Return the target layer: the one named, or the one that is recommended after comparing them on the images."""
    if options.layer != "auto":
        return options.layer
    _need_images(options, "--layer auto compares layers on them")
    from pytorch_grad_cam_pcasvm import evaluation
    from pytorch_grad_cam_pcasvm.data import Images
    from pytorch_grad_cam_pcasvm.model.modules import device_of, evaluating
    from pytorch_grad_cam_pcasvm.model.trunk import last_blocks

    images = Images(options.images, transform, thumbnails=0)
    x = next((read.images for row in range(len(images)) if (read := images.read([row])).rows), None)
    if x is None:
        raise ValueError(f"none of the {len(images)} images in {options.images} can be read")
    x = x.to(device_of(net))
    backbone, source = net.feature_source(x)
    with evaluating(net):
        candidates = last_blocks(backbone, source, x)[-4:]
    if images.names is None:
        print(f"layer: {candidates[-1]}, the last; to compare layers, give one folder of images per class")
        return candidates[-1]
    reshape = "tokens" if options.tokens else None
    settings = {"images": _COMPARED, "batch_size": min(options.batch_size, 16), "transform": transform}
    found = evaluation.layers(net, options.images, candidates, reshape_transform=reshape, **settings)
    print(found.question)
    return found.settings["recommended"][0]


def options_of(
    options: Any, methods: Sequence[type], net: Any, layer: str, transform: Any
) -> dict[type, dict[str, Any]]:
    """Return the options of each method, with the mean at the layer if the head does not have it."""
    from pytorch_grad_cam_pcasvm.cams.baselines import WithBaseline

    common = {"reshape_transform": "tokens"} if options.tokens else {}
    start = {"baseline": options.baseline}
    needed = options.baseline != "zero" and any(issubclass(method, WithBaseline) for method in methods)
    if needed and (options.tokens or layer != source(options) or options.pool != "mean"):
        from pytorch_grad_cam_pcasvm.data import Images

        _need_images(options, f"contributions start near the mean of what they have at {layer}")
        images = Images(options.images, transform, thumbnails=0)
        # Of a fixed size: an atlas that is resumed has to start at the same numbers.
        parts = (images.read([*range(len(images))[first : first + 16]]) for first in range(0, len(images), 16))
        start["mean"] = package.mean_activations(net, (part.images for part in parts if part.rows), layer)
        print(f"contributions start near the mean of these images at {layer}")
    return {method: common | (start if issubclass(method, WithBaseline) else {}) for method in methods}


def _need_images(options: Any, why: str) -> None:
    if options.images is None:
        raise ValueError(f"images are needed, --images FOLDER: {why}")
