"""Maps of several layers as one: means of maps that were divided by factors of their own."""

import torch
from reference import relative

from pytorch_grad_cam_pcasvm.maps.results import MethodResult, as_one


def level(size, log_scale, seed):
    numbers = torch.Generator().manual_seed(seed)
    maps, remainder = (torch.randn(2, 3, *shape, generator=numbers).double() for shape in ((size, size), ()))
    logs = torch.tensor(log_scale).double().expand(2, 3)
    weights, values = torch.ones(2, 3, 5).double(), torch.zeros(2, 3).double()
    return MethodResult(maps=maps, weights=weights, log_scale=logs, values=values, remainder=remainder)


def test_means_of_maps_of_different_size():
    """The largest factor stays outside, and the sums are the mean of the sums."""
    levels = [level(4, -40.0, 0), level(2, -42.0, 1), level(4, -900.0, 2)]
    mean = as_one(levels, "mean")
    assert mean.maps.shape == (2, 3, 4, 4)
    assert mean.log_scale.tolist() == [[-40.0] * 3] * 2
    factors = torch.tensor([0.0, -2.0, -860.0]).double().exp()
    maps = sum(factor * each.maps.sum((2, 3)) for factor, each in zip(factors, levels, strict=True))
    remainder = sum(factor * each.remainder for factor, each in zip(factors, levels, strict=True))
    assert relative(mean.maps.sum((2, 3)), maps / 3) < 1e-12
    assert relative(mean.remainder, remainder / 3) < 1e-12
