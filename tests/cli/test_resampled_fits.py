"""Resampled heads on the command line: of what ``fit`` makes them, what it says, and what ``explain`` writes."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from test_choosing import NETWORK, make_photos, read_features, run
from test_copies_in_folds import add_copies

from pytorch_grad_cam_pcasvm import SVMTarget, atlas, explain_heads, load_model, resample_heads
from pytorch_grad_cam_pcasvm.studio.model import resampling

OPTIONS = [*NETWORK, "--components", "4", "--C", "10", "--class-weight", "none"]
SAID = re.compile(
    r"^maps say how sure they are, by 30 refits on other samples of the same photos: \d+\.\d s, 0\.\d MB of the file "
    r"\(--resample 0: none\)$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"), {"crack": 12, "good": 12}, apart=20.0)


def refit(model, root, groups=None, count=30):
    """Return what thirty refits by hand say of the photos, (30, N, C)."""
    features, labels = read_features(model, root)
    pipeline = make_pipeline(StandardScaler(), PCA(4, random_state=0), SVC(C=10)).fit(features, labels)
    names = np.array(model.classes)[labels]
    return features, say(resample_heads(pipeline, features, names, count, groups), features)


def say(heads, features):
    with torch.no_grad():
        return torch.stack([head(torch.from_numpy(features).double()).values[-1] for head in heads])


def test_a_model_has_thirty_refits_in_its_file(photos, tmp_path, capsys):
    file, again = tmp_path / "model.safetensors", tmp_path / "again.safetensors"
    status, told, _ = run(capsys, "fit", photos, *OPTIONS, "--out", file)
    assert status == 0
    assert SAID.search(told)
    model = load_model(file, NETWORK[1])
    unstable = [str(b + 1) for b, cosine in enumerate(model.net.head.resamples.stability) if cosine < 0.9]
    assert 0 < len(unstable) < 4
    assert f"not stable: {len(unstable)} of 4 components, numbers {', '.join(unstable)}: other photos" in told
    trusted = ["--model", file, "--trust", NETWORK[1], "--device", "cpu"]
    status, _, complaint = run(capsys, "explain", photos, *trusted, "--out", tmp_path / "m")
    assert status == 0, complaint
    assert "stable" not in complaint
    features, expected = refit(model, photos)
    torch.testing.assert_close(say(model.net.head.resamples.heads, features), expected, rtol=1e-4, atol=1e-4)
    run(capsys, "fit", photos, *OPTIONS, "--out", again)
    assert file.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("named", [True, False], ids=["objects", "copies"])
def test_photos_of_an_object_and_copies_are_drawn_together(named, tmp_path, capsys):
    name = "{:02}/{}.png" if named else "{:02}_aug{}.png"
    root = add_copies(tmp_path / "photos", name.format, lambda number: "ab"[number % 2])
    typed = ["--groups", "2"] if named else []
    status, told, _ = run(capsys, "fit", root, *OPTIONS, *typed, "--out", tmp_path / "model.safetensors")
    assert status == 0
    assert SAID.search(told)
    model = load_model(tmp_path / "model.safetensors", NETWORK[1])
    features, expected = refit(model, root, np.repeat(np.arange(16), 3))
    torch.testing.assert_close(say(model.net.head.resamples.heads, features), expected, rtol=1e-4, atol=1e-4)


def test_as_many_as_are_typed(photos, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    _, told, _ = run(capsys, "fit", photos, *OPTIONS, "--resample", "0", "--out", file)
    assert "sure" not in told
    assert load_model(file, NETWORK[1]).net.head.resamples is None
    _, told, _ = run(capsys, "fit", photos, *OPTIONS, "--resample", "3", "--out", file)
    assert "by 3 refits" in told
    assert len(load_model(file, NETWORK[1]).net.head.resamples.heads) == 3
    status, _, error = run(capsys, "fit", photos, *OPTIONS, "--resample", "1", "--out", file)
    assert status == 2
    assert error == "error: --resample 1: errors are a spread, which needs 2 refits or more, or 0 for none\n"


def test_too_few_photos_are_told_and_refused_only_on_request(tmp_path, capsys):
    few = make_photos(tmp_path / "photos", {"crack": 7, "good": 12}, apart=20.0)
    reason = "there are 7 photos (or groups) of the class 'crack', and resampled heads need 8, as samples of fewer are"
    reason += " too alike: add photos, or do without"
    status, told, _ = run(capsys, "fit", few, *OPTIONS, "--out", tmp_path / "model.safetensors")
    assert status == 0
    assert f"\nmaps do not say how sure they are: {reason}\n" in told
    status, _, error = run(capsys, "fit", few, *OPTIONS, "--resample", "30", "--out", tmp_path / "other.safetensors")
    assert status == 2
    assert error.endswith(f"\nerror: {reason}\n")
    assert not (tmp_path / "other.safetensors").exists()


def test_what_takes_long_is_made_on_request_alone(photos, tmp_path, capsys):
    forest = [*NETWORK, "--components", "3", "--classifier", "forest", "--out", tmp_path / "model.safetensors"]
    _, told, _ = run(capsys, "fit", photos, *forest)
    said = r"maps do not say how sure they are: refits of a RandomForestClassifier are slow.*; ask for them with (.*)\n"
    assert re.search(said, told)[1] == "--resample 30"
    _, told, _ = run(capsys, "fit", photos, *forest, "--resample", "2")
    assert "by 2 refits" in told


@pytest.mark.parametrize("of", ["good", "classes"])
def test_patches_of_a_photo_are_drawn_together(of, photos, tmp_path, capsys, monkeypatch):
    drawn = []

    def resample(*given):
        drawn.append(given)
        return resample_heads(*given)

    monkeypatch.setattr(resampling, "resample_heads", resample)
    root = photos / "good" if of == "good" else photos
    dense = ["--pool", "dense", "--components", "3", "--out", tmp_path / "model.safetensors"]
    dense += ["--classifier", "residual"] if of == "good" else ["--C", "1"]
    status, told, _ = run(capsys, "fit", root, *NETWORK, *dense, "--resample", "2")
    assert status == 0
    assert "by 2 refits" in told
    ((_, rows, labels, count, groups, _),) = drawn
    assert count == 2
    assert len(set(groups.tolist())) == (12 if of == "good" else 24)
    if of == "good":
        assert labels is None
        assert len(rows) == 12 * 8 * 8
    else:  # three faults of each photo, and all patches of good photos: all of one class
        assert {(group < 12, label) for group, label in zip(groups.tolist(), labels.tolist(), strict=True)} == {
            (True, "crack"), (False, "good"),
        }  # fmt: skip


@pytest.fixture
def explain(photos, tmp_path, capsys):
    """Explain photos with a model of thirty refits; return the model, and the columns and rows of values.csv."""
    file = tmp_path / "model.safetensors"
    run(capsys, "fit", photos, *OPTIONS, "--out", file)
    model = load_model(file, NETWORK[1])

    def read(*options):
        command = ["explain", photos / "crack", "--model", file, "--trust", NETWORK[1], "--device", "cpu"]
        assert run(capsys, *command, *options, "--out", tmp_path / "maps")[0] == 0
        with (tmp_path / "maps" / "values.csv").open() as values:
            columns, *rows = csv.reader(values)
        return model, columns, [dict(zip(columns, row, strict=True)) for row in rows]

    return read


def test_the_table_has_the_error_of_a_value_and_how_much_is_sure(explain, photos):
    model, columns, rows = explain()
    assert columns[2:5] == ["margin of predicted", "error", "sure"]
    assert columns[5:] == [*(f"component {b}" for b in range(1, 5)), "note"]
    paths = sorted((photos / "crack").iterdir())
    for row, path in zip(rows, paths, strict=True):
        x = model.read(path)
        label = model.predict(x)[0]
        targets = [SVMTarget(label)]
        own = model.explain(x, targets)
        heads = model.net.head.resamples.heads
        for head in heads:  # each start is where the refit is undecided, and varies over positions as the model's
            head.training_set.means |= model.means
        maps = explain_heads(model.cam(), x, heads, targets, own_starts=True)
        spread = torch.stack([one.maps for one in maps]).std(0)
        of_value = torch.stack([one.values for one in maps]).std(0)
        assert float(row["error"]) == pytest.approx(float(of_value), rel=1e-4)
        size = own.maps.abs()
        share = size[size > float(student.ppf(0.975, 29)) * spread].sum() / size.sum()
        assert float(row["sure"]) == pytest.approx(float(share), rel=1e-4)
    assert len({row["sure"] for row in rows}) > 1


def test_of_methods_that_make_negative_parts_anew_nothing_is_known(explain):
    _, columns, rows = explain("--method", "ClosedFormLayerCAM")
    assert columns[3:5] == ["error", "sure"]
    assert {row["sure"] for row in rows} == {""}
    assert all(float(row["error"]) > 0 for row in rows)


def test_without_refits_the_table_is_as_before(photos, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    run(capsys, "fit", photos, *OPTIONS, "--resample", "0", "--out", file)
    run(capsys, "explain", photos, "--model", file, "--trust", NETWORK[1], "--device", "cpu", "--out", tmp_path)
    assert not {"error", "sure"} & {*(tmp_path / "values.csv").read_text().splitlines()[0].split(",")}


def test_evaluate_says_how_much_is_sure_and_whether_more_photos_would_help(photos, tmp_path, capsys):
    file, out = tmp_path / "model.safetensors", tmp_path / "report"
    run(capsys, "fit", photos, *OPTIONS, "--out", file)
    new = make_photos(tmp_path / "new", {"crack": 12, "good": 12}, apart=20.0, seed=1)
    options = ["--trust", NETWORK[1], "--device", "cpu", "--model", file, "--out", out, "--count", "24"]
    status, told, error = run(capsys, "evaluate", new, *options)
    assert status == 0, error
    model = load_model(file, NETWORK[1])
    maps = model.explain(new / "crack", SVMTarget()), model.explain(new / "good", SVMTarget())
    size = torch.cat([one.maps for one in maps]).abs()
    ratio = size / torch.cat([one.error for one in maps])
    now, then = (float(size[ratio * root > float(student.ppf(0.975, 29))].sum() / size.sum()) for root in (1, 2**0.5))
    words = "would help" if then - now >= 0.05 else "would hardly help"
    said = f"of the evidence on these maps {now:.0%} is sure; more training photos {words}: of twice as many about "
    assert f"{said}{then:.0%} would be, if errors fall with the root of their number\n" in told
    assert said in (out / "index.html").read_text()
    assert said in json.loads((out / "report.json").read_text())["note"]


def test_an_atlas_says_how_many_decisions_are_open(photos, tmp_path, capsys):
    file, out = tmp_path / "model.safetensors", tmp_path / "atlas"
    trusted = ["--model", file, "--trust", NETWORK[1], "--device", "cpu"]
    run(capsys, "fit", photos, *OPTIONS, "--out", file)
    status, told, complaint = run(capsys, "atlas", photos, *trusted, "--out", out)
    assert status == 0, complaint
    store = atlas.load(out)
    near = int((np.abs(store.margins) < 2 * store.decision_errors).sum())
    assert 0 < near < len(store)
    assert f"{near} of 24 decisions are open: other training photos might decide otherwise" in told
