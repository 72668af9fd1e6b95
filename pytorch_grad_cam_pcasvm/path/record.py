"""The tape: what the network itself computes between its target layers and the features, noted while it runs.

A hook on the first target layer that runs switches on a :class:`Recorder`, a ``TorchFunctionMode`` that sees every
call of a torch function or method in this thread. It notes those with an argument that depends on a target layer's
output, so that the tape is a straight-line program on real tensors of real sizes. Everything else is a constant of this
call: the stem, weights, and what goes around a target layer.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.path.hooks import hooked
from pytorch_grad_cam_pcasvm.path.modes import Regions
from pytorch_grad_cam_pcasvm.rules.registry import CONSTANTS, has_layers, layer_kind


@dataclass(frozen=True)
class Ref:
    """Stands for a value of the tape in the arguments of a step."""

    index: int


@dataclass(frozen=True)
class Step:
    """One call that was noted.

    Attributes:
        function: a torch function or tensor method, or the registered class of a layer.
        args: its arguments, a :class:`Ref` for every value of the tape; of a layer, itself and what it was called with.
        kwargs: its keyword arguments, likewise.
        inputs: the values of the tape among the arguments.
        outputs: the values that it gave; None for an output that is no floating-point tensor.
        single: whether it gave one tensor, not several.
        inplace: whether it wrote into its first argument.
        where: dotted name of the module that called it, where that was asked for.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    single: bool
    inplace: bool
    where: str | None = None

    @property
    def name(self) -> str:
        """Name of the function, or of the layer's class."""
        name = getattr(self.function, "__name__", str(self.function))
        return self.function.__self__.__name__ if name == "__get__" else name  # a property, as .imag


