"""Docstrings of methods, completed with what their bases say of arguments and errors."""

import inspect
import re

_TITLE = re.compile(r"^(\w+):\n(?=    )", re.MULTILINE)
_ENTRY = re.compile(r"^    \**(\w+):.*(?:\n {8}.*)*", re.MULTILINE)


def completed(method: type, root: type) -> str | None:
    """Return the docstring of a method, completed with the arguments and errors from its bases, up to ``root``.

    Arguments come in the order of the signature. A method without an example gets the root's.
    """
    if not method.__doc__:  # python -OO leaves none
        return method.__doc__
    family = [_sections(cls) for cls in reversed(method.__mro__) if issubclass(cls, root)]
    args = {entry[1]: entry[0] for part in family for entry in _ENTRY.finditer(part.pop("Args", ""))}
    errors = {entry[0]: entry[1] for part in family for entry in _ENTRY.finditer(part.pop("Raises", ""))}
    example = family[0]["Example"].replace("ClosedFormGradCAM", method.__name__)
    about = family[-1].pop("").rstrip()
    sections = {
        "Args": "\n".join(args[name] for name in inspect.signature(method).parameters if name in args),
        "Raises": "\n".join(sorted(errors, key=errors.__getitem__)),
        **{"Example": example, **family[-1]},
    }
    return "\n\n".join([about, *(f"{title}:\n{text.rstrip()}" for title, text in sections.items() if text)])


def _sections(cls: type) -> dict[str, str]:
    """Return the sections of a docstring by their titles; the text before them has the title ``""``."""
    parts = ["", *_TITLE.split(inspect.cleandoc(cls.__doc__ or ""))]
    return dict(zip(parts[::2], parts[1::2], strict=True))
