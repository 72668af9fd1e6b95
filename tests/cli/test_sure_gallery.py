"""Sheets and the gallery of maps with standard errors: what is pale, what is open, and what all maps share."""

import re
import warnings

import numpy as np
import pytest
import torch
from atlases import folder
from browser import complaints, expect, launched, needs_chromium, sync_playwright
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import SVMTarget, UnstableComponentWarning, resample_heads
from pytorch_grad_cam_pcasvm.runtime.pictures import colour_table
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.cli.gallery import Card, Gallery
from pytorch_grad_cam_pcasvm.studio.cli.mean_map import average_maps, find_habit
from pytorch_grad_cam_pcasvm.studio.model.file import load_model
from pytorch_grad_cam_pcasvm.studio.pictures.answers import write_error
from pytorch_grad_cam_pcasvm.studio.pictures.sheets import Sheets

ABOUT = {
    "titles": ["component 1", "predicted class"],
    "meanings": ["position {}", "margin {}: above 0 is predicted class"],
    "classes": ["cats", "dogs"],
    "colours": colour_table(),
}
GREY = Image.new("RGB", (224, 224), (128, 128, 128))
LEFT = np.broadcast_to(np.arange(4) < 2, (4, 4))


def make_outputs(value, error, decision=None, sure=LEFT, label=1):
    """Return the outputs of one photo: of a component that is not stable, and of the decision."""
    decision = np.full((4, 4), 0.9) if decision is None else decision
    maps = np.stack([np.full_like(decision, -0.5), decision])[None]
    return {
        "maps": maps,
        "values": np.array([[1.25, value]]),
        "nu": np.ones((1, 2)),
        "log_scale": np.zeros((1, 2)),
        "label": np.array([label]),
        "values_error": np.array([[np.nan, error]]),
        "sure": np.stack([np.zeros_like(sure), sure])[None],
    }


def without_errors(outputs):
    return {name: array for name, array in outputs.items() if name not in ("sure", "values_error")}


def test_what_is_not_sure_is_pale_on_a_sheet_and_the_rest_as_without_errors():
    sheets, values = Sheets(ABOUT), np.full((4, 4), 0.9)
    plain = np.asarray(sheets.overlay(GREY, values), float)
    drawn = np.asarray(sheets.overlay(GREY, values, sure=LEFT), float)
    np.testing.assert_array_equal(drawn[:, :112], plain[:, :112])
    none = np.asarray(sheets.overlay(GREY, np.zeros((4, 4))), float)
    size = np.linalg.norm(drawn - none, axis=-1)[:, 112:] / np.linalg.norm(plain - none, axis=-1)[:, 112:]
    lines = size > size.mean()
    assert 0.3 < lines.mean() < 0.37
    assert size[lines].min() > 0.6
    assert size[~lines].max() < 0.45
    assert (lines[1:, :-1] == lines[:-1, 1:]).all()  # slanted
    np.testing.assert_array_equal(sheets.overlay(GREY, values, sure=np.ones((4, 4), bool)), plain)


def test_only_the_part_of_the_photo_that_was_seen_is_hatched():
    sheets, wide = Sheets(ABOUT), Image.new("RGB", (448, 224), (128, 128, 128))
    frame = (0.25, 0.0, 0.75, 1.0)
    drawn = np.asarray(sheets.overlay(wide, np.ones((4, 4)), frame, sure=LEFT))
    plain = np.asarray(sheets.overlay(wide, np.ones((4, 4)), frame))
    differ = (drawn != plain).any(-1).any(0)
    assert np.flatnonzero(differ)[[0, -1]].tolist() == [224, 335]  # the right half of the middle


def test_outlines_of_what_is_not_sure_are_pale_and_hatched():
    sheets, values = Sheets(ABOUT), np.zeros((8, 8))
    values[2:6, 1:3] = values[2:6, 5:7] = 1.0
    mask = np.broadcast_to(np.arange(8) < 4, (8, 8))
    drawn, plain = (np.asarray(sheets.outlined(GREY, values, sure=sure), int) for sure in (mask, None))
    np.testing.assert_array_equal(drawn[:, :112], plain[:, :112])
    red = np.array([0xB2, 0x18, 0x2B])
    is_red = [(np.abs(picture[:, 112:] - red).sum(-1) < 10) for picture in (drawn, plain)]
    middle = np.s_[90:134, 50:65]  # of the right region
    assert not is_red[1][middle].any()
    assert 0.25 < is_red[0][middle].mean() < 0.42
    pale = np.round(255 - 0.4 * (255 - red)).astype(int)  # red at 0.4 over the white below it
    assert (np.abs(drawn[:, 112:] - pale).sum(-1) < 10).sum() > 0.8 * is_red[1].sum() * 0.66


