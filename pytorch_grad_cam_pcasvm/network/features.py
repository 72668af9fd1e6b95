"""Features: the output of a layer of the backbone, flattened, for one batch or for a whole data loader."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.network.grid import Cells, on_finest
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, make_inputs, pick_images
from pytorch_grad_cam_pcasvm.network.layout import Layout
from pytorch_grad_cam_pcasvm.network.modules import Visit, find_device, find_layer_name, run_until
from pytorch_grad_cam_pcasvm.network.tiling import Tiled
from pytorch_grad_cam_pcasvm.network.token_layout import find_token_layout, forget
from pytorch_grad_cam_pcasvm.runtime.device import is_traced, may_look
from pytorch_grad_cam_pcasvm.runtime.errors import refuse

POOLS = ("cls", "mean", "cls+mean", "max", "gem", "dense")


def check_pool(pool: Any) -> None:
    """Refuse anything but a pool.

    Raises:
        ValueError: it is neither None, a name, ``("gem", power)``, ``("dense", size)`` nor a function.
    """
    is_name = isinstance(pool, str) and pool in POOLS
    pair = isinstance(pool, tuple) and len(pool) == 2
    powered = pair and ((pool[0] == "gem" and _is_power(pool[1])) or (pool[0] == "dense" and _is_size(pool[1])))
    if not (pool is None or callable(pool) or is_name or powered):
        names = ", ".join(map(repr, POOLS))
        raise ValueError(
            f"pool must be {names}, ('gem', power), ('dense', odd size), a function or None, got {pool!r:.80}"
        )


def is_dense(pool: Any) -> bool:
    """Return whether a pool keeps positions."""
    return pool == "dense" or (isinstance(pool, tuple) and pool[:1] == ("dense",))


def _is_power(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0 and value % 2 == 1


def write_pool(pool: Any) -> str:
    """Return a pool that is no function as text, such as ``"mean"``, ``"dense:3"`` or, of None, ``"none"``."""
    if isinstance(pool, tuple):
        name, number = pool
        return f"{name}:{number}"
    return "none" if pool is None else str(pool)


def parse_pool(text: str) -> Any:
    """Return the pool that :func:`write_pool` wrote.

    Raises:
        ValueError: there is no such pool.
    """
    name, _, number = text.partition(":")
    pool: Any = None if text == "none" else text
    if number:
        try:
            pool = name, int(number) if name == "dense" else float(number)
        except ValueError:
            size = "a neighbourhood has an odd size, as in dense:3" if name == "dense" else "a number follows the colon"
            raise ValueError(f"the pool {text!r}: {size}") from None
    check_pool(pool)
    return pool


def make_pool(pool: str | tuple[str, float], layout: Layout) -> Callable[[Tensor], Tensor]:
    """Return a named pool as a function from an output in this layout to features (N, D); dense ones (N, D, h, w).

    Raises:
        ValueError: the pool takes a class token, but there is none.
    """
    name, power = pool if isinstance(pool, tuple) else (pool, 1 if pool == "dense" else 3.0)
    if "cls" in name and not layout.before:
        raise ValueError(f"pool={name!r} takes the class token, but no token comes before the patches: use 'mean'")
    return partial(_dense, int(power), layout) if name == "dense" else partial(_pooled, name, float(power), layout)


def _dense(size: int, layout: Layout, output: Tensor) -> Tensor:
    _check_tokens(layout, output)
    features = layout(output)
    if size == 1:
        return features
    # Zeros beyond the border, as PatchCore has it (Roth et al., CVPR 2022).
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(layout.grid) - 1]
    beyond = size // 2
    if len(layout.grid) == 3 and min(layout.grid) < size:  # which torch takes only if the zeros are there already
        return pool(F.pad(features, [beyond] * 6), size, stride=1)  # type: ignore[no-any-return]
    return pool(features, size, stride=1, padding=beyond)  # type: ignore[no-any-return]


def _check_tokens(layout: Layout, output: Tensor) -> None:
    """Refuse another number of tokens than the layout is of."""
    if layout.tokens is None:
        return
    count, expected = output.shape[layout.tokens[0]], layout.extra_tokens + layout.tokens[2]
    if count != expected:
        forget(layout)
        raise ValueError(
            f"the network now returns {count} tokens, but returned {expected} when their layout was determined: it has "
            "changed; run it again"
        )


def _pooled(name: str, power: float, layout: Layout, output: Tensor) -> Tensor:
    if name == "cls+mean":
        return torch.cat([_pooled("cls", power, layout, output), _pooled("mean", power, layout, output)], 1)
    positions = [d for d in range(layout.dims) if d not in (layout.batch, layout.channels)]
    _check_tokens(layout, output)
    if name == "cls":
        return output.select(1 - layout.batch, 0)
    if layout.before or layout.after:
        (tokens,) = positions
        output = output.narrow(tokens, layout.before, output.shape[tokens] - layout.extra_tokens)
    if name == "max":
        return output.amax(positions)
    if name == "gem":  # Radenovic et al., arXiv 1711.02512
        return output.clamp(min=1e-6).pow(power).mean(positions).pow(1 / power)
    return output.mean(positions)


Layer = str | nn.Module

_POOL_OF_TOKENS = "pass a function as pool, such as pool=lambda t: t[:, 0] for tokens (N, L, D)"
_POOL_OF_SIGNALS = (
    "pass a function as pool, pool=lambda t: t.mean(2) if it is (N, C, L), or pool=lambda t: t.mean(1) if it is tokens "
    "(N, L, C)"
)


@dataclass(frozen=True, repr=False)
class FeatureSource:
    """The source of the features, and how they are pooled.

    Attributes:
        layer: dotted name of a module; None: the backbone's own output.
        field: name of a field of the output, if that is not a tensor.
        pool: as for :func:`extract_features`, or a function of the output.
        by_name: whether the pool is one of the package's, which take tokens; from an output with fields they take the
            last hidden state.
        dense: whether features are (N, D, h, w), a row for each position.
        parts: of several layers, each one's; of the rest, only ``dense`` is known then.
        layout: how the output lies on the image, for images of one shape.

    Example:
        >>> source = FeatureSource.of(backbone, "layer2", "mean")
        >>> source.layer, source.dense
        ('layer2', False)
    """

    layer: str | None = None
    field: str | None = None
    pool: Any = None
    by_name: bool = False
    dense: bool = False
    parts: "tuple[FeatureSource, ...]" = ()
    layout: Layout | None = None

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
            return FeatureSource(dense=parts[0].dense, parts=parts) if len(parts) > 1 else parts[0]
        assert layer is None or isinstance(layer, str | nn.Module)
        if not checked:
            check_pool(pool)
        is_named, dense = isinstance(pool, str | tuple), is_dense(pool)
        # A configuration have those whose outputs have fields.
        a_name = isinstance(layer, str) and layer.isidentifier() and layer not in backbone._modules
        if a_name and hasattr(backbone, "config"):
            return FeatureSource(None, str(layer), pool, is_named, dense)
        if checked and not isinstance(layer, nn.Module):
            return FeatureSource(layer, None, pool, is_named, dense)
        return FeatureSource(find_layer_name(backbone, layer), None, pool, is_named, dense)

    def at(self, backbone: nn.Module, x: Tensor) -> "FeatureSource":
        """Return the same source with the pool as a function, for images of the shape of x."""
        if self.parts:
            return replace(self, parts=tuple(part.at(backbone, x) for part in self.parts))
        if isinstance(backbone, Tiled):
            backbone.prepare(x)
        if self.pool is None or callable(self.pool):
            return self
        whole = replace(self, pool=None)
        layout = backbone.find_layout(x) if isinstance(backbone, Tiled) and self.where is None else None
        layout = layout or find_token_layout(
            backbone,
            lambda net, images: output_of(net, whole, images),
            f"the output of {self}" if self.field or self.layer else "the backbone's output",
            x,
            fix=_POOL_OF_SIGNALS if pick_images(x)[0].dim() == 3 else _POOL_OF_TOKENS,
            without="it is pooled already, so leave pool out, or name an earlier layer, as layer=",
        )
        return replace(self, pool=make_pool(self.pool, layout), layout=layout)

    @property
    def cells(self) -> Cells | None:
        """Where the positions of dense features lie on pictures of one shape; None: they share them out evenly."""
        layouts = [part.layout for part in self.parts or (self,) if part.layout is not None]
        return max(layouts, key=lambda layout: math.prod(layout.grid)).cells if layouts else None

    def of_output(self, output: Any) -> Any:
        """Return the features (N, ...) for the layer's output; of several layers (N, D), of dense ones (N, D, h, w)."""
        if self.parts:
            features = [part.of_output(part_output) for part, part_output in zip(self.parts, output, strict=True)]
            return on_finest(features) if self.dense else torch.cat([flatten(part) for part in features], 1)
        field = self.field
        if field is None and self.by_name and not isinstance(output, Tensor):
            field = "last_hidden_state"
        if field is not None:
            value = output.get(field) if isinstance(output, Mapping) else getattr(output, field, None)
            if value is None:
                has = list(output) if isinstance(output, Mapping) else type(output).__name__
                raise ValueError(f"the backbone has no layer {field!r}, and its output has no such field: it has {has}")
            output = value
        return output if self.pool is None else self.pool(output)


