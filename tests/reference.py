"""The same quantities, slow and obvious: by autograd, and by the paper's formulas with explicit diag matrices."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm import PCASVMNet


def relative(actual: Tensor | np.ndarray, expected: Tensor | np.ndarray) -> float:
    """Return the largest difference, relative to the largest expected value."""
    actual, expected = (torch.as_tensor(value).detach().cpu().double() for value in (actual, expected))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert expected.abs().max() > 0, "the reference is zero: nothing would be compared"
    return float((actual - expected).abs().max() / expected.abs().max())


def jacobian_by_autograd(net: nn.Module, layer: nn.Module, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return d function(net(x))_k / d activations, shape (N, K, *activations.shape[1:]), one backward pass for each k.

    Args:
        net: the network.
        layer: the target layer.
        x: input, N rows.
        function: takes the network's output to (N, K).
    """
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        kept.append(output.detach().clone().requires_grad_())
        return kept[0].clone()

    handle = layer.register_forward_hook(keep)
    with torch.enable_grad():
        values = function(net(x))
    handle.remove()
    rows = [torch.autograd.grad(values[:, k].sum(), kept[0], retain_graph=True)[0] for k in range(values.shape[1])]
    return torch.stack(rows, 1)


def features_by_hook(net: nn.Module, layer: str | None, x: Tensor) -> Tensor:
    """Return the output of a layer of a network that runs to its end, flattened; of the network itself for None."""
    if layer is None:
        return net(x).flatten(1)
    kept: list[Tensor] = []
    handle = net.get_submodule(layer).register_forward_hook(lambda module, args, output: kept.append(output.clone()))
    net(x)
    handle.remove()
    return kept[0].flatten(1)


def path_by_autograd(net: nn.Module, layer: str | None, name: str, x: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Return activations (N, ...) and the derivative (K, N, ...) of K sums of features with respect to them.

    Args:
        net: the network.
        layer: dotted name of its feature layer; None: its output.
        name: dotted name of the target layer.
        x: input, N rows.
        seeds: factors of the features in each sum, shape (K, N, D).
    """
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        kept.append(output.detach().clone().requires_grad_())
        return kept[0].clone()

    handle = net.get_submodule(name).register_forward_hook(keep)
    with torch.enable_grad():
        features = features_by_hook(net, layer, x)
    handle.remove()
    rows = [torch.autograd.grad(features, kept[0], seed.to(features.dtype), retain_graph=True)[0] for seed in seeds]
    return kept[0].detach(), torch.stack(rows)


def jacobians_by_paper(net: PCASVMNet, head: object, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return dp/dx^t and da(p)/dx^t of the paper's table for a Backbone and its two-class head, image by image.

    Every factor is an explicit matrix: V^T, diag(f'(delta)), W_l, and W_1^t. A StandardScaler in front of the PCA is
    one more diagonal matrix.

    Returns:
        (N, B, T, M N) and (N, T, M N).
    """
    scaler, pca, svm = (step for _, step in head.steps)  # type: ignore[attr-defined]
    first, act, second = net.backbone.classifier[0], net.backbone.classifier[1], net.backbone.classifier[3]
    with torch.no_grad():
        maps = net.backbone.features(x).double().cpu().numpy()
    w1, b1, w2, b2 = (
        tensor.detach().double().cpu().numpy() for tensor in (first.weight, first.bias, second.weight, second.bias)
    )
    of_components, of_decision = [], []
    for image in maps:
        channels = image.shape[0]
        flat = image.reshape(-1)
        delta1 = w1 @ flat + b1
        q1 = _f(act, delta1)
        delta2 = w2 @ q1 + b2
        q2 = _f(act, delta2)
        scaling = np.diag(1 / scaler.scale_)
        v_transposed = pca.components_ @ scaling
        p = pca.components_ @ ((q2 - scaler.mean_) / scaler.scale_ - pca.mean_)
        alpha_c, points, gamma = svm.dual_coef_[0], svm.support_vectors_, svm._gamma
        if svm.kernel == "linear":
            da_dp = sum(a * s for a, s in zip(alpha_c, points, strict=True))
        else:
            da_dp = (
                2
                * gamma
                * sum(a * np.exp(-gamma * np.sum((s - p) ** 2)) * (s - p) for a, s in zip(alpha_c, points, strict=True))
            )
        w1_t = w1.reshape(len(w1), channels, -1)
        dp_dx = np.stack(
            [
                v_transposed @ np.diag(_df(act, delta2)) @ w2 @ np.diag(_df(act, delta1)) @ w1_t[:, t]
                for t in range(channels)
            ],
            1,
        )
        of_components.append(dp_dx)
        of_decision.append(np.einsum("b,bti->ti", da_dp, dp_dx))
    return np.stack(of_components), np.stack(of_decision)


def _f(act: nn.Module, delta: np.ndarray) -> np.ndarray:
    return np.maximum(delta, 0) if isinstance(act, nn.ReLU) else 1 / (1 + np.exp(-delta))


def _df(act: nn.Module, delta: np.ndarray) -> np.ndarray:
    if isinstance(act, nn.ReLU):
        return (delta > 0).astype(np.float64)
    return (1 - _f(act, delta)) * _f(act, delta)
