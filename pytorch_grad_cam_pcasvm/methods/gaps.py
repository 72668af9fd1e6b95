"""Gaps: why contributions do not add up, found by running one image alone, and the path in double precision."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.path.passes import ClosedFormPass
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_leaves
from pytorch_grad_cam_pcasvm.starts.run import Run, Start
from pytorch_grad_cam_pcasvm.targets.output_gradients import OutputGradients

_LOWER = torch.float16, torch.bfloat16, torch.float32
_ROUNDED = 8  # times the rounding of one operation, of a path of many
_BY_GRADIENT = "use a gradient method such as ClosedFormGradCAM"


def refuse_gap(run: Run, layer: int, secants: OutputGradients, gap: Tensor) -> None:
    """Refuse contributions that do not add up, and name the cause.

    What the rounding of the features explains is no gap: distances of 0, as of images that a bank was made of.

    Args:
        run: the network's run.
        layer: position of the target layer.
        secants: the secants of K targets.
        gap: by how much each sum is off, (N, K); 0 where that is no matter.

    Raises:
        NoClosedFormError: they do not add up.
    """
    gap = torch.where(gap.abs() <= _ROUNDED * _measure_rounding(run, layer, secants), 0.0, gap)
    if not bool(gap.any()):
        return
    problem, image = f"contributions at {run.layers[layer]!r} do not add up", int(gap.abs().amax(1).argmax())
    if run.count > 1 and _mixes_images(run, image):
        raise NoClosedFormError(
            f"{problem}: the network mixes the images of a batch",
            "explain one image at a time",
            "see cam.check(images)",
            _BY_GRADIENT,
        )
    if float(_gap_of_head(run, layer, secants).abs().amax()) > float(gap.abs().amax()) / 2:
        raise NoClosedFormError(
            f"{problem}: rounding decides the head's value at an image or at its start, as where a distance to a "
            "training row or the length of a row is 0",
            "explain images that are not among the training images",
            "choose another baseline",
            _BY_GRADIENT,
        )
    if _adds_up_in_double(run, layer, secants):
        raise NoClosedFormError(
            f"{problem}: they are lost in the rounding of {run.recorded.activations[layer].dtype}, as the features "
            "hardly depend on this layer (LayerScale of untrained weights?)",
            "use double precision, net.double() and images.double()",
            "choose another target layer",
            _BY_GRADIENT,
        )
    raise NoClosedFormError(
        f"{problem}: the network computes where it cannot be seen", "see cam.check(images)", _BY_GRADIENT
    )


def _measure_rounding(run: Run, layer: int, secants: OutputGradients) -> Tensor:
    """Return how far the rounding of the features moves the values, to first order, (N, K)."""
    sizes = []
    for grad, y, y0 in _changes(run.cotangents(secants), run.recorded.output, _output_of(run.starts[layer])):
        sizes.append(torch.finfo(y.dtype).eps * (grad.abs() * (y.abs() + y0.abs())).flatten(2).sum(-1))
    return torch.stack(sizes).sum(0).T * secants.log_scale.exp()


def _mixes_images(run: Run, image: int) -> bool:
    """Return whether an image has other features alone than in its batch."""
    alone = tree_leaves(run.record(run.images[image : image + 1]).output)
    pairs = zip(tree_leaves(run.recorded.output), alone, strict=True)
    together = [(one[image : image + 1], two) for one, two in pairs if isinstance(one, Tensor)]
    return any(_differ(one, two) for one, two in together if one.is_floating_point())


def _differ(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape:
        return True
    return float((one - two).abs().max()) > torch.finfo(one.dtype).eps ** 0.5 * float(two.abs().max())


def _gap_of_head(run: Run, layer: int, secants: OutputGradients) -> Tensor:
    """Return by how much the secants of the head alone are off, (N, K)."""
    assert secants.baseline_values is not None
    total = _sum_products(run.cotangents(secants), run.recorded.output, _output_of(run.starts[layer]))
    for sign, part in ((-1, secants.excess), (1, secants.remainder)):
        total = total if part is None else total + sign * part.to(total)
    return total * secants.log_scale.exp() + secants.baseline_values - secants.values


def _adds_up_in_double(run: Run, layer: int, secants: OutputGradients) -> bool:
    """Return whether the same sums of the path have no gap in double precision; False where that cannot be known."""
    if not isinstance(run.recorded, ClosedFormPass) or run.recorded.activations[layer].dtype not in _LOWER:
        return False
    grads = [None if grad is None else grad.double() for grad in run.cotangents(secants)]
    try:
        recorded = _in_double(run.recorded)
        start = run.starts[layer].activations.double()
        path = recorded.run_from({layer: start})
        pulled = recorded.pullback(grads, layer, path).dense()
    except (NoClosedFormError, RuntimeError):  # layers whose weights are in single precision
        return False
    terms = (pulled * (recorded.activations[layer] - start)).flatten(1)
    gap = terms.sum(1) - _sum_products(grads, recorded.output, path.output).sum(0)
    return bool((gap.abs() <= 1e-5 * terms.abs().sum(1)).all())


def _in_double(recorded: ClosedFormPass) -> ClosedFormPass:
    """Return the same pass, computed again in double precision from the same activations."""

    def double(item: Any) -> Any:
        if isinstance(item, torch.dtype):
            return torch.float64 if item in _LOWER else item
        return item.double() if isinstance(item, Tensor) and item.dtype in _LOWER else item

    return ClosedFormPass(recorded.tape.cast(double), recorded.names)


def _output_of(start: Start) -> Any:
    """Return the features at a start, or where each target has its own, at the training mean."""
    return start.output.head_trace.values[0] if start.path is None else start.path.output


def _sum_products(grads: Any, output: Any, start: Any) -> Tensor:
    """Return gradients of K targets times the change of the outputs, (N, K), in double precision."""
    products = [(grad.double() * (y.double() - y0.double())) for grad, y, y0 in _changes(grads, output, start)]
    return torch.stack([product.flatten(2).sum(-1) for product in products]).sum(0).T


def _changes(grads: Any, output: Any, start: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each output with a gradient: the gradient, the numbers, and the numbers at the start."""
    leaves = ([leaf for leaf in tree_leaves(one) if isinstance(leaf, Tensor)] for one in (output, start))
    return [item for item in zip(grads, *leaves, strict=True) if item[0] is not None]
