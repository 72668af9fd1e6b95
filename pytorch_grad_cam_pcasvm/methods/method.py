"""Method: the base of all methods, from the network's one forward pass to signed maps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch
from pytorch_grad_cam.base_cam import BaseCAM
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head.stage import Sampling, split_sampling
from pytorch_grad_cam_pcasvm.maps.recombination import compute_result
from pytorch_grad_cam_pcasvm.maps.results import MethodResult, average_samples, find_nu, share_remainders
from pytorch_grad_cam_pcasvm.maps.signed_maps import Jacobians, SignedMaps
from pytorch_grad_cam_pcasvm.methods.check import (
    OF_SUMS,
    CheckReport,
    Comparison,
    check_contributions,
    check_gradient,
    check_sums,
)
from pytorch_grad_cam_pcasvm.methods.standard_errors import add_errors
from pytorch_grad_cam_pcasvm.methods.warn_once import WarnOnce, warn_of_blind_tokens
from pytorch_grad_cam_pcasvm.network.features import flatten
from pytorch_grad_cam_pcasvm.network.grid import rows_of
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, check_rows, prepare_images
from pytorch_grad_cam_pcasvm.network.layout import lay_out_maps
from pytorch_grad_cam_pcasvm.network.modules import (
    eager,
    evaluation_mode,
    find_network,
    list_modules,
    refuse_parallel,
)
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet, network_output
from pytorch_grad_cam_pcasvm.network.outputs import PlainOutput
from pytorch_grad_cam_pcasvm.network.site import Site, TargetLayers, layout_by, refuse_repeated
from pytorch_grad_cam_pcasvm.network.tiles import TiledNet
from pytorch_grad_cam_pcasvm.network.tiling import look_inside
from pytorch_grad_cam_pcasvm.path.autograd import AutogradPath
from pytorch_grad_cam_pcasvm.path.blocks import BlockPass
from pytorch_grad_cam_pcasvm.path.passes import Pass, need_tape
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.runtime.columns import join_columns
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import AutogradFallbackWarning, NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.log import log_since, start_clock
from pytorch_grad_cam_pcasvm.runtime.rollback import set_gradients
from pytorch_grad_cam_pcasvm.starts.run import Run, StartPlan, adds_components
from pytorch_grad_cam_pcasvm.tape.recorder import explain_unseen
from pytorch_grad_cam_pcasvm.targets import Target, every_class, every_component
from pytorch_grad_cam_pcasvm.targets.questions import Questions, list_default_targets, list_targets, resolve_targets

# Where torch keeps quantised modules, which have no parameters.
_QUANTISED = "torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized"


class Method(BaseCAM):
    """What all methods share: it runs the network, splits targets into chunks, and scales maps."""

    # What the path must keep: "gradient"; "replay": all that it computes, to be run again from other activations;
    # "difference": that, in single precision at least, as half keeps too little of a difference between outputs.
    needs = "gradient"
    # "components": a decision map is a weighted sum of component maps; "heads": also a sum over attention heads.
    sums = ""
    # What maps add up to: "": nothing; "value": the target's value.
    adds_up = ""
    # Whether maps of resampled heads come from the same pass.
    has_errors = True
    # The first target whose errors are told; -1 is the last.
    first_with_errors = 0
    # How many of a network's last blocks "auto" takes.
    blocks = 1
    _starts: Any = None

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
        network = find_network(model)
        if isinstance(network, PCASVMNet):
            find_network(network.backbone)  # which may be another since
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
        model = network
        refuse_parallel(model)
        refuse_wrappers_and_hooks(model)
        self.jacobian = jacobian
        self.attention = attention
        self.max_bytes = max_bytes
        self._target_layers = TargetLayers(target_layers, self.blocks)
        self._warnings = WarnOnce()
        if next(model.parameters(), None) is None:
            quantised = any(type(module).__module__.startswith(_QUANTISED) for module in model.modules())
            way = ": explain the network as it was before it was quantised" if quantised else ""
            raise ValueError(
                f"{type(model).__name__} has no parameters, which pytorch-grad-cam needs to find its device{way}"
            )
        site = self._target_layers.of(model)
        with evaluation_mode(model):
            # The host's classes between add nothing that is needed here.
            # Of no layers: nothing here needs the host's hooks, which copy every activation to the CPU.
            BaseCAM.__init__(self, model, [], reshape_transform)
            self.target_layers = site.modules

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
    ) -> SignedMaps | list[SignedMaps]: ...

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
        began = start_clock()
        x = prepare_images(self.model, input_tensor)
        branches = isinstance(x, Inputs) and len(self._target_layers) > 1
        if heads or not branches:
            self._refuse_layers(joined=not heads)
        with self._running(x) as modules:
            if branches:
                refuse_repeated(self._target_layers.of(self.model, x))
            run = self._run_network(x, modules)
            asked = list_default_targets(run.output) if targets is None else list_targets(targets)
            questions = resolve_targets(asked, run.output)
            results, plans = self._explain_layers(run, self._sample(run, questions))
            results = [average_samples(result, len(questions)) for result in self._join(run, results)]
            if heads:
                results = [replace(results[0], heads=self._explain_heads(run, questions))]
            signed = self._scale(run, results, asked, plans)
            if self.has_errors and len(signed) == 1:
                signed = [add_errors(self, run, questions, signed[0])]
            blind = warn_of_blind_tokens(run, 0, signed[0].nu)
        self._warnings.of_results(signed, blind=blind)
        log_since(began, "%s: %d images, %d targets explained", type(self).__name__, run.count, len(questions))
        if run.head is not None:
            run.output.head_trace.saved.clear()  # what was kept for the pullback is not needed any more
        return signed if branches else signed[0]

    def check(self, input_tensor: Any, targets: Sequence[Target] | Target | None = None) -> CheckReport:
        """Compare Jacobians and values behind explanations of these images with autograd and the network itself.

        For each target layer, the gradients of the targets with autograd's; and the sum of contributions from zero
        activations with the difference between the network's outputs. Of maps that add up, also their sums with the
        values, from the start that is used. It takes a few more passes, and is meant for
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
        x = prepare_images(self.model, input_tensor)
        with self._running(x) as modules:
            site = self._target_layers.of(self.model, x)
            path = Path(*site.parts, modules)
            recorded, reference = path.run(x), AutogradPath(*site.parts).run(x)
            layouts = [lay_out_maps(part.shape) for part in recorded.activations]  # in the network's own shapes
            output = network_output(self.model, recorded.output, x.shape[0], x)
            run = Run(self.model, x, recorded, output, site.layers, layouts, path.run)
            if targets is None:
                targets = list_default_targets(run.output)
                if run.head is not None and run.head.enumerated is not None:  # the path is the same for components
                    targets = every_component(run.output) or targets
            targets = list_targets(targets)
            output_gradients = run.cotangents(run.output_gradients(targets))
            comparisons = []
            for target, name in enumerate(site.layers):
                comparisons.append(check_gradient(name, recorded, reference, output_gradients, target))
                at = partial(path.network_at, x, name)
                comparisons.append(check_contributions(name, recorded, output_gradients, target, at))
        if self.adds_up == "value":
            comparisons.append(self._check_sums(x, targets))
        return CheckReport(tuple(comparisons))

    def _check_sums(self, x: Any, targets: Sequence[Target]) -> Comparison:
        """Return how far maps that add up are from it, at the start that is used."""
        name = ", ".join(self._target_layers.of(self.model, x).layers)
        try:
            maps = self.explain(x, targets)
        except ValueError as error:  # among them the refusal of a path, and of a target without a boundary
            return Comparison(name, OF_SUMS, float("nan"), 0.0, f"are not available: {error}")
        return check_sums(name, [maps] if isinstance(maps, SignedMaps) else maps)

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
        x = prepare_images(self.model, input_tensor)
        self._refuse_layers()
        with self._running(x) as modules:
            run = self._run_network(x, modules)
            activations = run.activations(0)
            of_components, _ = _compute_jacobian(run, every_component(run.output), self._split_chunks)
            of_margins, log_scale = _compute_jacobian(run, every_class(run.output), self._split_chunks)
        return Jacobians(of_components, of_margins, log_scale, activations, run.public_output)

    def _explain_layers(self, run: Run, questions: Questions) -> tuple[list[MethodResult], list[StartPlan | None]]:
        """Return the maps of K targets at every target layer, and the plans of their starts."""
        plans = self._plan_starts(run, questions)
        return [self._explain_layer(run, layer, questions, plan) for layer, plan in enumerate(plans)], plans

    def _explain_layer(self, run: Run, layer: int, questions: Questions, plan: StartPlan | None) -> MethodResult:
        """Return the maps of K targets at one layer."""
        parts, order = list[MethodResult](), list[int]()
        for target_indices, find_start in [(range(len(questions)), None)] if plan is None else plan.groups:
            starts = {} if find_start is None else {layer: find_start()}
            some = questions.take_targets(target_indices)
            parts.append(self._explain_start(replace(run, starts=starts), layer, some))
            order += target_indices
            del starts  # free this start's memory before the next one is computed
        return _add_tiles(run, layer, join_columns(parts, order))

    def _sample(self, run: Run, questions: Questions) -> Questions:
        """Return questions once for each group of permutations, if a head without a gradient needs these."""
        if self.sampling is None or run.head is None or questions.are_components:
            return questions
        return questions.sample(split_sampling(run.head.enumerated, self.sampling))

    def _join(self, run: Run, results: Sequence[MethodResult]) -> Sequence[MethodResult]:
        """Return the maps of several layers as one; in branches each on its own grid."""
        if len(results) == 1:
            return results
        if not run.has_branches:
            return [self.join_layers(results)]
        return share_remainders(results) if self.adds_up else results

    def _explain_start(self, run: Run, layer: int, questions: Questions) -> MethodResult:
        """Return the maps of K targets that start together: sums of component maps, where these are fewer."""
        components = every_component(run.output) if self.sums and adds_components(run, layer, questions) else ()
        together = 0 < len(components) < len(questions)
        asked = resolve_targets(components, run.output) if together else questions
        parts = [self.compute(run, layer, chunk) for chunk in self._split_chunks(asked, run)]
        result = join_columns(parts, range(len(asked)))
        if not together or run.head is None:  # whose components they are
            return result
        return compute_result(result, run.secants(questions, layer, run.head.component_position or 0))

    def _explain_heads(self, run: Run, questions: Questions) -> Tensor:
        """Return the maps of every head of the first attention, (N, K, heads, H, W); they add up to the maps."""
        if self.sums != "heads":
            raise ValueError(
                f"heads of {type(self).__name__} do not add up: use ClosedFormGradCAM, ClosedFormHiResCAM or "
                "ContributionCAM"
            )
        apart, columns = replace(run, recorded=need_tape(run.recorded, "heads").whole.with_heads()), []
        for some in (questions.take_targets([k]) for k in range(len(questions))):
            (plan,) = self._plan_starts(apart, some)
            columns.append(self._explain_layer(apart, 0, some, plan).maps)
        return torch.stack(columns, 1)

    def _plan_starts(self, run: Run, questions: Questions) -> list[StartPlan | None]:
        """Return where the secants of K targets start at each target layer; None for gradients."""
        return [None] * len(run.layers)

    @property
    def sampling(self) -> Sampling | None:
        """The permutations that stand for all coalitions of a head without a gradient; None: there are none."""
        return None

    def join_layers(self, results: Sequence[MethodResult]) -> MethodResult:
        """Return the maps of several target layers as one."""
        raise NotImplementedError

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        """Compute the maps of K targets that fit into memory together; each method defines this.

        Args:
            run: the network's run on N images.
            layer: index of the target layer.
            targets: what K targets ask; ``targets[k]`` is a target.

        Returns:
            Their maps, not yet scaled.
        """
        raise NotImplementedError(f"{type(self).__name__} is not a method itself: use ClosedFormGradCAM or another")

    def terms(self, run: Run, layer: int, questions: Questions, result: MethodResult) -> Tensor:
        """Return the terms, one per channel, that sum to the maps of one column of questions, (N, T, H, W)."""
        weights, activations = result.weights[:, 0], run.activations(layer)
        return weights.unflatten(1, (-1, *[1] * (activations.dim() - 2))) * activations

    def _run_network(self, x: Tensor, modules: Sequence[nn.Module]) -> Run:
        """Run the network once."""
        if isinstance(self.model, PCASVMNet):
            refuse_wrappers_and_hooks(self.model)  # hooks may have come since
        site = self._target_layers.of(self.model, x)
        self.target_layers = site.modules
        path = Path(*site.parts, modules, self.attention, self.needs)
        recorded: Pass | None = None
        if self.jacobian != "autograd":
            try:
                recorded = self._run_blocks(x, site, path) if self._takes_blocks(x, site) else path.run(x)
            except NoClosedFormError as error:
                if self.jacobian == "closed_form" or self.needs != "gradient" or is_traced():
                    raise
                if not error._autograd_helps:
                    raise
                self._warnings.warn_once(AutogradFallbackWarning, f"using autograd on the path: {error.reason}")
        return self._make_run(x, site, recorded or AutogradPath(*site.parts).run(x), path.run)

    def _takes_blocks(self, x: Tensor, site: Site) -> bool:
        """Return whether tiles are too many to be recorded at once, and can be in blocks."""
        if not isinstance(site.backbone, TiledNet) or self.needs == "replay" or is_traced():
            return False
        return len(x) * site.backbone.find_tiling(x).count > site.backbone.block

    def _run_blocks(self, x: Tensor, site: Site, path: Path) -> Pass:
        """Run a network on tiles in blocks."""
        assert isinstance(site.backbone, TiledNet)
        net, names = site.backbone.net, [look_inside(site.backbone, name, x)[1] for name in site.layers]
        inner = Path(net, site.backbone.find_source(x), names, list_modules(net), self.attention, self.needs)
        return BlockPass(site.backbone, x, path, inner, site.layers)

    def _make_run(self, x: Tensor, site: Site, recorded: Pass, record: Callable[[Tensor], Pass]) -> Run:
        """Return the run of a pass of the network."""
        layouts = [
            layout_by(self.reshape_transform, site.backbone, name, x, activations, self._warnings.once)
            for name, activations in zip(site.layers, recorded.activations, strict=True)
        ]
        if isinstance(self.model, PCASVMNet):
            dense = site.source.dense
            features = recorded.output if dense else flatten(recorded.output)
            if can_sync(x):
                self.model.head.check(rows_of(features)[:2] if dense else features[:2])
            if not dense:
                check_rows(features, x)
            output: Any = self.model.head_run(features, x)
        else:
            output = PlainOutput(recorded.output, len(x))
        return Run(self.model, x, recorded, output, site.layers, layouts, record)

    def _scale(
        self,
        run: Run,
        results: Sequence[MethodResult],
        targets: Sequence[Any],
        plans: Sequence[StartPlan | None],
    ) -> list[SignedMaps]:
        """Return the maps of K targets, one for each branch, with their scale."""
        sizes = [find_nu(result.maps, result.opposite) for result in results]
        if results[0].baseline_values is not None:  # they add up, and so have one scale
            sizes = [torch.stack(sizes).amax(0)] * len(results)
        # Of several layers, each has a start of its own.
        together = all(plan is None or not plan.components_apart for plan in plans)
        linear = bool(self.sums) and together and (len(run.layers) == 1 or isinstance(run.images, Inputs))
        neutral = len(plans) == 1 and plans[0] is not None and plans[0].is_neutral
        columns: list[dict[str, Any]] = [result.columns for result in results]
        return [
            SignedMaps(
                **of_branch,
                nu=nu,
                targets=targets,
                output=run.public_output,
                linear=linear,
                neutral=neutral,
                layers=tuple(run.layers[branch : branch + 1] if run.has_branches else run.layers),
                _warnings=None if can_sync(nu) else self._warnings,
            )
            for branch, (of_branch, nu) in enumerate(zip(columns, sizes, strict=True))
        ]

    def _split_chunks(self, questions: Questions, run: Run) -> Iterator[Questions]:
        """Yield the questions that fit into memory together."""
        if self.max_bytes is None:
            yield questions
            return
        needed = run.recorded.bytes_per_target()
        if isinstance(self.model, PCASVMNet):
            needed = max(needed, self.model.head.bytes_per_target(run.count))
        size = max(1, self.max_bytes // needed)
        for start in range(0, len(questions), size):
            yield questions[start : start + size]

    def _refuse_layers(self, *, joined: bool = False) -> None:
        """Refuse several target layers; ``joined``: unless the method makes one map of theirs."""
        if len(self._target_layers) > 1:
            name = type(self).__name__
            raise ValueError(
                f"{name} takes one target layer in explain and jacobians: make one {name} for each layer, or use "
                "ContributionCAM, whose maps of several layers are one"
            )

    @contextmanager
    def _running(self, x: Tensor) -> Iterator[Sequence[nn.Module]]:
        """Evaluation mode, no graph, and no half-precision copies of weights left behind in the user's autocast."""
        with ExitStack() as stack:
            modules = list_modules(self.model)
            explain_unseen(stack.enter_context(evaluation_mode(self.model, modules)))
            stack.enter_context(eager(modules))
            # Evaluating puts this back, not a context, which an interrupt could leave to the garbage collector; and not
            # inference mode, whose tensors a user could not train on.
            set_gradients(False)
            if torch.is_autocast_enabled(x.device.type):
                torch.set_autocast_cache_enabled(False)
            yield modules


def _compute_jacobian(
    run: Run, targets: Sequence[Target], split: Callable[[Questions, Run], Iterator[Questions]]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of K targets at the first layer, (N, T, K, H W), and their log scales, (N, K)."""
    if not targets:
        return None, None
    parts, log_scales = [], []
    for chunk in split(resolve_targets(targets, run.output), run):
        output_gradients = run.output_gradients(chunk)
        parts.append(run.gradients(output_gradients, 0).dense().flatten(3).permute(1, 2, 0, 3))
        log_scales.append(output_gradients.log_scale)
    return torch.cat(parts, 2), torch.cat(log_scales, 1)


def _add_tiles(run: Run, layer: int, result: MethodResult) -> MethodResult:
    """Return maps of tiles that are side by side as one on their common grid, where they are added."""
    add = run.layouts[layer].add_tiles
    opposite, errors = (
        None if columns is None else add(columns)
        for columns in (result.opposite, result.standard_errors)  # errors of a sum are these at most
    )
    return replace(result, maps=add(result.maps), opposite=opposite, standard_errors=errors)


def refuse_wrappers_and_hooks(model: nn.Module) -> None:
    """Reject custom forwards and hooks, which would not be explained."""
    if isinstance(model, PCASVMNet):
        own = type(model).forward is PCASVMNet.forward
        if own and not model._forward_hooks and not model._forward_pre_hooks:
            return
        custom = "hooks" if own else "a forward of its own"
        raise ValueError(
            f"{type(model).__name__} has {custom}, which would not be explained: move it into the backbone"
        )
    if any(isinstance(module, PCASVMNet) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} wraps a PCASVMNet: move what is around it into the net's backbone")
