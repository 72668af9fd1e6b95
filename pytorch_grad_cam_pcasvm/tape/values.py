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
from pytorch_grad_cam_pcasvm.tape.tape import Ref, Step, Tape, has_gradient, memory_of, version_of

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
        self._exposed: list[tuple[Tensor, Tensor, int | None]] = []  # as they are, and as they were
        self._written: set[int] | None = None  # memories, by a call that is one step as a whole; None: there is none

    def depends(self, arguments: Any) -> bool:
        """Return whether any tensor among arguments depends on a target layer."""
        for tensor in tensors_in(arguments):
            alias = self._aliases.get(id(tensor))
            if alias is None:
                self._check_unknown(tensor)
            elif alias.value is not None or alias.memory in self._memories:
                return True
        return False

    def _check_unknown(self, tensor: Tensor) -> None:
        """Refuse a tensor that nothing is known of in memory that is known."""
        memory = memory_of(tensor)
        if memory in self._memories:
            raise unseen_write(self._memories[memory].by)  # type: ignore[index]
        if memory in self._sharing and type(tensor) not in _PLAIN and self._shares(tensor):
            raise NoClosedFormError(
                "the network makes another tensor of one on the path where that cannot be seen, as a Parameter or a "
                "tensor of another class",
                "use plain tensors there",
            )

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
        if alias is None:
            self._check_unknown(tensor)
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
        self._tensors.append(alias.tensor)
        self.tape.values.append(tensor if self._keeps_all else self._shape_of(tensor))
        if self._keeps_all:
            self._keep(index)
        return index

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
