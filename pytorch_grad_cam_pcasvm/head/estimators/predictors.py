"""Classifiers, regressors and outlier detectors as stages."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn import svm
from sklearn.covariance import EllipticEnvelope
from sklearn.cross_decomposition._pls import _PLS
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression, SGDClassifier, SGDOneClassSVM
from sklearn.linear_model._base import LinearClassifierMixin, LinearModel
from sklearn.linear_model._glm.glm import _GeneralizedLinearRegressor
from sklearn.linear_model._stochastic_gradient import BaseSGDRegressor
from sklearn.mixture._base import BaseMixture
from sklearn.naive_bayes import BernoulliNB, ComplementNB, GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.semi_supervised._label_propagation import BaseLabelPropagation
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import vote
from pytorch_grad_cam_pcasvm.head.decisions import KernelSVM, LinearDecision
from pytorch_grad_cam_pcasvm.head.distances import Neighbours, Quadratic, measure_reach
from pytorch_grad_cam_pcasvm.head.elementwise import Calibration, Elementwise, PerClass, Platt, Temperature
from pytorch_grad_cam_pcasvm.head.elsewhere import of_sklearn, tensor
from pytorch_grad_cam_pcasvm.head.estimators.likeness import convert_kernel, make_decision, process
from pytorch_grad_cam_pcasvm.head.stage import Facts, Stage
from pytorch_grad_cam_pcasvm.head.stages import Affine, Chain, KernelMap, Normalise
from pytorch_grad_cam_pcasvm.head.table import stage_for
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError, warn

_DRAWN = 10_000  # rows of a mixture


@stage_for.register(svm.SVC)
@stage_for.register(svm.NuSVC)
def _svc(estimator: Any) -> Stage:
    classes = estimator.classes_
    if len(estimator.n_support_) != len(classes):
        raise ValueError(
            f"{type(estimator).__name__} knows {len(classes)} classes, but was fitted on samples of "
            f"{len(estimator.n_support_)}: where all samples of a class have the weight 0, its decisions lack that "
            "class, and scikit-learn's labels are shifted. Fit it without these samples."
        )
    if len(classes) == 2:
        return _machine(estimator, vote.binary(zero_is_second=True), classes)
    pairwise = estimator.decision_function_shape == "ovo"
    break_ties = estimator.break_ties and not pairwise
    return _machine(estimator, vote.one_vs_one(len(classes), pairwise_scores=pairwise, break_ties=break_ties), classes)


def _machine(estimator: Any, voting: vote.Vote, classes: Any = None) -> Stage:
    points = tensor(estimator.support_vectors_)
    kernel = convert_kernel(estimator, estimator._gamma, points.shape[1])
    support = torch.as_tensor(estimator.support_).long()
    dual_coef, intercept = tensor(estimator.dual_coef_), tensor(estimator.intercept_)
    stage = KernelSVM(kernel, points, dual_coef, intercept, list(estimator.n_support_), support, voting, classes)
    spread = 1 / float(estimator._gamma) if estimator.gamma == "scale" else 0.0
    stage.facts = Facts(count=float(estimator.shape_fit_[0]), spread=spread)
    return stage


@stage_for.register(LinearClassifierMixin)
def _linear_classifier(estimator: Any) -> Stage:
    weight = torch.atleast_2d(tensor(estimator.coef_))
    bias = tensor(estimator.intercept_).expand(len(weight)).clone()
    if getattr(getattr(estimator, "_label_binarizer", None), "y_type_", "").startswith("multilabel"):
        return _outputs(weight, bias, labels=True)
    return LinearDecision(
        weight, bias, plain_voting(len(estimator.classes_), _of_scores(estimator)), estimator.classes_
    )


def plain_voting(n_classes: int, calibration: Calibration | None) -> vote.Vote:
    """Return the voting of one decision value per class, or of one for two classes."""
    return vote.binary(calibration=calibration) if n_classes == 2 else vote.one_vs_rest(n_classes, calibration)


def _of_scores(estimator: Any) -> Calibration | None:
    """Return the calibration from a linear classifier's scores to ``predict_proba``, or None."""
    n_classes = len(estimator.classes_)
    sigmoids = PerClass([Platt(-1.0, 0.0)] * (1 if n_classes == 2 else n_classes))
    match estimator:
        case SGDClassifier(loss="log_loss"):
            return sigmoids
        case LinearDiscriminantAnalysis():
            return sigmoids if n_classes == 2 else Temperature(1.0)
        case _ if isinstance(estimator, of_sklearn(LogisticRegression)):
            # Up to scikit-learn 1.7 there is multi_class, and liblinear for several classes.
            multi_class = getattr(estimator, "multi_class", "auto")
            if n_classes == 2:
                return Temperature(1.0) if multi_class == "multinomial" else sigmoids
            return sigmoids if multi_class == "ovr" or estimator.solver == "liblinear" else Temperature(1.0)
    return None


