"""The closed form against autograd: of the package nothing is used here but the path that is held to account."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError

Refused = NoClosedFormError
TARGETS = 2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def seeds_for(output: Any, seed: int = 7) -> list[Tensor | None]:
    """Return what K targets give every tensor of the output; None for those without a gradient."""
    return [
        random(TARGETS, *leaf.shape, seed=seed + place).to(leaf.dtype) if leaf.is_floating_point() else None
        for place, leaf in enumerate(tensors(output))
    ]


def inner(seeds: Sequence[Tensor | None], output: Any) -> Tensor:
    """Return what the terms of seeds times the output are, (K, all of them)."""
    pairs = [(seed, leaf) for seed, leaf in zip(seeds, tensors(output), strict=True) if seed is not None]
    return torch.cat([(seed.double() * leaf.double()).reshape(len(seed), -1) for seed, leaf in pairs], 1)


class Reference:
    """A network from its target layer on: a hook puts other activations in the place of the layer's output."""

    def __init__(self, net: nn.Module, name: str, x: Tensor) -> None:
        self.net, self.name, self.x = net, name, x

    @contextmanager
    def _hooked(self, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
        handle = self.net.get_submodule(self.name).register_forward_hook(lambda module, args, out: replace(out))
        try:
            yield
        finally:
            handle.remove()

    def run(self, start: Tensor) -> Any:
        """Return the output from other activations, with one row for all images or a row each."""

        def replace(out: Tensor) -> Tensor:
            return torch.empty_like(out).copy_(start)

        with self._hooked(replace), torch.no_grad():
            return self.net(self.x)

    def gradient(self) -> tuple[Tensor, Any, list[Tensor | None], Tensor]:
        """Return activations, the output, its seeds, and the gradient of K targets, (K, *activations.shape)."""
        kept: list[Tensor] = []

        def replace(out: Tensor) -> Tensor:
            kept.append(out.detach().clone().requires_grad_())
            return kept[0] * 1  # which what follows may write into

        with self._hooked(replace), torch.enable_grad():
            output = self.net(self.x)
        (leaf,) = kept
        seeds = seeds_for(output)
        pairs = [(y, s) for y, s in zip(tensors(output), seeds, strict=True) if s is not None and y.requires_grad]
        found = []
        for target in range(TARGETS):
            # Not torch.autograd.grad, which checkpoints (use_reentrant=True) do not go together with.
            torch.autograd.backward([y for y, _ in pairs], [s[target] for _, s in pairs], retain_graph=True)
            found.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        self.net.zero_grad()
        detached = tree_map(lambda y: y.detach() if isinstance(y, Tensor) else y, output)
        return leaf.detach(), detached, seeds, torch.stack(found)


class Faults(list):
    """What is wrong with a pass, each with its relative error."""

    def compare(self, what: str, found: Any, expected: Any, tolerance: float, size: Any = None) -> None:
        found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
        if found.shape != expected.shape:
            self.append(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
            return
        size = max(float(expected.norm() if size is None else size), 1e-200)
        error = float((found - expected).norm()) / size
        if not error <= tolerance:
            self.append(f"{what}: relative error {error:.1e}")


def faults(
    net: nn.Module,
    name: str,
    x: Tensor,
    starts: Sequence[Tensor] = (),
    *,
    tolerance: float = 1e-9,
    gated: bool = False,
    jumps: bool = False,
    tokens: bool = False,
) -> Faults:
    """Return what differs from autograd: gradient, sums, secants from baselines, and replays.

    Args:
        net: the network.
        name: its target layer.
        x: images.
        starts: activations of baselines, with one row or as many as images.
        tolerance: of relative errors.
        gated: whether something on the way is a constant to gradients, so that baselines may be refused and replays
            are not compared.
        jumps: whether baselines may be refused.
        tokens: whether dimension 1 of the activations is that of tokens.
    """
    found = Faults()
    reference = Reference(net, name, x)
    activations, output, seeds, expected = reference.gradient()
    with torch.no_grad():
        passed = Path(net, None, [name]).run(x)
    for place, (mine, theirs) in enumerate(zip(tensors(passed.output), tensors(output), strict=True)):
        found.compare(f"output {place}", mine, theirs, tolerance)
    found.compare("activations", passed.activations[0], activations, tolerance)
    pullback = passed.pullback(seeds, 0)
    found.compare("gradient", pullback.dense(), expected, tolerance)
    _sums(found, "sums", pullback.sums(), expected, tolerance)
    if tokens:
        for start, length in ((0, 1), (1, expected.shape[2] - 1)):
            given = expected.narrow(2, start, length)
            sums = passed.pullback(seeds, 0).token_sums(1, start, length)
            found.compare("token sums", sums, given.sum(2, keepdim=True), tolerance, given.abs().sum(2).norm())
    for start in starts:
        kind = f"{len(start)} rows" if len(start) > 1 else "1 row"
        y0 = reference.run(start)
        try:
            with torch.no_grad():
                base = passed.run_from({0: start})
                walk = passed.pullback(seeds, 0, base)
                pulled = walk.dense()
        except NoClosedFormError as error:
            if not (gated or jumps):
                found.append(f"baseline of {kind}: refused, {error}")
            continue
        terms = (pulled * (activations - start)).double()
        change = [y - before for y, before in zip(tensors(output), tensors(y0), strict=True)]
        sides = terms.flatten(1), inner(seeds, change)
        roundings = inner(seeds, output).abs() + inner(seeds, y0).abs()
        # Per target, and relative to what may have cancelled.
        for k in range(TARGETS):
            size = sum(side[k].abs().sum() for side in sides) + 1e-4 * roundings[k].sum()
            what = f"secants of target {k} from {kind}"
            found.compare(what, sides[0][k].sum(), sides[1][k].sum(), tolerance, size)
        _sums(found, f"sums of secants from {kind}", passed.pullback(seeds, 0, base).sums(), pulled, tolerance)
        along = passed.pullback(seeds, 0, base).contributions((activations - start).expand_as(activations), (0, 1))
        whole = terms.flatten(3) if terms.dim() > 3 else terms[..., None]
        found.compare(f"contributions from {kind}", along, whole.sum(-1), tolerance, whole.abs().sum(-1).norm())
    for start in () if gated else starts:
        if len(start) == len(x):
            for mine, theirs in zip(tensors(passed.rerun({0: start})), tensors(reference.run(start)), strict=True):
                found.compare("replay", mine, theirs, tolerance)
    return found


def _sums(found: Faults, what: str, sums: Tensor, dense: Tensor, tolerance: float) -> None:
    terms = dense.reshape(*dense.shape[:3], -1)
    found.compare(what, sums, terms.sum(-1), tolerance, terms.abs().sum(-1).norm())


def exact_or_refused(net: nn.Module, name: str, x: Tensor, starts: Sequence[Tensor] = (), **options: Any) -> str | None:
    """Return why a path is refused, or None where all of it is exact; what is wrong fails."""
    try:
        found = faults(net, name, x, starts, **options)
    except NoClosedFormError as error:
        return str(error)
    refused = [fault for fault in found if "refused" in fault]
    wrong = [fault for fault in found if "refused" not in fault]
    assert not wrong, "; ".join(wrong)
    return "; ".join(refused) or None
