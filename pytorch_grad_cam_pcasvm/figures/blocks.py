"""What is drawn for one target: its columns of pictures, their scale, and the text above them."""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from pytorch_grad_cam.utils.image import show_cam_on_image
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget, ClassifierOutputTarget
from torch import Tensor

from pytorch_grad_cam_pcasvm.figures.style import CHARACTER, bare, draw_signed, is_formula, literal, number
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.grid import upsampled
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.runtime.errors import BlankMapWarning
from pytorch_grad_cam_pcasvm.runtime.pictures import HEAT
from pytorch_grad_cam_pcasvm.targets import (
    HotellingTarget,
    LogRatioTarget,
    PCATarget,
    ProbabilityTarget,
    QuadraticTarget,
    ScoreTarget,
    SVMTarget,
)
from pytorch_grad_cam_pcasvm.targets.places import place_in_words, region_of, selection_of

GAP = 0.07  # between pictures, in inches
IMAGE_WEIGHT = 0.45
_FAINT = 0.1  # a map whose largest value is below this share of its scale says so
OUTLINE = "#ffe600"  # of places and true masks
_HALO = [withStroke(linewidth=3, foreground="black")]


@dataclass(frozen=True)
class Column:
    """One column of pictures: ``values`` (N, H, W) from 0 to ``top`` (N,), or from ``-top`` if ``signed``."""

    heading: str
    values: np.ndarray
    top: np.ndarray
    signed: bool = False


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
        self.title, self.group, self.k, self.signed = title, group, k, signed
        self.columns = list(self._columns(size))
        self.captions = [caption(group, k, row, classes) for row in range(len(group.maps))]
        self.longest = max(len(self.end(row)) for row in range(len(group.maps))) + self.signed
        # Formulas are not wrapped: their letters, without what makes them one.
        self.formula = max((len(re.sub(r"[$_{}]", "", text)) for text in self.captions if is_formula(text)), default=0)

    def _columns(self, size: Sequence[int]) -> Iterator[Column]:
        target, k = self.group.targets[self.k], self.k
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BlankMapWarning)  # the picture says so
            parts = self.group.positive(scale="none"), self.group.negative(scale="none")
        positive, negative = (upsampled(part[:, k : k + 1], size)[:, 0].cpu().numpy() for part in parts)
        nu = self.group.nu[:, k].cpu().numpy()
        name = heading(target, self.group.output)
        if self.signed:
            yield Column(name, positive - negative, nu, signed=True)
        elif isinstance(target, PCATarget):
            yield Column(name[:-1] + "^+$", positive, nu)
            yield Column(name[:-1] + "^-$", negative, nu)
        else:
            yield Column(name, positive, positive.max((1, 2)))

    def width(self, picture: float) -> float:
        """Return its width in inches."""
        beside = max(0.7, 0.32 + CHARACTER["small"] * self.longest)
        return max(len(self.columns) * (picture + GAP) + beside, CHARACTER["small"] * self.formula)

    def end(self, row: int) -> str:
        """Return where the scale of an image ends."""
        return number(float(self.columns[0].top[row]), float(self.group.log_scale[row, self.k]))

    def place(self, row: int, size: Sequence[int]) -> np.ndarray | None:
        """Return which pixels of an image the target is about, (H, W); None: it is about the whole of it."""
        target, output = self.group.targets[self.k], self.group.output
        if getattr(target, "at", None) is None or not isinstance(output, HeadOutput) or output.grid is None:
            return None
        selection = selection_of(target, output)
        every = torch.ones(1, len(output), selection.size, 1, device=output.device)
        mask = selection.put(every)[0, row, :, 0].unflatten(0, output.grid.shape).cpu().numpy()
        index = [np.arange(pixels) * positions // pixels for pixels, positions in zip(size, mask.shape, strict=True)]
        return mask[np.ix_(*index)]

    def is_blank(self, row: int) -> bool:
        """Return whether there is no gradient."""
        both = self.group.maps, self.group.opposite
        return not any(bool(maps[row, self.k].any()) for maps in both if maps is not None)


def draw_map(
    axis: Axes, picture: np.ndarray, block: Block, column: Column, row: int, overlay: bool, font: float
) -> None:
    """Draw the map of one image, and say why if there is nothing to see."""
    top = float(column.top[row])
    values = column.values[row] / (top or 1.0)
    if column.signed:
        draw_signed(axis, picture if overlay else None, values)
    elif overlay:
        axis.imshow(overlaid(picture, values))
    else:
        axis.imshow(values, cmap=HEAT, vmin=0, vmax=1)
    bare(axis)
    largest = np.abs(values).max()
    if largest < _FAINT:
        note = f"at most\n{np.ceil(100 * largest):.0f} % of $\\nu$" if largest else "all evidence\nhas the\nother sign"
        if block.is_blank(row):
            note = "no gradient"
        style: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "path_effects": _HALO}
        axis.text(0.5, 0.5, note, transform=axis.transAxes, fontsize=font, **style)
    if (place := block.place(row, values.shape)) is not None:
        axis.contour(place, [0.5], colors=OUTLINE, linewidths=1.2)


