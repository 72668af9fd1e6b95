"""Figures of dense heads: colours at positions, legends, outlines of masks, and what is refused."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, PCASVMNet, PCATarget, SVMTarget, extract_features
from pytorch_grad_cam_pcasvm.figures import plot_labels, plot_maps, plot_mistake, plot_positions, plot_rgb
from pytorch_grad_cam_pcasvm.network.grid import Grid
from pytorch_grad_cam_pcasvm.runtime.pictures import COLOURS
from pytorch_grad_cam_pcasvm.studio.figures.blocks import Block, caption
from pytorch_grad_cam_pcasvm.studio.figures.mistake import Around
from pytorch_grad_cam_pcasvm.studio.figures.style import number as written

RNG = np.random.default_rng(0)
PICTURES = RNG.uniform(size=(3, 24, 32, 3))
MASKS = np.zeros((3, 24, 32), bool)
MASKS[:2, 4:10, 5:15] = True


def panels(figure):
    """Pictures and what is drawn over them, as arrays, in order."""
    return [axis.images[0].get_array() for axis in figure.axes if axis.images]


def outlines(figure):
    return sum(len(axis.collections) > 0 for axis in figure.axes if axis.images)


def test_signed_numbers_share_a_scale_that_ends_at_the_largest():
    values = np.zeros((3, 6, 8))
    values[0, 2, 3], values[1, 4, 4], values[2, 0, 0] = 2.0, -4.0, 1.0
    figure = plot_positions(PICTURES, values, masks=MASKS, titles=["a", "b", "c"], label="evidence for a $crack")
    drawn = panels(figure)[:6]
    grey = np.repeat(0.35 + 0.65 * PICTURES.mean(-1, keepdims=True), 3, -1)
    np.testing.assert_allclose(drawn[1][23, 31], grey[0, 23, 31], atol=1e-6)  # 0 is transparent
    red, blue = drawn[1][10, 13], drawn[3][18, 17]
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    assert outlines(figure) == 4  # two pictures with a mask, and what is over them
    bar = figure.axes[-1]
    assert [label.get_text() for label in bar.get_yticklabels()] == ["\N{MINUS SIGN}4", "0", "4"]
    assert "$" not in bar.get_ylabel().replace(r"\$", "")


def test_anomalies_go_from_dark_to_bright():
    values = RNG.uniform(1, 3, size=(3, 6, 8))
    values[1, 3, 3], values[2, 5, 7] = 9.0, 0.5
    figure = plot_positions(torch.from_numpy(PICTURES).movedim(-1, 1), torch.from_numpy(values), anomaly=True)
    drawn = panels(figure)
    assert drawn[3][14, 14].mean() > drawn[5][23, 31].mean()
    assert [label.get_text() for label in figure.axes[-1].get_yticklabels()] == ["0.5", "9"]
    assert outlines(figure) == 0


def test_labels_have_colours_and_a_legend():
    labels = np.full((3, 6, 8), "fine", dtype=object)
    labels[0, 0, 0], labels[2, 5, 7] = "crack", "hole"
    figure = plot_labels(PICTURES, labels, classes={"hole": "a hole"})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["crack", "fine", "a hole"]
    drawn = panels(figure)
    grey = 0.45 * (0.35 + 0.65 * PICTURES.mean(-1))
    for image, row, column, number in ((0, 0, 0, 0), (0, 0, 8, 1), (2, 23, 31, 2), (1, 5, 5, 1)):
        expected = 0.55 * np.array(to_rgb(COLOURS[number])) + grey[image, row, column]
        np.testing.assert_allclose(drawn[2 * image + 1][row, column], expected, atol=1e-6)
    with pytest.raises(ValueError, match="there are 11 labels, but 10 colours"):
        plot_labels(PICTURES, np.arange(144).reshape(3, 6, 8) % 11)


def test_components_as_colours_are_on_one_scale_for_all_pictures():
    components = RNG.normal(size=(3, 4, 6, 8))
    components[2] += 5
    drawn = panels(plot_rgb(PICTURES, components))
    assert drawn[5].mean() > drawn[1].mean() + 0.3
    components[:, 3] = 1e9  # a fourth one is not drawn
    np.testing.assert_allclose(panels(plot_rgb(PICTURES, components))[1], drawn[1])


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot_positions(PICTURES, np.zeros((2, 6, 8))), "3 pictures, but numbers of 2"),
        (lambda: plot_positions(PICTURES, np.zeros((3, 2, 6, 8))), "one number at every position"),
        (lambda: plot_positions(PICTURES, np.full((3, 6, 8), np.nan)), "not finite"),
        (lambda: plot_positions(PICTURES, np.zeros((3, 6, 8)), masks=MASKS[:, :5]), "masks must be"),
        (lambda: plot_positions(PICTURES, np.zeros((3, 6, 8)), titles=["a"]), "but 1 titles"),
        (lambda: plot_labels(PICTURES, np.zeros((3, 6))), "but numbers of no pictures"),
        (lambda: plot_rgb(PICTURES, np.zeros((3, 2, 6, 8))), "expected three components"),
    ],
)
def test_what_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_the_place_of_a_target_is_outlined_and_named():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1), nn.ReLU()).eval()
    x = torch.rand(2, 3, 16, 24)
    rows, _ = extract_features(backbone, [x], pool="dense", progress=False)
    names = np.array(["leaf", "spot"])[(rows[:, 0] > np.median(rows[:, 0])).astype(int)]
    net = PCASVMNet(backbone, make_pipeline(PCA(2), SVC()).fit(rows, names), pool="dense").eval()
    region = np.zeros((8, 12), bool)
    region[1:3, 2:6] = True
    targets = [SVMTarget("spot", at=(3, 4)), SVMTarget(at=region), PCATarget(0, at="max"), SVMTarget("leaf")]
    maps = ClosedFormGradCAM(net, ["1"]).explain(x, targets)
    most = net(x).components[:, 0].flatten(1).argmax(1)
    words = [caption(maps, k, 0, None) for k in range(4)]
    commonest, count = np.unique(net.predict(x)[0][region], return_counts=True)
    assert words[0].startswith("spot at (3, 4): ")
    assert words[1].startswith(f"{commonest[count.argmax()]} in a region: ")
    assert words[2].endswith(" where strongest")
    assert words[3].startswith("leaf: ")
    for row in range(2):
        blocks = [Block("", maps, k, True, (16, 24), None) for k in range(4)]
        places = [block.place(row, (16, 24)) for block in blocks]
        assert places[0].nonzero()[0].tolist() == [6, 6, 7, 7]
        assert places[0].nonzero()[1].tolist() == [8, 9, 8, 9]
        assert (places[1] == np.kron(region, np.ones((2, 2)))).all()
        at = np.unravel_index(int(most[row]), (8, 12))
        assert places[2].sum() == 4
        assert places[2][2 * at[0], 2 * at[1]] == 1
        assert places[3] is None
    plot_maps(x, maps, signed=True)


def test_the_mistake_at_a_position_and_the_nearest_patches():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1), nn.Softplus()).eval()
    x = torch.rand(6, 3, 16, 24)
    rows, _ = extract_features(backbone, [x], pool="dense", progress=False)
    head = make_pipeline(PCA(3), SVC()).fit(rows, (rows[:, 0] > np.median(rows[:, 0])).astype(int))
    net = PCASVMNet(backbone, head, pool="dense").eval()
    predicted = int(net.predict(x)[0, 3, 4])
    masks = (np.arange(24) >= 12).astype(int)[None, None].repeat(6, 0).repeat(16, 1)
    arguments = {"target_layer": "1", "at": (3, 4), "neighbours": 2}
    figure = plot_mistake(net, x[0], 1 - predicted, x, masks, **arguments)
    start = f'predicted "{predicted}", but it is "{1 - predicted}": '
    assert figure.get_suptitle().replace("\n", " ").startswith(start)
    # Distances of patches are those of their components, and no patch of the image itself is its neighbour.
    components = net(x).components.detach()
    away = (components - components[0, :, 3, 4].reshape(1, 3, 1, 1)).norm(dim=1)[1:]
    of_class = {0: away[:, :, :6], 1: away[:, :, 6:]}
    nearest = [of_class[label].flatten().sort().values[:2] for label in (predicted, 1 - predicted)]
    shown = [axis.get_title().strip() for axis in figure.axes if "distance" in axis.get_title()]
    assert shown == [f"distance {written(float(value))}" for value in torch.cat(nearest)]
    labels = [0, 1, 0, 1, 0, 1]
    plot_mistake(net, x[0], 1 - predicted, x, labels, **arguments)
    with pytest.raises(ValueError, match="decides once for each image"):
        plot_mistake(net, x[0], 1 - predicted, x, labels, target_layer="1")
    with pytest.raises(ValueError, match="there is no position"):
        plot_mistake(net, x[0], 1 - predicted, x, labels, target_layer="1", at=(9, 4))


def test_what_lies_around_a_patch_is_cut_inside_the_picture():
    around = Around(Grid((4, 6), (40, 60)), (40, 60))
    pictures = RNG.uniform(size=(2, 40, 60, 3))
    cut = around.cut(pictures, np.array([0, 24 + 15]))  # the first of the first, (2, 3) of the second
    assert cut.shape == (2, 40, 60, 3)  # seven patches across are more than the picture has
    assert around.patch(15).nonzero()[0].tolist()[0] == 20
    assert around.patch(15).sum() == 100
    fine = Around(Grid((20, 30), (40, 60)), (40, 60))
    corner, middle = fine.cut(pictures, np.array([0, 10 * 30 + 15]))
    assert corner.shape == (14, 14, 3)
    assert np.allclose(corner[3:], pictures[0, 3:14, :14])
    assert np.allclose(middle[:5], pictures[0, 14:19, 24:38])
