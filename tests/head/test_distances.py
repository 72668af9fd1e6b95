"""Distances to training points and densities: against scikit-learn's numbers, autograd and sums along a line."""

import numpy as np
import pytest
import torch
from sklearn.cluster import BisectingKMeans, KMeans, MiniBatchKMeans
from sklearn.decomposition import PCA
from sklearn.neighbors import KernelDensity, LocalOutlierFactor, NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, OneClassSVM
from torch import nn

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ClosedFormHiResCAM,
    ContributionCAM,
    Head,
    PCASVMNet,
    ResidualTarget,
    SVMTarget,
    extract_features,
    mean_activations,
    stage_for,
)
from pytorch_grad_cam_pcasvm.head.distances import NearestDistance, mean_slopes
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError

RNG = np.random.default_rng(0)
TRAINING = RNG.normal(size=(60, 5)) @ RNG.normal(size=(5, 5)) + 3
QUERIES = np.concatenate([RNG.normal(size=(7, 5)) @ RNG.normal(size=(5, 5)) + 2, TRAINING[:2] + 1e-3])


def mean_distance(k):
    def value(x):
        return -torch.cdist(x, torch.tensor(TRAINING)).topk(k, largest=False).values.mean(1)

    return value


def density(bandwidth, weights):
    def value(x):
        squares = torch.cdist(x, torch.tensor(TRAINING)) ** 2
        kernels = torch.exp(-squares / (2 * bandwidth**2)) / (bandwidth * np.sqrt(2 * np.pi)) ** 5
        return ((kernels * torch.tensor(weights)).sum(1) / weights.sum()).log()

    return value


def local_outlier(k):
    """The definition of Breunig et al.: how dense the neighbours lie, compared with x."""
    points = torch.tensor(TRAINING)
    own = torch.cdist(points, points) + torch.diag(torch.full((60,), torch.inf, dtype=torch.float64))
    nearest = own.topk(k, largest=False)
    radii = nearest.values[:, -1]
    densities = 1 / (torch.maximum(nearest.values, radii[nearest.indices]).mean(1) + 1e-10)
    fitted = LocalOutlierFactor(n_neighbors=k, novelty=True).fit(TRAINING)

    def value(x):
        near = torch.cdist(x, points).topk(k, largest=False)
        density = 1 / (torch.maximum(near.values, radii[near.indices]).mean(1) + 1e-10)
        return -densities[near.indices].mean(1) / density - fitted.offset_

    return value


def nearest_centre(estimator):
    return lambda x: -torch.cdist(x, torch.tensor(estimator.cluster_centers_)).amin(1)


WEIGHTS = RNG.uniform(0.5, 2, 60)
KMEANS = KMeans(4, n_init=2, random_state=0).fit(TRAINING)
MINI = MiniBatchKMeans(4, n_init=2, random_state=0).fit(TRAINING)
BISECTING = BisectingKMeans(4, random_state=0).fit(TRAINING)
LIKENESSES = {
    "nearest": (
        NearestNeighbors(n_neighbors=3).fit(TRAINING),
        mean_distance(3),
        lambda fitted, x: -fitted.kneighbors(x)[0].mean(1),
    ),
    "one nearest": (
        NearestNeighbors(n_neighbors=1, algorithm="kd_tree").fit(TRAINING),
        mean_distance(1),
        lambda fitted, x: -fitted.kneighbors(x)[0].mean(1),
    ),
    "density": (
        KernelDensity(bandwidth=0.8).fit(TRAINING, sample_weight=WEIGHTS),
        density(0.8, WEIGHTS),
        lambda fitted, x: fitted.score_samples(x),
    ),
    "plain density": (
        KernelDensity(bandwidth="scott").fit(TRAINING),
        density(60 ** (-1 / 9), np.ones(60)),
        lambda fitted, x: fitted.score_samples(x),
    ),
    "local outlier": (
        LocalOutlierFactor(n_neighbors=6, novelty=True).fit(TRAINING),
        local_outlier(6),
        lambda fitted, x: fitted.decision_function(x),
    ),
    **{
        type(fitted).__name__: (fitted, nearest_centre(fitted), lambda fitted, x: -fitted.transform(x).min(1))
        for fitted in (KMEANS, MINI, BISECTING)
    },
}


