"""Operations of torch, once each: a call, and what it is tried on.

Every property of ``rules/test_operations.py`` is held against each of them.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torchvision
from against_autograd import random, tensors
from reference import relative
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torchvision.ops import FrozenBatchNorm2d, Permute, StochasticDepth

from pytorch_grad_cam_pcasvm.path.passes import ClosedFormPass
from pytorch_grad_cam_pcasvm.path.record import Path


@dataclass(frozen=True)
class Op:
    """An operation, or a few.

    Args:
        call: of the sample, behind the module if there is one; returns a tensor or several.
        shape: of the sample.
        module: a layer, whose numbers are drawn anew, or what makes one.
        tolerance: of relative errors of its gradient.
    """

    call: Callable[..., Any]
    shape: tuple[int, ...] = (2, 4, 6, 5)
    module: nn.Module | Callable[[], nn.Module] | None = None
    tolerance: float = 1e-12

    def sample(self, seed: int = 0) -> Tensor:
        return (2 if isinstance(self.module, nn.Module) else 1) * random(*self.shape, seed=seed)

    def make(self) -> Callable[[Tensor], Tensor]:
        """Return the function of the sample: several tensors become one, row by row."""
        module = self.module
        if isinstance(module, nn.Module):
            module = prepared(module)
        elif module is not None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                module = module().double().eval()

        def function(x: Tensor) -> Tensor:
            found = tensors(self.call(x) if module is None else self.call(module, x))
            return found[0] if len(found) == 1 else torch.cat([y.reshape(len(x), -1) for y in found], 1)

        return function


class Start(nn.Module):
    """A target layer in front of a function; what it gives is no leaf, and belongs to nobody else."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.start, self.function = nn.Identity(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.start(1 * x))


def recorded(function: Callable[[Tensor], Any], x: Tensor, **options: Any) -> ClosedFormPass:
    with torch.no_grad():
        return Path(Start(function), None, ["start"], **options).record(x)


def pulled(function: Callable[[Tensor], Tensor], x: Tensor, targets: int = 2, twin: Any = None) -> tuple[Tensor, ...]:
    """Return pullback (K, *x.shape), weights (K, N, T), and autograd's derivative of a function at x."""
    passed = recorded(function, x, needs="gradient")  # what is not needed is NaN
    assert relative(passed.activations[0], x) == 0, "something wrote over the activations"
    seeds = random(targets, *passed.output.shape, seed=7)
    with torch.no_grad():
        actual, weights = passed.pullback([seeds], 0).dense(), passed.pullback([seeds], 0).sums()
    leaf = x.clone().requires_grad_()
    y = (twin or function)(1 * leaf)
    expected = [torch.autograd.grad(y, leaf, seed.to(y.dtype), retain_graph=True)[0] for seed in seeds]
    return actual, weights, torch.stack(expected)


def prepared(layer: nn.Module) -> nn.Module:
    """Return a copy whose parameters and statistics are drawn anew."""
    layer = copy.deepcopy(layer).double().eval()
    for module in layer.modules():
        if getattr(module, "running_var", None) is not None:
            module.running_mean.copy_(random(len(module.running_mean), seed=1))
            module.running_var.copy_(0.5 + random(len(module.running_var), seed=2).sigmoid())
        for number, parameter in enumerate(module.parameters(recurse=False)):
            parameter.data.copy_(random(*parameter.shape, seed=number))
    return layer


