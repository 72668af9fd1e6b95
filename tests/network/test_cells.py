"""Where positions lie on pictures that a network pads, crops or resizes, or that are no whole strides."""

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch import nn
from torch.nn import functional as F  # noqa: N812

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, SVMTarget, evaluation, extract_features
from pytorch_grad_cam_pcasvm.figures import plot_positions
from pytorch_grad_cam_pcasvm.network.features import FeatureSource
from pytorch_grad_cam_pcasvm.network.grid import Cells, Grid, measure_share

PATCH = 16


class Patches(nn.Module):
    """A network of patches, each mixed with the others a little, which prepares its input itself."""

    def __init__(self, prepare=lambda x: x, size=PATCH, **options):
        super().__init__()
        torch.manual_seed(0)
        self.prepare, self.embed = prepare, nn.Conv2d(3, 8, size, size, **options)
        self.norm = nn.Identity()

    def forward(self, x):
        tokens = self.embed(self.prepare(x)).flatten(2).mT
        return self.norm(tokens + 0.1 * tokens.mean(1, keepdim=True))


def padded_to_patches(x):  # below and on the right
    return F.pad(x, (0, -x.shape[3] % PATCH, 0, -x.shape[2] % PATCH))


def padded_around(x):
    height, width = -x.shape[2] % PATCH, -x.shape[3] % PATCH
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))