@stage_for.register(BaseSGDRegressor)
@stage_for.register(LinearModel)
@stage_for.register(_PLS)
def _linear_regressor(estimator: Any) -> Stage:
    weight = torch.atleast_2d(tensor(estimator.coef_))
    bias = tensor(estimator.intercept_).reshape(-1).expand(len(weight)).clone()
    if isinstance(estimator, _PLS):  # it predicts from x - mean
        bias = bias - weight @ tensor(estimator._x_mean)
    return regression(weight, bias)


def regression(weight: Tensor, bias: Tensor, inverse: str | None = None) -> LinearDecision:
    """Return the decision of a regressor with P outputs, of weights (P, B), or of a function of the only one."""
    if len(weight) > 1:
        return _outputs(weight, bias, labels=False)
    return LinearDecision(weight, bias, vote.regression(inverse), None)


def _outputs(weight: Tensor, bias: Tensor, *, labels: bool) -> LinearDecision:
    return LinearDecision(weight, bias, vote.outputs(len(weight), labels), range(len(weight)))


@stage_for.register(_GeneralizedLinearRegressor)
def _generalized_linear(estimator: Any) -> Stage:
    inverse = {"LogLink": "exp", "IdentityLink": None}[type(estimator._base_loss.link).__name__]
    return regression(torch.atleast_2d(tensor(estimator.coef_)), tensor(estimator.intercept_).reshape(1), inverse)


@stage_for.register(SGDOneClassSVM)
def _linear_one_class(estimator: SGDOneClassSVM) -> Stage:
    votes = vote.one_class(zero_is_inlier=True)
    return LinearDecision(torch.atleast_2d(tensor(estimator.coef_)), -tensor(estimator.offset_).reshape(1), votes, None)


@stage_for.register(MLPClassifier)
@stage_for.register(MLPRegressor)
def _perceptron(estimator: Any) -> Stage:
    layers = [(tensor(w).T, tensor(b)) for w, b in zip(estimator.coefs_, estimator.intercepts_, strict=True)]
    stages: list[Stage] = []
    for layer in layers[:-1]:
        stages.append(Affine(*layer))
        if estimator.activation != "identity":
            stages.append(Elementwise(estimator.activation))
    if isinstance(estimator, MLPRegressor):
        inverse = {"identity": None}.get(estimator.out_activation_, estimator.out_activation_)
        return Chain([*stages, regression(*layers[-1], inverse)])
    if estimator._label_binarizer.y_type_.startswith("multilabel"):
        return Chain([*stages, _outputs(*layers[-1], labels=True)])
    if len(estimator.classes_) > 2:
        return decide_largest([*stages, Affine(*layers[-1])], estimator.classes_, softmax(len(estimator.classes_)))
    return Chain([*stages, LinearDecision(*layers[-1], plain_voting(2, softmax(2)), estimator.classes_)])


# --- one value for each class -----------------------------------------------------------------------------------------


def softmax(n_classes: int) -> Calibration:
    """Return the probabilities that are the softmax of C scores, or the sigmoid of the only one of two classes."""
    return PerClass([Platt(-1.0, 0.0)]) if n_classes == 2 else Temperature(1.0)


