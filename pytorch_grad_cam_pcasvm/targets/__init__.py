"""Targets: the values that maps explain. Each can be called on the network's output and has a closed-form gradient."""

from pytorch_grad_cam_pcasvm.targets.catalogue import (
    decoded,
    default_decision,
    describe_anomaly,
    describe_meaning,
    encoded,
)
from pytorch_grad_cam_pcasvm.targets.components import (
    HotellingTarget,
    PCATarget,
    QuadraticTarget,
    ResidualTarget,
    every_component,
)
from pytorch_grad_cam_pcasvm.targets.decisions import LogRatioTarget, SVMTarget
from pytorch_grad_cam_pcasvm.targets.places import ImagePositions, describe_place
from pytorch_grad_cam_pcasvm.targets.questions import every_class, fix_target
from pytorch_grad_cam_pcasvm.targets.scores import DensityTarget, PredictedScore, ProbabilityTarget, ScoreTarget
from pytorch_grad_cam_pcasvm.targets.target import ClosedFormTarget, Target

__all__ = [
    "ClosedFormTarget",
    "DensityTarget",
    "HotellingTarget",
    "ImagePositions",
    "LogRatioTarget",
    "PCATarget",
    "PredictedScore",
    "ProbabilityTarget",
    "QuadraticTarget",
    "ResidualTarget",
    "SVMTarget",
    "ScoreTarget",
    "Target",
    "decoded",
    "default_decision",
    "describe_anomaly",
    "describe_meaning",
    "describe_place",
    "encoded",
    "every_class",
    "every_component",
    "fix_target",
]
