"""Every rule against autograd, through modules, functions and methods."""

import copy

import pytest
import torch
from reference import relative
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torchvision.ops import FrozenBatchNorm2d, Permute, StochasticDepth

from pytorch_grad_cam_pcasvm import NoClosedFormError, register_jacobian
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.rules import registry

SPATIAL = (3, 4, 7, 6)
LAYERS = [
    *((layer, SPATIAL) for layer in (nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 0.7), nn.LeakyReLU(0.2), nn.ELU(0.7))),
    *((layer, SPATIAL) for layer in (nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"))),
    *((layer, SPATIAL) for layer in (nn.Hardsigmoid(), nn.Hardswish(), nn.Identity(), nn.Dropout(), nn.Dropout2d())),
    *((layer, SPATIAL) for layer in (nn.AlphaDropout(), StochasticDepth(0.3, "row"), Permute([0, 2, 3, 1]))),
    *((layer, SPATIAL) for layer in (nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Hardtanh(inplace=True))),
    *((layer, SPATIAL) for layer in (nn.Softmax(1), nn.Softmax(-1), FrozenBatchNorm2d(4))),
    (nn.Flatten(), SPATIAL),
    (nn.Flatten(0), SPATIAL),
    (nn.Unflatten(1, (2, 2)), SPATIAL),
    (Permute([1, 0, 2, 3]), SPATIAL),
    (nn.Linear(6, 5), (3, 6)),
    (nn.Linear(6, 5), SPATIAL),
    (nn.Conv1d(4, 5, 3, padding=1), (3, 4, 7)),
    (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), SPATIAL),
    (nn.Conv2d(4, 6, 3, padding="same"), SPATIAL),
    (nn.Conv2d(4, 6, 3, padding="valid"), SPATIAL),
    (nn.Conv3d(4, 2, 2), (3, 4, 3, 5, 4)),
    (nn.BatchNorm1d(6), (3, 6)),
    (nn.BatchNorm2d(4), SPATIAL),
    (nn.BatchNorm2d(4, affine=False), SPATIAL),
    (nn.BatchNorm3d(4), (3, 4, 2, 3, 2)),
    (nn.LayerNorm(6), SPATIAL),
    (nn.LayerNorm([7, 6], elementwise_affine=False), SPATIAL),
    *((layer, SPATIAL) for layer in (nn.PReLU(), nn.PReLU(4), nn.RReLU(), nn.SELU(), nn.CELU(0.5), nn.Mish(True))),
    *(
        (layer, SPATIAL)
        for layer in (nn.Softsign(), nn.LogSigmoid(), nn.Hardshrink(), nn.Softshrink(), nn.Tanhshrink())
    ),
    *((layer, SPATIAL) for layer in (nn.Threshold(0.2, -3.0), nn.GLU(1), nn.GLU(), nn.LogSoftmax(-1), nn.Softmin(1))),
    *((layer, SPATIAL) for layer in (nn.SELU(inplace=True), nn.CELU(inplace=True), nn.RReLU(inplace=True))),
    (nn.GroupNorm(2, 4), SPATIAL),
    (nn.GroupNorm(1, 4, affine=False), SPATIAL),
    (nn.GroupNorm(2, 6), (5, 6)),
    (nn.InstanceNorm1d(4), (3, 4, 7)),
    (nn.InstanceNorm2d(4, affine=True), SPATIAL),
    (nn.InstanceNorm2d(4, track_running_stats=True), SPATIAL),
    (nn.RMSNorm(6), SPATIAL),
    (nn.RMSNorm([7, 6], eps=1e-3), SPATIAL),
    (nn.LocalResponseNorm(3, 0.7, 0.75, 1.5), (3, 5, 4)),
    (nn.LocalResponseNorm(4, 0.7, 2.0, 0.5), (3, 7, 4, 2)),
    (nn.ConvTranspose1d(4, 5, 3, stride=2, output_padding=1), (3, 4, 7)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), SPATIAL),
    (nn.ConvTranspose2d(4, 2, (3, 2), (1, 3), (1, 0), (0, 2), dilation=(2, 1)), SPATIAL),
    (nn.ConvTranspose2d(4, 2, 2, output_padding=2, dilation=3), SPATIAL),
    (nn.ConvTranspose3d(4, 2, 2), (3, 4, 3, 5, 4)),
    *(
        (nn.Conv2d(4, 5, 3, padding=(2, 1), padding_mode=mode), SPATIAL)
        for mode in ("reflect", "replicate", "circular")
    ),
    *(
        (layer, SPATIAL)
        for layer in (nn.ReflectionPad2d((1, 2, 0, 3)), nn.ReplicationPad2d(-1), nn.ConstantPad2d(2, 3.0))
    ),
    *((layer, SPATIAL) for layer in (nn.PixelShuffle(2), nn.PixelUnshuffle(1), nn.ChannelShuffle(2))),
    *((layer, SPATIAL) for layer in (nn.Upsample(scale_factor=2), nn.UpsamplingBilinear2d((5, 9)))),
    *((layer, SPATIAL) for layer in (nn.Unfold(3, 2, 1, 2), nn.Unfold((2, 3)))),
    (nn.Fold((6, 5), 2, dilation=2, padding=1, stride=(1, 2)), (3, 8, 18)),
    (nn.AdaptiveAvgPool1d(3), (3, 4, 7)),
    (nn.AdaptiveAvgPool2d((1, 1)), SPATIAL),
    (nn.AdaptiveAvgPool2d((3, 4)), SPATIAL),
    (nn.AdaptiveAvgPool2d((9, 6)), SPATIAL),
    (nn.AdaptiveAvgPool2d((None, 2)), SPATIAL),
    (nn.AdaptiveAvgPool3d(2), (3, 4, 3, 5, 4)),
    (nn.AvgPool1d(3, 2, 1), (3, 4, 7)),
    (nn.AvgPool2d(2), SPATIAL),
    (nn.AvgPool2d(3, 2, 1), SPATIAL),
    (nn.AvgPool2d(3, 2, 1, ceil_mode=True), SPATIAL),
    (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), SPATIAL),
    (nn.AvgPool2d((3, 2), (2, 3), (1, 0), divisor_override=5), SPATIAL),
    (nn.AvgPool2d(2, divisor_override=3), SPATIAL),
    (nn.AvgPool3d(2, 1, 1), (3, 4, 3, 5, 4)),
    (nn.MaxPool1d(3, 2, 1), (3, 4, 7)),
    (nn.MaxPool1d(2), (4, 8)),
    (nn.AdaptiveMaxPool1d(3), (4, 8)),
    (nn.AdaptiveAvgPool1d(3), (4, 8)),
    (nn.MaxPool2d(2), SPATIAL),
    (nn.MaxPool2d(3, 2, 1, ceil_mode=True), SPATIAL),
    (nn.MaxPool2d(3, 1, 1, dilation=2), SPATIAL),
    (nn.MaxPool3d(2), (3, 4, 4, 5, 4)),
    (nn.AdaptiveMaxPool1d(3), (3, 4, 7)),
    (nn.AdaptiveMaxPool2d(3), SPATIAL),
    (nn.AdaptiveMaxPool3d(2), (3, 4, 3, 5, 4)),
]


