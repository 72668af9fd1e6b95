"""The walk back along a tape, one rule or one secant a step, which goes no further than a question needs.

Near the target layer many steps need no pullback for what is asked: sums over positions pass pooling as they are, and
products with the activations pass new shapes. If steps treat every token of a sequence separately, a gradient that is
zero except at some tokens stays so; one summed over tokens is pulled back as one token through steps that are linear
and the same for all; and the contributions of a token, ``sum_t J_t (x_t - x0_t)``, are the same before and after.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.path.foreign import misfit, verify
from pytorch_grad_cam_pcasvm.path.secants import PathStart, through_secant
from pytorch_grad_cam_pcasvm.rules.cotangents import Cotangent, Part, Shared, added, cotangent
from pytorch_grad_cam_pcasvm.rules.rule import Rule
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, NoClosedFormError
from pytorch_grad_cam_pcasvm.tape.step import Ref, Step, TokenRange, operation, values_in
from pytorch_grad_cam_pcasvm.tape.tape import Tape


class Pullback:
    """The derivatives of K targets with respect to activations, or their secants from a start.

    Attributes:
        whole: the cotangent of the activations, in the network's own layout.
    """

    whole: Cotangent

    def __init__(self, whole: Cotangent) -> None:
        self.whole = whole

    def dense(self) -> Tensor:
        """Return the derivatives, shape (K, *activations.shape)."""
        return self.whole.dense()

    def arranged(self, by: Callable[[Tensor], Tensor]) -> Cotangent:
        """Return the derivatives as a layout arranges them."""
        return Cotangent(by(self.dense()))

    def sums(self) -> Tensor:
        """Return the sum over the positions of every channel, shape (K, N, T), for activations (N, T, ...)."""
        return self.whole.over_positions()

    def times(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the products with x, summed over dimensions, which fall away: (K, ...)."""
        return self.whole.times(x, dims)

    def token_sums(self, dim: int, start: int, length: int) -> Tensor:
        """Return the sum over some tokens, with one in their place, shape (K, ...).

        Args:
            dim: dimension of the tokens in the activations.
            start: the first of them.
            length: their number.
        """
        return self.whole.narrow(dim, start, length).sum([dim])

    def contributions(self, change: Tensor, dims: tuple[int, int]) -> Tensor:
        """Return the secants times the change, summed over all but images and tokens, shape (K, N, L).

        Args:
            change: of the activations from the start of these secants.
            dims: dimensions of images and of tokens in the activations.
        """
        return self.whole.along(change, *dims)


# Not jacobian="auto", which uses autograd where a path is refused as it is recorded.
AUTOGRAD = "use autograd on the path, as ClosedFormGradCAM(net, [layer], jacobian='autograd')"


