"""What no tape may explain is refused by name; whatever else there is in torch is exact or refused, never wrong."""

import copy
import ctypes
import math
import warnings

import pytest
import torch
from against_autograd import Path, Refused, exact_or_refused, faults, random
from torch import nn
from torch.nn import functional as F  # noqa: N812
from way import Net, Way, X, const

from pytorch_grad_cam_pcasvm.path.autograd import AutogradPath

pytestmark = pytest.mark.filterwarnings("ignore")


def behind(function, make=None, end="flat", **options):
    return Net(Way(function, make, **options), end)


def run(net, name="stem"):
    with torch.no_grad():
        return Path(net, None, [name]).run(X)


# --- functions with gradients of their own ----------------------------------------------------------------------------


def function_of(name, forward):
    """Return a function whose backward is wrong: what it computes has another gradient."""
    pulls = {"forward": staticmethod(forward), "backward": staticmethod(lambda ctx, grad: 5 * grad)}
    return type(torch.autograd.Function)(name, (torch.autograd.Function,), pulls)


def detaching_inside(ctx, x):
    with torch.enable_grad():
        inside = x.detach().requires_grad_()
        return (inside * inside).detach()


def reading_memory(ctx, x):
    """As a kernel in another language does."""
    numbers = (ctypes.c_double * x.numel()).from_address(x.contiguous().data_ptr())
    return torch.tensor([math.sin(number) for number in numbers], dtype=x.dtype).reshape(x.shape)


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 5 * grad


Squares, WritesInPlace = (
    function_of("Squares", lambda ctx, x: x * x),
    function_of("WritesInPlace", lambda ctx, x: (ctx.mark_dirty(x), x.mul_(2))[1]),
)
TwoArguments = function_of("TwoArguments", lambda ctx, x, y: x + y)
MarksItsInput = function_of("MarksItsInput", lambda ctx, x: (ctx.mark_dirty(x), x)[1])
OWN = [
    function_of("HandsItsInputBack", lambda ctx, x: x),
    function_of("HandsAViewBack", lambda ctx, x: x.view_as(x)),
    function_of("Rounds", lambda ctx, x: x.round()),
    function_of("ReadsTheShape", lambda ctx, x: torch.zeros_like(x)),
    function_of("DetachesInside", detaching_inside),
    function_of("ReadsMemory", reading_memory),
    *(Squares, WritesInPlace, NewStyle),
]


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
def test_a_function_with_a_gradient_of_its_own_is_refused_by_its_name(own, before):
    net = behind(lambda h: own.apply(h.sin() if before else h * 1))
    with pytest.raises(Refused, match=own.__name__):
        run(net)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda h: h.sin() + MarksItsInput.apply(h * 2), r"an autograd\.Function that marks its argument dirty"),
        (lambda h: TwoArguments.apply(const(7), h), "TwoArguments"),  # the second alone is on the path
        (lambda h: h + 0.1 * Squares.apply(h), "Squares"),  # which leads back to it
    ],
)
def test_how_else_it_is_noticed(function, message):
    with pytest.raises(Refused, match=message):
        run(behind(function))


def calling(Squares):  # noqa: N803 - another class of that name is the module's own
    return lambda h: Squares.apply(h * 1)


def test_a_function_that_has_ended_is_found_by_the_name_that_its_caller_knows_it_by():
    with pytest.raises(Refused, match=r"HandsItsInputBack is an autograd\.Function"):
        run(behind(calling(OWN[0])))


@pytest.mark.parametrize("own", [own for own in OWN if own is not WritesInPlace])
def test_applied_to_constants_it_passes(own):
    net = behind(lambda h: h * own.apply(const(7)).sum() + own.apply(const(7)))
    assert faults(net, "stem", X, net.starts()) == []


def test_in_the_stem_it_passes():
    net = behind(lambda h: h.sin())
    net.stem = nn.Sequential(net.stem, nn.Identity())
    net.stem[0].register_forward_hook(lambda module, args, out: Squares.apply(out))
    assert faults(net, "stem", X, net.starts()) == []


