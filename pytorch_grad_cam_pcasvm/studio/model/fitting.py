"""Fitting: a head behind a backbone, with the means of its blocks, in one pass over the images."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import sklearn
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

import pytorch_grad_cam_pcasvm
from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.storage import TrainingSet
from pytorch_grad_cam_pcasvm.network.extraction import collect_features
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, output_of
from pytorch_grad_cam_pcasvm.network.inputs import Inputs
from pytorch_grad_cam_pcasvm.network.layer_means import BlockMeans, LayerMeans
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_layer_name, find_network
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.tiles import TiledNet
from pytorch_grad_cam_pcasvm.runtime.errors import warn
from pytorch_grad_cam_pcasvm.studio.data.transforms import hint_at_scaled
from pytorch_grad_cam_pcasvm.studio.model.backbones import Backbone, make_backbone
from pytorch_grad_cam_pcasvm.studio.model.description import Origin
from pytorch_grad_cam_pcasvm.studio.model.likeness import keep_likeness, keep_likeness_of_patches
from pytorch_grad_cam_pcasvm.studio.model.model import Model
from pytorch_grad_cam_pcasvm.studio.model.preparation import Preparation, describe_transform, record_preparation
from pytorch_grad_cam_pcasvm.studio.model.resampling import COUNT, attach_resamples, check_count

_LONGEST = 400  # letters of an estimator's description


def fit_model(
    backbone: nn.Module | str,
    loader: Iterable[Any],
    head: Any,
    layer: str | nn.Module | Sequence[str | nn.Module] | None = None,
    *,
    pool: Any = None,
    transform: Callable[[Any], Tensor] | None = None,
    layers: str | nn.Module | Sequence[str | nn.Module] | None = None,
    classes: Sequence[Any] | None = None,
    normal: Any = None,
    sample: float | None = None,
    coreset: float | None = None,
    ignore_index: int | None = None,
    purity: float = 0.0,
    coverage: float | None = None,
    background: int = 0,
    resample: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Model:
    """Fit a head behind a backbone, and keep the means of its blocks over these images, from which explanations start.

    The loader is read once. A head that is fitted is taken as it is; of another, a clone is fitted on the features.

    Args:
        backbone: the network; or its name, such as ``"mobilenet_v2"`` of torchvision or ``"timm:resnet18"``.
        loader: yields ``(images, labels)``, as for :func:`.extract_features`.
        head: an estimator, a ``Pipeline``, a search, a list of fitted estimators, or a :class:`.Head`.
        layer: where features come from, as for :class:`.PCASVMNet`.
        pool: how positions become one row of features, as for :class:`.PCASVMNet`.
        transform: turns a PIL image into what the loader yields, so that pictures in files can be explained; an image
            processor of Hugging Face does. None: that of the weights of a backbone with a name, or not known.
        layers: the layers that maps are of by default, by name or as modules, one or several; None: the last block
            before all features, of several inputs one for each branch.
        classes: names of the classes that the loader numbers 0, 1, 2, ..., such as ``data_set.classes`` of an
            ``ImageFolder``; the head is fitted on these. None: on the labels as they are.
        normal: the class that is an absence, such as ``"good"``; maps then show what speaks against it.
        sample: of dense features, how many rows of each image are kept; this and the rest are arguments of
            :func:`.extract_features`.
        coreset: how many rows are kept of all.
        ignore_index: a label of masks that is left out.
        purity: the least share of a patch that its label must have.
        coverage: the least share of a patch that a label of small things needs.
        background: the label of masks where there is nothing, for ``coverage``.
        resample: how many refits on bootstrap samples of the rows, those of a photo drawn together, the head gets (see
            :func:`.resample_heads`): by their spread maps have errors, and the model's file holds them. 0: none; None:
            30 of a head that is fitted here, or a warning that says why there are none: there are fewer than 8 photos
            of a class, the head has no gradient, or they would take more than a minute, or 32 MB of the file. A head
            that comes fitted gets them where a number is given, and these are the rows that it was fitted on.
        seed: random seed.
        progress: show a progress bar.

    Returns:
        The model; see :class:`Model`.

    Raises:
        TypeError: the head is no estimator, or with ``resample`` a :class:`.Head`, which does not hold its estimators;
            or what :func:`.extract_features` raises.
        ValueError: the loader is empty, the head cannot be fitted on its features, maps cannot be of one of ``layers``,
            ``normal`` is no class, or ``classes`` are not those of the labels, or given with a head that is fitted
            already; there are too few photos for the resampled heads that are asked for; or what
            :func:`.extract_features` and :class:`.PCASVMNet` raise.

    Example:
        >>> head = make_pipeline(StandardScaler(), PCA(3), SVC())
        >>> model = fit_model(backbone, loader, head, layer="layer2", pool="mean", progress=False)
        >>> model.classes, sorted(model.means)
        (['cat', 'dog', 'elk'], ['layer1', 'layer2'])
    """
    return fit_made(
        take_backbone(backbone, transform), loader, head, layer, pool=pool, layers=layers, classes=classes,
        normal=normal, sample=sample, coreset=coreset, ignore_index=ignore_index, purity=purity, coverage=coverage,
        background=background, resample=resample, seed=seed, progress=progress,
    )  # fmt: skip


def fit_made(
    network: Backbone,
    loader: Iterable[Any],
    head: Any,
    layer: str | nn.Module | Sequence[str | nn.Module] | None = None,
    *,
    pool: Any = None,
    layers: Any = None,
    classes: Sequence[Any] | None = None,
    normal: Any = None,
    resample: int | None = None,
    **extraction: Any,
) -> Model:
    """Return the model of a backbone that is made already; see :func:`fit_model`."""
    check_count(resample)
    net, is_fitted, source = network.net, _is_fitted(head), FeatureSource.of(network.net, layer, pool)
    if classes is not None and is_fitted:
        raise ValueError("classes= are names for a head that is fitted here, but this one has its own: leave them out")
    chosen = name_layers(net, layers)
    preparation = None if network.transform is None else describe_transform(network.transform)
    blocks = BlockMeans(net, source, chosen)
    rows, labels, *places = collect_features(
        net, loader, layer, pool=pool, blocks=blocks, places=source.dense, **extraction
    )
    if not (chosen or blocks.last):
        warn(
            "no layer was found that has positions, and that all on the way to the features goes through: explain has "
            "no layer by default; name one, fit_model(..., layers=[...])",
            UserWarning,
        )
    if preparation is not None:
        hint_at_scaled(blocks.first, preparation.transform)
    labels = labels if classes is None else name_labels(labels, classes)
    if not is_fitted:
        _warn_of_positions(net, source, blocks)
    fitted = head if is_fitted else fit_clone(head, rows, labels)
    own = _own_head(fitted)
    groups = places[0][:, 0] if places else None
    count = 0 if is_fitted and resample is None else resample
    ask = f"fit_model(..., resample={COUNT})"
    reason = attach_resamples(own, fitted, rows, labels, count, groups=groups, seed=extraction.get("seed", 0), ask=ask)
    if reason:
        warn(f"maps do not say how sure they are, as there are no resampled heads: {reason}", UserWarning)
    if not (is_fitted or source.dense):
        keep_likeness(own, fitted, rows, labels, None)
    elif groups is not None and not is_fitted and _are_all_kept(**extraction):
        keep_likeness_of_patches(own, fitted, rows, labels, groups, None, partial(_read_photos, rows, groups))
    about = {"estimator": describe_estimator(fitted), "images": blocks.count, "rows": len(rows)}
    about |= {"left_out": blocks.left_out} | describe_labels(labels)
    return assemble_model(
        network, own, blocks.first, layer, pool, means=blocks.means, layers=chosen or blocks.last, normal=normal,
        preparation=preparation, about=about,
    )  # fmt: skip


def _are_all_kept(
    sample: Any = None, coreset: Any = None, ignore_index: Any = None, purity: float = 0.0, **_: Any
) -> bool:
    """Return whether there is a row for each position of each image."""
    return sample is None and coreset is None and ignore_index is None and not purity


def _read_photos(rows: np.ndarray, photos: np.ndarray) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield the features of all positions of each photo, (1, D, P), with its number."""
    numbers, firsts = np.unique(photos, return_index=True)
    for number, part in zip(numbers.tolist(), np.split(rows, firsts[1:]), strict=True):
        yield torch.from_numpy(part.T[None].copy()), [number]


