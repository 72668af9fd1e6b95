"""The preparation of pictures: which part of them a network sees, in how many tiles, and which number is white."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.studio.cli.arguments import FitOptions
from pytorch_grad_cam_pcasvm.studio.cli.folders import is_moving, name_first, suggest_white
from pytorch_grad_cam_pcasvm.studio.model.backbones import Backbone
from pytorch_grad_cam_pcasvm.studio.model.preparation import (
    Preparation,
    Scaled,
    bring_to_size,
    measure_size,
    read_steps,
)

_OF_03 = {"resize": "crop"}  # assumed of heads without a preparation, those of version 0.3
_AGAIN = "fit the model again, with --white-level {}, which changes nothing for photos of 8 bits"
_SEEN = 0.97  # of a picture; what lacks is half a pixel at each end


def choose_preparation(
    network: Backbone, options: Any, recorded: Mapping[str, Any] | None, *, fits: bool = False
) -> Preparation:
    """Return the preparation that a head was fitted with, or is to be.

    Args:
        network: the network, with the transform of its weights, or the user's own.
        options: of the command line.
        recorded: what a head says; None: nothing.
        fits: whether a head is to be fitted.

    Raises:
        ValueError: an option or the transform contradicts what the head was fitted with.
    """
    from pytorch_grad_cam_pcasvm.studio.data.transforms import unpack

    reading: dict[str, Any] = {"exif": fits or bool((recorded or {}).get("exif"))}
    for name in ("white_level", "float_white"):
        typed, of_head = getattr(options, name, None), (recorded or {}).get(name)
        if recorded is not None and typed not in (None, of_head):
            raise ValueError(
                f"--white-level {typed:g}, but the head was fitted with {_level(of_head)}: leave it out, or fit again"
            )
        reading[name] = of_head if typed is None else typed
    typed, of_head = getattr(options, "window", None), (recorded or {}).get("window")
    if recorded is not None and typed is not None and [*typed] != of_head:
        own = "the windows of the files" if of_head is None else "--window " + ",".join(f"{one:g}" for one in of_head)
        raise ValueError(f"the head was fitted with {own}: leave --window out, or fit again")
    reading["window"] = typed if of_head is None else (of_head[0], of_head[1])
    reading["page"] = getattr(options, "tiff_page", None) or (recorded or {}).get("page")
    transform: Any = network.transform
    steps = None if network.own else read_steps(transform)
    if steps is None:
        if options.resize is not None:
            raise ValueError(
                f"--resize {options.resize}, but the transform of {options.backbone} is your own and decides that: "
                "leave it out, or let the function return the network alone"
            )
        if recorded is not None and recorded.get("resize") is not None:
            raise ValueError(
                f"the head was fitted on pictures prepared by --resize {recorded['resize']}, but {options.backbone} "
                "comes with a transform of its own: let the function return the network alone, or fit again"
            )
        for name in ("size", "tiles", "tile"):
            _refuse_size(options, name)
        return Preparation(unpack(transform), None, None, **reading)
    of_head = "stretch" if fits else (_OF_03 if recorded is None else recorded).get("resize")
    if recorded is not None and options.resize not in (None, of_head):
        raise ValueError(
            f"--resize {options.resize}, but the head was fitted on pictures prepared by "
            f"{f'--resize {of_head}' if of_head else 'a transform of your own'}: leave it out, or fit again"
        )
    resize = options.resize or of_head
    if resize is None:
        raise ValueError(
            f"the head was fitted with a transform of your own, which {options.backbone} does not come with: name the "
            "function that returned both, --backbone module:function"
        )
    if resize != "crop":
        steps |= {"resize": "pad" if resize == "pad" else None}
    size = getattr(options, "size", None) or tuple((recorded or {}).get("size") or measure_size(transform))
    return bring_to_size(Preparation(transform, resize, steps, **reading), size)


def _refuse_size(options: Any, name: str) -> None:
    """Refuse an option that needs the size of images, which a transform of the user's decides."""
    if getattr(options, name, None) is not None:
        raise ValueError(
            f"--{name} decides the size of images, but so does the transform of {options.backbone}, which is your own: "
            f"leave out --{name} and let the transform make images of that size, or let the function return the "
            "network alone"
        )


def _level(white: float | None) -> str:
    return "none" if white is None else f"{white:g}"