def decide_largest(stages: Sequence[Stage], classes: Any, probability: Calibration | None = None) -> Chain:
    """Return the decision for the largest of C values, of which only differences count."""
    n = len(classes)
    weight = torch.tensor([[-1.0, 1.0]]).double() if n == 2 else torch.eye(n).double()
    votes = vote.binary(calibration=probability) if n == 2 else vote.relative(n, probability)
    return Chain([*stages, LinearDecision(weight, torch.zeros(len(weight)).double(), votes, classes)])


def _likeliest(centres: Any, roots: Any, offsets: Any, classes: Any, **facts: float) -> Chain:
    stage = Quadratic(tensor(centres), tensor(roots), tensor(offsets))
    stage.facts = Facts(**facts)
    return decide_largest([stage], classes, softmax(len(classes)))


@stage_for.register(QuadraticDiscriminantAnalysis)
def _quadratic(estimator: Any) -> Stage:
    roots = [tensor(r / np.sqrt(2 * s)) for r, s in zip(estimator.rotations_, estimator.scalings_, strict=True)]
    widest = max(root.shape[1] for root in roots)
    padded = torch.stack([torch.nn.functional.pad(root, (0, widest - root.shape[1])) for root in roots])
    offsets = np.log(estimator.priors_) - 0.5 * np.array([np.log(s).sum() for s in estimator.scalings_])
    spread = max(float(np.sum(scalings)) for scalings in estimator.scalings_)
    return _likeliest(estimator.means_, padded, offsets, estimator.classes_, spread=spread)


@stage_for.register(GaussianNB)
def _naive_bayes(estimator: GaussianNB) -> Stage:
    offsets = np.log(estimator.class_prior_) - 0.5 * np.log(2 * np.pi * estimator.var_).sum(1)
    spread, count = float(estimator.var_.sum(1).max()), float(estimator.class_count_.sum())
    roots = np.sqrt(0.5 / estimator.var_)
    return _likeliest(estimator.theta_, roots, offsets, estimator.classes_, spread=spread, count=count)


@stage_for.register(BaseMixture)
def _mixture(estimator: Any) -> Stage:
    means, roots = tensor(estimator.means_), tensor(estimator.precisions_cholesky_)
    if estimator.covariance_type == "tied":
        roots = roots.expand(len(means), -1, -1)
    elif estimator.covariance_type == "spherical":
        roots = roots.unsqueeze(1).expand_as(means)
    at_means = estimator._estimate_weighted_log_prob(estimator.means_)
    # Of a covariance that is the inverse of P P^T, the trace is the sum of squares of the inverse of P.
    inverse = 1 / roots if roots.dim() == 2 else torch.linalg.inv(roots).flatten(1)
    spread = float(inverse.square().sum(1).max())
    least, reach = _reach_of_mixture(estimator, means, roots)
    facts = {"spread": spread, "density": 1.0, "least": least, "reach": reach}
    return _likeliest(means, roots / math.sqrt(2), at_means.diagonal(), np.arange(len(means)), **facts)


def _reach_of_mixture(estimator: Any, means: Tensor, roots: Tensor) -> tuple[float, float]:
    """Return between which numbers anomalies of rows are that are drawn from a mixture, a kept training set unknown."""
    drawn = np.random.default_rng(0)
    clusters = drawn.choice(len(means), _DRAWN, p=estimator.weights_ / estimator.weights_.sum())
    noise, inverses = tensor(drawn.normal(size=(_DRAWN, means.shape[1]))), 1 / roots
    rows = torch.empty_like(noise)
    for cluster in range(len(means)):
        own = torch.from_numpy(clusters == cluster)
        whitened = roots.dim() == 2
        shift = noise[own] * inverses[cluster] if whitened else noise[own] @ torch.linalg.inv(roots[cluster])
        rows[own] = means[cluster] + shift
    return measure_reach(-estimator.score_samples(rows.numpy()), is_distance=False)


