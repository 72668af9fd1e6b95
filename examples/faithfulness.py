"""Which maps can be believed? Every method against random maps and a blind one, on several data sets and SVMs.

    python examples/faithfulness.py --root data --weights mobilenet_v2.pth

For every set of --sets: dense layers of 40 and 30 units are trained on the frozen convolutions of an ImageNet
classifier, PCA(3) and SVMs are fitted on the second, and the predicted class of some test images is explained by every
method. Deletion and insertion say how much better than random maps a method finds what the decision depends on. A
second head (scaler, PCA(3), SVM) is fitted on the pooled convolutions and explains two photos side by side, of
different classes: how much of the evidence for a class lies on its photo? It prints Markdown, and leaves
faithfulness.md, .json and .png in --out, and contributions.png: photos with Grad-CAM and contributions. What is costly
is kept in --cache, so that a run goes on where it stopped. The defaults take about twenty minutes on one core.
"""

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import datasets, evaluation, training
from experiment.comparison import BLIND, KINDS, METHODS, ROWS, plot, tables
from experiment.frozen import FrozenFeatures, images, prepared, shown
from experiment.network import FEATURE_LAYER, PaperCNN, convolutions
from experiment.problems import RunError
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm import (
    BlankMapWarning,
    ClosedFormGradCAM,
    ClosedFormScoreCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    figures,
    mean_activations,
)

