"""Perturbation methods: the change of a target if a part of the image or its activations is missing."""

from collections.abc import Iterator, Sequence
from math import factorial
from typing import Any

import torch
from pytorch_grad_cam import AblationCAM, ScoreCAM
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.maps.results import MethodResult, signed_maps
from pytorch_grad_cam_pcasvm.methods.baseline import BaselineCAM
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.inputs import one_input
from pytorch_grad_cam_pcasvm.network.outputs import HeadRun, OfHead, PlainOutput
from pytorch_grad_cam_pcasvm.path.passes import need_tape
from pytorch_grad_cam_pcasvm.runtime.device import kept_on_devices
from pytorch_grad_cam_pcasvm.runtime.errors import refuse
from pytorch_grad_cam_pcasvm.runtime.log import progress_bar
from pytorch_grad_cam_pcasvm.starts.run import Run
from pytorch_grad_cam_pcasvm.targets import SVMTarget
from pytorch_grad_cam_pcasvm.targets.questions import Questions

EXACT = 12  # players of whom all subsets are evaluated
_BYTES = 1 << 28


class Players:
    """The players of one target layer, channels or positions, which are present in a decision or absent.

    Up to the first nonlinear step each player is a row that is computed once; a changed image is evaluated from there
    on, without the stem.

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
        self._affine = need_tape(run.recorded, "players").whole.affine(layer)
        is_rearranged = not run.layouts[layer].is_map_shaped
        self._rows = self._reshaped(layer, x, over) if is_rearranged else self._affine.isolate_players(x, over)
        self._origin = self._affine.value
        self._resumed: tuple[Head, int] | None = None
        one_row = run.output.grid is None
        if self._affine.is_output and run.head is not None and one_row and questions.are_closed_form:
            # The head's linear beginning, too, is passed once, by every player's row.
            head, trace, position = run.head, run.output.head_trace, run.head.linear_until
            self._resumed, self._origin = (head, position), trace.values[position]
            self._rows = self._rows.flatten(2).to(self._origin.dtype)
            if position:
                jacobian, _ = head.pullback(trace, {position: None})
                self._rows = self._rows @ jacobian.mT

    def _reshaped(self, layer: int, x: Tensor, over: str) -> Tensor:
        """Return the rows of players of activations that were brought to another shape."""
        run = self._run
        raw = run.recorded.activations[layer]
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
        if self._resumed is None:
            row *= self._run.count  # what goes around the path may be that of every image
        return max(1, self._bytes // (row + (0 if head is None else head.bytes_per_target(1))))

    def evaluate_images(self, image: int, rows: Tensor) -> Tensor:
        """Return the values of the targets for changed versions (M, D) of an image, shape (M, K)."""
        parts = []
        for part in rows.split(self.at_once(image)):
            if self._resumed is None:
                changed = self._run.output_of(self._affine.run_rows(part, image), len(part))
            else:
                head, position = self._resumed
                changed = HeadRun(head, head.resume(position, part))
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
    whole, none = players.evaluate_images(image, torch.stack([origin, empty]))
    if len(rows) <= EXACT:
        shares = _over_subsets(players, image, empty, rows)
        return shares.T, torch.zeros_like(shares.T), whole, none
    means = []
    for order in _draw_orders(len(rows), samples // 2, seed, like=rows):
        pair = []
        for permutation in (order, order.flip(0)):
            joined = empty + rows[permutation].cumsum(0)
            values = torch.cat([none.unsqueeze(0), players.evaluate_images(image, joined[:-1]), whole.unsqueeze(0)])
            pair.append(torch.zeros_like(values[1:]).index_copy(0, permutation, values.diff(dim=0)))
        means.append((pair[0] + pair[1]) / 2)
    drawn = torch.stack(means)
    return drawn.mean(0).T, (drawn.std(0) / len(drawn) ** 0.5).T, whole, none


@kept_on_devices
def _draw_orders(players: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(players, generator=generator, device="cpu") for _ in range(count)])


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
        players.evaluate_images(image, empty + torch.tensordot(_members(part, count).to(rows.dtype), rows, 1))
        for part in subsets.split(players.at_once(image))
    ])
    chance = _list_chances(count, like=values)
    cube = values.unflatten(0, [2] * count)
    rises = [cube.select(player, 1) - cube.select(player, 0) for player in range(count)]
    return torch.stack([torch.tensordot(chance, rise.flatten(0, -2), 1) for rise in rises])


class PerturbationCAM(ClosedFormCAM):
    """A method that runs each image on its own, again and again.

    Example:
        >>> isinstance(ClosedFormScoreCAM(net, ["layer2"]), PerturbationCAM)
        True
    """

    has_errors = False

    def _split_chunks(self, questions: Questions, run: Run) -> Iterator[Questions]:
        yield questions  # all share these runs


class ClosedFormAblationCAM(BaselineCAM, PerturbationCAM, AblationCAM):
    """Ablation-CAM, ``sum_t w_t F_t`` where ``w_t`` is the target's value minus its value without channel t.

    For each channel, only the part from the first nonlinear step onwards is evaluated. The paper and pytorch-grad-cam
    divide by the value, which would invert the map of a negative value; this class does not divide. Desai and
    Ramaswamy, WACV 2020.
    """

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        _refuse_tiles(run, layer, type(self).__name__)
        activations = run.activations(layer)
        players = Players(run, layer, run.difference(layer), "channels", targets, self.max_bytes)
        values, weights = [], []
        for image in range(run.count):
            origin, rows = players.of(image)
            value = players.evaluate_images(image, origin.unsqueeze(0))
            values.append(value)
            weights.append((value - players.evaluate_images(image, origin - rows)).T)
        weight = torch.stack(weights).to(run.dtype)
        value = torch.cat(values)
        return MethodResult(signed_maps(weight, activations), weight, value, torch.zeros_like(value))


class ClosedFormScoreCAM(PerturbationCAM, ScoreCAM):
    """Score-CAM, ``sum_t w_t F_t``, where ``w_t`` is the rise of the target for the image masked by channel t.

    ``w_t = value(image * mask_t) - value(0 * image)``, where mask_t is the channel, upsampled and scaled to [0, 1]. All
    targets share the T runs of the network. Wang et al., arXiv 1910.01279.

    Args:
        softmax: apply a softmax over the channels to the weights, as pytorch-grad-cam does; for components and margins
            it saturates, and evidence against a target is lost.
        channels: number of channels to use as masks, those with the largest variance over positions; the others get no
            weight, which approximates the paper's method. None: all.
        batch_size: batch size of the masked runs.

    Raises:
        ValueError: ``channels`` or ``batch_size`` is not a positive integer.

    Example:
        >>> maps = ClosedFormScoreCAM(net, ["layer2"], channels=4).explain(images)
    """

    _predicted = SVMTarget()

    def __init__(
        self,
        model: Any,
        target_layers: Any,
        reshape_transform: Any = None,
        *,
        softmax: bool = False,
        channels: int | None = None,
        batch_size: int = 16,
        jacobian: str = "closed_form",
        max_bytes: int | None = None,
    ) -> None:
        for name, number in (("channels", channels), ("batch_size", batch_size)):
            if not (number is None and name == "channels") and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} must be a positive integer, got {number!r}")
        super().__init__(model, target_layers, reshape_transform, jacobian=jacobian, max_bytes=max_bytes)
        self.softmax, self.channels, self.batch_size = softmax, channels, batch_size

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        one_input(run.images, type(self).__name__)
        _refuse_tiles(run, layer, type(self).__name__)
        activations = run.activations(layer)
        count = min(self.channels or activations.shape[1], activations.shape[1])
        chosen = activations.flatten(2).float().var(2, correction=0).topk(count).indices
        blank = self._run_images(run, torch.zeros_like(run.images[:1]))
        steps = run.count * -(-count // self.batch_size)
        values, weights = [], []
        with progress_bar(None if steps > 20 else False, total=steps, desc="Score-CAM", leave=False) as bar:
            for image in range(run.count):
                scores = []
                for part in chosen[image].split(self.batch_size):
                    masked = run.images[image] * _masks(activations[image, part], run.images.shape[2:])
                    scores.append(targets.evaluate_changed(image, self._run_images(run, masked)))
                    bar.update()
                rise = torch.cat(scores) - targets.evaluate_changed(image, blank)
                # A softmax of the falls is not the opposite of one of the rises.
                signs = (rise.softmax(0), (-rise).softmax(0)) if self.softmax else (rise,)
                none = rise.new_zeros(activations.shape[1], rise.shape[1])
                weights.append([none.index_copy(0, chosen[image], weight).T for weight in signs])
                values.append(targets.evaluate_changed(image, run.output.rows(slice(image, image + 1))))
        of_signs = [torch.stack(per_image).to(run.dtype) for per_image in zip(*weights, strict=True)]
        maps, *opposite = (signed_maps(weight, activations) for weight in of_signs)
        value = torch.cat(values)
        return MethodResult(maps, of_signs[0], value, torch.zeros_like(value), *opposite)

    def _run_images(self, run: Run, images: Tensor) -> Any:
        """Return the network's output for M images."""
        output = run.model(images)
        return output if isinstance(output, OfHead) else PlainOutput(output, len(images))


