"""Seeds: targets' values and gradients by what the network gives, against autograd on the head itself."""

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR

from pytorch_grad_cam_pcasvm import Head, PCATarget, ProbabilityTarget, SVMTarget
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput, PlainOutput
from pytorch_grad_cam_pcasvm.targets import PredictedScore, ScoreTarget
from pytorch_grad_cam_pcasvm.targets.output_gradients import differentiate_targets
from pytorch_grad_cam_pcasvm.targets.questions import resolve_image_targets

RNG = np.random.default_rng(0)
LABELS = np.array(["ant", "bee", "cat"])[np.arange(60) % 3]
FEATURES = RNG.normal(size=(60, 7)) + 2 * RNG.normal(size=(3, 7))[np.arange(60) % 3]
NEAR = torch.tensor(RNG.normal(size=(5, 7)))
QUERIES = {"near": NEAR, "far": NEAR + torch.tensor([0.0, 50.0, 0.0, 70.0, 90.0]).reshape(-1, 1)}


def head_of(machine):
    return Head.of(make_pipeline(StandardScaler(), PCA(4, whiten=True), machine).fit(FEATURES, LABELS))


HEAD = head_of(SVC(gamma=0.5))


def raw_component(row):
    return row.components[2] * 3


class Named(PCATarget):
    """Not taken together with others."""


def product(row):
    return row.components[0] * row.features[1] + row.decision[1].tanh()


TARGETS = [
    [PCATarget(b) for b in range(4)],
    [PCATarget(2), PCATarget(0)],
    [PCATarget(3, sign="-"), PCATarget(1), PCATarget(3)],
    [PCATarget(0), PCATarget(1, sign="-"), PCATarget(2), PCATarget(3)],
    [SVMTarget("bee")],
    [SVMTarget("bee"), SVMTarget("cat", sign="-")],
    [SVMTarget(), SVMTarget("ant"), SVMTarget(versus="runner-up"), SVMTarget("cat", versus="ant")],
    [SVMTarget("cat"), PCATarget(1), SVMTarget(), PCATarget(0, sign="-"), raw_component, SVMTarget("ant", sign="-")],
    [raw_component, SVMTarget("ant"), PCATarget(2)],
    [SVMTarget("cat", versus="runner-up"), Named(3, sign="-"), Named(1)],
    [product],
]


def expected(head, x, targets):
    """Return values (N, K) and gradients by the features (K, N, D), of one call and one backward pass a target."""
    leaf = x.clone().requires_grad_()
    output = HeadOutput.of(head, head(leaf))
    values = torch.stack([torch.stack([target(row) for row in output]) for target in targets], 1)
    grads = [torch.autograd.grad(column.sum(), leaf, retain_graph=True)[0] for column in values.unbind(1)]
    return values.detach(), torch.stack(grads)


def given(head, x):
    with torch.no_grad():
        return HeadOutput.of(head, head(x))


def true(seeds):
    """Return the gradients with their factors, shape (K, N, D)."""
    assert seeds.log_scale.shape == seeds.grads[0].shape[:2][::-1]
    return seeds.grads[0] * seeds.log_scale.T.exp().unsqueeze(-1)


@pytest.mark.parametrize("where", QUERIES)
@pytest.mark.parametrize("targets", TARGETS, ids=lambda targets: str(len(targets)))
def test_seeds_of_a_head(targets, where):
    x = QUERIES[where]
    with torch.no_grad():
        seeds = differentiate_targets(given(HEAD, x), targets, torch.float64)
    values, grads = expected(HEAD, x, targets)
    assert relative(seeds.values, values) < 1e-12
    for actual, wanted in zip(true(seeds).flatten(0, 1), grads.flatten(0, 1), strict=True):
        assert (actual - wanted).abs().max() <= 1e-9 * wanted.abs().max()
    for k, target in enumerate(targets):
        far = isinstance(target, SVMTarget) and where == "far"
        assert seeds.log_scale[:, k].lt(0).tolist() == [far and n in (1, 3, 4) for n in range(5)]


