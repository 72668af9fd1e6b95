"""The CNN of the paper: the frozen convolutions of a classifier, and four dense layers of its own."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from experiment.problems import RunError

ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}
FEATURE_LAYER = "classifier.4"  # the second dense layer, behind its activation


class PaperCNN(nn.Module):
    """Convolutions to T maps of M x N, then dense layers 40, 30, 20 and one unit per class.

    Args:
        features: the convolutional part; it is frozen.
        shape: of its output for one image, (T, M, N).
        classes: number of classes.
        activation: of the dense layers, ``relu`` or ``sigmoid``.
        sizes: of the dense layers before the last.
    """

    def __init__(
        self,
        features: nn.Module,
        shape: Sequence[int],
        classes: int,
        activation: str = "relu",
        sizes: Sequence[int] = (40, 30, 20),
    ) -> None:
        super().__init__()
        self.features = features.requires_grad_(False)
        widths = [int(torch.Size(shape).numel()), *sizes]
        dense: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise(widths):
            dense += [nn.Linear(before, after), ACTIVATIONS[activation]()]
        self.classifier = nn.Sequential(*dense, nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (N, C) of images (N, 3, H, W)."""
        return self.classifier(self.features(x))


def convolutions(name: str, weights: Path | None) -> nn.Module:
    """Return the convolutional part of one of torchvision's classifiers, trained on ImageNet.

    Args:
        name: as in ``torchvision.models``, e.g. ``vgg16``.
        weights: a file with its ``state_dict``; None: torchvision's own, which are downloaded once.

    Returns:
        The modules before the pooling and the classifier, in evaluation mode.

    Raises:
        RunError: there is no such network, it has no convolutional part, or its weights cannot be had.
    """
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise RunError(f"torchvision.models has no {name!r}: try vgg16, mobilenet_v2, resnet50 or efficientnet_b0")
    try:
        net = torchvision.models.get_model(name, weights="DEFAULT" if weights is None else None)
    except OSError as error:
        raise RunError(
            f"the ImageNet weights of {name} could not be downloaded ({error}): name a file of them with --weights"
        ) from error
    if weights is not None:
        net.load_state_dict(_state_dict(weights, name, net))
    if isinstance(getattr(net, "features", None), nn.Module):
        part = net.features
    else:
        part = nn.Sequential(OrderedDict(_until_pooling(net)))
    part = part.eval()
    try:
        with torch.no_grad():
            output = part(torch.zeros(2, 3, 96, 96))
        fits = output.dim() == 4 and output.shape[1] >= output.shape[3]
    except Exception:  # whatever a part says that was not made to be run alone
        fits = False
    if not fits:
        raise RunError(f"{name} has no convolutional part that gives feature maps (N, T, M, N): try vgg16 or resnet50")
    return part


def fused(convolutions: nn.Module) -> nn.Module:
    """Put batch norms into the convolutions before them, for speed alone, and return the network."""
    for part in [*convolutions.modules()]:
        if isinstance(part, nn.Sequential):
            for i in range(len(part) - 1):
                first, second = part[i], part[i + 1]
                if isinstance(first, nn.Conv2d) and isinstance(second, nn.BatchNorm2d):
                    part[i], part[i + 1] = fuse_conv_bn_eval(first, second), nn.Identity()
    return convolutions.eval().to(memory_format=torch.channels_last)


def _until_pooling(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children up to the pooling over whole maps or the classifier."""
    kept = []
    for name, child in net.named_children():
        if isinstance(child, nn.AdaptiveAvgPool2d | nn.Linear) or name in ("classifier", "fc", "head"):
            break
        if not name.lower().startswith("aux"):
            kept.append((name, child))
    return kept


def _state_dict(file: Path, name: str, net: nn.Module) -> dict[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        state = {key: value.float() if value.is_floating_point() else value for key, value in state.items()}
        expected = {key: value.shape for key, value in net.state_dict().items()}
        if {key: value.shape for key, value in state.items()} == expected:
            return state
        problem = "its tensors are not those of that network"
    except FileNotFoundError as error:
        raise RunError(f"there is no {file}: --weights must name a file with the state_dict of {name}") from error
    except Exception as error:  # torch.load raises whatever the bytes lead to
        problem = str(error).splitlines()[0]
    raise RunError(f"{file} holds no state_dict of torchvision's {name}: {problem}")
