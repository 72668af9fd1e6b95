"""Keras networks on torch: the layers of a model by their Keras names, and with their channels first.

The layers of a Keras model are no submodules that torch would list, and their channels come last. Here each has a tap,
an ``nn.Identity`` of the same name, which its output passes, channels first, on the way to the next layer. Keras itself
is never imported.
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.runtime.rollback import hooked


class KerasNetwork(nn.Module):
    """A Keras model on torch as a network with submodules.

    Args:
        model: the model, built. It is neither copied nor changed.

    Attributes:
        channels_last: whether its pictures and activations are (N, H, W, C).

    Raises:
        ValueError: it is not built, or some layers have their channels first and others last.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._held = (model,)  # not a submodule: its layers are listed here alone
        self._layers = dict(_list_layers(model))
        if not self._layers or not model.built:
            raise ValueError(
                f"the Keras model {model.name!r} has no layers yet, or is not built: run it once on pictures, "
                "model(images), or give it an Input"
            )
        formats = {str(layer.data_format) for layer in self._layers.values() if hasattr(layer, "data_format")}
        if len(formats) > 1:
            raise ValueError(
                f"some layers of the Keras model {model.name!r} have their channels first and others last: build it "
                "with one data_format"
            )
        self.channels_last = formats != {"channels_first"}
        self._weights = nn.ParameterList([variable.value for variable in model.weights])
        for name in self._layers:
            self._modules[name] = nn.Identity()

    @property
    def model(self) -> Any:
        """The Keras model."""
        return self._held[0]

    def forward(self, x: Tensor) -> Any:
        """Return the model's own output, its channels where Keras has them, for pictures in either order."""
        with hooked() as hooks:
            for name, layer in self._layers.items():
                hooks.after(layer, lambda module, args, kwargs, output, name=name: self._pass_tap(name, output))
            return self.model(self.restore(self.arrange(x)), training=False)

    def _pass_tap(self, name: str, output: Any) -> Any:
        """Return a layer's output behind its tap."""
        if not isinstance(output, Tensor):
            return None
        tap = self.get_submodule(name)
        return self.restore(tap(_first(output) if self.channels_last else output))

    def arrange(self, x: Any) -> Any:
        """Return pictures with their channels first, as (N, C, H, W) or (N, C, D, H, W); all else stays as it is."""
        if not isinstance(x, Tensor) or not self.channels_last or x.dim() not in (4, 5):
            return x
        shape = getattr(self.model, "input_shape", None) if getattr(self.model, "inputs", None) else None
        channels = shape[-1] if isinstance(shape, tuple) else None
        count = 3 if channels is None else channels
        return _first(x) if x.shape[-1] == count or x.shape[1] != count else x

    def restore(self, x: Any) -> Any:
        """Return tensors with their channels first as Keras has them."""
        return x.movedim(1, -1) if isinstance(x, Tensor) and self.channels_last and x.dim() in (4, 5) else x

    def find_name(self, layer: Any) -> str | None:
        """Return the name of the tap of a layer, given as an object or by its name in the model; None: there is none.

        Args:
            layer: the layer, or its name.
        """
        same = [name for name, own in self._layers.items() if own is layer]
        ends = [name for name in self._layers if isinstance(layer, str) and name.rpartition("/")[2] == layer]
        matches = same or ends
        return matches[0] if len(matches) == 1 else None


def _first(x: Tensor) -> Tensor:
    return x.movedim(-1, 1) if x.dim() in (4, 5) else x


def _list_layers(owner: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the layers of a model, and their own layers, by their Keras names; equal names get a number."""
    names = set[str]()
    layers = getattr(owner, "layers", None)
    for layer in owner._flatten_layers(include_self=False, recursive=False) if layers is None else layers:
        name = base = f"{prefix}{layer.name}".replace(".", "_")
        while name in names:
            name = f"{base}_{len(names)}"
        names.add(name)
        if type(layer).__name__ != "InputLayer":  # which never runs
            yield name, layer
            yield from _list_layers(layer, f"{name}/")


_networks: "WeakValueDictionary[int, KerasNetwork]" = WeakValueDictionary()


def is_keras(module: Any) -> bool:
    """Return whether a module is a layer or a model of Keras."""
    return isinstance(module, nn.Module) and any(
        base.__module__.partition(".")[0] == "keras" and base.__name__ == "Layer" for base in type(module).__mro__
    )


def wrap_keras(model: Any) -> KerasNetwork:
    """Return a Keras model as a network, the same one as long as that is in use."""
    network = _networks.get(id(model))
    if network is None or network.model is not model:
        network = _networks[id(model)] = KerasNetwork(model)
    return network


def arrange_images(network: nn.Module | None, x: Any) -> Any:
    """Return images for a network with their channels first, if it, or its backbone, is one of Keras."""
    inner = getattr(network, "backbone", network)
    return inner.arrange(x) if isinstance(inner, KerasNetwork) else x


def restore_output(network: nn.Module, output: Any) -> Any:
    """Return the outputs of taps in the order of Keras, in which features are flattened."""
    if not isinstance(network, KerasNetwork):
        return output
    return [network.restore(part) for part in output] if isinstance(output, list) else network.restore(output)
