"""The command that draws maps of a folder of pictures, and their gallery: a page to filter, to sort and to mail."""

import base64
import csv
import html
import io
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.folders import find_normal, name_first, refuse_bad, tell_bad
from pytorch_grad_cam_pcasvm.cli.preparation import open_folder, tell_whites
from pytorch_grad_cam_pcasvm.data import class_folders, list_photos, name_classes
from pytorch_grad_cam_pcasvm.model.preparation import Preparation
from pytorch_grad_cam_pcasvm.runtime.files import name_path

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.export.explainer import Judgement


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
        self._judgements: list[Judgement] = []

    def add(self, card: Card) -> None:
        """Add a card; its picture is kept small."""
        judged, wrong = card.judged, card.judged.right is False
        self._judgements.append(judged)
        picture = card.sheet.crop(card.sheet.info["pictures"])
        picture.thumbnail((_WIDTH, _WIDTH))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=_QUALITY)
        bad = wrong or judged.passes is False or judged.outcome is not None
        is_well = judged.right or judged.is_compared or judged.passes
        mark = "unlike" if card.note else "wrong" if bad else "right" if is_well else ""
        text = base64.b64encode(file.getvalue()).decode()
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
        elif judged.right is not None or judged.is_compared:
            attributes["verdict"] = judged.outcome or ("wrong" if judged.right is False else "right")
        for name, word in attributes.items():
            self._choices[name].add(word)
        number = card.value if judged.anomaly is None else judged.anomaly
        attributes |= {"name": card.name} | ({} if number is None else {"value": f"{number:.9g}"})
        return "".join(f' data-{name}="{html.escape(word)}"' for name, word in attributes.items())

    def _controls(self) -> str:
        """Return the filters and sort orders of the page; a filter with one choice is left out."""
        value = "anomaly" if self._has_anomalies else "value"
        wrong = any(judged.right is False for judged in self._judgements)
        first = "most anomalous first" if self._has_anomalies else "wrong first" if wrong else "as in the folder"
        if any(judged.outcome for judged in self._judgements):
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

    @property
    def _has_anomalies(self) -> bool:
        """Whether the pictures have anomalies."""
        return any(judged.anomaly is not None for judged in self._judgements)

    def list_outcomes(self) -> list[str]:
        """Return how many faults are missed and how many good photos raise a false alarm, in words; [] if unknown.

        Good photos have the name of their class, which may be "Normal" of X-rays. Photos in folders whose names are no
        classes of the model are counted, too.
        """
        good = next((str(judged.truth) for judged in self._judgements if judged.is_good), "good")
        good = "good" if good.lower() == "good" else good  # a word like others in a sentence
        verdicts, sentences = _VERDICTS[any(judged.passes is not None for judged in self._judgements)], []
        for clause, is_good, verdict in zip(("missed", "alarms"), (False, True), verdicts, strict=True):
            outcomes = [one.outcome for one in self._judgements if one.is_compared and one.is_good == is_good]
            mistaken = len(outcomes) - outcomes.count(None)
            if outcomes:
                verdict = verdict.format(good=good)
                sentences.append(
                    _SUMMARY[clause].format(mistaken=mistaken, total=len(outcomes), good=good, verdict=verdict)
                )
        unknown = [one for one in self._judgements if one.is_of_other_classes]
        if unknown:
            absent = sorted({str(one.truth) for one in unknown})
            known = {str(one.label).lower(): str(one.label) for one in self._judgements}
            near = [known[name.lower()] for name in absent if name.lower() in known]
            names = name_first(absent) + (f" (did you mean {near[0]}?)" if near else "")
            sentences.append(_SUMMARY["unknown"].format(count=len(unknown), total=len(self._judgements), names=names))
        return sentences

    def write(self, path: Path) -> None:
        """Write the page."""
        summary = _SUMMARY["explained"].format(pictures=len(self._cards), explained=html.escape(self._explained))
        rights = [judged.right for judged in self._judgements if judged.right is not None]
        passes = [judged.passes for judged in self._judgements if judged.passes is not None]
        if rights:
            wrong = rights.count(False)
            summary += _SUMMARY["wrong" if wrong else "right"].format(judged=len(rights), wrong=wrong)
        if passes:
            summary += _SUMMARY["failed"].format(failed=passes.count(False), tested=len(passes))
        summary += "".join(f" {html.escape(words)}." for words in self.list_outcomes())
        cards = "\n".join(text for _, text in sorted(self._cards, key=lambda card: card[0]))
        where = _WHERE_ANOMALIES if self._has_anomalies else _WHERE
        template = string.Template((Path(__file__).parent / "gallery.html").read_text(encoding="utf-8"))
        page = template.substitute(
            title=html.escape(f"Maps of {self._name}"), summary=summary, choices=self._controls(), cards=cards,
            where=where if self.dense else "", map="last picture" if self.dense else "map",
        )  # fmt: skip
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


