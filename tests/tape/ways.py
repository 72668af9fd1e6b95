"""Ways to compute between two layers, of which each has to be exact."""

import warnings
from functools import partial

import torch
import torchvision
from against_autograd import random
from problems import Step
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from way import add, const, way

# --- activations in place ---------------------------------------------------------------------------------------------

INPLACE = {
    "relu_": lambda g: g.relu_(),
    "F.relu": lambda g: F.relu(g, inplace=True),
    "torch.relu_": torch.relu_,
    "nn.ReLU": nn.ReLU(inplace=True),
    "nn.ReLU6": nn.ReLU6(inplace=True),
    "nn.SiLU": nn.SiLU(inplace=True),
    "nn.Hardswish": nn.Hardswish(inplace=True),
    "nn.ELU": nn.ELU(inplace=True),
    "nn.Threshold": nn.Threshold(0.1, -0.3, inplace=True),
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
for _name, _f in INPLACE.items():
    add(f"in place: {_name}", lambda h, f=_f: f(h * 1.5))
    add(f"in place on the layer's output: {_name}", lambda h, f=_f: f(h))
    add(f"in place, the tensor read later: {_name}", lambda h, f=_f: (g := h * 1.5, f(g), g.cos())[2])


# --- writes through views ---------------------------------------------------------------------------------------------

VIEWS = {
    "slice": lambda g: g[:, 1:4],
    "select": lambda g: g[:, 2],
    "steps": lambda g: g[..., ::2],
    "permuted": lambda g: g.permute(0, 2, 3, 1)[..., :3],
    "reshaped": lambda g: g.view(3, 2, 3, 49)[:, 1],
    "flattened": lambda g: g.flatten(2)[..., 3:20],
    "transposed": lambda g: g.transpose(1, 2)[:, 1:3],
    "unsqueezed": lambda g: g[:, 0, None],
    "diagonal": lambda g: g.diagonal(dim1=2, dim2=3),
    "view of view": lambda g: g[:, 1:][..., 1:4][:, ::2],
    "narrow, movedim": lambda g: g.movedim(1, -1).narrow(1, 2, 3),
    "view_as": lambda g: g.view_as(g.detach().clone())[:, -1:],
    "unflatten": lambda g: g.unflatten(1, (2, 3))[:, :, 1],
    "all of it": lambda g: g[:],
}
WRITES = {
    "mul_": lambda g, v: v.mul_(3),
    "fill": lambda g, v: v.__setitem__(..., 0.5),
    "copy_": lambda g, v: v.copy_((2 * g).flatten(1)[:, : v[0].numel()].reshape(v.shape)),
    "twice": lambda g, v: (v.mul_(2), v.add_(v.mean(-1, keepdim=True)), v[:, :1].sin_()),
    "from itself": lambda g, v: v[..., 0].copy_(v[..., 1]),
    "mask": lambda g, v: v.__setitem__(v < 0, 0.1),
}
READS = {
    "base": lambda g, v, s: g,
    "view": lambda g, v, s: v * 2,
    "sibling": lambda g, v, s: s.sin(),
    "all": lambda g, v, s: (v, s * 2, g),
}


def written(h, view, write, read, own):
    g = h if own else h * 1.5
    v, sibling = view(g), view(g)
    write(g, v)
    return read(g, v, sibling)


for _i, (_view, _v) in enumerate(VIEWS.items()):
    for _j, (_write, _w) in enumerate(WRITES.items()):
        for _k, (_read, _r) in enumerate(READS.items()):
            _f = partial(written, view=_v, write=_w, read=_r, own=(_i + _j + _k) % 3 == 0)
            if _write != "fill" or (_view != "all of it" and _read in ("base", "all")):  # else all is constant
                add(f"{_write} through {_view}, {_read} read later", _f, combined=(_i + _j) % 4 != _k)


@way
def overlapping_views(h):
    g = h * 2
    a, b = g[:, :4], g[:, 2:]
    a.mul_(2)
    b.sin_()
    return a * 3, b, g.tanh()


@way
def a_view_made_before_the_write_and_one_after(h):
    g = h * 2
    before = g[:, 1]
    g[:, :3] = g[:, 3:] * 2
    return before, g[:, 1]


@way
def a_view_of_itself(h):
    g = h * 2
    g[..., 0] = g[..., 1]
    g[:, 1:] = g[:, :-1].clone()
    return g


@way
def a_value_and_what_was_written_over(h):
    g = h.sin()
    y = g * g
    g = g.clone()
    g[:, 1:3] *= y[:, :2]
    return y, g


@way
def a_slice_times_3(h):
    o = h * 2
    o[:, 0, None] *= 3
    o[:, 1:2, ..., None] += 1
    return o


@way
def a_view_through_none_with_assignment(h):
    o = h.clone()
    o[..., None][:, 2] = h[:, 3, ..., None] * 2
    return o


@way
def a_module_output_written_twice(h):
    h[:, 0] = h[:, 1] * 2
    h[:, 1] = h[:, 0] + h[:, 2]
    return h.exp()


@way
def a_temporal_shift(h):
    out = torch.zeros_like(h)
    out[:, :-1, :2] = h[:, 1:, :2]
    out[:, 1:, 2:4] = h[:, :-1, 2:4]
    out[:, :, 4:] = h[:, :, 4:]
    return out


@way
def a_shift_of_rows(h):
    out = h.clone()
    out[:, :, 1:] = h[:, :, :-1]
    return out * h


@way
def a_shift_into_empty(h):
    out = torch.empty_like(h)
    out[:, :, 1:] = h[:, :, :-1]
    out[:, :, :1] = 0
    return out


@way
def zeros_filled_in_a_loop(h):
    out = torch.zeros(3, 6, 7, 7, dtype=h.dtype)
    for i in range(6):
        out[:, i] = h[:, i].sin() + out[:, i - 1] if i > 1 else h[:, i]
    return out


@way
def zeros_through_a_view_made_before(h):
    out = h.new_zeros(3, 6, 7, 7)
    v = out[:, 1:3]
    v.copy_(h[:, :2].sin())
    return out, v, out[:, 2] * h[:, 0]


@way
def a_constant_read_before_and_after(h):
    out = torch.ones(3, 6, 7, 7, dtype=h.dtype)
    before = out * 2
    out[:, :3] *= h[:, :3]
    return before * h, out


@way
def a_constant_expanded_and_cloned(h):
    z = torch.zeros(1, 6, 1, 1, dtype=h.dtype).expand_as(h).clone()
    z[:, 0] = h[:, 0]
    z += h.mean((2, 3), keepdim=True)
    return z


@way
def an_expanded_constant_added(h):
    g = h * 2
    g.add_(const(1, 6, 1, 1).expand_as(g))
    g[:, 1:3].copy_(const(7).expand(3, 2, 7, 7))
    return g


@way
def activations_expanded_into_a_constant(h):
    out = h.new_ones(3, 6, 7, 7)
    out[:, :, 2] = h[:, :, 3, :1]
    out[:, 0] = h.mean()
    return out


@way
def setitem_with_lists_and_tensors(h):
    g = h * 2
    g[:, [0, 2]] = g[:, [1, 3]].sin()
    g[torch.tensor([0, 2]), torch.tensor([4, 5])] = g[torch.tensor([1, 0]), torch.tensor([0, 1])]
    g[0, 0, 0, 0] = 1.0
    return g


@way(tolerance=1e-5)
def copy_from_another_dtype(h):
    g = torch.zeros(3, 6, 7, 7, dtype=torch.float64)
    g.copy_(h)
    return g.copy_((g + h.sin()).float()).mul_(h)


@way
def index_put_accumulated(h):
    g = h * 2
    g.index_put_((torch.tensor([0, 1, 1]), torch.tensor([2, 3, 3])), h[:, 0], accumulate=True)
    return g


@way
def put_along_views_of_a_flat_buffer(h):
    buffer = h.new_zeros(3 * 6 * 49)
    a, b = buffer.view(3, 6, 49), buffer.view(3, 6, 7, 7)
    a[:, :3] = h.flatten(2)[:, 3:]
    b[:, 3:].copy_(h[:, :3]).mul_(2)
    return a, b.sin()


# --- gates, aliases and branches --------------------------------------------------------------------------------------


@way(gated=True)
def a_detached_alias_before_a_write(h):
    g = h * 2
    alias = g.detach()
    g.mul_(3)
    return g * alias


@way(gated=True)
def a_detached_alias_after_a_write(h):
    g = h * 2
    g[:, 1:3] *= 3
    return g * g.detach().sin()


@way(gated=True)
def a_detached_view(h):
    g = h * 2
    alias = g[:, :3].detach()
    g[:, 1] = 0.3
    return g[:, 3:] * alias


@way(gated=True)
def a_straight_through_estimator(h):
    return h + (h.round() - h).detach()


@way(gated=True)
def data_read(h):
    return h * h.data.mean((2, 3), keepdim=True)


@way(gated=True)
def data_read_after_a_write(h):
    g = h.clone()
    g[:, 0] = 1
    return h * g.data[:, :1]


@way(gated=True)
def a_gate_without_gradients(h):
    with torch.no_grad():
        gate = h.sigmoid()
    return h * gate


@way(gated=True)
def a_gate_written_in_place_without_gradients(h):
    with torch.no_grad():
        gate = h.sigmoid()
        gate[:, 1:] *= 2
        gate.add_(h)
    return h * gate


@way(gated=True)
def a_decorated_gate(h):
    return h * torch.no_grad()(lambda x: x.mean(1, keepdim=True).exp())(h)


@way(gated=True)
def gates_in_gates(h):
    with torch.no_grad():
        a = h.tanh()
        with torch.enable_grad():
            b = h.sin() * 2
        c = a * b
    return h * a + b + c


@way(gated=True)
def a_gate_by_set_grad_enabled(h):
    with torch.set_grad_enabled(False):
        a = h.cos()
        with torch.set_grad_enabled(True):
            b = a * h
    return b * h


@way
def a_view_made_without_gradients(h):
    with torch.no_grad():
        shape = h.flatten(1).shape
    return h.reshape(shape).sin()


# Branches: with activations that take the other one.
BRANCHES = {
    "item": (lambda h: h.sin() if h.mean().item() > 0.01 else h * 2, lambda h: 9 - h),
    "bool": (lambda h: h.sin() if h[0].sum() > 0 else h * 2, lambda h: 9 - h),
    "any": (lambda h: h.clamp(max=1.0).sin() if (h > 9).any() else h * 2, lambda h: h + 9),
    "all": (lambda h: h.exp() if (h < 9).all() else h * 2, lambda h: h + 9),
    "tolist": (lambda h: h * sum(1 + (v > 0) for v in h[:, 0, 0, 0].tolist()), lambda h: h.abs() + 1),
    "argmax as an index": (lambda h: h[:, int(h[0].mean((1, 2)).argmax())], lambda h: h.flip(1)),
    "number of steps": (lambda h: [h := h.sin() for _ in range(2 + 3 * int(h.mean() > 1))][-1], lambda h: h + 9),
    "torch.is_nonzero": (lambda h: h.tanh() if torch.is_nonzero(h.mean() > 9) else h.sin(), lambda h: h + 99),
    "allclose": (lambda h: h * 3 if torch.allclose(h, h.mean(), atol=1e-2) else h.sin(), lambda h: 0 * h + 1),
    "numpy": (lambda h: h * 3 if h.detach().numpy().max() > 9 else h.sin(), lambda h: h + 99),
}
for _name, (_f, _) in BRANCHES.items():
    add(f"a branch: {_name}", _f, near=True)

# --- masks, indices, order --------------------------------------------------------------------------------------------

ORDER = torch.tensor([3, 0, 5, 2, 1, 4])
SOME = torch.tensor([0, 2, 2, 5])
PLACES = torch.randint(0, 6, (3, 6, 7, 7), generator=torch.Generator().manual_seed(3))
APART = random(3, 6, 7, 7, seed=3).argsort(1)  # without repetition, for which torch's gradient of scatter is wrong


@way
def a_mask_assigned(h):
    h = h * 2
    h[h < 0] = 0
    return h


@way
def a_mask_of_positions_assigned(h):
    g = h.clone()
    g[:, :, h.mean(1)[0] > 0] = 0.2
    return g


@way
def a_constant_mask_assigned(h):
    g = h.clone()
    g[:, const(6) > 0] = h[:, const(6) > 0].sin()
    return g


SELECTING = {
    "masked_fill": lambda h: h.masked_fill(h > 0.1, 0.3),
    "masked_fill, constant mask": lambda h: h.masked_fill(const(7, 7) > 0, -1.0),
    "masked_fill, mean": lambda h: h.masked_fill(h > 0.1, h.mean()),
    "masked_scatter": lambda h: h.masked_scatter(const(3, 6, 7, 7) > 0, h.flip(1)),
    "where": lambda h: torch.where(h > 0, h.sin(), h**2),
    "where, scalar": lambda h: torch.where(h > 0.2, h, 0.0),
    "where, constant condition": lambda h: torch.where(const(7, 7) > 0, h, h.exp()),
    "Tensor.where": lambda h: h.sin().where(h > h.mean(), const(7)),
    "times a mask": lambda h: h * (h > 0),
    "times a mask, cast": lambda h: h * (h > 0.1).double() + (h < 0).to(h.dtype),
    "maximum, minimum": lambda h: torch.maximum(h, h.flip(1)) + torch.minimum(h, const(7)),
    "scatter": lambda h: h.scatter(1, APART, h.sin()),
    "scatter, constant": lambda h: h.scatter(1, PLACES[:, :2], 0.4),
    "scatter into zeros": lambda h: torch.zeros_like(h).scatter_(1, APART, h),
    "scatter_add": lambda h: h.scatter_add(1, PLACES, h.sin()),
    "scatter_add into zeros": lambda h: h.new_zeros(3, 6, 7, 7).scatter_add_(1, PLACES, h),
    "scatter_reduce mean": lambda h: h.scatter_reduce(1, PLACES, h.sin(), "mean"),
    "scatter_reduce amax": lambda h: h.scatter_reduce(1, PLACES, h.sin(), "amax"),
    "index_add": lambda h: h.index_add(1, SOME, h[:, :4].sin(), alpha=2),
    "index_copy": lambda h: h.index_copy(1, ORDER[:3], h[:, :3].sin()),
    "index_fill": lambda h: h.index_fill(1, ORDER[:3], 0.7),
    "index_select": lambda h: h.index_select(1, SOME),
    "gather": lambda h: h.gather(1, PLACES),
    "gather, of the largest": lambda h: h.gather(1, h.argmax(1, keepdim=True)),
    "take_along_dim": lambda h: h.take_along_dim(PLACES[:, :2], 1),
    "take_along_dim, of the order": lambda h: h.sin().take_along_dim(h.argsort(1), 1),
    "take": lambda h: h.take(PLACES[:, 0]),
    "advanced indices": lambda h: h[:, SOME],
    "advanced indices, two": lambda h: h[:, SOME, :, SOME].transpose(0, 1),
    "advanced indices, with slices": lambda h: h[:, ORDER[:3, None], 1:6, SOME].permute(2, 0, 1, 3),
    "indices by list": lambda h: h[:, [0, 2, 2], 1:],
    "indices by mask": lambda h: h[:, const(6) > 0],
    "embedding of constants": lambda h: h + F.embedding(PLACES[:, 0, 0], const(6, 7))[:, None],
    "one_hot": lambda h: h * F.one_hot(h.argmax(1), 6).permute(0, 3, 1, 2),
    "tril, triu": lambda h: h.tril() + h.triu(1).sin(),
    "diag_embed": lambda h: h[:, :, 0].diag_embed(),
    "repeat_interleave": lambda h: h.repeat_interleave(2, 1).repeat(1, 1, 1, 2),
    "tile": lambda h: h.tile(2),
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
    "max": lambda h: h.max(1)[0],
    "min": lambda h: h.min(2, keepdim=True).values,
    "max of all": lambda h: h * h.max(),
    "max and its indices": lambda h: (m := h.max(1), h.sin().gather(1, m.indices[:, None]), m.values)[1:],
    "amax": lambda h: h.amax((2, 3)),
    "amin": lambda h: h.amin(1, keepdim=True) * h,
    "cummax": lambda h: h.cummax(2)[0],
    "cummin": lambda h: h.cummin(2)[0],
    "clamp": lambda h: h.clamp(-0.2, 0.3),
    "clamp by tensors": lambda h: h.clamp(min=-const(7).abs(), max=h.flip(1).abs()),
    "trunc, sign": lambda h: h * h.sign() + (3 * h).trunc(),
    "fmod, remainder": lambda h: torch.fmod(h, 0.7) + torch.remainder(h, 0.9),
    "searchsorted": lambda h: h * torch.bucketize(h, const(4).sort()[0]),
}
# From one order to another there is no secant, or the value jumps.
JUMPS = {"gather, of the largest", "take_along_dim, of the order", "topk and its indices", "max and its indices"}
JUMPS |= {"times a mask, cast", "trunc, sign", "fmod, remainder", "searchsorted"}
for _name, _f in SELECTING.items():
    add(_name, _f, jumps=_name in JUMPS)

# --- products ---------------------------------------------------------------------------------------------------------

T = lambda h: h.flatten(2)  # noqa: E731 - tokens, (3, 6, 49)
PRODUCTS = {
    "einsum, weight": lambda h: torch.einsum("nchw,dc->ndhw", h, const(5, 6)),
    "einsum, gram": lambda h: torch.einsum("ncp,ndp->ncd", T(h), T(h).sin()),
    "einsum, ellipsis": lambda h: torch.einsum("nc...,nd...->n...", h, h[:, :2]),
    "einsum, three": lambda h: torch.einsum("ncp,cd,ndq->npq", T(h), const(6, 6), T(h)[..., :5]),
    "einsum, diagonal": lambda h: torch.einsum("ncii->nc", h),
    "einsum, attention": lambda h: torch.einsum("nqk,nck->ncq", (T(h).mT @ T(h)).softmax(-1), T(h)),
    "bmm": lambda h: torch.bmm(T(h), T(h).mT),
    "matmul, broadcast": lambda h: const(2, 1, 4, 6) @ T(h)[:, None, None].transpose(1, 2).flatten(1, 2)[:, None],
    "matmul, constant left": lambda h: const(5, 7) @ h,
    "matmul, vector": lambda h: h @ const(7),
    "matmul, both": lambda h: h @ h.mT,
    "mv": lambda h: torch.mv(h.flatten(1), const(294)),
    "dot": lambda h: h * torch.dot(h[0].flatten(), h[1].flatten()),
    "outer": lambda h: torch.outer(h[:, 0].mean((1, 2)), h[0, 1].flatten()),
    "ger, addr": lambda h: torch.addr(h[:, 0, 0], h[:, 1, 1, 1], h[0, 2, 3]),
    "baddbmm": lambda h: torch.baddbmm(const(3, 6, 6), T(h), T(h).mT, beta=0.5, alpha=2),
    "addmm": lambda h: torch.addmm(const(4), h.flatten(1), const(294, 4), alpha=0.5),
    "addbmm": lambda h: torch.addbmm(h[0, 0, :3, :3], h[:, :3, 0], h[:, 3:, 1].mT),
    "addmv": lambda h: torch.addmv(h[:, 0, 0, 0], h.flatten(1), const(294)),
    "bilinear": lambda h: F.bilinear(h, h.flip(1), const(4, 7, 7), const(4)),
    "bilinear, constant": lambda h: F.bilinear(h, const(3, 6, 7, 2), const(4, 7, 2)),
    "tensordot": lambda h: torch.tensordot(h, const(6, 7, 5), ([1, 3], [0, 1])),
    "tensordot, both": lambda h: torch.tensordot(h, h, ([1, 2], [1, 2])),
    "kron": lambda h: torch.kron(h[:, :2, 0], const(1, 2, 2)),
    "kron, both": lambda h: torch.kron(h[:, 0, :2], h[:1, 1, :2]),
    "chain_matmul": lambda h: torch.linalg.multi_dot([h.flatten(1), const(294, 5), const(5, 6)]),
    "inner": lambda h: torch.inner(h, const(4, 7)),
    "cross": lambda h: torch.linalg.cross(h[:, :3], h[:, 3:], dim=1),
    "matrix_power": lambda h: torch.linalg.matrix_power(h, 3),
    "a weight made of activations": lambda h: F.linear(const(3, 5, 7), h[0, 0], h[1, 1, 0]) * h.mean(),
    "conv with a kernel made of activations": lambda h: F.conv2d(h, h[:2, :, :3, :3].sin()),
    "conv grouped, dilated": lambda h: F.conv2d(h, const(4, 3, 2, 2), const(4), 2, 1, 2, 2),
    "conv1d": lambda h: F.conv1d(T(h), const(4, 6, 5), stride=3, padding="valid"),
    "conv3d": lambda h: F.conv3d(h[:, None], const(2, 1, 2, 3, 3), padding="same"),
    "conv_transpose2d": lambda h: F.conv_transpose2d(h, const(6, 2, 3, 3), stride=2, output_padding=1),
    "conv_transpose1d": lambda h: F.conv_transpose1d(T(h), const(6, 2, 3), stride=2),
    "a trained convolution": (lambda m, h: m(h), lambda: nn.Conv2d(6, 4, 3, padding_mode="reflect", padding=1)),
    "a module called twice": (lambda m, h: m(m(h).relu()), lambda: nn.Conv2d(6, 6, 3, padding=1)),
    "a module called twice, in place": (
        lambda m, h: m(m(h)),
        lambda: nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True)),
    ),
    "skip": (lambda m, h: h + m(h), lambda: nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.SiLU(inplace=True))),
    "skip in place": (lambda m, h: F.relu(m(h).add_(h), inplace=True), lambda: nn.Conv2d(6, 6, 3, padding=1)),
    "dense concatenation": (
        lambda m, h: torch.cat([h, a := m[0](h).relu(), m[1](torch.cat([h, a], 1))], 1),
        lambda: nn.ModuleList([nn.Conv2d(6, 2, 1), nn.Conv2d(8, 3, 1)]),
    ),
    "squeeze and excite": (
        lambda m, h: h * m(h.mean((2, 3))).sigmoid()[..., None, None],
        lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU(inplace=True), nn.Linear(3, 6)),
    ),
    "an embedding bag": (lambda m, h: h * m(PLACES[:, 0, 0])[:, :, None, None], lambda: nn.EmbeddingBag(6, 6)),
}  # fmt: skip

