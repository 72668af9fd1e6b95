"""Tokens: what need not be computed for all of them if steps treat every token of a sequence separately.

A gradient that is zero except at some tokens, such as that of a selected class token, stays so: a :class:`Part`. A
gradient summed over tokens is pulled back as one token through steps that are linear and the same for all. And the
contributions of a token, ``sum_t J_t (x_t - x0_t)``, are the same before and after such steps: secants add up for each
token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from pytorch_grad_cam_pcasvm.autodiff.rules import arithmetic, attention, dense, norms, shapes, softmaxes
from pytorch_grad_cam_pcasvm.autodiff.rules.registry import Rule
from pytorch_grad_cam_pcasvm.autodiff.secants import BY_NUMBER
from pytorch_grad_cam_pcasvm.autodiff.tape import Ref, Step, Tape


@dataclass
class Part:
    """A gradient (K, *shape) that is zero outside some positions of one dimension.

    Attributes:
        make: returns the gradient at these positions.
        dim: the dimension of the value, counted without K.
        start: the first position.
        length: the number of positions.
        size: the size of the dimension.
    """

    make: Callable[[], Tensor]
    dim: int
    start: int
    length: int
    size: int

    @cached_property
    def grad(self) -> Tensor:
        """The gradient at these positions."""
        return self.make()

    def whole(self) -> Tensor:
        """Return the gradient with its zeros."""
        shape = list(self.grad.shape)
        shape[self.dim + 1] = self.size
        return self.added_to(self.grad.new_zeros(shape))

    def added_to(self, grad: Tensor) -> Tensor:
        """Add it to a gradient in place, and return that."""
        grad.narrow(self.dim + 1, self.start, self.length).add_(self.grad)
        return grad

    def summed(self, start: int, length: int) -> Tensor | None:
        """Return the sum over its positions within the given range, as a single position; None if there are none."""
        first, last = max(start, self.start), min(start + length, self.start + self.length)
        if last <= first:
            return None
        return self.grad.narrow(self.dim + 1, first - self.start, last - first).sum(self.dim + 1, keepdim=True)


def added(first: Tensor | Part, second: Tensor | Part) -> Tensor | Part:
    """Return the sum of two gradients of one value."""
    if isinstance(first, Part) and isinstance(second, Part):
        if (first.dim, first.start, first.length) == (second.dim, second.start, second.length):
            return replace(first, make=lambda: first.grad + second.grad)
        return second.added_to(first.whole())
    if isinstance(second, Part):
        return second.added_to(first.clone())  # type: ignore[union-attr]
    return first.added_to(second.clone()) if isinstance(first, Part) else first + second


def whole(grad: Tensor | Part) -> Tensor:
    """Return a gradient with any omitted zeros."""
    return grad.whole() if isinstance(grad, Part) else grad


def selected(tape: Tape, step: Step, grad: Tensor) -> Part | None:
    """Return the gradient of the value from which a step took consecutive positions; None if it did something else."""
    if not isinstance(step.first, Ref) or step.kwargs or len(step.inputs) != 1:
        return None
    shape, args = tape.values[step.first.index].shape, step.args
    index: Any
    if step.name in ("select", "narrow"):
        dim, index = args[1] % len(shape), args[2] if step.name == "select" else slice(args[2], args[2] + args[3])
    elif step.name == "__getitem__":
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        chosen = [place for place, item in enumerate(items) if type(item) is not slice or item != slice(None)]
        if len(chosen) != 1:
            return None
        dim, index = chosen[0], items[chosen[0]]
    else:
        return None
    if type(index) is int:
        return Part(lambda: grad.unsqueeze(dim + 1), dim, index % shape[dim], 1, shape[dim])
    if type(index) is not slice:
        return None
    start, stop, stride = index.indices(shape[dim])
    return Part(lambda: grad, dim, start, stop - start, shape[dim]) if stride == 1 and stop > start else None


def dims_of_arguments(tape: Tape, step: Step, rule: Rule, args: Sequence[Any], dim: int) -> list[int | None] | None:
    """Return the dimension in which each argument of a step has the tokens that its output has in ``dim``.

    Returns:
        The dimensions, None for what all tokens share; or None if the step mixes tokens, or is unknown.
    """
    if isinstance(step.function, type):  # a layer: what it does with its arguments is not known
        return None
    output = tape.values[next(index for index in step.outputs if index is not None)].shape
    sizes = [_shape(tape, item) for item in args]
    # Other arguments are broadcast as the function likes: PReLU's slopes lie along dimension 1.
    others = any(shape is not None and shape != output and math.prod(shape) > 1 for shape in sizes[1:])
    if rule.secant == "elementwise" and others:
        return None
    if rule.secant == "elementwise" or rule.pull in BY_NUMBER:
        return [None if shape is None else _broadcast(shape, output, dim) for shape in sizes]
    first = sizes[0]
    if first is None:
        return None
    of_first = _dim_of_first(rule.pull, step, args, first, output, dim)
    if of_first is None or (rule.pull not in _MIXING and any(isinstance(item, Ref) for item in args[1:])):
        return None
    dims: list[int | None] = [of_first, *[None] * (len(args) - 1)]
    if rule.pull is attention.attention and len(args) > 3 and sizes[3] is not None:
        mask = sizes[3]
        dims[3] = len(mask) - 2 if len(mask) > 1 and mask[-2] > 1 else None
    return dims


# Of these the other arguments have tokens of their own, which an output's token looks at.
_MIXING = (attention.attention, dense.matmul)


def _dim_of_first(
    pull: Callable[..., Any], step: Step, args: Sequence[Any], shape: Sequence[int], output: Sequence[int], dim: int
) -> int | None:
    """Return the dimension of the first argument that has the tokens of the output's ``dim``, or None."""
    last = len(output) - 1
    if pull in (shapes.copy, shapes.dropout):
        return dim
    if pull is dense.linear:
        return dim if dim < last else None
    if pull in (norms.layer_norm, norms.rms_norm):
        return dim if dim <= last - len(args[1]) else None
    if pull is softmaxes.softmax:
        along = args[1] if len(args) > 1 else None
        return dim if isinstance(along, int) and along % len(output) != dim else None
    if pull is shapes.transpose:
        first, second = (d % len(shape) for d in args[1:3])
        return {first: second, second: first}.get(dim, dim)
    if pull is shapes.permute:
        order = step.kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
        return order[dim] % len(shape)
    if pull is shapes.unbind:
        along = (args[1] if len(args) > 1 else 0) % len(shape)
        return dim if dim < along else dim + 1
    if pull is shapes.reshape:
        counts = [math.prod(output[:dim]), output[dim]]
        return next((d for d in range(len(shape)) if [math.prod(shape[:d]), shape[d]] == counts), None)
    if pull not in _MIXING or dim != last - 1 or len(shape) != len(output):
        return None
    special = (pull is attention.attention and (len(args) > 5 and args[5])) or "enable_gqa" in step.kwargs
    return None if special or step.kwargs.get("is_causal") else dim


