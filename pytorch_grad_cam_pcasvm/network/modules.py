"""Modules: a network's device, its layers by name, its evaluation mode, and a run of it that ends at a layer."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from difflib import get_close_matches
from functools import partial
from itertools import chain
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.lazy import LazyModuleMixin

from pytorch_grad_cam_pcasvm.network.keras_network import KerasNetwork, is_keras, wrap_keras
from pytorch_grad_cam_pcasvm.network.tiling import Tiled
from pytorch_grad_cam_pcasvm.runtime.errors import refuse
from pytorch_grad_cam_pcasvm.runtime.rollback import Rollback, called
from pytorch_grad_cam_pcasvm.runtime.torch_private import OpOverload


def find_network(network: Any) -> nn.Module:
    """Return a network, without ``torch.compile``, whose layers hooks can reach.

    Parts of it may be TorchScript, as long as they are called as modules. A model of Keras becomes a network whose
    submodules are its layers.

    Raises:
        TypeError: it is no module, or a program without layers, made by ``torch.jit`` or ``torch.export``.

    Example:
        >>> find_network(torch.compile(backbone)) is backbone
        True
    """
    exported = isinstance(network, torch.export.ExportedProgram)
    if not isinstance(network, nn.Module) and not exported:
        description = f"the class {network.__name__}" if isinstance(network, type) else type(network).__name__
        refuse(TypeError, f"the network must be a torch.nn.Module, got {description}", _advise_on(network))
    module = network if exported else uncompiled(network)
    if is_keras(module):
        return wrap_keras(module)
    maker, part = "", ""
    if isinstance(module, torch.jit.ScriptModule):
        maker = "torch.jit"
    elif exported or any(map(_is_exported, list_modules(module))):
        maker = "torch.export"
        part = "" if exported else next(name for name, inner in module.named_modules() if _is_exported(inner))
    if maker:
        whole = f"{part!r} of the network" if part else "the network"
        ways = [f"build {'this part' if part else 'the module'} itself and load its weights, load_state_dict(...)"]
        if maker == "torch.export":
            ways.append(
                "export it with a dynamic batch size and use torch.export.unflatten(program), whose layers are "
                "modules, with jacobian='auto'"
            )
        refuse(TypeError, f"{whole} is a program, made by {maker}, whose layers are not run as modules", *ways)
    return module


def _is_exported(module: nn.Module) -> bool:
    """Return whether a module runs the operators of all its layers itself."""
    if not isinstance(module, fx.GraphModule):
        return False
    return any(isinstance(node.target, OpOverload) for node in module.graph.nodes)


def _advise_on(network: Any) -> str:
    """Return advice on a module to pass in place of an object that is none."""
    if isinstance(network, type):
        return f"make one, as in {network.__name__}(...)"
    if isinstance(network, str | PathLike):
        return "pass the module, such as torchvision.models.resnet18(weights='DEFAULT'), not its name"
    if isinstance(getattr(network, "__self__", None), nn.Module):
        return "pass the module whose method this is"
    if isinstance(network, Mapping):
        return "build the module, and load these weights with load_state_dict"
    if any(base.__module__.partition(".")[0] == "skorch" for base in type(network).__mro__):
        return "pass its .module_, which it has after fit or initialize"
    for name in ("module_", "module", "model"):  # as wrappers call it
        if isinstance(getattr(network, name, None), nn.Module):
            return f"pass its .{name}"
    return "put what it does in the forward of a module, with its layers as attributes"


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` wrapped, or a module that is not compiled as it is."""
    if isinstance(module, torch.jit.ScriptModule):  # which has no such dict
        return module
    original = module._modules.get("_orig_mod")
    return module if original is None else original


def refuse_parallel(model: nn.Module) -> None:
    """Refuse a network that runs, entirely or in part, as copies of itself."""
    for module in list_modules(model):
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            wrapper = type(module).__name__
            fix = "pass model.module" if module is model else f"put the .module of each {wrapper} in its place"
            raise ValueError(f"{wrapper} runs copies on other devices, whose layers cannot be seen: {fix}")


