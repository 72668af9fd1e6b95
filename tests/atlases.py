"""A small network, head and data set for the tests of atlases."""

import os
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pytorch_grad_cam_pcasvm import PCASVMNet, extract_features
from pytorch_grad_cam_pcasvm.studio.atlas import disk


def backbone(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU())
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


def images(count: int, classes: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    return torch.randn(count, 3, 12, 12, generator=generator) + labels.reshape(-1, 1, 1, 1) / 2, labels


@cache
def problem(kernel: str = "rbf", classes: int = 3, components: int = 4) -> tuple[PCASVMNet, TensorDataset]:
    """Return a net and a data set of 90 images."""
    x, labels = images(90, classes)
    net = backbone()
    features, y = extract_features(net, [(x, labels)], progress=False)
    head = make_pipeline(StandardScaler(), PCA(components), SVC(kernel=kernel))
    return PCASVMNet(net, head.fit(features, y)).eval(), TensorDataset(x, labels)


def layer(net: PCASVMNet) -> nn.Module:
    return net.backbone[0]


class Pictures(Dataset[Any]):
    """Images that some rows do not have."""

    def __init__(self, data: TensorDataset, missing: tuple[int, ...]) -> None:
        self.data, self.missing = data, missing

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        if row in self.missing:
            raise FileNotFoundError(f"no file for {row}")
        return self.data[row]


class Counted(Pictures):
    """Images that note which rows were read."""

    def __init__(self, data: TensorDataset) -> None:
        super().__init__(data, ())
        self.read: list[int] = []

    def __getitem__(self, row: int) -> Any:
        self.read.append(row)
        return super().__getitem__(row)


class Odd(Pictures):
    """Images of which the missing ones are read with a warning."""

    def __getitem__(self, row: int) -> Any:
        if row in self.missing:
            warnings.warn("odd metadata", UserWarning, stacklevel=2)
        return self.data[row]


class Slow(Pictures):
    """Images that take their time, in seconds."""

    def __init__(self, data: TensorDataset, seconds: float) -> None:
        super().__init__(data, ())
        self.seconds = seconds

    def __getitem__(self, row: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(row)


class Deadly(Pictures):
    """Images of which the missing ones kill the process that reads them, the first ``lives`` times."""

    def __init__(self, data: TensorDataset, missing: tuple[int, ...], deaths: Path, lives: int) -> None:
        super().__init__(data, missing)
        self.deaths, self.lives = deaths, lives

    def __getitem__(self, row: int) -> Any:
        if row in self.missing and len(list(self.deaths.iterdir())) < self.lives:
            tempfile.mkstemp(dir=self.deaths)
            os._exit(1)
        return self.data[row]


def folder(root: Path, count: int = 6) -> Path:
    """Write PNG images, one folder for each class."""
    for number in range(count):
        path = root / ["cat", "dog"][number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    return root


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.iterdir()) if path.name != disk.LOCK}
