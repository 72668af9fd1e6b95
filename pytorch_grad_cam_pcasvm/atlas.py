"""The atlas: a whole data set explained once, kept in files, and queried without the network."""

from pytorch_grad_cam_pcasvm.studio import atlas as _room
from pytorch_grad_cam_pcasvm.studio.atlas import *  # noqa: F403 - the public names of this room

__all__ = []
__all__ += _room.__all__
