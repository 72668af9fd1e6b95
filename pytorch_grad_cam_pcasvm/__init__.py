"""PCA- and SVM-Grad-CAM: signed attention maps through fitted scikit-learn heads, for pytorch-grad-cam."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pytorch_grad_cam_pcasvm.version import __version__

if TYPE_CHECKING:
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
    from pytorch_grad_cam_pcasvm.cams.base import ClosedFormCAM, Explained
    from pytorch_grad_cam_pcasvm.cams.baselines import mean_activations
    from pytorch_grad_cam_pcasvm.cams.recombine import recombined
    from pytorch_grad_cam_pcasvm.cams.smoothing import smoothed
    from pytorch_grad_cam_pcasvm.errors import (
        AutogradFallbackWarning,
        BaselineWarning,
        BlankMapWarning,
        CoarseMapWarning,
        ConstantComponentWarning,
        NoClosedFormError,
        NoProgramError,
        OutsideTrainingWarning,
    )
    from pytorch_grad_cam_pcasvm.head import Head, SupportVectorEffect, stage_for
    from pytorch_grad_cam_pcasvm.maps import Jacobians, SignedMaps, signed_maps
    from pytorch_grad_cam_pcasvm.model.features import extract_features
    from pytorch_grad_cam_pcasvm.model.net import HeadOutput, PCASVMNet
    from pytorch_grad_cam_pcasvm.targets import (
        HotellingTarget,
        LogRatioTarget,
        PCATarget,
        ProbabilityTarget,
        ResidualTarget,
        SVMTarget,
    )

# Where public names are: what they need, such as torch, is imported when one is asked for, and not for --help.
_NAMES = {
    "autodiff.rules": "register_jacobian",
    "cams": "LIFTCAM ClosedFormAblationCAM ClosedFormGradCAM ClosedFormGradCAMElementWise ClosedFormGradCAMPlusPlus "
    "ClosedFormHiResCAM ClosedFormLayerCAM ClosedFormScoreCAM ClosedFormShapleyCAM ClosedFormXGradCAM ContributionCAM "
    "RelevanceCAM ShapCAM",
    "cams.base": "ClosedFormCAM Explained",
    "cams.baselines": "mean_activations",
    "cams.recombine": "recombined",
    "cams.smoothing": "smoothed",
    "errors": "AutogradFallbackWarning BaselineWarning BlankMapWarning CoarseMapWarning "
    "ConstantComponentWarning NoClosedFormError NoProgramError OutsideTrainingWarning",
    "head": "Head SupportVectorEffect stage_for",
    "maps": "Jacobians SignedMaps signed_maps",
    "model.features": "extract_features",
    "model.net": "HeadOutput PCASVMNet",
    "targets": "HotellingTarget LogRatioTarget PCATarget ProbabilityTarget ResidualTarget SVMTarget",
}
_PLACES = {name: place for place, names in _NAMES.items() for name in names.split()}

__all__ = [
    "LIFTCAM",
    "AutogradFallbackWarning",
    "BaselineWarning",
    "BlankMapWarning",
    "ClosedFormAblationCAM",
    "ClosedFormCAM",
    "ClosedFormGradCAM",
    "ClosedFormGradCAMElementWise",
    "ClosedFormGradCAMPlusPlus",
    "ClosedFormHiResCAM",
    "ClosedFormLayerCAM",
    "ClosedFormScoreCAM",
    "ClosedFormShapleyCAM",
    "ClosedFormXGradCAM",
    "CoarseMapWarning",
    "ConstantComponentWarning",
    "ContributionCAM",
    "Explained",
    "Head",
    "HeadOutput",
    "HotellingTarget",
    "Jacobians",
    "LogRatioTarget",
    "NoClosedFormError",
    "NoProgramError",
    "OutsideTrainingWarning",
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
    "signed_maps",
    "smoothed",
    "stage_for",
]


def __getattr__(name: str) -> Any:
    """Return a public name, or a module of this package."""
    if name in _PLACES:
        value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all public names."""
    return sorted({*globals(), *__all__})
