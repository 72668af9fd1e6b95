"""Patches: which rows of dense features a command keeps, the source of their labels, and a picture of chosen ones."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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


_MOST = 40  # photos
_COLUMNS = 5
_SIDE = 226  # pixels of a photo
_GAP, _LINE, _HEAD = 10, 20, 58
_MARK, _DOUBT, _TEXT = (255, 210, 0), (180, 30, 40), (30, 30, 30)


def draw_chosen(
    file: Path, folder: Any, picked: Sequence[tuple[int, str, Any]], grid: Sequence[int], doubtful: Sequence[int]
) -> int:
    """Draw photos with the outlines of the patches that are taken for their faults, doubtful ones first.

    Args:
        file: where to write.
        folder: the photos.
        picked: number, class and positions of the patches of each faulty photo, the most suspicious photo first.
        grid: (h, w), the shape of the positions.
        doubtful: the numbers of the photos whose patches are hardly suspicious.

    Returns:
        The number of photos that are drawn.
    """
    from PIL import Image, ImageDraw, ImageFont

    from pytorch_grad_cam_pcasvm.data.images import Images
    from pytorch_grad_cam_pcasvm.export.explainer import Panel, shorten

    order = [one for one in picked if one[0] in doubtful][: _MOST // 2]
    rest = [one for one in picked if one[0] not in doubtful]
    rest = rest[:: max(1, -(-len(rest) // (_MOST - len(order))))]  # from the most to the least suspicious
    order += rest
    images = Images(folder, thumbnails=_SIDE)
    columns, lines = min(_COLUMNS, len(order)), -(-len(order) // _COLUMNS)
    width = max(760, columns * (_SIDE + _GAP) + _GAP)
    sheet = Image.new("RGB", (width, _HEAD + lines * (_SIDE + _LINE + _GAP) + _GAP), "white")
    draw, font, large = ImageDraw.Draw(sheet), ImageFont.load_default(13), ImageFont.load_default(17)
    draw.text((_GAP, 8), "Outlined: the patches that are taken for faults. Look before you believe them.",
              _TEXT, font=large)  # fmt: skip
    doubtful_words = f", {len(doubtful)} doubtful, which come first" if doubtful else ""
    summary = f"{len(order)} of {len(picked)} photos with a fault{doubtful_words}"
    draw.text((_GAP, 33), summary, _TEXT, font=font)
    for place, (number, name, positions) in enumerate(order):
        batch = images.read([number])
        if not batch.thumbnails:
            continue
        photo = Image.open(io.BytesIO(batch.thumbnails[0])).convert("RGB")
        is_doubtful = number in doubtful
        words = ("doubtful: " if is_doubtful else f"{name}: ") + Path(images.id(number)).name
        panel = Panel(photo, caption=shorten(words, font, _SIDE), size=_SIDE, boxes=tuple(map(int, positions)))
        x, y = _GAP + place % _COLUMNS * (_SIDE + _GAP), _HEAD + place // _COLUMNS * (_SIDE + _LINE + _GAP)
        sheet.paste(panel.photo, (x, y))
        down, across = photo.height / grid[0], photo.width / grid[1]
        for box in panel.boxes:
            row, column = divmod(box, grid[1])
            for margin, colour in ((4, "black"), (3, _MARK)):
                left, top = x + column * across - margin, y + row * down - margin
                draw.rectangle((left, top, left + across + 2 * margin, top + down + 2 * margin), outline=colour)
        draw.text((x, y + photo.height + 3), panel.caption, _DOUBT if is_doubtful else _TEXT, font=font)
    sheet.save(file)
    return len(order)
