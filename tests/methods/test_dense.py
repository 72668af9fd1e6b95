"""Maps of dense heads: why a patch is decided as it is, against autograd, closed forms and the host."""

import copy
import pickle

import numpy as np
import pytest
import torch
from meta import Traffic
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import SemanticSegmentationTarget
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormAblationCAM,
    ClosedFormGradCAM,
    ClosedFormHiResCAM,
    ClosedFormScoreCAM,
    ContributionCAM,
    HotellingTarget,
    LogRatioTarget,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    RelevanceCAM,
    ResidualTarget,
    ShapCAM,
    SignedMaps,
    SVMTarget,
    extract_features,
    mean_activations,
    recombined,
    smoothed,
)
from pytorch_grad_cam_pcasvm.runtime.errors import BaselineWarning
from pytorch_grad_cam_pcasvm.starts import boundary_path

torch.manual_seed(0)
X = torch.randn(4, 3, 16, 24, dtype=torch.float64)


class Backbone(nn.Module):
    """A stem of 8x12 positions, a step of 1x1 behind it, and one that looks around."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.Tanh())
        self.mix = nn.Sequential(nn.Conv2d(6, 7, 1), nn.Softplus())
        self.around = nn.Sequential(nn.Conv2d(7, 5, 3, 1, 1), nn.Tanh())

    def forward(self, x):
        return self.around(self.mix(self.stem(x)))


BACKBONE = Backbone().double().eval().requires_grad_(False)
GAMMA = 0.15
NAMES = np.array(["crack", "fine", "hole"])


def fitted(classifier, layer="mix"):
    rows, _ = extract_features(BACKBONE, [X], layer, pool="dense", progress=False)
    labels = NAMES[(rows[:, 0] > np.median(rows[:, 0])).astype(int) + (rows[:, 3] > np.median(rows[:, 3]))]
    pipeline = make_pipeline(StandardScaler(), PCA(3), *([] if classifier is None else [classifier]))
    return pipeline.fit(rows, labels), rows, labels


def network(classifier, layer="mix"):
    pipeline, _, _ = fitted(classifier, layer)
    return PCASVMNet(BACKBONE, pipeline, layer, pool="dense").eval(), pipeline


def margins_by_hand(pipeline, rows, gamma=GAMMA, log_scale=0.0):
    """The margins of each class of an RBF SVM, sums over pairs, with torch alone; kernels divided by a factor."""
    scaler, pca, svm = (step for _, step in pipeline.steps)
    p = (rows - torch.tensor(scaler.mean_)) / torch.tensor(scaler.scale_)
    p = (p - torch.tensor(pca.mean_)) @ torch.tensor(pca.components_).T
    squares = (p[:, None] - torch.tensor(svm.support_vectors_)).square().sum(-1)
    kernel = torch.exp(-gamma * squares - log_scale)
    ends = np.concatenate([[0], np.cumsum(svm.n_support_)])
    margins, pair = [0.0, 0.0, 0.0], 0
    for i in range(3):
        for j in range(i + 1, 3):
            first, second = (torch.tensor(svm.dual_coef_[row]) for row in (j - 1, i))
            value = (
                kernel[:, ends[i] : ends[i + 1]] @ first[ends[i] : ends[i + 1]]
                + kernel[:, ends[j] : ends[j + 1]] @ second[ends[j] : ends[j + 1]]
                + svm.intercept_[pair]
            )
            margins[i], margins[j], pair = margins[i] + value, margins[j] - value, pair + 1
    return torch.stack(margins, 1)


def at_places(values, mask):
    return values.reshape(len(X), -1)[:, torch.from_numpy(mask).flatten()].mean(1)


MASK = np.zeros((8, 12), bool)
MASK[2:5, 3:9] = MASK[6, 1] = True


def one(row, column):
    mask = np.zeros((8, 12), bool)
    mask[row, column] = True
    return mask


def test_gradients_at_places_are_those_of_autograd():
    net, pipeline = network(SVC(gamma=GAMMA))
    picture = np.repeat(np.repeat(MASK, 2, 0), 2, 1)
    targets = [
        SVMTarget("hole", at=(3, 4)),
        SVMTarget("crack", at=MASK),
        SVMTarget("crack", at=torch.from_numpy(picture)),
        SVMTarget("fine", versus="others", at=(0, 11)),
        SVMTarget("fine"),
        SVMTarget("hole", sign="-", at=MASK),
    ]
    maps = ClosedFormHiResCAM(net, ["stem"]).explain(X, targets)
    stem = BACKBONE.stem(X).requires_grad_()
    rows = BACKBONE.mix(stem).flatten(2).mT.flatten(0, 1)
    margins = margins_by_hand(pipeline, rows)
    everywhere = np.ones((8, 12), bool)
    expected = [
        at_places(margins[:, 2], one(3, 4)),
        at_places(margins[:, 0], MASK),
        at_places(margins[:, 0], MASK),
        at_places(margins[:, 1] - (margins[:, 0] + margins[:, 2]) / 2, one(0, 11)),
        at_places(margins[:, 1], everywhere),
        -at_places(margins[:, 2], MASK),
    ]
    for k, values in enumerate(expected):
        torch.testing.assert_close(maps.values[:, k], values.detach(), rtol=1e-9, atol=1e-9)
        (gradient,) = torch.autograd.grad(values.sum(), stem, retain_graph=True)
        torch.testing.assert_close(maps.maps[:, k], (gradient * stem).sum(1).detach(), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(targets[k](net(X)), values.detach(), rtol=1e-9, atol=1e-9)
        assert targets[k](net(X)[1]).item() == pytest.approx(values[1].item(), rel=1e-9)


def test_gradients_that_underflow_at_each_place_by_a_factor_of_its_own():
    net, pipeline = network(SVC(gamma=6000.0))
    far = X + 0.7 * torch.randn(X.shape, generator=torch.Generator().manual_seed(0), dtype=X.dtype)
    targets = [SVMTarget("hole", at=(3, 4)), SVMTarget("crack", at=MASK), lambda image: image.margins[2, 3, 4]]
    maps = ClosedFormHiResCAM(net, ["stem"]).explain(far, targets)
    assert (maps.log_scale[:, :2] < 0).any(0).all()
    for k, (number, mask) in enumerate(((2, one(3, 4)), (0, MASK))):
        for image, log_scale in zip(range(len(X)), maps.log_scale[:, k], strict=True):
            stem = BACKBONE.stem(far[image : image + 1]).requires_grad_()
            rows = BACKBONE.mix(stem)[0][:, torch.from_numpy(mask)].mT
            margins = margins_by_hand(pipeline, rows, 6000.0, log_scale)
            (gradient,) = torch.autograd.grad(margins[:, number].mean(), stem)
            expected = (gradient * stem).sum(1)[0].detach()
            torch.testing.assert_close(
                maps.maps[image, k], expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max())
            )
    of_callable = maps.maps[:, 0] * maps.log_scale[:, 0].exp()[:, None, None]
    torch.testing.assert_close(maps.maps[:, 2], of_callable, rtol=1e-6, atol=1e-290)


def test_contributions_of_a_region_are_the_means_of_its_places():
    net, _ = network(RandomForestClassifier(8, random_state=0))
    mean = mean_activations(net, [X], "mix", progress=False).mean((1, 2))
    places = [SVMTarget("crack", at=tuple(place)) for place in np.argwhere(MASK).tolist()]
    maps = ContributionCAM(net, ["mix"], mean=mean).explain(X, [SVMTarget("crack", at=MASK), *places])
    for name in ("values", "baseline_values", "remainder", "effects"):
        column = getattr(maps, name)
        torch.testing.assert_close(column[:, 0], column[:, 1:].mean(1), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(maps.maps[:, 0], maps.maps[:, 1:].mean(1), rtol=1e-9, atol=1e-12)


def test_the_class_of_a_region_is_the_most_frequent_one():
    net, _ = network(SVC(gamma=GAMMA))
    maps = ClosedFormGradCAM(net, ["stem"]).explain(X, [SVMTarget(at=MASK), SVMTarget()])
    predicted = net.predict(X)
    for k, mask in enumerate((MASK, np.ones_like(MASK))):
        for image in range(len(X)):
            labels, counts = np.unique(predicted[image][mask], return_counts=True)
            named = SVMTarget(labels[counts.argmax()].item(), at=mask)
            alone = ClosedFormGradCAM(net, ["stem"]).explain(X[image : image + 1], named)
            torch.testing.assert_close(maps.maps[image, k], alone.maps[0, 0], rtol=1e-9, atol=1e-12)


def test_a_softmax_of_the_scores_has_the_values_of_the_head():
    net, _ = network(SVC(gamma=GAMMA))
    output = net(X)
    for target in (SVMTarget(at=MASK), SVMTarget(versus="runner-up", at=(1, 1)), PCATarget(0)):
        assert torch.equal(target(torch.softmax(output, 1)), target(output))  # the host's SESS


def test_the_largest_value_is_looked_up_for_each_image():
    net, _ = network(SVC(gamma=GAMMA))
    output = net(X)
    maps = ContributionCAM(net, ["mix"]).explain(X, [SVMTarget("hole", at="max"), PCATarget(1, sign="-", at="max")])
    for k, values in enumerate((output.margins[:, 2], -output.components[:, 1])):
        places = values.flatten(1).argmax(1)
        torch.testing.assert_close(maps.values[:, k], values.flatten(1).amax(1))
        outside = maps.maps[:, k].flatten(1).clone()
        outside[torch.arange(len(X)), places] = 0
        assert not outside.any()


@pytest.mark.parametrize("classifier", [SVC(gamma=GAMMA), LogisticRegression(), RandomForestClassifier(8)])
def test_behind_steps_of_1x1_nothing_but_the_patch_has_colour(classifier):
    net, _ = network(classifier)
    for layer in ("mix", "stem"):
        mean = mean_activations(net, [X], layer, progress=False).mean((1, 2))
        cam = ContributionCAM(net, [layer], mean=mean)
        maps = cam.explain(X, [SVMTarget("crack", at=(2, 7)), SVMTarget("crack", at=MASK), PCATarget(2, at=(0, 0))])
        for k, mask in enumerate((one(2, 7), MASK, one(0, 0))):
            assert not maps.maps[:, k][:, ~torch.from_numpy(mask)].any()
        sums = maps.maps.sum((2, 3)) * maps.log_scale.exp() + maps.baseline_values
        torch.testing.assert_close(sums, maps.values, rtol=1e-9, atol=1e-9)
        if not isinstance(classifier, RandomForestClassifier):  # whose value jumps over 0
            size = net(X).margins.abs().amax()
            assert maps.baseline_values.abs().max() < 1e-8 * size


@pytest.mark.parametrize("layer", ["stem", "mix", "around"])
def test_one_start_for_all_places_whose_mean_is_0(layer):
    net, _ = network(SVC(gamma=GAMMA), "around")
    mean = mean_activations(net, [X], layer, progress=False).mean((1, 2))
    cam = ContributionCAM(net, [layer], mean=mean)
    targets = [SVMTarget("crack", at=(r, c)) for r in range(8) for c in range(12)]
    maps = cam.explain(X[:2], [*targets, SVMTarget("crack")])
    sums = maps.maps.sum((2, 3)) * maps.log_scale.exp() + maps.baseline_values
    torch.testing.assert_close(sums, maps.values, rtol=1e-9, atol=1e-9)
    starts = maps.baseline_values[:, :-1]
    torch.testing.assert_close(starts[0], starts[1], rtol=1e-9, atol=1e-9)
    assert starts.mean(1).abs().max() < 1e-7 * maps.values.abs().max()
    assert maps.baseline_values[:, -1].abs().max() < 1e-7 * maps.values.abs().max()
    torch.testing.assert_close(maps.maps[:, :-1].mean(1), maps.maps[:, -1], rtol=1e-8, atol=1e-10)


def test_places_of_one_pass_are_those_of_a_call_for_each():
    net, _ = network(SVC(gamma=GAMMA), "around")
    targets = [SVMTarget("hole", at=(r, c)) for r, c in ((0, 0), (3, 4), (7, 11), (5, 2))] + [PCATarget(0, at=MASK)]
    cam = ContributionCAM(net, ["stem"], baseline="zero")
    together = cam.explain(X, targets)
    for k, target in enumerate(targets):
        alone = cam.explain(X, target)
        torch.testing.assert_close(together.maps[:, k], alone.maps[:, 0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(together.baseline_values[:, k], alone.baseline_values[:, 0], rtol=1e-9, atol=1e-12)
    small = ContributionCAM(net, ["stem"], baseline="zero", max_bytes=1).explain(X, targets)
    torch.testing.assert_close(small.maps, together.maps, rtol=1e-9, atol=1e-12)


def test_each_image_may_have_a_place_of_its_own():
    net, _ = network(SVC(gamma=GAMMA), "around")
    cam = ClosedFormGradCAM(net, ["stem"])
    targets = [SVMTarget("hole", at=(0, 1)), SVMTarget("crack", at="max"), PCATarget(1, at=MASK), SVMTarget()]
    mixed = cam(X, targets)
    for image, target in enumerate(targets):
        np.testing.assert_allclose(mixed[image], cam(X[image : image + 1], target)[0], atol=1e-5)


def test_the_host_s_target_of_segmentation():
    net, pipeline = network(SVC(gamma=GAMMA), "around")

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = BACKBONE

        def forward(self, x):
            rows = BACKBONE(x).flatten(2).mT.flatten(0, 1)
            return margins_by_hand(pipeline, rows).unflatten(0, (len(x), 96)).mT.unflatten(2, (8, 12))

    class Margins(SemanticSegmentationTarget):
        def __call__(self, output):
            return super().__call__(getattr(output, "margins", output))

    target = Margins(2, MASK.astype(np.float64))
    ours = ClosedFormGradCAM(net, ["stem"])(X, [target] * len(X))
    with GradCAM(Scores().requires_grad_(True), [BACKBONE.stem]) as host:
        theirs = host(X, [target] * len(X))
    BACKBONE.requires_grad_(False)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    scores = SemanticSegmentationTarget(1, MASK.astype(np.float64))
    linear, _ = network(LogisticRegression(), "around")
    maps = ContributionCAM(linear, ["stem"], baseline="zero").explain(X, scores)
    torch.testing.assert_close(maps.values[:, 0], (linear(X)[:, 1] * torch.from_numpy(MASK)).sum((1, 2)))
    torch.testing.assert_close(maps.maps.sum((2, 3)) + maps.baseline_values, maps.values)


def weighted(maps, *weights):
    """Sums of the maps, the values and the values at the start over targets."""
    tables = [maps.maps * maps.log_scale.exp()[:, :, None, None], maps.values, maps.baseline_values]
    return [torch.tensordot(torch.tensor(weights).double(), table, ([0], [1])) for table in tables]


@pytest.mark.parametrize(("gamma", "factor"), [(GAMMA, -2.0), (40.0, 0.0)])  # gradients of 40 come with a factor
def test_callables_of_all_positions_are_sums_of_targets(gamma, factor):
    net, _ = network(SVC(gamma=gamma), "around")

    def linear(image):
        value = image.margins[2].mean()
        return value + factor * image.components[1].mean() if factor else value

    for baseline in ("zero", X.flip(0), X[:1]):
        cam = ContributionCAM(net, ["stem"], baseline=baseline)
        whole = cam.explain(X, [linear, lambda image: image.components[0].mean()])
        parts = cam.explain(X, [SVMTarget("hole"), PCATarget(1), PCATarget(0)])
        sums = [*weighted(parts, 1.0, factor, 0.0), *weighted(parts, 0.0, 0.0, 1.0)]
        for actual, expected in zip([*weighted(whole, 1.0, 0.0), *weighted(whole, 0.0, 1.0)], sums, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
    with pytest.raises(ValueError, match="<lambda> is not linear"):
        cam.explain(X, lambda image: linear(image) ** 2)


def test_other_targets_at_places():
    net, pipeline = network(SVC(gamma=GAMMA), "around")
    output = net(X)
    rows = BACKBONE(X).flatten(2).mT.flatten(0, 1).numpy()
    components = pipeline[:2].transform(rows)
    residual = pipeline[0].transform(rows) - pipeline[1].inverse_transform(components)
    squares = (components**2 / pipeline[1].explained_variance_).sum(1)
    expected = {
        HotellingTarget(at=(1, 2)): at_places(torch.tensor(squares), one(1, 2)),
        ResidualTarget(at=MASK): at_places(torch.tensor((residual**2).sum(1)), MASK),
        PCATarget(1, at=MASK): at_places(torch.tensor(components[:, 1]), MASK),
    }
    logistic, other = network(LogisticRegression(), "around")
    for target, values in expected.items():
        torch.testing.assert_close(target(output), values, rtol=1e-9, atol=1e-9)
        maps = ContributionCAM(net, ["stem"], baseline="zero").explain(X, target)
        torch.testing.assert_close(maps.values[:, 0], values, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close((maps.maps.sum((2, 3)) + maps.baseline_values)[:, 0], values, rtol=1e-9, atol=1e-9)
    ratio = LogRatioTarget("hole", at=(4, 4))
    assert torch.isfinite(ClosedFormGradCAM(net, ["stem"]).explain(X, ratio).maps).all()
    probability = ProbabilityTarget("hole", at=MASK)
    expected_probability = at_places(torch.tensor(other.predict_proba(rows)[:, 2]), MASK)
    torch.testing.assert_close(probability(logistic(X)), expected_probability, rtol=1e-9, atol=1e-9)
    maps = ClosedFormHiResCAM(logistic, ["around"]).explain(X, probability)
    leaf = BACKBONE(X).requires_grad_()
    scaler, pca, linear = (step for _, step in other.steps)
    weight, bias = torch.tensor(linear.coef_), torch.tensor(linear.intercept_)
    p = (leaf.flatten(2).mT.flatten(0, 1) - torch.tensor(scaler.mean_)) / torch.tensor(scaler.scale_)
    p = (p - torch.tensor(pca.mean_)) @ torch.tensor(pca.components_).T
    at_places((p @ weight.T + bias).softmax(1)[:, 2], MASK).sum().backward()
    torch.testing.assert_close(maps.maps[:, 0], (leaf * leaf.grad).sum(1).detach(), rtol=1e-8, atol=1e-12)


def test_all_methods_take_places():
    net, _ = network(SVC(gamma=GAMMA), "around")
    targets = [SVMTarget("hole", at=(3, 4)), PCATarget(0, at=MASK), SVMTarget(at="max")]
    for method in (LIFTCAM, RelevanceCAM, ClosedFormAblationCAM, ClosedFormScoreCAM):
        maps = method(net, ["stem"]).explain(X[:2], targets)
        assert torch.isfinite(maps.maps).all()
        torch.testing.assert_close(maps.values, torch.stack([target(net(X[:2])) for target in targets], 1))
    near = ShapCAM(net, ["stem"], samples=4, baseline="zero").explain(X[:1, :, :4, :4], targets[0].at_place((0, 1)))
    torch.testing.assert_close(near.maps.sum((2, 3)) + near.baseline_values, near.values)
    smooth = smoothed(ClosedFormGradCAM(net, ["stem"]), X[:2], targets, samples=2)
    assert torch.isfinite(smooth.maps).all()


def test_as_many_components_as_dense_features(tmp_path):
    rows, labels = fitted(None)[1:]
    head = make_pipeline(StandardScaler(), PCA(7), SVC(gamma=GAMMA)).fit(rows, labels)
    net = PCASVMNet(BACKBONE, head, "mix", pool="dense").eval()
    cam, place = ContributionCAM(net, ["stem"], baseline="zero"), (3, 4)
    components = cam.explain(X[:2], [PCATarget(b, at=place) for b in range(7)])
    components.save(tmp_path / "maps.safetensors")
    expected = cam.explain(X[:2], SVMTarget("hole", at=place))
    for maps, part in ((components, head), (SignedMaps.load(tmp_path / "maps.safetensors"), head[2:])):
        torch.testing.assert_close(recombined(maps, part, SVMTarget("hole")).maps, expected.maps, rtol=1e-6, atol=1e-8)


def test_ablation_of_dense_features_themselves():
    net, pipeline = network(SVC(gamma=GAMMA))
    maps = ClosedFormAblationCAM(net, ["mix"]).explain(X[:2], SVMTarget("hole", at=(3, 4)))
    rows = BACKBONE.mix(BACKBONE.stem(X[:2]))[:, :, 3, 4]
    whole = margins_by_hand(pipeline, rows)[:, 2]
    without = [margins_by_hand(pipeline, rows * (torch.arange(7) != t))[:, 2] for t in range(7)]
    torch.testing.assert_close(maps.weights[:, 0], whole.unsqueeze(1) - torch.stack(without, 1), rtol=1e-9, atol=1e-9)


def test_targets_are_compared_and_stored(tmp_path):
    assert SVMTarget("hole", at=MASK) == SVMTarget("hole", at=torch.from_numpy(MASK))
    assert hash(SVMTarget("hole", at=MASK)) == hash(SVMTarget("hole", at=MASK.tolist()))
    assert SVMTarget("hole", at=MASK) != SVMTarget("hole", at=one(0, 0))
    assert SVMTarget("hole", at=[1, 2]) == SVMTarget("hole", at=np.array([1, 2]))
    assert repr(SVMTarget("hole", at=(1, 2))) == "SVMTarget('hole', at=(1, 2))"
    assert repr(PCATarget(1, at=MASK)) == "PCATarget(1, at=<19 positions of 8x12>)"
    net, _ = network(SVC(gamma=GAMMA))
    targets = [SVMTarget("hole", at=(3, 4)), PCATarget(0, at=MASK), SVMTarget(at="max"), SVMTarget("fine")]
    maps = ContributionCAM(net, ["mix"]).explain(X, targets)
    maps.save(tmp_path / "maps.safetensors")
    loaded = SignedMaps.load(tmp_path / "maps.safetensors")
    assert list(loaded.targets) == targets
    assert torch.equal(loaded.maps, maps.maps)
    assert loaded.output.shape == (4, 3, 8, 12)
    assert pickle.loads(pickle.dumps(targets)) == targets
    joined = SignedMaps.cat([maps[:1], maps[1:]])
    assert torch.equal(joined.maps, maps.maps)
    assert joined.output.components.shape == (4, 3, 8, 12)
    assert list(maps[:, [1, 2]].targets) == targets[1:3]
    assert maps[2:3].output.features.shape == (1, 7, 8, 12)
    assert maps.cpu().output.labels().tolist() == net.predict(X).tolist()


def test_a_class_that_is_out_of_reach_everywhere_starts_at_the_mean(monkeypatch):
    pipeline, _, _ = fitted(LogisticRegression(), "around")
    pipeline[-1].intercept_[0] -= 1000  # features end at 1
    net = PCASVMNet(BACKBONE, pipeline, "around", pool="dense").eval()
    mean = mean_activations(net, [X], ["stem"])
    cam = ContributionCAM(net, ["stem"], baseline="neutral", mean=mean)
    target = SVMTarget("crack", at="max")
    with pytest.warns(BaselineWarning, match=r"near the training mean make the mean of SVMTarget\('crack'\) over pos"):
        maps = cam.explain(X, target)
    torch.testing.assert_close(maps.maps.sum((2, 3)) + maps.baseline_values, maps.values)
    expected = ContributionCAM(net, ["stem"], baseline="mean", mean=mean).explain(X, target)
    torch.testing.assert_close(maps.maps, expected.maps)
    monkeypatch.setattr(boundary_path, "_solved", None)  # nobody searches again
    assert torch.equal(cam.explain(X, target).maps, maps.maps)


def test_maps_of_a_place_are_recombined():
    pipeline, rows, labels = fitted(SVC(gamma=GAMMA))
    net = PCASVMNet(BACKBONE, pipeline, "mix", pool="dense").eval()
    later = LogisticRegression().fit(pipeline[:2].transform(rows), labels)
    cam = ContributionCAM(net, ["mix"], baseline="mean")
    components = cam.explain(X, [PCATarget(b, at=(3, 4)) for b in range(3)])
    for head, named in ((pipeline, net), (later, PCASVMNet(BACKBONE, [*pipeline[:2], later], "mix", pool="dense"))):
        made = recombined(components, head, [SVMTarget("hole", at=(3, 4)), SVMTarget("fine")])
        direct = ContributionCAM(named.eval(), ["mix"], baseline="mean").explain(
            X, [SVMTarget("hole", at=(3, 4)), SVMTarget("fine", at=(3, 4))]
        )
        torch.testing.assert_close(made.maps, direct.maps, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(made.values, direct.values, rtol=1e-8, atol=1e-10)
    of_region = cam.explain(X, [PCATarget(b, at=MASK) for b in range(3)])
    with pytest.raises(ValueError, match="of one position"):
        recombined(of_region, pipeline, SVMTarget("hole"))
    with pytest.raises(ValueError, match="of another place"):
        recombined(components, pipeline, SVMTarget("hole", at=(0, 0)))


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ((8, 0), "no position \\(8, 0\\) on the 8x12 grid"),
        ((1, 2, 3), "no position"),
        (np.zeros((8, 12), bool), "the mask at= is empty"),
        (np.ones((5, 5), bool), "has shape \\(5, 5\\): expected that of the grid or the picture"),
        ((-1, 0), "a number from 0"),
        ("largest", "at must be a position, a boolean mask or 'max'"),
        ((0.5, 1), "at must be a position"),
    ],
)
def test_places_that_are_none(at, message):
    net, _ = network(SVC(gamma=GAMMA))
    with pytest.raises((ValueError, TypeError), match=message):
        ClosedFormGradCAM(net, ["stem"]).explain(X, SVMTarget("hole", at=at))
    small = np.zeros((16, 24), bool)
    small[0, 0] = True
    with pytest.raises(ValueError, match="covers no position of the 8x12 grid by more than half"):
        ClosedFormGradCAM(net, ["stem"]).explain(X, SVMTarget("hole", at=small))


def test_heads_of_whole_images_have_no_places():
    pooled, _ = extract_features(
        BACKBONE, [X.repeat(6, 1, 1, 1) + torch.randn(24, 1, 1, 1)], pool="mean", progress=False
    )
    pipeline = make_pipeline(PCA(2), SVC()).fit(pooled, np.arange(24) % 2)
    net = PCASVMNet(BACKBONE, pipeline, pool="mean").eval()
    with pytest.raises(ValueError, match=r"at= names a place, but .* pool='dense'"):
        ClosedFormGradCAM(net, ["stem"]).explain(X, SVMTarget(at=(0, 0)))


@pytest.mark.optional
def test_patch_tokens_of_a_transformer():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, reg_tokens=2, depth=2).eval().double()
    images = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    rows, _ = extract_features(model, [images], "norm", pool="dense", progress=False)
    pipeline = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(rows, rows[:, 0] > 0)
    net = PCASVMNet(model, pipeline, "norm", pool="dense").eval()
    targets = [SVMTarget(True, at=(1, 2)), PCATarget(0, at=(3, 3)), SVMTarget(True)]
    maps = ContributionCAM(net, ["norm"], "tokens").explain(images, targets)
    outside = maps.maps[:, 0].clone()
    outside[:, 1, 2] = 0
    assert not outside.any()
    torch.testing.assert_close(maps.maps.sum((2, 3)) + maps.remainder + maps.baseline_values, maps.values)
    assert maps.baseline_values[:, 0].abs().max() < 1e-9 * maps.values.abs().max()
    before = ContributionCAM(net, ["blocks.1.norm1"], "tokens", baseline="zero").explain(images, targets)
    sums = before.maps.sum((2, 3)) + before.remainder + before.baseline_values
    torch.testing.assert_close(sums, before.values, rtol=1e-8, atol=1e-8)
    assert bool((before.maps[:, 0].abs().flatten(1) > 0).sum(1).min() > 8)  # attention looks around


@pytest.mark.parametrize("size", [(4, 4, 4), (4, 8, 2), (2, 2, 2)])
@pytest.mark.parametrize("width", [3, 5])
def test_neighbours_in_volumes_smaller_than_the_window(size, width):
    torch.manual_seed(1)
    backbone = nn.Sequential(nn.Conv3d(1, 4, 3, 2, 1), nn.Tanh(), nn.Conv3d(4, 5, 3, 1, 1)).double().eval()
    volumes = torch.randn(6, 1, *size, dtype=torch.float64)
    rows, _ = extract_features(backbone, [volumes], pool=("dense", width), progress=False)
    with torch.no_grad():
        grid = backbone(volumes).numpy()
    half = width // 2
    padded = np.pad(grid, [(0, 0), (0, 0), *[(half, half)] * 3])  # the mean with zeros beyond the border
    windows = np.lib.stride_tricks.sliding_window_view(padded, (width,) * 3, (2, 3, 4)).mean((-3, -2, -1))
    np.testing.assert_allclose(rows, np.moveaxis(windows, 1, -1).reshape(-1, 5), atol=1e-12)
    labels = rows[:, 0] > np.median(rows[:, 0])
    pipeline = make_pipeline(PCA(2), SVC()).fit(rows, labels)
    net = PCASVMNet(backbone, pipeline, pool=("dense", width)).eval()
    own = pipeline.decision_function(rows).reshape(6, *grid.shape[2:])
    for layer in ("0", "2"):
        maps = ContributionCAM(net, [layer], baseline="zero").explain(volumes, SVMTarget(True, at=(0, 0, 0)))
        np.testing.assert_allclose(maps.values[:, 0], own[:, 0, 0, 0], atol=1e-12)
        torch.testing.assert_close(maps.maps.flatten(2).sum(2) + maps.baseline_values, maps.values)


DEVICE_TARGETS = [
    SVMTarget("hole", at=(3, 4)),
    SVMTarget(at=MASK),
    SVMTarget("crack", versus="runner-up", at="max"),
    PCATarget(0, at="max"),
    HotellingTarget(at=(0, 0)),
    SVMTarget(),
]


@pytest.mark.parametrize(
    ("method", "classifier"), [(ClosedFormGradCAM, SVC(gamma=GAMMA)), (ContributionCAM, SVC(kernel="poly"))]
)
def test_nothing_leaves_the_device(method, classifier, unchecked):
    pipeline, _, _ = fitted(classifier, "around")
    net = PCASVMNet(copy.deepcopy(BACKBONE), pipeline, "around", pool="dense").eval()
    cam = method(net, ["stem"], **({"baseline": "zero"} if method is ContributionCAM else {}))
    cam.explain(X, DEVICE_TARGETS)  # layouts are looked at once, on a copy
    net.to("meta")
    images = X.to("meta")
    with Traffic() as traffic:
        maps = cam.explain(images, DEVICE_TARGETS)
    assert maps.maps.device.type == "meta"
    assert not traffic.seen


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", [ClosedFormGradCAM, ContributionCAM])
def test_cuda_equals_the_cpu(method):
    net, _ = network(SVC(gamma=GAMMA), "around")
    expected = method(net, ["stem"]).explain(X, DEVICE_TARGETS)
    actual = method(copy.deepcopy(net).cuda(), ["stem"]).explain(X.cuda(), DEVICE_TARGETS)
    torch.testing.assert_close(actual.maps.cpu(), expected.maps, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(actual.values.cpu(), expected.values, rtol=1e-8, atol=1e-10)