SETS = ("dog-vs-cat", "fashion-mnist", "chest-xray")
FRACTIONS = (0.25, 0.5, 0.75)
COMPONENTS = 3
RANDOM = 3  # random maps an image, whose mean is what a method is compared with
SVMS: dict[str, Callable[[], SVC]] = {
    "linear": lambda: SVC(kernel="linear"),
    'RBF, gamma="scale"': lambda: SVC(gamma="scale"),
    "RBF, gamma=1": lambda: SVC(gamma=1.0),
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sets", nargs="+", default=list(SETS), help=f"as examples/paper.py names them (default: {' '.join(SETS)})")
    add("--root", type=Path, default=Path("data"), help="has a folder for each set, or torchvision's (default: data)")
    add("--download", action="store_true", help="fetch MNIST, Fashion-MNIST, CIFAR-10 to --root")
    add("--out", type=Path, default=Path("results/faithfulness"), help="where results go (results/faithfulness)")
    add("--cache", type=Path, help="where features, checkpoints and answers are kept (default: OUT/cache)")
    add("--backbone", default="mobilenet_v2", help="a classifier of torchvision.models (default: mobilenet_v2)")
    add("--weights", type=Path, help="a file with its state_dict (default: torchvision's, downloaded once)")
    add("--size", type=int, default=200, help="side of the input in pixels (default: 200)")
    add("--images", type=int, default=40, help="test images to explain, and pairs of photos, of a set (default: 40)")
    add("--limit", type=int, default=100, help="training images per class (default: 100)")
    add("--epochs", type=int, default=150, help="the most epochs; the best is taken (default: 150)")
    add("--score-images", type=int, default=12, help="of these for Score-CAM, which is slow (default: 12)")
    add("--score-channels", type=int, default=32, help="channels that Score-CAM masks with (default: 32)")
    add("--seed", type=int, default=0, help="of initial weights, batches, choices, random maps (default: 0)")
    add("--threads", type=int, default=1, help="of the CPU; with one, the same seed gives the same numbers")
    add("--device", default="cpu")
    options = parser.parse_args(argv)
    for name, least in {"size": 64, "images": 2, "limit": 5, "epochs": 1, "score_images": 2, "threads": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    options.cache = options.cache or options.out / "cache"
    return options


def digest(*parts: Any) -> str:
    """Return a digest of arrays, and of whatever JSON can hold."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.tobytes() if isinstance(part, np.ndarray) else json.dumps(part).encode())
    return whole.hexdigest()[:16]


def kept(file: Path, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Return an array from a file, or compute it and write the file, at once or not at all."""
    if not file.exists():
        beside = file.with_suffix(".new.npy")
        np.save(beside, compute())
        os.replace(beside, file)
    return np.load(file)


def fused(convolutions: nn.Module) -> nn.Module:
    """Put batch norms into the convolutions before them, for speed alone, and return the network."""
    for part in [*convolutions.modules()]:
        if isinstance(part, nn.Sequential):
            for i in range(len(part) - 1):
                first, second = part[i], part[i + 1]
                if isinstance(first, nn.Conv2d) and isinstance(second, nn.BatchNorm2d):
                    part[i], part[i + 1] = fuse_conv_bn_eval(first, second), nn.Identity()
    return convolutions.eval().to(memory_format=torch.channels_last)


class Remembering(nn.Module):
    """Convolutions that remember what they gave: Score-CAM masks images in the same way for every head."""

    def __init__(self, convolutions: nn.Module) -> None:
        super().__init__()
        self.convolutions = convolutions
        self._given: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature maps of images."""
        key = digest(x.cpu().numpy())
        if key not in self._given:
            self._given[key] = run_in_parts(self.convolutions, x)
        return self._given[key].clone()


@torch.inference_mode()
def run_in_parts(net: nn.Module, x: Tensor, batch: int = 4) -> Tensor:
    """Return what a network gives for images, a few at a time."""
    return torch.cat([net(part.to(memory_format=torch.channels_last)).contiguous() for part in x.split(batch)])


def frozen() -> nn.Module:
    """Return what stands for the convolutions where feature maps, (N, 1, T, M, N), are a network's input."""
    part = nn.Flatten(1, 2)
    part.register_parameter("nothing", nn.Parameter(torch.empty(0)))  # the host looks for the device of the first one
    return part


def pooled(features: nn.Module) -> nn.Sequential:
    """Return feature maps and their means as one network."""
    parts = OrderedDict(features=features, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    return nn.Sequential(parts).eval()


def fit_heads(rows: np.ndarray, labels: np.ndarray, *first: Any) -> dict[str, Any]:
    """Fit PCA and each SVM, perhaps behind a scaler."""
    return {
        name: make_pipeline(*first, PCA(COMPONENTS, svd_solver="covariance_eigh"), svm()).fit(rows, labels)
        for name, svm in SVMS.items()
    }


class Problem:
    """One data set, what was trained on it, and the images that are explained."""

    def __init__(self, name: str, options: argparse.Namespace, conv: nn.Module, weights: str) -> None:
        self.name, self.options, self.conv = name, options, conv
        root = options.root / name
        self.data = datasets.load(
            name, root if root.is_dir() else options.root, download=options.download, seed=options.seed
        )
        self.classes = list(self.data.classes)
        train = self.data.train.limited(options.limit)
        test = self.data.test.limited(-(-200 // len(self.classes)))
        self.labels = {"training": train.labels, "test": test.labels}
        self.test = test
        origin = {"faithfulness": name, "weights": weights}
        self.features = {
            part: FrozenFeatures(
                images_of, conv, options.size, options.cache, origin, f"{name}-{part}", options.device, 4
            )
            for part, images_of in {"training": train, "test": test}.items()
        }
        self.shape = self.features["test"].shape
        torch.manual_seed(options.seed)
        self.dense = PaperCNN(nn.Identity(), self.shape, len(self.classes)).to(options.device)
        key = digest(
            origin, list(train.digests), train.labels, [options.size, options.epochs, options.seed, options.limit]
        )
        self.course = training.train(
            self.dense, self.features["training"], train.labels, epochs=options.epochs, patience=50, rate=1e-3,
            batch=32, seed=options.seed, device=options.device, checkpoint=options.cache / f"{name}-training-{key}.pt",
        )  # fmt: skip
        self.dense.eval()
        chosen = np.random.default_rng(options.seed).permutation(len(test.labels))
        self.chosen = chosen[: options.images]
        self.x = images(test, self.chosen, options.size)
        self.key = digest(key, self.chosen, list(test.digests), options.seed)

    def network(self, features: nn.Module) -> PaperCNN:
        """Return the trained dense layers behind convolutions, or what stands for them."""
        net = PaperCNN(features, self.shape, len(self.classes)).to(self.options.device)
        net.classifier = self.dense.classifier
        return net.eval()

    def rows(self, net: nn.Module, part: str) -> np.ndarray:
        """Return what layers give for the features of a part, in double precision."""
        features = self.features[part]
        everything = np.arange(len(features.rows))
        return training.scores(net, features, everything, self.options.device).astype(np.float64)

    def mean(self, net: PCASVMNet) -> Tensor:
        """Return the training set's mean activations."""
        features = self.features["training"]
        parts = np.array_split(np.arange(len(features.rows)), len(features.rows) // 64 + 1)
        loader = (features.batch(index, self.options.device).unsqueeze(1) for index in parts)
        return mean_activations(net, loader, "features", progress=False)

    def margins(self, head: Any, q: np.ndarray) -> np.ndarray:
        """Return the margins (R, C) of a head for features."""
        with torch.inference_mode():
            output = PCASVMNet(nn.Identity(), head)(torch.from_numpy(q).to(self.options.device))
        return output.margins.cpu().numpy()

    def answers(self, order: np.ndarray, blur: Tensor) -> np.ndarray:
        """Return the second dense layer for the images with their pixels taken away in an order.

        Shape (kinds, fractions, N, 30).
        """

        def compute() -> np.ndarray:
            device, x = self.options.device, self.x[: len(order)]
            answers = []
            for kind in KINDS:
                for fraction in FRACTIONS:
                    left = evaluation.without(x, blur[: len(order)], order, kind, fraction).to(device)
                    with torch.inference_mode():
                        answers.append(self.dense.classifier[:5](run_in_parts(self.conv, left)).cpu().numpy())
            return np.stack(answers).reshape(len(KINDS), len(FRACTIONS), len(order), -1)

        file = self.options.cache / f"{self.name}-answers-{digest(self.key, order, FRACTIONS)}.npy"
        return kept(file, compute).astype(np.float64)


def explain(
    problem: Problem, name: str, net: PCASVMNet, x: Tensor, targets: Sequence[Any], mean: Tensor | str, batch: int = 8
) -> Tensor:
    """Return a method's maps of every target, (N, K, M, N), for feature maps or, for Score-CAM, for images."""
    method, settings = METHODS[name]
    settings = {**settings}
    if settings.get("baseline") == "mean":
        settings["baseline"] = mean
    if method is ClosedFormScoreCAM:
        settings["channels"] = problem.options.score_channels
    parts = []
    with method(net, ["features"], **settings) as cam:
        for rows in x.split(batch):
            rows = rows if name == "Score-CAM" else rows.unsqueeze(1)
            parts.append(cam.explain(rows.to(problem.options.device), targets).maps.cpu())
    return torch.cat(parts)


def score_maps(problem: Problem, title: str, net: PCASVMNet, head: Any, x: Tensor, targets: Sequence[Any]) -> Tensor:
    """Return Score-CAM's maps of a few images, which are kept: it runs the network for every channel."""
    count, options = min(len(x), problem.options.score_images), problem.options
    of_head = digest(head[-1].support_vectors_, head[-1].dual_coef_)
    name = f"{problem.name}-score-{digest(problem.key, title, of_head, count, options.score_channels)}.npy"
    maps = kept(options.cache / name, lambda: explain(problem, "Score-CAM", net, x[:count], targets, "zero").numpy())
    return torch.from_numpy(maps)


def in_spreads(problem: Problem, head: Any, predicted: np.ndarray, spread: float, q: np.ndarray) -> np.ndarray:
    """Return margins of the classes predicted for whole images, in their standard deviations: (kinds, fractions, N)."""
    margins = problem.margins(head, q.reshape(-1, q.shape[-1])).reshape(*q.shape[:-1], -1)
    return margins[:, :, np.arange(q.shape[2]), predicted[: q.shape[2]]] / spread


def faithfulness(problem: Problem) -> dict[str, Any]:
    """Return deletion and insertion of every head and method, and what baselines do to the signs of maps."""
    options = problem.options
    trained = problem.dense.classifier[:5]
    q = {part: problem.rows(trained, part) for part in problem.labels}
    heads = fit_heads(q["training"], problem.labels["training"])
    rng = np.random.default_rng((options.seed, 1))
    size = (options.size, options.size)
    blur = evaluation.blurred(problem.x)
    features = problem.features["test"].batch(problem.chosen, "cpu")
    dense, whole = (problem.network(part) for part in (frozen(), Remembering(problem.conv)))

    def order(maps: Tensor) -> np.ndarray:
        """Rank pixels; ties are broken in the same way for all methods."""
        return evaluation.ranks(evaluation.upsampled(maps, size, np.random.default_rng((options.seed, 2))))

    coarse = torch.from_numpy(rng.random((1 + RANDOM, len(problem.chosen), *problem.shape[1:])))
    bar = tqdm(total=len(heads) * len(METHODS) + 2 + RANDOM, desc=f"{problem.name}: deletion and insertion")

    def answers(maps: Tensor) -> np.ndarray:
        result = problem.answers(order(maps), blur)
        bar.update()
        return result

    chance, *others = [answers(each) for each in coarse]
    blind = features.sum(1)
    of_blind = answers(blind)
    results = {}
    for title, head in heads.items():
        net = PCASVMNet(dense, head, layer=FEATURE_LAYER).eval()
        mean = problem.mean(net)
        margins = problem.margins(head, q["test"])
        spread = float(np.sqrt(margins.var(0, ddof=1).mean()))
        labels = head.predict(q["test"])
        predicted = np.searchsorted(head.classes_, labels[problem.chosen])

        values = partial(in_spreads, problem, head, predicted, spread)
        level = np.mean([values(each) for each in others], axis=0)
        rows: dict[str, Any] = {}
        for name in ROWS:
            blank = None
            if name in METHODS:
                if name == "Score-CAM":
                    net_of_images = PCASVMNet(whole, head, layer=FEATURE_LAYER).eval()
                    maps = score_maps(problem, f"dense {title}", net_of_images, head, problem.x, [SVMTarget()])[:, 0]
                else:
                    maps = explain(problem, name, net, features, [SVMTarget()], mean)[:, 0]
                after, blank = values(answers(maps)), float((maps.flatten(1).amax(1) <= 0).double().mean())
            else:
                maps, after = (blind, values(of_blind)) if name == BLIND else (coarse[0], values(chance))
            fall = (level[:, :, : after.shape[2]] - after).mean(1)
            rows[name] = {
                "deletion": fall[0].round(4).tolist(),
                "insertion": (-fall[1]).round(4).tolist(),
                "blank": blank,
                "like blind": [rounded(value) for value in evaluation.correlations(maps, blind[: len(maps)])],
            }
        results[title] = {
            "test accuracy": float((labels == problem.labels["test"]).mean()),
            "spread of the margin": spread,
            "methods": rows,
            "contradictory": contradictory(problem, net, mean),
        }
    bar.close()
    return results


def contradictory(problem: Problem, net: PCASVMNet, mean: Tensor | str) -> dict[str, Any]:
    """Return how many maps of the whole test set say the opposite of the value they explain.

    Such a map has more positive than negative evidence, or less, where the value is below, or above, 0: a component's
    mean over the training set, or the boundary of the predicted class.
    """
    count = len(problem.labels["test"])
    targets = [*(PCATarget(b) for b in range(COMPONENTS)), SVMTarget()]
    result = {}
    methods: dict[str, Callable[..., Any]] = {
        "Grad-CAM": ClosedFormGradCAM,
        "zero": partial(ContributionCAM, baseline="zero"),
        "mean": partial(ContributionCAM, baseline=mean),
    }
    for name, make in methods.items():
        wrong = []
        with make(net, ["features"]) as cam:
            for index in np.array_split(np.arange(count), count // 64 + 1):
                made = cam.explain(problem.features["test"].batch(index, problem.options.device).unsqueeze(1), targets)
                wrong.append((made.maps.sum((2, 3)).sign() * made.values.sign() < 0).cpu().numpy())
        share = np.concatenate(wrong)
        result[name] = {"components": share[:, :-1].mean(0).tolist(), "decision": float(share[:, -1].mean())}
    return result


def side_by_side(problem: Problem) -> dict[str, Any]:
    """Return how much of the positive evidence for a class lies on its own photo, of two of different classes."""
    options = problem.options
    backbone = pooled(frozen())
    q = {part: problem.rows(backbone[1:], part) for part in problem.labels}
    heads = fit_heads(q["training"], problem.labels["training"], StandardScaler())
    right = np.all([head.predict(q["test"]) == problem.labels["test"] for head in heads.values()], axis=0)
    candidates = np.flatnonzero(right)
    rng = np.random.default_rng((options.seed, 3))
    labels = problem.labels["test"]
    if len(set(labels[candidates])) < 2:
        raise RunError(f"{problem.name}: fewer than two classes have photos that all SVMs get right")
    pairs: list[tuple[int, int]] = []
    while len(pairs) < options.images:
        a, b = rng.choice(candidates, 2, replace=False)
        if labels[a] != labels[b]:
            pairs.append((a, b))
    tile = options.size // 32 * 32  # so that a column of the map belongs to one photo
    photos = torch.stack([
        torch.cat([prepared(problem.test.read(int(i)), tile) for i in pair], dim=2) for pair in pairs
    ])
    features = torch.from_numpy(
        kept(
            options.cache / f"{problem.name}-pairs-{digest(problem.key, np.array(pairs))}.npy",
            lambda: run_in_parts(problem.conv, photos.to(options.device)).cpu().numpy(),
        )
    )
    of_pair = labels[np.array(pairs)]  # (N, 2)
    whole = pooled(Remembering(problem.conv))
    width = features.shape[3] // 2

    def shares(maps: Tensor, columns: np.ndarray) -> np.ndarray:
        """Share of the positive evidence of both classes on their photos; NaN without any. Shape (N, 2)."""
        columns = columns[: len(maps)]
        of_class = maps[torch.arange(len(maps)).unsqueeze(1), torch.from_numpy(columns)].relu().double()
        left, all_of_it = of_class[..., :width].sum((2, 3)).numpy(), of_class.sum((2, 3)).numpy()
        on_tile = np.stack([left[:, 0], all_of_it[:, 1] - left[:, 1]], 1)
        return np.divide(on_tile, all_of_it, out=np.full_like(all_of_it, np.nan), where=all_of_it > 0)

    results = {}
    bar = tqdm(total=len(heads) * len(METHODS), desc=f"{problem.name}: side by side")
    for title, head in heads.items():
        net = PCASVMNet(backbone, head)
        targets = [SVMTarget(label) for label in head.classes_.tolist()]
        columns = np.searchsorted(head.classes_, of_pair)
        rows = {}
        for name in ROWS:
            if name == "Score-CAM":
                maps = score_maps(problem, f"pooled {title}", PCASVMNet(whole, head), head, photos, targets)
                share = shares(maps, columns)
            elif name in METHODS:
                share = shares(explain(problem, name, net, features, targets, "mean"), columns)
            else:
                maps = features.sum(1) if name == BLIND else torch.from_numpy(rng.random(features[:, 0].shape))
                share = shares(maps.unsqueeze(1).expand(-1, len(targets), -1, -1), columns)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of a pair without any evidence the mean is NaN
                of_images = np.nanmean(share, axis=1)
            rows[name] = {
                "share": [rounded(value) for value in of_images],
                "blank": float(np.isnan(share).mean()) if name in METHODS else None,
            }
            bar.update(name in METHODS)
        results[title] = {
            "test accuracy": float((head.predict(q["test"]) == labels).mean()),
            "photos to choose from": len(candidates),
            "methods": rows,
            "contradictory": contradictory(problem, net, "mean"),
        }
    bar.close()
    return results


def rounded(value: float) -> float | None:
    """Return a number as it is written, None for NaN."""
    return None if np.isnan(value) else round(float(value), 4)


def picture(problem: Problem, count: int = 4) -> Figure:
    """Return test photos that an RBF machine is sure of, with Grad-CAM and contributions side by side."""
    rows = problem.rows(problem.dense.classifier[:5], "training")
    reduction = PCA(COMPONENTS, svd_solver="covariance_eigh")
    head = make_pipeline(reduction, SVC(gamma="scale")).fit(rows, problem.labels["training"])
    net = PCASVMNet(problem.network(problem.conv), head, layer=FEATURE_LAYER).eval()
    x = problem.x[:count].to(problem.options.device)
    methods = {"Grad-CAM": ClosedFormGradCAM, "contributions": ContributionCAM}
    maps = {title: method(net, ["features"]).explain(x, [SVMTarget()]) for title, method in methods.items()}
    titles = [problem.classes[label] for label in problem.labels["test"][problem.chosen[:count]]]
    return figures.plot_maps(shown(x), maps, signed=True, rows=titles, classes=problem.classes)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the results; they are written after each set."""
    for folder in (options.out, options.cache):
        folder.mkdir(parents=True, exist_ok=True)
    conv = fused(convolutions(options.backbone, options.weights)).to(options.device)
    weights = digest(*(value.cpu().numpy() for value in conv.state_dict().values()))
    names = ("sets", "backbone", "size", "images", "limit", "epochs", "score_images", "score_channels", "seed")
    results: dict[str, Any] = {
        "settings": {name: getattr(options, name) for name in names} | {"fractions": FRACTIONS, "random": RANDOM},
        "sets": {},
    }
    for name in options.sets:
        start = time.perf_counter()
        problem = Problem(name, options, conv, weights)
        print(f"{name}: {len(problem.labels['training'])} training and {len(problem.labels['test'])} test images, "
              f"best epoch {problem.course.best_epoch} of {len(problem.course.accuracies)}", flush=True)  # fmt: skip
        results["sets"][name] = {
            "classes": problem.classes,
            "training images": len(problem.labels["training"]),
            "test images": len(problem.labels["test"]),
            "faithfulness": faithfulness(problem),
            "side by side": side_by_side(problem),
        }
        (options.out / "faithfulness.json").write_text(json.dumps(results, separators=(",", ":"), allow_nan=False))
        markdown = "\n\n".join(f"### {title}\n\n{text}" for title, text in tables(results).items())
        (options.out / "faithfulness.md").write_text(markdown + "\n")
        plot(results).savefig(options.out / "faithfulness.png", dpi=100)
        if name == options.sets[0]:
            picture(problem).savefig(options.out / "contributions.png", dpi=100)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(markdown)
    return results


def main(argv: list[str] | None = None) -> int:
    """Run, and say what to do where a run cannot go on."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", BlankMapWarning)  # they are counted
    try:
        run(options)
    except RunError as error:
        print(f"faithfulness.py: {error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("faithfulness.py: interrupted. Start it again: it goes on where it stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
