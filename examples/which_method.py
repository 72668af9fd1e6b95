"""Which method for which head? Every method on the paper's six data sets, for SVMs, a forest and boosting.

    python examples/which_method.py --root data --weights mobilenet_v2.pth

For every data set in --sets there are two networks: dense layers of 40 and 30 units, trained on the frozen convolutions
of an ImageNet classifier, as in the paper; and the means of the convolutions over positions. On each, PCA(3) and the
--heads are fitted. Of forest and boosting only methods that need no gradient are measured, and of these the quick ones.
``pytorch_grad_cam_pcasvm.evaluation`` measures faithfulness (deletion and insertion) and sensitivity (the head, and
layers, randomised) behind dense layers, and localisation (two photos side by side) behind pooled features. It also
counts the maps that contradict the value they explain. In "dog-vs-cat:10", the training set has ten images of the first
class for each image of another class. There, only Grad-CAM and the baselines of contributions are compared; --baselines
does so for every set, in a third of the time.

It prints Markdown, and writes which_method.md, .json and .png to --out, and contributions.png: photos with Grad-CAM and
contributions. Costly results are kept in --cache, so that a run resumes where it stopped. On two cores, start two runs,
each with half of --sets, and then a third that combines them.
"""

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import datasets, training
from experiment.comparison import BASELINES, BLIND, METHODS, OF_VALUES, RANDOM, LogRatioContributions, plot, tables
from experiment.frozen import FrozenFeatures, images, shown
from experiment.network import FEATURE_LAYER, PaperCNN, convolutions, fused
from experiment.problems import RunError
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm import (
    BaselineWarning,
    BlankMapWarning,
    ClosedFormGradCAM,
    ClosedFormScoreCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    ShapCAM,
    SVMTarget,
    __version__,
    evaluation,
    figures,
)

