"""Stability: does the map move with the image, and stay the same under noise that changes nothing else?"""

from collections import defaultdict
from typing import Any

import numpy as np
import torch

from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.rivals import RANDOM, Rivals
from pytorch_grad_cam_pcasvm.evaluation.statistics import ALIKE, Estimate, rank_correlations
from pytorch_grad_cam_pcasvm.evaluation.subject import Subject, generator, heat
from pytorch_grad_cam_pcasvm.evaluation.turns import Steps, measured_whole

NOISE, SHIFT = "the image with noise", "the image shifted"


@measured_whole
def stability(  # noqa: D417 - of the study its class tells
    study: Subject,
    *,
    noise: float = 0.1,
    shift: float = 0.05,
) -> Steps:
    """Measure the rank correlation of each map with the map of the same image, with noise or shifted.

    The edge of a shifted image is repeated to fill the gap, and only the parts present in both maps are compared. The
    target stays the same.

    Args:
        noise: standard deviation of the noise, as a fraction of that of the image.
        shift: shift along the last axis, as a fraction of the width.

    Returns:
        The correlation for each method and change, which passes above 0.5, and how far it exceeds the correlation of
        each control with the changed image's map: random maps, another image's map, the blind map and a randomised
        head's map.

    Raises:
        ValueError: the noise is negative, or the shift is not between 0 and 1.

    Example:
        >>> result = evaluation.stability(
        ...     net, (training_images, labels), ["layer2"], images=6, progress=False
        ... )
        >>> result.settings["images"]
        6
    """  # noqa: DOC202, DOC402 - as a function it returns a result
    if noise < 0 or not 0 <= shift < 1:
        raise ValueError(f"noise must be 0 or more, and shift between 0 and 1, got {noise} and {shift}")
    subject = study.fresh()
    against = Rivals(subject)
    correlations = defaultdict[Any, list[np.ndarray]](list)  # by method, change and rival

    def measured() -> list[Row]:
        numbers = {key: np.concatenate(parts) for key, parts in correlations.items()}
        rows = []
        for method in subject.named:
            for change in (NOISE, SHIFT):
                own = numbers[method, change, ""]
                rows.append(Row(method, change, "", Estimate.of(own, bounds=(-1, 1)), ALIKE))
                for rival in against.names:
                    ahead = Estimate.of(own - numbers[method, change, rival], bounds=(-2, 2))
                    rows.append(Row(method, change, rival, ahead, 0.0))
        return rows

    def found() -> Result:
        return subject.result(
            "stability",
            "does the map stay the same under noise, and move with the image? (rank correlation)",
            measured(),
            noise=noise,
            shift=shift,
        )

    yield None
    for x, _, rows_of in subject.batches("stability", looks=True):
        targets, size = subject.targets(x), x.shape[2:]
        shared = {name: heat(maps, size) for name, maps in against.next(x, targets, rows_of).items()}
        pixels = max(1, round(shift * size[-1])) if shift else 0
        if pixels >= size[-1]:
            raise ValueError(f"a shift of {shift} leaves nothing of images {size[-1]} pixels wide")
        spread = x.flatten(1).std(1).reshape(-1, *[1] * (x.dim() - 1))
        random = np.stack([generator(subject.seed, 3, row).normal(size=x.shape[1:]) for row in rows_of])
        changed = {
            NOISE: x + noise * spread * torch.from_numpy(random).to(x),
            SHIFT: torch.cat([x[..., :1].expand(*x.shape[:-1], pixels), x[..., : size[-1] - pixels]], -1),
        }
        for method in subject.named:
            maps = against.of(method)
            before = {name: heat(source_maps, size) for name, source_maps in maps.items()} | shared
            for change, moved in changed.items():
                after = heat(subject.explained(method, moved, targets), size)
                for source, first in before.items():
                    second = after
                    if change == SHIFT:  # what both of them have
                        first, second = first[..., : size[-1] - pixels], after[..., pixels:]
                    correlations[method, change, source].append(rank_correlations(first, second))
            similarity = correlations[method, NOISE, ""][-1] + correlations[method, SHIFT, ""][-1]
            subject.add(method, -similarity, rows_of, x, maps[""])
        yield subject.step(found, lambda row: row.against in ("", RANDOM))