def test_behind_a_gate_it_passes_as_a_constant():
    def gated(h):
        with torch.no_grad():
            gate = Squares.apply(h)
        return h * gate

    net = behind(gated)
    assert faults(net, "stem", X, net.starts(), gated=True) == []


# --- steps without a gradient, paths that lead nowhere, hooks ---------------------------------------------------------


class Quantized(nn.Module):
    def __init__(self, width):
        super().__init__()
        linear = nn.Sequential(nn.Linear(width, 5))
        self.linear = torch.ao.quantization.quantize_dynamic(linear.float().eval(), {nn.Linear}, dtype=torch.qint8)

    def _apply(self, function, recurse=True):
        return self

    def forward(self, h):
        return self.linear(h.flatten(1).float()).double()


def test_a_quantized_layer_is_refused_by_its_operation():
    with pytest.raises(Refused, match=r"quantized\.linear_dynamic"):
        run(behind(lambda m, h: m(h), lambda: Quantized(294)))


LEADING_NOWHERE = {
    "constants": lambda h: torch.ones(3, 4, dtype=h.dtype),
    "detached": lambda h: h.detach().sin(),
    "the shape": lambda h: h.new_full((3, 4), float(h.shape[1])),
    "without gradients": torch.no_grad()(lambda h: h.sin()),
    "comparisons": lambda h: (h > 0).double(),
}


@pytest.mark.parametrize("case", LEADING_NOWHERE)
def test_an_output_that_does_not_depend_on_the_layer(case):
    with pytest.raises((Refused, ValueError), match="stem"):
        run(behind(LEADING_NOWHERE[case]))


HOOKS = {
    "full": lambda module: module.register_full_backward_hook(lambda module, given, grad: (2 * given[0],)),
    "full, only looking": lambda module: module.register_full_backward_hook(lambda module, given, grad: None),
    "before": lambda module: module.register_full_backward_pre_hook(lambda module, grad: (2 * grad[0],)),
    "tensor": lambda module: module.register_forward_hook(
        lambda module, args, out: out.register_hook(lambda grad: 2 * grad) and None
    ),
}


@pytest.mark.parametrize("hook", ["full", "before"])
def test_a_backward_hook_behind_the_layer_is_refused(hook):
    net = behind(lambda m, h: m(h), lambda: nn.Conv2d(6, 4, 3))
    HOOKS[hook](net.part)
    with pytest.raises(Refused, match=r"hook|differs from autograd"):
        run(net)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_exact_or_refused(hook):
    net = behind(lambda m, h: m(h), lambda: nn.Conv2d(6, 4, 3))
    HOOKS[hook](net.part)
    exact_or_refused(net, "stem", X, net.starts())


def test_a_forward_hook_is_a_step():
    net = behind(lambda m, h: m(h), lambda: nn.Conv2d(6, 4, 3))
    net.part.register_forward_hook(lambda module, args, out: out.sin())
    net.part.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert faults(net, "stem", X, net.starts()) == []


# --- chance -----------------------------------------------------------------------------------------------------------

CHANCE = {
    "rand": lambda h: h * torch.rand(7, dtype=h.dtype),
    "rand_like": lambda h: h + torch.rand_like(h),
    "randn": lambda h: h * torch.randn(6, 1, 1, dtype=h.dtype),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "normal_": lambda h: h + torch.empty_like(h).normal_(),
    "uniform_ in place": lambda h: h.clone()[:, :3].uniform_() + h[:, 3:],
    "randperm": lambda h: h[:, torch.randperm(6)] * const(6, 1, 1),
    "multinomial": lambda h: h * torch.multinomial(h[:, 0, 0].exp(), 1)[..., None, None],
    "dropout": lambda h: F.dropout(h, 0.5, training=True),
    "dropout in place": lambda h: F.dropout(h, 0.5, training=True, inplace=True),
    "dropout2d": lambda h: F.dropout2d(h, 0.5, training=True),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.5, training=True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, dim=1),
    "fractional_max_pool2d": lambda h: F.fractional_max_pool2d(h, 2, output_size=3),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.5),
}