def _warn_of_positions(net: nn.Module, source: FeatureSource, blocks: BlockMeans) -> None:
    """Warn of features that are the numbers of all positions, of which few images teach little."""
    parts = source.parts or (source,)
    if any(part.pool is not None for part in parts):
        return
    with evaluation_mode(net), torch.no_grad():
        outputs = [output_of(net, part, blocks.first.to(find_device(net))) for part in parts]
    if any(output.dim() > 3 and math.prod(output.shape[2:]) > 1 for output in outputs):
        shapes = ", ".join(str(tuple(output.shape[1:])) for output in outputs)
        warn(
            f"the features are the output of {source!r}, {shapes}, position by position: "
            f"{sum(output[0].numel() for output in outputs)} features of {blocks.count} photos. A head seldom learns "
            'from so few which position matters: pool="mean" has one feature a channel',
            UserWarning,
        )


def name_layers(net: nn.Module, layers: Any) -> list[str]:
    """Return the names of layers of maps, given by names or as modules, one or several; None: none.

    Raises:
        TypeError: they are neither.
        ValueError: the network has no such layer; the message names the nearest.
    """
    wanted = [layers] if isinstance(layers, str | nn.Module) else list(layers or ())
    if not all(isinstance(layer, str | nn.Module) and layer != "" for layer in wanted):
        raise TypeError(f"layers= are names of layers, such as ['layer3', 'layer4'], or modules, got {layers!r:.60}")
    return [name for layer in wanted if (name := find_layer_name(net, layer)) is not None]


