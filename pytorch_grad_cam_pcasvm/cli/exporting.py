"""The command that writes an explanation as one file."""

import warnings
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.arguments import RUN
from pytorch_grad_cam_pcasvm.cli.methods import choose_layers, choose_options, choose_targets
from pytorch_grad_cam_pcasvm.cli.models import open_model
from pytorch_grad_cam_pcasvm.data.photo_files import name_classes
from pytorch_grad_cam_pcasvm.model.preparation import read_steps

_TRIED = 4  # images
_OTHER = "the backbone's transform does more than resize, crop and normalise: use export.onnx from Python"


def export(options: Any) -> None:
    """Write an explanation as one file, and a page around it."""
    if options.images is not None:
        name_classes(options.images)
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
    model = open_model(options)
    net, preparation = model.net, model.preparation
    if preparation.varies:
        raise ValueError(
            f"{options.model} was fitted with --tile, so that photos of different size have images of different size, "
            "and a file takes one: fit with --tiles, such as --tiles 3x2"
        )
    if net.head.enumerated is not None:
        name = net.head.enumerated.predictor.name
        raise ValueError(f"{name} runs outside of PyTorch, and is in no such file: draw its maps with '{RUN} explain'")
    transform, steps = preparation.transform, preparation.steps or read_steps(preparation.transform)
    if steps is None:
        raise ValueError(_OTHER)
    method = getattr(package, options.method)
    layers = choose_layers(options, model, [method])
    cam = method(net, layers, **choose_options(options, [method], model, layers)[method])
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8))
    with warnings.catch_warnings():
        if options.images is None:
            warnings.simplefilter("ignore", package.OutsideTrainingWarning)
            x = torch.stack([transform(picture.rotate(90 * turn)) for turn in range(_TRIED)])
        else:
            x = _some(Images(preparation.folder(options.images), thumbnails=0), options.images)
        metadata = export.onnx(
            cam, x, options.out, choose_targets(options, net), **steps, **preparation.reading, progress=True
        )
    explainer = export.Explainer(options.out)
    if not np.allclose(explainer.prepared(picture), transform(picture), atol=1e-4):
        options.out.unlink()
        raise ValueError(_OTHER)
    print(f"wrote {options.out}: maps of {_listed(metadata['titles'])}")
    print(f"differs from PyTorch by at most {max(metadata['differences'].values()):.0e} of the largest value")
    if options.page:
        print(f"open {export.page(options.out, options.page, options.runtime).resolve().as_uri()}")


def _listed(titles: list[str]) -> str:
    """Return the titles of maps as a list in words, components as one."""
    others = [title for title in titles if not title.startswith("component ")]
    count = len(titles) - len(others)
    components = [titles[0] if count == 1 else f"{count} components"] if count else []
    return ", ".join([*components, *others])


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