def test_a_sheet_says_errors_and_that_a_decision_is_open():
    sheets = Sheets(ABOUT)
    close, clear = make_outputs(0.9, 0.5, label=1), make_outputs(3.8123, 0.934, label=1)
    assert sheets.said(clear, 0, 1) == "margin 3.8 ± 0.9: above 0 is dogs"
    assert sheets.said(clear, 0, 0) == "position 1.25 (not stable)"
    assert sheets.said(without_errors(clear), 0, 1) == "margin 3.81: above 0 is dogs"
    assert sheets.judge(clear, 0, "cats").right is False
    assert sheets.judge(without_errors(close), 0, "cats").right is False
    for truth in ("cats", "dogs", None):
        judged = sheets.judge(close, 0, truth)
        assert (judged.open, judged.right, judged.outcome, judged.seems_good) == (True, None, None, None)
        assert not judged.is_of_other_classes
    words, colour = sheets._verdict(close, 0, sheets.judge(close, 0, "cats"))
    assert words == "open: dogs is ahead, but other training photos might decide otherwise; labelled: cats"
    assert colour == "#555555"
    assert sheets.judge(make_outputs(1.0, 0.5), 0, "dogs").right is True  # two errors from 0
    assert not sheets.judge(close | {"anomaly": np.array([2.0])}, 0, None).passes


def test_what_does_not_turn_at_0_is_never_open():
    probability = Sheets(ABOUT | {"meanings": ["position {}", "probability {}"]})
    assert not probability.judge(make_outputs(0.1, 0.5), 0, "cats").open
    parts = Sheets(ABOUT | {"threshold": 3.0})
    assert not parts.judge(make_outputs(0.1, 0.5) | {"anomaly": np.array([2.0])}, 0, "cats").open


@pytest.mark.parametrize(
    ("title", "classes", "is_open"),
    [
        ("predicted class", ["cats", "dogs", "birds"], True),
        ("log-ratio of predicted class", ["cats", "dogs", "birds"], True),
        ("against cats", ["cats", "dogs", "birds"], True),  # the normal class
        ("dogs / cats", ["cats", "dogs", "birds"], False),  # a bird may be far ahead of both
        ("dogs", ["cats", "dogs", "birds"], False),
        ("dogs / cats", ["cats", "dogs"], True),
        ("value", None, False),
    ],
)
def test_only_a_decision_about_what_is_predicted_is_open(title, classes, is_open):
    sheets = Sheets(ABOUT | {"titles": ["component 1", title], "classes": classes, "normal": "cats"})
    assert sheets.judge(make_outputs(0.1, 0.5), 0, "cats").open == is_open


def test_a_sheet_has_its_legend_only_with_errors():
    sheets, outputs = Sheets(ABOUT), make_outputs(3.8, 0.9)
    plain = sheets.drawn(GREY, {name: array for name, array in outputs.items() if name != "sure"}, truth="dogs")
    drawn = sheets.drawn(GREY, outputs, truth="dogs")
    assert drawn.height > plain.height
    assert (np.asarray(drawn)[plain.height - 5 :] < 200).any()
    assert drawn.info["pictures"] == plain.info["pictures"]
    # Of negative parts that a method makes anew, nothing is known.
    anew = outputs | {"opposite": -outputs["maps"]}
    assert sheets.drawn(GREY, anew, truth="dogs").height == plain.height
    assert sheets.sure_share(anew) is None


def test_the_share_of_evidence_that_is_sure():
    sheets, evidence = Sheets(ABOUT), np.array([[4.0, -2.0], [1.0, 1.0]])
    sure = np.array([[True, False], [True, False]])
    assert sheets.sure_share(make_outputs(1.0, 0.1, evidence, sure)) == pytest.approx(5 / 8)
    assert sheets.sure_share(make_outputs(1.0, 0.1, 0 * evidence, sure)) is None
    assert sheets.sure_share(without_errors(make_outputs(1.0, 0.1))) is None