# --- shapes -----------------------------------------------------------------------------------------------------------

SHAPES = {
    "roll": lambda h: h.roll((1, -2), (1, 3)),
    "roll flat": lambda h: h[0].roll(3) + h,
    "flip": lambda h: h.flip((1, 3)) * const(7),
    "fliplr": lambda h: h.fliplr() * const(7),
    "rot90": lambda h: h.rot90(1, (2, 3)) * const(7),
    "pad, constant": lambda h: F.pad(h, (1, 2, 0, 1), value=0.3),
    "pad, negative": lambda h: F.pad(h, (-1, 2, -2, 0)),
    "pad, reflect": lambda h: F.pad(h, (1, 2, 3, 1), mode="reflect") * const(10),
    "pad, replicate": lambda h: F.pad(h, (1, 2, 3, 1), mode="replicate"),
    "pad, circular": lambda h: F.pad(h, (1, 2, 3, 1), mode="circular"),
    "pad, reflect 1d": lambda h: F.pad(T(h), (3, 2), mode="reflect"),
    "pad, replicate 3d": lambda h: F.pad(h[:, None], (1, 2, 0, 1, 2, 0), mode="replicate"),
    "pad, circular 1d": lambda h: F.pad(T(h), (3, 2), mode="circular"),
    "unfold, tensor": lambda h: h.unfold(2, 3, 2).unfold(3, 2, 1),
    "F.unfold": lambda h: F.unfold(h, 3, padding=1, stride=2, dilation=2),
    "F.fold": lambda h: F.fold(F.unfold(h, 3).sin(), (7, 7), 3),
    "pixel_shuffle": lambda h: F.pixel_shuffle(h[:, :4], 2),
    "pixel_unshuffle": lambda h: F.pixel_unshuffle(h[..., :6, 1:], 2),
    "channel_shuffle": lambda h: F.channel_shuffle(h, 2) * const(6, 1, 1),
    "channel shuffle by views": lambda h: h.view(3, 2, 3, 7, 7).transpose(1, 2).contiguous().view(3, 6, 7, 7).sin(),
    "chunk": lambda h: (c := h.chunk(2, 1), c[0] * c[1].sigmoid())[1],
    "split": lambda h: h.split(2, 1)[1],
    "split by sizes": lambda h: [p.sin() for p in h.split([2, 1, 3], 1)],
    "tensor_split": lambda h: h.tensor_split(4, 1)[2] * 2,
    "unbind": lambda h: torch.stack(h.unbind(1)[::-1], -1).sin(),
    "iteration": lambda h: torch.stack([row.sin() for row in h]),
    "hsplit, vstack": lambda h: torch.hstack(h.hsplit(3)) * const(7),
    "stack, cat": lambda h: torch.cat([torch.stack([h, h.sin()], 2).flatten(1, 2), const(3, 1, 7, 7)], 1),
    "view_as": lambda h: h.view_as(const(3, 3, 2, 49)),
    "reshape of non-contiguous": lambda h: h.transpose(1, 3).reshape(3, -1) * const(294),
    "contiguous": lambda h: h.permute(0, 3, 1, 2).contiguous().view(3, -1).sin(),
    "channels last": lambda h: F.conv2d(h.to(memory_format=torch.channels_last), const(4, 6, 3, 3)),
    "squeeze, unsqueeze": lambda h: h[:, :1].squeeze(1).unsqueeze(-1).squeeze(),
    "expand": lambda h: h[:, :1].expand(-1, 4, -1, -1) * const(4, 1, 1),
    "broadcast_to": lambda h: torch.broadcast_to(h.mean((2, 3), keepdim=True), (3, 6, 2, 2)) * const(2),
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h, h.mean(1, keepdim=True))[1] * const(6, 1, 1),
    "movedim, swapdims": lambda h: h.movedim(1, -1).swapdims(1, 2).sin(),
    "as_strided": lambda h: h.contiguous().as_strided((3, 6, 3), (294, 49, 1), 5),
    "meshgrid": lambda h: torch.meshgrid(h[:, 0, 0, 0], h[0, 0, 0], indexing="ij"),
    "cartesian_prod": lambda h: torch.cartesian_prod(h[:, 0, 0, 0], h[0, 0, 0, :2]).reshape(3, -1),
    "block_diag": lambda h: h.mean() * torch.block_diag(h[:, 0, 0], const(3, 2))[:3],
    "atleast, ravel": lambda h: torch.atleast_3d(h[:, 0, 0]) * h[:, :3].ravel().reshape(3, -1)[:, :7, None],
    "unflatten": lambda h: h.unflatten(1, (2, -1)).prod(1),
    "diff": lambda h: h.diff(dim=2),
    "numel, size": lambda h: h.sum((2, 3)) / (h.shape[2] * h.size(3)) + h[0].numel(),
    "real": lambda h: h.real.sin(),
    "interpolate, nearest": lambda h: F.interpolate(h, scale_factor=1.7),
    "interpolate, nearest-exact": lambda h: F.interpolate(h, (10, 4), mode="nearest-exact"),
    "interpolate, nearest 1d": lambda h: F.interpolate(T(h), 20),
    "interpolate, nearest 3d": lambda h: F.interpolate(h[:, None], (4, 9, 8)),
    "interpolate, linear": lambda h: F.interpolate(T(h), 20, mode="linear", align_corners=True),
    "interpolate, trilinear": lambda h: F.interpolate(h[:, None], (4, 9, 8), mode="trilinear"),
    "interpolate, area": lambda h: F.interpolate(h, (3, 2), mode="area"),
    "upsampled in a decoder": lambda h: h + F.interpolate(F.max_pool2d(h, 2), h.shape[2:], mode="bilinear"),
} | {
    f"interpolate, {mode}{', corners' * corners}{', antialias' * anti}": partial(
        F.interpolate, size=size, mode=mode, align_corners=corners, antialias=anti
    )
    for mode, corners, anti, size in [
        ("bilinear", False, False, (10, 4)), ("bilinear", True, False, (9, 12)), ("bilinear", False, True, (4, 5)),
        ("bicubic", False, False, (10, 4)), ("bicubic", True, False, (9, 12)), ("bicubic", False, True, (4, 5)),
    ]
}  # fmt: skip

