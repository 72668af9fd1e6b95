"""Descriptions: the JSON in the header of a model's file, and the names of backbones in it; torch is not imported."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.runtime.formats import (
    MODEL,
    MODEL_RESAMPLED,
    check_fields,
    check_list,
    check_sides,
    is_count,
    is_number,
)

FORMS = "a backbone is a torchvision name, timm:NAME, or module:function for a network of your own"
_TEXT, _OPTIONAL = (str,), (str, type(None))


@dataclass(frozen=True)
class Origin:
    """Where a backbone comes from, so that it can be made again. The library alone decides how that is done.

    Attributes:
        library: ``"torchvision"``, ``"timm"``, ``"function"`` of the user's, or ``""`` for a module that was passed.
        name: its name there, or of a module its class.
        weights: the exact name of the library's weights; None: others.
        file: the file of its weights; None: it has none of its own.
        size: (H, W) of the images that its positions were resampled for; None: its usual one, or any.
    """

    library: str
    name: str
    weights: str | None = None
    file: str | None = None
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse names that a library would read as an address, or as code.

        Raises:
            ValueError: it is such a name, or there is no such library.
        """
        if self.library not in ("torchvision", "timm", "function", ""):
            raise ValueError(f"there is no library of backbones {self.library!r}; {FORMS}")
        if self.library == "function" and not all(self.name.rpartition(":")[::2]):
            raise ValueError(f"the backbone {self.name!r} is no module:function; {FORMS}")
        if self.library not in ("torchvision", "timm"):
            return
        for name in (self.name, self.weights or ""):
            if ":" in name or "/" in name or "\\" in name:
                raise ValueError(f"{name!r} is no name of {self.library}'s, as it has a colon or a slash; {FORMS}")
        if self.library == "timm" and self.weights and self.weights.split(".")[0] != self.name.split(".")[0]:
            raise ValueError(
                f"the weights {self.weights!r} are not of {self.name}: of timm they are named {self.name}.TAG"
            )

    @property
    def typed(self) -> str | None:
        """The backbone as it is named in Python and on the command line; None of a module that was passed."""
        prefix = {"torchvision": "", "timm": "timm:", "function": ""}.get(self.library)
        return None if prefix is None else f"{prefix}{self.name}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> "Origin":
        """Return the origin with these fields.

        Raises:
            ValueError: some are missing, or are not those of an origin.
        """
        kinds = {"library": _TEXT, "name": _TEXT, "weights": _OPTIONAL, "file": _OPTIONAL, "size": (list, type(None))}
        check_fields(written, kinds, "backbone")
        size = written["size"]
        if size is not None:
            check_sides(size, "size of the backbone")
        return cls(**{**written, "size": size and tuple(size)})


def parse_origin(typed: str) -> Origin:
    """Return the origin that is typed as a name of torchvision's, ``timm:NAME`` or ``module:function``.

    Raises:
        ValueError: it is none of these.
    """
    library, colon, name = typed.partition(":")
    if not colon:
        return Origin("torchvision", typed)
    if library == "torchvision":
        raise ValueError(f"the backbone {typed}: torchvision's own have no prefix, {name}; {FORMS}")
    return Origin("timm", name) if library == "timm" else Origin("function", typed)


AGAIN = "write it again with model.save(path), or 'pcasvm-cam fit'"
_MOST_NUMBERS = 1 << 28  # of an input
_LONGEST_HEADER = 1 << 26  # bytes
_DTYPES = (
    "float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool",
)  # fmt: skip
_TILES: dict[str, tuple[type, ...]] = {
    "layer": (str, list, type(None)), "pool": (str, type(None)), "tiles": (list, type(None)), "tile": (int, type(None)),
    "overlap": (float,), "size": (list,), "block": (int,),
}  # fmt: skip
_KINDS: dict[str, tuple[type, ...]] = {
    "backbone": (dict,), "kind": (str,), "weights": (str,), "probe": (dict,), "layer": (str, list, type(None)),
    "pool": (str,), "tiles": (dict, type(None)), "layers": (list,), "tokens": (bool,), "inputs": (list,),
    "classes": (list,), "components": (int, type(None)), "about": (dict,),
}  # fmt: skip


