"""Extraction: the features of all images of a loader, to fit a head on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.network.features import (
    TRANSFORM,
    FeatureSource,
    Layer,
    ask_anew,
    check_rows,
    check_tensor,
    features_of,
)
from pytorch_grad_cam_pcasvm.network.inputs import image_and_label, inputs_of
from pytorch_grad_cam_pcasvm.network.modules import device_of, evaluating, network_of
from pytorch_grad_cam_pcasvm.network.streaming import Streamed
from pytorch_grad_cam_pcasvm.runtime.arguments import named


@named
def extract_features(
    backbone: nn.Module,
    loader: Iterable[Any],
    layer: Layer | Sequence[Layer] | None = None,
    *,
    pool: Any = None,
    fit: Any = None,
    as_numpy: bool = True,
    progress: bool = True,
) -> tuple[Any, Any]:
    """Run a backbone over a data loader and collect the features to fit a scikit-learn head on.

    The backbone runs in evaluation mode, without gradients, on the device of its parameters; its training flags are
    restored afterwards. Modules after ``layer`` are run for the first batch only, to see whether the layer runs again.

    Args:
        backbone: the network.
        loader: yields ``(images, labels)`` batches, dicts with ``image`` and optionally ``label`` as in MONAI, or
            ``images`` alone; images have shape (N, ...). For a network with several inputs, pairs contain a tuple, a
            list or a dict of them instead of the images, as in ``((rgb, depth), labels)``.
        layer: a module of the backbone, or its dotted name; None: the backbone's own output. For a Hugging Face model,
            it may also be the name of an output field, such as ``"last_hidden_state"``. For a list of layers, the
            features are pooled, flattened and concatenated. Of a layer that runs several times, name a call, as in
            ``"pool#2"``.
        pool: how positions or tokens are reduced to one row: None: all of them, concatenated; ``"mean"``, ``"max"`` or
            ``"gem"`` (or ``("gem", power)``) over positions, or over the patch tokens; ``"cls"``, the class token;
            ``"cls+mean"``, both; or a function of the output.
        fit: for features that do not fit into memory: a reduction to fit batch by batch, such as
            ``make_pipeline(StandardScaler(), IncrementalPCA(50))``; its components, shape (R, B), are returned instead
            of the features. The loader is read once for each fitted step and once for the components.
        as_numpy: return numpy arrays; otherwise, tensors on the backbone's device.
        progress: show a progress bar.

    Returns:
        Features, shape (R, D), float32 (float64 from a float64 backbone), and labels, shape (R,), or None if the loader
        yields none. Labels of shape (N, 1) become (R,); several labels per image stay (R, C). Labels that are not
        tensors, such as names, are always returned as an array.

    Raises:
        TypeError: the backbone is no module, or a program made by ``torch.jit`` or ``torch.export``; the loader yields
            images that are not tensors, or whose dtype differs from the backbone's; the features are not a tensor; or a
            step of ``fit`` cannot be fitted batch by batch.
        ValueError: the loader is empty, or an iterator, which can be read only once, although there are steps to fit;
            there is not one label per image, or a dict has no image; the backbone has no such layer, or it runs more
            than once; the backbone does not take this number of channels; the pool is unknown, or the output does not
            have its tokens.

    Example:
        >>> features, labels = extract_features(backbone, loader, "layer2", pool="mean", progress=False)
        >>> features.shape, labels.shape
        ((12, 8), (12,))
    """
    check_loader(loader)
    network = network_of(backbone)
    backbone = backbone if layer is None else network
    ask_anew(backbone)
    source = FeatureSource.of(backbone, layer, pool)
    reduction = Streamed(fit)
    if reduction.steps and iter(loader) is loader:
        raise ValueError("to fit, the loader is run through several times, but this one is an iterator: use DataLoader")
    for add in reduction.passes():
        _run_over(backbone, loader, source, add, progress, "fit")
    device = device_of(backbone)
    features: list[Tensor] = []

    def keep(rows: Tensor) -> None:
        rows = torch.as_tensor(reduction.transform(rows.cpu().numpy()), device=device) if reduction.steps else rows
        features.append(rows.cpu() if as_numpy else rows)

    labels = _run_over(backbone, loader, source, keep, progress, "features")
    stacked = torch.cat(features)
    if as_numpy or not all(isinstance(label, Tensor) for label in labels):  # names: no tensor can hold them
        arrays = [label.cpu().numpy() if isinstance(label, Tensor) else label for label in labels]
        return stacked.numpy() if as_numpy else stacked, np.concatenate(arrays) if labels else None
    return stacked, torch.cat([label.to(device) for label in labels]) if labels else None


def _run_over(
    backbone: nn.Module,
    loader: Iterable[Any],
    source: "FeatureSource",
    keep: Callable[[Tensor], None],
    progress: bool,
    name: str,
) -> list[Any]:
    """Pass on the features of every batch of a loader, (N, D), and return the labels of each."""
    device = device_of(backbone)
    labels: list[Any] = []
    count = 0
    with evaluating(backbone), torch.no_grad(), _loading():
        for batch in tqdm(loader, desc=name, unit="batch") if progress else loader:
            images, label = image_and_label(batch)
            images = inputs_of(images)
            check_tensor(images, "images")
            if label is not None:
                labels.append(_column(label))
            fits = not labels or (len(labels) == count + 1 and labels[-1].shape[:1] == (len(images),))
            if not fits:
                raise ValueError(
                    "the loader must yield one label for every image, or no labels at all; a data set of single images "
                    "is not a loader: use DataLoader(data_set, batch_size=32)"
                )
            images = images.to(device)
            output = features_of(backbone, source.at(backbone, images), images)
            if label is not None:
                check_rows(output, images)
            keep(output.to(torch.promote_types(output.dtype, torch.float32)))
            count += 1
    if not count:
        raise ValueError("the loader yielded no batch: there is nothing to extract features from")
    return labels


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
    """Return the labels of a batch, those of shape (N, 1), as MedMNIST's, as (N,)."""
    labels = labels if isinstance(labels, Tensor) else np.asarray(labels)
    return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels


@contextmanager
def _loading() -> Iterator[None]:
    """Say what is missing if a DataLoader cannot make a batch of PIL images."""
    try:
        yield
    except TypeError as error:
        if "default_collate" in str(error) and "PIL" in str(error):
            raise TypeError(f"the loader cannot make a batch of PIL images: give its data set {TRANSFORM}") from error
        raise
