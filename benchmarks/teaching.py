"""How long it takes to teach a head of patches by class folders: choosing, fitting, and with cross-validation.

    python benchmarks/teaching.py --weights mobilenet_v2.pth

300 photos of texture, half of which have a small stain, MobileNetV2, features of 28x28 positions. Extraction and maps
are told apart: what is left is choosing patches and fitting. Each batch of maps is also made head by head, each from
a start that it looks for, as before 0.6, in turn before and after, so that the ratio is one of the same minutes.
"""

import argparse
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

from pytorch_grad_cam_pcasvm import ContributionCAM
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


def both_ways(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes maps of the heads of all folds together, and also one by one, and compares them."""
    calls, cams = itertools.count(), list[Any]()

    def one_by_one(cam: Any, heads: Any, images: Any, labels: Any, normal: Any, grid: Any) -> Any:
        if not cams:  # each looks for a start of its own
            cams.extend(ContributionCAM(cam.model.with_head(head), cam.target_layers) for head in heads)
        return torch.cat([
            function(own, [head], images, labels, normal, grid) for own, head in zip(cams, heads, strict=True)
        ])

    @wraps(function)
    def wrapper(*args: Any) -> Any:
        if len(args[1]) < 2:  # good photos, which one head explains
            return function(*args)
        ways = {"maps together": function, "maps one by one": one_by_one}
        number = next(calls)
        found = {name: timed(name, ways[name])(*args) for name in sorted(ways, reverse=bool(number % 2))}
        together, apart = (found[name] for name in ways)
        if len(args[2]):  # the first head starts where it is undecided itself
            torch.testing.assert_close(together[0], apart[0], rtol=1e-3, atol=1e-3 * float(apart.abs().max()))
        return found["maps together"]

    return wrapper


def main() -> None:
    """Fit, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="of MobileNetV2 (default: torchvision's, downloaded)")
    parser.add_argument("--photos", type=int, default=300)
    options = parser.parse_args()
    patch_fitting.Teacher._explain = timed("maps", teaching.Teacher._explain)  # type: ignore[method-assign]
    teaching.explain_faults = both_ways(teaching.explain_faults)
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
    apart, together = SECONDS.pop("maps one by one"), SECONDS.pop("maps together")
    SECONDS["maps"] -= apart
    total -= apart
    for name, seconds in SECONDS.items():
        print(f"{name}: {seconds:.1f} s")
    print(f"extraction, the pooled head and the rest: {total - sum(SECONDS.values()):.1f} s")
    print(f"choosing and one fit: {SECONDS['choosing'] + SECONDS['one fit']:.1f} s (goal: 60)")
    print(f"all but extraction and maps: {sum(SECONDS.values()) - SECONDS['maps']:.1f} s (goal: 240)")
    print(f"in all: {total:.1f} s")
    print(f"maps of faulty photos, of all folds together beside one by one: {together / apart:.2f}")
    print(f"the whole fit beside that with maps one by one: {total / (total - together + apart):.2f} (goal: 0.45)")


if __name__ == "__main__":
    main()
