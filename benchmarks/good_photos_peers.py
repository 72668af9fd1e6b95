"""A verdict from a handful of good photos: anomalib's PatchCore and PaDiM, and SubspaceAD's own code, beside ours.

    python benchmarks/good_photos_peers.py --peer PatchCore --cracks road-cracks --weights mobilenet_v2.pth

Sets, draws of good photos and measures are those of ``examples/good_photos.py``, at 224 pixels. PatchCore (a coreset of
10 %, 9 neighbours) and PaDiM (100 features) are anomalib's torch models, with MobileNetV2's blocks at strides 8 and 16;
SubspaceAD's PCA (99 % of the variance), scores, maps and photo's score are those of its repository, on the very patches
that ours gets; its network, DINOv2, is not run. Of maps at 224 pixels the means of 8x8 are compared. Printed are the
AUROC of photos and positions, AUPRO, numbers kept, and seconds of CPU to score all test photos behind the network.

anomalib and SubspaceAD (https://github.com/CLendering/SubspaceAD, on PYTHONPATH) are no dependencies.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torchvision.models import mobilenet_v2

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from good_photos import read_patches, write_table
from small_things import FINE, THINGS, crack_crops, pasted_photos, prepare

from pytorch_grad_cam_pcasvm import evaluation

SIZE, SIDE, CELL = 224, 28, 8
Found = tuple[np.ndarray, np.ndarray, int, float]  # scores (N,), maps (N, 28, 28), numbers kept, seconds


def ask_anomalib(kind: str, network: nn.Module, seed: int, good: Tensor, test: Tensor) -> Found:
    """Return what one of anomalib's models finds in images (N, 3, H, W)."""
    from anomalib.models.image.padim.torch_model import PadimModel
    from anomalib.models.image.patchcore.torch_model import PatchcoreModel

    torch.manual_seed(seed)
    options: dict[str, Any] = {"backbone": network, "layers": FINE, "pre_trained": False}
    model: Any = PatchcoreModel(**options) if kind == "PatchCore" else PadimModel(**options, n_features=100)
    model.train()
    for image in good.split(1):
        model(image)
    if kind == "PatchCore":
        model.subsample_embedding(0.1)
        kept = model.memory_bank.numel()
    else:
        model.fit()
        kept = model.gaussian.mean.numel() + model.gaussian.inv_covariance.numel()
    model.eval()
    began = time.process_time()
    found = [model(batch) for batch in test.split(8)]
    seconds = time.process_time() - began  # with the network
    maps = torch.cat([one.anomaly_map.reshape(-1, SIDE, CELL, SIDE, CELL).mean((2, 4)) for one in found])
    return torch.cat([one.pred_score.reshape(-1) for one in found]).numpy(), maps.numpy(), kept, seconds


def ask_subspacead(good: np.ndarray, test: np.ndarray) -> Found:
    """Return what SubspaceAD's code finds in patches (N, 28, 28, D)."""
    from subspacead.core.pca import PCAModel
    from subspacead.post_process.scoring import aggregate_image_score, calculate_anomaly_scores, post_process_map

    width = good.shape[-1]
    model = PCAModel(k=None, ev=0.99, whiten=False)
    fitted = model.fit(lambda: iter(good.reshape(len(good), -1, width)), width, len(good) * SIDE**2, len(good))
    began, maps, scores = time.process_time(), [], []
    for photo in test:
        residuals = calculate_anomaly_scores(photo.reshape(-1, width), fitted, "reconstruction", 0)
        maps.append(post_process_map(residuals.reshape(SIDE, SIDE), SIZE))
        scores.append(aggregate_image_score(maps[-1], "mtop1p"))
    seconds = time.process_time() - began
    cells = np.stack(maps).reshape(-1, SIDE, CELL, SIDE, CELL).mean((2, 4))
    return np.array(scores), cells, fitted["components"].size + width, seconds


def measure(found: Found, masks: np.ndarray) -> list[float]:
    """Return the AUROC of photos and positions, AUPRO, numbers that are kept, and seconds; NaN where scores are."""
    scores, maps, kept, seconds = found
    if not np.isfinite(scores).all():
        return [np.nan, np.nan, np.nan, kept, seconds]
    pixels = evaluation.pixel_scores(maps.astype(np.float64), masks)
    return [roc_auc_score(masks.any((1, 2)), scores), pixels.auroc.mean, pixels.aupro.mean, kept, seconds]


def main() -> None:
    """Print a table, and write its numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", choices=["PatchCore", "PaDiM", "SubspaceAD"], required=True)
    parser.add_argument("--cracks", type=Path, help="folder of CrackForest, with images and masks")
    parser.add_argument("--weights", type=Path, required=True, help="of MobileNetV2")
    parser.add_argument("--sets", nargs="+", default=["cracks", *THINGS])
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--photos", type=int, default=100, help="of each pasted set")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    network = mobilenet_v2().eval()
    state = torch.load(args.weights, weights_only=True)
    network.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    rows = []
    for name in args.sets:
        pasted = (pasted_photos(name, args.photos, seed, left=seed == 0) for seed in (0, 1)) if name in THINGS else ()
        fit, test = pasted or crack_crops(args.cracks)
        (patches, faults), (others, masks) = (read_patches(network, photos, SIZE) for photos in (fit, test))
        patches, others = patches.astype(np.float32), others.astype(np.float32)  # as SubspaceAD takes them
        is_good = ~faults.any((1, 2))
        images, asked = prepare(fit, SIZE)[0][torch.from_numpy(is_good)], prepare(test, SIZE)[0]
        for count in args.counts:
            found = []
            for draw in range(args.draws):
                chosen = np.random.default_rng(draw).permutation(int(is_good.sum()))[:count]
                own: Callable[[], Found] = partial(
                    ask_anomalib, args.peer, network, draw, images[torch.from_numpy(chosen)], asked
                )
                if args.peer == "SubspaceAD":
                    own = partial(
                        ask_subspacead, patches[is_good][chosen].astype(np.float32), others.astype(np.float32)
                    )
                with torch.no_grad():
                    found.append(measure(own(), masks))
            numbers = np.array(found)
            row = {"set": name, "size": SIZE, "photos": count, "detector": args.peer}
            errors = numbers.std(0, ddof=1) / len(numbers) ** 0.5 if len(numbers) > 1 else np.full(5, -1.0)
            rows.append(row | {"means": numbers.mean(0).tolist(), "errors": errors.tolist()})
            print(write_table(rows[-1:]).splitlines()[-1], flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
