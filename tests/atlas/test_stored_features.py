"""Features of a whole data set: the same numbers from every engine, resumable, and read back as by a loader."""

import json
import pickle

import numpy as np
import pytest
import torch
from atlases import backbone, folder, images
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

from pytorch_grad_cam_pcasvm import PCASVMNet, atlas, extract_features, mean_activations
from pytorch_grad_cam_pcasvm.studio.atlas import disk, shards

COUNT = 50
TO_TENSOR = v2.Compose([v2.Resize((12, 12)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def data():
    return TensorDataset(*images(COUNT))


def extracted(out, net=None, **options):
    arguments = {"pool": "dense", "progress": False, "block": 8, "shard_size": 16} | options
    return atlas.extract(net or backbone(), data(), "0", out=out, **arguments)


def rows_of(net, source, pool="dense", **options):
    return extract_features(net, source, "0", pool=pool, progress=False, **options)


@pytest.mark.parametrize("pool", ["dense", ("dense", 3), "mean", None])
def test_stored_features_are_those_of_a_loader(tmp_path, pool):
    net = backbone()
    stored = extracted(tmp_path / "features", net, pool=pool)
    rows, labels = rows_of(net, stored, pool)
    expected, expected_labels = rows_of(net, DataLoader(data(), batch_size=7), pool)
    assert rows.shape == expected.shape
    assert np.abs(rows - expected).max() < 1e-6
    assert labels.tolist() == expected_labels.tolist()
    assert len(stored) == COUNT
    assert stored.labels.tolist() == images(COUNT)[1].tolist()
    assert (tmp_path / "features" / "part-00003.npz").exists()


def test_samples_coresets_and_places_are_those_of_a_loader(tmp_path):
    net = backbone()
    stored = extracted(tmp_path / "features", net)
    options = {"sample": 9, "coreset": 40, "places": True, "seed": 3}
    rows, labels, places = rows_of(net, stored, **options)
    expected = rows_of(net, DataLoader(data(), batch_size=8), **options)
    assert np.abs(rows - expected[0]).max() < 1e-6
    assert np.array_equal(labels, expected[1])
    assert np.array_equal(places, expected[2])
    head = make_pipeline(PCA(3), SVC()).fit(rows, labels)
    assert PCASVMNet(net, head, "0", pool="dense").eval()(images(2)[0]).shape == (2, 3, 6, 6)


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_means_of_layers_are_kept(tmp_path, processes):
    net = backbone()
    stored = extracted(tmp_path / "features", net, means=["0", "0.0", "2"], processes=processes)
    assert list(stored.means) == ["0", "0.0"]  # the last one has no positions
    for name, means in stored.means.items():
        expected = mean_activations(net, [images(COUNT)[0]], name, progress=False)
        torch.testing.assert_close(means, expected, rtol=1e-5, atol=1e-6)


def test_means_behind_the_features_are_left_out(tmp_path):
    stored = atlas.extract(backbone(), data(), "0.0", out=tmp_path / "f", means=["0"], progress=False)
    assert stored.means == {}


def test_a_file_of_which_no_image_can_be_read(tmp_path):
    pictures = [torch.full((3, 12, 12), torch.nan)] * 16 + [*images(20)[0]]
    stored = atlas.extract(
        backbone(), pictures, "0", out=tmp_path / "f", block=8, shard_size=8, skip_bad_images=True, progress=False
    )
    assert len(rows_of(backbone(), stored, None)[0]) == 20


def test_a_run_is_resumed(tmp_path):
    out, net = tmp_path / "features", backbone()
    extracted(out, net)
    before = {path.name: path.read_bytes() for path in out.glob("*.npz")}
    (out / "part-00001.npz").unlink()
    entries = json.loads((out / "manifest.json").read_text())
    times = (out / "part-00000.npz").stat().st_mtime_ns
    extracted(out, net)
    assert {path.name: path.read_bytes() for path in out.glob("*.npz")} == before
    assert (out / "part-00000.npz").stat().st_mtime_ns == times
    assert entries["complete"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"processes": 2}, {"engine": "ray", "processes": 2}], ids=["processes", "ray"])
def test_every_engine_writes_the_same(tmp_path, engine):
    if "engine" in engine:
        pytest.importorskip("ray")
    extracted(tmp_path / "one")
    extracted(tmp_path / "other", **engine)
    for path in (tmp_path / "one").glob("*.npz"):
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()


def test_features_of_a_folder_have_the_names_of_its_classes(tmp_path):
    net, photos = backbone(), folder(tmp_path / "photos", 6)
    stored = atlas.extract(net, photos, "0", out=tmp_path / "out", pool="mean", transform=TO_TENSOR, progress=False)
    assert sorted(set(stored.labels.tolist())) == ["cat", "dog"]
    assert all(name.startswith(("cat/", "dog/")) for name in stored.ids)
    rows, labels = rows_of(net, stored, "mean")
    assert labels.tolist() == stored.labels.tolist()
    assert rows.shape == (6, 8)
    assert len(pickle.loads(pickle.dumps(stored))) == 6


def test_features_of_something_else_are_refused(tmp_path):
    net = backbone()
    stored = extracted(tmp_path / "features", net)
    with pytest.raises(ValueError, match="features of something else"):
        rows_of(backbone(seed=1), stored)
    with pytest.raises(ValueError, match=r"pool=.*\(another pool\)"):
        rows_of(net, stored, "mean")
    with pytest.raises(ValueError, match="another features"):
        extract_features(net, stored, "0.1", pool="dense", progress=False)
    with pytest.raises(ValueError, match="has features of something else"):
        extracted(tmp_path / "features", backbone(seed=1))
    with pytest.raises(ValueError, match="has features, and not an atlas"):
        atlas.load(tmp_path / "features")
    with pytest.raises(FileNotFoundError, match="there are no features in"):
        atlas.Features(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="engine must be"):
        extracted(tmp_path / "other", engine="cloud")


def test_images_that_cannot_be_read_are_listed(tmp_path):
    photos = folder(tmp_path / "photos", 6)
    broken = sorted((photos / "cat").iterdir())[0]
    broken.write_bytes(b"nothing")
    arguments = {"out": tmp_path / "out", "pool": "mean", "transform": TO_TENSOR, "progress": False}
    with pytest.raises(RuntimeError, match="cannot be"):
        atlas.extract(backbone(), photos, "0", **arguments)
    stored = atlas.extract(backbone(), photos, "0", skip_bad_images=True, **arguments)
    assert len(stored) == 5
    assert len(rows_of(backbone(), stored, "mean")[0]) == 5
    assert f"cat/{broken.name}" in stored.manifest["bad"]


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (None, "is not a shard, or is truncated"),
        ({"row": np.arange(3)}, "is not a shard, or is truncated"),
        ({"marks": np.array("[]"), "row": np.arange(3)}, "is not a shard, or is truncated"),
        ({"marks": np.array("{}")}, "was changed since it was written"),
    ],
    ids=["one array", "no marks", "marks of another kind", "no rows"],
)
def test_a_file_that_is_no_shard_is_closed_again(tmp_path, monkeypatch, columns, why):
    path, load, loaded = tmp_path / "part-00000.npz", np.load, []
    with path.open("wb") as file:
        np.save(file, np.arange(3)) if columns is None else np.savez(file, **columns)
    monkeypatch.setattr(np, "load", lambda path: loaded.append(load(path)) or loaded[-1])
    with pytest.raises(ValueError, match=f"part-00000.npz {why}"), shards.open_shard(path):
        pass
    assert [getattr(each, "zip", None) for each in loaded] == [None]  # as NpzFile.close leaves it


