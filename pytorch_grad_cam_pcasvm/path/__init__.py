"""The path from target layers to features, and its pullbacks."""

from pytorch_grad_cam_pcasvm.path.autograd import AutogradPath
from pytorch_grad_cam_pcasvm.path.path import Path
from pytorch_grad_cam_pcasvm.path.pullback import Pass

__all__ = ["AutogradPath", "Pass", "Path"]
