"""The commands that write an explanation as one file, and explain with it."""

import csv
import warnings
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.folders import tell_bad
from pytorch_grad_cam_pcasvm.cli.methods import layer_of, options_of
from pytorch_grad_cam_pcasvm.cli.networks import network
from pytorch_grad_cam_pcasvm.cli.preparation import steps_of, tell_whites

_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision reads
_TRIED = 4  # images
_OTHER = "the backbone's transform does more than resize, crop and normalise: use export.onnx from Python"


def export(options: Any) -> None:
    """Write an explanation as one file, and a page around it."""
    import numpy as np
    import torch
    from PIL import Image

    from pytorch_grad_cam_pcasvm import export
    from pytorch_grad_cam_pcasvm.data.images import Images
    from pytorch_grad_cam_pcasvm.export.web_page import MARK, runtime_files
    from pytorch_grad_cam_pcasvm.runtime.files import check_folder

    if options.page:
        runtime_files(options.runtime)  # before anything takes long
        check_folder(options.page, "page.css", MARK, "page")
    net, preparation = network(options)
    transform, steps = preparation.transform, preparation.steps or steps_of(preparation.transform)
    if steps is None:
        raise ValueError(_OTHER)
    method = getattr(package, options.method)
    layer = layer_of(options, net, preparation)
    cam = method(net, [layer], **options_of(options, [method], net, layer, preparation)[method])
    targets = None
    if options.components is not None:
        targets = [*(package.PCATarget(b) for b in range(options.components)), package.SVMTarget()]
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8))
    with warnings.catch_warnings():
        if options.images is None:
            warnings.simplefilter("ignore", package.OutsideTrainingWarning)
            x = torch.stack([transform(picture.rotate(90 * turn)) for turn in range(_TRIED)])
        else:
            x = _some(Images(preparation.folder(options.images), thumbnails=0), options.images)
        metadata = export.onnx(cam, x, options.out, targets, **steps, **preparation.whites)
    explainer = export.Explainer(options.out)
    if not np.allclose(explainer.prepared(picture), transform(picture), atol=1e-4):
        options.out.unlink()
        raise ValueError(_OTHER)
    print(f"wrote {options.out}: maps of {', '.join(metadata['titles'])}")
    print(f"differs from PyTorch by at most {max(metadata['differences'].values()):.0e} of the largest value")
    if options.page:
        print(f"open {export.page(options.out, options.page, options.runtime).resolve().as_uri()}")


def _some(images: Any, folder: Any) -> Any:
    """Return a few images of a folder that can be read."""
    import torch

    some: list[Any] = []
    for row in range(len(images)):
        some += images.read([row]).images.unbind()
        if len(some) == _TRIED:
            break
    if not some:
        raise ValueError(f"none of the {len(images)} images in {folder} can be read")
    return torch.stack(some)


def explain(options: Any) -> None:
    """Explain pictures with a file; torch is not imported."""
    from pytorch_grad_cam_pcasvm.export import Explainer
    from pytorch_grad_cam_pcasvm.export.explainer import UnreadableImageError

    folder, out = options.images, options.out
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise FileNotFoundError(f"there are no images in {folder}: {', '.join(_SUFFIXES)}")
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--out {out} is inside --images, and its maps would be explained next time: name another folder"
        )
    explainer = Explainer(options.model)
    tell_whites(explainer.about["input"].get("white_level"), paths)
    bad = []
    out.mkdir(parents=True, exist_ok=True)
    with (out / "values.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["image", "predicted", *explainer.about["titles"]])
        for path in paths:
            name = path.relative_to(folder)
            try:
                picture = explainer.read(path)
            except UnreadableImageError as error:
                if not options.skip_bad_images:
                    message = f"{name} cannot be read ({error.reason}): mend or delete it, or add --skip-bad-images"
                    raise OSError(message) from error
                bad.append(str(name))
                continue
            outputs = explainer(explainer.prepared(picture)[None])
            label = explainer.predicted(outputs)
            table.writerow([
                name.as_posix(),
                "" if label is None else label,
                *(f"{value:.9g}" for value in outputs["values"][0]),
            ])
            sheet = out / f"{name}.png"
            sheet.parent.mkdir(parents=True, exist_ok=True)
            explainer.sheet(picture, outputs).save(sheet)
    tell_bad(bad)
    print(f"wrote maps of {len(paths) - len(bad)} images and {out / 'values.csv'}")
