"""The command that draws maps of a folder of pictures."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.runtime.files import name_path
from pytorch_grad_cam_pcasvm.studio.cli.folders import find_normal, refuse_bad, tell_bad
from pytorch_grad_cam_pcasvm.studio.cli.gallery import Card, Gallery
from pytorch_grad_cam_pcasvm.studio.cli.preparation import open_folder, tell_whites
from pytorch_grad_cam_pcasvm.studio.data import class_folders, list_photos, name_classes
from pytorch_grad_cam_pcasvm.studio.model.preparation import Preparation

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
    if (outside := sheets.outside_share(outputs, row)) is not None:
        numbers[f"outside of {sheets.about['expressing']} components"] = outside
    shares = {f"share of {name}": share for name, share in sheets.shares(outputs, row).items()}
    judged.label = None if shares else judged.label
    judged.anomaly = next((number for title, number in numbers.items() if title.startswith("anomaly")), None)
    first = next((k for k, title in enumerate(titles) if not title.startswith("component ")), 0)
    if "values_error" in outputs:
        error = float(outputs["values_error"][row, first])
        numbers = _insert_errors(numbers, titles[first], error, sheets.sure_share(outputs, row, first))
    said = sheets.said(outputs, row, first)
    if judged.anomaly is not None:
        said = "; ".join(filter(None, (sheets.about.get("anomaly", ""), sheets.reason(outputs, row))))
    card = Card(name, sheet, judged, shares | numbers, said, note)
    card.sure = sheets.sure_share(outputs, row)
    if "strongest" not in sheets.about:  # whose maps are of one position, another in each picture
        card.map, card.paint = sheets.signed_map(outputs, row, first), sheets.paint
    return card


def _insert_errors(numbers: dict[str, float], title: str, error: float, share: float | None) -> dict[str, float]:
    """Return numbers with the standard error of one of them behind it, and which share of its map's evidence is sure.

    Both are NaN where nothing is known: of a component that is not stable, and of negative parts that a method makes
    anew.
    """
    place = [*numbers].index(title) + 1
    items = [*numbers.items()]
    known = float("nan") if share is None or error != error else share
    return dict([*items[:place], ("error", error), ("sure", known), *items[place:]])


def explain(options: Any) -> None:
    """Draw maps of pictures, and write the targets' values; with a file, torch is not imported."""
    is_file = options.model.suffix == ".onnx"
    if not list_photos(options.images) or not is_file:  # a file takes any arrangement
        name_classes(options.images)
    from tqdm.auto import tqdm

    from pytorch_grad_cam_pcasvm.studio.cli.suggesting import Suggestions
    from pytorch_grad_cam_pcasvm.studio.pictures.panels import UNKNOWN

    bad: list[str] = []
    found = Suggestions(options.out, options.regions)
    start = _with_file if is_file else _with_network
    count, drawn, region = start(options, bad, found)
    first = list(islice(drawn, 1))  # what is wrong with all is said before anything is written
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    explained = next((title for title in first[0].numbers if not title.startswith("share of")), "") if first else ""
    dense = explained.endswith(" where strongest")
    gallery, values = Gallery(options.images.name, explained, dense=dense), out / "values.csv"
    with name_path(values), values.open("w", newline="", encoding="utf-8") as file:
        cards = tqdm(chain(first, drawn), total=count, unit="image", leave=False, delay=_PATIENCE)
        is_whole = _write_cards(cards, gallery, csv.writer(file), out, explained)
    tell_bad(bad)
    with name_path(out / "index.html"):
        gallery.write(out / "index.html")
    done = f"{len(gallery)} image{'s' * (len(gallery) != 1)}" if is_whole else f"{len(gallery)} of {count} images"
    print(f"wrote maps of {done} and {values}")
    found.write()
    print(*gallery.list_outcomes(), sep="\n", end="\n" * bool(gallery.list_outcomes()))
    if region is not None:
        region.tell()
    if not gallery.tells_sure and not gallery.has_anomalies:
        print(f"{UNKNOWN[0].lower()}{UNKNOWN[1:]}")
    print(f"open {(out / 'index.html').resolve().as_uri()}")
    if not is_whole:
        raise KeyboardInterrupt


