"""Patches: the rows of dense features that a head is fitted on, with their labels and places."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.random_projection import SparseRandomProjection, johnson_lindenstrauss_min_dim
from torch import Tensor
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.network.grid import Cells, measure_share, rows_of
from pytorch_grad_cam_pcasvm.runtime.errors import warn

_EPS = 0.9  # relative error of distances that PatchCore's projection allows
_ROUNDING = 1e-5  # relative
_SAME = 1e-6  # of the length of the longest row: by so much a row differs from itself in single precision


@dataclass(frozen=True)
class Patches:
    """Which rows of dense features are kept.

    Args:
        sample: how many of each image, drawn at random: a number, or a fraction; None: all. With masks, each label in
            an image has an equal part of them; of a label with fewer patches all are kept, and others fill up.
        ignore_index: the label of masks whose patches are left out.
        purity: the least share of a patch that its label must have.
        seed: random seed.
        coverage: the least share of a patch that the most frequent label other than ``background`` must have to be
            that of the patch, else ``background`` is; None: the most frequent label of all.
        background: the label of masks where there is nothing.

    Raises:
        ValueError: a number is out of range.
    """

    sample: float | None = None
    ignore_index: int | None = None
    purity: float = 0.0
    seed: int = 0
    coverage: float | None = None
    background: int = 0

    def __post_init__(self) -> None:
        check_amount("sample", self.sample)
        if not 0 <= self.purity <= 1:
            raise ValueError(f"purity must be a share from 0 to 1, got {self.purity!r}")
        if self.coverage is not None and not 0 < self.coverage <= 1:
            raise ValueError(f"coverage must be a share above 0, up to 1, or None, got {self.coverage!r}")

    def of(
        self, features: Tensor, labels: Any, first: int, cells: Cells | None = None
    ) -> tuple[Tensor, Any, np.ndarray]:
        """Return the rows of a batch, their labels and their places.

        Args:
            features: shape (N, D, *grid).
            labels: one for each image, (N,), or masks, (N, *picture); None: there are none.
            first: number of the first image.
            cells: where on the picture the positions lie; None: they share it out evenly.

        Returns:
            Rows (R, D) in reading order, labels (R,) or None, and places (R, 1 + dimensions of the grid): the image's
            number, then the position.

        Raises:
            ValueError: labels have another shape.
        """
        grid = tuple(features.shape[2:])
        count, positions = len(features), math.prod(grid)
        keep, is_tensor = np.ones((count, positions), bool), isinstance(labels, Tensor)
        if labels is not None and labels.ndim == 1:
            labels = np.repeat(labels.cpu().numpy() if is_tensor else labels, positions).reshape(count, positions)
        elif labels is not None and labels.ndim == 1 + len(grid):
            labels, share, is_covered = label_patches(labels, grid, cells, self.coverage, self.background)
            keep = is_covered & (share >= self.purity) & (self.ignore_index is None or labels != self.ignore_index)
        elif labels is not None:
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} are neither one for each image, ({count},), nor masks, "
                f"({count}, {', '.join('DHW'[-len(grid) :])})"
            )
        if self.sample is not None:
            for image in range(count):
                drawn = np.random.default_rng([self.seed, first + image]).permutation(keep[image].nonzero()[0])
                count_of_image = count_amount(self.sample, len(drawn))
                keep[image] = False
                if labels is None:
                    keep[image, drawn[:count_of_image]] = True
                    continue
                for part in share_out(labels[image, drawn], count_of_image):
                    keep[image, drawn[part]] = True
        images, places = keep.nonzero()
        at = np.stack([images + first, *np.unravel_index(places, grid)], 1)
        rows = rows_of(features)[torch.from_numpy(images * positions + places).to(features.device)]
        if labels is not None:
            labels = torch.from_numpy(labels[keep]) if is_tensor else labels[keep]
        return rows, labels, at


def label_patches(
    masks: Any,
    grid: tuple[int, ...],
    cells: Cells | None = None,
    coverage: float | None = None,
    background: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the label of every patch of masks, its share of the patch, and whether there are pixels in it.

    Args:
        masks: labels of pixels, (N, *picture).
        grid: the shape of the positions.
        cells: where on the picture these lie; None: they share it out evenly.
        coverage: as for :class:`Patches`.
        background: as for :class:`Patches`.

    Returns:
        Three arrays of shape (N, positions).
    """
    values, numbers = np.unique(masks.cpu() if isinstance(masks, Tensor) else masks, return_inverse=True)
    index = torch.from_numpy(numbers.reshape(masks.shape))
    shares = torch.stack([measure_share(index == number, grid, cells).flatten(1) for number in range(len(values))])
    is_covered = (shares.sum(0) > 0).numpy()
    if coverage is None:
        share, most = shares.max(0)
        return values[most.numpy()], share.numpy(), is_covered
    is_background = values == background
    of_background = shares[torch.from_numpy(is_background)].sum(0)
    if is_background.all():
        return np.full(of_background.shape, background, values.dtype), of_background.numpy(), is_covered
    share, most = shares[torch.from_numpy(~is_background)].max(0)
    # As parts of pixels add up in single precision.
    covered = share >= coverage * (1 - _ROUNDING)
    labels = np.where(covered.numpy(), values[~is_background][most.numpy()], values.dtype.type(background))
    return labels, torch.where(covered, share, of_background).numpy(), is_covered


