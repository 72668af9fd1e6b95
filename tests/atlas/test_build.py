"""Building an atlas: the same bytes whoever builds it, refusals, and what is left when it is stopped."""

import copy
import errno
import itertools
import json
import multiprocessing
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from atlases import Counted, Deadly, Odd, Pictures, Slow, backbone, contents, folder, images, layer, problem
from PIL import Image
from problems import damaged
from reference import gap, relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from pytorch_grad_cam_pcasvm import (
    BaselineWarning,
    ClosedFormGradCAM,
    ClosedFormLayerCAM,
    CoarseMapWarning,
    ContributionCAM,
    Head,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    atlas,
)
from pytorch_grad_cam_pcasvm.methods.warn_once import WarnOnce
from pytorch_grad_cam_pcasvm.runtime import files
from pytorch_grad_cam_pcasvm.studio.atlas import disk
from pytorch_grad_cam_pcasvm.studio.atlas.engines import ForwardedWarning, tell
from pytorch_grad_cam_pcasvm.studio.data.images import Images

TO_TENSOR = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def build(out, net=None, data=None, **options):
    given, rows = problem()
    net, data = net or given, rows if data is None else data
    options = {"shard_size": 32, "progress": False} | options
    return atlas.build(net, data, [layer(net)], out, **options)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("atlas") / "built"
    return build(out)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5},
        {"batch_size": 90},
        {"workers": 2, "batch_size": 33},
        pytest.param({"processes": 2}, marks=pytest.mark.slow),
        {"thumbnails": True},
    ],
    ids=str,
)
def test_who_builds_it_does_not_matter(built, tmp_path, options):
    store = build(tmp_path / "atlas", **options)
    assert contents(store.folder) == contents(built.folder)


def test_readers_end_without_an_error(tmp_path, monkeypatch):
    started, start = [], multiprocessing.process.BaseProcess.start

    def noted(process):
        started.append(process)
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", noted)
    build(tmp_path / "atlas", workers=2)
    assert [process.exitcode for process in started] == [0, 0]


def test_the_size_of_shards_does_not_matter(built, tmp_path):
    for size in (1, 48, 1000):
        store = build(tmp_path / str(size), shard_size=size)
        for name in ("rows", "components", "scores", "labels", "predictions", "nu", "log_scale", "baseline_values"):
            np.testing.assert_array_equal(getattr(store, name), getattr(built, name))
        assert torch.equal(store.maps(slice(None)).maps, built.maps(slice(None)).maps)
        assert store.thumbnails(slice(None)) == built.thumbnails(slice(None))


@pytest.fixture
def alone(tmp_path_factory):
    """Let one process at a time have a Ray cluster on this machine: of two, one may take the other down."""
    filelock = pytest.importorskip("filelock")
    with filelock.FileLock(tmp_path_factory.getbasetemp().parent / "ray.lock"):
        yield


@pytest.fixture
def interrupted():
    """Let SIGALRM do what Ctrl-C does, which runs of several tests at a time ignore."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.optional
def test_ray_writes_the_same(built, tmp_path, alone):
    pytest.importorskip("ray")
    before = set(threading.enumerate())
    store = build(tmp_path / "ray", engine="ray", processes=2)
    assert contents(store.folder) == contents(built.folder)
    with pytest.raises(RuntimeError, match=r"image 40 .* no file for 40"):
        build(tmp_path / "bad", data=Pictures(problem()[1], (40,)), engine="ray", processes=1)
    for thread in set(threading.enumerate()) - before:
        if thread.name != "tqdm_monitor":
            thread.join(10)
            assert not thread.is_alive(), f"Ray ends this process when {thread.name} calls it after its shutdown"


@pytest.fixture
def cluster(alone):
    """Start a cluster that is somebody else's."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def _await_actors(ray):
    """Wait until the actors of a build are gone, in a cluster that is still there."""
    assert ray.is_initialized()
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU") != 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.optional
def test_a_ray_cluster_outlives_a_build_and_a_build_its_actors(built, tmp_path, cluster):
    data = Deadly(problem()[1], (40,), tmp_path / "deaths", 1)
    data.deaths.mkdir()
    other = cluster.remote(threading.Event).options(num_cpus=1).remote()  # leaves room for one actor of two
    cluster.get(other.is_set.remote())
    store = build(tmp_path / "atlas", data=data, engine="ray", processes=2)
    cluster.kill(other)
    assert contents(store.folder) == contents(built.folder)
    assert len(list(data.deaths.iterdir())) == 1
    _await_actors(cluster)


@pytest.mark.slow
@pytest.mark.optional
def test_a_build_whose_actors_always_die_keeps_its_shards(built, tmp_path, cluster):
    data = Deadly(problem()[1], (40,), tmp_path / "deaths", 100)
    data.deaths.mkdir()
    with pytest.raises(RuntimeError, match=r"Ray could not make the shards: .* all finished shards are kept"):
        build(tmp_path / "atlas", data=data, engine="ray", processes=1)
    assert len(list(data.deaths.iterdir())) == 4
    _await_actors(cluster)
    assert contents(build(tmp_path / "atlas").folder) == contents(built.folder)  # goes on where it died


@pytest.mark.optional
def test_ctrl_c_while_ray_starts_waits_for_it_and_ends_it(tmp_path, monkeypatch, interrupted):
    ray = pytest.importorskip("ray")
    happened = []

    def init(**options):
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.2)
        happened.append("started")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: happened.append("ended"))
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "atlas", engine="ray")
    assert happened == ["started", "ended"]


