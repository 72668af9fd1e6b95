"""Ways to compute between two layers, of which each has to be exact."""

import warnings
from functools import partial

import torch
from against_autograd import random
from problems import Step
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from way import add, const, way

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


def list_writes():
    def overlapping_views(h):
        g = h * 2
        a, b = g[:, :4], g[:, 2:]
        a.mul_(2)
        b.sin_()
        return a * 3, b, g.tanh()

    def a_view_made_before_the_write_and_one_after(h):
        g = h * 2
        before = g[:, 1]
        g[:, :3] = g[:, 3:] * 2
        return before, g[:, 1]

    def a_view_of_itself(h):
        g = h * 2
        g[..., 0] = g[..., 1]
        g[:, 1:] = g[:, :-1].clone()
        return g

    def a_shift_into_empty(h):
        out = torch.empty_like(h)
        out[:, :, 1:] = h[:, :, :-1]
        out[:, :, :1] = 0
        return out

    def zeros_filled_in_a_loop(h):
        out = torch.zeros(3, 6, 7, 7, dtype=h.dtype)
        for i in range(6):
            out[:, i] = h[:, i].sin() + out[:, i - 1] if i > 1 else h[:, i]
        return out

    def zeros_through_a_view_made_before(h):
        out = h.new_zeros(3, 6, 7, 7)
        v = out[:, 1:3]
        v.copy_(h[:, :2].sin())
        return out, v, out[:, 2] * h[:, 0]

    def a_constant_read_before_and_after(h):
        out = torch.ones(3, 6, 7, 7, dtype=h.dtype)
        before = out * 2
        out[:, :3] *= h[:, :3]
        return before * h, out

    def an_expanded_constant_added(h):
        g = h * 2
        g.add_(const(1, 6, 1, 1).expand_as(g))
        g[:, 1:3].copy_(const(7).expand(3, 2, 7, 7))
        return g

    return locals().values()


for _function in list_writes():
    way(_function)


@way(tolerance=1e-5)
def copy_from_another_dtype(h):
    g = torch.zeros(3, 6, 7, 7, dtype=torch.float64)
    g.copy_(h)
    return g.copy_((g + h.sin()).float()).mul_(h)


@way
def put_along_views_of_a_flat_buffer(h):
    buffer = h.new_zeros(3 * 6 * 49)
    a, b = buffer.view(3, 6, 49), buffer.view(3, 6, 7, 7)
    a[:, :3] = h.flatten(2)[:, 3:]
    b[:, 3:].copy_(h[:, :3]).mul_(2)
    return a, b.sin()


# --- gates, aliases and branches --------------------------------------------------------------------------------------


def list_gates():
    def a_detached_alias_before_a_write(h):
        g = h * 2
        alias = g.detach()
        g.mul_(3)
        return g * alias

    def a_detached_view(h):
        g = h * 2
        alias = g[:, :3].detach()
        g[:, 1] = 0.3
        return g[:, 3:] * alias

    def a_straight_through_estimator(h):
        return h + (h.round() - h).detach()

    def data_read(h):
        return h * h.data.mean((2, 3), keepdim=True)

    def a_gate_without_gradients(h):
        with torch.no_grad():
            gate = h.sigmoid()
        return h * gate

    def a_gate_written_in_place_without_gradients(h):
        with torch.no_grad():
            gate = h.sigmoid()
            gate[:, 1:] *= 2
            gate.add_(h)
        return h * gate

    def gates_in_gates(h):
        with torch.no_grad():
            a = h.tanh()
            with torch.enable_grad():
                b = h.sin() * 2
            c = a * b
        return h * a + b + c

    return locals().values()


for _function in list_gates():
    way(_function, gated=True)


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


@way
def a_mask_of_positions_assigned(h):
    g = h.clone()
    g[:, :, h.mean(1)[0] > 0] = 0.2
    return g


# --- layers around one another ----------------------------------------------------------------------------------------

for _name, _f, _make in (
    ("a module called twice", lambda m, h: m(m(h).relu()), lambda: nn.Conv2d(6, 6, 3, padding=1)),
    ("a module called twice, in place", lambda m, h: m(m(h)),
        lambda: nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True))),
    ("skip", lambda m, h: h + m(h), lambda: nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.SiLU(inplace=True))),
    ("skip in place", lambda m, h: F.relu(m(h).add_(h), inplace=True), lambda: nn.Conv2d(6, 6, 3, padding=1)),
    ("dense concatenation", lambda m, h: torch.cat([h, a := m[0](h).relu(), m[1](torch.cat([h, a], 1))], 1),
        lambda: nn.ModuleList([nn.Conv2d(6, 2, 1), nn.Conv2d(8, 3, 1)])),
    ("squeeze and excite", lambda m, h: h * m(h.mean((2, 3))).sigmoid()[..., None, None],
        lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU(inplace=True), nn.Linear(3, 6))),
):  # fmt: skip
    add(_name, _f, _make)


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


def list_buffers():
    def a_buffer_counted_up_between_its_uses(h):
        buffer = torch.ones(7, dtype=h.dtype)
        y = h + buffer
        buffer.add_(1)
        y = y.sin() - buffer
        buffer.mul_(2)
        return y + buffer

    def a_constant_written_by_the_path_after_its_use(h):
        y = torch.ones_like(h)
        z = h - y
        y += h
        return z + y

    return locals().values()


for _function in list_buffers():
    way(_function)


def list_aliases():
    def a_view_made_before_its_base_depends(h):
        base = h.detach().sin()
        view = base[:, 0]
        base.add_(h)
        return view, h

    def halves_of_a_mask_that_is_multiplied(h):
        mask = (h > 0).double()
        first, second = mask[:, :3], mask[:, 3:]
        mask.mul_(h)
        return first * second

    def a_constant_written_through_its_detached_alias(h):
        constant = torch.zeros_like(h)
        constant.data[:, 0] = h[:, 0].sin()
        return constant * h + h

    def detached_in_place(h):
        gate = h * 2
        gate.detach_()
        return gate * h

    return locals().values()


for _function in list_aliases():
    way(_function, gated=True)


@way
def a_write_into_one_row_of_an_expanded_view(h):
    base = h.mean(1, keepdim=True)
    base.expand(3, 6, 7, 7)[:, 2].sin_()
    return base


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


# --- outputs ----------------------------------------------------------------------------------------------------------

add("a tuple", lambda h: h.sin(), ends=lambda y: (y, y.tanh()))
add("a dict", lambda h: h.sin(), ends=lambda y: {"a": y[:, :2].exp(), "b": [y, y.softmax(1)]})
add("an output and its view", lambda h: h.sin(), ends=lambda y: (y, y[:, :2], y))
add("an output that is written later", lambda h: h.sin(), ends=lambda y: (y[:, :2], y.mul_(2)))
add("indices beside the output", lambda h: h.sin(), ends=lambda y: (y, y.argmax(1), const(2)))
add("an output without dimensions", lambda h: h.sin(), ends=lambda y: y.square().mean())
add("an output without a step", lambda h: h)
