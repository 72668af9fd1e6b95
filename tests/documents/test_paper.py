"""The paper's experiment on a handful of small pictures: what it leaves behind, what it says where it cannot run."""

import base64
import gzip
import html
import json
import re
import shutil

import numpy as np
import paper
import pytest
import torch
import torchvision
from experiment import report, training
from experiment.closeness import closeness
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from pytorch_grad_cam_pcasvm import Head, extract_features

FIGURES = (
    *("maps.png", "signed.png", "contribution.png", "feature_space.png", "effect.png", "jacobian.png"),
    *("support_vectors.png", "training.png"),
)


def picture(rng, label):
    """A bright square, to the left or to the right."""
    pixels = rng.integers(0, 90, size=(40, 40, 3), dtype=np.uint8)
    pixels[10:30, 4 + 20 * label : 16 + 20 * label] += 150
    return Image.fromarray(pixels)


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 10), ("test", 3)):
        for label, name in enumerate(("left", "right")):
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                picture(rng, label).save(folder / f"{i}.png")
    return tmp_path / "pictures"


@pytest.fixture
def no_figures(monkeypatch):
    """Without what takes nearly all of the time of so small a run."""
    monkeypatch.setattr(paper, "_figures", lambda *args: {})


def options(root, weights, out, *more):
    return [
        *("--dataset", "folder", "--root", str(root), "--out", str(out), "--backbone", "squeezenet1_1"),
        *("--weights", str(weights), "--size", "64", "--epochs", "3", "--device", "cpu", *more),
    ]


@pytest.mark.slow
def test_a_run_leaves_scores_layers_heads_figures_and_a_page(root, weights, tmp_path):
    out = tmp_path / "out"
    assert paper.main(options(root, weights, out, "--rate", "0.01", "--components", "2")) == 0
    scores = json.loads((out / "scores.json").read_text())
    assert scores["samples"] == {"training": 20, "test": 6, "duplicates dropped": 0}
    assert scores["classes"] == ["left", "right"]
    assert len(scores["validation accuracy"]) == 3
    assert scores["validation accuracy"][scores["best epoch"] - 1] == max(scores["validation accuracy"])
    assert sum(scores["contribution ratios"]) == pytest.approx(100)
    page = (out / "index.html").read_text()
    embedded = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]*)"', page)]
    assert sorted(embedded) == sorted((out / name).read_bytes() for name in FIGURES)
    assert page.count("src=") == len(FIGURES)  # it can be mailed: nothing else is referred to
    assert "href=" not in page
    for name in FIGURES:
        assert Image.open(out / name).size[0] > 200
    for model, counts in scores["test confusion, by true class"].items():
        recall = np.diag(counts) / 3
        precision = np.diag(counts) / np.maximum(np.sum(counts, 0), 1)
        f1 = np.mean(2 * recall * precision / np.maximum(recall + precision, 1e-9))
        assert f1 == pytest.approx(scores["macro F1"][model][1])
    assert [answer["class"] for answer in scores["shown"]] == ["left", "right"]
    for sentence in (*(report.collapses(scores) or ["none has collapsed"]), *report.mistakes(scores)):
        assert html.escape(sentence) in page
    assert not [path for path in out.iterdir() if path.is_dir() and path.name != "cache"]

    # The files are enough to rebuild the network: the same macro F1 from images.
    layers = load_file(out / "dense.safetensors")
    net = torchvision.models.squeezenet1_1(weights=None)
    net.load_state_dict(torch.load(weights, weights_only=True))
    dense = nn.Sequential(
        net.features, nn.Flatten(), nn.Linear(layers["1.weight"].shape[1], 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU()
    )
    dense[2].load_state_dict({"weight": layers["1.weight"], "bias": layers["1.bias"]})
    dense[4].load_state_dict({"weight": layers["3.weight"], "bias": layers["3.bias"]})
    data = paper.datasets.load("folder", root)
    batch = paper.images(data.test, range(6), 64), torch.tensor(data.test.labels)
    features, labels = extract_features(dense, [batch], progress=False)
    head = Head.load(out / "Lin-SVM.safetensors")
    guess = head.labels(head(torch.tensor(features)))
    assert paper.f1_score(labels, guess, average="macro") == pytest.approx(scores["macro F1"]["Lin-SVM"][1])


@pytest.mark.usefixtures("no_figures")
@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_stopped(root, weights, tmp_path, monkeypatch, capsys):
    assert paper.main(options(root, weights, tmp_path / "whole")) == 0
    whole = json.loads((tmp_path / "whole" / "scores.json").read_text())

    class Interrupted(training.tqdm):
        def update(self, n=1):
            super().update(n)
            if self.desc == "training":
                raise KeyboardInterrupt

    out = tmp_path / "resumed"
    with monkeypatch.context() as patch:
        patch.setattr(training, "tqdm", Interrupted)
        for epochs in (1, 2):
            assert paper.main(options(root, weights, out)) == 130
            assert "Start it again" in capsys.readouterr().err
            state = torch.load(next((out / "cache").glob("training-*.pt")), weights_only=True)
            assert len(state["accuracies"]) == epochs
    # The features, too, are cut off in the middle of an image.
    for file in (out / "cache").glob("*.float16"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 + 1])
    assert paper.main(options(root, weights, out)) == 0
    resumed = json.loads((out / "scores.json").read_text())
    assert resumed["validation accuracy"] == whole["validation accuracy"]
    assert resumed["macro F1"] == whole["macro F1"]
    for kind in ("training", "test"):
        mine, theirs = (next((tmp_path / run / "cache").glob(f"{kind}-*.float16")) for run in ("resumed", "whole"))
        assert mine.read_bytes() == theirs.read_bytes()


