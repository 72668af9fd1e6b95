"""Evaluation: can these maps be believed? Measured on your own network and images, against controls."""

from pytorch_grad_cam_pcasvm.studio import evaluation as _room
from pytorch_grad_cam_pcasvm.studio.evaluation import *  # noqa: F403 - the public names of this room

__all__ = []
__all__ += _room.__all__