def name(value):
    return str(value) if isinstance(value, nn.Module) else None


def prepared(layer):
    layer = copy.deepcopy(layer).double().eval()
    for module in layer.modules():
        if hasattr(module, "running_var") and module.running_var is not None:
            torch.manual_seed(1)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
        for parameter in module.parameters(recurse=False):
            torch.manual_seed(parameter.numel())
            nn.init.normal_(parameter)
    return layer


class Start(nn.Module):
    """A target layer in front of a function; what it gives is no leaf, and belongs to nobody else."""

    def __init__(self, function):
        super().__init__()
        self.start, self.function = nn.Identity(), function

    def forward(self, x):
        return self.function(self.start(1 * x))


def pulled(function, x, targets=2, twin=None):
    """Return pullback (K, *x.shape), weights (K, N, T), and autograd's derivative of a function at x."""
    with torch.no_grad():
        passed = Path(Start(function), None, ["start"], needs="gradient").record(x)  # what is not needed is NaN
        assert relative(passed.activations[0], x) == 0, "something wrote over the activations"
        seeds = torch.randn(targets, *passed.output.shape, dtype=torch.float64)
        actual, weights = passed.pullback([seeds], 0).dense(), passed.pullback([seeds], 0).sums()
    leaf = x.clone().requires_grad_()
    y = (twin or function)(1 * leaf)
    expected = torch.stack([torch.autograd.grad(y, leaf, seed, retain_graph=True)[0] for seed in seeds])
    return actual, weights, expected


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=name)
def test_a_layer_is_pulled_back_as_by_autograd(layer, shape):
    layer = prepared(layer)
    torch.manual_seed(0)
    x = 2 * torch.randn(shape, dtype=torch.float64)
    # torch's own backward of hardsigmoid multiplies by 1/6 in float32, also in float64.
    twin = (lambda x: F.relu6(x + 3) / 6) if isinstance(layer, nn.Hardsigmoid) else None
    actual, weights, expected = pulled(layer, x, twin=twin)
    assert relative(actual, expected) < 1e-12
    sums = expected.reshape(2, *shape[:2], -1)
    # A softmax' and a LayerNorm's sums can be 0 where their terms are not.
    assert (weights - sums.sum(-1)).abs().max() < 1e-12 * sums.abs().sum(-1).max()


