"""The tape: a straight-line program on concrete tensors, which can be run again from other activations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.modules import unchanged
from pytorch_grad_cam_pcasvm.rules.cotangents import cotangent
from pytorch_grad_cam_pcasvm.rules.rule import Call
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.log import log_since, start_clock
from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_tensors,
    tree_unflatten,
    without_function_modes,
)
from pytorch_grad_cam_pcasvm.tape.step import Ref, Step, mapped


@dataclass
class Tape:
    """The steps of one forward pass, and the values between them.

    A value may be a *switch*: a comparison, an index, something detached, or computed without gradients or from these.
    It depends on a target layer, but has no gradient: pullbacks treat it as a constant, and only a replay computes it.

    Attributes:
        steps: the steps in the order of their calls.
        values: tensors that depend on a target layer, as the steps saw them, even if they were overwritten later.
        roots: value of each target layer's output, by dotted name.
        output: the output of the network, or of its feature layer.
        outputs: position of each tensor of the output among the values; None if it depends on no target layer.
        branches: whether the network used numbers of these values outside the tape, as in ``if x.mean() > 0``, or may
            have, in another thread: constants here, but different ones at other activations.
        complete: whether all numbers were kept; otherwise those that gradients need.
        sized: values whose shape depends on numbers, which the network may have read, as in ``len(mask.nonzero())``.
        switches: values without a gradient.
        kept: values whose numbers were kept.
        full: constants in half precision as they were before they were cast, by id.
        verified: users' rules that were compared with autograd.
        network: the network that ran, which knows the names of its modules.
        constants: tensors that steps use, with the count of writes into each, and its memory.
    """

    steps: list[Step] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    roots: dict[str, int] = field(default_factory=dict)
    output: Any = None
    outputs: list[int | None] = field(default_factory=list)
    branches: bool = False
    complete: bool = True
    sized: set[int] = field(default_factory=set)
    switches: set[int] = field(default_factory=set)
    stored_values: set[int] = field(default_factory=set)
    full: dict[int, Tensor] = field(default_factory=dict)
    verified: set[Any] = field(default_factory=set)
    network: nn.Module | None = None
    constants: list[tuple[Tensor, int | None, int | None]] = field(default_factory=list)
    _recorded: dict[Step, Call] = field(default_factory=dict, init=False, repr=False)

    def name_module(self, module: nn.Module | None) -> str | None:
        """Return the dotted name of a module in the network, or None."""
        modules = () if self.network is None or module is None else self.network.named_modules()
        return next((name or type(module).__name__ for name, other in modules if other is module), None)

    def __str__(self) -> str:
        """Return the steps, line by line: operation, module, shapes, and the first one without a rule."""
        names = {} if self.network is None else {module: name for name, module in self.network.named_modules()}
        lines, missing = [], False
        for number, step in enumerate(self.steps):
            shapes = ", ".join(str(tuple(self.values[o].shape)) for o in step.outputs if o is not None)
            constant = all(output is None or output in self.switches for output in step.outputs)
            rule = "no gradient" if constant else "rule" if step.rule is not None else "no rule"
            first = rule == "no rule" and not missing
            missing |= first
            mark = "  <-- the first without a rule" if first else ""
            where = names.get(step.where, "") if step.where is not None else ""
            lines.append(f"{number:4d}  {step.name:<36} {where:<32} {shapes:<24} {rule}{mark}")
        return "\n".join(lines)

    def following(self, *roots: int, switches: bool = False) -> tuple[list[Step], set[int]]:
        """Return the steps and the values that depend on some, including these; with switches or without."""
        values, steps = set(roots), []
        for step in self.steps:
            if not values.isdisjoint(step.inputs) and not any(root in step.outputs for root in roots):
                outputs = [
                    output
                    for output in step.outputs
                    if output is not None and (switches or output not in self.switches)
                ]
                if outputs:
                    steps.append(step)
                    values.update(outputs)
        return steps, values

    def leading(self, steps: Sequence[Step], to: Iterable[int | None]) -> list[Step]:
        """Return the steps that lead to values."""
        wanted, leading = set(to), []
        for step in reversed(steps):
            if not wanted.isdisjoint(step.outputs):
                wanted.update(step.inputs)
                leading.append(step)
        return leading[::-1]

    def drop_dead_ends(self) -> None:
        """Drop the steps that do not lead to the output, or to a shape that depends on numbers."""
        self.steps = self.leading(self.steps, (*self.outputs, *self.roots.values(), *self.sized))

    def line(self, value: int, steps: Sequence[Step]) -> list[Step]:
        """Return the steps after a value one by one, as long as nothing else uses the last one's output."""
        line = list[Step]()
        while value not in self.outputs:
            users = [step for step in steps if value in step.inputs]
            if len(users) != 1 or not users[0].single or users[0].inputs.count(value) != 1:
                break
            line.append(users[0])
            value = users[0].output
        return line

    def cut(self, name: str) -> Step | None:
        """Return the first step behind a target layer that passes no gradient on; None if there is none."""
        steps, values = self.following(self.roots[name], switches=True)[0], self.following(self.roots[name])[1]
        return next((s for s in steps if values & set(s.inputs) and not values & set(s.outputs)), None)

    def resolved(self, arguments: Any, values: Mapping[int, Tensor] | None = None) -> Any:
        """Return the arguments of a step with tensors in place of Refs, from ``values`` first."""

        def value(item: Any) -> Any:
            if not isinstance(item, Ref):
                return item
            return self.values[item.index] if values is None else values.get(item.index, self.values[item.index])

        if isinstance(arguments, Mapping):
            return {name: mapped(argument, value) for name, argument in arguments.items()}
        return mapped(arguments, value)

    def recorded(self, step: Step) -> Call:
        """Return the call of a step as it was recorded, for its shapes; ``y`` is the first output."""
        if step not in self._recorded:
            first = next(index for index in step.outputs if index is not None)
            call = Call(self.resolved(step.arguments), self.resolved(step.options), self.values[first])
            self._recorded[step] = call
        return self._recorded[step]

    def keeps_numbers(self, step: Step) -> bool:
        """Return whether a step gives all of its numbers back in their order."""
        if step.rule is None or step.rule.keeps_numbers is None:
            return False
        call = self.recorded(step)
        return step.rule.keeps_numbers(*call.args, **call.kwargs, y=call.y)

    def keeps_sums(self, step: Step) -> bool:
        """Return whether the gradient's sum over the positions of a channel is the same before and after a step."""
        call = self.recorded(step)
        return step.rule is not None and step.rule.keeps_sums(*call.args, **call.kwargs, y=call.y)

    def averages_positions(self, step: Step, root: int) -> bool:
        """Return whether a step is the mean over all positions of a target layer's activations."""
        before, after = (self.values[index].shape for index in (step.inputs[0], step.output))
        if not before[:2] == after[:2] == self.values[root].shape[:2] or after[2:].numel() > 1:
            return False
        rule, call = step.rule, self.recorded(step)
        assert rule is not None  # or the path would have been refused
        if rule.secant != "linear" or not rule.keeps_sums(*call.args, **call.kwargs, y=call.y):
            return False
        pulled = rule.pulled(call, torch.ones_like(call.y)[None])
        return set(range(2, len(before))) <= set(cotangent(pulled[0] if isinstance(pulled, tuple) else pulled).same)

    def is_mean(self, root: int, tiles: int = 1) -> bool:
        """Return whether all that follows a target layer is the mean over the positions of its activations.

        Args:
            root: the layer's value.
            tiles: number of rows of each image, over which it is the mean, too, where there are several.
        """
        following = self.following(root, switches=True)[0]
        line = self.line(root, following)
        means = [step for step in line if not self.keeps_numbers(step)]
        if not means or not self.averages_positions(means[0], root):
            return False
        end = line[-1].output
        if any(end in step.inputs for step in following):
            return False
        if len(means) == 1:
            return self.values[end].shape[:1] == self.values[root].shape[:1]
        if len(means) > 2 or means[1].function is not torch.ops.aten.mean.dim:
            return False
        return list(self.recorded(means[1]).args[1]) == [1] and self.values[means[1].inputs[0]].shape[1] == tiles

    def check_constants(self) -> None:
        """Refuse a tensor that a step used, and whose numbers are others now."""
        for tensor, version, memory in self.constants:
            if count_writes(tensor) != version or identify_memory(tensor) != memory:
                raise NoClosedFormError(
                    f"a tensor of shape {tuple(tensor.shape)} was changed after the path had used it, as by "
                    "weight.data = ...",
                    "compute with a new tensor instead, as in F.linear(x, 2 * weight)",
                )

    def copy_constant(self, tensor: Tensor) -> None:
        """Let steps keep a copy of a constant that is going to be written into."""
        copy = tensor.clone()

        self.steps = [step.with_arguments(lambda item: copy if item is tensor else item) for step in self.steps]
        self.constants = [entry for entry in self.constants if entry[0] is not tensor]

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors of the output, in the order of ``outputs``."""
        return tree_tensors(self.output)

    def structured(self, tensors: Sequence[Tensor]) -> Any:
        """Return tensors in the structure of the output."""
        leaves, structure = tree_flatten(self.output)
        leaves_in_order = iter(tensors)
        return tree_unflatten(
            [next(leaves_in_order) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        )

    def replay(self, values: Mapping[int, Tensor], until: int | None = None) -> dict[int, Tensor]:
        """Run the steps after values again, from other numbers of the same shape.

        Args:
            values: the new numbers of values, by position.
            until: the value to stop at; None: the output.

        Returns:
            The values that depend on them and lead there, by position.

        Raises:
            NoClosedFormError: a value has another shape there.
            RuntimeError: the path was recorded for gradients alone.
        """
        if not self.complete:
            raise RuntimeError(
                'the path was recorded for gradients alone: a method that replays it has needs = "replay"'
            )
        began = start_clock()
        self.check_constants()
        to = (*self.outputs, *self.sized) if until is None else [until]
        steps = self.leading(self.following(*values, switches=True)[0], to)
        values = {root: _like(activations, self.values[root]) for root, activations in values.items()}
        (device_type,) = {activations.device.type for activations in values.values()}
        with torch.no_grad():
            for step in steps:
                with _autocast(step.autocast, device_type):
                    result = self.called(step, values)
                for output, tensor in zip(step.outputs, [result] if step.single else result, strict=True):
                    if output is not None:
                        # A write keeps the dtype of its destination.
                        values[output] = tensor.to(self.values[output].dtype)
                        if tensor.shape != self.values[output].shape:
                            raise NoClosedFormError(
                                f"{step.name} returns shape {tuple(tensor.shape)} where it returned "
                                f"{tuple(self.values[output].shape)} before: sizes after the target layer depend on "
                                "the activations",
                                "choose a later target layer",
                                "use a gradient method such as ClosedFormGradCAM",
                            )
        log_since(began, "replayed %d steps", len(steps))
        return values

    def list_outputs(self, values: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the tensors of the output after a replay."""
        return [
            leaf if index is None else values.get(index, leaf)
            for index, leaf in zip(self.outputs, self.leaves, strict=True)
        ]

    def in_blocks(self, values: Mapping[int, Tensor]) -> list[Tensor]:
        """Run the steps after values again for M rows, in blocks of the recorded batch size N.

        Row m takes the place of the recorded row ``m % N``: whatever bypasses the values is that row's.

        Args:
            values: the new numbers of values, shape (M, ...) each, by position.

        Returns:
            The tensors of the output, of M rows each.
        """
        count = len(next(iter(values.values())))
        padded = {}
        for root, rows in values.items():
            recorded = self.values[root]
            missing = -count % len(recorded)
            whole = torch.cat([rows, recorded[len(recorded) - missing :].to(rows)]) if missing else rows
            padded[root] = whole.split(len(recorded))
        starts = (dict(zip(padded, blocks, strict=True)) for blocks in zip(*padded.values(), strict=True))
        blocks = [self.list_outputs(self.replay(start)) for start in starts]
        if len(blocks) == 1 and not missing:
            return blocks[0]
        return [torch.cat(parts)[:count] for parts in zip(*blocks, strict=True)]

    def in_single(self) -> "Tape":
        """Return the same steps and values in single precision; the tape itself if nothing is in half precision.

        Raises:
            NoClosedFormError: a step cannot be run in single precision.
        """
        if not any(value.dtype in HALF for value in self.values):
            return self

        def single(item: Any) -> Any:
            return _single(self.full.get(id(item), item) if isinstance(item, Tensor) else item)

        try:
            return self.cast(single)
        except RuntimeError as error:
            raise NoClosedFormError(
                f"half precision is too coarse for this method, and the path cannot be run in single ({error})",
                "use net.float()",
            ) from error

    def cast(self, convert: Callable[[Any], Any]) -> "Tape":
        """Return the tape of the same steps with converted tensors and dtypes, run again from the target layers."""
        steps = [replace(step.with_arguments(convert), autocast=None) for step in self.steps]
        values, output = [convert(value) for value in self.values], tree_map(convert, self.output)
        tape = replace(self, steps=steps, values=values, output=output)
        for root in sorted(self.roots.values()):
            tape = tape.with_values(tape.replay({root: tape.values[root]}))
        return tape

    def with_values(self, replayed: Mapping[int, Tensor]) -> "Tape":
        """Return the same tape after a replay."""
        values = [replayed.get(index, value) for index, value in enumerate(self.values)]
        return replace(self, values=values, output=self.structured(self.list_outputs(replayed)))

    def called(self, step: Step, values: Mapping[int, Tensor]) -> Any:
        """Return the outputs of a step for other values."""
        args, kwargs = self.resolved(step.args, values), self.resolved(step.kwargs, values)
        if step.inplace:
            args, kwargs = (tree_map_only(Tensor, Tensor.clone, items) for items in (args, kwargs))
        if step.is_layer:
            layer, x = args
            with unchanged(layer):
                return layer.forward(*(x if step.several else (x,)), **kwargs)  # its hooks are steps of their own
        if isinstance(step.function, type):
            return step.function.apply(*args, **kwargs)  # type: ignore[attr-defined]
        if step.function is torch.ops.aten.copy.default:  # which has no forward derivative
            return args[1].to(args[0].dtype).expand(args[0].shape).clone()
        return step.function(*args, **kwargs)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast on a type of device; None if it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _autocast(dtype: torch.dtype | None, device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is as it was."""
    if dtype == autocast_dtype(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def frozen(tape: Tape) -> Tape:
    """Return a tape on which the attention weights are constants, so that gradients flow only through the values."""
    steps = []
    for step in tape.steps:
        attends = () if step.rule is None else step.rule.attends
        if step.rule is not None and attends:
            names = [*step.rule.parameters[: len(step.args)], *[""] * len(step.args)]
            args = tuple(_fixed(tape, name, item, attends) for name, item in zip(names, step.args, strict=False))
            kwargs = {name: _fixed(tape, name, item, attends) for name, item in step.kwargs.items()}
            left = (item.index for item in tree_leaves((args, kwargs)) if isinstance(item, Ref))
            step = replace(step, args=args, kwargs=kwargs, inputs=tuple(left))
        steps.append(step)
    return replace(tape, steps=steps)


def _fixed(tape: Tape, name: str, item: Any, names: Sequence[str]) -> Any:
    return tape.resolved((item,))[0] if name in names else item


HALF = (torch.float16, torch.bfloat16)


def _single(item: Any) -> Any:
    """Return a tensor, or the name of a dtype, in single precision if it is in half."""
    if isinstance(item, torch.dtype):
        return torch.float32 if item in HALF else item
    return item.float() if isinstance(item, Tensor) and item.dtype in HALF else item


def has_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor holds numbers that can be differentiated."""
    return tensor.is_floating_point() or tensor.is_complex()


def count_writes(tensor: Tensor) -> int | None:
    """Return the count of writes into a tensor, or None."""
    with without_function_modes():  # bookkeeping, of which no mode need know
        return None if tensor.is_inference() else tensor._version  # in inference mode nothing is counted


def identify_memory(tensor: Tensor) -> int | None:
    """Return a number that tensors in the same memory share; None for sparse tensors and others without one block."""
    with suppress(NotImplementedError, RuntimeError), without_function_modes():
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
    return None


def _like(activations: Tensor, recorded: Tensor) -> Tensor:
    """Return activations, one row for all or one for each, in the shape and layout of the recorded ones."""
    if activations.shape[1:] != recorded.shape[1:] or activations.shape[0] not in (1, recorded.shape[0]):
        raise ValueError(
            f"activations have the shape {tuple(recorded.shape)}, or one row of it, got {tuple(activations.shape)}"
        )
    if activations.shape == recorded.shape and activations.stride() == recorded.stride():
        return activations.to(recorded)
    # A view of a batch that is one row repeated, or in another memory format, may not be possible.
    return torch.zeros_like(recorded) + activations.to(recorded)  # not copy_, which a program has none of