GRID = 0.9 * torch.tanh(2 * random(3, 5, 4, 2, seed=9)) * 1.3
for _mode in ("bilinear", "nearest", "bicubic"):
    for _padding in ("zeros", "border", "reflection"):
        SHAPES[f"grid_sample, {_mode}, {_padding}"] = partial(
            F.grid_sample, grid=GRID, mode=_mode, padding_mode=_padding, align_corners=_padding == "border"
        )
SHAPES["grid_sample, 3d"] = lambda h: F.grid_sample(h[:, None], const(3, 2, 3, 4, 3), align_corners=False)


def transformed(m, h, **options):
    theta = m(h.mean((2, 3))).view(3, 2, 3)
    return F.grid_sample(h, F.affine_grid(theta, h.size(), align_corners=False), align_corners=False, **options)


def localisation():
    m = nn.Linear(6, 6)
    m.bias.data.copy_(torch.tensor([1.0, 0.1, 0.05, -0.1, 0.9, -0.07]))
    return m


for _mode, _padding in [(m, p) for m in ("bilinear", "bicubic") for p in ("zeros", "border", "reflection")]:
    _f = partial(transformed, mode=_mode, padding_mode=_padding)
    SHAPES[f"spatial transformer, {_mode}, {_padding}"] = (_f, localisation)
