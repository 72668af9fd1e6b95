"""Places: the part of a picture that a target of dense features is about."""

import base64
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stack import HeadTrace
from pytorch_grad_cam_pcasvm.network.grid import Grid
from pytorch_grad_cam_pcasvm.network.outputs import HeadRun, OfHead, find_grid


@dataclass(frozen=True)
class Region:
    """A mask of the grid or the picture, which can be hashed and compared.

    Attributes:
        shape: of the mask.
        bits: its values, row by row, eight to a byte.
    """

    shape: tuple[int, ...]
    bits: bytes

    @staticmethod
    def of(mask: Any) -> "Region":
        """Return the region of a boolean mask."""
        return Region(tuple(mask.shape), np.packbits(np.asarray(mask)).tobytes())

    @staticmethod
    def decoded(shape: list[int], bits: str) -> "Region":
        """Return the region that :attr:`encoded` tells of."""
        return Region(tuple(shape), base64.b64decode(bits))

    @property
    def encoded(self) -> dict[str, Any]:
        """The region as JSON."""
        return {"shape": list(self.shape), "bits": base64.b64encode(self.bits).decode()}

    @property
    def mask(self) -> Tensor:
        """The mask, on the CPU."""
        bits = np.unpackbits(np.frombuffer(self.bits, np.uint8))[: int(np.prod(self.shape))]
        return torch.from_numpy(bits.reshape(self.shape).astype(bool))

    def __repr__(self) -> str:
        return f"<{int(self.mask.sum())} positions of {'x'.join(map(str, self.shape))}>"


@dataclass(frozen=True)
class ImagePositions:
    """A position of each image of one batch.

    Attributes:
        places: those positions, such as (row, column).

    Example:
        >>> dense = PCASVMNet(backbone, pipeline, layer="layer2", pool="dense").eval()
        >>> targets = [SVMTarget(at=ImagePositions(((0, 0), (7, 7))))]
        >>> maps = ClosedFormGradCAM(dense, ["layer1"]).explain(images, targets)
    """

    places: tuple[tuple[int, ...], ...]


Place = None | str | Region | ImagePositions | tuple[int, ...]


def make_place(at: Any) -> Place:
    """Return the place of ``at=`` in a form that can be hashed and compared.

    Raises:
        TypeError: it is neither a position, a boolean mask nor ``"max"``.
        ValueError: it is another word, a position with negative numbers, or an empty mask.
    """
    if at is None or isinstance(at, Region | ImagePositions):
        return at
    if isinstance(at, str):
        if at != "max":
            raise ValueError(f"at must be a position, a boolean mask or 'max', got {at!r}")
        return at
    array = at.detach().cpu().numpy() if isinstance(at, Tensor) else np.asarray(at)
    if array.dtype == bool and array.ndim:
        if not array.any():
            raise ValueError("the mask at= is empty: there is no position to explain")
        return Region.of(array)
    if array.dtype.kind not in "iu" or array.ndim > 1:
        raise TypeError(
            "at must be a position, as (row, column), a boolean mask of the grid or the picture, or 'max', got "
            f"{at!r:.80}"
        )
    if array.size > 3 or (array < 0).any():
        raise ValueError(
            f"a position has a number from 0 for each dimension of the grid, (row, column), got {at!r:.80}"
        )
    return tuple(array.reshape(-1).tolist())


def describe_place(target: Any) -> str:
    """Return where a target is, as it is appended to its name: empty for the whole picture.

    Args:
        target: any target.

    Example:
        >>> describe_place(SVMTarget(at="max")), describe_place(SVMTarget())
        (' where strongest', '')
    """
    at = getattr(target, "at", None)
    if at is None:
        return ""
    return " where strongest" if at == "max" else f" at {at}" if isinstance(at, tuple) else " in a region"


class SharedPositions:
    """The same positions for all images, as spans from one to another: nothing has to be sent to a device.

    Args:
        spans: first position of each, and the one after the last.
        count: P, the number of positions.

    Attributes:
        size: A, how many of them these are.
    """

    def __init__(self, spans: tuple[tuple[int, int], ...], count: int) -> None:
        self.spans, self.count = spans, count
        self.size = sum(last - first for first, last in spans)

    def take(self, rows: Tensor) -> Tensor:
        """Return the rows at these positions, (N A, ...), of all, (N P, ...)."""
        of_images = rows.unflatten(0, (-1, self.count))
        parts = [of_images[:, first:last] for first, last in self.spans]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).flatten(0, 1)

    def put(self, grads: Tensor) -> Tensor:
        """Return numbers at these positions, (K, N, A, D), among zeros elsewhere, (K, N, P, D)."""
        if self.size == self.count:
            return grads
        whole, start = grads.new_zeros(*grads.shape[:2], self.count, grads.shape[-1]), 0
        for first, last in self.spans:
            whole[:, :, first:last] = grads[:, :, start : start + last - first]
            start += last - first
        return whole

    def repeat_positions(self, image: int, count: int) -> "SharedPositions":
        """Return the positions of so many copies of an image: the same."""
        return self

    def blocks(self, size: int) -> "list[SharedPositions]":
        """Return the same positions in blocks of so many."""
        places = [place for first, last in self.spans for place in range(first, last)]
        return [SharedPositions(_spans(places[k : k + size]), self.count) for k in range(0, self.size, size)]


