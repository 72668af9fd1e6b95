"""The head: the fitted estimators behind the features, with their labels, their files and their support vectors."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import storage
from pytorch_grad_cam_pcasvm.head.convert import stages_of_head, steps_of
from pytorch_grad_cam_pcasvm.head.decisions import KernelSVM, SupportVectorEffect
from pytorch_grad_cam_pcasvm.head.fit_checks import Fit, check_variety, refuse_several, warn_of_order
from pytorch_grad_cam_pcasvm.head.resamples import Resamples
from pytorch_grad_cam_pcasvm.head.stack import HeadTrace, Stack
from pytorch_grad_cam_pcasvm.head.stage import Conditions, Stage
from pytorch_grad_cam_pcasvm.runtime.device import precision
from pytorch_grad_cam_pcasvm.runtime.errors import warn


class Head(Stack):
    """The fitted scikit-learn estimators after a backbone, in float64 (float32 if the device has no float64).

    The head computes *values*: ``values[0]`` are the features, and ``values[i]`` is the output of stage i - 1.
    ``component_position`` and ``decision_position`` are the positions of the components and the decision values in that
    list.

    Args:
        stages: the stages in order, with at least a reduction (PCA) or a decision; there may be one decision, at the
            end.

    Attributes:
        training_set: what is stored of the training images with the head, added by the command line's ``fit``:
            ``examples``, names and small pictures of the support vectors, shown on the page of an atlas;
            ``preparation``, how pictures were prepared; ``means`` of layers, near which contributions start.

    Raises:
        ValueError: there are no stages, nothing to explain, stages after a decision, or a decision on only one class.

    Example:
        >>> head = Head.of(make_pipeline(PCA(2), SVC()).fit(features, labels))
        >>> head.n_features, head.classes_.tolist()
        (8, ['cat', 'dog', 'elk'])
    """

    _fit = Fit(())  # of those made from stages, or read from a file

    def __init__(self, stages: Iterable[Stage]) -> None:
        super().__init__(stages)
        self.training_set = storage.TrainingSet()

    @property
    def normal(self) -> Any:
        """The class that is an absence, such as ``"good"``, as ``fit --normal`` stored it; None: not known."""
        return (self.training_set.preparation or {}).get("normal")

    @property
    def exif(self) -> bool:
        """Whether photos in folders are turned as their EXIF orientation says, as ``fit`` stored it.

        Heads of version 0.4, and those fitted in Python, say nothing: their photos stay as they are stored.
        """
        return bool((self.training_set.preparation or {}).get("exif"))

    @property
    def threshold(self) -> float | None:
        """The largest anomaly of a good photo, as ``fit`` stored it for heads of good parts alone; None: not known."""
        threshold = (self.training_set.preparation or {}).get("threshold")
        return None if threshold is None else float(threshold["score"])

    @property
    def resamples(self) -> Resamples | None:
        """Refits on bootstrap samples, which say how sure maps are; None: there are none. Set it to a list of heads.

        Example:
            >>> net.head.resamples = resample_heads(pipeline, features, labels, n=4)  # doctest: +SKIP
            >>> net.head.resamples = None
        """
        return self.training_set.resamples

    @resamples.setter
    def resamples(self, refits: Sequence[Any] | None) -> None:
        self.training_set.resamples = None if refits is None else Resamples.of(self, [Head.of(one) for one in refits])

    @classmethod
    def of(cls, fitted: Any, *, outputs: Sequence[Any] | None = None) -> "Head":
        """Return the head for a fitted estimator, pipeline, search or list of these, on the CPU (or a ``Head``).

        ``outputs`` gives names to several outputs, or to several labels per image, as in ``SVMTarget("oedema")``.
        Otherwise they are numbered from 0.

        Raises:
            NoClosedFormError: an estimator is not supported.
            ValueError: the training features are all alike, or the classifier knows only one class; the head does not
                have several outputs, or has another number of them.
        """
        head = fitted if isinstance(fitted, Head) else cls._convert(fitted)
        if outputs is not None:
            if head.vote is None or head.vote.about != "outputs":
                raise ValueError("the head has no outputs that could have names: its classes are those of its fit")
            if len(outputs) != head.vote.n_classes:
                raise ValueError(f"the head has {head.vote.n_classes} outputs, but got {len(outputs)} names")
            repeated = [name for place, name in enumerate(outputs) if name in outputs[:place]]
            if repeated:
                raise ValueError(f"two outputs are named {repeated[0]!r}: give each a name of its own")
            head.name_classes(list(outputs))
        return head

    @classmethod
    def _convert(cls, fitted: Any) -> "Head":
        refuse_several(fitted)
        steps = steps_of(fitted)
        varying = check_variety(steps)
        head = cls(stages_of_head(steps, varying))
        warn_of_order(steps)
        head._fit = Fit(fitted)
        return head

    @property
    def examples(self) -> dict[int, storage.Example]:
        """Training images that are stored with the head, by row: names and small pictures."""
        return self.training_set.examples

    @examples.setter
    def examples(self, examples: dict[int, storage.Example]) -> None:
        self.training_set.examples = examples

    def tell_of_fit(self, *, always: bool = False) -> None:
        """Warn, once or always, if an estimator has been refitted since: the head still has the earlier fit."""
        again = None if self._fit.told and not always else self._fit.fitted_again()
        if again is not None:
            self._fit.told = True
            warn(
                f"the {again} was fitted again, or replaced, after this network was made, which still explains the "
                "earlier fit: make another one, PCASVMNet(backbone, head, ...)",
                UserWarning,
            )

    def scores(self, trace: HeadTrace) -> Tensor:
        """Return the scores, shape (N, C): scikit-learn's ``decision_function``; without an SVM, the last output."""
        last = trace.values[-1]
        return last if self.vote is None else self.vote.scores(last)

    def labels(self, trace: HeadTrace) -> np.ndarray:
        """Return the predictions of the fitted estimator, shape (N,); without an SVM, the last output."""
        last = trace.values[-1].detach()
        if self.vote is None:
            return last.cpu().numpy()
        if self.vote.about != "classes":
            return self.vote.prediction(last).cpu().numpy()
        return np.asarray(self.classes_)[self.vote.predicted(last).cpu().numpy()]

    def class_index(self, label: Any) -> int:
        """Return the position of a label in ``classes_``; raise a ValueError if it is not there."""
        if self.classes_ is None:
            raise ValueError(
                f"the head has no classes, so {label!r} is not one: use SVMTarget(), or SVMTarget(sign='-') for what "
                "lowers its value (for a one-class estimator: what makes an outlier)"
            )
        labels = self.classes_.tolist()
        label = label.item() if isinstance(label, np.generic | Tensor) else label
        if label not in labels:
            raise ValueError(f"{label!r} is not a class of this head: choose one of {labels}")
        return labels.index(label)

    def digest(self) -> str:
        """Return a digest of everything that the head computes with; it is the same for a head loaded from a file.

        Raises:
            TypeError: a stage is not from this package.
        """
        return storage.digest_stages(self.stages)

    def starts_as(self, other: "Head", count: int) -> bool:
        """Return whether the first stages of two heads compute the same values to the last bit."""
        return storage.compute_same(list(self.stages)[:count], list(other.stages)[:count])

    def save(self, path: str | PathLike[str]) -> None:
        """Write the head to a file: safetensors with a JSON header, no pickle.

        Raises:
            TypeError: a stage is not from this package.
            FileNotFoundError: the folder does not exist.

        Example:
            >>> net.head.save("head.safetensors")
            >>> net = PCASVMNet(backbone, Head.load("head.safetensors")).eval()
        """
        self.tell_of_fit(always=True)
        storage.save(self.stages, path, self.training_set)

    @classmethod
    def load(cls, path: str | PathLike[str], trusted: Sequence[str] = ()) -> "Head":
        """Return the head from a file written by ``save``, on the CPU, bit for bit; no fitted estimator is needed.

        That of a model is read from its file, too.

        Estimators without a gradient are in the file: they need skops and their library.

        Args:
            path: the file.
            trusted: types of estimators without a gradient that may be read, and so run, besides those of
                scikit-learn, XGBoost, LightGBM and CatBoost, such as ``"module.Class"``.

        Raises:
            ValueError: the file is truncated, was modified, does not contain a head, or has types that are not trusted.
            FileNotFoundError: the file does not exist.
            ModuleNotFoundError: skops is needed, and not installed.
        """
        stages, training_set, _ = storage.load(path, trusted)
        return cls.restore(stages, training_set)

    @classmethod
    def restore(cls, stages: Iterable[Stage], training_set: storage.TrainingSet) -> "Head":
        """Return a head of what was read from a file.

        Args:
            stages: of the head.
            training_set: what is known of its training images; its resampled heads are still lists of stages.

        Raises:
            ValueError: there are no stages; or the resampled heads have other features or classes.
        """
        head, refits = cls(stages), training_set.resamples
        head.training_set = replace(training_set, resamples=None)
        head.resamples = refits
        return head

    def get_extra_state(self) -> Tensor:
        """Return the parts of a state dict that are no tensors (kernels, calibrations, class labels), as bytes."""
        # A tensor, since people clone, move and save whatever they find in a state dict.
        return torch.tensor(list(storage.constants(self.stages).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise a ValueError for the state of a head whose tensors would mean something else here."""
        if not storage.agree(bytes(state.tolist()).decode(), storage.constants(self.stages)):
            raise ValueError(
                "the state is that of a head with another kernel, calibration or other classes: transfer the whole "
                "head with head.save(path) and Head.load(path)"
            )

    def support_vector_effect(
        self, components: Tensor, category: Any = None, versus: Any = None
    ) -> SupportVectorEffect:
        """Return how strongly each support vector affects the SVM's maps: which training images drive a decision.

        The effect is the size of a support vector's part in the *gradient* (see :class:`SupportVectorEffect`): in an
        RBF SVM, a training image equal to the explained one has none. Its part in the value itself is in ``decision``.
        Both have one row for a category; otherwise, one for each of the P decision values.

        Args:
            components: p, shape (N, B), as in ``output.components``; without a reduction ``output.features``, (N, D).
            category: a label from ``classes_``: the effect on its margin; None: on every decision value.
            versus: another label: the effect on the decision of ``category`` against it.

        Raises:
            TypeError: the components are not a tensor.
            ValueError: the head does not end with a kernel SVM, the components have the wrong shape, or the class is
                unknown.
        """
        machine = self.stages[-1]
        if not isinstance(machine, KernelSVM):
            inside = any(isinstance(module, KernelSVM) for module in self.modules())
            why = "they are inside a meta-estimator, use Head.of() on its fitted estimators"
            raise ValueError(
                f"the head has no support vectors of its own: {why if inside else 'it ends with no SVC, NuSVC or SVR'}"
            )
        position = self.component_position or 0
        width = self.stages[position].n_inputs
        expected = f"net(x).{'components' if position else 'features'}, of shape (N, {width})"
        if not isinstance(components, Tensor):
            raise TypeError(f"expected the tensor {expected}, got {type(components).__name__}")
        if components.dim() != 2 or components.shape[1] != width:
            raise ValueError(f"expected {expected}, got {tuple(components.shape)}")
        if category is None and versus is not None:
            raise ValueError("versus needs a category: name the class to compare with it")
        x = components.detach().to(precision(components.device))
        for stage in self.stages[position:-1]:
            x = stage(x)
        if category is None:
            return machine.effect(x)
        first = torch.tensor([self.class_index(category)], device=x.device)
        second = None if versus is None else torch.full_like(first, self.class_index(versus))
        return machine.effect(x, machine.voting.seed(first, second))

    def why_blank(self, trace: HeadTrace, seed: Tensor) -> str | None:
        """Return why a row of a trace has a blank map, by the seed of its decision values; None: it is unknown."""
        place = len(self.stages) - 1
        errors = self.errors(trace, place)
        conditions = Conditions(trace.eps, None if errors is None else lambda: errors.unsqueeze(0))
        last: Stage = self.stages[place]
        return last.why_blank(trace.values[place].unsqueeze(0), seed.reshape(1, 1, -1), conditions)
