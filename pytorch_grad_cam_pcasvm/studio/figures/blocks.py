"""What is drawn for one target: its columns of pictures, their scale, and the text above them."""

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget, ClassifierOutputTarget
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.runtime.errors import BlankMapWarning
from pytorch_grad_cam_pcasvm.studio.figures.style import (
    CHARACTER,
    FAINT,
    is_formula,
    literal,
    number,
)
from pytorch_grad_cam_pcasvm.studio.pictures.answers import write_error
from pytorch_grad_cam_pcasvm.studio.pictures.panels import SPREAD, UNSTABLE, UNSURE, Panel, spread_mask
from pytorch_grad_cam_pcasvm.targets import (
    DensityTarget,
    HotellingTarget,
    LogRatioTarget,
    PCATarget,
    ProbabilityTarget,
    QuadraticTarget,
    ScoreTarget,
    SVMTarget,
    fix_target,
)
from pytorch_grad_cam_pcasvm.targets.places import describe_place, select_positions

GAP = 0.07  # between pictures, in inches
OUTLINE = "#ffe600"  # of places and true masks
_PREDICTED = "predicted class"
_ROLES = {"runner-up": "the runner-up", "others": "the others"}  # in place of a class
_OF_CLASSES = (
    *(SVMTarget, LogRatioTarget, ProbabilityTarget, ScoreTarget),
    *(ClassifierOutputTarget, ClassifierOutputSoftmaxTarget),
)
_HALO = [withStroke(linewidth=3, foreground="black")]


@dataclass(frozen=True)
class Column:
    """One column of pictures: ``values`` (N, H, W) from 0 to ``top`` (N,), or from ``-top`` if ``signed``."""

    heading: str
    values: np.ndarray
    top: np.ndarray
    signed: bool = False

    def scaled(self, row: int) -> np.ndarray:
        """Return the picture of an image, (H, W), up to 1."""
        return self.values[row] / (float(self.top[row]) or 1.0)


class Block:
    """What is drawn for one target: one or two columns, the scale beside them, a caption above.

    Attributes:
        title: title of the group that the block belongs to.
        captions: one for each image.
        longest: number of characters that fit beside the scale.
        formula: number of characters of the longest caption with a formula.
    """

    def __init__(
        self, title: str, group: SignedMaps, k: int, signed: bool, size: Sequence[int], classes: Sequence[Any] | None
    ) -> None:
        self.title, self.group, self.k, self.signed, self.classes = title, group, k, signed, classes
        self.columns = list(self._list_columns(size))
        sure = find_sure(group)
        self.sure = None if sure is None else sure[:, k]
        self.captions = [caption(group, k, row, classes) for row in range(len(group.maps))]
        self.longest = max(len(self.end(row)) for row in range(len(group.maps))) + self.signed
        # Formulas are not wrapped: their letters, without what makes them one.
        self.formula = max((len(re.sub(r"[$_{}]", "", text)) for text in self.captions if is_formula(text)), default=0)

    def _list_columns(self, size: Sequence[int]) -> Iterator[Column]:
        target, k = self.group.targets[self.k], self.k
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BlankMapWarning)  # the picture says so
            parts = self.group.positive(scale="none"), self.group.negative(scale="none")
        positive, negative = (upsample_maps(part[:, k : k + 1], size)[:, 0].cpu().numpy() for part in parts)
        nu = self.group.nu[:, k].cpu().numpy()
        name = write_title(target, self.group.output, self.classes)
        if self.signed:
            yield Column(name, positive - negative, nu, signed=True)
        elif isinstance(target, PCATarget):
            yield Column(f"raises {name}", positive, nu)
            yield Column(f"lowers {name}", negative, nu)
        else:
            yield Column(name, positive, positive.max((1, 2)))

    def width(self, picture: float) -> float:
        """Return its width in inches."""
        beside = max(0.7, 0.32 + CHARACTER["small"] * self.longest)
        return max(len(self.columns) * (picture + GAP) + beside, CHARACTER["small"] * self.formula)

    def end(self, row: int) -> str:
        """Return where the scale of an image ends."""
        return number(float(self.columns[0].top[row]), float(self.group.log_scale[row, self.k]))

    def panel(self, column: Column, row: int, picture: np.ndarray) -> Panel:
        """Return the panel of an image in one of the columns."""
        sure = None if self.sure is None else self.sure[row]
        return Panel(picture, column.scaled(row), column.heading, self.captions[row], self.end(row), sure=sure)

    def place(self, row: int, size: Sequence[int]) -> np.ndarray | None:
        """Return which pixels of an image the target is about, (H, W); None: it is about the whole of it."""
        target, output = self.group.targets[self.k], self.group.output
        if getattr(target, "at", None) is None or not isinstance(output, HeadOutput) or output.grid is None:
            return None
        selection = select_positions(target, output)
        ones = torch.ones(1, len(output), selection.size, 1, device=output.device)
        mask = selection.put(ones)[0, row, :, 0].unflatten(0, output.grid.shape).cpu().numpy()
        return spread_mask(mask, tuple(size))

    def is_blank(self, row: int) -> bool:
        """Return whether the map is 0 everywhere."""
        both = self.group.maps, self.group.opposite
        return not any(bool(maps[row, self.k].any()) for maps in both if maps is not None)


