"""The tail of a head, the part after its components, as data from which the page computes decisions and gradients.

Affine stages are folded into one matrix. What is left is a list of machines side by side: linear decisions, and kernel
machines with their support vectors. They compute P decision values; the explained value is their weighted sum, with
*seeds* as weights: a row of factors for every class, and one for every pair of classes. Arrays are written as base64,
and JSON so that no name can break out of it.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.decisions import Ensemble, KernelSVM
from pytorch_grad_cam_pcasvm.head.enumerated import Enumerated
from pytorch_grad_cam_pcasvm.head.kernels import RBF, Linear, Polynomial, Sigmoid
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import Chain
from pytorch_grad_cam_pcasvm.head.vote import Vote
from pytorch_grad_cam_pcasvm.starts.boundary_head import Boundary
from pytorch_grad_cam_pcasvm.targets import SVMTarget

_TYPES = ("float64", "float32", "float16", "int32", "uint16", "uint8")


def packed(array: Any) -> dict[str, Any]:
    """Return an array as JSON: its type, shape, and little-endian bytes in base64. The page decodes it.

    Args:
        array: an array of a type that the page knows: float64, float32, float16, int32, uint16 or uint8.

    Returns:
        A dictionary with ``type``, ``shape`` and ``base64``.

    Raises:
        TypeError: it has another type.
    """
    array = np.ascontiguousarray(array)
    dtype = array.dtype.name
    if dtype not in _TYPES:
        raise TypeError(f"the page reads arrays of {', '.join(_TYPES)}, got {dtype}")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return {"type": dtype, "shape": list(array.shape), "base64": base64.b64encode(little.tobytes()).decode("ascii")}


def json_text(value: Any) -> str:
    """Return JSON in ASCII that is safe inside a script: no ``<`` can end it, and no U+2028 can break a line.

    Raises:
        ValueError: it has NaN or infinite numbers, which JSON cannot represent.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# C (C - 1) / 2 seeds: more than these would be longer than the data.
MOST_CLASSES_IN_PAIRS = 100

# More boundaries between two classes take too long to find; decisions between them start at the mean.
_MOST_DUELS = 300

# Two computations of the same features differ by rounding, in single precision and through another batch.
_SAME = 1e-4

_KERNELS = {
    Linear: "linear",
    Polynomial: "polynomial",
    Sigmoid: "sigmoid",
    RBF: "rbf",
}


class NotInPageError(Exception):
    """What the page cannot compute, in words for its reader."""


@dataclass(frozen=True)
class _Affine:
    """``z = matrix p + offset``, matrix of shape (D, B), offset (D,)."""

    matrix: Tensor
    offset: Tensor

    @classmethod
    def identity(cls, count: int) -> "_Affine":
        return cls(torch.eye(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64))

    def append(self, stage: Stage) -> "_Affine":
        """Return this, followed by a stage that is affine."""
        y, saved = stage.evaluate(self.offset.unsqueeze(0))
        jacobian, log_scale = stage.jacobian(saved, y)
        if log_scale is not None:
            jacobian = jacobian * log_scale.exp().unsqueeze(-1)
        return _Affine(jacobian[0] @ self.matrix, y[0])


def machine_data(tail: Head, components: np.ndarray, start: np.ndarray | None = None) -> dict[str, Any]:
    """Return the tail of a head as JSON.

    Args:
        tail: the part of the head after the components; it ends with a decision.
        components: components of the atlas's rows, shape (R, B): a support vector among them is shown with its picture.
        start: the baseline's components, shape (B,), if decisions start on their boundaries near it; else None.

    Returns:
        ``machines``, a list, each with the position ``first`` of its decision values among all; ``outputs``, the number
        P of decision values; ``margins``, for every class the factors ``[[position, factor], ...]`` of the decision
        values in its margin; ``pairs``, the same for the decisions of every class against each later one, in the order
        (0, 1), (0, 2), ..., or None if there are too many; with a start, ``starts``, the points on the boundaries of
        both (NaN: none within reach). If the page cannot compute the decision, only ``reason``.
    """
    try:
        with torch.no_grad():
            machines = _machines(list(tail.stages), _Affine.identity(components.shape[1]), 1.0, 0, components)
    except NotInPageError as error:
        return {"reason": str(error)}
    outputs = int(tail.stages[-1].n_outputs)
    starts = None if start is None else _starts(Boundary(tail, torch.from_numpy(start)))
    return {"machines": machines, "outputs": outputs, **_differentiate_tail(tail.voting), "starts": starts}


def _starts(boundary: Boundary) -> dict[str, Any]:
    head = boundary.head
    labels = [None] if head.classes_ is None else head.classes_.tolist()
    margins = [SVMTarget(label) for label in labels]
    first, second = torch.triu_indices(len(labels), len(labels), 1).tolist()
    duels = [SVMTarget(labels[i], versus=labels[j]) for i, j in zip(first, second, strict=True)]

    def points(targets: Sequence[SVMTarget]) -> Any:
        starts = [boundary.point(target.boundary(head), needed=False) for target in targets]
        return packed(torch.stack(starts).numpy())

    return {"margins": points(margins), "pairs": points(duels) if 0 < len(duels) <= _MOST_DUELS else None}


