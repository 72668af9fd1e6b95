"""What can be asked of an atlas: held against numpy on all rows at once, and against the network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from atlases import images, layer, problem
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA, KernelPCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from torch.utils.data import TensorDataset

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ClosedFormLayerCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    SVMTarget,
    atlas,
    figures,
    recombined,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    net, data = problem()
    out = tmp_path_factory.mktemp("store") / "atlas"
    return atlas.build(net, data, [layer(net)], out, shard_size=32, progress=False)


@pytest.fixture(scope="module")
def explained():
    net, data = problem()
    with ContributionCAM(net, [layer(net)]) as cam:
        return cam.explain(data.tensors[0])


def test_the_ends_of_a_component(store):
    for component, count in ((0, 1), (2, 12), (3, 90), (1, 500)):
        low, high = store.extremes(component=component, count=count)
        order = np.argsort(store.components[:, component])
        np.testing.assert_array_equal(low, order[:count])
        np.testing.assert_array_equal(high, order[::-1][:count])
    assert store.extremes(component=2).low.shape == (12,)


def test_equal_values_keep_the_order_of_rows(tmp_path):
    net, data = problem()
    twice = TensorDataset(*(torch.cat([tensor[:8]] * 5) for tensor in data.tensors))
    store = atlas.build(net, twice, [layer(net)], tmp_path / "atlas", shard_size=16, progress=False)
    assert store.extremes(0, 5).low.tolist() == list(range(store.extremes(0, 1).low[0], 40, 8))[:5]


@pytest.mark.parametrize("by", [None, "label", "prediction", "sex"])
def test_mean_maps(store, explained, by):
    groups = {
        None: np.zeros(90, int),
        "label": store.labels,
        "prediction": store.predictions,
        "sex": np.array(["f", "m", "m", "f", "d"] * 18),
    }[by]
    found = store.mean_map(component=2, by=groups if by == "sex" else by)
    assert found.groups == sorted(set(groups.tolist()))
    for g, group in enumerate(found.groups):
        maps = explained.maps[groups == group, 2].double().numpy()
        scale = np.abs(maps).max()
        np.testing.assert_allclose(found.maps[g], maps.mean(0), atol=5e-4 * scale)
        errors = maps.std(0, ddof=1) / np.sqrt(len(maps))
        np.testing.assert_allclose(found.standard_errors[g], errors, atol=1e-3 * scale, rtol=1e-3)
        assert found.counts[g] == len(maps)


def test_a_group_of_one_has_no_standard_error(store):
    alone = np.zeros(90, int)
    alone[7] = 1
    found = store.mean_map(0, by=alone)
    assert found.counts.tolist() == [89, 1]
    assert np.isnan(found.standard_errors[1]).all()
    assert not np.isnan(found.standard_errors[0]).any()


def test_means_of_maps_with_factors_taken_out_of_them(tmp_path):
    # A KernelPCA far from all it was fitted on: exp(log_scale) underflows.
    x, y = images(40)
    net, _ = problem()
    features = net.backbone(x).detach().numpy()
    head = make_pipeline(KernelPCA(2, kernel="rbf", gamma=1.0), SVC()).fit(features, y)
    far = PCASVMNet(net.backbone, head)
    data = TensorDataset(x * 60, y)
    store = atlas.build(far, data, [layer(net)], tmp_path / "atlas", method=ClosedFormGradCAM, progress=False)
    assert store.log_scale.max() < -100
    found = store.mean_map(0, by="label")
    assert np.isfinite(found.maps).all()
    maps = store.maps(slice(None))
    for g in range(3):
        rows = y.numpy() == g
        factors = np.exp(store.log_scale[rows, 0] - store.log_scale[rows, 0].max())
        expected = (maps.maps[rows, 0].double().numpy() * factors[:, None, None]).mean(0)
        np.testing.assert_allclose(found.maps[g], expected, rtol=1e-6)
        assert found.log_scale[g] == store.log_scale[rows, 0].max()


def test_means_of_maps_with_opposites(tmp_path):
    net, data = problem()
    store = atlas.build(net, data, [layer(net)], tmp_path / "atlas", method=ClosedFormLayerCAM, progress=False)
    maps = store.maps(slice(None))
    every = store.mean_maps()
    for b, found in enumerate(every):
        expected = (maps.maps[:, b].relu() - maps.opposite[:, b].relu()).double().mean(0)
        assert relative(found.maps[0], expected) < 1e-6
        np.testing.assert_array_equal(found.maps, store.mean_map(b).maps)
    assert min(each.maps.min() for each in every) < 0 < max(each.maps.max() for each in every)


def test_maps_below_zero_are_kept_where_nu_is_not(tmp_path):
    torch.manual_seed(0)
    net, data = problem()
    gelu = torch.nn.Sequential(
        torch.nn.Sequential(*list(net.backbone[0])[:-1], torch.nn.GELU()), *list(net.backbone)[1:]
    )
    whole = PCASVMNet(gelu, net.head)
    with ClosedFormLayerCAM(whole, ["0"]) as cam:
        expected = cam.explain(data.tensors[0])
    store = atlas.build(whole, data, ["0"], tmp_path / "atlas", method=ClosedFormLayerCAM, progress=False)
    size = expected.maps[:, :4].flatten(2).abs().amax(-1)[..., None, None]
    assert float(((store.maps(slice(None)).maps - expected.maps[:, :4]) / size).abs().max()) < 2e-3
    np.testing.assert_allclose(store.nu, expected.nu[:, :4], rtol=1e-4, atol=1e-7)


def test_rows_by_their_names(store):
    assert store.nearest("17", count=3).rows.tolist() == store.nearest(17, count=3).rows.tolist()
    np.testing.assert_array_equal(store.maps(["80", "3"]).values, store.components[[80, 3]])
    with pytest.raises(KeyError, match=r"no image is named 'cats/7.jpg'"):
        store.maps("cats/7.jpg")


@pytest.mark.slow
def test_pictures_for_figures(store):
    rows = [3, 80]
    pictures = store.pictures(rows)
    assert pictures.shape == (2, 3, 12, 12)
    assert 0 <= pictures.min() < pictures.max() <= 1
    figures.plot_maps(pictures, store.maps(rows), signed=True)
    figures.plot_decision(pictures, store.maps(rows), store.head)


def test_neighbours(store):
    rows, distances = store.nearest(17, count=5)
    every = np.linalg.norm(store.components - store.components[17], axis=1)
    every[17] = np.inf
    np.testing.assert_array_equal(rows, np.argsort(every)[:5])
    np.testing.assert_allclose(distances, np.sort(every)[:5])


def test_disagreements(store):
    ordered = np.sort(store.scores, 1)
    margins = ordered[:, -1] - ordered[:, -2]
    net, data = problem()
    with torch.no_grad():
        values = SVMTarget()(net(data.tensors[0])).numpy()
    assert relative(store.margins, values) < 1e-5
    wrong = store.disagreements()
    assert set(wrong) == set(np.flatnonzero(store.labels != store.predictions))
    assert (np.diff(margins[wrong]) <= 0).all()
    near = store.disagreements("boundary", count=10)
    np.testing.assert_array_equal(near, np.argsort(margins)[:10])


def test_another_head_is_asked_without_the_network(store, explained):
    net, data = problem()
    heads = {
        "on components": SVC(kernel="poly", degree=2).fit(store.components, store.labels),
        "linear": LinearSVC().fit(store.components, store.labels),
        "refitted": SVC(C=5).fit(store.components, store.labels),
    }
    for name, head in heads.items():
        targets = [SVMTarget(), SVMTarget(2), SVMTarget(0, versus=1), SVMTarget(versus="runner-up")]
        actual = store.explain(slice(None), targets, head=head)
        # The whole network once more, with this head behind its reduction.
        fitted = _reduction()
        whole = PCASVMNet(net.backbone, [*fitted, head])
        with ContributionCAM(whole, [layer(net)]) as cam:
            expected = cam.explain(data.tensors[0], targets)
        assert float((actual.maps - expected.maps).abs().max() / expected.nu.max()) < 1e-3, name
        assert relative(actual.values, expected.values) < 1e-5
        missed = actual.baseline_values - expected.baseline_values  # of decisions they are 0
        assert float(missed.abs().max() / expected.values.abs().max()) < 1e-5
        kept = recombined(explained, head, targets)
        assert float((actual.maps - kept.maps).abs().max() / kept.nu.max()) < 1e-3


def _reduction():
    net, data = problem()
    features = net.backbone(data.tensors[0]).detach().numpy()
    reduction = make_pipeline(StandardScaler(), PCA(4)).fit(features)
    return [step for _, step in reduction.steps]


def test_heads_of_other_components_are_refused(store):
    net, data = problem()
    features = net.backbone(data.tensors[0]).detach().numpy()
    other = make_pipeline(StandardScaler(with_std=False), PCA(4), SVC()).fit(features, store.labels)
    with pytest.raises(ValueError, match="reduces features differently"):
        store.explain(0, head=other)
    with pytest.raises(ValueError, match="head 'mine': the head reduces features differently"):
        store.to_html("nowhere", heads={"mine": other})
    narrow = SVC().fit(store.components[:, :2], store.labels)
    with pytest.raises(ValueError, match="takes 2 components, but there are maps of 4"):
        store.explain(0, head=narrow)
    same = make_pipeline(StandardScaler(), PCA(4), SVC(C=9)).fit(features, store.labels)
    assert store.explain(0, head=same).maps.shape == (1, 1, 6, 6)


def test_features_as_many_as_components(tmp_path):
    # The pipeline is not to be taken for one that was fitted on the components.
    net, data = problem("linear", 3, 8)
    store = atlas.build(net, data, [layer(net)], tmp_path / "atlas", progress=False)
    with ContributionCAM(net, [layer(net)]) as cam:
        expected = cam.explain(data.tensors[0][:9], SVMTarget(1))
    for head in (None, net.head):
        actual = store.explain(range(9), SVMTarget(1), head=head)
        assert float((actual.maps - expected.maps).abs().max() / expected.nu.max()) < 1e-3


def test_rows_in_any_order(store, explained):
    for rows in (5, [80, 3, 3, 41], slice(60, None, 7), np.arange(90) % 2 == 0, np.int64(7), -1):
        maps = store.maps(rows)
        index = np.atleast_1d(np.arange(90)[rows])
        assert float((maps.maps - explained.maps[index, :4]).abs().max() / explained.nu.max()) < 1e-3
        np.testing.assert_array_equal(maps.values, store.components[index])
        assert len(store.thumbnails(rows)) == len(index)
    for rows, match in ((90, "90 rows"), ([1, -91], "90 rows"), (True, "mask"), ([[1, 2]], "mask")):
        with pytest.raises(IndexError, match=match):
            store.maps(rows)
    with pytest.raises(ValueError, match="no rows"):
        store.maps([])
    with pytest.raises(TypeError, match="must be an integer"):
        store.nearest(2.7)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s: s.extremes(4), "4 components, numbered from 0: 4 is out of range"),
        (lambda s: s.extremes(True), "True is out of range"),
        (lambda s: s.extremes(0, 0), "count must be a positive integer"),
        (lambda s: s.mean_map(-1), "-1 is out of range"),
        (lambda s: s.mean_map(0, by="age"), "'label' or 'prediction'"),
        (lambda s: s.mean_map(0, by=[1, 2]), "one value for each of the 90 rows"),
        (lambda s: s.nearest(0, count=-1), "count"),
        (lambda s: s.disagreements("right"), "'wrong' or 'boundary'"),
        (lambda s: s.explain(0, []), "targets is empty"),
        (lambda s: s.explain(0, SVMTarget("cat")), "'cat' is not a class"),
        (lambda s: s.explain(0, PCATarget(9)), "4 components"),
        (lambda s: s.export("csv", "x"), "one of npz, virelay, zarr"),
    ],
)
def test_bad_questions(store, call, match):
    with pytest.raises(ValueError, match=match):
        call(store)


def test_labels_that_are_names(tmp_path):
    x, y = images(30)
    names = ["ant", "bee", "cat"]
    net, _ = problem()
    features = net.backbone(x).detach().numpy()
    head = make_pipeline(PCA(3), SVC()).fit(features, [names[k] for k in y])
    named = PCASVMNet(net.backbone, head)
    data = TensorDataset(x, y)
    data.classes = names  # as an ImageFolder has them
    store = atlas.build(named, data, [layer(net)], tmp_path / "atlas", progress=False)
    expected = head.predict(features) == np.array([names[k] for k in y])
    np.testing.assert_array_equal(store.correct, expected)
    assert store.labels[:3].tolist() == names
    other = SVC().fit(store.components, store.labels)
    assert store.explain([17], SVMTarget("cat"), head=other).maps.shape == (1, 1, 6, 6)
    bare = atlas.build(named, TensorDataset(x, y), [layer(net)], tmp_path / "bare", progress=False)
    told = r"the labels \[0, 1, 2\] of the data are not classes of the head, which are \['ant', 'bee', 'cat'\]: rename"
    with pytest.raises(ValueError, match=told):
        bare.disagreements()


def test_labels_that_are_no_classes(tmp_path):
    net, data = problem()
    x, y = data.tensors
    none = atlas.build(net, TensorDataset(x, y + 7), [layer(net)], tmp_path / "none", progress=False)
    with pytest.raises(
        ValueError, match=r"the labels \[7, 8, 9\] .* are not classes of the head, which are \[0, 1, 2\]"
    ):
        none.disagreements()
    assert len(none.disagreements("boundary")) == 90
    some = atlas.build(net, TensorDataset(x, y + 2), [layer(net)], tmp_path / "some", progress=False)
    np.testing.assert_array_equal(np.sort(some.disagreements()), np.flatnonzero(some.labels != some.predictions))
    assert (some.labels[some.correct] == 2).all()  # what is no class is never predicted


@pytest.mark.optional
def test_to_pandas_of_labels_that_are_no_classes(tmp_path):
    pytest.importorskip("pandas")
    net, data = problem()
    x, y = data.tensors
    store = atlas.build(net, TensorDataset(x, y + 7), [layer(net)], tmp_path / "atlas", progress=False)
    assert "correct" not in store.to_pandas()


def test_heads_without_classes(tmp_path):
    net, data = problem()
    features = net.backbone(data.tensors[0]).detach().numpy()
    only = PCASVMNet(net.backbone, PCA(3).fit(features))
    store = atlas.build(only, data, [layer(net)], tmp_path / "pca", progress=False)
    assert store.predictions is None
    np.testing.assert_array_equal(store.scores, store.components)
    with pytest.raises(ValueError, match="no classes"):
        store.disagreements()
    svm = SVC().fit(store.components, store.labels)
    assert store.explain([1], head=svm).maps.shape == (1, 1, 6, 6)


def test_calibrated_heads(tmp_path):
    net, data = problem()
    features = net.backbone(data.tensors[0]).detach().numpy()
    calibrated = CalibratedClassifierCV(SVC(), ensemble=False)
    head = make_pipeline(StandardScaler(), PCA(4), calibrated).fit(features, data.tensors[1].numpy())
    whole = PCASVMNet(net.backbone, head)
    store = atlas.build(whole, data, [layer(net)], tmp_path / "atlas", progress=False)
    np.testing.assert_allclose(store.scores, head.predict_proba(features), atol=1e-6)
    with ContributionCAM(whole, [layer(net)]) as cam:
        expected = cam.explain(data.tensors[0], SVMTarget(2))
    actual = store.explain(slice(None), SVMTarget(2))
    assert float((actual.maps - expected.maps).abs().max() / expected.nu.max()) < 1e-3
    with pytest.raises(ValueError, match=r"not linear|probabilit"):
        store.explain(0, ProbabilityTarget(1))


@pytest.mark.optional
def test_to_pandas(store):
    pytest.importorskip("pandas")
    frame = store.to_pandas()
    np.testing.assert_array_equal(frame.label == frame.prediction, frame.correct)
    assert list(frame) == [
        *("row", "id", "label", "prediction", "correct", "score 0", "score 1", "score 2"),
        *("p1", "p2", "p3", "p4"),
    ]
    np.testing.assert_array_equal(frame[["p1", "p2", "p3", "p4"]], store.components)


def test_exports(store, tmp_path):
    with pytest.warns(FutureWarning, match=r"export\('npz'\) goes in version 0.7: .*; to_pandas\(\) gives the numbers"):
        arrays = np.load(store.export("npz", tmp_path / "atlas.npz"))
    scaled = arrays["maps"].astype(np.float32) * arrays["nu"][..., None, None]
    np.testing.assert_array_equal(scaled, store.maps(slice(None)).maps)
    np.testing.assert_array_equal(arrays["components"], store.components)
    assert arrays["ids"].tolist() == store.ids.tolist()
    with pytest.raises(FileExistsError, match="already exists"):
        store.export("npz", tmp_path / "atlas.npz")
    with pytest.raises(FileNotFoundError, match="make it first"):
        store.export("npz", tmp_path / "nowhere" / "atlas.npz")


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore:export:FutureWarning")
def test_export_to_zarr(store, tmp_path):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(store.export("zarr", tmp_path / "atlas.zarr")), mode="r")
    scaled = group["maps"][...].astype(np.float32) * group["nu"][...][..., None, None]
    np.testing.assert_array_equal(scaled, store.maps(slice(None)).maps)
    assert group.attrs["ids"] == store.ids.tolist()


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore:export:FutureWarning")
def test_export_to_virelay(store, tmp_path):
    h5py = pytest.importorskip("h5py")
    path = store.export("virelay", tmp_path / "project")
    project = json.loads((path / "project.yaml").read_text())["project"]
    assert (path / project["label_map"]).exists()
    with h5py.File(path / project["attributions"]["sources"][0]) as file:
        assert file["attribution"].shape == (90, 1, 96, 96)
        expected = store.explain(4).maps[0, 0].numpy()
        found = file["attribution"][4, 0].reshape(6, 16, 6, 16).mean((1, 3))
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.9
        assert file["label"][...].tolist() == store.predictions.tolist()
    with h5py.File(path / project["dataset"]["path"]) as file:
        assert file["data"].shape == (90, 3, 96, 96)
        assert file["label"][...].tolist() == store.labels.tolist()
    with h5py.File(path / project["analyses"][0]["sources"][0]) as file:
        np.testing.assert_allclose(file["components/embedding/pca"], store.components, rtol=1e-6)


@pytest.mark.document
@pytest.mark.optional
@pytest.mark.slow
def test_the_page_about_atlases_runs(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    page = (Path(__file__).parents[2] / "docs" / "atlas.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python")[1:]]
    code = "".join(block for block in blocks if "store" in block)
    x, y = images(90)
    names = np.array(["cat", "dog", "elk"])[y]
    net, _ = problem()
    features = net.backbone(x).detach().numpy()
    head = make_pipeline(PCA(4), SVC()).fit(features, names)
    backbone = net.backbone
    backbone.features = [layer(net)]
    another_svm = SVC(kernel="linear").fit(PCA(4).fit_transform(features), names)
    monkeypatch.chdir(tmp_path)
    found = {"net": PCASVMNet(backbone, head), "backbone": backbone, "another_svm": another_svm}
    found["dataset"] = list(zip(x, names, strict=True))
    try:
        exec(code.replace('out="atlas")', 'out="atlas", progress=False)'), found)
    finally:
        del backbone.features
    assert len(found["low"]) == 12
    assert (tmp_path / "explorer" / "index.html").exists()
    assert (tmp_path / "ends.png").exists()
    assert (tmp_path / "decision.png").exists()
