"""The command ``explain`` with a network and a head, as it is typed; and heads without a gradient in all commands."""

import csv
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from atlases import folder
from PIL import Image
from small import SIDE, of_fit
from torchvision.transforms.functional import normalize, to_tensor

from pytorch_grad_cam_pcasvm import ContributionCAM, Head, PCASVMNet, PCATarget, SVMTarget, atlas
from pytorch_grad_cam_pcasvm.runtime.pictures import colour_table
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.data import images as image_files
from pytorch_grad_cam_pcasvm.studio.export.outputs import about
from pytorch_grad_cam_pcasvm.studio.pictures import sheets as room
from pytorch_grad_cam_pcasvm.studio.pictures.sheets import Sheets

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
OWN = """
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression


class Nearest(ClassifierMixin, BaseEstimator):
    def fit(self, x, y):
        self.classes_ = np.unique(y)
        self.means_ = np.stack([x[y == label].mean(0) for label in self.classes_])
        return self

    def predict(self, x):
        return self.classes_[((x[:, None] - self.means_) ** 2).sum(-1).argmin(1)]


class Numbered(Nearest):
    def fit(self, x, y):
        if {*y.tolist()} != {*range(len(np.unique(y)))}:
            raise ValueError("Invalid classes inferred from unique values of `y`. Expected: [0 1 2]")
        return super().fit(x, y)


class NumberedLogistic(LogisticRegression):
    def fit(self, x, y):
        return super().fit(x, np.asarray(y).astype(int))


def thing():
    return object()
"""


@pytest.fixture(scope="module")
def typed(weights, tmp_path_factory):
    """Photos, a network as it is typed, and the heads of two classifiers: a forest and one of the user's own."""
    root = tmp_path_factory.mktemp("typed")
    (root / "own_classifier.py").write_text(OWN)
    sys.path.insert(0, str(root))
    photos = folder(root / "photos", 8)
    network = ["--backbone", "squeezenet1_1", "--weights", str(weights), "--layer", "features"]
    heads = {}
    for name in ("forest", "own_classifier:Nearest"):
        heads[name] = root / f"{name.partition(':')[0]}.safetensors"
        fit = ["fit", str(photos), *of_fit(network), "--classifier", name, "--out", str(heads[name])]
        assert main([*fit, "--components", "3"]) == 0
    yield SimpleNamespace(photos=photos, network=network, forest=heads["forest"], own=heads["own_classifier:Nearest"])
    sys.path.remove(str(root))


def rows_of(file):
    with file.open() as lines:
        head, *rows = csv.reader(lines)
    assert head[-1] == "note"
    assert {row[-1] for row in rows} <= {"", "unlike the training pictures"}
    return head[:-1], [row[:-1] for row in rows]


def test_the_maps_of_a_head_are_those_of_its_method(typed, weights, tmp_path):
    images = [str(typed.photos), "--model", str(typed.forest), "--out", str(tmp_path)]
    assert main(["explain", *typed.network, *images, "--batch-size", "5"]) == 0
    head, rows = rows_of(tmp_path / "values.csv")
    assert head == [
        "image",
        "predicted",
        "labelled",
        "margin of predicted",
        "component 1",
        "component 2",
        "component 3",
    ]
    backbone = torchvision.models.squeezenet1_1(weights=None).eval()
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    net = PCASVMNet(backbone, Head.load(typed.forest), "features", pool="mean")
    pictures = [Image.open(typed.photos / row[0]).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for row in rows]
    x = torch.stack([normalize(to_tensor(picture), *IMAGENET) for picture in pictures])
    maps = ContributionCAM(net, ["features"]).explain(x, [SVMTarget(), *map(PCATarget, range(3))])
    values = maps.values.double().numpy()
    assert np.abs(np.array([row[3:] for row in rows], float) - values).max() <= 1e-4 * np.abs(values).max()
    assert [row[1] for row in rows] == net.predict(x).tolist()
    photo = Image.open(typed.photos / rows[0][0]).convert("RGB")
    assert photo.width >= photo.height
    size = (room.LARGE, round(room.LARGE * photo.height / photo.width))
    with Image.open((tmp_path / rows[0][0]).with_suffix(".png")) as sheet:
        assert sheet.width == 2 * (room.LARGE + 10) + 10
        shown = np.asarray(sheet.convert("RGB"), float)
    expected = np.asarray(photo.resize(size, Image.Resampling.BILINEAR), float)
    left = shown[:, 10 : 10 + size[0]]
    corners = [np.abs(left[y : y + size[1]] - expected).max() for y in range(len(left) - size[1])]
    assert min(corners) <= 1.5  # the whole picture, in its own shape
    page = (tmp_path / "index.html").read_text()
    assert page.count("<figure") == len(rows)
    assert page.count('class="wrong"') == sum(row[1] != row[2] for row in rows)
    assert "http" not in page


