"""A verdict from a handful of good photos: a PCA's distance beside neighbours and a residual, on the same patches.

Run: python examples/good_photos.py --cracks road-cracks --weights mobilenet_v2.pth --sizes 224 448

The sets are those of ``small_things.py``: crops with scratches, stains, grains and cracks. Of the good crops to fit on,
1, 4, 16 and all are drawn, several times. All detectors see the same patches, of MobileNetV2's blocks at strides 8 and
16, each with its 3x3 neighbours. Printed are, as means over the draws with standard errors: the AUROC of photos and of
positions, AUPRO up to 0.3 false positives, numbers that the detector keeps, and seconds to score all test photos.

* PCA distance: ``make_pipeline(StandardScaler(), PCADistance(s))``, s by photos left out, of one photo by its quarters
* neighbours: the distance to the nearest of all patches, behind a StandardScaler
* residual: what a PCA with 99 % of the variance leaves out, and of a photo the mean of its 1 % strongest patches, as
  SubspaceAD (arXiv 2602.23013) has it
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from small_things import FINE, THINGS, Photos, crack_crops, pasted_photos, prepare
from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

from pytorch_grad_cam_pcasvm import CovariancePCA, PCADistance, choose_shrinkage, evaluation, extract_features

Detector = Callable[[np.ndarray], np.ndarray]  # patches (R, D) to their anomalies (R,)


def fit_distance(good: np.ndarray) -> tuple[Detector, int]:
    """Return the distance by a PCA of the patches of photos, (N, h, w, D), and how many numbers it keeps."""
    width = good.shape[-1]
    if len(good) == 1:
        parts = [part for half in np.array_split(good[0], 2) for part in np.array_split(half, 2, 1)]
    else:
        parts = np.array_split(good, min(5, len(good)))
    shrinkage, _ = choose_shrinkage([CovariancePCA().fit(part.reshape(-1, width)) for part in parts])
    fitted = make_pipeline(StandardScaler(), PCADistance(shrinkage)).fit(good.reshape(-1, width))
    return lambda rows: -fitted.score_samples(rows), 3 * width + width * width


def fit_neighbours(good: np.ndarray) -> tuple[Detector, int]:
    """Return the distance to the nearest patch."""
    rows = good.reshape(-1, good.shape[-1])
    scaler = StandardScaler().fit(rows)
    bank = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(scaler.transform(rows).astype(np.float32))
    return lambda rows: bank.kneighbors(scaler.transform(rows).astype(np.float32))[0][:, 0], rows.size


def fit_residual(good: np.ndarray) -> tuple[Detector, int]:
    """Return the residual of a PCA."""
    rows = good.reshape(-1, good.shape[-1])
    pca = PCA(0.99, svd_solver="full").fit(rows)
    return lambda rows: ((rows - pca.inverse_transform(pca.transform(rows))) ** 2).sum(1), pca.components_.size


def largest(anomalies: np.ndarray) -> np.ndarray:
    """Return the largest anomaly of each photo, (N,)."""
    return anomalies.max((1, 2))  # type: ignore[no-any-return]


def largest_percent(anomalies: np.ndarray) -> np.ndarray:
    """Return the mean of the 1 % largest anomalies of each photo, (N,)."""
    flat = np.sort(anomalies.reshape(len(anomalies), -1), 1)
    return flat[:, -max(1, flat.shape[1] // 100) :].mean(1)  # type: ignore[no-any-return]


DETECTORS: dict[str, tuple[Callable[..., tuple[Detector, int]], Callable[..., Any]]] = {
    "PCA distance": (fit_distance, largest),
    "neighbours": (fit_neighbours, largest),
    "residual": (fit_residual, largest_percent),
}


def read_patches(network: Any, photos: Photos, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the patches of photos, (N, h, w, D), and their masks at that grid, (N, h, w), True on any fault."""
    images, masks = prepare(photos, size)
    rows, _ = extract_features(network, [images[n : n + 8] for n in range(0, len(images), 8)], FINE, pool=("dense", 3))
    side = size // 8
    cells = masks.reshape(len(masks), side, 8, side, 8).any((2, 4))
    return rows.reshape(len(images), side, side, -1).astype(np.float64), cells


