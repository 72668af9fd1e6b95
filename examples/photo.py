"""One photo, half temple and half flower: plain Grad-CAM of the network, a component, and the decision of an SVM.

The head is fitted on MobileNetV2 features of crops of the two photos that come with scikit-learn. torchvision downloads
the ImageNet weights, unless you pass a file:

    python examples/photo.py [--weights FILE] [--out photo.png]
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_sample_images
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    extract_features,
    figures,
    mean_activations,
)

LAYER, SIZE, CROPS = "features.16", 128, 100


def prepared(photos: np.ndarray) -> Tensor:
    """Return photos (N, H, W, 3) as the network takes them."""
    scaled = torch.from_numpy(photos / 255).float().permute(0, 3, 1, 2)
    mean, std = (torch.tensor(each).reshape(3, 1, 1) for each in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    return (scaled - mean) / std


def crops(photo: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return random crops of a photo, mirrored at random."""
    corners = [[generator.integers(side - SIZE) for side in photo.shape[:2]] for _ in range(CROPS)]
    return np.stack([photo[y : y + SIZE, x : x + SIZE][:, :: generator.choice([-1, 1])] for y, x in corners])


def main() -> None:
    """Fit, explain and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, help="a state dict of MobileNetV2; else it is downloaded")
    parser.add_argument("--out", type=Path, default=Path("photo.png"))
    options = parser.parse_args()

    weights = MobileNet_V2_Weights.IMAGENET1K_V1
    backbone = mobilenet_v2(weights=None if options.weights else weights).eval()
    if options.weights:
        backbone.load_state_dict(torch.load(options.weights, weights_only=True))
    temple, flower = load_sample_images().images
    generator = np.random.default_rng(0)
    images = prepared(np.concatenate([crops(temple, generator), crops(flower, generator)]))
    loader = DataLoader(list(zip(images, ["temple"] * CROPS + ["flower"] * CROPS, strict=True)), batch_size=25)
    features, labels = extract_features(backbone, loader, "classifier.0", progress=False)
    net = PCASVMNet(
        backbone, make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, labels), "classifier.0"
    ).eval()

    photo = np.concatenate([temple[60:396, 170:386], flower[60:396, 220:436]], 1)[np.newaxis]
    x = prepared(photo)
    mean = mean_activations(net, loader, LAYER, progress=False)
    plain = ClosedFormGradCAM(backbone, [LAYER]).explain(x)
    maps = ContributionCAM(net, [LAYER], mean=mean).explain(x, [PCATarget(0), SVMTarget("flower", versus="temple")])
    name = weights.meta["categories"][int(plain.output.argmax())]
    figure = figures.plot_maps(
        photo / 255, {f"Grad-CAM: {name}": plain, "PCA and SVM behind the CNN": maps}, signed=True
    )
    figure.savefig(options.out, dpi=120)
    print(f"{options.out}: {len(labels)} crops, three components, one photo")


if __name__ == "__main__":
    main()
