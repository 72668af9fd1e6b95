"""`explain --regions`: what maps point at lies in files for labelling tools where the sheets show it."""

import csv
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from test_dense_commands import backbone as prepared
from test_dense_commands import picture
from torchvision.transforms.functional import normalize, to_tensor

from pytorch_grad_cam_pcasvm import load_model
from pytorch_grad_cam_pcasvm.studio.cli import main, suggesting
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder
from pytorch_grad_cam_pcasvm.studio.pictures.answers import Answers
from pytorch_grad_cam_pcasvm.studio.pictures.frames import WHOLE
from pytorch_grad_cam_pcasvm.studio.pictures.regions import mark_regions, refuse_marks

SIZE, WIDTH, HEIGHT = 48, 100, 80
NAME = f"{__name__}:network"
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
HEADS = {
    "bank": [
        "train",
        "--resize",
        "pad",
        "--pool",
        "dense:3",
        "--classifier",
        "neighbours",
        "--coreset",
        "200",
        "--resample",
        "0",
    ],
    "patches": ["test", "--resize", "stretch", "--pool", "dense", "--masks", "masks", "--C", "1", "--sample", "60"],
    "pooled": ["test", "--resize", "crop", "--pool", "mean", "--C", "1", "--normal", "good", "--resample", "0"],
}


def network():
    """A small network, without a transform of its own; the command line names it."""
    return prepared()[0]


def store_lying(photo, path):
    """Write a photo as a phone does that is held upright: lying on its side, with a note how to turn it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    photo.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Good photos, spotted ones, their masks, and three models: of good photos, of masks, and of pooled features."""
    root, random = tmp_path_factory.mktemp("regions"), np.random.default_rng(0)
    for folder, count, spots in (("train/good", 10, False), ("test/good", 3, False), ("test/spot", 5, True)):
        for number in range(count):
            photo, mask = picture(random, spots)
            (root / folder).mkdir(parents=True, exist_ok=True)
            photo.save(root / folder / f"{number}.png")
            (root / "masks" / "spot").mkdir(parents=True, exist_ok=True)
            if spots:
                mask.save(root / "masks" / "spot" / f"{number}.png")
    (root / "more" / "spot").mkdir(parents=True)
    photo.save(root / "more" / "spot" / "upright.png")
    store_lying(photo, root / "more" / "spot" / "turned.png")
    for name, (folder, *options) in HEADS.items():
        options = [str(root / option) if option == "masks" else option for option in options]
        line = [
            "fit",
            str(root / folder),
            "--backbone",
            NAME,
            "--features",
            "0",
            "--features",
            "1",
            "--size",
            str(SIZE),
        ]
        line += ["--components", "4", "--no-cache", "--device", "cpu", "--out", str(root / f"{name}.safetensors")]
        assert main([*line, *options]) == 0
    return root


@pytest.fixture
def explain(made, tmp_path, capsys):
    """Runs explain; returns what it printed, and how ``--masks`` reads the photos' regions."""

    def run(model, tool, folder="test", *more):
        model = made / f"{model}.safetensors" if "." not in str(model) else model
        out = tmp_path / f"{model.stem}-{tool}"
        trusted = [] if model.suffix == ".onnx" else ["--trust", NAME, "--device", "cpu"]
        line = ["explain", str(made / folder), "--model", str(model), "--out", str(out), "--regions", tool]
        capsys.readouterr()
        status, printed = main([*line, *trusted, *more]), capsys.readouterr()
        assert status == 0, printed.err
        (told,) = (line for line in printed.out.splitlines() if re.match(r"wrote \d+ regions? on", line))
        file = out / {"coco": "regions.json", "labelme": "regions", "yolo": "labels"}[tool]
        assert f": {file} (" in told
        assert told.endswith(f"read them again with --masks {file})")
        paths = sorted((made / folder).rglob("*.png"))
        masks = MaskFolder(file, [path.relative_to(made / folder).as_posix() for path in paths], paths)
        return SimpleNamespace(told=told, masks=masks, paths=paths, out=out)

    return run


def enlarge(numbers, size):
    """Return numbers (h, w) at another size, by torch."""
    kind = {"mode": "bilinear", "align_corners": False}
    return torch.nn.functional.interpolate(torch.as_tensor(numbers)[None, None], size, **kind)[0, 0].double().numpy()


def read_coco(found):
    text = json.loads((found.out / "regions.json").read_text())
    names = {image["id"]: image["file_name"] for image in text["images"]}
    return text, [(names[entry["image_id"]], entry) for entry in text["annotations"]]


