"""A backbone and its fitted head as one network, from image to scores."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.stack import HeadTrace
from pytorch_grad_cam_pcasvm.network.features import (
    FeatureSource,
    Layer,
    ask_anew,
    check_rows,
    check_tensor,
    checked_images,
    features_of,
)
from pytorch_grad_cam_pcasvm.network.inputs import inputs_of
from pytorch_grad_cam_pcasvm.network.modules import device_of, evaluating, network_of, refuse_parallel, uncompiled
from pytorch_grad_cam_pcasvm.runtime.arguments import Named
from pytorch_grad_cam_pcasvm.runtime.errors import warn


class OfHead:
    """The values that a head computed, and everything derived from them.

    Attributes:
        head: the head that computed it.
        head_trace: features, then the output of every stage, each of shape (N, ...), for rows (...).
    """

    head: Head
    head_trace: HeadTrace

    @property
    def count(self) -> int:
        """Number of rows N."""
        return self.head_trace.values[-1].shape[0]

    @property
    def features(self) -> Tensor:
        """The features q, shape (N, D), in the head's precision."""
        return self.head_trace.values[0]

    @property
    def components(self) -> Tensor | None:
        """The components p, shape (N, B), or None without a reduction."""
        position = self.head.component_position
        return None if position is None else self.head_trace.values[position]

    @property
    def decision(self) -> Tensor | None:
        """The decision values, shape (N, P), or None without an SVM."""
        position = self.head.decision_position
        return None if position is None else self.head_trace.values[position]

    @property
    def margins(self) -> Tensor | None:
        """The margin of each class, which maps explain, shape (N, C), or None without an SVM.

        For one-vs-one, it is the sum of a class's signed pairwise decisions; otherwise, it is the score.
        """
        return None if self.decision is None else self.head.voting.margins(self.decision)

    def labels(self) -> np.ndarray:
        """Return the fitted estimator's predictions for the rows, shape (N,), or a single label for one row."""
        if self.head_trace.values[-1].dim() == 1 and self.head.decision_position is not None:
            return self.head.labels(self.head_trace.rows(None))[0]
        return self.head.labels(self.head_trace)


@dataclass(eq=False)
class HeadRun(OfHead):
    """What a head computed for N images, for use by methods: without scores, which maps do not need."""

    head: Head
    head_trace: HeadTrace

    def __len__(self) -> int:
        return self.count

    @property
    def device(self) -> torch.device:
        """The device of all its tensors."""
        return self.head_trace.values[-1].device

    def rows(self, index: Any) -> "HeadRun":
        """Return some rows."""
        return HeadRun(self.head, self.head_trace.rows(index))

    def output(self) -> Any:
        """Return it with scores, as a network gives it; as it is for fake tensors, which can take no other class."""
        plain = type(self.head_trace.values[-1]) is Tensor
        return HeadOutput.of(self.head, self.head_trace) if plain else self


