"""A PCA of rows that come in parts is scikit-learn's PCA of all of them."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import check_estimator

from pytorch_grad_cam_pcasvm import CovariancePCA

RNG = np.random.default_rng(0)
# Far from 0, and with 13 of 20 directions of hardly any variance.
ROWS = RNG.normal(size=(300, 20)) @ np.diag(np.geomspace(10, 1e-3, 20)) @ RNG.normal(size=(20, 20)) + 100


def agree(pca, expected):
    """Whether two PCAs are the same."""
    assert pca.n_components_ == expected.n_components_
    size = expected.explained_variance_[0]
    np.testing.assert_allclose(pca.mean_, expected.mean_, rtol=1e-12)
    np.testing.assert_allclose(pca.explained_variance_ / size, expected.explained_variance_ / size, atol=1e-10)
    np.testing.assert_allclose(pca.explained_variance_ratio_, expected.explained_variance_ratio_, atol=1e-10)
    # Along directions of tiny variance scikit-learn's own sums, which are not centred, are less exact.
    clear = expected.explained_variance_ > 1e-6 * size
    np.testing.assert_allclose(pca.components_[clear], expected.components_[clear], atol=1e-9)
    np.testing.assert_allclose(pca.transform(ROWS)[:, clear], expected.transform(ROWS)[:, clear], atol=1e-7)
    restored = pca.inverse_transform(pca.transform(ROWS))
    np.testing.assert_allclose(restored, expected.inverse_transform(expected.transform(ROWS)), atol=1e-4)


@pytest.mark.parametrize("n_components", [None, 1, 7, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("way", ["at once", "parts", "merged", "one by one", "blocks"])
def test_it_is_the_pca_of_all_rows(n_components, way, monkeypatch):
    pca, expected = CovariancePCA(n_components), PCA(n_components, svd_solver="covariance_eigh").fit(ROWS)
    if way == "at once":
        pca.fit(ROWS[:10]).fit(ROWS)
    elif way == "blocks":
        monkeypatch.setattr("pytorch_grad_cam_pcasvm.head.covariance_pca._ROWS", 7)
        pca.fit(ROWS)
    elif way == "merged":
        for part in (ROWS[:3], ROWS[3:200], ROWS[200:]):
            pca.merge(CovariancePCA(3).fit(part))
    else:
        for part in np.split(ROWS, [3, 4, 250]) if way == "parts" else ROWS[:, None]:
            pca.partial_fit(part)
    assert pca.n_samples_seen_ == 300
    agree(pca, expected)


def test_what_was_merged_stays_as_it_was():
    one, other = CovariancePCA(3).fit(ROWS[:150]), CovariancePCA(3).fit(ROWS[150:])
    both = CovariancePCA(3).merge(one).merge(other)
    agree(one, PCA(3, svd_solver="covariance_eigh").fit(ROWS[:150]))
    agree(both, PCA(3, svd_solver="covariance_eigh").fit(ROWS))


def test_the_number_of_components_changes_without_a_fit():
    pca = CovariancePCA(3).fit(ROWS)
    for count in (5, 0.9, None):
        agree(pca.set_params(n_components=count), PCA(count, svd_solver="covariance_eigh").fit(ROWS))
    pca.partial_fit(2 * ROWS)
    pca.set_params(n_components=4)
    agree(pca, PCA(4, svd_solver="covariance_eigh").fit(np.concatenate([ROWS, 2 * ROWS])))


def test_single_precision_is_added_up_in_double():
    rows = np.float32(ROWS)
    pca = CovariancePCA(0.99)
    for part in np.array_split(rows, 40):
        pca.partial_fit(part)
    assert pca.scatter_.dtype == np.float64
    agree(pca, PCA(0.99, svd_solver="covariance_eigh").fit(np.float64(rows)))


def test_it_keeps_the_rules_of_scikit_learn():
    check_estimator(CovariancePCA())


def test_what_cannot_be_learned_is_refused():
    with pytest.raises(ValueError, match=r"from 1 to 20, the smaller one .* or None, got 21"):
        CovariancePCA(21).fit(ROWS).transform(ROWS)
    with pytest.raises(ValueError, match=r"from 1 to 5, .*, got 6"):
        CovariancePCA(6).fit(ROWS[:5]).transform(ROWS)
    for wrong in (0, 1.0, -0.5, "mle"):
        with pytest.raises(ValueError, match=f"a share of the variance between 0 and 1, or None, got {wrong!r}"):
            _ = CovariancePCA(wrong).fit(ROWS).components_
    with pytest.raises(ValueError, match="components need two rows at least, and one was learned from: add more"):
        CovariancePCA(1).partial_fit(ROWS[:1]).transform(ROWS)
    with pytest.raises(ValueError, match="rows of 20 features cannot be added to rows of 4"):
        CovariancePCA().fit(ROWS[:, :4]).merge(CovariancePCA().fit(ROWS))
    with pytest.raises(NotFittedError):
        CovariancePCA().fit(ROWS).merge(clone(CovariancePCA()))
