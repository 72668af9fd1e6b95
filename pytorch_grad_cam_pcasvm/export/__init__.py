"""Explanations as programs: the computation of ``explain`` in one file, without autograd or even PyTorch."""

from typing import TYPE_CHECKING

from pytorch_grad_cam_pcasvm.studio import export as _room
from pytorch_grad_cam_pcasvm.studio.export import __dir__ as __dir__
from pytorch_grad_cam_pcasvm.studio.export import __getattr__ as __getattr__  # imports what it is asked for

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.studio.export import Explainer as Explainer
    from pytorch_grad_cam_pcasvm.studio.export import onnx as onnx
    from pytorch_grad_cam_pcasvm.studio.export import page as page
    from pytorch_grad_cam_pcasvm.studio.export import program as program
    from pytorch_grad_cam_pcasvm.studio.export import write_reader as write_reader

__all__ = []
__all__ += _room.__all__
