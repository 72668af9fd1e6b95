"""The registry: which rule pulls a gradient back through which torch function or module class.

A rule gets the arguments of a call as they were given, and as keyword arguments its output ``y`` and ``grad``, the
derivative of K targets with respect to ``y``, of shape (K, *y.shape): targets come first, and ``y`` holds the whole
batch. It returns the derivative with respect to the first argument, of shape (K, *x.shape), that is ``grad @ dy/dx``,
or a tuple of those with respect to the first two or three. A gradient that not every call needs may be returned as a
function without arguments. For a call that returns several tensors, ``y`` and ``grad`` are tuples, with None for
outputs that lead nowhere.

A rule may come with a secant, which pulls back through a matrix J(x0, x) with ``J (x - x0) = f(x) - f(x0)`` exactly.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.autodiff.rules.rule import Rule, Secant, Tokens

Pull = TypeVar("Pull", bound=Callable[..., Any])

_rules: dict[Any, Rule] = {}
_layers: set[type] = set()
# What depends on its input by number only: autograd passes no gradient, either.
CONSTANTS: set[Any] = set()


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def register_jacobian(
    *calls: Any,
    keeps_sums: Callable[..., bool] = _never,
    secant: Secant = None,
    needs: str = "all",
    tokens: Tokens = None,
    relevance: str | None = None,
    **facts: Any,
) -> Callable[[Pull], Pull]:
    """Register the closed-form Jacobian of layer classes or torch functions.

    The rule of a layer takes ``(layer, x, y, grad)``; the rule of a function takes the function's own arguments, and
    ``y`` and ``grad`` as keyword arguments::

        @register_jacobian(Swish)
        def swish(layer, x, y, grad):
            s = torch.sigmoid(x)
            return grad * (s + y * (1 - s))

        @register_jacobian(torch.special.erf)
        def erf(input, *, y, grad):
            return grad * 2 / math.sqrt(math.pi) * torch.exp(-input**2)

    ``y`` is the output for the whole batch, and ``grad`` is the derivative of K targets with respect to it, shape
    ``(K, *y.shape)``. The rule returns ``grad @ dy/dx``, shape ``(K, *x.shape)``. Tensors have the dtype of ``grad``,
    float32 or better. For a layer called with several tensors, ``x`` is a tuple of them, and the rule returns a tuple.
    The rule of a layer also applies to subclasses, unless they define their own ``forward``.

    Args:
        *calls: module classes, or functions and tensor methods of torch.
        keeps_sums: a function of the same arguments and ``y`` that returns whether the gradient's sum over the
            positions of a channel is the same before and after the layer, as for pooling; the weights of a map then
            need no pullback.
        secant: needed for maps that add up: how to pull back through a matrix J with ``J (x - x0) = f(x) - f(x0)``.
            ``"linear"``: the step is affine in each single argument, so that the rule at the midpoint of x0 and x is
            exact; ``"elementwise"``: it works on every number separately, so that (y - y0) / (x - x0) is exact; or a
            callable with the arguments of the rule and, as keyword arguments, ``y``, ``grad`` and ``base``, the call at
            the baseline: ``base.args`` in the order of the rule's arguments (for a layer, ``(layer, x0)``),
            ``base.kwargs`` and ``base.y``. A rule that itself takes ``base`` (None: the derivative) serves as both.
            None: the step has no secant, and such maps raise an error.
        needs: which tensors of the call the derivative uses, so that no others are kept: ``"all"``, ``"inputs"``,
            ``"y"``, ``"others"`` (for each argument, the other arguments, as for a product) or ``"nothing"``.
        tokens: for steps that treat the tokens of a sequence separately: a function of a dimension of the output and
            the rule's arguments without ``grad``. It returns the dimension of the first argument that has the same
            tokens, or a list with one for every argument (None: all tokens share it), or None if tokens are mixed.
            Elementwise steps do not need it.
        relevance: how :class:`RelevanceCAM` distributes relevance: ``"kept"``: number by number, the default for
            elementwise steps; ``"moved"``: like the gradient, for steps that only move numbers; ``"shared"``: in
            proportion to what positive inputs contribute, the default for torch's linear functions.
        **facts: further properties of torch's functions: see ``Rule``.

    Returns:
        A decorator that returns the rule unchanged.

    Raises:
        TypeError: no call is given, or one that is neither a module class nor a function.
        ValueError: ``secant``, ``needs`` or ``relevance`` has an unknown value.

    Example:
        >>> class Square(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x**2
        >>> @register_jacobian(Square, secant="elementwise")
        ... def square(layer, x, y, grad):
        ...     return grad * 2 * x
    """
    for call in calls or (None,):
        if not callable(call) or isinstance(call, nn.Module) or (isinstance(call, type) and not _is_layer(call)):
            raise TypeError(
                "register_jacobian takes layer classes and torch functions, as in @register_jacobian(nn.ReLU), got "
                f"{call!r:.80}"
            )

    for name, given, known, other in (
        ("secant", None if callable(secant) else secant, ("linear", "elementwise"), ", a callable"),
        ("needs", needs, ("all", "inputs", "y", "others", "nothing"), ""),
        ("relevance", relevance, ("kept", "moved", "shared", "weighted", "divided"), ""),
    ):
        if given is not None and given not in known:
            raise ValueError(f"{name} must be {', '.join(map(repr, known))}{other} or None, got {given!r}")
    if relevance is None and secant == "elementwise":
        relevance = "kept"
    elif relevance is None and secant == "linear" and not any(map(_is_layer, filter(inspect.isclass, calls))):
        relevance = "shared"
    affine = None if secant == "linear" else ()

    def register(pull: Pull) -> Pull:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(pull).parameters
        parameters = tuple(p.name for p in signature.values() if p.kind in kinds)
        both = pull if secant is None and "base" in signature else secant
        known = {"affine": affine, "relevance": relevance, "tokens": tokens} | facts
        _rules.update(dict.fromkeys(calls, Rule(pull, keeps_sums, parameters, both, needs, **known)))
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
    """Return all of torch's functions and tensor methods with these names, and their in-place versions."""
    places = (torch, torch.Tensor, F, torch.special)
    found = [getattr(place, name + end, None) for name in names for end in ("", "_") for place in places]
    return [function for function in found if callable(function)]


def elementwise(*calls: Any, secant: Secant = "elementwise", needs: str = "inputs") -> Callable[[Pull], Pull]:
    """Register ``slope(*arguments, y)``, the derivative f'(x) of a function that works on every number separately."""

    def register(slope: Pull) -> Pull:
        def pull(*args: Any, y: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
            return grad * slope(*args, **kwargs, y=y)

        pull.__signature__ = inspect.signature(slope)  # type: ignore[attr-defined]
        pull.__module__ = slope.__module__
        register_jacobian(*calls, secant=secant, needs=needs)(pull)
        return slope

    return register


def constant(*calls: Any) -> None:
    """Declare that functions have no derivative with respect to their arguments, as for ``detach``."""
    CONSTANTS.update(calls)


def of_shape(call: Any) -> bool:
    """Return whether what a function without a gradient returns depends on shape, dtype and device alone."""
    name = getattr(call, "__name__", "")
    if name == "__get__":  # a property, such as .shape
        return call not in CONSTANTS
    return name in _OF_SHAPE or (name.startswith("is_") and name != "is_nonzero")


_OF_SHAPE = {
    *("__len__", "dim", "element_size", "get_device", "ndimension", "nelement", "numel", "size", "storage_offset"),
    *("stride", "type", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty"),
}


def unbroadcast(grad: Tensor, x: Any) -> Tensor:
    """Sum grad (K, ...) over the dimensions along which x was broadcast: (K, *x.shape)."""
    extra = grad.dim() - 1 - x.dim()
    if extra:
        grad = grad.flatten(1, extra).sum(1) if extra > 1 else grad.sum(1)
    repeated = [dim + 1 for dim in range(x.dim()) if x.shape[dim] == 1 and grad.shape[dim + 1] != 1]
    return grad.sum(repeated, keepdim=True) if repeated else grad


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return a quotient that is 0 where the denominator is."""
    return torch.where(denominator == 0, 0.0, numerator / torch.where(denominator == 0, 1.0, denominator))


def dims_of(input: Tensor, dim: Any) -> list[int]:
    """Return the dimensions that a reduction names, in order and from the front; None, or none: all."""
    dims = range(input.dim()) if dim is None or dim in ((), []) else [dim] if isinstance(dim, int) else dim
    return sorted(d % input.dim() for d in dims)


def with_dims(grad: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Return the gradient (K, ...) of a reduction over dims with these restored, of size 1, if they were dropped."""
    for dim in () if keepdim else dims:
        grad = grad.unsqueeze(dim + 1)
    return grad