def _differentiate_tail(voting: Vote) -> dict[str, Any]:
    count = voting.n_classes
    if count > MOST_CLASSES_IN_PAIRS:
        return {"margins": _sparse(voting.matrix), "pairs": None}
    first, second = torch.triu_indices(count, count, 1)
    return {"margins": _sparse(voting.matrix), "pairs": _sparse(voting.seed(first, second))}


def _sparse(rows: Tensor) -> list[list[list[float]]]:
    return [[[int(p), float(row[p])] for p in row.nonzero()[:, 0]] for row in rows]


def _machines(
    stages: Sequence[Any], affine: _Affine, sign: float, first: int, components: np.ndarray
) -> list[dict[str, Any]]:
    """Return the machines of a chain, whose decision values begin at ``first`` and are multiplied by ``sign``."""
    *before, decision = stages
    if isinstance(decision, Chain):
        return _machines([*before, *decision.stages], affine, sign, first, components)
    for stage in before:
        if isinstance(stage, Chain):
            return _machines([*Chain(before).flat(), decision], affine, sign, first, components)
        affine = _through(stage, affine)
    if isinstance(decision, Ensemble):
        machines = []
        for member, size in zip(decision.members, decision.sizes, strict=True):
            machines += _machines([member], affine, sign * decision.sign, first, components)
            first += size
        return machines
    if isinstance(decision, KernelSVM):
        return [_kernel_machine(decision, affine, sign, first, components)]
    affine = _through(decision, affine)
    weight, bias = packed((sign * affine.matrix).numpy()), packed((sign * affine.offset).numpy())
    return [{"kind": "linear", "first": first, "weight": weight, "bias": bias}]


def _through(stage: Stage, affine: _Affine) -> _Affine:
    if isinstance(stage, Enumerated):
        raise NotInPageError(
            f"This page cannot compute this decision: {stage.predictor.name} needs Python. Only that for the predicted "
            "class was computed when the page was written; explain others with store.explain."
        )
    if not stage.linear:
        raise NotInPageError(
            f"This page cannot take this head's decision apart: what follows the components, {type(stage).__name__}, "
            "needs Python. The command 'explain' draws its maps, as store.explain does in Python."
        )
    return affine.append(stage)


def _kernel_machine(
    machine: KernelSVM, affine: _Affine, sign: float, first: int, components: np.ndarray
) -> dict[str, Any]:
    name = _KERNELS.get(type(machine.kernel))
    if name is None:
        raise NotInPageError(f"This page cannot compute this head's kernel, {type(machine.kernel).__name__}.")
    points = machine.support_vectors.numpy()
    plain = torch.equal(affine.matrix, torch.eye(*affine.matrix.shape, dtype=torch.float64)) and not affine.offset.any()
    inputs = components if plain else components @ affine.matrix.numpy().T + affine.offset.numpy()
    return {
        "kind": "kernel",
        "first": first,
        "kernel": {"name": name, **asdict(machine.kernel)},
        "affine": None if plain else {"matrix": packed(affine.matrix.numpy()), "offset": packed(affine.offset.numpy())},
        "points": packed(points),
        "dual": packed(sign * machine.dual_coef.numpy()),
        "groups": _groups(machine),
        "intercept": packed(sign * machine.intercept.numpy()),
        "rows": packed(rows_of_points(points, inputs)),
        "training": packed(machine.support.numpy().astype(np.int32)),
    }


def _groups(machine: KernelSVM) -> list[dict[str, Any]]:
    """Return, for every class, how many support vectors it has, and which decision every row of ``dual`` is for."""
    if len(machine.dual_coef) == 1:
        return [{"count": len(machine.support_vectors), "decisions": [0]}]
    count = len(machine.n_support)
    first, second = np.triu_indices(count, 1)
    decisions = np.zeros((count, count - 1), int)
    decisions[first, second - 1] = decisions[second, first] = np.arange(len(first))
    return [{"count": size, "decisions": row.tolist()} for size, row in zip(machine.n_support, decisions, strict=True)]


def rows_of_points(points: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Return the atlas row of every support vector, int32 of shape (I,); -1 if it is not in the atlas.

    Args:
        points: support vectors, shape (I, D).
        inputs: the machine's input for the rows, shape (R, D).
    """
    rows = np.full(len(points), -1, np.int32)
    if not len(points) or not len(inputs):
        return rows
    spread = np.sqrt(inputs.var(0).sum())
    tolerance = _SAME * (spread if spread > 0 else 1.0)
    # Along the widest coordinate only few rows are near; of these the nearest is taken.
    widest = int(inputs.var(0).argmax())
    order = inputs[:, widest].argsort()
    along = inputs[order, widest]
    begins = along.searchsorted(points[:, widest] - tolerance)
    ends = along.searchsorted(points[:, widest] + tolerance, side="right")
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        near = order[begin:end]
        if len(near):
            distances = np.linalg.norm(inputs[near] - points[i], axis=1)
            if distances.min() <= tolerance:
                rows[i] = near[distances.argmin()]
    return rows
