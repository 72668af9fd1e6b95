"""The runner: it runs a network until a layer has run, whose output it returns, and hands over outputs on the way."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, compiler, nn
from torch.utils._pytree import tree_map_only

from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.runtime.rollback import Hooks, called, hooked, list_calls, runs_instead

Visit = Callable[[str, Any], Any]
_once: "WeakKeyDictionary[nn.Module, set[Any]]" = WeakKeyDictionary()  # layers that run once, as layouts are known


class Reached(BaseException):
    """Raised when the last layer is reached; not an ``Exception``, which a network's own ``except`` might catch."""


def ask_anew(backbone: nn.Module) -> None:
    """Forget which layers run once: the network may have been changed."""
    _once.pop(backbone, None)


def run_until(
    backbone: nn.Module,
    layer: str | Sequence[str] | None,
    x: Any,
    run: Callable[[nn.Module, Any], Any],
    visits: Mapping[str, Visit] | None = None,
    *,
    ends: bool = False,
    copied: Callable[[Tensor], Tensor] = Tensor.clone,
    hooks: Hooks | None = None,
    where: str = "the features",
) -> Any:
    """Run a network until a layer has run; the layers behind do not run.

    The first pass for images of a shape does go on to the end, to see whether the layer runs again, unless it ``ends``.

    Args:
        backbone: the network.
        layer: dotted name of the layer, or of one of its calls, as in ``"block#2"``; several names; or None: the end.
        x: its input.
        run: runs the network for the input.
        visits: for target layers on the way, by name: called with the name and the output; may return another output.
        ends: whether the network stops behind the layer in any case.
        copied: copies a tensor that what follows may write into.
        hooks: those of a pass that has some already.
        where: what messages call the layer.

    Returns:
        The output of the layer; of several, a list of theirs; of none, that of the network.

    Raises:
        ValueError: a layer does not run, or runs more than once and no call of it is named.
        Reached: it is that of a pass around this one.
    """
    names, visits = list(dict.fromkeys([layer] if isinstance(layer, str) else layer or ())), visits or {}
    unnamed, key = [name for name in names if "#" not in name], (tuple(names), tuple(x.shape[1:]), x.dtype)
    compiled = is_traced() or compiler.is_compiling()
    # What fails behind the layers is of no concern.
    whole = bool(unnamed) and not ends and not compiled and key not in _once.setdefault(backbone, set())
    outputs: dict[str, Any] = {}
    visited: set[str] = set()
    ended: list[Counter[str]] = []
    output = None

    def visit(name: str, output: Any) -> Any:
        if ended or name in visited:
            return None
        visited.add(name)
        return visits[name](name, output)

    def keep(name: str, output: Any) -> None:
        if name not in outputs:
            outputs[name] = tree_map_only(Tensor, copied, output) if whole else output
        if len(outputs) == len(names):
            ended.append(own.runs.copy())
            if not whole:
                raise Reached

    with hooked() if hooks is None else nullcontext(hooks) as own:
        for name in visits:
            own.after_call(backbone, name, visit)
        for name in names:
            own.after_call(backbone, name, keep)
        try:
            output = run(backbone, x)
        except Reached:
            if not ended:  # that of a pass around this one
                raise
        except Exception:
            _refuse_repeated_targets(visits, ended[0] if ended else own.runs)  # which may be why it fails
            if not whole or not ended:
                raise
    before = ended[0] if ended else own.runs
    _refuse_repeated_targets(visits, before)
    for name in unnamed if whole else ():
        if own.runs[name] > 1:
            raise ValueError(
                f"the layer {name!r} runs {own.runs[name]} times in a forward pass: name the call whose output is "
                f"meant, {list_calls(name, own.runs[name])}"
            )
    if whole:
        _once[backbone].add(key)
    _refuse_missing_layers([name for name in names if name not in outputs], own.runs, backbone)
    targets = [name for name in visits if name not in visited]
    _refuse_missing_targets(targets, before, "the network's output" if layer is None else where)
    return output if layer is None else outputs[layer] if isinstance(layer, str) else [outputs[name] for name in names]


def _refuse_missing_layers(names: Iterable[str], runs: Mapping[str, int], backbone: nn.Module) -> None:
    """Refuse layers that have not run."""
    for name in names:  # a bare "except:" of the network's own may have kept the pass running to its end
        class_name, count = type(backbone).__name__, runs[called(name)[0]]
        if count:
            raise ValueError(
                f"the layer {name!r} does not run in a forward pass of {class_name}; {runs_instead(name, count)}"
            )
        raise ValueError(
            f"the layer {name!r} does not run in a forward pass of {class_name}; if that is compiled, its layers "
            "cannot be seen: pass the original network, and compile the PCASVMNet, torch.compile(net)"
        )


def _refuse_missing_targets(names: Iterable[str], runs: Mapping[str, int], where: str) -> None:
    """Refuse target layers that have not run."""
    for name in names:
        count = runs[called(name)[0]]
        if count:
            raise ValueError(
                f"the target layer {name!r} does not run before {where}, where {runs_instead(name, count)}"
            )
        raise ValueError(
            f"the target layer {name!r} does not run before {where}: choose a layer that runs before them (under fused "
            "attention, softmax and dropout never run)"
        )


def _refuse_repeated_targets(names: Iterable[str], runs: Mapping[str, int]) -> None:
    """Refuse target layers that have run more than once, of which no call is named."""
    for name in names:
        if runs.get(name, 0) > 1:
            raise ValueError(
                f"the target layer {name!r} runs {runs[name]} times: name one of its calls, "
                f"{list_calls(name, runs[name])}, or choose the block around it"
            )
