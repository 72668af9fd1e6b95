"""Where a 3-D CNN, its principal components and an RBF SVM look in volumes: spheres against cubes, in noise.

The script trains a small 3-D CNN on synthetic volumes, and fits PCA and an RBF SVM on its pooled features. It prints
their accuracy, and how much of the evidence lies on the object. For one volume it writes the maps, in the geometry of
the input, as NIfTI for any viewer of medical images, and a figure of slices. It needs no download and no GPU:

    python examples/volume.py
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from sklearn.decomposition import PCA
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm import (
    BlankMapWarning,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SignedMaps,
    SVMTarget,
    extract_features,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.figures import plot_volume

CLASSES = ("sphere", "cube")
SIZE = (24, 24, 24)  # voxels along D, H and W
SPACING = (1.5, 1.0, 1.0)  # of voxels, in millimetres
AFFINE = np.array([[1.5, 0, 0, -18], [0, 1, 0, -12], [0, 0, 1, -12], [0, 0, 0, 1]])  # from voxels to millimetres
COMPONENTS = 3
TARGET_LAYER, FEATURE_LAYER = "features.4", "pool"  # the second ReLU, 12x12x12 positions; and 32 features


class Shapes(Dataset[dict[str, Tensor]]):
    """Spheres and cubes of equal volume at random places in noise; each row a dict, as in MONAI.

    Attributes:
        images: shape (N, 1, D, H, W).
        masks: where the object is, shape (N, D, H, W).
        labels: 0 for a sphere, 1 for a cube, shape (N,).
    """

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        voxels = np.stack(np.meshgrid(*map(np.arange, SIZE), indexing="ij"), -1)
        self.labels = torch.arange(count) % 2
        masks = []
        for label in self.labels.tolist():
            radius = rng.uniform(5, 7.5)
            half_edge = radius * (np.pi / 6) ** (1 / 3)  # of a cube as large as the sphere: brightness tells nothing
            away = np.abs(voxels - rng.uniform(radius + 1, np.array(SIZE) - radius - 2))
            masks.append(away.max(-1) < half_edge if label else (away**2).sum(-1) < radius**2)
        self.masks = torch.from_numpy(np.stack(masks))
        clouds = gaussian_filter(rng.standard_normal(self.masks.shape), (0, 3, 3, 3))
        noise = 0.25 * rng.standard_normal(self.masks.shape) + 0.25 * clouds / clouds.std()
        self.images = (self.masks + torch.from_numpy(noise)).float().unsqueeze(1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"image": self.images[row], "label": self.labels[row]}


class VolumeCNN(nn.Module):
    """Three 3-D convolutions, 24 -> 12 -> 6 voxels along each side, the largest value of each channel, two scores."""

    def __init__(self) -> None:
        super().__init__()
        # Without a bias, where nothing is there is no activation, and so no evidence.
        self.features = nn.Sequential(
            *(nn.Conv3d(1, 8, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool3d(2)),
            *(nn.Conv3d(8, 16, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool3d(2)),
            *(nn.Conv3d(16, 32, 3, padding=1, bias=False), nn.ReLU()),
        )
        self.pool = nn.Sequential(nn.AdaptiveMaxPool3d(1), nn.Flatten())
        self.classifier = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (N, 2) of volumes (N, 1, D, H, W)."""
        return self.classifier(self.pool(self.features(x)))


