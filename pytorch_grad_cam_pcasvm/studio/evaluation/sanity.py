"""Sanity: do maps depend on the learned numbers, add up to the value, move with the image, and stay under noise?"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.features import output_of
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.studio.evaluation.result import (
    ALIKE,
    ANYTHING,
    SAME,
    Estimate,
    Result,
    Row,
    rank_correlations,
)
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import ANOTHER, BLIND, HEAD, RANDOM, Rivals
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject, generator, heat, seeded, signed, with_head
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import Steps, measured_whole
from pytorch_grad_cam_pcasvm.targets import ClosedFormTarget, PCATarget, QuadraticTarget

ERROR = "distance of the sum from the value"
CONTRADICTING = "maps that contradict the decision"
MOST_CONTRADICTING = 0.1  # of the maps
EXACT = 1e-3  # of the spread of the values; float32 keeps more


@measured_whole
def completeness(study: Subject) -> Steps:
    """Measure how far the sums of maps are from the values that they explain.

    The measure is ``|sum of the map + remainder + value at the baseline - value|``, in standard deviations of the
    values over the images; for a method without a baseline, the sum of the map is compared with the value itself.

    Returns:
        A row for each method, which passes below a thousandth, and how much farther from the value the sums of another
        image's map and of a randomised head's map are. (Random maps and the blind map are not in units of the value.)
        Methods that do not claim to add up have nothing to pass. For decisions, also the share of maps that contradict
        them because their sum has the opposite sign: it passes below a tenth, whatever the method claims.

    Raises:
        ValueError: the target has the same value for all images.

    Example:
        >>> result = evaluation.completeness(
        ...     net, (training_images, labels), ["layer2"], images=6, progress=False
        ... )
        >>> result.blank
        {'ClosedFormGradCAM': 0.0, 'ContributionCAM': 0.0}
    """  # noqa: DOC202, DOC402 - as a function it returns a result
    subject = study.fresh()
    against = Rivals(subject, (ANOTHER, HEAD))
    values: list[np.ndarray] = []
    promised: set[str] = set()  # methods whose maps have a value at a baseline to add to
    differences = defaultdict[Any, list[np.ndarray]](list)  # by method and rival
    contradicting = defaultdict[str, list[bool]](list)
    decides = isinstance(subject.target, ClosedFormTarget) and subject.target.boundary(subject.net.head) is not None

    def collect_result() -> Result:
        spread = float(np.concatenate(values).std())
        if not spread > SAME * np.abs(np.concatenate(values)).max():
            raise ValueError("the target has the same value for all images: there is no scale to measure distances on")
        distances = {key: np.concatenate(parts) / spread for key, parts in differences.items()}
        rows = []
        for method in subject.named:
            own, passes = distances[method, ""], method in promised
            error = Estimate.of(own, bounds=ANYTHING)
            rows.append(Row(method, ERROR, "", error, EXACT if passes else None, below=True))
            for rival in against.names:
                farther = Estimate.of(distances[method, rival] - own, bounds=ANYTHING)
                rows.append(Row(method, ERROR, rival, farther, 0.0 if passes else None))
            if decides:
                share = Estimate.of(contradicting[method], bounds=(0, 1))
                rows.append(Row(method, CONTRADICTING, "", share, MOST_CONTRADICTING, below=True))
        return subject.result(
            "completeness",
            "how far are the sums of maps from the values that they explain? (in standard deviations of the values)",
            rows,
        )

    yield None
    for x, _, rows_of in subject.batches("completeness", looks=True):
        targets = subject.targets(x)
        values.append(subject.values(x, targets))
        against.next(x, targets, rows_of)
        for method in subject.named:
            theirs = against.of(method)
            maps = theirs[""]
            if maps[0].baseline_values is not None:
                promised.add(method)
            own = np.array([float(image_map.values) for image_map in maps])
            for source, source_maps in theirs.items():
                differences[method, source].append(np.abs(_add_up(source_maps) - own))
            signs = [float(image_map.maps.double().sum()) * float(image_map.values) for image_map in maps]
            contradicting[method] += [sign < 0 for sign in signs]
            subject.add(method, differences[method, ""][-1], rows_of, x, maps)
        yield subject.step(collect_result, lambda row: bool(row.verdict))


def _add_up(maps: Sequence[SignedMaps]) -> np.ndarray:
    """Return the sum of each map, its remainder and the value at its baseline, shape (N,)."""
    sums = []
    for image_map in maps:
        remainder = 0.0 if image_map.remainder is None else float(image_map.remainder)
        total = float(image_map.maps.double().sum()) + remainder
        start = 0.0 if image_map.baseline_values is None else float(image_map.baseline_values)
        sums.append(total * float(image_map.log_scale.exp()) + start)
    return np.array(sums)


NOISE, SHIFT = "the image with noise", "the image shifted"


@measured_whole
def stability(  # noqa: D417 - of the study its class tells
    study: Subject,
    *,
    noise: float = 0.1,
    shift: float = 0.05,
) -> Steps:
    """Measure the rank correlation of each map with the map of the same image, with noise or shifted.

    The edge of a shifted image is repeated to fill the gap, and only the parts present in both maps are compared. The
    target stays the same.

    Args:
        noise: standard deviation of the noise, as a fraction of that of the image.
        shift: shift along the last axis, as a fraction of the width.

    Returns:
        The correlation for each method and change, which passes above 0.5, and how far it exceeds the correlation of
        each control with the changed image's map: random maps, another image's map, the blind map and a randomised
        head's map.

    Raises:
        ValueError: the noise is negative, or the shift is not between 0 and 1.

    Example:
        >>> result = evaluation.stability(
        ...     net, (training_images, labels), ["layer2"], images=6, progress=False
        ... )
        >>> result.settings["images"]
        6
    """  # noqa: DOC202, DOC402 - as a function it returns a result
    if noise < 0 or not 0 <= shift < 1:
        raise ValueError(f"noise must be 0 or more, and shift between 0 and 1, got {noise} and {shift}")
    subject = study.fresh()
    against = Rivals(subject)
    correlations = defaultdict[Any, list[np.ndarray]](list)  # by method, change and rival

    def collect_result() -> Result:
        numbers = {key: np.concatenate(parts) for key, parts in correlations.items()}
        rows = []
        for method in subject.named:
            for change in (NOISE, SHIFT):
                own = numbers[method, change, ""]
                rows.append(Row(method, change, "", Estimate.of(own, bounds=(-1, 1)), ALIKE))
                for rival in against.names:
                    ahead = Estimate.of(own - numbers[method, change, rival], bounds=(-2, 2))
                    rows.append(Row(method, change, rival, ahead, 0.0))
        return subject.result(
            "stability",
            "does the map stay the same under noise, and move with the image? (rank correlation)",
            rows,
            noise=noise,
            shift=shift,
        )

    yield None
    for x, _, rows_of in subject.batches("stability", looks=True):
        targets, size = subject.targets(x), x.shape[2:]
        shared = {name: heat(maps, size) for name, maps in against.next(x, targets, rows_of).items()}
        pixels = max(1, round(shift * size[-1])) if shift else 0
        if pixels >= size[-1]:
            raise ValueError(f"a shift of {shift} leaves nothing of images {size[-1]} pixels wide")
        spread = x.flatten(1).std(1).reshape(-1, *[1] * (x.dim() - 1))
        random = np.stack([generator(subject.seed, 3, row).normal(size=x.shape[1:]) for row in rows_of])
        changed = {
            NOISE: x + noise * spread * torch.from_numpy(random).to(x),
            SHIFT: torch.cat([x[..., :1].expand(*x.shape[:-1], pixels), x[..., : size[-1] - pixels]], -1),
        }
        for method in subject.named:
            maps = against.of(method)
            before = {name: heat(source_maps, size) for name, source_maps in maps.items()} | shared
            for change, changed_images in changed.items():
                after = heat(subject.explained(method, changed_images, targets), size)
                for source, first in before.items():
                    second = after
                    if change == SHIFT:  # what both of them have
                        first, second = first[..., : size[-1] - pixels], after[..., pixels:]
                    correlations[method, change, source].append(rank_correlations(first, second))
            similarity = correlations[method, NOISE, ""][-1] + correlations[method, SHIFT, ""][-1]
            subject.add(method, -similarity, rows_of, x, maps[""])
        yield subject.step(collect_result, lambda row: row.against in ("", RANDOM))


COMPONENTS, LABELS = "components rotated", "labels permuted, head refitted"
LIKENESS = "likeness"
DRAWS = 10  # of random weights and permuted labels; each image has one of them


@measured_whole
def sensitivity(  # noqa: D417 - of the study its class tells
    study: Subject,
    *,
    refitted: Callable[[int], Any] | None = None,
    layers: int = 3,
) -> Steps:
    """Measure how similar maps remain when the head, and then the layers from the top down, are randomised.

    These are the sanity checks of Adebayo et al. (arXiv 1810.03292), extended to a head: the absolute rank correlation
    of each map with the randomised network's map of the same target. A map that stays the same does not show what was
    learned.

    Args:
        refitted: a function from a seed to a head refitted on permuted labels, such as
            ``lambda seed: clone(pipeline).fit(features, np.random.default_rng(seed).permutation(labels))``; None: skip
            this check. It is called with ten seeds.
        layers: number of layers with weights to randomise, from the last that runs to the first, one after the other
            (by their ``reset_parameters``), each in addition to those before. Norms and parametrised layers are left
            unchanged.

    Returns:
        A row for each method and randomisation, and for the blind map; it passes if the correlation is below 0.5. Every
        image has its own rotated components, and one of ten draws of layers and of labels. Maps of components have
        nothing to pass when labels are permuted, because a PCA does not use labels. Further rows give the similarity of
        each method's maps to random maps, to another image's map and to the blind map: this is how similar unrelated
        maps are anyway. If the similarity to the blind map is near 1, the target hardly matters.

    Raises:
        ValueError: the number of layers is negative.

    Example:
        >>> result = evaluation.sensitivity(
        ...     net, (training_images, labels), ["layer2"], images=6, progress=False
        ... )
        >>> result.check
        'sensitivity'
    """  # noqa: DOC202, DOC402 - as a function it returns a result
    if not isinstance(layers, Integral) or layers < 0:
        raise ValueError(f"layers must be an integer from 0, got {layers!r}")
    subject = study.fresh()
    against = Rivals(subject)
    refits = (
        [] if refitted is None else [with_head(subject.net, refitted(subject.seed + draw)) for draw in range(DRAWS)]
    )
    cascade = Cascade(subject, layers)
    similarities = defaultdict[Any, list[np.ndarray]](list)  # by method, measure, rival
    draws: list[int] = []

    def collect_result() -> Result:
        return subject.result(
            "sensitivity",
            "do maps change when what was learned is randomised? (absolute rank correlation of the maps before and "
            "after; near 1 the map does not show what was learned)",
            _make_rows(subject, similarities, draws),
            target_layer=subject.layer,
        )

    yield None
    for x, _, rows_of in subject.batches("sensitivity", looks=True):
        targets = subject.targets(x)
        shared = against.next(x, targets, rows_of)
        maps = {method: against.of(method) for method in subject.named}
        before = {method: signed(of_method[""]) for method, of_method in maps.items()} | {BLIND: shared[BLIND]}
        after: dict[tuple[str, str, str], Tensor] = {}
        for method in subject.named:
            theirs = {rival: signed(of_rival) for rival, of_rival in maps[method].items() if rival}
            if against.rotated is not None:
                after[method, COMPONENTS, ""] = theirs.pop(HEAD)
            after |= {(method, LIKENESS, rival): rival_maps for rival, rival_maps in (theirs | shared).items()}
        if against.rotated is not None:
            after[BLIND, COMPONENTS, ""] = subject.blind(x, against.rotated)
        draw_of = np.arange(len(draws), len(draws) + len(x)) % DRAWS
        draws += draw_of.tolist()
        for draw in np.unique(draw_of).tolist():
            places = np.flatnonzero(draw_of == draw).tolist()
            some, wanted = x[places], [targets[n] for n in places]
            refit_nets = [(LABELS, refits[draw])] if refits else []
            for measure, other in itertools.chain(refit_nets, cascade.draw(draw)):
                for name, first in before.items():
                    blind = name == BLIND
                    randomised = (
                        subject.blind(some, other) if blind else signed(subject.explained(name, some, wanted, other))
                    )
                    after.setdefault((name, measure, ""), torch.empty_like(first))[places] = randomised
        for key, randomised in after.items():
            similarities[key].append(_likeness(before[key[0]], randomised))
        for method, of_method in maps.items():
            changed = [
                parts[-1]
                for (name, measure, _), parts in similarities.items()
                if name == method and measure != LIKENESS
            ]
            subject.add(method, np.mean(changed or [np.full(len(x), np.nan)], 0), rows_of, x, of_method[""])
        yield subject.step(collect_result, lambda row: bool(row.verdict))


def _make_rows(
    subject: Subject, similarities: Mapping[tuple[str, str, str], list[np.ndarray]], draws: Sequence[int]
) -> list[Row]:
    """Return the rows of similarities by method, measure and rival, of images with these draws."""
    order = [*subject.named, BLIND]
    rows = []
    for (name, measure, rival), parts in sorted(similarities.items(), key=lambda item: order.index(item[0][0])):
        estimate = Estimate.of(np.concatenate(parts), None if measure in (COMPONENTS, LIKENESS) else draws, (0, 1))
        unlabelled = measure == LABELS and isinstance(subject.target, PCATarget | QuadraticTarget)
        limit = None if name == BLIND or measure == LIKENESS or unlabelled else ALIKE
        rows.append(Row(name, measure, rival, estimate, limit, below=True))
    return rows


def _likeness(maps: Tensor, changed_maps: Tensor) -> np.ndarray:
    """Return the absolute rank correlation of two maps of each image, (N,)."""
    if changed_maps.shape != maps.shape:  # controls are of one layer, and maps may be of several
        changed_maps = upsample_maps(changed_maps.unsqueeze(1), maps.shape[1:])[:, 0]
    return np.abs(rank_correlations(*(tensor.cpu().numpy() for tensor in (maps, changed_maps))))


class Cascade:
    """A copy of a network in which one more layer at a time is random, from the last that runs to the first.

    Args:
        subject: what is measured.
        count: the maximum number of layers.
    """

    def __init__(self, subject: Subject, count: int) -> None:
        self._given, self._seed = subject.net.feature_source()[0], subject.seed
        self._random = copy.deepcopy(subject.net)
        x, *_ = subject.read(subject.rows[:1].tolist())
        copied, source = self._random.feature_source(x)
        ran: dict[str, None] = {}  # in the order in which they ran
        hooks = [
            module.register_forward_hook(lambda *_, name=name: ran.pop(name, None) or ran.setdefault(name))
            for name, module in copied.named_modules()
            if _has_weights(module)
        ]
        with evaluation_mode(self._random), torch.no_grad():
            output_of(copied, source, x, ends=True)  # what runs behind the features has no part in a map
        for hook in hooks:
            hook.remove()
        self._names = [*ran][::-1][:count]

    def draw(self, number: int) -> Iterator[tuple[str, PCASVMNet]]:
        """Yield a description and the network, with one more random layer each time, for one of the draws."""
        copied = self._random.feature_source()[0]
        layers = {name: copied.get_submodule(name) for name in self._names}
        with torch.no_grad():
            for name, layer in layers.items():
                for mine, original in zip(
                    layer.parameters(), self._given.get_submodule(name).parameters(), strict=True
                ):
                    mine.copy_(original)
        for name, layer in layers.items():
            with seeded(int(generator(self._seed, 4, number).integers(2**31)) + self._names.index(name)):
                layer.reset_parameters()  # type: ignore[operator]
            yield f"layers from {name} up random", self._random


def _has_weights(module: nn.Module) -> bool:
    norm = isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm)
    resets = callable(getattr(module, "reset_parameters", None)) and bool(list(module.parameters(False)))
    return resets and not norm and not is_parametrized(module)  # whose own parameters are others
