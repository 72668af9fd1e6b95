"""One forward pass of a path, and what can be asked of it."""

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from pytorch_grad_cam_pcasvm.autodiff.secants import Baseline
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError


class Pass:
    """One forward pass, ready for pullbacks.

    Seeds are, for every tensor of the output, the derivatives of K targets with respect to it, of shape
    (K, *its shape), or None; from a baseline, their secants. ``target`` is the position of a target layer.

    Attributes:
        activations: outputs of the target layers, (N, T, ...) each.
        output: what the network, or its feature layer, gave.
    """

    activations: list[Tensor]
    output: Any

    def pullback(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline | None = None) -> Tensor:
        """Return the derivative of K targets with respect to ``activations[target]``, or its secant from a baseline.

        From a baseline, ``sum pullback * (activations - theirs)`` is ``sum seeds * (output - its output)`` exactly.

        Returns:
            The derivative, shape (K, *activations.shape).
        """
        raise NotImplementedError

    def weights(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline | None = None) -> Tensor:
        """Return the sum of ``pullback`` over the positions of every channel, shape (K, N, T)."""
        raise NotImplementedError

    def products(
        self, seeds: Sequence[Tensor | None], target: int, x: Tensor, over: str, baseline: Baseline | None = None
    ) -> Tensor:
        """Return the sum of ``pullback * x`` over one kind of dimension.

        Args:
            seeds: as for ``pullback``.
            target: position of the target layer.
            x: of the shape of its activations, (N, T, ...).
            over: ``"channels"``: the result is (K, N, *positions); ``"positions"``: (K, N, T).
            baseline: of secants; None: gradients.

        Returns:
            The sums.
        """
        raise NotImplementedError

    def token_sums(
        self,
        seeds: Sequence[Tensor | None],
        target: int,
        tokens: tuple[int, int, int],
        baseline: Baseline | None = None,
    ) -> Tensor:
        """Return ``pullback`` summed over some tokens, with one in their place.

        Args:
            seeds: as for ``pullback``.
            target: position of the target layer.
            tokens: their dimension in the activations, the first of them, and their number.
            baseline: of secants; None: gradients.

        Returns:
            The sums, of the shape of ``pullback`` but for that dimension.
        """
        dim, start, length = tokens
        return self.pullback(seeds, target, baseline).narrow(dim + 1, start, length).sum(dim + 1, keepdim=True)

    def token_contributions(
        self, seeds: Sequence[Tensor | None], target: int, dims: tuple[int, int], baseline: Baseline
    ) -> Tensor:
        """Return secants times what the activations change by, summed over all but images and tokens, (K, N, L).

        Args:
            seeds: as for ``pullback``.
            target: position of the target layer.
            dims: dimensions of images and of tokens in the activations.
            baseline: of the secants.
        """
        self._refuse("secants")

    def with_heads(self) -> "Pass":
        """Return the same pass, with a target for every head of its first attention in place of each."""
        self._refuse("heads")

    def bytes_per_target(self) -> int:
        """Return about how much memory one target takes for the batch."""
        raise NotImplementedError

    def baseline(self, activations: Tensor, target: int) -> Baseline:
        """Run the path from the activations of a baseline, of one row for all images or N."""
        self._refuse("secants")

    def moved(self, activations: Tensor, target: int) -> "Pass":
        """Return the pass of the same steps from other activations (N, T, ...), which may be dual numbers."""
        self._refuse("way to run its steps again")

    def rerun(self, activations: Tensor, target: int) -> Any:
        """Return the path's output for M rows of activations; row m takes the place of image ``m % N``."""
        self._refuse("way to run its steps again")

    def cut(self, target: int) -> tuple[int, bool]:
        """Return up to which value what follows a target layer is affine, and whether that is the output itself."""
        self._refuse("players")

    def value(self, index: int) -> Tensor:
        """Return the value of ``cut``, shape (N, ...)."""
        self._refuse("players")

    def rows(self, target: int, x: Tensor, over: str, chunk: slice | None = None) -> Tensor:
        """Return what each player alone brings to the value of ``cut`` (N, J, *value.shape[1:]), by its linear map.

        Args:
            target: position of the target layer.
            x: activations, or their difference from a baseline, shape (N, T, ...).
            over: ``"channels"``: J = T players, each channel alone; ``"positions"``: each position alone.
            chunk: of the players; None: all.
        """
        self._refuse("players")

    def row(self, target: int, x: Tensor) -> Tensor:
        """Return what activations x alone bring to the value of ``cut``, shape (N, *value.shape[1:])."""
        self._refuse("players")

    def rerun_from(self, value: int, rows: Tensor, image: int | None = None) -> Any:
        """Return the path's output for M other rows of the value of ``cut``.

        Args:
            value: as ``cut`` gives it.
            rows: of its shape but for the first dimension, (M, ...).
            image: whose rows they are; None: row m is of image ``m % N``.
        """
        self._refuse("players")

    def relevance(self, seeds: Sequence[Tensor | None], target: int, baseline: Baseline) -> Tensor:
        """Return the relevance of activations, what the output contributes shared out, (K, *activations.shape)."""
        self._refuse("relevance")

    def _refuse(self, what: str) -> NoReturn:
        raise NoClosedFormError(
            f"an autograd path has no {what}: this method needs the closed form",
            "pass jacobian='closed_form' to see which step has none",
            "use a gradient method such as ClosedFormGradCAM",
        )
