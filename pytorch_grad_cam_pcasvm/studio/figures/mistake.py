"""The figure of a mistake: the components that decided against the true class, their maps, similar training images."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.maps.recombination import at_place
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.inputs import checked_images
from pytorch_grad_cam_pcasvm.network.modules import find_device
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.patches import label_patches
from pytorch_grad_cam_pcasvm.runtime.errors import BlankMapWarning
from pytorch_grad_cam_pcasvm.runtime.pictures import as_array, as_pictures
from pytorch_grad_cam_pcasvm.studio.figures.blocks import OUTLINE
from pytorch_grad_cam_pcasvm.studio.figures.component import choose_method, values_of
from pytorch_grad_cam_pcasvm.studio.figures.decision import COLUMN, PICTURE, Steps, how_to_read, stand_below
from pytorch_grad_cam_pcasvm.studio.figures.style import draw_panel, laid_out, literal, number, plain_name, wrap_text
from pytorch_grad_cam_pcasvm.studio.pictures.panels import Panel
from pytorch_grad_cam_pcasvm.targets import PCATarget, SVMTarget

_MOST_NAMED = 3  # components in the title
_ROUNDING = 1e-4  # how exactly maps in single precision add up


def plot_mistake(
    net: PCASVMNet,
    image: Tensor,
    truth: Any,
    images: Tensor,
    labels: Any,
    *,
    target_layer: nn.Module | str | None = None,
    cam: ClosedFormCAM | None = None,
    picture: Any = None,
    pictures: Any = None,
    classes: Mapping[Any, str] | Sequence[str] | None = None,
    count: int = 4,
    neighbours: int = 3,
    batch_size: int = 32,
    features: Any = None,
    at: tuple[int, ...] | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw why an image was classified wrongly: the decision between the predicted and the true class, part by part.

    The upper part shows the decision ``SVMTarget(predicted, versus=truth)`` as maps and steps of the components (see
    :func:`~pytorch_grad_cam_pcasvm.figures.plot_decision`): red is evidence for the predicted class, blue for the true
    one. The title says which components tipped the decision: the smallest number of
    components, largest part first, without which the true class would have won. The lower part shows the nearest
    training images of both classes, with their Euclidean distances in the space of all components; a copy of the image
    itself is left out.

    Of a head that decides at every position, the mistake is that at one of them: which part of the picture made it, and
    the training patches that are nearest to it, in the middle of what lies around them.

    Args:
        net: a network with a PCA and a classifier.
        image: the image, preprocessed for the network, shape (C, H, W) or (1, C, H, W).
        truth: its true class, a label from ``classes_``.
        images: the training images, preprocessed for the network, shape (R, C, H, W).
        labels: the training images' classes, shape (R,), or with ``at`` also masks, shape (R, H, W): a patch has the
            label of most of its pixels.
        target_layer: the layer whose contributions are drawn, by :class:`ContributionCAM`.
        cam: a method whose maps add up, created for this network, to use instead, for example with another baseline.
        picture: the picture to draw of the image, shape (H, W, 3), (3, H, W), (1, H, W) or (H, W), in [0, 1]; None: the
            image, which must then be in [0, 1].
        pictures: the pictures to draw of the training images, shape (R, H, W, 3), (R, 3, H, W), (R, 1, H, W) or
            (R, H, W), in [0, 1]; None: the images, which must then be in [0, 1].
        classes: names of the labels, by label or as a list indexed by number; None: the labels themselves.
        count: number of components to draw, those with the largest parts; the others are summed.
        neighbours: number of training images of each class.
        batch_size: number of images to run at once.
        features: what the network made of the training images, so that it need not run on them again: their features,
            (R, D), as from :func:`extract_features`, with ``at`` a row for each position; or an atlas of them.
        at: of a head that decides at every position, the position (row, column); its true class is ``truth``.
        size: width and height of the figure in inches, with a smaller font if needed; None: as large as needed.

    Returns:
        The figure.

    Raises:
        TypeError: the images are not floating-point tensors.
        ValueError: the image is classified correctly; the head has no PCA, no classifier or no classes (a regressor, a
            one-class SVM); the true class is unknown to the head or has no training image; neither or both of
            ``target_layer`` and ``cam`` are given; ``cam`` belongs to another network, or its maps do not add up;
            images, pictures, labels and names do not match; or the head decides at every position, and none is named.

    Example:
        >>> truth = "dog" if net.predict(images)[0] == "cat" else "cat"  # as if it were one
        >>> figure = plot_mistake(net, images[0], truth, training_images, labels, target_layer="layer2")
    """
    head_classes = _classes(net.head)
    truth = head_classes[net.head.class_index(truth)]
    at = _make_position(at)
    cam = choose_method(net, target_layer, cam, at)
    one, x = checked_images(image.unsqueeze(0) if image.dim() == 3 else image), checked_images(images, net)
    image_labels, source = as_array(labels), as_array(x if pictures is None else pictures)
    if one.shape != x[:1].shape or count < 1 or neighbours < 1 or batch_size < 1:
        raise ValueError(
            f"an image of shape {tuple(image.shape)} for training images of shape {tuple(x.shape)}, count {count}, "
            f"neighbours {neighbours}: give one image of their shape, and at least 1 of each"
        )
    masks = at is not None and image_labels.shape == (len(x), *x.shape[2:])
    if not (image_labels.shape == (len(x),) or masks) or len(source) != len(x):
        raise ValueError(
            f"labels of shape {image_labels.shape} and {len(source)} pictures for {len(x)} training images: give "
            "one for each"
        )
    names = _map_names(head_classes, classes)
    drawn = as_array(one if picture is None else picture)
    drawn = as_pictures(drawn if drawn.ndim == 4 else drawn[None])[0]

    p, predictions, output = values_of(net, one, 1)
    SVMTarget(truth, at=at)(output)  # refuses a place that there is not
    p, predicted = (values[(0, *(at or ()))] for values in (p.movedim(1, -1), predictions))
    predicted = predicted.item() if isinstance(predicted, np.generic) else predicted
    if predicted == truth:
        raise ValueError(
            f"the image is classified correctly, as {truth!r}, so there is no mistake to explain: plot_decision draws "
            "any decision"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BlankMapWarning)  # the picture says so
        components = cam.explain(one.to(find_device(net)), [PCATarget(b, at=at) for b in range(len(p))]).cpu()
    components, (target,) = at_place(components, SVMTarget(predicted, versus=truth), at)
    in_order = None if classes is None else list(names.values())
    steps, all_steps = (Steps.of(components, net.head, target, most, in_order) for most in (count, len(p)))

    # Of dense features, there is a row for each patch.
    grid: Any = output.grid
    positions = 1 if grid is None else grid.count
    stored = None if features is None else _components(net, features, len(x) * positions)
    rows = values_of(net, x, batch_size)[0].movedim(1, -1).reshape(-1, len(p)) if stored is None else stored
    row_labels = (
        label_patches(image_labels, grid.shape, grid.cells)[0].ravel() if masks else image_labels.repeat(positions)
    )
    distances = (rows - p).norm(dim=1).numpy()
    distances[(x == one).flatten(1).all(1).cpu().numpy().repeat(positions)] = np.inf  # no image is its own neighbour
    nearest = [_find_nearest(distances, row_labels, label)[:neighbours] for label in (predicted, truth)]
    around = Around(grid, drawn.shape[:2]) if at else None
    near = [
        _Near(
            literal(names[label]),
            as_pictures(source[some]) if around is None else around.cut(source, some),
            distances[some],
        )
        for label, some in zip((predicted, truth), nearest, strict=True)
    ]
    outline = None if around is None else around.patch(int(np.ravel_multi_index(at or (), grid.shape)))
    return _draw_figure(drawn, steps, _sentence(all_steps, names[predicted], names[truth]), near, size, outline)


