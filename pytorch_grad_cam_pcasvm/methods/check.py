"""What an explanation rests on, held against autograd and against the network itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.path.passes import Pass, TapePass
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_leaves

OF_SUMS = "sums from the start"


@dataclass(frozen=True)
class Comparison:
    """One comparison.

    Attributes:
        layer: name of the target layer.
        what: what was compared.
        error: the difference, relative to the size of the terms; NaN if it could not be made.
        tolerance: the largest error that rounding explains.
        refusal: why it could not be made, or an empty string.
    """

    layer: str
    what: str
    error: float
    tolerance: float
    refusal: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the error is explained by rounding."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class CheckReport:
    """The comparisons of :meth:`.ClosedFormCAM.check`; print it to read it.

    Attributes:
        comparisons: one for each target layer and quantity.

    Example:
        >>> print(cam.check(images))
        layer2  gradient             agrees with autograd, relative error ...
        layer2  sum of contributions agrees with the network, relative error ...
    """

    comparisons: tuple[Comparison, ...]

    @property
    def agrees(self) -> bool:
        """Whether all comparisons that could be made agree."""
        return all(row.agrees for row in self.comparisons if not row.refusal)

    def __str__(self) -> str:
        """Return one line for each comparison."""
        widths = [max(len(getattr(row, name)) for row in self.comparisons) for name in ("layer", "what")]
        lines = []
        for row in self.comparisons:
            other = "autograd" if row.what == "gradient" else "the network"
            verdict = "agrees with" if row.agrees else "DIFFERS FROM"
            result = f"{verdict} {other}, relative error {row.error:.1e}" if not row.refusal else row.refusal
            lines.append(f"{row.layer:<{widths[0]}}  {row.what:<{widths[1]}} {result}")
        return "\n".join(lines)


def check_gradient(
    name: str, recorded: Pass, reference: Pass, output_gradients: Sequence[Tensor | None], target: int
) -> Comparison:
    """Compare the pullback of K targets with autograd's."""
    actual, expected = (path.pullback(output_gradients, target).dense().double() for path in (recorded, reference))
    size = expected.norm()
    if not bool(size > 0) and not bool(actual.any()):
        return Comparison(name, "gradient", 0.0, 0.0, "is 0 for all targets, by autograd as well: nothing to compare")
    error = float((actual - expected).norm() / size) if bool(size > 0) else float("inf")
    return Comparison(name, "gradient", error, _tolerance(recorded))


def check_contributions(
    name: str, recorded: TapePass, output_gradients: Sequence[Tensor | None], target: int, network_at: Any
) -> Comparison:
    """Compare the sum of contributions from zero activations with how far the network's output is from there.

    Args:
        name: of the target layer.
        recorded: the pass.
        output_gradients: derivatives of K targets with respect to the tensors of its output.
        target: position of the target layer.
        network_at: returns what the network itself gives for other activations of that layer.
    """  # noqa: DOC201 - said in one line
    quantity, activations = "sum of contributions", recorded.activations[target]
    start = torch.zeros_like(activations)
    try:
        pulled = recorded.pullback(output_gradients, target, recorded.run_from({target: start})).dense().double()
        ends = network_at(start)
    except NoClosedFormError as error:
        return Comparison(name, quantity, float("nan"), 0.0, f"is not available: {error}")
    terms = [pulled * (activations - start).double()]
    leaves = [leaf for leaf in tree_leaves(recorded.output) if isinstance(leaf, Tensor)]
    floats = [(seed, y) for seed, y in zip(output_gradients, leaves, strict=True) if y.is_floating_point()]
    terms += [
        -(seed.double() * (y - y0).double())
        for (seed, y), y0 in zip(((s, y) for s, y in floats), ends, strict=True)
        if seed is not None
    ]
    total = torch.stack([part.flatten(1).sum(1) for part in terms]).sum(0)
    size = torch.stack([part.flatten(1).abs().sum(1) for part in terms]).sum(0)
    largest = float((total.abs() / torch.where(size > 0, size, 1.0)).max())
    return Comparison(name, quantity, largest, _tolerance(recorded))


def check_sums(name: str, parts: Sequence[Any]) -> Comparison:
    """Compare the sums of maps that add up, from the start that is used, with how far values are from there.

    Args:
        name: of the target layers.
        parts: the signed maps, several of one explanation if there are branches.
    """  # noqa: DOC201 - said in one line
    values, start, total = parts[0].values, parts[0].baseline_values, sum(maps.sums for maps in parts)
    size = (values.abs() + start.abs()).amax(0)  # of all images: one may be undecided
    error = float(((total + start - values).abs() / torch.where(size > 0, size, 1.0)).max())
    return Comparison(name, OF_SUMS, error, _measure_rounding([parts[0].maps.dtype]))


def _tolerance(recorded: Pass) -> float:
    dtypes = {leaf.dtype for leaf in (*recorded.activations, *tree_leaves(recorded.output)) if isinstance(leaf, Tensor)}
    return _measure_rounding([dtype for dtype in dtypes if dtype.is_floating_point])


def _measure_rounding(dtypes: Sequence[torch.dtype]) -> float:
    """Return the largest relative error that rounding explains."""
    return float(max(max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5, 1e-7))
