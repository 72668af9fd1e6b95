"""Tiles: a network that runs another one on tiles of large pictures, whose features become one row or one grid."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.auto_layers import find_last_blocks
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, Layer, compute_features
from pytorch_grad_cam_pcasvm.network.inputs import count_input_channels
from pytorch_grad_cam_pcasvm.network.layer_means import LayerMeans
from pytorch_grad_cam_pcasvm.network.layout import Layout
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_network
from pytorch_grad_cam_pcasvm.network.pools import parse_pool, write_pool
from pytorch_grad_cam_pcasvm.network.tiling import Size, Tiled, Tiling, measure_canvas, scale_photo, spread_tiles
from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import refuse

_USUAL = (224, 224)
_BLOCK = 16  # tiles that run together, where nothing is recorded


class TiledNet(Tiled):
    """A network that sees large images through tiles of the size that it was trained on.

    Each tile runs through the network. Pooled features are the mean over the tiles; dense features (``pool="dense"``)
    lie on one grid, on which a position that several tiles see has the weighted mean of their features, with weights
    that are larger the further it is from the border of a tile, and sum to 1. Behind it, a head is a head as any:
    ``PCASVMNet(TiledNet(net, ...), head)``, or with ``pool="dense"`` there, too. Maps of layers inside of the network,
    ``"net.layer2"``, are added on their common grid, so that they add up as others do.

    Images must be a canvas: at least a tile, and whole strides of the network. Of ``tiles=(columns, rows)`` it is
    :attr:`canvas`; of ``tile=`` :meth:`canvas_for` a photo.

    Args:
        net: the network.
        layer: where features come from, as for :class:`PCASVMNet`.
        pool: how the positions of a tile become features, as for :class:`PCASVMNet`.
        tiles: number of columns and rows; None: given by ``tile``, or by the images.
        tile: how many pixels of a photo a tile covers along a side, which is scaled to ``size``.
        overlap: least share of a tile that the next one sees, too.
        size: (H, W) of a tile, or one side; None: the input size that a network of timm, or a ViT of torchvision, was
            made for, else 224.
        block: how many tiles run together where nothing is recorded, as in the extraction of features.

    Attributes:
        size: of a tile, (H, W).
        stride: pixels of a position of the coarsest block, in whole numbers of which tiles begin.

    Raises:
        TypeError: the network is no module.
        ValueError: an option is out of range, there are both ``tiles`` and ``tile``, or a tile is not whole strides.

    Example:
        >>> tiled = TiledNet(backbone, "layer2", "mean", tiles=(2, 1), size=32).eval()
        >>> tiled.canvas, tiled(torch.rand(1, 3, *tiled.canvas)).shape
        ((32, 56), torch.Size([1, 8]))
    """

    def __init__(
        self,
        net: nn.Module,
        layer: Layer | Sequence[Layer] | None = None,
        pool: Any = None,
        *,
        tiles: tuple[int, int] | None = None,
        tile: int | None = None,
        overlap: float = 0.25,
        size: int | Size | None = None,
        block: int = _BLOCK,
    ) -> None:
        super().__init__()
        _check_options(tiles, tile, overlap, block)
        self.net = find_network(net)
        self.source = FeatureSource.of(self.net, layer, pool)
        self.tiles, self.tile, self.overlap, self.block = tiles, tile, overlap, block
        self.size: Size = _find_size(self.net) if size is None else (size, size) if isinstance(size, int) else size
        self.stride: Size = _find_stride(self.net, self.source, self.size)
        self._grid = _find_grid(self.net, self.source, self.size) if self.source.dense else None
        self._prepared: dict[Any, FeatureSource] = {}
        self.training = self.net.training

    def with_features(self, layer: Layer | Sequence[Layer] | None, pool: Any) -> "TiledNet":
        """Return a network on the same tiles that gives other features; see :class:`TiledNet`."""
        return TiledNet(
            self.net, layer, pool, tiles=self.tiles, tile=self.tile, overlap=self.overlap, size=self.size,
            block=self.block,
        ).eval()  # fmt: skip

    @property
    def canvas(self) -> Size | None:
        """The size of images, (H, W); None: not the same for all."""
        if self.tiles is None:
            return None
        columns, rows = self.tiles
        sides = zip((rows, columns), self.size, self.stride, strict=True)
        height, width = (measure_canvas(*side, self.overlap) for side in sides)
        return height, width

    def canvas_for(self, width: int, height: int) -> Size:
        """Return the size (H, W) to which a photo of so many pixels is brought.

        Raises:
            ValueError: the photo is smaller than a tile.
        """
        if self.tile is None:
            return self.canvas or (height, width)
        return scale_photo(width, height, self.tile, self.size, self.stride)

    def find_tiling(self, x: Tensor) -> Tiling:
        """Return where the tiles of images (N, C, H, W) lie.

        Raises:
            ValueError: they are no canvas.
        """
        if x.dim() != 4:
            raise ValueError(f"tiles are cut of pictures, (N, C, H, W), got {tuple(x.shape)}")
        return self._find_tiling(int(x.shape[2]), int(x.shape[3]))

    def _find_tiling(self, height: int, width: int) -> Tiling:
        sides = list(zip((height, width), self.size, self.stride, strict=True))
        if any(length < side or length % stride for length, side, stride in sides):
            refuse(
                ValueError,
                f"images of {width}x{height} pixels are no canvas for tiles of {self.size[1]}x{self.size[0]}: it is at "
                f"least a tile, and whole strides of {self.stride[1]}x{self.stride[0]}",
                "resize them to .canvas of the TiledNet, or each photo to .canvas_for(width, height)",
            )
        rows, columns = (spread_tiles(*side, self.overlap) for side in sides)
        return Tiling(rows, columns, self.size)

    def prepare(self, x: Tensor) -> None:
        """Find out how features of tiles of images like x are pooled, while nothing is watched."""
        key = self._key(x)
        if key not in self._prepared:
            height, width = self.size
            self._prepared[key] = self.source.at(self.net, x[:1, :, :height, :width])

    def _key(self, x: Tensor) -> Any:
        return int(x.shape[1]), x.dtype, x.device.type

    def forward(self, x: Tensor, block: int | None = None) -> Tensor:
        """Return the features of images.

        Args:
            x: shape (N, C, H, W).
            block: how many tiles run together; None: all.

        Returns:
            Shape (N, D), or of dense features (N, D, h, w).

        Raises:
            ValueError: the images are no canvas.
        """
        tiling = self.find_tiling(x)
        source = self.find_source(x)
        parts = [compute_features(self.net, source, tiles) for tiles in self._cut_blocks(x, tiling, block)]
        return self.merge(parts[0] if len(parts) == 1 else torch.cat(parts), tiling)

    def find_source(self, x: Tensor) -> FeatureSource:
        """Return the source of features of tiles of images like x, with its pool as a function."""
        self.prepare(x)
        return self._prepared[self._key(x)]

    def merge(self, features: Tensor, tiling: Tiling) -> Tensor:
        """Return the features of images, (N, D) or (N, D, H, W), from their tiles', (N T, D) or (N T, D, h, w)."""
        if self.source.dense:
            return tiling.place((features.shape[2], features.shape[3])).merge(features)
        return features.flatten(1).unflatten(0, (-1, tiling.count)).mean(1)

    def pull_merge(self, grads: Tensor, tiling: Tiling) -> Tensor:
        """Return gradients of K targets by the features of tiles, (K, N T, ...), from gradients by merged features."""
        if self._grid is not None:
            return tiling.place(self._grid).pull_merge(grads)
        return tiling.place(self.size).repeat(grads / tiling.count, 1)

    def _cut_blocks(self, x: Tensor, tiling: Tiling, block: int | None) -> Iterator[Tensor]:
        """Yield the tiles of images, all at once or so many."""
        if block is None or is_traced():
            yield tiling.cut(x)
            return
        numbers = range(len(x) * tiling.count)
        for first in numbers[::block]:
            yield tiling.cut(x, numbers[first : first + block])

    def find_layout(self, x: Tensor) -> Layout | None:
        """Return how dense features lie on images of the shape of x: they share them out evenly; None of others."""
        return None if self._grid is None else Layout(self.find_tiling(x).place(self._grid).grid, 4)

    def extra_repr(self) -> str:
        """Return the text inside the brackets of its ``repr``."""
        how = f"tiles={self.tiles}" if self.tiles else f"tile={self.tile}"
        pool = (self.source.parts or (self.source,))[0].pool
        pool = getattr(pool, "__qualname__", None) or repr(pool)
        return f"{how}, size={self.size}, overlap={self.overlap}, features of {self.source!r}, pool={pool}"

    def describe(self) -> dict[str, Any]:
        """Return its arguments as JSON, of which :func:`tile_network` makes the same of the network.

        Raises:
            ValueError: the pool is a function, which no file can hold.
        """
        parts = self.source.parts or (self.source,)
        if callable(parts[0].pool):
            raise ValueError(
                "the pool of the TiledNet is a function, which no file can hold: move it into the network, whose "
                "output then is the features, or use pool='mean'"
            )
        layers = [part.field or part.layer for part in parts]
        return {
            "layer": layers if self.source.parts else layers[0],
            "pool": write_pool(parts[0].pool),
            "tiles": self.tiles and list(self.tiles),
            "tile": self.tile,
            "overlap": self.overlap,
            "size": list(self.size),
            "block": self.block,
        }


