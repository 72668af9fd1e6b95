"""The gallery in a browser."""

import re

import numpy as np
import pytest
from browser import complaints, expect, launched, needs_chromium, sync_playwright
from PIL import Image

from pytorch_grad_cam_pcasvm.studio.cli.gallery import Card, Gallery
from pytorch_grad_cam_pcasvm.studio.pictures.answers import Judgement
from pytorch_grad_cam_pcasvm.studio.pictures.sheets import Sheets

CARDS = [  # name, predicted, labelled, value
    ("cats/a 1.jpg", "cats", "cats", 1.5),
    ("cats/b#10.jpg", "dogs", "cats", 0.25),
    ("dogs/b#9.jpg", "dogs", "dogs", 3.0),
]


@pytest.fixture
def page(tmp_path):
    gallery = Gallery("photos", "predicted class")
    for number, (name, label, truth, value) in enumerate(CARDS):
        sheet = Image.new("RGB", (60 + number, 40), "white")
        sheet.info["pictures"] = (0, 0, 60, 40)
        file = (tmp_path / name).with_suffix(".png")
        file.parent.mkdir(exist_ok=True)
        sheet.save(file)
        said = f"margin {value:.3g}: above 0 is {label}"
        path = file.relative_to(tmp_path).as_posix()
        judged = Judgement(label, truth, label == truth)
        gallery.add(Card(name, sheet, judged, said=said, value=value, file=path))
    gallery.write(tmp_path / "index.html")
    return tmp_path / "index.html"


