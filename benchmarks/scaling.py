"""How the cost of ``explain`` beyond the network's own pass grows with everything that can grow.

    python benchmarks/scaling.py [--device cuda] [--rounds 15] [--figure FILE] [--json FILE]

There is no network in front of the target layer: the input is the feature maps, so that all that is timed is the path
to the features, the head, the pullback and the maps. One quantity is varied at a time; the others stay at 16
components, 1,000 support vectors, 2 classes, 8 images, 512 maps of 7x7. Targets are every component and every class.
Two paths are measured: *pooled* (average pooling) and *dense* (512*7*7 -> 1024 -> 1024, ReLU). The slope is that of a
line through the upper half of the points of a log-log plot: 1 is linear, 2 quadratic. Heads are made of random numbers.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from measuring import prepare, timed
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, PCASVMNet, PCATarget, SVMTarget
from pytorch_grad_cam_pcasvm.head.decisions import KernelSVM
from pytorch_grad_cam_pcasvm.head.head import Head
from pytorch_grad_cam_pcasvm.head.kernels import RBF
from pytorch_grad_cam_pcasvm.head.stages import Projection
from pytorch_grad_cam_pcasvm.head.vote import binary, one_vs_one

CHANNELS, FEATURES = 512, 1024


@dataclass(frozen=True)
class Size:
    """What is varied."""

    path: str = "pooled"
    components: int = 16
    support_vectors: int = 1_000
    classes: int = 2
    batch: int = 8
    positions: int = 49

    @property
    def side(self) -> int:
        """Of a feature map."""
        return math.isqrt(self.positions)


SWEEPS: dict[str, tuple[str, list[int]]] = {
    "components": ("components", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]),
    "support_vectors": ("support vectors", [100, 300, 1_000, 3_000, 10_000, 30_000, 100_000]),
    "classes": ("classes, one-vs-one", [2, 3, 6, 12, 25, 50, 100]),
    "batch": ("images", [1, 2, 4, 8, 16, 32, 64, 128]),
    "positions": ("positions of a feature map", [4**2, 7**2, 14**2, 28**2]),
}


def random_head(size: Size, features: int) -> Head:
    """Return a PCA and an RBF SVM of the given size."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    b, i, c = size.components, size.support_vectors, size.classes
    basis = torch.linalg.qr(normal(features, b)).Q.T
    per_class = [i // c + (k < i % c) for k in range(c)]
    machine = KernelSVM(
        RBF(1 / b),
        normal(i, b),
        normal(c - 1, i),
        normal(c * (c - 1) // 2),
        per_class,
        torch.arange(i),
        binary() if c == 2 else one_vs_one(c),
        list(range(c)),
    )
    return Head([Projection(basis, torch.zeros(features).double(), torch.ones(b).double()), machine])


def explainer(size: Size, device: torch.device) -> Callable[[], Any]:
    """Return what is timed: every component and class of a batch of feature maps."""
    torch.manual_seed(0)
    target = nn.Identity()
    target.register_parameter("unused", nn.Parameter(torch.zeros(1)))  # the host wants one in every network
    if size.path == "pooled":
        path, features = [nn.AdaptiveAvgPool2d(1), nn.Flatten()], CHANNELS
    else:
        dense = [nn.Linear(CHANNELS * size.side**2, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES), nn.ReLU()]
        path, features = [nn.Flatten(), *dense], FEATURES
    backbone = nn.Sequential(target, *path).to(device)
    net = PCASVMNet(backbone, random_head(size, features)).eval()
    cam = ClosedFormGradCAM(net, [target])
    x = torch.rand(size.batch, CHANNELS, size.side, size.side, device=device)
    targets = [*(PCATarget(b) for b in range(size.components)), *(SVMTarget(c) for c in range(size.classes))]
    return lambda: cam.explain(x, targets)


def measure(sweep: str, path: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return medians and quartiles of the milliseconds of a sweep, and the slope of its upper half."""
    values = SWEEPS[sweep][1]
    functions = [explainer(replace(Size(path), **{sweep: value}), device) for value in values]
    for function in functions:
        function()
    seconds = [[timed(function, device) for function in functions] for _ in range(rounds)]
    quartiles = 1e3 * np.percentile(np.array(seconds), [25, 50, 75], axis=0)
    upper = slice(len(values) // 2, None)
    slope, offset = np.polyfit(np.log(values[upper]), np.log(quartiles[1, upper]), 1)
    return {
        "sweep": sweep,
        "path": path,
        "values": values,
        "ms": quartiles.T.tolist(),
        "slope": float(slope),
        "offset": float(offset),
        "added ms each": float((quartiles[1, -1] - quartiles[1, -2]) / (values[-1] - values[-2])),
    }


def figure(rows: list[dict[str, Any]], title: str) -> Figure:
    """Return a log-log panel for every sweep, with the fitted lines."""
    plot = Figure(figsize=(13, 3.4), layout="constrained")
    axes = plot.subplots(1, len(SWEEPS), sharey=True)
    for axis, (sweep, (label, values)) in zip(axes, SWEEPS.items(), strict=True):
        for row, colour in zip([row for row in rows if row["sweep"] == sweep], ("C0", "C1"), strict=False):
            low, middle, high = np.array(row["ms"]).T
            axis.errorbar(values, middle, [middle - low, high - middle], fmt="o", color=colour, markersize=4)
            fitted = np.array(values[len(values) // 2 :])
            line = np.exp(row["offset"]) * fitted ** row["slope"]
            axis.plot(fitted, line, color=colour, label=f"{row['path']}: slope {row['slope']:.2f}")
        axis.set(xscale="log", yscale="log", xlabel=label)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left")
    axes[0].set_ylabel("milliseconds beyond the network")
    plot.suptitle(title, fontsize=11)
    return plot


def main() -> None:
    """Run every sweep, print a table, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--figure", type=Path, help="draw into this file")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    arguments = parser.parse_args()
    device, machine = prepare(arguments.device)
    print("| varied | path | smallest, ms | largest, ms | slope | each more adds, ms |\n|---|---|---|---|---|---|")
    rows = []
    for sweep, (label, values) in SWEEPS.items():
        for path in ("pooled", "dense"):
            row = measure(sweep, path, arguments.rounds, device)
            rows.append(row)
            first, last = row["ms"][0][1], row["ms"][-1][1]
            cells = [f"{label}, {values[0]:,} to {values[-1]:,}", path, f"{first:.3g}", f"{last:.3g}"]
            cells += [f"{row['slope']:.2f}", f"{row['added ms each']:.2g}"]
            print("| " + " | ".join(cells) + " |", flush=True)
    if arguments.figure:
        title = f"Cost of explain beyond the network: {machine['hardware']}, {machine['threads']} threads"
        figure(rows, title).savefig(arguments.figure, dpi=120)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