_COLUMNS = {"predicted class": "margin of predicted"}  # what a table calls values, beside the class itself
_PATIENCE = 3.0  # seconds, after which there is a progress bar
_COMPONENTS = 3  # that are drawn, those that carry most of the decision
_COMPRESSION = 1  # of PNG: a tenth larger than by default, in a quarter of the time


def _make_card(name: str, sheets: Any, outputs: Any, row: int, sheet: Any, truth: str | None, note: str = "") -> Card:
    """Return the card of a picture: its sheet, numbers, and remarks."""
    titles = sheets.about["titles"]
    numbers = dict(zip(titles, outputs["values"][row].tolist(), strict=True))
    if "components" in outputs and outputs["components"].ndim == 2:  # all, whichever are drawn
        numbers = {title: number for title, number in numbers.items() if not title.startswith("component ")}
        numbers |= {f"component {b + 1}": number for b, number in enumerate(outputs["components"][row].tolist())}
    judged = sheets.judge(outputs, row, truth)
    if judged.anomaly is not None and not any(title.startswith("anomaly") for title in numbers):
        numbers = {"anomaly": judged.anomaly} | numbers
    if judged.passes is not None:
        numbers["threshold"] = sheets.about["threshold"]
    shares = {f"share of {name}": share for name, share in sheets.shares(outputs, row).items()}
    judged.label = None if shares else judged.label
    judged.anomaly = next((number for title, number in numbers.items() if title.startswith("anomaly")), None)
    first = next((k for k, title in enumerate(titles) if not title.startswith("component ")), 0)
    said = sheets.said(outputs, row, first) if judged.anomaly is None else sheets.about.get("anomaly", "")
    return Card(name, sheet, judged, shares | numbers, said, note)