@pytest.fixture
def page(tmp_path):
    """A gallery of a wrong, an open and two right photos, of which 25, 50, 75 and 100 % of the evidence is sure."""
    sheets, gallery = Sheets(ABOUT), Gallery("photos", "predicted class")
    for number, (name, value, share, truth) in enumerate((
        ("d.png", 3.0, 1.0, "dogs"), ("c.png", 3.0, 0.75, "dogs"),
        ("b.png", 0.5, 0.5, "cats"), ("a.png", 3.0, 0.25, "cats"),
    )):  # fmt: skip
        outputs = make_outputs(value, 0.5, np.ones((4, 4)), np.broadcast_to(np.arange(4) < 4 * share, (4, 4)))
        sheet, judged = sheets.drawn(GREY, outputs, truth=truth), sheets.judge(outputs, 0, truth)
        card = Card(name, sheet, judged, said=sheets.said(outputs, 0, 1), value=value + number, file=name)
        card.sure = sheets.sure_share(outputs)
        gallery.add(card)
    assert gallery.list_outcomes() == [
        "1 of 4 are open, neither right nor wrong: other training photos might decide otherwise"
    ]
    gallery.write(tmp_path / "index.html")
    return tmp_path / "index.html"


def test_the_gallery_says_what_is_open_and_how_sure_maps_are(page):
    text = page.read_text()
    assert "Of the 3 with a label and a clear decision, 1 predicted wrongly, shown first. 1 of 4 are open," in text
    assert "Pale and hatched: another hundred training photos might turn it around; the rest" in text
    assert "±: how far they might move a value (one standard error). Open: within twice that" in text
    assert re.findall(r'data-name="(.).png"', text) == ["a", "b", "d", "c"]  # wrong, open, right
    assert "<b>open: dogs is ahead, labelled cats</b><br>margin 0.5 ± 0.5: above 0 is dogs" in text
    assert "25% of the evidence is sure" in text
    words = ("mostly sure", "partly sure", "hardly sure")
    assert [text.index(f'<option value="={word}">') for word in words] == sorted(
        text.index(f'<option value="={word}">') for word in words
    )


@needs_chromium
def test_the_gallery_is_filtered_and_sorted_by_how_sure_maps_are(page):
    with sync_playwright() as playwright:
        browser = launched(playwright)
        tab = browser.new_page()
        tab.goto(page.as_uri())

        def names():
            return "".join(
                tab.eval_on_selector_all("figure:not([hidden])", "all => all.map((one) => one.dataset.name[0])")
            )

        for order, expected in (("first", "abdc"), ("sure", "dcba"), ("unsure", "abcd")):
            tab.select_option("#sort", order)
            assert names() == expected
        for word, expected in (("mostly sure", "cd"), ("partly sure", "b"), ("hardly sure", "a")):
            tab.select_option("#sure", f"={word}")
            assert names() == expected
        tab.select_option("#sure", "")
        tab.select_option("#verdict", "=open")
        assert names() == "b"
        expect(tab.locator("#count")).to_have_text("1 of 4 pictures")
        assert not complaints(tab)
        browser.close()


def look(columns, width=7, seed=0):
    """Return maps whose strongest place is in these columns, and anywhere else in other respects."""
    noise, maps = np.random.default_rng(seed), []
    for column in columns:
        one = noise.uniform(-1, 0.5, (7, width))
        one[noise.integers(7), column] = 1.0
        maps.append(one)
    return maps


def test_a_network_that_always_looks_at_one_place_has_a_habit_and_another_has_none():
    assert find_habit(look([5] * 12 + [0, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4])) == (5, 7, 12, 23)
    assert find_habit(look([5] * 11 + [0, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4, 6])) is None  # less than half
    assert find_habit(look(np.random.default_rng(1).integers(0, 7, 60))) is None
    assert find_habit(look([5] * 9)) is None  # too few
    assert find_habit(look([2] * 20, width=3)) is None  # too coarse
    assert find_habit([-np.ones((7, 7))] * 12) is None  # nothing raises it
    # Of fine maps, columns are a seventh of the width.
    assert find_habit(look([8, 9, 10, 11] * 5, width=28)) == (2, 7, 20, 20)
    # Below zero is no evidence, however strong.
    assert find_habit([np.where(one == 1.0, -9.0, one) for one in look([5] * 20)]) is None


