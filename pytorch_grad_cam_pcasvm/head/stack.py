"""The stack of fitted stages behind the features, as one differentiable module with a closed-form pullback."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head.decisions import Decision
from pytorch_grad_cam_pcasvm.head.fit_checks import holds_reduction, refuse_one_class
from pytorch_grad_cam_pcasvm.head.measures import Measure, list_measures
from pytorch_grad_cam_pcasvm.head.shared import bring_forward
from pytorch_grad_cam_pcasvm.head.stage import (
    USUAL,
    Conditions,
    HeadModule,
    HookedOutput,
    Sampling,
    Scaled,
    Stage,
    errors_after,
    identity,
    pulled_through,
    run,
    scaled_sum,
)
from pytorch_grad_cam_pcasvm.head.stages import Affine
from pytorch_grad_cam_pcasvm.head.vote import Vote
from pytorch_grad_cam_pcasvm.runtime.device import full_precision, is_traced, precision
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, NoClosedFormError, refuse
from pytorch_grad_cam_pcasvm.runtime.rollback import without_inference
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_map, tree_map_only

_BYTES = 1 << 28  # of many rows that are computed at once


@dataclass(eq=False)
class HeadTrace:
    """The values that a head computed for N images.

    Attributes:
        values: the features, shape (N, D), and the output of every stage, (N, ...), in the head's precision. In a trace
            from ``resume``, values that were not computed are None.
        saved: what each stage's pullback needs; the first dimension of its tensors is the batch.
        eps: the relative accuracy of the backbone's features.

    Example:
        >>> trace = net.head(tensor(features))
        >>> [tuple(value.shape) for value in trace.values]  # features, scaled, components, decision values
        [(12, 8), (12, 8), (12, 3), (12, 3)]
    """

    values: list[Tensor]
    saved: list[Any]
    eps: float = torch.finfo(torch.float32).eps

    def rows(self, index: Any) -> "HeadTrace":
        """Return the trace of some images; for an integer, without a batch dimension and without a pullback."""
        if isinstance(index, int):
            return HeadTrace([None if value is None else value[index] for value in self.values], [], self.eps)
        values, saved = tree_map_only(Tensor, lambda tensor: tensor[index], (self.values, self.saved))
        return HeadTrace(values, saved, self.eps)

    @staticmethod
    def cat(traces: Sequence["HeadTrace"], count: int) -> "HeadTrace":
        """Return traces of one head, each of N rows or of one that stands for all, as one: the rows of each in turn."""

        def join(first: Any, *pieces: Any) -> Any:
            if not isinstance(first, Tensor):
                return first
            return torch.cat([part.expand(count, *part.shape[1:]) for part in (first, *pieces)])

        values, saved = tree_map(join, *((trace.values, trace.saved) for trace in traces))
        return HeadTrace(values, saved, traces[0].eps)


class Stack(HeadModule):
    """The stages after a backbone, in float64 (float32 if the device has no float64).

    Args:
        stages: the stages in order.

    Attributes:
        component_position: position of the components among the values; None: there is no reduction.
        decision_position: position of the decision values; None: there is no decision.
        n_features: length of a feature vector, or None if any length will do.
        linear_until: the last position in ``values`` up to which all stages are affine and nothing is explained: the
            number of linear stages at the start, or the position of the components if they come earlier.
        enumerated: the decision, if it has no gradient; otherwise None.
        vote: how decision values become classes; None: there is no decision.
        classes_: class labels in the estimator's order, or None without a classifier.

    Raises:
        ValueError: there are no stages, nothing to explain, stages after a decision, or a decision on only one class.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        super().__init__()
        stages = bring_forward(stages)
        of_features = takewhile(lambda stage: not stage.decides, stages)
        reductions = [position for position, stage in enumerate(of_features, 1) if stage.reduces]
        decisions = [position for position, stage in enumerate(stages, 1) if isinstance(stage, Decision)]
        if not stages:
            raise ValueError("the head is empty: pass a fitted estimator, e.g. a Pipeline with a PCA and an SVC")
        if not reductions and not decisions:
            names = ", ".join(type(stage).__name__ for stage in stages)
            raise ValueError(f"the head has neither a reduction (PCA) nor a classifier (SVC), only: {names}")
        if decisions and decisions != [len(stages)]:
            raise ValueError("the head must end with its only classifier: nothing can follow its decision")
        last = stages[-1]
        if isinstance(last, Decision) and last.classes is not None and last.voting.about == "classes":
            refuse_one_class(last.classes)
        width = None
        for stage in stages:
            if None not in (width, stage.n_inputs) and width != stage.n_inputs:
                raise ValueError(
                    f"the parts of the head do not fit: {type(stage).__name__} was fitted on {stage.n_inputs} values, "
                    f"but what comes before it returns {width}"
                )
            width = stage.n_outputs if stage.n_outputs is not None else width
        self.stages: Any = nn.ModuleList(stages)
        self.component_position = reductions[-1] if reductions else None
        self.decision_position = decisions[-1] if decisions else None
        # A stage that takes any length, as Normalizer's, gives as many values as it got.
        self.n_features = next((stage.n_inputs for stage in stages if stage.n_inputs is not None), None)
        curved = next((number for number, stage in enumerate(stages) if not stage.linear), len(stages))
        self.linear_until = min(curved, curved if self.component_position is None else self.component_position)
        self._measures: list[Measure] | None = None
        self._read_decision()

    def _read_decision(self) -> None:
        """Take over vote and labels of the last stage: they are asked again and again."""
        last = self.stages[-1]
        self.vote: Vote | None = None
        self.classes_: np.ndarray | None = None
        if isinstance(last, Decision):
            self.vote = self.voting = last.voting
            self.classes_ = None if last.classes is None else np.asarray(last.classes)
        # Bypass nn.Module: a second registration would double the tensors in the state dict.
        object.__setattr__(self, "enumerated", last if last.asked_estimators else None)

    @cached_property
    def voting(self) -> Vote:
        """The vote; raises a ValueError without a decision. With one, it is an attribute."""
        raise ValueError("the head has no SVM: use PCATarget, or add a fitted SVC after the PCA")

    @property
    def measures(self) -> list[Measure]:
        """The measures of distance from the training set, by the stages' facts; made when first asked for."""
        if self._measures is None:
            self._measures = list_measures(list(self.stages), self.n_features)
        return self._measures

    def name_classes(self, labels: Any) -> None:
        """Give the classes, or the outputs, other names."""
        self.stages[-1].classes = labels
        self._read_decision()

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move to another device; the vote has moved with its stage."""
        super()._apply(fn, recurse)
        self._read_decision()
        self._measures = None
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Take over the facts of another training set that the stages load."""
        self._measures = None
        super()._load_from_state_dict(*arguments)

    @property
    def between(self) -> tuple[str, ...]:
        """Names of the steps between components and classifier that give as many numbers, as a second scaler does.

        What another classifier was fitted on, the components or these numbers, its own width does not tell.
        """
        if self.component_position is None or self.decision_position is None:
            return ()
        behind = list(self.stages)[self.component_position : self.decision_position - 1]
        behind = list(takewhile(lambda stage: not stage.decides, behind))
        if behind and isinstance(behind[0], Affine):
            return ()  # the first layer of a network
        names = [type(part).__name__ for part in (*behind, *self.stages[-1].asked_estimators[:-1])]
        width = next((stage.n_outputs for stage in reversed(behind) if stage.n_outputs is not None), None)
        components = self.stages[self.component_position - 1].n_outputs
        return tuple(names) if width in (None, components) else ()

    @property
    def hides_reduction(self) -> bool:
        """Whether a reduction is inside of the decision: its components are not the head's."""
        stages = [module for module in self.modules() if isinstance(module, Stage)]
        return any(stage.reduces or any(map(holds_reduction, stage.asked_estimators[-1:])) for stage in stages)

    @property
    def feature_mean(self) -> Tensor | None:
        """The mean of the training set's features, shape (D,), if the first stage has it; otherwise None."""
        return self.stages[0].input_mean

    def __call__(self, features: Tensor) -> HeadTrace:
        """Return the trace of features, shape (N, D). Hooks on the head run."""
        trace, changed = run(self, features)
        if changed is not None:
            trace.saved = [changed] * len(self.stages)
        return trace

    def values_of(self, features: Tensor) -> HeadTrace:
        """Return the trace of many features, (R, D), computed in blocks, without numbers for a pullback."""
        blocks = [features]
        if not is_traced():
            blocks = list(features.split(max(1, _BYTES // self.bytes_per_target(1))))
        traces = [self(block) for block in blocks]
        values = [torch.cat(parts) for parts in zip(*(trace.values for trace in traces), strict=True)]
        return HeadTrace(values, [], traces[0].eps)

    def evaluate(self, features: Tensor) -> tuple[HeadTrace, HookedOutput | None]:
        """Return the trace of features (N, D), of any floating-point dtype, in the head's precision; and None."""
        if self.n_features not in (None, features.shape[-1]):
            several, rest = divmod(features.shape[-1], self.n_features)
            crops = f"(N, {several}, {self.n_features}), pass pool=lambda t: t.mean(1)"
            crops = f"if it gives {several} crops or patches of each image, {crops}"
            refuse(
                ValueError,
                f"the head was fitted on {self.n_features} features, but the backbone gives {features.shape[-1]}",
                Fix(
                    "name the layer that the features came from, and their pool: PCASVMNet(backbone, head, layer=..., "
                    "pool=...)",
                    "layer",
                ),
                *([] if rest or several < 2 else [crops]),
            )
        trace = self.resume(0, features)
        if features.dtype == torch.float64:
            trace.eps = torch.finfo(torch.float64).eps
        return trace, None

    def resume(self, position: int, value: Tensor) -> HeadTrace:
        """Return the trace of the head run from ``values[position]``, shape (M, .), onwards.

        Earlier values are None. Its pullback returns the derivative with respect to that value.

        Raises:
            ValueError: there is no such position.
        """
        if not 0 <= position <= len(self.stages):
            raise ValueError(f"the head has the positions 0 to {len(self.stages)}, not {position}")
        before: list[Any] = [None] * position
        # A head is small and exact: autocast would put it in half precision.
        with full_precision(value.device):
            trace = HeadTrace([*before, value.to(precision(value.device))], [*before])
            for stage in self.stages[position:]:
                y, saved = run(stage, trace.values[-1])
                trace.values.append(y)
                trace.saved.append(saved)
        return trace

    def check(self, features: Tensor) -> None:
        """Compare the pullback through user-defined stages with autograd; raise a NoClosedFormError if they differ."""
        package = __name__.partition(".")[0]
        own = [type(m).__name__ for m in self.modules() if isinstance(m, Stage) and package not in type(m).__module__]
        if not own:
            return
        with without_inference(), torch.enable_grad():
            leaf = features.detach().clone().requires_grad_()
            last = self(leaf).values[-1]
            seed = torch.randn(
                last.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
            ).to(last)
            try:
                (expected,) = torch.autograd.grad(last, leaf, seed)
            except RuntimeError:
                return  # a stage that autograd cannot differentiate: its own pullback is all there is
        with torch.no_grad():
            trace = self(features)
            grad, log_scale = self.pullback(trace, {len(trace.values) - 1: seed.unsqueeze(1)})
            difference = (grad * log_scale.exp().unsqueeze(-1)).squeeze(1) - expected
        if not bool(difference.norm() <= 1e-5 * expected.norm()):
            raise NoClosedFormError(f"the pullback of {' or '.join(own)} differs from autograd's through its evaluate")

    def pullback(
        self,
        trace: HeadTrace,
        seeds: Mapping[int, Tensor | None],
        start: HeadTrace | None = None,
        until: int = 0,
        sampling: Sampling = USUAL.sampling,
    ) -> tuple[Tensor, Tensor]:
        """Return the derivative of K targets with respect to the features, in closed form.

        With a start, return the secant instead: its product with ``values[0] - start.values[0]`` equals the
        product of the seeds with the differences of their values.

        Args:
            trace: a trace of N rows.
            seeds: by position in ``trace.values``, the targets' derivatives with respect to that value, shape (N, K, .)
                or, if they are the same for every image, (1, K, .); None: one target for each number of that value.
            start: a trace of N rows, or one row for all; None: the derivative.
            until: differentiate with respect to the value at this position instead; no seed may come before it.
            sampling: the permutations of a decision without a gradient that has too many coalitions.

        Returns:
            The derivative divided by ``exp(log_scale)``, shape (N, K, D) or (1, K, D), and ``log_scale``, (N, K) or
            (1, K).

        Raises:
            NoClosedFormError: a hook has changed one of the stages, or a stage has no secant.
            ValueError: the trace has only values, or was resumed after a seed's position.
        """
        traces = [trace] if start is None else [trace, start]
        if any(len(recorded.saved) != len(self.stages) for recorded in traces):
            raise ValueError("the trace has nothing saved for a pullback: compute it again, head(trace.values[0])")
        # A resumed trace is pulled back to where it was resumed.
        first = max(until, *(sum(value is None for value in recorded.values) for recorded in traces))
        if any(position < first for position in seeds):
            raise ValueError(f"the trace was resumed at position {first}: it has no values before that to explain")
        scaled: Scaled | None = None
        for position in range(len(self.stages), -1, -1):
            y, seed = trace.values[position], seeds.get(position)
            stage = self.stages[position - 1] if position > first else None
            is_identity = position in seeds and seed is None
            short = is_identity and scaled is None and stage is not None and (start is None or stage.linear)
            if is_identity and not short:
                seed = identity(y)
            if seed is not None:
                scaled = (seed, None) if scaled is None else scaled_sum([scaled, (seed, None)])
            if stage is None:
                break
            if scaled is None and not short:
                continue  # the seeds come before
            here, *starts = (recorded.saved[position - 1] for recorded in traces)
            conditions = Conditions(trace.eps, partial(self.errors, trace, position - 1), sampling)
            here = stage.attach_conditions(here, conditions)
            if scaled is not None:
                scaled = pulled_through(stage, scaled, here, *starts)
            elif isinstance(here, HookedOutput):
                raise here.no_closed_form()
            else:
                scaled = stage.jacobian(here, y)
        assert scaled is not None, "no seeds were given"
        grad, log_scale = scaled
        return grad, grad.new_zeros(grad.shape[:2]) if log_scale is None else log_scale

    def errors(self, trace: HeadTrace, position: int) -> Tensor | None:
        """Return the rounding errors of a value, (N, .), that come from the features; None if they are unknown."""
        first = sum(value is None for value in trace.values)
        return errors_after(self.stages[first:position], 8 * trace.eps * trace.values[first].abs())

    def bytes_per_target(self, n: int) -> int:
        """Return roughly how much memory one target takes in the head for n images: a few rows of its widest stage."""
        widths = [buffer.shape[-1] for buffer in self.buffers() if buffer.dim()]
        widths += [module.row_width for module in self.modules() if isinstance(module, Stage)]
        return 5 * 8 * n * max([self.n_features or 1, *widths])
