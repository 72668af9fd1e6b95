"""Small networks and heads, of which messages are asked, and which follow their advice."""

import atexit
import copy
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import Step, closed_form, explained
from sklearn.decomposition import PCA
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from torch import Tensor, nn
from ways_table import Row

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ClosedFormShapleyCAM,
    ContributionCAM,
    Head,
    PCASVMNet,
    PCATarget,
    SignedMaps,
    SVMTarget,
    TiledNet,
    export,
    extract_features,
    figures,
    register_jacobian,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Stepped(nn.Module):
    """A step behind ``stem``, (N, 4, 6, 6), and ``later`` behind it, if it leaves that shape."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.stem, self.step, self.later = nn.Conv2d(3, 4, 3, padding=1), step, nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.step(self.stem(x).tanh())
        return self.later(y).tanh().flatten(1) if y.shape[1:] == (4, 6, 6) else y.flatten(1)


IMAGES = random(40, 3, 6, 6) + (torch.arange(40) % 2).reshape(-1, 1, 1, 1)


def head_for(backbone: nn.Module, images: Any = IMAGES, **options: Any) -> Any:
    labels = torch.arange(len(images)) % 2
    features, y = extract_features(backbone, [(images, labels)], progress=False, **options)
    return make_pipeline(StandardScaler(), PCA(2), SVC()).fit(features, y)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double().eval()


def stepped(
    step: Callable[[Tensor], Tensor] | nn.Module,
    method: Any = ClosedFormGradCAM,
    layer: Any = "stem",
    targets: Any = None,
    images: torch.Tensor | None = None,
    **options: Any,
) -> SignedMaps:
    """Return the maps of a network with such a step, behind which the head was fitted."""
    backbone = seeded(lambda: Stepped(step if isinstance(step, nn.Module) else Step(step)))
    net = PCASVMNet(backbone, head_for(backbone)).eval()
    cam = method(net, layer if isinstance(layer, list) else [layer], **options)
    return cam.explain(IMAGES[:3] if images is None else images, targets)


def maps_behind(backbone: nn.Module, layer: str, x: Tensor = IMAGES, count: int = 3, **options: Any) -> SignedMaps:
    """Return gradient maps of a network behind which a head was fitted."""
    net = PCASVMNet(backbone, head_for(backbone, x)).eval()
    return ClosedFormGradCAM(net, [layer], **options).explain(x[:count])


def path(place: str, message: str, step: Any, ways: dict[str, Any] | None = None) -> Row:
    """Return the row of a step that Grad-CAM refuses: jacobian="auto" is a way out of all of them."""
    by_autograd = {"pass jacobian='auto'": partial(stepped, step, jacobian="auto")}
    return Row(place, partial(stepped, step), message, by_autograd | (ways or {}))


def secant(place: str, message: str, step: Any, ways: dict[str, Any]) -> Row:
    """Return the row of a step that contributions refuse."""
    return Row(place, contributions(step), message, ways)


def contributions(step: Any) -> Callable[[], SignedMaps]:
    return partial(stepped, step, ContributionCAM, baseline="zero")


BACKBONE = seeded(
    lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
)
PICTURES = random(120, 3, 6, 6) + torch.eye(3).repeat(40, 1)[..., None, None]
with torch.no_grad():
    FEATURES = StandardScaler().fit_transform(BACKBONE(PICTURES).numpy())
FEATURES = FEATURES + 0.3 * np.random.default_rng(0).normal(size=FEATURES.shape)
THREE = np.arange(120) % 3
TWO = (THREE == 0).astype(int)
COLUMNS = np.eye(3, dtype=int)[THREE]  # one for each class


def head_of(estimator: Any, y: Any = THREE) -> Head:
    return closed_form(estimator.fit(FEATURES, y))


def maps_of(estimator: Any, y: Any = THREE, targets: Any = None, method: Any = ClosedFormGradCAM) -> SignedMaps:
    """Return the maps of a head that is fitted here, or of a list of fitted estimators."""
    fitted = estimator if isinstance(estimator, list | Head) else estimator.fit(FEATURES, y)
    net = PCASVMNet(BACKBONE, fitted).eval()
    usual = PCATarget(0) if net.head.decision_position is None else None
    usual = SVMTarget(0) if y is COLUMNS else usual
    return method(net, ["0"]).explain(PICTURES[:4], targets or usual)


def head(place: str, message: str, estimator: Any, ways: dict[str, Any], y: Any = THREE, targets: Any = None) -> Row:
    """Return the row of an estimator that is refused; for each way out, another one, or a function, or a reason."""
    follow = {
        way: other if callable(other) or isinstance(other, str) else partial(maps_of, other, y, targets)
        for way, other in ways.items()
    }
    by_values = partial(maps_of, estimator, y, method=ContributionCAM)
    return Row(place, partial(head_of, estimator, y), message, follow, by_values)


class Crops(nn.Module):
    """Four crops of each image in one batch: features (N, 4, 5), or with ``rows``, (4 N, 5)."""

    def __init__(self, *, rows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.rows = rows
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x.flatten(0, 1))
        return features if self.rows else features.unflatten(0, (len(x), -1))


class MeanOfCrops(Crops):
    """The mean of the crops' features, (N, 5)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


