"""How sure is a map that was learned from few photos? Compare its standard errors with what other photos teach.

Run: python examples/how_sure.py photos/ cat dog --weights mobilenet_v2.pth

``photos/`` has a folder of photos for each class. They are divided into disjoint training sets, and each teaches a head
of its own. The mean of all their maps is what endless photos would teach, near enough. A head's standard errors come
from 30 refits on bootstrap samples of its own photos alone, which have not seen the other sets. Printed are, over all
heads, positions and test photos:

* coverage: how often the truth lies within 1.96 standard errors of the mean map of the refits (promised: 95 %),
* how much of the maps is sure, and how often the sign is right there and elsewhere,
* the standard error beside the true standard deviation,
* the correlation with the truth of the map of the head, and of the mean map,
* with ``--masks``, a folder of masks by the names of photos of the first class: the AUROC of pixels of both.
"""

import argparse
import dataclasses
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor
from torchvision.models import mobilenet_v2

from pytorch_grad_cam_pcasvm import (
    ContributionCAM,
    PCASVMNet,
    SignedMaps,
    SVMTarget,
    explain_heads,
    extract_features,
    mean_activations,
    resample_heads,
)

CLASSIFIERS = {
    "SVC": SVC(),
    "linear SVC": SVC(kernel="linear", C=0.01),
    "logistic": LogisticRegression(C=0.01, max_iter=1000),
    "forest": RandomForestClassifier(50, random_state=0),
}
BATCH = 32
TEST = 24


def read_photos(folders: list[Path], per_class: int, size: int) -> tuple[Tensor, np.ndarray, list[Path]]:
    """Return as many photos of each class, (N, 3, size, size), in turn, their labels and their files."""
    lists = [sorted(path for path in folder.iterdir() if path.is_file()) for folder in folders]
    order = np.random.default_rng(0)
    lists = [[paths[k] for k in order.permutation(len(paths))[:per_class]] for paths in lists]
    files = [path for of_classes in zip(*lists, strict=True) for path in of_classes]
    photos = [
        np.asarray(Image.open(path).convert("RGB").resize((size, size), Image.Resampling.BILINEAR)) for path in files
    ]
    labels = np.tile([folder.name for folder in folders], len(lists[0]))
    return torch.from_numpy(np.stack(photos)).permute(0, 3, 1, 2), labels, files


def read_masks(folder: Path, files: list[Path], size: int) -> np.ndarray:
    """Return the masks of photos, (N, size, size), boolean; of a photo without one, nothing is marked."""
    masks = np.zeros((len(files), size, size), bool)
    for mask, file in zip(masks, files, strict=True):
        if (folder / f"{file.stem}.png").exists():
            mask[:] = np.asarray(Image.open(folder / f"{file.stem}.png").convert("L").resize((size, size))) > 127
    return masks


def prepare(photos: Tensor) -> Tensor:
    """Return photos as the network's weights expect them."""
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (photos.float() / 255 - mean.reshape(-1, 1, 1)) / deviation.reshape(-1, 1, 1)


def with_own_starts(cam: ContributionCAM, test: Tensor, maps: SignedMaps, target: SVMTarget) -> SignedMaps:
    """Return maps whose errors are those of refits that each start where they are undecided themselves."""
    refits = explain_heads(cam, test, cam.model.head.resamples.heads, [target], own_starts=True)
    stacked = torch.stack([refit.maps * (refit.log_scale - maps.log_scale).exp()[..., None, None] for refit in refits])
    return dataclasses.replace(maps, resampled=stacked.mean(0), error=stacked.std(0))


def measure(maps: np.ndarray, means: np.ndarray, errors: np.ndarray, sure: np.ndarray) -> dict[str, float]:
    """Return the figures of S heads, whose arrays have the shape (S, photos, h, w)."""
    count = len(maps)
    truth = (maps.sum(0) - maps) / (count - 1)  # by the other sets alone
    right = np.sign(maps) == np.sign(truth)

    def correlate(shown: np.ndarray) -> float:
        pairs = zip(shown.reshape(-1, shown[0, 0].size), truth.reshape(-1, shown[0, 0].size), strict=True)
        return float(np.mean([np.corrcoef(*pair)[0, 1] for pair in pairs]))

    return {
        "coverage": float((np.abs(means - truth) <= 1.96 * errors).mean()),
        "sure": float(sure.mean()),
        "right_where_sure": float(right[sure].mean()),
        "right_elsewhere": float(right[~sure].mean()),
        "error_over_sd": float(np.median(errors.mean(0) / maps.std(0, ddof=1))),
        "correlation": correlate(maps),
        "correlation_of_mean": correlate(means),
    }


