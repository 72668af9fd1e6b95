"""Signed maps, on one grid or several, and maps of further targets made of them."""

from pytorch_grad_cam_pcasvm.maps.signed_maps import Jacobians, SignedMaps

# isort: split
# Behind the module of that name, which would hide it.
from pytorch_grad_cam_pcasvm.maps.scale import signed_maps

__all__ = ["Jacobians", "SignedMaps", "signed_maps"]
