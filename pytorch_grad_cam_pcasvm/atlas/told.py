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
    told: list[Told] = []
    with warnings.catch_warnings(record=True) as seen:
        yield told
    told += [Told(each.category.__module__, each.category.__name__, str(each.message)) for each in seen]


def tell(collection: Iterable[Told], doubts: WarnOnce) -> None:
    """Give the warnings of other processes, each once, unless this process has given it: ``doubts`` knows of some."""
    for each in dict.fromkeys(collection):
        category = each.category
        if category in TOLD_ONCE:
            doubts.tell(category, each.message)
        elif category is not AutogradFallbackWarning:  # told of the first image, whose path is that of all
            warn(each.message, category)
