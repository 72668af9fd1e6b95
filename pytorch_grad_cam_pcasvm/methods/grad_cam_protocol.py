"""The maps of one target per image, scaled and smoothed as pytorch-grad-cam, the host, does."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pytorch_grad_cam.utils.image import scale_cam_image
from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection
from torch import Tensor

from pytorch_grad_cam_pcasvm.maps.signed_maps import check_finite, divided, upsampled, warn_of_blanks
from pytorch_grad_cam_pcasvm.targets import PCATarget


def smoothed_by_svd(terms: Tensor, maps: Tensor, targets: Sequence[Any]) -> Tensor:
    """Return the first principal component of the terms (N, T, H, W) of maps (N, 1, H, W), as eigen_smooth does.

    The sign of an SVD is arbitrary, but P^+ and P^- must differ: for a PCATarget the sign is that of its map.
    """
    smooth = torch.from_numpy(get_2d_projection(terms.cpu().numpy())).to(maps).unsqueeze(1)
    along = (smooth * maps).flatten(1).sum(1) >= 0
    signs = [
        1.0 if same or not isinstance(t, PCATarget) else -1.0 for same, t in zip(along.tolist(), targets, strict=True)
    ]
    return smooth * smooth.new_tensor(signs).reshape(-1, *[1] * (maps.dim() - 1))


def one_per_image(
    maps: Tensor,
    nu: Tensor,
    targets: Sequence[Any],
    output: Any,
    shape: Sequence[int],
    size: tuple[int, ...],
) -> np.ndarray:
    """Return each image's map (N, 1, H, W), upsampled; scaled by nu for a PCATarget, else as in pytorch-grad-cam."""
    check_finite(maps)
    positive = maps.relu()
    warn_of_blanks(positive, nu, lambda image, k: targets[image], output)
    result = scale_cam_image(positive[:, 0].cpu().numpy(), size)
    rows = [row for row, target in enumerate(targets) if isinstance(target, PCATarget)]
    if rows:
        by_nu = upsampled(divided(positive[rows], nu[rows]), shape)
        result[rows] = by_nu[:, 0].cpu().numpy()
    return result[:, None]
