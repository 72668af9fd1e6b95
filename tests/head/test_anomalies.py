"""Anomalies: Q and T^2 against scikit-learn's own numbers, and their maps against formulas written out here."""

import copy
import json
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from heads import DATA, QUERY
from hypothesis import given, settings
from hypothesis import strategies as st
from meta import Traffic, on_meta
from problems import explained
from reference import (
    activations_of,
    gap,
    integrated_gradient,
    jacobian_by_autograd,
    missing,
    relative,
)
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cross_decomposition import PLSRegression
from sklearn.decomposition import (
    PCA,
    FactorAnalysis,
    FastICA,
    IncrementalPCA,
    KernelPCA,
    MiniBatchSparsePCA,
    SparsePCA,
    TruncatedSVD,
)
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.feature_selection import SelectKBest
from sklearn.kernel_approximation import Nystroem
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, RobustScaler, StandardScaler
from sklearn.random_projection import GaussianRandomProjection
from sklearn.svm import SVC

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormAblationCAM,
    ClosedFormGradCAM,
    ClosedFormScoreCAM,
    ClosedFormShapleyCAM,
    ComponentSums,
    ConstantComponentWarning,
    ContributionCAM,
    Head,
    HotellingTarget,
    PCASVMNet,
    PCATarget,
    ResidualTarget,
    ShapCAM,
    SignedMaps,
    SVMTarget,
    recombined,
)
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import Projection, Scale
from pytorch_grad_cam_pcasvm.head.table import transformer_for
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.targets.output_gradients import differentiate_targets
from pytorch_grad_cam_pcasvm.targets.questions import resolve_image_targets

TARGETS = [ResidualTarget(), HotellingTarget(), ResidualTarget(sign="-"), HotellingTarget(sign="-")]
X, Y = DATA[2]


def output_of(head: Head, x: Any) -> HeadOutput:
    return HeadOutput.of(head, head(torch.as_tensor(x)))