@pytest.mark.parametrize("case", CHANCE)
def test_chance_behind_the_layer_is_refused(case):
    with pytest.raises((Refused, ValueError), match=r"dropout|bernoulli|rand|different numbers|random numbers|draws"):
        run(behind(CHANCE[case]))


def test_chance_before_the_layer_is_refused():
    net = behind(lambda h: h.sin())
    net.stem.register_forward_pre_hook(lambda module, args: (args[0] * torch.rand_like(args[0]),))
    with pytest.raises((Refused, ValueError)):
        run(net)


QUIET = {
    "dropout in evaluation": lambda h: F.dropout(h.sin(), 0.5, training=False),
    "dropout of nothing": lambda h: F.dropout(h.sin(), 0.0, training=True),
    "dropout2d in evaluation": lambda h: F.dropout2d(h.sin(), 0.5, training=False),
    "feature_alpha_dropout in evaluation": lambda h: F.feature_alpha_dropout(h.sin(), 0.5, training=False),
    "rrelu in evaluation": lambda h: F.rrelu(h, training=False),
    "attention without dropout": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.0),
}


@pytest.mark.parametrize("case", QUIET)
def test_dropout_that_is_off_passes(case):
    net = behind(QUIET[case])
    assert faults(net, "stem", X, net.starts()) == []


# --- writes that autograd, or the tape, does not see ------------------------------------------------------------------


def _without_gradients(write):
    def function(h):
        g = h * 2
        with torch.no_grad():
            write(g)
        return g.sin()

    return function


def _aliased(g):
    return torch.empty(0, dtype=g.dtype).set_(g.untyped_storage(), 0, g.shape)


HIDDEN = {
    "data": lambda h: (g := h * 2, g.data.mul_(3), g.sin())[2],
    "data assigned": lambda h: (g := h.sin(), setattr(g, "data", g.data * 2), g * 3)[2],
    "without gradients": _without_gradients(lambda g: g.mul_(3)),
    "without gradients, through a view": _without_gradients(lambda g: g[:, 1].fill_(0.5)),
    "through a detached alias": lambda h: (g := h * 2, g.detach()[:, 1].mul_(3), g.sin())[2],
    "through numpy": lambda h: (g := h * 2, g.detach().numpy()[:, 1].fill(0.5), g.sin())[2],
    "through a storage": lambda h: (g := h * 2, _aliased(g).mul_(3), g.sin())[2],
    "through DLPack": lambda h: (g := h * 2, torch.from_dlpack(g.detach()).mul_(3), g.sin())[2],
    "the layer itself": lambda h: (h.data[:, 0].fill_(0.5), h.sin())[1],
}


@pytest.mark.parametrize("case", HIDDEN)
def test_a_write_behind_autograd_is_refused_where_it_is_read_later(case):
    with pytest.raises(Refused):
        run(behind(HIDDEN[case]))


def test_a_write_into_what_nothing_reads_later():
    def f(h):
        g = h * 2
        y = g + 1
        with torch.no_grad():
            g.mul_(3)
        return y.sin()

    exact_or_refused(behind(f), "stem", X)


def test_activations_that_are_written_over_have_no_gradient_or_are_refused():
    exact_or_refused(behind(lambda h: h.fill_(0.3)), "stem", X)


# --- everything else --------------------------------------------------------------------------------------------------

