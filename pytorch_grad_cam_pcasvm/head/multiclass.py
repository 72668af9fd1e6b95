"""Voting: how the decision values of a classifier become classes.

A classifier has P decision values for an image: one per pair of classes (one-vs-one), one per class (one-vs-rest), or a
single one for two classes or a regressor. A *voting* turns them into per-class margins, scores and predictions. Margins
are linear in the decision values, ``decision @ matrix.T``, and the gradient of a target, its *seed*, is a row of the
matrix.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.head.calibration import Calibration
from pytorch_grad_cam_pcasvm.head.elementwise import FUNCTIONS


class WithConstants(nn.Module):
    """A module with tensors that follow it to its device, but are no buffers: no state dict or reset changes them."""

    constants: tuple[str, ...] = ()

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        for name in self.constants:
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else fn(tensor))
        return super()._apply(fn, recurse)


class Voting(WithConstants):
    """How P decision values of an image become margins and scores of C classes.

    Args:
        matrix: C rows over the decision values, shape (C, P).

    Attributes:
        n_classes: C.
        calibration: what turns scores (..., C), or (..., 1) for two classes, into ``predict_proba``; None: nothing.
        of_sklearn: whether scores are what a meta-estimator gets from ``decision_function``. Those of nearest centroids
            and behind a threshold are not: labels are the same, but what is made of scores would be another.
        ranks: whether it tells which class came second; hard votes do not.
    """

    constants: tuple[str, ...] = ("matrix",)
    calibration: Calibration | None = None
    of_sklearn = True
    ranks = True
    # What to do where there are no probabilities.
    instead = (
        "put its classifier into a CalibratedClassifierCV, e.g. "
        "make_pipeline(StandardScaler(), PCA(3), CalibratedClassifierCV(SVC(), ensemble=False))"
    )

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.n_classes = len(matrix)
        self.matrix = matrix

    def margins(self, decision: Tensor) -> Tensor:
        """Return the margin of each class, which maps explain: (..., P) to (..., C)."""
        return decision @ self.matrix.to(decision).T

    def seed(self, category: Tensor, versus: Tensor | None) -> Tensor:
        """Return the derivative of a class's margin, or its decision against ``versus``, w.r.t. the decision values.

        Classes are indices, shape (...); the seeds are of shape (..., P).
        """
        matrix = self.matrix.to(category.device)
        return matrix[category] if versus is None else self.duel(matrix[category], matrix[versus])

    def duel(self, row: Tensor, other: Tensor) -> Tensor:
        """Return the decision of one class against another, by their rows, (..., P): zeros for a class and itself."""
        return row - other

    def scores(self, decision: Tensor) -> Tensor:
        """Return scikit-learn's ``decision_function``, with columns [-a, a] for two classes."""
        return self.ranking(decision)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return per-class values, shape (..., C), that rank the classes."""
        return self.margins(decision)

    def predicted(self, decision: Tensor) -> Tensor:
        """Return the index of the predicted class, shape (...)."""
        return self.ranking(decision).argmax(-1)

    def probabilities(self, decision: Tensor) -> Tensor:
        """Return the probabilities of the classes, as ``predict_proba`` does, shape (..., C)."""
        if self.calibration is None:
            raise ValueError(f"the head has no probabilities: {self.instead}")
        return self.calibrated(self.calibration, decision)

    def calibrated(self, calibration: Calibration, decision: Tensor) -> Tensor:
        """Return the calibrated probabilities of the scores; two classes have one score."""
        scores = self.scores(decision)
        return calibration(scores[..., 1:] if self.n_classes == 2 else scores)


class Regression(Voting):
    """A regressor: one value and no classes. It may predict a function of the value (``inverse``), as GLMs do."""

    instead = "it has no classes, use SVMTarget() for its value"

    def __init__(self, inverse: str | None = None) -> None:
        super().__init__(torch.ones(1, 1, dtype=torch.float64))
        self.inverse = inverse

    def prediction(self, decision: Tensor) -> Tensor:
        """Return the estimator's predictions, shape (N,)."""
        value = decision[..., 0]
        return value if self.inverse is None else FUNCTIONS[self.inverse][0](value)


class OneClass(Regression):
    """A one-class estimator: inliers are 1, outliers -1. A value of exactly 0 is an inlier with ``zero_is_inlier``."""

    def __init__(self, *, zero_is_inlier: bool = False) -> None:
        super().__init__()
        self.zero_is_inlier = zero_is_inlier

    def prediction(self, decision: Tensor) -> Tensor:
        """Return 1 where the value is positive, otherwise -1."""
        value = decision[..., 0]
        return torch.where(value >= 0 if self.zero_is_inlier else value > 0, 1, -1)