def tile_network(net: nn.Module, described: Mapping[str, Any]) -> TiledNet:
    """Return a network on tiles as :meth:`TiledNet.describe` says; one that is on tiles already stays as it is."""
    if isinstance(net, TiledNet):
        return net
    written = dict(described)
    tiles, size, pool = written.pop("tiles"), tuple(written.pop("size")), parse_pool(written.pop("pool"))
    return TiledNet(net, pool=pool, tiles=tiles and tuple(tiles), size=size, **written).eval()


def _check_options(tiles: Any, tile: Any, overlap: Any, block: Any) -> None:
    whole = isinstance(tiles, tuple | list) and len(tiles) == 2 and all(isinstance(n, int) and n > 0 for n in tiles)
    if tiles is not None and not whole:
        raise ValueError(f"tiles must be the numbers of columns and rows, such as (3, 2), got {tiles!r}")
    if tile is not None and not (isinstance(tile, int) and tile > 0):
        raise ValueError(f"tile must be a number of pixels of a photo, such as 512, got {tile!r}")
    if tiles is not None and tile is not None:
        raise ValueError("tiles= is how many tiles a photo has, and tile= how many of its pixels one covers: give one")
    if not isinstance(overlap, int | float) or not 0 <= overlap < 1:
        raise ValueError(f"overlap must be a share of a tile, from 0 and below 1, got {overlap!r}")
    if not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be a positive number of tiles, got {block!r}")


