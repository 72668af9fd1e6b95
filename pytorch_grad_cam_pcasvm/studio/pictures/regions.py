"""Regions of a photo that an explanation points at, at the photo's own size."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from pytorch_grad_cam_pcasvm.studio.pictures.answers import Answers
from pytorch_grad_cam_pcasvm.studio.pictures.panels import place_values

ANOMALY = "anomaly"  # the class of what is beyond the threshold
_LEAST = 0.5  # of the largest evidence, where nothing says what is sure
_KINDS = ("log-ratio of ", "probability of ")


@dataclass(frozen=True)
class Marks:
    """What is marked on a photo.

    Attributes:
        numbers: of the class of each pixel, shape (H, W); those without a name are not marked.
        names: of the classes, by number.
        values: a number for each pixel, shape (H, W): its anomaly, the margin of its class, or evidence.
        is_sure: whether it is known which evidence is sure; None: it is not asked.
    """

    numbers: np.ndarray
    names: dict[int, str]
    values: np.ndarray
    is_sure: bool | None = None


def refuse_marks(about: dict[str, Any]) -> None:
    """Refuse to mark regions where nothing says where one ends.

    Args:
        about: what :class:`.Answers` are made of.

    Raises:
        ValueError: nothing does.
    """
    is_dense = "heat" in about
    if is_dense and not ("threshold" in about or about["classes"]):
        raise ValueError(
            "--regions takes what is beyond the threshold, and this model has none: fit one on good photos, 'fit "
            "photos/good', which chooses it, or set model.threshold in Python"
        )
    if not is_dense and Answers(about).decision is None:
        raise ValueError(
            "--regions takes the evidence for a decision, and this head has components alone: fit one that decides, "
            "such as --classifier svm"
        )


def mark_regions(
    answers: Answers, outputs: dict[str, np.ndarray], row: int, size: tuple[int, int], frame: Any
) -> Marks:
    """Return what is marked on a photo: what is beyond the threshold, has a class, or is evidence for the decision.

    Args:
        answers: of the explanation.
        outputs: the outputs.
        row: which of their images it is.
        size: width and height of the photo.
        frame: the part of it that the network saw, see :func:`find_frame`.
    """
    if "heat" not in answers.about:
        return _mark_evidence(answers, outputs, row, size, frame)
    if "threshold" in answers.about:
        values = _enlarge(outputs["anomaly"][row], size, frame)
        return Marks(values > answers.about["threshold"], {1: ANOMALY}, values)
    return _mark_classes(answers, outputs, row, size, frame)


def _enlarge(values: np.ndarray, size: tuple[int, int], frame: Any, how: Any = Image.Resampling.BILINEAR) -> np.ndarray:
    """Return numbers (h, w) at the size of a photo, as sheets draw them; NaN where there are none."""
    return place_values(values.astype(np.float32), size, frame, how, np.nan)


def _mark_classes(
    answers: Answers, outputs: dict[str, np.ndarray], row: int, size: tuple[int, int], frame: Any
) -> Marks:
    """Return the classes at every position but absences, with their evidence, or else their scores."""
    about, labels, scores = answers.about, outputs["label"][row].astype(int), outputs["scores"][row]
    names = {n: str(name) for n, name in enumerate(about["classes"], 1) if name not in about.get("absent", ())}
    # Scores of a decision of two classes, or of those of pairs, are no class's own.
    own = len(scores) == len(about["classes"])
    values = np.take_along_axis(scores, labels[None], 0)[0] if own else np.abs(scores).max(0)
    for place, k in enumerate(about.get("strongest", ()) if "evidence" in outputs else ()):
        name = _strip_kind(about["titles"][k]).removesuffix(" where strongest").split(" / ")[0]
        number = next((number for number, other in names.items() if other == name), None)
        values = values if number is None else np.where(labels + 1 == number, outputs["evidence"][row, place], values)
    nearest = Image.Resampling.NEAREST
    numbers = np.nan_to_num(_enlarge(labels + 1, size, frame, nearest)).astype(int)
    return Marks(numbers, names, _enlarge(values, size, frame, nearest))


def _mark_evidence(
    answers: Answers, outputs: dict[str, np.ndarray], row: int, size: tuple[int, int], frame: Any
) -> Marks:
    """Return the sure evidence for the decision, if it is made; where nothing says what is sure, the strongest."""
    k = answers.decision
    assert k is not None
    is_sure = "sure" in outputs and "opposite" not in outputs
    values = np.nan_to_num(_enlarge(answers.signed_map(outputs, row, k), size, frame))
    marked = values > 0
    if is_sure:
        marked &= _enlarge(outputs["sure"][row, k], size, frame, Image.Resampling.NEAREST) > 0
    else:
        marked &= values >= _LEAST * values.max()
    if answers.passes(outputs, row) or (_turns_at_zero(answers, k) and outputs["values"][row, k] <= 0):
        marked = np.zeros_like(marked)  # what is evidence against the decision
    scale = outputs["nu"][row, k] * np.exp(outputs["log_scale"][row, k])
    return Marks(marked, {1: _name_evidence(answers, outputs, row, k)}, values * scale, is_sure)


def _turns_at_zero(answers: Answers, k: int) -> bool:
    meanings = answers.about.get("meanings")
    return meanings is not None and "above 0" in meanings[k]


def _name_evidence(answers: Answers, outputs: dict[str, np.ndarray], row: int, k: int) -> str:
    """Return the class that a target speaks for: the one of its title, or against another one what is predicted."""
    words = _strip_kind(answers.about["titles"][k])
    if words.startswith("predicted class"):
        return str(answers.predicted(outputs, row))
    names = [str(name) for name in answers.about["classes"] or ()]
    if (against := re.fullmatch(r"against (.*)", words)) is None or against[1] not in names:
        return str(words.removeprefix("for ").split(" / ")[0])
    others = [name for name in names if name != against[1]]
    predicted = str(answers.predicted(outputs, row))
    return predicted if predicted in others else others[0] if len(others) == 1 else f"not {against[1]}"


def _strip_kind(title: str) -> str:
    """Return a title without the kind of its value."""
    return title.removeprefix(_KINDS[0]).removeprefix(_KINDS[1])
