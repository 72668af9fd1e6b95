"""A rule: all that is known of a torch function or a module class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Secant: TypeAlias = str | Callable[..., Any] | None
Tokens: TypeAlias = Callable[..., int | Sequence[int | None] | None] | None


@dataclass(frozen=True)
class Call:
    """The call of a step with numbers: the images', or a start's, which is a rule's ``base``.

    Attributes:
        args: its arguments in the order of the rule's; for a layer, the layer and its inputs. Those that are the same
            at the start are the same objects.
        kwargs: its other arguments.
        y: its output; of several a tuple, with None for those that have no gradient.
        eps: at a start, machine epsilon of the dtype that the network computes in.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    y: Any
    eps: float = 0.0


@dataclass(frozen=True)
class Rule:
    """The closed-form Jacobian of a function or layer, and its further properties.

    Attributes: those of :func:`register_jacobian`, and

        pull: returns the gradients.
        parameters: names of the rule's positional parameters, in order.
        affine: positions of the arguments in which the step is affine if nothing else changes; None: in all.
        keeps_numbers: given the arguments and ``y``, whether it gives all of its numbers back in their order.
        sums_tokens: whether the rule, called with the dimension of tokens as ``summed`` and a gradient (K, N, 1, D)
            that all tokens share, gives the sum over the tokens of (N, L, D), shape (K, N, 1, D).
        attends: names of the arguments that it makes attention weights of.
        by_image: whether, or given the arguments and ``y`` whether, images, which come first, are treated separately.
        holds: for which arguments it is right, where not for all; calls with others are recorded by their parts.
        separates_heads: whether its third last dimension is one of heads, which can be kept apart.
    """

    pull: Callable[..., Any]
    keeps_sums: Callable[..., bool]
    parameters: tuple[str, ...]
    secant: Secant = None
    needs: str = "all"
    tokens: Tokens = None
    relevance: str | None = None
    affine: tuple[int, ...] | None = ()
    keeps_numbers: Callable[..., bool] | None = None
    sums_tokens: bool = False
    attends: tuple[str, ...] = ()
    separates_heads: bool = False
    by_image: bool | Callable[..., bool] = False
    holds: Callable[..., bool] | None = None

    @property
    def is_by_number(self) -> bool:
        """Whether outputs are made number by number of inputs, broadcast to one another."""
        return self.tokens is by_number

    def same_for_all(self, dims: Sequence[int | None], on_path: Sequence[bool]) -> bool:
        """Return whether a step that treats tokens separately is linear, and the same for all of them.

        Args:
            dims: of the tokens in each argument.
            on_path: whether each argument depends on the target layer.
        """
        shared = sum(on_path) == 1 and all(on or dim is None for dim, on in zip(dims, on_path, strict=True))
        return self.secant == "linear" and (self.needs == "nothing" or (self.needs == "others" and shared))

    @cached_property
    def foreign(self) -> bool:
        """Whether it, or its secant, is user-defined."""
        own = __name__.partition(".")[0]
        parts = (self.pull, self.secant) if callable(self.secant) else (self.pull,)
        return any(str(getattr(part, "__module__", "")).partition(".")[0] != own for part in parts)

    def pulled(self, call: Call, grad: Any, base: Call | None = None, **options: Any) -> Any:
        """Return the result of the rule for a call, or of its secant from a start."""
        args, kwargs, y = call.args, call.kwargs | options, call.y
        if base is None:
            return self.pull(*args, **kwargs, y=y, grad=grad)
        if callable(self.secant):
            return self.secant(*args, **kwargs, y=y, grad=grad, base=base)
        if self.secant == "elementwise":
            place = int(isinstance(args[0], nn.Module))
            slope = self.pull(*args, **kwargs, y=y, grad=torch.ones_like(y).unsqueeze(0))
            slope = slope[0] if isinstance(slope, tuple) else slope
            slope = slope() if callable(slope) else slope
            return grad * quotient(args[place], y, base.args[place], base.y, slope[0], base.eps)
        if _changed(args, base.args) > 1:
            # Affine in each argument alone: what changes with one is to be taken where the others are half-way.
            args, y = mid(args, base.args), mid(y, base.y)
        return self.pull(*args, **kwargs, y=y, grad=grad)

    def find_tokens(self, dim: int, call: Call) -> list[int | None] | None:
        """Return the dimension in which each argument of a call has the tokens that its output has in ``dim``.

        Args:
            dim: dimension of the output.
            call: the call, with its first output.

        Returns:
            The dimensions, None for what all tokens share; or None if the step mixes tokens, or is unknown.
        """
        tokens, args, y = self.tokens, call.args, call.y
        if tokens is None:
            layer = isinstance(args[0], nn.Module)
            # Other arguments are broadcast as the function likes: PReLU's slopes lie along dimension 1.
            broadcasts = any(isinstance(x, Tensor) and x.shape != y.shape and x.numel() > 1 for x in args[1:])
            if self.secant != "elementwise" or broadcasts or (layer and not isinstance(args[1], Tensor)):
                return None
            tokens = by_number
        dims = tokens(dim, *args, y=y, **call.kwargs)
        if dims is None:
            return None
        return [*([dims] if isinstance(dims, int) else dims), *[None] * len(args)][: len(args)]


