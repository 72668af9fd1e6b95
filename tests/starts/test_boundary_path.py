"""Activations at which values are given ones: steps towards them, against explicit matrices, and what is kept."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, PCATarget, SVMTarget
from pytorch_grad_cam_pcasvm.runtime.device import forbid_sync
from pytorch_grad_cam_pcasvm.runtime.errors import NoBoundaryError
from pytorch_grad_cam_pcasvm.starts import boundary_path
from pytorch_grad_cam_pcasvm.starts.boundary_head import Boundary
from pytorch_grad_cam_pcasvm.starts.boundary_path import PathBoundary, Solution, _is_on_pole, _solved, leave_jump

HALVES = np.arange(40) % 2
COMPONENTS = (PCATarget(0), PCATarget(1), PCATarget(2))
CLASS = SVMTarget(1)


def made(*between, labels=HALVES, gamma=2.0, stages=None):
    """A network with layers between the target layer and a dense one, its pipeline, and the target layer's mean."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 3), *between, nn.Flatten(), nn.Linear(2 * 3 * 4, 6)
    backbone = nn.Sequential(*layers).double().requires_grad_(False)
    images = torch.randn(40, 1, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    fitted = make_pipeline(*stages or (StandardScaler(), PCA(3), SVC(gamma=gamma)))
    fitted.fit(backbone(images).numpy(), labels)
    return PCASVMNet(backbone, fitted).eval(), fitted, backbone[0](images).mean(0, keepdim=True)


def run_of(net):
    return ContributionCAM(net, ["0"])._run_network(torch.ones(1, 1, 5, 6).double(), [net.backbone[0]])


def features_of(net, activations):
    return net.backbone[1:](activations).numpy()


# --- steps ----------------------------------------------------------------------------------------------------------


def test_components_that_are_affine_are_reached_in_one_step_the_shortest(monkeypatch):
    net, (scaler, pca, _), mean = made()
    jacobian = pca.components_[:2] / scaler.scale_ @ net.backbone[-1].weight.numpy()
    at_mean = pca.transform(scaler.transform(features_of(net, mean)))[:, :2]
    goal = np.array([[3.0, -2.0]])
    told = []
    monkeypatch.setattr(boundary_path, "log_since", lambda began, text, *args: told.append(text % args))
    solution = _solved(run_of(net), 0, mean, COMPONENTS[:2], torch.tensor(3.6).double(), torch.from_numpy(goal))
    expected = mean.numpy().ravel() + np.linalg.pinv(jacobian) @ (goal - at_mean)[0]
    np.testing.assert_allclose(solution.activations.numpy().ravel(), expected, rtol=0, atol=1e-12 * abs(expected).max())
    assert torch.equal(solution.goal, torch.from_numpy(goal))
    assert told == ["1 steps at 0 towards given values of 2 targets"]


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_decision_too_small_for_its_gradient_to_be_squared_is_led_to_another(factor):
    net, (scaler, pca, _), mean = made()
    net.head.stages[-1].intercept.zero_()  # next to it, the sum of the kernel is lost in rounding
    run, last = run_of(net), net.backbone[-1]
    far = pca.inverse_transform([[11.0, 0.0, 0.0]]) * scaler.scale_ + scaler.mean_
    change = torch.from_numpy(far - features_of(net, mean)) @ torch.linalg.pinv(last.weight).mT
    start = mean + change.reshape(mean.shape)
    seeds = run.replay(0, start).output_gradients([CLASS])
    assert float(seeds.log_scale) < -30
    goal = factor * seeds.values
    solution = _solved(run, 0, start, [CLASS], goal.norm(), goal)
    value = run.replay(0, solution.activations).output_gradients([CLASS]).values
    torch.testing.assert_close(value, goal, rtol=1e-8, atol=0)


def test_where_no_step_leads_there_is_no_point():
    net, _, mean = made()
    size = torch.tensor(1.0).double()
    assert _solved(run_of(net), 0, mean, [CLASS], size, 1e3) is None
    with forbid_sync():
        assert _solved(run_of(net), 0, mean, [CLASS], size, 1e3).activations.isnan().all()


# --- what is searched for, and kept -----------------------------------------------------------------------------------


class Near:
    """Searches near the mean of a network: targets, whether from the mean, and whether with a result."""

    def __init__(self, monkeypatch, *args, **kwargs):
        self.net, self.fitted, self.mean = made(nn.Tanh(), *args, **kwargs)
        self.run, self.boundary, self.searches = run_of(self.net), PathBoundary(self.mean), []
        monkeypatch.setattr(boundary_path, "_solved", self.search)

    def search(self, run, layer, start, targets, *args):
        solution = _solved(run, layer, start, targets, *args)
        self.searches.append((tuple(targets), torch.equal(start, self.mean), solution is not None))
        return solution

    def find(self, target=CLASS):
        """Return a target's point, and the searches for it."""
        self.searches.clear()
        point = self.boundary.find_point(run_of(self.net), 0, target).activations
        return point, list(self.searches)

    def decision(self, activations):
        return float(self.fitted.decision_function(features_of(self.net, activations))[0])


def test_a_decision_is_searched_for_from_where_all_components_are_0(monkeypatch):
    near = Near(monkeypatch)
    point, searches = near.find()
    assert searches == [(COMPONENTS, True, True), ((CLASS,), False, True)]
    assert abs(near.decision(point)) < 1e-9 * abs(near.decision(near.mean))
    near.searches.clear()
    centre = near.boundary.of_components(near.run, 0).activations
    assert not near.searches
    np.testing.assert_allclose(near.fitted[:2].transform(features_of(near.net, centre)), np.zeros((1, 3)), atol=1e-9)
    assert near.find(COMPONENTS[1])[1] == [(COMPONENTS[1:2], False, True)]


def test_a_point_that_was_found_is_taken_until_the_network_changes(monkeypatch):
    near = Near(monkeypatch)
    point, _ = near.find()
    again, searches = near.find()
    assert again is point
    assert not searches
    near.net.backbone[-1].bias.data += 0.1
    moved, searches = near.find()
    assert searches[-1] == ((CLASS,), False, True)
    assert abs(near.decision(moved)) < 1e-9 * abs(near.decision(point))
    assert near.find()[1] == []


def test_a_point_at_which_the_features_are_others_is_searched_for_anew(monkeypatch):
    near = Near(monkeypatch)
    point, _ = near.find()
    scaler, pca, _ = near.fitted
    unseen = np.linalg.svd(pca.components_)[2][-1] * scaler.scale_  # a direction that no component sees
    near.net.backbone[-1].bias.data += torch.from_numpy(unseen)
    assert abs(near.decision(point)) < 1e-9 * abs(near.decision(near.mean))
    assert near.find()[1] == [(COMPONENTS, True, True), ((CLASS,), False, True)]


def test_what_has_no_point_is_searched_for_again_only_in_another_network(monkeypatch):
    near = Near(monkeypatch)
    intercept = near.net.head.stages[-1].intercept
    former = intercept.clone()
    intercept.fill_(9.0)
    with pytest.raises(NoBoundaryError, match=r"start at the mean instead, baseline='mean' \(--baseline mean\)"):
        near.find()
    assert [found for *_, found in near.searches][-1] is False
    with pytest.raises(NoBoundaryError):
        near.find()
    assert not near.searches
    with forbid_sync():
        assert near.find()[0].isnan().all()
    for change in (lambda: intercept.data.fill_(8.0), lambda: intercept.add_(0)):
        change()
        with pytest.raises(NoBoundaryError):
            near.find()
        assert near.searches
    intercept.copy_(former)
    assert near.find()[1][-1] == ((CLASS,), False, True)


def test_where_the_gradient_leads_nowhere_a_point_of_the_head_is_searched_for(monkeypatch):
    near = Near(monkeypatch, labels=np.arange(40) < 6, gamma=60.0)
    target = SVMTarget(True)
    point, searches = near.find(target)
    alone = (target,)
    assert searches == [
        *((COMPONENTS, True, True), (alone, False, False), (alone, True, False)),
        *((COMPONENTS, True, True), (alone, False, True)),
    ]
    assert abs(near.decision(point)) < 1e-9 * abs(near.decision(near.mean))
    near.net.backbone[-1].weight.data.zero_()  # nothing leads anywhere
    near.boundary = PathBoundary(near.mean)
    with pytest.raises(NoBoundaryError):
        near.find(target)
    assert [targets for targets, *_ in near.searches] == [COMPONENTS, alone, COMPONENTS]
    near.boundary = PathBoundary(near.mean)
    with pytest.raises(NoBoundaryError):
        near.find(COMPONENTS[0])
    assert [targets for targets, *_ in near.searches] == [COMPONENTS, COMPONENTS[:1]]


def test_without_components_there_are_steps_from_the_mean_alone(monkeypatch):
    near = Near(monkeypatch, stages=[StandardScaler(), SVC()])
    point, searches = near.find()
    assert searches == [((CLASS,), True, True)]
    assert abs(near.decision(point)) < 1e-9 * abs(near.decision(near.mean))
    near.net.backbone[-1].weight.data.zero_()  # nothing leads anywhere
    with pytest.raises(NoBoundaryError):
        near.find()


def test_a_head_without_a_gradient_is_led_to_by_its_components(monkeypatch):
    near = Near(monkeypatch, stages=[StandardScaler(), PCA(3), RandomForestClassifier(8, random_state=0)])
    point, searches = near.find()
    assert searches == [(COMPONENTS, True, True)]
    head, mean = near.net.head, torch.from_numpy(features_of(near.net, near.mean))
    beside = Boundary(head, mean[0]).point(CLASS)
    expected = near.fitted[:2].transform(beside[None].numpy())
    np.testing.assert_allclose(near.fitted[:2].transform(features_of(near.net, point)), expected, rtol=0, atol=1e-8)
    assert abs(expected).max() > 0.1
    assert near.find() == (point, [])
    # The same features, and other components of them.
    head.stages[1].mean.data += 0.1
    assert near.find()[1] == [(COMPONENTS, True, True)]
    assert near.find(COMPONENTS[0])[1] == [(COMPONENTS, True, True), (COMPONENTS[:1], False, True)]


@pytest.mark.parametrize("change", ["weights", "mean", None])
def test_where_nobody_looks_what_was_found_is_not_finite_once_it_does_not_hold(monkeypatch, change):
    near = Near(monkeypatch)
    with forbid_sync():
        point, searches = near.find()
        assert point.isfinite().all()
        assert searches
        if change == "weights":
            near.net.backbone[-1].bias.data += 0.1
        elif change == "mean":
            near.boundary.mean = near.mean + 0.1
        again, searches = near.find()
        assert not searches
        assert again.isnan().all() if change else torch.equal(again, point)
        near.net.backbone[-1].bias += 0.1  # a write that is counted
        assert near.find()[1]


def test_what_is_found_is_told(monkeypatch):
    near, told = Near(monkeypatch), []
    monkeypatch.setattr(boundary_path, "log_since", lambda began, text, *args: told.append(text % args))
    near.find()
    near.find()
    near.net.head.stages[-1].intercept.fill_(9.0)
    with pytest.raises(NoBoundaryError):
        near.find()
    assert [text for text in told if not text.endswith(" targets")] == [
        "start at 0 for all components: found",
        f"start at 0 for {CLASS}: found",
        f"start at 0 for {CLASS}: as before",
        "start at 0 for all components: as before",
        f"start at 0 for {CLASS}: there is none",
    ]


def test_means_that_are_other_tensors_make_another_network(monkeypatch):
    near = Near(monkeypatch)
    means = near.net.head.training_set.means
    with forbid_sync():
        for _ in range(2):
            means["0"] = near.mean.clone()
            assert near.find()[1]
            assert not near.find()[1]


@pytest.mark.parametrize("bypassed", [False, True])
def test_an_image_stands_for_all_unless_something_goes_around_the_layer(bypassed):
    class Around(nn.Module):
        image = torch.zeros(1)

        def forward(self, x):
            return x + self.image.mean() if bypassed else x

    net, _, _ = made(around := Around())
    net.backbone[0].register_forward_pre_hook(lambda module, args: setattr(around, "image", args[0]))
    run = run_of(net)
    alone = run.isolate()
    assert (alone is run) is not bypassed
    assert not bypassed or not alone.images.any()


def test_without_a_head_there_are_no_jumps():
    net, _, mean = made()
    run = ContributionCAM(net.backbone, ["0"])._run_network(torch.ones(1, 1, 5, 6).double(), [net.backbone[0]])
    assert leave_jump(run, 0, mean) is mean


# --- poles ----------------------------------------------------------------------------------------------------------


def test_a_solution_on_a_pole_is_none(monkeypatch):
    net, _, mean = made(stages=(StandardScaler(), Normalizer(), SVC()))  # the mean has no direction
    monkeypatch.setattr(boundary_path, "_solved", lambda *_: Solution(mean, torch.tensor(0.0), 0.0))
    with pytest.raises(NoBoundaryError):
        PathBoundary(mean).find_point(run_of(net), 0, CLASS)


def test_a_pole_of_dense_features_is_looked_for_at_their_mean_over_positions():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(1, 6, 3)).double().requires_grad_(False)
    rows = backbone(torch.randn(4, 1, 5, 6).double()).movedim(1, 3).flatten(0, 2).numpy()
    fitted = make_pipeline(StandardScaler(), Normalizer(), SVC()).fit(rows, np.arange(len(rows)) % 2)
    run = run_of(PCASVMNet(backbone, fitted, pool="dense").eval())
    mean = torch.from_numpy(fitted[0].mean_).reshape(1, 6, 1, 1).expand(1, 6, 3, 4)
    assert _is_on_pole(run, 0, mean, mean)
    assert not _is_on_pole(run, 0, mean + 1, mean)
