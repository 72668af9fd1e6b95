"""The registry: which rule pulls a gradient back through which operation, torch function or module class.

A rule gets the arguments of a call as they were given, and as keyword arguments its output ``y`` and ``grad``, the
derivative of K targets with respect to ``y``, of shape (K, *y.shape): targets come first, and ``y`` holds the whole
batch. It returns the derivative with respect to the first argument, of shape (K, *x.shape), that is ``grad @ dy/dx``,
or a tuple of those with respect to the first two or three. A gradient that not every call needs may be returned as a
function without arguments. For a call that returns several tensors, ``y`` and ``grad`` are tuples, with None for
outputs that lead nowhere.

A rule may come with a secant, which pulls back through a matrix J(x0, x) with ``J (x - x0) = f(x) - f(x0)`` exactly.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import handle_torch_function

from pytorch_grad_cam_pcasvm.rules.rule import Rule, Secant, Tokens
from pytorch_grad_cam_pcasvm.runtime.torch_private import OpOverload, OpOverloadPacket, is_function_mode_on

Pull = TypeVar("Pull", bound=Callable[..., Any])

_rules: dict[Any, Rule] = {}
_functions: dict[Any, Any] = {}  # what is called in Python as a whole, and what its rule is registered for
whole_of = _functions.get  # for a function that is one step; or None
# What depends on its input by number only: autograd passes no gradient, either.
_constants: set[Any] = set()


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
    """Register the closed-form Jacobian of layer classes, torch functions, operations or an ``autograd.Function``.

    The rule of a layer takes ``(layer, x, y, grad)``; the rule of a function, of an operation such as
    ``torch.ops.aten.erfinv.default`` or of an ``autograd.Function`` takes its own arguments, without ``ctx``, and
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
    The rule of a layer also applies to subclasses, unless they define their own ``forward``. In every explanation the
    first step of a rule is compared with autograd, and with its secant's sum; an error names the rule.

    Args:
        *calls: module classes, functions and tensor methods of torch, operations, or subclasses of
            ``autograd.Function``.
        keeps_sums: a function of the same arguments and ``y`` that returns whether the gradient's sum over the
            positions of a channel is the same before and after the layer, as for pooling; the weights of a map then
            need no pullback.
        secant: needed for maps that add up: how to pull back through a matrix J with ``J (x - x0) = f(x) - f(x0)``.
            ``"linear"``: the step is affine in each single argument, so that the rule at the midpoint of x0 and x is
            exact; ``"elementwise"``: it works on every number separately, so that (y - y0) / (x - x0) is exact; or a
            callable with the arguments of the rule and, as keyword arguments, ``y``, ``grad`` and ``base``, the call at
            the start: ``base.args`` in the order of the rule's arguments (for a layer, ``(layer, x0)``),
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
        TypeError: no call is given, or one that cannot be seen, as a function of your own; or ``keeps_sums`` or
            ``tokens`` is no function.
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
        if not callable(call) or isinstance(call, nn.Module) or (isinstance(call, type) and not _is_class(call)):
            raise TypeError(
                "register_jacobian takes layer classes, torch functions and operations, as in "
                f"@register_jacobian(nn.ReLU), got {call!r:.80}"
            )

        _refuse_unseen(call)
    for name, claim in (("keeps_sums", keeps_sums), ("tokens", tokens)):
        if claim is not None and not callable(claim):
            raise TypeError(f"{name} must be a function of the rule's arguments, got {claim!r}")
    for name, value, allowed, other in (
        ("secant", None if callable(secant) else secant, ("linear", "elementwise"), ", a callable"),
        ("needs", needs, ("all", "inputs", "y", "others", "nothing"), ""),
        ("relevance", relevance, ("kept", "moved", "shared", "weighted", "divided"), ""),
    ):
        if value is not None and value not in allowed:
            raise ValueError(f"{name} must be {', '.join(map(repr, allowed))}{other} or None, got {value!r}")
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
        fields = {"affine": affine, "relevance": relevance, "tokens": tokens} | facts
        _rules.update(dict.fromkeys(calls, Rule(pull, keeps_sums, parameters, both, needs, **fields)))
        for call in calls:
            if isinstance(call, type) and issubclass(call, Function):
                _be_seen(call)
            elif not isinstance(call, type | OpOverload | OpOverloadPacket):
                _functions[call] = call
        return pull

    return register


