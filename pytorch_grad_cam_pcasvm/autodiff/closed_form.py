"""The closed form: walking a tape backwards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pytorch_grad_cam_pcasvm.autodiff.affine import AffineBeginning
from pytorch_grad_cam_pcasvm.autodiff.backward import Walk
from pytorch_grad_cam_pcasvm.autodiff.forward_pass import Pass
from pytorch_grad_cam_pcasvm.autodiff.lrp import relevance
from pytorch_grad_cam_pcasvm.autodiff.rules.registry import rule_of
from pytorch_grad_cam_pcasvm.autodiff.secants import Baseline
from pytorch_grad_cam_pcasvm.autodiff.tape import Tape, has_gradient
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError


@dataclass
class ClosedFormPass(Pass):
    """The pass of a tape.

    Args:
        tape: the tape.
        names: dotted names of the target layers.
        heads: keep the heads of the first attention apart: one target per head in place of each.
        check: called once for every kind of pass with the exact pass and the activations of a baseline, by position of
            their target layer; refuses a path that is another function there. None: nothing is checked.
        exact: the pass as it was recorded, if this is another one.
        checked: kinds of passes that were checked; new ones are added.
    """

    tape: Tape
    names: Sequence[str]
    heads: bool = False
    check: Callable[["ClosedFormPass", Mapping[int, Tensor]], None] | None = None
    exact: "ClosedFormPass | None" = None
    checked: set[Any] = field(default_factory=set)
    activations: list[Tensor] = field(init=False)
    output: Any = field(init=False)

    def __post_init__(self) -> None:
        """Look up the activations."""
        self.activations = [self.tape.values[self._root(target)] for target in range(len(self.names))]
        self.output = self.tape.output

    def pullback(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline | None = None) -> Walk:
        """Return the derivative with respect to ``activations[target]``, or its secant from a baseline."""
        name = self.names[target]
        if baseline is not None and not self.heads and self._kind("secant", target, baseline.roots) not in self.checked:
            one = [None if seed is None else seed.sum(0, keepdim=True) for seed in seeds]
            self._check_sums(one, target, baseline)
        return Walk(self.tape, seeds, name, baseline, heads=self.heads, checked=self.checked)

    def bytes_per_target(self) -> int:
        """Return roughly how much memory one target takes for the batch: a few times the path's widest value."""
        floats = filter(has_gradient, self.tape.values)
        return 4 * max(value.numel() * max(4, value.element_size()) for value in floats)

    def baseline(self, starts: Mapping[int, Tensor]) -> Baseline:
        """Run the path from the activations of a baseline, with one row for all images or N."""
        given = {self._root(target): activations for target, activations in starts.items()}
        names = {root: name for name, root in self.tape.roots.items()}
        for root in given:
            for other in (given.keys() & self.tape.following(root, switches=True)[1]) - {root}:
                raise ValueError(f"{names[other]!r} is behind {names[root]!r}: name one target layer in each branch")
        values = self.tape.replay(given)
        kinds = [self._kind("baseline", target, tuple(given)) for target in starts]
        if self.check is not None and (self.tape.branches or not self.checked.issuperset(kinds)):
            self.check(self.exact or self, starts)
            self.checked.update(kinds)
        return Baseline(values, self.tape.structured(self.tape.outputs_of(values)), tuple(given))

    def moved(self, activations: Tensor, target: int) -> "ClosedFormPass":
        """Return the pass through the same steps from other activations (N, T, ...), which may be dual numbers."""
        found = self.tape.replay({self._root(target): activations})
        values = [found.get(index, value) for index, value in enumerate(self.tape.values)]
        output = self.tape.structured(self.tape.outputs_of(found))
        tape = replace(self.tape, values=values, output=output)
        return ClosedFormPass(tape, self.names, checked=self.checked)

    def with_heads(self) -> "ClosedFormPass":
        """Return the same pass with the heads of its first attention kept apart."""
        return replace(self, heads=True)

    def rerun(self, starts: Mapping[int, Tensor]) -> Any:
        """Return the path's output for M rows of activations; row m takes the place of image ``m % N``."""
        given = {self._root(target): activations for target, activations in starts.items()}
        return self.tape.structured(self.tape.in_blocks(given))

    def affine(self, target: int) -> AffineBeginning:
        """Return the affine beginning of what follows a target layer."""
        kind = self._kind("affine", target)
        found = AffineBeginning(self.tape, self._root(target), checked=kind in self.checked)
        if found.checked:
            self.checked.add(kind)
        return found

    def averages(self, target: int) -> bool:
        """Return whether the output is the mean over all positions of a target layer, by the steps between them."""
        kinds = {found: self._kind(("averages", found), target) for found in (True, False)}
        known = next((found for found, kind in kinds.items() if kind in self.checked), None)
        if known is None:
            known = AffineBeginning(self.tape, self._root(target), checked=True).is_mean
            self.checked.add(kinds[known])
        return known

    def relevance(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline) -> Tensor:
        """Return the relevance of activations, propagated from the output's contributions, (K, *activations.shape)."""
        pairs = zip(seeds, self.tape.leaves, _tensors(baseline.output), strict=True)
        given = [None if seed is None else seed * (y - y0).to(seed.dtype) for seed, y, y0 in pairs]
        return relevance(self.tape, given, self._root(target))

    def _root(self, target: int) -> int:
        return self.tape.roots[self.names[target]]

    def _kind(self, what: Any, target: int, roots: tuple[int, ...] = ()) -> tuple[Any, ...]:
        return what, self.tape.signature, self.names[target], roots

    def _check_sums(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline) -> None:
        """Refuse secants that do not add up: a user's, as those here do."""
        pairs = [
            (Walk(self.tape, seeds, name, baseline).dense(), self.tape.values[root], baseline.values[root])
            for name, root in self.tape.roots.items()
            if root in baseline.roots
        ]
        roots = len(pairs)
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
        error = (torch.stack(sums[:roots]).sum(0) - torch.stack(sums[roots:]).sum(0)).abs()
        bound = eps**0.5 * sum(sizes) + 64 * eps * sum(roundings)
        if bool((error > bound).any()) and bool(error.isfinite().all()):
            foreign = dict.fromkeys(
                step.name
                for step in self.tape.following(*baseline.roots)[0]
                if (rule := rule_of(step.function)) is not None and rule.foreign
            )
            whose = f"the secant of {' or '.join(foreign)} is wrong" if foreign else "a secant on the path is wrong"
            raise NoClosedFormError(
                f"contributions from {self.names[target]!r} do not add up: {whose}, as J (x - x0) is not f(x) - f(x0)",
                "correct secant= in @register_jacobian",
                "use a gradient method such as ClosedFormGradCAM",
            )
        if bool((torch.stack(sizes) > 0).any()):  # there was something to compare
            self.checked.add(self._kind("secant", target, baseline.roots))


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
