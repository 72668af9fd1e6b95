"""Completeness: do maps add up to what they explain?"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.statistics import Estimate
from pytorch_grad_cam_pcasvm.evaluation.subject import DEFAULT, Methods, Subject
from pytorch_grad_cam_pcasvm.net import PCASVMNet
from pytorch_grad_cam_pcasvm.targets import Target

ERROR = "distance of the sum from the value"
EXACT = 1e-3  # of the spread of the values; float32 keeps more


def completeness(
    net: PCASVMNet,
    data: Any,
    target_layers: Sequence[nn.Module | str],
    methods: Methods = DEFAULT,
    target: Target | None = None,
    *,
    images: int | None = 200,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Callable[[Any], Tensor] | None = None,
) -> Result:
    """Measure how far the sums of maps are from the values that they explain.

    ``|sum of the map + remainder + value at the baseline - value|``, in standard deviations of the values over the
    images; for a method without a baseline, the sum of the map is compared with the value itself.

    Args:
        net: the network.
        data: tensors (N, C, H, W), ``(images, labels)``, or a data set as for ``atlas.build``.
        target_layers: one layer.
        methods: classes, ``(class, options)``, or a dict of these by name.
        target: what to explain; None: the class predicted for each image.
        images: how many, chosen at random; None: all.
        batch_size: number of images at a time.
        seed: random seed of the choice.
        progress: show a progress bar.
        transform: from a PIL image to a tensor for the network, for a folder or a data set of PIL images.

    Returns:
        A row for each method, which passes below a thousandth.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: too few images, or nothing to explain.
    """
    subject = Subject(
        net, data, target_layers, methods, target,
        images=images, batch_size=batch_size, seed=seed, progress=progress, transform=transform,
    )  # fmt: skip
    values: list[np.ndarray] = []
    adding_up: set[str] = set()  # methods that promise it
    distances: dict[str, list[float]] = {method: [] for method in subject.methods}
    for x, _, images_of in subject.batches("completeness"):
        targets = subject.targets(x)
        values.append(subject.values(x, targets))
        for method in subject.methods:
            maps = subject.explained(method, x, targets)
            subject.seen(method, maps)
            before = len(distances[method])
            if maps[0].baseline_values is not None:
                adding_up.add(method)
            for each in maps:
                total = float(each.maps.double().sum())
                total += 0.0 if each.remainder is None else float(each.remainder)
                at_baseline = 0.0 if each.baseline_values is None else float(each.baseline_values)
                distances[method].append(abs(total * float(each.log_scale.exp()) + at_baseline - float(each.values)))
            subject.worst[method].add(np.array(distances[method][before:]), images_of, x, maps)
    spread = float(np.concatenate(values).std())
    if not spread > 0:
        raise ValueError("the target has the same value for all images: there is no scale to measure distances on")
    rows = []
    for method, found in distances.items():
        estimate = Estimate.of(np.array(found) / spread)
        rows.append(Row(method, ERROR, "", estimate, estimate.mean < EXACT if method in adding_up else None))
    return subject.result(
        "completeness",
        "how far are the sums of maps from the values that they explain? (in standard deviations of the values)",
        rows,
    )
