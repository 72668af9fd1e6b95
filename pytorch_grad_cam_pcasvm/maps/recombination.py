"""The reduction identity: maps of any target of any head from the component maps, without the network."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.stage import USUAL, Sampling, split_sampling
from pytorch_grad_cam_pcasvm.maps.results import MethodResult, average_samples, find_nu, shift_baseline
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.runtime.columns import join_columns
from pytorch_grad_cam_pcasvm.runtime.errors import BaselineWarning, warn
from pytorch_grad_cam_pcasvm.starts.boundary_head import Boundary
from pytorch_grad_cam_pcasvm.starts.jumps import find_deviations
from pytorch_grad_cam_pcasvm.targets import HotellingTarget, PCATarget, ResidualTarget, SVMTarget, Target
from pytorch_grad_cam_pcasvm.targets.output_gradients import OutputGradients, differentiate_targets
from pytorch_grad_cam_pcasvm.targets.places import list_positions, take_region
from pytorch_grad_cam_pcasvm.targets.questions import resolve_targets
from pytorch_grad_cam_pcasvm.targets.target import PlacedTarget


def recombined(components: SignedMaps, head: Any, targets: Sequence[Target] | Target | None = None) -> SignedMaps:
    """Compute the maps of targets from component maps: ``S = sum_b g_b P_b``, with g_b = d target / d p_b.

    The result equals that of ``explain``, but the network is not needed, so this also works for heads that are fitted
    later on the same components. For maps that add up, g is the secant from the components of the baseline to those of
    the image. With the neutral baseline, decisions start on their boundaries if features are means over positions
    (``SignedMaps.neutral``). Otherwise only ``explain`` can find the boundaries; here, decisions start at the baseline
    of the components, where their value is ``baseline_values``.

    Args:
        components: maps of every component, in order, as from ``cam.explain(x)``; any maps of decisions after these are
            ignored. Of dense features, all at one position, ``PCATarget(b, at=(row, column))``. The method must be
            linear in the gradient (Grad-CAM, HiResCAM, XGrad-CAM), or be ContributionCAM.
        head: a fitted estimator, pipeline or :class:`Head`, either with the reduction that the components came from, or
            fitted on the components themselves, ``net(images).components``: what the PCA gives. If the head that they
            came from has steps between its PCA and its classifier, such as a second scaler, give all steps, as
            ``[pipeline[:-1], other]``.
        targets: K targets, each for all images, except ResidualTarget, which needs more than components; None: the
            predicted class.

    Returns:
        Signed maps of shape (N, K, H, W). Their output is from the part of the head after the components.

    Raises:
        TypeError: the maps are not a SignedMaps.
        ValueError: the maps are not those of all components, or their method cannot be recombined; the head takes
            another number of components, has another reduction, or may have been fitted on other numbers; or a target
            does not fit the head.

    Example:
        >>> other = LogisticRegression().fit(pipeline[:-1].transform(features), labels)
        >>> recombined(cam.explain(images), other, SVMTarget("cat")).maps.shape
        torch.Size([2, 1, 8, 8])
    """
    if not isinstance(components, SignedMaps):
        raise TypeError(f"expected the SignedMaps of all components, got {type(components).__name__}")
    places = [target.at if isinstance(target, PCATarget) else None for target in components.targets]
    same = [target == PCATarget(k, at=places[0]) for k, target in enumerate(components.targets)]
    count = same.index(False) if False in same else len(same)
    if not count:
        raise ValueError("the maps are not those of components 0, 1, ...: make them with cam.explain(x)")
    if not components.linear:
        if components.baseline_values is not None:
            raise ValueError(
                "maps of these decisions are not sums of component maps, which start at different activations: explain "
                "the decisions, cam.explain(x, [SVMTarget()]), or make component maps of one layer that all start at "
                "its mean, baseline='mean'"
            )
        raise ValueError(
            "maps of this method are not sums of component maps: use ClosedFormGradCAM, ClosedFormHiResCAM, "
            "ClosedFormXGradCAM or ContributionCAM"
        )
    components, listed = at_place(components[:, :count], targets, places[0])
    reduction, tail = _split_head(Head.of(head), count, components)
    if tail is not None:
        tail = copy.deepcopy(tail).to(components.values.device)  # a module moves in place, and this is the user's
    with torch.no_grad():
        return _recombined(components, reduction, tail, listed)


def at_place(components: SignedMaps, targets: Any, place: Any) -> tuple[SignedMaps, list[Any]]:
    """Return component maps and targets without their place, which is one position of dense features, if any.

    Raises:
        ValueError: there are no targets, or some are of another place; or the place is not one position.
    """
    listed = [SVMTarget()] if targets is None else list(targets) if isinstance(targets, list | tuple) else [targets]
    if not listed:
        raise ValueError("targets is empty: pass None for the predicted class, or at least one target")
    dense = components.output.dim() > 2 if isinstance(components.output, Tensor) else False
    if not dense:
        return components, listed
    if not isinstance(place, tuple):
        raise ValueError(
            "maps of decisions are sums of component maps of one position alone, since each position has its own "
            "gradient: make them with PCATarget(b, at=(row, column)) for every b, or explain the decisions, "
            "cam.explain(x, [SVMTarget(at=...)])"
        )
    for target in listed:
        if getattr(target, "at", None) not in (None, place):
            raise ValueError(f"{target} is of another place than the component maps, which are those of {place}")
    unplaced = [PCATarget(b) for b in range(len(components.targets))]
    output = components.output
    if isinstance(output, HeadOutput):
        rows = take_region(output, list_positions(place, output.grid))
        output = HeadOutput.of(rows.head, rows.head_trace)
    return replace(components, targets=unplaced, output=output), [
        target.unplaced if isinstance(target, PlacedTarget) else target for target in listed
    ]


def _recombined(components: SignedMaps, reduction: Head | None, tail: Head | None, targets: list[Any]) -> SignedMaps:
    boundary = _boundary_of(components, tail, reduction)
    samplings = split_sampling(None if tail is None else tail.enumerated, USUAL.sampling)
    sampled = [
        compute_result(components, _differentiate_components(components, reduction, tail, targets, boundary, sampling))
        for sampling in samplings
    ]
    order = range(len(samplings) * len(targets))
    result = average_samples(join_columns(sampled, order), len(targets))
    output = _make_output(tail, 0, components.values)
    columns: dict[str, Any] = result.columns
    return SignedMaps(
        **columns,
        nu=find_nu(result.maps),
        targets=targets,
        output=components.output if output is None else output,
        linear=True,
        neutral=components.neutral,
        layers=components.layers,
        _between=components.between,
        _width=components.width,
    )


def compute_result(components: Any, output_gradients: OutputGradients) -> MethodResult:
    """Return the maps of targets by their gradients, or secants, with respect to the components.

    Args:
        components: the SignedMaps of all components, or what a method made of them.
        output_gradients: the gradients.
    """
    maps, weights, remainder, log_scale = combined(components, output_gradients.by_image, output_gradients.excess)
    if output_gradients.remainder is not None:
        left = (output_gradients.remainder * (-log_scale).exp()).to(maps)
        remainder = left if remainder is None else remainder + left
    return MethodResult(
        maps, weights, output_gradients.values, output_gradients.log_scale + log_scale,
        baseline_values=output_gradients.baseline_values, remainder=remainder, effects=output_gradients.effects,
    )  # fmt: skip


def _differentiate_components(
    components: SignedMaps,
    reduction: Head | None,
    tail: Head | None,
    targets: list[Any],
    boundary: Boundary | None,
    sampling: Sampling = USUAL.sampling,
) -> OutputGradients:
    """Return the gradients, or secants, of K targets with respect to the components."""
    values, count = components.values, len(components.targets)
    at_baseline = components.baseline_values
    grads = values.new_zeros(len(values), len(targets), count)
    names = ["log_scale", "values"]
    names += [] if at_baseline is None else ["baseline_values"]
    names += ["excess"] if components.neutral else []
    names += [] if tail is None or tail.enumerated is None else ["remainder", "effects"]
    columns = {name: values.new_zeros(len(values), len(targets)) for name in names}
    for k, target in enumerate(targets):
        if isinstance(target, PCATarget):
            if target.component >= count:
                raise ValueError(f"{target}: there are {count} components, numbered from 0")
            sign = 1.0 if target.sign == "+" else -1.0
            grads[:, k, target.component] = sign
            columns["values"][:, k] = sign * values[:, target.component]
            if at_baseline is not None:
                columns["baseline_values"][:, k] = sign * at_baseline[:, target.component]
        elif isinstance(target, ResidualTarget):
            raise ValueError(
                f"{target} is not a function of the components: compute its maps with the network, "
                "cam.explain(x, [target])"
            )
    of_all = [k for k, target in enumerate(targets) if isinstance(target, HotellingTarget)]
    behind = [k for k, target in enumerate(targets) if not isinstance(target, PCATarget | HotellingTarget)]
    if behind and tail is None:
        raise ValueError(f"{targets[behind[0]]} needs a head with an SVM, but this one has none: use PCATarget")
    if of_all and reduction is None:
        why = "neither the maps nor the head contain the PCA that the components came from"
        raise ValueError(f"{targets[of_all[0]]}: {why}: pass the whole pipeline as the head")
    for chosen, part, position in ((of_all, reduction, 1), (behind, tail, 0)):
        if chosen:
            here, start = (_make_output(part, position, p) for p in (values, at_baseline))
            asked = resolve_targets([targets[k] for k in chosen], here).sample([sampling])
            if boundary is not None and chosen is behind:
                output_gradients = boundary.differentiate(here, asked, values.dtype)
            else:
                output_gradients = differentiate_targets(here, asked, values.dtype, start)
            grads[:, chosen] = output_gradients.by_image
            for name, column in columns.items():
                part = getattr(output_gradients, name)
                if part is not None:
                    column[:, chosen] = part
    return OutputGradients([grads.transpose(0, 1)], **columns)


def _boundary_of(components: SignedMaps, tail: Head | None, reduction: Head | None) -> Boundary | None:
    """Return the boundary of targets behind components, near the components of the baseline.

    None: they start at these, or there is no such part.
    """
    if tail is None or not components.neutral:
        return None
    assert components.baseline_values is not None
    deviations = None if reduction is None else reduction.stages[-1].output_deviations
    if tail.enumerated is not None and deviations is None and find_deviations(tail) is None:
        warn(
            f"{tail.enumerated.predictor.name} has no gradient, and the reduction that the components came from is not "
            "known, as it is in no file of maps, so where it is undecided cannot be found: maps start at the baseline "
            "of the components, and add up to the value minus that there (baseline_values): pass the whole pipeline",
            BaselineWarning,
        )
    return Boundary(tail, components.baseline_values[0], deviations)


def decision_steps(components: SignedMaps, head: Any, target: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return how a decision is composed of components, ``value = value at p0 + exp(log_scale) sum_b g_b (p_b - p0_b)``.

    Args:
        components: maps that add up, of all components.
        head: as for :func:`recombined`.
        target: the decision.

    Returns:
        The secants g, shape (N, B), the baseline's components p0, (N, B), and log_scale, (N,).

    Raises:
        ValueError: the maps, the head and the target do not fit, as for :func:`recombined`.

    Example:
        >>> components = ContributionCAM(net, ["layer2"]).explain(images, [PCATarget(b) for b in range(3)])
        >>> g, p0, log_scale = decision_steps(components, net.head, SVMTarget("cat", versus="dog"))
        >>> g.shape, p0.shape, log_scale.shape
        (torch.Size([2, 3]), torch.Size([2, 3]), torch.Size([2]))
    """
    reduction, tail = _split_head(Head.of(head), len(components.targets), components)
    if tail is not None:
        tail = copy.deepcopy(tail).to(components.values.device)
    with torch.no_grad():
        boundary, origin = _boundary_of(components, tail, reduction), components.baseline_values
        output_gradients = _differentiate_components(components, reduction, tail, [target], boundary)
        if boundary is not None:
            questions = resolve_targets([target], _make_output(tail, 0, components.values))
            ((_, boundaries, boundary_index),) = questions.group_boundaries(tail, components.values.device)
            origin = boundary.at(boundaries, boundary_index).features
    assert origin is not None
    return output_gradients.by_image[:, 0], origin.expand_as(components.values), output_gradients.log_scale[:, 0]


