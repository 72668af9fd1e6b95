"""Thresholds of anomalies: the order statistic by its definition, and what it promises of new photos, by simulation."""

import math

import numpy as np
import pytest
from sklearn.model_selection import KFold
from sklearn.neighbors import NearestNeighbors

from pytorch_grad_cam_pcasvm.studio.model.choices import choose_threshold, count_needed


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.1, 0.2, 0.5, 0.07])
def test_order_statistic(rate):
    random = np.random.default_rng(0)
    exact = round(100 * rate)  # in hundredths, without rounding
    for count in [*range(1, 60), 99, 100, 199, 200, 250]:
        scores = random.normal(size=count)
        place = -(-(count + 1) * (100 - exact) // 100)
        threshold = choose_threshold(scores, rate)
        if place <= count:
            assert (threshold.score, threshold.rate) == (np.sort(scores)[place - 1], rate)
        else:
            assert threshold.score == scores.max()
            assert threshold.rate == 1 / (count + 1) > rate
        assert (place <= count) == (count >= threshold.needed)
        assert threshold.count == count
        # The definition: the fewest good photos above it of which no more than the rate fails, this one counted.
        above = (scores > threshold.score).sum() + 1
        assert above <= rate * (count + 1) + 1e-9 or threshold.rate > rate


def test_numbers_needed():
    assert [count_needed(rate) for rate in (0.01, 0.05, 0.1, 0.5)] == [99, 19, 9, 1]


def test_ties_and_nothing():
    assert choose_threshold([2.0] * 30, 0.1).score == 2
    with pytest.raises(ValueError, match="needs scores"):
        choose_threshold([])


@pytest.mark.parametrize("rate", [0, 1, 2, -0.1, float("nan")])
def test_rates_that_are_no_share_are_refused(rate):
    with pytest.raises(ValueError, match="the share of good photos that may fail is above 0 and below 1"):
        choose_threshold([1, 2, 3], rate)


@pytest.mark.parametrize("scores", [[], [1, float("nan")], [1, float("inf")], [[1, 2]]])
def test_scores_that_are_no_numbers_are_refused(scores):
    with pytest.raises(ValueError, match="needs scores of good photos that were left out"):
        choose_threshold(scores)


def test_objects_count_once():
    scores, groups = np.array([5.0, 5.0, 1.0, 2.0, 3.0]), [7, 7, 1, 2, 3]
    once = choose_threshold(scores[1:], 0.25)
    twice = choose_threshold(scores, 0.25, groups)
    assert (once.score, once.rate, once.count) == (twice.score, twice.rate, twice.count)
    assert choose_threshold(scores, 0.01, groups).rate == 1 / 5
    random = np.random.default_rng(1)
    for _ in range(50):
        groups = random.integers(0, 12, 30)
        scores, rate = random.normal(size=30), random.choice([0.1, 0.2, 0.3])
        found, count = choose_threshold(scores, rate, groups), len(set(groups.tolist()))
        # The smallest score below or at which the objects' mean share is (1 - rate)(n + 1).
        shares = [sum((scores[groups == g] <= s).mean() for g in set(groups.tolist())) for s in np.sort(scores)]
        reached = [s for s, share in zip(np.sort(scores), shares, strict=True)
                   if share >= (count + 1) * (1 - rate) - 1e-9]  # fmt: skip
        assert found.score == (reached[0] if reached else scores.max())


@pytest.mark.parametrize(("count", "rate"), [(30, 0.1), (99, 0.01), (40, 0.01), (50, 0.2)])
def test_false_alarms_of_exchangeable_scores(count, rate):
    random, alarms = np.random.default_rng(0), []
    for _ in range(4000):
        scores = random.gamma(2.0, size=count + 1)
        threshold = choose_threshold(scores[:-1], rate)
        alarms.append(scores[-1] > threshold.score)
    told = max(rate, 1 / (count + 1))
    error = math.sqrt(told / len(alarms))
    assert np.mean(alarms) <= told + 3 * error
    assert np.mean(alarms) >= told - 1 / (count + 1) - 3 * error  # and it is no larger than it needs to be


def test_false_alarms_of_objects():
    """Scores of one object are alike; ignoring that, many more new photos fail than was told."""
    random, alarms, ignoring = np.random.default_rng(0), [], []
    groups = np.repeat(np.arange(12), 8)
    for _ in range(3000):
        scores = random.normal(size=12)[groups] + 0.2 * random.normal(size=len(groups))
        new = random.normal() + 0.2 * random.normal()
        alarms.append(new > choose_threshold(scores, 0.02, groups).score)
        ignoring.append(new > choose_threshold(scores, 0.02).score)
    told = 1 / 13
    assert np.mean(alarms) <= told + 3 * math.sqrt(told / len(alarms))
    assert np.mean(ignoring) > 2 * 0.02


def test_false_alarms_of_what_is_fitted_on_the_others():
    """As ``fit`` has them: scores by neighbours among four fifths, while new photos have all as neighbours."""
    random, alarms = np.random.default_rng(0), []
    for _ in range(150):
        good, new = random.normal(size=(60, 6)), random.normal(size=(60, 6))
        scores = np.empty(len(good))
        for others, own in KFold(5).split(good):
            scores[own] = NearestNeighbors(n_neighbors=1).fit(good[others]).kneighbors(good[own])[0][:, 0]
        threshold = choose_threshold(scores, 0.1)
        distances = NearestNeighbors(n_neighbors=1).fit(good).kneighbors(new)[0][:, 0]
        alarms.append((distances > threshold.score).mean())
    assert np.mean(alarms) <= 0.1 + 3 * np.std(alarms, ddof=1) / math.sqrt(len(alarms))
    assert np.mean(alarms) > 0.03
