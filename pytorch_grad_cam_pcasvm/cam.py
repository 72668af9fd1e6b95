"""ClosedFormGradCAM: the host's GradCAM, from one forward pass and closed-form Jacobians."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.image import scale_cam_image
from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.errors import AutogradFallbackWarning, NoClosedFormError
from pytorch_grad_cam_pcasvm.features import all_finite, checked_images
from pytorch_grad_cam_pcasvm.head.stages import full_precision
from pytorch_grad_cam_pcasvm.maps import Jacobians, SignedMaps, divided, largest, signed_maps, upsampled, warn_of_blanks
from pytorch_grad_cam_pcasvm.modules import device_of, evaluating, layer_name, modules_of, uncompiled
from pytorch_grad_cam_pcasvm.net import HeadOutput, PCASVMNet
from pytorch_grad_cam_pcasvm.path import AutogradPath, Pass, Path
from pytorch_grad_cam_pcasvm.targets import (
    PCATarget,
    PredictedScore,
    ScoreTarget,
    SVMTarget,
    Target,
    feature_gradients,
    feature_gradients_per_image,
)


class ClosedFormGradCAM(GradCAM):
    """Grad-CAM through PCA and SVM, for a whole batch, from one forward pass and no backward pass.

    ``cam(input_tensor, targets)`` is the host's call; :meth:`explain` gives every component and decision at once as
    signed maps, :meth:`jacobians` the full Jacobians. The model runs in evaluation mode; its training flags are put
    back, and its gradients and hooks are left alone.

    Args:
        model: a :class:`PCASVMNet`, or any classifier with a dense end: then the host's Grad-CAM. Of a compiled one,
            what was compiled: maps need the modules themselves.
        target_layers: layers whose activations become maps, as in the host; their outputs are (N, T, H, W) or
            (N, T, D, H, W), if need be after ``reshape_transform``.
        reshape_transform: brings activations to (N, T, H, W), as in the host.
        jacobian: ``"closed_form"``: refuse a path without a closed form; ``"auto"``: use autograd on such a path
            alone, with one warning; ``"autograd"``: always do that.
        max_bytes: bound on the temporary memory of a call besides the network's own; targets are taken in chunks, of
            one at least. None: all at once.

    Raises:
        NoClosedFormError: the path has a layer without a rule, or the target layer is not the only way to the features.
        TypeError: the model is not a module, or the target layers are no list of modules.
        ValueError: an unknown ``jacobian``, no target layer, or one that is not in the network before the features.
    """

    def __init__(
        self,
        model: nn.Module,
        target_layers: list[nn.Module],
        reshape_transform: Callable[[Tensor], Tensor] | None = None,
        *,
        jacobian: str = "closed_form",
        max_bytes: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
        if jacobian not in ("closed_form", "auto", "autograd"):
            raise ValueError(f"jacobian must be 'closed_form', 'auto' or 'autograd', got {jacobian!r}")
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes <= 0):
            raise ValueError(f"max_bytes must be a positive integer or None, got {max_bytes!r}")
        if not isinstance(target_layers, list | tuple) or not all(isinstance(t, nn.Module) for t in target_layers):
            raise TypeError(f"target_layers must be a list of modules, got {target_layers!r:.80}")
        if not target_layers:
            raise ValueError("target_layers is empty: name the layer whose activations become the map")
        model = uncompiled(model)
        _refuse_what_is_around(model)
        self._net = (model.backbone, model.layer) if isinstance(model, PCASVMNet) else (model, None)
        names = [layer_name(self._net[0], layer) for layer in target_layers]
        if None in names:
            raise ValueError("the target layer is the network itself: choose one of its layers")
        self._target_names = [name for name in names if name is not None]
        with evaluating(model):
            super().__init__(model, target_layers, reshape_transform)
            # Nothing here needs the host's hooks, which copy every activation to the CPU.
            self.activations_and_grads.release()
            self.jacobian = jacobian
            self.max_bytes = max_bytes
            self._renew_path()

    def __call__(
        self,
        input_tensor: Tensor,
        targets: Sequence[Target] | Target | None = None,
        aug_smooth: bool = False,
        eigen_smooth: bool = False,
    ) -> np.ndarray:
        """Return one map per image, as the host does.

        Args:
            input_tensor: shape (N, C, H, W) or (N, C, D, H, W).
            targets: one per image; a single target (not in a list) is taken for all; None: each image's predicted
                class.
            aug_smooth: average over the host's test-time augmentations.
            eigen_smooth: first principal component of the weighted activations, as in the host.

        Returns:
            Maps, float32, shape (N, H, W), in [0, 1]: for a PCATarget P_b^+ (sign "-": P_b^-) divided by nu_b, for
            every other target scaled as the host does.

        Raises:
            TypeError: the input is no floating-point tensor, or a target not callable.
            ValueError: an empty batch, NaN or infinite values, a number of targets unlike the batch, or a target that
                the head does not know.
        """
        return super().__call__(input_tensor, targets, aug_smooth, eigen_smooth)

    def explain(self, input_tensor: Tensor, targets: Sequence[Target] | Target | None = None) -> SignedMaps:
        """Return the signed maps of every target for every image.

        Args:
            input_tensor: shape (N, ...).
            targets: K targets, each for all images; None: every component, then the predicted class.

        Returns:
            Signed maps of shape (N, K, H, W) and what belongs to them, on the model's device.

        Raises:
            TypeError: the input is no floating-point tensor, or a target not callable.
            ValueError: an empty batch, NaN or infinite values, no targets, several target layers, or a target that
                the head does not know.
        """
        x = self._checked(input_tensor)
        with self._running(x):
            passed, output = self._run(x)
            activations = self._activations(passed, self._only_layer())
            targets = self._default_targets(output) if targets is None else _as_list(targets)
            dtype = torch.promote_types(passed.features.dtype, torch.float32)
            weights, log_scales, values = [], [], []
            for chunk in self._chunks(targets, passed):
                grad, log_scale, value = feature_gradients(output, chunk, dtype)
                weights.append(self._weights(passed, grad, self._only_layer()))
                log_scales.append(log_scale)
                values.append(value)
            weight = _joined(weights).contiguous()  # not a view of one image's numbers for all of them
            maps = signed_maps(weight, activations)
            nu = largest(maps)
        if maps.device.type == "cpu":
            _check_finite(nu)
            if not bool(nu.all()):
                warn_of_blanks(maps, maps, lambda image, k: targets[k])
        if isinstance(output, HeadOutput):
            output.levels = list(output.levels)  # what was kept for the pullback is not needed any more
        return SignedMaps(maps, weight, _joined(values), nu, _joined(log_scales).contiguous(), targets, output)

    def jacobians(self, input_tensor: Tensor) -> Jacobians:
        """Return the full Jacobians of components and margins with respect to the activations (Algorithm 1).

        Args:
            input_tensor: shape (N, ...).

        Returns:
            ``components`` (N, T, B, H W) and ``margins`` (N, T, C, H W), on the model's device.

        Raises:
            TypeError: the input is no floating-point tensor.
            ValueError: an empty batch, NaN or infinite values, or several target layers.
        """
        x = self._checked(input_tensor)
        with self._running(x):
            passed, output = self._run(x)
            activations = self._activations(passed, self._only_layer())
            of_components, _ = self._jacobian(passed, output, _every_component(output))
            of_margins, log_scale = self._jacobian(passed, output, _every_class(output))
        return Jacobians(of_components, of_margins, log_scale, activations, output)

    def forward(
        self, input_tensor: Tensor, targets: Sequence[Target] | Target | None, eigen_smooth: bool = False
    ) -> np.ndarray:
        """Return one map per image, without test-time augmentation: arguments and result as for ``__call__``.

        Args:
            input_tensor: shape (N, C, H, W) or (N, C, D, H, W).
            targets: one per image, a single one for all, or None.
            eigen_smooth: first principal component of the weighted activations.

        Returns:
            Maps, float32, shape (N, H, W), in [0, 1].
        """
        x = self._checked(input_tensor)
        targets = self._targets_per_image(x, targets)
        layers = self._layer_maps(x, targets, eigen_smooth)
        by_nu = np.array([isinstance(target, PCATarget) for target in targets])
        shared = np.mean(np.concatenate(layers, axis=1), axis=1)
        # The host's last step would stretch every map to [0, 1] and take P^+ and P^- off their shared scale.
        scaled = shared if by_nu.all() else self.aggregate_multi_layers(layers)
        scaled[by_nu] = shared[by_nu]
        return scaled

    def compute_cam_per_layer(
        self, input_tensor: Tensor, targets: Sequence[Target] | Target | None, eigen_smooth: bool = False
    ) -> list[np.ndarray]:
        """Return the maps of every target layer, each of shape (N, 1, H, W): the host's seam, from one forward pass.

        Args:
            input_tensor: shape (N, C, H, W) or (N, C, D, H, W).
            targets: one per image, a single one for all, or None.
            eigen_smooth: first principal component of the weighted activations.

        Returns:
            One float32 array per target layer.
        """
        x = self._checked(input_tensor)
        return self._layer_maps(x, self._targets_per_image(x, targets), eigen_smooth)

    def __exit__(self, exc_type: Any, exc_value: Any, exc_tb: Any) -> None:
        """Let every exception through (the host swallows ``IndexError``)."""

    def __del__(self) -> None:
        """Do nothing: there are no hooks to release."""

    def _renew_path(self) -> None:
        path, self._modules = self._make_path(), modules_of(self.model)
        self._path = path

    def _make_path(self) -> Path | AutogradPath:
        if self.jacobian != "autograd":
            try:
                return Path(*self._net, self._target_names)
            except NoClosedFormError as error:
                self._fall_back(error, stacklevel=5)
        return AutogradPath(*self._net, self._target_names)

    def _fall_back(self, error: NoClosedFormError, stacklevel: int = 4) -> None:
        if self.jacobian == "closed_form":
            raise error
        warnings.warn(f"using autograd on the path: {error.reason}", AutogradFallbackWarning, stacklevel=stacklevel)
        self.jacobian = "autograd"

    def _run(self, x: Tensor) -> tuple[Pass, Tensor]:
        """Run the network once; return the pass and the network's output."""
        try:
            passed: Pass = self._path.run(x)
        except NoClosedFormError as error:
            self._fall_back(error)
            self._renew_path()
            passed = self._path.run(x)
        if isinstance(self.model, PCASVMNet):
            return passed, HeadOutput.of(self.model.head, self.model.head(passed.features))
        return passed, passed.features

    def _layer_maps(self, x: Tensor, targets: Sequence[Target], eigen_smooth: bool) -> list[np.ndarray]:
        """Return each image's map of every target layer, shape (N, 1, H, W) each, scaled and upsampled."""
        size = self.get_target_width_height(x)
        with self._running(x):
            passed, output = self._run(x)
            self.outputs = output  # where the host keeps it
            dtype = torch.promote_types(passed.features.dtype, torch.float32)
            grad = feature_gradients_per_image(output, targets, dtype)
            layers = []
            for layer in range(len(self.target_layers)):
                activations = self._activations(passed, layer)
                weights = self._weights(passed, grad, layer)
                layers.append(_one_per_image(weights, activations, targets, x.shape[2:], size, eigen_smooth))
        return layers

    def _activations(self, passed: Pass, layer: int) -> Tensor:
        """Return the activations of a target layer, shape (N, T, H, W) or (N, T, D, H, W)."""
        activations = passed.activations[layer]
        if self.reshape_transform is not None:
            activations = self.reshape_transform(activations)
        if activations.dim() not in (4, 5):
            raise ValueError(
                f"the activations of {self._target_names[layer]!r} have shape {tuple(activations.shape)}: a map needs "
                "(N, T, H, W) or (N, T, D, H, W); choose an earlier layer or pass a reshape_transform"
            )
        return activations

    def _pullback(self, passed: Pass, grad: Tensor, layer: int) -> Tensor:
        """Return the derivative of K targets with respect to the activations, shape (N, K, T, H, W)."""
        with full_precision(grad.device):
            pulled = passed.pullback(grad, layer)
        if self.reshape_transform is None:
            return pulled
        return self.reshape_transform(pulled.flatten(0, 1)).unflatten(0, pulled.shape[:2])

    def _weights(self, passed: Pass, grad: Tensor, layer: int) -> Tensor:
        """Return the weights of the maps, shape (N, K, T)."""
        if self.reshape_transform is not None:
            return self._pullback(passed, grad, layer).flatten(3).sum(-1)
        with full_precision(grad.device):
            return passed.weights(grad, layer)

    def _jacobian(self, passed: Pass, output: Tensor, targets: Sequence[Target]) -> tuple[Tensor | None, Tensor | None]:
        if not targets:
            return None, None
        dtype = torch.promote_types(passed.features.dtype, torch.float32)
        parts, log_scales = [], []
        for chunk in self._chunks(targets, passed):
            grad, log_scale, _ = feature_gradients(output, chunk, dtype)
            parts.append(self._pullback(passed, grad, self._only_layer()).flatten(3).transpose(1, 2))
            log_scales.append(log_scale)
        return _joined(parts, 2), _joined(log_scales).contiguous()

    def _chunks(self, targets: Sequence[Target], passed: Pass) -> Iterator[Sequence[Target]]:
        size = len(targets)
        if self.max_bytes is not None:
            needed = passed.bytes_per_target()
            if isinstance(self.model, PCASVMNet):
                needed = max(needed, self.model.head.bytes_per_target(len(passed.features)))
            size = max(1, self.max_bytes // needed)
        return (targets[start : start + size] for start in range(0, len(targets), size))

    def _default_targets(self, output: Tensor) -> list[Target]:
        """Return every component, then the predicted class."""
        if not isinstance(output, HeadOutput):
            return [ScoreTarget()]
        return [*_every_component(output), *([] if output.decision is None else [SVMTarget()])]

    def _targets_per_image(self, x: Tensor, targets: Sequence[Target] | Target | None) -> Sequence[Target]:
        if targets is None and isinstance(self.model, PCASVMNet) and self.model.head.decision_level is None:
            raise ValueError("targets=None needs a head with an SVM, and this one has none: use PCATarget")
        if targets is None:
            targets = PredictedScore() if isinstance(self.model, PCASVMNet) else ScoreTarget()
        if not isinstance(targets, list | tuple):
            return [targets] * len(x)  # type: ignore[list-item]
        targets = _as_list(targets)
        if len(targets) != len(x):
            raise ValueError(
                f"{len(targets)} targets for {len(x)} images: give one per image, as in targets=[target] * {len(x)}, "
                "or explain(x, targets) for every target of every image"
            )
        return targets

    def _only_layer(self) -> int:
        if len(self.target_layers) > 1:
            raise ValueError("explain and jacobians take one target layer: make one ClosedFormGradCAM for each")
        return 0

    def _checked(self, x: Tensor) -> Tensor:
        return checked_images(x).to(device_of(self.model))

    @contextmanager
    def _running(self, x: Tensor) -> Iterator[None]:
        """Evaluation mode, no graph, and no half-precision copies of weights left behind in the user's autocast."""
        kind = x.device.type
        with ExitStack() as stack:
            known = None
            if isinstance(self._path, Path):
                if self._path.stale():
                    with evaluating(self.model):
                        self._renew_path()
                known = self._modules  # as they were when it was traced
            stack.enter_context(evaluating(self.model, known))
            # Not inference mode, whose tensors a user could not train on.
            stack.enter_context(torch.no_grad())
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield


def _one_per_image(
    weights: Tensor,
    activations: Tensor,
    targets: Sequence[Target],
    shape: Sequence[int],
    size: tuple[int, ...],
    eigen_smooth: bool,
) -> np.ndarray:
    """Return each image's map, scaled and upsampled: by nu for a PCATarget, otherwise as the host does."""
    # The host's weights are means over positions, and its scaling adds 1e-7: the size of the numbers matters there.
    weights = weights / activations[0, 0].numel()
    maps = signed_maps(weights, activations)
    _check_finite(maps)
    if eigen_smooth:
        weighted = weights[:, 0].unflatten(1, (-1, *[1] * (activations.dim() - 2))) * activations
        smooth = torch.from_numpy(get_2d_projection(weighted.cpu().numpy())).to(maps).unsqueeze(1)
        # An SVD has no sign of its own, and P^+ and P^- must not come out the same; the host's maps keep the host's.
        along = (smooth * maps).flatten(1).sum(1) >= 0
        signs = [
            1.0 if same or not isinstance(t, PCATarget) else -1.0
            for same, t in zip(along.tolist(), targets, strict=True)
        ]
        maps = smooth * smooth.new_tensor(signs).reshape(-1, *[1] * (maps.dim() - 1))
    positive = maps.relu()
    warn_of_blanks(positive, maps, lambda image, k: targets[image], stacklevel=7)
    result = scale_cam_image(positive[:, 0].cpu().numpy(), size)
    rows = [row for row, target in enumerate(targets) if isinstance(target, PCATarget)]
    if rows:
        by_nu = upsampled(divided(positive[rows], largest(maps[rows])), shape)
        result[rows] = by_nu[:, 0].cpu().numpy()
    return result[:, None]


def _refuse_what_is_around(model: nn.Module) -> None:
    """Refuse what a PCASVMNet does besides backbone and head: it would not be explained."""
    if isinstance(model, PCASVMNet):
        own = type(model).forward is PCASVMNet.forward
        if own and not model._forward_hooks and not model._forward_pre_hooks:
            return
        what = "hooks" if own else "a forward of its own"
        raise ValueError(f"{type(model).__name__} has {what}, which would not be explained: put it into the backbone")
    if any(isinstance(module, PCASVMNet) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} wraps a PCASVMNet: put what is around it into the net's backbone")


def _as_list(targets: Sequence[Target] | Target) -> list[Target]:
    listed = list(targets) if isinstance(targets, list | tuple) else [targets]
    if not listed:
        raise ValueError("targets is empty: pass None for the default, or at least one target")
    return listed  # type: ignore[return-value]


def _every_component(output: Tensor) -> Sequence[Target]:
    components = output.components if isinstance(output, HeadOutput) else None
    return () if components is None else _components(components.shape[-1])


@lru_cache(maxsize=8)
def _components(count: int) -> tuple[PCATarget, ...]:
    return tuple(PCATarget(b) for b in range(count))


def _every_class(output: Tensor) -> Sequence[Target]:
    if not isinstance(output, HeadOutput):
        return [ScoreTarget(category) for category in range(output.shape[-1])]
    if output.decision is None:
        return ()
    classes = output.head.classes_
    return [SVMTarget()] if classes is None else [SVMTarget(label) for label in classes.tolist()]


def _joined(parts: list[Tensor], dim: int = 1) -> Tensor:
    """Return the parts of all chunks as one tensor, which most often is the only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _check_finite(maps: Tensor) -> None:
    if not all_finite(maps):
        raise ValueError("the maps are not finite: the input or the network has NaN or infinite values")
