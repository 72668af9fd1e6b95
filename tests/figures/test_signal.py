"""The figure of signals: colours, channels, titles and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.text import Text

from pytorch_grad_cam_pcasvm import PCATarget, SignedMaps, SVMTarget, figures

SIGNALS = np.sin(np.arange(120.0)).reshape(2, 2, 30)


def maps_of(values):
    maps = torch.as_tensor(values, dtype=torch.float64)
    return SignedMaps(
        maps=maps, nu=maps.abs().amax(2), log_scale=torch.zeros(maps.shape[:2]), values=maps.sum(2),
        targets=[PCATarget(0), SVMTarget(1)][: maps.shape[1]], weights=torch.zeros(*maps.shape[:2], 1), output=None,
    )  # fmt: skip


def lines_of(figure):
    return [part for axis in figure.axes for part in axis.collections if isinstance(part, LineCollection)]


def test_lines_are_red_where_the_map_raises_and_blue_where_it_lowers():
    values = np.zeros((1, 1, 30))
    values[0, 0, 5:10], values[0, 0, 20:25] = 2.0, -2.0
    figure = figures.plot_signal(SIGNALS[:1], maps_of(values), channels=["I", "II"], interval=0.5, unit="ms")
    lines = lines_of(figure)
    assert len(lines) == 2  # channels
    for line in lines:
        red, _, blue, _ = line.get_colors().T
        assert (red[6:9] - blue[6:9] > 0.2).all()
        assert (blue[21:24] - red[21:24] > 0.2).all()
        grey = line.get_colors()[12:18, :3]
        assert np.ptp(grey, axis=1).max() < 1e-6
        assert np.allclose(np.array(line.get_segments())[:, 0, 0], 0.5 * np.arange(29))
    offset = np.array(lines[0].get_segments())[:, :, 1] - SIGNALS[0, 0, [np.arange(29), np.arange(1, 30)]].T
    assert np.ptp(offset) < 1e-12
    axis = figure.axes[0]
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["I", "II"]
    assert axis.get_xlabel() == "ms"
    assert axis.get_title(loc="left") == "component 1: value 0"


def test_maps_are_brought_to_the_length_of_signals_and_end_at_their_own_nu():
    values = np.stack([np.linspace(-1, 1, 10), 1e-5 * np.linspace(1, -1, 10)])[None].repeat(2, 0)
    lines = lines_of(figures.plot_signal(SIGNALS, maps_of(values), rows=["sinus", "$5"]))
    assert len(lines) == 2 * 2 * 2
    for number, line in enumerate(lines):
        red, _, blue, _ = line.get_colors().T
        rising = -1 if number % 4 < 2 else 1  # of each signal the decision, then the component
        assert rising * (red - blue)[-1] > 0.2 > -0.2 > rising * (red - blue)[0]


@pytest.mark.parametrize(
    ("length", "width", "columns"), [(30, 9.8, 2), (500, 11.4, 2), (1000, 10.7, 1), (9000, 14.7, 1)]
)
def test_a_figure_is_as_wide_as_its_signals_need(length, width, columns):
    signal = np.sin(np.arange(float(length)))[None, None]
    figure = figures.plot_signal(signal, maps_of(np.ones((1, 2, 10))))
    assert figure.get_figwidth() == pytest.approx(width)
    panels = [axis for axis in figure.axes if axis.get_title(loc="left")]
    assert len({round(axis.get_position().x0, 2) for axis in panels}) == columns


def test_what_does_not_belong_together_is_refused():
    maps = maps_of(np.ones((2, 1, 10)))
    with pytest.raises(ValueError, match="both must be of signals"):
        figures.plot_signal(SIGNALS[:1], maps)
    with pytest.raises(ValueError, match="both must be of signals"):
        figures.plot_signal(SIGNALS[:, 0], maps)
    with pytest.raises(ValueError, match="3 names for 2 channels"):
        figures.plot_signal(SIGNALS, maps, channels=["I", "II", "III"])
    with pytest.raises(ValueError, match="1 row titles for 2 signals"):
        figures.plot_signal(SIGNALS, maps, rows=["one"])
    with pytest.raises(ValueError, match="not finite"):
        figures.plot_signal(SIGNALS, maps_of(np.full((2, 1, 10), np.nan)))
    with pytest.raises(ValueError, match="leaves nothing to draw"):
        figures.plot_signal(SIGNALS, maps, components=0)
    with pytest.raises(ValueError, match=r"use figures\.plot_signal"):
        figures.plot_maps(np.zeros((2, 8, 8)), maps)


def test_lines_are_pale_and_dashed_where_the_map_is_not_sure():
    values = np.ones((1, 1, 600))
    error = torch.zeros(1, 1, 600, dtype=torch.float64)
    error[..., 300:] = 1e6
    maps = maps_of(values)
    known = replace(maps, error=error, values_error=torch.ones(1, 1), _resamples=30)
    signal = np.zeros((1, 1, 600))
    (drawn, plain), figure = (
        [lines_of(figures.plot_signal(signal, of))[0].get_colors()[:, 1] for of in (known, maps)],
        figures.plot_signal(signal, known),
    )
    np.testing.assert_array_equal(drawn[:299], plain[:299])
    paleness = drawn[300:] - plain[300:]  # red has little green
    assert paleness.min() > 0
    dashes = paleness > paleness.mean()
    assert 8 <= (np.diff(dashes.astype(int)) == 1).sum() <= 11  # half of 20 along all of it
    text = " ".join(text.get_text() for text in figure.findobj(Text)).replace("\n", " ")
    assert "Pale and dashed: another hundred training photos might turn it around." in text
    assert "hatched" not in text
