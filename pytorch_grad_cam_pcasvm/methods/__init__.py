"""The CAM methods: signed maps of every component and decision, from one run of the network."""

from pytorch_grad_cam_pcasvm.methods.contributions import LIFTCAM, ContributionCAM, RelevanceCAM
from pytorch_grad_cam_pcasvm.methods.gradient import (
    ClosedFormGradCAM,
    ClosedFormGradCAMElementWise,
    ClosedFormGradCAMPlusPlus,
    ClosedFormHiResCAM,
    ClosedFormLayerCAM,
    ClosedFormShapleyCAM,
    ClosedFormXGradCAM,
)
from pytorch_grad_cam_pcasvm.methods.perturbation import ClosedFormAblationCAM, ClosedFormScoreCAM, ShapCAM

__all__ = [
    "LIFTCAM",
    "ClosedFormAblationCAM",
    "ClosedFormGradCAM",
    "ClosedFormGradCAMElementWise",
    "ClosedFormGradCAMPlusPlus",
    "ClosedFormHiResCAM",
    "ClosedFormLayerCAM",
    "ClosedFormScoreCAM",
    "ClosedFormShapleyCAM",
    "ClosedFormXGradCAM",
    "ContributionCAM",
    "RelevanceCAM",
    "ShapCAM",
]