WEIGHT = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
OTHER = torch.randn(4, 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
WIDE = torch.randn(7, 120, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
FILTERS = torch.randn(3, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
FIXED = torch.randn(2, 4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
INDEX = torch.tensor([2, 0, 2])
SOME = torch.tensor([3, 0])
PLACES = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(7)).argsort(1)


def _has_gradient(function):
    """Return whether this version of torch knows the gradient of a function."""
    x = torch.ones(3, requires_grad=True)
    try:
        return bool(torch.autograd.grad(function(x), x))
    except RuntimeError:
        return False


# x: (2, 4, 6, 5)
FUNCTIONS = {
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
    "remainder and fmod": lambda x: (
        torch.remainder(x, 0.7) * torch.fmod(x, 0.4) + torch.remainder(x, 2 + x.flip(1).sin())
    ),
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
    "attention, a query that may look at nothing": lambda x: F.scaled_dot_product_attention(
        x, x.flip(2), x.tanh(), torch.ones(6, 6).tril(-1).bool()
    ),
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
    "upsampled by torch's own operations": lambda x: (
        torch.ops.aten.upsample_nearest2d(x, [7, 9]) * torch.ops.aten.upsample_bilinear2d(x, [7, 9], True)
    ),
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
    "pools, one size for all axes": lambda x: (
        F.avg_pool2d(x, 2) * F.max_pool2d(x, 2) + F.avg_pool2d(x, [3], [2]).mean()
    ),
    "hardtanh in place": lambda x: F.hardtanh_(x + 0),
    "torch.max_pool2d": lambda x: torch.max_pool2d(x, 2, 2, 0, 1, True),
    "gate (squeeze and excite)": lambda x: x * F.adaptive_avg_pool2d(x, 1).sigmoid(),
    "dropout": lambda x: F.dropout(x, 0.5, False) + F.dropout(x * 2, training=False),
    "dtype": lambda x: x.to(torch.float64).contiguous().double().clone().type_as(x),
    "detach": lambda x: x * x.detach() + x.data * torch.zeros_like(x) + (x > 0) * x,
    "attention": lambda x: F.scaled_dot_product_attention(x, 2 * x.flip(2), x.tanh()),
    "attention, scale and mask": lambda x: F.scaled_dot_product_attention(
        x, x.flip(2), x.tanh(), attn_mask=torch.arange(6.0).double().expand(6, 6), scale=0.7
    ),
    "attention, bool mask": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6).tril(2).bool()),
    "attention, causal": lambda x: F.scaled_dot_product_attention(x, x.flip(2), x, is_causal=True),
    "softmax": lambda x: x.softmax(2) + torch.softmax(x, dim=-1) + F.softmax(x, 1) + x.softmax(0),
    "mask on the path": lambda x: F.scaled_dot_product_attention(x, x.flip(2), x.tanh(), x @ x.mT),
    "mask on the path, for all heads": lambda x: F.scaled_dot_product_attention(
        x, x, x, attn_mask=(x @ x.mT).mean((0, 1)), scale=0.3
    ),
    "attention, one key for all queries": lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:1, 1:2].tanh()),
    "attention, queries of one key": lambda x: F.scaled_dot_product_attention(x, x[:, 1:2], x[:, :1], enable_gqa=True),
    "attention, grouped queries": lambda x: F.scaled_dot_product_attention(x, x[:, 1:3], x[:, :2], enable_gqa=True),
    "normalize": lambda x: F.normalize(x) + F.normalize(x, dim=-1) * F.normalize(x, p=3.0, dim=(2, 3)),
    "normalize below eps": lambda x: F.normalize(x, dim=-1, eps=2.5) + F.normalize(x, p=1, dim=2, eps=4.0),
    "cosine similarity": lambda x: (
        F.cosine_similarity(x, x[:, :1].tanh(), 2) * F.cosine_similarity(OTHER, x, dim=-1).mean(2, True)
    ),
    "distances": lambda x: (
        F.pairwise_distance(x, x.mean(2, keepdim=True)).unsqueeze(3) * torch.cdist(x, x.tanh().flip(2))
        + F.pairwise_distance(OTHER, x[:1], p=1.0, keepdim=True)
        + torch.cdist(WEIGHT, x, p=3.0)
    ),
    "bilinear": lambda x: F.bilinear(x[..., :3], x.tanh(), FILTERS.flatten(2)[:, :3, :5], WEIGHT[0, :3]),
    "norms of vectors": lambda x: (
        torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) * torch.linalg.vector_norm(x)
        + torch.linalg.vector_norm(x, 3, -1, True)
        + torch.linalg.vector_norm(x, ord=1, dim=2)[:, :, None]
    ),
    "norm": lambda x: (
        x.norm(dim=1, keepdim=True) * x.norm(1.5, (2, 3), keepdim=True) + torch.norm(x, 2) + x.norm("fro")
    ),
    "linalg.norm": lambda x: (
        torch.linalg.norm(x, dim=(2, 3), keepdim=True) * torch.linalg.norm(x, 3, dim=-1, keepdim=True)
        + torch.linalg.norm(x)
    ),
    "var": lambda x: (
        x.var(1, keepdim=True) * x.var() + torch.var(x, dim=(2, 3), correction=0, keepdim=True) + x.var(False)
    ),
    "std": lambda x: x.std((1, 2), False, True) + torch.std(x, 3, correction=2).unsqueeze(3) * x.std(),
    "var_mean": lambda x: (
        (lambda v, m: (x - m) / (v + 0.1))(*torch.var_mean(x, 1, keepdim=True))
        + torch.std_mean(x, dim=(1, 2), keepdim=True)[1]
        + torch.std_mean(x)[0]
    ),
    "amax, amin": lambda x: (
        x.amax((2, 3), keepdim=True) * x.amin(-1, keepdim=True) + torch.amax(x, dim=1, keepdim=True)
    ),
    "amax, equal ones": lambda x: (
        x.relu().amin(2)
        + x.clamp(-0.1, 0.1).amax((1, 2)).unsqueeze(1)
        + x.amax()
        + x.mean(2)
        + torch.cat([x, x], 2).amax(2)
    ),
    "max, min": lambda x: (
        x.max(1)[0] * torch.min(x, dim=1).values + x.max(-1, keepdim=True).values[:, 0] * x.max() + x.min()
    ),
    "maximum": lambda x: (
        torch.maximum(x, x.mean(1, keepdim=True)) + torch.minimum(x.tanh(), OTHER) * torch.max(x, x.flip(1))
    ),
    "maximum, equal ones": lambda x: torch.maximum(x.relu(), x.mul(2).relu()) + torch.min(OTHER, x) + x.fmax(0 * x),
    "logsumexp": lambda x: x.logsumexp((1, 3)).unsqueeze(1) + torch.logsumexp(x, -1, keepdim=True)[:, 0],
    "log_softmax": lambda x: (
        x.log_softmax(1) + F.log_softmax(x, dim=-1) * torch.log_softmax(x, 2) + F.softmin(x, dim=1)
    ),
    "addcmul": lambda x: (
        torch.addcmul(x, x.tanh(), x.mean(1, keepdim=True), value=0.3) + torch.addcmul(OTHER, OTHER, x)
    ),
    "addcdiv": lambda x: torch.addcdiv(x, x.tanh(), 2 + x.mean(1, keepdim=True).square(), value=0.3).addcdiv_(x, OTHER),
    "lerp": lambda x: torch.lerp(x, x.mean(1, keepdim=True), x.sigmoid()) + x.tanh().lerp(OTHER, 0.3),
    "einsum": lambda x: (
        torch.einsum("nchw,ndhw->ncd", x, x.tanh()).sum(2)[..., None] * torch.einsum("nchw->nc", x)[..., None]
    ),
    "einsum, ellipsis": lambda x: (
        torch.einsum("...ij, kj -> ...ik", x, WEIGHT) + torch.einsum("...i,...i->...", x, x)[..., None]
    ),
    "einsum, implicit": lambda x: (
        torch.einsum("nchw,vw", x, WEIGHT) + torch.einsum("...hw,vw", x, WEIGHT).movedim(0, 1).mT[:, :, :1].mean()
    ),
    "einsum, broadcast": lambda x: (
        torch.einsum("...hw,...hw->...w", x[:, :1], x)[:, :, None] * torch.einsum("AaZz,AaZz->AaZz", x[:, :1], x)
    ),
    "einsum of three": lambda x: torch.einsum("nchw,vw,ncvh->nhv", x, WEIGHT, x[:, :, :, :1].expand(-1, -1, -1, 6)),
    "einsum of a list": lambda x: (
        torch.einsum("nchw,nchv->nwv", [x, x.sigmoid()]) + torch.einsum(x, [0, 1, 2, 3], [0]).mean()
    ),
    "einsum of a tuple": lambda x: torch.einsum("nchw,nchv->nwv", (x, x.tanh())),
    "einsum, an ellipsis of nothing": lambda x: torch.einsum("...hw,...wv->...hv", x[..., :5], WEIGHT.T),
    "einsum, a sum on its own": lambda x: torch.einsum("nchw,nd->nd", x, x[:, :, 0, 0]),
    "vectors": lambda x: (
        x @ x[0, 0, 0] + (x[0, 0, :, 0] @ x)[..., :1] + torch.mv(x[0, 0], x[1, 1, 2]) + x[0, 0, 0].dot(x[1, 0, 0])
    ),
    "vectors, constant": lambda x: (
        (x @ WEIGHT[0]).unsqueeze(3) * (WEIGHT[:, 0] @ x).unsqueeze(2) + (x[0, 0, 0] @ WEIGHT.T)[:5]
    ),
    "matmul, constant before": lambda x: x.__rmatmul__(WEIGHT.T) + torch.outer(x[0, 0, 0], x[0, 0, 1]),
    "addmm": lambda x: (
        torch.addmm(x[0, 0], x[0, 1], x[1, 1].T @ x[1, 0], beta=0.5, alpha=2)
        + torch.addmm(x[0, 0, 0], WEIGHT, x[0, 0, :5])
    ),
    "baddbmm": lambda x: (
        torch.baddbmm(x[:, 0, :, :1], x[:, 1], x[:, 2].mT, beta=2)
        + torch.addmv(x[0, 0, :, 0], x[0, 0], x[0, 0, 0], alpha=3)
    ),
    "conv2d, its weight on the path": lambda x: (
        F.conv2d(x, x[:, :, :3, :2], x[0, 0, :2, 0], 2, (1, 0), 2)
        + F.conv2d(FIXED, x[:, :2, :3, :2], None, 2, (1, 0), 2, groups=2)
    ),
    "conv1d of one image, its weight on the path": lambda x: F.conv1d(x[0, 0], x[0, :, :, :3], x[0, :, 0, 0]),
    "conv_transpose2d, its weight on the path": lambda x: F.conv_transpose2d(
        x, x[..., :3, :2].mT.repeat(2, 1, 1, 1), x[0, 0, :4, 0], 2
    ),
    "conv_transpose1d of one image": lambda x: F.conv_transpose1d(x[0, 0], x[0, 0, :, None, :3]),
    "fold, unfold": lambda x: F.fold(x.flatten(1, 2)[..., :4], (4, 4), 2, stride=2) + F.unfold(x[0], 2)[:6, :4].mean(),
    "unfold of a tensor": lambda x: x.unfold(2, 3, 2) * x.unfold(-2, 3, 2),
    "interpolate, nearest": lambda x: F.interpolate(x, (9, 3)) + F.interpolate(x, (9, 3), mode="nearest-exact"),
    "interpolate, bilinear": lambda x: (
        F.interpolate(x, scale_factor=[1.7, 0.7], mode="bilinear")
        + F.interpolate(x, scale_factor=(1.7, 0.7), mode="nearest")
        + F.interpolate(x, (10, 3), mode="bilinear", align_corners=True)
    ),
    "interpolate, bicubic": lambda x: (
        F.interpolate(x, scale_factor=1.5, mode="bicubic", align_corners=False)
        + F.interpolate(x, scale_factor=1.5, mode="bicubic", recompute_scale_factor=True)
    ),
    "interpolate, antialias": lambda x: (
        F.interpolate(x, (4, 3), mode="bicubic", antialias=True)
        + F.interpolate(x, (4, 3), mode="bilinear", antialias=True)
    ),
    "interpolate, area": lambda x: (
        F.interpolate(x, (4, 3), mode="area") + F.interpolate(x, scale_factor=0.67, mode="area")
    ),
    "interpolate, one and three axes": lambda x: (
        F.interpolate(x.flatten(2), 7, mode="linear")
        + F.interpolate(x[:, :, None], (2, 3, 7), mode="trilinear").mean((2, 3))
    ),
    "pad, every mode": lambda x: (
        F.pad(x, (1, 2, 0, 3), "reflect")
        + F.pad(x, (1, 2, 0, 3), mode="circular")
        + F.pad(x, (1, 2, 0, 3), mode="replicate")
    ),
    "pad of one axis": lambda x: F.pad(x.flatten(2), (3, 4), "reflect"),
    "repeat, tile": lambda x: x.repeat(2, 1, 1, 3, 1)[0] * torch.tile(x, (3, 1)),
    "repeat_interleave": lambda x: (
        x.repeat_interleave(2, 1) * torch.repeat_interleave(x, torch.tensor([1, 3, 0, 4]), dim=1)
    ),
    "index_select, gather": lambda x: (
        x.index_select(1, INDEX) * x.gather(1, INDEX.reshape(1, 3, 1, 1).expand(2, 3, 6, 5))
        + torch.take_along_dim(x, INDEX.reshape(1, 3, 1, 1), dim=1)
    ),
    "index_copy": lambda x: x.index_copy(-3, SOME, x[:, 2:].exp()) * x.index_copy(2, SOME, x[:, :, :2].tanh()),
    "scatter": lambda x: x.scatter(-3, PLACES, x[:, :3, 2:].exp()) * x.scatter(1, PLACES, 0.3),
    "scatter of one number": lambda x: x.flatten().scatter(0, SOME[:1], x.mean()).tanh(),
    "scatter_add": lambda x: x.scatter_add(-3, PLACES, x[:, :3, 2:].exp()),
    "cumprod, prod along any dimension": lambda x: (
        x.cumprod(-3) * x.cumprod(2) + x.prod(-3, keepdim=True) * x.prod(2, keepdim=True) + x.prod(1).prod(-1).mean()
    ),
    "masked_select": lambda x: x.masked_select(OTHER > 0) * x[:, OTHER[:, 0, 0] > 0].mean(),
    "movedim, rot90, diagonal": lambda x: x.movedim(1, -1).rot90(1, (1, 2)).diagonal(0, 1, 2) * x.ravel()[0],
    "shuffles": lambda x: F.pixel_shuffle(x, 2).mean((2, 3)) * torch.channel_shuffle(x, 2)[:, :1, 0, 0],
    "cumsum": lambda x: x.cumsum(1) * torch.cumsum(x, dim=-1),
    "setitem": lambda x: written(x),
    "setitem on a constant": lambda x: written_into_zeros(x),
    "copy_, fill_, zero_": lambda x: copied(x),
    "index_add": lambda x: (
        x.index_add(1, INDEX, x[:, :3].tanh(), alpha=2) + torch.index_add(FIXED, -3, INDEX, x[:, 1:])
    ),
    "masked_fill by a value on the path": lambda x: x.masked_fill(OTHER > 0, x.mean()),
    "sin, cos, atan": lambda x: x.sin() * torch.cos(x) + x.atan() + torch.arctan(x),
    "logarithms": lambda x: (1 + x * x).log1p() + (2 + x * x).log2() * (2 + x * x).log10() + (2 + x * x).reciprocal(),
    "exponentials": lambda x: x.expm1() + torch.exp2(x) * 3 ** x.tanh() + x.nan_to_num(),
    "clamp_min, clamp_max": lambda x: x.clamp_min(-0.3) * torch.clamp_max(x, 0.4) + F.threshold(x, 0.1, 20.0),
    "activations in place": lambda x: F.selu_(3 * F.celu_(3 * F.rrelu_(3 * F.threshold_(x + 0, -0.3, 0.1)))),
    "prelu": lambda x: F.prelu(x, OTHER[:, 0, 0]) * torch.prelu(x, OTHER[0, 0, 0]),
    "norms as functions": lambda x: F.group_norm(x, 2) + F.instance_norm(x) * F.rms_norm(x, (5,), OTHER[0, 0]),
    "identical outputs": lambda x: F.dropout(x.contiguous(), training=False).to(torch.float64),
}
if _has_gradient(lambda x: torch.aminmax(x).max):
    FUNCTIONS |= {
        "aminmax": lambda x: (lambda low, high: low * high + high)(*torch.aminmax(x, dim=2, keepdim=True)),
        "aminmax of everything": lambda x: torch.aminmax(x).max * x,
        "aminmax, one alone": lambda x: torch.aminmax(x, dim=-1).min,
    }


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


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_function_is_pulled_back_as_by_autograd(case):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    actual, weights, expected = pulled(FUNCTIONS[case], x)
    assert relative(actual, expected) < 1e-12
    sums = expected.reshape(2, 2, 4, -1)
    assert (weights - sums.sum(-1)).abs().max() < 1e-12 * sums.abs().sum(-1).max()