def _refuse_unseen(call: Any) -> None:
    """Refuse a call that happens where no mode sees it."""
    owner = getattr(call, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, Function):
        raise TypeError(f"register {owner.__name__} itself, not {owner.__name__}.{call.__name__}")
    if call in (nn.Module, Function):
        raise TypeError(f"register a subclass of {call.__name__}")
    own = isinstance(call, FunctionType) and call.__module__.partition(".")[0] not in _LIBRARIES
    if own and "handle_torch_function" not in call.__code__.co_names:
        raise TypeError(
            f"{call.__name__} is a function of your own, whose calls cannot be seen: call it in an nn.Module, and "
            "register that, as in @register_jacobian(Swish)"
        )


_LIBRARIES = {"torch", "torchvision", __name__.partition(".")[0]}


def _is_layer(call: type) -> bool:
    return issubclass(call, nn.Module)


def _is_class(call: type) -> bool:
    return issubclass(call, nn.Module | Function)


def _be_seen(function: type[Function]) -> None:
    """Let modes see the calls of an ``autograd.Function``, as they see calls of torch's own functions."""
    if function in _functions.values():
        return

    def run(*args: Any, **kwargs: Any) -> Any:
        return super(function, function).apply(*args, **kwargs)  # type: ignore[misc]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls is function and is_function_mode_on():  # not a subclass, which is another function
            return handle_torch_function(run, args, *args, **kwargs)
        return super(function, cls).apply(*args, **kwargs)  # type: ignore[misc]

    _functions[run] = function
    function.apply = classmethod(apply)


def find_rule(call: Any) -> Rule | None:
    """Return the rule of an operation, a function or a registered class, or None."""
    rule = _rules.get(call)
    return _rules.get(call.overloadpacket) if rule is None and isinstance(call, OpOverload) else rule


def is_constant(call: Any) -> bool:
    """Return whether an operation passes no gradient."""
    return call.overloadpacket in _constants if isinstance(call, OpOverload) else call in _constants


def with_rules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers of a network that have a rule of their own."""
    modules = list(modules)
    classes = {cls for cls in set(map(type, modules)) if not _rules.keys().isdisjoint(cls.__mro__)}
    return [module for module in modules if type(module) in classes and layer_kind(module) is not None]


def layer_kind(layer: nn.Module) -> type | None:
    """Return the registered class whose rule serves a layer, or None."""
    cls = type(layer)
    for base in cls.__mro__:
        if base in _rules:
            own = "forward" in vars(layer) or getattr(cls, "forward", None) is not getattr(base, "forward", None)
            return None if own else base
    return None


def aten(*names: str) -> list[Any]:
    """Return operations of ATen by their names, all overloads of one, or one as in ``"sum.dim_IntList"``."""
    return [_find_overload(*name.split(".")) for name in names]


def _find_overload(name: str, *overload: str) -> Any:
    packet = getattr(torch.ops.aten, name)
    return getattr(packet, *overload) if overload else packet


def register_slope(*calls: Any, slope: Callable[..., Tensor], secant: Secant = "elementwise", needs: str) -> None:
    """Register ``slope(x, y, *arguments)``, the derivative f'(x) of operations that work on every number separately."""

    def pull(input: Tensor, *args: Any, y: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        return grad * slope(input, y, *args, **kwargs)

    register_jacobian(*calls, secant=secant, needs=needs)(pull)


def constant(*calls: Any) -> None:
    """Declare that operations have no derivative with respect to their arguments, as for ``detach``."""
    _constants.update(calls)


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


def list_dims(input: Tensor, dim: Any) -> list[int]:
    """Return the dimensions that a reduction names, in order and from the front; None, or none: all."""
    dims = range(input.dim()) if dim is None or dim in ((), []) else [dim] if isinstance(dim, int) else dim
    return sorted(d % input.dim() for d in dims)


def with_dims(grad: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Return the gradient (K, ...) of a reduction over dims with these restored, of size 1, if they were dropped."""
    for dim in () if keepdim else dims:
        grad = grad.unsqueeze(dim + 1)
    return grad
