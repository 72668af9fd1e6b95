"""Figures: what they contain."""

import copy
import dataclasses
import itertools
import re
from types import SimpleNamespace

import cv2
import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from problems import Problem
from pytorch_grad_cam.utils.image import show_cam_on_image
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from reference import relative
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from towers import Tower

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ClosedFormLayerCAM,
    ContributionCAM,
    Head,
    HotellingTarget,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    ResidualTarget,
    SignedMaps,
    SVMTarget,
    extract_features,
    recombined,
)
from pytorch_grad_cam_pcasvm.figures import (
    plot_component,
    plot_contribution_ratios,
    plot_decision,
    plot_feature_space,
    plot_jacobian,
    plot_maps,
    plot_support_vector_effect,
    plot_support_vectors,
)
from pytorch_grad_cam_pcasvm.maps.recombination import decision_shares
from pytorch_grad_cam_pcasvm.studio.figures.blocks import caption, heading, write_title
from pytorch_grad_cam_pcasvm.studio.figures.head import _dense_stages, _gradients
from pytorch_grad_cam_pcasvm.studio.figures.style import BLUE, IMAGE_WEIGHT, RED, number, overlaid

RNG = np.random.default_rng(0)
PICTURES = RNG.random((3, 24, 20, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def problem():
    return Problem(seed=1, n=3, components=2)


@pytest.fixture(scope="module")
def maps(problem):
    return ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x)


def pictures_of(figure):
    """Return the images drawn in every axis of a grid with pictures, row by row, without those of bars."""
    drawn = [axis.images for axis in figure.axes if axis.images]
    return [images[-1] for images in drawn]


def texts_of(figure):
    of_axes = (text for axis in figure.axes for text in (*axis.texts, axis.title, axis._left_title))
    return [text.get_text() for text in (*figure.texts, *of_axes)]


def explained(problem, targets):
    return ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x, targets)


def written(value):
    return f"{float(value):.2g}".replace("-", "\N{MINUS SIGN}")


def test_a_pair_shares_its_scale_and_its_bar_ends_at_nu(problem, maps):
    figure = plot_maps(PICTURES, maps, overlay=False)
    size = (24, 20)
    columns = 1 + 2 * problem.components + 1
    pictures = pictures_of(figure)
    assert len(pictures) == 3 * columns
    for n in range(3):
        row = pictures[n * columns : (n + 1) * columns]
        assert relative(row[0].get_array(), PICTURES[n]) == 0
        for b in range(problem.components):
            for image, part in zip(row[2 + 2 * b : 4 + 2 * b], (maps.positive(size), maps.negative(size)), strict=True):
                assert np.abs(np.asarray(image.get_array()) - part[n, b].numpy()).max() < 1e-12
                assert image.get_clim() == (0, 1)
    bars = [axis.child_axes[0] for axis in figure.axes if axis.child_axes]
    ends = [[label.get_text() for label in bar.get_yticklabels()] for bar in bars]
    raised = maps.positive(size, scale="none").amax((2, 3))
    for n in range(3):
        of_row = ends[n * (problem.components + 1) : (n + 1) * (problem.components + 1)]
        assert of_row[1:] == [["0", f"{float(nu):.2g}"] for nu in maps.nu[n, :-1]]
        assert of_row[0] == ["0", f"{float(raised[n, -1]):.2g}"]  # of the decision, which comes first


def test_titles_name_components_classes_and_values(problem, maps):
    figure = plot_maps(PICTURES, {"PCA": maps}, rows=["first", "second", "third"])
    texts = texts_of(figure)
    for title in ("input", "raises\ncomponent 1", "lowers\ncomponent 2", "predicted class", "PCA"):
        assert texts.count(title) == 1
    predicted = problem.net.predict(problem.x)
    for n in range(3):
        assert f"{predicted[n]}: {written(maps.values[n, -1])}" in texts
        assert f"value {written(maps.values[n, 1])}" in texts
    assert [axis.get_ylabel() for axis in figure.axes if axis.get_ylabel()] == ["first", "second", "third"]


def test_overlays_are_those_of_the_host(maps):
    pictures = pictures_of(plot_maps(PICTURES, maps))
    heat = maps.positive((24, 20))[0, 1].numpy()
    white = np.ones((1, 20, 3), dtype=np.float32)
    expected = show_cam_on_image(
        np.concatenate([PICTURES[0], white]),
        np.concatenate([heat, white[..., 0]]),
        use_rgb=True,
        colormap=cv2.COLORMAP_INFERNO,
        image_weight=IMAGE_WEIGHT,
    )[:-1]
    assert (np.asarray(pictures[4].get_array()) == expected).all()


def test_overlays_share_their_colours():
    """The host divides each by its own maximum: half of nu would look like nu."""
    black = np.zeros((4, 4, 3), dtype=np.float32)
    full, half = (overlaid(black, np.full((4, 4), value)) for value in (1.0, 0.5))
    inferno = mpl.colormaps["inferno"]
    for overlay, value in ((full, 1.0), (half, 0.5)):
        expected = 255 * np.array(inferno(value)[:3]) * (1 - IMAGE_WEIGHT)
        largest = (1 - IMAGE_WEIGHT) * max(inferno(1.0)[:3]) + IMAGE_WEIGHT
        assert np.abs(overlay[0, 0] - expected / largest).max() < 3


def test_signed_maps_are_centred_at_zero(problem, maps):
    figure = plot_maps(PICTURES, maps, signed=True, overlay=False)
    pictures = pictures_of(figure)
    assert len(pictures) == 3 * (1 + problem.components + 1)
    signed = maps.positive((24, 20)) - maps.negative((24, 20))
    assert np.abs(np.asarray(pictures[3].get_array()) - signed[0, 1].numpy()).max() < 1e-6
    assert pictures[2].get_clim() == (-1, 1)
    bar = next(axis.child_axes[0] for axis in figure.axes if axis.child_axes)
    nu = f"{float(maps.nu[0, -1]):.2g}"
    assert [label.get_text() for label in bar.get_yticklabels()] == [f"\N{MINUS SIGN}{nu}", nu]


def test_blank_and_faint_maps_say_why(maps):
    changed = copy.copy(maps)
    raw = torch.ones_like(maps.maps)
    raw[0] = 0
    raw[1, :, 0, 0] = -0.03
    raw[2] = -1
    object.__setattr__(changed, "maps", raw)
    object.__setattr__(changed, "nu", raw.abs().amax((2, 3)))
    texts = texts_of(plot_maps(PICTURES, changed))
    assert "blank:\nall zero" in texts
    assert "at most 3 %\nof the strong-\nest colour" in texts
    assert "all evidence\nhas the\nother sign" in texts


def test_tiny_gradients_are_written_with_their_factor():
    assert number(0.5, 0.0) == "0.5"
    assert number(2.0, -1000 * np.log(10)) == "2.0e-1000"
    assert number(0.0, -5.0) == "0"
    assert number(-173.0) == "\N{MINUS SIGN}170"
    assert number(-0.0) == "0"


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (PICTURES[:2], "2 images for maps of shape"),
        (PICTURES[..., :2], "images must have shape"),
        (PICTURES * 3 - 1, "undo the normalisation"),
    ],
)
def test_images_that_do_not_fit_are_refused(maps, images, message):
    with pytest.raises(ValueError, match=message):
        plot_maps(images, maps)
    with pytest.raises(ValueError, match="row titles"):
        plot_maps(PICTURES, maps, rows=["one"])


@pytest.mark.parametrize("layout", ["NCHW", "N1HW", "NHW", "uint8"])
def test_images_in_any_layout(maps, layout):
    grey = PICTURES[..., :1]
    given, expected = {
        "NCHW": (torch.tensor(PICTURES).permute(0, 3, 1, 2), PICTURES),
        "N1HW": (torch.tensor(grey).permute(0, 3, 1, 2), np.repeat(grey, 3, -1)),
        "NHW": (grey[..., 0], np.repeat(grey, 3, -1)),
        "uint8": ((PICTURES * 255).astype(np.uint8), (PICTURES * 255).astype(np.uint8) / 255),
    }[layout]
    figure = plot_maps(given, maps, components=0)
    assert relative(pictures_of(figure)[0].get_array(), expected[0].astype(np.float32)) == 0