def by_sklearn(fitted: list[Any], x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return Q and T^2 from transform, inverse_transform and explained_variance_ of the last of fitted estimators."""
    *front, reduction = fitted
    z = x
    for estimator in front:
        z = estimator.transform(z)
    p = reduction.transform(z)
    q = np.sum((z - reduction.inverse_transform(p)) ** 2, 1)
    if not isinstance(reduction, PCA | IncrementalPCA):
        return q, None
    with np.errstate(divide="ignore"):
        return q, np.sum(p**2 if reduction.whiten else p**2 / reduction.explained_variance_, 1)


def by_formula(pipeline: Any, features: torch.Tensor, target: Any) -> torch.Tensor:
    """Return a target's value for features (..., D) by explicit matrices, up to the first PCA of a pipeline."""
    z = features
    for _, step in pipeline.steps:
        if isinstance(step, StandardScaler):
            z = (z - torch.tensor(step.mean_)) / torch.tensor(step.scale_)
        elif isinstance(step, Normalizer):
            z = z / z.square().sum(-1, keepdim=True).sqrt()
        else:
            break
    mean, v = torch.tensor(step.mean_), torch.tensor(step.components_)
    p = (z - mean) @ v.T
    if isinstance(target, HotellingTarget):
        value = sum(p[..., b] ** 2 / step.explained_variance_[b] for b in range(len(v)))
    else:
        value = (z - mean - p @ v).pow(2).sum(-1)
    return -value if target.sign == "-" else value


# --- scikit-learn's own numbers ---------------------------------------------------------------------------------------

REDUCTIONS = {
    "pca": PCA(4),
    "whitened": PCA(4, whiten=True),
    "one component": PCA(1, whiten=True),
    "all but one": PCA(9),
    "share of the variance": PCA(0.8, svd_solver="full"),
    "covariance": PCA(4, svd_solver="covariance_eigh", whiten=True),
    "incremental": IncrementalPCA(4),
    "incremental whitened": IncrementalPCA(4, whiten=True),
    "truncated": TruncatedSVD(4, random_state=0),
    "sparse": SparsePCA(3, alpha=0.1, ridge_alpha=0.3, random_state=0, max_iter=20),
    "sparse in batches": MiniBatchSparsePCA(3, alpha=0.1, random_state=0, max_iter=20),
    "ica": FastICA(4, random_state=0),
    "pls": PLSRegression(3),
}
FRONTS = {
    "none": [],
    "standard": [StandardScaler()],
    "two": [RobustScaler(), MinMaxScaler((-1, 2))],
    "normalised": [Normalizer()],
    "selected": [SelectKBest(k=10), StandardScaler(with_std=False)],
}


def fitted(front: str, reduction: str, dtype: Any = np.float64) -> list[Any]:
    x, estimators = X.astype(dtype), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few iterations
        for estimator in copy.deepcopy([*FRONTS[front], REDUCTIONS[reduction]]):
            estimators.append(estimator.fit(x, Y))
            x = estimator.transform(x)
    return estimators


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_values_are_scikit_learns(reduction: str, front: str) -> None:
    estimators = fitted(front, reduction)
    expected_q, expected_t = by_sklearn(estimators, QUERY)
    machine = SVC().fit(np.zeros((4, len(estimators[-1].transform(QUERY)[0]))) + np.arange(4)[:, None], [0, 1, 0, 1])
    # At the end PLS predicts.
    for parts in ([*estimators, machine], *([] if reduction == "pls" else [estimators])):
        output = output_of(Head.of(parts), QUERY)
        assert relative(ResidualTarget()(output), expected_q) < 1e-10
        rows = torch.stack([ResidualTarget(sign="-")(row) for row in output])
        assert relative(rows, -expected_q) < 1e-10
        # The host's SESS hands over softmax(output).
        assert relative(ResidualTarget()(torch.softmax(output, -1)), expected_q) < 1e-10
        if expected_t is None:
            with pytest.raises(
                ValueError, match=r"needs the variances of uncorrelated components.*: this one has none$"
            ):
                HotellingTarget()(output)
        else:
            assert relative(HotellingTarget(sign="-")(output), -expected_t) < 1e-10
            assert relative(torch.stack([HotellingTarget()(row) for row in output]), expected_t) < 1e-10


@pytest.mark.parametrize("reduction", [name for name in REDUCTIONS if "sparse" not in name])
def test_values_of_estimators_fitted_in_single_precision(reduction: str) -> None:
    # Attributes are float32, and components orthogonal to 1e-7 only: scikit-learn computes with them in float64.
    estimators = fitted("standard", reduction, np.float32)
    expected_q, expected_t = by_sklearn(estimators, QUERY)
    output = output_of(Head([transformer_for(each) for each in estimators]), QUERY)
    assert relative(ResidualTarget()(output), expected_q) < 1e-10
    if expected_t is not None:
        assert relative(HotellingTarget()(output), expected_t) < 1e-10


@pytest.mark.parametrize("whiten", [False, True])
def test_components_without_variance(whiten: bool, tmp_path: Any) -> None:
    # Rank 3: T^2 is that of three components, however many there are.
    x = X @ np.diag([1.0] * 3 + [0.0] * 7)
    estimators = [PCA(5, whiten=whiten, svd_solver="full").fit(x)]
    three = PCA(3, whiten=True, svd_solver="full").fit(x)
    with pytest.warns(ConstantComponentWarning, match=r"components 3 and 4 of PCA .* PCA\(3\)"):
        head = Head.of(estimators)
    output = output_of(head, QUERY)
    assert relative(ResidualTarget()(output), by_sklearn(estimators, QUERY)[0]) < 1e-10
    assert relative(HotellingTarget()(output), by_sklearn([three], QUERY)[1]) < 1e-10
    (seed,) = HotellingTarget().seeds(output, output_of(head, QUERY[:1])).values()
    assert not seed[:, 3:].any()
    head.save(tmp_path / "head.safetensors")
    again = output_of(Head.load(tmp_path / "head.safetensors"), QUERY)
    assert torch.equal(HotellingTarget()(again), HotellingTarget()(output))
    variance = estimators[0].explained_variance_
    assert variance.min() < np.finfo(float).eps ** 2 * 1e3, "there is no component without variance"


@pytest.mark.parametrize("whiten", [False, True])
def test_components_without_variance_may_come_first(whiten: bool) -> None:
    pca = PCA(5, whiten=whiten, svd_solver="full").fit(X @ np.diag([1.0] * 3 + [0.0] * 7))
    for name in ("components_", "explained_variance_", "explained_variance_ratio_", "singular_values_"):
        setattr(pca, name, getattr(pca, name)[::-1].copy())
    with pytest.warns(ConstantComponentWarning, match="components 0 and 1 of PCA"):
        head = Head.of([pca])
    scores = pca.transform(QUERY)[:, 2:]
    expected = (scores**2 / (1.0 if whiten else pca.explained_variance_[2:])).sum(1)
    assert relative(HotellingTarget()(output_of(head, QUERY)), expected) < 1e-10


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rounding_errors_of_what_is_left_over_are_no_evidence(dtype: Any) -> None:
    for scale in (1.0, 1e5):
        output = output_of(Head.of(PCA(10).fit(scale * X.astype(dtype))), scale * QUERY)
        assert not ResidualTarget()(output).any()
        assert not any(seed.any() for seed in ResidualTarget().seeds(output).values())
    # One direction less, along which images hardly differ: a millionth of them is evidence, not rounding.
    narrow = X.copy()
    narrow[:, 0] = X[:, 1] * 0.5
    query = np.array(narrow[:3])
    query[:, 0] += 1e-6
    found = ResidualTarget()(output_of(Head.of(PCA(9).fit(narrow)), query))
    assert relative(found, np.full(3, 1e-12 / 1.25)) < 1e-7


# --- gradients and secants of the head --------------------------------------------------------------------------------

HARD = {
    **{f"{front}, {reduction}": (front, reduction) for front in FRONTS for reduction in ("pca", "whitened", "pls")},
    **{f"standard, {reduction}": ("standard", reduction) for reduction in REDUCTIONS},
}
CURVED = [StandardScaler(), KernelPCA(6, kernel="rbf", gamma=0.05), PCA(3, whiten=True), StandardScaler(), SVC()]


def head_of(name: str) -> Head:
    if name == "behind a kernel pca":
        return Head.of(make_pipeline(*copy.deepcopy(CURVED)).fit(X, Y))
    return Head([transformer_for(each) for each in fitted(*HARD[name])])


@pytest.mark.parametrize("name", [*HARD, "behind a kernel pca"])
def test_gradients_equal_autograds(name: str) -> None:
    head = head_of(name)
    position = head.component_position
    targets = TARGETS if head.stages[position - 1].variances is not None else TARGETS[::2]
    leaf = torch.tensor(QUERY, requires_grad=True)
    output = output_of(head, leaf)
    grads = torch.stack([torch.autograd.grad(target(output).sum(), leaf, retain_graph=True)[0] for target in targets])
    with torch.no_grad():
        output = output_of(head, QUERY)
        seeds = differentiate_targets(output, targets, torch.float64)
        mixed = differentiate_targets(
            output, [PCATarget(0), *targets, lambda row: row.components[0] ** 2], torch.float64
        )
        own = [targets[n % len(targets)] if n < 6 else PCATarget(0) for n in range(8)]
        each = differentiate_targets(output, resolve_image_targets(own, output), torch.float64)
    assert not seeds.log_scale.any()
    assert relative(seeds.grads[0], grads) < 1e-10
    assert relative(seeds.values, torch.stack([target(output) for target in targets], 1)) == 0
    assert relative(mixed.grads[0][1:-1], grads) < 1e-10
    for n in range(6):
        assert relative(each.grads[0][0, n], grads[n % len(targets), n]) < 1e-10


@pytest.mark.parametrize("name", ["standard, whitened", "normalised, pca", "standard, pls", "behind a kernel pca"])
def test_targets_are_differentiable_twice(name: str) -> None:
    head = head_of(name)
    targets = TARGETS[:2] if head.stages[head.component_position - 1].variances is not None else TARGETS[:1]
    x = torch.tensor(QUERY[:2], requires_grad=True)
    for target in targets:
        assert torch.autograd.gradcheck(lambda z, target=target: target(output_of(head, z)), x)
        assert torch.autograd.gradgradcheck(lambda z, target=target: target(output_of(head, z)), x)


scalers = st.lists(
    st.sampled_from([StandardScaler(), RobustScaler(), Normalizer(), MinMaxScaler(clip=True)]), max_size=2
)
kinds = st.one_of(
    st.builds(PCA, n_components=st.integers(1, 5), whiten=st.booleans()),
    st.builds(IncrementalPCA, n_components=st.integers(1, 5), whiten=st.booleans()),
)


# In front of a Normalizer, a baseline of length 1e-8 has its direction to 1e-8 only: such lengths are left out.
sizes = st.one_of(st.just(0.0), st.floats(1e-3, 30.0))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(scalers, kinds, sizes, st.integers(0, 99), st.booleans())
def test_contributions_of_any_head_add_up(front: Any, reduction: Any, size: float, seed: int, one: bool) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 7)) @ rng.normal(size=(7, 7)) + rng.normal(size=7)
    head = Head.of(make_pipeline(*copy.deepcopy(front), copy.deepcopy(reduction)).fit(x))
    here = rng.normal(size=(4, 7)) * 3
    there = np.repeat(rng.normal(size=(1, 7)), 4, 0) * size if one else rng.normal(size=(4, 7)) * size
    with torch.no_grad():
        output, baseline = output_of(head, here), output_of(head, there)
        seeds = differentiate_targets(output, TARGETS, torch.float64, baseline)
        at = torch.stack([target(baseline) for target in TARGETS], 1)
    sums = torch.einsum("knd,nd->nk", seeds.grads[0], torch.tensor(here - there))
    largest = seeds.values.abs().amax(0) + at.abs().amax(0)
    assert ((sums + at - seeds.values).abs() <= 1e-8 * largest).all()
    assert ((seeds.baseline_values - at).abs() <= 1e-8 * largest).all()