@pytest.mark.slow
@pytest.mark.optional
def test_a_build_outlives_a_machine(built, tmp_path, alone):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    out = tmp_path / "atlas"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        lost, _ = (cluster.add_node(num_cpus=1) for _ in range(2))
        lose = threading.Thread(target=_lose, args=(cluster, lost, out))
        lose.start()
        store = build(out, data=Slow(problem()[1], 0.1), shard_size=8, engine="ray", processes=2)
        lose.join()
        assert lost not in cluster.list_all_nodes()
        np.testing.assert_array_equal(store.components, built.components)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _lose(cluster, machine, out):
    """Take a machine away from a cluster as soon as a shard is there."""
    while not list(out.glob("part-*.parquet")):
        time.sleep(0.1)
    cluster.remove_node(machine, allow_graceful=False)


@pytest.mark.optional
def test_ray_finds_what_is_named_from_here(alone, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    folder(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    store = build("atlas", data="photos", transform=TO_TENSOR, engine="ray", processes=1)
    assert len(store) == 6
    assert store.folder == Path("atlas")


@pytest.mark.parametrize("method", [ContributionCAM, ClosedFormGradCAM])
@pytest.mark.parametrize("kernel", ["linear", "rbf", "poly"])
def test_rows_are_what_the_network_gives(tmp_path, method, kernel):
    net, data = problem(kernel)
    store = build(tmp_path / "atlas", net, method=method)
    x = data.tensors[0]
    with method(net, [layer(net)]) as cam:
        expected = cam.explain(x, [*map(PCATarget, range(4)), SVMTarget(), SVMTarget(1), SVMTarget(0, versus=2)])
    assert relative(store.components, expected.values[:, :4]) < 1e-5
    assert relative(store.scores, expected.output) < 1e-5
    np.testing.assert_array_equal(store.predictions, net.predict(x))
    np.testing.assert_array_equal(store.labels, data.tensors[1])
    np.testing.assert_allclose(store.nu, expected.nu[:, :4], rtol=1e-4)
    actual = store.explain(slice(None), expected.targets)
    assert float((actual.maps - expected.maps).abs().max() / expected.nu.max()) < 1e-3
    assert relative(actual.values, expected.values) < 1e-5
    if method is ContributionCAM:
        assert relative(actual.baseline_values, expected.baseline_values) < 1e-5
        assert gap(actual) < 1e-3  # maps are kept in half precision


def test_a_method_that_is_not_linear_keeps_its_targets(tmp_path):
    net, data = problem()
    store = build(tmp_path / "atlas", method=ClosedFormLayerCAM, targets=[SVMTarget(), SVMTarget(2)])
    with ClosedFormLayerCAM(net, [layer(net)]) as cam:
        expected = cam.explain(data.tensors[0], [SVMTarget(2), PCATarget(1), SVMTarget()])
    actual = store.explain(slice(None), expected.targets)
    for name in ("maps", "opposite"):
        difference = getattr(actual, name) - getattr(expected, name)
        assert float(difference.abs().max() / expected.nu.max()) < 1e-3
    assert relative(actual.values, expected.values) < 1e-5
    with pytest.raises(ValueError, match=r"not sums of component maps, so SVMTarget\(1"):
        store.explain(0, SVMTarget(1))
    with pytest.raises(ValueError, match="another head"):
        store.explain(0, head=net.head)
    assert build(tmp_path / "default", method=ClosedFormLayerCAM).explain([3]).maps.shape == (1, 1, 6, 6)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_folders_of_images(tmp_path):
    net = problem()[0]
    root = folder(tmp_path / "photos")
    store = build(tmp_path / "classes", net, root, transform=TO_TENSOR)
    same = build(tmp_path / "same", net, ImageFolder(str(root), TO_TENSOR))
    assert store.ids.tolist() == ["cat/0.png", "cat/2.png", "cat/4.png", "dog/1.png", "dog/3.png", "dog/5.png"]
    assert store.names(store.labels) == ["cat"] * 3 + ["dog"] * 3
    np.testing.assert_array_equal(store.components, same.components)
    flat = build(tmp_path / "flat", net, root / "dog", transform=TO_TENSOR)
    assert flat.labels is None
    assert flat.ids.tolist() == ["1.png", "3.png", "5.png"]
    part = build(tmp_path / "part", net, Subset(ImageFolder(str(root), TO_TENSOR), [4, 1]))
    assert part.ids.tolist() == ["dog/3.png", "cat/2.png"]
    assert relative(part.components, store.components[[4, 1]]) < 1e-5
    with pytest.raises(ValueError, match="needs the transform"):
        build(tmp_path / "none", net, root)
    with pytest.raises(ValueError, match="there is no folder"):
        build(tmp_path / "none", net, tmp_path / "nowhere", transform=TO_TENSOR)
    (root / ".ipynb_checkpoints").mkdir()
    hidden = build(tmp_path / "hidden", net, root, transform=TO_TENSOR)
    np.testing.assert_array_equal(hidden.labels, store.labels)
    (root / "stray.png").write_bytes((root / "dog" / "1.png").read_bytes())
    with pytest.raises(ValueError, match=r"has both images, such as stray.png, and folders of images"):
        build(tmp_path / "none", net, root, transform=TO_TENSOR)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no images"):
        build(tmp_path / "none", net, tmp_path / "empty", transform=TO_TENSOR)


@pytest.mark.optional
def test_hugging_face_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    root = folder(tmp_path / "photos")
    paths = sorted(map(str, root.rglob("*.png")))
    names = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    data = datasets.Dataset.from_dict({"image": paths, "label": ["dog" in path for path in paths]}, features=features)
    store = build(tmp_path / "atlas", data=data, transform=TO_TENSOR)
    expected = build(tmp_path / "expected", data=ImageFolder(str(root), TO_TENSOR))
    np.testing.assert_array_equal(store.components, expected.components)
    assert store.names(store.labels) == ["cat"] * 3 + ["dog"] * 3
    with pytest.raises(RuntimeError, match="pass transform="):
        build(tmp_path / "pil", data=data)
    assert Images(data).labels([0, 5]) == [0, 1]
    assert Images(Subset(data.select([5, 0]), [1, 0])).labels([0, 1]) == [0, 1]
    assert Images(data.select_columns("image")).labels([0, 5]) == [None, None]
    assert Images(data.with_transform(lambda batch: batch)).labels([0]) is None
    with pytest.raises(ValueError, match="the label of image 3 was 1 and is 0"):
        build(tmp_path / "atlas", data=data.map(lambda row: {"label": 0}), transform=TO_TENSOR)


@pytest.mark.parametrize(
    ("wrap", "labels"),
    [
        (lambda x, y: list(x), None),
        (lambda x, y: [(image, int(label)) for image, label in zip(x, y, strict=True)], [0, 1, 2, 0]),
        (
            lambda x, y: [{"image": i, "label": f"c{int(k)}"} for i, k in zip(x, y, strict=True)],
            ["c0", "c1", "c2", "c0"],
        ),
        (lambda x, y: TensorDataset(x, y[:, None]), [0, 1, 2, 0]),
        (lambda x, y: TensorDataset(x, y / 2), [0.0, 0.5, 1.0, 0.0]),
    ],
    ids=["bare", "pairs", "dicts", "columns", "numbers"],
)
def test_data_sets_of_many_kinds(tmp_path, wrap, labels):
    store = build(tmp_path / "atlas", data=wrap(*images(4)))
    found = None if store.labels is None else store.labels.tolist()
    assert found == labels


OTHERS = {"__getitem__": lambda self, row: (0, 7), "__getitems__": lambda self, rows: [(0, 7)] * len(rows)}


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        ([(0, "a"), (1, "b"), (2, "c")], ["c", "b"]),
        (
            ({"image": 0, "label": 5}, {"image": 1, "labels": None}, {"image": 2, "fine_label": torch.tensor([4])}),
            [4, None],
        ),
        ([torch.zeros(1), torch.zeros(1), torch.zeros(1)], [None, None]),
        (TensorDataset(torch.zeros(3, 1), torch.tensor([5, 6, 7]), torch.zeros(3)), [7, 6]),
        (TensorDataset(torch.zeros(3, 1)), [None, None]),
        (Subset(Subset([(0, "a"), (1, "b"), (2, "c")], [2, 1, 0]), [2, 1, 0]), ["c", "b"]),
        (Pictures(TensorDataset(torch.zeros(3, 1), torch.zeros(3)), ()), None),
        (type("Other", (Subset,), OTHERS)([(0, "a")] * 3, range(3)), None),
        (type("Other", (list,), OTHERS)([(0, "a")] * 3), None),
    ],
    ids=["pairs", "dicts", "bare", "tensors", "one tensor", "subsets", "class", "a subset's class", "a list's class"],
)
def test_labels_without_images(data, labels):
    assert Images(data).labels([2, 1]) == labels


