"""Extraction: the features of all images of a loader, to fit a head on, and the mean activations of a layer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from os import PathLike
from typing import Any, overload

import numpy as np
import torch
from sklearn.base import clone
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer
from torch import Tensor, nn
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.network.features import FeatureSource, Layer, ask_anew, compute_features, output_of
from pytorch_grad_cam_pcasvm.network.inputs import (
    TRANSFORM,
    check_rows,
    check_tensor,
    checked_images,
    image_and_label,
    make_inputs,
)
from pytorch_grad_cam_pcasvm.network.keras_network import KerasNetwork, arrange_images
from pytorch_grad_cam_pcasvm.network.layer_means import BlockMeans
from pytorch_grad_cam_pcasvm.network.loaded import refuse_nan
from pytorch_grad_cam_pcasvm.network.modules import (
    evaluation_mode,
    find_device,
    find_layer_name,
    find_network,
)
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.patches import Patches, check_amount
from pytorch_grad_cam_pcasvm.network.patches import coreset as coreset_of
from pytorch_grad_cam_pcasvm.network.pools import keeps_positions
from pytorch_grad_cam_pcasvm.network.tiling import Tiled
from pytorch_grad_cam_pcasvm.runtime.errors import refuse


class Streamed:
    """A reduction that is fitted batch by batch, each of its steps in a pass of its own over the data.

    Every step is fitted anew, and is as it was before if its pass does not end.

    Args:
        reduction: an estimator with ``partial_fit`` and ``transform``, or a pipeline of such; None: nothing is fitted.

    Attributes:
        steps: its estimators.

    Raises:
        TypeError: a step needs all data at once, or does not transform.
    """

    def __init__(self, reduction: Any) -> None:
        pipeline = [step for _, step in reduction.steps] if isinstance(reduction, Pipeline) else [reduction]
        self.steps = [step for step in pipeline if step is not None and step != "passthrough"]
        self._fitted: list[Any] = []
        for step in self.steps:
            name = type(step).__name__
            if not hasattr(step, "transform"):
                raise TypeError(f"fit takes a reduction, but {name} has no transform: fit it on what is returned")
            if not (hasattr(step, "partial_fit") or isinstance(step, _STATELESS)):
                raise TypeError(
                    f"{name} has no partial_fit, so it needs all features at once: use CovariancePCA, or leave fit out"
                )

    def passes(self) -> Iterator[Callable[..., None]]:
        """Yield one function a pass: call it with every batch. Asking for the next function fits the step."""
        for step in self.steps:
            if hasattr(step, "partial_fit"):
                anew = _Held(clone(step), self.transform)
                yield anew.add
                vars(step).update(vars(anew.fitted()))
            self._fitted.append(step)

    def transform(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of features as the fitted steps transform them."""
        for step in self._fitted:
            rows = np.require(step.transform(rows), requirements="W")  # of set_output, a table that is read-only
        return rows


_STATELESS = (FunctionTransformer, Normalizer)


class _Held:
    """A buffer for `partial_fit`, which needs at least as many rows a call as there are components."""

    def __init__(self, step: Any, before: Callable[[np.ndarray], np.ndarray]) -> None:
        self._step, self._before = step, before
        self._rows: list[np.ndarray] = []

    def add(self, features: Tensor, *columns: Any) -> None:
        rows = self._before(features.cpu().numpy())
        self._rows.append(rows)
        least = getattr(self._step, "n_components", 1) or rows.shape[1]
        least = 1 if isinstance(least, float) else least  # a share of the variance
        if sum(map(len, self._rows)) >= 2 * least:
            held = np.concatenate(self._rows)
            self._step.partial_fit(held[:-least])
            self._rows = [held[-least:]]

    def fitted(self) -> Any:
        return self._step.partial_fit(np.concatenate(self._rows))