def test_an_output_that_is_not_explained_may_lead_to_one_that_is():
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    seed = torch.randn(2, *x.shape, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(Start(lambda x: (x.tanh(), (y := x.square()), y * 3)), None, ["start"]).record(x)
    assert relative(passed.pullback([None, None, seed], 0).dense(), seed * 6 * x) < 1e-12
    assert relative(passed.pullback([None, seed, seed], 0).dense(), seed * 8 * x) < 1e-12
    assert relative(passed.pullback([seed, None, None], 0).dense(), seed * (1 - x.tanh() ** 2)) < 1e-12


@pytest.mark.parametrize(
    "layer", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-1, 3), nn.LeakyReLU(0.2), nn.ELU(0.7), nn.Hardsigmoid()], ids=str
)
def test_kinks_are_those_of_autograd(layer):
    """But clamp's and hardswish's, whose slopes differ between versions of torch."""
    x = torch.arange(-4, 8, dtype=torch.float64).reshape(1, 2, 6)
    actual, _, expected = pulled(layer, x)
    assert relative(actual, expected) < 1e-6


def test_pools_that_keep_the_sum_over_positions():
    x = torch.randn(2, 3, 6, 6)

    def keeps(function, *args, x=x):
        return registry.find_rule(function).keeps_sums(x, *args, y=function(x, *args))

    aten = torch.ops.aten
    assert keeps(aten.avg_pool2d.default, [2, 2])
    assert keeps(aten.avg_pool2d.default, [3, 3], [1, 1], [0, 1], False, False)
    assert not keeps(aten.avg_pool2d.default, [3, 3], [1, 1], [0, 1])
    assert not keeps(aten.avg_pool2d.default, [2, 2], [2, 2], [0, 0], False, True, 3)
    for function in (aten.max_pool2d.default, aten.adaptive_avg_pool2d.default):
        assert keeps(function, [2, 2])
        assert not keeps(function, [2, 2], x=x[0]), "there is no batch"
    assert keeps(aten.mean.dim, [-1, 2])
    assert not keeps(aten.mean.dim, [1])
    assert not keeps(aten.mean.default)


