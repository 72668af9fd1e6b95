"""Layouts are found by looking at what a network does, or refused."""

from dataclasses import replace

import pytest
import torch
from cams import METHODS
from problems import explained
from torch import nn
from towers import ChannelsLast, Tower

from pytorch_grad_cam_pcasvm.network.features import output_of
from pytorch_grad_cam_pcasvm.network.layout import Layout
from pytorch_grad_cam_pcasvm.network.tiling import Crops
from pytorch_grad_cam_pcasvm.network.token_layout import find_token_layout

X = torch.randn(3, 3, 24, 16, generator=torch.Generator().manual_seed(0))
GRID = (6, 4)


def found(net, layer, x=X):
    net = net.eval()
    with torch.no_grad():
        output = output_of(net, layer, x)
        return find_token_layout(net, lambda net, images: output_of(net, layer, images), str(layer), x, output)


def tower(**options):
    torch.manual_seed(0)
    return Tower(**options)


@pytest.mark.parametrize("before", [0, 1, 2, 5])
@pytest.mark.parametrize("layer", ["blocks.0.norm1", "blocks.1.norm1", "blocks.1", None])
def test_tokens_in_front_of_the_patches_are_counted(before, layer):
    assert found(tower(before=before), layer) == Layout(GRID, 3, 0, 2, before, 0)


def test_tokens_behind_the_patches_are_counted():
    assert found(tower(before=1, after=3), "blocks.1.norm1") == Layout(GRID, 3, 0, 2, 1, 3)


def test_tokens_may_come_first():
    assert found(tower(before=2, first=True), None) == Layout(GRID, 3, 1, 2, 2, 0)


@pytest.mark.parametrize("count", [2, 4, 5])
def test_as_many_tokens_as_images_of_the_probe(count):
    assert found(tower(before=0), "blocks.1.norm1", torch.randn(count, 3, 8, 8)) == Layout((2, 2), 3, 0, 2)


@pytest.mark.parametrize("size", [(24, 24), (8, 40), (4, 16)])
def test_another_size_of_image_is_another_grid(size):
    net = tower(before=1)
    found(net, "blocks.1.norm1")
    assert found(net, "blocks.1.norm1", torch.randn(2, 3, *size)).grid == (size[0] // 4, size[1] // 4)


def test_another_number_of_tokens_is_seen():
    net = tower(before=1)
    found(net, "blocks.1.norm1")
    net.before = nn.Parameter(torch.randn(1, 5, 12))
    assert found(net, "blocks.1.norm1").before == 5


@pytest.mark.parametrize("layer", ["norm", "dense", None])
def test_channels_may_come_last(layer):
    torch.manual_seed(0)
    assert found(ChannelsLast(), layer) == Layout(GRID, 4, 0, 3)


@pytest.mark.parametrize("width", [4, 6, 24])
def test_channels_first_or_last_where_shapes_do_not_tell(width):
    torch.manual_seed(0)
    square = torch.randn(2, 3, 4 * width, 4 * width)  # as many channels as rows and columns
    assert found(ChannelsLast(width), "norm", square).channels == 3
    assert found(ChannelsLast(width), "patches", square).channels == 1


def test_volumes():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(2, 5, 2, 2), nn.Tanh())
    assert found(net, "1", torch.randn(2, 2, 4, 6, 8)) == Layout((2, 3, 4), 5, 0, 1)


def test_pixels_that_no_patch_has():
    assert found(tower(before=1), "blocks.1.norm1", torch.randn(2, 3, 15, 19)).grid == (3, 4)


@pytest.mark.parametrize("order", ["columns", "late", "units"])
@pytest.mark.parametrize("layer", ["blocks.0.norm1", "blocks.1.norm1"])
@pytest.mark.parametrize("before", [0, 1])
def test_another_order_of_tokens_is_refused(order, layer, before):
    with pytest.raises(ValueError, match=r"do not lie row by row.*pass a function"):
        found(tower(before=before, order=order), layer)


def test_tokens_without_a_convolution_are_refused():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(3 * 16, 5)

        def forward(self, x):
            return self.dense(
                x.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
            )

    with pytest.raises(ValueError, match="no convolution runs before"):
        found(Flat(), "dense")


def test_windows_in_place_of_images_are_refused():
    net = tower()
    with pytest.raises(ValueError, match="windows in place of images"):
        find_token_layout(net, lambda net, x: net(x).unflatten(1, (5, 5)).flatten(0, 1), "windows", X)


def test_several_tensors_are_refused():
    with pytest.raises(
        ValueError, match=r"how several lies on the image .*: it returns tuple, which has no positions; pass"
    ):
        find_token_layout(tower(), lambda net, x: (x, x), "several", X)


class Pooled(nn.Module):
    """A tower whose tokens are pooled by a layer that has none left, although a part of it has."""

    def __init__(self):
        super().__init__()
        self.tower, self.pool = tower(), nn.Sequential(nn.Linear(12, 6), nn.Flatten())
        self.head = nn.Linear(25 * 6, 5)

    def forward(self, x):
        return self.head(self.pool(self.tower(x)))


@pytest.mark.parametrize("layer", ["pool", "head", None])
def test_what_has_no_positions_left_is_refused_and_the_last_layer_with_some_is_named(layer):
    torch.manual_seed(0)
    shape = r"\(N, 150\)" if layer == "pool" else r"\(N, 5\)"
    with pytest.raises(
        ValueError, match=f"^{layer}, {shape}, has no positions or tokens left: choose an earlier layer, as 'tower'$"
    ):
        found(Pooled(), layer)