SHAPES["spatial transformer of a constant"] = (
    lambda m, h: F.grid_sample(const(3, 2, 8, 8), F.affine_grid(m(h.mean((2, 3))).view(3, 2, 3), (3, 2, 5, 5))),
    localisation,
)

# --- reductions, distances, norms -------------------------------------------------------------------------------------

REDUCTIONS = {
    "mean": lambda h: h.mean((2, 3)),
    "sum": lambda h: h.sum(1),
    "sum of all": lambda h: h * h.sum(),
    "nansum, nanmean": lambda h: h.nansum(1) + h.nanmean(1),
    "cumsum": lambda h: h.cumsum(2),
    "cumprod": lambda h: h.cumprod(3),
    "logcumsumexp": lambda h: h.logcumsumexp(2),
    "logsumexp": lambda h: h.logsumexp((2, 3)),
    "logaddexp": lambda h: torch.logaddexp(h, h.flip(1)),
    "norm 1": lambda h: torch.linalg.vector_norm(h, 1, (2, 3)),
    "norm 2": lambda h: torch.linalg.vector_norm(h, 2, (2, 3)),
    "norm 3": lambda h: torch.linalg.vector_norm(h, 3, (2, 3)),
    "norm inf": lambda h: torch.linalg.vector_norm(h, float("inf"), (2, 3)),
    "norm -inf": lambda h: torch.linalg.vector_norm(h, -float("inf"), 1),
    "norm 0.5": lambda h: torch.linalg.vector_norm(h, 0.5, 1),
    "Tensor.norm": lambda h: h / h.norm(dim=1, keepdim=True),
    "matrix_norm": lambda h: torch.linalg.matrix_norm(h),
    "std": lambda h: h.std((2, 3)),
    "std, biased": lambda h: h.std(1, correction=0),
    "var": lambda h: h.var((2, 3)),
    "var_mean": lambda h: torch.var_mean(h, 1, correction=0),
    "std_mean": lambda h: torch.std_mean(h, 1),
    "prod of all": lambda h: h * h[:, :, 0, 0].prod(),
    "prod": lambda h: h.prod(1),
    "softmax": lambda h: h.softmax(1),
    "softmax over positions": lambda h: T(h) * T(3 * h).softmax(-1),
    "log_softmax": lambda h: h.log_softmax(1),
    "softmin": lambda h: F.softmin(h, 1),
    "gumbel-free hard softmax": lambda h: F.one_hot(h.argmax(1), 6).movedim(-1, 1) + h.softmax(1),
    "normalize": lambda h: F.normalize(h),
    "normalize, p=1": lambda h: F.normalize(h, 1, 2),
    "cosine_similarity": lambda h: F.cosine_similarity(h, h.flip(1) + const(7), 1),
    "cosine to prototypes": lambda h: F.linear(F.normalize(h.flatten(1)), F.normalize(const(5, 294))),
    "cdist": lambda h: torch.cdist(T(h), const(5, 49)),
    "cdist, p=1": lambda h: torch.cdist(T(h), const(5, 49), p=1),
    "cdist, p=3": lambda h: torch.cdist(T(h), const(5, 49), p=3),
    "cdist, inf": lambda h: torch.cdist(T(h), const(5, 49), p=float("inf")),
    "cdist, by products": lambda h: torch.cdist(T(h), const(30, 49), compute_mode="use_mm_for_euclid_dist"),
    "cdist, both": lambda h: torch.cdist(T(h), T(h.sin()) + 1),
    "pairwise_distance": lambda h: F.pairwise_distance(h, const(7)),
    "pairwise_distance, p=1": lambda h: F.pairwise_distance(h, h.flip(1) + 0.1, p=1),
    "pdist": lambda h: torch.stack([F.pdist(row) for row in T(h)]),
    "losses": lambda h: F.mse_loss(h, const(7).expand(3, 6, 7, 7), reduction="none") + F.smooth_l1_loss(
        h, const(3, 6, 7, 7), reduction="none"
    ),
    "covariance": lambda h: torch.stack([torch.cov(row) for row in T(h)]),
    "corrcoef": lambda h: torch.stack([torch.corrcoef(row) for row in T(h)]),
    "trapezoid": lambda h: torch.trapezoid(h, dim=2),
    "renorm by hand": lambda h: h * (0.9 / h.norm(dim=1, keepdim=True)).clamp(max=1),
    "determinant": lambda h: torch.linalg.det(h + 3 * torch.eye(7)),
    "inverse": lambda h: torch.linalg.inv(h + 3 * torch.eye(7)),
    "solve": lambda h: torch.linalg.solve(h + 3 * torch.eye(7), const(7, 2)),
    "local_response_norm": lambda h: F.local_response_norm(h, 3, alpha=0.5),
    "layer_norm": lambda h: F.layer_norm(h, (7, 7), const(7, 7), const(7, 7)),
    "layer_norm, no weight": lambda h: F.layer_norm(h, (6, 7, 7)),
    "rms_norm": lambda h: F.rms_norm(h, (7,), const(7)),
    "rms_norm, no weight": lambda h: F.rms_norm(h, (7, 7)),
    "group_norm": lambda h: F.group_norm(h, 3, const(6), const(6)),
    "instance_norm": lambda h: F.instance_norm(h) * const(7, 7),
    "batch_norm": lambda h: F.batch_norm(h, const(6), const(6).abs() + 0.1, const(6), const(6, seed=1)),
    "batch statistics": lambda h: F.batch_norm(h, None, None, const(6), const(6, seed=1), training=True),
    "batch statistics by hand": lambda h: (h - h.mean((0, 2, 3), keepdim=True)) / h.std((0, 2, 3), keepdim=True),
    "layer norm, channels first": lambda h: (h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True) + 1e-6).sqrt(),
    "weight standardised": (lambda m, h: F.conv2d(h, F.layer_norm(m.weight, (6, 3, 3))), lambda: nn.Conv2d(6, 4, 3)),
    "nn.LayerNorm": (lambda m, h: m(h.permute(0, 2, 3, 1)).movedim(-1, 1), lambda: nn.LayerNorm(6)),
    "nn.InstanceNorm2d, tracking": (
        lambda m, h: m(h),
        lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
    ),
    "nn.BatchNorm2d, without statistics": (lambda m, h: m(h), lambda: nn.BatchNorm2d(6, track_running_stats=False)),
    "nn.BatchNorm1d": (lambda m, h: m(T(h)), lambda: nn.BatchNorm1d(6)),
    "torchvision FrozenBatchNorm2d": (lambda m, h: m(h), lambda: torchvision.ops.FrozenBatchNorm2d(6)),
}  # fmt: skip

