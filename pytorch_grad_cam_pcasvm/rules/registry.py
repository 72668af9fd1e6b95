"""The registry: which rule pulls a gradient back through which torch function, or module class.

A rule gets the arguments of a call as they were given, and by name its output ``y`` and ``grad``, the derivative of K
targets with respect to ``y``, of shape (K, *y.shape): targets lead, the whole batch is in ``y``. It returns the
derivative with respect to the first argument, of shape (K, *x.shape), that is ``grad @ dy/dx``; with respect to the
first two or three as a tuple. A gradient that not every call needs may be given as a function without arguments. Of a
call that gives several tensors, ``y`` and ``grad`` are tuples, with None for outputs that lead nowhere.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

Pull = TypeVar("Pull", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """The closed-form Jacobian of a function or layer.

    Attributes:
        pull: gives the gradients.
        keeps_sums: given the arguments of the call and ``y``, whether the sum of the gradient over the positions of
            every channel is the same before and after the call, so that the weights of a map can pass it by.
        parameters: names of the rule's positional parameters, in order.
    """

    pull: Callable[..., Any]
    keeps_sums: Callable[..., bool]
    parameters: tuple[str, ...]


_rules: dict[Any, Rule] = {}
_layers: set[type] = set()
# What depends on its input by number only: autograd passes no gradient, either.
CONSTANTS: set[Any] = set()


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def register_jacobian(*calls: Any, keeps_sums: Callable[..., bool] = _never) -> Callable[[Pull], Pull]:
    """Register the closed-form Jacobian of layer classes or torch functions.

    The rule of a layer takes ``(layer, x, y, grad)``, that of a function the function's own arguments, then ``y`` and
    ``grad`` by name::

        @register_jacobian(Swish)
        def swish(layer, x, y, grad):
            s = torch.sigmoid(x)
            return grad * (s + y * (1 - s))

        @register_jacobian(torch.special.erf)
        def erf(input, *, y, grad):
            return grad * 2 / math.sqrt(math.pi) * torch.exp(-input**2)

    ``y`` is the output for the whole batch, ``grad`` the derivative of K targets with respect to it, of shape
    (K, *y.shape). The rule returns ``grad @ dy/dx``, of shape (K, *x.shape). Tensors come in the dtype of ``grad``,
    which is float32 or better. A layer called with several tensors gets a tuple of them as ``x``, and returns a tuple.
    The rule of a layer serves subclasses, too, unless they define a ``forward`` of their own.

    Args:
        *calls: module classes, or functions and tensor methods of torch.
        keeps_sums: given the same arguments and ``y``, whether the sum of the gradient over the positions of a channel
            is the same before and after the layer, as for pooling; the weights of a map then need no pullback.

    Returns:
        A decorator that gives the rule back unchanged.

    Raises:
        TypeError: nothing is given, or something that is neither a module class nor a function.
    """
    for call in calls or (None,):
        if not callable(call) or isinstance(call, nn.Module) or (isinstance(call, type) and not _is_layer(call)):
            raise TypeError(
                "register_jacobian takes layer classes and torch functions, as in @register_jacobian(nn.ReLU), got "
                f"{call!r:.80}"
            )

    def register(pull: Pull) -> Pull:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = tuple(p.name for p in inspect.signature(pull).parameters.values() if p.kind in kinds)
        _rules.update(dict.fromkeys(calls, Rule(pull, keeps_sums, parameters)))
        _layers.update(call for call in calls if isinstance(call, type))
        return pull

    return register


def _is_layer(call: type) -> bool:
    return issubclass(call, nn.Module)


def rule_of(call: Any) -> Rule | None:
    """Return the rule of a function or a registered module class, or None."""
    return _rules.get(call)


def has_layers() -> bool:
    """Return whether any layer class has a rule of its own."""
    return bool(_layers)


def layer_kind(layer: nn.Module) -> type | None:
    """Return the registered class whose rule serves a layer, or None."""
    kind = type(layer)
    for base in kind.__mro__:
        if base in _rules:
            own = "forward" in vars(layer) or getattr(kind, "forward", None) is not getattr(base, "forward", None)
            return None if own else base
    return None


def functions(*names: str) -> list[Any]:
    """Return all of torch's functions and tensor methods of these names, and their twins that work in place."""
    places = (torch, torch.Tensor, F, torch.special)
    found = [getattr(place, name + end, None) for name in names for end in ("", "_") for place in places]
    return [function for function in found if callable(function)]


def elementwise(*calls: Any) -> Callable[[Pull], Pull]:
    """Register ``slope(*arguments, y)``, the derivative f'(x) of a function that works on every number by itself."""

    def register(slope: Pull) -> Pull:
        def pull(*args: Any, y: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
            return grad * slope(*args, **kwargs, y=y)

        pull.__signature__ = inspect.signature(slope)  # type: ignore[attr-defined]
        register_jacobian(*calls)(pull)
        return slope

    return register


def constant(*calls: Any) -> None:
    """Say that the outputs of functions have no derivative by their arguments, as those of ``detach``."""
    CONSTANTS.update(calls)


def unbroadcast(grad: Tensor, x: Any) -> Tensor:
    """Sum grad (K, ...) over the dimensions along which x was broadcast: (K, *x.shape)."""
    extra = grad.dim() - 1 - x.dim()
    if extra:
        grad = grad.flatten(1, extra).sum(1) if extra > 1 else grad.sum(1)
    repeated = [dim + 1 for dim in range(x.dim()) if x.shape[dim] == 1 and grad.shape[dim + 1] != 1]
    return grad.sum(repeated, keepdim=True) if repeated else grad
