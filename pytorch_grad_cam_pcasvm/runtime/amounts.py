"""Amounts: how many images an answer needs, known before anything is imported that takes long."""

import math

LEAST = 20  # items at the first look
LAST = 0.96  # the level of the intervals at the last look, see evaluation/turns.py


def least_images(shares: bool) -> int:
    """Return how many images a study that may end early needs before anything can be answered.

    Args:
        shares: whether it must be known that no more than a tenth of the maps contradict a decision.

    Returns:
        The number of images from which on all answers are possible; the smallest look has 20.
    """
    most, risk = 0.1, (1 - LAST) / 2
    return max(LEAST, math.ceil(math.log(risk) / math.log(1 - most))) if shares else LEAST
