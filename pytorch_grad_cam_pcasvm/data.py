"""Images and labels from any source; and, without torch, which files are photos, and which classes folders are."""

from typing import TYPE_CHECKING

from pytorch_grad_cam_pcasvm.studio import data as _room
from pytorch_grad_cam_pcasvm.studio.data import __dir__ as __dir__
from pytorch_grad_cam_pcasvm.studio.data import __getattr__ as __getattr__  # imports what it is asked for, as there

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.studio.data import Images as Images
    from pytorch_grad_cam_pcasvm.studio.data import in_colour as in_colour
    from pytorch_grad_cam_pcasvm.studio.data import write_regions as write_regions

__all__ = []
__all__ += _room.__all__
