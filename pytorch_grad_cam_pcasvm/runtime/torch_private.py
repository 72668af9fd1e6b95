"""Private names of torch, under names of our own; beside each stands what it promises, and a test holds it.

No other file of this package takes a private name from torch. Most names are torch's own objects, as they are called at
every operation of a network, where a function of our own around them would be felt.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table, decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.cond import cond_op
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import _python_dispatch, _pytree
from torch.utils.hooks import BackwardHook

__all__ = [
    "BACKWARD_HOOK_CODE",
    "COMPILER",
    "COMPILER_FRAMES",
    "GRADIENT_SWITCHES",
    "MODULE_CALL_CODE",
    "BackwardHookFunction",
    "DataDependentOutputException",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "allows_forward_gradients",
    "cond_op",
    "count_dispatch_modes",
    "count_function_modes",
    "decomposition_table",
    "enable_python_dispatcher",
    "exclude_dispatch_key",
    "find_dispatch_mode",
    "find_function_mode",
    "global_forward_pre_hooks",
    "has_global_backward_hook",
    "has_global_hook",
    "has_kernel",
    "include_dispatch_key",
    "is_dispatch_key_excluded",
    "is_dispatch_key_included",
    "is_function_mode_on",
    "is_in_dual_level",
    "is_in_functorch",
    "is_optimizing_scripts",
    "leave_dual_level",
    "lstm_layer",
    "optimize_scripts",
    "parse_dispatch_key",
    "pop_dispatch_mode",
    "pop_function_mode",
    "push_dispatch_mode",
    "read_function_mode",
    "split_lstm_weights",
    "stack_lstm_layers",
    "switch_gradients",
    "tree_flatten",
    "tree_is_leaf",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_tensors",
    "tree_unflatten",
    "without_dispatch_modes",
    "without_function_modes",
    "without_function_subclasses",
]  # fmt: skip

# Trees: lists, tuples, dicts, named tuples, and what libraries register, such as the outputs of Hugging Face. None is a
# leaf.
tree_flatten = _pytree.tree_flatten
"""Return the leaves of a tree, and what puts them together again."""
tree_unflatten = _pytree.tree_unflatten
"""Return the tree of leaves, :func:`tree_flatten`'s way back."""
tree_leaves = _pytree.tree_leaves
"""Return the leaves of a tree."""
tree_is_leaf = _pytree.tree_is_leaf
"""Return whether something is no tree."""
tree_map = _pytree.tree_map
"""Return a tree with a function of each leaf."""
tree_map_only = _pytree.tree_map_only
"""Return a tree with a function of each leaf of a type."""


