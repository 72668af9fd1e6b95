"""Heads of good parts alone, pooled: measured by how anomalous an image is, which is what is explained of them."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, ResidualTarget, SVMTarget, evaluation, extract_features
from pytorch_grad_cam_pcasvm.studio.cli.models import anomaly_target

SIDE = 16


def parts(count, seed):
    """Return images of noise, and masks; each has a bright square somewhere."""
    random = torch.Generator().manual_seed(seed)
    x, masks = 0.1 * torch.randn(count, 3, SIDE, SIDE, generator=random), np.zeros((count, SIDE, SIDE), bool)
    for image, mask in zip(x, masks, strict=True):
        top, left = torch.randint(0, SIDE - 5, (2,), generator=random).tolist()
        mask[top : top + 5, left : left + 5] = True
        image[:, top : top + 5, left : left + 5] += torch.tensor([3.0, -2.0, 1.0])[:, None, None]
    return x, masks


@pytest.mark.parametrize("kind", ["residual", "neighbours"])
def test_evidence_of_anomalies_lies_inside_of_masks(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    good = 0.1 * torch.randn(40, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    features, _ = extract_features(net, [good], progress=False)
    steps = [StandardScaler(), PCA(3)] + [NearestNeighbors(n_neighbors=1)] * (kind == "neighbours")
    head = PCASVMNet(net, make_pipeline(*steps).fit(features)).eval()
    target = anomaly_target(head.head)
    assert target == (ResidualTarget() if kind == "residual" else SVMTarget(sign="-"))
    x, masks = parts(12, 2)
    methods = {"ContributionCAM": (ContributionCAM, {"baseline": "mean"})}
    study = evaluation.Study(head, x, ["1"], methods, target, images=None, progress=False)
    found = study.localisation(masks=masks)
    share = found["ContributionCAM", "share of positive evidence"].mean
    assert share > 2 * masks.mean()
    maps = ContributionCAM(head, ["1"], baseline="mean").explain(x, [target]).maps[:, 0].clamp(min=0)
    inside = (maps * torch.from_numpy(masks)).sum((1, 2)) / maps.sum((1, 2))
    assert share == pytest.approx(float(inside.mean()), rel=1e-4)
    with pytest.raises(ValueError, match="this head has none: measure faithfulness instead, or give masks="):
        study.localisation()
    assert study.faithfulness().rows  # the other way out
