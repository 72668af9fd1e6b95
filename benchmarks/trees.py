"""Time of a decision without a gradient, beyond the maps of its components, against occlusion of the image.

    python benchmarks/trees.py [--device cuda] [--batch 64] [--components 8] [--rounds 7]

MobileNetV2 at 224x224 with random weights and labels of noise, behind it a scaler, a PCA, and a forest of 100 trees or
histogram boosting. *Beyond* is what ``explain`` of components and decisions takes more than that of the components, in
turns, the median over rounds with quartiles: for the predicted class of each image, and for every class. Each class has
a start of its own, and so coalitions of its own; *head* is what scikit-learn alone takes for as many rows. Occlusion is
captum's: windows of 56 pixels in steps of 28, so that it runs the network 50 times for each image and class, and gives
maps of 7x7 windows. It is timed on a few images, and scaled to the batch. First, sums of maps are compared with
the values they explain.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
import torchvision
from captum.attr import Occlusion
from measuring import check_sums, normalise, prepare, timed
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, PCATarget, SVMTarget, extract_features

SAMPLES = 400
OCCLUDED = 2  # images
WINDOW, STEP = 56, 28
HEADS = {
    "forest of 100": partial(RandomForestClassifier, 100, random_state=0),
    "histogram boosting": partial(HistGradientBoostingClassifier, random_state=0),
}


def occluded(net: PCASVMNet, x: Tensor, classes: int) -> Any:
    """Return captum's maps of every class."""
    occlusion = Occlusion(net)
    shapes: Any = {"sliding_window_shapes": (3, WINDOW, WINDOW), "strides": (3, STEP, STEP)}
    with torch.no_grad():
        return [occlusion.attribute(x, target=c, perturbations_per_eval=16, **shapes) for c in range(classes)]


def main() -> None:
    """Run two classes and twenty, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--components", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device, _ = prepare(arguments.device, ["captum", "scikit-learn"])
    torch.manual_seed(0)
    images = torch.randn(SAMPLES, 3, 224, 224)
    backbone = normalise(torchvision.models.mobilenet_v2(weights=None), images[:32]).to(device)
    options: Any = {"layer": "features", "pool": "mean"}
    features, _ = extract_features(backbone, images.split(50), progress=False, **options)
    x = images[: arguments.batch].to(device)
    components = [PCATarget(b) for b in range(arguments.components)]
    print("| head | classes | explained | components s | beyond s | head s | occlusion / all |\n" + "|---" * 7 + "|")
    for name, classifier in HEADS.items():
        for classes in (2, 20):
            labels = np.random.default_rng(0).integers(classes, size=SAMPLES)
            head = make_pipeline(StandardScaler(), PCA(arguments.components, random_state=0), classifier())
            net = PCASVMNet(backbone, head.fit(features, labels), **options).eval()
            cam = ContributionCAM(net, ["features"])
            every = [SVMTarget(label) for label in range(classes)]
            check_sums(cam, x[:8], every)
            rows = np.random.default_rng(0).normal(size=(len(x) * 2**arguments.components, arguments.components))
            predict = head[-1].predict_proba if "forest" in name else head[-1].decision_function
            slow = timed(partial(occluded, net, x[:OCCLUDED], classes), device) * len(x) / OCCLUDED
            for words, decisions in (("predicted class", [SVMTarget()]), ("every class", every)):
                explain = [partial(cam.explain, x, targets) for targets in (components, [*components, *decisions])]
                for function in explain:  # to warm up, and to find where each class starts
                    function()
                contestants = [*explain, partial(predict, rows)]
                rounds = np.array([
                    [timed(function, device) for function in contestants] for _ in range(arguments.rounds)
                ])
                of_components, of_all, of_head = rounds.T
                low, middle, high = np.quantile(of_all - of_components, [0.25, 0.5, 0.75])
                print(
                    f"| {name} | {classes} | {words} | {np.median(of_components):.2f} | {middle:.2f} ({low:.2f} to "
                    f"{high:.2f}) | {len(decisions) * np.median(of_head):.2f} | {slow / np.median(of_all):.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
