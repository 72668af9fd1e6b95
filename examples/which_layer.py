"""Which layer? Target layers and several together on the six data sets of the paper.

    python examples/which_layer.py --root data --weights mobilenet_v2.pth

On the means of an ImageNet classifier's convolutions a scaler, PCA(16) and an SVM are fitted for every set of --sets.
``evaluation.layers`` then compares the last block of each map size, and the two coarsest together, on one half of the
test images, and recommends; the other half tells whether the recommendation holds there.

It prints Markdown, and leaves which_layer.md and .json in --out; sets that are there already are not measured again.
"""

import argparse
import json
import sys
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import datasets
from experiment.comparison import NOTHING, RANDOM, SHARE, table, together, unsigned
from experiment.frozen import images
from experiment.network import convolutions, fused
from experiment.problems import RunError
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import BaselineWarning, BlankMapWarning, PCASVMNet, evaluation, extract_features

SETS = ("mnist", "fashion-mnist", "bloodmnist", "cifar10", "chest-xray", "dog-vs-cat")
KINDS = ("deletion", "insertion")
POINT = "pointing game"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sets", nargs="+", default=list(SETS), help=f"as examples/paper.py names them (default: {' '.join(SETS)})")
    add("--root", type=Path, default=Path("data"), help="has a folder for each set, or torchvision's (default: data)")
    add("--out", type=Path, default=Path("results/which_layer"), help="where results go (results/which_layer)")
    add("--backbone", default="mobilenet_v2", help="a classifier of torchvision.models (default: mobilenet_v2)")
    add("--weights", type=Path, help="a file with its state_dict (default: torchvision's, downloaded once)")
    add("--size", type=int, default=224, help="side of the input in pixels (default: 224)")
    add("--images", type=int, default=40, help="test images in each half, at most (default: 40)")
    add("--limit", type=int, default=100, help="training images per class (default: 100)")
    add("--components", type=int, default=16, help="principal components (default: 16)")
    add("--kernel", default="rbf", choices=["rbf", "linear"], help="of the SVM (default: rbf)")
    add("--seed", type=int, default=0, help="of choices and random maps (default: 0)")
    add("--threads", type=int, default=1, help="of the CPU; with one, the same seed gives the same numbers")
    return parser.parse_args(argv)


def measured(name: str, options: argparse.Namespace, conv: nn.Module) -> dict[str, Any]:
    """Return what is recommended on one half of a set, and the numbers on both, as JSON."""
    root = options.root / name
    data = datasets.load(name, root if root.is_dir() else options.root, seed=options.seed)
    train, test = data.train.limited(options.limit), data.test.limited(-(-2 * options.images // len(data.classes)))
    backbone = nn.Sequential(OrderedDict(features=conv)).eval()
    rows = np.array_split(np.arange(len(train.labels)), -(-len(train.labels) // 16))
    batches = ((images(train, index, options.size), torch.from_numpy(train.labels[index])) for index in rows)
    features, labels = extract_features(backbone, batches, pool="mean")
    head = make_pipeline(StandardScaler(), PCA(options.components, random_state=0), SVC(kernel=options.kernel))
    net = PCASVMNet(backbone, head.fit(features, labels), pool="mean").eval()
    order = np.random.default_rng(options.seed).permutation(len(test.labels))
    order = order[np.argsort(test.labels[order], kind="stable")]  # every other image of each class is in a half
    halves = []
    for start in (0, 1):
        index = order[start::2]
        half = images(test, index, options.size), torch.from_numpy(test.labels[index])
        halves.append(evaluation.layers(net, half, images=options.images, batch_size=8, seed=options.seed))
    return {
        "accuracy": accuracy(net, test, order, options),
        "halves": [each.to_dict() for each in halves],
    }


def accuracy(net: PCASVMNet, test: datasets.Part, order: np.ndarray, options: argparse.Namespace) -> float:
    """Return the accuracy on the test images."""
    found = [net.predict(images(test, index, options.size)) for index in np.array_split(order, len(order) // 16 + 1)]
    return float((np.concatenate(found) == test.labels[order]).mean())


def title_of(result: evaluation.Result) -> str:
    """Return the name of the recommended candidate in the rows."""
    together = ", mean" if result.settings["combine"] == "mean" else ""
    return " + ".join(result.settings["recommended"]) + together


def last_of(result: evaluation.Result) -> str:
    """Return the name of the last layer, which the others are compared with."""
    known = {RANDOM, "the blind map", "", "chance"}
    return next(row.against for row in result.rows if row.against not in known)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return all tables in Markdown, by title: candidates, of all sets and each; and whether a recommendation holds."""
    of = {name: [evaluation.Result.from_dict(half) for half in found["halves"]] for name, found in results.items()}

    def number(names: list[str], key: tuple[str, ...]) -> evaluation.Estimate:
        found = []
        for half in (half for name in names for half in of[name]):
            try:
                found.append(half[key])  # type: ignore[index]
            except KeyError:
                found.append(NOTHING)
        return together(found)

    candidates = list(dict.fromkeys(row.method for halves in of.values() for half in halves for row in half.rows))
    columns = [
        *((kind, RANDOM) for kind in KINDS),
        (f"side by side: {SHARE}",),
        (f"pasted: {SHARE}",),
        (f"pasted: {POINT}",),
    ]
    header = ["layer", "deletion", "insertion", "side by side", "pasted: share", "pasted: pointing"]
    found = {}
    for title, names in {"All sets": list(of), **{name: [name] for name in of}}.items():
        found[title] = table(
            header,
            [[each, *(str(number(names, (each, *key))) if len(key) > 1 else unsigned(number(names, (each, *key)))
                      for key in columns)] for each in candidates],
        )  # fmt: skip
    held = []
    for name, (first, second) in of.items():
        chosen, last = title_of(first), last_of(second)
        same = chosen == last
        gains = ["the same" if same else str(second[chosen, kind, last]) for kind in KINDS]
        held.append([name, f"{results[name]['accuracy']:.2f}", f"`{chosen}`", *gains])
    found["What one half recommends, on the other half"] = table(
        ["set", "test accuracy", "recommended", "deletion, than the last layer", "insertion, than the last layer"], held
    )
    return found


def main(argv: list[str] | None = None) -> int:
    """Run, and say what to do where a run cannot go on."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    for category in (BlankMapWarning, BaselineWarning):
        warnings.simplefilter("ignore", category)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "which_layer.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    try:
        conv = fused(convolutions(options.backbone, options.weights))
        for name in options.sets:
            start = time.perf_counter()
            if name in results:
                continue
            text = json.dumps(measured(name, options, conv), allow_nan=False)
            results[name] = json.loads(text, parse_float=lambda number: round(float(number), 4))
            file.write_text(json.dumps(results, separators=(",", ":")))
            markdown = "\n\n".join(f"### {title}\n\n{text}" for title, text in tables(results).items())
            (options.out / "which_layer.md").write_text(markdown + "\n")
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    except RunError as error:
        print(f"which_layer.py: {error}.", file=sys.stderr)
        return 1
    print("\n\n".join(f"### {title}\n\n{text}" for title, text in tables(results).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