def explain(options: Any) -> None:
    """Draw maps of pictures, and write the targets' values; with a file, torch is not imported."""
    is_file = options.model.suffix == ".onnx"
    if not list_photos(options.images) or not is_file:  # a file takes any arrangement
        name_classes(options.images)
    from tqdm.auto import tqdm

    bad: list[str] = []
    count, drawn = _with_file(options, bad) if is_file else _with_network(options, bad)
    first = list(islice(drawn, 1))  # what is wrong with all is said before anything is written
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    explained = next((title for title in first[0].numbers if not title.startswith("share of")), "") if first else ""
    dense = explained.endswith(" where strongest")
    gallery, written = Gallery(options.images.name, explained, dense=dense), set[Path]()
    values = out / "values.csv"
    with name_path(values), values.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        for card in tqdm(chain(first, drawn), total=count, unit="image", leave=False, delay=_PATIENCE):
            judged = card.judged
            has_truth = judged.truth is not None
            if not file.tell():
                verdict = [] if judged.passes is None else ["verdict"]
                titles = [_COLUMNS.get(title, title) for title in card.numbers]
                table.writerow(["image", "predicted", *["labelled"][:has_truth], *verdict, *titles, "note"])
            words = ["" if judged.label is None else judged.label, *[judged.truth][:has_truth]]
            words += [] if judged.passes is None else ["pass" if judged.passes else "fail"]
            table.writerow([card.name, *words, *(f"{number:.9g}" for number in card.numbers.values()), card.note])
            path = out / Path(card.name).with_suffix(".png")
            if path in written:  # of a picture of the same name, but for its ending
                path = out / f"{card.name}.png"
            written.add(path)
            with name_path(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                card.sheet.save(path, compress_level=_COMPRESSION)
            card.value, card.file = card.numbers.get(explained), path.relative_to(out).as_posix()
            gallery.add(card)
    tell_bad(bad)
    with name_path(out / "index.html"):
        gallery.write(out / "index.html")
    done = count - len(bad)
    print(f"wrote maps of {done} image{'s' * (done != 1)} and {values}")
    print(*gallery.list_outcomes(), sep="\n", end="\n" * bool(gallery.list_outcomes()))
    print(f"open {(out / 'index.html').resolve().as_uri()}")


def _with_file(options: Any, bad: list[str]) -> tuple[int, Iterator[Card]]:
    """Return the number of pictures, and their explanations by a file; unreadable ones go to ``bad``."""
    from pytorch_grad_cam_pcasvm.export.explainer import Explainer, UnreadableImageError

    paths, folder = list_photos(options.images), options.images
    folder = folder if folder.is_dir() else folder.parent
    explainer = Explainer(options.model)
    explainer.outline = options.outline
    names = class_folders(folder)
    explainer.good = find_normal(names)
    said = explainer.about["input"]
    if options.tiff_page:
        said["page"] = options.tiff_page
    tell_whites(Preparation(explainer.prepared, None, None, said.get("white_level"), page=said.get("page")), paths)

    def drawn(path: Path) -> Iterator[Card]:
        name = path.relative_to(folder).as_posix()
        try:
            picture = explainer.read(path)
        except UnreadableImageError:
            if not options.skip_bad_images:
                refuse_bad(options, _list_unreadable(explainer, folder, paths[paths.index(path) :]))
            bad.append(name)
            return
        outputs = explainer(explainer.prepared(picture)[None])
        truth = name.split("/")[0] if "/" in name and names else None
        yield _make_card(name, explainer, outputs, 0, explainer.sheet(picture, outputs, truth=truth), truth)

    return len(paths), (one for path in paths for one in drawn(path))


def _list_unreadable(explainer: Any, folder: Path, paths: Sequence[Path]) -> dict[str, str]:
    """Return the reasons why pictures cannot be read, by name."""
    from pytorch_grad_cam_pcasvm.export.explainer import UnreadableImageError

    bad = {}
    for path in paths:
        try:
            explainer.read(path)
        except UnreadableImageError as error:
            bad[path.relative_to(folder).as_posix()] = error.reason
    return bad


def _keep_originals(folder: Any) -> dict[Path, Any]:
    """Return the photos that a folder reads from now on, by their paths: each is decoded once, and drawn, too."""
    read, originals = folder.loader, dict[Path, Any]()

    def keep(path: Any) -> Any:
        originals[Path(path)] = picture = read(path)
        return picture

    folder.loader = keep
    return originals


def _rank_components(net: Any, x: Any, decision: Any, most: int) -> list[list[int]]:
    """Return the components that carry most of a decision, the strongest first, for each image."""
    import torch

    from pytorch_grad_cam_pcasvm.maps import decision_shares

    with torch.no_grad():
        shares = decision_shares(net(x), decision).abs()
    return shares.argsort(descending=True, stable=True)[:, :most].tolist()  # type: ignore[no-any-return]


def _with_network(options: Any, bad: list[str]) -> tuple[int, Iterator[Card]]:
    """Return the number of pictures, and their explanations by a network; unreadable ones go to ``bad``."""
    from pytorch_grad_cam_pcasvm.cli.models import choose_targets, make_cam, open_model
    from pytorch_grad_cam_pcasvm.data.images import Images, as_picture
    from pytorch_grad_cam_pcasvm.export.explainer import WHOLE, Sheets, find_frame
    from pytorch_grad_cam_pcasvm.export.outputs import about, describe_range, name_outputs
    from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies
    from pytorch_grad_cam_pcasvm.methods.warn_once import are_unlike_training
    from pytorch_grad_cam_pcasvm.network.modules import find_device

    model = open_model(options)
    net, preparation = model.net, model.preparation
    targets = choose_targets(options, net)
    cam = make_cam(options, model)
    images = Images(open_folder(options, preparation), thumbnails=0)
    originals = _keep_originals(images.data)
    steps, most = preparation.steps, options.components or _COMPONENTS
    decisions = [target for target in targets if not isinstance(target, package.PCATarget)]
    # Where components are wanted, and carry a decision.
    ranked = len(decisions) < len(targets) and net.head.decision_position is not None and not net.is_dense

    def drawn(rows: range) -> Iterator[Card]:
        originals.clear()
        batch = images.read(rows)
        if batch.bad and not options.skip_bad_images:
            rest = images.read(range(rows.stop, len(images))).bad
            refuse_bad(options, {images.id(row): reason for row, reason in (batch.bad | rest).items()})
        bad.extend(map(images.id, batch.bad))
        if not batch.rows:
            return
        x = batch.images.to(find_device(net))
        chosen, parts = targets, [[]] * len(x)  # type: list[Any], list[list[int]]
        if ranked:
            parts = _rank_components(net, x, decisions[0], most)
            carrying = sorted({b for of_image in parts for b in of_image})
            chosen = [*decisions, *map(package.PCATarget, carrying)]
        maps = cam.explain(x, chosen)
        sheets = Sheets(about(maps.targets, net) | ends)
        sheets.outline, sheets.good = options.outline, find_normal(images.names)
        outputs = {name: tensor.double().cpu().numpy() for name, tensor in name_outputs(maps).items()}
        for place, (row, far) in enumerate(zip(batch.rows, are_unlike_training(maps.output), strict=True)):
            picture: Any = as_picture(images.picture(batch.images[place].float()))
            frame: Any = WHOLE
            if steps is not None:  # the picture itself, in its own shape
                picture = originals[Path(images.data.paths[row])]
                frame = find_frame(picture.size, (x.shape[2], x.shape[3]), steps["resize"])
            truth = None if images.names is None else images.names[batch.labels[place]]
            strongest = [chosen.index(package.PCATarget(b)) for b in parts[place]]
            shown = [*range(len(decisions)), *strongest] if ranked else None
            note = "unlike the training pictures" if far else ""
            sheet = sheets.drawn(picture, outputs, place, frame=frame, truth=truth, shown=shown, note=note)
            yield _make_card(images.id(row), sheets, outputs, place, sheet, truth, note)

    all_rows = range(len(images))
    together = 1 if preparation.varies else options.batch_size
    parts = [all_rows[first : first + together] for first in all_rows[::together]]
    anomalies = (net.anomaly_map(batch.images) for rows in parts if (batch := images.read(rows)).rows)
    ends = describe_range(net.head, anomalies) if net.is_dense and tells_anomalies(net.head) else {}
    return len(images), (one for rows in parts for one in drawn(rows))
