"""Targets: what a map explains. Each can be called on the network's output and knows its closed-form gradient."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.kernels import known_to
from pytorch_grad_cam_pcasvm.head.log_ratio import log_ratios
from pytorch_grad_cam_pcasvm.head.multiclass import OneClass
from pytorch_grad_cam_pcasvm.head.stage import Stage, pulled_through
from pytorch_grad_cam_pcasvm.head.stages import Projection
from pytorch_grad_cam_pcasvm.model.net import HeadOutput, OfHead

Target = Callable[[Any], Any]


class ShortRepr:
    """A dataclass (with ``repr=False``) that is written as one would type it: defaults are left out."""

    def __repr__(self) -> str:
        given = []
        for place, field in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                given.append(("" if place == 0 else f"{field.name}=") + _typed(value))
        return f"{type(self).__name__}({', '.join(given)})"


class ClosedFormTarget(ShortRepr, ABC):
    """A target that knows its gradient: linear in one of the head's values, unless it says how it is evaluated."""

    # Whether the components, or what follows them, are all that it reads.
    behind_reduction = True

    @abstractmethod
    def __call__(self, output: Any) -> Tensor:
        """Return the target's value: a number for a row of the output, shape (N,) for a batch."""

    @abstractmethod
    def seeds(self, output: Any, baseline: Any = None) -> dict[int, Tensor]:
        """Return the gradient, or the secant from a baseline of N rows, by position of the head's value.

        Its shape is (N, .), or (1, .) if it is the same for all images.
        """

    def boundaries(self, head: Any) -> int:
        """Return how many boundaries, where its value is 0, it has for a head, of which an image has one."""
        return 0

    def boundary_of(self, output: Any) -> Tensor:
        """Return the number of each image's boundary, shape (N,)."""
        raise NotImplementedError

    def at_boundary(self, head: Any, number: int) -> "ClosedFormTarget":
        """Return the target of a boundary, the same for all images."""
        raise NotImplementedError

    def of_changed(self, changed: Any, output: Any) -> Tensor | None:
        """Return the value for M changed versions of an image, (M,), keeping the classes that are meant for it.

        Args:
            changed: the output for the changed versions.
            output: the output for the image, of one row.

        Returns:
            The value; None: the product of the image's gradient with what the gradient is with respect to.
        """
        return None


@dataclass(frozen=True, repr=False)
class QuadraticTarget(ClosedFormTarget):
    """A target that is quadratic in the head's values.

    Args:
        sign: ``"+"`` for what raises it, ``"-"`` for what lowers it.

    Raises:
        ValueError: the sign is neither ``"+"`` nor ``"-"``.
    """

    sign: str = "+"

    def __post_init__(self) -> None:
        _check_sign(self.sign)

    def seeds(self, output: Any, baseline: Any = None) -> dict[int, Tensor]:
        """Return the gradient by position, or the secant: of a quadratic target, the mean of those at both ends."""
        here = self._gradient(output)
        if baseline is None:
            return here
        there = self._gradient(baseline)
        return {position: (seed + there[position]) / 2 for position, seed in here.items()}

    def of_changed(self, changed: Any, output: Any) -> Tensor:
        """Return the value for M changed versions of an image, (M,)."""
        return self(changed)

    @abstractmethod
    def _gradient(self, output: Any) -> dict[int, Tensor]:
        """Return the gradient by position of the head's value."""


