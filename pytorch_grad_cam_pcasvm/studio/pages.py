"""Pages of HTML: made of the templates in the rooms of the studio, which escape all values."""

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(template: str, **values: Any) -> str:
    """Return a page made of a template, such as ``"cli/gallery.html"``."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Environment:
    return Environment(
        autoescape=True,
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
