"""Preparation: how pictures become images for a network."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.runtime.formats import check_fields, check_list, check_sides, is_count, is_number

_SAME = 1e-5  # of numbers of images that two transforms make of a picture
_RECORDED = ("resize", "white_level", "float_white", "exif", "page", "window", "size", "steps", "tile", "maker")
# What is resized, whose numbers differ by rounding; a processor's middle of an odd number of pixels is another.
_MAKERS = ("pictures", "bytes", "floats", "processor pictures", "processor bytes", "processor floats")
_BY_NUMBER = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # of PIL
_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")


@dataclass
class Preparation:
    """How the pictures of a folder become images for a network.

    Attributes:
        transform: turns a PIL image into a tensor (C, H, W).
        resize: ``"stretch"``, ``"pad"`` or ``"crop"``; None: the transform is the user's own.
        steps: what the transform does, as arguments of ``export.onnx``; None: not known.
        white_level: the integer that is white in pictures of more than 8 bits; None: the largest of their type.
        float_white: the number that is white in floating-point pictures; None: there are none.
        exif: photos are turned as their EXIF orientation says, as people see them; False: those of heads up to version
            0.4 are not.
        page: of TIFFs of several pages, and of DICOM of several frames, the one that is read, from 1 on; None: they are
            refused.
        window: of grey DICOM files the centre and width; None: the files' own.
        maker: who takes the steps: torchvision, of ``"pictures"``, or of their ``"bytes"`` or ``"floats"`` as tensors;
            or an image processor, ``"processor pictures"``.
    """

    transform: Callable[[Any], Any]
    resize: str | None
    steps: dict[str, Any] | None
    white_level: float | None = None
    float_white: float | None = None
    exif: bool = False
    page: int | None = None
    window: tuple[float, float] | None = None
    maker: str = "pictures"

    @property
    def known_steps(self) -> dict[str, Any]:
        """The steps, of a preparation that was asked before whether they are known."""
        assert self.steps is not None
        return self.steps

    @property
    def whites(self) -> dict[str, Any]:
        """The levels of white, as arguments of ``read_picture``."""
        return {"white_level": self.white_level, "float_white": self.float_white}

    @property
    def reading(self) -> dict[str, Any]:
        """How files are read: arguments of ``read_picture`` and ``export.onnx``."""
        more = ({"page": self.page} if self.page else {}) | ({"window": self.window} if self.window else {})
        return self.whites | {"exif": self.exif} | more

    @property
    def recorded(self) -> dict[str, Any]:
        """What is stored with a head: with size and steps, :func:`read_preparation` makes the same transform again."""
        recorded = {"resize": self.resize} | self.whites | ({"exif": True} if self.exif else {})
        recorded |= {"page": self.page} if self.page else {}
        recorded |= {"window": [*self.window]} if self.window else {}
        if self.steps is None:
            return recorded
        if isinstance(self.transform, Scaled):
            tile = {"tile": self.transform.tile, "size": self.transform.size, "stride": self.transform.stride}
            return recorded | {"tile": {name: _listed(value) for name, value in tile.items()}, "steps": self.steps}
        recorded |= {"maker": self.maker} if self.maker != "pictures" else {}
        return recorded | {"size": [*measure_size(self.transform)], "steps": self.steps}

    @property
    def varies(self) -> bool:
        """Whether photos of different size become images of different size."""
        return isinstance(self.transform, Scaled)

    def enlarge(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of a photo to try, (width, height), as many times larger as it takes to be cut into tiles."""
        least = self.transform.tile if isinstance(self.transform, Scaled) else 1
        times = -(-least // min(width, height))
        return times * width, times * height

    def read(self, paths: Sequence[Path]) -> Any:
        """Return pictures as images, shape (N, C, H, W).

        Raises:
            OSError: some cannot be read; all of these are named.
            ValueError: they have different sizes once they are prepared.
        """
        import torch

        from pytorch_grad_cam_pcasvm.studio.data.images import in_colour

        images, broken = [], []
        for path in paths:
            try:
                images.append(self.transform(in_colour(path, **self.reading)))
            except Exception as error:  # whatever a file, a decoder or a transform raises
                broken.append(f"{path} ({getattr(error, 'reason', '') or error})")
        if broken:
            raise OSError(f"{len(broken)} of {len(paths)} pictures cannot be read: {', '.join(broken)}")
        sizes = {tuple(image.shape): path for path, image in zip(paths, images, strict=True)}
        if len(sizes) > 1:
            (one, first), (other, second) = list(sizes.items())[:2]
            raise ValueError(
                f"the transform makes images of different sizes, {one} of {first} and {other} of {second}: let it "
                "resize them"
            )
        return torch.stack(images)

    def folder(self, root: Path) -> Any:
        """Return the images of a folder as a data set; see :func:`.image_folder`."""
        from pytorch_grad_cam_pcasvm.studio.data.images import image_folder

        return image_folder(root, self.transform, **self.reading)

    def share_seen(self, width: int, height: int) -> float:
        """Return the part of a picture of this size that the network sees, in [0, 1].

        A picture that becomes brighter from one side to the other tells by its darkest and brightest ends what is left
        of it.
        """
        import numpy as np
        from PIL import Image

        def largest(pixels: Any) -> float:
            rows = np.broadcast_to(pixels, (height, width)).astype(np.uint8)
            return float(self.transform(Image.fromarray(rows).convert("RGB"))[0].max())

        black, white = largest(0), largest(255)
        if not black < white:
            return 1.0
        share = 1.0
        for ramp in (np.linspace(0, 255, width)[None], np.linspace(0, 255, height)[:, None]):
            ends = [(largest(pixels) - black) / (white - black) for pixels in (ramp, 255 - ramp)]
            share *= min(max(sum(ends) - 1, 0), 1)
        return share


@dataclass(frozen=True)
class Framed:
    """Turns a picture into a tensor, with the whole picture in it, as a file from ``export.onnx`` does."""

    size: tuple[int, int]
    resize: str | None
    interpolation: str
    mean: list[float]
    std: list[float]

    def __call__(self, picture: Any) -> Any:
        """Return the tensor, shape (C, H, W)."""
        import torch

        from pytorch_grad_cam_pcasvm.studio.pictures.frames import choose_rim, frame_picture, normalise_picture

        picture = picture.convert("L" if len(self.mean) == 1 else "RGB")
        rim = choose_rim(self.mean, len(self.mean))
        frame = frame_picture(picture, self.size, self.resize, self.interpolation, rim)
        return torch.from_numpy(normalise_picture(frame, self.mean, self.std))


@dataclass(frozen=True)
class Cropped:
    """Turns a picture into a tensor of its middle, as the transforms of torchvision's and timm's weights do.

    Attributes:
        size: of the image, (H, W).
        resize: the size of a picture's shorter side, before its middle is cut out; None: it is resized to the image's.
        interpolation: how it is resized.
        mean: of the colours.
        std: of the colours.
        maker: who takes these steps, as of :class:`Preparation`.
    """

    size: tuple[int, int]
    resize: int | None
    interpolation: str
    mean: list[float] | None
    std: list[float] | None
    maker: str = "pictures"

    def __call__(self, picture: Any) -> Any:
        """Return the tensor, shape (C, H, W)."""
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as F  # noqa: N812 - torch's own habit

        shorter = [*self.size] if self.resize is None else [self.resize]
        kind = self.maker.split()[-1]
        resized = picture if kind == "pictures" else F.pil_to_tensor(picture)
        resized = resized.float() / 255 if kind == "floats" else resized
        resized = F.resize(resized, shorter, InterpolationMode(self.interpolation), antialias=True)
        middle = F.center_crop(resized, [*self.size])
        if self.maker != kind:
            height, width = F.get_size(resized)
            corner = (int((side - own) / 2) for side, own in zip((height, width), self.size, strict=True))
            middle = F.crop(resized, *corner, *self.size)
        middle = F.pil_to_tensor(middle) if kind == "pictures" else middle
        image = middle if kind == "floats" else middle.float() / 255
        return image if self.mean is None or self.std is None else F.normalize(image, self.mean, self.std)


@dataclass(frozen=True)
class Scaled:
    """Turns a photo into a tensor whose size is the photo's, scaled so that a tile of its pixels is one of the network.

    Attributes:
        tile: how many pixels of the photo a tile covers along a side.
        size: of a tile, (H, W).
        stride: of the network, (H, W), of which images have a whole number.
        interpolation: how the photo is scaled.
        mean: of the colours.
        std: of the colours.
    """

    tile: int
    size: tuple[int, int]
    stride: tuple[int, int]
    interpolation: str
    mean: list[float]
    std: list[float]

    def measure_canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (H, W) of the image of a photo of so many pixels.

        Raises:
            ValueError: the photo is smaller than a tile.
        """
        from pytorch_grad_cam_pcasvm.network.tiling import scale_photo

        return scale_photo(width, height, self.tile, self.size, self.stride)

    def __call__(self, picture: Any) -> Any:
        """Return the tensor, shape (C, H, W)."""
        size = self.measure_canvas(*picture.size)
        return Framed(size, None, self.interpolation, self.mean, self.std)(picture)


def bring_to_size(preparation: Preparation, size: tuple[int, int]) -> Preparation:
    """Return a preparation whose steps are known, of images of another size (H, W)."""
    own, steps = measure_size(preparation.transform), dict(preparation.known_steps)
    if preparation.resize != "crop":
        return replace(preparation, transform=Framed(size, **steps))
    if size == own:
        return preparation
    if steps["resize"] is not None:  # of a square picture the same part is cut off as before
        steps["resize"] = round(steps["resize"] * max(size[0] / own[0], size[1] / own[1]))
    return replace(preparation, transform=Cropped(size, **steps), steps=steps)


def describe_transform(transform: Any) -> Preparation:
    """Return the preparation of a transform: with its steps, if these are known and make the same images.

    An image processor, such as ``AutoImageProcessor`` of Hugging Face returns, is one.
    """
    from pytorch_grad_cam_pcasvm.studio.data.transforms import unpack

    steps = read_steps(transform)
    if steps is None:
        steps, transform = _read_settings(transform), unpack(transform)
    if steps is None:
        return Preparation(transform, None, None)
    for maker in _MAKERS:
        again = Cropped(measure_size(transform), **steps, maker=maker)
        images = [(transform(picture), again(picture)) for picture in make_trials(steps)]
        if all(one.shape == two.shape and float((one - two).abs().max()) <= _SAME for one, two in images):
            return Preparation(transform, "crop", steps, maker=maker)
    return Preparation(transform, None, None)


def make_trials(steps: Mapping[str, Any]) -> list[Any]:
    """Return pictures of noise, by which two ways to take the same steps are told apart."""
    import numpy as np
    from PIL import Image

    noise, side = np.random.default_rng(0), steps["resize"] if isinstance(steps["resize"], int) else 80
    sizes = [(90, 140), (300, 200), *((side, side + more) for more in range(1, 5))]  # with any number left to cut off
    return [Image.fromarray(noise.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]


def read_preparation(recorded: Mapping[str, Any] | None) -> Preparation | None:
    """Return the preparation that is stored with a head; None: its transform is not.

    Args:
        recorded: what is stored, see :attr:`Preparation.recorded`.

    Raises:
        ValueError: it is damaged.
    """
    check_recorded(recorded)
    if recorded is None or "steps" not in recorded:
        return None
    if "tile" in recorded:
        tile, size, stride = (recorded["tile"][name] for name in ("tile", "size", "stride"))
        colours = {name: recorded["steps"][name] for name in ("interpolation", "mean", "std")}
        scaled = Scaled(tile[0], tuple(size), tuple(stride), **colours)
        return Preparation(scaled, recorded["resize"], dict(recorded["steps"]), **_read_reading(recorded))
    steps, size, reading = dict(recorded["steps"]), tuple(recorded["size"]), _read_reading(recorded)
    crops = recorded["resize"] == "crop"
    transform: Any = Cropped(size, **steps, maker=reading["maker"]) if crops else Framed(size, **steps)
    return Preparation(transform, recorded["resize"], steps, **reading)


def with_transform(recorded: Mapping[str, Any] | None, transform: Callable[[Any], Any]) -> Preparation:
    """Return the preparation by a transform of the user's, which makes the images that the stored one made.

    Args:
        recorded: what is stored; see :func:`read_preparation`.
        transform: turns a PIL image into a tensor (C, H, W).
    """
    from pytorch_grad_cam_pcasvm.studio.data.transforms import unpack

    check_recorded(recorded)
    steps = recorded or {}
    transform = transform if read_steps(transform) else unpack(transform)
    return Preparation(transform, steps.get("resize"), steps.get("steps"), **_read_reading(steps))


def _read_reading(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return how files are read, as arguments of :class:`Preparation`."""
    whites = {name: recorded.get(name) for name in ("white_level", "float_white")}
    maker = recorded.get("maker", "pictures")
    window = None if recorded.get("window") is None else (recorded["window"][0], recorded["window"][1])
    return whites | {
        "exif": bool(recorded.get("exif")), "page": recorded.get("page"), "window": window, "maker": maker,
    }  # fmt: skip


def record_preparation(training_set: Any, preparation: Preparation | None) -> None:
    """Record in a head's training set how pictures are prepared; None: it is not known."""
    entries = {name: value for name, value in (training_set.preparation or {}).items() if name not in _RECORDED}
    training_set.preparation = (entries | (preparation.recorded if preparation else {})) or None


def _is_window(window: Any) -> bool:
    """Return whether a list is a centre and a width."""
    return len(window) == 2 and all(map(is_number, window)) and window[1] > 0


def check_recorded(recorded: Any) -> None:
    """Refuse anything but a preparation that was stored with a head.

    Raises:
        ValueError: it is damaged; the message names the field.
    """
    if recorded is None:
        return
    if not isinstance(recorded, dict):
        raise ValueError(f"its preparation is {recorded!r:.40}, and no mapping")
    number, text = (float, type(None)), (str, type(None))
    kinds = {"resize": text, "white_level": number, "float_white": number, "exif": (bool,), "size": (list,)}
    kinds |= {"page": (int,), "maker": (str,), "window": (list,)}
    own = {name: value for name, value in recorded.items() if name in _RECORDED}
    check_fields(own, kinds | {"steps": (dict,), "tile": (dict,)}, "preparation", optional=True)
    how, size = recorded.get("resize"), recorded.get("size")
    if how not in (None, "stretch", "pad", "crop", "scale"):
        raise ValueError(f"its preparation has the resize {how!r:.40}")
    if "window" in recorded and not _is_window(recorded["window"]):
        raise ValueError(f"its preparation has the window {recorded['window']!r:.40}")
    if recorded.get("maker", "pictures") not in _MAKERS:
        raise ValueError(f"its preparation has the maker {recorded['maker']!r:.40}")
    if recorded.get("threshold") is not None:
        threshold = dict.fromkeys(("score", "rate", "wanted"), (float,)) | {"count": (int,)}
        check_fields(recorded["threshold"], threshold, "threshold")
    if "tile" in recorded:
        check_fields(recorded["tile"], dict.fromkeys(("tile", "size", "stride"), (list,)), "tile")
        check_sides(recorded["tile"]["size"], "sides of a tile")
        check_sides(recorded["tile"]["stride"], "sides of a stride")
        check_list(recorded["tile"]["tile"], is_count, "pixels of a tile")
        if len(recorded["tile"]["tile"]) != 1 or "steps" not in recorded or how != "scale":
            raise ValueError(f"its preparation has the tile {recorded['tile']!r:.40}, and the resize {how!r}")
        _check_steps({"resize": None} | recorded["steps"], crops=False)
    elif "steps" in recorded:
        check_sides(size, "sides of pictures")
        if how is None:
            raise ValueError(f"its preparation has steps, but the resize {how!r} and the size {size!r:.40}")
        _check_steps(recorded["steps"], crops=how == "crop")


def _check_steps(steps: Any, *, crops: bool) -> None:
    """Refuse anything but arguments of :class:`Cropped`, or of :class:`Framed`."""
    listed: tuple[type, ...] = (list, type(None)) if crops else (list,)
    resize = (int if crops else str, type(None))
    check_fields(steps, {"mean": listed, "std": listed, "resize": resize, "interpolation": (str,)}, "steps")
    mean, std = steps["mean"] or [], steps["std"] or []
    check_list([*mean, *std], is_number, "mean and std")
    if len(mean) != len(std) or 0 in std:
        raise ValueError(f"its steps have the mean {mean!r:.40} and the std {std!r:.40}")
    if steps["interpolation"] not in _INTERPOLATIONS:
        raise ValueError(f"its steps have the interpolation {steps['interpolation']!r:.40}")


def read_steps(transform: Any) -> dict[str, Any] | None:
    """Return the steps of a torchvision or timm transform as arguments of ``export.onnx``; None if it does more."""
    transform = transform.transform if type(transform).__name__ == "Unpacked" else transform
    steps = {type(step).__name__: step for step in getattr(transform, "transforms", [])}
    if "Resize" not in steps and not hasattr(transform, "resize_size"):
        return None
    resize, normalise = steps.get("Resize", transform), steps.get("Normalize", transform)
    size, *square = getattr(resize, "resize_size", None) or _listed(resize.size)
    return {
        "mean": _listed(getattr(normalise, "mean", None)),
        "std": _listed(getattr(normalise, "std", None)),
        "resize": None if square else size,
        "interpolation": getattr(resize.interpolation, "value", resize.interpolation),
    }


def _read_settings(processor: Any) -> dict[str, Any] | None:
    """Return the steps that the settings of an image processor tell, which may do others; as :func:`read_steps`."""
    size: Any = getattr(processor, "size", None)
    resample: Any = getattr(processor, "resample", None)
    if not hasattr(size, "get") or resample not in range(len(_BY_NUMBER)) or not _makes_images(processor):
        return None
    normalises = getattr(processor, "do_normalize", False)
    mean, std = (getattr(processor, f"image_{name}", None) if normalises else None for name in ("mean", "std"))
    steps = {"mean": _listed(mean), "std": _listed(std), "resize": size.get("shortest_edge")}
    return steps | {"interpolation": _BY_NUMBER[resample]}


def _makes_images(processor: Any) -> bool:
    """Return whether a processor makes an image (C, H, W) of a picture, and not patches, pairs or frames."""
    from pytorch_grad_cam_pcasvm.studio.data.transforms import unpack

    try:
        return min(measure_size(unpack(processor))) > 0
    except Exception:  # one of its own; what it is given later is what counts
        return False


def _listed(numbers: Any) -> Any:
    if numbers is None:
        return None
    listed = getattr(numbers, "tolist", lambda: numbers)()
    return [*listed] if isinstance(listed, list | tuple) else [listed]


def measure_size(transform: Any) -> tuple[int, int]:
    """Return the size of the images that a transform makes, (H, W)."""
    from PIL import Image

    height, width = transform(Image.new("RGB", (256, 256))).shape[-2:]
    return int(height), int(width)
