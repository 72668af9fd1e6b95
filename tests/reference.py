"""The same quantities, slow and obvious: by autograd, and by the paper's formulas with explicit diag matrices."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import combinations, product
from math import factorial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm import PCASVMNet, SignedMaps


def relative(actual: Tensor | np.ndarray, expected: Tensor | np.ndarray) -> float:
    """Return the largest difference, relative to the largest expected value."""
    actual, expected = (torch.as_tensor(value).detach().cpu().double() for value in (actual, expected))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert expected.abs().max() > 0, "the reference is zero: nothing would be compared"
    return float((actual - expected).abs().max() / expected.abs().max())


def missing(terms: Tensor, expected: Tensor) -> float:
    """Return the largest difference between sums over the last dimension and what is expected of them.

    Relative to the sum of the absolute terms, not to what is expected: every term is rounded, and where they cancel,
    the sum may be as small as their rounding.
    """
    terms, expected = terms.detach().double(), expected.detach().double()
    assert terms.shape[:-1] == expected.shape, (terms.shape, expected.shape)
    return float(((terms.sum(-1) - expected).abs() / terms.abs().sum(-1)).max())


def gap(maps: SignedMaps) -> float:
    """Return how far maps are from adding up to their values, relative to the sum of the absolute terms."""
    remainder = torch.zeros_like(maps.values) if maps.remainder is None else maps.remainder
    parts = torch.cat([maps.maps.double().flatten(2), remainder.unsqueeze(-1)], -1)
    parts = parts * maps.log_scale.exp().unsqueeze(-1)
    return missing(torch.cat([parts, maps.baseline_values.unsqueeze(-1)], -1), maps.values)


@contextmanager
def keep_leaves(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Let the outputs of a layer be leaves, by which what follows is differentiated; yield a list of them."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        kept.append(output.detach().clone().requires_grad_())
        return kept[-1].clone()

    handle = layer.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            yield kept
    finally:
        handle.remove()


def jacobian_by_autograd(net: nn.Module, layer: nn.Module, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return d function(net(x))_k / d activations, shape (N, K, *activations.shape[1:]), one backward pass for each k.

    Args:
        net: the network.
        layer: the target layer.
        x: input, N rows.
        function: takes the network's output to (N, K).
    """
    with keep_leaves(layer) as kept:
        values = function(net(x))
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
    with keep_leaves(net.get_submodule(name)) as kept:
        features = features_by_hook(net, layer, x)
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


# --- methods: their papers' formulas, position by position ------------------------------------------------------------


