"""The figure of maps: images, and the maps that explain their components and decisions."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

from pytorch_grad_cam_pcasvm.maps.recombination import decision_shares
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.runtime.pictures import as_pictures
from pytorch_grad_cam_pcasvm.studio.figures.blocks import Block, describe_sure, list_labels
from pytorch_grad_cam_pcasvm.studio.figures.layout import FigureLayout
from pytorch_grad_cam_pcasvm.studio.figures.style import FONT, LINES, literal
from pytorch_grad_cam_pcasvm.targets import LogRatioTarget, PCATarget, ProbabilityTarget, SVMTarget

MOST_COMPONENTS = 3  # of each head, where none are chosen
_NOTHING = "components={!r} leaves nothing to draw: name at least one component"


def plot_maps(
    images: Any,
    maps: SignedMaps | Mapping[str, SignedMaps],
    *,
    rows: Sequence[Any] | None = None,
    classes: Sequence[Any] | None = None,
    components: int | Sequence[int] | None = None,
    compare: bool | None = None,
    overlay: bool = True,
    signed: bool = False,
    outline: bool = False,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw images and their maps, one image per row: the image, the decisions, then the components, P_b^+ and P_b^-.

    P_b^+ and P_b^- share one scale, whose bar ends at the largest value of both. For every other target, the positive
    part is drawn; its bar ends at the largest value. The target's value for the image is written above the maps; one
    that is only rounding, below 1e-4 of the strongest colour, is written as 0. Maps that do not fit into the width
    continue on another line. With resampled heads, values have a standard error, and what is not sure of a map is pale
    and hatched (see :meth:`.SignedMaps.sure`).

    Args:
        images: the pictures to draw under the maps, shape (N, H, W, 3), (N, 3, H, W), (N, 1, H, W) or (N, H, W), in
            [0, 1].
        maps: from ``explain``, or a dict of several by title, either of several networks,
            ``{"Grad-CAM": ..., "PCA": ..., "RBF SVM": ...}``, or of several methods,
            ``{"Grad-CAM": ..., "contributions": ...}``.
        rows: a title for each image, such as its true class.
        classes: names of the classes, in the order of ``classes_`` or of a classifier's outputs; None: the labels. With
            several maps, they apply to those that have this many classes.
        components: the components to draw: their numbers, from 0, in this order, or how many of the first (0: none);
            None: the three that carry most of the first decision, as a mean over the images, or without one, those
            with the strongest maps. The figure says how many there are.
        compare: draw several maps on separate lines, with the same targets below each other; otherwise, side by side.
            None: on separate lines if there are at least two maps and all have the same targets. Every picture keeps
            its own scale.
        overlay: draw the maps over the image (with pytorch-grad-cam's ``show_cam_on_image``); otherwise, without it.
        signed: one picture per target, from blue (lowers it) through 0 (white) to red (raises it), on one scale.
        outline: show the image in its own colours below each target, and surround the strongest evidence by lines,
            where the map exceeds half of its own largest value of that sign: solid red raises the target, dashed blue
            lowers it. A sign that nowhere reaches a tenth of the scale has no line. Takes the place of ``signed``.
        size: width and height of the figure in inches.

    Returns:
        The figure.

    Raises:
        ValueError: images, maps, titles, classes or components do not match, compared maps have different targets or
            images, the size is too small, or outlines are to be drawn without the images.

    Example:
        >>> figure = plot_maps(images, cam.explain(images), components=2)
    """
    groups = maps if isinstance(maps, Mapping) else {"": maps}
    for title, group in groups.items():
        check_maps(title, group, len(images))
    pictures = as_pictures(images)
    if outline and not overlay:
        raise ValueError("outline=True draws lines on the images, and overlay=False leaves the images out")
    if rows is not None and len(rows) != len(pictures):
        raise ValueError(f"{len(rows)} row titles for {len(pictures)} images: give one for each")
    check_classes(classes, groups)
    check_components(components, groups)
    if compare is None:
        targets = [list(group.targets) for group in groups.values()]
        compare = all(len(group_targets) > 1 and group_targets == targets[0] for group_targets in targets)
    compare = compare and len(groups) > 1
    if compare:
        _check_comparable(groups)
    blocks: list[Block] = []
    notes = [_how_to_read(groups, signed, outline), *_describe_sums(groups)]
    look = "pale and hatched" if signed or outline else "dim and hatched"
    notes += describe_sure(groups.values(), look)
    first = select_targets(next(iter(groups.values())), components)
    for title, group in groups.items():
        # Those that are compared have the same targets, and show the same components.
        numbers, left_out = first if compare else select_targets(group, components)
        blocks += [Block(title, group, k, signed or outline, pictures.shape[1:3], classes) for k in numbers]
        notes += [f"{title}: {note}" if title and not compare else note for note in left_out]
    if not blocks:
        raise ValueError(_NOTHING.format(components))
    if compare:  # with equal widths they stand below each other
        for same in zip(*([b for b in blocks if b.title == title] for title in groups), strict=True):
            longest = max(block.longest for block in same)
            for block in same:
                block.longest = longest
    notes = list(dict.fromkeys(notes))
    layout = FigureLayout.fitting(
        blocks, pictures.shape, [literal(title) for title in rows or ()], notes, size, compare
    )
    with mpl.rc_context({"font.size": FONT}):
        return layout.draw(pictures, "outline" if outline else "overlay" if overlay else "map")


