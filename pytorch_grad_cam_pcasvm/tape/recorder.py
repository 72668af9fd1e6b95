"""Recording: the operations that torch's dispatcher runs between the target layers and the features of a network.

A :class:`Recorder` is a ``DispatchMode`` below autograd, where an operation arrives under one name, as a whole,
with its arguments in the order of its schema: from modules, functions, scripted code, ``vmap``, checkpoints and
autocast. Those with an argument that depends on a target layer's output are recorded. Everything else is a constant of
this call: the stem, weights, and whatever bypasses a target layer. Comparisons, indices, and what is detached or
computed without gradients are recorded, too, as *switches*: no gradient flows through them, but a replay computes them
again.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from pytorch_grad_cam_pcasvm.rules.decompositions import decomposed
from pytorch_grad_cam_pcasvm.rules.registry import find_rule, is_constant
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError, refuse
from pytorch_grad_cam_pcasvm.runtime.rollback import Rollback
from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    COMPILER,
    BackwardHookFunction,
    DispatchMode,
    allows_forward_gradients,
    cond_op,
    find_dispatch_mode,
    pop_dispatch_mode,
    push_dispatch_mode,
    tree_map,
    tree_tensors,
)
from pytorch_grad_cam_pcasvm.tape.alias_tracker import (
    AliasTracker,
    gradient_hook,
    hidden_write,
    other_thread,
    run_unmarked,
    unseen_write,
)
from pytorch_grad_cam_pcasvm.tape.aliases import View, overlaps
from pytorch_grad_cam_pcasvm.tape.overlapping import (
    check_order,
    find_parents,
    find_view_around,
    overlapping_write,
    write_back,
)
from pytorch_grad_cam_pcasvm.tape.stem import RandomDraws, random_numbers
from pytorch_grad_cam_pcasvm.tape.step import (
    Operation,
    Ref,
    Step,
    find_write_mask,
    function_around,
    functional,
    list_tensors,
    mapped,
    operation,
    plain,
)
from pytorch_grad_cam_pcasvm.tape.tape import HALF, Tape, autocast_dtype, has_gradient, identify_memory

# A call with a rule as a whole, while it runs: its step, and the ids of its tensors.
Composite = tuple[Step, set[int]]


class Recorder(DispatchMode):
    """Records the operations that depend on the target layers.

    Args:
        keeps_all: keep the numbers of all values, as a replay from other activations needs; otherwise of those that
            rules read for gradients, and the network's own memory is given back as without a recorder.
        halves: keep what constants were before they were cast to half precision, as autocast does to weights.

    Attributes:
        tracker: knows which tensors stand for which values.
        tape: the tape.
    """

    supports_higher_order_operators = True

    def __init__(self, *, keeps_all: bool = True, halves: bool = False) -> None:
        super().__init__()
        self.tracker = AliasTracker(keeps_all=keeps_all)
        self.tape = self.tracker.tape
        self._halves = halves
        self.explanation = explanation.get()
        self.draws = RandomDraws()
        self._thread = get_ident()
        self._forked: str | None = None  # the first operation on the path that another thread ran
        self._in_function = False  # whether a scripted function, in which nothing may be raised, detaches a value
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}  # constants in half precision, and as they were, by id
        self._foreign: set[Any] = set()  # functions that were noted
        self.python_calls = 0  # of torch's functions that are running
        self.enabled = True  # whether Python has gradients switched on: in an autograd.Function torch has them off
        self._in_inference = False  # whether the target layer's own region of inference mode has not ended yet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it if it depends on a target layer."""
        around, self.tracker.dispatching = self.tracker.dispatching, True
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            self.tracker.dispatching = around

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if get_ident() != self._thread:  # torch.jit.fork takes modes along
            self._note_fork(func, args, kwargs)
            return func(*args, **kwargs)
        if explanation.get() is not self.explanation:
            return func(*args, **kwargs)
        op = operation(func)
        if op.draws:
            self.draws.check(op, args, kwargs)
        if not self.tape.roots:
            return func(*args, **kwargs)
        if self.tracker.written is not None:
            for tensor in op.written_in(args, kwargs):
                self.tracker.save_before_write(tensor)
            return func(*args, **kwargs)
        if op.aliases and not _has_rule(func, args) and (parts := decomposed(func)) is not None:
            with self._listening():  # to views with rules, in case that something is written into them
                return parts(*args, **kwargs)
        tensors = list_tensors((args, kwargs))
        if not self.tracker.depends(tensors):
            for tensor in op.written_in(args, kwargs):
                self.tracker.save_before_write(tensor)
                if self.tracker.shares_memory(tensor):  # with values of the tape, which would not know of it
                    raise unseen_write(op.name)
            result = func(*args, **kwargs)
            if op.aliases:
                self.tracker.track_views(func, args, kwargs, result, switch=is_constant(func))
            if self._halves and op.name in _CASTS and result.dtype in HALF and args[0].dtype not in HALF:
                self._cast[id(result)] = result, args[0]
            return result
        if op.draws and op.is_random(args, kwargs):
            raise random_numbers(op)  # of values on the path: a replay would draw others
        if func is cond_op:  # an if, for which the network reads a number
            self.tape.branches = True
            predicate, on_true, on_false, operands = args
            with self._listening():
                return (on_true if predicate else on_false)(*operands)
        if op.of_shape:
            self.check_functions(args)
            return func(*args, **kwargs)
        constant = is_constant(func)
        if func is torch.ops.aten.detach.default and not self.python_calls and self.tracker.is_smooth(tensors):
            self._in_function |= not _calls_scripted_module(sys._getframe())
        smooth = self.tracker.is_smooth(tensors) and self._has_gradients() and not constant
        if op.written:
            try:
                return self._record_write(func, op, args, kwargs, smooth=smooth)
            finally:
                for tensor in op.written_in(args, kwargs):
                    self.tracker.reread_versions(tensor)
        if smooth and not _has_rule(func, args) and (parts := decomposed(func)) is not None:
            with self._listening():
                return parts(*args, **kwargs)
        step = self._prepare_step(*plain(func, args), kwargs, smooth=smooth)
        result = run_unmarked(func, args, kwargs, self.tracker.aliases)
        if self._append_step(step, result, smooth=smooth):
            if op.sized:
                self.tape.sized.update(index for index in step.outputs if index is not None)
            gradients = torch.is_grad_enabled() and self.enabled and not constant
            self.tracker.track_views(func, args, kwargs, result, switch=not smooth and not gradients)
        return result

    def _note_fork(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note an operation on the path in another thread, which must not fail there."""
        if self.tape.roots and self._forked is None:
            aliases = (self.tracker.aliases.get(id(tensor)) for tensor in list_tensors((args, kwargs)))
            if any(alias is not None and alias.value is not None for alias in aliases):
                self._forked = operation(func).name

    def begin_composite(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Composite | None:
        """Begin a call that has a rule as a whole; return it, or None if its parts are recorded."""
        if self.tracker.written is not None or not self.tape.roots:
            return None
        tensors = list_tensors((args, kwargs))
        if not self.tracker.depends(tensors) or not self.tracker.is_smooth(tensors) or not self._has_gradients():
            return None
        with self.tracker.paused():
            step = self._prepare_step(call, args, kwargs, smooth=True)
        self.tracker.written = set()
        return step, set(map(id, tensors))

    def end_composite(self, composite: Composite, result: Any, *, several: bool = False) -> None:
        """Record such a call as one step, unless it has failed, and the network goes on without it."""
        (step, arguments), written, self.tracker.written = composite, self.tracker.written or set(), None
        for memory in written:
            self.tracker.count_write(memory, step.name)
        if result is not None:
            over = isinstance(result, Tensor) and id(result) in arguments and identify_memory(result) in written
            step.inplace, step.several = bool(written), several
            with self.tracker.paused():
                self._append_step(step, result, smooth=True, over=over)

    def root(self, name: str, output: Tensor) -> Tensor:
        """Begin at the output of a target layer, or add one; return an alias of it for the layers behind."""
        if self.tracker.written is not None:
            raise NoClosedFormError(
                f"the target layer {name!r} is inside a layer with a registered rule", "choose that layer itself"
            )
        if not self.tape.roots:
            self._in_inference = torch.is_inference_mode_enabled()
        with self.tracker.paused():
            # A layer may return its input: give the output an identity of its own, as others may use the input, too.
            following = output.detach()
            source = self.tracker.find_value(output) if id(output) in self.tracker.aliases else None
            index = self.tracker.add_value(following, smooth=True, keep=True)
            if source is not None:
                self.tracker.aliases[id(following)].view = View(output, torch.ops.aten.alias.default, (), {}, False)
                self.tracker.add_step(Step(torch.ops.aten.alias.default, (Ref(source),), {}, (source,), (index,)))
        self.tape.roots[name] = index
        self.tracker.mark()
        return following

    def finish(self, output: Any) -> Tape:
        """Return the tape of a pass that returned ``output``."""
        if self._forked is not None:
            raise other_thread(self._forked)
        if self._in_function:
            raise _scripted_function()
        self.tracker.check_exposed()
        with self.tracker.paused():
            self.tape.outputs = [self.tracker.find_value(leaf) for leaf in tree_tensors(output)]
            self.tape.output = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
        self.tape.drop_dead_ends()
        return self.tape

    def clear(self) -> None:
        """Forget the tensors of the pass, whose callbacks hold this recorder, and with it all that it kept."""
        self.tracker.clear()
        self._cast.clear()

    def check_functions(self, arguments: Any) -> None:
        """Refuse an ``autograd.Function`` that reads shapes or memory of arguments, and so may compute unseen."""
        tensors = list_tensors(arguments) if self.tape.roots else []
        if self.tracker.depends(tensors) and self.tracker.is_smooth(tensors):
            self._has_gradients()

    def _has_gradients(self) -> bool:
        """Return whether autograd would record a graph here; refuse a function with a gradient of its own."""
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._in_inference = self._in_inference and inference
        if inference and not self._in_inference:
            return False
        if not self.enabled:
            return False
        if not allows_forward_gradients() and not (inference and grad):
            function = function_around(sys._getframe(2))
            if function is BackwardHookFunction:
                raise gradient_hook("a module has a backward hook on the path")
            if function is not CheckpointFunction:
                raise NoClosedFormError(
                    f"{function.__name__} is an autograd.Function, whose gradient is defined by its own backward",
                    f"register its Jacobian with @register_jacobian({function.__name__})",
                    "choose a later target layer",
                )
        return grad

    def _prepare_step(self, function: Any, args: Any, kwargs: Any, *, smooth: bool, written: Any = None) -> Step:
        """Copy a call's arguments into a step, before the call can overwrite them."""
        inputs: list[int] = []
        memory_written = None if written is None else identify_memory(written)

        def take_operand(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            index = self.tracker.find_value(item)
            if index is not None:
                inputs.append(index)
                return Ref(index)
            memory = identify_memory(item)
            if item is written or self.tracker.shares_memory(item) or (memory is not None and memory == memory_written):
                return item.clone()
            self.tracker.keep_constant(item, memory)
            if id(item) in self._cast:
                self.tape.full[id(item)] = self._cast[id(item)][1]
            return item

        args = mapped(tuple(args), take_operand)
        kwargs = {name: mapped(value, take_operand) for name, value in kwargs.items()}
        step = Step(function, args, kwargs, tuple(inputs))
        if smooth:
            smooths = [index for index in inputs if index not in self.tape.switches]
            if self._reads(step, "inputs") or (self._reads(step, "others") and len(smooths) > 1):
                for index in smooths:
                    self.tracker.keep_numbers(index)
            for index in self.tape.switches.intersection(inputs):
                self.tracker.keep_numbers(index)
        return step

    def _reads(self, step: Step, part: str) -> bool:
        """Return whether a step's rule reads numbers of its inputs, of the others of them, or its output."""
        rule = step.rule
        compared = rule is not None and rule.foreign and step.function not in self._foreign  # with autograd
        return rule is None or compared or rule.needs in ("all", part)

    def _append_step(self, step: Step, result: Any, *, smooth: bool, over: bool = False) -> bool:
        """Append the step of a call that has run to the tape; return whether it gave new tensors."""
        step.single = isinstance(result, Tensor)
        tensors = [result] if step.single else list(result) if isinstance(result, list | tuple) else []
        alias = self.tracker.aliases.get(id(result)) if step.single and not over else None
        if alias is not None and alias.value is not None:
            return False  # dropout in evaluation mode, and whatever else gives its input back
        if not any(isinstance(tensor, Tensor) for tensor in tensors):
            self.tape.branches = True
            return False
        step.outputs = tuple(
            self.tracker.add_value(tensor, smooth=smooth and has_gradient(tensor))
            if isinstance(tensor, Tensor)
            else None
            for tensor in tensors
        )
        for output in step.outputs if smooth and self._reads(step, "y") else ():
            if output is not None:
                self.tracker.keep_numbers(output)
        self._foreign.add(step.function)
        if not hasattr(step.function, "_schema"):
            step.autocast = autocast_dtype(self.tape.values[step.inputs[0]].device.type)
        self.tracker.add_step(step)
        return True

    def _record_write(self, func: Any, op: Operation, args: Any, kwargs: Any, *, smooth: bool) -> Any:
        """Run an operation that writes into its first argument, and record it as one that does not."""
        with self._listening():
            mask = find_write_mask(func, args)
            if mask is not None:
                return args[0].masked_fill_(mask, args[2].reshape(()))
        (target, *outputs), twin = op.written_in(args, kwargs), functional(func)
        if outputs or twin is None:
            if not outputs and (parts := decomposed(func)) is not None:
                with self._listening():
                    return parts(*args, **kwargs)
            refuse(
                ValueError if any(item.is_out for item in func._schema.arguments) else NoClosedFormError,  # as autograd
                f"{op.name} writes into tensors, and is not known as an operation that does not",
                "write y = ..., without out= or an underscore",
            )
        options = {name: item for name, item in kwargs.items() if item is not target}  # without out=
        if smooth and find_rule(twin) is None:
            if (parts := decomposed(func)) is not None:
                with self._listening():
                    return parts(*args, **kwargs)
            if (parts := decomposed(twin)) is not None:
                with self._listening():
                    return target.copy_(parts(*args, **options))
        if not smooth and self.tracker.is_smooth((target,)) and not is_constant(func):
            raise hidden_write(f"{op.name}, without gradients,")
        whole, expected, arguments = target, None, args
        if overlaps(target):
            view = find_view_around(self.tracker, target, op.name)
            whole = view.parent
            with self._listening():
                twin, rest = overlapping_write(twin, args, options, whole, view.places)
            args, options = (whole, *rest), {}
            smooth = smooth or (is_constant(func) and self.tracker.is_smooth((whole,)))
            with self.tracker.paused():
                expected = twin(*args)
        step = self._prepare_step(twin, args, options, smooth=smooth, written=whole)
        upwards = find_parents(self.tracker, whole)
        self.tracker.save_before_write(target)
        result = func(*arguments, **kwargs)
        if expected is not None:
            check_order(op.name, whole, expected)
        alias = self.tracker.track(whole)
        if identify_memory(target) != alias.memory:
            refuse(ValueError, f"{op.name} gives a tensor other memory", "write y = x")  # as autograd
        sharing = () if alias.memory is None else self.tracker.sharing.get(alias.memory, ())
        shared = alias.memory is not None and (bool(upwards) or len(sharing) > 1)
        if op.reshapes and shared:
            raise unseen_write(op.name)
        if alias.memory is not None and not op.reshapes:
            self.tracker.count_write(alias.memory, op.name)
        alias.view = None if op.reshapes else alias.view
        self._append_step(step, whole, smooth=smooth, over=True)
        write_back(self.tracker, upwards, alias.value)
        return result

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Record the operations inside an operation, from within its own call."""
        push_dispatch_mode(self)
        try:
            yield
        finally:
            if find_dispatch_mode() is self:  # after an interrupt this may come late, in another call
                pop_dispatch_mode()


def _has_rule(function: Any, args: Any) -> bool:
    rule = find_rule(function)
    return rule is not None and (rule.holds is None or rule.holds(*args))


def _calls_scripted_module(frame: FrameType | None) -> bool:
    """Return whether the nearest frame outside of this package and torch's wrappers calls a scripted module."""
    between = __name__.partition(".")[0], *COMPILER
    while frame is not None and frame.f_globals.get("__name__", "").startswith(between):
        frame = frame.f_back
    module = None if frame is None else frame.f_locals.get("self")
    return isinstance(module, torch.jit.ScriptModule)


def _scripted_function() -> NoClosedFormError:
    """Return the refusal of a detach that no Python code calls: perhaps autograd has a gradient there."""
    return NoClosedFormError(
        "a function scripted by torch.jit is on the path, and after runs with gradients TorchScript differentiates it "
        "by itself: it detaches what it is given, which cannot be told from a detach of your own",
        "call the function without torch.jit.script",
        "make it the forward of a module, torch.jit.script(module)",
    )


explanation: ContextVar[object] = ContextVar("explanation", default=None)


def explain_unseen(rollback: Rollback) -> None:
    """Begin an explanation that an outer recording does not see, as where a hook explains a network."""
    rollback.set_variable(explanation, object())
    rollback.note_dispatch()
    rollback.go_above_autograd()
    rollback.allow_draws()


_CASTS = {"aten::to", "aten::_to_copy", "aten::_autocast_to_reduced_precision"}
