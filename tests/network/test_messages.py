"""The words for layers that do not run as is asked."""

import pytest
import torch
from torch import nn

from pytorch_grad_cam_pcasvm.network.features import FeatureSource, output_of
from pytorch_grad_cam_pcasvm.network.messages import MESSAGES

X = torch.ones(2, 4)


class Backbone(nn.Module):
    """A network with a layer for each fault."""

    def __init__(self, fails=False):
        super().__init__()
        self.once, self.often, self.unused = nn.Linear(4, 4), nn.ReLU(), nn.ReLU()
        self.pair, self.recurrent = Pair(nn.Identity()), nn.GRU(4, 4)
        self.last, self.fails = nn.Linear(4, 3), fails

    def forward(self, x):
        x, _ = self.pair(self.often(self.often(self.once(x))))
        x, _ = self.recurrent(x)
        if self.fails:
            raise RuntimeError("of the network's own")
        return self.last(x)


class Pair(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x), x


LAYERS = {  # the layer that is taken, and the message
    "layer runs often": (
        "often",
        "the layer 'often' runs 2 times in a forward pass: name the call whose output is meant, 'often#1' or 'often#2'",
    ),
    "layer runs less often": (
        "often#3",
        "the layer 'often#3' does not run in a forward pass of Backbone; 'often' runs 2 times: choose 'often#1' or "
        "'often#2'",
    ),
    "layer does not run": (
        "unused",
        "the layer 'unused' does not run in a forward pass of Backbone; if that is compiled, its layers cannot be "
        "seen: pass the original network, and compile the PCASVMNet, torch.compile(net)",
    ),
}
TARGETS = {  # the target layer, the layer that is taken, and the message
    "target runs often": (
        "often",
        None,
        "the target layer 'often' runs 2 times: name one of its calls, 'often#1' or 'often#2', or choose the block "
        "around it",
    ),
    "target runs less often": (
        "once#2",
        None,
        "the target layer 'once#2' does not run before the network's output, where 'once' runs once: choose 'once'",
    ),
    "target does not run": (
        "last",
        FeatureSource("once"),
        "the target layer 'last' does not run before the features, 'once': choose a layer that runs before them "
        "(under fused attention, softmax and dropout never run)",
    ),
    "target gives no tensor": (
        "recurrent",
        None,
        "the target layer 'recurrent' returns a tuple, not a tensor: pass its tensor on through an nn.Identity(), and "
        "choose that",
    ),
    "target with layers gives no tensor": (
        "pair",
        "last",
        "the target layer 'pair' returns a tuple, not a tensor: choose a layer in it",
    ),
}


def test_every_message_has_a_case():
    assert {*LAYERS, *TARGETS} == {*MESSAGES}


@pytest.mark.parametrize("kind", LAYERS)
def test_the_words_of_a_layer_that_is_taken(kind):
    layer, message = LAYERS[kind]
    with pytest.raises(ValueError, match="layer") as caught:
        output_of(Backbone(), layer, X)
    assert (type(caught.value), str(caught.value)) == (ValueError, message)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("kind", TARGETS)
def test_the_words_of_a_target_layer(kind):
    name, layer, message = TARGETS[kind]
    expected = TypeError if "tensor" in kind else ValueError
    with pytest.raises(expected) as caught:
        output_of(Backbone(), layer, X, {name: lambda *_: None})
    assert (type(caught.value), str(caught.value)) == (expected, message)
    assert caught.value.__cause__ is None


def test_a_network_that_fails_is_the_cause_of_what_a_repeated_target_is_refused_for():
    net = Backbone(fails=True)
    with pytest.raises(ValueError, match="the target layer 'often' runs 2 times") as caught:
        output_of(net, None, X, {"often": lambda *_: None})
    assert str(caught.value.__cause__) == "of the network's own"
    with pytest.raises(RuntimeError, match="of the network's own"):
        output_of(net, None, X, {"once": lambda *_: None})
    assert output_of(net, "once", X).shape == (2, 4)  # what fails behind the layer does not matter
    with pytest.raises(ValueError, match="the layer 'often' runs 2 times in a forward pass"):
        output_of(net, "often", X)
