"""The measures as functions, each of which makes a study of its own. Their arguments are told by :class:`.Study`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.methods import ClosedFormGradCAM, ContributionCAM
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.studio.evaluation.report import USUAL, Checks
from pytorch_grad_cam_pcasvm.studio.evaluation.result import Result
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import RIVALS
from pytorch_grad_cam_pcasvm.studio.evaluation.study import Study
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Methods
from pytorch_grad_cam_pcasvm.targets import Target

_METHODS: Methods = (ClosedFormGradCAM, ContributionCAM)


def faithfulness(
    net: PCASVMNet,
    data: Any,
    target_layers: Sequence[nn.Module | str],
    methods: Methods = _METHODS,
    target: Target | None = None,
    *,
    images: int | None = 200,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Callable[[Any], Tensor] | None = None,
    normal: Any = None,
    stop_early: bool = False,
    minutes: float | None = None,
    fractions: Sequence[float] = (0.25, 0.5, 0.75),
    fill: str = "blur",
    patches: int | None = None,
    arcc: bool = False,
    rivals: Sequence[str] = RIVALS,
) -> Result:
    """Measure deletion and insertion against controls.

    See :meth:`Study.faithfulness`, which tells of it and of its arguments; the others are those of a :class:`Study`.

    Returns:
        A row for each method, measure and control: random maps of the same resolution, the map of another image for the
        same target, the blind map (the sum of the activations), and the map of a head whose components are rotated at
        random. Every image has its own random map and rotation. Where a map is flat, the random map ranks its pixels.
        Blank maps are counted, but left out of the means.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are too few images, a layer is unknown, two methods have the same name, or the head has
            nothing to explain.
        ImportError: ``arcc`` with a version of grad-cam that does not have it.
        ValueError: a control or the fill is unknown, fractions are not between 0 and 1, or all images have the same
            value, as they are or once parts of them are removed.

    Example:
        >>> result = evaluation.faithfulness(net, (training_images, labels), ["layer2"], images=6, progress=False)
        >>> result.check
        'faithfulness'
    """
    study = Study(
        net,
        data,
        target_layers,
        methods,
        target,
        images=images,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
        transform=transform,
        normal=normal,
        stop_early=stop_early,
        minutes=minutes,
    )
    return study.faithfulness(fractions=fractions, fill=fill, patches=patches, arcc=arcc, rivals=rivals)


def localisation(
    net: PCASVMNet,
    data: Any,
    target_layers: Sequence[nn.Module | str],
    methods: Methods = _METHODS,
    *,
    images: int | None = 200,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Callable[[Any], Tensor] | None = None,
    normal: Any = None,
    stop_early: bool = False,
    minutes: float | None = None,
    tiles: int = 2,
    pasted: bool = False,
    masks: Any = None,
    rivals: Sequence[str] = RIVALS,
    category: Any = None,
    tolerance: float = 15,
    rate: float = 0.01,
) -> Result:
    """Measure how much of the evidence for a class lies on the image of that class, or inside masks.

    See :meth:`Study.localisation`, which tells of it and of its arguments; the others are those of a :class:`Study`.

    Returns:
        Both measures for each method: against chance, random maps, another scene's map, the blind map and a randomised
        head's map; and the share of maps without a measure: those without positive evidence, and for the pointing game,
        also flat maps. With masks also those of :func:`pixel_scores`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are too few images, a layer is unknown, two methods have the same name, or the head has
            nothing to explain.
        ValueError: there are no labels, only one class, or too few correctly classified images; ``pasted`` is used with
            masks; the network does not take the tiles; masks have another size; or boxes are not in pixels.

    Example:
        >>> result = evaluation.localisation(net, (training_images, labels), ["layer2"], images=6, progress=False)
        >>> result.check
        'localisation'
    """
    study = Study(
        net,
        data,
        target_layers,
        methods,
        images=images,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
        transform=transform,
        normal=normal,
        stop_early=stop_early,
        minutes=minutes,
    )
    return study.localisation(
        tiles=tiles, pasted=pasted, masks=masks, rivals=rivals, category=category, tolerance=tolerance, rate=rate
    )


def sensitivity(
    net: PCASVMNet,
    data: Any,
    target_layers: Sequence[nn.Module | str],
    methods: Methods = _METHODS,
    target: Target | None = None,
    *,
    images: int | None = 100,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Callable[[Any], Tensor] | None = None,
    normal: Any = None,
    stop_early: bool = False,
    minutes: float | None = None,
    refitted: Callable[[int], Any] | None = None,
    layers: int = 3,
) -> Result:
    """Measure how similar maps remain when the head, and then the layers from the top down, are randomised.

    See :meth:`Study.sensitivity`, which tells of it and of its arguments; the others are those of a :class:`Study`.

    Returns:
        A row for each method and randomisation, and for the blind map; it passes if the correlation is below 0.5. Every
        image has its own rotated components, and one of ten draws of layers and of labels. Maps of components have
        nothing to pass when labels are permuted, because a PCA does not use labels. Further rows give the similarity of
        each method's maps to random maps, to another image's map and to the blind map: this is how similar unrelated
        maps are anyway. If the similarity to the blind map is near 1, the target hardly matters.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are too few images, a layer is unknown, two methods have the same name, or the head has
            nothing to explain.
        ValueError: the number of layers is negative.

    Example:
        >>> result = evaluation.sensitivity(net, (training_images, labels), ["layer2"], images=6, progress=False)
        >>> result.check
        'sensitivity'
    """
    study = Study(
        net,
        data,
        target_layers,
        methods,
        target,
        images=images,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
        transform=transform,
        normal=normal,
        stop_early=stop_early,
        minutes=minutes,
    )
    return study.sensitivity(refitted=refitted, layers=layers)


def completeness(
    net: PCASVMNet,
    data: Any,
    target_layers: Sequence[nn.Module | str],
    methods: Methods = _METHODS,
    target: Target | None = None,
    *,
    images: int | None = 200,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Callable[[Any], Tensor] | None = None,
    normal: Any = None,
    stop_early: bool = False,
    minutes: float | None = None,
) -> Result:
    """Measure how far the sums of maps are from the values that they explain.

    See :meth:`Study.completeness`, which tells of it and of its arguments; the others are those of a :class:`Study`.

    Returns:
        A row for each method, which passes below a thousandth, and how much farther from the value the sums of another
        image's map and of a randomised head's map are. (Random maps and the blind map are not in units of the value.)
        Methods that do not claim to add up have nothing to pass. For decisions, also the share of maps that contradict
        them because their sum has the opposite sign: it passes below a tenth, whatever the method claims.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are too few images, a layer is unknown, two methods have the same name, or the head has
            nothing to explain.
        ValueError: the target has the same value for all images.

    Example:
        >>> result = evaluation.completeness(net, (training_images, labels), ["layer2"], images=6, progress=False)
        >>> result.check
        'completeness'
    """
    study = Study(
        net,
        data,
        target_layers,
        methods,
        target,
        images=images,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
        transform=transform,
        normal=normal,
        stop_early=stop_early,
        minutes=minutes,
    )
    return study.completeness()


def stability(
    net: PCASVMNet,
    data: Any,
    target_layers: Sequence[nn.Module | str],
    methods: Methods = _METHODS,
    target: Target | None = None,
    *,
    images: int | None = 100,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Callable[[Any], Tensor] | None = None,
    normal: Any = None,
    stop_early: bool = False,
    minutes: float | None = None,
    noise: float = 0.1,
    shift: float = 0.05,
) -> Result:
    """Measure the rank correlation of each map with the map of the same image, with noise or shifted.

    See :meth:`Study.stability`, which tells of it and of its arguments; the others are those of a :class:`Study`.

    Returns:
        The correlation for each method and change, which passes above 0.5, and how far it exceeds the correlation of
        each control with the changed image's map: random maps, another image's map, the blind map and a randomised
        head's map.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are too few images, a layer is unknown, two methods have the same name, or the head has
            nothing to explain.
        ValueError: the noise is negative, or the shift is not between 0 and 1.

    Example:
        >>> result = evaluation.stability(net, (training_images, labels), ["layer2"], images=6, progress=False)
        >>> result.check
        'stability'
    """
    study = Study(
        net,
        data,
        target_layers,
        methods,
        target,
        images=images,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
        transform=transform,
        normal=normal,
        stop_early=stop_early,
        minutes=minutes,
    )
    return study.stability(noise=noise, shift=shift)


def report(
    net: PCASVMNet,
    data: Any,
    target_layers: Sequence[nn.Module | str],
    methods: Methods = _METHODS,
    *,
    target: Target | None = None,
    images: int | None = 200,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Callable[[Any], Tensor] | None = None,
    normal: Any = None,
    stop_early: bool = False,
    minutes: float | None = None,
    out: str | Path,
    checks: Checks = USUAL,
    commands: Mapping[str, str] | None = None,
) -> Path:
    """Run the checks that decide, or others, and write ``report.json`` and ``index.html``, a self-contained page.

    See :meth:`Study.report`, which tells of it and of its arguments; the others are those of a :class:`Study`.

    Returns:
        The path of the page. Both files begin with a one-sentence verdict for each method, which the page shows with a
        picture and the line to run; all numbers are folded below. Checks that cannot be run
        (such as localisation without labels) and pictures that cannot be drawn are listed with the reason.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are too few images, a layer is unknown, two methods have the same name, or the head has
            nothing to explain.
        OSError: nothing can be written there.
        TypeError: a check has no such option.
        ValueError: a check is unknown, or none can be run.

    Example:
        >>> path = evaluation.report(
        ...     net, (training_images, labels), ["layer2"], images=6, out="report", checks=["stability"], progress=False
        ... )
        >>> path.name
        'index.html'
    """
    study = Study(
        net,
        data,
        target_layers,
        methods,
        target,
        images=images,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
        transform=transform,
        normal=normal,
        stop_early=stop_early,
        minutes=minutes,
    )
    return study.report(out, checks=checks, commands=commands)