def compute_features(backbone: nn.Module, layer: str | FeatureSource | None, x: Tensor) -> Tensor:
    """Return the output of ``layer`` for a batch, shape (N, D): :func:`flatten` of :func:`output_of`.

    Dense features are (N, D, h, w).

    Args:
        backbone: the network.
        layer: a dotted name, a :class:`FeatureSource` for images of this shape (see its ``at``), or None: the
            backbone's own output.
        x: images, shape (N, ...), on the backbone's device.

    Example:
        >>> compute_features(backbone, None, images).shape
        torch.Size([2, 8])
    """
    features = output_of(backbone, layer, x)
    return features if isinstance(layer, FeatureSource) and layer.dense else flatten(features)


def output_of(
    backbone: nn.Module,
    layer: str | Sequence[str] | FeatureSource | None,
    x: Any,
    visits: Mapping[str, Visit] | None = None,
    **options: Any,
) -> Any:
    """Return the output of ``layer`` (None: the backbone; several: a list of theirs), as :func:`run_until` does."""
    if not isinstance(layer, FeatureSource):
        run = _run_backbone if layer or visits else _run_in_blocks
        return run_until(backbone, layer, x, run, visits, where=f"the features, {layer!r}", **options)
    names = layer.where if layer.parts else layer.layer
    run = _run_backbone if names or visits else _run_in_blocks
    where = "the network's output" if layer.where is None else f"the features, {layer!r}"
    return layer.of_output(run_until(backbone, names, x, run, visits, where=where, **options))