@pytest.mark.parametrize("kind", LIKENESSES)
def test_values_and_gradients(kind):
    fitted, by_hand, by_sklearn = LIKENESSES[kind]
    head = Head.of(fitted)
    x = torch.tensor(QUERIES, requires_grad=True)
    value = by_hand(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    trace = head(torch.tensor(QUERIES))
    size = np.abs(by_sklearn(fitted, QUERIES)).max()
    np.testing.assert_allclose(trace.values[-1][:, 0], by_sklearn(fitted, QUERIES), atol=1e-9 * size)
    np.testing.assert_allclose(trace.values[-1][:, 0], value.detach(), atol=1e-9 * size)
    pulled, log_scale = head.pullback(trace, {len(head.stages): torch.ones(1, 1, 1).double()})
    np.testing.assert_allclose(
        (pulled * log_scale.exp().unsqueeze(-1))[:, 0], gradient, atol=1e-8 * float(gradient.abs().max())
    )


@pytest.mark.parametrize("kind", LIKENESSES)
def test_secants_are_exact(kind):
    fitted, by_hand, _ = LIKENESSES[kind]
    head = Head.of(fitted)
    x = torch.tensor(QUERIES)
    for start in (torch.tensor(TRAINING.mean(0, keepdims=True)), x + 1e-9, x.flip(0), x):
        trace, there = head(x), head(start)
        pulled, log_scale = head.pullback(trace, {len(head.stages): torch.ones(1, 1, 1).double()}, there)
        rise = ((pulled * log_scale.exp().unsqueeze(-1))[:, 0] * (x - start)).sum(1)
        change = by_hand(x) - by_hand(start)
        np.testing.assert_allclose(rise, change, atol=1e-10 * float(by_hand(x).abs().max()))
        assert pulled.isfinite().all()


def test_the_secant_of_a_distance_is_the_mean_of_its_gradient():
    head = Head.of(NearestNeighbors(n_neighbors=3).fit(TRAINING))
    x, start = torch.tensor(QUERIES), torch.tensor(TRAINING.mean(0, keepdims=True))
    pulled, _ = head.pullback(head(x), {2: torch.ones(1, 1, 1).double()}, head(start))
    places = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1] + 1 / 8000
    line = (start + places.reshape(-1, 1, 1) * (x - start)).flatten(0, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(mean_distance(3)(line).sum(), line)
    mean = gradient.reshape(4000, *x.shape).mean(0)
    assert (pulled[:, 0] - mean).norm() < 0.1 * mean.norm()


def test_the_mean_slope_of_a_square_is_the_slope_half_way():
    roots = torch.tensor(RNG.normal(size=(2, 5, 5)))
    x, start = torch.tensor(QUERIES), torch.tensor(QUERIES[:1] - 2)
    value, value0 = (torch.stack([(at @ root).square().sum(-1) for root in roots], -1) for at in (x, start))
    matrices = 2 * roots @ roots.mT
    slopes = mean_slopes(lambda at: (matrices @ at.mT).movedim(-1, 0), x, start, value - value0, value)
    half = (x + start) / 2
    torch.testing.assert_close(slopes, torch.stack([half @ matrix for matrix in matrices], 1), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("fitted", [NearestNeighbors(n_neighbors=2), LocalOutlierFactor(n_neighbors=3, novelty=True)])
def test_at_points_of_the_training_set_values_are_right_and_gradients_finite(fitted):
    rows = np.concatenate([TRAINING, *[TRAINING[:1]] * 9])  # the first is there ten times
    fitted.fit(rows)
    head, x = Head.of(fitted), torch.tensor(TRAINING[:3])
    by_sklearn = getattr(fitted, "decision_function", lambda x: -fitted.kneighbors(x)[0].mean(1))
    trace = head(x)
    np.testing.assert_allclose(trace.values[-1][:, 0], by_sklearn(TRAINING[:3]), rtol=1e-9, atol=1e-9)
    pulled, _ = head.pullback(trace, {len(head.stages): torch.ones(1, 1, 1).double()})
    assert pulled.isfinite().all()
    assert not pulled[0].any()


def test_far_from_the_origin_the_nearest_points_are_found():
    rows, x = TRAINING + 1e9, torch.tensor(QUERIES + 1e9)
    distances = (x.unsqueeze(1) - torch.tensor(rows)).norm(dim=-1)
    found, _ = NearestDistance(torch.tensor(rows), 3).evaluate(x)
    torch.testing.assert_close(-found[:, 0], distances.topk(3, largest=False).values.mean(1))


@pytest.mark.parametrize("kind", LIKENESSES)
def test_files(kind, tmp_path):
    head = Head.of(LIKENESSES[kind][0])
    head.save(tmp_path / "head.safetensors")
    other = Head.load(tmp_path / "head.safetensors")
    x = torch.tensor(QUERIES)
    assert torch.equal(other(x).values[-1], head(x).values[-1])
    assert other.digest() == head.digest()
    assert (other.voting.kind, other.voting.arguments) == (head.voting.kind, head.voting.arguments)


torch.manual_seed(0)
BACKBONE = (
    nn
    .Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 7, 3, 1, 1), nn.Softplus())
    .double()
    .eval()
    .requires_grad_(False)
)
GOOD = torch.randn(12, 3, 12, 16, dtype=torch.float64)
IMAGES = torch.randn(3, 3, 12, 16, dtype=torch.float64)
IMAGES[1, :, 4:8, 6:10] += 6


