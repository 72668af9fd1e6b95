"""Explanations as programs: the computation of ``explain`` in one file, without autograd or even PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.studio.export.explainer import Explainer
    from pytorch_grad_cam_pcasvm.studio.export.files import onnx, page
    from pytorch_grad_cam_pcasvm.studio.export.graph import program
    from pytorch_grad_cam_pcasvm.studio.export.reader import write_reader

# Imported when asked for: an Explainer needs no torch.
_PLACES = {"Explainer": "explainer", "onnx": "files", "page": "files", "program": "graph", "write_reader": "reader"}

__all__ = ["Explainer", "onnx", "page", "program", "write_reader"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    """Return all public names."""
    return sorted({*globals(), *__all__})
