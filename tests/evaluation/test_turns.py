"""Turns: within a budget, checks are measured from look to look, and a page stands after each."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pytorch_grad_cam_pcasvm import ContributionCAM, evaluation
from pytorch_grad_cam_pcasvm.runtime.amounts import LAST, least_images
from pytorch_grad_cam_pcasvm.studio.evaluation.report import _refuse_few
from pytorch_grad_cam_pcasvm.studio.evaluation.result import Estimate, Result, Row
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import (
    EARLY,
    Budget,
    CheckStep,
    RunningCheck,
    list_looks,
    take_turns,
)

QUIET = {"progress": False, "batch_size": 10}
CHECKS = ["faithfulness", "completeness"]
pytestmark = pytest.mark.usefixtures("undrawn")


class Clock:
    """Seconds that pass where somebody says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Looked:
    """A subject of 80 items, ten at a time."""

    title, unit, progress, level = "", "image", False, 0.95
    looks, total, done = (20, 40), 80, 0


def course(name, clock, seconds, calls):
    """Return a check whose batches take so many seconds."""

    def steps():
        yield None
        subject = Looked()
        while subject.done < subject.total:
            subject.done += 10
            clock.now += seconds
            calls.append((name, subject.done))
            yield CheckStep(subject, lambda: found(subject), lambda _: True)

    def found(subject):
        return Result(name, "", [], {}, {"measured": f"{subject.done} of {subject.total} images"})

    made = RunningCheck(name, steps())
    made.begin()
    return made


def test_checks_take_turns_from_look_to_look():
    clock, calls = Clock(), []
    courses = [course(name, clock, 1, calls) for name in "ab"]
    told = [(turn.name, turn.result.settings["measured"]) for turn in take_turns(courses, Budget(None, clock))]
    assert told == [(name, f"{done} of 80 images") for done in (20, 40, 80) for name in "ab"]
    assert len(calls) == 16
    assert not any(turn.late for turn in courses)


def test_what_does_not_fit_into_the_time_is_not_begun():
    clock, calls = Clock(), []
    courses = [course("quick", clock, 1, calls), course("slow", clock, 5, calls)]
    for _ in take_turns(courses, Budget(0.5, clock)):  # of 30 s, 3 are kept
        pass
    # 2 s and 10 s to the first look, 2 s and 10 s to the second; then 4 s do not fit into the 3 that are left.
    assert clock.now == 24
    assert [turn.result.settings["stopped"] for turn in courses] == ["after 40 of 80 images, as the time was over"] * 2
    assert all(turn.late for turn in courses)


def test_a_machine_that_becomes_slower_is_noticed_within_a_batch():
    clock, calls = Clock(), []
    (only,) = courses = [course("only", clock, 1, calls)]
    for turn in take_turns(courses, Budget(1, clock)):
        if turn.result.settings["measured"].startswith("40"):
            clock.now += 48  # of 60; 54 may be used
    assert only.late
    assert calls[-1] == ("only", 40)


def test_a_look_that_the_clock_makes_the_last_is_judged_as_the_last():
    """The clock knows nothing of the answer: 5 % of the answers may be wrong, not 5 % shared out over three looks."""
    clock = Clock()

    def find(subject):
        row = Row("Method", "deletion", "", Estimate(0.5, 0.1, subject.done), 0.0, level=subject.level)
        return Result("slow", "", [row], {}, {"measured": f"{subject.done} of 80 images"})

    def steps():
        yield None
        subject = Looked()
        while subject.done < subject.total:
            subject.done += 10
            clock.now += 5
            yield CheckStep(subject, lambda: find(subject), lambda _: False)

    only = RunningCheck("slow", steps())
    only.begin()
    levels = []
    for turn in take_turns([only], Budget(0.5, clock)):
        levels += [row.level for row in turn.result.rows]
    assert levels[0] == EARLY
    assert only.late
    assert [row.level for row in only.result.rows] == [LAST]
    assert only.lacking == 20.0  # the last look, at all 80, is 4 steps of 5 s away


def test_a_quarter_of_the_time_is_told_once():
    clock = Clock()
    told = [next(take_turns([course("slow", clock, 8, [])], Budget(1, clock)))]
    assert told[0].result.settings["measured"] == "20 of 80 images"  # after 16 s of 60
    clock = Clock()
    turns = take_turns([course("slow", clock, 16, [])], Budget(1, clock))
    assert next(turns) is None
    assert next(turns).result.settings["measured"] == "20 of 80 images"


def test_a_budget_of_nothing_is_undecided_with_the_reason(corner, tmp_path):
    net, x, labels = corner
    study = evaluation.Study(net, (x, labels), ["features"], [ContributionCAM], images=40, minutes=0, **QUIET)
    page = study.report(tmp_path, checks=CHECKS).read_text()
    entries = json.loads((tmp_path / "report.json").read_text())
    (verdict,) = entries["verdicts"]
    assert verdict["verdict"] == "undecided"
    assert "The time was over before the first look: give more minutes" in verdict["sentence"]
    assert "The time of 0 s was over before faithfulness, completeness had" in page
    assert "Measured: faithfulness none; completeness none" in page
    with pytest.raises(ValueError, match="the time was over before the first look: give more minutes"):
        study.completeness()


