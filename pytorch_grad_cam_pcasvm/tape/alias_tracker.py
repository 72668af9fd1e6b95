"""The alias tracker: which tensors stand for which values of a tape, whatever is written into the memory they share."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    FakeTensor,
    OpOverload,
    is_in_functorch,
    without_function_modes,
)
from pytorch_grad_cam_pcasvm.tape.aliases import Alias, Memory, find_views
from pytorch_grad_cam_pcasvm.tape.step import Ref, Step, list_tensors, mapped, module_around
from pytorch_grad_cam_pcasvm.tape.tape import Tape, count_writes, has_gradient, identify_memory

_PLAIN = (Tensor, FakeTensor)


class AliasTracker:
    """Knows which value of a tape each tensor stands for while the tape is recorded.

    Args:
        keeps_all: keep the numbers of all values, not only of those that rules read.

    Attributes:
        tape: the tape.
        aliases: what is known of tensors, by their ids.
        sharing: ids of tensors, by their memory.
        memories: what was written into.
        detached: memories that were written through a detached alias.
        dispatching: whether an operation is running, whose outputs may still become views.
        written: memories that a call has written into that is one step as a whole; None: there is none.
    """

    def __init__(self, *, keeps_all: bool) -> None:
        self.tape = Tape(complete=keeps_all)
        self._keeps_all = keeps_all
        self.aliases: dict[int, Alias] = {}  # by id of the tensor, which is its own while the tensor lives
        self.sharing: dict[int, set[int]] = {}  # ids of tensors, by their memory
        self.memories: dict[int, Memory] = {}  # what was written into
        self._kept: dict[int, list[int]] = {}  # values whose numbers are kept, by the memory that they lie in
        self.detached: set[int | None] = set()  # memories that were written through a detached alias
        self._constants: dict[int, list[Tensor]] = {}  # that steps use, by their memory
        self._tensors: list[Any] = []  # of each value, while it lives
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.dispatching = False  # whether an operation is running, whose outputs may still become views
        self._marks = Marks()
        self._exposed: list[tuple[Tensor, Tensor, int | None]] = []  # as they are, and as they were
        self.written: set[int] | None = None  # memories, by a call that is one step as a whole; None: there is none

    def depends(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether any of some tensors depends on a target layer."""
        for tensor in tensors:
            alias = self.aliases.get(id(tensor))
            if alias is not None and (alias.value is not None or alias.memory in self.memories):
                return True
            self._check_constant(tensor, alias)
        return False

    def _check_constant(self, tensor: Tensor, alias: Alias | None) -> None:
        """Refuse a tensor of another thread that depends on the path; or unknown, but in memory that is known."""
        if tensor.grad_fn is not None and tensor.numel() and any(map(self.shares_memory, _leaves(tensor))):
            # Another thread made it of values, which are such leaves: this one is below autograd, and records no graph.
            raise other_thread(tensor.grad_fn.name())
        if alias is not None:
            return
        memory = identify_memory(tensor)
        if memory in self.memories:
            raise unseen_write(self.memories[memory].by)
        if memory in self.sharing and type(tensor) not in _PLAIN and self.shares_memory(tensor):
            raise NoClosedFormError(
                "the network makes another tensor of one on the path where that cannot be seen, as a Parameter or a "
                "tensor of another class",
                "use plain tensors there",
            )

    def keep_constant(self, tensor: Tensor, memory: int | None) -> None:
        """Remember a constant that a step uses, lest it be written into."""
        self.tape.constants.append((tensor, count_writes(tensor), memory))
        if memory is not None:
            self._constants.setdefault(memory, []).append(tensor)

    def expose(self, arguments: Any) -> None:
        """Note that numbers are read, or may be written, where the dispatcher does not see it."""
        tensors = list_tensors(arguments) if self.tape.roots else []
        if self.depends(tensors):
            self.tape.branches = True
            for tensor in tensors:
                with self.paused():
                    self._exposed.append((tensor.detach(), tensor.clone(), identify_memory(tensor)))

    def check_exposed(self) -> None:
        """Refuse unseen writes into exposed memory."""
        for tensor, before, memory in self._exposed:
            if memory not in self.memories and not torch.equal(tensor, before):
                raise hidden_write("something that cannot be seen")

    def is_smooth(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether any of them has a gradient."""
        indices = list(map(self.find_value, tensors))  # all: each may be made anew after a write
        return any(index is not None and index not in self.tape.switches for index in indices)

    def find_value(self, tensor: Tensor) -> int | None:
        """Return the value that a tensor stands for, after all that was written into its memory."""
        alias = self.aliases.get(id(tensor))
        if alias is None or (alias.value is None and alias.memory not in self.memories):
            self._check_constant(tensor, alias)
            return None
        written = self.memories.get(alias.memory) if alias.memory is not None else None
        if alias.value is not None and alias.writes is None:
            alias.writes = count_writes(tensor)
        elif alias.value is not None and count_writes(tensor) != alias.writes:
            raise unseen_write("something that cannot be seen, as an autograd.Function that marks its argument dirty,")
        if written is None or alias.version == written.version:
            return alias.value
        if alias.view is None and alias.memory in self.detached:
            raise hidden_write(f"{written.by}, through .data or a detached alias,")
        if alias.view is None:
            raise unseen_write(written.by)
        parent, view = self.find_value(alias.view.parent), alias.view
        if parent is None:
            alias.value, alias.version = None, written.version
            return None
        smooth = not view.switch and parent not in self.tape.switches
        with self.paused():
            index = self.add_value(tensor, smooth=smooth and has_gradient(tensor))
            self.add_step(Step(view.function, (Ref(parent), *view.args), view.kwargs, (parent,), (index,)))
        return index

    def track(self, tensor: Tensor) -> Alias:
        """Return the alias of a tensor, which is tracked from now on."""
        identity = id(tensor)
        alias = self.aliases.get(identity)
        if alias is None:
            memory = identify_memory(tensor)

            def forget(_: Any) -> None:  # its id, and that of its memory, may become another's
                self.aliases.pop(identity, None)
                if memory is not None:
                    self.sharing.get(memory, set()).discard(identity)

            alias = self.aliases[identity] = Alias(ref(tensor, forget), memory)
            if memory is not None:
                self.sharing.setdefault(memory, set()).add(identity)
                if memory in self.memories:
                    alias.version = self.memories[memory].version
        return alias

    def add_value(self, tensor: Tensor, *, smooth: bool, keep: bool = False) -> int:
        """Return the position of a new value, which a tensor stands for from now on; ``keep``: with its numbers."""
        if tensor.is_nested:
            raise NoClosedFormError("the path goes through a nested tensor", "pad its parts to one shape")
        index, alias = len(self.tape.values), self.track(tensor)
        alias.value, alias.writes = index, count_writes(tensor)
        if alias.memory in self.memories:
            alias.version = self.memories[alias.memory].version
        if not smooth:
            self.tape.switches.add(index)
        else:
            self._marks.remember(alias.tensor)
        self._tensors.append(alias.tensor)
        keep = keep or self._keeps_all
        self.tape.values.append(tensor if keep else self._empty_like(tensor))
        if keep:
            self.keep_numbers(index)
        return index

    def copy_tensor(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that stands for the same value, whatever is written into the tensor later."""
        with self.paused():
            value, copy = self.find_value(tensor), tensor.clone()
            if value is not None:
                alias = self.track(copy)
                alias.value, self._tensors[value] = value, alias.tensor
        return copy

    def mark(self) -> None:
        """Make new values require gradients, where no operation is running that may still make them views."""
        if not self.dispatching and not is_in_functorch():
            self._marks.set()

    def unmark(self) -> None:
        """Let values require no gradients until the next are marked."""
        self._marks.lift()

    def clear(self) -> None:
        """Forget the tensors of the pass; tensors that the network keeps are as they were."""
        self._marks.clear()
        self.aliases.clear()
        self._constants.clear()
        self._exposed.clear()
        self._tensors.clear()

    def _empty_like(self, tensor: Tensor) -> Tensor:
        """Return the shape of a tensor in no memory."""
        key = tensor.dtype, tensor.device
        if key not in self._nothing:
            self._nothing[key] = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
            if has_gradient(tensor):
                self._nothing[key].fill_(torch.nan)
        return self._nothing[key].expand(tensor.shape)

    def keep_numbers(self, index: int) -> None:
        """Keep the numbers of a value, which its tensor has now."""
        tensor = self._tensors[index]()
        if tensor is not None and index not in self.tape.stored_values:
            self.tape.stored_values.add(index)
            self.tape.values[index] = tensor.detach()
            memory = identify_memory(tensor)
            if memory is not None:
                self._kept.setdefault(memory, []).append(index)

    def add_step(self, step: Step) -> None:
        """Append a step to the tape, with the module that it was called in."""
        step.where = module_around(sys._getframe(2))
        self.tape.steps.append(step)

    def shares_memory(self, tensor: Tensor) -> bool:
        """Return whether a constant shares its memory with a tensor that depends on a target layer."""
        memory = identify_memory(tensor)
        sharing = () if memory is None else self.sharing.get(memory, ())
        return any(self.aliases[other].value is not None for other in sharing)

    def save_before_write(self, tensor: Tensor) -> None:
        """Keep copies of numbers that are about to be written over."""
        memory = identify_memory(tensor)
        if memory is not None:
            for index in self._kept.pop(memory, ()):
                self.tape.values[index] = self.tape.values[index].clone()
            if self.written is not None:
                self.written.add(memory)
                return
            for constant in self._constants.pop(memory, ()):
                self.tape.copy_constant(constant)

    def count_write(self, memory: int, by: str) -> None:
        """Count a write into memory that values of the tape lie in."""
        if memory in self.memories:
            self.memories[memory].version += 1
            return
        tensors = (self.aliases[other].tensor() for other in self.sharing.get(memory, ()))
        tensor = next((tensor for tensor in tensors if tensor is not None), None)
        if tensor is not None:
            with without_function_modes():
                self.memories[memory] = Memory(tensor.untyped_storage(), by, 1)

    def reread_versions(self, tensor: Tensor) -> None:
        """Read the count of writes anew: torch counts a write when it is over."""
        for other in self.sharing.get(identify_memory(tensor), {id(tensor)}):  # type: ignore[arg-type]
            if other in self.aliases:
                self.aliases[other].writes = None

    def track_views(self, func: Any, args: Any, kwargs: Any, result: Any, *, switch: bool) -> None:
        """Note which outputs of an operation are views of one of its arguments."""
        outputs = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, list | tuple) else []
        outputs = [output for output in outputs if isinstance(output, Tensor)]
        memory = identify_memory(outputs[0]) if outputs else None
        if not isinstance(func, OpOverload):
            return
        parent = None if memory is None else next((x for x in list_tensors(args) if identify_memory(x) == memory), None)
        if parent is None or any(parent is output for output in outputs):
            return
        self.track(parent)
        for output, view in zip(outputs, find_views(func, args, kwargs, parent, outputs, switch=switch), strict=True):
            alias = self.track(output)
            alias.view, alias.writes = view, None  # torch lets a view share the count when this is over

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing."""
        before, self.written = self.written, set()
        try:
            yield
        finally:
            self.written = before


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of the graph of a tensor."""
    nodes: list[Any] = [tensor.grad_fn]
    visited = set(nodes)
    for node in nodes:
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        following = {parent for parent, _ in node.next_functions if parent is not None} - visited
        visited |= following
        nodes.extend(following)


