"""The gallery: one page of all pictures with their maps, wrong ones first, to filter, to sort and to mail.

It needs no other file; only the large sheets, which a click opens, are the pictures beside it.
"""

import base64
import html
import io
import string
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.export.explainer import Judgement

_WIDTH, _QUALITY = 560, 82  # pixels of a picture, and of JPEG
_WHERE = """The middle picture says where: above 0, the brighter a place, the clearer; or the class of each place. The
outlined patch is the strongest, and the last picture says what of the photo made it so. """
_WHERE_ANOMALIES = """The middle picture says where: a place without colour is as good ones are, and one that is bright
orange to yellow is beyond the threshold, which its scale marks. The outlined patch is the most anomalous, and the last
picture says what of the photo made it so. """


@dataclass
class Card:
    """The maps of a picture, as the gallery and the table have them.

    Attributes:
        name: of the picture in its folder.
        sheet: the sheet, of which the large pictures are shown.
        judged: what is decided of it, and whether that is right.
        numbers: the values of the targets by their titles; of heads that decide at every position also the share of
            each class, or the highest anomaly.
        said: the value of what is explained, in words; of anomalies what these are.
        note: what else is to be known of it, such as that it is unlike the training pictures; empty: nothing.
        value: the value of what is explained, or None.
        file: of the large sheet, beside the page.
    """

    name: str
    sheet: Any
    judged: "Judgement"
    numbers: dict[str, float] = field(default_factory=dict)
    said: str = ""
    note: str = ""
    value: float | None = None
    file: str = ""


