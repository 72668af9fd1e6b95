"""The command line, as it is typed."""

import ast
import io
import json
import pickle
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from atlases import folder
from golden import mask, transcript
from PIL import Image
from reference import relative
from sklearn.decomposition import PCA
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from small import SIDE, of_fit
from torchvision.transforms.functional import normalize, to_tensor

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import ContributionCAM, Head, PCASVMNet, atlas, evaluation, extract_features
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse
from pytorch_grad_cam_pcasvm.studio import atlas as stored
from pytorch_grad_cam_pcasvm.studio.atlas.disk import ANOTHER_FOLDER
from pytorch_grad_cam_pcasvm.studio.cli import _TYPED, main
from pytorch_grad_cam_pcasvm.studio.cli.arguments import parse_arguments
from pytorch_grad_cam_pcasvm.studio.cli.commands import _to_explain
from pytorch_grad_cam_pcasvm.studio.cli.folders import accuracy
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject

TOO_FEW = ["--all-images"]  # of photos, to be refused for another reason than these


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("photos"), 8)


@pytest.fixture(scope="module")
def network(weights, photos):
    """What stands in every command that needs a network."""
    return [str(photos), "--backbone", "squeezenet1_1", "--weights", str(weights), "--layer", "features"]


@pytest.fixture(scope="module")
def head(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    assert main(["fit", *of_fit(network), "--components", "3", "--out", str(path)]) == 0
    return path


def typed(words):
    """Return the exit status of a command."""
    try:
        return main(words)
    except SystemExit as ended:  # of the parser
        return ended.code


def whole(picture):
    """Return a whole picture as an image for a network of ImageNet, independently of the command line."""
    tensor = to_tensor(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    return normalize(tensor, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@pytest.mark.slow
def test_from_photos_to_a_page(network, head, photos, tmp_path, capsys, weights):
    out = tmp_path / "atlas"
    assert main(["atlas", *network, "--model", str(head), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"Atlas\(.*8 images, 3 components, ContributionCAM at 'features'", printed)
    store = atlas.load(out)
    of_class = [store.correct[store.labels == name].mean() for name in ("cat", "dog")]
    shares = "{:.0%} correct, balanced accuracy {:.0%} (cat {:.0%}, dog {:.0%})"
    assert f"8 images: {shares.format(store.correct.mean(), np.mean(of_class), *of_class)}\n" in printed
    backbone = torchvision.models.squeezenet1_1(weights=None).eval()
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    data = torchvision.datasets.ImageFolder(str(photos), whole)
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


@pytest.mark.slow
def test_photos_are_evaluated(network, head, tmp_path, capsys, monkeypatch):
    # The other checks are tested on smaller networks.
    report = import_module("pytorch_grad_cam_pcasvm.studio.evaluation.report")
    monkeypatch.setattr(report, "USUAL", ("completeness",))
    options = ["--out", str(tmp_path), "--count", "4", "--method", "ContributionCAM", "--batch-size", "3"]
    assert main(["evaluate", *network, "--model", str(head), *options]) == 2
    told = "4 photos are too few for an answer: give at least 38, in the folder and with --count"
    assert told in capsys.readouterr().err
    options += ["--all-images"]
    sizes = []
    read = Subject.read
    monkeypatch.setattr(Subject, "read", lambda subject, rows: sizes.append(subject.batch_size) or read(subject, rows))
    assert main(["evaluate", *network, "--model", str(head), *options]) == 0
    note, accuracy, duration, verdict, page = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"this will take .* minutes?", duration)
    assert verdict.startswith(
        "It is unclear whether to use ContributionCAM at features for this head: 4 images are too few"
    )
    assert note.startswith("all photos were trained on")
    shares = r"4 images: \d+% correct, balanced accuracy \d+% \(cat \d+%, dog \d+%\)"
    assert re.fullmatch(f"{shares}: training accuracy, not a test score", accuracy)
    assert page.startswith("open file://")
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert results["completeness"]["settings"]["images"] == 4
    assert set(sizes) == {3}
    row = results["completeness"]["rows"][0]
    assert row["method"] == "ContributionCAM"
    assert row["estimate"]["mean"] < 1e-3
    assert row["verdict"] == "too few images to say"
    monkeypatch.setattr(report, "CHECKS", {name: report.CHECKS[name] for name in ("completeness", "stability")})
    assert main(["evaluate", *network, "--model", str(head), *options, "--checks"]) == 0
    assert {*json.loads((tmp_path / "report.json").read_text())["results"]} == {"completeness", "stability"}


def test_what_was_evaluated_can_be_drawn_by_a_command_to_paste(tmp_path):
    typed = [
        "evaluate",
        "my photos",
        "--backbone",
        "timm:vit_tiny",
        "--layer",
        "blocks.3",
        "--layer",
        "norm",
    ]
    typed += ["--features", "a", "--features", "b", "--pool", "mean", "--model", "h.safetensors"]
    typed += ["--out", str(tmp_path), "--trust", "own.Type", "--tokens", "--baseline", "mean", "--count", "20"]
    typed += ["--masks", "m"]
    evaluated = parse_arguments(typed)
    command = _to_explain(evaluated, "ContributionCAM", ["blocks.3", "norm"])
    program, *words = shlex.split(command)
    assert program == "pcasvm-cam"
    drawn = vars(parse_arguments(words))
    same = "images backbone weights layer features pool resize white_level device model trust tokens baseline train"
    assert {name: drawn[name] for name in same.split()} == {name: vars(evaluated)[name] for name in same.split()}
    assert drawn["method"] == "ContributionCAM"


@pytest.mark.slow
def test_photos_in_other_folders_than_those_of_the_head(network, head, photos, tmp_path, capsys):
    for name in ("cat", "dog"):
        shutil.copytree(photos / name, tmp_path / "photos" / f"{name}s")
    options = [
        str(tmp_path / "photos"),
        *network[1:],
        "--model",
        str(head),
        "--out",
        str(tmp_path / "atlas"),
    ]
    assert main(["atlas", *options]) == 0
    told = "labels ['cats', 'dogs'] of the data are not classes of the head, which are ['cat', 'dog']"
    assert told in capsys.readouterr().out
    store = atlas.load(tmp_path / "atlas")
    assert store.labels.tolist() == ["cats"] * 4 + ["dogs"] * 4
    assert store.mean_map(0, by="label").groups == ["cats", "dogs"]
    assert main(["explore", str(tmp_path / "atlas"), "--out", str(tmp_path / "page")]) == 0


@pytest.mark.slow
def test_heads_of_skops(network, photos, tmp_path, weights):
    skops = pytest.importorskip("skops.io")
    backbone = torchvision.models.squeezenet1_1(weights=None).eval()
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    transform = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()  # a head that says nothing: the crop
    data = torchvision.datasets.ImageFolder(str(photos), transform)
    loader = torch.utils.data.DataLoader(data, 8)
    features, labels = extract_features(backbone, loader, "features", pool="mean", progress=False)
    fitted = make_pipeline(PCA(2), SVC()).fit(features, labels)
    skops.dump(fitted, tmp_path / "head.skops")
    out = tmp_path / "atlas"
    assert main(["atlas", *network, "--model", str(tmp_path / "head.skops"), "--out", str(out)]) == 0
    np.testing.assert_array_equal(atlas.load(out).predictions, fitted.predict(features))


WRONG = [
    ("atlas", {"": "nowhere"}),
    ("atlas", {"--backbone": "resnet51"}),
    ("atlas", {"--backbone": "resnet18"}),
    ("atlas", {"--backbone": "keras.none:vgg"}),
    ("atlas", {"--layer": "fetures"}),
    ("atlas", {"--model": "nowhere.safetensors"}),
    ("atlas", {"--weights": "nowhere.pth"}),
    ("fit", {"--components": "99"}),
    ("fit", {"--components": "0"}),
    ("fit", {"--out": "head.pkl"}),
    ("fit", {"--out": "nowhere/head.safetensors"}),
    ("evaluate", {"--pool": "none"}),
    ("evaluate", {"--model": "nowhere.safetensors", "--weights": "nowhere.pth"}),
    ("evaluate", {"--batch-size": "0"}),
    ("evaluate", {"--count": "-1"}),
    ("evaluate", {"--minutes": "0"}),
    ("explore", {}),
]


def test_errors_are_one_line(network, head, tmp_path, capsys, golden):
    options = dict(zip(["", *network[1::2]], [network[0], *network[2::2]], strict=True))
    options["--out"] = str(tmp_path / "out.safetensors")
    told = []
    for command, change in WRONG:
        of_model = {"--model": str(head)} if command in ("atlas", "evaluate") else {}
        arguments = [word for pair in (options | of_model | change).items() for word in pair if word]
        arguments += TOO_FEW * (command == "evaluate")
        assert typed([command, *(arguments if command != "explore" else [str(tmp_path / "none")])]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        told.append((" ".join([command, *(word for pair in change.items() for word in pair if word)]), line + "\n"))
    golden("errors", mask(transcript(told)))


@pytest.mark.parametrize("command", ["explain", "evaluate", "atlas", "export"])
def test_a_layer_that_there_is_not_is_refused_before_anything_takes_long(
    network, head, tmp_path, capsys, monkeypatch, command
):
    monkeypatch.setattr(package, "PCASVMNet", None)  # which comes right behind the backbone
    options = [*network[:-1], "fetures", "--model", str(head), "--out", str(tmp_path / "out")]
    assert main([command, *options, *TOO_FEW * (command == "evaluate")]) == 2
    assert "has no layer 'fetures'; did you mean 'features'?" in capsys.readouterr().err


@pytest.fixture
def fit(network, photos, tmp_path):
    """A folder of photos that may be changed, and the command that fits a head on them."""
    own = tmp_path / "own"
    shutil.copytree(photos, own)
    options = ["fit", *of_fit(network), "--components", "3", "--out", str(tmp_path / "head.safetensors")]
    options[1] = str(own)
    return own, options


def test_fit_says_what_it_learned_and_which_photo_is_broken(fit, tmp_path, capsys, golden):
    own, options = fit
    assert main(options) == 0
    told = [("fit photos", capsys.readouterr().out)]
    broken = sorted(own.rglob("*.png"))[5]
    broken.write_bytes(broken.read_bytes()[:40])
    assert main(options) == 2
    told.append(("fit photos", capsys.readouterr().err))
    assert main([*options, "--skip-bad-images"]) == 0
    printed = re.sub("hint: .*\n", "", capsys.readouterr().out)  # which depends on a score
    told.append(("fit photos --skip-bad-images", printed))
    golden("fit", mask(transcript(told)))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("*/*.png", "error: none of the 8 images in "),
        ("dog/*.png", "only images of 'cat' can be read, but a classifier needs two classes"),
    ],
)
def test_fit_of_photos_that_are_all_broken(fit, capsys, broken, message):
    own, options = fit
    for photo in own.glob(broken):
        photo.write_bytes(b"no photo")
    assert main([*options, "--skip-bad-images"]) == 2
    assert message in capsys.readouterr().err


def test_accuracy_is_that_of_scikit_learn():
    labels, guesses = np.array(["cat"] * 4 + ["dog"] * 4), np.array(["cat"] * 3 + ["dog"] * 3 + ["cat"] * 2)
    expected = accuracy_score(labels, guesses), balanced_accuracy_score(labels, guesses)
    shares = "{:.0%} correct, balanced accuracy {:.0%} (cat 75%, dog 50%)".format(*expected)
    assert accuracy(labels.tolist(), labels == guesses) == shares


@pytest.mark.slow
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
        assert "2 classes: cat 9 (82%), dog 2 (18%)\nnothing is chosen, for which each class needs 10 photos" in printed
        assert "\n2-fold cross-validation: " in printed
        hint = "hint: calling every image 'cat' would be 82% correct, too. Look at the balanced accuracy, and try "
        assert (f"{hint}--class-weight balanced\n" in printed) != weighted
        files.append((tmp_path / "head.safetensors").read_bytes())
    assert files[0] != files[1]


@pytest.mark.parametrize(("dogs", "components", "why"), [
    (1, "3", "no cross-validation: it needs two images of each class\n"),
    (2, "4", "no cross-validation: it trains on fewer than 4 images; lower --components\n"),
])  # fmt: skip
def test_photos_too_few_for_cross_validation(fit, capsys, dogs, components, why):
    own, options = fit
    for photo in sorted((own / "dog").iterdir())[dogs:]:
        photo.unlink()
    options[options.index("--components") + 1] = components
    assert main(options) == 0
    assert why in capsys.readouterr().out


@pytest.mark.parametrize("command", ["fit", "atlas", "evaluate", "explain"])
@pytest.mark.parametrize(("folders", "of_fit", "of_others", "told"), [
    ("test train", "train", "test", "the folders are named test and train, which look like splits, not classes: "),
    ("Training Val", "Training", "Training", "the folders are named Training and Val, which look like splits"),
    ("test train validation", "train", "test", "the folders are named test, train and validation, which look"),
    ("validation", "validation", "validation", "the only folder is named validation, which looks like a split, not"),
])  # fmt: skip
def test_splits_are_no_classes(network, head, photos, tmp_path, capsys, command, folders, of_fit, of_others, told):
    root = tmp_path / "photos"
    for name in folders.split():
        shutil.copytree(photos, root / name)
    options = [str(root), *network[1:], "--out", str(tmp_path / "out.safetensors")]
    assert main([command, *options, *([] if command == "fit" else ["--model", str(head)])]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}")
    assert f"did you mean {root / (of_fit if command == 'fit' else of_others)}?\n" in error


def test_trains_among_buses_are_a_class(fit, capsys):
    own, options = fit
    (own / "cat").rename(own / "bus")
    (own / "dog").rename(own / "train")
    assert main(options) == 0
    assert "2 classes: bus 4 (50%), train 4 (50%)\n" in capsys.readouterr().out


def test_an_atlas_of_other_photos(network, head, monkeypatch, capsys):
    def build(*_, verify, **options):
        assert verify
        refuse(ValueError, "other images, out=1", ANOTHER_FOLDER, "delete it", Fix("look", "jacobian"))

    monkeypatch.setattr(stored, "build", build)
    assert main(["atlas", *network, "--model", str(head), "--out", "atlas", "--verify"]) == 2
    assert capsys.readouterr().err == "error: other images, out=1: name another folder, --out FOLDER, or delete it\n"


@pytest.mark.slow
def test_every_way_out_is_typed():
    files = Path(package.__file__).parent.rglob("*.py")
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    ways = [call.args[1] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Fix"]
    assert {way.value for way in ways if isinstance(way, ast.Constant)} == set(_TYPED)
    assert not any(words.endswith("=True") or "(" in words for words in _TYPED.values())


def test_ways_out_survive_other_processes():
    with pytest.raises(RuntimeError, match=r"^no: pass a=1, or go on$") as caught:
        refuse(RuntimeError, "no", Fix("pass a=1", "a"), "go on")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.reason, again.ways_out) == (str(caught.value), "no", ("pass a=1", "go on"))
    assert again.ways_out[0].argument == "a"


def test_the_module_is_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pytorch_grad_cam_pcasvm", "explore", "nowhere"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("pytorch_grad_cam_pcasvm", run_name="__main__")
    assert capsys.readouterr().err.startswith("error: there is no atlas in nowhere")


def test_help_imports_nothing_that_takes_long():
    code = "import sys, runpy; sys.argv[1:] = ['--help']"
    code += "\ntry: runpy.run_module('pytorch_grad_cam_pcasvm', run_name='__main__')\nfinally: print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "explore" in told
    assert not {"torch", "sklearn", "numpy", "PIL", "matplotlib"} & set(told.split())


def test_help_imports_nothing_that_takes_long_and_is_what_is_there(told_by, tmp_path, monkeypatch, golden):
    monkeypatch.setenv("COLUMNS", "1000")  # lines are wrapped in other places by other versions of Python
    commands = ["check", "fit", "explain", "evaluate", "atlas", "explore", "export"]
    told = told_by(["--help", *(f"{command} --help" for command in commands)], tmp_path)
    assert {(status, error, *heavy) for status, _, error, heavy in told.values()} == {(0, "")}
    golden("help", mask(transcript((line, text.partition("\n\n")[2]) for line, (_, text, _, _) in told.items())))


def test_every_public_name_is_where_it_is_said_to_be():
    assert {*package._PLACES, "__version__"} == set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name).__name__ == name for name in package._PLACES)
    assert package.figures.plot_maps
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.slow
def test_the_layer_is_found_among_several_and_contributions_start_near_the_training_mean_there(
    network, head, photos, tmp_path, capsys, monkeypatch
):
    asked = []
    layers = evaluation.layers

    def recorded(net, data, candidates, **options):
        asked.append((candidates, options["images"]))
        found = layers(net, data, candidates, **options | {"images": 4, "progress": False})
        found.settings["recommended"] = [candidates[-2]]  # as if these images preferred it
        return found

    monkeypatch.setattr(evaluation, "layers", recorded)
    options = [*network[:-1], "auto", "--model", str(head), "--out", str(tmp_path / "atlas")]
    assert main(["atlas", *options]) == 0  # the head knows its layer
    ((candidates, images),) = asked
    assert candidates[-1] == "features"
    assert images == 50
    printed, told = capsys.readouterr()
    assert "Recommended: " in printed
    assert "unknown" not in told
    store = atlas.load(tmp_path / "atlas")
    assert store.manifest["target_layer"] == candidates[-2]
    maps = store.maps(slice(None))
    sums = maps.maps.sum((2, 3)).double()
    assert float((sums - maps.values).abs().max() / maps.values.abs().max()) < 2e-3  # half precision
    flat = tmp_path / "flat"
    flat.mkdir()
    shutil.copy(next((photos / "cat").iterdir()), flat)
    options = [str(flat), *network[1:-1], "auto", "--features", "features", "--model", str(head)]
    assert main(["atlas", *options, "--out", str(tmp_path / "again")]) == 0
    assert "layer: features, the last" in capsys.readouterr().out
    # Maps of contributions may be of several layers, which are compared, too; those of other methods may not.
    groups = []

    def joined(net, data, candidates, **options):
        groups.append((candidates is None, options["combine"]))
        found = layers(net, data, ["features"], **options | {"images": 4, "progress": False})
        found.settings["recommended"] = ["features.7", "features"] if candidates is None else ["features"]
        return found

    monkeypatch.setattr(evaluation, "layers", joined)
    options = [*network[:-1], "auto", "--model", str(head), "--components", "0"]
    for method in ("ContributionCAM", "ClosedFormGradCAM"):
        assert main(["explain", *options, "--method", method, "--out", str(tmp_path / method)]) == 0
    assert groups == [(True, ["shared"]), (False, ["shared"])]