@dataclass(frozen=True, repr=False)
class PCATarget(ClosedFormTarget):
    """Principal component ``p_b`` (b from 0: ``PCATarget(0)`` is the paper's P_1).

    Args:
        component: the component's number b, from 0.
        sign: ``"+"`` for what raises the component (P_b^+), ``"-"`` for what lowers it (P_b^-, of ``-p_b``).

    Raises:
        TypeError: the component is not an integer.
        ValueError: it is negative, or the sign is neither ``"+"`` nor ``"-"``.

    Example:
        >>> cam.explain(images, [PCATarget(0), PCATarget(2, sign="-")]).maps.shape
        torch.Size([2, 2, 8, 8])
    """

    component: int
    sign: str = "+"

    def __post_init__(self) -> None:
        if isinstance(self.component, bool | np.bool_) or not isinstance(self.component, int | np.integer):
            raise TypeError(f"component must be an integer, counted from 0, got {self.component!r}")
        if self.component < 0:
            raise ValueError(f"component must be 0 or more, got {self.component}")
        _check_sign(self.sign)

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return ``p_b`` or ``-p_b``: a number for a row, shape (N,) for a batch."""
        components = self._components(output)
        return components[..., self.component] * _factor(self.sign)

    def seeds(self, output: Any, baseline: Any = None) -> dict[int, Tensor]:
        """Return the gradient by position of the head's value: a one-hot row over the components, shape (1, B)."""
        components = self._components(output)
        seed = components.new_zeros(1, components.shape[-1])
        seed[0, self.component] = _factor(self.sign)
        return {output.head.component_position: seed}

    @staticmethod
    def several(targets: Sequence["PCATarget"], output: Any) -> tuple[Tensor, dict[int, Tensor | None]]:
        """Return the values, shape (N, K), of K components, and the gradient by position, shape (1, K, B).

        If the targets are all components in order, the gradient is the identity, returned as None.
        """
        components = max(targets, key=lambda target: target.component)._components(output)
        position, count = output.head.component_position, components.shape[1]
        if [(target.component, target.sign) for target in targets] == [(b, "+") for b in range(count)]:
            return components, {position: None}
        # Rows of a matrix made where it is needed: a list of numbers would have to be sent there, and waited for.
        plus = torch.eye(count, dtype=components.dtype, device=components.device)
        rows = {"+": plus.unbind(), "-": (-plus).unbind()}
        seeds = torch.stack([rows[target.sign][target.component] for target in targets])
        return components @ seeds.T, {position: seeds.unsqueeze(0)}

    def _components(self, output: Any) -> Tensor:
        components = _components_of(output, self)
        if self.component >= components.shape[-1]:
            raise ValueError(f"{self}: the head has {components.shape[-1]} components, numbered from 0")
        return components


@dataclass(frozen=True, repr=False)
class HotellingTarget(QuadraticTarget):
    """Hotelling's T^2: how far the components are from their mean, in units of their variances.

    ``T^2 = sum_b p_b^2 / lambda_b``, lambda = ``explained_variance_``, shape (B,); ``sum_b p_b^2`` for a whitened PCA.
    Its gradient is ``2 p / lambda``, its secant from a baseline ``(p + p0) / lambda``. As in whitening, variances below
    the square of the machine epsilon are replaced by it. T^2 is the squared Mahalanobis distance of the features within
    the subspace of the components; :class:`ResidualTarget` measures what lies outside.

    For PCA and IncrementalPCA; raises a ValueError for a head with another reduction or none.
    Hotelling, The generalization of Student's ratio, Annals of Mathematical Statistics 2 (1931).

    Args:
        sign: ``"+"`` for what makes an image unlike the training set, ``"-"`` for what makes it like that.

    Raises:
        ValueError: the sign is neither ``"+"`` nor ``"-"``.

    Example:
        >>> maps = cam.explain(images, HotellingTarget())
    """

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return ``T^2`` or ``-T^2``: a number for a row, shape (N,) for a batch."""
        components, variances = self._parts(output)
        return _factor(self.sign) * (components.square() / variances).sum(-1)

    def _gradient(self, output: Any) -> dict[int, Tensor]:
        """Return the gradient by position of the head's value: ``2 p / lambda`` over the components, shape (N, B)."""
        components, variances = self._parts(output)
        return {output.head.component_position: 2 * _factor(self.sign) * components / variances}

    def _parts(self, output: Any) -> tuple[Tensor, Tensor]:
        components = _components_of(output, self)
        reduction = _reduction_of(output)
        variances = getattr(reduction, "variances", None)
        if variances is None:
            needs = "the variances of uncorrelated components, as PCA and IncrementalPCA have them"
            raise ValueError(f"{self} needs {needs}: {_why_unknown(reduction)}")
        return components, variances.to(components)