class Likeness(Regression):
    """A value that is larger for what is more like the training set: minus a distance, or a density.

    There is no boundary.
    """


class Outputs(Voting):
    """Several values that do not compete: of a regressor with several outputs, or one for each label of an image.

    ``labels``: whether they are of labels, which an image has where its value is positive.
    """

    instead = "it has several outputs, use SVMTarget(0), or the name of an output, for its value"

    def __init__(self, n_classes: int, labels: bool) -> None:
        super().__init__(torch.eye(n_classes, dtype=torch.float64))
        self.labels = labels

    def margins(self, decision: Tensor) -> Tensor:
        """Return the values."""
        return decision

    def prediction(self, decision: Tensor) -> Tensor:
        """Return the estimator's predictions, shape (N, Q): the values, or 1 for labels that an image has, else 0."""
        return (decision > 0).long() if self.labels else decision

    def predicted(self, decision: Tensor) -> Tensor:
        """Raise a ValueError: none of them is predicted in place of the others."""
        raise ValueError(f"the head has {self.n_classes} outputs: name one of net.head.classes_, as in SVMTarget(0)")


class Binary(Voting):
    """Two classes, one value a, positive for the second: margins are [-a, a], either the decision against the other.

    A value of exactly 0 is the second class with ``zero_is_second``, as in libsvm; the first in linear classifiers.
    """

    def __init__(self, *, zero_is_second: bool = False, calibration: Calibration | None = None) -> None:
        super().__init__(torch.tensor([[-1.0], [1.0]], dtype=torch.float64))
        self.zero_is_second = zero_is_second
        self.calibration = calibration

    def duel(self, row: Tensor, other: Tensor) -> Tensor:
        """Return half the difference."""
        return (row - other) / 2

    def predicted(self, decision: Tensor) -> Tensor:
        """Return 1 where the value is positive, and where it is 0 with ``zero_is_second``."""
        return self._for_second(decision)[..., 0].long()

    def _for_second(self, decision: Tensor) -> Tensor:
        return decision >= 0 if self.zero_is_second else decision > 0


class BinaryVote(Binary):
    """Two classes of a OneVsOneClassifier, whose score is a vote plus the squashed value."""

    def scores(self, decision: Tensor) -> Tensor:
        """Return [-s, s] with ``s = (1 for the second class, else 0) + a / (3 (|a| + 1))``."""
        return self.margins(self._for_second(decision) + decision / (3 * (decision.abs() + 1)))


class OneVsRest(Voting):
    """One value per class; the decision between two classes is their difference."""

    def __init__(self, n_classes: int, calibration: Calibration | None = None) -> None:
        super().__init__(torch.eye(n_classes, dtype=torch.float64))
        self.calibration = calibration

    def margins(self, decision: Tensor) -> Tensor:
        """Return the decision values."""
        return decision


class Relative(Voting):
    """One value per class of which only differences count, as log-likelihoods: margins are against the others' mean."""

    def __init__(self, n_classes: int, calibration: Calibration | None = None) -> None:
        super().__init__((n_classes * torch.eye(n_classes, dtype=torch.float64) - 1) / (n_classes - 1))
        self.calibration = calibration

    def duel(self, row: Tensor, other: Tensor) -> Tensor:
        """Return 1 for the one class and -1 for the other."""
        return (row - other) * ((self.n_classes - 1) / self.n_classes)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return the values."""
        return decision


class Plurality(Voting):
    """Nearest neighbours of C > 2 classes: C margins, then the votes of the ``k`` nearest, which decide."""

    def __init__(self, n_classes: int, k: int) -> None:
        super().__init__(torch.eye(n_classes, 2 * n_classes, dtype=torch.float64))
        self.k = k

    def scores(self, decision: Tensor) -> Tensor:
        """Return the margins: scikit-learn has no decision function."""
        return self.margins(decision)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return the votes; of equals, the class with the larger margin counts only as runner-up."""
        margins = self.margins(decision)
        return decision[..., self.n_classes :] + margins / (3 * (margins.abs() + 1))

    def predicted(self, decision: Tensor) -> Tensor:
        """Return the class with most votes, the first of equals."""
        return decision[..., self.n_classes :].argmax(-1)