def resize_of_masks(preparation: Preparation) -> Any:
    """Return how masks are resized, so that they lie on their pictures.

    Raises:
        ValueError: the transform does more than resize, crop and normalise, so that nobody knows.
    """
    steps = preparation.steps or read_steps(preparation.transform)
    if steps is None:
        raise ValueError(
            "the transform of the backbone does more than resize, crop and normalise, so where a mask lies is unknown: "
            "let the function return the network alone"
        )
    return steps["resize"]


def with_whites(preparation: Preparation, paths: Sequence[Path], root: Path) -> None:
    """Decide the white level of the deep pictures of a training set, once for all of them, and say so.

    Args:
        preparation: takes the decision.
        paths: of all pictures.
        root: their folder.

    Raises:
        ValueError: some floating-point pictures go to 1, and others to 255; or the white level is too low.
    """
    largest = _largest(paths, preparation.page)
    integers, floats, _ = largest
    _tell_depth({**integers, **floats}, paths, root)
    tell_whites(preparation, paths, largest, way="try fit --white-level {}")
    floats = {path: top for path, top in floats.items() if 0 <= top <= 255}
    if floats:
        low, high = min(floats, key=floats.__getitem__), max(floats, key=floats.__getitem__)
        if 0 < floats[low] <= 1 < floats[high]:
            names = " and ".join(path.relative_to(root).as_posix() for path in (low, high))
            raise ValueError(
                f"floating-point pictures must all go to 1, or all to 255, but the largest numbers of {names} are "
                f"{floats[low]:.4g} and {floats[high]:.4g}: scale them"
            )
        preparation.float_white = 1.0 if floats[high] <= 1 else 255.0
        print(f"{len(floats)} of {len(paths)} pictures have floating-point numbers, to {floats[high]:.4g}: "
              f"{preparation.float_white:g} is white")  # fmt: skip


def _largest(paths: Sequence[Path], page: int | None) -> tuple[dict[Path, float], dict[Path, float], list[Path]]:
    """Return the largest number of each picture of more than 8 bits: of integers, and of others; and which ones move.

    Pictures with numbers below 0 are not among them: no white level makes these readable.
    """
    from PIL import Image

    from pytorch_grad_cam_pcasvm.studio.pictures.read import choose_page, deep_numbers

    integers, floats, moving = dict[Path, float](), dict[Path, float](), list[Path]()
    for path in paths:
        try:
            with Image.open(path) as picture:
                choose_page(picture, page)
                moving += [path] * is_moving(picture)
                numbers, _ = deep_numbers(picture)
        except Exception:  # who reads it says so
            continue
        if numbers is not None and not numbers.min() < 0:
            (floats if numbers.dtype.kind == "f" else integers)[path] = float(numbers.max())
    return integers, floats, moving


def tell_whites(preparation: Any, paths: Sequence[Path], largest: Any = None, *, way: str = _AGAIN) -> None:
    """Say the white level of pictures of more than 8 bits, and if that is far from their numbers; and which ones move.

    Args:
        preparation: of the pictures, or what has its ``white_level`` and ``page``.
        paths: of all pictures.
        largest: what is known of them, of :func:`_largest`; None: look at them.
        way: what to do with the white level that they need.

    Raises:
        ValueError: a picture has larger numbers than the white level.
    """
    integers, _, moving = _largest(paths, preparation.page) if largest is None else largest
    white_level = preparation.white_level
    if moving:
        print(f"{len(moving)} of {len(paths)} pictures move, such as {moving[0].name}: the first frame is taken")
    if not integers:
        return
    brightest = max(integers, key=integers.__getitem__)
    top = integers[brightest]
    if white_level is not None and top > white_level:
        raise ValueError(f"--white-level {white_level:g} is too low: {brightest} has numbers up to {top:g}")
    white = "the largest number of their type" if white_level is None else f"{white_level:g}"
    print(f"{len(integers)} of {len(paths)} pictures have more than 8 bits: {white} is white")
    suggested = suggest_white(top)
    if white_level is None and suggested is not None:
        print(f"hint: no number of these is larger than {top:g}, so they are dark: {way.format(suggested)}")


def _tell_depth(deep: Mapping[Path, float], paths: Sequence[Path], root: Path) -> None:
    """Say if classes can be told apart by the depth of their files."""
    parts = [[path.relative_to(root).parts for path in some] for some in (paths, deep)]
    totals, of_deep = (Counter(names[0] for names in some if len(names) > 1) for some in parts)
    whole = [name for name, count in of_deep.items() if count == totals[name]]
    if whole and of_deep.keys() == set(whole) < totals.keys():
        names = " and ".join(map(repr, whole))
        print(f"hint: only pictures of {names} have more than 8 bits: a head may learn that, and not what they show")


