"""What all members of a meta-estimator share: the stages up to a reduction that is one and the same for all of them."""

from collections.abc import Iterable, Iterator

from pytorch_grad_cam_pcasvm.head.decisions import Ensemble
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import Chain, Union
from pytorch_grad_cam_pcasvm.head.storage import compute_same, constants


def bring_forward(stages: Iterable[Stage]) -> list[Stage]:
    """Return stages that compute the same, with each reduction in front that all members of a decision begin with.

    The components of a pipeline inside of a meta-estimator are then those of the head, as without it.
    """
    return [part for stage in Chain(stages).flat() for part in _apart(stage)]


def _apart(stage: Stage) -> Iterator[Stage]:
    """Yield the stages that all members of a decision share up to a reduction, and the decision behind them."""
    if type(stage) in (Union, Ensemble) and stage.decides:
        members = [bring_forward(member.stages) for member in stage.members]
        shared, facts = _count_shared(members), stage.facts
        if shared:
            yield from members[0][:shared]
            stage = stage.with_members([Chain(member[shared:]) for member in members])
            stage.facts = facts
    yield stage


def _count_shared(members: list[list[Stage]]) -> int:
    """Return how many stages, up to the last reduction among them, all members begin with."""
    shared = 0
    for count, stages in enumerate(zip(*members, strict=False), 1):
        if any(stage.decides or not _is_same(stages[0], stage) for stage in stages):
            break
        shared = count if stages[0].reduces else shared
    return shared


def _is_same(one: Stage, other: Stage) -> bool:
    # Of stages that are not of this package, nobody knows what they compute with.
    return one is other or (bool(constants([one])) and compute_same([one], [other]))
