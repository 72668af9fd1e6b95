"""Origins: where a backbone comes from, in words that are typed or stored; nothing large is imported."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pytorch_grad_cam_pcasvm.runtime.formats import check_fields, check_sides

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
