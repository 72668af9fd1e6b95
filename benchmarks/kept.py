"""How much of a network's numbers a path keeps: all of them, or those that gradients read.

    python benchmarks/kept.py

Eight images of 224 x 224, random weights, from the target layer to the features; megabytes of distinct storages.
"""

from collections.abc import Callable

import timm
import torch
import torchvision
from measuring import prepare
from torch import nn

from pytorch_grad_cam_pcasvm.path.record import Path

NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "vit_small": (lambda: timm.create_model("vit_small_patch16_224", num_classes=0), "blocks.11.norm1"),
    "ResNet-50": (lambda: torchvision.models.resnet50(weights=None), "layer3"),
    "MobileNetV2": (lambda: torchvision.models.mobilenet_v2(weights=None), "features.13"),
    "DenseNet-121": (lambda: torchvision.models.densenet121(weights=None), "features.denseblock3"),
    "VGG-11": (lambda: torchvision.models.vgg11(weights=None), "features.10"),
    "ConvNeXt-T": (lambda: torchvision.models.convnext_tiny(weights=None), "features.5"),
}


def megabytes(net: nn.Module, layer: str, x: torch.Tensor, *, needs: str) -> float:
    """Return what a pass keeps."""
    values = Path(net, None, [layer], needs=needs).record(x).tape.values
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}
    return sum(storages.values()) / 1e6


def main() -> None:
    """Print a table."""
    prepare("cpu", ("timm",))
    x = torch.randn(8, 3, 224, 224)
    print("\n| network | target layer | all, MB | for gradients, MB |\n|---|---|---|---|")
    for name, (make, layer) in NETWORKS.items():
        torch.manual_seed(0)
        net = make().eval()
        with torch.no_grad():
            whole, few = (megabytes(net, layer, x, needs=needs) for needs in ("replay", "gradient"))
        print(f"| {name} | `{layer}` | {whole:.1f} | {few:.1f} |", flush=True)


if __name__ == "__main__":
    main()
