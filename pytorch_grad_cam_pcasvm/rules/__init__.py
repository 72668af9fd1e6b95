"""The rules: closed-form Jacobians of torch's functions, one short rule each."""

from pytorch_grad_cam_pcasvm.rules import arithmetic, attention, dense, elementwise, pooling, shapes
from pytorch_grad_cam_pcasvm.rules.registry import register_jacobian

__all__ = ["arithmetic", "attention", "dense", "elementwise", "pooling", "register_jacobian", "shapes"]