def test_a_photo_is_decoded_once(typed, tmp_path, monkeypatch):
    read, paths = image_files.read_picture, []
    monkeypatch.setattr(image_files, "read_picture", lambda path, **how: paths.append(path) or read(path, **how))
    command = ["explain", *typed.network, str(typed.photos), "--model", str(typed.forest)]
    assert main([*command, "--components", "0", "--out", str(tmp_path)]) == 0
    assert len(paths) == len({*paths}) == 8


def test_folders_that_are_no_classes_are_not_wrong(typed, tmp_path):
    photos = folder(tmp_path / "photos", 3)
    (photos / "cat").rename(photos / "monday")
    command = ["explain", *typed.network, str(photos), "--model", str(typed.forest), "--components", "0"]
    assert main([*command, "--out", str(tmp_path / "maps")]) == 0
    _, rows = rows_of(tmp_path / "maps" / "values.csv")
    judged = [row for row in rows if row[2] != "monday"]
    assert 0 < len(judged) < len(rows)
    page = (tmp_path / "maps" / "index.html").read_text()
    assert page.count('class="wrong"') == sum(row[1] != row[2] for row in judged)
    assert f"Of the {len(judged)} with a label, " in page


def test_what_a_reduction_alone_leaves_out_is_drawn(typed, tmp_path):
    head, photos = tmp_path / "residual.safetensors", [str(typed.photos / "cat")]
    fit = ["fit", *photos, *of_fit(typed.network), "--classifier", "residual", "--components", "3", "--out", str(head)]
    assert main(fit) == 0
    heights = []
    for count in ([], ["--components", "2"]):
        out = tmp_path / f"maps{len(count)}"
        assert main(["explain", *typed.network, *photos, "--model", str(head), *count, "--out", str(out)]) == 0
        _, rows = rows_of(out / "values.csv")
        with Image.open((out / rows[0][0]).with_suffix(".png")) as sheet:
            heights.append(sheet.height)
    assert heights[0] < heights[1]  # two components below what is left out


@pytest.mark.slow
def test_finer_layers_say_where(typed, weights, tmp_path, capsys):
    head = tmp_path / "head.safetensors"
    fit = [str(typed.photos), *typed.network, "--components", "3", "--out", str(head)]
    assert main(["fit", *fit]) == 0
    network = [*typed.network, "--layer", "features.7", "--features", "features", str(typed.photos)]
    options = [*network, "--model", str(head), "--components", "0"]
    assert main(["explain", *options, "--out", str(tmp_path / "maps")]) == 0
    _, rows = rows_of(tmp_path / "maps" / "values.csv")
    assert len(rows) == 8
    backbone = torchvision.models.squeezenet1_1(weights=None).eval()
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    net = PCASVMNet(backbone, Head.load(head), "features", pool="mean").eval()
    photo = Image.open(typed.photos / rows[0][0]).convert("RGB")
    x = normalize(to_tensor(photo.resize((SIDE, SIDE), Image.Resampling.BILINEAR)), *IMAGENET).unsqueeze(0)
    maps = ContributionCAM(net, ["features", "features.7"]).explain(x, SVMTarget()).maps[0, 0]
    size = (room.LARGE, round(room.LARGE * photo.height / photo.width))
    sheets, shown = Sheets(about([SVMTarget()], net)), photo.resize(size, Image.Resampling.BILINEAR)
    expected = np.asarray(sheets.overlay(shown, (maps / maps.abs().max()).numpy()), float)
    with Image.open((tmp_path / "maps" / rows[0][0]).with_suffix(".png")) as sheet:
        drawn = np.asarray(sheet.convert("RGB"), float)[:, 20 + size[0] : 20 + 2 * size[0]]
    assert min(np.abs(drawn[y : y + size[1]] - expected).max() for y in range(len(drawn) - size[1])) <= 12
    assert main(["atlas", *network, "--model", str(head), "--out", str(tmp_path / "atlas")]) == 2
    capsys.readouterr()
    few = ["--count", "4", "--all-images", "--batch-size", "2", "--out", str(tmp_path / "evaluation")]
    assert main(["evaluate", *network, "--model", str(head), *few, "--method", "ClosedFormGradCAM"]) == 2
    assert "which ContributionCAM alone makes one map of" in capsys.readouterr().err
    assert main(["evaluate", *network, "--model", str(head), *few]) == 0
    assert "maps of methods other than ContributionCAM are of features alone" in capsys.readouterr().out
    results = json.loads((tmp_path / "evaluation" / "report.json").read_text())["results"]
    assert "reason" not in results["sensitivity"]


