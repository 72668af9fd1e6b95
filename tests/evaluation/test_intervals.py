"""Intervals hold for numbers that are skewed, bounded, or nearly all the same, and at each look."""

import importlib.util
import itertools
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pytorch_grad_cam_pcasvm import evaluation
from pytorch_grad_cam_pcasvm.runtime.amounts import LAST
from pytorch_grad_cam_pcasvm.studio.evaluation.result import (
    ANYTHING,
    FAILED,
    LEVEL,
    PASSED,
    UNDECIDED,
    Estimate,
    Row,
    differing,
    interval_of_any,
    interval_of_bounded,
)
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import EARLY, chance_of_clarity, list_looks, settled

spec = importlib.util.spec_from_file_location("looks_benchmark", Path(__file__).parents[2] / "benchmarks/looks.py")
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)
shares = cache(benchmark.shares)


@pytest.mark.parametrize("name", benchmark.DISTRIBUTIONS)
def test_at_most_a_twentieth_of_all_answers_is_wrong(name):
    wrong, _ = shares(name, 80, 0.0, 400, seed=3)
    assert wrong < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)


@pytest.mark.parametrize("name", ["95 % equal", "lognormal", "beta(8, 0.5)"])
def test_this_is_more_than_chance(name):
    _, before = shares(name, 80, 0.0, 400, seed=3)
    assert before > 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)


def test_what_is_clear_remains_so():
    for name, least in (("normal", 0.95), ("uniform", 0.95), ("exponential", 0.95), ("uniform, bounded", 0.85)):
        power, _ = shares(name, 80, 0.5, 100, seed=4)
        assert power >= least, name


@pytest.mark.parametrize("level", [LEVEL, LAST, EARLY])
@pytest.mark.parametrize("count", [20, 80])
def test_an_interval_of_bounded_numbers_holds_where_students_does_not(count, level):
    """Of all distributions between bounds, those with rare numbers at one end are the worst."""
    random = np.random.default_rng(0)
    for rare, (low, high) in itertools.product((0.02, 0.1), ((0.0, 1.0), (-1.0, 1.0), (-0.25, 0.75))):
        for turned in (False, True):
            shares = np.where(random.random((200, count)) < rare, 1.0, 0.05 * random.random((200, count)))
            mean = rare + (1 - rare) * 0.025
            shares, mean = (1 - shares, 1 - mean) if turned else (shares, mean)
            least, most = interval_of_bounded(low + (high - low) * shares, (low, high), level)
            missed = (low + (high - low) * mean < least) | (most < low + (high - low) * mean)
            assert missed.mean() <= 1 - level + 3 * np.sqrt(level * (1 - level) / 200)


def test_an_interval_of_bounded_numbers_is_where_the_bets_say():
    """Each bet is written down here as it is placed, one number after the other."""
    numbers = np.random.default_rng(1).beta(4, 2, 60)
    order = np.random.default_rng(0).permutation(60)

    def wealth(shares, mean):
        total, seen = 1.0, []
        for share in shares:
            guess, variance = 0.3 * 0.25, 0.25
            if seen:
                means = [(0.15 + sum(seen[: k + 1])) / (k + 1.3) for k in range(len(seen))]
                guess += sum((value - middle) ** 2 for value, middle in zip(seen, means, strict=True))
                variance = guess / (len(seen) + 0.3)
            bet = min(np.sqrt(2 * np.log(40) / (60 * variance)), 0.99 / mean)
            total *= 1 + bet * (share - mean)
            seen.append(share)
        return total

    least, most = interval_of_bounded(numbers, (0, 1), 0.95)
    assert least < numbers.mean() < most
    assert wealth(numbers[order], least) == pytest.approx(40, rel=1e-6)
    assert wealth(1 - numbers[order], 1 - most) == pytest.approx(40, rel=1e-6)
    rows = interval_of_bounded(np.stack([numbers / 2, numbers]), (0, 1), 0.95)
    np.testing.assert_allclose([end[1] for end in rows], (least, most))
    shifted = interval_of_bounded(2 * numbers - 1, (-1, 1), 0.95)
    np.testing.assert_allclose(shifted, (2 * least - 1, 2 * most - 1))


def test_ends_of_bounded_numbers():
    same = Estimate.of(np.full(40, 0.9), bounds=(0, 1))
    low, high = same.interval
    assert (same.standard_error, low < 0.9 < high) == (pytest.approx(0, abs=1e-12), True)
    assert (
        Estimate.of(np.zeros(40), bounds=(-1, 1)).interval[0]
        < 0
        < Estimate.of(np.zeros(40), bounds=(-1, 1)).interval[1]
    )
    assert Estimate.of(np.ones(40), bounds=(-1, 1)).interval[1] == 1
    assert Estimate.of([1 + 1e-9, 0.5, 0.2], bounds=(0, 1)).bounds == (0, 1)  # but for rounding
    with pytest.raises(ValueError, match=r"numbers from 0\.2 to 1\.5 are not between 0 and 1: give bounds"):
        Estimate.of([0.2, 1.5], bounds=(0, 1))


