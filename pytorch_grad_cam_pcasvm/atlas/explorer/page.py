"""The page: files that a browser opens from the file system, or one file with everything in it."""

import base64
import hashlib
import html
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.atlas.explorer.contents import Contents
from pytorch_grad_cam_pcasvm.atlas.explorer.machine import json_text
from pytorch_grad_cam_pcasvm.runtime.files import atomically, check_folder, has_mark, name_path
from pytorch_grad_cam_pcasvm.runtime.log import progress_bar

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
