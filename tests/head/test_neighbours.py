"""The margin of nearest neighbours: its sign is the vote, its secants are exact."""

import warnings

import numpy as np
import pytest
import torch
from heads import by_autograd, pulled_back, trace_of
from problems import closed_form
from reference import relative
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError


def problem(classes, k, seed=0, metric="euclidean", count=60):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % classes)
    x = rng.normal(size=(count, 4)) + 0.7 * rng.normal(size=(classes, 4))[labels] + 100 * (metric == "euclidean")
    queries = x[rng.permutation(count)[:30]] + 0.5 * rng.normal(size=(30, 4))
    return KNeighborsClassifier(k, metric=metric).fit(x, np.array(list("abcde"))[labels]), queries


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", "cosine"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("seed", range(3))
def test_the_sign_of_two_classes_is_the_vote(k, seed, metric):
    estimator, x = problem(2, k, seed, metric)
    head = Head.of(estimator)
    trace = trace_of(head, x)
    assert head.labels(trace).tolist() == estimator.predict(x).tolist()
    distances = np.linalg.norm(x[:, None] - estimator._fit_X, axis=-1) ** 2
    if metric == "cosine":
        x, points = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, estimator._fit_X))
        distances = 2 - 2 * x @ points.T
    ranks = (k // 2 + k % 2, k // 2 + 1)
    each = [np.sort(distances[:, estimator._y == c], 1)[:, rank - 1] for c, rank in enumerate(ranks)]
    assert np.abs(trace.values[-1][:, 0].numpy() - (each[0] - each[1])).max() < 1e-9 * distances.max()


@pytest.mark.parametrize("k", [1, 3, 5, 7])
@pytest.mark.parametrize("classes", [3, 5])
def test_of_more_classes_the_plurality_decides(classes, k):
    estimator, x = problem(classes, k, seed=k)
    head = Head.of(estimator)
    trace = trace_of(head, x)
    assert head.labels(trace).tolist() == estimator.predict(x).tolist()
    votes = trace.values[-1][:, classes:]
    assert relative(votes / k, estimator.predict_proba(x)) < 1e-12
    margins = head.voting.margins(trace.values[-1])
    most = votes.amax(-1) > k / 2
    assert most.any()
    assert torch.equal(margins.argmax(-1)[most], votes.argmax(-1)[most])
    assert (margins.amax(-1) >= 0).all()
    assert ((margins > 0).sum(-1) <= 1).all()


@pytest.mark.parametrize("classes", [2, 4])
def test_gradients_and_secants(classes):
    estimator, x = problem(classes, 3)
    head = Head.of(estimator)
    trace, start = trace_of(head, x), trace_of(head, estimator._fit_X.mean(0, keepdims=True))
    seed = torch.zeros(1, classes, trace.values[-1].shape[1]).double()
    size = 1 if classes == 2 else classes  # the rest are votes, without a gradient
    seed[0, :, :size] = torch.randn(classes, size).double()
    seeds = {len(head.stages): seed}
    assert relative(pulled_back(head, trace, seeds), by_autograd(head, x, seeds)) < 1e-9
    grad, log_scale = head.pullback(trace, seeds, start)
    found = (grad * log_scale.exp().unsqueeze(-1) * (trace.values[0] - start.values[0]).unsqueeze(1)).sum(-1)
    terms = seed * (trace.values[-1] - start.values[-1]).unsqueeze(1)
    assert (found - terms.sum(-1)).abs().max() < 1e-9 * terms.abs().sum(-1).max()
    # Little of it is the correction: the mean of the gradient along the line, at 4,000 places, is nearly the same.
    places = (torch.arange(4000).double() + 0.5) / 4000
    line = start.values[0] + places[:, None] * (trace.values[0][:1] - start.values[0])
    mean = pulled_back(head, trace_of(head, line), {len(head.stages): seed}).mean(0)
    assert relative((grad * log_scale.exp().unsqueeze(-1))[0], mean) < 0.1


@pytest.mark.parametrize(
    ("options", "classes", "message"),
    [
        ({"n_neighbors": 4}, 3, "lets 4 neighbours vote, which often tie: fit it with an odd"),
        ({"weights": "distance"}, 2, "weighs votes by 'distance'"),
        ({"metric": "manhattan"}, 2, "the metric 'manhattan': fit it with 'euclidean' or 'cosine'"),
        ({"n_neighbors": 11}, 4, "too few for most of 11 votes"),
    ],
)
def test_what_is_refused(options, classes, message):
    x = np.random.default_rng(0).normal(size=(20, 3))
    with pytest.raises(NoClosedFormError, match=message):
        closed_form(KNeighborsClassifier(**options).fit(x, np.arange(20) % classes))


@pytest.mark.parametrize("before", [[], [StandardScaler(), PCA(3)]])
def test_neighbours_tell_of_the_same_features_in_two_classes(before):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 5)), np.arange(30) % 2
    x[3] = x[4] * (1 + 1e-12)  # as rounding makes it
    pipeline = make_pipeline(*before, KNeighborsClassifier(3))
    with pytest.warns(UserWarning, match="2 training images of KNeighborsClassifier have the features of one of"):
        Head.of(pipeline.fit(x, y))
    y[3] = y[4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Head.of(pipeline.fit(x, y))
