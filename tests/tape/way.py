"""A way between two layers: a small network of a stem, the target layer, of the way and of an end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from against_autograd import random
from ops import const
from torch import Tensor, nn

__all__ = ["WAYS", "Net", "Way", "X", "add", "const", "way"]
X, OTHER = random(3, 3, 9, 9, seed=1), random(3, 3, 9, 9, seed=2)


@dataclass(frozen=True)
class Way:
    """What is computed between the target layer and the end.

    Args:
        function: of the activations h (3, 6, 7, 7), behind the part, if there is one; returns tensors (3, ...).
        make: makes a module that it uses.
        tolerance: of relative errors.
        gated: whether something on it is a constant to gradients, so that a baseline may be refused.
        jumps: whether it has no secant between some activations, so that a baseline may be refused.
        near: whether it branches on values, so that baselines are close by.
        ends: makes the network's output of its logits.
        combined: whether others have all of what it is made of, if in other combinations.
    """

    function: Callable[..., Any]
    make: Callable[[], nn.Module] | None = None
    tolerance: float = 1e-9
    gated: bool = False
    jumps: bool = False
    near: bool = False
    ends: Callable[[Tensor], Any] = lambda y: y
    combined: bool = False


WAYS: dict[str, Way] = {}


def add(name: str, function: Callable[..., Any], make: Callable[[], nn.Module] | None = None, **options: Any) -> None:
    assert name not in WAYS, name
    WAYS[name] = Way(function, make, **options)


def way(function: Any = None, **options: Any) -> Any:
    """Add a function by its name."""
    if function is None:
        return lambda function: way(function, **options)
    add(function.__name__.replace("_", " ").strip(), function, **options)
    return function


class Net(nn.Module):
    """The network of a way; it ends in a dense layer on all numbers ("flat") or on means over positions ("pooled")."""

    def __init__(self, way: Way, end: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.stem = nn.Conv2d(3, 6, 3).double()
            self.part = way.make().double() if way.make is not None else None
            self.way, self.end, self.out = way, end, nn.Identity()
            self.eval()
            with torch.no_grad():
                self.out = nn.Linear(self(X, logits=False).shape[1], 4).double()

    def forward(self, x: Tensor, *, logits: bool = True) -> Any:
        h = self.stem(x)
        y = self.way.function(h) if self.part is None else self.way.function(self.part, h)
        given = [y] if isinstance(y, Tensor) else y
        if self.end == "flat":
            y = torch.cat([value.reshape(len(x), -1) for value in given], 1)
        else:
            given = [value.flatten(2).mean(-1) if value.dim() > 2 else value for value in given]
            y = torch.cat([value.reshape(len(x), -1) for value in given], 1)
        return self.way.ends(self.out(y)) if logits else y

    def starts(self, *, near: bool = False) -> list[Tensor]:
        """Return activations to start at: of other images, with a row for each and with one."""
        with torch.no_grad():
            other = self.stem(X + 1e-3 * OTHER if near else OTHER)
        return [other, other[:1]]
