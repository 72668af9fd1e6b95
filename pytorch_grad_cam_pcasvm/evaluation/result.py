"""The result of a measurement: rows of numbers, which can be printed, saved as JSON, and put into words."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from pytorch_grad_cam_pcasvm.evaluation.statistics import FEW, LEVEL, Estimate
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps

PASSED, FAILED, UNDECIDED, TOO_FEW = "passed", "failed", "undecided", "too few images to say"
BLANK = "without any map to judge"


IN_WORDS = {
    "the blind map": "a map that ignores the decision",
    "a randomised head's map": "the map of a classifier that has learned nothing",
    "another image's map": "the map of another image",
    "components rotated": "components replaced by random directions",
    "likeness": "similarity",
}


def in_words(name: str) -> str:
    """Return the name of a control or of a measure as people read it."""
    return IN_WORDS.get(name, name)


@dataclass(frozen=True)
class Row:
    """One number of a measurement.

    Attributes:
        method: the method whose maps were measured.
        measure: what was measured, such as ``"deletion"``.
        against: what the method was compared with, such as ``"random maps"``; empty: nothing.
        estimate: mean, standard error, n.
        limit: the limit above which the mean's confidence interval has to lie; None: there is nothing to pass.
        below: whether it has to lie below the limit instead.
        level: of the interval instead of 95 %, where a measurement may stop early.

    Example:
        >>> row = evaluation.Row("ContributionCAM", "deletion", "", evaluation.Estimate(1.0, 0.1, 100), limit=0)
        >>> row.verdict
        'passed'
    """

    method: str
    measure: str
    against: str
    estimate: Estimate
    limit: float | None = None
    below: bool = False
    level: float = LEVEL

    @property
    def passed(self) -> bool | None:
        """Whether the whole confidence interval is on the right side of the limit; None without a limit."""
        if self.limit is None:
            return None
        side = self.estimate.below if self.below else self.estimate.above
        return side(self.limit, self.level)

    @property
    def verdict(self) -> str:
        """``"passed"``; ``"failed"``: the whole interval is on the wrong side; ``"undecided"``: it is on both.

        ``"too few images to say"`` with fewer than ten images, ``"without any map to judge"`` with none; empty if there
        is nothing to pass.
        """
        if self.limit is None:
            return ""
        if self.estimate.n == 0:
            return BLANK
        if self.estimate.n < FEW:
            return TOO_FEW
        if self.passed:
            return PASSED
        wrong_side = self.estimate.above if self.below else self.estimate.below
        return FAILED if wrong_side(self.limit, self.level) else UNDECIDED


@dataclass
class Pictures:
    """Images to be shown.

    Attributes:
        images: the images as people see them, in [0, 1], shape (n, ...).
        maps: one for each.
    """

    images: Tensor
    maps: SignedMaps


@dataclass
class Result:
    """The result of a check.

    Attributes:
        check: the name of the check.
        question: the question that the check answers, in a sentence.
        rows: the numbers.
        blank: by method, the share of maps that are zero everywhere.
        settings: the settings of the check.
        curves: by method and source, the curves to draw; None if there are none.
        worst: by method, the row numbers (in the data set) of the ten worst images, worst first.
        names: by method, the names of these images: their paths in a folder, or their numbers.
        pictures: by method, these images with their maps; not saved in the JSON.

    Example:
        >>> result = evaluation.stability(
        ...     net, (training_images, labels), ["layer2"], images=6, progress=False
        ... )
        >>> [row.verdict for row in result.rows if row.against][:1]
        ['too few images to say']
    """

    check: str
    question: str
    rows: list[Row]
    blank: dict[str, float]
    settings: dict[str, Any]
    curves: dict[str, Any] | None = None
    worst: dict[str, list[int]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    pictures: dict[str, Pictures] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, key: tuple[str, str, str] | tuple[str, str]) -> Estimate:
        """Return the number for a method and a measure, alone or against a control."""
        method, measure, against = key if len(key) == 3 else (*key, "")
        for row in self.rows:
            if (row.method, row.measure, row.against) == (method, measure, against):
                return row.estimate
        available = sorted({(row.method, row.measure, row.against) for row in self.rows})
        raise KeyError(f"there is no number for {key}: there are {available}")

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON; NaN becomes None."""

        def plain(value: Any) -> Any:
            if isinstance(value, float):
                return value if math.isfinite(value) else None
            if isinstance(value, Row):  # where nothing is to be passed, nobody asks for each image's number
                estimate = value.estimate if value.limit is not None else replace(value.estimate, numbers=())
                return plain(vars(value) | {"estimate": estimate, "verdict": value.verdict})
            if isinstance(value, Estimate):
                return plain(vars(value))
            if isinstance(value, Mapping):
                return {str(key): plain(entry) for key, entry in value.items()}
            return [plain(item) for item in value] if isinstance(value, list | tuple) else value

        return plain({key: value for key, value in vars(self).items() if key != "pictures"})

    @staticmethod
    def from_dict(entries: Mapping[str, Any]) -> "Result":
        """Return the result from the JSON that :meth:`to_dict` returns."""

        def real(value: Any) -> float:
            return float("nan") if value is None else float(value)

        def row(saved: Mapping[str, Any]) -> Row:
            numbers = saved["estimate"]
            shown = {"mean": real(numbers["mean"]), "standard_error": real(numbers["standard_error"])}
            sequences = {name: tuple(numbers[name]) for name in ("numbers", "bounds") if numbers.get(name)}
            estimate = Estimate(**{**numbers, **shown, **sequences})
            columns = {key: entry for key, entry in saved.items() if key != "verdict"}  # which follows from the others
            return Row(**{**columns, "estimate": estimate})

        return Result(**{**entries, "rows": [row(saved) for saved in entries["rows"]]})

    def __str__(self) -> str:
        lines = [f"{self.check}: {self.question}", *(f"  {sentence(row)}" for row in self.rows)]
        lines += [f"  {method}: {share:.0%} of the maps are blank" for method, share in self.blank.items() if share]
        return "\n".join(lines)


def sentence(row: Row) -> str:
    """Return a row in words."""
    against = f" against {in_words(row.against)}" if row.against else ""
    end = f" ({row.verdict})" if row.verdict else ""
    return f"{in_words(row.method)}, {in_words(row.measure)}{against}: {number(row)}, n = {row.estimate.n}{end}"


def number(row: Row) -> str:
    """Return the number of a row, with a sign if it is a difference; a small limit needs more than two digits."""
    if row.limit and row.limit < 0.01 and row.estimate.n > 1:
        return f"{row.estimate.mean:.1g} ± {row.estimate.standard_error:.1g}"
    return str(row.estimate) if row.against else str(row.estimate).removeprefix("+")
