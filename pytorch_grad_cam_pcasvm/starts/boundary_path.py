"""Activations of any layer, near the training set's mean, at which targets are undecided."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.network.inputs import Inputs
from pytorch_grad_cam_pcasvm.network.outputs import HeadRun
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import NoBoundaryError
from pytorch_grad_cam_pcasvm.runtime.log import log_since, start_clock
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_leaves
from pytorch_grad_cam_pcasvm.starts.boundary_head import Boundary, on_cpu
from pytorch_grad_cam_pcasvm.starts.poles import find_pole, name_other_start, off_jump
from pytorch_grad_cam_pcasvm.starts.run import Run, Start
from pytorch_grad_cam_pcasvm.tape.tape import count_writes, identify_memory
from pytorch_grad_cam_pcasvm.targets import every_component
from pytorch_grad_cam_pcasvm.targets.output_gradients import OutputGradients, differentiate_targets

_STEPS = 40  # of Newton's at most


class Solution(NamedTuple):
    """Activations (1, ...) at which the targets have the wanted values.

    Attributes:
        activations: of the target layer.
        nothing: differences of values up to this size count as zero.
        goal: the values, shape (1, K), or one for all.
    """

    activations: Tensor
    nothing: Tensor
    goal: Tensor | float


class Found(NamedTuple):
    """Activations of one row that a search led to, and the path run from there, where it has done so."""

    activations: Tensor
    start: Start | None = None


class _Kept(NamedTuple):
    solution: Solution
    features_norm: Tensor
    mean: Tensor
    state: Any  # of the network, where nothing may be looked at


class PathBoundary:
    """Activations of a layer, the same for all images, at which targets are 0, near the mean of the training set.

    The search first finds activations at which all components are 0; from there, damped Newton steps lead to a zero of
    the target. If its gradient leads nowhere, as deep inside a class, a point on the boundary is found with the head
    alone, and Gauss-Newton steps lead to activations with the components of this point. Where all components cannot be
    0 at once, each is a target of its own. Results are kept and reused while they hold.

    Args:
        mean: activations of the layer, of one row.
    """

    def __init__(self, mean: Tensor) -> None:
        self.mean = mean
        self._kept: dict[Any, _Kept] = {}  # by target
        # By target, the state of a network in which there are none, and the size of the values at the mean.
        self._missing: dict[Any, tuple[Any, Tensor]] = {}

    def of_components(self, run: Run, layer: int) -> Found | None:
        """Return activations, of one row, at which all components are 0; None if there are none.

        Without components, these are the mean.

        Args:
            run: of one image.
            layer: position of the target layer.
        """
        components = every_component(run.output)
        if not components:
            return Found(self.mean)

        def search(size: Tensor) -> Solution | None:
            return _solved(run, layer, self.mean, components, size)

        return self._reused(run, layer, None, components, search)

    def find_point(self, run: Run, layer: int, target: Any) -> Found:
        """Return activations, of one row, at which a target is 0; without a gradient, about 0, by its components.

        Args:
            run: of one image.
            layer: position of the target layer.
            target: a component, or a target with one boundary.

        Returns:
            The activations.

        Raises:
            NoBoundaryError: there are none.
        """
        components = every_component(run.output)
        assert run.head is not None  # without one, targets start at the mean
        by_components = run.head.enumerated is not None and target not in components

        def search(size: Tensor) -> Solution | None:
            if by_components:
                return self._by_components(run, layer, target, components)
            # Of dense features, the pullback of all components takes long.
            near = self.of_components(run, layer) if run.output.grid is None else None
            centres = [self.mean] if near is None else [near.activations, self.mean]
            starts = [one for one in centres if not self._is_on_pole(run, layer, one)]
            for start in starts or [self.mean / 2]:  # where all components are 0, a kernel may be flat
                solution = _solved(run, layer, start, [target], size)
                if solution is not None and not self._is_on_pole(run, layer, solution.activations):
                    return solution
            return self._polished(run, layer, target, components, size)

        found = self._reused(run, layer, target, components if by_components else [target], search)
        if found is None:
            raise NoBoundaryError(
                f"{target}: near the training mean there are no activations of {run.layers[layer]!r} at which its "
                f"value is 0: {name_other_start(self._is_on_pole(run, layer, self.mean))}"
            )
        return found

    def _is_on_pole(self, run: Run, layer: int, activations: Tensor) -> bool:
        """Return whether rounding decides the output of the head at activations of one row."""
        return _is_on_pole(run, layer, activations, self.mean)

    def _reused(
        self,
        run: Run,
        layer: int,
        key: Any,
        targets: Sequence[Any],
        search: Callable[[Tensor], Solution | None],
    ) -> Found | None:
        """Return the activations found before, if they still hold, or else the result of a search."""
        if is_traced():
            return Found(self._kept[key].solution.activations) if key in self._kept else None
        name, began = "all components" if key is None else key, start_clock()
        can_look = can_sync(self.mean)
        state = None if can_look else _read_state(run)
        if key in self._kept and state == self._kept[key].state:
            former, features_norm, mean, _ = self._kept[key]
            start = run.start_at(layer, former.activations)
            values = differentiate_targets(start.output, targets, run.dtype).values
            # Of a network that has changed, the features there are others.
            same = (start.output.head_trace.values[0].norm() == features_norm) & (
                (values - former.goal).norm() <= former.nothing
            )
            if not can_look or bool(same):
                log_since(began, "start at %s for %s: as before", run.layers[layer], name)
                same &= (mean == self.mean).all()
                # Maps that are not finite are refused when they are looked at.
                if can_look:
                    return Found(former.activations, start)
                return Found(torch.where(same, former.activations, torch.nan))
        size = run.replay(layer, self.mean).output_gradients(targets).values.norm()
        if can_look and key in self._missing:
            before, before_size = self._missing[key]
            if before == _read_state(run) and bool(size == before_size):
                return None
        solution = search(size)
        log_since(began, "start at %s for %s: %s", run.layers[layer], name, "found" if solution else "there is none")
        if solution is None:
            self._kept.pop(key, None)
            self._missing[key] = _read_state(run), size
            return None
        start = run.start_at(layer, solution.activations)
        self._kept[key] = _Kept(solution, start.output.head_trace.values[0].norm(), self.mean, state)
        return Found(solution.activations, start)

    def _by_components(self, run: Run, layer: int, target: Any, components: Sequence[Any]) -> Solution | None:
        """Return activations with the components of a point on the head's boundary."""
        output = run.replay(layer, self.mean).output
        boundary = Boundary(output.head, output.head_trace.values[0].detach().mean(0)).at([target], None)
        goal = torch.stack([component(boundary) for component in components], -1)
        return _solved(run, layer, self.mean, components, goal.norm(), goal)

    def _polished(self, run: Run, layer: int, target: Any, components: Sequence[Any], size: Tensor) -> Solution | None:
        """Return activations near such ones at which the target is 0."""
        if not components or target in components:
            return None
        try:
            solution = self._by_components(run, layer, target, components)
        except NoBoundaryError:
            return None
        return solution and _solved(run, layer, solution.activations, [target], size)


