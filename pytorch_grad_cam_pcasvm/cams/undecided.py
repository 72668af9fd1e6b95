"""Activations of any layer at which targets are undecided: those near the training set's mean there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.cams.boundary import Boundary
from pytorch_grad_cam_pcasvm.cams.context import Run
from pytorch_grad_cam_pcasvm.errors import NoBoundaryError
from pytorch_grad_cam_pcasvm.model.net import HeadRun
from pytorch_grad_cam_pcasvm.runtime.looks import is_traced, may_look
from pytorch_grad_cam_pcasvm.targets import every_component

_STEPS = 40  # of Newton's at most


class Undecided:
    """Activations of a layer, the same for all images, at which targets are 0, near the mean of the training set.

    The search first finds activations at which all components are 0; from there, damped Newton steps lead to a zero of
    the target. If its gradient leads nowhere, as deep inside a class, a point on the boundary is found with the head
    alone, and Gauss-Newton steps lead to activations with the components of this point. Results are kept and reused
    while they hold.

    Args:
        mean: activations of the layer, of one row.
    """

    def __init__(self, mean: Tensor) -> None:
        self.mean = mean
        # By target: activations, the size of its values at the mean, and how large a value is none.
        self._kept: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}

    def at(self, run: Run, layer: int, target: Any) -> Tensor:
        """Return activations, of one row, at which a target is 0, or for None all components.

        Args:
            run: of one image.
            layer: position of the target layer.
            target: a target with one boundary.

        Returns:
            The activations; if there are none, and nothing may be looked at, where all components are 0.

        Raises:
            NoBoundaryError: there are none.
        """
        targets = every_component(run.output) if target is None else [target]
        if not targets:
            return self.mean
        if is_traced():
            return self._kept[target][0]
        size = _moved(run, layer, self.mean).seeds(targets).values.norm()
        if target in self._kept and may_look(self.mean):
            x, before, nothing = self._kept[target]
            same = _moved(run, layer, x).seeds(targets).values.norm() <= nothing
            if bool((size == before) & same):  # of a network that has changed another number stands at the mean
                return x
        found = (
            _solved(run, layer, self.mean, targets, size) or (self.mean, torch.full_like(size, torch.inf))
            if target is None
            else _solved(run, layer, self.at(run, layer, None), targets, size)
            or _solved(run, layer, self.mean, targets, size)  # where all components are 0, a kernel may be flat
            or self._by_components(run, layer, target, size)
        )
        if found is None:
            raise NoBoundaryError(
                f"{target}: near the training mean there are no activations of {run.layers[layer]!r} at which its "
                "value is 0: start at the mean instead, baseline='mean'"
            )
        self._kept[target] = found[0], size, found[1]
        return found[0]

    def _by_components(self, run: Run, layer: int, target: Any, size: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return activations whose components are those of a point on the boundary that the head knows."""
        components = every_component(run.output)
        output = _moved(run, layer, self.mean).output
        if not components or not isinstance(output, HeadRun):
            return None
        try:
            there = Boundary(output.head, output.features[0].detach()).at([target], None)
        except NoBoundaryError:
            return None
        goal = torch.stack([component(there) for component in components], -1)
        found = _solved(run, layer, self.mean, components, goal.norm(), goal)
        return found and _solved(run, layer, found[0], [target], size)


def _moved(run: Run, layer: int, x: Tensor) -> Run:
    """Return the run with other activations."""
    passed = run.passed.moved(x, layer)
    return replace(run, passed=passed, output=run.output_of(passed.output), _last=None)


def _solved(
    run: Run, layer: int, start: Tensor, targets: Sequence[Any], size: Tensor, goal: Tensor | float = 0.0
) -> tuple[Tensor, Tensor] | None:
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
        The activations, of one row, and how large a difference of the values is none; if the steps lead to none, None,
        or the start where nothing may be looked at.
    """

    def at(x: Tensor) -> tuple[Tensor, Tensor]:
        here = _moved(run, layer, x)
        seeds = here.seeds(targets)
        slopes = here.pullback(seeds, layer).dense().flatten(1).to(seeds.values)
        missing = seeds.values - goal
        values = (missing * (-seeds.log_scale).exp())[0]
        slopes, values = (each.nan_to_num(0, 0, 0) for each in (slopes, values))  # too far a step is not taken below
        step = -slopes.mT @ (torch.linalg.pinv(slopes @ slopes.mT, hermitian=True) @ values)
        return missing.norm(), step.to(x).reshape(x.shape)

    x, (distance, step) = start, at(start)
    damping, eps = torch.ones_like(size), min(max(1e-10, 64 * torch.finfo(start.dtype).eps), 1e-3)
    nothing = eps * torch.maximum(distance, size)
    looks = may_look(start)
    for _ in range(_STEPS):
        if looks and bool(distance <= nothing):
            break
        trial = x + damping.to(x) * step
        found, next_step = at(trial)
        better = found <= (1 - damping / 4) * distance  # of what a straight line promises, a quarter at least
        x, step, distance = (torch.where(better, *pair) for pair in ((trial, x), (next_step, step), (found, distance)))
        damping = torch.where(better, (2 * damping).clamp(max=1), damping / 4)
    reached = distance <= 16 * nothing
    return None if looks and not bool(reached) else (torch.where(reached, x, start), 16 * nothing)
