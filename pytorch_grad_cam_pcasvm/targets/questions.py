"""Questions: the meaning of K targets for N images, resolved once, before anything is differentiated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.stage import USUAL, Sampling
from pytorch_grad_cam_pcasvm.network.outputs import OfHead
from pytorch_grad_cam_pcasvm.runtime.device import may_choose
from pytorch_grad_cam_pcasvm.targets.components import PCATarget, QuadraticTarget, every_component
from pytorch_grad_cam_pcasvm.targets.decisions import SVMTarget
from pytorch_grad_cam_pcasvm.targets.places import (
    OwnPositions,
    SharedPositions,
    refuse_place,
    select_positions,
    take_region,
)
from pytorch_grad_cam_pcasvm.targets.scores import ScoreTarget
from pytorch_grad_cam_pcasvm.targets.target import BaseTarget, ClosedFormTarget, PlacedTarget, Target, value_at

_MANY = 1024  # questions of one target, beyond which a GPU waits to hear which of them a batch needs
BESIDE_MEAN = "beside the mean"  # where targets start that have no boundary, if the head jumps at the mean itself


@dataclass(frozen=True, eq=False)
class Question:
    """A target, as it is meant in each of N images.

    Attributes:
        target: the target, without its place.
        question_index: the number of each image's question among those of the target, (N,), on the output's device;
            None: the target means the same in all images.
        positions: of dense features those that it is about; None: it takes all scores of an image, or these have none.
        at: the place of the target, as it was asked.
        own: one callable of the user for each image; None: all images share the target.
        head: which of several heads is asked.
        sampling: the permutations of a head without a gradient that has too many coalitions.
    """

    target: Any
    question_index: Tensor | None = None
    positions: SharedPositions | OwnPositions | None = None
    at: Any = None
    own: tuple[Any, ...] | None = None
    head: int = 0
    sampling: Sampling = USUAL.sampling

    def repeat(self, size: int) -> "Question":
        """Return the same question to so many rows of each image."""
        question_index = self.question_index
        return (
            self
            if question_index is None
            else replace(self, question_index=question_index.unsqueeze(1).expand(-1, size).flatten())
        )

    def callables(self, count: int) -> list[Any]:
        """Return a callable for each of N rows of an output."""
        if self.own is not None:
            return list(self.own)
        if self.question_index is None:
            return [self.target] * count
        return [_OfClass(self.target, number) for number in self.question_index.unbind()]

    def evaluate_changed(self, image: int, changed: Any) -> Tensor:
        """Return the values for M changed versions of an image, (M,), of the class and position meant in the image."""
        target, question_index = (
            self.target,
            None if self.question_index is None else self.question_index[image : image + 1],
        )
        if self.own is not None or not isinstance(target, BaseTarget):
            target = target if self.own is None else self.own[image]
            return torch.stack([value_at(target, row) for row in changed.target_rows()])
        if changed.head is None:
            return target.value_questions(changed.value.reshape(changed.count, -1), question_index)
        if self.positions is not None:
            region = take_region(changed, self.positions.repeat_positions(image, changed.count))
            return region.of_images(target.value_questions(region, question_index))
        if isinstance(target, ClosedFormTarget):
            return target.value_questions(changed, question_index)
        meant = target if question_index is None else _OfClass(target, question_index[0])
        return torch.stack([value_at(meant, row) for row in changed.target_rows()])

    def name_target(self, image: int, output: Any) -> Any:
        """Return the target of an image, the same for every copy of it; waits for the device.

        Args:
            image: number of the image.
            output: the output that the question was resolved for.
        """
        if self.own is not None:
            return self.own[image]
        target = self.target
        if self.question_index is not None:
            target = target.name_question(output.head, int(self.question_index[image]))
        if isinstance(self.positions, OwnPositions):
            position = np.unravel_index(int(self.positions.index[image]), output.grid.shape)
            return target.at_place(tuple(map(int, position)))
        return target if self.at is None else target.at_place(self.at)

    def list_boundaries(self, head: Head | None, *, apart: bool = False) -> tuple[list[Any], Tensor | None]:
        """Return the distinct boundaries, and for each image the index of its own, (N,); None if there is one.

        Where a target has none it is None, for the training mean, or ``BESIDE_MEAN`` if the head has no gradient.

        Args:
            head: the head, or None.
            apart: whether each component is 0 at a place of its own, and not all of them at the training mean.
        """
        target = self.target
        if apart and isinstance(target, PCATarget):
            return [PCATarget(target.component)], None
        boundary = target.boundary(head) if head is not None and isinstance(target, BaseTarget) else None
        if boundary is None:
            has_gradient = head is None or head.enumerated is None or isinstance(target, PCATarget | QuadraticTarget)
            return [None if has_gradient else BESIDE_MEAN], None
        question_index = self.question_index
        if question_index is None:
            return [boundary.name_question(head, 0)], None
        if may_choose(question_index) or boundary.count_questions(head) > _MANY:
            chosen, question_index = question_index.unique(return_inverse=True)
            numbers: Sequence[int] = chosen.tolist()
        else:
            numbers = range(boundary.count_questions(head))
        return [boundary.name_question(head, number) for number in numbers], question_index


@dataclass(frozen=True, eq=False)
class _OfClass:
    """A target, called for the class that is meant in one image."""

    target: BaseTarget
    number: Tensor

    def __call__(self, row: Any) -> Tensor:
        return self.target.value_questions(row, self.number)

    def __repr__(self) -> str:
        return repr(self.target)


class Questions(Sequence[Any]):
    """What K targets ask of N images.

    Args:
        targets: the K targets, as messages name them.
        columns: a question for each of them; or, where each image has a target of its own, those of some images each.
        images: in that case the numbers of these images; None: all are asked all questions.
    """

    def __init__(
        self, targets: Sequence[Any], columns: Sequence[Question], images: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.targets, self.columns, self.images = targets, columns, images

    def __len__(self) -> int:
        return len(self.columns) if self.images is None else 1

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> "Questions": ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return a target as messages name it; of a slice, its questions."""
        return self.take_targets(range(len(self))[index]) if isinstance(index, slice) else self.targets[index]

    def take_targets(self, target_indices: Sequence[int]) -> "Questions":
        """Return the questions of some targets, by their numbers."""
        if self.images is not None or list(target_indices) == list(range(len(self.columns))):
            return self
        return Questions([self.targets[k] for k in target_indices], [self.columns[k] for k in target_indices])

    def sample(self, samplings: Sequence[Sampling]) -> "Questions":
        """Return the questions with each of several samplings in turn."""
        columns = [replace(column, sampling=sampling) for sampling in samplings for column in self.columns]
        return Questions([*self.targets] * len(samplings), columns, self.images)

    @property
    def are_components(self) -> bool:
        """Whether all targets are components."""
        return all(isinstance(column.target, PCATarget) for column in self.columns)

    @property
    def are_closed_form(self) -> bool:
        """Whether all have closed-form gradients by components or the decision."""
        targets = [column.target for column in self.columns]
        return all(isinstance(target, ClosedFormTarget) and target.behind_reduction for target in targets)

    def depend_on_decision(self, head: Head | None, *, unbounded: bool) -> bool:
        """Return whether a target depends on more than the components; ``unbounded``: one without a boundary."""
        targets = [
            column.target for column in self.columns if not isinstance(column.target, PCATarget | QuadraticTarget)
        ]
        return any(not unbounded or not isinstance(t, BaseTarget) or t.boundary(head) is None for t in targets)

    def evaluate_changed(self, image: int, changed: Any) -> Tensor:
        """Return the values of K targets for M changed versions of an image, (M, K), of the classes meant in it."""
        if self.images is None:
            return torch.stack([column.evaluate_changed(image, changed) for column in self.columns], 1)
        own = next(number for number, images in enumerate(self.images) if image in images)
        return self.columns[own].evaluate_changed(list(self.images[own]).index(image), changed).unsqueeze(1)

    def group_boundaries(
        self, head: Head | None, device: torch.device, *, apart: bool = False
    ) -> list[tuple[list[int], list[Any], Tensor | None]]:
        """Return the targets in groups that start at the same boundary, so that each group needs one pass.

        Args:
            head: the head, if there is one.
            device: of its output.
            apart: whether each component is 0 at a place of its own, and not all of them at the training mean.

        Returns:
            For each group the numbers of its targets, a list of targets with one boundary each (see
            :meth:`Question.list_boundaries`), and which of these each image has, shape (N,); None: all have the only
            one.
        """
        groups: dict[Any, tuple[list[int], list[Any], Tensor | None]] = {}
        if self.images is not None:
            return [([0], *self._merge_boundaries(self.images, head, device, apart))]
        for k, column in enumerate(self.columns):
            boundaries, question_index = column.list_boundaries(head, apart=apart)
            key = tuple(boundaries) if question_index is None else k
            groups.setdefault(key, ([], boundaries, question_index))[0].append(k)
        return list(groups.values())

    def _merge_boundaries(
        self, images_of: Sequence[Sequence[int]], head: Head | None, device: torch.device, apart: bool
    ) -> tuple[list[Any], Tensor]:
        """Return the boundaries of all images' own questions, and which of them each image has."""
        parts = [column.list_boundaries(head, apart=apart) for column in self.columns]
        merged = list(dict.fromkeys(boundary for boundaries, _ in parts for boundary in boundaries))
        question_index = []
        for (boundaries, numbers), images in zip(parts, images_of, strict=True):
            places = torch.tensor([merged.index(boundary) for boundary in boundaries], device=device)
            question_index.append(places.expand(len(images)) if numbers is None else places[numbers])
        order = torch.tensor([image for images in images_of for image in images], device=device).argsort()
        return merged, torch.cat(question_index)[order]


