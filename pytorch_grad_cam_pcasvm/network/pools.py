"""Pools: how the positions or tokens of a layer's output become one row of features."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.network.layout import GridLayout
from pytorch_grad_cam_pcasvm.network.token_layout import forget

POOLS = ("cls", "mean", "cls+mean", "max", "gem")


def check_pool(pool: Any) -> None:
    """Refuse what is not a pool.

    Raises:
        ValueError: it is neither None, a name, ``("gem", power)`` nor a function.
    """
    named = isinstance(pool, str) and pool in POOLS
    powered = isinstance(pool, tuple) and len(pool) == 2 and pool[0] == "gem" and _is_power(pool[1])
    if not (pool is None or callable(pool) or named or powered):
        names = ", ".join(map(repr, POOLS))
        raise ValueError(f"pool must be {names}, ('gem', power), a function or None, got {pool!r:.80}")


def _is_power(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def pool_of(pool: str | tuple[str, float], layout: GridLayout) -> Callable[[Tensor], Tensor]:
    """Return a named pool as a function from an output in this layout to features (N, D).

    Raises:
        ValueError: the pool takes a class token, but there is none.
    """
    name, power = pool if isinstance(pool, tuple) else (pool, 3.0)
    if "cls" in name and not layout.before:
        raise ValueError(f"pool={name!r} takes the class token, but no token comes before the patches: use 'mean'")
    return partial(_pooled, name, float(power), layout)


def _pooled(name: str, power: float, layout: GridLayout, output: Tensor) -> Tensor:
    if name == "cls+mean":
        return torch.cat([_pooled("cls", power, layout, output), _pooled("mean", power, layout, output)], 1)
    positions = [d for d in range(layout.dims) if d not in (layout.batch, layout.channels)]
    if layout.tokens is not None:
        (tokens,) = positions
        expected = layout.before + layout.tokens[2] + layout.after
        if output.shape[tokens] != expected:
            forget(layout)
            raise ValueError(
                f"the network now returns {output.shape[tokens]} tokens, but returned {expected} when their layout was "
                "determined: it has changed; run it again"
            )
    if name == "cls":
        return output.select(1 - layout.batch, 0)
    if layout.before or layout.after:
        output = output.narrow(tokens, layout.before, output.shape[tokens] - layout.before - layout.after)
    if name == "max":
        return output.amax(positions)
    if name == "gem":  # Radenovic et al., arXiv 1711.02512
        return output.clamp(min=1e-6).pow(power).mean(positions).pow(1 / power)
    return output.mean(positions)
