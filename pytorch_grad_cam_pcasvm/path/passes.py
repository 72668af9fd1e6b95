"""Passes: paths that have run, each with its activations, its output and pullbacks; with a tape, or without."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.path.affine import AffineBeginning
from pytorch_grad_cam_pcasvm.path.backward import Pullback, TapePullback
from pytorch_grad_cam_pcasvm.path.relevance import propagate_relevance
from pytorch_grad_cam_pcasvm.path.secants import PathStart
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.log import log_since, start_clock
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_tensors
from pytorch_grad_cam_pcasvm.tape.step import list_tensors
from pytorch_grad_cam_pcasvm.tape.tape import Tape, has_gradient, identify_memory


class Pass(ABC):
    """One forward pass of any path, ready for pullbacks.

    Output gradients are, for every tensor of the output, the derivatives of K targets with respect to it, of shape
    (K, *its shape), or None; from a start, their secants. ``target`` is the position of a target layer. What only a
    tape can tell is False of others.

    Attributes:
        activations: outputs of the target layers, (N, T, ...) each.
        output: what the network, or its feature layer, gave.
        heads: whether the heads of the first attention are kept apart.
    """

    activations: list[Tensor]
    output: Any
    heads: bool = False

    @abstractmethod
    def pullback(self, output_gradients: Sequence[Tensor | None], target: int, start: Any = None) -> Pullback:
        """Return the derivative of K targets with respect to ``activations[target]``, or its secant from a start.

        From a start, ``sum pullback * (activations - theirs)`` is exactly ``sum output_gradients * (output - its
        output)``.
        """

    @abstractmethod
    def bytes_per_target(self) -> int:
        """Return about how much memory one target takes for the batch."""

    def averages(self, target: int, tiles: int = 1) -> bool:
        """Return whether the output is the mean over all positions of a target layer, whatever its numbers.

        Args:
            target: position of the target layer.
            tiles: how many rows each image has there, over which it is the mean, too.
        """
        return False

    def is_isolated(self, network: nn.Module) -> bool:
        """Return whether all that the path uses besides the target layers are parameters and buffers of a network."""
        return False


class TapePass(Pass):
    """A pass that has a tape: it also starts elsewhere, and its steps run again."""

    @property
    @abstractmethod
    def whole(self) -> "ClosedFormPass":
        """The pass on one tape, also where it runs in blocks of tiles."""

    @abstractmethod
    def run_from(self, starts: Mapping[int, Tensor]) -> Any:
        """Run the path from a start: activations by position of their target layer, of one row for all or N."""

    @abstractmethod
    def relevance(self, output_gradients: Sequence[Tensor | None], target: int, start: Any) -> Tensor:
        """Return the relevance of activations, shares of the output's contributions, (K, *activations.shape)."""


def need_tape(passed: Pass, missing: str) -> TapePass:
    """Return a pass as one of a tape.

    Args:
        passed: the pass.
        missing: needed here, and had by no other path, as in ``"secants"``.

    Raises:
        NoClosedFormError: it is none.
    """
    if not isinstance(passed, TapePass):
        raise NoClosedFormError(
            f"an autograd path has no {missing}: this method needs the closed form",
            "pass jacobian='closed_form' to see which step has none",
            "use a gradient method such as ClosedFormGradCAM",
        )
    return passed


