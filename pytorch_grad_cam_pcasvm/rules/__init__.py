"""The rules: closed-form Jacobians of torch's functions, one short rule each."""

from pytorch_grad_cam_pcasvm.rules import (
    arithmetic,
    attention,
    convolutions,
    dense,
    distances,
    elementwise,
    extremes,
    interpolation,
    norms,
    pairs,
    places,
    pooling,
    products,
    sampling,
    shapes,
    softmaxes,
    writes,
)
from pytorch_grad_cam_pcasvm.rules.registry import register_jacobian

__all__ = [
    "arithmetic",
    "attention",
    "convolutions",
    "dense",
    "distances",
    "elementwise",
    "extremes",
    "interpolation",
    "norms",
    "pairs",
    "places",
    "pooling",
    "products",
    "register_jacobian",
    "sampling",
    "shapes",
    "softmaxes",
    "writes",
]
