"""Kernels by the parameters of an estimator: names with a gamma, and the kernel objects of Gaussian processes."""

from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process import kernels as processes
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import kernels
from pytorch_grad_cam_pcasvm.head.registry import tensor
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import Affine, Chain, KernelMap, Scale, Union
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError

# A factor, what features are divided by, and the kernel; without a kernel, a constant.
Term = tuple[float, Any, kernels.Kernel | None]


def convert_kernel(estimator: Any, gamma: float | None, n_features: int) -> kernels.Kernel:
    """Return the kernel that an estimator names."""
    # Where an estimator has no gamma of its own, pairwise_kernels takes 1 / n_features; coef0 is 1 there.
    gamma = 1.0 / n_features if gamma is None else float(gamma)
    coef0 = 1.0 if getattr(estimator, "coef0", None) is None else float(estimator.coef0)
    degree = 3 if getattr(estimator, "degree", None) is None else estimator.degree
    supported: dict[Any, kernels.Kernel] = {
        "linear": kernels.Linear(),
        "rbf": kernels.RBF(gamma),
        "poly": kernels.Polynomial(gamma, degree, coef0),
        "polynomial": kernels.Polynomial(gamma, degree, coef0),
        "sigmoid": kernels.Sigmoid(gamma, coef0),
    }
    if estimator.kernel not in supported:
        raise NoClosedFormError(
            f"{type(estimator).__name__} has the kernel {estimator.kernel!r}, whose gradient is unknown here",
            "fit it with kernel='linear', 'rbf', 'poly' or 'sigmoid'",
        )
    return supported[estimator.kernel]


def process(kernel: Any, points: Any, weights: Any) -> Chain:
    """Return ``sum_i K(x_i, x) w_i`` for a kernel object, points x_i, (I, D), and weights w_i, (I,) or (I, P)."""
    points, weights = tensor(points), tensor(weights).reshape(len(points), -1)
    zeros, none = points.new_zeros(points.shape[1]), points.new_zeros(weights.shape[1])
    constant, members = none, list[Chain]()
    for factor, length, part in _list_terms(kernel):
        if part is None:
            constant = constant + factor * weights.sum(0)
            continue
        scale = points.new_ones(points.shape[1]) * torch.as_tensor(length).double()
        stages: list[Stage] = [] if bool((scale == 1).all()) else [Scale(zeros, scale, zeros)]
        members.append(Chain([*stages, KernelMap(part, points / scale, factor * weights, none, reduces=False)]))
    if not members:
        raise NoClosedFormError(
            f"the kernel {kernel} is constant, so there is nothing to explain", "fit it with a kernel such as RBF()"
        )
    sums: list[Stage] = list(members[0].stages) if len(members) == 1 else [Union(members)]
    identity: Tensor = torch.eye(weights.shape[1]).double()
    return Chain([*sums, Affine(identity.repeat(1, len(members)), constant)])


def _list_terms(kernel: Any) -> list[Term]:
    """Return the terms of a sum, without white noise, which is 0 except at the training points themselves."""
    match kernel:
        case processes.Sum():
            return _list_terms(kernel.k1) + _list_terms(kernel.k2)
        case processes.Product():
            pairs = [(one, two) for one in _list_terms(kernel.k1) for two in _list_terms(kernel.k2)]
            if all(None in (one[2], two[2]) for one, two in pairs):
                return [(one[0] * two[0], *(two if one[2] is None else one)[1:]) for one, two in pairs]
        case processes.WhiteKernel():
            return []
        case processes.ConstantKernel():
            return [(float(kernel.constant_value), 1.0, None)]
        case processes.RBF() if type(kernel) is processes.RBF:
            return [(1.0, np.asarray(kernel.length_scale, dtype=float), kernels.RBF(0.5))]
        case processes.DotProduct():
            return [(1.0, 1.0, kernels.Polynomial(1.0, 1, float(kernel.sigma_0) ** 2))]
    raise NoClosedFormError(
        f"a Gaussian process has the kernel {kernel}, whose gradient is unknown here",
        "fit it with sums and multiples of RBF, DotProduct and WhiteKernel",
    )
