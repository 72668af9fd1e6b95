"""Facts: numbers about the training set at a stage of a head. No value of the head depends on them.

What is known in tensors is a property of the stage, made of its buffers, so that it moves and loads with these:
``input_mean``, ``input_deviations`` and ``output_deviations``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Facts:
    """Numbers of the training set at a stage, written by the function of its estimator.

    Attributes:
        count: number of rows; infinite: not known.
        spread: sum of the variances of what the stage takes; 0: not known.
        low: of what a scaler gives, the smallest; None: not known.
        high: the largest.
        least: where the head's anomalies of rows start that were left out of it; None: not known.
        reach: what these anomalies reach.
        varying: how many components vary, if some do by rounding alone; otherwise None.
        density: 1 where the outputs are logarithms of weighted densities, whose sum is a mixture's; otherwise None.
    """

    count: float = math.inf
    spread: float = 0.0
    low: float | None = None
    high: float | None = None
    least: float | None = None
    reach: float | None = None
    varying: float | None = None
    density: float | None = None

    def to_numbers(self) -> dict[str, float]:
        """Return the numbers that are known, by name."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value != field.default}

    @staticmethod
    def from_numbers(numbers: Mapping[str, float]) -> "Facts":
        """Return the facts of numbers by name; of names that mean nothing here, as in a file, none."""
        names = {field.name for field in fields(Facts)}
        return Facts(**{name: float(number) for name, number in numbers.items() if name in names})
