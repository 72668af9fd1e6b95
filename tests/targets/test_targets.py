"""Targets, and everything bad that users give."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import Backbone, Problem
from reference import activations_of, relative, with_activations
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    BlankMapWarning,
    ClosedFormAblationCAM,
    ClosedFormGradCAM,
    ContributionCAM,
    Head,
    HotellingTarget,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    ResidualTarget,
    SignedMaps,
    SVMTarget,
    recombined,
)
from pytorch_grad_cam_pcasvm.targets import ScoreTarget


@pytest.fixture(scope="module")
def problem():
    return Problem(classes=3)


@pytest.fixture(scope="module")
def cam(problem):
    return ClosedFormGradCAM(problem.net, [problem.target_layer])


def test_targets_read_rows_and_batches(problem):
    output = problem.net(problem.x)
    for target, expected in [
        (PCATarget(1), output.components[:, 1]),
        (PCATarget(1, sign="-"), -output.components[:, 1]),
        (PCATarget(np.int64(2)), output.components[:, 2]),
        (SVMTarget("bee"), output.margins[:, 1]),
        (SVMTarget("bee", sign="-"), -output.margins[:, 1]),
        (SVMTarget("bee", versus="ant"), -output.decision[:, 0]),
        (SVMTarget("ant", versus="cat"), output.decision[:, 1]),
        (SVMTarget(np.str_("cat")), output.margins[:, 2]),
    ]:
        assert relative(target(output), expected) < 1e-12
        assert relative(torch.stack([target(row) for row in output]), expected) < 1e-12
        # The host's SESS hands over softmax(output).
        assert relative(target(torch.softmax(output, -1)), expected) < 1e-12
    labels = problem.net.predict(problem.x)
    expected = torch.stack([SVMTarget(label)(row) for label, row in zip(labels, output, strict=True)])
    assert relative(SVMTarget()(output), expected) < 1e-12


@pytest.mark.parametrize(
    ("target", "typed"),
    [
        (PCATarget(0), "PCATarget(0)"),
        (PCATarget(np.int64(2), "-"), "PCATarget(2, sign='-')"),
        (SVMTarget(), "SVMTarget()"),
        (SVMTarget(np.str_("cat")), "SVMTarget('cat')"),
        (SVMTarget(0), "SVMTarget(0)"),
        (SVMTarget(None, "runner-up"), "SVMTarget(versus='runner-up')"),
        (SVMTarget("ü", ("dog", 3), strength=0.6), "SVMTarget('ü', versus=['dog', 3], strength=0.6)"),
        (SVMTarget(torch.tensor(1), sign="-"), "SVMTarget(1, sign='-')"),
        (ProbabilityTarget("cat"), "ProbabilityTarget('cat')"),
        (ScoreTarget(4), "ScoreTarget(4)"),
        (ScoreTarget(), "ScoreTarget()"),
        (HotellingTarget(), "HotellingTarget()"),
        (ResidualTarget("-"), "ResidualTarget('-')"),
    ],
)
def test_a_target_is_written_as_one_would_type_it(target, typed):
    assert repr(target) == typed
    assert eval(typed) == target


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PCATarget(-1), ValueError, "component must be 0 or more, got -1"),
        (lambda: PCATarget(1.0), TypeError, "component must be an integer, counted from 0, got 1.0"),
        (lambda: PCATarget("0"), TypeError, "component must be an integer"),
        (lambda: PCATarget(True), TypeError, "component must be an integer"),
        (lambda: PCATarget(0, sign="x"), ValueError, r"sign must be '\+' or '-', got 'x'"),
        (lambda: SVMTarget("a", sign=None), ValueError, "sign must be"),
        (lambda: SVMTarget(["a"]), TypeError, r"a class label must be one value of classes_, got \['a'\]"),
        (lambda: SVMTarget("a", versus=np.array(["b"])), TypeError, "a class label must be one value"),
        (lambda: SVMTarget("a", versus="a"), ValueError, "'a' cannot be compared with itself: versus must"),
    ],
)
def test_bad_targets_are_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


BAD_TARGETS = [
    (PCATarget(4), ValueError, "the head has 4 components, numbered from 0"),
    (SVMTarget("fox"), ValueError, r"'fox' is not a class of this head: choose one of \['ant', 'bee', 'cat'\]"),
    (SVMTarget("ant", versus="fox"), ValueError, "'fox' is not a class"),
    ("ant", TypeError, "a target must be callable on a row of .*, got 'ant': use SVMTarget\\('ant'\\)$"),
    (2, TypeError, "got 2: use SVMTarget\\(2\\)$"),
    (None, TypeError, "got None$"),
    (lambda row: 3.0, TypeError, "must return a tensor, but returned float"),
    (lambda row: row, ValueError, "must return one number per image, but returned 3"),
]


@pytest.mark.parametrize(("target", "error", "message"), BAD_TARGETS)
def test_targets_that_the_head_does_not_know_are_refused(cam, problem, target, error, message):
    for call in (lambda: cam(problem.x, [target] * 5), lambda: cam.explain(problem.x, [PCATarget(0), target])):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("count", [1, 4, 6])
def test_the_number_of_targets_must_be_that_of_the_images(cam, problem, count):
    with pytest.raises(ValueError, match=rf"{count} targets? for 5 images: give one per image"):
        cam(problem.x, [PCATarget(0)] * count)


def test_one_bare_target_serves_all_images(cam, problem):
    assert relative(cam(problem.x, PCATarget(0)), cam(problem.x, [PCATarget(0)] * 5)) == 0
    assert cam.explain(problem.x, PCATarget(0)).maps.shape[1] == 1


BAD_INPUTS = [
    (lambda x: x.numpy(), TypeError, r"must be a torch.Tensor, got ndarray: use torch.from_numpy"),
    (lambda x: list(x), TypeError, "must be a torch.Tensor, got list"),
    (lambda x: x[:0], ValueError, "must be a batch of images"),
    (lambda x: x[0, 0, 0], ValueError, "must be a batch of images"),
    (lambda x: x[0], ValueError, r"must be a batch \(N, C, H, W\), got \(3, 12, 12\): use x.unsqueeze\(0\)"),
    (
        lambda x: x.mul(9).to(torch.uint8),
        TypeError,
        r"floating-point values, got torch.uint8: scale and normalise it as in training",
    ),
    (lambda x: x.clone().fill_(torch.nan), ValueError, "NaN or infinite values"),
    (lambda x: x.clone().index_fill_(0, torch.tensor([2]), torch.inf), ValueError, "NaN or infinite values"),
]


@pytest.mark.parametrize(("spoil", "error", "message"), BAD_INPUTS)
def test_bad_inputs_are_refused(cam, problem, spoil, error, message):
    x = spoil(problem.x)
    for call in (
        lambda: cam(x, None),
        lambda: cam.explain(x),
        lambda: cam.jacobians(x),
        lambda: problem.net.predict(x),
    ):
        with pytest.raises(error, match=message):
            call()


def test_a_warning_of_a_blank_map_points_at_the_users_line(problem):
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    with pytest.warns(BlankMapWarning, match="image 4, PCATarget") as warned:
        cam(problem.x, PCATarget(0))
    assert warned[0].filename == __file__


@pytest.mark.parametrize("targets", [[], ()])
def test_empty_targets_are_refused(cam, problem, targets):
    for call in (cam, cam.explain):
        with pytest.raises(ValueError, match="targets is empty"):
            call(problem.x, targets)


def test_a_head_without_pca_or_svm_says_what_it_lacks(problem):
    without_svm = PCASVMNet(problem.backbone, problem.head[:2], layer="classifier.4")
    cam = ClosedFormGradCAM(without_svm, [problem.target_layer])
    for targets in (None, [SVMTarget("ant")] * 5, [SVMTarget()] * 5):
        with pytest.raises(ValueError, match="needs a head with an SVM, but this one has none: use PCATarget"):
            cam(problem.x, targets)
    for call in (cam, cam.explain):
        with pytest.raises(ValueError, match="the head has no SVM: use PCATarget"):
            call(problem.x, ProbabilityTarget())
    assert cam.explain(problem.x).targets == [PCATarget(b) for b in range(4)]
    features = problem.net(problem.x).features.detach().numpy()
    svm = SVC().fit(np.concatenate([features, features + 1]), ["ant"] * 5 + ["bee"] * 5)
    cam = ClosedFormGradCAM(PCASVMNet(problem.backbone, svm, layer="classifier.4"), [problem.target_layer])
    with pytest.raises(ValueError, match="needs a head with a PCA, but this one has none: use SVMTarget"):
        cam(problem.x, [PCATarget(0)] * 5)
    assert cam.explain(problem.x).targets == [SVMTarget()]


def test_targets_on_an_ordinary_classifier(problem):
    cam = ClosedFormGradCAM(problem.backbone, [problem.target_layer])
    for target in (PCATarget(0), SVMTarget("ant")):
        with pytest.raises(ValueError, match="needs the output of a PCASVMNet; for an ordinary classifier use"):
            cam(problem.x, [target] * 5)


def test_the_largest_score_is_that_of_the_class_that_an_image_has_with_all_its_channels():
    torch.manual_seed(0)
    net, x = Backbone(classes=3).double().eval(), torch.randn(5, 3, 12, 12, dtype=torch.float64)
    layer = net.features[3]
    with torch.no_grad():
        net.classifier[-1].bias -= net(x).mean(0)  # so that each class has some images
    scores, f = net(x).detach(), activations_of(net, layer, x)
    largest = scores.argmax(1, keepdim=True)
    maps, changed = ClosedFormAblationCAM(net, [layer]).explain(x), 0
    for t in range(f.shape[1]):
        without = f.clone()
        without[:, t] = 0
        left = with_activations(net, layer, x, without)
        assert relative(maps.weights[:, 0, t], (scores - left).gather(1, largest)[:, 0]) < 1e-10
        changed += int((left.argmax(1, keepdim=True) != largest).sum())
    assert len(largest.unique()) > 1
    assert changed, "no image is of another class without a channel: nothing is tested"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"jacobian": "exact"}, ValueError, "jacobian must be 'closed_form', 'auto' or 'autograd', got 'exact'"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be a positive integer or None, got 0"),
        ({"max_bytes": 1e9}, ValueError, "max_bytes must be a positive integer or None, got 1000000000.0"),
        ({"target_layers": []}, ValueError, "target_layers is empty"),
        ({"target_layers": nn.ReLU()}, TypeError, "target_layers must be a list of modules"),
        ({"target_layers": "features"}, TypeError, "target_layers must be a list of modules"),
        ({"target_layers": ["feature"]}, ValueError, "Backbone has no layer 'feature'"),
        ({"target_layers": [nn.ReLU()]}, ValueError, "this ReLU object is not in this Backbone"),
        ({"model": "net"}, TypeError, "the network must be a torch.nn.Module, got str"),
    ],
)
def test_bad_arguments_of_the_cam_are_refused(problem, arguments, error, message):
    given = {"model": problem.net, "target_layers": [problem.target_layer], **arguments}
    with pytest.raises(error, match=message):
        ClosedFormGradCAM(**given)


@pytest.mark.parametrize("layer", ["classifier.5", "itself"])
def test_a_target_layer_after_the_features_is_refused(problem, layer):
    target = problem.backbone if layer == "itself" else problem.backbone.classifier[5]
    with pytest.raises(ValueError, match=r"the network itself|does not run before the features"):
        ClosedFormGradCAM(problem.net, [target]).explain(problem.x)


def test_a_target_layer_without_maps_is_refused(problem):
    cam = ClosedFormGradCAM(problem.net, [problem.backbone.classifier[0]])
    with pytest.raises(ValueError, match=r"'classifier.0' have shape \(5, 12\), but a map needs \(N, T, H, W\)"):
        cam.explain(problem.x)


def test_explain_takes_one_target_layer(problem):
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer, problem.backbone.features[0]])
    for call in (cam.explain, cam.jacobians):
        with pytest.raises(ValueError, match="takes one target layer"):
            call(problem.x)


def test_a_network_that_gives_nan_gives_no_map(problem):
    broken = Backbone().double()
    with torch.no_grad():
        broken.features[0].bias.fill_(torch.nan)
    head = PCA(3).fit(np.random.default_rng(0).normal(size=(20, 9)))
    cam = ClosedFormGradCAM(PCASVMNet(broken, head, layer="classifier.4"), [broken.features[-1]])
    for call in (lambda: cam.explain(problem.x), lambda: cam(problem.x, PCATarget(0))):
        with pytest.raises(ValueError, match="maps are not finite"):
            call()


def test_what_a_network_does_around_backbone_and_head_is_refused(problem):
    class Normalised(PCASVMNet):
        def forward(self, x):
            return super().forward(x / 2)

    net = Normalised(problem.backbone, problem.head, layer="classifier.4")
    with pytest.raises(ValueError, match=r"Normalised has a forward of its own.*move it into the backbone"):
        ClosedFormGradCAM(net, [problem.target_layer])
    net = PCASVMNet(problem.backbone, problem.head, layer="classifier.4")
    with pytest.raises(ValueError, match="Sequential wraps a PCASVMNet"):
        ClosedFormGradCAM(nn.Sequential(nn.Identity(), net), [problem.target_layer])
    net.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(ValueError, match="PCASVMNet has hooks"):
        ClosedFormGradCAM(net, [problem.target_layer])


def test_a_scaler_behind_the_components_is_differentiated(problem):
    scaled = Pipeline([*problem.head[:2].steps, ("scaler", StandardScaler())])
    features = problem.net(problem.x).features.detach().numpy()
    scaled[-1].fit(scaled[:2].transform(features))
    net = PCASVMNet(problem.backbone, scaled, layer="classifier.4")
    maps = ClosedFormGradCAM(net, [problem.target_layer]).explain(problem.x, [lambda row: row[1], PCATarget(1)])
    assert relative(maps.weights[:, 0], maps.weights[:, 1] / scaled[-1].scale_[1]) < 1e-12


def test_maps_can_be_trained_on(problem):
    maps = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x, [PCATarget(0)]).maps
    student = torch.zeros_like(maps).requires_grad_()
    (student * maps).sum().backward()
    assert relative(student.grad, maps) == 0


@pytest.mark.parametrize("shape", ["ovr", "ovo"])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_a_class_against_several(classes, shape):
    problem = Problem(classes=classes)
    head = clone(problem.head).set_params(svc__decision_function_shape=shape)
    reduced = problem.head[:-1]
    head.steps[:-1] = reduced.steps
    generator = torch.Generator().manual_seed(0)
    features = reduced.inverse_transform(torch.randn(60, 4, generator=generator).numpy())
    head[-1].fit(reduced.transform(features), problem.labels[np.arange(60) % classes])
    net = PCASVMNet(problem.backbone, head, layer="classifier.4").eval()
    labels, x = net.head.classes_.tolist(), problem.x
    output = net(x)
    margins = output.margins
    first, *others = range(classes)
    cam = ContributionCAM(net, [problem.target_layer])
    for rivals, strength in ((others, 1.0), (others[:1], 0.6), ("others", 0.3), (others, 0.0)):
        versus = rivals if rivals == "others" else [labels[index] for index in rivals]
        target = SVMTarget(labels[first], versus, strength=strength)
        mean = margins[:, others if rivals == "others" else rivals].mean(1)
        maps = cam.explain(x, [target, replace(target, sign="-")])
        expected = margins[:, first] - strength * mean
        assert relative(maps.values, torch.stack([expected, -expected], 1)) < 1e-10
        assert relative(target(output), expected) < 1e-10
        total = maps.maps.sum((2, 3)) * maps.log_scale.exp() + maps.baseline_values
        assert relative(total, maps.values) < 1e-8
        combined = recombined(cam.explain(x), net.head, target)
        assert relative(combined.maps, maps.maps[:, :1]) < 1e-8
        assert SignedMaps.cat([maps]).targets[0] == target
    predicted = SVMTarget(versus="others")(output)
    rows = torch.arange(len(x))
    index = torch.tensor([labels.index(label) for label in output.labels()])
    mean = (margins.sum(1) - margins[rows, index]) / (classes - 1)
    assert relative(predicted, margins[rows, index] - mean) < 1e-10


def test_several_classes_are_saved_and_named(tmp_path):
    problem = Problem()
    labels = problem.net.head.classes_.tolist()
    maps = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(
        problem.x, SVMTarget(labels[0], versus=labels[1:], strength=0.5)
    )
    maps.save(tmp_path / "maps.safetensors")
    (target,) = SignedMaps.load(tmp_path / "maps.safetensors").targets
    assert target == maps.targets[0]
    assert hash(target) == hash(SVMTarget(labels[0], versus=tuple(labels[1:]), strength=0.5))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"category": "a", "versus": []}, ValueError, "versus names no class"),
        ({"category": "a", "versus": ["b", "a"]}, ValueError, "'a' cannot be compared with itself"),
        ({"category": "a", "versus": "b", "strength": 0.5}, ValueError, "strength is for several classes"),
        ({"category": "a", "versus": ["b"], "strength": -1}, ValueError, "strength must be a number from 0"),
        ({"category": "a", "versus": ["b"], "strength": float("nan")}, ValueError, "strength must be a number from 0"),
        ({"category": ["a"], "versus": "b"}, TypeError, "a class label must be one value"),
        ({"category": "a", "versus": [["b"]]}, TypeError, "a class label must be one value"),
    ],
)
def test_several_classes_that_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        SVMTarget(**options)


def test_questions_about_what_is_predicted_are_named():
    head = Head.of(LogisticRegression().fit([[0.0], [1.0]], ["ant", "bee"]))
    assert ProbabilityTarget().name_question(head, 1) == ProbabilityTarget("bee")
    assert ProbabilityTarget("ant").name_question(head, 1) == ProbabilityTarget("ant")
    assert ScoreTarget().name_question(None, 3) == ScoreTarget(3)
    assert ScoreTarget(2).name_question(None, 3) == ScoreTarget(2)
