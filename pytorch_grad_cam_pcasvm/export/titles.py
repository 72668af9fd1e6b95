"""Titles: what the maps of a picture are called where they are drawn, and the colours that they have there."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime.pictures import colour_table
from pytorch_grad_cam_pcasvm.targets import (
    HotellingTarget,
    LogRatioTarget,
    PCATarget,
    ProbabilityTarget,
    ResidualTarget,
    ScoreTarget,
    SVMTarget,
    Target,
)


def about(targets: Sequence[Target], net: nn.Module) -> dict[str, Any]:
    """Return what :class:`.Sheets` need: ``titles`` of targets, ``classes`` of a network, ``colours`` of figures."""
    known = net.head.classes_ if isinstance(net, PCASVMNet) else None
    classes = None if known is None else known.tolist()
    return {
        "titles": [_title(target, classes) for target in targets],
        "classes": classes,
        "colours": colour_table(),
    }


def _title(target: Target, classes: Sequence[Any] | None) -> str:
    """Return what a target is, in a few words."""
    kinds: dict[Any, str] = {
        LogRatioTarget: "log-ratio of ",
        ProbabilityTarget: "probability of ",
        HotellingTarget: "T\N{SUPERSCRIPT TWO}",
    }
    words = kinds.get(type(target), "")
    if isinstance(target, PCATarget):
        words = f"component {target.component + 1}"
    elif isinstance(target, ResidualTarget):
        words = "Q"
    elif isinstance(target, SVMTarget | LogRatioTarget | ProbabilityTarget | ScoreTarget):
        category, versus = target.category, getattr(target, "versus", None)
        words += str(category) if category is not None else "value" if classes is None else "predicted class"
        rivals = versus if isinstance(versus, tuple) else () if versus is None else (versus,)
        words += " / " * bool(rivals) + ", ".join(map(str, rivals))
    return "against " * (getattr(target, "sign", "+") == "-") + (words or repr(target))
