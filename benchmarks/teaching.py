"""How long it takes to teach a head of patches by class folders: choosing, fitting, and with cross-validation.

    python benchmarks/teaching.py --weights mobilenet_v2.pth

300 photos of texture, half of which have a small stain, MobileNetV2, features of 28x28 positions. Extraction and maps
are told apart: what is left is choosing patches and fitting.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from pytorch_grad_cam_pcasvm.studio.cli import main as run
from pytorch_grad_cam_pcasvm.studio.cli import patch_fitting, teaching

SECONDS = defaultdict[str, float](float)


def write_photos(folder: Path, count: int) -> None:
    """Write photos of noise at several scales, every other one with a stain."""
    random = np.random.default_rng(0)
    for number in range(count):
        noise = [
            Image.fromarray(random.integers(60, 200, (size, size), np.uint8)).resize((256, 256), 3)
            for size in (16, 64, 256)
        ]
        pixels = np.mean([np.asarray(one, np.float32) for one in noise], 0)
        if number % 2:
            (y, x), side = random.integers(20, 220, 2), int(random.integers(8, 16))
            pixels[y : y + side, x : x + side] -= 60
        file = folder / ("good", "stain")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(1)).save(file)


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds its seconds to a name."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            SECONDS[name] += time.monotonic() - started

    return wrapper


def main() -> None:
    """Fit, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="of MobileNetV2 (default: torchvision's, downloaded)")
    parser.add_argument("--photos", type=int, default=300)
    options = parser.parse_args()
    patch_fitting.Teacher._explain = timed("maps", teaching.Teacher._explain)  # type: ignore[method-assign]
    patch_fitting.Teacher.pick = timed("choosing", teaching.Teacher.pick)  # type: ignore[method-assign]
    for name, label in (("_gather", "choosing"), ("_fit_all", "one fit"), ("_fit_fold", "fits of folds")):
        setattr(patch_fitting, name, timed(label, getattr(patch_fitting, name)))
    patch_fitting.LeftOut.score = timed("scores of photos left out", patch_fitting.LeftOut.score)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder) / "photos", options.photos)
        words = [
            "fit",
            f"{folder}/photos",
            "--pool",
            "dense:3",
            "--normal",
            "good",
            "--no-cache",
            "--out",
            f"{folder}/model.safetensors",
        ]
        words += [] if options.weights is None else ["--weights", str(options.weights)]
        started = time.monotonic()
        assert run(words) == 0
        total = time.monotonic() - started
    for name, seconds in SECONDS.items():
        print(f"{name}: {seconds:.1f} s")
    print(f"extraction, the pooled head and the rest: {total - sum(SECONDS.values()):.1f} s")
    print(f"choosing and one fit: {SECONDS['choosing'] + SECONDS['one fit']:.1f} s (goal: 60)")
    print(f"all but extraction and maps: {sum(SECONDS.values()) - SECONDS['maps']:.1f} s (goal: 240)")
    print(f"in all: {total:.1f} s")


if __name__ == "__main__":
    main()