def test_what_is_beyond_the_threshold_lies_where_the_anomaly_is(made, explain):
    model = load_model(made / "bank.safetensors", NAME)
    found = explain("bank", "coco")
    text, entries = read_coco(found)
    assert text["categories"] == [{"id": 1, "name": "anomaly"}]
    count = 0
    for row, path in enumerate(found.paths):
        x = torch.full((3, SIZE, SIZE), 0.0)
        photo = Image.open(path).resize((SIZE, 38), Image.Resampling.BILINEAR)  # in the middle of a frame
        x[:, 5:43] = normalize(to_tensor(photo), *IMAGENET)
        # The frame's rim has the mean's colour, in whole numbers.
        rim = torch.tensor([round(255 * one) / 255 for one in IMAGENET[0]])
        x[:, :5] = x[:, 43:] = normalize(rim.reshape(3, 1, 1), *IMAGENET)
        anomaly = np.asarray(model.net.anomaly_map(x[None])[0])
        expected = enlarge(anomaly, (WIDTH, WIDTH))[10:90]
        sure = np.abs(expected - model.threshold) > 1e-3
        marked = found.masks.of(row, (HEIGHT, WIDTH), None)
        np.testing.assert_array_equal(marked[sure], (expected > model.threshold)[sure])
        name = path.relative_to(made / "test").as_posix()
        scores = [entry["score"] for other, entry in entries if other == name]
        assert bool(scores) == bool(marked.any())
        if scores:
            assert max(scores) == pytest.approx(expected[marked > 0].max(), rel=1e-4)
            assert sum(entry["area"] for other, entry in entries if other == name) == (marked > 0).sum()
        count += bool(scores)
    assert count == 5  # the spotted ones
    assert found.told.startswith(f"wrote {len(entries)} regions on 5 photos: ")


def test_a_photo_that_is_turned_has_the_regions_of_the_upright_one(explain):
    found = explain("patches", "coco", "more")
    text, entries = read_coco(found)
    assert [image["width"] for image in text["images"]] == [WIDTH, WIDTH]
    turned, upright = (
        [{key: entry[key] for key in ("segmentation", "bbox", "area", "category_id")} for other, entry in entries
         if other == f"spot/{name}.png"] for name in ("turned", "upright")
    )  # fmt: skip
    assert turned == upright != []
    np.testing.assert_array_equal(*(found.masks.of(row, (HEIGHT, WIDTH), None) for row in (0, 1)))


