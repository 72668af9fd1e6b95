"""Signal axes: which axis of a layer's output for signals, (N, a, b), holds positions, and which one channels.

Convolutions and pools give (N, C, L), as the signal is. The derivatives of the output by what the last of them gave
tell which axis lies along L. Where they do not, changes of the signal are followed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.inputs import map_input, pick_images
from pytorch_grad_cam_pcasvm.network.modules import list_modules
from pytorch_grad_cam_pcasvm.runtime.rollback import hooked

_ALONG_SIGNALS = (
    *(nn.Conv1d, nn.ConvTranspose1d, nn.MaxPool1d, nn.AvgPool1d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d, nn.LPPool1d),
)  # which take (N, C, L) and return it
_NOISES, _WINDOWS = 6, 8  # signals, and places at which they are changed
_SPAN, _IN_ORDER = 0.3, 0.9  # of the centres of what changes: how far they move, and their correlation with the place
_NUMBERS, _MOST = 4096, 32  # along the signals whose derivatives are taken, together, and of these signals
_INDICES = 16  # places on an axis whose derivatives are taken
_FAINT = 0.01  # of the largest derivatives of a place: that of a place which depends on next to nothing
_FOLLOWS = (
    0.5  # slope of the positions that places depend on: how far they move, of 1, from the first place to the last
)
_OWN = 0.99  # of the derivatives of a place, if it depends on one position alone

Run = Callable[[nn.Module, Tensor], Any]


class SignalAxis(NamedTuple):
    """The axis of positions of an output (N, a, b) of signals, or (a, N, b).

    Attributes:
        axes: which of 1 and 2 may hold positions, with the images first; one, if that is known.
        whole: whether there is nothing else on the axis: no class token.
    """

    axes: list[int]
    whole: bool = False


def find_axis(backbone: nn.Module, run: Run, x: Any) -> SignalAxis:
    """Return the axis of positions of an output.

    Args:
        backbone: the network, in evaluation mode, without the hooks of others.
        run: runs such a network on signals and returns the output.
        x: signals, shape (N, C, L), or several inputs.
    """
    try:
        axis = _by_derivatives(backbone, run, x)
    except Exception:  # no derivatives: of numbers in 8 bits, in inference mode, in half precision: whatever it may be
        axis = None
    return axis or SignalAxis(_axes_that_follow(backbone, run, x))


def _by_derivatives(backbone: nn.Module, run: Run, x: Any) -> SignalAxis | None:
    """Return the axis whose places depend, in order, on the positions of activations known to be (N, C, L)."""
    generator = torch.Generator().manual_seed(0)
    count = max(4, min(_MOST, _NUMBERS // pick_images(x)[0].shape[2]))
    outputs = list[Tensor]()
    of_signals = set[nn.Module]()

    def noise(part: Tensor) -> Tensor:
        if not part.is_floating_point() or part.dim() != 3:
            return part[:1].expand(count, *part.shape[1:])
        outputs.append(
            torch.randn((count, *part.shape[1:]), generator=generator, device="cpu").to(part).requires_grad_().clone()
        )
        return outputs[-1]

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        torch.set_grad_enabled(True)  # also where the network has switched it off for a part that is not trained
        if isinstance(module, _ALONG_SIGNALS):
            source = args[0] if args else kwargs.get("input")
            last = _axis_behind(source, outputs, generator, depth=1) if isinstance(source, Tensor) else None
            (of_signals.add if last is not None and last.axes == [2] else of_signals.discard)(module)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module in of_signals and isinstance(output, Tensor) and output.dim() == 3 and output.shape[2] > 1:
            outputs.append(output)

    with torch.enable_grad(), hooked() as hooks:
        signals = map_input(noise, x)
        for module in list_modules(backbone):
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.before(module, before)
                hooks.after(module, after)
        output = run(backbone, signals)
        if not isinstance(output, Tensor) or count not in output.shape[:2]:
            return None
        return _axis_behind(output if len(output) == count else output.transpose(0, 1), outputs, generator)


def _axis_behind(
    output: Tensor, outputs: list[Tensor], generator: torch.Generator, depth: int | None = None
) -> SignalAxis | None:
    """Return the axis of positions by the last of the known tensors (N, C, L) that tells, of so many it depends on."""
    if output.dim() != 3:
        return None
    for source in reversed(outputs):
        if depth == 0:
            break
        by_axis = {axis: _energies(output, axis, source, generator) for axis in (1, 2)}
        derivatives = {axis: energies for axis, energies in by_axis.items() if energies is not None}
        if len(derivatives) < 2:
            continue
        depth = None if depth is None else depth - 1
        sizes = dict(zip((1, 2), output.shape[1:], strict=True))
        own = [axis for axis, energies in derivatives.items() if sizes[axis] > 1 and _is_own(energies, sizes[axis])]
        if len(own) == 1:
            return SignalAxis(own, whole=True)
        channels, length = source.shape[1:]
        if channels != length and not any(energies.any() for energies in derivatives.values()):
            # Units that are never active: then the shape alone tells.
            same = [
                axis for axis, shape in ((2, (channels, length)), (1, (length, channels))) if output.shape[1:] == shape
            ]
            return SignalAxis(same, whole=True) if same else None
        slopes = {axis: _slope(energies, sizes[axis]) for axis, energies in derivatives.items()}
        follow = [axis for axis, slope in slopes.items() if slope > _FOLLOWS and abs(slopes[3 - axis]) < slope / 2]
        if len(follow) == 1:
            return SignalAxis(follow, whole=sizes[follow[0]] == source.shape[2])
    return None


def _energies(output: Tensor, axis: int, source: Tensor, generator: torch.Generator) -> Tensor | None:
    """Return the squared derivatives of places on an axis by positions of a source, (places, positions).

    None: the output does not depend on the source, or the source is one position.
    """
    if not output.requires_grad or source.shape[2] < 2:
        return None
    size = output.shape[axis]
    rows = list[Tensor]()
    for place in _choose_places(size):
        part = output.select(axis, place)
        signs = (torch.randint(0, 2, part.shape, generator=generator, device="cpu") * 2 - 1).to(part)
        (grad,) = torch.autograd.grad(part, source, signs, retain_graph=True, allow_unused=True)
        if grad is None:
            return None
        rows.append(grad.double().square().sum((0, 1)))
    return torch.stack(rows)


def _choose_places(size: int) -> list[int]:
    """Return some places on an axis, its ends among them."""
    return sorted({round(number * (size - 1) / (_INDICES - 1)) for number in range(_INDICES)})


def _is_own(energies: Tensor, size: int) -> bool:
    """Return whether each place depends on the position of the same number, of as many, alone."""
    own = energies[range(len(energies)), _choose_places(size)] if energies.shape[1] == size else energies.new_zeros(1)
    return bool((own >= _OWN * energies.sum(1)).all() and own.sum() > 0)


def _slope(energies: Tensor, size: int) -> float:
    """Return how far the centre of the places' inputs moves from the first place to the last, as a share of the axis.

    0 where it does not move in order.
    """
    weights = energies.sum(1)
    strong = weights > _FAINT * weights.amax()
    if int(strong.sum()) < 2:
        return 0.0
    places = torch.tensor(_choose_places(size), dtype=torch.float64, device=energies.device)[strong] / (size - 1)
    positions = torch.linspace(0, 1, energies.shape[1], dtype=torch.float64, device=energies.device)
    centres = energies[strong] @ positions / weights[strong]
    places, centres = places - places.mean(), centres - centres.mean()
    order = float((places @ centres) / (places.norm() * centres.norm()).clamp(min=1e-12))
    return float((places @ centres) / (places @ places)) if abs(order) > _IN_ORDER else 0.0


def _axes_that_follow(backbone: nn.Module, run: Run, x: Any) -> list[int]:
    """Return which axes of an output of signals, 1 and 2 where images come first, follow a change along them.

    Some signals of noise are changed at one place after the other. Where the output changes most moves along with it,
    on the axis of positions; on that of channels it stays, but for chance, which many signals leave little of.
    """
    generator = torch.Generator().manual_seed(0)
    length = pick_images(x)[0].shape[2]
    starts = [number * length // _WINDOWS for number in range(_WINDOWS)]
    windows = [(start, start + max(1, length // _WINDOWS)) for start in starts]

    def changed(part: Tensor) -> Tensor:
        if not part.is_floating_point() or part.dim() != 3:
            return part[:1].expand(_NOISES * (1 + _WINDOWS), *part.shape[1:])
        noise, other = torch.randn((2, _NOISES, *part.shape[1:]), generator=generator, device="cpu").to(part)
        signals = noise.unsqueeze(1).repeat(1, 1 + _WINDOWS, 1, 1)
        for number, (first, last) in enumerate(windows, 1):
            signals[:, number, :, first:last] = 2 * other[:, :, first:last]
        return signals.flatten(0, 1)

    output = run(backbone, map_input(changed, x))
    rows = _NOISES * (1 + _WINDOWS)
    if not isinstance(output, Tensor) or output.dim() != 3 or rows not in output.shape[:2]:
        return []
    output = output if len(output) == rows else output.transpose(0, 1)
    output = output.double().unflatten(0, (_NOISES, 1 + _WINDOWS))
    change = (output[:, 1:] - output[:, :1]).abs()
    following, perhaps = list[int](), list[int]()
    for axis, profile in ((1, change.sum(3)), (2, change.sum(2))):  # each (noises, windows, size)
        size = profile.shape[2]
        if size < 2:
            continue
        # What changes wherever the signal does, such as a class token, is no position.
        profile = profile - profile.amin(1, keepdim=True)
        total = profile.sum(2)
        places = torch.arange(size, dtype=torch.float64, device=profile.device) / (size - 1)
        centres = ((profile * places).sum(2) / torch.where(total > 0, total, 1.0)).mean(0)
        expected = torch.linspace(0, 1, _WINDOWS, dtype=torch.float64, device=profile.device)
        span = float(centres[-1] - centres[0])
        order = float(torch.corrcoef(torch.stack([centres, expected]))[0, 1])
        following += [axis] if span > _SPAN and order > _IN_ORDER else []
        perhaps += [axis] if span > _SPAN / 3 and order > _IN_ORDER - 0.3 else []
    return perhaps if following else []  # what only one axis follows
