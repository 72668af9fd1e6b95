"""The outputs of an explanation in words: predictions, judgements, titles and values."""

from dataclasses import dataclass
from typing import Any

import numpy as np

BACKGROUND = "background"  # the class outside of masks
MISSED, FALSE_ALARM = "missed", "false alarm"
_MUCH = 0.1  # of an anomaly, by one component
EXPRESSED = 0.95  # of the variance of good photos, by their first components
MOVED = "other training photos might decide otherwise"  # what is open, in words


@dataclass
class Judgement:
    """What is decided of a photo, and whether that is right.

    Attributes:
        label: the predicted class; None: there are no classes.
        truth: the class that it is labelled; None: not known.
        right: whether they are the same; None: not known, or not of the whole image.
        passes: whether it is as good parts are; None: there is no threshold.
        anomaly: how unlike good parts it is, or None.
        outcome: that its fault is missed, or that it raises a false alarm; None: neither, or not known.
        is_good: whether it is labelled a good one; None: not known.
        seems_good: whether it is taken for a good one; None: not known.
        open: whether the decision's value is not two of its standard errors from 0, so that it is neither right nor
            wrong.
    """

    label: Any = None
    truth: Any = None
    right: bool | None = None
    passes: bool | None = None
    anomaly: float | None = None
    outcome: str | None = None
    is_good: bool | None = None
    seems_good: bool | None = None
    open: bool = False

    @property
    def is_compared(self) -> bool:
        """Whether both its label and the decision say if it is a good one."""
        return self.is_good is not None and self.seems_good is not None

    @property
    def is_of_other_classes(self) -> bool:
        """Whether it is labelled a class that the model, which predicts one for a photo, does not have."""
        compared = self.is_compared or self.open
        return self.label is not None and self.truth is not None and self.right is None and not compared


def write_error(value: float, error: float) -> str:
    """Return a value and its standard error in words, both to the place that the error leaves; NaN: it is not stable.

    Example:
        >>> write_error(3.8123, 0.934)
        '3.8 ± 0.9'
    """
    if not np.isfinite(error):
        return f"{value:.3g} (not stable)"
    digits = 2 if f"{error:e}".startswith("1") else 1
    places = max(0, digits - 1 - int(f"{error:.{digits - 1}e}".split("e")[1]))
    if not 0 < error < 1e4 or places > 4:
        return f"{value:.3g} ± {error:.2g}"
    return f"{round(value, places) + 0.0:.{places}f} ± {error:.{places}f}"