@pytest.mark.slow
def test_several_networks_and_heads_are_told_apart(problem, maps):
    cnn = ClosedFormGradCAM(problem.backbone, [problem.target_layer]).explain(problem.x)
    classes = ["one", "two", "three"]
    groups = {"Grad-CAM": cnn, "RBF": maps, "other": maps}
    figure = plot_maps(PICTURES, groups, classes=classes, components=1, size=(40, 10))
    best = problem.backbone(problem.x).argmax(1)
    assert f"{classes[best[0]]}: {written(cnn.values[0, 0])}" in texts_of(figure)
    # The title of a group begins where its first column does, above the heading of that.
    place = {text.get_text(): text.get_position() for text in reversed(figure.texts)}
    for title, first in (("Grad-CAM", "class score"), ("RBF", "predicted class")):
        assert place[title][0] == place[first][0]
        assert place[title][1] > place[first][1]
    assert place["other"][0] > place["RBF"][0]
    # Names that fit one of them are not taken for the classes of another.
    two = copy.copy(maps)
    object.__setattr__(two, "output", torch.randn(3, 2))
    object.__setattr__(two, "targets", [SimpleTarget(0)] * len(maps.targets))
    texts = texts_of(plot_maps(PICTURES, {"a": maps, "b": two}, classes=classes, components=0))
    assert any(text.startswith("class 0: ") for text in texts)


class SimpleTarget:
    """A target of somebody's own with a category, as the host's."""

    def __init__(self, category):
        self.category = category

    def __call__(self, row):
        return row[self.category]


@pytest.fixture(scope="module")
def wide():
    """Maps of 12 components, the fourth the strongest, and a decision, of one image, as from a file."""
    maps = explained(Problem(seed=1, n=1, components=4), None)
    wide = copy.copy(maps)
    raw = torch.cat([maps.maps[:, :1]] * 12 + [maps.maps[:, -1:]], 1)
    raw = raw * torch.tensor([1, 2, 1, 4, 1, 1, 1, 1, 1, 1, 1, 3, 9], dtype=torch.float64)[:, None, None]
    changes = {
        "maps": raw,
        "nu": raw.abs().amax((2, 3)),
        "output": maps.output.margins,
        "targets": [*map(PCATarget, range(12)), SVMTarget()],
    }
    for name in ("values", "log_scale"):
        changes[name] = torch.linspace(0, 1, 13, dtype=torch.float64)[None] * (name == "values")
    for name, value in changes.items():
        object.__setattr__(wide, name, value)
    return wide


def headings(maps, **options):
    """Return what stands above the maps of a figure, and the note below, each on one line."""
    *above, note = [
        text.get_text().replace("\n", " ") for text in plot_maps(PICTURES[: len(maps)], maps, **options).texts
    ]
    return [text for text in above if text not in ("", "input")], note


def test_all_components_wrap(wide):
    figure = plot_maps(PICTURES[:1], wide, rows=["sick"], components=12)
    texts = texts_of(figure)
    assert all(f"raises\ncomponent {b + 1}" in texts for b in range(12))
    boxes = [axis.get_position() for axis in figure.axes]
    assert len({round(box.y0, 3) for box in boxes}) == 3
    assert all(box.x1 < 1 and box.y0 > 0 for box in boxes)
    assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))
    assert figure.get_figwidth() < 22
    three = plot_maps(PICTURES[:1], wide, rows=["sick"])
    assert len({round(axis.get_position().y0, 3) for axis in three.axes}) == 1
    assert three.get_figwidth() < 17  # half of it is the width of a README, where the letters are still readable
    assert all(axis.get_position().width * figure.get_figwidth() == pytest.approx(1.5) for axis in figure.axes)


def test_the_decision_comes_first_and_three_components_that_carry_most_of_it():
    problem = Problem(seed=1, n=3, components=6)
    targets = [*map(PCATarget, range(6)), SVMTarget("ant")]
    maps = ContributionCAM(problem.net, [problem.target_layer]).explain(problem.x, targets)
    shares = decision_shares(problem.net(problem.x), SVMTarget("ant"))
    pairwise = copy.deepcopy(problem.head[-1]).set_params(decision_function_shape="ovo").decision_function
    rise = maps.values[:, -1].numpy() - pairwise(np.zeros((1, 6)))[:, :2].sum(1)  # from the mean, where p = 0
    assert shares.sum(1).numpy() == pytest.approx(rise)
    strongest = shares.abs().mean(0).argsort(descending=True)[:3].tolist()
    drawn, note = headings(maps, signed=True)
    assert drawn == ["for ant", *(f"component {b + 1}" for b in strongest)]
    assert note.endswith(" 3 of 6 components are shown: those that carry most of the decision.")
    assert "components=" not in note


def test_without_a_head_the_strongest_maps_are_drawn(wide):
    drawn, note = headings(wide, signed=True)
    assert drawn == ["predicted class", "component 4", "component 12", "component 2"]
    assert note.endswith(" 3 of 12 components are shown: those with the strongest maps.")


def test_components_are_chosen_by_number_or_count(wide):
    assert headings(wide, signed=True, components=[10, 0]) == (
        ["predicted class", "component 11", "component 1"],
        "Red raises the value above the map, blue lowers it. The number beside a colour bar is the strongest colour of "
        "its map. 2 of 12 components are shown.",
    )
    assert headings(wide, components=np.array([3]))[0] == [
        "predicted class",
        "raises component 4",
        "lowers component 4",
    ]
    drawn, note = headings(wide, signed=True, components=0)
    assert drawn == ["predicted class"]
    assert note.endswith("0 of 12 components are shown.")
    drawn, note = headings(wide, signed=True, components=2)
    assert drawn[1:] == ["component 1", "component 2"]
    assert note.endswith("The first 2 of 12 components are shown.")
    drawn, note = headings(wide, signed=True, components=12)
    components = [text for text in drawn if text.startswith("component")]
    assert components == [f"component {b + 1}" for b in range(12)]
    assert "shown" not in note
    for wrong in ([12], [-1], -1, True, "all", ["0"]):
        with pytest.raises(ValueError, match="must be a count, or numbers from 0"):
            plot_maps(PICTURES[:1], wide, components=wrong)


def test_several_decisions_have_headings_of_their_own(problem):
    targets = [PCATarget(0), SVMTarget(), SVMTarget("cat"), SVMTarget("bee", versus="cat"), SVMTarget("cat", sign="-")]
    targets += [SVMTarget(versus="runner-up"), SVMTarget(versus="ant")]
    drawn, _ = headings(explained(problem, targets)[:1], signed=True, classes=["ant", "$bee", "feline"])
    assert drawn == [
        *("predicted class", "for feline", r"\$bee rather than feline", "against feline"),
        *("predicted class rather than the runner-up", "against ant", "component 1"),
    ]
    output = problem.net(problem.x)
    titles = [write_title(target, output, None) for target in (ProbabilityTarget("bee"), ProbabilityTarget())]
    assert titles == ["probability, for bee", "probability"]
    assert (
        write_title(SVMTarget(2), torch.zeros(1, 3), ["a", "b", "c"]) == "for class 2"
    )  # of a file, which has no head


def test_what_rounding_leaves_of_a_sum_is_written_as_0(problem):
    maps = ContributionCAM(problem.net, [problem.target_layer]).explain(problem.x)
    maps = dataclasses.replace(maps, values=torch.full_like(maps.values, -1e-9))
    texts = texts_of(plot_maps(PICTURES, maps))
    assert "value 0" in texts
    assert not any("e-" in text for text in texts)


def lines_in(axis):
    """Return the colours and levels of the lines in a picture, without the white around them."""
    drawn = [(to_hex(lines.get_edgecolor()[0]), lines.levels[0]) for lines in axis.collections]
    return [(colour, level) for colour, level in drawn if colour != "#ffffff"]


