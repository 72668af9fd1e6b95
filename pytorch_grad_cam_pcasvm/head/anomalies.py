"""Anomalies: how unlike the training set rows are, by a head's value or by the residual of its reduction."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.distances import NearestDistance
from pytorch_grad_cam_pcasvm.head.head import Head
from pytorch_grad_cam_pcasvm.head.stack import HeadTrace


def tells_anomalies(head: Head) -> bool:
    """Return whether a head measures likeness to its training set, so that :func:`measure_anomaly` has an answer.

    Example:
        >>> tells_anomalies(net.head), tells_anomalies(Head.of(NearestNeighbors().fit(features)))
        (False, True)
    """
    if head.decision_position is not None:
        return head.voting.about in ("one class", "likeness")
    return getattr(head.stages[(head.component_position or 0) - 1], "restoring", None) is not None


def find_clusters(head: Head) -> int | None:
    """Return the position of the logarithms of weighted densities of a mixture's clusters; None: the head is none."""
    position = head.decision_position
    return None if not position or head.stages[position - 2].facts.density is None else position - 1


def measure_anomaly(head: Head, trace: HeadTrace) -> Tensor:
    """Return minus the head's value, of a mixture minus its log-density; without a decision, the Q statistic, (N,).

    Args:
        head: the head.
        trace: what it computed for N rows of features, ``net(images).head_trace``.

    Raises:
        ValueError: the head's value does not tell what is like the training set, or its reduction restores nothing.

    Example:
        >>> head = Head.of(NearestNeighbors(n_neighbors=1).fit(features))
        >>> measure_anomaly(head, head.values_of(torch.from_numpy(features).double())).shape
        torch.Size([12])
    """
    clusters = find_clusters(head)
    if clusters is not None:
        return -trace.values[clusters].logsumexp(-1)
    if head.decision_position is not None:
        if not tells_anomalies(head):
            raise ValueError(
                "the value of this head does not tell what is like the training set: fit NearestNeighbors, KMeans, "
                "KernelDensity, GaussianMixture, LocalOutlierFactor(novelty=True), OneClassSVM or another outlier "
                "detector, or a PCA alone"
            )
        return -trace.values[-1][..., 0]
    position = head.component_position
    assert position is not None
    reduction = head.stages[position - 1]
    if getattr(reduction, "restoring", None) is None:
        raise ValueError(
            f"{type(reduction).__name__} has no linear inverse_transform, so what it leaves out is unknown"
        )
    rest, _ = residual(reduction, trace.values[position - 1], trace.values[position])
    return rest.square().sum(-1)


def reweighted(head: Head, trace: HeadTrace, grid: Any, neighbours: int) -> Tensor:
    """Return PatchCore's score of each image, shape (N,): see :meth:`.PCASVMNet.anomaly_score`.

    Raises:
        ValueError: features are not dense, or the head's value is no distance to training patches; or there are too few
            neighbours.
    """
    if neighbours < 2:
        raise ValueError(f"neighbours must be 2 or more, as 9 in PatchCore, got {neighbours!r}")
    stage = head.stages[max(0, len(head.stages) - 2)]  # before the decision, which is its value
    if grid is None or not isinstance(stage, NearestDistance):
        raise ValueError(
            "neighbours= is of distances to training patches: fit NearestNeighbors on features of positions, "
            "pool='dense'"
        )
    most = (-trace.values[-1][..., 0]).unflatten(0, (-1, grid.count)).argmax(1)
    rows = trace.values[-3].unflatten(0, (-1, grid.count))
    rows = rows[torch.arange(len(rows), device=most.device), most]
    index, distances, _ = stage.nearest(rows, stage.at_centre, 1)
    around = stage.nearest(stage.points[index[:, 0]], stage.at_centre, min(neighbours, len(stage.points)))[0]
    of_them = stage.distances(rows.unsqueeze(1), stage.points[around])
    return distances[:, 0] * (1 - (distances[:, 0] - of_them.logsumexp(1)).exp())


def residual(reduction: Any, z: Tensor, components: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual of a reduction's input, which its components lose, and the rows that restore the rest.

    Args:
        reduction: a stage with rows ``restoring`` (B, D).
        z: its input, shape (..., D).
        components: its output, shape (..., B).

    Returns:
        ``r = z - inverse_transform(p)``, shape (..., D), and R, shape (B, D).
    """
    restoring = reduction.restoring.to(components)
    centred, restored = z - reduction.mean.to(components), components @ restoring
    rest = centred - restored
    # A map of rounding errors would show anything. Where all dimensions are kept, they are those of the estimator,
    # which may have been fitted in single precision.
    precision = torch.finfo(torch.float32 if len(restoring) >= restoring.shape[1] else z.dtype)
    rounding = 4 * z.shape[-1] ** 0.5 * precision.eps * (z.norm(dim=-1) + restored.norm(dim=-1))
    return rest * (rest.norm(dim=-1) > rounding).unsqueeze(-1), restoring
