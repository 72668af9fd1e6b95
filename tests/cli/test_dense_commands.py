"""Heads at every position on the command line: from photos with masks, or of good parts alone, to maps and numbers."""

import csv
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torchvision.transforms import v2

from pytorch_grad_cam_pcasvm import (
    ContributionCAM,
    Head,
    PCASVMNet,
    SVMTarget,
    atlas,
    export,
    extract_features,
    load_model,
)
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.cli.models import choose_targets
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder
from pytorch_grad_cam_pcasvm.studio.pictures import sheets

SIZE = 48


def backbone():
    """A small network, and how it wants its pictures; the command line names it."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 12, 5, 2, 2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return net, v2.Compose([
        v2.Resize((SIZE, SIZE)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.25] * 3),
    ])  # fmt: skip


def narrow():
    """A network of two channels, of which a layer makes twelve."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 2, 5, 2, 2), nn.Tanh()), nn.Conv2d(2, 12, 1))
    return net, backbone()[1]


def picture(random, spot):
    """Return a texture, as a picture with a dark spot if one is wanted, and its mask."""
    pixels, mask = random.normal(150, 12, (80, 100, 3)), np.zeros((80, 100), bool)
    if spot:
        y, x = random.integers(0, 60), random.integers(0, 76)
        mask[y : y + 20, x : x + 24] = True
        pixels[mask] -= 70
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), Image.fromarray(mask)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Good parts to learn from, and a folder of good and spotted ones with masks of the spots."""
    root, random = tmp_path_factory.mktemp("parts"), np.random.default_rng(0)
    for folder, count, spots in (("train/good", 10, False), ("test/good", 5, False), ("test/spot", 6, True)):
        for number in range(count):
            photo, mask = picture(random, spots)
            (root / folder).mkdir(parents=True, exist_ok=True)
            photo.save(root / folder / f"{number}.png")
            if spots:
                (root / "masks/spot").mkdir(parents=True, exist_ok=True)
                mask.save(root / "masks/spot" / f"{number}_mask.png")
    return root


NETWORK = ["--backbone", f"{__name__}:backbone", "--layer", "1", "--device", "cpu"]
NETWORK += ["--features", "0", "--features", "1"]
NETWORK_OF_FIT = ["--backbone", f"{__name__}:backbone", "--features", "0", "--features", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def bank(parts):
    """Neighbours of good parts."""
    file = parts / "neighbours.safetensors"
    options = ["--pool", "dense:3", "--classifier", "neighbours", "--components", "6", "--coreset", "200"]
    assert main(["fit", str(parts / "train"), *NETWORK_OF_FIT, *options, "--out", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def classifier(parts):
    """An SVM on patches with masks."""
    file = parts / "svm.safetensors"
    options = ["--pool", "dense", "--masks", str(parts / "masks"), "--components", "4", "--sample", "60"]
    options += ["--class-weight", "balanced", "--purity", "0.7"]
    assert main(["fit", str(parts / "test"), *NETWORK_OF_FIT, *options, "--out", str(file)]) == 0
    return file


def images(parts, folder):
    transform = backbone()[1]
    files = sorted((parts / folder).iterdir())
    return torch.stack([transform(Image.open(file).convert("RGB")) for file in files]), files


def test_good_parts_alone(parts, bank, tmp_path, capsys):
    assert len(Head.load(bank).stages[2].points) == 200
    net = PCASVMNet(backbone()[0].eval(), Head.load(bank), ["0", "1"], pool=("dense", 3)).eval()
    command = ["explain", str(parts / "test"), *NETWORK, "--pool", "dense:3", "--model", str(bank)]
    assert main([*command, "--out", str(tmp_path / "maps")]) == 0
    with (tmp_path / "maps" / "values.csv").open() as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    x, files = images(parts, "test/spot")
    scores = net.anomaly_score(x)
    for file, score in zip(files, scores, strict=True):
        row = rows[f"spot/{file.name}"]
        assert float(row["anomaly where strongest"]) == pytest.approx(score, rel=1e-4)
    good = [float(row["anomaly where strongest"]) for name, row in rows.items() if name.startswith("good")]
    assert max(good) < scores.min()
    sheet = Image.open(tmp_path / "maps" / "spot" / f"{files[0].stem}.png")
    assert sheet.width == 3 * (sheets.LARGE + 10) + 10  # the photo, what is anomalous, and why
    capsys.readouterr()
    assert main([*command, "--at", "3,4", "--components", "1", "--out", str(tmp_path / "place")]) == 0
    with (tmp_path / "place" / "values.csv").open() as file:
        assert next(csv.reader(file))[3:-1] == [
            *("verdict", "component 1 at (3, 4)", "anomaly at (3, 4)", "error", "sure", "threshold")
        ]
    page = (tmp_path / "maps" / "index.html").read_text()
    anomalies = [float(number) for number in re.findall(r"<b>(?:pass|fail): anomaly ([0-9.e+-]+)</b> \(distance", page)]
    assert len(anomalies) == 11
    assert anomalies == sorted(anomalies, reverse=True)


@pytest.mark.parametrize(
    "classifier", ["neighbours", "residual", pytest.param("sklearn.svm:OneClassSVM", marks=pytest.mark.slow)]
)
def test_a_good_photo_is_as_dark_alone_as_beside_defects(classifier, parts, tmp_path):
    file, network = tmp_path / "head.safetensors", [*NETWORK, "--pool", "dense"]
    options = ["--classifier", classifier, "--components", "4", "--sample", "30"]
    options += ["--coreset", "1.0"] if classifier == "neighbours" else []
    assert main(["fit", str(parts / "train"), *NETWORK_OF_FIT, "--pool", "dense", *options, "--out", str(file)]) == 0
    net = PCASVMNet(backbone()[0].eval(), Head.load(file), ["0", "1"], pool="dense").eval()
    alone, number = tmp_path / "one", "3"
    (alone / "good").mkdir(parents=True)
    shutil.copy(parts / f"test/good/{number}.png", alone / "good")
    heats = []
    for folder in (alone, parts / "test"):
        out = tmp_path / f"maps of {folder.name}"
        command = ["explain", str(folder), *network, "--model", str(file), "--out", str(out)]
        assert main(command) == 0
        width = sheets.LARGE + 10
        heats.append(np.asarray(Image.open(out / "good" / f"{number}.png"))[:, width + 5 : 2 * width + 5].astype(float))
    np.testing.assert_allclose(*heats, atol=3)  # one of 256 colours, of features that are rounded in other batches
    low, high = net.anomaly_range()
    good, spots = (net.anomaly_map(images(parts, f"test/{name}")[0]).max((1, 2)) for name in ("good", "spot"))
    assert np.median((good - low) / (high - low)) < 0.5
    assert (spots > good.max()).all()


def test_fit_leaves_out_whole_photos(parts, tmp_path):
    file = tmp_path / "head.safetensors"
    options = ["--pool", "dense", "--classifier", "neighbours", "--components", "4", "--coreset", "1.0"]
    assert main(["fit", str(parts / "train"), *NETWORK_OF_FIT, *options, "--out", str(file)]) == 0
    x, _ = images(parts, "train/good")
    patches, _, places = extract_features(
        backbone()[0].eval(), [x], ["0", "1"], pool="dense", places=True, progress=False
    )
    left_out = []
    for others, own in GroupKFold(5).split(patches, groups=places[:, 0]):
        pipeline = make_pipeline(StandardScaler(), PCA(4, random_state=0), NearestNeighbors(n_neighbors=1))
        pipeline.fit(patches[others])
        left_out.append(pipeline[-1].kneighbors(pipeline[:-1].transform(patches[own]))[0].ravel())
    net = PCASVMNet(backbone()[0].eval(), Head.load(file), ["0", "1"], pool="dense").eval()
    assert net.anomaly_range() == pytest.approx((0, 3 * np.quantile(np.concatenate(left_out), 0.999)), rel=1e-3)


@pytest.mark.parametrize("classifier", ["residual", "svm"])
def test_fit_tells_how_many_components_vary(classifier, parts, tmp_path, capsys):
    network = ["--backbone", f"{__name__}:narrow", "--features", "1", "--device", "cpu"]
    folder = parts / ("train" if classifier == "residual" else "test")
    command = ["fit", str(folder), *network, "--classifier", classifier]
    assert main([*command, "--out", str(tmp_path / "head.safetensors"), "--components", "6"]) == 0
    told = capsys.readouterr().err
    assert "warning: components 2, 3, 4 and 5 of PCA vary over the training images only by rounding" in told
    assert "Fit fewer components, PCA(2), or on more images" in told


def test_pixels_are_measured_with_masks(parts, bank, tmp_path, capsys):
    command = ["evaluate", str(parts / "test"), *NETWORK, "--pool", "dense:3", "--model", str(bank)]
    assert main([*command, "--out", str(tmp_path / "none")]) == 2
    assert "add --masks DIR" in capsys.readouterr().err
    assert main([*command, "--masks", str(parts / "masks"), "--out", str(tmp_path / "evaluation")]) == 0
    printed = capsys.readouterr().out
    assert "masks: 6 of 11 photos have one; on 5 without one, of the normal class, there is nothing" in printed
    net = PCASVMNet(backbone()[0].eval(), Head.load(bank), ["0", "1"], pool=("dense", 3)).eval()
    spots, files = images(parts, "test/spot")
    good, _ = images(parts, "test/good")
    truth = np.zeros((11, SIZE, SIZE), bool)
    for row, file in enumerate(files):
        mask = Image.open(parts / "masks" / "spot" / f"{file.stem}_mask.png")
        truth[5 + row] = np.asarray(mask.resize((SIZE, SIZE), Image.Resampling.NEAREST))
    maps = net.anomaly_map(torch.cat([good, spots]), size=(SIZE, SIZE))
    expected = roc_auc_score(truth.ravel(), maps.ravel())
    result = json.loads((tmp_path / "evaluation" / "report.json").read_text())["results"]["localisation"]
    near = next(row["estimate"]["mean"] for row in result["rows"] if "within" in row["measure"])
    assert f"The values of every position find the marked place in {near:.0%} of the images" in printed
    measured = {row["measure"]: row["estimate"]["mean"] for row in result["rows"]}
    assert measured["pixel AUROC"] == pytest.approx(expected, abs=1e-4)
    assert measured["image AUROC"] == 1.0
    page = (tmp_path / "evaluation" / "index.html").read_text()
    assert f"The values of every position find the marked place in {near:.0%} of the images" in page
    assert page.count("data:image/png;base64,") == 1  # of positions
    assert "Measured: localisation 11 of 11 images." in page


def test_an_atlas_of_patches(parts, bank, tmp_path, capsys):
    folder = tmp_path / "atlas"
    options = ["--model", str(bank), "--patches", "3", "--out", str(folder)]
    assert main(["atlas", str(parts / "test"), *NETWORK, *options]) == 0
    assert "33 patches, 6 components" in capsys.readouterr().out
    store = atlas.load(folder)
    assert store.ids[0].startswith("good/0.png (")
    assert store.places.shape == (33, 2)
    assert main(["explore", str(folder), "--out", str(tmp_path / "page")]) == 0


def test_classes_of_patches(parts, classifier, tmp_path, capsys):
    head = Head.load(classifier)
    assert head.classes_.tolist() == ["background", "spot"]
    net = PCASVMNet(backbone()[0].eval(), head, ["0", "1"], pool="dense").eval()
    command = [str(parts / "test"), *NETWORK, "--pool", "dense", "--model", str(classifier)]
    assert main(["explain", *command, "--out", str(tmp_path / "maps")]) == 0
    with (tmp_path / "maps" / "values.csv").open() as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    x, files = images(parts, "test/spot")
    labels = net.predict(x)
    strongest = ContributionCAM(net, ["1"]).explain(x, SVMTarget("spot", at="max")).values[:, 0]
    for number, file in enumerate(files):
        row = rows[f"spot/{file.name}"]
        assert float(row["share of spot"]) == pytest.approx((labels[number] == "spot").mean(), abs=0.02)
        assert float(row["spot where strongest"]) == pytest.approx(float(strongest[number]), rel=1e-3)
        assert row["predicted"] == ""
    capsys.readouterr()
    assert main(["evaluate", *command, "--masks", str(parts / "masks"), "--out", str(tmp_path / "evaluation")]) == 0
    assert float(re.search(r"every position, pixel AUROC: ([01]\.\d+)", capsys.readouterr().out)[1]) > 0.9


@pytest.mark.parametrize("names", [["background", "hair", "hole"], ["good", "hair", "hole"], ["hair", "hole", "rust"]])
def test_of_several_classes_each_is_explained_against_the_normal_one(names):
    """A margin against the mean of the others may be above 0 where the normal class is ahead."""
    features = np.random.default_rng(0).normal(size=(30, 5))
    head = Head.of(make_pipeline(StandardScaler(), PCA(2), SVC()).fit(features, np.array(names)[np.arange(30) % 3]))
    head.training_set.preparation = {"normal": "good"} if "good" in names else None
    options = SimpleNamespace(components=None, at=None, category=None, versus=None)
    targets = choose_targets(options, SimpleNamespace(head=head, pool="dense", is_dense=True))
    normal = None if "rust" in names else names[0]
    assert targets == [SVMTarget(name, versus=normal, at="max") for name in names if name != normal]


@pytest.fixture(scope="module")
def half_masked(parts, tmp_path_factory):
    """Half of the spotted photos without a mask, and the same data set without these photos."""
    root = tmp_path_factory.mktemp("half")
    for name in ("half", "without"):
        shutil.copytree(parts / "test", root / name / "test")
        shutil.copytree(parts / "masks", root / name / "masks")
        for number in (0, 2, 4):
            (root / name / "masks" / "spot" / f"{number}_mask.png").unlink()
    for number in (0, 2, 4):
        (root / "without" / "test" / "spot" / f"{number}.png").unlink()
    return root


UNKNOWN = (
    "3 without one are left out, for what is on them is unknown, such as spot/0.png: give an empty mask where nothing"
)


def test_faulty_photos_without_a_mask_are_no_good_ones(bank, half_masked, capsys):
    measured = []
    for name in ("half", "without"):
        root = half_masked / name
        line = ["evaluate", str(root / "test"), *NETWORK, "--pool", "dense:3", "--model", str(bank), "--masks"]
        assert main([*line, str(root / "masks"), "--out", str(root / "evaluation")]) == 0
        assert (UNKNOWN in capsys.readouterr().out) == (name == "half")
        result = json.loads((root / "evaluation" / "report.json").read_text())["results"]["localisation"]
        measured.append({row["measure"]: row["estimate"]["mean"] for row in result["rows"]})
    assert measured[0].keys() == measured[1].keys()
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)
    assert measured[0]["image AUROC"] == 1.0
    assert "3 of 11 images" in (half_masked / "half" / "evaluation" / "index.html").read_text()


def test_faulty_photos_without_a_mask_teach_nothing(half_masked, tmp_path, capsys):
    options = ["--pool", "dense", "--components", "4", "--C", "1", "--no-cache"]
    models = []
    for name in ("half", "without"):
        root = half_masked / name
        models.append(load_fitted(root, tmp_path, [*options, "--masks", str(root / "masks")]))
        assert (UNKNOWN in capsys.readouterr().out) == (name == "half")
    x, _ = images(half_masked / "half", "test/spot")
    one, other = (model.net(x) for model in models)
    assert (models[0].about["rows"], models[0].about["images"]) == (models[1].about["rows"], 8)
    assert torch.allclose(one, other, atol=1e-4)


def test_the_class_of_good_photos_may_be_named(half_masked, tmp_path, capsys):
    shutil.copytree(half_masked / "half" / "test", tmp_path / "test")
    (tmp_path / "test" / "good").rename(tmp_path / "test" / "gut")
    line = ["check", str(tmp_path / "test"), "--masks", str(half_masked / "half" / "masks")]
    assert main(line) == 0
    assert "8 without one are left out" in (said := capsys.readouterr().out)
    assert "or name the folder of good photos, --normal NAME" in said
    assert main([*line, "--normal", "gut"]) == 0
    assert "on 5 without one, of the normal class, there is nothing; 3 without one are left" in capsys.readouterr().out
    Image.new("L", (100, 80)).save(half_masked / "half" / "masks" / "spot" / "0.png")  # an empty mask
    assert main([*line, "--normal", "gut"]) == 0
    assert "masks: 4 of 11 photos have one; on 5 without one" in capsys.readouterr().out
    (half_masked / "half" / "masks" / "spot" / "0.png").unlink()


def test_flat_photos_without_a_mask_are_good_ones_if_their_folder_is_named(parts, tmp_path, capsys):
    """As of DAGM: photos in one folder, and masks, in a folder in it, of those with a fault."""
    (tmp_path / "test" / "Label").mkdir(parents=True)
    for name in ("good", "spot"):
        for file in (parts / "test" / name).iterdir():
            shutil.copy(file, tmp_path / "test" / f"{name}{file.name}")
    for file in (parts / "masks" / "spot").iterdir():
        shutil.copy(file, tmp_path / "test" / "Label" / f"spot{file.stem.removesuffix('_mask')}_label.png")
    options = [
        "--pool",
        "dense",
        "--components",
        "4",
        "--C",
        "1",
        "--no-cache",
        "--masks",
        str(tmp_path / "test" / "Label"),
    ]
    alone = load_fitted(tmp_path, tmp_path, options)
    said = capsys.readouterr().out
    assert "masks: 6 of 11 photos have one; 5 without one are left out" in said
    assert "or name the folder of good photos, --normal NAME" in said
    named = load_fitted(tmp_path, tmp_path, [*options, "--normal", "test"])
    assert "6 of 11 photos have one; on 5 without one, of the normal class, there is nothing" in capsys.readouterr().out
    assert (alone.about["images"], named.about["images"], named.classes) == (6, 11, ["defect", "test"])
    assert named.about["score"]["image_auroc"] == 1.0


def test_masks_beside_photos_are_learned_and_measured(parts, tmp_path, capsys):
    """As from a folder of their own, number by number."""
    shutil.copytree(parts / "test", tmp_path / "test")
    for file in (parts / "masks" / "spot").iterdir():
        shutil.copy(file, tmp_path / "test" / "spot" / file.name)
    options = ["--pool", "dense", "--components", "4", "--C", "1", "--no-cache", "--masks"]
    one = load_fitted(parts, tmp_path, [*options, str(parts / "masks")])
    capsys.readouterr()
    other = load_fitted(tmp_path, tmp_path, [*options, str(tmp_path / "test")])
    said = capsys.readouterr().out
    assert "left out: 6 pictures are masks, such as spot/0_mask.png; --masks says which are used\n" in said
    x, _ = images(parts, "test/spot")
    assert torch.allclose(one.net(x), other.net(x), atol=1e-4)
    assert one.about["score"] == pytest.approx(other.about["score"], rel=1e-5)
    of_fit = ["--pool", "dense:3", "--components", "2", "--masks", tmp_path / "test", "--C", "1"]
    for command, more in (("evaluate", ["--masks", tmp_path / "test"]), ("fit", of_fit)):
        main(["check" if command == "evaluate" else command, str(tmp_path / "test"),
              *["--C", "1", "--components", "2"] * (command == "fit")])  # fmt: skip
        way = f"to use them: pcasvm-cam {command} {tmp_path / 'test'} {' '.join(map(str, more))}\n"
        assert way in capsys.readouterr().out


def test_cross_validation_leaves_out_whole_images(parts, capsys):
    options = ["--pool", "dense", "--masks", str(parts / "masks"), "--components", "4", "--sample", "60"]
    out = str(parts / "again.safetensors")
    assert main(["fit", str(parts / "test"), *NETWORK_OF_FIT, *options, "--no-cache", "--out", out]) == 0
    printed = capsys.readouterr().out
    assert "660 patches of 11 images" in printed
    share = r"(background|spot) \d+ \(\d+\.\d%\)"
    assert re.search(rf"patches: {share}, {share}", printed)
    assert re.search(r"5-fold cross-validation, by photo: AUROC of photos 1\.000 .*, of pixels 0\.9\d+, AUPRO", printed)
    assert "at most 1 in 6 good photos raises a false alarm (1 in 100 was asked for" in printed
    assert main(["fit", str(parts / "test"), *NETWORK_OF_FIT, *options, "--search", "--out", out]) == 2
    assert "choose --C and --gamma for patches" in capsys.readouterr().err


def test_the_background_of_masks_is_the_normal_class(parts, tmp_path, capsys):
    options = ["--pool", "dense", "--masks", str(parts / "masks"), "--components", "4", "--C", "1"]
    model = load_fitted(parts, tmp_path, options)
    assert (model.classes, model.normal) == (["background", "spot"], "background")
    model = load_fitted(parts, tmp_path, [*options, "--normal", "good"])
    assert (model.classes, model.normal) == (["good", "spot"], "good")
    score = model.about["score"]
    assert score["image_auroc"] == 1.0
    assert score["pixel_auroc"] > 0.95


def load_fitted(parts, folder, options):
    out = folder / "model.safetensors"
    assert main(["fit", str(parts / "test"), *NETWORK_OF_FIT, *options, "--out", str(out)]) == 0
    return load_model(out, backbone=backbone()[0], transform=backbone()[1])


def test_photos_with_tiny_faults_are_no_good_photos(parts, tmp_path, capsys):
    for folder in ("test", "masks"):
        shutil.copytree(parts / folder, tmp_path / folder)
    mask = np.zeros((80, 100), np.uint8)
    mask[40, 50] = 255  # less than a fifth of any patch
    Image.fromarray(mask).save(tmp_path / "masks" / "spot" / "tiny.png")
    Image.open(parts / "test/good/2.png").rotate(180).save(tmp_path / "test" / "spot" / "tiny.png")
    options = ["--pool", "dense", "--masks", str(tmp_path / "masks"), "--components", "4", "--C", "1", "--no-cache"]
    line = ["fit", str(tmp_path / "test"), *NETWORK_OF_FIT, *options, "--out", str(tmp_path / "model.safetensors")]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert float(re.search(r"AUROC of photos ([01]\.\d+)", printed)[1]) < 1
    assert "(6 of 7)" in printed


@pytest.mark.filterwarnings("error:Mean of empty slice")
def test_photos_that_all_have_faults_have_no_score(parts, tmp_path, capsys):
    for folder in ("test", "masks"):
        shutil.copytree(parts / folder / "spot", tmp_path / folder / "spot")
    options = ["--pool", "dense", "--masks", str(tmp_path / "masks"), "--components", "4", "--C", "1", "--no-cache"]
    line = ["fit", str(tmp_path / "test"), *NETWORK_OF_FIT, *options, "--out", str(tmp_path / "model.safetensors")]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "by photo: no fold has photos with faults and without, of pixels 0." in printed
    assert "nan" not in printed


def test_classes_whose_faults_are_too_small_are_named(parts, tmp_path, capsys):
    for folder in ("test", "masks"):
        shutil.copytree(parts / folder, tmp_path / folder)
    for number in range(3):
        image, mask = Image.open(parts / f"test/good/{number}.png"), np.zeros((80, 100), np.uint8)
        mask[40, 20:70] = 255
        for folder, picture in (("test", image), ("masks", Image.fromarray(mask))):
            (tmp_path / folder / "hair").mkdir(exist_ok=True)
            picture.save(tmp_path / folder / "hair" / f"{number}.png")
    line = ["fit", str(tmp_path / "test"), *NETWORK_OF_FIT, "--pool", "dense", "--masks", str(tmp_path / "masks")]
    options = ["--components", "4", "--C", "1", "--no-cache", "--out", str(tmp_path / "model.safetensors")]
    assert main([*line, *options, "--coverage", "0.9"]) == 0
    told = "less than 90% of any patch; the model has no class 'hair': look closer, with --size or --tiles, or add "
    assert f"{told}--coverage 0.225" in capsys.readouterr().out


def test_patches_of_one_photo_alone_have_no_score(parts, tmp_path, capsys):
    for folder in ("test", "masks"):
        shutil.copytree(parts / folder, tmp_path / folder)
    for mask in sorted((tmp_path / "masks" / "spot").iterdir())[1:]:
        thin = np.zeros((80, 100), np.uint8)
        thin[40, 20:70] = 255
        Image.fromarray(thin).save(mask)
    line = ["fit", str(tmp_path / "test"), *NETWORK_OF_FIT, "--pool", "dense", "--masks", str(tmp_path / "masks")]
    options = ["--components", "4", "--no-cache", "--coverage", "0.9", "--out", str(tmp_path / "model.safetensors")]
    assert main([*line, *options]) == 0
    printed = capsys.readouterr().out
    assert "hint: nothing is learned from 5 of 6 photos with faults" in printed
    assert "no cross-validation: it needs patches of each class in two photos or more" in printed


def test_two_heads_by_chance_are_no_comparison(parts, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "photos" / ("good", "bad")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(100, 150, (64, 64, 3), np.uint8)).save(path)
    options = ["--pool", "dense", "--normal", "good", "--components", "4", "--C", "1", "--no-cache", "--sample", "40"]
    line = ["fit", str(tmp_path / "photos"), *NETWORK_OF_FIT, *options, "--out", str(tmp_path / "model.safetensors")]
    assert main(line) == 0
    printed = capsys.readouterr()
    assert "; neither tells them better than by chance (0.5); " in printed.out
    assert "this head tells photos too badly for its maps to teach (AUROC 0." in printed.out
    assert "maps" not in printed.err  # which take most of the time, and would point anywhere


def test_class_folders_without_masks_teach_patches(parts, tmp_path, capsys):
    shutil.copytree(parts / "test", tmp_path / "photos")
    shutil.copy(tmp_path / "photos/good/1.png", tmp_path / "photos/spot/nothing.png")  # a fault that is none
    out = tmp_path / "taught.safetensors"
    options = ["--pool", "dense", "--components", "4", "--C", "1", "--no-cache", "--faults", "2"]
    assert main(["fit", str(tmp_path / "photos"), *NETWORK_OF_FIT, *options, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "'good' is taken for the class of good photos" in printed
    assert "the same photos by pooled features: AUROC" in printed
    assert "have no patch that is beyond those of good photos: spot/nothing.png" in printed
    assert f"wrote {tmp_path / 'taught-patches.png'}" in printed
    assert Image.open(tmp_path / "taught-patches.png").width <= 1200
    model = load_model(out, backbone=backbone()[0], transform=backbone()[1])
    assert (model.classes, model.normal) == (["good", "spot"], "good")
    x, files = images(parts, "test/spot")
    masks = MaskFolder(parts / "masks", [f"spot/{file.name}" for file in files], files)
    truth = np.stack([masks.of(n, (SIZE, SIZE), None) for n in range(len(files))]).astype(bool)
    margins = model.net(x).margins.detach()
    scores = torch.nn.functional.interpolate((margins[:, 1:] - margins[:, :1]), (SIZE, SIZE), mode="bilinear")
    assert roc_auc_score(truth.ravel(), scores.numpy().ravel()) > 0.95
    assert {"image_auroc", "pooled_image_auroc"} <= set(model.about["score"])
    capsys.readouterr()
    command = ["explain", str(tmp_path / "photos"), "--model", str(out), "--backbone", f"{__name__}:backbone"]
    assert main([*command, "--device", "cpu", "--out", str(tmp_path / "maps")]) == 0
    printed = capsys.readouterr().out  # without a threshold, the class of any position tells
    spots, good = ((model.net.predict(images(tmp_path, f"photos/{name}")[0]) == "spot").any((1, 2))
                   for name in ("spot", "good"))  # fmt: skip
    assert f"{(~spots).sum()} of {len(spots)} photos that are not good are taken for good" in printed
    assert f"{good.sum()} of {len(good)} good ones are taken for another class" in printed
    page = (tmp_path / "maps" / "index.html").read_text()
    assert page.count("<b>false alarm</b>") == good.sum() > 0  # a photo that is in the folder of spots, too


@pytest.mark.slow
def test_a_file_for_the_line(parts, bank, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    command = [str(parts / "train"), *NETWORK, "--pool", "dense:3", "--model", str(bank)]
    assert main(["export", *command, "--out", str(tmp_path / "line.onnx")]) == 0
    assert "maps of anomaly where strongest" in capsys.readouterr().out
    reader = export.Explainer(tmp_path / "line.onnx")
    x, files = images(parts, "test/spot")
    outputs = reader(reader.prepared(reader.read(files[0]))[None])
    net = PCASVMNet(backbone()[0].eval(), Head.load(bank), ["0", "1"], pool=("dense", 3)).eval()
    expected = net.anomaly_map(x[:1])
    assert np.abs(outputs["anomaly"] - expected).max() < 1e-3 * expected.max()
    options = ["--model", str(tmp_path / "line.onnx"), "--out", str(tmp_path / "maps")]
    assert main(["explain", str(parts / "test"), *options]) == 0
    with (tmp_path / "maps" / "values.csv").open() as file:
        (row,) = (row for row in csv.DictReader(file) if row["image"] == f"spot/{files[0].name}")
    assert float(row["anomaly where strongest"]) == pytest.approx(expected.max(), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--classifier", "neighbours"], "learns from good parts alone, but"),
        (["--classifier", "neighbours", "--masks", "masks"], "--masks is for heads that decide at every position"),
        (["--masks", "masks", "--pool", "mean"], "--masks is for heads that decide at every position"),
        (["--pool", "dense", "--masks", "nowhere"], "there is no folder of masks"),
    ],
)
def test_what_does_not_fit_is_refused(parts, options, message, capsys):
    options = [str(parts / option) if option == "masks" else option for option in options]
    command = ["fit", str(parts / "test"), *NETWORK_OF_FIT, *options, "--components", "2"]
    assert main([*command, "--out", str(parts / "none.safetensors")]) == 2
    assert message in capsys.readouterr().err


def test_a_head_knows_its_layers_and_its_pool(parts, bank, tmp_path, capsys):
    command = ["explain", str(parts / "test"), *NETWORK[:6], "--model", str(bank)]
    assert main([*command, "--out", str(tmp_path / "maps")]) == 0
    with (tmp_path / "maps" / "values.csv").open() as file:
        assert next(csv.reader(file))[3:-1] == [*("verdict", "anomaly where strongest", "error", "sure", "threshold")]
    for options in (["--pool", "mean"], ["--pool", "dense"], ["--features", "1"]):
        assert main([*command, *options, "--out", str(tmp_path / "none")]) == 2
        assert f"{' '.join(options)}, but the model was fitted with" in capsys.readouterr().err
    assert main([*command, "--at", "99,0", "--out", str(tmp_path / "none")]) == 2
    assert "there is no position (99, 0)" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_place_needs_positions(parts, tmp_path, capsys):
    head, network = tmp_path / "head.safetensors", [str(parts / "test"), *NETWORK[:6]]
    assert main(["fit", network[0], *NETWORK_OF_FIT[:6], "--components", "2", "--out", str(head)]) == 0
    explain = ["explain", *network, "--model", str(head), "--out", str(tmp_path / "maps")]
    assert main([*explain, "--at", "1,1"]) == 2
    assert "this head decides once for each image: leave it out" in capsys.readouterr().err
    assert main(explain) == 0


def masks_in(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in files.items():
        Image.fromarray(np.asarray(numbers, np.uint8)).save(folder / f"{name}.png")


def pictures_in(folder, *names, size=(8, 6)):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", size).save(folder / f"{name}.jpg")
    return [folder / f"{name}.jpg" for name in names]


def test_masks_are_found_by_name_and_resized_as_pictures(tmp_path):
    paths = pictures_in(tmp_path / "photos", "a", "b", "c", "d")
    names = [path.name for path in paths]
    square = np.zeros((6, 8), np.uint8)
    square[2:4, 4:8] = 255
    masks_in(tmp_path / "masks", a=square, b_mask=square * 0, c_gt=square)
    masks = MaskFolder(tmp_path / "masks", names, paths)
    assert (masks.count, masks.values) == (3, [1])
    assert masks.of(0, (6, 8), None).tolist() == (square > 0).astype(int).tolist()
    assert masks.of(0, (12, 16), None).sum() == 4 * 8
    assert not masks.of(1, (6, 8), None).any()
    assert (masks.unknown, masks.of(3, (6, 8), None).tolist()) == ([3], [[255] * 8] * 6)
    padded = masks.of(2, (8, 8), "pad")
    assert padded[3:5, 4:].all()
    assert padded.sum() == 8
    cropped = masks.of(2, (6, 6), 6)  # the middle 6 of 8 columns
    assert cropped.tolist() == (square[:, 1:7] > 0).astype(int).tolist()


@pytest.mark.parametrize("resize", [None, "pad", 16])
def test_faults_are_neither_lost_nor_broken_when_photos_are_shrunk(tmp_path, resize):
    paths = pictures_in(tmp_path / "photos", "a", "b", size=(320, 200))
    hair, speck = np.zeros((2, 200, 320), np.uint8)
    for step in range(60):
        hair[30 + step, 90 + 2 * step : 93 + 2 * step] = 255
    speck[20:40, 150:170], speck[101, 158] = 255, 1  # 255 beside other numbers: not labelled
    masks_in(tmp_path / "hairs", a=hair)
    hairs = MaskFolder(tmp_path / "hairs", ["a.jpg", "b.jpg"], paths)
    inside = hairs.find_inside(0, (16, 24), resize)
    assert inside.any()
    assert ndimage.label(inside, np.ones((3, 3)))[1] == 1
    assert not hairs.find_inside(1, (16, 24), resize).any()
    masks_in(tmp_path / "specks", b=speck)
    assert MaskFolder(tmp_path / "specks", ["a.jpg", "b.jpg"], paths).find_inside(1, (16, 24), resize).sum() == 1


def test_masks_of_several_classes_keep_their_numbers(tmp_path):
    paths = pictures_in(tmp_path / "photos" / "x", "a", "b")
    numbers = np.zeros((6, 8), np.uint8)
    numbers[0], numbers[1], numbers[2] = 1, 3, 255
    masks_in(tmp_path / "masks" / "x", a=numbers)
    masks = MaskFolder(tmp_path / "masks", ["x/a.jpg", "x/b.jpg"], paths)
    assert masks.values == [1, 3, 255]  # 255: not labelled
    many = np.arange(48).reshape(6, 8)
    masks_in(tmp_path / "many" / "x", a=np.where(many > 20, 255, many))  # 20 classes, as in VOC
    assert MaskFolder(tmp_path / "many", ["x/a.jpg", "x/b.jpg"], paths).values == [*range(1, 21), 255]
    assert masks.of(0, (6, 8), None).tolist() == numbers.tolist()


def test_a_mask_that_was_saved_as_a_photo_has_an_edge_in_the_middle(tmp_path):
    paths = pictures_in(tmp_path / "photos", "a", size=(64, 4))
    shades = np.tile(np.arange(64) * 4, (4, 1))
    masks_in(tmp_path / "masks", a=shades)
    masks = MaskFolder(tmp_path / "masks", ["a.jpg"], paths)
    assert masks.of(0, (4, 64), None).tolist() == (shades > 127).astype(int).tolist()


@pytest.mark.parametrize("numbers", [(128, 255), (127, 255), (3, 252), (64, 128, 192)])
def test_numbers_that_may_be_classes_or_a_soft_edge_are_refused(numbers, tmp_path):
    paths = pictures_in(tmp_path / "photos", "a")
    mask = np.zeros((6, 8), np.uint8)
    mask[: len(numbers)] = np.array(numbers).reshape(-1, 1)
    masks_in(tmp_path / "masks", a=mask)
    with pytest.raises(ValueError, match=f"have the numbers {', '.join(map(str, numbers))} besides 0"):
        MaskFolder(tmp_path / "masks", ["a.jpg"], paths).of(0, (6, 8), None)


def test_each_picture_has_a_mask_of_its_own(tmp_path):
    paths = pictures_in(tmp_path / "crack", "000") + pictures_in(tmp_path / "good", "000")
    square = np.zeros((6, 8))
    square[:2] = 255
    masks_in(tmp_path / "flat", **{"000": square})
    with pytest.raises(ValueError, match=r"crack/000\.jpg and good/000\.jpg would have the same mask"):
        MaskFolder(tmp_path / "flat", ["crack/000.jpg", "good/000.jpg"], paths)
    paths = pictures_in(tmp_path / "photos", "000", "000_mask")
    masks_in(tmp_path / "masks", **{"000_mask": square})
    masks = MaskFolder(tmp_path / "masks", ["000.jpg", "000_mask.jpg"], paths, normal="photos")
    assert [masks.of(row, (6, 8), None).sum() for row in range(2)] == [0, 16]
    masks_in(tmp_path / "black", **{"000": 0 * square})
    with pytest.raises(ValueError, match="are black"):
        MaskFolder(tmp_path / "black", ["000.jpg", "000_mask.jpg"], paths).of(0, (6, 8), None)


def test_masks_that_belong_to_nothing_are_refused(tmp_path):
    paths = pictures_in(tmp_path / "photos", "a")
    square = np.ones((6, 8))
    with pytest.raises(FileNotFoundError, match="there is no folder of masks"):
        MaskFolder(tmp_path / "masks", ["a.jpg"], paths)
    masks_in(tmp_path / "masks", b=square)
    with pytest.raises(FileNotFoundError, match=r"that of a\.jpg would be .*a\.png"):
        MaskFolder(tmp_path / "masks", ["a.jpg"], paths)
    masks_in(tmp_path / "masks", a=square)
    with pytest.raises(ValueError, match="is the mask of no picture"):
        MaskFolder(tmp_path / "masks", ["a.jpg"], paths)
    (tmp_path / "masks" / "b.png").unlink()
    Image.new("L", (8, 8)).save(tmp_path / "masks" / "a.png")
    with pytest.raises(ValueError, match="save it in the picture's size"):
        MaskFolder(tmp_path / "masks", ["a.jpg"], paths).of(0, (6, 8), None)
    (tmp_path / "masks" / "a.png").write_bytes(b"nothing")
    with pytest.raises(OSError, match="cannot be read"):
        MaskFolder(tmp_path / "masks", ["a.jpg"], paths).of(0, (6, 8), None)
    Image.new("L", (8, 6)).save(tmp_path / "masks" / "a.png")
    Image.new("L", (8, 6)).save(tmp_path / "masks" / "a.bmp")
    with pytest.raises(ValueError, match="are masks of the same picture"):
        MaskFolder(tmp_path / "masks", ["a.jpg"], paths)
