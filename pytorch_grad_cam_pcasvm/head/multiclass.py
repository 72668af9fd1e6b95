"""Voting: how the decision values of a machine become classes.

A machine has P decision values for an image: one per pair of classes for one-vs-one, one per class for one-vs-rest, a
single one for two classes or a regressor. A *voting* turns them into per-class margins, scores and predictions. Margins
are linear in the decision values, so the gradient of a target is a row vector over them, its *seed*.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.calibration import Calibration


class Voting(ABC):
    """How P decision values of an image become margins and scores of C classes.

    Attributes:
        n_classes: C.
        calibration: what turns scores (..., C), or (..., 1) for two classes, into ``predict_proba``; None: nothing.
    """

    n_classes: int
    calibration: Calibration | None = None

    def margins(self, decision: Tensor) -> Tensor:
        """Return the margin of each class, which maps explain: (..., P) to (..., C), linear; here the values."""
        return decision

    @abstractmethod
    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return the derivative of a class's margin, or its decision against ``versus``, w.r.t. the decision values.

        Classes are indices, shape (...); ``decision``, shape (..., P), only supplies dtype, device and P.
        """

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
            raise ValueError(
                "the head has no probabilities: put its classifier into a CalibratedClassifierCV, e.g. "
                "make_pipeline(StandardScaler(), PCA(3), CalibratedClassifierCV(SVC(), ensemble=False))"
            )
        return self.calibrated(self.calibration, decision)

    def calibrated(self, calibration: Calibration, decision: Tensor) -> Tensor:
        """Return the calibrated probabilities of the scores; two classes have one score."""
        scores = self.scores(decision)
        return calibration(scores[..., 1:] if self.n_classes == 2 else scores)


class Regression(Voting):
    """A regressor: one value and no classes."""

    n_classes = 1

    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(decision)

    def prediction(self, decision: Tensor) -> Tensor:
        """Return the estimator's predictions, shape (N,)."""
        return decision[..., 0]


class OneClass(Regression):
    """A one-class machine: inliers are 1, outliers -1."""

    def prediction(self, decision: Tensor) -> Tensor:
        """Return 1 where the value is positive, otherwise -1."""
        return torch.where(decision[..., 0] > 0, 1, -1)


class Binary(Voting):
    """Two classes, one value a: positive for the second class.

    A value of exactly 0 is the second class with ``zero_is_second``, as in libsvm; the first in linear classifiers.
    """

    n_classes = 2

    def __init__(self, *, zero_is_second: bool = False, calibration: Calibration | None = None) -> None:
        self.zero_is_second = zero_is_second
        self.calibration = calibration

    def margins(self, decision: Tensor) -> Tensor:
        """Return [-a, a]."""
        return torch.cat([-decision, decision], -1)

    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return 1 for the second class and -1 for the first: each is also its decision against the other."""
        sign = 2 * category - 1 if versus is None else category - versus
        return sign.to(decision.dtype).unsqueeze(-1)

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
        self.n_classes = n_classes
        self.calibration = calibration

    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return e_c, or e_c - e_d for class c against d."""
        seed = _one_hot(category, decision)
        return seed if versus is None else seed - _one_hot(versus, decision)


class OneVsOne(Voting):
    """One value per pair of classes i < j, positive for i (the order of libsvm).

    Args:
        n_classes: C.
        pairwise_scores: scores are the pairwise values (``decision_function_shape="ovo"``).
        break_ties: the largest score wins (``break_ties=True``), not the lowest of the classes with most votes.
        zero_is_second: in the scores, a value of exactly 0 is a vote for j, not for i.
    """

    def __init__(
        self, n_classes: int, *, pairwise_scores: bool = False, break_ties: bool = False, zero_is_second: bool = False
    ) -> None:
        self.n_classes = n_classes
        self.pairwise_scores, self.break_ties, self.zero_is_second = pairwise_scores, break_ties, zero_is_second

    def margins(self, decision: Tensor) -> Tensor:
        """Return the sum of each class's signed pairwise values."""
        return self._tally(decision, -decision)

    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return +1 where c is the pair's first class, -1 where it is the second; only the pair {c, d} against d."""
        first, second = pairs(self.n_classes, decision.device)
        c = category.unsqueeze(-1)
        wins, loses = c == first, c == second
        if versus is not None:
            d = versus.unsqueeze(-1)
            wins, loses = wins & (d == second), loses & (d == first)
        return wins.to(decision.dtype) - loses.to(decision.dtype)

    def scores(self, decision: Tensor) -> Tensor:
        """Return the pairwise values, or votes plus squashed margins ``s / (3 (|s| + 1))``, as scikit-learn does."""
        return decision if self.pairwise_scores else self.ranking(decision)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return votes plus squashed margins, shape (..., C)."""
        margins = self.margins(decision)
        votes = self._votes(decision > 0 if self.zero_is_second else decision >= 0, decision.dtype)
        return votes + margins / (3 * (margins.abs() + 1))

    def predicted(self, decision: Tensor) -> Tensor:
        """Return the class with most votes, the lowest index among equals; with ``break_ties`` the best score."""
        # libsvm gives a value of exactly 0 to the second class, decision_function to the first.
        return (self.ranking(decision) if self.break_ties else self._votes(decision > 0, decision.dtype)).argmax(-1)

    def _votes(self, for_first: Tensor, dtype: torch.dtype) -> Tensor:
        return self._tally(for_first.to(dtype), (~for_first).to(dtype))

    def _tally(self, for_first: Tensor, for_second: Tensor) -> Tensor:
        """Add up pairwise values (..., P) per class (..., C)."""
        first, second = pairs(self.n_classes, for_first.device)
        total = for_first.new_zeros(*for_first.shape[:-1], self.n_classes)
        return total.index_add(-1, first, for_first).index_add(-1, second, for_second)


class Calibrated(Voting):
    """The voting of calibrated classifiers: the mean probability over members, each with a voting and a calibration.

    Margins are the mean of the members' margins; they are what is explained, since probabilities saturate. ``sizes``
    are the members' numbers of decision values.
    """

    def __init__(self, votings: Sequence[Voting], sizes: Sequence[int], calibrations: Sequence[Calibration]) -> None:
        self.n_classes = votings[0].n_classes
        self.votings, self.sizes, self.calibrations = list(votings), list(sizes), list(calibrations)

    def margins(self, decision: Tensor) -> Tensor:
        """Return the mean of the members' margins."""
        return torch.stack([voting.margins(part) for voting, part in self._members(decision)]).mean(0)

    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return the members' seeds, divided by their number."""
        seeds = [voting.seed(category, versus, part) for voting, part in self._members(decision)]
        return torch.cat(seeds, -1) / len(self.votings)

    def probabilities(self, decision: Tensor) -> Tensor:
        """Return the mean of the members' calibrated probabilities."""
        members = zip(self._members(decision), self.calibrations, strict=True)
        return torch.stack([voting.calibrated(curve, part) for (voting, part), curve in members]).mean(0)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return the probabilities, which are also the scores."""
        return self.probabilities(decision)

    def _members(self, decision: Tensor) -> Iterable[tuple[Voting, Tensor]]:
        return zip(self.votings, decision.split(self.sizes, -1), strict=True)


def pairs(n_classes: int, device: torch.device) -> Tensor:
    """Return the classes i < j of each pair in the order of libsvm, shape (2, C (C - 1) / 2)."""
    return torch.triu_indices(n_classes, n_classes, 1, device=device)


def _one_hot(index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter(-1, index.unsqueeze(-1), 1.0)