def same_for_all_tokens(rule: Rule, step: Step) -> bool:
    """Return whether a step that treats tokens separately is linear, and the same for all of them."""
    if rule.pull in (arithmetic.add, arithmetic.sub):
        return True
    return rule.pull in (
        dense.linear,
        shapes.copy,
        shapes.dropout,
        shapes.reshape,
        shapes.permute,
        shapes.transpose,
        shapes.unbind,
    )


def _shape(tape: Tape, item: Any) -> Sequence[int] | None:
    item = tape.values[item.index] if isinstance(item, Ref) else item
    return item.shape if isinstance(item, Tensor) else None


def _broadcast(shape: Sequence[int], output: Sequence[int], dim: int) -> int | None:
    """Return the dimension of an argument that is broadcast to the output, or None where its numbers are repeated."""
    own = dim - (len(output) - len(shape))
    return own if own >= 0 and shape[own] == output[dim] and output[dim] > 1 else None


def cut(
    tape: Tape,
    step: Step,
    args: Sequence[Any],
    dims: Sequence[int | None],
    of_outputs: tuple[int, int, int],
    values: Mapping[int, Tensor] | None,
    smooth: set[int],
) -> tuple[Tape, Step, tuple[Any, ...], dict[int, Tensor], set[int]]:
    """Return a step as if there were only some of the tokens.

    Args:
        tape: the path.
        step: the step.
        args: its arguments as the rule takes them, with Refs.
        dims: of the tokens in each argument.
        of_outputs: dimension of the tokens in the outputs, the first token, and their number.
        values: those at the baseline, if there is one.
        smooth: the values that have a gradient.

    Returns:
        A tape of its values alone, the step on it, its arguments, the values at the baseline, and those that have a
        gradient.
    """
    _, start, length = of_outputs
    now: list[Tensor] = []
    then: dict[int, Tensor] = {}
    kept: set[int] = set()

    def placed(index: int, dim: int | None) -> Ref:
        def few(tensor: Tensor) -> Tensor:
            return tensor if dim is None else tensor.narrow(dim, start, length)

        now.append(few(tape.values[index]))
        if values is not None and index in values:
            then[len(now) - 1] = few(values[index])
        if index in smooth:
            kept.add(len(now) - 1)
        return Ref(len(now) - 1)

    given: list[Any] = []
    for item, dim in zip(args, dims, strict=True):
        if isinstance(item, Ref):
            given.append(placed(item.index, dim))
        else:
            given.append(item.narrow(dim, start, length) if isinstance(item, Tensor) and dim is not None else item)
    inputs = tuple(item.index for item in given if isinstance(item, Ref))
    outputs = tuple(None if index is None else placed(index, of_outputs[0]).index for index in step.outputs)
    return (
        Tape(values=now),
        replace(step, args=tuple(given), inputs=inputs, outputs=outputs),
        tuple(given),
        then,
        kept,
    )
