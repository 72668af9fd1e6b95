"""Mask files, as annotation tools write them: numbers of grey, indexes of a palette, or colours."""

import io
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image

from pytorch_grad_cam_pcasvm.studio.pictures.read import ON_ITS_SIDE, deep_numbers, read_orientation

BLACK, WHITE = 0x000000, 0xFFFFFF
STEPS = (1, 2, 4)  # pixels to a neighbour
_LOSSY = ("JPEG", "MPO", "AVIF", "JPEG2000")  # or may be
_TINT = 24  # of 255: grey that JPEG has given a colour


@dataclass(frozen=True)
class MaskPixels:
    """What a mask file has at every pixel.

    Attributes:
        file: the file.
        numbers: whole numbers, int64, shape (H, W): the grey, the index of a colour, or the colour as 0xRRGGBB.
        kind: ``"grey"``, ``"index"`` or ``"colour"``.
        palette: of indexes the colour of each that is used; {} where one of them is transparent.
        lossy: the format blends neighbouring pixels, as JPEG.
        orientation: how people see the file, from 1 to 8, as EXIF has it.
    """

    file: Path
    numbers: np.ndarray
    kind: str = "grey"
    palette: dict[int, int] = field(default_factory=dict)
    lossy: bool = False
    orientation: int = 1

    @property
    def counts(self) -> Counter[int]:
        """How many pixels have each number."""
        return _counted(self.numbers)

    def blends(self) -> dict[int, tuple[Counter[int], Counter[int]]]:
        """Return how many pixels of each number lie between their neighbours', as at a soft edge, and how many do not.

        By the distance of these neighbours: those of a mask that was made larger are further away.
        """
        colours = np.stack(_channels(self.numbers)) if self.kind == "colour" else self.numbers[None]
        counts = {}
        for step in STEPS:
            numbers, between = self.numbers[::step, ::step], _between(colours[:, ::step, ::step])
            counts[step] = _counted(numbers[between]), _counted(numbers[~between])
        return counts

    def with_numbers(self, numbers: np.ndarray) -> "MaskPixels":
        """Return it with other numbers of the same kind, where people see them."""
        return replace(self, numbers=numbers, orientation=1)

    def as_colours(self) -> "MaskPixels":
        """Return it in colours."""
        if self.kind == "colour":
            return self
        numbers = self.numbers * 0x010101 if self.kind == "grey" else self._looked_up()
        return replace(self, numbers=numbers, kind="colour", palette={})

    def as_shades(self) -> "MaskPixels":
        """Return black and white from a palette as 0 and 255."""
        return replace(self, numbers=np.where(self._looked_up() == WHITE, 255, 0), kind="grey", palette={})

    def _looked_up(self) -> np.ndarray:
        table = np.zeros(1 + max(self.palette, default=0), np.int64)
        table[list(self.palette)] = list(self.palette.values())
        return table[np.minimum(self.numbers, len(table) - 1)]


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return pixels (H, W) as people see them, by EXIF's orientation."""
    pixels = pixels[:, ::-1] if orientation in (2, 3, 7, 8) else pixels
    pixels = pixels[::-1] if orientation in (3, 4, 6, 7) else pixels
    return pixels.T if orientation in ON_ITS_SIDE else pixels


