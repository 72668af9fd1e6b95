"""Estimators of likeness to the training set as stages: distances, densities, outliers; and their kernels."""

from typing import Any

import numpy as np
import torch
from sklearn.cluster import BisectingKMeans, KMeans, MiniBatchKMeans
from sklearn.gaussian_process import kernels as processes
from sklearn.neighbors import KernelDensity, LocalOutlierFactor, NearestNeighbors
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import kernels, vote
from pytorch_grad_cam_pcasvm.head.decisions import LinearDecision
from pytorch_grad_cam_pcasvm.head.distances import (
    CosineDistance,
    LocalOutlier,
    LogDensity,
    NearestDistance,
    density_constant,
    measure_reach,
)
from pytorch_grad_cam_pcasvm.head.elsewhere import tensor
from pytorch_grad_cam_pcasvm.head.stage import Facts, Stage
from pytorch_grad_cam_pcasvm.head.stages import Affine, Chain, KernelMap, Normalise, Scale, Union
from pytorch_grad_cam_pcasvm.head.table import stage_for, transformer_for
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


_ROOTS = 2.0  # training rows are hardly further from the nearest centre than so many root mean squares


@stage_for.register(NearestNeighbors)
def _nearest_neighbours(estimator: NearestNeighbors) -> Stage:
    if estimator.n_neighbors > estimator.n_samples_fit_:
        raise NoClosedFormError(
            f"NearestNeighbors has {estimator.n_neighbors} neighbours among {estimator.n_samples_fit_} training rows",
            "fit it with a smaller n_neighbors",
        )
    if estimator.effective_metric_ == "cosine":
        rows = Normalise("l2").evaluate(tensor(estimator._fit_X))[0]
        return make_decision(Chain([Normalise("l2"), CosineDistance(rows, estimator.n_neighbors)]))
    return make_decision(NearestDistance(_points(estimator), estimator.n_neighbors))


@stage_for.register(KMeans)
@stage_for.register(MiniBatchKMeans)
@stage_for.register(BisectingKMeans)
def _centres(estimator: Any) -> Stage:
    stage = NearestDistance(tensor(estimator.cluster_centers_), 1)
    # Centres are no training rows, but the root mean square of the distances to them is known.
    root = float(estimator.inertia_ / len(estimator.labels_)) ** 0.5
    stage.facts = Facts(least=0.0, reach=_ROOTS * root)
    return make_decision(stage)


@transformer_for.register(KMeans)
@transformer_for.register(MiniBatchKMeans)
@transformer_for.register(BisectingKMeans)
def _distances(estimator: Any) -> Stage:
    raise NoClosedFormError(f"{type(estimator).__name__} as a step before others has no closed form", "fit PCA")


@stage_for.register(KernelDensity)
def _density(estimator: KernelDensity) -> Stage:
    for name, value, needed in (("metric", estimator.metric, "euclidean"), ("kernel", estimator.kernel, "gaussian")):
        if value != needed:
            raise NoClosedFormError(f"KernelDensity has the {name} {value!r}", f"fit it with {needed!r}")
    points, weights = tensor(np.asarray(estimator.tree_.data)), estimator.tree_.sample_weight
    weights = torch.ones(len(points)).double() if weights is None else tensor(np.asarray(weights))
    constant = density_constant(estimator.bandwidth_, points.shape[1], float(weights.sum()))
    return make_decision(LogDensity(points, weights.log(), float(estimator.bandwidth_), constant))


@stage_for.register(LocalOutlierFactor)
def _local_outlier(estimator: LocalOutlierFactor) -> Stage:
    if not estimator.novelty:
        raise NoClosedFormError(
            "LocalOutlierFactor was fitted to find outliers in its training set, and knows nothing of other images",
            "fit it with novelty=True",
        )
    k = estimator.n_neighbors_
    radii, densities = tensor(estimator._distances_fit_X_[:, k - 1]), tensor(estimator._lrd)
    stage = LocalOutlier(_points(estimator), densities, radii, k, float(estimator.offset_))
    # Each of these is of a training row that is no neighbour of its own.
    least, reach = measure_reach(estimator.offset_ - estimator.negative_outlier_factor_, is_distance=False)
    stage.facts = Facts(least=least, reach=reach)
    return make_decision(stage, vote.one_class(zero_is_inlier=True))


def _points(estimator: Any) -> torch.Tensor:
    """Return the training set of an estimator of neighbours with Euclidean distances."""
    if estimator.effective_metric_ != "euclidean":
        name, metric = type(estimator).__name__, estimator.effective_metric_
        cosine = ["also put a Normalizer before it, for angles"] if metric == "cosine" else []
        raise NoClosedFormError(f"{name} has the metric {metric!r}", "fit it with 'euclidean'", *cosine)
    return tensor(estimator._fit_X)


def make_decision(stage: Stage, voting: vote.Vote | None = None) -> Stage:
    """Return a stage of one value as a decision, larger the more a row is like the training set."""
    ones, zeros = torch.ones(1, 1).double(), torch.zeros(1).double()
    return Chain([stage, LinearDecision(ones, zeros, voting or vote.likeness(), None)])
