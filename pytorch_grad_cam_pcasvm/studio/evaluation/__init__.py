"""Evaluation: can these maps be believed? Measured on your own network and images, against controls."""

from pytorch_grad_cam_pcasvm.studio.evaluation.functions import (
    completeness,
    faithfulness,
    localisation,
    report,
    sensitivity,
    stability,
)
from pytorch_grad_cam_pcasvm.studio.evaluation.pixels import FoundFaults, PixelScores, pixel_scores
from pytorch_grad_cam_pcasvm.studio.evaluation.report_page import page
from pytorch_grad_cam_pcasvm.studio.evaluation.result import Estimate, Result, Row
from pytorch_grad_cam_pcasvm.studio.evaluation.study import Study, layers, quantus_explainer

__all__ = [
    "Estimate",
    "FoundFaults",
    "PixelScores",
    "Result",
    "Row",
    "Study",
    "completeness",
    "faithfulness",
    "layers",
    "localisation",
    "page",
    "pixel_scores",
    "quantus_explainer",
    "report",
    "sensitivity",
    "stability",
]