# --- maps -------------------------------------------------------------------------------------------------------------

CASES = [
    *((path, "no machine", "plane") for path in ("gelu", "max pool", "squeeze-excite", "layer norm")),
    *(("gelu", head, "plane") for head in ("whitened", "normalised", "calibrated", "one class")),
    ("pooled", "whitened", "volume"),
]


def every_value(p: Any, features: torch.Tensor) -> torch.Tensor:
    return torch.stack([by_formula(p.fitted, features, target) for target in TARGETS], -1)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_maps_equal_autograds(case: Any) -> None:
    path, head, size = case
    p = explained(path, head, size=size)
    f = activations_of(p.backbone, p.layer, p.x)
    assert p.fitted is not None  # before there is a hook
    grads = jacobian_by_autograd(p.backbone, p.layer, p.x, lambda features: every_value(p, features))
    weights = grads.flatten(3).sum(-1)
    for options in ({}, {"jacobian": "autograd"}, {"max_bytes": 1}):
        maps = ClosedFormGradCAM(p.net, [p.layer], **options).explain(p.x, TARGETS)
        assert relative(maps.weights, weights) < 1e-10
        assert relative(maps.maps, torch.einsum("nkt,nt...->nk...", weights, f)) < 1e-10
        assert relative(maps.values, every_value(p, p.backbone(p.x))) < 1e-10
    maps = package.ClosedFormHiResCAM(p.net, [p.layer]).explain(p.x, TARGETS)
    assert relative(maps.maps, (grads * f.unsqueeze(1)).sum(2)) < 1e-10
    single = explained(path, head, size=size, dtype=torch.float32)
    maps = ClosedFormGradCAM(single.net, [single.layer]).explain(single.x, TARGETS)
    assert maps.maps.dtype == torch.float32
    assert relative(maps.maps, torch.einsum("nkt,nt...->nk...", weights, f)) < 1e-3


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_contributions_add_up(case: Any) -> None:
    path, head, size = case
    p = explained(path, head, size=size)
    f = activations_of(p.backbone, p.layer, p.x)
    mixed = [*TARGETS[:2], PCATarget(1), *([] if head == "no machine" else [SVMTarget()]), *TARGETS[2:]]
    for baseline, start in (("zero", torch.zeros_like(f)), (f.flip(0), f.flip(0)), (p.x[1], f[1:2].expand_as(f))):
        cam = ContributionCAM(p.net, [p.layer], baseline=baseline)
        maps = cam.explain(p.x, mixed)
        of_targets = [0, 1, len(mixed) - 2, len(mixed) - 1]
        assert gap(maps) < 1e-10
        assert relative(maps.values[:, of_targets], every_value(p, p.backbone(p.x))) < 1e-10
        assert relative(maps.baseline_values[:, of_targets], every_value(p, p.backbone.tail(start))) < 1e-10
        lift = LIFTCAM(p.net, [p.layer], baseline=baseline).explain(p.x, mixed)
        weights = lift.weights * lift.log_scale.exp().unsqueeze(-1)
        assert missing(torch.cat([weights, maps.baseline_values.unsqueeze(-1)], -1), maps.values) < 1e-8
    chunks = ContributionCAM(p.net, [p.layer], baseline=p.x[1], max_bytes=1).explain(p.x, mixed)
    assert relative(chunks.maps, maps.maps) < 1e-12
    single = explained(path, head, size=size, dtype=torch.float32)
    maps = ContributionCAM(single.net, [single.layer]).explain(single.x, TARGETS)
    assert gap(maps) < 1e-4


