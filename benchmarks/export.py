"""Time of exported explanations: onnxruntime, a program, and the program compiled, against the bare network.

    python benchmarks/export.py [--rounds 7] [--compile] [--only NAME] [--json FILE]

The bare network is the backbone up to its features, in PyTorch (inference mode) and in onnxruntime. Contestants take
turns; the median over rounds of the ratio within a round is given, with its quartiles. Before anything is timed, what
onnxruntime gives is compared with ``explain``.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import torchvision
from measuring import noisy_head, normalise, prepare, timed
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, PCASVMNet, export, mean_activations

MODELS = torchvision.models
METHODS = {"Grad-CAM": ClosedFormGradCAM, "contributions": ContributionCAM}


def mobilenet() -> nn.Module:
    """Return MobileNetV2, whose output is its pooled features."""
    return nn.Sequential(MODELS.mobilenet_v2().features, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def resnet() -> nn.Module:
    """Return ResNet-50, whose output is its pooled features."""
    net = MODELS.resnet50()
    net.fc = nn.Identity()
    return net


def vgg() -> nn.Module:
    """Return VGG16 up to the ReLU of its second dense layer."""
    net = MODELS.vgg16()
    net.classifier = net.classifier[:5]
    return net


def vit() -> nn.Module:
    """Return ViT-S/16, whose output is its class token."""
    import timm

    return timm.create_model("vit_small_patch16_224", pretrained=False, num_classes=0)


# Name: backbone, target layer, number of components, reshape_transform.
CASES: dict[str, tuple[Callable[[], nn.Module], str, int, str | None]] = {
    "MobileNetV2, B=3": (mobilenet, "0", 3, None),
    "ResNet-50, B=3": (resnet, "layer4", 3, None),
    "ResNet-50, B=64": (resnet, "layer4", 64, None),
    "ViT-S/16, B=3": (vit, "blocks.10", 3, "tokens"),
    "VGG16 classifier.4, B=64": (vgg, "features", 64, None),
}


def session(path: str, threads: int) -> Callable[[np.ndarray], Any]:
    """Return what runs a file on some threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # or its threads disturb whoever is next
    made = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: made.run(None, {"images": x})


def settled(turn: Callable[[], Any]) -> float:
    """Return the seconds of a turn, begun when the threads of the one before have stopped spinning."""
    time.sleep(0.03)
    return timed(turn, torch.device("cpu"))


def contestants(name: str, method: str, folder: str) -> tuple[Any, Any, nn.Module, float]:
    """Return the method, its program, the network, and how long the method's file takes to write, by the bare one's."""
    torch.manual_seed(0)
    build, layer, components, reshape = CASES[name]
    images, file = torch.randn(16, 3, 224, 224), f"{folder}/explainer.onnx"
    backbone = normalise(build(), images)
    with torch.inference_mode():
        features = backbone(images).numpy()
    net = PCASVMNet(backbone, noisy_head(features, components, max(200, 2 * components))).eval()
    options: dict[str, Any] = {}
    if METHODS[method] is ContributionCAM:
        options["mean"] = mean_activations(net, [images], layer, progress=False)
    cam = METHODS[method](net, [layer], reshape, **options)
    bare = lambda: torch.onnx.export(  # noqa: E731
        backbone, (images[:2],), f"{folder}/bare.onnx", dynamo=True, verbose=False, input_names=["images"],
        dynamic_shapes=({0: torch.export.Dim("batch")},), external_data=False,
    )  # fmt: skip
    bare()  # the first takes longer
    seconds = [timed(turn, torch.device("cpu")) for turn in (bare, lambda: export.onnx(cam, images[:2], file))]
    return cam, export.program(cam, images[:2]).module(), backbone, seconds[1] / seconds[0]


def run(name: str, method: str, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """Measure one case with one and eight images, on one and two threads."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cam, program, backbone, writing = contestants(name, method, folder)
        print(
            f"{name}, {method}: the file takes {writing:.1f} times as long to write as that of the bare network",
            flush=True,
        )
        fast = torch.compile(program, dynamic=True) if compiled else None
        for threads in (1, 2):
            torch.set_num_threads(threads)
            explainer, bare = (session(f"{folder}/{file}.onnx", threads) for file in ("explainer", "bare"))
            for count in (1, 8):
                x = torch.randn(count, 3, 224, 224)
                array = x.numpy()
                turns = {
                    "torch": lambda x=x: backbone(x),
                    "runtime": lambda bare=bare, array=array: bare(array),
                    "explained": lambda explainer=explainer, array=array: explainer(array),
                    "program": lambda x=x: program(x),
                    "explain": lambda x=x: cam.explain(x),
                }
                if fast is not None:
                    turns["compiled"] = lambda x=x: fast(x)
                for turn in turns.values():
                    with torch.inference_mode():
                        turn()
                seconds: list[dict[str, float]] = []
                for _ in range(rounds):
                    with torch.inference_mode():
                        seconds.append({key: settled(turn) for key, turn in turns.items()})
                row: dict[str, Any] = {"case": name, "method": method, "threads": threads, "images": count}
                for above, below in (
                    ("explained", "runtime"), ("explained", "torch"), ("program", "torch"), ("compiled", "torch"),
                    ("explain", "torch"),
                ):  # fmt: skip
                    if above in turns:
                        ratios = [each[above] / each[below] for each in seconds]
                        low, middle, high = statistics.quantiles(ratios, n=4)
                        row[f"{above} / {below}"] = [round(value, 3) for value in (middle, low, high)]
                row["torch_ms"] = round(1e3 * statistics.median(each["torch"] for each in seconds), 1)
                rows.append(row)
                told = ", ".join(f"{key} {value[0]:.2f}" for key, value in row.items() if "/" in key)
                print(f"{name}, {method}, {count} images, {threads} threads: {told}", flush=True)
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="torch.compile, too, which takes minutes")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    _, found = prepare("cpu", ["onnxruntime"])
    cases = [(name, method) for name in CASES for method in METHODS if options.only in f"{name}, {method}"]
    rows = [row for case in cases for row in run(*case, options.rounds, options.compile)]
    if options.json:
        options.json.write_text(json.dumps({"environment": found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
