"""The path from target layers to features: recorded in every call, pulled back in closed form, checked once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.modules import unchanged
from pytorch_grad_cam_pcasvm.path.autograd import AutogradPass, AutogradPath, run_to_features
from pytorch_grad_cam_pcasvm.path.hooks import modes_kept
from pytorch_grad_cam_pcasvm.path.pullback import ClosedFormPass
from pytorch_grad_cam_pcasvm.path.record import Recorder


class Path:
    """The closed-form path from one or more target layers to the features.

    Args:
        backbone: the network.
        layer: dotted name of the feature layer; None: the network's output.
        names: dotted names of the target layers.
        checked: signatures of tapes that were held against autograd; new ones are added.
    """

    def __init__(
        self, backbone: nn.Module, layer: str | None, names: Sequence[str], checked: set[Any] | None = None
    ) -> None:
        self._backbone, self._layer, self._names = backbone, layer, list(names)
        self._checked = set() if checked is None else checked

    def run(self, x: Tensor) -> ClosedFormPass:
        """Run the network once, up to the features; compare steps that were not met before with autograd."""
        met = self._checked or self._examine(x, single=True)
        passed = self.record(x)
        if passed.tape.signature not in met:
            self._examine(x, single=False)
        return passed

    def record(self, x: Tensor) -> ClosedFormPass:
        """Run the network once, up to the features, without a check."""
        recorder = Recorder()
        with modes_kept():
            output = run_to_features(
                self._backbone, self._layer, self._names, x, lambda name, output: recorder.root(name, output), recorder
            )
            recorder.stop()
        return ClosedFormPass(recorder.finish(output), self._names)

    def _examine(self, x: Tensor, *, single: bool) -> set[Any]:
        """Hold the path against autograd on copies of images; return the signatures that were met."""
        images = x
        if single:
            # The liveliest image: a black one may have no gradient to compare.
            index = int(x.flatten(1).float().var(1, correction=0).nan_to_num().argmax())
            images = x[index : index + 1]
        generator = torch.Generator().manual_seed(0)
        met: set[Any] = set()
        for kind in ("images", "noise"):
            random = torch.randn(images.shape, generator=generator) if kind == "noise" else images
            candidate = random.to(images, copy=True)
            recorder = Recorder(named=True)
            try:
                with unchanged(self._backbone):
                    reference = AutogradPath(self._backbone, self._layer, self._names).run(candidate, recorder)
            except (NoClosedFormError, TypeError):
                raise
            except Exception:
                if single and len(x) > 1:
                    return met  # a network that needs more than one image is looked at with the batch
                raise
            signature = recorder.tape.signature
            met.add(signature)
            if self._agrees(ClosedFormPass(recorder.tape, self._names), reference, generator):
                self._checked.add(signature)
                break
        return met

    def _agrees(self, passed: ClosedFormPass, reference: AutogradPass, generator: torch.Generator) -> bool:
        """Refuse a closed form that differs from autograd; return whether there was more to compare than 0."""
        tensors = [leaf for leaf in tree_leaves(passed.output) if isinstance(leaf, Tensor)]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            return False  # the maps will not be finite either
        floats = {value.dtype for value in passed.tape.values}
        eps = max(torch.finfo(dtype).eps for dtype in floats)
        if tensors[0].device.type != "cpu" and torch.float32 in floats:
            eps = max(eps, 2.0**-10)  # TensorFloat-32
        dtype = torch.promote_types(max(floats, key=lambda d: torch.finfo(d).bits), torch.float32)
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
                expected = reference.pullback(seeds, target)
            except (RuntimeError, ValueError):
                if not leads:
                    raise ValueError(_no_way(name, self._layer)) from None
                passed.weights(seeds, target)  # autograd cannot differentiate a layer: its rule is all there is
                continue
            size = expected.double().norm()
            if not leads and bool(size > 0):
                raise NoClosedFormError(
                    f"between {name!r} and the features is a step that cannot be seen (a scripted module, a custom "
                    "operator)",
                    "choose a later target layer",
                    "pass jacobian='auto' to use autograd on the path",
                )
            if not leads:
                raise ValueError(_no_way(name, self._layer))
            pulled, weights = passed.pullback(seeds, target), passed.weights(seeds, target)
            sums = expected.reshape(*weights.shape, -1)
            # Sums can be 0 where their terms are not, as behind a LayerNorm and a mean.
            bound = sums.abs().sum(-1).double().norm()
            tolerance = eps**0.5
            differs = bool((pulled - expected).double().norm() > tolerance * size) or bool(
                (weights - sums.sum(-1)).double().norm() > tolerance * bound
            )
            if differs:
                raise NoClosedFormError(
                    f"the Jacobian of the path from {name!r} differs from autograd's (a step that cannot be seen, as a "
                    "scripted module or an autograd.Function, or a wrong rule or keeps_sums in @register_jacobian?)",
                    "pass jacobian='auto' to use autograd on the path",
                )
            compared = compared and bool(size > 0)
        return compared


def _no_way(name: str, layer: str | None) -> str:
    where = "the network's output" if layer is None else f"the features, {layer!r}"
    return f"the target layer {name!r} does not lead to {where}: choose a layer before them"
