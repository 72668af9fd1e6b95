"""PCA- and SVM-Grad-CAM: signed attention maps through fitted scikit-learn heads, for pytorch-grad-cam."""

from pytorch_grad_cam_pcasvm.autodiff.rules import register_jacobian
from pytorch_grad_cam_pcasvm.cams import (
    LIFTCAM,
    ClosedFormAblationCAM,
    ClosedFormGradCAM,
    ClosedFormGradCAMElementWise,
    ClosedFormGradCAMPlusPlus,
    ClosedFormHiResCAM,
    ClosedFormLayerCAM,
    ClosedFormScoreCAM,
    ClosedFormShapleyCAM,
    ClosedFormXGradCAM,
    ContributionCAM,
    RelevanceCAM,
    ShapCAM,
)
from pytorch_grad_cam_pcasvm.cams.baselines import mean_activations
from pytorch_grad_cam_pcasvm.cams.recombine import recombined
from pytorch_grad_cam_pcasvm.cams.smoothing import smoothed
from pytorch_grad_cam_pcasvm.errors import AutogradFallbackWarning, BlankMapWarning, NoClosedFormError
from pytorch_grad_cam_pcasvm.head import Head, SupportVectorEffect, stage_for
from pytorch_grad_cam_pcasvm.maps import Jacobians, SignedMaps
from pytorch_grad_cam_pcasvm.model.features import extract_features
from pytorch_grad_cam_pcasvm.model.net import HeadOutput, PCASVMNet
from pytorch_grad_cam_pcasvm.targets import HotellingTarget, PCATarget, ProbabilityTarget, ResidualTarget, SVMTarget
from pytorch_grad_cam_pcasvm.version import __version__

__all__ = [
    "LIFTCAM",
    "AutogradFallbackWarning",
    "BlankMapWarning",
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
    "Head",
    "HeadOutput",
    "HotellingTarget",
    "Jacobians",
    "NoClosedFormError",
    "PCASVMNet",
    "PCATarget",
    "ProbabilityTarget",
    "RelevanceCAM",
    "ResidualTarget",
    "SVMTarget",
    "ShapCAM",
    "SignedMaps",
    "SupportVectorEffect",
    "__version__",
    "extract_features",
    "mean_activations",
    "recombined",
    "register_jacobian",
    "smoothed",
    "stage_for",
]