@stage_for.register(EllipticEnvelope)
def _envelope(estimator: EllipticEnvelope) -> Stage:
    values, vectors = torch.linalg.eigh(tensor(estimator.get_precision()))
    roots = (vectors * values.clamp(min=0).sqrt()).unsqueeze(0)
    quadratic = Quadratic(tensor(estimator.location_).unsqueeze(0), roots, -tensor(estimator.offset_).reshape(1))
    least, reach = measure_reach(estimator.dist_ + estimator.offset_, is_distance=False)
    quadratic.facts = Facts(spread=float(np.trace(estimator.covariance_)), least=least, reach=reach)
    return make_decision(quadratic, vote.one_class(zero_is_inlier=True))


@stage_for.register(NearestCentroid)
def _nearest_centroid(estimator: NearestCentroid) -> Stage:
    if estimator.metric != "euclidean":
        raise NoClosedFormError(f"NearestCentroid has the metric {estimator.metric!r}", "fit it with 'euclidean'")
    centres, priors = tensor(estimator.centroids_), getattr(estimator, "class_prior_", None)
    spread, offsets = torch.ones(centres.shape[1]).double(), torch.zeros(len(centres)).double()
    # With equal priors scikit-learn predicts by the plain distances, which its decision_function does not show.
    plain = priors is None or bool(np.isclose(priors, 1 / len(centres)).all())
    if priors is not None and not plain:
        deviations = tensor(estimator.within_class_std_dev_)
        spread, offsets = torch.where(deviations == 0, 1.0, deviations), 2 * tensor(np.log(priors))
    stage = decide_largest([Quadratic(centres, (1 / spread).expand_as(centres), offsets)], estimator.classes_)
    decision = stage.stages[-1]
    decision.voting = replace(decision.voting, of_sklearn=not plain)
    return stage


@stage_for.register(MultinomialNB)
@stage_for.register(ComplementNB)
@stage_for.register(BernoulliNB)
def _convert_counts(estimator: Any) -> Stage:
    weight, bias = tensor(estimator.feature_log_prob_), tensor(estimator.class_log_prior_)
    if isinstance(estimator, BernoulliNB):
        if estimator.binarize is not None:
            raise NoClosedFormError(
                "BernoulliNB cuts its features at a threshold, a step whose gradient is 0",
                "fit GaussianNB, which takes numbers",
                "fit it with binarize=None on features of 0 and 1",
            )
        absent = torch.log1p(-weight.exp())
        weight, bias = weight - absent, bias + absent.sum(1)
    elif isinstance(estimator, ComplementNB) and len(estimator.classes_) > 1:
        bias = torch.zeros_like(bias)
    return decide_largest([Affine(weight, bias)], estimator.classes_, softmax(len(estimator.classes_)))


