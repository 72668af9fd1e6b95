"""What tests of measurements share."""

from functools import cache
from importlib import import_module

import numpy as np
import pytest
from test_evaluation import Corner, problem
from torch import Tensor

from pytorch_grad_cam_pcasvm import PCASVMNet
from pytorch_grad_cam_pcasvm.studio.evaluation import result


@pytest.fixture(autouse=True)
def _intervals_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the interval of the same numbers once: a verdict asks for it several times, and simulations for many."""
    for name in ("interval_of_any", "interval_of_bounded", "interval_of_share"):
        monkeypatch.setattr(result, name, cache(getattr(result, name)))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports have no worst images: only their words are looked at."""
    monkeypatch.setattr(
        import_module("pytorch_grad_cam_pcasvm.studio.evaluation.report"), "_pictures", lambda result: {}
    )


@pytest.fixture(scope="session")
def corner() -> tuple[PCASVMNet, Tensor, np.ndarray]:
    """A network that sees one corner alone, images and their labels, which no test changes."""
    return problem(Corner())
