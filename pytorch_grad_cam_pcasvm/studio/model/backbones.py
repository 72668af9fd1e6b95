"""Backbones: networks by their names, with their weights and the transform of these."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from warnings import catch_warnings, simplefilter

from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse
from pytorch_grad_cam_pcasvm.studio.model.description import FORMS, Origin, parse_origin


@dataclass(frozen=True)
class Backbone:
    """A network in evaluation mode.

    Attributes:
        net: the network.
        transform: the transform of its weights, or the user's own; None: not known.
        own: whether the transform is the user's.
        origin: where the network comes from.
    """

    net: Any
    transform: Callable[[Any], Any] | None
    own: bool
    origin: Origin


def make_backbone(
    origin: Origin | str, weights: str | Path | None = None, *, size: tuple[int, int] | None = None
) -> Backbone:
    """Return a network, in evaluation mode, on the CPU.

    Args:
        origin: where it comes from, with the exact name of the library's weights, or None for its usual ones; or that
            as it is typed, such as ``"resnet18"``, see :func:`.parse_origin`. A ``module:function`` is imported and
            called; it returns a network, or a pair of it and its transform.
        weights: a file with a state dict; None: the library's weights, which are downloaded.
        size: (H, W) of the images to come, for which positions of a network of timm are resampled; None: the origin's.

    Raises:
        ValueError: there is no such network, it does not take images of this size, or the file has the weights of
            another.
        OSError: the weights cannot be downloaded or read.
        ImportError: timm is needed, and not installed.
    """
    origin = parse_origin(origin) if isinstance(origin, str) else origin
    file = None if weights is None else Path(weights)
    state = None if file is None else _read_state(file)
    own = False
    size, made_for, exact = size or origin.size, None, None
    if origin.library == "function":
        net, transform, own = _make_own(origin.name, size)
    elif origin.library == "timm":
        net, transform, exact, made_for = _make_timm(origin.name, origin.weights, size, downloads=file is None)
        state = state if made_for is None else _resample(net, state)
    else:
        net, transform, exact = _make_torchvision(origin.name, origin.weights, downloads=file is None)
    if state is not None:
        _load_state(net, state, origin.name, file)
    name = origin.name
    if origin.library == "timm" and exact and exact.split(".")[0] != name.split(".")[0]:
        name = exact.split(".")[0]  # what was typed is an old name of it
    if size is not None and not own:  # a transform of the user's decides the size
        _refuse_size(net.eval(), name, size)
    own_origin = Origin(origin.library, name, exact, None if file is None else str(file.absolute()), made_for)
    return Backbone(net.eval(), transform, own, own_origin)


def check_backbone(typed: str, weights: str | Path | None = None) -> None:
    """Refuse a backbone that there is not, and weights of another, before the network is made.

    Args:
        typed: as for :func:`.parse_origin`.
        weights: a file with a state dict; None: the library's.

    Raises:
        ValueError: there is no such network, or the file has the weights of another.
        ImportError: timm is needed, and not installed.
    """
    import torch

    origin = parse_origin(typed)
    state = None if weights is None else _read_state(Path(weights))
    if origin.library == "function":
        module, _, name = origin.name.rpartition(":")
        _find_by_name(f"the backbone {origin.name}", module, name, FORMS)
        return
    if origin.library == "torchvision":
        _refuse_unknown(origin.name)
    if state is None:
        return
    try:
        with torch.device("meta"):  # its shapes, without its numbers
            made = _make_timm(origin.name, None, None, downloads=False) if origin.library == "timm" else (
                _make_torchvision(origin.name, None, downloads=False))  # fmt: skip
    except ImportError:
        raise
    except Exception:  # one that needs numbers is made before its weights are compared
        return
    _load_state(made[0], state if origin.library == "torchvision" else _resample(made[0], state), origin.name, weights)


def _load_state(net: Any, state: Any, name: str, file: Any) -> None:
    """Load a state dict into a network.

    Raises:
        ValueError: it is that of another; the message says by what.
    """
    try:
        with catch_warnings():
            simplefilter("ignore")  # of shapes without numbers, into which nothing is copied
            net.load_state_dict(state)
    except RuntimeError as error:
        expected = net.state_dict()
        shape = next((key for key in expected if key in state and expected[key].shape != state[key].shape), None)
        first, wanted = next(iter(state), "nothing"), next(iter(expected))
        extra = next((key for key in state if key not in expected), None)
        why = f"it begins with {first!r}, and {wanted!r} is expected"
        if first == wanted and shape is not None:
            sizes = ["x".join(map(str, one[shape].shape)) for one in (state, expected)]
            why = f"its {shape!r} is of {sizes[0]} numbers, and {sizes[1]} are expected"
        elif first == wanted:
            lacking = next((key for key in expected if key not in state), None)
            why = f"it has {extra!r}, which the network has not" if lacking is None else f"it lacks {lacking!r}"
        raise ValueError(f"{file} has no weights of {name}: {why}") from error


def _refuse_size(net: Any, name: str, size: tuple[int, int]) -> None:
    """Refuse images of a size that a network does not take, by running it once."""
    import torch

    convolutions = torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d
    channels = next((module.in_channels for module in net.modules() if isinstance(module, convolutions)), 3)
    like = next((p for p in net.parameters() if p.is_floating_point()), torch.zeros(()))
    try:
        with torch.no_grad():
            net(like.new_zeros(1, channels, *size))
    except Exception as error:  # whatever an assertion or a shape in it raises
        height, width = size
        reason = f": {str(error).splitlines()[0]}" if str(error) else ""
        refuse(
            ValueError,
            f"{name} does not take images of {width}x{height} pixels, as its positions are those of one size{reason}",
            "cut pictures into tiles of its own size, --tiles 3x2, or TiledNet(net, tiles=(3, 2)) in Python",
            "take a convolutional network, or one of timm whose positions are resampled, such as "
            "timm:vit_small_patch16_224",
        )


def _make_torchvision(name: str, exactly: str | None, *, downloads: bool) -> tuple[Any, Any, str | None]:
    """Return a network, the transform of its weights, and the name of these."""
    import torchvision

    _refuse_unknown(name)
    kinds: Any = torchvision.models.get_model_weights(name)
    if exactly is not None and exactly not in kinds.__members__:
        raise ValueError(f"this torchvision has no weights {exactly!r} of {name}, only {', '.join(kinds.__members__)}")
    weights = kinds.DEFAULT if exactly is None else kinds[exactly]
    try:
        net = torchvision.models.get_model(name, weights=weights if downloads else None)
    except OSError as error:
        way = Fix("give a file of them, weights=FILE", "weights")
        refuse(OSError, f"the weights of {name} cannot be downloaded ({error})", way)
    return net, weights.transforms(), weights.name if downloads else None


def _refuse_unknown(name: str) -> None:
    """Refuse a name that torchvision has not.

    Raises:
        ValueError: it is one.
    """
    import torchvision

    if name not in torchvision.models.list_models():
        near = get_close_matches(name, torchvision.models.list_models(), n=1)
        hint = f"did you mean {near[0]!r}? For" if near else "for"
        raise ValueError(
            f"torchvision has no backbone {name!r}; {hint} one from timm: 'timm:{name}', for your own: "
            "'module:function'"
        )


def _make_timm(
    name: str, exactly: str | None, size: tuple[int, int] | None, *, downloads: bool
) -> tuple[Any, Any, str | None, tuple[int, int] | None]:
    """Return a network without its classifier, the transform of its weights, their name, and the size it is made for.

    The size is None if it is the usual one, or the network takes any.

    Raises:
        ImportError: timm is not installed.
    """
    try:
        import timm
        from timm import data
    except ImportError as error:
        raise ImportError("timm:NAME needs timm: pip install timm") from error
    own = getattr(timm.get_pretrained_cfg(exactly or name, allow_unregistered=True), "input_size", None)
    made_for = None if own is None or size == tuple(own[1:]) else size
    make: Any = partial(timm.create_model, exactly or name, pretrained=downloads, num_classes=0)
    net: Any = None
    if made_for is not None:
        with suppress(TypeError, AssertionError, RuntimeError):  # it has no positions, or is refused by a trial
            net = make(img_size=made_for)
    if net is None:
        net, made_for = make(), None
    configuration = net.pretrained_cfg
    architecture, tag = configuration.get("architecture") or name, configuration.get("tag")
    exact = f"{architecture}.{tag}" if tag else architecture
    transform = data.create_transform(**data.resolve_model_data_config(net))  # type: ignore[attr-defined]
    return net, transform, exact if downloads else None, made_for


def _resample(net: Any, state: Any) -> Any:
    """Return the state dict of a network of timm for the size that it was made for, as timm reads its own files."""
    fit_to = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    return state if state is None or fit_to is None else fit_to(dict(state), net)


def _make_own(typed: str, size: tuple[int, int] | None) -> tuple[Any, Any, bool]:
    """Return the network of a user's function, its transform or ImageNet's, and whether that is the user's."""
    from torch import nn

    from pytorch_grad_cam_pcasvm.network.modules import find_network

    module, _, name = typed.rpartition(":")
    returned = call_by_name("the backbone", module, name, FORMS)
    net, *transform = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned,)
    if not isinstance(net, nn.Module) or not all(map(callable, transform)):
        type_name = type(returned).__name__ if not isinstance(returned, tuple) else f"tuple of {len(returned)}"
        raise TypeError(
            f"the backbone {module}:{name}: {name}() must return a torch.nn.Module, or a pair of it and its transform, "
            f"but returned a {type_name}"
        )
    net = find_network(net)
    if transform:
        return net, transform[0], True
    from torchvision.models import ResNet18_Weights

    pixels = "{1}x{0}".format(*size) if size is not None else "224"
    print(f"images are prepared as for ImageNet ({pixels} pixels): to change that, let {name}() return net, transform")
    return net, ResNet18_Weights.DEFAULT.transforms(), False