def draw_remarks(axis: Axes, block: Block, column: Column, row: int, font: float) -> None:
    """Say on the map of one image why there is nothing to see, and outline the place that it is about."""
    values = column.scaled(row)
    largest = np.abs(values).max()
    if largest < FAINT:
        share = f"at most {np.ceil(100 * largest):.0f} %\nof the strong-\nest colour"
        note = share if largest else "all evidence\nhas the\nother sign"
        if block.is_blank(row):
            note = "blank:\nall zero"
        style: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "path_effects": _HALO}
        axis.text(0.5, 0.5, note, transform=axis.transAxes, fontsize=font, **style)
    if (place := block.place(row, values.shape)) is not None:
        axis.contour(place, [0.5], colors=OUTLINE, linewidths=1.2)


def write_title(target: Any, output: Any, classes: Sequence[Any] | None) -> str:
    """Return a target in plain words, the same for all images."""
    where, against = describe_place(target), getattr(target, "sign", "+") == "-"
    if isinstance(target, PCATarget):
        return f"{'minus ' * against}component {target.component + 1}{where}"
    name = heading(target, output)
    if list_labels(output) is None or not isinstance(target, _OF_CLASSES):
        is_value = isinstance(target, SVMTarget)
        if is_value and isinstance(output, HeadOutput) and tells_anomalies(output.head):
            return ("anomaly" if against else "normality") + where
        return f"{'minus the ' * (against and is_value)}{name}{where}"
    words = literal(_sides(target, output, classes, against))
    if not isinstance(target, SVMTarget):
        words = name if words == _PREDICTED else f"{name}, {words}"
    return words + where


def _sides(target: Any, output: Any, classes: Sequence[Any] | None, against: bool) -> str:
    """Return in words which classes a target speaks for and against."""
    names = _map_names(target, output, classes)
    category, versus = getattr(target, "category", None), getattr(target, "versus", None)
    rivals = versus if isinstance(versus, tuple) else () if versus is None else (versus,)
    own = _PREDICTED if category is None else _name_class(category, _ROLES | names)
    rival_names = ", ".join(_name_class(label, _ROLES | names) for label in rivals)
    if category is None and not isinstance(versus, tuple) and _as_plain(versus) in (list_labels(output) or ()):
        return f"{'for' if against else 'against'} {rival_names}"  # by whichever other class is the strongest
    if rival_names:
        return f"{rival_names} rather than {own}" if against else f"{own} rather than {rival_names}"
    if category is None:
        return f"against the {own}" if against else own
    return f"{'against' if against else 'for'} {own}"


def heading(target: Any, output: Any) -> str:
    """Return a target as a heading, the same for all images."""
    if isinstance(target, PCATarget):
        return f"$P_{{{target.component + 1}}}$" if target.sign == "+" else f"$(-P_{{{target.component + 1}}})$"
    if isinstance(target, SVMTarget):
        decision = "margin" if target.versus is None else "decision"
        return decision if list_labels(output) is not None else "value"
    if isinstance(target, LogRatioTarget):
        return "log-ratio"
    if isinstance(target, ProbabilityTarget | ClassifierOutputSoftmaxTarget):
        return "probability"
    if isinstance(target, ScoreTarget | ClassifierOutputTarget):
        return "class score"
    if isinstance(target, DensityTarget):
        return "anomaly" if target.sign == "-" else "log-density"
    if isinstance(target, QuadraticTarget):
        return f"${'-' if target.sign == '-' else ''}{'T^2' if isinstance(target, HotellingTarget) else 'Q'}$"
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
    return "custom target" if name == "<lambda>" else literal(name)


def caption(group: SignedMaps, k: int, row: int, classes: Sequence[Any] | None) -> str:
    """Return a target as it is meant for this image, and its value."""
    target = group.targets[k]
    value, where = _value(group, k, row), describe_place(target)
    words = subject(target, group.output, row, classes)
    return f"{words}{where}: {value}" if words else f"value {value}{where}"