def test_a_few_components_or_none(typed, tmp_path):
    command = ["explain", *typed.network, str(typed.photos), "--model", str(typed.forest)]
    heights = []
    for count in (1, 0):
        out = tmp_path / str(count)
        assert main([*command, "--components", str(count), "--out", str(out)]) == 0
        head, rows = rows_of(out / "values.csv")
        assert head == ["image", "predicted", "labelled", "margin of predicted", *(f"component {b}" for b in (1, 2, 3))]
        with Image.open((out / rows[0][0]).with_suffix(".png")) as sheet:
            heights.append(sheet.height)
    assert heights[0] > heights[1]


def test_pictures_that_cannot_be_read_are_left_out(typed, tmp_path, capsys):
    photos = folder(tmp_path / "photos", 3)
    (photos / "cat" / "bad.png").write_bytes(b"no picture")
    command = ["explain", *typed.network, str(photos), "--model", str(typed.forest), "--components", "0"]
    assert main([*command, "--out", str(tmp_path / "maps")]) == 2
    assert "bad.png cannot be read" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "maps"), "--skip-bad-images"]) == 0
    assert "wrote maps of 3 images" in capsys.readouterr().out


def test_what_explain_lacks_or_has_too_much_of(typed, tmp_path, capsys):
    (onnx := tmp_path / "a.onnx").touch()
    command = ["explain", str(typed.photos), "--out", str(tmp_path / "maps")]
    for options, words in (
        ([], "there is no model model.safetensors: make one with 'pcasvm-cam fit PHOTOS'"),
        (["--model", str(onnx), "--components", "1"], "--components is not for"),
        (
            [*typed.network, "--model", str(typed.forest), "--components", "9"],
            "--components 9, but the head has 3 components",
        ),
        ([*typed.network, "--model", str(typed.forest), "--method", "ClosedFormGradCAM"], "use ContributionCAM"),
    ):
        assert main([*command, *options]) == 2
        assert words in capsys.readouterr().err


def test_estimators_of_ones_own_are_read_where_they_are_trusted(typed, tmp_path, capsys):
    images = [*typed.network, str(typed.photos), "--model", str(typed.own)]
    assert main(["explain", *images, "--out", str(tmp_path / "maps")]) == 2
    assert "of the types own_classifier.Nearest, which are not read" in (error := capsys.readouterr().err)
    assert "if you trust them and the file, add --trust for each" in error
    trust = ["--trust", "own_classifier.Nearest"]
    assert main(["explain", *images, *trust, "--out", str(tmp_path / "maps")]) == 0
    # A vote is 1 or -1: maps start in the other class, and add up to the difference.
    _, rows = rows_of(tmp_path / "maps" / "values.csv")
    assert {row[3] for row in rows} == {"1"}
    assert main(["atlas", *images, *trust, "--out", str(tmp_path / "atlas")]) == 0
    assert main(["explore", str(tmp_path / "atlas"), "--out", str(tmp_path / "page")]) == 2
    assert "add --trust for each" in capsys.readouterr().err
    assert main(["explore", str(tmp_path / "atlas"), "--out", str(tmp_path / "page"), *trust]) == 0


