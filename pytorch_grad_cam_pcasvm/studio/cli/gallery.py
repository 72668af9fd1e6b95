"""The gallery of maps: a page to filter, to sort and to mail, of a card for each picture."""

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pytorch_grad_cam_pcasvm.studio.cli.folders import describe_trained, name_first
from pytorch_grad_cam_pcasvm.studio.pages import render

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.studio.pictures.answers import Judgement


_WIDTH, _QUALITY = 560, 82  # pixels of a picture, and of JPEG
_WHERE = """The middle picture says where: above 0, the brighter a place, the clearer; or the class of each place. The
outlined patch is the strongest, and the last picture says what of the photo made it so. """
_WHERE_ANOMALIES = """The middle picture says where: a place without colour is as good ones are, and one that is bright
orange to yellow is beyond the threshold, which its scale marks. The outlined patch is the most anomalous, and the last
picture says what of the photo made it so. """

_SUMMARY = {  # of a page
    "explained": "{pictures} pictures. The maps explain: {explained}.",
    "wrong": " Of the {judged} with a label, {wrong} predicted wrongly, shown first.",
    "right": " Of the {judged} with a label, all predicted rightly.",
    "failed": " {failed} of {tested} fail: their anomaly is above the threshold.",
    "missed": "{mistaken} of {total} photos that are not {good} {verdict}",
    "alarms": "{mistaken} of {total} {good} ones {verdict}",
    "unknown": "{count} of {total} are counted neither right nor wrong: the model has no class called {names}",
}
_VERDICTS = {  # by a threshold, or not
    True: ("pass", "fail"),
    False: ("are taken for {good}", "are taken for another class"),
}


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
        trained: whether it was trained on.
    """

    name: str
    sheet: Any
    judged: "Judgement"
    numbers: dict[str, float] = field(default_factory=dict)
    said: str = ""
    note: str = ""
    value: float | None = None
    file: str = ""
    trained: bool = False


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
        self._cards: list[tuple[tuple[bool, float], dict[str, Any]]] = []
        self._choices: dict[str, set[str]] = {"label": set(), "truth": set(), "verdict": set()}
        self._judgements: list[Judgement] = []
        self._new: list[Judgement] = []  # of pictures that were not trained on

    def __len__(self) -> int:
        return len(self._cards)

    def add(self, card: Card) -> None:
        """Add a card; its picture is kept small."""
        judged, wrong = card.judged, card.judged.right is False
        self._judgements.append(judged)
        self._new += [] if card.trained else [judged]
        picture = card.sheet.crop(card.sheet.info["pictures"])
        picture.thumbnail((_WIDTH, _WIDTH))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=_QUALITY)
        bad = wrong or judged.passes is False or judged.outcome is not None
        is_well = judged.right or judged.is_compared or judged.passes
        mark = "unlike" if card.note else "wrong" if bad else "right" if is_well else ""
        order = judged.outcome is None, float(not wrong) if judged.anomaly is None else -judged.anomaly
        self._cards.append((
            order,
            {
                "mark": mark,
                "attributes": self._describe(card),
                "file": quote(card.file),
                "picture": base64.b64encode(file.getvalue()).decode(),
                "name": card.name,
                "caption": _write_caption(card),
            },
        ))

    def _describe(self, card: Card) -> dict[str, str]:
        """Return the attributes of a card for filters and sorting, and collect the choices of the filters."""
        judged, attributes = card.judged, dict[str, str]()
        if judged.label is not None:
            attributes["label"] = str(judged.label)
        if judged.truth is not None:
            attributes["truth"] = str(judged.truth)
        if judged.passes is not None:
            attributes["verdict"] = judged.outcome or ("pass" if judged.passes else "fail")
        elif judged.right is not None or judged.is_compared:
            attributes["verdict"] = judged.outcome or ("wrong" if judged.right is False else "right")
        for name, word in attributes.items():
            self._choices[name].add(word)
        number = card.value if judged.anomaly is None else judged.anomaly
        return attributes | {"name": card.name} | ({} if number is None else {"value": f"{number:.9g}"})

    def _list_menus(self) -> list[tuple[str, str, dict[str, str]]]:
        """Return the filters and sort orders: label, name, words by value. A filter with one choice is left out."""
        value = "anomaly" if self._has_anomalies else "value"
        wrong = any(judged.right is False for judged in self._judgements)
        first = "most anomalous first" if self._has_anomalies else "wrong first" if wrong else "as in the folder"
        if any(judged.outcome for judged in self._judgements):
            first = "mistakes first"
        orders = {"first": first, "name": "by name", "high": f"highest {value} first", "low": f"lowest {value} first"}
        if first == "most anomalous first":
            del orders["high"]
        names = {"label": "predicted", "truth": "folder", "verdict": "verdict"}
        menus = [
            (names[name], name, {"": "all"} | {f"={word}": word for word in sorted(words)})
            for name, words in self._choices.items()
            if len(words) > 1
        ]
        return [*menus, ("sort", "sort", orders)]

    @property
    def _has_anomalies(self) -> bool:
        """Whether the pictures have anomalies."""
        return any(judged.anomaly is not None for judged in self._judgements)

    @property
    def _counted(self) -> "list[Judgement]":
        """Those of pictures that were not trained on; of all, if all were."""
        return self._new or self._judgements

    def list_outcomes(self) -> list[str]:
        """Return how many faults are missed and how many good photos raise a false alarm, in words; [] if unknown.

        Good photos have the name of their class, which may be "Normal" of X-rays. Photos in folders whose names are no
        classes of the model are counted, too.
        """
        good = next((str(judged.truth) for judged in self._judgements if judged.is_good), "good")
        good = "good" if good.lower() == "good" else good  # a word like others in a sentence
        total = len(self._judgements)
        verdicts = _VERDICTS[any(judged.passes is not None for judged in self._judgements)]
        sentences = describe_trained(total - len(self._new), total)
        for clause, is_good, verdict in zip(("missed", "alarms"), (False, True), verdicts, strict=True):
            outcomes = [one.outcome for one in self._counted if one.is_compared and one.is_good == is_good]
            mistaken = len(outcomes) - outcomes.count(None)
            if outcomes:
                verdict = verdict.format(good=good)
                sentences.append(
                    _SUMMARY[clause].format(mistaken=mistaken, total=len(outcomes), good=good, verdict=verdict)
                )
        unknown = [one for one in self._counted if one.is_of_other_classes]
        if unknown:
            absent = sorted({str(one.truth) for one in unknown})
            labels = {str(one.label).lower(): str(one.label) for one in self._judgements}
            near = [labels[name.lower()] for name in absent if name.lower() in labels]
            names = name_first(absent) + (f" (did you mean {near[0]}?)" if near else "")
            sentences.append(_SUMMARY["unknown"].format(count=len(unknown), total=len(self._counted), names=names))
        return sentences

    def write(self, path: Path) -> None:
        """Write the page."""
        summary = _SUMMARY["explained"].format(pictures=len(self._cards), explained=self._explained)
        rights = [judged.right for judged in self._counted if judged.right is not None]
        passes = [judged.passes for judged in self._counted if judged.passes is not None]
        if rights:
            wrong = rights.count(False)
            summary += _SUMMARY["wrong" if wrong else "right"].format(judged=len(rights), wrong=wrong)
        if passes:
            summary += _SUMMARY["failed"].format(failed=passes.count(False), tested=len(passes))
        summary += "".join(f" {words}." for words in self.list_outcomes())
        where = _WHERE_ANOMALIES if self._has_anomalies else _WHERE
        page = render(
            "cli/gallery.html",
            title=f"Maps of {self._name}",
            summary=summary,
            menus=self._list_menus(),
            cards=[card for _, card in sorted(self._cards, key=lambda card: card[0])],
            where=where if self.dense else "",
            map="last picture" if self.dense else "map",
        )
        path.write_text(page, encoding="utf-8")


def _write_caption(card: Card) -> list[tuple[str, str, str]]:
    """Return the lines below the picture of a card: a tag or "", the words in it, and those behind it."""
    judged, lines = card.judged, [("", card.name, "")]
    if judged.label is not None:
        verdict = f", labelled {judged.truth}" if judged.right is False else ", right" if judged.right else ""
        lines.insert(0, ("b", f"{judged.label}{verdict}", ""))
    if judged.anomaly is not None:
        verdict = "" if judged.passes is None else "pass: " if judged.passes else "fail: "
        lines.insert(0, ("b", f"{verdict}anomaly {judged.anomaly:.3g}", f" ({card.said})" if card.said else ""))
    elif card.said:
        lines.insert(len(lines) - 1, ("", card.said, ""))
    if card.note:
        lines.insert(1, ("i", card.note, ""))
    return ([] if judged.outcome is None else [("b", judged.outcome, "")]) + lines