@pytest.mark.parametrize("head", ["whitened", "no machine", "linear"])
def test_contributions_on_a_linear_way_are_the_integrated_gradient(head: str) -> None:
    p = explained("pooled", head)
    f = activations_of(p.backbone, p.layer, p.x)
    for start in (torch.zeros_like(f), f.roll(1, 0)):
        maps = ContributionCAM(p.net, [p.layer], baseline=start).explain(p.x, TARGETS)
        for k, target in enumerate(TARGETS):
            expected = integrated_gradient(
                lambda a, t=target: by_formula(p.fitted, p.backbone.tail(a), t), start, f, nodes=2
            )
            assert relative(maps.maps[:, k], expected.sum(1)) < 1e-10
    same = ContributionCAM(p.net, [p.layer], baseline=p.x).explain(p.x, TARGETS)
    assert not same.maps.any()


@pytest.mark.parametrize(
    "kind",
    [
        *(ClosedFormGradCAM, ContributionCAM, ClosedFormShapleyCAM, ClosedFormAblationCAM),
        pytest.param(ShapCAM, marks=pytest.mark.slow),
    ],
)
def test_a_call_gives_the_maps_of_explain_scaled_as_the_host_does(kind: Any) -> None:
    p = explained("gelu", "rbf", n=5)
    cam = kind(p.net, [p.layer])
    targets = [HotellingTarget(), ResidualTarget(), PCATarget(0), SVMTarget("bee"), ResidualTarget(sign="-")]
    maps, shown = cam.explain(p.x, targets), cam(p.x, targets)
    assert shown.shape == (5, *p.x.shape[2:])
    for n, target in enumerate(targets):
        alone = cam(p.x[n : n + 1], [target])[0]
        assert relative(shown[n], alone) < 1e-5
        if not isinstance(target, PCATarget) and bool((maps.maps[n, n] > 0).any()):
            # Not divided by nu, which is that of both signs.
            assert abs(shown[n].max() - 1) < 1e-3
    assert relative(cam(p.x, ResidualTarget()), cam(p.x, [ResidualTarget()] * 5)) == 0
    assert issubclass(kind, ComponentSums) is (kind in (ClosedFormGradCAM, ContributionCAM))


