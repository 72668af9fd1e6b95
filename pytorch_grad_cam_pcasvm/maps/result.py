"""What a method computes: maps of targets, not yet scaled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.runtime.columns import Columns, average_columns


@dataclass
class MethodResult(Columns):
    """The result of a method for K targets, with the attributes of :class:`SignedMaps`.

    Example:
        >>> zeros = torch.zeros(2, 1)
        >>> MethodResult(maps=torch.ones(2, 1, 4, 4), weights=torch.ones(2, 1, 8), values=zeros, log_scale=zeros).heads
    """

    maps: Tensor
    weights: Tensor
    values: Tensor
    log_scale: Tensor
    opposite: Tensor | None = None
    baseline_values: Tensor | None = None
    remainder: Tensor | None = None
    standard_errors: Tensor | None = None
    heads: Tensor | None = None
    effects: Tensor | None = None


def average_samples(samples: Sequence[MethodResult]) -> MethodResult:
    """Return the means of independent samples of the same maps, with their standard errors; the only one as it is."""
    if len(samples) == 1:
        return samples[0]
    mean = average_columns(samples)
    errors = torch.stack([sample.rescale(mean.log_scale).maps for sample in samples]).std(0) / len(samples) ** 0.5
    return replace(mean, standard_errors=errors)