def share_out(labels: np.ndarray, count: int) -> list[np.ndarray]:
    """Return which of some patches are kept, of each label the first ones: so many in all, and in equal parts.

    A label with fewer patches keeps all of them, and others fill up.

    Args:
        labels: of the patches, (P,).
        count: how many are kept, at most P.

    Returns:
        For each label the numbers of its patches, the rarest label first.
    """
    names, sizes = np.unique(labels, return_counts=True)
    parts = []
    for number, label in enumerate(np.argsort(sizes, kind="stable")):
        part = min(int(sizes[label]), count // (len(names) - number))
        parts.append((labels == names[label]).nonzero()[0][:part])
        count -= part
    return parts


def coreset(rows: np.ndarray, amount: float, seed: int = 0, *, progress: bool = False) -> np.ndarray:
    """Return the numbers of rows that are far apart: greedily, each next row is the farthest from all before it.

    As PatchCore (Roth et al., CVPR 2022) does: distances are those of a sparse random projection, where that has fewer
    dimensions. It ends, with a warning, where all other rows are repeats of chosen ones, but for rounding.

    Args:
        rows: shape (R, D).
        amount: how many are chosen: a number, or a fraction.
        seed: random seed of the projection and the first row.
        progress: show a progress bar.

    Returns:
        Their numbers, in the order in which they were chosen.
    """
    count = count_amount(amount, len(rows))
    width = johnson_lindenstrauss_min_dim(len(rows), eps=_EPS) if len(rows) > 1 else rows.shape[1]
    if width < rows.shape[1]:
        rows = SparseRandomProjection(width, random_state=seed).fit_transform(rows)
    points = torch.from_numpy(np.ascontiguousarray(rows, np.float32))
    number = int(np.random.default_rng(seed).integers(len(points)))
    chosen, distances = [number], torch.full((len(points),), torch.inf)
    same = (_SAME * float(points.norm(dim=1).max())) ** 2
    for _ in tqdm(range(count - 1), desc="coreset", leave=False, disable=not progress):
        distances = torch.minimum(distances, (points - points[number]).square().sum(1))
        number = int(distances.argmax())
        if float(distances[number]) <= same:
            warn(
                f"the coreset has {len(chosen)} patches in place of {count}, since of the {len(points)} no more "
                "differ: the others repeat these, and are left out",
                UserWarning,
            )
            break
        chosen.append(number)
    return np.array(chosen)


def count_amount(amount: float, count: int) -> int:
    """Return how many of so many a number, or a fraction, is: at least one."""
    return min(count, amount) if isinstance(amount, int) else min(count, max(1, round(amount * count)))


def check_amount(name: str, amount: Any) -> None:
    """Raise a ValueError unless the amount is a whole number from 1, or a fraction."""
    number = isinstance(amount, int) and not isinstance(amount, bool) and amount >= 1
    if not (amount is None or number or (isinstance(amount, float) and 0 < amount <= 1)):
        raise ValueError(f"{name} must be a number from 1, or a fraction up to 1.0, got {amount!r}")
