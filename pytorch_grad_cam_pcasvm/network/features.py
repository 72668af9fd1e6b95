"""Features: the output of a layer of the backbone, flattened, for one batch or for a whole data loader."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.network.inputs import Inputs, image_and_label, inputs_of
from pytorch_grad_cam_pcasvm.network.modules import device_of, evaluating, layer_name, network_of
from pytorch_grad_cam_pcasvm.network.pools import check_pool, pool_of
from pytorch_grad_cam_pcasvm.network.streaming import Streamed
from pytorch_grad_cam_pcasvm.network.token_layout import layout_of
from pytorch_grad_cam_pcasvm.runtime.arguments import named
from pytorch_grad_cam_pcasvm.runtime.device_sync import is_traced, may_look
from pytorch_grad_cam_pcasvm.runtime.errors import refuse
from pytorch_grad_cam_pcasvm.runtime.hooks import called, calls_of, hooked, runs_instead

Layer = str | nn.Module


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


@dataclass(frozen=True, repr=False)
class FeatureSource:
    """The source of the features, and how they are pooled.

    Attributes:
        layer: dotted name of a module; None: the backbone's own output.
        field: name of a field of the output, if that is not a tensor.
        pool: as for :func:`extract_features`, or a function of the output.
        named: whether the pool is one of the package's, which take tokens; from an output with fields they take the
            last hidden state.
        parts: of several layers, each one's; the rest is empty then.
    """

    layer: str | None = None
    field: str | None = None
    pool: Any = None
    named: bool = False
    parts: "tuple[FeatureSource, ...]" = ()

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts)) or repr(self.field or self.layer or "its output")

    @property
    def where(self) -> Any:
        """The name of the layer, or of the field; a tuple of several layers'; None for the backbone's own output."""
        return tuple(str(part.where) for part in self.parts) or self.field or self.layer

    @staticmethod
    def of(
        backbone: nn.Module, layer: Layer | Sequence[Layer] | None, pool: Any = None, *, checked: bool = False
    ) -> "FeatureSource":
        """Return the source given by layers or a field of the output, and a pool; ``checked``: no need to check it.

        Raises:
            ValueError: there is no such layer or pool, or a list with no layers in it.
        """
        if isinstance(layer, list | tuple):
            parts = tuple(FeatureSource.of(backbone, item, pool, checked=checked) for item in layer)
            if not parts or any(part.layer is None for part in parts):
                raise ValueError(f"layer must be a layer or a list of layers of the backbone, got {layer!r:.80}")
            return FeatureSource(parts=parts) if len(parts) > 1 else parts[0]
        assert layer is None or isinstance(layer, str | nn.Module)
        if not checked:
            check_pool(pool)
        named = isinstance(pool, str | tuple)
        # A configuration have those whose outputs have fields.
        a_name = isinstance(layer, str) and layer.isidentifier() and layer not in backbone._modules
        if a_name and hasattr(backbone, "config"):
            return FeatureSource(None, str(layer), pool, named)
        if checked and not isinstance(layer, nn.Module):
            return FeatureSource(layer, None, pool, named)
        return FeatureSource(layer_name(backbone, layer), None, pool, named)

    def at(self, backbone: nn.Module, x: Tensor) -> "FeatureSource":
        """Return the same source with the pool as a function, for images of the shape of x."""
        if self.parts:
            return replace(self, parts=tuple(part.at(backbone, x) for part in self.parts))
        if self.pool is None or callable(self.pool):
            return self
        whole = replace(self, pool=None)
        layout = layout_of(
            backbone,
            lambda net, images: output_of(net, whole, images),
            f"the output of {self}" if self.field or self.layer else "the backbone's output",
            x,
            fix="pass a function as pool, such as pool=lambda t: t[:, 0] for tokens (N, L, D)",
            without="it is pooled already, so leave pool out, or name an earlier layer, as layer=",
        )
        return replace(self, pool=pool_of(self.pool, layout))

    def of_output(self, output: Any) -> Any:
        """Return the features (N, ...) for the layer's output, (N, D) for those of several layers."""
        if self.parts:
            rows = [flatten(part.of_output(part_output)) for part, part_output in zip(self.parts, output, strict=True)]
            return torch.cat(rows, 1)
        field = self.field
        if field is None and self.named and not isinstance(output, Tensor):
            field = "last_hidden_state"
        if field is not None:
            value = output.get(field) if isinstance(output, Mapping) else getattr(output, field, None)
            if value is None:
                has = list(output) if isinstance(output, Mapping) else type(output).__name__
                raise ValueError(f"the backbone has no layer {field!r}, and its output has no such field: it has {has}")
            output = value
        return output if self.pool is None else self.pool(output)


