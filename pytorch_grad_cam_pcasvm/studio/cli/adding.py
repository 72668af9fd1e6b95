"""The command that adds good photos to a model."""

from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.studio.cli.arguments import AddOptions
from pytorch_grad_cam_pcasvm.studio.cli.models import choose_device
from pytorch_grad_cam_pcasvm.studio.cli.photos import tell_threshold
from pytorch_grad_cam_pcasvm.studio.data import list_photos
from pytorch_grad_cam_pcasvm.studio.data.copies import name_file
from pytorch_grad_cam_pcasvm.studio.model.choices import Threshold
from pytorch_grad_cam_pcasvm.studio.model.description import read_description


def add(options: AddOptions) -> None:
    """Add good photos to a model, and write it.

    Raises:
        ValueError: the model keeps no sums, or it was fitted on all of the photos.
    """
    description = read_description(options.model)
    typed = None if description is None else description.backbone.typed
    backbone = typed if typed in options.trust else None
    model = package.load_model(options.model, backbone, weights=options.weights, trusted=options.trust)
    model.net.to(choose_device(options.device))
    known = _kept(model).get("files", [])
    new = {name_file(path): path for path in list_photos(options.images)}
    photos = [path for name, path in new.items() if name not in known]
    if not photos:
        raise ValueError(f"the model was fitted on all photos in {options.images}: name a folder of others")
    if len(photos) < len(new):
        print(f"left out: {len(new) - len(photos)} photos that the model was fitted on")
    before = len(_kept(model).get("scores", []))
    added = package.add_photos(model, photos)
    kept = _kept(added)
    scores = kept["scores"][before:]
    preparation: Any = added.net.head.training_set.preparation
    if known:
        preparation["good"] = kept | {"files": [*known, *(name for name in new if name not in known)]}
    if model.threshold is not None:
        print(f"{sum(score > model.threshold for score in scores)} of {len(scores)} were above {model.threshold:.4g}")
    print(f"{len(scores)} photos added to {model.about['images']}; shrinkage {kept['shrinkage']:g} stays")
    tell_threshold(Threshold(**preparation["threshold"]), "good photos that were left out")
    out = options.out or options.model
    added.save(out)
    print(f"wrote {out}")


def _kept(model: Any) -> dict[str, Any]:
    """Return what a model keeps so that photos can be added."""
    return dict[str, Any]((model.net.head.training_set.preparation or {}).get("good") or {})