def find_layer_name(backbone: nn.Module, layer: str | nn.Module | None) -> str | None:
    """Return the first dotted name of a layer, given as a module or by any name; None for the backbone's own output.

    Raises:
        ValueError: there is no such layer; the message names similar ones.

    Example:
        >>> find_layer_name(backbone, backbone.layer2)
        'layer2'
    """
    if layer is None or layer == "":
        return None
    if isinstance(backbone, KerasNetwork) and (keras_name := backbone.find_name(layer)) is not None:
        return keras_name
    names = {module: name for name, module in backbone.named_modules()}  # each module once, by its first name
    if isinstance(layer, str) and "#" in layer:
        name, call = called(layer)
        return f"{find_layer_name(backbone, name)}#{call}"
    if isinstance(layer, nn.Module):
        if layer not in names:
            raise ValueError(
                f"this {type(layer).__name__} object is not in this {type(backbone).__name__}: take it from the "
                "network itself, not from a copy, or give its name"
            )
        return names[layer] or None
    try:
        return names[backbone.get_submodule(layer)] or None
    except AttributeError:
        if isinstance(backbone, Tiled) and not layer.startswith(backbone.prefix):  # as it is called inside
            return find_layer_name(backbone, backbone.prefix + layer)
        near = get_close_matches(str(layer), names.values(), n=1)
        hint = f"did you mean {near[0]!r}? Its" if near else "its"
        last = ", ".join([name for name in names.values() if name][-8:])
        raise ValueError(f"{type(backbone).__name__} has no layer {layer!r}; {hint} last layers are: {last}") from None


def find_device(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter, or buffer (the CPU if it has none).

    Example:
        >>> find_device(net)
        device(type='cpu')
    """
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def list_modules(model: nn.Module) -> list[nn.Module]:
    """Return a model and all modules in it, each once: several times as fast as ``model.modules()``."""
    modules, visited = [model], {model}
    for module in modules:
        if module._modules:
            children = [child for child in module._modules.values() if child is not None and child not in visited]
            modules += children
            visited.update(children)
    return modules


# By module: its own flag, and who holds it in evaluation mode.
_evaluating: "WeakKeyDictionary[nn.Module, tuple[bool, set[Rollback]]]" = WeakKeyDictionary()
_evaluating_lock = threading.RLock()  # a garbage collector may come in between


@contextmanager
def evaluation_mode(model: nn.Module, modules: Sequence[nn.Module] | None = None) -> Iterator[Rollback]:
    """Put a model, whose modules may be given, in evaluation mode, and restore it when its last user leaves.

    Yields:
        What puts it back, and may put back more.

    Example:
        >>> with evaluation_mode(backbone.train()):
        ...     backbone.training
        False
        >>> backbone.training, backbone.eval().training
        (True, False)
    """
    modules = list_modules(model) if modules is None else modules
    with Rollback() as rollback:
        rollback.note_torch()
        with _evaluating_lock:
            # Nothing is to be put back where nothing was changed: most models are in evaluation mode already.
            shared = len(_evaluating) > 0
            # All of them first: a compiled module's flag is that of the module inside.
            flags = {m: m.training for m in modules if m.training or (shared and m in _evaluating)}
            rollback.note(_release, rollback, flags)
            for module, training in flags.items():
                _evaluating.setdefault(module, (training, set()))[1].add(rollback)
                module.training = False
        yield rollback


def _release(user: Rollback, modules: Iterable[nn.Module]) -> None:
    """Give modules that nobody holds in evaluation mode any more their own flags back."""
    with _evaluating_lock:
        for module in modules:
            training, users = _evaluating.get(module, (None, set()))
            users.discard(user)
            if training is not None and not users:
                module.training = training
                del _evaluating[module]


_ATOMS = {type(None), bool, int, float, str, bytes, nn.Parameter}  # nothing in them is put back
_HOOKS = {name for name in vars(nn.Module()) if "hook" in name}


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore, at the end, all that a forward pass writes into a network, and the random state.

    That is, for every module: attributes, including new ones; entries of its lists, dicts, sets and deques, also nested
    ones; buffers and other tensors, whether rebound or written in place. All objects keep their identity. Left alone
    are parameters' values (they are not copied), hooks, attributes of scripted modules, lazy modules before their first
    pass, and the contents of objects of other kinds.
    """
    with Rollback() as rollback:
        rollback.note(torch.set_rng_state, torch.get_rng_state(), late=False)
        for device in sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda}):
            rollback.note(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device, late=False)
        for put_back in reversed(_undo(model)):
            rollback.note(put_back, late=False)
        yield