@dataclass
class ClosedFormPass(TapePass):
    """The pass of a tape.

    Args:
        tape: the tape.
        names: dotted names of the target layers.
        heads: keep the heads of the first attention apart: one target per head in place of each.
        check: called for a network that branches on numbers, with the exact pass and the activations of a start, by
            position of their target layer; refuses a path that is another function there. None: nothing is checked.
        exact: the pass as it was recorded, if this is another one.
    """

    tape: Tape
    names: Sequence[str]
    heads: bool = False
    check: Callable[["ClosedFormPass", Mapping[int, Tensor]], None] | None = None
    exact: "ClosedFormPass | None" = None
    activations: list[Tensor] = field(init=False)
    output: Any = field(init=False)

    def __post_init__(self) -> None:
        """Look up the activations."""
        self.activations = [self.tape.values[self._root(target)] for target in range(len(self.names))]
        self.output = self.tape.output

    @property
    def whole(self) -> "ClosedFormPass":
        """The pass itself."""
        return self

    def pullback(
        self, output_gradients: Sequence[Tensor | None], target: int, start: PathStart | None = None
    ) -> TapePullback:
        """Return the derivative with respect to ``activations[target]``, or its secant from a start."""
        return TapePullback(self.tape, output_gradients, self.names[target], start, heads=self.heads)

    def bytes_per_target(self) -> int:
        """Return roughly how much memory one target takes for the batch: a few times the path's widest value."""
        floats = filter(has_gradient, self.tape.values)
        return 4 * max(value.numel() * max(4, value.element_size()) for value in floats)

    def run_from(self, starts: Mapping[int, Tensor]) -> PathStart:
        """Run the path from the activations of a start, with one row for all images or N."""
        by_root = {self._root(target): activations for target, activations in starts.items()}
        names = {root: name for name, root in self.tape.roots.items()}
        for root in by_root:
            for other in (by_root.keys() & self.tape.following(root, switches=True)[1]) - {root}:
                raise ValueError(f"{names[other]!r} is behind {names[root]!r}: name one target layer in each branch")
        began = start_clock()
        values = self.tape.replay(by_root)
        log_since(began, "start pass from %s", [self.names[target] for target in starts])
        # A program is traced after an explanation, which has checked.
        if self.check is not None and self.tape.branches and not is_traced():
            self.check(self.exact or self, starts)
        outputs = self.tape.list_outputs(values)
        if not all(bool(leaf.isfinite().all()) for leaf in outputs if can_sync(leaf)):
            refuse_start([self.names[target] for target in starts], finite=False)
        return PathStart(values, self.tape.structured(outputs), tuple(by_root))

    def replay(self, activations: Tensor, target: int) -> "ClosedFormPass":
        """Return the pass through the same steps from other activations (N, T, ...), which may be dual numbers."""
        replayed = self.tape.replay({self._root(target): activations})
        return ClosedFormPass(self.tape.with_values(replayed), self.names)

    def with_heads(self) -> "ClosedFormPass":
        """Return the same pass with the heads of its first attention kept apart."""
        return replace(self, heads=True)

    def rerun(self, starts: Mapping[int, Tensor]) -> Any:
        """Return the path's output for M rows of activations; row m takes the place of image ``m % N``."""
        by_root = {self._root(target): activations for target, activations in starts.items()}
        return self.tape.structured(self.tape.in_blocks(by_root))

    def affine(self, target: int) -> AffineBeginning:
        """Return the affine beginning of the path behind a target layer."""
        return AffineBeginning(self.tape, self._root(target))

    def is_isolated(self, network: nn.Module) -> bool:
        """Return whether all that the path uses besides the target layers are parameters and buffers of a network."""
        parameters = {identify_memory(tensor) for tensor in (*network.parameters(), *network.buffers())} - {None}
        return all(
            identify_memory(tensor) in parameters
            for step in self.tape.steps
            for tensor in list_tensors((step.args, step.kwargs))
        )

    def averages(self, target: int, tiles: int = 1) -> bool:
        """Return whether the output is the mean over all positions of a target layer, by the steps between them."""
        return self.tape.is_mean(self._root(target), tiles)

    def relevance(self, output_gradients: Sequence[Tensor | None], target: int, start: PathStart) -> Tensor:
        """Return the relevance of activations, propagated from the output's contributions, (K, *activations.shape)."""
        pairs = zip(output_gradients, self.tape.leaves, tree_tensors(start.output), strict=True)
        of_output = [None if seed is None else seed * (y - y0).to(seed.dtype) for seed, y, y0 in pairs]
        return propagate_relevance(self.tape, of_output, self._root(target))

    def _root(self, target: int) -> int:
        return self.tape.roots[self.names[target]]


def refuse_start(layers: Sequence[str], *, finite: bool) -> NoReturn:
    """Refuse a start of the path from target layers, from which the network returns other numbers, or none.

    Raises:
        NoClosedFormError: always.
    """
    names = " and ".join(map(repr, layers))
    raise NoClosedFormError(
        f"what follows the target layer {names} is another function at the baseline: the network branches on "
        "values there (an if on activations), or another thread computes on them"
        if finite
        else f"the network does not return finite numbers at the baseline of {names}",
        "choose another baseline",
        "choose a later target layer",
        "use a gradient method such as ClosedFormGradCAM",
    )
