"""Dual numbers: values and derivatives are those of torch.func.jvp, which shares nothing with the package."""

from typing import Any

import pytest
import torch
from problems import Step
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.calculus.dual_numbers import DualNumbers, _layer_norm
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.runtime.rollback import Rollback


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, OTHER = random(2, 3), random(3, seed=1) + 3
WEIGHT, BIAS = random(5, 3, seed=2), random(5, seed=3)
OTHER4 = random(4, seed=12).abs() + 0.5
SIGNAL, KERNEL = random(2, 4, 7, seed=4), random(6, 2, 3, seed=5)
IMAGE, KERNEL2 = random(2, 3, 5, 5, seed=6), random(5, 3, 3, 3, seed=7)
VOLUME, KERNEL3 = random(2, 3, 4, 4, 4, seed=8), random(5, 3, 2, 2, 2, seed=9)


def batch_norm(x: Tensor, *weights_and_moments: Tensor | None, training: bool = False) -> Tensor:
    """Call what the functional form calls, and a replay: it has no names of arguments."""
    return torch.batch_norm(x, *weights_and_moments, training, 0.1, 1e-2, False)


FUNCTIONS = {
    "a number": (X, lambda x: 2 * (1 - x / 3) + 1 / x),
    "a tensor": (X, lambda x: (x - OTHER) / OTHER * OTHER + OTHER / x),
    "an expanded tensor": (X, lambda x: x * OTHER[:1].expand(2, 3) - OTHER.expand(2, 3)),
    "integers": (X, lambda x: x * torch.arange(3) + torch.tensor(2)),
    "a mask": (X, lambda x: x * (x > 0)),
    "another precision": (X, lambda x: x * OTHER.float()),
    "alpha": (X, lambda x: torch.add(x, OTHER, alpha=2).sub(x, alpha=3) + torch.sub(OTHER, x, alpha=3)),
    "alpha of x": (X, lambda x: torch.add(OTHER, x, alpha=2)),
    "a sum, x second": (X, lambda x: OTHER + x),
    "a difference, x second": (X, lambda x: OTHER - x),
    "a product, x second": (X, lambda x: OTHER * x),
    "rounded": (X, lambda x: torch.div(x, OTHER, rounding_mode="floor") + x),
    "names": (X, lambda x: torch.mul(input=x, other=OTHER)),
    "masked by -inf": (X, lambda x: (x.masked_fill(x > 0.5, -torch.inf) * 2 / OTHER - 1).softmax(1)),
    "from an infinite constant": (X, lambda x: torch.minimum(x, x + 1e39).float() * 2),
    "a view of a product": (X, lambda x: (x * OTHER[:2, None].expand(2, 3)).view(6)),
    "a view of a sum": (X, lambda x: (x + torch.ones(4, 1, 1)).view(24)),
    "vmap": (X, torch.func.vmap(lambda row: 2 * row / 3 + F.linear(row, WEIGHT[:3]))),
    "in place": (X, lambda x: x.clone().mul_(OTHER).add_(1)),
    "itself": (X, lambda x: x * x - x / (x + 5)),
    "dense": (X, lambda x: F.linear(x, WEIGHT, BIAS)),
    "dense, no bias": (X, lambda x: F.linear(x, WEIGHT)),
    "dense, named bias": (X, lambda x: F.linear(x, WEIGHT, bias=BIAS)),
    "dense, names": (X, lambda x: F.linear(x, weight=WEIGHT, bias=BIAS)),
    "dense, weight of x": (X, lambda x: F.linear(x, x[:1] * WEIGHT, BIAS)),
    "dense, bias of x": (X, lambda x: F.linear(x, WEIGHT, bias=x.sum() * BIAS)),
    "dense, only its weight of x": (X, lambda x: F.linear(OTHER, x)),
    "dense, only its bias of x": (X, lambda x: F.linear(OTHER, WEIGHT[:3], x[0])),
    "dense, of constants": (X, lambda x: x + F.linear(OTHER[None], WEIGHT[:3])),
    "rows": (X, lambda x: torch.cat([x, OTHER[None], 2 * x])),
    "rows, named": (X, lambda x: torch.cat(tensors=[OTHER[None], x], dim=0)),
    "columns": (X, lambda x: torch.cat([OTHER.expand(2, 3), x], 1)),
    "a stack": (X, lambda x: torch.stack([x, OTHER.expand(2, 3)], dim=1)),
    "a quotient added": (X, lambda x: torch.addcdiv(OTHER, x, OTHER)),
    "a quotient added to x": (X, lambda x: torch.addcdiv(x, OTHER, OTHER)),
    "a quotient by x added": (X, lambda x: torch.addcdiv(OTHER, OTHER, x.square() + 1)),
    "a product added": (X, lambda x: torch.addmm(BIAS, x, WEIGHT.T)),
    "a product added to x": (X, lambda x: torch.addmm(x, OTHER.expand(2, 3), WEIGHT[:3])),
    "a product with x added": (X, lambda x: torch.addmm(BIAS[:3], WEIGHT[:, :2], x)),
    "batch norm": (SIGNAL, lambda x: batch_norm(x, random(4, seed=11), BIAS[1:], BIAS[:4], OTHER4)),
    "batch norm, plain": (IMAGE, lambda x: batch_norm(x, None, None, BIAS[:3], OTHER)),
    "batch norm of features": (X, lambda x: batch_norm(x, OTHER, None, BIAS[:3], OTHER)),
    "batch norm, only its weight of x": (
        X,
        lambda x: batch_norm(OTHER4.view(2, 2), x[0, :2], None, OTHER[:2], OTHER[1:]),
    ),
    "batch norm, only its bias of x": (
        X,
        lambda x: batch_norm(OTHER4.view(2, 2), None, x[0, :2], OTHER[:2], OTHER[1:]),
    ),
    "batch norm of the batch": (SIGNAL, lambda x: batch_norm(x, OTHER4, BIAS[1:], None, None, training=True)),
    "conv1d": (SIGNAL, lambda x: F.conv1d(x, KERNEL, BIAS[:1].expand(6), 2, 1, 1, 2)),
    "conv2d": (IMAGE, lambda x: F.conv2d(x, KERNEL2, BIAS, stride=2, padding=1)),
    "conv3d": (VOLUME, lambda x: torch.conv3d(x, KERNEL3, bias=BIAS, dilation=2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives(name: str) -> None:
    x, function = FUNCTIONS[name]
    direction = random(*x.shape, seed=10)
    y, derivative = torch.func.jvp(function, (x,), (direction,))
    with torch.no_grad(), DualNumbers():
        found = forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction)))
    assert found.primal.dtype == y.dtype
    torch.testing.assert_close(found.primal, y, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.tangent, derivative, rtol=1e-13, atol=1e-13)


