"""Classes of masks: the meaning of numbers and colours in all masks of a folder."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pytorch_grad_cam_pcasvm.studio.data.mask_files import BLACK, STEPS, WHITE, MaskPixels

UNLABELLED = 255  # beside the numbers of classes
MOST_CLASSES = 100
_SHADES = 20  # a mask of more numbers, beyond those of classes, has been saved as a photo
_NEARLY_BLACK = 9
_DARK = 96  # the lightest shade of black and white is above, as of masks of 0 and 128
_FULL = 240  # from which on the lightest shade of 8 bits counts as white
_BORDER = 0xE0E0C0  # of objects in VOC's palette: not labelled
_SOFT = 0.4  # of the pixels that are neither black nor white: so many lie between others at a soft edge
_MOSTLY = 0.5
_TO_WRITE = f"write black and white, or classes as 1, 2, 3 and so on ({UNLABELLED}: not labelled)"


@dataclass(frozen=True)
class MaskFacts:
    """What is to be known of a mask file, besides where its pixels are.

    Attributes:
        file: the file.
        kind: as of :class:`.MaskPixels`.
        counts: how many pixels have each number.
        palette: of indexes the colours.
        lossy: the format blends neighbouring pixels.
        blends: of masks of three numbers and more, as :meth:`.MaskPixels.blends` has them; of indexes by their colours.
    """

    file: Path
    kind: str
    counts: Counter[int]
    palette: Mapping[int, int]
    lossy: bool
    blends: Mapping[int, tuple[Counter[int], Counter[int]]]

    @classmethod
    def of(cls, mask: MaskPixels) -> "MaskFacts":
        """Return the facts of a mask."""
        counts = mask.counts
        blends = {}
        if len(counts) > 2 and (mask.kind != "index" or mask.palette):
            blends = (mask.as_colours() if mask.kind == "index" else mask).blends()
        return cls(mask.file, mask.kind, counts, mask.palette, mask.lossy, blends)

    @property
    def numbers(self) -> set[int]:
        """The numbers in it, but 0."""
        return set(self.counts) - {0}

    @property
    def colours(self) -> set[int]:
        """The colours in it, but black."""
        if self.kind == "index":
            return {self.palette.get(number, BLACK) for number in self.counts} - {BLACK}
        return self.numbers if self.kind == "colour" else {number * 0x010101 for number in self.numbers}


@dataclass(frozen=True)
class MaskClasses:
    """What the numbers and colours in all masks of a folder mean.

    Attributes:
        values: the numbers of the classes; [1] where masks only tell inside from outside.
        reading: which numbers these are: ``"grey"``, ``"shade"`` (black and white of a palette), or ``"colour"``.
        numbers: of colours, the number of each; else {}.
        threshold: what is larger is inside of masks that only tell that.
        hint: what looks wrong; "": nothing.
        names: of boxes, the name of each class, by number; else {}.
    """

    values: list[int]
    reading: str = "grey"
    numbers: Mapping[int, int] = field(default_factory=dict)
    threshold: int = 0
    hint: str = ""
    names: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path, masks: Sequence[MaskFacts], *, only_inside: bool) -> "MaskClasses":
        """Return the classes of the masks of a folder.

        Args:
            root: the folder, for messages.
            masks: the facts of all.
            only_inside: no classes are wanted, only what is inside of any.

        Raises:
            ValueError: the values are ambiguous; the message says why.
        """
        if any(mask.kind == "colour" for mask in masks):
            return _class_colours(root, masks)
        palettes = [mask for mask in masks if mask.kind == "index"]
        reading, counts = "grey", [mask.counts for mask in masks]
        shown = {mask.palette.get(number) for mask in palettes for number in mask.counts}
        if palettes and shown <= {BLACK, WHITE}:
            reading, counts = "shade", [_shades(mask) for mask in masks]
        else:
            _check_palettes(root, palettes, only_inside)
        values, threshold = _class_numbers(root, masks, counts, only_inside)
        hint = _hint(root, counts, threshold) if values == [1] else ""
        return cls(values, reading, threshold=threshold, hint=hint)

    @property
    def titles(self) -> dict[int, str]:
        """The names of the classes, by number."""
        colours = {number: f"#{colour:06X}" for colour, number in self.numbers.items()}
        return {number: self.names.get(number, colours.get(number, str(number))) for number in self.values}

    def numbered(self, mask: MaskPixels) -> np.ndarray:
        """Return the numbers of the classes at every pixel of a mask, uint8, shape (H, W)."""
        if self.reading == "colour":
            colours = mask.as_colours().numbers
            all_numbers = np.array(sorted(self.numbers))
            labels = np.array([self.numbers[colour] for colour in all_numbers.tolist()], np.uint8)
            return np.where(
                colours == BLACK, 0, labels[np.searchsorted(all_numbers, colours).clip(0, len(all_numbers) - 1)]
            )
        numbers = mask.as_shades().numbers if self.reading == "shade" and mask.kind == "index" else mask.numbers
        inside = numbers > self.threshold if self.values == [1] else numbers
        return inside.astype(np.uint8)  # classes are small, and nothing wraps around


def _shades(mask: MaskFacts) -> Counter[int]:
    """Return how many pixels are black and white, of a palette of these; of others, how many have each number."""
    if mask.kind != "index":
        return mask.counts
    white = sum(count for number, count in mask.counts.items() if mask.palette[number] == WHITE)
    return +Counter({0: mask.counts.total() - white, 255: white})


def _dark(colour: int) -> bool:
    """Return whether a colour is black, or nearly so."""
    return max(colour.to_bytes(3, "big")) < _NEARLY_BLACK


def _check_palettes(root: Path, masks: Sequence[MaskFacts], only_inside: bool) -> None:
    """Refuse palettes whose indexes are no numbers of classes.

    Raises:
        ValueError: colours blend, black has another number than 0, or two masks have different palettes.
    """
    first_files: dict[int, tuple[int, Path]] = {}
    for mask in masks:
        black = [number for number, colour in mask.palette.items() if _dark(colour) and number not in (0, UNLABELLED)]
        if black and not _dark(mask.palette.get(0, WHITE)):
            raise ValueError(
                f"the mask {mask.file} has a palette in which black is number {black[0]}, and 0 would be outside: make "
                "black number 0, or save it in grey"
            )
        for number, colour in mask.palette.items():
            other, file = first_files.setdefault(number, (colour, mask.file))
            if other != colour and not only_inside:
                raise ValueError(
                    f"number {number} is #{other:06X} in the palette of {file}, but #{colour:06X} in that of "
                    f"{mask.file}: save all masks in {root} with one palette, or in RGB"
                )
    _refuse_blends(root, masks)


def _class_colours(root: Path, masks: Sequence[MaskFacts]) -> MaskClasses:
    """Return a class for each colour in masks of which some have colours.

    Raises:
        ValueError: there are too many, or they blend.
    """
    for mask in masks:
        if mask.lossy and mask.colours - {WHITE}:
            raise ValueError(
                f"the mask {mask.file} has colours, which its format blends, so that they are no classes: save it as "
                "PNG"
            )
        if mask.kind == "grey" and any(number > 255 for number in mask.numbers):
            raise ValueError(
                f"some masks in {root} have colours, but {mask.file} has numbers up to {max(mask.numbers)}: save all "
                "of one kind"
            )
        if mask.kind == "index" and not mask.palette and mask.numbers:
            raise ValueError(
                f"some masks in {root} have colours, but {mask.file} has a palette with transparency: save all in RGB"
            )
    colours = sorted(set().union(*(mask.colours for mask in masks)))
    classes = [colour for colour in colours if colour != _BORDER] if len(colours) > 1 else colours
    if len(classes) > MOST_CLASSES:
        raise ValueError(
            f"the masks in {root} have {len(classes)} colours, which are no classes (at most {MOST_CLASSES}): do they "
            f"have soft edges, or are they photos? {_TO_WRITE.capitalize()}"
        )
    _refuse_blends(root, masks)
    counts = sum((_by_colour(mask) for mask in masks), Counter[int]())
    hint = ""
    if counts[WHITE] > _MOSTLY * counts.total() and not counts[BLACK]:
        hint = f"most of the masks in {root} is white, which is a class; what is outside must be black"
    if len(classes) == 1 and classes == colours:
        hint = hint or _hint(root, [Counter({0: counts[BLACK], 1: counts.total() - counts[BLACK]})], 0)
    numbers = {colour: number for number, colour in enumerate(classes, 1)}
    numbers |= {_BORDER: UNLABELLED} if _BORDER not in numbers and _BORDER in colours else {}
    return MaskClasses(sorted(numbers.values()), "colour", numbers, hint=hint)


def _by_colour(mask: MaskFacts) -> Counter[int]:
    """Return how many pixels have each colour."""
    counts = Counter[int]()
    for number, count in mask.counts.items():
        colour = number if mask.kind == "colour" else number * 0x010101
        counts[mask.palette.get(number, BLACK) if mask.kind == "index" else colour] += count
    return counts


def _refuse_blends(root: Path, masks: Sequence[MaskFacts]) -> None:
    """Refuse colours of which most pixels lie between others: they are the soft edges of these.

    Raises:
        ValueError: there are such.
    """
    for step in STEPS:
        between, apart = Counter[int](), Counter[int]()
        for mask in masks:
            scale = 0x010101 if mask.kind == "grey" else 1
            blended, not_blended = mask.blends.get(step, (Counter(), Counter()))
            between += Counter({number * scale: count for number, count in blended.items()})
            # Without neighbours of two other numbers nothing lies between.
            alone = not_blended if mask.blends else _by_colour(mask)
            apart += Counter({number * (scale if mask.blends else 1): count for number, count in alone.items()})
        for colour, count in between.items():
            if colour not in (BLACK, WHITE) and count > apart[colour]:
                raise ValueError(
                    f"most of what has the colour #{colour:06X} in the masks in {root} lies between two other colours, "
                    "as at soft edges, so that it is no class: draw or save masks without smoothing"
                )


def _class_numbers(
    root: Path, masks: Sequence[MaskFacts], counts: Sequence[Counter[int]], only_inside: bool
) -> tuple[list[int], int]:
    """Return the numbers of classes, and above which number is inside where there is only one.

    Raises:
        ValueError: nobody can say which numbers are inside.
    """
    number_sets = [set(count) - {0} for count in counts]
    numbers = sorted(set().union(*number_sets))
    if not numbers:
        raise ValueError(f"all masks in {root} are black: what is inside must be white, or have a number")
    top = max(numbers)
    lossy = [mask for mask, own in zip(masks, number_sets, strict=True) if mask.lossy and own]
    _check_lossy(lossy, top)
    if len(numbers) == 1:
        return [1], 0
    largest = max((number for number in numbers if number != UNLABELLED), default=0)
    if largest <= MOST_CLASSES and not lossy:
        _check_classes(root, masks, numbers, number_sets)
        return numbers, 0
    middle = 127 if _FULL <= top <= 255 else top // 2
    several = [mask for mask, own in zip(masks, number_sets, strict=True) if len(own) > 1]
    soft = True if lossy else _soft(several, top)
    if soft and (only_inside or lossy or len(numbers) > _SHADES):
        return [1], middle
    if only_inside and ((len(numbers) > _SHADES and soft is False) or not several or min(numbers) > middle):
        return [1], 0  # each number is of something
    shown = ", ".join(map(str, numbers[:_SHADES])) + (", ..." if len(numbers) > _SHADES else "")
    if len(numbers) > _SHADES and soft is False:
        meant = f"which are no soft edge, and larger than those of classes (at most {MOST_CLASSES})"
    elif several and not soft and min(numbers) <= middle:
        meant = "which may be classes, or the soft edge of one"
    elif soft:
        meant = "which look like the soft edge of one class"
    else:
        meant = "which may be classes, or all mean one"
    raise ValueError(f"the masks in {root} have the numbers {shown} besides 0, {meant}: {_TO_WRITE}")


def _check_lossy(masks: Sequence[MaskFacts], top: int) -> None:
    """Refuse masks of a format that blends numbers, unless they are black and white."""
    for mask in masks:
        if top < _DARK or _total(mask, 0.25 * top, 0.75 * top) > _total(mask, 0.75 * top, top):
            raise ValueError(
                f"the mask {mask.file} is not black and white, and its format changes other numbers: save it as PNG"
            )


def _total(mask: MaskFacts, above: float, up_to: float) -> int:
    """Return how many pixels have a number in a range."""
    return sum(count for number, count in mask.counts.items() if above < number <= up_to)


def _check_classes(
    root: Path, masks: Sequence[MaskFacts], numbers: Sequence[int], number_sets: Sequence[set[int]]
) -> None:
    """Refuse small numbers that are no classes.

    Raises:
        ValueError: they are a soft edge; or 255 is white in some masks, and others have another number inside.
    """
    labels = [number for number in numbers if number != UNLABELLED]
    if len(labels) > _SHADES and _soft(masks, max(labels)):
        raise ValueError(
            f"the masks in {root} have {len(labels)} numbers up to {max(labels)}, which look like the soft edge of one "
            f"class: {_TO_WRITE}"
        )
    if UNLABELLED in numbers and not any(UNLABELLED in own and len(own) > 1 for own in number_sets):
        white = next(mask.file for mask, own in zip(masks, number_sets, strict=True) if UNLABELLED in own)
        raise ValueError(
            f"in {root}, {white} has nothing but {UNLABELLED} inside, and others {', '.join(map(str, labels))}: is "
            f"{UNLABELLED} white, or not labelled? {_TO_WRITE.capitalize()}"
        )


def _soft(masks: Iterable[MaskFacts], top: int) -> bool | None:
    """Return whether greys are soft edges, or noise as of JPEG; None: not known.

    Of a soft edge, pixels lie between their neighbours; noise is of nearly black and nearly white. Numbers of small
    regions lie between those of others further away, and so do shades of a mask that was made larger.
    """
    masks = list(masks)
    dark, middle, bright = (
        sum(_total(mask, low * top, high * top) for mask in masks) for low, high in ((0, 0.25), (0.25, 0.75), (0.75, 1))
    )
    if dark and middle < bright / 2 and len(set().union(*(mask.numbers for mask in masks))) > _SHADES:
        return True
    shares = []
    for step in STEPS:
        between, apart = (
            sum(
                count
                for mask in masks
                if mask.blends
                for number, count in mask.blends[step][part].items()
                if 0 < number < top
            )
            for part in (0, 1)
        )
        shares.append(between / max(1, between + apart))
    return shares[0] > _SOFT or (None if max(shares) > _SOFT else False)


def _hint(root: Path, counts: Sequence[Counter[int]], threshold: int) -> str:
    """Return a hint about masks of which most is inside, which looks inverted; "": none."""
    marked = [(sum(n for number, n in count.items() if number > threshold), count.total()) for count in counts]
    inside, total = (sum(numbers) for numbers in zip(*((a, b) for a, b in marked if a), strict=True))
    if inside <= _MOSTLY * total:
        return ""
    return (
        f"{inside / total:.0%} of the masks in {root} is inside: if defects are black on white there, invert the "
        "masks, so that white is inside"
    )
