"""A panel: a photo with a map over it, the words around it, and what its colours mean."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

TILE, TEXT, GAP = 224, 15, 10  # pixels of a sheet
LARGE = 2 * TILE + GAP  # a tile of two columns
LEAST = 12  # pixels of an outline
STRIPES = 20  # across the shorter side of what is not sure
BETWEEN, ON, FADED = 0.2, 0.75, 0.4  # its strength between these, and on them; that of an outline
SPREAD = "\N{PLUS-MINUS SIGN}: how far they might move a value (one standard error)"
UNKNOWN = (
    "How sure the maps are is not known: there are no refits, which fit makes of 8 photos a class or more, and export "
    "keeps with --errors; or the method tells no errors"
)
UNSTABLE = "not stable: they would make another component of it"
UNSURE = "another hundred training photos might turn it around"  # of what is not sure, in words
DARK, CLEAR, BRIGHT = 0.25, 0.3, 0.55  # of a scale: where it starts in its table, is opaque, and has its mark


@dataclass
class ColourScale:
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
            a :class:`ColourScale`; of classes pairs of colour and name; None: there are none.
        size: of its column on a sheet, in pixels.
        boxes: the positions that are outlined: row, column, and what is written beside them.
        grid: (h, w), the shape of all positions.
        colour: of the words above it on a sheet.
        sure: where the sign of the map is sure, a mask of any resolution; the rest is pale and hatched. None: not
            known, and nothing is.
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
    sure: np.ndarray | None = None

    def lines(self, font: Any) -> list[str]:
        """Return the text above it on a sheet, in lines of its width."""
        texts = [self.heading, *self.caption.split("\n")] if self.caption else [self.heading]
        return [line for text in texts for line in wrap_text(text, font, self.size)]

    @property
    def height(self) -> int:
        """The height of its photo on a sheet, and of the text below."""
        below = 3 * (TEXT + 2) if isinstance(self.scale, list) else 0 if self.scale is None else 3 * TEXT
        return int(self.photo.height) + 4 + below


def spread_mask(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask at the size of a picture, each pixel as the cell that it lies in."""
    return mask[np.ix_(*(np.arange(n) * cells // n for n, cells in zip(shape, mask.shape, strict=True)))]


def draw_hatching(shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask of slanted lines, a third of all pixels."""
    return (np.indices(shape).sum(0) * STRIPES / min(shape)) % 1 < 1 / 3


def fade_unsure(values: np.ndarray, sure: np.ndarray) -> np.ndarray:
    """Return the numbers of a map, pale and hatched where they are not sure; a mask of the same shape tells."""
    return np.where(sure, values, np.where(draw_hatching(values.shape), ON, BETWEEN) * values)


def read_colours(colours: list[str]) -> np.ndarray:
    """Return colours ``rrggbb`` as numbers, (., 3)."""
    return np.array([[*bytes.fromhex(colour)] for colour in colours], np.float64)


def mix_colours(opacity: Any, colours: Any, grey: Any) -> Image.Image:
    """Return colours over a picture in grey, as opaque as an opacity in [0, 1]."""
    return Image.fromarray((opacity * colours + (1 - opacity) * grey).round().astype(np.uint8))


@lru_cache
def load_font(size: int) -> Any:
    """Return a font of a size in pixels."""
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
def wrap_text(text: str, font: Any, width: int) -> list[str]:
    """Return a text in lines of at most a width."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def fit_picture(picture: Image.Image, size: int) -> Image.Image:
    """Return a picture in its own shape, its longer side as long as this."""
    factor = size / max(picture.size)
    sides: Any = tuple(max(1, round(factor * side)) for side in picture.size)
    return picture.resize(sides, Image.Resampling.BILINEAR, reducing_gap=3.0)  # of large photos first by whole factors


def draw_boxes(picture: Image.Image, panel: Panel, frame: Any) -> Image.Image:
    """Return a picture with the boxes of a panel, at least of a size that is seen."""
    drawn, font = picture.copy(), load_font(TEXT)
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


def grey_out(picture: Image.Image) -> np.ndarray:
    """Return a picture in pale grey, (H, W, 1)."""
    return 255 * 0.35 + 0.65 * np.asarray(picture.convert("RGB"), np.float64).mean(-1, keepdims=True)


def place_values(values: np.ndarray, size: tuple[int, int], frame: Any, how: Any, outside: float) -> np.ndarray:
    """Return a frame's numbers (h, w) at the size of its picture, (H, W), and the mask of the rest."""
    left, top, right, bottom = (round(share * size[axis % 2]) for axis, share in enumerate(frame))
    inner = Image.fromarray(values).resize((max(1, right - left), max(1, bottom - top)), how)
    canvas = Image.fromarray(np.full(size[::-1], outside, np.float32))
    canvas.paste(inner, (left, top))
    return np.asarray(canvas)
