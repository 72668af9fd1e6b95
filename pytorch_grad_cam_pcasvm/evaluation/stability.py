"""Stability: does the map move with the image, and stay the same under noise that changes nothing else?"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.statistics import Estimate, rank_correlations
from pytorch_grad_cam_pcasvm.evaluation.subject import DEFAULT, Methods, Subject, signed, upsampled
from pytorch_grad_cam_pcasvm.net import PCASVMNet
from pytorch_grad_cam_pcasvm.targets import Target

NOISE, SHIFT = "the image with noise", "the image shifted"
ANOTHER = "another image's map"


def stability(
    net: PCASVMNet,
    data: Any,
    target_layers: Sequence[nn.Module | str],
    methods: Methods = DEFAULT,
    target: Target | None = None,
    *,
    noise: float = 0.1,
    shift: float = 0.05,
    images: int | None = 100,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Callable[[Any], Tensor] | None = None,
) -> Result:
    """Measure the rank correlation of each map with that of the same image with noise, or shifted.

    The edge of a shifted image is repeated to fill the gap, and only the parts present in both maps are compared. The
    target stays the same.

    Args:
        net: the network.
        data: tensors (N, C, H, W), ``(images, labels)``, or a data set as for ``atlas.build``.
        target_layers: one layer.
        methods: classes, ``(class, options)``, or a dict of these by name.
        target: what to explain; None: the class predicted for the unchanged image.
        noise: standard deviation of the noise, as a fraction of that of the image.
        shift: shift along the last axis, as a fraction of the width.
        images: how many, chosen at random; None: all.
        batch_size: number of images at a time.
        seed: random seed of the choice and the noise.
        progress: show a progress bar.
        transform: from a PIL image to a tensor for the network, for a folder or a data set of PIL images.

    Returns:
        The correlation for each method and change, and how far it exceeds that with the map of another image.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: too few images, negative noise, a shift that is not between 0 and 1, or nothing to explain.
    """
    if noise < 0 or not 0 <= shift < 1:
        raise ValueError(f"noise must be 0 or more, and shift between 0 and 1, got {noise} and {shift}")
    subject = Subject(
        net, data, target_layers, methods, target,
        images=images, batch_size=batch_size, seed=seed, progress=progress, transform=transform,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed + 1)
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for x, _, rows_of in subject.batches("stability"):
        targets, size = subject.targets(x), x.shape[2:]
        pixels = max(1, round(shift * size[-1])) if shift else 0
        spread = x.flatten(1).std(1).reshape(-1, *[1] * (x.dim() - 1))
        changed = {
            NOISE: x + noise * spread * torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device),
            SHIFT: torch.cat([x[..., :1].expand(*x.shape[:-1], pixels), x[..., : size[-1] - pixels]], -1),
        }
        for method in subject.methods:
            maps = subject.explained(method, x, targets)
            seen = subject.seen(method, maps)
            before = upsampled(signed(maps), size)
            lost = np.zeros(len(x))
            for change, images_of in changed.items():
                after = upsampled(signed(subject.explained(method, images_of, targets)), size)
                first, second = before, after
                if change == SHIFT:  # what both of them have
                    first, second = before[..., : size[-1] - pixels], after[..., pixels:]
                for source, other in (("", first), (ANOTHER, np.roll(first, 1, 0))):
                    correlations = rank_correlations(other, second)
                    lost -= correlations if not source else 0
                    found.setdefault((method, change + source), []).append(np.where(seen, correlations, np.nan))
            subject.worst[method].add(np.where(seen, lost, np.nan), rows_of, x, maps)
    rows = []
    for method in subject.methods:
        for change in (NOISE, SHIFT):
            own, other = (np.concatenate(found[method, change + source]) for source in ("", ANOTHER))
            rows.append(Row(method, change, "", Estimate.of(own)))
            estimate = Estimate.of(own - other)
            rows.append(Row(method, change, ANOTHER, estimate, estimate.above(0)))
    return subject.result(
        "stability",
        "does the map stay the same under noise, and move with the image? (rank correlation)",
        rows,
        noise=noise,
        shift=shift,
    )
