"""A small transformer of every kind of layout that is met, with explicit attention, as a test problem."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Attention(nn.Module):
    """Attention written out, or torch's; with ``detached``, its weights are constants of autograd."""

    def __init__(self, width: int, fused: bool = False, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.detached, self.fused = heads, False, fused
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            q, k = (q.detach(), k.detach()) if self.detached else (q, k)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = (scores.detach() if self.detached else scores).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block that normalises before its attention."""

    def __init__(self, width: int, fused: bool = False) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, fused)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 20), nn.GELU(), nn.Linear(20, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    """Patches of 4 x 4 pixels, tokens before and behind them, blocks; gives all tokens.

    Args:
        before: tokens in front of the patches.
        after: tokens behind them.
        order: ``"rows"``, ``"columns"``, or, row by row at first, then in another order: ``"late"``, ``"units"``.
        first: whether tokens are the first dimension, (L, N, D), of what it gives to its norm.
        fused: whether attention is torch's function.
    """

    def __init__(
        self,
        before: int = 1,
        after: int = 0,
        order: str = "rows",
        first: bool = False,
        width: int = 12,
        depth: int = 2,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.order, self.first = order, first
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.before = nn.Parameter(torch.randn(1, before, width))
        self.after = nn.Parameter(torch.randn(1, after, width))
        self.drop = nn.Dropout()
        self.blocks = nn.Sequential(*(Block(width, fused) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x)
        if self.order == "columns":
            patches = patches.mT
        tokens = patches.flatten(2).mT
        every = (self.before.expand(x.shape[0], -1, -1), tokens, self.after.expand(x.shape[0], -1, -1))
        tokens = self.drop(torch.cat(every, 1))
        if self.order in ("late", "units"):
            grid = torch.arange(patches[0, 0].numel()).reshape(patches.shape[2:])
            if self.order == "units":  # squares of 2 x 2 patches one behind the other, as Hiera has them
                grid = grid.unflatten(1, (-1, 2)).unflatten(0, (-1, 2)).transpose(1, 2)
            else:
                grid = grid.flatten().unflatten(0, (-1, 2)).mT
            index = grid.flatten() + self.before.shape[1]
            tokens = torch.cat([tokens[:, : self.before.shape[1]], tokens[:, index]], 1)
        tokens = self.blocks(tokens)
        return self.norm(tokens.transpose(0, 1) if self.first else tokens)


class ChannelsLast(nn.Module):
    """Patches that stay (N, H, W, C) through a norm and a dense layer."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.patches, self.norm, self.dense = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.norm(self.patches(x).permute(0, 2, 3, 1)).tanh())
