"""Time of every method's signed maps, of all components and the SVM, against the same method elsewhere.

    python benchmarks/methods.py [--device cuda] [--batch 8] [--rounds 7] [--json FILE] [--method NAME] [--own]

All contestants work on the same network, in turns, in one process; what is printed is the median over rounds of the
ratio within a round, with quartiles. *floor* is the bare forward pass up to the features, in inference mode. The host
makes one map a call: it is timed for the SVM's, and its time multiplied by the 2 B + 1 maps of both signs. captum (one
call for each of B + 1 signed maps) has Grad-CAM, gradient times activation (HiResCAM) and integrated gradients in 50
steps, which contributions are the limit of; torchcam (one forward pass with a graph, a backward pass for each map) has
Grad-CAM++, XGrad-CAM and LayerCAM. Ablation-CAM and Score-CAM of the host take minutes for one map: they run on one
image, Score-CAM with 7 targets, and once. Maps are compared before anything is timed, and the script fails where they
differ by more than the tolerance; where the host follows another formula the table says so.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_grad_cam
import torch
import torchcam.methods
import torchvision
from captum.attr import LayerGradCam, LayerGradientXActivation, LayerIntegratedGradients
from measuring import noisy_head, normalise, prepare, timed
from torch import Tensor, nn

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import PCASVMNet, PCATarget, SVMTarget
from pytorch_grad_cam_pcasvm.network.features import compute_features

TOLERANCE = 2e-3  # float32, of maps scaled to [0, 1]
PATIENCE = 10.0  # seconds: a slower peer runs in one round only
GRADIENT = [
    "ClosedFormGradCAM",
    "ClosedFormHiResCAM",
    "ClosedFormXGradCAM",
    "ClosedFormGradCAMPlusPlus",
    "ClosedFormLayerCAM",
    "ClosedFormGradCAMElementWise",
    "ClosedFormShapleyCAM",
    "ContributionCAM",
    "LIFTCAM",
    "RelevanceCAM",
]
SLOW = ["ClosedFormAblationCAM", "ClosedFormScoreCAM", "ShapCAM"]
NETWORKS = {
    "MobileNetV2, pooled": (torchvision.models.mobilenet_v2, "features.18", "classifier.0", 1.10),
    "ResNet-50, pooled": (torchvision.models.resnet50, "layer4", "avgpool", 1.10),
    "VGG16, classifier.4": (torchvision.models.vgg16, "features.30", "classifier.4", 1.20),
}
# The host adds 1e-6 to 2 d^2, which is smaller: its Grad-CAM++ is that of another formula.
OTHER_FORMULA = {"ClosedFormGradCAMPlusPlus"}


def of_host(name: str) -> Any:
    """Return the host's class of the same name, or None."""
    return getattr(pytorch_grad_cam, name.removeprefix("ClosedForm"), None) if name.startswith("Closed") else None


