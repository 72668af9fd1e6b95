"""The distance from good rows by a PCA: scikit-learn's numbers, its parts, its choice, and what a head makes of it."""

import numpy as np
import pytest
import torch
from heads import check_gradients
from scipy.stats import multivariate_normal
from sklearn.covariance import ShrunkCovariance
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from pytorch_grad_cam_pcasvm import CovariancePCA, Head, PCADistance, choose_shrinkage
from pytorch_grad_cam_pcasvm.head import assemble_detector, measure_anomaly, tells_anomalies

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(90, 6)) @ RNG.normal(size=(6, 6)) * [1, 1, 1, 5, 1, 100] + 10
OTHERS = RNG.normal(size=(20, 6)) * 30


@pytest.mark.parametrize("shrinkage", [0.01, 0.5, 1.0])
def test_it_is_the_mahalanobis_distance_of_a_shrunk_covariance(shrinkage):
    # which divides by n, and a PCA by n - 1
    expected = ShrunkCovariance(shrinkage=shrinkage).fit(ROWS).mahalanobis(OTHERS) * 89 / 90
    for parts in ([ROWS], np.split(ROWS, [1, 40])):
        detector = PCADistance(shrinkage)
        for part in parts:
            detector.partial_fit(part)
        np.testing.assert_allclose(-detector.score_samples(OTHERS), expected, rtol=1e-9)


def test_few_rows_leave_directions_in_which_they_do_not_vary():
    few = ROWS[:4]
    expected = ShrunkCovariance(shrinkage=0.1).fit(few).mahalanobis(OTHERS) * 3 / 4
    np.testing.assert_allclose(-PCADistance(0.1).fit(few).score_samples(OTHERS), expected, rtol=1e-9)


def test_a_detector_of_sums_is_one_of_rows():
    rows = np.c_[ROWS, np.full(90, 7.0)]  # and one feature that is constant
    sums = CovariancePCA()
    for part in np.split(rows, 3):
        sums.merge(CovariancePCA().fit(part))
    detector, expected = assemble_detector(sums, 0.2), make_pipeline(StandardScaler(), PCADistance(0.2)).fit(rows)
    np.testing.assert_allclose(detector[0].scale_, expected[0].scale_, rtol=1e-12)
    np.testing.assert_allclose(detector[0].var_, expected[0].var_, rtol=1e-9, atol=1e-12)
    others = np.c_[OTHERS, np.full(20, 7.0)]
    np.testing.assert_allclose(detector.score_samples(others), expected.score_samples(others), rtol=1e-9)


def test_a_feature_is_constant_where_it_is_to_scikit_learn():
    noise = RNG.choice([-1.0, 1.0], 90)
    rows = np.c_[1e6 + 1e-9 * noise, 1e6 + 1e-6 * noise, 1e-3 + 1e-12 * noise, np.zeros(90), 1e-9 * noise]
    scaler = StandardScaler().fit(rows)
    assert (scaler.scale_ == 1).tolist() == [True, False, False, True, False]
    np.testing.assert_allclose(assemble_detector(CovariancePCA().fit(rows), 0.5)[0].scale_, scaler.scale_, rtol=1e-3)


def log_likelihoods(parts, candidates, width):
    """Return what SciPy says of each part, by the shrunk covariance of the others, among ``width`` features."""
    expected = []
    for shrinkage in candidates:
        values = []
        for place, part in enumerate(parts):
            rest = np.concatenate(parts[:place] + parts[place + 1 :])
            scaler = StandardScaler().fit(rest)
            known = np.cov(scaler.transform(rest).T)
            count = len(known)
            shrunk = (1 - shrinkage) * known + shrinkage * np.trace(known) / width * np.eye(count)
            density = multivariate_normal(np.zeros(count), shrunk).logpdf(scaler.transform(part))
            values.append(density.mean() + count / 2 * np.log(2 * np.pi))
        expected.append(np.mean(values))
    return expected


@pytest.mark.parametrize("size", [1.0, 1e-7])
@pytest.mark.parametrize("dead", [0, 3])
def test_the_shrinkage_is_that_under_which_rows_left_out_are_likeliest(size, dead):
    rows, candidates = size * ROWS, (0.01, 0.1, 0.4)
    parts = [np.c_[part, np.full((len(part), dead), 7.0)] for part in np.split(rows, [20, 50])]
    chosen, found = choose_shrinkage([CovariancePCA().fit(part) for part in parts], candidates)
    expected = log_likelihoods([part[:, :6] for part in parts], candidates, 6 + dead)
    np.testing.assert_allclose([found[one] for one in candidates], expected, rtol=1e-7)
    assert chosen == candidates[int(np.argmax(expected))]


def test_rounding_of_many_rows_is_no_direction():
    parts = [CovariancePCA().fit(part) for part in np.split(np.c_[ROWS, ROWS @ RNG.normal(size=(6, 2))], [20, 50])]
    many = [CovariancePCA().add_sums(10**9 * one.n_samples_seen_, one.mean_, 1e9 * one.scatter_) for one in parts]
    few, others = (np.diff([*choose_shrinkage(some)[1].values()]) for some in (parts, many))
    np.testing.assert_allclose(few, others, atol=0.1)


def test_rows_that_are_all_alike_tell_nothing_of_the_shrinkage():
    alike = [CovariancePCA().fit(np.ones((5, 3))), CovariancePCA().fit(np.ones((4, 3)))]
    with np.errstate(all="raise"):
        assert set(choose_shrinkage(alike)[1].values()) == {0.0}


def test_few_rows_are_shrunk_more():
    def choose(count):
        rows = RNG.normal(size=(2 * count, 30)) * np.geomspace(5, 0.1, 30) @ np.linalg.qr(RNG.normal(size=(30, 30)))[0]
        return choose_shrinkage([CovariancePCA().fit(rows[:count]), CovariancePCA().fit(rows[count:])])[0]

    assert choose(20) > choose(2000)


def test_a_head_tells_it_and_has_its_gradients(tmp_path):
    detector = make_pipeline(StandardScaler(), PCADistance(0.2)).fit(ROWS)
    head = Head.of(detector)
    x = torch.from_numpy(OTHERS)
    assert tells_anomalies(head)
    assert head.component_position is None  # all directions are kept
    anomalies = measure_anomaly(head, head.values_of(x)).numpy()
    np.testing.assert_allclose(anomalies, -detector.score_samples(OTHERS), rtol=1e-9)
    check_gradients(head, OTHERS[:7])
    head.save(tmp_path / "head.safetensors")
    loaded = Head.load(tmp_path / "head.safetensors")
    assert torch.equal(loaded.values_of(x).values[-1], head.values_of(x).values[-1])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: PCADistance(0.0).fit(ROWS).score_samples(ROWS), "shrinkage must be above 0 and up to 1"),
        (lambda: PCADistance(0.1).fit(np.ones((5, 3))).score_samples(np.ones((5, 3))), "all rows are alike"),
        (lambda: choose_shrinkage([CovariancePCA().fit(ROWS)]), "two or more, got 1"),
        (lambda: choose_shrinkage([CovariancePCA().fit(ROWS)] * 2, [0.0, 0.1]), "candidates are shrinkages above 0"),
        (lambda: choose_shrinkage([CovariancePCA().fit(ROWS)] * 2, []), "candidates are shrinkages above 0"),
    ],
)
def test_what_tells_no_distance_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_it_is_an_estimator_as_scikit_learn_wants_them():
    check_estimator(PCADistance(0.2))
