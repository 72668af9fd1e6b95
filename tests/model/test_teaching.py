"""Teaching: patches of faulty photos that show the fault, without masks."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    BaselineWarning,
    ContributionCAM,
    Head,
    PCASVMNet,
    SVMTarget,
    choose_patches,
    extract_features,
    fit_model,
)
from pytorch_grad_cam_pcasvm.runtime.errors import NoBoundaryError
from pytorch_grad_cam_pcasvm.starts.boundary_path import PathBoundary
from pytorch_grad_cam_pcasvm.studio.model.choices import choose_candidate, measure_evidence, score_left_out
from pytorch_grad_cam_pcasvm.studio.model.teaching import (
    Suspicion,
    draw_places,
    explain_faults,
    gather_rows,
    measure_distances,
    reduce_patches,
)

GRID, CELL = 8, 4
KINDS = {"scratch": (0, 3.0), "stain": (1, -3.0)}  # channel and change


class Net(nn.Module):
    """A network whose positions are patches of 4x4 pixels."""

    def __init__(self):
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(3, 12, CELL, CELL), nn.Tanh())
        self.coarse = nn.Sequential(nn.Conv2d(12, 16, 3, 2, 1), nn.Tanh())

    def forward(self, x):
        return self.coarse(self.fine(x)).mean((2, 3))


def photos(count=24, seed=0):
    """Return photos of noise, a third of which has a scratch, and another a stain; their labels; and where."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 3, GRID * CELL, GRID * CELL)) * 0.3
    labels, places = np.array([["good", *KINDS][n % 3] for n in range(count)]), {}
    for n, label in enumerate(labels):
        if label in KINDS:
            row, column = random.integers(0, GRID, 2)
            channel, change = KINDS[label]
            x[n, channel, row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] += change
            places[n] = row, column
    return torch.from_numpy(x), labels, places


@pytest.fixture(scope="module")
def taught():
    torch.manual_seed(1)
    net = Net().double().eval()
    x, labels, places = photos()
    loader = [(x[n : n + 5], labels[n : n + 5]) for n in range(0, len(x), 5)]
    head = make_pipeline(StandardScaler(), PCA(6), SVC(kernel="linear"))
    model = fit_model(net, loader, head, layer="coarse", pool="mean", normal="good", progress=False)
    return net, model, loader, x, labels, places


