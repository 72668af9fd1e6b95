"""The site: where a network is explained, and how ``reshape_transform`` arranges the output of its layers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.auto_layers import find_last_blocks
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, output_of
from pytorch_grad_cam_pcasvm.network.inputs import one_input, pick_images
from pytorch_grad_cam_pcasvm.network.keras_network import is_keras
from pytorch_grad_cam_pcasvm.network.layout import Layout, has_other_readings, lay_out_maps, list_readings
from pytorch_grad_cam_pcasvm.network.modules import find_layer_name
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.tiling import Tiled, look_inside
from pytorch_grad_cam_pcasvm.network.token_layout import find_token_layout
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse, warn
from pytorch_grad_cam_pcasvm.runtime.rollback import called


@dataclass(frozen=True)
class Site:
    """Where a network is explained.

    Attributes:
        backbone: the network up to its features.
        source: where the features come from; None: they are the network's output.
        layers: dotted names of the target layers.
    """

    backbone: nn.Module
    source: Any
    layers: list[str]

    @property
    def parts(self) -> tuple[nn.Module, Any, list[str]]:
        """Backbone, source and layers."""
        return self.backbone, self.source, self.layers

    @property
    def modules(self) -> list[nn.Module]:
        """The target layers themselves."""
        return [self.backbone.get_submodule(called(name)[0]) for name in self.layers]


class TargetLayers:
    """The target layers of a method: the layers given, or the last blocks of the network.

    Args:
        layers: modules of the network, or their dotted names; or ``"auto"``.
        automatic: how many blocks ``"auto"`` takes.

    Raises:
        TypeError: the layers are neither.
        ValueError: there are none.
    """

    def __init__(self, layers: Any, automatic: int) -> None:
        auto = isinstance(layers, str) and layers == "auto"
        if not auto and not (
            isinstance(layers, list | tuple) and all(isinstance(layer, nn.Module | str) for layer in layers)
        ):
            raise TypeError(
                "target_layers must be a list of modules or their names, or 'auto', got a "
                f"{type(layers).__name__}: use [layer]"
            )
        if not layers:
            raise ValueError("target_layers is empty: name the layer whose activations become the map")
        self._automatic = automatic if auto else 0
        self._searched: tuple[Any, ...] = ()  # the backbone and the shape of images that blocks were looked for
        self._layers: list[Any] = [] if auto else list(layers)
        self._names: list[str | None] = [None] * len(self._layers)

    def __len__(self) -> int:
        """Return how many there are; none before the last blocks were looked for."""
        return len(self._layers)

    def of(self, model: nn.Module, x: Tensor | None = None) -> Site:
        """Return the site in a network as it is now, with the last blocks if these are wanted and images are given."""
        backbone, source = model.feature_source(x) if isinstance(model, PCASVMNet) else (model, None)
        if self._automatic:
            self._look_for_blocks(backbone, source, x)
        pairs = zip(self._names, self._layers, strict=True)
        if any(name is None or not _is_at(backbone, name, layer) for name, layer in pairs):
            self._names = [find_layer_name(backbone, layer) for layer in self._layers]
            if None in self._names:
                raise ValueError("the target layer is the network itself: choose one of its layers")
        return Site(backbone, source, [str(name) for name in self._names])

    def _look_for_blocks(self, backbone: nn.Module, source: Any, x: Tensor | None) -> None:
        if self._searched[:1] != (backbone,):
            self._layers, self._names = [], []
        if x is not None and self._searched != (backbone, x.shape[1:]):
            one_input(x, "target_layers='auto'")
            blocks = find_last_blocks(backbone, source or FeatureSource.of(backbone, None), x)
            self._layers, self._names = blocks[-self._automatic :], [*blocks[-self._automatic :]]
            self._searched = backbone, x.shape[1:]


def refuse_repeated(site: Site) -> None:
    """Refuse target layers that are one and the same call.

    Raises:
        ValueError: two are.
    """
    calls = [(module, called(name)[1] or 1) for module, name in zip(site.modules, site.layers, strict=True)]
    if len(set(calls)) < len(calls):
        raise ValueError(
            f"the target layers {', '.join(map(repr, site.layers))} are not all different: name each once. The calls "
            "of a layer that runs several times are counted together, by whatever name"
        )


def _is_at(backbone: nn.Module, name: str, layer: nn.Module | str) -> bool:
    """Return whether a target layer is still where it was found: looking for it takes longer."""
    return name == layer if isinstance(layer, str) else backbone.get_submodule(name) is layer


def layout_by(
    transform: Any, backbone: nn.Module, name: str, x: Tensor, activations: Tensor, first_time: Callable[[Any], bool]
) -> Layout:
    """Return how the activations of a target layer are arranged.

    Args:
        transform: ``reshape_transform``: ``"tokens"``, a user's function, or None.
        backbone: the network.
        name: name of the layer.
        x: images, shape (N, ...).
        activations: the layer's output for them.
        first_time: whether a layer and a shape are asked for the first time, as a hint is given once.

    Returns:
        What brings them to the shape of maps.

    Raises:
        ValueError: the layout cannot be determined, or the channels seem to come last.
    """
    tiling = backbone.find_tiling(x) if isinstance(backbone, Tiled) else None
    if tiling is not None:
        network, inner, tiles = look_inside(backbone, name, x)
        row = layout_by(transform, network, inner, tiles, activations, first_time)
        return replace(row, crops=tiling.place(row(activations[:1]).shape[2:]))

    def layout(fix: str | None = None) -> Layout:
        output_name = f"the output of {name!r}"
        return find_token_layout(
            backbone, lambda net, images: output_of(net, name, images), output_name, x, activations, fix
        )

    if (transform is None or transform == "tokens") and is_keras(backbone.get_submodule(called(name)[0])):
        refuse(
            ValueError,
            f"{name!r} is a layer of Keras in a module of torch, and where its channels are is not known",
            "pass the Keras model itself in place of the module",
            Fix("pass reshape_transform=lambda t: t.movedim(-1, 1) if they come last", "reshape_transform"),
        )
    if transform == "tokens":
        return layout()
    if transform is None:
        if activations.dim() > 3:
            _refuse_other_readings(layout, name, x, activations)
        if activations.dim() == 3 and pick_images(x)[0].dim() == 3:
            _refuse_tokens(layout, name, activations)
        return lay_out_maps(activations.shape)
    if first_time((name, x.shape[1:], activations.shape[1:])):
        _hint_at_other_tokens(transform, name, activations, layout)

    def guarded(activations: Tensor) -> Tensor:
        try:
            return transform(activations)
        except Exception as error:
            token_layout = _tokens(layout)
            way = "" if token_layout is None else f"; they are {_words(token_layout)}: use reshape_transform='tokens'"
            raise ValueError(
                f"reshape_transform fails on the activations of {name!r}, {tuple(activations.shape)}: {error}{way}"
            ) from error

    return Layout((), activations.dim(), function=guarded)


def _refuse_other_readings(layout: Callable[..., Layout], name: str, x: Any, activations: Tensor) -> None:
    """Refuse activations of at least four dimensions that are not (N, T, ...), or of which that cannot be told.

    Raises:
        ValueError: they are not, or more than one reading fits their shape, and none what moves which number.
    """
    shape, sizes = activations.shape, [image.shape for image in pick_images(x)]
    if len(shape) < min(map(len, sizes)) or not any(has_other_readings(shape, size) for size in sizes):
        return
    if activations.is_meta:  # without numbers, of which none moves
        return
    try:
        reading = layout(_TRANSFORM_OF_STEPS if len(shape) == 5 else _TRANSFORM_OF_MAPS)
    except ValueError:
        if len(shape) <= max(map(len, sizes)) and not any(list_readings(shape, size) for size in sizes):
            return  # as its channels come in no place that fits, they come first, as usual
        raise
    if not reading.has_channels_first:
        refuse(
            ValueError,
            f"the activations of {name!r}, {tuple(shape)}, seem to have their channels last",
            Fix("pass reshape_transform='tokens', or lambda t: t if they come first", "reshape_transform"),
        )


_TRANSFORM_OF_MAPS = (
    "pass reshape_transform=lambda t: t if it is (N, T, H, W), or lambda t: t.movedim(-1, 1) if its channels come last"
)
_TRANSFORM_OF_STEPS = (
    "pass reshape_transform=lambda t: t.transpose(0, 1).flatten(1, 2) if it is (steps, N, T, H, W), or "
    "lambda t: t.flatten(1, 2) if it is (N, steps, T, H, W)"
)


def _refuse_tokens(layout: Callable[[], Layout], name: str, activations: Tensor) -> None:
    """Refuse activations of signals that are tokens, (N, L, T), and not (N, T, L)."""
    if _tokens(layout) is not None:
        refuse(
            ValueError,
            f"the activations of {name!r}, {tuple(activations.shape)}, are tokens of the signals, whose channels come "
            "last",
            Fix("pass reshape_transform='tokens'", "reshape_transform"),
        )


def _tokens(layout: Callable[[], Layout]) -> Layout | None:
    """Return the layout of tokens, or None where it cannot be known or there are none."""
    try:
        token_layout = layout()
    except Exception:  # any failure only costs a hint
        return None
    return None if token_layout.tokens is None else token_layout


def _words(layout: Layout) -> str:
    before, patches = layout.before, math.prod(layout.grid)
    words = f"{layout.extra_tokens + patches} tokens: {patches} patches"
    words += f" after {before} other{'s' if before > 1 else ''}" if before else ""
    return words + (f", and {layout.after} after them" if layout.after else "")


def _hint_at_other_tokens(
    function: Callable[[Tensor], Tensor], name: str, activations: Tensor, layout: Callable[[], Layout]
) -> None:
    """Say once if a function that only picks tokens, (N, L, D), takes other tokens than the patches'."""
    if activations.dim() != 3:
        return
    numbers = torch.arange(1.0, activations.shape[1] + 1, device=activations.device)  # 0 may be padding
    try:
        picked = function(numbers.reshape(1, -1, 1).repeat(len(activations), 1, activations.shape[2])).flatten(2)
    except Exception:  # not on such numbers: then nothing is known
        return
    position = picked[0, 0].long() - 1
    is_pick = torch.equal(picked, (position + 1).to(picked).expand_as(picked)) and len(position.unique()) == len(
        position
    )
    if not is_pick or int(position.min()) < 0 or int(position.max()) >= len(numbers):
        return
    token_layout = _tokens(layout)
    if token_layout is None or token_layout.batch != 0 or token_layout.tokens is None:
        return
    first, count = token_layout.tokens[1:]
    if sorted(position.tolist()) != list(range(first, first + count)):
        some = "" if int(position.max() - position.min()) == len(position) - 1 else f"{len(position)} of "
        warn(
            f"reshape_transform takes {some}the tokens {int(position.min())} to {int(position.max())} of {name!r}, "
            f"but the patches seem to be {first} to {first + count - 1} ({_words(token_layout)}): if that is not "
            "intended, use reshape_transform='tokens'",
            UserWarning,
        )
