"""Maps and their controls: maps that ignore the image, the target, or the training of the head."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stages import Projection
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject, digest_images, generator, with_head
from pytorch_grad_cam_pcasvm.targets import HotellingTarget, ResidualTarget

RANDOM, ANOTHER, BLIND, HEAD = "random maps", "another image's map", "the blind map", "a randomised head's map"
RIVALS = (RANDOM, ANOTHER, BLIND, HEAD)
SHARED = (RANDOM, BLIND)  # by all methods


class Rivals:
    """A subject's maps and their controls, batch by batch.

    Every image has its own draws, which do not depend on the size of the batches.

    Args:
        subject: what is measured.
        chosen: some of ``RIVALS``, or names of methods.

    Attributes:
        names: the available controls. A head whose components cannot be rotated has no randomised one.
        methods: the methods that others are compared with.
        rotated: the network with the randomised head; None if there is none.

    Raises:
        ValueError: the control is unknown, or not available for this head.
    """

    def __init__(self, subject: Subject, chosen: Sequence[str] = RIVALS) -> None:
        self.methods = [name for name in chosen if name in subject.named]
        unknown = [name for name in chosen if name not in (*RIVALS, *self.methods)]
        if unknown:
            raise ValueError(f"there is no rival {unknown[0]!r}: choose from {list(RIVALS)}")
        self._subject = subject
        why = _why_not(subject)
        if why and HEAD in chosen:
            subject.missing[HEAD] = why
        self.names = [name for name in chosen if name in RIVALS and (name != HEAD or not why)]
        if not self.names and not self.methods:
            raise ValueError(f"there is no rival to compare with: {why}" if why else "rivals must not be empty")
        rotates = HEAD in self.names
        self.rotated = with_head(subject.net, copy.deepcopy(subject.net.head)) if rotates else None
        self._before: tuple[Tensor, bytes] | None = None  # an image and its digest

    def next(self, x: Tensor, targets: Sequence[Any], rows: Sequence[int]) -> dict[str, Tensor]:
        """Take the next images, and return the maps that are controls for every method.

        Args:
            x: images, shape (N, ...).
            targets: the target of each.
            rows: their numbers in the data set.

        Returns:
            Random maps, and the blind map, each of shape (N, h, w).

        Raises:
            ValueError: the images are not as large as those before.
        """
        digests = digest_images(x)
        before, digest = self._before or (x[:2][-1:], digests[:2][-1])  # of the first, the image after it
        if before.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"images have the shapes {tuple(before.shape[1:])} and {tuple(x.shape[1:])}: bring all to one size in "
                "the transform, for example with torchvision.transforms.Resize((224, 224))"
            )
        self._x, self._targets, self._rows = x, targets, rows
        self._other, self._before = torch.cat([before, x[:-1]]), (x[-1:].clone(), digests[-1])
        self._keys: dict[str, list[Any]] = {"": digests, ANOTHER: [digest, *digests[:-1]], HEAD: [*digests, *rows]}
        blind = self._subject.blind(x)
        random = [generator(self._subject.seed, 0, row).normal(size=blind.shape[1:]) for row in rows]
        return {RANDOM: torch.stack([torch.from_numpy(noise) for noise in random]).to(blind), BLIND: blind}

    def of(self, method: str) -> dict[str, list[SignedMaps]]:
        """Return a method's own maps of these images, as ``""``, and its own controls.

        They are the maps of the same targets of the images before them, and of heads whose components are rotated at
        random and whose classifier is unchanged: it gets other directions than it was fitted on, as if it had learned
        nothing.
        """
        makers = {"": self._own, ANOTHER: self._explain_others, HEAD: self._explain_rotated}
        return {
            name: self._subject.made.get((method, name, *self._keys[name], *self._targets), partial(maker, method))
            for name, maker in makers.items()
            if name in ("", *self.names)
        }

    def _own(self, method: str) -> list[SignedMaps]:
        return [SignedMaps.cat([image_map]) for image_map in self._subject.explained(method, self._x, self._targets)]

    def _explain_others(self, method: str) -> list[SignedMaps]:
        return _lean(self._subject.explained(method, self._other, self._targets))

    def _explain_rotated(self, method: str) -> list[SignedMaps]:
        maps = []
        for n, row in enumerate(self._rows):
            self._rotate(row)
            maps += self._subject.explained(method, self._x[n : n + 1], self._targets[n : n + 1], self.rotated)
        return _lean(maps)

    def _rotate(self, row: int) -> None:
        """Rotate the components of the randomised head by the rotation drawn for a row, uniform over all of them."""
        stages = (_projection(net) for net in (self._subject.net, self.rotated) if net is not None)
        original, stage = (stage for stage in stages if stage is not None)
        count = len(original.components)
        random = torch.from_numpy(generator(self._subject.seed, 1, row).normal(size=(count, count)))
        q, r = torch.linalg.qr(random)
        rotation = (q * r.diagonal().sign()).to(original.components)  # q alone is not uniform: LAPACK fixes its signs
        divisor = original.divisor.unsqueeze(1)  # of a PCA that whitens: the whitened components are rotated
        stage.components.copy_(rotation @ (original.components / divisor) * divisor)


def _lean(maps: Sequence[SignedMaps]) -> list[SignedMaps]:
    """Return maps without the output and the weights, which are larger than a map and are not measured."""
    return [
        replace(image_map, output=None, weights=image_map.weights.new_empty(1, 1, 0), heads=None) for image_map in maps
    ]


def _why_not(subject: Subject) -> str:
    """Return why the components of a head cannot be rotated, or that it would change nothing; empty if they can."""
    stage = _projection(subject.net)
    if stage is None:
        return "the head has no linear reduction whose components could be rotated"
    if len(stage.components) < 2:
        return "the head has only one component, which cannot be rotated"
    variances = getattr(stage, "variances", None)
    whitened = variances is not None and bool((variances == variances[0]).all())
    if isinstance(subject.target, ResidualTarget) or (isinstance(subject.target, HotellingTarget) and whitened):
        return f"{type(subject.target).__name__} depends on the subspace of these components, not on their rotation"
    return ""


def _projection(net: PCASVMNet) -> Projection | None:
    """Return the linear reduction of a head, or None."""
    head = net.head
    stage = head.stages[head.component_position - 1] if head.component_position else None
    return stage if isinstance(stage, Projection) else None
