"""Smoothing: maps averaged over noisy copies of an image."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.maps.results import find_nu
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.inputs import checked_images, one_input
from pytorch_grad_cam_pcasvm.targets import Target, fix_target


def smoothed(
    cam: ClosedFormCAM,
    x: Tensor,
    targets: Sequence[Target] | Target | None = None,
    samples: int = 25,
    noise: float = 0.15,
    seed: int = 0,
) -> SignedMaps:
    """Return the mean maps over noisy copies of each image, with their standard errors.

    With Grad-CAM, this is the idea of SmoothGrad (Smilkov et al., arXiv 1706.03825); with Grad-CAM++, it is Smooth
    Grad-CAM++ (Omeiza et al., arXiv 1908.01224). The predicted class, the runner-up, the values and the output are
    those of the image without noise.

    Args:
        cam: any method.
        x: images, shape (N, ...).
        targets: K targets, each for all images; None: every component, then the predicted class.
        samples: number of noisy copies of each image, at least 2.
        noise: standard deviation of the normal noise, as a fraction of the image's range (largest minus smallest
            value).
        seed: random seed of the noise.

    Returns:
        Signed maps, with ``standard_errors``.

    Raises:
        TypeError: ``cam`` is not a method of this package.
        ValueError: ``samples`` or ``noise`` is out of range, or ``explain`` rejects the images or targets.

    Example:
        >>> smoothed(cam, images, PCATarget(0), samples=4).standard_errors.shape
        torch.Size([2, 1, 8, 8])
    """
    if not isinstance(cam, ClosedFormCAM):
        raise TypeError(f"smoothed takes a method of this package, such as ClosedFormGradCAM, got {type(cam).__name__}")
    if not isinstance(samples, int) or samples < 2:
        raise ValueError(f"samples must be 2 or more, got {samples!r}")
    if not noise > 0:
        raise ValueError(f"noise must be positive, a fraction of the image's range, got {noise!r}")
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for image in one_input(checked_images(x, cam.model), "smoothed"):
        clean = cam.explain(image.unsqueeze(0), targets)
        fixed_targets = [fix_target(target, clean.output) for target in clean.targets]
        spread = noise * (image.amax() - image.amin())
        copies = image + spread * torch.randn((samples, *image.shape), generator=generator, device="cpu").to(image)
        parts.append(_average_copies(clean, cam.explain(copies, fixed_targets)))
    return SignedMaps.cat(parts)


def _average_copies(clean: SignedMaps, noisy: SignedMaps) -> SignedMaps:
    """Return the mean of the maps of M noisy copies of an image, (M, K, ...), with its values without noise."""
    # Single maps may be divided by factors of their own.
    copies = noisy.rescale(noisy.log_scale.amax(0, keepdim=True))
    mean: Any = {
        name: copies.columns[name].mean(0, keepdim=True)
        for name in ("maps", "weights", "opposite")
        if name in copies.columns
    }
    return replace(
        clean,
        **mean,
        nu=find_nu(mean["maps"], mean.get("opposite")),
        log_scale=copies.log_scale,
        baseline_values=None,
        remainder=None,
        heads=None,
        effects=None,
        standard_errors=copies.maps.std(0, keepdim=True) / len(copies.maps) ** 0.5,
        linear=False,  # every copy has its own derivative by the components
    )