def resolve_targets(targets: Sequence[Any], output: Any) -> Questions:
    """Resolve K targets, each for all N images of an output, to questions that mean the same in all images.

    This alone reads which class is predicted, which comes second, and what ``at=`` means.

    Args:
        targets: K targets, or what was resolved before.
        output: what a head computed, or an ordinary network returned.

    Returns:
        The questions.

    Raises:
        ValueError: a target does not fit the head, or names a place where features are not dense.
    """
    if isinstance(targets, Questions):
        return targets
    return Questions(list(targets), [_resolve(target, output) for target in targets])


def resolve_image_targets(targets: Sequence[Target], output: Any) -> Questions:
    """Resolve N targets, one for each image of an output, to questions; as :func:`resolve_targets`, K is 1."""
    groups: dict[Any, list[int]] = {}
    for image, target in enumerate(targets):
        closed = isinstance(target, ClosedFormTarget) or (output.head is not None and isinstance(target, PlacedTarget))
        groups.setdefault(target if closed else None, []).append(image)
    shown = [ImageTargets(targets)]
    if output.head is None and len(groups) > 1:
        return Questions(shown, [Question(None, own=tuple(targets))])
    columns = []
    for target, images in groups.items():
        part = output if len(groups) == 1 else output.rows(images)
        if target is None:
            columns.append(Question(None, own=tuple(targets[image] for image in images)))
        else:
            columns.append(_resolve(target, part))
    return Questions(shown, columns, None if len(groups) == 1 else list(groups.values()))


