"""The command line: fit a head on a folder of images, explain another folder, browse the maps, evaluate them."""

from pytorch_grad_cam_pcasvm.studio.cli import main as main

__all__ = ["main"]