def _masks(channels: Tensor, size: Sequence[int]) -> Tensor:
    """Return channels (M, H, W) upsampled to the image and brought to [0, 1], shape (M, 1, *size)."""
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    up = F.interpolate(channels.unsqueeze(1), tuple(size), mode=mode, align_corners=True)  # as the host
    low, high = up.flatten(1).amin(1), up.flatten(1).amax(1)
    low, span = (v.reshape(-1, *[1] * (up.dim() - 1)) for v in (low, high - low))
    return torch.where(span > 0, (up - low) / torch.where(span > 0, span, 1.0), 0.0)


class ShapCAM(BaselineCAM, PerturbationCAM):
    """Shapley values of positions: the mean rise of the target when a position joins the others in random order.

    They add up, as contributions do: ``maps.sum((2, 3)) + baseline_values == values``. Absent positions have the
    activations of the baseline. For up to 12 positions, the values are exact, over all subsets; for more, random orders
    are sampled, each together with its reverse, and ``standard_errors`` are given for every position. Zheng et al.,
    arXiv 2208.03608.

    Args:
        samples: number of orders to draw; must be even.
        seed: random seed of the orders.

    Raises:
        TypeError: ``seed`` is not an integer.
        ValueError: ``samples`` is not an even number of at least 4.

    Example:
        >>> errors = ShapCAM(net, ["layer2"], samples=8).explain(images, PCATarget(0)).standard_errors
    """

    def __init__(
        self,
        model: Any,
        target_layers: Any,
        reshape_transform: Any = None,
        *,
        samples: int = 64,
        seed: int = 0,
        baseline: Any = "neutral",
        mean: Tensor | Sequence[Tensor] | None = None,
        jacobian: str = "closed_form",
        attention: str = "exact",
        max_bytes: int | None = None,
    ) -> None:
        if not isinstance(samples, int) or samples < 4 or samples % 2:
            raise ValueError(f"samples must be an even number, at least 4 (orders come in pairs), got {samples!r}")
        if not isinstance(seed, int):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        super().__init__(
            model,
            target_layers,
            reshape_transform,
            baseline=baseline,
            mean=mean,
            jacobian=jacobian,
            attention=attention,
            max_bytes=max_bytes,
        )
        self.samples, self.seed = samples, seed

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        _refuse_tiles(run, layer, type(self).__name__)
        shape = run.activations(layer).shape[2:]
        players = Players(run, layer, run.difference(layer), "positions", targets, self.max_bytes)
        # The same orders for every image: its map does not depend on the others.
        parts = [shapley_values(players, image, self.samples, self.seed) for image in range(run.count)]
        maps, errors, values, baseline_values = (torch.stack(column) for column in zip(*parts, strict=True))
        maps, errors = (numbers.unflatten(-1, shape).to(run.dtype) for numbers in (maps, errors))
        weights = maps.new_zeros(*maps.shape[:2], 0)  # channels have none
        none = torch.zeros_like(values)  # tokens of no patch stay as they are, also at the baseline
        return MethodResult(
            maps, weights, values, none, None, baseline_values, remainder=none.to(maps), standard_errors=errors
        )

    def terms(self, run: Run, layer: int, questions: Questions, result: MethodResult) -> Tensor:
        raise ValueError(
            "eigen_smooth takes a principal component over channels, but the players of ShapCAM are positions"
        )


def _refuse_tiles(run: Run, layer: int, name: str) -> None:
    """Refuse a method that changes an image, or its activations, again and again, where a layer runs on tiles."""
    if run.layouts[layer].crops is not None:
        refuse(
            ValueError,
            f"{name} changes one image at a time, which does not work on tiles of images",
            "use LIFTCAM or ContributionCAM",
            "explain the network without tiles, on images of a larger size",
        )
