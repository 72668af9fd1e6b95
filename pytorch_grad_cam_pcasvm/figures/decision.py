"""The figure of a decision: every component's part in it, as maps and as steps from the baseline to its value."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from pytorch_grad_cam_pcasvm.figures.grid import check_maps
from pytorch_grad_cam_pcasvm.figures.steps import Steps, choose_decision, stand_below
from pytorch_grad_cam_pcasvm.figures.style import LINES, filled, laid_out
from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.runtime.pictures import as_pictures
from pytorch_grad_cam_pcasvm.targets import Target

_NOTE = (
    "Red raises the value, blue lowers it; all maps share one scale. The steps lead from the value at the start, with "
    "this layer's activations replaced, to that of the image. Each is the sum of the map above it"
)
_TOKENS = " plus the remainder (class tokens, other inputs): both parts are printed below it"


def plot_decision(
    images: Any,
    components: SignedMaps,
    head: Any,
    target: Target | None = None,
    *,
    normal: Any = None,
    row: int = 0,
    count: int = 4,
    classes: Sequence[Any] | None = None,
    outline: bool = False,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw how a decision is composed: the map of each component times its weight g_b, and their sums as steps.

    Red raises the decision, blue lowers it; all maps share one scale. The steps ``g_b (p_b - p0_b)``, where g_b is the
    secant of the decision from the baseline's components p0 to p, lead from the value at the baseline to that of the
    image. They include the part of class and register tokens, which is not on a map and is written below the steps. The
    network is not needed, so any head fitted on the same components will do.

    Args:
        images: the explained images, shape (N, H, W, 3), (N, 3, H, W), (N, 1, H, W) or (N, H, W), in [0, 1].
        components: contributions of every component, from ``ContributionCAM.explain(x)``.
        head: ``net.head``, or a fitted estimator, pipeline or :class:`Head` with the same components.
        target: the decision to draw; None: the margin of the predicted class.
        normal: the class that is an absence, such as ``"good"``: if there is no target, the evidence for any other
            class against it is drawn, whatever is predicted. None: the one that the head knows, if any.
        row: which of the N images.
        count: number of components to draw, those with the largest steps; the others are summed.
        classes: names of the classes, in the order of ``classes_``; None: the labels.
        outline: surround the strongest evidence by lines on the image instead of colouring it, see :func:`plot_maps`.
        size: width and height of the figure in inches, with a smaller font if needed; None: as large as needed.

    Returns:
        The figure.

    Raises:
        TypeError: the maps are not a SignedMaps.
        ValueError: the maps are not contributions of all components, the images or the head do not fit, the row does
            not exist, the target is not linear in the head's values, or the target is missing for a head with several
            outputs.

    Example:
        >>> components = ContributionCAM(net, ["layer2"]).explain(images)
        >>> figure = plot_decision(images, components, net.head, SVMTarget("cat"))
    """
    pictures = as_pictures(images)
    if not isinstance(components, SignedMaps):
        raise TypeError(f"expected the SignedMaps of all components, got {type(components).__name__}")
    check_maps("", components, len(pictures))
    if not 0 <= row < len(components) or count < 1:
        raise ValueError(f"row {row}, count {count}: there are {len(components)} images, counted from 0")
    head = Head.of(head)
    steps = Steps.of(components[row], head, choose_decision(target, head, normal), count, classes)
    picture = pictures[row]
    width, height = steps.needed(picture)
    note = f"{LINES}. {how_to_read(steps)}" if outline else how_to_read(steps)
    title = filled(steps.title, width - 0.3, "bold")
    with laid_out(
        (width, height + 0.3 * (title.count("\n") + 1)), size, note, layout="compressed", w_pad=0.15
    ) as figure:
        grid = figure.add_gridspec(2, steps.columns, height_ratios=steps.heights(picture))
        axes = steps.draw(figure, grid, picture, outline)
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
    stand_below(*axes)
    return figure


def how_to_read(steps: Steps) -> str:
    """Return how steps are read."""
    return f"{_NOTE}{_TOKENS if steps.has_tokens else ''}."
