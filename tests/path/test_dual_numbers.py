"""Dual numbers: values and derivatives are those of torch.func.jvp, which shares nothing with the package."""

from typing import Any

import pytest
import torch
from ops import random
from problems import Step
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.path.dual_numbers import DualNumbers, _layer_norm
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.runtime.rollback import Rollback

X, OTHER, SIGNAL = random(2, 3), random(3, seed=1) + 3, random(2, 4, 7, seed=4)


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
