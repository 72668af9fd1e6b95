"""Dense features: a row for each position, against features, averages and labels that are computed here."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_grad_cam_pcasvm import Head, PCASVMNet, extract_features
from pytorch_grad_cam_pcasvm.network.patches import coreset

torch.manual_seed(0)
X = torch.randn(5, 3, 24, 32, dtype=torch.float64)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU())

    def forward(self, x):
        return self.block(self.stem(x))


BACKBONE = Backbone().double().eval().requires_grad_(False)


def features(images=X, average=1):
    """Patch features by hand: each position of the finest grid, row by row, channels of both layers."""
    stem = BACKBONE.stem(images)
    block = BACKBONE.block(stem)
    if average > 1:
        stem, block = (
            nn.functional
            .unfold(layer, average, padding=average // 2)
            .unflatten(1, (layer.shape[1], average**2))
            .mean(2)
            .unflatten(2, layer.shape[2:])
            for layer in (stem, block)
        )
    rows = []
    for image in range(len(images)):
        height, width = stem.shape[2:]
        for row in range(height):
            for column in range(width):
                # Bilinear: the block's grid is half as fine, and its borders are repeated.
                y, x = max((row + 0.5) / 2 - 0.5, 0), max((column + 0.5) / 2 - 0.5, 0)
                top, left = int(y), int(x)
                bottom, right = min(top + 1, height // 2 - 1), min(left + 1, width // 2 - 1)
                dy, dx = y - top, x - left
                b = block[image]
                upper = (1 - dx) * b[:, top, left] + dx * b[:, top, right]
                lower = (1 - dx) * b[:, bottom, left] + dx * b[:, bottom, right]
                rows.append(torch.cat([stem[image, :, row, column], (1 - dy) * upper + dy * lower]))
    return torch.stack(rows).numpy()


ROWS = features()
LABELS = np.array(["fine", "crack", "hole"])[
    (ROWS[:, 0] > np.median(ROWS[:, 0])).astype(int) + (ROWS[:, 7] > np.median(ROWS[:, 7]))
]


def loader(*others, batch=2):
    return DataLoader(TensorDataset(X, *others), batch_size=batch)


@pytest.mark.parametrize("average", [1, 3])
def test_features_of_several_layers_are_on_the_finest_grid(average):
    pool = "dense" if average == 1 else ("dense", 3)
    rows, labels, places = extract_features(
        BACKBONE, loader(torch.arange(5)), ["stem", "block"], pool=pool, places=True, progress=False
    )
    np.testing.assert_allclose(rows, features(average=average), atol=1e-12)
    assert labels.tolist() == np.repeat(np.arange(5), 12 * 16).tolist()
    expected = [(image, row, column) for image in range(5) for row in range(12) for column in range(16)]
    assert [tuple(place) for place in places.tolist()] == expected


@pytest.mark.parametrize("head", [SVC(), SVC(decision_function_shape="ovo"), LogisticRegression(), "binary", "none"])
def test_a_head_acts_on_every_position(head):
    labels = LABELS
    if head == "binary":
        head, labels = SVC(), np.where(LABELS == "fine", "fine", "defect")
    last = [] if head == "none" else [head]
    pipeline = make_pipeline(StandardScaler(), PCA(3), *last).fit(ROWS, labels)
    net = PCASVMNet(BACKBONE, pipeline, ["stem", "block"], pool="dense").eval()
    output = net(X)

    def at_positions(values):
        return np.moveaxis(values.reshape(5, 12, 16, -1), -1, 1)

    components = pipeline[:2].transform(ROWS)
    np.testing.assert_allclose(output.components, at_positions(components), atol=1e-10)
    np.testing.assert_allclose(output.features, at_positions(ROWS), atol=1e-12)
    if not last:
        np.testing.assert_allclose(output, at_positions(components), atol=1e-10)
        np.testing.assert_allclose(net.predict(X), at_positions(components), atol=1e-10)
        return
    scores = pipeline.decision_function(ROWS)
    scores = np.stack([-scores, scores], 1) if scores.ndim == 1 else scores
    np.testing.assert_allclose(output, at_positions(scores), atol=1e-9)
    predicted = pipeline.predict(ROWS).reshape(5, 12, 16)
    assert net.predict(X).tolist() == predicted.tolist()
    assert output.labels().tolist() == predicted.tolist()
    assert output.margins.shape[:1] == output.margins.shape[:1]
    one = output[2]
    assert one.shape == output.shape[1:]
    assert torch.equal(one.components, output.components[2])
    assert one.labels().tolist() == predicted[2].tolist()
    assert [part.shape for part in output] == [one.shape] * 5


def test_a_regressor_of_every_position():
    target = ROWS[:, 0] ** 2
    pipeline = make_pipeline(StandardScaler(), PCA(3), SVR()).fit(ROWS, target)
    net = PCASVMNet(BACKBONE, pipeline, ["stem", "block"], pool="dense").eval()
    expected = pipeline.predict(ROWS).reshape(5, 1, 12, 16)
    np.testing.assert_allclose(net(X), expected, atol=1e-9)
    np.testing.assert_allclose(net.predict(X), expected[:, 0], atol=1e-9)


def test_many_rows_are_computed_in_blocks(monkeypatch):
    pipeline = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(ROWS, LABELS)
    net = PCASVMNet(BACKBONE, pipeline, ["stem", "block"], pool="dense").eval()
    whole, calls = net(X), []
    monkeypatch.setattr("pytorch_grad_cam_pcasvm.head.stack._BYTES", 100 * net.head.bytes_per_target(1))
    evaluate = Head.evaluate
    monkeypatch.setattr(Head, "evaluate", lambda head, rows: calls.append(len(rows)) or evaluate(head, rows))
    assert torch.allclose(net(X).as_subclass(torch.Tensor), whole.as_subclass(torch.Tensor))
    assert calls == [100] * 9 + [60]


def test_masks_are_labels_of_patches():
    masks = torch.zeros(5, 24, 32, dtype=torch.long)
    masks[:, :, 16:] = 2  # half of all columns
    masks[1, 0:2, 0:2] = 7  # one patch of 2x2 pixels
    masks[2, 4, 4] = 1  # a quarter of a patch
    masks[3, :12] = 255
    options = {"pool": "dense", "progress": False, "places": True}
    rows, labels, places = extract_features(BACKBONE, loader(masks), "stem", ignore_index=255, purity=0.9, **options)
    expected = {}
    for image, row, column in np.ndindex(5, 12, 16):
        patch = masks[image, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten().tolist()
        most = max(set(patch), key=patch.count)
        if most != 255 and patch.count(most) >= 0.9 * len(patch):
            expected[image, row, column] = most
    assert {tuple(place): label for place, label in zip(places.tolist(), labels.tolist(), strict=True)} == expected
    assert rows.shape == (len(expected), 6)
    quarter, _, _ = extract_features(BACKBONE, loader(masks), "stem", ignore_index=255, **options)
    assert len(quarter) == len(expected) + 1


def write_out_patches(masks, coverage):
    """Return the label of each patch of 2x2 pixels: the most frequent one other than 0, if it has enough of it."""
    expected = {}
    for image, row, column in np.ndindex(len(masks), 12, 16):
        patch = masks[image, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten().tolist()
        others = [label for label in patch if label != 0]
        most = max(sorted(set(others)), key=others.count, default=0)
        expected[image, row, column] = most if others.count(most) >= coverage * len(patch) else 0
    return expected


@pytest.mark.parametrize("coverage", [0.25, 0.3, 0.5, 1.0])
def test_a_patch_has_the_label_of_small_things(coverage):
    masks = torch.from_numpy(np.random.default_rng(0).choice([0, 0, 0, 0, 1, 2, 255], (5, 24, 32)))
    masks[0] = 0
    expected = write_out_patches(masks, coverage)
    options = {"pool": "dense", "progress": False, "places": True, "coverage": coverage}
    _, labels, places = extract_features(BACKBONE, loader(masks), "stem", **options)
    assert {tuple(place): label for place, label in zip(places.tolist(), labels.tolist(), strict=True)} == expected
    _, labels, places = extract_features(BACKBONE, loader(masks), "stem", ignore_index=255, **options)
    kept = {place: label for place, label in expected.items() if label != 255}
    assert {tuple(place): label for place, label in zip(places.tolist(), labels.tolist(), strict=True)} == kept
    _, labels, _ = extract_features(BACKBONE, loader(masks + 3), "stem", **options | {"background": 3})
    assert sorted(labels.tolist()) == sorted(label + 3 for label in expected.values())


def test_purity_is_that_of_the_label_that_was_chosen():
    masks = torch.zeros(5, 24, 32, dtype=torch.long)
    masks[0, 0, 0] = 1  # a quarter
    masks[0, 0:2, 2] = 1  # a half
    options = {"pool": "dense", "progress": False, "coverage": 0.2, "purity": 0.5}
    _, labels = extract_features(BACKBONE, loader(masks), "stem", **options)
    assert np.bincount(labels).tolist() == [5 * 192 - 2, 1]


def test_rare_labels_have_an_equal_part_of_a_sample():
    masks = torch.zeros(5, 24, 32, dtype=torch.long)
    masks[1, 0:2, 0:4] = 1  # two patches
    masks[2, :, 0:4] = 1  # 24 patches
    masks[2, 0:2, 8:14] = 2  # three
    masks[3] = 1
    options = {"pool": "dense", "progress": False, "sample": 10, "places": True, "seed": 4}
    _, labels, places = extract_features(BACKBONE, loader(masks), "stem", **options)
    counts = [np.bincount(labels[places[:, 0] == image], minlength=3).tolist() for image in range(5)]
    assert counts == [[10, 0, 0], [8, 2, 0], [4, 3, 3], [0, 10, 0], [10, 0, 0]]
    _, again, others = extract_features(BACKBONE, loader(masks, batch=3), "stem", **options)
    assert (places.tolist(), labels.tolist()) == (others.tolist(), again.tolist())
    _, _, plain = extract_features(BACKBONE, loader(torch.arange(5)), "stem", **options)
    of_one_label = [0, 3, 4]
    assert places[np.isin(places[:, 0], of_one_label)].tolist() == plain[np.isin(plain[:, 0], of_one_label)].tolist()


def test_a_sample_of_each_image_does_not_depend_on_the_batches():
    options = {"pool": "dense", "sample": 7, "seed": 3, "places": True, "progress": False}
    rows, labels, places = extract_features(BACKBONE, loader(torch.arange(5)), "stem", **options)
    again, _, _ = extract_features(BACKBONE, loader(torch.arange(5), batch=3), "stem", **options)
    assert np.bincount(places[:, 0]).tolist() == [7] * 5
    assert labels.tolist() == places[:, 0].tolist()
    np.testing.assert_allclose(rows, again, atol=1e-12)
    np.testing.assert_allclose(rows[0], BACKBONE.stem(X)[places[0, 0], :, places[0, 1], places[0, 2]], atol=1e-12)
    other, _ = extract_features(BACKBONE, loader(), "stem", pool="dense", sample=0.1, progress=False)
    assert len(other) == 5 * round(0.1 * 192)


def test_a_coreset_covers_the_features_greedily():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(80, 4)).astype(np.float32)
    chosen = coreset(points, 12, seed=1)
    assert len(set(chosen.tolist())) == 12
    expected = [int(chosen[0])]
    for _ in range(11):
        distances = [min(np.linalg.norm(point - points[other]) for other in expected) for point in points]
        expected.append(int(np.argmax(distances)))
    assert chosen.tolist() == expected
    rows, _ = extract_features(BACKBONE, loader(), "stem", pool="dense", coreset=0.05, progress=False)
    assert rows.shape == (round(0.05 * 5 * 192), 6)


def test_labels_of_dense_features_may_be_tensors_or_names():
    rows, labels = extract_features(
        BACKBONE, [(X[:2], ["a", "b"]), (X[2:3], ["c"])], "block", pool="dense", progress=False
    )
    assert labels.tolist() == ["a"] * 48 + ["b"] * 48 + ["c"] * 48
    _, labels = extract_features(BACKBONE, loader(torch.arange(5)), "block", pool="dense", as_numpy=False)
    assert isinstance(labels, torch.Tensor)
    assert labels.tolist() == np.repeat(np.arange(5), 48).tolist()
    assert rows.shape == (144, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "mean"}, "labels are masks"),
        ({}, "labels are masks"),
        ({"pool": ("dense", 2)}, "'dense', odd size"),
        ({"pool": "dense", "sample": 0}, "sample must be a number from 1"),
        ({"pool": "dense", "coreset": 1.5}, "coreset must be"),
        ({"pool": "dense", "purity": 2}, "purity must be a share"),
        ({"pool": "dense", "coverage": 0.0}, "coverage must be a share above 0"),
        ({"pool": "mean", "coverage": 0.2}, "coverage and places are for rows of positions"),
        ({"pool": "max", "places": True}, "are for rows of positions: use pool='dense'"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        extract_features(BACKBONE, loader(torch.zeros(5, 24, 32)), "stem", progress=False, **options)
    with pytest.raises(ValueError, match="neither one for each image"):
        extract_features(BACKBONE, loader(torch.zeros(5, 3)), "stem", pool="dense", progress=False)


@pytest.mark.optional
def test_patch_tokens_without_class_and_register_tokens():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, reg_tokens=2, depth=2).eval().double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    rows, _ = extract_features(model, [images], "norm", pool="dense", progress=False)
    with torch.no_grad():
        expected = model.forward_features(images)[:, 3:].flatten(0, 1)
    np.testing.assert_allclose(rows, expected, atol=1e-10)
    net = PCASVMNet(model, PCA(3).fit(rows), "norm", pool="dense").eval()
    assert net(images).shape == (2, 3, 4, 4)


def test_volumes():
    backbone = nn.Sequential(nn.Conv3d(1, 4, 3, 2, 1), nn.ReLU()).double().eval()
    volumes = torch.randn(2, 1, 8, 6, 4, dtype=torch.float64)
    masks = (torch.randn(2, 8, 6, 4) > 0).long()
    rows, labels, places = extract_features(
        backbone, [(volumes, masks)], pool="dense", places=True, purity=0.6, progress=False
    )
    with torch.no_grad():
        expected = backbone(volumes)
    assert places.shape == (len(rows), 4)
    for row, label, (image, *place) in zip(rows, labels, places.tolist(), strict=True):
        np.testing.assert_allclose(row, expected[(image, slice(None), *place)], atol=1e-12)
        patch = masks[(image, *(slice(2 * k, 2 * k + 2) for k in place))].double()
        assert label == (patch.mean() > 0.5)
    net = PCASVMNet(backbone, PCA(2).fit(rows), pool="dense").eval()
    assert net(volumes).shape == (2, 2, 4, 3, 2)


@pytest.mark.parametrize("amount", [400, 1.0])
@pytest.mark.parametrize("rounding", [0.0, 1e-7])
def test_a_coreset_repeats_nothing(amount, rounding):
    random = np.random.default_rng(0)
    different = random.normal(size=(90, 12))
    rows = different[np.concatenate([np.arange(90), random.integers(0, 90, 310)])]
    rows = (rows * (1 + rounding * random.uniform(-1, 1, rows.shape))).astype(np.float32)
    with pytest.warns(UserWarning, match="has 90 patches in place of 400, since of the 400 no more differ"):
        chosen = coreset(rows, amount, seed=2)
    assert len(chosen) == 90
    nearest = np.linalg.norm(rows[chosen][:, None].astype(float) - different[None], axis=-1).argmin(1)
    assert sorted(nearest.tolist()) == [*range(90)]


@pytest.mark.filterwarnings("error")
def test_a_coreset_of_rows_that_all_differ_says_nothing():
    rows = np.random.default_rng(0).normal(size=(80, 5))
    assert sorted(coreset(rows, 1.0).tolist()) == [*range(80)]
    repeated = np.concatenate([rows, rows])
    assert len(np.unique(repeated[coreset(repeated, 80)], axis=0)) == 80
    assert len(coreset(np.ones((7, 3)), 1)) == 1


def test_features_of_a_blank_background_are_not_repeated():
    images = torch.full((4, 3, 32, 48), 0.5).double()
    images[:, :, :, :16] = torch.rand(4, 3, 32, 16, generator=torch.Generator().manual_seed(0))
    every, _ = extract_features(BACKBONE, [images], "stem", pool="dense", progress=False)
    different = len(np.unique(every.round(4), axis=0))
    assert different < len(every)
    with pytest.warns(UserWarning, match=f"the coreset has {different} patches in place of {len(every)}"):
        rows, _ = extract_features(BACKBONE, [images], "stem", pool="dense", coreset=1.0, progress=False)
    assert len(np.unique(rows.round(4), axis=0)) == len(rows) == different
