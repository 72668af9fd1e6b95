"""Explanations as programs: what ``explain`` computes in one file, for where there is no autograd, or no PyTorch."""

from pytorch_grad_cam_pcasvm.export.onnx_file import onnx
from pytorch_grad_cam_pcasvm.export.program import program

__all__ = ["onnx", "program"]
