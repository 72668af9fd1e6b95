"""Targets whose class depends on the image, by the name that it has for one image."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from problems import Problem
from reference import relative
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVR, OneClassSVM

from pytorch_grad_cam_pcasvm import Head, LogRatioTarget, PCATarget, ProbabilityTarget, SVMTarget
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.targets import ScoreTarget, default_decision, fix_target


@pytest.fixture(scope="module")
def problem():
    return Problem(classes=3)


def each(problem):
    output = problem.net(problem.x)
    for place, label in enumerate(problem.net.predict(problem.x).tolist()):
        yield output.rows([place]), label


@pytest.mark.parametrize("kind", [SVMTarget, LogRatioTarget])
def test_the_predicted_class_and_its_runner_up_get_their_names(problem, kind):
    seen = set()
    for output, label in each(problem):
        order = output.head.voting.ranking(output.decision)[0].argsort(descending=True).tolist()
        ranked = [["ant", "bee", "cat"][place] for place in order]
        second = next(name for name in ranked if name != label)
        seen.add((label, second))
        assert fix_target(kind(), output) == kind(label)
        assert fix_target(kind(versus="runner-up"), output) == kind(label, versus=second)
        rest = next(name for name in ranked if name != "ant")
        assert fix_target(kind("ant", versus="runner-up"), output) == kind("ant", versus=rest)
        assert fix_target(kind("ant", versus="bee", sign="-"), output) == kind("ant", versus="bee", sign="-")
        assert fix_target(kind("bee"), output) == kind("bee")
    assert len(seen) > 1
    assert fix_target(PCATarget(1), output) == PCATarget(1)
    assert fix_target(SVMTarget("cat", versus=["ant", "bee"]), output) == SVMTarget("cat", versus=["ant", "bee"])


def test_a_class_may_be_called_runner_up():
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(30, 4)), np.array(["a", "b", "runner-up"])[np.arange(30) % 3]
    head = Head.of(LogisticRegression().fit(x, labels))
    output = HeadOutput.of(head, head(torch.tensor(x[:1])))
    for target in (SVMTarget("a", versus="runner-up"), ProbabilityTarget("a")):
        assert fix_target(target, output) == target
    assert fix_target(ProbabilityTarget(sign="-"), output) == ProbabilityTarget(output.labels()[0].item(), sign="-")


def test_a_class_that_is_its_own_only_rival_has_its_margin_and_0_is_a_class():
    x = np.random.default_rng(0).normal(size=(30, 4))
    head = Head.of(LogisticRegression().fit(x, np.arange(30) % 3))
    for target, number, named in (
        (SVMTarget(1, versus=0), 1, SVMTarget(1, versus=0)),
        (SVMTarget(versus=0), 2, SVMTarget(2, versus=0)),
        (SVMTarget(versus=(0,)), 0, SVMTarget(0)),
        (SVMTarget(versus=(0, 1)), 0, SVMTarget(0, versus=(1,))),
        (SVMTarget(versus="runner-up"), 3, SVMTarget(1, versus=0)),
        (SVMTarget(versus="runner-up"), 4, SVMTarget(1)),
    ):
        assert target.name_question(head, number) == named


def test_the_decision_where_none_is_named_is_against_the_class_that_is_an_absence():
    x = np.random.default_rng(0).normal(size=(30, 4))
    head = Head.of(LogisticRegression().fit(x, np.arange(30) % 3))
    assert default_decision(head) == SVMTarget()
    assert default_decision(head, 0) == SVMTarget(versus=0)
    head.training_set.preparation = {"normal": 2}
    assert default_decision(head) == SVMTarget(versus=2)
    assert default_decision(head, 0) == SVMTarget(versus=0)
    with pytest.raises(ValueError, match=r"5 is not a class of this head: choose one of \[0, 1, 2\]"):
        default_decision(head, 5)


def test_without_classes_there_is_nothing_to_name():
    x = np.random.default_rng(0).normal(size=(30, 4))
    for estimator in (SVR().fit(x, x[:, 0]), OneClassSVM().fit(x)):
        head = Head.of(estimator)
        output = HeadOutput.of(head, head(torch.tensor(x[:1])))
        assert fix_target(SVMTarget(), output) == SVMTarget()
    scores = torch.tensor([[0.2, 3.0, -1.0]])
    assert fix_target(ScoreTarget(), scores) == ScoreTarget(1)
    assert fix_target(ScoreTarget(2), scores) == ScoreTarget(2)
    assert fix_target(SVMTarget(), scores) == SVMTarget()


def test_how_many_questions_a_margin_stands_for_and_which_have_boundaries(problem):
    head = problem.net.head
    assert [
        SVMTarget(*arguments).count_questions(head)
        for arguments in ((), ("ant",), ("ant", "bee"), ("ant", "runner-up"), (None, "runner-up"))
    ] == [3, 1, 1, 3, 9]
    x = np.random.default_rng(0).normal(size=(30, 4))
    for asked in (SVMTarget("ant", sign="-"), SVMTarget("ant", at="max"), SVMTarget("ant", sign="-", at=(0, 1))):
        assert asked.boundary(head) == SVMTarget("ant")
    assert SVMTarget().boundary(Head.of(SVR().fit(x, x[:, 0]))) is None
    assert SVMTarget().boundary(Head.of(OneClassSVM().fit(x))) == SVMTarget()
    assert SVMTarget().boundary(SimpleNamespace(vote=None, classes_=None)) is None


def test_the_question_of_each_image(problem):
    output = problem.net(problem.x)
    predicted = torch.tensor([["ant", "bee", "cat"].index(label) for label in problem.net.predict(problem.x)])
    assert torch.equal(SVMTarget().number_questions(output), predicted)
    against = SVMTarget(versus="bee").number_questions(output)
    assert torch.equal(against[predicted != 1], predicted[predicted != 1])
    assert (against != 1).all()
    pairs = SVMTarget(versus="runner-up").number_questions(output)
    alone = SVMTarget("ant", versus="runner-up").number_questions(output)
    for number, place, first in zip(pairs.tolist(), alone.tolist(), predicted.tolist(), strict=True):
        assert number // 3 == first
        assert number % 3 != first
        assert place != 0
        assert first in (0, place)
    at = SVMTarget(versus=["ant", "bee"]).name_question(problem.net.head, 0)
    assert at == SVMTarget("ant", versus=["bee"])


def test_against_several_no_class_is_its_own_rival(problem):
    output = problem.net(problem.x)
    of_ant = SVMTarget(versus=["ant", "cat"])(output)
    for place, label in enumerate(problem.net.predict(problem.x).tolist()):
        names = ["ant", "bee", "cat"]
        rivals = [names.index(name) for name in ("ant", "cat") if name != label]
        margins = output.margins[place]
        assert relative(of_ant[place], margins[names.index(label)] - margins[rivals].mean()) < 1e-12
        assert relative(SVMTarget(versus=[label])(output)[place], margins[names.index(label)]) < 1e-12  # no rival
