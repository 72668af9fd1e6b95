"""Warnings that processes give which nobody watches: collected there, and told once here."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pytorch_grad_cam_pcasvm.methods.warn_once import TOLD_ONCE, WarnOnce
from pytorch_grad_cam_pcasvm.runtime.errors import AutogradFallbackWarning, warn


class Told(NamedTuple):
    """A warning of another process: module and name of its category, which this process may not have, and its text."""

    module: str
    name: str
    message: str

    @property
    def category(self) -> type[Warning]:
        """The category, or UserWarning for one that is not known here."""
        category = getattr(sys.modules.get(self.module), self.name, None)
        return category if isinstance(category, type) and issubclass(category, Warning) else UserWarning


@contextmanager
def collected() -> Iterator[list[Told]]:
    """Return a list that at the end has the warnings given meanwhile, which are not shown."""
    messages: list[Told] = []
    with warnings.catch_warnings(record=True) as caught:
        yield messages
    messages += [
        Told(warning.category.__module__, warning.category.__name__, str(warning.message)) for warning in caught
    ]


def tell(collection: Iterable[Told], register: WarnOnce) -> None:
    """Give the warnings of other processes, each once, unless this process has given it: ``register`` knows of some."""
    for warning in dict.fromkeys(collection):
        category = warning.category
        if category in TOLD_ONCE:
            register.tell(category, warning.message)
        elif category is not AutogradFallbackWarning:  # told of the first image, whose path is that of all
            warn(warning.message, category)