class _Near(NamedTuple):
    """The nearest training images, or patches, of a class: its name, pictures (n, H, W, 3), and distances (n,)."""

    name: str
    pictures: np.ndarray
    distances: np.ndarray


def _make_position(at: Any) -> Any:
    """Return the position of dense features that a figure is about, as numbers, or None.

    Raises:
        TypeError: it is no place.
        ValueError: it is another place than one position.
    """
    place: Any = PCATarget(0, at=at).at
    if not (place is None or isinstance(place, tuple)):
        raise ValueError(f"at must be one position, (row, column), got {place!r}")
    return place


def _classes(head: Head) -> list[Any]:
    """Return the labels of a head; raise a ValueError for one without components or classes."""
    if head.component_position is None:
        raise ValueError(
            "plot_mistake takes a decision apart by components, but the head has no PCA: put one in front, as in "
            "make_pipeline(StandardScaler(), PCA(8), SVC())"
        )
    if head.decision_position is None:
        raise ValueError("the head has no classifier, so nothing was predicted: put one behind the PCA")
    if head.classes_ is None:
        estimator = "one-class SVM" if head.voting.about == "one class" else "regressor"
        raise ValueError(
            f"the head is a {estimator}, which predicts no class that could be wrong: plot_decision draws its value, "
            "part by part"
        )
    return head.classes_.tolist()


