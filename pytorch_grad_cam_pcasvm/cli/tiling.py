"""Tiles on the command line: how photos are cut, and which ones cannot be."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.cli.arguments import FitOptions
from pytorch_grad_cam_pcasvm.model.preparation import Preparation, Scaled, bring_to_size, measure_size

_OVERLAP = 0.25
_SHOWN = 5  # photos that are named
_STRETCHED = 2.0  # times as long as wide, compared with the canvas


def apply_tiles(
    options: FitOptions, made: Any, preparation: Preparation, layer: Any, pool: Any
) -> tuple[Any, Preparation, Any, Any]:
    """Return the backbone on tiles, the preparation of its images, and where the head's features come from now.

    Args:
        options: of ``fit``; names of layers for maps become those behind tiles.
        made: the backbone.
        preparation: of the images of a tile.
        layer: where features of a tile come from.
        pool: how they are pooled.
    """
    from pytorch_grad_cam_pcasvm.network.modules import find_layer_name
    from pytorch_grad_cam_pcasvm.network.tiles import TiledNet

    if options.tiles is None and options.tile is None:
        return made, preparation, layer, pool
    net = TiledNet(
        made.net, layer, "dense" if options.is_dense else pool, tiles=options.tiles, tile=options.tile,
        overlap=_OVERLAP if options.overlap is None else options.overlap, size=measure_size(preparation.transform),
    ).eval()  # fmt: skip
    options.layer = [str(find_layer_name(net, name)) for name in options.layer]
    if net.canvas is not None:
        print(f"tiles: {options.tiles[0]}x{options.tiles[1]} of {_write_size(net.size)} pixels, on photos brought to "  # type: ignore[index]
              f"{_write_size(net.canvas)}")  # fmt: skip
        preparation = bring_to_size(preparation, net.canvas)
    else:
        assert options.tile is not None
        assert preparation.steps is not None
        steps = {name: value for name, value in preparation.steps.items() if name != "resize"}
        transform = Scaled(options.tile, net.size, net.stride, **steps)
        preparation = replace(preparation, transform=transform, resize="scale")
        print(f"tiles: of {options.tile} pixels of a photo, brought to {_write_size(net.size)}")
    return replace(made, net=net), preparation, None, pool if options.is_dense else None


def _write_size(size: Sequence[int]) -> str:
    """Return a size (H, W) as photos are named, WIDTHxHEIGHT."""
    return f"{size[1]}x{size[0]}"


def _read_sizes(preparation: Preparation, paths: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Return the width and height of each photo as people see it; unreadable ones are told elsewhere."""
    from pytorch_grad_cam_pcasvm.data.images import size_and_orientation
    from pytorch_grad_cam_pcasvm.export.explainer import ON_ITS_SIDE

    sizes = {}
    for path in paths:
        try:
            size, orientation = size_and_orientation(path)
        except Exception:  # who reads it says so
            continue
        sizes[path] = size[::-1] if preparation.exif and orientation in ON_ITS_SIDE else size
    return sizes


def check_photos(options: Any, preparation: Preparation, paths: Sequence[Path], *, one_size: str = "") -> None:
    """Refuse photos that cannot be cut, by name, before anything takes long; say which ones are stretched.

    Args:
        options: ``skip_bad_images``.
        preparation: of the photos.
        paths: of all photos.
        one_size: what takes images of one size alone; empty: it takes photos of different sizes.

    Raises:
        ValueError: some are smaller than a tile, or of several sizes where one is needed.
    """
    transform = preparation.transform
    if not isinstance(transform, Scaled):
        return
    sizes = _read_sizes(preparation, paths)
    small = {path: size for path, size in sizes.items() if min(size) < transform.tile}
    if small and not options.skip_bad_images:
        shown = ", ".join(f"{path.name} ({width}x{height})" for path, (width, height) in [*small.items()][:_SHOWN])
        more = f" and {len(small) - _SHOWN} more" if len(small) > _SHOWN else ""
        raise ValueError(
            f"{len(small)} of {len(paths)} photos are smaller than a tile of {transform.tile} pixels on a side: {shown}"
            f"{more}; fit with a smaller --tile, or with --tiles, or add --skip-bad-images"
        )
    canvases = {transform.measure_canvas(*size): path for path, size in sizes.items() if path not in small}
    if one_size and len(canvases) > 1:
        (_, first), (_, second) = [*canvases.items()][:2]
        one, other = ("{}x{}".format(*sizes[path]) for path in (first, second))
        raise ValueError(
            f"{one_size} takes images of one size, but {first.name} ({one}) and {second.name} ({other}) have different "
            f"ones, and so do their images with --tile {transform.tile}: fit with --tiles, such as --tiles 3x2, which "
            "brings all photos to one size"
        )


def tell_stretched(net: Any, preparation: Preparation, paths: Sequence[Path]) -> None:
    """Say which photos are of quite another shape than the canvas, such as panoramas, to which they are stretched."""
    canvas = getattr(net, "canvas", None)
    if canvas is None or preparation.resize != "stretch":
        return
    shape, long = canvas[1] / canvas[0], dict[Path, tuple[int, int]]()
    for path, (width, height) in _read_sizes(preparation, paths).items():
        if not 1 / _STRETCHED < width / height / shape < _STRETCHED:
            long[path] = width, height
    if long:
        shown = ", ".join(f"{path.name} ({width}x{height})" for path, (width, height) in [*long.items()][:_SHOWN])
        print(
            f"hint: {len(long)} of {len(paths)} photos are of another shape than {_write_size(canvas)}, and are "
            f"stretched: {shown}; choose --tiles as wide and high as photos are, or add --resize pad"
        )