class HeadOutput(OfHead, Tensor):
    """The scores of a :class:`PCASVMNet`, shape (N, C), with everything else that the head computed.

    Iteration and integer indexing return rows, shape (C,), with the head's values for that row, so that a target can be
    called on a row or on the batch. Every other operation returns a plain tensor.

    Attributes:
        head: the head that computed it.
        head_trace: features, then the output of every stage, each of shape (N, ...), for rows (...).

    Example:
        >>> output = net(images)
        >>> output.features.shape, output.components.shape, output.margins.shape
        (torch.Size([2, 8]), torch.Size([2, 3]), torch.Size([2, 3]))
    """

    head: Head
    head_trace: HeadTrace

    @staticmethod
    def of(head: Head, trace: HeadTrace) -> "HeadOutput":
        """Return the output for a trace of ``head``, with N rows or just one."""
        return HeadOutput._with(head.scores(trace), head, trace)

    @staticmethod
    def _with(scores: Tensor, head: Head, trace: HeadTrace) -> "HeadOutput":
        output = scores.as_subclass(HeadOutput)
        output.head, output.head_trace = head, trace
        return output

    def rows(self, index: Any) -> "HeadOutput":
        """Return some rows, with the head's values for them."""
        with torch._C.DisableTorchFunctionSubclass():
            return HeadOutput._with(Tensor.__getitem__(self, index), self.head, self.head_trace.rows(index))

    @staticmethod
    def cat(outputs: Sequence["HeadOutput"]) -> "HeadOutput":
        """Return several outputs of one head as one, without the tensors that were saved for pullbacks."""
        values = [torch.cat(parts) for parts in zip(*(o.head_trace.values for o in outputs), strict=True)]
        return HeadOutput.of(outputs[0].head, HeadTrace(values, []))

    def moved(self, device: Any) -> "HeadOutput":
        """Return the output on another device; its head is not moved."""
        parts = (self.head_trace.values, self.head_trace.saved)
        trace = HeadTrace(*tree_map_only(Tensor, lambda tensor: tensor.to(device), parts))
        return HeadOutput._with(self.as_subclass(Tensor).to(device), self.head, trace)

    def __getitem__(self, index: Any) -> Tensor:
        """Return one row with the head's values for an integer, otherwise a plain tensor."""
        if isinstance(index, int | np.integer) and self.dim() == 2:
            return self.rows(int(index))
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the rows, each with the head's values for it."""
        return (self[index] for index in range(len(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadOutput":
        """Copy the scores with the head's values, if torch can copy the tensors (those without a graph)."""
        parts = (self.as_subclass(Tensor), self.head, self.head_trace)
        return HeadOutput._with(*(copy.deepcopy(part, memo) for part in parts))  # type: ignore[arg-type]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return plain tensors from every operation."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, HeadOutput):  # .cpu() where there is nothing to do
                result = result.as_subclass(Tensor)
        if func in _SOFTMAX and args and isinstance(args[0], HeadOutput):
            # The host's SESS calls target(softmax(output)); a component or a margin of that is still the row's own.
            result.head, result.head_trace = args[0].head, args[0].head_trace
        return result


_SOFTMAX = {torch.softmax, Tensor.softmax, nn.functional.softmax}


class PCASVMNet(Named, nn.Module):
    """A torch backbone and the scikit-learn estimators fitted on its features, as one differentiable network.

    The backbone's modules are used, not copied: ``target_layers=[backbone.layer4[-1]]`` works. Modules after ``layer``
    are run for the first images only, to see whether the layer runs again. ``torch.compile(net)`` gives the same
    scores.

    Args:
        backbone: the network that the features came from. For a compiled network, the original module is used, because
            hooks, layers and maps need the modules themselves.
        head: a fitted estimator, a ``Pipeline``, a search object (its ``best_estimator_``), a list of fitted
            estimators in order, or a :class:`Head`.
        layer: the module of the backbone, or its dotted name, whose output, flattened from dim 1, the head was fitted
            on; None: the backbone's own output. For a Hugging Face model, it may also be the name of an output field,
            such as ``"last_hidden_state"``. For a list of layers, the features are concatenated; a target layer that
            does not come before all of them gives maps of only what goes through it. Of a layer that runs several
            times, name a call, as in ``"pool#2"``.
        pool: how positions or tokens are reduced to one row of features: None, ``"mean"``, ``"max"``, ``"gem"``,
            ``"cls"``, ``"cls+mean"`` or a function (see :func:`extract_features`).

    Raises:
        TypeError: the backbone is no module, or a program made by ``torch.jit`` or ``torch.export``; or the head is not
            made of estimators.
        ValueError: the backbone has no such layer, or is a DataParallel; the head is empty; or the pool is unknown.
        NotFittedError: an estimator is not fitted.
        NoClosedFormError: an estimator has no closed-form Jacobian.

    Example:
        >>> pipeline = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, labels)
        >>> net = PCASVMNet(backbone, pipeline).eval()
        >>> net(images).shape, net.predict(images).tolist()
        (torch.Size([2, 3]), ['cat', 'dog'])
    """

    def __init__(
        self, backbone: nn.Module, head: Any, layer: Layer | Sequence[Layer] | None = None, *, pool: Any = None
    ) -> None:
        super().__init__()
        network = network_of(backbone)
        refuse_parallel(backbone)
        self.backbone = network
        self.head = Head.of(head).to(device_of(backbone))
        source = FeatureSource.of(self.backbone, layer, pool)
        ask_anew(self.backbone)
        self.layer: Any = source.where
        self.pool = pool
        self._warned_of_training = False

    def forward(self, x: Tensor) -> HeadOutput:
        """Return the scores of a batch.

        Args:
            x: the input, shape (N, ...), or a tuple or dict of several inputs, as in ``explain``.

        Returns:
            Scores, shape (N, C), float64: scikit-learn's ``decision_function`` (for two classes, the columns are
            [-a, a]). For a head without a classifier, the output of its last stage: the components, shape (N, B).

        Raises:
            TypeError: the input is not a tensor.
            ValueError: the backbone gives several rows of features, or too many, for each image; or the layer runs more
                than once, and no call of it is named.
        """
        x = inputs_of(x)
        check_tensor(x, "images")
        self._warn_of_training()
        backbone, source = self.feature_source(x)
        features = features_of(backbone, source, x)
        check_rows(features, x)
        return self.of_features(features)

    def feature_source(self, x: Tensor | None = None) -> tuple[nn.Module, FeatureSource]:
        """Return the current backbone and the source of its features, with a pool for images like x."""
        backbone = uncompiled(self.backbone)
        source = FeatureSource.of(backbone, self.layer, self.pool, checked=True)
        return backbone, source if x is None else source.at(backbone, x)

    def of_features(self, features: Tensor) -> HeadOutput:
        """Return the scores for features, shape (N, D)."""
        return self.head_run(features).output()

    def head_run(self, features: Tensor) -> HeadRun:
        """Return what the head computes for features, shape (N, D)."""
        if not torch.compiler.is_compiling():
            self.head.tell_of_fit()
        return HeadRun(self.head, self.head(features))

    def predict(self, x: Tensor) -> np.ndarray:
        """Return the predicted labels of a batch, as ``head.predict`` would (without a classifier, the components).

        Args:
            x: the input, shape (N, ...).

        Returns:
            Labels, shape (N,), of the dtype of ``classes_``.

        Raises:
            TypeError: the input is not a floating-point tensor.
            ValueError: the input is not a batch, or has NaN or infinite values.
        """
        x = checked_images(x, self.backbone)
        with evaluating(self), torch.no_grad():
            return self(x).labels()

    def _warn_of_training(self) -> None:
        """Warn once that a network in training mode gives other scores than those the head was fitted for."""
        if self._warned_of_training or not self.backbone.training or torch.compiler.is_compiling():
            return
        random = [m for m in self.backbone.modules() if m.training and _differs_in_training(m)]
        if random:
            self._warned_of_training = True
            warn(
                f"the backbone is in training mode, in which its {type(random[0]).__name__} gives different features "
                "from those the head was fitted on: call net.eval()",
                UserWarning,
            )


def _differs_in_training(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase | nn.modules.dropout._DropoutNd) or (
        "Drop" in type(module).__name__ and not isinstance(module, nn.Identity)
    )