def extract_features(
    backbone: nn.Module,
    loader: Iterable[Any],
    layer: Layer | Sequence[Layer] | None = None,
    *,
    pool: Any = None,
    fit: Any = None,
    sample: float | None = None,
    coreset: float | None = None,
    ignore_index: int | None = None,
    purity: float = 0.0,
    coverage: float | None = None,
    background: int = 0,
    places: bool = False,
    seed: int = 0,
    as_numpy: bool = True,
    progress: bool = True,
) -> Any:
    """Run a backbone over a data loader and collect the features to fit a scikit-learn head on.

    The backbone runs in evaluation mode, without gradients, on the device of its parameters; its training flags are
    restored afterwards. Modules after ``layer`` are run for the first batch only, to see whether the layer runs again.

    Args:
        backbone: the network.
        loader: yields ``(images, labels)`` batches, dicts with ``image`` and optionally ``label`` as in MONAI, or
            ``images`` alone; images have shape (N, ...), labels (N,), or for ``pool="dense"`` masks (N, H, W). For a
            network with several inputs, pairs contain a tuple, a list or a dict of them instead of the images, as in
            ``((rgb, depth), labels)``.
        layer: a module of the backbone, or its dotted name; None: the backbone's own output. For a Hugging Face model,
            it may also be the name of an output field, such as ``"last_hidden_state"``. For a list of layers, the
            features are pooled, flattened and concatenated. Of a layer that runs several times, name a call, as in
            ``"pool#2"``.
        pool: how positions or tokens are reduced to one row: None: all of them, concatenated; ``"mean"``, ``"max"`` or
            ``"gem"`` (or ``("gem", power)``) over positions, or over the patch tokens; ``"cls"``, the class token;
            ``"cls+mean"``, both; or a function of the output. ``"dense"``: a row for each position or patch token;
            ``("dense", 3)``: after averaging over 3x3 neighbours, as PatchCore does. Several layers are then brought to
            the finest grid (bilinear) and concatenated.
        fit: for features that do not fit into memory: a reduction to fit batch by batch, such as
            ``make_pipeline(StandardScaler(), IncrementalPCA(50))``; its components, shape (R, B), are returned instead
            of the features. The loader is read once for each fitted step and once for the components.
        sample: of dense features, how many rows of each image are kept, drawn at random: a number, or a fraction. With
            masks, each label in an image has an equal part of them; of a label with fewer rows all are kept, and others
            fill up.
        coreset: of dense features, how many rows are kept of all, none twice: a number, or a fraction. They are chosen
            greedily, each as far as possible from those before, as PatchCore does.
        ignore_index: a label of masks: patches that have it are left out.
        purity: the least share of a patch that its label must have, or the patch is left out.
        coverage: the least share of a patch that a label of small things needs: a patch has the most frequent label
            other than ``background`` if that has at least this share, else ``background``. None: a patch has its most
            frequent label.
        background: a label of masks, with ``coverage``: where there is nothing.
        places: also return where the rows of dense features come from.
        seed: random seed of ``sample`` and ``coreset``.
        as_numpy: return numpy arrays; otherwise, tensors on the backbone's device.
        progress: show a progress bar.

    Returns:
        Features, shape (R, D), float32 (float64 from a float64 backbone), and labels, shape (R,), or None if the loader
        yields none. Labels of shape (N, 1) become (R,); several labels per image stay (R, C). Labels that are not
        tensors, such as names, are always returned as an array. Of dense features, there is a row for each position, in
        reading order, image by image; its label is that of the image, or that of its patch in the mask. With
        ``places``, there is a third array of integers, shape (R, 3): image, row, column.

    Raises:
        TypeError: the backbone is no module, or a program made by ``torch.jit`` or ``torch.export``; the loader yields
            images that are not tensors, or whose dtype differs from the backbone's; the features are not a tensor; or a
            step of ``fit`` cannot be fitted batch by batch.
        ValueError: a picture, or what the network makes of it, has NaN or infinite values; the loader is empty, or an
            iterator, which can be read only once, although there are steps to fit;
            there is not one label per image, labels are masks but features are not dense, or a dict has no image; an
            option is out of range, or only for dense features; the backbone has no such layer, or it runs more
            than once; the backbone does not take this number of channels; the pool is unknown, or the output does not
            have its tokens.

    Example:
        >>> features, labels = extract_features(backbone, loader, "layer2", pool="mean", progress=False)
        >>> features.shape, labels.shape
        ((12, 8), (12,))
        >>> features, labels = extract_features(backbone, loader, "layer2", pool="dense", progress=False)
        >>> features.shape, labels.shape
        ((768, 8), (768,))
    """
    return collect_features(
        backbone, loader, layer, pool=pool, fit=fit, sample=sample, coreset=coreset, ignore_index=ignore_index,
        purity=purity, coverage=coverage, background=background, places=places, seed=seed, as_numpy=as_numpy,
        progress=progress,
    )  # fmt: skip