# --- the reduction identity -------------------------------------------------------------------------------------------

HOTELLING = [HotellingTarget(), PCATarget(2, "-"), HotellingTarget(sign="-")]


@pytest.mark.parametrize("head", ["no machine", "whitened", "rbf", "normalised"])
@pytest.mark.parametrize("kind", [ClosedFormGradCAM, package.ClosedFormHiResCAM, ContributionCAM])
def test_hotelling_is_recombined_from_components(kind: Any, head: str, tmp_path: Any) -> None:
    p = explained("gelu", head)
    cam = kind(p.net, [p.layer])
    components = cam.explain(p.x, [PCATarget(b) for b in range(4)])
    targets = [*HOTELLING, *([] if head == "no machine" else [SVMTarget("bee"), SVMTarget()])]
    expected = cam.explain(p.x, targets)
    components.save(tmp_path / "maps")
    p.net.head.save(tmp_path / "head")
    for maps in (components, SignedMaps.load(tmp_path / "maps")):
        for given_head in (p.fitted, p.net.head, Head.load(tmp_path / "head")):
            actual = recombined(maps, given_head, targets)
            for name in ("maps", "weights", "values", "baseline_values"):
                if getattr(expected, name) is not None:
                    assert relative(getattr(actual, name), getattr(expected, name)) < 1e-10
    # A head that was fitted on the components: the maps know where they came from, or nobody does.
    if head == "no machine":
        return
    later = SVC().fit(p.net(p.images(60, seed=4)).components.numpy(), np.arange(60) % 2)
    assert relative(recombined(components, later, HOTELLING).maps, expected.maps[:, :3]) < 1e-10
    with pytest.raises(ValueError, match=r"neither the maps nor the head contain the PCA .*: pass the whole pipeline"):
        recombined(SignedMaps.load(tmp_path / "maps"), later, HOTELLING)


