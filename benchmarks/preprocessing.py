"""How often wrongly prepared images are told to be unlike the training images, and rightly prepared ones, too.

    python benchmarks/preprocessing.py --images FOLDER [FOLDER ...] --backbone mobilenet_v2 --weights FILE

Folders with one folder of photos per class; pooled features, StandardScaler and PCA(8), fitted on 20, 100 or 200 of
the images, twenty times each; the others are explained in batches of 1, 8 and 32, each by a new method.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pytorch_grad_cam_pcasvm import OutsideTrainingWarning, extract_features
from pytorch_grad_cam_pcasvm.data import Images
from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.methods.warn_once import WarnOnce
from pytorch_grad_cam_pcasvm.network.outputs import HeadRun

MEAN, STD = (torch.tensor(numbers).reshape(3, 1, 1) for numbers in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
PREPARED = {
    "as for training": lambda x: (x - MEAN) / STD,
    "[0, 1], not normalised": lambda x: x,
    "BGR in place of RGB": lambda x: (x.flip(-3) - MEAN) / STD,
    "0..255, not normalised": lambda x: 255 * x,
    "0..255, normalised": lambda x: (255 * x - MEAN) / STD,
}
SIZES = (1, 8, 32)


def features_of(backbone: Any, folder: Path) -> dict[str, np.ndarray]:
    """Return the features of a folder's images (N, D), by how they are prepared."""
    resized = torchvision.transforms.Compose([
        torchvision.transforms.Resize(256),
        torchvision.transforms.CenterCrop(224),
        torchvision.transforms.ToTensor(),
    ])
    loader = torch.utils.data.DataLoader(Images(folder, resized).data, 16)
    return {
        name: extract_features(backbone, ((prepare(x), y) for x, y in loader), "features", pool="mean")[0]
        for name, prepare in PREPARED.items()
    }


def is_told(run: HeadRun) -> bool:
    """Return whether a new method tells that the images of a run are unlike those of the training set."""
    doubts, told = WarnOnce(), []
    doubts.tell = lambda category, message: told.append(category)  # type: ignore[method-assign]
    doubts.of_images(run)
    return OutsideTrainingWarning in told


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", nargs="+", type=Path, required=True)
    parser.add_argument("--backbone", default="mobilenet_v2")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--without-scaler", action="store_true")
    args = parser.parse_args()
    backbone = torchvision.models.get_model(args.backbone, weights=None).eval()
    backbone.load_state_dict(torch.load(args.weights, weights_only=True))
    told: dict[tuple[str, int], list[bool]] = {(name, size): [] for name in PREPARED for size in SIZES}
    rng = np.random.default_rng(0)
    for folder in args.images:
        features = features_of(backbone, folder)
        training = features["as for training"]
        for count in 20 * [20, 100, 200]:
            order = rng.permutation(len(training))
            pipeline = make_pipeline(*([] if args.without_scaler else [StandardScaler()]), PCA(8))
            head = Head.of(pipeline.fit(training[order[:count]]))
            for name, prepared in features.items():
                run = HeadRun(head, head(torch.as_tensor(prepared[order[count:]])))
                for size in SIZES:
                    batches = (run.rows(slice(n, n + size)) for n in range(0, len(run) - size + 1, size))
                    told[name, size] += map(is_told, batches)
    print(f"| images | {' | '.join(f'{size} at a time' for size in SIZES)} |\n|---|{'---|' * len(SIZES)}")
    for name in PREPARED:
        print(f"| {name} | {' | '.join(f'{np.mean(told[name, size]):.1%}' for size in SIZES)} |")


if __name__ == "__main__":
    main()
