"""A path whose images are tiles in blocks: features of all first, then each block again when it is pulled back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.features import output_of
from pytorch_grad_cam_pcasvm.network.tiles import TiledNet
from pytorch_grad_cam_pcasvm.network.tiling import Tiling, look_inside
from pytorch_grad_cam_pcasvm.path.backward import Pullback
from pytorch_grad_cam_pcasvm.path.passes import ClosedFormPass, TapePass
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.rules.cotangents import Cotangent
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, kept_on_devices


@dataclass
class BlockStart:
    """Where secants of a path in blocks start.

    Attributes:
        activations: of target layers, by position: one row for all tiles, or one for each.
        output: the features there.
    """

    activations: Mapping[int, Tensor]
    output: Tensor


@dataclass
class BlockPass(TapePass):
    """The pass of a network on tiles, of which only features and the activations of target layers are kept.

    Args:
        backbone: the network.
        x: its images.
        all_tiles: the path of all tiles at once, for what cannot be done in blocks.
        inner: the path inside of the network that runs on tiles.
        names: dotted names of the target layers.
    """

    backbone: TiledNet
    x: Tensor
    all_tiles: Path
    inner: Path
    names: Sequence[str]
    activations: list[Tensor] = field(init=False)
    output: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Run all tiles, without recording anything; one of them is recorded, or its path refused."""
        self._tiling: Tiling = self.backbone.find_tiling(self.x)
        self._one: ClosedFormPass = self.inner.run(self._tiling.cut(self.x, [0]))
        names = [look_inside(self.backbone, name, self.x)[1] for name in self.names]
        source, features = self.backbone.find_source(self.x), list[Tensor]()
        pieces: dict[str, list[Tensor]] = {name: [] for name in names}

        def keep_output(name: str, output: Tensor) -> None:
            pieces[name].append(output.clone())  # what follows may write into it

        with torch.no_grad():
            for tiles, _ in self._split_blocks(range(len(self.x) * self._tiling.count)):
                features.append(output_of(self.backbone.net, source, tiles, dict.fromkeys(names, keep_output)))
        dtypes = [activations.dtype for activations in self._one.activations]
        self.activations = [torch.cat(pieces[name]).to(dtype) for name, dtype in zip(names, dtypes, strict=True)]
        self.output = self._merge(torch.cat(features).to(self._one.output.dtype))

    def _split_blocks(self, numbers: Sequence[int]) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """Yield some tiles in blocks, and their numbers."""
        for first in range(0, len(numbers), self.backbone.block):
            part = numbers[first : first + self.backbone.block]
            yield self._tiling.cut(self.x, part), part

    def _list_seeing(self, of_tiles: Tensor) -> Sequence[int]:
        """Return the tiles on which targets depend; all, where nothing may be looked at."""
        if not self.backbone.source.dense or not can_sync(of_tiles):
            return range(of_tiles.shape[1])
        seeing: list[int] = of_tiles.transpose(0, 1).flatten(1).any(1).nonzero()[:, 0].tolist()
        return seeing

    def _merge(self, features: Tensor) -> Tensor:
        return self.backbone.merge(features, self._tiling)

    def pullback(self, output_gradients: Sequence[Tensor | None], target: int, start: Any = None) -> Pullback:
        """Return the derivative with respect to ``activations[target]``, or its secant from a start, block by block."""
        (seed,) = output_gradients
        assert seed is not None
        of_tiles = self.backbone.pull_merge(seed, self._tiling)
        pulled = of_tiles.new_zeros(*of_tiles.shape[:2], *self.activations[target].shape[1:])
        for tiles, numbers in self._split_blocks(self._list_seeing(of_tiles)):
            passed = self.inner.run(tiles)
            path = None if start is None else passed.run_from(_take_rows(start.activations, numbers))
            rows = _list_rows(tuple(numbers), like=pulled)
            part = passed.pullback([of_tiles[:, rows]], target, path).dense()
            pulled = pulled.index_copy(1, rows, part.to(pulled.dtype))
        return Pullback(Cotangent(pulled))

    def run_from(self, starts: Mapping[int, Tensor]) -> Any:
        """Return where secants start, with the features there."""
        alike = all(len(activations) == 1 for activations in starts.values())
        if alike and self._one.is_isolated(self.backbone.net):  # all tiles have the same features there
            features = self._one.run_from(starts).output
            features = features.expand(self._tiling.count, *features.shape[1:])  # of one image, which stands for all
        else:
            features = torch.cat([
                self.inner.run(tiles).run_from(_take_rows(starts, numbers)).output
                for tiles, numbers in self._split_blocks(range(len(self.x) * self._tiling.count))
            ])
        return BlockStart(starts, self._merge(features))

    def bytes_per_target(self) -> int:
        """Return about how much memory one target takes for the images."""
        tiles = len(self.x) * self._tiling.count
        of_block = self._one.bytes_per_target() * min(tiles, self.backbone.block)
        return of_block + tiles * max(part[0].numel() * part.element_size() for part in self.activations)

    def averages(self, target: int, tiles: int = 1) -> bool:
        """Return whether the output is the mean over all positions of a target layer, and of all tiles."""
        return not self.backbone.source.dense and self._one.averages(target)

    def is_isolated(self, network: nn.Module) -> bool:
        """Return whether all that the path uses besides the target layers are parameters and buffers of a network."""
        return self._one.is_isolated(network)

    @cached_property
    def whole(self) -> ClosedFormPass:
        """The pass of all tiles at once."""
        return self.all_tiles.run(self.x)

    def relevance(self, output_gradients: Sequence[Tensor | None], target: int, start: Any) -> Tensor:
        """Return the relevance of activations, which is propagated through the mean over tiles as well."""
        path = self.whole.run_from(start.activations)
        return self.whole.relevance(output_gradients, target, path)


def _take_rows(starts: Mapping[int, Tensor], numbers: Sequence[int]) -> dict[int, Tensor]:
    """Return the starts of some tiles; a start that all tiles share stays one row."""
    return {
        target: start if len(start) == 1 else start[_list_rows(tuple(numbers), like=start)]
        for target, start in starts.items()
    }


@kept_on_devices
def _list_rows(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return numbers
