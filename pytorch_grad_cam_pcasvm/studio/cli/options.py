"""Options: each command has a dataclass of them, from which its parser is made."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from pytorch_grad_cam_pcasvm import __version__

_MEANT = {"gpu": "cuda"}  # what no spelling leads to
_METAVARS = {Path: "FOLDER", int: "NUMBER", float: "NUMBER", str: "NAME"}  # of values of these types


def option(
    text: str,
    default: Any = None,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    group: str | None = None,
) -> Any:
    """Return a field of a dataclass that is an option.

    Args:
        text: its help; empty: it is not shown.
        default: its value where it is not typed; a list if it may be repeated.
        flag: what is typed, with spaces between several; None: the field's name, with dashes.
        metavar: what stands for its value in the help; None: NUMBER, NAME or FOLDER, by the field's type.
        parse: makes its value of the text; None: the field's type does.
        group: the heading under which it is listed.
    """
    about = {"text": text, "flag": flag, "metavar": metavar, "parse": parse, "group": group}
    if isinstance(default, list):
        return field(default_factory=list, metadata=about)
    return field(default=default, metadata=about)


def place(text: str, default: Any = MISSING, *, metavar: str) -> Any:
    """Return a field of a dataclass that is typed without a flag, in its place; with a default it may be left out."""
    about = {"text": text, "metavar": metavar, "in_place": True}
    return field(metadata=about) if default is MISSING else field(default=default, metadata=about)


def parse_name(*names: str, form: str = "", fits: Callable[[str], bool] | None = None) -> Callable[[str], str]:
    """Return a parser of some names, which refuses others with the nearest of them.

    Args:
        names: that are known.
        form: in which other names are typed, for messages.
        fits: whether a text has that form.
    """

    def parse(text: str) -> str:
        if text in names or (fits is not None and fits(text)):
            return text
        near = [_MEANT[text]] if _MEANT.get(text) in names else get_close_matches(text, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? It" if near else "it"
        other = f", or {form}" if form else ""
        raise argparse.ArgumentTypeError(f"{text!r} is unknown: {hint} takes {', '.join(names)}{other}")

    return parse


def number_from(
    least: float, *, whole: bool = False, above: bool = False, most: float | None = None
) -> Callable[[str], Any]:
    """Return a parser of finite numbers within bounds."""

    def parse(text: str) -> Any:
        try:
            number = int(text) if whole else float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"a {'whole ' if whole else ''}number is expected, got {text!r}") from None
        if number < least or (above and number == least) or number != number:
            bound = "positive" if above and not least else f"{'above' if above else 'at least'} {least:g}"
            raise argparse.ArgumentTypeError(f"it must be {bound}, got {text}")
        if number > (sys.float_info.max if most is None else most):
            raise argparse.ArgumentTypeError(
                f"it must be {'finite' if most is None else f'at most {most:g}'}, got {text}"
            )
        return number

    return parse


def parse_window(text: str) -> tuple[float, float]:
    """Return the centre and width of a window."""
    try:
        centre, width = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"centre and width are expected, such as 40,400, got {text!r}") from None
    if not (math.isfinite(centre) and 0 < width < math.inf):
        raise argparse.ArgumentTypeError(f"a window has a finite centre and a width above 0, got {text!r}")
    return centre, width


def parse_amount(text: str) -> int | float:
    """Return a number from 1, or a fraction above 0 and up to 1."""
    try:
        amount = int(text) if text.isdigit() else float(text)
    except ValueError:
        amount = 0
    if not amount > 0 or (isinstance(amount, float) and amount > 1):
        raise argparse.ArgumentTypeError(
            f"a whole number from 1, such as 200, or a fraction up to 1, such as 0.1, is expected, got {text!r}"
        )
    return amount


def parse_share(example: str, *, above: bool) -> Callable[[str], float]:
    """Return a parser of shares from 0, or above it, and below 1."""

    def parse(text: str) -> float:
        share: float = number_from(0, above=above)(text)
        if share >= 1:
            raise argparse.ArgumentTypeError(f"it must be below 1, such as {example}, got {text}")
        return share

    return parse


def parse_gamma(text: str) -> Any:
    """Return the width of a kernel."""
    if text in ("scale", "auto"):
        return text
    try:
        return number_from(0, above=True)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"scale, auto or a positive number is expected: {error}") from None


def parse_place(text: str) -> str | tuple[int, ...]:
    """Return a position: max, or ROW,COLUMN."""
    parts = text.split(",")
    if text != "max" and not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"a position such as 3,4, or max, is expected, got {text!r}")
    return text if text == "max" else tuple(map(int, parts))


def parse_region(text: str) -> tuple[float, ...] | Path:
    """Return a box, LEFT,TOP,WIDTH,HEIGHT as shares of a photo's sides, or the path of masks."""
    try:
        box = tuple(map(float, text.split(",")))
    except ValueError:
        return Path(text)
    left, top, width, height = box if len(box) == 4 else (math.nan,) * 4
    if not (0 <= left < left + width <= 1 and 0 <= top < top + height <= 1):
        raise argparse.ArgumentTypeError(
            f"a box is LEFT,TOP,WIDTH,HEIGHT from 0 to 1 of the photo's sides, such as 0.8,0,0.2,0.1, got {text!r}"
        )
    return box


