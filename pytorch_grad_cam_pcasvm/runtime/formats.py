"""Formats of files that more than one package reads, and checks of the names and types in their JSON, without torch."""

from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 1 << 15  # pixels of a side


def check_fields(written: Any, kinds: Mapping[str, tuple[type, ...]], subject: str, *, optional: bool = False) -> None:
    """Refuse an object without exactly these fields, of these types.

    Args:
        written: what is read.
        kinds: the types of each field. A number may be whole where it is to be a float, but no bool.
        subject: is read, for messages.
        optional: whether fields may be missing.

    Raises:
        ValueError: it is no such mapping; the message names the field.
    """
    if not isinstance(written, dict):
        raise ValueError(f"its {subject} is {written!r:.40}, and no mapping")
    missing = [name for name in kinds if name not in written]
    unknown = [name for name in written if name not in kinds]
    if missing and not optional:
        raise ValueError(f"its {subject} has no {missing[0]!r}")
    if unknown:
        raise ValueError(f"its {subject} has an unknown {unknown[0]!r:.40}")
    for name, value in written.items():
        if not _is_any(value, kinds[name]):
            raise ValueError(f"its {subject} has the {name} {value!r:.40}")


def check_list(written: Any, fits: Callable[[Any], bool], subject: str) -> None:
    """Refuse anything but a list of things that fit.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(written, list) or not all(map(fits, written)):
        raise ValueError(f"its {subject} are {written!r:.40}")


def check_sides(written: Any, subject: str) -> None:
    """Refuse anything but a size of pictures, (H, W).

    Raises:
        ValueError: it is none.
    """
    check_list(written, lambda side: is_count(side) and side <= LARGEST, subject)
    if len(written) != 2:
        raise ValueError(f"its {subject} are {written!r:.40}")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return _is_any(value, (float,)) and abs(value) < float("inf")


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number above 0."""
    return _is_any(value, (int,)) and value > 0


def _is_any(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


MODEL = "pytorch_grad_cam_pcasvm model 1"  # a head with its backbone's name, see model/description.py
MODEL_RESAMPLED = "pytorch_grad_cam_pcasvm model 2"  # and with resampled heads, which earlier versions do not know
MODEL_RESAMPLED = "pytorch_grad_cam_pcasvm model 2"  # and with resampled heads, which earlier versions do not know
