"""The result of a measurement: rows of numbers, which can be printed, saved as JSON, and put into words."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.special import stdtrit
from scipy.stats import beta, rankdata
from torch import Tensor

from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps

LEVEL = 0.95  # of confidence intervals
ALIKE = 0.5  # the rank correlation above which two maps look the same to the eye


@dataclass(frozen=True)
class Estimate:
    """A mean over images.

    Attributes:
        mean: the mean; NaN without images.
        standard_error: the standard deviation of the images' numbers divided by the square root of ``n``; NaN for fewer
            than two images. If several images share a random draw, the standard error of the draws' means.
        n: number of images.
        draws: number of random draws, if several images share one; None: each image has its own.
        share: whether each image's number is 0 or 1.
        numbers: each image's number, or the mean of those that share a draw; empty: they are not known.
        bounds: the lowest and the highest number that an image can have; None: there are none.

    Example:
        >>> evaluation.Estimate.of([1.0, 2.0, 3.0]).mean
        2.0
    """

    mean: float
    standard_error: float
    n: int
    draws: int | None = None
    share: bool = field(default=False, compare=False)
    numbers: tuple[float, ...] = field(default=(), compare=False, repr=False)
    bounds: tuple[float, float] | None = field(default=None, compare=False)

    @staticmethod
    def of(values: Any, draws: Any = None, bounds: tuple[float, float] | None = None) -> "Estimate":
        """Return the mean of numbers, one for each image; NaN marks an image without one.

        Args:
            values: the numbers, shape (N,).
            draws: which random draw each image belongs to, shape (N,); None: each has its own.
            bounds: the lowest and the highest number that an image can have, whatever these are: (-1, 1) for a
                correlation, (-inf, inf) if there are none. None: there are none, but numbers that are all 0 or 1 are
                taken for a share.

        Returns:
            The mean, with the standard error of a mean over clusters if images share draws.

        Raises:
            ValueError: a number is beyond the bounds.
        """
        numbers = np.asarray(values, np.float64)
        valid = ~np.isnan(numbers)
        numbers = numbers[valid]
        if not len(numbers):
            return Estimate(float("nan"), float("nan"), 0)
        # By more than rounding.
        if bounds is not None and (numbers.min() < bounds[0] - SAME or numbers.max() > bounds[1] + SAME):
            raise ValueError(
                f"numbers from {numbers.min():.6g} to {numbers.max():.6g} are not between {bounds[0]:g} and "
                f"{bounds[1]:g}: give bounds that hold for every image, or none"
            )
        mean = numbers.mean()
        _, cluster = np.unique(
            np.arange(len(numbers)) if draws is None else np.asarray(draws)[valid], return_inverse=True
        )
        sums = np.bincount(cluster, numbers - mean)
        count = len(sums)
        error = np.sqrt(count / (count - 1) * (sums**2).sum()) / len(numbers) if count > 1 else float("nan")
        share = draws is None and bounds in (None, (0, 1)) and bool(np.isin(numbers, (0, 1)).all())
        has_bounds = bounds is not None and bool(np.isfinite(bounds).all())
        of_each = numbers if draws is None else np.bincount(cluster, numbers) / np.bincount(cluster)
        return Estimate(
            float(mean), float(error), len(numbers), None if draws is None else count, share,
            tuple(of_each.tolist()), bounds if has_bounds else None,
        )  # fmt: skip

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean, see :meth:`interval_at`."""
        return self.interval_at(LEVEL)

    def interval_at(self, level: float) -> tuple[float, float]:
        """Return the confidence interval of the mean at a level, such as 0.99; NaN where there is no standard error.

        Of a share, it is Clopper and Pearson's. Of numbers between bounds, it is by betting, and holds whatever their
        distribution. Of others, it is Student's t, wider on the side to which numbers are skewed; and the whole line
        while fewer than ten differ from the most frequent one. Images that share a draw count as one number. Where the
        numbers themselves are not known, it is Student's t, and the whole line for a standard error of 0.
        """
        if self.share and self.n > 1:
            return interval_of_share(round(self.mean * self.n), round((1 - self.mean) * self.n), level)
        if np.isnan(self.standard_error):
            return float("nan"), float("nan")
        if self.numbers and self.bounds is not None:
            return interval_of_bounded(self.numbers, self.bounds, level)
        if self.numbers:
            return interval_of_any(self.numbers, self.mean, self.standard_error, level)
        if not self.standard_error > 0:
            return -float("inf"), float("inf")
        half = self.standard_error * float(stdtrit((self.draws or self.n) - 1, (1 + level) / 2))  # Student's t
        return self.mean - half, self.mean + half

    def repeated(self, times: int) -> "Estimate":
        """Return the estimate of so many times as many images with the same numbers."""
        return replace(
            self, n=times * self.n, standard_error=self.standard_error / times**0.5, numbers=times * self.numbers
        )

    def above(self, value: float, level: float = LEVEL) -> bool:
        """Return whether the whole interval is above a value."""
        return self.interval_at(level)[0] > value

    def below(self, value: float, level: float = LEVEL) -> bool:
        """Return whether the whole interval is below a value."""
        return self.interval_at(level)[1] < value

    def __str__(self) -> str:
        mean = f"{round(self.mean, 2) or 0.0:+.2f}"  # not -0.00
        if self.n < 2:
            return "–" if self.n == 0 else mean
        return f"{mean} ± {self.standard_error:.2f}"