_once: "WeakKeyDictionary[nn.Module, set[Any]]" = WeakKeyDictionary()  # layers that run once, as layouts are known


def ask_anew(backbone: nn.Module) -> None:
    """Forget which layers run once: the network may have been changed."""
    _once.pop(backbone, None)


def features_of(backbone: nn.Module, layer: str | FeatureSource | None, x: Tensor) -> Tensor:
    """Return the output of ``layer`` for a batch, shape (N, D): :func:`flatten` of :func:`output_of`."""
    return flatten(output_of(backbone, layer, x))


def output_of(
    backbone: nn.Module, layer: str | tuple[str, ...] | FeatureSource | None, x: Tensor, *, ends: bool = False,
    done: Callable[[], None] | None = None, copied: Callable[[Tensor], Tensor] = Tensor.clone,
) -> Any:  # fmt: skip
    """Return the output of ``layer`` (None: the backbone; a tuple: a list of theirs); what follows is not run.

    The first pass for images of a shape does go on to the end, to see whether a layer runs again, unless it ``ends``;
    ``done`` is called where the layer, or the last of several, has run; ``copied`` copies what may be written into.

    Raises:
        ValueError: a layer does not run, or runs more than once and no call of it is named.
        Reached: it is that of a pass around this one.
    """
    if isinstance(layer, FeatureSource):
        return layer.of_output(
            output_of(backbone, layer.where if layer.parts else layer.layer, x, ends=ends, done=done)
        )
    if layer is None:
        return _given(backbone, x)
    names = list(dict.fromkeys((layer,) if isinstance(layer, str) else layer))
    unnamed, key = [name for name in names if "#" not in name], (tuple(names), tuple(x.shape[1:]), x.dtype)
    # What fails behind the layers is of no concern.
    whole = bool(unnamed) and not ends and not _is_compiled() and key not in _once.setdefault(backbone, set())
    reached: dict[str, Any] = {}

    def note(name: str, output: Any) -> None:
        if name not in reached:
            # What comes may write into it.
            reached[name] = tree_map_only(Tensor, copied, output) if whole else output
        if len(reached) == len(names) and done is not None:
            done()
        if len(reached) == len(names) and not whole:
            raise Reached

    try:
        with hooked() as hooks:
            runs = hooks.runs
            for name in names:
                hooks.after_call(backbone, name, note)
            _given(backbone, x)
    except Reached:
        if len(reached) < len(names):  # that of a pass around this one
            raise
    except Exception:
        if not whole or len(reached) < len(names):
            raise
    for name in unnamed if whole else ():
        if runs[name] > 1:
            raise ValueError(
                f"the layer {name!r} runs {runs[name]} times in a forward pass: name the call whose output is meant, "
                f"{calls_of(name, runs[name])}"
            )
    if whole:
        _once[backbone].add(key)
    missing = next((name for name in names if name not in reached), None)
    if missing is None:  # also where a bare "except:" of the network's own kept the pass running
        return reached[layer] if isinstance(layer, str) else [reached[name] for name in names]
    count = runs[called(missing)[0]]
    if count:
        class_name = type(backbone).__name__
        raise ValueError(
            f"the layer {missing!r} does not run in a forward pass of {class_name}; {runs_instead(missing, count)}"
        )
    raise ValueError(
        f"the layer {missing!r} does not run in a forward pass of {type(backbone).__name__}; if that is compiled, its "
        "layers cannot be seen: pass the original network, and compile the PCASVMNet, torch.compile(net)"
    )


