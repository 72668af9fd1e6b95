"""The affine beginning of a path: what a channel or a position of the activations brings to its end."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.rules.cotangents import cotangent
from pytorch_grad_cam_pcasvm.rules.rule import mixes_images
from pytorch_grad_cam_pcasvm.rules.weight import player_rows
from pytorch_grad_cam_pcasvm.runtime.device_sync import may_look
from pytorch_grad_cam_pcasvm.tape.call import Call
from pytorch_grad_cam_pcasvm.tape.tape import Ref, Step, Tape, has_gradient


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
        count, line = tape.values[root].shape[0], [root]
        for step in tape.line(root, tape.following(root, switches=True)[0]):
            if (
                not _is_affine(step, line[-1])
                or not has_gradient(tape.values[step.output])
                or self._mixes_images(step, line[-1])
            ):
                break
            line.append(step.output)
        self.end = next(index for index in reversed(line) if tape.values[index].shape[:1] == (count,))

    @property
    def value(self) -> Tensor:
        """What the path computes up to here, shape (N, ...)."""
        return self.tape.values[self.end]

    @property
    def is_output(self) -> bool:
        """Whether this is the path's output itself."""
        following = self.tape.following(self.end, switches=True)[0]
        return self.end in self.tape.outputs and all(self.end not in step.inputs for step in following)

    @property
    def is_mean(self) -> bool:
        """Whether the whole path is the mean over all positions of the activations, and nothing else."""
        calls = self._calls(self.root)
        counting = [call for _, call in calls if not call.keeps_numbers(self.tape)]
        reached = bool(calls) and calls[-1][1].step.output == self.end
        return reached and self.is_output and len(counting) == 1 and self._averages(counting[0])

    def _mixes_images(self, step: Step, value: int) -> bool:
        call = Call.of(step)
        assert call is not None
        if Ref(value) not in call.args:  # one of a list, as of cat: it may be joined to other images
            return True
        recorded = call.recorded(self.tape)
        return mixes_images(call.rule, call.args.index(Ref(value)), recorded.args, recorded.kwargs, recorded.y)

    def rows(self, x: Tensor, over: str, chunk: slice = slice(None)) -> Tensor:
        """Return what each player alone brings to the value by the linear map, shape (N, J, *value.shape[1:]).

        Args:
            x: activations, or their difference from a start, shape (N, T, ...).
            over: ``"channels"``: J = T players, each channel alone; ``"positions"``: each position alone.
            chunk: of the players.
        """
        parts = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
        start, call = self._first_that_counts()
        if call is not None and _is_dense(call) and self.tape.values[start].shape == (len(parts), parts[0].numel()):
            return self._through(call.step.output, player_rows(self._weight(call), parts, over, chunk))
        if call is not None and self._averages(call):
            mean = parts / parts.shape[2]
            shares = mean[:, :, chunk].mT if over == "positions" else torch.diag_embed(mean.sum(2))[:, chunk]
            shape = self.tape.values[call.step.output].shape[1:]
            return self._through(call.step.output, shares.reshape(*shares.shape[:2], *shape))
        rows = []
        for player in range(parts.shape[1 if over == "channels" else 2])[chunk]:
            alone = torch.zeros_like(parts)
            place = (slice(None), player) if over == "channels" else (slice(None), slice(None), player)
            alone[place] = parts[place]
            rows.append(self.row(alone.reshape(x.shape)))
        return torch.stack(rows, 1)

    def row(self, x: Tensor) -> Tensor:
        """Return what activations x alone bring to the value by the linear map, shape (N, *value.shape[1:])."""
        return self._through(self.root, x.unsqueeze(1))[:, 0]

    def rerun(self, rows: Tensor, image: int | None = None) -> Any:
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
        """Whether what follows the value is known to do the same with the row of every image."""
        recorded = self.value
        if not may_look(recorded):
            return False  # every image has its own: slower, and right as well
        if len(recorded) == 1:
            return True
        outputs = self.tape.outputs_of(self.tape.replay({self.end: recorded[:1].expand_as(recorded)}))

        def repeats(tensor: Tensor) -> bool:
            if tensor.shape[:1] != recorded.shape[:1]:
                return False
            bound = torch.finfo(tensor.dtype).eps ** 0.5 * tensor.abs().max()
            return bool(((tensor - tensor[:1]).abs() <= bound).all())

        return all(repeats(tensor) for tensor in outputs if has_gradient(tensor))

    def _calls(self, start: int) -> list[tuple[int, Call]]:
        """Return the calls from a value to the end, and their first arguments, while these lead on."""
        calls = []
        for step in self.tape.line(start, self.tape.following(start)[0]):
            call = Call.of(step)
            if start == self.end or call is None or step.first != Ref(start):
                break
            calls.append((start, call))
            start = step.output
        return calls

    def _first_that_counts(self) -> tuple[int, Call | None]:
        """Return the first call that does more than give its numbers back, and its first argument."""
        calls = self._calls(self.root)
        return next(((start, call) for start, call in calls if not call.keeps_numbers(self.tape)), (self.root, None))

    def _averages(self, call: Call) -> bool:
        """Return whether a call is the mean over all positions of the activations."""
        before, after = (self.tape.values[index].shape for index in (call.step.inputs[0], call.step.output))
        if len(before) < 3 or not before[:2] == after[:2] == self.tape.values[self.root].shape[:2]:
            return False
        recorded = call.recorded(self.tape)
        if after[2:].numel() > 1 or call.rule.secant != "linear" or not has_gradient(recorded.y):
            return False
        if not call.rule.keeps_sums(*recorded.args, **recorded.kwargs, y=recorded.y):
            return False
        one = torch.ones_like(recorded.y).unsqueeze(0)
        pulled = call.rule.pulled(recorded.args, recorded.kwargs, recorded.y, one)
        return set(range(2, len(before))) <= set(cotangent(pulled[0] if isinstance(pulled, tuple) else pulled).same)

    def _weight(self, call: Call) -> Tensor:
        return self.tape.resolved(call.args[1]).detach()

    def _through(self, start: int, rows: Tensor) -> Tensor:
        """Return the linear part of the steps from a value of the line on, for rows (N, J, ...) of it."""
        tape = self.tape
        for _, call in self._calls(start):
            after = tape.values[call.step.output].shape
            if call.keeps_numbers(tape) and after[:1] == rows.shape[:1]:
                rows = rows.reshape(*rows.shape[:2], *after[1:])
            elif _is_dense(call):
                rows = F.linear(rows, self._weight(call).to(rows.dtype))
            else:
                break
            start = call.step.output
        if start == self.end:
            return rows
        # One player of all images is a block, so that every row meets what goes around the path for its image.
        recorded = tape.values[start]
        offset = tape.replay({start: torch.zeros_like(recorded)}, self.end)[self.end]
        results = [tape.replay({start: block.to(recorded)}, self.end)[self.end] - offset for block in rows.unbind(1)]
        return torch.stack(results, 1).to(rows.dtype)


def _is_affine(step: Step, value: int) -> bool:
    """Return whether a step is affine in a value, if nothing else of it changes."""
    call = Call.of(step)
    if call is None:
        return False
    places = call.rule.affine
    if places is None:
        return True
    changing = [item.index for place, item in enumerate(call.args) if place in places and isinstance(item, Ref)]
    return not call.kwargs and value in changing


def _is_dense(call: Call) -> bool:
    """Return whether a call is a dense layer."""
    return call.rule.relevance == "weighted" and isinstance(call.args[1], Tensor) and call.args[1].dim() == 2
