"""PCASVMNet and its output."""

import copy
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from problems import Problem
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, HeadOutput, PCASVMNet, extract_features


@pytest.fixture(scope="module")
def problem():
    return Problem(classes=3)


def test_scores_and_labels_are_those_of_scikit_learn(problem):
    output = problem.net(problem.x)
    features = problem.backbone.classifier[:5](problem.backbone.flatten(problem.backbone.features(problem.x)))
    features = features.detach().numpy()
    assert relative(output, problem.head.decision_function(features)) < 1e-10
    assert relative(output.features, features) == 0
    assert relative(output.components, problem.head[:2].transform(features)) < 1e-10
    labels = problem.net.predict(problem.x)
    assert labels.tolist() == problem.head.predict(features).tolist()
    assert isinstance(labels, np.ndarray)
    assert labels.dtype == problem.labels.dtype


def test_rows_keep_their_own_extras(problem):
    output = problem.net(problem.x)
    assert isinstance(output, HeadOutput)
    assert output.shape == (5, 3)
    rows = list(output)
    assert len(rows) == 5
    for index, row in enumerate(rows):
        for one in (row, output[index], output[index - 5], output[np.int64(index)]):
            assert isinstance(one, HeadOutput)
            assert one.shape == (3,)
            for extra in ("features", "components", "decision", "margins"):
                assert relative(getattr(one, extra), getattr(output, extra)[index]) == 0
    first, *_ = output
    assert relative(first.components, output.components[0]) == 0
    with pytest.raises(IndexError):
        output[5]


@pytest.mark.parametrize(
    "operation",
    [
        lambda out: out + 1,
        lambda out: 2 * out,
        lambda out: out[:2],
        lambda out: out[:, 1],
        lambda out: out[0][1],
        lambda out: out[torch.tensor([0, 2])],
        lambda out: out.sum(),
        lambda out: out.detach(),
        lambda out: out.cpu().double(),
        lambda out: torch.softmax(out, -1),
        lambda out: torch.cat([out, out]),
        lambda out: out.max(-1).values,
        lambda out: out.clone(),
    ],
)
def test_other_operations_give_plain_tensors(problem, operation):
    assert type(operation(problem.net(problem.x))) is torch.Tensor


def test_a_pca_only_head_gives_components(problem):
    net = PCASVMNet(problem.backbone, problem.head[:2], layer="classifier.4")
    output = net(problem.x)
    assert output.shape == (5, 4)
    assert relative(output, output.components) == 0
    assert output.margins is None
    assert output.decision is None
    assert relative(net.predict(problem.x), output) == 0 if net.predict(problem.x).ndim == 2 else True


@pytest.mark.parametrize("layer", ["name", "module", "first", "whole"])
def test_the_layer_is_a_name_or_a_module(problem, layer):
    backbone = problem.backbone
    given = {"name": "classifier.4", "module": backbone.classifier[4], "first": "features.0", "whole": None}[layer]
    width = {"first": 6 * 144, "whole": 3}.get(layer, 9)
    rng = np.random.default_rng(0)
    net = PCASVMNet(backbone, PCA(2).fit(rng.normal(size=(20, width))), layer=given)
    features = {"first": backbone.features[0](problem.x).flatten(1), "whole": backbone(problem.x)}.get(layer)
    assert net(problem.x).shape == (5, 2)
    if features is not None:
        assert relative(net(problem.x).features, features) == 0


def test_what_follows_the_layer_is_not_run(problem):
    backbone = copy.deepcopy(problem.backbone)
    backbone.classifier[5].forward = lambda x: pytest.fail("what follows the layer was run")
    net = PCASVMNet(backbone, problem.head, layer="classifier.4#1").eval()  # without a look at whether it runs again
    assert relative(net(problem.x), problem.net(problem.x)) == 0


def test_modules_are_used_not_copied(problem):
    net = PCASVMNet(problem.backbone, problem.head, layer="classifier.4")
    assert net.backbone is problem.backbone
    names = [name for name, _ in net.named_parameters()]
    assert names == [f"backbone.{name}" for name, _ in problem.backbone.named_parameters()]
    assert not any(problem.backbone.classifier[4]._forward_hooks)