def test_labels_of_folders_without_images(tmp_path):
    root = folder(tmp_path)
    assert Images(root, TO_TENSOR).labels([0, 5]) == [0, 1]
    assert Images(root / "cat", TO_TENSOR).labels([0, 2]) == [None, None]
    assert Images(ImageFolder(str(root), target_transform=str)).labels([0, 5]) == ["0", "1"]
    for path in root.rglob("*.png"):
        path.write_bytes(b"")
    assert Images(Subset(ImageFolder(str(root)), [5, 0])).labels([0]) == [1]


def test_volumes(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()).eval()
    x = torch.rand(20, 1, 6, 8, 8)
    y = np.arange(20) % 2
    head = make_pipeline(PCA(2), SVC()).fit(net(x).detach().numpy(), y)
    store = atlas.build(PCASVMNet(net, head), TensorDataset(x), ["1"], tmp_path / "atlas", progress=False)
    assert store.maps([0, 7]).maps.shape == (2, 2, 6, 8, 8)
    assert store.mean_map(1).maps.shape == (1, 6, 8, 8)


class Chance:
    """Images that are others each time they are read."""

    def __len__(self):
        return 4

    def __getitem__(self, row):
        return torch.rand(3, 12, 12)


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ([], ValueError, "empty"),
        (object(), TypeError, "by row number"),
        (type("Stream", (IterableDataset,), {"__iter__": lambda self: iter([])})(), TypeError, "by row number"),
        ([torch.zeros(3, 12, 12, dtype=torch.uint8)], RuntimeError, "floating-point"),
        ([torch.zeros(3, 12, 12), torch.zeros(3, 10, 12)], ValueError, "shapes"),
        ([torch.zeros(3, 12, 12)] * 16 + [torch.zeros(3, 10, 12)], ValueError, "image 16 has the shape"),
        ([torch.full((3, 12, 12), torch.nan)], RuntimeError, "NaN"),
        ([(torch.zeros(3, 12, 12), None), (torch.zeros(3, 12, 12), 1)], ValueError, "but the first one no label"),
        ([(torch.zeros(3, 12, 12), 1), (torch.zeros(3, 12, 12), None)], ValueError, "image 1 has no label"),
        ([(torch.zeros(3, 12, 12), 0), (torch.zeros(3, 12, 12), 0.9)], ValueError, "a label of type float, but the"),
        ([(torch.zeros(3, 12, 12), 0), (torch.zeros(3, 12, 12), "a")], ValueError, "a label of type str, but the"),
        (Chance(), ValueError, "different each time"),
        ([(torch.zeros(3, 12, 12), torch.tensor([0, 1]))], TypeError, r"is \[0, 1\], 2 numbers, but one number"),
    ],
    ids=[
        "empty",
        "no data set",
        "stream",
        "uint8",
        "sizes",
        "sizes of blocks",
        "nan",
        "some labels",
        "none later",
        "numbers",
        "names",
        "chance",
        "several",
    ],
)
def test_data_sets_that_are_refused(tmp_path, data, error, match):
    with pytest.raises(error, match=match):
        build(tmp_path / "atlas", data=data)