def test_a_page_is_written_after_each_look(corner, tmp_path, monkeypatch):
    net, x, labels = corner
    pages = []
    module = sys.modules["pytorch_grad_cam_pcasvm.studio.evaluation.report"]
    write = module.page

    def written(file):
        page = write(file)
        pages.append(page.read_text())
        return page

    monkeypatch.setattr(module, "page", written)
    settings = {"images": 40, "minutes": 1000, "stop_early": False, **QUIET}
    study = evaluation.Study(net, (x, labels), ["features"], [ContributionCAM], **settings)
    study.report(tmp_path, checks=CHECKS)
    measured = [
        ("none", "20 of 40 images"),  # the quick one first
        ("20 of 40 images", "20 of 40 images"),
        ("20 of 40 images", "40 of 40 images"),
        ("40 of 40 images", "40 of 40 images"),
    ]
    assert list_looks(40) == [20]
    assert len(pages) == len(measured) + 1
    for page, (faithfulness, completeness) in zip(pages, [*measured, measured[-1]], strict=True):
        assert f"Measured: faithfulness {faithfulness}; completeness {completeness}." in page
    assert all("written again after each look" in page for page in pages[:3])
    assert "the time ended nothing" in pages[-1]
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert {row["level"] for result in results.values() for row in result["rows"]} == {LAST}


def test_the_last_page_stands_where_it_is_interrupted(corner, tmp_path, monkeypatch):
    net, x, labels = corner
    settings = {"images": 60, "minutes": 1000, **QUIET}
    study = evaluation.Study(net, (x, labels), ["features"], [ContributionCAM], **settings)
    module = sys.modules["pytorch_grad_cam_pcasvm.studio.evaluation.faithfulness"]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "ranks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.report(tmp_path, checks=CHECKS)
    text = (tmp_path / "index.html").read_text()
    assert "completeness 30 of 60 images" in text
    assert "its first look is still to come" in text
    assert not list(tmp_path.glob(".*"))


def test_the_time_decides_only_how_many_looks_are_reached(corner):
    net, x, labels = corner
    call = [net, (x, labels), ["features"], [ContributionCAM]]
    budgeted = evaluation.Study(*call, images=40, minutes=1000, **QUIET)
    free = evaluation.Study(*call, images=40, **QUIET)
    half = evaluation.Study(*call, images=20, **QUIET)  # the first of the same images
    whole, same = budgeted.completeness(), free.completeness()
    assert [row.estimate for row in whole.rows] == [row.estimate for row in same.rows]
    assert {row.level for row in whole.rows} == {LAST}
    assert {row.level for row in same.rows} == {0.95}
    steps = evaluation.Study.completeness.__wrapped__(budgeted)
    way = RunningCheck("completeness", steps)
    way.begin()
    while not way.advance(Budget(None)):
        pass
    for row, expected in zip(way.result.rows, half.completeness().rows, strict=True):
        assert row.estimate.n == expected.estimate.n == 20
        assert row.estimate.mean == pytest.approx(expected.estimate.mean, rel=1e-3, abs=1e-6)
    assert {row.level for row in way.result.rows} == {EARLY}


def test_too_few_images_are_refused_before_anything_is_computed(corner, tmp_path, monkeypatch):
    net, x, labels = corner
    study = evaluation.Study(net, (x, labels), ["features"], [ContributionCAM], images=10, minutes=1, **QUIET)
    monkeypatch.setattr(type(net), "forward", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="10 images are too few for an answer: the first look is at 20; give at least"):
        study.report(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="minutes must be a number from 0"):
        evaluation.Study(net, (x, labels), ["features"], minutes=-1)


def test_the_number_that_would_do_is_the_first_that_does():
    def passes(count, contradicting=0):
        numbers = np.arange(count) < contradicting
        estimate = Estimate.of(numbers.astype(float), bounds=(0, 1))
        return Row("m", "share", "", estimate, 0.1, below=True, level=LAST).passed

    least = least_images(shares=True)
    assert passes(least)
    assert not passes(least - 1)
    assert least_images(shares=False) == 20
    forgiving = least_images(shares=True, contradicting=1)
    assert passes(forgiving, 1)
    assert not passes(forgiving - 1, 1)
    assert (least, forgiving) == (38, 56)  # by the binomial distribution
    assert list_looks(80)[0] == 20


@pytest.mark.parametrize(
    ("count", "told"),
    [(37, "not that they may: 38 would do"), (38, "with one that does it stays open; 56 images bear one"), (56, "")],
)
def test_what_so_few_images_can_decide_is_told_at_the_start(capsys, count, told):
    net = SimpleNamespace(head=SimpleNamespace(decision_position=1))
    _refuse_few(SimpleNamespace(rows=range(count), progress=True, net=net))
    printed = capsys.readouterr().out
    assert printed.startswith(f"{count} images may show that maps are ") if told else not printed
    assert told in printed
