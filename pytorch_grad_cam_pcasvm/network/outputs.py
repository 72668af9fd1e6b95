"""What a network returns for N images: the output of an ordinary one, or all that a fitted head computed."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.stack import HeadTrace
from pytorch_grad_cam_pcasvm.network.grid import Grid
from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    tree_leaves,
    tree_map,
    tree_map_only,
    without_function_subclasses,
)


class OfHead:
    """The values that a head computed, and everything derived from them.

    Of dense features, each of these has a value at every position, (N, ., h, w).

    Attributes:
        head: the head that computed it.
        head_trace: features, then the output of every stage, each of shape (N, ...), for rows (...); of dense features
            a row for each position, in reading order, (N h w, ...).
        grid: the positions of dense features; None: there is one row for each image.
    """

    head: Head
    head_trace: HeadTrace
    grid: Grid | None = None

    @property
    def is_batch(self) -> bool:
        """Whether it is of several images, and not of a single one."""
        return True

    @property
    def count(self) -> int:
        """Number of images N."""
        rows = self.head_trace.values[-1].shape[0]
        return rows if self.grid is None else rows // self.grid.count

    @property
    def features(self) -> Tensor:
        """The features q, shape (N, D), in the head's precision."""
        return self._arrange_rows(self.head_trace.values[0])

    @property
    def components(self) -> Tensor | None:
        """The components p, shape (N, B), or None without a reduction."""
        position = self.head.component_position
        return None if position is None else self._arrange_rows(self.head_trace.values[position])

    @property
    def decision(self) -> Tensor | None:
        """The decision values, shape (N, P), or None without an SVM."""
        position = self.head.decision_position
        return None if position is None else self._arrange_rows(self.head_trace.values[position])

    @property
    def margins(self) -> Tensor | None:
        """The margin of each class, which maps explain, shape (N, C), or None without an SVM.

        For one-vs-one, it is the sum of a class's signed pairwise decisions; otherwise, it is the score.
        """
        position = self.head.decision_position
        if position is None:
            return None
        return self._arrange_rows(self.head.voting.margins(self.head_trace.values[position]))

    def predicted(self) -> Tensor:
        """Return the index of the class that targets without a category are about, of each row, (N,)."""
        return self.head.voting.predicted(self._read_decision())

    def ranking(self) -> Tensor:
        """Return the numbers whose order tells the second class of each row, (N, C)."""
        return self.head.voting.ranking(self._read_decision())

    def _read_decision(self) -> Tensor:
        assert self.head.decision_position is not None
        return self.head_trace.values[self.head.decision_position].detach()

    def _arrange_rows(self, rows: Tensor) -> Tensor:
        return rows if self.grid is None else self.grid.placed(rows)

    def labels(self) -> np.ndarray:
        """Return the fitted estimator's predictions for the rows, shape (N,), or a single label for one row.

        Of dense features, (N, h, w).
        """
        if self.grid is not None:
            labels = self.head.labels(self.head_trace)
            placed = labels.reshape(-1, *self.grid.shape, *labels.shape[1:])
            placed = placed if labels.ndim == 1 else np.moveaxis(placed, -1, 1)
            return placed if self.is_batch else placed[0]
        if self.head_trace.values[-1].dim() == 1 and self.head.decision_position is not None:
            return self.head.labels(self.head_trace.rows(None))[0]
        return self.head.labels(self.head_trace)


@dataclass(eq=False)
class HeadRun(OfHead):
    """What a head computed for N images, for use by methods: without scores, which maps do not need."""

    head: Head
    head_trace: HeadTrace
    grid: Grid | None = None

    def __len__(self) -> int:
        return self.count

    @property
    def device(self) -> torch.device:
        """The device of all its tensors."""
        return self.head_trace.values[-1].device

    def rows(self, index: Any) -> "HeadRun":
        """Return some images."""
        return HeadRun(self.head, _take_images(self, index), self.grid)

    def target_rows(self) -> list[Any]:
        """Return the argument of each image's target."""
        return list(self.output())

    def output(self) -> Any:
        """Return it with scores, as a network gives it; as it is for fake tensors, which can take no other class."""
        plain = type(self.head_trace.values[-1]) is Tensor
        return HeadOutput.of(self.head, self.head_trace, self.grid) if plain else self


