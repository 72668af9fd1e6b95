"""Networks: a backbone by its name, with its transform, and the head behind it."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.preparation import Preparation, preparation_of

RUN = "python -m pytorch_grad_cam_pcasvm"
_FORMS = "a backbone is a torchvision name, timm:NAME, or module:function for a network of your own"


def network(options: Any) -> tuple[Any, Preparation]:
    """Return a backbone with its head, and the preparation of pictures that the head was fitted with.

    Raises:
        ValueError: there is no such backbone, or none of the layers named.
    """
    head = head_of(options.head, options.trust)  # before weights are downloaded
    if isinstance(head, package.Head):  # and not of skops, which says nothing
        as_fitted(options, head.training_set.preparation or {})
    backbone, transform, own = backbone_of(options)
    _check_layers(backbone, options.layer)
    net = package.PCASVMNet(backbone, head, source(options), pool=pool(options))
    return net, preparation_of(transform, own, options, net.head.training_set.preparation)


def _check_layers(backbone: Any, layers: Sequence[str]) -> None:
    """Refuse names of layers that there are not, before anything else takes long."""
    from pytorch_grad_cam_pcasvm.network.features import FeatureSource
    from pytorch_grad_cam_pcasvm.network.modules import network_of

    for layer in layers if layers != ["auto"] else ():
        FeatureSource.of(network_of(backbone), layer)


def as_fitted(options: Any, recorded: Mapping[str, Any]) -> None:
    """Take the layers of the features, and their pool, from what a head says.

    Raises:
        ValueError: other ones were typed.
    """
    for name in ("features", "pool"):
        typed, of_head = getattr(options, name), recorded.get(name)
        if typed is not None and of_head not in (None, typed):
            words = [" ".join(value) if isinstance(value, list) else value for value in (typed, of_head)]
            raise ValueError(
                f"--{name} {words[0]}, but the head was fitted with {words[1]}: leave it out, or fit again"
            )
        setattr(options, name, typed if of_head is None else of_head)


def source(options: Any) -> str | list[str]:
    """Return the name of the layer that the features come from, or the names of several."""
    layers = [options.layer] if isinstance(options.layer, str) else options.layer
    if layers == ["auto"] and not options.features:
        raise ValueError("--layer auto finds the layer of the maps: name that of the features with --features")
    if len(layers) > 1 and not options.features:
        raise ValueError("--layer names several layers of the maps: name that of the features with --features")
    names = options.features or layers
    return names[0] if len(names) == 1 else names


def pool(options: Any) -> str | tuple[str, int] | None:
    """Return how features are pooled.

    Raises:
        ValueError: the size of a neighbourhood is no number.
    """
    text = options.pool or "mean"
    name, _, size = text.partition(":")
    if name == "dense" and size:
        if not size.isdigit():
            raise ValueError(f"--pool {text}: a neighbourhood has an odd size, as in dense:3")
        return name, int(size)
    return None if text == "none" else text


def head_of(path: Path, trusted: Sequence[str] = ()) -> Any:
    """Return the head in a file, which may have estimators of trusted types."""
    from pytorch_grad_cam_pcasvm.head.storage import from_skops

    _with_own_modules()
    if not path.is_file():
        raise FileNotFoundError(f"there is no head {path}: make one with '{RUN} fit', or net.head.save(path)")
    return from_skops(path.read_bytes(), trusted) if path.suffix == ".skops" else package.Head.load(path, trusted)


def backbone_of(options: Any) -> tuple[Any, Callable[[Any], Any], bool]:
    """Return a network in evaluation mode, the transform of its weights, and whether that is the user's own."""
    library, _, name = options.backbone.rpartition(":")
    has_weights = options.weights is not None
    transform: Any
    own = False
    if library == "timm":
        try:
            import timm
            from timm import data
        except ImportError as error:
            raise ImportError("timm:NAME needs timm: pip install timm") from error
        net = timm.create_model(name, pretrained=not has_weights, num_classes=0)
        transform = data.create_transform(**data.resolve_model_data_config(net))  # type: ignore[attr-defined]
    elif not library:
        import torchvision

        if name not in torchvision.models.list_models():
            near = get_close_matches(name, torchvision.models.list_models(), n=1)
            hint = f"did you mean {near[0]!r}? For" if near else "for"
            raise ValueError(
                f"torchvision has no backbone {name!r}; {hint} one from timm: --backbone timm:{name}, for your own: "
                "--backbone module:function"
            )
        weights = torchvision.models.get_model_weights(name).DEFAULT
        try:
            net = torchvision.models.get_model(name, weights=None if has_weights else weights)
        except OSError as error:
            raise OSError(f"the weights cannot be downloaded ({error}): give a file, --weights FILE") from error
        transform = weights.transforms()
    elif library == "torchvision":
        raise ValueError(
            f"--backbone {options.backbone}: torchvision's own have no prefix, --backbone {name}; {_FORMS}"
        )
    else:
        net, transform, own = _own(library, name)
    if has_weights:
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
    return net.eval().to(device), transform, own


