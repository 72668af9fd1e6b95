"""Contributions that do not add up: the true cause is named, and what rounding explains is no gap."""

from dataclasses import replace

import pytest
import torch
from problems import Step
from reference import gap, relative
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import ContributionCAM, NoClosedFormError, PCASVMNet, fit_model
from pytorch_grad_cam_pcasvm.methods.gaps import refuse_gap

LABELS = torch.arange(24) % 2
IMAGES = torch.rand(24, 3, 12, 12, generator=torch.Generator().manual_seed(0)) + LABELS.reshape(-1, 1, 1, 1) / 4


def network(step):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), step, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


def fitted(net, head=None):
    head = make_pipeline(StandardScaler(), PCA(2), SVC()) if head is None else head
    return fit_model(net, [(IMAGES.to(net[0].weight), LABELS)], head, layers=["0"], progress=False)


class Faint(nn.Module):
    """A branch of 1e-7 beside a skip, as LayerScale has it, whose change a norm makes large again."""

    def forward(self, x):
        return ((1 + 5e-8 * x.tanh()) - 1) * 2e7


@pytest.mark.parametrize("count", [1, 2])
def test_what_single_precision_loses_is_told_as_that(count):
    model, x = fitted(network(Faint())), IMAGES[:count]
    with pytest.raises(NoClosedFormError, match="they are lost in the rounding of torch") as caught:
        model.cam(baseline="zero").explain(x)
    assert "mixes" not in str(caught.value)
    model.net.double()  # the way out
    maps = model.cam(baseline="zero").explain(x.double())
    assert gap(maps) < 1e-6


def test_a_bank_may_be_asked_about_its_own_images():
    """Each is 0 from itself: what is left of that distance is rounding, and no sign of a network that mixes images."""
    model = fitted(network(nn.ReLU()), NearestNeighbors(n_neighbors=1))
    for x in (IMAGES[:1], IMAGES[:3]):
        maps = model.cam(baseline=IMAGES[0]).explain(x)
        assert maps.values.abs().max() < 1e-4
        assert maps.maps[0].abs().max() < 1e-4
    others = model.cam(baseline=IMAGES[0]).explain(IMAGES[1:3] + 0.2)
    assert others.values.abs().min() > 1e-3
    assert gap(others) < 1e-5


class Seen(ContributionCAM):
    """A method that keeps its run and its secants."""

    def compute(self, run, layer, targets):
        self.seen = run, layer, run.secants(targets, layer)
        return super().compute(run, layer, targets)


@pytest.mark.parametrize("count", [1, 3])
def test_a_head_that_jumps_is_named(count):
    cam = fitted(network(nn.ReLU())).cam(Seen, baseline="zero")
    cam.explain(IMAGES[:count])
    run, layer, seeds = cam.seen
    off = torch.ones_like(seeds.values)
    with pytest.raises(NoClosedFormError, match="rounding decides the head's value at an image or at its start"):
        refuse_gap(run, layer, replace(seeds, baseline_values=seeds.baseline_values + off), off)
    refuse_gap(run, layer, seeds, 1e-9 * off)  # which is less than the rounding of the features


def test_a_network_that_mixes_images_is_told_as_that_by_one_image_alone():
    net = PCASVMNet(network(Step(lambda x: (x - x.mean(0) / 2).tanh())), fitted(network(nn.Tanh())).net.head).eval()
    with pytest.raises(NoClosedFormError, match="the network mixes the images of a batch: explain one image at a time"):
        ContributionCAM(net, ["0"], baseline="zero").explain(IMAGES[:3])
    maps = ContributionCAM(net, ["0"], baseline="zero").explain(IMAGES[:1])
    assert relative(maps.maps.sum((2, 3)) + maps.baseline_values, maps.values) < 1e-5


def test_what_is_none_of_these_is_told_as_that():
    model = fitted(network(nn.Tanh()).double())
    cam = model.cam(Seen, baseline="zero")
    cam.explain(IMAGES[:2].double())
    run, layer, seeds = cam.seen
    with pytest.raises(NoClosedFormError, match="do not add up: the network computes where it cannot be seen"):
        refuse_gap(run, layer, seeds, torch.ones_like(seeds.values))