def test_a_page_of_anomalies_says_their_unit_and_what_fails(tmp_path):
    gallery = Gallery("photos", "anomaly")
    sheet = Image.new("RGB", (60, 40), "white")
    sheet.info["pictures"] = (0, 0, 60, 40)
    for name, anomaly, passes in (("a.png", 1.0, True), ("b.png", 12.3, False)):
        said = "distance to the nearest good patch"
        judged = Judgement(passes=passes, anomaly=anomaly)
        gallery.add(Card(name, sheet, judged, said=said, value=anomaly, file=name))
    gallery.write(tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert "<b>fail: anomaly 12.3</b> (distance to the nearest good patch)" in text
    assert text.index("b.png") < text.index("a.png")
    assert '<option value="=fail">fail</option>' in text
    assert "http" not in text


def test_missed_faults_and_false_alarms_come_first_and_are_counted(tmp_path):
    sheets = Sheets({"classes": None, "titles": [], "colours": [], "threshold": 10.0})
    sheets.good = "good"
    gallery, sheet = Gallery("photos", "anomaly"), Image.new("RGB", (60, 40), "white")
    sheet.info["pictures"] = (0, 0, 60, 40)
    outcomes = []
    for truth, anomaly in (("good", 1.0), ("crack", 50.0), ("crack", 9.0), ("good", 12.0), ("crack", 8.0)):
        outputs = {"anomaly": np.array([anomaly])}
        judged = sheets.judge(outputs, 0, truth)
        outcomes.append(judged.outcome)
        gallery.add(Card(f"{truth}/{anomaly}.png", sheet, judged, file="a.png"))
    assert outcomes == [None, None, "missed", "false alarm", "missed"]
    assert gallery.list_outcomes() == ["2 of 3 photos that are not good pass", "1 of 2 good ones fail"]
    gallery.write(tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    names = re.findall(r'data-name="(\S+).png"', text)
    assert names == [
        "good/12.0",
        "crack/9.0",
        "crack/8.0",
        "crack/50.0",
        "good/1.0",
    ]
    assert text.count('class="wrong"') == 4
    assert "<b>missed</b>" in text
    assert sheets.outcome({"anomaly": np.array([1.0])}, 0, None) is None
    sheets.good = None  # no folder is called so
    assert sheets.outcome({"anomaly": np.array([1.0])}, 0, "crack") is None


@pytest.mark.parametrize("normal", ["good", "background"])  # of masks, what lies outside of them
def test_without_a_threshold_the_classes_of_positions_tell_mistakes(tmp_path, normal):
    sheets = Sheets({
        "classes": [normal, "crack", "dent"], "titles": [], "colours": ["000000"], "normal": normal, "absent": [normal],
    })  # fmt: skip
    sheets.good = "good"
    gallery, sheet = Gallery("photos", "crack where strongest", dense=True), Image.new("RGB", (60, 40), "white")
    sheet.info["pictures"] = (0, 0, 60, 40)
    clean, small, two = np.zeros((3, 1, 4, 4))
    small[0, 1, 2], two[0, 0, :2] = 1, (1, 2)
    outcomes, verdicts = [], []
    for number, (truth, labels) in enumerate((
        ("good", clean), ("crack", small), ("crack", clean), ("good", two), ("scratch", clean), ("good", clean),
    )):  # fmt: skip
        outputs = {"label": labels}
        judged = sheets.judge(outputs, 0, truth)
        outcomes.append(judged.outcome)
        verdicts.append(sheets._verdict(outputs, 0, judged)[0])
        gallery.add(Card(f"{truth}/{number}.png", sheet, judged, file="a.png"))
    assert outcomes == [None, None, "missed", "false alarm", "missed", None]
    assert verdicts[1:4] == ["labelled: crack", "missed: labelled crack", "false alarm: labelled good"]
    assert gallery.list_outcomes() == [
        "2 of 3 photos that are not good are taken for good",
        "1 of 3 good ones are taken for another class",
    ]
    gallery.write(tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert re.findall(r'data-name="(\S+).png"', text)[:3] == ["crack/2", "good/3", "scratch/4"]
    assert (text.count('class="wrong"'), text.count('class="right"')) == (3, 3)
    assert all(f'<option value="={word}">' in text for word in ("missed", "false alarm", "right"))
    sheets.good = None  # no folder is called so
    assert sheets.outcome({"label": clean}, 0, "crack") == ("missed" if normal == "good" else None)
    assert sheets.outcome({"label": clean}, 0, None) is None


def test_of_whole_photos_background_is_a_class_like_others():
    sheets = Sheets({"classes": ["background", "car"], "titles": [], "colours": ["000000"], "normal": "background"})
    outputs = {"label": np.array([0])}
    assert sheets.outcome(outputs, 0, "car") == "missed"
    assert sheets.outcome({"label": np.array([1])}, 0, "background") == "false alarm"
    assert sheets.outcome(outputs, 0, "background") is None


@needs_chromium
def test_pictures_are_filtered_sorted_and_opened(page):
    with sync_playwright() as playwright:
        browser = launched(playwright)
        tab = browser.new_page()
        requests = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page.as_uri())
        names = lambda: tab.eval_on_selector_all(  # noqa: E731
            "figure:not([hidden])", "figures => figures.map((figure) => figure.dataset.name)"
        )
        assert names() == ["cats/b#10.jpg", "cats/a 1.jpg", "dogs/b#9.jpg"]  # wrong first
        expect(tab.locator("figure").first).to_contain_text("margin 0.25: above 0 is dogs")
        for order, expected in (("name", [0, 1, 2]), ("high", [2, 0, 1]), ("low", [1, 0, 2])):
            tab.select_option("#sort", order)
            assert names() == [CARDS[number][0] for number in expected]
        tab.select_option("#label", "=dogs")
        assert names() == ["cats/b#10.jpg", "dogs/b#9.jpg"]
        tab.select_option("#verdict", "=right")
        assert names() == ["dogs/b#9.jpg"]
        expect(tab.locator("#count")).to_have_text("1 of 3 pictures")
        tab.select_option("#verdict", "")
        assert not any(url.endswith(".png") for url in requests)
        tab.locator("figure:not([hidden]) a").first.click()
        expect(tab.locator("#name")).to_have_text("cats/b#10.jpg")
        tab.wait_for_function("document.getElementById('sheet').naturalWidth === 61")
        tab.keyboard.press("ArrowRight")
        tab.wait_for_function("document.getElementById('sheet').naturalWidth === 62")
        tab.keyboard.press("Escape")
        expect(tab.locator("dialog")).not_to_be_visible()
        assert sum(url.endswith(".png") for url in requests) == 2
        assert not complaints(tab)
        browser.close()


OUTCOMES = {
    "names that differ by capitals": (
        *(["Good", "Crack"], [("Good", 0), ("Crack", 1), ("Crack", 1), ("good", 0)]),
        [
            "0 of 2 photos that are not good are taken for good",
            "0 of 1 good ones are taken for another class",
            "1 of 4 are counted neither right nor wrong: the model has no class called good (did you mean Good?)",
        ],
    ),
    "a normal class of another name, and photos of another class": (
        *(["Normal", "Viral"], [("Normal", 0), ("Normal", 1), ("Viral", 0), ("Covid", 1), ("Covid", 0), (None, 1)]),
        [
            "1 of 1 photos that are not Normal are taken for Normal",
            "1 of 2 Normal ones are taken for another class",
            "2 of 6 are counted neither right nor wrong: the model has no class called Covid",
        ],
    ),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_what_came_out_is_counted_and_told(case):
    classes, photos, lines = OUTCOMES[case]
    sheets = Sheets({"classes": classes, "titles": [], "colours": [], "normal": classes[0]})
    gallery, sheet = Gallery("parts", classes[1]), Image.new("RGB", (60, 40), "white")
    sheet.info["pictures"] = (0, 0, 60, 40)
    for truth, label in photos:
        gallery.add(Card("a.png", sheet, sheets.judge({"label": np.array([label])}, 0, truth), file="a.png"))
    assert gallery.list_outcomes() == lines