class Locked:
    """What no other process can have."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, image):
        return image


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"engine": "spark"}, ValueError, "'local' or 'ray'"),
        ({"batch_size": 0}, ValueError, "batch_size must be a positive integer"),
        ({"processes": 0}, ValueError, "processes"),
        ({"method": torch.nn.ReLU}, TypeError, "ContributionCAM"),
        ({"base": "mean"}, TypeError, "unexpected keyword argument 'base'"),
        ({"baseline": "median"}, ValueError, "baseline must be"),
        ({"processes": 2, "picture": Locked()}, TypeError, "cannot be sent to another process"),
        ({"targets": [lambda output: output[..., 0]]}, TypeError, "the package's own targets"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_options_that_are_refused(tmp_path, options, error, match):
    with pytest.raises(error, match=match):
        build(tmp_path / "atlas", **options)


def test_heads_and_layers_that_are_refused(tmp_path):
    net, data = problem()
    with pytest.raises(TypeError, match="PCASVMNet"):
        atlas.build(net.backbone, data, ["0"], tmp_path / "atlas")
    with pytest.raises(ValueError, match="list of one layer"):
        atlas.build(net, data, ["0", "1"], tmp_path / "atlas")
    svm = SVC().fit(net.backbone(data.tensors[0]).detach().numpy(), data.tensors[1])
    with pytest.raises(ValueError, match="put a PCA in front"):
        build(tmp_path / "atlas", PCASVMNet(net.backbone, svm))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="not empty and not an atlas"):
        build(tmp_path / "full")


# --- what was begun is gone on with -----------------------------------------------------------------------------------


def test_what_is_there_is_not_made_again(tmp_path):
    store = build(tmp_path / "atlas")
    before = {path: path.stat().st_mtime_ns for path in store.folder.glob("*.parquet")}
    (store.folder / "part-00001.parquet").unlink()
    with pytest.raises(ValueError, match=r"part-00001.parquet is missing: run the same build again"):
        atlas.load(store.folder)
    whole = contents(store.folder)
    again = build(tmp_path / "atlas")
    changed = [path.name for path, at in before.items() if path.stat().st_mtime_ns != at]
    assert changed == ["part-00001.parquet"]
    assert whole.items() < contents(again.folder).items()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda o: {"net": PCASVMNet(backbone(5), problem()[0].head)}, "(other weights)"),
        (lambda o: {"net": PCASVMNet(problem()[0].backbone, problem("linear")[0].head)}, "(another head)"),
        (lambda o: {"data": TensorDataset(*images(91))}, "images: 90 there, 91 now"),
        (lambda o: {"data": TensorDataset(*images(90, seed=7))}, "another first image (is a transform random?)"),
        (lambda o: {"method": ClosedFormGradCAM}, '(method: "ContributionCAM" there, "ClosedFormGradCAM" now; options'),
        (lambda o: {"baseline": "mean"}, "options"),
        (lambda o: {"targets": [SVMTarget(1)]}, "targets"),
        (lambda o: {"thumbnails": False}, "thumbnails: 96 there, 0 now"),
        (lambda o: {"shard_size": 64}, "shard_size: 32 there, 64 now"),
    ],
    ids=["weights", "head", "images", "pictures", "method", "baseline", "targets", "thumbnails", "shards"],
)
def test_another_build_in_the_same_folder_is_refused(built, change, told):
    before = contents(built.folder)
    with pytest.raises(ValueError, match="something else") as error:
        build(built.folder, **change(None))
    assert told in str(error.value)
    assert contents(built.folder) == before


def test_shards_that_are_broken_are_named(tmp_path):
    store = build(tmp_path / "atlas")
    other = build(tmp_path / "other", problem("linear")[0])
    shard = store.folder / "part-00001.parquet"
    whole = shard.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 255
    for broken, match in (
        (whole[: len(whole) // 2], "truncated"),
        (b"", "truncated"),
        (other.folder.joinpath(shard.name).read_bytes(), "of another atlas"),
    ):
        shard.write_bytes(broken)
        for call in (lambda: atlas.load(store.folder), lambda: build(store.folder)):
            with pytest.raises(ValueError, match=rf"part-00001.parquet .*{match}.*delete it"):
                call()
    shard.write_bytes(flipped)
    columns = [*json.loads((store.folder / "manifest.json").read_text())["columns"], "thumbnail"]
    with pytest.raises(ValueError, match="was changed since it was written"):
        list(atlas.load(store.folder).table.blocks(columns))
    shard.unlink()
    assert contents(build(store.folder).folder)[shard.name] == whole


def test_manifests_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no atlas"):
        atlas.load(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="not the manifest of an atlas"):
        atlas.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "pytorch_grad_cam_pcasvm atlas 9"}')
    with pytest.raises(ValueError, match="update the package"):
        atlas.load(tmp_path)


def test_a_damaged_manifest_is_refused(built, tmp_path):
    for content in damaged((built.folder / "manifest.json").read_bytes()):
        (tmp_path / "manifest.json").write_bytes(content)
        try:
            assert disk.read_manifest(tmp_path) == built.manifest  # a capital E in a number
        except ValueError as error:
            told = f"{type(error).__name__}: {error}"
            assert re.match("ValueError: .*(damaged|changed since)", told)


def test_manifests_of_version_0_2_have_no_checksum(built, tmp_path):
    folder = shutil.copytree(built.folder, tmp_path / "atlas")
    old = json.dumps(built.manifest, indent=1, sort_keys=True) + "\n"
    assert '"pytorch_grad_cam_pcasvm atlas 1"' in old
    assert "sha256" not in old
    (folder / "manifest.json").write_text(old)
    with pytest.warns(UserWarning, match=r"manifest.json .* no checksum, .*: run the same build again"):
        assert atlas.load(folder).manifest == built.manifest
    with pytest.warns(UserWarning, match="no checksum"):
        build(folder)
    assert contents(folder) == contents(built.folder)


@pytest.mark.parametrize(("label", "others"), [(2**70, 1), ("\ud800", "a"), (2**53 + 1, 0.5)], ids=ascii)
def test_labels_that_parquet_cannot_hold(tmp_path, label, others):
    x, _ = images(90)
    data = [(image, label if row == 40 else others) for row, image in enumerate(x)]
    with pytest.raises(ValueError, match=re.escape(f"image '40' has the label {label!r}, which Parquet")) as error:
        build(tmp_path / "atlas", data=data)
    assert type(error.value) is ValueError
    assert "give it another one" in str(error.value)
    assert [path.name for path in (tmp_path / "atlas").glob("part-*")] == ["part-00000.parquet"]


class Scaled(nn.Module):
    """A network with a number that is no weight."""

    def __init__(self, inner, factor):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x):
        return self.inner(x) * self.factor


def test_what_no_digest_knows_is_seen_in_the_numbers(tmp_path):
    given, data = problem()
    scaled = Scaled(given.backbone, 1.0)
    net = PCASVMNet(scaled, given.head)
    store = atlas.build(net, data, ["inner.0"], tmp_path / "atlas", shard_size=32, progress=False)
    again = [net, data, ["inner.0"], store.folder]
    scaled.factor = 1.5
    with pytest.raises(ValueError, match="first image's components"):
        atlas.build(*again, shard_size=32, progress=False)
    scaled.factor = 1.0
    hook = scaled.inner[1].register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(ValueError, match="first image's components"):
        atlas.build(*again, shard_size=32, progress=False)
    hook.remove()
    assert len(atlas.build(*again, shard_size=32, progress=False)) == 90


def test_the_rounding_of_another_machine_is_no_change(tmp_path):
    first = {"components": [31.0, -1e-3, 4.0], "scores": [-1.2, 0.3], "nu": [0.7, 0.2, 0.1]}
    disk.check_same(tmp_path, {"first": first, "versions": {}}, {"first": first, "versions": {}})
    moved = first | {"components": [31.0 + 4e-6, -1e-3 + 4e-5, 4.0]}
    disk.check_same(tmp_path, {"first": first, "versions": {}}, {"first": moved, "versions": {}})
    moved = first | {"components": [31.0, 1e-2, 4.0]}
    with pytest.raises(ValueError, match="first image's components"):
        disk.check_same(tmp_path, {"first": first, "versions": {}}, {"first": moved, "versions": {}})


def _sample(out, x, y):
    """Return the rows that are read when a build is repeated."""
    counted = Counted(TensorDataset(x, y))
    build(out, data=counted)
    return set(counted.read)


def test_a_sample_of_images_is_compared_or_all(tmp_path):
    x, y = images(64)
    out = build(tmp_path / "atlas", data=TensorDataset(x, y)).folder
    before, sample = contents(out), _sample(out, x, y)
    assert {0, 32} < sample
    assert sum(row < 32 for row in sample) == sum(row >= 32 for row in sample) == 4
    row, unseen = max(sample), min(set(range(64)) - sample)
    pixels, labels = x.clone(), y.clone()
    pixels[row] += 1
    labels[row] = 7
    for data, what in (
        (Pictures(TensorDataset(pixels, y), ()), f"the pixels of image {row} differ"),
        (Pictures(TensorDataset(x, labels), ()), f"the label of image {row} was {row % 3} and is 7"),
        (Pictures(TensorDataset(x, y), (row,)), f"image {row} cannot be read now"),
    ):
        with pytest.raises(ValueError, match=rf"{what}.* four images of .* delete part-00001.parquet, .* verify=True"):
            build(out, data=data)
    x[unseen] += 1
    data = TensorDataset(x, y)
    build(out, data=data)
    with pytest.raises(
        ValueError, match=rf"pixels of image {unseen} differ .*every image\).* part-00000.parquet, and run"
    ):
        build(out, data=data, verify=True)
    assert contents(out) == before


def test_images_are_verified_by_several_readers(tmp_path, capsys):
    build(tmp_path / "atlas")
    build(tmp_path / "atlas", workers=2, verify=True, progress=True)
    assert "verify: 100%" in capsys.readouterr().err


def test_every_label_is_compared(tmp_path):
    x, y = images(64)
    out = build(tmp_path / "atlas", data=TensorDataset(x, y)).folder
    rows = sorted(set(range(64)) - _sample(out, x, y))
    y[rows] += 1
    with pytest.raises(ValueError, match=rf"label of image {rows[0]} was {rows[0] % 3} and is {rows[0] % 3 + 1} "):
        build(out, data=TensorDataset(x, y))
    unnumbered = [(image, torch.nan) for image in x[:16]]
    for _ in range(2):
        build(tmp_path / "nan", data=unnumbered)


def test_a_file_of_another_size_is_compared(tmp_path):
    root = folder(tmp_path / "photos", 10)
    options = {"data": root, "transform": TO_TENSOR}
    out = build(tmp_path / "atlas", **options).folder
    for path in root.rglob("*.png"):
        path.write_bytes(path.read_bytes() + b"\0")  # the same pixels
    build(out, **options)
    for number in (2, 4, 6, 8):  # of which at least one is not in the sample
        path = root / "cat" / f"{number}.png"
        Image.new("RGB", (12, 12)).save(path)
        path.write_bytes(path.read_bytes() + b"\0")
        with pytest.raises(ValueError, match=f"the pixels of image cat/{number}.png differ"):
            build(out, **options)
        folder(root, 10)


def test_shards_of_version_0_2_0(tmp_path):
    store = build(tmp_path / "atlas")
    for number, path in enumerate(sorted(store.folder.glob("*.parquet"))[:2]):
        table = parquet.read_table(path)
        first = [32 * number, table["digest"][0].as_py(), table["label"][0].as_py()]
        metadata = table.schema.metadata | {b"first": json.dumps(first).encode()}
        parquet.write_table(table.drop(["digest"]).replace_schema_metadata(metadata), path)
    x, y = images(90)
    assert _sample(store.folder, x, y) > {0, 32, 64}
    np.testing.assert_array_equal(atlas.load(store.folder).maps([0, 80]).maps, store.maps([0, 80]).maps)
    with pytest.raises(ValueError, match=r"part-00000.parquet cannot be verified, as version 0.2.0 made it"):
        build(store.folder, verify=True)
    x[32] += 1
    y[40] += 1
    with pytest.raises(ValueError, match="the pixels of image 32 differ"):
        build(store.folder, data=Pictures(TensorDataset(x, y), ()))
    with pytest.raises(ValueError, match="the label of image 40 was 1 and is 2"):
        build(store.folder, data=TensorDataset(x, y))


def test_a_copy_of_a_shard_is_not_taken_for_another(tmp_path):
    store = build(tmp_path / "atlas")
    one, two = (store.folder / f"part-0000{number}.parquet" for number in (0, 1))
    two.write_bytes(one.read_bytes())
    with pytest.raises(ValueError, match=r"part-00001.parquet is a copy of shard 0"):
        atlas.load(store.folder)


def test_another_head_beside_the_shards_is_seen(tmp_path):
    store = build(tmp_path / "atlas")
    problem("linear")[0].head.save(store.folder / "head.safetensors")
    with pytest.raises(ValueError, match="not the head of this atlas"):
        atlas.load(store.folder)
    (store.folder / "head.safetensors").unlink()
    with pytest.raises(ValueError, match="is missing: run the same build again"):
        atlas.load(store.folder)
    assert build(store.folder).explain(0).maps.shape == (1, 1, 6, 6)


def test_defaults_may_be_given(built):
    assert len(build(built.folder, baseline="neutral", attention="exact")) == 90


def test_autocast_is_refused(tmp_path):
    problem()  # which all tests of this process share, and whose features would be made in half precision
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="outside autocast"):
        build(tmp_path / "atlas")


def test_images_that_were_mended_are_taken(tmp_path):
    rows = problem()[1]
    whole = build(tmp_path / "whole")
    first = build(tmp_path / "atlas", data=Pictures(rows, (3, 40)), skip_bad_images=True)
    assert len(first) == 88
    second = build(tmp_path / "atlas", data=Pictures(rows, (40,)), skip_bad_images=True)
    assert list(second.manifest["bad"]) == ["40"]
    with pytest.raises(RuntimeError, match="image 40"):
        build(tmp_path / "atlas", data=Pictures(rows, (40,)))
    np.testing.assert_array_equal(build(tmp_path / "atlas", data=rows).components, whole.components)


def test_only_what_dead_processes_and_this_one_left_is_removed(tmp_path):
    dead = forked(lambda: None)
    joined(dead)
    mine = files.name_temporary(tmp_path / "manifest.json")
    of_the_dead, of_the_living = (
        mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{pid}.")) for pid in (dead.pid, os.getppid())
    )
    for left in (mine, of_the_dead, of_the_living):
        left.touch()
    before = contents(build(tmp_path).folder)  # begun where a build was stopped before its manifest was written
    assert [path.exists() for path in (mine, of_the_dead, of_the_living)] == [False, False, True]
    assert sorted(before)[1:] == ["head.safetensors", "manifest.json", *(f"part-0000{n}.parquet" for n in range(3))]


def test_each_thread_has_temporaries_of_its_own(tmp_path):
    names = {files.name_temporary(tmp_path / "a")}
    thread = threading.Thread(target=lambda: names.add(files.name_temporary(tmp_path / "a")))
    thread.start()
    thread.join()
    assert len(names) == 2


@pytest.mark.slow
def test_large_maps_make_smaller_shards(tmp_path, monkeypatch):
    small = {"shard_size": None, "block": 1}
    assert build(tmp_path / "few", **small).manifest["shard_size"] == 6  # a sixteenth of 90 images
    monkeypatch.setattr(sys.modules["pytorch_grad_cam_pcasvm.studio.atlas.run"], "SHARD_BYTES", 1_000)
    assert build(tmp_path / "large", **small).manifest["shard_size"] == 2


def test_another_version_is_told(tmp_path):
    store = build(tmp_path / "atlas")
    disk.write_manifest(store.folder, store.manifest | {"versions": store.manifest["versions"] | {"torch": "1.0"}})
    with pytest.warns(UserWarning, match=r"started with torch 1.0 \(now"):
        build(store.folder)


def test_bad_images(tmp_path):
    data = Pictures(problem()[1], (3, 40, *range(64, 90)))
    with pytest.raises(RuntimeError, match=r"image 3 \(3\) cannot be read: FileNotFoundError: no file for 3"):
        build(tmp_path / "stopped", data=data)
    store = build(tmp_path / "atlas", data=data, skip_bad_images=True)
    assert store.rows.tolist() == [row for row in range(64) if row not in (3, 40)]
    assert list(store.manifest["bad"]) == ["3", "40", *map(str, range(64, 90))]
    assert store.extremes(0, 3).high.max() < len(store) == 62
    with pytest.raises(RuntimeError, match="image 3 "):
        build(tmp_path / "atlas", data=data)
    with pytest.raises(RuntimeError, match="none of the 90 images can be read; the first, 0: FileNotFoundError"):
        build(tmp_path / "none", data=Pictures(problem()[1], tuple(range(90))), skip_bad_images=True)


@pytest.mark.slow
def test_a_bad_image_in_another_process(tmp_path):
    with pytest.raises(RuntimeError, match="image 70"):
        build(tmp_path / "atlas", data=Pictures(problem()[1], (70,)), processes=2)
    assert len(list((tmp_path / "atlas").glob("part-*"))) == 2  # what was finished is kept


def warned(out, **options):
    """Return the categories and texts of the warnings of a build of 3x3 positions, of which some rows give one."""
    x, labels = images(90)
    data = Odd(TensorDataset(x[..., :6, :6], labels), (40, 80))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        build(out, data=data, **options)
    assert {each.filename for each in told if each.category is CoarseMapWarning} == {__file__}
    return [(each.category, str(each.message)) for each in told]


@pytest.mark.slow
def test_processes_leave_warnings_to_the_one_that_started_them(tmp_path, capfd):
    told = warned(tmp_path / "two", processes=2)
    assert capfd.readouterr().err == ""
    assert [category for category, _ in told].count(CoarseMapWarning) == 1
    assert told.count((UserWarning, "odd metadata")) == 1
    assert {category for category, _ in told} == {category for category, _ in warned(tmp_path / "one")}


@pytest.mark.optional
def test_actors_leave_warnings_to_the_one_that_started_them(tmp_path, capfd, alone):
    pytest.importorskip("ray")
    told = warned(tmp_path / "ray", engine="ray", processes=2)
    assert "odd metadata" not in capfd.readouterr().err
    assert [category for category, _ in told].count(CoarseMapWarning) == 1
    assert told.count((UserWarning, "odd metadata")) == 1


def test_warnings_of_others_are_told_once_and_doubts_only_if_they_are_new():
    module = CoarseMapWarning.__module__
    others = [
        ForwardedWarning(module, "CoarseMapWarning", "coarse"),
        ForwardedWarning(module, "BaselineWarning", "for 3 of 4 images"),
        ForwardedWarning(module, "BaselineWarning", "for 4 of 4 images"),
        ForwardedWarning(module, "AutogradFallbackWarning", "the path"),
        ForwardedWarning("builtins", "RuntimeWarning", "overflow"),
        ForwardedWarning("builtins", "RuntimeWarning", "overflow"),
        ForwardedWarning("not.here", "OwnWarning", "own"),
        ForwardedWarning("builtins", "print", "own, too"),
    ]
    doubts = WarnOnce()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        doubts.warn_once(CoarseMapWarning, "of the first image")
        tell(others, doubts)
    assert [(each.category, str(each.message)) for each in told] == [
        (CoarseMapWarning, "of the first image"),
        (BaselineWarning, "for 3 of 4 images"),
        (RuntimeWarning, "overflow"),
        (UserWarning, "own"),
        (UserWarning, "own, too"),
    ]


def forked(call, *args):
    """Run a call in a process of its own, which shares what was imported."""

    def run():
        torch.set_num_threads(1)  # a pool of threads does not live through a fork: the call would wait for it
        call(*args)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def joined(process):
    """Wait for a process to end, but not for ever."""
    process.join(120)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode is not None, "it waits for something that never comes"


@pytest.mark.slow
def test_a_build_that_is_killed_goes_on_where_it_was(tmp_path):
    data = Slow(TensorDataset(*images(400)), 0.002)
    whole = contents(build(tmp_path / "whole", data=data, shard_size=16).folder)
    random = np.random.default_rng()
    out = tmp_path / "killed"
    finished = 0
    for kill in range(4):
        process = forked(lambda: build(out, data=data, shard_size=16))
        while len(list(out.glob("part-*"))) < min(finished + 1 + kill, 20) and process.is_alive():
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        joined(process)
        kept = {name: written for name, written in contents(out).items() if name.startswith("part-")}
        assert kept.items() <= whole.items()
        finished = len(kept)
        assert finished > 0
        if finished < 25:
            with pytest.raises(ValueError, match=f"not finished, {finished} of 25 shards"):
                atlas.load(out)
    times = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
    build(out, data=data, shard_size=16)
    assert contents(out) == whole
    assert all(path.stat().st_mtime_ns == at for path, at in times.items())


def _together(start, out, told):
    start.wait()
    try:
        told.put(len(build(out, data=FEW, shard_size=16)))
    except Exception as error:
        told.put(repr(error))


FEW = TensorDataset(*images(32))


@pytest.mark.filterwarnings("ignore:another build is under way")
@pytest.mark.parametrize("who", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_builders_of_one_folder_take_turns(tmp_path, who):
    whole = contents(build(tmp_path / "whole", data=FEW, shard_size=16).folder)
    there = multiprocessing.get_context("fork") if who == "processes" else threading
    kind, told = (there.Process, there.Queue()) if who == "processes" else (threading.Thread, queue.Queue())
    for turn, count in enumerate([2, 3, 4] * 5 if who == "processes" else [4]):
        out = tmp_path / str(turn)
        start = there.Barrier(count)
        builders = [kind(target=_together, args=(start, out, told)) for _ in range(count)]
        for builder in builders:
            builder.start()
        assert [told.get(timeout=60) for _ in builders] == [32] * count
        for builder in builders:
            builder.join()
        assert contents(out) == whole


def test_a_build_waits_for_another_and_says_so(built):
    before, begun, ended = contents(built.folder), threading.Event(), threading.Event()

    def hold():
        with disk.alone(built.folder):
            begun.set()
            assert ended.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    assert begun.wait(60)
    with pytest.raises(ValueError, match="something else"):  # there is nothing to wait for
        build(built.folder, shard_size=64)
    threading.Timer(0.3, ended.set).start()
    with pytest.warns(UserWarning, match=r"another build is under way in .*: waiting until it ends") as told:
        build(built.folder)
    other.join()
    assert [warning.filename for warning in told] == [__file__]
    assert contents(built.folder) == before


def test_the_lock_of_a_killed_build_is_free(tmp_path):
    def hold():
        with disk.alone(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    joined(forked(hold))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(tmp_path, data=FEW)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(UserWarning, match=r"\.lock cannot be locked .*No locks available.*start no other build there"):
        assert len(build(tmp_path, data=FEW)) == 32


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_build_leaves_nothing(tmp_path, workers, interrupted):
    began = time.monotonic()
    whole = contents(build(tmp_path / "whole", workers=workers).folder)
    seconds = time.monotonic() - began
    threads = set(threading.enumerate())
    random = np.random.default_rng()
    for turn in range(20 if workers == 0 else 8):
        out, kept = tmp_path / str(turn), None
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, seconds))
            build(out, copy.deepcopy(problem()[0]), workers=workers)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:  # code in C, such as that of safetensors, may turn it into another one
            kept = error  # as an interactive session does
        assert kept is None or multiprocessing.active_children() == [], kept
        assert contents(build(out).folder) == whole
        for thread in set(threading.enumerate()) - threads:
            thread.join(10)
            assert not thread.is_alive()


SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from atlases import images, layer, problem
from torch.utils.data import TensorDataset
from pytorch_grad_cam_pcasvm import atlas

def main():
    net, _ = problem()
    data = TensorDataset(*images(400))  # more than fits into a pipe
    print("begins", flush=True)
    atlas.build(net, data, [layer(net)], sys.argv[1], shard_size=16, progress=False, processes=2)

"""


