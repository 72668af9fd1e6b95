"""What networks, the path through them, methods and maps refuse, and what follows the advice."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

from torch.nn import functional as F  # noqa: N812 - torch's own habit
from towers import Attention, Tower
from ways_builders import *

from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormAblationCAM,
    ClosedFormHiResCAM,
    ClosedFormLayerCAM,
    ClosedFormXGradCAM,
    RelevanceCAM,
    mean_activations,
    recombined,
)
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM


class Checked(ClosedFormGradCAM):
    """A method that compares itself with autograd first."""

    def explain(self, images: Any, *args: Any, **options: Any) -> SignedMaps:
        self.check(images)
        return super().explain(images, *args, **options)


def features_of_masks(pool: str, masks: bool, **options: Any) -> np.ndarray:
    """Return features of pictures with masks, or with labels."""
    labels = torch.zeros(8, 8, 8) if masks else torch.zeros(8)
    return extract_features(BACKBONE, [(PICTURES[:8], labels)], "0", pool=pool, progress=False, **options)[0]


def recombined_at(place: Any) -> SignedMaps:
    net = net_at("dense").eval()
    targets = [PCATarget(b, at=place) for b in range(2)]
    components = ContributionCAM(net, ["0"], baseline="zero").explain(PICTURES[:2], targets)
    return recombined(components, net.head, SVMTarget())


BACKWARD, FOREIGN, PATH, RECORDER, VALUES = (
    f"{name}.py: " for name in ("path/backward", "path/foreign", "path/record", "tape/recorder", "tape/alias_tracker")
)


def with_facts(function: Any = torch.special.i0, step: Any = None, **facts: Any) -> Callable[[], SignedMaps]:
    """Return a function for maps behind such a step, whose rule is right, and says this of itself."""

    def follow() -> SignedMaps:
        def flipped(input: Tensor, dims: Any, *, y: Tensor, grad: Tensor) -> Tensor:
            return grad.flip([dim + 1 for dim in dims])

        def slope(input: Tensor, *, y: Tensor, grad: Tensor) -> Tensor:
            return grad * torch.special.i1(input)

        register_jacobian(function, **facts)(slope if function is torch.special.i0 else flipped)
        return stepped(step or function)

    return follow


def with_bessel(
    method: Any = ClosedFormGradCAM, layer: str = "stem", jacobian: str = "closed_form", **rule: Any
) -> Any:
    bessel(**rule)
    options = {"baseline": "zero"} if method is ContributionCAM else {}
    return stepped(torch.special.i0, method, layer, jacobian=jacobian, **options)


def not_understood(input: Tensor, *, y: Tensor, grad: Tensor) -> Tensor:
    raise TypeError("it is of no use")


class Inner(nn.Module):
    """A layer in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def inside_a_layer(*layers: str) -> SignedMaps:
    @register_jacobian(Inner, secant="linear")
    def rule(module: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
        return 2 * torch.einsum("kndhw,dc->knchw", grad, module.inner.weight[:, :, 0, 0])

    return stepped(Inner(), ContributionCAM, [*layers], baseline="zero")


class Moded(nn.Module):
    """A mode that ends behind the target layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.later = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            y = self.stem(x).tanh()
        return self.later(y).tanh().flatten(1)


def moded_outside() -> SignedMaps:
    with torch.device("cpu"):
        return stepped(torch.tanh)


def written_over(x: Tensor) -> Tensor:
    y = 2 * x
    y.data.mul_(3)
    return y


def hooked() -> nn.Module:
    layer = nn.Tanh()
    layer.register_full_backward_hook(lambda *given: None)
    return layer


class Doubling(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def doubling() -> SignedMaps:
    register_jacobian(Doubling)(lambda x, *, y, grad: 2 * grad)
    return stepped(lambda x: Doubling.apply(x))


class DoublingForward(Doubling):
    """With a forward derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x

    @staticmethod
    def jvp(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x


def registered_doubling(
    method: Any, function: Any = Doubling, rule: Any = lambda x, *, y, grad: 2 * grad
) -> SignedMaps:
    register_jacobian(function, secant="linear")(rule)
    return stepped(lambda x: function.apply(x), method)


class Aside(Stepped):
    """A step that the features do not look at."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).tanh()
        self.step(y)
        return self.later(y).tanh().flatten(1)


def several_written(x: Tensor) -> Tensor:
    y = 2 * x
    torch._foreach_mul_([y, x.exp()], 3.0)
    return y


def other_memory(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.set_(2 * x)
    return y


class Exchanged(nn.Module):
    """A layer with other weights for the time of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight.data
        self.conv.weight.data = 2 * weight
        y = self.conv(x)
        self.conv.weight.data = weight
        return y


class Doubled(Exchanged):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, 2 * self.conv.weight, self.conv.bias)


def in_complex(x: Tensor) -> Tensor:
    z = torch.complex(x, x)
    torch.view_as_real(z)[..., 1].mul_(2)
    return z.real + z.imag


def in_a_thread(function: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def drawn_anew(x: Tensor) -> Tensor:
    return torch.rand(4, 6, 6, generator=torch.Generator(x.device).manual_seed(0), dtype=x.dtype)


def overlapping(x: Tensor, write: Callable[[Tensor, float], Tensor]) -> Tensor:
    y = 1.5 * x
    write(y.unfold(2, 3, 1), 2.0)
    return y


def asking_autograd(x: Tensor) -> Tensor:
    with torch.enable_grad():
        weight = torch.ones((), dtype=x.dtype, requires_grad=True)
        return x * torch.autograd.grad(weight**3, weight)[0]


class Folded(Attention):
    """Attention whose heads are in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        return self.proj(F.scaled_dot_product_attention(q, k, v).unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2))


def tokens(
    layer: str,
    pool: str = "cls",
    *,
    heads: bool = False,
    folded: bool = False,
    transform: Any = "tokens",
    method: Any = ClosedFormGradCAM,
    **options: Any,
) -> SignedMaps:
    """Return the maps of a small transformer."""
    backbone = seeded(lambda: Tower(**options))
    if folded:
        backbone.blocks[1].attn.__class__ = Folded
    images = random(20, 3, 12, 16) + (torch.arange(20) % 2).reshape(-1, 1, 1, 1)
    net = PCASVMNet(backbone, head_for(backbone, images, pool=pool), pool=pool).eval()
    return method(net, [layer], transform).explain(images[:2], heads=heads)


def another_baseline(step: Any) -> Callable[[], SignedMaps]:
    """Return a function for the maps from the mean of the activations."""

    def follow() -> SignedMaps:
        mean = seeded(lambda: Stepped(Step(step))).stem(IMAGES).mean(0).detach()
        return stepped(step, ContributionCAM, baseline="mean", mean=mean)

    return follow


def fails_at_zero(x: Tensor) -> Tensor:
    if not x.any():
        raise RuntimeError("nothing to see")
    return 2 * x


def under_autocast(*, inside: bool) -> SignedMaps:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        return stepped(torch.tanh, ClosedFormShapleyCAM)


class ChannelsLast(nn.Module):
    """Activations (N, H, W, C) behind ``stem``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 9, 3, 2, padding=1), Step(lambda x: x.permute(0, 2, 3, 1).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stem(x)).mean((1, 2))


class CropByCrop(Crops):
    """The mean over crops, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.body(crop) for crop in x.unbind(1)]).mean(0)


def several_calls(layer: str) -> SignedMaps:
    backbone = CropByCrop()
    source = {"layer": layer, "pool": lambda t: t.mean((2, 3))}
    net = PCASVMNet(backbone, head_for(backbone, CROPS, **source), **source).eval()
    return ClosedFormGradCAM(net, [layer.replace("body.1", "body.0")]).explain(CROPS[:3])


def foreign(make: Callable[[], Any], part: Callable[[Any], Any] = lambda given: given, **options: Any) -> SignedMaps:
    """Return maps of what somebody made of a network, a program or a wrapper, whose head was fitted behind itself."""
    backbone = seeded(lambda: Stepped(Step(torch.tanh)))
    given = part(make())
    if type(given) is dict:  # weights taken from it
        backbone.load_state_dict(given)
        given = backbone
    net = PCASVMNet(given, head_for(backbone)).eval()
    return ClosedFormGradCAM(net, ["stem"], **options).explain(IMAGES[:3])


def scripted() -> Any:
    return torch.jit.trace(seeded(lambda: Stepped(Step(torch.tanh))), IMAGES)


def exported() -> Any:
    images = {0: torch.export.Dim("images", min=2)}
    return torch.export.export(seeded(lambda: Stepped(Step(torch.tanh))), (IMAGES,), dynamic_shapes=(images,))


class NeuralNet:
    """As skorch's, and as wrappers of others are."""

    __module__ = "skorch.net"

    def __init__(self) -> None:
        self.module_ = seeded(lambda: Stepped(Step(torch.tanh)))


class Learner:
    """As fastai's."""

    def __init__(self) -> None:
        self.model = NeuralNet().module_


KEPT = random(4, 6, 6)
BY_AUTOGRAD = "use autograd on the path, as ClosedFormGradCAM(net, [layer], jacobian='autograd')"


def called(targets: Any, estimator: Any = None) -> np.ndarray:
    """Return maps from a call as in pytorch-grad-cam."""
    net = net_of(make_pipeline(PCA(2), SVC()) if estimator is None else estimator)
    return ClosedFormGradCAM(net, ["0"])(PICTURES[:3], targets)


def apart(use: Callable[..., SignedMaps]) -> SignedMaps:
    """Return what becomes of component maps that start at different activations."""
    torch.manual_seed(2)
    body = nn.Conv2d(2, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.GELU(), nn.Flatten()
    backbone = nn.Sequential(*body, nn.Linear(200, 12), nn.ReLU(), nn.Linear(12, 8)).double()
    labels = np.arange(60) % 2
    x = torch.randn(60, 2, 12, 12).double() + torch.randn(2, 2, 1, 1).double()[labels]
    with torch.no_grad():
        features = backbone(x).numpy()
    head = make_pipeline(StandardScaler(), PCA(5), SVC()).fit(features, labels)
    mean = mean_activations(backbone, [x], "3", progress=False)
    net = PCASVMNet(backbone, head).eval()

    def explain(baseline: str, targets: Any = None) -> SignedMaps:
        return ContributionCAM(net, ["3"], mean=mean, baseline=baseline).explain(x[:2], targets)

    return use(explain("neutral"), explain, head)


def untold(use: Callable[..., SignedMaps]) -> SignedMaps:
    """Return what becomes of maps of as many components as there are features, of which they do not tell."""
    pipeline = make_pipeline(StandardScaler(), PCA(), LinearSVC())
    explain = partial(ContributionCAM(net_of(pipeline), ["0"]).explain, PICTURES[:3])
    maps = explain()
    return use(replace(maps, output=maps.output.as_subclass(torch.Tensor)), explain, pipeline)


def machine_behind(components: SignedMaps, *, whole: bool = True, target: Any = None) -> SignedMaps:
    pipeline = make_pipeline(StandardScaler(), PCA(3), LinearSVC()).fit(FEATURES, THREE)
    return recombined(components, pipeline if whole else pipeline[:-1], target or SVMTarget(0))


def several(method: Any, *, one: bool = False, call: str = "explain") -> Any:
    backbone = seeded(lambda: Stepped(nn.Tanh()))
    cam = method(PCASVMNet(backbone, head_for(backbone)).eval(), ["step"] if one else ["stem", "step"])
    return getattr(cam, call)(IMAGES[:3])


class Pair(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.one(x).tanh().mean((2, 3)), self.other(y).tanh().mean((2, 3))], 1)


def pair(*layers: str, call: bool = False, size: int = 6) -> Any:
    backbone, inputs = seeded(Pair), (IMAGES, IMAGES.flip(0)[..., :size, :size])
    features, y = extract_features(backbone, [(inputs, torch.arange(40) % 2)], progress=False)
    net = PCASVMNet(backbone, make_pipeline(StandardScaler(), PCA(2), SVC()).fit(features, y)).eval()
    cam, rows = ContributionCAM(net, [*layers], baseline="zero"), tuple(x[:3] for x in inputs)
    if call:
        return cam(rows, [SVMTarget(0)] * 3)
    maps = cam.explain(rows)
    return maps[0] if isinstance(maps, list) else maps


def two_sizes(one, other, **how):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Flatten()).eval()
    return extract_features(net, [torch.randn(2, 3, side, side) for side in (one, other)], progress=False, **how)[0]