class OneVsOne(Voting):
    """One value per pair of classes i < j, positive for i (the order of libsvm).

    Args:
        n_classes: C.
        pairwise_scores: scores are the pairwise values (``decision_function_shape="ovo"``).
        break_ties: the largest score wins (``break_ties=True``), not the lowest of the classes with most votes.
        zero_is_second: in the scores, a value of exactly 0 is a vote for j, not for i.
    """

    constants = ("matrix", "seconds")

    def __init__(
        self, n_classes: int, *, pairwise_scores: bool = False, break_ties: bool = False, zero_is_second: bool = False
    ) -> None:
        first, second = pairs(n_classes)
        matrix = torch.zeros(n_classes, len(first), dtype=torch.float64)
        matrix[first, torch.arange(len(first))] = 1
        matrix[second, torch.arange(len(first))] = -1
        super().__init__(matrix)
        self.seconds = torch.arange(n_classes, dtype=torch.float64)
        self.pairwise_scores, self.break_ties, self.zero_is_second = pairwise_scores, break_ties, zero_is_second

    def duel(self, row: Tensor, other: Tensor) -> Tensor:
        """Return 1 or -1 for the pair of the two, the only one where neither row is 0."""
        return (row - other) / 2 * (row * other).abs()

    def scores(self, decision: Tensor) -> Tensor:
        """Return the pairwise values, or votes plus squashed margins ``s / (3 (|s| + 1))``, as scikit-learn does."""
        return decision if self.pairwise_scores else self.ranking(decision)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return votes plus squashed margins, shape (..., C)."""
        margins = self.margins(decision)
        votes = self._votes(decision > 0 if self.zero_is_second else decision >= 0, decision)
        return torch.addcdiv(votes, margins, margins.abs() + 1, value=1 / 3)

    def predicted(self, decision: Tensor) -> Tensor:
        """Return the class with most votes, the lowest index among equals; with ``break_ties`` the best score."""
        # libsvm gives a value of exactly 0 to the second class, decision_function to the first.
        return (self.ranking(decision) if self.break_ties else self._votes(decision > 0, decision)).argmax(-1)

    def _votes(self, for_first: Tensor, like: Tensor) -> Tensor:
        # Class c is the second of c pairs, whose votes it has where they are not for the first.
        return F.linear(for_first.to(like), self.matrix.to(like), self.seconds.to(like))


class Calibrated(Voting):
    """The voting of calibrated classifiers: the mean probability over members, each with a voting and a calibration.

    Margins are the mean of the members' margins; they are what is explained, since probabilities saturate. ``sizes``
    are the members' numbers of decision values; a calibration of None is that of the member's voting; ``weights`` are
    the members' shares of the mean, of which the sum is 1 (None: equal ones). Scores are the probabilities, or the
    mean of the members' scores with ``scores_are_means``, as of a bag.
    """

    def __init__(
        self,
        votings: Sequence[Voting],
        sizes: Sequence[int],
        calibrations: Sequence[Calibration | None],
        weights: Sequence[float] | None = None,
        scores_are_means: bool = False,
    ) -> None:
        shares = [1 / len(votings)] * len(votings) if weights is None else weights
        super().__init__(torch.cat([share * voting.matrix for share, voting in zip(shares, votings, strict=True)], 1))
        self.votings: Any = nn.ModuleList(votings)
        self.sizes, self.calibrations, self.weights, self.shares = list(sizes), list(calibrations), weights, shares
        self.scores_are_means = scores_are_means

    def duel(self, row: Tensor, other: Tensor) -> Tensor:
        """Return the members' duels, times their shares."""
        parts = zip(self.votings, self.shares, *(x.split(self.sizes, -1) for x in (row, other)), strict=True)
        return torch.cat([share * voting.duel(one / share, two / share) for voting, share, one, two in parts], -1)

    def probabilities(self, decision: Tensor) -> Tensor:
        """Return the mean of the members' calibrated probabilities."""
        members = zip(self.votings, decision.split(self.sizes, -1), self.calibrations, self.shares, strict=True)
        return torch.stack([
            share * (voting.probabilities(part) if curve is None else voting.calibrated(curve, part))
            for voting, part, curve, share in members
        ]).sum(0)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return the probabilities."""
        return self.probabilities(decision)

    def scores(self, decision: Tensor) -> Tensor:
        """Return the probabilities, or the mean of the members' scores."""
        if not self.scores_are_means:
            return self.probabilities(decision)
        members = zip(self.votings, decision.split(self.sizes, -1), self.shares, strict=True)
        return torch.stack([share * voting.scores(part) for voting, part, share in members]).sum(0)


def pairs(n_classes: int) -> Tensor:
    """Return the classes i < j of each pair in the order of libsvm, shape (2, C (C - 1) / 2)."""
    return torch.triu_indices(n_classes, n_classes, 1)
