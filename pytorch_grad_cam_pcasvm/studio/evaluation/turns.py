"""Turns: checks are measured from look to look, one after the other, until they end or the time is over.

At a look, a measurement asks whether its answer is clear, and stops if it is, or can hardly become so.
"""

import functools
import inspect
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtr, ndtri  # of scipy.stats they take 0.1 ms each

from pytorch_grad_cam_pcasvm.runtime.amounts import LAST, LEAST
from pytorch_grad_cam_pcasvm.studio.evaluation.result import BLANK, FAILED, FEW, PASSED, UNDECIDED, Result, Row

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject


_SHARES = 0.25, 0.5  # of the items, before the last look at all of them
# The level of the intervals before the last look; at that it is LAST, so that at most 5 % of all answers are wrong,
# however the three fall: of shares and of numbers between bounds this is proven, of others simulated
# (benchmarks/looks.py).
EARLY = 0.995
HOPELESS = 0.1  # the chance to become clear, below which it is not tried


def list_looks(count: int) -> list[int]:
    """Return after how many of the items to look, but for the last look, at all of them."""
    return sorted({look for share in _SHARES if LEAST <= (look := round(share * count)) < count})


def settled(rows: Sequence[Row], share: float) -> bool:
    """Return whether each row is clear, or cannot be expected to become so.

    Args:
        rows: what is to be decided, at the level of this look.
        share: of the items that were measured.
    """
    return bool(rows) and all(
        row.verdict in (PASSED, FAILED, BLANK)
        or (row.verdict == UNDECIDED and chance_of_clarity(row, share) < HOPELESS)
        for row in rows
    )


def chance_of_clarity(row: Row, share: float) -> float:
    """Return the probability that a row is clear once all items are measured.

    With the mean m and the standard error s so far, from a share f of the items, the mean of all of them is normal
    around m with the variance s² (1 - f). Its interval will be that of the numbers so far, repeated 1 / f times; of a
    share, that of a normal mean with the standard error s sqrt(f).
    """
    estimate, limit = row.estimate, row.limit
    assert limit is not None
    mean, error = estimate.mean, estimate.standard_error
    if estimate.n < FEW or np.isnan(error):
        return float(estimate.n < FEW)
    if estimate.share:  # none of a few may be one of many
        mean = (mean * estimate.n + 1) / (estimate.n + 2)
        error = math.sqrt(mean * (1 - mean) / estimate.n)
        below = above = float(ndtri((1 + LAST) / 2)) * error * math.sqrt(share)
    else:
        # There are no more draws than there were.
        low, high = estimate.repeated(1 if estimate.draws else round(1 / share)).interval_at(LAST)
        below, above = mean - low, high - mean
    spread = max(error, np.finfo(float).tiny) * math.sqrt(1 - share)
    return float(ndtr((mean - below - limit) / spread) + ndtr((limit - mean - above) / spread))


_FIRST = 0.25  # of the time, after which a page says what is known
_RESERVE = 0.1  # of the time, kept for pictures and the page


@dataclass
class CheckStep:
    """Where a check stands after a batch.

    Attributes:
        subject: what is measured; it knows how many of its items are done, and where to look.
        result: returns what was found so far.
        decides: whether a row decides that a check may stop early.
    """

    subject: "Subject"
    result: Callable[[], Result]
    decides: Callable[[Row], bool]


Steps = Generator[CheckStep | None, None, None]  # None: there is nothing to look at yet, such as before the first batch


