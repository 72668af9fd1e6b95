"""What a method computes: maps of targets, not yet scaled."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.targets.output_gradients import in_order


@dataclass
class MethodResult:
    """The result of a method for K targets; the attributes are those of :class:`SignedMaps`.

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


def mean_of(samples: Sequence[MethodResult]) -> MethodResult:
    """Return the means of independent samples of the same maps, with their standard errors; the only one as it is."""
    if len(samples) == 1:
        return samples[0]
    columns: Any = {field.name: [getattr(sample, field.name) for sample in samples] for field in fields(MethodResult)}
    means: Any = {name: None if column[0] is None else torch.stack(column).mean(0) for name, column in columns.items()}
    errors = torch.stack(columns["maps"]).std(0) / len(samples) ** 0.5
    return MethodResult(**means | {"standard_errors": errors})


def joined(parts: Sequence[MethodResult], members: Sequence[int]) -> MethodResult:
    """Return what was made for some targets each, which bear these numbers, in the order of the numbers."""
    if len(parts) == 1:
        return parts[0]
    columns: Any = {field.name: [getattr(part, field.name) for part in parts] for field in fields(MethodResult)}
    whole: Any = {name: None if column[0] is None else in_order(column, members) for name, column in columns.items()}
    return MethodResult(**whole)
