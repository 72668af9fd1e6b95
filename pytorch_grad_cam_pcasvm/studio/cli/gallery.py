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


_WIDTH, _MEAN, _QUALITY = 560, 224, 82  # pixels of a picture, of the mean map, and of JPEG
_SURE = {2 / 3: "mostly sure", 1 / 3: "partly sure", 0.0: "hardly sure"}  # by the least share of its evidence
_WHERE = """The middle picture says where: above 0, the brighter a place, the clearer; or the class of each place. The
outlined patch is the strongest, and the last picture says what of the photo made it so. """
_WHERE_ANOMALIES = """The middle picture says where: a place without colour is as good ones are, and one that is bright
orange to yellow is beyond the threshold, which its scale marks. The outlined patch is the most anomalous, and the last
picture says what of the photo made it so. """

_SUMMARY = {  # of a page
    "explained": "{pictures} pictures. The maps explain: {explained}.",
    "wrong": " Of the {judged} with a label{clear}, {wrong} predicted wrongly, shown first.",
    "right": " Of the {judged} with a label{clear}, all predicted rightly.",
    "failed": " {failed} of {tested} fail: their anomaly is above the threshold.",
    "missed": "{mistaken} of {total} photos that are not {good} {verdict}",
    "alarms": "{mistaken} of {total} {good} ones {verdict}",
    "open": "{count} of {total} are open, neither right nor wrong: other training photos might decide otherwise",
    "unlike": "{count} of {total} pictures {are} unlike the training pictures: do not trust {their}",
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
        sure: which share of the evidence on the map of what is explained is sure; None: not known.
        map: of what is explained, signed, (h, w) in [-1, 1]; None: its place is not the same in all pictures.
        paint: draws a panel, see :class:`.Sheets`; None: there is no map.
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
    sure: float | None = None
    map: Any = None
    paint: Any = None


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
        self._choices: dict[str, set[str]] = {"label": set(), "truth": set(), "verdict": set(), "sure": set()}
        self._maps: list[Any] = []
        self._paint: Any = None
        self._judgements: list[Judgement] = []
        self._new: list[Judgement] = []  # of pictures that were not trained on
        self._unlike = 0  # pictures

    def __len__(self) -> int:
        return len(self._cards)

    def add(self, card: Card) -> None:
        """Add a card; its picture is kept small."""
        judged, wrong = card.judged, card.judged.right is False
        self._judgements.append(judged)
        self._new += [] if card.trained else [judged]
        self._unlike += bool(card.note)
        if card.map is not None:
            self._maps.append(card.map)
            self._paint = card.paint
        picture = card.sheet.crop(card.sheet.info["pictures"])
        picture.thumbnail((_WIDTH, _WIDTH))
        bad = wrong or judged.passes is False or judged.outcome is not None
        is_well = judged.right or judged.is_compared or judged.passes
        mark = "unlike" if card.note else "open" if judged.open else "wrong" if bad else "right" if is_well else ""
        place = 0.0 if wrong else 1.0 if judged.open else 2.0
        order = judged.outcome is None, place if judged.anomaly is None else -judged.anomaly
        self._cards.append((
            order,
            {
                "mark": mark,
                "attributes": self._describe(card),
                "file": quote(card.file),
                "picture": _encode_picture(picture),
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
        if judged.open:
            attributes["verdict"] = "open"
        elif judged.passes is not None:
            attributes["verdict"] = judged.outcome or ("pass" if judged.passes else "fail")
        elif judged.right is not None or judged.is_compared:
            attributes["verdict"] = judged.outcome or ("wrong" if judged.right is False else "right")
        if card.sure is not None:
            attributes["sure"] = next(word for least, word in _SURE.items() if card.sure >= least)
        for name, word in attributes.items():
            self._choices[name].add(word)
        if card.sure is not None:
            attributes["share"] = f"{card.sure:.4f}"
        number = card.value if judged.anomaly is None else judged.anomaly
        return attributes | {"name": card.name} | ({} if number is None else {"value": f"{number:.9g}"})

    def _list_menus(self) -> list[tuple[str, str, dict[str, str]]]:
        """Return the filters and sort orders: label, name, words by value. A filter with one choice is left out."""
        value = "anomaly" if self.has_anomalies else "value"
        wrong = any(judged.right is False for judged in self._judgements)
        first = "open first" if any(judged.open for judged in self._judgements) else "as in the folder"
        first = "most anomalous first" if self.has_anomalies else "wrong first" if wrong else first
        if any(judged.outcome for judged in self._judgements):
            first = "mistakes first"
        orders = {"first": first, "name": "by name", "high": f"highest {value} first", "low": f"lowest {value} first"}
        if first == "most anomalous first":
            del orders["high"]
        if self.tells_sure:
            orders |= {"sure": "surest map first", "unsure": "least sure map first"}
        names = {"label": "predicted", "truth": "folder", "verdict": "verdict", "sure": "map"}
        menus = [
            (names[name], name, {"": "all"} | {f"={word}": word for word in sorted(words, key=_rank_word)})
            for name, words in self._choices.items()
            if len(words) > 1
        ]
        return [*menus, ("sort", "sort", orders)]

    @property
    def tells_sure(self) -> bool:
        """Whether it is known how sure maps are."""
        return bool(self._choices["sure"])

    @property
    def has_anomalies(self) -> bool:
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
        is_open = [one.open for one in self._counted]
        if any(is_open):
            sentences.append(_SUMMARY["open"].format(count=sum(is_open), total=len(is_open)))
        if self._unlike:
            words = ("is", "its decision") if self._unlike == 1 else ("are", "their decisions")
            unlike = dict(zip(("are", "their"), words, strict=True))
            sentences.append(_SUMMARY["unlike"].format(count=self._unlike, total=total, **unlike))
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
            clear = " and a clear decision" * any(judged.open for judged in self._counted)
            summary += _SUMMARY["wrong" if wrong else "right"].format(judged=len(rights), wrong=wrong, clear=clear)
        if passes:
            summary += _SUMMARY["failed"].format(failed=passes.count(False), tested=len(passes))
        summary += "".join(f" {words}." for words in self.list_outcomes())
        from pytorch_grad_cam_pcasvm.studio.pictures.panels import SPREAD, UNKNOWN, UNSURE

        where = _WHERE_ANOMALIES if self.has_anomalies else _WHERE
        legend = f"Pale and hatched: {UNSURE}; the rest of the evidence is sure. {SPREAD}. "
        if any(judged.open for judged in self._judgements):
            legend += "Open: within twice that, the decision might turn, also where each side's evidence is sure. "
        page = render(
            "cli/gallery.html",
            title=f"Maps of {self._name}",
            summary=summary,
            menus=self._list_menus(),
            cards=[card for _, card in sorted(self._cards, key=lambda card: card[0])],
            where=where if self.dense else "",
            legend=legend if self.tells_sure else f"{UNKNOWN}.",
            mean=self._draw_mean(),
            map="last picture" if self.dense else "map",
        )
        path.write_text(page, encoding="utf-8")

    def _draw_mean(self) -> dict[str, str]:
        """Return the mean map of all pictures, and what is to be said of it; {}: there is none."""
        from PIL import Image

        from pytorch_grad_cam_pcasvm.studio.cli.mean_map import HABIT, average_maps, find_habit
        from pytorch_grad_cam_pcasvm.studio.pictures.panels import Panel

        mean = average_maps(self._maps) if len(self._maps) > 1 else None
        if mean is None:
            return {}
        habit = find_habit(self._maps)
        size = _MEAN, max(1, round(_MEAN * mean.shape[0] / mean.shape[1]))
        panel = Panel(Image.new("RGB", size, "white"), mean)
        words = f"The mean of all {len(self._maps)} maps shows what they share, whatever is in a picture."
        if habit is not None:
            column, columns, count, total = habit
            panel.boxes, panel.grid = ((0, column, ""),), (1, columns)
            words += " " + HABIT.format(count=count, total=total, columns=columns)
        return {"picture": _encode_picture(self._paint(panel)), "words": words}


def _encode_picture(picture: Any) -> str:
    """Return a picture as a page has it: a JPEG, in letters."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY)
    return base64.b64encode(file.getvalue()).decode()


def _rank_word(word: str) -> tuple[int, str]:
    """Return where a word stands among the choices of a filter: how sure in order, the others by the alphabet."""
    sure = list(_SURE.values())
    return (sure.index(word) if word in sure else 0), word


def _write_caption(card: Card) -> list[tuple[str, str, str]]:
    """Return the lines below the picture of a card: a tag or "", the words in it, and those behind it."""
    judged, lines = card.judged, [("", card.name, "")]
    if judged.label is not None:
        verdict = f", labelled {judged.truth}" if judged.right is False else ", right" if judged.right else ""
        if judged.open:
            verdict = " is ahead" + (f", labelled {judged.truth}" if judged.truth is not None else "")
        lines.insert(0, ("b", "open: " * judged.open + f"{judged.label}{verdict}", ""))
    if judged.anomaly is not None:
        verdict = "" if judged.passes is None else "pass: " if judged.passes else "fail: "
        lines.insert(0, ("b", f"{verdict}anomaly {judged.anomaly:.3g}", f" ({card.said})" if card.said else ""))
    elif card.said:
        lines.insert(len(lines) - 1, ("", card.said, ""))
    if card.sure is not None:
        lines.insert(len(lines) - 1, ("", f"{card.sure:.0%} of the evidence is sure", ""))
    if card.note:
        lines.insert(1, ("i", card.note, ""))
    return ([] if judged.outcome is None else [("b", judged.outcome, "")]) + lines
