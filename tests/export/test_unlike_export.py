"""Programs of models that tell what is unlike their training set: the numbers of ``explain``, and words of sheets."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import PCADistance, SVMTarget, export, fit_model, measure_outside
from pytorch_grad_cam_pcasvm.studio.export.outputs import about
from pytorch_grad_cam_pcasvm.studio.pictures.sheets import Sheets

torch.manual_seed(0)
NET = nn.Sequential(nn.Conv2d(3, 8, 4, 2), nn.Tanh(), nn.Conv2d(8, 12, 3), nn.Tanh()).eval()
IMAGES, LABELS = torch.randn(20, 3, 16, 16), ["a", "b"] * 10
ODD = torch.cat([IMAGES[:2], 4 * torch.randn(2, 3, 16, 16)])


def fit(head, pool):
    return fit_model(NET, [(IMAGES, LABELS)], head, "3", pool=pool, resample=0, progress=False)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("pool", ["mean", pytest.param("dense", marks=SLOW)])
def test_a_program_tells_what_is_unlike_the_training_set(pool):
    model = fit(make_pipeline(StandardScaler(), PCA(4), SVC()), pool)
    cam, targets = model.cam(layers=["1"]), [SVMTarget(at=None if pool == "mean" else "max")]
    found = export.program(cam, IMAGES[:2], targets).module()(ODD)
    expected = measure_outside(model.net(ODD))
    assert expected[:2].max() < 1 < expected[2:].min()
    np.testing.assert_allclose(found["outside"], expected, rtol=1e-5)
    outputs = {name: tensor.numpy() for name, tensor in found.items()}
    sheets = Sheets(about(targets, model.net))
    said = f"unlike the training pictures: do not trust this decision ({expected[3]:.2f} times the limit)"
    assert [sheets.unlike(outputs, row) for row in (0, 3)] == ["", said]


@pytest.mark.parametrize("pool", [pytest.param("mean", marks=SLOW), "dense"])
def test_a_program_tells_what_each_component_adds_to_an_anomaly(pool):
    model = fit(make_pipeline(StandardScaler(), PCADistance(0.1)), pool)
    model.net.head.training_set.preparation = {"good": {"shrinkage": 0.1}}
    targets = [SVMTarget(sign="-", at=None if pool == "mean" else "max")]
    found = export.program(model.cam(layers=["1"]), IMAGES[:2], targets).module()(ODD)
    np.testing.assert_allclose(found["parts"].sum(1), model.net.anomaly_score(ODD), rtol=1e-5)
    assert found["parts"].shape == (4, 12)
