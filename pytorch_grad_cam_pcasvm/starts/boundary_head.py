"""The decision boundary: for every target a point where its value is 0, near the training mean."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from scipy.optimize import brentq
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.decisions import Ensemble, KernelSVM
from pytorch_grad_cam_pcasvm.head.stack import HeadTrace
from pytorch_grad_cam_pcasvm.head.stages import Chain
from pytorch_grad_cam_pcasvm.head.vote import Vote
from pytorch_grad_cam_pcasvm.network.outputs import HeadRun
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, full_precision
from pytorch_grad_cam_pcasvm.runtime.errors import NoBoundaryError
from pytorch_grad_cam_pcasvm.runtime.log import LOGGER, log_since, start_clock
from pytorch_grad_cam_pcasvm.starts.jumps import Jumps, features_at, find_deviations
from pytorch_grad_cam_pcasvm.starts.poles import (
    MEAN,
    find_pole,
    is_on_pole,
    leave_pole,
    name_other_start,
    off_jump,
    refuse_pole,
)
from pytorch_grad_cam_pcasvm.tape.tape import count_writes
from pytorch_grad_cam_pcasvm.targets import ClosedFormTarget
from pytorch_grad_cam_pcasvm.targets.output_gradients import (
    OutputGradients,
    differentiate_targets,
    join_gradients,
)
from pytorch_grad_cam_pcasvm.targets.questions import resolve_targets
from pytorch_grad_cam_pcasvm.targets.rows import differentiate_starts

_CANDIDATES = 128  # support vectors on the other side, the nearest
_PARTS = 8  # of the way to one, between which a crossing is looked for
_BEYOND = 4.0  # how far behind them, in distances to them, if none is on the other side
_MOST = 1e3  # standard deviations of the features
_EXACT = 1e-12  # of the value at the start
_HALVINGS = 40  # of a step that does not help
_STRAIGHT = 10  # doublings of a step, over which a value follows its gradient
_BYTES = 1 << 26
_RUNS = 32  # of a head at points that are kept


class Boundary:
    """Points at which the targets of a head are undecided, near a starting point, the same for all images.

    From the start, straight lines lead to support vectors on the other side, and the nearest crossing counts. If there
    are none, or stages before the decision are not linear, damped Newton steps follow the gradient. A linear decision
    takes one step: the projection of the start onto the boundary. Targets without a boundary (components, a regressor's
    value) stay at the start.

    Args:
        head: a head, or the part of one behind its components.
        start: the training mean, what the head takes, shape (D,).
        deviations: the standard deviations of what such a part takes, if that has no gradient, (D,).
    """

    def __init__(self, head: Head, start: Tensor, deviations: Tensor | None = None) -> None:
        self.head, self._given = head, start
        self._deviations = None if deviations is None else (0, deviations)
        self._kernels = _kernels(head)
        self._tensors = [(tensor, count_writes(tensor), tensor.clone()) for tensor in head.buffers()]
        with torch.no_grad():
            self.start = HeadRun(head, head(start.unsqueeze(0)))
        self._start_on_cpu: HeadRun | None = None
        self._points: dict[Any, Tensor] = {}
        self._without: dict[Any, str] = {}  # why targets have no point
        self._runs: dict[Any, HeadRun] = {}

    def holds_for(self, head: Head, start: Tensor | None) -> bool:
        """Return whether this was made for the head and the start in their present state."""
        tensors = list(head.buffers())
        if head is not self.head or start is not self._given or len(tensors) != len(self._tensors):
            return False
        if any(module._forward_hooks or module._forward_pre_hooks for module in head.modules()):
            return False  # they may do anything
        can_look = can_sync(start)
        for tensor, (original, version, numbers) in zip(tensors, self._tensors, strict=True):
            same = torch.equal(tensor, numbers) if can_look else count_writes(tensor) == version
            if tensor is not original or not same:
                return False
        return _kernels(head) == self._kernels

    def lend(self, head: Head) -> "Boundary":
        """Return the boundary of another head whose targets start at the points of this one."""

        def find(names: Sequence[Any], boundary_index: Tensor | None) -> HeadRun:
            return HeadRun(head, head(self.at(names, boundary_index).features))

        return _SharedBoundary(head, self.start.features, find, self.components_apart)

    def start_from(self, other: "Boundary") -> "Boundary":
        """Return this boundary for maps that are moved from another head's start; its points, where this has none."""

        def find(names: Sequence[Any], boundary_index: Tensor | None) -> HeadRun:
            if all(map(self._has_point, names)):
                return self.at(names, boundary_index)
            points = [(self if self._has_point(name) else other).point(name) for name in names]
            run = HeadRun(self.head, self.head(torch.stack(points)))
            return run if boundary_index is None else run.rows(boundary_index)

        return _SharedBoundary(self.head, other.start.features, find, self.components_apart)

    @cached_property
    def components_apart(self) -> bool:
        """Whether each component is 0 at a point of its own, as the start lies on a pole that they depend on."""
        position = self.head.component_position or 0
        if all(stage.linear for stage in self.head.stages[:position]):
            return False
        head, start = on_cpu(self.head, self._given)
        return bool(find_pole(head, start.unsqueeze(0), torch.finfo(start.dtype).eps)[:position].any())

    def at(self, names: Sequence[Any], boundary_index: Tensor | None) -> HeadRun:
        """Return the head's run at the points of targets, of one row or N.

        Args:
            names: targets with one boundary each, as of :meth:`.Questions.group_boundaries`.
            boundary_index: which of them is that of each row; None: the only one.

        Raises:
            NoBoundaryError: there is no boundary within reach.
        """
        key = tuple(names)
        if key not in self._runs:
            if len(self._runs) >= _RUNS:
                self._runs.clear()
            points = torch.stack([
                self.point(name, needed=boundary_index is None or can_sync(boundary_index)) for name in names
            ])
            self._runs[key] = HeadRun(self.head, self.head(points))
        return self._runs[key] if boundary_index is None else self._runs[key].rows(boundary_index)

    def differentiate(
        self,
        output: Any,
        targets: Sequence[Any],
        dtype: torch.dtype,
        until: int = 0,
    ) -> OutputGradients:
        """Return the secants of K targets, each from its own point, with respect to the head's value at a position."""
        questions = resolve_targets(targets, output)
        groups = questions.group_boundaries(self.head, output.device, apart=self.components_apart)
        starts = [self.at(boundaries, boundary_index) for _, boundaries, boundary_index in groups]
        value_dtype = starts[0].head_trace.values[until].dtype if until else dtype
        asked = [
            (questions.take_targets(target_indices), start)
            for (target_indices, *_), start in zip(groups, starts, strict=True)
        ]
        if questions.images is None:
            columns = [(some.columns, start) for some, start in asked]
            of_starts = differentiate_starts(output, columns, until)
            parts = [OutputGradients.of(rows, value_dtype) for rows in of_starts]
        else:
            parts = [differentiate_targets(output, some, value_dtype, start, until=until) for some, start in asked]
        moved = []
        for part, start in zip(parts, starts, strict=True):
            step = start.head_trace.values[until] - self.start.head_trace.values[until]
            grads = part.by_image
            moved.append(replace(part, excess=(grads * step.to(grads).unsqueeze(1)).sum(-1)))
        return join_gradients(moved, [k for target_indices, *_ in groups for k in target_indices])

    def point(self, target: ClosedFormTarget | str | None, *, needed: bool = True) -> Tensor:
        """Return the point of a target with one boundary, or for None the start, shape (D,).

        NaN if there is none and none is needed.

        Raises:
            NoBoundaryError: there is no boundary within reach.
        """
        if target is None:
            return self.start.features[0]
        if needed and target in self._without:
            raise NoBoundaryError(self._without[target])
        if target not in self._points:
            began = start_clock()
            try:
                with torch.no_grad(), full_precision(torch.device("cpu")):
                    point = self._search(target)
                self._points[target] = point.to(self.start.features)
                log_since(began, "boundary of %s: found in the head", target)
            except NoBoundaryError as error:
                self._without[target] = str(error)
                self._points[target] = torch.full_like(self.start.features[0], torch.nan)
                if needed:
                    raise
        return self._points[target]

    def _has_point(self, target: ClosedFormTarget | str | None) -> bool:
        """Return whether there is a point of a target; it is looked for once."""
        self.point(target, needed=False)
        return target not in self._without

    def _search(self, target: ClosedFormTarget | str) -> Tensor:
        """Return the point on the CPU: the search asks for one number after the other."""
        if self._start_on_cpu is None:
            head, start = on_cpu(self.head, self._given)
            self._start_on_cpu = self.start if head is self.head else HeadRun(head, head(start.unsqueeze(0)))
        near = self._start_on_cpu
        head = near.head
        poles = find_pole(head, near.features, torch.finfo(near.features.dtype).eps)
        on_pole = bool(poles.any())
        if isinstance(target, str):
            if on_pole:
                refuse_pole(head, poles, MEAN)
            beside = off_jump(head, near.features[0], self._deviations)
            return near.features[0] if beside is None else beside
        try:
            point = self._search_from(near, poles, target)
        except NoBoundaryError:
            point = None
        if point is None or (on_pole and is_on_pole(head, point.unsqueeze(0))):
            value = "rounding decides its value" if on_pole else f"its value is {float(target(near).abs()):.3g}"
            raise NoBoundaryError(
                f"{target}: no decision boundary is within reach of the training mean, where {value}: "
                + name_other_start(on_pole)
            )
        return point

    def _search_from(self, near: HeadRun, poles: Tensor, target: ClosedFormTarget) -> Tensor:
        """Return the point of a target for the training mean, or if that is on a pole for another point near it."""
        head, size = near.head, float(target(near).abs())
        if bool(poles.any()):
            regular = leave_pole(head, near.features[0], poles, target)
            if regular is None:
                raise NoBoundaryError
            near = HeadRun(head, head(regular.unsqueeze(0)))
        values = near.head_trace.values
        if head.enumerated is not None:
            return self._beside_jump(target, near)
        bends = next((number for number, stage in enumerate(head.stages) if not stage.linear), len(head.stages))
        position = min(bends, len(head.stages) - 1)  # what is affine before the decision changes no way
        nearest = _Search(head, target, position, size).find_nearest(values[position][0])
        if not position:
            return self._in_reach(nearest)
        # The nearest features that lead there: those that stages leave out stay as they are.
        jacobian, _ = head.pullback(near.head_trace, {position: None})
        change = torch.linalg.lstsq(jacobian[0], (nearest - values[position][0]).unsqueeze(1), driver="gelsd")
        point = values[0][0] + change.solution[:, 0]
        return self._in_reach(_Search(head, target, 0, size).polished(point))

    def _beside_jump(self, target: ClosedFormTarget, near: HeadRun) -> Tensor:
        """Return the point for a head without a gradient, of which samples tell where the value jumps over 0."""
        values, value = near.head_trace.values, float(target(near))
        if not value:
            return near.features[0]
        position, deviations = self._deviations or find_deviations(near.head) or (0, None)
        if deviations is None:
            return near.features[0]
        goal = Jumps(near.head, target, position, deviations.to(values[0])).find_jump(values[position][0])
        if goal is None:
            return near.features[0]  # no sample is known to be decided otherwise: baseline_values say what is there
        point = features_at(near.head, values[0][0], position, goal, deviations.to(values[0]))
        if point is None:
            raise NoBoundaryError
        return point

    def _in_reach(self, point: Tensor) -> Tensor:
        """Return a point, unless it lies absurdly far from the training images, as where weights are only rounding."""
        assert self._start_on_cpu is not None
        first, way = self._start_on_cpu.head.stages[0], point - self._start_on_cpu.features[0]
        deviations = 0.0
        if first.input_deviations is not None:
            deviations = float((way / first.input_deviations).norm()) / len(way) ** 0.5
        elif first.facts.spread:
            deviations = float(way.norm()) / first.facts.spread**0.5
        if deviations > _MOST:
            raise NoBoundaryError
        return point


