"""Cases that checks run over: networks of eight features with their target layers, and heads on these, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sklearn.decomposition import PCA, KernelPCA
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.ensemble import StackingClassifier
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline, make_union
from sklearn.preprocessing import PowerTransformer, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC, OneClassSVM
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


@dataclass(frozen=True)
class HeadCase:
    """A head.

    Attributes:
        pipeline: of scikit-learn, not fitted.
        classes: number of classes to fit it on.
        exported: whether programs are made of it.
    """

    pipeline: Pipeline
    classes: int = 3
    exported: bool = True


def reduced(*steps: Any, **options: Any) -> HeadCase:
    """Return a head on four components."""
    return HeadCase(make_pipeline(StandardScaler(), PCA(4), *steps), **options)


HEADS = {
    "RBF": reduced(SVC()),
    "gamma=10": reduced(SVC(gamma=10.0)),
    "two classes": HeadCase(make_pipeline(PCA(4, whiten=True), SVC(class_weight="balanced")), classes=2),
    "polynomial": reduced(SVC(kernel="poly", degree=2, coef0=0.5)),
    "sigmoid": reduced(SVC(kernel="sigmoid", gamma=0.1)),
    "linear": reduced(LinearSVC()),
    "logistic": reduced(LogisticRegression()),
    "one class": reduced(OneClassSVM()),
    "regression": reduced(SVR()),
    "KernelPCA": HeadCase(make_pipeline(StandardScaler(), KernelPCA(4, kernel="rbf"), SVC())),
    "Nystroem": reduced(Nystroem(n_components=10, random_state=0), LinearSVC()),
    "neighbours": reduced(KNeighborsClassifier(3), exported=False),
    "likelihoods": HeadCase(
        make_pipeline(StandardScaler(), PowerTransformer(), PCA(4), QuadraticDiscriminantAnalysis()), exported=False
    ),
    "perceptron": reduced(MLPClassifier((5,), max_iter=20, random_state=0), exported=False),
    "stack": HeadCase(
        make_pipeline(
            make_union(PCA(2), KernelPCA(2, kernel="rbf")), StackingClassifier([("a", LinearSVC())], LinearSVC(), cv=2)
        ),
        exported=False,
    ),
}
