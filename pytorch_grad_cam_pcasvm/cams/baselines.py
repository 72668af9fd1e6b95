"""Baselines: the activations that contributions start from, and that replace what is left out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.autodiff import Baseline
from pytorch_grad_cam_pcasvm.cams.base import ClosedFormCAM
from pytorch_grad_cam_pcasvm.cams.context import Run
from pytorch_grad_cam_pcasvm.data import image_and_label
from pytorch_grad_cam_pcasvm.model.features import checked_images, flatten, output_of
from pytorch_grad_cam_pcasvm.model.modules import device_of, evaluating, layer_name, uncompiled
from pytorch_grad_cam_pcasvm.model.net import HeadRun, PCASVMNet
from pytorch_grad_cam_pcasvm.targets import SVMTarget


@dataclass
class AtBaseline:
    """A run at its baseline.

    Attributes:
        path: the path's values at the baseline.
        output: the network's output at the baseline, with N rows.
        difference: activations minus those of the baseline, in the network's own layout.
    """

    path: Baseline
    output: Any
    difference: Tensor


class WithBaseline(ClosedFormCAM):
    """A method with a baseline.

    Args:
        baseline: F0, where contributions start, or what replaces a channel or position that is left out. ``"zero"``:
            no activation at all; ``"mean"``: the mean of the training set, which the head knows if the features are
            means over positions (the maps of a component then sum to its value, and red means positive); activations
            as the layer returns them, shape (T,), (T, H, W) or (N, T, H, W), for tokens (L, D) or (N, L, D), for
            example from :func:`.mean_activations`; or an image of the same shape as the explained ones, which is run
            through the network. With ``attention="frozen"`` the baseline, and so ``baseline_values``, is evaluated
            with the image's own attention weights.

    Raises:
        TypeError: the baseline is neither one of these names nor a tensor.
        ValueError: the baseline is another name, or has NaN or infinite values; on computing a map: it has another
            shape, or the mean is not known.
    """

    _predicted = SVMTarget()
    in_single = True
    replays = True

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module | str],
        reshape_transform: Callable[[Tensor], Tensor] | str | None = None,
        *,
        baseline: str | Tensor = "zero",
        jacobian: str = "closed_form",
        attention: str = "exact",
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(
            model, target_layers, reshape_transform, jacobian=jacobian, attention=attention, max_bytes=max_bytes
        )
        self.baseline = baseline

    @property
    def baseline(self) -> str | Tensor:
        """The baseline; may be reassigned."""
        return self._baseline

    @baseline.setter
    def baseline(self, given: str | Tensor) -> None:
        if isinstance(given, str) and given not in ("zero", "mean"):
            raise ValueError(f"baseline must be 'zero', 'mean', activations or an image, got {given!r}")
        if not isinstance(given, str | Tensor):
            raise TypeError(f"baseline must be 'zero', 'mean' or a tensor, got {type(given).__name__}")
        if isinstance(given, Tensor) and not bool(given.isfinite().all()):
            raise ValueError("the baseline has NaN or infinite values")
        self._baseline = given
        # What the network does there has to be looked at anew.
        self._checked -= {kind for kind in self._checked if kind[0] in ("baseline", "secant")}

    def _difference(self, run: Run, layer: int) -> Tensor:
        """Return activations minus those of the baseline, in the shape of maps; the network is checked there."""
        start = self._start(run, layer)
        run.passed.baseline(start, layer)
        return run.activations(layer) - run.shaped(start, layer)

    def _at_baseline(self, run: Run, layer: int) -> AtBaseline:
        """Run the path from the baseline, once for all chunks of targets."""
        if layer not in run.kept:
            run.activations(layer)  # refuses those that no map can be made of
            start = self._start(run, layer)
            path = run.passed.baseline(start, layer)
            run.kept[layer] = AtBaseline(path, run.output_of(path.output), run.passed.activations[layer] - start)
        return run.kept[layer]

    def _output_at_baseline(self, run: Run, layer: int) -> Any:
        """Return the network's output at the baseline."""
        return self._at_baseline(run, layer).output

    def _start(self, run: Run, layer: int) -> Tensor:
        """Return the baseline as activations of the target layer, as the network has them, of one row or N."""
        activations, given = run.passed.activations[layer], self.baseline
        if isinstance(given, str):
            zeros = torch.zeros_like(activations[:1])
            return zeros if given == "zero" else _mean(run, layer, zeros)
        given = given.to(activations.device)
        shape, image = activations.shape, run.images.shape
        as_image = given.shape in (image, image[1:], (1, *image[1:]))
        of_channels = given.dim() == 1 and run.transforms[layer] is None and len(given) == shape[1]
        as_activations = of_channels or given.shape in (shape, shape[1:], (1, *shape[1:]))
        if as_image:
            images = given.reshape(-1, *image[1:]).to(run.images.dtype)
            start = output_of(_backbone(run.model), run.layers[layer], images)
            if as_activations and not torch.equal(start.flatten(), given.to(start).flatten()):
                raise ValueError(
                    f"a baseline of shape {tuple(given.shape)} could be an image or activations, which have the same "
                    "shape here; give activations with one number per channel, (T,), or choose another layer"
                )
            return start
        if not as_activations:
            raise ValueError(
                f"the baseline has shape {tuple(given.shape)}: expected activations, ({shape[1]},), {tuple(shape[1:])} "
                f"or {tuple(shape)}, or an image, {tuple(image[1:])}"
            )
        if of_channels:
            given = given.reshape(-1, *[1] * (activations.dim() - 2)).expand(shape[1:])
        return given.reshape(-1, *shape[1:]).to(activations.dtype)


