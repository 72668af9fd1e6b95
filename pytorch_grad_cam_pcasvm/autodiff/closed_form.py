"""The closed form: walking a tape backwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.utils._pytree import tree_leaves

from pytorch_grad_cam_pcasvm.autodiff import affine
from pytorch_grad_cam_pcasvm.autodiff.backward import arguments, pulled_back
from pytorch_grad_cam_pcasvm.autodiff.cotangents import multiplied, through_products, through_sums
from pytorch_grad_cam_pcasvm.autodiff.forward_pass import Pass
from pytorch_grad_cam_pcasvm.autodiff.lrp import relevance
from pytorch_grad_cam_pcasvm.autodiff.rules.registry import rule_of
from pytorch_grad_cam_pcasvm.autodiff.secants import Baseline
from pytorch_grad_cam_pcasvm.autodiff.tape import Ref, Step, Tape, has_gradient
from pytorch_grad_cam_pcasvm.autodiff.token_backward import contributions_of_tokens, summed_over_tokens, times
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.looks import may_look


@dataclass
class ClosedFormPass(Pass):
    """The pass of a tape.

    Args:
        tape: the tape.
        names: dotted names of the target layers.
        heads: keep the heads of the first attention apart: one target per head in place of each.
        check: called once for every kind of pass with the position of a target layer and the activations of a
            baseline; refuses a path that is another function there. None: nothing is checked.
        checked: kinds of passes that were checked; new ones are added.
    """

    tape: Tape
    names: Sequence[str]
    heads: bool = False
    check: Callable[[int, Tensor], None] | None = None
    checked: set[Any] = field(default_factory=set)
    activations: list[Tensor] = field(init=False)
    output: Any = field(init=False)
    _last: tuple[Any, int, Baseline | None, Tensor] | None = field(init=False, default=None)
    _interchangeable: dict[int, bool] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Look up the activations."""
        self.activations = [self.tape.values[self._root(target)] for target in range(len(self.names))]
        self.output = self.tape.output

    def pullback(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline | None = None) -> Tensor:
        """Return the derivative with respect to ``activations[target]``, or its secant, (K, *activations.shape)."""
        pulled = pulled_back(self.tape, seeds, self._root(target), baseline, heads=self.heads)
        if self.heads:  # a pass without them was looked at before
            return pulled
        if baseline is not None and self._is_new("secant", target):
            self._check_sums(seeds, target, baseline, pulled)
        return pulled

    def weights(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline | None = None) -> Tensor:
        """Return the sum of the pullback over the positions of every channel, shape (K, N, T).

        Steps that keep such sums (flatten, pooling) are skipped without a pullback, and the sum moves into the weight
        of a first dense layer: W1 (D1, T H W) becomes (D1, T).
        """
        self._check_first(seeds, target, baseline)
        tape, value = self.tape, self._root(target)
        rows, channels = tape.values[value].shape[:2]
        for step in tape.line(value, tape.following(value)[0]):
            if step.first != Ref(value):
                break
            shape = tape.values[value].shape
            if step.function is F.linear and len(shape) == 2:
                grad = self._behind_dense(seeds, step.output, baseline)
                return through_sums(grad, affine.weight_of(tape, step), channels)
            after = tape.values[step.output].shape
            if after[:2] != (rows, channels) and not (len(after) == 2 and after[0] == rows and shape[0] == rows):
                break
            if not _keeps_sums(tape, step, linear=baseline is not None):
                break
            value = step.output
        grad = pulled_back(tape, seeds, value, baseline)
        grad = grad.reshape(len(grad), rows, channels, -1)
        return grad.squeeze(-1) if grad.shape[-1] == 1 else grad.sum(-1)

    def products(
        self, seeds: Sequence[Tensor | None], target: int, x: Tensor, over: str, baseline: Baseline | None = None
    ) -> Tensor:
        """Return ``sum_t d[k,n,t,i] x[n,t,i]`` (K, N, *positions), or the sum over positions (K, N, T).

        If only reshapes lie between here and a first dense layer, x moves into that layer's weight.
        """
        self._check_first(seeds, target, baseline)
        dense = affine.first_dense(self.tape, self._root(target))
        if dense is None:
            return multiplied(pulled_back(self.tape, seeds, self._root(target), baseline), x, over)
        grad = self._behind_dense(seeds, dense.output, baseline)
        return through_products(grad, affine.weight_of(self.tape, dense), x, over)

    def _behind_dense(self, seeds: Sequence[Tensor | None], value: int, baseline: Baseline | None) -> Tensor:
        """Return the pullback to the output of a first dense layer, once for sums and products of the same seeds."""
        if self._last is not None:
            given, of_value, start, grad = self._last
            if given is seeds and of_value == value and start is baseline:
                return grad
        grad = pulled_back(self.tape, seeds, value, baseline)
        self._last = seeds, value, baseline, grad
        return grad

    def token_sums(
        self,
        seeds: Sequence[Tensor | None],
        target: int,
        tokens: tuple[int, int, int],
        baseline: Baseline | None = None,
    ) -> Tensor:
        """Return ``pullback`` summed over some tokens; steps that are the same for all tokens pull back the sum."""
        self._check_first(seeds, target, baseline)
        root = self._root(target)

        def sums(seeds: Sequence[Tensor | None]) -> Tensor:
            return summed_over_tokens(self.tape, seeds, root, tokens, baseline, heads=self.heads)

        expected = partial(super().token_sums, target=target, tokens=tokens, baseline=baseline)
        self._check_tokens(("token sums", tokens, baseline is None), target, seeds, sums, expected)
        return sums(seeds)

    def token_contributions(
        self, seeds: Sequence[Tensor | None], target: int, dims: tuple[int, int], baseline: Baseline
    ) -> Tensor:
        """Return secants times the change in activations, where steps that mix tokens begin, (K, N, L)."""
        self._check_first(seeds, target, baseline)
        root = self._root(target)

        def contributions(seeds: Sequence[Tensor | None]) -> Tensor:
            return contributions_of_tokens(self.tape, seeds, root, dims, baseline, heads=self.heads)

        def expected(seeds: Sequence[Tensor | None]) -> Tensor:
            pulled = self.pullback(seeds, target, baseline)
            return times(pulled, self.tape.values[root] - baseline.values[root], dims)

        kind = ("token contributions", dims, self.tape.values[root].shape[dims[1]])
        self._check_tokens(kind, target, seeds, contributions, expected)
        return contributions(seeds)

    def _check_tokens(
        self,
        what: Any,
        target: int,
        seeds: Sequence[Tensor | None],
        short: Callable[[Sequence[Tensor | None]], Tensor],
        whole: Callable[[Sequence[Tensor | None]], Tensor],
    ) -> None:
        """Compare, for every new kind of pass, one sum of targets that went the short way with the whole pullback."""
        if self.heads or not self._is_new(what, target):
            return
        one = [None if seed is None else seed.sum(0, keepdim=True) for seed in seeds]
        found, expected = short(one), whole(one)
        eps = max(torch.finfo(value.dtype).eps for value in self.tape.values if has_gradient(value))
        size = expected.double().norm()
        if bool((found - expected).double().norm() > max(eps**0.5, 1e-7) * size):
            raise NoClosedFormError(
                f"sums over the tokens of {self.names[target]!r} differ from its pullback, which is a bug in this "
                "package: please report the network",
                "pass a function as reshape_transform",
            )
        if bool(size > 0):
            self.checked.add(self._kind(what, target))

    def bytes_per_target(self) -> int:
        """Return roughly how much memory one target takes for the batch: a few times the path's widest value."""
        floats = filter(has_gradient, self.tape.values)
        return 4 * max(value.numel() * max(4, value.element_size()) for value in floats)

    def baseline(self, activations: Tensor, target: int) -> Baseline:
        """Run the path from the activations of a baseline, with one row for all images or N."""
        values = self.tape.replay(self._root(target), activations)
        if self.check is not None and (self.tape.branches or self._is_new("baseline", target)):
            self.check(target, activations)
            self.checked.add(self._kind("baseline", target))
        return Baseline(values, self.tape.structured(self.tape.outputs_of(values)))

    def moved(self, activations: Tensor, target: int) -> "ClosedFormPass":
        """Return the pass through the same steps from other activations (N, T, ...), which may be dual numbers."""
        found = self.tape.replay(self._root(target), activations)
        values = [found.get(index, value) for index, value in enumerate(self.tape.values)]
        output = self.tape.structured(self.tape.outputs_of(found))
        tape = replace(self.tape, values=values, output=output)
        return ClosedFormPass(tape, self.names, checked=self.checked)

    def with_heads(self) -> "ClosedFormPass":
        """Return the same pass with the heads of its first attention kept apart."""
        return replace(self, heads=True)

    def rerun(self, activations: Tensor, target: int) -> Any:
        """Return the path's output for M rows of activations; row m takes the place of image ``m % N``."""
        return self.tape.structured(self.tape.in_blocks(self._root(target), activations))

    def cut(self, target: int) -> tuple[int, bool]:
        """Return the value up to which the path after a target layer is affine, and whether that is the output."""
        key = self._kind("rows", target)
        value, checked = affine.cut(self.tape, self._root(target), checked=key in self.checked)
        if checked:
            self.checked.add(key)
        users = [step for step in self.tape.following(value, switches=True)[0] if value in step.inputs]
        return value, value in self.tape.outputs and not users

    def value(self, index: int) -> Tensor:
        """Return the value of ``cut``, shape (N, ...)."""
        return self.tape.values[index]

    def rows(self, target: int, x: Tensor, over: str, chunk: slice | None = None) -> Tensor:
        """Return what each player contributes to the value of ``cut``, shape (N, J, *value.shape[1:])."""
        value, _ = self.cut(target)
        return affine.rows(self.tape, self._root(target), value, x, over, chunk or slice(None))

    def row(self, target: int, x: Tensor) -> Tensor:
        """Return what activations x alone contribute to the value of ``cut``, shape (N, *value.shape[1:])."""
        value, _ = self.cut(target)
        return affine.through(self.tape, self._root(target), value, x.unsqueeze(1))[:, 0]

    def rerun_from(self, value: int, rows: Tensor, image: int | None = None) -> Any:
        """Return the path's output for M other rows of the value of ``cut``, of an image or image ``m % N``."""
        if image is not None and value not in self._interchangeable:
            # Where it may not be looked at, every image has its own: slower, and right as well.
            looked = may_look(self.tape.values[value])
            self._interchangeable[value] = looked and affine.interchangeable(self.tape, value)
        if image is None or self._interchangeable[value]:
            return self.tape.structured(self.tape.in_blocks(value, rows))
        # What goes around the value is another thing for every image: one row a block, in its own place.
        recorded = self.tape.values[value]
        blocks = recorded.repeat(len(rows), *[1] * (recorded.dim() - 1)).to(rows)
        blocks[image :: len(recorded)] = rows
        found = self.tape.in_blocks(value, blocks)
        return self.tape.structured([tensor[image :: len(recorded)] for tensor in found])

    def relevance(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline) -> Tensor:
        """Return the relevance of activations, propagated from the output's contributions, (K, *activations.shape)."""
        pairs = zip(seeds, self.tape.leaves, _tensors(baseline.output), strict=True)
        given = [None if seed is None else seed * (y - y0).to(seed.dtype) for seed, y, y0 in pairs]
        return relevance(self.tape, given, self._root(target))

    def _root(self, target: int) -> int:
        return self.tape.roots[self.names[target]]

    def _kind(self, what: Any, target: int) -> tuple[Any, ...]:
        return what, self.tape.signature, self.names[target]

    def _is_new(self, what: Any, target: int) -> bool:
        return self._kind(what, target) not in self.checked

    def _check_first(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline | None) -> None:
        """Pull one sum of targets back position by position, which is checked, where no pass of the kind was."""
        if baseline is not None and not self.heads and self._is_new("secant", target):
            self.pullback([None if seed is None else seed.sum(0, keepdim=True) for seed in seeds], target, baseline)

    def _check_sums(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline, pulled: Tensor) -> None:
        """Refuse secants that do not add up: a user's, as those here do."""
        root = self._root(target)
        pairs = [(pulled, self.tape.values[root], baseline.values[root])]
        outputs = zip(seeds, self.tape.leaves, _tensors(baseline.output), strict=True)
        pairs += [(seed, y, y0) for seed, y, y0 in outputs if seed is not None]
        sums, sizes, roundings = [], [], []
        for grad, x, x0 in pairs:
            grad, x, x0 = grad.reshape(len(grad), -1).double(), x.flatten().double(), x0.flatten().double()
            terms = grad * (x - x0)
            sums.append(terms.sum(-1))
            sizes.append(terms.abs().sum(-1))
            roundings.append((grad.abs() * (x.abs() + x0.abs())).sum(-1))
        eps = max(torch.finfo(value.dtype).eps for value in self.tape.values if has_gradient(value))
        error = (sums[0] - sum(sums[1:])).abs()
        bound = eps**0.5 * sum(sizes) + 64 * eps * sum(roundings)
        if bool((error > bound).any()) and bool(error.isfinite().all()):
            foreign = dict.fromkeys(
                step.name
                for step in self.tape.following(root)[0]
                if (rule := rule_of(step.function)) is not None and rule.foreign
            )
            whose = f"the secant of {' or '.join(foreign)} is wrong" if foreign else "a secant on the path is wrong"
            raise NoClosedFormError(
                f"contributions from {self.names[target]!r} do not add up: {whose}, as J (x - x0) is not f(x) - f(x0)",
                "correct secant= in @register_jacobian",
                "use a gradient method such as ClosedFormGradCAM",
            )
        if bool((torch.stack(sizes) > 0).any()):  # there was something to compare
            self.checked.add(self._kind("secant", target))


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _keeps_sums(tape: Tape, step: Step, *, linear: bool) -> bool:
    """Return whether a step keeps sums over positions; from a baseline only those of linear steps are kept."""
    rule = rule_of(step.function)
    if rule is None or (linear and rule.secant != "linear"):
        return False
    args, kwargs = arguments(rule, step.args, step.kwargs)
    return rule.keeps_sums(*tape.resolved(args), **tape.resolved(kwargs), y=tape.values[step.output])
