"""Targets of densities: how likely a mixture takes a row to be."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pytorch_grad_cam_pcasvm.head.anomalies import find_clusters
from pytorch_grad_cam_pcasvm.head.distances import mean_slopes
from pytorch_grad_cam_pcasvm.network.outputs import OfHead
from pytorch_grad_cam_pcasvm.targets.target import ClosedFormTarget, PlacedTarget, check, find_sign, head_of


@dataclass(frozen=True, repr=False)
class DensityTarget(PlacedTarget, ClosedFormTarget):
    """The log-density of a mixture: scikit-learn's ``score_samples`` of a GaussianMixture.

    It is ``log sum_c exp(y_c)``, where y_c is the logarithm of the weighted density of cluster c, which
    :class:`SVMTarget` explains. Its gradient with respect to y are the shares ``s_c = exp(y_c) / sum_c exp(y_c)``; its
    secant is their mean along the straight line from the start to y, corrected so that it is exact.

    Args:
        sign: ``"+"``: what makes an image like the training set; ``"-"``: what makes it unlike that, as
            ``net.anomaly_map`` has it.
        at: for dense features: a position (row, column); a boolean mask of the grid (h, w) or of the picture (H, W),
            whose mean is explained; ``"max"``: the position of each image with the largest value. None: all positions.

    Raises:
        TypeError: ``at`` is no place.
        ValueError: the sign is neither ``"+"`` nor ``"-"``, or ``at`` is empty; or, when a map is computed, the head
            does not end with a mixture.

    Example:
        >>> mixture = GaussianMixture(2, covariance_type="diag", random_state=0)
        >>> parts = PCASVMNet(backbone, make_pipeline(PCA(3), mixture).fit(features)).eval()
        >>> maps = ContributionCAM(parts, ["layer2"]).explain(images, DensityTarget("-"))
    """

    sign: str = "+"
    at: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check(self)

    def value(self, output: OfHead) -> Tensor:
        """Return the log-density, or minus that, of a row, or of each row of several."""
        return find_sign(self.sign) * self._clusters(output)[1].logsumexp(-1)

    def seeds(self, output: OfHead, start: OfHead | None = None) -> dict[int, Tensor]:
        """Return the gradient by position, or the secant: rows over the densities of clusters, shape (N, C)."""
        position, y = self._clusters(output)
        if start is None:
            return {position: find_sign(self.sign) * y.softmax(-1)}
        y0 = self._clusters(start)[1]
        values, values0 = y.logsumexp(-1, keepdim=True), y0.logsumexp(-1, keepdim=True)
        size = y.abs().amax(-1, keepdim=True).maximum(y0.abs().amax(-1, keepdim=True))
        secant = mean_slopes(lambda at: at.softmax(-1).unsqueeze(-2), y, y0, values - values0, size)
        return {position: find_sign(self.sign) * secant.squeeze(-2)}

    def _clusters(self, output: OfHead) -> tuple[int, Tensor]:
        """Return the position of the logarithms of the clusters' weighted densities, and these, (N, C)."""
        head = head_of(output, self)
        position = find_clusters(head)
        if position is None:
            raise ValueError(
                f"{self} needs the log-density of a mixture, but this head does not end with one: fit GaussianMixture, "
                "or explain the value of another density or distance with SVMTarget()"
            )
        return position, output.head_trace.values[position]