@pytest.mark.parametrize("name", ["Numbered", "NumberedLogistic"])
def test_classifiers_that_take_numbers_alone_get_these_and_the_head_the_names(name, typed, tmp_path, capsys):
    head = tmp_path / "head.safetensors"
    fit = ["fit", str(typed.photos), *of_fit(typed.network), "--classifier", f"own_classifier:{name}"]
    assert main([*fit, "--components", "3", "--out", str(head)]) == 0
    assert "-fold cross-validation: " in capsys.readouterr().out
    trust = ["--trust", f"own_classifier.{name}"] if name == "Numbered" else []
    loaded = Head.load(head, trust[1:])
    folders = sorted(path.name for path in typed.photos.iterdir())
    assert loaded.classes_.tolist() == folders
    again = tmp_path / "again.safetensors"
    loaded.save(again)
    assert Head.load(again, trust[1:]).digest() == loaded.digest()
    images = [*typed.network, str(typed.photos), "--model", str(again), *trust]
    explain = [*images, "--class", folders[1], "--components", "0"]
    assert main(["explain", *explain, "--out", str(tmp_path / "maps")]) == 0
    columns, rows = rows_of(tmp_path / "maps" / "values.csv")
    assert columns[3] == folders[1]
    assert {row[1] for row in rows} <= {*folders}
    # The same as a classifier of the same kind that was fitted on the names.
    other = typed.own
    if name == "NumberedLogistic":
        other = tmp_path / "other.safetensors"
        fit[fit.index(f"own_classifier:{name}")] = "sklearn.linear_model:LogisticRegression"
        assert main([*fit, "--components", "3", "--out", str(other)]) == 0
    expected = [*explain, "--model", str(other), "--trust", "own_classifier.Nearest"]
    assert main(["explain", *expected, "--out", str(tmp_path / "expected")]) == 0
    same_columns, same = rows_of(tmp_path / "expected" / "values.csv")
    assert columns == same_columns
    assert [row[:3] for row in rows] == [row[:3] for row in same]
    np.testing.assert_allclose(*(np.array([row[3] for row in part], float) for part in (rows, same)), rtol=1e-5)
    assert main(["atlas", *images, "--out", str(tmp_path / "atlas")]) == 0
    assert main(["explore", str(tmp_path / "atlas"), "--out", str(tmp_path / "page"), *trust]) == 0
    store = atlas.load(tmp_path / "atlas", trust[1:])
    assert {*store.predictions.tolist()} == {row[1] for row in rows}


@pytest.mark.optional
def test_xgboost_gets_numbers_for_words(typed, tmp_path):
    pytest.importorskip("xgboost")
    head = tmp_path / "head.safetensors"
    fit = ["fit", str(typed.photos), *of_fit(typed.network), "--classifier", "xgboost:XGBClassifier"]
    assert main([*fit, "--components", "3", "--out", str(head)]) == 0
    folders = sorted(path.name for path in typed.photos.iterdir())
    assert Head.load(head).classes_.tolist() == folders
    images = [*typed.network, str(typed.photos), "--model", str(head)]
    assert main(["explain", *images, "--out", str(tmp_path / "maps")]) == 0
    _, rows = rows_of(tmp_path / "maps" / "values.csv")
    assert {row[1] for row in rows} <= {*folders}
    assert main(["evaluate", *images, "--out", str(tmp_path / "evaluation"), "--count", "8", "--all-images"]) == 0


@pytest.mark.optional
def test_a_forest_is_in_no_exported_file(typed, tmp_path, capsys):
    out = tmp_path / "a.onnx"
    pytest.importorskip("onnxruntime")
    assert main(["export", *typed.network, "--model", str(typed.forest), "--out", str(out)]) == 2
    assert "RandomForestClassifier runs outside of PyTorch, and is in no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--classifier", "forest", "--C", "2", "--search"], "--C and --search are for SVMs"),
        (["--classifier", "own_classifier:Farthest"], "has no function 'Farthest'"),
        (["--classifier", "own_classifier:thing"], "must return a classifier as scikit-learn has them"),
        (["--classifier", "own_classifier:Nearest", "--class-weight", "balanced"], "has no class_weight"),
        (["--classifier", "sklearn.ensemble:IsolationForest"], "learns from good parts alone, but"),
        (["--classifier", "sklearn.cluster:KMeans"], "has no classes_ once it is fitted"),
        (["--classifier", "sklearn.cluster:Birch"], "Birch has no closed-form Jacobian here"),
    ],
)
def test_classifiers_that_cannot_be_fitted(typed, tmp_path, capsys, options, words):
    command = ["fit", str(typed.photos), *of_fit(typed.network), "--components", "3", *options]
    assert main([*command, "--out", str(tmp_path / "head.safetensors")]) == 2
    assert words in capsys.readouterr().err


