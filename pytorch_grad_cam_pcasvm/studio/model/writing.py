"""Files of models: that of the head, with the backbone, and by which weights and features it is known."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import storage
from pytorch_grad_cam_pcasvm.network.features import compute_features
from pytorch_grad_cam_pcasvm.network.inputs import Inputs
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device
from pytorch_grad_cam_pcasvm.network.pools import write_pool
from pytorch_grad_cam_pcasvm.network.tiles import TiledNet
from pytorch_grad_cam_pcasvm.runtime.device import full_precision
from pytorch_grad_cam_pcasvm.runtime.digests import digest_of_weights
from pytorch_grad_cam_pcasvm.studio.model.description import Description


def write_model(model: Any, path: Path) -> None:
    """Write a :class:`.Model`, see its ``save``."""
    net = model.net
    if callable(net.pool):
        raise ValueError(
            "the pool is a function, which no file can hold: move it into the backbone, whose output then is the "
            "features, or use pool='mean'"
        )
    backbone, _ = net.feature_source()
    position = net.head.component_position
    description = Description(
        model.origin,
        type(backbone).__name__,
        digest_of_weights(backbone),
        probe_features(model),
        list(net.layer) if isinstance(net.layer, tuple) else net.layer,
        write_pool(net.pool),
        backbone.describe() if isinstance(backbone, TiledNet) else None,
        list(model.layers),
        model.tokens,
        model.inputs,
        model.classes,
        None if position is None else net.head.stages[position - 1].n_outputs,
        model.about,
    )
    net.head.tell_of_fit(always=True)
    storage.save(net.head.stages, path, net.head.training_set, description.to_json())


def probe_features(model: Any) -> dict[str, list[float]]:
    """Return some features of noise, and of a prepared picture, by which the code of a network is recognised."""
    noise, images = np.random.default_rng(0), dict[str, Any]()
    images["noise"] = make_noise(model.inputs, noise)
    if model.preparation is not None and len(model.inputs) == 1 and model.inputs[0]["name"] is None:
        pixels = noise.integers(0, 256, (48, 64, 3), np.uint8)
        picture = Image.fromarray(pixels).resize(model.preparation.enlarge(320, 240))
        images["picture"] = model.transform(picture)[None]
    backbone, _ = model.net.feature_source()
    rows = {}
    with evaluation_mode(backbone), torch.no_grad(), full_precision(find_device(backbone)):
        for name, x in images.items():
            x = place_images(x, backbone)
            _, source = model.net.feature_source(x)
            rows[name] = compute_features(backbone, source, x).double().cpu().flatten()[:64].tolist()
    return rows


def place_images(x: Any, backbone: nn.Module) -> Any:
    """Return images, or several inputs, on the device of a backbone, in the dtype of its weights."""
    dtype = next((p.dtype for p in backbone.parameters() if p.is_floating_point()), torch.float32)
    device = find_device(backbone)

    def place_tensor(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

    return x.map(place_tensor) if isinstance(x, Inputs) else place_tensor(x)


def make_noise(inputs: Sequence[Mapping[str, Any]], noise: np.random.Generator) -> Any:
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