@dataclass(frozen=True, repr=False)
class ResidualTarget(QuadraticTarget):
    """The Q statistic: the squared distance of the PCA's input to the subspace of its components.

    ``Q = |r|^2`` with ``r = z - inverse_transform(p)``, shape (D,), z the input of the PCA (after any scaler before
    it), and ``p = transform(z)``: the part of an image that the components cannot express. Its gradient is ``2 r`` with
    respect to z and ``-2 R r`` with respect to p, R the rows that ``inverse_transform`` sums, shape (B, D); for a PCA
    they combine to ``2 r``. Its secant from a baseline has ``r + r0`` in place of ``2 r``.

    For reductions with a linear ``inverse_transform``: PCA (also whitened), IncrementalPCA, TruncatedSVD, SparsePCA,
    FastICA, PLSRegression; raises a ValueError for a head with another reduction or none. Where the components express
    an image fully, Q is 0 rather than a rounding error, and its map is blank. Jackson and Mudholkar, Control procedures
    for residuals associated with principal component analysis, Technometrics 21 (1979).

    Args:
        sign: ``"+"`` for what makes an image unlike the training set, ``"-"`` for what makes it like that.

    Raises:
        ValueError: the sign is neither ``"+"`` nor ``"-"``.

    Example:
        >>> maps = cam.explain(images, ResidualTarget())
    """

    behind_reduction = False

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return ``Q`` or ``-Q``: a number for a row, shape (N,) for a batch."""
        residual, _ = self._parts(output)
        return _factor(self.sign) * residual.square().sum(-1)

    def _gradient(self, output: Any) -> dict[int, Tensor]:
        """Return the gradient by position: ``2 r`` over the input of the PCA, (N, D), ``-2 R r`` over p, (N, B)."""
        residual, restoring = self._parts(output)
        twice = 2 * _factor(self.sign) * residual
        position = output.head.component_position
        return {position - 1: twice, position: -twice @ restoring.mT}

    def _parts(self, output: Any) -> tuple[Tensor, Tensor]:
        components = _components_of(output, self)
        reduction = _reduction_of(output)
        restoring = getattr(reduction, "restoring", None)
        if restoring is None:
            needs = "a reduction with a linear inverse_transform, as of PCA, IncrementalPCA and TruncatedSVD"
            raise ValueError(f"{self} needs {needs}: {_why_unknown(reduction)}")
        z = output.head_trace.values[output.head.component_position - 1]
        if z is None:
            raise ValueError(
                f"{self} is not a function of the components, which are all that is known here: compute its maps with "
                "the network, cam.explain(x, [ResidualTarget()])"
            )
        restoring = restoring.to(components)
        centred, restored = z - reduction.mean.to(components), components @ restoring
        residual = centred - restored
        # A map of rounding errors would show anything. Where all dimensions are kept, they are those of the estimator,
        # which may have been fitted in single precision.
        precision = torch.finfo(torch.float32 if len(restoring) >= restoring.shape[1] else z.dtype)
        rounding = 4 * z.shape[-1] ** 0.5 * precision.eps * (z.norm(dim=-1) + restored.norm(dim=-1))
        return residual * (residual.norm(dim=-1) > rounding).unsqueeze(-1), restoring


@dataclass(frozen=True, repr=False)
class SVMTarget(ClosedFormTarget):
    """The margin of a class, the decision between two classes, or what sets a class apart from several.

    Args:
        category: a label from ``classes_``; None: the class predicted for each image (also for regressors and one-class
            machines, where it means their only value).
        versus: another label: the pairwise decision of ``category`` against it; ``"runner-up"``: against the class that
            came second for each image; a list of labels, or ``"others"`` for all other classes: the margin minus
            ``strength`` times the mean of theirs, in which what all of them share cancels (Zhang et al., Finer-CAM,
            arXiv 2501.11309).
        sign: ``"+"`` for what speaks for it, ``"-"`` for what speaks against it.
        strength: how much of the mean of several margins is subtracted, from 0 on.

    Raises:
        TypeError: a label is an array, or the category a list.
        ValueError: ``versus`` is the category itself or no class at all, there is a strength without several, it is
            negative or not finite, or the sign is neither ``"+"`` nor ``"-"``.

    Example:
        >>> maps = cam.explain(images, [SVMTarget(), SVMTarget("cat"), SVMTarget("cat", versus="runner-up")])
        >>> fine = cam.explain(images, SVMTarget("cat", versus=["dog", "elk"], strength=0.6))
    """

    category: Any = None
    versus: Any = None
    sign: str = "+"
    strength: float = 1.0

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
            raise ValueError(f"versus must be another class than the category, got {self.category!r} for both")
        if self.strength != 1.0 and not (isinstance(self.versus, tuple) or self.versus == "others"):
            raise ValueError('strength is for several classes: versus=["b", "c"] or versus="others"')
        if not 0 <= self.strength < float("inf"):
            raise ValueError(f"strength must be a number from 0, got {self.strength!r}")
        _check_sign(self.sign)

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the margin: a number for a row, shape (N,) for a batch."""
        decision = self.decision(output)
        return (decision * self._seed(output, decision.detach())).sum(-1)

    def seeds(self, output: Any, baseline: Any = None) -> dict[int, Tensor]:
        """Return the gradient by position of the head's value: rows over the decision values, (N, P) or (1, P)."""
        decision = self.decision(output).detach()
        named = self.category is not None and not self._means("runner-up", output.head)
        return {output.head.decision_position: self._seed(output, decision[:1] if named else decision)}

    def boundaries(self, head: Any) -> int:
        """Return 1 if the classes are named, one for each class or pair that images may have; 0 for a regressor."""
        if head.decision_position is None or (head.classes_ is None and not isinstance(head.voting, OneClass)):
            return 0
        free = (self.category is None and head.classes_ is not None) + self._means("runner-up", head)
        return int(head.voting.n_classes**free)

    def boundary_of(self, output: Any) -> Tensor:
        """Return the number of each image's class, or pair, among those that it may have, shape (N,)."""
        category, second = self._classes(output.head, self.decision(output))
        if second is None or not self._means("runner-up", output.head):
            return category
        return second if self.category is not None else category * output.head.voting.n_classes + second

    def at_boundary(self, head: Any, number: int) -> "SVMTarget":
        """Return the target with its classes by name; that of a class and itself is the class's margin."""
        if head.classes_ is None:
            return replace(self, sign="+")
        labels, versus, strength = head.classes_.tolist(), self.versus, self.strength
        if self._means("runner-up", head):
            number, second = divmod(number, len(labels)) if self.category is None else (0, number)
            versus = labels[second]
        category = labels[number] if self.category is None else self.category
        if isinstance(versus, tuple):
            versus = tuple(label for label in versus if label != category)
        if versus in ((), category):
            versus, strength = None, 1.0
        return SVMTarget(category, versus, strength=strength)

    def why_blank(self, output: HeadOutput) -> str | None:
        """Return why the map of a row of the output is blank, if that is known; else None."""
        if self.category is None and not isinstance(self.versus, tuple | None) and self.versus == output.labels():
            return f"the predicted class is {self.versus!r} itself"
        return output.head.why_blank(output.head_trace, self._seed(output, self.decision(output)))

    def decision(self, output: Any) -> Tensor:
        """Return the decision values, shape (N, P), or (P,) for a row; raise a ValueError without an SVM."""
        position = _decision_position(output, self)
        return output.head_trace.values[position]

    def seed(self, output: Any) -> Tensor:
        """Return the derivative with respect to the decision values, shape (N, P), or (P,) for a row."""
        return self._seed(output, self.decision(output).detach())

    def _means(self, word: str, head: Any) -> bool:
        """Return whether ``versus`` is a word, and not a class of that name."""
        classes = [] if head.classes_ is None else head.classes_.tolist()
        return isinstance(self.versus, str) and self.versus == word and word not in classes

    def _seed(self, output: HeadOutput, decision: Tensor) -> Tensor:
        head, voting = output.head, output.head.voting
        if head.classes_ is None and self.versus is not None:
            raise ValueError(f"{self}: the head has no classes to compare")

        category, second = self._classes(head, decision)
        if isinstance(self.versus, tuple) or self._means("others", head):
            seed = self._against_several(head, category)
        else:
            seed = voting.seed(category, second)
        return seed if self.sign == "+" else -seed

    def _classes(self, head: Any, decision: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the indices of the class and of the one it is against, each of shape (...); None without one."""
        voting = head.voting

        def indices(label: Any) -> Tensor:
            return torch.full(decision.shape[:-1], head.class_index(label), device=decision.device)

        category = voting.predicted(decision) if self.category is None else indices(self.category)
        if self.versus is None or isinstance(self.versus, tuple) or self._means("others", head):
            return category, None
        if self._means("runner-up", head):
            ranking = voting.ranking(decision)
            return category, ranking.scatter(-1, category.unsqueeze(-1), -torch.inf).argmax(-1)
        return category, indices(self.versus)

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
class LogRatioTarget(ClosedFormTarget):
    """The log-ratio of the evidence of an RBF SVM: what speaks for a class, divided by what speaks against it.

    Of a decision value ``a(p) = sum_i c_i K(p_i, p) + g``, with ``c_i = alpha_i y_i``, it is
    ``L(p) = log sum_(c_i > 0) c_i K(p_i, p) - log sum_(c_i < 0) |c_i| K(p_i, p)``, with ``|g|`` among the terms of its
    sign. It always has the sign of a, but where the kernels fade it grows with the squared distances instead of coming
    to rest at g: take it if gamma is large. With s the shares of the terms in their sums its gradient is
    ``2 gamma sum_i (s_i^+ - s_i^-) (p_i - p)``; its secant from a baseline, the mean of the gradient along the straight
    line to p, is integrated numerically. Bley et al., arXiv 2508.03913.

    Of one-vs-one SVMs, the margin of a class is the sum of the log-ratios of its pairs; of one-vs-rest ones, the
    decision between two classes is the difference of their log-ratios; of calibrated ones, the mean of the members' is
    taken. Sums and differences need not have the sign of the margin. For SVC, NuSVC and OneClassSVM with an RBF kernel,
    also in ensembles; raises a ValueError for a head with another kernel or decision, or whose evidence has one sign.

    Args:
        category: a label from ``classes_``; None: the class predicted for each image (also for one-class SVMs, where it
            means that the image is an inlier).
        versus: another label, or ``"runner-up"``: the pairwise decision, as of :class:`SVMTarget`; likewise a list of
            labels, or ``"others"``: the log-ratio minus the mean of theirs.
        sign: ``"+"`` for what speaks for it, ``"-"`` for what speaks against it.

    Raises:
        TypeError: a label is an array, or the category a list.
        ValueError: ``versus`` is the category itself or no class at all, or the sign is neither ``"+"`` nor ``"-"``.

    Example:
        >>> maps = cam.explain(images, [LogRatioTarget(), LogRatioTarget("cat", versus="dog")])
    """

    category: Any = None
    versus: Any = None
    sign: str = "+"

    def __post_init__(self) -> None:
        object.__setattr__(self, "versus", self._margin.versus)  # which refuses what is none; a list has no hash

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the log-ratio: a number for a row, shape (N,) for a batch."""
        return self._value(output, output)

    def seeds(self, output: Any, baseline: Any = None) -> dict[int, Tensor]:
        """Return the gradient by position: rows over the input of the SVM, shape (N, B)."""
        stage, position = self._stage(output)
        traces = [each.head_trace for each in (output, baseline) if each is not None]
        saved = [stage.evaluate(trace.values[position])[1] for trace in traces]
        with known_to(traces[0].eps, partial(output.head.errors, traces[0], position)):
            grad, log_scale = pulled_through(stage, (self._margin.seed(output).unsqueeze(1), None), *saved)
        return {position: (grad if log_scale is None else grad * log_scale.exp().unsqueeze(-1)).squeeze(1)}

    def of_changed(self, changed: Any, output: Any) -> Tensor:
        """Return the value for M changed versions of an image, (M,), keeping its predicted class and runner-up."""
        return self._value(changed, output)

    def boundaries(self, head: Any) -> int:
        """Return how many boundaries it has: as many as the margin."""
        return self._margin.boundaries(head)

    def boundary_of(self, output: Any) -> Tensor:
        """Return the number of each image's boundary, shape (N,)."""
        return self._margin.boundary_of(output)

    def at_boundary(self, head: Any, number: int) -> "LogRatioTarget":
        """Return the target with its classes by name."""
        named = self._margin.at_boundary(head, number)
        return LogRatioTarget(named.category, named.versus)

    def why_blank(self, output: HeadOutput) -> str | None:
        """Return why the map of a row of the output is blank, if that is known; else None."""
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


@dataclass(frozen=True, repr=False)
class ProbabilityTarget(ShortRepr):
    """The calibrated probability of a class, exactly as returned by ``predict_proba``.

    Far from the decision boundary a probability saturates and its gradient fades; ``SVMTarget`` explains the margin.

    Args:
        category: a label from ``classes_``; None: the class predicted for each image.
        sign: ``"+"`` for what raises the probability, ``"-"`` for what lowers it.

    Raises:
        ValueError: the sign is neither ``"+"`` nor ``"-"``.

    Example:
        >>> logistic = PCASVMNet(backbone, LogisticRegression().fit(features, labels)).eval()
        >>> maps = ClosedFormGradCAM(logistic, ["layer2"]).explain(images, ProbabilityTarget("cat"))
    """

    category: Any = None
    sign: str = "+"

    def __post_init__(self) -> None:
        _check_sign(self.sign)

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the probability: a number for a row, shape (N,) for a batch."""
        decision = SVMTarget(self.category).decision(output)
        voting = output.head.voting
        probabilities = voting.probabilities(decision) * _factor(self.sign)
        if self.category is not None:
            return probabilities[..., output.head.class_index(self.category)]
        return probabilities.gather(-1, voting.predicted(decision.detach()).unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, repr=False)
class ScoreTarget(ClosedFormTarget):
    """A score of an ordinary classifier, by its index; None: the largest of each image."""

    category: int | None = None

    def __call__(self, output: Tensor) -> Tensor:
        """Return the score: a number for a row, shape (N,) for a batch."""
        return output.max(-1).values if self.category is None else output[..., self.category]

    def seeds(self, output: Tensor, baseline: Any = None) -> dict[int, Tensor]:
        """Return a one-hot row per image, shape (N, C)."""
        index = output.argmax(-1) if self.category is None else torch.full_like(output[..., 0], self.category).long()
        return {0: torch.zeros_like(output).scatter(-1, index.unsqueeze(-1), 1.0)}


@dataclass(frozen=True)
class PredictedScore:
    """scikit-learn's score of each image's predicted class: what pytorch-grad-cam explains if no targets are given.

    Its map equals that of ``SVMTarget()`` except for the size of the gradient, which matters to pytorch-grad-cam's
    scaling because that adds 1e-7.
    """

    def __repr__(self) -> str:
        return "the predicted class"

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the score of a row."""
        decision = SVMTarget().decision(output)
        voting = output.head.voting
        return voting.ranking(decision)[voting.predicted(decision.detach())]


def _head_of(output: Any, target: ClosedFormTarget) -> Any:
    # Not isinstance: softmax of a HeadOutput carries the head along too.
    head = getattr(output, "head", None)
    if head is None:
        instead = "for an ordinary classifier use ClassifierOutputTarget"
        raise ValueError(f"{target} needs the output of a PCASVMNet; {instead}")
    return head


def _decision_position(output: Any, target: ClosedFormTarget) -> int:
    """Return the position of the decision values; a ValueError without an SVM."""
    head = _head_of(output, target)
    if head.decision_position is None:
        raise ValueError(f"{target} needs a head with an SVM, but this one has none: use PCATarget")
    return head.decision_position


def _components_of(output: Any, target: ClosedFormTarget) -> Tensor:
    """Return the components, shape (N, B), or (B,) of a row; a ValueError without a PCA."""
    head = _head_of(output, target)
    if head.component_position is None:
        why = " needs a head with a PCA, but this one has none: use SVMTarget"
        if any(getattr(module, "reduces", False) for module in head.modules()):
            pipeline = "make_pipeline(StandardScaler(), PCA(3), CalibratedClassifierCV(SVC()))"
            why = f": the PCA is inside a meta-estimator; put it in front, as in {pipeline}"
        raise ValueError(f"{target}{why}")
    return output.head_trace.values[head.component_position]


def _reduction_of(output: Any) -> Any:
    return output.head.stages[output.head.component_position - 1]


def _why_unknown(reduction: Any) -> str:
    """Return why a reduction lacks what a target needs."""
    if isinstance(reduction, Projection) and reduction.inverse is None and reduction.variances is None:
        again = "then save it again from the fitted estimator, Head.of(estimator).save(path)"
        return f"this one has none, or the head was read from a file of an earlier version; {again}"
    return "this one has none"


def _typed(value: Any) -> str:
    """Return a label, or labels, as one would type them."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_typed, value))}]"
    return repr(value.item() if isinstance(value, np.generic | Tensor) else value)


def _check_sign(sign: str) -> None:
    if sign not in ("+", "-"):
        raise ValueError(f"sign must be '+' or '-', got {sign!r}")


def _factor(sign: str) -> float:
    return 1.0 if sign == "+" else -1.0


def every_component(output: Any) -> Sequence[Target]:
    """Return a target for every component of an output, if it has any."""
    components = output.components if isinstance(output, OfHead) else None
    return () if components is None else _components(components.shape[-1])


@lru_cache(maxsize=8)
def _components(count: int) -> tuple[PCATarget, ...]:
    return tuple(PCATarget(b) for b in range(count))


def every_class(output: Any) -> Sequence[Target]:
    """Return a target for every class of an output, or for its only value."""
    if not isinstance(output, OfHead):
        if not isinstance(output, Tensor) or output.dim() != 2:
            raise ValueError("jacobians needs a network that returns scores (N, C), or a PCASVMNet: use explain")
        return [ScoreTarget(category) for category in range(output.shape[-1])]
    if output.decision is None:
        return ()
    classes = output.head.classes_
    return [SVMTarget()] if classes is None else [SVMTarget(label) for label in classes.tolist()]


def fixed(target: Any, output: Any) -> Any:
    """Return a target that means the same class for every copy of an image.

    Args:
        target: any target.
        output: the network's output for the image, a batch of one.

    Returns:
        The target with the class that is predicted for this image, and its runner-up, by name.
    """
    if isinstance(target, ScoreTarget) and target.category is None:
        return ScoreTarget(int(output.reshape(-1).argmax()))
    if isinstance(target, ProbabilityTarget) and target.category is None:
        return replace(target, category=output.labels()[0].item())
    if (
        not isinstance(target, SVMTarget | LogRatioTarget)
        or not isinstance(output, OfHead)
        or output.head.classes_ is None
    ):
        return target
    labels, voting = output.head.classes_.tolist(), output.head.voting
    decision: Any = output.decision
    category, versus = target.category, target.versus
    if category is None:
        category = labels[int(voting.predicted(decision)[0])]
    if isinstance(versus, str) and versus == "runner-up" and "runner-up" not in labels:
        order = voting.ranking(decision)[0].argsort(descending=True).tolist()
        versus = next(labels[index] for index in order if labels[index] != category)
    return replace(target, category=category, versus=versus)
