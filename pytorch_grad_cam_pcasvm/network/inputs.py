"""Inputs: one tensor or several for a network, such as RGB and depth, two views, or an image and its metadata."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pytorch_grad_cam_pcasvm.runtime.errors import refuse

_IMAGE_KEYS = ("image", "pixel_values", "img")
LABEL_KEYS = ("label", "labels", "fine_label")


class Inputs:
    """Several inputs of one network, with N rows each; like a batch, they have a length, can be indexed and moved.

    Args:
        inputs: a tuple or list of tensors, which are passed in this order, or a dict of tensors, which are passed by
            name to a network whose forward has arguments of these names, and as a dict to any other.

    Raises:
        ValueError: there are no inputs, or their numbers of rows differ.

    Example:
        >>> both = Inputs((images, torch.ones(2, 3)))
        >>> both.shape, len(both[:1])
        ((2, (3, 32, 32), (3,)), 1)
    """

    def __init__(self, inputs: Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        self._names = tuple(inputs) if isinstance(inputs, Mapping) else None
        values = inputs.values() if isinstance(inputs, Mapping) else inputs
        self.tensors: list[Tensor] = [plain_tensor(value) for value in values]
        counts = [tuple(tensor.shape[:1]) for tensor in self.tensors]
        if not counts or set(counts) != {counts[0]} or () in counts:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors) or "none"
            raise ValueError(f"several inputs must have one row each for the same images, (N, ...), got {shapes}")

    @property
    def shape(self) -> tuple[Any, ...]:
        """N, and the shapes of one row of each."""
        return (self.tensors[0].shape[0], *(tuple(tensor.shape[1:]) for tensor in self.tensors))

    @property
    def images(self) -> list[Tensor]:
        """The batches of images; without any, the possible signals, (N, C, L), or else all inputs."""
        floats = [x for x in self.tensors if x.is_floating_point()]
        pictures = [x for x in floats if x.dim() in (4, 5)]
        return pictures or [x for x in floats if x.dim() == 3] or self.tensors

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the images."""
        return self.images[0].dtype

    @property
    def device(self) -> torch.device:
        """The device, which is the same for all."""
        return self.tensors[0].device

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: Any) -> "Inputs":
        return self.map(lambda tensor: tensor[rows])

    def to(self, device: torch.device) -> "Inputs":
        """Return them on a device."""
        return self.map(lambda tensor: tensor.to(device))

    def items(self) -> list[tuple[str | None, Tensor]]:
        """Return the names and the tensors; names are None if they are passed in order."""
        return list(zip(self._names or [None] * len(self.tensors), self.tensors, strict=True))

    def map(self, function: Callable[..., Tensor], *inputs: "Inputs") -> "Inputs":
        """Apply a function to each tensor, together with the tensors of others in the same place."""
        results = [
            function(*tensors) for tensors in zip(self.tensors, *(other.tensors for other in inputs), strict=True)
        ]
        return Inputs(results if self._names is None else dict(zip(self._names, results, strict=True)))

    def passed_to(self, module: nn.Module) -> Any:
        """Return a module's output for the inputs.

        Raises:
            TypeError: it takes neither arguments of these names nor a dict.
        """
        if self._names is None:
            return module(*self.tensors)
        keywords = dict(zip(self._names, self.tensors, strict=True))
        parameters = inspect.signature(module.forward).parameters
        if parameters.keys() & keywords or [p.kind for p in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]:
            return module(**keywords)
        try:
            return module(keywords)
        except (TypeError, AttributeError, KeyError) as error:
            raise TypeError(
                f"{type(module).__name__} has no arguments named {', '.join(keywords)}, and cannot be run on a dict of "
                f"them ({str(error).splitlines()[0]}): name them as its forward does, or pass a tuple"
            ) from error


def make_inputs(item: Any) -> Any:
    """Return several tensors as :class:`Inputs`, and anything else unchanged: perhaps a list of single images."""
    values = list(item.values()) if isinstance(item, Mapping) else item
    if not isinstance(values, list | tuple) or not values or not all(isinstance(value, Tensor) for value in values):
        return plain_tensor(item)
    alike = len({value.shape for value in values}) == 1 and values[0].dim() == 3 and not isinstance(item, Mapping)
    return item if alike else Inputs(item)


def map_input(function: Callable[..., Tensor], x: Any, *values: Any) -> Any:
    """Apply a function to an input, or to each one of several."""
    return x.map(function, *values) if isinstance(x, Inputs) else function(x, *values)


def pick_images(x: Any) -> list[Tensor]:
    """Return the input; of several, the images among them, or all if there are none."""
    return x.images if isinstance(x, Inputs) else [x]


def refuse_without_channels(x: Any, layer: str) -> None:
    """Refuse signals (N, L): a map needs a channel axis, also where the network adds it itself.

    Args:
        x: the input.
        layer: what the map or the layout is of, as in ``"'body.3'"``.

    Raises:
        ValueError: they are (N, L).
    """
    images = pick_images(x)[0]
    if images.dim() == 2:
        refuse(
            ValueError,
            f"signals of shape {tuple(images.shape)} have no channel axis, (N, C, L), so that no map of {layer} lies "
            "on them",
            "pass x.unsqueeze(1), and if the network adds the channel itself, nn.Sequential(nn.Flatten(), network) in "
            "its place, whose layers have '1.' before their names",
        )


def measure_picture(x: Any) -> tuple[int, ...]:
    """Return the shape of a picture, (H, W), (D, H, W) or (L,); of several inputs, the first image's."""
    return tuple(pick_images(x)[0].shape[2:])


def image_and_label(item: Any) -> tuple[Any, Any]:
    """Return the image in a row or a batch, and its label, or None.

    Args:
        item: a dict, as in MONAI or Hugging Face; a pair or longer tuple; or an image alone.

    Returns:
        The image and its label; tensors of a subclass become plain tensors.

    Raises:
        ValueError: a dict has no image.
    """
    if isinstance(item, Mapping):
        image, label = (
            next((value for key in keys if (value := item.get(key)) is not None), None)
            for keys in (_IMAGE_KEYS, LABEL_KEYS)
        )
        if image is None:
            raise ValueError(f"no image among {list(item)}: one of {_IMAGE_KEYS} is expected")
    else:
        image, label, *_ = (*item, None, None) if isinstance(item, list | tuple) else (item, None)
    return plain_tensor(image), plain_tensor(label)


def plain_tensor(value: Any) -> Any:
    """Return a tensor of a subclass, such as MONAI's MetaTensor with its metadata, as a plain one; others unchanged."""
    if not isinstance(value, Tensor) or type(value) is Tensor or isinstance(value, FakeTensor):  # of a tracer
        return value
    return value.as_subclass(Tensor)
