"""ClosedFormCAM: every method as pytorch-grad-cam, the host, calls it, with one map per image on the host's scale."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pytorch_grad_cam.utils.image import scale_cam_image
from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection
from torch import Tensor

from pytorch_grad_cam_pcasvm.maps.results import check_finite, divided, find_nu, warn_of_blanks
from pytorch_grad_cam_pcasvm.methods.method import Method
from pytorch_grad_cam_pcasvm.methods.warn_once import warn_of_blind_tokens
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, one_input, pick_images, prepare_images
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.pools import keeps_positions
from pytorch_grad_cam_pcasvm.runtime.docstrings import completed
from pytorch_grad_cam_pcasvm.targets import PCATarget, PredictedScore, ScoreTarget, SVMTarget, Target
from pytorch_grad_cam_pcasvm.targets.questions import list_targets, resolve_image_targets


class ClosedFormCAM(Method):
    """The base class of all methods: it runs the network, splits targets into chunks, scales and upsamples.

    ``cam(input_tensor, targets)`` works as in pytorch-grad-cam; :meth:`explain` returns signed maps of every component
    and decision at once. Every call runs the network's own forward in evaluation mode and then restores its training
    flags; its gradients and hooks are left alone. Whatever bypasses a target layer, such as a skip connection, is
    treated as a constant, as in pytorch-grad-cam.

    Args:
        model: a :class:`.PCASVMNet`, or any differentiable classifier, whose maps are those of pytorch-grad-cam. For a
            compiled model, the original module is used, because maps need the modules themselves.
        target_layers: layers whose activations become maps, or their dotted names; their outputs are (N, T, H, W) or
            (N, T, D, H, W), after ``reshape_transform`` if needed. ``"auto"``: the last block of the coarsest map size
            (for :class:`ContributionCAM`, of the two coarsest sizes); for a transformer, the norm before its last
            attention (the last two). ``SignedMaps.layers`` names the layers.
        reshape_transform: reshapes activations to (N, T, H, W), as in pytorch-grad-cam; ``"tokens"``: find the grid,
            and the tokens that belong to no patch (class, registers), by running the network on a few noise images;
            this also works for channels-last activations.
        jacobian: ``"closed_form"``: raise an error for a path without a closed form; ``"auto"``: use autograd for such
            a path only, with one warning; ``"autograd"``: always use autograd.
        attention: ``"frozen"``: treat the weights of attention, and of every other softmax, as constants, as in
            attention rollout and per-head decompositions, which explains what attention moves, but not why;
            ``"exact"``: treat them as functions of the activations, as autograd does.
        max_bytes: limit on the temporary memory of a call, besides the network's own; targets are processed in chunks
            of at least one. None: all at once.

    Raises:
        TypeError: the model is no module, or a program made by ``torch.jit`` or ``torch.export``; or the target layers
            are not a list of modules or names.
        ValueError: an option has an unknown value, no target layer is given, a target layer is not in the network, or
            the model is a DataParallel.

    Example:
        >>> maps = ClosedFormGradCAM(net, ["layer2"]).explain(images)
        >>> maps.maps.shape  # of two images, for three components and the predicted class
        torch.Size([2, 4, 8, 8])
    """

    # What targets=None explains in a call. The host's methods explain a score, others add up to a margin.
    _predicted: Target = PredictedScore()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__doc__ = completed(cls, ClosedFormCAM)

    def __call__(
        self,
        input_tensor: Tensor,
        targets: Sequence[Target] | Target | None = None,
        aug_smooth: bool = False,
        eigen_smooth: bool = False,
    ) -> np.ndarray:
        """Return one map per image, as pytorch-grad-cam does.

        Args:
            input_tensor: shape (N, C, H, W) or (N, C, D, H, W).
            targets: one per image; a single target (not in a list) is used for all; None: each image's predicted
                class.
            aug_smooth: average over pytorch-grad-cam's test-time augmentations.
            eigen_smooth: use the first principal component of the weighted activations, as in pytorch-grad-cam.

        Returns:
            Maps, float32, shape (N, H, W), in [0, 1]: for a PCATarget, P_b^+ (sign "-": P_b^-) divided by nu_b; for
            every other target, scaled as in pytorch-grad-cam.

        Raises:
            NoClosedFormError: the path has a step without a rule.
            TypeError: the input is not a floating-point tensor, or a target is not callable.
            ValueError: the batch is empty, or has NaN or infinite values; the number of targets differs from the batch
                size; or a target does not fit the head.

        Example:
            >>> cam(images, [SVMTarget("cat"), SVMTarget("dog")]).shape
            (2, 32, 32)
        """
        if aug_smooth:
            one_input(prepare_images(self.model, input_tensor), "aug_smooth")
        return super().__call__(input_tensor, targets, aug_smooth, eigen_smooth)

    def forward(
        self, input_tensor: Tensor, targets: Sequence[Target] | Target | None, eigen_smooth: bool = False
    ) -> np.ndarray:
        """Return one map per image, without test-time augmentation; arguments and result are as for ``__call__``.

        Args:
            input_tensor: shape (N, C, H, W) or (N, C, D, H, W).
            targets: one per image, a single one for all, or None.
            eigen_smooth: first principal component of the weighted activations.

        Returns:
            Maps, float32, shape (N, H, W), in [0, 1].
        """
        x = prepare_images(self.model, input_tensor)
        targets = self._targets_per_image(x, targets)
        layers = self._layer_maps(x, targets, eigen_smooth)
        by_nu = np.array([isinstance(target, PCATarget) for target in targets])
        shared = np.mean(np.concatenate(layers, axis=1), axis=1)
        # The host's last step would stretch every map to [0, 1] and take P^+ and P^- off their shared scale.
        scaled = shared if by_nu.all() else self.aggregate_multi_layers(layers)
        scaled[by_nu] = shared[by_nu]
        return scaled

    def get_target_width_height(self, input_tensor: Tensor) -> tuple[int, ...]:
        """Return the size of maps as the host orders it; of signals (N, C, L) their length, (L,)."""
        if input_tensor.dim() == 3:
            return tuple(input_tensor.shape[2:])
        return super().get_target_width_height(input_tensor)

    def compute_cam_per_layer(
        self, input_tensor: Tensor, targets: Sequence[Target] | Target | None, eigen_smooth: bool = False
    ) -> list[np.ndarray]:
        """Return the maps of every target layer, each of shape (N, 1, H, W), from one forward pass.

        Args:
            input_tensor: shape (N, C, H, W) or (N, C, D, H, W).
            targets: one per image, a single one for all, or None.
            eigen_smooth: first principal component of the weighted activations.

        Returns:
            One float32 array per target layer.
        """
        x = prepare_images(self.model, input_tensor)
        return self._layer_maps(x, self._targets_per_image(x, targets), eigen_smooth)

    def __exit__(self, exc_type: Any, exc_value: Any, exc_tb: Any) -> None:
        """Let every exception through (pytorch-grad-cam swallows ``IndexError``)."""

    def __del__(self) -> None:
        """Do nothing: there are no hooks to release."""

    def _layer_maps(self, x: Tensor, targets: Sequence[Target], eigen_smooth: bool) -> list[np.ndarray]:
        """Return each image's map of every target layer, shape (N, 1, H, W) each, scaled and upsampled."""
        if len(self._target_layers) > 1 and isinstance(x, Inputs):
            raise ValueError(
                "a call makes one map of all target layers, but these may be of different inputs: use explain, which "
                "returns maps of each, or name one"
            )
        if len({image.shape[2:] for image in pick_images(x)}) > 1:
            raise ValueError(
                "a call scales its maps to the image, but the inputs are images of different sizes: use explain, whose "
                "maps have the layer's own grid"
            )
        size, shape = self.get_target_width_height(pick_images(x)[0]), pick_images(x)[0].shape[2:]
        with self._running(x) as modules:
            run = self._run_network(x, modules)
            self.outputs = run.public_output  # where the host keeps it
            questions = resolve_image_targets(targets, run.output)
            questions = questions if self.sampling is None else questions.sample([self.sampling])
            for layer, name in enumerate(run.layers):
                if eigen_smooth and run.activations(layer)[0, 0].numel() == 1:
                    raise ValueError(
                        "eigen_smooth takes a principal component over positions, but the maps of "
                        f"{name!r} have only one position: choose a layer with more, or eigen_smooth=False"
                    )
            results, plans = self._explain_layers(run, questions)
            layers = []
            for layer, (name, result, plan) in enumerate(zip(run.layers, results, plans, strict=True)):
                self._warnings.of_layer(name, result.maps.shape[2:])
                maps, nu = result.maps, find_nu(result.maps, result.opposite)
                if warn_of_blind_tokens(run, layer, nu):  # which is said once, not map by map as well
                    layers.append(np.zeros((len(x), 1, *shape), np.float32))
                    continue
                if eigen_smooth:
                    check_finite(maps)
                    starts = {} if plan is None else {layer: plan.groups[0][1]()}
                    terms = self.terms(replace(run, starts=starts), layer, questions, result)
                    maps = smoothed_by_svd(run.layouts[layer].add_tiles(terms), maps, targets)
                    nu = find_nu(maps)
                # The host adds 1e-7 when it scales, so the maps must have its size.
                maps, nu = (numbers / self.host_divisor(run.activations(layer)) for numbers in (maps, nu))
                layers.append(one_per_image(maps, nu, targets, self.outputs, shape, size))
                self._warnings.of_start(result.values, result.baseline_values)
                self._warnings.of_rows(self.outputs, targets, result.values, result.baseline_values)
        return layers

    def _targets_per_image(self, x: Tensor, targets: Sequence[Target] | Target | None) -> Sequence[Target]:
        if targets is None and isinstance(self.model, PCASVMNet) and self.model.head.decision_position is None:
            raise ValueError("targets=None needs a head with an SVM, but this one has none: use PCATarget")
        if targets is None:
            dense = isinstance(self.model, PCASVMNet) and keeps_positions(self.model.pool)
            targets = SVMTarget() if dense else self._predicted if isinstance(self.model, PCASVMNet) else ScoreTarget()
        if not isinstance(targets, list | tuple):
            return [targets] * len(x)  # type: ignore[list-item]
        targets = list_targets(targets)
        if len(targets) != len(x):
            raise ValueError(
                f"{len(targets)} target{'s' if len(targets) != 1 else ''} for {len(x)} images: give one per image, as "
                f"in targets=[target] * {len(x)}, "
                "or explain(x, targets) for every target of every image"
            )
        return targets

    def host_divisor(self, activations: Tensor) -> int:
        """Return the divisor of maps for the host's scale: the number of positions, where weights are sums over them.

        Args:
            activations: shape (N, T, H, W).
        """
        return 1