def test_the_network_is_twice_differentiable(problem):
    x = problem.x[:2].clone().requires_grad_()
    scores = problem.net(x)
    (first,) = torch.autograd.grad(scores[:, 0].sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    direction = torch.randn_like(x)

    def slope(t):
        leaf = (x + t * direction).detach().requires_grad_()
        (grad,) = torch.autograd.grad(problem.net(leaf)[:, 0].sum(), leaf)
        return grad.square().sum()

    difference = (slope(1e-6) - slope(-1e-6)) / 2e-6
    assert relative((second * direction).sum(), difference) < 1e-5


def test_torch_func_differentiates_the_network(problem):
    x = problem.x[0]

    def scores(image):
        return problem.net(image[None]).margins[0]

    expected = torch.autograd.functional.jacobian(scores, x)
    assert relative(torch.func.jacrev(scores)(x), expected) < 1e-10


def test_state_dict_and_deepcopy(problem):
    twin = copy.deepcopy(problem.net)
    assert relative(twin(problem.x), problem.net(problem.x)) == 0
    other = PCASVMNet(copy.deepcopy(problem.backbone), copy.deepcopy(problem.head), layer="classifier.4").eval()
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.zero_()
    other.load_state_dict(problem.net.state_dict())
    assert relative(other(problem.x), problem.net(problem.x)) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"layer": "classifier.9"},
            ValueError,
            r"Backbone has no layer 'classifier.9'; .*ts last layers are: .*classifier.5",
        ),
        ({"layer": nn.ReLU()}, ValueError, "this ReLU object is not in this Backbone"),
        ({"backbone": lambda x: x}, TypeError, "the network must be a torch.nn.Module, got function"),
        ({"head": None}, ValueError, "the head is empty"),
    ],
)
def test_bad_arguments_are_refused(problem, arguments, error, message):
    given = {"backbone": problem.backbone, "head": problem.head, "layer": "classifier.4", **arguments}
    with pytest.raises(error, match=message):
        PCASVMNet(**given)


def test_features_of_another_size_are_refused(problem):
    way = r"name the layer that the features came from, and their pool: PCASVMNet\(.*, layer=\.\.\., pool=\.\.\.\)"
    with pytest.raises(ValueError, match=f"fitted on 9 features, but the backbone gives 12: {way}"):
        PCASVMNet(problem.backbone, problem.head, layer="classifier.1")(problem.x)


def test_a_layer_that_does_not_run_is_named(problem):
    backbone = copy.deepcopy(problem.backbone)
    backbone.unused = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'unused' does not run in a forward pass"):
        PCASVMNet(backbone, problem.head, layer="unused")(problem.x)


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["rbf", "sigmoid"])  # distances, products
def test_a_compiled_net_gives_equal_scores(kernel, compiler):
    problem = Problem(kernel=kernel)
    output = compiler(problem.net)(problem.x)
    assert relative(output, problem.net(problem.x)) < 1e-12
    assert relative(output.components, problem.net(problem.x).components) < 1e-12
    output.sum().backward()
    assert problem.backbone.features[0].weight.grad is not None


@pytest.mark.slow
def test_a_compiled_net_is_explained(compiler):
    problem = Problem()
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x).maps
    compiled = compiler(problem.net)
    compiled(problem.x)
    assert relative(ClosedFormGradCAM(compiled, [problem.target_layer]).explain(problem.x).maps, expected) < 1e-12


@pytest.mark.slow
def test_a_compiled_backbone_is_explained(compiler):
    problem = Problem()
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x).maps
    backbone = compiler(problem.backbone)
    backbone(problem.x)
    net = PCASVMNet(backbone, problem.head, layer="classifier.4")
    assert relative(net(problem.x), problem.net(problem.x)) < 1e-12
    assert relative(ClosedFormGradCAM(net, [backbone.features[-1]]).explain(problem.x).maps, expected) < 1e-12
    features, _ = extract_features(backbone, [problem.x], "classifier.4", progress=False)
    assert relative(features, extract_features(problem.backbone, [problem.x], "classifier.4", progress=False)[0]) == 0


@pytest.mark.parametrize("part", ["features", "classifier"])
def test_a_backbone_with_a_compiled_part_is_explained(part, compiler):
    problem = Problem()
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x).maps
    target, layer = problem.target_layer, problem.backbone.classifier[4]
    setattr(problem.backbone, part, compiler(getattr(problem.backbone, part)))
    problem.backbone(problem.x)
    net = PCASVMNet(problem.backbone, problem.head, layer=layer).train()
    for jacobian in ("closed_form", "autograd"):
        maps = ClosedFormGradCAM(net, [target], jacobian=jacobian).explain(problem.x).maps
        assert relative(maps, expected) < 1e-12
    assert all(module.training for module in net.modules())


def test_a_backbone_compiled_in_place_is_explained_or_refused(compiler):
    problem = Problem()
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x).maps
    problem.backbone.compile(backend="aot_eager")
    problem.backbone(problem.x)  # from now on it does not notice hooks
    assert relative(ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x).maps, expected) < 1e-12
    with pytest.raises(ValueError, match="compile the PCASVMNet"):
        problem.net(problem.x)


@pytest.mark.parametrize("stage", [0, -1])
def test_hooks_on_the_stages_of_a_head_run(stage):
    problem = Problem()
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x).maps
    seen = []
    problem.net.head.stages[stage].register_forward_hook(lambda module, args, output: seen.append(output))
    output = problem.net(problem.x)
    assert torch.equal(seen[0], output.head_trace.values[1:][stage])
    assert relative(ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x).maps, expected) < 1e-12


