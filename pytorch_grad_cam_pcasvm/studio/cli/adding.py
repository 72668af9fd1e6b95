"""The command that adds good photos to a model."""

from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.studio.cli.arguments import AddOptions
from pytorch_grad_cam_pcasvm.studio.cli.good_fitting import describe_suspicious
from pytorch_grad_cam_pcasvm.studio.cli.models import choose_device
from pytorch_grad_cam_pcasvm.studio.cli.photos import tell_threshold
from pytorch_grad_cam_pcasvm.studio.data import list_photos, name_classes
from pytorch_grad_cam_pcasvm.studio.data.copies import name_file
from pytorch_grad_cam_pcasvm.studio.model.choices import Threshold
from pytorch_grad_cam_pcasvm.studio.model.description import read_description


def add(options: AddOptions) -> None:
    """Add good photos to a model, and write it.

    Raises:
        ValueError: the model keeps no sums, there is no new photo, photos lie in folders of classes, or some are unlike
            all others and the model would be replaced.
    """
    paths, classes = list_photos(options.images), name_classes(options.images)
    if classes is not None and len(classes) > 1:
        raise ValueError(
            f"good photos alone can be added, but {options.images} has folders of {', '.join(classes)}: name that of "
            f"the good ones, such as {options.images / classes[0]}"
        )
    description = read_description(options.model)
    typed = None if description is None else description.backbone.typed
    backbone = typed if typed in options.trust else None
    model = package.load_model(options.model, backbone, weights=options.weights, trusted=options.trust)
    model.net.to(choose_device(options.device))
    before = _kept(model)
    known = before.get("files", [])
    new = [path for path in {name_file(path): path for path in paths}.values() if name_file(path) not in known]
    if len(new) < len(paths):
        repeated = len(paths) - len(new)
        print(f"not added: {repeated} of {len(paths)} photos, which the model knows, or which are there twice")
    if before and not known:
        print("which photos the model has learned is not in its file: any that are added again count twice")
    added = package.add_photos(model, new)
    kept = _kept(added)
    scores = dict(zip([path.name for path in new], kept["scores"][len(before["scores"]) :], strict=True))
    odd = describe_suspicious(before["scores"], scores)
    if odd and options.out is None:
        raise ValueError(f"{odd}: take them out, or if they are good, write another file, --out FILE")
    above = "" if model.threshold is None else sum(score > model.threshold for score in scores.values())
    called = "" if model.threshold is None else f", {above} of which it called faulty (above {model.threshold:.4g})"
    print(
        f"added {len(scores)} photo{'s' * (len(scores) != 1)} to {model.about['images']}{called}; the shrinkage stays"
    )
    if odd:
        print(odd)
    preparation: Any = added.net.head.training_set.preparation
    tell_threshold(Threshold(**preparation["threshold"]), "good photos that were left out")
    out = options.out or options.model
    added.save(out)
    print(f"wrote {out}")


def _kept(model: Any) -> dict[str, Any]:
    """Return what a model keeps so that photos can be added."""
    return dict[str, Any]((model.net.head.training_set.preparation or {}).get("good") or {})
