"""The stem, up to the first target layer: it runs without a recorder, which would see each of its operations.

Only its draws of random numbers count. While it runs, torch itself refuses operations that draw from a generator, and
generators of torch's own, from which fused operations draw unasked, are compared before and after. Where something was
drawn, or the recorder cannot begin at the layer, the network runs again with a recorder from its first operation on.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.runtime.rollback import Rollback
from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    COMPILER_FRAMES,
    count_dispatch_modes,
    is_in_functorch,
    without_dispatch_modes,
    without_function_modes,
)
from pytorch_grad_cam_pcasvm.tape.step import Operation, module_around

# Who sends numbers of images to workers of a DataLoader, and who looks after progress bars every ten seconds.
_BYSTANDERS = {"QueueFeederThread", "tqdm_monitor"}


class OtherThreads:
    """Whether other threads are alive, or start until a rollback ends.

    A number, a mask, or a result without a graph that one of them computes from activations cannot be told from a
    constant.
    """

    def __init__(self, rollback: Rollback) -> None:
        names = {thread.name for thread in threading.enumerate() if thread is not threading.current_thread()}
        self.seen = not names <= _BYSTANDERS
        if not self.seen:  # alone, so that nobody else has set or will set the profile function of new threads
            rollback.note(threading.setprofile, threading.getprofile())
            threading.setprofile(partial(self._note, threading.getprofile()))

    def _note(self, previous: Any, *_: Any) -> None:
        """Note a new thread, and leave its profile to the function that was set before."""
        self.seen = True
        sys.setprofile(previous)


class RandomDraws:
    """The draws of one run: none, but from generators that this run has seeded.

    Attributes:
        states: of each generator, before its first draw.
    """

    def __init__(self) -> None:
        self.states: dict[torch.Generator, Tensor] = {}

    def check(self, op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note a call of an operation that may draw random numbers; refuse one from a generator that runs on."""
        if not op.is_random(args, kwargs):
            return
        generator = op.name_arguments(args, kwargs).get("generator")
        if isinstance(generator, torch.Generator):
            if generator not in self.states and _is_fresh(generator):
                self.states[generator] = generator.get_state()
            if generator in self.states:
                return
        raise random_numbers(op)

    @property
    def seeds(self) -> list[int]:
        """The seed of each generator."""
        return [generator.initial_seed() for generator in self.states]

    def check_again(self, run: Callable[[], "RandomDraws"]) -> None:
        """Run the network again if this run drew random numbers, to see whether each run seeds its generators alike.

        Raises:
            ValueError: the second run draws other numbers.
        """
        if not self.states:
            return
        try:
            again = run().seeds
            if again != self.seeds:
                raise ValueError(
                    f"the network seeds its generators differently in every run, with {self.seeds} and then {again}, "
                    "so that there is nothing to explain: give manual_seed a constant"
                )
        except ValueError:
            for generator, state in self.states.items():
                generator.set_state(state)
            raise


def _is_fresh(generator: torch.Generator) -> bool:
    seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(seeded.get_state(), generator.get_state())


def random_numbers(op: Operation) -> ValueError:
    """Return the refusal of an operation that draws other numbers in every run."""
    module = module_around(sys._getframe(1))
    where = "" if module is None else f" in a {type(module).__name__}"
    return ValueError(
        f"the network draws random numbers ({op.name}{where}), so that every run gives other numbers, and there "
        "is nothing to explain: switch that off in evaluation mode, as with dropout(x, training=self.training), or "
        "draw the numbers once, in __init__, and keep them with register_buffer; or draw from a generator that "
        "forward itself makes, torch.Generator(x.device).manual_seed(0)"
    )


class MustRecordAll(BaseException):
    """Raised where a stem has to be watched; not an ``Exception``, which a network's own ``except`` might catch."""


class UnrecordedPart:
    """A stem that runs unwatched, from now on, in a :class:`.Rollback` that has noted torch's dispatch modes."""

    def __init__(self) -> None:
        self._states = _read_generators()
        self._modes = count_dispatch_modes()
        Rollback.refuse_draws()

    def end(self) -> None:
        """End the stem at a target layer.

        Raises:
            MustRecordAll: numbers were drawn; or the layer is in a region of the network's own (inference mode, a
                dispatch mode, a transform of torch.func, a compiled part), whose end would also end what begins in it.
        """
        Rollback.allow_draws()
        inside = torch.is_inference_mode_enabled() or is_in_functorch() or _is_in_compiled()
        if inside or count_dispatch_modes() != self._modes or not self._has_drawn_nothing():
            raise MustRecordAll

    def _has_drawn_nothing(self) -> bool:
        states = _read_generators()
        with without_dispatch_modes(), without_function_modes():
            return len(states) == len(self._states) and all(map(torch.equal, states, self._states))


def _is_in_compiled() -> bool:
    """Return whether code that torch has compiled is running, whose end puts back how torch dispatched before it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != COMPILER_FRAMES:
        frame = frame.f_back
    return frame is not None


def _read_generators() -> list[Tensor]:
    """Return the states of torch's own generators, which lie on the host.

    Raises:
        MustRecordAll: a graph of CUDA is being captured, in which they cannot be read.
    """
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    if cuda and torch.cuda.is_current_stream_capturing():
        raise MustRecordAll
    with without_dispatch_modes(), without_function_modes():
        return [generator.get_state() for generator in (torch.default_generator, *cuda)]