@pytest.mark.parametrize("mask", [None, "bool", "float", "by head"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_multi_head_attention(bias, batch_first, mask):
    attention = prepared(nn.MultiheadAttention(8, 2, batch_first=batch_first, bias=bias))
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    length, count = (5, 3) if batch_first else (3, 5)
    masks = {
        "bool": torch.ones(length, length).triu(1).bool(),
        "float": torch.randn(length, length, dtype=torch.float64),
        "by head": torch.randn(2 * count, length, length, dtype=torch.float64),
    }

    def function(x):
        return attention(x, 2 * x, x.tanh(), need_weights=False, attn_mask=masks.get(mask))[0]

    actual, _, expected = pulled(function, x)
    assert relative(actual, expected) < 1e-12


def test_attention_of_other_widths():
    attention = prepared(nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True))
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    actual, _, expected = pulled(lambda x: attention(x, x[..., :4], x[..., 4:])[0], x)
    assert relative(actual, expected) < 1e-12


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.vector_norm(x, torch.inf, -1),
        lambda x: torch.linalg.vector_norm(x, -torch.inf, (1, 2), keepdim=True),
        lambda x: torch.linalg.vector_norm(x, -1, -1),
        lambda x: torch.linalg.norm(x, 1, dim=(2, 3)),
        lambda x: torch.norm(x, torch.inf, (2, 3)),
        lambda x: F.normalize(x, torch.inf),
        lambda x: F.pairwise_distance(x, x.exp(), p=torch.inf),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.batch_norm(x, torch.zeros(4).double(), 3 * torch.ones(4).double(), training=True),
        lambda x: torch.einsum("nchh->nch", x[..., :6, :]),
        lambda x: torch.einsum("...hh,...h->...", x[..., :6, :], x[..., 0, :]),
    ],
)
def test_what_a_rule_does_not_hold_for_is_what_it_is_made_of(function):
    torch.manual_seed(0)
    x = torch.randn(4, 4, 7, 6, dtype=torch.float64)
    actual, _, expected = pulled(function, x)
    assert relative(actual, expected) < 1e-12


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: F.prelu(x, x[0, :, 0, 0]), "prelu depends on the target layer, and its rule has no gradient"),
        (lambda x: x.norm("nuc", dim=(2, 3)), "goes through aten._linalg_svd"),
        (lambda x: torch.cdist(x, 2 * x, p=torch.inf), "goes through aten._cdist_forward"),
    ],
)
def test_what_has_no_closed_form_is_refused_by_name(function, message):
    x = torch.randn(4, 4, 7, 6)
    net = Start(function).eval()

    def pull():
        passed = Path(net, None, ["start"]).record(x)
        return passed.pullback([torch.randn(2, *passed.output.shape)], 0).dense()

    with torch.no_grad(), pytest.raises(NoClosedFormError, match=message):
        pull()


