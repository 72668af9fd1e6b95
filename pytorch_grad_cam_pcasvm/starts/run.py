"""A run of a network: its pass, the gradients or secants of targets, and pullbacks in the shapes of maps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.network.features import flatten
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, pick_images, refuse_without_channels
from pytorch_grad_cam_pcasvm.network.layout import Layout
from pytorch_grad_cam_pcasvm.network.net import network_output
from pytorch_grad_cam_pcasvm.path.backward import Pullback
from pytorch_grad_cam_pcasvm.path.passes import Pass, need_tape
from pytorch_grad_cam_pcasvm.path.secants import PathStart
from pytorch_grad_cam_pcasvm.rules.cotangents import Cotangent
from pytorch_grad_cam_pcasvm.runtime.device import full_precision, is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_leaves
from pytorch_grad_cam_pcasvm.starts.boundary_head import Boundary
from pytorch_grad_cam_pcasvm.targets import PCATarget
from pytorch_grad_cam_pcasvm.targets.output_gradients import OutputGradients, differentiate_targets
from pytorch_grad_cam_pcasvm.targets.questions import Questions


@dataclass(frozen=True, eq=False)
class Start:
    """Where secants start.

    Attributes:
        path: the path's values there; None: its secants are its derivative.
        output: the network's output there, with N rows or one for all.
        activations: of the target layer, of one row or N, in the network's own layout.
        difference: the images' activations minus these.
        boundary: where each target starts, if not all start here, whose activations are the mean.
    """

    path: PathStart | None
    output: Any
    activations: Tensor
    difference: Tensor
    boundary: Boundary | None = None


@dataclass(frozen=True, eq=False)
class StartPlan:
    """Where K targets start at a target layer.

    Attributes:
        groups: the indices of targets that share a start, and a function that runs the path from it, which takes
            memory: one start after the other.
        boundary: where each target starts, if all are computed from the training mean and moved to their own starts.
        components_apart: whether contributions to components start at different activations.
    """

    groups: Sequence[tuple[Sequence[int], Callable[[], Start]]]
    boundary: Boundary | None = None
    components_apart: bool = False

    @property
    def is_neutral(self) -> bool:
        """Whether each target starts on its boundary, and components are affine in the features."""
        head = None if self.boundary is None else self.boundary.head
        return head is not None and head.component_position is not None and has_affine_components(head)


@dataclass(frozen=True, eq=False)
class Asked(OutputGradients):
    """What K targets ask of a run: their gradients, or their secants from a start.

    Attributes:
        start: where the secants start; None: these are gradients.
        pullbacks: their pullbacks by position of the target layer: a method may read one more than once.
    """

    start: Start | None = None
    pullbacks: dict[int, Pullback] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Run:
    """A network's run on N images: facts, and where what is asked of it starts.

    What is computed for K targets has the shape (N, K, ...) here; only cotangents have (K, N, ...), as on the path.

    Attributes:
        model: the network.
        images: the images it ran on, shape (N, ...).
        recorded: the pass from target layers to features.
        output: the network's output, or what its head computed.
        layers: names of the target layers.
        layouts: how the activations of each target layer are arranged.
        record: runs the network on other images, up to the features.
        starts: where secants start, by position of the target layer; none for gradients.
    """

    model: nn.Module
    images: Tensor
    recorded: Pass
    output: Any
    layers: Sequence[str]
    layouts: Sequence[Layout]
    record: Callable[[Tensor], Pass]
    starts: Mapping[int, Start] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """N."""
        return self.images.shape[0]  # in a program to export a symbol, which len would make a number

    @property
    def head(self) -> Head | None:
        """The head, if the network has one."""
        return self.output.head

    @property
    def has_one_head(self) -> bool:
        """Whether all questions are asked of one head, whose components stand for them."""
        return True

    @property
    def features(self) -> Tensor:
        """What the head takes: the path's output, (N, D), or of dense features (N, D, h, w)."""
        dense = self.output.grid is not None
        return self.recorded.output if dense else flatten(self.recorded.output)

    @property
    def has_branches(self) -> bool:
        """Whether target layers are those of several inputs, each with maps on a grid of its own."""
        return isinstance(self.images, Inputs) and len(self.layers) > 1

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of gradients: that of the network's output, at least float32."""
        wide = any(getattr(leaf, "dtype", None) == torch.float64 for leaf in tree_leaves(self.recorded.output))
        return torch.float64 if wide else torch.float32

    @cached_property
    def _arranged(self) -> list[Tensor]:
        return [self.shaped(activations, layer) for layer, activations in enumerate(self.recorded.activations)]

    def activations(self, layer: int) -> Tensor:
        """Return the activations of a target layer, shape (N, T, H, W), (N, T, D, H, W) or (N, T, L)."""
        return self._check_shape(self._arranged[layer], layer)

    def _check_shape(self, activations: Tensor, layer: int) -> Tensor:
        signals = pick_images(self.images)[0].dim() == 3
        if activations.dim() not in (3 if signals else 4, 4, 5):
            if activations.dim() == 3:
                refuse_without_channels(self.images, repr(self.layers[layer]))
            refuse(
                ValueError,
                f"the activations of {self.layers[layer]!r} have shape {tuple(activations.shape)}, but a map needs "
                "(N, T, H, W), (N, T, D, H, W), or of signals (N, T, L)",
                "choose an earlier layer",
                Fix("pass reshape_transform='tokens' (for transformers) or a function", "reshape_transform"),
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

    def ends_in_mean(self, layer: int) -> bool:
        """Return whether the path's output is the mean over all positions of a target layer, and of all tiles."""
        layout = self.layouts[layer]
        return layout.has_channels_first and self.recorded.averages(layer, layout.tile_count)

    @property
    def public_output(self) -> Any:
        """The network's output in the form that users get."""
        return self.output.output()

    def output_of(self, features: Any, count: int | None = None) -> Any:
        """Return the network's output for the path's output, of N images or so many."""
        return network_output(self.model, features, self.count if count is None else count, self.images)

    def pullback(self, asked: Asked, layer: int) -> Pullback:
        """Return the pullback of K targets to the activations as the network has them."""
        if layer not in asked.pullbacks:
            with full_precision(asked.values.device):
                path = None if asked.start is None else asked.start.path
                asked.pullbacks[layer] = self.recorded.pullback(self.cotangents(asked), layer, path)
        return asked.pullbacks[layer]

    def gradients(self, asked: Asked, layer: int) -> Cotangent:
        """Return the gradients of K targets, or secants, in the shape of maps, (K, N, T, H, W)."""
        pullback = self.pullback(asked, layer)
        with full_precision(asked.values.device):
            return self.layouts[layer].gradients(pullback)

    def sums(self, asked: Asked, layer: int) -> Tensor:
        """Return the pullback summed over the positions of every channel, shape (N, K, T)."""
        pullback = self.pullback(asked, layer)
        with full_precision(asked.values.device):
            return by_image(self.layouts[layer].sums(pullback))

    def products(self, asked: Asked, layer: int, x: Tensor, over: str) -> Tensor:
        """Return the pullback times x (N, T, H, W), summed over one sort of dimension.

        Args:
            asked: what K targets ask.
            layer: position of the target layer.
            x: what to multiply the pullback by, in the shape of maps.
            over: ``"channels"``: the result is (N, K, H, W); ``"positions"``: (N, K, T).

        Returns:
            The sums.
        """
        dims = [1] if over == "channels" else list(range(2, x.dim()))
        layout = self.layouts[layer]
        pullback: Any = (self.pullback if layout.has_channels_first else self.gradients)(asked, layer)
        with full_precision(asked.values.device):
            if layout.crops is None or not layout.has_channels_first:
                return by_image(pullback.times(x, dims))
            products = pullback.times(layout.crops.take_apart(x), dims)
            if over == "positions":
                return by_image(layout.crops.sum_tiles(products, 1))
            return layout.crops.put_side_by_side(by_image(products))

    def contributions(self, asked: Asked, layer: int) -> tuple[Tensor, Tensor]:
        """Return secants times the change from their start, summed over channels, and the remainder beside the map.

        Returns:
            The maps, shape (N, K, H, W), and the contribution of positions that are not on them, (N, K).
        """
        assert asked.start is not None
        x, layout = asked.start.difference, self.layouts[layer]
        with full_precision(asked.values.device):
            pullback = self.pullback(asked, layer)
            if layout.tokens is not None:
                tokens, first, length = layout.tokens
                of_tokens = by_image(pullback.contributions(x, (layout.batch, tokens)))
                prefix_sums = of_tokens[..., :first].sum(-1) + of_tokens[..., first + length :].sum(-1)
                maps = of_tokens.narrow(2, first, length).unflatten(2, layout.grid)
                if layout.crops is None:
                    return maps, prefix_sums
                return layout.crops.put_side_by_side(maps), layout.crops.sum_tiles(prefix_sums, 0)
            if layout.has_channels_first:
                maps = by_image(pullback.times(x, [1]))
                maps = maps if layout.crops is None else layout.crops.put_side_by_side(maps)
            else:
                maps = by_image(layout.gradients(pullback).times(layout(x), [1]))
            if layout.is_known:
                return maps, maps.new_zeros(maps.shape[:2])
            pulled = pullback.dense()
        change = x.to(pulled.dtype)
        totals = torch.stack([_sum_images(self, part * change, layer) for part in pulled], 1)
        return maps, totals - maps.flatten(2).sum(-1)

    def relevance(self, asked: Asked, layer: int) -> Tensor:
        """Return the activations' relevance for K targets: the features' contributions propagated, (N, K, T, H, W)."""
        path = None if asked.start is None else asked.start.path
        assert path is not None
        with full_precision(asked.values.device):
            tape = need_tape(self.recorded, "relevance")
            shared = tape.relevance(self.cotangents(asked), layer, path)
        return by_image(self.layouts[layer].of_targets(shared))

    def cotangents(self, output_gradients: OutputGradients) -> list[Tensor | None]:
        """Return the output gradients in the shapes of the pass's outputs."""
        if self.head is None:
            return output_gradients.grads
        (grad,) = output_gradients.grads
        return [None if grad is None else grad.reshape(len(grad), *self.recorded.output.shape)]

    def output_gradients(self, targets: Sequence[Any], until: int = 0) -> Asked:
        """Return the gradients of K targets by the features, in the precision of maps.

        Or with respect to another of the head's values, at the position ``until``, in its own precision.
        """
        return Asked(**vars(differentiate_targets(self.output, targets, self._find_dtype(until), until=until)))

    def secants(self, targets: Sequence[Any], layer: int, until: int = 0) -> Asked:
        """Return the secants of K targets from where they start, as :meth:`output_gradients`; without one, these."""
        start = self.starts.get(layer)
        if start is None:
            return self.output_gradients(targets, until)
        if start.boundary is not None:
            secants = start.boundary.differentiate(self.output, targets, self.dtype, until)
        else:
            dtype = self._find_dtype(until)
            secants = differentiate_targets(self.output, targets, dtype, start.output, until=until)
        return Asked(**vars(secants), start=start)

    def _find_dtype(self, position: int) -> torch.dtype:
        return self.output.head_trace.values[position].dtype if position else self.dtype

    def start_together(self, starts: Mapping[int, Tensor]) -> dict[int, Start]:
        """Return where secants start that begin at activations of one layer, or of one in each branch."""
        path = need_tape(self.recorded, "secants").run_from(starts)
        output, activations = self.output_of(path.output), self.recorded.activations
        return {
            layer: Start(path, output, features, activations[layer] - features) for layer, features in starts.items()
        }

    def start_at(self, layer: int, activations: Tensor) -> Start:
        """Run the path from activations of one layer, as a start."""
        return self.start_together({layer: activations})[layer]

    def difference(self, layer: int) -> Tensor:
        """Return activations minus the start's, in the shape of maps."""
        return self.activations(layer) - self.shaped(self.starts[layer].activations, layer)

    def with_pass(self, recorded: Pass) -> "Run":
        """Return the explanation of another pass of the same images."""
        return replace(self, recorded=recorded, output=self.output_of(recorded.output), starts={})

    def replay(self, layer: int, activations: Tensor) -> "Run":
        """Return the run repeated from other activations of a target layer."""
        recorded = need_tape(self.recorded, "way to run its steps again").whole
        return self.with_pass(recorded.replay(activations, layer))

    def isolate(self) -> "Run":
        """Return a run of one image whose steps behind the target layers do not depend on the images.

        It is this one if nothing bypasses them, else that of a black image.
        """
        crops = [layout.crops for layout in self.layouts if layout.crops is not None]
        if crops:  # one tile stands for all
            backbone: Any = self.model.backbone
            height, width = backbone.size
            black = self.images.new_zeros(1, self.images.shape[1], height, width)
            layouts = [replace(layout, crops=layout.crops and layout.crops.first) for layout in self.layouts]
            return replace(self, images=black, layouts=layouts).with_pass(self.record(black))
        if self.count == 1 and self.recorded.is_isolated(self.model):
            return self
        black = torch.zeros_like(self.images[:1])
        return replace(self, images=black).with_pass(self.record(black))


def by_image(of_targets: Tensor) -> Tensor:
    """Return numbers for each target, (K, N, ...), as numbers for each image, (N, K, ...): axes change here alone."""
    return of_targets.transpose(0, 1)


def _sum_images(run: Run, numbers: Tensor, layer: int) -> Tensor:
    """Return the sums over everything else of numbers that a user's layout is of, shape (N,)."""
    if numbers.shape[0] == run.count:
        return numbers.flatten(1).sum(1)
    if not _keeps_all(run, numbers.shape, layer):
        refuse(
            ValueError,
            f"the first dimension of the activations of {run.layers[layer]!r}, {tuple(numbers.shape)}, does "
            "not count images, so what reshape_transform leaves out is unknown",
            Fix("pass reshape_transform='tokens', for tokens (L, N, D)", "reshape_transform"),
            "pass one that leaves nothing out, as crops side by side in (N, T, P H, W)",
            "use a gradient method such as ClosedFormGradCAM",
        )
    return run.layouts[layer](numbers).flatten(1).sum(1)


def _keeps_all(run: Run, shape: Sequence[int], layer: int) -> bool:
    """Return whether a transform only moves numbers, each to one place: then it leaves nothing out."""
    if is_traced():
        return False
    places = torch.arange(math.prod(shape), dtype=torch.float64, device=run.images.device)
    arranged = run.shaped(places.reshape(tuple(shape)), layer)
    return len(arranged) == run.count and torch.equal(arranged.flatten().sort().values, places)


def adds_components(run: Run, layer: int, questions: Questions) -> bool:
    """Return whether maps of all questions are sums of the component maps of a layer, from the same start."""
    one_row = run.has_one_head and run.output.grid is None
    if not one_row or questions.images is not None or not shares_start(run, layer):
        return False
    return questions.are_closed_form and not any(isinstance(column.target, PCATarget) for column in questions.columns)


def shares_start(run: Run, layer: int) -> bool:
    """Return whether maps of decisions may start together: from each one's own start they differ by a constant only."""
    start = run.starts.get(layer)
    return start is None or start.boundary is None or has_affine_components(run.output.head)


def has_affine_components(head: Head) -> bool:
    """Return whether the components of a head are affine in its features; so are the features themselves."""
    return all(stage.linear for stage in head.stages[: head.component_position or 0])