def turned_back(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return pixels (H, W) as they are stored where people see them so; the inverse of :func:`turned`."""
    pixels = pixels.T if orientation in ON_ITS_SIDE else pixels
    pixels = pixels[:, ::-1] if orientation in (2, 3, 7, 8) else pixels
    return pixels[::-1] if orientation in (3, 4, 6, 7) else pixels


def read_mask(file: Path, data: bytes | None = None) -> MaskPixels:
    """Return the numbers or colours of a mask file at every pixel.

    Args:
        file: the file.
        data: the mask, if it is in a file of something else.

    Raises:
        OSError: it cannot be read.
        ValueError: nobody can say what is inside; the message says why.
    """
    try:
        with Image.open(file if data is None else io.BytesIO(data)) as mask:
            shallow = ";16" in str(mask.tile) and not mask.mode.startswith("I")  # for Pillow has colours of 8 bits only
            inverted = getattr(mask, "tag_v2", {}).get(262) == 0  # of TIFF: 0 is white
            pages = getattr(mask, "n_frames", 1) if mask.format in ("TIFF", "WEBP") else 1
            lossy = mask.format in _LOSSY or (mask.format == "WEBP" and b"VP8L" not in (data or file.read_bytes())[:64])
            lossy = lossy or "jpeg" in str(mask.info.get("compression", "")).lower()
            numbers, white = (None, 255.0) if shallow else deep_numbers(mask)
            mask.load()
            orientation = read_orientation(mask)
            if numbers is None and mask.mode == "I":  # of PGM
                numbers, white = np.asarray(mask).astype(np.int64), 65535.0
            picture = mask.copy()
    except Exception as error:  # Pillow has no common name for what it raises
        raise OSError(f"the mask {file} cannot be read ({error})") from error
    if shallow:
        raise ValueError(f"the mask {file} has colours or transparency of 16 bits: save it with 8 bits, or in grey")
    if pages > 1:
        raise ValueError(f"the mask {file} has {pages} pages: save each as a file, in a folder named as the picture")
    if numbers is not None:
        whole = _whole(file, numbers)
        pixels = MaskPixels(file, (int(white) - whole if inverted and numbers.dtype.kind != "f" else whole))
    elif picture.mode == "P":
        pixels = _indexed(file, picture)
    elif picture.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        pixels = _layer(file, picture, lossy)
    else:
        pixels = _coloured(file, picture, lossy)
    return replace(pixels, lossy=lossy, orientation=orientation)


def _whole(file: Path, numbers: np.ndarray) -> np.ndarray:
    """Return numbers of more than 8 bits as whole ones; fractions from 0 to 1 are multiplied by 255.

    Raises:
        ValueError: some are negative, not finite, or have fractions beyond 1.
    """
    low, high = float(numbers.min()), float(numbers.max())
    if not (low >= 0 and high < 2**62):  # nor NaN
        raise ValueError(f"the mask {file} has numbers from {low:g} to {high:g}: 0 must be outside, and none below")
    whole = np.rint(numbers).astype(np.int64)
    if (whole == numbers).all():
        return whole
    if high > 1:
        raise ValueError(
            f"the mask {file} has floating-point numbers up to {high:g} with fractions: write black and white, or "
            "classes as 1, 2, 3 and so on"
        )
    return np.rint(numbers * 255).astype(np.int64)


def _indexed(file: Path, picture: Image.Image) -> MaskPixels:
    """Return a mask with a palette by its indexes."""
    indexes = np.asarray(picture).astype(np.int64)
    used = np.unique(indexes).tolist()
    clear = picture.info.get("transparency", b"")
    alphas = dict(enumerate(clear)) if isinstance(clear, bytes) else {int(clear): 0}
    transparent = {index for index in used if alphas.get(index, 255) < 255}
    if transparent - {0}:
        raise ValueError(
            f"the mask {file} has a palette in which number {max(transparent)} is transparent, so nobody knows what is "
            "inside: save it without transparency"
        )
    colours = np.asarray(picture.convert("RGB"), np.int64)
    packed = _packed(colours).ravel()
    first = {index: int(packed[np.argmax(indexes.ravel() == index)]) for index in used}
    return MaskPixels(file, indexes, "index", {} if transparent else first)


def _layer(file: Path, picture: Image.Image, lossy: bool) -> MaskPixels:
    """Return a mask with transparency: the channel that varies, or colours on a transparent ground.

    Raises:
        ValueError: both vary.
    """
    layer = picture.convert("LA" if picture.mode == "La" else "RGBA").convert("RGBA")
    *channels, alpha = np.moveaxis(np.asarray(layer), -1, 0).astype(np.int64)
    colours = _packed(np.stack(channels, -1))
    one_colour = bool((colours == colours.flat[0]).all())
    if (alpha == alpha.flat[0]).all():
        if not one_colour and not alpha.any():
            raise ValueError(f"the mask {file} is transparent everywhere: save it without transparency")
        return MaskPixels(file, alpha) if not alpha.any() else _coloured(file, layer.convert("RGB"), lossy)
    if one_colour:
        return MaskPixels(file, alpha)
    visible = alpha > 0
    inks, nothing = np.unique(colours[visible]).tolist(), np.unique(colours[~visible]).tolist()
    if len(nothing) == 1 and nothing != inks and BLACK not in inks:
        if len(inks) == 1:
            return MaskPixels(file, alpha)
        if nothing[0] in (BLACK, WHITE) and len(np.unique(alpha)) == 2:
            if all((channel == channels[0]).all() for channel in channels):
                return MaskPixels(file, np.where(visible, channels[0], 0))
            return MaskPixels(file, np.where(visible, colours, BLACK), "colour")
    raise ValueError(
        f"in the mask {file} both the colours and the transparency vary, and nobody knows which of them tells what is "
        "inside: save it without transparency, in black and white"
    )


def _coloured(file: Path, picture: Image.Image, lossy: bool) -> MaskPixels:
    """Return a mask without transparency, in grey if it has no colours."""
    if picture.mode in ("1", "L"):
        return MaskPixels(file, np.asarray(picture.convert("L")).astype(np.int64))
    shown = picture.convert("RGB")
    colours = np.asarray(shown).astype(np.int64)
    if int(np.ptp(colours, -1).max()) <= (_TINT if lossy else 0):
        return MaskPixels(file, np.asarray(shown.convert("L")).astype(np.int64))
    return MaskPixels(file, _packed(colours), "colour")


def _counted(numbers: np.ndarray) -> Counter[int]:
    values, counts = np.unique(numbers, return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _packed(colours: np.ndarray) -> np.ndarray:
    """Return colours (..., 3) as 0xRRGGBB."""
    return colours[..., 0] << 16 | colours[..., 1] << 8 | colours[..., 2]


def _channels(packed: np.ndarray) -> tuple[np.ndarray, ...]:
    return packed >> 16, packed >> 8 & 255, packed & 255


def _between(colours: np.ndarray) -> np.ndarray:
    """Return which pixels of (C, H, W) are between their other neighbours: none of them, and not beyond them.

    A pixel of a class at the edge of another has neighbours of that one, which is beyond it.
    """
    largest = np.iinfo(np.int64).max
    height, width = colours.shape[1:]
    padded = np.pad(colours, ((0, 0), (1, 1), (1, 1)), mode="edge")
    low, high = np.full(colours.shape, largest), np.full(colours.shape, -1)
    for row in range(3):
        for column in range(3):
            near = padded[:, row : row + height, column : column + width]
            other = (near != colours).any(0)
            low = np.where(other, np.minimum(low, near), low)
            high = np.where(other, np.maximum(high, near), high)
    inside = (low <= colours) & (colours <= high)
    return np.asarray(inside.all(0) & ((low < colours) & (colours < high)).any(0))
