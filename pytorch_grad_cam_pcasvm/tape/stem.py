"""The stem, up to the first target layer: it runs without a recorder, which would see each of its operations.

Only its draws of random numbers count. While it runs, torch itself refuses operations that draw from a generator, and
generators of torch's own, from which fused operations draw unasked, are compared before and after. Where something was
drawn, or the recorder cannot begin at the layer, the network runs again with a recorder from its first operation on.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pytorch_grad_cam_pcasvm.runtime.rollback import Rollback


class UnclearStem(BaseException):
    """Raised where a stem has to be watched; not an ``Exception``, which a network's own ``except`` might catch."""


class Stem:
    """A stem that runs unwatched, from now on, in a :class:`.Rollback` that has noted torch's dispatch modes."""

    def __init__(self) -> None:
        self._states = _read_generators()
        self._modes = torch._C._len_torch_dispatch_stack()
        Rollback.refuse_draws()

    def end(self) -> None:
        """End the stem at a target layer.

        Raises:
            UnclearStem: numbers were drawn; or the layer is in a region of the network's own (inference mode, a
                dispatch mode, a transform of torch.func), whose end would also end what begins in it.
        """
        Rollback.allow_draws()
        inside = torch.is_inference_mode_enabled() or torch._C._are_functorch_transforms_active()
        if inside or torch._C._len_torch_dispatch_stack() != self._modes or not self._has_drawn_nothing():
            raise UnclearStem

    def _has_drawn_nothing(self) -> bool:
        states = _read_generators()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return len(states) == len(self._states) and all(map(torch.equal, states, self._states))


def _read_generators() -> list[Tensor]:
    """Return the states of torch's own generators, which lie on the host.

    Raises:
        UnclearStem: a graph of CUDA is being captured, in which they cannot be read.
    """
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    if cuda and torch.cuda.is_current_stream_capturing():
        raise UnclearStem
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return [generator.get_state() for generator in (torch.default_generator, *cuda)]
