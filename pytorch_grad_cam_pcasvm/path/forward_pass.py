"""One forward pass of a path: the protocol of its derivatives."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.calculus.affine import AffineBeginning
from pytorch_grad_cam_pcasvm.calculus.backward import Pullback
from pytorch_grad_cam_pcasvm.calculus.secants import PathStart
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError


class Pass:
    """One forward pass, ready for pullbacks.

    Seeds are, for every tensor of the output, the derivatives of K targets with respect to it, of shape
    (K, *its shape), or None; from a start, their secants. ``target`` is the position of a target layer.

    Attributes:
        activations: outputs of the target layers, (N, T, ...) each.
        output: what the network, or its feature layer, gave.
        heads: whether the heads of the first attention are kept apart.
    """

    activations: list[Tensor]
    output: Any
    heads: bool = False

    def pullback(self, seeds: Sequence[Tensor | None], target: int, start: PathStart | None = None) -> Pullback:
        """Return the derivative of K targets with respect to ``activations[target]``, or its secant from a start.

        From a start, ``sum pullback * (activations - theirs)`` is ``sum seeds * (output - its output)`` exactly.
        """
        raise NotImplementedError

    def with_heads(self) -> "Pass":
        """Return the same pass, with a target for every head of its first attention in place of each."""
        self._refuse("heads")

    def bytes_per_target(self) -> int:
        """Return about how much memory one target takes for the batch."""
        raise NotImplementedError

    def started(self, starts: Mapping[int, Tensor]) -> PathStart:
        """Run the path from a start: activations by position of their target layer, of one row for all or N."""
        self._refuse("secants")

    def replay(self, activations: Tensor, target: int) -> "Pass":
        """Return the pass of the same steps from other activations (N, T, ...), which may be dual numbers."""
        self._refuse("way to run its steps again")

    def rerun(self, starts: Mapping[int, Tensor]) -> Any:
        """Return the path's output for M rows of activations; row m takes the place of image ``m % N``."""
        self._refuse("way to run its steps again")

    def affine(self, target: int) -> AffineBeginning:
        """Return the affine beginning of the path behind a target layer."""
        self._refuse("players")

    def is_isolated(self, network: nn.Module) -> bool:
        """Return whether all that the path uses besides the target layers are parameters and buffers of a network."""
        return False

    def averages(self, target: int, tiles: int = 1) -> bool:
        """Return whether the output is the mean over all positions of a target layer, whatever its numbers.

        Args:
            target: position of the target layer.
            tiles: how many rows each image has there, over which it is the mean, too.
        """
        return False

    def relevance(self, seeds: Sequence[Tensor | None], target: int, start: PathStart) -> Tensor:
        """Return the relevance of activations, shares of the output's contributions, (K, *activations.shape)."""
        self._refuse("relevance")

    def _refuse(self, missing: str) -> NoReturn:
        raise NoClosedFormError(
            f"an autograd path has no {missing}: this method needs the closed form",
            "pass jacobian='closed_form' to see which step has none",
            "use a gradient method such as ClosedFormGradCAM",
        )