def test_no_layer_with_positions_is_named_where_there_is_none():
    with pytest.raises(ValueError, match=r"has no positions or tokens left: choose an earlier layer, as \.\.\.$"):
        found(nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 16, 5)), None)


@pytest.mark.parametrize(
    ("dtype", "scale", "size"), [(torch.float16, 1e-4, 0.01), (torch.bfloat16, 1e-3, 1.0), (None, 1e-3, 1.0)]
)
def test_changes_below_the_rounding_of_half_precision_are_seen(dtype, scale, size):
    net = tower(before=5, fused=True).eval()
    with torch.no_grad():  # as with LayerScale, and small patches: a block changes next to nothing
        net.patches.weight *= size
        net.before *= size
        for block in net.blocks:
            for last in (block.attn.proj, block.mlp[2]):
                last.weight *= scale
                last.bias *= scale
    net = net if dtype is None else net.to(dtype)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        for layer in (None, "blocks.1"):
            assert found(net, layer, X if dtype is None else X.to(dtype)) == Layout(GRID, 3, 0, 2, 5)
    after = net.state_dict()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items())


def test_a_network_that_takes_half_precision_alone_is_looked_at_in_it():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = tower(before=2)

        def forward(self, x):
            if x.dtype != torch.bfloat16:
                raise TypeError("a kernel of half precision")
            return self.tower(x)

    assert found(Half().bfloat16(), None, X.bfloat16()).before == 2


def test_merged_tokens_that_no_longer_fit_are_refused():
    net = tower(before=1)
    with pytest.raises(ValueError, match="are not those of a grid of 6 x 4 patches"):
        find_token_layout(net, lambda net, x: net(x)[:, :20], "some", X)


@pytest.mark.parametrize("order", ["columns", "late"])
def test_another_order_of_four_patches_is_refused(order):
    with pytest.raises(ValueError, match="do not lie row by row"):
        found(tower(before=1, order=order), "blocks.1.norm1", torch.randn(2, 3, 8, 8))


def test_other_convolutions_in_front_of_the_patches():
    class Sound(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.tower = nn.Conv1d(3 * 24, 3 * 24, 3, padding=1), tower(before=1)

        def forward(self, x):
            return self.tower(x + 1e-3 * self.rows(x.flatten(1, 2)).reshape(x.shape))

    assert found(Sound(), "tower.blocks.1.norm1") == Layout(GRID, 3, 0, 2, 1, 0)


def test_the_hooks_of_others_see_no_noise():
    net, seen = tower(before=1).eval(), []
    net.blocks[1].norm1.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    found(net, "blocks.1.norm1")
    assert seen == [len(X)], "the pass of the test itself, and no other"


def test_a_network_in_training_mode_is_looked_at_in_evaluation_mode():
    net = tower(before=1)
    net.patches = nn.Sequential(net.patches, nn.Dropout(0.5))
    net.train()
    with torch.no_grad():
        layout = find_token_layout(net, lambda net, x: net(x), "tokens", X)
    assert layout.before == 1
    assert net.training
    assert net.patches[1].training


def test_nothing_is_left_behind():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.BatchNorm2d(4))  # in training mode: it counts
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    with torch.no_grad():
        find_token_layout(net, lambda net, x: net(x), "1", X)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


@pytest.mark.parametrize("name", [name for name in METHODS if name != "ShapCAM"])
def test_tokens_where_channels_come_first_are_no_other_maps(name):
    p = explained("pooled", "rbf")
    method = METHODS[name]
    assert found(p.backbone, "features", p.x).is_map_shaped
    for layers in (["features"], ["features", "features.1"]) if name == "ContributionCAM" else (["features"],):
        expected = method(p.net, layers).explain(p.x, p.targets)
        of_tokens = method(p.net, layers, "tokens").explain(p.x, p.targets)
        assert torch.equal(of_tokens.maps, expected.maps)
        for column in expected.columns:
            assert torch.equal(getattr(of_tokens, column), getattr(expected, column))


@pytest.mark.parametrize(
    "layout",
    [Layout((3, 4), 4), Layout((3, 4), 4, 0, 3), Layout((3, 4), 3, 0, 2, 1), Layout((3, 4), 3, 1, 2)],
    ids=["maps", "channels last", "tokens", "tokens first"],
)
def test_tiles_lie_side_by_side_one_below_the_other(layout):
    of_tiles = replace(layout, crops=Crops((0,), (0, 2), (3, 4)))
    for leading in ((), (5,)):  # for each of five targets
        maps = torch.randn(*leading, 4, 6, 3, 4)  # two tiles of two images
        one, other = maps.unflatten(-4, (2, 2)).unbind(-4)
        first = maps.narrow(-4, 0, 1)
        for given, expected in ((maps, torch.cat([one, other], -2)), (first, torch.cat([first, first], -2))):
            if layout.dims == 4:
                given = given.movedim(-3, layout.channels - 4)
            else:
                tokens = torch.cat([torch.zeros(*given.shape[:-2], layout.before), given.flatten(-2)], -1).mT
                given = tokens.transpose(-3, -2) if layout.batch else tokens
            assert torch.equal(of_tiles(given), expected)


def test_only_tokens_are_summed_as_such():
    assert Layout((3, 4), 3, 0, 2, 1).tokens == (1, 1, 12)
    assert Layout((3, 4), 3, 1, 2, 1).tokens == (0, 1, 12)
    for layout in (Layout((12,), 3), Layout((3, 4), 4, 0, 3), Layout((3, 4), 3, 0, 2, function=torch.relu)):
        assert layout.tokens is None