class OwnPositions:
    """One position of each image, which a device knows.

    Args:
        index: the positions, (N,).
        count: P, the number of positions.
    """

    size = 1

    def __init__(self, index: Tensor, count: int) -> None:
        self.index, self.count = index, count

    def take(self, rows: Tensor) -> Tensor:
        """Return the rows at these positions, (N, ...), of all, (N P, ...), or of one image."""
        of_images = rows.unflatten(0, (-1, self.count)).expand(self.index.shape[0], *[-1] * rows.dim())
        index = self.index.reshape(-1, *[1] * rows.dim()).expand(-1, 1, *rows.shape[1:])
        return of_images.gather(1, index)[:, 0]

    def put(self, grads: Tensor) -> Tensor:
        """Return numbers at these positions, (K, N, 1, D), among zeros elsewhere, (K, N, P, D)."""
        whole = grads.new_zeros(*grads.shape[:2], self.count, grads.shape[-1])
        return whole.scatter(2, self.index.reshape(1, -1, 1, 1).expand_as(grads), grads)

    def repeat_positions(self, image: int, count: int) -> "OwnPositions":
        """Return the positions of so many copies of an image."""
        return OwnPositions(self.index[image].expand(count), self.count)

    def blocks(self, size: int) -> "list[OwnPositions]":
        """Return it: it is small."""
        return [self]


@lru_cache(maxsize=256)
def list_positions(place: Place, grid: Grid) -> SharedPositions:
    """Return the positions of a place that is the same for all images.

    Raises:
        ValueError: the position, or the mask, is not of this grid; or the mask covers no position.
    """
    size = "x".join(map(str, grid.shape))
    if place is None:
        return SharedPositions(((0, grid.count),), grid.count)
    if isinstance(place, Region):
        if place.shape not in (grid.shape, grid.picture):
            shapes = " or ".join(map(str, dict.fromkeys((grid.shape, grid.picture))))
            raise ValueError(
                f"the mask at= has shape {place.shape}: expected that of the grid or the picture, {shapes}"
            )
        places = grid.covered(place.mask).flatten().nonzero()[:, 0].tolist()
        if not places:
            raise ValueError(
                f"the mask at= covers no position of the {size} grid by more than half: make it larger, or name a "
                "position, at=(row, column)"
            )
        return SharedPositions(_spans(places), grid.count)
    assert isinstance(place, tuple)
    if len(place) != len(grid.shape) or any(number >= side for number, side in zip(place, grid.shape, strict=True)):
        raise ValueError(f"there is no position {place} on the {size} grid: its numbers start at 0")
    first = int(np.ravel_multi_index(place, grid.shape))
    return SharedPositions(((first, first + 1),), grid.count)


def _spans(places: list[int]) -> tuple[tuple[int, int], ...]:
    """Return rising positions as spans."""
    spans: list[list[int]] = []
    for place in places:
        if spans and spans[-1][1] == place:
            spans[-1][1] = place + 1
        else:
            spans.append([place, place + 1])
    return tuple((first, last) for first, last in spans)


@dataclass(eq=False)
class RegionRun(HeadRun):
    """What a head computed for the rows of one region of each of N images, (N A, ...).

    Attributes:
        size: A.
    """

    size: int = 1

    def predicted(self) -> Tensor:
        """Return the class that is predicted for most of the region, of each row, (N A,)."""
        classes = torch.arange(self.head.voting.n_classes, device=self.device)
        votes = HeadRun.predicted(self).unsqueeze(-1).eq(classes).unflatten(0, (-1, self.size)).sum(1)
        return self._for_rows(votes.argmax(-1))

    def ranking(self) -> Tensor:
        """Return the numbers whose order tells the second class, as means over the region, of each row, (N A, C)."""
        return self._for_rows(HeadRun.ranking(self).unflatten(0, (-1, self.size)).mean(1))

    def _for_rows(self, numbers: Tensor) -> Tensor:
        """Return the numbers of each image, (N, ...), for each of its rows, (N A, ...)."""
        return numbers.unsqueeze(1).expand(-1, self.size, *numbers.shape[1:]).flatten(0, 1)

    def of_images(self, numbers: Tensor) -> Tensor:
        """Return the means over the region of numbers, (N A, ...), for each image, (N, ...)."""
        return numbers.unflatten(0, (-1, self.size)).mean(1)


def select_positions(target: Any, output: OfHead) -> SharedPositions | OwnPositions:
    """Return the positions that a target is about."""
    grid = find_grid(output)
    if isinstance(target.at, ImagePositions):
        index = np.ravel_multi_index(np.array(target.at.places).T, grid.shape)
        return OwnPositions(torch.from_numpy(index).to(output.head_trace.values[0].device), grid.count)
    if target.at != "max":
        return list_positions(target.at, grid)
    values = target.unplaced.value(HeadRun(output.head, output.head_trace))
    return OwnPositions(values.unflatten(0, (-1, grid.count)).argmax(1), grid.count)


def take_region(output: OfHead, selection: SharedPositions | OwnPositions) -> RegionRun:
    """Return the run of the rows at some positions."""
    trace = output.head_trace
    values = [selection.take(value) for value in trace.values]
    return RegionRun(output.head, HeadTrace(values, [], trace.eps), size=selection.size)


def refuse_place(target: Any) -> NoReturn:
    """Refuse a target at a place, as there is one row of features for each image.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"{target}: at= names a place, but there is one row of features for each image: fit the head on features "
        "of positions, pool='dense'"
    )


def evaluate_place(target: Any, output: OfHead) -> Tensor:
    """Return the value of a target at its place: a number for a single image, (N,) for a batch.

    Raises:
        ValueError: the features are not dense.
    """
    if output.grid is None and target.at is not None:
        refuse_place(target)
    region = take_region(output, select_positions(target, output))
    values = region.of_images(target.unplaced.value(region))
    return values if output.is_batch else values[0]
