"""The values of a tape, and the tensors that stand for them, whatever is written into the memory that they share."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.frames import module_around
from pytorch_grad_cam_pcasvm.tape.aliases import Alias, Memory
from pytorch_grad_cam_pcasvm.tape.operations import tensors_in
from pytorch_grad_cam_pcasvm.tape.tape import Ref, Step, Tape, has_gradient, mapped, memory_of, version_of

_PLAIN = (Tensor, FakeTensor)


class Values:
    """The values of a tape while it is recorded.

    Args:
        keeps_all: keep the numbers of all values, not only of those that rules read.

    Attributes:
        tape: the tape.
    """

    def __init__(self, *, keeps_all: bool) -> None:
        self.tape = Tape(complete=keeps_all)
        self._keeps_all = keeps_all
        self._aliases: dict[int, Alias] = {}  # by id of the tensor, which is its own while the tensor lives
        self._sharing: dict[int, set[int]] = {}  # ids of tensors, by their memory
        self._memories: dict[int, Memory] = {}  # what was written into
        self._kept: dict[int, list[int]] = {}  # values whose numbers are kept, by the memory that they lie in
        self._detached: set[int | None] = set()  # memories that were written through a detached alias
        self._constants: dict[int, list[Tensor]] = {}  # that steps use, by their memory
        self._tensors: list[Any] = []  # of each value, while it lives
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._dispatching = False  # whether an operation is running, whose outputs may still become views
        self._unmarked: list[Any] = []  # new values, and those that were made to require gradients
        self._marked: list[Any] = []
        self._exposed: list[tuple[Tensor, Tensor, int | None]] = []  # as they are, and as they were
        self._written: set[int] | None = None  # memories, by a call that is one step as a whole; None: there is none

    def depends(self, arguments: Any) -> bool:
        """Return whether any tensor among arguments depends on a target layer."""
        for tensor in tensors_in(arguments):
            alias = self._aliases.get(id(tensor))
            if alias is not None and (alias.value is not None or alias.memory in self._memories):
                return True
            self._check_constant(tensor, alias)
        return False

    def _check_constant(self, tensor: Tensor, alias: Alias | None) -> None:
        """Refuse a tensor of another thread that depends on the path; or unknown, but in memory that is known."""
        if tensor.grad_fn is not None and tensor.numel() and self._is_of_thread(tensor):
            raise other_thread(tensor.grad_fn.name())
        if alias is not None:
            return
        memory = memory_of(tensor)
        if memory in self._memories:
            raise unseen_write(self._memories[memory].by)  # type: ignore[index]
        if memory in self._sharing and type(tensor) not in _PLAIN and self._shares(tensor):
            raise NoClosedFormError(
                "the network makes another tensor of one on the path where that cannot be seen, as a Parameter or a "
                "tensor of another class",
                "use plain tensors there",
            )

    def _is_of_thread(self, tensor: Tensor) -> bool:
        """Return whether another thread made a tensor of values of the path.

        These are leaves that require gradients. This thread is below autograd and records no graph; others do.
        """
        nodes: list[Any] = [tensor.grad_fn]
        visited = set(nodes)
        for node in nodes:
            leaf = getattr(node, "variable", None)
            if leaf is not None and self._shares(leaf):
                return True
            following = {parent for parent, _ in node.next_functions if parent is not None} - visited
            visited |= following
            nodes.extend(following)
        return False

    def expose(self, arguments: Any) -> None:
        """Note that numbers are read, or may be written, where the dispatcher does not see it."""
        if self.tape.roots and self.depends(arguments):
            self.tape.branches = True
            for tensor in tensors_in(arguments):
                with self._alone():
                    self._exposed.append((tensor.detach(), tensor.clone(), memory_of(tensor)))

    def _is_smooth(self, arguments: Any) -> bool:
        """Return whether any of them has a gradient."""
        indices = list(map(self._current, tensors_in(arguments)))  # all: each may be made anew after a write
        return any(index is not None and index not in self.tape.switches for index in indices)

    def _current(self, tensor: Tensor) -> int | None:
        """Return the value that a tensor stands for, after all that was written into its memory."""
        alias = self._aliases.get(id(tensor))
        if alias is None or (alias.value is None and alias.memory not in self._memories):
            self._check_constant(tensor, alias)
            return None
        written = self._memories.get(alias.memory) if alias.memory is not None else None
        if alias.value is not None and alias.writes is None:
            alias.writes = version_of(tensor)
        elif alias.value is not None and version_of(tensor) != alias.writes:
            raise unseen_write("something that cannot be seen, as an autograd.Function that marks its argument dirty,")
        if written is None or alias.version == written.version:
            return alias.value
        if alias.view is None and alias.memory in self._detached:
            raise hidden_write(f"{written.by}, through .data or a detached alias,")
        if alias.view is None:
            raise unseen_write(written.by)
        parent, view = self._current(alias.view.parent), alias.view
        if parent is None:
            alias.value, alias.version = None, written.version
            return None
        smooth = not view.switch and parent not in self.tape.switches
        with self._alone():
            index = self._value(tensor, smooth=smooth and has_gradient(tensor))
            self._add(Step(view.function, (Ref(parent), *view.args), view.kwargs, (parent,), (index,), True, False))
        return index

    def _alias(self, tensor: Tensor) -> Alias:
        """Return what is known of a tensor; from now on something is."""
        identity = id(tensor)
        alias = self._aliases.get(identity)
        if alias is None:
            memory = memory_of(tensor)

            def forget(_: Any) -> None:  # its id, and that of its memory, may become another's
                self._aliases.pop(identity, None)
                if memory is not None:
                    self._sharing.get(memory, set()).discard(identity)

            alias = self._aliases[identity] = Alias(ref(tensor, forget), memory)
            if memory is not None:
                self._sharing.setdefault(memory, set()).add(identity)
                if memory in self._memories:
                    alias.version = self._memories[memory].version
        return alias

    def _value(self, tensor: Tensor, *, smooth: bool) -> int:
        """Return the position of a new value, which a tensor stands for from now on."""
        if tensor.is_nested:
            raise NoClosedFormError("the path goes through a nested tensor", "pad its parts to one shape")
        index, alias = len(self.tape.values), self._alias(tensor)
        alias.value, alias.writes = index, version_of(tensor)
        if alias.memory in self._memories:
            alias.version = self._memories[alias.memory].version
        if not smooth:
            self.tape.switches.add(index)
        else:
            self._unmarked.append(alias.tensor)
        self._tensors.append(alias.tensor)
        self.tape.values.append(tensor if self._keeps_all else self._shape_of(tensor))
        if self._keeps_all:
            self._keep(index)
        return index

    def mark(self) -> None:
        """Make new values require gradients: who asks is told so, and what other threads make of them has a graph.

        It is done behind the call that returned them, which may still make them views.
        """
        if self._dispatching or torch._C._are_functorch_transforms_active():
            return
        unmarked, self._unmarked = self._unmarked, []
        with torch._C.DisableTorchFunction():
            for reference in unmarked:
                tensor = reference()
                if tensor is None or tensor.is_inference() or not tensor.is_leaf:
                    continue
                if not tensor.requires_grad or tensor._is_view():  # a view may say so of its base alone
                    tensor.requires_grad = True
                    self._marked.append(reference)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on arguments that require no gradients, for which torch may have other kernels."""
        unmarked: dict[int, Tensor] = {}

        def plain(item: Any) -> Any:
            alias = self._aliases.get(id(item)) if isinstance(item, Tensor) and item.requires_grad else None
            if alias is None or alias.value is None:
                return item
            copy = item.detach()
            unmarked[id(copy)] = item  # which the operation may give back
            return copy

        result = func(*mapped(tuple(args), plain), **{name: mapped(item, plain) for name, item in kwargs.items()})
        return mapped(result, lambda item: unmarked.get(id(item), item)) if unmarked else result

    def _unmark(self) -> None:
        """Let values that the network keeps be as they were."""
        with torch._C.DisableTorchFunction():
            for reference in self._marked:
                tensor = reference()
                if tensor is not None and tensor.is_leaf:
                    tensor.requires_grad = False
        self._marked.clear()

    def _shape_of(self, tensor: Tensor) -> Tensor:
        """Return the shape of a tensor in no memory."""
        key = tensor.dtype, tensor.device
        if key not in self._nothing:
            self._nothing[key] = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
            if has_gradient(tensor):
                self._nothing[key].fill_(torch.nan)
        return self._nothing[key].expand(tensor.shape)

    def _keep(self, index: int) -> None:
        """Keep the numbers of a value, which its tensor has now."""
        tensor = self._tensors[index]()
        if tensor is not None and index not in self.tape.kept:
            self.tape.kept.add(index)
            self.tape.values[index] = tensor.detach()
            memory = memory_of(tensor)
            if memory is not None:
                self._kept.setdefault(memory, []).append(index)

    def _add(self, step: Step) -> None:
        step.where = module_around(sys._getframe(2))
        self.tape.steps.append(step)

    def _shares(self, tensor: Tensor) -> bool:
        """Return whether a constant shares its memory with what depends on a target layer."""
        memory = memory_of(tensor)
        others = () if memory is None else self._sharing.get(memory, ())
        return any(self._aliases[other].value is not None for other in others)

    def _before_write(self, tensor: Tensor) -> None:
        """Keep copies of what is going to be written over."""
        memory = memory_of(tensor)
        if memory is not None:
            for index in self._kept.pop(memory, ()):
                self.tape.values[index] = self.tape.values[index].clone()
            if self._written is not None:
                self._written.add(memory)
                return
            for constant in self._constants.pop(memory, ()):
                self.tape.copy_constant(constant)

    def _bump(self, memory: int, by: str) -> None:
        """Count a write into memory that values of the tape lie in."""
        if memory in self._memories:
            self._memories[memory].version += 1
            return
        tensors = (self._aliases[other].tensor() for other in self._sharing.get(memory, ()))
        tensor = next((tensor for tensor in tensors if tensor is not None), None)
        if tensor is not None:
            self._memories[memory] = Memory(tensor.untyped_storage(), by, 1)

    def _recount(self, tensor: Tensor) -> None:
        """Read the count of writes anew: torch counts a write when it is over."""
        for other in self._sharing.get(memory_of(tensor), {id(tensor)}):  # type: ignore[arg-type]
            if other in self._aliases:
                self._aliases[other].writes = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Record nothing."""
        before, self._written = self._written, set()
        try:
            yield
        finally:
            self._written = before


def other_thread(operation: str) -> NoClosedFormError:
    """Return the refusal of what another thread computes on the path."""
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
