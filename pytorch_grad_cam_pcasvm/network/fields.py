"""Fields: outputs that are not one tensor, but a dict, a tuple, or an object with fields."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from pytorch_grad_cam_pcasvm.runtime.errors import refuse

_SHOWN = 4  # parts of an output


def read_field(output: Any, field: str) -> Any:
    """Return a field of an output; None: it has no such field."""
    return output.get(field) if isinstance(output, Mapping) else getattr(output, field, None)


def refuse_several(output: Any) -> NoReturn:
    """Refuse an output that is not one tensor, and say how to take one of it.

    Raises:
        TypeError: always.
    """
    if isinstance(output, Mapping):
        parts = {f"[{key!r}]": part for key, part in output.items()}
    elif isinstance(output, tuple | list):
        parts = {f"[{number}]": part for number, part in enumerate(output)}
    else:
        parts = {f".{name}": part for name, part in getattr(output, "__dict__", {}).items()}
    tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor) and part.dim() > 1}
    listed = [f"output{name} (N, {', '.join(map(str, part.shape[1:]))})" for name, part in tensors.items()]
    has = f" with {', '.join(listed[:_SHOWN])}" if listed else ""
    first, tensor = next(iter(tensors.items()), ("[0]", None))
    mean = {3: ".mean(1)", 4: ".mean((2, 3))"}.get(0 if tensor is None else tensor.dim(), "")
    field = "" if isinstance(output, tuple | list) else ", or of Hugging Face a field, as layer='last_hidden_state'"
    refuse(
        TypeError,
        f"features must be one tensor, but the network, or the layer, returns a {type(output).__name__}{has}",
        f"pass a function as pool, such as pool=lambda output: output{first}{mean}",
        f"name a layer that returns the tensor, layer=...{field}",
    )