class _SharedBoundary(Boundary):
    """Points of a head's targets, to which maps are moved from the start of another head."""

    def __init__(
        self, head: Head, features: Tensor, find: Callable[[Sequence[Any], Tensor | None], HeadRun], apart: bool
    ) -> None:
        self.head, self._find, self.components_apart = head, find, apart
        # Of the start only the features are asked: maps are moved by them.
        self.start = HeadRun(head, HeadTrace([features], []))

    def at(self, names: Sequence[Any], boundary_index: Tensor | None) -> HeadRun:
        return self._find(names, boundary_index)


def on_cpu(head: Head, start: Tensor) -> tuple[Head, Tensor]:
    """Return a head and a point with their numbers on the CPU, in float64: themselves, or copies from another device.

    Copies share with the head what is no number: hooks, the estimators that it was made of, and what is stored with it.
    """
    buffers = list(head.buffers())
    if all(tensor.device.type == "cpu" for tensor in (*buffers, start)):
        return head, start

    def copied(tensor: Tensor) -> Tensor:
        return tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu()

    attributes = [item for module in head.modules() for item in vars(module).items()]
    shared = [head._fit, head.training_set, *(value for name, value in attributes if "_hooks" in name)]
    tensors = [*buffers, *(value for _, value in attributes if isinstance(value, Tensor))]  # constants are no buffers
    memo: dict[int, Any] = {id(value): value for value in shared} | {id(tensor): copied(tensor) for tensor in tensors}
    memo |= {id(value): value.move_tensors(copied) for _, value in attributes if isinstance(value, Vote)}
    return copy.deepcopy(head, memo), copied(start)