# --- pools ------------------------------------------------------------------------------------------------------------

V = lambda h: h[:, None]  # noqa: E731 - a volume, (3, 1, 6, 7, 7)
POOLS = {
    "max_pool1d": lambda h: F.max_pool1d(T(h), 4, 3, 1),
    "max_pool2d": lambda h: F.max_pool2d(h, 3, 2, 1),
    "max_pool2d, dilated, ceil": lambda h: F.max_pool2d(h, 2, 2, dilation=2, ceil_mode=True),
    "max_pool3d": lambda h: F.max_pool3d(V(h), 2),
    "max_pool2d with indices": lambda h: F.max_pool2d(h, 2, return_indices=True)[0],
    "max_unpool1d": lambda h: F.max_unpool1d(*F.max_pool1d(T(h), 2, return_indices=True), 2),
    "max_unpool2d": lambda h: F.max_unpool2d(*F.max_pool2d(h[..., :6, :6], 2, return_indices=True), 2),
    "max_unpool2d of something else": lambda h: F.max_unpool2d(
        h[..., :3, :3].sin(), F.max_pool2d(h[..., :6, :6], 2, return_indices=True)[1], 2
    ),
    "max_unpool3d": lambda h: F.max_unpool3d(*F.max_pool3d(V(h)[..., :6, :6], 2, return_indices=True), 2),
    "avg_pool1d": lambda h: F.avg_pool1d(T(h), 4, 3, 1, count_include_pad=False),
    "avg_pool2d": lambda h: F.avg_pool2d(h, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_pool2d, divisor": lambda h: F.avg_pool2d(h, (2, 3), 1, divisor_override=5),
    "avg_pool3d": lambda h: F.avg_pool3d(V(h), (2, 3, 2), padding=1),
    "adaptive_avg_pool1d": lambda h: F.adaptive_avg_pool1d(T(h), 5),
    "adaptive_avg_pool2d": lambda h: F.adaptive_avg_pool2d(h, (3, None)),
    "adaptive_avg_pool3d": lambda h: F.adaptive_avg_pool3d(V(h), (4, 3, 2)),
    "adaptive_max_pool1d": lambda h: F.adaptive_max_pool1d(T(h), 5),
    "adaptive_max_pool2d": lambda h: F.adaptive_max_pool2d(h, (3, 2), return_indices=True)[0],
    "adaptive_max_pool3d": lambda h: F.adaptive_max_pool3d(V(h), (4, 3, 2)),
    "lp_pool1d": lambda h: F.lp_pool1d(T(h).exp(), 3, 4),
    "lp_pool2d": lambda h: F.lp_pool2d(h, 2, 3, 2),
    "lp_pool3d": lambda h: F.lp_pool3d(V(h), 2, 2),
    "generalised mean": lambda h: F.adaptive_avg_pool2d(h.clamp(min=1e-2).pow(3), 1).pow(1 / 3),
    "spatial pyramid": lambda h: torch.cat([F.adaptive_max_pool2d(h, s).flatten(1) for s in (1, 2, 3)], 1),
    "soft pool": lambda h: F.avg_pool2d(h * h.exp(), 2) / F.avg_pool2d(h.exp(), 2),
}

for _table in (PRODUCTS, SHAPES, REDUCTIONS, POOLS):
    for _name, _f in _table.items():
        add(_name, *(_f if isinstance(_f, tuple) else (_f,)))

# --- activations ------------------------------------------------------------------------------------------------------

ARGUMENTS = {"Threshold": (0.1, 0.3), "GLU": (1,), "PReLU": (6,), "Softmin": (1,), "Softmax": (1,), "LogSoftmax": (1,)}
for _name in nn.modules.activation.__all__:
    if _name != "MultiheadAttention":
        _make = partial(getattr(nn, _name), *ARGUMENTS.get(_name, ()))
        # torch's own gradient of a Hardsigmoid has a constant in float32.
        add(f"nn.{_name}", lambda m, h: m(2 * h), _make, tolerance=1e-7 if _name == "Hardsigmoid" else 1e-9)
ELEMENTWISE = [
    "sin", "cos", "tan", "atan", "asinh", "sinh", "cosh", "exp", "expm1", "erf", "abs", "neg", "square", "sigmoid",
    "tanh", "relu", "sinc", "i0", "deg2rad", "positive", "logit", "arctan", "erfc", "exp2", "frac",
]  # fmt: skip
POSITIVE = ["log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma"]
for _name in ELEMENTWISE + POSITIVE:
    _f = getattr(torch, _name)
    if _name == "logit":
        add("torch.logit", lambda h: torch.logit(h.sigmoid(), 1e-3))
    else:
        add(f"torch.{_name}", lambda h, f=_f, p=_name in POSITIVE: f(h.abs() + 0.5 if p else h), jumps=_name == "frac")
add("nn.GELU, tanh", lambda h: F.gelu(h, approximate="tanh"))
add("powers", lambda h: h**3 + h.abs() ** 0.5 + 2**h + h.abs().pow(h.flip(1)))
add("quotients", lambda h: h / (1 + h.flip(1) ** 2) + 1 / (2 + h.sin()) + torch.div(h, 3))
add("atan2, hypot", lambda h: torch.atan2(h, h.flip(1)) + torch.hypot(h, const(7)))
add("addcmul, addcdiv, lerp", lambda h: torch.addcmul(h, h, h.flip(1)).addcdiv(h, 2 + h.cos()).lerp(h, h.sigmoid()))
add("rsub, ldexp, xlogy", lambda h: torch.rsub(h, 2) + torch.ldexp(h, PLACES) + torch.xlogy(h, const(7).abs() + 1))

# --- recurrence and attention -----------------------------------------------------------------------------------------

S = lambda h: h.flatten(2)[..., :8].mT  # noqa: E731 - a sequence, (3, 8, 6)


def frozen(make):
    return lambda: make().requires_grad_(requires_grad=False)


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    for _name, _options in {
        "": {},
        ", bidirectional": {"bidirectional": True},
        ", two layers": {"num_layers": 2, "dropout": 0.3, "bidirectional": True},
        ", no bias": {"bias": False},
    }.items():
        _make = partial(_kind, 6, 4, batch_first=True, **_options)
        add(f"nn.{_kind.__name__}{_name}", lambda m, h: m(S(h))[0], _make, combined=_name == ", two layers")
    add(f"nn.{_kind.__name__}, frozen", lambda m, h: m(S(h))[0], frozen(partial(_kind, 6, 4, batch_first=True)))
    _make = partial(_kind, 6, 4)
    if _kind is nn.LSTM:
        add("nn.LSTM, state", lambda m, h: m(S(h).transpose(0, 1))[1][1].movedim(1, 0), _make)
        add(
            "nn.LSTM, begun",
            lambda m, h: m(S(h).transpose(0, 1), (h[None, :, :4, 0, 0],) * 2)[1][0][0],
            _make,
        )
        add("nn.LSTM, projected", lambda m, h: m(S(h))[0], partial(nn.LSTM, 6, 4, proj_size=3, batch_first=True))
    else:
        add(f"nn.{_kind.__name__}, state", lambda m, h: m(S(h).transpose(0, 1))[1].movedim(1, 0), _make)
add("nn.RNN, relu", lambda m, h: m(S(h))[0], partial(nn.RNN, 6, 4, nonlinearity="relu", batch_first=True))


def loop(cell, h):
    state = None
    for row in S(h).unbind(1):
        state = cell(row, state)
    return state


for _kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    add(f"nn.{_kind.__name__}", loop, partial(_kind, 6, 4))

ATTENTION = partial(nn.MultiheadAttention, 6, 2, batch_first=True)
for _name, _make in {"trained": ATTENTION, "frozen": frozen(ATTENTION)}.items():
    for _need in (True, False):
        _f = lambda m, h, need=_need: m(s := S(h), s, s, need_weights=need)[0]  # noqa: E731
        add(f"nn.MultiheadAttention, {_name}, need_weights={_need}", _f, _make)
    add(f"nn.MultiheadAttention, {_name}, cross", lambda m, h: m(S(h), S(h.flip(3)), S(h.sin()))[0], _make)
    add(f"nn.MultiheadAttention, {_name}, weights", lambda m, h: m(s := S(h), s, s, average_attn_weights=False), _make)
MASK = torch.zeros(8, 8, dtype=torch.bool).triu(1) | torch.ones(8, 8, dtype=torch.bool).triu(1)
add("nn.MultiheadAttention, mask", lambda m, h: m(s := S(h), s, s, attn_mask=MASK)[0], ATTENTION)
add(
    "nn.MultiheadAttention, padding",
    lambda m, h: m(s := S(h), s, s, key_padding_mask=torch.arange(8).expand(3, 8) > 5)[0],
    ATTENTION,
)
add(
    "nn.MultiheadAttention, sequence first",
    lambda m, h: m(s := S(h).transpose(0, 1), s, s)[0].transpose(0, 1),
    partial(nn.MultiheadAttention, 6, 3, bias=False, add_zero_attn=True),
)
ENCODER = partial(nn.TransformerEncoderLayer, 6, 2, 12, batch_first=True)
for _name, _options in {"": {}, ", gelu, norm first": {"activation": "gelu", "norm_first": True}}.items():
    add(f"nn.TransformerEncoderLayer, trained{_name}", lambda m, h: m(S(h)).mT, partial(ENCODER, **_options))
    add(f"nn.TransformerEncoderLayer, frozen{_name}", lambda m, h: m(S(h)).mT, frozen(partial(ENCODER, **_options)))
add("nn.TransformerEncoder, frozen", lambda m, h: m(S(h)).mT, frozen(lambda: nn.TransformerEncoder(ENCODER(), 2)))
add(
    "nn.TransformerEncoderLayer, causal",
    lambda m, h: m(S(h), src_mask=MASK, is_causal=True).mT,
    frozen(ENCODER),
)
add(
    "nn.TransformerDecoderLayer",
    lambda m, h: m(S(h), S(h.flip(3))).mT,
    partial(nn.TransformerDecoderLayer, 6, 2, 12, batch_first=True),
)


def heads(h, count=2):
    s = S(h)
    return [part.unflatten(-1, (count, -1)).transpose(1, 2) for part in (s, 2 * s.flip(1), s.sin())]


SDPA = F.scaled_dot_product_attention
add("attention by products", lambda h: (s := S(h), (s @ s.mT / 6**0.5).softmax(-1) @ s)[1])
add("sdpa", lambda h: SDPA(*heads(h)))
add("sdpa, scale", lambda h: SDPA(*heads(h), scale=0.7))
add("sdpa, causal", lambda h: SDPA(*heads(h), is_causal=True))
add("sdpa, bool mask", lambda h: SDPA(*heads(h), attn_mask=~MASK))
add("sdpa, float mask", lambda h: SDPA(*heads(h), attn_mask=const(2, 8, 8)))
add("sdpa, mask of activations", lambda h: SDPA(*heads(h), attn_mask=S(h)[:, None] @ S(h).mT[:, None]))
add("sdpa, grouped queries", lambda h: SDPA(heads(h, 6)[0], *(t[:, :2] for t in heads(h, 6)[1:]), enable_gqa=True))
add("sdpa, constant keys", lambda h: SDPA(heads(h)[0], const(3, 2, 5, 3), const(3, 2, 5, 4)))
add("sdpa, three dimensions", lambda h: SDPA(S(h), S(h), S(h)))


@way
def linear_attention(h):
    q, k, v = heads(h)
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@way
def rotary_embedding(h):
    q, k, v = heads(h, 1)
    q, k = (torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2) * const(8, 6).sin() + t for t in (q, k))
    return SDPA(q, k, v)


