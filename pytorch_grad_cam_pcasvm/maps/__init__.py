"""Signed maps, on one grid or several, and maps of further targets made of them."""

from pytorch_grad_cam_pcasvm.maps.signed_maps import Jacobians, Share, SignedMaps

# isort: split
# Behind the module of that name, which would hide it.
from pytorch_grad_cam_pcasvm.maps.recombination import decision_shares, decision_steps
from pytorch_grad_cam_pcasvm.maps.results import check_finite, shift_baseline, signed_maps
from pytorch_grad_cam_pcasvm.network.grid import AnomalyMaps, upsample_maps

__all__ = [
    "AnomalyMaps",
    "Jacobians",
    "Share",
    "SignedMaps",
    "check_finite",
    "decision_shares",
    "decision_steps",
    "shift_baseline",
    "signed_maps",
    "upsample_maps",
]