def test_the_mean_of_maps_is_what_they_share():
    maps = look([3] * 5)
    np.testing.assert_allclose(average_maps(maps), sum(maps) / np.abs(sum(maps)).max())
    assert average_maps([np.ones((2, 2)), np.ones((3, 3))]) is None
    assert average_maps([np.zeros((2, 2))] * 3).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("columns", "has_habit"), [([5] * 12 + [*range(5)] * 2, True), ([*range(7)] * 3, False)])
def test_the_gallery_shows_the_mean_map_and_says_a_habit(tmp_path, columns, has_habit):
    sheets, gallery = Sheets(ABOUT), Gallery("photos", "predicted class")
    for number, one in enumerate(look(columns)):
        outputs = without_errors(make_outputs(3.0, 0.5, one))
        card = Card(f"{number}.png", sheets.drawn(GREY, outputs), sheets.judge(outputs), file="a.png")
        card.map, card.paint = sheets.signed_map(outputs, 0, 1), sheets.paint
        gallery.add(card)
    gallery.write(tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert f"The mean of all {len(columns)} maps" in text
    assert 'alt="mean of all maps"' in text
    sentence = "In 12 of 22 photos the strongest place lies in the same one of 7 columns (framed), so part of “where”"
    assert (sentence in text) == has_habit
    assert "hatched" not in text
    assert (
        "How sure the maps are is not known: there are no refits, which fit makes of 8 photos a class or more" in text
    )


def test_the_command_tells_how_sure_its_maps_are(weights, tmp_path, capsys):
    photos = folder(tmp_path / "photos", 24)
    network = ["--backbone", "squeezenet1_1", "--weights", str(weights)]
    fitted = tmp_path / "model.safetensors"
    assert (
        main(["fit", str(photos), *network, "--features", "features", "--components", "3", "--out", str(fitted)]) == 0
    )
    model, paths = load_model(fitted, weights=weights), sorted(photos.glob("*/*"))
    x, labels = model.read(paths), np.array([path.parent.name for path in paths])
    with torch.no_grad():
        features = model.net(x).features.numpy()
    pipeline = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, labels)
    model.net.head.resamples = None
    model.save(tmp_path / "plain.safetensors")
    model.net.head.resamples = resample_heads(pipeline, features, labels, n=12)
    model.save(tmp_path / "sure.safetensors")
    capsys.readouterr()
    pages, sheets, said = {}, {}, {}
    for name in ("plain", "sure"):
        out = tmp_path / name
        file = tmp_path / f"{name}.safetensors"
        assert main(["explain", str(photos), "--model", str(file), "--weights", str(weights), "--out", str(out)]) == 0
        pages[name], said[name] = (out / "index.html").read_text(), capsys.readouterr().out
        sheets[name] = Image.open((out / paths[0].relative_to(photos)).with_suffix(".png"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnstableComponentWarning)
        maps = model.cam().explain(x, [SVMTarget()])
    value, error = maps.values[:, 0].numpy(), maps.values_error[:, 0].numpy()
    assert f"margin {write_error(value[0], error[0])}: above 0" in pages["sure"]
    is_open = int((np.abs(value) < 2 * error).sum())
    assert is_open > 0
    assert f"{is_open} of {len(x)} are open" in said["sure"]
    size = maps.maps[:, 0].abs()
    share = ((size * maps.sure()[:, 0]).sum((1, 2)) / size.sum((1, 2))).numpy()
    by_name = {name: float(number) for number, name in re.findall(
        r'data-share="([0-9.]+)" data-name="([^"]+)"', pages["sure"])}  # fmt: skip
    expected = {path.relative_to(photos).as_posix(): one for path, one in zip(paths, share, strict=True)}
    assert by_name == pytest.approx(expected, abs=1e-3)
    assert "Pale and hatched" in pages["sure"]
    assert not re.search("hatched|±|open:|are open", pages["plain"] + said["plain"])
    assert [name for name, text in said.items() if "\nhow sure the maps are is not known: " in text] == ["plain"]
    assert sheets["sure"].height - sheets["plain"].height >= 20
