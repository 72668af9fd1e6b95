"""torch.set_default_device("cuda"), as notebooks do: generators of the CPU are asked for numbers of the CPU."""

import ast
from pathlib import Path

import pytest
import torch
from problems import explained
from torch.overrides import TorchFunctionMode

import pytorch_grad_cam_pcasvm
from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ShapCAM, smoothed

PACKAGE = Path(pytorch_grad_cam_pcasvm.__file__).parent
DRAWS = {"rand", "randn", "randint", "randperm", "normal"}


class OnAnother(TorchFunctionMode):
    """torch's rule where another device is the default one: a generator of the CPU fills no tensors of that."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        drawn = getattr(function, "__name__", "") in DRAWS and isinstance(kwargs.get("generator"), torch.Generator)
        if drawn and kwargs.get("device") is None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return function(*args, **kwargs)


def test_the_stand_in_refuses_what_names_no_device():
    generator = torch.Generator()
    with OnAnother(), pytest.raises(RuntimeError, match="Expected a 'cuda'"):
        torch.randn(2, generator=generator)


@pytest.mark.parametrize("explain", [
    lambda p: ShapCAM(p.net, [p.layer], samples=4).explain(p.x[:1]).maps,
    lambda p: smoothed(ClosedFormGradCAM(p.net, [p.layer]), p.x[:1], samples=2).maps,
])  # fmt: skip
def test_explanations_draw_on_the_cpu(explain):
    p = explained("pooled", "rbf", size="small", n=1)
    expected = explain(p)
    with OnAnother():
        assert torch.equal(torch.as_tensor(explain(p)), torch.as_tensor(expected))


def test_whatever_draws_from_a_generator_names_the_device():
    silent = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DRAWS
        and "generator" in (names := {keyword.arg for keyword in node.keywords}) and "device" not in names
    ]  # fmt: skip
    assert silent == []
