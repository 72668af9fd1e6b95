"""What a head knows once it is made: its vote, labels, positions, and facts of its training set."""

import copy

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import Head
from pytorch_grad_cam_pcasvm.head import Stage, stage_for, vote
from pytorch_grad_cam_pcasvm.head.stage import Facts

rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(40, 5)) * [1, 2, 3, 4, 5] + 3
LABELS = np.arange(40) % 3


def head_of(*steps, labels=LABELS):
    return Head.of(make_pipeline(*steps).fit(FEATURES, labels))


def test_a_head_has_the_vote_and_the_labels_of_its_last_stage():
    head = head_of(StandardScaler(), PCA(2), SVC())
    assert head.voting is head.vote is head.stages[-1].voting
    assert (head.n_features, head.component_position, head.decision_position, head.linear_until) == (5, 2, 3, 2)
    assert head.classes_.tolist() == [0, 1, 2]
    for other in (copy.deepcopy(head), head.to("meta")):
        assert other.voting is other.vote is other.stages[-1].voting
    assert head.voting.matrix.device.type == "meta"


def test_without_a_decision_there_is_no_vote():
    head = head_of(PCA(2))
    assert head.vote is head.classes_ is head.decision_position is None
    for _ in range(2):
        with pytest.raises(ValueError, match="the head has no SVM"):
            head.voting  # noqa: B018


def test_a_decision_without_a_gradient_is_no_second_child():
    head = head_of(PCA(2), RandomForestClassifier(3, random_state=0))
    assert head.enumerated is head.stages[-1]
    assert copy.deepcopy(head).enumerated is not head.enumerated
    assert [name for name, _ in head.named_children()] == ["stages"]
    assert not any("enumerated" in name for name in head.state_dict())


def test_names_of_outputs_are_those_of_the_stage():
    fitted = make_pipeline(PCA(2), LinearRegression()).fit(FEATURES, FEATURES[:, :2])
    head = Head.of(fitted, outputs=["width", "height"])
    assert head.classes_.tolist() == list(Head(list(head.stages)).classes_) == ["width", "height"]


@pytest.mark.parametrize("kind", vote.KINDS)
def test_a_vote_is_made_again_from_its_arguments(kind):
    arguments = {
        "Outputs": {"n_classes": 3, "labels": True},
        "OneVsRest": {"n_classes": 3},
        "Relative": {"n_classes": 3},
        "Plurality": {"n_classes": 3, "k": 5},
        "OneVsOne": {"n_classes": 4, "break_ties": True, "zero_is_second": True},
        "OneClass": {"zero_is_inlier": True},
        "Regression": {"inverse": "exp"},
        "BinaryVote": {"zero_is_second": True},
        "Calibrated": {"votings": [vote.binary(), vote.binary()], "sizes": [1, 1], "calibrations": [None, None]},
    }.get(kind, {})
    made = vote.KINDS[kind](**arguments)
    again = vote.KINDS[made.kind](**made.arguments)
    assert made.kind == kind
    assert arguments.items() <= made.arguments.items()
    for name, value in vars(made).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(again, name))
        elif name != "members":
            assert value == getattr(again, name)
    assert len(again.members) == len(made.members)


def test_what_stages_know_of_the_training_set_in_tensors():
    scale, pca = (stage_for(estimator.fit(FEATURES)) for estimator in (StandardScaler(), PCA(2)))
    deviations = torch.tensor(FEATURES.std(0))
    torch.testing.assert_close(scale.input_mean, torch.tensor(FEATURES.mean(0)))
    torch.testing.assert_close(scale.input_deviations, deviations)
    torch.testing.assert_close(scale.output_deviations, torch.ones(5).double())
    torch.testing.assert_close(pca.input_mean, torch.tensor(FEATURES.mean(0)))
    expected = torch.tensor(PCA(2).fit_transform(FEATURES).std(0, ddof=1))
    torch.testing.assert_close(pca.output_deviations, expected)
    both = stage_for(make_union(StandardScaler(), PCA(2)).fit(FEATURES))
    torch.testing.assert_close(both.output_deviations, torch.cat([torch.ones(5).double(), expected]))
    # Of a discriminant analysis the mean is one of the classes' means, with its priors for weights.
    discriminant = LinearDiscriminantAnalysis(priors=[0.2, 0.3, 0.5])
    for estimator in (StandardScaler(with_mean=False), MinMaxScaler(), TruncatedSVD(2), discriminant):
        stage = head_of(estimator, SVC()).stages[0]
        assert stage.input_mean is stage.input_deviations is stage.output_deviations is None
    assert stage_for(make_union(PCA(2), TruncatedSVD(2)).fit(FEATURES)).output_deviations is None
    assert stage_for(StandardScaler(with_std=False).fit(FEATURES)).input_deviations is None


def test_what_stages_know_of_the_training_set_in_numbers():
    head = head_of(MinMaxScaler((0, 2)), PCA(2), SVC())
    scale, pca, machine = (stage.facts for stage in head.stages)
    assert scale == Facts(count=40, low=0.0, high=2.0)
    assert pca.count == machine.count == 40
    np.testing.assert_allclose(pca.spread, MinMaxScaler((0, 2)).fit_transform(FEATURES).var(0, ddof=1).sum())
    assert Facts() == Stage.facts
    assert Facts().to_numbers() == {}
    assert scale.to_numbers() == dict(head.stages[0].seen) == {"count": 40.0, "low": 0.0, "high": 2.0}
    assert Facts.from_numbers({"count": 3, "spread": 1.5, "of a later version": 7.0}) == Facts(count=3.0, spread=1.5)


def test_facts_are_named_as_in_version_0_4():
    stage = stage_for(PCA(2).fit(FEATURES))
    stage.seen = {**stage.seen, "least": 1.0, "reach": 2.0}
    assert stage.facts == Facts(40.0, stage.facts.spread, least=1.0, reach=2.0)


def test_of_equal_votes_of_neighbours_the_first_class_is_predicted_and_the_larger_margin_ranks():
    plurality = vote.plurality(3, 5)
    decision = torch.tensor([[-3.0, 9.0, 4.0, 2.0, 2.0, 1.0], [8.0, -7.0, 1.0, 1.0, 1.0, 3.0]]).double()
    assert plurality.predicted(decision).tolist() == [0, 2]
    assert plurality.ranking(decision).argsort(descending=True).tolist() == [[1, 0, 2], [2, 0, 1]]
    assert torch.equal(plurality.scores(decision), decision[:, :3])


def test_an_image_has_no_label_at_exactly_0():
    assert vote.outputs(3, labels=True).prediction(torch.tensor([[-1.0, 0.0, 1e-9]])).tolist() == [[0, 0, 1]]
    assert vote.one_class(zero_is_inlier=True).prediction(torch.tensor([[0.0], [-1e-9]])).tolist() == [1, -1]
    assert vote.one_class().prediction(torch.tensor([[0.0], [1e-9]])).tolist() == [-1, 1]


@pytest.mark.parametrize(
    ("arguments", "ranks"), [((3, 0, False), False), ((3, 3, False), True), ((3, 0, True), True), ((2, 0, False), True)]
)
def test_votes_alone_tell_no_runner_up_among_several_classes(arguments, ranks):
    assert vote.compared(*arguments).ranks is ranks
