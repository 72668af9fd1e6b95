"""Layer means: the average output of layers over the images of a training set."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.auto_layers import (
    find_last_blocks,
    last_blocks_by_branch,
    refuse_unmappable,
    repeated_blocks,
)
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, output_of
from pytorch_grad_cam_pcasvm.network.inputs import pick_images
from pytorch_grad_cam_pcasvm.network.keras_network import arrange_images
from pytorch_grad_cam_pcasvm.network.layout import Layout, has_other_readings, lay_out_maps
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device
from pytorch_grad_cam_pcasvm.network.tiling import Tiled, look_inside
from pytorch_grad_cam_pcasvm.network.token_layout import find_token_layout
from pytorch_grad_cam_pcasvm.runtime.rollback import called, hooked


class LayerMeans:
    """Averages the output of layers over all images that a network runs on.

    Means are by position, in the shape of a layer's output for one image. Where the outputs differ in size, a mean has
    one number a channel, in the place of all positions; tokens that are no positions of the image (class, registers)
    keep their own. Layers whose output is not a tensor that counts images first, or lies on the image in a way that
    cannot be found out, are left out; so are those that run more than once, unless their call is named, as in
    ``"block#2"``.

    Args:
        backbone: the network, in evaluation mode.
        layers: dotted names of the layers.
        x: images of the kind to come, shape (N, ...).

    Attributes:
        layouts: how the outputs of layers lie on the image, by name.
    """

    def __init__(self, backbone: nn.Module, layers: Iterable[str], x: Tensor) -> None:
        self._backbone = backbone
        self.layouts: dict[str, Layout] = {}
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._repeated: set[str] = set()
        self._tiles = 1  # rows of an image in the current pass
        self._unknown: dict[str, str] = {}
        for name in layers:
            network, inner, images = look_inside(backbone, name, x)
            output = output_of(network, inner if called(inner)[1] else f"{inner}#1", images)
            if not isinstance(output, Tensor) or output.dim() < 3:
                shape = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
                self._unknown[name] = f"its output has no positions: {shape}"
                continue
            layout = lay_out_maps(output.shape)
            if _may_be_tokens(output, images):
                try:
                    layout = find_token_layout(
                        network, lambda net, x, inner=inner: output_of(net, inner, x), repr(name), images, output
                    )
                except ValueError as error:
                    self._unknown[name] = str(error)
                    continue
                if layout.batch:
                    self._unknown[name] = "the first dimension of its output does not count the images"
                    continue
            self.layouts[name] = layout

    @property
    def left_out(self) -> dict[str, str]:
        """The reason why a layer has no means, by its name."""
        return self._unknown | dict.fromkeys(sorted(self._repeated), "it runs several times")

    @contextmanager
    def counting(self, most: int | None = None) -> Iterator[None]:
        """Count every image that the network runs on; of each pass the first ``most`` if that is given.

        Yields:
            Nothing.
        """
        calls: Counter[str] = Counter()  # in one pass, of tiles in one block
        rows_left: dict[str, int] = {}
        of_tiles = self._backbone.net if isinstance(self._backbone, Tiled) else None

        def count_call(name: str, output: Tensor) -> None:
            call = called(name)[1]
            calls[name] += 1
            if call is None and calls[name] > 1:
                self._repeated.add(name)
            elif call in (None, calls[name]):
                if most is not None:
                    rows = rows_left.get(name, most * self._tiles)
                    output, rows_left[name] = output[:rows], max(0, rows - len(output))
                self._add_output(name, output)

        def begin_pass(args: Any) -> None:
            calls.clear()
            rows_left.clear()
            self._tiles = self._backbone.find_tiling(args[0]).count if of_tiles is not None else 1  # type: ignore[operator]

        with hooked() as hooks:
            hooks.before(self._backbone, lambda module, args, *_: begin_pass(args))
            if of_tiles is not None:
                hooks.before(of_tiles, lambda *_: calls.clear())
            for name in self.layouts:
                module = self._backbone.get_submodule(called(name)[0])
                hooks.after(module, lambda module, args, kwargs, output, name=name: count_call(name, output))
            yield

    def _add_output(self, name: str, output: Tensor) -> None:
        total, before = output.sum(0, dtype=torch.float64) / self._tiles, self._totals.get(name)
        self._dtypes[name] = torch.promote_types(output.dtype, torch.float32)
        if before is not None and before.shape != total.shape:
            before, total = (average_positions(one, self.layouts[name]) for one in (before, total))
        self._totals[name] = total if before is None else before + total
        self._counts[name] = self._counts.get(name, 0) + len(output) / self._tiles

    def take_totals(self) -> dict[str, Tensor]:
        """Return the sums over images, float64, of each layer that ran once, and begin anew."""
        totals = {name: total for name, total in self._totals.items() if name not in self._repeated}
        self._totals, self._counts = {}, {}
        return totals

    @property
    def means(self) -> dict[str, Tensor]:
        """The means of each layer, at least float32, in the shape of its output for one image; see the class."""
        totals = {name: total for name, total in self._totals.items() if name not in self._repeated}
        return {name: (total / self._counts[name]).to(self._dtypes[name]).cpu() for name, total in totals.items()}


def _may_be_tokens(output: Tensor, x: Any) -> bool:
    """Return whether the channels of a layer's output may come last, which its shape does not tell."""
    images = pick_images(x)
    if images[0].dim() == 3:  # signals, whose layers return (N, T, L) or (N, L, T)
        return True
    return any(has_other_readings(output.shape, image.shape) for image in images)