class _Search:
    """A search for a target's zero among a head's values at a position; ``size`` is the value's at the start."""

    def __init__(self, head: Head, target: ClosedFormTarget, position: int, size: float) -> None:
        self._head, self._target, self._position, self._size = head, target, position, size
        self._most_rows = max(1, _BYTES // head.bytes_per_target(1))

    def _evaluate_rows(self, x: Tensor) -> Tensor:
        """Return the target's values at points x (M, Q), shape (M,)."""
        return torch.cat([self._target(self._run_head(block)) for block in x.split(self._most_rows)])

    def _evaluate(self, x: Tensor) -> Tensor:
        return self._evaluate_rows(x.unsqueeze(0))[0]

    def _run_head(self, x: Tensor) -> HeadRun:
        return HeadRun(self._head, self._head.resume(self._position, x))

    def find_nearest(self, start: Tensor) -> Tensor:
        """Return the nearest zero to a start, shape (Q,)."""
        value = float(self._evaluate(start))
        candidates = self._candidates()
        if len(candidates) and value:
            across = self._evaluate_rows(candidates) * value < 0
            for ends, reach in ((candidates[across], 1.0), (candidates, _BEYOND)):
                crossed = self._crossed(start, ends, reach) if len(ends) else None
                if crossed is not None:
                    LOGGER.debug("boundary of %s: crossed on the way to one of %d samples", self._target, len(ends))
                    return crossed
        try:
            return self.polished(start)
        except NoBoundaryError:  # a stage may be singular there, as a Normalizer is at 0: search from beside it
            ways = torch.randn(_CANDIDATES, len(start), generator=torch.Generator().manual_seed(0), device="cpu").to(
                start
            )
            crossed = self._crossed(start + ways[0], start + ways[1:], 1.0)
            if crossed is None:
                raise
            return crossed

    def _candidates(self) -> Tensor:
        """Return the support vectors that are among the values at the position, shape (S, Q)."""
        decision = self._head.stages[-1]
        vectors: list[Tensor] = []
        if self._position == len(self._head.stages) - 1:
            for member in decision.members if isinstance(decision, Ensemble) else [decision]:
                svm = member.stages[0] if isinstance(member, Chain) else member
                if isinstance(svm, KernelSVM):
                    vectors.append(svm.support_vectors)
        return torch.cat(vectors).unique(dim=0) if vectors else torch.zeros(0, 0)

    def _crossed(self, start: Tensor, ends: Tensor, reach: float) -> Tensor | None:
        """Return the crossing nearest to the start on the ways to some of the ends, or beyond; None without one."""
        length = (ends - start).norm(dim=1)
        order = length.argsort()[:_CANDIDATES]
        length, step = length[order], ends[order] - start
        places = torch.linspace(0, reach, _PARTS + 1, dtype=start.dtype, device=start.device)
        points = start + places.reshape(-1, 1, 1) * step
        signs = self._evaluate_rows(points.flatten(0, 1)).reshape(len(places), -1).sign()
        first = (signs[1:] == signs[:1]).cumprod(0).sum(0)  # parts of the way before the value changes its sign
        distance = torch.where(first < _PARTS, places[first] * length, torch.inf)
        best = int(distance.argmin())
        if not bool(distance[best].isfinite()):
            return None

        return self._bisect(start, step[best], float(places[first[best]]), float(places[first[best] + 1]))

    def _bisect(self, start: Tensor, step: Tensor, low: float, high: float) -> Tensor:
        """Return the zero between two places on a line, at which the value has different signs."""

        @cache  # brentq asks for the ends again
        def value(place: float) -> float:
            return float(self._evaluate(start + place * step))

        ends = {place: value(place) for place in (low, high)}
        if ends[low] * ends[high] > 0:  # one of them is zero but for rounding, which is another in a larger batch
            place = min(ends, key=lambda end: abs(ends[end]))
        else:
            # The tightest tolerance of brentq; xtol must be above 0, or it never ends if the zero is at the start.
            place = brentq(value, low, high, xtol=1e-300, rtol=4 * torch.finfo(torch.float64).eps, disp=False)
        return start + place * step

    def _in_rounding(self, x: Tensor, value: Tensor, step: Tensor) -> Tensor | None:
        """Return the zero beside a point at which a Newton step is lost in rounding; None if that is not the reason.

        If the terms of a decision cancel, rounding exceeds any tolerance relative to its value. But multiples
        of the step cross the zero, and from there on the value is what the gradient says, however large they are.
        """
        lengths = 2.0 ** torch.arange(1, 64, dtype=x.dtype, device=x.device)
        expected = value * (1 - lengths)
        straight = (self._evaluate_rows(x + lengths.unsqueeze(1) * step) - expected).abs() <= expected.abs() / 2
        crossed = straight.unfold(0, _STRAIGHT, 1).all(1)
        if not bool(crossed.any()):
            return None
        return self._bisect(x, step, 0.0, float(lengths[: len(crossed)][crossed][0]))

    def polished(self, start: Tensor) -> Tensor:
        """Return the zero that damped Newton steps lead to, shape (Q,); refuse where none is in reach."""
        x = start
        for steps in range(100):
            output_gradients = differentiate_targets(
                self._run_head(x.unsqueeze(0)), [self._target], start.dtype, until=self._position
            )
            value, grad = output_gradients.values[0, 0], output_gradients.by_image[0, 0]
            if float(value.abs()) <= _EXACT * self._size:
                LOGGER.debug("boundary of %s: reached in %d steps", self._target, steps)
                return x
            step = -value * grad / grad.square().sum() / output_gradients.log_scale[0, 0].exp()
            halves = (0.5**halvings for halvings in range(_HALVINGS))
            shorter = next((part for part in halves if self._evaluate(x + part * step).abs() < value.abs()), None)
            if shorter is None:
                zero = self._in_rounding(x, value, step)
                if zero is None:
                    break
                return zero
            x = x + shorter * step
        raise NoBoundaryError


def _kernels(head: Head) -> list[Any]:
    return [module.kernel for module in head.modules() if isinstance(module, KernelSVM)]
