"""Arguments: which one was meant, where a call has one that nothing takes."""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

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


def named(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose unknown arguments are told by :func:`unknown_argument`."""

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> T:
        _check(function, function.__name__, args, options)
        return function(*args, **options)

    return called


class Named:
    """A class whose unknown and missing arguments are told in the name of the class that was called."""

    # Not a metaclass, nor an __init__ around others, which would both hide the signature.
    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Refuse arguments that ``__init__`` does not take."""
        if args or options:  # copies come without any
            _check(cls, cls.__name__, args, options)
        return super().__new__(cls)


def _check(function: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        names = [parameter for parameter, about in signature.parameters.items() if about.kind is not about.VAR_KEYWORD]
        for option in options:
            if option not in names:
                raise unknown_argument(name, option, names) from None
        raise TypeError(f"{name}: {error}") from None
