"""The paper's experiment: PCA- and SVM-Grad-CAM on six data sets, with the paper's protocol as defaults.

    python examples/paper.py --dataset mnist --root data --download
    python examples/paper.py --dataset folder --root photos --backbone mobilenet_v2 --weights weights.pth

The convolutions of an ImageNet classifier are frozen; dense layers of 40, 30, 20 and C units are trained on them, PCA
is fitted on the second, and a linear and an RBF SVM on its components. The script writes scores.json, the trained
layers, both heads, every figure, and index.html, a self-contained file that you can email, to the folder --out. An
interrupted run resumes where it stopped.
"""

import argparse
import errno
import hashlib
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
import torchvision
from experiment import datasets, report, training
from experiment.closeness import closeness, explained
from experiment.frozen import FrozenFeatures, images, shown
from experiment.network import ACTIVATIONS, FEATURE_LAYER, PaperCNN, convolutions
from experiment.problems import RunError
from matplotlib.figure import Figure
from safetensors.torch import save_file
from sklearn.decomposition import PCA
from sklearn.metrics import confusion_matrix, f1_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import BlankMapWarning, ClosedFormGradCAM, PCASVMNet, PCATarget, SVMTarget, __version__
from pytorch_grad_cam_pcasvm.figures import (
    plot_contribution_ratios,
    plot_feature_space,
    plot_jacobian,
    plot_maps,
    plot_support_vector_effect,
    plot_support_vectors,
)

