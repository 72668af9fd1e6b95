"""Time of a head on every position, and of maps of a few patches, against the network's forward pass.

    python benchmarks/dense.py [--device cuda] [--batch 8] [--places 4] [--rounds 7]

timm's vit_small_patch16_224 at 448x448 with random weights: 28x28 patches of 384 features; behind them a scaler, a
PCA(64) and an RBF SVM with 2,000 support vectors, or the distance to the nearest of 20,000 stored patches. *Scores* is
``net(images)``, which is the network and one call of the head for all positions; *maps* is ``explain`` of a target at
each of the places, which includes both, at the layer of the features and before the last attention. Times are ratios
to the forward pass of the network alone, in turns, the median over rounds with quartiles. Maps start at the mean.
First, their sums are compared with the values they explain.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
import timm
import torch
from measuring import check_sums, noisy_head, prepare, timed
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, SVMTarget, extract_features, mean_activations

VECTORS, STORED, COMPONENTS = 2000, 20000, 64
LAYERS = {"norm": "features", "blocks.11.norm1": "last attention"}


def main() -> None:
    """Run both heads at both layers, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--places", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device, _ = prepare(arguments.device, ["timm", "scikit-learn"])
    torch.manual_seed(0)
    backbone = timm.create_model("vit_small_patch16_224", img_size=448, num_classes=0).eval().to(device)
    images = torch.randn(32, 3, 448, 448)
    options: Any = {"layer": "norm", "pool": "dense"}
    rows, _ = extract_features(backbone, images.split(8), progress=False, **options)
    stored = rows[np.random.default_rng(0).permutation(len(rows))[:STORED]]
    heads = {
        f"SVC, {VECTORS:,} support vectors": noisy_head(rows, COMPONENTS, VECTORS),
        f"nearest of {STORED:,} patches": make_pipeline(StandardScaler(), NearestNeighbors(n_neighbors=1)).fit(stored),
    }
    x = images[: arguments.batch].to(device)
    print("| head | forward s | scores / forward | maps at | maps / forward |\n" + "|---" * 5 + "|")
    for name, head in heads.items():
        net = PCASVMNet(backbone, head, **options).eval()
        category = None if net.head.classes_ is None else net.head.classes_[1].item()
        targets = [SVMTarget(category, at=(3 + 5 * k, 4 + 5 * k)) for k in range(arguments.places)]
        for layer, words in LAYERS.items():
            mean = mean_activations(net, images.split(8), layer, progress=False)
            cam = ContributionCAM(net, [layer], "tokens", baseline="mean", mean=mean)
            check_sums(cam, x, targets)
            contestants = [partial(backbone, x), partial(net, x), partial(cam.explain, x, targets)]
            with torch.no_grad():
                rounds = np.array([[timed(one, device) for one in contestants] for _ in range(arguments.rounds)])
            ratios = rounds[:, 1:] / rounds[:, :1]
            low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75], axis=0)
            scores, maps = (f"{middle[k]:.2f} ({low[k]:.2f} to {high[k]:.2f})" for k in range(2))
            print(f"| {name} | {np.median(rounds[:, 0]):.2f} | {scores} | {words} | {maps} |", flush=True)


if __name__ == "__main__":
    main()