def assemble_model(
    network: Backbone,
    fitted: Any,
    x: Any,
    layer: Any,
    pool: Any,
    *,
    layers: Sequence[str],
    means: Mapping[str, Tensor],
    preparation: Preparation | None = None,
    normal: Any = None,
    about: Mapping[str, Any],
) -> Model:
    """Return the model of a fitted head.

    Args:
        network: the backbone.
        fitted: the head.
        x: images of the kind that it was fitted on.
        layer: where features come from.
        pool: how positions become features.
        layers: names of the layers that maps are of by default.
        means: of layers, over the training images.
        preparation: how pictures become images; None: as the transform of the backbone says.
        normal: the class that is an absence; None: the one that the head knows.
        about: what the head was fitted with.

    Raises:
        ValueError: there is no such class.
    """
    own = _own_head(fitted)
    net = attach_head(network.net, own, layer, pool)
    labels = [] if own.classes_ is None else own.classes_.tolist()
    if normal is not None and normal not in labels:
        classes = "has no classes" if own.classes_ is None else f"has the classes {labels}"
        raise ValueError(f"normal={normal!r}: this head {classes}")
    if preparation is None and network.transform is not None:
        preparation = describe_transform(network.transform)
    training = own.training_set
    training.means |= means
    if preparation is not None:
        record_preparation(training, preparation)
    if normal is not None:  # as the head has it: a number of NumPy's cannot be stored
        training.preparation = (training.preparation or {}) | {"normal": labels[labels.index(normal)]}
    if isinstance(network.net, TiledNet):  # which the head alone would not say
        training.preparation = (training.preparation or {}) | {"tiled": True}
    versions = {
        "pytorch_grad_cam_pcasvm": pytorch_grad_cam_pcasvm.__version__,
        "torch": torch.__version__,
        "sklearn": sklearn.__version__,
    }
    about = {"estimator": describe_estimator(fitted), "versions": versions} | dict(about)
    inputs = [
        {"name": name, "shape": list(one.shape[1:]), "dtype": str(one.dtype).removeprefix("torch.")}
        for name, one in (x.items() if isinstance(x, Inputs) else [(None, x)])
    ]
    return Model(net, preparation, tuple(layers), _are_tokens(network.net, layers, x), network.origin, inputs, about)


def attach_head(backbone: nn.Module, head: Head, layer: Any, pool: Any) -> PCASVMNet:
    """Return the network of a backbone and a head, in evaluation mode, but for the backbone, which keeps its own."""
    net = PCASVMNet(backbone, head, layer, pool=pool)
    net.training = False
    net.head.eval()
    return net


