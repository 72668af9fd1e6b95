"""Programs, files and readers that say how sure maps are: the numbers of ``explain``, if they are asked to."""

import numpy as np
import pytest
import torch
from cases import HEADS, count_classes
from test_program import made

from pytorch_grad_cam_pcasvm import UnstableComponentWarning, export, resample_heads
from pytorch_grad_cam_pcasvm.studio.export.outputs import compared, name_outputs

pytestmark = pytest.mark.filterwarnings("ignore::pytorch_grad_cam_pcasvm.UnstableComponentWarning")
CASE = ("pooled", "rbf", "ContributionCAM", "default")


def make_sure(*case):
    """Return a method whose head has refits, images, and targets."""
    cam, x, targets = made(*case)
    images = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        rows = cam.model(images).features.numpy()
    labels = rows.sum(1).argsort().argsort() * count_classes(case[1]) // 60
    cam.model.head.resamples = resample_heads(HEADS[case[1]].make(), rows, labels, n=3)
    return cam, x, targets


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        CASE,
        ("pooled", "two classes", "ClosedFormGradCAM", "default"),
        ("dense", "rbf", "ContributionCAM", "classes"),
        ("dense", "linear", "ContributionCAM", "default"),
    ],
    ids=", ".join,
)
def test_a_program_has_the_errors_of_explain(case):
    cam, x, targets = make_sure(*case)
    explained = export.program(cam, x, targets, errors=True).module()
    for count in (1, 3):
        images = torch.randn(count, 3, 8, 8)
        maps, found = cam.explain(images, targets), explained(images)
        assert list(found)[-2:] == ["error", "values_error"]
        for numbers, expected, of in (
            (found["error"], maps.error, maps.maps), (found["values_error"], maps.values_error, maps.values),
        ):  # fmt: skip
            assert torch.equal(numbers.isnan(), expected.isnan())
            assert not expected.isnan().all()
            assert (numbers - expected).nan_to_num(0.0).abs().max() <= 1e-5 * of.abs().max()


@pytest.mark.slow
def test_without_being_asked_to_a_program_has_one_head_and_the_method_its_errors():
    cam, x, targets = make_sure(*CASE)
    program = export.program(cam, x, targets)
    assert "error" not in program.module()(x)
    assert cam.explain(x, targets).error is not None
    cam.model.head.resamples = None
    counts = [
        sum(node.op == "call_function" for node in each.graph.nodes) for each in (program, export.program(cam, x))
    ]
    assert counts[0] == counts[1]


def test_errors_of_a_head_without_refits_are_refused_with_ways_out_that_work():
    cam, x, targets = make_sure(*CASE)
    resamples, cam.model.head.resamples = cam.model.head.resamples.heads, None
    with pytest.raises(ValueError, match=r"no resampled heads: .*net.head.resamples = .*leave out errors=True"):
        export.program(cam, x, targets, errors=True)
    assert "error" not in export.program(cam, x, targets).module()(x)
    cam.model.head.resamples = resamples
    assert "error" in export.program(cam, x, targets, errors=True).module()(x)


def test_errors_that_differ_are_found_and_unknown_ones_are_not():
    cam, x, targets = make_sure(*CASE)
    expected = name_outputs(cam.explain(x, targets))
    assert expected["values_error"].isnan().any()
    found = {name: tensor.clone() for name, tensor in expected.items()}
    assert compared(found, expected)["error"] == 0
    found["error"] += 0.01 * expected["maps"].abs().max()
    found["values_error"][0] = 0.0
    differences = compared(found, expected)
    assert differences["error"] == pytest.approx(0.01, rel=1e-4)  # as float32 adds it
    assert np.isnan(differences["values_error"])


@pytest.mark.optional
@pytest.mark.slow
def test_the_reader_knows_what_is_sure(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    cam, x, targets = make_sure(*CASE)
    with pytest.warns(UnstableComponentWarning):
        told = export.onnx(cam, x, tmp_path / "sure.onnx", targets, errors=True)
    assert {"error", "values_error"} <= told["differences"].keys()
    explainer = export.Explainer(tmp_path / "sure.onnx")
    images = torch.randn(5, 3, 8, 8)
    maps, found = cam.explain(images, targets), explainer(images.numpy())
    near = (maps.maps.abs() / (told["sure_from"] * maps.error) - 1).abs() < 1e-3
    assert not (torch.from_numpy(found["sure"]) ^ maps.sure())[~near].any()
    assert 0 < found["sure"].mean() < 1
    assert "±" in explainer.said(found, 0, 4)