def started(tmp_path, last, text=SCRIPT):
    script = tmp_path / "script.py"
    script.write_text(text + last)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    return subprocess.Popen(
        [sys.executable, script, tmp_path / "atlas"],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    ["atlas.build(net, data, [layer(net)], sys.argv[1]", "atlas.extract(net.backbone, data, '0', out=sys.argv[1]"],
)
def test_a_script_needs_no_guard_and_its_own_classes_are_sent(tmp_path, run):
    text = SCRIPT.replace("atlas.build(net, data, [layer(net)], sys.argv[1]", run)
    text = text.replace("data = TensorDataset", "class Own(TensorDataset):\n        pass\n\n    data = Own")
    script = started(tmp_path, "main()", text)
    _, told = script.communicate(timeout=120)
    assert script.returncode == 0, told
    assert len(list((tmp_path / "atlas").glob("part-*"))) == 25


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_ctrl_c_while_processes_start_ends_them_all(tmp_path, seconds):
    script = started(tmp_path, "if __name__ == '__main__':\n    main()\n")
    assert script.stdout.readline() == "begins\n"
    time.sleep(seconds)
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does: to the children, too
    script.communicate(timeout=120)
    assert script.returncode != 0
    deadline = time.monotonic() + 60
    with suppress(ProcessLookupError):  # of its processes none is left; the last may be ending
        while time.monotonic() < deadline:
            os.killpg(script.pid, 0)
            time.sleep(0.1)
    assert time.monotonic() < deadline


