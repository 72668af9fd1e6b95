"""How much of the evidence on maps is sure, and whether more training photos would make more of it so."""

from collections.abc import Iterable
from dataclasses import replace
from math import sqrt
from typing import Any

from torch import Tensor

HELPS = 0.05  # of the evidence, which twice the photos would make sure besides


def describe_sureness(cam: Any, batches: Iterable[Tensor], target: Any) -> str:
    """Return in words which share of the evidence is sure, and what twice the training photos would change.

    The share is the sum of ``abs(maps)`` where the sign is sure, by the sum of all. Standard errors fall with the root
    of the number of photos, so that of twice as many are those of now, divided by the root of 2.

    Args:
        cam: a method; its head has resampled heads.
        batches: images.
        target: the target of the maps.
    """
    evidence = sure = later = 0.0
    for images in batches:
        maps = cam.explain(images, [target])
        size = maps.maps.abs() * maps.log_scale.exp()[..., None, None]
        evidence += float(size.sum())
        sure += float(size[maps.sure()].sum())
        later += float(size[replace(maps, error=maps.error / sqrt(2)).sure()].sum())
    now, then = sure / evidence, later / evidence
    help_words = "would help" if then - now >= HELPS else "would hardly help"
    return (
        f"of the evidence on these maps {now:.0%} is sure; more training photos {help_words}: of twice as many about "
        f"{then:.0%} would be, if errors fall with the root of their number"
    )
