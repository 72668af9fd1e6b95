"""Meta-estimators as stages: estimators side by side, means of members, thresholds, stacks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.base import is_classifier
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import (
    BaggingClassifier,
    BaggingRegressor,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
    VotingRegressor,
)
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import RANSACRegressor
from sklearn.model_selection import FixedThresholdClassifier, TunedThresholdClassifierCV
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier, OutputCodeClassifier, _ConstantPredictor
from sklearn.multioutput import MultiOutputClassifier, MultiOutputRegressor
from sklearn.preprocessing import FunctionTransformer
from sklearn.semi_supervised import SelfTrainingClassifier

from pytorch_grad_cam_pcasvm.head import vote
from pytorch_grad_cam_pcasvm.head.decisions import Decision, Ensemble, LinearDecision
from pytorch_grad_cam_pcasvm.head.distances import Quadratic
from pytorch_grad_cam_pcasvm.head.elementwise import Calibration, Elementwise, Isotonic, PerClass, Platt, Temperature
from pytorch_grad_cam_pcasvm.head.elsewhere import tensor
from pytorch_grad_cam_pcasvm.head.estimators.predictors import decide_largest, plain_voting, regression, softmax
from pytorch_grad_cam_pcasvm.head.estimators.transformers import select_columns
from pytorch_grad_cam_pcasvm.head.predictor import read_threshold
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import Chain, Scale, Union
from pytorch_grad_cam_pcasvm.head.table import Convert, Row, stage_for
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError

# --- several estimators side by side ----------------------------------------------------------------------------------


def _one_vs_rest(estimator: OneVsRestClassifier, convert: Convert) -> Stage:
    members, decisions = _members(estimator, convert, estimator.estimators_)
    if estimator.multilabel_:
        return Ensemble(members, 1.0, vote.outputs(len(members), labels=True), estimator.classes_)
    # Each member's own probability, divided by their sum, if that is a sigmoid (no curve that ends in 0 everywhere).
    own = [decision.voting.calibration for decision in decisions]
    curves = [curve for calibration in own if isinstance(calibration, PerClass) for curve in calibration.curves]
    sigmoids = len(curves) == len(members) and all(isinstance(curve, Platt) for curve in curves)
    votes = plain_voting(len(estimator.classes_), PerClass(curves) if sigmoids else None)
    return Ensemble(members, 1.0, votes, estimator.classes_)


@stage_for.register(_ConstantPredictor)
def _constant(estimator: _ConstantPredictor) -> Stage:
    weight = torch.zeros(1, estimator.n_features_in_).double()
    return LinearDecision(weight, tensor(estimator.y_).reshape(1), vote.binary(), range(2))


def _one_vs_one(estimator: OneVsOneClassifier, convert: Convert) -> Stage:
    members, decisions = _members(estimator, convert, estimator.estimators_)
    zero_is_second = decisions[0].voting.zero_is_second
    if len(estimator.classes_) == 2:
        return Ensemble(members, 1.0, vote.binary_vote(zero_is_second=zero_is_second), estimator.classes_)
    # Its members are positive for the second class of a pair, and the best score wins.
    votes = vote.one_vs_one(len(estimator.classes_), break_ties=True, zero_is_second=zero_is_second)
    return Ensemble(members, -1.0, votes, estimator.classes_)


def _output_code(estimator: OutputCodeClassifier, convert: Convert) -> Stage:
    members, _ = _members(estimator, convert, estimator.estimators_)
    codes = tensor(estimator.code_book_)
    distances = Quadratic(codes, torch.ones_like(codes), 0 * codes[:, 0])
    return decide_largest([Union(members), distances], estimator.classes_)


def _calibrated(estimator: CalibratedClassifierCV, convert: Convert) -> Stage:
    folds = estimator.calibrated_classifiers_
    for fold in folds:
        # Temperature scaling fits on the classes' numbers.
        if list(fold.estimator.classes_) not in (list(estimator.classes_), list(range(len(estimator.classes_)))):
            raise NoClosedFormError("a fold of CalibratedClassifierCV saw only some classes", "fit it with fewer folds")
    members, decisions = _members(estimator, convert, [fold.estimator for fold in folds], binary=False)
    votings = [decision.voting for decision in decisions]
    if folds[0].method == "temperature" and any(voting.members for voting in votings):
        raise NoClosedFormError(
            "temperature scaling of these probabilities is not supported", "fit it with method='sigmoid'"
        )
    sizes = [decision.n_outputs for decision in decisions]
    votes = vote.calibrated(votings, sizes, [_calibration(fold) for fold in folds])
    return Ensemble(members, 1.0, votes, estimator.classes_)


def _members(
    estimator: Any, convert: Convert, fitted: list[Any], *, binary: bool = True
) -> tuple[list[Chain], list[Any]]:
    """Return the members of a meta-estimator, each a decision between two classes if binary, and their decisions."""
    members = [Chain(convert(base)) for base in fitted]
    decisions = [member.stages[-1] for member in members]
    for base, decision in zip(fitted, decisions, strict=True):
        # A regressor is cut at 0.5, and of probabilities scikit-learn takes the second column.
        plain = isinstance(decision, Decision) and (not binary or decision.voting.kind == "Binary")
        if plain and not hasattr(base, "decision_function") and not isinstance(estimator, MultiOutputClassifier):
            # It decides by probabilities: these must rank as the values do, or be what is taken.
            sigmoid = isinstance(estimator, OneVsRestClassifier) and decision.voting.calibration == softmax(2)
            plain = sigmoid or bool(decision.voting.members)
        of_sklearn = isinstance(estimator, MultiOutputClassifier) or getattr(decision, "voting", None) is None
        if not plain or not (of_sklearn or decision.voting.of_sklearn):
            raise _refuse_member(estimator, base, "a classifier that has one decision value for two classes, e.g. SVC")
    return members, decisions


def _refuse_member(estimator: Any, member: Any, instead: str) -> NoClosedFormError:
    return NoClosedFormError(
        f"{type(estimator).__name__} of {type(member).__name__} is not supported", f"fit it with {instead}"
    )


# --- means, thresholds and stacks of members --------------------------------------------------------------------------


def _soft_vote(estimator: VotingClassifier, convert: Convert) -> Stage:
    if estimator.voting != "soft":
        raise NoClosedFormError("VotingClassifier(voting='hard') counts votes, a step", "use voting='soft'")
    weights = np.ones(len(estimator.estimators_)) if estimator.weights is None else estimator._weights_not_none
    return _mean_probability(estimator, [Chain(convert(base)) for base in estimator.estimators_], weights)


def _bag(estimator: BaggingClassifier, convert: Convert) -> Stage:
    first = estimator.estimators_[0]
    if not hasattr(first, "predict_proba"):
        raise _refuse_member(estimator, first, "a classifier that has probabilities, or it counts votes")
    scores = hasattr(first, "decision_function")
    return _mean_probability(estimator, _bagged(estimator, convert), np.ones(len(estimator.estimators_)), scores=scores)


def _bagged(estimator: Any, convert: Convert) -> list[Chain]:
    """Return the members of a bag, each with the features that it was given."""
    bag = zip(estimator.estimators_, estimator.estimators_features_, strict=True)
    return [select_columns(convert(base), columns.tolist(), estimator.n_features_in_) for base, columns in bag]


def _mean_probability(estimator: Any, members: list[Chain], weights: Any, *, scores: bool = False) -> Stage:
    """Return the weighted mean of the members' probabilities; explanations are of the mean of their margins."""
    for member, fitted in zip(members, estimator.estimators_, strict=True):
        voting: Any = getattr(member.stages[-1], "voting", None)
        if voting is None or (voting.calibration is None and not voting.members):
            raise _refuse_member(
                estimator, fitted, "members whose probabilities are known, e.g. CalibratedClassifierCV(SVC())"
            )
        if voting.n_classes != len(estimator.classes_):
            raise NoClosedFormError(
                f"a member of {type(estimator).__name__} saw only some classes",
                "fit it on more images of the rare classes, or with a larger max_samples",
            )
    shares = np.asarray(weights, dtype=float) / np.sum(weights)
    members = [member for member, share in zip(members, shares, strict=True) if share]
    votings = [member.stages[-1].voting for member in members]
    sizes = [int(member.n_outputs or 0) for member in members]
    votes = vote.calibrated(votings, sizes, [None] * len(votings), shares[shares != 0].tolist(), scores)
    votes = replace(votes, of_sklearn=not scores or all(voting.of_sklearn for voting in votings))
    return Ensemble(members, 1.0, votes, estimator.classes_)


