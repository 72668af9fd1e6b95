"""Perturbation methods: the change of a target if a part of the image or its activations is missing."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from pytorch_grad_cam import (
    AblationCAM,
    ScoreCAM,
)
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.maps.scale import MethodResult, signed_maps
from pytorch_grad_cam_pcasvm.methods.coalitions import Players, shapley_values
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.methods.run import Run
from pytorch_grad_cam_pcasvm.methods.starts import BaselineCAM
from pytorch_grad_cam_pcasvm.network.inputs import one_input
from pytorch_grad_cam_pcasvm.network.outputs import OfHead, PlainOutput
from pytorch_grad_cam_pcasvm.runtime.errors import refuse
from pytorch_grad_cam_pcasvm.runtime.progress import progress_bar
from pytorch_grad_cam_pcasvm.targets import SVMTarget
from pytorch_grad_cam_pcasvm.targets.questions import Questions


class PerturbationCAM(ClosedFormCAM):
    """A method that runs each image on its own, again and again.

    Example:
        >>> isinstance(ClosedFormScoreCAM(net, ["layer2"]), PerturbationCAM)
        True
    """

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
            value = players.values(image, origin.unsqueeze(0))
            values.append(value)
            weights.append((value - players.values(image, origin - rows)).T)
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
        blank = self._run_images(torch.zeros_like(run.images[:1]))
        steps = run.count * -(-count // self.batch_size)
        values, weights = [], []
        with progress_bar(None if steps > 20 else False, total=steps, desc="Score-CAM", leave=False) as bar:
            for image in range(run.count):
                scores = []
                for part in chosen[image].split(self.batch_size):
                    masked = run.images[image] * _masks(activations[image, part], run.images.shape[2:])
                    scores.append(targets.evaluate_changed(image, self._run_images(masked)))
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

    def _run_images(self, images: Tensor) -> Any:
        """Return the network's output for M images."""
        output = self.model(images)
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
