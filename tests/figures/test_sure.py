"""Figures of maps with standard errors: what is not sure is pale and hatched, and values have their errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from problems import Problem

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, PCATarget, SVMTarget
from pytorch_grad_cam_pcasvm.figures import plot_maps
from pytorch_grad_cam_pcasvm.studio.figures.style import draw_panel, new_figure
from pytorch_grad_cam_pcasvm.studio.pictures.answers import write_error
from pytorch_grad_cam_pcasvm.studio.pictures.panels import Panel

PHOTO = np.full((32, 32, 3), 0.5, np.float32)
LEFT = np.arange(8) < 4  # of the columns of a mask


@pytest.fixture(scope="module")
def maps():
    problem = Problem(seed=1, n=2, components=2)
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    return cam.explain(problem.x, [SVMTarget(), PCATarget(0), PCATarget(1)])


def with_errors(maps, error, values_error=0.5):
    """Return maps with the same standard error at every position, and for every value."""
    return replace(
        maps,
        error=torch.full_like(maps.maps, error),
        values_error=torch.full_like(maps.values, values_error),
        _resamples=30,
    )


def render(panel, way="overlay", signed=True):
    """Return the pixels of a panel that fills a figure of 200 x 200 pixels, in [0, 1]."""
    figure = new_figure((2, 2), "none")
    draw_panel(figure.add_axes((0, 0, 1, 1)), panel, way, signed=signed)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba(), float)[..., :3] / 255


def read(figure):
    return "\n".join(text.get_text() for text in figure.findobj(Text)).replace("\n", " ")


@pytest.mark.parametrize(("way", "signed"), [("overlay", True), ("map", True), ("overlay", False), ("map", False)])
def test_what_is_not_sure_is_pale_with_lines_and_the_rest_as_without_errors(way, signed):
    values = np.full((32, 32), 0.9, np.float32)
    plain, none = (render(Panel(PHOTO, numbers), way, signed) for numbers in (values, np.zeros_like(values)))
    drawn = render(Panel(PHOTO, values, sure=np.broadcast_to(LEFT, (8, 8))), way, signed)
    np.testing.assert_allclose(drawn[:, :94], plain[:, :94], atol=0.01)
    # How far colours are from those of a map that is 0, as a share of how far those of the map are.
    size = np.linalg.norm(drawn - none, axis=-1) / np.linalg.norm(plain - none, axis=-1)
    right = size[4:-4, 104:-4]
    lines = right > right.mean()
    assert 0.25 < lines.mean() < 0.45  # a third of the pixels
    assert np.median(right[~lines]) < 0.4
    assert 0.65 < np.median(right[lines]) < 0.9
    assert right.max() < 0.95
    # They are slanted: each row is the one above it, moved by a pixel.
    assert (lines[1:, :-1] == lines[:-1, 1:]).mean() > 0.95
    # About 20 lines across all of the picture, whatever its resolution.
    ends = (np.diff(lines[50].astype(int)) == 1).sum() / lines.shape[1] * 200
    assert 18 <= ends <= 22


@pytest.mark.parametrize("way", ["overlay", "map", "outline"])
def test_a_map_that_is_sure_everywhere_looks_as_one_without_errors(way):
    wave = np.sin(np.arange(240) / 40)
    values, photo = np.outer(wave, wave).astype(np.float32), np.full((240, 240, 3), 0.5, np.float32)
    expected, drawn = render(Panel(photo, values), way), render(Panel(photo, values, sure=np.ones((4, 4), bool)), way)
    np.testing.assert_array_equal(drawn, expected)


def test_lines_around_what_is_not_sure_are_pale_and_what_is_inside_is_hatched():
    values = np.zeros((64, 64), np.float32)
    values[16:48, 8:28] = values[16:48, 36:56] = 1.0
    photo, masks = np.ones((64, 64, 3), np.float32), (np.broadcast_to(LEFT, (8, 8)), None)
    drawn, plain = (render(Panel(photo, values, sure=sure), "outline") for sure in masks)
    redness = [picture[..., 0] - picture[..., 1] for picture in (drawn, plain)]
    inside = np.s_[70:130, 120:165]
    assert redness[1][inside].max() < 0.01
    assert 0.2 < (redness[0][inside] > 0.4).mean() < 0.5
    np.testing.assert_allclose(drawn[:, :98], plain[:, :98], atol=0.01)
    edge = np.s_[70:130, 174]  # the outer half of the line
    assert 0.25 * redness[1][edge].min() < redness[0][edge].max() < 0.6 * redness[1][edge].min()


def test_the_mask_of_a_map_keeps_its_cells_while_the_map_is_interpolated(maps):
    half = maps.maps.abs().clone()
    sure = replace(with_errors(maps, 0.0), error=torch.zeros_like(half))
    sure.error[..., half.shape[-1] // 2 :] = 1e6
    figure = plot_maps(np.full((2, 60, 60, 3), 0.5, np.float32), sure[:, :1], signed=True)
    plain = plot_maps(np.full((2, 60, 60, 3), 0.5, np.float32), maps[:, :1], signed=True)
    numbers, expected = (
        next(np.asarray(axis.images[-1].get_array()) for axis in f.axes if len(axis.images) == 2)
        for f in (figure, plain)
    )
    times = len(numbers) // 60
    expected = expected.repeat(times, 0).repeat(times, 1)
    border = -(-(half.shape[-1] // 2) * 60 // half.shape[-1]) * times
    np.testing.assert_array_equal(numbers[:, :border], expected[:, :border])
    share = numbers[:, border:] / expected[:, border:]
    assert {0.2, 0.75} == set(np.round(share[np.isfinite(share)], 4).astype(float).round(2))


def test_figures_say_the_errors_of_values_and_what_pale_means(maps):
    pictures = np.full((2, 24, 20, 3), 0.5, np.float32)
    known = replace(with_errors(maps, 1e-9), values=torch.tensor([[3.812, -0.04, 1e-9], [12.34, 140.0, 0.5]]))
    known.values_error[:, 0] = 0.93
    known.values_error[:, 2] = torch.nan  # of a component that is not stable
    text = read(plot_maps(pictures, known, signed=True))
    assert "3.8 ± 0.9" in text
    assert "12.3 ± 0.9" in text
    assert "value 0.0 ± 0.5" in text or "value \N{MINUS SIGN}0.0 ± 0.5" in text
    assert "value 0.5 (not stable)" in text
    assert "Pale and hatched: another hundred training photos might turn it around." in text
    assert "Not stable: they would make another component of it." in text
    assert "Dim and hatched: another" in read(plot_maps(pictures, known))
    assert "Pale and hatched: another" in read(plot_maps(pictures, known, outline=True))
    without = read(plot_maps(pictures, maps))
    assert "hatched" not in without
    assert "±" not in without
    assert "Not stable" not in read(plot_maps(pictures, with_errors(maps, 1.0)))


def test_negative_parts_that_are_made_anew_are_not_called_unsure(maps):
    own = replace(with_errors(maps, 1e6), opposite=-maps.maps)
    assert "hatched" not in read(plot_maps(np.full((2, 24, 20, 3), 0.5, np.float32), own, signed=True))


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (3.8123, 0.934, "3.8 ± 0.9"),
        (3.8123, 0.134, "3.81 ± 0.13"),
        (-0.01, 0.5, "0.0 ± 0.5"),
        (123.4, 45.0, "123 ± 45"),
        (0.001, 0.0004, "0.0010 ± 0.0004"),
        (1.0, 0.096, "1.0 ± 0.1"),
        (2.5e-7, 3e-8, "2.5e-07 ± 3e-08"),
        (3.0, 0.0, "3 ± 0"),
        (1.25, float("nan"), "1.25 (not stable)"),
    ],
)
def test_values_end_where_their_errors_begin(value, error, words):
    assert write_error(value, error) == words
