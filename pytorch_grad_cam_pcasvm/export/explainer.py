"""Explain pictures with a file from ``export.onnx``. Needs only numpy, Pillow and onnxruntime, and may be copied.

python explainer.py explainer.onnx photo.png --out maps.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

KEY = "pytorch_grad_cam_pcasvm"  # of the metadata
FORMAT = 2
TILE, TEXT, GAP = 224, 15, 10  # pixels of a sheet


class UnreadableImageError(OSError):
    """A picture cannot be read, or nobody can say which of its numbers is white; the message names the file.

    Attributes:
        reason: the message without the file's name.
    """

    def __init__(self, path: Any, reason: str = "") -> None:
        super().__init__(f"{path} cannot be read: {reason}" if reason else str(path))
        self.reason = reason


def read_picture(path: str | Path, white_level: float | None = None, float_white: float | None = None) -> Image.Image:
    """Return a picture as 8-bit grey, or RGB, whatever it was stored as.

    Integers of more than 8 bits are scaled by the range of their type, or by ``white_level``; floating-point numbers by
    ``float_white``. A picture is never scaled by its own largest value, so that pictures remain comparable.

    Args:
        path: the file.
        white_level: the integer that is white, such as 4095 for 12 bits; None: the largest of the type.
        float_white: the floating-point number that is white, 1 or 255; None: such pictures are refused.

    Returns:
        The picture, of mode ``"L"`` or ``"RGB"``.

    Raises:
        UnreadableImageError: the file is damaged, too large, or has numbers beyond white or below black.
    """
    try:
        with Image.open(path) as picture:
            deep_colours = picture.mode.startswith("RGB") and ";16" in str(picture.tile)
            inverted = getattr(picture, "tag_v2", {}).get(262) == 0  # of TIFF: 0 is white
            numbers, white = deep_numbers(picture)
            if numbers is None and picture.mode == "I":  # of PGM, which says what is white, and Pillow follows it
                shown = Image.fromarray(np.rint(np.asarray(picture) / 257).astype(np.uint8))
            elif numbers is None:
                shown = picture.convert("L" if picture.mode in ("1", "L", "LA", "La") else "RGB")
    except Image.DecompressionBombError as error:
        raise UnreadableImageError(
            path, "it has more pixels than Pillow takes: make it smaller, or cut it up"
        ) from error
    # Pillow has no common name for what it raises, as for a comment that is too long.
    except Exception as error:
        raise UnreadableImageError(path, f"{type(error).__name__}: {error}") from error
    if deep_colours and white_level is not None:
        raise UnreadableImageError(
            path, "its colours have 16 bits, and a white level is for grey pictures: save it in grey"
        )
    if numbers is None:
        return shown
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
        raise UnreadableImageError(
            path, f"its numbers go from {low:.6g} to {high:.6g}, but 0 is black and {white:.6g} white"
        )
    shades = white - numbers if inverted else numbers
    return Image.fromarray(np.rint(shades * (255 / white)).astype(np.uint8))


def deep_numbers(picture: Image.Image) -> tuple[np.ndarray | None, float]:
    """Return the numbers of a grey picture of more than 8 bits, as its file has them, and the largest of their type.

    Args:
        picture: an opened file.

    Returns:
        The numbers, int64 or float32, shape (H, W), or None for a picture of 8 bits; and the
        largest number, 1 for floating-point ones.
    """
    if picture.mode == "F":
        return np.asarray(picture, np.float32), 1.0
    if not picture.mode.startswith("I") or picture.format == "PPM":
        return None, 255.0
    tags = getattr(picture, "tag_v2", {})  # of TIFF: bits per sample, and whether these have a sign
    (bits, *_), (sign, *_) = (np.atleast_1d(tags.get(number, default)) for number, default in ((258, 16), (339, 1)))
    numbers = np.asarray(picture).astype(np.int64)
    if bits == 32 and sign == 1:  # Pillow has signed ones only
        numbers &= 0xFFFFFFFF
    return numbers, float(2 ** (int(bits) - (sign == 2)) - 1)


def framed(
    picture: Image.Image, size: tuple[int, int], resize: int | str | None, interpolation: str, rim: Any = 0
) -> Image.Image:
    """Return a picture at the size that a network takes.

    Args:
        picture: of mode ``"L"`` or ``"RGB"``.
        size: (height, width).
        resize: None: the whole picture, stretched; ``"pad"``: the whole picture in its own shape, in the middle of a
            frame; a number of pixels: its shorter side becomes as long, and the middle is cut out.
        interpolation: ``"bilinear"`` or ``"bicubic"``.
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


