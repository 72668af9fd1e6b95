"""The words for a layer that does not run as is asked."""

from typing import NoReturn

from torch import nn

from pytorch_grad_cam_pcasvm.network.runner import LayerError
from pytorch_grad_cam_pcasvm.runtime.rollback import called

# By the kind of error. A target layer is one that is explained; the others are those whose output is taken.
MESSAGES = {
    "layer runs often": (
        "the layer {layer!r} runs {times} in a forward pass: name the call whose output is meant, {calls}"
    ),
    "layer runs less often": (
        "the layer {layer!r} does not run in a forward pass of {network}; {path!r} runs {times}: choose {calls}"
    ),
    "layer does not run": (
        "the layer {layer!r} does not run in a forward pass of {network}; if that is compiled, its layers cannot be "
        "seen: pass the original network, and compile the PCASVMNet, torch.compile(net)"
    ),
    "target runs often": (
        "the target layer {layer!r} runs {times}: name one of its calls, {calls}, or choose the block around it"
    ),
    "target runs less often": (
        "the target layer {layer!r} does not run before {end}, where {path!r} runs {times}: choose {calls}"
    ),
    "target does not run": (
        "the target layer {layer!r} does not run before {end}: choose a layer that runs before them (under fused "
        "attention, softmax and dropout never run)"
    ),
    "target gives no tensor": (
        "the target layer {layer!r} returns a {output}, not a tensor: pass its tensor on through an nn.Identity(), and "
        "choose that"
    ),
    "target with layers gives no tensor": (
        "the target layer {layer!r} returns a {output}, not a tensor: choose a layer in it"
    ),
}


def refuse_layer(error: LayerError, network: nn.Module, end: str) -> NoReturn:
    """Raise an error of a layer with its words.

    Args:
        error: the error.
        network: the network that ran.
        end: up to where it ran, as in ``"the features, 'layer4'"``.

    Raises:
        TypeError: it returns no tensor.
        ValueError: it does not run as is asked.
    """
    path, _ = called(error.layer)
    times, calls = "once" if error.count == 1 else f"{error.count} times", list_calls(path, error.count)
    words = MESSAGES[error.kind].format(
        layer=error.layer,
        path=path,
        times=times,
        calls=calls,
        output=error.output,
        end=end,
        network=type(network).__name__,
    )
    raise (ValueError if error.output is None else TypeError)(words) from error.__cause__


def list_calls(path: str, count: int) -> str:
    """Return the names of a layer's calls as in a sentence; of many, the first three and the last."""
    if count < 2:
        return repr(path)
    names = [repr(f"{path}#{call}") for call in range(1, count + 1)]
    return f"{', '.join(names[:-1])} or {names[-1]}" if count < 5 else f"{', '.join(names[:3])}, ... {names[-1]}"
