"""Time of explain against the bare network, for Grad-CAM and contributions of all components and the SVM.

    python benchmarks/explain.py [--case NAME ...] [--threads 1] [--rounds 9]

The contestants take turns in one process; what is printed is the median over rounds of the ratio within a round. The
bare network runs under no_grad, up to the features. Contributions start where each target is undecided, near the
mean of 16 images at the layer; the search for these starts is done in a call before.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from measuring import noisy_head, normalise, timed
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, PCASVMNet, mean_activations


def mobilenet() -> nn.Module:
    """Return MobileNetV2, whose output is its pooled features."""
    net = torchvision.models.mobilenet_v2(weights=None)
    return nn.Sequential(net.features, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def resnet() -> nn.Module:
    """Return ResNet-50, whose output is its pooled features."""
    net = torchvision.models.resnet50(weights=None)
    net.fc = nn.Identity()
    return net


def vit() -> nn.Module:
    """Return ViT-S/16, whose output is its class token."""
    import timm

    return timm.create_model("vit_small_patch16_224", pretrained=False, num_classes=0)


def vgg() -> nn.Module:
    """Return VGG16 up to the second of its large dense layers."""
    net = torchvision.models.vgg16(weights=None)
    net.classifier = net.classifier[:5]
    return net


# Backbone, target layer, number of components, reshape_transform.
CASES: dict[str, tuple[Callable[[], nn.Module], str, int, str | None]] = {
    "MobileNetV2, B=3": (mobilenet, "0", 3, None),
    "ResNet-50, B=3": (resnet, "layer4", 3, None),
    "ViT-S/16, B=3": (vit, "blocks.10", 3, "tokens"),
    "VGG16 classifier.4, B=64": (vgg, "features", 64, None),
}


def run(name: str, count: int, rounds: int) -> dict[str, float]:
    """Return the median ratios of one case with some images, and the milliseconds of the bare network."""
    build, layer, components, reshape = CASES[name]
    torch.manual_seed(0)
    images, x = torch.randn(16, 3, 224, 224), torch.randn(count, 3, 224, 224)
    backbone = normalise(build(), images)
    with torch.inference_mode():
        features = backbone(images).numpy()
    net = PCASVMNet(backbone, noisy_head(features, components, max(200, 2 * components))).eval()
    cams: dict[str, Any] = {
        "Grad-CAM": ClosedFormGradCAM(net, [layer], reshape),
        "contributions": ContributionCAM(
            net, [layer], reshape, mean=mean_activations(net, [images], layer, progress=False)
        ),
    }

    def bare() -> Tensor:
        with torch.no_grad():
            return backbone(x)

    turns: dict[str, Callable[[], Any]] = {"bare": bare}
    turns |= {method: lambda cam=cam: cam.explain(x) for method, cam in cams.items()}  # type: ignore[misc]
    for turn in turns.values():
        turn()
    seconds = []
    for _ in range(rounds):
        seconds.append({})
        for method, turn in turns.items():
            time.sleep(0.02)  # until the threads of the one before have stopped spinning
            seconds[-1][method] = timed(turn, torch.device("cpu"))
    ratios = {method: statistics.median(row[method] / row["bare"] for row in seconds) for method in cams}
    return ratios | {"ms": 1e3 * statistics.median(row["bare"] for row in seconds)}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| network | images | Grad-CAM / bare | contributions / bare | bare, ms |\n|---|---|---|---|---|")
    for name in options.case:
        for count in (1, 8):
            row = run(name, count, options.rounds if count == 1 else max(3, options.rounds // 2))
            print(
                f"| {name} | {count} | {row['Grad-CAM']:.2f} | {row['contributions']:.2f} | {row['ms']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