def combined(
    components: Any, grads: Tensor, excess: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return maps, weights and remainders of K targets by their gradients (N, K, B) at B components, and their scale.

    Args:
        components: the SignedMaps of all components, or what a method made of them.
        grads: secants, if the maps are made of these.
        excess: by how much the maps would add up to too much, (N, K), as the components' baseline is another one.
    """
    # Factors that were taken out of single components, as behind a KernelPCA.
    size = torch.where(grads == 0, -torch.inf, components.log_scale.unsqueeze(1))
    largest_size = size.amax(-1)
    largest_size = torch.where(largest_size.isfinite(), largest_size, 0.0)
    grads = grads * (size - largest_size.unsqueeze(-1)).exp()

    def sum_components(tensor: Tensor) -> Tensor:
        return (grads.to(tensor.dtype) @ tensor.flatten(2)).unflatten(2, tensor.shape[2:])

    remainder = components.remainder
    remainder = None if remainder is None else sum_components(remainder.unsqueeze(-1))[..., 0]
    maps = sum_components(components.maps)
    if excess is not None:
        maps = shift_baseline(maps, excess * (-largest_size).exp())
    return maps, sum_components(components.weights), remainder, largest_size


def _make_output(part: Head | None, position: int, components: Tensor | None) -> HeadOutput | None:
    """Return the output of a part of a head, whose values at a position are components."""
    return None if part is None or components is None else HeadOutput.of(part, part.resume(position, components))


def _split_head(head: Head, count: int, components: SignedMaps) -> tuple[Head | None, Head | None]:
    """Return the reduction that components came from, if it is known, and the part of a head behind them."""
    made_by = components.output.head if isinstance(components.output, HeadOutput) else None
    position = behind_components(head, count, made_by, width := components.width)
    if not position:
        refuse_between(components.between)
    source = head if position else made_by
    stage = None if source is None or not source.component_position else source.stages[source.component_position - 1]
    reduction = Head([stage]) if stage is not None and stage.n_outputs == count else None
    return reduction, take_tail(head, count, made_by, width)


def take_tail(head: Head, count: int, made_by: Head | None, width: int | None) -> Head | None:
    """Return the part of a head after components that another head computed; None if there is none.

    Args:
        head: a head with the same reduction, or one that was fitted on the components.
        count: number of components.
        made_by: the head that they came from, or None.
        width: number of features that the components were made of; None: not known.

    Raises:
        ValueError: the head takes another number of components, or reduces features in another way; or it may take
            features or components.
    """
    position = behind_components(head, count, made_by, width)
    if not position and made_by is not None:
        refuse_between(made_by.between)
    stages = list(head.stages)[position:]
    tail = Head(stages) if stages else None
    if tail is not None and tail.n_features not in (None, count):
        raise ValueError(f"the head takes {tail.n_features} components, but there are maps of {count}")
    return tail


def refuse_between(names: Sequence[str]) -> None:
    """Refuse a classifier alone, if the head that the components came from has steps between them and its own."""
    if names:
        raise ValueError(
            "the head that the components came from has steps between them and its classifier "
            f"({', '.join(names)}), so it is not known which numbers this classifier was fitted on: pass it with the "
            "steps before it, as [pipeline[:-1], other] if it was fitted on pipeline[:-1].transform(features), or as "
            "[pipeline[:2], other], where pipeline[:2] ends with the PCA, if it was fitted on the components themselves"
        )


def behind_components(head: Head, count: int, made_by: Head | None, width: int | None) -> int:
    """Return the position of components in a head, or 0 if it was fitted on them; see :func:`take_tail`."""
    if head.n_features == count and made_by is None and width in (None, count) and head.component_position:
        raise ValueError(
            f"the head takes {count} numbers, features or components, of which there are as many, or the file of these "
            "maps does not tell: pass the steps behind the PCA alone, as pipeline[2:], or explain the images again, "
            "and recombine those maps"
        )
    if head.n_features == count != width:  # such a head may have a reduction of its own, of components
        return 0
    position = head.component_position or 0
    if made_by is not None and not head.starts_as(made_by, position):
        raise ValueError(
            "the head reduces features differently from the head that the components came from: fit its classifier "
            "on the components, as in SVC().fit(components, labels)"
        )
    return position


def decision_shares(output: Any, decision: Any) -> Tensor:
    """Return the share of each component b in a decision, ``g_b p_b``, shape (N, B).

    ``g`` is the secant of the decision from the mean of the training set, where all components are 0, to the image.

    Args:
        output: what a head with a reduction and a decision computed, not of dense features.
        decision: a target that is linear in the head's values.

    Example:
        >>> decision_shares(net(images), SVMTarget("cat", versus="dog")).shape
        torch.Size([2, 3])
    """
    components, head = output.components, output.head
    behind = Head(list(head.stages)[head.component_position :])
    with torch.no_grad():
        here, mean = (
            HeadOutput.of(behind, behind.resume(0, p)) for p in (components, torch.zeros_like(components[:1]))
        )
        slopes = differentiate_targets(here, [decision], components.dtype, mean).by_image[:, 0]
        return slopes * components
