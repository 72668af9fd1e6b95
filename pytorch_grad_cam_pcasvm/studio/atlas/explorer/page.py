"""The page: the shown parts of an atlas as JSON, in files that a browser opens from the file system, or in one file."""

import base64
import hashlib
import html
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.maps.recombination import decision_steps, take_tail
from pytorch_grad_cam_pcasvm.runtime.files import atomically, check_folder, has_mark, name_path
from pytorch_grad_cam_pcasvm.runtime.log import progress_bar
from pytorch_grad_cam_pcasvm.studio.atlas.explorer.machine import json_text, machine_data, packed
from pytorch_grad_cam_pcasvm.targets import SVMTarget
from pytorch_grad_cam_pcasvm.targets.catalogue import describe_meaning

BLOCK = 256  # rows that are read at a time
SAVED = "head of the atlas"

_CHUNK = 2**17  # bytes of maps that the page loads at a time
_PICTURES = 32  # thumbnails that it loads at a time
_MOST_DECISIONS = 4_000_000  # numbers of one head that the page loads at once
_MOST_GROUPS = 200  # classes of which there are mean maps
_MOST_NUMBERED = 1000  # integers as labels: with more they are no classes
_AT_ONCE = 1024  # rows through a head
_TASKS = {"one class": "one-class", "likeness": "anomaly", "value": "regression"}  # by the subject of a vote


