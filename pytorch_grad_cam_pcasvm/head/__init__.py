"""The head: fitted estimators as stages with closed-form pullbacks. It knows nothing about images."""

from pytorch_grad_cam_pcasvm.head.anomalies import (
    anomaly_range,
    compare_residual,
    count_expressing,
    measure_anomaly,
    measure_residual,
    split_anomaly,
    tells_anomalies,
    usual_reach,
)
from pytorch_grad_cam_pcasvm.head.covariance_pca import CovariancePCA
from pytorch_grad_cam_pcasvm.head.decisions import Decision, Ensemble, KernelSVM, LinearDecision, SupportVectorEffect
from pytorch_grad_cam_pcasvm.head.distances import measure_reach
from pytorch_grad_cam_pcasvm.head.elsewhere import tensor
from pytorch_grad_cam_pcasvm.head.enumerated import Enumerated
from pytorch_grad_cam_pcasvm.head.head import Head
from pytorch_grad_cam_pcasvm.head.kernels import RBF, Linear, Polynomial, Sigmoid
from pytorch_grad_cam_pcasvm.head.pca_distance import PCADistance, assemble_detector, choose_shrinkage
from pytorch_grad_cam_pcasvm.head.resampling import resample_heads
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
from pytorch_grad_cam_pcasvm.head.storage import Example, TrainingSet
from pytorch_grad_cam_pcasvm.head.table import stage_for
from pytorch_grad_cam_pcasvm.head.vote import Vote

__all__ = [
    "RBF",
    "Chain",
    "CovariancePCA",
    "Decision",
    "Ensemble",
    "Enumerated",
    "Example",
    "FourierFeatures",
    "Head",
    "HeadTrace",
    "KernelMap",
    "KernelSVM",
    "Linear",
    "LinearDecision",
    "Normalise",
    "PCADistance",
    "Polynomial",
    "Projection",
    "Scale",
    "Select",
    "Sigmoid",
    "Stage",
    "SupportVectorEffect",
    "TrainingSet",
    "Vote",
    "anomaly_range",
    "assemble_detector",
    "choose_shrinkage",
    "compare_residual",
    "count_expressing",
    "measure_anomaly",
    "measure_reach",
    "measure_residual",
    "resample_heads",
    "split_anomaly",
    "stage_for",
    "tells_anomalies",
    "tensor",
    "usual_reach",
]