def _average_members(estimator: Any, convert: Convert) -> Stage:
    bag = isinstance(estimator, BaggingRegressor)
    members = _bagged(estimator, convert) if bag else [Chain(convert(base)) for base in estimator.estimators_]
    weights = np.ones(len(members)) if bag or estimator.weights is None else estimator._weights_not_none
    shares = tensor(weights / np.sum(weights))
    width = _plain_width(estimator, estimator.estimators_, [member.stages[-1] for member in members])
    weight = (shares.reshape(-1, 1, 1) * torch.eye(width).double()).permute(1, 0, 2).reshape(width, -1)
    return Chain([Union(members), regression(weight, torch.zeros(width).double())])


def _plain_width(estimator: Any, fitted: Sequence[Any], decisions: Sequence[Any]) -> int:
    """Return how many values each of some regressors has, whose predictions these are."""
    for base, decision in zip(fitted, decisions, strict=True):
        voting = getattr(decision, "voting", None)
        if voting is None or voting.inverse or voting.about == "classes":
            raise _refuse_member(estimator, base, "regressors that predict their decision value, e.g. SVR")
    return int(decisions[0].n_outputs)


def _several_outputs(estimator: Any, convert: Convert) -> Stage:
    labels = isinstance(estimator, MultiOutputClassifier)
    if labels:
        for classes in estimator.classes_:
            if list(classes) != [0, 1]:
                raise NoClosedFormError(
                    f"MultiOutputClassifier has an output of the classes {classes.tolist()}, but only outputs of two "
                    "classes, 0 and 1, are taken",
                    "fit a head for each output",
                )
        members, _ = _members(estimator, convert, estimator.estimators_)
    else:
        members = [Chain(convert(base)) for base in estimator.estimators_]
        _plain_width(estimator, estimator.estimators_, [member.stages[-1] for member in members])
    votes = vote.outputs(len(members), labels)
    return Ensemble(members, 1.0, votes, range(len(members)))


