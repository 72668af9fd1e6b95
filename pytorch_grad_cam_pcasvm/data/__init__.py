"""Images and labels from any source."""

from pytorch_grad_cam_pcasvm.data.images import Images, in_colour

__all__ = ["Images", "in_colour"]
