"""Quantus' metrics, with this package's methods as their explain_func."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.svm import SVR
from test_evaluation import Corner, problem
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, PCASVMNet, SVMTarget, evaluation


@pytest.mark.parametrize("method", [ContributionCAM, ClosedFormGradCAM])
def test_maps_are_those_of_the_method(corner, method):
    net, x, labels = corner
    explain = evaluation.quantus_explainer(method, net, [net.backbone.features])
    found = explain(model=net, inputs=x[:6].numpy(), targets=labels[:6])
    assert found.shape == (6, 1, 12, 12)
    assert found.dtype == np.float32
    with method(net, ["features"]) as cam:
        for n in range(6):
            expected = cam.explain(x[n : n + 1], [SVMTarget(int(labels[n]))]).maps[0, 0]
            np.testing.assert_allclose(found[n, 0], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.optional
def test_metrics_of_a_linear_network_are_what_they_must_be():
    quantus = pytest.importorskip("quantus")
    torch.manual_seed(0)
    net, x, labels = problem(nn.Sequential(nn.Conv2d(1, 3, 1, bias=False), nn.Flatten()), kernel="linear")
    inputs, targets = x[:4].numpy(), labels[:4]
    explain = evaluation.quantus_explainer(ContributionCAM, net, ["0"])
    quiet = {"disable_warnings": True, "display_progressbar": False}

    def measured(metric):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return metric(model=net, x_batch=inputs, y_batch=targets, explain_func=explain, device="cpu", softmax=False)

    maps = explain(net, inputs, targets)[:, 0].reshape(4, -1)
    values = net(x[:4]).margins.detach().numpy()[np.arange(4), targets]
    # Each pixel of a map is what the margin loses with that pixel.
    correlations = quantus.FaithfulnessCorrelation(
        nr_runs=20, subset_size=20, perturb_baseline=0.0, return_aggregate=False, **quiet
    )
    np.testing.assert_allclose(measured(correlations), 1, atol=1e-9)
    curves = measured(quantus.PixelFlipping(features_in_step=24, perturb_baseline=0.0, **quiet))
    expected = values[:, None] + np.cumsum(np.sort(-maps, 1), 1)[:, 23::24]
    np.testing.assert_allclose(curves, expected, atol=1e-4)
    gaps = []
    measured(
        quantus.Completeness(  # it asks for equality to the last bit, which rounding rarely grants
            abs=False, normalise=False, perturb_baseline=0.0, output_func=lambda gap: gaps.append(gap) or gap, **quiet
        )
    )
    np.testing.assert_allclose(gaps[0], maps.sum(1), atol=1e-5)
    ordered = np.sort(np.abs(maps), 1)
    gini = ordered @ (2 * np.arange(1, 145) - 145) / (144 * ordered.sum(1))
    np.testing.assert_allclose(measured(quantus.Sparseness(**quiet)), gini, atol=1e-4)


@pytest.mark.optional
def test_metrics_of_a_nonlinear_network(corner):
    quantus = pytest.importorskip("quantus")
    net, x, labels = corner
    given = {"model": net, "x_batch": x[:4].numpy(), "y_batch": labels[:4], "device": "cpu"}
    given["explain_func"] = evaluation.quantus_explainer(ContributionCAM, net, ["features"])
    quiet = {"disable_warnings": True, "display_progressbar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unstable, more = (
            quantus.MaxSensitivity(nr_samples=3, lower_bound=bound, **quiet)(**given) for bound in (0.02, 0.5)
        )
        kept = quantus.MPRT(**quiet)(**given)
    assert 0 < np.mean(unstable) < np.mean(more)
    np.testing.assert_allclose(kept.pop("original"), 1)
    assert np.max(list(kept.values())) < 0.99  # the only layer was random, the head as it is
    assert net.training is False


def test_the_model_that_is_given_is_explained(corner):
    net, x, labels = corner
    torch.manual_seed(9)
    other = PCASVMNet(Corner(), net.head).eval()
    torch.nn.init.normal_(other.backbone.features[0].weight)
    explain = evaluation.quantus_explainer(ContributionCAM, net, ["features"])
    one, two = (explain(model, x[:3].numpy(), labels[:3]) for model in (net, other))
    assert np.abs(one - two).max() > 0.01


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda net: (torch.nn.ReLU, net, ["features"]), TypeError, "class of the package"),
        (lambda net: (ContributionCAM, net.backbone, ["features"]), TypeError, "PCASVMNet"),
        (lambda net: (ContributionCAM, net, "features"), ValueError, "list of one layer"),
        (lambda net: (ContributionCAM, net, [net.backbone]), ValueError, "backbone itself"),
        (
            lambda net: (ContributionCAM, PCASVMNet(net.backbone, SVR().fit(np.eye(6), range(6))), ["features"]),
            ValueError,
            "the head has none",
        ),
    ],
)
def test_bad_input(corner, change, error, match):
    with pytest.raises(error, match=match):
        evaluation.quantus_explainer(*change(corner[0]))


@pytest.mark.parametrize("targets", [[0, 1], [0, 1, 2], [0, 1, -1], ["0", "1", "1"], [0.0, 1.0, 1.0]])
def test_targets_are_positions(corner, targets):
    net, x, _ = corner
    explain = evaluation.quantus_explainer(ContributionCAM, net, ["features"])
    with pytest.raises(ValueError, match=r"targets must be 3 positions in classes_, one for each input, from 0 to 1"):
        explain(net, x[:3].numpy(), targets)


def test_options_are_checked_at_once(corner):
    with pytest.raises(TypeError, match="foo"):
        evaluation.quantus_explainer(ContributionCAM, corner[0], ["features"], foo=1)
