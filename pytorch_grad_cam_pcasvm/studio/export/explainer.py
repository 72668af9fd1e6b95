"""Explain pictures with a file from ``export.onnx``. Needs only numpy, Pillow and onnxruntime, and may be copied.

python explainer.py explainer.onnx photo.png --out maps.png
"""

import argparse
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pytorch_grad_cam_pcasvm.studio.pictures.frames import choose_rim, find_frame, frame_picture, normalise_picture
from pytorch_grad_cam_pcasvm.studio.pictures.read import read_picture
from pytorch_grad_cam_pcasvm.studio.pictures.sheets import Sheets

KEY = "pytorch_grad_cam_pcasvm"  # of the metadata
FORMAT = 3
AS_STORED = 2  # of files that do not say that EXIF turns photos: earlier readers, which turn none, read these
OLDEST = 1, 20  # version of onnxruntime that takes these files
BLOCKS, SAMPLED = 8, 64  # of each side of the sample, and the most numbers that are kept of each of its outputs
MOST = 1e-3  # error, as a part of the largest number, that nobody would see on a map


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
            self._session = open_session(onnxruntime, str(path), providers)
        except Exception as error:  # onnxruntime's own have no common name
            raise ValueError(_why_refused(Path(path), str(error), onnxruntime.__version__)) from error
        about = json.loads(self._session.get_modelmeta().custom_metadata_map.get(KEY, "{}"))
        if "format" not in about:
            raise ValueError(f"{path} is a model, but not an explanation: write one with export.onnx")
        if about["format"] > FORMAT:
            raise ValueError(
                f"{path} was written by a later version: use the reader that export.write_reader writes there"
            )
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
        """Return all outputs, by name, for images (N, ...) as the network takes them; with errors also ``sure``."""
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
        outputs = dict(zip(self.names, self._session.run(self.names, {"images": images}), strict=True))
        if "error" in outputs:
            outputs["sure"] = np.abs(outputs["maps"]) > self.about["sure_from"] * outputs["error"]
        return outputs

    def seen(self, picture: Image.Image) -> Image.Image:
        """Return the part of a picture that the network gets, at the network's resolution."""
        input_format = self.about["input"]
        if len(input_format["shape"]) != 3 or input_format["shape"][0] not in (1, 3):
            raise ValueError(f"the network takes arrays of shape {input_format['shape']}, not pictures")
        channels, height, width = input_format["shape"]
        picture = picture.convert("RGB" if channels == 3 else "L")
        rim = choose_rim(input_format["mean"], channels)
        return frame_picture(picture, (height, width), input_format["resize"], input_format["interpolation"], rim)

    def prepared(self, picture: Image.Image) -> np.ndarray:
        """Return a picture preprocessed for the network, shape (C, H, W)."""
        return normalise_picture(self.seen(picture), self.about["input"]["mean"], self.about["input"]["std"])

    def read(self, path: str | Path) -> Image.Image:
        """Return the picture in a file by :func:`read_picture`, with white and EXIF as in the metadata."""
        said = self.about["input"]
        window = said.get("window")
        return read_picture(
            path, said.get("white_level"), said.get("float_white"), bool(said.get("exif")), said.get("page"),
            None if window is None else (window[0], window[1]),
        )  # fmt: skip

    def sheet(
        self, picture: Image.Image, found: dict[str, np.ndarray], row: int = 0, *, truth: Any = None
    ) -> Image.Image:
        """Return a picture with its maps over it, in its own shape; see :meth:`Sheets.drawn`."""
        self.seen(picture)  # which refuses what is no picture for the network
        input_format = self.about["input"]
        frame = find_frame(picture.size, tuple(input_format["shape"][1:]), input_format["resize"])
        return self.drawn(picture, found, row, frame=frame, truth=truth)


def open_session(onnxruntime: Any, model: Any, providers: Any = ("CPUExecutionProvider",)) -> Any:
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