def test_outlines_surround_the_strongest_evidence_on_the_picture_itself(maps):
    raw = torch.zeros_like(maps.maps)
    raw[:, :, 0, 0], raw[:, :, -1, -1] = 2.0, -1.0
    raw[1, :, -1, -1] = -0.1  # is too faint
    changed = dataclasses.replace(maps, maps=raw, nu=raw.abs().amax((2, 3)))
    figure = plot_maps(PICTURES, changed, outline=True)
    axes = [axis for axis in figure.axes if axis.images]
    assert len(axes) == 3 * (1 + 3)  # one for each target, whether signed or not
    for row in range(3):
        for axis in axes[4 * row : 4 * row + 4]:
            assert relative(axis.images[0].get_array(), PICTURES[row]) == 0  # in its own colours
        assert not lines_in(axes[4 * row])
        values = (changed.positive((24, 20)) - changed.negative((24, 20)))[row, 0].numpy()
        half = [(RED, pytest.approx(values.max() / 2)), (BLUE, pytest.approx(values.min() / 2))]
        assert lines_in(axes[4 * row + 1]) == half[: 1 if row == 1 else 2]
        (line,) = [lines for lines in axes[4 * row + 1].collections if to_hex(lines.get_edgecolor()[0]) == RED]
        corner = line.get_paths()[0].vertices
        assert (corner < 10).all()  # around the first position, and not the last
    marks = [line.get_ydata()[0] for line in bars_of(figure)[0].lines]
    assert marks == [level for _, level in lines_in(axes[1])]
    assert not any(lines_in(axis) for axis in plot_maps(PICTURES, changed, signed=True).axes)
    assert "solid red raises" in figure.texts[-1].get_text().replace("\n", " ")


def test_outlines_need_the_pictures(maps):
    with pytest.raises(ValueError, match="overlay=False leaves the images out"):
        plot_maps(PICTURES, maps, outline=True, overlay=False)


def test_outlines_of_a_decision(apart):
    problem, maps = apart
    figure = plot_decision(PICTURES, maps, problem.net.head, row=1, count=2, outline=True)
    first, *others = [axis for axis in figure.axes if axis.images]
    assert not lines_in(first)
    assert all(relative(axis.images[-1].get_array(), PICTURES[1]) == 0 for axis in others)
    assert {colour for axis in others for colour, _ in lines_in(axis)} == {RED, BLUE}


def test_nothing_left_to_draw_is_refused(problem):
    maps = explained(problem, [PCATarget(0)])
    with pytest.raises(ValueError, match="leaves nothing to draw"):
        plot_maps(PICTURES, maps, components=0)


@pytest.mark.slow
def test_a_size_is_kept_and_one_without_room_refused(wide):
    small, large = (plot_maps(PICTURES[:1], wide, size=size) for size in ((7, 12), (24, 8)))
    assert small.get_size_inches().tolist() == [7, 12]
    assert large.get_size_inches().tolist() == [24, 8]
    for figure in (small, large):
        assert all(axis.get_position().y0 > 0 and axis.get_position().x1 < 1 for axis in figure.axes)
    with pytest.raises(ValueError, match="give a larger size"):
        plot_maps(PICTURES[:1], wide, size=(3, 2))


def test_classes_of_another_number_are_refused(maps):
    with pytest.raises(ValueError, match="2 names for 3 classes"):
        plot_maps(PICTURES, maps, classes=["benign", "malignant"])


def test_maps_of_volumes_are_refused_with_a_way_out(maps):
    volumes = copy.copy(maps)
    object.__setattr__(volumes, "maps", maps.maps.unsqueeze(2))
    with pytest.raises(ValueError, match="choose one of the 1 slices"):
        plot_maps(PICTURES, volumes)


@pytest.mark.parametrize("given", ["pca", "pipeline", "eigenvalues"])
def test_contribution_ratios(problem, given):
    pca = PCA(5).fit(RNG.normal(size=(30, 5)) * [5, 4, 3, 2, 1])
    source = {"pca": pca, "pipeline": problem.head, "eigenvalues": pca.explained_variance_}[given]
    expected = 100 * (problem.head[1] if given == "pipeline" else pca).explained_variance_ratio_
    figure = plot_contribution_ratios(source, highlight=1)
    axis = figure.axes[0]
    assert relative([bar.get_height() for bar in axis.patches], expected) < 1e-12
    colours = [to_hex(bar.get_facecolor()) for bar in axis.patches]
    assert colours[1] != colours[0]
    assert set(colours[1:]) == {colours[1]}
    assert f"first 1: {expected[0]:.1f} %" in axis.get_title()
    with pytest.raises(ValueError, match="expected a fitted PCA"):
        plot_contribution_ratios(PCA(3))


@pytest.mark.parametrize("dims", [(0, 1), (1, 2, 3)])
def test_feature_space(dims):
    train, test = RNG.normal(size=(60, 4)), 2 * RNG.normal(size=(20, 4))
    labels = np.array(["ant", "bee", "cat"])
    figure = plot_feature_space(train, labels[np.arange(60) % 3], test=(test, labels[np.arange(20) % 3]), dims=dims)
    assert len(figure.axes) == 2
    markers = []
    for axis, points in zip(figure.axes, (train, test), strict=True):
        assert [c.get_label() for c in axis.collections] == ["ant", "bee", "cat"]
        first = axis.collections[0]
        drawn = np.stack(first._offsets3d, 1) if len(dims) == 3 else first.get_offsets()
        assert relative(np.asarray(drawn), points[::3][:, list(dims)]) < 1e-12
        markers = [tuple(c.get_paths()[0].vertices.ravel()) for c in axis.collections]
        assert axis.get_xlabel() == f"$p_{{{dims[0] + 1}}}$"
    assert len(set(markers)) == 3
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert figure.axes[0].get_xlim()[1] > max(train[:, dims[0]].max(), test[:, dims[0]].max())


def test_feature_space_on_an_axis_of_ones_own():
    axis = Figure().subplots()
    train, labels = RNG.normal(size=(9, 4)), np.arange(9) % 2
    assert plot_feature_space(train, labels, dims=(0, 1), classes=["no", "yes"], ax=axis) is axis.figure
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["no", "yes"]
    with pytest.raises(ValueError, match="leave out test or ax"):
        plot_feature_space(train, labels, test=(train, labels), dims=(0, 1), ax=axis)
    with pytest.raises(ValueError, match=r"expected \(R, B\)"):
        plot_feature_space(train, labels[:3], dims=(0, 1))
    with pytest.raises(ValueError, match="two or three"):
        plot_feature_space(train, labels, dims=(0,))


def test_effect_of_a_support_vector():
    gammas = (0.5, 2.0)
    axis = plot_support_vector_effect(gammas).axes[0]
    curves, marks = axis.lines[::2], axis.lines[1::2]
    for gamma, curve, mark in zip(gammas, curves, marks, strict=True):
        d, effect = (np.asarray(data) for data in curve.get_data())
        assert relative(effect, 2 * gamma * d * np.exp(-gamma * d**2)) < 1e-12
        (best,), (height,) = mark.get_data()
        assert best == pytest.approx(1 / np.sqrt(2 * gamma))
        assert height == pytest.approx(np.sqrt(2 * gamma) * np.exp(-0.5))
        assert effect.max() <= height
    with pytest.raises(ValueError, match="positive"):
        plot_support_vector_effect((0.0,))


