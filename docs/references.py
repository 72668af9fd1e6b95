"""Writes ``references.md`` from ``references.bib``: a heading for each paper, which other pages lead to.

python docs/references.py
"""

from pathlib import Path

from pybtex.database import Entry, parse_file
from pybtex.richtext import Text

HERE = Path(__file__).parent
HEAD = """\
# References

The papers that this package builds on. `python docs/references.py` writes this page from `docs/references.bib`.

"""


def heading(entry: Entry) -> str:
    """Return the authors in short, and the year."""
    names = [" ".join(author.last_names) for author in entry.persons["author"]]
    authors = names[0] if len(names) == 1 else f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
    return f"{authors}, {entry.fields['year']}"


def cited(entry: Entry) -> str:
    """Return an entry in Markdown."""
    authors = ", ".join(
        " ".join([*each.first_names, *each.middle_names, *each.last_names]) for each in entry.persons["author"]
    )
    fields, title = entry.fields, f"*{Text.from_latex(entry.fields['title'])}*"
    if "eprint" in fields:
        title = f"[{title}](https://arxiv.org/abs/{fields['eprint']})"
    elif "doi" in fields:
        title = f"[{title}](https://doi.org/{fields['doi']})"
    return f"## {heading(entry)}\n\n{authors}: {title}. {fields['journal']}, {fields['year']}.\n"


def page() -> str:
    """Return the page."""
    entries = sorted(parse_file(str(HERE / "references.bib")).entries.values(), key=heading)
    return HEAD + "\n".join(map(cited, entries))


if __name__ == "__main__":
    (HERE / "references.md").write_text(page(), encoding="utf-8")
