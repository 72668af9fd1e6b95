"""Randomness: a network that draws other numbers in every run cannot be explained."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.runtime.frames import module_around
from pytorch_grad_cam_pcasvm.tape.operations import Operation

Run = TypeVar("Run")


class Draws:
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
        generator = op.named(args, kwargs).get("generator")
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


def run_alike(run: Callable[[], tuple[Run, Draws]]) -> Run:
    """Return the result of a run; if it draws random numbers, run again to see whether each run seeds them anew.

    Raises:
        ValueError: the second run draws other numbers.
    """
    result, draws = run()
    if draws.states:
        try:
            again = run()[1].seeds
            if again != draws.seeds:
                raise ValueError(
                    f"the network seeds its generators differently in every run, with {draws.seeds} and then {again}, "
                    "so that there is nothing to explain: give manual_seed a constant"
                )
        except ValueError:
            for generator, state in draws.states.items():
                generator.set_state(state)
            raise
    return result


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
