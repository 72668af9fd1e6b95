"""Torch function modes on the way to the features: they are removed again, and told where gradients are off."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from pytorch_grad_cam_pcasvm.rollback import Rollback


@contextmanager
def modes_kept() -> Iterator[None]:
    """Remove, at the end, every torch function mode that was entered inside."""
    with Rollback() as rollback:
        rollback.note_modes()
        yield


class Regions:
    """Where the network switches gradients off after the target layer: what is computed there is a constant.

    A region that began before the target layer, such as a frozen tower called under ``torch.no_grad()``, is ignored.
    """

    def __init__(self) -> None:
        self._switched_off = False
        self._before: dict[int, tuple[Any, bool]] = {}  # by context, which is kept so that its id stays its own
        self._inference = False

    def begin(self) -> None:
        """Begin at the target layer."""
        self._inference = torch.is_inference_mode_enabled()

    @property
    def off(self) -> bool:
        """Whether gradients are off now."""
        inference = torch.is_inference_mode_enabled()
        self._inference = self._inference and inference
        return self._switched_off or (inference and not self._inference)

    def switch(self, enabled: bool, frame: FrameType) -> None:
        """Record a call of ``torch._C._set_grad_enabled`` from a frame; contexts make it when they begin and end."""
        # no_grad().__enter__ and __exit__ call set_grad_enabled.__init__: the context is the outer of the two.
        outer = frame.f_back
        if outer is not None and isinstance(outer.f_locals.get("self"), torch.no_grad | torch.enable_grad):
            frame = outer
        context = frame.f_locals.get("self")
        if frame.f_code.co_name == "__exit__":
            _, self._switched_off = self._before.pop(id(context), (None, False))
        else:
            self._before.setdefault(id(context), (context, self._switched_off))
            self._switched_off = not enabled