OUT = {
    "out=": lambda h: torch.sin(h, out=torch.empty_like(h)) if not h.requires_grad else h.sin(),
    "out= of a matmul": lambda h: (
        torch.matmul(h, const(7, 7), out=h.new_empty(3, 6, 7, 7)) if not h.requires_grad else h @ const(7, 7)
    ),
}
PAIRS = torch.tensor([[1, 2], [3, 1], [2, 2]])
OTHERS = {
    "fft": lambda h: torch.fft.fft2(h).real,
    "rfft and back": lambda h: torch.fft.irfft2(torch.fft.rfft2(h) * const(7, 4), s=(7, 7)),
    "fft, magnitude": lambda h: torch.fft.fft(h).abs(),
    "global filter": lambda h: torch.fft.ifft2(torch.fft.fft2(h) * torch.view_as_complex(const(7, 7, 2))).real,
    "stft": lambda h: torch.stft(h.flatten(1), 32, window=torch.ones(32).double(), return_complex=True).abs(),
    "complex": lambda h: torch.view_as_real(torch.complex(h, h.sin()).exp()).flatten(1),
    "polar": lambda h: torch.polar(h.abs() + 1, h).imag,
    "svd": lambda h: torch.linalg.svdvals(h[:, :, :5]),
    "eigh": lambda h: torch.linalg.eigvalsh(h @ h.mT + torch.eye(7)[:7, :7]),
    "qr": lambda h: torch.linalg.qr(h)[1].abs(),
    "cholesky": lambda h: torch.linalg.cholesky(h @ h.mT + 3 * torch.eye(7)),
    "pinv": lambda h: torch.linalg.pinv(h[..., :4]),
    "lstsq": lambda h: torch.linalg.lstsq(h, const(3, 6, 7, 2)).solution,
    "matrix_exp": lambda h: torch.linalg.matrix_exp(h),
    "slogdet": lambda h: torch.linalg.slogdet(h + 3 * torch.eye(7))[1],
    "special": lambda h: torch.special.i1(h) + torch.special.ndtr(h) + torch.special.erfcx(h),
    "polygamma": lambda h: torch.polygamma(1, h.abs() + 1) + torch.mvlgamma(h.abs() + 3, 2),
    "betainc": lambda h: torch.special.entr(h.abs() + 0.1) + torch.special.xlog1py(h, h.abs()),
    "nested": lambda h: torch.nested.as_nested_tensor([h[0, 0], h[1, 0]]).to_padded_tensor(0.0).mean() * h,
    "sparse of activations": lambda h: torch.sparse.mm(h[:, :, 0, 0].to_sparse(), const(6, 4)),
    "ctc": lambda h: F.ctc_loss(
        h.flatten(2).permute(2, 0, 1).log_softmax(-1), PAIRS, (49,) * 3, (2,) * 3, reduction="none"
    ),
    "cross entropy": lambda h: F.cross_entropy(h, torch.ones(3, 7, 7, dtype=torch.long), reduction="none"),
    "kl": lambda h: F.kl_div(h.log_softmax(1), const(6, 1, 1).softmax(0).expand(3, 6, 7, 7), reduction="none"),
    "triplet": lambda h: F.triplet_margin_loss(*h.flatten(1).tensor_split((98, 196), 1), reduction="none"),
    "embedding_bag": lambda h: F.embedding_bag(torch.tensor([[0, 1], [2, 0], [1, 1]]), h[:, 0, 0]),
    "histogram": lambda h: h * torch.histc(h.detach(), 4)[0],
    "unique": lambda h: h * h.detach().unique()[3],
    "nonzero": lambda h: h * len(h.nonzero()),
    "masked_select": lambda h: h * h.masked_select(h > 0.1).mean(),
    "unfold and fold in place": lambda h: F.fold(F.unfold(h, 3).relu_(), (7, 7), 3).mul_(0.5),
    "gradient": lambda h: torch.gradient(h, dim=2)[0],
    "cov": lambda h: torch.cov(h.flatten(1)),
    "bincount": lambda h: h * torch.bincount((h[0, 0] > 0).long().flatten())[0],
    "jvp": lambda h: torch.func.jvp(torch.sin, (h,), (h,))[1],
    "grad inside": lambda h: torch.func.grad(lambda x: x.sin().sum())(h),
    "hann window": lambda h: h * torch.hann_window(7, dtype=h.dtype),
    "lstm of packed rows": lambda h: nn.utils.rnn.pad_packed_sequence(
        nn.utils.rnn.pack_padded_sequence(h.flatten(2).mT, (49, 40, 30), batch_first=True), batch_first=True
    )[0],
} | OUT  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_whatever_else_is_exact_or_refused(case):
    net = behind(OTHERS[case])
    reason = exact_or_refused(net, "stem", X, net.starts(), gated=case in ("histogram", "unique"))
    assert reason is None or len(reason) > 20


CUSTOM = torch.library.Library("tape_tests", "DEF")
CUSTOM.define("cube(Tensor x) -> Tensor")
CUSTOM.impl("cube", lambda x: x**3, "CPU")


