"""Deprecations: renamed calls, with a warning that names the new one and the version that ends the old one."""

from collections.abc import Callable
from functools import wraps
from inspect import isfunction, signature
from typing import Any, TypeVar

from pytorch_grad_cam_pcasvm.runtime.errors import warn

_NOT_GIVEN: Any = object()
_Class = TypeVar("_Class", bound=type)


def allow_third_argument(stage: Any) -> None:
    """Let the pullback of a stage of this package take ``saved0``, by which it is the secant."""
    pullback, secant = (
        vars(stage).get("pullback"),
        vars(stage).get("secant"),
    )  # None: linear, so that it is the pullback
    if pullback is None or stage.__module__.partition(".")[0] != __package__.partition(".")[0]:
        return

    @wraps(pullback)
    def either(self: Any, saved: Any, grad: Any, saved0: Any = _NOT_GIVEN) -> Any:
        if saved0 is _NOT_GIVEN:
            return pullback(self, saved, grad)
        _warn(f"{stage.__name__}.pullback(saved, grad, saved0)", "secant(saved, saved0, grad)")
        # Not self.secant, which may be a user's subclass's, made of this pullback.
        return pullback(self, saved, grad) if secant is None or saved0 is None else secant(self, saved, saved0, grad)

    stage.pullback = either


def rename_arguments(**names: str) -> Callable[[_Class], _Class]:
    """Return a decorator of classes whose own methods also take arguments by their old names.

    Args:
        **names: the new name by each old one; methods without the new one are left alone.

    Returns:
        The decorator, which changes the class and returns it.
    """

    def translate(kind: _Class) -> _Class:
        for name, method in list(vars(kind).items()):
            arguments = signature(method).parameters if isfunction(method) else {}
            for old, new in names.items():
                if new in arguments and old not in arguments:
                    setattr(kind, name, _take_both(vars(kind)[name], old, new))
        return kind

    return translate


def _take_both(method: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return a method that takes an argument by its old name, too."""

    @wraps(method)
    def translate(*arguments: Any, **named: Any) -> Any:
        if old not in named:
            return method(*arguments, **named)
        _warn(f"{type(arguments[0]).__name__}.{method.__name__}(..., {old}=)", f"{new}=")
        return method(*arguments, **{new: named.pop(old)}, **named)  # a TypeError if both are given

    return translate


def _warn(old: str, new: str) -> None:
    warn(f"{old} is now {new}; the old way goes in version 0.6", DeprecationWarning)
