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
    assert re.search(r"Atlas\(.*8 images, 3 components, ContributionCAM at 'features'", capsys.readouterr().out)
    store = atlas.load(out)
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
    assert capsys.readouterr().out.startswith("open file://")
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


def test_fit_says_what_it_learned_and_which_photo_is_broken(network, photos, tmp_path, capsys):
    own = tmp_path / "own"
    shutil.copytree(photos, own)
    options = ["fit", *network, "--components", "3", "--out", str(tmp_path / "head.safetensors")]
    options[options.index("--images") + 1] = str(own)
    assert main(options) == 0
    printed = capsys.readouterr().out
    classes = sorted(path.name for path in own.iterdir())
    assert f"2 classes: {classes[0]} 4, {classes[1]} 4" in printed
    assert "correct in 4-fold cross-validation, " in printed
    broken = sorted(own.rglob("*.png"))[5]
    broken.write_bytes(broken.read_bytes()[:40])
    assert main(options) == 2
    assert f"error: {broken.relative_to(own).as_posix()} cannot be read (" in capsys.readouterr().err


def test_an_atlas_of_other_photos(network, head, monkeypatch, capsys):
    def build(*_, verify, **options):
        raise ValueError(f"other images: give another folder as out=, with verify={verify}")

    monkeypatch.setattr(atlas, "build", build)
    assert main(["atlas", *network, "--head", str(head), "--out", "atlas", "--verify"]) == 2
    assert capsys.readouterr().err == "error: other images: give another folder as --out, with --verify\n"


@pytest.mark.parametrize("command", [None, "fit", "atlas", "explore", "evaluate"])
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
