"""A backbone and its fitted head as one network: image to scores."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.features import checked_images, features_of
from pytorch_grad_cam_pcasvm.head.head import Head
from pytorch_grad_cam_pcasvm.modules import device_of, evaluating, layer_name, uncompiled


class HeadOutput(Tensor):
    """The scores of a :class:`PCASVMNet`, shape (N, C), with what else the head computed on the way.

    Iteration and integer indexing give rows (shape (C,)) that keep their own extras, so that a target can be called
    on a row or on the batch; every other operation gives a plain tensor.

    Attributes:
        head: the head that computed it.
        levels: the values of the head: features, then the output of every stage, each of shape (N, ...), rows (...).
    """

    head: Head
    levels: list[Tensor]

    @staticmethod
    def of(head: Head, values: list[Tensor]) -> "HeadOutput":
        """Return the output for values as ``head`` computes them.

        Args:
            head: the head.
            values: features (N, D) and the output of every stage, or one row of each.

        Returns:
            The scores with their extras.
        """
        return HeadOutput._with(head.scores(values), head, values)

    @staticmethod
    def _with(scores: Tensor, head: Head, values: list[Tensor]) -> "HeadOutput":
        output = scores.as_subclass(HeadOutput)
        output.head, output.levels = head, values
        return output

    @property
    def features(self) -> Tensor:
        """The features q, shape (N, D), in the head's precision."""
        return self.levels[0]

    @property
    def components(self) -> Tensor | None:
        """The components p, shape (N, B), or None without a reduction."""
        return None if self.head.component_level is None else self.levels[self.head.component_level]

    @property
    def decision(self) -> Tensor | None:
        """The decision values, shape (N, P), or None without an SVM."""
        return None if self.head.decision_level is None else self.levels[self.head.decision_level]

    @property
    def margins(self) -> Tensor | None:
        """What is explained of each class, shape (N, C), or None without an SVM.

        For one-vs-one the sum of a class's signed pairwise decisions, otherwise the scores.
        """
        return None if self.decision is None else self.head.voting.margins(self.decision)

    def rows(self, index: Any) -> "HeadOutput":
        """Return some rows, with their extras."""
        with torch._C.DisableTorchFunctionSubclass():
            return HeadOutput._with(Tensor.__getitem__(self, index), self.head, [value[index] for value in self.levels])

    def __getitem__(self, index: Any) -> Tensor:
        """Return one row with its extras for an integer, otherwise a plain tensor."""
        if isinstance(index, int | np.integer) and self.dim() == 2:
            return self.rows(int(index))
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the rows, each with its extras."""
        return (self[index] for index in range(len(self)))

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give plain tensors for every operation."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, HeadOutput):  # .cpu() where there is nothing to do
                result = result.as_subclass(Tensor)
        if func in _SOFTMAX and args and isinstance(args[0], HeadOutput):
            # The host's SESS calls target(softmax(output)); a component or a margin of that is still the row's own.
            result.head, result.levels = args[0].head, args[0].levels
        return result


_SOFTMAX = {torch.softmax, Tensor.softmax, nn.functional.softmax}


class PCASVMNet(nn.Module):
    """A torch backbone and the scikit-learn estimators fitted on its features, as one differentiable network.

    The backbone's modules are used, not copied: ``target_layers=[backbone.layer4[-1]]`` works, and what follows
    ``layer`` is not run. ``torch.compile(net)`` gives the same scores.

    Args:
        backbone: the network that the features came from. Of a compiled one, what was compiled: hooks, layers and maps
            need the modules themselves.
        head: a fitted estimator, a ``Pipeline``, a search object (its ``best_estimator_``), a list of fitted
            estimators in order, or a :class:`Head`.
        layer: dotted name of a module of the backbone, or the module itself, whose output, flattened from dim 1, is
            what the head was fitted on; None: the backbone's own output.

    Raises:
        TypeError: the backbone is not a module, or the head not made of estimators.
        ValueError: the backbone has no such layer, or the head is empty.
        NotFittedError: an estimator is not fitted.
        NoClosedFormError: an estimator has no closed-form Jacobian.
    """

    def __init__(self, backbone: nn.Module, head: Any, layer: str | nn.Module | None = None) -> None:
        super().__init__()
        if not isinstance(backbone, nn.Module):
            raise TypeError(f"the backbone must be a torch.nn.Module, got {type(backbone).__name__}")
        self.backbone = uncompiled(backbone)
        self.head = Head.of(head).to(device_of(backbone))
        self.layer = layer_name(self.backbone, layer)

    def forward(self, x: Tensor) -> HeadOutput:
        """Return the scores of a batch.

        Args:
            x: input, shape (N, ...).

        Returns:
            Scores, shape (N, C), float64: scikit-learn's ``decision_function`` (two classes: columns [-a, a]). Of a
            head without a classifier, the output of its last stage: the components, shape (N, B).
        """
        return HeadOutput.of(self.head, self.head(features_of(self.backbone, self.layer, x)))

    def predict(self, x: Tensor) -> np.ndarray:
        """Return the labels of a batch, as ``head.predict`` gives them (components without a classifier).

        Args:
            x: input, shape (N, ...).

        Returns:
            Labels, shape (N,), of the dtype of ``classes_``.

        Raises:
            TypeError: the input is no floating-point tensor.
            ValueError: it is no batch, or has NaN or infinite values.
        """
        x = checked_images(x)
        with evaluating(self.backbone), torch.no_grad():
            values = self.head(features_of(self.backbone, self.layer, x))
        return self.head.labels(values)
