"""Lines of version 0.4, which name ``--images`` or ``--head``, translated; they work until 0.6."""

import shlex
import sys
from pathlib import Path

from pytorch_grad_cam_pcasvm.model.description import Description, read_description


def translate(arguments: list[str]) -> list[str]:
    """Return the arguments of a line of version 0.4 as they are typed now, having said so; others as they are.

    There, ``--layer`` of ``fit`` is that of the features, and other commands take ``--head`` and a backbone.

    Args:
        arguments: of the command line.
    """
    command, pairs = arguments[:1], _pair(arguments[1:])
    images = [value for flag, value in pairs if flag == "--images" and value is not None][-1:]
    of_head = command not in (["fit"], ["explore"]) and any(flag == "--head" for flag, _ in pairs)
    if not images and not of_head:
        return arguments
    rest = [(flag, value) for flag, value in pairs if flag != "--images"]
    if command == ["fit"]:
        named = any(flag == "--features" for flag, _ in rest)  # then it had no use for the other
        rest = [("--features" if flag == "--layer" else flag, value) for flag, value in rest
                if not (named and flag == "--layer")]  # fmt: skip
    else:
        rest = [("--model" if flag == "--head" else flag, value) for flag, value in rest]
        models = [value for flag, value in rest if flag == "--model" and value is not None]
        description = _read_description(Path(models[-1])) if models else None
        if description is not None:  # the model says it
            origin = description.backbone
            own = origin.library == "function"  # which runs only if it is named
            known = {("--weights", origin.file)} | (set() if own else {("--backbone", origin.typed)})
            rest = [(flag, value) for flag, value in rest if (flag, value) not in known]
    words = [word for flag, value in rest for word in _write(flag, value)]
    new = [*command, *images, *words]
    print(
        f"this line is of version 0.4, and works until 0.6; now it is:\n  pcasvm-cam {shlex.join(new)}", file=sys.stderr
    )
    return new


def _read_description(path: Path) -> Description | None:
    """Return the description in a model's file; None of another or a damaged file, which is told later."""
    try:
        return read_description(path)
    except ValueError:
        return None


def _write(flag: str, value: str | None) -> list[str]:
    """Return an option as it is typed; a value that begins with a dash would be taken for another option."""
    if value is None:
        return [flag]
    return [f"{flag}={value}"] if value.startswith("-") and flag.startswith("--") else [flag, value]


def _pair(words: list[str]) -> list[tuple[str, str | None]]:
    """Return flags with the value behind them, or None; a word without a flag is a flag of its own."""
    pairs: list[tuple[str, str | None]] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--") and equals:
            pairs.append((flag, value))
        elif not word.startswith("--") and pairs and pairs[-1][0].startswith("--") and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], word)
        else:
            pairs.append((word, None))
    return pairs
