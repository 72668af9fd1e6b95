"""The atlas: a whole data set explained once, kept in files, and queried without the network."""

from pytorch_grad_cam_pcasvm.studio.atlas.build import build
from pytorch_grad_cam_pcasvm.studio.atlas.features import Features, extract
from pytorch_grad_cam_pcasvm.studio.atlas.store import Atlas, Extremes, MeanMaps, Neighbours, load

__all__ = ["Atlas", "Extremes", "Features", "MeanMaps", "Neighbours", "build", "extract", "load"]
