"""Annotations as labelling tools write them: which tool's a file is, by what it says. Pascal VOC's alone are read."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_HEAD = 1 << 16  # bytes; COCO's may have gigabytes
_SHARE = re.compile(r"(?:[01]?\.\d+|[01]\.?)(?:e-?\d+)?", re.IGNORECASE)  # of a side, as of YOLO's
_SAYS = {  # what the first bytes have, by ending; the first that fits
    ".json": (
        ("LabelMe", r'"shapes"'), ("VIA", r'"(shape_attributes|_via_\w+)"'),
        ("COCO", r'"(annotations|categories|segmentation)"[\s\S]*|"images"[\s\S]*"file_name"'),
        ("Label Studio", r'"(completions|result)"'),
    ),
    ".xml": (("Pascal VOC", r"<annotation\b"), ("CVAT", r"<annotations\b")),
    ".csv": (("run lengths", r"(?i)encoded_?pixels"),),
}  # fmt: skip
READ = "Pascal VOC"
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
        whole = head.rpartition("\n")[0] if len(head) >= _HEAD else head
        return "YOLO" if _is_yolo(whole) else None
    return next((name for name, pattern in _SAYS[ending] if re.search(pattern, head)), None)


def _is_yolo(text: str) -> bool:
    """Return whether each line has the number of a class, and a box or a polygon in shares of the sides."""
    lines = [words for line in text.splitlines() if (words := line.split())]
    return bool(lines) and all(
        len(shares) >= _EDGES and kind.isdigit() and all(map(_SHARE.fullmatch, shares)) for kind, *shares in lines
    )


def name_annotations(paths: Iterable[Path]) -> list[str]:
    """Return the formats of annotations among files, with their numbers and the first file of each; not those read."""
    first, counts = dict[str, Path](), Counter[str]()
    for path in paths:
        name = name_annotation(path)
        if name is not None and name != READ:
            counts[name] += 1
            first.setdefault(name, path)
    return [f"{count} {name} (such as {first[name].name})" for name, count in counts.items()]