def smoothed_by_svd(terms: Tensor, maps: Tensor, targets: Sequence[Any]) -> Tensor:
    """Return the first principal component of the terms (N, T, H, W) of maps (N, 1, H, W), as eigen_smooth does.

    The sign of an SVD is arbitrary, but P^+ and P^- must differ: for a PCATarget the sign is that of its map.
    """
    smooth = torch.from_numpy(get_2d_projection(terms.cpu().numpy())).to(maps).unsqueeze(1)
    along = (smooth * maps).flatten(1).sum(1) >= 0
    signs = [
        1.0 if same or not isinstance(t, PCATarget) else -1.0 for same, t in zip(along.tolist(), targets, strict=True)
    ]
    return smooth * smooth.new_tensor(signs).reshape(-1, *[1] * (maps.dim() - 1))


def one_per_image(
    maps: Tensor,
    nu: Tensor,
    targets: Sequence[Any],
    output: Any,
    shape: Sequence[int],
    size: tuple[int, ...],
) -> np.ndarray:
    """Return each image's map (N, 1, H, W), upsampled; scaled by nu for a PCATarget, else as in pytorch-grad-cam."""
    check_finite(maps)
    positive = maps.relu()
    warn_of_blanks(positive, nu, lambda image, k: targets[image], output)
    lines = positive[:, 0].cpu().numpy()
    # Of signals, as pictures one pixel high, which is what the host resizes.
    result = scale_cam_image(lines, size) if len(size) > 1 else scale_cam_image(lines[:, None], (*size, 1))[:, 0]
    rows = [row for row, target in enumerate(targets) if isinstance(target, PCATarget)]
    if rows:
        by_nu = upsample_maps(divided(positive[rows], nu[rows]), shape)
        result[rows] = by_nu[:, 0].cpu().numpy()
    return result[:, None]


class ComponentSums(ClosedFormCAM):
    """A method whose maps of decisions are sums of its component maps: it is linear in the gradient, or in secants.

    Example:
        >>> [issubclass(method, ComponentSums) for method in (ClosedFormGradCAM, ClosedFormLayerCAM)]
        [True, False]
    """

    sums = "components"


class HeadSums(ComponentSums):
    """A method whose maps are sums over parts of the gradient, such as single heads of attention."""

    sums = "heads"