def _describe_sums(groups: Mapping[str, SignedMaps]) -> list[str]:
    """Return a note that says which maps add up, and to what."""
    adding_up = [title for title, group in groups.items() if group.baseline_values is not None]
    if not adding_up:
        return []
    which = f": {'; '.join(adding_up)}" if any(adding_up) else ""
    remainders = (groups[title].remainder for title in adding_up)
    has_tokens = any(remainder is not None and bool(remainder.any()) for remainder in remainders)
    tokens = " + remainder (class tokens, other inputs)" if has_tokens else ""
    return [f"Value at the start + everything on the map{tokens} = the value above it{which}."]


def check_maps(title: str, group: SignedMaps, images: int) -> None:
    """Raise a ValueError for maps of volumes, of signals or of another number of images."""
    shape, in_title = tuple(group.maps.shape), f" ({title})" if title else ""
    if len(shape) == 5:
        raise ValueError(
            f"these maps{in_title} are of volumes, shape (N, K, D, H, W) = {shape}, but only pictures are drawn: use "
            f"figures.plot_volume, or choose one of the {shape[2]} slices, dataclasses.replace(maps, maps=maps.maps[:, "
            ":, d]), and give that slice of the images, shape (N, H, W)"
        )
    if len(shape) == 3:
        raise ValueError(f"these maps{in_title} are of signals, shape (N, K, L) = {shape}: use figures.plot_signal")
    if len(shape) != 4 or shape[0] != images:
        raise ValueError(
            f"{images} images for maps of shape {shape}{in_title}: give the images that were explained, and maps of "
            "shape (N, K, H, W)"
        )


def _check_comparable(groups: Mapping[str, SignedMaps]) -> None:
    (title, first), *rest = groups.items()
    for other, group in rest:
        if list(group.targets) != list(first.targets):
            raise ValueError(
                f"{title!r} and {other!r} have different targets, {first.targets} and {group.targets}, and cannot be "
                "compared: give every explain the same targets"
            )
        outputs = first.output, group.output
        if all(isinstance(output, HeadOutput) for output in outputs) and outputs[0].head is outputs[1].head:
            here, features = (output.features.cpu() for output in outputs)
            if here.shape != features.shape or not torch.allclose(here, features, 1e-2, 1e-2 * float(here.abs().max())):
                raise ValueError(
                    f"{title!r} and {other!r} are of different images, or the network has changed: explain the same "
                    "batch, or draw them side by side with compare=False"
                )


def check_classes(classes: Sequence[Any] | None, groups: Mapping[str, SignedMaps]) -> None:
    """Raise a ValueError if none of these maps has as many classes as there are names."""
    counts = sorted({len(labels) for group in groups.values() if (labels := list_labels(group.output)) is not None})
    if classes is not None and counts and len(classes) not in counts:
        raise ValueError(
            f"{len(classes)} names for {' or '.join(map(str, counts))} classes: give one for each, in the order of "
            "classes_ (of a classifier: of its outputs)"
        )