@pytest.mark.parametrize(
    "last",
    [NearestNeighbors(n_neighbors=3), KernelDensity(), LocalOutlierFactor(novelty=True), KMeans(5), OneClassSVM()],
    ids=lambda last: type(last).__name__,
)
def test_maps_of_anomalies(last):
    rows, _ = extract_features(BACKBONE, [GOOD], pool="dense", progress=False)
    pipeline = [StandardScaler(), PCA(4)]
    fitted = make_pipeline(*pipeline).fit(rows)
    last.fit(fitted.transform(rows))
    net = PCASVMNet(BACKBONE, [fitted, last], pool="dense").eval()
    maps = net.anomaly_map(IMAGES)
    output = net(IMAGES)
    np.testing.assert_allclose(maps, -output[:, 0].numpy(), atol=1e-12)
    components = fitted.transform(BACKBONE(IMAGES).flatten(2).mT.flatten(0, 1).detach().numpy())
    expected = {
        "NearestNeighbors": lambda: last.kneighbors(components)[0].mean(1),
        "KernelDensity": lambda: -last.score_samples(components),
        "KMeans": lambda: last.transform(components).min(1),
    }.get(type(last).__name__, lambda: -last.decision_function(components))()
    np.testing.assert_allclose(maps, expected.reshape(3, 6, 8), atol=1e-9 * np.abs(expected).max())
    assert net.anomaly_score(IMAGES).argmax() == 1
    np.testing.assert_allclose(net.anomaly_score(IMAGES, k=4), np.sort(maps.reshape(3, -1), 1)[:, -4:].mean(1))
    # Why is the most anomalous patch one? What makes it like the others is blue.
    target = SVMTarget(sign="-", at="max")
    explained = ContributionCAM(net, ["1"], baseline="zero").explain(IMAGES, target)
    torch.testing.assert_close(
        explained.maps.sum((2, 3)) * explained.log_scale.exp() + explained.baseline_values, explained.values
    )
    np.testing.assert_allclose(explained.values[:, 0], maps.reshape(3, -1).max(1))
    cam = ClosedFormHiResCAM(net, ["1"])
    place = np.unravel_index(maps[1].argmax(), (6, 8))
    assert torch.allclose(
        cam.explain(IMAGES[1:2], target).maps, cam.explain(IMAGES[1:2], SVMTarget(sign="-", at=place)).maps
    )


