"""Transformers: token maps, pools, what tokens of no patch contribute, frozen attention."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from cams import BASIC, METHODS
from problems import Step
from pytorch_grad_cam import GradCAM
from reference import gap, jacobian_by_autograd, relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from towers import Attention, Block, ChannelsLast, Tower

from pytorch_grad_cam_pcasvm import (
    BlankMapWarning,
    ClosedFormGradCAM,
    ClosedFormHiResCAM,
    ClosedFormLayerCAM,
    ContributionCAM,
    NoClosedFormError,
    PCASVMNet,
    PCATarget,
    ShapCAM,
    SignedMaps,
    SVMTarget,
    extract_features,
    mean_activations,
    recombined,
)
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.rules import registry

GRID = (6, 4)


def images(count=20, seed=0):
    return torch.randn(count, 3, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fitted(backbone, pool, layer=None, kernel="rbf"):
    features, _ = extract_features(backbone, images().split(8), layer, pool=pool, progress=False)
    labels = np.array(["ant", "bee", "cat"])[np.arange(20) % 3]
    return make_pipeline(StandardScaler(), PCA(3), SVC(kernel=kernel)).fit(features, labels)


def net_of(backbone, pool, layer=None, kernel="rbf"):
    backbone = backbone.double().eval()
    return PCASVMNet(backbone, fitted(backbone, pool, layer, kernel), layer, pool=pool).eval()


def tower(**options):
    torch.manual_seed(0)
    return Tower(**options).double().eval()


def by_hand(before, after=0):
    return lambda t: t[:, before : t.shape[1] - after].mT.unflatten(2, GRID)


@pytest.mark.parametrize(
    "name",
    [
        *(*BASIC, "ClosedFormHiResCAM", "ClosedFormLayerCAM", "ClosedFormAblationCAM"),
        pytest.param("ShapCAM", marks=pytest.mark.slow),
    ],
)
def test_maps_of_tokens_are_those_of_a_hand_written_transform(name):
    kind, net, x = METHODS[name], net_of(tower(before=5), "cls"), images(3, 1)
    found = kind(net, ["blocks.1.norm1"], "tokens").explain(x)
    expected = kind(net, ["blocks.1.norm1"], by_hand(5)).explain(x)
    with pytest.warns(UserWarning, match="takes the tokens 1 to 24"):
        usual = kind(net, ["blocks.1.norm1"], lambda t: t[:, 1:25].mT.unflatten(2, GRID)).explain(x)
    assert found.maps.shape == (3, 4, *GRID)
    assert relative(found.maps, expected.maps) < 1e-12
    assert relative(usual.maps, expected.maps) > 0.1, "the registers make no difference here"


@pytest.mark.parametrize("options", [{"before": 0}, {"before": 1}, {"before": 5}, {"before": 1, "after": 2}])
@pytest.mark.parametrize("pool", ["mean", "max", "gem"])
def test_gradients_of_a_decision_are_autograds(options, pool):
    backbone = tower(**options)
    net, x = net_of(backbone, pool), images(3, 1)
    maps = ClosedFormGradCAM(net, ["blocks.1.norm1"], "tokens").explain(x)
    expected = jacobian_by_autograd(net, backbone.blocks[1].norm1, x, lambda out: out.components)
    shape = by_hand(options["before"], options.get("after", 0))
    sums = torch.stack([shape(expected[:, k]).sum((2, 3)) for k in range(3)], 1)
    assert relative(maps.weights[:, :3], sums) < 1e-10


def test_tokens_that_come_first():
    net, x = net_of(tower(before=2, first=True), "cls+mean"), images(3, 1)
    twin = tower(before=2)
    twin.load_state_dict(net.backbone.state_dict())

    class Swapped(nn.Module):  # the blocks take images first, so that a target layer between them shows (L, N, D)
        def __init__(self):
            super().__init__()
            self.tower, self.place = twin, nn.Identity()

        def forward(self, x):
            patches = self.tower.patches(x).flatten(2).mT
            tokens = self.tower.drop(torch.cat([self.tower.before.expand(len(x), -1, -1), patches], 1))
            tokens = self.place(self.tower.blocks[0](tokens).transpose(0, 1)).transpose(0, 1)
            return self.tower.norm(self.tower.blocks[1](tokens))

    other = PCASVMNet(Swapped().double().eval(), net.head, pool="cls+mean").eval()
    for kind in (ClosedFormGradCAM, ContributionCAM):
        expected = kind(net, ["blocks.0"], "tokens").explain(x)
        found = kind(other, ["place"], "tokens").explain(x)
        assert relative(found.maps, expected.maps) < 1e-10
    assert gap(found) < 1e-10
    assert relative(found.remainder, expected.remainder) < 1e-10


@pytest.mark.parametrize(
    "pool", ["cls", "mean", "cls+mean", "max", "gem", ("gem", 1.5), lambda t: t[:, 1:3].flatten(1)]
)
@pytest.mark.parametrize("baseline", ["zero", "mean activations"])
def test_contributions_add_up_with_the_tokens_of_no_patch(pool, baseline):
    net, x = net_of(tower(before=3), pool), images(3, 1)
    at = "zero" if baseline == "zero" else mean_activations(net, images().split(5), "blocks.1.norm1", progress=False)
    maps = ContributionCAM(net, ["blocks.1.norm1"], "tokens", baseline=at).explain(x)
    assert gap(maps) < 1e-12
    assert bool((maps.remainder.abs() > 1e-6).all()), "there is nothing to leave out here"


def test_the_remainder_is_what_the_tokens_of_no_patch_contribute():
    # All is linear here: every token's part in a mean is its own.
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower, self.start, self.dense = tower(before=3, depth=0), nn.Identity(), nn.Linear(12, 7)

        def forward(self, x):
            return self.dense(self.start(self.tower(x))).mean(1)

    torch.manual_seed(0)
    net, x = net_of(Mean(), None, kernel="linear"), images(4, 1)
    maps = ContributionCAM(net, ["start"], "tokens").explain(x, [PCATarget(1)])
    jacobian = jacobian_by_autograd(net, net.backbone.start, x, lambda out: out.components)[:, 1, :3]
    with torch.no_grad():
        tokens = net.backbone.tower(x)[:, :3]
    assert relative(maps.remainder[:, 0], (jacobian * tokens).sum((1, 2))) < 1e-12


def test_maps_without_tokens_of_no_patch_have_no_remainder():
    net, x = net_of(tower(before=0), "mean"), images(2, 1)
    maps = ContributionCAM(net, ["blocks.1.norm1"], "tokens").explain(x)
    assert not maps.remainder.any()
    assert gap(maps) < 1e-12
    assert ClosedFormGradCAM(net, ["blocks.1.norm1"], "tokens").explain(x).remainder is None


def test_maps_keep_their_remainder(tmp_path):
    net, x = net_of(tower(before=3), "cls"), images(3, 1)
    cam = ContributionCAM(net, ["blocks.1.norm1"], "tokens")
    maps = cam.explain(x)
    maps.save(tmp_path / "maps.safetensors")
    assert torch.equal(SignedMaps.load(tmp_path / "maps.safetensors").remainder, maps.remainder)
    assert torch.equal(SignedMaps.cat([maps[:1], maps[1:]]).remainder, maps.remainder)
    assert torch.equal(maps[[2, 0], 1].remainder, maps.remainder[[2, 0], 1:2])
    assert maps.to(torch.float32).remainder.dtype == torch.float32
    again = recombined(
        cam.explain(x, [PCATarget(b) for b in range(3)]), net.head, [PCATarget(1, "-"), SVMTarget("bee")]
    )
    expected = cam.explain(x, [PCATarget(1, "-"), SVMTarget("bee")])
    assert relative(again.remainder, expected.remainder) < 1e-10
    assert gap(again) < 1e-10


POOLS = {
    "cls": lambda t: t[:, 0],
    "mean": lambda t: t[:, 3:].mean(1),
    "cls+mean": lambda t: np.concatenate([t[:, 0], t[:, 3:].mean(1)], 1),
    "max": lambda t: t[:, 3:].max(1),
    "gem": lambda t: (np.maximum(t[:, 3:], 1e-6) ** 3).mean(1) ** (1 / 3),
    ("gem", 2): lambda t: (np.maximum(t[:, 3:], 1e-6) ** 2).mean(1) ** 0.5,
}


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_a_pool_makes_rows_of_tokens(pool):
    backbone, x = tower(before=3), images(4)
    with torch.no_grad():
        tokens = backbone(x).numpy()
    features, _ = extract_features(backbone, [x], pool=pool, progress=False)
    assert relative(features, POOLS[pool](tokens)) < 1e-12
    net = net_of(backbone, pool)
    assert (net.predict(x) == fitted(backbone, pool).predict(features)).all()


@pytest.mark.parametrize(("last", "dims"), [(False, (2, 3)), (True, (1, 2))])
def test_a_pool_makes_rows_of_positions(last, dims):
    torch.manual_seed(0)
    backbone = ChannelsLast().double().eval() if last else nn.Sequential(nn.Conv2d(3, 5, 4, 4), nn.Tanh()).double()
    x = images(4)
    with torch.no_grad():
        output = backbone(x).numpy()
    for pool, expected in (("mean", output.mean(dims)), ("max", output.max(dims))):
        features, _ = extract_features(backbone, [x], pool=pool, progress=False)
        assert relative(features, expected) < 1e-12
    net = net_of(backbone, "mean")
    layer = "norm" if last else "0"
    maps = ContributionCAM(net, [layer], "tokens").explain(x[:2])
    assert maps.maps.shape[2:] == GRID
    assert gap(maps) < 1e-12


def test_channels_that_come_last_are_not_read_as_if_they_came_first():
    torch.manual_seed(0)
    net, x = net_of(ChannelsLast(), "mean"), images(2, 1)
    with pytest.raises(ValueError, match=r"seem to have their channels last: pass reshape_transform='tokens'"):
        ClosedFormGradCAM(net, ["norm"]).explain(x)
    with pytest.raises(ValueError, match="channels last"):
        ClosedFormGradCAM(net, ["norm"])(x)
    found = ClosedFormGradCAM(net, ["norm"], "tokens").explain(x)
    assert relative(found.maps, ClosedFormGradCAM(net, ["norm"], lambda t: t.movedim(3, 1)).explain(x).maps) < 1e-12
    assert ClosedFormGradCAM(net, ["norm"], lambda t: t).explain(x).maps.shape[2:] == (4, 6)  # who insists gets it


class Output(dict):
    """What a library's model gives: fields by name and as attributes."""

    __getattr__ = dict.__getitem__