def parse_size(text: str) -> tuple[int, int]:
    """Return (H, W) of a size that is typed as photos are named, WIDTHxHEIGHT, or as one side."""
    sides = text.lower().split("x")
    if not 1 <= len(sides) <= 2 or not all(side.isdigit() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"a side such as 448, or WIDTHxHEIGHT such as 672x448 is expected: {text!r}")
    return int(sides[-1]), int(sides[0])


def parse_tiles(text: str) -> tuple[int, int]:
    """Return the numbers of columns and rows."""
    numbers = text.lower().split("x")
    if len(numbers) != 2 or not all(number.isdigit() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"COLUMNSxROWS such as 3x2 is expected, got {text!r}")
    return int(numbers[0]), int(numbers[1])


def list_flags(entry: "Field[Any]") -> list[str]:
    """Return the flags of a field, the usual one first."""
    return (entry.metadata.get("flag") or f"--{entry.name.replace('_', '-')}").split()


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with the nearest option, and nothing else."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake, and exit with status 2."""
        print(f"error: {message} (see {self.prog} --help)", file=sys.stderr)
        self.exit(2)

    def refuse_unknown(self, texts: Sequence[str]) -> None:
        """Refuse unknown options, naming the nearest one."""
        text = next((text for text in texts if text.startswith("-")), texts[0])
        if not text.startswith("-"):
            self.error(f"nothing takes {text!r}")
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        near = get_close_matches(text.partition("=")[0], flags, n=1, cutoff=0.5)
        self.error(f"there is no option {text}" + (f": did you mean {near[0]}?" if near else ""))


class ShowVersions(argparse.Action):
    """Prints the versions of the package and of its dependencies, none of which is imported."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        """Print them, and exit."""
        import platform
        from importlib.metadata import PackageNotFoundError, version

        versions = [f"pytorch_grad_cam_pcasvm {__version__}", f"Python {platform.python_version()}"]
        for name in ("torch", "torchvision", "grad-cam", "scikit-learn", "numpy"):
            try:
                versions.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                versions.append(f"{name} is not installed")
        print(", ".join([*versions, platform.platform(terse=True)]))
        parser.exit()


def add_options(parser: Parser, options_class: type) -> None:
    """Add the options of a dataclass to a parser, its own before inherited ones."""
    hints, groups = get_type_hints(options_class), dict[str, Any]()
    for entry in sorted(fields(options_class), key=lambda entry: entry.name not in options_class.__annotations__):
        about = entry.metadata
        if "text" not in about:
            continue
        where: Any = parser
        if about.get("group"):
            where = groups.setdefault(about["group"], None) or parser.add_argument_group(about["group"])
            groups[about["group"]] = where
        hint = hints[entry.name]
        base = next((part for part in _METAVARS if part in (hint, *getattr(hint, "__args__", ()))), str)
        arguments: dict[str, Any] = {"help": about["text"] or argparse.SUPPRESS, "type": about.get("parse") or base}
        arguments["metavar"] = about["metavar"] or _METAVARS.get(base)
        if about.get("in_place"):
            if entry.default is not MISSING:
                arguments |= {"nargs": "?", "default": entry.default}
            where.add_argument(entry.name, **arguments)
            continue
        if hint is bool:
            where.add_argument(*list_flags(entry), dest=entry.name, action="store_true", help=arguments["help"])
        elif entry.default is MISSING:
            where.add_argument(*list_flags(entry), dest=entry.name, action="append", default=None, **arguments)
        else:
            where.add_argument(*list_flags(entry), dest=entry.name, default=entry.default, **arguments)


def read_options(options_class: type, parsed: argparse.Namespace) -> Any:
    """Return the options that a parser read, as their dataclass."""
    values = {entry.name: getattr(parsed, entry.name) for entry in fields(options_class) if hasattr(parsed, entry.name)}
    return options_class(**{name: value for name, value in values.items() if value is not None})
