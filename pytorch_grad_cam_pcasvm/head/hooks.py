"""Hooks on the parts of a head: hooks that only observe run as on any module; changes by others are recorded."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError


class Hookable(nn.Module):
    """A module whose ``evaluate`` computes its output and saves the numbers for its pullback."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Buffers and stages are found here."""

    def evaluate(self, x: Tensor) -> tuple[Any, Any]:
        """Return the output for x, shape (N, in), and numbers saved for the pullback, with the batch first."""
        raise NotImplementedError(f"{type(self).__name__} defines no evaluate(x) that returns (output, saved)")

    def forward(self, x: Tensor, made: list[Any] | None = None) -> Any:
        """Return the output for x; ``made``, for :func:`run`, receives the results before any forward hooks."""
        y, saved = self.evaluate(x)
        if made is not None:
            made += [x, y, [tensor.clone() for tensor in _tensors(y)], saved]
        return y


class Changed:
    """Stands for the saved numbers of a module whose output a hook has changed."""

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__

    def no_closed_form(self) -> Exception:
        """Return the error of a pullback through the module."""
        return NoClosedFormError(
            f"a hook on {self.name}, a part of the head, changes its input, output or gradient, which has no "
            "closed form",
            "remove it",
            "move what it does into the backbone",
            "register a stage that does it with stage_for.register(...)",
        )


def run(module: Hookable, x: Tensor) -> tuple[Any, Any]:
    """Return ``module.evaluate(x)`` with the module's hooks; saved is a ``Changed`` where they change something."""
    backward = module._backward_hooks or module._backward_pre_hooks
    if not (backward or module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook()):
        result = module.evaluate(x)
        if not isinstance(result, tuple):
            raise TypeError(f"evaluate of {type(module).__name__} must return (output, saved), not only the output")
        return result
    # A copy: what a hook writes into it is no other module's output.
    copied, results = x.clone(), list[Any]()
    output = nn.Module.__call__(module, copied, made=results)
    received, y, copies, saved = results
    looked = received is copied and output is y and _same([copied, *_tensors(y)], [x, *copies])
    return output, saved if looked and not backward else Changed(module)


def _tensors(y: Any) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else y.values


def _same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
        for a, b in zip(tensors, others, strict=True)
    )