def _is_on_pole(run: Run, layer: int, activations: Tensor, mean: Tensor) -> bool:
    """Return whether rounding decides a head's output at activations of one row; ``mean``: as large as usual ones."""
    outputs = [run.replay(layer, one).output for one in (activations, mean)]
    head, features = on_cpu(
        outputs[0].head, torch.stack([one.head_trace.values[0].detach().mean(0) for one in outputs])
    )
    return bool(find_pole(head, features[:1], torch.finfo(activations.dtype).eps, usual=features[1:]).any())


def _read_state(run: Run) -> Any:
    """Return a mark of a network's state, without a look at its numbers; it does not see writes to ``.data``."""
    means = {} if run.head is None else run.head.training_set.means
    modules = [
        (id(module), type(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in run.model.modules()
    ]
    tensors = chain(run.model.parameters(), run.model.buffers(), means.values())
    return modules, [(id(tensor), count_writes(tensor), identify_memory(tensor)) for tensor in tensors]


def leave_jump(run: Run, layer: int, start: Tensor) -> Tensor:
    """Return activations, of one row, inside of a cell, next to others at which a decision without a gradient jumps.

    If it does not jump there, or no such activations are found, they are the others.
    """
    if run.head is None or run.head.enumerated is None or isinstance(run.images, Inputs) or is_traced():
        return start
    single = run.isolate()
    with torch.no_grad():
        output = single.replay(layer, start).output
        features = output.head_trace.values[0].mean(0)
        beside = None if _is_on_pole(single, layer, start, start) else off_jump(output.head, features)
        if beside is None:
            return start
        components = every_component(output)
        if not components:
            change, averages = beside - features, run.ends_in_mean(layer)
            return start + change.to(start).reshape(1, -1, *[1] * (start.dim() - 2)) if averages else start
        head_run = HeadRun(output.head, output.head(beside.unsqueeze(0)))
        goal = torch.stack([component(head_run) for component in components], -1)
        solution = _solved(single, layer, start, components, goal.norm(), goal)
    return start if solution is None else solution.activations


def _solved(
    run: Run, layer: int, start: Tensor, targets: Sequence[Any], size: Tensor, goal: Tensor | float = 0.0
) -> Solution | None:
    """Return the activations near others at which the values of targets are given ones.

    Damped Gauss-Newton steps, the shortest ones. A step that does not help is not taken, and the next one is shorter;
    nothing has to be looked at to know that.

    Args:
        run: of one image.
        layer: position of the target layer.
        start: activations to start from, of one row.
        targets: K targets.
        size: of the values, in comparison with which a difference is nothing.
        goal: the values, shape (1, K), or one for all.

    Returns:
        The activations; if the steps lead to none, None, or the start where nothing may be looked at.
    """

    def measure(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return how much is missing, the size of the terms that the values are sums of, and the step to the goal."""
        here = run.replay(layer, x)
        output_gradients = here.output_gradients(targets)
        slopes = here.pullback(output_gradients, layer).dense().flatten(1).to(output_gradients.values)
        missing, scale = output_gradients.values - goal, output_gradients.log_scale.exp()
        terms = (slopes * x.flatten().to(slopes)).abs().sum(1) + _measure_terms(output_gradients, here)
        values = (missing / scale)[0]
        slopes, values = (numbers.nan_to_num(0, 0, 0) for numbers in (slopes, values))  # too far: not taken below
        step = -slopes.mT @ (torch.linalg.pinv(slopes @ slopes.mT, hermitian=True) @ values)
        return missing.norm(), (terms * scale[0]).norm(), step.to(x).reshape(x.shape)

    began, steps = start_clock(), 0
    x, (distance, terms, step) = start, measure(start)
    eps = torch.finfo(start.dtype).eps
    damping, tolerance = torch.ones_like(size), min(max(1e-10, 64 * eps), 1e-3)
    # Values that cancel are no measure of what is nothing: the terms that they are sums of are.
    nothing = torch.maximum(tolerance * torch.maximum(distance, size), 2 * eps * terms)
    can_look = can_sync(start)
    for _ in range(_STEPS):
        if can_look and bool((distance <= nothing) | (damping < eps)):  # there, or no step leads on
            break
        trial = x + damping.to(x) * step
        ahead, _, next_step = measure(trial)
        better = ahead <= (1 - damping / 4) * distance  # of what a straight line promises, a quarter at least
        x, step, distance = (torch.where(better, *pair) for pair in ((trial, x), (next_step, step), (ahead, distance)))
        damping = torch.where(better, (2 * damping).clamp(max=1), damping / 4)
        steps += 1
    log_since(began, "%d steps at %s towards given values of %d targets", steps, run.layers[layer], len(targets))
    reached = distance <= 16 * nothing
    # Where nothing may be looked at, maps that are not finite are refused when they are.
    if can_look and not bool(reached):
        return None
    return Solution(torch.where(reached, x, torch.nan), 16 * nothing, goal)


def _measure_terms(output_gradients: OutputGradients, run: Run) -> Tensor:
    """Return the size of the terms that the values of K targets are sums of at the path's output, shape (K,)."""
    outputs = [leaf for leaf in tree_leaves(run.recorded.output) if isinstance(leaf, Tensor)]
    pairs = zip(output_gradients.grads, outputs, strict=True)
    terms = [(grad.flatten(1) * output.flatten().to(grad)).abs().sum(1) for grad, output in pairs if grad is not None]
    return torch.stack(terms).sum(0)