@way
def windows_shifted_and_merged(h):
    w = h[..., :6, :6].roll((-1, -1), (2, 3)).view(3, 6, 2, 3, 2, 3).permute(0, 2, 4, 3, 5, 1).reshape(12, 9, 6)
    w = (w @ w.mT).softmax(-1) @ w
    return w.view(3, 2, 2, 3, 3, 6).permute(0, 5, 1, 3, 2, 4).reshape(3, 6, 6, 6).roll((1, 1), (2, 3))


# --- mixtures of experts ---------------------------------------------------------------------------------------------


def experts(spread):
    """Return tokens in front of experts, of which one gets no token."""

    def mixed(m, h):
        tokens = h.permute(0, 2, 3, 1).reshape(-1, 6)
        out = torch.zeros_like(tokens)
        for chosen in (tokens[:, 0] > 0, tokens[:, 0] <= 0, tokens[:, 0] > 99):
            out = spread(out, chosen, tokens, m)
        return out.view(3, 49, 6)

    return mixed


def by_mask(out, chosen, tokens, m):
    out[chosen] = m(tokens[chosen])
    return out


def by_number(out, chosen, tokens, m):
    (rows,) = torch.where(chosen)
    out[rows] += m(tokens[rows])
    return out


for _spread in (
    by_mask,
    by_number,
    lambda out, chosen, tokens, m: out.index_add(0, chosen.nonzero()[:, 0], m(tokens[chosen])),
):
    add(f"experts, {_spread.__name__}", experts(_spread), lambda: nn.Linear(6, 6), near=True, gated=True)