class WithFields(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.config = tower(before=1), {}

    def forward(self, x):
        tokens = self.tower(x)
        return Output(last_hidden_state=tokens, pooler_output=tokens[:, 0].tanh())


def test_outputs_with_fields():
    backbone, x = WithFields().double().eval(), images(3, 1)
    cases = [
        ({"layer": "pooler_output"}, lambda o: o.pooler_output),
        ({"layer": "last_hidden_state", "pool": "cls"}, lambda o: o.last_hidden_state[:, 0]),
        ({"pool": "mean"}, lambda o: o.last_hidden_state[:, 1:].mean(1)),
        ({"pool": lambda o: o.pooler_output}, lambda o: o.pooler_output),
    ]
    for options, expected in cases:
        features, _ = extract_features(backbone, [x], **options, progress=False)
        with torch.no_grad():
            assert relative(features, expected(backbone(x))) < 1e-12
        net = net_of(backbone, options.get("pool"), options.get("layer"))
        assert gap(ContributionCAM(net, ["tower.blocks.1.norm1"], "tokens").explain(x)) < 1e-12
    with pytest.raises(ValueError, match=r"no such field: it has .'last_hidden_state', 'pooler_output'"):
        extract_features(backbone, [x], "hidden", progress=False)
    with pytest.raises(TypeError, match=r"pool=lambda output.*layer='last_hidden_state'"):
        extract_features(backbone, [x], progress=False)


@pytest.mark.parametrize("layer", [None, "head"])
def test_a_pool_of_what_is_pooled_already_is_refused(layer):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = tower()
            self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

        def forward(self, x):
            return self.head(self.norm(self.tower(x))[:, 0])

    what = "the output of 'head'" if layer else "the backbone's output"
    with pytest.raises(ValueError, match="has no positions") as caught:
        extract_features(Classifier().double(), [images(2)], layer, pool="cls", progress=False)
    assert str(caught.value) == (
        f"{what}, (N, 5), has no positions or tokens left: it is pooled already, so leave pool out, or name an earlier "
        "layer, as layer='norm'"
    )


def test_features_that_look_at_no_patch_name_the_layer_to_take_once():
    net, x = net_of(tower(before=1), "cls"), images(2, 1)
    for call in (lambda cam: cam.explain(x), lambda cam: cam(x), lambda cam: cam(x, eigen_smooth=True)):
        with pytest.warns(BlankMapWarning) as caught:
            maps = call(ClosedFormGradCAM(net, ["blocks.1"], "tokens"))
        (message,) = [str(warning.message) for warning in caught]
        assert "other tokens only, such as the class token; choose 'blocks.1.norm1'" in message
    assert maps.shape == (2, 24, 16)
    assert maps.dtype == np.float32
    assert not maps.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ClosedFormGradCAM(net, ["blocks.1.norm1"], "tokens").explain(x)


@pytest.mark.parametrize("layer", ["blocks.0.norm1", "blocks.1.norm1"])
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_frozen_attention_is_autograd_with_constant_weights(layer, pool):
    net, x = net_of(tower(before=2), pool), images(3, 1)
    cam = ClosedFormGradCAM(net, [layer], "tokens", attention="frozen")
    found, exact = cam.explain(x), ClosedFormGradCAM(net, [layer], "tokens").explain(x)
    for module in net.modules():
        if isinstance(module, Attention):
            module.detached = True
    expected = ClosedFormGradCAM(net, [layer], "tokens", jacobian="autograd").explain(x)
    assert relative(found.maps, expected.maps) < 1e-10
    assert relative(found.values, exact.values) < 1e-12
    assert relative(found.maps, exact.maps) > 1e-4


def test_contributions_through_frozen_attention_add_up():
    backbone = tower(before=2)
    net, x = net_of(backbone, "cls"), images(3, 1)
    cam = ContributionCAM(net, ["blocks.1.norm1"], "tokens", attention="frozen")
    maps = cam.explain(x)
    assert gap(maps) < 1e-12
    # At the baseline the network runs with the weights of the image: by hand.
    kept = []
    handles = [
        backbone.blocks[1].norm1.register_forward_hook(lambda m, a, out: torch.zeros_like(out) if kept else None),
    ]
    softmax = torch.Tensor.softmax
    try:

        def keep(scores, dim):
            kept.append(softmax(scores, dim))
            return kept[-1]

        torch.Tensor.softmax = keep
        backbone(x)
        weights = iter(list(kept))
        torch.Tensor.softmax = lambda scores, dim: next(weights)
        with torch.no_grad():
            at_baseline = net(x).components
    finally:
        torch.Tensor.softmax = softmax
        for handle in handles:
            handle.remove()
    assert relative(maps.baseline_values[:, :3], at_baseline) < 1e-12


class OneHead(Attention):
    """Attention of which autograd sees one head only."""

    seen = 0

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        out = torch.stack([o if head == self.seen else o.detach() for head, o in enumerate(out.unbind(1))], 1)
        return self.proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("attention", ["exact", "frozen"])
@pytest.mark.parametrize("kind", [ClosedFormGradCAM, ClosedFormHiResCAM, ContributionCAM])
def test_the_maps_of_heads_add_up(kind, attention, tmp_path):
    net, x = net_of(tower(before=2, fused=True), "cls+mean"), images(3, 1)
    maps = kind(net, ["blocks.1.norm1"], "tokens", attention=attention).explain(x, heads=True)
    assert maps.heads.shape == (3, 4, 2, *GRID)
    assert relative(maps.heads.sum(2), maps.maps) < 1e-12
    assert relative(maps.heads[:, :, 0], maps.maps) > 0.01
    assert torch.equal(maps[1:, 2].heads, maps.heads[1:, 2:3])
    maps.save(tmp_path / "maps.safetensors")
    assert torch.equal(SignedMaps.load(tmp_path / "maps.safetensors").heads, maps.heads)


@pytest.mark.parametrize("head", [0, 1])
def test_the_maps_of_a_head_are_those_of_autograd_through_it(head):
    net, x = net_of(tower(before=2, fused=True), "cls"), images(3, 1)
    for pool_layer in ("blocks.1.norm1", "blocks.1.attn.qkv"):
        transform = "tokens" if pool_layer.endswith("norm1") else by_hand(2)
        found = ClosedFormGradCAM(net, [pool_layer], transform).explain(x, heads=True).heads[:, :, head]
        net.backbone.blocks[1].attn.__class__, net.backbone.blocks[1].attn.seen = OneHead, head
        expected = ClosedFormGradCAM(net, [pool_layer], transform, jacobian="autograd").explain(x).maps
        net.backbone.blocks[1].attn.__class__ = Attention
        assert relative(found, expected) < 1e-10


def test_heads_are_kept_apart_where_queries_alone_depend_on_the_layer():
    def attend(x):
        q = x.unflatten(2, (2, 6)).transpose(1, 2)
        k, v = torch.randn(2, 3, 2, 29, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    x, x0 = torch.randn(2, 3, 29, 12, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(nn.Sequential(Step(lambda x: 1 * x), Step(attend)), None, ["0"]).record(x)
        seeds, at = [torch.randn(2, 3, 29, 12, dtype=torch.float64)], passed.run_from({0: x0})
        found = passed.with_heads().pullback(seeds, 0, at).contributions(x - x0, (0, 1))
        assert found.shape == (4, 3, 29)
        expected = passed.pullback(seeds, 0, at).contributions(x - x0, (0, 1))
        assert relative(found.unflatten(0, (2, 2)).sum(1), expected) < 1e-12


# --- What is not done for all tokens ----------------------------------------------------------------------------------


class Rolled(nn.Module):
    """Moves tokens along before a dense layer: neither the same for all, nor each by itself."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(12, 12)

    def forward(self, x):
        return self.dense(x.roll(1, 1)) * x


BEHIND = {
    "explicit attention": lambda: Block(12),
    "torch's attention": lambda: Block(12, fused=True),
    "MultiheadAttention": lambda: nn.TransformerEncoderLayer(12, 2, 20, batch_first=True, norm_first=True),
    "norms behind": lambda: nn.TransformerEncoderLayer(12, 2, 20, batch_first=True),
    "a norm": lambda: nn.LayerNorm(12),
    "a norm without weights": lambda: nn.LayerNorm(12, elementwise_affine=False),
    "an RMSNorm": lambda: nn.RMSNorm(12),
    "two norms": lambda: nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.LayerNorm(12)),
    "a norm over tokens, too": lambda: nn.LayerNorm([29, 12]),
    "a perceptron": lambda: nn.Sequential(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 12)),
    "a batch norm": lambda: nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(12), nn.Unflatten(0, (3, 29))),
    "rolled tokens": lambda: Rolled(),
    "a weight for each token": lambda: Step(lambda x: x * torch.linspace(1, 2, 29).unsqueeze(1).to(x)),
    "a square": lambda: Step(lambda x: x * x),
    "nothing": lambda: nn.Identity(),
}


class Following(nn.Module):
    """Tokens from elsewhere, a target layer, what follows it, and a pool."""

    def __init__(self, behind, skips):
        super().__init__()
        self.start, self.behind, self.skips = nn.Identity(), behind, skips

    def forward(self, x):
        x = self.start(1 * x)
        return x + 0.5 * self.behind(x) if self.skips else self.behind(x)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("pool", ["cls", "mean", "some", "all", "max"])
@pytest.mark.parametrize("behind", BEHIND)
def test_the_short_way_is_the_whole_pullback(behind, pool, skips):
    torch.manual_seed(0)
    net = Following(BEHIND[behind](), skips).double().eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    pools = {
        "cls": lambda t: t[:, 0],
        "mean": lambda t: t[:, 5:].mean(1),
        "some": lambda t: torch.cat([t.select(1, 7), t.narrow(1, 3, 4).sum(1), t[:, -1]], 1),
        "all": lambda t: t.tanh(),
        "max": lambda t: t.amax(1),
    }
    x, x0 = torch.randn(2, 3, 29, 12, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(nn.Sequential(net, Step(pools[pool])), None, ["0.start"]).record(x)
        seeds = [torch.randn(2, *passed.output.shape, dtype=torch.float64)]
        for at in (None, passed.run_from({0: x0})):
            whole = passed.pullback(seeds, 0, at).dense()
            for tokens in ((0, 29), (5, 24), (1, 3)):
                sums = passed.pullback(seeds, 0, at).token_sums(1, *tokens)
                assert relative(sums[:, :, 0] + 1, whole.narrow(2, *tokens).sum(2) + 1) < 1e-12
                assert sums.shape == (2, 3, 1, 12)
        parts = passed.pullback(seeds, 0, at).contributions(x - x0, (0, 1))
    assert relative(parts + 1, (whole * (x - x0)).sum(-1) + 1) < 1e-11


@pytest.mark.parametrize("norm", [nn.LayerNorm(12), nn.RMSNorm(12)], ids=["layer norm", "RMS norm"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("heads", [(), (2,)], ids=["", "heads"])
def test_the_sum_behind_a_norm_wherever_tokens_lie(dim, norm, heads):
    norm = norm.double()
    x, x0 = torch.randn(2, 5, 5, *heads, 12, dtype=torch.float64)  # as many tokens as images, so that no shape tells
    with torch.no_grad():
        whole = Path(nn.Sequential(Step(lambda x: 1 * x), norm, Step(lambda x: x.mean((dim, -1)))), None, ["0"]).record(
            x
        )
        seeds = [torch.randn(2, 5, *heads, dtype=torch.float64)]
        assert (
            relative(whole.pullback(seeds, 0).sums() + 1, whole.pullback(seeds, 0).dense().flatten(3).sum(3) + 1)
            < 1e-12
        )
        passed = Path(nn.Sequential(Step(lambda x: 1 * x), norm, Step(lambda x: x.mean(dim))), None, ["0"]).record(x)
        seeds = [torch.randn(2, 5, *heads, 12, dtype=torch.float64)]
        for at in (None, passed.run_from({0: x0})):
            sums = passed.pullback(seeds, 0, at).token_sums(dim, 0, 5)
            assert relative(sums.squeeze(dim + 1), passed.pullback(seeds, 0, at).dense().sum(dim + 1)) < 1e-12
        step = next(step for step in passed.tape.steps if step.name.endswith("norm"))
        found = [step.rule.find_tokens(axis, passed.tape.recorded(step)) for axis in range(x.dim())]
        assert [dims and dims[0] for dims in found] == [*range(x.dim() - 1), None]


def test_a_class_token_needs_one_query(monkeypatch):
    net, x = net_of(tower(before=1, fused=True), "cls"), images(3, 1)
    rows = []
    attention = torch.ops.aten.scaled_dot_product_attention
    rule = registry.find_rule(attention)

    def counted(query, *args, **kwargs):
        rows.append(query.shape[-2])
        return rule.pull(query, *args, **kwargs)

    cam = ClosedFormGradCAM(net, ["blocks.1.norm1"], "tokens")
    cam.explain(x)
    counted.__module__ = rule.pull.__module__  # no rule of a user's, which would be compared with autograd
    monkeypatch.setitem(registry._rules, attention, dataclasses.replace(rule, pull=counted))
    cam.explain(x)
    assert rows in ([1], [25]), rows


# --- What a reviewer found ------------------------------------------------------------------------------------------


def test_the_first_call_of_the_host_is_the_second():
    net, x = net_of(tower(before=1), "cls"), images(3, 1)
    fresh = PCASVMNet(tower(before=1), net.head, pool="cls").eval()
    host, targets = GradCAM(fresh, [fresh.backbone.blocks[1].norm1], by_hand(1)), [SVMTarget("bee")] * 3
    first, second = (host(x, targets) for _ in range(2))
    assert relative(first, second) < 1e-6
    assert np.abs(second - ClosedFormGradCAM(net, ["blocks.1.norm1"], "tokens")(x, targets)).max() < 1e-4


@pytest.mark.slow
def test_a_compiled_net_finds_its_tokens():
    net, x = net_of(tower(before=1), "cls"), images(3, 1)
    fresh = PCASVMNet(tower(before=1), net.head, pool="cls").eval()
    with torch.no_grad():
        assert relative(torch.compile(fresh, backend="eager")(x), net(x)) < 1e-12


def test_a_configuration_does_not_say_that_there_are_fields():
    backbone = tower(before=1)
    backbone.config = {"width": 12}
    features, _ = extract_features(backbone, [images(2)], pool="cls", progress=False)
    assert features.shape == (2, 12)


def test_a_network_that_has_changed_is_looked_at_again():
    backbone, x = tower(before=1), images(2)
    extract_features(backbone, [x], pool="mean", progress=False)
    backbone.before = nn.Parameter(torch.randn(1, 4, 12, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"now returns 28 tokens, but returned 25 .* run it again"):
        extract_features(backbone, [x], pool="mean", progress=False)
    features, _ = extract_features(backbone, [x], pool="mean", progress=False)
    with torch.no_grad():
        assert relative(features, backbone(x)[:, 4:].mean(1)) < 1e-12


def test_a_hand_written_transform_of_tokens_that_come_first():
    backbone = tower(before=2, first=True)
    net, x = net_of(nn.Sequential(backbone, Turned()), "mean"), images(3, 1)

    def hand(t):
        return t[2:].permute(1, 2, 0).unflatten(2, GRID)

    found = ClosedFormGradCAM(net, ["1.turned"], hand).explain(x)
    assert relative(found.maps, ClosedFormGradCAM(net, ["1.turned"], "tokens").explain(x).maps) < 1e-12
    with pytest.raises(ValueError, match="does not count images, so what reshape_transform leaves out"):
        ContributionCAM(net, ["1.turned"], hand).explain(x)


class Turned(nn.Module):
    """Tokens first, for a while."""

    def __init__(self):
        super().__init__()
        self.turned, self.dense = nn.Identity(), nn.Linear(12, 12)

    def forward(self, x):
        x = x if x.shape[0] == 26 else x.transpose(0, 1)
        return self.dense(self.turned(1 * x).tanh()).transpose(0, 1)


class Folded(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(out.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2))


def ask(kind=ClosedFormGradCAM, layer="blocks.1.norm1", way="tokens", pool="mean", module=Attention, **options):
    """Explain by heads."""
    backbone = tower(before=2, fused=module is not None)
    backbone.blocks[1].attn.__class__ = module or Attention
    kind(net_of(backbone, pool), [layer], way, **options).explain(images(2, 1), heads=True)


UNKNOWN = r"pool must be 'cls', 'mean', .*a function or None, got"
REFUSED = [
    (ValueError, "reshape_transform must be 'tokens', a function or None, got 'token'", {"way": "token"}),
    (ValueError, "attention must be 'exact' or 'frozen', got 'fixed'", {"attention": "fixed"}),
    (ValueError, "autograd cannot freeze attention", {"attention": "frozen", "jacobian": "auto"}),
    (NoClosedFormError, "not everything after the target layer goes through one attention", {"layer": "blocks.0"}),
    (NoClosedFormError, r"load .*='sdpa'; for timm's Swin set TIMM_FUSED_ATTN=2", {"module": None, "pool": "cls"}),
    (NoClosedFormError, "choose the norm before an attention", {"layer": "blocks.1.norm2"}),
    (ValueError, "heads of ClosedFormLayerCAM do not add up: use ClosedFormGradCAM", {"kind": ClosedFormLayerCAM}),
    (NoClosedFormError, "autograd path has no heads", {"jacobian": "autograd"}),
    (NoClosedFormError, "heads and images cannot be told apart", {"module": Folded, "pool": "cls"}),
    *((ValueError, UNKNOWN, {"pool": pool}) for pool in ("avg", ("gem", 0), ("max", 2), 3, ("gem", "3"))),
]


@pytest.mark.parametrize(("error", "message", "options"), REFUSED)
def test_what_cannot_be_done_with_tokens_is_refused(error, message, options):
    with pytest.raises(error, match=message):
        ask(**options)


def test_pools_of_tokens_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="no token comes before the patches: use 'mean'"):
        extract_features(tower(before=0), [images(2)], pool="cls", progress=False)
    with pytest.raises(ValueError, match=UNKNOWN):
        PCASVMNet(tower(), fitted(tower(), "cls"), pool="avg")


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_tokens_are_not_taken_for_channels(kind):
    net, x = net_of(tower(before=1), "cls"), images(2)
    with pytest.raises(ValueError, match=r"have shape \(2, 25, 12\).*pass reshape_transform='tokens'"):
        kind(net, ["blocks.1.norm1"]).explain(x)
    with pytest.raises(ValueError, match=r"have shape \(2, 25, 12\).*pass reshape_transform='tokens'"):
        kind(net, ["blocks.1.norm1"])(x)


@pytest.mark.parametrize("kind", [ClosedFormGradCAM, ContributionCAM, ShapCAM])
def test_a_function_that_does_not_fit_is_told_what_lies_there(kind):
    net, x = net_of(tower(before=5, after=1), "cls"), images(2)

    def usual(t):
        return t[:, 1:].reshape(len(t), *GRID, 12).permute(0, 3, 1, 2)

    with pytest.raises(ValueError, match=r"fails on the activations of 'blocks.1.norm1', \(2, 30, 12\)") as caught:
        kind(net, ["blocks.1.norm1"], usual).explain(x)
    way = "they are 30 tokens: 24 patches after 5 others, and 1 after them: use reshape_transform='tokens'"
    assert str(caught.value).endswith(way)
    assert isinstance(caught.value.__cause__, RuntimeError)
    net = net_of(tower(before=1, order="late"), lambda t: t[:, 0])
    with pytest.raises(ValueError, match=r"\(2, 25, 12\): shape '.*' is invalid for input of size \d+$"):
        kind(net, ["blocks.1.norm1"], lambda t: t.reshape(len(t), 7, 7, -1)).explain(x)


def squares(t):
    side = int((t.shape[1] - 1) ** 0.5)
    return t[:, 1 : 1 + side**2].mT.unflatten(2, (side, side))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda t: t[:, 1:25].mT.unflatten(2, GRID), "takes the tokens 1 to 24"),
        (lambda t: t[:, 4:28].flip(1).mT.unflatten(2, GRID), "takes the tokens 4 to 27"),
        (squares, "takes the tokens 1 to 25"),
        (lambda t: t[:, 5::2].mT.unflatten(2, (6, 2)), "takes 12 of the tokens 5 to 27"),
    ],
)
def test_a_function_that_takes_other_tokens_than_patches_is_hinted_at_once(function, words):
    net, x = net_of(tower(before=5), "cls"), images(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cam = ContributionCAM(net, ["blocks.1.norm1"], function)
        cam.explain(x)
        cam.explain(x)
    (message,) = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert message == (
        f"reshape_transform {words} of 'blocks.1.norm1', but the patches seem to be 5 to 28 (29 tokens: 24 patches "
        "after 5 others): if that is not intended, use reshape_transform='tokens'"
    )


@pytest.mark.parametrize(
    ("options", "function"),
    [
        ({"before": 1}, lambda t: t[:, 1:].mT.unflatten(2, GRID)),
        ({"before": 1}, lambda t: t[:, 1:].flip(1).mT.unflatten(2, (4, 6))),  # upside down, as somebody wants it
        ({"before": 1}, lambda t: 2 * t[:, :24].mT.unflatten(2, GRID)),  # is no choice of tokens
        ({"before": 1}, lambda t: t.new_zeros(2, 12, 5, 5)),
        ({"before": 1}, lambda t: t.double()[:, 1:].mT.unflatten(2, GRID) @ torch.eye(4, dtype=torch.float64)),
        ({"before": 1, "order": "late"}, lambda t: t[:, :24].mT.unflatten(2, GRID)),  # nobody knows where they lie
    ],
)
def test_other_functions_are_not_hinted_at(options, function):
    net, x = net_of(tower(**options), lambda t: t[:, 0]), images(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", BlankMapWarning)
        ClosedFormGradCAM(net, ["blocks.1.norm1"], function).explain(x)


@pytest.mark.parametrize(("before", "after"), [(1, 0), (2, 3)])
def test_a_transform_of_ones_own_leaves_the_same_remainder(before, after):
    net, x = net_of(tower(before=before, after=after), "cls"), images(3, 1)

    def patches(tokens):
        return tokens[:, before : before + 24].mT.unflatten(2, GRID)

    cams = [ContributionCAM(net, ["blocks.1.norm1"], way) for way in ("tokens", patches)]
    expected, actual = (cam.explain(x, [PCATarget(0), SVMTarget("ant")]) for cam in cams)
    assert expected.remainder.abs().min() > 1e-6
    assert relative(actual.remainder, expected.remainder) < 1e-10
    assert relative(actual.maps, expected.maps) < 1e-10
    assert gap(expected) < 1e-10