class Scores(nn.Module):
    """Components and the margin of the first class, as scores that a peer can choose from."""

    def __init__(self, net: PCASVMNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return components and margin, shape (N, B + 1)."""
        output = self.net(x)
        return torch.cat([output.components, output.margins[:, :1]], 1)


def peers(name: str, net: PCASVMNet, layer: nn.Module, x: Tensor, maps: int) -> dict[str, Callable[[], Any]]:
    """Return what else makes the maps of a method, each called once for all of them, by its name."""
    scores, found = Scores(net), {}
    of_captum = {"ClosedFormGradCAM": LayerGradCam, "ClosedFormHiResCAM": LayerGradientXActivation}.get(name)
    if of_captum is not None:
        attribution = of_captum(scores, layer)
        found["captum"] = lambda: attribution.attribute(x, target=maps - 1)
    if name == "ContributionCAM":
        integrated = LayerIntegratedGradients(scores, layer)

        def integrated_gradients() -> None:
            net.requires_grad_(False)  # otherwise its graphs begin at the image, and take 24 GB
            integrated.attribute(x, target=maps - 1, n_steps=50, internal_batch_size=len(x))
            net.requires_grad_(True)

        found["captum"] = integrated_gradients
    of_torchcam = {
        "ClosedFormGradCAMPlusPlus": "GradCAMpp",
        "ClosedFormXGradCAM": "XGradCAM",
        "ClosedFormLayerCAM": "LayerCAM",
    }.get(name)
    if of_torchcam is not None:

        def torchcam_maps() -> None:
            with getattr(torchcam.methods, of_torchcam)(scores, layer) as extractor:
                out = scores(x)
                for k in range(maps):
                    extractor(k, out, retain_graph=True)

        found["torchcam"] = torchcam_maps
    return found


def ratios(rounds: list[dict[str, float]], above: str, below: str, factor: float = 1.0) -> list[float]:
    """Return the median and quartiles of a ratio within rounds."""
    each = sorted(factor * seconds[above] / seconds[below] for seconds in rounds if above in seconds)
    if len(each) < 2:
        return each * 3  # no quartiles
    low, middle, high = statistics.quantiles(each, n=4)
    return [middle, low, high]


def run(
    network: str, components: int, names: list[str], batch: int, rounds: int, device: torch.device, *, own_only: bool
) -> list[Any]:
    """Measure the methods on one network."""
    build, target, layer, goal = NETWORKS[network]
    torch.manual_seed(0)
    images = torch.randn(16, 3, 224, 224, device=device)
    backbone = normalise(build(weights=None).to(device), images)
    with torch.no_grad():
        features = compute_features(backbone, layer, images).cpu().numpy()
    net = PCASVMNet(backbone, noisy_head(features, components, 1000), layer=layer).eval()
    target_layer, x = backbone.get_submodule(target), images[:batch].clone()
    first = net.predict(x[:1])[0]  # the host's Ablation-CAM divides by the score, and turns round where it is negative
    rows = []
    for name in names:
        own = x[:1] if name in SLOW else x
        cam = getattr(package, name)(net, [target_layer])
        targets = [*map(PCATarget, range(components)), SVMTarget(first)]
        contestants: dict[str, Callable[[], Any]] = {
            "floor": lambda own=own: compute_features(backbone, layer, own),
            "ours": lambda cam=cam, own=own, targets=targets: cam.explain(own, targets),
        }
        host, per_map = of_host(name), 2 * components + 1
        difference = None
        if host is not None and not (own_only and name in SLOW):
            of_peer = host(net, [target_layer])
            mine = getattr(package, name)(net, [target_layer], softmax=True) if "Score" in name else cam
            once = lambda of_peer=of_peer, own=own: of_peer(own, [SVMTarget(first)] * len(own))  # noqa: E731
            difference = float(np.abs(mine(own, SVMTarget(first)) - once()).max())
            if difference > TOLERANCE and name not in OTHER_FORMULA:
                raise SystemExit(f"{name} on {network}: maps differ from the host's by {difference:.2g}")
            contestants["host"] = once
        contestants |= peers(name, net, target_layer, own, len(targets))
        if own_only:
            contestants = {key: contestants[key] for key in ("floor", "ours")}
        seconds: list[dict[str, float]] = []
        for index in range(2 if name in SLOW else rounds):
            order = list(contestants) if index % 2 else list(contestants)[::-1]
            if index:
                order = [key for key in order if key in ("floor", "ours") or seconds[0][key] < PATIENCE]
            with torch.inference_mode(False):
                seconds.append({key: timed(_without_graph(key, contestants[key]), device) for key in order})
        factor = {"host": per_map, "captum": len(targets), "torchcam": 1}
        row = {"network": network, "B": components, "method": name, "images": len(own), "difference": difference}
        row |= {"floor ms": 1e3 * statistics.median(s["floor"] for s in seconds), "goal": goal}
        row |= {"ours / floor": ratios(seconds, "ours", "floor")}
        row |= {f"{peer} / ours": ratios(seconds, peer, "ours", factor[peer]) for peer in factor if peer in contestants}
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _without_graph(key: str, function: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.inference_mode(key == "floor"):
            return function()

    return call


def _line(row: dict[str, Any]) -> str:
    """Return a row of the table."""

    def ratio(name: str) -> str:
        value = row.get(name)
        return "" if value is None else f"{value[0]:.3g} ({value[1]:.3g}–{value[2]:.3g})"

    difference = "" if row["difference"] is None else f"{row['difference']:.1e}"
    cells = [row["network"], row["B"], row["method"], row["images"], f"{row['floor ms']:.4g}", ratio("ours / floor")]
    return "| " + " | ".join(map(str, cells + [ratio(f"{p} / ours") for p in PEERS] + [difference])) + " |"


PEERS = ("host", "captum", "torchcam")


def main() -> None:
    """Measure every method and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--method", nargs="+", choices=[*GRADIENT, *SLOW], default=[*GRADIENT, *SLOW])
    parser.add_argument("--components", nargs="+", type=int, default=[3, 64])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--own", action="store_true", help="time no peers, which take long for many maps")
    parser.add_argument("--json", type=Path, help="write every row to this file, too")
    arguments = parser.parse_args()
    device, machine = prepare(arguments.device, ["grad-cam", "captum", "torchcam", "scikit-learn"])
    columns = ["network", "B", "method", "images", "floor, ms", "ours / floor", *(f"{p} / ours" for p in PEERS)]
    print("| " + " | ".join([*columns, "difference to host"]) + " |\n|" + "---|" * (len(columns) + 1))
    rows = []
    for network in arguments.network:
        for components in arguments.components:
            # Score-CAM is asked for 7 targets, and the slow methods for one network.
            slow = components == 3 and network == next(iter(NETWORKS))
            names = [name for name in arguments.method if slow or name not in SLOW]
            rows += run(network, components, names, arguments.batch, arguments.rounds, device, own_only=arguments.own)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