def test_features_of_version_0_5_are_read_from_parquet(tmp_path):
    net = backbone()
    stored = extracted(tmp_path / "old", net)
    expected, labels = rows_of(net, stored)
    entries = stored.manifest | {"format": "pytorch_grad_cam_pcasvm features 1"}
    owner = {"atlas": disk.digest_manifest(entries)}
    for path in sorted(stored.folder.glob("*.npz")):
        with shards.open_shard(path) as shard:
            shards.write_shard(path.with_suffix(".parquet"), shard.read(shard.names), {}, shard.marks | owner)
        path.unlink()
    disk.write_manifest(stored.folder, entries)
    rows, read_labels = rows_of(net, atlas.Features(stored.folder))
    assert np.array_equal(rows, expected)
    assert np.array_equal(read_labels, labels)
    with pytest.raises(ValueError, match=r"has features of something else .*features 1"):
        extracted(tmp_path / "old", net)


@pytest.mark.parametrize("label", [2**70, "a\0", 2**53 + 1], ids=ascii)
def test_labels_that_npz_cannot_hold(tmp_path, label):
    x, _ = images(COUNT)
    others = "a" if isinstance(label, str) else 0.5 if label == 2**53 + 1 else 1
    rows = [(image, label if row == 40 else others) for row, image in enumerate(x)]
    with pytest.raises(ValueError, match=r"image '40' has the label .*, which npz cannot hold .*: give it another one"):
        atlas.extract(backbone(), rows, "0", out=tmp_path / "out", pool="mean", block=8, shard_size=16, progress=False)
    assert sorted(path.name for path in (tmp_path / "out").glob("part-*")) == ["part-00000.npz", "part-00001.npz"]