def test_the_residual_is_no_function_of_components() -> None:
    p = explained("gelu", "rbf")
    components = ClosedFormGradCAM(p.net, [p.layer]).explain(p.x)
    with pytest.raises(ValueError, match=r"ResidualTarget.* is not a function of the components: compute its maps"):
        recombined(components, p.fitted, [HotellingTarget(), ResidualTarget()])
    resumed = HeadOutput.of(p.net.head, p.net.head.resume(2, components.values[:, :4]))
    assert relative(HotellingTarget()(resumed), HotellingTarget()(components.output)) < 1e-12
    with pytest.raises(ValueError, match=r"not a function of the components, which are all that is known here"):
        ResidualTarget()(resumed)


# --- files, states and devices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["standard, whitened", "two, pca", "standard, truncated", "standard, pls", "standard, ica"]
)
def test_heads_in_files_and_states(name: str, tmp_path: Any) -> None:
    head = head_of(name)
    head.save(tmp_path / "head")
    # The estimator's own inverse goes along with its state.
    other = copy.deepcopy(head)
    for buffer in other.buffers():
        buffer *= 3
    other.load_state_dict(head.state_dict())
    for each in (Head.load(tmp_path / "head"), other):
        for target in TARGETS if head.stages[-1].variances is not None else TARGETS[::2]:
            assert torch.equal(target(output_of(each, QUERY)), target(output_of(head, QUERY)))


def without_inverse(head: Head) -> Head:
    """Return a head as an earlier version had it."""
    old = copy.deepcopy(head)
    for stage in old.stages:
        if isinstance(stage, Projection):
            stage.inverse = stage.variances = None
    return old


def test_states_of_earlier_versions() -> None:
    p = explained("gelu", "rbf")
    old, new = without_inverse(p.net.head), copy.deepcopy(p.net.head)
    state = old.state_dict()
    assert not any("inverse" in name or "variances" in name for name in state)
    parts = json.loads(bytes(state["_extra_state"].tolist()))
    for part in parts:
        part["arguments"].pop("inverse", None), part["arguments"].pop("variances", None)
    state["_extra_state"] = torch.tensor(list(json.dumps(parts).encode()), dtype=torch.uint8)
    new.load_state_dict(state)
    # What the state does not know is not taken from the head that was there.
    output = output_of(new, p.backbone(p.x))
    assert relative(output, output_of(p.net.head, p.backbone(p.x))) == 0
    for target in TARGETS:
        with pytest.raises(ValueError, match="save it again from the fitted estimator"):
            target(output)
    old.load_state_dict(p.net.head.state_dict())
    assert torch.equal(TARGETS[0](output_of(old, p.backbone(p.x))), TARGETS[0](p.net(p.x)))


