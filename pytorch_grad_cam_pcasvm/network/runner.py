"""The runner: a network runs until some of its layers have run, and their outputs are kept."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.inputs import Inputs, explained
from pytorch_grad_cam_pcasvm.network.tiling import Tiled
from pytorch_grad_cam_pcasvm.runtime.rollback import Hooks, called, hooked
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_map_only

Visit = Callable[[str, Any], Any]


class Reached(BaseException):
    """Raised when the last layer is reached; not an ``Exception``, which a network's own ``except`` might catch."""


@dataclass(eq=False)
class LayerError(Exception):
    """A layer does not run as is asked.

    Attributes:
        kind: of fault, a key of the table in ``messages.py``, which has the words.
        layer: its name, or that of one of its calls.
        count: how often it runs.
        output: the type of its output, if that is no tensor.
    """

    kind: str
    layer: str
    count: int = 0
    output: str | None = None


def run_until(
    backbone: nn.Module,
    x: Any,
    layers: Sequence[str] = (),
    visits: Mapping[str, Visit] | None = None,
    *,
    copied: Callable[[Tensor], Tensor] | None = None,
    hooks: Hooks | None = None,
) -> dict[str | None, Any]:
    """Run a network until layers have run.

    Args:
        backbone: the network.
        x: its input.
        layers: dotted names of the layers, or of one of their calls, as in ``"block#2"``; none: to its end.
        visits: for target layers on the way, by name: called with the name and the output; may return another output.
        copied: go on to the end, to see whether the layers run again; copies what the rest of the network may write
            into. None: stop behind the last layer.
        hooks: those of a pass that has some already.

    Returns:
        The outputs of the layers by their names, and if it ran to its end, the network's own by None.

    Raises:
        LayerError: a layer does not run, or runs more than once and no call of it is named.
        Reached: raised by an enclosing pass, and passed on.
    """
    visits = visits or {}
    outputs: dict[str | None, Any] = {}
    visited: set[str] = set()
    before: Counter[str] | None = None  # how often layers have run when the last one is reached

    def visit(name: str, output: Any) -> Any:
        if before is not None or name in visited:
            return None
        if not isinstance(output, Tensor):
            inner = next(backbone.get_submodule(called(name)[0]).children(), None) is not None
            kind = "target with layers gives no tensor" if inner else "target gives no tensor"
            raise LayerError(kind, name, output=type(output).__name__)
        visited.add(name)
        return visits[name](name, output)

    def keep_output(name: str, output: Any) -> None:
        nonlocal before
        if name not in outputs:
            outputs[name] = output if copied is None else tree_map_only(Tensor, copied, output)
        if len(outputs) == len(layers):
            before = before or own.runs.copy()
            if copied is None:
                raise Reached

    with hooked() if hooks is None else nullcontext(hooks) as own:
        for name in visits:
            own.after_call(backbone, name, visit)
        for name in layers:
            own.after_call(backbone, name, keep_output)
        try:
            # Tiles run in blocks, unless a layer is watched, which would run once for each.
            outputs[None] = _run(backbone, x, in_blocks=not layers and not visits)
        except Reached:
            if before is None:  # that of a pass around this one
                raise
        except Exception as error:
            for name in visits:
                if (count := (before or own.runs)[name]) > 1:  # which may be why it fails
                    raise LayerError("target runs often", name, count) from error
            if copied is None or before is None:
                raise
    runs = before or own.runs
    repeated = [("target", name, runs[name]) for name in visits if runs[name] > 1]
    if copied is not None:
        repeated += [("layer", name, own.runs[name]) for name in layers if own.runs[name] > 1]
    for role, name, count in repeated:
        raise LayerError(f"{role} runs often", name, count)
    # A bare "except:" of the network's own may have kept it running to its end.
    missing = [("layer", name, own.runs) for name in layers if name not in outputs]
    missing += [("target", name, runs) for name in visits if name not in visited]
    for role, name, counts in missing:
        count = counts[called(name)[0]]
        raise LayerError(f"{role} runs less often" if count else f"{role} does not run", name, count)
    return outputs


def _run(backbone: nn.Module, x: Any, *, in_blocks: bool) -> Any:
    """Return a network's output for its input or inputs."""
    if isinstance(x, Inputs):
        return x.passed_to(backbone)
    with explained(backbone, x):
        return backbone(x, backbone.block) if in_blocks and isinstance(backbone, Tiled) else backbone(x)