def _own(module: str, name: str) -> tuple[Any, Any, bool]:
    """Return the network that a function of the user's makes, and the transform that comes with it, or ImageNet's."""
    from torch import nn

    from pytorch_grad_cam_pcasvm.network.modules import network_of

    option = f"--backbone {module}:{name}"
    returned = made_by("--backbone", module, name, _FORMS)
    net, *transform = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned,)
    if not isinstance(net, nn.Module) or not all(map(callable, transform)):
        type_name = type(returned).__name__ if not isinstance(returned, tuple) else f"tuple of {len(returned)}"
        raise TypeError(
            f"{option}: {name}() must return a torch.nn.Module, or a pair of it and its transform, but returned "
            f"a {type_name}"
        )
    network_of(net)
    if transform:
        return net, transform[0], True
    from torchvision.models import ResNet18_Weights

    print(f"images are prepared as for ImageNet (224 pixels): to change that, let {name}() return net, transform")
    return net, ResNet18_Weights.DEFAULT.transforms(), False


def made_by(option: str, module: str, name: str, meant: str) -> Any:
    """Return what a function or class of the user's makes, without arguments.

    Args:
        option: in which it was named.
        module: where it is, installed or in the current folder.
        name: its name there.
        meant: what the option takes.

    Raises:
        ValueError: there is none of that name, or it fails.
    """
    option = f"{option} {module}:{name}"
    _with_own_modules()
    try:
        imported = import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{option}: there is no module {error.name!r}, neither installed nor in {os.getcwd()}; {meant}"
            ) from error
        raise ValueError(f"{option}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(imported, name, None)
    if not callable(function):
        near = get_close_matches(
            name, [attribute for attribute, value in vars(imported).items() if callable(value)], n=1
        )
        problem = f"has no function {name!r}" if function is None else f"has {name!r}, which is no function"
        hint = f"did you mean {near[0]!r}?" if near else meant
        raise ValueError(f"{option}: {imported.__file__} {problem}; {hint}")
    try:
        return function()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{option}: {name}(), which is called without arguments, failed: {reason}") from error


def _with_own_modules() -> None:
    """Let modules in the current folder be imported."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _state(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no weights file {path}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # Torch advises weights_only=False, which is not for a command that may read anyone's file.
    except Exception as error:
        if "TorchScript" in str(error):
            raise ValueError(
                f"{path} is a TorchScript archive: write its weights to another file, torch.save("
                f"torch.jit.load({str(path)!r}).state_dict(), 'weights.pth')"
            ) from error
        if not isinstance(error, UnpicklingError):
            raise ValueError(f"{path} is no file of torch.save, or is damaged: write it again") from error
        state = error
    if not isinstance(state, Mapping):
        raise ValueError(
            f"{path} has no state dict: write it with torch.save(net.state_dict(), {path.name!r}), if you trust the "
            f"file with net = torch.load({str(path)!r}, weights_only=False), or joblib.load for one of joblib's"
        )
    return state
