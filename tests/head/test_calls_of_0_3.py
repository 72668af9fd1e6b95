"""Calls of version 0.3: what they return now, against differences and autograd."""

import numpy as np
import pytest
import torch
from problems import Problem
from sklearn.decomposition import PCA, KernelPCA
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.feature_selection import SelectKBest
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import MinMaxScaler, Normalizer, PowerTransformer, StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import (
    HotellingTarget,
    LogRatioTarget,
    PCATarget,
    ResidualTarget,
    SVMTarget,
)
from pytorch_grad_cam_pcasvm.evaluation import Study
from pytorch_grad_cam_pcasvm.head import Chain, Scale, Stage
from pytorch_grad_cam_pcasvm.head.registry import convert_stages

DRAWN = np.random.default_rng(0)
ROWS, LABELS = DRAWN.normal(size=(30, 4)), np.arange(30) % 3
STAGES = {
    "scaler": StandardScaler(),
    "clipped": MinMaxScaler(clip=True),
    "norm": Normalizer(),
    "selection": SelectKBest(k=3),
    "pca": PCA(3),
    "kernel pca": KernelPCA(3, kernel="rbf"),
    "fourier": RBFSampler(gamma=0.3, n_components=5, random_state=0),
    "power": PowerTransformer(),
    "union": make_union(PCA(2), Normalizer()),
    "chain": make_pipeline(StandardScaler(), Normalizer(), SVC(gamma=0.7)),
    "svc": SVC(),
    "linear": LogisticRegression(),
    "qda": QuadraticDiscriminantAnalysis(),
    "neighbours": NearestNeighbors(n_neighbors=2),
}


def stage_of(estimator):
    stages = list(convert_stages(estimator.fit(ROWS, LABELS)))
    return Chain(stages) if len(stages) > 1 else stages[0]


def rows(count, seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 4)) * 1.5)


@pytest.mark.parametrize("estimator", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("one", [False, True], ids=["a start each", "one start"])
def test_a_third_argument_makes_a_pullback_the_secant(estimator, one):
    stage = stage_of(estimator)
    x, start = rows(5, 1), rows(1 if one else 5, 2)
    (y, saved), (y0, saved0) = stage.evaluate(x), stage.evaluate(start)
    grad = torch.eye(y.shape[-1], dtype=y.dtype).unsqueeze(0)
    with pytest.warns(DeprecationWarning, match=r"pullback\(saved, grad, saved0\) is now secant.* in version 0.6"):
        secant, log_scale = stage.pullback(saved, grad, saved0)
    with pytest.warns(DeprecationWarning, match="is now secant"):
        named, _ = stage.pullback(saved, grad, saved0=saved0)
    torch.testing.assert_close(named, secant, rtol=0, atol=0)
    factor = 1.0 if log_scale is None else log_scale.exp().unsqueeze(-1)
    explained = (factor * secant * (x - start).unsqueeze(1)).sum(-1)
    torch.testing.assert_close(explained, y - y0, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("estimator", STAGES.values(), ids=STAGES)
def test_a_pullback_of_two_arguments_is_the_gradient_and_says_nothing(estimator):
    stage, x = stage_of(estimator), rows(5, 1).requires_grad_()
    y, _ = stage.evaluate(x)
    seed = torch.from_numpy(DRAWN.normal(size=tuple(y.shape)))
    (expected,) = torch.autograd.grad(y, x, seed)
    with torch.no_grad():
        grad, log_scale = stage.pullback(stage.evaluate(x)[1], seed.unsqueeze(1))
    grad = grad if log_scale is None else grad * log_scale.exp().unsqueeze(-1)
    torch.testing.assert_close(grad.squeeze(1), expected, rtol=1e-9, atol=1e-11)


def test_a_stage_that_holds_another_gets_its_gradient():
    class Wrapped(Stage):
        def __init__(self):
            super().__init__()
            self.inner = Scale(torch.zeros(2), torch.full((2,), 4.0), torch.zeros(2))

        def evaluate(self, x):
            return self.inner.evaluate(x)

        def pullback(self, saved, grad, saved0=None):
            return self.inner.pullback(saved, grad, saved0)

    stage = Wrapped()
    _, saved = stage.evaluate(torch.ones(3, 2))
    with pytest.warns(DeprecationWarning, match="Scale.pullback"):
        grad, _ = stage.pullback(saved, torch.ones(3, 1, 2))
    torch.testing.assert_close(grad, torch.full((3, 1, 2), 0.25), rtol=0, atol=0)


TARGETS = {
    "component": PCATarget(1, "-"),
    "hotelling": HotellingTarget(),
    "residual": ResidualTarget(),
    "decision": SVMTarget("ant", versus="bee"),
    "log ratio": LogRatioTarget("ant", versus="bee"),
}


@pytest.fixture(scope="module")
def problem():
    return Problem()


def outputs(problem):
    """Return a network's output for four images, and for four others."""
    images = torch.randn(8, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return problem.net(images[:4]), problem.net(images[4:])


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_seeds_take_a_baseline(problem, target):
    output, start = outputs(problem)
    with pytest.warns(DeprecationWarning, match=rf"{type(target).__name__}.seeds\(..., baseline=\) is now start="):
        seeds = target.seeds(output, baseline=start)
    here, there = output.head_trace.values, start.head_trace.values
    explained = sum((seed * (here[place] - there[place])).sum(-1) for place, seed in seeds.items())
    torch.testing.assert_close(explained, target(output) - target(start), rtol=1e-9, atol=1e-10)


def test_heads_take_a_baseline(problem):
    output, start = outputs(problem)
    head, here, there = problem.net.head, output.head_trace, start.head_trace
    here, there = head(here.values[0]), head(there.values[0])
    with pytest.warns(DeprecationWarning, match=r"pullback\(..., baseline=\) is now start=; .* in version 0.6"):
        secant, log_scale = head.pullback(here, {head.decision_position: None}, baseline=there)
    explained = (secant * log_scale.exp().unsqueeze(-1) * (here.values[0] - there.values[0]).unsqueeze(1)).sum(-1)
    torch.testing.assert_close(explained, here.values[-1] - there.values[-1], rtol=1e-9, atol=1e-10)
    with pytest.raises(TypeError, match=r"multiple values for .*argument 'start'"):
        head.pullback(here, {head.decision_position: None}, start=there, baseline=there)


def test_a_target_of_ones_own_is_called_either_way(problem):
    class Twice(PCATarget):
        def seeds(self, output, baseline=None):  # version 0.3
            return {place: 2 * seed for place, seed in super().seeds(output, baseline=baseline).items()}

    output, _ = outputs(problem)
    with pytest.warns(DeprecationWarning, match="is now start="):
        (seed,) = Twice(1).seeds(output).values()
    assert seed.tolist() == [[0.0, 2.0, 0.0, 0.0]]


def test_measures_of_ones_own_name_what_they_wait_for(problem):
    images = torch.randn(8, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    study = Study(problem.net, (images, np.arange(8) % 3), [problem.net.backbone.features], images=8, progress=False)
    with pytest.warns(DeprecationWarning, match="description="):
        batches = list(study.batches(what="mine"))
    assert batches
