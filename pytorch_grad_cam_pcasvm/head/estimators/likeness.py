"""Estimators of likeness to the training set as stages: distances, densities, local outliers."""

from typing import Any

import numpy as np
import torch
from sklearn.cluster import BisectingKMeans, KMeans, MiniBatchKMeans
from sklearn.neighbors import KernelDensity, LocalOutlierFactor, NearestNeighbors

from pytorch_grad_cam_pcasvm.head import vote
from pytorch_grad_cam_pcasvm.head.anomalies import measure_reach
from pytorch_grad_cam_pcasvm.head.decisions import LinearDecision
from pytorch_grad_cam_pcasvm.head.distances import (
    CosineDistance,
    LocalOutlier,
    LogDensity,
    NearestDistance,
    density_constant,
)
from pytorch_grad_cam_pcasvm.head.registry import stage_for, tensor, transformer_for
from pytorch_grad_cam_pcasvm.head.stage import Facts, Stage
from pytorch_grad_cam_pcasvm.head.stages import Chain, Normalise
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError

_ROOTS = 2.0  # training rows are hardly further from the nearest centre than so many root mean squares


@stage_for.register(NearestNeighbors)
def _nearest_neighbours(estimator: NearestNeighbors) -> Stage:
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
