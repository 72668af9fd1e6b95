"""Titles: the names of maps where they are drawn, and their colours."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from pytorch_grad_cam_pcasvm.export.outputs import list_strongest
from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime.pictures import COLOURS, colour_table, heat_table
from pytorch_grad_cam_pcasvm.targets import (
    DensityTarget,
    HotellingTarget,
    LogRatioTarget,
    PCATarget,
    ProbabilityTarget,
    ResidualTarget,
    ScoreTarget,
    SVMTarget,
    Target,
)
from pytorch_grad_cam_pcasvm.targets.meanings import describe_anomaly, describe_meaning
from pytorch_grad_cam_pcasvm.targets.places import describe_place

_BACKGROUND = "background"  # outside of masks


def about(targets: Sequence[Target], net: nn.Module) -> dict[str, Any]:
    """Return the description for :class:`.Sheets`: ``titles`` of targets, ``classes``, ``colours`` of figures.

    ``meanings`` are what the targets' values are, in words; of a head that tells anomalies, ``anomaly`` what these are.
    Where it is known, ``threshold`` is the largest anomaly with which a photo passes. For dense features also
    ``label_colours`` of classes, ``absent``, those that have none, ``heat``, the colours of anomalies and margins, and
    ``strongest``, the numbers of the targets that are about the strongest position.
    """
    known = net.head.classes_ if isinstance(net, PCASVMNet) else None
    classes = None if known is None else known.tolist()
    dense = isinstance(net, PCASVMNet) and net.is_dense
    anomalies = isinstance(net, PCASVMNet) and tells_anomalies(net.head)
    of_places: dict[str, Any] = {"label_colours": [colour.lstrip("#") for colour in COLOURS], "heat": heat_table()}
    of_places["strongest"] = list_strongest(targets)
    if isinstance(net, PCASVMNet) and dense:
        of_places["absent"] = [name for name in classes or () if name in (_BACKGROUND, net.head.normal)]
    head = net.head if isinstance(net, PCASVMNet) else None
    threshold = net.head.threshold if isinstance(net, PCASVMNet) and anomalies else None
    return (
        {
            "titles": [_title(target, classes, anomalies) for target in targets],
            "meanings": [describe_meaning(target, head, dense) for target in targets],
            "classes": classes,
            "colours": colour_table(),
        }
        | ({"anomaly": describe_anomaly(net.head, dense)} if isinstance(net, PCASVMNet) and anomalies else {})
        | ({} if threshold is None else {"threshold": threshold})
        | ({} if head is None or head.normal is None else {"normal": head.normal})
        | (of_places if dense else {})
    )


def _title(target: Target, classes: Sequence[Any] | None, anomalies: bool = False) -> str:
    """Return a target in a few words; of a head that tells anomalies, whose value is minus the anomaly."""
    if anomalies and isinstance(target, SVMTarget) and target.category is None:
        return ("anomaly" if target.sign == "-" else "normality") + describe_place(target)
    if isinstance(target, DensityTarget):
        return ("anomaly" if target.sign == "-" else "log-density") + describe_place(target)
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
        if category is None and _is_class(versus, classes):  # the strongest other one
            return (
                ("for " if getattr(target, "sign", "+") == "-" else "against ") + str(versus) + describe_place(target)
            )
        predicted = "predicted class" if getattr(target, "at", None) is None else "decided class"
        words += str(category) if category is not None else "value" if classes is None else predicted
        rivals = versus if isinstance(versus, tuple) else () if versus is None else (versus,)
        words += " / " * bool(rivals) + ", ".join(map(str, rivals))
    return "against " * (getattr(target, "sign", "+") == "-") + (words or repr(target)) + describe_place(target)


def _is_class(versus: Any, classes: Sequence[Any] | None) -> bool:
    return isinstance(versus, str | int | float) and versus in (classes or ())
