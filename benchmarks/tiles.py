"""Time of tiles against as many small pictures, and peak memory of a large photo against a small one.

    python benchmarks/tiles.py [--device cuda] [--tiles 4x3] [--rounds 7] [--only time|memory]

Time: MobileNetV2 with random weights; *small pictures* is ``net(images)`` of as many pictures of 224x224 as there are
tiles, in batches of a block, pooled or with a head on every position. *Scores* is the same head on tiles of one photo;
*maps* is ``explain`` of a decision at the last layer, in blocks, so that each tile runs twice. Ratios of interleaved
calls, the median over rounds with quartiles. First, the sums of maps are compared with the value.

Memory: the command line's ``explain`` in a process of its own, of one photo of 6000x4000 and one of 1500x1000, with
``--tiles 3x2`` and ``--tile 512``; beyond the decoded picture and one float32 map at its size.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from measuring import check_sums, noisy_head, normalise, prepare, timed
from PIL import Image

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, SVMTarget, TiledNet, extract_features

LAYER, VECTORS, COMPONENTS = "features", 500, 16
SIZES = {"small": (1500, 1000), "large": (6000, 4000)}


def measure_times(tiles: tuple[int, int], device: torch.device, rounds: int) -> None:
    """Print the ratios of scores and maps of tiles to those of as many small pictures."""
    torch.manual_seed(0)
    backbone = normalise(torchvision.models.mobilenet_v2(weights=None), torch.randn(16, 3, 224, 224)).to(device)
    count = tiles[0] * tiles[1]
    print("| head | tiles | small pictures s | scores / small | maps / small |\n" + "|---" * 5 + "|")
    for pool in ("mean", "dense"):
        dense: Any = "dense" if pool == "dense" else None
        tiled = TiledNet(backbone, LAYER, pool, tiles=tiles).eval()
        assert tiled.canvas is not None
        photo, small = torch.randn(1, 3, *tiled.canvas).to(device), torch.randn(count, 3, 224, 224).to(device)
        rows, _ = extract_features(backbone, [torch.randn(32, 3, 224, 224)], LAYER, pool=pool, progress=False)
        head = noisy_head(rows, COMPONENTS, VECTORS)
        plain, net = PCASVMNet(backbone, head, LAYER, pool=pool).eval(), PCASVMNet(tiled, head, pool=dense).eval()
        cam = ContributionCAM(net, [f"net.{LAYER}"])
        target = SVMTarget(1, at=(8, 9)) if dense else SVMTarget(1)
        check_sums(cam, photo, [target])

        def run_small(plain: Any = plain, small: Any = small, block: int = tiled.block) -> None:
            for part in small.split(block):
                plain(part)

        contestants = [run_small, partial(net, photo), partial(cam.explain, photo, [target])]
        with torch.no_grad():
            times = np.array([[timed(one, device) for one in contestants] for _ in range(rounds)])
        ratios = times[:, 1:] / times[:, :1]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75], axis=0)
        scores, maps = (f"{middle[k]:.2f} ({low[k]:.2f} to {high[k]:.2f})" for k in range(2))
        name = "every position" if dense else "pooled"
        print(f"| {name} | {tiles[0]}x{tiles[1]} | {np.median(times[:, 0]):.2f} | {scores} | {maps} |", flush=True)


def measure_memory() -> None:
    """Print the peak memory of processes that explain a large photo and a small one."""
    print("\n| fit | photo | peak MB | without the picture and one map, MB | large / small |\n" + "|---" * 5 + "|")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        torch.save(torchvision.models.mobilenet_v2(weights=None).state_dict(), root / "weights.pth")
        rng = np.random.default_rng(0)
        for number in range(8):
            path = root / "train" / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (600, 900, 3), np.uint8)).save(path)
        for name, (width, height) in SIZES.items():
            (root / name).mkdir()
            coarse = Image.fromarray(rng.integers(0, 256, (height // 50, width // 50, 3), np.uint8))
            coarse.resize((width, height)).save(root / name / "photo.jpg")
        for how in (["--tiles", "3x2"], ["--tile", "512"]):
            model = root / "model.safetensors"
            run(root, "fit", root / "train", "--weights", root / "weights.pth", "--out", model, *how)
            least = dict[str, float]()
            for name, (width, height) in SIZES.items():
                peak = run(root, "explain", root / name, "--model", model, "--out", root / "maps", "--device", "cpu")
                least[name] = peak - 7 * width * height / 1e6  # three bytes of colours, four of a number
                ratio = f"{least['large'] / least['small']:.2f}" if "large" in least else ""
                print(f"| {' '.join(how)} | {width}x{height} | {peak:.0f} | {least[name]:.0f} | {ratio} |", flush=True)


def run(root: Path, *words: Any) -> float:
    """Return the peak memory of a command in a process of its own, in MB.

    Args:
        root: a folder for its cache and what it prints.
        words: what is typed.

    Raises:
        RuntimeError: it fails.
    """
    with (root / "printed.txt").open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytorch_grad_cam_pcasvm", *map(str, words)], stdout=printed, stderr=printed,
            env=os.environ | {"TORCH_HOME": str(root / "cache")},
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError((root / "printed.txt").read_text())
    return usage.ru_maxrss / 1e3


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiles", default="4x3")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["time", "memory"])
    arguments = parser.parse_args()
    columns, rows = map(int, arguments.tiles.split("x"))
    device, _ = prepare(arguments.device, ["scikit-learn"])
    if arguments.only != "time":  # first: the peak of a process counts that of its parent before it
        measure_memory()
    if arguments.only != "memory":
        measure_times((columns, rows), device, arguments.rounds)


if __name__ == "__main__":
    main()
