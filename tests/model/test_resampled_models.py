"""Models with resampled heads: which get some by default, on request, or not at all, and whether they are the right."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import Head, extract_features, fit_model, load_model, resample_heads
from pytorch_grad_cam_pcasvm.studio.model import resampling
from pytorch_grad_cam_pcasvm.studio.model.encoding import fit_with_labels_encoded, name_head

LABELS = torch.arange(32) % 2
HEAD = make_pipeline(StandardScaler(), PCA(3), SVC())


@pytest.fixture
def loader():
    noise = torch.randn(32, 3, 16, 16, generator=torch.Generator("cpu").manual_seed(0))
    x = noise + LABELS.reshape(-1, 1, 1, 1)
    return [(x[:16], LABELS[:16]), (x[16:], LABELS[16:])]


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()
    ).eval()


def values(heads, rows):
    with torch.no_grad():
        return torch.stack([head(torch.from_numpy(rows).double()).values[-1] for head in heads])


def test_a_model_has_thirty_resampled_heads_of_its_rows(network, loader, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fit_model(network, loader, HEAD, pool="mean", seed=3, progress=False)
    rows, labels = extract_features(network, loader, pool="mean", progress=False)
    expected = resample_heads(HEAD, rows, labels, n=30, seed=3)  # of clones, so that it may be unfitted
    found = model.net.head.resamples.heads
    assert len(found) == 30
    assert torch.equal(values(found, rows), values(expected, rows))
    maps = model.explain(loader[0][0][:2])
    assert maps.error.shape == maps.maps.shape
    model.save(tmp_path / "model.safetensors")
    read = load_model(tmp_path / "model.safetensors", network)
    torch.testing.assert_close(values(read.net.head.resamples.heads, rows), values(found, rows), rtol=1e-4, atol=1e-5)


def test_rows_of_a_photo_are_drawn_together(network, loader):
    model = fit_model(network, loader, HEAD, layer="3", pool="dense", resample=2, progress=False)
    rows, labels, places = extract_features(network, loader, "3", pool="dense", places=True, progress=False)
    expected = resample_heads(HEAD, rows, labels, n=2, groups=places[:, 0])
    assert torch.equal(values(model.net.head.resamples.heads, rows), values(expected, rows))


def test_none_are_made_where_none_are_wanted(network, loader):
    assert fit_model(network, loader, HEAD, pool="mean", resample=0, progress=False).net.head.resamples is None


def test_a_head_that_is_fitted_has_them_on_request(network, loader):
    rows, labels = extract_features(network, loader, pool="mean", progress=False)
    fitted = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(rows, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = fit_model(network, loader, fitted, pool="mean", progress=False)
    assert plain.net.head.resamples is None  # these rows may be others than those of its fit
    asked = fit_model(network, loader, fitted, pool="mean", resample=4, progress=False)
    expected = values(resample_heads(fitted, rows, labels, n=4), rows)
    assert torch.equal(values(asked.net.head.resamples.heads, rows), expected)
    with pytest.raises(TypeError, match="a Head does not hold the estimators that it was made of"):
        fit_model(network, loader, Head.of(fitted), pool="mean", resample=4, progress=False)
    kept = fit_model(network, loader, asked.net.head, pool="mean", progress=False).net.head.resamples
    assert torch.equal(values(kept.heads, rows), expected)


def test_too_few_photos_are_said_and_refused_on_request(network, loader):
    few = [(loader[0][0][:14], LABELS[:14])]
    reason = r"there are 7 photos \(or groups\) of the class 0, and resampled heads need 8"
    with pytest.warns(UserWarning, match=f"maps do not say how sure they are.*: {reason}"):
        assert fit_model(network, few, HEAD, pool="mean", progress=False).net.head.resamples is None
    with pytest.raises(ValueError, match=reason):
        fit_model(network, few, HEAD, pool="mean", resample=30, progress=False)


@pytest.mark.parametrize("count", [1, -1, True, 2.0, "30"])
def test_what_is_no_number_of_heads_is_refused_at_once(network, count):
    with pytest.raises(ValueError, match="resample is a number of resampled heads, 2 or more, of which 30 are usual"):
        fit_model(network, None, HEAD, pool="mean", resample=count, progress=False)


@pytest.mark.parametrize("cost", ["slow", "large", "forest"])
def test_what_costs_much_is_made_on_request_alone(cost, network, loader, monkeypatch):
    head, said = HEAD, {"slow": r"would take \d+ s", "large": r"have \d+ MB", "forest": "of a RandomForestClass.* slow"}
    if cost == "forest":
        head = make_pipeline(StandardScaler(), PCA(3), RandomForestClassifier(4, random_state=0))
    elif cost == "slow":
        monkeypatch.setattr(resampling, "_SECONDS", 1e-9)
    else:
        monkeypatch.setattr(resampling, "_BYTES", 30)
    with pytest.warns(UserWarning, match=rf"{said[cost]}.*; ask for them with fit_model\(\.\.\., resample=30\)"):
        assert fit_model(network, loader, head, pool="mean", progress=False).net.head.resamples is None
    assert len(fit_model(network, loader, head, pool="mean", resample=2, progress=False).net.head.resamples.heads) == 2


def test_rows_without_labels_are_resampled(network, loader):
    head = make_pipeline(PCA(3), NearestNeighbors(n_neighbors=1))
    model = fit_model(network, [x for x, _ in loader], head, pool="mean", progress=False)
    rows, _ = extract_features(network, loader, pool="mean", progress=False)
    expected = values(resample_heads(head, rows, n=30), rows)
    assert torch.equal(values(model.net.head.resamples.heads, rows), expected)


class OfNumbers(SVC):
    """A classifier that takes no words."""

    def fit(self, features, labels):
        if np.asarray(labels).dtype.kind != "i":
            raise ValueError("labels must be numbers")
        return super().fit(features, labels)


def test_a_classifier_of_numbers_has_refits_with_the_names(network, loader):
    rows, labels = extract_features(network, loader, pool="mean", progress=False)
    names = np.array(["cat", "dog"])[labels]
    pipeline = fit_with_labels_encoded(make_pipeline(PCA(3), OfNumbers()), rows, names)
    head, plain = name_head(pipeline), make_pipeline(PCA(3), SVC()).fit(rows, names)
    assert resampling.attach_resamples(head, pipeline, rows, names, 3, groups=None, seed=0, ask="") is None
    assert {tuple(refit.classes_) for refit in head.resamples.heads} == {("cat", "dog")}
    assert torch.equal(values(head.resamples.heads, rows), values(resample_heads(plain, rows, names, n=3), rows))


def test_a_search_among_the_steps_keeps_what_it_found(network, loader):
    rows, labels = extract_features(network, loader, pool="mean", progress=False)
    search = GridSearchCV(SVC(), {"C": [0.5, 0.7]}, cv=2)
    fitted = make_pipeline(StandardScaler(), search).fit(rows, labels)
    best = make_pipeline(StandardScaler(), SVC(**fitted[-1].best_params_)).fit(rows, labels)
    assert torch.equal(
        values(resample_heads(fitted, rows, labels, n=2), rows), values(resample_heads(best, rows, labels, n=2), rows)
    )
