"""The path from target layers to features: recorded in every call, pulled back in closed form, checked once."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

from pytorch_grad_cam_pcasvm.autodiff.autograd import AutogradPass, AutogradPath, run_to_features
from pytorch_grad_cam_pcasvm.autodiff.backward import advice
from pytorch_grad_cam_pcasvm.autodiff.closed_form import ClosedFormPass
from pytorch_grad_cam_pcasvm.autodiff.recorder import Recorder, modes_kept
from pytorch_grad_cam_pcasvm.autodiff.tape import Tape, frozen, has_gradient
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.model.inputs import each, images_of
from pytorch_grad_cam_pcasvm.model.modules import modules_of, unchanged


class Path:
    """The closed-form path from one or more target layers to the features.

    Args:
        backbone: the network.
        layer: dotted name of the feature layer; None: the network's output.
        names: dotted names of the target layers.
        checked: signatures of passes that were compared with autograd, and kinds of baselines that were compared with
            the network; new ones are added.
        modules: all modules of the network, if known.
        attention: ``"frozen"``: the weights of attention are constants of every pass; ``"exact"``: they are not.
        single: whether steps in half precision are done again in single, as differences between outputs need it.
        replays: whether passes are run again from other activations, for which all numbers on the path are kept.
    """

    def __init__(
        self,
        backbone: nn.Module,
        layer: str | None,
        names: Sequence[str],
        checked: set[Any] | None = None,
        modules: Sequence[nn.Module] | None = None,
        attention: str = "exact",
        single: bool = False,
        replays: bool = True,
    ) -> None:
        self._attention, self._single = attention, single
        self._keeps_all = replays or single or attention == "frozen"
        self._backbone, self._layer, self._names = backbone, layer, list(names)
        self._checked = set() if checked is None else checked
        self._agreed: set[Any] = set()  # in this call
        self._modules = modules_of(backbone) if modules is None else modules

    def run(self, x: Tensor) -> ClosedFormPass:
        """Run the network once, up to the features; compare steps not seen before with autograd."""
        self._first: tuple[Tensor, Tensor, Any] | None = None
        beforehand = not self._checked
        if beforehand:
            self._check(x, rows=2)  # what is refused has run on copies only
        passed = self.record(x)
        if self._first is not None:
            self._refuse_random(*self._first, passed.output)
        signature = self._signature(passed.tape)
        if not beforehand and signature not in self._checked:
            self._check(x, rows=2)
        known = signature in self._checked or signature in self._agreed
        if not known and signature not in self._check(x, rows=len(x)):
            hooked = next((type(module).__name__ for module in self._hooked()), None)
            reason = "the network takes different steps in every run"
            raise NoClosedFormError(*advice(f"{hooked} has a backward hook on the path" if hooked else reason))
        self._first = None
        tape = passed.tape
        if self._attention == "frozen":
            tape = frozen(tape)
        if self._single:
            tape = tape.in_single()
        if tape is not passed.tape:
            # The network itself knows no frozen attention, and stays in half precision.
            passed = ClosedFormPass(tape, self._names, exact=passed)
        passed.check, passed.checked = partial(self.check_baseline, x), self._checked
        return passed

    def record(self, x: Tensor) -> ClosedFormPass:
        """Run the network once, up to the features, without a check."""
        recorder = Recorder(keeps_all=self._keeps_all)
        with modes_kept():
            output = run_to_features(
                self._backbone, self._layer, self._names, x, recorder.root, recorder, self._modules
            )
            recorder.stop()
        return ClosedFormPass(recorder.finish(output), self._names)

    def check_baseline(self, x: Tensor, passed: ClosedFormPass, starts: Mapping[int, Tensor]) -> None:
        """Refuse a path whose steps are not those that the network takes at a baseline.

        A tape has no control flow: only the network can tell which branches it takes at the baseline.

        Args:
            x: images of the pass, shape (N, ...).
            passed: the pass.
            starts: activations of the baseline, with one row for all images or N, by position of their target layer.

        Raises:
            NoClosedFormError: the network's output there differs.
        """
        names = " and ".join(repr(self._names[target]) for target in starts)
        rows = max(len(passed.activations[target]) for target in starts)
        starts = {target: at.expand(rows, *at.shape[1:]) if len(at) == 1 else at for target, at in starts.items()}
        by_image = all(leaf.shape[:1] == (rows,) for leaf in (x, *passed.tape.leaves))
        alone = by_image and rows > 1 and not passed.tape.branches  # a branch may have gone another way for each
        for count in (1, rows) if alone else (rows,):
            first = {target: activations[:count] for target, activations in starts.items()}
            expected = [leaf for leaf in tree_leaves(passed.rerun(first)) if _is_float(leaf)]
            try:
                given = self._at_baseline(x[:count] if by_image else x, first)
            except Exception as error:
                if count < rows:
                    continue  # a network that takes no single image is looked at with all of them
                raise NoClosedFormError(
                    f"the network cannot be run from the baseline of {names} ({error})",
                    "choose another baseline",
                ) from error
            if len(given) == len(expected) and all(map(_close, given, expected)):
                return
            if [leaf.shape for leaf in given] == [leaf.shape for leaf in expected]:
                break  # one image alone has other numbers than among others
        finite = all(bool(leaf.isfinite().all()) for leaf in given)
        raise NoClosedFormError(
            f"what follows the target layer {names} is another function at the baseline: the network branches on "
            "values there (an if on activations, sign, round, detach, a part without gradients), or mixes images"
            if finite
            else f"the network does not return finite numbers at the baseline of {names}",
            "choose another baseline",
            "choose a later target layer",
            "use a gradient method such as ClosedFormGradCAM",
        )

    def _at_baseline(self, x: Tensor, starts: Mapping[int, Tensor]) -> list[Tensor]:
        """Return what the network gives with other activations of target layers, its floating-point tensors."""
        given = {self._names[target]: activations for target, activations in starts.items()}

        def replaced(name: str, output: Tensor) -> Tensor:
            return torch.empty_like(output).copy_(given[name])

        with unchanged(self._backbone), torch.no_grad():
            output = run_to_features(self._backbone, self._layer, list(given), x, replaced, modules=self._modules)
        return [leaf.detach() for leaf in tree_leaves(output) if _is_float(leaf)]

    def _signature(self, tape: Tape) -> Any:
        """Return what a pass is known by: its steps, and the modules and functions that took them."""
        # Hooks, ours among them, are called from torch's own module code in another way; tracers are around modules.
        codes = frozenset(code for code in tape.codes.values() if not code.co_filename.startswith(_AROUND_MODULES))
        return tape.signature, codes, tuple(map(type, self._modules)), tuple(map(id, self._hooked()))

    def _hooked(self) -> list[nn.Module]:
        """Return the modules whose gradient a backward hook may change: all of them if there is a global one."""
        if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
            return list(self._modules)
        return [module for module in self._modules if module._backward_hooks or module._backward_pre_hooks]

    def _check(self, x: Tensor, rows: int) -> set[Any]:
        """Compare the path with autograd on copies of so many images; return the signatures that were met."""
        # Two, because one image hides what images have to do with one another, and some of torch's own gradients are
        # wrong for one; the liveliest, because a black one may have no gradient.
        generator = torch.Generator().manual_seed(0)
        noise = each(partial(_noise_like, rows, generator), x)
        order = images_of(x)[0].flatten(1).float().var(1, correction=0).nan_to_num().argsort(descending=True)
        chosen = order[:rows] if rows < len(x) else torch.arange(len(x), device=x.device)
        images = each(lambda given, other: torch.cat([given[chosen], other])[:rows], x, noise)
        met: set[Any] = set()
        for candidate in (images, noise):
            recorder = Recorder(named=True, keeps_all=self._keeps_all)
            try:
                with unchanged(self._backbone):
                    torch.manual_seed(1)  # not the random numbers of the pass itself
                    reference = AutogradPath(self._backbone, self._layer, self._names).run(candidate, recorder)
            except (NoClosedFormError, TypeError):
                raise
            except Exception:
                if rows == len(x):
                    raise
                return met  # a network that takes no two images is looked at with those that it gets
            signature = self._signature(recorder.tape)
            if not met:
                self._first = chosen, images, reference.output
            met.add(signature)
            if self._agrees(ClosedFormPass(recorder.tape, self._names), reference, generator):
                self._agreed.add(signature)
                # What these do to autograd's gradient may change, unseen, from call to call.
                if not self._hooked() and not _own_gradients(recorder.tape):
                    self._checked.add(signature)
                break
        return met

    def _refuse_random(self, chosen: Tensor, images: Tensor, before: Any, now: Any) -> None:
        """Refuse a network that gave other numbers for the images of the check than it gives now, and does so again."""
        pairs = zip(filter(_is_float, tree_leaves(before)), filter(_is_float, tree_leaves(now)), strict=False)
        rows = [(then[: len(chosen)], leaf[chosen]) for then, leaf in pairs if then.shape[:1] == images.shape[:1]]
        if all(_close(leaf, then) for then, leaf in rows if bool(then.isfinite().all())):
            return
        with unchanged(self._backbone), torch.no_grad():  # it may as well mix the images of a batch
            torch.manual_seed(2)
            again = run_to_features(self._backbone, self._layer, [], images, None, modules=self._modules)
        pairs = zip(filter(_is_float, tree_leaves(before)), filter(_is_float, tree_leaves(again)), strict=False)
        if not all(_close(leaf, then) for then, leaf in pairs):
            raise ValueError(
                f"{type(self._backbone).__name__} returns different numbers in every run (dropout that is always on, "
                "a random mask or sampling?), so there is nothing to explain: switch that off"
            )

    def _agrees(self, passed: ClosedFormPass, reference: AutogradPass, generator: torch.Generator) -> bool:
        """Refuse a closed form that differs from autograd; return whether there was more to compare than 0."""
        tensors = [leaf for leaf in tree_leaves(passed.output) if isinstance(leaf, Tensor)]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            return False  # the maps will not be finite either
        floats = {value.dtype for value in passed.tape.values if has_gradient(value)}
        eps = max(torch.finfo(dtype).eps for dtype in floats)
        if tensors[0].device.type != "cpu" and torch.float32 in floats:
            eps = max(eps, 2.0**-10)  # TensorFloat-32
        real = {dtype for dtype in floats if dtype.is_floating_point} | {torch.float32}
        dtype = max(real, key=lambda each: torch.finfo(each).bits)
        seeds = [
            torch.randn((2, *tensor.shape), generator=generator, dtype=torch.float64).to(tensor.device, dtype)
            if tensor.is_floating_point()
            else None
            for tensor in tensors
        ]
        compared = True
        for target, name in enumerate(self._names):
            leads = passed.tape.leads(name)
            try:
                expected = reference.pullback(seeds, target).dense()
            except RuntimeError as error:
                if "not implemented" not in str(error) or not leads:
                    reason = str(error).partition(":")[0]
                    raise NoClosedFormError(f"autograd cannot follow the path from {name!r} ({reason})") from error
                passed.pullback(seeds, target).sums()  # the registered rule of a layer is all there is
                continue
            size = expected.double().norm()
            if not leads and bool(size > 0):
                raise NoClosedFormError(
                    *advice(
                        f"between {name!r} and the features is a step that cannot be seen (a scripted function, a "
                        "custom operator)",
                        "choose a later target layer",
                    )
                )
            if not leads:
                where = "the network's output" if self._layer is None else f"the features, {self._layer!r}"
                raise ValueError(f"the target layer {name!r} does not lead to {where}: choose a layer before them")
            pulled, weights = passed.pullback(seeds, target).dense(), passed.pullback(seeds, target).sums()
            sums = expected.reshape(*weights.shape, -1)
            # Sums can be 0 where their terms are not, as behind a LayerNorm and a mean.
            bound = sums.abs().sum(-1).double().norm()
            tolerance = max(eps**0.5, 1e-7)  # torch computes some of its own gradients with constants in float32
            differs = (
                bool((pulled - expected).double().norm() > tolerance * size)
                or bool((weights - sums.sum(-1)).double().norm() > tolerance * bound)
                or (bool(size.isfinite()) and not bool(pulled.isfinite().all()))  # a rule reads what it does not need
            )
            if differs:
                raise NoClosedFormError(
                    *advice(
                        f"the Jacobian of the path from {name!r} differs from autograd's (a step that cannot be "
                        "seen, such as a scripted function, an autograd.Function or a backward hook, or a wrong rule, "
                        "keeps_sums or needs in @register_jacobian?)"
                    )
                )
            compared = compared and bool(size > 0)
        return compared


_AROUND_MODULES = nn.Module.__call__.__code__.co_filename, os.path.dirname(torch.fx.__file__)


def _own_gradients(tape: Tape) -> bool:
    """Return whether an ``autograd.Function`` took steps, whose gradient is whatever it says."""
    kinds = [torch.autograd.Function]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
    codes = {getattr(kind.forward, "__code__", None) for kind in kinds}
    return None in codes or not codes.isdisjoint(tape.codes.values())


def _noise_like(rows: int, generator: torch.Generator, x: Tensor) -> Tensor:
    """Return noise in place of an input; numbers of words, or of categories, are those of its own rows."""
    if x.is_floating_point():
        return torch.randn((rows, *x.shape[1:]), generator=generator).to(x)
    return x[torch.arange(rows, device=x.device) % len(x)]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and has_gradient(leaf)


def _close(given: Tensor, expected: Tensor) -> bool:
    """Return whether two outputs are the same but for rounding."""
    if given.shape != expected.shape:
        return False
    error, size = (given - expected).double().norm(), expected.double().norm()
    return bool(error <= torch.finfo(expected.dtype).eps ** 0.5 * size)
