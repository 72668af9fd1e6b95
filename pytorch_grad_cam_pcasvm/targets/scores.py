"""Targets of scores: probabilities, and the outputs of a network without a head."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.anomalies import find_clusters
from pytorch_grad_cam_pcasvm.head.distances import mean_slopes
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput, OfHead
from pytorch_grad_cam_pcasvm.targets.decisions import SVMTarget
from pytorch_grad_cam_pcasvm.targets.target import ClosedFormTarget, PlacedTarget, check, find_sign, head_of


@dataclass(frozen=True, repr=False)
class ProbabilityTarget(PlacedTarget):
    """The calibrated probability of a class, exactly as ``predict_proba`` returns it.

    Far from the decision boundary, a probability saturates and its gradient vanishes; use ``SVMTarget`` there.

    Args:
        category: a label from ``classes_``; None: the class predicted for each image.
        sign: ``"+"``: what raises the probability; ``"-"``: what lowers it.
        at: for dense features: a position (row, column); a boolean mask of the grid (h, w) or of the picture (H, W),
            whose mean is explained; ``"max"``: the position of each image with the largest value. None: all positions.

    Raises:
        TypeError: ``at`` is no place.
        ValueError: the sign is neither ``"+"`` nor ``"-"``, or ``at`` is empty.

    Example:
        >>> logistic = PCASVMNet(backbone, LogisticRegression().fit(features, labels)).eval()
        >>> maps = ClosedFormGradCAM(logistic, ["layer2"]).explain(images, ProbabilityTarget("cat"))
    """

    category: Any = None
    sign: str = "+"
    at: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check(self)

    def value(self, output: OfHead) -> Tensor:
        """Return the probability of a row, or of each row of several."""
        return self.value_questions(output, None if self.category is not None else output.predicted())

    def value_questions(self, output: OfHead, question_index: Tensor | None) -> Tensor:
        """Return the probability of each row's class, by its index; None: of the class that is named."""
        decision = SVMTarget(self.category).decision(output)
        voting = output.head.voting
        probabilities = voting.probabilities(decision) * find_sign(self.sign)
        if question_index is None:
            return probabilities[..., output.head.class_index(self.category)]
        return probabilities.gather(-1, question_index.unsqueeze(-1)).squeeze(-1)

    def count_questions(self, head: Head) -> int:
        """Return 1 for a named class, else the number of classes."""
        return 1 if self.category is not None else int(head.voting.n_classes)

    def number_questions(self, output: OfHead) -> Tensor:
        """Return the index of the class predicted for each row, shape (N,)."""
        predicted: Tensor = output.predicted()
        return predicted

    def name_question(self, head: Head, number: int) -> "ProbabilityTarget":
        """Return the target with its class named."""
        if self.category is not None:
            return self
        assert head.classes_ is not None
        return replace(self, category=head.classes_[number].item())


@dataclass(frozen=True, repr=False)
class ScoreTarget(ClosedFormTarget):
    """A score of an ordinary classifier, by its index; None: the largest of each image.

    Args:
        category: the index of the score.

    Example:
        >>> cam = ClosedFormGradCAM(backbone, ["layer2"])  # whose features are eight scores
        >>> cam.explain(images, ScoreTarget(3)).values.shape
        torch.Size([2, 1])
    """

    category: int | None = None

    def __call__(self, output: Tensor) -> Tensor:
        """Return the score: a number for a row, shape (N,) for a batch."""
        return output.max(-1).values if self.category is None else output[..., self.category]

    def value_questions(self, output: Tensor, question_index: Tensor | None) -> Tensor:
        """Return the score of each row, by its index; None: the one that is named."""
        return self(output) if question_index is None else output.index_select(-1, question_index).squeeze(-1)

    def number_questions(self, output: Tensor) -> Tensor:
        """Return the index of each row's score, shape (N,)."""
        return output.argmax(-1)

    def name_question(self, head: Any, number: int) -> "ScoreTarget":
        """Return the target with its score named."""
        return ScoreTarget(number) if self.category is None else self

    def seeds(self, output: Tensor, start: Any = None) -> dict[int, Tensor]:
        """Return a one-hot row per image, shape (N, C)."""
        index = output.argmax(-1) if self.category is None else torch.full_like(output[..., 0], self.category).long()
        return {0: torch.zeros_like(output).scatter(-1, index.unsqueeze(-1), 1.0)}


@dataclass(frozen=True)
class PredictedScore:
    """scikit-learn's score of each image's predicted class, which pytorch-grad-cam explains if no targets are given.

    Its map equals that of ``SVMTarget()`` except for the size of the gradient, which matters to pytorch-grad-cam's
    scaling because that adds 1e-7.

    Example:
        >>> PredictedScore()(net(images)[0]).shape
        torch.Size([])
    """

    def __repr__(self) -> str:
        return "the predicted class"

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the score of a row."""
        decision = SVMTarget().decision(output)
        voting = output.head.voting
        return voting.ranking(decision)[voting.predicted(decision.detach())]


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
