"""Transforms: what turns a picture into a tensor, also an image processor, which returns a dict for a batch of one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pytorch_grad_cam_pcasvm.network.inputs import image_and_label
from pytorch_grad_cam_pcasvm.runtime.errors import warn


@dataclass(frozen=True)
class Unpacked:
    """Turns a picture into a tensor by a transform that may be an image processor, as Hugging Face has them.

    Attributes:
        transform: the transform; what it returns as a dict is unpacked, and everything else is left as it is.
    """

    transform: Callable[[Any], Any]

    def __call__(self, picture: Any) -> Any:
        """Return the tensor, shape (C, H, W).

        Raises:
            TypeError: the transform returns no tensor.
            ValueError: a processor returns no image, or several images of one picture.
        """
        made = self.transform(picture)
        if isinstance(made, Mapping):
            if getattr(self.transform, "do_rescale", False) and _is_scaled(picture):
                warn(f"the processor divides pictures by 255 that are 0 to 1 already: {_ONCE}", UserWarning)
            return _unpacked(image_and_label(made)[0])
        if not isinstance(made, Tensor):
            raise TypeError(
                f"the transform returns a {type(made).__name__}, and one tensor (C, H, W) is expected: end it with "
                "torchvision.transforms.ToTensor()"
            )
        return made


def _unpacked(image: Any) -> Tensor:
    """Return the image (C, H, W) in a batch of one that a processor returns, as a tensor, an array or a list."""
    (image,) = image if isinstance(image, list | tuple) and len(image) == 1 else (image,)
    image = torch.from_numpy(image) if isinstance(image, np.ndarray) else image
    if isinstance(image, Tensor) and image.dim() == 4 and len(image) == 1:
        image = image[0]
    if not isinstance(image, Tensor) or image.dim() != 3:
        shape = f"a tensor {tuple(image.shape)}" if isinstance(image, Tensor) else f"a {type(image).__name__}"
        raise ValueError(
            f"the processor returns {shape} for a picture, and one image (C, H, W) is expected: pass a function as "
            "transform, which returns the one that the network takes"
        )
    return image


_ONCE = "make the processor with do_rescale=False, or give it pictures of 0 to 255"


def unpack(transform: Any) -> Any:
    """Return a transform whose results are tensors, also if it is an image processor; None stays None."""
    return transform if transform is None or isinstance(transform, Unpacked) else Unpacked(transform)


def hint_at_scaled(images: Any, transform: Callable[[Any], Any] | None) -> None:
    """Say if images span next to nothing of what a transform makes of black to white: they were scaled twice.

    Args:
        images: of a loader, (N, C, H, W).
        transform: turns a picture into an image; None: not known.
    """
    if transform is None or not isinstance(images, Tensor):
        return
    try:
        black, white = (transform(Image.new("RGB", (64, 64), colour)) for colour in ("black", "white"))
        share = float((images.amax() - images.amin()) / (white - black).abs().amax())
    except Exception:  # it is for a hint only: a transform may want another picture
        return
    if 0 < share < 2 / 255:
        warn(
            f"the loader's images span {share:.1%} of what transform= makes of black to white, as if they had been "
            f"divided by 255 twice: {_ONCE}",
            UserWarning,
        )


def _is_scaled(picture: Any) -> bool:
    """Return whether a picture is an array or a tensor of numbers from 0 to 1, and no picture of PIL."""
    numbers = torch.as_tensor(picture) if isinstance(picture, np.ndarray) else picture
    return isinstance(numbers, Tensor) and numbers.is_floating_point() and bool(0 < numbers.max() <= 1)
