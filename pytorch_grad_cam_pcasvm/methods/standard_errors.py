"""Standard errors of maps: the spread of the maps of resampled heads, on the pass of the head that they are refits of.

The bootstrap estimate of a standard error (Efron, Annals of Statistics 7, 1979), whose replicates share the network.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.resamples import STABLE, Resamples
from pytorch_grad_cam_pcasvm.maps.results import MethodResult
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods.heads_run import explain_together
from pytorch_grad_cam_pcasvm.runtime.device import kept_on_devices
from pytorch_grad_cam_pcasvm.runtime.errors import UnstableComponentWarning
from pytorch_grad_cam_pcasvm.starts.run import Run
from pytorch_grad_cam_pcasvm.targets import PCATarget
from pytorch_grad_cam_pcasvm.targets.questions import Question, Questions


def add_errors(cam: Any, run: Run, questions: Questions, signed: SignedMaps) -> SignedMaps:
    """Return maps with their standard errors, if the head has resampled heads; NaN of targets that are not asked for.

    Args:
        cam: the method.
        run: the network's run.
        questions: what K targets ask.
        signed: their maps.
    """
    resamples = None if run.head is None else run.head.resamples
    if resamples is None:
        return signed
    untold = range(len(questions))[cam.first_with_errors :].start
    questions = questions.take_targets(range(untold, len(questions)))
    questions = questions if cam.sampling is None else questions.sample([cam.sampling])
    model: Any = run.model
    nets = [model.with_head(head) for head in resamples.heads]
    runs = [replace(run, model=net, output=net.head_run(run.features, run.images)) for net in nets]
    asked = [_ask_refit(questions, matched) for matched in resamples.matches]
    results, _ = explain_together(cam, run, questions, runs, asked, own_starts=True)
    of_components = [column.target.component if _is_component(column) else -1 for column in questions.columns]
    of_targets = [math.nan if b < 0 else resamples.stability[b] for b in of_components]
    stability = _send_stability(*of_targets, like=signed.values)
    _warn_of_unstable(cam, resamples, of_components)
    spread = _measure_spread(results, signed.log_scale[:, untold:])
    # Of components that are not stable nothing is known.
    known = torch.where((stability >= STABLE) | stability.isnan(), 1.0, torch.nan)
    of_maps = known.reshape(-1, *[1] * (signed.maps.dim() - 2)).to(signed.maps)
    columns: dict[str, Any] = {
        "resampled": spread.mean * of_maps,
        "error": spread.error * of_maps,
        "values_error": spread.values_error * known.to(spread.values_error),
        "_refits": spread.maps,
        "_stability": stability.expand(signed.maps.shape[0], -1),
    }
    if untold:
        columns = {name: _put_behind(untold, tensor) for name, tensor in columns.items()}
    return replace(signed, **columns, _resamples=len(results))


def _put_behind(count: int, of_targets: Tensor) -> Tensor:
    """Return columns with NaN for so many targets in front of theirs."""
    shape = (of_targets.shape[0], count, *of_targets.shape[2:])
    return torch.cat([of_targets.new_full(shape, torch.nan), of_targets], 1)


def _is_component(column: Question) -> bool:
    return isinstance(column.target, PCATarget)


def _ask_refit(questions: Questions, matched: Sequence[tuple[int, float]]) -> Questions:
    """Return questions as a refit is asked them: of the same classes, and of its own components that match."""

    def match(column: Question) -> Question:
        target = column.target
        if not _is_component(column):
            return column
        component, side = matched[target.component]
        sign = target.sign if side > 0 else "-" if target.sign == "+" else "+"
        return replace(column, target=PCATarget(component, sign=sign))

    return Questions(questions.targets, [match(column) for column in questions.columns])


@kept_on_devices
def _send_stability(*of_targets: float) -> list[float]:
    """Return the stability of the component of each target, NaN of other targets, (K,)."""
    return [*of_targets]


def _warn_of_unstable(cam: Any, resamples: Resamples, of_components: Sequence[int]) -> None:
    known = resamples.stability
    unstable = [b for b in dict.fromkeys(of_components) if b >= 0 and known[b] < STABLE]
    if unstable:
        listed = ", ".join(f"{b + 1} ({known[b]:.2f})" for b in unstable[:8]) + (", ..." if len(unstable) > 8 else "")
        cam._warnings.warn_once(
            UnstableComponentWarning,
            f"components {listed}, counted from 1 as in figures, are not stable: refits on other samples of the same "
            f"photos find other directions (mean squared cosine below {STABLE}), so their maps are those of chance. "
            "Their errors are NaN; maps of decisions do not depend on which components these are",
        )


class _Spread(NamedTuple):
    """Mean and standard deviation of the maps of R heads, (N, K, H, W), that of their values, (N, K), and the maps."""

    mean: Tensor
    error: Tensor
    values_error: Tensor
    maps: Tensor


def _measure_spread(results: Sequence[MethodResult], log_scale: Tensor) -> _Spread:
    maps = torch.stack([result.rescale(log_scale).maps for result in results])
    values = torch.stack([result.values for result in results])
    return _Spread(maps.mean(0), maps.std(0), values.std(0), maps.movedim(0, 2))
