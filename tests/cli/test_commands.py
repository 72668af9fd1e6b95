"""The command line, as it is typed."""

import json
import re
import runpy
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torchvision
from atlases import folder
from reference import relative
from sklearn.decomposition import PCA
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import ContributionCAM, Head, PCASVMNet, atlas, evaluation, extract_features
from pytorch_grad_cam_pcasvm.cli import main
from pytorch_grad_cam_pcasvm.evaluation.subject import Subject


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("photos"), 8)


@pytest.fixture(scope="module")
def network(weights, photos):
    """What stands in every command that needs a network."""
    return ["--images", str(photos), "--backbone", "squeezenet1_1", "--weights", str(weights), "--layer", "features"]


@pytest.fixture(scope="module")
def head(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    assert main(["fit", *network, "--components", "3", "--out", str(path)]) == 0
    return path


def test_from_photos_to_a_page(network, head, photos, tmp_path, capsys, weights):
    out = tmp_path / "atlas"
    assert main(["atlas", *network, "--head", str(head), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"Atlas\(.*8 images, 3 components, ContributionCAM at 'features'", printed)
    store = atlas.load(out)
    of_class = [store.correct[store.labels == name].mean() for name in ("cat", "dog")]
    shares = "{:.0%} correct, balanced accuracy {:.0%} (cat {:.0%}, dog {:.0%})"
    assert f"8 images: {shares.format(store.correct.mean(), np.mean(of_class), *of_class)}\n" in printed
    backbone = torchvision.models.squeezenet1_1(weights=None).eval()
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    transform = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()
    data = torchvision.datasets.ImageFolder(str(photos), transform)
    x = torch.stack([image for image, _ in data])
    net = PCASVMNet(backbone, Head.load(head), "features", pool="mean")
    with ContributionCAM(net, ["features"], baseline="mean") as cam:
        expected = cam.explain(x)
    assert relative(store.components, expected.values[:, :3]) < 1e-4
    assert float((store.maps(slice(None)).maps - expected.maps[:, :3]).abs().max() / expected.nu.max()) < 2e-3
    assert store.predictions.tolist() == net.predict(x).tolist()
    assert main(["explore", str(out), "--out", str(tmp_path / "page"), "--head", f"again={head}"]) == 0
    assert (tmp_path / "page" / "index.html").exists()
    assert capsys.readouterr().out.startswith("open file://")


def test_photos_are_evaluated(network, head, tmp_path, capsys, monkeypatch):
    # The other checks are tested on smaller networks.
    monkeypatch.setitem(evaluation.Study.report.__kwdefaults__, "checks", ("completeness",))
    options = ["--out", str(tmp_path), "--count", "4", "--method", "ContributionCAM", "--batch-size", "3"]
    sizes = []
    read = Subject.read
    monkeypatch.setattr(Subject, "read", lambda subject, rows: sizes.append(subject.batch_size) or read(subject, rows))
    assert main(["evaluate", *network, "--head", str(head), *options]) == 0
    accuracy, page = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"4 images: \d+% correct, balanced accuracy \d+% \(cat \d+%, dog \d+%\)", accuracy)
    assert page.startswith("open file://")
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert results["completeness"]["settings"]["images"] == 4
    assert set(sizes) == {3}
    row = results["completeness"]["rows"][0]
    assert row["method"] == "ContributionCAM"
    assert row["estimate"]["mean"] < 1e-3
    assert row["verdict"] == "too few images to say"


def test_photos_in_other_folders_than_those_of_the_head(network, head, photos, tmp_path, capsys):
    for name in ("cat", "dog"):
        shutil.copytree(photos / name, tmp_path / "photos" / f"{name}s")
    options = [
        "--images",
        str(tmp_path / "photos"),
        *network[2:],
        "--head",
        str(head),
        "--out",
        str(tmp_path / "atlas"),
    ]
    assert main(["atlas", *options]) == 0
    told = "labels [0, 1], named ['cats', 'dogs'], of the data are not classes of the head, which are ['cat', 'dog']"
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_heads_of_skops(network, photos, tmp_path, weights):
    skops = pytest.importorskip("skops.io")
    backbone = torchvision.models.squeezenet1_1(weights=None).eval()
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    transform = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()
    data = torchvision.datasets.ImageFolder(str(photos), transform)
    loader = torch.utils.data.DataLoader(data, 8)
    features, labels = extract_features(backbone, loader, "features", pool="mean", progress=False)
    fitted = make_pipeline(PCA(2), SVC()).fit(features, labels)
    skops.dump(fitted, tmp_path / "head.skops")
    out = tmp_path / "atlas"
    assert main(["atlas", *network, "--head", str(tmp_path / "head.skops"), "--out", str(out)]) == 0
    np.testing.assert_array_equal(atlas.load(out).predictions, fitted.predict(features))


@pytest.mark.parametrize(
    ("command", "change", "match"),
    [
        ("atlas", {"--images": "nowhere"}, "there is no folder nowhere"),
        ("atlas", {"--backbone": "resnet51"}, "torchvision has no backbone 'resnet51'; did you mean 'resnet"),
        (
            "atlas",
            {"--backbone": "resnet18"},
            "has no weights of resnet18: it begins with 'features.0.weight'",
        ),
        ("atlas", {"--backbone": "keras:vgg"}, "must be a torchvision name, or timm:NAME"),
        ("atlas", {"--layer": "fetures"}, "no layer 'fetures'"),
        ("atlas", {"--head": "nowhere.safetensors"}, "there is no head nowhere.safetensors"),
        ("atlas", {"--weights": "nowhere.pth"}, "there is no weights file nowhere.pth"),
        ("fit", {"--components": "99"}, "lower --components"),
        ("fit", {"--components": "0"}, "--components must be positive"),
        ("fit", {"--out": "head.pkl"}, "--out must end in .safetensors, got head.pkl"),
        ("fit", {"--out": "nowhere/head.safetensors"}, "there is no folder nowhere"),
        (
            "evaluate",
            {"--pool": "none"},
            "the layer that the features came from, and their pool: --features and --pool",
        ),
        ("evaluate", {"--head": "nowhere.safetensors", "--weights": "nowhere.pth"}, "there is no head nowhere"),
        ("evaluate", {"--batch-size": "0"}, "--batch-size must be at least 1, got 0"),
        ("evaluate", {"--count": "-1"}, "--count must be at least 1, got -1"),
        ("explore", {}, "there is no atlas in"),
    ],
)
def test_errors_are_one_line(network, head, tmp_path, capsys, command, change, match):
    options = dict(zip(network[::2], network[1::2], strict=True)) | {"--out": str(tmp_path / "out.safetensors")}
    options |= {"--head": str(head)} if command in ("atlas", "evaluate") else {}
    arguments = [word for pair in (options | change).items() for word in pair]
    assert main([command, *(arguments if command != "explore" else [str(tmp_path / "none")])]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert match in line


@pytest.fixture
def fit(network, photos, tmp_path):
    """A folder of photos that may be changed, and the command that fits a head on them."""
    own = tmp_path / "own"
    shutil.copytree(photos, own)
    options = ["fit", *network, "--components", "3", "--out", str(tmp_path / "head.safetensors")]
    options[options.index("--images") + 1] = str(own)
    return own, options


def test_fit_says_what_it_learned_and_which_photo_is_broken(fit, capsys):
    own, options = fit
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 classes: cat 4 (50%), dog 4 (50%)\n4-fold cross-validation: ")
    assert re.search(r": \d+% correct, balanced accuracy \d+% \(cat \d+%, dog \d+%\)\n", printed)
    assert "correct on the images it was fitted on: training accuracy, not a test score\n" in printed
    assert "hint" not in printed
    broken = sorted(own.rglob("*.png"))[5]
    broken.write_bytes(broken.read_bytes()[:40])
    assert main(options) == 2
    told = capsys.readouterr().err
    assert f"error: {broken.relative_to(own).as_posix()} cannot be read (" in told
    assert "mend or delete it, or add --skip-bad-images\n" in told
    assert main([*options, "--skip-bad-images"]) == 0
    printed = capsys.readouterr().out
    assert "2 classes: cat 4 (57%), dog 3 (43%)\n" in printed
    assert f"1 image skipped, which cannot be read: {broken.relative_to(own).as_posix()}\n" in printed


def test_fit_of_photos_that_are_all_broken(fit, capsys):
    own, options = fit
    for photo in own.rglob("*.png"):
        photo.write_bytes(b"no photo")
    assert main([*options, "--skip-bad-images"]) == 2
    assert "error: none of the 8 images in " in capsys.readouterr().err


def test_accuracy_is_that_of_scikit_learn(fit, capsys, monkeypatch):
    labels, guesses = np.array(["cat"] * 4 + ["dog"] * 4), np.array(["cat"] * 3 + ["dog"] * 3 + ["cat"] * 2)
    monkeypatch.setattr("sklearn.model_selection.cross_val_predict", lambda *_, **__: guesses)
    assert main(fit[1]) == 0
    expected = accuracy_score(labels, guesses), balanced_accuracy_score(labels, guesses)
    shares = "{:.0%} correct, balanced accuracy {:.0%} (cat 75%, dog 50%)".format(*expected)
    assert f"4-fold cross-validation: {shares}\n" in capsys.readouterr().out


def test_photos_mostly_of_one_class(fit, tmp_path, capsys):
    own, options = fit
    cats, dogs = (sorted((own / name).iterdir()) for name in ("cat", "dog"))
    for photo in dogs[2:]:
        photo.unlink()
    for number in range(5):
        shutil.copy(cats[number % 4], own / "cat" / f"again{number}.png")
    files = []
    for weighted in (False, True):
        assert main([*options, *(["--class-weight", "balanced"] if weighted else [])]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("2 classes: cat 9 (82%), dog 2 (18%)\n2-fold cross-validation: ")
        hint = "hint: to call every image 'cat' would be 82% correct, too. Look at the balanced accuracy, and try "
        assert (f"{hint}--class-weight balanced\n" in printed) != weighted
        files.append((tmp_path / "head.safetensors").read_bytes())
    assert files[0] != files[1]


@pytest.mark.parametrize(("dogs", "components", "why"), [
    (1, "3", "no cross-validation, which needs two images of each class\n"),
    (2, "4", "no cross-validation: its parts have fewer than 4 images, lower --components\n"),
])  # fmt: skip
def test_photos_too_few_for_cross_validation(fit, capsys, dogs, components, why):
    own, options = fit
    for photo in sorted((own / "dog").iterdir())[dogs:]:
        photo.unlink()
    options[options.index("--components") + 1] = components
    assert main(options) == 0
    assert why in capsys.readouterr().out


@pytest.mark.parametrize("command", ["fit", "atlas", "evaluate"])
@pytest.mark.parametrize(("folders", "of_fit", "of_others", "told"), [
    ("test train", "train", "test", "the folders are named test and train, which look like splits, not classes: "),
    ("Training Val", "Training", "Training", "the folders are named Training and Val, which look like splits"),
    ("test train validation", "train", "test", "the folders are named test, train and validation, which look"),
    ("validation", "validation", "validation", "the only folder is named validation, which looks like a split, not"),
])  # fmt: skip
def test_splits_are_no_classes(network, head, photos, tmp_path, capsys, command, folders, of_fit, of_others, told):
    for name in folders.split():
        shutil.copytree(photos, tmp_path / name)
    options = ["--images", str(tmp_path), *network[2:], "--out", str(tmp_path / "out.safetensors")]
    assert main([command, *options, *([] if command == "fit" else ["--head", str(head)])]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}")
    assert f"did you mean --images {tmp_path / (of_fit if command == 'fit' else of_others)}?\n" in error


def test_trains_among_buses_are_a_class(fit, capsys):
    own, options = fit
    (own / "cat").rename(own / "bus")
    (own / "dog").rename(own / "train")
    assert main(options) == 0
    assert "2 classes: bus 4 (50%), train 4 (50%)\n" in capsys.readouterr().out


def test_an_atlas_of_other_photos(network, head, monkeypatch, capsys):
    def build(*_, verify, **options):
        raise ValueError(f"other images: give another folder as out=, with verify={verify}")

    monkeypatch.setattr(atlas, "build", build)
    assert main(["atlas", *network, "--head", str(head), "--out", "atlas", "--verify"]) == 2
    assert capsys.readouterr().err == "error: other images: give another folder as --out, with --verify\n"


@pytest.mark.parametrize("command", [None, "fit", "atlas", "explore", "evaluate", "export", "explain"])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([*([command] if command else []), "--help"])
    assert f"python -m pytorch_grad_cam_pcasvm {command or 'atlas'} " in capsys.readouterr().out.split("example:")[1]


def test_the_module_is_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pytorch_grad_cam_pcasvm", "explore", "nowhere"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("pytorch_grad_cam_pcasvm", run_name="__main__")
    assert capsys.readouterr().err.startswith("error: there is no atlas in nowhere")


def test_help_imports_nothing_that_takes_long():
    code = "import sys; from pytorch_grad_cam_pcasvm.cli import main"
    code += "\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "explore" in told
    assert not {"torch", "sklearn", "numpy", "matplotlib"} & set(told.split())


def test_every_public_name_is_where_it_is_said_to_be():
    assert {*package._PLACES, "__version__"} == set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name).__name__ == name for name in package._PLACES)
    assert package.figures.plot_maps
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


def test_the_layer_is_found_among_several_and_contributions_start_near_the_mean_there(
    network, head, photos, tmp_path, capsys, monkeypatch
):
    asked = []
    layers = evaluation.layers

    def recorded(net, data, candidates, **options):
        asked.append((candidates, options["images"]))
        found = layers(net, data, candidates, **options | {"images": 4, "progress": False})
        found.settings["recommended"] = [candidates[0]]  # as if these images preferred it
        return found

    monkeypatch.setattr(evaluation, "layers", recorded)
    options = [*network[:-1], "auto", "--head", str(head), "--out", str(tmp_path / "atlas")]
    assert main(["atlas", *options]) == 2
    assert "name that of the features with --features" in capsys.readouterr().err
    assert main(["atlas", *options, "--features", "features"]) == 0
    ((candidates, images),) = asked
    assert candidates[-1] == "features"
    assert images == 50
    printed, told = capsys.readouterr()
    assert "Recommended: " in printed
    assert f"near the mean of these images at {candidates[0]}" in printed
    assert "unknown" not in told
    store = atlas.load(tmp_path / "atlas")
    assert store.manifest["target_layer"] == candidates[0]
    maps = store.maps(slice(None))
    sums = maps.maps.sum((2, 3)).double()
    assert float((sums - maps.values).abs().max() / maps.values.abs().max()) < 2e-3  # half precision
    flat = tmp_path / "flat"
    flat.mkdir()
    shutil.copy(next((photos / "cat").iterdir()), flat)
    options = ["--images", str(flat), *network[2:-1], "auto", "--features", "features", "--head", str(head)]
    assert main(["atlas", *options, "--out", str(tmp_path / "again")]) == 0
    assert "layer: features, the last" in capsys.readouterr().out
