"""An explanation: a network's run, the targets' gradients or secants, and where these start."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pytorch_grad_cam_pcasvm import moved
from pytorch_grad_cam_pcasvm.calculus.secants import PathStart
from pytorch_grad_cam_pcasvm.methods.network_run import NetworkRun
from pytorch_grad_cam_pcasvm.network.inputs import Inputs
from pytorch_grad_cam_pcasvm.path.forward_pass import Pass
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.targets.boundary_head import Boundary
from pytorch_grad_cam_pcasvm.targets.output_gradients import OutputGradients, gradients_of


@dataclass
class Start:
    """Where secants start.

    Attributes:
        path: the path's values there; None: its secants are its derivative.
        output: the network's output there, with N rows or one for all.
        activations: of the target layer, of one row or N, in the network's own layout.
        difference: the images' activations minus these.
        boundary: where each target starts, if not all start here, whose activations are the mean.
    """

    path: PathStart | None
    output: Any
    activations: Tensor
    difference: Tensor
    boundary: Boundary | None = None


@dataclass
class Explanation(NetworkRun):
    """A network's run, explained.

    Attributes:
        record: runs the network on other images, up to the features.
        starts: where secants start, by position of the target layer; none for gradients.
        components_apart: whether contributions to components start at different activations.
    """

    record: Callable[[Tensor], Pass]
    starts: dict[int, Start] = field(default_factory=dict)
    components_apart: bool = False

    def __getattr__(self, name: str) -> Any:
        """Return what version 0.3 called otherwise."""
        return moved.of_run(self, name)

    def output_gradients(self, targets: Sequence[Any], until: int = 0) -> OutputGradients:
        """Return the gradients of K targets by the features, in the precision of maps.

        Or with respect to another of the head's values, at the position ``until``, in its own precision.
        """
        return gradients_of(self.output, targets, self._dtype_of(until), until=until)

    def secants(self, targets: Sequence[Any], layer: int, until: int = 0) -> OutputGradients:
        """Return the secants of K targets from where they start, as :meth:`output_gradients`; without one, these."""
        start = self.starts.get(layer)
        if start is None:
            return self.output_gradients(targets, until)
        if start.boundary is not None:
            return start.boundary.seeds(self.output, targets, self.dtype, until)
        return gradients_of(self.output, targets, self._dtype_of(until), start.output, until=until)

    def _dtype_of(self, position: int) -> torch.dtype:
        return self.output.head_trace.values[position].dtype if position else self.dtype

    def started(self, starts: Mapping[int, Tensor]) -> dict[int, Start]:
        """Return where secants start that begin at activations of one layer, or of one in each branch."""
        path = self.passed.started(starts)
        output, activations = self.output_of(path.output), self.passed.activations
        return {layer: Start(path, output, there, activations[layer] - there) for layer, there in starts.items()}

    def difference(self, layer: int) -> Tensor:
        """Return activations minus those of the start, in the shape of maps."""
        return self.activations(layer) - self.shaped(self.starts[layer].activations, layer)

    def shares_start(self, layer: int) -> bool:
        """Return whether component maps from one start are those of a decision from its own, but for a constant."""
        start = self.starts.get(layer)
        if start is None or start.boundary is None:
            return True
        return all(stage.linear for stage in self.output.head.stages[: self.output.head.component_position or 0])

    @property
    def is_neutral(self) -> bool:
        """Whether each target starts on its boundary, and components are affine in the features."""
        start, head = self.starts.get(0), self.head
        if head is None or start is None or start.boundary is None or head.component_position is None:
            return False
        return len(self.layers) == 1 and self.shares_start(0)

    @property
    def adds_up_over_components(self) -> bool:
        """Whether component maps start at the same activations: of several layers, each has a start of its own."""
        return not self.components_apart and (len(self.layers) == 1 or isinstance(self.images, Inputs))

    def along(self, layer: int, direction: Tensor) -> "Explanation":
        """Return the same run as a function of its activations, whose tensors carry the derivative along a direction.

        Raises:
            NoClosedFormError: it is called under autocast, or a function on the path has no forward derivative.
        """
        if torch.is_autocast_enabled(self.images.device.type):
            raise NoClosedFormError(
                "second derivatives cannot be computed under torch.autocast", "call the method outside it"
            )
        # A copy, as what was made in inference mode takes no derivative.
        activations = forward_ad.make_dual(self.passed.activations[layer].clone(), direction)
        try:
            passed = self.passed.moved(activations, layer)
        except NotImplementedError as error:  # torch's own
            if "jvp" not in str(error):
                raise
            raise NoClosedFormError(
                f"second derivatives need the jvp of each autograd.Function on the path ({str(error).splitlines()[0]})",
                "define it, as in @staticmethod def jvp(ctx, x)",
                "use a method of first derivatives, as ClosedFormGradCAM",
            ) from error
        return self.with_pass(passed)

    def with_pass(self, passed: Pass) -> "Explanation":
        """Return the explanation of another pass of the same images."""
        return replace(self, passed=passed, output=self.output_of(passed.output), starts={})

    def moved(self, layer: int, activations: Tensor) -> "Explanation":
        """Return that with other activations of a target layer."""
        return self.with_pass(self.passed.moved(activations, layer))

    def of_black(self) -> "Explanation":
        """Return that of one black image: what follows a layer is the same for all, but for what bypasses it."""
        black = torch.zeros_like(self.images[:1])
        return replace(self, images=black).with_pass(self.record(black))
