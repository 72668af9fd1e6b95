"""What each component carries of a decision: which of many are worth a look."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.targets.output_gradients import differentiate_targets


def decision_shares(output: Any, decision: Any) -> Tensor:
    """Return the share of each component b in a decision, ``g_b p_b``, shape (N, B).

    ``g`` is the secant of the decision from the mean of the training set, where all components are 0, to the image.

    Args:
        output: what a head with a reduction and a decision computed, not of dense features.
        decision: a target that is linear in the head's values.

    Example:
        >>> decision_shares(net(images), SVMTarget("cat", versus="dog")).shape
        torch.Size([2, 3])
    """
    components, head = output.components, output.head
    behind = Head(list(head.stages)[head.component_position :])
    with torch.no_grad():
        here, mean = (
            HeadOutput.of(behind, behind.resume(0, p)) for p in (components, torch.zeros_like(components[:1]))
        )
        slopes = differentiate_targets(here, [decision], components.dtype, mean).by_image[:, 0]
        return slopes * components