class Gallery:
    """Cards of all pictures.

    Args:
        name: of the folder of pictures.
        explained: what the maps explain.
        dense: whether something is decided at every position.
    """

    def __init__(self, name: str, explained: str, *, dense: bool = False) -> None:
        self.dense = dense
        self._name, self._explained = name, explained
        self._cards: list[tuple[tuple[bool, float], str]] = []
        self._choices: dict[str, set[str]] = {"label": set(), "truth": set(), "verdict": set()}
        self._anomalies = False
        self._wrong = self._judged = self._failed = self._tested = 0
        self._outcomes = {False: Counter[str | None](), True: Counter[str | None]()}  # of faulty photos, of good ones

    def add(self, card: Card) -> None:
        """Add a card; its picture is kept small."""
        judged = card.judged
        has_label, wrong = judged.right is not None, judged.right is False
        self._judged += has_label
        self._wrong += wrong
        self._tested += judged.passes is not None
        self._failed += judged.passes is False
        if judged.is_good is not None and (judged.passes is not None or has_label):
            self._outcomes[judged.is_good][judged.outcome] += 1
        picture = card.sheet.crop(card.sheet.info["pictures"])
        picture.thumbnail((_WIDTH, _WIDTH))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=_QUALITY)
        bad = wrong or judged.passes is False or judged.outcome is not None
        mark = "unlike" if card.note else "wrong" if bad else "right" if has_label or judged.passes is True else ""
        text = base64.b64encode(file.getvalue()).decode()
        self._anomalies |= judged.anomaly is not None
        self._cards.append((
            (judged.outcome is None, float(not wrong) if judged.anomaly is None else -judged.anomaly),
            f'<figure class="{mark}"{self._described(card)}><a href="{quote(card.file)}">'
            f'<img loading="lazy" src="data:image/jpeg;base64,{text}" alt="{html.escape(card.name)} with its map"></a>'
            f"<figcaption>{'<br>'.join(_write_caption(card))}</figcaption></figure>",
        ))

    def _described(self, card: Card) -> str:
        """Return the attributes of a card for filters and sorting, and collect the choices of the filters."""
        judged, attributes = card.judged, dict[str, str]()
        if judged.label is not None:
            attributes["label"] = str(judged.label)
        if judged.truth is not None:
            attributes["truth"] = str(judged.truth)
        if judged.passes is not None:
            attributes["verdict"] = judged.outcome or ("pass" if judged.passes else "fail")
        elif judged.right is not None:
            attributes["verdict"] = "right" if judged.right else judged.outcome or "wrong"
        for name, word in attributes.items():
            self._choices[name].add(word)
        number = card.value if judged.anomaly is None else judged.anomaly
        attributes |= {"name": card.name} | ({} if number is None else {"value": f"{number:.9g}"})
        return "".join(f' data-{name}="{html.escape(word)}"' for name, word in attributes.items())

    def _controls(self) -> str:
        """Return the filters and sort orders of the page; a filter with one choice is left out."""
        value = "anomaly" if self._anomalies else "value"
        first = "most anomalous first" if self._anomalies else "wrong first" if self._wrong else "as in the folder"
        if any(counts[outcome] for counts in self._outcomes.values() for outcome in counts if outcome):
            first = "mistakes first"
        orders = {"first": first, "name": "by name", "high": f"highest {value} first", "low": f"lowest {value} first"}
        if first == "most anomalous first":
            del orders["high"]
        names = {"label": "predicted", "truth": "folder", "verdict": "verdict"}
        menus = ""
        for name, words in self._choices.items():
            if len(words) > 1:
                options = {"": "all"} | {f"={word}": word for word in sorted(words)}
                menus += f"<label>{names[name]} {_select(name, options)}</label>"
        return menus + f"<label>sort {_select('sort', orders)}</label>"

    def list_outcomes(self) -> list[str]:
        """Return how many faults are missed and how many good photos raise a false alarm, in words; [] if unknown."""
        faulty, good = self._outcomes[False], self._outcomes[True]
        passes, fails = ("pass", "fail") if self._tested else ("are taken for good", "are taken for faulty")
        missed = f"{faulty.total() - faulty[None]} of {faulty.total()} photos with a fault {passes}"
        alarms = f"{good.total() - good[None]} of {good.total()} good ones {fails}"
        return [missed] * bool(faulty) + [alarms] * bool(good)

    def write(self, path: Path) -> None:
        """Write the page."""
        summary = f"{len(self._cards)} pictures. The maps explain: {html.escape(self._explained)}."
        if self._judged:
            wrong = f"{self._wrong} predicted wrongly, shown first" if self._wrong else "all predicted rightly"
            summary += f" Of the {self._judged} with a label, {wrong}."
        if self._tested:
            summary += f" {self._failed} of {self._tested} fail: their anomaly is above the threshold."
        summary += "".join(f" {words}." for words in self.list_outcomes())
        cards = "\n".join(text for _, text in sorted(self._cards, key=lambda card: card[0]))
        title = html.escape(f"Maps of {self._name}")
        where, last = (_WHERE_ANOMALIES if self._anomalies else _WHERE, "last picture") if self.dense else ("", "map")
        template = string.Template((Path(__file__).parent / "gallery.html").read_text(encoding="utf-8"))
        page = template.substitute(
            title=title, summary=summary, choices=self._controls(), cards=cards, where=where, map=last
        )
        path.write_text(page, encoding="utf-8")


def _write_caption(card: Card) -> list[str]:
    """Return the lines below the picture of a card, as HTML."""
    judged, lines = card.judged, [html.escape(card.name)]
    if judged.label is not None:
        verdict = f", labelled {judged.truth}" if judged.right is False else ", right" if judged.right else ""
        lines.insert(0, f"<b>{html.escape(f'{judged.label}{verdict}')}</b>")
    if judged.anomaly is not None:
        verdict = "" if judged.passes is None else "pass: " if judged.passes else "fail: "
        unit = html.escape(f" ({card.said})") if card.said else ""
        lines.insert(0, f"<b>{verdict}anomaly {judged.anomaly:.3g}</b>{unit}")
    elif card.said:
        lines.insert(len(lines) - 1, html.escape(card.said))
    if card.note:
        lines.insert(1, f"<i>{html.escape(card.note)}</i>")
    return ([] if judged.outcome is None else [f"<b>{judged.outcome}</b>"]) + lines


def _select(name: str, options: dict[str, str]) -> str:
    """Return a menu of options, their words by their values."""
    choices = "".join(
        f'<option value="{html.escape(value)}">{html.escape(words)}</option>' for value, words in options.items()
    )
    return f'<select id="{name}">{choices}</select>'