class Swish(nn.Module):
    """The worked example of the README."""

    def forward(self, x):
        return x * torch.special.expit(x)


def swish(layer, x, y, grad):
    s = torch.sigmoid(x)
    return grad * (s + y * (1 - s))


class Renamed(Swish):
    pass


class Doubled(Swish):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("layer", [Swish(), Renamed(), Doubled()], ids=name)
def test_a_registered_layer_is_one_step(rules, layer):
    assert register_jacobian(Swish)(swish) is swish
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    actual, _, expected = pulled(layer, x)
    assert relative(actual, expected) < 1e-12
    with torch.no_grad():
        steps = Path(Start(layer), None, ["start"]).record(x).tape.steps
    assert [step.function for step in steps] == ([Swish] if not isinstance(layer, Doubled) else steps_of_doubled(steps))


def steps_of_doubled(steps):
    assert Swish not in [step.function for step in steps], "its forward is another one"
    return [step.function for step in steps]


def test_hooks_on_a_registered_layer_are_steps_of_their_own(rules):
    register_jacobian(Swish)(swish)
    layer = Swish()
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    layer.register_forward_hook(lambda module, args, output: output.flip(1) + args[0])
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    actual, _, expected = pulled(layer, x)
    assert relative(actual, expected) < 1e-12