def test_components_of_an_earlier_file_are_those_of_the_estimator() -> None:
    p = explained("gelu", "rbf")
    old = PCASVMNet(p.backbone, without_inverse(p.net.head))
    components = ContributionCAM(old, [p.layer]).explain(p.x)
    expected = ContributionCAM(p.net, [p.layer]).explain(p.x, HOTELLING)
    assert old.head.starts_as(p.net.head, 2)
    assert p.net.head.starts_as(old.head, 2)
    assert relative(recombined(components, p.fitted, HOTELLING).maps, expected.maps) < 1e-10
    with pytest.raises(ValueError, match="save it again from the fitted estimator"):
        recombined(components, old.head, HOTELLING)
    for change in ({"C": 1.0}, {}):
        other = copy.deepcopy(p.fitted)
        other[-1].set_params(**change)
        other[1].components_[0] *= 1 if change else -1
        assert p.net.head.starts_as(Head.of(other), 2) is bool(change)


def test_outputs_that_were_moved_keep_their_values() -> None:
    p = explained("gelu", "whitened")
    output = p.net(p.x).moved("cpu")
    joined = HeadOutput.cat([output.rows([0]), output.rows([2, 1])])
    for target in TARGETS:
        assert torch.equal(target(joined)[[0, 2, 1]], target(output))
        # The head stays where it is.
        assert target(output.moved("meta")).device.type == "meta"


def test_nothing_is_sent_to_the_device_or_asked_of_it(unchecked: None) -> None:
    with torch.device("meta"):
        backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
    net = on_meta(backbone, None, "1", 8).model
    mixed = [*TARGETS, PCATarget(0), SVMTarget("bee")]
    with Traffic() as traffic:
        maps = ClosedFormGradCAM(net, [net.backbone[1]]).explain(torch.empty(2, 3, 9, 9, device="meta"), mixed)
    assert maps.maps.device.type == "meta"
    assert not traffic.seen
    output = net(torch.empty(2, 3, 9, 9, device="meta"))
    with torch.no_grad(), Traffic() as traffic:
        differentiate_targets(output, mixed[:-1], torch.float64, output)
    assert not traffic.seen


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [ClosedFormGradCAM, ContributionCAM, ClosedFormShapleyCAM, ClosedFormAblationCAM])
def test_cuda_equals_the_cpu(kind: Any) -> None:
    p = explained("gelu", "whitened")
    expected = kind(p.net, [p.layer]).explain(p.x, TARGETS)
    net = copy.deepcopy(p.net).cuda()
    actual = kind(net, [net.backbone.features]).explain(p.x.cuda(), TARGETS)
    assert relative(actual.maps, expected.maps) < 1e-10
    assert relative(TARGETS[0](actual.output.moved("cpu")), expected.values[:, 0]) < 1e-10


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HotellingTarget, ResidualTarget])
@pytest.mark.parametrize("sign", ["x", None, 1])
def test_bad_signs_are_refused_at_once(kind: Any, sign: Any) -> None:
    with pytest.raises(ValueError, match=r"sign must be '\+' or '-'"):
        kind(sign=sign)


