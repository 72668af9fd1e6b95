"""Regions: walks that end where steps begin to mix tokens, for sums over tokens and for contributions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.autodiff.backward import Walk, arguments
from pytorch_grad_cam_pcasvm.autodiff.rules import norms
from pytorch_grad_cam_pcasvm.autodiff.rules.registry import Outer, Rule, rule_of
from pytorch_grad_cam_pcasvm.autodiff.secants import Baseline
from pytorch_grad_cam_pcasvm.autodiff.tape import Ref, Step, Tape
from pytorch_grad_cam_pcasvm.autodiff.token_dims import Part, dims_of_arguments, same_for_all_tokens, whole


def summed_over_tokens(
    tape: Tape,
    seeds: Sequence[Tensor | None],
    root: int,
    tokens: tuple[int, int, int],
    baseline: Baseline | None = None,
    *,
    heads: bool = False,
) -> Tensor:
    """Return ``pulled_back`` summed over some tokens, with one token in their place.

    Args:
        tape: the path.
        seeds: as for ``pulled_back``.
        root: the value.
        tokens: its dimension of tokens, the first token, and their number.
        baseline: of secants; None: gradients.
        heads: as for ``pulled_back``.
    """
    dim, start, length = tokens
    walk = _SummedWalk(tape, root, baseline, {root: dim}, (start, length), heads=heads)
    walk.back(seeds)
    if root not in walk.sums:
        given = next(seed for seed in seeds if seed is not None)
        return given.new_zeros(walk.count, *tape.values[root].narrow(dim, 0, 1).shape)
    return walk.sums[root]


def contributions_of_tokens(
    tape: Tape,
    seeds: Sequence[Tensor | None],
    root: int,
    dims: tuple[int, int],
    baseline: Baseline,
    *,
    heads: bool = False,
) -> Tensor:
    """Return ``pulled_back`` times what a value changes by from the baseline, summed over all but images and tokens.

    Args:
        tape: the path.
        seeds: as for ``pulled_back``.
        root: the value.
        dims: its dimensions of images and of tokens.
        baseline: of the secants.
        heads: as for ``pulled_back``.

    Returns:
        Contributions, shape (K, N, L).
    """
    walk = _ContributionWalk(tape, root, baseline, {root: dims}, heads=heads)
    walk.back(seeds)
    if walk.found is None:
        given = next(seed for seed in seeds if seed is not None)
        return given.new_zeros(walk.count, *(tape.values[root].shape[dim] for dim in dims))
    return walk.found


class _RegionWalk(Walk):
    """A walk that ends at a region of values around the root, between which every step treats tokens by themselves.

    Args:
        tape: the path.
        root: the value that it begins at.
        baseline: of secants; None: gradients.
        places: of the root: dimensions that are to be followed.
    """

    def __init__(
        self, tape: Tape, root: int, baseline: Baseline | None, places: dict[int, Any], *, heads: bool = False
    ) -> None:
        super().__init__(tape, root, baseline, heads=heads)
        self.places = places
        self.inside = [step for step in self.steps if self._enters(step)]
        within = {id(step) for step in self.inside}
        self.steps = [step for step in self.steps if id(step) not in within]

    def _enters(self, step: Step) -> bool:
        """Take the outputs of a step into the region if all that it works on are tokens of it."""
        rule = rule_of(step.function)
        inputs = [index for index in step.inputs if index in self.values]
        if rule is None or not self._belongs(rule, step):
            return False
        if any(index not in self.places for index in inputs) or any(index in step.inputs for index in step.outputs):
            return False
        args, kwargs = arguments(rule, step.args, step.kwargs)
        if any(isinstance(item, Ref | Tensor) for item in kwargs.values()):
            return False
        followed = self._followed(step, rule, args, inputs)
        if followed is None:
            return False
        self.places.update({output: followed for output in step.outputs if output is not None})
        return True

    def _followed(self, step: Step, rule: Rule, args: Sequence[Any], inputs: list[int]) -> Any:
        """Return the followed dimensions of a step's outputs, or None."""
        output = self.tape.values[next(index for index in step.outputs if index is not None)]

        def of_one(number: int | None) -> int | None:
            def wanted(index: int) -> int:
                return self.places[index] if number is None else self.places[index][number]

            for dim in range(output.dim()):
                dims = dims_of_arguments(self.tape, step, rule, args, dim)
                if dims is not None and all(
                    dims[place] == wanted(item.index)
                    for place, item in enumerate(args)
                    if isinstance(item, Ref) and item.index in inputs
                ):
                    return dim
            return None

        one = self.places[inputs[0]]
        if isinstance(one, int):
            return of_one(None)
        several = tuple(of_one(number) for number in range(len(one)))
        return None if None in several else several

    def _belongs(self, rule: Rule, step: Step) -> bool:
        raise NotImplementedError


class _ContributionWalk(_RegionWalk):
    """Collects contributions (K, N, L) of the values where the region ends."""

    found: Tensor | None = None

    def waiting(self) -> bool:
        return super().waiting() or self.found is not None

    def _belongs(self, rule: Rule, step: Step) -> bool:
        return True

    def give(self, index: int, part: Any) -> None:
        if index not in self.places:
            super().give(index, part)
            return
        assert self.baseline is not None
        dims = self.places[index]
        change = self.tape.values[index] - self.baseline.values[index]
        if isinstance(part, Outer) and dims == (0, change.dim() - 2):
            found = part.times(change)
        else:
            part = part() if callable(part) else part
            found = times(part, change, dims)
        self.found = found if self.found is None else self.found + found


