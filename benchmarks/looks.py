"""How often a measurement that may stop early answers wrongly, and how often it answers at all.

    python benchmarks/looks.py

For each distribution, the limit is its true mean, so that every answer is wrong; then it is some standard deviations
below, so that answers show the power. 0.4 had Student's t for all of them.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import stdtrit

from pytorch_grad_cam_pcasvm.runtime.amounts import LAST
from pytorch_grad_cam_pcasvm.studio.evaluation.result import ANYTHING, FAILED, PASSED, Estimate, Row
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import EARLY, list_looks, settled

Draw = Callable[[np.random.Generator, int], np.ndarray]
Bounds = tuple[float, float]
# Each with its mean and the bounds of its numbers.
DISTRIBUTIONS: dict[str, tuple[Draw, float, Bounds]] = {
    "normal": (lambda random, n: random.normal(size=n), 0.0, ANYTHING),
    "uniform": (lambda random, n: random.random(n), 0.5, ANYTHING),
    "exponential": (lambda random, n: random.exponential(size=n), 1.0, ANYTHING),
    "lognormal": (lambda random, n: random.lognormal(size=n), math.exp(0.5), ANYTHING),
    "beta(8, 0.5)": (lambda random, n: random.beta(8, 0.5, n), 8 / 8.5, ANYTHING),
    "95 % equal": (lambda random, n: (random.random(n) < 0.05) * random.exponential(size=n), 0.05, ANYTHING),
    "uniform, bounded": (lambda random, n: random.random(n), 0.5, (0, 1)),
    "beta(8, 0.5), bounded": (lambda random, n: random.beta(8, 0.5, n), 8 / 8.5, (0, 1)),
    "95 % equal, bounded": (lambda random, n: (random.random(n) < 0.05) * random.random(n), 0.025, (0, 1)),
}
COUNTS = 40, 80, 200
EFFECTS = 0.25, 0.5, 1.0  # in standard deviations
WRONG, POWER = 1000, 150  # draws


def answer(values: np.ndarray, limit: float, bounds: Bounds) -> str:
    """Return the verdict of a measurement that may stop early; empty: undecided."""
    levels = [(stop, EARLY) for stop in list_looks(len(values))] + [(len(values), LAST)]
    for stop, level in levels:
        row = Row("method", "measure", "", Estimate.of(values[:stop], bounds=bounds), limit, level=level)
        if stop == len(values) or settled([row], stop / len(values)):
            return row.verdict if row.verdict in (PASSED, FAILED) else ""
    raise AssertionError("the last look answers")


def answer_of_t(values: np.ndarray, limit: float) -> str:
    """Return what 0.4 answered: it stopped where Student's t was clear, or the numbers were all the same."""
    levels = [(stop, EARLY) for stop in list_looks(len(values))] + [(len(values), LAST)]
    for stop, level in levels:
        some = values[:stop]
        half = some.std(ddof=1) / math.sqrt(stop) * stdtrit(stop - 1, (1 + level) / 2)
        if abs(some.mean() - limit) > half:
            return PASSED if some.mean() > limit else FAILED
    return ""


def shares(name: str, count: int, effect: float, draws: int, seed: int = 0) -> tuple[float, float]:
    """Return how often there is an answer, now and in 0.4, where the limit is some standard deviations off the mean."""
    draw, mean, bounds = DISTRIBUTIONS[name]
    random = np.random.default_rng(seed)
    limit = mean - effect * float(draw(np.random.default_rng(1), 100_000).std())
    samples = [draw(random, count) for _ in range(draws)]
    now = [answer(values, limit, bounds) != "" for values in samples]
    before = [answer_of_t(values, limit) != "" for values in samples]
    return float(np.mean(now)), float(np.mean(before))


def table(title: str, columns: Sequence[tuple[str, int, float, int]]) -> None:
    """Print a table with a row for each distribution; columns have a heading, a count, an effect and draws."""
    print(f"\n{title}\n\n| | " + " | ".join(heading for heading, *_ in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for name in DISTRIBUTIONS:
        cells = [shares(name, *column) for _, *column in columns]  # type: ignore[arg-type]
        print(f"| {name} | " + " | ".join(f"{now:.1%} ({before:.1%})" for now, before in cells) + " |", flush=True)


def main() -> None:
    """Print both tables."""
    table("Wrong answers (in 0.4)", [(f"n = {count}", count, 0.0, WRONG) for count in COUNTS])
    for count in COUNTS[:2]:
        effects = [(f"{effect:g} σ", count, effect, POWER) for effect in EFFECTS]
        table(f"Answers with {count} images where there is something to find (in 0.4)", effects)


if __name__ == "__main__":
    main()
