"""Overlapping writes: into a tensor of which several numbers share one place in memory, as in ``unfold`` or ``expand``.

They are written into a tensor around it whose numbers have places of their own. What is added counts as often as it is
added; of what is overwritten all numbers at a place are equal, or what is left there is chance.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.indexing import add_at, put, put_alike
from pytorch_grad_cam_pcasvm.runtime.device import can_sync
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.tape.alias_tracker import AliasTracker, unseen_write
from pytorch_grad_cam_pcasvm.tape.aliases import View, overlaps
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


Write = tuple[Any, tuple[Any, ...]]
# f(f(x)) = f(x): it does not matter how often they are applied.
_IDEMPOTENT = {
    *("relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "clip", "threshold", "hardshrink", "abs"),
    *("nan_to_num", "sign", "sgn", "round", "floor", "ceil", "trunc"),
}


def overlapping_write(
    twin: Any, args: Sequence[Any], options: Mapping[str, Any], whole: Tensor, places: Tensor
) -> Write:
    """Return a write into the whole tensor that equals a write into an overlapping view of it.

    Args:
        twin: the other operation, which returns a new tensor.
        args: its arguments: the view, and what is written.
        options: its keyword arguments.
        whole: the tensor around the view.
        places: of the view's numbers in the whole, in the shape of the view.

    Returns:
        The operation, and its arguments behind the whole.

    Raises:
        NoClosedFormError: the numbers left at a place depend on the order of writing.
    """  # noqa: DOC501 - order_matters is one
    name, (view, *rest) = twin.overloadpacket.__name__, args
    if name in _IDEMPOTENT and all(_is_one_number(item) for item in (*rest, *options.values())):
        return put_alike, (places, twin(view, *rest, **options))
    write = _WRITES.get(name)
    if write is None:
        raise order_matters(name)
    return write(name, whole, view, places, *rest, **options)


def check_order(name: str, whole: Tensor, expected: Tensor) -> None:
    """Refuse a write that has left other numbers than expected."""
    if not can_sync(whole) or not whole.is_floating_point() or not whole.numel():
        return
    size = expected.nan_to_num(0.0, 0.0, 0.0).abs().amax()  # what was never written may be anything
    differ = (whole - expected).abs() > torch.finfo(whole.dtype).eps ** 0.5 * size
    if bool((differ | (whole.isnan() != expected.isnan())).any()):
        raise order_matters(name)


def _fill(name: str, whole: Tensor, view: Tensor, places: Tensor, value: Any = 0.0, *rest: Any, **_: Any) -> Write:
    return put_alike, (places, _one_number(name, view, value, view.shape))


def _added(name: str, whole: Tensor, view: Tensor, places: Tensor, other: Any, *, alpha: float = 1) -> Write:
    factor = -alpha if name == "sub" else alpha
    other = factor * other if isinstance(other, Tensor) else torch.full_like(whole.reshape(-1)[:1], factor * other)
    return add_at, (places, other.expand(view.shape))


def _masked(name: str, whole: Tensor, view: Tensor, places: Tensor, mask: Tensor, value: Any) -> Write:
    hits = torch.zeros(whole.numel(), device=whole.device).index_add(
        0, places.reshape(-1), mask.expand(view.shape).reshape(-1).float()
    )
    function = torch.ops.aten.masked_fill.Tensor if isinstance(value, Tensor) else torch.ops.aten.masked_fill.Scalar
    return function, ((hits > 0).reshape(whole.shape), value)


def _indexed(
    name: str,
    whole: Tensor,
    view: Tensor,
    places: Tensor,
    indices: Any,
    values: Tensor,
    accumulate: bool = False,
    *_: Any,
) -> Write:
    return _written(name, view, torch.ops.aten.index.Tensor(places, indices), values, adds=accumulate)


def _write_along(
    name: str, whole: Tensor, view: Tensor, places: Tensor, dim: int, index: Tensor, source: Any, *, alpha: float = 1
) -> Write:
    source = alpha * source if name == "index_add" else source
    return _written(name, view, places.index_select(dim, index), source, adds=name == "index_add")


def _scattered(
    name: str, whole: Tensor, view: Tensor, places: Tensor, dim: int, index: Tensor, source: Any, **options: Any
) -> Write:
    if options:  # reduce=
        raise order_matters(name)
    if isinstance(source, Tensor):
        source = source[tuple(slice(size) for size in index.shape)]
    return _written(name, view, places.gather(dim, index), source, adds=name == "scatter_add")


_WRITES: dict[str, Callable[..., Write]] = {
    **dict.fromkeys(("fill", "zero", "copy"), _fill),
    **dict.fromkeys(("add", "sub"), _added),
    "masked_fill": _masked,
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _indexed),
    **dict.fromkeys(("index_add", "index_copy", "index_fill"), _write_along),
    **dict.fromkeys(("scatter", "scatter_add"), _scattered),
}


def _written(name: str, view: Tensor, places: Tensor, source: Any, *, adds: bool) -> Write:
    """Return the write of a source to places."""
    if adds:
        return add_at, (places, source.expand(places.shape))
    if not _is_one_number(source):
        if not can_sync(places) or len(places.unique()) < places.numel():
            raise order_matters(name)
        return put, (places, source.expand(places.shape))
    return put_alike, (places, _one_number(name, view, source, places.shape))


def _is_one_number(item: Any) -> bool:
    return not isinstance(item, Tensor) or item.numel() == 1


def _one_number(name: str, view: Tensor, value: Any, shape: Sequence[int]) -> Tensor:
    if not _is_one_number(value):
        raise order_matters(name)
    value = value if isinstance(value, Tensor) else torch.full((), value, dtype=view.dtype, device=view.device)
    return value.reshape(()).expand(shape)


def order_matters(name: str) -> NoClosedFormError:
    """Return the refusal of a write whose result depends on the order of writing."""
    return NoClosedFormError(
        f"{name} writes into a tensor of which several numbers share one place in memory, as in unfold or expand, so "
        "that what is left there depends on the order of writing",
        "write into a copy, x.clone(), or use the out-of-place version",
    )