def test_numbers_are_not_rounded_to_half_precision() -> None:
    x = X.half()
    with torch.no_grad(), DualNumbers():
        found = forward_ad.unpack_dual(forward_ad.make_dual(x, x) * 1e3 / 1e5)
    for part in found:
        torch.testing.assert_close(part.double(), x.double() / 100, rtol=2e-3, atol=1e-5)


def test_a_class_that_knows_only_some_functions() -> None:
    class Few(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "dual" not in function.__name__
            return super().__torch_function__(function, types, args, kwargs or {})

    with torch.no_grad(), DualNumbers():
        found = forward_ad.make_dual(X, X) * OTHER.as_subclass(Few)
        torch.testing.assert_close(forward_ad.unpack_dual(found.as_subclass(Tensor)).tangent, X * OTHER)


def test_in_inference_mode() -> None:
    with torch.inference_mode(), DualNumbers():
        found = forward_ad.unpack_dual(forward_ad.make_dual(X, X) * OTHER)
    torch.testing.assert_close(found.tangent, X * OTHER)
    assert not torch.is_inference_mode_enabled()


def test_constants_stay_constants() -> None:
    with torch.no_grad(), DualNumbers():
        x = forward_ad.make_dual(X, X)
        _ = x * OTHER
        assert forward_ad.unpack_dual(OTHER).tangent is None
        assert forward_ad.unpack_dual(OTHER * OTHER).tangent is None
        assert forward_ad.unpack_dual(torch.cat([OTHER, OTHER])).tangent is None
    assert forward_ad.unpack_dual(x).tangent is None  # outside there are none


@pytest.mark.parametrize("weighted", [False, True])
def test_a_layer_norm_in_pieces_is_the_one_of_torch(weighted: bool) -> None:
    arguments = ([4, 7], *([random(4, 7, seed=13), random(4, 7, seed=14)] if weighted else [None, None]), 1e-2)
    direction = random(*SIGNAL.shape, seed=10)
    found, expected = (
        torch.func.jvp(lambda x, f=f: f(x, *arguments), (SIGNAL,), (direction,)) for f in (_layer_norm, F.layer_norm)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def begin() -> None:
    """Begin, and be interrupted: nothing comes to an end."""
    DualNumbers().__enter__()


def test_the_next_call_ends_what_was_interrupted_and_leaves_a_level_of_the_user() -> None:
    begin()
    assert forward_ad._current_level == 0
    with Rollback():
        assert forward_ad._current_level == -1
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, OTHER.expand(2, 3))
        with pytest.raises(RuntimeError, match="Nested forward mode AD"):
            begin()
        with Rollback():
            assert torch.equal(forward_ad.unpack_dual(x).tangent, OTHER.expand(2, 3))


def test_a_write_has_a_second_derivative():
    """Replayed as a copy: the functional form of ``copy_`` has no forward derivative."""

    def written(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1].sin()
        return y * x

    x, direction = (torch.randn(2, 3, 4, 4, dtype=torch.float64) for _ in range(2))
    net = nn.Sequential(nn.Identity(), Step(written))
    with torch.no_grad():
        passed = Path(net, None, ["0"]).run(x)
        with DualNumbers():
            moved = passed.replay(forward_ad.make_dual(x.clone(), direction), 0)
            change = forward_ad.unpack_dual(moved.output).tangent
    expected = torch.func.jvp(
        lambda x: x * torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1].sin()], 1), (x,), (direction,)
    )[1]
    torch.testing.assert_close(change, expected)
