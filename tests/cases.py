"""Cases that checks run over: networks of eight features with their target layers, and heads on these, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heads import HEADS
from torch import Tensor, nn
from towers import Tower

from pytorch_grad_cam_pcasvm import TiledNet


class FirstToken(nn.Module):
    """The features of a transformer: its class token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


@dataclass(frozen=True)
class Network:
    """A network of images (N, 3, 8, 8).

    Attributes:
        make: returns the network.
        layers: its target layers.
        transform: how their activations become maps, None: by themselves.
        exported: whether programs are made of it.
    """

    make: Callable[[], nn.Module]
    layers: Sequence[str]
    transform: str | None = None
    exported: bool = True


def convolutions() -> list[nn.Module]:
    return [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.ReLU()]


def pooled() -> nn.Module:
    return nn.Sequential(*convolutions(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def dense() -> nn.Module:
    return nn.Sequential(*convolutions(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 8), nn.ReLU())


def tiles() -> nn.Module:
    tile = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return TiledNet(tile.eval(), tiles=(3, 3), overlap=0.5, size=4)


def tokens() -> nn.Module:
    return nn.Sequential(Tower(width=8, fused=True), FirstToken())


NETWORKS = {
    "pooled": Network(pooled, ["4"]),
    "behind a layer": Network(pooled, ["2"]),
    "dense": Network(dense, ["4"]),
    "several layers": Network(pooled, ["2", "4"]),
    "tokens": Network(tokens, ["0.blocks.0"], "tokens"),
    "tiles": Network(tiles, ["net.1"], exported=False),
}


# Heads on their features, rows of heads.py; programs are made of the first.
EXPORTED = [
    *("rbf", "gamma=10", "two classes", "quadratic", "sigmoid", "one vs rest", "probable, LogisticRegression"),
    *("one class", "regressor", "kernel pca", "Nystroem(n_components=20, random_state=0), LinearSVC"),
]
FITTED = [*EXPORTED, "neighbours", "likelihoods", "perceptron", "stack of components"]


def count_classes(head: str) -> int:
    return 2 if HEADS[head].classes == (2,) else 3
