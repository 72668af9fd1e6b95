"""Looks: when a measurement asks whether its answer is clear, and stops if it is, or can hardly become so."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import norm

from pytorch_grad_cam_pcasvm.evaluation.intervals import FEW
from pytorch_grad_cam_pcasvm.evaluation.result import BLANK, FAILED, PASSED, UNDECIDED, Row
from pytorch_grad_cam_pcasvm.runtime.amounts import LAST, LEAST

_SHARES = 0.25, 0.5  # of the items, before the last look at all of them
# The level of the intervals before the last look; at that it is LAST, so that at most 5 % of all answers are wrong,
# however the three fall: of shares and of numbers between bounds this is proven, of others simulated
# (benchmarks/looks.py).
EARLY = 0.995
HOPELESS = 0.1  # the chance to become clear, below which it is not tried


def looks(count: int) -> list[int]:
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
        below = above = float(norm.ppf((1 + LAST) / 2)) * error * math.sqrt(share)
    else:
        # There are no more draws than there were.
        low, high = estimate.repeated(1 if estimate.draws else round(1 / share)).interval_at(LAST)
        below, above = mean - low, high - mean
    spread = max(error, np.finfo(float).tiny) * math.sqrt(1 - share)
    return float(norm.cdf((mean - below - limit) / spread) + norm.cdf((limit - mean - above) / spread))