def _stack(estimator: Any, convert: Convert) -> Stage:
    members = []
    for fitted, method in zip(estimator.estimators_, estimator.stack_method_, strict=True):
        stages = convert(fitted)
        voting = getattr(stages[-1], "voting", None)
        match method, voting:
            case "decision_function", vote.Vote(kind="Binary" | "OneVsRest", of_sklearn=True):
                pass
            case "decision_function", vote.Vote(kind="OneVsOne", score="values"):
                pass
            case "predict", vote.Vote(about="value" | "likeness", inverse=None):
                pass
            case "predict_proba", vote.Vote(kind="Binary" | "BinaryVote") if voting.calibration == softmax(2):
                stages.append(Elementwise("logistic"))
            case _:
                raise _refuse_member(estimator, fitted, _stackable(fitted, method, voting))
        members.append(Chain(stages))
    if estimator.passthrough:
        n = estimator.n_features_in_
        members.append(select_columns([], range(n), n))
    *stages, decision = convert(estimator.final_estimator_)
    if not isinstance(decision, Decision):
        raise _refuse_member(
            estimator, estimator.final_estimator_, "a final estimator that decides, e.g. LogisticRegression"
        )
    if decision.classes is not None:
        decision.classes = estimator.classes_  # it was fitted on their numbers
    return Chain([Union(members), *stages, decision])


def _stackable(fitted: Any, method: str, voting: Any) -> str:
    """Return an alternative that a stack could take in place of a member."""
    if voting is not None and not is_classifier(fitted):
        return "regressors that predict their decision value, e.g. SVR"
    if voting is not None and voting.kind == "OneVsOne":  # its decision_function counts votes, which are steps
        hint = "" if method == "decision_function" else f" and stack_method='decision_function' (now {method!r})"
        return (
            "LinearSVC(), OneVsRestClassifier(SVC()) or SVC(decision_function_shape='ovo') as members, since those of "
            f"one-vs-one are votes{hint}"
        )
    plain = voting is not None and voting.kind in ("Binary", "OneVsRest") and voting.of_sklearn
    plain = plain and hasattr(fitted, "decision_function")
    if plain and method != "decision_function":
        return f"stack_method='decision_function' (now {method!r})"
    return "members that decide by their decision_function, as LinearSVC(), and stack_method='decision_function'"


