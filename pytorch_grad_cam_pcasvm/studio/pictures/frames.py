"""How a picture becomes the image that a network takes, and which part of it the network sees."""

from typing import Any

import numpy as np
from PIL import Image

WHOLE = (0.0, 0.0, 1.0, 1.0)


def frame_picture(
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
        resize: as in :func:`frame_picture`; a frame around the picture has shares below 0 and above 1.
    """
    if resize is None:
        return WHOLE
    (width, height), (rows, columns) = picture, size
    factor = min(columns / width, rows / height) if resize == "pad" else int(resize) / min(picture)
    across, down = columns / factor / width, rows / factor / height
    return (1 - across) / 2, (1 - down) / 2, (1 + across) / 2, (1 + down) / 2


def normalise_picture(picture: Image.Image, mean: Any, std: Any) -> np.ndarray:
    """Return ``(pixels / 255 - mean) / std`` of a picture, float32 of shape (C, H, W); None: no mean, no std."""
    pixels = np.atleast_3d(np.asarray(picture, np.float32)) / 255
    mean, std = np.float32(0 if mean is None else mean), np.float32(1 if std is None else std)
    return np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1))


def choose_rim(mean: Any, channels: int) -> Any:
    """Return the colour of a frame: the mean that is subtracted, so that it is 0 for the network; else black."""
    colour = [0] * channels if mean is None else [round(255 * number) for number in mean]
    return colour[0] if channels == 1 else tuple(colour)
