"""What tells a model that a photo is unlike its training set: the residual of a PCA, by photos that are left out."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.feature_selection import SelectKBest
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold, StratifiedKFold
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import are_unlike_training, extract_features, fit_model, load_model, measure_outside
from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.studio.model.choices import choose_threshold
from pytorch_grad_cam_pcasvm.studio.model.likeness import keep_likeness, keep_likeness_of_patches

torch.manual_seed(0)
NET = nn.Sequential(nn.Conv2d(3, 24, 5, 3), nn.Tanh(), nn.Conv2d(24, 20, 3), nn.Tanh()).eval()
PHOTOS = torch.randn(40, 3, 24, 24) * 0.3
PHOTOS[::2, 0] += 0.4
LABELS = np.array(["red", "grey"] * 20)
LIKE, ODD = PHOTOS.flip(3), torch.randn(10, 3, 24, 24) * 3
PIPELINE = make_pipeline(StandardScaler(), PCA(5), SVC())


def measure(fitted, rows):
    """Return the residuals of rows by scikit-learn's own inverse."""
    z = fitted[0].transform(rows)
    return ((z - fitted[1].inverse_transform(fitted[1].transform(z))) ** 2).sum(1)


def residuals(rows, folds):
    """Return those of each row by what was fitted without it."""
    values = np.zeros(len(rows))
    for fit, test in folds:
        values[test] = measure(make_pipeline(StandardScaler(), PCA(5, svd_solver="full")).fit(rows[fit]), rows[test])
    return values


@pytest.fixture(scope="module")
def model():
    return fit_model(NET, [(PHOTOS, LABELS)], PIPELINE, "3", pool="mean", resample=0, progress=False)


@pytest.fixture(scope="module")
def rows():
    return extract_features(NET, [PHOTOS], "3", pool="mean", progress=False)[0].astype(np.float64)


def test_the_threshold_is_that_of_residuals_that_were_left_out(model, rows):
    expected = choose_threshold(residuals(rows, StratifiedKFold(5).split(rows, LABELS)))
    kept = model.net.head.training_set.preparation["likeness"]
    assert kept["score"] == pytest.approx(expected.score, rel=1e-6)
    assert (kept["rate"], kept["count"]) == (pytest.approx(1 / 41), 40)
    fitted = make_pipeline(StandardScaler(), PCA(5, svd_solver="full")).fit(rows)
    others = extract_features(NET, [ODD], "3", pool="mean", progress=False)[0].astype(np.float64)
    distances = np.sqrt(measure(fitted, others) / expected.score)
    np.testing.assert_allclose(measure_outside(model.net(ODD)), distances, rtol=1e-4)


def test_odd_photos_are_told_and_others_are_not(model, tmp_path):
    assert np.mean(are_unlike_training(model.net(ODD))) == 1
    assert np.mean(are_unlike_training(model.net(LIKE))) <= 0.1
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors", NET)
    np.testing.assert_allclose(measure_outside(again.net(ODD)), measure_outside(model.net(ODD)))


def test_photos_of_an_object_are_left_out_together(model, rows):
    objects = np.arange(40) // 4
    head, fitted = model.net.head, PIPELINE.fit(rows, LABELS)
    before = dict(head.training_set.preparation)
    threshold = keep_likeness(head, fitted, rows, LABELS, objects)
    head.training_set.preparation = before
    folds = StratifiedGroupKFold(5).split(rows, LABELS, objects)
    assert threshold.score == pytest.approx(choose_threshold(residuals(rows, folds), 0.01, objects).score, rel=1e-6)


def test_of_two_reductions_the_residual_is_that_of_the_one_whose_components_the_head_has(rows):
    pipeline = make_pipeline(StandardScaler(), PCA(12), PCA(3), SVC())
    own = fit_model(NET, [(PHOTOS, LABELS)], pipeline, "3", pool="mean", resample=0, progress=False)
    head, kept = own.net.head, own.net.head.training_set.preparation["likeness"]
    position = head.component_position
    steps = 2 if position == 2 else 3
    values = np.zeros(40)
    for fit, test in StratifiedKFold(5).split(rows, LABELS):
        before = make_pipeline(*clone(pipeline)[: steps - 1]).fit(rows[fit])
        z, others = before.transform(rows[fit]), before.transform(rows[test])
        last = clone(pipeline[steps - 1]).fit(z)
        values[test] = ((others - last.inverse_transform(last.transform(others))) ** 2).sum(1)
    assert kept["score"] == pytest.approx(choose_threshold(values).score, rel=1e-5)
    assert np.mean(measure_outside(own.net(LIKE)) > 1) <= 0.1


