import json
import sys

import numpy as np
import pytest
import torch

from pytorch_grad_cam_pcasvm import ContributionCAM, PCATarget, SVMTarget, evaluation
from pytorch_grad_cam_pcasvm.runtime.amounts import LAST
from pytorch_grad_cam_pcasvm.studio.evaluation.report import _line, expected, in_minutes
from pytorch_grad_cam_pcasvm.studio.evaluation.result import FAILED, PASSED, UNDECIDED, Estimate, Row, number
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import RANDOM
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import EARLY, chance_of_clarity, list_looks, settled


def row_of(values, level):
    return Row("Method", "deletion", RANDOM, Estimate.of(values), 0.0, level=level)


@pytest.mark.parametrize(("count", "stops"), [(200, [50, 100]), (60, [30]), (80, [20, 40]), (39, [20]), (30, [])])
def test_there_are_few_looks_and_none_at_few_images(count, stops):
    assert list_looks(count) == stops


def test_looking_three_times_is_wrong_no_more_often_than_once():
    random, wrong = np.random.default_rng(0), 0
    for _ in range(2000):
        values = random.normal(size=200)  # there is nothing to find
        verdicts = [row_of(values[:stop], EARLY).verdict for stop in list_looks(200)]
        wrong += any(verdict in (PASSED, FAILED) for verdict in [*verdicts, row_of(values, LAST).verdict])
    assert wrong / 2000 < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 2000)
    assert wrong > 2000 * 0.025  # the limits are not so wide that nothing could be found


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.15, 0.3])
def test_the_chance_to_become_clear_is_how_often_it_does(shift):
    random = np.random.default_rng(1)
    start = random.normal(size=50)
    start += shift - start.mean()
    row = row_of(start, EARLY)
    spread = start.std(ddof=1)
    draws = []
    for _ in range(1000):  # the standard error of their mean is at most 0.016
        # What is not known is drawn, too: the true mean, given what was seen.
        mean = random.normal(shift, spread / np.sqrt(50))
        values = np.concatenate([start, random.normal(mean, spread, 150)])
        draws.append(row_of(values, LAST).verdict != UNDECIDED)
    assert chance_of_clarity(row, 0.25) == pytest.approx(np.mean(draws), abs=0.05)


def test_what_is_clear_or_hopeless_is_settled():
    random = np.random.default_rng(2)
    noise = random.normal(size=100)
    noise -= noise.mean()
    clear, hopeless, open_yet = (row_of(noise + shift, EARLY) for shift in (0.5, 0.0, 0.2))
    assert (clear.verdict, hopeless.verdict, open_yet.verdict) == (PASSED, UNDECIDED, UNDECIDED)
    assert settled([clear, hopeless], 0.5)
    assert not settled([clear, open_yet], 0.5)
    assert not settled([row_of(noise[:5] + 9, EARLY)], 0.5)  # too few to say
    assert not settled([], 0.5)


def test_a_study_may_stop_early_and_says_so(corner, capsys):
    net, x, labels = corner
    call = [net, (x, labels), ["features"], [ContributionCAM], PCATarget(0)]
    options = {"images": 40, "progress": False}
    early, again = (
        evaluation.Study(*call, **options, batch_size=size, stop_early=True).completeness() for size in (16, 7)
    )
    assert early.settings["stopped"] == "after 20 of 40 images, as the answer is clear"
    assert {row.estimate.n for row in early.rows} == {20}
    assert {row.level for row in early.rows} == {EARLY}
    assert [row.verdict for row in again.rows] == [row.verdict for row in early.rows]
    np.testing.assert_allclose(again.rows[0].estimate.mean, early.rows[0].estimate.mean, atol=1e-6)
    half = evaluation.Study(*call, **options | {"images": 20}).completeness()  # the same images
    assert half.rows[0].estimate.n == 20
    np.testing.assert_allclose(half.rows[-1].estimate.mean, early.rows[-1].estimate.mean, rtol=1e-6)
    whole = evaluation.Study(*call, **options).completeness()
    assert "stopped" not in whole.settings
    assert {row.estimate.n for row in whole.rows} == {40}
    json.dumps(early.to_dict(), allow_nan=False)
    assert evaluation.Result.from_dict(early.to_dict()).rows == early.rows


@pytest.mark.usefixtures("undrawn")
def test_how_long_it_takes_is_said_first(corner, tmp_path, capsys, monkeypatch):
    net, x, labels = corner
    module = sys.modules["pytorch_grad_cam_pcasvm.studio.evaluation.report"]
    monkeypatch.setattr(module, "_seconds", lambda call, runs=1: 0.04)  # of four images, or one
    study = evaluation.Study(net, (x, labels), ["features"], [ContributionCAM], images=20, stop_early=True)
    maps, run = 20 * (2 * 0.01 + 0.04), 20 * 0.01
    assert expected(study, {"completeness": {}}) == pytest.approx(1.5 * (maps + run))
    two = expected(study, {"completeness": {}, "stability": {}})
    assert two == pytest.approx(1.5 * (maps + run + 20 * 2 * 0.01))  # maps are made once
    study.report(tmp_path, checks=["completeness", "stability"])
    printed = capsys.readouterr().out
    assert printed.startswith(
        "this will take less than a minute; it stops sooner where the answer is clear\nso far:\n  It is unclear"
    )
    monkeypatch.setattr(module, "_seconds", lambda call, runs=1: call())
    monkeypatch.setattr(Subject, "explained", lambda *_: 1 / 0)
    broken = evaluation.Study(net, (x, labels), ["features"], [ContributionCAM], images=20)
    with (
        pytest.warns(UserWarning, match="ZeroDivisionError"),
        pytest.raises(ValueError, match="no check could be made"),
    ):
        broken.report(tmp_path, checks=["completeness"])  # rather than an error of the estimate
    assert "this will take" not in capsys.readouterr().out
    assert [in_minutes(seconds) for seconds in (3, 62, 600)] == [
        "less than a minute",
        "about 1 minute",
        "about 10 minutes",
    ]


