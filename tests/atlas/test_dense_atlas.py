"""Atlases of dense heads: rows are patches, and what is stored equals what ``explain`` gives at their places."""

import io

import numpy as np
import pytest
import torch
from atlases import backbone, images
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch.utils.data import TensorDataset

from pytorch_grad_cam_pcasvm import (
    ClosedFormAblationCAM,
    ClosedFormLayerCAM,
    ClosedFormScoreCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    atlas,
    extract_features,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.studio.atlas.explainer import ImageExplainer

COUNT = 12
X, LABELS = images(COUNT)
DATA = TensorDataset(X, LABELS)
NAMES = np.array(["crack", "fine", "hole"])


def network(*steps):
    net = backbone()
    rows, _ = extract_features(net, [X], net[0], pool="dense", progress=False)
    labels = NAMES[(rows[:, 0] > np.median(rows[:, 0])).astype(int) + (rows[:, 3] > np.median(rows[:, 3]))]
    head = make_pipeline(StandardScaler(), PCA(3), *steps).fit(rows, labels)
    return PCASVMNet(net, head, net[0], pool="dense").eval(), head, rows


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    net, head, rows = network(SVC())
    store = atlas.build(
        net, DATA, [net.backbone[0][1]], tmp_path_factory.mktemp("patches") / "atlas", block=8, progress=False
    )
    return store, net, head, rows


def test_rows_are_patches(built):
    store, _, head, rows = built
    assert len(store) == 4 * COUNT
    assert store.rows.tolist() == [image for image in range(COUNT) for _ in range(4)]
    at = store.rows * 36 + store.places @ [6, 1]
    assert len(set(at.tolist())) == 4 * COUNT
    np.testing.assert_allclose(store.components, head[:2].transform(rows[at]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(store.scores, head.decision_function(rows[at]), rtol=1e-5, atol=1e-5)
    assert store.predictions.tolist() == head.predict(rows[at]).tolist()
    assert store.labels.tolist() == LABELS[store.rows].tolist()
    assert store.ids[5] == f"1 {tuple(store.places[5].tolist())}"
    with pytest.raises(ValueError, match="labels are those of images"):
        store.correct  # noqa: B018


@pytest.mark.parametrize("baseline", ["mean", "neutral"])
@pytest.mark.parametrize("layer", ["0", "0.1"])
def test_maps_are_those_at_the_places(built, tmp_path, layer, baseline):
    _, net, *_ = built
    mean = mean_activations(net, [X], layer)
    options = {"mean": mean, "baseline": baseline}
    store = atlas.build(net, DATA, [layer], tmp_path / "atlas", progress=False, **options)
    cam = ContributionCAM(net, [layer], **options)
    for row in (0, 7, 41):
        place = tuple(store.places[row].tolist())
        image = X[store.rows[row]].unsqueeze(0)
        direct = cam.explain(image, [PCATarget(b, at=place) for b in range(3)])
        stored = store.maps([row])
        assert (stored.maps - direct.maps).abs().max() <= 1e-3 * direct.nu.max()
        torch.testing.assert_close(stored.values.double(), direct.values.double(), rtol=1e-5, atol=1e-5)
        made, decision = store.explain([row], SVMTarget("hole")), cam.explain(image, SVMTarget("hole", at=place))
        assert abs(float(made.values - decision.values)) <= 1e-5
        total = made.maps.sum() + made.remainder + made.baseline_values
        assert abs(float(total - made.values)) <= 2e-3 * float(made.maps.abs().sum())
        if baseline == "mean":  # where components start, as no boundary is looked for
            assert (made.maps - decision.maps).abs().max() <= 2e-3 * decision.nu.max()


def test_each_class_has_its_strongest_patch(built):
    store, net, head, rows = built
    output = net(X)
    margins = output.margins.movedim(1, -1).reshape(COUNT, 36, 3).amax(-1).detach().numpy()
    predicted = head.predict(rows).reshape(COUNT, 36)
    for image in range(COUNT):
        (kept,) = np.nonzero(store.rows == image)
        positions = store.places[kept] @ [6, 1]
        present = np.unique(predicted[image])
        assert len(present) > 1
        for name in present:
            (of_class,) = np.nonzero(predicted[image] == name)
            assert of_class[margins[image][of_class].argmax()] in positions


def test_the_least_normal_patch_is_kept(tmp_path):
    net, *_ = network(NearestNeighbors(n_neighbors=2))
    store = atlas.build(net, X, [net.backbone[0][1]], tmp_path / "atlas", patches=2, progress=False)
    worst = net.anomaly_map(X).reshape(COUNT, 36).argmax(1)
    positions = (store.places @ [6, 1]).reshape(COUNT, 2)
    assert all(int(worst[image]) in positions[image] for image in range(COUNT))
    assert store.to_html(tmp_path / "page").exists()


@pytest.mark.slow
def test_engines_and_resuming(built, tmp_path):
    store, net, *_ = built
    again = atlas.build(
        net, DATA, [net.backbone[0][1]], tmp_path / "atlas", block=8, shard_size=8, processes=2, progress=False
    )
    for name in ("components", "places", "ids", "nu"):
        assert np.array_equal(getattr(again, name), getattr(store, name))
    (tmp_path / "atlas" / "part-00001.parquet").unlink()
    resumed = atlas.build(
        net, DATA, [net.backbone[0][1]], tmp_path / "atlas", block=8, shard_size=8, verify=True, progress=False
    )
    assert torch.equal(resumed.maps(slice(None)).maps, store.maps(slice(None)).maps)
    with pytest.raises(ValueError, match="patches"):
        atlas.build(
            net, DATA, [net.backbone[0][1]], tmp_path / "atlas", patches=3, block=8, shard_size=8, progress=False
        )


@pytest.mark.parametrize("method", [ClosedFormLayerCAM, ClosedFormAblationCAM, ClosedFormScoreCAM])
def test_a_method_that_is_not_linear(tmp_path, method):
    net, *_ = network(SVC())
    store = atlas.build(net, DATA, [net.backbone[0][1]], tmp_path / "atlas", method=method, patches=1, progress=False)
    place = tuple(store.places[3].tolist())
    direct = method(net, [net.backbone[0][1]]).explain(X[3:4], SVMTarget(at=place))
    assert (store.explain([3], SVMTarget()).maps - direct.maps).abs().max() <= 1e-3 * direct.nu.max()


def test_thumbnails_show_the_patch(built):
    store, *_ = built
    one, other = (np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), float) for data in store.thumbnails([0, 1]))
    assert np.abs(one - other).max() > 50


def test_what_is_refused(tmp_path):
    net, *_ = network(SVC())
    with pytest.raises(ValueError, match="chooses the patches itself"):
        atlas.build(net, DATA, [net.backbone[0][1]], tmp_path / "a", targets=[SVMTarget(at=(0, 0))], progress=False)
    with pytest.raises(ValueError, match="patches must be a positive integer"):
        atlas.build(net, DATA, [net.backbone[0][1]], tmp_path / "a", patches=0, progress=False)


def test_an_atlas_of_patches_holds_few_gradients_at_once(built, tmp_path):
    """Of 64 components and a few patches they took 11 GB: one image is explained at a time, in blocks of targets."""
    _, net, _, _ = built
    store = atlas.build(net, DATA, [net.backbone[0][1]], tmp_path / "atlas", progress=False)
    assert store.manifest["block"] == 1
    explainer = ImageExplainer(net, ContributionCAM, net.backbone[0][1], {}, [], 3, 1)
    assert explainer.cam.max_bytes == 1 << 27
    assert ImageExplainer(net, ContributionCAM, net.backbone[0][1], {"max_bytes": 5}, [], 3, 1).cam.max_bytes == 5