def normalised(picture: Image.Image, mean: Any, std: Any) -> np.ndarray:
    """Return ``(pixels / 255 - mean) / std`` of a picture, float32 of shape (C, H, W); None: no mean, no std."""
    pixels = np.atleast_3d(np.asarray(picture, np.float32)) / 255
    mean, std = np.float32(0 if mean is None else mean), np.float32(1 if std is None else std)
    return np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1))


def rim_of(mean: Any, channels: int) -> Any:
    """Return the colour of a frame: the mean that is subtracted, so that it is 0 for the network; else black."""
    colour = [0] * channels if mean is None else [round(255 * number) for number in mean]
    return colour[0] if channels == 1 else tuple(colour)


class Sheets:
    """The pictures of explanations: maps beside what they are of, with titles, values and colour bars.

    Attributes:
        about: ``titles`` of the targets, ``classes`` or None, and ``colours`` of maps from -1 to 1. Of dense features
            also ``label_colours``, ``heat``, the colours of anomalies, and ``anomaly_range``, where these start and
            end; what a photo has beyond that moves its own.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self._colours = _rgb(about["colours"])

    def overlay(self, picture: Image.Image, values: np.ndarray) -> Image.Image:
        """Return a signed map (H, W) in [-1, 1] over its picture in grey: red raises the value, blue lowers it."""
        grey = 255 * 0.35 + 0.65 * np.asarray(picture.convert("RGB"), np.float64).mean(-1, keepdims=True)
        values = np.asarray(Image.fromarray(values.astype(np.float32)).resize(picture.size, Image.Resampling.BILINEAR))
        count = len(self._colours)
        place = np.clip((0.5 + 0.5 * values) * count, 0, count - 1).astype(int)
        opacity = 0.95 * np.abs(np.linspace(-1, 1, count)[place])[..., None] ** 0.7
        return _mixed(opacity, self._colours[place], grey)

    def predicted(self, found: dict[str, np.ndarray], row: int = 0) -> Any:
        """Return the predicted class of an image, or None if there are no classes; of dense features the commonest."""
        if "label" not in found or not self.about["classes"]:
            return None
        return self.about["classes"][int(np.bincount(np.ravel(found["label"][row]).astype(int)).argmax())]

    def positions(
        self, picture: Image.Image, found: dict[str, np.ndarray], row: int = 0
    ) -> tuple[Any, str, Any] | None:
        """Return what is decided at every position of an image over its picture, its title and what explains it.

        Returns:
            The picture, its title and a legend: pairs of colour and class, or the ends of the anomalies' colours; None:
            the head decides once for the image.
        """
        if "heat" not in self.about or not {"anomaly", "label"} & found.keys():
            return None
        grey = 255 * 0.35 + 0.65 * np.asarray(picture.convert("RGB"), np.float64).mean(-1, keepdims=True)
        if "anomaly" in found:
            values = found["anomaly"][row].astype(np.float32)
            ends = [*values[np.isfinite(values)].tolist(), *self.about.get("anomaly_range", [])]
            low, high = min(ends), max(ends)
            large = np.asarray(Image.fromarray(values).resize(picture.size, Image.Resampling.BILINEAR))
            heat = _rgb(self.about["heat"])
            place = ((large - low) / ((high - low) or 1) * len(heat)).clip(0, len(heat) - 1).astype(int)
            return _mixed(0.6, heat[place], grey), "anomaly of every position", (f"{low:.3g}", f"{high:.3g}")
        colours = _rgb(self.about["label_colours"])
        numbers = found["label"][row].astype(np.uint8)
        large = np.asarray(Image.fromarray(numbers).resize(picture.size, Image.Resampling.NEAREST))
        legend = [
            (tuple(colours[number % len(colours)].astype(int).tolist()), f"{name}, {share:.1%}")
            for number, (name, share) in enumerate(self.shares(found, row).items())
            if share
        ]
        return _mixed(0.55, colours[large % len(colours)], grey), "class of every position", legend

    def shares(self, found: dict[str, np.ndarray], row: int = 0) -> dict[Any, float]:
        """Return the part of an image's positions that is of each class; {} if the head decides once for the image."""
        if "label" not in found or not self.about["classes"] or found["label"].ndim == 1:
            return {}
        labels = np.ravel(found["label"][row]).astype(int)
        return {name: float((labels == number).mean()) for number, name in enumerate(self.about["classes"])}

    def titles(self, found: dict[str, np.ndarray], row: int = 0) -> list[str]:
        """Return the titles of the maps of an image."""
        label = self.predicted(found, row)
        return [title.replace("predicted class", f"{label} (predicted)") for title in self.about["titles"]]

    def drawn(self, seen: Image.Image, found: dict[str, np.ndarray], row: int = 0) -> Image.Image:
        """Return what the network saw of a picture with its maps beside it, below their titles and values."""
        shown = seen.convert("RGB").resize((TILE, TILE), Image.Resampling.BILINEAR)
        label = None if self.shares(found, row) else self.predicted(found, row)
        if not np.isfinite(found["maps"][row]).all():
            raise ValueError("the maps of this picture are not finite, so the network's activations overflow")
        tiles = [(shown, "" if label is None else f"predicted: {label}", "", "")]
        for k, title in enumerate(self.titles(found, row)):
            numbers = {name: found[name][row, k] for name in ("maps", "values", "nu", "log_scale")}
            if "opposite" in found:  # the map's positive part speaks for the target, and this one's against it
                numbers["maps"] = np.maximum(numbers["maps"], 0) - np.maximum(found["opposite"][row, k], 0)
            start = found["baseline_values"][row, k] if "baseline_values" in found else 0.0
            value = f"value {numbers['values']:.4g}"
            if abs(start) > 1e-6 * max(abs(numbers["values"]), numbers["nu"]):
                value += f", from {start:.4g}"
            end = f"{numbers['nu']:.3g}" + (f" x exp({numbers['log_scale']:.4g})" if numbers["log_scale"] else "")
            drawn = self.overlay(shown, numbers["maps"] / (numbers["nu"] or 1.0))
            tiles.append((drawn, title, value, f"raises, to {end}" if numbers["nu"] else "blank: all zero"))
        if (positions := self.positions(shown, found, row)) is not None:
            tiles.insert(1, (positions[0], positions[1], "", positions[2]))
        columns = min(len(tiles), 6)
        rows = -(-len(tiles) // columns)
        font = _font()
        step, height = TILE + GAP, TILE + 4 * TEXT + GAP
        sheet = Image.new("RGB", (columns * step + GAP, rows * height + 2 * GAP), "white")
        draw = ImageDraw.Draw(sheet)
        scale = self.overlay(Image.new("RGB", (TILE, TEXT // 2), "white"), np.linspace(-1, 1, TILE)[None])
        for place, (drawn, title, value, end) in enumerate(tiles):
            x, y = GAP + place % columns * step, GAP + place // columns * height
            for line, text in enumerate((title, value)):
                draw.text((x, y + line * (TEXT + 3)), _short(text, font), "black", font)
            y += 2 * TEXT + GAP
            sheet.paste(drawn, (x, y))
            y += 0 if isinstance(end, str) else TILE + 4
            if isinstance(end, list):  # of classes
                for colour, name in end[:3]:
                    draw.rectangle((x, y + 2, x + TEXT - 4, y + TEXT - 2), colour)
                    name = name if len(end) <= 3 or name != end[2][1] else f"{name}, and {len(end) - 3} more"
                    draw.text((x + TEXT, y), _short(name, font), "black", font)
                    y += TEXT + 2
            elif isinstance(end, tuple):  # of anomalies
                heat = _rgb(self.about["heat"])[np.linspace(0, len(self.about["heat"]) - 1, TILE).astype(int)]
                sheet.paste(_mixed(1.0, np.tile(heat, (TEXT // 2, 1, 1)), 0.0), (x, y))
                draw.text((x, y + TEXT // 2 + 2), end[0], "black", font)
                draw.text((x + TILE, y + TEXT // 2 + 2), f"unlike, to {end[1]}", "black", font, anchor="ra")
            elif end:
                sheet.paste(scale, (x, y + TILE + 4))
                y += TILE + TEXT // 2 + 6
                draw.text((x, y), "lowers", "#2166ac", font)
                draw.text((x + TILE, y), end, "#b2182b", font, anchor="ra")
        return sheet


class Explainer(Sheets):
    """An explanation in a file from ``export.onnx``, for use on pictures.

    Attributes:
        about: the metadata: ``classes``, ``titles`` of the targets, ``input``, ``method``, ``digest``, ...
        names: the names of the outputs.

    Args:
        path: the file.
        providers: onnxruntime's execution providers; the first available one is used.

    Raises:
        ImportError: onnxruntime is not installed.
        ValueError: the file is truncated, is not an ONNX model, or is not an explanation.

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
            self._session = onnxruntime.InferenceSession(str(path), providers=list(providers))
        except Exception as error:  # onnxruntime's own have no common name
            raise ValueError(f"{path} is missing, cut short, or no ONNX model ({error})") from error
        about = json.loads(self._session.get_modelmeta().custom_metadata_map.get(KEY, "{}"))
        if "format" not in about:
            raise ValueError(f"{path} is a model, but not an explanation: write one with export.onnx")
        if about["format"] > FORMAT:
            raise ValueError(f"{path} was written by a later version: copy the explainer.py that belongs to it")
        self.names = [output.name for output in self._session.get_outputs()]
        super().__init__(about)

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
        rim = rim_of(input_format["mean"], channels)
        return framed(picture, (height, width), input_format["resize"], input_format["interpolation"], rim)

    def prepared(self, picture: Image.Image) -> np.ndarray:
        """Return a picture preprocessed for the network, shape (C, H, W)."""
        return normalised(self.seen(picture), self.about["input"]["mean"], self.about["input"]["std"])

    def read(self, path: str | Path) -> Image.Image:
        """Return the picture in a file, as :func:`read_picture` with what the metadata say is white."""
        return read_picture(path, *(self.about["input"].get(name) for name in ("white_level", "float_white")))

    def sheet(self, picture: Image.Image, found: dict[str, np.ndarray], row: int = 0) -> Image.Image:
        """Return a picture with its maps beside it, each below its title and value, and above a colour bar."""
        return self.drawn(self.seen(picture), found, row)


def _rgb(colours: list[str]) -> np.ndarray:
    """Return colours ``rrggbb`` as numbers, (., 3)."""
    return np.array([[*bytes.fromhex(colour)] for colour in colours], np.float64)


def _mixed(opacity: Any, colours: Any, grey: Any) -> Image.Image:
    return Image.fromarray((opacity * colours + (1 - opacity) * grey).round().astype(np.uint8))


def _font() -> Any:
    for name in ("DejaVuSans.ttf", "Arial.ttf"):  # which have the letters of more languages than Pillow's own
        try:
            return ImageFont.truetype(name, TEXT - 1)
        except OSError:
            continue
    return ImageFont.load_default(TEXT)


def _short(text: str, font: Any) -> str:
    while font.getlength(text) > TILE:
        text = text[:-2].rstrip("\N{HORIZONTAL ELLIPSIS}") + "\N{HORIZONTAL ELLIPSIS}"
    return text


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
    for title, value in zip(explainer.titles(outputs), outputs["values"][0], strict=True):
        print(f"{title}: {value:.4g}")
    explainer.sheet(picture, outputs).save(options.out)


if __name__ == "__main__":
    main()
