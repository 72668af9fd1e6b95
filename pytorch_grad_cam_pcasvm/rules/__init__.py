"""The rules: closed-form Jacobians of torch's functions, one short rule each."""

from pytorch_grad_cam_pcasvm.rules import (
    arithmetic,
    attention,
    elementwise,
    indexing,
    linear,
    norms,
    pooling,
    reductions,
    sampling,
    shapes,
)
from pytorch_grad_cam_pcasvm.rules.registry import register_jacobian

__all__ = [
    "arithmetic",
    "attention",
    "elementwise",
    "indexing",
    "linear",
    "norms",
    "pooling",
    "reductions",
    "register_jacobian",
    "sampling",
    "shapes",
]