def outcome(**answers):
    """Return scores with what classifiers answer for 20 images, ten of each of two classes."""
    classes = ["sick", "well"]
    true = np.repeat([0, 1], 10)
    guesses = {model: np.array(answers.get(model, true)) for model in report.MODELS}
    return {
        "classes": classes,
        "test confusion, by true class": {
            model: [[int(((true == t) & (guess == p)).sum()) for p in (0, 1)] for t in (0, 1)]
            for model, guess in guesses.items()
        },
        "shown": [
            {"class": classes[i // 10], "predicted": {model: classes[guess[i]] for model, guess in guesses.items()}}
            for i in (0, 10)
        ],
    }


def test_the_page_says_in_words_who_collapsed_and_who_is_wrong():
    right = outcome()
    assert report.collapses(right) == report.mistakes(right) == []
    always_well = outcome(CNN=np.ones(20, int), **{"RBF-SVM": [0, *[1] * 19]})
    cnn, rbf = report.collapses(always_well)
    assert cnn.startswith(
        "CNN has collapsed: it answers well for 100% of the test images, where 50% are, and finds none"
    )
    assert "sick (10 images) (recall 0)" in cnn
    assert rbf.startswith("RBF-SVM has collapsed: it answers well for 95% of the test images, where 50% are. ")
    assert [sentence.split(". ")[0] for sentence in report.mistakes(always_well)] == [
        "The image of sick is misclassified: CNN says well"
    ]
    assert [report.row_title(answer) for answer in always_well["shown"]] == ["sick (wrong: CNN)", "well"]
    # Many wrong answers are no collapse, but a class that is never found is said.
    never = outcome(**{"Lin-SVM": [1] * 10 + [0] * 5 + [1] * 5})
    assert report.collapses(never) == ["Lin-SVM finds none of the test images of sick (10 images) (recall 0)."]


def test_a_class_that_most_images_are_of_is_no_collapse():
    scores = outcome()
    scores["test confusion, by true class"] = {"CNN": [[1, 1], [0, 98]]}
    assert report.collapses(scores) == []


def spoil(kind, root, out, weights, monkeypatch):
    """Do something wrong, and return the options to run with."""
    more = []
    match kind:
        case "corrupt image":
            (root / "train" / "left" / "3.png").write_bytes(b"no image")
        case "one image":
            for file in sorted((root / "train" / "right").iterdir())[1:]:
                file.unlink()
        case "no test image":
            shutil.rmtree(root / "test" / "right")
        case "no root":
            shutil.rmtree(root)
        case "no weights":
            weights = root / "weights.pth"
        case "other weights":
            weights = root / "weights.pth"
            torch.save(torchvision.models.squeezenet1_0(weights=None).state_dict(), weights)
        case "broken weights":
            weights = root / "weights.pth"
            weights.write_bytes(b"x" * 100)
        case "unknown backbone":
            more = ["--backbone", "vgg99"]
        case "too many components":
            more = ["--components", "25"]
        case "diverging":
            more = ["--rate", "1e30"]
        case "no room":
            usage = shutil.disk_usage(root)._replace(free=1000)
            monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
            more = ["--cache", str(out / "other")]
    return options(root, weights, out, *more)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("corrupt image", "3.png is no readable image"),
        ("one image", "the class 'right' has 1 training images: at least 5 are needed"),
        ("no test image", "has no folder for"),
        ("no root", "name the data with --root"),
        ("no weights", "--weights must name a file"),
        ("other weights", "its tensors are not those of that network"),
        ("broken weights", "holds no state_dict of torchvision's squeezenet1_1"),
        ("unknown backbone", "torchvision.models has no 'vgg99'"),
        ("too many components", "too few for 25 components"),
        ("diverging", "lower --rate"),
        ("no room", "name another folder with --cache"),
    ],
)
def test_what_cannot_run_says_why_and_leaves_earlier_results(
    kind, message, root, weights, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "scores.json").write_text("earlier")
    assert paper.main(spoil(kind, root, out, weights, monkeypatch)) == 1
    assert message in capsys.readouterr().err
    assert (out / "scores.json").read_text() == "earlier"
    assert not (out / "index.html").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--dataset", "imagenet"], "invalid choice"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--components", "31"], "--components must be 1 to 30"),
        (["--limit", "2"], "--limit must be at least 5"),
        (["--rate", "0"], "--rate must be positive"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--device", "tpu9"], "--device tpu9 cannot be used"),
    ],
)
def test_wrong_options_are_refused(wrong, message, root, weights, tmp_path, capsys):
    with pytest.raises(SystemExit):
        paper.main(options(root, weights, tmp_path, *wrong))
    assert message in capsys.readouterr().err


