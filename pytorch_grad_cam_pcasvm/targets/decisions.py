"""Targets of decisions: margins, pairs of classes, log-ratios."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.log_ratio import log_ratios
from pytorch_grad_cam_pcasvm.head.stage import Conditions, Stage, pulled_through
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput, OfHead
from pytorch_grad_cam_pcasvm.targets.target import ClosedFormTarget, PlacedTarget, check, head_of


@dataclass(frozen=True, repr=False)
class SVMTarget(PlacedTarget, ClosedFormTarget):
    """The margin of a class, the decision between two classes, or the decision between a class and several others.

    Args:
        category: a label from ``classes_``; None: the class predicted for each image (for regressors and one-class
            estimators, their only value); of dense features for most of the place.
        versus: another label: the pairwise decision of ``category`` against it; without a category, of the predicted
            class, or where ``versus`` is predicted itself, of the strongest other class. So ``versus="good"`` asks for
            the evidence for a defect, also in images that were taken for good, where the value is negative;
            ``"runner-up"``: against the class that
            came second for each image; a list of labels, or ``"others"`` for all other classes: the margin minus
            ``strength`` times the mean of theirs, so that evidence common to all of them cancels (Zhang et al.,
            Finer-CAM, arXiv 2501.11309).
        sign: ``"+"``: evidence for it; ``"-"``: evidence against it.
        strength: the factor of that mean, at least 0.
        at: for dense features: a position (row, column); a boolean mask of the grid (h, w) or of the picture (H, W),
            whose mean is explained; ``"max"``: the position of each image with the largest value. None: all positions.

    Raises:
        TypeError: a label is an array, the category a list, or ``at`` no place.
        ValueError: ``versus`` is the category itself or an empty list, ``strength`` is given without several classes,
            is negative or not finite, the sign is neither ``"+"`` nor ``"-"``, or ``at`` is empty.

    Example:
        >>> maps = cam.explain(images, [SVMTarget(), SVMTarget("cat"), SVMTarget("cat", versus="runner-up")])
        >>> fine = cam.explain(images, SVMTarget("cat", versus=["dog", "elk"], strength=0.6))
    """

    category: Any = None
    versus: Any = None
    sign: str = "+"
    strength: float = 1.0
    at: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.versus, list | tuple):
            object.__setattr__(self, "versus", tuple(self.versus))  # a list has no hash
            if not self.versus:
                raise ValueError("versus names no class: name at least one, or leave it out")
        rivals = self.versus if isinstance(self.versus, tuple) else (self.versus,)
        for label in (self.category, *rivals):
            array = isinstance(label, Tensor) and label.dim() > 0
            if array or isinstance(label, tuple) or not isinstance(label, Hashable):
                raise TypeError(f"a class label must be one value of classes_, got {label!r:.80}")
        if self.category is not None and self.category in rivals:
            raise ValueError(f"{self.category!r} cannot be compared with itself: versus must name another class")
        if self.strength != 1.0 and not (isinstance(self.versus, tuple) or self.versus == "others"):
            raise ValueError('strength is for several classes: versus=["b", "c"] or versus="others"')
        if not 0 <= self.strength < float("inf"):
            raise ValueError(f"strength must be a number from 0, got {self.strength!r}")
        check(self)

    def value(self, output: OfHead) -> Tensor:
        """Return the margin of a row, or of each row of several."""
        return self.value_questions(output, self._number_rows(output))

    def seeds(self, output: OfHead, start: OfHead | None = None) -> dict[int, Tensor]:
        """Return the gradient by position of the head's value: rows over the decision values, (N, P) or (1, P)."""
        position = find_decision(output, self)
        like = output.head_trace.values[position][:1]
        return {position: self._stack_coefficients(output.head, self._number_rows(output), like)}

    def value_questions(self, output: OfHead, question_index: Tensor | None) -> Tensor:
        """Return the margin of each row's question, by its number; None: of the only one."""
        decision = self.decision(output)
        return (decision * self._stack_coefficients(output.head, question_index, decision[:1])).sum(-1)

    def evaluate_questions(
        self, output: OfHead, start: OfHead | None, question_index: Tensor | None
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Return the margins of N rows, (N,), and their gradient, rows over the decision values."""
        position = find_decision(output, self)
        decision = output.head_trace.values[position]
        rows = self._stack_coefficients(output.head, question_index, decision[:1])
        return (decision * rows).sum(-1), {position: rows}

    def count_questions(self, head: Head) -> int:
        """Return 1 for named classes, else the number of classes, or of pairs of these."""
        if head.classes_ is None:
            return 1
        unnamed = (self.category is None) + (self._find_word(head) == "runner-up")
        return int(head.voting.n_classes**unnamed) if unnamed else 1

    def number_questions(self, output: OfHead) -> Tensor:
        """Return the number of each row's question, which is about its class or pair of classes, shape (N,)."""
        head, decision = output.head, self.decision(output)
        word = self._find_word(head)
        if self.category is None:
            category = output.predicted()
        else:
            category = torch.full(decision.shape[:-1], head.class_index(self.category), device=decision.device)
        if word == "runner-up":
            second = self._strongest_but(category, output)
            return second if self.category is not None else category * head.voting.n_classes + second
        if isinstance(self.versus, tuple) or self.versus is None or word == "others":
            return category
        versus = torch.full_like(category, head.class_index(self.versus))
        return torch.where(category == versus, self._strongest_but(versus, output), category)

    def _number_rows(self, output: OfHead) -> Tensor | None:
        """Return the number of each row's question; None: there is only one."""
        return None if self.count_questions(head_of(output, self)) == 1 else self.number_questions(output)

    def name_question(self, head: Head, number: int) -> "SVMTarget":
        """Return the target with its classes named; a class paired with itself gives the class's margin."""
        if head.classes_ is None:
            return self
        labels, versus, strength = head.classes_.tolist(), self.versus, self.strength
        if self._find_word(head) == "runner-up":
            number, second = divmod(number, len(labels)) if self.category is None else (0, number)
            versus = labels[second]
        category = labels[number] if self.category is None else self.category
        if isinstance(versus, tuple):
            versus = tuple(label for label in versus if label != category)
        if not versus if isinstance(versus, tuple) else versus == category:
            versus, strength = None, 1.0
        return replace(self, category=category, versus=versus, strength=strength)

    def boundary(self, head: Head) -> "SVMTarget | None":
        """Return the decision, whatever its sign and place; None for the value of a regressor."""
        if head.vote is None or (head.classes_ is None and head.vote.about != "one class"):
            return None
        return replace(self, sign="+", at=None)

    def why_blank(self, output: HeadOutput) -> str | None:
        """Return the reason why the map of an output row is blank, or None if it is unknown."""
        if output.grid is not None:
            return None
        return output.head.why_blank(output.head_trace, self.seed(output))

    def decision(self, output: OfHead) -> Tensor:
        """Return the decision values, shape (N, P), or (P,) for a row; raise a ValueError without an SVM."""
        position = find_decision(output, self)
        return output.head_trace.values[position]

    def seed(self, output: OfHead) -> Tensor:
        """Return the derivative with respect to the decision values, shape (N, P), or (P,) for a row."""
        return self._stack_coefficients(output.head, self._number_rows(output), self.decision(output).detach())

    def evaluate_rows(self, output: OfHead, question_index: Tensor | None) -> Tensor:
        """Return the derivative of each row's question with respect to the decision values, (N, P)."""
        return self._stack_coefficients(output.head, question_index, self.decision(output))

    def _find_word(self, head: Head) -> str | None:
        """Return ``versus`` if it is a word, as ``"runner-up"`` or ``"others"``, and no class of that name."""
        labels = [] if head.classes_ is None else head.classes_.tolist()
        return self.versus if isinstance(self.versus, str) and self.versus not in labels else None

    def _stack_coefficients(self, head: Head, question_index: Tensor | None, like: Tensor) -> Tensor:
        """Return the coefficients of the decision values in each question, (N, P).

        Args:
            head: the head.
            question_index: the numbers of the questions, (N,); None: there is only one, for all rows.
            like: decision values of as many rows as are wanted where there is only one question.

        Raises:
            ValueError: the head has no classes to compare, or not these.
        """
        if head.classes_ is None and self.versus is not None:
            raise ValueError(f"{self}: the head has no classes to compare")
        shape = like.shape[:-1] if question_index is None else question_index.shape

        def index(label: Any) -> Tensor:
            return torch.full(shape, head.class_index(label), device=like.device)

        category = (
            torch.zeros(shape, dtype=torch.long, device=like.device) if question_index is None else question_index
        )
        second, word = None, self._find_word(head)
        if word == "runner-up":
            category, second = category // head.voting.n_classes, category % head.voting.n_classes
        category = category if self.category is None else index(self.category)
        if isinstance(self.versus, tuple) or word == "others":
            rows = self._against_several(head, category)
        else:
            second = index(self.versus) if second is None and self.versus is not None else second
            rows = head.voting.seed(category, second)
        return rows if self.sign == "+" else -rows

    def _strongest_but(self, category: Tensor, output: OfHead) -> Tensor:
        """Return the index of the class that comes first without another, of each row."""
        if output.head.voting.n_classes == 2:
            return 1 - category
        if not output.head.voting.ranks:
            raise ValueError(f"{self}: hard votes do not tell which class came second: name it, or use 'others'")
        second: Tensor = output.ranking().scatter(-1, category.unsqueeze(-1), -torch.inf).argmax(-1)
        return second

    def _against_several(self, head: Head, category: Tensor) -> Tensor:
        """Return the rows of classes minus ``strength`` times the mean of their rivals' rows."""
        matrix = head.voting.matrix.to(category.device)
        place = torch.arange(len(matrix), device=category.device)
        rivals = place != category.unsqueeze(-1)  # no class is its own
        if isinstance(self.versus, tuple):
            matches = [place == head.class_index(label) for label in self.versus]
            rivals = rivals & torch.stack(matches).any(0)
        rivals = rivals.to(matrix)
        mean = rivals @ matrix / rivals.sum(-1, keepdim=True).clamp(min=1)
        return matrix[category] - self.strength * mean


@dataclass(frozen=True, repr=False)
class LogRatioTarget(PlacedTarget, ClosedFormTarget):
    """The log-ratio of an RBF SVM: the logarithm of the evidence for a class divided by the evidence against it.

    For a decision value ``a(p) = sum_i c_i K(p_i, p) + g`` with ``c_i = alpha_i y_i``, it is
    ``L(p) = log sum_(c_i > 0) c_i K(p_i, p) - log sum_(c_i < 0) |c_i| K(p_i, p)``, where ``|g|`` is added to the sum
    that matches the sign of g. It always has the sign of a. Where the kernels decay, it grows with the squared
    distances, whereas a only approaches g: use it if gamma is large. Its gradient is
    ``2 gamma sum_i (s_i^+ - s_i^-) (p_i - p)``, where s are the shares of the terms in their sums. Its secant from a
    baseline, the mean of the gradient along the straight line to p, is integrated numerically. Bley et al., arXiv
    2508.03913.

    For one-vs-one SVMs, the log-ratio of a class is the sum of those of its pairs; for one-vs-rest SVMs, that of two
    classes is the difference of theirs; for calibrated SVMs, it is the mean over the members. Sums and differences need
    not have the sign of the margin. The head needs an SVC, NuSVC or OneClassSVM with an RBF kernel, possibly in an
    ensemble; one with another kernel or decision, or with evidence of only one sign, raises a ValueError.

    Args:
        category: a label from ``classes_``; None: the class predicted for each image (for one-class SVMs, that the
            image is an inlier).
        versus: another label, or ``"runner-up"``: the pairwise decision, as in :class:`SVMTarget`; a list of labels, or
            ``"others"``: the log-ratio minus the mean of theirs.
        sign: ``"+"``: evidence for it; ``"-"``: evidence against it.
        at: for dense features: a position (row, column); a boolean mask of the grid (h, w) or of the picture (H, W),
            whose mean is explained; ``"max"``: the position of each image with the largest value. None: all positions.

    Raises:
        TypeError: a label is an array, the category a list, or ``at`` no place.
        ValueError: ``versus`` is the category itself or an empty list, the sign is neither ``"+"`` nor ``"-"``, or
            ``at`` is empty.

    Example:
        >>> maps = cam.explain(images, [LogRatioTarget(), LogRatioTarget("cat", versus="dog")])
    """

    category: Any = None
    versus: Any = None
    sign: str = "+"
    at: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versus", self._margin.versus)  # which refuses what is none; a list has no hash
        check(self)

    def value(self, output: OfHead) -> Tensor:
        """Return the log-ratio of a row, or of each row of several."""
        find_decision(output, self)
        return self._combine(output, self._margin.seed(output))

    def value_questions(self, output: OfHead, question_index: Tensor | None) -> Tensor:
        """Return the log-ratio of each row's question, by its number; None: of the only one."""
        return self._combine(output, self._margin.evaluate_rows(output, question_index))

    def seeds(self, output: OfHead, start: OfHead | None = None) -> dict[int, Tensor]:
        """Return the gradient by position: rows over the input of the SVM, shape (N, B)."""
        return self._pull_back(output, start, self._margin.seed(output))

    def evaluate_questions(
        self, output: OfHead, start: OfHead | None, question_index: Tensor | None
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Return the log-ratios of N rows, (N,), and their gradients or secants, rows over the input of the SVM."""
        rows = self._margin.evaluate_rows(output, question_index)
        return self._combine(output, rows), self._pull_back(output, start, rows)

    def count_questions(self, head: Head) -> int:
        """Return 1 for named classes, else the number of classes, or of pairs of these."""
        return self._margin.count_questions(head)

    def number_questions(self, output: OfHead) -> Tensor:
        """Return the number of each row's question, shape (N,)."""
        return self._margin.number_questions(output)

    def name_question(self, head: Head, number: int) -> "LogRatioTarget":
        """Return the target with its classes named."""
        margin = self._margin.name_question(head, number)
        return replace(self, category=margin.category, versus=margin.versus)

    def boundary(self, head: Head) -> "LogRatioTarget | None":
        """Return the log-ratio, whatever its sign and place."""
        return None if self._margin.boundary(head) is None else replace(self, sign="+", at=None)

    def why_blank(self, output: HeadOutput) -> str | None:
        """Return the reason why the map of an output row is blank, or None if it is unknown."""
        return self._margin.why_blank(output)

    @property
    def _margin(self) -> SVMTarget:
        """The same question to the margin."""
        return SVMTarget(self.category, self.versus, self.sign)

    def _stage(self, output: OfHead) -> tuple[Stage, int]:
        """Return the stage of the log-ratios, in place of the decision, and the position of its input."""
        position = find_decision(output, self)
        return log_ratios(output.head.stages[-1]), position - 1  # nothing follows a decision

    def _combine(self, output: OfHead, rows: Tensor) -> Tensor:
        """Return combinations (N, P), or (P,) for a row, of the log-ratios."""
        stage, position = self._stage(output)
        x = output.head_trace.values[position]
        ratios, _ = stage.evaluate(x.reshape(-1, x.shape[-1]))
        return (ratios.reshape(*x.shape[:-1], -1) * rows).sum(-1)

    def _pull_back(self, output: OfHead, start: OfHead | None, rows: Tensor) -> dict[int, Tensor]:
        """Return the gradient, or secant, of combinations of log-ratios (N, P), by position."""
        stage, position = self._stage(output)
        traces = [head_output.head_trace for head_output in (output, start) if head_output is not None]
        saved = [stage.evaluate(trace.values[position])[1] for trace in traces]
        conditions = Conditions(traces[0].eps, partial(output.head.errors, traces[0], position))
        saved[0] = stage.attach_conditions(saved[0], conditions)
        grad, log_scale = pulled_through(stage, (rows.unsqueeze(1), None), *saved)
        return {position: (grad if log_scale is None else grad * log_scale.exp().unsqueeze(-1)).squeeze(1)}


def find_decision(output: OfHead, target: ClosedFormTarget) -> int:
    """Return the position of the decision values; a ValueError without an SVM."""
    head = head_of(output, target)
    if head.decision_position is None:
        raise ValueError(f"{target} needs a head with an SVM, but this one has none: use PCATarget")
    return head.decision_position