@cache
def const(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers that are made once, before anything is recorded."""
    return 0.5 * random(*shape, seed=100 + seed)


# --- functions of x (2, 4, 6, 5) --------------------------------------------------------------------------------------

WEIGHT, OTHER, WIDE = random(6, 5, seed=2), random(4, 1, 5, seed=3), random(7, 120, seed=5)
FILTERS, FIXED = random(3, 4, 3, 3, seed=4), random(2, 4, 6, 5, seed=6)
INDEX, SOME = torch.tensor([2, 0, 2]), torch.tensor([3, 0])
PLACES = random(2, 3, 4, 5, seed=7).argsort(1)


def inplace(x):
    y = 2 * x
    y += x.tanh()
    y -= 0.5 * x
    y *= 3
    y /= 1 + x * x
    return y


def written(x):
    y = 2 * x
    y[:, 1] = x[:, 0].tanh()
    y[..., [0, 2], :] = x[:, :1, :2] * 3
    y[0, OTHER[:, 0, 0] > 0, 3] = x.mean()
    y[1, 2:, 0] = 7.0
    y[0, :, :, 0] = x[:1, :, :, 1].unsqueeze(0)
    return y * x


def written_into_zeros(x):
    y = torch.zeros(2, 4, 8, 5, dtype=torch.float64)
    y[:, :, 1:-1] = x
    y[:, 1:3, 0] = y[:, 1:3, 0] + x[:, 1:3, 2].square()
    y[INDEX.clamp(max=1), :, -1, [0, 1, 2]] = x[..., 2].mean(2)[:1]
    return y.tanh()


def copied(x):
    y, z = 2 * x, 3 * x
    y.copy_(x.mean(1, keepdim=True))
    z.fill_(x.mean())
    return y * z + (3 * x).zero_() + torch.empty_like(x).copy_(x)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "add, alpha": lambda x: torch.add(x.relu(), x.tanh(), alpha=0.5) + 3,
    "sub, alpha": lambda x: torch.sub(x.relu(), x.tanh(), alpha=2),
    "rsub": lambda x: 1 - x.tanh(),
    "torch.rsub": lambda x: torch.rsub(x, x.tanh(), alpha=3),
    "mul, broadcast": lambda x: x * OTHER * x.mean((0, 2), keepdim=True),
    "mul, other first": lambda x: OTHER * x,
    "mul, fewer dimensions": lambda x: x * x.mean((0, 1)),
    "mul, one dimension less": lambda x: x * x.mean(0),
    "mul, broadcast in a batch of one": lambda x: x[:1, :1] * x[:1, :1].mean(2, keepdim=True),
    "div": lambda x: x / (2 + x.square()) / 3,
    "rdiv": lambda x: 2 / (2 + x * x),
    "rdiv of a tensor": lambda x: (2 + x * x).__rtruediv__(x.tanh()),
    "div by a constant": lambda x: x / OTHER,
    "div by what changes its sign": lambda x: x.cosh() / (x + x.sin()),
    "logaddexp": lambda x: torch.logaddexp(x, 2 * x.flip(1)) + torch.logaddexp2(x.mean(1, True), OTHER),
    "xlogy": lambda x: torch.xlogy(x.tanh(), 1 + x * x) + torch.xlogy(2.0, x.exp()) + torch.xlogy(x, 1.5),
    "xlogy of one tensor twice": lambda x: torch.xlogy(x.exp(), x.exp()),
    "hypot": lambda x: torch.hypot(x, x.flip(1) + OTHER),
    "atan2": lambda x: torch.atan2(x.sin() + 2, x.flip(2)) * torch.atan2(OTHER, x),
    "remainder and fmod": lambda x: (torch.remainder(x, 0.7) * torch.fmod(x, 0.4)
        + torch.remainder(x, 2 + x.flip(1).sin())),
    "fmod of two tensors": lambda x: torch.fmod(3 * x, 2 + x.flip(2).cos()) + x % 0.3,
    "sinc": lambda x: torch.sinc(x) + torch.sinc(x / 1000) + torch.sinc(0 * x),
    "frac, logit": lambda x: (3 * x).frac() * torch.logit(x.sigmoid()) + torch.logit(x.sigmoid(), eps=0.3),
    "tril, triu": lambda x: x.tril() * x.triu(-1) + x.flatten(1).tril(3).sum(1)[:, None, None, None],
    "as_strided": lambda x: (x * 1).as_strided((2, 3, 2, 4), (120, 30, 7, 2), 3).tanh(),
    "as_strided of a transposed slice": lambda x: x.mT[:, 1:].as_strided((2, 3, 3), (120, 30, 1), 30),
    "as_strided whose places overlap": lambda x: x.as_strided((2, 4, 5, 2, 3), (120, 30, 5, 5, 1)).sin(),
    "neg, exp": lambda x: (-x).exp(),
    "sqrt, rsqrt, log": lambda x: (1 + x * x).sqrt() + (2 + x * x).rsqrt() + torch.log(2 + x * x),
    "pow": lambda x: x**3 + (1 + x * x) ** -0.5 + x**0,
    "erf": torch.erf,
    "clamp": lambda x: x.clamp(-0.5, 0.7) + torch.clamp(x, min=0.1) + x.clip(max=0.2),
    "where": lambda x: torch.where(x > 0, x * 2, x.tanh()),
    "where, method": lambda x: x.tanh().where(x > 0, x.mean((2, 3), keepdim=True)),
    "clamp at its limits": lambda x: (x - x.detach()).clamp(min=0.0) * 3 + (x - x.detach()).clamp(max=0.0) + x,
    "attention, a query that may look at nothing": lambda x: (F.scaled_dot_product_attention(x, x.flip(2), x.tanh(),
        torch.ones(6, 6).tril(-1).bool())),
    "softplus and abs": lambda x: F.softplus(x, 2.0, 1.0) + 3 * x.abs(),
    "masked_fill": lambda x: x.masked_fill(x < 0.3, 0.1),
    "matmul": lambda x: x @ WEIGHT.T @ x.softmax(-1),
    "matmul, constant first": lambda x: WEIGHT.T @ x,
    "bmm": lambda x: torch.bmm(x.flatten(0, 1), x.flatten(0, 1).transpose(1, 2)),
    "linear, bias of one row on the path": lambda x: F.linear(x[0, 0, 0], WEIGHT, x[0, 0, :, 0]),
    "linear, weight by name": lambda x: F.linear(x.flatten(1), weight=WIDE),
    "linear, rows of channels": lambda x: F.linear(x.reshape(8, 30), WIDE[:, :30]),
    "linear, the activations as its weight by name": lambda x: F.linear(WIDE, weight=x.flatten(1)),
    "channels joined, then pooled": lambda x: x.reshape(2, 2, 12, 5).mean((2, 3)),
    "chunk, the second alone": lambda x: x.chunk(2, 2)[1].tanh(),
    "conv2d, same": lambda x: F.conv2d(x, FILTERS, padding="same", dilation=2),
    "linear, weight on the path": lambda x: F.linear(x, x.mean((0, 1)), x.mean((0, 1, 3))),
    "linear, only the weight on the path": lambda x: F.linear(OTHER.flatten().repeat(3, 6), x.flatten(1)),
    "functional linear and norm": lambda x: F.layer_norm(F.linear(x, WEIGHT), (6,)),
    "relu with input=": lambda x: torch.flatten(F.relu(input=x, inplace=True), start_dim=1),
    "inplace by position": lambda x: F.leaky_relu(x, 0.2, True),
    "in place": lambda x: F.relu_((x + 0).mul_(2).add_(0.1)),
    "in place, then again": lambda x: F.relu(x, inplace=True) * 2,
    "+=, -=, *=, /=": lambda x: inplace(x),
    "flatten by name": lambda x: torch.flatten(input=x, start_dim=1),
    "view and size": lambda x: x.view(x.size(0), -1),
    "reshape": lambda x: x.reshape(x.shape[0], 4, -1).mean(-1),
    "reshape over the batch": lambda x: x.reshape(-1, 3, 5).tanh(),
    "squeeze": lambda x: x.mean([2, 3], keepdim=True).squeeze(-1).squeeze(-1).unsqueeze(0),
    "unflatten": lambda x: x.unflatten(1, (2, 2)).flatten(2),
    "permute": lambda x: x.permute(0, 2, 3, 1).tanh().mean((1, 2)),
    "torch.permute": lambda x: torch.permute(x, (3, 0, -2, 1)).relu(),
    "transpose": lambda x: x.flatten(2).transpose(1, 2).tanh().mean(1),
    "swapaxes": lambda x: torch.swapaxes(x, axis0=2, axis1=3).tanh(),
    "T and mT": lambda x: x.flatten(1).T.tanh() @ x.flatten(1) + x[0, 0].mT.sum(),
    "expand": lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 3, 2) * x[:, :, :3, :2],
    "broadcast_to": lambda x: x[:, :, :1].broadcast_to(2, 4, 3, 5) * 2,
    "getitem": lambda x: x[:, 1:3, ..., 0] * x[:, None, 2:, 1, 2].mT,
    "getitem by a list": lambda x: x[:, [2, 0, 2]],
    "getitem by a tensor": lambda x: x[INDEX.clamp(max=1)],
    "getitem by a mask": lambda x: x[:, torch.tensor([True, False, True, True])],
    "upsampled by torch's own operations": lambda x: (torch.ops.aten.upsample_nearest2d(x, [7, 9])
        * torch.ops.aten.upsample_bilinear2d(x, [7, 9], True)),
    "upsampled by factors": lambda x: torch.ops.aten.upsample_nearest2d(x, [13, 11], 2.2, 2.3),
    "inverse sines": lambda x: (0.9 * x.tanh()).asin() * (0.9 * x.tanh()).acos(),
    "inverse hyperbolic functions": lambda x: (0.9 * x.tanh()).atanh() * (1.1 + x.square()).acosh(),
    "slices from behind": lambda x: x[:, -3:-1] * x[:, -1:].exp() * x[:, -9:2].tanh(),
    "slices with a step": lambda x: x[:, ::2] * x[:, -3::2].exp() * x[:, 1::2, -1:].tanh(),
    "a slice of nothing": lambda x: x[:, 4:].sum(1) + x.tanh().sum(1),
    "selected from behind": lambda x: x[:, -1] * x[:, -3].exp(),
    "scattered into a slice": lambda x: torch.slice_scatter(x, x[:, :, :2].tanh(), -2, 1, 3),
    "scattered into a row": lambda x: torch.select_scatter(x, x[..., 0].exp(), -1, 2),
    "select, narrow": lambda x: x.select(1, 2) * x.narrow(1, 1, 1).squeeze(1),
    "select, narrow, split from behind": lambda x: x.select(-1, 2) * x.narrow(-2, 1, 1).split([2, 3], -1)[0].mean(-1),
    "unbind": lambda x: x.unbind(1)[0] * x.unbind(-3)[2],
    "iteration": lambda x: sum(part * (i + 1) for i, part in enumerate(x)),
    "chunk": lambda x: x.chunk(3, 2)[0] * x.chunk(3, dim=2)[2],
    "split": lambda x: x.split(2, 1)[0] * x.split([1, 2, 1], dim=1)[1],
    "cat": lambda x: torch.cat([x.relu(), x.sigmoid(), OTHER.expand(2, 4, 6, 5)], dim=-3),
    "concat, axis": lambda x: torch.concat((x.relu(), x.sigmoid()), axis=1),
    "stack": lambda x: torch.stack([x.relu(), x.sigmoid()], dim=-1),
    "roll": lambda x: x.roll((1, -2), (1, 3)) + torch.roll(x, 3, 2) + x.roll(7),
    "flip": lambda x: x.flip(1) + torch.flip(x, dims=[2, 3]),
    "roll, flip from behind": lambda x: x.roll(2, -1) + x.roll((1, 2), (-3, -2)) + x.flip(-1) + x.flip((-4, -2)),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3)),
    "constant_pad_nd": lambda x: torch.constant_pad_nd(x, (1, 2), 0.5),
    "a sparse matrix": lambda x: torch.sparse.mm(WEIGHT.to_sparse(), x.mean((0, 1)).mT),
    "elu, every scale": lambda x: torch.ops.aten.elu(x, 0.7, 1.1, 1.3),
    "mean of everything": lambda x: x.tanh().mean() * x,
    "torch.mean": lambda x: torch.mean(F.gelu(x, approximate="tanh"), dim=2).flatten(1),
    "mean, axis": lambda x: torch.mul(x.tanh(), other=x).mean(axis=(2, 3)),
    "sum": lambda x: x.tanh().sum((1, -1)) + x.sum(),
    "pools": lambda x: F.max_pool2d(F.avg_pool2d(x, 3, 2, 1), 2).flatten(1),
    "pools, one size for all axes": lambda x: (F.avg_pool2d(x, 2) * F.max_pool2d(x, 2)
        + F.avg_pool2d(x, [3], [2]).mean()),
    "hardtanh in place": lambda x: F.hardtanh_(x + 0),
    "torch.max_pool2d": lambda x: torch.max_pool2d(x, 2, 2, 0, 1, True),
    "gate (squeeze and excite)": lambda x: x * F.adaptive_avg_pool2d(x, 1).sigmoid(),
    "dropout": lambda x: F.dropout(x, 0.5, False) + F.dropout(x * 2, training=False),
    "dtype": lambda x: x.to(torch.float64).contiguous().double().clone().type_as(x),
    "detach": lambda x: x * x.detach() + x.data * torch.zeros_like(x) + (x > 0) * x,
    "attention": lambda x: F.scaled_dot_product_attention(x, 2 * x.flip(2), x.tanh()),
    "attention, scale and mask": lambda x: (F.scaled_dot_product_attention(x, x.flip(2), x.tanh(),
        attn_mask=torch.arange(6.0).double().expand(6, 6), scale=0.7)),
    "attention, bool mask": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6).tril(2).bool()),
    "attention, causal": lambda x: F.scaled_dot_product_attention(x, x.flip(2), x, is_causal=True),
    "softmax": lambda x: x.softmax(2) + torch.softmax(x, dim=-1) + F.softmax(x, 1) + x.softmax(0),
    "mask on the path": lambda x: F.scaled_dot_product_attention(x, x.flip(2), x.tanh(), x @ x.mT),
    "mask on the path, for all heads": lambda x: (F.scaled_dot_product_attention(x, x, x,
        attn_mask=(x @ x.mT).mean((0, 1)), scale=0.3)),
    "attention, one key for all queries": lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:1, 1:2].tanh()),
    "attention, queries of one key": lambda x: F.scaled_dot_product_attention(x, x[:, 1:2], x[:, :1], enable_gqa=True),
    "attention, grouped queries": lambda x: F.scaled_dot_product_attention(x, x[:, 1:3], x[:, :2], enable_gqa=True),
    "normalize": lambda x: F.normalize(x) + F.normalize(x, dim=-1) * F.normalize(x, p=3.0, dim=(2, 3)),
    "normalize below eps": lambda x: F.normalize(x, dim=-1, eps=2.5) + F.normalize(x, p=1, dim=2, eps=4.0),
    "cosine similarity": lambda x: (F.cosine_similarity(x, x[:, :1].tanh(), 2)
        * F.cosine_similarity(OTHER, x, dim=-1).mean(2, True)),
    "distances": lambda x: (F.pairwise_distance(x, x.mean(2, keepdim=True)).unsqueeze(3)
        * torch.cdist(x, x.tanh().flip(2)) + F.pairwise_distance(OTHER, x[:1], p=1.0, keepdim=True)
        + torch.cdist(WEIGHT, x, p=3.0)),
    "bilinear": lambda x: F.bilinear(x[..., :3], x.tanh(), FILTERS.flatten(2)[:, :3, :5], WEIGHT[0, :3]),
    "norms of vectors": lambda x: (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) * torch.linalg.vector_norm(x)
        + torch.linalg.vector_norm(x, 3, -1, True) + torch.linalg.vector_norm(x, ord=1, dim=2)[:, :, None]),
    "norm": lambda x: (x.norm(dim=1, keepdim=True) * x.norm(1.5, (2, 3), keepdim=True) + torch.norm(x, 2)
        + x.norm("fro")),
    "linalg.norm": lambda x: (torch.linalg.norm(x, dim=(2, 3), keepdim=True)
        * torch.linalg.norm(x, 3, dim=-1, keepdim=True) + torch.linalg.norm(x)),
    "var": lambda x: (x.var(1, keepdim=True) * x.var() + torch.var(x, dim=(2, 3), correction=0, keepdim=True)
        + x.var(False)),
    "std": lambda x: x.std((1, 2), False, True) + torch.std(x, 3, correction=2).unsqueeze(3) * x.std(),
    "var_mean": lambda x: ((lambda v, m: (x - m) / (v + 0.1))(*torch.var_mean(x, 1, keepdim=True))
        + torch.std_mean(x, dim=(1, 2), keepdim=True)[1] + torch.std_mean(x)[0]),
    "amax, amin": lambda x: (x.amax((2, 3), keepdim=True) * x.amin(-1, keepdim=True)
        + torch.amax(x, dim=1, keepdim=True)),
    "amax, equal ones": lambda x: (x.relu().amin(2) + x.clamp(-0.1, 0.1).amax((1, 2)).unsqueeze(1) + x.amax()
        + x.mean(2) + torch.cat([x, x], 2).amax(2)),
    "max, min": lambda x: (x.max(1)[0] * torch.min(x, dim=1).values + x.max(-1, keepdim=True).values[:, 0] * x.max()
        + x.min()),
    "maximum": lambda x: (torch.maximum(x, x.mean(1, keepdim=True)) + torch.minimum(x.tanh(), OTHER)
        * torch.max(x, x.flip(1))),
    "maximum, equal ones": lambda x: torch.maximum(x.relu(), x.mul(2).relu()) + torch.min(OTHER, x) + x.fmax(0 * x),
    "logsumexp": lambda x: x.logsumexp((1, 3)).unsqueeze(1) + torch.logsumexp(x, -1, keepdim=True)[:, 0],
    "log_softmax": lambda x: (x.log_softmax(1) + F.log_softmax(x, dim=-1) * torch.log_softmax(x, 2)
        + F.softmin(x, dim=1)),
    "addcmul": lambda x: (torch.addcmul(x, x.tanh(), x.mean(1, keepdim=True), value=0.3)
        + torch.addcmul(OTHER, OTHER, x)),
    "addcdiv": lambda x: torch.addcdiv(x, x.tanh(), 2 + x.mean(1, keepdim=True).square(), value=0.3).addcdiv_(x, OTHER),
    "lerp": lambda x: torch.lerp(x, x.mean(1, keepdim=True), x.sigmoid()) + x.tanh().lerp(OTHER, 0.3),
    "einsum": lambda x: (torch.einsum("nchw,ndhw->ncd", x, x.tanh()).sum(2)[..., None]
        * torch.einsum("nchw->nc", x)[..., None]),
    "einsum, ellipsis": lambda x: (torch.einsum("...ij, kj -> ...ik", x, WEIGHT)
        + torch.einsum("...i,...i->...", x, x)[..., None]),
    "einsum, implicit": lambda x: (torch.einsum("nchw,vw", x, WEIGHT)
        + torch.einsum("...hw,vw", x, WEIGHT).movedim(0, 1).mT[:, :, :1].mean()),
    "einsum, broadcast": lambda x: (torch.einsum("...hw,...hw->...w", x[:, :1], x)[:, :, None]
        * torch.einsum("AaZz,AaZz->AaZz", x[:, :1], x)),
    "einsum of three": lambda x: torch.einsum("nchw,vw,ncvh->nhv", x, WEIGHT, x[:, :, :, :1].expand(-1, -1, -1, 6)),
    "einsum of a list": lambda x: (torch.einsum("nchw,nchv->nwv", [x, x.sigmoid()])
        + torch.einsum(x, [0, 1, 2, 3], [0]).mean()),
    "einsum of a tuple": lambda x: torch.einsum("nchw,nchv->nwv", (x, x.tanh())),
    "einsum, an ellipsis of nothing": lambda x: torch.einsum("...hw,...wv->...hv", x[..., :5], WEIGHT.T),
    "einsum, a sum on its own": lambda x: torch.einsum("nchw,nd->nd", x, x[:, :, 0, 0]),
    "vectors": lambda x: (x @ x[0, 0, 0] + (x[0, 0, :, 0] @ x)[..., :1] + torch.mv(x[0, 0], x[1, 1, 2])
        + x[0, 0, 0].dot(x[1, 0, 0])),
    "vectors, constant": lambda x: ((x @ WEIGHT[0]).unsqueeze(3) * (WEIGHT[:, 0] @ x).unsqueeze(2)
        + (x[0, 0, 0] @ WEIGHT.T)[:5]),
    "matmul, constant before": lambda x: x.__rmatmul__(WEIGHT.T) + torch.outer(x[0, 0, 0], x[0, 0, 1]),
    "addmm": lambda x: (torch.addmm(x[0, 0], x[0, 1], x[1, 1].T @ x[1, 0], beta=0.5, alpha=2)
        + torch.addmm(x[0, 0, 0], WEIGHT, x[0, 0, :5])),
    "baddbmm": lambda x: (torch.baddbmm(x[:, 0, :, :1], x[:, 1], x[:, 2].mT, beta=2)
        + torch.addmv(x[0, 0, :, 0], x[0, 0], x[0, 0, 0], alpha=3)),
    "conv2d, its weight on the path": lambda x: (F.conv2d(x, x[:, :, :3, :2], x[0, 0, :2, 0], 2, (1, 0), 2)
        + F.conv2d(FIXED, x[:, :2, :3, :2], None, 2, (1, 0), 2, groups=2)),
    "conv1d of one image, its weight on the path": lambda x: F.conv1d(x[0, 0], x[0, :, :, :3], x[0, :, 0, 0]),
    "conv_transpose2d, its weight on the path": lambda x: (F.conv_transpose2d(x, x[..., :3, :2].mT.repeat(2, 1, 1, 1),
        x[0, 0, :4, 0], 2)),
    "conv_transpose1d of one image": lambda x: F.conv_transpose1d(x[0, 0], x[0, 0, :, None, :3]),
    "fold, unfold": lambda x: F.fold(x.flatten(1, 2)[..., :4], (4, 4), 2, stride=2) + F.unfold(x[0], 2)[:6, :4].mean(),
    "unfold of a tensor": lambda x: x.unfold(2, 3, 2) * x.unfold(-2, 3, 2),
    "interpolate, nearest": lambda x: F.interpolate(x, (9, 3)) + F.interpolate(x, (9, 3), mode="nearest-exact"),
    "interpolate, bilinear": lambda x: (F.interpolate(x, scale_factor=[1.7, 0.7], mode="bilinear")
        + F.interpolate(x, scale_factor=(1.7, 0.7), mode="nearest")
        + F.interpolate(x, (10, 3), mode="bilinear", align_corners=True)),
    "interpolate, bicubic": lambda x: (F.interpolate(x, scale_factor=1.5, mode="bicubic", align_corners=False)
        + F.interpolate(x, scale_factor=1.5, mode="bicubic", recompute_scale_factor=True)),
    "interpolate, antialias": lambda x: (F.interpolate(x, (4, 3), mode="bicubic", antialias=True)
        + F.interpolate(x, (4, 3), mode="bilinear", antialias=True)),
    "interpolate, area": lambda x: (F.interpolate(x, (4, 3), mode="area")
        + F.interpolate(x, scale_factor=0.67, mode="area")),
    "interpolate, one and three axes": lambda x: (F.interpolate(x.flatten(2), 7, mode="linear")
        + F.interpolate(x[:, :, None], (2, 3, 7), mode="trilinear").mean((2, 3))),
    "pad, every mode": lambda x: (F.pad(x, (1, 2, 0, 3), "reflect") + F.pad(x, (1, 2, 0, 3), mode="circular")
        + F.pad(x, (1, 2, 0, 3), mode="replicate")),
    "pad of one axis": lambda x: F.pad(x.flatten(2), (3, 4), "reflect"),
    "repeat, tile": lambda x: x.repeat(2, 1, 1, 3, 1)[0] * torch.tile(x, (3, 1)),
    "repeat_interleave": lambda x: (x.repeat_interleave(2, 1)
        * torch.repeat_interleave(x, torch.tensor([1, 3, 0, 4]), dim=1)),
    "index_select, gather": lambda x: (x.index_select(1, INDEX)
        * x.gather(1, INDEX.reshape(1, 3, 1, 1).expand(2, 3, 6, 5))
        + torch.take_along_dim(x, INDEX.reshape(1, 3, 1, 1), dim=1)),
    "index_copy": lambda x: x.index_copy(-3, SOME, x[:, 2:].exp()) * x.index_copy(2, SOME, x[:, :, :2].tanh()),
    "scatter": lambda x: x.scatter(-3, PLACES, x[:, :3, 2:].exp()) * x.scatter(1, PLACES, 0.3),
    "scatter of one number": lambda x: x.flatten().scatter(0, SOME[:1], x.mean()).tanh(),
    "scatter_add": lambda x: x.scatter_add(-3, PLACES, x[:, :3, 2:].exp()),
    "cumprod, prod along any dimension": lambda x: (x.cumprod(-3) * x.cumprod(2) + x.prod(-3, keepdim=True)
        * x.prod(2, keepdim=True) + x.prod(1).prod(-1).mean()),
    "masked_select": lambda x: x.masked_select(OTHER > 0) * x[:, OTHER[:, 0, 0] > 0].mean(),
    "movedim, rot90, diagonal": lambda x: x.movedim(1, -1).rot90(1, (1, 2)).diagonal(0, 1, 2) * x.ravel()[0],
    "shuffles": lambda x: F.pixel_shuffle(x, 2).mean((2, 3)) * torch.channel_shuffle(x, 2)[:, :1, 0, 0],
    "cumsum": lambda x: x.cumsum(1) * torch.cumsum(x, dim=-1),
    "setitem": lambda x: written(x),
    "setitem on a constant": lambda x: written_into_zeros(x),
    "copy_, fill_, zero_": lambda x: copied(x),
    "index_add": lambda x: (x.index_add(1, INDEX, x[:, :3].tanh(), alpha=2)
        + torch.index_add(FIXED, -3, INDEX, x[:, 1:])),
    "masked_fill by a value on the path": lambda x: x.masked_fill(OTHER > 0, x.mean()),
    "sin, cos, atan": lambda x: x.sin() * torch.cos(x) + x.atan() + torch.arctan(x),
    "logarithms": lambda x: (1 + x * x).log1p() + (2 + x * x).log2() * (2 + x * x).log10() + (2 + x * x).reciprocal(),
    "exponentials": lambda x: x.expm1() + torch.exp2(x) * 3 ** x.tanh() + x.nan_to_num(),
    "clamp_min, clamp_max": lambda x: x.clamp_min(-0.3) * torch.clamp_max(x, 0.4) + F.threshold(x, 0.1, 20.0),
    "activations in place": lambda x: F.selu_(3 * F.celu_(3 * F.rrelu_(3 * F.threshold_(x + 0, -0.3, 0.1)))),
    "prelu": lambda x: F.prelu(x, OTHER[:, 0, 0]) * torch.prelu(x, OTHER[0, 0, 0]),
    "norms as functions": lambda x: F.group_norm(x, 2) + F.instance_norm(x) * F.rms_norm(x, (5,), OTHER[0, 0]),
    "identical outputs": lambda x: F.dropout(x.contiguous(), training=False).to(torch.float64),
    # Comparisons, masks and constants of autograd, which are made again at another start.
    "where, leaky": lambda x: torch.where(x > 0, x, 0.2 * x),
    "a mask, written into": lambda x: (mask := x > 0, mask[:, 0].fill_(True), mask.logical_not_(),
        x * mask + x.masked_fill(mask & (x < 1), 0.0).tanh())[-1],
    "a mask of numbers": lambda x: (mask := (x > 0).to(x.dtype), mask.mul_(0.5),
        mask * x + mask.flatten(2).sum(2, keepdim=True).unsqueeze(-1) * x.square())[-1],
    "a buffer of a mask": lambda x: (mask := torch.zeros_like(x, dtype=torch.bool), mask.__ior__(x > 0),
        torch.where(mask, x, x.tanh()))[-1],
    "a gain, written by a mask": lambda x: (gain := torch.ones_like(x), gain.__setitem__(x > 0, 2.0),
        gain.masked_fill_(x > 1, 3.0), x * gain)[-1],
    "a view of a mask": lambda x: (mask := x > 0, mask.flatten(1).logical_not_(),
        torch.where(mask, x.sigmoid(), x.tanh()))[-1],
    "a mask given as out": lambda x: (mask := x > 0, torch.logical_not(mask, out=mask),
        torch.where(mask, x.sigmoid(), x.tanh()))[-1],
    "a scale without gradients": lambda x: x / (1 + torch.no_grad()(lambda x: x.square().mean((2, 3), True))(x)),
    "a sign": lambda x: x + x.sign(),
    # Rules that do not hold for these: they are what torch makes them of.
    "norms, inf": lambda x: torch.linalg.vector_norm(x, torch.inf, -1) * x.norm(-torch.inf, (1, 2), True).mean(-1),
    "norms, -1, of matrices": lambda x: (torch.linalg.vector_norm(x, -1, -1).sum(2)
        * torch.linalg.norm(x, 1, dim=(2, 3)) + torch.norm(x, torch.inf, (2, 3))),
    "normalize, distance, inf": lambda x: (
        F.normalize(x, torch.inf) * F.pairwise_distance(x, x.exp(), torch.inf, 0, True)),
    "batch norm of the batch": lambda x: (F.batch_norm(x, None, None, training=True)
        + F.batch_norm(x, torch.zeros(4).double(), 3 * torch.ones(4).double(), training=True)),
    "einsum, diagonal": lambda x: torch.einsum("nchh->nch", x[:, :, :5]) + torch.einsum("...hh,...h->...", x[:, :, :5],
        x[..., :5, 0])[..., None],
    "pow, constants": lambda x: x.sigmoid().pow(torch.arange(1.0, 6).double()) + torch.pow(2.0, x),
    "an output without dimensions": lambda x: x.tanh().mean(),
    "prod of everything": lambda x: x[:, :, 0, 0].prod() * x,
    "clamp by a constant": lambda x: x.clamp(max=OTHER[:, :, :1]) * 2,
    "reductions over no dimension": lambda x: (x.sum(dim=()) * x.mean(dim=[]) + torch.amax(x, ())) * x,
    "attention, keys of all images": lambda x: F.scaled_dot_product_attention(x, FIXED[:1].sin(), x[:1])
        + F.scaled_dot_product_attention(FIXED[:1], x, FIXED[:1]),
}  # fmt: skip


def _has_gradient(function: Callable[[Tensor], Tensor]) -> bool:
    """Return whether this version of torch knows the gradient of a function."""
    x = torch.ones(3, requires_grad=True)
    try:
        return bool(torch.autograd.grad(function(x), x))
    except RuntimeError:
        return False


if _has_gradient(lambda x: torch.aminmax(x).max):
    FUNCTIONS |= {
        "aminmax": lambda x: (lambda low, high: low * high + high)(*torch.aminmax(x, dim=2, keepdim=True)),
        "aminmax of everything": lambda x: torch.aminmax(x).max * x,
        "aminmax, one alone": lambda x: torch.aminmax(x, dim=-1).min,
    }

# --- functions of rows x (2, 3), and of signals: forms of arguments, of which one or another is on the path -----------

ROW, DENSE, BIAS = random(3, seed=1) + 3, random(5, 3, seed=2), random(5, seed=3)
POSITIVE = random(4, seed=12).abs() + 0.5
KERNELS = random(6, 2, 3, seed=5), random(5, 3, 3, 3, seed=7), random(5, 3, 2, 2, 2, seed=9)


def batch_norm(x: Tensor, *weights_and_moments: Tensor | None, training: bool = False) -> Tensor:
    """Call what the functional form calls, and a replay: it has no names of arguments."""
    return torch.batch_norm(x, *weights_and_moments, training, 0.1, 1e-2, False)


FORMS = {
    "dense, input and weight of x": lambda x: F.linear(x, x),
    "a number": lambda x: 2 * (1 - x / 3) + 1 / x,
    "a tensor": lambda x: (x - ROW) / ROW * ROW + ROW / x,
    "an expanded tensor": lambda x: x * ROW[:1].expand(2, 3) - ROW.expand(2, 3),
    "integers": lambda x: x * torch.arange(3) + torch.tensor(2),
    "a mask": lambda x: x * (x > 0),
    "another precision": lambda x: x * ROW.float(),
    "alpha": lambda x: torch.add(x, ROW, alpha=2).sub(x, alpha=3) + torch.sub(ROW, x, alpha=3),
    "alpha of x": lambda x: torch.add(ROW, x, alpha=2),
    "a sum, x second": lambda x: ROW + x,
    "a difference, x second": lambda x: ROW - x,
    "a product, x second": lambda x: ROW * x,
    "rounded": lambda x: torch.div(x, ROW, rounding_mode="floor") + x,
    "names": lambda x: torch.mul(input=x, other=ROW),
    "masked by -inf": lambda x: (x.masked_fill(x > 0.5, -torch.inf) * 2 / ROW - 1).softmax(1),
    "from an infinite constant": lambda x: torch.minimum(x, x + 1e39).float() * 2,
    "a view of a product": lambda x: (x * ROW[:2, None].expand(2, 3)).view(6),
    "a view of a sum": lambda x: (x + torch.ones(4, 1, 1)).view(24),
    "vmap": torch.func.vmap(lambda row: 2 * row / 3 + F.linear(row, DENSE[:3])),
    "in place": lambda x: x.clone().mul_(ROW).add_(1),
    "itself": lambda x: x * x - x / (x + 5),
    "dense": lambda x: F.linear(x, DENSE, BIAS),
    "dense, no bias": lambda x: F.linear(x, DENSE),
    "dense, named bias": lambda x: F.linear(x, DENSE, bias=BIAS),
    "dense, names": lambda x: F.linear(x, weight=DENSE, bias=BIAS),
    "dense, weight of x": lambda x: F.linear(x, x[:1] * DENSE, BIAS),
    "dense, bias of x": lambda x: F.linear(x, DENSE, bias=x.sum() * BIAS),
    "dense, only its weight of x": lambda x: F.linear(ROW, x),
    "dense, only its bias of x": lambda x: F.linear(ROW, DENSE[:3], x[0]),
    "dense, of constants": lambda x: x + F.linear(ROW[None], DENSE[:3]),
    "rows": lambda x: torch.cat([x, ROW[None], 2 * x]),
    "rows, named": lambda x: torch.cat(tensors=[ROW[None], x], dim=0),
    "columns": lambda x: torch.cat([ROW.expand(2, 3), x], 1),
    "a stack": lambda x: torch.stack([x, ROW.expand(2, 3)], dim=1),
    "a quotient added": lambda x: torch.addcdiv(ROW, x, ROW),
    "a quotient added to x": lambda x: torch.addcdiv(x, ROW, ROW),
    "a quotient by x added": lambda x: torch.addcdiv(ROW, ROW, x.square() + 1),
    "a product added": lambda x: torch.addmm(BIAS, x, DENSE.T),
    "a product added to x": lambda x: torch.addmm(x, ROW.expand(2, 3), DENSE[:3]),
    "a product with x added": lambda x: torch.addmm(BIAS[:3], DENSE[:, :2], x),
    "batch norm of features": lambda x: batch_norm(x, ROW, None, BIAS[:3], ROW),
    "batch norm, only its weight of x": lambda x: batch_norm(POSITIVE.view(2, 2), x[0, :2], None, ROW[:2], ROW[1:]),
    "batch norm, only its bias of x": lambda x: batch_norm(POSITIVE.view(2, 2), None, x[0, :2], ROW[:2], ROW[1:]),
}  # fmt: skip
LARGER = {
    "batch norm": ((2, 4, 7), lambda x: batch_norm(x, random(4, seed=11), BIAS[1:], BIAS[:4], POSITIVE)),
    "batch norm, plain": ((2, 3, 5, 5), lambda x: batch_norm(x, None, None, BIAS[:3], ROW)),
    "batch norm of the batch": ((2, 4, 7), lambda x: batch_norm(x, POSITIVE, BIAS[1:], None, None, training=True)),
    "conv1d": ((2, 4, 7), lambda x: F.conv1d(x, KERNELS[0], BIAS[:1].expand(6), 2, 1, 1, 2)),
    "conv2d": ((2, 3, 5, 5), lambda x: F.conv2d(x, KERNELS[1], BIAS, stride=2, padding=1)),
    "conv3d": ((2, 3, 4, 4, 4), lambda x: torch.conv3d(x, KERNELS[2], bias=BIAS, dilation=2)),
}  # fmt: skip

# --- functions of h (3, 6, 7, 7) --------------------------------------------------------------------------------------

ORDER, FOUR = torch.tensor([3, 0, 5, 2, 1, 4]), torch.tensor([0, 2, 2, 5])
PICKED = torch.randint(0, 6, (3, 6, 7, 7), generator=torch.Generator(device="cpu").manual_seed(3))
APART = random(3, 6, 7, 7, seed=3).argsort(1)  # without repetition, for which torch's gradient of scatter is wrong
COO = (const(5, 7) * (const(5, 7) > 0)).to_sparse().coalesce()
GRID = 1.17 * torch.tanh(2 * random(3, 5, 4, 2, seed=9))
BOXES = torch.tensor([[0, 0.3, 0.4, 5.2, 4.7], [1, 1.1, 0.0, 6.0, 6.0], [2, 2.0, 1.5, 4.4, 6.6]], dtype=torch.float64)

MORE: dict[str, Callable[[Tensor], Any]] = {
    "masked_scatter": lambda h: h.masked_scatter(const(3, 6, 7, 7) > 0, h.flip(1)),
    "where, constant condition": lambda h: torch.where(const(7, 7) > 0, h, h.exp()),
    "times a mask, cast": lambda h: h * (h > 0.1).double() + (h < 0).to(h.dtype),
    "scatter into zeros": lambda h: torch.zeros_like(h).scatter_(1, APART, h),
    "scatter_add into zeros": lambda h: h.new_zeros(3, 6, 7, 7).scatter_add_(1, PICKED, h),
    "scatter_reduce mean": lambda h: h.scatter_reduce(1, PICKED, h.sin(), "mean"),
    "scatter_reduce amax": lambda h: h.scatter_reduce(1, PICKED, h.sin(), "amax"),
    "index_fill": lambda h: h.index_fill(1, ORDER[:3], 0.7),
    "gather, of the largest": lambda h: h.gather(1, h.argmax(1, keepdim=True)),
    "take_along_dim, of the order": lambda h: h.sin().take_along_dim(h.argsort(1), 1),
    "take": lambda h: h.take(PICKED[:, 0]),
    "advanced indices, two": lambda h: h[:, FOUR, :, FOUR].transpose(0, 1),
    "advanced indices, with slices": lambda h: h[:, ORDER[:3, None], 1:6, FOUR].permute(2, 0, 1, 3),
    "one_hot": lambda h: h * F.one_hot(h.argmax(1), 6).permute(0, 3, 1, 2),
    "diag_embed": lambda h: h[:, :, 0].diag_embed(),
    "trace": lambda h: h * torch.vmap(torch.trace)(h[:, 0])[:, None, None, None],
    "topk": lambda h: h.topk(3, 1).values,
    "topk and its indices": lambda h: h.sin().gather(2, h.topk(3, 2).indices),
    "topk mask": lambda h: h * (h >= h.flatten(1).topk(9).values[:, -1, None, None, None]),
    "sort": lambda h: h.sort(1, descending=True)[0],
    "sort of rows": lambda h: h.flatten(2).sort(-1).values * const(49),
    "msort": lambda h: h.transpose(0, 1).msort().transpose(0, 1),
    "kthvalue": lambda h: h.kthvalue(3, 1).values,
    "median": lambda h: h.flatten(2).median(-1).values,
    "quantile": lambda h: h.flatten(2).quantile(0.3, -1),
    "max and its indices": lambda h: (m := h.max(1), h.sin().gather(1, m.indices[:, None]), m.values)[1:],
    "cummax": lambda h: h.cummax(2)[0],
    "cummin": lambda h: h.cummin(2)[0],
    "clamp by tensors": lambda h: h.clamp(min=-const(7).abs(), max=h.flip(1).abs()),
    "trunc, sign": lambda h: h * h.sign() + (3 * h).trunc(),
    "searchsorted": lambda h: h * torch.bucketize(h, const(4).sort()[0]),
    "matmul, broadcast": lambda h: const(2, 1, 4, 6) @ h.flatten(2)[:, None, None],
    "ger, addr": lambda h: torch.addr(h[:, 0, 0], h[:, 1, 1, 1], h[0, 2, 3]),
    "addbmm": lambda h: torch.addbmm(h[0, 0, :3, :3], h[:, :3, 0], h[:, 3:, 1].mT),
    "bilinear, constant": lambda h: F.bilinear(h, const(3, 6, 7, 2), const(4, 7, 2)),
    "tensordot": lambda h: torch.tensordot(h, const(6, 7, 5), ([1, 3], [0, 1])),
    "tensordot, both": lambda h: torch.tensordot(h, h, ([1, 2], [1, 2])),
    "kron": lambda h: torch.kron(h[:, :2, 0], const(1, 2, 2)),
    "kron, both": lambda h: torch.kron(h[:, 0, :2], h[:1, 1, :2]),
    "chain_matmul": lambda h: torch.linalg.multi_dot([h.flatten(1), const(294, 5), const(5, 6)]),
    "inner": lambda h: torch.inner(h, const(4, 7)),
    "cross": lambda h: torch.linalg.cross(h[:, :3], h[:, 3:], dim=1),
    "matrix_power": lambda h: torch.linalg.matrix_power(h, 3),
    "pad, negative": lambda h: F.pad(h, (-1, 2, -2, 0)),
    "pad, replicate 3d": lambda h: F.pad(h[:, None], (1, 2, 0, 1, 2, 0), mode="replicate"),
    "pad, circular 1d": lambda h: F.pad(h.flatten(2), (3, 2), mode="circular"),
    "channel shuffle by views": lambda h: h.view(3, 2, 3, 7, 7).transpose(1, 2).contiguous().view(3, 6, 7, 7).sin(),
    "split by sizes": lambda h: [p.sin() for p in h.split([2, 1, 3], 1)],
    "tensor_split": lambda h: h.tensor_split(4, 1)[2] * 2,
    "hsplit, vstack": lambda h: torch.hstack(h.hsplit(3)) * const(7),
    "view_as": lambda h: h.view_as(const(3, 3, 2, 49)),
    "reshape of non-contiguous": lambda h: h.transpose(1, 3).reshape(3, -1) * const(294),
    "channels last": lambda h: F.conv2d(h.to(memory_format=torch.channels_last), const(4, 6, 3, 3)),
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h, h.mean(1, keepdim=True))[1] * const(6, 1, 1),
    "movedim, swapdims": lambda h: h.movedim(1, -1).swapdims(1, 2).sin(),
    "meshgrid": lambda h: torch.meshgrid(h[:, 0, 0, 0], h[0, 0, 0], indexing="ij"),
    "cartesian_prod": lambda h: torch.cartesian_prod(h[:, 0, 0, 0], h[0, 0, 0, :2]).reshape(3, -1),
    "block_diag": lambda h: h.mean() * torch.block_diag(h[:, 0, 0], const(3, 2))[:3],
    "atleast, ravel": lambda h: torch.atleast_3d(h[:, 0, 0]) * h[:, :3].ravel().reshape(3, -1)[:, :7, None],
    "diff": lambda h: h.diff(dim=2),
    "numel, size": lambda h: h.sum((2, 3)) / (h.shape[2] * h.size(3)) + h[0].numel(),
    "real": lambda h: h.real.sin(),
    "interpolate, nearest 1d": lambda h: F.interpolate(h.flatten(2), 20),
    "interpolate, nearest 3d": lambda h: F.interpolate(h[:, None], (4, 9, 8)),
    "nansum, nanmean": lambda h: h.nansum(1) + h.nanmean(1),
    "logcumsumexp": lambda h: h.logcumsumexp(2),
    "norm 0.5": lambda h: torch.linalg.vector_norm(h, 0.5, 1),
    "cdist, p=1": lambda h: torch.cdist(h.flatten(2), const(5, 49), p=1),
    "cdist, inf": lambda h: torch.cdist(h.flatten(2), const(5, 49), p=float("inf")),
    "cdist, by products": lambda h: torch.cdist(h.flatten(2), const(30, 49), compute_mode="use_mm_for_euclid_dist"),
    "pdist": lambda h: torch.stack([F.pdist(row) for row in h.flatten(2)]),
    "losses": lambda h: (F.mse_loss(h, const(7).expand(3, 6, 7, 7), reduction="none")
        + F.smooth_l1_loss(h, const(3, 6, 7, 7), reduction="none")),
    "covariance": lambda h: torch.stack([torch.cov(row) for row in h.flatten(2)]),
    "corrcoef": lambda h: torch.stack([torch.corrcoef(row) for row in h.flatten(2)]),
    "trapezoid": lambda h: torch.trapezoid(h, dim=2),
    "determinant": lambda h: torch.linalg.det(h + 3 * torch.eye(7)),
    "inverse": lambda h: torch.linalg.inv(h + 3 * torch.eye(7)),
    "solve": lambda h: torch.linalg.solve(h + 3 * torch.eye(7), const(7, 2)),
    "max_pool2d with indices": lambda h: F.max_pool2d(h, 2, return_indices=True)[0],
    "max_unpool1d": lambda h: F.max_unpool1d(*F.max_pool1d(h.flatten(2), 2, return_indices=True), 2),
    "max_unpool2d": lambda h: F.max_unpool2d(*F.max_pool2d(h[..., :6, :6], 2, return_indices=True), 2),
    "max_unpool2d of something else": lambda h: (F.max_unpool2d(h[..., :3, :3].sin(),
        F.max_pool2d(h[..., :6, :6], 2, return_indices=True)[1], 2)),
    "max_unpool3d": lambda h: F.max_unpool3d(*F.max_pool3d(h[:, None][..., :6, :6], 2, return_indices=True), 2),
    "lp_pool1d": lambda h: F.lp_pool1d(h.flatten(2).exp(), 3, 4),
    "lp_pool2d": lambda h: F.lp_pool2d(h, 2, 3, 2),
    "lp_pool3d": lambda h: F.lp_pool3d(h[:, None], 2, 2),
    "ldexp": lambda h: torch.ldexp(h, PICKED),
    "powers": lambda h: h**3 + h.abs() ** 0.5 + 2**h + h.abs().pow(h.flip(1)),
    "sdpa, constant keys": lambda h: F.scaled_dot_product_attention(h, const(3, 6, 5, 7), const(3, 6, 5, 4)),
    "sdpa, three dimensions": lambda h: F.scaled_dot_product_attention(*[h.flatten(2)[..., :8].mT] * 3),
    "sdpa, mask of one dimension": lambda h: F.scaled_dot_product_attention(*[h.flatten(2)] * 3, const(6)),
    "sparse, COO": lambda h: torch.sparse.mm(COO, h[:, 0, 0].T).T + (COO @ h[:, 0, 0].T.sin().mul_(2)).T,
    "sparse, CSR": lambda h: torch.sparse.mm(COO.to_sparse_csr(), h[:, 0, 0].T).T,
    "sparse of a graph": lambda h: torch.stack([torch.sparse.mm(COO, row.sin()) for row in (2 * h[:, 0]).unbind(0)]),
    "roi_align": lambda h: torchvision.ops.roi_align(h, BOXES, 3, 0.9, 2, True),
    "roi_pool": lambda h: torchvision.ops.roi_pool(h, BOXES, 3),
    "ps_roi_align": lambda h: torchvision.ops.ps_roi_align(h[:, :4], BOXES, 2),
    "deform_conv2d": lambda h: torchvision.ops.deform_conv2d(
        h, const(3, 18, 5, 5), const(4, 6, 3, 3), mask=h[:, :1, :5, :5].sigmoid().expand(3, 9, 5, 5)),
    "deform_conv2d, offsets of activations": lambda h: torchvision.ops.deform_conv2d(
        h, F.conv2d(h, const(18, 6, 3, 3)), const(4, 6, 3, 3), const(4)),
    "grid_sample, 3d": lambda h: F.grid_sample(h[:, None], const(3, 2, 3, 4, 3), align_corners=False),
    "spatial transformer of a constant": lambda h: F.grid_sample(const(3, 2, 8, 8), moved(h, (3, 2, 5, 5))),
}  # fmt: skip


def moved(h: Tensor, size: Any = None) -> Tensor:
    """Return a grid that activations move."""
    theta = h.mean((2, 3)) @ const(6, 6) + torch.tensor([1.0, 0.1, 0.05, -0.1, 0.9, -0.07])
    return F.affine_grid(theta.view(3, 2, 3), size or h.size(), align_corners=False)


for _mode in ("bilinear", "nearest", "bicubic"):
    for _padding in ("zeros", "border", "reflection"):
        _options: Any = {"mode": _mode, "padding_mode": _padding}
        MORE[f"grid_sample, {_mode}, {_padding}"] = partial(
            F.grid_sample, grid=GRID, align_corners=_padding == "border", **_options
        )
        if _mode != "nearest":
            MORE[f"spatial transformer, {_mode}, {_padding}"] = lambda h, options=_options: F.grid_sample(
                h, moved(h), align_corners=False, **options
            )
for _name in (
    "sin", "cos", "tan", "atan", "asinh", "sinh", "cosh", "exp", "expm1", "erf", "abs", "neg", "square", "sigmoid",
    "tanh", "relu", "sinc", "i0", "deg2rad", "positive", "arctan", "erfc", "exp2", "frac",
):  # fmt: skip
    MORE[f"torch.{_name}"] = getattr(torch, _name)
for _name in ("log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma"):
    MORE[f"torch.{_name}"] = lambda h, name=_name: getattr(torch, name)(h.abs() + 0.5)

# --- in place, on g (3, 6, 7, 7) --------------------------------------------------------------------------------------

IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "relu_": lambda g: g.relu_(),
    "torch.relu_": torch.relu_,
    "mul_": lambda g: g.mul_(1.7),
    "mul_ of a tensor": lambda g: g.mul_(const(6, 1, 1)),
    "mul_ of itself": lambda g: g.mul_(g.mean()),
    "add_": lambda g: g.add_(const(6, 1, 1), alpha=2),
    "+=": lambda g: g.__iadd__(const(7)),
    "sub_, div_": lambda g: g.sub_(0.3).div_(const(6, 1, 1).exp()),
    "sigmoid_": lambda g: g.sigmoid_(),
    "tanh_": lambda g: g.tanh_(),
    "exp_": lambda g: g.exp_(),
    "clamp_": lambda g: g.clamp_(-0.3, 0.4),
    "leaky_relu_": lambda g: F.leaky_relu_(g, 0.2),
    "hardtanh_": lambda g: F.hardtanh_(g, -0.4, 0.3),
    "pow_": lambda g: g.pow_(2),
    "neg_": lambda g: g.neg_(),
    "lerp_": lambda g: g.lerp_(const(6, 7, 7), 0.3),
    "addcmul_": lambda g: g.addcmul_(const(6, 1, 1), g.detach().new_ones(7), value=0.5),
    "masked_fill_": lambda g: g.masked_fill_(g > 0.2, 0.1),
    "zero_": lambda g: (g[:, :2].zero_(), g)[1],
    "fill_": lambda g: (g[:, :2].fill_(0.3), g)[1],
    "dropout": lambda g: F.dropout(g, 0.5, training=False, inplace=True),
    "squeeze_, unsqueeze_": lambda g: g.unsqueeze_(1).squeeze_(1).sin_(),
    "transpose_": lambda g: g.transpose_(2, 3).cos_(),
    "t_": lambda g: g.flatten(1).clone().t_().sin_().t(),
    "swapaxes_": lambda g: g.swapaxes_(1, 2).sin_(),
}

# --- layers -----------------------------------------------------------------------------------------------------------

SPATIAL, VOLUME = (3, 4, 7, 6), (3, 4, 3, 5, 4)
_ARGUMENTS = {"Threshold": (0.1, 0.3), "GLU": (1,), "PReLU": (4,), "Softmin": (1,), "Softmax": (1,), "LogSoftmax": (1,)}
LAYERS: dict[tuple[int, ...], list[nn.Module]] = {
    SPATIAL: [
        *(getattr(nn, name)(*_ARGUMENTS.get(name, ())) for name in nn.modules.activation.__all__ if name[:3] != "Mul"),
        nn.Hardtanh(-0.5, 0.7), nn.LeakyReLU(0.2), nn.ELU(0.7), nn.GELU(approximate="tanh"), nn.CELU(0.5),
        nn.Mish(True), nn.PReLU(), nn.Threshold(0.2, -3.0), nn.GLU(), nn.Softmax(-1), nn.LogSoftmax(-1),
        nn.Identity(), nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), StochasticDepth(0.3, "row"),
        nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Hardtanh(inplace=True), nn.SELU(inplace=True),
        nn.CELU(inplace=True), nn.RReLU(inplace=True), nn.ReLU6(inplace=True), nn.SiLU(inplace=True),
        nn.Hardswish(inplace=True), nn.Threshold(0.1, -0.3, inplace=True),
        nn.Flatten(), nn.Flatten(0), nn.Unflatten(1, (2, 2)), Permute([0, 2, 3, 1]), Permute([1, 0, 2, 3]),
        nn.Linear(6, 5), nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2),
        nn.Conv2d(4, 6, 3, padding="same"), nn.Conv2d(4, 6, 3, padding="valid"),
        *(nn.Conv2d(4, 5, 3, padding=(2, 1), padding_mode=mode) for mode in ("reflect", "replicate", "circular")),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.ConvTranspose2d(4, 2, (3, 2), (1, 3), (1, 0), (0, 2), dilation=(2, 1)),
        nn.ConvTranspose2d(4, 2, 2, output_padding=2, dilation=3),
        FrozenBatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False), nn.LayerNorm(6), nn.LayerNorm([7, 6], elementwise_affine=False),
        nn.GroupNorm(2, 4), nn.GroupNorm(1, 4, affine=False), nn.InstanceNorm2d(4, affine=True),
        nn.InstanceNorm2d(4, track_running_stats=True), nn.RMSNorm(6), nn.RMSNorm([7, 6], eps=1e-3),
        nn.ReflectionPad2d((1, 2, 0, 3)), nn.ReplicationPad2d(-1), nn.ConstantPad2d(2, 3.0),
        nn.PixelShuffle(2), nn.PixelUnshuffle(1), nn.ChannelShuffle(2), nn.Upsample(scale_factor=2),
        nn.UpsamplingBilinear2d((5, 9)), nn.Unfold(3, 2, 1, 2), nn.Unfold((2, 3)),
        *(nn.AdaptiveAvgPool2d(size) for size in ((1, 1), (3, 4), (9, 6), (None, 2))),
        nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), nn.AvgPool2d(2, divisor_override=3),
        nn.AvgPool2d((3, 2), (2, 3), (1, 0), divisor_override=5),
        nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.MaxPool2d(3, 1, 1, dilation=2),
        nn.AdaptiveMaxPool2d(3),
    ],
    (3, 6): [nn.Linear(6, 5), nn.BatchNorm1d(6)],
    (5, 6): [nn.GroupNorm(2, 6)],
    (3, 4, 7): [
        nn.Conv1d(4, 5, 3, padding=1), nn.BatchNorm1d(4), nn.InstanceNorm1d(4),
        nn.ConvTranspose1d(4, 5, 3, stride=2, output_padding=1), nn.AdaptiveAvgPool1d(3), nn.AvgPool1d(3, 2, 1),
        nn.MaxPool1d(3, 2, 1), nn.AdaptiveMaxPool1d(3),
    ],
    (4, 8): [nn.MaxPool1d(2), nn.AdaptiveMaxPool1d(3), nn.AdaptiveAvgPool1d(3)],
    VOLUME: [
        nn.Conv3d(4, 2, 2), nn.ConvTranspose3d(4, 2, 2), nn.AdaptiveAvgPool3d(2), nn.AvgPool3d(2, 1, 1),
        nn.MaxPool3d(2), nn.AdaptiveMaxPool3d(2),
    ],
    (3, 4, 2, 3, 2): [nn.BatchNorm3d(4)],
    (3, 5, 4): [nn.LocalResponseNorm(3, 0.7, 0.75, 1.5)],
    (3, 7, 4, 2): [nn.LocalResponseNorm(4, 0.7, 2.0, 0.5)],
    (3, 8, 18): [nn.Fold((6, 5), 2, dilation=2, padding=1, stride=(1, 2))],
}  # fmt: skip

# --- recurrence and attention, of sequences s (3, 8, 6) ---------------------------------------------------------------


def loop(cell: nn.Module, s: Tensor) -> Tensor:
    state = None
    for row in s.unbind(1):
        state = cell(row, state)
    return state


def frozen(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().requires_grad_(requires_grad=False)


FUTURE = torch.ones(8, 8, dtype=torch.bool).triu(1)
ATTENTION = partial(nn.MultiheadAttention, 6, 2, batch_first=True)
ENCODER = partial(nn.TransformerEncoderLayer, 6, 2, 12, batch_first=True)
SEQUENCES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Any]]] = {
    "nn.LSTM, state": (partial(nn.LSTM, 6, 4), lambda m, s: m(s.transpose(0, 1))[1][1].movedim(1, 0)),
    "nn.LSTM, begun": (partial(nn.LSTM, 6, 4), lambda m, s: m(s.transpose(0, 1), (s[None, :, 0, :4],) * 2)[1][0][0]),
    "nn.LSTM, projected": (partial(nn.LSTM, 6, 4, proj_size=3, batch_first=True), lambda m, s: m(s)[0]),
    "nn.GRU, state": (partial(nn.GRU, 6, 4), lambda m, s: m(s.transpose(0, 1))[1].movedim(1, 0)),
    "nn.RNN, relu": (partial(nn.RNN, 6, 4, nonlinearity="relu", batch_first=True), lambda m, s: m(s)[0]),
    "nn.LSTMCell": (partial(nn.LSTMCell, 6, 4), loop),
    "nn.GRUCell": (partial(nn.GRUCell, 6, 4), loop),
    "nn.RNNCell": (partial(nn.RNNCell, 6, 4), loop),
    "attention, trained": (ATTENTION, lambda m, s: m(s, s, s)[0]),
    "attention, trained, no weights": (ATTENTION, lambda m, s: m(s, 2 * s, s.tanh(), need_weights=False)[0]),
    "attention, frozen": (frozen(ATTENTION), lambda m, s: m(s, s, s)[0]),
    "attention, frozen, no weights": (frozen(ATTENTION), lambda m, s: m(s, s, s, need_weights=False)[0]),
    "attention, weights": (ATTENTION, lambda m, s: m(s, s, s, average_attn_weights=False)),
    "attention, mask": (ATTENTION, lambda m, s: m(s, s, s, attn_mask=FUTURE, need_weights=False)[0]),
    "attention, numbers for a mask": (
        ATTENTION, lambda m, s: m(s, s, s, attn_mask=const(6, 8, 8), need_weights=False)[0]),
    "attention, padding": (ATTENTION, lambda m, s: m(s, s, s, key_padding_mask=torch.arange(8).expand(3, 8) > 5)[0]),
    "attention, sequence first": (
        partial(nn.MultiheadAttention, 6, 3, bias=False, add_zero_attn=True),
        lambda m, s: m(s.transpose(0, 1), s.sin().transpose(0, 1), s.transpose(0, 1))[0].transpose(0, 1)),
    "attention, other widths": (partial(ATTENTION, kdim=2, vdim=4), lambda m, s: m(s, s[..., :2], s[..., 2:])[0]),
    "encoder layer": (ENCODER, lambda m, s: m(s)),
    "encoder layer, frozen": (frozen(ENCODER), lambda m, s: m(s)),
    "encoder layer, norm first": (frozen(partial(ENCODER, activation="gelu", norm_first=True)), lambda m, s: m(s)),
    "encoder layer, causal": (frozen(ENCODER), lambda m, s: m(s, src_mask=FUTURE, is_causal=True)),
    "encoder, frozen": (frozen(lambda: nn.TransformerEncoder(ENCODER(), 2)), lambda m, s: m(s)),
    "decoder layer": (partial(nn.TransformerDecoderLayer, 6, 2, 12, batch_first=True), lambda m, s: m(s, s.flip(1))),
}  # fmt: skip
for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    for _name, _options in {
        "": {}, ", two ways": {"bidirectional": True}, ", no bias": {"bias": False},
        ", two layers": {"num_layers": 2, "dropout": 0.3, "bidirectional": True},
    }.items():  # fmt: skip
        _make = partial(_kind, 6, 4, batch_first=True, **_options)
        SEQUENCES[f"nn.{_kind.__name__}{_name}"] = _make, lambda m, s: m(s)[0]
    SEQUENCES[f"nn.{_kind.__name__}, frozen"] = frozen(partial(_kind, 6, 4, batch_first=True)), lambda m, s: m(s)[0]

# --- all of them ------------------------------------------------------------------------------------------------------

OPS: dict[str, Op] = {}


def _add(name: str, *arguments: Any, **options: Any) -> None:
    assert name not in OPS, name
    OPS[name] = Op(*arguments, **options)


for _name, _call in FUNCTIONS.items():
    _add(_name, _call)
for _name, _call in FORMS.items():
    _add(f"form: {_name}", _call, (2, 3))
OPS["form: from an infinite constant"] = replace(OPS["form: from an infinite constant"], tolerance=1e-6)
for _name, (_shape, _call) in LARGER.items():
    _add(f"form: {_name}", _call, _shape)
for _name, _call in MORE.items():
    _add(_name, _call, (3, 6, 7, 7))
for _name, _call in IN_PLACE.items():
    _add(f"{_name} of a value", lambda h, f=_call: f(h * 1.5), (3, 6, 7, 7))
    _add(f"{_name} of the layer's output", _call, (3, 6, 7, 7))
    _add(f"{_name}, the value read later", lambda h, f=_call: (g := h * 1.5, f(g), g.cos())[2], (3, 6, 7, 7))
for _shape, _layers in LAYERS.items():
    for _layer in _layers:
        # torch's own gradient of a hard sigmoid has a constant in float32.
        _tolerance = 1e-7 if isinstance(_layer, nn.Hardsigmoid) else 1e-12
        _name = f"{_layer} of {_shape}"
        _count = sum(name.startswith(_name) for name in OPS)  # some do not tell all of their options
        _add(f"{_name}, {_count}" if _count else _name, lambda m, x: m(x), _shape, _layer, _tolerance)
for _name, (_make, _call) in SEQUENCES.items():
    _add(_name, _call, (3, 8, 6), _make, 1e-11)