def activations_of(net: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a layer, by a hook."""
    kept: list[Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, output: kept.append(output.detach().clone()))
    with torch.no_grad():
        net(x)
    handle.remove()
    return kept[0]


def with_activations(net: nn.Module, layer: nn.Module, x: Tensor, activations: Tensor) -> Any:
    """Return the output of the whole network, run on x, with other activations in the place of a layer's output."""
    handle = layer.register_forward_hook(lambda module, args, output: activations.clone())
    with torch.no_grad():
        output = net(x)
    handle.remove()
    return output


def values_of_rows(target: Callable[[Any], Tensor], output: Any) -> Tensor:
    """Return a target's value for every row of an output, shape (N,)."""
    return torch.stack([target(row).reshape(()) for row in output]).detach()


def gradient_and_hessian_product(
    net: nn.Module, layer: nn.Module, x: Tensor, target: Callable[[Any], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return activations F, the gradient d of a target by them, and the Hessian's product with F, by autograd twice."""
    with keep_leaves(layer) as kept:
        total = sum(target(row) for row in net(x))
        (grad,) = torch.autograd.grad(total, kept[0], create_graph=True)
        activations, moved = kept[0].detach(), (grad * kept[0].detach()).sum()
        curved = None
        if moved.requires_grad:
            (curved,) = torch.autograd.grad(moved, kept[0], allow_unused=True)
    return activations, grad.detach(), torch.zeros_like(activations) if curved is None else curved


def map_of_paper(method: str, f: np.ndarray, d: np.ndarray, hf: np.ndarray) -> np.ndarray:
    """Return the map of one image by the formula of a paper, position by position, without the final ReLU.

    Args:
        method: its name.
        f: activations, shape (T, *positions).
        d: gradient of the target by them.
        hf: the Hessian's product with them.
    """
    positions = list(product(*map(range, f.shape[1:])))
    result = np.zeros(f.shape[1:])
    for t in range(len(f)):
        weight = 0.0
        if method == "GradCAM":
            weight = sum(d[t][i] for i in positions)
        elif method == "XGradCAM":
            total = sum(f[t][i] for i in positions)
            weight = sum(d[t][i] * f[t][i] / total for i in positions) if total != 0 else 0.0
        elif method == "GradCAMPlusPlus":
            for i in positions:
                if d[t][i] > 0:
                    alpha = d[t][i] ** 2 / (2 * d[t][i] ** 2 + sum(f[t][a] * d[t][i] ** 3 for a in positions))
                    weight += alpha * d[t][i]
        elif method == "ShapleyCAM":
            weight = sum(d[t][i] - hf[t][i] / 2 for i in positions)
        for i in positions:
            if method == "HiResCAM":
                result[i] += d[t][i] * f[t][i]
            elif method == "LayerCAM":
                result[i] += max(d[t][i], 0.0) * f[t][i]
            elif method == "GradCAMElementWise":
                result[i] += max(d[t][i] * f[t][i], 0.0)
            else:
                result[i] += weight * f[t][i]
    return result


def stretched(channel: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Return a channel (*positions) as a mask of an image's size in [0, 1]: linear between corners, axis by axis."""
    for axis, count in enumerate(size):
        have = channel.shape[axis]
        at = np.linspace(0, have - 1, count)
        channel = np.apply_along_axis(lambda line, at=at, have=have: np.interp(at, range(have), line), axis, channel)
    low, high = channel.min(), channel.max()
    return np.zeros_like(channel) if low == high else (channel - low) / (high - low)


def shapley_by_subsets(value: Callable[[np.ndarray], np.ndarray], count: int) -> np.ndarray:
    """Return Shapley values of ``count`` players: a sum over all subsets of the others.

    Args:
        value: of coalitions, boolean rows (M, count), to numbers (M,).
        count: of players.
    """
    coalitions = np.array(list(product([False, True], repeat=count)))
    worth = dict(zip(map(tuple, coalitions.tolist()), value(coalitions).tolist(), strict=True))
    shares = []
    for player in range(count):
        others = [j for j in range(count) if j != player]
        share = 0.0
        for size in range(count):
            chance = factorial(size) * factorial(count - size - 1) / factorial(count)
            for members in combinations(others, size):
                without = tuple(j in members for j in range(count))
                joined = tuple(j in members or j == player for j in range(count))
                share += chance * (worth[joined] - worth[without])
        shares.append(share)
    return np.array(shares)


# --- heads: scikit-learn's formulas -----------------------------------------------------------------------------------


def pairwise_by_formula(pipeline: Any, features: Tensor) -> Tensor:
    """Return what the machine that ends a pipeline decides by, shape (N, pairs): one column for two classes.

    Known are StandardScaler, PCA and SVC, SVR or OneClassSVM; two classes: positive for the second.
    """
    value = features
    for _, step in pipeline.steps[:-1]:
        if type(step).__name__ == "StandardScaler":
            value = (value - torch.tensor(step.mean_)) / torch.tensor(step.scale_)
        else:
            assert type(step).__name__ == "PCA"
            value = (value - torch.tensor(step.mean_)) @ torch.tensor(step.components_).T
            if step.whiten:
                value = value / torch.tensor(step.explained_variance_).sqrt()
    machine = pipeline.steps[-1][1]
    vectors, dual = torch.tensor(machine.support_vectors_), torch.tensor(machine.dual_coef_)
    inner, gamma = value @ vectors.T, machine._gamma
    kernel = {
        "linear": lambda: inner,
        "poly": lambda: (gamma * inner + machine.coef0) ** machine.degree,
        "sigmoid": lambda: torch.tanh(gamma * inner + machine.coef0),
        "rbf": lambda: torch.exp(-gamma * ((value.unsqueeze(1) - vectors) ** 2).sum(-1)),
    }[machine.kernel]()
    if len(dual) == 1:
        return kernel @ dual.T + torch.tensor(machine.intercept_)
    starts = np.concatenate([[0], np.cumsum(machine.n_support_)])
    columns = []
    for number, (i, j) in enumerate(combinations(range(len(machine.classes_)), 2)):
        of_i, of_j = slice(starts[i], starts[i + 1]), slice(starts[j], starts[j + 1])
        column = kernel[:, of_i] @ dual[j - 1, of_i] + kernel[:, of_j] @ dual[i, of_j]
        columns.append(column + machine.intercept_[number])
    return torch.stack(columns, 1)


def margins_by_formula(pipeline: Any, features: Tensor) -> Tensor:
    """Return the margins of all classes, shape (N, C): sums of a class's pairwise decisions; of a regressor, (N, 1)."""
    pairwise = pairwise_by_formula(pipeline, features)
    classes = getattr(pipeline.steps[-1][1], "classes_", None)
    if classes is None or not hasattr(pipeline.steps[-1][1], "n_support_") or len(pipeline.steps[-1][1].n_support_) < 2:
        return pairwise
    if len(classes) == 2:
        return torch.cat([-pairwise, pairwise], 1)
    columns = []
    for c in range(len(classes)):
        column = torch.zeros(len(features), dtype=pairwise.dtype)
        for number, (i, j) in enumerate(combinations(range(len(classes)), 2)):
            column = column + pairwise[:, number] * ((i == c) * 1.0 - (j == c) * 1.0)
        columns.append(column)
    return torch.stack(columns, 1)


def integrated_gradient(value: Callable[[Tensor], Tensor], start: Tensor, end: Tensor, nodes: int = 400) -> Tensor:
    """Return ``(end - start) * integral of the gradient of value`` on the straight line, by Gauss and Legendre.

    Args:
        value: of activations (N, ...) to (N,), row by row.
        start: activations, of shape (N, ...) or one row.
        end: activations, shape (N, ...).
        nodes: of the quadrature.
    """
    points, weights = (torch.tensor(numbers).to(end) for numbers in _gauss(nodes))
    share = (1 + points).reshape(-1, *[1] * end.dim()) / 2
    with torch.enable_grad():
        at = (start + share * (end - start)).detach().requires_grad_()
        (grads,) = torch.autograd.grad(value(at.flatten(0, 1)).sum(), at)
    return (end - start) * torch.tensordot(weights / 2, grads, 1)


@cache
def _gauss(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(nodes)


def relevance_of_dense(layers: Sequence[nn.Module], activations: Tensor, of_output: Tensor) -> Tensor:
    """Return the relevance of one image's activations in front of dense layers and ReLUs by the z+ rule.

    Args:
        layers: Flatten, Linear and ReLU modules.
        activations: of one image, any shape.
        of_output: relevance of the layers' output, shape (D,).
    """
    rows = [activations.reshape(-1)]
    for layer in layers:
        rows.append(rows[-1] if isinstance(layer, nn.Flatten) else layer(rows[-1].unsqueeze(0))[0])
    share = of_output
    for layer, x in zip(reversed(layers), reversed(rows[:-1]), strict=True):
        if not isinstance(layer, nn.Linear):
            continue
        weight, shared = layer.weight, torch.zeros_like(x)
        for j in range(len(weight)):
            z = x.clamp(min=0) * weight[j].clamp(min=0) + x.clamp(max=0) * weight[j].clamp(max=0)
            if z.sum() > 0:
                shared += z / z.sum() * share[j]
        share = shared
    return share.reshape(activations.shape)
