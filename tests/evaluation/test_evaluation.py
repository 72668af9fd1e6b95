"""Evaluation: networks of which the answer is known."""

import copy
import html
import json
import sys
import warnings
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    HotellingTarget,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    ResidualTarget,
    SVMTarget,
    evaluation,
    extract_features,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.maps.results import MethodResult
from pytorch_grad_cam_pcasvm.methods import ClosedFormHiResCAM, ClosedFormLayerCAM
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.studio.data.images import stretched
from pytorch_grad_cam_pcasvm.studio.evaluation.faithfulness import FILLS, ranks, without
from pytorch_grad_cam_pcasvm.studio.evaluation.localisation import (
    NONE,
    NOWHERE,
    SHARE,
    _chosen,
    _points,
    _scene,
    _tile_masks,
)
from pytorch_grad_cam_pcasvm.studio.evaluation.positions import POINT, describe_localisation
from pytorch_grad_cam_pcasvm.studio.evaluation.report import CHECKS
from pytorch_grad_cam_pcasvm.studio.evaluation.result import Estimate, Result, Row, rank_correlations
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import ANOTHER, BLIND, HEAD, RANDOM, RIVALS, Rivals
from pytorch_grad_cam_pcasvm.studio.evaluation.sanity import (
    COMPONENTS,
    CONTRADICTING,
    DRAWS,
    ERROR,
    LABELS,
    LIKENESS,
    NOISE,
    SHIFT,
)
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject


