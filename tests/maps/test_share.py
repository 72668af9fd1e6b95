"""The share of the evidence that lies inside of a region, and its standard error by refits."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SignedMaps,
    SVMTarget,
    explain_heads,
    resample_heads,
)

torch.manual_seed(0)
NET = nn.Sequential(
    nn.Conv2d(3, 6, 3, 2), nn.Tanh(), nn.Conv2d(6, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
)
IMAGES = torch.randn(40, 3, 16, 16)
REGION = torch.zeros(15, 15)
REGION[2:9, 4:13] = 1
TARGETS = [SVMTarget(), PCATarget(0)]


@pytest.fixture(scope="module")
def cam():
    with torch.no_grad():
        rows = NET(IMAGES).double().numpy()
    labels = (rows[:, 0] > np.median(rows[:, 0])).astype(int)
    pipeline = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(rows, labels)
    net = PCASVMNet(NET, pipeline).eval()
    net.head.resamples = resample_heads(pipeline, rows, labels, n=5)
    return ContributionCAM(net, ["3"], baseline="zero")


def shares(maps, mask):
    """Return the shares of maps, (..., H, W), by loops over positions and pixels."""
    *_, height, width = maps.shape
    weights = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            top, bottom = int(row * len(mask) / height), int(np.ceil((row + 1) * len(mask) / height))
            left, right = int(column * mask.shape[1] / width), int(np.ceil((column + 1) * mask.shape[1] / width))
            weights[row, column] = mask[top:bottom, left:right].mean()
    parts = maps.clip(min=0), (-maps).clip(min=0), np.abs(maps)
    return [(part * weights).sum((-2, -1)) / part.sum((-2, -1)) for part in parts]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_is_the_evidence_inside_divided_by_all(cam):
    maps = cam.explain(IMAGES[:4], TARGETS)
    found = maps.share(REGION)
    for part, expected in zip(found, shares(maps.maps.numpy(), REGION.numpy()), strict=False):
        np.testing.assert_allclose(part, expected, rtol=1e-5)
    masks = torch.stack([REGION, 1 - REGION, REGION > 2, REGION < 2])
    of_each = maps.share(masks).total
    np.testing.assert_allclose(of_each[0], found.total[0])
    np.testing.assert_allclose(of_each[1] + maps.share(REGION).total[1], 1, rtol=1e-5)
    np.testing.assert_allclose(of_each[2:], [[0, 0], [1, 1]], atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_its_error_is_the_spread_of_the_shares_of_the_refits(cam):
    maps, heads = cam.explain(IMAGES[:4], TARGETS), cam.model.head.resamples.heads
    refits = explain_heads(cam, IMAGES[:4], heads, [SVMTarget()], own_starts=True)
    of_refits = torch.stack([refit.share(REGION).total for refit in refits])
    np.testing.assert_allclose(maps.share(REGION).error[:, 0], of_refits.std(0)[:, 0], rtol=1e-4)
    stable = bool(maps.stability[1] >= 0.9)
    assert bool(maps.share(REGION).error[:, 1].isfinite().all()) == stable
    np.testing.assert_allclose(maps[1:3, 0].share(REGION).error, maps.share(REGION).error[1:3, :1])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_maps_in_files_have_shares_without_errors(cam, tmp_path):
    maps = cam.explain(IMAGES[:2], TARGETS)
    maps.save(tmp_path / "maps.safetensors")
    again = SignedMaps.load(tmp_path / "maps.safetensors").share(REGION)
    assert again.error is None
    assert torch.equal(again.total, maps.share(REGION).total)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (torch.zeros(3, 15, 15), r"a region is a mask \(H, W\), or \(2, H, W\)"),
        (torch.zeros(15), "a region is a mask"),
        (torch.zeros(4, 15), r"the mask has \(4, 15\) pixels"),
        (2 * REGION, "from 0 .outside. to 1"),
        (REGION - 1, "from 0 .outside. to 1"),
        (REGION / 0, "from 0 .outside. to 1"),
    ],
)
def test_what_is_no_region_is_refused(mask, match, cam):
    with pytest.raises(ValueError, match=match):
        cam.explain(IMAGES[:2], TARGETS).share(mask)
