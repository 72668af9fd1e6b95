"""Contribution methods: where the change from a baseline to the image comes from."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head.stage import GROUPS, Sampling
from pytorch_grad_cam_pcasvm.maps.results import WAYS, MethodResult, as_one, shift_baseline, signed_maps
from pytorch_grad_cam_pcasvm.methods.baseline import BaselineCAM
from pytorch_grad_cam_pcasvm.methods.gaps import refuse_gap
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import HeadSums
from pytorch_grad_cam_pcasvm.runtime.device import can_sync
from pytorch_grad_cam_pcasvm.starts.run import Run
from pytorch_grad_cam_pcasvm.targets.questions import Questions


class SecantCAM(BaselineCAM):
    """A method whose maps rest on secants, which a head without a gradient has, too.

    Attributes:
        samples: for heads without a gradient behind more than 12 components (or without a reduction): number of
            permutations of these, which stand for all coalitions, in 8 groups, whose spread is in ``standard_errors``.
        seed: random seed of the permutations.
    """

    samples = 64
    seed = 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.samples, self.seed, self.max_bytes or Sampling().max_bytes)


class ContributionCAM(SecantCAM, HeadSums):
    """Maps that add up: the contribution of every position to the change from a baseline to the image.

    ``c = sum_t (F - F0)_t J_t``, where J is the product of the secant Jacobians of path and head between F0 and F, so
    that ``maps.sum((2, 3)) + baseline_values == values`` up to rounding (sums times ``exp(log_scale)``). If the layer
    is followed by a mean over positions, this is the integrated gradient of the whole head, in closed form
    (Sundararajan et al., arXiv 1703.01365); through ReLU and max pooling, it is the rescale rule of DeepLIFT (Shrikumar
    et al., arXiv 1704.02685). Unlike the gradient, it does not vanish where a kernel SVM is flat.

    For several target layers, ``explain`` makes one map on the finest grid, which also adds up.

    Args:
        combine: how the maps of several target layers become one. ``"shared"``: the coarsest map says how much, finer
            maps say where: each coarse position's contribution is distributed over the finer positions around it, in
            proportion to their own contributions of the same sign; ``"mean"``: the mean of the maps. Both preserve
            sums; with ``"shared"``, layers on the same grid are averaged first.
        samples: for heads without a gradient behind more than 12 components (or without a reduction): number of
            permutations of these, which stand for all coalitions; the next multiple of 16. Maps add up all the same,
            and have ``standard_errors``.
        seed: random seed of the permutations.

    Raises:
        ValueError: ``combine`` is neither ``"shared"`` nor ``"mean"``; or ``samples`` or ``seed`` is too small.

    Example:
        >>> maps = ContributionCAM(net, ["layer2"]).explain(images)
        >>> sums = maps.maps.sum((2, 3)) * maps.log_scale.exp() + maps.baseline_values
        >>> torch.allclose(sums, maps.values, atol=1e-4)
        True
    """

    adds_up = "value"
    moves_starts = True
    blocks = 2

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module | str] | str,
        reshape_transform: Callable[[Tensor], Tensor] | str | None = None,
        *,
        baseline: str | Tensor = "neutral",
        mean: Tensor | Sequence[Tensor] | None = None,
        combine: str = "shared",
        samples: int = 64,
        seed: int = 0,
        jacobian: str = "closed_form",
        attention: str = "exact",
        max_bytes: int | None = None,
    ) -> None:
        if combine not in WAYS:
            raise ValueError(f"combine must be 'shared' or 'mean', got {combine!r}")
        for name, number, least in (("samples", samples, 2 * GROUPS), ("seed", seed, 0)):
            if not isinstance(number, int) or number < least:
                raise ValueError(f"{name} must be an integer from {least}, got {number!r}")
        self.combine, self.samples, self.seed = combine, samples, seed
        options: Any = {"jacobian": jacobian, "attention": attention, "max_bytes": max_bytes}
        super().__init__(model, target_layers, reshape_transform, baseline=baseline, mean=mean, **options)

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        secants = run.secants(targets, layer)
        maps, remainder = run.contributions(secants, layer)
        if secants.excess is not None:
            maps = shift_baseline(maps, secants.excess)
        if secants.remainder is not None:
            remainder = remainder + secants.remainder.to(remainder)
        result = MethodResult(
            maps, run.sums(secants, layer), secants.values, secants.log_scale,
            baseline_values=secants.baseline_values, remainder=remainder, effects=secants.effects,
        )  # fmt: skip
        # Of several layers, or of several heads, each map has a part.
        if can_sync(maps) and len(run.layers) == 1 and not run.recorded.heads:
            parts = [maps.flatten(2)] + ([] if remainder is None else [remainder.unsqueeze(-1)])
            _check_sums(run, layer, torch.cat(parts, -1), secants)
        return result

    def _refuse_layers(self, *, joined: bool = False) -> None:
        if not joined and len(self._target_layers) > 1:
            name = type(self).__name__
            raise ValueError(
                f"{name} takes several target layers in explain only, and without heads: make one {name} for each layer"
            )

    def join_layers(self, results: Sequence[MethodResult]) -> MethodResult:
        return as_one(results, self.combine)

    def terms(self, run: Run, layer: int, questions: Questions, result: MethodResult) -> Tensor:
        gradients = run.gradients(run.secants(questions, layer), layer)
        return gradients.dense()[0] * run.shaped(run.starts[layer].difference, layer)


def _check_sums(run: Run, layer: int, parts: Tensor, secants: Any) -> None:
    """Refuse contributions (N, K, I) that do not add up."""
    scale = secants.log_scale.exp()
    total = parts.sum(-1) * scale + secants.baseline_values - secants.values
    size = parts.abs().sum(-1) * scale + secants.values.abs() + secants.baseline_values.abs()
    tolerance = 1e-2 if parts.dtype == torch.float32 else 1e-5  # far above what rounding loses on the way
    gap = torch.where(total.abs() > tolerance * size, total, 0.0)
    if bool(gap.any()):
        refuse_gap(run, layer, secants, gap)


class LIFTCAM(SecantCAM):
    """LIFT-CAM, ``sum_t w_t F_t`` with ``w_t = sum_i c_t,i``, the contribution of channel t (:class:`ContributionCAM`).

    Jung and Oh, arXiv 2102.05228.
    """

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        secants = run.secants(targets, layer)
        weights = run.products(secants, layer, run.shaped(run.starts[layer].difference, layer), "positions")
        if run.layouts[layer].is_map_shaped and can_sync(weights):  # else tokens may be left out
            left = [] if secants.remainder is None else [secants.remainder.unsqueeze(-1).to(weights)]
            _check_sums(run, layer, torch.cat([weights, *left], -1), secants)
        return MethodResult(signed_maps(weights, run.activations(layer)), weights, secants.values, secants.log_scale)


class RelevanceCAM(SecantCAM):
    """Relevance-CAM, ``sum_t w_t F_t`` with ``w_t = sum_i R_t,i``, where R is the relevance of the activations.

    R comes from layer-wise relevance propagation along the path (z+ rule). The paper covers networks that end in a
    softmax, not in a PCA or SVM; here, the relevance of the features is their contribution: the secants of the head
    times the features' difference from the baseline. Lee et al., CVPR 2021.
    """

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        secants = run.secants(targets, layer)
        weights = run.relevance(secants, layer).flatten(3).sum(-1)
        return MethodResult(signed_maps(weights, run.activations(layer)), weights, secants.values, secants.log_scale)
