"""Files that several tests read are written once: tracing and converting take their time."""

from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from test_program import made

from pytorch_grad_cam_pcasvm import export

PLAIN = ("pooled", "rbf", "ClosedFormGradCAM", "default")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SimpleNamespace]:
    """Return the file of a case of ``made``, and what belongs to it, which no test changes."""

    @cache
    def write(*case: str, **options: Any) -> SimpleNamespace:
        cam, x, targets = made(*(case or PLAIN))
        path = tmp_path_factory.mktemp("written") / "explainer.onnx"
        with redirect_stdout(StringIO()) as printed:
            told = export.onnx(cam, x, path, targets, **options)
        return SimpleNamespace(cam=cam, x=x, targets=targets, path=path, told=told, printed=printed.getvalue())

    return write