@dataclass(frozen=True)
class Description:
    """What the file of a model says besides its head.

    Attributes:
        backbone: where the backbone comes from.
        kind: the name of its class.
        weights: the digest of its weights.
        probe: some features of ``"noise"`` and, where a transform is known, of a ``"picture"``.
        layer: where features come from: one layer, several, or None, the backbone's output.
        pool: of the features, as :func:`.write_pool` writes it.
        tiles: how photos are cut, as :meth:`.TiledNet.describe` says; None: they are not.
        layers: of the maps by default.
        tokens: whether these return tokens.
        inputs: as in :class:`.Model`.
        classes: the labels of the classes.
        components: how many the head has; None: it has none.
        about: as in :class:`.Model`.
    """

    backbone: Origin
    kind: str
    weights: str
    probe: dict[str, list[float]]
    layer: str | list[str] | None
    pool: str
    tiles: dict[str, Any] | None
    layers: list[str]
    tokens: bool
    inputs: list[dict[str, Any]]
    classes: list[Any]
    components: int | None
    about: dict[str, Any]

    @property
    def is_dense(self) -> bool:
        """Whether the head decides at every position."""
        return self.pool.partition(":")[0] == "dense"

    def to_json(self) -> str:
        """Return the text of it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Description":
        """Return the description in a text.

        Raises:
            ValueError: it is damaged; the message says where.
        """
        try:
            written = json.loads(text)
        except RecursionError as error:
            raise ValueError("its description is nested too deeply") from error
        check_fields(written, _KINDS, "description")
        for name in ("layers", "layer"):
            if isinstance(written[name], list):
                check_list(written[name], lambda layer: isinstance(layer, str), name)
        if written["tiles"] is not None:
            check_fields(written["tiles"], _TILES, "tiles")
            check_sides(written["tiles"]["size"], "sides of a tile")
        check_list(written["inputs"], _is_input, "inputs")
        check_list(written["classes"], lambda label: isinstance(label, str | int | float), "classes")
        names = set(written["probe"])
        if "noise" not in names or not names <= {"noise", "picture"} or not written["inputs"]:
            raise ValueError(f"its probe is of {', '.join(sorted(names))[:40] or 'nothing'}")
        for numbers in written["probe"].values():
            check_list(numbers, is_number, "numbers of the probe")
        return cls(**written | {"backbone": Origin.from_json(written["backbone"])})


def _is_input(written: Any) -> bool:
    check_fields(written, {"name": (str, type(None)), "shape": (list,), "dtype": (str,)}, "input")
    shape = written["shape"]
    check_list(shape, is_count, "sides of an input")
    if written["dtype"] not in _DTYPES or math.prod(shape) > _MOST_NUMBERS:
        raise ValueError(f"it has an input of {shape!r:.40} numbers of the dtype {written['dtype']!r:.40}")
    return True


def read_description(path: Path) -> Description | None:
    """Return the description of the model in a file; None: it is a head alone, or no such file.

    Raises:
        ValueError: it is damaged.
    """
    header = read_header(path)
    file_format = str(header.get("format", ""))
    if not file_format.startswith(MODEL[:-1]):
        return None
    if file_format not in (MODEL, MODEL_RESAMPLED):
        raise ValueError(f"{path} was written by a newer version, or is damaged: update pytorch_grad_cam_pcasvm")
    try:
        return Description.from_json(str(header.get("model", "")))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or no valid model: {error}; {AGAIN}") from error


def read_header(path: Path) -> dict[str, Any]:
    """Return the strings in the header of a safetensors file; empty if it is none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _LONGEST_HEADER else {}
        strings = header["__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return strings if isinstance(strings, dict) else {}