def train_cnn(dataset: Shapes, seed: int, epochs: int) -> VolumeCNN:
    """Train on the CPU, where the same seed gives the same network."""
    torch.manual_seed(seed)
    cnn = VolumeCNN()
    optimizer = torch.optim.Adam(cnn.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    for _ in tqdm(range(epochs), desc="training", unit="epoch"):
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(cnn(batch["image"]), batch["label"]).backward()
            optimizer.step()
    return cnn.eval()


def fit_head(features: np.ndarray, labels: np.ndarray) -> Pipeline:
    """Fit what comes behind the CNN: scaling, PCA and an RBF SVM."""
    return make_pipeline(StandardScaler(), PCA(COMPONENTS), SVC()).fit(features, labels)


@torch.no_grad()
def cnn_accuracy(cnn: VolumeCNN, dataset: Shapes) -> float:
    """Return the share of volumes that the CNN alone classifies right."""
    return (cnn(dataset.images).argmax(1) == dataset.labels).float().mean().item()


def on_object(maps: SignedMaps, masks: Tensor) -> float:
    """Return the mean share of the positive evidence (of one target) that lies on the object; blank maps have none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BlankMapWarning)
        positive = maps.positive(SIZE, scale="none")[:, 0]
    inside, everywhere = ((positive * where).sum((1, 2, 3)) for where in (masks, torch.ones_like(masks)))
    return (inside / everywhere.clamp_min(1e-12)).mean().item()


def in_input_geometry(maps: SignedMaps) -> np.ndarray:
    """Return the signed maps voxel by voxel of the input, shape (N, K, D, H, W)."""
    return F.interpolate(maps.maps, SIZE, mode="trilinear", align_corners=False).numpy()


def write_array(file: Path, array: np.ndarray, affine: np.ndarray) -> Path:
    """Write a volume (D, H, W) as NIfTI with the affine of the input, or without nibabel as .npy.

    The axes keep their order: D, H, W are i, j, k of the file that the input came from, as nibabel and MONAI read it.

    Returns:
        The file, with its ending.
    """
    try:
        import nibabel
    except ImportError:
        file = file.with_name(f"{file.name}.npy")
        np.save(file, array)
    else:
        file = file.with_name(f"{file.name}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(array, affine), file)
    return file


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, fit, explain, write, draw."""
    parser = argparse.ArgumentParser(description="Maps of a 3-D CNN, PCA and an RBF SVM: spheres against cubes.")
    parser.add_argument("--out", type=Path, default=Path("volume.png"), help="the figure (default: volume.png)")
    parser.add_argument("--row", type=int, default=1, help="the test volume: even a sphere, odd a cube (default: 1)")
    parser.add_argument("--epochs", type=int, default=10, help="of the CNN (default: 10)")
    parser.add_argument("--volumes", type=int, default=240, help="to train on; a quarter of it to test (default: 240)")
    parser.add_argument("--seed", type=int, default=0, help="of the volumes and of the CNN (default: 0)")
    args = parser.parse_args(arguments)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    torch.set_num_threads(1)  # the same seed then gives the same network, however many cores there are

    train, test = Shapes(args.volumes, args.seed), Shapes(args.volumes // 4, args.seed + 1)
    cnn = train_cnn(train, args.seed, args.epochs)
    loaders = [DataLoader(part, 64) for part in (train, test)]
    features, labels = zip(*(extract_features(cnn, loader, FEATURE_LAYER) for loader in loaders), strict=True)
    head = fit_head(features[0], labels[0])
    print(f"\n{'accuracy':<12}{'train':>8}{'test':>8}")
    print(f"{'CNN':<12}" + "".join(f"{cnn_accuracy(cnn, part):>8.3f}" for part in (train, test)))
    print(f"{'RBF SVM':<12}" + "".join(f"{head.score(*of):>8.3f}" for of in zip(features, labels, strict=True)))

    net = PCASVMNet(cnn, head, FEATURE_LAYER)
    # What an average volume gives: red is what this one has more of.
    mean = mean_activations(net, loaders[0], TARGET_LAYER)
    with ContributionCAM(net, [TARGET_LAYER], mean=mean) as cam:
        share = on_object(cam.explain(test.images, SVMTarget()), test.masks)
        maps = cam.explain(test.images[[args.row]], [SVMTarget(), *map(PCATarget, range(COMPONENTS))])
    fills = test.masks.float().mean().item()
    print(f"\n{share:.0%} of the positive evidence for the predicted shape lies on the object,")
    print(f"which fills {fills:.1%} of the volume (mean of {len(test)} test volumes)\n")

    names = ["margin", *(f"p{b + 1}" for b in range(COMPONENTS))]
    arrays = {"input": test.images[args.row, 0].numpy(), **dict(zip(names, in_input_geometry(maps)[0], strict=True))}
    written = [
        write_array(args.out.with_name(f"{args.out.stem}-{name}"), array, AFFINE) for name, array in arrays.items()
    ]
    print("arrays in the geometry of the input:", ", ".join(map(str, written)))
    if written[0].suffix == ".npy":
        print("nibabel is not installed (pip install nibabel): they are .npy, without their affine, not NIfTI")
    title = f"a {CLASSES[labels[1][args.row]]} in noise"
    volume, mask = test.images[[args.row]], test.masks[[args.row]]
    plot_volume(volume, maps, title=title, classes=CLASSES, spacing=SPACING, outline=mask).savefig(args.out)
    print(f"{args.out}: {time.perf_counter() - start:.1f} s in all")


if __name__ == "__main__":
    main()