def test_a_net_in_training_mode_says_so_once(problem):
    backbone = copy.deepcopy(problem.backbone).train()
    net = PCASVMNet(backbone, problem.head, layer="classifier.4")
    with pytest.warns(
        UserWarning, match=r"training mode, in which its Dropout gives different features.*net.eval\(\)"
    ) as warned:
        net(problem.x)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(problem.x)
        net.predict(problem.x)
        PCASVMNet(problem.backbone.eval(), problem.head, layer="classifier.4")(problem.x)
        PCASVMNet(nn.Flatten(), PCA(2).fit(np.random.default_rng(0).normal(size=(9, 432)))).train()(problem.x)


def test_outputs_are_copied_with_their_extras(problem):
    with torch.no_grad():
        output = problem.net(problem.x)
    twin = copy.deepcopy(output)
    assert relative(twin, output) == 0
    assert relative(twin.margins, output.margins) == 0
    twin.components.zero_()
    assert output.components.any()
    joined = HeadOutput.cat([output.rows([1]), output.rows([0, 4])])
    assert relative(joined, output[torch.tensor([1, 0, 4])]) == 0
    assert joined.labels().tolist() == output.labels()[[1, 0, 4]].tolist()
    assert output[3].labels() == output.labels()[3]


@pytest.mark.parametrize("wrap", [lambda b: nn.DataParallel(b), lambda b: nn.Sequential(nn.DataParallel(b))])
def test_copies_on_several_devices_are_refused(problem, wrap):
    with pytest.raises(ValueError, match=r"DataParallel.*\.module"):
        PCASVMNet(wrap(problem.backbone), problem.head)
    with pytest.raises(ValueError, match=r"DataParallel.*\.module"):
        ClosedFormGradCAM(wrap(problem.backbone), [problem.backbone.features])


@pytest.mark.parametrize("layer", ["classifier.1", "features.3"])
def test_a_wrong_layer_in_front_of_a_normalizer_is_named(problem, layer):
    features, labels = extract_features(
        problem.backbone, [(problem.x, torch.arange(5) % 2)], "classifier.4", progress=False
    )
    head = make_pipeline(Normalizer(), PCA(2), SVC()).fit(features, labels)
    with pytest.raises(ValueError, match=r"fitted on 9 features, but the backbone gives \d+: name the layer"):
        PCASVMNet(problem.backbone, head, layer=layer)(problem.x)


def test_images_that_are_no_tensor_are_told_the_way_to_one(problem):
    with pytest.raises(TypeError, match=r"images must be a torch.Tensor, got ndarray: use torch.from_numpy"):
        problem.net(problem.x.numpy())


def test_an_estimator_that_is_fitted_again_is_told_of():
    problem = Problem()
    features = problem.net(problem.x).features.detach().numpy()
    search = GridSearchCV(make_pipeline(StandardScaler(), PCA(2), SVC()), {"svc__C": [1.0]}, cv=2)
    calibrated = make_pipeline(StandardScaler(), CalibratedClassifierCV(LinearSVC(), cv=2))
    labels = np.arange(len(features)) % 2
    again = [
        ("StandardScaler", lambda head: head[0].fit(features)),
        ("SVC", lambda head: head[-1].fit(head[:-1].transform(features), labels)),
        ("SVC", lambda head: head.steps.__setitem__(-1, ("svr", SVR().fit(head[:-1].transform(features), labels)))),
    ]
    for name, change in again:
        head = make_pipeline(StandardScaler(), PCA(2), SVC()).fit(features, labels)
        net = PCASVMNet(problem.backbone, head, layer="classifier.4").eval()
        copied = copy.deepcopy(net)
        before = net(problem.x)
        change(head)
        with pytest.warns(UserWarning, match=f"the {name} was fitted again, or replaced.*make another one"):
            assert torch.equal(net(problem.x), before)
        net(problem.x)  # once
        copied(problem.x)
        ClosedFormGradCAM(net, [problem.target_layer]).explain(problem.x)
    for head in (search, calibrated):
        net = PCASVMNet(problem.backbone, head.fit(features, labels), layer="classifier.4").eval()
        head.predict(features)
        net(problem.x)
        head.fit(features, labels)
        with pytest.warns(UserWarning, match="was fitted again"):
            net.predict(problem.x)
    assert pickle.loads(pickle.dumps(net)).predict(problem.x).shape == (5,)
    assert b"LinearSVC" not in pickle.dumps(net.head._fit)
    del vars(net.head)["_fit"]  # as in one that 0.2 pickled
    assert net.predict(problem.x).shape == (5,)