@dataclass
class Tape:
    """The steps of one forward pass, and the values between them.

    Attributes:
        steps: in the order of their calls.
        values: tensors that depend on a target layer, as the steps saw them, also if something wrote over them later.
        roots: value of each target layer's output, by dotted name.
        output: what the network, or its feature layer, gave.
        outputs: position of each tensor of the output among the values; None where it depends on no target layer.
    """

    steps: list[Step] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    roots: dict[str, int] = field(default_factory=dict)
    output: Any = None
    outputs: list[int | None] = field(default_factory=list)
    _constants: list[tuple[Tensor, int | None]] = field(default_factory=list)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What was called on what: equal for passes that take the same steps."""
        return tuple((step.function, step.inputs, step.outputs) for step in self.steps), tuple(self.outputs)

    def following(self, root: int) -> tuple[list[Step], set[int]]:
        """Return the steps that depend on a value, and the values that do, with itself."""
        values, steps = {root}, []
        for step in self.steps:
            if root not in step.outputs and not values.isdisjoint(step.inputs):
                steps.append(step)
                values.update(output for output in step.outputs if output is not None)
        return steps, values

    def leads(self, name: str) -> bool:
        """Return whether a target layer leads to the output."""
        values = self.following(self.roots[name])[1]
        return any(output in values for output in self.outputs)

    def resolved(self, arguments: Any, values: Mapping[int, Tensor] | None = None) -> Any:
        """Return the arguments of a step with tensors, those of ``values`` first, in place of their Refs."""

        def value(item: Any) -> Any:
            if not isinstance(item, Ref):
                return item
            return self.values[item.index] if values is None else values.get(item.index, self.values[item.index])

        return _mapped(arguments, value)

    def check_constants(self) -> None:
        """Refuse a tensor that a step used and that something changed in place afterwards."""
        for tensor, version in self._constants:
            if _version(tensor) != version:
                raise NoClosedFormError(
                    f"a tensor of shape {tuple(tensor.shape)} was written into after the path had used it",
                    "write it without in-place, as in x = x + 1",
                )

    def replay(self, name: str, activations: Tensor) -> list[Tensor]:
        """Run the path again from other activations (M, ...), in blocks of the recorded batch size: its output."""
        root = self.roots[name]
        recorded = self.values[root]
        rows = len(recorded)
        missing = -len(activations) % rows
        padded = torch.cat([activations, recorded[:missing].to(activations)]) if missing else activations
        blocks = [self._replayed(root, block) for block in padded.split(rows)]
        return [torch.cat(parts)[: len(activations)] for parts in zip(*blocks, strict=True)]

    def _replayed(self, root: int, activations: Tensor) -> list[Tensor]:
        values = {root: activations}
        for step in self.following(root)[0]:
            args, kwargs = self.resolved(step.args, values), self.resolved(step.kwargs, values)
            if step.inplace:
                args = (args[0].clone(), *args[1:])
            layer = isinstance(step.function, type)
            result = args[0](*args[1:], **kwargs) if layer else step.function(*args, **kwargs)
            result = args[0] if step.inplace else result
            for output, tensor in zip(step.outputs, [result] if step.single else result, strict=True):
                if output is not None:
                    values[output] = tensor
        recorded = [leaf for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor)]
        return [
            tensor if output is None else values.get(output, tensor)
            for output, tensor in zip(self.outputs, recorded, strict=True)
        ]


class Recorder(TorchFunctionMode):
    """Notes the calls that depend on the target layers; if ``named``, with the modules that made them, for messages."""

    def __init__(self, *, named: bool = False) -> None:
        super().__init__()
        self.tape = Tape()
        self.named = named
        self._index: dict[int, int] = {}  # of the tensor object that stands for a value
        self._alive: list[Tensor] = []  # an id is a tensor's own only while the tensor lives
        self._versions: list[int | None] = []
        self._storages: dict[int, list[int]] = {}
        self._overwritten: dict[int, str] = {}
        self._written: dict[int, str] = {}  # storages, by what wrote values of the tape into them
        self.regions = Regions()
        self._entered = False
        self._layers: list[tuple[Any, ...] | None] = []  # registered layers that are running
        self._modules: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, and note it if it depends on a target layer."""
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            self.regions.switch(args[0], sys._getframe(1))
        if self._layers or self.regions.off or not (self._depends(args) or (kwargs and self._depends(kwargs.values()))):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        with torch._C.DisableTorchFunction():  # other modes are not to see what is asked here
            noted = self._noted(func, args, kwargs, written)
        result = func(*args, **kwargs)
        if func not in CONSTANTS:
            with torch._C.DisableTorchFunction():
                self._note(noted, result if written is None else written)
        return result

    def root(self, name: str, output: Tensor, following: Tensor | None = None) -> Tensor:
        """Begin at the output of a target layer, or add one; return what stands for it in what follows, an alias."""
        if self._layers:
            raise NoClosedFormError(
                f"the target layer {name!r} is inside a layer with a registered rule", "choose that layer itself"
            )
        with torch._C.DisableTorchFunction():
            # A layer may give its input back, which is another value where it is used besides.
            alias = output.detach() if following is None else following
            index = self._value(alias)
            if id(output) in self._index:
                source = self._current(output)
                self.tape.steps.append(Step(torch.clone, (Ref(source),), {}, (source,), (index,), True, False))
        self.tape.roots[name] = index
        if not self._entered:
            self.regions.begin()
            self.__enter__()
            self._entered = True
        return alias

    def finish(self, output: Any) -> Tape:
        """Return the tape of a pass that gave ``output``."""
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            by = self._overwritten.get(id(leaf), self._written.get(_storage(leaf)))
            if by is not None and id(leaf) not in self._index:
                raise _unseen_write(by)
        for index in (index for indices in self._storages.values() for index in indices):
            if self._versions[index] != _version(self._alive[index]):
                raise _unseen_write("something that cannot be seen")
        self.tape.outputs = [self._current(leaf) if id(leaf) in self._index else None for leaf in leaves]
        self.tape.output = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
        return self.tape

    def stop(self) -> None:
        """Switch the mode off."""
        # A mode of the network's that ends behind the target layer takes ours for itself: calls may have been missed.
        if self._entered and torch.overrides._get_current_function_mode() is not self:
            raise NoClosedFormError(
                "the network leaves a TorchFunctionMode between the target layer and the features",
                "enter it around the whole network",
            )
        if self._entered:
            self.__exit__(None, None, None)
        self._entered = False

    @contextmanager
    def watching(self, backbone: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Note the layers that have rules of their own as one step each; keep track of names if asked."""
        with hooked() as hook:
            if any(issubclass(kind, torch.jit.ScriptModule) for kind in set(map(type, modules))):
                hook.before_scripted(self._refuse_scripted)
            if has_layers():
                for module in modules:
                    if layer_kind(module) is not None:
                        hook.before(module, self._enter_layer)
                        # First of all: the user's own hooks on the layer are steps of their own.
                        hook.after(module, self._leave_layer, prepend=True)
            if self.named:
                for name, module in backbone.named_modules():
                    if isinstance(module, torch.jit.ScriptModule):
                        continue  # it takes no hooks, and calls nothing that can be seen
                    hook.before(module, lambda module, args, kwargs, name=name: self._modules.append(name))
                    hook.after(module, lambda module, args, kwargs, output: self._modules.__delitem__(-1))
            yield

    def _refuse_scripted(self, module: Any, args: Any) -> None:
        if self._entered and not self._layers and not self.regions.off and self._depends(args):
            raise NoClosedFormError(
                f"between the target layer and the features is a scripted module, {module.original_name}, whose steps "
                "cannot be seen",
                "use the module that was scripted",
                "pass jacobian='auto' to use autograd on the path",
            )

    def _enter_layer(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        depends = self._entered and (self._depends(args) or self._depends(kwargs.values()))
        if self._layers or not depends:
            self._layers += [None] if self._layers else []
            return
        written = args[0] if getattr(module, "inplace", False) and args else None
        x = args[0] if len(args) == 1 else args
        with torch._C.DisableTorchFunction():
            self._layers.append(self._noted(layer_kind(module), (module, x), kwargs, written))

    def _leave_layer(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._layers:
            return
        noted = self._layers.pop()
        if noted is not None:
            with torch._C.DisableTorchFunction():
                self._note(noted, output)

    def _depends(self, arguments: Any) -> bool:
        for argument in arguments:
            if isinstance(argument, Tensor):
                if id(argument) in self._index or id(argument) in self._overwritten:
                    return True
                if self._written and _storage(argument) in self._written:
                    return True
            elif isinstance(argument, list | tuple) and self._depends(argument):
                return True
        return False

    def _current(self, tensor: Tensor) -> int:
        """Return the value that a tensor stands for; refuse one that was written over behind the tape's back."""
        index = self._index[id(tensor)]
        if self._versions[index] != _version(tensor):
            raise _unseen_write("something that cannot be seen")
        return index

    def _noted(self, function: Any, args: Any, kwargs: Any, written: Any) -> tuple[Any, ...]:
        """Return what is to be noted of a call, before it runs and writes into anything."""
        inputs: list[int] = []

        def ref(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            if id(item) in self._overwritten:
                raise _unseen_write(self._overwritten[id(item)])
            if id(item) not in self._index:
                if item is written:
                    return item.clone()
                if _storage(item) in self._written:
                    raise _unseen_write(self._written[_storage(item)])
                self.tape._constants.append((item, _version(item)))
                return item
            inputs.append(self._current(item))
            return Ref(inputs[-1])

        args, kwargs = _mapped(tuple(args), ref), {name: _mapped(value, ref) for name, value in kwargs.items()}
        if written is not None:
            self._preserve(written, getattr(function, "__name__", str(function)))
        return function, args, kwargs, tuple(inputs), written

    def _preserve(self, written: Tensor, by: str) -> None:
        """Keep copies of what a call is going to write over, and know the tensors that will have changed."""
        self._written[_storage(written)] = by
        for index in self._storages.pop(_storage(written), ()):
            self.tape.values[index] = self.tape.values[index].clone()
            tensor = self._alive[index]
            if self._index.get(id(tensor)) == index and tensor is not written:
                del self._index[id(tensor)]
                self._overwritten[id(tensor)] = by

    def _note(self, noted: tuple[Any, ...], result: Any) -> None:
        function, args, kwargs, inputs, written = noted
        for index in inputs:
            tensor, version = self._alive[index], self._versions[index]
            if tensor is not written and id(tensor) in self._index and version != _version(tensor):
                raise _unseen_write(getattr(function, "__name__", str(function)))
        single = isinstance(result, Tensor)
        tensors = [result] if single else list(result) if isinstance(result, list | tuple) else []
        if written is None and single and id(result) in self._index:
            return  # dropout in evaluation mode, and whatever else gives its input back
        floating = [isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in tensors]
        if not any(floating):
            return
        outputs = tuple(self._value(t) if is_float else None for t, is_float in zip(tensors, floating, strict=True))
        where = self._modules[-1] if self._modules else None
        self.tape.steps.append(Step(function, args, kwargs, inputs, outputs, single, written is not None, where))

    def _value(self, tensor: Tensor) -> int:
        """Return the position of a new value."""
        index = len(self.tape.values)
        self.tape.values.append(tensor.detach())
        self._alive.append(tensor)
        self._versions.append(_version(tensor))
        self._index[id(tensor)] = index
        self._overwritten.pop(id(tensor), None)
        self._storages.setdefault(_storage(tensor), []).append(index)
        return index


def _unseen_write(by: str) -> NoClosedFormError:
    return NoClosedFormError(
        f"{by} works in place on a tensor of which the path uses another view, or which it uses again",
        "write it without in-place, as in x = torch.relu(x)",
    )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # of what is made in inference mode nothing is counted


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _mapped(item: Any, function: Callable[[Any], Any]) -> Any:
    """Return an argument with its tensors and Refs replaced, in lists and tuples, too."""
    if type(item) in (list, tuple):
        return type(item)(_mapped(part, function) for part in item)
    if isinstance(item, list | tuple):
        return tuple(_mapped(part, function) for part in item)  # torch.Size, named tuples
    return function(item)


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor that a call writes into, or None."""
    name = getattr(function, "__name__", "")
    if kwargs.get("out") is not None:
        raise NoClosedFormError(f"{name} writes into a tensor given as out=", "write y = ... without out=")
    inplace = kwargs.get("inplace", False)
    if not inplace and (position := _inplace_position(function)) is not None and len(args) > position:
        inplace = args[position]
    if inplace or (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__"):
        return args[0] if args else kwargs.get("input")
    return None


@lru_cache(maxsize=1024)
def _inplace_position(function: Any) -> int | None:
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except (TypeError, ValueError):
        return None  # a builtin: its twin that works in place has a name of its own
