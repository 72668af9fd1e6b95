"""Reductions that are fitted while features are extracted."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA, IncrementalPCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MaxAbsScaler, Normalizer, StandardScaler
from sklearn.svm import SVC
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_grad_cam_pcasvm import ContributionCAM, CovariancePCA, PCASVMNet, extract_features

X, Y = torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()).double().eval()


def batches(size):
    return DataLoader(TensorDataset(X.double(), Y), batch_size=size)


@pytest.mark.parametrize("size", [60, 16, 7, 1])
@pytest.mark.parametrize("components", [3, 20, None])
def test_all_components_that_there_are_equal_those_of_all_rows_at_once(backbone, size, components):
    features, _ = extract_features(backbone, batches(60), progress=False)
    reduction = make_pipeline(StandardScaler(), IncrementalPCA(components))
    actual, labels = extract_features(backbone, batches(size), fit=reduction, progress=False)
    np.testing.assert_array_equal(labels, Y)
    np.testing.assert_allclose(reduction[0].mean_, features.mean(0), rtol=1e-10)
    np.testing.assert_allclose(reduction[0].var_, features.var(0), rtol=1e-10)
    np.testing.assert_allclose(actual, reduction.transform(features), atol=1e-10)
    if components != 3:  # nothing is cut off on the way, so that the order of rows does not count
        expected = PCA(svd_solver="full").fit_transform(StandardScaler().fit_transform(features))
        np.testing.assert_allclose(np.abs(actual), np.abs(expected), atol=1e-8)


@pytest.mark.parametrize("size", [60, 7, 1])
@pytest.mark.parametrize("components", [3, 0.9, None])
def test_components_of_parts_are_those_of_all_rows_at_once(backbone, size, components):
    features, _ = extract_features(backbone, batches(60), progress=False)
    reduction = make_pipeline(StandardScaler(), CovariancePCA(components))
    actual, _ = extract_features(backbone, batches(size), fit=reduction, progress=False)
    expected = make_pipeline(StandardScaler(), PCA(components, svd_solver="covariance_eigh")).fit_transform(features)
    np.testing.assert_allclose(actual, expected, atol=1e-8)


def test_a_reduction_that_was_fitted_here_is_explained(backbone):
    reduction = make_pipeline(MaxAbsScaler(), FunctionTransformer(), Normalizer(), IncrementalPCA(4), "passthrough")
    components, labels = extract_features(backbone, batches(16), fit=reduction, progress=False)
    net = PCASVMNet(backbone, [reduction, SVC().fit(components, labels)])
    maps = ContributionCAM(net, ["1"]).explain(X[:3].double())
    np.testing.assert_allclose(maps.output.components, components[:3], atol=1e-10)
    np.testing.assert_allclose(maps.maps.sum((2, 3)) + maps.remainder + maps.baseline_values, maps.values, atol=1e-10)


def test_a_fit_begins_anew_and_leaves_the_old_one_if_it_does_not_end(backbone):
    scaler = StandardScaler().fit(np.ones((9, 20)))
    first, _ = extract_features(backbone, batches(16), fit=scaler, progress=False)
    again, _ = extract_features(backbone, batches(16), fit=scaler, progress=False)
    np.testing.assert_array_equal(first, again)
    assert scaler.n_samples_seen_ == 60
    mean = scaler.mean_

    class Broken:
        def __iter__(self):
            yield X[:4].double() + 1
            raise OSError("a broken disk")

    with pytest.raises(OSError, match="a broken disk"):
        extract_features(backbone, Broken(), fit=scaler, progress=False)
    assert scaler.mean_ is mean


def test_tensors_stay_tensors(backbone):
    components, labels = extract_features(backbone, batches(16), fit=IncrementalPCA(2), as_numpy=False, progress=False)
    assert isinstance(components, torch.Tensor)
    assert components.shape == (60, 2)
    assert torch.equal(labels, Y)


@pytest.mark.parametrize(
    ("fit", "words"),
    [
        (PCA(2), "PCA has no partial_fit, so it needs all features at once: use CovariancePCA"),
        (make_pipeline(StandardScaler(), SVC()), "fit takes a reduction, but SVC has no transform"),
        (IncrementalPCA, "an instance of scikit-learn estimator instead of a class"),
    ],
)
def test_what_cannot_be_fitted_batch_by_batch_is_refused(backbone, fit, words):
    with pytest.raises(TypeError, match=words):
        extract_features(backbone, batches(16), fit=fit, progress=False)


def test_an_iterator_is_refused_where_it_would_end_too_early(backbone):
    with pytest.raises(ValueError, match=r"run through several times, but this one is an iterator: use DataLoader"):
        extract_features(backbone, iter(batches(16)), fit=StandardScaler(), progress=False)
