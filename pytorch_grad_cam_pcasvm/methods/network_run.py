"""One run of a network, and the pullbacks along its path, in the shapes of maps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pytorch_grad_cam_pcasvm import moved
from pytorch_grad_cam_pcasvm.calculus.pullback import Pullback
from pytorch_grad_cam_pcasvm.calculus.secants import PathStart
from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.network.inputs import images_of, refuse_without_channels
from pytorch_grad_cam_pcasvm.network.layout import GridLayout, Layout
from pytorch_grad_cam_pcasvm.network.net import network_output
from pytorch_grad_cam_pcasvm.path.forward_pass import Pass
from pytorch_grad_cam_pcasvm.rules.cotangents import Cotangent
from pytorch_grad_cam_pcasvm.runtime.device_sync import is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import Way, refuse
from pytorch_grad_cam_pcasvm.runtime.numerics import full_precision
from pytorch_grad_cam_pcasvm.targets.output_gradients import OutputGradients


@moved.renamed_arguments(baseline="start")
@dataclass
class NetworkRun:
    """A network's run on N images.

    What is computed for K targets has the shape (N, K, ...) here; only cotangents have (K, N, ...), as on the path.

    Attributes:
        model: the network.
        images: the images it ran on, shape (N, ...).
        passed: the pass from target layers to features.
        output: the network's output, or what its head computed.
        layers: names of the target layers.
        layouts: how the activations of each target layer are arranged.
    """

    model: nn.Module
    images: Tensor
    passed: Pass
    output: Any
    layers: Sequence[str]
    layouts: Sequence[Layout]
    _last: Any = field(default=None, init=False)

    @property
    def count(self) -> int:
        """N; in a program to export a symbol, which ``len`` would make a number."""
        return self.images.shape[0]

    def activations(self, layer: int) -> Tensor:
        """Return the activations of a target layer, shape (N, T, H, W), (N, T, D, H, W) or (N, T, L)."""
        activations = self.shaped(self.passed.activations[layer], layer)
        signals = images_of(self.images)[0].dim() == 3
        if activations.dim() not in (3 if signals else 4, 4, 5):
            if activations.dim() == 3:
                refuse_without_channels(self.images, repr(self.layers[layer]))
            refuse(
                ValueError,
                f"the activations of {self.layers[layer]!r} have shape {tuple(activations.shape)}, but a map needs "
                "(N, T, H, W), (N, T, D, H, W), or of signals (N, T, L)",
                "choose an earlier layer",
                Way("pass reshape_transform='tokens' (for transformers) or a function", "reshape_transform"),
            )
        if not is_traced() and len(activations) != len(self.images):
            several = len(activations) // max(len(self.images), 1)
            refuse(
                ValueError,
                f"{self.layers[layer]!r} has activations of {len(activations)} rows for {len(self.images)} images "
                "(crops, or both of a pair, in one batch?)",
                "pass a reshape_transform that returns (N, T, H, W), as lambda t: "
                f"t.unflatten(0, (-1, {several})).transpose(1, 2).flatten(2, 3) for {several} crops of each image",
                "let the layer run once for each",
            )
        return activations

    def shaped(self, activations: Tensor, layer: int) -> Tensor:
        """Return activations of a target layer, given in the network's layout, in the shape of maps."""
        return self.layouts[layer](activations)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of gradients: that of the network's output, at least float32."""
        leaves = tree_leaves(self.passed.output)
        return torch.float64 if any(getattr(leaf, "dtype", None) == torch.float64 for leaf in leaves) else torch.float32

    @property
    def public_output(self) -> Any:
        """The network's output in the form that users get."""
        return self.output.output()

    @property
    def head(self) -> Head | None:
        """The head, if the network has one."""
        return self.output.head

    def channels_of_features(self, layer: int) -> slice | None:
        """Return which of the dense features are the activations of a target layer; None: not known, or none."""
        if self.output.grid is None or not self.layouts[layer].is_known:
            return None
        source = self.model.feature_source()[1]  # type: ignore[operator]
        names = [part.layer for part in source.parts or (source,)]
        widths = {
            name: activations.shape[layout.channels]
            for name, activations, layout in zip(self.layers, self.passed.activations, self.layouts, strict=True)
        }
        if self.layers[layer] not in names:
            return None
        place = names.index(self.layers[layer])
        if all(name in widths for name in names[:place]):
            first = sum(widths[name] for name in names[:place])
        elif all(name in widths for name in names[place:]):
            first = self.output.head_trace.values[0].shape[1] - sum(widths[name] for name in names[place:])
        else:
            return None
        return slice(first, first + widths[names[place]])

    def output_of(self, features: Any, count: int | None = None) -> Any:
        """Return the network's output for the path's output, of N images or so many."""
        return network_output(self.model, features, self.count if count is None else count, self.images)

    def pullback(self, seeds: OutputGradients, layer: int, start: PathStart | None = None) -> Pullback:
        """Return the pullback of K targets to the activations as the network has them, the same for the same seeds."""
        key = id(seeds), layer, id(start)
        if self._last is None or self._last[0] != key:
            self._last = None  # and its memory
            with full_precision(seeds.values.device):
                pulled = self.passed.pullback(self.cotangents(seeds), layer, start)
            self._last = key, pulled, (seeds, start)  # which keep their ids
        return self._last[1]

    def gradients(self, seeds: OutputGradients, layer: int, start: PathStart | None = None) -> Cotangent:
        """Return the gradients of K targets, or secants, in the shape of maps, (K, N, T, H, W)."""
        pullback = self.pullback(seeds, layer, start)
        with full_precision(seeds.values.device):
            return self.layouts[layer].gradients(pullback)

    def sums(self, seeds: OutputGradients, layer: int, start: PathStart | None = None) -> Tensor:
        """Return the pullback summed over the positions of every channel, shape (N, K, T)."""
        pullback = self.pullback(seeds, layer, start)
        with full_precision(seeds.values.device):
            return by_image(self.layouts[layer].sums(pullback))

    def products(
        self, seeds: OutputGradients, layer: int, x: Tensor, over: str, start: PathStart | None = None
    ) -> Tensor:
        """Return the pullback times x (N, T, H, W), summed over one sort of dimension.

        Args:
            seeds: of K targets.
            layer: position of the target layer.
            x: what to multiply the pullback by, in the shape of maps.
            over: ``"channels"``: the result is (N, K, H, W); ``"positions"``: (N, K, T).
            start: of secants; None: gradients.

        Returns:
            The sums.
        """
        dims = [1] if over == "channels" else list(range(2, x.dim()))
        pullback = (self.pullback if self.layouts[layer].is_that_of_maps else self.gradients)(seeds, layer, start)
        with full_precision(seeds.values.device):
            return by_image(pullback.times(x, dims))

    def contributions(
        self, seeds: OutputGradients, layer: int, x: Tensor, start: PathStart | None
    ) -> tuple[Tensor, Tensor]:
        """Return secants times x, summed over channels, and what is not on the map.

        Args:
            seeds: of K targets.
            layer: position of the target layer.
            x: activations minus those of the start, in the network's layout.
            start: of the secants.

        Returns:
            The maps, shape (N, K, H, W), and the contribution of positions that are not on them, (N, K).
        """
        layout = self.layouts[layer]
        if isinstance(layout, GridLayout) and layout.tokens is not None:
            tokens, first, length = layout.tokens
            pullback = self.pullback(seeds, layer, start)
            with full_precision(seeds.values.device):
                of_tokens = by_image(pullback.contributions(x, (layout.batch, tokens)))
            others = of_tokens[..., :first].sum(-1) + of_tokens[..., first + length :].sum(-1)
            return of_tokens.narrow(2, first, length).unflatten(2, layout.grid), others
        maps = self.products(seeds, layer, layout(x), "channels", start)
        if layout.is_known:
            return maps, maps.new_zeros(maps.shape[:2])
        with full_precision(seeds.values.device):
            pulled = self.pullback(seeds, layer, start).dense()
        change = x.to(pulled.dtype)
        totals = torch.stack([self._of_images(part * change, layer) for part in pulled], 1)
        return maps, totals - maps.flatten(2).sum(-1)

    def relevance(self, seeds: OutputGradients, layer: int, start: PathStart) -> Tensor:
        """Return the activations' relevance for K targets: the features' contributions propagated, (N, K, T, H, W)."""
        with full_precision(seeds.values.device):
            shared = self.passed.relevance(self.cotangents(seeds), layer, start)
        return by_image(self.layouts[layer].of_targets(shared))

    def _of_images(self, numbers: Tensor, layer: int) -> Tensor:
        """Return the sums over everything else of numbers that a user's layout is of, shape (N,)."""
        if numbers.shape[0] == self.count:
            return numbers.flatten(1).sum(1)
        if not self._keeps_all(numbers.shape, layer):
            refuse(
                ValueError,
                f"the first dimension of the activations of {self.layers[layer]!r}, {tuple(numbers.shape)}, does "
                "not count images, so what reshape_transform leaves out is unknown",
                Way("pass reshape_transform='tokens', for tokens (L, N, D)", "reshape_transform"),
                "pass one that leaves nothing out, as crops side by side in (N, T, P H, W)",
                "use a gradient method such as ClosedFormGradCAM",
            )
        return self.layouts[layer](numbers).flatten(1).sum(1)

    def _keeps_all(self, shape: Sequence[int], layer: int) -> bool:
        """Return whether a transform only moves numbers, each to one place: then it leaves nothing out."""
        if is_traced():
            return False
        places = torch.arange(math.prod(shape), dtype=torch.float64, device=self.images.device)
        moved = self.shaped(places.reshape(tuple(shape)), layer)
        return len(moved) == self.count and torch.equal(moved.flatten().sort().values, places)

    def cotangents(self, seeds: OutputGradients) -> list[Tensor | None]:
        """Return the seeds in the shapes of what the pass gave."""
        if self.head is None:
            return seeds.grads
        (grad,) = seeds.grads
        return [None if grad is None else grad.reshape(len(grad), *self.passed.output.shape)]


def by_image(of_targets: Tensor) -> Tensor:
    """Return what the path has for each target, (K, N, ...), for each image, (N, K, ...): axes change here alone."""
    return of_targets.transpose(0, 1)
