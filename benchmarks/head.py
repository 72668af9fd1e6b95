"""Share of the head in ``explain``, with many support vectors.

    python benchmarks/head.py [--support-vectors 10000] [--components 64] [--batch 32] [--rounds 5]

The *head* is all that is not the network: scaler, PCA and SVM forward, then the gradients of every component and of the
predicted class with respect to the features. It is timed in turns with the whole ``explain``, on VGG16 at 224x224 with
random weights; the median over rounds of the ratio within a round is given.
"""

import argparse
import statistics
from typing import Any

import torch
import torchvision
from measuring import noisy_head, prepare, synchronise, timed

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, PCASVMNet, PCATarget, SVMTarget
from pytorch_grad_cam_pcasvm.network.features import compute_features
from pytorch_grad_cam_pcasvm.targets.output_gradients import differentiate_targets


def main() -> None:
    """Run two classes and ten, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--support-vectors", type=int, default=10_000)
    parser.add_argument("--components", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device, _ = prepare(arguments.device)
    torch.manual_seed(0)
    backbone = torchvision.models.vgg16(weights=None).to(device).eval()
    x = torch.randn(arguments.batch, 3, 224, 224, device=device)
    with torch.no_grad():
        features = compute_features(backbone, "classifier.4", x)
    targets = [*(PCATarget(b) for b in range(arguments.components)), SVMTarget()]
    print("| classes | support vectors | explain s | head s | head / explain |\n|---|---|---|---|---|")
    for classes in (2, 10):
        head = noisy_head(features.cpu().numpy(), arguments.components, arguments.support_vectors, classes)
        net = PCASVMNet(backbone, head, layer="classifier.4")
        cam = ClosedFormGradCAM(net, [backbone.features[-1]])

        def of_head(net: PCASVMNet = net) -> Any:
            with torch.no_grad():
                return differentiate_targets(net.of_features(features), targets, torch.float32)

        def explain(cam: ClosedFormGradCAM = cam) -> Any:
            return cam.explain(x, targets)

        explain(), of_head()  # to warm up
        synchronise(device)
        rounds = [(timed(explain, device), timed(of_head, device)) for _ in range(arguments.rounds)]
        whole, part = (statistics.median(column) for column in zip(*rounds, strict=True))
        share = statistics.median(head_s / whole_s for whole_s, head_s in rounds)
        print(f"| {classes} | {len(head[-1].support_)} | {whole:.3g} | {part:.3g} | {100 * share:.2f} % |")


if __name__ == "__main__":
    main()