def _is_compiled() -> bool:
    return is_traced() or torch.compiler.is_compiling()


def _given(backbone: nn.Module, x: Any) -> Any:
    """Return what a network gives for its input or inputs."""
    if isinstance(x, Inputs):
        return x.passed_to(backbone)
    with explained(backbone, x):
        return backbone(x)


class Reached(BaseException):
    """Raised when the feature layer is reached; not an ``Exception``, which a network's own ``except`` might catch."""


@contextmanager
def explained(backbone: nn.Module, x: Tensor) -> Iterator[None]:
    """Explain what is wrong with the images x if torch rejects them deep inside the backbone."""
    try:
        yield
    # Only an error is explained: a backbone may as well take other images, and cast or repeat them itself.
    except RuntimeError as error:
        dtype = next((p.dtype for p in backbone.parameters() if p.is_floating_point()), x.dtype)
        if x.dtype != dtype and re.search(
            "should be the same|same d(ata)?type|expected scalar type|not implemented for", str(error)
        ):
            if not x.is_floating_point():
                raise TypeError(_NOT_FLOATING.format("images", x.dtype)) from error
            fix = {torch.float32: "float()", torch.float64: "double()"}.get(dtype, f"to({dtype})")
            has = f"the backbone's parameters are {dtype}, but the images {x.dtype}"
            raise TypeError(f"{has}: use images.{fix}") from error
        convolution = _first_convolution(backbone)
        channels = re.search(r"to have (\d+) channels, but got (\d+) channels", str(error))
        if convolution and channels and x.dim() > 2:
            expected, actual = map(int, channels.groups())
            if expected == convolution.in_channels and actual == x.shape[1]:
                raise ValueError(
                    f"images have {actual} channel{'s' if actual > 1 else ''}, but the backbone's first convolution "
                    f"takes {expected}: {_fix_of_channels(x, expected)}"
                ) from error
        raise