def test_support_vectors_are_shown_strongest_first(problem):
    training = RNG.random((60, 8, 8, 3))
    names = [f"image {i}" for i in range(60)]
    with torch.no_grad():
        output = problem.net(problem.x)
    effect = output.head.support_vector_effect(output.components, "ant")
    figure = plot_support_vectors(effect, training, row=2, count=3, image=PICTURES[2], names=names)
    signed = effect.signed[2, 0].numpy()
    titled = [axis for axis in figure.axes if "image" in axis.get_title()]
    for axes, order in ((titled[:3], np.argsort(-signed)), (titled[3:], np.argsort(signed))):
        for axis, i in zip(axes, order[:3], strict=True):
            position = int(effect.indices[i])
            value = f"{signed[i]:+.2g}".replace("-", "\N{MINUS SIGN}")
            assert axis.get_title() == f"image {position}\n{value}"
            assert relative(axis.images[0].get_array(), training[position].astype(np.float32)) == 0
    assert figure.axes[0].get_title() == "explained"
    with pytest.raises(ValueError, match="counted from 0"):
        plot_support_vectors(effect, training, decision=1)
    with pytest.raises(ValueError, match="give the images that the head was fitted on"):
        plot_support_vectors(effect, training[:1])


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_the_layers_of_the_path_diagram_multiply_to_the_closed_form(activation):
    problem = Problem(activation, n=1, components=2)
    levels = _dense_stages(problem.net, problem.target_layer, problem.x)
    assert [level.shape[1] for level in levels[1:]] == [12, 9, problem.components]
    product = torch.eye(problem.components, dtype=torch.float64)
    for before, after in reversed(list(itertools.pairwise(levels))):
        product = product @ torch.stack([_gradients(value, [before])[0] for value in after[0]])
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).jacobians(problem.x).components[0]
    assert relative(product.unflatten(1, (5, 16)).transpose(0, 1), expected) < 1e-10


def test_paths_are_red_where_they_raise_and_wide_where_they_are_strong(problem):
    figure = plot_jacobian(problem.net, problem.target_layer, problem.x[0], channel=2)
    axis = figure.axes[0]
    levels = _dense_stages(problem.net, problem.target_layer, problem.x[:1])
    last = torch.stack([_gradients(value, [levels[-2]])[0] for value in levels[-1][0]]).numpy()
    lines = [line for line in axis.lines if line.get_xdata()[0] == 2]
    assert len(lines) == last.size
    strength = np.sort(np.abs(last), axis=None) / np.abs(last).max()
    assert relative(np.array([line.get_linewidth() for line in lines]), 3 * strength) < 1e-12
    red = sum(to_hex(line.get_color()) == RED for line in lines)
    assert red == (last > 0).sum()
    texts = [text.get_text() for text in axis.texts]
    assert "feature map 2\n16 pixels" in texts
    assert [t for t in texts if t.startswith("$p_")] == [f"$p_{{{b + 1}}}$" for b in range(problem.components)]


def test_the_path_diagram_of_a_volume_shows_its_strongest_slice():
    torch.manual_seed(0)
    layers = (nn.Conv3d(1, 2, 3, padding=1), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(2 * 3 * 4 * 4, 6), nn.ReLU())
    backbone = nn.Sequential(*layers).double().eval()
    volumes = torch.randn(20, 1, 6, 8, 8, dtype=torch.float64)
    features = backbone(volumes).detach().numpy()
    head = make_pipeline(PCA(2), SVC()).fit(features, np.arange(20) % 2)
    net = PCASVMNet(backbone, head).eval()
    figures = [plot_jacobian(net, backbone[1], image, channel=1) for image in (volumes[0], volumes[:1])]
    jacobian = torch.autograd.functional.jacobian(backbone[2:], backbone[:2](volumes[:1]))[0, :, 0, 1]  # (6, D, H, W)
    best = int(jacobian.abs().sum((0, 2, 3)).argmax())
    for figure in figures:
        inset = figure.axes[0].child_axes[0]
        assert inset.get_title() == f"slice {best + 1} of 3"
        assert relative(inset.images[0].get_array(), backbone[:2](volumes[:1])[0, 1, best].detach().numpy()) < 1e-12
        assert "feature map 1\n48 voxels" in [text.get_text() for text in figure.axes[0].texts]


def test_the_path_diagram_leaves_the_network_as_it_was(problem):
    net = PCASVMNet(copy.deepcopy(problem.backbone).train().requires_grad_(False), problem.head, layer="classifier.4")
    plot_jacobian(net, net.backbone.features[-1], problem.x[0])
    assert net.backbone.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    with pytest.raises(ValueError, match="numbered from 0"):
        plot_jacobian(net, net.backbone.features[-1], problem.x[0], channel=9)
    with pytest.raises(ValueError, match="one image is drawn"):
        plot_jacobian(net, net.backbone.features[-1], problem.x[:2])
    with pytest.raises(ValueError, match="choose a convolutional layer"):
        plot_jacobian(net, net.backbone.flatten, problem.x[0])
    with pytest.raises(ValueError, match=r"is not run .* before classifier.4"):
        plot_jacobian(net, net.backbone.classifier[5], problem.x[0])
    svm = SVC().fit(np.random.default_rng(0).normal(size=(20, 9)), np.arange(20) % 2)
    without = PCASVMNet(net.backbone, svm, layer="classifier.4")
    with pytest.raises(ValueError, match="needs one with a PCA"):
        plot_jacobian(without, net.backbone.features[-1], problem.x[0])


def test_figures_need_no_window_and_show_in_a_notebook(maps):
    figure = plot_maps(PICTURES, maps, components=1)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in mpl.__dict__ or not mpl.pyplot.get_fignums()


def test_one_class_of_target_only(problem):
    maps = explained(problem, [SVMTarget("ant", versus="bee"), PCATarget(0, sign="-")])
    texts = texts_of(plot_maps(PICTURES, {"pair": maps}))
    assert f"ant / bee: {written(maps.values[0, 0])}" in texts
    assert "ant rather than\nbee" in texts
    assert "raises minus\ncomponent 1" in texts


def captions(maps, classes=None):
    return [caption(maps, k, 0, classes) for k in range(len(maps.targets))]


def tumour_score(row):
    return row[1]


def test_headings_say_what_every_target_is(problem):
    output = problem.net(problem.x)
    targets = [PCATarget(0), SVMTarget(), SVMTarget("ant", versus="bee"), ProbabilityTarget("ant")]
    targets += [ClassifierOutputTarget(1), tumour_score, lambda row: row[0], SimpleTarget(0)]
    targets += [HotellingTarget(), HotellingTarget("-"), ResidualTarget(), ResidualTarget("-")]
    assert [heading(target, output) for target in targets] == [
        *("$P_{1}$", "margin", "decision", "probability"),
        *("class score", "tumour_score", "custom target", "SimpleTarget"),
        *("$T^2$", "$-T^2$", "$Q$", "$-Q$"),
    ]


def test_captions_say_for_and_against_whom():
    problem = Problem(classes=2, n=1)
    problem.head[-1].classes_ = np.array([-1, 1])
    net = PCASVMNet(problem.backbone, problem.head, layer="classifier.4").eval()
    targets = [
        SVMTarget(-1),
        SVMTarget(1, sign="-"),
        SVMTarget(1, versus=-1),
        SVMTarget(versus="runner-up"),
        PCATarget(1, sign="-"),
        lambda row: row[1],
    ]
    maps = ClosedFormGradCAM(net, [problem.target_layer]).explain(problem.x, targets)
    values = [number(float(value)) for value in maps.values[0]]
    predicted = "malignant" if net.predict(problem.x)[0] == 1 else "benign"
    assert captions(maps, ["benign", "malignant"]) == [
        f"benign: {values[0]}",
        f"against malignant: {values[1]}",
        f"malignant / benign: {values[2]}",
        f"{predicted} / runner-up: {values[3]}",
        f"value {values[4]}",
        f"value {values[5]}",
    ]
    assert captions(maps)[:2] == [f"class -1: {values[0]}", f"against class 1: {values[1]}"]


def test_maps_that_were_loaded_are_drawn_without_their_head(problem, tmp_path):
    targets = [PCATarget(1), SVMTarget("ant", versus="bee"), SVMTarget(), tumour_score]
    explained(problem, targets).save(tmp_path / "maps.safetensors")
    maps = SignedMaps.load(tmp_path / "maps.safetensors")
    values = [written(value) for value in maps.values[0]]
    assert captions(maps) == [
        f"value {values[0]}",
        f"ant / bee: {values[1]}",
        f"value {values[2]}",
        f"value {values[3]}",
    ]
    texts = texts_of(plot_maps(PICTURES, maps))
    assert {"ant rather than\nbee", "predicted class"} < set(texts)
    assert any("tumour_score" in text.replace("\n", "") for text in texts)


