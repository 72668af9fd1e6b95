"""Time and memory of all signed maps of a batch, against the bare forward pass and against the host's GradCAM.

    python benchmarks/maps.py [--device cuda] [--repeats 15] [--json FILE]

Every ratio is measured in one run: the contestants take turns, and the median over rounds of the ratio within a round
is given. Before anything is timed, the maps are compared with the host's. The *floor* is the backbone alone up to the
feature layer, in inference mode; *explain* makes both signed parts of every component and the SVM at the maps'
resolution; *upsampled* brings them to the input's size and to numpy. Of 129 maps the host makes two, and its time is
scaled up.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from measuring import noisy_head, peak_bytes, prepare, timed, vgg16_small_dense
from pytorch_grad_cam import GradCAM
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, PCASVMNet, PCATarget, SVMTarget
from pytorch_grad_cam_pcasvm.network.features import compute_features


@dataclass(frozen=True)
class Case:
    """A backbone, the layer its features come from, the layer its maps come from, and the number of components."""

    name: str
    backbone: Callable[[], nn.Module]
    layer: str
    target: str
    components: int
    size: int
    goal: float


CASES = [
    Case("VGG16, dense 40-30-20, B=3", vgg16_small_dense, "classifier.3", "features.30", 3, 200, 1.05),
    Case("VGG16, classifier.4, B=64", torchvision.models.vgg16, "classifier.4", "features.30", 64, 224, 1.10),
    Case("ResNet-50, pooled, B=64", torchvision.models.resnet50, "avgpool", "layer4.2", 64, 224, 1.10),
]


def run(case: Case, batch: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Measure one case."""
    torch.manual_seed(0)
    backbone = case.backbone().to(device).eval()
    images = torch.randn(max(8, batch), 3, case.size, case.size, device=device)
    with torch.no_grad():
        features = compute_features(backbone, case.layer, images).cpu().numpy()
    head, x = noisy_head(features, case.components, max(200, 2 * case.components)), images[:batch].clone()
    net = PCASVMNet(backbone, head, layer=case.layer)
    target_layers = [backbone.get_submodule(case.target)]
    cam, host = ClosedFormGradCAM(net, target_layers), GradCAM(net.eval(), target_layers)
    signed = [PCATarget(b, sign) for b in range(case.components) for sign in ("+", "-")] + [SVMTarget()]
    size = tuple(x.shape[2:])

    def floor() -> Tensor:
        with torch.inference_mode():
            return compute_features(backbone, case.layer, x)

    def explain() -> Any:
        maps = cam.explain(x)
        return maps.positive(), maps.negative()

    def upsampled() -> Any:
        maps = cam.explain(x)
        return maps.positive(size).cpu().numpy(), maps.negative(size).cpu().numpy()

    def of_host(targets: list[Any]) -> Any:
        return [host(x, [target] * batch) for target in targets]

    sample = signed if len(signed) < 10 else [signed[0], signed[-1]]
    difference = float(np.abs(cam(x, SVMTarget()) - host(x, [SVMTarget()] * batch)).max())
    peaks = {f: statistics.median(peak_bytes(f, device) for _ in range(5)) for f in (floor, explain)}
    held = cam.explain(x)
    map_bytes = 2 * held.maps.numel() * held.maps.element_size()
    del held
    contestants: list[Callable[[], Any]] = [floor, explain, upsampled]
    rounds = []
    for index in range(repeats):
        # Every second round runs backwards: whoever comes first pays for what the one before left behind.
        order = contestants if index % 2 else contestants[::-1]
        rounds.append({function: timed(function, device) for function in order})
    host_rounds = [
        (timed(explain, device), timed(lambda: of_host(sample), device)) for _ in range(max(1, repeats // 5))
    ]
    per_map = len(signed) / len(sample)
    return {
        "case": case.name,
        "batch": batch,
        "maps": len(signed),
        "difference to host": difference,
        "floor s": statistics.median(seconds[floor] for seconds in rounds),
        "explain / floor": statistics.median(seconds[explain] / seconds[floor] for seconds in rounds),
        "goal": case.goal,
        "upsampled numpy / floor": statistics.median(seconds[upsampled] / seconds[floor] for seconds in rounds),
        "host / explain": statistics.median(per_map * of_host / ours for ours, of_host in host_rounds),
        "floor MB": peaks[floor] / 1e6,
        "(explain - maps) / floor memory": (peaks[explain] - map_bytes) / peaks[floor],
    }


def main() -> None:
    """Run every case and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    arguments = parser.parse_args()
    device, _ = prepare(arguments.device, ["grad-cam"])
    rows = [run(case, arguments.batch, device, arguments.repeats) for case in CASES]
    columns = list(rows[0])
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
