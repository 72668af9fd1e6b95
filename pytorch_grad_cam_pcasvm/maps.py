"""Signed maps: weights times activations, their signs, their shared scale, and their upsampling."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.errors import BlankMapWarning

SCALES = ("map", "target", "none")


@dataclass(frozen=True, repr=False)
class SignedMaps:
    """The signed maps of K targets for each of N images, and what they were made of.

    ``maps[n, k] = sum_t weights[n, k, t] F^t`` (P_b = e_b^T F of the paper). Maps and weights are divided by
    ``exp(log_scale)``, which differs from 1 only where the gradient is too small for a float, as far from every support
    vector of an RBF machine.

    Attributes:
        maps: raw signed maps at the target layer's resolution, shape (N, K, H, W) or (N, K, D, H, W).
        weights: gradients summed over positions (e_b, Eq. 11; s, Eq. 16), shape (N, K, T).
        values: the targets' values, shape (N, K).
        nu: the largest absolute value of each map (nu_b of the paper), shape (N, K).
        log_scale: natural logarithm of the factor taken out of maps, weights and nu, shape (N, K); usually 0.
        targets: the K targets.
        output: the network's output of the same forward pass.
    """

    maps: Tensor
    weights: Tensor
    values: Tensor
    nu: Tensor
    log_scale: Tensor
    targets: Sequence[Any]
    output: Tensor

    def __repr__(self) -> str:
        return f"SignedMaps({tuple(self.maps.shape)} {self.maps.dtype} on {self.maps.device}, targets={self.targets})"

    def positive(self, size: Sequence[int] | None = None, scale: str = "map") -> Tensor:
        """Return ``P^+ = relu(P)``: what raises each target.

        Args:
            size: (H, W) to upsample to (bilinear, as the host does); None: the resolution of the maps.
            scale: ``"map"``: divided by nu of that image and target; ``"target"``: by the largest nu of that target
                in the batch, so that images compare; ``"none"``: raw.

        Returns:
            Maps, shape (N, K, *size), in [0, 1] unless raw. P^+ and P^- share their scale.

        Raises:
            ValueError: an unknown scale, or a size of the wrong length.
        """
        return self._part(1.0, size, scale)

    def negative(self, size: Sequence[int] | None = None, scale: str = "map") -> Tensor:
        """Return ``P^- = relu(-P)``: what lowers each target. Arguments and result as for :meth:`positive`.

        Args:
            size: (H, W) to upsample to; None: the resolution of the maps.
            scale: ``"map"``, ``"target"`` or ``"none"``.

        Returns:
            Maps, shape (N, K, *size), in [0, 1] unless raw.

        Raises:
            ValueError: an unknown scale, or a size of the wrong length.
        """
        return self._part(-1.0, size, scale)

    def numpy(self) -> np.ndarray:
        """Return the raw signed maps as an array, shape (N, K, H, W); waits for the device.

        Returns:
            The maps.

        Raises:
            ValueError: the maps are not finite.
        """
        if not bool(self.maps.isfinite().all()):
            raise ValueError("the maps are not finite: the input or the network has NaN or infinite values")
        warn_of_blanks(self.maps, self.maps, lambda image, k: self.targets[k])
        return self.maps.cpu().numpy()

    def _part(self, sign: float, size: Sequence[int] | None, scale: str) -> Tensor:
        if scale not in SCALES:
            raise ValueError(f"scale must be one of {SCALES}, got {scale!r}")
        spatial = self.maps.dim() - 2
        if size is not None and (not isinstance(size, list | tuple) or len(size) != spatial):
            raise ValueError(f"size must have {spatial} numbers for these maps, got {size}")
        part = torch.relu(self.maps if sign > 0 else -self.maps)
        if self.maps.device.type == "cpu":
            name = "P+" if sign > 0 else "P-"
            warn_of_blanks(part, self.maps, lambda image, k: f"{name} of {self.targets[k]}", stacklevel=4)
        if scale != "none":
            part = divided(part, self.nu)
        if scale == "target":
            size_of_map = self.nu.log() + self.log_scale
            largest = size_of_map.amax(0, keepdim=True)
            part = part * _per_map(torch.where(largest.isfinite(), (size_of_map - largest).exp(), 0.0), part)
        return part if size is None else upsampled(part, size)


@dataclass(frozen=True, repr=False)
class Jacobians:
    """The full Jacobians of Algorithm 1, in closed form. i runs over the positions of a feature map, row by row.

    Attributes:
        components: dp_b / dx_i^t, shape (N, T, B, H W), or None without a reduction.
        margins: da_c / dx_i^t of every class's margin, shape (N, T, C, H W), or None without an SVM; for an ordinary
            classifier, of its C outputs. Divided by ``exp(log_scale)``.
        log_scale: natural logarithm of the factor taken out of ``margins``, shape (N, C), or None; usually 0.
        activations: the feature maps F^t, shape (N, T, H, W).
        output: the network's output of the same forward pass.
    """

    components: Tensor | None
    margins: Tensor | None
    log_scale: Tensor | None
    activations: Tensor
    output: Tensor


def signed_maps(weights: Tensor, activations: Tensor) -> Tensor:
    """Return ``sum_t weights[n, k, t] activations[n, t]``, the signed maps, shape (N, K, H, W).

    Args:
        weights: shape (N, K, T).
        activations: shape (N, T, H, W) or (N, T, D, H, W).

    Returns:
        The maps, in the dtype of the weights.
    """
    flat = activations.flatten(2).to(weights.dtype)
    return (weights @ flat).unflatten(2, activations.shape[2:])


def largest(maps: Tensor) -> Tensor:
    """Return nu, the largest absolute value of each map, shape (N, K)."""
    return maps.flatten(2).abs().amax(-1)


def divided(maps: Tensor, nu: Tensor) -> Tensor:
    """Return maps (N, K, ...) divided by nu (N, K); a map of zeros stays zero."""
    # A division, not a product with 1 / nu: x / x is exactly 1.
    return maps / _per_map(torch.where(nu > 0, nu, 1.0), maps)


def upsampled(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Return maps (N, K, H, W) or (N, K, D, H, W) upsampled to ``size``, as the host's ``cv2.resize`` does in 2-D."""
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    return F.interpolate(maps, tuple(size), mode=mode, align_corners=False)


def warn_of_blanks(shown: Tensor, maps: Tensor, target_of: Callable[[int, int], Any], stacklevel: int = 3) -> None:
    """Warn of maps that are zero everywhere, and say why.

    Args:
        shown: what is shown, shape (N, K, ...).
        maps: the signed maps it comes from, shape (N, K, ...).
        target_of: the target of map k of image n, given (n, k).
        stacklevel: how far up the user's own line is.
    """
    seen = shown.flatten(2).any(-1)
    if bool(seen.all()):
        return
    blank = ~seen
    dead = blank & ~maps.flatten(2).any(-1)
    reasons = []
    for kind, reason in ((dead, "there is no gradient at all"), (blank & ~dead, "all its evidence has the other sign")):
        for image, k in kind.nonzero().tolist():
            reasons.append(f"image {image}, {target_of(image, k)}: {reason}")
    shortened = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")
    warnings.warn(f"blank map: {shortened}", BlankMapWarning, stacklevel=stacklevel)


def _per_map(value: Tensor, maps: Tensor) -> Tensor:
    return value.reshape(*value.shape, *[1] * (maps.dim() - 2))