def tree_tensors(tree: Any) -> list[Tensor]:
    """Return the leaves of a tree that are tensors."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# Modes of dispatch, which see every operation below autograd.
DispatchMode = _python_dispatch.TorchDispatchMode
"""The class of modes that see operations as overloads; ``with`` pushes one."""
count_dispatch_modes = torch._C._len_torch_dispatch_stack
"""Return how many modes of dispatch are on in this thread."""
find_dispatch_mode = _python_dispatch._get_current_dispatch_mode
"""Return the innermost mode of dispatch; None: none is on."""
push_dispatch_mode = _python_dispatch._push_mode
"""Switch on a mode of dispatch, without ``with``."""
pop_dispatch_mode = _python_dispatch._pop_mode
"""Switch off the innermost mode of dispatch."""
without_dispatch_modes = _python_dispatch._disable_current_modes
"""A context without modes of dispatch, which are on again behind it."""

# Modes of functions, which see every call of torch from Python.
count_function_modes = torch._C._len_torch_function_stack
"""Return how many function modes are on in this thread."""
read_function_mode = torch._C._get_function_stack_at
"""Return the function mode at a place of the stack, of which the last is the innermost."""
find_function_mode = torch.overrides._get_current_function_mode
"""Return the innermost function mode; None: none is on."""
pop_function_mode = torch._C._pop_torch_function_stack
"""Switch off the innermost function mode."""
is_function_mode_on = torch._C._is_torch_function_mode_enabled
"""Return whether a function mode is on, and may see."""
without_function_modes = torch._C.DisableTorchFunction
"""A context that neither modes nor subclasses of tensors see."""
without_function_subclasses = torch._C.DisableTorchFunctionSubclass
"""A context that subclasses of tensors do not see."""

# Dispatch: the keys by which an operation finds its kernels.
parse_dispatch_key = torch._C._dispatch_key_parse
"""Return the key of a name."""
is_dispatch_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
"""Return whether a key is left out in this thread."""
exclude_dispatch_key = torch._C._dispatch_tls_set_dispatch_key_excluded
"""Leave a key out in this thread, ``(key, True)``, or no more, ``(key, False)``."""
is_dispatch_key_included = torch._C._dispatch_tls_is_dispatch_key_included
"""Return whether a key is asked in this thread, whatever the tensors are."""
include_dispatch_key = torch._C._dispatch_tls_set_dispatch_key_included
"""Ask a key in this thread, ``(key, True)``, or no more, ``(key, False)``."""
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
"""Return whether an operation, by its name, has a kernel of its own for a key, by its name."""

# Gradients.
switch_gradients = torch._C._set_grad_enabled
"""Switch gradients on or off in this thread: what all of torch's own switches call, which function modes see."""
allows_forward_gradients = torch._C._is_fwd_grad_enabled
"""Return whether forward derivatives are on, as they are but in inference mode and in an ``autograd.Function``."""
GRADIENT_SWITCHES = "torch.autograd.grad_mode", "torch.utils._contextlib"
"""The names of the modules that ``no_grad`` and its like are made of, with or without ``with``."""
is_in_functorch = torch._C._are_functorch_transforms_active
"""Return whether a transform of torch.func is running in this thread."""


def is_in_dual_level() -> bool:
    """Return whether a level of forward derivatives is open."""
    return forward_ad._current_level >= 0


def leave_dual_level() -> None:
    """Leave the level of forward derivatives, of which there is at most one; torch counts it in two places.

    Raises:
        RuntimeError: it was left, in the place where torch would then raise.
    """
    try:
        torch._C._exit_dual_level(level=0)
    finally:
        forward_ad._current_level = -1


# Modules and their hooks.
has_global_hook = torch_module._has_any_global_hook
"""Return whether a hook of all modules is registered."""
global_forward_pre_hooks = torch_module._global_forward_pre_hooks
"""The hooks that run before every module, by number, which ``register_module_forward_pre_hook`` writes into."""
MODULE_CALL_CODE = nn.Module._call_impl.__code__
"""The code that calls a module's hooks and its forward, with the module as ``self``."""
BACKWARD_HOOK_CODE = BackwardHook._apply_on_tensors.__code__
"""The code that puts a :class:`BackwardHookFunction` around what a module takes or returns."""


def has_global_backward_hook() -> bool:
    """Return whether a backward hook of all modules is registered."""
    return bool(torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)


# Scripted and compiled code.
is_optimizing_scripts = torch._C._get_graph_executor_optimize
"""Return whether TorchScript compiles its graphs further, past the dispatcher."""
optimize_scripts = torch._C._set_graph_executor_optimize
"""Let TorchScript compile its graphs further, or not."""
COMPILER = "torch._compile", "torch._dynamo"
"""Beginnings of the names of modules that stand between a network's code and what is compiled of it."""
COMPILER_FRAMES = "torch._dynamo.eval_frame"
"""The name of the module with a frame on the stack while compiled code runs."""

# Decompositions of an LSTM, which in single precision is one operation.
split_lstm_weights = decompositions.gather_params
"""Return the weights of each layer and direction: ``(params, has_biases, has_projections)``."""
stack_lstm_layers = decompositions._rnn_helper
"""Return the output and the last states of each layer, run by a function such as :func:`lstm_layer`."""
lstm_layer = decompositions.one_layer_lstm
"""Return the output and the last states of one layer in one direction."""
