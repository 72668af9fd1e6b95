"""A run that several heads share: their questions pass the path together, as further columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from pytorch_grad_cam_pcasvm.maps.results import MethodResult
from pytorch_grad_cam_pcasvm.path.passes import Pass
from pytorch_grad_cam_pcasvm.starts.run import Asked, Run, Start, StartPlan
from pytorch_grad_cam_pcasvm.targets.output_gradients import join_gradients
from pytorch_grad_cam_pcasvm.targets.questions import Questions


def explain_together(
    cam: Any,
    first: Run,
    questions: Questions,
    runs: Sequence[Run],
    asked: Sequence[Questions],
    *,
    own_starts: bool = False,
) -> tuple[list[MethodResult], list[StartPlan | None]]:
    """Return the maps of several heads' questions, from where those of the first head start.

    Args:
        cam: the method.
        first: the run of the head whose starts they are.
        questions: K questions to it.
        runs: the run of each head on the same pass.
        asked: K questions to each.
        own_starts: whether each head starts where it is undecided itself, if maps are moved there from one start.

    Returns:
        The maps of each head, and the plan of the starts.
    """
    plans, count = cam._plan_starts(first, questions), len(questions)
    together = HeadsRun(**{entry.name: getattr(first, entry.name) for entry in fields(Run)} | {"runs": runs})
    # Of several layers, the inner ones share a start: one kind of start for all that are joined.
    own_starts = own_starts and any(plans) and len(plans) == 1
    find_boundary = cam._starts.find_boundary if own_starts else None
    columns = [replace(column, head=number) for number, some in enumerate(asked) for column in some.columns]
    whole = Questions([target for some in asked for target in some.targets], columns)
    of_layers = [
        cam._explain_layer(
            together, layer, whole, None if plan is None else _share_plan(plan, layer, runs, count, find_boundary)
        )
        for layer, plan in enumerate(plans)
    ]
    (joined,) = cam._join(together, of_layers)
    return [
        joined.map_columns(lambda tensor, number=number: tensor[:, number * count : (number + 1) * count])
        for number in range(len(runs))
    ], plans


@dataclass(frozen=True, eq=False)
class HeadsStart(Start):
    """A start that several heads share.

    Attributes:
        of_heads: the start as each head sees it.
    """

    of_heads: Sequence[Start] = ()


@dataclass(frozen=True, eq=False)
class HeadsRun(Run):
    """A run whose questions are those of several heads.

    Attributes:
        runs: the run of each head on the same pass.
    """

    runs: Sequence[Run] = ()

    @property
    def has_one_head(self) -> bool:
        """Whether all questions are asked of one head: they are not."""
        return False

    def output_gradients(self, targets: Sequence[Any], until: int = 0) -> Asked:
        """Return the gradients of the questions of all heads."""
        return self._ask(targets, lambda number, some: self.runs[number].output_gradients(some, until))

    def secants(self, targets: Sequence[Any], layer: int, until: int = 0) -> Asked:
        """Return the secants of the questions of all heads from the start that they share."""
        start = self.starts.get(layer)

        def ask(number: int, some: Questions) -> Asked:
            own = {layer: start.of_heads[number]} if isinstance(start, HeadsStart) else {}
            return replace(self.runs[number], starts=own).secants(some, layer, until)

        return self._ask(targets, ask, start)

    def _ask(self, questions: Any, ask: Callable[[int, Questions], Asked], start: Start | None = None) -> Asked:
        """Return what questions ask, each of its own head, as one table."""
        of_heads: dict[int, list[int]] = {}
        for k, column in enumerate(questions.columns):
            of_heads.setdefault(column.head, []).append(k)
        parts = [ask(number, questions.take_targets(indices)) for number, indices in of_heads.items()]
        joined = join_gradients(parts, [k for indices in of_heads.values() for k in indices])
        numbers: dict[str, Any] = joined.columns
        return Asked(joined.grads, **numbers, start=start)

    def with_pass(self, recorded: Pass) -> "HeadsRun":
        """Return the explanation of another pass of the same images."""
        runs = [run.with_pass(recorded) for run in self.runs]
        return replace(self, recorded=recorded, output=runs[0].output, starts={}, runs=runs)


def _share_plan(plan: StartPlan, layer: int, runs: Sequence[Run], count: int, find_boundary: Any) -> StartPlan:
    """Return the plan of one head's K targets as that of the same targets of several heads."""
    groups = [
        (
            [number * count + k for number in range(len(runs)) for k in indices],
            partial(_share_start, find, layer, runs, find_boundary),
        )
        for indices, find in plan.groups
    ]
    return StartPlan(groups, None, plan.components_apart)


def _share_start(find: Callable[[], Start], layer: int, runs: Sequence[Run], find_boundary: Any) -> HeadsStart:
    """Return a start of one head as all heads see it; with a function that finds boundaries, each at its own."""
    start, of_heads = find(), list[Start]()
    for run in runs:
        boundary = start.boundary
        if boundary is not None:
            own = None if find_boundary is None else find_boundary(run, layer)
            boundary = boundary.lend(run.output.head) if own is None else own.start_from(boundary)
        output = start.path and run.output_of(start.path.output)
        of_heads.append(replace(start, output=output, boundary=boundary))
    return HeadsStart(start.path, start.output, start.activations, start.difference, start.boundary, of_heads)
