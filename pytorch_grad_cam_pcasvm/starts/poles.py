"""Poles: features at which rounding decides the output of a head, as where a row of length 0 is divided by its length.

The components of the training mean are 0 but for rounding. A ``Normalizer`` behind a PCA makes any direction of them.
"""

from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.stages import Scale
from pytorch_grad_cam_pcasvm.network.outputs import HeadRun
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse
from pytorch_grad_cam_pcasvm.starts.jumps import features_at, find_deviations
from pytorch_grad_cam_pcasvm.targets.target import ClosedFormTarget

MEAN = "the training mean"
BESIDE = 1e-6  # of what training images differ by, around features, or rounding if that is more
_ROUNDING = 16  # machine epsilons of the features
_FAR = 1e-4  # of that difference: if rounding is more, it is not for a pole
_STEEP = 1e-2  # of what that difference changes: a step that is a millionth of it changes less
_AROUND = 8  # directions in which both are measured
_SAMPLES = 128  # of training images, as a head knows their spread
_WAYS = 64  # directions in which a jump is looked for
_SMOOTH = 1e-6  # of the value at the mean, below which it does not jump
_INSIDE = 1e-3  # standard deviations from a jump
_HALVED = 8  # times, the way from a jump, until it ends inside of a cell


def find_pole(head: Head, features: Tensor, eps: float, beside: float = BESIDE, usual: Tensor | None = None) -> Tensor:
    """Return for each stage of a head whether its output, at some of the features, is decided by rounding, (stages,).

    Nothing is looked at. Stages behind a pole are on it, too. A decision without a gradient may jump anywhere, and a
    kernel machine is smooth: both are left out, so that there may be one number less.

    Args:
        head: the head.
        features: shape (M, D).
        eps: machine epsilon of what computes the features.
        beside: how near a pole is still told, as a part of what training images differ by; 0: as near as rounding.
        usual: features as large as those of training images, of a head that does not know, (M, D).
    """
    sizes, width = _measure_sizes(head, features if usual is None else usual), features.shape[1]
    # Of ranges, since numbers that are drawn would have to be sent to a device.
    counts = (torch.arange(1, 1 + number, dtype=features.dtype, device=features.device) for number in (_AROUND, width))
    signs = torch.outer(*counts).sin().sign().unsqueeze(1)
    near = torch.maximum(beside * sizes, (_ROUNDING * eps * features.abs()).minimum(_FAR * sizes))
    rows = torch.cat([features.unsqueeze(0), features + near * signs, features + sizes * signs])
    poles = []
    is_told = head.stages[-1].has_poles
    for values in head(rows.flatten(0, 1)).values[1 : len(head.stages) + is_told]:
        numbers = values.unflatten(0, rows.shape[:2])
        changes = (numbers[1:] - numbers[:1]).abs().unflatten(0, (2, -1)).amax((1, 2))
        rounding = _ROUNDING * torch.finfo(values.dtype).eps * numbers.abs().amax((0, 1))
        poles.append(((changes[0] > _STEEP * changes[1]) & (changes[0] > rounding)).any())
    return torch.stack(poles) if poles else features.new_zeros(0, dtype=torch.bool)


def is_on_pole(head: Head, features: Tensor) -> bool:
    """Return whether rounding decides the output of a head, on the CPU, at some features, shape (M, D)."""
    return bool(find_pole(head, features, torch.finfo(features.dtype).eps).any())


def refuse_pole(head: Head, poles: Tensor, where: str, *ways: str) -> NoReturn:
    """Refuse a start on a pole, and name the stage that makes it one.

    Raises:
        ValueError: always.
    """
    stage = repr(head.stages[poles.tolist().index(True)]).partition("(\n")[0]  # of one with members, its own name
    zeros = Fix("start at zero activations, baseline='zero'", "baseline")
    refuse(
        ValueError,
        f"at {where}, rounding decides what {stage} of the head returns, as where a row of length 0 is divided by "
        "its length. Contributions from there would not add up",
        *ways,
        *([zeros] if where.startswith(MEAN) else []),
        Fix("give an image to start from, baseline=image, such as one of a good part", "baseline"),
        "use a gradient method such as ClosedFormGradCAM",
    )


