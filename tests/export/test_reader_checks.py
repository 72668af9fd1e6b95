"""The reader of a file says why it cannot be opened, and whether it gives the numbers that it was written with."""

import json
import warnings

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    NoProgramError,
    PCASVMNet,
    SVMTarget,
    export,
    extract_features,
)
from pytorch_grad_cam_pcasvm.studio.export import files
from pytorch_grad_cam_pcasvm.studio.export.explainer import KEY, sample_image
from pytorch_grad_cam_pcasvm.studio.export.outputs import compared, name_outputs

pytestmark = pytest.mark.optional
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")


def made(kind):
    """Return a method, images that the head was fitted on, and targets."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU()).eval()
    x = torch.rand(12, 3, 16, 24)
    if kind == "bank":
        rows, _ = extract_features(net, [x], "3", pool="dense", progress=False)
        head, pool, targets = NearestNeighbors(n_neighbors=1).fit(rows), "dense", [SVMTarget(sign="-", at="max")]
    else:
        rows, _ = extract_features(net, [x], "3", pool="mean", progress=False)
        head, pool, targets = make_pipeline(PCA(4), SVC()).fit(rows, np.arange(12) % 2), "mean", None
    return ContributionCAM(PCASVMNet(net, head, "3", pool=pool).eval(), ["1"]), x, targets


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    cam, x, targets = made("svc")
    path = tmp_path_factory.mktemp("written") / "explainer.onnx"
    return path, export.onnx(cam, x[:4], path, targets), cam


@pytest.mark.parametrize("method", [ContributionCAM, ClosedFormGradCAM])
@pytest.mark.parametrize("images", [slice(0, 4), slice(0, 1)])
def test_photos_that_are_in_the_bank_are_no_hindrance(method, images, tmp_path):
    cam, x, targets = made("bank")
    cam = method(cam.model, ["1"])
    assert cam.explain(x[images], targets).values.abs().max() < 1e-6  # all distances are 0, but for rounding
    told = export.onnx(cam, x[images], tmp_path / "bank.onnx", targets)
    assert max(told["differences"].values()) < 1e-4
    others = torch.rand(5, 3, 16, 24)
    found = export.Explainer(tmp_path / "bank.onnx")(others.numpy())
    assert max(compared(found, name_outputs(cam.explain(others, targets))).values()) < 1e-4


def test_other_numbers_are_noticed_where_photos_are_in_the_bank(tmp_path, monkeypatch):
    cam, x, targets = made("bank")
    cam = ClosedFormGradCAM(cam.model, ["1"])
    table = files.decompositions()
    monkeypatch.setattr(files, "decompositions", lambda: table | {torch.ops.aten.relu.default: lambda x: x.abs()})
    with pytest.raises(NoProgramError, match="differ from explain"):
        export.onnx(cam, x[:4], tmp_path / "bank.onnx", targets)


def test_an_opset_that_torch_does_not_write_is_refused_in_a_line(tmp_path, capfd):
    cam, x, targets = made("svc")
    for opset in (17, 1, 999, "18"):
        with pytest.raises(
            ValueError, match=r"^opset must be an integer from 18, the oldest that torch writes, to .*$"
        ):
            export.onnx(cam, x, tmp_path / "explainer.onnx", targets, opset=opset)
    assert capfd.readouterr() == ("", "")


def test_a_file_has_a_sample_with_the_numbers_of_explain(written):
    path, told, cam = written
    reader = export.Explainer(path)
    assert reader.about["measured"].keys() == {"scores", "components", "values", "maps"}
    assert max(reader.about["measured"].values()) < 1e-5
    assert {name: kept for name, kept in reader.about.items() if name != "measured"} == told
    x = sample_image(told["sample"], [3, 16, 24])
    assert (x.shape, x.dtype) == ((1, 3, 16, 24), np.float32)
    _, images, _ = made("svc")
    rows, _ = extract_features(cam.model.backbone, [images], "3", pool="mean", progress=False)
    row, _ = extract_features(cam.model.backbone, [torch.from_numpy(x)], "3", pool="mean", progress=False)
    expected = make_pipeline(PCA(4), SVC()).fit(rows, np.arange(12) % 2).decision_function(row)
    np.testing.assert_allclose(
        told["sample"]["outputs"]["scores"]["numbers"], np.concatenate([-expected, expected]), rtol=1e-5
    )
    assert len(json.dumps(told["sample"])) < 20_000


def test_a_sample_is_as_bright_and_as_coarse_as_the_first_image():
    photo = np.arange(3 * 17 * 21, dtype=np.float64).reshape(3, 17, 21)
    rows, columns = (np.arange(side) * 8 // side for side in (17, 21))
    blocks = [
        [[photo[c][np.ix_(rows == i, columns == j)].mean() for j in range(8)] for i in range(8)] for c in range(3)
    ]
    still = sample_image({"blocks": blocks, "noise": [0, 0, 0]}, [3, 17, 21])[0]
    assert still[1, 16, 20] == np.float32(blocks[1][7][7])
    np.testing.assert_allclose(still.mean(), photo.mean(), rtol=0.01)
    noisy = sample_image({"blocks": blocks, "noise": [0, 1, 2]}, [3, 17, 21])[0] - still
    np.testing.assert_allclose(noisy.std((1, 2)), [0, 1 / 3**0.5, 2 / 3**0.5], rtol=0.1)
    assert np.abs(noisy[1]).max() <= 1.001


def _changed(path, to, change):
    model = onnx.load(path)
    change(model)
    onnx.save(model, to)
    return to


def _weights(model, factor):
    for tensor in model.graph.initializer:
        numbers = onnx.numpy_helper.to_array(tensor)
        if numbers.ndim == 4:
            tensor.CopyFrom(onnx.numpy_helper.from_array((numbers * factor).astype(numbers.dtype), tensor.name))


def test_a_file_that_was_changed_is_told_with_both_errors(written, tmp_path):
    path, told, _ = written
    near = _changed(path, tmp_path / "near.onnx", lambda model: _weights(model, 1 + 1e-5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 1e-6 < max(export.Explainer(near).about["measured"].values()) < 1e-3
    far = _changed(path, tmp_path / "far.onnx", lambda model: _weights(model, 1.05))
    before = f"{max(told['differences'].values()):.1g}"
    with pytest.warns(UserWarning, match=rf"written with errors of at most {before} .* and has one of 0\.\d+ in"):
        reader = export.Explainer(far)
    assert max(reader.about["measured"].values()) > 1e-2
    lost = _changed(path, tmp_path / "lost.onnx", lambda model: _weights(model, np.nan))
    with pytest.raises(ValueError, match=r"gives .* that are not finite"):
        export.Explainer(lost)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["svc", "bank"])
def test_a_copy_in_8_bits_is_told(kind, tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    cam, x, targets = made(kind)
    export.onnx(cam, x[:4], tmp_path / "whole.onnx", targets)
    quantization.quantize_dynamic(tmp_path / "whole.onnx", tmp_path / "int8.onnx")
    with pytest.warns(UserWarning, match="conversion to 8 bits"):
        export.Explainer(tmp_path / "int8.onnx")


def test_a_file_of_version_0_4_opens_as_before(written, tmp_path):
    def forget(model):
        for entry in model.metadata_props:
            if entry.key == KEY:
                entry.value = json.dumps({k: v for k, v in json.loads(entry.value).items() if k != "sample"})

    assert "measured" not in export.Explainer(_changed(written[0], tmp_path / "old.onnx", forget)).about


def test_half_precision_is_the_reason(written, tmp_path):
    def halve(model):
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                numbers = onnx.numpy_helper.to_array(tensor).astype(np.float16)
                tensor.CopyFrom(onnx.numpy_helper.from_array(numbers, tensor.name))

    with pytest.raises(ValueError, match="was changed to half precision since it was written"):
        export.Explainer(_changed(written[0], tmp_path / "half.onnx", halve))


@pytest.mark.parametrize(
    ("version", "message", "reason"),
    [
        (
            "1.16.3",
            "[ONNXRuntimeError] : 1 : FAIL : Load model from x.onnx failed:/src/model.cc:149 Model::Model() "
            "Unsupported model IR version: 10, max supported IR version: 9\n",
            r"needs a newer onnxruntime than 1\.16\.3, at least 1\.20, as it has IR version \d+ and opset \d+: pip "
            r"install --upgrade onnxruntime \(Unsupported model IR version: 10, max supported IR version: 9\)",
        ),
        (
            "1.18.1",
            "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for ReduceL2(18) node",
            r"needs a newer onnxruntime than 1\.18\.1.*ReduceL2\(18\)",
        ),
        (
            "1.30.0",
            "Load model failed:out of luck",
            r"onnxruntime 1\.30\.0 does not take .*though it is whole.*out of luck",
        ),
    ],
)
def test_an_onnxruntime_that_does_not_take_a_file_is_the_reason(written, version, message, reason, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError(message)

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    monkeypatch.setattr(onnxruntime, "__version__", version)
    with pytest.raises(ValueError, match=reason):
        export.Explainer(written[0])


def test_products_that_onnxruntime_fuses_into_what_it_lacks_are_left_alone(written, monkeypatch):
    original, tried = onnxruntime.InferenceSession, []

    def fusing(model, options=None, **named):
        tried.append(options)
        if options is None:
            raise RuntimeError("[ONNXRuntimeError] : 9 : Failed to find kernel for com.microsoft.FusedMatMul(1)")
        return original(model, options, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", fusing)
    assert max(export.Explainer(written[0]).about["measured"].values()) < 1e-5
    assert [options is None for options in tried] == [True, False]


def test_what_is_missing_or_cut_short_is_told_as_such(written, tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*none\.onnx"):
        export.Explainer(tmp_path / "none.onnx")
    whole = written[0].read_bytes()
    for name, content in (
        ("half", whole[: len(whole) // 2]),
        ("less", whole[:-1]),
        ("text", b"no model"),
        ("empty", b""),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="is cut short, or no ONNX model"):
            export.Explainer(tmp_path / name)
