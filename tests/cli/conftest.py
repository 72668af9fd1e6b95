"""What tests of the command line share: lines of version 0.4 are typed in many, and say so, which is tested apart."""

import json
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from small import SIDE, Narrow
from torch import nn
from torchvision.models import ResNet18_Weights, SqueezeNet1_1_Weights, squeezenet
from torchvision.transforms._presets import ImageClassification

from pytorch_grad_cam_pcasvm.studio.cli import training
from pytorch_grad_cam_pcasvm.studio.pictures import sheets

_NOTE = re.compile(r"this line is of version 0\.4, and works until 0\.6; now it is:\n  pcasvm-cam .*\n")
ForwardedWarning = namedtuple("ForwardedWarning", "out err")
_LIGHT = """
import contextlib, io, json, sys
from pytorch_grad_cam_pcasvm.studio.cli import main
told = {}
for line in json.loads(sys.argv[1]):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main(line.split())
        except SystemExit as ended:  # of the parser
            status = ended.code
    heavy = sorted({"torch", "sklearn", "matplotlib", "numpy", "scipy", "PIL"} & {*sys.modules})
    told[line] = [status, out.getvalue(), error.getvalue(), heavy]
print(json.dumps(told))
"""


class WithoutNote:
    """What was printed, without the note that a line is of version 0.4."""

    def __init__(self, capture):
        self._capture = capture

    def readouterr(self):
        out, err = self._capture.readouterr()
        return ForwardedWarning(out, _NOTE.sub("", err))


@pytest.fixture
def capsys(capsys):
    return WithoutNote(capsys)


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """The ``place`` of a file of tests, in the current folder, where the features of other tests are not found."""
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "here")
    monkeypatch.setattr(training, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "here"


@pytest.fixture(scope="session")
def told_by() -> Callable[[Sequence[str], Path], dict[str, list]]:
    """Return a function that runs lines, one after the other, in a process that has imported nothing yet.

    It returns for each of them its status, what it printed, its errors, and what is heavy and was imported until then.
    """

    def run(lines: Sequence[str], folder: Path) -> dict[str, list]:
        command = [sys.executable, "-c", _LIGHT, json.dumps(lines)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout)

    return run


@pytest.fixture(scope="module", autouse=True)
def _sooner() -> Iterator[None]:
    """Let networks see half as much, squeezenet be narrow, forests have few trees, and reports have no worst images.

    Sheets are small, too. Images, networks and sheets of their own size are in tests/export and tests/documents, and
    tests/evaluation draws the worst images.
    """
    with pytest.MonkeyPatch.context() as patch:
        half = partial(ImageClassification, crop_size=SIDE, resize_size=SIDE * 256 // 224)
        for weights in (SqueezeNet1_1_Weights, ResNet18_Weights):  # the second also of networks of one's own
            patch.setattr(weights.DEFAULT.value, "transforms", half)
        patch.setattr(squeezenet, "nn", SimpleNamespace(**vars(nn) | {"Conv2d": Narrow}))
        patch.setattr(sheets, "TILE", 72)
        patch.setattr(sheets, "LARGE", 2 * 72 + sheets.GAP)
        patch.setattr(RandomForestClassifier.__init__, "__defaults__", (25,))
        patch.setitem(HistGradientBoostingClassifier.__init__.__kwdefaults__, "max_iter", 25)
        patch.setattr(import_module("pytorch_grad_cam_pcasvm.studio.evaluation.report"), "_pictures", lambda result: {})
        yield


@pytest.fixture(scope="module")
def weights(_sooner: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the weights of the small squeezenet."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "squeezenet.pth"
    torch.save(squeezenet.squeezenet1_1(weights=None).state_dict(), file)
    return file