def call_by_name(subject: str, module: str, name: str, meant: str) -> Any:
    """Return the object that a function or class of the user's makes, without arguments.

    Args:
        subject: is named so, for messages.
        module: where it is, installed or in the current folder.
        name: its name there.
        meant: what can be named.

    Raises:
        ValueError: there is none of that name, or it fails.
    """
    subject = f"{subject} {module}:{name}"
    function = _find_by_name(subject, module, name, meant)
    try:
        return function()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{subject}: {name}(), which is called without arguments, failed: {reason}") from error


def _find_by_name(subject: str, module: str, name: str, meant: str) -> Any:
    """Return a function or class of the user's.

    Raises:
        ValueError: there is none of that name.
    """
    allow_own_modules()
    try:
        imported = import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{subject}: there is no module {error.name!r}, neither installed nor in {os.getcwd()}; {meant}"
            ) from error
        raise ValueError(f"{subject}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(imported, name, None)
    if not callable(function):
        near = get_close_matches(
            name, [attribute for attribute, value in vars(imported).items() if callable(value)], n=1
        )
        problem = f"has no function {name!r}" if function is None else f"has {name!r}, which is no function"
        hint = f"did you mean {near[0]!r}?" if near else meant
        raise ValueError(f"{subject}: {imported.__file__} {problem}; {hint}")
    return function


def allow_own_modules() -> None:
    """Let modules in the current folder be imported."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _read_state(path: Path) -> Any:
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