# --- constants and views of them that are written ---------------------------------------------------------------------


@way
def a_buffer_counted_up_between_its_uses(h):
    buffer = torch.ones(7, dtype=h.dtype)
    y = h + buffer
    buffer.add_(1)
    y = y.sin() - buffer
    buffer.mul_(2)
    return y + buffer


@way
def a_constant_written_by_the_path_after_its_use(h):
    y = torch.ones_like(h)
    z = h - y
    y += h
    return z + y


@way
def a_constant_zeroed_after_its_use(h):
    factor = torch.full_like(h, 2.0)
    y = h.tanh() + factor
    factor.zero_()
    return y


@way(gated=True)
def a_view_made_before_its_base_depends(h):
    base = h.detach().sin()
    view = base[:, 0]
    base.add_(h)
    return view, h


@way(gated=True)
def halves_of_a_mask_that_is_multiplied(h):
    mask = (h > 0).double()
    first, second = mask[:, :3], mask[:, 3:]
    mask.mul_(h)
    return first * second


@way(gated=True)
def a_constant_written_through_its_detached_alias(h):
    constant = torch.zeros_like(h)
    constant.data[:, 0] = h[:, 0].sin()
    return constant * h + h


@way(gated=True)
def detached_in_place(h):
    gate = h * 2
    gate.detach_()
    return gate * h


