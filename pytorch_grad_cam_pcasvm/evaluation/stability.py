"""Stability: does the map move with the image, and stay the same under noise that changes nothing else?"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.rivals import Rivals
from pytorch_grad_cam_pcasvm.evaluation.statistics import ALIKE, Estimate, rank_correlations
from pytorch_grad_cam_pcasvm.evaluation.subject import DEFAULT, Methods, Subject, generator, signed, upsampled
from pytorch_grad_cam_pcasvm.model.net import PCASVMNet
from pytorch_grad_cam_pcasvm.targets import Target

NOISE, SHIFT = "the image with noise", "the image shifted"


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
        seed: random seed of the choice, the noise, the random maps and the random heads.
        progress: show a progress bar.
        transform: from a PIL image to a tensor for the network, for a folder or a data set of PIL images.

    Returns:
        The correlation for each method and change, passed above 0.5, and how far it exceeds the correlation of each
        rival with the changed image's map: random maps, another image's map, the blind map and a randomised head's map.

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
    against = Rivals(subject)
    found: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for x, _, images_of in subject.batches("stability"):
        targets, size = subject.targets(x), x.shape[2:]
        shared = {name: upsampled(maps, size) for name, maps in against.next(x, targets, images_of).items()}
        pixels = max(1, round(shift * size[-1])) if shift else 0
        if pixels >= size[-1]:
            raise ValueError(f"a shift of {shift} leaves nothing of images {size[-1]} pixels wide")
        spread = x.flatten(1).std(1).reshape(-1, *[1] * (x.dim() - 1))
        random = np.stack([generator(seed, 3, row).normal(size=x.shape[1:]) for row in images_of])
        changed = {
            NOISE: x + noise * spread * torch.from_numpy(random).to(x),
            SHIFT: torch.cat([x[..., :1].expand(*x.shape[:-1], pixels), x[..., : size[-1] - pixels]], -1),
        }
        for method in subject.methods:
            maps = subject.explained(method, x, targets)
            subject.seen(method, maps)
            before = {"": upsampled(signed(maps), size), **shared}
            before |= {rival: upsampled(signed(theirs), size) for rival, theirs in against.of(method).items()}
            for change, moved in changed.items():
                after = upsampled(signed(subject.explained(method, moved, targets)), size)
                for source, first in before.items():
                    second = after
                    if change == SHIFT:  # what both of them have
                        first, second = first[..., : size[-1] - pixels], after[..., pixels:]
                    found.setdefault((method, change, source), []).append(rank_correlations(first, second))
            kept = found[method, NOISE, ""][-1] + found[method, SHIFT, ""][-1]
            subject.worst[method].add(-kept, images_of, x, maps)
    numbers = {key: np.concatenate(parts) for key, parts in found.items()}
    rows = []
    for method in subject.methods:
        for change in (NOISE, SHIFT):
            own = numbers[method, change, ""]
            rows.append(Row(method, change, "", Estimate.of(own), ALIKE))
            for rival in against.names:
                rows.append(Row(method, change, rival, Estimate.of(own - numbers[method, change, rival]), 0.0))
    return subject.result(
        "stability",
        "does the map stay the same under noise, and move with the image? (rank correlation)",
        rows,
        noise=noise,
        shift=shift,
    )