class Own(Stage):
    """A reduction of a user's own."""

    reduces = True

    def evaluate(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x[:, :3], None

    def pullback(self, saved: None, grad: torch.Tensor) -> Any:
        return torch.nn.functional.pad(grad, (0, 7)), None


NO_INVERSE = (
    "needs a reduction with a linear inverse_transform, as of PCA, IncrementalPCA and TruncatedSVD: this one has"
)
NO_VARIANCES = "needs the variances of uncorrelated components, as PCA and IncrementalPCA have them: this one has none"
REFUSED = {
    "kernel pca": (lambda: KernelPCA(3).fit(X), NO_INVERSE, NO_VARIANCES),
    "kernel pca with an inverse": (
        lambda: KernelPCA(3, kernel="rbf", fit_inverse_transform=True).fit(X), NO_INVERSE, NO_VARIANCES
    ),
    "lda": (lambda: [LinearDiscriminantAnalysis().fit(X, Y), SVC().fit(Y[:, None], Y)], NO_INVERSE, NO_VARIANCES),
    "factors": (lambda: FactorAnalysis(3).fit(X), NO_INVERSE, NO_VARIANCES),
    "random": (lambda: GaussianRandomProjection(3).fit(X), NO_INVERSE, NO_VARIANCES),
    "own": (lambda: Head([Own()]), NO_INVERSE, NO_VARIANCES),
    "truncated": (lambda: TruncatedSVD(3).fit(X), None, NO_VARIANCES + "$"),
    "ica": (lambda: FastICA(3, random_state=0).fit(X), None, NO_VARIANCES + "$"),
    "none": (lambda: SVC().fit(X, Y), "needs a head with a PCA, but this one has none: use SVMTarget", None),
    "a map that is no reduction": (
        lambda: make_pipeline(Nystroem(n_components=5), SVC()).fit(X, Y), "needs a head with a PCA", None
    ),
    "inside": (
        lambda: CalibratedClassifierCV(make_pipeline(PCA(3), SVC()), cv=2).fit(X, Y), "is inside a meta-estimator", None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_heads_without_what_a_target_needs(name: str) -> None:
    make, of_residual, of_hotelling = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = output_of(Head.of(make()), QUERY)
    if name in ("none", "a map that is no reduction", "inside"):
        of_hotelling = of_residual
    for target, message in ((ResidualTarget(), of_residual), (HotellingTarget(sign="-"), of_hotelling)):
        if message is None:
            assert target(output).isfinite().all()
            continue
        for ask in (target, target.seeds, lambda o, t=target: t(o[0]), lambda o, t=target: t.seeds(o, o)):
            with pytest.raises(ValueError, match=rf"{re.escape(repr(target))}.*{message}"):
                ask(output)


@pytest.mark.parametrize(
    "kind", [ClosedFormGradCAM, ContributionCAM, ClosedFormScoreCAM, ShapCAM, ClosedFormShapleyCAM]
)
def test_methods_refuse_heads_without_an_inverse(kind: Any) -> None:
    p = explained("pooled", "kernel pca", size="small", n=1)
    cam = kind(p.net, [p.layer])
    for target in TARGETS[:2]:
        for call in (lambda t=target: cam.explain(p.x, [PCATarget(0), t]), lambda t=target: cam(p.x, t)):
            with pytest.raises(ValueError, match="this one has none"):
                call()


def test_an_ordinary_classifier_has_no_pca() -> None:
    p = explained("gelu", "rbf")
    for target in TARGETS:
        with pytest.raises(ValueError, match="needs the output of a PCASVMNet"):
            ClosedFormGradCAM(p.backbone, [p.layer]).explain(p.x, [target])


def test_a_hook_on_the_pca_has_no_closed_form() -> None:
    p = explained("gelu", "no machine")
    net = PCASVMNet(p.backbone, copy.deepcopy(p.net.head))
    net.head.stages[1].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(package.NoClosedFormError, match="a hook on Projection"):
        ClosedFormGradCAM(net, [p.layer]).explain(p.x, TARGETS)


def test_the_stage_of_a_user_may_know_its_inverse() -> None:
    pca = PCA(3).fit(X)
    v, mean = torch.tensor(pca.components_), torch.tensor(pca.mean_)
    ones, zeros = torch.ones(10).double(), torch.zeros(10).double()
    stage = Projection(v * 2, mean, ones[:3], inverse=v / 2, variances=4 * torch.tensor(pca.explained_variance_))
    output = output_of(Head([Scale(zeros, ones, zeros), stage]), QUERY)
    q, t2 = by_sklearn([pca], QUERY)
    assert relative(ResidualTarget()(output), q) < 1e-10
    assert relative(HotellingTarget()(output), t2) < 1e-10
