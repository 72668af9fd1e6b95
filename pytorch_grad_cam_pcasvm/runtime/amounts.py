"""Amounts: how many images an answer needs, known before anything is imported that takes long."""

import itertools
import math

LEAST = 20  # items at the first look
LAST = 0.96  # the level of the intervals at the last look, see evaluation/turns.py


def least_images(shares: bool, contradicting: int = 0) -> int:
    """Return how many images a study that may end early needs before anything can be answered.

    Args:
        shares: whether it must be known that no more than a tenth of the maps contradict a decision.
        contradicting: how many of them do.

    Returns:
        The number of images from which on all answers are possible; the smallest look has 20.
    """
    most, risk = 0.1, (1 - LAST) / 2

    def chance(count: int) -> float:  # that so few do, if a tenth of all maps did
        ways = (math.comb(count, some) * most**some * (1 - most) ** (count - some) for some in range(contradicting + 1))
        return sum(ways)

    return next(count for count in itertools.count(LEAST) if not shares or chance(count) <= risk)