class Answers:
    """The outputs of an explanation in words: predictions, judgements, titles and values of images.

    Attributes:
        about: ``titles`` of the targets, ``classes`` or None, and ``colours`` of maps from -1 to 1. Of dense features
            also ``label_colours``, ``absent``, the classes that have none, ``heat``, the colours of anomalies, and
            ``anomaly_range``, where these start and end; what a photo has beyond that moves its own. And ``threshold``,
            the largest anomaly with which a photo passes, where it is known. ``meanings``, which later files have, are
            what the targets' values are, with ``{}`` for the number, and ``anomaly`` what anomalies are; ``strongest``
            the numbers of the targets that are about the strongest position, ``usual`` the anomaly that nearly all good
            patches stay below, and ``normal`` the class that is an absence. Of a PCA's distance ``expressing`` is how
            many components have 95 % of the variance of good photos, and ``usually_outside`` which part of the anomaly
            of good photos that were left out is outside of these, or None.
        good: the label of good photos, if the head does not know it; None: not known.
    """

    good: Any = None

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about

    def predicted(self, outputs: dict[str, np.ndarray], row: int = 0) -> Any:
        """Return the predicted class of an image, or None if there are no classes; of dense features the commonest."""
        if "label" not in outputs or not self.about["classes"]:
            return None
        return self.about["classes"][int(np.bincount(np.ravel(outputs["label"][row]).astype(int)).argmax())]

    def right(self, outputs: dict[str, np.ndarray], row: int, truth: Any) -> bool | None:
        """Return whether the prediction is an image's label; None: not known, or not of the whole image."""
        label = self.predicted(outputs, row)
        if label is None or self.shares(outputs, row) or str(truth) not in map(str, self.about["classes"]):
            return None
        return str(label) == str(truth)

    def passes(self, outputs: dict[str, np.ndarray], row: int = 0) -> bool | None:
        """Return whether an image is as good parts are: its anomaly is up to the threshold; None: there is none."""
        threshold = self.about.get("threshold")
        return None if threshold is None or "anomaly" not in outputs else self.anomaly(outputs, row) <= threshold

    def is_good(self, truth: Any) -> bool | None:
        """Return whether a photo with a label is a good one; None: not known."""
        good = self.about.get("normal", self.good)
        if good == BACKGROUND and "absent" in self.about:  # the class of positions outside of masks, not of photos
            good = self.good
        return None if truth is None or good is None else str(truth) == str(good)

    def outcome(self, outputs: dict[str, np.ndarray], row: int, truth: Any) -> str | None:
        """Return how an image is mistaken: a fault is missed, or a good photo raises a false alarm; None: neither."""
        seems_good, good = self._seems_good(outputs, row, truth), self.is_good(truth)
        if seems_good is None or good is None or seems_good == good:
            return None
        return MISSED if seems_good else FALSE_ALARM

    def _seems_good(self, outputs: dict[str, np.ndarray], row: int, truth: Any) -> bool | None:
        """Return whether an image is taken for a good one; None: not known.

        It is if it passes; without a threshold, if each of its positions is of a class that is an absence, or if it is
        predicted to be one.
        """
        passes, shares, absent = self.passes(outputs, row), self.shares(outputs, row), self.about.get("absent")
        if passes is not None:
            return passes
        if shares and absent:
            return all(name in absent for name, share in shares.items() if share)
        return None if self.right(outputs, row, truth) is None else self.is_good(self.predicted(outputs, row))

    def judge(self, outputs: dict[str, np.ndarray], row: int = 0, truth: Any = None) -> Judgement:
        """Return the decisions about an image, and whether they are right."""
        is_open = self.is_open(outputs, row)
        return Judgement(
            label=self.predicted(outputs, row),
            truth=truth,
            right=None if is_open else self.right(outputs, row, truth),
            passes=self.passes(outputs, row),
            anomaly=self.anomaly(outputs, row) if "anomaly" in outputs else None,
            outcome=None if is_open else self.outcome(outputs, row, truth),
            is_good=self.is_good(truth),
            seems_good=None if is_open else self._seems_good(outputs, row, truth),
            open=is_open,
        )

    @property
    def decision(self) -> int | None:
        """The number of the first target that is no component; None: all are."""
        return next((k for k, title in enumerate(self.about["titles"]) if not title.startswith("component ")), None)

    def is_open(self, outputs: dict[str, np.ndarray], row: int = 0) -> bool:
        """Return whether the decision for a class, which turns at 0, is not two standard errors from there."""
        k, classes, normal = self.decision, self.about["classes"] or (), self.about.get("normal")
        if k is None or "values_error" not in outputs or self.passes(outputs, row) is not None:
            return False
        if self.shares(outputs, row) or "above 0" not in self.about.get("meanings", [""] * (k + 1))[k]:
            return False
        # Between two of several classes, the value may turn while a third one is far ahead.
        whole = "predicted class", f"against {normal}", f"for {normal}"
        if len(classes) < 2 or (len(classes) > 2 and not self.about["titles"][k].endswith(whole)):
            return False
        return bool(abs(outputs["values"][row, k]) < 2 * outputs["values_error"][row, k])

    def signed_map(self, outputs: dict[str, np.ndarray], row: int, k: int) -> np.ndarray:
        """Return the map of a target in [-1, 1]: above 0 it speaks for the target, below 0 against it."""
        signed = outputs["maps"][row, k]
        if "opposite" in outputs:  # the map's positive part speaks for the target, and this one's against it
            signed = np.maximum(signed, 0) - np.maximum(outputs["opposite"][row, k], 0)
        return signed / (outputs["nu"][row, k] or 1.0)

    def sure_share(self, outputs: dict[str, np.ndarray], row: int = 0, k: int | None = None) -> float | None:
        """Return which share of the evidence on a map, by default the decision's, is sure; None: it is not known."""
        k = self.decision if k is None else k
        if k is None or "sure" not in outputs or "opposite" in outputs:
            return None
        size = np.abs(outputs["maps"][row, k])
        return float(size[outputs["sure"][row, k]].sum() / size.sum()) if size.any() else None

    def anomaly(self, outputs: dict[str, np.ndarray], row: int = 0) -> float:
        """Return how unlike good parts an image is: the highest anomaly of its positions."""
        return float(np.max(outputs["anomaly"][row]))

    def strongest(self, outputs: dict[str, np.ndarray], row: int = 0) -> list[tuple[int, int]]:
        """Return the row and column of the position that each target explains that is about the strongest one."""
        if "evidence" not in outputs or outputs["evidence"].ndim != 4:
            return []
        numbers = outputs["evidence"][row]
        places, width = numbers.reshape(len(numbers), -1).argmax(1), numbers.shape[2]
        return [(int(place) // width, int(place) % width) for place in places]

    def shares(self, outputs: dict[str, np.ndarray], row: int = 0) -> dict[Any, float]:
        """Return the part of an image's positions that is of each class; {} if the head decides once for the image."""
        if "label" not in outputs or not self.about["classes"] or outputs["label"].ndim == 1:
            return {}
        labels = np.ravel(outputs["label"][row]).astype(int)
        return {name: float((labels == number).mean()) for number, name in enumerate(self.about["classes"])}

    def titles(self, outputs: dict[str, np.ndarray], row: int = 0) -> list[str]:
        """Return the titles of the maps of an image."""
        label = self.predicted(outputs, row)
        return [title.replace("predicted class", f"{label} (predicted)") for title in self.about["titles"]]

    def outside_share(self, outputs: dict[str, np.ndarray], row: int = 0) -> float | None:
        """Return which part of an image's anomaly lies outside of what good photos have; None: it is not known."""
        if "parts" not in outputs or "expressing" not in self.about:
            return None
        parts = outputs["parts"][row].astype(np.float64)
        return float(parts[self.about["expressing"] :].sum() / parts.sum()) if parts.any() else None

    def reason(self, outputs: dict[str, np.ndarray], row: int = 0) -> str:
        """Return why an image is anomalous, in words: by what good photos do not have, or by which of their components.

        Empty: it is not known.
        """
        share = self.outside_share(outputs, row)
        if share is None:
            return ""
        parts, count = outputs["parts"][row], self.about["expressing"]
        largest = int(np.argmax(parts[:count]))
        part = float(parts[largest] / parts.sum())
        most = f"component {largest + 1} alone adds {part:.0%}" if part >= _MUCH else "no component alone adds a tenth"
        usual = self.about["usually_outside"]
        beside = "" if usual is None else f" (of other good photos {usual:.0%})"
        return f"{share:.0%} of the anomaly is outside of the {count} main components of good photos{beside}; {most}"

    def unlike(self, outputs: dict[str, np.ndarray], row: int = 0) -> str:
        """Say that an image is unlike the training set; empty: it is not, or nothing tells."""
        outside = float(outputs["outside"][row]) if "outside" in outputs else 0.0
        if outside <= 1:
            return ""
        return f"unlike the training pictures: do not trust this decision ({outside:.2f} times the limit)"

    def said(self, outputs: dict[str, np.ndarray], row: int, k: int) -> str:
        """Return the value of a target in words: its meaning, the number, and its limits."""
        start = outputs["baseline_values"][row, k] if "baseline_values" in outputs else 0.0
        # Of maps that add up, less is rounding.
        least = 1e-4 * max(abs(start), outputs["nu"][row, k]) if "baseline_values" in outputs else 0.0
        value = outputs["values"][row, k] if abs(outputs["values"][row, k]) > least else 0
        meaning = self.about["meanings"][k] if "meanings" in self.about else "value {}"
        error = outputs["values_error"][row, k] if "values_error" in outputs else None
        meaning = meaning.replace("{}", f"{value:.3g}" if error is None else write_error(value, error), 1)
        if "predicted class" in meaning:
            meaning = meaning.replace("predicted class", str(self.predicted(outputs, row)))
        return meaning