@torch.library.custom_op("tape_tests::fourth", mutates_args=())
def fourth(x: torch.Tensor) -> torch.Tensor:
    return x**4


fourth.register_autograd(
    lambda ctx, grad: 4 * grad * ctx.saved_tensors[0] ** 3,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def test_an_operator_of_a_library_is_refused_by_its_name():
    with pytest.raises(Refused, match="fourth"):
        run(behind(lambda h: fourth(h)))


def test_an_operator_without_a_gradient_is_refused():
    with pytest.raises((Refused, ValueError), match=r"cube|stem"):
        run(behind(lambda h: torch.ops.tape_tests.cube(h)))


def test_an_operator_of_constants_passes():
    net = behind(lambda h: h * torch.ops.tape_tests.cube(const(7)))
    assert faults(net, "stem", X, net.starts()) == []


def test_a_scripted_function_is_exact_or_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = torch.jit.trace(lambda x: (x.sin() * x).relu(), random(3, 6, 7, 7))
    net = behind(lambda h: h + function(h))
    exact_or_refused(net, "stem", X, net.starts())


# --- what the dispatcher does not show --------------------------------------------------------------------------------


READING = {
    "a tensor of numbers": lambda h: h * torch.tensor([h.max().detach(), h.min().detach()], dtype=h.dtype).sum(),
    "a copy": lambda h: h * copy.deepcopy(h.detach()).mean((2, 3), keepdim=True),
    "its memory": lambda h: h * h.detach().contiguous().storage()[5],
}


@pytest.mark.parametrize("case", READING)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_numbers_read_by_python_are_looked_at_from_a_baseline(case):
    net = behind(READING[case])
    assert faults(net, "stem", X, net.starts(), gated=True) == []
    passed = run(net)
    with pytest.raises(Refused, match="another function at the baseline"):
        passed.run_from({0: net.starts()[0]})


class Sub(torch.Tensor):
    pass


def exchanged(m, h):
    weight = m.weight.data
    m.weight.data = weight * 2
    try:
        return m(h)
    finally:
        m.weight.data = weight


def asking_autograd(h):
    with torch.enable_grad():
        weight = torch.ones(7, dtype=h.dtype, requires_grad=True)
        return h * torch.autograd.grad((weight**3).sum(), weight)[0]


UNSEEN = {
    "a subclass": ("a tensor of another class", lambda h: h + h.as_subclass(Sub).sin().as_subclass(torch.Tensor), None),
    "a Parameter": ("as a Parameter", lambda h: h * nn.Parameter(h), None),
    "exchanged weights": ("weight.data = ", exchanged, lambda: nn.Linear(7, 7)),
    "autograd itself": ("the network calls autograd itself", asking_autograd, None),
    "complex numbers": (
        "view_as_real of a tensor is written into",
        lambda h: torch.view_as_real(torch.complex(h, h))[..., 1].mul_(2),
        None,
    ),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_what_cannot_be_seen_is_refused(case):
    match, function, make = UNSEEN[case]
    net = behind(function, make)
    with pytest.raises(Refused, match=match):
        pulled_back(net)


def pulled_back(net):
    passed = run(net)
    return passed.pullback([torch.ones(1, *passed.output.shape, dtype=torch.float64)], 0).dense()


class Flattening(nn.Module):
    def forward(self, h):
        return h.flatten(2) * 2


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, random(3, 6, 7, 7))])
def test_a_view_in_scripted_code_is_explained_by_autograd_too(make):
    net = behind(lambda m, h: m(h), lambda: make(Flattening()))
    seeds = [random(2, *run(net).output.shape)]
    by_autograd = AutogradPath(net, None, ["stem"]).run(X).pullback(seeds, 0).dense()
    torch.testing.assert_close(run(net).pullback(seeds, 0).dense(), by_autograd)


def test_what_cuts_the_gradient_is_named():
    with pytest.raises(
        Refused, match=r"no gradient leads from the target layer 'stem' .*: aten\.detach .*passes none on"
    ):
        run(behind(lambda h: h.sin().detach()))