def _map_names(labels: Sequence[Any], classes: Mapping[Any, str] | Sequence[str] | None) -> dict[Any, str]:
    """Return the names of the labels."""
    if classes is not None and not isinstance(classes, Mapping) and len(classes) < len(labels):
        raise ValueError(f"{len(classes)} names for {len(labels)} classes: give one for each")
    return {label: plain_name(label, index, classes) for index, label in enumerate(labels)}


def _find_nearest(distances: np.ndarray, labels: np.ndarray, label: Any) -> np.ndarray:
    """Return the training images of a class, the nearest first."""
    rows = np.flatnonzero((labels == label) & np.isfinite(distances))
    if not len(rows):
        raise ValueError(
            f"no other training image is labelled {label!r}: their labels are {np.unique(labels).tolist()}"
        )
    return rows[np.argsort(distances[rows], kind="stable")]


def _sentence(steps: Steps, predicted: str, truth: str) -> str:
    """Return a sentence with the prediction, the truth and the reason."""
    outcome = f'predicted "{predicted}", but it is "{truth}"'
    if steps.value <= 0:  # of three or more classes, where the others' votes decide
        return f'{outcome}: between these two alone, "{truth}" would win'
    tipped, left, least = [], steps.value, _ROUNDING * steps.value
    for part in sorted(steps.parts, key=lambda part: -part.rise):
        if left > least and part.rise > 0:
            tipped.append(str(part.components[0] + 1))
            left -= part.rise
    if left > least:
        return f'{outcome}: no component tipped it; "{predicted}" already wins at the start'
    if len(tipped) > _MOST_NAMED + 1:
        tipped[_MOST_NAMED:] = [f"{len(tipped) - _MOST_NAMED} others"]
    *most, last = tipped
    return f"{outcome}: component{'s' * bool(most)} {', '.join(most)}{' and ' * bool(most)}{last} tipped it"


