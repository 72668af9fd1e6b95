"""The path from target layers to features, and its pullbacks."""

from pytorch_grad_cam_pcasvm.autodiff.autograd import AutogradPath
from pytorch_grad_cam_pcasvm.autodiff.forward_pass import Pass
from pytorch_grad_cam_pcasvm.autodiff.path import Path
from pytorch_grad_cam_pcasvm.autodiff.pullback import Pullback
from pytorch_grad_cam_pcasvm.autodiff.recorder import explaining
from pytorch_grad_cam_pcasvm.autodiff.rules.cotangents import Cotangent
from pytorch_grad_cam_pcasvm.autodiff.secants import Baseline

__all__ = ["AutogradPath", "Baseline", "Cotangent", "Pass", "Path", "Pullback", "explaining"]
