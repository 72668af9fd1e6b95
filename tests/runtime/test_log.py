"""The log: what a first and a second explanation tell at debug; nothing is formatted, timed or looked at for it."""

import logging
import re
from pathlib import Path

import pytest
import torch
from meta import NoLooks
from problems import Problem
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, PCASVMNet, SVMTarget, mean_activations
from pytorch_grad_cam_pcasvm.runtime import log
from pytorch_grad_cam_pcasvm.runtime.device import forbid_sync

NAME = "pytorch_grad_cam_pcasvm"


class Listed(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    def messages(self):
        """Return the messages since the last time, without the seconds, which each record of a time has at its end."""
        texts = [record.getMessage() for record in self.records]
        self.records.clear()
        return [re.sub(r" \(\d+\.\d{4} s\)$", " (s)", text) for text in texts]


@pytest.fixture
def logged():
    """A handler of the package's logger, at debug."""
    logger, handler = logging.getLogger(NAME), Listed()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def problem():
    return Problem(classes=2)


def contributions(problem):
    mean = mean_activations(problem.net, [problem.x], "features", progress=False)
    return ContributionCAM(problem.net, ["features"], mean=mean)


def test_a_gradient_is_one_run_of_the_network(problem, logged):
    cam = ClosedFormGradCAM(problem.net, ["features"])
    told = [
        "run of the network: recorded 7 steps behind ['features'] (s)",
        "ClosedFormGradCAM: 5 images, 5 targets explained (s)",
    ]
    steps = len(cam._run_network(problem.x, ()).recorded.tape.steps)
    assert logged.messages() == [told[0].replace("7", str(steps))]
    for _ in range(2):  # nothing is kept
        cam.explain(problem.x)
        assert logged.messages() == [told[0].replace("7", str(steps)), told[1]]


def test_a_start_is_searched_in_the_first_explanation_alone(problem, logged):
    cam = contributions(problem)
    logged.messages()
    cam.explain(problem.x, SVMTarget("ant"))
    first = logged.messages()
    cam.explain(problem.x, SVMTarget("ant"))
    second = logged.messages()
    for told in (first, second):
        assert sum(text.startswith("run of the network: recorded") for text in told) == 2  # and a black image
        assert told[-1] == "ContributionCAM: 5 images, 1 targets explained (s)"
    assert "start at features for SVMTarget('ant'): found (s)" in first
    assert "start at features for SVMTarget('ant'): as before (s)" in second
    searched = [re.fullmatch(r"(\d+) steps at features towards given values of (\d) targets \(s\)", t) for t in first]
    assert {match[2] for match in searched if match} == {"4", "1"}  # all components, then the decision
    replays = [sum(text.startswith("replayed") for text in told) for told in (first, second)]
    passes = [sum(text == "start pass from ['features'] (s)" for text in told) for told in (first, second)]
    # The value at the mean, and before the first step and after each; and whether starts and ends are on a pole.
    taken = [int(match[1]) for match in searched if match]
    assert replays[0] == passes[0] + sum(2 + steps for steps in taken) + 6
    assert replays[1] == passes[1]
    assert not any("steps at" in text for text in second)


def test_a_boundary_is_searched_in_the_head_once(logged):
    backbone = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 9, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    cam = ContributionCAM(PCASVMNet(backbone.eval(), Problem(classes=2).head), ["2"])
    x = torch.randn(2, 3, 8, 8)
    logged.messages()
    cam.explain(x, SVMTarget("ant"))
    first = logged.messages()
    cam.explain(x, SVMTarget("ant"))
    assert re.fullmatch(r"boundary of SVMTarget\('ant'\): crossed on the way to one of \d+ samples", first[1])
    assert first[2:4] == [
        "boundary of SVMTarget('ant'): reached in 0 steps",
        "boundary of SVMTarget('ant'): found in the head (s)",
    ]
    assert logged.messages() == [first[0], first[-1]]


class Drawing(nn.Module):
    def forward(self, x):
        return x + torch.rand(3, 1, 1, generator=torch.Generator().manual_seed(0))


def test_further_runs_of_the_network_are_told(logged):
    backbone = nn.Sequential(Drawing(), nn.Conv2d(3, 9, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    ClosedFormGradCAM(PCASVMNet(backbone, Problem(classes=2).head), ["1"]).explain(torch.randn(2, 3, 8, 8))
    run = "run of the network: recorded 2 steps behind ['1'] (s)"
    again = "the part before ['1'] has to be recorded, too: the network runs again"
    assert logged.messages()[:-1] == [again, run, again, run]


def test_autograd_is_told(problem, logged):
    ClosedFormGradCAM(problem.net, ["features"], jacobian="autograd").explain(problem.x)
    assert logged.messages()[0] == "run of the network: for autograd behind ['features'] (s)"


def test_records_name_the_place_that_told_them(problem, logged):
    ClosedFormGradCAM(problem.net, ["features"]).explain(problem.x)
    assert [record.filename for record in logged.records] == ["record.py", "method.py"]
    assert {record.name for record in logged.records} == {NAME}


def test_nothing_is_formatted_and_no_time_is_taken_where_the_log_is_off(problem, logged, monkeypatch):
    def refuse(*_):
        raise AssertionError("formatted, or timed")

    logging.getLogger(NAME).setLevel(logging.INFO)
    cam = contributions(problem)
    monkeypatch.setattr(log.time, "perf_counter", refuse)
    monkeypatch.setattr(SVMTarget, "__repr__", refuse)
    monkeypatch.setattr(SVMTarget, "__str__", refuse)
    for _ in range(2):
        cam.explain(problem.x, SVMTarget("ant"))
    assert not logged.records


def test_the_log_looks_at_no_number(problem, logged):
    cam = contributions(problem)
    with forbid_sync():  # as on a GPU
        cam.explain(problem.x, SVMTarget("ant"))
        told = logged.messages()
        with NoLooks():
            cam.explain(problem.x, SVMTarget("ant"))
            again = logged.messages()
    # Where nothing may be looked at, a search takes all of its steps, and is not known to have ended before.
    assert "40 steps at features towards given values of 4 targets (s)" in told
    assert "start at features for all components: as before (s)" in again


def test_the_page_says_how_to_read_it(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    (snippet,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "logging" in code)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger = logging.getLogger(NAME)
    level = logger.level
    try:
        exec(compile(snippet, "troubleshooting", "exec"), {})
        assert logger.isEnabledFor(logging.DEBUG)
        assert logging.getLogger().handlers
    finally:
        logger.setLevel(level)