class Wave(nn.Module):
    """Takes signals (N, L)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(1)).tanh().mean(2)


class SignalTower(nn.Module):
    """Patches of a signal as tokens, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv1d(2, 8, 4, 4)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.embed(x).mT)).mean(1)


class Fields(nn.Module):
    """A network with a field for its output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = BACKBONE

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(pooler_output=self.body(x))


def squeezed(count: int, **options: Any) -> Any:
    net = nn.Sequential(BACKBONE, Step(lambda features: features.squeeze())).eval()
    return extract_features(net, [PICTURES[:count]], progress=False, **options)[0]


def with_fields(**options: Any) -> Any:
    return extract_features(Fields(), [PICTURES[:4]], progress=False, **options)[0]


def compiled() -> Any:
    backbone = seeded(lambda: Stepped(nn.Tanh()))
    return torch.compile(PCASVMNet(backbone, head_for(backbone)).eval(), backend="eager")(IMAGES[:3])


class Unused(Stepped):
    """A network with a layer that never runs."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh())
        self.unused = nn.Linear(2, 2)


def on_tiles(pool: Any = "mean") -> TiledNet:
    return TiledNet(WINDOW, "1", pool, tiles=(2, 1), size=6).eval()


def maps_of_tiles(method: Any) -> SignedMaps:
    backbone = on_tiles()
    x = random(120, 3, *backbone.canvas) + torch.eye(3).repeat(40, 1)[..., None, None]
    with torch.no_grad():
        head = make_pipeline(PCA(2), SVC()).fit(backbone(x).numpy(), THREE)
    return method(PCASVMNet(backbone, head).eval(), ["net.1"]).explain(x[:2], SVMTarget(0))


