"""Columns: tensors with a row for each of N images and a column for each of K targets, (N, K, ...)."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

Table = TypeVar("Table", bound="Columns")

# Types of the columns of a dataclass: divided by exp(log_scale), or not.
Scaled = Annotated[Tensor, "scaled"]
Plain = Annotated[Tensor, "plain"]
OptionalScaled = Annotated[Tensor | None, "scaled"]
OptionalPlain = Annotated[Tensor | None, "plain"]


def list_columns(table: type[Any]) -> dict[str, bool]:
    """Return the names of the columns of a class, and whether each is scaled."""
    kinds = {entry.name: getattr(entry.type, "__metadata__", ()) for entry in fields(table)}
    return {name: kind == ("scaled",) for name, kind in kinds.items() if kind}


class Columns:
    """A dataclass some of whose fields are columns; missing ones are None."""

    @property
    def columns(self) -> dict[str, Tensor]:
        """The columns that it has, by name."""
        tables = {name: getattr(self, name) for name in list_columns(type(self))}
        return {name: tensor for name, tensor in tables.items() if tensor is not None}

    @property
    def scaled_columns(self) -> dict[str, Tensor]:
        """Those of its columns that are divided by ``exp(log_scale)``."""
        scaled = list_columns(type(self))
        return {name: tensor for name, tensor in self.columns.items() if scaled[name]}

    def map_columns(self: Table, function: Callable[[Tensor], Tensor], **fields: Any) -> Table:
        """Return it with a function of every column."""
        columns: Any = {name: function(tensor) for name, tensor in self.columns.items()}
        return _replace(self, **columns, **fields)

    def rescale(self: Table, log_scale: Tensor) -> Table:
        """Return it with another factor taken out, ``exp(log_scale)``, (N, K)."""

        def scale(tensor: Tensor) -> Tensor:
            factor = (self.columns["log_scale"] - log_scale).exp().to(tensor)
            return tensor * factor.reshape(*factor.shape, *[1] * (tensor.dim() - 2))

        scaled: Any = {name: scale(tensor) for name, tensor in self.scaled_columns.items()}
        return _replace(self, **scaled, log_scale=log_scale)


def _replace(table: Table, **fields: Any) -> Table:
    return replace(table, **fields)  # type: ignore[type-var]  # each subclass is a dataclass


def join_columns(parts: Sequence[Table], target_indices: Sequence[int]) -> Table:
    """Join tables of different targets, and sort their columns by the index of the target."""
    first = parts[0]
    if len(parts) == 1:
        return first
    tables = [part.columns for part in parts]
    columns: Any = {name: order_columns([table[name] for table in tables], target_indices) for name in tables[0]}
    return _replace(first, **columns)


def order_columns(tensors: Sequence[Tensor], target_indices: Sequence[int], dim: int = 1) -> Tensor:
    """Concatenate tensors along a dimension, sorted by the index of the target."""
    whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
    if list(target_indices) == sorted(target_indices):
        return whole
    # Not by an index, which a device would have to be sent, and wait for.
    places = whole.unbind(dim)
    return torch.stack(
        [places[place] for place in sorted(range(len(target_indices)), key=target_indices.__getitem__)], dim
    )


def join_rows(parts: Sequence[Table], **fields: Any) -> Table:
    """Return the rows of several tables as one table."""
    tables = [part.columns for part in parts]
    columns: Any = {name: torch.cat([table[name] for table in tables]) for name in tables[0]}
    return _replace(parts[0], **columns, **fields)


def average_columns(parts: Sequence[Table]) -> Table:
    """Return the mean of tables of the same maps; the only one as it is. What one of them lacks, the mean lacks."""
    if len(parts) == 1:
        return parts[0]
    log_scale = torch.stack([part.columns["log_scale"] for part in parts]).amax(0)
    tables = [part.rescale(log_scale).columns for part in parts]
    columns: Any = {
        name: torch.stack([table[name] for table in tables]).mean(0) if all(name in table for table in tables) else None
        for name in dict.fromkeys(name for table in tables for name in table)
    }
    return _replace(parts[0], **columns | {"log_scale": log_scale})