def mean_activations(net: nn.Module, loader: Iterable[Any], layer: nn.Module | str, *, progress: bool = True) -> Tensor:
    """Return the mean activations of a layer over a data set, as a baseline.

    Args:
        net: a :class:`PCASVMNet` or a backbone.
        loader: yields ``(images, ...)`` batches, dicts with ``image`` as in MONAI, or images alone, of shape (N, ...),
            all of the same size.
        layer: the layer, or its dotted name.
        progress: show a progress bar.

    Returns:
        The mean, in the shape of the layer's output for one image: (T, H, W), or (L, D) for tokens; float32 or
        better, on the network's device.

    Raises:
        TypeError: the loader or the layer yields something other than floating-point tensors.
        ValueError: the loader is empty, its images differ in size, a dict has no image, the first dimension of the
            layer's output does not count images, or the network has no such layer.

    Example:
        >>> mean = mean_activations(net, loader, "layer2", progress=False)
        >>> maps = ContributionCAM(net, ["layer2"], baseline=mean).explain(images)
    """
    backbone = _backbone(net)
    name = layer_name(backbone, layer)
    total: Tensor | None = None
    count = 0
    with evaluating(net), torch.no_grad():
        for batch in tqdm(loader, desc="mean activations", unit="batch") if progress else loader:
            images = checked_images(image_and_label(batch)[0])
            activations = output_of(backbone, name, images.to(device_of(net)))
            if not isinstance(activations, Tensor):
                raise TypeError(
                    f"the layer {name!r} returns a {type(activations).__name__}, not a tensor: name another"
                )
            if total is None and not _counts_images(backbone, name, activations, images.to(device_of(net))):
                raise ValueError(
                    f"the first dimension of the output of {name!r}, {tuple(activations.shape)}, does not count images "
                    "(perhaps tokens): choose a layer where it does, or baseline='zero'"
                )
            if total is not None and total.shape != activations.shape[1:]:
                raise ValueError(
                    f"activations of shapes {tuple(total.shape)} and {tuple(activations.shape[1:])} cannot be "
                    "averaged: resize the images to one size"
                )
            total = activations.sum(0, dtype=torch.float64) + (0 if total is None else total)
            count += len(images)
    if total is None:
        raise ValueError("the loader yielded no batch: there is nothing to average")
    return (total / count).to(torch.promote_types(activations.dtype, torch.float32))


def _counts_images(backbone: nn.Module, name: str | None, activations: Tensor, images: Tensor) -> bool:
    """Return whether the first dimension of a layer's output counts the images."""
    if activations.dim() > 1 and len(activations) == activations.shape[1] == len(images) > 1:
        return len(output_of(backbone, name, images[:1])) == 1
    return len(activations) == len(images)


def _backbone(net: nn.Module) -> nn.Module:
    return net.feature_source()[0] if isinstance(net, PCASVMNet) else uncompiled(net)


def _mean(run: Run, layer: int, zeros: Tensor) -> Tensor:
    """Return the mean activations of the training set where the head knows them: features are means over positions."""
    mean = run.output.head.feature_mean if isinstance(run.output, HeadRun) else None
    if mean is not None and len(mean) == zeros.shape[1]:
        features = flatten(run.passed.output).to(mean)
        means = run.passed.activations[layer].flatten(2).to(mean.dtype).mean(-1)
        if features.shape == means.shape and torch.allclose(
            features, means, rtol=1e-3, atol=1e-3 * float(means.abs().max())
        ):
            return mean.to(zeros).reshape(1, -1, *[1] * (zeros.dim() - 2)).expand_as(zeros)
    raise ValueError(
        "baseline='mean' needs the training set's mean at the target layer, which the head knows only if the features "
        "are means over the positions of this layer, without a norm in between or a reshape_transform, and it starts "
        "with a StandardScaler or PCA: pass "
        f"baseline=mean_activations(net, loader, {run.layers[layer]!r})"
    )