def _first_convolution(network: nn.Module) -> nn.Conv1d | nn.Conv2d | nn.Conv3d | None:
    return next((m for m in network.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)


def check_rows(features: Tensor, x: Tensor) -> None:
    """Raise a ValueError for features of several rows, (N P, D), for each of N images."""
    if torch.compiler.is_compiling() or is_traced() or len(features) <= len(x) or len(features) % len(x):
        return
    several = len(features) // len(x)
    mean = f"unflatten(0, (-1, {several})).mean(1)"
    refuse(
        ValueError,
        f"the features have {len(features)} rows for {len(x)} images ({several} crops or patches of each?), but a head "
        "takes one row for each image",
        f"average them in the network, features.{mean}",
        f"pass pool=lambda t: t.{mean} to extract_features and PCASVMNet",
    )


def _fix_of_channels(x: Tensor, expected: int) -> str:
    spatial = x.dim() - 2
    if x.shape[-1] == expected:
        order = (0, spatial + 1, *range(1, spatial + 1))
        return f"the shape {tuple(x.shape)} has its channels last: use x.permute{order}"
    if x.shape[1] == 1:
        return f"use x.expand{(-1, expected, *[-1] * spatial)} or torchvision.transforms.Grayscale({expected})"
    if expected == 1:
        return "use x.mean(1, keepdim=True) or torchvision.transforms.Grayscale(1)"
    return f"give it the {expected} channels it was trained on, such as x[:, :{expected}] for RGBA images"


_NOT_FLOATING = "{} must have floating-point values, got {}: scale and normalise it as in training"


def flatten(output: Any) -> Tensor:
    """Return a layer's output, shape (N, ...), as rows of features, shape (N, D)."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"features must be one tensor, but the layer returns a {type(output).__name__}: name another layer, or one "
            "of the output's fields, as layer='last_hidden_state', or pass pool=lambda output: output.pooler_output"
        )
    if output.dim() < 2:
        raise ValueError(f"features must be rows (N, ...), but the layer's output has shape {tuple(output.shape)}")
    return output.flatten(1)


def checked_images(x: Any, network: nn.Module | None = None) -> Any:
    """Return the input if it is a batch of images: finite floating-point values, (N, ...); several as Inputs.

    The network, if it is known, tells 1-D signals (N, C, L) from one image (C, H, W).

    Raises:
        TypeError: the input is not a floating-point tensor.
        ValueError: it is no batch of images, or has NaN or infinite values.
    """
    x = inputs_of(x)
    check_tensor(x, "input_tensor")
    floats = [tensor for tensor in x.tensors if tensor.is_floating_point()] if isinstance(x, Inputs) else [x]
    if not floats or not floats[0].is_floating_point():
        raise TypeError(_NOT_FLOATING.format("input_tensor", x.dtype))
    if not isinstance(x, Inputs) and x.dim() == 3:
        if network is not None and isinstance(_first_convolution(network), nn.Conv1d):
            refuse(
                ValueError,
                f"input_tensor must be a batch of images (N, C, H, W), but 1-D signals, {tuple(x.shape)}, are not "
                "supported",
                "pass x.unsqueeze(2), (N, C, 1, L), to a network of Conv2d with kernels of height 1",
                "pass x.unsqueeze(2) to nn.Sequential(nn.Flatten(2), backbone), and with it reshape_transform=lambda "
                "t: t.unsqueeze(2)",
            )
        raise ValueError(f"input_tensor must be a batch (N, C, H, W), got {tuple(x.shape)}: use x.unsqueeze(0)")
    if floats[0].dim() < 2 or x.shape[0] == 0:
        raise ValueError(f"input_tensor must be a batch of images (N, C, H, W) with N > 0, got {tuple(x.shape)}")
    # On an accelerator the check would wait for the device: there the maps are checked when numpy is asked for.
    if any(may_look(tensor) and not all_finite(tensor) for tensor in floats):
        raise ValueError("input_tensor has NaN or infinite values: its map would be meaningless")
    return x


def one_input(x: Any, caller: str, instead: str = "use explain of ClosedFormGradCAM or ContributionCAM") -> Tensor:
    """Return an input that passed :func:`checked_images`, unless there are several."""
    if isinstance(x, Inputs):
        raise TypeError(f"{caller} {'take' if caller.endswith('s') else 'takes'} networks of one input: {instead}")
    return x


def all_finite(x: Tensor) -> bool:
    """Return whether all values are finite; waits for the device."""
    # A sum is one pass, and finite only if all its terms are; a large one may be infinite all the same.
    return math.isfinite(x.sum().item()) or bool(x.isfinite().all())


_TRANSFORM = (
    "transform=torchvision.transforms.ToTensor(), or v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])"
)


def check_tensor(x: Any, name: str) -> None:
    """Raise an error for anything but a tensor, and say how to make one."""
    if isinstance(x, Tensor | Inputs):
        return
    one = next(iter(x), None) if isinstance(x, list | tuple) else x
    hint = "use a DataLoader"
    if isinstance(one, Image.Image):
        hint = f"give the data set {_TRANSFORM}"
    elif isinstance(one, Tensor):
        hint = "use torch.stack(...)"
    elif isinstance(x, np.ndarray):
        hint = "use torch.from_numpy(...)"
    raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}: {hint}")


@contextmanager
def _loading() -> Iterator[None]:
    """Say what is missing if a DataLoader cannot make a batch of PIL images."""
    try:
        yield
    except TypeError as error:
        if "default_collate" in str(error) and "PIL" in str(error):
            raise TypeError(f"the loader cannot make a batch of PIL images: give its data set {_TRANSFORM}") from error
        raise
