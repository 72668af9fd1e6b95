"""The head: fitted estimators as stages with closed-form pullbacks. It knows nothing about images."""

from pytorch_grad_cam_pcasvm.head.decisions import Decision, Ensemble, KernelSVM, LinearDecision, SupportVectorEffect
from pytorch_grad_cam_pcasvm.head.head import Head
from pytorch_grad_cam_pcasvm.head.registry import stage_for, tensor
from pytorch_grad_cam_pcasvm.head.stack import HeadTrace
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import (
    Chain,
    FourierFeatures,
    KernelMap,
    Normalise,
    Projection,
    Scale,
    Select,
)

__all__ = [
    "Chain",
    "Decision",
    "Ensemble",
    "FourierFeatures",
    "Head",
    "HeadTrace",
    "KernelMap",
    "KernelSVM",
    "LinearDecision",
    "Normalise",
    "Projection",
    "Scale",
    "Select",
    "Stage",
    "SupportVectorEffect",
    "stage_for",
    "tensor",
]
