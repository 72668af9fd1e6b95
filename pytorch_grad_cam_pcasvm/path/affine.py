"""The affine beginning of a path, and the share of its result that each channel or position contributes."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.rules.cotangents import player_rows
from pytorch_grad_cam_pcasvm.rules.rule import Rule, mixes_images
from pytorch_grad_cam_pcasvm.runtime.device import can_sync
from pytorch_grad_cam_pcasvm.tape.step import Ref, Step
from pytorch_grad_cam_pcasvm.tape.tape import Tape, has_gradient


class AffineBeginning:
    """The path from a target layer to where it stops being affine, or begins to mix images.

    Args:
        tape: the path.
        root: the target layer's value.

    Attributes:
        end: the value up to which it is affine.
    """

    def __init__(self, tape: Tape, root: int) -> None:
        self.tape, self.root = tape, root
        self._following = tape.following(root, switches=True)[0]
        line, steps = [root], list[Step]()
        for step in tape.line(root, self._following):
            output, rule = step.output, step.rule
            if rule is None:
                break
            if (
                not _is_affine(step, rule, line[-1])
                or not has_gradient(tape.values[output])
                or self._mixes_images(step, rule, line[-1])
            ):
                break
            line.append(output)
            steps.append(step)
        self.end, self._line = line[-1], dict(zip(line[:-1], steps, strict=True))

    @property
    def value(self) -> Tensor:
        """What the path computes up to here, shape (N, ...)."""
        return self.tape.values[self.end]

    @property
    def is_output(self) -> bool:
        """Whether this is the path's output itself."""
        return self.end in self.tape.outputs and all(self.end not in step.inputs for step in self._following)

    def _mixes_images(self, step: Step, rule: Rule, value: int) -> bool:
        if Ref(value) not in step.arguments:  # one of a list, as of cat: it may be joined to other images
            return True
        return mixes_images(rule, step.arguments.index(Ref(value)), self.tape.recorded(step))

    def isolate_players(self, x: Tensor, over: str, chunk: slice = slice(None)) -> Tensor:
        """Return the image of each player alone under the linear map, shape (N, J, *value.shape[1:]).

        Args:
            x: activations, or their difference from a start, shape (N, T, ...).
            over: ``"channels"``: J = T players, each channel alone; ``"positions"``: each position alone.
            chunk: of the players.
        """
        parts = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
        step = next((step for step in self._steps(self.root) if not self.tape.keeps_numbers(step)), None)
        before = None if step is None else self.tape.values[step.inputs[0]].shape
        if step is not None and _is_linear(step) and before == (len(parts), parts[0].numel()):
            return self._apply_rest(step.output, player_rows(self._weight(step), parts, over, chunk))
        if step is not None and self.tape.averages_positions(step, self.root):
            mean = parts / parts.shape[2]
            shares = mean[:, :, chunk].mT if over == "positions" else torch.diag_embed(mean.sum(2))[:, chunk]
            shape = self.tape.values[step.output].shape[1:]
            return self._apply_rest(step.output, shares.reshape(*shares.shape[:2], *shape))
        rows = []
        for player in range(parts.shape[1 if over == "channels" else 2])[chunk]:
            alone = torch.zeros_like(parts)
            index = (slice(None), player) if over == "channels" else (slice(None), slice(None), player)
            alone[index] = parts[index]
            rows.append(self.row(alone.reshape(x.shape)))
        return torch.stack(rows, 1)

    def row(self, x: Tensor) -> Tensor:
        """Return the image of activations x under the linear map, shape (N, *value.shape[1:])."""
        return self._apply_rest(self.root, x.unsqueeze(1))[:, 0]

    def run_rows(self, rows: Tensor, image: int | None = None) -> Any:
        """Return the path's output for M other rows of the value.

        Args:
            rows: of its shape but for the first dimension, (M, ...).
            image: whose rows they are; None: row m is of image ``m % N``.
        """
        tape, recorded = self.tape, self.value
        if image is None or self._interchangeable:
            return tape.structured(tape.in_blocks({self.end: rows}))
        # What goes around the value is another thing for every image: one row a block, in its own place.
        blocks = recorded.repeat(len(rows), *[1] * (recorded.dim() - 1)).to(rows)
        blocks[image :: len(recorded)] = rows
        return tape.structured([tensor[image :: len(recorded)] for tensor in tape.in_blocks({self.end: blocks})])

    @cached_property
    def _interchangeable(self) -> bool:
        """Whether all steps behind the value are known to treat the rows of all images alike."""
        recorded = self.value
        if not can_sync(recorded):
            return False  # every image has its own: slower, and right as well
        if len(recorded) == 1:
            return True
        outputs = self.tape.list_outputs(self.tape.replay({self.end: recorded[:1].expand_as(recorded)}))

        def repeats(tensor: Tensor) -> bool:
            if tensor.shape[:1] != recorded.shape[:1]:
                return False
            bound = torch.finfo(tensor.dtype).eps ** 0.5 * tensor.abs().max()
            return bool(((tensor - tensor[:1]).abs() <= bound).all())

        return all(repeats(tensor) for tensor in outputs if has_gradient(tensor))

    def _steps(self, start: int) -> Iterator[Step]:
        """Yield the steps from a value to the end."""
        while start in self._line:
            yield self._line[start]
            start = self._line[start].output

    def _weight(self, step: Step) -> Tensor:
        return self.tape.resolved(step.arguments[1]).detach()

    def _apply_rest(self, start: int, rows: Tensor) -> Tensor:
        """Return the linear part of the steps from a value of the line on, for rows (N, J, ...) of it."""
        tape = self.tape
        for step in self._steps(start):
            after = tape.values[step.output].shape
            if tape.keeps_numbers(step):
                rows = rows.reshape(*rows.shape[:2], *after[1:])
            elif _is_linear(step):
                rows = F.linear(rows, self._weight(step).to(rows.dtype))
            else:
                break
            start = step.output
        if start == self.end:
            return rows
        # One player of all images is a block, so that every row meets what goes around the path for its image.
        recorded = tape.values[start]
        offset = tape.replay({start: torch.zeros_like(recorded)}, self.end)[self.end]
        results = [tape.replay({start: block.to(recorded)}, self.end)[self.end] - offset for block in rows.unbind(1)]
        return torch.stack(results, 1).to(rows.dtype)


def _is_affine(step: Step, rule: Rule, value: int) -> bool:
    """Return whether a step is affine in a value, if nothing else of it changes."""
    places = rule.affine
    return places is None or (not step.options and Ref(value) in [step.arguments[place] for place in places])


def _is_linear(step: Step) -> bool:
    """Return whether an affine step is a dense layer, whose weight is a constant."""
    assert step.rule is not None
    weight = step.arguments[1] if step.rule.relevance == "weighted" else None
    return isinstance(weight, Tensor) and weight.dim() == 2