def collect_features(
    backbone: nn.Module,
    loader: Iterable[Any],
    layer: Layer | Sequence[Layer] | None = None,
    *,
    pool: Any = None,
    fit: Any = None,
    sample: float | None = None,
    coreset: float | None = None,
    ignore_index: int | None = None,
    purity: float = 0.0,
    coverage: float | None = None,
    background: int = 0,
    places: bool = False,
    seed: int = 0,
    as_numpy: bool = True,
    progress: bool = True,
    blocks: BlockMeans | None = None,
) -> Any:
    """Return the same as :func:`extract_features`; ``blocks`` counts the images in the last pass over the loader."""
    check_loader(loader)
    check_amount("coreset", coreset)
    patches = Patches(sample, ignore_index, purity, seed, coverage, background) if keeps_positions(pool) else None
    typed = (sample, ignore_index, purity, coverage) != (None, None, 0.0, None)
    if patches is None and (places or coreset or typed):
        raise ValueError(
            "sample, coreset, ignore_index, purity, coverage and places are for rows of positions: use pool='dense'"
        )
    network = find_network(backbone)
    backbone = network if layer is not None or isinstance(network, KerasNetwork) else backbone
    ask_anew(backbone)
    source = FeatureSource.of(backbone, layer, pool)
    reduction = Streamed(fit)
    if reduction.steps and iter(loader) is loader:
        raise ValueError("to fit, the loader is run through several times, but this one is an iterator: use DataLoader")
    for add in reduction.passes():
        _run_over(backbone, loader, source, add, progress, "fit", patches)
    device = find_device(backbone)
    features, at = list[Tensor](), list[np.ndarray]()

    def keep(rows: Tensor, where: np.ndarray | None) -> None:
        if where is not None:
            at.append(where)
        rows = torch.as_tensor(reduction.transform(rows.cpu().numpy()), device=device) if reduction.steps else rows
        features.append(rows.cpu() if as_numpy else rows)

    labels = _run_over(backbone, loader, source, keep, progress, "features", patches, blocks)
    stacked, joined = torch.cat(features), None  # type: Tensor, Any
    if labels and all(isinstance(label, Tensor) for label in labels) and not as_numpy:
        joined = torch.cat([label.to(device) for label in labels])
    elif labels:  # also names, which no tensor can hold
        joined = np.concatenate([label.cpu().numpy() if isinstance(label, Tensor) else label for label in labels])
    where = np.concatenate(at) if at else None
    if coreset is not None:
        chosen = np.sort(coreset_of(stacked.cpu().numpy(), coreset, seed, progress=progress))
        stacked = stacked[torch.from_numpy(chosen).to(stacked.device)]
        joined, where = (None if part is None else part[chosen] for part in (joined, where))
    result = stacked.numpy() if as_numpy else stacked, joined
    return (*result, where) if places else result