def test_duplicates_are_dropped_from_the_training_set(root):
    shutil.copy(root / "test" / "left" / "0.png", root / "train" / "left" / "copy.png")
    shutil.copy(root / "train" / "right" / "1.png", root / "train" / "right" / "copy.png")
    data = paper.datasets.load("folder", root)
    assert data.dropped == 2
    assert len(data.test.labels) == 6
    assert not set(data.train.digests) & set(data.test.digests)


def test_folders_without_a_split_are_split(root, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "flat" / name).mkdir(parents=True)
        for i in range(10):
            picture(rng, 0).save(tmp_path / "flat" / name / f"{i}.jpg")
    data = paper.datasets.load("dog-vs-cat", tmp_path / "flat")
    assert np.bincount(data.train.labels).tolist() == [8, 8]
    assert np.bincount(data.test.labels).tolist() == [2, 2]
    assert not set(data.train.digests) & set(data.test.digests)


def test_formats_of_torchvision_and_medmnist(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60, 28, 28), dtype=np.uint8), np.arange(60, dtype=np.uint8) % 10
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        header = (0x803).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in images.shape)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = (0x801).to_bytes(4, "big") + (60).to_bytes(4, "big")
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    data = paper.datasets.load("mnist", tmp_path, limit=5)
    assert len(data.train.labels) == 50
    assert (np.asarray(data.train.read(7))[..., 0] == images[7]).all()
    arrays = {f"{part}_images": np.repeat(images[..., None], 3, -1) for part in ("train", "test")}
    arrays |= {f"{part}_labels": labels[:, None] % 8 for part in ("train", "test")}
    np.savez(tmp_path / "bloodmnist.npz", **arrays)
    data = paper.datasets.load("bloodmnist", tmp_path)
    assert data.classes[0] == "basophil"
    assert (np.asarray(data.test.read(3)) == arrays["test_images"][3]).all()
    with gzip.open(tmp_path / "bloodmnist.npz", "wb") as file:
        file.write(b"damaged")
    with pytest.raises(paper.RunError, match="or damaged"):
        paper.datasets.load("bloodmnist", tmp_path)
    with pytest.raises(paper.RunError, match="torchvision finds no CIFAR10"):
        paper.datasets.load("cifar10", tmp_path)