@pytest.mark.parametrize("where", QUERIES)
@pytest.mark.parametrize(
    "targets",
    [
        [SVMTarget()] * 5,
        [PCATarget(1)] * 5,
        [raw_component] * 5,
        [raw_component, product, product, raw_component, product],
        [PCATarget(1), SVMTarget("cat"), PCATarget(0, sign="-"), PCATarget(1), SVMTarget("cat")],
        [SVMTarget("ant"), product, SVMTarget(), raw_component, PCATarget(3)],
    ],
    ids=lambda targets: str(len(set(targets))),
)
def test_seeds_of_each_images_own_target(targets, where):
    x = QUERIES[where]
    with torch.no_grad():
        seeds = differentiate_targets(output := given(HEAD, x), resolve_image_targets(targets, output), torch.float64)
    actual = true(seeds)
    assert actual.shape == (1, 5, 7)
    for n, target in enumerate(targets):
        values, grads = expected(HEAD, x[n : n + 1], [target])
        assert relative(seeds.values[n : n + 1], values) < 1e-12
        assert (actual[0, n] - grads[0, 0]).abs().max() <= 1e-9 * grads.abs().max()


def test_probabilities_and_scores_have_seeds_like_any_callable():
    head = head_of(CalibratedClassifierCV(SVC(gamma=0.2), cv=2))
    targets = [ProbabilityTarget(), ProbabilityTarget("bee", sign="-"), ProbabilityTarget("bee"), PredictedScore()]
    with torch.no_grad():
        seeds = differentiate_targets(given(head, NEAR), targets, torch.float64)
    values, grads = expected(head, NEAR, targets)
    assert relative(seeds.values, values) < 1e-12
    assert relative(true(seeds), grads) < 1e-9
    probabilities = given(head, NEAR).as_subclass(torch.Tensor)
    assert relative(seeds.values[:, 1], -probabilities[:, 1]) < 1e-12
    assert relative(seeds.values[:, 0], probabilities.max(1).values) < 1e-12


def test_a_class_may_be_called_runner_up():
    machine = make_pipeline(PCA(4), SVC()).fit(FEATURES, np.where(LABELS == "bee", "runner-up", LABELS))
    output = given(Head.of(machine), NEAR)
    assert output.head.classes_.tolist() == ["ant", "cat", "runner-up"]
    target = SVMTarget("cat", versus="runner-up")
    assert torch.equal(target(output), output.decision[:, 2])
    assert torch.equal(target.seeds(output)[2], torch.tensor([[0.0, 0.0, 1.0]]).double())
    regressor = given(Head.of(make_pipeline(PCA(4), SVR()).fit(FEATURES, FEATURES[:, 0])), NEAR)
    with pytest.raises(ValueError, match="the head has no classes to compare"):
        SVMTarget(versus="runner-up")(regressor)
    with pytest.raises(ValueError, match="the head has no classes"):
        SVMTarget("cat", versus="runner-up").seeds(regressor)


def test_the_dtype_of_seeds():
    seeds = differentiate_targets(given(HEAD, NEAR), [PCATarget(0), SVMTarget()], torch.float32)
    assert seeds.grads[0].dtype == torch.float32
    assert seeds.values.dtype == seeds.log_scale.dtype == torch.float64
    seeds = differentiate_targets(PlainOutput(NEAR.half(), 5), [ScoreTarget(), lambda row: row[0]], torch.float32)
    assert seeds.grads[0].dtype == torch.float32


# --- ordinary networks ----------------------------------------------------------------------------------------------