@pytest.mark.parametrize("share", [0.1, 0.12, 0.15])
def test_shares_pass_by_chance_no_more_often_than_said(share):
    random, passed = np.random.default_rng(3), 0
    for _ in range(1000):
        values = (random.random(80) < share).astype(float)
        rows = [
            Row("Method", "wrong maps", "", Estimate.of(values[:stop]), 0.1, below=True, level=level)
            for stop, level in ((20, EARLY), (40, EARLY), (80, LAST))
        ]
        passed += any(row.verdict == PASSED for row in rows)
    assert passed / 1000 < 0.025 + 3 * np.sqrt(0.025 * 0.975 / 1000)


def test_none_of_a_few_may_be_one_of_many():
    none = Row("Method", "wrong maps", "", Estimate.of(np.zeros(20)), 0.1, below=True)
    assert none.verdict == UNDECIDED
    assert none.estimate.interval == pytest.approx((0.0, 1 - 0.025 ** (1 / 20)))
    assert chance_of_clarity(none, 0.25) > 0.1
    many = Row("Method", "wrong maps", "", Estimate.of(np.zeros(40)), 0.1, below=True)
    assert many.verdict == PASSED
    assert Estimate.of(np.ones(40)).interval == pytest.approx((0.025 ** (1 / 40), 1.0))
    assert Estimate.of([0.0, 1.0, 0.5]).share is False


def test_numbers_are_written_as_people_read_them():
    assert str(Estimate(-0.001, 0.02, 20)) == "+0.00 ± 0.02"
    share, difference = (Row("Method", "pointing game", to, Estimate(0.65, 0.1, 20)) for to in ("", RANDOM))
    assert (number(share), number(difference)) == ("0.65 ± 0.10", "+0.65 ± 0.10")


def test_a_look_at_values_that_are_all_the_same_goes_on(corner):
    net, x, labels = corner
    options = {"images": 60, "progress": False, "stop_early": True}
    study = evaluation.Study(net, (x, labels), ["features"], [ContributionCAM], PCATarget(0), **options)
    same = np.isin(np.arange(len(x)), study.rows[:30])
    x = x.detach().clone()
    x[same] = x[study.rows[0]].clone()
    study = evaluation.Study(net, (x, labels), ["features"], [ContributionCAM], PCATarget(0), **options)
    result = study.completeness()
    assert result.rows[0].estimate.n == 60
    assert "stopped" not in result.settings


@pytest.mark.usefixtures("undrawn")
def test_where_nothing_is_left_once_parts_are_removed_that_is_said(corner, tmp_path, monkeypatch):
    net, x, labels = corner
    call = [net, (x, labels), ["features"], [ContributionCAM]]
    module = sys.modules["pytorch_grad_cam_pcasvm.studio.evaluation.faithfulness"]
    monkeypatch.setattr(module, "without", lambda _, order, *__: torch.zeros(len(order), *x.shape[1:]))
    with pytest.raises(ValueError, match="once parts of an image are removed, the target has the same value whichever"):
        evaluation.faithfulness(*call, SVMTarget(labels[0]), images=12, progress=False)
    options = {"images": 12, "progress": False, "checks": ["faithfulness", "completeness"]}
    with pytest.warns(UserWarning, match="'faithfulness' was not run: once parts"):
        page = evaluation.report(*call, target=SVMTarget(labels[0]), out=tmp_path, **options)
    assert "These cannot be measured here: once parts of an image are removed" in page.read_text()


@pytest.mark.parametrize(
    ("target", "options", "line"),
    [
        (None, {}, "maps = ContributionCAM(net, ['features']).explain(images)"),
        (PCATarget(0), {}, "maps = ContributionCAM(net, ['features']).explain(images, PCATarget(component=0))"),
        (None, {"baseline": "zero"}, "maps = ContributionCAM(net, ['features'], baseline='zero').explain(images)"),
        (None, {"mean": [torch.zeros(1)]}, "maps = ContributionCAM(net, ['features'], mean=...).explain(images)"),
    ],
)
def test_the_line_of_python_is_of_what_was_measured(corner, target, options, line):
    net, x, _ = corner
    methods = {"<method>": (ContributionCAM, options)}
    study = evaluation.Study(net, x, ["features"], methods, target, images=4, progress=False)
    assert _line(study, "<method>") == line.replace("PCATarget(component=0)", repr(PCATarget(0)))
