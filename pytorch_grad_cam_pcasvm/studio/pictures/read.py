"""How pictures are read: every kind of file as 8-bit grey or RGB, as people see it."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

from pytorch_grad_cam_pcasvm.studio.pictures.dicom import Window, read_dicom
from pytorch_grad_cam_pcasvm.studio.pictures.dicom_files import is_dicom

_TURNS = {  # by EXIF's orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
ON_ITS_SIDE = range(5, 9)  # orientations in which width and height change places
_SAY_TURN = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")  # entries of Pillow's ``info``


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
    window: Window | None = None,
) -> Image.Image:
    """Return a picture as 8-bit grey, or RGB, whatever it was stored as, and as people see it.

    Integers of more than 8 bits are scaled by the range of their type, or by ``white_level``; floating-point numbers by
    ``float_white``, those of DICOM by their window (:func:`.read_dicom`). A picture is never scaled by its own largest
    value, so that pictures remain comparable. Of animations, the first frame is read.

    Args:
        path: the file.
        white_level: the integer that is white, such as 4095 for 12 bits; None: the largest of the type.
        float_white: the floating-point number that is white, 1 or 255; None: such pictures are refused.
        exif: turn it as its EXIF orientation says, as phones write it; False: leave the pixels where they are stored,
            as up to version 0.4.
        page: of a TIFF of several pages, or a DICOM file of several frames, the one to read, from 1 on; None: such
            files are refused.
        window: of grey DICOM files the centre and width, in the units of the modality; None: the files' own.

    Returns:
        The picture, of mode ``"L"`` or ``"RGB"``.

    Raises:
        UnreadableImageError: the file is damaged, too large, of several pages or channels that are no colours, or has
            numbers beyond white or below black.
    """
    if is_dicom(path):
        return _read_frame(path, page, window)
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


def open_picture(path: str | Path, page: int | None = None) -> Image.Image:
    """Return a picture that is opened, as by Pillow, not loaded, at a page; of DICOM a frame that is read.

    Raises:
        UnreadableImageError: it is a DICOM file that cannot be read, or has several pages, or not as many.
        Exception: what Pillow raises.
    """
    if is_dicom(path):
        return _read_frame(path, page, None)
    picture = Image.open(path)
    choose_page(picture, page)
    return picture


def _read_frame(path: str | Path, page: int | None, window: Window | None) -> Image.Image:
    """Return a frame of a DICOM file.

    Raises:
        UnreadableImageError: it cannot be read, with the reason.
    """
    try:
        return read_dicom(path, page, window)
    except ImportError as error:
        way = "it is DICOM: pip install 'pytorch_grad_cam_pcasvm[dicom]' reads it"
        raise UnreadableImageError(path, way) from error
    except Exception as error:  # whatever pydicom and its decoders raise
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise UnreadableImageError(path, " ".join(reason.split())) from error


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