def _run_over(
    backbone: nn.Module,
    loader: Any,
    source: "FeatureSource",
    keep: Callable[[Tensor, np.ndarray | None], None],
    progress: bool,
    name: str,
    patches: Patches | None,
    blocks: BlockMeans | None = None,
) -> list[Any]:
    """Pass on the features of every batch of a loader, (R, D), and their places, and return the labels of each."""
    labels: list[Any] = []
    widths: dict[int, Any] = {}  # shapes of images, by the number of their features
    count = images_before = 0
    with evaluation_mode(backbone), torch.no_grad(), _loading():
        for images, label, features in _batches(backbone, loader, source, progress, name):
            if label is not None:
                labels.append(_column(label))
            fits = not labels or (len(labels) == count + 1 and labels[-1].shape[:1] == (len(images),))
            if not fits:
                raise ValueError(
                    "the loader must yield one label for every image, or no labels at all; a data set of single images "
                    "is not a loader: use DataLoader(data_set, batch_size=32)"
                )
            with nullcontext() if blocks is None else blocks.counting(images):
                output = features()
            refuse_nan(output, images, images_before, loader)
            widths.setdefault(output.shape[1], getattr(images, "shape", ())[1:])
            if len(widths) > 1:
                (one, first), (other, second) = widths.items()
                refuse(
                    ValueError,
                    f"images of shape {tuple(first)} have {one} features, and those of shape {tuple(second)} {other}",
                    "give images of one size",
                    "take means over positions, pool='mean' with layer= the last one that has any",
                )
            where = None
            if patches is not None:
                cells = None
                if labels and labels[-1].ndim > 1:  # masks
                    stored = hasattr(loader, "input_shape")
                    pictures = torch.zeros(1, *loader.input_shape, device=find_device(backbone)) if stored else images
                    cells = source.at(backbone, pictures).cells
                output, own, where = patches.of(output, labels[-1] if labels else None, images_before, cells)
                labels[-1:] = [] if own is None else [own]
            elif labels and labels[-1].ndim > 2:
                raise ValueError(
                    f"the labels are masks, {tuple(labels[-1].shape)}, but there is one row of features for each "
                    "image: use pool='dense', or give one label per image"
                )
            elif label is not None:
                check_rows(output, images)
            keep(output.to(torch.promote_types(output.dtype, torch.float32)), where)
            count, images_before = count + 1, images_before + len(images)
    if not count:
        raise ValueError("the loader yielded no batch: there is nothing to extract features from")
    return labels


def _batches(
    backbone: nn.Module, loader: Any, source: "FeatureSource", progress: bool, name: str
) -> Iterator[tuple[Any, Any, Callable[[], Tensor]]]:
    """Yield the images of every batch of a loader, their labels, and a function that computes their features.

    If the loader stores features, they are yielded in place of images.
    """
    device, stored = find_device(backbone), hasattr(loader, "stored_batches")
    batches = loader.stored_batches(backbone, source) if stored else loader
    for batch in tqdm(batches, desc=name, unit="batch") if progress else batches:
        if stored:
            features, label = batch
            yield features, label, partial(features.to, device)
            continue
        images, label = image_and_label(batch)
        images = arrange_images(backbone, make_inputs(images))
        check_tensor(images, "images")
        images = images.to(device)
        yield images, label, partial(_features, backbone, source, images)


def _features(backbone: nn.Module, source: "FeatureSource", images: Any) -> Tensor:
    return compute_features(backbone, source.at(backbone, images), images)


def check_loader(loader: Any) -> None:
    """Raise an error for file names instead of images, and say how to make a loader of images."""
    names = loader[:1] if isinstance(loader, list | tuple) else ()
    of_files = [name for name in (loader, *names) if isinstance(name, str | PathLike)]
    table = type(loader).__module__.partition(".")[0] in ("pandas", "polars")
    if not of_files and not table:
        return
    folder = repr(str(loader)) if of_files and of_files[0] is loader else "folder"
    way = f"DataLoader(torchvision.datasets.ImageFolder({folder}, transform), batch_size=32)"
    if folder == "folder":
        way = "DataLoader(data_set, batch_size=32) of a data set that reads the images of these names"
    description = f"{type(loader).__name__} of names" if names and of_files else type(loader).__name__
    raise TypeError(
        f"a loader yields batches of images, which a {description} does not: use {way}, with the transform that the "
        "network's weights were trained with, such as weights.transforms()"
    )


def _column(labels: Any) -> Any:
    """Return the labels of a batch without axes of length 1: (N, 1), as MedMNIST's, or masks (N, 1, H, W)."""
    labels = labels if isinstance(labels, Tensor) else np.asarray(labels)
    return labels[:, 0] if labels.ndim in (2, 4) and labels.shape[1] == 1 else labels


