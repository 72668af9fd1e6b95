"""Small things in photos: what to fit, of what, and how close to look. The table of docs/measurements.md.

Five heads are compared on four sets: an SVM on pooled features; distances to patches of good photos; an SVM of
patches that class folders teach, chosen by distance alone, and by distance and maps; and an SVM of patches inside of
masks. Photos are seen whole, at 224 or 448 pixels, or in 2x2 tiles of 224. Masks serve the last head, and the
evaluation.

Three sets are crops of the two photos that come with scikit-learn, into half of which small things are pasted:
scratches, stains, and grains. The fourth is CrackForest (Shi et al., 2016), if its folder is given, with ``images`` and
``masks``: crops of 160x160, "good" ones without a crack. Photos are split before they are cropped.

    python examples/small_things.py --cracks road-cracks --sets cracks scratches
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from sklearn.datasets import load_sample_images
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn
from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

from pytorch_grad_cam_pcasvm import (
    ContributionCAM,
    PCASVMNet,
    SVMTarget,
    TiledNet,
    choose_patches,
    evaluation,
    extract_features,
    fit_model,
)

FINE, LAST = ["features.6", "features.13"], "features.18"
MEAN, STD = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]
NAMES = np.array(["good", "fault"])
SIDE = 320  # pixels of a crop
HEADS = ("pooled features", "good photos only", "folders, distance alone", "folders, maps teach", "masks")


class Photos(NamedTuple):
    """Photos and masks of their faults, of one size."""

    images: list[Image.Image]
    masks: np.ndarray

    @property
    def labels(self) -> np.ndarray:
        """The name of the class of each."""
        return NAMES[self.masks.any((1, 2)).astype(int)]  # type: ignore[no-any-return]


def crack_crops(folder: Path) -> tuple[Photos, Photos]:
    """Return crops of road photos, of every other photo to fit on, and of the rest."""
    parts: tuple[Any, Any] = (([], []), ([], []))
    for number, file in enumerate(sorted((folder / "images").iterdir())):
        photo = Image.open(file).convert("RGB")
        mask = np.asarray(Image.open(folder / "masks" / f"{file.stem}.png").convert("L"))
        mask = mask > (0 if mask.max() < 2 else 127)
        for x in range(0, photo.width - 159, 160):
            for y in range(0, photo.height - 159, 160):
                parts[number % 2][0].append(photo.crop((x, y, x + 160, y + 160)))
                parts[number % 2][1].append(mask[y : y + 160, x : x + 160])
    fit, test = (Photos(images, np.stack(masks)) for images, masks in parts)
    return fit, test


def draw_scratch(draw: ImageDraw.ImageDraw, random: np.random.Generator) -> None:
    """Draw a thin line of 20 to 50 pixels."""
    x, y = random.uniform(40, SIDE - 40, 2)
    angle, length = random.uniform(0, np.pi), random.uniform(20, 50)
    step = np.array([np.cos(angle), np.sin(angle)]) * length / 2
    draw.line([x - step[0], y - step[1], x + step[0], y + step[1]], fill=255, width=2)


def draw_stain(draw: ImageDraw.ImageDraw, random: np.random.Generator) -> None:
    """Draw a spot of 14 to 30 pixels."""
    (x, y), (width, height) = random.uniform(30, SIDE - 30, 2), random.uniform(7, 15, 2)
    draw.ellipse([x - width, y - height, x + width, y + height], fill=255)


def draw_grains(draw: ImageDraw.ImageDraw, random: np.random.Generator) -> None:
    """Draw four grains of 3 to 6 pixels, near each other."""
    for x, y in random.uniform(30, SIDE - 30, 2) + random.normal(size=(4, 2)) * 12:
        radius = random.uniform(1.5, 3)
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=255)


THINGS: dict[
    str, tuple[Callable[..., None], float, float]
] = {  # how they are drawn, their blur, and by what they change grey
    "scratches": (draw_scratch, 0.5, 70.0),
    "stains": (draw_stain, 4.0, -60.0),
    "grains": (draw_grains, 0.5, -110.0),
}


def pasted_photos(kind: str, count: int, seed: int, *, left: bool) -> Photos:
    """Return so many crops of the left or the right parts of photos, with a small thing in every other one."""
    random, images, masks = np.random.default_rng(seed), list[Image.Image](), list[np.ndarray]()
    draw_thing, blur, change = THINGS[kind]
    for number in range(count):
        photo = Image.fromarray(load_sample_images().images[number // 2 % 2])
        half = photo.width // 2
        photo = photo.crop((0, 0, half, photo.height) if left else (half, 0, photo.width, photo.height))
        side = random.uniform(0.5, 1) * photo.width
        x, y = random.uniform(0, photo.width - side), random.uniform(0, photo.height - side)
        crop = photo.resize((SIDE, SIDE), Image.Resampling.BICUBIC, (x, y, x + side, y + side))
        shape = Image.new("L", crop.size)
        if number % 2:
            draw_thing(ImageDraw.Draw(shape), random)
        soft = np.asarray(shape.filter(ImageFilter.GaussianBlur(blur)), np.float32)[..., None] / 255
        pixels = np.asarray(crop, np.float32) + change * soft / max(float(soft.max()), 1e-6)
        images.append(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
        masks.append(np.asarray(shape) > 127)
    return Photos(images, np.stack(masks))


def prepare(photos: Photos, size: int) -> tuple[Tensor, np.ndarray]:
    """Return photos as the network sees them, (N, 3, size, size), and masks of that size."""
    x = [
        torch.from_numpy(np.asarray(image.resize((size, size), Image.Resampling.BILINEAR)).copy())
        for image in photos.images
    ]
    images = (torch.stack(x).permute(0, 3, 1, 2) / 255 - MEAN) / STD
    masks = [Image.fromarray(mask).resize((size, size), Image.Resampling.NEAREST) for mask in photos.masks]
    return images, np.stack([np.asarray(mask) for mask in masks])


def batches(x: Tensor, labels: Any, count: int = 16) -> Iterator[Any]:
    """Yield images with their labels."""
    for start in range(0, len(x), count):
        yield x[start : start + count], labels[start : start + count]


def classifier(components: int) -> Any:
    """Return an SVM behind a PCA, not fitted."""
    return make_pipeline(StandardScaler(), PCA(components, random_state=0), SVC(class_weight="balanced"))


def networks(net: nn.Module, view: str) -> tuple[Any, Any, int]:
    """Return what gives features of patches and of photos, as (backbone, layer, pool), and the size of images."""
    if view != "tiles":
        return (net, FINE, ("dense", 3)), (net, LAST, "mean"), int(view)
    dense = TiledNet(net, FINE, "dense", tiles=(2, 2)).eval()
    assert dense.canvas is not None
    return (dense, None, ("dense", 3)), (TiledNet(net, LAST, "mean", tiles=(2, 2)).eval(), None, None), dense.canvas[0]


class Bench:
    """Photos to fit on and photos to measure, as a network sees them.

    Args:
        net: the network.
        view: the size of the photos, or ``"tiles"``.
        fit: photos to fit on.
        test: photos to measure.
    """

    def __init__(self, net: nn.Module, view: str, fit: Photos, test: Photos) -> None:
        (self.dense, self.layer, self.pool), (self.whole, last, mean), self.size = networks(net, view)
        (self.x, self.masks), (self.new, self.truth) = prepare(fit, self.size), prepare(test, self.size)
        self.labels, self.new_labels = fit.labels, test.labels
        self.loader = list(batches(self.x, self.labels))
        self.layers = [f"net.{name}" for name in FINE] if view == "tiles" else FINE
        self.model = fit_model(
            self.whole, self.loader, classifier(16), last, pool=mean, layers=self.layers, normal="good", progress=False
        )

    def measure(self, head: str) -> tuple[np.ndarray, float]:
        """Return the scores of a head at every pixel of the photos that are measured, and its AUROC of photos."""
        if head == "pooled features":
            with ContributionCAM(self.model.net, self.layers) as cam:
                maps = torch.cat([explain_faults(cam, part) for part, _ in batches(self.new, self.new)])
            values = score_classes(self.model.net, self.new)
            return spread(maps, self.size), self._area(values)
        rows, names = self._choose_rows(head)
        last: Any = SVC(class_weight="balanced") if names is not None else NearestNeighbors(n_neighbors=1)
        fitted = make_pipeline(StandardScaler(), PCA(64, random_state=0), last).fit(rows, names)
        net = PCASVMNet(self.dense, fitted, self.layer, pool=self.pool).eval()
        if names is None:
            scores = torch.cat([torch.from_numpy(net.anomaly_map(part)) for part, _ in batches(self.new, self.new)])
        else:
            scores = score_classes(net, self.new)
        return spread(scores, self.size), self._area(scores.flatten(1).amax(1))

    def _choose_rows(self, head: str) -> tuple[np.ndarray, Any]:
        """Return rows of patches and their classes; None: all are good."""
        good = self.labels == "good"
        options: Any = {"pool": self.pool, "progress": False}
        if head == "masks":
            pairs = list(batches(self.x, torch.from_numpy(self.masks).long()))
            sample = {"sample": 20_000 // len(self.x), "coverage": 0.2}
            rows, numbers = extract_features(self.dense, pairs, self.layer, **sample, **options)
            return rows, NAMES[numbers]
        if head == "folders, maps teach":
            return choose_patches(
                self.model, self.loader, self.layer, backbone=self.dense, layers=self.layers, **options
            )[:2]
        loader = list(batches(self.x[good], self.labels[good]))
        rows, names = extract_features(self.dense, loader, self.layer, sample=10_000 // int(good.sum()), **options)
        if head == "good photos only":
            return rows, None
        bank = make_pipeline(StandardScaler(), PCA(64, random_state=0), NearestNeighbors(n_neighbors=1)).fit(rows)
        far = PCASVMNet(self.dense, bank, self.layer, pool=self.pool).eval()
        others = list(batches(self.x[~good], self.labels[~good]))
        distances = np.concatenate([far.anomaly_map(part) for part, _ in others]).reshape(int((~good).sum()), -1)
        faults, _ = extract_features(self.dense, others, self.layer, **options)
        picked = np.argsort(-distances, 1)[:, :3] + np.arange(len(distances))[:, None] * distances.shape[1]
        faults = faults[picked.ravel()]
        return np.concatenate([rows, faults]), np.concatenate([names, np.full(len(faults), "fault")])

    def _area(self, values: Tensor) -> float:
        """Return the area under the ROC curve of photos."""
        return float(roc_auc_score(self.new_labels == "fault", values.numpy()))


def score_classes(net: PCASVMNet, x: Tensor) -> Tensor:
    """Return by how much a fault is ahead in images, (N,), or at each of their positions, (N, h, w)."""
    first = net.head.class_index("fault")
    with torch.no_grad():
        margins = torch.cat([net(part).margins for part, _ in batches(x, x)])
    return margins[:, first] - margins[:, 1 - first]


def explain_faults(cam: ContributionCAM, x: Tensor) -> Tensor:
    """Return what raises the decision for a fault, (N, h, w), from where it is undecided, or else from the mean."""
    targets = [SVMTarget("fault", versus="good")]
    try:
        maps = cam.explain(x, targets)
    except ValueError:  # nothing near the mean is undecided
        cam.baseline = "mean"
        maps = cam.explain(x, targets)
    return maps.maps[:, 0]


def spread(maps: Tensor, size: int) -> np.ndarray:
    """Return maps at the size of the images."""
    return nn.functional.interpolate(maps[:, None].float(), (size, size), mode="bilinear")[:, 0].numpy()  # type: ignore[no-any-return]


def load_network(weights: Path | None) -> nn.Module:
    """Return MobileNetV2 with weights of ImageNet: torchvision's, or those in a file."""
    if weights is None:
        return mobilenet_v2(weights=MobileNet_V2_Weights.IMAGENET1K_V1).eval()
    net = mobilenet_v2()
    net.load_state_dict({name: value.float() for name, value in torch.load(weights, weights_only=True).items()})
    return net.eval()


