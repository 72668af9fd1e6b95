"""Networks in other forms: those whose layers hooks reach are explained, and all others refused alike."""

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, PCASVMNet, extract_features, mean_activations
from pytorch_grad_cam_pcasvm.studio.model.backbones import _make_own

X, Y = torch.rand(40, 3, 12, 12), np.arange(40) % 2
IMAGES = {0: torch.export.Dim("images", min=2)}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6)).eval()


def exported(module=None):
    return torch.export.export(network() if module is None else module, (X,), dynamic_shapes=(IMAGES,))


class Wrapper:
    """As skorch's NeuralNetClassifier, but for its name."""

    def __init__(self):
        self.module_ = network()


FOREIGN = {
    "traced": (lambda: torch.jit.trace(network(), X), "the network is a program, made by torch.jit, .*load_state_dict"),
    "scripted": (lambda: torch.jit.script(network()), "the network is a program, made by torch.jit, .*load_state_dict"),
    "frozen": (lambda: torch.jit.freeze(torch.jit.script(network())), "made by torch.jit, .*load_state_dict"),
    "exported": (lambda: exported().module(), "the network is a program, made by torch.export, .*load_state_dict"),
    "not yet a module": (exported, "the network is a program, made by torch.export, .*load_state_dict"),
    "exported part": (
        lambda: nn.Sequential(nn.Identity(), exported().module()),
        "'1' of the network is a program, made by torch.export, .*: build this part itself",
    ),
    "function": (lambda: lambda x: x.mean((2, 3)), "got function: put what it does in the forward of a module"),
    "method": (lambda: network().forward, "got method: pass the module whose method this is"),
    "name": (lambda: "resnet18", "got str: pass the module, such as .*, not its name"),
    "class": (lambda: nn.Sequential, r"got the class Sequential: make one, as in Sequential\(...\)"),
    "weights": (lambda: network().state_dict(), "load these weights with load_state_dict"),
    "wrapper": (Wrapper, "got Wrapper: pass its .module_"),
    "None": (lambda: None, "got NoneType: put"),
}
USES = {
    "features": lambda net: extract_features(net, [X], progress=False),
    "features of a layer": lambda net: extract_features(net, [X], "1", progress=False),
    "head": lambda net: PCASVMNet(net, SVC().fit(network()(X).detach().numpy(), Y)),
    "method": lambda net: ClosedFormGradCAM(net, ["0"]),
    "mean": lambda net: mean_activations(net, [X], "1", progress=False),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", FOREIGN)
def test_what_shows_no_layers_is_refused_wherever_networks_come_in(name):
    make, message = FOREIGN[name]
    given, errors = make(), []
    for use in USES.values():
        with pytest.raises(TypeError, match=message) as caught:
            use(given)
        errors.append(str(caught.value))
    assert len(set(errors)) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_backbone_that_becomes_a_program_later_is_refused():
    net = PCASVMNet(network(), SVC().fit(network()(X).detach().numpy(), Y)).eval()
    net.backbone = torch.jit.trace(net.backbone, X)
    with pytest.raises(TypeError, match=r"made by torch\.jit"):
        ClosedFormGradCAM(net, ["0"])


@pytest.mark.optional
def test_skorch_is_known_by_its_base_class_before_it_has_a_module():
    skorch = pytest.importorskip("skorch")
    net = skorch.NeuralNetClassifier(network())
    with pytest.raises(TypeError, match=r"got NeuralNetClassifier: pass its \.module_, which it has after fit or init"):
        extract_features(net, [X])
    net.initialize()
    features, _ = extract_features(net.module_, [X], progress=False)
    assert relative(torch.as_tensor(features), network()(X).detach()) < 1e-6


def test_a_backbone_of_the_command_line_is_refused(tmp_path, monkeypatch):
    (tmp_path / "programs.py").write_text(
        "import torch\ndef make(): return torch.fx.symbolic_trace(torch.nn.ReLU()), str\n"
        "def program(): return torch.jit.trace(torch.nn.ReLU(), torch.ones(1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert _make_own("programs:make", None)[1:] == (str, True)
    with pytest.raises(TypeError, match=r"made by torch\.jit"):
        _make_own("programs:program", None)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("form", ["fx", "traced part", "unflattened"])
def test_layers_that_hooks_reach_are_explained(form):
    net, jacobian = network(), "closed_form"
    if form == "fx":
        given = torch.fx.symbolic_trace(net)
    elif form == "traced part":
        given = nn.Sequential(torch.jit.trace(net[0], X), *network()[1:]).eval()
    else:
        given, jacobian = torch.export.unflatten(exported()), "autograd"
    features, _ = extract_features(given, [X], progress=False)
    head = SVC().fit(features, Y)
    assert relative(torch.as_tensor(features), net(X).detach()) < 1e-6
    for method in (ClosedFormGradCAM, ContributionCAM)[: 1 if jacobian == "autograd" else 2]:
        maps, expected = (
            method(PCASVMNet(each, head).eval(), ["0"], jacobian=way).explain(X[:3]).maps
            for each, way in ((given, jacobian), (net, "closed_form"))
        )
        assert expected.abs().max() > 0
        assert relative(maps, expected) < 1e-5