class _SummedWalk(_RegionWalk):
    """Sums gradients over tokens where the region ends, and takes the sums back to the root."""

    def __init__(
        self,
        tape: Tape,
        root: int,
        baseline: Baseline | None,
        places: dict[int, Any],
        tokens: tuple[int, int],
        *,
        heads: bool = False,
    ) -> None:
        super().__init__(tape, root, baseline, places, heads=heads)
        self.tokens, self.ended = tokens, False
        self.sums: dict[int, Tensor] = {}

    def waiting(self) -> bool:
        return super().waiting() or bool(self.sums)

    def _belongs(self, rule: Rule, step: Step) -> bool:
        return same_for_all_tokens(rule, step)

    def back(self, seeds: Sequence[Tensor | None]) -> None:
        super().back(seeds)
        self.ended = True
        for step in reversed(self.inside):
            outputs = [None if output is None else self.sums.pop(output, None) for output in step.outputs]
            if any(output is not None for output in outputs):
                rule = rule_of(step.function)
                assert rule is not None
                args, kwargs = arguments(rule, step.args, step.kwargs)
                dim = self.places[next(output for output in step.outputs if output is not None)]
                dims = dims_of_arguments(self.tape, step, rule, args, dim)
                assert dims is not None
                self.pull_at(step, rule, args, kwargs, outputs, dims, (dim, 0, 1))

    def pull(self, step: Step, outputs: list[Any]) -> None:
        rule = rule_of(step.function)
        if rule is not None and rule.pull in (norms.layer_norm, norms.rms_norm) and step.inputs[0] in self.places:
            found = self._of_norm(step, rule, outputs[0])
            if found is not None:
                self._add(step.inputs[0], found)
                return
        super().pull(step, outputs)

    def _of_norm(self, step: Step, rule: Rule, grad: Tensor | Part) -> Tensor | None:
        """Return what a norm over the last dimension gives for one gradient of all tokens; None if it is no such."""
        args, kwargs = arguments(rule, step.args, step.kwargs)
        x, dim = self.tape.values[step.inputs[0]], self.places[step.inputs[0]]
        one, start, length = (grad.grad, grad.start, grad.length) if isinstance(grad, Part) else (grad, 0, x.shape[dim])
        inside = self.tokens[0] <= start and start + length <= sum(self.tokens)
        if x.dim() != 3 or len(args[1]) > 1 or one.stride(dim + 1) or not inside or step.inputs != step.inputs[:1]:
            return None
        if isinstance(grad, Part) and grad.dim != dim:
            return None
        x0 = x if self.baseline is None else self.baseline.values[step.inputs[0]]
        x, x0 = (each.narrow(dim, start, length).movedim(dim, 1).to(one.dtype) for each in (x, x0))
        centred = rule.pull is norms.layer_norm
        named = dict(zip(rule.parameters, args, strict=False)) | kwargs
        weight, eps = named.get("weight"), named.get("eps")
        found = norms.summed_over_tokens(
            one.select(dim + 1, 0),
            x,
            x if self.baseline is None else x0,
            None if weight is None else weight.to(one.dtype),
            (1e-5 if centred else torch.finfo(x.dtype).eps) if eps is None else eps,
            centred=centred,
        )
        return found.unsqueeze(dim + 1)

    def _add(self, index: int, found: Tensor) -> None:
        self.sums[index] = self.sums[index] + found if index in self.sums else found

    def give(self, index: int, part: Any) -> None:
        if index not in self.places:
            super().give(index, part)
            return
        dim, (start, length) = self.places[index], self.tokens
        if self.ended:
            found = part.grad  # summed already
        elif isinstance(part, Outer) and dim == self.tape.values[index].dim() - 2:
            found = part.summed(start, length)
        else:
            found = part() if callable(part) else part
            if isinstance(found, Part) and found.dim == dim:
                found = found.summed(start, length)
            else:
                found = whole(found).narrow(dim + 1, start, length).sum(dim + 1, keepdim=True)
        if found is None:
            return
        self._add(index, found)


def times(grad: Tensor | Part, change: Tensor, dims: tuple[int, int]) -> Tensor:
    """Return a gradient (K, ...) times a change, summed over all but images and tokens, (K, N, L)."""
    images, tokens = dims
    if isinstance(grad, Part):
        if grad.dim != tokens:
            return times(grad.whole(), change, dims)
        few = times(grad.grad, change.narrow(tokens, grad.start, grad.length), dims)
        return Part(lambda: few, 1, grad.start, grad.length, grad.size).whole()
    change = change.to(grad.dtype).movedim(dims, (0, 1)).flatten(2) if change.dim() > 2 else change.unsqueeze(-1)
    moved = grad.movedim((images + 1, tokens + 1), (1, 2))
    if moved.stride(2) == 0:  # as behind a mean over tokens
        one = moved[:, :, 0].flatten(2)
        return (one.transpose(0, 1) @ change.mT).transpose(0, 1)
    return torch.stack([(part.flatten(2) * change).sum(-1) for part in moved])
