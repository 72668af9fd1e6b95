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
from pytorch_grad_cam_pcasvm.studio.pictures.frames import WHOLE, frame_picture


@dataclass
class RegionShares:
    """The region that is typed, ``--region``: a box that is the same on all photos, or masks.

    Attributes:
        name: in words.
        box: left, top, width and height, as shares of the photo's sides; empty: there are masks.
        masks: of the photos, as a folder or annotations name them; None: there is a box.
        resize: how photos are resized, and masks with them.
        shares: of each photo that has the region, the part of the evidence inside.
        areas: of each of these, the part of the picture that the network sees.
        changes: of each of these, whether the decision changes when it is covered.
        evidence: what the shares are of, in words.
    """

    name: str
    box: tuple[float, ...]
    masks: MaskFolder | None
    resize: Any
    shares: list[float] = field(default_factory=list)
    areas: list[float] = field(default_factory=list)
    changes: list[bool] = field(default_factory=list)
    evidence: str = "the evidence"

    @classmethod
    def of(cls, typed: Any, preparation: Preparation, names: Sequence[str], paths: Sequence[Path]) -> "RegionShares":
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
        return cls(typed.resolve().name if typed.is_dir() else "the region", (), masks, resize)

    def draw(self, row: int, picture: tuple[int, int], size: tuple[int, int]) -> np.ndarray | None:
        """Return where the region of a photo is as the network sees it; None: it has none, or is unknown.

        It is 1 inside, 0 outside, and -1 where the photo is framed and has no pixel.

        Args:
            row: number of the photo.
            picture: its width and height.
            size: (H, W) of the network's input.
        """
        if self.masks is not None:
            known = self.masks.files[row] is not None
            inside = self.masks.find_inside(row, size, self.resize) if known else np.zeros(size, bool)
        else:
            left, top, width, height = self.box
            inside = self._frame(picture, size, (left, top, left + width, top + height))
        if not inside.any():
            return None
        return np.where(self._frame(picture, size, WHOLE), inside.astype(np.int8), np.int8(-1))

    def _frame(self, picture: tuple[int, int], size: tuple[int, int], ends: tuple[float, ...]) -> np.ndarray:
        """Return where a part of a photo, from left and top to right and bottom, is as the network sees it, boolean."""
        drawn = Image.new("F", picture)
        x0, y0, x1, y1 = (round(end * side) for end, side in zip(ends, (*picture, *picture), strict=True))
        drawn.paste(1, (x0, y0, x1, y1))
        return np.asarray(frame_picture(drawn, size, self.resize, "box")) >= 0.5

    def measure(self, net: Any, x: torch.Tensor, maps: Any, k: int, inside: Sequence[Any]) -> list[dict[str, float]]:
        """Return for each image the share of the evidence inside, its error, and whether covering changes the decision.

        A region is covered with the mean colour of the rest of its photo: a blur would leave its colour. Of heads that
        tell anomalies nothing is said: a patch of one colour is one itself.

        Args:
            net: the network.
            x: images, (N, C, H, W).
            maps: of them.
            k: number of the target whose map is asked.
            inside: where the region of each image is, see :meth:`draw`.

        Returns:
            Numbers by the titles of their columns; NaN where a photo has no region, or nothing is known.
        """
        empty = np.zeros(x.shape[2:], np.int8)
        places = torch.from_numpy(np.stack([empty if one is None else one for one in inside]))
        found, before, after = maps.share(places == 1), None, None
        if net.is_dense:
            self.evidence = "the evidence for the strongest patch"
        elif net.head.classes_ is not None:
            before, after = maps.output.labels(), net.predict(_cover(x, places.to(x.device).unsqueeze(1)))
        numbers = list[dict[str, float]]()
        for place, one in enumerate(inside):
            share, error, change = (math.nan,) * 3
            if one is not None:
                share = float(found.total[place, k])
                error = math.nan if found.error is None else float(found.error[place, k])
                self.shares += [share] * (share == share)
                self.areas += [_measure_area(one)] * (share == share)
            if one is not None and before is not None and after is not None:
                change = float(before[place] != after[place])
                self.changes.append(bool(change))
            row = {f"share in {self.name}": share, f"error of share in {self.name}": error}
            numbers.append(row | ({} if before is None else {f"decision changes without {self.name}": change}))
        return numbers

    def describe(self, numbers: dict[str, float], inside: np.ndarray | None) -> str:
        """Say what was measured of a photo with such a region; empty: nothing."""
        share, error, *changes = numbers.values()
        if inside is None or share != share:
            return ""
        doubt = "" if error != error else f" \N{PLUS-MINUS SIGN} {_write_share(error)}"
        words = f"{_write_share(share)}{doubt} of {self.evidence} in {self.name}, "
        words += f"{_write_share(_measure_area(inside))} of the picture"
        return words + "".join(f"; the decision {'changes' if one else 'stays'} without it" for one in changes)

    def tell(self) -> None:
        """Say how much of the evidence lies inside on average, and how many decisions change."""
        if not self.shares:
            print(f"no photo has evidence that {self.name} could have a share of")
            return
        count = len(self.shares)
        area, many = np.mean(self.areas), f"on average of {count} photos" if count > 1 else "of one photo"
        share = _write_share(float(np.mean(self.shares)))
        words = f"in {self.name}, {_write_share(float(area))} of the picture, is {share} of {self.evidence}, {many}"
        if self.changes:
            words += f"; covering it changes the decision of {sum(self.changes)} of {len(self.changes)}"
        print(words)


def _write_share(share: float) -> str:
    """Return a share in per cent, of small ones two digits."""
    return f"{share:.0%}" if share >= 0.095 else f"{100 * share:.2g}%"


def _measure_area(places: np.ndarray) -> float:
    """Return which part of the photo is inside of a region, of places as :meth:`RegionShares.draw` returns them."""
    return float((places == 1).sum() / (places >= 0).sum())


def _cover(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return images (N, C, H, W) with the mean of each channel where places (N, 1, H, W) are 0 in those that are 1."""
    rest = (places == 0).to(x)
    mean = (x * rest).sum((2, 3), keepdim=True) / rest.sum((2, 3), keepdim=True).clamp(min=1)
    return torch.where(places == 1, mean, x)