def _write_cards(cards: Iterable[Card], gallery: Gallery, table: Any, out: Path, explained: str) -> bool:
    """Write the sheets and numbers of cards, and add them to the gallery; return False if that is interrupted."""
    written = set[Path]()
    try:
        for card in cards:
            path = out / Path(card.name).with_suffix(".png")
            if path in written:  # of a picture of the same name, but for its ending
                path = out / f"{card.name}.png"
            with name_path(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                card.sheet.save(path, compress_level=_COMPRESSION)
            if not written:
                table.writerow(_name_columns(card))
            table.writerow(_list_values(card))
            written.add(path)
            card.value, card.file = card.numbers.get(explained), path.relative_to(out).as_posix()
            gallery.add(card)
    except KeyboardInterrupt:
        return False
    return True


def _name_columns(card: Card) -> list[str]:
    """Return the titles of the table's columns."""
    judged = card.judged
    own = ["labelled"] * (judged.truth is not None) + ["verdict"] * (judged.passes is not None)
    return ["image", "predicted", *own, *(_COLUMNS.get(title, title) for title in card.numbers), "note"]


def _list_values(card: Card) -> list[str]:
    """Return the row of a picture in the table."""
    judged = card.judged
    own = ["" if judged.label is None else str(judged.label)]
    own += [] if judged.truth is None else [str(judged.truth)]
    own += [] if judged.passes is None else ["pass" if judged.passes else "fail"]
    numbers = ("" if number != number else f"{number:.9g}" for number in card.numbers.values())
    return [card.name, *own, *numbers, card.note]


def _with_file(options: Any, bad: list[str], found: Any) -> tuple[int, Iterator[Card], None]:
    """Return the number of pictures, and their explanations by a file; unreadable ones go to ``bad``.

    Regions, if they are wanted, go to ``found``.
    """
    from pytorch_grad_cam_pcasvm.studio.export.explainer import Explainer
    from pytorch_grad_cam_pcasvm.studio.pictures.frames import find_frame
    from pytorch_grad_cam_pcasvm.studio.pictures.read import UnreadableImageError

    paths, folder = list_photos(options.images), options.images
    folder = folder if folder.is_dir() else folder.parent
    explainer = Explainer(options.model)
    explainer.outline = options.outline
    names = class_folders(folder)
    explainer.good = find_normal(names)
    said = explainer.about["input"]
    found.check_model(explainer.about)
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
        sheet, note = explainer.sheet(picture, outputs, truth=truth), explainer.unlike(outputs)
        frame = find_frame(picture.size, (said["shape"][1], said["shape"][2]), said["resize"])
        found.add(name, path, picture, explainer, outputs, 0, frame, reading=said)
        yield _make_card(name, explainer, outputs, 0, sheet, truth, note)

    return len(paths), (one for path in paths for one in drawn(path)), None


def _list_unreadable(explainer: Any, folder: Path, paths: Sequence[Path]) -> dict[str, str]:
    """Return the reasons why pictures cannot be read, by name."""
    from pytorch_grad_cam_pcasvm.studio.pictures.read import UnreadableImageError

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
    return shares.argsort(descending=True, stable=True)[:, :most].tolist()


def _with_network(options: Any, bad: list[str], found: Any) -> tuple[int, Iterator[Card], Any]:
    """Return the number of pictures, their explanations by a network, and the region that is typed, or None.

    Unreadable pictures go to ``bad``; regions that are found, if they are wanted, to ``found``.
    """
    from pytorch_grad_cam_pcasvm import are_unlike_training
    from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies
    from pytorch_grad_cam_pcasvm.network.modules import find_device
    from pytorch_grad_cam_pcasvm.studio.cli.copies import find_trained
    from pytorch_grad_cam_pcasvm.studio.cli.models import choose_targets, make_cam, open_model
    from pytorch_grad_cam_pcasvm.studio.cli.region import RegionShares
    from pytorch_grad_cam_pcasvm.studio.data.images import Images, as_picture
    from pytorch_grad_cam_pcasvm.studio.export.outputs import about, describe_range, name_outputs
    from pytorch_grad_cam_pcasvm.studio.pictures.frames import WHOLE, find_frame
    from pytorch_grad_cam_pcasvm.studio.pictures.sheets import Sheets

    model = open_model(options)
    net, preparation = model.net, model.preparation
    targets = choose_targets(options, net)
    found.check_model(about(targets, net), knows_frame=preparation.steps is not None)
    cam = make_cam(options, model)
    images = Images(open_folder(options, preparation), thumbnails=0)
    originals, trained = _keep_originals(images.data), find_trained(model, images.data.paths)
    names = [images.id(row) for row in range(len(images))]
    region = None if options.region is None else RegionShares.of(options.region, preparation, names, images.data.paths)
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
        if maps.error is not None:
            outputs |= {"sure": maps.sure().cpu().numpy(), "values_error": maps.values_error.double().cpu().numpy()}
        far, where, inside = are_unlike_training(maps.output), list[Any](), list[dict[str, float]]()
        if region is not None:
            seen = [originals[Path(images.data.paths[row])].size for row in batch.rows]
            size = x.shape[2], x.shape[3]
            where = [region.draw(row, shape, size) for row, shape in zip(batch.rows, seen, strict=True)]
            inside = region.measure(net, x, maps, sheets.decision or 0, where)
        for place, row in enumerate(batch.rows):
            picture: Any = as_picture(images.picture(batch.images[place].float()))
            frame: Any = WHOLE
            if steps is not None:  # the picture itself, in its own shape
                picture = originals[Path(images.data.paths[row])]
                frame = find_frame(picture.size, (x.shape[2], x.shape[3]), steps["resize"])
            truth = None if images.names is None else images.names[batch.labels[place]]
            strongest = [chosen.index(package.PCATarget(b)) for b in parts[place]]
            shown = [*range(len(decisions)), *strongest] if ranked else None
            note = sheets.unlike(outputs, place) or "unlike the training pictures" * far[place]
            sheet = sheets.drawn(picture, outputs, place, frame=frame, truth=truth, shown=shown, note=note)
            file = Path(images.data.paths[row])
            found.add(images.id(row), file, picture, sheets, outputs, place, frame, reading=preparation.reading)
            card = _make_card(images.id(row), sheets, outputs, place, sheet, truth, note)
            card.trained = images.data.paths[row] in trained
            if region is not None:
                card.numbers |= inside[place]
                card.said = "; ".join(filter(None, (card.said, region.describe(inside[place], where[place]))))
            yield card

    all_rows = range(len(images))
    together = 1 if preparation.varies else options.batch_size
    parts = [all_rows[first : first + together] for first in all_rows[::together]]
    anomalies = (net.anomaly_map(batch.images) for rows in parts if (batch := images.read(rows)).rows)
    ends = describe_range(net.head, anomalies) if net.is_dense and tells_anomalies(net.head) else {}
    return len(images), (one for rows in parts for one in drawn(rows)), region
