"""Explanations on tiles as files: one for the fixed number of tiles, for any number of photos."""

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import SVMTarget, TiledNet, export, fit_model

pytestmark = pytest.mark.optional
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.parametrize("layers", [["net.0"], ["net.2"]])
@pytest.mark.parametrize("pool", ["mean", "dense"])
def test_a_file_of_tiles_gives_the_maps_of_explain(pool, layers, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.Tanh(), nn.Conv2d(6, 8, 3, 2, 1), nn.Softplus()).eval()
    backbone = TiledNet(net, "3", pool, tiles=(3, 2), size=16).eval()
    x = torch.randn(12, 3, *backbone.canvas) + torch.arange(12).reshape(-1, 1, 1, 1) % 2
    dense = "dense" if pool == "dense" else None
    head = make_pipeline(StandardScaler(), PCA(3), SVC())
    model = fit_model(backbone, [(x, np.arange(12) % 2)], head, pool=dense, progress=False)
    cam, targets = model.cam(layers=layers), [SVMTarget(1, at=(2, 3)) if dense else SVMTarget(1)]
    cam.explain(x[:2], targets)  # what is looked for once
    export.onnx(cam, x[:2], tmp_path / "tiles.onnx", targets)
    explainer = export.Explainer(tmp_path / "tiles.onnx")
    for count in (1, 3):
        outputs, maps = explainer(x[4 : 4 + count].numpy()), cam.explain(x[4 : 4 + count], targets)
        assert relative(torch.from_numpy(outputs["maps"]), maps.maps) < 1e-3
        assert relative(torch.from_numpy(outputs["values"]), maps.values) < 1e-3