class Contents:
    """What the page shows of an atlas.

    Args:
        store: the atlas.
        heads: further heads on its components, by their names; None stands for the atlas's own.
        normal: the class that is an absence; None: the one that the head knows, if any.

    Raises:
        ValueError: the maps are of volumes, not images; the atlas has no rows; or a head takes other components.
    """

    def __init__(self, store: Any, heads: Mapping[str, Any] | None, normal: Any = None) -> None:
        if not len(store):
            raise ValueError("the atlas has no rows: there is nothing to show")
        first = store.maps([0])
        if first.maps.dim() != 4:
            raise ValueError(
                f"the explorer draws maps (H, W), but those of this atlas are volumes {tuple(first.maps.shape[2:])}: "
                "use store.maps(rows).positive(size) and a volume viewer, or build an atlas of slices"
            )
        self.store, self.normal = store, store.head.normal if normal is None else normal
        if normal is not None:
            store.head.class_index(normal)  # which refuses what is no class
        self.count, self.height, self.width = first.maps.shape[1:]
        self.opposite = first.opposite is not None
        row_bytes = (2 if self.opposite else 1) * 2 * self.count * self.height * self.width
        self.rows_per_chunk = 1 << max(0, min(BLOCK, _CHUNK // row_bytes).bit_length() - 1)
        self.label_names, self.labels = self._labels()
        self.heads = self._heads(heads)
        self.groupings: dict[str, list[str]] = {}
        if self.label_names is not None and len(self.label_names) <= _MOST_GROUPS:
            self.groupings["label"] = [self.label_names[i] for i in self.labels]
        of_images = store.places is None  # means over patches at many places say little
        has_classes = of_images and store.predictions is not None and store.head.classes_ is not None
        if has_classes and len(store.head.classes_) <= _MOST_GROUPS:
            self.groupings["prediction"] = store.names(store.predictions)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield the parts that the page needs to open, with their names: all but maps, means and pictures."""
        store = self.store
        manifest = {key: store.manifest.get(key) for key in ("method", "target_layer", "backbone")}
        yield (
            "atlas",
            {
                **{key: None if value is None else str(value) for key, value in manifest.items()},
                "versions": {str(name): str(version) for name, version in store.manifest.get("versions", {}).items()},
                "addsUp": bool(store.manifest["adds_up"]),
                "linear": bool(store.manifest["linear"]),
                "rows": len(store),
                "unit": "image" if store.places is None else "patch",
                "components": self.count,
                "height": self.height,
                "width": self.width,
                "rowsPerChunk": self.rows_per_chunk,
                "opposite": self.opposite,
                "rowsPerPictures": _PICTURES,
                "labels": self.label_names,
                "heads": [about for _, _, about, _ in self.heads],
                "means": list(self.groupings),
                "sure": store.decision_errors is not None,
                "unstable": [] if store.head.resamples is None else store.head.resamples.unstable,
            },
        )
        baseline = store.baseline_values
        if baseline is not None and bool((baseline == baseline[:1]).all()):
            baseline = baseline[:1]  # as where it is no activation at all
        remainder, log_scale = store.remainder, np.asarray(store.log_scale)
        yield (
            "rows",
            {
                "ids": [str(name) for name in store.ids],
                "components": packed(np.asarray(store.components, np.float64)),
                "labels": None if self.labels is None else packed(self.labels),
                "numbers": None if self.numbers is None else packed(self.numbers),
                "images": None if store.places is None else packed(store.rows.astype(np.int32)),
                "baseline": None if baseline is None else packed(np.asarray(baseline, np.float64)),
                "remainder": packed(np.asarray(remainder, np.float64)) if np.any(remainder) else None,
                "logScale": packed(log_scale.astype(np.float64)) if np.any(log_scale) else None,
            },
        )
        for number, (tail, fitted, _, values) in enumerate(self.heads):
            neutral = store.manifest.get("neutral") and baseline is not None
            start = np.asarray(baseline[0], np.float64) if neutral else None
            machine = machine_data(tail, np.asarray(store.components), start)
            steps = self._steps(fitted) if tail.enumerated is not None and store.manifest["adds_up"] else None
            errors = store.decision_errors if number == 0 and fitted is store.head else None
            values["errors"] = None if errors is None else packed(errors)
            yield f"head-{number}", {**values, "machine": machine, "steps": steps, "examples": _list_examples(fitted)}

    def _steps(self, head: Head) -> dict[str, Any]:
        """Return how the decision for each row's predicted class is composed: secants and starts, each (R, B)."""
        parts = []
        for start in range(0, len(self.store), BLOCK):
            components = self.store.maps(np.arange(start, min(start + BLOCK, len(self.store))))
            slopes, starts, log_scale = decision_steps(components, head, SVMTarget())
            parts.append((slopes * log_scale.exp().unsqueeze(-1), starts))
        columns = (torch.cat(tensors).double().numpy() for tensors in zip(*parts, strict=True))
        return dict(zip(("slopes", "starts"), map(packed, columns), strict=True))

    def means(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the mean maps of all components by label, and by prediction."""
        for by, names in self.groupings.items():
            means = self.store.mean_maps(by=np.array(names))
            yield (
                f"means-{by}",
                {
                    "groups": [str(group) for group in means[0].groups],
                    "counts": [int(count) for count in means[0].counts],
                    "maps": packed(np.stack([np.asarray(mean.maps, np.float32) for mean in means])),
                },
            )

    def blocks(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield for every block the number of rows, and chunks of maps and of pictures by name."""
        for start in range(0, len(self.store), BLOCK):
            rows = np.arange(start, min(start + BLOCK, len(self.store)))
            yield len(rows), self._maps(rows) | self._list_pictures(rows)

    def _maps(self, rows: np.ndarray) -> dict[str, Any]:
        maps = self.store.maps(rows)
        size, chunks = self.rows_per_chunk, {}
        sure = self.store.sure(rows)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            chunk = {"maps": _pack_maps(maps.maps[part], maps.nu[part]), "nu": packed(maps.nu[part].float().numpy())}
            if self.opposite:
                chunk["opposite"] = _pack_maps(maps.opposite[part], maps.nu[part])
            if sure is not None:
                chunk["sure"] = packed(sure[part])
            chunks[f"maps-{(int(rows[0]) + start) // size:05d}"] = chunk
        return chunks

    def _list_pictures(self, rows: np.ndarray) -> dict[str, Any]:
        chunks = {}
        for start in range(0, len(rows), _PICTURES):
            thumbnails = self.store.thumbnails(rows[start : start + _PICTURES])
            texts = [base64.b64encode(data).decode("ascii") for data in thumbnails]
            chunks[f"pictures-{(int(rows[0]) + start) // _PICTURES:05d}"] = texts
        return chunks

    def _labels(self) -> tuple[list[str] | None, Any]:
        """Return the names of all labels, classes of the head first, and each row's position among them.

        Labels that are no classes but numbers, as those of a regression, are kept as such.
        """
        labels = self.store.labels
        self.numbers = None
        if labels is None or self.store.places is not None:  # those of patches are of their images
            return None, None
        dtype_kind = np.asarray(labels).dtype.kind
        if dtype_kind == "f" or (dtype_kind in "iu" and len(np.unique(labels)) > _MOST_NUMBERED):
            self.numbers = np.asarray(labels, np.float64)
            return None, None
        shown = self.store.names(labels)
        classes = self.store.head.classes_
        names = list(dict.fromkeys([*([] if classes is None else self.store.names(classes)), *sorted(set(shown))]))
        position = {name: number for number, name in enumerate(names)}
        return names, np.array([position[name] for name in shown], np.int32)

    def _heads(self, heads: Mapping[str, Any] | None) -> list[tuple[Head, Head, dict[str, Any], dict[str, Any]]]:
        """Return, for every head with a machine, the part behind the components, the head, its kind and its results."""
        heads_by_name = {SAVED: None} | {str(name): head for name, head in (heads or {}).items()}
        entries = []
        for name, head in heads_by_name.items():
            fitted = self.store.head if head is None else Head.of(head)
            try:
                tail = take_tail(fitted, self.count, self.store.head, self.store.head.n_features)
            except ValueError as error:
                raise ValueError(f"head {name!r}: {error}") from error
            if tail is None or tail.decision_position is None:
                if head is not None:
                    raise ValueError(f"head {name!r} has no SVM after its components: there is nothing to decide")
                continue
            entries.append((tail, fitted, *self._of_head(name, tail)))
        return entries

    def _of_head(self, name: str, tail: Head) -> tuple[dict[str, Any], dict[str, Any]]:
        classes = None if tail.classes_ is None else self.store.names(tail.classes_)
        values = decided(tail, np.asarray(self.store.components, np.float64))
        correct = None
        if classes is not None and self.label_names is not None:
            shown = [self.label_names[i] for i in self.labels]
            if set(shown) & set(classes):
                pairs = zip(shown, values["predictions"].tolist(), strict=True)
                correct = np.array([label == classes[index] for label, index in pairs], np.uint8)
        labels = [] if tail.classes_ is None else tail.classes_.tolist()
        is_stored = self.normal in labels and tail.enumerated is None  # of which only the predicted class is stored
        about = {
            "name": name,
            "kind": _TASKS.get(tail.voting.about, "classes"),
            "classes": classes,
            "judged": correct is not None,
        }
        about["meaning"] = None if classes is None else describe_meaning(SVMTarget(), tail)
        about["normal"] = labels.index(self.normal) if is_stored else None
        return about, {
            **{key: None if array is None else packed(array) for key, array in values.items()},
            "correct": None if correct is None else packed(correct),
        }


def _list_examples(head: Head) -> dict[str, list[str]]:
    """Return name and picture of the training images that a head comes with, by their row."""
    return {str(row): [name, base64.b64encode(data).decode("ascii")] for row, (name, data) in head.examples.items()}


def decided(tail: Head, components: np.ndarray) -> dict[str, Any]:
    """Return a head's results for all rows: predictions, the classes that came second, margins and decision values.

    Args:
        tail: the part of the head after the components.
        components: shape (R, B).

    Returns:
        Positions among the classes, int32 (R,), or None without classes: ``predictions``, and by their scores ``first``
        and ``second``. ``margins`` (R,): the value of the predicted class, or of the machine. ``decisions`` (R, P), or
        None if there are too many.
    """
    names = ("predictions", "first", "second", "margins", "decisions")
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    keeps = len(components) * int(tail.stages[-1].n_outputs) <= _MOST_DECISIONS
    voting, has_classes = tail.voting, tail.classes_ is not None
    with torch.no_grad():
        for start in range(0, len(components), _AT_ONCE):
            decision = tail(torch.from_numpy(components[start : start + _AT_ONCE])).values[-1]
            predicted = voting.predicted(decision) if has_classes else torch.zeros(len(decision), dtype=torch.long)
            parts["margins"].append((voting.seed(predicted, None) * decision).sum(-1).float())
            if keeps:
                parts["decisions"].append(decision.float())
            if has_classes:
                # Where votes are equal, the prediction need not have the best score.
                ranking = voting.ranking(decision)
                first = ranking.argmax(-1)
                second = ranking.scatter(-1, first.unsqueeze(-1), -torch.inf).argmax(-1)
                for name, index in (("predictions", predicted), ("first", first), ("second", second)):
                    parts[name].append(index.int())
    return {name: torch.cat(tensors).numpy() if tensors else None for name, tensors in parts.items()}


def _pack_maps(maps: torch.Tensor, nu: torch.Tensor) -> dict[str, Any]:
    """Return maps divided by nu in half precision, which is how an atlas keeps them."""
    divisor = torch.where(nu > 0, nu, 1.0).reshape(*nu.shape, 1, 1)
    return packed((maps / divisor).to(torch.float16).numpy())


_PACKAGE = Path(__file__).parent
_STYLE = "explorer.css"
_MARK = "pytorch_grad_cam_pcasvm explorer"  # in every page, and in the style sheet of every folder

_SCRIPT = re.compile(r'<script src="([a-z]+\.js)"></script>')
_LINK = f'<link rel="stylesheet" href="{_STYLE}">'
_DATA = "<!-- data -->"
_POLICY = re.compile(r'(<meta http-equiv="Content-Security-Policy" content=")[^"]*(">)')


def write_page(
    store: Any,
    out: str | Path,
    *,
    heads: Mapping[str, Any] | None = None,
    single_file: bool = False,
    normal: Any = None,
) -> Path:
    """Write the explorer of an atlas: a page that opens offline from the file system and contacts no server.

    Args:
        store: the atlas, as returned by ``atlas.load``.
        out: a new or empty folder, or one with an earlier explorer, which is replaced; with ``single_file`` also a file
            name ending in ``.html``.
        heads: further heads to choose from on the page, by name: fitted estimators or :class:`Head`, with the reduction
            that the atlas was built with, or fitted on its components.
        single_file: write one file, which is easy to send. This suits a few thousand images; with more, a folder opens
            faster.
        normal: the class that is an absence; None: the one that the head knows, if any.

    Returns:
        The path of the page.

    Raises:
        FileExistsError: the folder contains something else, or the file is not an explorer.
        ValueError: the maps are volumes, or a head takes other components.
    """
    contents = Contents(store, heads, normal)
    target = Path(out)
    page = target if single_file and target.suffix.lower() in (".html", ".htm") else target / "index.html"
    with _one_file(page) if single_file else _folder(target) as text:
        for name, value in chain(contents.items(), contents.means()):
            text(name, json_text(value))
        with progress_bar(None, total=len(store), desc="explorer", unit="image") as bar:
            for count, chunks in contents.blocks():
                for name, chunk in chunks.items():
                    text(name, json_text(chunk))
                bar.update(count)
    return page


@contextmanager
def _folder(folder: Path) -> Iterator[Callable[[str, str], Any]]:
    """Write a page in a folder, its data, in ASCII and by name, in scripts that are loaded when they are needed."""
    check_folder(folder, _STYLE, _MARK, "explorer")
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").unlink(missing_ok=True)
    # First of all, so that a folder whose writing was stopped is known as one of an explorer.
    _write(folder / _STYLE, _source(_STYLE))
    for old in data.glob("*.js"):
        old.unlink()
    for script in _SCRIPT.findall(_source("index.html")):
        _write(folder / script, _source(script))
    # As a string: an object literal would give keys such as __proto__ a meaning.
    yield lambda name, text: _write(data / f"{name}.js", f"atlas.receive({json_text(name)},{json_text(text)});\n")
    with atomically(folder / "index.html") as file:  # only now is it a page
        file.write(_source("index.html").encode())


def _write(path: Path, text: str) -> None:
    with name_path(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def _one_file(page: Path) -> Iterator[Callable[[str, str], Any]]:
    """Write a page in one file, its data, in ASCII and by name, in blocks that no browser takes for scripts."""
    if page.exists() and not (page.is_file() and has_mark(page, _MARK)):
        raise FileExistsError(f"{page} exists and is not an explorer: give another name, or delete it")
    page.parent.mkdir(parents=True, exist_ok=True)
    before, after = _in_one_file().split(_DATA)
    block = '<script type="application/json" id="data-{}">{}</script>\n'
    with atomically(page.resolve()) as file:  # what a link points to, not the link
        file.write(before.encode())
        yield lambda name, text: file.write(block.format(html.escape(name), text).encode())
        file.write(after.encode())


def _in_one_file() -> str:
    """Return the page with its scripts and style in it, and a policy that allows these alone, by their digests."""
    style = _source(_STYLE)
    page = _source("index.html").replace(_LINK, f"<style>{style}</style>")
    digests = []

    def inlined(match: re.Match[str]) -> str:
        script = _source(match[1])
        digests.append(_digest(script))
        return f"<script>{script}</script>"

    page = _SCRIPT.sub(inlined, page)
    policy = (
        f"default-src 'none'; script-src {' '.join(digests)}; style-src {_digest(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return _POLICY.sub(lambda match: match[1] + policy + match[2], page)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _source(name: str) -> str:
    return (_PACKAGE / name).read_text(encoding="utf-8")
