"""Every message that names a way out: it is refused here, and whoever follows the advice gets a map, or what it names.

A message without a row fails: ``test_every_message_has_a_row`` reads the package's source for them.
"""

import ast
import re

import pytest
import ways_of_heads
import ways_of_networks
import ways_of_studio
from ways_table import BY_VALUES, ON_PAGE, PACKAGE, WITHOUT, Row, calls, nodes, shows

ROWS = [*ways_of_heads.ROWS, *ways_of_networks.ROWS, *ways_of_studio.ROWS]
PLACES = [*(row.place for row in ROWS), *WITHOUT]
# Programs, figures and what is compiled take seconds, and ONNX files a library that is no dependency.
SLOW = {
    "studio/export/": [pytest.mark.slow, pytest.mark.optional],
    "studio/figures/": [pytest.mark.slow],
    "head/enumerated.py: runs outside": [pytest.mark.slow],
    "network/messages.py: does not run": [pytest.mark.slow],
    "maps/recombination.py: maps of": [pytest.mark.slow],
    "maps/signed_maps.py": [pytest.mark.slow],
}
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("rules")]


def test_every_message_has_a_row() -> None:
    needed = [call for call in calls() if call.needs_row and not any(map(call.is_at, PLACES))]
    missing = [f"{call.file}:{call.line}: {call.source}" for call in needed]
    assert not missing, "add a Row that follows the advice of:\n" + "\n".join(missing)


def test_every_row_is_of_a_message() -> None:
    assert [place for place in PLACES if not any(call.is_at(place) for call in calls())] == []


def test_every_test_that_stands_for_a_row_is_there() -> None:
    named = {name for reason in WITHOUT.values() for name in re.findall(r"tests/\S+\.py", reason)}
    assert [name for name in sorted(named) if not (PACKAGE.parent / name).exists()] == []


@pytest.mark.parametrize("marked", SLOW)
def test_every_mark_is_of_a_row(marked: str) -> None:
    assert any(row.place.startswith(marked) for row in ROWS)


def as_told(text: str) -> str:
    """Return a text with dots in the place of names, as in what an f-string fills in."""
    return re.sub(r"{[^}]*}", "…", text).lower()


@pytest.fixture(scope="module")
def quoted() -> set[str]:
    """Return the parts of the messages that the page has in quotation marks."""
    page = (PACKAGE.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|`[^`\n]+`", "", page, flags=re.DOTALL)
    parts = [part.strip(" ',") for quote in re.findall(r'"([^"]+)"', text) for part in quote.lower().split("…")]
    return {" ".join(part.split()) for part in parts} - {""}


def test_messages_that_troubleshooting_quotes_are_those_of_the_package(quoted: set[str]) -> None:
    texts = [ast.unparse(node) for _, node in nodes() if isinstance(node, ast.JoinedStr)]
    texts += [node.value for _, node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    said = list(map(as_told, texts))
    assert len(quoted) > 12
    assert {part for part in quoted if not any(part in message for message in said)} == set()


@pytest.mark.parametrize("place", ON_PAGE)
def test_troubleshooting_quotes_the_messages_that_the_table_names(place: str, quoted: set[str]) -> None:
    assert place in PLACES
    messages = [as_told(call.source) for call in calls() if call.is_at(place)]
    assert any(len(part) > 7 and part in message for part in quoted for message in messages)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=f"{number} {row.place}", marks=[m for at in SLOW if row.place.startswith(at) for m in SLOW[at]]
        )
        for number, row in enumerate(ROWS)
    ],
)
def test_the_message_names_ways_that_work(row: Row) -> None:
    with pytest.raises(Exception, match=re.escape(row.message)) as caught:
        row.refused()
    named = getattr(caught.value, "ways_out", (str(caught.value),))
    ways = row.ways | ({BY_VALUES: row.by_values} if BY_VALUES in named else {})
    for way in named:
        assert any(part in way for part in ways), f"nothing follows: {way}"
    for part, follow in ways.items():
        assert any(part in way for way in named), f"the message does not say: {part}"
        assert isinstance(follow, str) or shows(follow()), f"nothing comes of: {part}"