def test_anomalies_of_whole_images_and_residuals():
    rows, _ = extract_features(BACKBONE, [GOOD], pool="mean", progress=False)
    net = PCASVMNet(BACKBONE, [StandardScaler().fit(rows), NearestNeighbors(n_neighbors=2).fit(rows)], pool="mean")
    scores = net.eval().anomaly_score(IMAGES)
    assert scores.shape == (3,)
    np.testing.assert_allclose(scores, -net(IMAGES)[:, 0])
    maps = ContributionCAM(net, ["3"]).explain(IMAGES, SVMTarget())
    torch.testing.assert_close(maps.maps.sum((2, 3)) + maps.baseline_values, maps.values)
    assert ClosedFormGradCAM(net, ["3"]).explain(IMAGES).maps.any()
    with pytest.raises(ValueError, match="anomaly_map needs a head on positions"):
        net.anomaly_map(IMAGES)
    dense, _ = extract_features(BACKBONE, [GOOD], pool="dense", progress=False)
    residual = PCASVMNet(BACKBONE, PCA(3).fit(dense), pool="dense").eval()
    squares = ResidualTarget(at=(2, 3))(residual(IMAGES))
    np.testing.assert_allclose(residual.anomaly_map(IMAGES)[:, 2, 3], squares)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_cosine_distances(k, dtype, tmp_path):
    rows = extract_features(BACKBONE, [GOOD], pool="dense", progress=False)[0].astype(dtype)
    last = NearestNeighbors(n_neighbors=k, metric="cosine").fit(rows)
    net = PCASVMNet(BACKBONE, last, "3", pool="dense").eval()
    features = BACKBONE(IMAGES).flatten(2).mT.flatten(0, 1).detach().numpy()
    expected = last.kneighbors(features)[0].mean(1).reshape(3, 6, 8)
    np.testing.assert_allclose(net.anomaly_map(IMAGES), expected, atol=1e-12 if dtype == np.float64 else 1e-6)
    for baseline in ("zero", "mean"):
        mean = {"mean": mean_activations(net, [GOOD], "1", progress=False)} if baseline == "mean" else {}
        maps = ContributionCAM(net, ["1"], baseline=baseline, **mean).explain(IMAGES, SVMTarget(sign="-", at="max"))
        total = maps.maps.sum((2, 3)) * maps.log_scale.exp() + maps.baseline_values
        torch.testing.assert_close(total, maps.values, rtol=1e-9, atol=1e-12)
    # A Normalizer in front and half the squared Euclidean distance are the same.
    unit = rows.astype(float) / np.linalg.norm(rows.astype(float), axis=1, keepdims=True)
    own = features / np.linalg.norm(features, axis=1, keepdims=True)
    squares = ((own[:, None] - unit[None]) ** 2).sum(-1)
    half = np.sort(squares, 1)[:, :k].mean(1).reshape(3, 6, 8) / 2
    np.testing.assert_allclose(net.anomaly_map(IMAGES), half, atol=1e-12)
    low, high = net.anomaly_range()
    apart = np.sort(1 - unit @ unit.T + 9 * np.eye(len(unit)), 1)[:, :k].mean(1)
    assert (low, high / 3) == (0, pytest.approx(np.quantile(apart, 0.999), rel=1e-6))
    net.head.save(tmp_path / "head.safetensors")
    assert torch.equal(Head.load(tmp_path / "head.safetensors")(torch.tensor(features)).values[-1],
                       net.head(torch.tensor(features)).values[-1])  # fmt: skip