def write_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return measurements as a table in Markdown."""
    columns = ["set", "seen at", "fitted on", "photos", "pixels", "AUPRO", "pointing", "found"]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in columns[3:6]] + [f"{row[name]:.2f}" for name in columns[6:]]
        lines.append([row[name] for name in columns[:3]] + numbers)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="state dict of MobileNetV2 (default: torchvision's, downloaded)")
    parser.add_argument("--cracks", type=Path, help="folder of CrackForest, with images and masks")
    parser.add_argument("--sets", nargs="+", default=[*THINGS], choices=["cracks", *THINGS])
    parser.add_argument("--views", nargs="+", default=["224", "448", "tiles"], choices=["224", "448", "tiles"])
    parser.add_argument("--photos", type=int, default=100, help="of each pasted set to fit on, and as many to measure")
    parser.add_argument("--out", type=Path, default=Path("small_things.json"))
    options = parser.parse_args(arguments)
    net, rows = load_network(options.weights), list[dict[str, Any]]()
    for name in options.sets:
        pair = (
            crack_crops(options.cracks)
            if name == "cracks"
            else [pasted_photos(name, options.photos, seed, left=not seed) for seed in (0, 1)]
        )
        for view in options.views:
            bench = Bench(net, view, *pair)
            seen = {"tiles": f"2x2 tiles of 224, on {bench.size}"}.get(view, view)
            for head in HEADS:
                started = time.monotonic()
                values, area = bench.measure(head)
                scores = evaluation.pixel_scores(values, bench.truth)
                assert scores.found is not None
                means = (area, scores.auroc.mean, scores.aupro.mean, scores.pointing.mean, scores.found.faults.mean)
                numbers = dict(zip(("photos", "pixels", "AUPRO", "pointing", "found"), map(float, means), strict=True))
                rows.append({"set": name, "seen at": seen, "fitted on": head, **numbers, "rate": scores.found.rate})
                print(write_table(rows[-1:]).splitlines()[-1], f"{time.monotonic() - started:.0f} s", flush=True)
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*coarse.*")
    main()
