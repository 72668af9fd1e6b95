"""Where a network is explained: the backbone, where its features come from, and the target layers."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.auto_layers import find_last_blocks
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, one_input
from pytorch_grad_cam_pcasvm.network.modules import find_layer_name
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime.hooks import called


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
