"""Pools: how a layer's output becomes features."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.network.layout import Layout
from pytorch_grad_cam_pcasvm.network.token_layout import forget

POOLS = ("cls", "mean", "cls+mean", "max", "gem", "dense")


def check_pool(pool: Any) -> None:
    """Refuse anything but a pool.

    Raises:
        ValueError: it is neither None, a name, ``("gem", power)``, ``("dense", size)`` nor a function.
    """
    is_name = isinstance(pool, str) and pool in POOLS
    pair = isinstance(pool, tuple) and len(pool) == 2
    powered = pair and ((pool[0] == "gem" and _is_power(pool[1])) or (pool[0] == "dense" and _is_size(pool[1])))
    if not (pool is None or callable(pool) or is_name or powered):
        names = ", ".join(map(repr, POOLS))
        raise ValueError(
            f"pool must be {names}, ('gem', power), ('dense', odd size), a function or None, got {pool!r:.80}"
        )


def keeps_positions(pool: Any) -> bool:
    """Return whether a pool keeps positions."""
    return pool == "dense" or (isinstance(pool, tuple) and pool[:1] == ("dense",))


def _is_power(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0 and value % 2 == 1


def write_pool(pool: Any) -> str:
    """Return a pool that is no function as text, such as ``"mean"``, ``"dense:3"`` or, of None, ``"none"``."""
    if isinstance(pool, tuple):
        name, number = pool
        return f"{name}:{number}"
    return "none" if pool is None else str(pool)


def parse_pool(text: str) -> Any:
    """Return the pool that :func:`write_pool` wrote.

    Raises:
        ValueError: there is no such pool.
    """
    name, _, number = text.partition(":")
    pool: Any = None if text == "none" else text
    if number:
        try:
            pool = name, int(number) if name == "dense" else float(number)
        except ValueError:
            size = "a neighbourhood has an odd size, as in dense:3" if name == "dense" else "a number follows the colon"
            raise ValueError(f"the pool {text!r}: {size}") from None
    check_pool(pool)
    return pool


def make_pool(pool: str | tuple[str, float], layout: Layout) -> Callable[[Tensor], Tensor]:
    """Return a named pool as a function from an output in this layout to features (N, D); dense ones (N, D, h, w).

    Raises:
        ValueError: the pool takes a class token, but there is none.
    """
    name, power = pool if isinstance(pool, tuple) else (pool, 1 if pool == "dense" else 3.0)
    if "cls" in name and not layout.before:
        raise ValueError(f"pool={name!r} takes the class token, but no token comes before the patches: use 'mean'")
    return partial(_dense, int(power), layout) if name == "dense" else partial(_pooled, name, float(power), layout)


def _dense(size: int, layout: Layout, output: Tensor) -> Tensor:
    _check_tokens(layout, output)
    features = layout(output)
    if size == 1:
        return features
    # Zeros beyond the border, as PatchCore has it (Roth et al., CVPR 2022).
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(layout.grid) - 1]
    beyond = size // 2
    if len(layout.grid) == 3 and min(layout.grid) < size:  # which torch takes only if the zeros are there already
        return pool(F.pad(features, [beyond] * 6), size, stride=1)
    return pool(features, size, stride=1, padding=beyond)


def _check_tokens(layout: Layout, output: Tensor) -> None:
    """Refuse another number of tokens than the layout is of."""
    if layout.tokens is None:
        return
    count, expected = output.shape[layout.tokens[0]], layout.extra_tokens + layout.tokens[2]
    if count != expected:
        forget(layout)
        raise ValueError(
            f"the network now returns {count} tokens, but returned {expected} when their layout was determined: it has "
            "changed; run it again"
        )


def _pooled(name: str, power: float, layout: Layout, output: Tensor) -> Tensor:
    if name == "cls+mean":
        return torch.cat([_pooled("cls", power, layout, output), _pooled("mean", power, layout, output)], 1)
    positions = [d for d in range(layout.dims) if d not in (layout.batch, layout.channels)]
    _check_tokens(layout, output)
    if name == "cls":
        return output.select(1 - layout.batch, 0)
    if layout.before or layout.after:
        (tokens,) = positions
        output = output.narrow(tokens, layout.before, output.shape[tokens] - layout.extra_tokens)
    if name == "max":
        return output.amax(positions)
    if name == "gem":  # Radenovic et al., arXiv 1711.02512
        return output.clamp(min=1e-6).pow(power).mean(positions).pow(1 / power)
    return output.mean(positions)