def test_classes_of_an_output_with_logits_are_named(problem, maps):
    changed = copy.copy(maps)
    object.__setattr__(changed, "targets", [ClassifierOutputTarget(2)] * 3)
    object.__setattr__(changed, "output", SimpleNamespace(logits=torch.randn(3, 3)))
    assert captions(changed, ["a", "b", "c"])[0] == f"c: {written(maps.values[0, 0])}"
    object.__setattr__(changed, "output", [torch.randn(3, 3)] * 2)
    assert captions(changed, ["a", "b", "c"])[0] == f"value {written(maps.values[0, 0])}"


def test_colours_come_again_with_other_markers():
    axis = Figure().subplots()
    labels = np.arange(24) % 12
    plot_feature_space(RNG.normal(size=(24, 2)), labels, dims=(0, 1), classes=[f"c{i}" for i in range(12)], ax=axis)
    looks = {(to_hex(c.get_facecolor()[0]), tuple(c.get_paths()[0].vertices.ravel())) for c in axis.collections}
    assert len(looks) == 12
    assert [c.get_label() for c in axis.collections][10] == "c10"
    axis = Figure().subplots()
    plot_feature_space(RNG.normal(size=(6, 2)), np.arange(6) % 2 + 1, dims=(0, 1), classes=["a", "b", "c"], ax=axis)
    assert [c.get_label() for c in axis.collections] == ["b", "c"]


def test_half_precision_and_row_titles_that_are_numbers(problem, maps):
    figure = plot_maps(torch.tensor(PICTURES).bfloat16(), maps, rows=[3, 1, 4], components=0)
    assert [axis.get_ylabel() for axis in figure.axes if axis.get_ylabel()] == ["3", "1", "4"]
    half = PCASVMNet(copy.deepcopy(problem.backbone).bfloat16(), problem.head, layer="classifier.4").eval()
    plot_jacobian(half, half.backbone.features[-1], problem.x[0].bfloat16())


def test_long_row_titles_stay_beside_their_picture(maps):
    names = ["ILSVRC2012_val_00000293.JPEG", "cat.10234.jpg", "a dog of no great size"]
    figure = plot_maps(np.random.default_rng(0).random((3, 20, 40, 3)), maps, rows=names, components=0)
    axes = [axis for axis in figure.axes if axis.get_ylabel()]
    assert ["".join(axis.get_ylabel().split()) for axis in axes] == ["".join(name.split()) for name in names]
    FigureCanvasAgg(figure).draw()  # which puts labels where they belong
    boxes = [axis.yaxis.label.get_window_extent() for axis in axes]
    for upper, lower in itertools.pairwise(boxes):
        assert upper.y0 > lower.y1
    assert all(box.x0 >= 0 for box in boxes)


def test_dollars_are_no_mathematics(problem, maps):
    name = "$5_$ a_$b"
    for figure in (
        plot_maps(PICTURES, maps, rows=[name] * 3, classes=[name, "$x$", "y"], components=1),
        plot_feature_space(np.eye(30, 2), np.arange(30) % 3, classes=[name, "$x$", "y"]),
    ):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # where matplotlib would find mathematics, and not understand it
        texts = [text.get_text() for text in figure.findobj(Text)]
        assert any(r"\$x\$" in text or r"\$5_\$" in text for text in texts)


def by_method(problem, x=None, targets=None):
    x = problem.x if x is None else x
    methods = {"Grad-CAM": ClosedFormGradCAM, "LayerCAM": ClosedFormLayerCAM, "contributions": ContributionCAM}
    return {name: cam(problem.net, [problem.target_layer]).explain(x, targets) for name, cam in methods.items()}


def bars_of(figure):
    return [axis.child_axes[0] for axis in figure.axes if axis.child_axes]


@pytest.mark.slow
def test_methods_stand_below_each_other_each_on_its_own_scale(problem):
    groups = by_method(problem)
    figure = plot_maps(PICTURES, groups, overlay=False)
    texts = texts_of(figure)
    assert texts.count("raises\ncomponent 1") == texts.count("predicted class") == texts.count("input") == 1
    assert all(texts.count(name) == 3 for name in groups)
    columns = 2 * problem.components + 1
    axes = [axis for axis in figure.axes if axis.images]
    inputs, of_maps = axes[:: 3 * columns + 1], [a for i, a in enumerate(axes) if i % (3 * columns + 1)]
    assert [relative(a.images[0].get_array(), p) for a, p in zip(inputs, PICTURES, strict=True)] == [0, 0, 0]
    lines = [of_maps[i : i + columns] for i in range(0, len(of_maps), columns)]
    lefts = np.array([[axis.get_position().x0 for axis in line] for line in lines])
    assert np.ptp(lefts, 0).max() < 1e-12
    for line, (n, made) in zip(lines, itertools.product(range(3), groups.values()), strict=True):
        for b in range(problem.components):
            for axis, part in zip(line[2 * b + 1 : 2 * b + 3], (made.positive, made.negative), strict=True):
                expected = part((24, 20))[n, b].numpy()
                assert np.abs(np.asarray(axis.images[0].get_array()) - expected).max() < 1e-12
    assert groups["LayerCAM"].opposite is not None
    ends = iter([bar.get_yticklabels()[1].get_text() for bar in bars_of(figure)])
    for n, made in itertools.product(range(3), groups.values()):
        next(ends)  # of the decision
        assert next(ends) == written(made.nu[n, 0])
        list(itertools.islice(ends, problem.components - 1))
    sentence = "Value at the start + everything on the map = the value above it: contributions."
    assert any(sentence in text.replace("\n", " ") for text in texts)


@pytest.mark.slow
def test_methods_that_wrap_have_headings_in_every_line(problem):
    figure = plot_maps(PICTURES, by_method(problem), size=(9, 60))
    assert texts_of(figure).count("predicted class") == 3 * 3
    assert texts_of(figure).count("input") == 3
    assert all(axis.get_position().x1 < 1 for axis in figure.axes)


@pytest.mark.slow
def test_maps_of_other_targets_or_images_are_not_compared(problem):
    groups = by_method(problem)
    one = {"all": groups["Grad-CAM"], "one": groups["contributions"][:, -1]}
    assert texts_of(plot_maps(PICTURES, one)).count("all") == 1  # side by side
    with pytest.raises(ValueError, match="'all' and 'one' have different targets"):
        plot_maps(PICTURES, one, compare=True)
    flipped = {**groups, "other": by_method(problem, problem.x.flip(0))["Grad-CAM"]}
    with pytest.raises(ValueError, match="'Grad-CAM' and 'other' are of different images"):
        plot_maps(PICTURES, flipped)
    flipped = {name: flipped[name][:, [0, 2]] for name in ("Grad-CAM", "other")}
    assert texts_of(plot_maps(PICTURES, flipped, compare=False)).count("predicted class") == 2
    decisions = {name: made[:, -1] for name, made in groups.items()}
    place = {text.get_text(): text.get_position() for text in plot_maps(PICTURES, decisions).texts}
    assert place["Grad-CAM"][1] == place["LayerCAM"][1]  # of one target each, side by side


def test_a_map_whose_opposite_is_not_blank_has_evidence_of_the_other_sign(problem):
    maps = by_method(problem)["LayerCAM"][:, -1]
    changed = copy.copy(maps)
    object.__setattr__(changed, "maps", torch.zeros_like(maps.maps))
    texts = texts_of(plot_maps(PICTURES, changed))
    assert "all evidence\nhas the\nother sign" in texts
    assert "blank:\nall zero" not in texts


@pytest.fixture(scope="module")
def apart():
    """A problem with six components, and their contributions."""
    problem = Problem(seed=1, n=3, components=6)
    return problem, ContributionCAM(problem.net, [problem.target_layer]).explain(problem.x)