def _value(group: SignedMaps, k: int, row: int) -> str:
    """Return the value of a target for an image; the rounding of a sum is 0."""
    value, errors = float(group.values[row, k]), group.values_error
    if group.baseline_values is not None:
        strongest = float(group.nu[row, k] * group.log_scale[row, k].exp())
        least = 1e-4 * max(abs(float(group.baseline_values[row, k])), strongest)
        value = value if abs(value) > least else 0.0
    if errors is None:
        return number(value)
    return write_error(value, float(errors[row, k])).replace("-", "\N{MINUS SIGN}")


def describe_sure(groups: Collection[SignedMaps], look: str = "pale and hatched") -> list[str]:
    """Return a note that says how what is not sure looks, and what ± is; [] if nothing is known."""
    if all(find_sure(group) is None for group in groups):
        return []
    note = f"{look.capitalize()}: {UNSURE}. {SPREAD}."
    unstable = any(group.values_error is not None and bool(group.values_error.isnan().any()) for group in groups)
    return [note + f" {UNSTABLE.capitalize()}." * unstable]


def find_sure(group: SignedMaps) -> np.ndarray | None:
    """Return where maps are sure, of their shape; None: not known, as of negative parts that a method makes anew."""
    return None if group.error is None or group.opposite is not None else group.sure().cpu().numpy()


def subject(target: Any, output: Any, row: int, classes: Sequence[Any] | None) -> str:
    """Return the class that a target speaks for in this image, and any class it speaks against; "" if unknown."""
    labels, of_svm = list_labels(output), isinstance(target, SVMTarget | LogRatioTarget | ProbabilityTarget)
    if labels is None or isinstance(target, PCATarget):
        return ""
    category, versus = getattr(target, "category", None), getattr(target, "versus", None)
    if isinstance(output, HeadOutput) and of_svm:
        category = _find_predicted(target, output, row) if category is None else category
    elif category is None and isinstance(target, ScoreTarget):
        category = int(_describe_scores(output)[row].argmax())
    elif isinstance(category, int) and not of_svm:
        category = labels[category]
    category = _as_plain(category)
    if not isinstance(category, str | int | float):
        return ""
    names = _map_names(target, output, classes)
    words = ["against"] * (getattr(target, "sign", "+") == "-") + [_name_class(category, names)]
    if versus is not None:
        several = versus if isinstance(versus, tuple) else [versus]
        words.append("/ " + ", ".join(_name_class(label, names) for label in several))
    return literal(" ".join(words))


def _map_names(target: Any, output: Any, classes: Sequence[Any] | None) -> dict[Any, str]:
    """Return the names of the classes by their labels, as far as a target's labels are known to be these."""
    labels = list_labels(output) or []
    if not isinstance(output, HeadOutput) and isinstance(target, SVMTarget | LogRatioTarget | ProbabilityTarget):
        return {}  # maps that were loaded have no head: which of the classes a label is, nobody knows
    names = classes if classes is not None and len(classes) == len(labels) else [_class(label) for label in labels]
    return dict(zip(labels, map(str, names), strict=True))


def _name_class(label: Any, names: Mapping[Any, str]) -> str:
    return names.get(_as_plain(label), _class(_as_plain(label)))


def _find_predicted(target: Any, output: HeadOutput, row: int) -> Any:
    """Return the class that a target without a category is about in an image, or at most of its positions."""
    against_one = isinstance(target, SVMTarget | LogRatioTarget) and target.versus is not None
    if output.grid is None and not against_one:
        return output.labels()[row]
    return fix_target(target, output.rows([row])).category


def list_labels(output: Any) -> list[Any] | None:
    """Return the labels of the classes: for an ordinary classifier their numbers, for a regressor None."""
    if isinstance(output, HeadOutput):
        return None if output.head.classes_ is None else output.head.classes_.tolist()
    scores = _describe_scores(output)
    return list(range(scores.shape[1])) if isinstance(scores, Tensor) and scores.dim() == 2 else None


def _describe_scores(output: Any) -> Any:
    """Return the scores in the output of a classifier: of transformers they are its logits."""
    return getattr(output, "logits", output)


def _class(label: Any) -> str:
    """Return a label so that nobody takes it for a value."""
    return label if isinstance(label, str) else f"class {label}"


def _as_plain(label: Any) -> Any:
    """Return a label as Python's own number or word."""
    return label.item() if hasattr(label, "item") else label