class HeadOutput(OfHead, Tensor):
    """The scores of a :class:`PCASVMNet`, shape (N, C), with everything else that the head computed.

    Iteration and integer indexing return rows, shape (C,), with the head's values for that row, so that a target can be
    called on a row or on the batch. Every other operation returns a plain tensor. Of dense features, scores are
    (N, C, h, w), and so is the rest; ``output[i]`` is one image.

    Attributes:
        head: the head that computed it.
        head_trace: features, then the output of every stage, each of shape (N, ...), for rows (...); of dense features
            a row for each position, in reading order, (N h w, ...).
        grid: the positions of dense features, ``grid.shape``; None: there is one row for each image.

    Example:
        >>> output = net(images)
        >>> output.features.shape, output.components.shape, output.margins.shape
        (torch.Size([2, 8]), torch.Size([2, 3]), torch.Size([2, 3]))
    """

    head: Head
    head_trace: HeadTrace

    @staticmethod
    def of(head: Head, trace: HeadTrace, grid: Grid | None = None) -> "HeadOutput":
        """Return the output for a trace of ``head``, with N rows or just one; of dense features, of N images."""
        scores = head.scores(trace)
        return HeadOutput._with(scores if grid is None else grid.placed(scores), head, trace, grid)

    @staticmethod
    def _with(scores: Tensor, head: Head, trace: HeadTrace, grid: Grid | None) -> "HeadOutput":
        output = scores.as_subclass(HeadOutput)
        output.head, output.head_trace, output.grid = head, trace, grid
        return output

    def _arrange_rows(self, rows: Tensor) -> Tensor:
        placed = super()._arrange_rows(rows)
        return placed if self.grid is None or self.is_batch else placed[0]

    @property
    def is_batch(self) -> bool:
        """Whether it is of several images, and not of a single one."""
        return self.dim() == 2 if self.grid is None else self.dim() == 2 + len(self.grid.shape)

    def output(self) -> "HeadOutput":
        """Return it."""
        return self

    def target_rows(self) -> list[Any]:
        """Return the argument of each image's target."""
        return list(self)

    def rows(self, index: Any) -> "HeadOutput":
        """Return some rows, with the head's values for them."""
        with without_function_subclasses():
            return HeadOutput._with(Tensor.__getitem__(self, index), self.head, _take_images(self, index), self.grid)

    @staticmethod
    def cat(outputs: Sequence["HeadOutput"]) -> "HeadOutput":
        """Return several outputs of one head as one, without the tensors that were saved for pullbacks."""
        columns = zip(*(o.head_trace.values for o in outputs), strict=True)
        values: list[Any] = [None if parts[0] is None else torch.cat(parts) for parts in columns]  # None: not known
        return HeadOutput.of(outputs[0].head, HeadTrace(values, []), outputs[0].grid)

    def moved(self, device: Any) -> "HeadOutput":
        """Return the output on another device; its head is not moved."""
        parts = (self.head_trace.values, self.head_trace.saved)
        trace = HeadTrace(*tree_map_only(Tensor, lambda tensor: tensor.to(device), parts))
        return HeadOutput._with(self.as_subclass(Tensor).to(device), self.head, trace, self.grid)

    def __getitem__(self, index: Any) -> Tensor:
        """Return one row with the head's values for an integer, otherwise a plain tensor."""
        if isinstance(index, int | np.integer) and self.is_batch:
            return self.rows(int(index))
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the rows, each with the head's values for it."""
        return (self[index] for index in range(len(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadOutput":
        """Copy the scores with the head's values, if torch can copy the tensors (those without a graph)."""
        parts = (self.as_subclass(Tensor), self.head, self.head_trace)
        return HeadOutput._with(*(copy.deepcopy(part, memo) for part in (*parts, self.grid)))  # type: ignore[arg-type]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return plain tensors from every operation."""
        with without_function_subclasses():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, HeadOutput):  # .cpu() where there is nothing to do
                result = result.as_subclass(Tensor)
        if func in _SOFTMAX and args and isinstance(args[0], HeadOutput):
            # The host's SESS calls target(softmax(output)); a component or a margin of that is still the row's own.
            for name in ("head", "head_trace", "grid", "is_batch", "predicted", "ranking"):
                setattr(result, name, getattr(args[0], name))
        return result


def find_grid(output: OfHead) -> Grid:
    """Return the positions of dense features; whether they are dense was asked before."""
    assert output.grid is not None
    return output.grid


def _take_images(output: Any, index: Any) -> HeadTrace:
    """Return the trace of some images: of dense features all their rows."""
    trace: HeadTrace = output.head_trace
    if output.grid is None:
        return trace.rows(index)
    values = [value.unflatten(0, (-1, output.grid.count))[index] for value in trace.values]
    return HeadTrace([value if value.dim() == 2 else value.flatten(0, 1) for value in values], [], trace.eps)


_SOFTMAX = {torch.softmax, Tensor.softmax, nn.functional.softmax}


@dataclass(eq=False)
class PlainOutput:
    """What an ordinary network returned for N images, for use by methods."""

    value: Any
    count: int
    head = components = decision = grid = None

    def output(self) -> Any:
        """Return the network's own output."""
        return self.value

    def rows(self, index: Sequence[int] | slice) -> "PlainOutput":
        """Return it for some images, as from a batch of these."""
        images = range(self.count)[index] if isinstance(index, slice) else index
        return PlainOutput(self._mapped(lambda part: torch.stack([part[image] for image in images])), len(images))

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Any:
        """Return the output with a function of every tensor that has a row for each image."""

        def mapped(part: Any) -> Any:
            return function(part) if isinstance(part, Tensor) and part.shape[:1] == (self.count,) else part

        return tree_map(mapped, self.value)

    def target_rows(self) -> list[Any]:
        """Return the argument of each image's target, as in pytorch-grad-cam where that has one.

        Raises:
            ValueError: the network does not return one item for each image.
        """
        if isinstance(self.value, Tensor):
            return list(self.value)
        if isinstance(self.value, Mapping):
            return [self._mapped(itemgetter(image)) for image in range(self.count)]
        items = list(self.value)
        if self.count == 1:
            return items[:1]
        if len(items) == 1 and isinstance(items[0], Tensor):
            return list(items[0])
        raise ValueError(
            f"the network returns {self} for {self.count} images, but a target gets one item per image, as in "
            "pytorch-grad-cam: explain one image at a time, or wrap the network so that it returns one tensor"
        )

    def __str__(self) -> str:
        if isinstance(self.value, Tensor):
            return f"a tensor of shape {tuple(self.value.shape)}"
        return f"a {type(self.value).__name__} of {len(tree_leaves(self.value))} tensors"
