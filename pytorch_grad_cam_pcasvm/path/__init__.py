"""The path from target layers to features, and its pullbacks."""

from pytorch_grad_cam_pcasvm.path.autograd import AutogradPath
from pytorch_grad_cam_pcasvm.path.passed import Pass
from pytorch_grad_cam_pcasvm.path.path import Path
from pytorch_grad_cam_pcasvm.path.secants import Baseline

__all__ = ["AutogradPath", "Baseline", "Pass", "Path"]
