"""Writes into views: the tensor around an overlapping one, and the tensors that a view is a view of."""

from typing import Any

from torch import Tensor

from pytorch_grad_cam_pcasvm.tape.alias_tracker import AliasTracker, unseen_write
from pytorch_grad_cam_pcasvm.tape.aliases import View, overlaps
from pytorch_grad_cam_pcasvm.tape.overlapping import order_matters
from pytorch_grad_cam_pcasvm.tape.step import Ref, Step
from pytorch_grad_cam_pcasvm.tape.tape import has_gradient

Parents = list[tuple[Tensor, Any, View]]


def find_view_around(tracker: AliasTracker, target: Tensor, by: str) -> View:
    """Return how an overlapping tensor is a view of one whose numbers have places of their own."""
    view = tracker.track(target).view
    while view is not None and overlaps(view.parent):
        outer = tracker.track(view.parent).view
        view = None if outer is None else outer.through(view)
    if view is None or view.switch:
        raise order_matters(by)
    return view


def find_parents(tracker: AliasTracker, target: Tensor) -> Parents:
    """Return the tensors that one is a view of, with their values before a write into it, and how it is a view."""
    parents: Parents = []
    view = tracker.track(target).view
    while view is not None:
        while (outer := tracker.track(view.parent).view) is not None and overlaps(view.parent):
            view = outer.through(view)  # put back whole, its old numbers would hide the new ones
        if outer is None and overlaps(view.parent):
            raise unseen_write("something that writes into one of several tensors in one memory")
        with tracker.paused():
            before = tracker.find_value(view.parent)
            if view.switch and before is not None and before not in tracker.tape.switches:
                tracker.detached.add(tracker.track(view.parent).memory)
                break  # its gradient knows nothing of this write
            parents.append((view.parent, view.parent.clone() if before is None else Ref(before), view))
        view = outer
    return parents


def write_back(tracker: AliasTracker, parents: Parents, value: int | None) -> None:
    """Record that tensors have other values after a write into a view of theirs, which has a new value."""
    for parent, parent_before, view in parents:
        smooth_parent = (value not in tracker.tape.switches and not view.switch) or (
            isinstance(parent_before, Ref) and parent_before.index not in tracker.tape.switches
        )
        function, arguments = view.written_back(parent_before, Ref(value))  # type: ignore[arg-type]
        with tracker.paused():
            index = tracker.add_value(parent, smooth=smooth_parent and has_gradient(parent))
        inputs = tuple(item.index for item in arguments if isinstance(item, Ref))
        tracker.add_step(Step(function, arguments, {}, inputs, (index,)))
        value = index
