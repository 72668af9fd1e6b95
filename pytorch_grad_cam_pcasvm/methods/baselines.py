"""Baselines: the activations that contributions start from, and that replace what is left out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.calculus.secants import Baseline
from pytorch_grad_cam_pcasvm.maps.result import Explained, joined
from pytorch_grad_cam_pcasvm.methods.boundary_path import Undecided
from pytorch_grad_cam_pcasvm.methods.explanation import Run
from pytorch_grad_cam_pcasvm.methods.method import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.channel_means import everywhere
from pytorch_grad_cam_pcasvm.network.features import ask_anew, check_loader, checked_images, output_of
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, image_and_label
from pytorch_grad_cam_pcasvm.network.modules import device_of, evaluating, layer_name, modules_of, network_of
from pytorch_grad_cam_pcasvm.network.net import HeadRun, PCASVMNet
from pytorch_grad_cam_pcasvm.network.token_layout import Layout
from pytorch_grad_cam_pcasvm.runtime.device_sync import is_traced, may_look
from pytorch_grad_cam_pcasvm.runtime.errors import BaselineWarning
from pytorch_grad_cam_pcasvm.targets import SVMTarget
from pytorch_grad_cam_pcasvm.targets.boundary_head import Boundary, grouped
from pytorch_grad_cam_pcasvm.targets.output_gradients import Seeds


@dataclass
class AtBaseline:
    """A run at its baseline.

    Attributes:
        path: the path's values at the baseline; None: its secants are its derivative.
        output: the network's output at the baseline, with N rows or one for all.
        start: the activations of the baseline, of one row or N, in the network's own layout.
        difference: activations minus those of the baseline.
        boundary: where each target starts, if not all start at the baseline, whose activations are the mean.
    """

    path: Baseline | None
    output: Any
    start: Tensor
    difference: Tensor
    boundary: Boundary | None = None


class WithBaseline(ClosedFormCAM):
    """A method with a baseline.

    Args:
        baseline: F0, where contributions start, or what replaces a channel or position that is left out. ``"neutral"``:
            where the target is undecided, so that a map adds up to the value itself: for a component, the mean of the
            training set; for a margin or a decision between classes, a point on the decision boundary near that mean,
            the same for all images. A regressor starts at the mean. ``"zero"``: no activation at all; ``"mean"``: the
            mean of the training set, whatever the target's value there. Or activations as the layer returns them, shape
            (T,), (T, H, W) or (N, T, H, W), for tokens (L, D) or (N, L, D); or an image of the same shape as the
            explained ones, which is run through the network. With ``attention="frozen"``, the baseline, and therefore
            ``baseline_values``, is evaluated with the image's own attention weights.
        mean: the mean of the training set at the target layer, from :func:`.mean_activations`, for ``"neutral"`` and
            ``"mean"``; for several target layers, a list of these. None: derived from the head, if the features are
            means over positions of the target layer (``"neutral"`` then always uses the head's mean), or if the command
            line's ``fit`` has stored the layer's means with it; otherwise ``"neutral"`` starts at zeros, with a
            warning. For images of another size, its mean over positions is used.

    Raises:
        TypeError: the baseline is neither one of these names nor a tensor, or the mean is not a tensor.
        ValueError: the baseline is another name, or the baseline or the mean has NaN or infinite values. When a map is
            computed: the baseline has the wrong shape, the mean is unknown, or there is no decision boundary within
            reach of it.
    """

    _predicted = SVMTarget()
    in_single = True
    replays = True

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module | str] | str,
        reshape_transform: Callable[[Tensor], Tensor] | str | None = None,
        *,
        baseline: str | Tensor = "zero",
        mean: Tensor | Sequence[Tensor] | None = None,
        jacobian: str = "closed_form",
        attention: str = "exact",
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(
            model, target_layers, reshape_transform, jacobian=jacobian, attention=attention, max_bytes=max_bytes
        )
        self.baseline, self.mean = baseline, mean
        self._boundary: Boundary | None = None
        self._undecided: dict[Any, Undecided] = {}

    @property
    def baseline(self) -> str | Tensor:
        """The baseline; may be reassigned."""
        return self._baseline

    @baseline.setter
    def baseline(self, given: str | Tensor) -> None:
        if isinstance(given, str) and given not in ("neutral", "zero", "mean"):
            raise ValueError(f"baseline must be 'neutral', 'zero', 'mean', activations or an image, got {given!r}")
        if not isinstance(given, str | Tensor):
            raise TypeError(f"baseline must be 'neutral', 'zero', 'mean' or a tensor, got {type(given).__name__}")
        if isinstance(given, Tensor) and not bool(given.isfinite().all()):
            raise ValueError("the baseline has NaN or infinite values")
        self._baseline = given

    @property
    def mean(self) -> Sequence[Tensor] | None:
        """The means of the training set, one for each target layer, or None; may be reassigned."""
        return self._means

    @mean.setter
    def mean(self, given: Tensor | Sequence[Tensor] | None) -> None:
        means = [given] if isinstance(given, Tensor) else given
        if not (means is None or (isinstance(means, list | tuple) and all(isinstance(one, Tensor) for one in means))):
            raise TypeError(f"mean must be a tensor from mean_activations, got {type(given).__name__}")
        if means is not None and not all(bool(one.isfinite().all()) for one in means):
            raise ValueError("the mean has NaN or infinite values")
        self._means = means

    def _explained(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        if not isinstance(self.baseline, str) or self.baseline != "neutral":
            return self._from_one(run, layer, targets)
        boundary = self._boundary_of(run, layer)
        if boundary is not None and self.moves:
            run.kept[layer] = self._at_mean(run, layer, boundary)
            return self._from_one(run, layer, targets)
        starts = self._starts(run, layer, targets, boundary)
        parts = [
            self._from_one(replace(run, kept={layer: self._at(run, layer, start)}, _last=None), layer, chosen)
            for start, chosen in ((start, [targets[k] for k in members]) for members, start in starts)
        ]
        return joined(parts, [k for members, _ in starts for k in members])

    def _from_one(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        """Return the maps of K targets that share a baseline."""
        return super()._explained(run, layer, targets)

    def _seeds(self, run: Run, layer: int, targets: Sequence[Any], until: int = 0) -> Seeds:
        """Return the secants of K targets from the baseline, or from each one's own."""
        at = self._at_baseline(run, layer)
        if at.boundary is None:
            return run.seeds(targets, at.output, until)
        return at.boundary.seeds(run.output, targets, run.dtype, until)

    def _is_neutral(self, run: Run) -> bool:
        """Return whether each target starts on its boundary, and components are affine in the features."""
        at, head = run.kept.get(0), run.output.head if isinstance(run.output, HeadRun) else None
        if head is None or at is None or at.boundary is None or len(run.layers) > 1 or head.component_position is None:
            return False
        return self._shares_start(run, 0)

    def _shares_start(self, run: Run, layer: int) -> bool:
        """Return whether all start at one baseline, or components are affine, so that their secants are the same."""
        at, head = run.kept.get(layer), run.output.head
        if at is None or at.boundary is None:
            return True
        return all(stage.linear for stage in head.stages[: head.component_position or 0])

    def _at_baseline(self, run: Run, layer: int) -> AtBaseline:
        """Run the path from the baseline, once for all chunks of targets."""
        if layer not in run.kept:
            run.activations(layer)  # refuses those that no map can be made of
            run.kept[layer] = self._at(run, layer, self._start(run, layer))
        return run.kept[layer]

    def _at(self, run: Run, layer: int, start: Tensor) -> AtBaseline:
        """Run the path from activations."""
        return self._from(run, {layer: start})[layer]

    def _from(self, run: Run, starts: Mapping[int, Tensor]) -> dict[int, AtBaseline]:
        """Run the path from activations of one layer, or of one in each branch."""
        path = run.passed.baseline(starts)
        output, now = run.output_of(path.output), run.passed.activations
        return {layer: AtBaseline(path, output, start, now[layer] - start) for layer, start in starts.items()}

    def _difference(self, run: Run, layer: int) -> Tensor:
        """Return activations minus those of the baseline, in the shape of maps; the network is checked there."""
        return run.activations(layer) - run.shaped(self._at_baseline(run, layer).start, layer)

    # Whether maps are moved to another baseline by the same at all positions, where features are means over these.
    moves = False

    def _boundary_of(self, run: Run, layer: int) -> Boundary | None:
        """Return the boundary of targets among features that are means over positions; None for other features."""
        head = run.output.head if isinstance(run.output, HeadRun) else None
        mean = None if head is None else head.feature_mean
        if head is None or mean is None or run.transforms[layer] is not None or not run.passed.averages(layer):
            return None
        if self._boundary is None or not self._boundary.holds_for(head, mean):
            self._boundary = Boundary(head, mean)
        return self._boundary

    def _at_mean(self, run: Run, layer: int, boundary: Boundary) -> AtBaseline:
        """Return the run at the training mean, from where each target's maps are moved to its own baseline."""
        activations = run.activations(layer)
        start = _everywhere(boundary.start.features, activations)
        return AtBaseline(None, boundary.start, start, activations - start, boundary)

    def _starts(
        self, run: Run, layer: int, targets: Sequence[Any], boundary: Boundary | None
    ) -> list[tuple[list[int], Tensor]]:
        """Return the baselines of K targets, activations of one row or N, and the numbers of those that share them."""
        run.activations(layer)  # refuses those that no map can be made of
        like, head = run.passed.activations[layer], run.output.head if isinstance(run.output, HeadRun) else None
        mean = self._mean(run, layer) if boundary is None else None
        if boundary is None and mean is None:
            if head is not None:
                self._doubts.tell(
                    BaselineWarning,
                    f"the training set's mean at {run.layers[layer]!r} is unknown, so maps start at zero activations, "
                    "and add up to the value minus that at zeros (baseline_values): pass mean=mean_activations(net, "
                    f"loader, {_needed(run)}), or baseline='zero' if that is meant",
                )
            return [(list(range(len(targets))), torch.zeros_like(like[:1]))]
        if mean is not None and isinstance(run.images, Inputs):  # where a value is 0 depends on the other inputs
            return [(list(range(len(targets))), mean)]
        if mean is not None:
            return self._starts_near(run, layer, targets, mean)
        assert boundary is not None
        starts = []
        for members, names, which in grouped(targets, head, run.output):
            rows = torch.cat([_everywhere(boundary.point(name).unsqueeze(0), like) for name in names])
            starts.append((members, rows if which is None else rows[which]))
        return starts

    def _starts_near(
        self, run: Run, layer: int, targets: Sequence[Any], mean: Tensor
    ) -> list[tuple[list[int], Tensor]]:
        """Return the baselines of K targets among the activations near their mean, as :meth:`_starts` does."""
        head = run.output.head if isinstance(run.output, HeadRun) else None
        single = run if is_traced() else self._of_single(run)
        near = self._near(run.layers[layer], mean)
        together = near.of_components(single, layer)
        run.components_apart |= together is None
        starts = []
        for members, names, which in grouped(targets, head, run.output, apart=together is None):
            points = []
            for name in names:
                if name is None and together is None:
                    self._doubts.tell(
                        BaselineWarning,
                        f"no activations of {run.layers[layer]!r} near the training set's mean make all components 0, "
                        f"so maps of {', '.join(dict.fromkeys(repr(targets[k]) for k in members))} start at this mean",
                    )
                points.append(
                    near.at(single, layer, name) if name is not None else mean if together is None else together
                )
            rows = torch.cat(points)
            starts.append((members, rows if which is None else rows[which]))
        return starts

    def _near(self, layer: str, mean: Tensor) -> Undecided:
        """Return where targets are undecided near a mean at a layer; what is kept holds for this mean alone."""
        key = layer, mean.shape, mean.dtype, mean.device
        known = key in self._undecided and (
            is_traced() or (may_look(mean) and torch.equal(self._undecided[key].mean, mean))
        )
        if not known:
            self._undecided[key] = Undecided(mean)
        return self._undecided[key]

    def _of_single(self, run: Run) -> Run:
        """Return the run of one black image: what follows is the same for all, but for what bypasses the layer."""
        black = torch.zeros_like(run.images[:1])
        passed = self._path(self._layers(self.model, black), modules_of(self.model)).run(black)
        return Run(self.model, black, passed, run.output_of(passed.output), run.layers, run.transforms)

    def _start(self, run: Run, layer: int) -> Tensor:
        """Return the baseline as activations of the target layer, as the network has them, of one row or N."""
        activations, given = run.passed.activations[layer], self.baseline
        if isinstance(given, str):
            start = torch.zeros_like(activations[:1]) if given == "zero" else self._mean(run, layer)
            if start is None:
                raise ValueError(
                    "baseline='mean' needs the training set's mean at the target layer, which the head knows only if "
                    "the features are means over the positions of this layer, without a norm in between or a "
                    "reshape_transform, and it starts with a StandardScaler or PCA: pass "
                    f"mean=mean_activations(net, loader, {_needed(run)})"
                )
            return start
        shape, image = activations.shape, run.images.shape
        if given.shape not in (image, image[1:], (1, *image[1:])):
            return self._as_activations(given, run, layer)
        images = given.to(activations.device).reshape(-1, *image[1:]).to(run.images.dtype)
        start = output_of(_backbone(run.model), run.layers[layer], images)
        if given.shape in (shape, shape[1:], (1, *shape[1:])) and not torch.equal(
            start.flatten(), given.to(start).flatten()
        ):
            raise ValueError(
                f"a baseline of shape {tuple(given.shape)} could be an image or activations, which have the same "
                "shape here; give activations with one number per channel, (T,), or choose another layer"
            )
        return start

    def _as_activations(self, given: Tensor, run: Run, layer: int) -> Tensor:
        """Return given activations as the network has them, of one row or N."""
        activations = run.passed.activations[layer]
        shape, image = activations.shape, run.images.shape
        if given.dim() == 1 and run.transforms[layer] is None and len(given) == shape[1]:
            given = given.reshape(-1, *[1] * (activations.dim() - 2)).expand(shape[1:])
        if given.shape not in (shape, shape[1:], (1, *shape[1:])):
            raise ValueError(
                f"the baseline has shape {tuple(given.shape)}: expected activations, ({shape[1]},), {tuple(shape[1:])} "
                f"or {tuple(shape)}, or an image, {tuple(image[1:])}"
            )
        return given.reshape(-1, *shape[1:]).to(activations)

    def _mean(self, run: Run, layer: int) -> Tensor | None:
        """Return the mean of the training set, of one row; None if it is not known."""
        if self.mean is not None:
            if len(self.mean) != len(run.layers):
                raise ValueError(f"give one mean for each of the {len(run.layers)} target layers, got {len(self.mean)}")
            mean, size = self.mean[layer], run.passed.activations[layer].shape
            if run.transforms[layer] is None and mean.dim() == len(size) - 1 and mean.shape[1:] != size[2:]:
                mean = mean.flatten(1).mean(1)  # images of another size
            return self._as_activations(mean, run, layer)
        head = run.output.head if isinstance(run.output, HeadRun) else None
        if head is None:
            return None
        transform, activations = run.transforms[layer], run.passed.activations[layer]
        if head.feature_mean is not None and transform is None:
            # Numbers alone would tell another start for every batch.
            numbers = isinstance(self.baseline, str) and self.baseline == "mean"
            if run.passed.averages(layer) or (numbers and self._are_means(run, layer)):
                return _everywhere(head.feature_mean.unsqueeze(0), activations)
        means = head.training_set.means.get(run.layers[layer])
        if means is None or not (transform is None or isinstance(transform, Layout)):
            return None
        return everywhere(means, transform, activations)

    def _are_means(self, run: Run, layer: int) -> bool:
        """Return whether the features are means of these activations, as where a norm in between changes nothing."""
        features, activations = run.output.features, run.passed.activations[layer]
        means = activations.flatten(2).to(features.dtype).mean(-1)
        if features.shape != means.shape or not may_look(features):
            return False
        return torch.allclose(features, means, rtol=1e-3, atol=1e-3 * float(means.abs().max()))


def _needed(run: Run) -> str:
    """Return the layers whose means are needed, as they are written."""
    return repr(list(run.layers) if len(run.layers) > 1 else run.layers[0])


def _everywhere(means: Tensor, like: Tensor) -> Tensor:
    """Return activations (R, T, ...) with the means of channels (R, T) at all positions."""
    return means.to(like).reshape(*means.shape, *[1] * (like.dim() - 2)).expand(-1, -1, *like.shape[2:])


@overload
def mean_activations(
    net: nn.Module, loader: Iterable[Any], layer: nn.Module | str, *, progress: bool = True
) -> Tensor: ...


@overload
def mean_activations(
    net: nn.Module, loader: Iterable[Any], layer: list[nn.Module | str], *, progress: bool = True
) -> list[Tensor]: ...


def mean_activations(
    net: nn.Module, loader: Iterable[Any], layer: Any, *, progress: bool = True
) -> Tensor | list[Tensor]:
    """Return the mean activations of a layer over a data set, for use as a baseline.

    Args:
        net: a :class:`PCASVMNet` or a backbone.
        loader: yields ``(images, ...)`` batches, dicts with ``image`` as in MONAI, or images alone, of shape (N, ...),
            all of the same size.
        layer: the layer, or its dotted name; or a list of these, in which case the loader is read once for each.
        progress: show a progress bar.

    Returns:
        The mean, in the shape of the layer's output for one image: (T, H, W), or (L, D) for tokens; float32 or better,
        on the network's device. For a list of layers, a list of means.

    Raises:
        TypeError: the loader or the layer yields something other than floating-point tensors; or the network is no
            module, or a program made by ``torch.jit`` or ``torch.export``.
        ValueError: the loader is empty, its images differ in size, a dict has no image, the first dimension of the
            layer's output is not the images, or the network has no such layer, or runs it more than once.

    Example:
        >>> mean = mean_activations(net, loader, "layer2", progress=False)
        >>> maps = ContributionCAM(net, ["layer2"], baseline=mean).explain(images)
    """
    if isinstance(layer, list | tuple):
        return [mean_activations(net, loader, one, progress=progress) for one in layer]
    check_loader(loader)
    backbone = _backbone(net)
    name = layer_name(backbone, layer)
    total: Tensor | None = None
    count = 0
    ask_anew(backbone)
    with evaluating(net), torch.no_grad():
        for batch in tqdm(loader, desc="mean activations", unit="batch") if progress else loader:
            images = checked_images(image_and_label(batch)[0], backbone)
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
    return net.feature_source()[0] if isinstance(net, PCASVMNet) else network_of(net)
