"""What an atlas costs: to build it, to open it, to ask it.

    python benchmarks/atlas.py [--images 512] [--rounds 5] [--workers 1] [--rows 100000]

*Build* runs over JPEG files of 256x256, as a folder of photos, cropped to 224x224, with 16 components, the SVM of the
head and maps of 7x7; *bare* is the same DataLoader and the same network up to the features, in inference mode, which
keeps nothing. Both are interleaved; the ratio is that of the medians. *Questions* are asked of a store of random
numbers, each in a process of its own, whose peak memory is that of the process.
"""

import argparse
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from measuring import noisy_head, normalise, prepare, resident
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from pytorch_grad_cam_pcasvm import PCASVMNet, SVMTarget, atlas, extract_features
from pytorch_grad_cam_pcasvm.network.features import compute_features
from pytorch_grad_cam_pcasvm.studio.atlas import disk

COMPONENTS, SIDE, SHARD = 16, 7, 2048
TRANSFORM = v2.Compose([
    v2.ToImage(),
    v2.CenterCrop(224),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
])
NETWORKS = {"MobileNetV2": ("mobilenet_v2", "classifier.0", "features"), "ResNet-50": ("resnet50", "avgpool", "layer4")}


def photos(root: Path, count: int) -> ImageFolder:
    """Write JPEG files of smooth noise, in two classes."""
    random = np.random.default_rng(0)
    for number in range(count):
        folder = root / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
    return ImageFolder(str(root), TRANSFORM)


def network(name: str, data: ImageFolder) -> tuple[PCASVMNet, str]:
    """Return a network of random weights with a head of about 1,000 support vectors, and its target layer."""
    kind, features, target = NETWORKS[name]
    torch.manual_seed(0)
    images = torch.stack([data[row][0] for row in range(16)])
    backbone = normalise(torchvision.models.get_model(kind, weights=None), images)
    found, _ = extract_features(backbone, [images], features, progress=False)
    return PCASVMNet(backbone, noisy_head(found, COMPONENTS, 1000), features).eval(), target


def bare(net: PCASVMNet, data: ImageFolder, workers: int) -> None:
    """Run the network up to the features over a data set."""
    with torch.inference_mode():
        for images, _ in DataLoader(data, 64, num_workers=workers):
            compute_features(net.backbone, net.layer, images)


def built(net: PCASVMNet, data: ImageFolder, target: str, workers: int, out: Path) -> atlas.Atlas:
    """Build an atlas anew."""
    shutil.rmtree(out, ignore_errors=True)
    return atlas.build(net, data, [target], out, workers=workers, progress=False)


def building(folder: Path, count: int, rounds: int, workers: int) -> None:
    """Print images per second of a build and of the bare forward pass."""
    data = photos(folder / "photos", count)
    print(f"| network | workers | bare, images/s | build, images/s | build / bare | bytes per image |\n|{'---|' * 6}")
    for name in NETWORKS:
        net, target = network(name, data)
        times: dict[str, list[float]] = {"bare": [], "build": []}
        calls: dict[str, Callable[[], Any]] = {
            "bare": lambda net=net: bare(net, data, workers),
            "build": lambda net=net, target=target: built(net, data, target, workers, folder / "built"),
        }
        for call in calls.values():
            call()
        for _ in range(rounds):
            for kind, call in calls.items():
                start = time.perf_counter()
                call()
                times[kind].append(time.perf_counter() - start)
        each = {kind: count / statistics.median(seconds) for kind, seconds in times.items()}
        size = sum(path.stat().st_size for path in (folder / "built").glob("*.parquet")) / count
        ratio = each["build"] / each["bare"]
        print(
            f"| {name} | {workers} | {each['bare']:.1f} | {each['build']:.1f} | {ratio:.3f} | {size:,.0f} |", flush=True
        )