class TapePullback(Pullback):
    """The pullback of K targets along a tape.

    Args:
        tape: the path.
        output_gradients: for every tensor of its output the derivatives of K targets, (K, *its shape), or None.
        name: of the target layer.
        start: of secants; None: gradients.
        heads: keep the heads of the first attention apart, as so many targets in place of each.
    """

    def __init__(
        self,
        tape: Tape,
        output_gradients: Sequence[Tensor | None],
        name: str,
        start: PathStart | None = None,
        *,
        heads: bool = False,
    ) -> None:
        tape.check_constants()
        self.tape, self.start = tape, start
        self.root = tape.roots[name]
        self.value = tape.values[self.root]
        self.steps, self.path = tape.following(self.root)
        # What other branches bring changes from the start, too.
        self.smooth = self.path if start is None else tape.following(*start.roots)[1]
        self.cotangents: dict[int, list[Cotangent]] = {}
        self.like = next(seed for seed in output_gradients if seed is not None)
        self.count = len(self.like)
        self._verify()
        self.attention = self._first_attention() if heads else None
        for index, seed in zip(tape.outputs, output_gradients, strict=True):
            if index in self.path and seed is not None:
                self._add_cotangent(index, Cotangent(seed))

    @cached_property
    def whole(self) -> Cotangent:  # type: ignore[override]
        """The cotangent of the activations."""
        return self._behind(lambda step, after: False)

    def sums(self) -> Tensor:
        """Return the sum over the positions of every channel, shape (K, N, T)."""
        rows, channels = self.value.shape[:2]

        def keeps(step: Step, after: Tensor) -> bool:
            # What gives all numbers back in their order has the channels still, though it may not show them.
            has_channels = after.shape[:2] == (rows, channels) or after.dim() == 2
            # From a start only sums of linear steps are kept.
            linear = step.rule is not None and step.rule.secant == "linear"
            return has_channels and (self.start is None or linear) and self.tape.keeps_sums(step)

        pulled = self._behind(keeps)
        if pulled.shape[:2] != (rows, channels):
            pulled = pulled.view((rows, channels, math.prod(pulled.shape) // (rows * channels)))
        return pulled.over_positions()

    def times(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the products with x, summed over dimensions, which fall away: (K, ...)."""
        return self._behind(lambda step, after: self.tape.keeps_numbers(step)).view(x.shape).times(x, dims)

    def _behind(self, keeps: Callable[[Step, Tensor], bool]) -> Cotangent:
        """Return the cotangent behind the first steps of a line that keep the property in question."""
        line, inside = [self.root], []
        for step in self.tape.line(self.root, self.steps):
            if step.first != Ref(line[-1]) or not keeps(step, self.tape.values[step.output]):
                break
            line.append(step.output)
            inside.append(step)
        self._walk_to(inside)
        if any(index in self.cotangents for index in line[:-1]):  # not all of it has come in at the end of the line
            self._walk_to([])
        index = next((index for index in (line[-1], self.root) if index in self.cotangents), None)
        if index is None:  # what follows does not look at it
            return Cotangent(self.like.new_zeros(()).expand(self.count, *self.value.shape))
        return reduce(added, self.cotangents[index])

    def token_sums(self, dim: int, start: int, length: int) -> Tensor:
        """Return the sum over some tokens, with one in their place, shape (K, ...)."""
        inside, axes = self._region({self.root: (dim,)}, linear=True)
        self._walk_to(inside)
        sums: dict[int, Tensor] = {}

        def take(index: int, grad: Tensor) -> None:
            sums[index] = sums[index] + grad if index in sums else grad

        for index, parts in self.cotangents.items():
            (own,) = axes[index]
            for part in parts:
                if part.reaches(own, start, length):
                    take(index, part.narrow(own, start, length).sum([own]))
        for step in reversed(inside):
            outputs = [None if output is None else sums.pop(output, None) for output in step.outputs]
            if any(output is not None for output in outputs):
                (own,) = axes[next(output for output in step.outputs if output in axes)]
                dims = self._tokens(step, own)
                assert dims is not None  # or it would not be inside
                tokens = TokenRange(dims, own, 0, 1)
                for index, part in self._pair_cotangents(step, self._pull_arguments(step, outputs, tokens), tokens):
                    assert isinstance(part, Part)
                    take(index, part.inner.dense())
        if self.root in sums:
            return sums[self.root]
        return self.like.new_zeros(self.count, *self.value.narrow(dim, 0, 1).shape)

    def contributions(self, change: Tensor, dims: tuple[int, int]) -> Tensor:
        """Return the secants times the change, summed over all but images and tokens, shape (K, N, L)."""
        assert self.start is not None
        inside, axes = self._region({self.root: dims})
        self._walk_to(inside)
        total = self.like.new_zeros(self.count, *(self.value.shape[dim] for dim in dims))
        for index, parts in self.cotangents.items():
            step = self.tape.values[index] - self.start.values[index]
            for part in parts:
                total = total + part.along(step, *axes[index])
        return total

    def _region(
        self, axes: dict[int, tuple[int, ...]], *, linear: bool = False
    ) -> tuple[list[Step], dict[int, tuple[int, ...]]]:
        """Return the steps around the root that treat every token separately, and where their values have them.

        Args:
            axes: dimensions of the root, which are followed.
            linear: only those that are linear, and the same for all tokens.
        """
        inside = []
        for step in self.steps:
            inputs = [index for index in step.inputs if index in self.smooth]
            if step.rule is None or any(index not in axes for index in inputs):
                continue
            if not any(index in step.inputs for index in step.outputs):
                followed = [
                    self._followed(step, step.rule, {index: axes[index][number] for index in inputs}, linear)
                    for number in range(len(axes[self.root]))
                ]
                if None not in followed:
                    dims = tuple(dim for dim in followed if dim is not None)
                    axes.update({output: dims for output in step.outputs if output is not None})
                    inside.append(step)
        return inside, axes

    def _followed(self, step: Step, rule: Rule, axes: dict[int, int], linear: bool) -> int | None:
        """Return the dimension of a step's outputs that is the given one of each of its inputs."""
        on_path = [isinstance(item, Ref) and item.index in axes for item in step.arguments]
        for dim in range(self.tape.recorded(step).y.dim()):
            dims = self._tokens(step, dim)
            if dims is not None and all(
                own == axes[item.index] for item, own, on in zip(step.arguments, dims, on_path, strict=True) if on
            ):
                return dim if not linear or rule.same_for_all(dims, on_path) else None
        return None

    def _tokens(self, step: Step, dim: int) -> list[int | None] | None:
        """Return the dimension in which each argument of a step has the tokens of its output's; None: it mixes them."""
        if step.rule is None or any(isinstance(item, Ref | Tensor) for item in step.options.values()):
            return None
        return step.rule.find_tokens(dim, self.tape.recorded(step))

    def _walk_to(self, inside: Sequence[Step]) -> None:
        """Pull back through all steps that are not ``inside``."""
        ids = set(map(id, inside))
        for step in reversed(self.steps):
            if id(step) not in ids and any(output in self.cotangents for output in step.outputs):
                self._pull_step(step)
        self.steps = [step for step in self.steps if id(step) in ids]

    def _add_cotangent(self, index: int, part: Cotangent) -> None:
        """Add a cotangent of a value; unexpanded products stay apart."""
        parts = self.cotangents.setdefault(index, [])
        if type(part) is Cotangent and parts and type(parts[0]) is Cotangent:
            parts[0] = added(parts[0], part)
        else:
            parts.insert(0 if type(part) is Cotangent else len(parts), part)

    def _pull_step(self, step: Step) -> None:
        """Pull the cotangents of a step's outputs back to its inputs."""
        cotangents = [None if output is None else self.cotangents.pop(output, None) for output in step.outputs]
        outputs = [None if parts is None else reduce(added, parts) for parts in cotangents]
        tokens, one = None, outputs[0]
        if step.single and isinstance(one, Part):
            dims = self._tokens(step, one.dim)
            if dims is not None:
                tokens, outputs = TokenRange(dims, *one.place), [one.inner]
        pulled = self._pull_arguments(step, outputs, tokens)
        for index, part in self._pair_cotangents(
            step, self._split_heads(step, pulled) if step is self.attention else pulled, tokens
        ):
            self._add_cotangent(index, part)

    def _pull_arguments(self, step: Step, outputs: Sequence[Any], tokens: TokenRange | None = None) -> tuple[Any, ...]:
        """Return the cotangents of a step's arguments by its rule, or by its secant; refuse a step without a rule."""
        rule = step.rule
        if rule is None:
            raise no_rule(self.tape, step)
        grads = tuple(output.dense() if isinstance(output, Cotangent) else output for output in outputs)
        dtype = next(grad for grad in grads if grad is not None).dtype
        here = step.resolve(self.tape.values, self.path, dtype, tokens)
        pull = partial(rule.pulled, here)
        if self.start is not None:
            base = step.resolve(self.start.values, self.path, dtype, tokens, here)
            pull = partial(through_secant, step, here, base, self.smooth)
        one = outputs[0]
        if rule.sums_tokens and isinstance(one, Cotangent) and here.args[0].dim() == 3:
            same = [dim for dim in one.same if one.shape[dim] > 1 and self._tokens(step, dim) is not None]
            if same:
                return (Shared(partial(pull, grads[0]), lambda grad, dim: pull(grad, summed=dim), one),)
        try:
            pulled = pull(grads[0] if step.single else grads)
        except NoClosedFormError as error:
            raise self._refused(f"{self._name_place(step)}{error.reason}", *error.ways_out) from None
        except Exception as error:
            if not rule.foreign and not isinstance(error, NotImplementedError | TypeError):
                raise
            raise self._refused(
                f"{self._name_place(step)}{misfit(step, error, secant=self.start is not None)}"
            ) from error
        return pulled if isinstance(pulled, tuple) and not step.is_layer else (pulled,)

    def _verify(self) -> None:
        """Compare the rules of the user's with autograd, each at its first step, whose numbers are all kept."""
        for step in self.steps:
            rule, key = step.rule, (step.rule, self.start is None)
            if rule is None or not rule.foreign or key in self.tape.verified:
                continue
            self.tape.verified.add(key)
            try:
                here = step.resolve(self.tape.values, self.path, self.like.dtype)
                verify(self.tape, step, self.path, here, None)
                if self.start is not None and rule.secant is not None:
                    base = step.resolve(self.start.values, self.path, self.like.dtype, None, here)
                    verify(self.tape, step, self.path, here, base)
            except NoClosedFormError as error:
                raise self._refused(f"{self._name_place(step)}{error.reason}", *error.ways_out) from None
            except Exception:
                pass  # which the walk refuses

    def _pair_cotangents(
        self, step: Step, pulled: tuple[Any, ...], tokens: TokenRange | None = None
    ) -> Iterator[tuple[int, Cotangent]]:
        """Yield the values that a step depends on, and their cotangents."""
        args = step.operands
        dims = [None] * len(args) if tokens is None else tokens.dims[-len(args) :]
        for argument, part, dim in zip(args, pulled, dims, strict=False):
            if tokens is not None and dim is not None and isinstance(argument, Ref) and part is not None:
                if argument.index in self.path:
                    # One that nobody asks for, as that of a class token in a sum over patches, is not computed.
                    shape = self.tape.values[argument.index].shape
                    yield argument.index, Part(partial(cotangent, part), shape, dim, tokens.start, tokens.length)
            else:
                yield from self._checked(step, argument, part)
        for argument in (*args[len(pulled) :], *step.options.values()):
            if any(ref.index in self.path for (ref,) in values_in(argument)):
                raise self._refused(
                    f"{self._name_place(step)}an argument of {step.name} depends on the target layer, and its rule "
                    "has no gradient for it (a computed weight?)",
                    "choose a later target layer",
                )

    def _checked(self, step: Step, argument: Any, part: Any) -> Iterator[tuple[int, Cotangent]]:
        """Yield the cotangent of an argument, a value of the tape or a list of such; refuse one of another shape."""
        if isinstance(argument, list | tuple):
            if any(ref.index in self.path for (ref,) in values_in(argument)):
                for item, of_item in zip(argument, part, strict=True):
                    yield from self._checked(step, item, of_item)
        elif isinstance(argument, Ref) and argument.index in self.path and part is not None:
            part = part() if callable(part) else part
            expected = self.tape.values[argument.index].shape
            actual = part.shape if isinstance(part, Cotangent) else part.shape[1:] if isinstance(part, Tensor) else None
            if actual != expected or (isinstance(part, Tensor) and len(part) != self.count):
                shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                expected = (self.count, *expected)  # type: ignore[assignment]
                raise self._refused(f"{self._name_place(step)}the rule of {step.name} returns {shape}, not {expected}")
            yield argument.index, cotangent(part)

    def _refused(self, reason: str, *ways_out: str) -> NoClosedFormError:
        """Return a refusal that shows the tape, and offers autograd to gradients; it knows no secants."""
        error = NoClosedFormError(*(advice if self.start is None else _as_given)(reason, *ways_out))
        error.tape = str(self.tape)
        return error

    def _name_place(self, step: Step) -> str:
        where = self.tape.name_module(step.where)
        return f"in {where!r}: " if where else ""

    def _first_attention(self) -> Step:
        rules = {step: step.rule for step in self.steps if step.rule is not None}
        for step, rule in rules.items():
            if rule.separates_heads:
                return step
        way = "load Hugging Face models with attn_implementation='sdpa'; for timm's Swin set TIMM_FUSED_ATTN=2"
        raise NoClosedFormError(
            "heads can be separated in torch's scaled_dot_product_attention only, and there is none after the target "
            "layer",
            way if any(rule.attends for rule in rules.values()) else "choose the norm before an attention",
            "leave heads=False",
        )

    def _split_heads(self, attention: Step, pulled: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the cotangents of attention's arguments, head by head: K targets become K times as many."""
        if self.cotangents:
            raise NoClosedFormError(
                "not everything after the target layer goes through one attention whose heads could be separated",
                "choose the norm before the attention of the last block",
            )
        shape = self.tape.values[attention.output].shape
        if len(shape) != 4:
            raise NoClosedFormError(
                f"heads and images cannot be told apart in attention's output {tuple(shape)}", "leave heads=False"
            )
        heads = shape[-3]
        self.count *= heads

        def split(part: Any) -> Tensor:
            grad = cotangent(part).dense()
            chosen = torch.eye(heads, dtype=grad.dtype, device=grad.device)[:, None, :, None, None]
            return (grad.unsqueeze(1) * chosen).flatten(0, 1)

        return tuple(None if part is None else partial(split, part) for part in pulled[:3])


def no_rule(tape: Tape, step: Step) -> NoClosedFormError:
    """Return the refusal of a step without a rule, which shows the tape."""
    where = tape.name_module(step.where)
    error = NoClosedFormError(
        *advice(
            f"the path from the target layer to the features goes through {step.name}"
            f"{f' of {where!r}' if where else ''}, which has no closed-form rule",
            "choose a later target layer",
            "register its Jacobian with @register_jacobian",
        )
    )
    if not operation(step.function).differentiable:
        error = NoClosedFormError(
            f"there is no gradient of {step.name}{f' in {where!r}' if where else ''}",
            "explain the network as it was before it was quantised",
        )
        error._autograd_helps = False
    error.tape = str(tape)
    return error


def advice(reason: str, *ways_out: str) -> list[str]:
    """Return the arguments of a NoClosedFormError, with the way out that every path has."""
    return [reason, *ways_out, Fix(AUTOGRAD, "jacobian")]


def _as_given(*words: str) -> list[str]:
    return list(words)
