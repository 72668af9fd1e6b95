"""The neutral baseline: where a target is undecided, so that its map adds up to its value."""

import copy
import warnings

import numpy as np
import pytest
import torch
from problems import FITTED, explained
from reference import gap, relative
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from sklearn.svm import SVC, LinearSVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    BaselineWarning,
    CoarseMapWarning,
    ContributionCAM,
    Head,
    HotellingTarget,
    PCASVMNet,
    PCATarget,
    ShapCAM,
    SignedMaps,
    SVMTarget,
    mean_activations,
    recombined,
)
from pytorch_grad_cam_pcasvm.maps.results import shared_out
from pytorch_grad_cam_pcasvm.network.outputs import HeadRun
from pytorch_grad_cam_pcasvm.runtime.device import forbid_sync
from pytorch_grad_cam_pcasvm.runtime.errors import NoBoundaryError
from pytorch_grad_cam_pcasvm.starts.boundary_head import Boundary, _Search
from pytorch_grad_cam_pcasvm.starts.boundary_path import PathBoundary
from pytorch_grad_cam_pcasvm.targets import output_gradients, rows
from pytorch_grad_cam_pcasvm.targets.questions import resolve_image_targets

KNOWN = [head for head in FITTED if head not in ("normalised", "no machine")]
MANY = SVMTarget(versus="others", strength=0.6)


def is_decision(target):
    return isinstance(target, SVMTarget)


