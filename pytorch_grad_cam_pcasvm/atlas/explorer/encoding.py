"""What the page reads: arrays as base64, and JSON that no name can break out of."""

import base64
import json
from typing import Any

import numpy as np

_TYPES = ("float64", "float32", "float16", "int32", "uint16", "uint8")


def packed(array: Any) -> dict[str, Any]:
    """Return an array as JSON: its type, shape, and little-endian bytes in base64. The page decodes it.

    Args:
        array: an array of a type that the page knows: float64, float32, float16, int32, uint16 or uint8.

    Returns:
        A dictionary with ``type``, ``shape`` and ``base64``.

    Raises:
        TypeError: it has another type.
    """
    array = np.ascontiguousarray(array)
    dtype = array.dtype.name
    if dtype not in _TYPES:
        raise TypeError(f"the page reads arrays of {', '.join(_TYPES)}, got {dtype}")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return {"type": dtype, "shape": list(array.shape), "base64": base64.b64encode(little.tobytes()).decode("ascii")}


def json_text(value: Any) -> str:
    """Return JSON in ASCII that is safe inside a script: no ``<`` can end it, and no U+2028 can break a line.

    Raises:
        ValueError: it has NaN or infinite numbers, which JSON cannot represent.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