def test_a_reduction_that_learns_from_labels_is_fitted_with_them():
    pipeline = make_pipeline(StandardScaler(), SelectKBest(k=8), PCA(3), SVC())
    own = fit_model(NET, [(PHOTOS, LABELS)], pipeline, "3", pool="mean", resample=0, progress=False)
    assert measure_outside(own.net(ODD)) is not None


@pytest.mark.parametrize(
    ("pipeline", "count"), [(make_pipeline(StandardScaler(), SVC()), 40), (PIPELINE, 6), (SVC(), 40)]
)
def test_nothing_is_said_where_nothing_tells(pipeline, count):
    loader = [(PHOTOS[:count], LABELS[:count])]
    pipeline = make_pipeline(StandardScaler(), PCA(2), SVC()) if count < 8 else pipeline
    own = fit_model(NET, loader, pipeline, "3", pool="mean", resample=0, progress=False)
    assert measure_outside(own.net(ODD)) is None


DENSE = make_pipeline(StandardScaler(), PCA(4), SVC())


@pytest.fixture(scope="module")
def patches():
    """The patches of each photo, (N, P, D), float64."""
    rows = extract_features(NET, [PHOTOS], "3", pool="dense", progress=False)[0]
    return rows.reshape(len(PHOTOS), -1, rows.shape[1]).astype(np.float64)


def measure_photos(fit, asked):
    """Return the mean residual of the patches of each photo, by scikit-learn's own inverse."""
    fitted = make_pipeline(StandardScaler(), PCA(4, svd_solver="full")).fit(fit.reshape(-1, fit.shape[-1]))
    return measure(fitted, asked.reshape(-1, asked.shape[-1])).reshape(len(asked), -1).mean(1)


def test_of_heads_on_positions_the_mean_residual_tells(patches):
    own = fit_model(NET, [(PHOTOS, LABELS)], DENSE, "3", pool="dense", resample=0, progress=False)
    values = np.zeros(40)
    for fit, test in GroupKFold(5).split(patches, groups=np.arange(40)):
        values[test] = measure_photos(patches[fit], patches[test])
    kept = own.net.head.training_set.preparation["likeness"]
    assert kept["score"] == pytest.approx(choose_threshold(values).score, rel=1e-5)
    rows = extract_features(NET, [ODD], "3", pool="dense", progress=False)[0].astype(np.float64)
    expected = np.sqrt(measure_photos(patches, rows.reshape(len(ODD), -1, rows.shape[1])) / kept["score"])
    np.testing.assert_allclose(measure_outside(own.net(ODD)), expected, rtol=1e-4)
    assert all(are_unlike_training(own.net(ODD)))
    assert np.mean(are_unlike_training(own.net(LIKE))) <= 0.1


def test_all_positions_are_asked_of_whatever_patches_a_head_learned(patches):
    fitted = clone(DENSE).fit(patches[:, :2].reshape(80, -1), np.repeat(LABELS, 2))
    head, objects = Head.of(fitted), np.arange(40) // 2

    def read():
        yield torch.from_numpy(patches).transpose(1, 2), [*range(40)]

    args = patches[:, :2].reshape(80, -1), np.repeat(LABELS, 2), np.repeat(np.arange(40), 2)
    threshold = keep_likeness_of_patches(head, fitted, *args, objects, read)
    values = np.zeros(40)
    for fit, test in GroupKFold(5).split(patches, groups=objects):
        values[test] = measure_photos(patches[fit][:, :2], patches[test])
    assert threshold.score == pytest.approx(choose_threshold(values, 0.01, objects).score, rel=1e-9)
    assert threshold.count == 20


@pytest.mark.parametrize("some", [{"sample": 3}, {"coreset": 0.5}, {"purity": 0.9}, {"ignore_index": 0}])
def test_nothing_is_said_of_photos_whose_patches_are_not_all_known(some):
    labels = (torch.arange(40) % 2)[:, None, None].expand(40, 24, 24)
    own = fit_model(NET, [(PHOTOS, labels + 1)], DENSE, "3", pool="dense", resample=0, progress=False, **some)
    assert measure_outside(own.net(ODD)) is None


def test_a_head_that_tells_anomalies_itself_has_no_such_limit():
    reduction = make_pipeline(StandardScaler(), PCA(4), NearestNeighbors(n_neighbors=1))
    own = fit_model(NET, [PHOTOS], reduction, "3", pool="dense", resample=0, progress=False)
    assert measure_outside(own.net(ODD)) is None
