"""Figures: the paper's figures, for any network of this package.

Every function returns a :class:`matplotlib.figure.Figure` without opening a window: notebooks show it, and
``figure.savefig("maps.png")`` needs no display. The colours suit colour-blind readers and greyscale print.
"""

from pytorch_grad_cam_pcasvm.studio.figures.component import plot_component
from pytorch_grad_cam_pcasvm.studio.figures.decision import plot_decision
from pytorch_grad_cam_pcasvm.studio.figures.grid import plot_maps
from pytorch_grad_cam_pcasvm.studio.figures.head import (
    plot_contribution_ratios,
    plot_feature_space,
    plot_jacobian,
    plot_support_vector_effect,
    plot_support_vectors,
)
from pytorch_grad_cam_pcasvm.studio.figures.mistake import plot_mistake
from pytorch_grad_cam_pcasvm.studio.figures.other_inputs import plot_signal, plot_volume
from pytorch_grad_cam_pcasvm.studio.figures.positions import plot_labels, plot_positions, plot_rgb

__all__ = [
    "plot_component",
    "plot_contribution_ratios",
    "plot_decision",
    "plot_feature_space",
    "plot_jacobian",
    "plot_labels",
    "plot_maps",
    "plot_mistake",
    "plot_positions",
    "plot_rgb",
    "plot_signal",
    "plot_support_vector_effect",
    "plot_support_vectors",
    "plot_volume",
]
