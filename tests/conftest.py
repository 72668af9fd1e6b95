"""For every run: threads, which warnings are errors, which cases are slow, and who runs which test."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from typing import Any

# Or the workers, and each process that a test starts, would compile all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Read as these are imported. Two workers whose BLAS has two threads each wait for each other, at full load.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import pytest

# Small random networks on noise give reason for each of them.
_DOUBTS = ("BaselineWarning", "CancellationWarning", "CoarseMapWarning", "OutsideTrainingWarning")
_OF_TOYS = {
    "test_paper": "CoarseMapWarning",  # pictures of 64x64 pixels: 3x3 positions
    "test_which_method": "CoarseMapWarning",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write texts of tests/golden anew, and look at git diff")


def pytest_configure(config: pytest.Config) -> None:
    # Features are kept there; those of another run are no concern of a test.
    os.environ["TORCH_HOME"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["TORCH_HOME"], True)
    # Here, not in pyproject.toml, whose filters import the package before its coverage is measured.
    config.addinivalue_line("filterwarnings", "error::pytorch_grad_cam_pcasvm.AutogradFallbackWarning")
    # pytest.warns sees them all the same.
    for name in ("BlankMapWarning", *_DOUBTS):
        config.addinivalue_line("filterwarnings", f"ignore::pytorch_grad_cam_pcasvm.{name}")
    if not config.getoption("numprocesses", None):  # who hands tests out, and waits for nothing, runs none
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let no doubt arise in documents and examples, which show how it is done; but in toys of these, which are tiny.

    Of a test with several parameters, cases that have every value of each are quick; other combinations are slow.
    """
    cases = defaultdict(list)
    for item in items:
        several = hasattr(item, "callspec") and len(item.callspec._idlist) > 1
        if several and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
        if item.path.parent.name == "documents" or item.get_closest_marker("document"):
            for name in _DOUBTS:
                if name not in (_OF_TOYS.get(item.path.stem), _OF_TOYS.get(item.name)):
                    item.add_marker(pytest.mark.filterwarnings(f"error::pytorch_grad_cam_pcasvm.{name}"))
    for of_test in cases.values():
        _mark_combinations(of_test)


def _mark_combinations(cases: list[pytest.Item]) -> None:
    values = {case: set(enumerate(case.callspec._idlist)) for case in cases}
    tried: Counter = Counter()
    while values:
        case = max(values, key=lambda case: (len(values[case] - tried.keys()), -sum(tried[v] for v in values[case])))
        if values[case] <= tried.keys():
            break
        tried.update(values.pop(case))
    for case in values:
        case.add_marker("slow")
        case.add_marker("combination")


def pytest_collection_finish() -> None:
    gc.freeze()  # thousands of items, which the garbage collector need not look through again and again


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker neighbours, which share fixtures, and whoever is done some of the others'."""
    from xdist.scheduler import WorkStealingScheduling  # as an option, it would need --numprocesses in every run

    return WorkStealingScheduling(config, log)