class Corner(nn.Module):
    """Only the upper left quarter of the image matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        return y[..., : x.shape[2] // 2, : x.shape[3] // 2].mean((2, 3))


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Turned(ContributionCAM):
    """Contributions with their signs turned round."""

    def compute(self, run, layer, targets):
        made = super().compute(run, layer, targets)
        made.maps = -made.maps
        return made


class Noise(ClosedFormCAM):
    """Maps that are noise, another one in every call."""

    generator = torch.Generator().manual_seed(5)

    def compute(self, run, layer, targets):
        activations, seeds = run.activations(layer), run.output_gradients(targets)
        maps = torch.randn(run.count, len(targets), *activations.shape[2:], generator=self.generator)
        return MethodResult(maps, run.sums(seeds, layer), seeds.values, seeds.log_scale)


def problem(
    net: nn.Module, count: int = 60, kernel: str = "rbf", size: int = 12
) -> tuple[PCASVMNet, Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(1)
    labels = np.arange(count) % 2
    x = torch.randn(count, 1, 12, 12, generator=generator)
    x[labels == 1, :, :6, :6] += 1
    features, _ = extract_features(net.eval(), [x], progress=False)
    head = make_pipeline(StandardScaler(), PCA(3), SVC(kernel=kernel)).fit(features, labels)
    return PCASVMNet(net, head).eval(), x, labels


E = evaluation
QUIET = {"progress": False}
BOTH = [ContributionCAM, ClosedFormGradCAM]


@pytest.mark.slow
def test_contributions_are_faithful_and_turned_ones_are_not(corner):
    net, x, labels = corner
    methods = {"contributions": ContributionCAM, "turned": Turned}
    found = evaluation.faithfulness(net, (x, labels), ["features"], methods, **QUIET)
    for kind in ("deletion", "insertion"):
        for rival in (RANDOM, BLIND, HEAD):
            assert found["contributions", kind, rival].above(0), rival
        assert not found["turned", kind, RANDOM].above(0)
        assert found["turned", kind, RANDOM].mean < -0.5 * found["contributions", kind, RANDOM].mean
    assert all(row.passed is not None for row in found.rows)
    assert len(found.worst["turned"]) == 10


@pytest.fixture(scope="module")
def smooth():
    """A network without ReLU, whose maps have no two equal numbers."""
    return problem(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten()), count=24)


def values_of(net, x, labels):
    with torch.no_grad():
        return np.array([float(net(image[None]).margins[0, label]) for image, label in zip(x, labels, strict=True)])


def test_faithfulness_written_out(smooth):
    net, x, _ = smooth
    options = {"fill": "mean", "fractions": (0.25, 0.5), "rivals": [BLIND, ANOTHER], "images": None}
    found = E.faithfulness(net, x, ["0"], [ContributionCAM], **options, **QUIET)
    rows, labels = np.random.default_rng(0).permutation(24), net.predict(x).tolist()
    value = values_of(net, x, labels)
    before = {row: rows[n - 1] if n else rows[1] for n, row in enumerate(rows)}
    changes = {}
    with ContributionCAM(net, ["0"]) as cam:
        for row in rows:
            own, other = (cam.explain(x[[k]], [SVMTarget(labels[row])]).maps[0, 0] for k in (row, before[row]))
            blind = net.backbone[0](x[[row]])[0].sum(0).detach()
            for source, heat in (("", own), (ANOTHER, other), (BLIND, blind)):
                order = heat.flatten().argsort(descending=True)
                for kind in ("deletion", "insertion"):
                    for count in (36, 72):
                        image = x[row].flatten().clone()
                        image[order[:count] if kind == "deletion" else order[count:]] = x[row].mean()
                        after = values_of(net, image.reshape(1, 1, 12, 12), [labels[row]])[0]
                        changes.setdefault((source, kind), []).append((after - value[row]) / value.std())
    mean = {key: np.array(numbers).reshape(24, 2) for key, numbers in changes.items()}
    for kind, sign in (("deletion", -1), ("insertion", 1)):
        own = mean["", kind].mean(1)
        for rival in (BLIND, ANOTHER):
            gain = sign * (own - mean[rival, kind].mean(1))
            expected = Estimate(gain.mean(), gain.std(ddof=1) / 24**0.5, 24)
            actual = found["ContributionCAM", kind, rival]
            assert (actual.mean, actual.standard_error) == pytest.approx(
                (expected.mean, expected.standard_error), rel=1e-4
            )
        assert found.curves[kind]["ContributionCAM"] == pytest.approx(mean["", kind].mean(0).tolist(), rel=1e-4)
    bad = mean["", "deletion"].mean(1) - mean["", "insertion"].mean(1)
    assert found.worst["ContributionCAM"] == rows[np.argsort(-bad)[:10]].tolist()


def test_completeness_written_out(smooth):
    net, x, _ = smooth
    found = E.completeness(net, x, ["0"], [ContributionCAM, ClosedFormGradCAM], images=None, **QUIET)
    rows, labels = np.random.default_rng(0).permutation(24), net.predict(x).tolist()
    value = values_of(net, x, labels)
    for method in (ContributionCAM, ClosedFormGradCAM):
        distances, wrong = {"": [], ANOTHER: []}, []
        with method(net, ["0"]) as cam:
            for n, row in enumerate(rows):
                for source, image in (("", row), (ANOTHER, rows[n - 1] if n else rows[1])):
                    maps = cam.explain(x[[image]], [SVMTarget(labels[row])])
                    start = 0.0 if maps.baseline_values is None else float(maps.baseline_values)
                    if not source:
                        wrong.append((float(maps.maps.sum()) > 0) != (value[row] > 0))
                    distances[source].append(abs(float(maps.maps.sum()) + start - value[row]) / value.std())
        own, other = (np.array(numbers) for numbers in distances.values())
        assert found[method.__name__, ERROR].mean == pytest.approx(own.mean(), rel=1e-3, abs=1e-5)
        of_terms = 1e-3 * (other + own).mean()
        assert found[method.__name__, ERROR, ANOTHER].mean == pytest.approx((other - own).mean(), abs=of_terms)
        assert found[method.__name__, CONTRADICTING] == Estimate.of(wrong)


def test_maps_with_the_wrong_sign_contradict_the_decision(corner):
    net, x, labels = corner
    methods = {"contributions": ContributionCAM, "turned": Turned}
    found = E.completeness(net, (x, labels), ["features"], methods, images=40, **QUIET)
    signs = {row.method: (row.estimate.mean, row.verdict) for row in found.rows if row.measure == CONTRADICTING}
    assert signs == {"contributions": (0.0, "passed"), "turned": (1.0, "failed")}


class Scaled(ContributionCAM):
    """Contributions with a factor taken out, and with a part that is on no map."""

    def compute(self, run, layer, targets):
        made = super().compute(run, layer, targets)
        made.remainder = made.maps[..., :3].sum((2, 3)) * torch.e**5
        made.maps[..., :3], made.log_scale = 0.0, made.log_scale - 5
        made.maps *= torch.e**5
        return made


def test_factors_and_remainders_belong_to_sums(smooth):
    net, x, _ = smooth
    found = E.completeness(net, x, ["0"], [Scaled], images=12, **QUIET)
    assert found["Scaled", ERROR].mean < 1e-5


@pytest.mark.slow
def test_noise_is_not_told_from_random_maps(corner):
    net, x, labels = corner
    verdicts = []
    for seed in range(20):
        found = evaluation.faithfulness(
            net, (x, labels), ["features"], [Noise], images=20, seed=seed, fractions=(0.5,), rivals=[RANDOM], **QUIET
        )
        verdicts += [row.verdict for row in found.rows]
    # Of 40 independent checks at two standard errors 0.9 are expected to alarm on each side, more than 5 in 1 of 3,000.
    assert len(verdicts) == 40
    for alarm in ("passed", "failed"):
        assert verdicts.count(alarm) <= 5


@pytest.mark.slow
def test_evidence_in_the_only_corner_that_matters(corner):
    net, x, labels = corner
    masks = np.zeros((len(x), 12, 12), bool)
    masks[:, :6, :6] = True
    found = evaluation.localisation(
        net, (x, labels), ["features"], [ContributionCAM, ClosedFormHiResCAM], masks=masks, **QUIET
    )
    boxes = np.tile([0, 0, 6, 6], (len(x), 1))
    same = evaluation.localisation(net, (x, labels), ["features"], [ContributionCAM], masks=boxes, **QUIET)
    # Exactly 1 at the resolution of the maps, which is that of the images here.
    for method in ("ContributionCAM", "ClosedFormHiResCAM"):
        assert found[method, SHARE].mean == pytest.approx(1, abs=1e-6)
        assert found[method, POINT].mean == 1
    assert same["ContributionCAM", SHARE] == found["ContributionCAM", SHARE]
    blind = net.backbone.features(x).sum(1).detach().numpy()
    share = [each[:6, :6].sum() / each.sum() for each in np.maximum(blind, 0)]
    seen = ~np.isnan(share)
    assert found[BLIND, SHARE].mean == pytest.approx(np.mean(np.array(share)[seen]), rel=1e-4)
    for measure in (SHARE, POINT):
        assert found["ContributionCAM", measure, "chance"].mean == pytest.approx(3 / 4)
    assert found["ContributionCAM", SHARE, BLIND].mean == pytest.approx(1 - np.mean(np.array(share)[seen]), rel=1e-4)


@pytest.mark.slow
def test_two_images_side_by_side():
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    backbone = nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net, x, labels = problem(backbone, 80, "linear")
    for tiles in (2, 4):
        found = evaluation.localisation(net, (x, labels), ["0"], BOTH, tiles=tiles, **QUIET)
        assert found.settings["chance"] == pytest.approx(1 / tiles)
        assert found["ContributionCAM", SHARE, "chance"].n > 10
    turned = evaluation.localisation(net, (x, labels), ["0"], [Turned, ContributionCAM], **QUIET)
    assert turned["Turned", SHARE].mean < turned["ContributionCAM", SHARE].mean


def test_four_tiles_with_fewer_classes_than_the_head_and_an_odd_size():
    torch.manual_seed(0)
    net, x, _ = problem(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), Pooled()))
    x = torch.cat([x, x[:, :, :1]], 2)[..., :11]
    labels = np.arange(60) % 3
    head = make_pipeline(PCA(2), SVC(C=100, gamma=10)).fit(net.backbone(x).detach().numpy(), labels)
    net, two = PCASVMNet(net.backbone, head).eval(), labels < 2
    found = E.localisation(net, (x[two], labels[two]), ["1"], [ContributionCAM], tiles=4, **QUIET)
    assert found.settings["scenes"] > 2
    pictures = [torch.full((1, 5, 7), float(n)) for n in range(4)]
    scene, masks = _scene(pictures, 4), _tile_masks((5, 7), 4, range(4))
    assert scene.shape == (1, 5, 7)
    for n, mask in enumerate(masks):
        assert ((scene[0].numpy().round() == n) == mask).all()


def test_a_network_that_takes_one_size_is_told_of_four_tiles():
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten())
    net, x, labels = problem(backbone)
    with pytest.raises(ValueError, match="use tiles=4"):
        evaluation.localisation(net, (x, labels), ["0"], [ContributionCAM], **QUIET)


@pytest.mark.slow
def test_randomising_changes_contributions_and_not_the_blind_map(corner):
    net, x, labels = corner
    features = net.backbone(x).detach().numpy()
    pipeline = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, labels)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = evaluation.sensitivity(
        net, (x, labels), ["features"], BOTH, layers=1,
        refitted=lambda seed: clone(pipeline).fit(features, np.random.default_rng(seed).permutation(labels)), **QUIET,
    )  # fmt: skip
    for check in (COMPONENTS, LABELS):
        assert found[BLIND, check].mean == pytest.approx(1)
        assert found["ContributionCAM", check].mean < 0.9
    (layer,) = {row.measure for row in found.rows} - {COMPONENTS, LABELS, LIKENESS}
    assert layer == "layers from features.0 up random"
    assert found[BLIND, layer].mean < 0.9
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.slow
def test_a_linear_network_is_complete():
    backbone = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.Flatten())
    net, x, labels = problem(backbone, kernel="linear")
    for target in (None, PCATarget(1)):
        found = evaluation.completeness(net, (x, labels), ["0"], BOTH, target, **QUIET)
        of_sums = [row for row in found.rows if row.measure == ERROR]
        exact, *theirs = (row for row in of_sums if row.method == "ContributionCAM")
        assert exact.passed
        assert exact.estimate.mean < 1e-5
        assert [row.against for row in theirs] == [ANOTHER, HEAD]
        assert all(row.passed for row in theirs)
        assert {row.passed for row in of_sums if row.method == "ClosedFormGradCAM"} == {None}  # it promises nothing
        signs = [row for row in found.rows if row.measure == CONTRADICTING]
        assert len(signs) == (2 if target is None else 0)  # a component decides nothing


@pytest.mark.slow
def test_maps_move_with_the_image(corner):
    net, x, labels = corner
    found = evaluation.stability(net, (x, labels), ["features"], [ContributionCAM, Noise], noise=0, shift=0, **QUIET)
    verdicts = {(row.method, row.measure, row.against): row.verdict for row in found.rows}
    for change in (NOISE, SHIFT):
        assert found["ContributionCAM", change].mean == pytest.approx(1)
        assert abs(found["Noise", change].mean) < 0.1
        assert verdicts["Noise", change, ""] == "failed"
        assert {verdicts["ContributionCAM", change, rival] for rival in ("", *RIVALS)} == {"passed"}
    moved = evaluation.stability(net, (x, labels), ["features"], [ContributionCAM], noise=0.05, shift=1 / 12, **QUIET)
    assert 0.5 < moved["ContributionCAM", NOISE].mean < 1


@pytest.mark.parametrize(
    ("mean", "n", "limit", "verdict"),
    [
        (1.0, 10, 0.75, "passed"),
        (1.0, 10, 0.85, "undecided"),
        (1.0, 10, 1.15, "undecided"),
        (1.0, 10, 1.25, "failed"),
        (1.0, 9, 0.0, "too few images to say"),
        (float("nan"), 0, 0.0, "without any map to judge"),
        (1.0, 50, None, ""),
    ],
)
def test_a_limit_within_the_confidence_interval_is_undecided(mean, n, limit, verdict):
    row = Row("m", "deletion", RANDOM, Estimate(mean, 0.1, n), limit)
    assert row.verdict == verdict
    assert row.passed is (None if limit is None else limit == 0.75 or n == 9)
    turned = Row("m", "deletion", RANDOM, Estimate(mean, 0.1, n), limit, below=True)
    assert turned.verdict == {"passed": "failed", "failed": "passed"}.get(verdict, verdict)
    assert str(Result("c", "q", [row], {}, {})).endswith(f"({verdict})" if verdict else f"n = {n}")


def test_standard_errors_cover_the_truth():
    random = np.random.default_rng(0)
    hits = []
    for _ in range(4000):
        low, high = Estimate.of(random.exponential(size=100)).interval
        hits.append(low <= 1 <= high)
    assert 0.93 <= np.mean(hits) <= 0.97


@pytest.mark.slow
def test_intervals_of_few_images_cover_the_truth():
    random = np.random.default_rng(0)
    few = [Estimate.of(random.normal(size=10)) for _ in range(4000)]
    assert 0.93 <= np.mean([each.interval[0] <= 0 <= each.interval[1] for each in few]) <= 0.97
    assert np.mean([each.above(0) for each in few]) == pytest.approx(0.025, abs=0.01)
    assert np.mean([each.below(0) for each in few]) == pytest.approx(0.025, abs=0.01)
    assert Estimate(1.0, 0.1, 10).interval == pytest.approx((1 - 0.2262157, 1 + 0.2262157))  # Student's t of 9
    assert Estimate(1.0, 0.1, 99, 10).interval == Estimate(1.0, 0.1, 10).interval
    assert np.isnan(Estimate.of([1.0]).interval).all()


def test_standard_errors_of_shared_draws_cover_the_truth():
    random = np.random.default_rng(0)
    draws = np.arange(120) % DRAWS
    hits = []
    for _ in range(4000):
        values = random.normal(size=DRAWS)[draws] + 0.5 * random.normal(size=120)
        values[0] = np.nan
        estimate = Estimate.of(values, draws)
        assert (estimate.n, estimate.draws) == (119, DRAWS)
        low, high = estimate.interval
        hits.append(low <= 0 <= high)
    assert 0.93 <= np.mean(hits) <= 0.97
    alone = Estimate.of(values)
    assert alone.standard_error == pytest.approx(np.nanstd(values, ddof=1) / np.sqrt(119))
    assert np.isnan(Estimate.of(values, np.zeros(120)).standard_error)  # one draw says nothing of others


def test_rank_correlations_are_spearmans():
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    first = random.integers(0, 5, (6, 4, 5)).astype(float)
    second = random.normal(size=(6, 4, 5))
    second[4], first[5] = 3.0, 3.0
    found = rank_correlations(first, second)
    expected = [stats.spearmanr(a.ravel(), b.ravel())[0] for a, b in zip(first[:4], second[:4], strict=True)]
    np.testing.assert_allclose(found[:4], expected)
    assert found[4] == 0  # nothing of the first is left
    assert np.isnan(found[5])


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("kind", ["deletion", "insertion"])
def test_fractions_are_exact(fill, kind):
    random = np.random.default_rng(0)
    x = torch.rand(3, 2, 10, 10)
    maps = random.integers(0, 3, (3, 10, 10)).astype(float)  # with ties
    order = ranks(maps, random.normal(size=maps.shape))
    assert (np.sort(order.reshape(3, -1), 1) == np.arange(100)).all()
    changed = without(FILLS[fill](x), order, kind, 0.3)
    same = (changed == x).all(1).numpy()
    top = order >= 70
    assert (same[~top] if kind == "deletion" else same[top]).all()
    assert not (same[top] if kind == "deletion" else same[~top]).any()
    if fill == "blur":  # the host's own blur, of OpenCV
        cv2 = pytest.importorskip("cv2")
        blurred = FILLS[fill](x)(torch.zeros(3, 10, 10, dtype=torch.bool))
        expected = cv2.GaussianBlur(x[0].permute(1, 2, 0).numpy(), (0, 0), 1.0)
        np.testing.assert_allclose(blurred[0].permute(1, 2, 0), expected, atol=2e-3)


def test_the_blur_is_a_tenth_of_each_side():
    cv2 = pytest.importorskip("cv2")
    x = torch.rand(1, 1, 40, 20)
    blurred = FILLS["blur"](x)(torch.zeros(1, 40, 20, dtype=torch.bool))
    np.testing.assert_allclose(blurred[0, 0], cv2.GaussianBlur(x[0, 0].numpy(), (0, 0), 2.0, sigmaY=4.0), atol=2e-3)
    tiny = torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]])  # the kernel is wider than the image
    mixed = FILLS["blur"](tiny)(torch.zeros(1, 2, 2, dtype=torch.bool))
    assert 0 < mixed.min() < mixed.max() < 3


def test_road_leaves_the_users_generator_alone(corner):
    net, x, labels = corner
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    found = evaluation.faithfulness(net, (x, labels), ["features"], images=4, fill="road", fractions=(0.5,), **QUIET)
    assert torch.equal(torch.rand(1), expected)
    assert found.settings["fill"] == "road"


def test_flat_parts_of_a_map_are_ranked_as_the_random_map_ranks_them():
    ties = np.random.default_rng(0).permutation(16).astype(float).reshape(1, 4, 4)
    assert (ranks(np.zeros((1, 4, 4)), ties) == ties).all()
    half = np.zeros((1, 4, 4))
    half[:, :2] = 1
    found = ranks(half, ties)
    assert found[:, :2].min() == 8
    assert (found[:, 2:].argsort(None) == ties[:, 2:].argsort(None)).all()


@pytest.mark.slow
def test_numbers_depend_neither_on_the_batch_size_nor_on_other_methods(corner):
    net, x, labels = corner
    features = net.backbone(x).detach().numpy()
    options = {
        E.localisation: {"tiles": 4},
        E.sensitivity: {"refitted": lambda seed: clone(SVC()).fit(features, (labels + seed) % 2), "layers": 1},
    }
    masks = np.zeros((len(x), 12, 12), bool)
    masks[::2, :5, :7] = True
    cases = [(check, {}) for check in options] + [(E.completeness, {}), (E.stability, {})]
    cases += [
        (E.faithfulness, {}),
        (E.faithfulness, {"fill": "road", "fractions": (0.5,)}),
        (E.localisation, {"masks": masks}),
    ]
    for check, more in cases:
        one, two = (
            check(
                net,
                (x, labels),
                ["features"],
                methods,
                images=14,
                batch_size=size,
                **(options.get(check, {}) | more),
                **QUIET,
            )
            for size, methods in ((5, [ClosedFormGradCAM, ContributionCAM]), (50, [ContributionCAM]))
        )
        for row in two.rows:
            expected, found = row.estimate, one[row.method, row.measure, row.against]
            assert (found.mean, found.standard_error) == pytest.approx(
                (expected.mean, expected.standard_error), rel=1e-3, abs=1e-4, nan_ok=True
            ), (check, row)


def test_rivals_are_what_they_are_said_to_be(corner):
    net, x, _ = corner
    subject = Subject(net, x, ["features"], [ContributionCAM], SVMTarget(1))
    rivals, targets = Rivals(subject), [SVMTarget(1)] * 7
    with ContributionCAM(net, ["features"]) as cam:
        maps = cam.explain(x[:7], [SVMTarget(1)]).maps
    before = {key: value.clone() for key, value in net.state_dict().items()}
    random = []
    for places, others in ((slice(0, 3), [1, 0, 1]), (slice(3, 7), [2, 3, 4, 5])):
        rows = list(range(7))[places]
        shared, own = rivals.next(x[places], targets[places], rows), rivals.of("ContributionCAM")
        torch.testing.assert_close(shared[BLIND], net.backbone.features(x[places]).sum(1))
        random.append(shared[RANDOM])
        torch.testing.assert_close(torch.cat([each.maps for each in own[ANOTHER]]), maps[others])
        for row, found in zip(rows, own[HEAD], strict=True):
            rivals._rotate(row)
            turned = copy.deepcopy(rivals.rotated)
            with ContributionCAM(turned, ["features"]) as cam:
                torch.testing.assert_close(found.maps, cam.explain(x[row : row + 1], [SVMTarget(1)]).maps)
            given, random_components = (
                np.asarray(each.head.stages[each.head.component_position - 1].components) for each in (net, turned)
            )
            rotation = random_components @ np.linalg.pinv(given)
            np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-6)
            assert np.abs(rotation - np.eye(3)).max() > 0.1
    assert torch.cat(random).flatten(1).unique(dim=0).shape[0] == 7  # each image has its own
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])


def test_only_the_chosen_rivals_are_measured(corner):
    net, x, labels = corner
    for check in (E.faithfulness, E.localisation):
        found = check(
            net,
            (x, labels),
            ["features"],
            [ContributionCAM],
            rivals=[BLIND],
            **({"tiles": 4} if check is E.localisation else {}),
            **QUIET,
        )
        assert {row.against for row in found.rows} - {"", "chance"} == {BLIND}


def test_rotations_lean_to_no_side(corner):
    rivals = Rivals(Subject(corner[0], corner[1], ["features"]))
    projections = [
        next(stage for stage in net.head.stages if hasattr(stage, "components")) for net in (corner[0], rivals.rotated)
    ]
    inverse = torch.linalg.pinv(projections[0].components)
    rotations = []
    for row in range(1000):
        rivals._rotate(row)
        rotations.append(projections[1].components @ inverse)
    mean = torch.stack(rotations).mean(0)
    # Elements of a uniform rotation have mean 0 and variance 1/3: five standard errors.
    assert mean.abs().max() < 5 * (1 / 3 / 1000) ** 0.5
    assert {round(float(torch.linalg.det(each))) for each in rotations} == {-1, 1}


class Unused(Corner):
    """Layers that run in another order than that of their names; one never runs, one has a parametrised weight."""

    def __init__(self):
        super().__init__()
        self.last, self.never = nn.Conv2d(6, 6, 1), nn.Linear(3, 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 1))
        self.first = nn.Conv2d(1, 1, 1)

    def forward(self, x):
        y = self.last(self.normed(self.features(self.first(x))))
        return y.mean((2, 3))


def test_layers_are_randomised_in_the_order_in_which_they_run():
    net, x, _ = problem(Unused())
    before = copy.deepcopy(net.state_dict())
    found = E.sensitivity(net, x, ["features"], [ContributionCAM], images=12, **QUIET)
    layers = [row.measure for row in found.rows if row.method == BLIND and row.measure.startswith("layers")]
    assert layers == [f"layers from {name} up random" for name in ("last", "features.0", "first")]
    assert found[BLIND, layers[0]].mean == pytest.approx(1)  # what follows the target layer
    assert found[BLIND, layers[1]].mean < 0.9
    assert found["ContributionCAM", layers[0]].mean < 0.9
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])


class Classifying(Corner):
    """A network whose features come from a layer in the middle; what follows has no part in them."""

    def __init__(self):
        super().__init__()
        self.behind = nn.Linear(6, 2)

    def forward(self, x):
        return self.behind(self.features(x).mean((2, 3)))


def test_layers_behind_the_features_are_not_randomised():
    plain, x, _ = problem(Corner())
    net = PCASVMNet(Classifying(), plain.head, "features", pool="mean").eval()
    found = E.sensitivity(net, x, ["features"], [ContributionCAM], images=12, **QUIET)
    layers = [row.measure for row in found.rows if row.method == BLIND and row.measure.startswith("layers")]
    assert layers == ["layers from features.0 up random"]


def test_permuted_labels_do_not_judge_maps_of_components(corner):
    net, x, _ = corner
    options = {"refitted": lambda seed: net.head, "layers": 0, "images": 12, **QUIET}
    for target, limit in ((PCATarget(0), None), (SVMTarget(1), 0.5)):
        found = E.sensitivity(net, x, ["features"], [ContributionCAM], target, **options)
        (row,) = (row for row in found.rows if row.measure == LABELS and row.method != BLIND)
        assert row.limit == limit
        assert row.estimate.mean == pytest.approx(1)


class Vanishing(ContributionCAM):
    """Maps that are blank in every other network."""

    def compute(self, run, layer, targets):
        made = super().compute(run, layer, targets)
        made.maps *= getattr(self.model, "own", False)
        return made


def test_a_map_that_vanishes_with_the_head_has_kept_nothing(corner):
    net, x, labels = corner
    net = PCASVMNet(net.backbone, net.head).eval()
    net.own = True
    found = E.sensitivity(net, (x, labels), ["features"], [Vanishing], layers=0, images=12, **QUIET)
    assert found["Vanishing", COMPONENTS] == Estimate(0.0, 0.0, 12)


class Denying(ContributionCAM):
    """Maps without positive evidence where a decision is a clear one."""

    def compute(self, run, layer, targets):
        made = super().compute(run, layer, targets)
        made.maps = torch.where(made.values[..., None, None] > 1, -made.maps.abs(), made.maps)
        return made


def test_the_share_of_maps_without_positive_evidence_is_told(corner):
    net, x, labels = corner
    masks = np.ones((len(x), 12, 12), bool)
    found = E.localisation(net, (x, labels), ["features"], [Denying], masks=masks, **QUIET)
    clear = int((net(x).margins.max(1).values > 1).sum())
    assert 0 < clear < 60
    assert found["Denying", NONE].mean == pytest.approx(clear / 60)
    assert found["Denying", SHARE] == Estimate(1.0, 0.0, 60 - clear)


class Flat(ContributionCAM):
    """Maps that are the same everywhere."""

    def compute(self, run, layer, targets):
        made = super().compute(run, layer, targets)
        made.maps = torch.full_like(made.maps, 1 / 3)
        return made


def test_flat_maps_point_nowhere_and_pass_nothing():
    # Three times as large, a third differs from pixel to pixel in its last bits.
    net, x, labels = problem(nn.Sequential(nn.Conv2d(1, 6, 3, 3), nn.ReLU(), Pooled()))
    call = [net, (x, labels), ["0"], [Flat]]
    boxes = np.tile([0, 0, 3, 3], (len(x), 1))
    found = E.localisation(*call, masks=boxes, rivals=[RANDOM], **QUIET)
    assert found["Flat", NOWHERE] == Estimate(1.0, 0.0, 60)
    assert found["Flat", POINT].n == found["Flat", POINT, "chance"].n == 0
    assert found["Flat", NONE].mean == 0
    assert found["Flat", SHARE, "chance"].mean == pytest.approx(0)
    faithful = E.faithfulness(*call, rivals=[RANDOM], images=12, **QUIET)
    assert {row.estimate for row in faithful.rows} == {Estimate(0.0, 0.0, 12)}
    stable = E.stability(*call, images=12, **QUIET)
    assert {row.estimate.n for row in stable.rows} == {0}


def test_equal_largest_values_share_the_point():
    maps = np.array([[[1, 0, 1], [0, 3, 0], [0, 0, 3]], [[2, 1, 0], [0, 0, 0], [0, 0, 0]], -np.eye(3)])
    maps[0, 1, 1] *= 1 + 1e-15  # equal but for rounding
    inside = np.zeros((3, 3, 3), bool)
    inside[:, :2, :2] = True
    np.testing.assert_array_equal(_points(maps, inside), [1 / 2, 1, np.nan])


def test_a_report_that_is_stopped_keeps_what_was_measured(corner, tmp_path, monkeypatch):
    net, x, _ = corner

    def stopped(*_, **__):
        yield None
        raise KeyboardInterrupt

    monkeypatch.setitem(CHECKS, "stability", stopped)
    with pytest.raises(KeyboardInterrupt):
        E.report(
            net,
            x,
            ["features"],
            [ContributionCAM],
            out=tmp_path,
            checks=["completeness", "stability"],
            images=5,
            **QUIET,
        )
    assert "Completeness" in (tmp_path / "index.html").read_text()
    assert "Completeness" in E.page(tmp_path / "report.json").read_text()


def test_a_seed_gives_the_same_numbers(corner):
    net, x, labels = corner
    call = [net, (x, labels), ["features"], [ContributionCAM]]
    one, two, other = (
        evaluation.faithfulness(*call, images=12, batch_size=size, seed=seed, fractions=(0.5,), **QUIET)
        for size, seed in ((12, 0), (12, 0), (12, 1))
    )
    assert one.to_dict() == two.to_dict() != other.to_dict()
    json.dumps(one.to_dict(), allow_nan=False)
    again = Result.from_dict(json.loads(json.dumps(one.to_dict())))
    assert str(again) == str(one)
    assert "passed" in str(one)


def test_heads_without_classes(corner):
    net, x, labels = corner
    features = net.backbone(x).detach().numpy()
    regressor = PCASVMNet(net.backbone, make_pipeline(PCA(2), SVR()).fit(features, labels + 0.1 * features[:, 0]))
    found = evaluation.faithfulness(regressor, x, ["features"], [ContributionCAM], images=10, fractions=(0.5,), **QUIET)
    assert found["ContributionCAM", "deletion", RANDOM].n == 10
    only = PCASVMNet(net.backbone, PCA(2).fit(features))
    assert evaluation.completeness(only, x, ["features"], [ContributionCAM], PCATarget(0), **QUIET).rows[0].passed
    with pytest.raises(ValueError, match=r"pass target=PCATarget\(0\)"):
        evaluation.faithfulness(only, x, ["features"], **QUIET)
    with pytest.raises(ValueError, match="this head has none: measure faithfulness"):
        evaluation.localisation(regressor, (x, labels), ["features"], **QUIET)


@pytest.mark.slow
def test_a_report_is_one_page(corner, tmp_path):
    net, x, _ = corner
    methods = {"<b>turned</b>": Turned}
    with pytest.warns(UserWarning, match="'localisation' was not run: localisation needs labels"):
        found = evaluation.report(net, x, ["features"], methods, out=tmp_path / "new" / "report", images=12, **QUIET)
    text = found.read_text()
    entries = json.loads((found.parent / "report.json").read_text())
    assert list(entries["results"]) == ["faithfulness", "localisation", "completeness"]
    # No labels: said, not left out.
    assert entries["results"]["localisation"] == {
        "reason": "localisation needs labels: give (images, labels), or masks="
    }
    assert "not run" in text
    assert "<b>" not in text
    assert "&lt;b&gt;turned&lt;/b&gt;" in text
    assert "http" not in text.replace("http-equiv", "")
    assert text.count("data:image/png;base64,") == 1 + 1 + 2  # an example, curves, and the worst of two checks
    turned = Result.from_dict(entries["results"]["faithfulness"])
    verdicts = [row.verdict for row in turned.rows]
    assert verdicts.count("failed") > 0
    for verdict in ("failed", "undecided"):
        assert text.count(verdict) >= verdicts.count(verdict)
    found.unlink()
    assert evaluation.page(found.parent / "report.json").read_text() == text
    old = json.dumps(entries | {"format": "pytorch_grad_cam_pcasvm evaluation 1"})
    (tmp_path / "old.json").write_text(old)
    with pytest.raises(ValueError, match="is not a report of this version"):
        evaluation.page(tmp_path / "old.json")
    for other in ("{}", "<p>"):
        (tmp_path / "other.json").write_text(other)
        with pytest.raises(ValueError, match="is not a report"):
            evaluation.page(tmp_path / "other.json")
    for number in turned.names["<b>turned</b>"]:
        assert f"<li>{number}</li>" in text
    with pytest.raises(ValueError, match="choose from faithfulness"):
        evaluation.report(net, x, ["features"], out=tmp_path, checks=["beauty"])
    with pytest.raises(ValueError, match="no check could be made: localisation needs labels"):
        evaluation.report(net, x, ["features"], out=tmp_path, checks=["localisation"], **QUIET)


def test_a_report_of_components_and_of_images_with_two_channels(tmp_path):
    backbone = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU()), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    x = torch.rand(20, 2, 12, 12).numpy()
    net = PCASVMNet(backbone, PCA(2).fit(backbone(torch.as_tensor(x)).detach().numpy())).eval()
    checks = ["completeness", "stability"]
    with pytest.raises(ValueError, match=r"pass target=PCATarget\(0\)"):
        E.report(net, x, ["0"], out=tmp_path, checks=checks, **QUIET)
    found = E.report(net, x, ["0"], [ContributionCAM], out=tmp_path, target=PCATarget(1), checks=checks, **QUIET)
    entries = json.loads((tmp_path / "report.json").read_text())
    assert [*entries["results"]] == checks
    assert "PCATarget(1)" in entries["results"]["stability"]["settings"]["target"]
    assert "data:image" not in found.read_text()  # two channels are no picture


@pytest.mark.slow
def test_what_fails_in_a_report_is_told_and_stops_nothing(corner, tmp_path, monkeypatch):
    net, x, labels = corner
    call = [net, (x, labels), ["features"], [ContributionCAM]]
    options = {"out": tmp_path, "images": 12, **QUIET}
    measured = []
    monkeypatch.setitem(CHECKS, "faithfulness", lambda *_, target, images=0, **__: measured.append(images))
    for checks, error, match in (
        ({"faithfulness": {}, "stability": {"nois": 1}}, TypeError, "'stability' has no option 'nois': it has target"),
        ({"faithfulness": {}, "beauty": {}}, ValueError, "no check 'beauty'"),
    ):
        with pytest.raises(error, match=match):
            E.report(*call, checks=checks, **options)
    assert not measured  # refused before anything is computed
    with pytest.warns(UserWarning, match="the check 'stability' was not run: TypeError: "):
        found = E.report(*call, checks={"stability": {"noise": "much"}, "completeness": {}}, **options)
    assert "not run" in found.read_text()
    monkeypatch.setattr(
        sys.modules["pytorch_grad_cam_pcasvm.studio.evaluation.report"], "plot_maps", lambda *_, **__: 1 / 0
    )
    with pytest.warns(UserWarning, match="the worst images of the check 'completeness' were not drawn: ZeroDivision"):
        found = E.report(*call, checks="completeness", **options)
    assert "pictures: not drawn: ZeroDivisionError" in found.read_text()


@pytest.mark.usefixtures("undrawn")
def test_blank_maps_are_no_matter_of_more_images(corner, tmp_path):
    net, x, labels = corner
    checks = ["faithfulness", "stability"]
    found = E.report(net, (x, labels), ["features"], [Falling], images=12, checks=checks, out=tmp_path, **QUIET)
    text = found.read_text()
    assert "too few images" not in text
    assert '<td class="failed">8 without any map to judge (of 8), 100% of the maps are blank</td>' in text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("target", [HotellingTarget(), ResidualTarget()])
def test_rotations_that_do_not_change_a_target_are_told(corner, tmp_path, target, whiten):
    net, x, _ = corner
    features = net.backbone(x).detach().numpy()
    none = PCASVMNet(net.backbone, make_pipeline(StandardScaler(), PCA(3, whiten=whiten)).fit(features)).eval()
    subject = Subject(none, x, ["features"], target=target)
    rivals = Rivals(subject)
    options = {"checks": ["sensitivity", "localisation"], "images": 4, **QUIET}
    with pytest.warns(UserWarning, match="this head has none: measure faithfulness instead"):
        page = E.report(none, x, ["features"], [ContributionCAM], out=tmp_path, target=target, **options).read_text()
    told = f"Not measured: a randomised head's map: {type(target).__name__} depends on the subspace"
    if isinstance(target, HotellingTarget) and not whiten:
        rivals._rotate(0)
        assert (target(rivals.rotated(x)) - target(none(x))).abs().min() > 1e-3
        assert told not in html.unescape(page)
    else:
        assert rivals.rotated is None
        assert told in html.unescape(page)


def test_images_of_which_nobody_knows_are_left_out(corner):
    net, (x, labels) = corner[0], (each[:24] for each in corner[1:])
    masks = np.zeros((24, 12, 12))
    masks[:16, :6, :6] = 1
    unknown = [2, 5, 17]
    known = np.setdiff1d(np.arange(24), unknown)
    options = {"images": None, "rivals": [RANDOM], **QUIET}
    some = [None if row in unknown else mask for row, mask in enumerate(masks)]
    found = E.localisation(net, (x, labels), ["features"], [ContributionCAM], masks=some, **options)
    alone = E.localisation(
        net, (x[known], labels[known]), ["features"], [ContributionCAM], masks=masks[known], **options
    )
    assert "3 of 24 images: they have no mask" in found.settings["not measured"]
    assert found.settings["scenes"] == alone.settings["scenes"] == 14
    assert [row.measure for row in found.rows] == [row.measure for row in alone.rows]
    for one, other in zip(found.rows, alone.rows, strict=True):
        if one.method in ("ContributionCAM", BLIND) and not one.against:  # nothing there is random
            assert one.estimate.mean == pytest.approx(other.estimate.mean, rel=1e-4, nan_ok=True)


@pytest.mark.usefixtures("undrawn")
def test_images_without_an_object_are_told(corner, tmp_path):
    net, (x, labels) = corner[0], (each[:24] for each in corner[1:])
    masks = np.zeros((24, 12, 12))
    masks[:16, :6, :6] = 1
    found = E.localisation(net, (x, labels), ["features"], [ContributionCAM], masks=masks, images=None, **QUIET)
    assert found.settings["scenes"] == 16
    assert found.settings["not measured"] == "8 of 24 images: their mask or box is empty"
    (sentence,) = describe_localisation(found)
    near, blind = (
        next(row.estimate.mean for row in found.rows if row.method == name and "within" in row.measure and "," not in
             row.measure.split("within")[1]) for name in ("ContributionCAM", BLIND)
    )  # fmt: skip
    assert sentence.startswith(f"The maps of ContributionCAM find the marked place in {near:.0%} of the images")
    assert f"To compare, a map that ignores the decision does so in {blind:.0%}" in sentence
    for name in ("control", "other", "maps"):  # methods of any name
        rows = [replace(row, method=name) for row in found.rows if row.method == "ContributionCAM"]
        assert describe_localisation(replace(found, rows=rows))[0].startswith(f"The maps of {name} find")
    report = evaluation.report(
        net, (x, labels), ["features"], [ContributionCAM], out=tmp_path, images=None, progress=False,
        checks={"localisation": {"masks": masks}},
    )  # fmt: skip
    assert sentence in html.unescape(report.read_text())


@pytest.mark.slow
class AskedError(Exception):
    """Raised in place of measuring."""


@pytest.mark.parametrize(
    ("asked", "measured"),
    [({}, ("faithfulness", "localisation", "completeness")), ({"checks": "all"}, tuple(CHECKS))],
)
def test_sensitivity_and_stability_are_measured_if_asked_for(asked, measured, corner, tmp_path, monkeypatch):
    def ask(study, options):
        raise AskedError(*options)

    monkeypatch.setattr(import_module("pytorch_grad_cam_pcasvm.studio.evaluation.report"), "_courses", ask)
    net, x, labels = corner
    with pytest.raises(AskedError) as told:
        evaluation.report(net, (x, labels), ["features"], [ContributionCAM], out=tmp_path, **asked, **QUIET)
    assert told.value.args == measured


def test_options_of_single_checks(corner, tmp_path):
    net, x, labels = corner
    checks = {"localisation": {"tiles": 4}, "completeness": {"images": 5}}
    found = evaluation.report(net, (x, labels), ["features"], [ContributionCAM], out=tmp_path, checks=checks, **QUIET)
    results = json.loads((found.parent / "report.json").read_text())["results"]
    assert results["localisation"]["settings"]["tiles"] == 4
    assert results["completeness"]["settings"]["images"] == 5


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda n, x, y: E.faithfulness(n.backbone, x, ["features"]), TypeError, "PCASVMNet"),
        (lambda n, x, y: E.faithfulness(n, x[:2], ["features"]), ValueError, "2 images are too few"),
        (lambda n, x, y: E.faithfulness(n, (x, y[:5]), ["features"]), ValueError, "60 images and 5 labels"),
        (lambda n, x, y: E.faithfulness(n, x, "features"), ValueError, "list of one layer"),
        (lambda n, x, y: E.faithfulness(n, x, ["features"], [nn.ReLU]), TypeError, "class of the package"),
        (lambda n, x, y: E.faithfulness(n, x, ["features"], []), TypeError, "list of classes"),
        (lambda n, x, y: E.faithfulness(n, x, ["features"], [Noise, Noise]), ValueError, "two methods"),
        (lambda n, x, y: E.faithfulness(n, x, ["features"], fill="black"), ValueError, "one of"),
        (lambda n, x, y: E.faithfulness(n, x, ["features"], fractions=(0, 1)), ValueError, "between 0 and 1"),
        (lambda n, x, y: E.faithfulness(n, x, ["features"], fractions=0.5), ValueError, "between 0 and 1"),
        (lambda n, x, y: E.faithfulness(n, x, ["features"], target=[PCATarget(0)]), TypeError, "must be one target"),
        (lambda n, x, y: E.faithfulness(n, ([*x], [*y]), ["features"]), TypeError, "must have a tensor of images"),
        (lambda n, x, y: E.faithfulness(n, x[:, 0, 0], ["features"]), ValueError, r"\(N, C, H, W\), got \(60, 12\)"),
        (lambda n, x, y: E.sensitivity(n, x, ["features"], layers=-1), ValueError, "layers must be an integer from 0"),
        (lambda n, x, y: E.localisation(n, x, ["features"], masks=[None] * 60), ValueError, "shape .R, 4.; these are"),
        (
            lambda n, x, y: E.localisation(n, x, ["features"], masks=[np.ones((12, 12)), np.ones((5, 5))] * 30),
            ValueError,
            "these differ in size",
        ),
        (
            lambda n, x, y: E.localisation(n, x, ["features"], masks=np.full((60, 12, 12), np.nan)),
            ValueError,
            "no finite numbers: use zeros",
        ),
        *(
            (
                lambda n, x, y, count=count: E.faithfulness(n, x[:1].expand(count, -1, -1, -1), ["features"]),
                ValueError,
                "same value",
            )
            for count in (3, 12, 20)
        ),
        (lambda n, x, y: E.completeness(n, x[:1].expand(12, -1, -1, -1), ["features"]), ValueError, "same value"),
        (lambda n, x, y: E.stability(n, x, ["features"], shift=0.97), ValueError, "leaves nothing of images 12 pixels"),
        (
            lambda n, x, y: E.stability(n, x, ["features"], seed=-1),
            ValueError,
            "seed must be an integer from 0, got -1",
        ),
        (
            lambda n, x, y: E.stability(n, x, ["features"], batch_size=0),
            ValueError,
            "batch_size must be an integer from 1",
        ),
        (lambda n, x, y: E.stability(n, x, ["fetures"]), ValueError, "no layer 'fetures'"),
        (
            lambda n, x, y: E.faithfulness(n, [*x[:20], *torch.zeros(20, 1, 10, 10)], ["features"], batch_size=2),
            ValueError,
            "bring all to one size",
        ),
        (
            lambda n, x, y: E.localisation(n, (x, y), ["features"], masks=np.tile([6, 6, 60, 40], (60, 1))),
            ValueError,
            "boxes reach x = 60 and y = 40, beyond the input of 12 x 12 pixels",
        ),
        (
            lambda n, x, y: E.localisation(n, (x, y), ["features"], masks=np.tile([-2, 0, 6, 4], (60, 1))),
            ValueError,
            "some begin below 0",
        ),
        (lambda n, x, y: E.faithfulness(n, x, ["features"], rivals=[]), ValueError, "rivals must not be empty"),
        (
            lambda n, x, y: E.faithfulness(one_component(n, x, y), x, ["features"], rivals=[HEAD]),
            ValueError,
            "only one component",
        ),
        (lambda n, x, y: E.faithfulness(n, DataLoader(x), ["features"]), TypeError, "which a DataLoader does not have"),
        (lambda n, x, y: E.localisation(n, x, ["features"]), ValueError, "needs labels"),
        (lambda n, x, y: E.localisation(n, (x, y * 0), ["features"]), ValueError, "1 class"),
        (lambda n, x, y: E.localisation(n, (x, y + 7), ["features"]), ValueError, "not classes of the head"),
        (lambda n, x, y: E.localisation(n, (x, y), ["features"], tiles=3), ValueError, "2 or 4"),
        (lambda n, x, y: E.localisation(n, (x, y), ["features"], masks=x[:, 0, :5] > 0), ValueError, "masks of"),
        (lambda n, x, y: E.localisation(n, (x, y), ["features"], masks=x[:4] > 0), ValueError, "4 masks for 60"),
        (
            lambda n, x, y: E.localisation(n, (x, y), ["features"], masks=np.tile([0, 0, 0.5, 0.5], (60, 1))),
            ValueError,
            "boxes must be in pixels",
        ),
        (
            lambda n, x, y: E.localisation(n, (x, y), ["features"], masks=np.tile([6, 6, 4, 4], (60, 1))),
            ValueError,
            "are yours x, y, width, height",
        ),
        (
            lambda n, x, y: E.localisation(n, (x, y), ["features"], masks=np.zeros((60, 12, 12))),
            ValueError,
            "every mask is empty",
        ),
        (lambda n, x, y: E.faithfulness(n, x, ["features"], rivals=["me"]), ValueError, "no rival 'me': choose from"),
        (lambda n, x, y: E.stability(n, x, ["features"], shift=1.5), ValueError, "between 0 and 1"),
    ],
)
def test_bad_input(corner, call, error, match):
    net, x, labels = corner
    with pytest.raises(error, match=match):
        call(net, x, labels)


@pytest.mark.slow
def test_the_worst_ten_of_every_check_are_those_with_the_worst_numbers(corner):
    net, x, labels = corner
    call = [net, (x, labels), ["features"], [ContributionCAM, Noise]]
    for check in (E.faithfulness, E.localisation, E.sensitivity, E.completeness, E.stability):
        found = check(*call, images=None, batch_size=7, **({"tiles": 4} if check is E.localisation else {}), **QUIET)
        for method, rows in found.worst.items():
            shown = found.pictures[method]
            assert found.names[method] == [str(row) for row in rows]
            assert len(set(rows)) == len(rows) == len(shown.images) == len(shown.maps)
            if check is not E.localisation:  # which has fewer images, of scenes
                assert len(rows) == 10
                assert torch.equal(shown.images, torch.stack([stretched(image) for image in x[rows]]))
        assert "pictures" not in found.to_dict()
    target = PCATarget(0)
    found = E.completeness(*call[:3], [ClosedFormGradCAM], target, images=None, batch_size=7, **QUIET)
    with ClosedFormGradCAM(net, ["features"]) as cam:
        maps = cam.explain(x, [target])
    distance = (maps.maps.sum((1, 2, 3)) - maps.values[:, 0]).abs()
    assert found.worst["ClosedFormGradCAM"] == distance.argsort(descending=True)[:10].tolist()
    masks = np.zeros((len(x), 12, 12), bool)
    masks[:, :6, :4] = True
    found = E.localisation(*call[:3], [ContributionCAM], images=None, masks=masks, **QUIET)
    own, moved = (_own_maps(net, images, net.predict(x)) for images in (x, torch.cat([x[..., :1], x[..., :-1]], -1)))
    positive = own.clip(0)
    share = (positive * masks).sum((1, 2)) / np.maximum(positive.sum((1, 2)), 1e-12)
    known = np.flatnonzero(positive.any((1, 2)))
    assert found.worst["ContributionCAM"] == known[share[known].argsort()][:10].tolist()
    stats = pytest.importorskip("scipy.stats")
    found = E.stability(*call[:3], [ContributionCAM], images=None, noise=0, shift=1 / 12, **QUIET)
    kept = [stats.spearmanr(a[:, :-1].ravel(), b[:, 1:].ravel())[0] for a, b in zip(own, moved, strict=True)]
    assert found.worst["ContributionCAM"] == np.argsort(kept)[:10].tolist()
    blind = net.backbone.features(x).sum(1).detach().numpy()
    others = [stats.spearmanr(a[:, :-1].ravel(), b[:, 1:].ravel())[0] for a, b in zip(blind, moved, strict=True)]
    assert found["ContributionCAM", SHIFT].mean == pytest.approx(np.mean(kept), rel=1e-4)
    assert found["ContributionCAM", SHIFT, BLIND].mean == pytest.approx(np.mean(np.subtract(kept, others)), abs=1e-4)
    found = E.sensitivity(*call[:3], [ContributionCAM], images=None, layers=0, **QUIET)
    alike = [abs(stats.spearmanr(a.ravel(), b.ravel())[0]) for a, b in zip(own, blind, strict=True)]
    assert found["ContributionCAM", LIKENESS, BLIND].mean == pytest.approx(np.mean(alike), rel=1e-4)


def _own_maps(net, x, labels):
    """Return contributions of each image's class, (N, H, W)."""
    with ContributionCAM(net, ["features"]) as cam:
        maps = [cam.explain(x[n : n + 1], [SVMTarget(label)]).maps[0, 0] for n, label in enumerate(labels.tolist())]
    return torch.stack(maps).double().numpy()


