"""For every test: threads, seeds, which warnings are errors, and what several files need."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Or the workers, and each process that a test starts, would compile all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Read as these are imported. Two workers whose BLAS has two threads each wait for each other, at full load.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import numpy as np
import pytest
import torch
import torchvision
from browser import Page, launched, sync_playwright
from PIL import Image

# Networks this small are slower on several threads, and ten times slower on a busy machine.
torch.set_num_threads(1)

# Small random networks on noise give reason for each of them.
_DOUBTS = ("BaselineWarning", "CancellationWarning", "CoarseMapWarning", "OutsideTrainingWarning")
_OF_TOYS = {
    "test_paper": "CoarseMapWarning",  # pictures of 64x64 pixels: 3x3 positions
    "test_which_method": "CoarseMapWarning",
}


def pytest_configure(config: pytest.Config) -> None:
    # Features are kept there; those of another run are no concern of a test.
    os.environ["TORCH_HOME"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["TORCH_HOME"], True)
    # Here, not in pyproject.toml, whose filters import the package before its coverage is measured.
    config.addinivalue_line("filterwarnings", "error::pytorch_grad_cam_pcasvm.AutogradFallbackWarning")
    # pytest.warns sees them all the same.
    for name in ("BlankMapWarning", *_DOUBTS):
        config.addinivalue_line("filterwarnings", f"ignore::pytorch_grad_cam_pcasvm.{name}")


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


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Let no test draw other numbers, fit another machine or lose its gradients because of the tests before it."""
    # What this does for CUDA before its first use takes a stack trace.
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)
    np.random.seed(0)  # scikit-learn's, where no random_state is given
    yield
    records = (torch.ones(1, requires_grad=True) * 1).requires_grad
    state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._dispatch_tls_local_exclude_set()
    torch.set_grad_enabled(True)
    assert records, f"after this test torch records no graph any more: {state}"


@pytest.fixture(scope="session", autouse=True)
def _quickly_saved() -> Iterator[None]:
    """Let Pillow compress PNG files lightly, which takes a quarter of the time: their pixels are the same."""
    save = Image.Image.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "save", lambda *args, **given: save(*args, **({"compress_level": 1} | given)))
        yield


@pytest.fixture(autouse=True)
def _placed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let matplotlib find places for what it draws in tests of these and in slow ones alone: it takes its time."""
    of_places = any(word in request.node.name for word in ("beside", "cut_off", "dollars", "two_ends", "wrap"))
    if request.path.parent.name == "figures" and not (of_places or request.node.get_closest_marker("slow")):
        monkeypatch.setattr("matplotlib.layout_engine.do_constrained_layout", lambda *args, **options: None)


_MODELS: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def _converted_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert equal programs to ONNX once: files of one explanation differ in what they say of pictures alone."""
    if not request.node.get_closest_marker("optional"):
        return
    from pytorch_grad_cam_pcasvm.export import files

    convert, table = files._converted, files.decompositions

    def converted(program: Any, names: Any, opset: Any) -> Any:
        weights = [(name, value.dtype, value.numpy(force=True).tobytes())
                   for name, value in sorted((program.state_dict | program.constants).items())]  # fmt: skip
        key = program.graph_module.code, *weights, *names, opset
        if files.decompositions is not table:  # a test has another one
            return convert(program, names, opset)
        if key not in _MODELS:
            _MODELS[key] = convert(program, names, opset)
        model = type(_MODELS[key])()
        model.CopyFrom(_MODELS[key])
        return model

    monkeypatch.setattr(files, "_converted", converted)


@pytest.fixture
def rules() -> Iterator[None]:
    """Forget, at the end, the rules that a test registers."""
    # Here, not above: the package is imported after its coverage is measured.
    from pytorch_grad_cam_pcasvm.rules import registry

    tables = registry._rules, registry._functions
    before = [table.copy() for table in tables]
    yield
    for call, function in registry._functions.items():
        if isinstance(function, type) and call not in before[1]:  # an autograd.Function, whose calls modes have seen
            del function.apply
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done once, on numbers, is not done at all: "meta" has none."""
    from pytorch_grad_cam_pcasvm.path.record import Path

    monkeypatch.setattr(Path, "run", Path.record)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # "meta" has none


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the weights of a small network of torchvision."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "squeezenet.pth"
    torch.save(torchvision.models.squeezenet1_1(weights=None).state_dict(), file)
    return file


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Headless Chromium; not for the whole session, in which asyncio could not be used any more."""
    with sync_playwright() as playwright:
        yield launched(playwright)


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    """A tab of its own."""
    made = chromium.new_page(viewport={"width": 1400, "height": 900})
    made.set_default_timeout(60_000)
    yield made
    made.close()