SETS = ("mnist", "fashion-mnist", "bloodmnist", "cifar10", "chest-xray", "dog-vs-cat", "chest-xray:10", "dog-vs-cat:10")
FRACTIONS = (0.25, 0.5, 0.75)
COMPONENTS = 3
RIVALS = (RANDOM, BLIND)  # the others cost as much again for every method
HEADS: dict[str, Callable[[], Any]] = {
    "linear": lambda: SVC(kernel="linear"),
    'RBF, gamma="scale"': lambda: SVC(gamma="scale"),
    "RBF, gamma=1": lambda: SVC(gamma=1.0),
    "forest": lambda: RandomForestClassifier(random_state=0),
    "boosting": lambda: HistGradientBoostingClassifier(random_state=0),
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sets", nargs="+", default=list(SETS), help=f"as examples/paper.py names them (default: {' '.join(SETS)})")
    add("--heads", nargs="+", default=list(HEADS), choices=list(HEADS), help="heads to measure (default: all)")
    add("--root", type=Path, default=Path("data"), help="has a folder for each set, or torchvision's (default: data)")
    add("--download", action="store_true", help="fetch MNIST, Fashion-MNIST, CIFAR-10 to --root")
    add("--out", type=Path, default=Path("results/which_method"), help="where results go (results/which_method)")
    add("--cache", type=Path, help="where features, checkpoints and results are kept (default: OUT/cache)")
    add("--backbone", default="mobilenet_v2", help="a classifier of torchvision.models (default: mobilenet_v2)")
    add("--weights", type=Path, help="a file with its state_dict (default: torchvision's, downloaded once)")
    add("--size", type=int, default=200, help="side of the input in pixels (default: 200)")
    add("--images", type=int, default=80, help="test images for deletion and insertion, and pairs of photos, at most")
    add("--baselines", action="store_true", help="measure only Grad-CAM and contributions from several baselines")
    add("--limit", type=int, default=100, help="training images per class (default: 100)")
    add("--epochs", type=int, default=150, help="the most epochs; the best is taken (default: 150)")
    add("--score-channels", type=int, default=16, help="channels that Score-CAM masks with (default: 16)")
    add("--seed", type=int, default=0, help="of initial weights, batches, choices, random maps (default: 0)")
    add("--threads", type=int, default=1, help="of the CPU; with one, the same seed gives the same numbers")
    add("--device", default="cpu")
    options = parser.parse_args(argv)
    for name, least in {"size": 64, "images": 6, "limit": 5, "epochs": 1, "score_channels": 1, "threads": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    options.cache = options.cache or options.out / "cache"
    return options


def digest(*parts: Any) -> str:
    """Return a digest of whatever JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def given() -> nn.Module:
    """Return what stands for the convolutions where feature maps, (N, T, M, N), are a network's input."""
    part = nn.Identity()
    part.register_parameter("nothing", nn.Parameter(torch.empty(0)))  # where is the network? its parameters tell
    return part


class Problem:
    """One data set, and what was trained on it."""

    def __init__(self, name: str, options: argparse.Namespace, conv: nn.Module, weights: str) -> None:
        self.name, self.options, self.conv = name.replace(":", "-"), options, conv
        folder, _, self.ratio = name.partition(":")
        root = options.root / folder
        data = datasets.load(
            folder, root if root.is_dir() else options.root, download=options.download, seed=options.seed
        )
        self.classes, self.few = list(data.classes), options.baselines or bool(self.ratio)
        parts = {"training": data.train.limited(options.limit), "test": data.test.limited(-(-200 // len(self.classes)))}
        if self.ratio:
            parts["training"] = parts["training"].imbalanced(int(self.ratio))
        self.labels = {part: found.labels for part, found in parts.items()}
        origin = {"problem": name, "weights": weights}
        self.features = {
            part: FrozenFeatures(
                found, conv, options.size, options.cache, origin, f"{self.name}-{part}", options.device, 4
            )
            for part, found in parts.items()
        }
        self.x = images(parts["test"], range(len(parts["test"].labels)), options.size)
        shape = self.features["test"].shape
        torch.manual_seed(options.seed)
        self.dense = PaperCNN(nn.Identity(), shape, len(self.classes)).to(options.device)
        settings = [options.size, options.epochs, options.seed, options.limit]
        learned = [origin, list(parts["training"].digests), parts["training"].labels.tolist(), settings]
        self.course = training.train(
            self.dense, self.features["training"], self.labels["training"], epochs=options.epochs, patience=50,
            rate=1e-3, batch=32, seed=options.seed, device=options.device,
            checkpoint=options.cache / f"{self.name}-training-{digest(learned)}.pt",
        )  # fmt: skip
        self.dense.eval()
        self.key = digest(learned, list(parts["test"].digests))

    def network(self, kind: str, head: Any, *, frozen: bool = False) -> PCASVMNet:
        """Return a network behind dense layers or means, of images or of frozen features."""
        if kind == "pooled":
            backbone: nn.Module = nn.Sequential(OrderedDict(features=given() if frozen else self.conv))
            return PCASVMNet(backbone, head, pool="mean").eval()
        backbone = self.dense
        if not frozen:
            backbone = PaperCNN(self.conv, self.features["test"].shape, len(self.classes)).to(self.options.device)
            backbone.classifier = self.dense.classifier
        return PCASVMNet(backbone, head, layer=FEATURE_LAYER).eval()

    def rows(self, kind: str, part: str) -> np.ndarray:
        """Return what the heads are fitted on, in double precision."""
        features = self.features[part]
        if kind == "pooled":
            return np.stack([maps.astype(np.float64).mean((1, 2)) for maps in features.rows])
        everything = np.arange(len(features.rows))
        return training.scores(self.dense.classifier[:5], features, everything, self.options.device).astype(np.float64)

    def mean(self, rows: np.ndarray | slice) -> Tensor:
        """Return the mean of some training images' feature maps, (T, M, N)."""
        found = self.features["training"].rows[rows].mean(0, dtype=np.float64)
        return torch.from_numpy(found).float().to(self.options.device)

    def methods(self, kind: str, title: str, names: Container[str] = METHODS) -> dict[str, Any]:
        """Return the methods by name, with the means of this training set; log-ratios are for kernels.

        Of a head without a gradient, these are the methods that need none.
        """
        labels = self.labels["training"]
        balanced = torch.stack([self.mean(np.flatnonzero(labels == c)) for c in np.unique(labels)]).mean(0)
        if kind == "pooled":  # images side by side are wider
            balanced = balanced.mean((1, 2))
        found = {}
        for name, (method, settings) in METHODS.items():
            if name not in names or (method is LogRatioContributions and "RBF" not in title):
                continue
            if title in ("forest", "boosting") and name not in OF_VALUES:
                continue
            if method is ClosedFormScoreCAM:
                settings = settings | {"channels": self.options.score_channels}
            if issubclass(method, ContributionCAM | ShapCAM):
                settings = settings | {"mean": self.mean(slice(None))}
            if settings.get("baseline") == "balanced mean":
                settings = settings | {"baseline": balanced}
            found[name] = method, settings
        return found

    def checked(self, kind: str, title: str, head: Pipeline, q: np.ndarray, chosen: Container[str]) -> dict[str, Any]:
        """Return what the checks find of the chosen methods, as JSON; each is kept."""
        options = self.options
        net, data = self.network(kind, head), (self.x, torch.from_numpy(self.labels["test"]))
        every = {"seed": options.seed, "batch_size": 10}

        def refitted(seed: int) -> Pipeline:
            return clone(head).fit(q, np.random.default_rng(seed).permutation(self.labels["training"]))

        methods = self.methods(kind, title, [name for name in (BASELINES if self.few else METHODS) if name in chosen])
        rivals = [*RIVALS, *(name for name in ["Contributions"] if name in methods)]
        of_kind = {
            "dense": {
                "faithfulness": partial(
                    evaluation.faithfulness, fractions=FRACTIONS, rivals=rivals, images=options.images
                ),
                "sensitivity": partial(evaluation.sensitivity, refitted=refitted, images=max(3, options.images // 4)),
            },
            "pooled": {"localisation": partial(evaluation.localisation, rivals=rivals, images=2 * options.images)},
        }
        if self.few:
            del of_kind["dense"]["sensitivity"]
        found = {}
        for check, measure in of_kind[kind].items():
            settings = [options.images, options.score_channels, every, FRACTIONS, rivals, repr([*methods]), __version__]
            key = digest(self.key, kind, title, settings)
            file = options.cache / f"{self.name}-{check}-{key}.json"
            if not file.exists():
                try:
                    result = measure(net, data, ["features"], methods, **every).to_dict()
                except ValueError as error:  # a head that finds one class only, as some do that learned ten to one
                    print(f"{self.name}, {kind}, {title}: no {check}: {error}", flush=True)
                    continue
                beside = file.with_suffix(".new")
                beside.write_text(json.dumps(result, allow_nan=False))
                os.replace(beside, file)
            found[check] = json.loads(file.read_text())
        return found

    def contradictory(self, kind: str, title: str, head: Pipeline) -> dict[str, Any]:
        """Return by method how many maps of the test set (of some images if that costs much) contradict their value.

        Such a map has more positive than negative evidence, or less, where the value is below, or above, 0: a
        component's mean over the training set, or the boundary of the predicted class. A
        method that finds no such boundary is left out. For heads without a gradient, also the median and the
        largest cancellation.
        """
        features = self.features["test"]
        net = self.network(kind, head, frozen=True)
        result = {}
        rows = np.random.default_rng(self.options.seed).permutation(len(features.rows))
        for name, (method, settings) in self.methods(kind, title).items():
            wrong, cancelled, costly = [], list[np.ndarray](), issubclass(method, ClosedFormScoreCAM | ShapCAM)
            chosen = rows[: self.options.images // 2] if costly else rows
            with method(net, ["features"], **settings) as cam:
                try:
                    for index in np.array_split(chosen, len(chosen) // 64 + 1):
                        x = features.batch(index, self.options.device)
                        made = cam.explain(x, [*(PCATarget(b) for b in range(COMPONENTS)), SVMTarget()])
                        wrong.append((made.maps.sum((2, 3)).sign() * made.values.sign() < 0).cpu().numpy())
                        if made.cancellation is not None:
                            cancelled.append(made.cancellation[:, -1].cpu().numpy())
                except ValueError as error:
                    print(f"{self.name}, {kind}, {title}: no {name}: {error}", flush=True)
                    continue
            share = np.concatenate(wrong).mean(0).tolist()
            result[name] = {"components": share[:-1], "decision": share[-1]}
            if cancelled:
                every = np.concatenate(cancelled)
                result[name]["cancellation"] = [float(np.median(every)), float(every.max())]
        return result


def measured(problem: Problem) -> dict[str, Any]:
    """Return everything about one data set, as JSON."""
    heads: dict[str, Any] = {}
    for kind in ("dense", "pooled"):
        q = {part: problem.rows(kind, part) for part in problem.labels}
        first = [StandardScaler()] if kind == "pooled" else []
        for title in problem.options.heads:
            head = make_pipeline(*first, PCA(COMPONENTS, svd_solver="covariance_eigh"), HEADS[title]())
            head.fit(q["training"], problem.labels["training"])
            contradictory = problem.contradictory(kind, title, head)
            heads.setdefault(kind, {})[title] = {
                "test accuracy": float((head.predict(q["test"]) == problem.labels["test"]).mean()),
                "contradictory": contradictory,
                **problem.checked(kind, title, head, q["training"], contradictory),
            }
    return {
        "classes": problem.classes,
        "training images": len(problem.labels["training"]),
        "test images": len(problem.labels["test"]),
        "heads": heads,
    }


def picture(problem: Problem, count: int = 4) -> Any:
    """Draw Grad-CAM and contributions of some images for the RBF SVM with scikit-learn's gamma."""
    head = make_pipeline(PCA(COMPONENTS, svd_solver="covariance_eigh"), SVC())
    net = problem.network("dense", head.fit(problem.rows("dense", "training"), problem.labels["training"]))
    chosen = np.random.default_rng(problem.options.seed).permutation(len(problem.x))[:count]
    x = problem.x[chosen].to(problem.options.device)
    cams = {
        "Grad-CAM": ClosedFormGradCAM(net, ["features"]),
        "contributions": ContributionCAM(net, ["features"], mean=problem.mean(slice(None))),
    }
    maps = {title: cam.explain(x, [SVMTarget()]) for title, cam in cams.items()}
    titles = [problem.classes[label] for label in problem.labels["test"][chosen]]
    return figures.plot_maps(shown(x), maps, signed=True, rows=titles, classes=problem.classes)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the results; they are written after each set."""
    for folder in (options.out, options.cache):
        folder.mkdir(parents=True, exist_ok=True)
    conv = fused(convolutions(options.backbone, options.weights)).to(options.device)
    weights = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in conv.state_dict().values()))
    names = ("sets", "heads", "backbone", "size", "images", "limit", "epochs", "score_channels", "seed")
    results: dict[str, Any] = {"settings": {name: getattr(options, name) for name in names}, "sets": {}}
    for name in options.sets:
        start = time.perf_counter()
        problem = Problem(name, options, conv, weights.hexdigest())
        print(f"{name}: {len(problem.labels['training'])} training and {len(problem.labels['test'])} test images, "
              f"best epoch {problem.course.best_epoch} of {len(problem.course.accuracies)}", flush=True)  # fmt: skip
        # Four digits are enough, and a quarter of the bytes.
        text = json.dumps(measured(problem), allow_nan=False)
        results["sets"][name] = json.loads(text, parse_float=lambda number: round(float(number), 4))
        (options.out / "which_method.json").write_text(json.dumps(results, separators=(",", ":")))
        markdown = "\n\n".join(f"### {title}\n\n{text}" for title, text in tables(results).items())
        (options.out / "which_method.md").write_text(markdown + "\n")
        plot(results).savefig(options.out / "which_method.png", dpi=100)
        if name == options.sets[-1]:
            picture(problem).savefig(options.out / "contributions.png", dpi=100)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(markdown)
    return results


def main(argv: list[str] | None = None) -> int:
    """Run, and say what to do where a run cannot go on."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", BlankMapWarning)  # they are counted
    warnings.simplefilter("ignore", BaselineWarning)  # so is what it warns of
    try:
        run(options)
    except RunError as error:
        print(f"which_method.py: {error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("which_method.py: interrupted. Start it again: it goes on where it stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