def test_what_is_said_of_a_fitted_head(typed, tmp_path, capsys):
    def fitted(*options):
        out = tmp_path / "head.safetensors"
        assert main(["fit", str(typed.photos), *of_fit(typed.network), *options, "--out", str(out)]) == 0
        return capsys.readouterr().out, Head.load(out)

    said, head = fitted("--classifier", "boosting", "--class-weight", "balanced")
    assert "HistGradientBoostingClassifier without a gradient: 32 coalitions of its 5 inputs" in said
    assert head.enumerated.predictor.estimator.class_weight == "balanced"
    assert len(np.unique(head.enumerated.predictor(np.random.default_rng(0).normal(size=(50, 5)) * 9))) > 2
    said, head = fitted("--classifier", "sklearn.linear_model:LogisticRegression", "--class-weight", "balanced")
    assert head.enumerated is None
    assert "without a gradient" not in said
    said, head = fitted("--classifier", "sklearn.svm:NuSVC", "--components", "2")
    assert "small pictures of" in said


def test_outlines_surround_the_strongest_evidence_and_leave_it_uncovered():
    sheets = Sheets({"titles": [], "classes": None, "colours": colour_table()})
    photo = Image.new("RGB", (80, 80), "#777777")
    values = np.zeros((8, 8))
    values[2:4, 2:4], values[6, 6] = 1.0, -0.05  # the second is too faint
    drawn = np.asarray(sheets.outlined(photo, values)).astype(int)
    changed = (drawn != 0x77).any(-1)
    assert not changed[28:32, 28:32].any()  # the middle of what is surrounded
    assert not changed[:8].any()
    assert not changed[56:, 56:].any()
    rows, columns = np.nonzero(changed)
    assert 15 < rows.min() < 22 < 38 < rows.max() < 45
    assert 15 < columns.min() < 22 < 38 < columns.max() < 45
    inks = {tuple(pixel) for pixel in drawn[changed]}
    assert inks == {(255, 255, 255), (0xB2, 0x18, 0x2B)}
    opposite = np.asarray(sheets.outlined(photo, -values))
    assert (0x21, 0x66, 0xAC) in {tuple(pixel) for pixel in opposite[changed]}


def test_photos_unlike_those_of_the_training_set_say_so(typed, tmp_path, monkeypatch):
    head, photos = tmp_path / "head.safetensors", [str(typed.photos)]
    assert main(["fit", *photos, *of_fit(typed.network), "--components", "3", "--out", str(head)]) == 0
    folder = tmp_path / "mixed"
    folder.mkdir()
    first = min(path for path in typed.photos.rglob("*") if path.is_file())
    shutil.copy(first, folder / "same.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 2, (64, 64, 3), np.uint8) * 255).save(folder / "noise.png")
    notes = []
    draw = Sheets.drawn
    monkeypatch.setattr(
        Sheets, "drawn", lambda *args, note, **named: notes.append(note) or draw(*args, note=note, **named)
    )
    explain = ["explain", str(folder), *typed.network, "--model", str(head)]
    assert main([*explain, "--out", str(tmp_path / "maps")]) == 0
    assert notes[0].startswith("unlike the training pictures")  # noise
    assert notes[1] == ""  # same
    assert main([*explain, "--outline", "--components", "0", "--out", str(tmp_path / "lines")]) == 0
    with Image.open(tmp_path / "maps" / "same.png") as coloured, Image.open(tmp_path / "lines" / "same.png") as lines:
        assert coloured.height > lines.height
        width = room.LARGE + 10
        left = coloured.crop((0, 0, width, width // 2)), lines.crop((0, 0, width, width // 2))
        assert np.array_equal(*map(np.asarray, left))