def _are_tokens(net: nn.Module, layers: Sequence[str], x: Any) -> bool:
    """Return whether the output of a layer does not have its channels behind the images."""
    with evaluation_mode(net), torch.no_grad():
        layouts = LayerMeans(net, layers, x.to(find_device(net))).layouts.values()
    return any(not layout.is_map_shaped for layout in layouts)


def take_backbone(backbone: nn.Module | str, transform: Callable[[Any], Tensor] | None) -> Backbone:
    """Return a backbone that was passed, or is made by its name."""
    if isinstance(backbone, str):
        own = make_backbone(backbone)
        return own if transform is None else Backbone(own.net, transform, True, own.origin)
    net = find_network(backbone)
    return Backbone(net, transform, transform is not None, Origin("", type(net).__name__))


def fit_clone(head: Any, rows: np.ndarray, labels: Any) -> Any:
    """Return a clone of an estimator, fitted on rows of features and their labels.

    Raises:
        TypeError: it is no estimator.
        ValueError: it needs labels, and there are none; or it takes one for each picture, and there are several.
    """
    if not hasattr(head, "fit"):
        raise TypeError(
            f"the head must be an estimator of scikit-learn, a Head, or a list of fitted estimators, got "
            f"{type(head).__name__}"
        )
    try:
        return clone(head).fit(rows, labels)
    except (TypeError, ValueError) as error:
        if labels is None:
            raise ValueError(
                f"the loader yields no labels, and {type(head).__name__} cannot be fitted without them ({error}): let "
                "it yield (images, labels)"
            ) from error
        if np.ndim(labels) > 1:
            _refuse_several(head, np.asarray(labels), error)
        raise


def _refuse_several(head: Any, labels: np.ndarray, error: Exception) -> NoReturn:
    """Refuse labels with a column for each class, which a head does not take."""
    name = type(head.steps[-1][1] if hasattr(head, "steps") else head).__name__
    one_hot = bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) == 1).all())
    kind, way = ("one-hot", "labels.argmax(1)") if one_hot else ("several at a time", "labels[:, 0] for the first")
    raise ValueError(
        f"the loader yields {labels.shape[1]} labels for each picture, {kind}, and {name} takes one ({error}): let it "
        f"yield one, {way}, or fit a head of several labels, MultiOutputClassifier({name}())"
    ) from error


def name_labels(labels: Any, classes: Sequence[Any]) -> np.ndarray:
    """Return the names of the classes that labels number.

    Raises:
        ValueError: there are no labels, or some are no numbers of classes.
    """
    numbers = np.asarray([] if labels is None else labels)
    if not numbers.size or numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError("classes= names the numbers that a loader yields as labels, but these are no integers, (N,)")
    if numbers.min() < 0 or numbers.max() >= len(classes):
        raise ValueError(
            f"classes= has {len(classes)} names, but the labels go from {numbers.min()} to {numbers.max()}: give one "
            "for each of 0, 1, 2, ..."
        )
    return np.asarray(classes)[numbers]


def describe_estimator(fitted: Any) -> str:
    """Return an estimator in one line, as a model's file holds it."""
    return " ".join(repr(fitted).split())[:_LONGEST]


def describe_labels(labels: Any) -> dict[str, Any]:
    """Return how many rows each class has, as a model's file holds it; nothing for labels that are no classes."""
    if labels is None or getattr(labels, "ndim", 1) != 1 or getattr(labels, "dtype", np.dtype(object)).kind == "f":
        return {}
    return {"classes": {str(label): count for label, count in sorted(Counter(np.asarray(labels).tolist()).items())}}


def _is_fitted(head: Any) -> bool:
    if isinstance(head, Head | list | tuple):
        return True
    try:
        check_is_fitted(head)
    except NotFittedError:
        return False
    except TypeError:  # no estimator, which is told where it is fitted
        return False
    return True


def _own_head(fitted: Any) -> Head:
    """Return the head of fitted estimators; of a Head, which other networks may have, one with the same stages."""
    head = Head.of(fitted)
    if head is not fitted:
        return head
    own = copy.copy(head)
    training = head.training_set
    own.training_set = TrainingSet(
        dict(training.examples),
        copy.deepcopy(training.preparation),
        dict(training.means),
        training.resamples,
        training.sums,
    )
    return own
