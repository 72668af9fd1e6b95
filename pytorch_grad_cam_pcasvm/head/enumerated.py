"""Enumerated: a decision without a gradient, as of a forest, behind a few inputs; its secants come from coalitions.

A coalition S of the B inputs has the image's components where b is in S, and those of the start elsewhere. With phi_b,
the Shapley value of input b for the value v between the start p0 and the image's p, ``J_b = phi_b / (p_b - p0_b)`` is a
secant: ``sum_b J_b (p_b - p0_b) = v(p) - v(p0)``.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.head.decisions import Decision
from pytorch_grad_cam_pcasvm.head.predictor import Predictor
from pytorch_grad_cam_pcasvm.head.stage import GROUPS, USUAL, Conditions, Sampling, Scaled
from pytorch_grad_cam_pcasvm.head.vote import Vote
from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.torch_private import FakeTensor

Rows = Callable[[np.ndarray], np.ndarray]  # of rows (R, B) to values (R, P)
MOST = 12  # inputs of which all coalitions are evaluated
_ROWS = 1 << 16  # in one call of the estimators
_PATIENCE = 3.0  # seconds, after which there is a progress bar


class Enumerated(Decision):
    """The decision of fitted estimators that have values, and no gradient.

    Its values are those of its :class:`.Predictor`, computed by the estimators themselves, on the CPU.

    Args:
        predictor: the fitted estimators as a function of rows.
        voting: how its values become classes.
        classes: class labels in the estimator's order, or None for a regressor.
        reason: why there is no closed form.
        ways_out: what to do for a gradient.

    Example:
        >>> head = Head.of(make_pipeline(PCA(3), DecisionTreeClassifier()).fit(features, labels))
        >>> head.stages[-1]
        Enumerated(DecisionTreeClassifier without a gradient: 8 coalitions of its 3 inputs)
    """

    has_poles = False  # it has jumps, on which no rounding decides

    def __init__(
        self,
        predictor: Predictor,
        voting: Vote,
        classes: Sequence[Any] | None,
        reason: str,
        ways_out: Sequence[str] = (),
    ) -> None:
        super().__init__(voting, classes)
        self.predictor, self.reason, self.ways_out = predictor, reason, list(ways_out)
        self.n_inputs, self.n_outputs = predictor.n_inputs, predictor.n_outputs
        self.asked_estimators, self.is_sampled = predictor.steps, predictor.n_inputs > MOST

    @classmethod
    def of(cls, steps: Sequence[Any], n_inputs: int | None, reason: str, ways_out: Sequence[str]) -> "Enumerated":
        """Return the decision of fitted estimators: transformers, and one that predicts; of rows of a length."""
        predictor = Predictor(steps, n_inputs)
        several = isinstance(predictor.classes, list) or (predictor.classes is None and predictor.n_outputs > 1)
        classes = range(predictor.n_outputs) if several else predictor.classes
        return cls(predictor, predictor.make_vote(), classes, reason, ways_out)

    def extra_repr(self) -> str:
        """Return how the estimators are explained, for the repr of the head."""
        count = self.n_inputs or 0
        how = f"{2**count} coalitions" if count <= MOST else "sampled permutations"
        return f"{self.predictor.name} without a gradient: {how} of its {count} input{'s' * (count != 1)}"

    @property
    def names(self) -> list[str] | None:
        """The names of classes whose labels are others to the estimator; None: there are none."""
        own = self.predictor.classes
        if self.classes is None or own is None or isinstance(own, list) or np.array_equal(self.classes, own):
            return None
        return [str(name) for name in self.classes]

    def evaluate(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Conditions]]:
        """Return the values, shape (N, P); and x, with how exactly it is known."""
        if is_traced() or torch.compiler.is_compiling() or isinstance(x, FakeTensor):
            raise NoClosedFormError(
                f"{self.predictor.name} runs outside of PyTorch, and cannot be part of a program",
                "make one without it, PCASVMNet(backbone, pipeline[:-1], ...), of the components and their maps",
            )
        return _Values.apply(x, self), (x, USUAL)

    def attach_conditions(self, saved: Any, conditions: Conditions) -> Any:
        """Return x, with how exactly it is known and which permutations stand for all."""
        return (saved[0], conditions) if isinstance(saved, tuple) else saved

    def pullback(self, saved: Any, grad: Tensor) -> Scaled:
        """Refuse: there is no gradient."""
        raise self.no_gradient()

    def secant(self, saved: tuple[Tensor, Conditions], saved0: tuple[Tensor, Conditions], grad: Tensor) -> Scaled:
        """Return ``grad @ J``; an input that differs by rounding alone has a J of 0, whatever its phi."""
        conditions = saved[1]
        x, x0 = torch.broadcast_tensors(saved[0], saved0[0])
        change = x - x0
        rounding = change.abs() <= conditions.bound_rounding(x)
        needed: np.ndarray = np.any(_array(grad), axis=(0, 1))  # each column is a call of the estimators
        phi = shapley_values(partial(self.predictor, needed=needed), _array(x), _array(x0), conditions.sampling)
        slopes = torch.from_numpy(phi).to(x) / torch.where(rounding, torch.inf, change).unsqueeze(-1)
        return grad @ slopes.mT, None

    def why_blank(self, x: Tensor, seed: Tensor, conditions: Conditions) -> str:
        """Return that no component changes the decision."""
        return "none of its components changes the decision between the start and the image"

    def no_gradient(self) -> Exception:
        """Return the error for a request that needs a gradient."""
        return NoClosedFormError(self.reason, *self.ways_out, "use ContributionCAM, which needs values alone")

    def fingerprint(self) -> str:
        """Return a digest of the values on fixed rows of all sizes, which tells fits apart without looking into them.

        It has seven digits of the largest value, two in single precision: threads may add up in another order.
        """
        generator = np.random.default_rng(0)
        rows = generator.normal(size=(1024, self.n_inputs or 0)) * 10 ** generator.uniform(-6, 6, (1024, 1))
        values = self.predictor(rows)
        largest = abs(values).max(initial=0.0) or 1.0
        count = 7 if self.predictor.dtype is np.float64 else 2
        digits = np.round(values / largest, count) + 0.0  # no -0
        return hashlib.sha256(digits.tobytes() + f"{largest:.{count - 1}e}".encode()).hexdigest()


class _Values(torch.autograd.Function):
    """The values of a decision through which nothing can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decision: Enumerated) -> Tensor:
        ctx.decision = decision
        return torch.from_numpy(decision.predictor(_array(x))).to(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ctx.decision.no_gradient()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ctx.decision.no_gradient()


def _array(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()


def shapley_values(function: Rows, x: np.ndarray, x0: np.ndarray, sampling: Sampling = USUAL.sampling) -> np.ndarray:
    """Return the Shapley values of B inputs for the change of a function from x0 to x, both (N, B): shape (N, B, P).

    They add up to ``function(x) - function(x0)``: exactly, also where permutations stand for all coalitions.
    """
    average = average_coalitions if x.shape[1] <= MOST else average_permutations
    return average(function, x, x0, sampling)


def average_coalitions(function: Rows, x: np.ndarray, x0: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the Shapley values by all coalitions, (N, B, P)."""
    count = x.shape[1]
    members = (np.arange(2**count)[:, None] >> np.arange(count)) & 1 > 0  # of each coalition, (2^B, B)
    share = np.array([1 / (count * math.comb(count - 1, size)) for size in range(count)])
    parts = []
    block = max(1, _rows_at_once(count, sampling) // len(members))
    for first in range(0, len(x), block):
        images = slice(first, first + block)
        rows = np.where(members, x[images, None], x0[images, None])
        values = function(rows.reshape(-1, count)).reshape(*rows.shape[:2], -1)
        phi = np.empty((len(rows), count, values.shape[2]))
        for b in range(count):
            # Differences first: what an input does not change is exactly 0, not what rounding leaves of a sum.
            (without,) = np.nonzero(~members[:, b])
            rises = values[:, without + (1 << b)] - values[:, without]
            phi[:, b] = np.einsum("s,nsp->np", share[members[without].sum(1)], rises)
        parts.append(phi)
    return np.concatenate(parts)


def average_permutations(function: Rows, x: np.ndarray, x0: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the Shapley values by the permutations of a sampling, (N, B, P)."""
    count, group = x.shape[1], slice(sampling.group, None, None if sampling.group is None else GROUPS)
    generator = np.random.default_rng(sampling.seed)  # the same for every image, whatever others are in its batch
    half = math.ceil(sampling.permutations / 2 / GROUPS) * GROUPS
    orders = np.stack([generator.permutation(count) for _ in range(half)])[group]
    places = np.concatenate([orders, orders[:, ::-1]]).argsort(1)  # of each input in every permutation, (M, B)
    sums = []
    block = max(1, _rows_at_once(count, sampling) // (count + 1))
    with tqdm(total=len(places) * len(x), desc="permutations", leave=False, delay=_PATIENCE) as bar:
        for first in range(0, len(x), block):
            images = slice(first, first + block)
            together = max(1, block // len(x[images]))
            total = 0.0
            for part in np.split(places, range(together, len(places), together)):
                come = part[:, None] < np.arange(count + 1)[:, None]  # after j steps those in the first j places
                rows = np.where(come, x[images, None, None], x0[images, None, None])
                values = function(rows.reshape(-1, count)).reshape(*rows.shape[:3], -1)
                rises = np.diff(values, axis=2)
                total = total + np.take_along_axis(rises, part[None, :, :, None], 2).sum(1)
                bar.update(rows.shape[0] * rows.shape[1])
            sums.append(total)
    return np.concatenate(sums) / len(places)


def _rows_at_once(count: int, sampling: Sampling) -> int:
    """Return how many rows of B inputs are evaluated in one call."""
    return min(_ROWS, max(1, sampling.max_bytes // (8 * count)))