OWN = """
import torchvision
from torch import nn
from torchvision.transforms import Compose, Normalize, Resize, ToTensor

number, made = 3, torchvision.models.squeezenet1_1(weights=None)

def network():
    return torchvision.models.squeezenet1_1(weights=None)

def with_transform():
    return network(), Compose([Resize((64, 64)), ToTensor(), Normalize([0.5] * 3, [0.5] * 3)])

def nothing():
    pass

def three():
    return network(), len, len

def untransformed():
    return network(), None

def of_classes(classes):
    return network()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Commands' options for networks of one's own, which a module in the current folder has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "networks.py").write_text(OWN)
    (tmp_path / "mine" / "broken.py").write_text("import nothing_of_that_name")
    yield lambda network, function: [*network[:2], function, *network[3:]]
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


@pytest.mark.slow
def test_a_network_of_ones_own_is_that_of_torchvision(own, network, head, tmp_path, capsys):
    options = own(network, "mine.networks:network")
    assert main(["fit", *of_fit(options), "--components", "3", "--out", "own.safetensors"]) == 0
    assert "prepared as for ImageNet (224 pixels)" in capsys.readouterr().out
    assert main(["fit", *of_fit(options), "--components", "3", "--size", "96x64", "--out", "small.safetensors"]) == 0
    assert "prepared as for ImageNet (96x64 pixels)" in capsys.readouterr().out
    assert Head.load("own.safetensors").digest() == Head.load(head).digest()
    assert main(["atlas", *options, "--model", "own.safetensors", "--out", "atlas"]) == 0
    assert main(["atlas", *network, "--model", str(head), "--out", "same"]) == 0
    np.testing.assert_array_equal(atlas.load("atlas").components, atlas.load("same").components)


def test_a_network_of_ones_own_with_its_transform(own, network, tmp_path, capsys):
    options = own(network, "mine.networks:with_transform")
    assert main(["fit", *of_fit(options), "--components", "3", "--out", "own.safetensors"]) == 0
    assert "ImageNet" not in capsys.readouterr().out
    assert main(["atlas", *options, "--model", "own.safetensors", "--out", "atlas"]) == 0
    assert atlas.load("atlas").manifest["input"] == [3, 64, 64]


NO_NETWORKS = """
none.networks:network
mine.nothing:network
mine.broken:network
mine.networks:netwrok
mine.networks:number
mine.networks:xyz
torchvision:mobilenet_v2
mine.networks:of_classes
mine.networks:nothing
mine.networks:three
mine.networks:untransformed
"""


@pytest.mark.parametrize("command", ["fit", "atlas", "evaluate", "export"])
def test_what_is_no_network_of_ones_own(own, network, head, tmp_path, capsys, golden, command):
    told = []
    for backbone in NO_NETWORKS.split():
        options = own(network, backbone) + ([] if command == "fit" else ["--model", str(head)])
        options += TOO_FEW * (command == "evaluate")
        assert main([command, *options, "--out", "out.safetensors"]) == 2
        told.append((f"... --backbone {backbone}", capsys.readouterr().err))
    golden("no_networks", mask(transcript(told)))


@pytest.mark.parametrize("saved", ["network", "list"])
def test_weights_that_are_no_state_dict(network, tmp_path, capsys, saved):
    torch.save(torchvision.models.squeezenet1_1(weights=None) if saved == "network" else [1], tmp_path / "weights.pth")
    options = [*network[:4], str(tmp_path / "weights.pth"), *network[5:]]
    assert main(["fit", *options, "--out", str(tmp_path / "head.safetensors")]) == 2
    assert "weights.pth has no state dict: write it with torch.save(net.state_dict()" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["head.joblib", "head.pkl", "head.safetensors"])
@pytest.mark.parametrize("compress", [0, 3])
def test_pickled_heads_are_not_run(network, tmp_path, capsys, name, compress):
    joblib = pytest.importorskip("joblib")
    joblib.dump(PCA(1).fit(np.eye(3)), tmp_path / name, compress=compress)
    if compress and name.endswith(".safetensors"):
        return
    assert main(["atlas", *network, "--model", str(tmp_path / name), "--out", str(tmp_path / "atlas")]) == 2
    error = capsys.readouterr().err
    assert f"{name} is a pickle, as joblib writes it, which would run code when it is read" in error
    assert f"fitted = joblib.load('{name}'), and pass it to PCASVMNet(backbone, fitted)" in error


def test_folders_that_are_arranged_in_another_way(fit, tmp_path, capsys, golden):
    own, options = fit

    told = []

    def refuse_as(arrangement):
        assert main(options) == 2
        told.append((f"fit own  # {arrangement}", capsys.readouterr().err))

    cats, dogs = own / "cat", own / "dog"
    shutil.move(dogs, tmp_path / "dog")
    refuse_as("one class")
    (own / "inner").mkdir()
    shutil.move(cats, own / "inner" / "cat")
    shutil.move(tmp_path / "dog", own / "inner" / "dog")
    refuse_as("classes in a folder of folders")
    for folder_of_class in (own / "inner").iterdir():
        for photo in folder_of_class.iterdir():
            shutil.move(photo, own / f"{folder_of_class.name}{photo.name}")
    shutil.rmtree(own / "inner")
    refuse_as("photos without classes")
    cats.mkdir()
    shutil.move(min(own.glob("cat*.png")), cats)
    refuse_as("photos, and folders of photos")
    shutil.rmtree(own)
    own.mkdir()
    refuse_as("nothing")
    own.rmdir()
    refuse_as("no folder")
    golden("arrangements", mask(transcript(told)))


def test_folders_in_folders_of_classes_and_folders_without_images(fit, capsys):
    own, options = fit
    (own / "cat" / "at night").mkdir()
    shutil.move(next((own / "cat").glob("*.png")), own / "cat" / "at night")
    (own / "elk").mkdir()
    (own / ".cache").mkdir()
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 classes: cat 4 (50%), dog 4 (50%)\nignored: elk, without images (.jpg, ")


def test_support_vectors_are_kept_with_names_and_small_pictures(fit, tmp_path, capsys):
    own, options = fit
    broken = sorted((own / "cat").iterdir())[0]
    broken.write_bytes(b"no photo")
    assert main([*options, "--skip-bad-images"]) == 0
    head = Head.load(tmp_path / "head.safetensors")
    machine = head.stages[-1]
    assert [*head.examples] == machine.support.tolist()
    assert (
        f"small pictures of {len(machine.support)} support vectors (leave out with --no-pictures)"
        in capsys.readouterr().out
    )
    training = [path.relative_to(own).as_posix() for path in sorted(own.rglob("*.png")) if path != broken]
    for row, (name, picture) in head.examples.items():
        assert name == training[row]
        assert len(picture) < 3000
        small = np.array(Image.open(io.BytesIO(picture)).resize((12, 12)).convert("RGB"), float)
        seen = np.array(Image.open(own / name), float)
        assert np.corrcoef(small.ravel(), seen.ravel())[0, 1] > 0.8
    assert main([*options, "--skip-bad-images", "--no-pictures"]) == 0
    without = Head.load(tmp_path / "head.safetensors")
    assert without.examples == {}
    assert without.digest() == head.digest()
    assert "pictures" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["fit", "atlas", "evaluate"])
def test_folders_are_looked_at_before_a_network_is_loaded(network, head, tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr(
        "pytorch_grad_cam_pcasvm.studio.model.backbones.make_backbone", lambda *names: pytest.fail("loaded")
    )
    options = [str(tmp_path), *network[1:], "--out", str(tmp_path / "out.safetensors")]
    assert main([command, *options, *([] if command == "fit" else ["--model", str(head)])]) == 2
    assert f"error: the folder {tmp_path} has no images" in capsys.readouterr().err
