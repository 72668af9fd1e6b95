"""Which files are DICOM, by their names and first bytes: without numpy and Pillow, for lists of files."""

from pathlib import Path

_ENDINGS = (".dcm", ".dicom", ".ima")
_MAGIC, _MAGIC_AT = b"DICM", 128


def is_dicom(path: str | Path) -> bool:
    """Return whether a file is DICOM, by its ending, or of one without an ending by its first bytes."""
    path = Path(path)
    if path.suffix.lower() in _ENDINGS:
        return True
    try:
        with path.open("rb") as file:
            return file.read(_MAGIC_AT + len(_MAGIC))[_MAGIC_AT:] == _MAGIC
    except OSError:
        return False