def cropped(x):
    return x[:, :, 3 : 3 + x.shape[2] // PATCH * PATCH, 1 : 1 + x.shape[3] // PATCH * PATCH]


def resized(x):
    return F.interpolate(x, (96, 64), mode="bilinear", align_corners=False)


def cnn(strides, kernel=3, padding=1):
    torch.manual_seed(0)
    layers = [(nn.Conv2d(3 if not i else 4, 4, kernel, s, padding), nn.ReLU()) for i, s in enumerate(strides)]
    return nn.Sequential(*(layer for pair in layers for layer in pair))


def cells(backbone, layer, picture, channels=3):
    with torch.no_grad():
        source = FeatureSource.of(backbone.eval(), layer, "dense").at(backbone, torch.randn(2, channels, *picture))
    return source.cells, source.layout.grid


FOUND = {
    "padded below and right": (Patches(padded_to_patches), (100, 70), [(0, 16), (0, 16)], (7, 5)),
    "padded around": (Patches(padded_around), (100, 70), [(-6, 16), (-5, 16)], (7, 5)),
    "cropped": (Patches(cropped), (100, 70), [(3, 16), (1, 16)], (6, 4)),
    "left over": (Patches(), (100, 70), [(0, 16), (0, 16)], (6, 4)),
    "padded by the layer itself": (Patches(padding=6), (100, 68), [(-6, 16), (-6, 16)], (7, 5)),
}
EVEN = {
    "whole patches": (Patches(), (96, 64)),
    "whole patches, nothing to pad": (Patches(padded_to_patches), (96, 64)),
    "resized": (Patches(resized), (100, 70)),
    "resized to whole patches": (Patches(lambda x: F.interpolate(x, (112, 80))), (100, 70)),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_position_is_moved_by_the_pixels_of_its_cell_alone(case):
    backbone, picture, axes, grid = FOUND[case]
    x = torch.randn(1, 3, *picture, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = backbone.embed(backbone.prepare(x))
        for row, column in ((0, 0), (1, 2), (grid[0] - 1, grid[1] - 1)):
            rows, columns = (
                [p for p in range(length) if start + i * step <= p < start + (i + 1) * step]
                for i, length, (start, step) in zip((row, column), picture, axes, strict=True)
            )
            changed = x.clone()
            changed[:, :, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] += 1
            moved = (backbone.embed(backbone.prepare(changed)) - before).abs().sum((0, 1)) > 1e-6
            assert moved.nonzero().tolist() == [[row, column]]


@pytest.mark.parametrize("case", EVEN)
def test_a_picture_that_is_shared_out_evenly_stays_so(case):
    backbone, picture = EVEN[case]
    assert cells(backbone, "norm", picture)[0] is None


def test_a_cnn_has_its_stride():
    found, grid = cells(cnn([2, 2, 2, 2, 2]), "9", (150, 200))
    assert grid == (5, 7)
    assert found.axes == ((0, 32), (0, 32))
    assert cells(cnn([2, 2, 2]), "5", (96, 64))[0] is None
    found, grid = cells(cnn([2, 1], kernel=5, padding=0), "3", (61, 50))
    assert grid == (25, 19)
    assert found.axes == ((5.5, 2), (5.5, 2))  # 1.5 pixels, and then two of two
    pooled = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, 2, 1), nn.AvgPool2d(2))
    found, grid = cells(pooled, "3", (45, 51))
    assert (grid, found.axes) == ((5, 6), ((0, 8), (0, 8)))


class Halved(nn.Module):
    """Pools by a function, which is no layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x):
        return self.second(F.max_pool2d(self.first(x), 2))


def test_a_function_that_pools_between_layers():
    found, grid = cells(Halved(), "second", (52, 70))
    assert (grid, found.axes) == ((7, 9), ((0, 8), (0, 8)))


class Mirrored(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 8, 8)

    def forward(self, x):
        return self.conv(x.flip(2, 3))


def test_what_cannot_be_found_is_refused_where_it_counts():
    backbone = nn.Sequential(Mirrored()).eval()
    good = torch.randn(3, 3, 50, 44, generator=torch.Generator().manual_seed(0))
    rows, _ = extract_features(backbone, [good], "0", pool="dense", progress=False)
    net = PCASVMNet(backbone, NearestNeighbors(n_neighbors=1).fit(rows), "0", pool="dense").eval()
    assert net.anomaly_map(good).shape == (3, 6, 5)
    with pytest.raises(ValueError, match="not known where the positions lie on a picture of 50 x 44"):
        net.anomaly_map(good, size=(50, 44))
    with pytest.raises(ValueError, match="not known where the positions lie"):
        extract_features(backbone, [(good, torch.zeros(3, 50, 44))], "0", pool="dense", progress=False)


class Between(nn.Module):
    """Two layers, and whatever a function does between them."""

    def __init__(self, first, between, second=None, **inner):
        super().__init__()
        self.first, self.second = first, second or nn.Conv2d(4, 4, 1)
        self.inner, self.between = nn.ModuleDict(inner), between

    def forward(self, x):
        return self.second(self.between(self.first(x), **self.inner))


class PadsItself(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class PoolsPadded(nn.MaxPool2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1)))


class Tokens(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).flatten(2).mT


def layers(*options):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Conv2d(4 if i else 3, 4, *each) for i, each in enumerate(options)))


def weighed_by_channels(x, along):
    return x * along(x.mean((2, 3)).unsqueeze(1)).mT.unsqueeze(-1).sigmoid()


def filtered(x):  # by its spectrum: rounding changes every pixel a little
    return torch.fft.irfft2(torch.fft.rfft2(padded_around(x)), (112, 80))


PLACED = {
    # What position i looks at, by its kernel and the pixels before the first, has its middle in the middle of its cell.
    "dilated": (layers((3, 1, 0, 2)), "0", (20, 23), [(2, 1), (2, 1)], (16, 19)),
    "padded by more than half a kernel": (layers((3, 1, 2)), "0", (20, 23), [(-1, 1), (-1, 1)], (22, 25)),
    "patches, padded": (layers((3, 3, 1)), "0", (20, 23), [(-1, 3), (-1, 3)], (7, 8)),
    # Half a kernel on both sides is as usual, and of an even one, either half.
    "an even kernel, padded": (layers((4, 2, 2)), "0", (21, 24), [(0, 2), (0, 2)], (11, 13)),
    "an even kernel": (layers((2, 1, 0)), "0", (21, 24), [(0, 1), (0, 1)], (20, 23)),
    "same": (layers((3, 2, 1), (3, 1, "same")), "1", (21, 24), [(0, 2), (0, 2)], (11, 12)),
    "valid": (layers((3, 2, 1), (3, 1, "valid")), "1", (21, 24), [(2, 2), (2, 2)], (9, 10)),
    # Twice half a pixel to the right, and then one to the left.
    "as large as before": (
        layers((2, 1, 0), (2, 1, 0), (3, 1, 2), (16, 16)),
        *("3", (100, 70), [(0, 16), (0, 16)], (6, 4)),
    ),
    "pools of three": (
        nn.Sequential(*layers((3, 1, 1)), nn.MaxPool2d(3)),
        *("1", (20, 23), [(0, 3), (0, 3)], (6, 7)),
    ),
    "pools of lists": (
        nn.Sequential(*layers((3, 1, 1)), nn.MaxPool2d([3, 2])),
        *("1", (20, 23), [(0, 3), (0, 2)], (6, 11)),
    ),
    # Position i looks at three of two pixels each, of which 2 i + 1 is the middle one, pixels 4 i + 2 and 4 i + 3: of a
    # cell of four around these, the first is 4 i + 1.
    "a pool that takes what is left over": (
        nn.Sequential(*layers((3, 2, 1)), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *("1", (47, 51), [(1, 4), (1, 4)], (12, 13)),
    ),
    "a layer that pads its input": (
        nn.Sequential(*layers((3, 2, 1)), PadsItself(4, 4, 3, 2)),
        *("1", (47, 51), [(0, 4), (0, 4)], (12, 13)),
    ),
    "a pool that pads its input": (
        nn.Sequential(*layers((3, 1, 1)), PoolsPadded(3, 2, ceil_mode=True)),
        *("1", (21, 23), [(0, 2), (0, 2)], (11, 12)),
    ),
    # A quarter of both 26 and 24 is 6.
    "a function behind a layer without padding": (
        Between(*layers((3, 1, 0)), lambda x: F.avg_pool2d(x, 4)),
        *("second", (26, 30), [(1, 4), (1, 4)], (6, 7)),
    ),
    "a pool that returns its places, too": (
        Between(*layers((3, 1, 1)), lambda x, pool: pool(x)[0], pool=nn.MaxPool2d(2, return_indices=True)),
        *("second", (21, 23), [(0, 2), (0, 2)], (10, 11)),
    ),
    "a convolution over channels": (
        Between(*layers((4, 4)), weighed_by_channels, along=nn.Conv1d(1, 1, 3, padding=1)),
        *("second", (21, 23), [(0, 4), (0, 4)], (5, 5)),
    ),
    "a convolution that returns tokens": (
        Between(*layers((4, 4)), lambda x: x, Tokens(4, 4, 1)),
        *("second", (21, 23), [(0, 4), (0, 4)], (5, 5)),
    ),
    "almost a patch left over": (Patches(), "embed", (47, 60), [(0, 16), (0, 16)], (2, 3)),
    "padded by a layer, and far": (
        Patches(nn.ZeroPad2d(32)),
        *("embed", (64, 80), [(-32, 16), (-32, 16)], (8, 9)),
    ),
    "filtered by its spectrum": (Patches(filtered), "embed", (100, 70), [(-6, 16), (-5, 16)], (7, 5)),
    "in tiny units": (
        Patches(lambda x: 1e-7 * padded_around(x)),
        *("embed", (100, 70), [(-6, 16), (-5, 16)], (7, 5)),
    ),
    "with a blank channel": (
        Patches(lambda x: padded_around(x) * torch.tensor([1, 0, 1]).reshape(3, 1, 1)),
        *("embed", (100, 70), [(-6, 16), (-5, 16)], (7, 5)),
    ),
}


PLACED |= {f"patches {name}": (backbone, "norm", *row) for name, (backbone, *row) in FOUND.items()}


@pytest.mark.parametrize("case", PLACED)
def test_where_positions_of_layers_lie(case):
    backbone, layer, picture, axes, grid = PLACED[case]
    found, shape = cells(backbone, layer, picture)
    assert shape == grid
    assert found.axes == tuple(axes)


def smeared(x, before, after):
    """Return a picture two pixels larger, in which each pixel is the mean of itself and five on one side."""
    return F.avg_pool2d(F.pad(x, (before, after) * 2), 6, 1)


UNKNOWN = {
    "mirrored": lambda x: padded_to_patches(x.flip(2, 3)),
    "without its first third": lambda x: x[:, :, 33:],
    "without its last third": lambda x: x[:, :, :67],
    "smeared down": lambda x: smeared(x, 5, 2),
    "smeared up": lambda x: smeared(x, 0, 7),
    "cropped and stretched": lambda x: F.interpolate(x[:, :, 5:], (108, 72)),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_pictures_of_which_too_little_is_known(case):
    assert cells(Patches(UNKNOWN[case], 6), "embed", (100, 70))[0].axes == ()


def test_what_lies_somewhere_on_the_picture_is_not_shared_out_evenly():
    middle = Patches(lambda x: x[:, :, 32:96, 32:96])  # four patches of 16 pixels, as if they were of 32
    found, grid = cells(middle, "embed", (128, 128))
    assert grid == (4, 4)
    assert found.axes == ()


@pytest.mark.parametrize(("mixed", "axes"), [(2.5, ((0, 16), (0, 16))), (8, ())])
def test_positions_that_see_all_of_the_picture_lie_nowhere(mixed, axes):
    # The middle of the last quarter of 129 pixels is 112.5, that is, position 6.5. By how much the mean of all changes
    # them, too, the middle of the changed positions moves to about 5.5 or 4.6, and a sixth of 8 positions is allowed.
    first, second = layers((4, 4), (4, 4))
    backbone = Between(first, lambda x: x + mixed * x.mean((2, 3), keepdim=True), second)
    assert cells(backbone, "second", (129, 129))[0].axes == axes


def test_positions_that_nothing_moves_lie_nowhere():
    blank = Patches()
    nn.init.zeros_(blank.embed.weight)
    assert cells(blank, "embed", (100, 70))[0].axes == ()


def test_what_is_not_known_is_shared_out_evenly_where_it_can_be():
    class Unfolded(nn.Module):
        def forward(self, x):
            return x.unfold(2, 6, 6).unfold(3, 6, 6).mean((4, 5))

    assert cells(nn.Sequential(Unfolded()), "0", (96, 66))[0] is None


def test_a_layer_that_is_called_by_keyword_is_seen():
    keyword = Between(nn.Identity(), lambda x, embed: embed(input=padded_around(x)), embed=nn.Conv2d(3, 4, 16, 16))
    assert cells(keyword, "inner.embed", (100, 70))[0].axes == ((-6, 16), (-5, 16))


def test_a_layer_that_takes_what_is_no_tensor_is_passed_over():
    class OfPair(nn.Conv2d):
        def forward(self, pair):
            return super().forward(pair[0] + pair[1])

    of_pair = Between(nn.Identity(), lambda x, embed: embed((x, 0)), embed=OfPair(3, 4, 16, 16))
    assert cells(of_pair, "inner.embed", (96, 64))[0] is None  # shared out evenly


SIGNALS = {
    "padded": (lambda x: F.pad(x, (5, 0)), ((-5, 16),)),
    "smoothed": (lambda x: F.avg_pool1d(x, 5, 1, 2), ((0, 16),)),
    "without its end": (lambda x: x[:, :, :140], ()),
}


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("case", SIGNALS)
def test_where_positions_of_signals_lie(case, channels):
    prepare, axes = SIGNALS[case]
    torch.manual_seed(0)
    backbone = Between(nn.Identity(), prepare, nn.Conv1d(channels, 6, 16, 16))
    assert cells(backbone, "second", (203,), channels)[0].axes == axes


def shares_by_hand(mask, axes, grid):
    """Return how much of each cell a mask covers, of pixels whose centre is in it."""
    shares = np.zeros(grid)
    for row in range(grid[0]):
        for column in range(grid[1]):
            rows, columns = (
                [p for p in range(length) if start + i * step <= p + 0.5 < start + (i + 1) * step]
                for i, length, (start, step) in zip((row, column), mask.shape, axes, strict=True)
            )
            shares[row, column] = mask[np.ix_(rows, columns)].mean() if rows and columns else 0
    return shares


@pytest.mark.parametrize("case", FOUND)
def test_masks_are_shared_out_to_cells(case):
    backbone, picture, axes, grid = FOUND[case]
    masks = np.random.default_rng(0).random((2, *picture)) < 0.5
    masks[0, picture[0] - 4 :, picture[1] - 6 :] = True
    found, _ = cells(backbone, "norm", picture)
    shares = found.shares(torch.from_numpy(masks), grid)
    for share, mask in zip(shares, masks, strict=True):
        np.testing.assert_allclose(share, shares_by_hand(mask, axes, grid), atol=1e-6)


def bank(backbone, picture):
    good = torch.randn(4, 3, *picture, generator=torch.Generator().manual_seed(0)) / 10
    rows, _ = extract_features(backbone, [good], "norm", pool="dense", progress=False)
    return good, PCASVMNet(backbone, NearestNeighbors(n_neighbors=1).fit(rows), "norm", pool="dense").eval()


def test_a_defect_in_the_last_patch_is_found_there():
    backbone, picture, _, grid = FOUND["padded below and right"]
    good, net = bank(backbone, picture)
    bad = good[:1].clone()
    bad[:, :, 84:92, 50:58] += 3  # of position (5, 3): evenly shared out, position (5, 4) or beyond
    mask = torch.zeros(picture, dtype=torch.bool)
    mask[80:96, 48:64] = True
    small, large = net.anomaly_map(bad)[0], net.anomaly_map(bad, size=picture)[0]
    assert np.unravel_index(small.argmax(), grid) == (5, 3)
    row, column = np.unravel_index(large.argmax(), picture)
    assert 80 <= row < 96
    assert 48 <= column < 64
    target = SVMTarget(sign="-", at=mask)
    with torch.no_grad():
        maps = ContributionCAM(net, ["embed"]).explain(bad, target)
    assert math.isclose(float(maps.values), float(small[5, 3]), rel_tol=1e-6)


def test_labels_of_patches_are_those_of_their_pixels():
    backbone, picture, axes, grid = FOUND["padded around"]
    masks = torch.zeros(2, *picture, dtype=torch.long)
    masks[0, 60:, 40:] = 1
    masks[1, :30] = 2
    images = torch.randn(2, 3, *picture)
    rows, labels = extract_features(backbone, [(images, masks)], "norm", pool="dense", progress=False)
    assert len(rows) == 2 * math.prod(grid)
    expected = [
        np.stack([shares_by_hand(mask == number, axes, grid) for number in range(3)]).argmax(0)
        for mask in masks.numpy()
    ]
    np.testing.assert_array_equal(labels.reshape(2, *grid), expected)


def test_patches_of_padding_alone_have_no_label():
    backbone = Patches(lambda x: F.pad(x, (0, 2 * 8 - x.shape[3] % 8, 0, 0)), 8).eval()
    images, masks = torch.randn(2, 3, 64, 70), torch.ones(2, 64, 70, dtype=torch.long)
    rows, labels = extract_features(backbone, [(images, masks)], "embed", pool="dense", progress=False)
    assert len(rows) == 2 * 8 * 9  # the tenth column has no pixel
    assert (labels == 1).all()


def test_signals_have_cells_too():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv1d(2, 6, 9, 4, 4), nn.ReLU(), nn.Conv1d(6, 7, 5, 4, 2), nn.ReLU()).eval()
    with torch.no_grad():
        source = FeatureSource.of(backbone, "3", "dense").at(backbone, torch.randn(2, 2, 250))
    assert source.layout.grid == (16,)
    assert source.cells.axes == ((0, 16),)


def test_figures_draw_anomalies_where_they_are():
    backbone, picture, _, _ = FOUND["padded below and right"]
    good, net = bank(backbone, picture)
    bad = good[:1].clone()
    bad[:, :, 84:92, 50:58] += 3
    maps, pictures = net.anomaly_map(bad), torch.full((1, *picture), 0.5)
    drawn = plot_positions(pictures, maps, anomaly=True, scale=(0, float(maps.max()))).axes[1].images[0].get_array()
    brightness = np.asarray(drawn)[..., :3].max(-1)
    row, column = np.argwhere(brightness == brightness.max()).mean(0)
    assert 80 <= row < 96
    assert 48 <= column < 64
    assert maps[:1].cells == maps.cells
    assert maps[0].cells is None


def test_masks_are_met_by_the_values_of_positions():
    backbone, picture, _, _ = FOUND["padded below and right"]
    good, net = bank(backbone, picture)
    bad, masks = good.clone(), np.zeros((4, *picture), bool)
    bad[:, :, 82:94, 50:62] += 3
    masks[:, 80:96, 48:64] = True
    found = evaluation.localisation(net, bad, ["embed"], masks=masks, images=None, progress=False)
    (auroc,) = (row.estimate.mean for row in found.rows if row.measure == "pixel AUROC")
    assert auroc > 0.99


@pytest.mark.parametrize("size", [(100, 70), (50, 35), (33, 140)])
def test_maps_are_linear_between_the_middles_of_cells(size):
    axes, grid, picture = FOUND["padded around"][2], (7, 5), (100, 70)
    maps = np.random.default_rng(0).normal(size=(2, 3, *grid))
    expected = maps
    for dim, (start, step) in enumerate(axes):
        middles = [start + (i + 0.5) * step for i in range(grid[dim])]
        pixels = [(i + 0.5) * picture[dim] / size[dim] for i in range(size[dim])]
        expected = np.apply_along_axis(lambda line: np.interp(pixels, middles, line), 2 + dim, expected)  # noqa: B023
    found = Grid(grid, picture, Cells(tuple(axes), picture)).spread(torch.from_numpy(maps), size)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_nothing_of_a_cell_outside_the_picture_is_covered():
    found = Cells(((0.0, 8.0), (0.0, 8.0)), (16, 20))
    share = found.shares(torch.ones(1, 16, 20, dtype=torch.bool), (2, 4))
    assert share.tolist() == [[[1, 1, 1, 0]] * 2]  # a half of the third column is of the picture


def test_masks_without_cells_are_shared_out_evenly():
    masks = torch.zeros(2, 4, 6, dtype=torch.bool)
    masks[0, :2, :2], masks[0, 2:, 4] = True, True
    masks[1, 3, 2:4] = True
    assert measure_share(masks, (2, 3)).tolist() == [[[1, 0, 0], [0, 0, 0.5]], [[0, 0, 0], [0, 0.5, 0]]]
    grid = Grid((2, 3), (4, 6))
    assert grid.covered(masks[0]).tolist() == [[True, False, False], [False] * 3]  # half of it is not most of it
    masks[0, 2, 5] = True
    assert grid.covered(masks[0]).tolist() == [[True, False, False], [False, False, True]]


def test_masks_of_the_grid_are_taken_as_they_are():
    backbone, picture, _, grid = FOUND["padded around"]
    masks = torch.arange(2 * math.prod(grid)).reshape(2, *grid) % 3
    _, labels = extract_features(backbone, [(torch.randn(2, 3, *picture), masks)], "norm", pool="dense", progress=False)
    np.testing.assert_array_equal(labels, masks.flatten())
