"""A PCA of good photos on the command line and in Python: what it learns, chooses, says, and how more are added."""

import csv
import re
import shlex
import shutil

import numpy as np
import pytest
import torch
from sklearn.covariance import ShrunkCovariance
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.preprocessing import StandardScaler
from test_choosing import NETWORK, make_photos, run, save

from pytorch_grad_cam_pcasvm import CovariancePCA, SVMTarget, add_photos, choose_shrinkage, fit_model, load_model
from pytorch_grad_cam_pcasvm.network.features import compute_features
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.export.outputs import about, name_outputs
from pytorch_grad_cam_pcasvm.studio.model.choices import choose_threshold
from pytorch_grad_cam_pcasvm.studio.pictures.sheets import Sheets

TYPED = [*NETWORK, "--pool", "dense"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = make_photos(tmp_path_factory.mktemp("photos"), {"good": 11})
    return make_photos(root, {"more": 5}, seed=1)


@pytest.fixture(scope="module")
def fitted(photos, tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "model.safetensors"
    assert main(["fit", str(photos / "good"), *TYPED, "--out", str(file)]) == 0
    return file


def load(file):
    return load_model(file, NETWORK[1])


def read_patches(model, folder):
    """Return the features of each photo, (N, P, D), in double precision."""
    x = model.read(folder)
    with torch.no_grad():
        return compute_features(*model.net.feature_source(x), x).double().flatten(2).transpose(1, 2).numpy()


def score(patches, queries, shrinkage):
    """Return what scikit-learn, fitted on the patches of photos, says of the most anomalous ones of others."""
    rows = patches.reshape(-1, patches.shape[2])
    scaler = StandardScaler().fit(rows)
    shrunk = ShrunkCovariance(shrinkage=shrinkage).fit(scaler.transform(rows))
    squares = shrunk.mahalanobis(scaler.transform(queries.reshape(-1, rows.shape[1]))) * (len(rows) - 1) / len(rows)
    return squares.reshape(len(queries), -1).max(1)


def test_all_patches_of_good_photos_are_learned_by_scikit_learns_numbers(photos, fitted):
    model = load(fitted)
    patches, others = read_patches(model, photos / "good"), read_patches(model, photos / "more")
    kept = model.net.head.training_set.preparation["good"]
    scores = model.net.anomaly_score(model.read(photos / "more"))
    np.testing.assert_allclose(scores, score(patches, others, kept["shrinkage"]), rtol=1e-5)
    folds = list(GroupKFold(5).split(patches, groups=np.arange(11)))
    parts = [CovariancePCA().fit(patches[test].reshape(-1, patches.shape[2])) for _, test in folds]
    assert kept["shrinkage"] == choose_shrinkage(parts)[0]
    expected = np.empty(11)
    for fit, test in folds:
        expected[test] = score(patches[fit], patches[test], kept["shrinkage"])
    np.testing.assert_allclose(kept["scores"], expected, rtol=1e-5)
    assert model.threshold == pytest.approx(choose_threshold(expected).score, rel=1e-5)


def test_it_is_explained_and_its_maps_add_up(photos, fitted):
    model = load(fitted)
    images = model.read(photos / "more")
    for layers in (["1"], ["0"]):
        maps = model.explain(images, SVMTarget(sign="-", at="max"), layers=layers)
        np.testing.assert_allclose(maps.values[:, 0], model.net.anomaly_score(images), rtol=1e-5)
        assert ((maps.sums + maps.baseline_values - maps.values).abs() < 1e-5 * maps.values.abs()).all()


def test_sheets_say_which_part_of_an_anomaly_good_photos_do_not_have(photos, fitted, tmp_path, capsys):
    model = load(fitted)
    images, good = model.read(photos / "more"), read_patches(model, photos / "good")
    good, asked = good.reshape(-1, good.shape[2]), read_patches(model, photos / "more")
    scaler, shrinkage = StandardScaler().fit(good), model.net.head.training_set.preparation["good"]["shrinkage"]
    pca = PCA(svd_solver="full").fit(scaler.transform(good))
    variances = pca.explained_variance_
    weights = 1 / ((1 - shrinkage) * variances + shrinkage * variances.mean())
    terms = np.stack([pca.transform(scaler.transform(photo)) ** 2 * weights for photo in asked])
    terms = terms[np.arange(len(terms)), terms.sum(2).argmax(1)]
    shown = model.explain(images, SVMTarget(sign="-", at="max"))
    outputs = {name: tensor.numpy() for name, tensor in name_outputs(shown).items()}
    np.testing.assert_allclose(outputs["parts"], terms, rtol=1e-4, atol=1e-6 * terms.max())
    np.testing.assert_allclose(outputs["parts"].sum(1), outputs["anomaly"].max((1, 2)), rtol=1e-6)
    count = 1 + int((np.cumsum(pca.explained_variance_ratio_) < 0.95).sum())
    share = terms[0, count:].sum() / terms[0].sum()
    usual, folds = [], GroupKFold(5).split(np.zeros(11), groups=np.arange(11))
    photos_of = read_patches(model, photos / "good")
    for fit, test in folds:
        rows = photos_of[fit].reshape(-1, photos_of.shape[2])
        scaled, own = StandardScaler().fit(rows), PCA(svd_solver="full")
        own.fit(scaled.transform(rows))
        main = 1 + int((np.cumsum(own.explained_variance_ratio_) < 0.95).sum())
        spread = own.explained_variance_
        for photo in photos_of[test]:
            squares = own.transform(scaled.transform(photo)) ** 2
            squares /= (1 - shrinkage) * spread + shrinkage * spread.mean()
            strongest = squares[squares.sum(1).argmax()]
            usual.append(strongest[main:].sum() / strongest.sum())
    assert model.net.head.training_set.preparation["good"]["outside"] == pytest.approx(np.median(usual), rel=1e-4)
    largest = int(terms[0, :count].argmax())
    said = Sheets(about(shown.targets, model.net)).reason(outputs, 0)
    assert said.startswith(
        f"{share:.0%} of the anomaly is outside of the {count} main components of good photos (of other good photos "
        f"{np.median(usual):.0%}); "
    )
    part = terms[0, largest] / terms[0].sum()
    most = f"component {largest + 1} alone adds {part:.0%}" if part >= 0.1 else "no component alone adds a tenth"
    assert said.endswith(most)
    run(capsys, "explain", photos / "more", "--model", fitted, "--trust", NETWORK[1], "--out", tmp_path)
    (first, *_) = csv.DictReader((tmp_path / "values.csv").open())
    assert float(first[f"outside of {count} components"]) == pytest.approx(share, rel=1e-4)
    assert said in (tmp_path / "index.html").read_text()


def test_photos_that_are_added_count_as_those_of_the_fit(photos, fitted, tmp_path, capsys):
    out, model = tmp_path / "added.safetensors", load(fitted)
    status, told, error = run(capsys, "add", fitted, photos / "more", "--trust", NETWORK[1], "--out", out)
    assert status == 0, error
    kept = model.net.head.training_set.preparation["good"]
    new = model.net.anomaly_score(model.read(photos / "more"))
    called = f"{(new > model.threshold).sum()} of which it called faulty (above {model.threshold:.4g})"
    assert f"added 5 photos to 11, {called}; the shrinkage stays" in told
    added = load(out)
    patches = np.concatenate([read_patches(model, photos / name) for name in ("good", "more")])
    images = torch.cat([model.read(photos / name) for name in ("good", "more")])
    expected = score(patches, patches, kept["shrinkage"])
    np.testing.assert_allclose(added.net.anomaly_score(images), expected, rtol=1e-4)  # the sums are float32
    assert added.threshold == pytest.approx(choose_threshold([*kept["scores"], *new]).score)
    assert added.about["images"] == 16
    again = add_photos(model, photos / "more")
    np.testing.assert_allclose(again.net.anomaly_score(images), added.net.anomaly_score(images), rtol=1e-6)
    assert len(model.net.head.training_set.preparation["good"]["scores"]) == 11  # and it stays as it was
    status, _, error = run(capsys, "add", out, photos / "more", "--trust", NETWORK[1])
    assert status == 2
    assert "there is no photo to add: the model has learned all of these before" in error
    explained = ["explain", photos / "more", "--model", out, "--trust", NETWORK[1], "--out", tmp_path / "maps"]
    assert "trained on" in run(capsys, *explained)[1]


def test_a_model_without_sums_takes_no_photos():
    images, net = torch.randn(8, 3, 8, 8), torch.nn.Conv2d(3, 4, 3)
    model = fit_model(net, [(images, list("ab") * 4)], LogisticRegression(), pool="mean", resample=0, progress=False)
    with pytest.raises(ValueError, match="to models of good photos alone"):
        add_photos(model, images)


def test_a_photo_that_is_no_good_one_is_named(tmp_path, capsys):
    root = make_photos(tmp_path, {"good": 9})
    save(root / "good" / "odd.png", np.random.default_rng(5), [0, 0, 0], spread=90.0)
    _, told, _ = run(capsys, "fit", root / "good", *TYPED, "--out", tmp_path / "m.safetensors")
    assert "unlike the other good photos: odd.png (anomaly" in told
    assert "the threshold rests on them; --skip-suspicious leaves them out" in told
    out = tmp_path / "without.safetensors", tmp_path / "few.safetensors"
    _, told, _ = run(capsys, "fit", root / "good", *TYPED, "--skip-suspicious", "--out", out[0])
    assert "odd.png" in told
    assert "left out, and fitted again without them" in told
    (root / "good" / "odd.png").unlink()
    run(capsys, "fit", root / "good", *TYPED, "--out", out[1])
    kept, expected = (load(file).net.head.training_set for file in out)
    assert kept.preparation["good"]["files"] == expected.preparation["good"]["files"]
    np.testing.assert_allclose(kept.preparation["good"]["scores"], expected.preparation["good"]["scores"], rtol=1e-9)
    np.testing.assert_allclose(kept.sums.scatter_, expected.sums.scatter_, rtol=1e-5)
    classes = make_photos(tmp_path / "classes", {"a": 3, "b": 3})
    _, _, error = run(capsys, "fit", classes, *NETWORK, "--skip-suspicious")
    assert "--skip-suspicious is for --classifier pca" in error


def test_of_one_photo_quarters_are_left_out(tmp_path, capsys):
    root = make_photos(tmp_path, {"good": 1})
    status, told, error = run(capsys, "fit", root / "good", *TYPED, "--out", tmp_path / "m.safetensors")
    assert status == 0, error
    assert "that under which quarters of the photo that were left out are likeliest" in told
    assert "no threshold: there is one good photo only" in told
    assert load(tmp_path / "m.safetensors").threshold is None


@pytest.mark.parametrize(("normal", "taken"), [((), False), (("--normal", "parts"), True)])
def test_a_folder_of_another_name_is_taken_where_that_is_said(normal, taken, tmp_path, capsys):
    root = make_photos(tmp_path, {"parts": 4}) / "parts"
    status, told, error = run(capsys, "fit", root, *TYPED, *normal, "--out", tmp_path / "m.safetensors")
    assert status == (0 if taken else 2), error
    if taken:
        assert "all photos are taken for good ones, being in 'parts'" in told
    else:
        assert f"if there is nothing to find on them: pcasvm-cam fit {root}" in error
        assert "--classifier pca" in error


def test_what_a_pca_of_all_patches_does_not_take_is_refused_and_left_out_of_the_proposal(tmp_path, capsys):
    root, out = make_photos(tmp_path, {"good": 4}) / "good", ["--out", tmp_path / "m.safetensors"]
    few = [*TYPED, "--components", "3", "--coreset", "0.5"]
    for typed in ([], ["--classifier", "pca"]):
        error = run(capsys, "fit", root, *few, *out, *typed)[2]
        assert "--components and --coreset are not for --classifier pca" in error
    assert "add --pool dense:3" in run(capsys, "fit", root, *NETWORK, *out, "--classifier", "pca")[2]
    flat = shutil.copytree(root, tmp_path / "flat")
    line = run(capsys, "fit", flat, *few, *out)[2].rpartition("pcasvm-cam ")[2]
    assert "--components" not in line
    assert run(capsys, *shlex.split(line))[0] == 0


def test_photos_of_objects_and_those_that_are_added_share_the_promise(tmp_path, capsys):
    root, model = make_photos(tmp_path, {"good": 12, "more": 3}), tmp_path / "m.safetensors"
    for number, path in enumerate(sorted((root / "good").iterdir())):
        (root / "parts" / f"{number // 4}").mkdir(parents=True, exist_ok=True)
        path.rename(root / "parts" / f"{number // 4}" / f"{number % 4}.png")
    save(root / "parts" / "0" / "0.png", np.random.default_rng(5), [0, 0, 0], spread=90.0)
    typed = [*TYPED, "--classifier", "pca", "--groups", "1", "--out", model]
    told = run(capsys, "fit", root / "parts", *typed)[1]
    assert "at most 1 in 4 of new good ones, by the scores of 3 objects" in told
    assert re.search(r"unlike the other good photos: 0/0.png.* \(anomaly", told)  # one of three files of that name
    _, told, error = run(capsys, "add", model, root / "more", "--trust", NETWORK[1])
    assert "at most 1 in 7 of new good ones, by the scores of 6 good photos" in told, error


@pytest.mark.parametrize(
    ("folders", "match"),
    [
        ({"a": 2, "b": 2}, "has folders of a, b: name that of the good ones"),
        ({}, "has no images"),
        ({"odd": 0}, "unlike the other good photos: page.png .*: take them out, or if they are good, write another"),
    ],
)
def test_what_would_spoil_a_model_is_not_added(folders, match, fitted, tmp_path, capsys):
    root = make_photos(tmp_path / "new", folders)
    root.mkdir(exist_ok=True)
    if "odd" in folders:
        save(root / "page.png", np.random.default_rng(5), [0, 0, 0], spread=120.0)
    model = shutil.copy(fitted, tmp_path / "m.safetensors")
    before = model.read_bytes()
    status, _, error = run(capsys, "add", model, root, "--trust", NETWORK[1])
    assert status == 2
    assert re.search(match, error)
    assert model.read_bytes() == before


@pytest.mark.optional
@pytest.mark.parametrize(
    ("name", "size", "layers"),
    [
        ("vit_small_patch14_reg4_dinov2.lvd142m", 112, []),
        ("vit_small_patch16_dinov3.lvd1689m", 64, ["--features", "blocks.5", "--features", "blocks.8"]),
    ],
)
def test_patches_of_dino_are_learned_and_explained(name, size, layers, tmp_path, capsys):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    torch.save(timm.create_model(name, pretrained=False, num_classes=0).state_dict(), tmp_path / "random.pth")
    root, model = make_photos(tmp_path / "photos", {"good": 5}), tmp_path / "dino.safetensors"
    typed = ["--backbone", f"timm:{name}", "--weights", tmp_path / "random.pth", "--device", "cpu", "--no-cache"]
    status, _, error = run(capsys, "fit", root / "good", *typed, "--size", str(size), *layers, "--out", model)
    assert status == 0, error
    net = load_model(model)
    assert net.layers == ("blocks.5",) if layers else ("blocks.11",)
    images = net.read(root / "good")
    maps = net.explain(images, SVMTarget(sign="-", at="max"))
    np.testing.assert_allclose(maps.values[:, 0], net.net.anomaly_score(images), rtol=1e-4)
    assert ((maps.sums + maps.baseline_values - maps.values).abs() < 1e-4 * maps.values.abs()).all()
    status, _, error = run(capsys, "explain", root / "good", "--model", model, "--out", tmp_path / "maps")
    assert status == 0, error
