"""What was one file in 0.5, and is still imported by its name; :func:`export.write_reader` writes it as one file."""

from pytorch_grad_cam_pcasvm.studio.export.explainer import Explainer as Explainer
from pytorch_grad_cam_pcasvm.studio.export.explainer import main as main
from pytorch_grad_cam_pcasvm.studio.pictures.read import UnreadableImageError as UnreadableImageError
from pytorch_grad_cam_pcasvm.studio.pictures.read import read_picture as read_picture
