"""DICOM: one frame as 8-bit grey or RGB, by the window that the file names, as pydicom decodes it."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_MOST = 2  # times as many pixels as Pillow warns of, from which on it refuses
_PIXELS = "PixelData", "FloatPixelData", "DoubleFloatPixelData"
_GREY = ("MONOCHROME1", "MONOCHROME2")
Window = tuple[float, float]  # centre and width


def read_dicom(path: str | Path, page: int | None = None, window: Window | None = None) -> Image.Image:
    """Return a frame of a DICOM file as it is shown: black and white by its window, of which the first is taken.

    Without a window, black and white are the ends of the range that the file's numbers may have. It is never scaled by
    its own numbers, so that pictures remain comparable. Of MONOCHROME1 black and white change places; palettes and
    YBR become RGB. Nothing else of the file is kept.

    Args:
        path: the file.
        page: which frame, from 1 on; None: there must be one only.
        window: centre and width, in the units of the modality, such as (40, 400) of a CT; None: the file's.

    Returns:
        The picture, of mode ``"L"`` or ``"RGB"``.

    Raises:
        ImportError: pydicom is not installed.
        ValueError: there is no picture, or nobody knows which of several, or what is black and white.
        Exception: what pydicom raises, of files that are damaged, or whose compression needs another library.
    """
    pydicom: Any = import_module("pydicom")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values against the standard, which it reads all the same
        dataset = pydicom.dcmread(path, force=True)
        if "Rows" not in dataset or not any(keyword in dataset for keyword in _PIXELS):
            raise ValueError("it is DICOM without a picture: leave it out")
        if "TransferSyntaxUID" not in dataset.file_meta:
            dataset.file_meta.TransferSyntaxUID = pydicom.uid.ImplicitVRLittleEndian
        count = int(dataset.get("NumberOfFrames") or 1)
        if page is None and count > 1:
            raise ValueError(
                f"it has {count} frames, and nobody knows which is the picture: name it, --page 1 (in Python page=1)"
            )
        if page is not None and page > count:
            raise ValueError(f"it has {count} frame{'s' * (count > 1)}, and frame {page} is asked for")
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and int(dataset.Rows) * int(dataset.Columns) > _MOST * limit:
            raise ValueError("it has more pixels than Pillow takes: make it smaller, or cut it up")
        pixels = pydicom.pixels.pixel_array(dataset, index=(page or 1) - 1)
        shades = _shade(dataset, pixels, window)
    return Image.fromarray(np.rint(255 * shades.clip(0, 1)).astype(np.uint8))


def _shade(dataset: Any, pixels: np.ndarray, window: Window | None) -> np.ndarray:
    """Return pixels from 0 (black) to 1, (H, W), or of colours (H, W, 3)."""
    tables: Any = import_module("pydicom.pixels")
    kind = dataset.PhotometricInterpretation
    if kind == "PALETTE COLOR":
        colours = tables.apply_color_lut(pixels, dataset)[..., :3]
        return colours / float(np.iinfo(colours.dtype).max)  # type: ignore[no-any-return]
    if kind not in _GREY:
        return pixels / float(2 ** int(dataset.BitsStored) - 1)
    if window is not None:
        dataset.WindowCenter, dataset.WindowWidth = window
        for keyword in ("VOILUTSequence", "VOILUTFunction"):
            if keyword in dataset:
                del dataset[keyword]
    if pixels.dtype.kind == "f" and "WindowWidth" not in dataset:
        raise ValueError(
            "its numbers are floating-point, and nothing says which is white: name a window, --window CENTER,WIDTH"
        )
    values = np.asarray(tables.apply_voi_lut(tables.apply_modality_lut(pixels, dataset), dataset), np.float64)
    low, high = _find_range(dataset)
    shades: np.ndarray = (values - low) / (high - low)
    return 1 - shades if kind == "MONOCHROME1" else shades


def _find_range(dataset: Any) -> tuple[float, float]:
    """Return the least and the largest number that the pixels may have behind what makes them of the modality."""
    lookup = dataset.get("VOILUTSequence") or dataset.get("ModalityLUTSequence")
    if lookup:
        return 0.0, float(2 ** int(lookup[0].LUTDescriptor[2]) - 1)
    bits, signed = int(dataset.BitsStored), int(dataset.PixelRepresentation)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if "RescaleSlope" not in dataset or "RescaleIntercept" not in dataset:  # of which pydicom takes both, or none
        return float(low), float(high)
    slope, intercept = float(dataset.RescaleSlope), float(dataset.RescaleIntercept)
    ends = low * slope + intercept, high * slope + intercept
    return min(ends), max(ends)
