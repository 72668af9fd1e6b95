"""Transformers as stages: scalers, selectors, reductions, kernel approximations, several of these side by side."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from sklearn import decomposition, preprocessing, random_projection
from sklearn.cluster import FeatureAgglomeration
from sklearn.compose import ColumnTransformer
from sklearn.cross_decomposition import PLSSVD
from sklearn.cross_decomposition._pls import _PLS
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.feature_selection import RFE, SelectorMixin
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.neighbors import NeighborhoodComponentsAnalysis
from sklearn.pipeline import FeatureUnion
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.covariance_pca import CovariancePCA
from pytorch_grad_cam_pcasvm.head.distances import Quadratic
from pytorch_grad_cam_pcasvm.head.elementwise import FUNCTIONS, Elementwise, Power
from pytorch_grad_cam_pcasvm.head.elsewhere import tensor
from pytorch_grad_cam_pcasvm.head.estimators.likeness import convert_kernel, make_decision
from pytorch_grad_cam_pcasvm.head.pca_distance import PCADistance
from pytorch_grad_cam_pcasvm.head.stage import Facts, Stage
from pytorch_grad_cam_pcasvm.head.stages import (
    Affine,
    Chain,
    FourierFeatures,
    KernelMap,
    Normalise,
    Projection,
    Scale,
    Select,
    Union,
)
from pytorch_grad_cam_pcasvm.head.table import Convert, Row, stage_for, transformer_for
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError

# --- scalers and selectors ------------------------------------------------------------------------------------------


def _scale(
    estimator: Any, centre: Any, scale: Any, offset: Any = None, limits: Any = (-1, 1), *, centre_is_mean: bool = False
) -> Stage:
    """Return ``(x - centre) / scale + offset``, without the parts that are None, clipped if the estimator clips."""
    zeros = torch.zeros(estimator.n_features_in_, dtype=torch.float64)
    shift, divisor, offset = (
        zeros + default if array is None else tensor(array) for array, default in ((centre, 0), (scale, 1), (offset, 0))
    )
    clips = getattr(estimator, "clip", False)
    low, high = float(limits[0]), float(limits[1])
    stage = Scale(shift, divisor, offset, (low, high) if clips else None, centre_is_mean and centre is not None)
    facts = {}
    if hasattr(estimator, "n_samples_seen_"):
        facts["count"] = float(tensor(estimator.n_samples_seen_).min())
    if isinstance(estimator, preprocessing.MinMaxScaler | preprocessing.MaxAbsScaler):
        facts |= {"low": low, "high": high}
    stage.facts = Facts(**facts)
    return stage


@stage_for.register(SelectorMixin)
@transformer_for.register(RFE)
def _selector(estimator: Any) -> Stage:
    support = np.asarray(estimator.get_support())
    return Select(torch.as_tensor(np.flatnonzero(support)), len(support))


@stage_for.register(RFE)
def _recursive_elimination(estimator: RFE) -> Stage:
    raise NoClosedFormError(
        f"{type(estimator).__name__} at the end predicts with an estimator of its own",
        "put that after it, [..., rfe, rfe.estimator_]",
    )


@stage_for.register(preprocessing.FunctionTransformer)
def _function_transformer(estimator: Any) -> Stage:
    name = getattr(estimator.func, "__name__", "")
    if name in FUNCTIONS and estimator.func is getattr(np, name, None) and not estimator.kw_args:
        return Elementwise(name)
    raise NoClosedFormError(
        f"FunctionTransformer({estimator.func!r}) has no closed-form Jacobian: only numpy's "
        f"{', '.join(sorted(name for name in FUNCTIONS if hasattr(np, name)))} have, and the identity (func=None)",
        *_name_normalizer(estimator),
        "move the function into the backbone",
        "register a transformer of your own with stage_for.register(...)",
    )


def _name_normalizer(estimator: Any) -> list[str]:
    """Return the way out for a function that makes rows as long as a Normalizer does; for others none."""
    rows = np.random.default_rng(0).normal(size=(4, getattr(estimator, "n_features_in_", 3)))
    try:
        with np.errstate(all="ignore"):
            scaled = np.asarray(estimator.transform(rows), dtype=float)
    except Exception:  # what a function of the user's raises is not what is refused here
        return []
    same = [norm for norm in ("l2", "l1", "max") if _is_close(scaled, preprocessing.normalize(rows, norm))]
    return [f"fit Normalizer({'' if norm == 'l2' else repr(norm)}), which does the same" for norm in same]


def _is_close(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.allclose(one, other)


@stage_for.register(preprocessing.PowerTransformer)
def _power(estimator: Any) -> Stage:
    power = Power(tensor(estimator.lambdas_), estimator.method == "box-cox")
    return Chain([power, stage_for(estimator._scaler)]) if estimator.standardize else power


# --- reductions: most are V^T (x - u) with a matrix of their own ----------------------------------------------------


def _projection(components: Any, mean: Any = None, divisor: Tensor | None = None, **extras: Any) -> Projection:
    """Return ``V^T (x - u) / divisor``, without the parts that are None; ``extras`` are further facts."""
    components = tensor(components)
    mean = torch.zeros(components.shape[1], dtype=torch.float64) if mean is None else tensor(mean)
    divisor = torch.ones(len(components), dtype=torch.float64) if divisor is None else divisor
    return Projection(components, mean, divisor, **extras)


@stage_for.register(decomposition.PCA)
@stage_for.register(decomposition.IncrementalPCA)
@stage_for.register(CovariancePCA)
@transformer_for.register(PCADistance)
def _pca(estimator: Any) -> Projection:
    # scikit-learn takes the root, clips it at eps where it divides, and multiplies in the dtype that PCA was fitted in.
    variance = estimator.explained_variance_
    deviations = variance.sqrt() if isinstance(variance, Tensor) else np.sqrt(variance)
    eps = torch.finfo(torch.as_tensor(deviations).dtype).eps
    ones = torch.ones(len(variance), dtype=torch.float64)
    if getattr(estimator, "whiten", False):
        divisor, variances = tensor(deviations).clamp(min=eps), ones
        inverse = tensor(deviations[:, None] * estimator.components_)
    else:
        divisor, inverse, variances = ones, ones, tensor(variance).clamp(min=eps**2)
    stage = _projection(estimator.components_, estimator.mean_, divisor, inverse=inverse, variances=variances)
    share = float(tensor(estimator.explained_variance_ratio_).sum())
    # The former is that of PCAs learned in parts; of a PCA from GPUs neither need be there.
    count = getattr(estimator, "n_samples_seen_", getattr(estimator, "n_samples_", math.inf))
    stage.facts = Facts(float(count), float(tensor(variance).sum()) / share if share > 0 else 0.0)
    return stage


@stage_for.register(PCADistance)
def _pca_distance(estimator: PCADistance) -> Stage:
    # All directions are kept, so that this is no reduction: a start at which D components are 0 would be looked for.
    roots = tensor(estimator.components_).T * tensor(estimator.weights_).sqrt()
    distance = Quadratic(tensor(estimator.mean_)[None], roots[None], torch.zeros(1, dtype=torch.float64))
    distance.facts = Facts(float(estimator.n_samples_seen_), float(estimator.explained_variance_.sum()))
    return make_decision(distance)


@stage_for.register(decomposition.FactorAnalysis)
def _factor_analysis(estimator: Any) -> Stage:
    # E[z | x] = (1 + L Psi^-1 L^T)^-1 L Psi^-1 (x - u)
    weighted = tensor(estimator.components_) / tensor(estimator.noise_variance_)
    precision = torch.eye(len(weighted), dtype=torch.float64) + weighted @ tensor(estimator.components_).T
    stage = _projection(torch.linalg.solve(precision, weighted), estimator.mean_)
    shared = tensor(estimator.components_).square().sum()
    stage.facts = Facts(spread=float(shared + tensor(estimator.noise_variance_).sum()))
    return stage


@stage_for.register(decomposition.SparsePCA)
@stage_for.register(decomposition.MiniBatchSparsePCA)
def _sparse_pca(estimator: Any) -> Stage:
    # Its transform is a ridge regression on the components: (C C^T + alpha)^-1 C (x - u).
    components = tensor(estimator.components_)
    ridge = components @ components.T + estimator.ridge_alpha * torch.eye(len(components), dtype=torch.float64)
    return _projection(torch.linalg.pinv(ridge, hermitian=True) @ components, estimator.mean_, inverse=components)


@stage_for.register(FeatureAgglomeration)
def _agglomeration(estimator: FeatureAgglomeration) -> Stage:
    if estimator.pooling_func is not np.mean:
        raise NoClosedFormError("FeatureAgglomeration(pooling_func=...) is not supported", "fit it with numpy.mean")
    member = estimator.labels_ == np.unique(estimator.labels_)[:, None]
    return _projection(member / member.sum(1, keepdims=True))


@transformer_for.register(LinearDiscriminantAnalysis)
def _discriminants(estimator: LinearDiscriminantAnalysis) -> Stage:
    if estimator.solver == "lsqr":
        raise NoClosedFormError("LinearDiscriminantAnalysis(solver='lsqr') transforms nothing", "use 'svd' or 'eigen'")
    mean = estimator.xbar_ if estimator.solver == "svd" else None
    components = tensor(estimator.scalings_).T[: estimator._max_components]
    return _projection(components, mean, weighted=estimator.priors is not None)


@stage_for.register(decomposition.KernelPCA)
def _kernel_pca(estimator: Any) -> Stage:
    scale = np.sqrt(estimator.eigenvalues_, where=estimator.eigenvalues_ != 0, out=np.ones_like(estimator.eigenvalues_))
    alphas = tensor(np.where(estimator.eigenvalues_ != 0, estimator.eigenvectors_ / scale, 0.0))
    # Centring the kernel is linear in it: K - mean_i(K) - rows + all.
    centred = alphas - alphas.mean(0)
    centerer = estimator._centerer
    offset = float(centerer.K_fit_all_) * alphas.sum(0) - tensor(centerer.K_fit_rows_) @ alphas
    points = tensor(estimator.X_fit_)
    kernel = convert_kernel(estimator, getattr(estimator, "gamma_", estimator.gamma), points.shape[1])
    return KernelMap(kernel, points, centred, offset, reduces=True)


@stage_for.register(Nystroem)
def _nystroem(estimator: Nystroem) -> Stage:
    if not callable(estimator.kernel) and estimator.kernel_params:
        raise NoClosedFormError("Nystroem(kernel_params=...) is not supported", "pass gamma, degree and coef0 directly")
    points, coefficients = tensor(estimator.components_), tensor(estimator.normalization_).T
    kernel = convert_kernel(estimator, estimator.gamma, points.shape[1])
    return KernelMap(kernel, points, coefficients, torch.zeros(coefficients.shape[1]).double(), reduces=False)


# --- transformers side by side ---------------------------------------------------------------------------------------


def _feature_union(estimator: FeatureUnion, convert: Convert) -> Stage:
    weights, pairs = estimator.transformer_weights or {}, [p for p in estimator.transformer_list if p[1] != "drop"]
    n = pairs[0][1].n_features_in_  # scikit-learn asks the first, which may be dropped
    return beside([(part, range(n), weights.get(name, 1.0)) for name, part in pairs], n, convert)


def _column_transformer(estimator: ColumnTransformer, convert: Convert) -> Stage:
    weights, columns = estimator.transformer_weights or {}, estimator._transformer_to_input_indices
    parts = [
        (part, columns[name], weights.get(name, 1.0))
        for name, part, _ in estimator.transformers_
        if part != "drop" and len(columns[name])
    ]
    return beside(parts, estimator.n_features_in_, convert)


def beside(parts: Iterable[tuple[Any, Sequence[int], float]], n_features: int, convert: Convert) -> Stage:
    """Return transformers side by side, each with its columns of the features and a weight."""
    chains = []
    for part, columns, weight in parts:
        chain = select_columns(convert(part, transform=True), columns, n_features)
        if weight != 1:
            width = int(chain.n_outputs or 0)
            chain = Chain([*chain.stages, Affine(weight * torch.eye(width).double(), torch.zeros(width).double())])
        chains.append(chain)
    return Union(chains)


def select_columns(stages: Sequence[Stage], columns: Sequence[int], n_features: int) -> Chain:
    """Return a chain of stages that begins with some columns of the features."""
    all_columns = list(columns) == list(range(n_features))
    if all_columns and stages and Chain(stages).n_outputs is not None:
        return Chain(stages)
    return Chain([Select(torch.as_tensor(list(columns), dtype=torch.long), n_features), *stages])


NESTED: dict[type, Row] = {FeatureUnion: _feature_union, ColumnTransformer: _column_transformer}

# --- all that is one expression -------------------------------------------------------------------------------------

_PROJECTIONS: dict[type, Callable[[Any], Projection]] = {
    decomposition.TruncatedSVD: lambda e: _projection(e.components_, inverse=torch.ones(len(e.components_)).double()),
    decomposition.FastICA: lambda e: _projection(
        e.components_, e.mean_ if e.whiten else None, inverse=tensor(e.mixing_).T
    ),
    NeighborhoodComponentsAnalysis: lambda e: _projection(e.components_),
    random_projection.GaussianRandomProjection: lambda e: _projection(e.components_),
    random_projection.SparseRandomProjection: lambda e: _projection(e.components_),
    PLSSVD: lambda e: _projection(tensor(e.x_weights_).T / tensor(e._x_std), e._x_mean),
    _PLS: lambda e: _projection(
        tensor(e.x_rotations_).T / tensor(e._x_std), e._x_mean, inverse=tensor(e.x_loadings_).T * tensor(e._x_std)
    ),
}
_OTHERS: dict[type, Callable[[Any], Stage]] = {
    preprocessing.StandardScaler: lambda e: _scale(e, e.mean_ if e.with_mean else None, e.scale_, centre_is_mean=True),
    preprocessing.MinMaxScaler: lambda e: _scale(e, None, 1 / tensor(e.scale_), e.min_, e.feature_range),
    preprocessing.MaxAbsScaler: lambda e: _scale(e, None, e.scale_),
    preprocessing.RobustScaler: lambda e: _scale(e, e.center_, e.scale_),
    preprocessing.Normalizer: lambda e: Normalise(e.norm),
    RBFSampler: lambda e: FourierFeatures(
        tensor(e.random_weights_), tensor(e.random_offset_), math.sqrt(2 / e.random_weights_.shape[1])
    ),
}
for _estimator_type, _stage in (_PROJECTIONS | _OTHERS).items():
    # At the end of a head, PLS predicts.
    (transformer_for if _estimator_type is _PLS else stage_for).register(_estimator_type, _stage)