def tell_crop(preparation: Preparation, paths: Sequence[Path]) -> None:
    """Say how large a share of the pictures the network sees, if it does not see them whole."""
    if preparation.resize in ("stretch", "pad", "scale"):
        return
    sizes = _read_sizes(preparation, paths[:: max(1, len(paths) // 20)])
    shares = [preparation.share_seen(*size) for size in dict.fromkeys(sizes.values())]
    if shares and min(shares) < _SEEN:
        share = " to ".join(dict.fromkeys(f"{end:.0%}" for end in (min(shares), max(shares))))
        whole = "; to let it see all, add --resize stretch" if preparation.resize else ""
        print(f"the transform cuts off the rim: the network sees {share} of each picture{whole}")


_OVERLAP = 0.25
_SHOWN = 5  # photos that are named
_STRETCHED = 2.0  # times as long as wide, compared with the canvas


def apply_tiles(
    options: FitOptions, network: Any, preparation: Preparation, layer: Any, pool: Any
) -> tuple[Any, Preparation, Any, Any]:
    """Return the backbone on tiles, the preparation of its images, and where the head's features come from now.

    Args:
        options: of ``fit``; names of layers for maps become those behind tiles.
        network: the backbone.
        preparation: of the images of a tile.
        layer: where features of a tile come from.
        pool: how they are pooled.
    """
    from pytorch_grad_cam_pcasvm.network.modules import find_layer_name
    from pytorch_grad_cam_pcasvm.network.tiles import TiledNet

    if options.tiles is None and options.tile is None:
        return network, preparation, layer, pool
    net = TiledNet(
        network.net, layer, "dense" if options.is_dense else pool, tiles=options.tiles, tile=options.tile,
        overlap=_OVERLAP if options.overlap is None else options.overlap, size=measure_size(preparation.transform),
    ).eval()  # fmt: skip
    options.layer = [str(find_layer_name(net, name)) for name in options.layer]
    if options.tiles is not None and net.canvas is not None:
        print(f"tiles: {options.tiles[0]}x{options.tiles[1]} of {_write_size(net.size)} pixels, on photos brought to "
              f"{_write_size(net.canvas)}")  # fmt: skip
        preparation = bring_to_size(preparation, net.canvas)
    else:
        assert options.tile is not None
        steps = {name: value for name, value in preparation.known_steps.items() if name != "resize"}
        transform = Scaled(options.tile, net.size, net.stride, **steps)
        preparation = replace(preparation, transform=transform, resize="scale")
        print(f"tiles: of {options.tile} pixels of a photo, brought to {_write_size(net.size)}")
    return replace(network, net=net), preparation, None, pool if options.is_dense else None


def _write_size(size: Sequence[int]) -> str:
    """Return a size (H, W) as photos are named, WIDTHxHEIGHT."""
    return f"{size[1]}x{size[0]}"


def _read_sizes(preparation: Preparation, paths: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Return the width and height of each photo as people see it; unreadable ones are told elsewhere."""
    from pytorch_grad_cam_pcasvm.studio.data.images import size_and_orientation
    from pytorch_grad_cam_pcasvm.studio.pictures.read import ON_ITS_SIDE

    sizes = {}
    for path in paths:
        try:
            size, orientation = size_and_orientation(path, preparation.page)
        except Exception:  # who reads it says so
            continue
        sizes[path] = size[::-1] if preparation.exif and orientation in ON_ITS_SIDE else size
    return sizes


def _list_sizes(sizes: Mapping[Path, tuple[int, int]]) -> list[str]:
    """Return the names of photos with their sizes."""
    return [f"{path.name} ({width}x{height})" for path, (width, height) in sizes.items()]


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
        shown = name_first(_list_sizes(small))
        raise ValueError(
            f"{len(small)} of {len(paths)} photos are smaller than a tile of {transform.tile} pixels on a side: {shown}"
            "; fit with a smaller --tile, or with --tiles, or add --skip-bad-images"
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


def open_folder(options: Any, preparation: Preparation, one_size: str = "") -> Any:
    """Return the checked photos of a command as a data set; say which number is white."""
    folder = preparation.folder(options.images)
    check_photos(options, preparation, folder.paths, one_size=one_size)
    tell_whites(preparation, folder.paths)
    return folder


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
        shown = ", ".join(_list_sizes(long)[:_SHOWN])
        print(
            f"hint: {len(long)} of {len(paths)} photos are of another shape than {_write_size(canvas)}, and are "
            f"stretched: {shown}; choose --tiles as wide and high as photos are, or add --resize pad"
        )
