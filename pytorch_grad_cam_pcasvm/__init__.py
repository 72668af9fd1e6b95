"""PCA- and SVM-Grad-CAM: signed attention maps through fitted scikit-learn heads, for pytorch-grad-cam."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pytorch_grad_cam_pcasvm.version import __version__

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.head import (
        CovariancePCA,
        Head,
        PCADistance,
        SupportVectorEffect,
        choose_shrinkage,
        resample_heads,
        stage_for,
    )
    from pytorch_grad_cam_pcasvm.maps.recombination import recombined
    from pytorch_grad_cam_pcasvm.maps.results import MethodResult, signed_maps
    from pytorch_grad_cam_pcasvm.maps.signed_maps import Jacobians, SignedMaps
    from pytorch_grad_cam_pcasvm.methods import (
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
    from pytorch_grad_cam_pcasvm.methods.baseline import BaselineCAM
    from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM, ComponentSums
    from pytorch_grad_cam_pcasvm.methods.many_heads import explain_heads
    from pytorch_grad_cam_pcasvm.methods.perturbation import PerturbationCAM
    from pytorch_grad_cam_pcasvm.methods.smoothing import smoothed
    from pytorch_grad_cam_pcasvm.methods.warn_once import are_unlike_training, measure_outside
    from pytorch_grad_cam_pcasvm.network.auto_layers import find_last_blocks
    from pytorch_grad_cam_pcasvm.network.extraction import extract_features, mean_activations
    from pytorch_grad_cam_pcasvm.network.features import FeatureSource, compute_features
    from pytorch_grad_cam_pcasvm.network.inputs import Inputs
    from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_layer_name, find_network
    from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
    from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
    from pytorch_grad_cam_pcasvm.network.tiles import TiledNet
    from pytorch_grad_cam_pcasvm.rules import register_jacobian
    from pytorch_grad_cam_pcasvm.runtime.errors import (
        AutogradFallbackWarning,
        BaselineWarning,
        BlankMapWarning,
        CancellationWarning,
        CoarseMapWarning,
        ConstantComponentWarning,
        NoClosedFormError,
        NoProgramError,
        OutsideTrainingWarning,
        UnstableComponentWarning,
    )
    from pytorch_grad_cam_pcasvm.studio.model.file import load_model
    from pytorch_grad_cam_pcasvm.studio.model.fitting import fit_model
    from pytorch_grad_cam_pcasvm.studio.model.good_photos import add_photos
    from pytorch_grad_cam_pcasvm.studio.model.model import Model
    from pytorch_grad_cam_pcasvm.studio.model.teaching import choose_patches
    from pytorch_grad_cam_pcasvm.targets import (
        DensityTarget,
        HotellingTarget,
        LogRatioTarget,
        PCATarget,
        ProbabilityTarget,
        ResidualTarget,
        SVMTarget,
    )

# Where public names are: what they need, such as torch, is imported when one is asked for, and not for --help.
_NAMES = {
    "rules": "register_jacobian",
    "methods": "LIFTCAM ClosedFormAblationCAM ClosedFormGradCAM ClosedFormGradCAMElementWise ClosedFormGradCAMPlusPlus "
    "ClosedFormHiResCAM ClosedFormLayerCAM ClosedFormScoreCAM ClosedFormShapleyCAM ClosedFormXGradCAM ContributionCAM "
    "RelevanceCAM ShapCAM",
    "maps.results": "MethodResult",
    "methods.grad_cam_protocol": "ClosedFormCAM ComponentSums",
    "maps.recombination": "recombined",
    "methods.warn_once": "are_unlike_training measure_outside",
    "methods.perturbation": "PerturbationCAM",
    "methods.many_heads": "explain_heads",
    "methods.smoothing": "smoothed",
    "methods.baseline": "BaselineCAM",
    "studio.model.file": "load_model",
    "studio.model.fitting": "fit_model",
    "studio.model.good_photos": "add_photos",
    "studio.model.teaching": "choose_patches",
    "studio.model.model": "Model",
    "runtime.errors": "AutogradFallbackWarning BaselineWarning BlankMapWarning CancellationWarning CoarseMapWarning "
    "ConstantComponentWarning NoClosedFormError NoProgramError OutsideTrainingWarning "
    "UnstableComponentWarning",
    "head": "CovariancePCA Head PCADistance SupportVectorEffect choose_shrinkage resample_heads stage_for",
    "maps": "Jacobians SignedMaps signed_maps",
    "network.auto_layers": "find_last_blocks",
    "network.extraction": "extract_features mean_activations",
    "network.features": "FeatureSource compute_features",
    "network.inputs": "Inputs",
    "network.modules": "evaluation_mode find_device find_layer_name find_network",
    "network.net": "HeadOutput PCASVMNet",
    "network.tiles": "TiledNet",
    "targets": "DensityTarget HotellingTarget LogRatioTarget PCATarget ProbabilityTarget ResidualTarget SVMTarget",
}
_PLACES = {name: place for place, names in _NAMES.items() for name in names.split()}

__all__ = [
    "LIFTCAM",
    "AutogradFallbackWarning",
    "BaselineCAM",
    "BaselineWarning",
    "BlankMapWarning",
    "CancellationWarning",
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
    "ComponentSums",
    "ConstantComponentWarning",
    "ContributionCAM",
    "CovariancePCA",
    "DensityTarget",
    "FeatureSource",
    "Head",
    "HeadOutput",
    "HotellingTarget",
    "Inputs",
    "Jacobians",
    "LogRatioTarget",
    "MethodResult",
    "Model",
    "NoClosedFormError",
    "NoProgramError",
    "OutsideTrainingWarning",
    "PCADistance",
    "PCASVMNet",
    "PCATarget",
    "PerturbationCAM",
    "ProbabilityTarget",
    "RelevanceCAM",
    "ResidualTarget",
    "SVMTarget",
    "ShapCAM",
    "SignedMaps",
    "SupportVectorEffect",
    "TiledNet",
    "UnstableComponentWarning",
    "__version__",
    "add_photos",
    "are_unlike_training",
    "choose_patches",
    "choose_shrinkage",
    "compute_features",
    "evaluation_mode",
    "explain_heads",
    "extract_features",
    "find_device",
    "find_last_blocks",
    "find_layer_name",
    "find_network",
    "fit_model",
    "load_model",
    "mean_activations",
    "measure_outside",
    "recombined",
    "register_jacobian",
    "resample_heads",
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