CROPS = random(40, 4, 3, 6, 6) + (torch.arange(40) % 2).reshape(-1, 1, 1, 1, 1)


def beside(t: Tensor) -> Tensor:
    return t.unflatten(0, (-1, 4)).transpose(1, 2).flatten(2, 3)


def crops(how: str, method: Any = ClosedFormGradCAM, transform: Any = beside) -> SignedMaps:
    """Return maps of four crops of each image, whose mean is taken by a pool or in the network."""
    backbone = MeanOfCrops() if how == "in the network" else Crops(rows=how == "rows")
    pool = {"rows": lambda t: t.unflatten(0, (-1, 4)).mean(1), "pooled": lambda t: t.mean(1), "in the network": None}[
        how
    ]
    net = PCASVMNet(backbone, head_for(backbone, CROPS, pool=pool), pool=pool).eval()
    return method(net, ["body.1"], transform).explain(CROPS[:3])


def net_at(pool: str) -> PCASVMNet:
    rows, _ = extract_features(BACKBONE, [PICTURES[:20]], "0", pool=pool, progress=False)
    return PCASVMNet(
        BACKBONE, make_pipeline(PCA(2), SVC()).fit(rows, rows[:, 0] > np.median(rows[:, 0])), "0", pool=pool
    )


def at_a_place(pool: str) -> SignedMaps:
    return ContributionCAM(net_at(pool).eval(), ["0"], baseline="zero").explain(PICTURES[:2], SVMTarget(at=(1, 1)))


RULES, CONTEXT, PROGRAM = "rules/", "starts/run.py: ", "studio/export/graph.py: "


def bessel(*, secant: Any = "elementwise", rule: Any = None) -> None:
    """Register a rule of torch.special.i0, which has none in the package."""

    def slope(input: Tensor, *, y: Tensor, grad: Tensor) -> Tensor:
        return grad * torch.special.i1(input)

    register_jacobian(torch.special.i0, secant=secant)(rule or slope)


LATER, BY_GRADIENT = "choose a later target layer", "use a gradient method such as ClosedFormGradCAM"


class OwnTarget:
    """A function of the output that is no target of the package."""

    def __call__(self, output: Tensor) -> Tensor:
        return output[..., 0].square()


@cache
def folder() -> Path:
    """Return a folder that is deleted at the end."""
    temporary = tempfile.TemporaryDirectory()
    atexit.register(temporary.cleanup)
    return Path(temporary.name)


NUMBERING = count()


def as_error(function: Callable[[], Any]) -> Any:
    """Raise the package's own warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return function()


def net_of(estimator: Any, y: Any = THREE) -> PCASVMNet:
    return PCASVMNet(BACKBONE, estimator.fit(FEATURES, y)).eval()


def of_components(method: Any = ContributionCAM, targets: Any = None) -> SignedMaps:
    net = net_of(make_pipeline(StandardScaler(), PCA(3), LinearSVC()))
    return method(net, ["0"]).explain(PICTURES[:3], targets)


def of_volumes() -> tuple[Tensor, SignedMaps]:
    problem = explained("pooled", size="volume")
    return problem.x.sigmoid(), ClosedFormGradCAM(problem.net, [problem.layer]).explain(problem.x)


WINDOW = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh()))
HALF = make_pipeline(StandardScaler(), PCA(3))
