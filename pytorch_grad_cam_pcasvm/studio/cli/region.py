"""A region of photos: which part of the evidence lies inside of it, and which decisions change when it is covered."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pytorch_grad_cam_pcasvm.studio.cli.preparation import resize_of_masks
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder
from pytorch_grad_cam_pcasvm.studio.model.preparation import Preparation
from pytorch_grad_cam_pcasvm.studio.pictures.frames import frame_picture


@dataclass
class Region:
    """The region that is typed, ``--region``: a box that is the same on all photos, or masks.

    Attributes:
        name: in words.
        box: left, top, width and height, as shares of the photo's sides; None: there are masks.
        masks: of the photos, as a folder or annotations name them; None: there is a box.
        resize: how photos are resized, and masks with them.
        shares: of each photo that has the region, the part of the evidence inside.
        areas: of each of these, the part of the picture that the network sees.
        changes: of each of these, whether the decision changes when it is covered.
    """

    name: str
    box: tuple[float, ...] | None
    masks: MaskFolder | None
    resize: Any
    shares: list[float] = field(default_factory=list)
    areas: list[float] = field(default_factory=list)
    changes: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, typed: Any, preparation: Preparation, names: Sequence[str], paths: Sequence[Path]) -> "Region":
        """Return the region that is typed, of photos.

        Raises:
            ValueError: the transform of the model is the user's own, so that nobody knows where a region lies; or masks
                are not those of these photos.
            OSError: masks cannot be read.
        """
        resize = resize_of_masks(preparation)
        if not isinstance(typed, Path):
            return cls("the region", typed, None, resize)
        masks = MaskFolder(typed, names, paths, exif=preparation.exif, only_inside=True, page=preparation.page)
        print(masks.describe())
        return cls(typed.stem, None, masks, resize)

    def draw(self, row: int, picture: tuple[int, int], size: tuple[int, int]) -> np.ndarray | None:
        """Return where the region of a photo is, boolean, as the network sees it; None: it has none, or is unknown.

        Args:
            row: number of the photo.
            picture: its width and height.
            size: (H, W) of the network's input.
        """
        if self.masks is not None:
            known = self.masks.files[row] is not None
            inside = self.masks.find_inside(row, size, self.resize) if known else np.zeros(size, bool)
        else:
            assert self.box is not None
            left, top, width, height = self.box
            drawn, sides = Image.new("F", picture), (*picture, *picture)
            ends = (left, top, left + width, top + height)
            x0, y0, x1, y1 = (round(end * side) for end, side in zip(ends, sides, strict=True))
            drawn.paste(1, (x0, y0, x1, y1))
            inside = np.asarray(frame_picture(drawn, size, self.resize, "box")) >= 0.5
        return inside if inside.any() else None

    def measure(self, net: Any, x: torch.Tensor, maps: Any, k: int, inside: Sequence[Any]) -> list[dict[str, float]]:
        """Return for each image the share of the evidence inside, its error, and whether covering changes the decision.

        A region is covered with the mean colour of the rest of its image: a blur would leave its colour.

        Args:
            net: the network.
            x: images, (N, C, H, W).
            maps: of them.
            k: number of the target whose map is asked.
            inside: where the region of each image is, see :meth:`draw`.

        Returns:
            Numbers by the titles of their columns; NaN where a photo has no region, or nothing is known.
        """
        empty = np.zeros(x.shape[2:], bool)
        masks = torch.from_numpy(np.stack([empty if one is None else one for one in inside]))
        found, covered = maps.share(masks), _cover(x, masks.to(x.device).unsqueeze(1))
        with torch.no_grad():
            before, after = (_decide(net, net(images)) for images in (x, covered))
        numbers = list[dict[str, float]]()
        for place, one in enumerate(inside):
            share, error, change = (math.nan,) * 3
            if one is not None:
                share = float(found.total[place, k])
                error = math.nan if found.error is None else float(found.error[place, k])
                self.shares += [share] * (share == share)
                self.areas += [float(one.mean())] * (share == share)
            if one is not None and before is not None and after is not None:
                change = float(before[place] != after[place])
                self.changes.append(bool(change))
            numbers.append({
                f"share in {self.name}": share, f"error of share in {self.name}": error,
                f"decision changes without {self.name}": change,
            })  # fmt: skip
        return numbers

    def describe(self, numbers: dict[str, float], inside: np.ndarray | None) -> str:
        """Say what was measured of a photo with such a region; empty: nothing."""
        share, error, change = numbers.values()
        if inside is None or share != share:
            return ""
        doubt = "" if error != error else f" \N{PLUS-MINUS SIGN} {error:.0%}"
        words = f"{share:.0%}{doubt} of the evidence in {self.name}, {inside.mean():.0%} of the picture"
        return words if change != change else f"{words}; the decision {'changes' if change else 'stays'} without it"

    def tell(self) -> None:
        """Say how much of the evidence lies inside on average, and how many decisions change."""
        if not self.shares:
            print(f"no photo has evidence that {self.name} could have a share of")
            return
        count = len(self.shares)
        area, many = np.mean(self.areas), f"on average of {count} photos" if count > 1 else "of one photo"
        words = f"in {self.name}, {area:.0%} of the picture, is {np.mean(self.shares):.0%} of the evidence, {many}"
        if self.changes:
            words += f"; covering it changes the decision of {sum(self.changes)} of {len(self.changes)}"
        print(words)


def _cover(x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Return images (N, C, H, W) with the mean of each channel outside of a mask (N, 1, H, W) inside of it."""
    rest = (~inside).to(x)
    mean = (x * rest).sum((2, 3), keepdim=True) / rest.sum((2, 3), keepdim=True).clamp(min=1)
    return torch.where(inside, mean, x)


def _decide(net: Any, output: Any) -> list[Any] | None:
    """Return whether each image passes, or its class; None: the head decides otherwise."""
    if net.head.threshold is not None:
        return (net.anomaly_score(output) <= net.head.threshold).tolist()  # type: ignore[no-any-return]
    return None if net.head.classes_ is None or net.is_dense else output.labels().tolist()