def check_components(components: Any, groups: Mapping[str, SignedMaps]) -> None:
    """Raise a ValueError for a choice of components that do not exist."""
    is_count = isinstance(components, int | np.integer) and not isinstance(components, bool)
    if components is None or (is_count and components >= 0):
        return
    available = {t.component for group in groups.values() for t in group.targets if isinstance(t, PCATarget)}
    if isinstance(components, bool | int | np.integer | str) or not available.issuperset(components):
        of_these = f"these maps have components {sorted(available)}" if available else "these maps are of no components"
        raise ValueError(
            f"components must be a count, or numbers from 0 as in components=[0, 2], got {components!r}: {of_these}"
        )


def check_selection(
    maps: SignedMaps, components: int | Sequence[int] | None, classes: Sequence[Any] | None
) -> tuple[list[int], list[str]]:
    """Return the targets to draw and a note, as :func:`select_targets` does, of maps that are drawn alone.

    Raises:
        ValueError: names are not of all classes, components do not exist, or nothing is left to draw.
    """
    check_classes(classes, {"": maps})
    check_components(components, {"": maps})
    shown, left_out = select_targets(maps, components)
    if not shown:
        raise ValueError(_NOTHING.format(components))
    return shown, left_out


def select_targets(maps: SignedMaps, components: int | Sequence[int] | None) -> tuple[list[int], list[str]]:
    """Return which targets are drawn, decisions first, and a note that says which components, unless all are."""
    component = {k: target.component for k, target in enumerate(maps.targets) if isinstance(target, PCATarget)}
    available = list(dict.fromkeys(component.values()))
    total = len(available)
    wanted, why = available, ""
    if components is None and total > MOST_COMPONENTS:
        wanted, why = _strongest(maps, component)
    elif isinstance(components, int | np.integer):
        wanted = available[:components]
    elif components is not None:
        wanted = [b for b in components if b in available]
    decisions = [k for k in range(len(maps.targets)) if k not in component]
    drawn = sorted((k for k in component if component[k] in wanted), key=lambda k: wanted.index(component[k]))
    shown = len(set(wanted))
    if shown == total:
        return decisions + drawn, []
    of_count = isinstance(components, int | np.integer) and shown > 0
    count = "The first" if of_count and shown == 1 else f"The first {shown}" if of_count else str(shown)
    return decisions + drawn, [f"{count} of {total} components {'is' if shown == 1 else 'are'} shown{why}."]


def _strongest(maps: SignedMaps, component: Mapping[int, int]) -> tuple[list[int], str]:
    """Return the components that carry most of the first decision, as a mean over images, and in words why these.

    Without a decision, or where its head is not known, those with the strongest maps.

    Args:
        maps: of decisions and components.
        component: the component of each target that is one.
    """
    decisions = [t for t in maps.targets if isinstance(t, SVMTarget | LogRatioTarget | ProbabilityTarget)]
    output = maps.output
    if decisions and isinstance(output, HeadOutput) and output.grid is None and output.decision is not None:
        # A log-ratio and a probability tell the same classes apart.
        margin = SVMTarget(decisions[0].category, versus=getattr(decisions[0], "versus", None))
        strength = decision_shares(output, margin).abs().mean(0)
        size = {b: float(strength[b]) for b in component.values()}
        why = f": those that carry most of the {'first ' if len(decisions) > 1 else ''}decision"
    else:
        strength = (maps.nu * maps.log_scale.exp().to(maps.nu)).mean(0)
        size = {b: float(strength[k]) for k, b in component.items()}
        why = ": those with the strongest maps"
    return sorted(size, key=lambda b: -size[b])[:MOST_COMPONENTS], why


def _how_to_read(groups: Mapping[str, SignedMaps], signed: bool, outline: bool) -> str:
    ends = "The number beside a colour bar is the strongest colour of its map."
    if outline:
        return (
            f"{LINES}: solid red raises the value above the picture, dashed blue lowers it. {ends} Black marks on it "
            "show where the lines are."
        )
    if signed:
        return f"Red raises the value above the map, blue lowers it. {ends}"
    of_components = [isinstance(target, PCATarget) for group in groups.values() for target in group.targets]
    if not any(of_components):
        return f"Bright colours raise the value above the map. {ends}"
    pair = "Bright colours raise or lower the component, as its heading says, both on one scale."
    other_maps = "" if all(of_components) else " In the other maps they raise the value above the map."
    return f"{pair}{other_maps} {ends}"
