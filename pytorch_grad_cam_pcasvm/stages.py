"""Deprecated since 0.2: :mod:`pytorch_grad_cam_pcasvm.head` has what was here."""

import warnings

from pytorch_grad_cam_pcasvm.head import Chain, FourierFeatures, KernelMap, Normalise, Projection, Scale, Select, Stage

__all__ = ["Chain", "FourierFeatures", "KernelMap", "Normalise", "Projection", "Scale", "Select", "Stage"]
warnings.warn(
    "pytorch_grad_cam_pcasvm.stages will be removed in 0.3: import Scale, Stage and the others from "
    "pytorch_grad_cam_pcasvm.head",
    DeprecationWarning,
    stacklevel=2,
)