def test_chosen_patches_show_the_faults(taught):
    net, model, loader, x, labels, planted = taught
    rows, names, places = choose_patches(model, loader, "fine", count=1, good=64, progress=False)
    faults = names != "good"
    assert {int(n): (int(r), int(c)) for n, r, c in places[faults]} == planted
    assert names.tolist() == labels[places[:, 0]].tolist()
    assert np.bincount(places[~faults, 0], minlength=24)[labels == "good"].tolist() == [64 // 8] * 8
    features = net.fine(x).detach().numpy()
    np.testing.assert_allclose(rows, features[places[:, 0], :, places[:, 1], places[:, 2]], atol=1e-12)
    fitted = make_pipeline(StandardScaler(), PCA(8), SVC(class_weight="balanced")).fit(rows, names)
    new, truth, where = photos(seed=7)
    decided = PCASVMNet(net, fitted, "fine", pool="dense").eval()
    evidence = decided(new).margins.detach()
    assert roc_auc_score(truth != "good", (evidence[:, 1:].amax(1) - evidence[:, 0]).flatten(1).amax(1)) > 0.95
    found = decided.predict(new)
    assert np.mean([found[n][place] == truth[n] for n, place in where.items()]) > 0.8


@pytest.mark.parametrize("start", ["neutral", "mean", "none found"])
def test_heads_of_folds_have_the_maps_that_each_has_alone(taught, start, monkeypatch):
    net, model, loader, x, labels, _ = taught
    features, _ = extract_features(net, loader, "coarse", pool="mean", progress=False)
    heads = []
    for part in range(3):
        own = np.arange(len(x)) % 5 != part
        head = Head.of(make_pipeline(StandardScaler(), PCA(6), SVC(kernel="linear")).fit(features[own], labels[own]))
        head.training_set.means |= model.means
        heads.append(head)
    nets = [PCASVMNet(net, head, "coarse", pool="mean").eval() for head in heads]
    cam = ContributionCAM(nets[0], ["fine"], baseline="mean" if start == "mean" else "neutral")
    if start == "none found":

        def find(*_):
            raise NoBoundaryError("there are none")

        monkeypatch.setattr(PathBoundary, "find_point", find)
    faulty = np.flatnonzero(labels != "good")
    maps = explain_faults(cam, heads, x[faulty], labels[faulty].tolist(), "good", (GRID, GRID))
    assert explain_faults(cam, heads, x[:0], [], "good", (GRID, GRID)).shape == (3, 0, GRID, GRID)
    monkeypatch.undo()
    assert cam.baseline == ("neutral" if start == "neutral" else "mean")
    for number in range(3) if cam.baseline == "mean" else range(1):
        for row in range(len(faulty)):
            target = SVMTarget(labels[faulty[row]], versus="good")
            alone = ContributionCAM(nets[number], ["fine"], baseline=cam.baseline)
            expected = alone.explain(x[faulty[row]][None], [target]).maps[0, 0].float()
            torch.testing.assert_close(maps[number, row], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_chooses_the_patches_of_the_cpu(taught):
    _, model, loader, *_ = taught
    expected = choose_patches(model, loader, "fine", count=1, good=64, progress=False)
    model.net.cuda()
    try:
        actual = choose_patches(model, loader, "fine", count=1, good=64, progress=False)
    finally:
        model.net.cpu()
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-10)
    assert actual[1].tolist() == expected[1].tolist()
    assert actual[2].tolist() == expected[2].tolist()


def test_suspicion_is_the_sum_of_contributions_and_distances_each_standardised(taught):
    net, model, loader, x, labels, _ = taught
    faulty, good = np.flatnonzero(labels != "good"), np.flatnonzero(labels == "good")
    rows, _, places = choose_patches(model, loader, "fine", count=3, good=10**6, progress=False)
    features = net.fine(x).detach().flatten(2).mT.numpy()
    reduction = make_pipeline(StandardScaler(), PCA(12)).fit(features.reshape(-1, 12))
    reduced = reduction.transform(features.reshape(-1, 12)).reshape(len(x), -1, 12)
    others = reduced[good].reshape(-1, 12)
    distances = np.array([[np.linalg.norm(patch - others, axis=1).min() for patch in reduced[n]] for n in faulty])
    maps = []
    for n in faulty:
        with ContributionCAM(model.net, ["fine"]) as cam:
            maps.append(cam.explain(x[n : n + 1], [SVMTarget(labels[n], versus="good")]).maps[0, 0].flatten().numpy())
    total = sum((part - np.mean(part)) / np.std(part) for part in (np.array(maps), distances))
    expected = {
        (int(n), *map(int, np.unravel_index(place, (GRID, GRID))))
        for n, ranks in zip(faulty, total, strict=True)
        for place in np.argsort(-ranks)[:3]
    }
    chosen = {tuple(place) for place in places.tolist() if labels[place[0]] != "good"}
    assert len(chosen & expected) >= 0.95 * len(expected)  # single precision may exchange equals
    assert len(rows) == 3 * len(faulty) + len(good) * GRID * GRID


def test_where_maps_say_nothing_the_farthest_patches_are_the_faults():
    distances = np.random.default_rng(1).random((3, 20))
    alone = Suspicion(np.arange(3), np.zeros((3, 20)), distances)
    assert alone.pick(2).tolist() == np.argsort(-distances, 1)[:, :2].tolist()
    usual = Suspicion(np.arange(3, 6), np.zeros((3, 20)), distances / 2)
    assert alone.list_doubtful(usual).tolist() == [n for n in range(3) if distances[n].max() <= np.quantile(
        distances.max(1) / 2, 0.95
    )]  # fmt: skip


def test_distances_to_parts_of_the_good_photos_leave_out_the_object_itself():
    random = np.random.default_rng(3)
    features = torch.from_numpy(random.normal(size=(9, 5, 2, 3)))

    def read():
        yield features[:4], range(4)
        yield features[4:], range(4, 9)

    reduced = reduce_patches(read, 9)
    rows = features.flatten(2).mT.reshape(-1, 5).numpy()
    expected = make_pipeline(StandardScaler(), PCA(5)).fit_transform(rows).reshape(9, 6, 5)
    np.testing.assert_allclose(np.abs(reduced), np.abs(expected), atol=1e-5)
    good, parts, objects = np.array([0, 2, 4, 6, 8]), np.array([0, 0, 1, 1, 0, 1, 1, 0, 2]), np.arange(9)
    objects[6] = objects[0]  # the same part, photographed twice
    measured = measure_distances(reduced, np.arange(9), good, parts, objects=objects)
    for photo, position, part in np.ndindex(9, 6, 3):
        others = [n for n in good if parts[n] == part and objects[n] != objects[photo]]
        near = [np.linalg.norm(expected[photo, position] - row) for n in others for row in expected[n]]
        assert measured[photo, position, part] == pytest.approx(min(near, default=np.inf), abs=1e-4)
    places = draw_places(good, 6, 12)
    assert np.bincount(places[:, 0], minlength=9).tolist() == [2, 0, 2, 0, 2, 0, 2, 0, 2]
    back = places[::-1].copy()
    np.testing.assert_array_equal(gather_rows(read, back),
                                  features.flatten(2)[back[:, 0], :, back[:, 1]])  # fmt: skip


def test_photos_without_anything_suspicious_are_doubtful():
    random = np.random.default_rng(0)
    usual = Suspicion(np.arange(20), random.normal(size=(20, 30)), random.normal(size=(20, 30)))
    contributions, distances = random.normal(size=(5, 30)), random.normal(size=(5, 30))
    for n in (0, 1, 3):
        contributions[n, n], distances[n, n] = 20, 20
    faulty = Suspicion(np.array([31, 32, 33, 34, 35]), contributions, distances)
    assert faulty.list_doubtful(usual).tolist() == [33, 35]
    assert faulty.pick(2)[[0, 1, 3], 0].tolist() == [0, 1, 3]


def test_photos_are_scored_by_the_head_that_was_fitted_without_them(taught):
    net, _, loader, x, _, _ = taught
    rows, names, where = extract_features(net, loader, "fine", pool="dense", places=True, progress=False)
    heads = [
        make_pipeline(StandardScaler(), PCA(4), SVC(kernel=kernel)).fit(
            rows[where[:, 0] % 2 == part], names[where[:, 0] % 2 == part]
        )
        for part, kernel in ((1, "rbf"), (0, "linear"))
    ]
    folds = [(np.arange(1, 24, 2), np.arange(0, 24, 2)), (np.arange(0, 24, 2), np.arange(1, 24, 2))]
    nets = [PCASVMNet(net, head, "fine", pool="dense").eval() for head in heads]
    kept, features = {}, net.fine(x).detach()
    score_left_out(
        lambda: [(features, range(len(x)))],
        [one.head for one in nets],
        folds,
        "good",
        lambda n, one: kept.update({n: one}),
    )
    for n in range(24):
        margins = nets[n % 2](x[n : n + 1]).margins[0].detach()
        torch.testing.assert_close(kept[n], margins[1:].amax(0) - margins[0])
    evidence = measure_evidence(nets[0].head, features[0].flatten(1).T, "scratch")
    margins = nets[0](x[:1]).margins[0].detach().flatten(1)
    torch.testing.assert_close(evidence, margins[[0, 2]].amax(0) - margins[1])


def test_components_are_chosen_of_folds_without_photos_in_common(monkeypatch):
    random = np.random.default_rng(0)
    photos_of, labels = np.repeat(np.arange(40), 20), np.repeat(["a", "b"], 400)
    rows = random.normal(size=(800, 30)) + 0.3 * (labels == "b")[:, None]
    seen = []
    from pytorch_grad_cam_pcasvm.studio.model import choices

    compare = choices.compare_candidates

    def spy(x, numbers, folds, *rest):
        assert len(x) == 800
        for fit, test in folds:
            assert not set(photos_of[fit]) & set(photos_of[test])
            seen.append(len(test))
        return compare(x, numbers, folds, *rest)

    monkeypatch.setattr(choices, "compare_candidates", spy)
    best, candidates = choose_candidate(rows, labels, photos_of, SVC(), [{"C": 1.0}, {"C": 10.0}], [4, 16, 64])
    assert sum(seen) == 800
    assert [(one.components, one.settings["C"]) for one in candidates] == [(4, 1.0), (4, 10.0), (16, 1.0), (16, 10.0)]
    assert best in candidates


@pytest.mark.parametrize(("options", "message"), [
    ({"normal": "fine"}, "normal='fine' is no class of the model, which has"),
    ({"pool": "mean"}, "pool='dense' is expected"),
    ({"layers": []}, "target"),
])  # fmt: skip
def test_what_cannot_teach_is_refused(taught, options, message):
    _, model, loader, *_ = taught
    with pytest.raises(ValueError, match=message):
        choose_patches(model, loader, "fine", progress=False, **options)


def test_photos_of_one_kind_teach_nothing(taught):
    net, model, loader, x, labels, _ = taught
    good = [(x[labels == "good"], labels[labels == "good"])]
    with pytest.raises(ValueError, match="photos with a fault and good ones, of the class 'good', are needed"):
        choose_patches(model, good, "fine", progress=False)
    with pytest.raises(ValueError, match="yields no labels"):
        choose_patches(model, [x], "fine", progress=False)
    bare = PCASVMNet(net, make_pipeline(PCA(2), SVC()).fit(*extract_features(net, loader, progress=False))).eval()
    with pytest.raises(ValueError, match="no means of the training images"):
        choose_patches(bare, loader, "fine", normal="good", progress=False)
    with pytest.warns(BaselineWarning):
        rows, _, _ = choose_patches(
            bare, loader, "fine", normal="good", layers=["fine"], count=1, good=16, progress=False
        )
    assert len(rows) == 16 + 16
