"""Import places of version 0.3, each with a DeprecationWarning. Version 0.5 will not have this module."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_PACKAGE = __package__
_NEW = {
    "autodiff": "path",
    "autodiff.rules": "rules",
    "cams": "methods",
    "cams.base": "methods.method",
    "errors": "runtime.errors",
    "model": "network",
}
_OLD_NAMES = {"methods.method": {"Explained": "maps.result"}}


class _Moved(ModuleType):
    """A module that is somewhere else now."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        new = _new(self.__name__)
        return getattr(import_module(f"{_PACKAGE}.{_OLD_NAMES.get(new, {}).get(name, new)}"), name)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of version 0.3."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return how a moved module is imported; None: it is none."""
        new = _new(fullname)
        return ModuleSpec(fullname, self, is_package=True) if new and find_spec(f"{_PACKAGE}.{new}") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that takes its names from where they are now."""
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Warn."""
        old, new = module.__name__, f"{_PACKAGE}.{_new(module.__name__)}"
        message = (
            f"{old} is now {new}, and its old name goes in version 0.5; import public names from {_PACKAGE} itself"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)


def _new(name: str) -> str:
    """Return where a module is now, below the package; nothing for one that has not moved."""
    package, _, place = name.partition(".")
    if package != _PACKAGE:
        return ""
    folder, _, module = place.rpartition(".")
    return _NEW.get(place) or (f"{_NEW[folder]}.{module}" if folder in _NEW else "")


sys.meta_path.append(_Finder())
