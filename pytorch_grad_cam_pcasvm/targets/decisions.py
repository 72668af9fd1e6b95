"""Targets of decisions: margins, pairs of classes, log-ratios."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.kernels import known_to
from pytorch_grad_cam_pcasvm.head.log_ratio import log_ratios
from pytorch_grad_cam_pcasvm.head.stage import Stage, pulled_through
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.targets.target import ClosedFormTarget, PlacedTarget, check, head_of


@dataclass(frozen=True, repr=False)
class SVMTarget(PlacedTarget, ClosedFormTarget):
    """The margin of a class, the decision between two classes, or what sets a class apart from several.

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

    def value(self, output: Any) -> Tensor:
        """Return the margin of a row, or of each row of several."""
        decision = self.decision(output)
        return (decision * self._seed(output, decision.detach())).sum(-1)

    def seeds(self, output: Any, start: Any = None) -> dict[int, Tensor]:
        """Return the gradient by position of the head's value: rows over the decision values, (N, P) or (1, P)."""
        decision = self.decision(output).detach()
        named = self.category is not None and not self._means("runner-up", output.head)
        return {output.head.decision_position: self._seed(output, decision[:1] if named else decision)}

    def boundaries(self, head: Any) -> int:
        """Return the number of boundaries: 1 for named classes, else one per class or pair; 0 for a regressor."""
        if head.decision_position is None or (head.classes_ is None and head.voting.about != "one class"):
            return 0
        free = (self.category is None and head.classes_ is not None) + self._means("runner-up", head)
        return int(head.voting.n_classes**free)

    def boundary_of(self, output: Any) -> Tensor:
        """Return the index of each image's boundary, that of its class or pair, shape (N,)."""
        category, second = self._classes(output, self.decision(output))
        if second is None or not self._means("runner-up", output.head):
            return category
        return second if self.category is not None else category * output.head.voting.n_classes + second

    def at_boundary(self, head: Any, number: int) -> "SVMTarget":
        """Return the target with its classes named; a class paired with itself gives the class's margin."""
        if head.classes_ is None:
            return replace(self, sign="+", at=None)
        labels, versus, strength = head.classes_.tolist(), self.versus, self.strength
        if self._means("runner-up", head):
            number, second = divmod(number, len(labels)) if self.category is None else (0, number)
            versus = labels[second]
        category = labels[number] if self.category is None else self.category
        if isinstance(versus, tuple):
            versus = tuple(label for label in versus if label != category)
        if not versus if isinstance(versus, tuple) else versus == category:
            versus, strength = None, 1.0
        return SVMTarget(category, versus, strength=strength)

    def why_blank(self, output: HeadOutput) -> str | None:
        """Return the reason why the map of an output row is blank, or None if it is unknown."""
        if output.grid is not None:
            return None
        if output.head.enumerated is not None:
            return "none of its components changes the decision between the start and the image"
        return output.head.why_blank(output.head_trace, self._seed(output, self.decision(output)))

    def categories(self, output: Any) -> Tensor:
        """Return the index of the class that it is about, of each row, (N,)."""
        return self._classes(output, self.decision(output))[0]

    def decision(self, output: Any) -> Tensor:
        """Return the decision values, shape (N, P), or (P,) for a row; raise a ValueError without an SVM."""
        position = _decision_position(output, self)
        return output.head_trace.values[position]

    def seed(self, output: Any) -> Tensor:
        """Return the derivative with respect to the decision values, shape (N, P), or (P,) for a row."""
        return self._seed(output, self.decision(output).detach())

    def _means(self, word: str, head: Any) -> bool:
        """Return whether ``versus`` is a word, and not a class of that name."""
        if not isinstance(self.versus, str) or self.versus != word:
            return False
        classes = head.classes_
        return classes is None or word not in classes.tolist()

    def _seed(self, output: HeadOutput, decision: Tensor) -> Tensor:
        head, voting = output.head, output.head.voting
        if head.classes_ is None and self.versus is not None:
            raise ValueError(f"{self}: the head has no classes to compare")

        category, second = self._classes(output, decision)
        if isinstance(self.versus, tuple) or self._means("others", head):
            seed = self._against_several(head, category)
        else:
            seed = voting.seed(category, second)
        return seed if self.sign == "+" else -seed

    def _classes(self, output: Any, decision: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the indices of the class and of the one it is against, each of shape (...); None without one."""
        head = output.head

        def indices(label: Any) -> Tensor:
            return torch.full(decision.shape[:-1], head.class_index(label), device=decision.device)

        category = output.predicted() if self.category is None else indices(self.category)
        if self.versus is None or isinstance(self.versus, tuple) or self._means("others", head):
            return category, None
        if self._means("runner-up", head):
            return category, self._strongest_but(category, output)
        versus = indices(self.versus)
        if self.category is None:
            category = torch.where(category == versus, self._strongest_but(versus, output), category)
        return category, versus

    def _strongest_but(self, category: Tensor, output: Any) -> Tensor:
        """Return the index of the class that comes first without another, of each row."""
        if output.head.voting.n_classes == 2:
            return 1 - category
        if not output.head.voting.ranks:
            raise ValueError(f"{self}: hard votes do not tell which class came second: name it, or use 'others'")
        second: Tensor = output.ranking().scatter(-1, category.unsqueeze(-1), -torch.inf).argmax(-1)
        return second

    def _against_several(self, head: Any, category: Tensor) -> Tensor:
        """Return the rows of classes minus ``strength`` times the mean of those of their rivals."""
        matrix = head.voting.matrix.to(category.device)
        place = torch.arange(len(matrix), device=category.device)
        rivals = place != category.unsqueeze(-1)  # no class is its own
        if isinstance(self.versus, tuple):
            named = [place == head.class_index(label) for label in self.versus]
            rivals = rivals & torch.stack(named).any(0)
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

    def value(self, output: Any) -> Tensor:
        """Return the log-ratio of a row, or of each row of several."""
        return self._value(output, output)

    def seeds(self, output: Any, start: Any = None) -> dict[int, Tensor]:
        """Return the gradient by position: rows over the input of the SVM, shape (N, B)."""
        stage, position = self._stage(output)
        traces = [head_output.head_trace for head_output in (output, start) if head_output is not None]
        saved = [stage.evaluate(trace.values[position])[1] for trace in traces]
        with known_to(traces[0].eps, partial(output.head.errors, traces[0], position)):
            grad, log_scale = pulled_through(stage, (self._margin.seed(output).unsqueeze(1), None), *saved)
        return {position: (grad if log_scale is None else grad * log_scale.exp().unsqueeze(-1)).squeeze(1)}

    def of_changed(self, changed: Any, output: Any) -> Tensor:
        """Return the value for M changed versions of an image, (M,), keeping its predicted class and runner-up."""
        return self._value(changed, output)

    def boundaries(self, head: Any) -> int:
        """Return the number of boundaries, the same as for the margin."""
        return self._margin.boundaries(head)

    def boundary_of(self, output: Any) -> Tensor:
        """Return the index of each image's boundary, shape (N,)."""
        return self._margin.boundary_of(output)

    def at_boundary(self, head: Any, number: int) -> "LogRatioTarget":
        """Return the target with its classes named."""
        named = self._margin.at_boundary(head, number)
        return LogRatioTarget(named.category, named.versus)

    def categories(self, output: Any) -> Tensor:
        """Return the index of the class that it is about, of each row, (N,)."""
        return self._margin.categories(output)

    def why_blank(self, output: HeadOutput) -> str | None:
        """Return the reason why the map of an output row is blank, or None if it is unknown."""
        return self._margin.why_blank(output)

    @property
    def _margin(self) -> SVMTarget:
        """The same question to the margin."""
        return SVMTarget(self.category, self.versus, self.sign)

    def _stage(self, output: Any) -> tuple[Stage, int]:
        """Return the stage of the log-ratios, in place of the decision, and the position of its input."""
        position = _decision_position(output, self)
        return log_ratios(output.head.stages[position - 1]), position - 1

    def _value(self, output: Any, of_classes: Any) -> Tensor:
        """Return the value, for the classes that are meant where the output is another."""
        stage, position = self._stage(output)
        x = output.head_trace.values[position]
        ratios, _ = stage.evaluate(x.reshape(-1, x.shape[-1]))
        return (ratios.reshape(*x.shape[:-1], -1) * self._margin.seed(of_classes)).sum(-1)


def _decision_position(output: Any, target: ClosedFormTarget) -> int:
    """Return the position of the decision values; a ValueError without an SVM."""
    head = head_of(output, target)
    if head.decision_position is None:
        raise ValueError(f"{target} needs a head with an SVM, but this one has none: use PCATarget")
    return head.decision_position
