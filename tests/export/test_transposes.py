"""Files whose products of transposed matrices run in every onnxruntime, with all of its optimisations."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import export, fit_model

pytestmark = pytest.mark.optional


def test_no_double_product_has_a_transpose_before_it(tmp_path):
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    x, labels = torch.rand(24, 3, 8, 8), torch.arange(24) % 2
    x[labels == 1, :, 2:5, 2:5] += 0.6
    model = fit_model(net, [(x, labels)], make_pipeline(StandardScaler(), PCA(3), SVC()), progress=False)
    export.onnx(model.cam(), x[:2], tmp_path / "rbf.onnx", progress=False)
    graph = onnx.load(tmp_path / "rbf.onnx").graph
    doubles = {info.name for info in graph.value_info if info.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE}
    transposes = {node.output[0] for node in graph.node if node.op_type == "Transpose"} & doubles
    products = [node for node in graph.node if node.op_type == "MatMul"]
    assert not any(transposes.intersection(node.input) for node in products)
    assert any(
        node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute) for node in graph.node
    )
    session = onnxruntime.InferenceSession(tmp_path / "rbf.onnx")  # with all optimisations
    maps = model.explain(x[2:5])
    (written,) = session.run(["maps"], {"images": x[2:5].numpy()})
    np.testing.assert_allclose(written, maps.maps, rtol=1e-3, atol=1e-5)