@stage_for.register(KNeighborsClassifier)
def _neighbours(estimator: KNeighborsClassifier) -> Stage:
    name, k, metric = type(estimator).__name__, estimator.n_neighbors, estimator.effective_metric_
    points, labels = tensor(estimator._fit_X), torch.as_tensor(estimator._y).long()
    cosine = metric == "cosine"
    if not cosine and metric not in ("euclidean", "sqeuclidean"):
        raise NoClosedFormError(f"{name} has the metric {metric!r}", "fit it with 'euclidean' or 'cosine'")
    if estimator.weights not in ("uniform", None):
        raise NoClosedFormError(f"{name} weighs votes by {estimator.weights!r}", "fit it with weights='uniform'")
    if estimator.outputs_2d_:
        raise NoClosedFormError(f"{name} was fitted on several outputs", "fit a head for each output")
    counts = torch.bincount(labels, minlength=len(estimator.classes_)).tolist()
    ranks = [k // 2 + (k % 2 or number > 0) for number in range(len(counts))]  # of equal votes the first class wins
    if k % 2 == 0 and len(counts) > 2:
        raise NoClosedFormError(f"{name} lets {k} neighbours vote, which often tie", "fit it with an odd n_neighbors")
    for label, count, rank in zip(estimator.classes_, counts, ranks, strict=True):
        if count < rank:
            raise NoClosedFormError(
                f"class {label!r} of {name} has {count} training images, too few for most of {k} votes",
                "fit it with a smaller n_neighbors",
            )
    before: list[Stage] = [Normalise("l2")] if cosine else []
    points = before[0](points) if cosine else points
    order = labels.argsort(stable=True)
    # Along three directions, in steps that are larger than the rounding of a scaler and a PCA.
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(points.shape[1], 3, dtype=points.dtype, generator=generator, device="cpu")
    along = (points - points.mean(0)) @ directions
    step = np.finfo(estimator._fit_X.dtype).eps ** 0.625 * along.abs().median()
    same = torch.unique((along / step).round(), dim=0, return_inverse=True)[1]
    lowest, highest = (
        torch.zeros_like(same).scatter_reduce(0, same, labels, how, include_self=False) for how in ("amin", "amax")
    )
    twice = int((lowest != highest)[same].sum())
    if twice:
        problem = f"{twice} training images of {name} have the features of one of another class"
        warn(f"{problem}: near them its votes are ties, decided by the order of the images", UserWarning)
    stage = Neighbours(points[order], counts, ranks, k)
    eye, votes = torch.eye(int(stage.n_outputs or 0)).double(), vote.plurality(len(counts), k)
    weight, voting = (eye[1:], vote.binary()) if len(counts) == 2 else (eye, votes)
    return Chain([*before, stage, LinearDecision(weight, 0 * weight[:, 0], voting, estimator.classes_)])


# --- sums of kernels --------------------------------------------------------------------------------------------------


@stage_for.register(KernelRidge)
def _kernel_ridge(estimator: KernelRidge) -> Stage:
    points, weights = tensor(estimator.X_fit_), tensor(estimator.dual_coef_)
    weights = weights.reshape(len(points), -1)
    zeros = torch.zeros(weights.shape[1]).double()
    kernel = convert_kernel(estimator, estimator.gamma, points.shape[1])
    sums = KernelMap(kernel, points, weights, zeros, reduces=False)
    return Chain([sums, regression(torch.eye(len(zeros)).double(), zeros)])


@stage_for.register(GaussianProcessRegressor)
def _process(estimator: GaussianProcessRegressor) -> Stage:
    sums = process(estimator.kernel_, estimator.X_train_, estimator.alpha_)
    scale, mean = (
        tensor(value).reshape(-1).expand(int(sums.n_outputs or 0))
        for value in (estimator._y_train_std, estimator._y_train_mean)
    )
    return Chain([*sums.stages, regression(scale.diag(), mean.clone())])


@stage_for.register(GaussianProcessClassifier)
def _process_of_classes(estimator: GaussianProcessClassifier) -> Stage:
    binary = estimator.base_estimator_
    if len(estimator.classes_) > 2:
        raise NoClosedFormError(
            f"GaussianProcessClassifier decides between {len(estimator.classes_)} classes by integrals",
            "fit SVC",
            "fit MultiOutputClassifier(GaussianProcessClassifier()) on one column of 0 and 1 for each class",
        )
    sums = process(binary.kernel_, binary.X_train_, binary.y_train_ - binary.pi_)
    one, zero = torch.ones(1, 1).double(), torch.zeros(1).double()
    return Chain([*sums.stages, LinearDecision(one, zero, vote.binary(), estimator.classes_)])


@stage_for.register(BaseLabelPropagation)
def _label_propagation(estimator: Any) -> Stage:
    if estimator.kernel != "rbf":
        raise NoClosedFormError(f"{type(estimator).__name__} has the kernel {estimator.kernel!r}", "fit it with 'rbf'")
    points, shares = tensor(estimator.X_), tensor(estimator.label_distributions_)
    zeros = torch.zeros(shares.shape[1]).double()
    kernel = convert_kernel(estimator, estimator.gamma, points.shape[1])
    return decide_largest([KernelMap(kernel, points, shares, zeros, reduces=False)], estimator.classes_)


@stage_for.register(svm.SVR)
@stage_for.register(svm.NuSVR)
def _svr(estimator: Any) -> Stage:
    return _machine(estimator, vote.regression())


@stage_for.register(svm.OneClassSVM)
def _one_class(estimator: svm.OneClassSVM) -> Stage:
    return _machine(estimator, vote.one_class())