@pytest.mark.slow
def test_maps_that_hardly_depend_on_the_target_are_like_the_blind_map(corner):
    net, x, labels = corner
    found = E.sensitivity(net, (x, labels), ["features"], [ContributionCAM, ClosedFormLayerCAM, Noise], **QUIET)
    noise, layer = (found[method, LIKENESS, BLIND].mean for method in ("Noise", "ClosedFormLayerCAM"))
    assert noise < 0.15 < layer


def test_arcc_is_the_hosts(corner):
    arcc = pytest.importorskip("pytorch_grad_cam.metrics.arcc")
    net, x, _ = corner
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    found = E.faithfulness(net, x[:4], ["features"], [ContributionCAM], PCATarget(0), arcc=True, **QUIET)
    assert torch.equal(torch.rand(1), expected)
    rows, host = np.random.default_rng(0).permutation(4), []
    with ContributionCAM(net, ["features"]) as cam, torch.random.fork_rng(devices=[]):
        for row in rows:
            torch.manual_seed(0)
            image, targets = x[row : row + 1], [PCATarget(0)]
            host += list(arcc.ARCC(cam)(image, cam(image, targets=targets), targets, net))
    assert found["ContributionCAM", "ARCC"].mean == pytest.approx(np.mean(host))
    assert found["ContributionCAM", "ARCC"].n == 4