def test_classes_of_positions_are_regions_but_for_the_background(made, explain):
    model, found = load_model(made / "patches.safetensors", NAME), explain("patches", "labelme")
    x = torch.stack([
        normalize(to_tensor(Image.open(path).resize((SIZE, SIZE), Image.Resampling.BILINEAR)), *IMAGENET)
        for path in found.paths
    ])
    labels = model.net.predict(x) == "spot"
    sides = [
        (2 * np.arange(side) + 1, cells, 2 * side)
        for side, cells in zip((HEIGHT, WIDTH), labels.shape[1:], strict=True)
    ]
    down, across = (middles * cells // side for middles, cells, side in sides)
    # The middle of a pixel on an edge of cells is in either.
    clear = np.ix_(*(middles * cells % side > 0 for middles, cells, side in sides))
    assert labels[3:].any((1, 2)).all()
    for row, label in enumerate(labels):
        marked = found.masks.of(row, (HEIGHT, WIDTH), None)
        np.testing.assert_array_equal(marked[clear], label[np.ix_(down, across)][clear])
    assert found.masks.titles == {1: "spot"}
    with (found.out / "values.csv").open() as file:
        values = {row["image"]: float(row["spot where strongest"]) for row in csv.DictReader(file)}
    for path in found.paths[3:]:
        shapes = json.loads((found.out / "regions" / "spot" / f"{path.stem}.json").read_text())["shapes"]
        scores = [float(shape["description"].split()[1].strip(",")) for shape in shapes]
        assert max(scores) == pytest.approx(values[f"spot/{path.name}"], rel=1e-4)


@pytest.mark.parametrize("tiles", [["--tiles", "2x1"], ["--tile", "60"]])
def test_regions_on_tiles_lie_on_the_faults(made, explain, tmp_path, tiles):
    model = tmp_path / "tiled.safetensors"
    line = ["fit", str(made / "train"), "--backbone", NAME, "--features", "0", "--size", str(SIZE), *tiles]
    options = ["--classifier", "pca", "--pool", "dense:3", "--resample", "0", "--no-cache", "--device", "cpu"]
    assert main([*line, *options, "--out", str(model)]) == 0
    found = explain(model, "coco")
    for row, path in enumerate(found.paths[3:], 3):
        fault = np.asarray(Image.open(made / "masks" / "spot" / path.name))
        marked = found.masks.of(row, (HEIGHT, WIDTH), None) > 0
        assert marked[fault].mean() > 0.95
        assert marked.sum() < 2.5 * fault.sum()  # what a position sees is larger than it


def test_evidence_on_pooled_features_is_for_the_decision_alone(made, explain):
    found = explain("pooled", "yolo")
    assert "(evidence of at least half of the largest, as nothing says what is sure; read" in found.told
    with (found.out / "values.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in range(len(rows)):
        marked = found.masks.of(row, (HEIGHT, WIDTH), None) > 0
        assert marked.any() == (float(rows[row]["against good"]) > 0)
        assert not marked[:, :9].any()  # cut off: of 100 columns, the network sees 80
        assert not marked[:, -9:].any()
    assert found.masks.titles == {1: "spot"}
    assert {row["predicted"] for row in rows} == {"good", "spot"}


ABOUT = {
    "titles": ["component 1", "predicted class"], "meanings": ["position {}", "margin {}: above 0 is predicted class"],
    "classes": ["cats", "dogs"],
}  # fmt: skip


def make_outputs(decision, sure=None, value=1.0, label=1):
    outputs = {
        "maps": np.stack([np.full_like(decision, -9), decision])[None], "values": np.array([[1.25, value]]),
        "nu": np.array([[9, np.abs(decision).max()]]), "log_scale": np.zeros((1, 2)), "label": np.array([label]),
    }  # fmt: skip
    return outputs if sure is None else outputs | {"sure": np.stack([np.ones_like(sure), sure])[None]}


@pytest.mark.parametrize(("titles", "label", "name"), [
    ("predicted class", 1, "dogs"), ("against dogs", 1, "cats"), ("cats / dogs", 1, "cats"), ("for cats", 1, "cats"),
    ("log-ratio of cats", 0, "cats"), ("value", 0, "value"),
])  # fmt: skip
def test_sure_evidence_has_the_class_that_it_speaks_for(titles, label, name):
    decision = np.array([[4.0, 1.0], [2.0, -3.0]])
    sure = np.array([[True, False], [True, True]])
    about = ABOUT | {"titles": ["component 1", titles]}
    marks = mark_regions(Answers(about), make_outputs(decision, sure, label=label), 0, (2, 2), WHOLE)
    assert (marks.names, marks.is_sure) == ({1: name}, True)
    np.testing.assert_array_equal(marks.numbers, [[1, 0], [1, 0]])
    np.testing.assert_allclose(marks.values, decision, rtol=1e-6)
    half = mark_regions(Answers(about), make_outputs(decision, label=label), 0, (2, 2), WHOLE)
    assert half.is_sure is False
    np.testing.assert_array_equal(half.numbers, [[1, 0], [1, 0]])


def test_against_one_of_three_classes_it_is_the_predicted_one():
    about = ABOUT | {"titles": ["component 1", "against good"], "classes": ["cats", "dogs", "good"]}
    for label, name in ((1, "dogs"), (2, "not good")):
        marks = mark_regions(Answers(about), make_outputs(np.eye(2), label=label), 0, (2, 2), WHOLE)
        assert marks.names == {1: name}


def test_evidence_against_the_decision_and_no_evidence_are_no_region():
    for outputs in (make_outputs(np.eye(2), value=-1.0), make_outputs(-np.eye(2)), make_outputs(np.zeros((2, 2)))):
        assert not mark_regions(Answers(ABOUT), outputs, 0, (2, 2), WHOLE).numbers.any()


def test_of_photos_that_are_read_as_stored_regions_are_as_people_see_them(tmp_path):
    upright = Image.new("RGB", (6, 4))
    (tmp_path / "photos").mkdir()
    store_lying(upright, tmp_path / "photos" / "0.png")
    stored = Image.open(tmp_path / "photos" / "0.png")
    assert stored.size == (4, 6)
    anomaly = np.zeros((6, 4))
    anomaly[:2, 0] = anomaly[5, 3] = 3
    answers = Answers({"titles": ["anomaly"], "classes": None, "threshold": 2.0, "heat": []})
    found = suggesting.Suggestions(tmp_path, "coco")
    found.add("0.png", tmp_path / "photos" / "0.png", stored, answers, {"anomaly": anomaly[None]}, 0, WHOLE, reading={})
    found.write()
    (image,) = json.loads((tmp_path / "regions.json").read_text())["images"]
    assert (image["width"], image["height"]) == (6, 4)
    masks = MaskFolder(tmp_path / "regions.json", ["0.png"], [tmp_path / "photos" / "0.png"], exif=False)
    np.testing.assert_array_equal(masks.of(0, (6, 4), None), anomaly > 2)


def test_models_without_regions_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--regions takes what is beyond the threshold, and this model has none: fit"):
        refuse_marks({"heat": [], "classes": None, "titles": ["anomaly where strongest"]})
    with pytest.raises(ValueError, match=r"--regions takes the evidence for a decision, and this head has components"):
        refuse_marks({"classes": None, "titles": ["component 1"]})
    with pytest.raises(ValueError, match=r"--regions needs to know which part of a photo the network sees"):
        suggesting.Suggestions(tmp_path, "yolo").check_model(ABOUT, knows_frame=False)
    suggesting.Suggestions(tmp_path, None).check_model({"classes": None, "titles": []}, knows_frame=False)


@pytest.mark.optional
def test_an_exported_file_has_the_same_regions(made, explain, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "line.onnx"
    line = ["export", str(made / "test"), "--model", str(made / "patches.safetensors"), "--trust", NAME]
    assert main([*line, "--device", "cpu", "--out", str(file)]) == 0
    one, other = read_coco(explain("patches", "coco")), read_coco(explain(file, "coco"))
    assert one[0]["images"] == other[0]["images"]
    for (name, entry), (_, again) in zip(one[1], other[1], strict=True):
        assert entry["segmentation"] == again["segmentation"], name
        assert entry["score"] == pytest.approx(again["score"], rel=1e-3)