def rank_correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of two maps for each image, (N, ...) and (N, ...).

    It is NaN where the first is constant, and 0 where only the second is: nothing of the first is left in it.
    """
    a, b = (rankdata(maps.reshape(len(maps), -1), axis=1) for maps in (first, second))
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    size = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.divide((a * b).sum(1), size, out=np.where(a.any(1), 0.0, np.nan), where=size > 0)


FEW = 10  # images, below which a standard error says little; so do fewer that differ from all others
ANYTHING = -np.inf, np.inf  # bounds of numbers that have none
SAME = 1e-6  # of the largest value: values that differ by less are the same but for rounding
_SKEWNESS = 1.5  # times that of the sample, which has rarely seen the rare ones; simulated, see benchmarks/looks.py
_ALL_IN = 0.99  # of the largest bet that cannot be lost
_DOUBT = 0.3  # numbers that a guess of mean and variance counts for, before any is seen
_HALVINGS = 40


def interval_of_share(count: int, rest: int, level: float) -> tuple[float, float]:
    """Return the interval of Clopper and Pearson for a share.

    Args:
        count: number of images that have what is counted.
        rest: number of images that do not.
        level: of the interval, such as 0.95.
    """
    low = float(beta.ppf((1 - level) / 2, count, rest + 1)) if count else 0.0
    return low, float(beta.ppf((1 + level) / 2, count + 1, rest)) if rest else 1.0


def interval_of_bounded(numbers: Any, bounds: tuple[float, float], level: float) -> tuple[Any, Any]:
    """Return an interval for the mean of numbers between bounds, which holds for any distribution between them.

    It is by betting (Waudby-Smith and Ramdas, arXiv 2010.09686, for a fixed number of them): who bets on each number
    against a mean m, with what was seen before, has on average what they started with if m is right. So m is refused
    where they have 2 / (1 - level) times that: by Markov's inequality this happens no more often than it may.

    Args:
        numbers: one for each image, (N,), or rows of them, (M, N), of which the ends are (M,).
        bounds: the lowest and the highest number that there can be.
        level: of the interval, such as 0.95.
    """
    low, high = bounds
    shares = (np.asarray(numbers, np.float64) - low) / (high - low)
    order = np.random.default_rng(0).permutation(shares.shape[-1])  # sorted ones would be no draws
    shares = np.clip(shares, 0, 1)[..., order]
    least, rest = _find_least_means(np.stack([shares, 1 - shares]), (1 - level) / 2)
    return low + (high - low) * least, high - (high - low) * rest


def _find_least_means(shares: np.ndarray, risk: float) -> np.ndarray:
    """Return the smallest means of rows of numbers in [0, 1], (..., N), that a bet on larger ones does not refuse."""
    counts = np.arange(1, shares.shape[-1] + 1) + _DOUBT
    means = (0.5 * _DOUBT + shares.cumsum(-1)) / counts
    variances = (0.25 * _DOUBT + ((shares - means) ** 2).cumsum(-1)) / counts
    earlier = np.concatenate([np.full_like(shares[..., :1], 0.25), variances[..., :-1]], -1)  # before each bet
    bets = np.sqrt(2 * np.log(1 / risk) / (shares.shape[-1] * earlier))
    most, enough = shares.mean(-1, keepdims=True), np.log(1 / risk)
    least = np.zeros_like(most)
    for _ in range(_HALVINGS):
        mean = (least + most) / 2
        bet = np.minimum(bets, _ALL_IN / np.maximum(mean, 1e-300))
        refused = np.log1p(bet * (shares - mean)).sum(-1, keepdims=True) >= enough
        np.copyto(least, mean, where=refused)
        np.copyto(most, mean, where=~refused)
    return least[..., 0]


def interval_of_any(numbers: Sequence[float], mean: float, error: float, level: float) -> tuple[float, float]:
    """Return an interval for the mean of numbers that can be anything, or the whole line where they say too little.

    They say too little where fewer than ten differ from the most frequent one. Otherwise it is the union of Student's
    t and of t corrected for skewness (Hall, J. R. Stat. Soc. B 54, 1992), with 1.5 times the skewness of the sample.

    Args:
        numbers: one for each image, or the mean of those that share a draw.
        mean: their mean.
        error: its standard error.
        level: of the interval, such as 0.95.
    """
    count = len(numbers)
    if differing(numbers) < FEW or not error > 0:
        return -np.inf, np.inf
    centred = np.asarray(numbers, np.float64) - np.mean(numbers)
    skewness = (centred**3).mean() / (centred**2).mean() ** 1.5
    skewness *= _SKEWNESS * np.sqrt(count * (count - 1)) / (count - 2)
    end = float(stdtrit(count - 1, (1 + level) / 2))
    corrected = _inverse_of_hall(skewness, count)
    return mean - error * max(end, corrected(end)), mean - error * min(-end, corrected(-end))


def _inverse_of_hall(skewness: float, count: int) -> Callable[[float], float]:
    """Return the function from Student's t to the t of skewed numbers that is as rare."""
    step = skewness / (3 * np.sqrt(count))
    if abs(step) < 1e-9:
        return lambda end: end
    return lambda end: float((np.cbrt(1 + 3 * step * (end - step / 2)) - 1) / step)


def differing(numbers: Sequence[float]) -> int:
    """Return how many numbers differ from the most frequent one, but for rounding; all of them if none comes twice."""
    ordered = np.sort(np.asarray(numbers, np.float64))
    if not len(ordered):
        return 0
    ends = np.searchsorted(ordered, ordered + SAME * np.abs(ordered).max(), side="right")
    often = int((ends - np.arange(len(ordered))).max())
    return len(ordered) - (often if often > 1 else 0)


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
