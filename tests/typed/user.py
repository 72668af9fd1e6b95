"""A user's script, whose types a type checker has to know: ``mypy --strict tests/typed/user.py``."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    Head,
    MethodResult,
    PCASVMNet,
    PCATarget,
    SignedMaps,
    SVMTarget,
    mean_activations,
    recombined,
)
from pytorch_grad_cam_pcasvm.targets import Target


def explain(backbone: nn.Module, fitted: object, images: Tensor) -> None:
    net = PCASVMNet(backbone, fitted, layer="avgpool").eval()
    assert_type(net.head, Head)
    assert_type(net.predict(images), np.ndarray)
    cam = ContributionCAM(net, ["layer4"], mean=mean_activations(net, [images], "layer4"))
    maps = cam.explain(images, [PCATarget(0), SVMTarget("cat", versus="dog")])
    assert_type(maps, SignedMaps)
    assert_type(maps.maps, Tensor)
    assert_type(maps.baseline_values, Tensor | None)
    assert_type(maps[0].positive(size=(224, 224)), Tensor)
    assert_type(recombined(maps, fitted, SVMTarget()), SignedMaps)
    assert_type(cam.jacobians(images).components, Tensor | None)
    assert_type(cam(images, targets=[PCATarget(0)]), np.ndarray)


def explain_pairs(cam: ClosedFormGradCAM, pair: tuple[Tensor, Tensor], named: Mapping[str, Tensor]) -> None:
    for inputs in (pair, named):
        maps = cam.explain(inputs)
        assert_type(maps, SignedMaps | list[SignedMaps])


class LargestComponent:
    """A target of one's own."""

    def __call__(self, output: Tensor) -> Tensor:
        return output.max()


def largest(row: Tensor) -> Tensor:
    return row.max()


def list_targets() -> list[Target]:
    return [LargestComponent(), largest, PCATarget(1, sign="-"), SVMTarget(at="max")]


def stack(results: list[MethodResult]) -> Tensor:
    return torch.stack([result.maps for result in results])
