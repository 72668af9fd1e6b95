"""Arguments: suggestions for misspelt ones, old names, which still work, and what docstrings say of them."""

import inspect
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import isfunction, signature
from typing import Any, ParamSpec, TypeVar

from pytorch_grad_cam_pcasvm.runtime.errors import warn

P = ParamSpec("P")
T = TypeVar("T")


def unknown_argument(owner: str, name: str, names: Iterable[str]) -> TypeError:
    """Return the error for an argument that nothing takes; the message names the one that was meant."""
    names = list(names)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(names)}"
    if name.startswith("target_layer") and "layer" in names:
        hint = "methods take the layers of maps, as in ContributionCAM(net, [...]); layer= is where features come from"
    return TypeError(f"{owner} has no argument {name!r}: {hint}")


def suggest_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose unknown arguments are told by :func:`unknown_argument`."""

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> T:
        _check_call(function, function.__name__, args, options)
        return function(*args, **options)

    return called


class Named:
    """A class whose unknown and missing arguments are told in the name of the class that was called."""

    # Not a metaclass, nor an __init__ around others, which would both hide the signature.
    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Refuse arguments that ``__init__`` does not take."""
        if args or options:  # copies come without any
            _check_call(cls, cls.__name__, args, options)
        return super().__new__(cls)


def _check_call(function: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        names = [parameter for parameter, about in signature.parameters.items() if about.kind is not about.VAR_KEYWORD]
        for option in options:
            if option not in names:
                raise unknown_argument(name, option, names) from None
        raise TypeError(f"{name}: {error}") from None


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

    def translate(target_class: _Class) -> _Class:
        for name, method in list(vars(target_class).items()):
            arguments = signature(method).parameters if isfunction(method) else {}
            for old, new in names.items():
                if new in arguments and old not in arguments:
                    setattr(target_class, name, _take_both(vars(target_class)[name], old, new))
        return target_class

    return translate


def _take_both(method: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return a method that takes an argument by its old name, too."""

    @wraps(method)
    def translate(*arguments: Any, **keywords: Any) -> Any:
        if old not in keywords:
            return method(*arguments, **keywords)
        _warn(f"{type(arguments[0]).__name__}.{method.__name__}(..., {old}=)", f"{new}=")
        return method(*arguments, **{new: keywords.pop(old)}, **keywords)  # a TypeError if both are given

    return translate


def _warn(old: str, new: str) -> None:
    warn(f"{old} is now {new}; the old way goes in version 0.6", DeprecationWarning)


_TITLE = re.compile(r"^(\w+):\n(?=    )", re.MULTILINE)
_ENTRY = re.compile(r"^    \**(\w+):.*(?:\n {8}.*)*", re.MULTILINE)


def completed(method: type, root: type) -> str | None:
    """Return the docstring of a method, completed with the arguments and errors from its bases, up to ``root``.

    Arguments come in the order of the signature. A method without an example gets the root's.
    """
    if not method.__doc__:  # python -OO leaves none
        return method.__doc__
    family = [_sections(cls) for cls in reversed(method.__mro__) if issubclass(cls, root)]
    args = {entry[1]: entry[0] for part in family for entry in _ENTRY.finditer(part.pop("Args", ""))}
    errors = {entry[0]: entry[1] for part in family for entry in _ENTRY.finditer(part.pop("Raises", ""))}
    example = family[0]["Example"].replace("ClosedFormGradCAM", method.__name__)
    about = family[-1].pop("").rstrip()
    sections = {
        "Args": "\n".join(args[name] for name in inspect.signature(method).parameters if name in args),
        "Raises": "\n".join(sorted(errors, key=errors.__getitem__)),
        **{"Example": example, **family[-1]},
    }
    return "\n\n".join([about, *(f"{title}:\n{text.rstrip()}" for title, text in sections.items() if text)])


def _sections(cls: type) -> dict[str, str]:
    """Return the sections of a docstring by their titles; the text before them has the title ``""``."""
    parts = ["", *_TITLE.split(inspect.cleandoc(cls.__doc__ or ""))]
    return dict(zip(parts[::2], parts[1::2], strict=True))