def maps_of_larger(method: Any) -> SignedMaps:
    rows = extract_features(WINDOW, [PICTURES], "1", pool="mean", progress=False)[0]
    net = PCASVMNet(WINDOW, SVC().fit(rows, THREE), "1", pool="mean").eval()
    return method(net, ["1"]).explain(random(2, 3, 6, 11), SVMTarget(0))


MEAN = {"baseline": "mean"}


# fmt: off
ROWS = [
    Row("network/extraction.py: are for rows of positions",
        partial(features_of_masks, pool="mean", masks=False, sample=3), "are for rows of positions: use pool='dense'", {
        "use pool='dense'": partial(features_of_masks, pool="dense", masks=False, sample=3)}),
    Row("network/extraction.py: the labels are masks", partial(features_of_masks, pool="mean", masks=True),
        "the labels are masks, (8, 8, 8), but there is one row of features for each image", {
        "use pool='dense'": partial(features_of_masks, pool="dense", masks=True),
        "give one label per image": partial(features_of_masks, pool="mean", masks=False)}),
    Row("maps/recombination.py: of one position alone", partial(recombined_at, "max"),
        "maps of decisions are sums of component maps of one position alone", {
        "make them with PCATarget(b, at=(row, column)) for every b": partial(recombined_at, (1, 1)),
        "explain the decisions, cam.explain(x, [SVMTarget(at=...)])": partial(at_a_place, pool="dense")}),
    Row(BACKWARD + "heads can be separated", partial(tokens, "blocks.1.norm1", heads=True),
        "and there is none after the target layer", {
        "attn_implementation='sdpa'": partial(tokens, "blocks.1.norm1", heads=True, fused=True),
        "leave heads=False": partial(tokens, "blocks.1.norm1")}),
    Row(BACKWARD + "heads can be separated", partial(tokens, "blocks.1.norm2", "mean", heads=True, fused=True),
        "and there is none after the target layer", {
        "choose the norm before an attention": partial(tokens, "blocks.1.norm1", "mean", heads=True, fused=True),
        "leave heads=False": partial(tokens, "blocks.1.norm2", "mean", fused=True)}),
    Row(BACKWARD + "not everything after the target layer goes through one attention",
        partial(tokens, "blocks.0", "mean", heads=True, fused=True),
        "not everything after the target layer goes through one attention", {
        "the norm before the attention of the last block": partial(tokens, "blocks.1.norm1", "mean", heads=True,
            fused=True)}),
    Row(BACKWARD + "heads and images cannot be told apart",
        partial(tokens, "blocks.1.norm1", heads=True, folded=True, fused=True), "heads and images cannot be told apart",
        {"leave heads=False": partial(tokens, "blocks.1.norm1", folded=True, fused=True)}),
    *(Row(BACKWARD + place, partial(with_bessel, rule=rule), message,
            {BY_AUTOGRAD: partial(with_bessel, rule=rule, jacobian="autograd")}) for place, message, rule
        in (("misfit(", "the rule of special_i0 raises TypeError('it is of no use')", not_understood),
            ("the rule of {step.name} returns", "the rule of special_i0 returns", lambda input, *, y,
                grad: grad.sum(1)))),
    Row("methods/gaps.py: the network mixes the images of a batch",
        partial(stepped, lambda x: x - x.mean(0) / 2, ContributionCAM, baseline="zero"),
        "do not add up: the network mixes the images of a batch", {
        "explain one image at a time": partial(stepped, lambda x: x - x.mean(0) / 2, ContributionCAM, baseline="zero",
            images=IMAGES[:1]), "see cam.check(images)": partial(stepped, lambda x: x - x.mean(0) / 2, Checked),
        BY_GRADIENT: partial(stepped, lambda x: x - x.mean(0) / 2)}),
    Row(BACKWARD + "depends on the target layer, and its rule has no gradient",
        partial(stepped, lambda x: F.prelu(x, x[0, :, 0, 0])),
        "prelu depends on the target layer, and its rule has no gradient", {
        LATER: partial(stepped, lambda x: F.prelu(x, x[0, :, 0, 0]), layer="later"),
        BY_AUTOGRAD: partial(stepped, lambda x: F.prelu(x, x[0, :, 0, 0]), jacobian="autograd")}),
    *(Row(FOREIGN + place, wrong, place, {way: right, BY_AUTOGRAD: partial(stepped, step, jacobian="autograd")})
        for place, way, wrong, right, step
        in (("is not autograd's Jacobian of it", "correct it in @register_jacobian",
                partial(with_bessel, rule=lambda input, *, y, grad: 2 * grad), with_bessel, torch.special.i0),
            ("returns NaN (does it read a tensor that needs= leaves out?)", "correct it in @register_jacobian",
                with_facts(needs="y"), with_facts(needs="inputs"), torch.special.i0),
            ("says that sums over positions stay the same, and they do not",
                "correct keeps_sums= in @register_jacobian", with_facts(keeps_sums=lambda *given, **named: True),
                with_facts(), torch.special.i0),
            ("mixes tokens, or moves them elsewhere than its tokens= says", "correct it in @register_jacobian",
                with_facts(torch.flip, lambda x: torch.flip(x, [2, 3]), tokens=lambda dim, *given, **named: dim),
                with_facts(torch.flip, lambda x: torch.flip(x, [2, 3])), lambda x: torch.flip(x, [2, 3])))),
    Row(FOREIGN + "contributions do not add up", partial(with_bessel, ContributionCAM, secant="linear"),
        "the secant of special_i0 is wrong", {
        "correct secant=": partial(with_bessel, ContributionCAM), BY_GRADIENT: partial(with_bessel, secant="linear")}),
    path(BACKWARD + "closed-form rule", "which has no closed-form rule", torch.special.i0, {
        LATER: partial(stepped, torch.special.i0, layer="later"), "register its Jacobian": with_bessel}),
    path("tape/alias_tracker.py: which may change gradients unseen", "Tanh has a backward hook on the path", hooked(), {
        "remove the hook": partial(stepped, nn.Tanh())}),
    Row(PATH + "does not lead to", partial(maps_behind, seeded(lambda: Aside(nn.Tanh())), "step"),
        "the target layer 'step' does not lead to the features", {
        "choose a layer before them": partial(maps_behind, seeded(lambda: Aside(nn.Tanh())), "stem")}),
    Row(PATH + "no gradient leads from the target layer", partial(stepped, torch.Tensor.detach, layer="stem"),
        "aten.detach of 'step' passes none on", {
        "choose a layer behind that": partial(stepped, torch.Tensor.detach, layer="later")}),
    Row(PATH + "the network cannot be run from the baseline", contributions(fails_at_zero),
        "cannot be run from the baseline of 'stem' (nothing to see)", {
        "choose another baseline": another_baseline(fails_at_zero)}),
    *(Row("path/passes.py: is another function at the baseline", contributions(step), message,
            {"choose another baseline": another_baseline(step),
                LATER: partial(stepped, step, ContributionCAM, "later", baseline="zero"),
                BY_GRADIENT: partial(stepped, step)}) for step, message
        in ((lambda x: x.exp() if x.any() else 2 * x.exp(), "is another function at the baseline"),
            (lambda x: x.exp() if x.any() else x.log(), "does not return finite numbers at the baseline of 'stem'"))),
    secant("path/passes.py: does not return finite numbers", "does not return finite numbers at the baseline of 'stem'",
        lambda x: x.abs().log(), {
        "choose another baseline": another_baseline(lambda x: x.abs().log()),
        LATER: partial(stepped, lambda x: x.abs().log(), ContributionCAM, "later", baseline="zero"),
        BY_GRADIENT: partial(stepped, lambda x: x.abs().log())}),
    Row("path/passes.py: an autograd path has no",
        partial(stepped, torch.tanh, ContributionCAM, jacobian="autograd", baseline="zero"),
        "an autograd path has no secants", {
        "pass jacobian='closed_form'": contributions(torch.tanh),
        BY_GRADIENT: partial(stepped, torch.tanh, jacobian="autograd")}),
    Row("path/relevance.py: has no rule of relevance", partial(stepped, lambda x: x / (1 + x.abs()), RelevanceCAM),
        "has no rule of relevance", {
        "use ContributionCAM": contributions(lambda x: x / (1 + x.abs())),
        "LIFTCAM": partial(stepped, lambda x: x / (1 + x.abs()), LIFTCAM),
        LATER: partial(stepped, lambda x: x / (1 + x.abs()), RelevanceCAM, "later")}),
    Row(RECORDER + "is inside a layer with a registered rule", partial(inside_a_layer, "stem", "step.inner"),
        "the target layer 'step.inner' is inside a layer with a registered rule", {
        "choose that layer itself": partial(inside_a_layer, "step"),
        "use a gradient method, as ClosedFormGradCAM(net, [layer], jacobian='auto')": partial(stepped, Inner(),
            layer="step.inner", jacobian="auto")}),
    Row(PATH + "leaves a TorchFunctionMode", partial(maps_behind, seeded(Moded), "stem"),
        "the network leaves a TorchFunctionMode", {
        "enter it before the network runs, as in with mode: cam.explain(images)": moded_outside,
        "pass jacobian='auto'": partial(maps_behind, seeded(Moded), "stem", jacobian="auto")}),
    Row(VALUES + "works in place on a tensor", partial(stepped, written_over),
        "aten::mul_, through .data or a detached alias, works in place on a tensor that the path uses again", {
        "use the out-of-place version": partial(stepped, lambda x: 6 * x)}),
    path(RECORDER + "writes into tensors, and is not known", "_foreach_mul_ writes into tensors", several_written, {
        "write y = ..., without out= or an underscore": partial(stepped, lambda x: 2 * x * 3.0)}),
    Row(RECORDER + "writes into tensors, and is not known",
        partial(stepped, lambda x: torch.max(x, 1, out=(torch.empty_like(x[:, 0]), torch.empty(0).long()))[0]),
        "max writes into tensors", {
        "write y = ..., without out= or an underscore": partial(stepped, lambda x: torch.max(x, 1)[0])}),
    Row(RECORDER + "gives a tensor other memory", partial(stepped, other_memory), "set_ gives a tensor other memory", {
        "write y = x": partial(stepped, lambda x: 2 * x)}),
    path(VALUES + "the path goes through a nested tensor", "the path goes through a nested tensor",
        lambda x: torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([*x]), 0.0), {
        "pad its parts to one shape": partial(stepped, lambda x: torch.stack([*x]))}),
    path(RECORDER + "is an autograd.Function", "Doubling is an autograd.Function", lambda x: Doubling.apply(x), {
        "@register_jacobian(Doubling)": doubling, LATER: partial(stepped, lambda x: Doubling.apply(x), layer="later")}),
    *(Row("tape/stem.py: the network draws random numbers", partial(stepped, drawing),
            "the network draws random numbers",
            {"as with dropout(x, training=self.training)": partial(stepped, switched_off),
                "draw the numbers once, in __init__": partial(stepped, lambda x: x * KEPT),
                "draw from a generator that forward itself makes": partial(stepped, lambda x: x * drawn_anew(x))})
        for drawing, switched_off in ((lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5, training=False)),
            (lambda x: F.rrelu(x, training=True), nn.RReLU()),
            (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
                lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0)))),
    Row("tape/tape.py: was changed after the path had used it", partial(stepped, Exchanged()),
        "was changed after the path had used it", {
        "compute with a new tensor instead, as in F.linear(x, 2 * weight)": partial(stepped, Doubled())}),
    path("tape/alias_tracker.py: another thread computes on the path",
        "another thread computes on the path (TanhBackward0)", lambda x: in_a_thread(x.tanh) + x, {
        "compute it in the thread that calls the network": partial(stepped, lambda x: x.tanh() + x),
        LATER: partial(stepped, lambda x: in_a_thread(x.tanh) + x, layer="later")}),
    path(PATH + "the network linearises a function", "the network linearises a function of its own",
        lambda x: torch.func.linearize(torch.sin, x)[0], {"use torch.func.jvp": partial(stepped, torch.sin)}),
    path("tape/overlapping.py: share one place in memory",
        "mul writes into a tensor of which several numbers share one place",
        lambda x: overlapping(x, torch.Tensor.mul_), {
        "write into a copy, x.clone()": partial(stepped, lambda x: x * 1.5)}),
    Row("tape/step.py: from outside of the tensor",
        partial(stepped, lambda x: (1 * x)[:, 1:].as_strided((len(x), 6, 6), (144, 6, 1), 0)),
        "as_strided takes numbers from outside of the tensor", {
        "call it on the whole tensor": partial(stepped, lambda x: (1 * x).as_strided((len(x), 6, 6), (144, 6, 1), 0))}),
    path("tape/aliases.py: of a tensor is written into", "view_as_real of a tensor is written into", in_complex, {
        "write the real and imaginary parts apart": partial(stepped, lambda x: x + 2 * x)}),
    path("tape/python_calls.py: the network calls autograd itself", "the network calls autograd itself",
        asking_autograd, {"compute it before the network runs": partial(stepped, lambda x: 3 * x)}),
    path(VALUES + "makes another tensor of one on the path",
        "makes another tensor of one on the path where that cannot be seen", lambda x: x * nn.Parameter(x), {
        "use plain tensors there": partial(stepped, lambda x: x * x.detach())}),
    Row("tape/tape.py: sizes after the target layer depend on the activations",
        contributions(lambda x: x + x[x > 0].mean()), "sizes after the target layer depend on the activations", {
        LATER: partial(stepped, lambda x: x + x[x > 0].mean(), ContributionCAM, "later", baseline="zero"),
        BY_GRADIENT: partial(stepped, lambda x: x + x[x > 0].mean())}),
    Row("methods/gradient.py: second derivatives need the jvp", partial(registered_doubling, ClosedFormShapleyCAM),
        "second derivatives need the jvp of each autograd.Function", {
        "define it, as in @staticmethod def jvp(ctx, x)": partial(registered_doubling, ClosedFormShapleyCAM,
            DoublingForward),
        "use a method of first derivatives, as ClosedFormGradCAM": partial(registered_doubling, ClosedFormGradCAM)}),
    Row(RULES + "registry.py: is a function of your own",
        lambda: register_jacobian(doubling)(lambda x, *, y, grad: grad),
        "doubling is a function of your own, whose calls cannot be seen", {
        "call it in an nn.Module, and register that, as in @register_jacobian(Swish)": partial(inside_a_layer,
            "step")}),
    # Rules.
    secant(RULES + "arithmetic.py: a division that rounds", "a division that rounds is a step function",
        lambda x: torch.div(x, 0.3, rounding_mode="floor") + x, {
        "divide without rounding_mode": contributions(lambda x: torch.div(x, 0.3) + x)}),
    secant(RULES + "linear.py: an einsum of more than two",
        "an einsum of more than two values that change has no secant",
        lambda x: torch.einsum("nchw,nchw,nchw->nc", x, x.tanh(), x.sigmoid()), {
        "multiply two at a time": contributions(lambda x: torch.einsum("nchw,nchw->nc",
                torch.einsum("nchw,nchw->nchw", x, x.tanh()), x.sigmoid()))}),
    secant(RULES + "elementwise.py: a power with both",
        "a power with both the base and the exponent computed has no secant", lambda x: (1 + x * x) ** x, {
        "write it as torch.exp(": contributions(lambda x: torch.exp(x * torch.log(1 + x * x))),
        BY_GRADIENT: partial(stepped, lambda x: (1 + x * x) ** x)}),
    Row("path/secants.py: has no secant, without which", partial(with_bessel, ContributionCAM, secant=None),
        "special_i0 has no secant, without which maps do not add up", {
        LATER: partial(with_bessel, ContributionCAM, "later", secant=None),
        "register one": partial(with_bessel, ContributionCAM), BY_GRADIENT: partial(with_bessel, secant=None)}),
    *(secant("path/secants.py: " + message, message, step,
            {LATER: partial(stepped, step, ContributionCAM, "later", baseline="zero"),
                BY_GRADIENT: partial(stepped, step)}) for message, step
        in (("depends on the target layer through a comparison or an index", lambda x: x.gather(1, x.argsort(1)) + 1),
            ("jumps between the baseline", lambda x: torch.where(x > 0, 1.0, 0.0 * x.clamp(max=0)) * (x + 1)))),
    # Activations.
    Row(CONTEXT + "but a map needs (N, T, H, W)", partial(tokens, "norm", "mean", transform=None),
        "but a map needs (N, T, H, W), (N, T, D, H, W), or of signals (N, T, L)", {
        "choose an earlier layer": partial(tokens, "patches", "mean", transform=None),
        "pass reshape_transform='tokens' (for transformers) or a function": partial(tokens, "norm", "mean")}),
    Row(CONTEXT + "or both of a pair, in one batch?", partial(crops, "rows", transform=None),
        "'body.1' has activations of 12 rows for 3 images", {
        "as lambda t: t.unflatten(0, (-1, 4)).transpose(1, 2).flatten(2, 3) for 4 crops": partial(crops, "rows"),
        "let the layer run once for each": partial(maps_behind, CropByCrop(), "body.1#2", CROPS)}),
    Row(CONTEXT + "does not count images, so what reshape_transform leaves out",
        partial(tokens, "norm", "mean", first=True,
            transform=lambda t: t.transpose(0, 1)[:, 1:].mT.unflatten(2, (3, 4)),
            method=partial(ContributionCAM, baseline="zero")),
        "does not count images, so what reshape_transform leaves out is unknown", {
        "pass reshape_transform='tokens'": partial(tokens, "norm", "mean", first=True,
            method=partial(ContributionCAM, baseline="zero")),
        "pass one that leaves nothing out, as crops side by side": partial(crops, "rows", ContributionCAM),
        BY_GRADIENT: partial(tokens, "norm", "mean", first=True,
            transform=lambda t: t.transpose(0, 1)[:, 1:].mT.unflatten(2, (3, 4)))}),
    Row("methods/gradient.py: second derivatives cannot be computed under torch.autocast",
        partial(under_autocast, inside=True), "second derivatives cannot be computed under torch.autocast", {
        "call the method outside it": partial(under_autocast, inside=False)}),
    Row("network/site.py: seem to have their channels last", partial(maps_behind, seeded(ChannelsLast), "last"),
        "seem to have their channels last", {
        "pass reshape_transform='tokens'": partial(maps_behind, seeded(ChannelsLast), "last",
            reshape_transform="tokens"),
        "lambda t: t if they come first": partial(maps_behind, seeded(ChannelsLast), "last",
            reshape_transform=lambda t: t)}),
    *(Row("network/inputs.py: the features have", refused, f"rows for {count} images (4 crops or patches of each?)",
            {"average them in the network, features.unflatten(0, (-1, 4)).mean(1)": partial(crops, "in the network"),
                "pass pool=lambda t: t.unflatten(0, (-1, 4)).mean(1)": partial(crops, "rows")}) for count, refused
        in ((40, lambda: head_for(Crops(rows=True), CROPS)),
            (2, lambda: PCASVMNet(Crops(rows=True), head_for(MeanOfCrops(), CROPS)).eval()(CROPS[:2])))),
    Row("network/modules.py: whose layers are not run as modules", partial(foreign, scripted),
        "the network is a program, made by torch.jit, whose layers are not run as modules", {
        "build the module itself and load its weights, load_state_dict(...)": partial(foreign, scripted,
            lambda given: dict(given.state_dict()))}),
    Row("network/modules.py: whose layers are not run as modules",
        partial(foreign, exported, lambda given: given.module()),
        "the network is a program, made by torch.export, whose layers are not run as modules", {
        "build the module itself and load its weights, load_state_dict(...)": partial(foreign, exported,
            lambda given: dict(given.module().state_dict())),
        "export it with a dynamic batch size and use torch.export.unflatten(program), whose layers are modules, "
            "with jacobian='auto'": partial(foreign, exported, torch.export.unflatten, jacobian="auto")}),
    *(Row("network/modules.py: the network must be a torch.nn.Module", partial(foreign, make),
            f"the network must be a torch.nn.Module, got {what}",
            {way: follow if isinstance(follow, str) else partial(foreign, make, follow)}) for make, what, way, follow
        in ((lambda: Learner, "the class Learner", "make one, as in Learner(...)", lambda given: given().model),
            (lambda: "resnet18", "str", "torchvision.models.resnet18(weights='DEFAULT')", "downloads weights"),
            (lambda: NeuralNet().module_.forward, "method", "pass the module whose method this is",
                lambda given: given.__self__),
            (lambda: NeuralNet().module_.state_dict(), "OrderedDict",
                "build the module, and load these weights with load_state_dict", dict),
            (NeuralNet, "NeuralNet", "pass its .module_, which it has after fit or initialize",
                lambda given: given.module_), (Learner, "Learner", "pass its .model", lambda given: given.model),
            (lambda: torch.tanh, "builtin_function_or_method", "put what it does in the forward of a module",
                lambda given: Stepped(Step(given)).double().eval()))),
    Row("network/messages.py: name the call whose output is meant", partial(several_calls, "body.1"),
        "the layer 'body.1' runs 4 times in a forward pass",
        {f"'body.1#{call}'": partial(several_calls, f"body.1#{call}") for call in range(1, 5)}),
    Row("methods/method.py: is not a method itself", partial(maps_of, SVC(), method=ClosedFormCAM),
        "is not a method itself: use ClosedFormGradCAM", {"use ClosedFormGradCAM": partial(maps_of, SVC())}),
    Row("methods/method.py: autograd cannot freeze attention",
        partial(stepped, nn.Tanh(), attention="frozen", jacobian="auto"), "autograd cannot freeze attention", {
        "use jacobian='closed_form'": partial(stepped, nn.Tanh(), attention="frozen", jacobian="closed_form")}),
    Row("methods/method.py: do not add up: use",
        partial(tokens, "blocks.1.norm1", heads=True, fused=True, method=ClosedFormLayerCAM),
        "heads of ClosedFormLayerCAM do not add up",
        {method.__name__: partial(tokens, "blocks.1.norm1", heads=True, fused=True, method=method) for method
            in (ClosedFormGradCAM, ClosedFormHiResCAM)}),
    Row("methods/grad_cam_protocol.py: but these may be of different inputs", partial(pair, "one", "other", call=True),
        "these may be of different inputs", {
        "use explain, which returns maps of each": partial(pair, "one", "other"),
        "or name one": partial(pair, "one", call=True)}),
    Row("methods/grad_cam_protocol.py: but the inputs are images of different sizes",
        partial(pair, "one", call=True, size=4), "the inputs are images of different sizes", {
        "use explain, whose maps have the layer's own grid": partial(pair, "one", size=4)}),
    Row("methods/grad_cam_protocol.py: targets=None needs a head with an SVM", partial(called, None, HALF),
        "targets=None needs a head with an SVM", {"use PCATarget": partial(called, [PCATarget(0)] * 3, HALF)}),
    Row("methods/grad_cam_protocol.py: give one per image", partial(called, [SVMTarget(0)] * 2),
        "2 targets for 3 images", {
        "targets=[target] * 3": partial(called, [SVMTarget(0)] * 3),
        "or explain(x, targets)": partial(maps_of, SVC(), targets=[SVMTarget(0), SVMTarget(1)])}),
    Row("methods/method.py: takes one target layer in explain and jacobians", partial(several, ClosedFormGradCAM),
        "ClosedFormGradCAM takes one target layer in explain and jacobians", {
        "make one ClosedFormGradCAM for each layer": partial(several, ClosedFormGradCAM, one=True),
        "use ContributionCAM, whose maps of several layers are one": partial(stepped, nn.Tanh(), ContributionCAM,
            ["stem"], baseline="zero")}),
    Row("methods/contributions.py: takes several target layers in explain only",
        partial(several, partial(ContributionCAM, baseline="zero"), call="jacobians"),
        "ContributionCAM takes several target layers in explain only", {
        "make one ContributionCAM for each layer": partial(several, partial(ContributionCAM, baseline="zero"), one=True,
            call="jacobians")}),
    Row("starts/baseline.py: which the head knows only if", partial(stepped, nn.Tanh(), ContributionCAM, **MEAN),
        "baseline='mean' needs the training set's mean at the target layer", {
        "pass mean=mean_activations(": another_baseline(torch.tanh)}),
    Row("network/extraction.py: features, and those of shape", partial(two_sizes, 12, 16),
        "images of shape (3, 12, 12) have 288 features, and those of shape (3, 16, 16) 512", {
        "give images of one size": partial(two_sizes, 12, 12),
        "pool='mean' with layer=": partial(two_sizes, 12, 16, layer="0", pool="mean")}),
    Row("network/extraction.py: choose a layer where it does, or baseline",
        lambda: mean_activations(Tower(first=True).eval(), [torch.randn(4, 3, 12, 16)], "norm", progress=False),
        "does not count images (perhaps tokens)", {
        "choose a layer where it does": lambda: mean_activations(Tower(first=True).eval(), [torch.randn(4, 3, 12, 16)],
            "patches", progress=False),
        "or baseline='zero'": partial(tokens, "norm", "mean", first=True,
            method=partial(ContributionCAM, baseline="zero"))}),
    Row("maps/recombination.py: the maps are not those of components",
        lambda: machine_behind(of_components(targets=[SVMTarget(0)])), "the maps are not those of components 0, 1, ...",
        {"make them with cam.explain(x)": lambda: machine_behind(of_components())}),
    Row("maps/recombination.py: numbers, features or components",
        lambda: untold(lambda maps, _, pipeline: recombined(maps, pipeline, SVMTarget(0))),
        "numbers, features or components, of which there are as many", {
        "pipeline[2:]": lambda: untold(lambda maps, _, pipeline: recombined(maps, pipeline[2:], SVMTarget(0))),
        "explain the images again": lambda: untold(lambda _, explain,
            pipeline: recombined(explain(), pipeline, SVMTarget(0)))}),
    Row("maps/recombination.py: maps of this method are not sums",
        lambda: machine_behind(of_components(ClosedFormLayerCAM)), "maps of this method are not sums of component maps",
        {method.__name__: lambda method=method: machine_behind(of_components(method)) for method
            in (ClosedFormGradCAM, ClosedFormHiResCAM, ClosedFormXGradCAM, ContributionCAM)}),
    Row("maps/recombination.py: maps of these decisions are not sums",
        lambda: apart(lambda components, _, head: recombined(components, head, SVMTarget(1))),
        "not sums of component maps, which start at different activations", {
        "explain the decisions": lambda: apart(lambda _, explain, head: explain("neutral", [SVMTarget(1)])),
        "baseline='mean'": lambda: apart(lambda _, explain, head: recombined(explain("mean"), head, SVMTarget(1)))}),
    Row("maps/recombination.py: needs a head with an SVM", lambda: machine_behind(of_components(), whole=False),
        "needs a head with an SVM, but this one has none", {
        "use PCATarget": lambda: machine_behind(of_components(), whole=False, target=PCATarget(0))}),
    Row("network/site.py: reshape_transform takes",
        lambda: as_error(partial(tokens, "blocks.1.norm1", transform=lambda t: t[:, :12].mT.unflatten(2, (3, 4)))),
        "if that is not intended, use reshape_transform='tokens'", {
        "use reshape_transform='tokens'": partial(tokens, "blocks.1.norm1")}),
    Row("network/site.py: are tokens of the signals",
        partial(maps_behind, seeded(SignalTower), "block", random(20, 2, 48), 2),
        "are tokens of the signals, whose channels come last", {
        "pass reshape_transform='tokens'": partial(maps_behind, seeded(SignalTower), "block", random(20, 2, 48), 2,
            reshape_transform="tokens")}),
    Row("network/inputs.py: have no channel axis", partial(maps_behind, seeded(Wave), "conv", random(20, 40), 2),
        "signals of shape (2, 40) have no channel axis", {
        "pass x.unsqueeze(1), and if the network adds the channel itself": partial(maps_behind,
            nn.Sequential(nn.Flatten(), seeded(Wave)), "1.conv", random(20, 40).unsqueeze(1), 2)}),
    Row("maps/signed_maps.py: there are no maps to join", lambda: SignedMaps.cat([]), "there are no maps to join", {
        "give at least one SignedMaps": lambda: SignedMaps.cat([of_components()])}),
    Row("maps/signed_maps.py: maps of different targets cannot be joined",
        lambda: SignedMaps.cat([of_components(), of_components(targets=[SVMTarget(0)])]),
        "maps of different targets cannot be joined", {
        "the same list of targets": lambda: SignedMaps.cat([of_components(), of_components()])}),
    Row("maps/signed_maps.py: figures.plot_volume draws those of volumes",
        lambda: (lambda x, maps: maps.overlay(x[:, 0, 0].numpy()))(*of_volumes()),
        "figures.plot_volume draws those of volumes", {
        "give one of each image": lambda: of_components().overlay(np.ones((3, 6, 6))),
        "figures.plot_volume": lambda: figures.plot_volume(*of_volumes())}),
    Row("network/messages.py: does not run in a forward pass",
        lambda: extract_features(seeded(Unused), [IMAGES], "unused", progress=False),
        "the layer 'unused' does not run in a forward pass", {
        "pass the original network": lambda: extract_features(seeded(Unused), [IMAGES], "step", progress=False)[0],
        "compile the PCASVMNet, torch.compile(net)": compiled}),
    Row("network/fields.py: features must be one tensor", with_fields,
        "features must be one tensor, but the network, or the layer, returns a SimpleNamespace with output.pooler_out",
        {
        "name a layer that returns the tensor": partial(with_fields, layer="body"),
        "layer='last_hidden_state'": "is for models of transformers, as in tests/documents/test_transformers.py",
        "pool=lambda output: output.pooler_output": partial(with_fields, pool=lambda output: output.pooler_output)}),
    Row("network/features.py: features must be rows (N, ...)", partial(squeezed, 1),
        "features must be rows (N, ...), but the output has shape (6,): of one image", {
        "write .flatten(1) in its place": lambda: extract_features(BACKBONE, [PICTURES[:1]], progress=False)[0],
        "pool=lambda t: t.reshape(-1, 6)": partial(squeezed, 1, pool=lambda t: t.reshape(-1, 6)),
        "take the features from the layer before it": partial(squeezed, 1, layer="0")}),
    Row("methods/perturbation.py: changes one image at a time", partial(maps_of_tiles, ClosedFormAblationCAM),
        "ClosedFormAblationCAM changes one image at a time, which does not work on tiles", {
        "use LIFTCAM": partial(maps_of_tiles, LIFTCAM), "or ContributionCAM": partial(maps_of_tiles, ContributionCAM),
        "explain the network without tiles": partial(maps_of_larger, ClosedFormAblationCAM)}),
    Row("network/tiles.py: are no canvas for tiles", lambda: on_tiles()(random(2, 3, 5, 9)),
        "images of 9x5 pixels are no canvas for tiles of 6x6", {
        "resize them to .canvas": lambda: on_tiles()(F.interpolate(random(2, 3, 5, 9), on_tiles().canvas)),
        "or each photo to .canvas_for(width, height)": lambda: on_tiles()(F.interpolate(random(2, 3, 5, 9),
                on_tiles().canvas_for(9, 5)))}),
    Row("network/tiles.py: the pool of the TiledNet is a function",
        lambda: on_tiles(lambda t: t.mean((2, 3))).describe(),
        "the pool of the TiledNet is a function, which no file can hold", {
        "move it into the network, whose output then is the features, or use pool='mean'": lambda: (
            on_tiles().describe())}),
]
# fmt: on