def _draw_figure(
    picture: np.ndarray,
    steps: Steps,
    sentence: str,
    near: Sequence[_Near],
    size: tuple[float, float] | None,
    outline: np.ndarray | None,
) -> Figure:
    """Return the figure of the steps, and below them the neighbours of both classes."""
    (predicted, pictures, _), (truth, *_) = near
    second = max(len(pictures) for _, pictures, _ in near) + 1  # where neighbours of the true class begin
    columns = max(steps.columns, 2 * second - 1)
    width, low = 1.6 + COLUMN * columns, PICTURE * pictures.shape[1] / pictures.shape[2]
    title = wrap_text(literal(sentence), width - 0.3, "bold")
    words = [wrap_text(f'nearest "{name}"', second * COLUMN - 0.4, "bold") for name, *_ in near]
    lines = max(text.count("\n") + 1 for text in words)
    high, low = steps.needed(picture)[1], low + 0.8 + 0.3 * lines
    needed = (width, high + low + 0.3 * (title.count("\n") + 1))
    note = (
        f'{how_to_read(steps)} Here, red favours "{predicted}", blue "{truth}". Below: the nearest training '
        f"{'images' if outline is None else 'patches'}, by Euclidean distance in the space of all "
        f"{len(steps.whole.components)} components."
    )
    with laid_out(needed, size, note, w_pad=0.15) as figure:
        above, below = figure.subfigures(2, height_ratios=(high, low), squeeze=False).flat
        axes = steps.draw(above, above.add_gridspec(2, columns, height_ratios=steps.heights(picture)), picture)
        if outline is not None:
            for axis in (axes[0][0], axes[0][-1]):
                axis.contour(outline, [0.5], colors=OUTLINE, linewidths=1.2)
        grid, font = below.add_gridspec(1, columns), mpl.rcParams["font.size"]
        for first, text, (_, pictures, distances) in zip((0, second), words, near, strict=True):
            row = [below.add_subplot(grid[column]) for column in range(first, first + len(pictures))]
            for axis, neighbour, distance in zip(row, pictures, distances, strict=True):
                heading = "\n" * (lines + 1) + f"distance {number(distance)}"
                draw_panel(axis, Panel(neighbour, heading=heading), fontsize="small", pad=0.3 * font)
            # Words may be wider than a picture: the titles leave them room.
            place: dict[str, Any] = {"xytext": (0, 1.6 * font), "textcoords": "offset points"}
            row[0].annotate(text, (0, 1), xycoords="axes fraction", weight="bold", in_layout=False, **place)
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
    stand_below(*axes)
    return figure


def _components(net: PCASVMNet, features: Any, count: int) -> Tensor:
    """Return the components of training images whose features are known, (R, B), or of an atlas of them.

    Raises:
        ValueError: there are not as many as images, or they are of another head.
    """
    stored, head = getattr(features, "components", None), net.head
    numbers = torch.as_tensor(as_array(features if stored is None else stored))
    position = head.component_position or 0
    width = head.n_features if stored is None else head.stages[position - 1].n_outputs
    if tuple(numbers.shape) != (count, width):
        raise ValueError(
            f"features have the shape {tuple(numbers.shape)}, but {count} training images or patches have ({count}, "
            f"{width}): give those of the images, in their order"
        )
    if stored is not None:
        return numbers
    with torch.no_grad():
        return head(numbers.to(find_device(net))).values[position].cpu()


_AROUND = 7  # patches across, of what is drawn around one
_LINE = (1.0, 0.9, 0.0)  # around a patch


class Around:
    """Cuts patches out of pictures, with their surroundings.

    Args:
        grid: of the patches.
        size: (H, W) of the pictures.
    """

    def __init__(self, grid: Any, size: Sequence[int]) -> None:
        self._shape, self._size = grid.shape, size
        self._window = [
            min(side, max(2, round(_AROUND * side / number))) for side, number in zip(size, grid.shape, strict=True)
        ]

    def _spans(self, position: int) -> list[tuple[int, int]]:
        """Return where a patch begins and ends."""
        places = np.unravel_index(position, self._shape)
        return [
            (int(place * side // number), max(int((place + 1) * side // number), int(place * side // number) + 1))
            for place, side, number in zip(places, self._size, self._shape, strict=True)
        ]

    def patch(self, position: int) -> np.ndarray:
        """Return which pixels are of a patch, (H, W)."""
        mask = np.zeros(self._size)
        mask[tuple(slice(*span) for span in self._spans(position))] = 1
        return mask

    def cut(self, source: Any, rows: np.ndarray) -> np.ndarray:
        """Return patches with their surroundings, by their numbers in all pictures, outlined: (n, h, w, 3)."""
        positions = int(np.prod(self._shape))
        pictures = []
        for row in rows.tolist():
            picture = as_pictures(source[[row // positions]])[0].copy()
            spans = self._spans(row % positions)
            starts = [
                min(max((first + last - window) // 2, 0), side - window)
                for (first, last), window, side in zip(spans, self._window, self._size, strict=True)
            ]
            (top, bottom), (left, right) = spans
            for line in ((slice(top, bottom), [left, right - 1]), ([top, bottom - 1], slice(left, right))):
                picture[line] = _LINE
            inside = tuple(slice(start, start + window) for start, window in zip(starts, self._window, strict=True))
            pictures.append(picture[inside])
        return np.stack(pictures)
