"""Models of good photos: all that they need are sums of rows, which parts of the photos have added up."""

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import CovariancePCA, Head, assemble_detector, measure_anomaly
from pytorch_grad_cam_pcasvm.network.features import compute_features
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode
from pytorch_grad_cam_pcasvm.studio.data import image_paths
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
        images: good photos, in files, a folder of them, or tensors (N, ...), also such as the model fails. Photos that
            it was fitted on would count twice.

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
            "this model keeps no sums that photos could be added to: fit it on good photos with --classifier pca, or "
            "fit it again on all photos"
        )
    scores, sums = list(kept["scores"]), CovariancePCA().merge(training.sums)
    for rows in _read_rows(model, images):
        scores.append(float(measure_anomaly(head, head.values_of(rows)).max()))
        sums.partial_fit(rows.cpu().numpy())
    other = Head.of(assemble_detector(sums, kept["shrinkage"]))
    own, facts = other.stages[0], head.stages[0].facts
    own.facts = replace(own.facts, least=facts.least, reach=facts.reach)
    threshold = asdict(choose_threshold(scores, kept["rate"]))
    preparation = (training.preparation or {}) | {"good": kept | {"scores": scores}, "threshold": threshold}
    other.training_set = replace(training, preparation=preparation, sums=sums, resamples=None)
    net = attach_head(model.net.backbone, other.to(next(head.buffers()).device), model.net.layer, model.net.pool)
    about = model.about | {"images": model.about["images"] + len(scores) - len(kept["scores"])}
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