def overlaid(picture: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Return pytorch-grad-cam's overlay, with colours that mean the same in every picture.

    pytorch-grad-cam divides each overlay by its own largest value; an added white, hot row makes that value the same
    in all of them.
    """
    picture, heat = (np.concatenate([values, np.ones_like(values[:1])]) for values in (picture, heat))
    return show_cam_on_image(picture, heat, True, cv2.COLORMAP_INFERNO, IMAGE_WEIGHT)[:-1]


def heading(target: Any, output: Any) -> str:
    """Return what a target is, the same for all images."""
    if isinstance(target, PCATarget):
        return f"$P_{{{target.component + 1}}}$" if target.sign == "+" else f"$(-P_{{{target.component + 1}}})$"
    if isinstance(target, SVMTarget):
        decision = "margin" if target.versus is None else "decision"
        return decision if labels_of(output) is not None else "value"
    if isinstance(target, LogRatioTarget):
        return "log-ratio"
    if isinstance(target, ProbabilityTarget | ClassifierOutputSoftmaxTarget):
        return "probability"
    if isinstance(target, ScoreTarget | ClassifierOutputTarget):
        return "class score"
    if isinstance(target, QuadraticTarget):
        return f"${'-' if target.sign == '-' else ''}{'T^2' if isinstance(target, HotellingTarget) else 'Q'}$"
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
    return "custom target" if name == "<lambda>" else literal(name)


def caption(group: SignedMaps, k: int, row: int, classes: Sequence[Any] | None) -> str:
    """Return what a target is for this image, and its value."""
    target = group.targets[k]
    value = number(float(group.values[row, k]))
    where = place_in_words(target)
    if isinstance(target, PCATarget):
        return f"${'-' if target.sign == '-' else ''}p_{{{target.component + 1}}}$ = {value}{where}"
    if labels_of(group.output) is None:
        return (f"\N{MINUS SIGN} {value}" if getattr(target, "sign", "+") == "-" else value) + where
    words = subject(target, group.output, row, classes) + where
    return f"{words}: {value}" if words else value


def subject(target: Any, output: Any, row: int, classes: Sequence[Any] | None) -> str:
    """Return the class that a target speaks for in this image, and any class it speaks against; "" if unknown."""
    labels, of_svm = labels_of(output), isinstance(target, SVMTarget | LogRatioTarget | ProbabilityTarget)
    if labels is None or isinstance(target, PCATarget):
        return ""
    category, versus = getattr(target, "category", None), getattr(target, "versus", None)
    if isinstance(output, HeadOutput) and of_svm:
        category = _predicted(target, output, row) if category is None else category
    elif category is None and isinstance(target, ScoreTarget):
        category = int(_scores(output)[row].argmax())
    elif isinstance(category, int) and not of_svm:
        category = labels[category]
    category, versus = _plain(category), _plain(versus)
    if not isinstance(category, str | int | float):
        return ""
    names = classes if classes is not None and len(classes) == len(labels) else [_class(label) for label in labels]
    # Maps that were loaded have no head: which of the classes a label is, nobody knows.
    name_of = dict(zip(labels, names, strict=True)) if isinstance(output, HeadOutput) or not of_svm else {}
    words = ["against"] * (getattr(target, "sign", "+") == "-") + [str(name_of.get(category, _class(category)))]
    if versus is not None:
        several = [_plain(label) for label in versus] if isinstance(versus, tuple) else [versus]
        words.append("/ " + ", ".join(str(name_of.get(label, _class(label))) for label in several))
    return literal(" ".join(words))


def _predicted(target: Any, output: HeadOutput, row: int) -> Any:
    """Return the class that a target without a category is about in an image, or at most of its positions."""
    against_one = isinstance(target, SVMTarget | LogRatioTarget) and target.versus is not None
    if output.grid is None and not against_one:
        return output.labels()[row]
    region, size = output, 1  # type: Any, int
    if output.grid is not None:
        region = region_of(output, selection_of(target, output))
        size = region.size
    categories = target.unplaced.categories(region) if against_one else region.predicted()
    return output.head.classes_[int(categories[row * size])]  # type: ignore[index]


def labels_of(output: Any) -> list[Any] | None:
    """Return the labels of the classes: for an ordinary classifier their numbers, for a regressor None."""
    if isinstance(output, HeadOutput):
        return None if output.head.classes_ is None else output.head.classes_.tolist()
    scores = _scores(output)
    return list(range(scores.shape[1])) if isinstance(scores, Tensor) and scores.dim() == 2 else None


def _scores(output: Any) -> Any:
    """Return the scores in the output of a classifier: of transformers they are its logits."""
    return getattr(output, "logits", output)


def _class(label: Any) -> str:
    """Return a label so that nobody takes it for a value."""
    return label if isinstance(label, str) else f"class {label}"


def _plain(label: Any) -> Any:
    """Return a label as Python's own number or word."""
    return label.item() if hasattr(label, "item") else label
