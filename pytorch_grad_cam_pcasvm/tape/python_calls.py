"""What the dispatcher does not show: calls with a rule as a whole, numbers read by Python, gradients switched."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from pytorch_grad_cam_pcasvm.rules.registry import layer_kind, whole_of, with_rules
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError, refuse
from pytorch_grad_cam_pcasvm.runtime.rollback import Hooks, Mode, Rollback
from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    GRADIENT_SWITCHES,
    allows_forward_gradients,
    has_global_backward_hook,
    is_optimizing_scripts,
    optimize_scripts,
    switch_gradients,
)
from pytorch_grad_cam_pcasvm.tape.alias_tracker import gradient_hook, unseen_write
from pytorch_grad_cam_pcasvm.tape.recorder import Recorder, explanation
from pytorch_grad_cam_pcasvm.tape.step import list_tensors, mapped

_READING = {
    *(Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.__deepcopy__),
    *(Tensor.storage, Tensor.untyped_storage, Tensor.data_ptr, Tensor.__reduce_ex__, torch.tensor, torch.as_tensor),
}
_DATA: Any = Tensor.data
_IS_LEAF: Any = Tensor.is_leaf
_GRAD_FN: Any = Tensor.grad_fn
_DIFFERENTIATING = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_CHECKPOINT = CheckpointFunction.forward.__code__


class _Graph:
    """Stands for the graph of a tensor on the path, which there is not; who does more than look at it is refused."""

    def __getattr__(self, name: str) -> Any:
        raise gradient_hook("the network uses the graph of a tensor on the path")


class PythonCallMode(Mode):
    """Sees the calls of Python functions; while it is on, attention takes no fast path of one fused operation.

    Args:
        recorder: is told what the dispatcher does not show.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder, self._tracker = recorder, recorder.tracker
        self._layers: list[tuple[Any, bool]] = []  # registered ones that are running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, and let the recorder know that Python calls it."""
        self._recorder.python_calls += 1
        try:
            return self._run_call(func, args, kwargs or {})
        finally:
            self._recorder.python_calls -= 1

    def _run_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call; as one step, if it has a rule as a whole."""
        if explanation.get() is not self._recorder.explanation:  # another one inside
            return func(*args, **kwargs)
        if func is switch_gradients:
            if _is_checkpoint():
                args = (True,)  # its backward pass runs what it has called again, with gradients
            # Not in the forward of an autograd.Function, or in a hook of saved tensors, which end without a word.
            if allows_forward_gradients() and torch.is_grad_enabled() == self._recorder.enabled:
                self._recorder.enabled = args[0]
        elif func == _DATA.__get__:
            func = Tensor.detach
        elif func in _READING:
            self._recorder.check_functions(args[:1])
            self._tracker.expose(args[:1])
            args = mapped(tuple(args), _without_graph)  # or torch would warn of it, or refuse to read
        elif func in _DIFFERENTIATING:
            refuse(NoClosedFormError, "the network calls autograd itself", "compute it before the network runs")
        elif func is Tensor.retain_grad:
            return None  # of what has no graph
        elif func == _DATA.__set__ and self._tracker.depends(args[:1]):
            raise unseen_write("x.data = ...")
        elif func is Tensor.register_hook and self._tracker.depends(args[:1]):
            raise gradient_hook("the network registers a hook on a tensor")
        elif func == _IS_LEAF.__get__ and self._tracker.depends(args):
            return False  # nor would it be one with a graph
        elif func == _GRAD_FN.__get__ and self._tracker.depends(args):
            return _Graph()
        call = whole_of(func)
        composite = None if call is None else self._recorder.begin_composite(call, tuple(args), kwargs)
        result = None
        try:
            result = func(*args, **kwargs)
        finally:
            if composite is not None:
                self._recorder.end_composite(composite, result)
        self._tracker.mark()
        return result

    def watch(self, modules: Sequence[nn.Module], rollback: Rollback, hooks: Hooks) -> None:
        """Record layers that have rules of their own as one step each, and refuse unseen changes of gradients.

        Args:
            modules: all modules of the network.
            rollback: puts back what this changes.
            hooks: of the pass.
        """
        # Compiled further, scripted code runs some operations past the dispatcher.
        rollback.note(optimize_scripts, is_optimizing_scripts())
        optimize_scripts(False)
        everywhere = has_global_backward_hook()
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
            hooks.before_scripted(self._enter_script)
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # which takes no hooks
            if module._backward_hooks or module._backward_pre_hooks or everywhere:
                hooks.before(module, self._refuse_hooked)
        for module in with_rules(modules):
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.before(module, self._enter_layer)
                # First of all: the user's own hooks on the layer are steps of their own.
                hooks.after(module, self._leave_layer, prepend=True, always=True)

    def _enter_layer(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if len(args) == 1 else args
        self._layers.append((self._recorder.begin_composite(layer_kind(module), (module, x), kwargs), x is args))

    def _leave_layer(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        composite, several = self._layers.pop()
        if composite is not None:
            self._recorder.end_composite(composite, output, several=several)

    def _refuse_hooked(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._tracker.depends(list_tensors((args, kwargs))):
            raise gradient_hook(f"{type(module).__name__} has a backward hook on the path")

    def _enter_script(self, module: Any, args: Any) -> None:
        # Of arguments that require gradients TorchScript takes a graph that it differentiates itself, once it has one.
        self._tracker.unmark()
        if not self._tracker.depends(list_tensors(args)):
            return
        if has_global_backward_hook():
            raise gradient_hook(f"{module.original_name} has a backward hook on the path")
        unseen = next(filter(_is_unseen, _nodes(module.inlined_graph)), None)
        if unseen is not None:
            refuse(
                ValueError,  # autograd sees no more
                f"the scripted {module.original_name} was optimised for inference, and its {unseen} cannot be seen",
                "use the module as it was scripted",
            )


_SEEN = {"aten", "prim", "torchvision", "quantized"}


def _is_unseen(node: str) -> bool:
    return node.partition("::")[0] not in _SEEN or node.startswith("prim::mkldnn")


def _nodes(graph: Any) -> Iterator[str]:
    for node in graph.nodes():
        yield node.kind()
        for block in node.blocks():
            yield from _nodes(block)


def _is_checkpoint() -> bool:
    """Return whether a reentrant checkpoint itself switches gradients, to which autograd pays no attention."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") in GRADIENT_SWITCHES:
        frame = frame.f_back
    return frame is not None and frame.f_code is _CHECKPOINT


def _without_graph(item: Any) -> Any:
    return item.detach() if isinstance(item, Tensor) and item.requires_grad else item
