"""Photos: a head of patches is fitted on them, and scores them where they are left out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST = 500  # photos of which all pixels are compared


@dataclass
class Photos:
    """The photos that a head of patches is fitted on.

    Attributes:
        numbers: in the folder, of those that can be read, in order, (N,).
        labels: the class of each, (N,).
        objects: the number of the object of each photo of the folder; None: they all differ.
        normal: the class of good photos.
        folds: the numbers of the photos to fit on, and of those left out; empty: there are too few.
    """

    numbers: Any
    labels: Any
    objects: Any
    normal: Any
    folds: Sequence[Any]

    @classmethod
    def split(cls, numbers: Any, labels: Any, objects: Any, normal: Any) -> "Photos":
        """Return them with folds, having said if there are none."""
        from pytorch_grad_cam_pcasvm.model.choices import split_folds

        try:
            parts = split_folds(labels, None if objects is None else objects[numbers])
        except ValueError:
            print("no cross-validation: it needs two photos of each class" + " and object" * (objects is not None))
            parts = []
        return cls(numbers, labels, objects, normal, [(numbers[fit], numbers[test]) for fit, test in parts])

    def index(self, numbers: Any) -> Any:
        """Return the places of photos among these, by their numbers in the folder."""
        import numpy as np

        return np.searchsorted(self.numbers, numbers)

    def number_labels(self) -> Any:
        """Return the labels as numbers from 0 on, (N,)."""
        import numpy as np

        return np.unique(self.labels, return_inverse=True)[1]

    def name_objects(self, numbers: Any) -> Any:
        """Return the numbers of the objects of photos."""
        return numbers if self.objects is None else self.objects[numbers]


@dataclass
class LeftOut:
    """What heads say of photos that they were fitted without.

    Attributes:
        photos: all of them.
        rate: of false alarms.
        masks: their masks and how these are resized, a :class:`.PatchOptions`; None: there are none.
        size: (H, W) of the network's input, of masks.
        evidence: of any fault, the largest of each photo, by its number.
    """

    photos: Photos
    rate: float
    masks: Any = None
    size: tuple[int, ...] = ()
    evidence: dict[int, float] = field(default_factory=dict)
    _maps: list[Any] = field(default_factory=list)
    _truths: list[Any] = field(default_factory=list)

    def score(self, read: Any, heads: Sequence[Any], spread: Any) -> None:
        """Ask the head of each fold about all positions of the photos that it was fitted without.

        Args:
            read: yields the features of all photos.
            heads: of each fold; None: there is none.
            spread: takes evidence, (1, 1, *grid), to the size of the network's input.
        """
        import numpy as np

        from pytorch_grad_cam_pcasvm.model.patch_heads import score_left_out

        some = set(np.random.default_rng(0).permutation(self.photos.numbers)[:_MOST].tolist())

        def keep(photo: int, evidence: Any) -> None:
            self.evidence[photo] = float(evidence.max())
            if self.masks is not None and photo in some:
                self._maps.append(spread(evidence[None, None], self.size)[0, 0].float().numpy())
                self._truths.append(self.masks.find_faults(photo, self.size))

        score_left_out(read, heads, self.photos.folds, self.photos.normal, keep)

    def tell(self, unit: str) -> dict[str, Any]:
        """Say how well photos are told, and pixels where there are masks; return it as a model's file holds it."""
        import numpy as np

        if not self.evidence:
            if self.photos.folds:
                print("no cross-validation: it needs patches of each class in two photos or more")
            return {}
        areas = self.measure_folds(self.evidence)
        mean, error = float(np.nanmean(areas)), measure_error(areas)
        words = f"AUROC of photos {mean:.3f} \N{PLUS-MINUS SIGN} {error:.3f}"
        score: dict[str, Any] = {"image_auroc": mean, "error": error, "folds": len(self.photos.folds)}
        found = None
        truths = np.stack(self._truths) if self._truths else np.zeros(0, bool)
        if truths.any() and not truths.all():
            from pytorch_grad_cam_pcasvm.evaluation import pixel_scores

            scores = pixel_scores(np.stack(self._maps), truths, rate=self.rate)
            words += f", of pixels {scores.auroc.mean:.3f}, AUPRO {scores.aupro.mean:.3f}"
            score |= {"pixel_auroc": scores.auroc.mean, "aupro": scores.aupro.mean}
            found = scores.found
        print(f"{len(self.photos.folds)}-fold cross-validation, by {unit}: {words}")
        if found is not None:
            print(f"{found.describe()}")
        return {"score": score}

    def measure_folds(self, evidence: Any) -> Any:
        """Return the AUROC of the photos of each fold, by the evidence for any fault; NaN: it has one kind only."""
        import numpy as np
        from sklearn.metrics import roc_auc_score

        areas = []
        for _, test in self.photos.folds:
            faulty = self.photos.labels[self.photos.index(test)] != self.photos.normal
            known = all(photo in evidence for photo in test.tolist()) and 0 < faulty.sum() < len(faulty)
            areas.append(roc_auc_score(faulty, [evidence[photo] for photo in test.tolist()]) if known else np.nan)
        return np.array(areas)


def measure_error(values: Any) -> float:
    """Return the standard error of the mean of the known values."""
    import numpy as np

    known = values[~np.isnan(values)]
    return float(known.std(ddof=1) / np.sqrt(len(known))) if len(known) > 1 else float("nan")


def compare_areas(first: Any, second: Any) -> tuple[float, float]:
    """Return by how much the first areas of folds are larger than the second, and the standard error of that."""
    import numpy as np

    return float(np.nanmean(first - second)), measure_error(first - second)