def synthetic(out: Path, rows: int) -> Path:
    """Write an atlas of random numbers."""
    random = np.random.default_rng(0)
    points = random.normal(size=(1000, COMPONENTS))
    head = make_pipeline(PCA(COMPONENTS), SVC()).fit(random.normal(size=(1000, 64)), random.integers(0, 2, 1000))
    net = PCASVMNet(nn.Identity(), head)
    out.mkdir()
    net.head.save(out / "head.safetensors")
    columns = {
        "row": ["int64"],
        "scores": ["float64", 2],
        "components": ["float64", COMPONENTS],
        "maps": ["float16", COMPONENTS, SIDE, SIDE],
        "nu": ["float32", COMPONENTS],
        "log_scale": ["float64", COMPONENTS],
        "baseline_values": ["float64", COMPONENTS],
        "remainder": ["float64", COMPONENTS],
    }
    entries = {
        **{"format": disk.FORMAT, "versions": {}, "columns": columns, "images": rows, "shard_size": SHARD},
        **{"kinds": {"label": "int", "prediction": "int"}, "classes": [0, 1], "names": None, "linear": True},
        **{"adds_up": True, "method": "ContributionCAM", "target_layer": "features", "targets": [], "thumbnails": 0},
        **{"backbone": "none", "complete": True, "rows": rows, "bad": {}, "head": net.head.digest(), "first": {}},
    }
    for number, start in enumerate(range(0, rows, SHARD)):
        count = min(SHARD, rows - start)
        block: dict[str, Any] = {
            name: random.normal(size=(count, *shape)).astype(dtype) for name, (dtype, *shape) in columns.items()
        }
        block["row"] = np.arange(start, start + count)
        block["maps"] = np.clip(block["maps"] / 4, -1, 1)
        block["nu"], block["log_scale"] = np.abs(block["nu"]), np.zeros((count, COMPONENTS))
        block["components"] += points[random.integers(0, 1000, count)]
        names = ("label", "prediction")
        block |= {name: random.integers(0, 2, count).tolist() for name in names} | {"thumbnail": [b""] * count}
        block["id"] = [str(row) for row in range(start, start + count)]
        marks = {"atlas": disk.digest_manifest(entries), "number": number, "bad": {}}
        disk.write_shard(out, number, block, {"label": "int", "prediction": "int", "id": "str"}, marks)
    disk.write_manifest(out, entries)
    return out


def ask(folder: Path, question: str, answers: Any) -> None:
    """Open an atlas, ask one question; put seconds and peak memory in MiB."""
    start = time.perf_counter()
    store = atlas.load(folder)
    opened = time.perf_counter() - start
    QUESTIONS[question](store)
    seconds = time.perf_counter() - start
    answers.put((opened, seconds, resident("VmHWM") / 2**20))


QUESTIONS: dict[str, Callable[[atlas.Atlas], Any]] = {
    "extremes(2, 12)": lambda store: store.extremes(2, 12),
    "mean_map(2, by='label')": lambda store: store.mean_map(2, by="label"),
    "nearest(0)": lambda store: store.nearest(0),
    "disagreements()": lambda store: store.disagreements(),
    "explain(12 rows)": lambda store: store.explain(np.linspace(0, len(store) - 1, 12).astype(int)),
    "explain(1,000 rows, another head)": lambda store: store.explain(
        range(1000), SVMTarget(1), SVC(kernel="poly").fit(store.components[:500], store.labels[:500])
    ),
}


class Noise(Dataset[Any]):
    """Small images of noise."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        return torch.full((3, 14, 14), row % 97 / 97).add_(torch.arange(14) * (row % 13 / 13)), row % 2


def build_many(out: Path, count: int, answers: Any) -> None:
    """Build an atlas of many small images; put its peak memory in MiB."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    data = Noise(count)
    x, y = zip(*(data[row] for row in range(200)), strict=True)
    features = backbone(torch.stack(x)).detach().numpy()
    net = PCASVMNet(backbone, make_pipeline(PCA(COMPONENTS), SVC()).fit(features, y))
    atlas.build(net, data, ["2"], out, thumbnails=False, progress=False)
    answers.put(resident("VmHWM") / 2**20)


def in_process(call: Callable[..., None], *arguments: Any) -> Any:
    """Return what a call puts, made in a process of its own."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=call, args=(*arguments, answers))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{call.__name__} failed")
    return answers.get()


def asking(folder: Path, rows: int) -> None:
    """Print how long questions take, and their memory, for a small and a large store."""
    stores = {count: synthetic(folder / f"rows{count}", count) for count in (1000, rows)}
    print(f"\n| question | rows | opened, s | answered, s | peak memory, MiB |\n|{'---|' * 5}")
    for question in QUESTIONS:
        for count, store in stores.items():
            found = [in_process(ask, store, question) for _ in range(3)]
            opened, seconds, peak = (statistics.median(values) for values in zip(*found, strict=True))
            print(f"| `{question}` | {count:,} | {opened:.3f} | {seconds:.3f} | {peak:.0f} |", flush=True)
    store = atlas.load(stores[rows])
    start = time.perf_counter()
    store.explain(range(10_000), SVMTarget(1))
    print(f"\n10,000 maps of a decision, from the store: {time.perf_counter() - start:.2f} s")
    print(f"\n| build of | peak memory, MiB |\n|{'---|' * 2}")
    for count in (1000, rows):
        print(f"| {count:,} rows | {in_process(build_many, folder / f'many{count}', count):.0f} |", flush=True)


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512, help="of a build; 0: questions only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes that read images")
    parser.add_argument("--rows", type=int, default=100_000, help="of the large store")
    options = parser.parse_args()
    prepare("cpu", ["pyarrow"])
    with tempfile.TemporaryDirectory() as folder:
        if options.images:
            building(Path(folder), options.images, options.rounds, options.workers)
        asking(Path(folder), options.rows)


if __name__ == "__main__":
    main()
