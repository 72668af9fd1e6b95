"""Lines of version 0.4, which name ``--images`` or ``--head``: what they are now; they work until 0.6."""

import json
import shlex
import sys
from pathlib import Path

_MODEL = "pytorch_grad_cam_pcasvm model"


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
        origin = read_origin(Path(models[-1])) if models else None
        if origin is not None:  # the model says it
            own = origin["library"] == "function"  # which runs only if it is named
            known = {("--weights", origin["file"])} | (set() if own else {("--backbone", origin["typed"])})
            rest = [(flag, value) for flag, value in rest if (flag, value) not in known]
    words = [word for flag, value in rest for word in ([flag] if value is None else [flag, value])]
    new = [*command, *images, *words]
    print(
        f"this line is of version 0.4, and works until 0.6; now it is:\n  pcasvm-cam {shlex.join(new)}", file=sys.stderr
    )
    return new


def read_origin(path: Path) -> dict[str, str | None] | None:
    """Return the backbone that a model's file names, as it is typed, and the file of its weights.

    None is returned for the file of a head alone, and for what is no such file. Nothing large is read or imported.
    """
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 1 << 26)))["__metadata__"]
        if not str(header["format"]).startswith(_MODEL):
            return None
        origin = json.loads(header["model"])["backbone"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    prefix = "timm:" if origin["library"] == "timm" else ""
    typed = f"{prefix}{origin['name']}" if origin["library"] else None
    return {"library": origin["library"], "typed": typed, "file": origin["file"]}


def _pair(words: list[str]) -> list[tuple[str, str | None]]:
    """Return flags with what stands behind them, or None; a word without a flag is its own."""
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
