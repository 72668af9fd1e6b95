"""Explain pictures with a file from ``export.onnx``. Needs only numpy, Pillow and onnxruntime, and may be copied.

python explainer.py explainer.onnx photo.png --out maps.png
"""

import argparse
import json
import os
import re
import sys
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont, TiffImagePlugin, UnidentifiedImageError

KEY = "pytorch_grad_cam_pcasvm"  # of the metadata
FORMAT = 3
AS_STORED = 2  # of files that do not say that EXIF turns photos: earlier readers, which turn none, read these
OLDEST = 1, 20  # version of onnxruntime that takes these files
BLOCKS, SAMPLED = 8, 64  # of each side of the sample, and the most numbers that are kept of each of its outputs
MOST = 1e-3  # error, as a part of the largest number, that nobody would see on a map
TILE, TEXT, GAP = 224, 15, 10  # pixels of a sheet
LARGE = 2 * TILE + GAP  # a tile of two columns
LEAST = 12  # pixels of an outline
DARK, CLEAR, BRIGHT = 0.25, 0.3, 0.55  # of a scale: where it starts in its table, is opaque, and has its mark
PALE = 2 / 3  # of what good patches reach: less has no colour
FAINT = 0.1  # of the scale of a map: less has no line around it
WHOLE = (0.0, 0.0, 1.0, 1.0)
_TURNS = {  # by EXIF's orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
ON_ITS_SIDE = range(5, 9)  # orientations in which width and height change places
_SAY_TURN = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")  # entries of Pillow's ``info``
BACKGROUND = "background"  # the class outside of masks
RIGHT, WRONG, UNLIKE = "#1b7837", "#b2182b", "#b45309"
MISSED, FALSE_ALARM = "missed", "false alarm"
BEFORE = 1e-3  # of a value: a start of less is not worth a word


class UnreadableImageError(OSError):
    """A picture cannot be read, or nobody can say which of its numbers is white; the message names the file.

    Attributes:
        reason: the message without the file's name.
    """

    def __init__(self, path: Any, reason: str = "") -> None:
        super().__init__(f"{path} cannot be read: {reason}" if reason else str(path))
        self.reason = reason


def read_picture(
    path: str | Path,
    white_level: float | None = None,
    float_white: float | None = None,
    exif: bool = True,
    page: int | None = None,
) -> Image.Image:
    """Return a picture as 8-bit grey, or RGB, whatever it was stored as, and as people see it.

    Integers of more than 8 bits are scaled by the range of their type, or by ``white_level``; floating-point numbers by
    ``float_white``. A picture is never scaled by its own largest value, so that pictures remain comparable. Of
    animations, the first frame is read.

    Args:
        path: the file.
        white_level: the integer that is white, such as 4095 for 12 bits; None: the largest of the type.
        float_white: the floating-point number that is white, 1 or 255; None: such pictures are refused.
        exif: turn it as its EXIF orientation says, as phones write it; False: leave the pixels where they are stored,
            as up to version 0.4.
        page: of a TIFF of several pages the one to read, from 1 on; None: such files are refused.

    Returns:
        The picture, of mode ``"L"`` or ``"RGB"``.

    Raises:
        UnreadableImageError: the file is damaged, too large, of several pages or channels that are no colours, or has
            numbers beyond white or below black.
    """
    try:
        with Image.open(path) as picture:
            choose_page(picture, page)
            inverted = getattr(picture, "tag_v2", {}).get(262) == 0  # of TIFF: 0 is white
            is_deep = ";16" in str(picture.tile) and not picture.mode.startswith("I")
            numbers, white = deep_numbers(picture)
            picture.load()
            refuse_bands(picture)
            turn = _TURNS.get(read_orientation(picture)) if exif else None
            if numbers is None and picture.mode == "I":  # of PGM, which says what is white, and Pillow follows it
                shown = Image.fromarray(np.rint(np.asarray(picture) / 257).astype(np.uint8))
            elif numbers is None:
                shown = picture.convert("L" if picture.mode in ("1", "L", "LA", "La") else "RGB")
    except UnreadableImageError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImageError(path, _describe_tiff(path) or f"{type(error).__name__}: {error}") from error
    except Image.DecompressionBombError as error:
        raise UnreadableImageError(
            path, "it has more pixels than Pillow takes: make it smaller, or cut it up"
        ) from error
    except ValueError as error:  # of a raw mode that there is not
        raise UnreadableImageError(path, _describe_tiff(path) or f"{type(error).__name__}: {error}") from error
    # Pillow has no common name for what it raises, as for a comment that is too long.
    except Exception as error:
        raise UnreadableImageError(path, f"{type(error).__name__}: {error}") from error
    if numbers is None:
        if is_deep and white_level is not None:
            raise UnreadableImageError(
                path, "its 16 bits are read as 8 with this kind of transparency or colours: save it in RGB, without"
            )
        return _turned(shown, turn)
    if numbers.dtype.kind == "f":
        if float_white is None:
            raise UnreadableImageError(
                path, "its numbers are floating-point, and nothing says which is white: save 8 or 16 bits"
            )
        white = float_white
    elif white_level is not None:
        white = white_level
    low, high = float(numbers.min()), float(numbers.max())
    if not (low >= 0 and high <= white):  # nor NaN
        way = ": add a constant to those of all pictures, so that none is below 0" if low < 0 else ""
        raise UnreadableImageError(
            path, f"its numbers go from {low:.6g} to {high:.6g}, but 0 is black and {white:.6g} white{way}"
        )
    shades = white - numbers if inverted else numbers
    return _turned(Image.fromarray(np.rint(shades * (255 / white)).astype(np.uint8)), turn)


def choose_page(picture: Any, page: int | None) -> None:
    """Go to a page of a TIFF, from 1 on; None: there must be one only, besides smaller copies of it.

    Raises:
        UnreadableImageError: there are several, or not as many.
    """
    count = getattr(picture, "n_frames", 1) if picture.format == "TIFF" else 1
    if page is not None and page > count and picture.format == "TIFF":
        raise UnreadableImageError(
            picture.filename, f"it has {count} page{'s' * (count > 1)}, and page {page} is asked for"
        )
    if page is None and count > 1:
        for number in range(count):
            picture.seek(number)
            if number and not picture.tag_v2.get(254, 0) & 1:
                raise UnreadableImageError(
                    picture.filename,
                    f"it has {count} pages, and nobody knows which is the picture: name it, --page 1 (in Python page=1)"
                    "; or if they are channels, save them as one picture in RGB",
                )
    if count > 1:
        picture.seek(0 if page is None else page - 1)


def refuse_bands(picture: Any) -> None:
    """Refuse a TIFF that was loaded and has channels beside its colours, such as infrared, which would be left out.

    A transparency is none, if most of it is clear or opaque.

    Raises:
        UnreadableImageError: it has some.
    """
    tags = getattr(picture, "tag_v2", {})
    colours = 3 if tags.get(262) in (2, 6) else 1
    if tags.get(262) not in (0, 1, 2, 6) or tags.get(277, 1) <= colours:
        return
    kinds = np.atleast_1d(tags.get(338, ()))
    if len(kinds) == tags[277] - colours == 1 and kinds[0] in (1, 2) and picture.mode[-1:] in "Aa":
        counts = picture.getchannel(len(picture.getbands()) - 1).histogram()
        if counts[0] + counts[255] >= sum(counts) / 2:
            return
    names = "red, green and blue" if colours == 3 else "grey"
    raise UnreadableImageError(
        picture.filename,
        f"it has {tags[277]} channels, of which a network sees {names} alone: save the 1 (grey) or 3 (RGB) that it is "
        "to see, without others",
    )


def _describe_tiff(path: str | Path) -> str:
    """Return why Pillow does not read a TIFF, by what its header says; empty: it is none."""
    try:
        with open(path, "rb") as file:
            header = file.read(8)
            header += file.read(8) if 43 in header[2:4] else b""
            tags = TiffImagePlugin.ImageFileDirectory_v2(header)
            file.seek(tags.next)
            tags.load(file)
    except Exception:  # whatever is not there
        return ""
    (bits, *_), (kind, *_) = (np.atleast_1d(tags.get(number, 1)) for number in (258, 339))
    numbers = {2: ", signed", 3: ", floating-point"}.get(int(kind), "")
    return (
        f"Pillow does not read a TIFF of {tags.get(277, 1)} channels of {bits} bits{numbers}, of compression "
        f"{tags.get(259, 1)} and colours {tags.get(262)}: save 1 channel (grey) or 3 (RGB) of 8 or 16 bits"
    )


def read_orientation(picture: Image.Image) -> int:
    """Return how a picture that was opened and loaded is turned when people see it: 1 (not at all) to 8, as EXIF."""
    try:
        number = picture.getexif().get(0x0112)
    except Exception:  # damaged EXIF, by which nobody turns a picture
        return 1
    return number if isinstance(number, int) and number in _TURNS else 1


def _turned(picture: Image.Image, turn: Image.Transpose | None) -> Image.Image:
    """Return a picture turned, and no longer saying that it is to be."""
    if turn is None:
        return picture
    turned = picture.transpose(turn)
    turned.info = {key: value for key, value in turned.info.items() if key not in _SAY_TURN}
    return turned


def deep_numbers(picture: Image.Image) -> tuple[np.ndarray | None, float]:
    """Return the numbers of a picture of more than 8 bits, as its file has them, and the largest of their type.

    Args:
        picture: a file that was opened, but not loaded.

    Returns:
        The numbers, int64 or float32, shape (H, W), of colours (H, W, 3), or None for a picture of 8 bits; and the
        largest number, 1 for floating-point ones.

    Raises:
        UnreadableImageError: Pillow garbles them.
    """
    if picture.mode == "F":
        return np.asarray(picture, np.float32), 1.0
    tags = getattr(picture, "tag_v2", {})  # of TIFF: bits per sample, and whether these have a sign
    (bits, *_), (sign, *_) = (np.atleast_1d(tags.get(number, default)) for number, default in ((258, 16), (339, 1)))
    if picture.mode.startswith("RGB"):
        in_planes = tags.get(284) == 2 and bits == 16
        return (_read_planes(picture) if in_planes else _read_halves(picture)), 65535.0
    if not picture.mode.startswith("I") or picture.format == "PPM":
        return None, 255.0
    numbers = np.asarray(picture).astype(np.int64)
    if bits == 32 and sign == 1:  # Pillow has signed ones only
        numbers &= 0xFFFFFFFF
    return numbers, float(2 ** (int(bits) - (sign == 2)) - 1)


def _read_halves(picture: Any) -> np.ndarray | None:
    """Return colours of 16 bits, of which Pillow keeps the first byte: in the other order, it keeps the second."""
    modes = [tile[3] if isinstance(tile[3], str) else tile[3][0] for tile in picture.tile[:1]]
    kind, _, order = (modes or [""])[0].partition(";16")
    if order not in ("B", "L", "N") or kind == "RGBa":
        return None
    own = sys.byteorder[0].upper() if order == "N" else order
    wanted = ["RGBA"] if kind == "LA" else [f"{kind};16{one}" for one in (own, "BL".replace(own, ""))]
    halves = list[np.ndarray]()
    for mode in wanted:
        with Image.open(picture.filename) as again:
            again.seek(picture.tell())
            again.tile = [_with_mode(tile, mode) for tile in again.tile]
            halves.append(np.asarray(again).astype(np.int64))
    if kind == "LA":  # grey and its transparency, two bytes of each
        return 256 * halves[0][..., 0] + halves[0][..., 1]
    return (256 * halves[0] + halves[1])[..., :3]


def _with_mode(tile: Any, mode: str) -> Any:
    """Return one of Pillow's tiles, of which the file's bytes are read in another mode."""
    *where, how = tile
    parts = [*where, mode if isinstance(how, str) else (mode, *how[1:])]
    return tile._make(parts) if hasattr(tile, "_make") else tuple(parts)


def _read_planes(picture: Any) -> np.ndarray:
    """Return colours of 16 bits of a TIFF that has one after the other, which Pillow takes for 8 bits.

    Raises:
        UnreadableImageError: they are compressed.
    """
    tiles: Any = picture.tile
    if any(tile[0] != "raw" for tile in tiles):
        raise UnreadableImageError(
            picture.filename,
            "its colours of 16 bits are compressed one after the other (planar), of which Pillow reads half: save them "
            "pixel by pixel, or without compression",
        )
    tags = picture.tag_v2
    planes = np.zeros((3, tags[257], tags[256]), np.int64)
    count = len(tiles) // len(np.atleast_1d(tags[258]))
    kind = "<u2" if tags.prefix == b"II" else ">u2"
    with open(picture.filename, "rb") as file:
        for number, (_, (left, top, right, bottom), offset, (_, stride, _)) in enumerate(tiles[: 3 * count]):
            file.seek(offset)
            rows = np.frombuffer(file.read((bottom - top) * (stride or 2 * (right - left))), kind)
            planes[number // count, top:bottom, left:right] = rows.reshape(bottom - top, -1)[:, : right - left]
    turn = _TURNS.get(read_orientation(picture))  # as Pillow turns other TIFFs
    if turn is not None:
        planes = np.stack([np.asarray(Image.fromarray(plane.astype(np.int32)).transpose(turn)) for plane in planes])
    return planes.transpose(1, 2, 0).astype(np.int64)


def framed(
    picture: Image.Image, size: tuple[int, int], resize: int | str | None, interpolation: str, rim: Any = 0
) -> Image.Image:
    """Return a picture at the size that a network takes.

    Args:
        picture: of mode ``"L"``, ``"RGB"`` or ``"F"``.
        size: (height, width).
        resize: None: the whole picture, stretched; ``"pad"``: the whole picture in its own shape, in the middle of a
            frame; a number of pixels: its shorter side becomes as long, and the middle is cut out.
        interpolation: ``"bilinear"`` or ``"bicubic"``; of masks ``"nearest"`` or ``"box"``.
        rim: colour of the frame.

    Returns:
        The picture that the network sees.
    """
    how, (height, width) = Image.Resampling[interpolation.upper()], size
    if resize is None:
        return picture.resize((width, height), how)
    if resize == "pad":
        part = min(width / picture.width, height / picture.height)
        inner = (max(1, round(part * picture.width)), max(1, round(part * picture.height)))
        frame = Image.new(picture.mode, (width, height), rim)
        frame.paste(picture.resize(inner, how), ((width - inner[0]) // 2, (height - inner[1]) // 2))
        return frame
    short = min(picture.size)
    picture = picture.resize((int(resize) * picture.width // short, int(resize) * picture.height // short), how)
    left, top = (round((a - b) / 2) for a, b in zip(picture.size, (width, height), strict=True))
    return picture.crop((left, top, left + width, top + height))


def find_frame(picture: tuple[int, int], size: tuple[int, int], resize: int | str | None) -> tuple[float, ...]:
    """Return the part of a picture that a network sees: left, top, right and bottom, as shares of its sides.

    Args:
        picture: its width and height.
        size: (height, width) of the network's images.
        resize: as in :func:`framed`; a frame around the picture has shares below 0 and above 1.
    """
    if resize is None:
        return WHOLE
    (width, height), (rows, columns) = picture, size
    factor = min(columns / width, rows / height) if resize == "pad" else int(resize) / min(picture)
    across, down = columns / factor / width, rows / factor / height
    return (1 - across) / 2, (1 - down) / 2, (1 + across) / 2, (1 + down) / 2


def normalised(picture: Image.Image, mean: Any, std: Any) -> np.ndarray:
    """Return ``(pixels / 255 - mean) / std`` of a picture, float32 of shape (C, H, W); None: no mean, no std."""
    pixels = np.atleast_3d(np.asarray(picture, np.float32)) / 255
    mean, std = np.float32(0 if mean is None else mean), np.float32(1 if std is None else std)
    return np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1))


def choose_rim(mean: Any, channels: int) -> Any:
    """Return the colour of a frame: the mean that is subtracted, so that it is 0 for the network; else black."""
    colour = [0] * channels if mean is None else [round(255 * number) for number in mean]
    return colour[0] if channels == 1 else tuple(colour)


@dataclass
class Scale:
    """The colours of numbers at every position.

    Attributes:
        low: where it starts, and the number from which on there is colour.
        high: where it ends.
        mark: the number from which on it is bright, or None.
        words: what is written below its start.
        note: what else is to be known.
    """

    low: float
    high: float
    mark: float | None
    words: str
    note: str

    def paint(self, values: Any, heat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the colours of numbers, of a shape (..., 3), and their opacity, (..., 1)."""
        places, shares = [self.low, self.high], [0.0, 1.0]
        if self.mark is not None and self.low < self.mark < self.high:
            places, shares = [self.low, self.mark, self.high], [0.0, BRIGHT, 1.0]
        share = np.interp(values, places, shares) if self.low < self.high else np.zeros(np.shape(values))
        place = ((DARK + (1 - DARK) * share) * (len(heat) - 1)).round().astype(int)
        return heat[place], 0.8 * np.minimum(share / CLEAR, 1.0)[..., None]


@dataclass
class Panel:
    """A photo with a map over it, and the words around: sheets, figures and pages are made of panels.

    Attributes:
        photo: the photo, without colours: a picture of Pillow on sheets, an array (H, W, 3) in [0, 1] in figures.
        map: signed numbers in [-1, 1], numbers at every position, or numbers of classes; None: the photo is alone.
        heading: what it is.
        caption: the value that the map explains, in words.
        scale: what the colours mean: of signed numbers where their scale ends, in words; of numbers at every position
            a :class:`Scale`; of classes pairs of colour and name; None: there are none.
        size: of its column on a sheet, in pixels.
        boxes: the positions that are outlined: row, column, and what is written beside them.
        grid: (h, w), the shape of all positions.
        colour: of the words above it on a sheet.
    """

    photo: Any
    map: np.ndarray | None = None
    heading: str = ""
    caption: str = ""
    scale: Any = None
    size: int = TILE
    boxes: tuple[tuple[int, int, str], ...] = ()
    grid: tuple[int, ...] = (1, 1)
    colour: str = "black"

    def lines(self, font: Any) -> list[str]:
        """Return the text above it on a sheet, in lines of its width."""
        texts = [self.heading, *self.caption.split("\n")] if self.caption else [self.heading]
        return [line for text in texts for line in _wrapped(text, font, self.size)]

    @property
    def height(self) -> int:
        """The height of its photo on a sheet, and of the text below."""
        below = 3 * (TEXT + 2) if isinstance(self.scale, list) else 0 if self.scale is None else 3 * TEXT
        return int(self.photo.height) + 4 + below


@dataclass
class Judgement:
    """What is decided of a photo, and whether that is right.

    Attributes:
        label: the predicted class; None: there are no classes.
        truth: the class that it is labelled; None: not known.
        right: whether they are the same; None: not known, or not of the whole image.
        passes: whether it is as good parts are; None: there is no threshold.
        anomaly: how unlike good parts it is, or None.
        outcome: that its fault is missed, or that it raises a false alarm; None: neither, or not known.
        is_good: whether it is labelled a good one; None: not known.
        seems_good: whether it is taken for a good one; None: not known.
    """

    label: Any = None
    truth: Any = None
    right: bool | None = None
    passes: bool | None = None
    anomaly: float | None = None
    outcome: str | None = None
    is_good: bool | None = None
    seems_good: bool | None = None

    @property
    def is_compared(self) -> bool:
        """Whether both its label and the decision say if it is a good one."""
        return self.is_good is not None and self.seems_good is not None

    @property
    def is_of_other_classes(self) -> bool:
        """Whether it is labelled a class that the model, which predicts one for a photo, does not have."""
        return self.label is not None and self.truth is not None and self.right is None and not self.is_compared


class Answers:
    """The outputs of an explanation in words: predictions, judgements, titles and values of images.

    Attributes:
        about: ``titles`` of the targets, ``classes`` or None, and ``colours`` of maps from -1 to 1. Of dense features
            also ``label_colours``, ``absent``, the classes that have none, ``heat``, the colours of anomalies, and
            ``anomaly_range``, where these start and end; what a photo has beyond that moves its own. And ``threshold``,
            the largest anomaly with which a photo passes, where it is known. ``meanings``, which later files have, are
            what the targets' values are, with ``{}`` for the number, and ``anomaly`` what anomalies are; ``strongest``
            the numbers of the targets that are about the strongest position, ``usual`` the anomaly that nearly all good
            patches stay below, and ``normal`` the class that is an absence.
        good: the label of good photos, if the head does not know it; None: not known.
    """

    good: Any = None

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about

    def predicted(self, outputs: dict[str, np.ndarray], row: int = 0) -> Any:
        """Return the predicted class of an image, or None if there are no classes; of dense features the commonest."""
        if "label" not in outputs or not self.about["classes"]:
            return None
        return self.about["classes"][int(np.bincount(np.ravel(outputs["label"][row]).astype(int)).argmax())]

    def right(self, outputs: dict[str, np.ndarray], row: int, truth: Any) -> bool | None:
        """Return whether the prediction is an image's label; None: not known, or not of the whole image."""
        label = self.predicted(outputs, row)
        if label is None or self.shares(outputs, row) or str(truth) not in map(str, self.about["classes"]):
            return None
        return str(label) == str(truth)

    def passes(self, outputs: dict[str, np.ndarray], row: int = 0) -> bool | None:
        """Return whether an image is as good parts are: its anomaly is up to the threshold; None: there is none."""
        threshold = self.about.get("threshold")
        return None if threshold is None or "anomaly" not in outputs else self.anomaly(outputs, row) <= threshold

    def is_good(self, truth: Any) -> bool | None:
        """Return whether a photo with a label is a good one; None: not known."""
        good = self.about.get("normal", self.good)
        if good == BACKGROUND and "absent" in self.about:  # the class of positions outside of masks, not of photos
            good = self.good
        return None if truth is None or good is None else str(truth) == str(good)

    def outcome(self, outputs: dict[str, np.ndarray], row: int, truth: Any) -> str | None:
        """Return how an image is mistaken: a fault is missed, or a good photo raises a false alarm; None: neither."""
        seems_good, good = self._seems_good(outputs, row, truth), self.is_good(truth)
        if seems_good is None or good is None or seems_good == good:
            return None
        return MISSED if seems_good else FALSE_ALARM

    def _seems_good(self, outputs: dict[str, np.ndarray], row: int, truth: Any) -> bool | None:
        """Return whether an image is taken for a good one; None: not known.

        It is if it passes; without a threshold, if each of its positions is of a class that is an absence, or if it is
        predicted to be one.
        """
        passes, shares, absent = self.passes(outputs, row), self.shares(outputs, row), self.about.get("absent")
        if passes is not None:
            return passes
        if shares and absent:
            return all(name in absent for name, share in shares.items() if share)
        return None if self.right(outputs, row, truth) is None else self.is_good(self.predicted(outputs, row))

    def judge(self, outputs: dict[str, np.ndarray], row: int = 0, truth: Any = None) -> Judgement:
        """Return the decisions about an image, and whether they are right."""
        return Judgement(
            label=self.predicted(outputs, row),
            truth=truth,
            right=self.right(outputs, row, truth),
            passes=self.passes(outputs, row),
            anomaly=self.anomaly(outputs, row) if "anomaly" in outputs else None,
            outcome=self.outcome(outputs, row, truth),
            is_good=self.is_good(truth),
            seems_good=self._seems_good(outputs, row, truth),
        )

    def anomaly(self, outputs: dict[str, np.ndarray], row: int = 0) -> float:
        """Return how unlike good parts an image is: the highest anomaly of its positions."""
        return float(np.max(outputs["anomaly"][row]))

    def strongest(self, outputs: dict[str, np.ndarray], row: int = 0) -> list[tuple[int, int]]:
        """Return the row and column of the position that each target explains that is about the strongest one."""
        if "evidence" not in outputs or outputs["evidence"].ndim != 4:
            return []
        numbers = outputs["evidence"][row]
        places, width = numbers.reshape(len(numbers), -1).argmax(1), numbers.shape[2]
        return [(int(place) // width, int(place) % width) for place in places]

    def shares(self, outputs: dict[str, np.ndarray], row: int = 0) -> dict[Any, float]:
        """Return the part of an image's positions that is of each class; {} if the head decides once for the image."""
        if "label" not in outputs or not self.about["classes"] or outputs["label"].ndim == 1:
            return {}
        labels = np.ravel(outputs["label"][row]).astype(int)
        return {name: float((labels == number).mean()) for number, name in enumerate(self.about["classes"])}

    def titles(self, outputs: dict[str, np.ndarray], row: int = 0) -> list[str]:
        """Return the titles of the maps of an image."""
        label = self.predicted(outputs, row)
        return [title.replace("predicted class", f"{label} (predicted)") for title in self.about["titles"]]

    def said(self, outputs: dict[str, np.ndarray], row: int, k: int) -> str:
        """Return the value of a target in words: its meaning, the number, and its limits."""
        start = outputs["baseline_values"][row, k] if "baseline_values" in outputs else 0.0
        # Of maps that add up, less is rounding.
        least = 1e-4 * max(abs(start), outputs["nu"][row, k]) if "baseline_values" in outputs else 0.0
        value = outputs["values"][row, k] if abs(outputs["values"][row, k]) > least else 0
        meaning = self.about["meanings"][k] if "meanings" in self.about else "value {}"
        meaning = meaning.replace("{}", f"{value:.3g}", 1)
        if "predicted class" in meaning:
            meaning = meaning.replace("predicted class", str(self.predicted(outputs, row)))
        return meaning


class Sheets(Answers):
    """The pictures of explanations: maps beside their photo, with titles, values and colour bars.

    Attributes:
        outline: surround the strongest evidence by lines on the photo, instead of colours over it.
    """

    outline = False

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__(about)
        self._colours = _rgb(about["colours"])

    def overlay(self, picture: Image.Image, values: np.ndarray, frame: Any = WHOLE) -> Image.Image:
        """Return a signed map (H, W) in [-1, 1] over its picture in grey: red raises the value, blue lowers it.

        Args:
            picture: the picture.
            values: the map.
            frame: the part of the picture that the map is of, see :func:`find_frame`.
        """
        values = _placed(values.astype(np.float32), picture.size, frame, Image.Resampling.BILINEAR, 0.0)
        count = len(self._colours)
        place = np.clip((0.5 + 0.5 * values) * count, 0, count - 1).astype(int)
        opacity = 0.95 * np.abs(np.linspace(-1, 1, count)[place])[..., None] ** 0.7
        return _mixed(opacity, self._colours[place], _grey(picture))

    def outlined(self, picture: Image.Image, values: np.ndarray, frame: Any = WHOLE) -> Image.Image:
        """Return a picture with lines around where a map (H, W) exceeds half of its largest value of either sign.

        What is below a tenth of the scale has no line. The arguments are those of :meth:`overlay`.
        """
        values = _placed(values.astype(np.float32), picture.size, frame, Image.Resampling.BILINEAR, 0.0)
        drawn = picture.convert("RGB")
        for signed, colour in ((values, WRONG), (-values, "#2166ac")):
            if signed.max() < FAINT:
                continue
            inside = Image.fromarray(np.where(signed >= signed.max() / 2, 255, 0).astype(np.uint8))
            for width, ink in ((7, "white"), (3, colour)):  # seen on dark and on light
                edge = ImageChops.difference(
                    inside.filter(ImageFilter.MaxFilter(width)), inside.filter(ImageFilter.MinFilter(width))
                )
                drawn.paste(ink, mask=edge)
        return drawn

    def positions(
        self, picture: Image.Image, outputs: dict[str, np.ndarray], row: int = 0, frame: Any = WHOLE
    ) -> tuple[Any, str, Any] | None:
        """Return the decisions at every position over the picture of an image, their title and their colours.

        Between two classes these are the values of the target that is about the strongest position, else the classes.
        The strongest positions are outlined, and numbered if there are several.

        Returns:
            The picture, its title and a legend: pairs of colour and class, or a scale of colours; None: the head
            decides once for the image.
        """
        panel = self._positions(picture, outputs, row)
        return None if panel is None else (self.paint(panel, frame), panel.heading, panel.scale)

    def _positions(self, picture: Image.Image, outputs: dict[str, np.ndarray], row: int) -> Panel | None:
        """Return the panel of the decisions at every position; None: the head decides once for the image."""
        if "heat" not in self.about or not {"anomaly", "label"} & outputs.keys():
            return None
        strongest, caption = self.about.get("strongest", []), self._meaning(outputs, row)
        grid = outputs["anomaly" if "anomaly" in outputs else "label"].shape[1:]
        outlined: Any = LARGE, self._boxes(outputs, row), grid
        if "anomaly" in outputs:
            heading, scale = "where: anomaly at every position", self._anomaly_scale(outputs, row)
            return Panel(picture, outputs["anomaly"][row], heading, caption, scale, *outlined)
        if len(strongest) == 1 and len(self.about["classes"]) == 2 and "evidence" in outputs:
            values = outputs["evidence"][row, 0]
            scale = Scale(
                0.0, float(np.abs(values).max()), None, "0 or less has no colour", self._describe_shares(outputs, row)
            )
            name = self.about["meanings"][strongest[0]].split("{}")[0].strip()
            if name in ("margin", "log-ratio"):
                name += " of " + self.titles(outputs, row)[strongest[0]].removesuffix(" where strongest")
            return Panel(picture, values, f"where: {name} at every position", caption, scale, *outlined)
        colours = _rgb(self.about["label_colours"])
        legend = [
            (tuple(colours[number % len(colours)].astype(int).tolist()), f"{name}, {share:.1%}")
            for number, (name, share) in enumerate(self.shares(outputs, row).items())
            if share
        ]
        return Panel(picture, outputs["label"][row], "where: class at every position", caption, legend, *outlined)

    def paint(self, panel: Panel, frame: Any = WHOLE) -> Image.Image:
        """Return the photo of a panel with the colours of its map over it, and its strongest positions outlined."""
        if panel.map is None:
            drawn = panel.photo
        elif isinstance(panel.scale, Scale):
            drawn = self._heated(panel.photo, panel.map, panel.scale, frame)
        elif isinstance(panel.scale, list):
            drawn = self._classed(panel.photo, panel.map, frame)
        else:
            draw = self.outlined if self.outline else self.overlay
            drawn = draw(panel.photo, panel.map, frame)
        return _boxed(drawn, panel, frame) if panel.boxes else drawn  # type: ignore[no-any-return]

    def _classed(self, picture: Image.Image, numbers: np.ndarray, frame: Any) -> Image.Image:
        """Return the numbers of classes (h, w) over a picture in grey, each in its colour, but for absences."""
        colours = _rgb(self.about["label_colours"])
        large = _placed(numbers.astype(np.float32), picture.size, frame, Image.Resampling.NEAREST, np.nan)
        place = np.nan_to_num(large).astype(int)
        absent = [number for number, name in enumerate(self.about["classes"]) if name in self._absent]
        opacity = 0.55 * (np.isfinite(large) & ~np.isin(place, absent))[..., None]
        return _mixed(opacity, colours[place % len(colours)], _grey(picture))

    def _describe_shares(self, outputs: dict[str, np.ndarray], row: int) -> str:
        """Return the share of positions of each class in words, without classes that are absences."""
        shares = {name: share for name, share in self.shares(outputs, row).items() if name not in self._absent}
        return ", ".join(f"{name}: {share:.1%} of the positions" for name, share in shares.items())

    @property
    def _absent(self) -> list[Any]:
        """The classes that have no colour."""
        return list(self.about.get("absent", []))

    def _anomaly_scale(self, outputs: dict[str, np.ndarray], row: int) -> Scale:
        """Return the colours of anomalies: from where good patches end, bright from the threshold on."""
        values = outputs["anomaly"][row]
        values, threshold = values[np.isfinite(values)], self.about.get("threshold")
        ends = self.about.get("anomaly_range", [*map(float, (values.min(), values.max()))])
        usual, low, high = self.about.get("usual"), ends[0], ends[1]
        words = [] if usual is None else [f"good patches reach {usual:.3g}"]
        if usual is not None:
            low += PALE * ((usual if threshold is None else min(usual, threshold)) - low)
        if threshold is not None:
            high = max(2 * threshold - low, usual or threshold)
            words.insert(0, f"line: threshold {threshold:.3g}")
        return Scale(low, max(high, float(values.max())), threshold, f"up to {low:.3g}: no colour", "; ".join(words))

    def _heated(self, picture: Image.Image, values: np.ndarray, scale: Scale, frame: Any) -> Image.Image:
        """Return numbers (h, w) over a picture in grey, in the colours of a scale."""
        large = _placed(values.astype(np.float32), picture.size, frame, Image.Resampling.BILINEAR, np.nan)
        colours, opacity = scale.paint(np.nan_to_num(large, nan=scale.low), _rgb(self.about["heat"]))
        return _mixed(opacity * np.isfinite(large)[..., None], colours, _grey(picture))

    def _boxes(self, outputs: dict[str, np.ndarray], row: int) -> tuple[tuple[int, int, str], ...]:
        """Return the strongest positions as the boxes of a panel, numbered if there are several."""
        places = self.strongest(outputs, row)
        return tuple((y, x, str(number) if len(places) > 1 else "") for number, (y, x) in enumerate(places, 1))

    def _meaning(self, outputs: dict[str, np.ndarray], row: int) -> str:
        """Return the meaning of the values at every position, and that the strongest one is explained."""
        strongest, words = self.about.get("strongest", []), self.about.get("anomaly", "")
        if not strongest or "evidence" not in outputs:
            return words
        if not words and len(strongest) == 1 and len(self.about["classes"] or ()) == 2:
            words = self.about["meanings"][strongest[0]].split("{}")[1].strip(" :")
        outlined = "outlined: the strongest, explained on the right"
        if len(strongest) > 1:
            outlined = "outlined: the strongest of each class, explained by a map each"
        return f"{words}; {outlined}" if words else outlined

    def drawn(
        self,
        picture: Image.Image,
        outputs: dict[str, np.ndarray],
        row: int = 0,
        *,
        frame: Any = WHOLE,
        truth: Any = None,
        shown: Any = None,
        note: str = "",
    ) -> Image.Image:
        """Return a sheet: whether it is right, the picture and the decision, then components, with titles and values.

        Where its large pictures are, left, top, right and bottom, is in ``sheet.info["pictures"]``.

        Args:
            picture: the picture.
            outputs: the outputs.
            row: which of their images it is.
            frame: the part of the picture that the network saw, see :func:`find_frame`.
            truth: the class that the picture is labelled; None: not known.
            shown: the numbers of the targets to draw, in their order; None: decisions, then components.
            note: what else to say above.

        Raises:
            ValueError: the maps are not finite.
        """
        if not np.isfinite(outputs["maps"][row]).all():
            raise ValueError("the maps of this picture are not finite, so the network's activations overflow")
        titles = self.titles(outputs, row)
        if shown is None:
            shown = sorted(range(len(titles)), key=lambda k: titles[k].startswith("component "))
        large, small = (_fitting(picture.convert("RGB"), size) for size in (LARGE, TILE))
        panels = [Panel(large, size=LARGE)]
        if (where := self._positions(large, outputs, row)) is not None:
            panels.append(where)
        for place, k in enumerate(shown):
            first = not place and not titles[k].startswith("component ")
            big = first or k in self.about.get("strongest", [])  # as the one beside it, with the same outlines
            panels.append(self._map(large if big else small, outputs, row, k, titles[k], LARGE if big else TILE))
        words, colour = self._verdict(outputs, row, self.judge(outputs, row, truth))
        return self.arrange(panels, "; ".join(filter(None, (words, note))), UNLIKE if note else colour, frame)

    def _verdict(self, outputs: dict[str, np.ndarray], row: int, judged: Judgement) -> tuple[str, str]:
        """Return the prediction in words, whether it is right, and the colour of these words."""
        labelled = "" if judged.truth is None else f"labelled: {judged.truth}"
        if judged.passes is not None:
            words = "pass" if judged.passes else "fail"
            words += f": anomaly {judged.anomaly:.3g}, threshold {self.about['threshold']:.3g}"
            words += labelled and f", {labelled}"
            is_well = judged.passes and judged.outcome != MISSED
            return f"{judged.outcome}: {words}" if judged.outcome else words, RIGHT if is_well else WRONG
        if self.shares(outputs, row) or judged.label is None:
            return (f"{judged.outcome}: labelled {judged.truth}", WRONG) if judged.outcome else (labelled, "black")
        if judged.right is None:
            return f"predicted: {judged.label}" + (labelled and f", {labelled}"), "black"
        words = "right" if judged.right else f"{judged.outcome or 'wrong'}: labelled {judged.truth}"
        return f"predicted: {judged.label}, {words}", RIGHT if judged.right else WRONG

    def _map(
        self, picture: Image.Image, outputs: dict[str, np.ndarray], row: int, k: int, title: str, size: int
    ) -> Panel:
        """Return the panel of a target's map."""
        numbers = {name: outputs[name][row, k] for name in ("maps", "values", "nu", "log_scale")}
        if "opposite" in outputs:  # the map's positive part speaks for the target, and this one's against it
            numbers["maps"] = np.maximum(numbers["maps"], 0) - np.maximum(outputs["opposite"][row, k], 0)
        end = f"{numbers['nu']:.3g}" + (f" x exp({numbers['log_scale']:.4g})" if numbers["log_scale"] else "")
        # What maps of other methods add up to is no amount of the value: their numbers have no unit.
        unit = ", from one position" if size > TILE else ""  # for which a tile is too narrow
        end = f"strongest colour: {end}{unit}" if "baseline_values" in outputs else " "
        start = outputs["baseline_values"][row, k] if "baseline_values" in outputs else 0.0
        value, strongest = self.said(outputs, row, k), self.about.get("strongest", [])
        if abs(start) > BEFORE * max(abs(numbers["values"]), numbers["nu"]):
            change = float(f"{numbers['values'] - start:.3g}")
            value += f"\n= {start:.3g} before any evidence {'-' if change < 0 else '+'} {abs(change):.3g} by the photo"
        outlined: Any = ()
        if k in strongest and "evidence" in outputs:
            box = "the outlined patch" if len(strongest) == 1 else f"patch {strongest.index(k) + 1}"
            title = f"why: what of the photo made {box} so"
            outlined = (self._boxes(outputs, row)[strongest.index(k)],), outputs["evidence"].shape[2:]
        scale = end if numbers["nu"] else "blank: all zero"
        return Panel(picture, numbers["maps"] / (numbers["nu"] or 1.0), title, value, scale, size, *outlined)

    def arrange(
        self, panels: list[Panel], title: str, colour: str = "black", frame: Any = WHOLE, most: int = 3 * (LARGE + GAP)
    ) -> Image.Image:
        """Return a sheet of panels, side by side where they have one size, below a title.

        Args:
            panels: those of one size come after each other.
            title: in one line or several; empty: there is none.
            colour: of the title.
            frame: the part of each photo that its map and its boxes are of, see :func:`find_frame`.
            most: how wide a row may be, in pixels.
        """
        font, bold = _font(TEXT - 1), _font(TEXT + 5)
        rows: list[list[Panel]] = []
        for panel in panels:
            width = sum(beside.size + GAP for beside in rows[-1]) if rows else 0
            if not rows or rows[-1][0].size != panel.size or width + panel.size > most:
                rows.append([])
            rows[-1].append(panel)
        lines = [max(len(panel.lines(font)) for panel in row) for row in rows]  # pictures begin side by side
        heights = [
            max(panel.height for panel in row) + count * (TEXT + 3) for row, count in zip(rows, lines, strict=True)
        ]
        titles = title.splitlines()
        top = 2 * GAP + (TEXT + 10) * len(titles)
        widths = [sum(panel.size + GAP for panel in row) for row in rows]
        width = GAP + max([*widths, *(int(bold.getlength(words)) + GAP for words in titles)])
        sheet = Image.new("RGB", (width, top + sum(heights) + GAP * len(rows)), "white")
        draw = ImageDraw.Draw(sheet)
        for line, words in enumerate(titles):
            draw.text((GAP, GAP + line * (TEXT + 10)), words, colour, bold)
        y = top
        for row, height, count in zip(rows, heights, lines, strict=True):
            x = GAP
            for panel in row:
                for line, text in enumerate(panel.lines(font)):
                    draw.text((x, y + line * (TEXT + 3)), shorten(text, font, panel.size), panel.colour, font)
                sheet.paste(self.paint(panel, frame), (x, y + count * (TEXT + 3)))
                self._draw_scale(sheet, draw, panel, x, y + count * (TEXT + 3) + panel.photo.height + 4, font)
                x += panel.size + GAP
            y += height + GAP
        first = top + lines[0] * (TEXT + 3)
        sheet.info["pictures"] = (
            0,
            first,
            GAP + sum(panel.size + GAP for panel in rows[0]),
            first + rows[0][0].photo.height,
        )
        return sheet

    def _draw_scale(self, sheet: Image.Image, draw: Any, panel: Panel, x: int, y: int, font: Any) -> None:
        """Draw the meaning of a panel's colours on a sheet."""
        size, end = panel.size, panel.scale
        if isinstance(end, list):  # of classes
            for colour, name in end[:3]:
                draw.rectangle((x, y + 2, x + TEXT - 4, y + TEXT - 2), colour)
                name = name if len(end) <= 3 or name != end[2][1] else f"{name}, and {len(end) - 3} more"
                draw.text((x + TEXT, y), shorten(name, font, size), "black", font)
                y += TEXT + 2
        elif isinstance(end, Scale):
            ramp = end.paint(np.linspace(end.low, end.high, size)[None], _rgb(self.about["heat"]))
            sheet.paste(_mixed(ramp[1], np.tile(ramp[0], (TEXT // 2, 1, 1)), 255.0), (x, y))
            draw.rectangle((x, y, x + size - 1, y + TEXT // 2 - 1), outline="#999999")
            if end.mark is not None:
                at = x + (end.mark - end.low) / ((end.high - end.low) or 1) * (size - 1)
                draw.rectangle((at - 1, y - 3, at + 1, y + TEXT // 2 + 3), "black")
            y += TEXT // 2 + 2
            draw.text((x, y), end.words, "black", font)
            draw.text((x + size, y), f"{end.high:.3g}", "black", font, anchor="ra")
            draw.text((x, y + TEXT + 2), shorten(end.note, font, size), "black", font)
        elif end:
            scale = self.overlay(Image.new("RGB", (size, TEXT // 2), "white"), np.linspace(-1, 1, size)[None])
            if not self.outline:
                sheet.paste(scale, (x, y))
            y += TEXT // 2 + 2
            draw.text((x, y), "lowers", "#2166ac", font)
            draw.text((x + size, y), "raises", WRONG, font, anchor="ra")
            draw.text((x + size // 2, y + TEXT + 2), shorten(end, font, size), "black", font, anchor="ma")


class Explainer(Sheets):
    """An explanation in a file from ``export.onnx``, for use on pictures.

    The file has a sample, with the numbers that PyTorch gave for it: as the file is opened, it is run on that, and a
    warning says so if it gives others, as a copy in 8 bits does.

    Attributes:
        about: the metadata: ``classes``, ``titles`` of the targets, ``input``, ``method``, ``digest``, ...; and
            ``measured``: by how much the sample's outputs differ now, each as a part of its largest number, as in
            ``differences``.
        names: the names of the outputs.

    Args:
        path: the file.
        providers: onnxruntime's execution providers; the first available one is used.

    Raises:
        ImportError: onnxruntime is not installed.
        ValueError: the file is missing or truncated, is not an ONNX model, or is not an explanation; onnxruntime does
            not take it; or its numbers are not finite.

    Warns:
        UserWarning: the file gives other numbers than when it was written.

    Example:
        >>> metadata = export.onnx(cam, images, "explainer.onnx")
        >>> explainer = export.Explainer("explainer.onnx")
        >>> outputs = explainer(images.numpy())
        >>> outputs["maps"].shape, explainer.titles(outputs)[-1] == f"{explainer.predicted(outputs)} (predicted)"
        ((2, 4, 8, 8), True)
    """

    def __init__(self, path: str | Path, providers: tuple[str, ...] = ("CPUExecutionProvider",)) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError("an Explainer needs onnxruntime: pip install onnxruntime") from error
        try:
            self._session = opened(onnxruntime, str(path), providers)
        except Exception as error:  # onnxruntime's own have no common name
            raise ValueError(_why_refused(Path(path), str(error), onnxruntime.__version__)) from error
        about = json.loads(self._session.get_modelmeta().custom_metadata_map.get(KEY, "{}"))
        if "format" not in about:
            raise ValueError(f"{path} is a model, but not an explanation: write one with export.onnx")
        if about["format"] > FORMAT:
            raise ValueError(f"{path} was written by a later version: copy the explainer.py that belongs to it")
        self.names = [output.name for output in self._session.get_outputs()]
        super().__init__(about)
        if "sample" in about:
            self._measure(path, about["sample"])

    def _measure(self, path: Any, sample: dict[str, Any]) -> None:
        """Compare the outputs of the sample with PyTorch's."""
        samples = sampled_outputs(self(sample_image(sample, self.about["input"]["shape"])))
        self.about["measured"] = errors = sampled_differences(samples, sample["outputs"])
        worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
        if not np.isfinite(errors[worst]):
            raise ValueError(f"{path} gives {worst} that are not finite: export it again, or use the unchanged file")
        stored = max(self.about["differences"].values())
        if errors[worst] > max(MOST, 10 * stored):
            warnings.warn(
                f"{path} was written with errors of at most {stored:.1g} of the largest number, and has one of "
                f"{errors[worst]:.1g} in {worst} here: it was changed since, as by a conversion to 8 bits, or this "
                "processor computes less accurately. Use the file as export.onnx wrote it",
                stacklevel=3,
            )

    def __call__(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """Return all outputs, by name, for images (N, ...) that are preprocessed for the network."""
        shape = self.about["input"]["shape"]
        wanted = (
            f"images must be a numpy array, float32 of shape (N, {', '.join(map(str, shape))}) with N of at least 1"
        )
        if not isinstance(images, np.ndarray):
            raise ValueError(f"{wanted}, got {type(images).__module__}.{type(images).__name__}")
        if list(images.shape[1:]) != shape or images.dtype != np.float32 or not len(images):
            raise ValueError(f"{wanted}, got {images.dtype} of shape {images.shape}")
        if not np.isfinite(images).all():
            raise ValueError("images must be finite, but some numbers are NaN or infinite: check how they are prepared")
        return dict(zip(self.names, self._session.run(self.names, {"images": images}), strict=True))

    def seen(self, picture: Image.Image) -> Image.Image:
        """Return the part of a picture that the network gets, at the network's resolution."""
        input_format = self.about["input"]
        if len(input_format["shape"]) != 3 or input_format["shape"][0] not in (1, 3):
            raise ValueError(f"the network takes arrays of shape {input_format['shape']}, not pictures")
        channels, height, width = input_format["shape"]
        picture = picture.convert("RGB" if channels == 3 else "L")
        rim = choose_rim(input_format["mean"], channels)
        return framed(picture, (height, width), input_format["resize"], input_format["interpolation"], rim)

    def prepared(self, picture: Image.Image) -> np.ndarray:
        """Return a picture preprocessed for the network, shape (C, H, W)."""
        return normalised(self.seen(picture), self.about["input"]["mean"], self.about["input"]["std"])

    def read(self, path: str | Path) -> Image.Image:
        """Return the picture in a file by :func:`read_picture`, with white and EXIF as in the metadata."""
        said = self.about["input"]
        return read_picture(
            path, said.get("white_level"), said.get("float_white"), bool(said.get("exif")), said.get("page")
        )

    def sheet(
        self, picture: Image.Image, found: dict[str, np.ndarray], row: int = 0, *, truth: Any = None
    ) -> Image.Image:
        """Return a picture with its maps over it, in its own shape; see :meth:`Sheets.drawn`."""
        self.seen(picture)  # which refuses what is no picture for the network
        input_format = self.about["input"]
        frame = find_frame(picture.size, tuple(input_format["shape"][1:]), input_format["resize"])
        return self.drawn(picture, found, row, frame=frame, truth=truth)


def opened(onnxruntime: Any, model: Any, providers: Any = ("CPUExecutionProvider",)) -> Any:
    """Return onnxruntime's session for a file or its bytes.

    Before version 1.23 it may fuse products of double precision into an operator of its own that it has in single
    precision only; then it is told not to.
    """
    try:
        return onnxruntime.InferenceSession(model, providers=list(providers))
    except Exception as error:
        if "com.microsoft." not in str(error):
            raise
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        return onnxruntime.InferenceSession(model, options, providers=list(providers))


def _why_refused(path: Path, message: str, version: str) -> str:
    """Return why onnxruntime does not take a file, by its message and the file's own versions."""
    if not path.is_file():
        return f"there is no file {path}"
    if (versions := _read_versions(path)) is None:
        return f"{path} is cut short, or no ONNX model: copy it again, or write one with export.onnx"
    reason = message.split("failed:")[-1].strip().splitlines()[0][:300]
    if "float16" in message:
        return (
            f"{path} was changed to half precision since it was written, and the numbers of its operations do not fit "
            f"together any more: use the file as export.onnx wrote it ({reason})"
        )
    if unsupported := re.search(r"Unsupported model IR version.*|Opset \d+ is.*", reason):
        reason = unsupported[0]
    needed = f"it has IR version {versions[0]} and opset {versions[1]}"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST or unsupported:
        return (
            f"{path} needs a newer onnxruntime than {version}, at least {'.'.join(map(str, OLDEST))}, as {needed}: "
            f"pip install --upgrade onnxruntime ({reason})"
        )
    return (
        f"onnxruntime {version} does not take {path}, though it is whole, and {needed}: use the file as export.onnx "
        f"wrote it, or another version of onnxruntime ({reason})"
    )


def _read_versions(path: Path) -> tuple[int, int] | None:
    """Return the IR version and the opset of an ONNX model, or None if the file is cut short, or something else."""
    fields: dict[int, Any] = {}
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(0)
            while file.tell() < length:
                field, wire_type = divmod(_varint(file), 8)
                if wire_type == 0:
                    fields[field] = _varint(file)
                elif wire_type == 2:
                    size = _varint(file)
                    start = file.tell()
                    if field == 8 and (
                        opset := re.fullmatch(rb"(?:\n\x00)?\x10(.)", file.read(size), re.DOTALL)
                    ):  # ONNX's own
                        fields[field] = opset[1][0]
                    else:
                        fields.setdefault(field, None)
                    file.seek(start + size)
                else:
                    return None
            whole = file.tell() == length
    except (EOFError, OverflowError, OSError):
        return None
    return (fields[1], fields[8]) if whole and {1, 7, 8} <= fields.keys() and fields[8] else None


def _varint(file: Any) -> int:
    """Return the next number of a protocol buffer."""
    number = 0
    for shift in range(0, 64, 7):
        if not (byte := file.read(1)):
            raise EOFError
        number |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return number
    raise OverflowError


def sample_image(sample: dict[str, Any], shape: Any) -> np.ndarray:
    """Return the image (1, C, ...), float32, that a file is tried on: blocks of a mean colour each, with noise.

    Args:
        sample: ``blocks``, the means (C, ...) of at most eight blocks along each side, and ``noise``, its largest
            amount for each channel.
        shape: (C, ...).
    """
    blocks = np.array(sample["blocks"], np.float64)
    places = [np.arange(side) * count // side for side, count in zip(shape[1:], blocks.shape[1:], strict=True)]
    mixed = np.arange(np.prod(shape), dtype=np.uint64)  # in any language, bit by bit
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    noise = ((mixed >> np.uint64(24)).astype(np.float64) / 127.5 - 1).reshape(shape)
    amount = np.array(sample["noise"], np.float64).reshape(-1, *[1] * (len(shape) - 1))
    image: np.ndarray = blocks[np.ix_(np.arange(shape[0]), *places)] + amount * noise
    return image[None].astype(np.float32)


def sampled_outputs(outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return some numbers of each output, evenly spaced; of maps, as parts of the largest one."""
    samples: dict[str, np.ndarray] = {}
    for name in ("label", "scores", "components", "anomaly", "values", "maps"):
        if name not in outputs:
            continue
        numbers = np.asarray(outputs[name], np.float64)
        if name == "maps":
            largest = np.asarray(outputs["nu"], np.float64)
            numbers = numbers / np.where(largest > 0, largest, 1).reshape(*largest.shape, *[1] * (numbers.ndim - 2))
        flat = numbers.ravel()
        samples[name] = flat[np.linspace(0, len(flat) - 1, min(len(flat), SAMPLED)).astype(int)]
    return samples


def sampled_differences(samples: dict[str, np.ndarray], stored: dict[str, Any]) -> dict[str, float]:
    """Return the largest difference of each output from the stored one, as a part of its largest number.

    Where another class is predicted, values and maps are of another question, and are left out.
    """
    other = "label" in stored and not np.array_equal(samples["label"], stored["label"]["numbers"])
    return {
        name: float(np.abs(samples[name] - np.array(sample["numbers"])).max() / (sample["size"] or 1.0))
        for name, sample in stored.items()
        if name != "label" and not (other and name in ("values", "maps"))
    }


def _rgb(colours: list[str]) -> np.ndarray:
    """Return colours ``rrggbb`` as numbers, (., 3)."""
    return np.array([[*bytes.fromhex(colour)] for colour in colours], np.float64)


def _mixed(opacity: Any, colours: Any, grey: Any) -> Image.Image:
    return Image.fromarray((opacity * colours + (1 - opacity) * grey).round().astype(np.uint8))


@lru_cache
def _font(size: int) -> Any:
    for name in ("DejaVuSans.ttf", "Arial.ttf"):  # which have the letters of more languages than Pillow's own
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size + 1)


@lru_cache(1000)  # most words are the same on each sheet
def shorten(text: str, font: Any, width: int) -> str:
    """Return a text, or its beginning and an ellipsis, of at most a width in pixels."""
    while font.getlength(text) > width:
        text = text[:-2].rstrip("\N{HORIZONTAL ELLIPSIS}") + "\N{HORIZONTAL ELLIPSIS}"
    return text


@lru_cache(1000)
def _wrapped(text: str, font: Any, width: int) -> list[str]:
    """Return a text in lines of at most a width."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _fitting(picture: Image.Image, size: int) -> Image.Image:
    """Return a picture in its own shape, its longer side as long as this."""
    factor = size / max(picture.size)
    sides: Any = tuple(max(1, round(factor * side)) for side in picture.size)
    return picture.resize(sides, Image.Resampling.BILINEAR, reducing_gap=3.0)  # of large photos first by whole factors


def _boxed(picture: Image.Image, panel: Panel, frame: Any) -> Image.Image:
    """Return a picture with the boxes of a panel, at least of a size that is seen."""
    drawn, font = picture.copy(), _font(TEXT)
    draw = ImageDraw.Draw(drawn)
    left, top, right, bottom = (share * drawn.size[axis % 2] for axis, share in enumerate(frame))
    across, down = (right - left) / panel.grid[1], (bottom - top) / panel.grid[0]
    half = max(across, LEAST) / 2, max(down, LEAST) / 2
    for y, x, words in panel.boxes:
        middle = left + (x + 0.5) * across, top + (y + 0.5) * down
        for margin, colour in ((3, "black"), (2, "white"), (1, "white"), (0, "black")):
            corners = [middle[axis] + sign * (half[axis] + margin) for sign in (-1, 1) for axis in (0, 1)]
            draw.rectangle(corners, outline=colour)
        corner = middle[0] + half[0] + 4, middle[1] - half[1]
        draw.text(corner, words, "black", font, stroke_width=2, stroke_fill="white")
    return drawn


def _grey(picture: Image.Image) -> np.ndarray:
    """Return a picture in pale grey, (H, W, 1)."""
    return 255 * 0.35 + 0.65 * np.asarray(picture.convert("RGB"), np.float64).mean(-1, keepdims=True)


def _placed(values: np.ndarray, size: tuple[int, int], frame: Any, how: Any, outside: float) -> np.ndarray:
    """Return a frame's numbers (h, w) at the size of its picture, (H, W), and the mask of the rest."""
    left, top, right, bottom = (round(share * size[axis % 2]) for axis, share in enumerate(frame))
    inner = Image.fromarray(values).resize((max(1, right - left), max(1, bottom - top)), how)
    canvas = Image.fromarray(np.full(size[::-1], outside, np.float32))
    canvas.paste(inner, (left, top))
    return np.asarray(canvas)


def main() -> None:
    """Explain a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("photo", type=Path)
    parser.add_argument("--out", type=Path, default=Path("maps.png"))
    options = parser.parse_args()
    explainer = Explainer(options.model)
    picture = explainer.read(options.photo)
    outputs = explainer(explainer.prepared(picture)[None])
    if (label := explainer.predicted(outputs)) is not None:
        print("predicted:", label)
    if (passes := explainer.passes(outputs)) is not None:
        print("pass" if passes else "fail", f"(threshold {explainer.about['threshold']:.4g})")
    for title, value in zip(explainer.titles(outputs), outputs["values"][0], strict=True):
        print(f"{title}: {value:.4g}")
    explainer.sheet(picture, outputs).save(options.out)


if __name__ == "__main__":
    main()
