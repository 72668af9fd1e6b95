"""Features: the output of a layer of the backbone, flattened, for one batch or for a whole data loader."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, compiler, nn

from pytorch_grad_cam_pcasvm.network.fields import read_field, refuse_several
from pytorch_grad_cam_pcasvm.network.grid import Cells, on_finest
from pytorch_grad_cam_pcasvm.network.inputs import pick_images
from pytorch_grad_cam_pcasvm.network.keras_network import KerasNetwork, restore_output
from pytorch_grad_cam_pcasvm.network.layout import Layout
from pytorch_grad_cam_pcasvm.network.messages import refuse_layer
from pytorch_grad_cam_pcasvm.network.modules import find_layer_name
from pytorch_grad_cam_pcasvm.network.pools import check_pool, keeps_positions, make_pool
from pytorch_grad_cam_pcasvm.network.runner import LayerError, Visit, run_until
from pytorch_grad_cam_pcasvm.network.tiling import Tiled
from pytorch_grad_cam_pcasvm.network.token_layout import find_token_layout
from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import refuse
from pytorch_grad_cam_pcasvm.runtime.rollback import Hooks
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_is_leaf, tree_tensors

Layer = str | nn.Module

# The layers that are known to run once, for images of these shapes.
_run_once: "WeakKeyDictionary[nn.Module, set[Any]]" = WeakKeyDictionary()


def ask_anew(backbone: nn.Module) -> None:
    """Forget which layers run once: the network may have been changed."""
    _run_once.pop(backbone, None)


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
        of_patches: whether the pool is one of the package's that looks at no class token.

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
    of_patches: bool = False

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
        is_named, dense = isinstance(pool, str | tuple), keeps_positions(pool)
        patches = is_named and pool not in ("cls", "cls+mean")
        # Only models with a `config` (Hugging Face) return outputs with named fields.
        a_name = isinstance(layer, str) and layer.isidentifier() and layer not in backbone._modules
        if a_name and hasattr(backbone, "config"):
            return FeatureSource(None, str(layer), pool, is_named, dense, of_patches=patches)
        if checked and not isinstance(layer, nn.Module):
            return FeatureSource(layer, None, pool, is_named, dense, of_patches=patches)
        return FeatureSource(find_layer_name(backbone, layer), None, pool, is_named, dense, of_patches=patches)

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
        if isinstance(backbone, KerasNetwork):
            layout = _lay_out_keras(backbone, output_of(backbone, whole, x[:1], ends=True))
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
            if read_field(output, field) is None:
                refuse_several(output)
        if field is not None:
            value = read_field(output, field)
            if value is None:
                has = list(output) if isinstance(output, Mapping) else type(output).__name__
                raise ValueError(f"the backbone has no layer {field!r}, and its output has no such field: it has {has}")
            output = value
        return output if self.pool is None else self.pool(output)


def _lay_out_keras(backbone: KerasNetwork, output: Any) -> Layout | None:
    """Return the layout of an output whose channels are where Keras has them; None: it has no axes of positions."""
    if not isinstance(output, Tensor) or output.dim() not in (4, 5):
        return None
    channels = output.dim() - 1 if backbone.channels_last else 1
    grid = output.shape[1:-1] if backbone.channels_last else output.shape[2:]
    return Layout(tuple(grid), output.dim(), 0, channels)


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
    *,
    ends: bool = False,
    copied: Callable[[Tensor], Tensor] = Tensor.clone,
    hooks: Hooks | None = None,
) -> Any:
    """Run a network until a layer has run, and return its output; the layers behind do not run.

    The first pass for images of a shape does go on to the end, to see whether the layer runs again, unless it ``ends``.

    Args:
        backbone: the network.
        layer: dotted name of the layer, or of one of its calls, as in ``"block#2"``; several names; the source of the
            features; or None: the end.
        x: its input.
        visits: for target layers on the way, by name: called with the name and the output; may return another output.
        ends: whether the network stops behind the layer in any case.
        copied: copies a tensor that what follows may write into.
        hooks: those of a pass that has some already.

    Returns:
        The output of the layer; of several, a list of theirs; of a source, its features; of none, the network's output.

    Raises:
        TypeError: a target layer returns something else than a tensor.
        ValueError: a layer does not run, or runs more than once and no call of it is named.
    """
    source = layer if isinstance(layer, FeatureSource) else None
    layers: Any = layer if source is None else source.where if source.parts else source.layer
    names = list(dict.fromkeys([layers] if isinstance(layers, str) else layers or ()))
    key = (tuple(names), tuple(x.shape[1:]), x.dtype)
    ends = ends or all("#" in name for name in names) or is_traced() or compiler.is_compiling()
    first_time = not ends and key not in _run_once.setdefault(backbone, set())
    try:
        outputs = run_until(backbone, x, names, visits, copied=copied if first_time else None, hooks=hooks)
    except LayerError as error:
        is_output = (layer if source is None else source.where) is None
        end = "the network's output" if is_output else f"the features, {layer!r}"
        refuse_layer(error, backbone, end)
    if first_time:
        _run_once[backbone].add(key)
    output = outputs[layers] if layers is None or isinstance(layers, str) else [outputs[name] for name in names]
    if source is None:
        return output
    return source.of_output(output if layers is None else restore_output(backbone, output))


def flatten(output: Any) -> Tensor:
    """Return a layer's output, shape (N, ...), as rows of features, shape (N, D)."""
    if not isinstance(output, Tensor):
        refuse_several(output)
    if output.dim() < 2:
        width = output.numel()
        refuse(
            ValueError,
            f"features must be rows (N, ...), but the output has shape {tuple(output.shape)}: of one image, a network "
            "that ends in .squeeze() has lost the axis of images",
            "write .flatten(1) in its place",
            f"pass pool=lambda t: t.reshape(-1, {width})",
            "take the features from the layer before it, layer=...",
        )
    return output.flatten(1)


def run_to_features(
    backbone: nn.Module,
    layer: str | None,
    names: Sequence[str],
    x: Tensor,
    reached: Visit,
    hooks: Hooks,
    copied: Callable[[Tensor], Tensor] = Tensor.clone,
) -> Any:
    """Run a network up to its features, and return them.

    Args:
        backbone: the network.
        layer: dotted name of the feature layer; None: the network's output.
        names: dotted names of the target layers.
        x: input, shape (N, ...).
        reached: called with the name and output of every target layer; may return another output.
        hooks: of this pass.
        copied: copies a tensor of the features that what follows may write into.
    """  # noqa: DOC201, DOC501 - said in one line
    try:
        output = output_of(backbone, layer, x, dict.fromkeys(names, reached), copied=copied, hooks=hooks)
    except RuntimeError as error:
        if "flex_attention" not in str(error):
            raise
        refuse(
            ValueError,
            "flex_attention compiles itself, which cannot be done while its steps are watched",
            "use torch.nn.functional.scaled_dot_product_attention with the mask",
        )
    if isinstance(output, Mapping) and tree_is_leaf(output):
        output = dict(output)  # a class of the user's, which torch cannot take apart
    items = output if isinstance(output, tuple | list) else ()
    if not tree_tensors(output) or any(isinstance(item, Mapping) for item in items):
        kinds = "s, ".join(sorted({type(item).__name__ for item in items})) or "nothing"
        raise TypeError(
            f"{type(backbone).__name__} returns a {type(output).__name__} of {kinds}s, like a detector's boxes: only a "
            "tensor, or a dict, tuple or list of tensors, can be explained"
        )
    return output
