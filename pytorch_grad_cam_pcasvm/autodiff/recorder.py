"""Recording: what the network itself computes between its target layers and the features, recorded while it runs.

A hook on the first target layer that runs switches on a :class:`Recorder`, a ``TorchFunctionMode`` that sees every
call of a torch function or method in this thread. It records those with an argument that depends on a target layer's
output. Everything else is a constant of this call: the stem, weights, and whatever bypasses a target layer. Comparisons
and indices are recorded, too, as *switches*: no gradient flows through them, but a replay has to compute them again.
For gradients they are constants: what happens to them is never a reason to refuse a path.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pytorch_grad_cam_pcasvm.autodiff.rules.registry import CONSTANTS, has_layers, layer_kind, of_shape, rule_of
from pytorch_grad_cam_pcasvm.autodiff.tape import Ref, Step, Tape, autocast_dtype, has_gradient, mapped, version_of
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.model.features import output_of
from pytorch_grad_cam_pcasvm.runtime.hooks import hooked
from pytorch_grad_cam_pcasvm.runtime.rollback import Mode, Rollback

_SWITCH, _SMOOTH = 1, 2  # how something depends on a target layer


class Regions:
    """Where the network switches gradients off after the target layer: what is computed there is a constant.

    A region that began before the target layer, such as a frozen tower called under ``torch.no_grad()``, is ignored.
    """

    def __init__(self) -> None:
        self._switched_off = False
        self._before: dict[int, tuple[Any, bool]] = {}  # by context, which is kept so that its id stays its own
        self._inference = False

    def begin(self) -> None:
        """Begin at the target layer."""
        self._inference = torch.is_inference_mode_enabled()

    @property
    def off(self) -> bool:
        """Whether gradients are off now."""
        inference = torch.is_inference_mode_enabled()
        self._inference = self._inference and inference
        return self._switched_off or (inference and not self._inference)

    def switch(self, enabled: bool, frame: FrameType) -> None:
        """Record a call of ``torch._C._set_grad_enabled`` from a frame; contexts make it when they begin and end."""
        # no_grad().__enter__ and __exit__ call set_grad_enabled.__init__: the context is the outer of the two.
        outer = frame.f_back
        if outer is not None and isinstance(outer.f_locals.get("self"), torch.no_grad | torch.enable_grad):
            frame = outer
        context = frame.f_locals.get("self")
        if frame.f_code.co_name == "__exit__":
            _, self._switched_off = self._before.pop(id(context), (None, False))
        else:
            self._before.setdefault(id(context), (context, self._switched_off))
            self._switched_off = not enabled


class Recorder(Mode):
    """Records the calls that depend on the target layers.

    Args:
        named: also record the modules that made them, for messages.
        keeps_all: keep the numbers of all values, as a replay from other activations needs; otherwise of those that
            rules read for gradients, and the network's own memory is given back as without a recorder.
    """

    def __init__(self, *, named: bool = False, keeps_all: bool = True) -> None:
        super().__init__()
        self.tape = Tape(complete=keeps_all)
        self.named, self._keeps_all = named, keeps_all
        self._index: dict[int, int] = {}  # of the tensor object that stands for a value
        self._smooth: set[int] = set()  # the values that are no switches
        self._tensors: list[Callable[[], Tensor | None]] = []
        self._kept: dict[int, Tensor] = {}  # an id is a tensor's own only while the tensor lives
        self._held: list[torch.UntypedStorage] = []  # so is a storage's
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._versions: list[int | None] = []
        self._storages: dict[int, list[int]] = {}
        self._overwritten: dict[int, str] = {}
        self._written: dict[int, str] = {}  # storages, by what wrote values of the tape into them
        self.regions = Regions()
        self._entered = False
        self._layers: list[tuple[Any, ...] | None] = []  # registered layers that are running
        self._modules: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, and record it if it depends on a target layer."""
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            self.regions.switch(args[0], sys._getframe(1))
        if self._layers:
            return func(*args, **kwargs)
        depends = self._depends(args)
        if kwargs and depends < _SMOOTH:
            depends = max(depends, self._depends(kwargs.values()))
        constant = func in CONSTANTS or self.regions.off or (depends == _SWITCH and kwargs.get("out") is not None)
        if depends and constant and not of_shape(func):
            self.tape.branches = True
        if not depends or (constant and (depends == _SWITCH or self.regions.off)):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        with torch._C.DisableTorchFunction():  # other modes are not to see what is asked here
            noted = self._noted(func, args, kwargs, written, smooth=depends == _SMOOTH)
        result = func(*args, **kwargs)
        if func not in CONSTANTS:
            with torch._C.DisableTorchFunction():
                self._note(noted, result if written is None else written)
        return result

    def root(self, name: str, output: Tensor, following: Tensor | None = None) -> Tensor:
        """Begin at the output of a target layer, or add one; return an alias of it for what follows."""
        if self._layers:
            raise NoClosedFormError(
                f"the target layer {name!r} is inside a layer with a registered rule", "choose that layer itself"
            )
        with torch._C.DisableTorchFunction():
            # A layer may give its input back, which is another value where it is used besides.
            alias = output.detach() if following is None else following
            index = self._value(alias, smooth=True)
            self._keep(index)
            if id(output) in self._index:
                source = self._index[id(output)]
                if source in self._smooth:
                    self._current(output)
                self.tape.steps.append(Step(torch.clone, (Ref(source),), {}, (source,), (index,), True, False))
        self.tape.roots[name] = index
        if not self._entered:
            self.regions.begin()
            self.__enter__()
            self._entered = True
        return alias

    def finish(self, output: Any) -> Tape:
        """Return the tape of a pass that returned ``output``."""
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            by = self._overwritten.get(id(leaf), self._written.get(_storage(leaf)))
            if by is not None and id(leaf) not in self._index:
                raise _unseen_write(by)
        for index in [index for indices in self._storages.values() for index in indices]:
            if index in self._smooth and self._changed(index):
                raise _unseen_write("something that cannot be seen")
        self.tape.outputs = [self._current(leaf) for leaf in leaves]
        self.tape.output = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
        self._tensors.clear()  # whose callbacks hold this recorder, and with it all that it kept
        return self.tape

    def stop(self) -> None:
        """Switch the mode off."""
        # A mode of the network's that ends behind the target layer takes ours for itself: calls may have been missed.
        if self._entered and torch.overrides._get_current_function_mode() is not self:
            raise NoClosedFormError(
                "the network leaves a TorchFunctionMode between the target layer and the features",
                "enter it before the network runs, as in with mode: cam.explain(images)",
            )
        if self._entered:
            self.__exit__(None, None, None)
        self._entered = False

    @contextmanager
    def watching(self, backbone: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Record layers that have rules of their own as one step each; keep track of names if requested."""
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
        if self._entered and not self._layers and not self.regions.off and self._depends(args) == _SMOOTH:
            raise NoClosedFormError(
                f"between the target layer and the features is a scripted module, {module.original_name}, whose steps "
                "cannot be seen",
                "use the module that was scripted",
                "pass jacobian='auto' to use autograd on the path",
            )

    def _enter_layer(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        depends = self._entered and max(self._depends(args), self._depends(kwargs.values())) == _SMOOTH
        if self._layers or not depends:
            self._layers += [None] if self._layers else []
            return
        written = args[0] if getattr(module, "inplace", False) and args else None
        x = args[0] if len(args) == 1 else args
        with torch._C.DisableTorchFunction():
            self._layers.append(self._noted(layer_kind(module), (module, x), kwargs, written, several=x is args))

    def _leave_layer(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._layers:
            return
        noted = self._layers.pop()
        if noted is not None:
            with torch._C.DisableTorchFunction():
                self._note(noted, output)

    def _depends(self, arguments: Any) -> int:
        """Return how arguments depend on a target layer: 0, _SWITCH or _SMOOTH."""
        found = 0
        for argument in arguments:
            if isinstance(argument, Tensor):
                index = self._index.get(id(argument))
                if index is not None:
                    found = _SMOOTH if index in self._smooth else _SWITCH
                elif id(argument) in self._overwritten or (self._written and _storage(argument) in self._written):
                    found = _SMOOTH
            elif isinstance(argument, list | tuple):
                found = max(found, self._depends(argument))
            if found == _SMOOTH:
                return found
        return found

    def _changed(self, index: int) -> bool:
        tensor = self._tensors[index]()
        return tensor is not None and self._versions[index] != version_of(tensor)

    def _keep(self, index: int) -> None:
        """Keep the numbers of a value."""
        tensor = self._tensors[index]()
        if index not in self._kept and tensor is not None:
            self._kept[index], self.tape.values[index] = tensor, tensor.detach()

    def _forget(self, index: int, identity: int, storage: int) -> None:
        """Forget a tensor that the network has dropped: its id, and that of its storage, may become another's."""
        if self._index.get(identity) == index:
            del self._index[identity]
        self._overwritten.pop(identity, None)
        left = self._storages.get(storage, [])
        if index in left:
            left.remove(index)

    def _current(self, tensor: Tensor) -> int | None:
        """Return the value that a tensor stands for; refuse one that was written over behind the tape's back."""
        index = self._index.get(id(tensor))
        if index is not None and self._changed(index):
            if index in self._smooth:
                raise _unseen_write("something that cannot be seen")
            return None
        return index

    def _noted(
        self, function: Any, args: Any, kwargs: Any, written: Any, *, smooth: bool = True, several: bool = False
    ) -> tuple[Any, ...]:
        """Return what is to be noted of a call, before it runs and writes into anything."""
        inputs: list[int] = []

        def taken(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            if id(item) in self._overwritten:
                raise _unseen_write(self._overwritten[id(item)])
            index = self._current(item)
            if index not in self._smooth and item is not written and smooth:
                if index is None and _storage(item) in self._written:
                    raise _unseen_write(self._written[_storage(item)])
                self.tape._constants.append((item, version_of(item)))
            if index is None:
                return item.clone() if item is written else item
            inputs.append(index)
            return Ref(index)

        args, kwargs = mapped(tuple(args), taken), {name: mapped(value, taken) for name, value in kwargs.items()}
        rule = rule_of(function)
        smooths = [index for index in inputs if index in self._smooth]
        if rule is None or rule.needs in ("all", "inputs") or (rule.needs == "others" and len(smooths) > 1):
            for index in smooths:
                self._keep(index)
        if written is not None and smooth:
            self._preserve(written, getattr(function, "__name__", str(function)))
        elif written is not None:
            self._preserve_switches(written)
        return function, args, kwargs, tuple(inputs), written, several

    def _preserve_switches(self, written: Tensor) -> None:
        """Keep copies of switches that a call is going to write over; other views of them are constants from now on."""
        for index in list(self._storages.get(_storage(written), ())):
            tensor = self._tensors[index]()
            if index not in self._smooth:
                self.tape.values[index] = self.tape.values[index].clone()
                if self._index.get(id(tensor)) == index and tensor is not written:
                    del self._index[id(tensor)]

    def _preserve(self, written: Tensor, by: str) -> None:
        """Keep copies of what a call is going to write over, and know the tensors that will have changed."""
        self._written[_storage(written)] = by
        self._held.append(written.untyped_storage())
        for index in list(self._storages.pop(_storage(written), ())):
            if index in self._kept:
                self.tape.values[index] = self.tape.values[index].clone()
            tensor = self._tensors[index]()
            if self._index.get(id(tensor)) == index and tensor is not written:
                del self._index[id(tensor)]
                self._overwritten[id(tensor)] = by

    def _note(self, noted: tuple[Any, ...], result: Any) -> None:
        function, args, kwargs, inputs, written, several = noted
        for index in self._smooth.intersection(inputs):
            tensor = self._tensors[index]()
            if tensor is not written and id(tensor) in self._index and self._changed(index):
                raise _unseen_write(getattr(function, "__name__", str(function)))
        single = isinstance(result, Tensor)
        tensors = [result] if single else list(result) if isinstance(result, list | tuple) else []
        if written is None and single and id(result) in self._index:
            return  # dropout in evaluation mode, and whatever else gives its input back
        if not inputs or not any(isinstance(tensor, Tensor) for tensor in tensors):
            self.tape.branches |= not inputs or not of_shape(function)
            return
        smooth = not self._smooth.isdisjoint(inputs)
        outputs = tuple(
            self._value(tensor, smooth=smooth and has_gradient(tensor)) if isinstance(tensor, Tensor) else None
            for tensor in tensors
        )
        rule = rule_of(function)
        if smooth and (rule is None or rule.needs in ("all", "y")):
            for output in outputs:
                if output is not None:
                    self._keep(output)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not _OUTSIDE:
            self.tape.codes[id(frame.f_code)] = frame.f_code
            frame = frame.f_back
        where = self._modules[-1] if self._modules else None
        cast = autocast_dtype(self.tape.values[inputs[0]].device.type)
        self.tape.steps.append(
            Step(function, args, kwargs, inputs, outputs, single, written is not None, where, several, cast)
        )

    def _value(self, tensor: Tensor, *, smooth: bool) -> int:
        """Return the position of a new value."""
        index = len(self.tape.values)
        if smooth:
            self._smooth.add(index)
        identity, storage = id(tensor), _storage(tensor)
        self._tensors.append(ref(tensor, lambda _: self._forget(index, identity, storage)))
        self._versions.append(version_of(tensor))
        self._index[identity] = index
        self._overwritten.pop(identity, None)
        self._storages.setdefault(storage, []).append(index)
        if self._keeps_all or not smooth:
            self.tape.values.append(tensor.detach())
            self._kept[index] = tensor
        else:  # the shape of nothing, in no memory
            kind = tensor.dtype, tensor.device
            if kind not in self._nothing:
                self._nothing[kind] = torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device)
            self.tape.values.append(self._nothing[kind].expand(tensor.shape))
        return index


_INPLACE = {"__setitem__"} | {
    f"__i{name}__" for name in ("add", "and", "or", "xor", "lshift", "rshift", "mod", "floordiv")
}


def _unseen_write(by: str) -> NoClosedFormError:
    return NoClosedFormError(
        f"{by} works in place on a tensor that the path uses again, or of which it uses another view",
        "use the out-of-place version, as in x = torch.relu(x)",
    )


_OUTSIDE = output_of.__code__  # which runs the network


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor that a call writes into, or None."""
    name = getattr(function, "__name__", "")
    if kwargs.get("out") is not None:
        raise NoClosedFormError(f"{name} writes into a tensor given as out=", "write y = ... without out=")
    inplace = kwargs.get("inplace", False)
    if not inplace and (position := _inplace_position(function)) is not None and len(args) > position:
        inplace = args[position]
    if inplace or (name.endswith("_") and not name.endswith("__")) or name in _INPLACE:
        return args[0] if args else kwargs.get("input")
    return None


@lru_cache(maxsize=1024)
def _inplace_position(function: Any) -> int | None:
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except (TypeError, ValueError):
        return None  # a builtin: its twin that works in place has a name of its own


@contextmanager
def modes_kept() -> Iterator[None]:
    """Remove, at the end, every torch function mode that was entered inside."""
    with Rollback() as rollback:
        rollback.note_modes()
        yield