def _find_size(net: nn.Module) -> Size:
    """Return the size of images that a network was made for, as transformers and timm know it, or the usual."""
    weights: Any = getattr(net, "pretrained_cfg", None)
    holders = [(net, "image_size"), (getattr(net, "patch_embed", None), "img_size")]
    holders += [(getattr(net, "config", None), "image_size")]
    sizes = [getattr(holder, name, None) for holder, name in holders]
    sizes += [weights["input_size"][1:]] if isinstance(weights, dict) and weights.get("input_size") else []
    for size in sizes:
        if isinstance(size, int):
            return size, size
        if isinstance(size, tuple | list) and len(size) == 2:
            return size[0], size[1]
    return _USUAL


def _tile_of_zeros(net: nn.Module, size: Size) -> Tensor:
    like = next((p for p in net.parameters() if p.is_floating_point()), torch.zeros(()))
    return like.new_zeros(1, count_input_channels(net) or 3, *size)


def _find_stride(net: nn.Module, source: FeatureSource, size: Size) -> Size:
    """Return the pixels of a position of the coarsest block before the features; of a network without blocks 1.

    Raises:
        ValueError: a tile is not whole strides.
    """
    x = _tile_of_zeros(net, size)
    with evaluation_mode(net), torch.no_grad():
        try:
            name = find_last_blocks(net, source.at(net, x), x)[-1]
        except ValueError:
            return 1, 1
        grid = LayerMeans(net, [name], x).layouts[name].grid
    if any(side % positions for side, positions in zip(size, grid, strict=True)):
        raise ValueError(
            f"a tile of {size[1]}x{size[0]} pixels has {grid[1]}x{grid[0]} positions at {name!r}, which are no whole "
            "strides, so that tiles lie on no common grid: give a size that the network's stride divides, size= or "
            "--size, or another network, if this one's layers do not pad their input evenly"
        )
    return size[0] // grid[0], size[1] // grid[1]


def _find_grid(net: nn.Module, source: FeatureSource, size: Size) -> Size:
    """Return the grid of a tile's dense features, of several layers the finest one."""
    x = _tile_of_zeros(net, size)
    with evaluation_mode(net), torch.no_grad():
        features = compute_features(net, source.at(net, x), x)
    return features.shape[2], features.shape[3]
