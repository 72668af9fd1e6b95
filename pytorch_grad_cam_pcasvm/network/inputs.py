"""Inputs: one tensor or several for a network, such as RGB and depth, two views, or an image and its metadata."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.keras_network import arrange_images
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import refuse
from pytorch_grad_cam_pcasvm.runtime.torch_private import FakeTensor

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
    """Return several tensors as :class:`Inputs`, and anything else unchanged: perhaps a list of single images.

    What a loader makes of the dicts of an image processor, which each are a batch of one, are images (N, C, H, W).
    """
    if isinstance(item, Mapping) and set(item) == {"pixel_values"}:
        value = item["pixel_values"]
        if isinstance(value, list | tuple) and len(value) == 1:
            return plain_tensor(value[0])
        # Not of volumes of one channel, whose next side is their depth.
        if isinstance(value, Tensor) and value.dim() == 5 and value.shape[1] == 1 and value.shape[2] in (1, 3):
            return plain_tensor(value[:, 0])
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
    lost = ", or has a .squeeze() lost the axis of images?" if len(x) == 1 else "?"
    refuse(
        ValueError,
        f"the features have {len(features)} rows for {len(x)} images ({several} crops or patches of each{lost}), but a "
        "head takes one row for each image",
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


def checked_images(x: Any, network: nn.Module | None = None) -> Any:
    """Return the input if it is a batch of images: finite floating-point values, (N, ...); several as Inputs.

    The network, if it is known, tells 1-D signals (N, C, L) from one image (C, H, W): by its layers.

    Raises:
        TypeError: the input is not a floating-point tensor.
        ValueError: it is no batch of images, or has NaN or infinite values.
    """
    x = arrange_images(network, make_inputs(x))
    check_tensor(x, "input_tensor")
    floats = [tensor for tensor in x.tensors if tensor.is_floating_point()] if isinstance(x, Inputs) else [x]
    if not floats or not floats[0].is_floating_point():
        raise TypeError(_NOT_FLOATING.format("input_tensor", x.dtype))
    if not isinstance(x, Inputs) and x.dim() == 3 and not _takes_signals(network, x):
        raise ValueError(f"input_tensor must be a batch (N, C, H, W), got {tuple(x.shape)}: use x.unsqueeze(0)")
    if floats[0].dim() < 2 or x.shape[0] == 0:
        raise ValueError(f"input_tensor must be a batch of images (N, C, H, W) with N > 0, got {tuple(x.shape)}")
    # On an accelerator the check would wait for the device: there the maps are checked when numpy is asked for.
    if any(can_sync(tensor) and not all_finite(tensor) for tensor in floats):
        raise ValueError("input_tensor has NaN or infinite values: its map would be meaningless")
    return x


def prepare_images(model: nn.Module, x: Any) -> Any:
    """Return images that were checked, on the model's device."""
    return checked_images(x, model).to(find_device(model))


def _takes_signals(network: nn.Module | None, x: Tensor) -> bool:
    """Return whether x is a batch of signals (N, C, L) for a network, and no image (C, H, W).

    Its layers tell. With convolutions of pictures, as where signals become pictures inside, it is tried: signals pass,
    and do not as one image, (1, C, H, W).
    """
    modules = () if network is None else [*network.modules()]
    if network is None or not any(isinstance(module, nn.Conv2d | nn.Conv3d) for module in modules):
        return any(isinstance(module, nn.Conv1d | nn.RNNBase) for module in modules)
    return can_sync(x) and _runs_on(network, x[:1]) and not _runs_on(network, x[:1].unsqueeze(0))


def _runs_on(network: nn.Module, x: Tensor) -> bool:
    try:
        with evaluation_mode(network), torch.no_grad():
            return isinstance(network(x.to(find_device(network))), Tensor)
    except Exception:  # whatever a shape in it raises
        return False


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
