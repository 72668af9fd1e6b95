"""Why was this one wrong? The most confident mistake among test photos, explained.

The script fits a scaler, PCA and an RBF SVM on the pooled features of an ImageNet network, with a few photos of each
class. Of the misclassified test photos, ``figures.plot_mistake`` draws the one with the largest margin. --train and
--test are folders with one subfolder per class; the weights are torchvision's, or come from a file. It takes a minute,
without a GPU:

    python examples/mistake.py --train photos/train --test photos/test
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from experiment.network import convolutions
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from pytorch_grad_cam_pcasvm import PCASVMNet, extract_features
from pytorch_grad_cam_pcasvm.figures import plot_mistake

AS_PICTURE = [v2.Resize(224), v2.CenterCrop(224), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
NORMALISED = v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])


def photos(folder: Path, limit: int | None = None) -> tuple[Tensor, np.ndarray]:
    """Return the first photos of each class, (N, 3, 224, 224) in [0, 1], and the names of their classes, (N,)."""
    dataset = ImageFolder(folder, v2.Compose(AS_PICTURE))
    numbers = np.array(dataset.targets)
    rows = np.concatenate([np.flatnonzero(numbers == number)[:limit] for number in range(len(dataset.classes))])
    return torch.stack([dataset[row][0] for row in rows]), np.array(dataset.classes)[numbers[rows]]


def fitted(backbone: nn.Module, images: Tensor, labels: np.ndarray, components: int) -> PCASVMNet:
    """Return the network with a head that was fitted on images as it takes them."""
    features, _ = extract_features(backbone, DataLoader(images, 32), "avgpool", progress=False)
    head = make_pipeline(StandardScaler(), PCA(components, random_state=0), SVC()).fit(features, labels)
    return PCASVMNet(backbone, head, "avgpool").eval()


@torch.no_grad()
def surest_mistake(net: PCASVMNet, images: Tensor, truth: np.ndarray) -> int | None:
    """Return which image was predicted wrongly with the largest margin, or None; print how many are right."""
    outputs = [net(batch) for batch in images.split(32)]
    labels = np.concatenate([output.labels() for output in outputs])
    margins = np.concatenate([output.margins.amax(1) for output in outputs])
    print(f"{np.mean(labels == truth):.0%} of {len(truth)} test photos are classified correctly")
    return int(np.where(labels == truth, -np.inf, margins).argmax()) if (labels != truth).any() else None


def main() -> None:
    """Fit, find the surest mistake, draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="photos to fit the head, a folder for each class")
    parser.add_argument("--test", type=Path, required=True, help="photos to look for mistakes, a folder for each class")
    parser.add_argument("--limit", type=int, default=40, help="photos of each class to fit the head (default: 40)")
    parser.add_argument("--components", type=int, default=8, help="of the PCA (default: 8)")
    parser.add_argument("--weights", type=Path, help="file with mobilenet_v2's state_dict (default: torchvision's)")
    parser.add_argument("--out", type=Path, default=Path("mistake.png"), help="the figure (default: mistake.png)")
    args = parser.parse_args()

    (training, labels), (test, truth) = photos(args.train, args.limit), photos(args.test)
    backbone = nn.Sequential()
    backbone.features = convolutions("mobilenet_v2", args.weights).eval()
    backbone.avgpool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = fitted(backbone, NORMALISED(training), labels, args.components)
    wrong = surest_mistake(net, NORMALISED(test), truth)
    if wrong is None:
        raise SystemExit("there is no mistake to draw: take more test photos, or fewer to fit the head (--limit)")
    given = NORMALISED(test[wrong]), truth[wrong], NORMALISED(training), labels
    figure = plot_mistake(net, *given, target_layer="features", picture=test[wrong], pictures=training)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out)
    print(f"{args.out}: {figure.get_suptitle()}")


if __name__ == "__main__":
    main()
