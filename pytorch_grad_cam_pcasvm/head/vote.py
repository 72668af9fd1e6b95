"""The vote: how the decision values of an image become margins, scores and a prediction. It is data of a head.

A classifier has P decision values for an image: one per pair of classes (one-vs-one), one per class (one-vs-rest), or a
single one for two classes or a regressor. Per-class margins are linear in them, ``decision @ matrix.T``, and the
gradient of a target, its *seed*, is a row of the matrix. The rest is a choice between a few rules:

==================== ================ ============= ==================================================================
made by              compares         decides by    values
==================== ================ ============= ==================================================================
``binary``           margins          sign          one, positive for the second class: margins are [-a, a]
``binary_vote``      margins          sign          the same of a OneVsOneClassifier, whose score is a squashed vote
``one_vs_rest``      margins          comparison    one for each class, which is its margin
``relative``         values           comparison    one for each class, of which only differences count
``plurality``        last votes       last values   a margin for each class, then the votes of neighbours
``one_vs_one``       votes of pairs   votes         one for each pair of classes i < j, positive for i (as in libsvm)
``calibrated``       probabilities    comparison    those of several members, one after the other
``compared``         margins, values  last values   raw margins, probabilities and votes, of a forest and the like
``outputs``          margins          (nothing)     several that do not compete
``regression``       margins          (nothing)     one, and no classes; ``one_class`` and ``likeness`` are the same
==================== ================ ============= ==================================================================
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.head.elementwise import FUNCTIONS, Calibration

_CALIBRATE = (
    "put its classifier into a CalibratedClassifierCV, e.g. "
    "make_pipeline(StandardScaler(), PCA(3), CalibratedClassifierCV(SVC(), ensemble=False))"
)


@dataclass(frozen=True, eq=False)
class Vote:
    """How P decision values of an image become margins, scores and predictions of C classes, or of values.

    Attributes:
        matrix: the margin of each class over the decision values, shape (C, P).
        kind: the name that its function has in files, see ``KINDS``; none, if it is in no file.
        arguments: those of that function.
        about: ``"classes"``, of which one is predicted; ``"outputs"``, which do not compete; or a single number: a
            ``"value"``, that of a ``"one class"`` estimator, or a ``"likeness"`` to the training set, which has no
            boundary.
        pair: factor of the difference of two classes' rows, which is the decision between them; None: it is the value
            of their own pair.
        compare: what ranks classes: ``"margins"``, ``"values"``, ``"pairs"``, ``"last"`` or ``"probabilities"``.
        decide: what predicts: the ``"comparison"``, the ``"sign"`` of the only value, the ``"votes"`` of pairs, or the
            ``"last"`` C values.
        score: scikit-learn's ``decision_function``: the ``"comparison"``, the ``"margins"``, the ``"values"``, the
            ``"squashed"`` vote of two classes, or the ``"mean"`` of the members' scores.
        values_are_margins: whether the matrix is the identity, and need not be multiplied with.
        zero_is_second: whether a value of exactly 0 is for the second class, an inlier, or the second of a pair.
        inverse: the function of its value that a regressor predicts, by name, as GLMs do.
        calibration: what turns scores (..., C), or (..., 1) for two classes, into ``predict_proba``; None: nothing.
        first_probability: position of the first of C probabilities among the values, if they are there.
        members: of several classifiers, of which the mean probability is compared.
        instead: what to do where there are no probabilities.
        of_sklearn: whether scores are what a meta-estimator gets from ``decision_function``. Those of nearest centroids
            and behind a threshold are not: labels are the same, but what is made of scores would be another.
        ranks: whether it tells which class came second; hard votes do not.

    Example:
        >>> net.head.voting.margins(net(images).decision).shape
        torch.Size([2, 3])
    """

    matrix: Tensor
    kind: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    about: str = "classes"
    pair: float | None = 1.0
    compare: str = "margins"
    decide: str = "comparison"
    score: str = "comparison"
    values_are_margins: bool = False
    zero_is_second: bool = False
    inverse: str | None = None
    calibration: Calibration | None = None
    first_probability: int | None = None
    members: tuple["Member", ...] = ()
    instead: str = _CALIBRATE
    of_sklearn: bool = True
    ranks: bool = True

    @property
    def n_classes(self) -> int:
        """C."""
        return len(self.matrix)

    @property
    def sizes(self) -> list[int]:
        """Numbers of the members' decision values."""
        return [member.size for member in self.members]

    def move_tensors(self, move: Callable[[Tensor], Tensor]) -> "Vote":
        """Return the vote with its tensors elsewhere."""
        members = tuple(replace(member, vote=member.vote.move_tensors(move)) for member in self.members)
        return replace(self, matrix=move(self.matrix), members=members)

    def margins(self, decision: Tensor) -> Tensor:
        """Return the margin of each class, which maps explain: (..., P) to (..., C)."""
        return decision if self.values_are_margins else decision @ self.matrix.to(decision).T

    def seed(self, category: Tensor, versus: Tensor | None) -> Tensor:
        """Return the derivative of a class's margin, or its decision against ``versus``, w.r.t. the decision values.

        Classes are indices, shape (...); the seeds are of shape (..., P).
        """
        matrix = self.matrix.to(category.device)
        return matrix[category] if versus is None else self.duel(matrix[category], matrix[versus])

    def duel(self, row: Tensor, other: Tensor) -> Tensor:
        """Return the decision of one class against another, by their rows, (..., P): zeros for a class and itself."""
        if self.members:
            parts = zip(self.members, *(rows.split(self.sizes, -1) for rows in (row, other)), strict=True)
            return torch.cat([m.share * m.vote.duel(one / m.share, two / m.share) for m, one, two in parts], -1)
        if self.pair is None:  # 1 or -1 for the pair of the two, the only one where neither row is 0
            return (row - other) / 2 * (row * other).abs()
        return (row - other) * self.pair

    def scores(self, decision: Tensor) -> Tensor:
        """Return scikit-learn's ``decision_function``, with columns [-a, a] for two classes."""
        match self.score:
            case "values":
                return decision
            case "margins":
                return self.margins(decision)
            case "squashed":  # [-s, s] with s = (1 for the second class, else 0) + a / (3 (|a| + 1))
                return self.margins(self._is_for_second(decision) + _squash(decision))
            case "mean":
                return torch.stack([m.share * m.vote.scores(part) for m, part in self._split_decision(decision)]).sum(0)
        return self.ranking(decision)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return per-class values, shape (..., C), that rank the classes."""
        match self.compare:
            case "values":
                return decision[..., : self.n_classes]
            case "pairs":  # votes plus squashed margins
                margins = self.margins(decision)
                votes = self._votes(decision > 0 if self.zero_is_second else decision >= 0, decision)
                return torch.addcdiv(votes, margins, margins.abs() + 1, value=1 / 3)
            case "last":  # of equals, the class with the larger margin counts only as runner-up
                return decision[..., -self.n_classes :] + _squash(self.margins(decision))
            case "probabilities":
                return self.probabilities(decision)
        return self.margins(decision)

    def predicted(self, decision: Tensor) -> Tensor:
        """Return the index of the predicted class, shape (...), the first of equals.

        Raises:
            ValueError: the values do not compete.
        """
        if self.about == "outputs":
            raise ValueError(
                f"the head has {self.n_classes} outputs: name one of net.head.classes_, as in SVMTarget(0)"
            )
        match self.decide:
            case "sign":
                return self._is_for_second(decision)[..., 0].long()
            case "last":
                return decision[..., -self.n_classes :].argmax(-1)
            case "votes":  # libsvm gives a value of exactly 0 to the second class, decision_function to the first
                return self._votes(decision > 0, decision).argmax(-1)
        return self.ranking(decision).argmax(-1)

    def prediction(self, decision: Tensor) -> Tensor:
        """Return the predictions of a single value, shape (N,), or of several outputs, (N, Q).

        They are the values or their ``inverse``; 1 and -1 for inliers and outliers; 1 and 0 for an image's labels.
        """
        if self.about == "outputs":
            return (decision > 0).long() if self.decide == "sign" else decision
        if self.about == "one class":
            return torch.where(self._is_for_second(decision)[..., 0], 1, -1)
        value = decision[..., 0]
        return value if self.inverse is None else FUNCTIONS[self.inverse][0](value)

    def probabilities(self, decision: Tensor) -> Tensor:
        """Return the probabilities of the classes, as ``predict_proba`` does, shape (..., C).

        Raises:
            ValueError: there are none.
        """
        if self.first_probability is not None:
            return decision[..., self.first_probability : self.first_probability + self.n_classes]
        if self.members:
            return torch.stack([m.share * m.probabilities(part) for m, part in self._split_decision(decision)]).sum(0)
        if self.calibration is None:
            raise ValueError(f"the head has no probabilities: {self.instead}")
        return self.calibrated(self.calibration, decision)

    def calibrated(self, calibration: Calibration, decision: Tensor) -> Tensor:
        """Return the calibrated probabilities of the scores; two classes have one score."""
        scores = self.scores(decision)
        return calibration(scores[..., 1:] if self.n_classes == 2 else scores)

    def _is_for_second(self, decision: Tensor) -> Tensor:
        return decision >= 0 if self.zero_is_second else decision > 0

    def _votes(self, for_first: Tensor, like: Tensor) -> Tensor:
        # Class c is the second of c pairs, whose votes it has where they are not for the first.
        seconds = torch.arange(self.n_classes, dtype=like.dtype, device=like.device)
        return F.linear(for_first.to(like), self.matrix.to(like), seconds)

    def _split_decision(self, decision: Tensor) -> "zip[tuple[Member, Tensor]]":
        return zip(self.members, decision.split(self.sizes, -1), strict=True)


@dataclass(frozen=True, eq=False)
class Member:
    """One of several classifiers: its vote, number of values, share of the mean, and calibration (None: its vote's)."""

    vote: Vote
    size: int
    share: float
    calibration: Calibration | None

    def probabilities(self, decision: Tensor) -> Tensor:
        """Return the classifier's probabilities, of its own values."""
        if self.calibration is None:
            return self.vote.probabilities(decision)
        return self.vote.calibrated(self.calibration, decision)


def _squash(values: Tensor) -> Tensor:
    """Return values within (-1/3, 1/3), in their order, as scikit-learn adds them to votes."""
    return values / (3 * (values.abs() + 1))


# --- the kinds of votes ----------------------------------------------------------------------------------------------


def regression(inverse: str | None = None) -> Vote:
    """Return the vote of a regressor: one value and no classes, of which it may predict a function."""
    matrix, instead = torch.ones(1, 1, dtype=torch.float64), "it has no classes, use SVMTarget() for its value"
    return Vote(matrix, "Regression", {"inverse": inverse}, "value", inverse=inverse, instead=instead)


def one_class(*, zero_is_inlier: bool = False) -> Vote:
    """Return the vote of a one-class estimator: inliers are 1, outliers -1."""
    arguments = {"zero_is_inlier": zero_is_inlier}
    return replace(regression(), kind="OneClass", arguments=arguments, about="one class", zero_is_second=zero_is_inlier)


def likeness(inverse: None = None) -> Vote:
    """Return the vote of a likeness to the training set: minus a distance, or a density; it has no boundary."""
    return replace(regression(inverse), kind="Likeness", about="likeness")


def outputs(n_classes: int, labels: bool) -> Vote:
    """Return the vote of several outputs of a regressor, or of ``labels``, which an image has where it is positive."""
    return Vote(
        torch.eye(n_classes, dtype=torch.float64),
        "Outputs",
        {"n_classes": n_classes, "labels": labels},
        "outputs",
        decide="sign" if labels else "comparison",
        values_are_margins=True,
        instead="it has several outputs, use SVMTarget(0), or the name of an output, for its value",
    )


def binary(*, zero_is_second: bool = False, calibration: Calibration | None = None) -> Vote:
    """Return the vote of two classes with one value a: either margin is the decision against the other class.

    A value of exactly 0 is the second class with ``zero_is_second``, as in libsvm; the first in linear classifiers.
    """
    matrix = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    vote = Vote(
        matrix, "Binary", {"zero_is_second": zero_is_second, "calibration": calibration}, calibration=calibration
    )
    return replace(vote, pair=0.5, decide="sign", zero_is_second=zero_is_second)


def binary_vote(*, zero_is_second: bool = False, calibration: Calibration | None = None) -> Vote:
    """Return the vote of two classes of a OneVsOneClassifier, whose score is a vote plus the squashed value."""
    vote = binary(zero_is_second=zero_is_second, calibration=calibration)
    return replace(vote, kind="BinaryVote", score="squashed")


def one_vs_rest(n_classes: int, calibration: Calibration | None = None) -> Vote:
    """Return the vote of one value per class; the decision between two classes is their difference."""
    matrix, arguments = torch.eye(n_classes, dtype=torch.float64), {"n_classes": n_classes, "calibration": calibration}
    return Vote(matrix, "OneVsRest", arguments, values_are_margins=True, calibration=calibration)


def relative(n_classes: int, calibration: Calibration | None = None) -> Vote:
    """Return the vote of values of which only differences count, as log-likelihoods: margins are against the others."""
    matrix, arguments = _against_others(n_classes), {"n_classes": n_classes, "calibration": calibration}
    pair = (n_classes - 1) / n_classes
    return Vote(matrix, "Relative", arguments, pair=pair, compare="values", calibration=calibration)


def plurality(n_classes: int, k: int) -> Vote:
    """Return the vote of the ``k`` nearest neighbours of C > 2 classes: C margins, then their votes, which decide."""
    matrix, arguments = torch.eye(n_classes, 2 * n_classes, dtype=torch.float64), {"n_classes": n_classes, "k": k}
    # scikit-learn has no decision function.
    return Vote(matrix, "Plurality", arguments, compare="last", decide="last", score="margins")


def one_vs_one(
    n_classes: int, *, pairwise_scores: bool = False, break_ties: bool = False, zero_is_second: bool = False
) -> Vote:
    """Return the vote of one value per pair of classes i < j, positive for i (the order of libsvm).

    Args:
        n_classes: C.
        pairwise_scores: scores are the pairwise values (``decision_function_shape="ovo"``).
        break_ties: the largest score wins (``break_ties=True``), not the lowest of the classes with most votes.
        zero_is_second: in the scores, a value of exactly 0 is a vote for j, not for i.
    """
    first, second = pairs(n_classes)
    matrix = torch.zeros(n_classes, len(first), dtype=torch.float64)
    matrix[first, torch.arange(len(first))] = 1
    matrix[second, torch.arange(len(first))] = -1
    options = {"pairwise_scores": pairwise_scores, "break_ties": break_ties, "zero_is_second": zero_is_second}
    return Vote(
        matrix,
        "OneVsOne",
        {"n_classes": n_classes, **options},
        pair=None,
        compare="pairs",
        decide="comparison" if break_ties else "votes",
        score="values" if pairwise_scores else "comparison",
        zero_is_second=zero_is_second,
    )


def calibrated(
    votings: Sequence[Vote],
    sizes: Sequence[int],
    calibrations: Sequence[Calibration | None],
    weights: Sequence[float] | None = None,
    scores_are_means: bool = False,
) -> Vote:
    """Return the vote of calibrated classifiers: the mean probability over members.

    Margins are the mean of the members' margins; they are what is explained, since probabilities saturate.

    Args:
        votings: the members' votes.
        sizes: their numbers of decision values.
        calibrations: what makes their probabilities; None: that of the member's vote.
        weights: their shares of the mean, of which the sum is 1 (None: equal ones).
        scores_are_means: scores are the mean of the members' scores, as of a bag, and not the probabilities.
    """
    shares = [1 / len(votings)] * len(votings) if weights is None else weights
    members = {"votings": votings, "sizes": sizes, "calibrations": calibrations, "weights": weights}
    return Vote(
        torch.cat([share * vote.matrix for share, vote in zip(shares, votings, strict=True)], 1),
        "Calibrated",
        {**members, "scores_are_means": scores_are_means},
        compare="probabilities",
        score="mean" if scores_are_means else "comparison",
        members=tuple(map(Member, votings, sizes, shares, calibrations)),
    )


def compared(n_classes: int, raw: int, has_probabilities: bool) -> Vote:
    """Return the vote of an estimator without a gradient: of each class its value minus the mean of the others'.

    The values of an image are raw margins, if there are any, then probabilities, if there are any, then votes: 1 for
    the class that the estimator's own ``predict`` names, which decides, as of a hard vote. The first of these are
    compared; of two classes there is one raw margin, that of the second.

    Args:
        n_classes: C.
        raw: number of raw margins: 0, C, or 1 of two classes.
        has_probabilities: whether there are probabilities.
    """
    first = torch.tensor([[-1.0], [1.0]], dtype=torch.float64) if raw == 1 else _against_others(n_classes)
    width = raw + n_classes * (1 + has_probabilities)
    return Vote(
        F.pad(first, (0, width - first.shape[1])),
        pair=(n_classes - 1) / n_classes,
        compare="margins" if raw == 1 else "values",
        decide="last",
        first_probability=raw if has_probabilities else None,
        instead="its estimator has no predict_proba",
        ranks=bool(raw or has_probabilities or n_classes == 2),
    )


def _against_others(n_classes: int) -> Tensor:
    """Return the rows of margins that are a value minus the mean of the others', shape (C, C)."""
    return (n_classes * torch.eye(n_classes, dtype=torch.float64) - 1) / (n_classes - 1)


def pairs(n_classes: int) -> Tensor:
    """Return the classes i < j of each pair in the order of libsvm, shape (2, C (C - 1) / 2)."""
    return torch.triu_indices(n_classes, n_classes, 1)


KINDS: dict[str, Callable[..., Vote]] = {  # by the names that they have in files
    "Regression": regression,
    "OneClass": one_class,
    "Likeness": likeness,
    "Outputs": outputs,
    "Binary": binary,
    "BinaryVote": binary_vote,
    "OneVsRest": one_vs_rest,
    "Relative": relative,
    "Plurality": plurality,
    "OneVsOne": one_vs_one,
    "Calibrated": calibrated,
}
