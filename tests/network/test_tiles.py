"""Networks on tiles: features, decisions and maps against the same written out tile by tile, with torch alone."""

import copy

import numpy as np
import pytest
import torch
from cams import METHODS
from reference import gap, keep_leaves, map_of_paper, margins_by_formula, relative
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormGradCAM,
    ClosedFormHiResCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    RelevanceCAM,
    SVMTarget,
    TiledNet,
    extract_features,
    fit_model,
    load_model,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.network.tiling import Crops, measure_canvas, spread_tiles

# Two rows and three columns of tiles of 32 pixels, which share 8 with the next: written out, not asked of the package.
ROWS, COLUMNS, TILE, CANVAS = (0, 24), (0, 24, 48), 32, (56, 80)
STRIDE = 8


def step(channels, out):
    return nn.Sequential(nn.Conv2d(channels, out, 3, 2, 1), nn.BatchNorm2d(out), nn.Softplus())


def small():
    torch.manual_seed(0)
    net = nn.Sequential(step(3, 6), step(6, 8), step(8, 10)).double().eval().requires_grad_(False)
    for norm in (module for module in net.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.running_mean.normal_()
    return net


NET = small()
LABELS = np.array(["ant", "bee", "cat"])[np.arange(18) % 3]
X = torch.randn(18, 3, *CANVAS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
X = X + torch.tensor([0.0, 0.4, 0.9], dtype=torch.float64)[torch.arange(18) % 3].reshape(-1, 1, 1, 1)


def tiled(pool="mean", layer="2", net=None, **options):
    options = {"tiles": (3, 2), "size": TILE} | options
    return TiledNet(NET if net is None else net, layer, pool, **options).eval()


def cut_by_hand(x):
    return [x[:, :, row : row + TILE, column : column + TILE] for row in ROWS for column in COLUMNS]


def weights_by_hand(begins, cells, total):
    """The weights of each tile's cells along an axis: the distance of a cell's centre to the border, shared out."""
    near = [min(i, cells - 1 - i) + 0.5 for i in range(cells)]
    sums = [0.0] * total
    for begin in begins:
        for i in range(cells):
            sums[begin + i] += near[i]
    return [[near[i] / sums[begin + i] for i in range(cells)] for begin in begins]


def merge_by_hand(parts, stride=STRIDE):
    """One grid of the features of tiles, each (N, D, h, w), by loops."""
    cells = TILE // stride
    height, width = CANVAS[0] // stride, CANVAS[1] // stride
    of_rows = weights_by_hand([row // stride for row in ROWS], cells, height)
    of_columns = weights_by_hand([column // stride for column in COLUMNS], cells, width)
    merged = torch.zeros(*parts[0].shape[:2], height, width, dtype=torch.float64)
    for r, row in enumerate(ROWS):
        for c, column in enumerate(COLUMNS):
            for i in range(cells):
                for j in range(cells):
                    weight = of_rows[r][i] * of_columns[c][j]
                    merged[:, :, row // stride + i, column // stride + j] += weight * parts[3 * r + c][:, :, i, j]
    return merged


def add_by_hand(maps, stride):
    """One map of those of tiles, each (h, w), where they are added."""
    cells, added = TILE // stride, np.zeros((CANVAS[0] // stride, CANVAS[1] // stride))
    for r, row in enumerate(ROWS):
        for c, column in enumerate(COLUMNS):
            place = slice(row // stride, row // stride + cells), slice(column // stride, column // stride + cells)
            added[place] += maps[3 * r + c]
    return added


PIPELINE = make_pipeline(StandardScaler(), PCA(4), SVC(gamma=0.1))


def network(pool, fitted=PIPELINE):
    """A network on tiles with a fitted head, and this."""
    backbone, dense = tiled(pool), "dense" if pool == "dense" else None
    rows, labels = extract_features(backbone, [(X, LABELS)], pool=dense, progress=False)
    pipeline = copy.deepcopy(fitted).fit(rows, labels)
    return PCASVMNet(backbone, pipeline, pool=dense).eval(), pipeline


# --- where tiles lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize(("side", "stride"), [(224, 32), (224, 16), (518, 14), (32, 8), (32, 1)])
def test_tiles_are_the_fewest_that_cover_a_canvas_with_the_overlap(side, stride, overlap):
    for length in range(side, 6 * side, stride):
        begins = spread_tiles(length, side, stride, overlap)
        steps = np.diff(begins)
        assert begins[0] == 0
        assert begins[-1] == length - side
        assert all(begin % stride == 0 for begin in begins)
        least = max(stride, stride * int((1 - overlap) * side / stride + 1e-9))
        assert all(steps > 0)
        assert all(steps <= least)
        assert len(steps) == 0 or max(steps) - min(steps) <= stride  # evenly
        assert (len(begins) - 2) * least < max(length - side, 1)  # one tile less does not do
        assert spread_tiles(measure_canvas(len(begins), side, stride, overlap), side, stride, overlap) is not None
    for count in range(1, 6):
        length = measure_canvas(count, side, stride, overlap)
        assert len(spread_tiles(length, side, stride, overlap)) == count


def test_steps_are_rounded_to_the_nearest_stride_and_shares_that_are_no_binary_numbers_are_whole():
    assert spread_tiles(72, 32, 8, 0.25) == (0, 24, 40)
    assert measure_canvas(2, 320, 32, 0.8) == 320 + 64


def test_a_canvas_follows_from_the_number_of_tiles_and_of_a_photo_from_the_pixels_of_one():
    backbone = tiled()
    assert (backbone.canvas, backbone.stride) == (CANVAS, (STRIDE, STRIDE))
    assert backbone.canvas_for(6000, 4000) == CANVAS
    by_pixels = tiled(tiles=None, tile=512)
    assert by_pixels.canvas is None
    assert by_pixels.canvas_for(6000, 4000) == (248, 376)  # 4000 and 6000 pixels of 512 for 32, to whole strides
    assert by_pixels.canvas_for(512, 512) == (32, 32)
    with pytest.raises(ValueError, match="the photo of 4000x300 pixels is smaller than a tile of 512"):
        by_pixels.canvas_for(4000, 300)


def test_weights_sum_to_one_and_are_largest_in_the_middle_of_a_tile():
    crops = Crops((0, 3), (0, 3, 6), (4, 4))
    merged = crops.merge(torch.ones(6, 2, 4, 4, dtype=torch.float64))
    torch.testing.assert_close(merged, torch.ones(1, 2, 7, 10, dtype=torch.float64))
    first = torch.zeros(6, 1, 4, 4, dtype=torch.float64)
    first[0] = 1
    seen = crops.merge(first)[0, 0]
    assert seen[0, :3].tolist() == [1, 1, 1]
    assert seen[0, 3] == 0.5  # at the border of both
    assert (seen[:, 4:] == 0).all()


# --- features ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, 1, 4, 5, 100])
def test_features_are_means_of_tiles_or_weighted_means_of_positions(block):
    parts = [NET(part) for part in cut_by_hand(X)]
    pooled = sum(part.mean((2, 3)) for part in parts) / 6
    assert relative(tiled()(X, block), pooled) < 1e-12
    assert relative(tiled("dense")(X, block), merge_by_hand(parts)) < 1e-12


def test_features_of_several_layers_are_those_of_the_finest_grid_of_each_tile():
    parts = []
    for tile in cut_by_hand(X[:2]):
        fine = NET[1](NET[0](tile))
        coarse = F.interpolate(NET[2](fine), fine.shape[2:], mode="bilinear", align_corners=False)
        parts.append(torch.cat([fine, coarse], 1))
    backbone = tiled("dense", ["1", "2"])
    assert relative(backbone(X[:2]), merge_by_hand(parts, 4)) < 1e-12
    rows, _ = extract_features(backbone, [X[:2]], pool="dense", progress=False)
    assert rows.shape == (2 * 14 * 20, 18)


def test_extraction_runs_in_blocks_and_counts_the_same_means():
    rows = []
    handle = NET.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    try:
        model = fit_model(tiled(block=4), [(X[:9], LABELS[:9]), (X[9:], LABELS[9:])], PIPELINE, progress=False)
    finally:
        handle.remove()
    assert max(rows) == 4 * 3  # but for the first
    for name, layer in (("net.0", NET[:1]), ("net.1", NET[:2]), ("net.2", NET)):
        expected = sum(layer(tile).mean(0) for tile in cut_by_hand(X)) / 6
        assert relative(model.means[name], expected) < 1e-6
    mean = mean_activations(model.net, [X], "net.1", progress=False)
    assert relative(mean, sum(NET[:2](tile).mean(0) for tile in cut_by_hand(X)) / 6) < 1e-12
    assert model.layers == ("net.2",)
    assert mean_activations(model.net, [X], "1", progress=False).shape == mean.shape  # the name of the layer inside


def test_tiles_may_be_wider_than_high():
    """Two rows at 0 and 24, two columns at 0 and 32 of tiles of 48x32, on a canvas of 80x56."""
    places = [(0, 0), (0, 32), (24, 0), (24, 32)]
    tiles = [X[:3, :, row : row + 32, column : column + 48] for row, column in places]
    backbone = tiled(tiles=(2, 2), size=(32, 48))
    assert backbone.canvas == CANVAS
    assert relative(backbone(X[:3]), sum(NET(tile).mean((2, 3)) for tile in tiles) / 4) < 1e-12

    def share(i, cells, begins, total):  # of each tile's cell along an axis
        near = torch.tensor([min(k, cells - 1 - k) + 0.5 for k in range(cells)], dtype=torch.float64)
        sums = torch.zeros(total, dtype=torch.float64)
        for begin in begins:
            sums[begin : begin + cells] += near
        return near / sums[i : i + cells]

    merged = torch.zeros(3, 10, 7, 10, dtype=torch.float64)
    for (row, column), tile in zip(places, tiles, strict=True):
        i, j = row // 8, column // 8
        weights = torch.outer(share(i, 4, (0, 3), 7), share(j, 6, (0, 4), 10))
        merged[:, :, i : i + 4, j : j + 6] += weights * NET(tile)
    assert relative(tiled("dense", tiles=(2, 2), size=(32, 48))(X[:3]), merged) < 1e-12

    rows, labels = extract_features(backbone, [(X, LABELS)], progress=False)
    net = PCASVMNet(backbone, copy.deepcopy(PIPELINE).fit(rows, labels)).eval()
    maps = ClosedFormGradCAM(net, ["net.2"]).explain(X[:3], SVMTarget("bee"))
    for image in range(3):
        added = torch.zeros(7, 10, dtype=torch.float64)
        for (row, column), tile in zip(places, tiles, strict=True):
            part = torch.einsum("t,thw->hw", maps.weights[image, 0], NET(tile)[image])
            added[row // 8 : row // 8 + 4, column // 8 : column // 8 + 6] += part
        assert relative(maps.maps[image, 0], added) < 1e-10


# --- decisions and labels ---------------------------------------------------------------------------------------------


def test_decisions_and_labels_are_those_of_the_head_on_merged_features():
    net, pipeline = network("mean")
    features = sum(NET(part).mean((2, 3)) for part in cut_by_hand(X)) / 6
    assert relative(net(X), pipeline.decision_function(features.numpy())) < 1e-10
    assert net.predict(X).tolist() == pipeline.predict(features.numpy()).tolist()

    net, pipeline = network("dense")
    rows = merge_by_hand([NET(part) for part in cut_by_hand(X[:3])]).flatten(2).mT.flatten(0, 1)
    expected = pipeline.decision_function(rows.numpy()).reshape(3, 7, 10, 3).transpose(0, 3, 1, 2)
    assert relative(net(X[:3]), expected) < 1e-10
    assert net.predict(X[:3]).tolist() == pipeline.predict(rows.numpy()).reshape(3, 7, 10).tolist()


def test_anomaly_maps_are_of_the_merged_grid():
    backbone = tiled("dense")
    rows, _ = extract_features(backbone, [X[:4]], pool="dense", progress=False)
    net = PCASVMNet(backbone, NearestNeighbors(n_neighbors=1).fit(rows[:200]), pool="dense").eval()
    maps = net.anomaly_map(X[4:6], size=CANVAS)
    assert maps.shape == (2, *CANVAS)


# --- maps -------------------------------------------------------------------------------------------------------------


def explained_by_hand(value, layer, image):
    """Each tile's activations of a layer (C, h, w), the gradient of a value of the image by them, and H F."""
    stem, rest = NET[: layer + 1], NET[layer + 1 :]
    leaves = [stem(tile).detach().requires_grad_() for tile in cut_by_hand(X[image : image + 1])]
    total = value([rest(leaf) for leaf in leaves])
    grads = torch.autograd.grad(total, leaves, create_graph=True)
    along = sum((grad * leaf.detach()).sum() for grad, leaf in zip(grads, leaves, strict=True))
    curved = torch.autograd.grad(along, leaves, allow_unused=True)
    zeros = [torch.zeros_like(leaf) if part is None else part for part, leaf in zip(curved, leaves, strict=True)]
    return total.detach(), *([part.detach()[0].numpy() for part in parts] for parts in (leaves, grads, zeros))


OF_PAPER = ("GradCAM", "HiResCAM", "XGradCAM", "GradCAMPlusPlus", "LayerCAM", "GradCAMElementWise", "ShapleyCAM")


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("pool", ["mean", "dense"])
@pytest.mark.parametrize("method", OF_PAPER)
def test_maps_are_those_of_the_papers_over_all_tiles_added_on_one_grid(method, pool, layer):
    net, pipeline = network(pool)
    place = (3, 4)
    target = SVMTarget("bee") if pool == "mean" else SVMTarget("bee", at=place)

    def value(parts):
        if pool == "mean":
            features = sum(part.mean((2, 3)) for part in parts) / 6
        else:
            features = merge_by_hand(parts)[:, :, place[0], place[1]]
        return margins_by_formula(pipeline, features)[0, 1]

    images = X[:2]
    maps = getattr(package, f"ClosedForm{method}")(net, [f"net.{layer}"]).explain(images, target)
    stride = STRIDE if layer == 2 else STRIDE // 2
    for image in range(2):
        number, *parts = explained_by_hand(value, layer, image)
        # Tiles are parts of one image: their channels have one weight, and their positions are counted together.
        f, d, hf = (np.concatenate(part, 1) for part in parts)
        of_tiles = map_of_paper(method, f, d, hf).reshape(6, TILE // stride, TILE // stride)
        expected = torch.from_numpy(add_by_hand(of_tiles, stride))
        assert relative(maps.values[image], number.reshape(1)) < 1e-10
        ours = maps.maps[image, 0] * maps.log_scale[image, 0].exp()
        terms = np.abs(f).max() * np.abs(d).max() * f.shape[0]  # of which the numbers on a map are sums
        assert float((ours - expected).abs().max()) < 1e-10 * max(terms, float(expected.abs().max()))
        assert float((ours - expected).abs().max()) < 1e-8 * float(expected.abs().max())


@pytest.mark.parametrize("pool", ["mean", "dense"])
@pytest.mark.parametrize("layers", [["net.2"], ["net.1"], ["net.0"], ["net.0", "net.1", "net.2"], "auto"])
def test_contributions_add_up_to_every_decision(pool, layers):
    dense = "dense" if pool == "dense" else None
    model = fit_model(tiled(pool), [(X, LABELS)], PIPELINE, pool=dense, progress=False)
    at = {"at": (2, 3)} if dense else {}
    targets = [SVMTarget("bee", **at), SVMTarget("ant", versus="cat", **at), PCATarget(1, **at), SVMTarget(**at)]
    targets += [SVMTarget("cat", at="max")] if dense else []
    for options in ({}, {"baseline": "mean"}, {"baseline": "zero"}):
        maps = model.cam(ContributionCAM, layers, **options).explain(X[:3], targets)
        assert gap(maps) < 1e-10
        if not options and (not dense or layers in (["net.2"], "auto")):  # of others a start is that of all positions
            assert (maps.baseline_values.abs() < 1e-8 * maps.values.abs().max()).all()
        last = layers[0] if isinstance(layers, list) else "net.2"  # as stored with the model
        assert maps.maps.shape[2:] == {"net.2": (7, 10), "net.1": (14, 20), "net.0": (28, 40)}[last]


def test_contributions_from_a_start_are_secants_of_tiles():
    """At the last layer before the mean they are the integrated gradient of the head, shared out over all tiles."""
    from reference import integrated_gradient

    net, pipeline = network("mean")
    cam = ContributionCAM(net, ["net.2"], baseline="zero")
    maps = cam.explain(X[:2], SVMTarget("cat"))
    features = sum(NET(part).mean((2, 3)) for part in cut_by_hand(X[:2])) / 6
    shares = integrated_gradient(
        lambda rows: margins_by_formula(pipeline, rows)[:, 2], torch.zeros(1, 10, dtype=torch.float64), features
    )
    for image in range(2):
        parts = [
            ((shares[image] / features[image])[:, None, None] * NET(tile)[image] / (6 * 16)).sum(0).numpy()
            for tile in cut_by_hand(X[:2])
        ]
        expected = torch.from_numpy(add_by_hand(parts, STRIDE))
        ours = maps.maps[image, 0] * maps.log_scale[image, 0].exp()
        assert relative(ours, expected) < 1e-8


@pytest.mark.parametrize("method", [LIFTCAM, RelevanceCAM])
def test_channel_weights_of_contributions_are_sums_over_tiles(method):
    net, _ = network("mean")
    alone = method(net, ["net.2"], baseline="zero")
    maps = alone.explain(X[:2], SVMTarget("cat"))
    activations = [NET(tile) for tile in cut_by_hand(X[:2])]
    for image in range(2):
        of_tiles = [torch.einsum("t,thw->hw", maps.weights[image, 0], part[image]).numpy() for part in activations]
        assert relative(maps.maps[image, 0], torch.from_numpy(add_by_hand(of_tiles, STRIDE))) < 1e-10


def test_a_call_of_the_host_and_a_check_take_tiles_too():
    net, _ = network("mean")
    cam = ClosedFormGradCAM(net, ["net.1"])
    assert cam(X[:2], SVMTarget("bee")).shape == (2, *CANVAS)
    assert cam(X[:2], SVMTarget("bee"), eigen_smooth=True).shape == (2, *CANVAS)
    assert cam.check(X[:2]).agrees
    jacobian = cam.jacobians(X[:1])
    assert jacobian.components.shape == (1, 8, 4, 6 * 64)
    by_autograd = ClosedFormHiResCAM(net, ["net.1"], jacobian="autograd").explain(X[:2])
    assert relative(ClosedFormHiResCAM(net, ["net.1"]).explain(X[:2]).maps, by_autograd.maps) < 1e-10


@pytest.mark.parametrize("method", ["ClosedFormAblationCAM", "ClosedFormScoreCAM", "ShapCAM"])
def test_methods_that_change_one_image_again_and_again_are_refused_by_name(method):
    net, _ = network("mean")
    cam = METHODS[method](net, ["net.2"])
    with pytest.raises(ValueError, match=rf"{method} changes .* tiles .*: use LIFTCAM or ContributionCAM"):
        cam.explain(X[:1], SVMTarget("bee"))


def test_images_that_are_no_canvas_are_refused_with_the_way_out():
    net, _ = network("mean")
    for size in ((56, 82), (24, 80)):
        with pytest.raises(ValueError, match=r"no canvas for tiles of 32x32.*resize them to \.canvas"):
            net(torch.zeros(1, 3, *size, dtype=torch.float64))
    other = net(torch.zeros(1, 3, 32, 40, dtype=torch.float64))  # of another size there are other tiles
    assert other.shape == (1, 3)


@pytest.mark.parametrize("options", [
    {"tiles": (0, 2)}, {"tiles": 3}, {"tiles": None, "tile": 0}, {"tile": 64}, {"overlap": 1.0}, {"overlap": -0.1},
    {"block": 0}, {"size": 36},
])  # fmt: skip
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=r"tile|overlap|block"):
        tiled(**options)


# --- transformers -----------------------------------------------------------------------------------------------------


def transformer():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 64, "depth": 3, "num_classes": 0, "embed_dim": 24, "num_heads": 3, "reg_tokens": 2}
    return timm.create_model("vit_tiny_patch16_224", **options).double().eval().requires_grad_(False)


def tiles_of_vit(x):
    return [x[:, :, row : row + 64, column : column + 64] for row in (0, 48) for column in (0, 48, 96)]


@pytest.mark.optional
@pytest.mark.parametrize("pool", ["cls", "mean", "dense"])
def test_a_transformer_on_tiles(pool):
    vit = transformer()
    dense = "dense" if pool == "dense" else None
    backbone = TiledNet(vit, "norm", pool, tiles=(3, 2)).eval()
    assert (backbone.size, backbone.stride, backbone.canvas) == ((64, 64), (16, 16), (112, 160))
    x = torch.randn(9, 3, 112, 160, dtype=torch.float64)
    parts = [vit.forward_features(tile) for tile in tiles_of_vit(x)]
    rows, _ = extract_features(backbone, [x], pool=dense, progress=False)
    if pool != "dense":
        expected = sum(part[:, 0] if pool == "cls" else part[:, 3:].mean(1) for part in parts) / 6
        assert relative(rows, expected) < 1e-10
    else:
        assert rows.shape == (9 * 7 * 10, 24)
    labels = np.arange(9) % 3
    norms = ["net.blocks.1.norm1", "net.blocks.2.norm1"]
    pipeline = make_pipeline(StandardScaler(), PCA(4), SVC())
    usual = fit_model(backbone, [(x, labels)], pipeline, pool=dense, progress=False)
    assert usual.layers == ("net.blocks.2.norm1" if pool == "cls" else "net.blocks.2",)
    assert gap(usual.explain(x[:2], [SVMTarget(1, **({"at": (2, 3)} if dense else {}))])) < 1e-9
    model = fit_model(backbone, [(x, labels)], pipeline, pool=dense, layers=norms, progress=False)
    assert model.tokens
    assert model.means["net.blocks.2.norm1"].shape == (19, 24)
    at = {"at": (2, 3)} if dense else {}
    targets = [SVMTarget(1, **at), PCATarget(0, **at)]
    for layers in (["net.blocks.2.norm1"], ["net.blocks.1.norm1", "net.blocks.2.norm1"], "auto"):
        maps = model.cam(layers=layers).explain(x[:2], targets)
        assert maps.maps.shape == (2, 2, 7, 10)
        assert gap(maps) < 1e-9

    # HiResCAM by autograd, tile by tile.
    with keep_leaves(vit.blocks[2].norm1) as kept:
        after = [vit.forward_features(tile) for tile in tiles_of_vit(x[:1])]
    if pool == "dense":
        cells = [part[:, 3:].mT.unflatten(2, (4, 4)) for part in after]
        features = Crops((0, 3), (0, 3, 6), (4, 4)).merge(torch.stack(cells, 1).flatten(0, 1))[:, :, 2, 3]
    else:
        features = sum(part[:, 0] if pool == "cls" else part[:, 3:].mean(1) for part in after) / 6
    steps = fitted_again(model, rows, labels, dense)
    value = margins_by_formula(steps, features)[0, 1]
    grads = torch.autograd.grad(value, kept)
    expected = torch.zeros(7, 10, dtype=torch.float64)
    for tile, (grad, leaf) in enumerate(zip(grads, kept, strict=True)):
        row, column = 3 * (tile // 3), 3 * (tile % 3)
        expected[row : row + 4, column : column + 4] += (grad * leaf.detach())[0, 3:].sum(-1).unflatten(0, (4, 4))
    cam = model.cam(ClosedFormHiResCAM, ["net.blocks.2.norm1"])
    maps = cam.explain(x[:1], SVMTarget(1, **at))
    assert relative(maps.maps[0, 0] * maps.log_scale[0, 0].exp(), expected) < 1e-8


def fitted_again(model, rows, labels, dense):
    """The same pipeline as the model's, which keeps no estimator."""
    if dense:
        labels = np.repeat(labels, 70)
    return make_pipeline(StandardScaler(), PCA(4), SVC()).fit(rows, labels)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_model_on_tiles_is_a_file_that_takes_the_same_network(tmp_path):
    model = fit_model(tiled(), [(X, LABELS)], PIPELINE, progress=False)
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors", tiled())
    assert relative(again.explain(X[:2]).maps, model.explain(X[:2]).maps) < 1e-6


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [["net.2"], ["net.1"]])
@pytest.mark.parametrize("pool", ["mean", "dense"])
@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name].runs_again])
def test_maps_of_blocks_are_those_of_all_tiles_at_once(method, pool, layers):
    dense = "dense" if pool == "dense" else None
    at = {"at": (3, 4)} if dense else {}
    targets = [SVMTarget("bee", **at), PCATarget(1, **at)]
    model = fit_model(tiled(pool, block=1000), [(X, LABELS)], PIPELINE, pool=dense, progress=False)
    once = model.cam(METHODS[method].kind, layers).explain(X[:2], targets)
    model.net.backbone.block = 5
    blocks = model.cam(METHODS[method].kind, layers).explain(X[:2], targets)
    for name in ("maps", "weights", "values", "opposite", "baseline_values", "remainder"):
        ours, theirs = getattr(blocks, name), getattr(once, name)
        assert (ours is None) == (theirs is None)
        if ours is not None and bool(theirs.abs().max() > 1e-9):
            assert relative(ours, theirs) < 1e-9, name


def test_several_layers_and_starts_of_each_image_in_blocks():
    model = fit_model(tiled(block=1000), [(X, LABELS)], PIPELINE, progress=False)
    layers, targets = ["net.1", "net.2"], [SVMTarget(), SVMTarget("ant", versus="runner-up"), PCATarget(0)]
    once = model.cam(layers=layers).explain(X[:4], targets)
    model.net.backbone.block = 7
    blocks = model.cam(layers=layers).explain(X[:4], targets)
    assert relative(blocks.maps, once.maps) < 1e-9
    assert gap(blocks) < 1e-10


class Bypassed(nn.Module):
    """A network in which something goes around the layer of the maps: a start has other features in each tile."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.stem, self.side, self.end = step(3, 6), nn.Conv2d(6, 6, 3, 1, 1), step(6, 8)

    def forward(self, x):
        x = self.stem(x)
        return self.end(self.side(x).tanh() + x)


def test_what_goes_around_a_layer_is_that_of_each_tile():
    net = Bypassed().double().eval()
    backbone = tiled("mean", "end", net, block=5)
    rows, labels = extract_features(backbone, [(X, LABELS)], progress=False)
    model = PCASVMNet(backbone, copy.deepcopy(PIPELINE).fit(rows, labels)).eval()
    blocks = ContributionCAM(model, ["net.side"], baseline="zero").explain(X[:2], SVMTarget("bee"))
    assert gap(blocks) < 1e-10
    backbone.block = 100
    once = ContributionCAM(model, ["net.side"], baseline="zero").explain(X[:2], SVMTarget("bee"))
    assert relative(blocks.maps, once.maps) < 1e-9
    assert relative(blocks.baseline_values, once.baseline_values) < 1e-9


def test_no_more_than_a_block_of_tiles_runs_at_once_and_each_twice():
    model = fit_model(tiled(block=4), [(X, LABELS)], PIPELINE, progress=False)
    cam = model.cam()
    cam.explain(X[:3], SVMTarget("bee"))  # what is looked for once
    ran = []
    handle = NET.register_forward_pre_hook(lambda module, args: ran.append(len(args[0])))
    try:
        cam.explain(X[:3], SVMTarget("bee"))
    finally:
        handle.remove()
    assert max(ran) == 4
    assert sum(ran) <= 2 * 18 + 1


def test_of_one_position_only_the_tiles_that_see_it_run_again():
    model = fit_model(tiled("dense", block=4), [(X, LABELS)], PIPELINE, pool="dense", progress=False)
    cam, target = model.cam(), SVMTarget("bee", at=(0, 4))  # seen by the second tile of the first row, and no other
    cam.explain(X[:3], target)
    ran = []
    handle = NET.register_forward_pre_hook(lambda module, args: ran.append(len(args[0])))
    try:
        cam.explain(X[:3], target)
    finally:
        handle.remove()
    assert sum(ran) == 18 + 1 + 3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("block", [4, 100])
@pytest.mark.parametrize("pool", ["mean", "dense"])
@pytest.mark.parametrize("method", [ClosedFormGradCAM, ContributionCAM])
def test_cuda_equals_the_cpu(method, pool, block):
    model, _ = network(pool)
    model.backbone.block = block
    start = {"baseline": "zero"} if method is ContributionCAM else {}
    layers = ["net.1", "net.2"] if method is ContributionCAM else ["net.1"]
    targets = [SVMTarget("bee"), PCATarget(1)]
    expected = method(model, layers, **start).explain(X[:3], targets)
    actual = method(copy.deepcopy(model).cuda(), layers, **start).explain(X[:3].cuda(), targets)
    assert actual.maps.device.type == "cuda"
    assert relative(actual.maps, expected.maps) < 1e-9
    assert relative(actual.values, expected.values) < 1e-9
