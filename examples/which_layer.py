"""Which layer? Target layers, alone and combined, on the paper's six data sets.

    python examples/which_layer.py --root data --weights mobilenet_v2.pth

For every data set in --sets, a scaler, PCA(16) and an SVM are fitted on the means of an ImageNet classifier's
convolutions. ``evaluation.layers`` then compares the last block of each map size, and the coarsest together, on one
half of the test images, and recommends a layer. The other half tests the recommendation. --candidates names layers
instead, those that become one map with a plus between them: features features.13+features.

It prints Markdown, and writes which_layer.md and .json to --out; sets that are already there are not measured again.
"""

import argparse
import json
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import datasets
from experiment.comparison import KINDS, NOTHING, RANDOM, SHARE, table, together, unsigned
from experiment.frozen import images
from experiment.network import convolutions, fused
from experiment.panels import Row, panels
from experiment.problems import RunError
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import BaselineWarning, BlankMapWarning, PCASVMNet, evaluation, extract_features

SETS = ("mnist", "fashion-mnist", "bloodmnist", "cifar10", "chest-xray", "dog-vs-cat")
BESIDE, PASTED, POINTED = f"side by side: {SHARE}", f"pasted: {SHARE}", "pasted: pointing game"


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
    add("--candidates", nargs="+", help="layers, and layers+layers, to compare (default: the last of each map size)")
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
        common = {"images": options.images, "batch_size": 8, "seed": options.seed}
        if options.candidates:
            groups = [names.split("+") for names in options.candidates]
            common |= {"candidates": groups, "combine": ["shared"]}
        halves.append(evaluation.layers(net, half, **common))
    return {
        "accuracy": accuracy(net, test, order, options),
        "halves": [each.to_dict() for each in halves],
    }


def accuracy(net: PCASVMNet, test: datasets.Part, order: np.ndarray, options: argparse.Namespace) -> float:
    """Return the accuracy on the test images."""
    found = [net.predict(images(test, index, options.size)) for index in np.array_split(order, len(order) // 16 + 1)]
    return float((np.concatenate(found) == test.labels[order]).mean())


def write_title(result: evaluation.Result) -> str:
    """Return the name of the recommended candidate in the rows."""
    together = ", mean" if result.settings["combine"] == "mean" else ""
    return " + ".join(result.settings["recommended"]) + together


def last_of(result: evaluation.Result) -> str:
    """Return the name of the last layer, which the others are compared with."""
    known = {RANDOM, "the blind map", "", "chance"}
    return next(row.against for row in result.rows if row.against not in known)


Halves = dict[str, list[evaluation.Result]]


def halves_of(results: dict[str, Any]) -> Halves:
    """Return what was measured on the two halves of each set."""
    return {name: [evaluation.Result.from_dict(half) for half in found["halves"]] for name, found in results.items()}


def candidates_of(of: Halves) -> list[str]:
    """Return the names of the layers and of several together."""
    return list(dict.fromkeys(row.method for halves in of.values() for half in halves for row in half.rows))


def number(of: Halves, names: Sequence[str], key: tuple[str, ...]) -> evaluation.Estimate:
    """Return a number in the mean over some sets, which may miss it."""
    found = []
    for half in (half for name in names for half in of[name]):
        try:
            found.append(half[key])  # type: ignore[index]
        except KeyError:
            found.append(NOTHING)
    return together(found)


def plot(results: dict[str, Any], sets: Mapping[str, str]) -> Figure:
    """Draw faithfulness and localisation of every layer, in the mean over all sets, and for sets with a title."""
    of = halves_of(results)
    columns = {"all sets": list(of), **{title: [name] for name, title in sets.items()}}

    def row(label: str, chance: float, keys: dict[str, tuple[str, ...]]) -> Row:
        series = {
            title: {what: [number(of, names, (each, *key)) for each in candidates_of(of)] for what, key in keys.items()}
            for title, names in columns.items()
        }
        return Row(label, chance, series)

    rows = [
        row(
            "better than random maps, in standard deviations of the margin", 0, {kind: (kind, RANDOM) for kind in KINDS}
        ),
        row("two images side by side: share of the evidence on the right one (0.5: chance)", 0.5, {"": (BESIDE,)}),
        row(
            "a small image pasted into another (13 % of the area)",
            0.13,
            {"share of evidence": (PASTED,), "pointing game": (POINTED,)},
        ),
    ]
    return panels(candidates_of(of), rows)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return all tables in Markdown, by title: candidates, of all sets and each; and whether a recommendation holds."""
    of = halves_of(results)
    candidates = candidates_of(of)
    columns = [*((kind, RANDOM) for kind in KINDS), (BESIDE,), (PASTED,), (POINTED,)]
    header = ["layer", "deletion", "insertion", "side by side", "pasted: share", "pasted: pointing"]
    found = {}
    for title, names in {"All sets": list(of), **{name: [name] for name in of}}.items():
        found[title] = table(
            header,
            [[each, *((str if len(key) > 1 else unsigned)(number(of, names, (each, *key))) for key in columns)]
             for each in candidates],
        )  # fmt: skip
    held = []
    for name, (first, second) in of.items():
        chosen, last = write_title(first), last_of(second)
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