def _undo(model: nn.Module) -> list[Callable[[], Any]]:
    """Return functions that restore every container and every tensor in a model."""
    undo: list[Callable[[], Any]] = []
    todo: list[Any] = [model]
    visited: set[int] = set()
    while todo:
        value = todo.pop()
        if type(value) in _ATOMS or id(value) in visited:
            continue
        visited.add(id(value))
        # By the methods of the base classes: those of a subclass may refuse or count.
        if type(value) is Tensor:
            if value.layout is torch.strided and not value.is_meta:
                alias = value.detach()
                undo.append(partial(_put_back_tensor, value, alias, alias.clone()))
        elif isinstance(value, torch.jit.ScriptModule):
            todo += value.buffers()  # what else it has is not in vars()
        elif isinstance(value, LazyModuleMixin) and value.has_uninitialized_params():  # type: ignore[misc]
            continue  # its first pass makes it another module, for good
        elif isinstance(value, nn.Module):
            undo.append(partial(_put_back_entries, vars(value), dict(vars(value)), _HOOKS))
            todo += (item for name, item in vars(value).items() if name not in _HOOKS)
        elif isinstance(value, dict):
            undo.append(partial(_put_back_entries, value, dict(value.items())))
            todo += value.values()
        elif isinstance(value, list | set | deque | tuple):
            before = list(value)
            todo += before
            if isinstance(value, list):
                undo.append(partial(list.__setitem__, value, slice(None), before))
            elif isinstance(value, set):
                undo += [partial(set.intersection_update, value, before), partial(set.update, value, before)]
            elif isinstance(value, deque):
                undo += [partial(deque.clear, value), partial(deque.extend, value, before)]
    return undo


def _put_back_tensor(tensor: Tensor, alias: Tensor, numbers: Tensor) -> None:
    if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape:
        tensor.data = alias
    # By their numbers, as writing to .data leaves _version alone; and not always, as a write would spoil a graph of the
    # user's that holds the tensor.
    if not torch.equal(alias, numbers):
        with torch.inference_mode() if alias.is_inference() else nullcontext():  # elsewhere it cannot be written to
            alias.copy_(numbers)


def _put_back_entries(container: Any, before: dict[Any, Any], exempt: Collection[str] = ()) -> None:
    """Give a dict the entries of before, but leave exempt ones as they are."""
    before = before | {name: container[name] for name in exempt if name in container}
    base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
    # Another thread may be reading: nothing that was there all the time is taken away, if the order is as it was.
    for key in container.keys() - before.keys():
        base.__delitem__(container, key)
    base.update(container, before)
    if list(container) != list(before):
        base.clear(container)
        base.update(container, before)


_eager_lock = threading.Lock()
_eager_users: set[Rollback] = set()
_eager_stance = ExitStack()


@contextmanager
def eager(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run compiled parts of a model, given as all its modules, uncompiled: compiled code shows no layers."""
    if not any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in modules):
        yield
        return
    # The stance is the whole process's: it is taken by the first and put back by the last of several threads.
    with Rollback() as rollback:
        rollback.note(_leave_eager, rollback)
        with _eager_lock:
            if not _eager_users:
                _eager_stance.enter_context(torch.compiler.set_stance("force_eager"))
            _eager_users.add(rollback)
        yield


def _leave_eager(user: Rollback) -> None:
    with _eager_lock:
        _eager_users.discard(user)
        if not _eager_users:
            _eager_stance.close()