def _run_backbone(backbone: nn.Module, x: Any) -> Any:
    """Return a network's output for its input or inputs."""
    if isinstance(x, Inputs):
        return x.passed_to(backbone)
    with explained(backbone, x):
        return backbone(x)


def _run_in_blocks(backbone: nn.Module, x: Any) -> Any:
    """Return a network's output; tiles run in blocks, as no layer is watched that would run once for each."""
    if not isinstance(backbone, Tiled):
        return _run_backbone(backbone, x)
    with explained(backbone, x):
        return backbone(x, backbone.block)


@contextmanager
def explained(backbone: nn.Module, x: Tensor) -> Iterator[None]:
    """Explain the fault of images x if torch rejects them deep inside the backbone."""
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


def count_input_channels(network: nn.Module) -> int | None:
    """Return how many channels the first convolution of a network takes; None without one."""
    convolution = _first_convolution(network)
    return None if convolution is None else convolution.in_channels


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

    The network, if it is known, tells 1-D signals (N, C, L) from one image (C, H, W): by its layers.

    Raises:
        TypeError: the input is not a floating-point tensor.
        ValueError: it is no batch of images, or has NaN or infinite values.
    """
    x = make_inputs(x)
    check_tensor(x, "input_tensor")
    floats = [tensor for tensor in x.tensors if tensor.is_floating_point()] if isinstance(x, Inputs) else [x]
    if not floats or not floats[0].is_floating_point():
        raise TypeError(_NOT_FLOATING.format("input_tensor", x.dtype))
    if not isinstance(x, Inputs) and x.dim() == 3 and not _takes_signals(network):
        raise ValueError(f"input_tensor must be a batch (N, C, H, W), got {tuple(x.shape)}: use x.unsqueeze(0)")
    if floats[0].dim() < 2 or x.shape[0] == 0:
        raise ValueError(f"input_tensor must be a batch of images (N, C, H, W) with N > 0, got {tuple(x.shape)}")
    # On an accelerator the check would wait for the device: there the maps are checked when numpy is asked for.
    if any(may_look(tensor) and not all_finite(tensor) for tensor in floats):
        raise ValueError("input_tensor has NaN or infinite values: its map would be meaningless")
    return x


def prepare_images(model: nn.Module, x: Any) -> Any:
    """Return images that were checked, on the model's device."""
    return checked_images(x, model).to(find_device(model))


def _takes_signals(network: nn.Module | None) -> bool:
    """Return whether a network has layers for signals, and no convolution of pictures."""
    modules = () if network is None else [*network.modules()]
    of_signals = any(isinstance(module, nn.Conv1d | nn.RNNBase) for module in modules)
    return of_signals and not any(isinstance(module, nn.Conv2d | nn.Conv3d) for module in modules)


def one_input(x: Any, caller: str, instead: str = "use explain of ClosedFormGradCAM or ContributionCAM") -> Tensor:
    """Return an input that passed :func:`checked_images`, unless there are several."""
    if isinstance(x, Inputs):
        raise TypeError(f"{caller} {'take' if caller.endswith('s') else 'takes'} networks of one input: {instead}")
    return x


def all_finite(x: Tensor) -> bool:
    """Return whether all values are finite; waits for the device."""
    # A sum is one pass, and finite only if all its terms are; a large one may be infinite all the same.
    return math.isfinite(x.sum().item()) or bool(x.isfinite().all())


TRANSFORM = (
    "transform=torchvision.transforms.ToTensor(), or v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])"
)


def check_tensor(x: Any, name: str) -> None:
    """Raise an error for anything but a tensor, and say how to make one."""
    if isinstance(x, Tensor | Inputs):
        return
    one = next(iter(x), None) if isinstance(x, list | tuple) else x
    hint = "use a DataLoader"
    if isinstance(one, Image.Image):
        hint = f"give the data set {TRANSFORM}"
    elif isinstance(one, Tensor):
        hint = "use torch.stack(...)"
    elif isinstance(x, np.ndarray):
        hint = "use torch.from_numpy(...)"
    raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}: {hint}")
