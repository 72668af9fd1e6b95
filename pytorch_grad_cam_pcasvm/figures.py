"""Figures: the paper's figures, for any network of this package."""

from pytorch_grad_cam_pcasvm.studio import figures as _room
from pytorch_grad_cam_pcasvm.studio.figures import *  # noqa: F403 - the public names of this room

__all__ = []
__all__ += _room.__all__
