"""Models of good photos: all that they need are sums of rows, which parts of the photos have added up."""

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import CovariancePCA, Head, assemble_detector, measure_anomaly
from pytorch_grad_cam_pcasvm.network.features import compute_features
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode
from pytorch_grad_cam_pcasvm.studio.data import image_paths
from pytorch_grad_cam_pcasvm.studio.data.copies import name_file
from pytorch_grad_cam_pcasvm.studio.model.choices import choose_threshold
from pytorch_grad_cam_pcasvm.studio.model.fitting import attach_head
from pytorch_grad_cam_pcasvm.studio.model.model import Model, Paths
from pytorch_grad_cam_pcasvm.studio.model.writing import place_images

_BATCH = 16  # photos at a time


def add_photos(model: Model, images: Tensor | Paths) -> Model:
    """Return a model that has learned from more good photos, as if it had been fitted on these, too.

    The photos that it was fitted on are not needed: their sums are in the model (see :class:`.CovariancePCA`). The
    threshold is chosen anew, by the scores of all photos that were left out, of which the new ones are by the model
    without them. What stays as it was: the shrinkage, and the means of layers near which contributions start.

    Args:
        model: from ``fit --classifier pca``, of good photos alone.
        images: good photos, in files, a folder of them, or a tensor (N, C, H, W), also such as the model fails. Files
            that it has learned before are left out, unless it was fitted with ``--no-pictures``; each photo counts as
            an object of its own.

    Returns:
        Another model; this one stays as it was.

    Raises:
        OSError: pictures cannot be read; all of these are named.
        ValueError: the model has no sums.

    Example:
        >>> model = load_model("model.safetensors")  # doctest: +SKIP
        >>> add_photos(model, "photos/false-alarms").save("model.safetensors")  # doctest: +SKIP
    """
    head, training = model.net.head, model.net.head.training_set
    kept = (training.preparation or {}).get("good")
    if training.sums is None or kept is None:
        raise ValueError(
            "photos can be added to models of good photos alone, by fit --classifier pca, which keep their sums; this "
            f"one is {model!r}: fit it again on all photos"
        )
    files = [] if isinstance(images, Tensor) else [name_file(path) for path in image_paths(images)]
    if files and kept["files"]:
        images = [path for path, name in zip(image_paths(images), files, strict=True) if name not in kept["files"]]
    if isinstance(images, Tensor) and images.dim() != 4:
        raise ValueError(f"good photos are images (N, C, H, W), or files, got a tensor {tuple(images.shape)}")
    if isinstance(images, Tensor | list) and not len(images):
        raise ValueError("there is no photo to add: the model has learned all of these before, or none was given")
    scores, sums = list(kept["scores"]), CovariancePCA().merge(training.sums)
    for rows in _read_rows(model, images):
        scores.append(float(measure_anomaly(head, head.values_of(rows)).max()))
        sums.partial_fit(rows.cpu().numpy())
    other = Head.of(assemble_detector(sums, kept["shrinkage"]))
    own, facts = other.stages[0], head.stages[0].facts
    own.facts = replace(own.facts, least=facts.least, reach=facts.reach)
    first = max(kept["objects"], default=0) + 1  # each new photo is an object of its own
    added = len(scores) - len(kept["scores"])
    objects = [*kept["objects"], *range(first, first + added)]
    threshold = asdict(choose_threshold(scores, kept["rate"], objects))
    known = [*kept["files"], *dict.fromkeys(name for name in files if name not in kept["files"])]
    kept = kept | {"scores": scores, "objects": objects, "files": known if kept["files"] else []}
    preparation = (training.preparation or {}) | {"good": kept, "threshold": threshold}
    other.training_set = replace(training, preparation=preparation, sums=sums, resamples=None)
    net = attach_head(model.net.backbone, other.to(next(head.buffers()).device), model.net.layer, model.net.pool)
    about = model.about | {"images": model.about["images"] + added}
    return replace(model, net=net, about=about | {"rows": sums.n_samples_seen_})


def _read_rows(model: Model, images: Tensor | Paths) -> Iterator[Tensor]:
    """Yield the rows of features of each image, (R, D), in double precision."""
    backbone, _ = model.net.feature_source()
    listed = images if isinstance(images, Tensor) else image_paths(images)
    for start in range(0, len(listed), _BATCH):
        batch = listed[start : start + _BATCH]
        x = place_images(batch if isinstance(batch, Tensor) else model.read(batch), backbone)
        with evaluation_mode(backbone), torch.no_grad():
            for one in compute_features(*model.net.feature_source(x), x).double():
                yield one[None] if one.dim() == 1 else one.flatten(1).T
