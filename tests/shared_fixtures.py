"""For every test: threads, seeds, and what several files need."""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import golden as texts
import numpy as np
import pytest
import torch
import torchvision
from browser import Page, launched, sync_playwright
from PIL import Image

# Networks this small are slower on several threads, and ten times slower on a busy machine.
torch.set_num_threads(1)


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


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return the function that compares a text with the file of a name in tests/golden."""
    return partial(texts.compare, update=request.config.getoption("--update"))


@pytest.fixture(scope="session", autouse=True)
def _quickly_saved() -> Iterator[None]:
    """Let Pillow compress no PNG file, which takes most of the time that it needs: their pixels are the same."""
    save = Image.Image.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "save", lambda *args, **given: save(*args, **(given | {"compress_level": 0})))
        yield


@pytest.fixture(scope="session", autouse=True)
def _quickly_inspected() -> Iterator[None]:
    """Let arguments of a function be found once, and no array be taken for a table: libraries ask in every call."""
    inspected, known = inspect.signature, WeakKeyDictionary()

    def signature(function: Any, **options: Any) -> inspect.Signature:
        if type(function) is not FunctionType or vars(function) or options:
            return inspected(function, **options)
        told = known.get(function)
        if told is None or told[0] is not function.__defaults__:
            told = known[function] = function.__defaults__, inspected(function)
        return told[1]

    tables = sys.modules.get("narwhals.stable.v2.dependencies")  # of scikit-learn, if it is new
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "signature", signature)
        for name in ("is_into_dataframe", "is_into_series") if tables else ():
            asked = getattr(tables, name)
            patch.setattr(tables, name, lambda x, asked=asked: type(x) is not np.ndarray and asked(x))
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
    from pytorch_grad_cam_pcasvm.studio.export import files

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
def same_threads() -> Iterator[None]:
    """Put back, at the end, how many threads torch has."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


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
