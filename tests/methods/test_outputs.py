"""What ordinary networks return: tensors of any shape, dicts, tuples, lists; and what a target gets of it."""

import dataclasses
from collections import OrderedDict

import pytest
import torch
import torchvision
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import (
    BinaryClassifierOutputTarget,
    ClassifierOutputTarget,
    SemanticSegmentationTarget,
)
from reference import relative
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM


class Net(nn.Module):
    """A network whose output has a form of its own."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.features, self.pixels = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), nn.Conv2d(6, 4, 1)
        self.dense, self.form = nn.Linear(6, 5), form
        self.double().eval()

    def forward(self, x):
        x = self.features(x)
        return self.form(self.dense(x.mean((2, 3))), self.pixels(x.relu()))


@dataclasses.dataclass
class Answer(OrderedDict):
    """As the outputs of Hugging Face's models are: a dict with attributes."""

    logits: torch.Tensor = None

    def __post_init__(self):
        self["logits"] = self.logits


X = torch.randn(3, 3, 8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def same_maps(form, targets, x=X, reference=None, theirs=None):
    """Compare with the host on the same network, or on one that gives a plain tensor."""
    net = Net(form)
    with ClosedFormGradCAM(net, [net.features]) as cam:
        actual = cam(x, targets)
    net = Net(reference or form)
    with GradCAM(net, [net.features]) as cam:
        expected = cam(x, theirs or targets)
    assert expected.any()
    assert relative(actual, expected) < 1e-4


MASK = (torch.arange(30).reshape(6, 5) % 3 > 0).numpy()


def test_semantic_segmentation():
    same_maps(lambda logits, pixels: pixels, [SemanticSegmentationTarget(c, MASK) for c in (2, 0, 2)])


def test_one_number_an_image():
    targets = [BinaryClassifierOutputTarget(c) for c in (1, 0, 1)]
    same_maps(lambda logits, pixels: logits[:, 2], targets)
    net = Net(lambda logits, pixels: logits[:, 2])
    maps = ClosedFormGradCAM(net, [net.features]).explain(X)
    with torch.no_grad():
        assert relative(maps.values[:, 0], net(X)) < 1e-12


@pytest.mark.parametrize("form", [dict, OrderedDict, "answer"])
def test_a_dict_is_cut_into_images(form):
    if form == "answer":
        same_maps(
            lambda logits, pixels: Answer(logits),
            [lambda row: row["logits"][3]] * 3,
            reference=lambda logits, pixels: logits,
            theirs=[ClassifierOutputTarget(3)] * 3,
        )
        return
    same_maps(
        lambda logits, pixels: form(out=pixels, logits=logits, classes=5),
        [lambda row: row["logits"][3] * row["classes"] + row["out"][1].sum()] * 3,
        reference=lambda logits, pixels: torch.stack([logits[:, 3] * 5 + pixels[:, 1].sum((1, 2))], 1),
        theirs=[ClassifierOutputTarget(0)] * 3,
    )


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_tuple_is_read_as_in_the_host(kind):
    same_maps(lambda logits, pixels: kind([logits, pixels]), [ClassifierOutputTarget(3)], X[:1])
    same_maps(
        lambda logits, pixels: kind([logits]),
        [ClassifierOutputTarget(3)] * 3,
        reference=lambda logits, pixels: logits,
    )
    net = Net(lambda logits, pixels: kind([logits, pixels]))
    with pytest.raises(ValueError, match=rf"returns a {kind.__name__} of 2 tensors for 3 images.*one image at a time"):
        ClosedFormGradCAM(net, [net.features])(X, [ClassifierOutputTarget(3)] * 3)


def test_what_targets_none_means_is_asked_where_it_is_not_clear():
    net = Net(lambda logits, pixels: pixels)
    with pytest.raises(ValueError, match=r"targets=None .* the network returns a tensor of shape \(3, 4, 6, 5\)"):
        ClosedFormGradCAM(net, [net.features])(X)
    with pytest.raises(ValueError, match=r"jacobians needs a network that returns scores"):
        ClosedFormGradCAM(net, [net.features]).jacobians(X)


def test_contributions_to_several_tensors_add_up():
    net = Net(lambda logits, pixels: {"logits": logits, "pixels": pixels})
    cam = ContributionCAM(net, [net.features], baseline="zero")
    maps = cam.explain(X, [lambda row: row["logits"][0] - 2 * row["pixels"][1].sum()])
    assert relative(maps.maps.sum((2, 3)) + maps.baseline_values, maps.values) < 1e-12
    with torch.no_grad():
        at_zero = net.form(net.dense(torch.zeros(1, 6).double()), net.pixels(torch.zeros(1, 6, 6, 5).double()))
        expected = at_zero["logits"][0, 0] - 2 * at_zero["pixels"][0, 1].sum()
    assert relative(maps.baseline_values, expected.expand(3, 1)) < 1e-12


def test_a_target_that_reads_only_one_of_several_tensors():
    net = Net(lambda logits, pixels: {"logits": logits, "pixels": pixels})
    maps = ClosedFormGradCAM(net, [net.features]).explain(X, [lambda r: r["logits"][0], lambda r: r["pixels"].sum()])
    plain = Net(lambda logits, pixels: logits)
    expected = ClosedFormGradCAM(plain, [plain.features]).explain(X, [lambda row: row[0]])
    assert relative(maps.maps[:, :1], expected.maps) < 1e-12
    assert maps.weights[:, 1].any()


@pytest.mark.parametrize("jacobian", ["closed_form", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_detector_is_refused_in_one_line(jacobian):
    torch.manual_seed(0)
    net = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).eval()
    cam = ClosedFormGradCAM(net, [net.backbone.features[1]], jacobian=jacobian)
    with pytest.raises(TypeError, match=r"^SSD returns a list of dicts, like a detector's boxes: .*") as raised:
        cam(torch.rand(1, 3, 64, 64), [lambda row: row["scores"].sum()])
    assert "\n" not in str(raised.value)
    assert "auto" not in str(raised.value)


def test_a_dict_with_numbers_and_tuples_inside():
    def form(logits, pixels):
        return {"logits": logits, "hidden_states": (pixels, 2 * pixels), "scale": logits.mean(), "count": 3}

    same_maps(
        form,
        [lambda row: row["logits"][3] + row["hidden_states"][1][0].sum()] * 3,
        reference=lambda logits, pixels: torch.stack([logits[:, 3] + 2 * pixels[:, 0].sum((1, 2))], 1),
        theirs=[ClassifierOutputTarget(0)] * 3,
    )