def decision_steps(figure):
    """Return the axis with steps, and its bars' bottoms and heights."""
    axis = next(axis for axis in figure.axes if axis.patches)
    return axis, [bar.get_y() for bar in axis.patches], [bar.get_height() for bar in axis.patches]


def test_the_steps_of_a_decision_add_up_to_its_margin(apart):
    problem, maps = apart
    figure = plot_decision(PICTURES, maps, problem.net.head, row=1, count=3)
    axis, bottoms, heights = decision_steps(figure)
    whole = recombined(maps, problem.net.head)
    value, start = float(whole.values[1]), float(whole.baseline_values[1])
    assert heights[0] == pytest.approx(start)
    assert heights[-1] == pytest.approx(value)
    assert sum(heights[:-1]) == pytest.approx(value)
    ends = np.cumsum(heights[:-1])
    assert bottoms[1:-1] == pytest.approx(ends[:-1])
    # Each is g_b (p_b - p0_b): what the decision loses where the component alone stays out of the sum.
    parts = []
    for b in range(6):
        without = copy.copy(maps)
        raw = maps.maps.clone()
        raw[:, b] = 0
        object.__setattr__(without, "maps", raw)
        parts.append(float((whole.maps - recombined(without, problem.net.head).maps)[1].sum()))
    order = np.argsort(-np.abs(parts))
    assert heights[1:4] == pytest.approx([parts[b] for b in order[:3]])
    assert heights[4] == pytest.approx(sum(parts[b] for b in order[3:]))
    labels = [label.get_text() for label in axis.get_xticklabels()]
    assert labels[0] == "start"
    assert [label.replace("\n", " ") for label in labels[4:]] == [
        "3 others",
        f"predicted class, {problem.net.predict(problem.x)[1]}",
    ]  # which one it is
    assert f"component {order[0] + 1}" in texts_of(figure)
    colours = [to_hex(bar.get_facecolor()) for bar in axis.patches]
    assert colours[1:5] == [RED if height > 0 else BLUE for height in heights[1:5]]


def test_the_maps_of_a_decision_add_up_on_one_scale(apart):
    problem, maps = apart
    target = SVMTarget("ant", versus="bee")
    pictures = np.stack([PICTURES[0, :4, :4]] * 3)  # at the resolution of the maps
    figure = plot_decision(pictures, maps, problem.net.head, target, row=2, count=4)
    drawn = [axis.images[-1].get_array() for axis in figure.axes if axis.images]
    assert len(drawn) == 1 + 5 + 1
    assert np.abs(np.sum(drawn[1:-1], 0) - drawn[-1]).max() < 1e-12
    top = np.abs(np.stack(drawn[1:])).max()
    assert top == pytest.approx(1)
    expected = recombined(maps, problem.net.head, target).maps[2, 0].numpy()
    scale = np.abs(expected).max() / np.abs(drawn[-1]).max()
    assert relative(drawn[-1] * scale, expected) < 1e-12
    assert bars_of(figure)[0].get_yticklabels()[1].get_text() == written(scale)
    (sentence,) = [text for text in texts_of(figure) if " at the start " in text and " = " in text]
    end, start, sign, rise = re.match(r"(\S+) = (\S+) at the start (.) (\S+) from", sentence).groups()
    numbers = [float(text.replace("\N{MINUS SIGN}", "-")) for text in (end, start, sign + rise)]
    assert numbers[0] == pytest.approx(numbers[1] + numbers[2], abs=0.02 * abs(numbers[2]))
    assert "ant rather than bee" in texts_of(figure)


@pytest.mark.slow
def test_a_decision_of_another_head_and_without_others(apart):
    _, maps = apart
    p = RNG.normal(size=(40, 6))
    svm = SVC(kernel="linear").fit(p, p[:, 0] > 0)
    for count in (5, 6, 20):  # a single other one is drawn itself
        figure = plot_decision(PICTURES, maps, svm, count=count, classes=["low", "high"])
        _, _, heights = decision_steps(figure)
        assert len(heights) == 1 + 6 + 1
        assert sum(heights[:-1]) == pytest.approx(heights[-1])
    assert {"predicted class, low", "predicted class, high"} & set(texts_of(figure))


@pytest.fixture(scope="module")
def of_tokens():
    """A head on the class token of a tower with registers, and contributions at its first block."""
    torch.manual_seed(0)
    backbone = Tower(before=3).double().eval()
    x = torch.randn(12, 3, 24, 16, dtype=torch.float64)
    features, _ = extract_features(backbone, [x], pool="cls", progress=False)
    head = make_pipeline(StandardScaler(), PCA(6), SVC()).fit(features, np.arange(12) % 2)
    net = PCASVMNet(backbone, head, pool="cls").eval()
    return net, ContributionCAM(net, ["blocks.0"], "tokens").explain(x[:3])


def as_number(text):
    return float(text.replace("\N{MINUS SIGN}", "-"))


@pytest.mark.slow
def test_what_tokens_of_no_patch_give_to_a_decision_stands_below_its_steps(of_tokens):
    net, maps = of_tokens
    figure = plot_decision(PICTURES, maps, net.head, row=1, count=3)
    axis, _, heights = decision_steps(figure)
    found = [re.search(r"\nmap (\S+)\ntokens (\S+)$", label.get_text()) for label in axis.get_xticklabels()]
    parts = np.array([[as_number(part) for part in match.groups()] for match in found if match])
    whole = recombined(maps, net.head)
    rise = float(whole.values[1] - whole.baseline_values[1])
    assert parts.sum(1) == pytest.approx([*heights[1:-1], rise], abs=0.011)
    assert parts[-1] == pytest.approx([float(whole.maps[1].sum()), float(whole.remainder[1, 0])], abs=6e-3)
    assert parts[:-1].sum(0) == pytest.approx(parts[-1], abs=0.03)
    assert np.abs(parts[:, 1]).max() > 0.1
    texts = [text.replace("\n", " ") for text in texts_of(figure)]
    assert any("the map above it plus the remainder (class tokens, other inputs)" in text for text in texts)
    texts = [text.replace("\n", " ") for text in texts_of(plot_maps(PICTURES, maps))]
    assert any(
        "everything on the map + remainder (class tokens, other inputs) = the value above it." in text for text in texts
    )
    # Of a network without such tokens nothing is said of them.
    without = dataclasses.replace(maps, remainder=torch.full_like(maps.remainder, 1e-9))
    texts = [text.replace("\n", " ") for text in texts_of(plot_decision(PICTURES, without, net.head))]
    assert any(text.endswith("Each is the sum of the map above it.") for text in texts)
    assert not any("tokens" in text for text in texts)


@pytest.mark.parametrize("scale", [1e-8, *(pytest.param(scale, marks=pytest.mark.slow) for scale in (1, 1e-3, 1e-20))])
def test_the_numbers_beside_a_scale_are_not_cut_off(of_tokens, many, scale):
    net, maps = of_tokens
    small = dataclasses.replace(maps, maps=maps.maps * scale)
    problem, _ = many

    class Small(ContributionCAM):
        def explain(self, *given, **options):
            maps = super().explain(*given, **options)
            return dataclasses.replace(maps, maps=maps.maps * scale, nu=maps.nu * scale)

    cam = Small(problem.net, [problem.target_layer])
    figures = plot_decision(PICTURES, small, net.head), plot_component(problem.net, 0, problem.x, cam=cam)
    for figure in figures:
        for bar in bars_of(figure):
            for label in bar.get_yticklabels():
                assert label.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, (9, 6), (14, 5)])