def test_a_registered_function(rules):
    @register_jacobian(torch.special.i0, torch.special.i1)
    def bessel(input, *, y, grad):
        return grad * torch.special.i1(input)

    x = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    actual, _, expected = pulled(lambda x: torch.special.i0(x), x)
    assert relative(actual, expected) < 1e-12


def test_a_rule_may_have_no_gradient_for_an_argument(rules):
    @register_jacobian(torch.copysign)
    def copysign(input, other, *, y, grad):
        return grad * torch.sign(input * other), None

    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    actual, _, expected = pulled(lambda x: torch.copysign(x.tanh(), x.sin() * x), x)
    assert relative(actual, expected) < 1e-12


class Blend(nn.Module):
    def forward(self, a, b):
        return torch.lerp(a, b, 0.3)


class Blended(nn.Module):
    """A layer of two functions of a target layer."""

    def __init__(self, first, second):
        super().__init__()
        self.start, self.blend, self.first, self.second = nn.Identity(), Blend(), first, second

    def forward(self, x):
        x = self.start(1 * x)
        return self.blend(self.first(x), self.second(x))


def test_a_registered_layer_of_two_tensors(rules):
    @register_jacobian(Blend)
    def blend(layer, x, y, grad):
        a, b = x
        assert a.shape == b.shape == y.shape
        return 0.7 * grad, 0.3 * grad

    x, net = torch.randn(2, 3, 4, 4, dtype=torch.float64), Blended(torch.tanh, lambda x: x)
    with torch.no_grad():
        passed = Path(net, None, ["start"]).record(x)
        assert [step.name for step in passed.tape.steps] == ["aten.tanh", "Blend"]
        grad = torch.randn(2, *x.shape, dtype=torch.float64)
        assert relative(passed.pullback([grad], 0).dense(), grad * (0.7 * (1 - x.tanh() ** 2) + 0.3)) < 1e-12
        register_jacobian(Blend)(lambda layer, x, y, grad: (0.1 * grad, 0.9 * grad))
        with pytest.raises(NoClosedFormError, match="the rule of Blend is not autograd's Jacobian of it"):
            Path(net, None, ["start"]).record(x).pullback([grad], 0).dense()


