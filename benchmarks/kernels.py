"""How many kernels a map takes beyond the network's own: dispatched operations that are no views.

    python benchmarks/kernels.py [--verbose METHOD]

One image of ResNet-18 (pooled features, random weights), PCA(3), an RBF SVM of three classes, every component and the
predicted class; second call, so that what is done once does not count. On a GPU each of them is a launch.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torchvision
from measuring import noisy_head, normalise, prepare
from torch.utils._python_dispatch import TorchDispatchMode

from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormGradCAM,
    ClosedFormHiResCAM,
    ClosedFormShapleyCAM,
    ContributionCAM,
    PCASVMNet,
    RelevanceCAM,
)
from pytorch_grad_cam_pcasvm.runtime.device import forbid_sync

# Questions, views by another name, and zeros that are never made.
NO_LAUNCH = ("is_same_size", "_has_same_storage_numel", "_unsafe_view", "_efficientzerotensor", "promote_types")
METHODS = (ClosedFormGradCAM, ClosedFormHiResCAM, ContributionCAM, LIFTCAM, RelevanceCAM, ClosedFormShapleyCAM)


class Kernels(TorchDispatchMode):
    """Counts dispatched operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        if not func.is_view:
            self.counts[str(func).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], Any]) -> Counter[str]:
    """Return the kernels of a second call."""
    with torch.no_grad(), forbid_sync():  # as on a GPU
        call()
        with Kernels() as kernels:
            call()
    return kernels.counts


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verbose", metavar="METHOD", help="which operations, for one method")
    args = parser.parse_args()
    prepare("cpu")
    torch.manual_seed(0)
    images = torch.rand(8, 3, 224, 224)
    backbone = normalise(torchvision.models.resnet18(weights=None), images)
    backbone.fc = torch.nn.Identity()
    features = backbone(images).detach().numpy().astype(np.float64)
    net = PCASVMNet(backbone, noisy_head(features, 3, 200, classes=3))
    bare = counted(lambda: backbone(images[:1]))
    print(f"the network's own: {bare.total()}\n")
    print("| method | dispatched beyond them | of these launched |\n|---|---|---|")
    for method in METHODS:
        cam = method(net, [backbone.layer4])
        found = counted(lambda cam=cam: cam.explain(images[:1]))
        launched = sum(count for name, count in found.items() if not name.startswith(NO_LAUNCH))
        print(f"| {method.__name__} | {found.total() - bare.total()} | {launched - bare.total()} |")
        if method.__name__ == args.verbose:
            for name, count in (found - bare).most_common():
                print(f"  {count:4d} {name}")


if __name__ == "__main__":
    main()