OTHERS = ["vgg11", "resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5"]


@pytest.mark.parametrize("name", [*OTHERS, pytest.param("densenet121", marks=pytest.mark.slow)])
def test_convolutions_of_torchvisions_classifiers(name, tmp_path):
    with torch.device("meta"):  # shapes only: VGG's weights are half a gigabyte
        torch.save(torchvision.models.get_model(name, weights=None).state_dict(), tmp_path / "weights.pth")
        part = paper.convolutions(name, tmp_path / "weights.pth")
        assert part(torch.zeros(1, 3, 96, 96)).dim() == 4


def test_a_network_without_convolutional_part_is_refused(tmp_path):
    with torch.device("meta"):
        torch.save(torchvision.models.get_model("vit_b_16", weights=None).state_dict(), tmp_path / "weights.pth")
        with pytest.raises(paper.RunError, match="vit_b_16 has no convolutional part"):
            paper.convolutions("vit_b_16", tmp_path / "weights.pth")


def test_closeness_is_the_absolute_correlation_with_the_same_image_and_the_next():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 4, 3, 5))
    second[0] = -2 * first[0] + 1
    second[3] = 7.0  # constant
    found = closeness(torch.tensor(first), torch.tensor(second))
    same = [abs(np.corrcoef(first[n].ravel(), second[n].ravel())[0, 1]) for n in range(3)]
    other = [abs(np.corrcoef(first[n].ravel(), second[n - 1].ravel())[0, 1]) for n in (1, 2, 3)]
    assert same[0] == pytest.approx(1)
    assert found == {"same image": pytest.approx(np.mean(same)), "another image": pytest.approx(np.mean(other))}
    assert closeness(torch.ones(2, 3, 3), torch.ones(2, 3, 3))["same image"] is None


@pytest.mark.usefixtures("no_figures")
@pytest.mark.slow
def test_what_was_computed_from_other_contents_is_not_used_again(root, weights, tmp_path, capsys):
    out = tmp_path / "out"
    assert paper.main(options(root, weights, out)) == 0
    before = {file.name for file in (out / "cache").iterdir()}
    rng = np.random.default_rng(1)
    picture(rng, 1).save(root / "train" / "left" / "0.png")
    assert paper.main(options(root, weights, out)) == 0
    after = {file.name for file in (out / "cache").iterdir()}
    assert len({name for name in after - before if name.startswith("training-")}) == 2  # features and checkpoint
    for file in (out / "cache").glob("training-*.pt"):
        file.write_bytes(b"damaged")
    assert paper.main(options(root, weights, out)) == 0
    assert "is damaged: training starts anew" in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
@pytest.mark.slow
def test_a_shorter_training_keeps_the_checkpoint_of_a_longer_one(root, weights, tmp_path):
    out = tmp_path / "out"
    assert paper.main(options(root, weights, out)) == 0
    longer = json.loads((out / "scores.json").read_text())["validation accuracy"]
    assert paper.main(options(root, weights, out, "--epochs", "2")) == 0
    assert json.loads((out / "scores.json").read_text())["validation accuracy"] == longer[:2]
    lengths = {len(torch.load(file, weights_only=True)["accuracies"]) for file in (out / "cache").glob("training-*.pt")}
    assert lengths == {2, 3}


def test_images_of_16_bits_keep_their_greys(root):
    ramp = np.linspace(0, 65535, 40 * 40).reshape(40, 40).astype(np.uint16)
    Image.fromarray(ramp).save(root / "test" / "left" / "0.png")
    data = paper.datasets.load("folder", root)
    pixels = np.stack([np.asarray(data.test.read(i)) for i in range(6)])
    assert np.abs(pixels[0][..., 0] - ramp / 256).max() < 2


def test_the_same_image_in_two_classes_is_refused(root):
    shutil.copy(root / "train" / "left" / "1.png", root / "train" / "right" / "copy.png")
    with pytest.raises(paper.RunError, match="the same image in two classes"):
        paper.datasets.load("folder", root)
