"""Players: parts of the activations, channels or positions, that are present in a decision or absent.

Up to the first nonlinear step each player is a row that is computed once; a changed image is evaluated from there on,
without the stem.
"""

from math import factorial

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.methods.run import Run
from pytorch_grad_cam_pcasvm.network.outputs import HeadRun
from pytorch_grad_cam_pcasvm.runtime.device import kept_on_devices
from pytorch_grad_cam_pcasvm.targets.questions import Questions

EXACT = 12  # players of whom all subsets are evaluated
_BYTES = 1 << 28


class Players:
    """The players of one target layer, for all images of a run.

    Args:
        run: the run.
        layer: position of the target layer.
        x: what players contribute, activations or their difference from a baseline, shape (N, T, H, W).
        over: ``"channels"``: T players; ``"positions"``: H W players.
        questions: what K targets ask.
        max_bytes: limit on the memory of what is evaluated at once; None: 256 MiB. The rows of all players are not
            included.
    """

    def __init__(self, run: Run, layer: int, x: Tensor, over: str, questions: Questions, max_bytes: int | None) -> None:
        self._run, self._questions, self._bytes = run, questions, max_bytes or _BYTES
        self._affine = run.passed.affine(layer)
        is_rearranged = not run.layouts[layer].is_that_of_maps
        self._rows = self._reshaped(layer, x, over) if is_rearranged else self._affine.rows(x, over)
        self._origin = self._affine.value
        self._position: int | None = None
        one_row = run.output.grid is None
        if self._affine.is_output and run.head is not None and one_row and questions.are_closed_form:
            # The head's linear beginning, too, is passed once, by every player's row.
            head, trace = run.head, run.output.head_trace
            self._position, self._origin = head.linear_until, trace.values[head.linear_until]
            self._rows = self._rows.flatten(2).to(self._origin.dtype)
            if self._position:
                jacobian, _ = head.pullback(trace, {self._position: None})
                self._rows = self._rows @ jacobian.mT

    def _reshaped(self, layer: int, x: Tensor, over: str) -> Tensor:
        """Return the rows of players of activations that were brought to another shape."""
        run = self._run
        raw = run.passed.activations[layer]
        numbers = torch.arange(raw[0].numel(), dtype=torch.float64, device=raw.device).reshape(1, *raw.shape[1:])
        place = run.shaped(numbers, layer).long().flatten(2)[0]
        arranged = raw.flatten(1)[:, place.flatten().clamp(0, raw[0].numel() - 1)]
        if not run.layouts[layer].is_known and not torch.equal(arranged, run.activations(layer).flatten(1)):
            raise ValueError(
                "reshape_transform changes numbers, so players cannot be mapped back through it: it may only move them"
            )
        parts = x.flatten(2)
        rows = []
        for player in range(parts.shape[1 if over == "channels" else 2]):
            chosen = (slice(None), player) if over == "channels" else (slice(None), slice(None), player)
            alone = torch.zeros_like(raw).flatten(1)
            alone[:, place[chosen[1:]]] = parts[chosen]
            rows.append(self._affine.row(alone.reshape(raw.shape)))
        return torch.stack(rows, 1)

    def of(self, image: int) -> tuple[Tensor, Tensor]:
        """Return an image's value before the first nonlinear step, (D,), and its players, (J, D)."""
        return self._origin[image], self._rows[image]

    def at_once(self, image: int) -> int:
        """Return how many changed versions of an image, with their lists of players, fit into the memory."""
        head = self._run.head
        row = 8 * max(self._origin[image].numel(), len(self._rows[image]))
        if self._position is None:
            row *= self._run.count  # what goes around the path may be that of every image
        return max(1, self._bytes // (row + (0 if head is None else head.bytes_per_target(1))))

    def values(self, image: int, rows: Tensor) -> Tensor:
        """Return the values of the targets for changed versions (M, D) of an image, shape (M, K)."""
        run, head = self._run, self._run.head
        parts = []
        for part in rows.split(self.at_once(image)):
            if self._position is None:
                changed = run.output_of(self._affine.rerun(part, image), len(part))
            else:
                assert head is not None
                changed = HeadRun(head, head.resume(self._position, part))
            parts.append(self._questions.evaluate_changed(image, changed))
        return torch.cat(parts)


def shapley_values(players: Players, image: int, samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the Shapley values of an image's players.

    Args:
        players: the J players.
        image: number of the image.
        samples: number of orders to draw if there are more than 12 players.
        seed: random seed of the orders.

    Returns:
        The values (K, J), their standard errors (K, J), and the targets' values with all players and with none, (K,).
    """
    origin, rows = players.of(image)
    empty = origin - rows.sum(0)
    whole, none = players.values(image, torch.stack([origin, empty]))
    if len(rows) <= EXACT:
        shares = _over_subsets(players, image, empty, rows)
        return shares.T, torch.zeros_like(shares.T), whole, none
    means = []
    for order in _draw_orders(len(rows), samples // 2, seed, like=rows):
        pair = []
        for permutation in (order, order.flip(0)):
            joined = empty + rows[permutation].cumsum(0)
            values = torch.cat([none.unsqueeze(0), players.values(image, joined[:-1]), whole.unsqueeze(0)])
            pair.append(torch.zeros_like(values[1:]).index_copy(0, permutation, values.diff(dim=0)))
        means.append((pair[0] + pair[1]) / 2)
    drawn = torch.stack(means)
    return drawn.mean(0).T, (drawn.std(0) / len(drawn) ** 0.5).T, whole, none


@kept_on_devices
def _draw_orders(players: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(players, generator=generator) for _ in range(count)])


@kept_on_devices
def _list_chances(players: int) -> Tensor:
    """Return ``|S|! (J - |S| - 1)! / J!`` of each subset S of the others, in the order of their numbers."""
    chances = [factorial(size) * factorial(players - size - 1) / factorial(players) for size in range(players)]
    subsets = range(1 << (players - 1))
    return torch.tensor([chances[subset.bit_count()] for subset in subsets], dtype=torch.float64)


def _members(subsets: Tensor, count: int) -> Tensor:
    """Return who is in a subset, by its number, whose first bit is the first player, shape (S, J)."""
    return (subsets.unsqueeze(1) >> torch.arange(count - 1, -1, -1, device=subsets.device)) & 1


def _over_subsets(players: Players, image: int, empty: Tensor, rows: Tensor) -> Tensor:
    """Return ``sum_S |S|! (J - |S| - 1)! / J! (value(S + j) - value(S))``, shape (J, K)."""
    count = len(rows)
    subsets = torch.arange(1 << count, device=rows.device)
    values = torch.cat([
        players.values(image, empty + torch.tensordot(_members(part, count).to(rows.dtype), rows, 1))
        for part in subsets.split(players.at_once(image))
    ])
    chance = _list_chances(count, like=values)
    cube = values.unflatten(0, [2] * count)
    rises = [cube.select(player, 1) - cube.select(player, 0) for player in range(count)]
    return torch.stack([torch.tensordot(chance, rise.flatten(0, -2), 1) for rise in rises])