def test_cosine_distances_of_rows_of_zeros_and_their_gradients():
    bank = np.random.default_rng(0).normal(size=(20, 5))
    bank[3] = 0
    last = NearestNeighbors(n_neighbors=2, metric="cosine").fit(bank)
    queries = np.concatenate([np.random.default_rng(1).normal(size=(6, 5)), np.zeros((1, 5)), -bank[:2], 3 * bank[:2]])
    head = Head.of(last)
    np.testing.assert_allclose(
        -head(torch.tensor(queries)).values[-1][:, 0], last.kneighbors(queries)[0].mean(1), atol=1e-12
    )
    x = torch.tensor(queries[:6], requires_grad=True)
    trace = head(x)
    (expected,) = torch.autograd.grad(trace.values[-1].sum(), x)
    plain = head(x.detach())
    grad, log_scale = head.pullback(plain, {len(plain.values) - 1: None})
    torch.testing.assert_close((grad * log_scale.exp().unsqueeze(-1))[:, 0], expected, rtol=1e-9, atol=1e-12)


def test_patchcores_score_of_cosine_distances():
    rows, _ = extract_features(BACKBONE, [GOOD], pool="dense", progress=False)
    bank = rows[::5] / np.linalg.norm(rows[::5], axis=1, keepdims=True)
    net = PCASVMNet(BACKBONE, NearestNeighbors(metric="cosine", n_neighbors=1).fit(rows[::5]), pool="dense").eval()
    features = BACKBONE(IMAGES).flatten(2).mT.detach().numpy()
    expected = []
    for own in features / np.linalg.norm(features, axis=2, keepdims=True):
        distances = 1 - own @ bank.T
        most = distances.min(1).argmax()
        m = distances[most].argmin()
        around = (1 - bank @ bank[m]).argsort(kind="stable")[:5]
        d = distances[most].min()
        expected.append(d * (1 - np.exp(d) / np.exp(1 - bank[around] @ own[most]).sum()))
    np.testing.assert_allclose(net.anomaly_score(IMAGES, neighbours=5), expected, rtol=1e-9)


def test_what_is_refused():
    for metric in ("sqeuclidean", "cosine"):
        outliers = LocalOutlierFactor(novelty=True, metric=metric).fit(TRAINING)
        with pytest.raises(NoClosedFormError, match=f"metric '{metric}': fit it with 'euclidean'"):
            stage_for(outliers)
    with pytest.raises(NoClosedFormError, match="metric 'sqeuclidean'"):  # of which kneighbors has the squares
        Head.of(NearestNeighbors(metric="sqeuclidean").fit(TRAINING))
    with pytest.raises(NoClosedFormError, match="metric 'manhattan': fit it with 'euclidean'"):
        Head.of(NearestNeighbors(metric="manhattan").fit(TRAINING))
    with pytest.raises(NoClosedFormError, match="kernel 'tophat': fit it with 'gaussian'"):
        Head.of(KernelDensity(kernel="tophat").fit(TRAINING))
    with pytest.raises(NoClosedFormError, match="fit it with novelty=True"):
        Head.of(LocalOutlierFactor().fit(TRAINING))
    labels = TRAINING[:, 0] > 3
    with pytest.raises(NoClosedFormError, match="KMeans as a step before others"):
        Head.of(make_pipeline(KMeans(3), SVC()).fit(TRAINING, labels))
    rows, _ = extract_features(BACKBONE, [GOOD], pool="mean", progress=False)
    net = PCASVMNet(
        BACKBONE, make_pipeline(PCA(2), SVC()).fit(rows, rows[:, 0] > np.median(rows[:, 0])), pool="mean"
    ).eval()
    with pytest.raises(ValueError, match="does not tell what is like the training set"):
        net.anomaly_score(IMAGES)
