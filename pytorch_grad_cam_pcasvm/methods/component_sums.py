"""Sums of component maps: the maps of decisions, where a method is linear in the gradient or in secants."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.maps.recombination import result_of
from pytorch_grad_cam_pcasvm.maps.result import MethodResult
from pytorch_grad_cam_pcasvm.methods.explanation import Explanation
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.targets import PCATarget, every_component
from pytorch_grad_cam_pcasvm.targets.rowwise import Rowwise, is_closed_form


class ComponentSums(ClosedFormCAM):
    """A method whose maps of decisions are sums of its component maps: it is linear in the gradient, or in secants.

    Example:
        >>> [issubclass(method, ComponentSums) for method in (ClosedFormGradCAM, ClosedFormLayerCAM)]
        [True, False]
    """

    def _from_start(self, run: Explanation, layer: int, targets: Sequence[Any]) -> MethodResult:
        together = run.output.grid is None and run.shares_start(layer)
        components = every_component(run.output) if together else []
        if not 0 < len(components) < sum(map(_is_behind_components, targets)) == len(targets):
            return super()._from_start(run, layer, targets)
        result = super()._from_start(run, layer, components)  # from where these targets start
        seeds = run.secants(targets, layer, run.output.head.component_position)
        return result_of(result, seeds)

    def _is_linear(self, run: Explanation) -> bool:
        return run.adds_up_over_components


class HeadSums(ComponentSums):
    """A method whose maps are sums of those made of parts of the gradient, as of single heads of attention."""

    def _of_heads(self, run: Explanation, targets: Sequence[Any]) -> Tensor:
        apart = replace(run, passed=run.passed.with_heads(), starts={})
        return torch.stack([self._of_layer(apart, 0, [target]).maps for target in targets], 1)


def _is_behind_components(target: Any) -> bool:
    """Return whether a target is a function of the components, for all images, in closed form."""
    return not isinstance(target, Rowwise | PCATarget) and is_closed_form(target)