def mixes_images(rule: Rule, place: int, call: Call) -> bool:
    """Return whether a step may mix the images of one of its arguments, or puts them elsewhere."""
    dims = rule.find_tokens(0, call)
    if dims is not None and dims[place] == 0:
        return False
    separate = rule.by_image(*call.args, **call.kwargs, y=call.y) if callable(rule.by_image) else rule.by_image
    return place > 0 or not separate


def by_number(dim: int, *args: Any, y: Tensor, **kwargs: Any) -> list[int | None]:
    """Return where the arguments of a function that works number by number, broadcast, have an output's tokens."""

    def of(x: Any) -> int | None:
        own = dim - (y.dim() - x.dim()) if isinstance(x, Tensor) else -1
        return own if own >= 0 and x.shape[own] == y.shape[dim] > 1 else None

    return [of(x) for x in args]


def _changed(args: Sequence[Any], args0: Sequence[Any]) -> int:
    """Return how many arguments, or items of arguments, are others at the start."""
    return sum(
        _changed(one, other) if isinstance(one, list | tuple) else one is not other
        for one, other in zip(args, args0, strict=True)
    )


def mid(x: Any, x0: Any) -> Any:
    """Return the midpoint between numbers, a tensor or several, and the same at the start."""
    if isinstance(x, list | tuple):
        return type(x)(map(mid, x, x0))
    differ = x is not x0 and isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
    return torch.lerp(x, x0, 0.5) if differ else x


def take_first(base: Call | None, x: Tensor) -> Tensor:
    """Return the first argument of a call at the start; without one, as it is now."""
    return x if base is None else base.args[0]


def resolution(grad: Tensor, base: Call | None) -> float:
    """Return the machine epsilon that numbers of a call are known to."""
    return torch.finfo(grad.dtype).eps if base is None else base.eps


def quotient(x: Tensor, y: Tensor, x0: Tensor, y0: Tensor, slope: Tensor, eps: float | None = None) -> Tensor:
    """Return ``(y - y0) / (x - x0)``, or the slope at x where only rounding would be left of the quotient.

    ``eps``: machine epsilon that the numbers are known to; None: that of their dtype.
    """
    dx, dy, eps = x - x0, y - y0, torch.finfo(y.dtype).eps if eps is None else eps
    rounding = (dy - slope * dx).abs() <= 4 * eps * (y.abs() + y0.abs())
    # Where nothing changes any number is exact, but an infinite one, as that of sqrt at 0, would make NaN of the zeros.
    slope = torch.where((dx == 0) & ~slope.isfinite(), 0.0, slope)
    return torch.where((dx == 0) | rounding, slope, dy / dx)
