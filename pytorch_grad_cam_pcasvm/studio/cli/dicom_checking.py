"""What is said of DICOM files: how they become pictures, and what in them would give their classes away."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.studio.pictures.dicom_files import is_dicom
from pytorch_grad_cam_pcasvm.studio.pictures.read import UnreadableImageError, read_picture

_TOLD = {  # tags that nothing of a patient is in, as people call them
    "PhotometricInterpretation": "photometric interpretation", "Manufacturer": "manufacturer", "Modality": "modality",
    "ManufacturerModelName": "model of the machine",
}  # fmt: skip
_GIVES_AWAY = 0.8  # by which a value's share of the files of a class differs from that of the others
_LOOKED_AT, _GREYS = 8, 32  # files; of 256 greys, fewer than which are hardly a picture


def list_dicom(paths: Sequence[Path]) -> list[Path]:
    """Return the files that are DICOM, if they can be read."""
    return [path for path in paths if is_dicom(path)] if find_spec("pydicom") else []


def tell_windows(paths: Sequence[Path], window: Any, page: int | None) -> list[str]:
    """Return how many of the photos are DICOM, by which window, and a hint where they have hardly any greys.

    Args:
        paths: of all photos.
        window: that was typed; None: each has its own.
        page: the frame of files with several.
    """
    files = list_dicom(paths)
    if not files:
        return []
    some = files[:: -(-len(files) // _LOOKED_AT)]
    own = f"--window {window[0]:g},{window[1]:g}" if window else "the windows of the files, or all that numbers may be"
    lines = [f"{len(files)} of {len(paths)} photos are DICOM; black and white: {own}"]
    ranges = list[int]()
    for path in some:
        try:
            greys = np.percentile(np.asarray(read_picture(path, page=page, window=window)), (1, 99))
        except UnreadableImageError:  # which is said elsewhere
            continue
        ranges.append(int(np.ptp(greys)))
    if ranges and np.median(ranges) < _GREYS:
        lines.append(
            f"hint: these have {int(np.median(ranges)) + 1} of 256 greys, as their numbers fill little of their range: "
            "say what is black and white, such as --window 40,400 of soft tissue in a CT, or -600,1500 of lungs"
        )
    return lines


def tell_machines(paths: Sequence[Path], root: Path) -> list[str]:
    """Return by which values of their headers classes of DICOM files can be told apart, which a classifier may learn.

    Args:
        paths: of all photos.
        root: the folder of those of classes.
    """
    values: dict[str, dict[Any, Counter[str]]] = {name: defaultdict(Counter) for name in (*_TOLD.values(), "size")}
    for path in list_dicom(paths):
        try:
            header: Any = import_module("pydicom").dcmread(path, stop_before_pixels=True, force=True)
        except Exception:  # whatever pydicom raises: who reads it says so
            continue
        label = path.relative_to(root).parts[0]
        found = {name: str(header.get(keyword) or "none") for keyword, name in _TOLD.items()}
        found["size"] = f"{header.get('Columns')} x {header.get('Rows')}"
        for name, value in found.items():
            values[name][value][label] += 1
    lines = []
    for name, counts in values.items():
        labels = sum(counts.values(), Counter[str]())
        told = [label for label in labels if any(_tells(of_value, labels, label) for of_value in counts.values())]
        if told:
            shown = "; ".join(
                f"{value}: {', '.join(f'{label} {count}' for label, count in sorted(of_value.items()))}"
                for value, of_value in sorted(counts.items())[:_LOOKED_AT]
            )
            lines.append(
                f"hint: the {name} of DICOM files tells {' and '.join(sorted(told))} from the others ({shown}), and a "
                "classifier may learn that: mix machines and settings in each class"
            )
    return lines


def _tells(of_value: Counter[str], labels: Counter[str], label: str) -> bool:
    """Return whether nearly all files of a class have a value, and hardly one of the others, or the other way round."""
    rest = labels.total() - labels[label]
    inside, outside = of_value[label] / labels[label], (of_value.total() - of_value[label]) / max(rest, 1)
    return rest > 0 and abs(inside - outside) >= _GIVES_AWAY
