"""The explorer: a static page, without a server or network, in which a whole explained data set is looked at."""

from pytorch_grad_cam_pcasvm.atlas.explorer.page import write_page

__all__ = ["write_page"]