def name_other_start(on_pole: bool) -> str:
    """Return the way out where a target has no boundary near the training mean, which may lie on a pole."""
    place, name = ("zero activations", "zero") if on_pole else ("the mean", "mean")
    return (
        f"start at {place} instead, baseline={name!r} (--baseline {name}); maps then add up to the difference from the "
        "value there"
    )


def leave_pole(head: Head, features: Tensor, poles: Tensor, target: ClosedFormTarget) -> Tensor | None:
    """Return features away from a pole, (D,), as far from it as training images are; None if there are none.

    Of samples that spread as the training images do, it is the one at which the target is nearest to 0.

    Args:
        head: the head, on the CPU.
        features: those on the pole, shape (D,).
        poles: which stages are on it, (stages,).
        target: the target.
    """
    position, spread = 0, _measure_sizes(head, features.unsqueeze(0))
    for place, stage in enumerate(head.stages[: poles.tolist().index(True)], 1):  # behind a pole, all is on it
        if stage.output_deviations is not None:
            position, spread = place, stage.output_deviations
    start = head(features.unsqueeze(0)).values[position][0]
    ways = torch.from_numpy(np.random.default_rng(0).standard_normal((_SAMPLES, len(start))))
    samples = start + ways.to(start) * spread.to(start)
    values = target(HeadRun(head, head.resume(position, samples)))
    return features_at(head, features, position, samples[int(values.abs().argmin())], spread.to(start))


def off_jump(head: Head, features: Tensor, direction: tuple[int, Tensor] | None = None) -> Tensor | None:
    """Return features inside of a cell, next to others, (D,), at which a decision without a gradient jumps.

    A tree of LightGBM splits beside 0, where the training mean's components are: what rounding makes of them would
    decide.

    Args:
        head: the head.
        features: the others.
        direction: a position, and the standard deviations of the training set there; None: what the head knows of it.

    Returns:
        The features; None: the others are on no jump, or nothing is known of the training set.

    Raises:
        ValueError: rounding decides the decision there, and at all features around.
    """
    direction = direction or find_deviations(head)
    if direction is None:
        return None
    position, deviations = direction[0], direction[1].to(features)
    trace = head(features.unsqueeze(0))
    start, rounding = trace.values[position][0], head.errors(trace, position)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (_WAYS, len(start)), generator=generator, device="cpu").to(start) * 2 - 1

    def jumps(point: Tensor, reach: Tensor, least: float | None = None) -> bool:
        """Return whether the decision at a point is another at so many numbers around it."""
        values = head.resume(position, torch.cat([point.unsqueeze(0), point + reach * signs])).values[-1]
        changes = (values[1:] - values[:1]).abs()
        return bool((changes > (_SMOOTH * values.abs().max() if least is None else least)).any())

    reach = BESIDE * deviations
    if not jumps(start, reach if rounding is None else torch.maximum(reach, rounding[0])):
        return None
    for halved in range(_HALVED):
        step = _INSIDE * 2.0**-halved * deviations
        for sign in signs:
            if not jumps(start + step * sign, step / 2):
                return features_at(head, features, position, start + step * sign, deviations)
    far = head.resume(position, torch.cat([start.unsqueeze(0), start + deviations * signs])).values[-1]
    if jumps(start, BESIDE * deviations, _STEEP * float((far[1:] - far[:1]).abs().max())):
        refuse_pole(head, torch.arange(len(head.stages)) == len(head.stages) - 1, MEAN)
    return None  # it is only steep


def _measure_sizes(head: Head, features: Tensor) -> Tensor:
    """Return how large a change of features (M, D) is as much as training images differ by, (D,), or nearly so."""
    first, largest = head.stages[0], features.abs().amax(0)
    if isinstance(first, Scale) and first.shift_is_mean:  # a scaler, which divides by 1 if it divides by nothing
        return torch.where(first.divisor == 1, largest, first.divisor.to(largest))
    spread = first.facts.spread
    return torch.full_like(largest, (spread / len(largest)) ** 0.5) if spread else largest
