"""Quantus: every method of this package as an ``explain_func`` for its metrics."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from pytorch_grad_cam_pcasvm.evaluation.subject import explained, find_target_layer, heat, named
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.modules import find_device
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.targets import SVMTarget


def quantus_explainer(
    method: type[ClosedFormCAM], net: PCASVMNet, target_layers: Sequence[nn.Module | str], **options: Any
) -> Callable[..., np.ndarray]:
    """Return an ``explain_func`` for Quantus' metrics that uses a method of this package.

    Quantus passes its own model, a copy of the network in which it may have randomised modules; that copy is explained,
    at the layer of the same name. Its randomisation (MPRT) calls ``reset_parameters`` of modules, which a head does not
    have, so the head is left unchanged; :func:`sensitivity` randomises it.

    Args:
        method: a class of :mod:`~pytorch_grad_cam_pcasvm.methods`.
        net: the network.
        target_layers: one layer.
        **options: options of the method.

    Returns:
        A function of ``model``, ``inputs`` (numpy, (N, C, H, W)) and ``targets`` (N positions in the head's
        ``classes_``) that returns the signed maps of these classes' margins, (N, 1, H, W), at the size of the inputs.

    Raises:
        TypeError: the method is not a class of this package, an option is unknown to it, or the network is not a
            PCASVMNet.
        ValueError: there is not exactly one target layer, the layer is the backbone itself, or the head has no classes.

    Example:
        >>> explainer = evaluation.quantus_explainer(ContributionCAM, net, ["layer2"])
    """
    named([method])
    name = find_target_layer(net, target_layers)
    if net.head.classes_ is None:
        raise ValueError("Quantus explains classes, but the head has none")
    if isinstance(name, nn.Module) or not name:
        raise ValueError("the target layer is the backbone itself: choose one of its layers")

    method(net, [name], **options)  # options that the method does not have are refused now

    def explain(model: PCASVMNet, inputs: Any, targets: Any, **_: Any) -> np.ndarray:
        parameter = next(model.parameters())
        x = torch.as_tensor(np.asarray(inputs)).to(find_device(model), parameter.dtype)
        classes = model.head.classes_.tolist()  # type: ignore[union-attr]
        positions = np.asarray(targets).reshape(-1)
        if (
            len(positions) != len(x)
            or positions.dtype.kind not in "iu"
            or not np.isin(positions, range(len(classes))).all()
        ):
            raise ValueError(
                f"targets must be {len(x)} positions in classes_, one for each input, from 0 to {len(classes) - 1}, "
                f"got {targets!r:.80}"
            )
        maps = explained(method(model, [name], **options), x, [SVMTarget(classes[index]) for index in positions])
        return heat(maps, x.shape[2:])[:, None].astype(np.float32)

    return explain
