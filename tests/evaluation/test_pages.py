"""Pages of HTML: what users name is text on them, whatever it contains."""

from html.parser import HTMLParser

import pytest
from jinja2 import UndefinedError

from pytorch_grad_cam_pcasvm.studio.evaluation.report_page import _split_path
from pytorch_grad_cam_pcasvm.studio.pages import render

HOSTILE = "it's_<script>alert(1)<script>&\".png"


class Reader(HTMLParser):
    """Collects the tags of a page, their attributes and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values, self.text = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.values += [value for _, value in attributes]

    def handle_data(self, data):
        self.text += data


def test_names_of_a_report_are_text():
    path = f"it/{HOSTILE}"
    section = {"title": "Check", "sentences": [HOSTILE], "if_it_fails": "", "curves": ""}
    section["pictures"] = [(HOSTILE, "AAAA", [(path, _split_path(path))])]
    page = Reader(render(
        "evaluation/report.html", title=HOSTILE, notes=[HOSTILE], network=HOSTILE, layer=HOSTILE,
        verdicts=[{"mark": "open", "sentences": [HOSTILE], "found": [], "pictures": {HOSTILE: "AAAA"}, "command": "",
                   "reasons": HOSTILE}],
        summary=[(HOSTILE, "check", "note", HOSTILE, HOSTILE)], sections=[section],
    ))  # fmt: skip
    assert "script" not in page.tags
    assert page.tags.count("wbr") == 1  # behind _; the folder with which the name begins is left out
    assert path in page.values
    assert page.text.count(HOSTILE) == 13


def test_names_of_a_gallery_are_text():
    card = {"mark": "", "attributes": {"label": HOSTILE}, "file": "a.png", "picture": "AAAA", "name": HOSTILE}
    page = Reader(render(
        "cli/gallery.html", title=HOSTILE, summary=HOSTILE, where="", map="map", legend="", mean={},
        menus=[("predicted", "label", {f"={HOSTILE}": HOSTILE})], cards=[card | {"caption": [("b", HOSTILE, HOSTILE)]}],
    ))  # fmt: skip
    assert page.tags.count("script") == 1  # the page's own
    assert page.values.count(HOSTILE) == 1
    assert f"={HOSTILE}" in page.values
    assert page.text.count(HOSTILE) == 6


def test_a_value_that_a_page_lacks_is_an_error():
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        render("cli/gallery.html", summary="", where="", map="map", menus=[], cards=[], legend="", mean={})