def score_pixels(maps: np.ndarray, masks: np.ndarray) -> float:
    """Return the AUROC of the pixels of maps, (S, photos, h, w), for masks, the mean over S heads."""
    grown = torch.nn.functional.interpolate(torch.from_numpy(maps), masks.shape[1:], mode="bilinear").numpy()
    return float(np.mean([roc_auc_score(masks.ravel(), of_head.ravel()) for of_head in grown]))


def main() -> None:
    """Print a row for each classifier, number of photos and layer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("classes", nargs=2)
    parser.add_argument("--masks", type=Path)
    parser.add_argument("--weights", type=Path, help="state dict of torchvision's mobilenet_v2")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--sets", type=int, default=40)
    parser.add_argument("--counts", type=int, nargs="+", default=[40, 100, 200])
    parser.add_argument("--layers", nargs="+", default=["features.18", "features.13"])
    parser.add_argument("--own-starts", action="store_true", help="a start for each refit (default: that of the head)")
    parser.add_argument("--classifiers", nargs="+", default=list(CLASSIFIERS), choices=list(CLASSIFIERS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    backbone = mobilenet_v2(weights=None if args.weights else "DEFAULT").eval()
    if args.weights:
        state = torch.load(args.weights, weights_only=True)
        backbone.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    folders = [args.photos / name for name in args.classes]
    available = min(sum(1 for _ in folder.iterdir()) for folder in folders)
    most = min(args.sets * max(args.counts) // 2 + TEST // 2, available)
    photos, labels, files = read_photos(folders, most, args.size)
    masks = None if args.masks is None else read_masks(args.masks, files[:TEST], args.size)
    loader = [(prepare(part), torch.arange(len(part))) for part in photos[TEST:].split(BATCH)]
    features, _ = extract_features(backbone, loader, "features.18", pool="mean", progress=False)
    test, target = prepare(photos[:TEST]), SVMTarget(args.classes[0])
    means = {layer: mean_activations(backbone, loader[:8], layer, progress=False) for layer in args.layers}
    scores = "" if masks is None else "  AUROC: one  mean"
    print(
        f"layer         photos classifier  coverage  sure  right: sure  else  error/sd  correlation: one  mean{scores}"
    )
    for count in args.counts:
        sets = min(args.sets, len(features) // count)
        parts = [slice(number * count, (number + 1) * count) for number in range(sets)]
        for name in args.classifiers:
            pipeline = make_pipeline(StandardScaler(), PCA(16, random_state=0), CLASSIFIERS[name])
            found: dict[str, list[list[np.ndarray]]] = {layer: [] for layer in args.layers}
            for part in parts:
                rows, of_rows = features[part], labels[TEST:][part]
                fitted = clone(pipeline).fit(rows, of_rows)
                net = PCASVMNet(backbone, fitted, "features.18", pool="mean").eval()
                net.head.resamples = resample_heads(fitted, rows, of_rows)
                for layer in args.layers:
                    cam = ContributionCAM(net, [layer], mean=means[layer])
                    maps = cam.explain(test, [target])
                    if args.own_starts:
                        maps = with_own_starts(cam, test, maps, target)
                    numbers = (maps.maps, maps.resampled, maps.error, maps.sure())
                    found[layer].append([number[:, 0].numpy() for number in numbers])
            for layer, arrays in found.items():
                columns = [np.stack(column) for column in zip(*arrays, strict=True)]
                figures = measure(*columns)
                if masks is not None:
                    figures |= {"AUROC": score_pixels(columns[0], masks), "of_mean": score_pixels(columns[1], masks)}
                values = "  ".join(f"{figure:.3f}" for figure in figures.values())
                print(f"{layer:13s} {count:6d} {name:11s} {values}  ({sets} sets)", flush=True)


if __name__ == "__main__":
    main()