@way
def a_write_into_one_row_of_an_expanded_view(h):
    base = h.mean(1, keepdim=True)
    base.expand(3, 6, 7, 7)[:, 2].sin_()
    return base


@way
def a_write_into_overlapping_windows(h):
    base = h * 2
    base.unfold(3, 3, 1)[..., 1].fill_(0.3)
    return base.sin()


def _one_part(parts):
    def written(h):
        base = h[:, :1] * 2
        (part,) = parts(base)
        part = part * 1
        base.mul_(3)
        return part.sin(), base

    return written


for _name, _parts in {
    "split": lambda base: base.split(1, 1),
    "chunk": lambda base: base.chunk(1, 1),
    "unbind": lambda base: base.unbind(1),
}.items():
    add(f"{_name} into one part, and a write into its base", _one_part(_parts))


@way
def retain_grad(h):
    y = h * 2
    if torch.is_grad_enabled():
        y.retain_grad()
    return y


# --- around modules ---------------------------------------------------------------------------------------------------


def quiet(make):
    """Return what makes a module that torch would rather have made in another way."""

    def made():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


def conv():
    return nn.Conv2d(6, 4, 3)


for _name, _make in {
    "parametrizations.weight_norm": lambda: nn.utils.parametrizations.weight_norm(conv()),
    "parametrizations.spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(conv()),
    "parametrizations.orthogonal": lambda: nn.utils.parametrizations.orthogonal(conv()),
    "utils.weight_norm": lambda: nn.utils.weight_norm(conv()),
    "utils.spectral_norm": lambda: nn.utils.spectral_norm(conv()),
}.items():
    add(_name, lambda m, h: m(h), quiet(_make))


class Block(nn.Module):
    """Some layers, in place among them."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)), inplace=True) + x


class Gated(Block):
    def forward(self, x):
        with torch.no_grad():
            gate = x.mean((2, 3), keepdim=True).sigmoid()
        return super().forward(x) * gate


for _reentrant in (True, False):
    _f = lambda m, h, r=_reentrant: checkpoint(m, checkpoint(m, h, use_reentrant=r), use_reentrant=r)  # noqa: E731
    add(f"checkpoint, use_reentrant={_reentrant}", _f, Block)
    add(f"checkpoint with a gate inside, use_reentrant={_reentrant}", _f, Gated, gated=True)


class Scriptable(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 4, 3)

    def forward(self, x):
        y = self.conv(x) * 1.5
        y[:, 0] *= 2
        return y.softmax(1) + torch.sigmoid(y) if y.shape[1] > 3 else y


def traced():
    return torch.jit.trace(Scriptable().double(), random(3, 6, 7, 7))


add("a scripted module", lambda m, h: m(h), quiet(lambda: torch.jit.script(Scriptable())))
add("a traced module", lambda m, h: m(h), quiet(traced))

KERNEL, MATRIX = const(4, 6, 3, 3), const(7, 3)
add("vmap", lambda h: torch.func.vmap(lambda row: (row.sin() @ MATRIX).softmax(0))(h))
add("vmap over channels", lambda h: torch.func.vmap(lambda c: c * c.mean() + 1, in_dims=1, out_dims=1)(h))
add("vmap of a convolution", lambda h: torch.func.vmap(lambda row: F.conv2d(row[None], KERNEL)[0])(h))
add(
    "functional_call",
    lambda m, h: torch.func.functional_call(m, {"weight": const(4, 6, 3, 3)}, h),
    conv,
)
add("compiled", lambda m, h: m(h), lambda: torch.compile(Block(), backend="eager"))
add(
    "compiled function",
    lambda m, h: m(h),
    lambda: Step(torch.compile(lambda x: (x.sin() * x.mean()).relu_(), backend="eager")),
)


add("float32 and back", lambda h: h.float().sin().double(), tolerance=1e-5)
add("a part in float32", lambda m, h: m(h.float()).double(), lambda: Single(conv()), tolerance=1e-5)
add("type_as", lambda h: h.float().tanh().type_as(h), tolerance=1e-5)


class Single(nn.Module):
    """A module that stays in float32."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def _apply(self, function, recurse=True):
        return self

    def forward(self, x):
        return self.module(x)


@way(make=lambda: Single(conv()), tolerance=0.05)
def autocast(m, h):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(h.float())
    return y.double()


SPARSE = const(5, 7) * (const(5, 7) > 0)
COO = SPARSE.to_sparse().coalesce()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    CSR = SPARSE.to_sparse_csr()
for _name, _matrix in {"COO": COO, "CSR": CSR}.items():
    add(f"sparse.mm, {_name}", lambda h, s=_matrix: torch.sparse.mm(s, h[:, 0, 0].T).T)
    add(f"sparse @, {_name}, after a write", lambda h, s=_matrix: (s @ h[:, 0, 0].T.sin().mul_(2)).T)
add("sparse of a graph", lambda h: torch.stack([torch.sparse.mm(COO, row.sin()) for row in (2 * h[:, 0]).unbind(0)]))

BOXES = torch.tensor([[0, 0.3, 0.4, 5.2, 4.7], [1, 1.1, 0.0, 6.0, 6.0], [2, 2.0, 1.5, 4.4, 6.6]], dtype=torch.float64)
add("roi_align", lambda h: torchvision.ops.roi_align(h, BOXES, 3, 0.9, 2, True))
add("roi_pool", lambda h: torchvision.ops.roi_pool(h, BOXES, 3))
add("ps_roi_align", lambda h: torchvision.ops.ps_roi_align(h[:, :4], BOXES, 2))
add("deform_conv2d", lambda h: torchvision.ops.deform_conv2d(h, const(3, 18, 5, 5), const(4, 6, 3, 3), const(4)))
add(
    "deform_conv2d, mask",
    lambda h: torchvision.ops.deform_conv2d(
        h, const(3, 18, 5, 5), const(4, 6, 3, 3), mask=h[:, :1, :5, :5].sigmoid().expand(3, 9, 5, 5)
    ),
)
add(
    "deform_conv2d, offsets of activations",
    lambda m, h: torchvision.ops.deform_conv2d(h, m(h), const(4, 6, 3, 3)),
    lambda: nn.Conv2d(6, 18, 3),
)
add("stochastic_depth", lambda h: torchvision.ops.stochastic_depth(h, 0.5, "row", training=False) * 2)
add("torchvision SqueezeExcitation", lambda m, h: m(h), lambda: torchvision.ops.SqueezeExcitation(6, 2))
add(
    "torchvision feature pyramid",
    lambda m, h: list(m({"a": h, "b": F.max_pool2d(h, 2)}).values()),
    lambda: torchvision.ops.FeaturePyramidNetwork([6, 6], 4),
)

# --- outputs ----------------------------------------------------------------------------------------------------------

add("a tuple", lambda h: h.sin(), ends=lambda y: (y, y.tanh()))
add("a dict", lambda h: h.sin(), ends=lambda y: {"a": y[:, :2].exp(), "b": [y, y.softmax(1)]})
add("an output and its view", lambda h: h.sin(), ends=lambda y: (y, y[:, :2], y))
add("an output that is written later", lambda h: h.sin(), ends=lambda y: (y[:, :2], y.mul_(2)))
add("indices beside the output", lambda h: h.sin(), ends=lambda y: (y, y.argmax(1), const(2)))
add("an output without dimensions", lambda h: h.sin(), ends=lambda y: y.square().mean())
add("an output without a step", lambda h: h)
