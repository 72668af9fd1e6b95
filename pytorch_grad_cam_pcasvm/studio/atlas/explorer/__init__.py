"""The explorer: a static page for browsing a whole explained data set, without a server or network."""

from pytorch_grad_cam_pcasvm.studio.atlas.explorer.page import write_page

__all__ = ["write_page"]
