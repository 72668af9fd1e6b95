"""Block means: the channel means of a backbone's last blocks, counted while its features are extracted."""

from collections.abc import Iterator, Sequence
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
from pytorch_grad_cam_pcasvm.network.channel_means import ChannelMeans
from pytorch_grad_cam_pcasvm.network.features import FeatureSource
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device
from pytorch_grad_cam_pcasvm.network.tiling import Tiled


class BlockMeans:
    """The channel means of the last block of every map size, over the images that a backbone runs on.

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
        self._means: ChannelMeans | None = None
        self._repeated: list[str] = []

    @contextmanager
    def counting(self, x: Any) -> Iterator[None]:
        """Count the images x that the network runs on.

        Yields:
            Nothing.
        """
        self.begin(x)
        self.count += len(x)
        assert self._means is not None
        with self._means.counting():
            yield

    def begin(self, x: Any) -> None:
        """Find the blocks for images of the kind of x, unless that was done."""
        if self._means is not None:
            return
        self.first, x = x[:1].to(torch.device("cpu")), x[:2].to(find_device(self._backbone))
        with evaluation_mode(self._backbone), torch.no_grad():
            self._means = self._find(x)

    def _find(self, x: Any) -> ChannelMeans:
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
        self.wanted = list(dict.fromkeys([*self.names, *own, *self._also]))
        return ChannelMeans(self._backbone, self.wanted, whole)

    @property
    def means(self) -> dict[str, Tensor]:
        """The means by name of the layer, as :class:`.ChannelMeans` has them."""
        return {} if self._means is None else self._means.means

    @property
    def left_out(self) -> dict[str, str]:
        """The reason why a block has no means, by its name."""
        repeated = dict.fromkeys(self._repeated, "it runs several times")
        return repeated | ({} if self._means is None else self._means.left_out)
