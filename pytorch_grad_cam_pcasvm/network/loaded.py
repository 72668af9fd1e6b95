"""What a loader gave that no head can be fitted on: pictures with NaN, by number and path."""

from typing import Any

from torch import Tensor
from torch.utils.data import SequentialSampler, Subset

from pytorch_grad_cam_pcasvm.network.inputs import Inputs
from pytorch_grad_cam_pcasvm.runtime.errors import refuse


def refuse_nan(features: Tensor, images: Any, first: int, loader: Any) -> None:
    """Raise an error if the features of a picture are not finite.

    Args:
        features: of a batch, (N, ...), or several rows of each image.
        images: the batch.
        first: how many pictures came before.
        loader: what yields the batches, which may know the file of a picture.

    Raises:
        ValueError: features have NaN or infinite values.
    """
    finite = features.isfinite().flatten(1).all(1)
    if bool(finite.all()):
        return
    row = int((~finite).nonzero()[0]) * len(images) // len(features)
    picture = f"picture {first + row}{_name_file(loader, first + row)}"
    parts = images.tensors if isinstance(images, Inputs) else [images]
    if all(bool(part[row].isfinite().all()) for part in parts):
        refuse(
            ValueError,
            f"the network makes NaN or infinity of {picture}, whose own numbers are finite",
            "check that pictures are scaled as in training, and the network's weights",
            "run the network in single precision, backbone.float()",
        )
    refuse(
        ValueError,
        f"{picture} has NaN or infinite values, and so have its features (counted from 0, in the loader's order)",
        "leave it out",
        "replace them, torch.nan_to_num(image)",
    )


def _name_file(loader: Any, number: int) -> str:
    """Return the path of a loader's picture in brackets; nothing where it is unknown, or the order is random."""
    data: Any = getattr(loader, "dataset", None)
    if not isinstance(getattr(loader, "sampler", None), SequentialSampler):
        return ""
    while isinstance(data, Subset):
        data, number = data.dataset, int(data.indices[number])
    for name in ("samples", "imgs", "paths", "files"):
        files = getattr(data, name, None)
        if isinstance(files, list | tuple) and number < len(files):
            file = files[number]
            return f" ({file[0] if isinstance(file, tuple) else file})"
    return ""
