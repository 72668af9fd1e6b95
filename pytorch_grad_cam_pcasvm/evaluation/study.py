"""A study: all measures of a network on the same images; each measure as a function, and all methods for Quantus."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from pytorch_grad_cam_pcasvm.evaluation.faithfulness import faithfulness as _faithfulness
from pytorch_grad_cam_pcasvm.evaluation.localisation import localisation as _localisation
from pytorch_grad_cam_pcasvm.evaluation.report import report as _report
from pytorch_grad_cam_pcasvm.evaluation.sanity import completeness as _completeness
from pytorch_grad_cam_pcasvm.evaluation.sanity import sensitivity as _sensitivity
from pytorch_grad_cam_pcasvm.evaluation.sanity import stability as _stability
from pytorch_grad_cam_pcasvm.evaluation.subject import Subject, explained, find_target_layer, heat, name_methods
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.modules import find_device
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.targets import SVMTarget

Found = TypeVar("Found")


class Study(Subject):
    """A network, images, and the methods that explain them, shared by all measures.

    Each measure gives the same result as the function of its name. Maps and controls that one measure has computed are
    reused by the next, as far as they fit into 256 MB, so do not change the network in between. Localisation explains
    classes, whatever the target.

    Args:
        net: the network.
        data: tensors (N, C, H, W), ``(images, labels)``, or a data set as for ``atlas.build``.
        target_layers: one layer.
        methods: classes, ``(class, options)`` pairs, or a dict of these by name.
        target: the target to explain; None: the class predicted for the whole image.
        images: number of images, chosen at random; None: all.
        batch_size: number of images at a time.
        seed: random seed of all draws.
        progress: show progress bars.
        transform: turns a PIL image into a tensor for the network; for a folder or a data set of PIL images.
        normal: the class that is an absence, such as ``"good"``. Then the default target is the evidence for any other
            class against it, and faithfulness and localisation leave out decisions for it. None: the one that the head
            knows, if any.
        stop_early: look at what decides after a quarter and a half of the images, and stop if it is clear, or can
            hardly become clear. Confidence intervals allow for three looks: they are of 99.5 % at the first two, and of
            96 % at the last, instead of 95 %, so that at most 5 % of the answers of a row are wrong. Localisation by
            masks always takes all images.
        minutes: how long a report, or a measure, may take, by the clock on the wall; None: as long as it takes. Then
            the looks of ``stop_early`` are taken, with the same intervals, and the time decides only how many of them
            are reached, never what is looked at. The checks of a report take turns.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are too few images, a layer is unknown, two methods have the same name, or the head has
            nothing to explain.

    Example:
        >>> study = evaluation.Study(net, (training_images, labels), ["layer2"], images=6, progress=False)
        >>> study.stability().check
        'stability'
    """

    faithfulness = _faithfulness
    localisation = _localisation
    sensitivity = _sensitivity
    completeness = _completeness
    stability = _stability
    report = _report


def _function(
    measure: Callable[..., Found], images: int = 200, without: str = "", by_name: str = ""
) -> Callable[..., Found]:
    """Return a measure as a function that takes the arguments of a study, too, and is documented with all of them.

    Args:
        measure: a function of a study.
        images: the number of images if none is given.
        without: an argument of the study that it does not take.
        by_name: an argument of the study that it takes by name only, as all of its own.

    Returns:
        The function.
    """
    _, *own = inspect.signature(measure).parameters.values()
    common = {name: parameter for name, parameter in inspect.signature(Study).parameters.items() if name != without}
    common["images"] = common["images"].replace(default=images)
    parameters = [
        parameter.replace(kind=parameter.KEYWORD_ONLY) if parameter.name == by_name else parameter
        for parameter in common.values()
    ]
    parameters += [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own]
    signature = inspect.signature(measure).replace(parameters=sorted(parameters, key=lambda parameter: parameter.kind))

    @functools.wraps(measure)
    def function(*args: Any, **options: Any) -> Found:
        bound = {"images": images, **signature.bind(*args, **options).arguments}
        of_measure = {option.name: bound.pop(option.name) for option in own if option.name in bound}
        return measure(Study(**bound), **of_measure)

    function.__module__ = __name__  # where pickle finds it
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    if Study.__doc__ and measure.__doc__:  # python -OO has none
        doc = inspect.cleandoc(measure.__doc__)
        _, arguments, errors, _ = re.split(r"\n*(?:Args|Raises|Example):\n", inspect.cleandoc(Study.__doc__))
        arguments = re.sub(rf"\n    {without}: .*(\n {{8}}.*)*", "", arguments)
        doc = doc if "Args:\n" in doc else doc.replace("Returns:\n", "Args:\n\nReturns:\n")
        doc = doc.replace("Args:\n", f"Args:\n{arguments}\n").replace("Raises:\n", f"Raises:\n{errors}\n")
        function.__doc__ = doc
    return function


faithfulness = _function(_faithfulness)
localisation = _function(_localisation, without="target")
sensitivity = _function(_sensitivity, images=100)
completeness = _function(_completeness)
stability = _function(_stability, images=100)
report = _function(_report, by_name="target")


def quantus_explainer(
    method: type[ClosedFormCAM], net: PCASVMNet, target_layers: Sequence[nn.Module | str], **options: Any
) -> Callable[..., np.ndarray]:
    """Return an ``explain_func`` for Quantus' metrics that uses a method of this package.

    Quantus passes its own model, a copy of the network in which it may have randomised modules; that copy is explained,
    at the layer of the same name. Its randomisation (MPRT) calls ``reset_parameters`` of modules, which a head does not
    have, so the head is left unchanged; :func:`sensitivity` randomises it.

    Args:
        method: a class of :mod:`~pytorch_grad_cam_pcasvm.methods`.
        net: the network.
        target_layers: one layer.
        **options: options of the method.

    Returns:
        A function of ``model``, ``inputs`` (numpy, (N, C, H, W)) and ``targets`` (N positions in the head's
        ``classes_``) that returns the signed maps of these classes' margins, (N, 1, H, W), at the size of the inputs.

    Raises:
        TypeError: the method is not a class of this package, an option is unknown to it, or the network is not a
            PCASVMNet.
        ValueError: there is not exactly one target layer, the layer is the backbone itself, or the head has no classes.

    Example:
        >>> explainer = evaluation.quantus_explainer(ContributionCAM, net, ["layer2"])
    """
    name_methods([method])
    name = find_target_layer(net, target_layers)
    if net.head.classes_ is None:
        raise ValueError("Quantus explains classes, but the head has none")
    if isinstance(name, nn.Module) or not name:
        raise ValueError("the target layer is the backbone itself: choose one of its layers")

    method(net, [name], **options)  # options that the method does not have are refused now

    def explain(model: PCASVMNet, inputs: Any, targets: Any, **_: Any) -> np.ndarray:
        parameter = next(model.parameters())
        x = torch.as_tensor(np.asarray(inputs)).to(find_device(model), parameter.dtype)
        classes = model.head.classes_.tolist()  # type: ignore[union-attr]
        positions = np.asarray(targets).reshape(-1)
        if (
            len(positions) != len(x)
            or positions.dtype.kind not in "iu"
            or not np.isin(positions, range(len(classes))).all()
        ):
            raise ValueError(
                f"targets must be {len(x)} positions in classes_, one for each input, from 0 to {len(classes) - 1}, "
                f"got {targets!r:.80}"
            )
        maps = explained(method(model, [name], **options), x, [SVMTarget(classes[index]) for index in positions])
        return heat(maps, x.shape[2:])[:, None].astype(np.float32)

    return explain