class Rows(nn.Module):
    """Dense features, by a view, which activations with channels last in memory do not have, or by a copy."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU())
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        return y.view(len(x), -1) if self.view else y.reshape(len(x), -1)


def test_a_network_that_views_its_activations_is_measured_as_any_other():
    x, labels = torch.randn(30, 2, 12, 12, generator=torch.Generator().manual_seed(0)), np.arange(30) % 2
    x[labels == 1, :, :6] += 1
    head = make_pipeline(PCA(2), SVC()).fit(Rows(True)(x).detach().numpy(), labels)
    found = [
        E.faithfulness(PCASVMNet(Rows(view), head).eval(), x, ["features"], [ContributionCAM], images=12, **QUIET)
        for view in (True, False)
    ]
    for one, other in zip(*(each.rows for each in found), strict=True):
        assert one.estimate.mean == pytest.approx(other.estimate.mean, abs=1e-4)


@pytest.mark.slow
def test_flags_and_generators_are_the_users(corner):
    _, x, labels = corner
    backbone = nn.Sequential(nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5)), Pooled())
    backbone.eval()
    head = make_pipeline(PCA(2), SVC()).fit(backbone(x).detach().numpy(), labels)
    net = PCASVMNet(backbone, head)  # in training mode itself, its backbone is not
    backbone[0][3].train()
    flags = [module.training for module in net.modules()]
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for check in (E.faithfulness, E.localisation, E.sensitivity, E.completeness, E.stability):
            check(net, (x, labels), ["0"], [ContributionCAM], images=10, **QUIET)
    assert [module.training for module in net.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_batches_are_no_larger_than_asked(corner):
    subject = Subject(corner[0], corner[1], ["features"], batch_size=8, progress=False)
    for count in (2, 3, 7, 9, 39, 60):
        parts = list(subject.parts(list(range(count)), "", ""))
        assert [item for part in parts for item in part] == list(range(count))
        assert max(map(len, parts)) <= 8
        assert len(parts[0]) >= 2


def test_which_class_of_a_scene_is_explained_is_drawn():
    random = np.random.default_rng(0)
    first = [_chosen({"a": 9, "b": 4, "c": 0}, 2, random, None) for _ in range(400)]
    assert all(sorted(chosen) == ["a", "b"] for chosen in first)
    assert 160 < sum(chosen[0] == "a" for chosen in first) < 240
    assert {tuple(_chosen({"a": 3, "b": 1}, 4, random, None)) for _ in range(40)} == {("b", "a", "a", "a")}
    assert _chosen({"a": 2, "b": 2}, 4, random, None) == []
    four = [_chosen(dict(zip("abcd", (5, 4, 3, 2), strict=True)), 4, random, None) for _ in range(400)]
    assert {chosen[0] for chosen in four} == set("abcd")
    assert {_chosen({"a": 9, "b": 9}, 2, random, "a")[0] for _ in range(40)} == {"b"}


def test_decisions_for_the_normal_class_are_left_out(corner):
    net, (x, labels) = corner[0], (each[:16] for each in corner[1:])
    settings = {"images": None, "progress": False}
    result = evaluation.faithfulness(net, (x, labels), ["features"], [ContributionCAM], normal=0, **settings)
    assert result.settings["target"] == "SVMTarget(versus=0)"
    assert result.question.endswith("; decisions for 0 are left out")
    assert {row.estimate.n for row in result.rows} == {int((net.predict(x) != 0).sum())}
    usual = evaluation.faithfulness(net, (x, labels), ["features"], [ContributionCAM], **settings)
    assert {row.estimate.n for row in usual.rows} == {len(x)}
    study = evaluation.Study(net, (x, labels), ["features"], [ContributionCAM], normal=0, **settings)
    batch, _ = study.read(list(range(8)))
    assert study.targets(batch) == [SVMTarget(1, versus=0)] * 8  # whichever is predicted
    assert "decisions for 0 are left out" in study.localisation().question
    with pytest.raises(ValueError, match="is not a class"):
        evaluation.Study(net, (x, labels), ["features"], normal="good")


def test_maps_of_several_layers_are_compared_with_controls_of_one():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()
    )
    x, labels = torch.rand(6, 3, 8, 8), np.arange(6) % 2
    features = net(x).mean((2, 3)).detach().numpy()
    whole = PCASVMNet(net, make_pipeline(PCA(3), SVC()).fit(features, labels), "4", pool="mean").eval()
    methods = {"both": (ContributionCAM, {"target_layers": ["1", "4"], "mean": [
        mean_activations(whole, [x], layer, progress=False) for layer in ("1", "4")]})}  # fmt: skip
    result = evaluation.sensitivity(whole, (x, labels), ["4"], methods, layers=1, images=None, progress=False)
    assert {row.estimate.n for row in result.rows if row.measure == LIKENESS} == {6}


def one_component(net, x, labels):
    features = net.backbone(x).detach().numpy()
    return PCASVMNet(net.backbone, make_pipeline(PCA(1), SVC()).fit(features, labels)).eval()


def test_one_component_cannot_be_rotated_and_whitened_ones_stay_white(corner):
    net, x, labels = corner
    features = net.backbone(x).detach().numpy()
    one = one_component(*corner)
    for check in (E.sensitivity, E.faithfulness):
        found = check(one, x, ["features"], [ContributionCAM], images=6, **QUIET)
        assert not {COMPONENTS, HEAD} & {word for row in found.rows for word in (row.measure, row.against)}
        assert "only one component" in found.settings["not measured"]
    white = PCASVMNet(
        net.backbone, make_pipeline(PCA(3, whiten=True), SVC()).fit(features.astype(float), labels)
    ).eval()
    rivals = Rivals(Subject(white, x, ["features"]))
    given = white(x).components
    for row in (4, 9):
        rivals._rotate(row)
        components = rivals.rotated(x).components
        torch.testing.assert_close(components.T.cov(), torch.eye(3, dtype=torch.float64))
        assert (components - given).abs().max() > 0.5
        assert torch.equal(white(x).components, given)


def test_a_target_that_asks_for_the_predicted_class_is_that_of_the_whole_image(corner):
    net, x, labels = corner
    predicted = net.predict(x).tolist()

    def targets(target, net=net):
        return Subject(net, x, ["features"], target=target).targets(x)

    assert targets(None) == [SVMTarget(label) for label in predicted]
    assert targets(SVMTarget(versus="runner-up")) == [SVMTarget(label, versus=1 - label) for label in predicted]
    features = net.backbone(x).detach().numpy()
    likely = PCASVMNet(net.backbone, make_pipeline(PCA(2), LogisticRegression()).fit(features, labels)).eval()
    assert targets(ProbabilityTarget(), likely) == [ProbabilityTarget(label) for label in likely.predict(x).tolist()]
    assert targets(PCATarget(1)) == [PCATarget(1)] * len(x)
    assert targets(SVMTarget(versus=0)) == [SVMTarget(1, versus=0)] * len(x)
    many = np.random.default_rng(0).permutation(np.arange(60) % 6)
    net = PCASVMNet(net.backbone, make_pipeline(PCA(3), SVC()).fit(features, many)).eval()
    output = net(x)
    order = output.head.voting.ranking(output.decision).argsort(descending=True).tolist()
    for n, found in enumerate(targets(SVMTarget(2, versus="runner-up"), net)):
        assert found == SVMTarget(2, versus=next(label for label in order[n] if label != 2))
    with torch.no_grad():
        for row, found in zip(output, targets(SVMTarget(versus="runner-up"), net), strict=True):
            assert float(found(row)) == pytest.approx(float(SVMTarget(versus="runner-up")(row)))


class Falling(ClosedFormLayerCAM):
    """Maps of a target that every position lowers."""

    def compute(self, run, layer, targets):
        made = super().compute(run, layer, targets)
        made.opposite, made.maps = made.opposite + made.maps, torch.zeros_like(made.maps)
        return made


def test_maps_without_evidence_for_the_target_are_blank(corner):
    net, x, labels = corner
    found = E.faithfulness(net, (x, labels), ["features"], [Falling], images=12, **QUIET)
    assert found.blank == {"Falling": 1.0}
    assert found["Falling", "deletion", RANDOM].n == 0


def test_volumes_are_not_put_side_by_side(corner):
    net, _, labels = corner
    x = torch.zeros(60, 1, 4, 12, 12)
    for masks in (None, np.tile([0, 0, 6, 6], (60, 1))):
        with pytest.raises(ValueError, match="give masks"):
            E.localisation(net, (x, labels), ["features"], masks=masks, **QUIET)
