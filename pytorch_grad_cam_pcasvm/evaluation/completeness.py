"""Completeness: do maps add up to what they explain?"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.rivals import ANOTHER, HEAD, Rivals
from pytorch_grad_cam_pcasvm.evaluation.statistics import SAME, Estimate
from pytorch_grad_cam_pcasvm.evaluation.subject import DEFAULT, Methods, Subject
from pytorch_grad_cam_pcasvm.maps import SignedMaps
from pytorch_grad_cam_pcasvm.model.net import PCASVMNet
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
        seed: random seed of the choice and of the random heads.
        progress: show a progress bar.
        transform: from a PIL image to a tensor for the network, for a folder or a data set of PIL images.

    Returns:
        A row for each method, which passes below a thousandth; and how much farther from the value the sums of another
        image's map and of a randomised head's are. (Random maps and the blind map are not in units of the value.)
        Methods that do not promise to add up have nothing to pass.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: too few images, or nothing to explain.
    """
    subject = Subject(
        net, data, target_layers, methods, target,
        images=images, batch_size=batch_size, seed=seed, progress=progress, transform=transform,
    )  # fmt: skip
    against = Rivals(subject, (ANOTHER, HEAD))
    values: list[np.ndarray] = []
    promised: set[str] = set()  # methods whose maps have a value at a baseline to add to
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for x, _, images_of in subject.batches("completeness"):
        targets = subject.targets(x)
        values.append(subject.values(x, targets))
        against.next(x, targets, images_of)
        for method in subject.methods:
            maps = subject.explained(method, x, targets)
            subject.seen(method, maps)
            if maps[0].baseline_values is not None:
                promised.add(method)
            own = np.array([float(each.values) for each in maps])
            for source, theirs in {"": maps, **against.of(method)}.items():
                found.setdefault((method, source), []).append(np.abs(_sums(theirs) - own))
            subject.worst[method].add(found[method, ""][-1], images_of, x, maps)
    spread = float(np.concatenate(values).std())
    if not spread > SAME * np.abs(np.concatenate(values)).max():
        raise ValueError("the target has the same value for all images: there is no scale to measure distances on")
    distances = {key: np.concatenate(parts) / spread for key, parts in found.items()}
    rows = []
    for method in subject.methods:
        own = distances[method, ""]
        passes = method in promised
        rows.append(Row(method, ERROR, "", Estimate.of(own), EXACT if passes else None, below=True))
        rows += [
            Row(method, ERROR, rival, Estimate.of(distances[method, rival] - own), 0.0 if passes else None)
            for rival in against.names
        ]
    return subject.result(
        "completeness",
        "how far are the sums of maps from the values that they explain? (in standard deviations of the values)",
        rows,
    )


def _sums(maps: Sequence[SignedMaps]) -> np.ndarray:
    """Return what each map adds up to, with its remainder and the value at its baseline, shape (N,)."""
    found = []
    for each in maps:
        total = float(each.maps.double().sum()) + (0.0 if each.remainder is None else float(each.remainder))
        start = 0.0 if each.baseline_values is None else float(each.baseline_values)
        found.append(total * float(each.log_scale.exp()) + start)
    return np.array(found)