def _threshold(estimator: Any, convert: Convert) -> Stage:
    fitted, method, threshold, zero_is_second = read_threshold(estimator)
    *stages, decision = convert(fitted)
    voting = decision.voting if isinstance(decision, Decision) else None
    curve: Any = None
    if voting is not None:
        curve = voting.members[0].calibration if len(voting.members) == 1 else voting.calibration
    sigmoid = isinstance(curve, PerClass) and isinstance(curve.curves[0], Platt)
    if method == "predict_proba" and sigmoid and 0 < threshold < 1 and curve.curves[0].a < 0:  # it rises
        platt = curve.curves[0]
        threshold = (math.log(1 / threshold - 1) - platt.b) / platt.a
    elif method != "decision_function" or voting is None or voting.kind != "Binary" or not voting.of_sklearn:
        raise _refuse_member(
            estimator, fitted, "a threshold within (0, 1) of a sigmoid probability, or one of decision values"
        )
    shifted = Platt(curve.curves[0].a, curve.curves[0].b + curve.curves[0].a * threshold) if sigmoid else None
    votes = vote.binary(zero_is_second=zero_is_second, calibration=PerClass([shifted]) if shifted else None)
    votes = replace(votes, of_sklearn=False)
    one = torch.ones(1, 1).double()
    value = Union([Chain([*stages, decision])])
    return Chain([value, LinearDecision(one, -threshold * one[0], votes, estimator.classes_)])


def _transformed_target(estimator: TransformedTargetRegressor, convert: Convert) -> Stage:
    *stages, decision = convert(estimator.regressor_)
    _plain_width(estimator, [estimator.regressor_], [decision])
    value, after = Union([Chain([*stages, decision])]), estimator.transformer_
    if isinstance(after, FunctionTransformer):
        function = after.inverse_func
        name = None if function is None else getattr(function, "__name__", "")
        if name is not None and (name not in ("exp", "expm1") or function is not getattr(np, name)):
            raise _refuse_member(estimator, after, "the inverse function exp or expm1, or a scaler")
        width = int(decision.n_outputs or 0)
        return Chain([value, regression(torch.eye(width).double(), torch.zeros(width).double(), name)])
    scale = stage_for(after)
    if not isinstance(scale, Scale) or not scale.linear:
        raise _refuse_member(
            estimator, after, "a scaler of the target, e.g. StandardScaler, or the function exp or expm1"
        )
    return Chain([value, regression(scale.divisor.diag(), scale.shift - scale.offset * scale.divisor)])


def _convert_inner(estimator: Any, convert: Convert) -> Stage:
    return Chain(convert(estimator.estimator_))


def _calibration(calibrated: Any) -> Calibration:
    """Return how the scores of one calibrated classifier become probabilities."""
    if calibrated.method == "temperature":
        return Temperature(float(calibrated.calibrators[0].beta_))
    return PerClass([
        Isotonic(curve.X_thresholds_.tolist(), curve.y_thresholds_.tolist())
        if isinstance(curve, IsotonicRegression)
        else Platt(float(curve.a_), float(curve.b_))
        for curve in calibrated.calibrators
    ])


NESTED: dict[type, Row] = {
    OneVsRestClassifier: _one_vs_rest,
    OneVsOneClassifier: _one_vs_one,
    OutputCodeClassifier: _output_code,
    CalibratedClassifierCV: _calibrated,
    VotingClassifier: _soft_vote,
    BaggingClassifier: _bag,
    VotingRegressor: _average_members,
    BaggingRegressor: _average_members,
    MultiOutputRegressor: _several_outputs,
    MultiOutputClassifier: _several_outputs,
    StackingClassifier: _stack,
    StackingRegressor: _stack,
    FixedThresholdClassifier: _threshold,
    TunedThresholdClassifierCV: _threshold,
    TransformedTargetRegressor: _transformed_target,
    RANSACRegressor: _convert_inner,
    SelfTrainingClassifier: _convert_inner,
}
