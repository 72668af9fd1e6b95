"""Deprecated since 0.2: :mod:`pytorch_grad_cam_pcasvm.head` has what was here."""

import warnings

from pytorch_grad_cam_pcasvm.head import stage_for, tensor

__all__ = ["stage_for", "tensor"]
warnings.warn(
    "pytorch_grad_cam_pcasvm.converters will be removed in 0.3: import stage_for and tensor from "
    "pytorch_grad_cam_pcasvm.head",
    DeprecationWarning,
    stacklevel=2,
)
