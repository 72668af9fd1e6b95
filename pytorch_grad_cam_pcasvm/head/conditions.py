"""Conditions of a pullback, beside a stage's saved numbers: how exactly these are known, and sampling.

They reach a stage with what it saved, in :meth:`.Stage.attach_conditions`, so that ``pullback`` and ``secant`` take
the same arguments of every stage.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Sampling(NamedTuple):
    """Which permutations stand for all, where there are too many coalitions.

    Attributes:
        permutations: their number, at least; half of them are the reverses of the others, in each of the groups.
        seed: of the random generator.
        max_bytes: limit on the memory of the rows that are evaluated at once.
        group: which of the groups of permutations is taken; None: all of them.
    """

    permutations: int = 64
    seed: int = 0
    max_bytes: int = 1 << 26
    group: int | None = None


class Conditions(NamedTuple):
    """What a pullback through a stage is told.

    Attributes:
        eps: the relative size of rounding errors of numbers.
        errors: returns the errors of the stage's input, shape (N, in); None where they are unknown.
        sampling: the permutations of a decision without a gradient.
    """

    eps: float = torch.finfo(torch.float32).eps
    errors: Callable[[], Tensor | None] | None = None
    sampling: Sampling = Sampling()

    def bound_rounding(self, x: Tensor) -> Tensor:
        """Return the rounding errors of a stage's input x, shape (N, in)."""
        bounds = None if self.errors is None else self.errors()
        return 16 * self.eps * x.abs() if bounds is None else bounds


USUAL = Conditions()
