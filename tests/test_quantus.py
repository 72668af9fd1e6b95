"""Quantus' metrics, with this package's methods as their explain_func."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.svm import SVR
from test_evaluation import Corner, problem

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, PCASVMNet, SVMTarget, evaluation


@pytest.fixture(scope="module")
def corner():
    return problem(Corner())


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


def test_metrics(corner):
    quantus = pytest.importorskip("quantus")
    net, x, labels = corner
    inputs, targets = x[:4].numpy(), labels[:4]
    explain = evaluation.quantus_explainer(ContributionCAM, net, ["features"])
    quiet = {"disable_warnings": True, "display_progressbar": False}
    metrics = {
        "faithfulness": quantus.FaithfulnessCorrelation(nr_runs=10, subset_size=20, perturb_baseline="black", **quiet),
        "pixels": quantus.PixelFlipping(features_in_step=24, perturb_baseline="black", **quiet),
        "sensitivity": quantus.MaxSensitivity(nr_samples=3, **quiet),
        "sparseness": quantus.Sparseness(**quiet),
        "completeness": quantus.Completeness(abs=False, **quiet),
        "randomisation": quantus.MPRT(**quiet),
    }
    for name, metric in metrics.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = metric(model=net, x_batch=inputs, y_batch=targets, explain_func=explain, device="cpu")
        numbers = list(found.values()) if isinstance(found, dict) else found
        assert np.isfinite(np.array(numbers, float)).all(), name
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
