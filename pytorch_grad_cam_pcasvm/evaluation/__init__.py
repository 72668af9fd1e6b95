"""Evaluation: can these maps be believed? Measured on your own network and images, against uninformed maps."""

from pytorch_grad_cam_pcasvm.evaluation.completeness import completeness
from pytorch_grad_cam_pcasvm.evaluation.faithfulness import faithfulness
from pytorch_grad_cam_pcasvm.evaluation.localisation import localisation
from pytorch_grad_cam_pcasvm.evaluation.quantus import quantus_explainer
from pytorch_grad_cam_pcasvm.evaluation.report import page, report
from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.sensitivity import sensitivity
from pytorch_grad_cam_pcasvm.evaluation.stability import stability
from pytorch_grad_cam_pcasvm.evaluation.statistics import Estimate

__all__ = [
    "Estimate",
    "Result",
    "Row",
    "completeness",
    "faithfulness",
    "localisation",
    "page",
    "quantus_explainer",
    "report",
    "sensitivity",
    "stability",
]
