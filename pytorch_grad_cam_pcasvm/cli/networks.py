"""Networks: a backbone by its name, with its transform, and the head behind it."""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pytorch_grad_cam_pcasvm as package

RUN = "python -m pytorch_grad_cam_pcasvm"


def network(options: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a backbone with its head, and the backbone's transform."""
    head = head_of(options.head)  # before weights are downloaded
    backbone, transform = backbone_of(options)
    return package.PCASVMNet(backbone, head, source(options), pool=pool(options)), transform


def source(options: Any) -> str:
    """Return the name of the layer that the features come from."""
    if options.layer == "auto" and not options.features:
        raise ValueError("--layer auto finds the layer of the maps: name that of the features with --features")
    return options.features or options.layer


def pool(options: Any) -> str | None:
    """Return how features are pooled."""
    return None if options.pool == "none" else options.pool


def head_of(path: Path) -> Any:
    """Return the head in a file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no head {path}: make one with '{RUN} fit', or net.head.save(path)")
    if path.suffix != ".skops":
        return package.Head.load(path)
    try:
        from skops import io
    except ImportError as error:
        raise ImportError("a head in a .skops file needs skops: pip install skops") from error
    return io.load(path)


def backbone_of(options: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a network in evaluation mode, and the transform that its weights were trained with."""
    library, _, name = options.backbone.rpartition(":")
    given = options.weights is not None
    if library == "timm":
        try:
            import timm
            from timm import data
        except ImportError as error:
            raise ImportError("timm:NAME needs timm: pip install timm") from error
        net = timm.create_model(name, pretrained=not given, num_classes=0)
        transform: Any = data.create_transform(**data.resolve_model_data_config(net))  # type: ignore[attr-defined]
    elif not library:
        import torchvision

        if name not in torchvision.models.list_models():
            near = get_close_matches(name, torchvision.models.list_models(), n=1)
            hint = f"did you mean {near[0]!r}? For" if near else "for"
            raise ValueError(f"torchvision has no backbone {name!r}; {hint} one from timm: --backbone timm:{name}")
        weights = torchvision.models.get_model_weights(name).DEFAULT
        try:
            net = torchvision.models.get_model(name, weights=None if given else weights)
        except OSError as error:
            raise OSError(f"the weights cannot be downloaded ({error}): give a file, --weights FILE") from error
        transform = weights.transforms()
    else:
        raise ValueError(f"--backbone must be a torchvision name, or timm:NAME, got {options.backbone!r}")
    if given:
        state = _state(Path(options.weights))
        try:
            net.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(
                f"{options.weights} has no weights of {name}: it begins with {next(iter(state), 'nothing')!r}, and "
                f"{next(iter(net.state_dict()))!r} is expected"
            ) from error
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return net.eval().to(device), transform


def _state(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no weights file {path}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)
