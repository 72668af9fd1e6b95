"""What version 0.3 had elsewhere or called otherwise, with a DeprecationWarning that says which version ends it."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import isfunction, signature
from types import ModuleType
from typing import Any, TypeVar

from pytorch_grad_cam_pcasvm.runtime.errors import warn

_PACKAGE = __package__
_NOT_GIVEN: Any = object()
_Class = TypeVar("_Class", bound=type)
_PLACES = {
    "autodiff": "path",
    "autodiff.rules": "rules",
    "cams": "methods",
    "cams.base": "methods.grad_cam_protocol",
    "errors": "runtime.errors",
    "head.convert": "head.build",
    "model": "network",
}
NAMES = {"Explained": "MethodResult"}
_FLAGS = {
    "linear": "a subclass of ComponentSums",
    "heads_add_up": "a subclass of HeadSums",
    "weights_are_sums": "the method host_divisor",
    "replays": "needs = 'replay'",
    "in_single": "needs = 'difference'",
}


def renamed(name: str) -> Any:
    """Return what a public name of version 0.3 stands for."""
    _warn(name, NAMES[name])
    return getattr(import_module(_PACKAGE), NAMES[name])


def of_run(run: Any, name: str) -> Any:
    """Return what ``compute(run, ...)`` of version 0.3 found at a run."""
    if name != "seeds":
        raise AttributeError(f"{type(run).__name__!r} object has no attribute {name!r}", name=name, obj=run)
    _warn("run.seeds(targets)", "run.output_gradients(targets)")
    return run.output_gradients


def translate(method: Any) -> None:
    """Make a method of a class that has the flags of version 0.3."""
    flags = [flag for flag in _FLAGS if vars(method).get(flag) is True]
    for flag in flags:
        _warn(f"{method.__name__}.{flag} = True", _FLAGS[flag])
    if "linear" in flags:
        sums = import_module(f"{_PACKAGE}.methods.component_sums")
        new = sums.HeadSums if "heads_add_up" in flags else sums.ComponentSums
        method.__bases__ = tuple(new if base is sums.ClosedFormCAM else base for base in method.__bases__)
    if "weights_are_sums" in flags:
        method.host_divisor = lambda self, activations: activations[0, 0].numel()
    if "replays" in flags or "in_single" in flags:
        method.needs = "difference" if "in_single" in flags else "replay"


def translate_stage(stage: Any) -> None:
    """Give a stage whose pullback takes ``saved0`` its secant, and let a built-in pullback take ``saved0``."""
    pullback = vars(stage).get("pullback")
    if pullback is None:
        return
    if "saved0" in signature(pullback).parameters:
        if "secant" not in vars(stage):
            _warn(f"{stage.__name__}.pullback(saved, grad, saved0)", "a method of its own, secant(saved, saved0, grad)")
            stage.secant = lambda self, saved, saved0, grad: pullback(self, saved, grad, saved0=saved0)
    elif stage.__module__.partition(".")[0] == _PACKAGE:
        stage.pullback = _also_secant(stage, pullback)


def _also_secant(stage: Any, pullback: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stage's pullback that is the secant of that stage where it gets ``saved0``, what a start saved."""
    secant = vars(stage).get("secant")  # None: linear, so that it is the pullback

    @wraps(pullback)
    def either(self: Any, saved: Any, grad: Any, saved0: Any = _NOT_GIVEN) -> Any:
        if saved0 is _NOT_GIVEN:
            return pullback(self, saved, grad)
        _warn(f"{stage.__name__}.pullback(saved, grad, saved0)", "secant(saved, saved0, grad)", "0.6")
        # Not self.secant, which may be that of a user's subclass, made of this pullback.
        return pullback(self, saved, grad) if secant is None or saved0 is None else secant(self, saved, saved0, grad)

    return either


def renamed_arguments(**names: str) -> Callable[[_Class], _Class]:
    """Return a decorator of classes whose own methods also take arguments by the names that version 0.3 had for them.

    Args:
        **names: the new name by each old one; methods without the new one are left alone.

    Returns:
        The decorator, which changes the class and returns it.
    """

    def translated(kind: _Class) -> _Class:
        for name, method in list(vars(kind).items()):
            arguments = signature(method).parameters if isfunction(method) else {}
            for old, new in names.items():
                if new in arguments and old not in arguments:
                    setattr(kind, name, _taking(vars(kind)[name], old, new))
        return kind

    return translated


def _taking(method: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return a method that takes an argument by its old name, too."""

    @wraps(method)
    def translated(*arguments: Any, **named: Any) -> Any:
        if old not in named:
            return method(*arguments, **named)
        _warn(f"{type(arguments[0]).__name__}.{method.__name__}(..., {old}=)", f"{new}=", "0.6")
        return method(*arguments, **{new: named.pop(old)}, **named)  # a TypeError if both are given

    return translated


class _Moved(ModuleType):
    """A module that is somewhere else now."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in NAMES:
            return renamed(name)
        module = import_module(_new(self.__name__))
        return getattr(module, name) if hasattr(module, name) else getattr(import_module(_PACKAGE), name)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of version 0.3."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return how a moved module is imported; None: it is none."""
        new = _new(fullname)
        return ModuleSpec(fullname, self, is_package=True) if new and find_spec(new) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that takes its names from where they are now."""
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Warn."""
        _warn(module.__name__, f"{_new(module.__name__)}, and public names are in {_PACKAGE} itself")


def _new(name: str) -> str:
    """Return what a moved module is called now; nothing for one that has not moved."""
    package, _, place = name.partition(".")
    if package != _PACKAGE:
        return ""
    folder, _, module = place.rpartition(".")
    new = _PLACES.get(place) or (f"{_PLACES[folder]}.{module}" if folder in _PLACES else "")
    return new and f"{_PACKAGE}.{new}"


def _warn(old: str, new: str, until: str = "0.5") -> None:
    warn(f"{old} is now {new}; the old way goes in version {until}", DeprecationWarning)


sys.meta_path.append(_Finder())