class Budget:
    """The time that may be taken, by the clock on the wall.

    Args:
        minutes: how much; None: as much as it takes.
        clock: returns seconds.

    Attributes:
        seconds: the whole; None: as much as it takes.
        clock: returns seconds.
        drawing: how many seconds the pictures of a check took, at most.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] | None = None) -> None:
        self.seconds = None if minutes is None else 60 * minutes
        self.clock = clock or time.monotonic
        self.drawing = 0.0
        self._start = self.clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    def fits(self, seconds: float, reserve: float = _RESERVE) -> bool:
        """Return whether so many seconds are left, besides a reserve that is a share of all."""
        return self.seconds is None or self.spent + seconds < (1 - reserve) * self.seconds

    @property
    def is_quarter_over(self) -> bool:
        """Whether a quarter of the time is over."""
        return self.seconds is not None and self.spent >= _FIRST * self.seconds


class RunningCheck:
    """A check on its way.

    Args:
        name: of the check.
        steps: the check, a step for each batch.
        stop_early: stop at a look where what decides is clear, or can hardly become clear.

    Attributes:
        result: what was found at the last look; None before the first.
        error: why it cannot be made; None if it can.
        ended: whether it is over.
        late: whether the time was over before it was.
    """

    def __init__(self, name: str, steps: Steps, stop_early: bool = False) -> None:
        self.name = name
        self.result: Result | None = None
        self.error: Exception | None = None
        self.ended = self.late = False
        self._steps, self._stop_early = steps, stop_early
        self._subject: Subject | None = None
        self._seconds = self._longest = 0.0  # of all steps, of one
        self._done, self._seconds_of_done = 0, 0.0  # items of whole batches, and their seconds

    def begin(self) -> None:
        """Check the arguments, before anything is computed."""
        try:
            next(self._steps, None)
        except Exception as error:  # whatever it is, the other checks are made
            self._end_check(error)

    def advance(self, budget: Budget) -> bool:
        """Measure a batch, if one that leads to the next look fits into the time.

        Returns:
            Whether there is something new to tell: a look, or the end.
        """
        if not budget.fits(max(self._longest, self._until_look())):
            self.late = True
            self._judge_last()
            self._stop("as the time was over")
            return True
        start = budget.clock()
        try:
            step = next(self._steps)
            new = step is not None and self._look(step)
        except Exception as error:  # whatever it is, the other checks are made
            self._end_check(error)
            return True
        seconds = budget.clock() - start
        self._seconds, self._longest = self._seconds + seconds, max(self._longest, seconds)
        if step is not None:
            self._done, self._seconds_of_done = step.subject.done, self._seconds
        return new

    @property
    def not_reached(self) -> str:
        """Why there is no result, in a sentence without its full stop."""
        if self.error is not None:
            return reason(self.error)
        if self.late:
            at = f", at {self._next(self._subject)} {self._subject.unit}s" if self._subject is not None else ""
            done = f" ({self._done} were measured)" if self._subject is not None else ""
            return f"the time was over before the first look{at}{done}: give more minutes"
        return "its first look is still to come"

    @property
    def lacking(self) -> float:
        """For how many seconds more it would run, at the mean speed so far, had the clock not ended it."""
        if not self.late or self._subject is None or not self._done:
            return 0.0
        return self._seconds_of_done / self._done * (self._subject.total - self._done)

    def _until_look(self) -> float:
        """Return how many seconds the batches up to the next look will take, at the mean speed so far."""
        if not self._done or self._subject is None:
            return 0.0
        whole = self._seconds_of_done / self._done * (self._next(self._subject) - self._done)
        return max(0.0, whole - (self._seconds - self._seconds_of_done))

    def _next(self, subject: "Subject") -> int:
        later = [look for look in subject.looks if look > self._done]
        return min(later, default=subject.total)

    def _look(self, step: CheckStep) -> bool:
        """Look at the result, where it is time to."""
        self._subject = subject = step.subject
        if subject.done == subject.total:
            self.result = step.result()
            self._end_check()
            return True
        if subject.done not in subject.looks:
            return False
        level, subject.level = subject.level, EARLY
        try:
            self.result = step.result()
        except ValueError:  # such as values of these few that are all the same
            subject.level = level
            return False
        subject.level = LAST
        rows = [row for row in self.result.rows if step.decides(row)]
        if self._stop_early and settled(rows, subject.done / subject.total):
            clear = all(row.verdict in (PASSED, FAILED) for row in rows)
            self._stop(f"as {'the answer is clear' if clear else 'more would hardly make it clear'}")
        return True

    def _judge_last(self) -> None:
        """Judge the result as at the last look: the clock, which ended it, knows nothing of the answer."""
        if self.result is not None and self._subject is not None:
            self.result.rows = [replace(row, level=LAST) for row in self.result.rows]

    def _stop(self, why: str) -> None:
        if self.result is not None:
            self.result.settings["stopped"] = f"after {self.result.settings['measured']}, {why}"
            if self._subject is not None and self._subject.progress and not self.late:
                print(f"{self._subject.title}{self.name} stops {self.result.settings['stopped']}", flush=True)
        self._end_check()

    def _end_check(self, error: Exception | None = None) -> None:
        self.error, self.ended = error, True
        self._steps.close()


def take_turns(courses: Sequence[RunningCheck], budget: Budget) -> Iterator[RunningCheck | None]:
    """Measure checks in turns, each up to its next look.

    Args:
        courses: the checks; those that have ended are passed over.
        budget: how long that may take.

    Yields:
        A check that has something new to tell; None where a quarter of the time is over and none has.
    """
    has_told = False
    waiting = [course for course in courses if not course.ended]
    while waiting:
        for course in waiting:
            while not course.advance(budget):
                if not has_told and budget.is_quarter_over:
                    has_told = True
                    yield None
            has_told = True
            yield course
        waiting = [course for course in waiting if not course.ended]


def measured_whole(steps: Callable[..., Steps]) -> Callable[..., Result]:
    """Return a check as a function that measures until it ends; its steps are ``__wrapped__``."""

    @functools.wraps(steps)
    def check(study: Any, *args: Any, **options: Any) -> Result:
        budget = Budget(study.minutes)
        course = RunningCheck(steps.__name__, steps(study, *args, **options), study.stop_early)
        course.begin()
        for _ in take_turns([course], budget):
            pass
        if course.error is not None:
            raise course.error
        if course.result is None:
            raise ValueError(course.not_reached)
        return course.result

    signature = inspect.signature(steps)
    check.__signature__ = signature.replace(return_annotation=Result)  # type: ignore[attr-defined]
    check.__annotations__ = {**steps.__annotations__, "return": Result}
    return check


def reason(error: Exception) -> str:
    """Return why a check was not made; the type of an error that nobody expected comes first."""
    expected = isinstance(error, ValueError | RuntimeError)  # such as an image that cannot be read
    return str(error) if expected else f"{type(error).__name__}: {error}"
