"""Anomalies: how unlike the training set rows are, and the scale on which its own rows lie when left out."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.distances import (
    CosineDistance,
    LogDensity,
    NearestDistance,
    OfPoints,
    Quadratic,
    measure_reach,
)
from pytorch_grad_cam_pcasvm.head.head import Head
from pytorch_grad_cam_pcasvm.head.stack import HeadTrace

_TIMES = 3.0  # a scale ends at so many times what training photos reach, which is dark
_ROWS, _BLOCK = 1000, 100  # of a bank that are asked, and at once
_SAME = 1e-6  # of the length of the longest row: by so much a row differs from itself in single precision


def anomaly_range(head: Head) -> tuple[float, float] | None:
    """Return where the scale of a head's anomalies starts and ends; None: nothing is known of its training set.

    Example:
        >>> head = Head.of(NearestNeighbors(n_neighbors=1).fit(features))
        >>> low, high = anomaly_range(head)
        >>> low, high > 0
        (0.0, True)
    """
    for stage in head.stages:
        least, reach = stage.facts.least, stage.facts.reach
        if least is not None and reach is not None:
            return _range(least, reach)
    points = next((stage for stage in head.stages if isinstance(stage, OfPoints)), None)
    values = None if points is None else _left_out(points)
    if points is None or values is None:
        return None
    return _range(*measure_reach(values.cpu().numpy(), is_distance=points.is_distance))


def usual_reach(head: Head) -> float | None:
    """Return the anomaly that nearly all good rows stay below; None: nothing is known of the training set.

    Example:
        >>> head = Head.of(NearestNeighbors(n_neighbors=1).fit(features))
        >>> 0 < usual_reach(head) < anomaly_range(head)[1]
        True
    """
    scale = anomaly_range(head)
    return None if scale is None else scale[0] + (scale[1] - scale[0]) / _TIMES


def _range(least: float, reach: float) -> tuple[float, float] | None:
    return (least, least + _TIMES * (reach - least)) if reach > least else None


def _left_out(stage: OfPoints) -> Tensor | None:
    """Return the anomalies of rows of a bank, without themselves and their like; None: there are too few others."""
    bank, points = stage.at_centre, stage.points
    chosen = points[torch.linspace(0, len(points) - 1, min(len(points), _ROWS), device=points.device).round().long()]
    same, values = (_SAME * points.norm(dim=-1).max()) ** 2, []
    for rows in chosen.split(_BLOCK):
        squares = bank.squared_distances(rows) + (rows - bank.centre).square().sum(-1, keepdim=True)
        squares = torch.where(squares <= same, torch.inf, squares)
        if isinstance(stage, NearestDistance):
            nearest = squares.topk(min(stage.k, len(points)), largest=False).values
            cosine = isinstance(stage, CosineDistance)  # for which these are lengths of differences of units
            values.append((nearest / 2 if cosine else nearest.sqrt()).mean(-1))
        elif isinstance(stage, LogDensity):
            exponents = stage.logarithms - squares / (2 * stage.bandwidth**2)
            values.append(-exponents.logsumexp(-1) - stage.constant)
    left_out = torch.cat(values) if values else points.new_empty(0)
    left_out = left_out[left_out.isfinite()]
    return left_out if len(left_out) else None


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
    return measure_residual(head, trace)


def measure_residual(head: Head, trace: HeadTrace) -> Tensor:
    """Return the Q statistic of rows, (N,): how far they lie outside of all components, squared.

    Args:
        head: the head.
        trace: what it computed for N rows of features.

    Raises:
        ValueError: its reduction restores nothing.

    Example:
        >>> head = Head.of(PCA(2).fit(features))
        >>> measure_residual(head, head.values_of(torch.from_numpy(features).double())).shape
        torch.Size([12])
    """
    position = head.component_position or 0
    reduction = head.stages[position - 1]
    if getattr(reduction, "restoring", None) is None:
        raise ValueError(
            f"{type(reduction).__name__} has no linear inverse_transform, so what it leaves out is unknown"
        )
    rest, _ = residual(reduction, trace.values[position - 1], trace.values[position])
    return rest.square().sum(-1)


def compare_residual(head: Head, trace: HeadTrace, count: int = 1) -> Tensor | None:
    """Return how far images lie outside of all components, in parts of the training set's limit, (N,).

    Args:
        head: the head.
        trace: what it computed for rows of features.
        count: how many rows an image has, whose residuals are averaged.

    Returns:
        The roots; None: the head knows no limit.

    Example:
        >>> rows = torch.from_numpy(features).double()
        >>> compare_residual(net.head, net.head.values_of(rows)) is None
        True
    """
    limit = (head.training_set.preparation or {}).get("likeness")
    if limit is None:
        return None
    return (measure_residual(head, trace).unflatten(0, (-1, count)).mean(1) / float(limit["score"])).sqrt()


def split_anomaly(head: Head, trace: HeadTrace, count: int = 1) -> Tensor | None:
    """Return what each component adds to the anomaly of the most anomalous row of each image, (N, D).

    Args:
        head: the head.
        trace: what it computed for rows of features.
        count: how many rows an image has.

    Returns:
        The terms of :class:`.PCADistance`, by falling variance; None: the head was not made of good photos by it.

    Example:
        >>> rows = torch.from_numpy(features).double()
        >>> split_anomaly(net.head, net.head.values_of(rows)) is None
        True
    """
    if _find_shrinkage(head) is None:
        return None
    place = next(place for place, stage in enumerate(head.stages) if isinstance(stage, Quadratic))
    most = (-trace.values[-1][..., 0]).unflatten(0, (-1, count)).argmax(1)
    rows = trace.values[place].unflatten(0, (-1, count))
    strongest = rows.gather(1, most[:, None, None].expand(-1, 1, rows.shape[-1]))[:, 0]
    return head.stages[place].evaluate(strongest)[1][:, 0].square()


def count_expressing(head: Head, share: float) -> int | None:
    """Return how many components of good photos have a share of their variance.

    Args:
        head: the head.
        share: of the variance, below 1.

    Returns:
        The number; None: the head was not made of good photos by :class:`.PCADistance`.

    Example:
        >>> count_expressing(net.head, 0.95) is None
        True
    """
    shrinkage = _find_shrinkage(head)
    if shrinkage is None:
        return None
    distance = next(stage for stage in head.stages if isinstance(stage, Quadratic))
    weights = distance.roots[0].double().square().sum(0)
    variances = (1 / weights - shrinkage * (1 / weights).mean()).clamp(min=0)
    return int((variances.cumsum(0) < share * variances.sum()).sum()) + 1


def _find_shrinkage(head: Head) -> float | None:
    """Return that of :class:`.PCADistance`; None: the head was not made of good photos by it."""
    good = (head.training_set.preparation or {}).get("good")
    return None if good is None else float(good["shrinkage"])


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
