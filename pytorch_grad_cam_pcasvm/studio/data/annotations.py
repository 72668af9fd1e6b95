"""Annotations as labelling tools write them: the tool that wrote a file, by its first bytes."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_HEAD = 1 << 16  # bytes; COCO's may have gigabytes
_SHARE = re.compile(r"(?:[01]?\.\d+|[01]\.?)(?:e-?\d+)?", re.IGNORECASE)  # of a side, as of YOLO's
_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:e-?\d+)?", re.IGNORECASE)  # behind a box of a pose
_SAYS = {  # what the first bytes have, by ending; the first that fits
    ".json": (
        ("LabelMe", r'"(shapes|imageData)"'), ("VIA", r'"(shape_attributes|_via_\w+)"'),
        ("Label Studio", r'"(completions|completed_by|from_name|original_width)"'),
        ("SuperAnnotate", r'"instances"\s*:[\s\S]*"class(Name|Id)"'),
        ("COCO", r'"(annotations|categories|segmentation)"[\s\S]*|"images"[\s\S]*"file_name"'),
    ),
    ".xml": (("Pascal VOC", r"<annotation\b"), ("CVAT", r"<annotations\b")),
    ".csv": (("run lengths", r"(?i)encoded_?pixels"),),
}  # fmt: skip
READ = ("COCO", "LabelMe", "YOLO", "Pascal VOC", "CVAT", "run lengths")
CLASS_LISTS = ("classes.txt", "obj.names")  # of YOLO, a name on each line
CLASS_TABLES = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
OF_ALL = ("COCO", "CVAT", "run lengths")  # one file for all photos
_WAYS = {  # of those that are not read
    "VIA": "export them as COCO (Annotation > Export Annotations, COCO format)",
    "Label Studio": "export them as COCO, YOLO, or 'Brush labels to PNG'",
    "SuperAnnotate": "turn them into COCO with its own tool, superannotate.export_annotation",
}
_EDGES = 4  # of a box


def name_annotation(path: Path) -> str | None:
    """Return the format of annotations that a file has, by its first bytes; None: it has none that is known."""
    ending = path.suffix.lower()
    if ending not in (".txt", *_SAYS):
        return None
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD).decode("utf-8", "replace")
    except OSError:
        return None
    if ending == ".txt":
        whole = (head.rpartition("\n")[0] or head.rpartition(" ")[0]) if len(head) >= _HEAD else head
        return "YOLO" if _is_yolo(whole) else None
    return next((name for name, pattern in _SAYS[ending] if re.search(pattern, head)), None)


def _is_yolo(text: str) -> bool:
    """Return whether each line has the number of a class, and a box or a polygon in shares of the sides."""
    lines = [words for line in text.splitlines() if (words := line.split())]
    return bool(lines) and all(
        len(shares) >= _EDGES
        and label.isdigit()
        and all(map(_SHARE.fullmatch, shares[:_EDGES]))
        and all(_SHARE.fullmatch(share) or _NUMBER.fullmatch(share) for share in shares[_EDGES:])
        for label, *shares in lines
    )


def is_read(path: Path) -> bool:
    """Return whether a file has annotations of a format that is read, by its first bytes."""
    return name_annotation(path) in READ


def name_annotations(paths: Iterable[Path]) -> list[str]:
    """Return the formats among files of annotations that are not read: numbers, first files, and the way out."""
    first, counts = dict[str, Path](), Counter[str]()
    for path in paths:
        tool = name_annotation(path)
        if tool in _WAYS:
            counts[tool] += 1
            first.setdefault(tool, path)
    return [f"{count} {tool} (such as {first[tool].name}): {_WAYS[tool]}" for tool, count in counts.items()]


def refuse_unread(path: Path) -> None:
    """Refuse a file of annotations that are not read.

    Raises:
        ValueError: it has such, or none.
    """
    tool = name_annotation(path)
    if tool in _WAYS:
        raise ValueError(f"{path} has annotations of {tool}, which are not read as they are: {_WAYS[tool]}")
    if tool is None:
        raise ValueError(f"{path} has no annotations that are known ({', '.join(READ)}): name such a file, or a folder")
