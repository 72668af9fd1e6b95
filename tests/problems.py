"""Test problems: small networks of the paper's shape with fitted heads, as data with a readable id."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from heads import HEADS, REDUCED
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm import Head, PCASVMNet, PCATarget, SVMTarget, extract_features

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


# --- one stem, many paths behind it, many heads -----------------------------------------------------------------------

T = 5  # channels of the target layer, "features"
# Of images; of the target layer it is half.
SIZES = {"plane": (6, 8), "small": (4, 6), "square": (8, 8), "volume": (4, 4, 6)}


class Step(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class SqueezeExcite(nn.Module):
    """Every channel times what a small dense network makes of all their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(channels, 3), nn.ReLU(), nn.Linear(3, channels), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3)))[..., None, None]


class Skip(nn.Module):
    """A residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def _dense(act: type[nn.Module], width: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(width, 12), act(), nn.Linear(12, 9), act()]


def _pooled(*layers: nn.Module) -> list[nn.Module]:
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()]


# Tails behind T channels at so many positions.
PATHS: dict[str, Any] = {
    "relu": lambda positions: _dense(nn.ReLU, T * positions),
    "sigmoid": lambda positions: _dense(nn.Sigmoid, T * positions),
    "gelu": lambda positions: _dense(nn.GELU, T * positions),
    "pooled": lambda positions: _pooled(),
    "max pool": lambda positions: [nn.MaxPool2d((3, 2), 1), *_pooled(nn.Conv2d(T, 7, 1), nn.ReLU())],
    "max pool apart": lambda positions: [nn.MaxPool2d((1, 2)), *_pooled(nn.Conv2d(T, 7, 1), nn.ReLU())],
    "average pool": lambda positions: [nn.AvgPool2d(2, 1), *_pooled(nn.Conv2d(T, 7, 2), nn.ReLU())],
    "layer norm": lambda positions: [nn.Flatten(), nn.Linear(T * positions, 12), nn.LayerNorm(12), nn.GELU(),
                                     nn.Linear(12, 9), nn.LayerNorm(9)],
    "squeeze-excite": lambda positions: _pooled(SqueezeExcite(T), nn.Conv2d(T, 7, 1), nn.ReLU()),
    "batch norm": lambda positions: _pooled(nn.Conv2d(T, 7, 3, padding=1), nn.BatchNorm2d(7), nn.Hardswish()),
    "skip": lambda positions: _pooled(Skip(T), nn.MaxPool2d(2)),
}  # fmt: skip


class Tailed(nn.Module):
    """A stem, the target layer ``features`` at its end, and one of PATHS behind it; float64."""

    def __init__(self, path: str, size: tuple[int, ...], *, rectified: bool = False) -> None:
        super().__init__()
        conv, pool = (nn.Conv3d, nn.MaxPool3d) if len(size) == 3 else (nn.Conv2d, nn.MaxPool2d)
        last = [nn.ReLU()] if rectified else []
        self.features = nn.Sequential(conv(3, 6, 3, padding=1), nn.ReLU(), pool(2), conv(6, T, 3, padding=1), *last)
        positions = int(np.prod(size)) // 2 ** len(size)
        tail = PATHS[path](positions)
        if len(size) == 3:
            tail = [nn.AdaptiveAvgPool3d(1) if isinstance(m, nn.AdaptiveAvgPool2d) else m for m in tail]
        self.tail = nn.Sequential(*tail)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.features(x))


# Rows of heads.py, and a reduction alone.
FITTED = [
    *("linear", "rbf", "poly", "sigmoid", "whitened", "normalised", "kernel pca", "calibrated", "one vs rest"),
    *("regressor", "one class", "no reduction", "no machine", "quadratic"),
]


@dataclass(frozen=True)
class Explained:
    """A network of PATHS with a head of FITTED, fitted on what its features are, and images to explain."""

    path: str = "relu"
    head: str = "rbf"
    classes: int = 3
    dtype: torch.dtype = torch.float64
    size: str = "plane"
    rectified: bool = False
    n: int = 3

    def __str__(self) -> str:
        rectified = ["rectified"] if self.rectified else []
        return "-".join([self.path, self.head, f"C{self.classes}", str(self.dtype)[6:], self.size, *rectified])

    def images(self, count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(count, 3, *SIZES[self.size], generator=generator, dtype=torch.float64)
        shift = torch.arange(count) % self.classes
        return (noise + shift.reshape(-1, *[1] * (noise.dim() - 1))).to(self.dtype)

    @cached_property
    def backbone(self) -> Tailed:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            backbone = Tailed(self.path, SIZES[self.size], rectified=self.rectified)
        # Random networks are nearly linear: with larger weights the steps along the path count.
        for parameter in backbone.parameters():
            parameter.data *= 1.5
        if self.rectified:
            backbone.features[3].bias.data[1] = -100.0  # a channel that is 0 everywhere
        for module in backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean += 0.3
                module.running_var *= 0.5
        return backbone.to(self.dtype).eval().requires_grad_(requires_grad=False)

    @property
    def labels(self) -> list[str]:
        return ["ant", "bee", "cat", "dog", "elk"][: self.classes]

    @cached_property
    def fitted(self) -> Any:
        features = self.backbone(self.images(60, seed=4)).double().numpy()
        index = np.arange(60) % self.classes
        known = np.array(self.labels)[index]
        if self.head in ("regressor", "one class", "no machine"):
            known = features[:, 0] + index
        pipeline = clone(make_pipeline(*REDUCED)) if self.head == "no machine" else HEADS[self.head].make()
        return pipeline.fit(features, known)

    @cached_property
    def net(self) -> PCASVMNet:
        return PCASVMNet(self.backbone, self.fitted).eval()

    @cached_property
    def x(self) -> Tensor:
        return self.images(self.n, seed=5)

    @property
    def layer(self) -> nn.Module:
        return self.backbone.features

    @property
    def targets(self) -> list[Any]:
        """Every kind of target that the head knows and that is linear in what it decides by."""
        components = [] if self.head == "no reduction" else [PCATarget(0), PCATarget(3), PCATarget(1, "-")]
        if self.head == "no machine":
            return components
        if self.head in ("regressor", "one class"):
            return [*components, SVMTarget(), SVMTarget(sign="-")]
        first, second = self.labels[:2]
        margins = [SVMTarget(label) for label in self.labels]
        pairs = [SVMTarget(first, versus=second), SVMTarget(second, versus="runner-up"), SVMTarget(versus="runner-up")]
        return [*components, SVMTarget(), SVMTarget(first, sign="-"), *margins, *pairs]


@cache
def explained(*args: Any, **kwargs: Any) -> Explained:
    """Return a problem that is fitted once for all tests of a session."""
    return Explained(*args, **kwargs)


def damaged(content: bytes) -> Iterator[bytes]:
    """Yield the content of a file with a bit flipped, 300 times another one, and cut off."""
    random = np.random.default_rng(0)
    for bit in random.integers(8 * len(content), size=300).tolist():
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    for end in random.integers(len(content), size=30).tolist():
        yield content[:end]


def closed_form(fitted: Any, **options: Any) -> Head:
    """A head whose decision has a gradient; or the error that methods raise which need one."""
    head = Head.of(fitted, **options)
    if head.enumerated is not None:
        head.enumerated.pullback(torch.zeros(1), torch.zeros(1))
    return head
