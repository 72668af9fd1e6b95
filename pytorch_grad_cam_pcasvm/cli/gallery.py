"""The gallery: one page of all pictures with their maps, wrong ones first, which can be mailed."""

import base64
import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WIDTH, _QUALITY = 560, 82  # pixels of a picture, and of JPEG
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.4 system-ui, sans-serif; margin: 1rem; color: #222; background: #f3f4f6 }}
h1 {{ font-size: 1.3rem }} h2 {{ font-size: 1.05rem }} p {{ margin: .3rem 0 }}
main {{ display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)) }}
figure {{ margin: 0; padding: .6rem; background: white; border: 1px solid #d7dae0; border-radius: .4rem }}
img {{ width: 100%; display: block }}
figcaption {{ margin-top: .4rem; overflow-wrap: anywhere }}
.wrong {{ border-color: #b2182b }} .wrong b {{ color: #b2182b }} .right b {{ color: #1b7837 }}
.unlike {{ border: 2px solid #b45309 }} .unlike b, i {{ color: #b45309 }}
small {{ color: #555 }}
</style></head><body>
<h1>{title}</h1>
<p>{summary}</p>
<p><small>Red raises the value below a picture, and blue lowers it. Each map has a strongest colour of its own, so the
map of a small value may look as strong as that of a large one: compare the values.</small></p>
<main>
{cards}
</main></body></html>
"""


@dataclass
class Card:
    """A picture of the gallery.

    Attributes:
        name: of the picture.
        sheet: the sheet, of which the large pictures are shown.
        label: the predicted class, or None.
        truth: the class of its folder, or None.
        right: whether they are the same, or None.
        anomaly: how unlike the training set it is, or None.
        value: the value of what is explained, or None.
        note: what else is to be known of it, such as that it is unlike the training pictures; empty: nothing.
        passes: whether it is as good parts are; None: there is no threshold.
    """

    name: str
    sheet: Any
    label: Any
    truth: Any
    right: bool | None
    anomaly: float | None
    value: float | None = None
    note: str = ""
    passes: bool | None = None


class Gallery:
    """Cards of all pictures.

    Args:
        name: of the folder of pictures.
        explained: what the maps explain.
    """

    def __init__(self, name: str, explained: str) -> None:
        self._name, self._explained = name, explained
        self._cards: list[tuple[float, str]] = []
        self._wrong = self._judged = self._failed = self._tested = 0

    def add(self, card: Card) -> None:
        """Add a card; its picture is kept small."""
        judged, wrong = card.right is not None, card.right is False
        self._judged += judged
        self._wrong += wrong
        self._tested += card.passes is not None
        self._failed += card.passes is False
        picture = card.sheet.crop(card.sheet.info["pictures"])
        picture.thumbnail((_WIDTH, _WIDTH))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=_QUALITY)
        words = [html.escape(card.name)]
        if card.label is not None:
            verdict = f", labelled {card.truth}" if wrong else ", right" if judged else ""
            words.insert(0, f"<b>{html.escape(f'{card.label}{verdict}')}</b>")
        if card.anomaly is not None:
            verdict = "" if card.passes is None else "pass: " if card.passes else "fail: "
            words.insert(0, f"<b>{verdict}anomaly {card.anomaly:.3g}</b>")
        elif card.value is not None:
            words.insert(1, f"value {card.value:.3g}")
        if card.note:
            words.insert(1, f"<i>{html.escape(card.note)}</i>")
        bad, good = wrong or card.passes is False, judged or card.passes is True
        mark = "unlike" if card.note else "wrong" if bad else "right" if good else ""
        text = base64.b64encode(file.getvalue()).decode()
        self._cards.append((
            float(not wrong) if card.anomaly is None else -card.anomaly,
            f'<figure class="{mark}">'
            f'<img loading="lazy" src="data:image/jpeg;base64,{text}" alt="{html.escape(card.name)} with its map">'
            f"<figcaption>{'<br>'.join(words)}</figcaption></figure>",
        ))

    def write(self, path: Path) -> None:
        """Write the page."""
        summary = f"{len(self._cards)} pictures. The maps explain: {html.escape(self._explained)}."
        if self._judged:
            wrong = f"{self._wrong} predicted wrongly, shown first" if self._wrong else "all predicted rightly"
            summary += f" Of the {self._judged} with a label, {wrong}."
        if self._tested:
            summary += f" {self._failed} of {self._tested} fail: their anomaly is above the threshold."
        cards = "\n".join(text for _, text in sorted(self._cards, key=lambda card: card[0]))
        title = html.escape(f"Maps of {self._name}")
        path.write_text(_PAGE.format(title=title, summary=summary, cards=cards), encoding="utf-8")