class ImageTargets:
    """The targets of N images, as messages name them."""

    def __init__(self, targets: Sequence[Any]) -> None:
        self._targets = targets

    def __repr__(self) -> str:
        return ", ".join(dict.fromkeys(map(repr, self._targets)))


def _resolve(target: Any, output: Any) -> Question:
    if output.head is None:
        score = isinstance(target, ScoreTarget) and target.category is None and isinstance(output.value, Tensor)
        scores = output.value.reshape(output.count, -1) if score and output.value.dim() <= 2 else None
        return Question(target, None if scores is None else target.number_questions(scores))
    positions, rows, at = None, output, None
    if output.grid is None and getattr(target, "at", None) is not None:
        refuse_place(target)
    if output.grid is not None and isinstance(target, PlacedTarget):
        positions, at = select_positions(target, output), target.at
        rows, target = take_region(output, positions), target.unplaced
    question_index = None
    if isinstance(target, BaseTarget) and target.count_questions(output.head) > 1:
        question_index = target.number_questions(rows)
        if positions is not None:  # the same for all positions of an image
            question_index = question_index.unflatten(0, (-1, positions.size))[:, 0]
    return Question(target, question_index, positions, at)


def fix_target(target: Any, output: Any) -> Any:
    """Return a target that means the same class, at the same position, for every copy of an image.

    Args:
        target: any target.
        output: the network's output for the image, a batch of one.

    Example:
        >>> fix_target(SVMTarget(), net(images[:1])) == SVMTarget(net.predict(images[:1])[0])
        True
    """
    if isinstance(output, OfHead):
        return _resolve(target, output).name_target(0, output)
    if isinstance(target, ScoreTarget):
        return target.name_question(None, int(output.reshape(-1).argmax()))
    return target


def list_targets(targets: Sequence[Target] | Target) -> list[Target]:
    """Return targets, or the only one, as a list.

    Raises:
        ValueError: there are none.
    """
    several = list(targets) if isinstance(targets, list | tuple) else [targets]
    if not several:
        raise ValueError("targets is empty: pass None for the default, or at least one target")
    return several  # type: ignore[return-value]


def list_default_targets(output: Any) -> list[Target]:
    """Return every component, then the predicted class, or all outputs of several."""
    if output.head is None:
        return [ScoreTarget()]
    if output.head.vote is not None and output.head.vote.about == "outputs":
        return [*every_component(output), *every_class(output)]
    return [*every_component(output), *([] if output.head.vote is None else [_PREDICTED])]


_PREDICTED = SVMTarget()


def every_class(output: Any) -> Sequence[Target]:
    """Return a target for every class of an output, or for its only value.

    Args:
        output: what a network returns.

    Raises:
        ValueError: it is no output of a head, and no scores (N, C).

    Example:
        >>> every_class(net(images))
        [SVMTarget('cat'), SVMTarget('dog'), SVMTarget('elk')]
    """
    if output.head is None:
        scores = output.value
        if not isinstance(scores, Tensor) or scores.dim() != 2:
            raise ValueError("jacobians needs a network that returns scores (N, C), or a PCASVMNet: use explain")
        return [ScoreTarget(category) for category in range(scores.shape[-1])]
    if output.decision is None:
        return ()
    classes = output.head.classes_
    return [SVMTarget()] if classes is None else [SVMTarget(label) for label in classes.tolist()]
