"""Test problems: small networks of the paper's shape with fitted heads, as data with a readable id."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm import PCASVMNet, extract_features

ACTIVATIONS = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU}


class Backbone(nn.Module):
    """Convolutions to T maps, then dense layers 12, 9 and the classes, as in the paper's Fig. 1."""

    def __init__(self, activation: str = "relu", channels: int = 3, classes: int = 3, inplace: bool = False) -> None:
        super().__init__()
        relu = {"inplace": inplace} if activation == "relu" else {}
        act = ACTIVATIONS[activation]
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3)
        )
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Linear(5 * 4 * 4, 12), act(**relu), nn.Dropout(), nn.Linear(12, 9), act(**relu), nn.Linear(9, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.flatten(self.features(x)))


@dataclass(frozen=True)
class Problem:
    """A backbone with PCA and SVM behind its second dense layer, and a batch of images."""

    activation: str = "relu"
    kernel: str = "rbf"
    classes: int = 3
    components: int = 4
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    seed: int = 0
    n: int = 5

    def __str__(self) -> str:
        return f"{self.activation}-{self.kernel}-C{self.classes}-B{self.components}-{str(self.dtype)[6:]}-{self.device}"

    @cached_property
    def backbone(self) -> Backbone:
        torch.manual_seed(self.seed)
        return Backbone(self.activation, classes=self.classes).to(self.device, self.dtype).eval()

    @cached_property
    def labels(self) -> np.ndarray:
        return np.array(["ant", "bee", "cat", "dog", "elk"][: self.classes])

    @cached_property
    def head(self) -> Any:
        generator = torch.Generator().manual_seed(self.seed)
        index = torch.arange(60) % self.classes
        images = torch.randn(60, 3, 12, 12, generator=generator, dtype=torch.float64) + index.reshape(-1, 1, 1, 1)
        loader = [(images.to(self.device, self.dtype), index)]
        features, labels = extract_features(self.backbone, loader, "classifier.4", progress=False)
        head = make_pipeline(StandardScaler(), PCA(self.components), SVC(kernel=self.kernel, C=2.0))
        return head.fit(features.astype(np.float64), self.labels[labels])

    @cached_property
    def net(self) -> PCASVMNet:
        return PCASVMNet(self.backbone, self.head, layer="classifier.4").eval()

    @property
    def target_layer(self) -> nn.Module:
        return self.backbone.features[-1]

    @cached_property
    def x(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        shift = (torch.arange(self.n) % self.classes).reshape(-1, 1, 1, 1)
        x = torch.randn(self.n, 3, 12, 12, generator=generator, dtype=torch.float64) + shift
        return x.to(self.device, self.dtype)


# The six rows of the paper's table of closed forms (PCA rows come with each).
TABLE = [Problem(activation, kernel, classes=2) for activation in ACTIVATIONS for kernel in ("linear", "rbf")]