def _on_a_full_disk(out: Path, data, told: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # a shard of 16 rows fits, one of 64 does not
    try:
        build(out, data=data, shard_size=64)
    except OSError as error:
        told.write_text(str(error))


def test_a_full_disk_leaves_no_half_a_shard(tmp_path):
    told = tmp_path / "told"
    data = TensorDataset(*images(64 + 64))
    process = forked(_on_a_full_disk, tmp_path / "atlas", data, told)
    joined(process)
    assert "part-00000.parquet cannot be written" in told.read_text()
    assert "run the same build again" in told.read_text()
    assert sorted(contents(tmp_path / "atlas")) == ["head.safetensors", "manifest.json"]


def test_the_callers_state_is_left_alone(tmp_path):
    net, _ = problem()
    net.backbone.train()
    try:
        build(tmp_path / "atlas")
        assert net.backbone.training
        assert all(not module._forward_hooks for module in net.modules())
    finally:
        net.backbone.eval()


@pytest.mark.optional
def test_files_are_read_without_the_package(built):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.read_table(built.folder / "part-00000.parquet")
    assert table.num_rows == 32
    np.testing.assert_array_equal(np.stack(table["components"].to_numpy()), built.components[:32])
    maps = np.stack(table["maps"].to_numpy()).reshape(32, 4, 6, 6)
    expected = built.maps(range(32))
    scaled = maps.astype(np.float32) * built.nu[:32, :, None, None]
    np.testing.assert_array_equal(scaled, expected.maps)
    pandas = pytest.importorskip("pandas")
    frame = pandas.concat(map(pandas.read_parquet, sorted(built.folder.glob("*.parquet"))))
    np.testing.assert_array_equal(np.stack(frame["components"]), built.components)
    duckdb = pytest.importorskip("duckdb")
    found = duckdb.sql(f"select label, avg(nu[1]) from '{built.folder}/*.parquet' group by label order by label")
    means = [built.nu[built.labels == label, 0].mean() for label in range(3)]
    np.testing.assert_allclose([row[1] for row in found.fetchall()], means, rtol=1e-5)


def test_the_head_is_kept_to_the_last_bit(built):
    net, data = problem()
    head = Head.load(built.folder / "head.safetensors")
    features = net.backbone(data.tensors[0])
    assert torch.equal(head.scores(head(features)), net.head.scores(net.head(features)))


def test_a_loader_is_no_data_set(tmp_path):
    with pytest.raises(TypeError, match="by row number"):
        build(tmp_path / "atlas", data=DataLoader(problem()[1], 8))
    with pytest.raises(TypeError, match="by row number"):
        build(tmp_path / "atlas", data=itertools.repeat(torch.zeros(3, 12, 12)))