def test_nothing_is_cut_off_or_written_over(apart, many, size):
    problem, maps = apart
    of_many = {"target_layer": "features.3", "labels": np.arange(30) // 2, "size": size}
    decision = plot_decision(PICTURES, maps, problem.net.head, size=size)
    for figure in (decision, plot_component(many[0].net, 0, many[0].x, **of_many)):
        FigureCanvasAgg(figure).draw()
        assert size is None or figure.get_size_inches().tolist() == list(size)
        boxes = [part.get_tightbbox() for part in (*figure.axes, *figure.texts)]
        assert all(box.x0 >= 0 and box.y0 >= 0 for box in boxes)
        assert all(box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
        pictures = [axis for axis in figure.axes if axis.images]
        titles = [axis.title.get_window_extent() for axis in pictures if axis.get_title()]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(titles, 2))
        extents = [axis.get_window_extent() for axis in figure.axes]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(extents, 2))
    bars, _, _ = decision_steps(decision)
    for column, axis in enumerate(axis for axis in decision.axes if axis.images):
        box = axis.get_window_extent()
        assert bars.transData.transform((column, 0))[0] == pytest.approx((box.x0 + box.x1) / 2)


def test_long_names_of_classes_are_not_cut_off():
    classes = ["a class with a rather long name", "b"]
    figure = plot_feature_space(np.eye(30, 2), np.arange(30) % 2, classes=classes, size=(6, 4))
    FigureCanvasAgg(figure).draw()
    assert figure.axes[0].get_legend().get_window_extent().x1 <= figure.bbox.x1


def test_what_cannot_be_taken_apart_is_refused(apart):
    problem, contributions = apart
    head = problem.net.head
    with pytest.raises(ValueError, match="give those of ContributionCAM"):
        plot_decision(PICTURES, explained(problem, None), head)
    with pytest.raises(ValueError, match="2 images for maps of shape"):
        plot_decision(PICTURES[:2], contributions, head)
    for wrong in ({"row": 3}, {"row": -1}, {"count": 0}):
        with pytest.raises(ValueError, match="there are 3 images, counted from 0"):
            plot_decision(PICTURES, contributions, head, **wrong)
    with pytest.raises(ValueError, match="2 names for 3 classes"):
        plot_decision(PICTURES, contributions, head, classes=["a", "b"])
    with pytest.raises(TypeError, match="expected the SignedMaps"):
        plot_decision(PICTURES, contributions.maps, head)
    rows = np.random.default_rng(0).normal(size=(20, 6))
    logistic = LogisticRegression().fit(rows, rows[:, 0] > 0)  # its probability is no straight line
    with pytest.raises(ValueError, match="no map adds up to it"):
        plot_decision(PICTURES, contributions, logistic, ProbabilityTarget(True))


def test_the_decision_that_is_drawn_by_default_may_be_against_a_normal_class(apart):
    problem, contributions = apart
    head = problem.net.head
    labels = head.classes_.tolist()
    for normal in labels:
        usual, named = (
            plot_decision(PICTURES, contributions, head, *target, **options)
            for target, options in (((), {"normal": normal}), ((SVMTarget(versus=normal),), {}))
        )
        texts = [[text.get_text() for text in figure.findobj(Text)] for figure in (usual, named)]
        assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="is not a class"):
        plot_decision(PICTURES, contributions, head, normal="good")


@pytest.fixture(scope="module")
def many():
    """A problem with 30 images in [0, 1], and its components."""
    problem = Problem(seed=1, n=30, components=3)
    low, high = problem.x.min(), problem.x.max()
    object.__setattr__(problem, "x", (problem.x - low) / (high - low))
    with torch.no_grad():
        return problem, problem.net(problem.x).components.numpy()


def strip_of(figure):
    return next(axis for axis in figure.axes if axis.get_xlabel().startswith("$p_"))


def test_a_component_is_shown_by_its_two_ends(many):
    problem, p = many
    labels = np.arange(30) % 2
    given = {"target_layer": problem.target_layer, "labels": labels, "classes": ["even", "odd"], "batch_size": 7}
    figure = plot_component(problem.net, 1, problem.x, count=2, end=5, **given)
    order = np.argsort(p[:, 1])
    shown = [order[0], order[1], order[-2], order[-1]]
    titled = [axis for axis in figure.axes if axis.get_title()]
    expected = [f"{['even', 'odd'][row % 2]}\n{number(p[row, 1])}" for row in shown]
    expected[2:2] = ["mean of the\n5 lowest", "mean of the\n5 highest"]
    assert sorted(axis.get_title() for axis in titled) == sorted(expected)
    titled.sort(key=lambda axis: axis.get_position().x0)
    assert [axis.get_title() for axis in titled] == expected
    pictures = problem.x.permute(0, 2, 3, 1).numpy().astype(np.float32)
    rows = [shown[0], shown[1], order[:5], order[-5:], shown[2], shown[3]]
    for axis, row in zip(titled, rows, strict=True):
        mean = pictures[row].mean(0) if np.ndim(row) else pictures[row]
        assert relative(axis.images[0].get_array(), mean) < 1e-6
    maps = ContributionCAM(problem.net, [problem.target_layer]).explain(problem.x, [PCATarget(1)])
    ends = np.concatenate([order[:5], order[-5:]])
    raw = (maps[ends].positive((12, 12), "none") - maps[ends].negative((12, 12), "none"))[:, 0].numpy()
    below = sorted((a for a in figure.axes if a.images and not a.get_title()), key=lambda a: a.get_position().x0)
    # Each end has its own scale.
    low, high = np.stack([*raw[:2], raw[:5].mean(0)]), np.stack([raw[5:].mean(0), *raw[-2:]])
    for axis, values in zip(below, [*low / np.abs(low).max(), *high / np.abs(high).max()], strict=True):
        assert np.abs(np.asarray(axis.images[-1].get_array()) - values).max() < 1e-12
    written_ends = [bar.get_yticklabels()[1].get_text() for bar in bars_of(figure)]
    assert written_ends == [written(np.abs(end).max()) for end in (low, high)]


def test_a_faint_end_keeps_its_colours_beside_a_strong_one(many):
    problem, p = many
    x = problem.x.clone()
    x[p[:, 1].argmax()] *= 50
    pictures = problem.x
    figure = plot_component(problem.net, 1, x, target_layer=problem.target_layer, pictures=pictures, count=2)
    below = [axis for axis in figure.axes if axis.images and not axis.get_title()]
    below.sort(key=lambda axis: axis.get_position().x0)
    for side in (below[:3], below[3:]):
        assert max(np.abs(axis.images[-1].get_array()).max() for axis in side) == pytest.approx(1)


LONG = ("squamous cell carcinoma", "adenocarcinoma in situ", "benign")


def overlapping(texts):
    """Return the texts that run into another."""
    texts = [text for text in texts if text.get_text().strip() and text.get_visible()]
    boxes = [text.get_window_extent().padded(-1) for text in texts]
    return [
        (one.get_text(), other.get_text())
        for (one, box), (other, place) in itertools.combinations(zip(texts, boxes, strict=True), 2)
        if box.overlaps(place)
    ]


def drawn_texts(figure):
    FigureCanvasAgg(figure).draw()
    hidden = []  # matplotlib keeps numbers beyond the ends of an axis
    for axis in itertools.chain.from_iterable((each.xaxis, each.yaxis) for each in figure.findobj(Axes)):
        low, high = sorted(axis.get_view_interval())
        hidden += [tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
    return [
        text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible() and text not in hidden
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-7, 1, 1e9])
def test_numbers_of_any_size_are_short_and_run_into_nothing(many, scale):
    problem, _ = many
    head = copy.deepcopy(problem.head)
    head[-1]._dual_coef_ = head[-1].dual_coef_ = scale * head[-1].dual_coef_
    head[-1]._intercept_ = head[-1].intercept_ = scale * head[-1].intercept_
    net = PCASVMNet(problem.backbone, head, layer="classifier.4")
    maps = ContributionCAM(net, [problem.target_layer]).explain(problem.x)
    decision = plot_decision(problem.x, maps, net.head, SVMTarget(versus="runner-up"), count=2, classes=LONG)
    component = plot_component(net, 0, problem.x, target_layer=problem.target_layer, count=1, classes=LONG)
    for figure in (decision, component):
        texts = drawn_texts(figure)
        assert not overlapping(texts)
        assert not any(axis.get_offset_text().get_text() for each in figure.axes for axis in (each.xaxis, each.yaxis))
        inside = figure.bbox.padded(1)
        for text in texts:
            box = text.get_window_extent()
            assert inside.x0 <= box.x0
            assert box.x1 <= inside.x1
            assert inside.y0 <= box.y0
            assert box.y1 <= inside.y1
    _, _, heights = decision_steps(decision)
    assert max(map(abs, heights)) < 1e5


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (None, "part of the margin of the predicted class"),
        pytest.param(SVMTarget("bee"), "part of the margin, adenocarcinoma in situ", marks=pytest.mark.slow),
        (SVMTarget("ant", versus="cat"), "part of the decision, squamous cell carcinoma / benign"),
    ],
)
def test_bars_say_of_which_decision_they_are(many, target, words):
    problem, _ = many
    figure = plot_component(
        problem.net, 0, problem.x, target_layer=problem.target_layer, classes=LONG, target=target, count=2
    )
    labels = [axis.get_xlabel().replace("\n", " ") for axis in figure.axes if axis.patches]
    assert labels == [words]


