"""What standard errors cost: maps with thirty resampled heads beside maps of one head, in one run.

    python benchmarks/how_sure.py

Weights are random: time does not depend on them. The head is StandardScaler, PCA(16) and an RBF SVM on 300 photos of
two classes. Each round measures both, in turn; the table has the ratio of the medians, and those of 30 refits.
"""

import argparse
import time
import warnings
from statistics import median

import numpy as np
import torch
import torchvision
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, SVMTarget, resample_heads

CASES = [
    ("MobileNetV2", "mobilenet_v2", "features.18", ("features.18", "features.13"), 1280),
    ("ResNet-50", "resnet50", "layer4", ("layer4", "layer3"), 2048),
]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--heads", type=int, default=30)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    print(f"| network | layer | one head, s | with {args.heads} resampled heads | refits, s |\n|---|---|---|---|---|")
    for name, model, layer, targets, width in CASES:
        torch.manual_seed(0)
        rows = np.random.default_rng(0).normal(size=(300, width)) + (np.arange(300) % 2)[:, None] * 0.1
        labels = np.array(["bad", "good"])[np.arange(300) % 2]
        pipeline = make_pipeline(StandardScaler(), PCA(16), SVC()).fit(rows, labels)
        began = time.perf_counter()
        refits = resample_heads(pipeline, rows, labels, n=args.heads)
        seconds = time.perf_counter() - began
        backbone = getattr(torchvision.models, model)(weights=None).eval()
        one, many = (PCASVMNet(backbone, pipeline, layer, pool="mean").eval() for _ in range(2))
        many.head.resamples = refits
        x = torch.randn(args.images, 3, 224, 224)
        for target in targets:
            options = {} if target == layer else {"baseline": "zero"}
            cams = [ContributionCAM(net, [target], **options) for net in (one, many)]
            times: list[list[float]] = [[], []]
            for number in range(args.rounds + 1):
                for cam, of_cam in zip(cams, times, strict=True):
                    began = time.perf_counter()
                    cam.explain(x, [SVMTarget("bad")])
                    if number:  # the first ones prepare constants
                        of_cam.append(time.perf_counter() - began)
            ratio = median(times[1]) / median(times[0])
            print(f"| {name} | {target} | {median(times[0]):.2f} | {ratio:.2f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