@contextmanager
def _loading() -> Iterator[None]:
    """Say that a transform is missing if a DataLoader cannot make a batch of PIL images."""
    try:
        yield
    except TypeError as error:
        if "default_collate" in str(error) and "PIL" in str(error):
            raise TypeError(f"the loader cannot make a batch of PIL images: give its data set {TRANSFORM}") from error
        raise


@overload
def mean_activations(
    net: nn.Module, loader: Iterable[Any], layer: nn.Module | str, *, progress: bool = True
) -> Tensor: ...


@overload
def mean_activations(
    net: nn.Module, loader: Iterable[Any], layer: list[nn.Module | str], *, progress: bool = True
) -> list[Tensor]: ...


def mean_activations(
    net: nn.Module, loader: Iterable[Any], layer: Any, *, progress: bool = True
) -> Tensor | list[Tensor]:
    """Return the mean activations of a layer over a data set, for use as a baseline.

    Args:
        net: a :class:`PCASVMNet` or a backbone.
        loader: yields ``(images, ...)`` batches, dicts with ``image`` as in MONAI, or images alone, of shape (N, ...),
            all of the same size.
        layer: the layer, or its dotted name; or a list of these, in which case the loader is read once for each.
        progress: show a progress bar.

    Returns:
        The mean, in the shape of the layer's output for one image: (T, H, W), or (L, D) for tokens; float32 or better,
        on the network's device. For a list of layers, a list of means.

    Raises:
        TypeError: the loader or the layer yields something other than floating-point tensors; or the network is no
            module, or a program made by ``torch.jit`` or ``torch.export``.
        ValueError: the loader is empty, its images differ in size, a dict has no image, the first dimension of the
            layer's output is not the images, or the network has no such layer, or runs it more than once.

    Example:
        >>> mean = mean_activations(net, loader, "layer2", progress=False)
        >>> maps = ContributionCAM(net, ["layer2"], baseline=mean).explain(images)
    """
    if isinstance(layer, list | tuple):
        return [mean_activations(net, loader, one, progress=progress) for one in layer]
    check_loader(loader)
    backbone = find_backbone(net)
    name = find_layer_name(backbone, layer)
    total: Tensor | None = None
    count = 0
    ask_anew(backbone)
    with evaluation_mode(net), torch.no_grad():
        for batch in tqdm(loader, desc="mean activations", unit="batch") if progress else loader:
            images = checked_images(image_and_label(batch)[0], backbone)
            activations = output_of(backbone, name, images.to(find_device(net)))
            if not isinstance(activations, Tensor):
                raise TypeError(
                    f"the layer {name!r} returns a {type(activations).__name__}, not a tensor: name another"
                )
            tiled = isinstance(backbone, Tiled) and name is not None  # whose rows are tiles
            if (
                total is None
                and not tiled
                and not _counts_images(backbone, name, activations, images.to(find_device(net)))
            ):
                raise ValueError(
                    f"the first dimension of the output of {name!r}, {tuple(activations.shape)}, does not count images "
                    "(perhaps tokens): choose a layer where it does, or baseline='zero'"
                )
            if total is not None and total.shape != activations.shape[1:]:
                raise ValueError(
                    f"activations of shapes {tuple(total.shape)} and {tuple(activations.shape[1:])} cannot be "
                    "averaged: resize the images to one size"
                )
            total = activations.sum(0, dtype=torch.float64) + (0 if total is None else total)
            count += len(activations)
    if total is None:
        raise ValueError("the loader yielded no batch: there is nothing to average")
    return (total / count).to(torch.promote_types(activations.dtype, torch.float32))


def _counts_images(backbone: nn.Module, name: str | None, activations: Tensor, images: Tensor) -> bool:
    """Return whether the first dimension of a layer's output counts the images."""
    if activations.dim() > 1 and len(activations) == activations.shape[1] == len(images) > 1:
        return len(output_of(backbone, name, images[:1])) == 1
    return len(activations) == len(images)


def find_backbone(net: nn.Module) -> nn.Module:
    """Return the network up to its features."""
    return net.feature_source()[0] if isinstance(net, PCASVMNet) else find_network(net)
