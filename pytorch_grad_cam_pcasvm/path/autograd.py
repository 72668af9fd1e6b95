"""The path by autograd: the fallback for a network, and the reference for a closed form."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.features import run_to_features
from pytorch_grad_cam_pcasvm.network.inputs import map_input
from pytorch_grad_cam_pcasvm.path.backward import Pullback
from pytorch_grad_cam_pcasvm.path.passes import Pass, need_tape
from pytorch_grad_cam_pcasvm.rules.cotangents import Cotangent
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.log import log_since, start_clock
from pytorch_grad_cam_pcasvm.runtime.rollback import Hooks, Mode, Rollback, set_gradients, without_inference
from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    DispatchMode,
    OpOverload,
    push_dispatch_mode,
    tree_map,
    tree_map_only,
    tree_tensors,
    without_function_modes,
)
from pytorch_grad_cam_pcasvm.tape.recorder import explanation
from pytorch_grad_cam_pcasvm.tape.stem import RandomDraws
from pytorch_grad_cam_pcasvm.tape.step import operation


class _Differentiable(Mode):
    """Records a graph for every call behind a target layer, also in a region of inference mode that this is in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):  # from within the dispatcher, where scripted code keeps this mode
            return func(*args, **kwargs)
        Rollback.go_above_autograd()  # the end of a compiled part puts back what it began with
        # Tensors made in inference mode, as the weights of some networks, can take no part in a graph.
        args, kwargs = tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, (args, kwargs))
        if not (torch.is_inference_mode_enabled() and torch.is_grad_enabled()):
            return func(*args, **kwargs)
        with without_inference(), torch.enable_grad():
            return func(*args, **kwargs)


class _OnlyDifferentiable(DispatchMode):
    """Refuses operations that draw random numbers, and, behind a target layer, operations without a gradient.

    Attributes:
        reached: whether a target layer has run.
        draws: those of the run.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.reached = False
        self.draws = RandomDraws()
        self._explaining = explanation.get()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, unless it is refused."""
        if explanation.get() is self._explaining:
            op = operation(func)
            if op.draws:
                self.draws.check(op, args, kwargs or {})
            if self.reached and not op.differentiable:
                raise NoClosedFormError(
                    f"autograd has no gradient of {op.name}, and would take it for 0",
                    "explain the network as it was before it was quantised",
                )
        return func(*args, **kwargs or {})


class AutogradPath:
    """The path by autograd: the stem runs without a graph, everything after the first target layer with one.

    Args:
        backbone: the network.
        layer: dotted name of the feature layer; None: the network's output.
        names: dotted names of the target layers.
    """

    def __init__(self, backbone: nn.Module, layer: str | None, names: Sequence[str]) -> None:
        self._backbone, self._layer, self._names = backbone, layer, list(names)

    def run(self, x: Tensor) -> "AutogradPass":
        """Run the network once, up to the features."""
        passed, draws = self._run_once(x)
        draws.check_again(lambda: self._run_once(x)[1])
        return passed

    def _run_once(self, x: Tensor) -> "tuple[AutogradPass, RandomDraws]":
        began, leaves, mode = start_clock(), dict[str, Tensor](), _OnlyDifferentiable()

        # What follows a target layer gets another tensor, with a graph that begins there.
        def separate(name: str, output: Tensor) -> Tensor:
            if not leaves:
                _Differentiable().__enter__()
            mode.reached = True
            set_gradients(enabled=True)  # the end of a region that switches them off here puts that back
            rollback.go_above_autograd()
            with without_function_modes(), without_inference(), torch.enable_grad():
                leaves[name] = output.clone() if output.requires_grad else output.clone().requires_grad_()
                return leaves[name].clone()

        x = map_input(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, x)
        with without_inference(), Rollback() as rollback:
            rollback.note_torch()
            rollback.go_below_autograd()
            push_dispatch_mode(mode)
            output = run_to_features(self._backbone, self._layer, self._names, x, separate, Hooks(rollback))
        log_since(began, "run of the network: for autograd behind %s", self._names)
        return AutogradPass([leaves[name] for name in self._names], output), mode.draws


@dataclass
class AutogradPass(Pass):
    """One forward pass of an :class:`AutogradPath`."""

    activations: list[Tensor]
    output: Any
    _graph: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Separate the graph from the visible tensors."""
        self._leaves = self.activations
        self._graph = tree_tensors(self.output)
        self.activations = [leaf.detach() for leaf in self._leaves]
        self.output = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, self.output)

    @property
    def differentiable(self) -> bool:
        """Whether the output depends on a target layer, as far as autograd knows."""
        return any(tensor.requires_grad for tensor in self._graph)

    def pullback(self, output_gradients: Sequence[Tensor | None], target: int, start: Any = None) -> Pullback:
        """Return the derivative with respect to ``activations[target]``."""
        if start is not None:
            need_tape(self, "secants")
        leaf = self._leaves[target]
        pairs = [
            (tensor, seed)
            for tensor, seed in zip(self._graph, output_gradients, strict=True)
            if seed is not None and tensor.requires_grad
        ]
        if not pairs:
            raise ValueError(_UNCONNECTED)
        tensors, grad_outputs = zip(*pairs, strict=True)
        # Seeds far below 1 would be lost in a backbone's half precision.
        size = torch.stack([seed.reshape(len(seed), -1).abs().amax(1) for seed in grad_outputs]).amax(0)
        size = torch.where(size > 0, size, 1.0)
        pulled = []
        with without_inference():
            for k, factor in enumerate(size):
                rows = [(seed[k] / factor).to(tensor.dtype) for tensor, seed in pairs]
                (part,) = torch.autograd.grad(tensors, leaf, rows, retain_graph=True, allow_unused=True)
                if part is None:
                    raise ValueError(_UNCONNECTED)
                pulled.append(part)
        stacked = torch.stack(pulled).to(grad_outputs[0].dtype)
        return Pullback(Cotangent(stacked * size.reshape(-1, *[1] * leaf.dim())))

    def bytes_per_target(self) -> int:
        """Return roughly how much memory one target takes for the batch."""
        return 4 * max(leaf.numel() * leaf.element_size() for leaf in self._leaves)


_UNCONNECTED = "the features do not depend on the target layer (a detach, or no gradient on the way?)"
