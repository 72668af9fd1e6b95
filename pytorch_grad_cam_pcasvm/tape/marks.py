"""Marks: values of a tape require gradients, for whoever asks, though there is no graph of them."""

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.tape.aliases import Alias
from pytorch_grad_cam_pcasvm.tape.step import mapped


class Marks:
    """Lets new values require gradients: code that asks is told so, and results of other threads have a graph."""

    def __init__(self) -> None:
        self._new: list[ref[Tensor]] = []
        self._marked: list[ref[Tensor]] = []

    def add(self, tensor: Any) -> None:
        """Note the reference to a new value."""
        self._new.append(tensor)

    def set(self) -> None:
        """Mark the new values, behind the call that returned them, which may have made them views."""
        new, self._new = self._new, []
        with torch._C.DisableTorchFunction():
            for tensor in _alive(new):
                if tensor.is_inference() or not tensor.is_leaf:
                    continue
                if not tensor.requires_grad or tensor._is_view():  # a view may say so of its base alone
                    tensor.requires_grad = True
                    self._marked.append(ref(tensor))

    def clear(self) -> None:
        """Let values that the network keeps be as they were."""
        with torch._C.DisableTorchFunction():
            for tensor in _alive(self._marked):
                if tensor.is_leaf:
                    tensor.requires_grad = False
        self._marked.clear()


def _alive(references: Iterable[Any]) -> Iterable[Tensor]:
    return (tensor for reference in references if (tensor := reference()) is not None)


def run_unmarked(func: Any, args: Any, kwargs: Any, aliases: Mapping[int, Alias]) -> Any:
    """Run an operation on arguments that require no gradients, for which torch may have other kernels."""
    unmarked: dict[int, Tensor] = {}

    def plain(item: Any) -> Any:
        alias = aliases.get(id(item)) if isinstance(item, Tensor) and item.requires_grad else None
        if alias is None or alias.value is None:
            return item
        copy = item.detach()
        unmarked[id(copy)] = item  # which the operation may give back
        return copy

    result = func(*mapped(tuple(args), plain), **{name: mapped(item, plain) for name, item in kwargs.items()})
    return mapped(result, lambda item: unmarked.get(id(item), item)) if unmarked else result