def other_thread(operation: str) -> NoClosedFormError:
    """Return the refusal of a computation on the path by another thread."""
    return NoClosedFormError(
        f"another thread computes on the path ({operation}), where it cannot be seen",
        "compute it in the thread that calls the network",
        "choose a later target layer",
    )


def gradient_hook(reason: str) -> NoClosedFormError:
    """Return the refusal of a hook that may change gradients."""
    return NoClosedFormError(f"{reason}, which may change gradients unseen", "remove the hook")


def unseen_write(by: str) -> NoClosedFormError:
    """Return the refusal of a write that a tape cannot follow."""
    return NoClosedFormError(
        f"{by} works in place on a tensor that the path uses again, or of which it uses another view",
        "use the out-of-place version, as in x = torch.relu(x)",
    )


def hidden_write(by: str) -> NoClosedFormError:
    """Return the refusal of a write of which autograd knows nothing, either: its gradient would be wrong."""
    error = unseen_write(by)
    error._autograd_helps = False
    return error


class Marks:
    """Lets new values require gradients: code that asks is told so, and results of other threads have a graph."""

    def __init__(self) -> None:
        self._new: list[ref[Tensor]] = []
        self._marked: list[ref[Tensor]] = []

    def remember(self, tensor: Any) -> None:
        """Note the reference to a new value."""
        self._new.append(tensor)

    def set(self) -> None:
        """Mark the new values, behind the call that returned them, which may have made them views."""
        new, self._new = self._new, []
        with without_function_modes():
            for tensor in _alive(new):
                if tensor.is_inference() or not tensor.is_leaf:
                    continue
                if not tensor.requires_grad or tensor._is_view():  # a view may say so of its base alone
                    tensor.requires_grad = True
                    self._marked.append(ref(tensor))

    def lift(self) -> None:
        """Take all marks away until the next are set; keywords of a call are not seen before it."""
        marked, self._marked = self._marked, []
        with without_function_modes():
            for tensor in _alive(marked):
                if tensor.is_leaf:
                    tensor.requires_grad = False
                    self._new.append(ref(tensor))
                else:
                    self._marked.append(ref(tensor))

    def clear(self) -> None:
        """Let values that the network keeps be as they were."""
        with without_function_modes():
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