def test_every_image_is_a_point_along_the_component(many):
    problem, p = many
    figure = plot_component(problem.net, 0, problem.x, target_layer="features.3", count=3)
    axis = strip_of(figure)
    predicted = problem.net.predict(problem.x)
    names = np.unique(predicted).tolist()
    assert [label.get_text() for label in axis.get_yticklabels()] == names
    clouds = [np.asarray(c.get_offsets()) for c in axis.collections]
    for line, (name, points, circled) in enumerate(zip(names, clouds[::2], clouds[1::2], strict=True)):
        assert points[:, 0] == pytest.approx(p[predicted == name, 0])
        assert (np.abs(points[:, 1] - line) < 0.4).all()
        order = np.argsort(p[:, 0])
        ends = {*order[:3], *order[-3:]}
        assert sorted(circled[:, 0]) == pytest.approx(sorted(p[row, 0] for row in ends if predicted[row] == name))
    # Beside it, what the component gives to the decision.
    maps = ContributionCAM(problem.net, ["features.3"]).explain(problem.x)
    without = copy.copy(maps)
    raw = maps.maps.clone()
    raw[:, 0] = 0
    object.__setattr__(without, "maps", raw)
    parts = (
        (recombined(maps, problem.net.head).maps - recombined(without, problem.net.head).maps).sum((1, 2, 3)).numpy()
    )
    bars = next(axis for axis in figure.axes if axis.patches).patches
    assert [bar.get_width() for bar in bars] == pytest.approx([parts[predicted == name].mean() for name in names])


@pytest.mark.slow
def test_parts_in_the_decision_keep_the_factor_of_a_machine_that_is_far_away(many):
    problem, _ = many
    head = copy.deepcopy(problem.head)
    # Support vectors at a distance, of which the secants are tiny: they are kept apart from their factor.
    head[-1].support_vectors_ = head[-1].support_vectors_ + 40.0
    net = PCASVMNet(problem.backbone, head, layer="classifier.4")
    maps = ContributionCAM(net, ["features.3"]).explain(problem.x)
    assert float(maps.log_scale[:, -1].max()) < -100
    figure = plot_component(net, 0, problem.x, target_layer="features.3", labels=[0] * 30)
    axis = next(axis for axis in figure.axes if axis.patches)
    (exponent,) = re.findall(r"10\^\{(-\d+)\}", axis.get_xlabel())
    assert abs(axis.patches[0].get_width()) < 10
    assert int(exponent) < -40
    _, _, heights = decision_steps(plot_decision(problem.x, maps, net.head))
    assert heights[0] == pytest.approx(heights[-1])


@pytest.mark.slow
def test_a_component_by_another_method_or_without_a_machine(many):
    problem, _ = many
    cam = ClosedFormLayerCAM(problem.net, [problem.target_layer])
    figure = plot_component(problem.net, 2, problem.x[:4], cam=cam, count=9, labels=np.arange(4))
    assert not any(axis.patches for axis in figure.axes)  # its maps do not add up
    assert sum(bool(axis.get_title()) for axis in figure.axes) == 2 + 2 + 2  # of four images, two at each end
    reduction = PCASVMNet(problem.backbone, problem.head[:-1], layer="classifier.4")
    figure = plot_component(reduction, 0, problem.x, target_layer="features.3")
    assert [label.get_text() for label in strip_of(figure).get_yticklabels()] == ["all images"]
    assert not any(axis.patches for axis in figure.axes)


@pytest.mark.slow
def test_of_many_classes_the_farthest_are_drawn(many):
    problem, p = many
    figure = plot_component(problem.net, 0, problem.x, target_layer="features.3", labels=np.arange(30) // 2)
    drawn = {int(label.get_text()) for label in strip_of(figure).get_yticklabels()}
    distance = np.abs(p[:, 0].reshape(15, 2).mean(1) - p[:, 0].mean())
    assert drawn == set(np.argsort(-distance)[:12].tolist())
    assert any("12 of 15 classes" in text.replace("\n", " ") for text in texts_of(figure))


def test_components_that_cannot_be_drawn_are_refused(many):
    problem, _ = many
    layer, net, x = {"target_layer": problem.target_layer}, problem.net, problem.x
    with pytest.raises(ValueError, match="say where to look"):
        plot_component(net, 0, x)
    with pytest.raises(ValueError, match="say where to look"):
        plot_component(net, 0, x, cam=ContributionCAM(net, ["features.3"]), **layer)
    volumes = torch.rand(4, 3, 2, 12, 12, dtype=torch.float64)
    with pytest.raises(ValueError, match="images must have shape"):
        plot_component(net, 0, x[:4], pictures=volumes, **layer)
    with pytest.raises(ValueError, match="another network"):
        plot_component(net, 0, x, cam=ContributionCAM(copy.deepcopy(net), ["features.3"]))
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="the head has 3, numbered from 0"):
            plot_component(net, wrong, x, **layer)
    with pytest.raises(ValueError, match="undo the normalisation"):
        plot_component(net, 0, x - 0.5, **layer)
    with pytest.raises(ValueError, match=r"labels of shape \(2,\) for 30 images"):
        plot_component(net, 0, x, labels=[0, 1], **layer)
    with pytest.raises(ValueError, match="give at least 2 images"):
        plot_component(net, 0, x[:1], **layer)
    with pytest.raises(ValueError, match="give at least 2 images"):
        plot_component(net, 0, x, pictures=PICTURES, **layer)
    without = PCASVMNet(problem.backbone, SVC().fit(RNG.normal(size=(20, 9)), np.arange(20) % 2), "classifier.4")
    with pytest.raises(ValueError, match="the head has no components"):
        plot_component(without, 0, x, **layer)


def test_decisions_of_several_outputs_are_named(many):
    problem, _ = many
    x = problem.x
    features, _ = extract_features(problem.backbone, [x], "classifier.4", progress=False)
    outputs = np.stack([np.arange(len(x)) % 2, np.arange(len(x)) % 3 % 2], 1)
    head = make_pipeline(PCA(2), MultiOutputClassifier(SVC())).fit(features, outputs)
    net = PCASVMNet(problem.backbone, Head.of(head, outputs=["dog", "cat"]), "classifier.4").eval()
    components = ContributionCAM(net, ["features.3"]).explain(x, [PCATarget(0), PCATarget(1)])
    for labels in (None, outputs[:, 0]):
        with pytest.raises(ValueError, match=r"has 2 outputs: say which to draw, as in target=SVMTarget\('dog'\)"):
            plot_component(net, 0, x, target_layer="features.3", labels=labels)
    with pytest.raises(ValueError, match=r"has 2 outputs: say which to draw, as in target=SVMTarget\('dog'\)"):
        plot_decision(x, components, net.head)
    told = [text.get_text() for text in plot_decision(x, components, net.head, SVMTarget("cat")).findobj(Text)]
    assert any("cat" in text for text in told)
    figure = plot_component(net, 0, x, target_layer="features.3", target=SVMTarget("cat"))
    assert any("cat" in text.get_text() for text in figure.findobj(Text))