def test_an_interval_of_skewed_numbers_is_halls_and_students():
    numbers = np.random.default_rng(2).exponential(size=80)
    mean, error = numbers.mean(), stats.sem(numbers)
    low, high = interval_of_any(numbers, mean, error, 0.95)
    end, skewness = stats.t.ppf(0.975, 79), 1.5 * stats.skew(numbers, bias=False)

    def transformed(t):  # Hall's transformation, which makes the t of skewed numbers symmetric
        return t + skewness * t**2 / (3 * 80**0.5) + skewness**2 * t**3 / (27 * 80) + skewness / (6 * 80**0.5)

    assert transformed((mean - high) / error) == pytest.approx(-end)
    assert low == pytest.approx(mean - end * error)  # Student's is the wider one on this side
    turned = interval_of_any(-numbers, -mean, error, 0.95)
    np.testing.assert_allclose(turned, (-high, -low))
    even = np.concatenate([numbers, -numbers])
    np.testing.assert_allclose(interval_of_any(even, 0, 0.1, 0.95)[1], 0.1 * stats.t.ppf(0.975, 159))


@pytest.mark.parametrize("different", [0, 1, 9, 10])
def test_few_that_differ_say_nothing_of_the_rest(different):
    values = np.zeros(80)
    values[:different] = 1 + np.arange(different)
    assert differing(values) == different
    row = Row("Method", "deletion", "", Estimate.of(values + 7, bounds=ANYTHING), 0.0)
    assert row.verdict == (PASSED if different == 10 else UNDECIDED)
    assert Row("Method", "deletion", "", row.estimate, 30.0).verdict == (FAILED if different == 10 else UNDECIDED)
    assert (chance_of_clarity(row, 0.5) > 0) == (different > 4)  # of twice as many images, twice as many differ
    assert settled([row], 0.5) == (different in (0, 1, 10))


def test_equal_but_for_rounding_is_equal():
    values = 0.3 * np.ones(60) + 1e-12 * np.arange(60)
    assert differing(values) == 0
    assert Estimate.of(values).interval == (-np.inf, np.inf)
    assert differing([1.0, 2.0, 3.0]) == 3
    assert differing([]) == 0


def test_zeros_are_a_share_only_where_they_may_be():
    zeros = np.zeros(80)
    assert Estimate.of(zeros, bounds=(0, 1)).interval == pytest.approx((0, 1 - 0.025 ** (1 / 80)))
    assert Estimate.of(zeros, bounds=ANYTHING).interval == (-np.inf, np.inf)
    assert Estimate(0.0, 0.0, 80).interval == (-np.inf, np.inf)  # nor is anything known of the numbers here


def test_images_that_share_a_draw_are_one_number():
    draws, random = np.arange(80) % 10, np.random.default_rng(0)
    values = random.random(10)[draws]
    estimate = Estimate.of(values, draws, (0, 1))
    np.testing.assert_allclose(sorted(estimate.numbers), sorted(values[:10]))
    assert estimate.interval == interval_of_bounded(values[:10], (0, 1), LEVEL)
    low, high = Estimate.of(values, draws).interval
    assert high - low > 2 * 2.262 * values[:10].std(ddof=1) / 10**0.5 - 1e-9  # Student's t of 9, or more
    fewer = np.where(draws < 5, 0.5, values)  # five draws are all the same
    assert Estimate.of(fewer, draws).interval == (-np.inf, np.inf)
    missed = 0
    for _ in range(400):
        of_draws = random.beta(8, 0.5, 10)
        low, high = Estimate.of(of_draws[draws], draws, (0, 1)).interval
        missed += not low <= 8 / 8.5 <= high
    assert missed / 400 < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)


def test_a_saved_result_gives_the_same_verdicts():
    random = np.random.default_rng(0)
    rows = [
        Row("Method", "share", "chance", Estimate.of(random.random(40), bounds=(0, 1)), 0.3),
        Row("Method", "deletion", "random maps", Estimate.of(random.exponential(size=40)), 0.5),
        Row("Method", "share", "", Estimate.of(random.random(40), bounds=(0, 1))),
    ]
    result = evaluation.Result("check", "question", rows, {}, {})
    entries = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    again = evaluation.Result.from_dict(entries).rows
    assert again == rows
    assert [row.estimate.interval for row in again[:2]] == [row.estimate.interval for row in rows[:2]]
    assert entries["rows"][2]["estimate"]["numbers"] == []
    for entry in entries["rows"]:  # as 0.4 wrote them
        del entry["estimate"]["numbers"], entry["estimate"]["bounds"]
    assert [row.verdict for row in evaluation.Result.from_dict(entries).rows] == [PASSED, PASSED, ""]


def test_every_look_has_its_level():
    assert [*list_looks(80)] == [20, 40]
    wrong = 2 * (1 - EARLY) + (1 - LAST)
    assert wrong == pytest.approx(0.05)