def test_scores_of_an_ordinary_network():
    targets = [ScoreTarget(), ScoreTarget(3), lambda row: row[1] * row[2]]
    seeds = differentiate_targets(PlainOutput(NEAR, 5), targets, torch.float64)
    leaf = NEAR.clone().requires_grad_()
    values = torch.stack([leaf.max(1).values, leaf[:, 3], leaf[:, 1] * leaf[:, 2]], 1)
    grads = torch.stack([torch.autograd.grad(v.sum(), leaf, retain_graph=True)[0] for v in values.unbind(1)])
    assert torch.equal(seeds.values, values.detach())
    assert relative(seeds.grads[0], grads) < 1e-12
    assert seeds.log_scale.shape == (5, 3)
    assert not seeds.log_scale.any()


def test_one_number_an_image_is_its_score():
    seeds = differentiate_targets(PlainOutput(NEAR[:, 0], 5), [ScoreTarget()], torch.float64)
    assert torch.equal(seeds.values[:, 0], NEAR[:, 0])
    assert torch.equal(seeds.grads[0], torch.ones(1, 5).double())


def test_several_tensors_of_which_targets_read_some():
    output = {"logits": NEAR, "count": torch.arange(5), "pixels": NEAR[:, :6].reshape(5, 2, 3), "unread": NEAR + 1}
    output["one for all"] = torch.tensor([1, 2])
    targets = [
        lambda row: row["logits"][2] ** row["one for all"][1],
        lambda row: row["pixels"].sum() * row["count"],
        lambda row: row["logits"][0] * row["pixels"][1, 1],
    ]
    seeds = differentiate_targets(PlainOutput(output, 5), targets, torch.float64)
    logits, count, pixels, unread, _ = seeds.grads
    assert count is None
    assert unread is None
    zeros = torch.zeros(3, 5, 7).double()
    zeros[0, :, 2], zeros[2, :, 0] = 2 * NEAR[:, 2], output["pixels"][:, 1, 1]
    assert relative(logits, zeros) < 1e-12
    zeros = torch.zeros(3, 5, 2, 3).double()
    zeros[1], zeros[2, :, 1, 1] = torch.arange(5.0).reshape(5, 1, 1), NEAR[:, 0]
    assert relative(pixels, zeros) < 1e-12


def test_each_image_of_an_ordinary_network_has_its_own_target():
    targets = [ScoreTarget(n) for n in range(5)]
    for each in (targets, [lambda row, n=n: row[n] for n in range(5)], [*targets[:2], *[lambda row: row[4]] * 3]):
        output = PlainOutput(NEAR, 5)
        seeds = differentiate_targets(output, resolve_image_targets(each, output), torch.float64)
        at = [0, 1, 4, 4, 4] if each[2] is each[3] else range(5)
        wanted = torch.zeros(1, 5, 7).double()
        wanted[0, torch.arange(5), torch.tensor(list(at))] = 1
        assert torch.equal(seeds.grads[0], wanted)
        assert torch.equal(seeds.values[:, 0], NEAR[torch.arange(5), torch.tensor(list(at))])
    same = differentiate_targets(output, resolve_image_targets([ScoreTarget(2)] * 5, output), torch.float64)
    assert torch.equal(same.grads[0], differentiate_targets(output, [ScoreTarget(2)], torch.float64).grads[0])


def test_a_target_that_depends_on_nothing_has_a_gradient_of_zeros():
    for output in (PlainOutput(NEAR, 5), given(HEAD, NEAR)):
        seeds = differentiate_targets(output, [lambda row: torch.tensor(2.0)], torch.float64)
        assert seeds.values.tolist() == [[2.0]] * 5
        assert seeds.grads[0].shape == (1, 5, 7)
        assert not seeds.grads[0].any()
    seeds = differentiate_targets(
        PlainOutput({"a": NEAR, "b": NEAR}, 5), [lambda row: torch.tensor(2.0)], torch.float64
    )
    assert [None if grad is None else bool(grad.any()) for grad in seeds.grads] == [False, None]


def test_an_output_that_is_not_cut_into_images_is_refused():
    for output in (({"logits": NEAR},), (NEAR, NEAR)):
        with pytest.raises(ValueError, match="but a target gets one item per image"):
            differentiate_targets(PlainOutput(output, 5), [lambda row: row[0]], torch.float64)