def measure(good: np.ndarray, test: np.ndarray, masks: np.ndarray, name: str) -> list[float]:
    """Return the AUROC of photos and positions, AUPRO, numbers that are kept, and seconds."""
    fit, score = DETECTORS[name]
    detector, kept = fit(good)
    began = time.perf_counter()
    anomalies = np.stack([detector(photo.reshape(-1, photo.shape[-1])) for photo in test]).reshape(masks.shape)
    seconds = time.perf_counter() - began
    faulty = masks.any((1, 2))
    pixels = evaluation.pixel_scores(anomalies, masks)
    return [roc_auc_score(faulty, score(anomalies)), pixels.auroc.mean, pixels.aupro.mean, kept, seconds]


def measure_set(network: Any, name: str, fit: Photos, test: Photos, size: int, draws: int) -> list[dict[str, Any]]:
    """Return for each number of good photos and each detector the means over draws, and their standard errors."""
    (patches, faults), (others, masks) = (read_patches(network, photos, size) for photos in (fit, test))
    good = patches[~faults.any((1, 2))]
    rows = []
    for count in (1, 4, 16, len(good)):
        drawn = [np.random.default_rng(draw).permutation(len(good))[:count] for draw in range(draws)]
        for detector in DETECTORS:
            chosen = drawn if count < len(good) else drawn[:1]
            found = np.array([measure(good[draw], others, masks, detector) for draw in chosen])
            errors = found.std(0, ddof=1) / len(found) ** 0.5 if len(found) > 1 else np.full(found.shape[1], np.nan)
            row = {"set": name, "size": size, "photos": count, "detector": detector}
            rows.append(row | {"means": found.mean(0).tolist(), "errors": np.nan_to_num(errors, nan=-1).tolist()})
            print(write_table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def write_table(rows: list[dict[str, Any]]) -> str:
    """Return the measured numbers as a table in Markdown."""
    lines = [
        "| set | seen at | good photos | detector | AUROC of photos | of positions | AUPRO | numbers kept | seconds |"
    ]
    lines += ["| --- " * 9 + "|"]
    for row in rows:
        numbers = [
            f"{mean:.3f}" + (f" \N{PLUS-MINUS SIGN} {error:.3f}" if error >= 0 else "")
            for mean, error in zip(row["means"][:3], row["errors"], strict=False)
        ]
        kept, seconds = row["means"][3:]
        cells = [row["set"], row["size"], row["photos"], row["detector"], *numbers, f"{kept:,.0f}", f"{seconds:.2f}"]
        lines.append("".join(f"| {cell} " for cell in cells) + "|")
    return "\n".join(lines)


def main() -> None:
    """Print a table, and write its numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cracks", type=Path, help="folder of CrackForest, with images and masks")
    parser.add_argument("--weights", type=Path, help="of MobileNetV2 (default: torchvision's)")
    parser.add_argument("--sets", nargs="+", default=["cracks", *THINGS])
    parser.add_argument("--sizes", nargs="+", type=int, default=[224])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--photos", type=int, default=100, help="of each pasted set")
    parser.add_argument("--out", type=Path, default=Path("good_photos.json"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    network = mobilenet_v2(weights=None if args.weights else MobileNet_V2_Weights.DEFAULT).eval()
    if args.weights:
        state = torch.load(args.weights, weights_only=True)
        network.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    rows: list[dict[str, Any]] = []
    for name in args.sets:
        if name == "cracks" and args.cracks is None:
            continue
        pasted = (pasted_photos(name, args.photos, seed, left=seed == 0) for seed in (0, 1)) if name in THINGS else ()
        fit, test = pasted or crack_crops(args.cracks)
        for size in args.sizes:
            rows += measure_set(network, name, fit, test, size, args.draws)
        args.out.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
