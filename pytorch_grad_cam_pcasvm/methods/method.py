"""ClosedFormCAM: pytorch-grad-cam's protocol for every method, with one forward pass and no backward pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, overload

import numpy as np
import torch
from pytorch_grad_cam.base_cam import BaseCAM
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head.multiclass import Outputs
from pytorch_grad_cam_pcasvm.maps.recombination import combined
from pytorch_grad_cam_pcasvm.maps.result import Explained, joined
from pytorch_grad_cam_pcasvm.maps.signed_maps import (
    Jacobians,
    SignedMaps,
    check_finite,
    largest,
    warn_of_blanks,
)
from pytorch_grad_cam_pcasvm.methods.check import CheckReport, of_contributions, of_gradient
from pytorch_grad_cam_pcasvm.methods.docstrings import completed
from pytorch_grad_cam_pcasvm.methods.explanation import Run
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import one_per_image, smoothed_by_svd
from pytorch_grad_cam_pcasvm.methods.warn_once import Doubts
from pytorch_grad_cam_pcasvm.network.auto_layers import last_blocks, norms_before_attention
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, check_rows, checked_images, flatten, one_input
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, images_of
from pytorch_grad_cam_pcasvm.network.modules import (
    device_of,
    eager,
    evaluating,
    layer_name,
    modules_of,
    network_of,
    refuse_parallel,
)
from pytorch_grad_cam_pcasvm.network.net import HeadRun, PCASVMNet
from pytorch_grad_cam_pcasvm.network.reshape import transform_of
from pytorch_grad_cam_pcasvm.network.token_layout import Layout
from pytorch_grad_cam_pcasvm.path.autograd import AutogradPath
from pytorch_grad_cam_pcasvm.path.forward_pass import Pass
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.runtime.arguments import Named
from pytorch_grad_cam_pcasvm.runtime.device_sync import is_traced, may_look
from pytorch_grad_cam_pcasvm.runtime.errors import AutogradFallbackWarning, BlankMapWarning, NoClosedFormError, warn
from pytorch_grad_cam_pcasvm.runtime.hooks import called
from pytorch_grad_cam_pcasvm.runtime.rollback import set_gradients
from pytorch_grad_cam_pcasvm.tape.recorder import explaining
from pytorch_grad_cam_pcasvm.targets import (
    PCATarget,
    PredictedScore,
    ScoreTarget,
    SVMTarget,
    Target,
    every_class,
    every_component,
)
from pytorch_grad_cam_pcasvm.targets.output_gradients import Rowwise, Seeds, is_closed_form

# Where torch keeps quantised modules, which have no parameters.
_QUANTISED = "torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized"


class ClosedFormCAM(Named, BaseCAM):
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
    # Whether maps are linear in the gradient, or in secants, so that those of decisions are sums of component maps.
    linear = False
    # Whether maps are sums of those made of parts of the gradient, as of single heads of attention.
    heads_add_up = False
    # Whether differences between outputs count, of which half precision keeps too little.
    in_single = False
    # Whether the path is run again from other activations, for which all that it computes is kept.
    replays = False
    # Whether maps of several target layers are one map of a call to explain.
    combines = False
    # Whether each image is run on its own, again and again.
    runs_each_image = False
    # Whether the weights are sums over positions where the host takes means.
    weights_are_sums = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__doc__ = completed(cls, ClosedFormCAM)

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module | str] | str,
        reshape_transform: Callable[[Tensor], Tensor] | str | None = None,
        *,
        jacobian: str = "closed_form",
        attention: str = "exact",
        max_bytes: int | None = None,
    ) -> None:
        network = network_of(model)
        if isinstance(network, PCASVMNet):
            network_of(network.backbone)  # which may be another since
        if jacobian not in ("closed_form", "auto", "autograd"):
            raise ValueError(f"jacobian must be 'closed_form', 'auto' or 'autograd', got {jacobian!r}")
        if attention not in ("exact", "frozen"):
            raise ValueError(f"attention must be 'exact' or 'frozen', got {attention!r}")
        if attention == "frozen" and jacobian != "closed_form":
            raise ValueError("autograd cannot freeze attention: use jacobian='closed_form'")
        if not (reshape_transform is None or reshape_transform == "tokens" or callable(reshape_transform)):
            raise ValueError(f"reshape_transform must be 'tokens', a function or None, got {reshape_transform!r:.80}")
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes <= 0):
            raise ValueError(f"max_bytes must be a positive integer or None, got {max_bytes!r}")
        auto = isinstance(target_layers, str) and target_layers == "auto"
        if not auto and not (
            isinstance(target_layers, list | tuple)
            and all(isinstance(layer, nn.Module | str) for layer in target_layers)
        ):
            kind = type(target_layers).__name__
            raise TypeError(
                f"target_layers must be a list of modules or their names, or 'auto', got a {kind}: use [layer]"
            )
        if not target_layers:
            raise ValueError("target_layers is empty: name the layer whose activations become the map")
        model = network
        refuse_parallel(model)
        _refuse_what_is_around(model)
        self.jacobian = jacobian
        self.attention = attention
        self.max_bytes = max_bytes
        self._given: list[Any] = [] if auto else list(target_layers)
        self._found_for: Any = () if auto else None  # the backbone and the shape of images that layers were looked for
        self._names: list[str | None] = [None] * len(self._given)
        self._doubts = Doubts()
        if next(model.parameters(), None) is None:
            quantised = any(type(module).__module__.startswith(_QUANTISED) for module in model.modules())
            way = ": explain the network as it was before it was quantised" if quantised else ""
            raise ValueError(
                f"{type(model).__name__} has no parameters, which pytorch-grad-cam needs to find its device{way}"
            )
        backbone, _, names = self._layers(model)
        with evaluating(model):
            # The host's classes between add nothing that is needed here.
            # Of no layers: nothing here needs the host's hooks, which copy every activation to the CPU.
            BaseCAM.__init__(self, model, [], reshape_transform)
            self.target_layers = [backbone.get_submodule(called(name)[0]) for name in names]

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
            one_input(self._checked_images(input_tensor), "aug_smooth")
        return super().__call__(input_tensor, targets, aug_smooth, eigen_smooth)

    @overload
    def explain(
        self, input_tensor: Tensor, targets: Sequence[Target] | Target | None = None, *, heads: bool = False
    ) -> SignedMaps: ...

    @overload
    def explain(
        self,
        input_tensor: Sequence[Tensor] | Mapping[str, Tensor],
        targets: Sequence[Target] | Target | None = None,
        *,
        heads: bool = False,
    ) -> Any: ...

    def explain(
        self, input_tensor: Any, targets: Sequence[Target] | Target | None = None, *, heads: bool = False
    ) -> SignedMaps | list[SignedMaps]:
        """Return the signed maps of every target for every image.

        Args:
            input_tensor: shape (N, ...); for a network with several inputs, a tuple of tensors in order, or a dict,
                which is passed as keyword arguments, or as a dict if the network has no arguments of these names.
                Inputs that do not go through the target layer are held fixed.
            targets: K targets, each for all images; None: every component, then the predicted class.
            heads: also compute a map for each head of the first attention layer after the target layer, returned as
                ``heads``; for Grad-CAM, HiResCAM and contributions only.

        Returns:
            Signed maps of shape (N, K, H, W), with their weights, values and output, on the model's device. For several
            inputs with a target layer in each branch, a list with one SignedMaps per layer.

        Raises:
            NoClosedFormError: the path has a step without a rule, or no attention layer whose heads can be separated.
            TypeError: the input is not a floating-point tensor, or a target is not callable.
            ValueError: the batch is empty, or has NaN or infinite values; there are no targets, or a target does not
                fit the head; one input has several target layers (only :class:`ContributionCAM` supports this); or
                ``heads`` is used with a method whose maps per head do not add up.

        Example:
            >>> maps = cam.explain(images, [PCATarget(0), SVMTarget("cat", versus="dog")])
            >>> maps.maps.shape, maps.values.shape
            (torch.Size([2, 2, 8, 8]), torch.Size([2, 2]))
        """
        x = self._checked_images(input_tensor)
        branches = isinstance(x, Inputs) and len(self._given) > 1
        if heads or not (self.combines or branches):
            self._only_layer()
        with self._running(x) as modules:
            run = self._run(x, modules)
            targets = self._default_targets(run.output) if targets is None else _as_list(targets)
            if branches:
                self._refuse_repeated(run.layers)
                made = self._of_branches(run, targets)
            else:
                made = [self._explained(run, 0, targets) if len(run.layers) == 1 else self._of_layers(run, targets)]
            if heads:
                made[0].heads = self._of_heads(run, targets)
            sizes = [largest(each.maps, each.opposite) for each in made]
            if made[0].baseline_values is not None:  # they add up, and so have one scale
                sizes = [torch.stack(sizes).amax(0)] * len(made)
            told = self._tell_blind_tokens(run, 0, sizes[0])
            output = run.public_output
        results = []
        for layer, (each, nu) in enumerate(zip(made, sizes, strict=True)):
            names = tuple(run.layers[layer : layer + 1] if branches else run.layers)
            looks = may_look(nu)
            kind: Any = {"linear": self._is_linear(run), "neutral": self._is_neutral(run), "layers": names}
            doubts = None if looks else self._doubts
            result = SignedMaps(**vars(each), nu=nu, targets=targets, output=output, **kind, _doubts=doubts)
            results.append(result)
            self._doubts.of_layer(" + ".join(names), each.maps.shape[2:])
            if looks:
                check_finite(nu)
                if layer == 0:  # what the others have is the same
                    self._doubts.of_maps(result)
                if not told and not bool(nu.all()):
                    warn_of_blanks(each.maps, nu, lambda image, k: targets[k], output)
        if isinstance(run.output, HeadRun):
            run.output.head_trace.saved.clear()  # what was kept for the pullback is not needed any more
        return results if branches else results[0]

    def check(self, input_tensor: Any, targets: Sequence[Target] | Target | None = None) -> CheckReport:
        """Compare what explanations of these images rest on with autograd, and with the network itself.

        For each target layer, the gradients of the targets with autograd's; and the sum of contributions from zero
        activations with the difference between the network's outputs. It takes a few more passes, and is meant for
        networks that are new to you, and for bug reports; maps do not depend on it.

        Args:
            input_tensor: images, as for :meth:`explain`.
            targets: K targets, each for all images; None: every component, then the predicted class.

        Returns:
            The comparisons; print them.

        Raises:
            NoClosedFormError: the path has a step without a rule; ``print(error.tape)`` shows which.
            TypeError: the input is not a floating-point tensor, or a target is not callable.
            ValueError: the batch is empty, or has NaN or infinite values; or a target does not fit the head.

        Example:
            >>> cam.check(images).agrees
            True
        """
        x = self._checked_images(input_tensor)
        with self._running(x) as modules:
            layers = self._layers(self.model, x)
            path = Path(*layers, modules)
            passed, reference = path.run(x), AutogradPath(*layers).run(x)
            run = Run(self.model, x, passed, passed.output, layers[2], [None] * len(layers[2]))
            run.output = run.output_of(passed.output)
            targets = self._default_targets(run.output) if targets is None else _as_list(targets)
            seeds = run.output_gradients(targets)
            found = []
            for target, name in enumerate(layers[2]):
                found.append(of_gradient(name, passed, reference, seeds, target))
                at = partial(path.network_at, x, name)
                found.append(of_contributions(name, passed, seeds, target, at))
        return CheckReport(tuple(found))

    def jacobians(self, input_tensor: Tensor) -> Jacobians:
        """Return the full Jacobians of components and margins with respect to the activations (Algorithm 1).

        Args:
            input_tensor: shape (N, ...).

        Returns:
            ``components`` (N, T, B, H W) and ``margins`` (N, T, C, H W), on the model's device.

        Raises:
            NoClosedFormError: the path has a step without a rule.
            TypeError: the input is not a floating-point tensor.
            ValueError: the batch is empty, or has NaN or infinite values; or there are several target layers.

        Example:
            >>> jacobians = cam.jacobians(images)
        """
        x = self._checked_images(input_tensor)
        self._only_layer()
        with self._running(x) as modules:
            run = self._run(x, modules)
            activations = run.activations(0)
            of_components, _ = self._jacobian(run, every_component(run.output))
            of_margins, log_scale = self._jacobian(run, every_class(run.output))
        return Jacobians(of_components, of_margins, log_scale, activations, run.public_output)

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
        x = self._checked_images(input_tensor)
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
        """Return the maps of every target layer, each of shape (N, 1, H, W), from one forward pass.

        Args:
            input_tensor: shape (N, C, H, W) or (N, C, D, H, W).
            targets: one per image, a single one for all, or None.
            eigen_smooth: first principal component of the weighted activations.

        Returns:
            One float32 array per target layer.
        """
        x = self._checked_images(input_tensor)
        return self._layer_maps(x, self._targets_per_image(x, targets), eigen_smooth)

    def __exit__(self, exc_type: Any, exc_value: Any, exc_tb: Any) -> None:
        """Let every exception through (pytorch-grad-cam swallows ``IndexError``)."""

    def __del__(self) -> None:
        """Do nothing: there are no hooks to release."""

    def _layers(self, model: nn.Module, x: Tensor | None = None) -> tuple[nn.Module, Any, list[str]]:
        """Return the backbone, where its features come from, and the names of the target layers, as they are now."""
        backbone, source = model.feature_source(x) if isinstance(model, PCASVMNet) else (model, None)
        if self._found_for is not None and self._found_for[:1] != (backbone,):
            self._given, self._names = [], []
        if x is not None and self._found_for is not None and self._found_for != (backbone, x.shape[1:]):
            one_input(x, "target_layers='auto'")
            blocks = last_blocks(backbone, source or FeatureSource.of(backbone, None), x)
            self._given = blocks[-2:] if self.combines else blocks[-1:]
            self._names = list(self._given)
            self._found_for = backbone, x.shape[1:]
            self.target_layers = [backbone.get_submodule(name) for name in self._given]
        pairs = zip(self._names, self._given, strict=True)
        if any(name is None or not _is_at(backbone, name, given) for name, given in pairs):
            self._names = [layer_name(backbone, given) for given in self._given]
            if None in self._names:
                raise ValueError("the target layer is the network itself: choose one of its layers")
        return backbone, source, [str(name) for name in self._names]

    def _explained(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        """Return the maps of K targets, each for all images or a :class:`Rowwise`, made in chunks."""
        combines = self.linear and isinstance(run.output, HeadRun) and self._shares_start(run, layer)
        basis = every_component(run.output) if combines else []
        if 0 < len(basis) < sum(map(_is_behind_components, targets)) == len(targets):
            made = ClosedFormCAM._explained(self, run, layer, basis)  # from where these targets start
            seeds = self._seeds(run, layer, targets, run.output.head.component_position)
            (grad,) = seeds.grads
            assert grad is not None
            maps, weights, remainder, log_scale = combined(made, grad.transpose(0, 1), seeds.excess)
            return Explained(
                maps, weights, seeds.values, seeds.log_scale + log_scale, None, seeds.baseline_values, remainder
            )
        parts = [self.compute(run, layer, chunk) for chunk in self._chunks(targets, run.passed, run.count)]
        return joined(parts, range(len(targets)))

    def _is_linear(self, run: Run) -> bool:
        """Return whether maps of decisions are sums of component maps."""
        return self.linear

    def _of_layers(self, run: Run, targets: Sequence[Any]) -> Explained:
        """Return the maps of several target layers as one."""
        raise NotImplementedError

    def _refuse_repeated(self, names: Sequence[str]) -> None:
        backbone = self._layers(self.model)[0]
        calls = [(backbone.get_submodule(path), call or 1) for path, call in map(called, names)]
        if len(set(calls)) < len(calls):
            raise ValueError(
                f"the target layers {', '.join(map(repr, names))} are not all different: name each once. The calls of "
                "a layer that runs several times are counted together, by whatever name"
            )

    def _of_branches(self, run: Run, targets: Sequence[Any]) -> list[Explained]:
        """Return the maps of target layers in different branches, on the grid of each."""
        return [self._explained(run, layer, targets) for layer in range(len(run.layers))]

    def _is_neutral(self, run: Run) -> bool:
        """Return whether maps can be moved to another baseline afterwards, and decisions want one of their own."""
        return False

    def _shares_start(self, run: Run, layer: int) -> bool:
        """Return whether component maps from one start are those of a decision from its own, but for a constant."""
        return True

    def _seeds(self, run: Run, layer: int, targets: Sequence[Any], until: int = 0) -> Seeds:
        """Return the gradients of K targets, or secants, with respect to the head's value at a position."""
        return run.seeds(targets, until=until)

    def _of_heads(self, run: Run, targets: Sequence[Any]) -> Tensor:
        """Return the maps of every head of the first attention, (N, K, heads, H, W); they add up to the maps."""
        if not self.heads_add_up:
            raise ValueError(
                f"heads of {type(self).__name__} do not add up: use ClosedFormGradCAM, ClosedFormHiResCAM or "
                "ContributionCAM"
            )
        apart = replace(run, passed=run.passed.with_heads(), kept={}, _last=None)
        return torch.stack([self._explained(apart, 0, [target]).maps for target in targets], 1)

    def compute(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        """Compute the maps of K targets that fit into memory together; each method defines this.

        Args:
            run: the network's run on N images.
            layer: index of the target layer.
            targets: K targets.

        Returns:
            Their maps, not yet scaled.
        """
        raise NotImplementedError(f"{type(self).__name__} is not a method itself: use ClosedFormGradCAM or another")

    def terms(self, run: Run, layer: int, target: Rowwise, made: Explained) -> Tensor:
        """Return the terms that sum to a target's maps, one per channel, (N, T, H, W), for ``eigen_smooth``."""
        weights, activations = made.weights[:, 0], run.activations(layer)
        return weights.unflatten(1, (-1, *[1] * (activations.dim() - 2))) * activations

    def _run(self, x: Tensor, modules: Sequence[nn.Module]) -> Run:
        """Run the network once."""
        if isinstance(self.model, PCASVMNet):
            _refuse_what_is_around(self.model)  # hooks may have come since
        layers = self._layers(self.model, x)
        passed: Pass | None = None
        if self.jacobian != "autograd":
            try:
                passed = self._path(layers, modules).run(x)
            except NoClosedFormError as error:
                if self.jacobian == "closed_form" or self.replays or is_traced():
                    raise
                if not error._autograd_helps:
                    raise
                self._doubts.tell(AutogradFallbackWarning, f"using autograd on the path: {error.reason}")
        passed = AutogradPath(*layers).run(x) if passed is None else passed
        transforms = [
            transform_of(self.reshape_transform, layers[0], name, x, activations, self._doubts.once)
            for name, activations in zip(layers[2], passed.activations, strict=True)
        ]
        run = Run(self.model, x, passed, passed.output, layers[2], transforms)
        if isinstance(self.model, PCASVMNet) and may_look(x):
            self.model.head.check(flatten(passed.output)[:2])
        if isinstance(self.model, PCASVMNet):
            check_rows(flatten(passed.output), x)
        run.output = run.output_of(passed.output)
        return run

    def _path(self, layers: tuple[nn.Module, Any, list[str]], modules: Sequence[nn.Module]) -> Path:
        return Path(*layers, modules, self.attention, self.in_single, self.replays)

    def _tell_blind_tokens(self, run: Run, layer: int, nu: Tensor) -> bool:
        """Say which layer to take where the features look at no token of a patch: not at the output of a last block."""
        layout = run.transforms[layer]
        others = isinstance(layout, Layout) and layout.before + layout.after > 0
        if not others or not may_look(nu) or bool(nu.any()):
            return False
        norm = next(reversed(norms_before_attention(self._layers(self.model)[0])), None)
        fix = f"choose {norm!r}, " if norm not in (None, run.layers[layer]) else "choose "
        warn(
            f"no map of {run.layers[layer]!r} has a gradient: after it the features look at other tokens only, such as "
            f"the class token; {fix}the last layer before an attention",
            BlankMapWarning,
        )
        return True

    def _layer_maps(self, x: Tensor, targets: Sequence[Target], eigen_smooth: bool) -> list[np.ndarray]:
        """Return each image's map of every target layer, shape (N, 1, H, W) each, scaled and upsampled."""
        if len(self._given) > 1 and isinstance(x, Inputs):
            raise ValueError(
                "a call makes one map of all target layers, but these may be of different inputs: use explain, which "
                "returns maps of each, or name one"
            )
        if len({image.shape[2:] for image in images_of(x)}) > 1:
            raise ValueError(
                "a call scales its maps to the image, but the inputs are images of different sizes: use explain, whose "
                "maps have the layer's own grid"
            )
        size, shape = self.get_target_width_height(images_of(x)[0]), images_of(x)[0].shape[2:]
        with self._running(x) as modules:
            run = self._run(x, modules)
            self.outputs = run.public_output  # where the host keeps it
            layers = []
            for layer, name in enumerate(run.layers):
                activations = run.activations(layer)
                if eigen_smooth and activations[0, 0].numel() == 1:
                    raise ValueError(
                        "eigen_smooth takes a principal component over positions, but the maps of "
                        f"{name!r} have only one position: choose a layer with more, or eigen_smooth=False"
                    )
                shared = Rowwise(list(targets))
                made = self._explained(run, layer, [shared])
                self._doubts.of_layer(name, made.maps.shape[2:])
                maps, nu = made.maps, largest(made.maps, made.opposite)
                if self._tell_blind_tokens(run, layer, nu):  # which is said once, not map by map as well
                    layers.append(np.zeros((len(x), 1, *shape), np.float32))
                    continue
                if eigen_smooth:
                    check_finite(maps)
                    maps = smoothed_by_svd(self.terms(run, layer, shared, made), maps, targets)
                    nu = largest(maps)
                if self.weights_are_sums:
                    # The host's weights are means over positions, and its scaling adds 1e-7: size matters there.
                    maps, nu = (numbers / activations[0, 0].numel() for numbers in (maps, nu))
                layers.append(one_per_image(maps, nu, targets, self.outputs, shape, size))
                self._doubts.of_rows(self.outputs, targets, made.values, made.baseline_values)
        return layers

    def _jacobian(self, run: Run, targets: Sequence[Target]) -> tuple[Tensor | None, Tensor | None]:
        if not targets:
            return None, None
        parts, log_scales = [], []
        for chunk in self._chunks(targets, run.passed, run.count):
            seeds = run.seeds(chunk)
            parts.append(run.gradients(seeds, 0).dense().flatten(3).permute(1, 2, 0, 3))
            log_scales.append(seeds.log_scale)
        return torch.cat(parts, 2), torch.cat(log_scales, 1)

    def _chunks(self, targets: Sequence[Target], passed: Pass, count: int) -> Iterator[Sequence[Target]]:
        size = len(targets)
        if self.max_bytes is not None:
            needed = passed.bytes_per_target()
            if isinstance(self.model, PCASVMNet):
                needed = max(needed, self.model.head.bytes_per_target(count))
            size = max(1, self.max_bytes // needed)
        return (targets[start : start + size] for start in range(0, len(targets), size))

    def _default_targets(self, output: Any) -> list[Target]:
        """Return every component, then the predicted class, or all outputs of several."""
        if not isinstance(output, HeadRun):
            return [ScoreTarget()]
        if output.decision is not None and isinstance(output.head.voting, Outputs):
            return [*every_component(output), *every_class(output)]
        return [*every_component(output), *([] if output.decision is None else [SVMTarget()])]

    def _targets_per_image(self, x: Tensor, targets: Sequence[Target] | Target | None) -> Sequence[Target]:
        if targets is None and isinstance(self.model, PCASVMNet) and self.model.head.decision_position is None:
            raise ValueError("targets=None needs a head with an SVM, but this one has none: use PCATarget")
        if targets is None:
            targets = self._predicted if isinstance(self.model, PCASVMNet) else ScoreTarget()
        if not isinstance(targets, list | tuple):
            return [targets] * len(x)  # type: ignore[list-item]
        targets = _as_list(targets)
        if len(targets) != len(x):
            raise ValueError(
                f"{len(targets)} target{'s' if len(targets) != 1 else ''} for {len(x)} images: give one per image, as "
                f"in targets=[target] * {len(x)}, "
                "or explain(x, targets) for every target of every image"
            )
        return targets

    def _only_layer(self) -> None:
        if len(self._given) > 1:
            name, fix = type(self).__name__, f"make one {type(self).__name__} for each layer"
            if self.combines:
                raise ValueError(f"{name} takes several target layers in explain only, and without heads: {fix}")
            raise ValueError(
                f"{name} takes one target layer in explain and jacobians: {fix}, or use ContributionCAM, whose maps of "
                "several layers are one"
            )

    def _checked_images(self, x: Any) -> Any:
        x = checked_images(x, self.model)
        return x.to(device_of(self.model))

    @contextmanager
    def _running(self, x: Tensor) -> Iterator[Sequence[nn.Module]]:
        """Evaluation mode, no graph, and no half-precision copies of weights left behind in the user's autocast."""
        with ExitStack() as stack:
            modules = modules_of(self.model)
            stack.enter_context(evaluating(self.model, modules))
            stack.enter_context(eager(modules))
            stack.enter_context(explaining())
            # Evaluating puts this back, not a context, which an interrupt could leave to the garbage collector; and not
            # inference mode, whose tensors a user could not train on.
            set_gradients(False)
            if torch.is_autocast_enabled(x.device.type):
                torch.set_autocast_cache_enabled(False)
            yield modules


def _is_behind_components(target: Any) -> bool:
    """Return whether a target is a function of the components, for all images, in closed form."""
    return not isinstance(target, Rowwise | PCATarget) and is_closed_form(target)


def _is_at(backbone: nn.Module, name: str, given: nn.Module | str) -> bool:
    """Return whether a target layer is still where it was found: looking for it takes longer."""
    return name == given if isinstance(given, str) else backbone.get_submodule(name) is given


def _refuse_what_is_around(model: nn.Module) -> None:
    """Reject custom forwards and hooks, which would not be explained."""
    if isinstance(model, PCASVMNet):
        own = type(model).forward is PCASVMNet.forward
        if own and not model._forward_hooks and not model._forward_pre_hooks:
            return
        what = "hooks" if own else "a forward of its own"
        raise ValueError(f"{type(model).__name__} has {what}, which would not be explained: move it into the backbone")
    if any(isinstance(module, PCASVMNet) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} wraps a PCASVMNet: move what is around it into the net's backbone")


def _as_list(targets: Sequence[Target] | Target) -> list[Target]:
    listed = list(targets) if isinstance(targets, list | tuple) else [targets]
    if not listed:
        raise ValueError("targets is empty: pass None for the default, or at least one target")
    return listed  # type: ignore[return-value]