@pytest.mark.parametrize(
    ("rule", "given"),
    [
        (lambda layer, x, y, grad: grad.sum(1), r"\([12], 3, 4, 4\)"),
        (lambda layer, x, y, grad: grad.flatten(3), r"\([12], 2, 3, 16\)"),
        (lambda layer, x, y, grad: 3.0, "float"),
        (lambda layer, x, y, grad: "dx", "str"),
        (lambda layer, x, y, grad: torch.cat([swish(layer, x, y, grad)] * 2), r"\([24], 2, 3, 4, 4\)"),
    ],
)
def test_a_rule_of_the_wrong_shape_is_named(rules, rule, given):
    register_jacobian(Swish)(rule)
    message = rf"the rule of Swish returns {given}, not \([12], 2, 3, 4, 4\)"
    with torch.no_grad(), pytest.raises(NoClosedFormError, match=message):
        pulled(Swish(), torch.randn(2, 3, 4, 4, dtype=torch.float64))


class Beside(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) + x


def test_a_rule_without_the_gradient_that_autograd_has_is_refused(rules):
    register_jacobian(Swish)(lambda layer, x, y, grad: None)
    with pytest.raises(NoClosedFormError, match="the rule of Swish is not autograd's Jacobian of it"):
        pulled(Beside(Swish()), torch.randn(2, 3, 4, 4, dtype=torch.float64))


class First(nn.Module):
    def forward(self, a, b):
        return 2 * a + 0 * b


def test_a_rule_may_have_no_gradient_for_one_of_several(rules):
    register_jacobian(First)(lambda layer, x, y, grad: (2 * grad, None))
    net, x = Blended(torch.tanh, lambda x: x), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    net.blend = First()
    with torch.no_grad():
        grad = torch.randn(2, *x.shape, dtype=torch.float64)
        actual = Path(net, None, ["start"]).record(x).pullback([grad], 0).dense()
    assert relative(actual, 2 * grad * (1 - x.tanh() ** 2)) < 1e-12


class Failing(nn.Module):
    def forward(self, x):
        return x.reshape(7, 7)


@pytest.mark.parametrize("call", [Failing(), torch.trace], ids=["layer", "function"])
def test_a_registered_call_that_fails_may_be_caught(rules, call):
    class Caught(nn.Module):
        def __init__(self):
            super().__init__()
            self.call = call

        def forward(self, x):
            try:
                return self.call(x)
            except RuntimeError:
                return x.tanh()

    register_jacobian(Failing, torch.trace)(swish)
    actual, _, expected = pulled(Caught(), torch.randn(2, 3, 4, 5, dtype=torch.float64))
    assert relative(actual, expected) < 1e-12


@pytest.mark.parametrize("wrong", [(), (nn.ReLU(),), (nn.ReLU, "relu"), (int,)], ids=str)
def test_what_is_registered_must_be_a_layer_class_or_a_function(wrong):
    with pytest.raises(TypeError, match="register_jacobian takes layer classes, torch functions and operations"):
        register_jacobian(*wrong)


def test_half_precision_is_pulled_back_in_float32():
    torch.manual_seed(0)
    net = Start(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 6))).eval()
    x = torch.randn(2, 3, 6, 6)
    seeds = torch.randn(2, 2, 6)
    with torch.no_grad():
        exact = Path(net, None, ["start"]).record(x).pullback([seeds], 0).sums()
        for dtype in (torch.bfloat16, torch.float16):
            passed = Path(copy.deepcopy(net).to(dtype), None, ["start"]).record(x.to(dtype))
            weights = passed.pullback([seeds], 0).sums()
            assert weights.dtype == torch.float32
            assert relative(weights, exact) < 0.05
            assert passed.activations[0].dtype == dtype