DATASETS = ("mnist", "fashion-mnist", "bloodmnist", "cifar10", "chest-xray", "dog-vs-cat", "folder")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, the paper's where none are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dataset", required=True, choices=DATASETS)
    add(
        "--root",
        type=Path,
        default=Path("data"),
        help="where the data is: torchvision's root, MedMNIST's .npz, folders",
    )
    add("--download", action="store_true", help="fetch MNIST, Fashion-MNIST, CIFAR-10 to --root")
    add("--out", type=Path, help="where results go (default: results/DATASET-BACKBONE)")
    add("--cache", type=Path, help="where frozen features and checkpoints are kept (default: OUT/cache)")
    add("--backbone", default="vgg16", help="any classifier of torchvision.models with convolutions (default: vgg16)")
    add("--weights", type=Path, help="a file with its state_dict (default: torchvision's, downloaded once)")
    add("--size", type=int, default=200, help="side of the input in pixels (default: 200)")
    add("--activation", default="relu", choices=sorted(ACTIVATIONS), help="of the dense layers (default: relu)")
    add("--epochs", type=int, default=300, help="the most epochs; the best is taken (default: 300)")
    add("--patience", type=int, default=300, help="stop after so many epochs without a better one (default: 300)")
    add("--rate", type=float, default=1e-3, help="learning rate of SGD (default: 0.001)")
    add("--batch", type=int, default=32, help="images in a batch (default: 32)")
    add("--components", type=int, default=3, help="B of the PCA (default: 3)")
    add("--limit", type=int, help="images per class, in training and in test (default: all)")
    add("--seed", type=int, default=0, help="of initial weights, splits and batches (default: 0)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    least_values = {"size": 64, "epochs": 1, "patience": 1, "batch": 1, "limit": 5, "seed": 0}
    for name, least in least_values.items():
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not 1 <= options.components <= 30:
        parser.error(f"--components must be 1 to 30 (the second dense layer has 30 units), got {options.components}")
    if not options.rate > 0:
        parser.error(f"--rate must be positive, got {options.rate}")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {options.device} cannot be used: {str(error).splitlines()[0]}")
    options.out = options.out or Path("results") / f"{options.dataset}-{options.backbone}"
    options.cache = options.cache or options.out / "cache"
    return options


def fit_head(kernel: str, features: np.ndarray, labels: np.ndarray, components: int) -> Pipeline:
    """Fit the paper's head: PCA of the unbiased covariance, then an SVM."""
    svm = SVC(kernel=kernel, C=1.0, gamma=1.0)
    return make_pipeline(PCA(components, svd_solver="covariance_eigh"), svm).fit(features.astype(np.float64), labels)


def weights_digest(module: torch.nn.Module) -> str:
    """Return a digest of a network's weights."""
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(np.ascontiguousarray(value.cpu().numpy()))
    return digest.hexdigest()


def one_per_class(labels: np.ndarray, right: np.ndarray, most: int = 6) -> np.ndarray:
    """Return for each class (of at most so many, spread evenly) the first image that all classifiers get right."""
    classes = np.unique(labels)
    classes = classes[np.linspace(0, len(classes) - 1, min(most, len(classes))).round().astype(int)]
    return np.array([np.flatnonzero(labels == c)[np.argmax(right[labels == c])] for c in classes])


class Thumbnails:
    """Training images, read when they are asked for."""

    def __init__(self, part: datasets.Part, size: int) -> None:
        self.part, self.size = part, size

    def __getitem__(self, index: int) -> np.ndarray:
        """Return image ``index``, shape (size, size, 3), in [0, 1]."""
        return shown(images(self.part, [index], self.size))[0]


def run(options: argparse.Namespace) -> Path:
    """Run the experiment and return where its results are."""
    data = datasets.load(
        options.dataset, options.root, download=options.download, limit=options.limit, seed=options.seed
    )
    if len(data.train.labels) < options.components:
        raise RunError(f"{len(data.train.labels)} training images are too few for {options.components} components")
    print(f"{options.dataset}: {len(data.train.labels)} training and {len(data.test.labels)} test images", flush=True)
    options.cache.mkdir(parents=True, exist_ok=True)
    conv = convolutions(options.backbone, options.weights).to(options.device)
    origin = {"dataset": options.dataset, "backbone": options.backbone, "weights": weights_digest(conv)}
    parts = {"training": data.train, "test": data.test}
    features = {
        name: FrozenFeatures(part, conv, options.size, options.cache, origin, name, options.device)
        for name, part in parts.items()
    }
    labels = {name: part.labels for name, part in parts.items()}
    everything = {name: np.arange(len(part.labels)) for name, part in parts.items()}

    # The dense layers alone: their input are the frozen features.
    torch.manual_seed(options.seed)
    dense = PaperCNN(torch.nn.Identity(), features["training"].shape, len(data.classes), options.activation)
    dense = dense.to(options.device)
    # More epochs go on from where fewer ended.
    shaping = {name: getattr(options, name) for name in ("size", "activation", "rate", "batch", "seed", "patience")}
    learned_on = {"images": list(data.train.digests), "labels": labels["training"].tolist()}
    key = hashlib.sha256(json.dumps({**origin, **shaping, **learned_on}).encode()).hexdigest()[:16]
    course = training.train(
        dense, features["training"], data.train.labels, epochs=options.epochs, patience=options.patience,
        rate=options.rate, batch=options.batch, seed=options.seed, device=options.device,
        checkpoint=options.cache / f"training-{key}.pt",
    )  # fmt: skip

    q = {
        part: training.scores(dense.classifier[:5], features[part], everything[part], options.device) for part in parts
    }
    heads = {
        name: fit_head(kernel, q["training"], labels["training"], options.components)
        for name, kernel in (("Lin-SVM", "linear"), ("RBF-SVM", "rbf"))
    }
    predicted = {
        part: {
            "CNN": training.scores(dense, features[part], everything[part], options.device).argmax(1),
            **{name: head.predict(q[part].astype(np.float64)) for name, head in heads.items()},
        }
        for part in parts
    }
    f1 = {
        model: [float(f1_score(labels[part], predicted[part][model], average="macro")) for part in parts]
        for model in report.MODELS
    }
    for model, (on_training, on_test) in f1.items():
        print(f"{model:<8} macro F1 {on_training:.3f} / {on_test:.3f}", flush=True)

    # The dense layers on frozen features explain the whole test set in seconds, with the maps of the whole network.
    components = [PCATarget(b) for b in range(options.components)]
    small = {name: PCASVMNet(dense, head, layer=FEATURE_LAYER).eval() for name, head in heads.items()}
    of_test = {
        name: explained(net, features["test"], [*components, SVMTarget()], options.device)
        for name, net in small.items()
    }
    close = {
        name: [closeness(maps[:, b], maps[:, -1]) for b in range(options.components)] for name, maps in of_test.items()
    }

    cnn = PaperCNN(conv, features["training"].shape, len(data.classes), options.activation).to(options.device).eval()
    cnn.classifier.load_state_dict(dense.classifier.state_dict())
    cnn = cnn.to(memory_format=torch.channels_last)
    nets = {name: PCASVMNet(cnn, head, layer=FEATURE_LAYER).eval() for name, head in heads.items()}

    pca = PCA(svd_solver="covariance_eigh").fit(q["training"].astype(np.float64))
    right = np.all([guess == labels["test"] for guess in predicted["test"].values()], axis=0)
    shown_images = one_per_class(labels["test"], right)
    scores = {
        "dataset": options.dataset,
        "classes": list(data.classes),
        "samples": {**{part: len(labels[part]) for part in parts}, "duplicates dropped": data.dropped},
        "settings": {name: getattr(options, name) for name in ("backbone", "epochs", "components", "limit", *shaping)}
        | {"weights": origin["weights"]},
        "macro F1": f1,
        "test confusion, by true class": {
            model: confusion_matrix(labels["test"], guess, labels=range(len(data.classes))).tolist()
            for model, guess in predicted["test"].items()
        },
        "shown": [
            {
                "class": data.classes[labels["test"][i]],
                "predicted": {model: data.classes[guess[i]] for model, guess in predicted["test"].items()},
            }
            for i in shown_images.tolist()
        ],
        "best epoch": course.best_epoch,
        "validation accuracy": course.accuracies,
        "contribution ratios": (100 * pca.explained_variance_ratio_).tolist(),
        "closeness of SVM maps": close,
        "versions": {
            "pytorch_grad_cam_pcasvm": __version__,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "scikit-learn": sklearn.__version__,
        },
    }
    figures = _figures(options, data, cnn, nets, heads, q, labels, pca, shown_images, scores["shown"])
    figures["training.png"] = ("Validation accuracy of every epoch; the star is the one taken.",
                               report.plot_training(course.accuracies))  # fmt: skip
    _write(options.out, scores, figures, cnn, nets)
    return options.out


def _figures(
    options: argparse.Namespace,
    data: datasets.ImageData,
    cnn: PaperCNN,
    nets: dict[str, PCASVMNet],
    heads: dict[str, Pipeline],
    q: dict[str, np.ndarray],
    labels: dict[str, np.ndarray],
    pca: PCA,
    chosen: np.ndarray,
    answers: list[dict[str, Any]],
) -> dict[str, tuple[str, Figure]]:
    """Return the paper's figures, with their captions, by file name."""
    x = images(data.test, chosen, options.size).to(options.device)
    pictures = shown(x)
    titles = [report.row_title(answer) for answer in answers]
    of_first = answers[0]["class"]
    components = [PCATarget(b) for b in range(options.components)]

    def explained(model: torch.nn.Module, targets: list[Any] | None) -> Any:
        with ClosedFormGradCAM(model, [cnn.features]) as cam:
            return cam.explain(x, targets)

    maps = {
        "Grad-CAM": explained(cnn, None),
        "PCA": explained(nets["Lin-SVM"], components),
        **{name: explained(net, [SVMTarget()]) for name, net in nets.items()},
    }
    p = {part: heads["RBF-SVM"][:-1].transform(rows.astype(np.float64)) for part, rows in q.items()}
    dims = tuple(range(min(3, options.components)))
    output = nets["RBF-SVM"](x)
    first = int(output.labels()[0])
    effect = output.head.support_vector_effect(output.components[:1], first)
    sign = "positive: evidence for it"
    if data.classes[first] != of_first:
        sign += f"; a wrong answer: the image is of {of_first!r}"
    result = {
        "maps.png": (
            "Input, Grad-CAM of the CNN, what raises and what lowers every component (a pair shares its scale, to nu), "
            "and the evidence for the class that each SVM predicts.",
            plot_maps(pictures, maps, rows=titles, classes=data.classes),
        ),
        "signed.png": (
            "The same components and decisions signed: red raises, blue lowers.",
            plot_maps(pictures, maps, rows=titles, classes=data.classes, signed=True),
        ),
        "contribution.png": (
            "Contribution ratios of all components; those in blue are used.",
            plot_contribution_ratios(pca, highlight=options.components),
        ),
        "effect.png": (
            "Effect of a support vector on the maps of an RBF SVM against its distance.",
            plot_support_vector_effect(),
        ),
        "jacobian.png": (
            f"The Jacobian of one image ({of_first}): pixels of one feature map, dense units, components.",
            plot_jacobian(nets["Lin-SVM"], cnn.features, x[0]),
        ),
        "support_vectors.png": (
            f"Training images that drive the RBF-SVM's map of {data.classes[first]!r} for the first image ({sign}).",
            plot_support_vectors(
                effect, Thumbnails(data.train, options.size), image=pictures[0],
                names=[data.classes[label] for label in labels["training"]],
            ),
        ),
    }  # fmt: skip
    if len(dims) > 1:
        result["feature_space.png"] = (
            "Training and test set in the space of the first components.",
            plot_feature_space(
                p["training"], labels["training"], test=(p["test"], labels["test"]), dims=dims, classes=data.classes
            ),
        )
    return result


def _write(
    out: Path,
    scores: dict[str, Any],
    figures: dict[str, tuple[str, Figure]],
    cnn: PaperCNN,
    nets: dict[str, PCASVMNet],
) -> None:
    """Write all results beside the earlier ones first, then put them in their place."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        new = Path(folder)
        for name, (_, figure) in figures.items():
            figure.savefig(new / name, dpi=100)
        (new / "scores.json").write_text(json.dumps(scores, indent=1, allow_nan=False))
        pictures = {name: (caption, (new / name).read_bytes()) for name, (caption, _) in figures.items()}
        (new / "index.html").write_text(report.page(scores, pictures))
        save_file(cnn.classifier.state_dict(), new / "dense.safetensors")
        for name, net in nets.items():
            net.head.save(new / f"{name}.safetensors")
        for file in new.iterdir():
            os.replace(file, out / file.name)


def main(argv: list[str] | None = None) -> int:
    """Run, and say what to do where a run cannot go on."""
    options = arguments(argv)
    warnings.simplefilter("ignore", BlankMapWarning)  # the figures say which maps are blank, and why
    try:
        out = run(options)
    except RunError as error:
        print(f"paper.py: {error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("paper.py: interrupted. Start it again: it goes on where it stopped.", file=sys.stderr)
        return 130
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "Make room, or name other folders with --out and --cache" if full else "Check --root, --out and --cache"
        print(f"paper.py: {error}. {hint}, and start again. Earlier results are as they were.", file=sys.stderr)
        return 1
    print(f"{out / 'index.html'} shows the results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