def average_positions(mean: Tensor, layout: Layout) -> Tensor:
    """Return a layer's mean with one number a channel in the place of all positions; other tokens keep their own.

    Args:
        mean: in the shape of the layer's output for one image.
        layout: how that output is arranged.
    """
    channels = layout.channels - 1
    if not layout.extra_tokens:
        return mean.mean([dim for dim in range(mean.dim()) if dim != channels], keepdim=True)
    tokens = 1 - channels
    sizes = [layout.before, mean.shape[tokens] - layout.extra_tokens, layout.after]
    before, of_grid, after = mean.split(sizes, tokens)
    return torch.cat([before, of_grid.mean(tokens, keepdim=True), after], tokens)


class BlockMeans:
    """The means of the last block of every map size, over the images that a backbone runs on.

    Args:
        backbone: the network, in evaluation mode.
        source: where its features come from.
        also: further layers whose means are wanted; those that no map can be of are refused with the first images.

    Attributes:
        names: of the last blocks, from the finest to the coarsest; empty before the first images.
        wanted: names of all layers whose means are counted.
        last: the last of these before all features, of several inputs one for each branch.
        count: number of images so far.
        first: the first of them, on the CPU.
    """

    def __init__(self, backbone: nn.Module, source: FeatureSource, also: Sequence[str] = ()) -> None:
        self._backbone, self._source, self._also = backbone, source, also
        self.names: list[str] = []
        self.wanted: list[str] = []
        self.last: list[str] = []
        self.count = 0
        self.first: Any = None
        self._means: LayerMeans | None = None
        self._repeated: list[str] = []

    @contextmanager
    def counting(self, x: Any) -> Iterator[None]:
        """Count the images x that the network runs on.

        Yields:
            Nothing.
        """
        means = self.begin_batch(x)
        self.count += len(x)
        with means.counting():
            yield

    def begin_batch(self, x: Any) -> LayerMeans:
        """Find the blocks for images of the kind of x, unless that was done, and return their means so far."""
        if self._means is not None:
            return self._means
        x = arrange_images(self._backbone, x)
        self.first, x = x[:1].to(torch.device("cpu")), x[:2].to(find_device(self._backbone))
        with evaluation_mode(self._backbone), torch.no_grad():
            self._means = self._find(x)
        return self._means

    def _find(self, x: Any) -> LayerMeans:
        backbone, source, prefix, whole = self._backbone, self._source, "", x
        if isinstance(backbone, Tiled):  # of the first tile
            prefix, x, source = backbone.prefix, backbone.find_tiling(x).cut(x)[:1], backbone.source
            backbone = backbone.net
        source = source.at(backbone, x)
        if self._also:
            refuse_unmappable(self._backbone, self._source.at(self._backbone, whole), self._also, whole)
        try:
            self.names = [prefix + name for name in find_last_blocks(backbone, source, x)]
            # What comes before the first of several layers is before all.
            before = [last_blocks_by_branch(backbone, part, x) for part in source.parts or (source,)]
            self.last = [prefix + branch[-1] for branch in min(before, key=lambda branches: sum(map(len, branches)))]
        except ValueError:  # the features may be all that is wanted
            pass
        self._repeated = [prefix + name for name in repeated_blocks(backbone, source, x)]
        own = [prefix + part.layer for part in source.parts or (source,) if part.layer]
        self.wanted = list(dict.fromkeys([*self.names, *self.last, *own, *self._also]))
        return LayerMeans(self._backbone, self.wanted, whole)

    @property
    def means(self) -> dict[str, Tensor]:
        """The means by name of the layer, as :class:`.LayerMeans` has them."""
        return {} if self._means is None else self._means.means

    @property
    def left_out(self) -> dict[str, str]:
        """The reason why a block has no means, by its name."""
        repeated = dict.fromkeys(self._repeated, "it runs several times")
        return repeated | ({} if self._means is None else self._means.left_out)