def sums(maps):
    return maps.maps.sum((2, 3)) * maps.log_scale.exp() + (0 if maps.remainder is None else maps.remainder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("classes", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head", KNOWN)
def test_maps_add_up_to_the_value_itself(head, classes, dtype):
    p = explained("pooled", head, classes, dtype)
    targets = [*p.targets, *([] if p.fitted[-1].__class__.__name__ in ("SVR", "OneClassSVM") else [MANY])]
    maps = ContributionCAM(p.net, [p.layer]).explain(p.x, targets)
    precision = 1e-8 if dtype == torch.float64 else 1e-4
    assert gap(maps) < precision
    decisions = [k for k, target in enumerate(targets) if is_decision(target)]
    size = maps.maps.abs().sum((2, 3)) * maps.log_scale.exp()
    if head != "regressor":
        assert (maps.baseline_values[:, decisions].abs() <= 1e-10 * size[:, decisions]).all()
        assert ((sums(maps) - maps.values).abs() <= precision * size)[:, decisions].all()
    if head not in ("no reduction", "kernel pca"):
        assert (maps.baseline_values[:, 0].abs() <= precision * size[:, 0]).all()  # a component's 0 is the mean


@pytest.mark.parametrize("head", ["linear", "rbf", "one vs rest", "one class", "no reduction"])
def test_they_are_contributions_from_one_point_on_the_boundary(head):
    p = explained("pooled", head)
    cam = ContributionCAM(p.net, [p.layer])
    named = [SVMTarget()] if head == "one class" else [SVMTarget("ant"), SVMTarget("bee", versus="cat")]
    maps = cam.explain(p.x, named)
    boundary = Boundary(p.net.head, p.net.head.feature_mean)
    fitted = copy.deepcopy(p.fitted)
    if isinstance(fitted[-1], SVC):
        fitted[-1].decision_function_shape = "ovo"  # by which class a value of 0 is voted for, rounding decides

    def decided(features):
        return fitted.decision_function(features.numpy()).reshape(1, -1)

    size = np.abs(decided(boundary.start.features)).max()
    for k, target in enumerate(named):
        point = boundary.point(target)
        # scikit-learn's own decision is 0 there.
        value = target(p.net.of_features(point.unsqueeze(0)))
        assert abs(float(value)) <= 1e-10 * float(target(p.net.of_features(boundary.start.features)).abs())
        actual = p.net.head(point.unsqueeze(0)).values[-1].numpy()
        assert np.abs(np.abs(actual) - np.abs(decided(point.unsqueeze(0)))).max() <= 1e-9 * size
        given = ContributionCAM(p.net, [p.layer], baseline=point).explain(p.x, [target])
        assert relative(maps.maps[:, k], given.maps[:, 0]) < 1e-9


def test_the_point_lies_between_the_mean_and_a_support_vector():
    p = explained("pooled", "rbf")
    scaler, pca, svm = p.fitted
    boundary = Boundary(p.net.head, p.net.head.feature_mean)
    for target in (SVMTarget("ant"), SVMTarget("bee", versus="cat")):
        place = pca.transform(scaler.transform(boundary.point(target).numpy()[None]))[0]
        sines = [1 - abs(v @ place) / np.linalg.norm(v) / np.linalg.norm(place) for v in svm.support_vectors_]
        nearest = svm.support_vectors_[int(np.argmin(sines))]
        assert min(sines) < 1e-12
        assert 0 < nearest @ place / (nearest @ nearest) <= 1


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("place", ["mean", "image", "between"])
def test_the_nearest_crossing_counts_from_wherever_it_is_searched(place, label):
    p = explained("pooled", "rbf", 2)
    scaler, pca, svm = p.fitted
    features = p.backbone(p.images(60, seed=4)).detach()
    start = {"mean": features.mean(0), "image": features[3], "between": features[[3, 8]].mean(0)}[place]
    point = Boundary(p.net.head, start).point(SVMTarget(p.labels[label]))
    here, there = (pca.transform(scaler.transform(x.numpy()[None]))[0] for x in (start, point))
    value = svm.decision_function(here[None])[0]
    assert abs(svm.decision_function(there[None])[0]) < 1e-9 * abs(value)
    others = svm.support_vectors_[svm.decision_function(svm.support_vectors_) * value < 0]
    ways, parts = others - here, np.linspace(0, 1, 9)  # which of two is nearer, eighths of the ways tell
    signs = np.sign([svm.decision_function(here + part * ways) for part in parts]) != np.sign(value)
    nearest = ways[np.argmin(parts[signs.argmax(0) - 1] * np.linalg.norm(ways, axis=1))]
    way = there - here
    assert way @ nearest > (1 - 1e-12) * np.linalg.norm(way) * np.linalg.norm(nearest)


def test_a_linear_decision_takes_the_projection_of_the_mean():
    p = explained("pooled", "one vs rest")
    scaler, pca, svm = p.fitted
    weight, bias = svm.coef_[0], svm.intercept_[0]
    place = Boundary(p.net.head, p.net.head.feature_mean).point(SVMTarget("ant")).numpy()
    assert np.allclose(pca.transform(scaler.transform(place[None]))[0], -bias * weight / (weight @ weight), atol=1e-12)


def test_each_image_starts_on_its_own_boundary_the_same_for_all_of_its_class():
    p = explained("pooled", "rbf", n=7)
    cam = ContributionCAM(p.net, [p.layer])
    maps = cam.explain(p.x, [SVMTarget(), SVMTarget(versus="runner-up")])
    for image, label in enumerate(p.net.predict(p.x).tolist()):
        alone = cam.explain(p.x[image : image + 1], [SVMTarget(label)])
        assert relative(maps.maps[image, 0], alone.maps[0, 0]) < 1e-10
    # One call with a target for each image.
    targets = [SVMTarget("ant"), PCATarget(0), SVMTarget("bee", versus="ant"), SVMTarget(), *[PCATarget(1, "-")] * 3]
    each = cam(p.x, targets)
    for image, target in enumerate(targets):
        assert np.abs(each[image] - cam(p.x[image : image + 1], [target])[0]).max() < 1e-5
    # One start may stand for all images.
    output, start = p.net(p.x), p.net(p.images(1, seed=4))
    questions = resolve_image_targets(targets, output)
    found = output_gradients.differentiate_targets(output, questions, torch.float64, start)
    for image, target in enumerate(targets):
        alone = output_gradients.differentiate_targets(p.net(p.x[image : image + 1]), [target], torch.float64, start)
        assert relative(found.by_image[image], alone.by_image[0]) < 1e-10


@pytest.mark.parametrize("head", ["rbf", "linear", "one class"])
def test_recombined_starts_there_too(head, tmp_path):
    p = explained("pooled", head)
    cam = ContributionCAM(p.net, [p.layer])
    components = cam.explain(p.x, [PCATarget(b) for b in range(4)])
    components.save(tmp_path / "maps.safetensors")
    assert components.neutral
    targets = [target for target in p.targets if is_decision(target)] + [HotellingTarget(), PCATarget(2, "-")]
    expected = cam.explain(p.x, targets)
    for given in (
        components,
        SignedMaps.load(tmp_path / "maps.safetensors"),
        SignedMaps.cat([components[:1], components[1:]]),
    ):
        actual = recombined(given, p.fitted, targets)
        assert gap(actual) < 1e-8
        size = expected.maps.abs().amax((2, 3))
        assert ((actual.maps - expected.maps).abs().amax((2, 3)) <= 1e-6 * size).all()
        assert actual.neutral


def test_another_method_takes_it_as_well():
    p = explained("pooled", "rbf", size="small", n=2)
    targets = [PCATarget(0), SVMTarget("ant"), SVMTarget()]
    shap = ShapCAM(p.net, [p.layer]).explain(p.x, targets)
    assert gap(shap) < 1e-10
    assert (shap.baseline_values[:, 1:].abs() <= 1e-9 * shap.maps.abs().sum((2, 3))[:, 1:]).all()
    lift = LIFTCAM(p.net, [p.layer], baseline="neutral").explain(p.x, targets)
    point = Boundary(p.net.head, p.net.head.feature_mean).point(SVMTarget("ant"))
    given = LIFTCAM(p.net, [p.layer], baseline=point).explain(p.x, [SVMTarget("ant")])
    assert relative(lift.maps[:, 1], given.maps[:, 0]) < 1e-9


def test_a_head_that_is_changed_in_place_has_another_boundary():
    p = explained("pooled", "rbf")
    net = copy.deepcopy(p.net)
    cam = ContributionCAM(net, [net.backbone.features])
    before = cam.explain(p.x, [SVMTarget("ant")])
    net.head.stages[-1].intercept.add_(0.3)
    after = cam.explain(p.x, [SVMTarget("ant")])
    assert relative(after.maps.sum((2, 3)), after.values) < 1e-9
    assert relative(after.maps, before.maps) > 1e-3
    handle = net.head.stages[-1].register_forward_hook(lambda module, args, output: None)
    assert relative(cam.explain(p.x, [SVMTarget("ant")]).maps, after.maps) < 1e-12
    handle.remove()


@pytest.mark.parametrize(
    ("path", "head"), [("gelu", "rbf"), ("squeeze-excite", "calibrated"), ("layer norm", "no reduction")]
)
def test_elsewhere_newton_leads_to_it_from_the_mean_activations(path, head):
    p = explained(path, head, 2)
    mean = mean_activations(p.net, [p.images(60, seed=4)], p.layer, progress=False)
    cam = ContributionCAM(p.net, [p.layer], mean=mean)
    components = [] if head == "no reduction" else [PCATarget(0), PCATarget(3)]
    maps = cam.explain(p.x, [*components, SVMTarget(), SVMTarget("ant"), SVMTarget("bee", versus="ant")])
    assert gap(maps) < 1e-10
    size = maps.maps.abs().sum((2, 3))
    assert (maps.baseline_values.abs() <= 1e-8 * size.amax(0)).all()
    assert not maps.neutral
    # The same at all positions, and what the whole network says there.
    start = cam.explain(p.x, [SVMTarget("ant")])
    again = cam.explain(p.x.flip(0), [SVMTarget("ant")])
    assert relative(again.maps.flip(0), start.maps) < 1e-9
    with forbid_sync():
        unseen = cam.explain(p.x, [SVMTarget("ant")])
    assert relative(unseen.maps, start.maps) < 1e-6


@pytest.fixture
def saturated():
    """An RBF SVM of ten to one behind dense layers: around the mean its gradient leads nowhere."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    backbone = nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(6 * 64, 16), nn.ReLU(), nn.Linear(16, 6)),
    ).double()
    x, labels = torch.from_numpy(rng.normal(size=(66, 3, 8, 8))), np.repeat(["many", "few"], [60, 6])
    x[60:] += 1.5
    with torch.no_grad():
        features = backbone(x).numpy()
    components = PCA(2).fit_transform(features)
    head = make_pipeline(PCA(2), SVC(gamma=3 / components.var())).fit(features, labels)
    return PCASVMNet(backbone, head).eval(), x


@pytest.mark.slow
def test_where_no_gradient_leads_to_the_boundary_a_point_that_the_head_knows_does(saturated, monkeypatch):
    net, x = saturated
    mean = mean_activations(net, [x], "1", progress=False)
    asked = []
    by_components = PathBoundary._by_components
    monkeypatch.setattr(PathBoundary, "_by_components", lambda *args: asked.append(args) or by_components(*args))
    cam = ContributionCAM(net, ["1"], mean=mean)
    maps = cam.explain(x, [SVMTarget("few"), SVMTarget("many"), PCATarget(0)])
    assert asked  # or Newton's steps led there, and this tests nothing
    assert gap(maps) < 1e-8
    assert float((maps.maps.sum((2, 3)) - maps.values).abs().max()) < 1e-8
    # What was found is taken again, until the network changes.
    asked.clear()
    again = cam.explain(x[:4], [SVMTarget("few")])
    assert not asked
    assert relative(again.maps, maps.maps[:4, :1]) < 1e-12
    with torch.no_grad():
        net.backbone[5].bias += 0.1 * net.backbone[5].bias.std()
    changed = cam.explain(x, [SVMTarget("few"), SVMTarget("many")])
    assert asked
    assert float((changed.maps.sum((2, 3)) - changed.values).abs().max()) < 1e-8
    fresh = ContributionCAM(net, ["1"], mean=mean).explain(x, [SVMTarget("few"), SVMTarget("many")])
    assert torch.equal(changed.maps, fresh.maps)


def test_zeros_are_taken_with_a_warning_where_the_mean_is_unknown():
    p = explained("gelu", "rbf")
    cam = ContributionCAM(p.net, [p.layer])
    with pytest.warns(UserWarning, match=r"pass mean=mean_activations\(net, loader, 'features'\)"):
        maps = cam.explain(p.x)
    zero = ContributionCAM(p.net, [p.layer], baseline="zero")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", CoarseMapWarning)
        assert torch.equal(cam.explain(p.x).maps, maps.maps)  # once
        assert torch.equal(zero.explain(p.x, [PCATarget(b) for b in range(4)] + [SVMTarget()]).maps, maps.maps)
        ordinary = nn.Sequential(p.backbone, nn.Linear(9, 3).double()).eval()
        ContributionCAM(ordinary, [p.layer]).explain(p.x)  # which has no boundary that is known


# With as many images of each class, or each with its mirror image in the other class, the mean lies on the boundary.
BALANCED = {
    "ridge": RidgeClassifier(),
    "discriminant": LinearDiscriminantAnalysis(),
    "linear SVM": LinearSVC(),
    "RBF": SVC(),
    "Gaussian process": GaussianProcessClassifier(),
    "naive Bayes": GaussianNB(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("mirrored", [False, True], ids=["balanced", "mirrored"])
@pytest.mark.parametrize(
    "classifier",
    [pytest.param(name, marks=pytest.mark.slow) if name == "Gaussian process" else name for name in BALANCED],
)
def test_a_mean_on_the_boundary_is_one(classifier, mirrored, dtype):
    p = explained("pooled", "rbf", 2, dtype)
    labels, precision = np.arange(60) % 2, 1e-8 if dtype == torch.float64 else 1e-4
    for seed in range(2):
        x = p.images(60, seed=seed) + 0.5 * torch.from_numpy(labels).to(dtype).reshape(-1, 1, 1, 1)
        with torch.no_grad():
            features = p.backbone(x).numpy()
        mean = features.mean(0)
        if mirrored:
            features = np.concatenate([features, 2 * mean - features])
        several = np.concatenate([labels, 1 - labels])[: len(features)]
        reduction = [PCA(3)] if seed % 2 else []
        head = make_pipeline(StandardScaler(), *reduction, clone(BALANCED[classifier])).fit(features, several)
        cam = ContributionCAM(PCASVMNet(p.backbone, head).eval(), [p.layer])
        maps = cam.explain(x[:6], [SVMTarget(), SVMTarget(0)])
        assert relative(sums(maps), maps.values) < precision
        assert (maps.baseline_values.abs() <= 1e-9 * maps.values.abs().amax()).all()


def test_a_crossing_whose_ends_have_one_sign_but_for_rounding_is_at_one_of_them():
    head = PCASVMNet(nn.Flatten(), LinearSVC().fit([[-1.0], [1.0]], [0, 1])).head
    search = _Search(head, SVMTarget(1), 0, 1.0)
    zero = head.stages[0].bias / -head.stages[0].weight[0]  # not one number farther on, where the sign is another
    start, step = zero + 1e-17, torch.ones(1, dtype=torch.float64)
    assert torch.equal(search._bisect(start, step, 0.0, 1.0), start)
    against = _Search(head, SVMTarget(0), 0, 1.0)  # whose values are negative there
    assert torch.equal(against._bisect(start, step, 0.0, 1.0), start)


@pytest.mark.parametrize("classifier", [GaussianNB(), QuadraticDiscriminantAnalysis(reg_param=0.1)])
@pytest.mark.parametrize("seed", range(2))
def test_a_zero_at_the_start_itself_is_found(classifier, seed):
    rng, signs = np.random.default_rng(seed), np.array([1, -1] * 3)
    quarter = rng.normal(size=(20, 6))
    features = np.concatenate([quarter, -quarter, quarter * signs, -quarter * signs]).astype(np.float32)
    head = Head.of(make_pipeline(StandardScaler(), clone(classifier)).fit(features, np.repeat([0, 1, 2, 3], 20)))
    target = SVMTarget(versus="others", strength=0.6)
    boundary = Boundary(head, head.feature_mean)
    for number in range(target.count_questions(head)):
        one = target.name_question(head, number)
        try:
            point = boundary.point(one)
        except NoBoundaryError:
            continue
        value = float(one(HeadRun(head, head(point[None]))))
        assert abs(value) < 1e-9 * (1 + abs(float(one(HeadRun(head, head(point[None] + 1))))))


def test_a_boundary_of_rounding_is_out_of_reach():
    rng = np.random.default_rng(3)
    half = rng.normal(size=(40, 6))
    features, labels = np.concatenate([half, -half]), np.tile(half[:, 0] * half[:, 1] > 0, 2).astype(int)
    refused = 0
    for classifier in (RidgeClassifier(), LinearSVC(), LinearDiscriminantAnalysis()):  # x and -x are of one class
        head = Head.of(make_pipeline(StandardScaler(), classifier).fit(features, labels))
        try:
            point = Boundary(head, head.feature_mean).point(SVMTarget(1))
        except NoBoundaryError:
            refused += 1
        else:
            assert np.abs(point.numpy()).max() < 1e4 * np.abs(features).max()
    assert refused


@pytest.mark.parametrize("scaler", [StandardScaler(), StandardScaler(with_std=False), None])
def test_features_of_any_size_have_a_boundary_in_reach(scaler):
    rng = np.random.default_rng(0)
    features, labels = 1e7 * rng.normal(size=(60, 6)), np.arange(60) % 3 > 0
    features[labels, 0] += 1e7
    parts = [] if scaler is None else [scaler]
    head = Head.of(make_pipeline(*parts, PCA(3), LogisticRegression()).fit(features, labels))
    boundary = Boundary(head, head.feature_mean)
    point = boundary.point(SVMTarget(True))
    assert 0 < float((point - head.feature_mean).norm()) < 1e8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 10])
def test_components_that_cannot_all_be_0_start_alone(seed):
    torch.manual_seed(seed)
    labels = np.arange(60) % 2
    backbone = nn.Sequential(
        *(nn.Conv2d(2, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.GELU(), nn.Flatten()),
        *(nn.Linear(200, 12), nn.ReLU(), nn.Linear(12, 8)),
    ).double()
    x = torch.randn(60, 2, 12, 12).double() + torch.randn(2, 2, 1, 1).double()[labels]
    with torch.no_grad():
        features = backbone(x).numpy()
    head = make_pipeline(StandardScaler(), PCA(5), SVC()).fit(features, labels)
    net = PCASVMNet(backbone, head).eval()
    cam = ContributionCAM(net, ["3"], mean=mean_activations(net, [x], "3", progress=False))
    every = [PCATarget(b) for b in range(5)]
    maps = cam.explain(x[:6], [*every, SVMTarget(1), PCATarget(3, sign="-")])
    assert relative(sums(maps), maps.values) < 1e-8
    assert (maps.baseline_values.abs() <= 1e-8 * maps.values.abs().amax()).all()
    assert not maps.linear
    with pytest.raises(ValueError, match="not sums of component maps, which start at different activations"):
        recombined(maps, head, SVMTarget(1))
    for target in (PCATarget(3), PCATarget(0)):  # the same, whatever else is asked
        alone = cam.explain(x[:6], [target])
        assert relative(alone.maps[:, 0], maps.maps[:, target.component]) < 1e-9
    own = [every[b % 5] for b in range(6)]
    called = cam(x[:6], own)
    assert all(np.allclose(called[n], cam(x[n : n + 1], [own[n]])[0], atol=1e-5) for n in range(6))
    with pytest.warns(
        BaselineWarning, match=r"make all components 0, so maps of HotellingTarget\(.* start at this mean"
    ):
        apart = cam.explain(x[:6], [HotellingTarget()])
    mean = ContributionCAM(net, ["3"], mean=cam.mean, baseline="mean")
    assert relative(apart.maps, mean.explain(x[:6], [HotellingTarget()]).maps) < 1e-12
    together = mean.explain(x[:6], every)
    assert relative(recombined(together, head, SVMTarget(1)).maps, mean.explain(x[:6], [SVMTarget(1)]).maps) < 1e-9


def test_a_target_of_ones_own_whose_terms_cancel_is_linear():
    p = explained("pooled", "linear", 2, torch.float32)
    scores = nn.Linear(p.backbone(p.x).shape[1], 2)
    with torch.no_grad():  # both are large, and their difference is not
        scores.weight[:] = 1e4 + 1e-1 * scores.weight
    ordinary = nn.Sequential(p.backbone, scores).eval()
    maps = ContributionCAM(ordinary, [p.layer], baseline="zero").explain(p.x, [lambda output: output[1] - output[0]])
    size = 2 * ordinary(p.x).detach().abs().max()
    assert ((sums(maps) + maps.baseline_values - maps.values).abs() < 1e-6 * size).all()


def test_no_boundary_within_reach_is_refused():
    p = explained("pooled", "rbf", 2)
    head = make_pipeline(StandardScaler(), PCA(4), SVC()).fit(
        p.backbone(p.images(60, seed=4)).numpy(), np.arange(60) % 2
    )
    head[-1].intercept_ += 1e3
    head[-1]._intercept_ += -1e3
    net = PCASVMNet(p.backbone, head)
    with pytest.raises(ValueError, match=r"no decision boundary is within reach of the training mean.*baseline='mean'"):
        ContributionCAM(net, [p.layer]).explain(p.x, [SVMTarget(1)])
    assert gap(ContributionCAM(net, [p.layer], baseline="mean").explain(p.x, [SVMTarget(1)])) < 1e-9


def test_no_boundary_of_the_predicted_class_within_reach_is_refused():
    p = explained("pooled", "rbf", 3)
    head = make_pipeline(StandardScaler(), LogisticRegression()).fit(
        p.backbone(p.images(60, seed=4)).numpy(), np.arange(60) % 3
    )
    head[-1].intercept_[0] += 1e12
    with pytest.raises(ValueError, match="no decision boundary is within reach of the training mean"):
        ContributionCAM(PCASVMNet(p.backbone, head), [p.layer]).explain(p.x)


def test_secants_have_the_dtype_that_is_asked_for():
    p = explained("pooled", "rbf")
    boundary = Boundary(p.net.head, p.net.head.feature_mean)
    for dtype in (torch.float32, torch.float64):
        assert boundary.differentiate(p.net(p.x), [SVMTarget("ant")], dtype).by_image.dtype == dtype


def test_a_mean_for_it_must_be_a_finite_tensor():
    p = explained("gelu", "rbf")
    with pytest.raises(TypeError, match="mean must be a tensor from mean_activations, got str"):
        ContributionCAM(p.net, [p.layer], mean="mean")
    with pytest.raises(ValueError, match="the mean has NaN"):
        ContributionCAM(p.net, [p.layer], mean=torch.full((5,), torch.nan))
    with pytest.raises(ValueError, match="the baseline has shape"):
        ContributionCAM(p.net, [p.layer], mean=torch.zeros(4)).explain(p.x)


@pytest.mark.parametrize("classifier", [SVC(), SVC(kernel="linear"), SVC(gamma=1.0), LogisticRegression()])
@pytest.mark.parametrize("weights", [None, "balanced"])
@pytest.mark.parametrize("few", [0, 1])
def test_on_imbalanced_data_no_map_contradicts_its_margin(classifier, weights, few):
    p = explained("pooled", "rbf", 2)
    images, index = p.images(220, seed=4), np.arange(220) % 2
    chosen = np.flatnonzero((index != few) | (np.cumsum(index == few) <= 11))
    with torch.no_grad():
        features = p.backbone(images[chosen]).numpy()
    head = make_pipeline(StandardScaler(), PCA(4), classifier.set_params(class_weight=weights)).fit(
        features, index[chosen]
    )
    net = PCASVMNet(p.backbone, head).eval()
    x = p.images(40, seed=9)
    maps = ContributionCAM(net, [p.layer]).explain(x, [SVMTarget()])
    assert relative(maps.maps.sum((2, 3)), maps.values) < 1e-8
    assert (maps.maps.sum((2, 3)) > 0).all()


# --- several target layers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["shared", "mean"])
@pytest.mark.parametrize("path", ["pooled", "gelu"])
def test_maps_of_several_layers_are_one_that_adds_up(path, combine):
    p = explained(path, "rbf", size="square")
    layers = [p.backbone.features[1], p.backbone.features[2], p.layer]
    targets = [PCATarget(0), SVMTarget(), SVMTarget("ant", versus="bee")]
    cam = ContributionCAM(p.net, layers, combine=combine, baseline="zero")
    maps = cam.explain(p.x, targets)
    assert maps.maps.shape == (3, 3, 8, 8)
    assert maps.weights.shape == (3, 3, 0)
    assert gap(maps) < 1e-10
    coarse = [ContributionCAM(p.net, [layer], baseline="zero").explain(p.x, targets) for layer in layers[1:]]
    if combine == "shared":
        # Every coarse position keeps what it has, of either sign; the two coarse layers count as their mean.
        whole = (coarse[0].maps + coarse[1].maps) / 2
        for sign in (1, -1):
            parts, expected = ((sign * each).relu().sum((2, 3)) for each in (maps.maps, whole))
            assert (parts <= expected * (1 + 1e-9)).all()
        assert relative(maps.maps.sum((2, 3)), whole.sum((2, 3))) < 1e-9
        assert relative(maps.baseline_values, (coarse[0].baseline_values + coarse[1].baseline_values) / 2) < 1e-12
    with pytest.raises(ValueError, match="not sums of component maps"):  # each layer has a baseline of its own
        recombined(cam.explain(p.x), p.fitted)
    with pytest.raises(ValueError, match="takes several target layers in explain only"):
        cam.jacobians(p.x)
    with pytest.raises(ValueError, match="combine must be 'shared' or 'mean', got 'sum'"):
        ContributionCAM(p.net, layers, combine="sum")


def test_sharing_out_by_explicit_matrices():
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(2, 1, 3, 2, generator=generator, dtype=torch.float64)
    fine = torch.randn(2, 1, 7, 4, generator=generator, dtype=torch.float64)
    actual = shared_out(coarse, fine)
    one = torch.eye(6, dtype=torch.float64).reshape(1, 6, 3, 2)
    spread = nn.functional.interpolate(one, (7, 4), mode="bilinear", align_corners=False)[0]  # of each coarse position
    for image in range(2):
        expected = torch.zeros(7, 4, dtype=torch.float64)
        for sign in (1, -1):
            evidence = (sign * fine[image, 0]).relu()
            evidence = evidence + 1e-3 * evidence.mean()
            for position, number in enumerate((sign * coarse[image, 0]).relu().flatten()):
                share = spread[position] * evidence
                expected += sign * number * share / share.sum()
        assert relative(actual[image, 0], expected) < 1e-12
    even = shared_out(coarse, torch.zeros_like(fine))
    assert relative(even.sum((2, 3)), coarse.sum((2, 3))) < 1e-12
    exact = nn.functional.interpolate(coarse, (6, 4), mode="bilinear", align_corners=False) / 4
    assert relative(shared_out(coarse, torch.zeros(2, 1, 6, 4, dtype=torch.float64)), exact) < 1e-12


@pytest.mark.slow
def test_several_means_for_several_layers_and_for_images_of_another_size():
    p = explained("squeeze-excite", "rbf", 2, size="square")
    layers = ["features.1", "features"]
    images = p.images(60, seed=4)
    means = mean_activations(p.net, [images], layers, progress=False)
    assert torch.equal(means[0], mean_activations(p.net, [images], layers[0], progress=False))
    with pytest.warns(BaselineWarning, match=r"mean_activations\(net, loader, \['features.1', 'features'\]\)"):
        ContributionCAM(p.net, layers).explain(p.x)
    maps = ContributionCAM(p.net, layers, mean=means).explain(p.x, [SVMTarget()])
    assert relative(maps.maps.sum((2, 3)), maps.values) < 1e-8
    assert maps.layers == tuple(layers)
    assert "at features.1 + features" in repr(maps)
    wide = torch.cat([p.x, p.x.flip(0)], -1)
    cam = ContributionCAM(p.net, [p.layer], mean=means[1])
    of_channels = ContributionCAM(p.net, [p.layer], mean=means[1].mean((1, 2)))
    assert torch.equal(cam.explain(wide, SVMTarget()).maps, of_channels.explain(wide, SVMTarget()).maps)
    with pytest.raises(ValueError, match="one mean for each of the 2 target layers, got 1"):
        ContributionCAM(p.net, layers, mean=means[0]).explain(p.x)


# --- what a reviewer found --------------------------------------------------------------------------------------------


def small_head(p, *stages):
    features = p.backbone(p.images(60, seed=4)).numpy()
    return make_pipeline(StandardScaler(), *stages).fit(features, np.array(p.labels)[np.arange(60) % p.classes])


def test_more_targets_than_components_that_share_a_boundary_add_up():
    p = explained("gelu", "rbf", 2)
    net = PCASVMNet(p.backbone, small_head(p, PCA(1), SVC())).eval()
    mean = mean_activations(net, [p.images(60, seed=4)], p.layer, progress=False)
    cam = ContributionCAM(net, [p.layer], mean=mean)
    targets = [SVMTarget("ant"), SVMTarget("ant", sign="-"), SVMTarget("bee")]
    maps = cam.explain(p.x, targets)
    assert gap(maps) < 1e-10
    for k, target in enumerate(targets):
        assert relative(maps.maps[:, k], cam.explain(p.x, [target]).maps[:, 0]) < 1e-9


def test_a_map_does_not_depend_on_how_many_targets_are_asked_for():
    p = explained("pooled", "kernel pca")
    cam = ContributionCAM(p.net, [p.layer])
    targets = [SVMTarget(label) for label in p.labels] + [SVMTarget("ant", versus=label) for label in p.labels[1:]]
    together = cam.explain(p.x, targets)
    for k, target in enumerate(targets):
        assert relative(together.maps[:, k], cam.explain(p.x, [target]).maps[:, 0]) < 1e-9


@pytest.mark.parametrize("change", ["replaced", "data", "kernel"])
def test_no_change_of_a_head_goes_unseen(change):
    p = explained("pooled", "rbf")
    net = copy.deepcopy(p.net)
    cam, svm = ContributionCAM(net, [net.backbone.features]), net.head.stages[-1]
    for _ in range(6):
        cam.explain(p.x, [SVMTarget("ant")])
        if change == "replaced":
            svm.intercept = svm.intercept * 1.1
        elif change == "data":
            svm.intercept.data.add_(0.1)
        else:
            svm.kernel = type(svm.kernel)(svm.kernel.gamma * 1.1)
        maps = cam.explain(p.x, [SVMTarget("ant")])
        assert relative(maps.maps.sum((2, 3)), maps.values) < 1e-8


def test_a_net_made_in_inference_mode_is_explained():
    p = explained("pooled", "rbf")
    with torch.inference_mode():
        net = PCASVMNet(p.backbone, p.fitted).eval()
        inside = ContributionCAM(net, [p.layer]).explain(p.x)
    maps = ContributionCAM(net, [p.layer]).explain(p.x)
    assert relative(maps.maps, inside.maps) < 1e-12
    assert gap(maps) < 1e-10


def test_the_start_does_not_depend_on_the_batch():
    p = explained("pooled", "rbf", 2)

    class Rectified(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = p.backbone.features

        def forward(self, x):
            return (self.features(x) + 3).relu().mean((2, 3)) - 3  # where nothing is cut off, a mean

    backbone = Rectified().eval()
    with torch.no_grad():
        features = backbone(p.images(60, seed=4)).numpy()
    net = PCASVMNet(backbone, make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, np.arange(60) % 2)).eval()
    cam = ContributionCAM(net, ["features"])
    with pytest.warns(BaselineWarning):
        together = cam.explain(torch.cat([p.x, 9 * p.x]))
    for image in range(len(p.x)):
        assert relative(together.maps[image], cam.explain(p.x[image : image + 1]).maps[0]) < 1e-9


@pytest.mark.parametrize(
    "stages", [(PCA(4), Normalizer(), SVC()), (PCA(4), SVC(kernel="poly"))], ids=["normalised", "poly"]
)
def test_where_the_start_is_singular_other_ways_lead_on(stages):
    p = explained("pooled", "rbf")
    net = PCASVMNet(p.backbone, small_head(p, *stages)).eval()
    maps = ContributionCAM(net, [p.layer]).explain(p.x, [SVMTarget(), SVMTarget("ant", versus="bee")])
    assert relative(maps.maps.sum((2, 3)), maps.values) < 1e-7


def test_a_step_that_leads_too_far_is_halved():
    fitted = MLPClassifier((1,), activation="tanh", max_iter=1).fit([[0.0], [1.0]], [0, 1])
    fitted.coefs_, fitted.intercepts_ = [np.ones((1, 1)), np.ones((1, 1))], [-np.ones(1), np.zeros(1)]
    head = Head.of(fitted)
    for start in (4.0, -2.0):  # the tangent at 4 leads to -96, where nothing has a slope
        point = Boundary(head, torch.tensor([start]).double()).point(SVMTarget(1))
        assert float(point) == pytest.approx(1.0, abs=1e-9)
    zero = torch.ones(1).double()
    assert _Search(head, SVMTarget(1), 0, 0.0).polished(zero) is zero


def test_steps_lead_where_decisions_are_too_small_for_their_squares():
    fitted = SVC(gamma=1.0).fit([[0.0, 0.0], [1.0, 0.0]], [0, 1])
    head, start = Head.of(fitted), torch.tensor([0.3, 9.0]).double()
    size = abs(float(fitted.decision_function([[0.3, 9.0]])[0]))
    assert 0 < size < 1e-30
    point = _Search(head, SVMTarget(1), 0, size).polished(start)
    assert float(point[0]) == pytest.approx(0.5, abs=1e-9)


def test_means_may_be_reassigned():
    p = explained("gelu", "rbf", 2)
    mean = mean_activations(p.net, [p.images(60, seed=4)], p.layer, progress=False)
    cam = ContributionCAM(p.net, [p.layer])
    cam.mean = mean
    assert torch.equal(cam.explain(p.x).maps, ContributionCAM(p.net, [p.layer], mean=mean).explain(p.x).maps)
    with pytest.raises(TypeError, match="mean must be a tensor"):
        cam.mean = "mean"


@pytest.mark.parametrize("head", ["rbf", "calibrated", "whitened", "kernel pca", "linear"])
@pytest.mark.parametrize("count", [1, 3])
def test_classes_with_boundaries_of_their_own_pass_the_head_together(head, count, monkeypatch):
    p = explained("pooled", head, 5)
    cam = ContributionCAM(p.net, [p.layer])
    targets = [PCATarget(0), *(SVMTarget(label) for label in p.labels)]
    alone = [cam.explain(p.x[:count], [target]) for target in targets]
    decision, passes = p.net.head.stages[-1], []
    secant = type(decision).secant
    monkeypatch.setattr(type(decision), "secant", lambda self, *parts: passes.append(self) or secant(self, *parts))
    for starts_at_once, expected in ((5, 1), (2, 3), (1, 5)):
        monkeypatch.setattr(rows, "_CACHED", starts_at_once * p.net.head.bytes_per_target(count))
        passes.clear()
        together = cam.explain(p.x[:count], targets)
        assert passes.count(decision) == expected
        for k, maps in enumerate(alone):  # several rows are another product of matrices than one, and only that
            one = maps.maps[:, 0] * (maps.log_scale[:, 0] - together.log_scale[:, k]).exp().reshape(-1, 1, 1)
            size = one.abs().sum((1, 2), keepdim=True)
            assert ((together.maps[:, k] - one).abs() <= 1e-10 * size).all()
            assert torch.equal(together.values[:, k], maps.values[:, 0])
            assert torch.equal(together.baseline_values[:, k], maps.baseline_values[:, 0])


@pytest.mark.parametrize(("steepness", "found"), [(1.0, True), (10.0, False), (0.1, False)])
def test_a_step_is_lost_in_rounding_only_where_values_go_on_as_the_gradient_says(steepness, found):
    class Straight(_Search):
        def __init__(self):
            pass

        def _evaluate_rows(self, x):
            return steepness * (1 - x[:, 0])

    one = torch.ones(1, dtype=torch.float64)
    zero = Straight()._in_rounding(0 * one, one[0], one)
    assert (zero is not None) == found
    assert zero is None or abs(float(zero) - 1) < 1e-6


def test_a_decision_is_0_at_a_jump_of_its_slope_that_is_no_pole():
    rows = np.random.default_rng(7).normal(size=(12, 8))
    pipeline = make_pipeline(StandardScaler(), PCA(3), KNeighborsClassifier(5)).fit(rows, np.arange(12) % 3)
    head = Head.of(pipeline)
    boundary = Boundary(head, head.feature_mean)
    for target in (SVMTarget(0), SVMTarget(1)):
        assert abs(float(target(HeadRun(head, head(boundary.point(target).unsqueeze(0)))))) < 1e-9
