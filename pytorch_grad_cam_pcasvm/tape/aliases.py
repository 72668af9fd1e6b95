"""Tensors that share memory: a write through one is a write to all, as values of a tape are written and read again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.indexing import put
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError, refuse
from pytorch_grad_cam_pcasvm.runtime.torch_private import OpOverload
from pytorch_grad_cam_pcasvm.tape.step import plain

aten = torch.ops.aten


@dataclass(frozen=True)
class View:
    """How a tensor is a view of another.

    Attributes:
        parent: the other tensor.
        function: the operation that gives one view of it.
        args: its arguments behind the parent.
        kwargs: its keyword arguments.
        switch: whether no gradient flows through it, as through ``detach``.
    """

    parent: Tensor
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    switch: bool

    def written_back(self, parent: Any, value: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the operation that gives the parent after a write of a value into the view, and its arguments."""
        name = self.function.overloadpacket.__name__ if isinstance(self.function, OpOverload) else ""
        if name in ("slice", "select"):
            scatter = aten.slice_scatter.default if name == "slice" else aten.select_scatter.default
            return scatter, (parent, value, *self.args)
        if name in _SAME_ORDER:
            return aten.reshape.default, (value, list(self.parent.shape))
        dims = range(self.parent.dim())
        if name in _PERMUTING:
            numbers = self.function(torch.empty([1 + dim for dim in dims], device="meta"), *self.args, **self.kwargs)
            return aten.permute.default, (value, [size - 1 for size in _inverse(numbers.shape)])
        return put, (parent, self.places, value)

    @property
    def places(self) -> Tensor:
        """The places of its numbers in the parent, counted from the beginning of that."""
        name = self.function.overloadpacket.__name__ if isinstance(self.function, OpOverload) else ""
        if name in _OTHER_NUMBERS:
            refuse(NoClosedFormError, f"{name} of a tensor is written into", "write the real and imaginary parts apart")
        numbers = torch.arange(self.parent.numel(), device=self.parent.device).reshape(self.parent.shape)
        return self.function(numbers, *self.args, **self.kwargs)

    def through(self, inner: "View") -> "View":
        """Return how a view of this one is a view of its parent."""

        def both(x: Any, *_: Any) -> Any:
            return inner.function(self.function(x, *self.args, **self.kwargs), *inner.args, **inner.kwargs)

        return View(self.parent, both, (), {}, self.switch or inner.switch)


def overlaps(tensor: Tensor) -> bool:
    """Return whether numbers of a tensor may share one place in memory, as after ``expand`` and ``unfold``."""
    reach = 0  # of the dimensions with smaller strides; no number is looked at, which may be a symbol's
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), key=lambda dim: dim[0]):
        if size != 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _inverse(sizes: Any) -> list[int]:
    return [1 + list(sizes).index(1 + dim) for dim in range(len(sizes))]


_SAME_ORDER = {
    *("reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "ravel", "alias", "detach", "contiguous", "to"),
    *("_reshape_alias", "lift_fresh"),
}
_OTHER_NUMBERS = {"view", "view_as_real", "view_as_complex", "real", "imag", "_conj", "_neg_view"}
_PERMUTING = {"permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT", "matrix_H"}


@dataclass
class Alias:
    """A tensor that may share its memory.

    Attributes:
        tensor: returns it, or None after its end.
        memory: what those that share memory have in common, or None.
        value: its position on the tape; None: a constant.
        version: of the memory, when it had this value.
        writes: torch's own count of writes into it, all of which were seen; None: to be read.
        view: how it is a view of another; None: it is none.
    """

    tensor: Callable[[], Tensor | None]
    memory: int | None
    value: int | None = None
    version: int = 0
    writes: int | None = None
    view: View | None = None


@dataclass
class Memory:
    """Memory that values of the tape were written into.

    Attributes:
        storage: itself, held so that no other tensor gets it.
        by: the name of what wrote into it.
        version: the count of writes.
    """

    storage: torch.UntypedStorage
    by: str
    version: int = 0


def find_views(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parent: Tensor, outputs: list[Any], *, switch: bool
) -> list[View | None]:
    """Return how each output of an operation is a view of one of its arguments; None for an output that is none."""
    function, args = plain(function, args)
    name = getattr(function, "overloadpacket", function).__name__
    place = next((number for number, item in enumerate(args) if item is parent), -1)
    if place or not outputs:
        return [None] * len(outputs)
    if name == "unbind":
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return [View(parent, aten.select.int, (dim, number), {}, switch) for number in range(len(outputs))]
    if name in ("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"):
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        start, views = 0, list[View | None]()
        for output in outputs:
            views.append(View(parent, aten.slice.Tensor, (dim, start, start + output.shape[dim]), {}, switch))
            start += output.shape[dim]
        return views
    return [View(parent, function, args[1:], kwargs, switch)] if len(outputs) == 1 else [None] * len(outputs)
