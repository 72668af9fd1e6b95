"""Patches: which rows of dense features a command keeps, and the source of their labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

BACKGROUND = "background"  # outside of masks
COVERAGE = 0.2  # of a patch


@dataclass(frozen=True)
class PatchOptions:
    """Which rows of dense features are kept, and the source of their labels.

    Attributes:
        masks: a :class:`.MaskFolder`; None: the label of a patch is that of its image.
        resize: how pictures are resized, as in ``export.onnx``; for masks.
        purity: the least share of a patch that its label must have.
        coverage: the least share of a patch that a class of small things needs.
        normal: the name of what is outside of masks.
        sample: how many patches of each image: a number or a fraction; None: as many as ``most`` in all.
        coreset: how many are kept of all; None: all.
        most: number of patches, if ``sample`` is not given.
    """

    masks: Any = None
    resize: Any = None
    purity: float = 0.0
    coverage: float = COVERAGE
    normal: str = BACKGROUND
    sample: float | None = None
    coreset: float | None = None
    most: int = 20_000

    def at(self, count: int, backbone: Any, source: Any, x: Any) -> "PatchOptions":
        """Return it with the number of patches of each of so many images."""
        import torch

        from pytorch_grad_cam_pcasvm.network.features import compute_features
        from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode

        if self.sample is not None:
            return self
        with evaluation_mode(backbone), torch.no_grad():
            positions = compute_features(backbone, source, x)[0, 0].numel()
        return self if count * positions <= self.most else replace(self, sample=max(1, self.most // count))

    @property
    def arguments(self) -> dict[str, Any]:
        """What it is for ``extract_features``."""
        amounts = {"sample": self.sample, "coreset": self.coreset, "places": True}
        if self.masks is None:
            return amounts
        return amounts | {"purity": self.purity, "coverage": self.coverage, "ignore_index": self.masks.unlabelled}

    def labels(self, rows: Sequence[int], numbers: Sequence[Any], size: Any) -> Any:
        """Return the labels of images: their classes, or masks (N, H, W); None without classes."""
        import numpy as np
        import torch

        if self.masks is None:
            return None if numbers[0] is None else torch.tensor(numbers)
        masks = np.stack([self.masks.of(row, size, self.resize) for row in rows]).astype(np.int64)
        if self.masks.values == [1] and numbers[0] is not None:  # the class is that of the folder
            masks *= 1 + np.reshape(numbers, (-1, 1, 1))
        return torch.from_numpy(masks)

    def find_faults(self, row: int, size: Any) -> Any:
        """Return the inside of a picture's mask, boolean, (H, W); unlabelled pixels are outside."""
        return self.masks.find_inside(row, size, self.resize)

    def names(self, classes: Sequence[str] | None) -> list[str]:
        """Return the names of the labels from 0 on, of pictures in the folders of some classes."""
        if self.masks is None:
            return list(classes or [])
        if self.masks.values == [1]:
            return [self.normal, *(classes or [self.masks.classes.names.get(1, "defect")])]
        last = max(number for number in self.masks.values if number != self.masks.unlabelled)
        return [self.normal, *(self.masks.titles.get(number, str(number)) for number in range(1, 1 + last))]

    def name_marked(self, names: Sequence[str]) -> list[str]:
        """Return the labels, without the background, that masks show anywhere."""
        if self.masks.values != [1] or len(names) <= 2:
            return list(names[1:])
        marked = {name.split("/")[0] for name, file in zip(self.masks.names, self.masks.files, strict=True) if file}
        return [name for name in names[1:] if name in marked]
