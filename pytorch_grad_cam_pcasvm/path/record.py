"""The path from target layers to features: recorded in every call, pulled back in closed form."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.features import run_to_features
from pytorch_grad_cam_pcasvm.network.inputs import map_input
from pytorch_grad_cam_pcasvm.network.modules import list_modules, unchanged
from pytorch_grad_cam_pcasvm.path.backward import no_rule
from pytorch_grad_cam_pcasvm.path.passes import ClosedFormPass, refuse_start
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.log import LOGGER, log_since, start_clock
from pytorch_grad_cam_pcasvm.runtime.rollback import Hooks, Rollback, hooked, set_gradients, without_inference
from pytorch_grad_cam_pcasvm.runtime.torch_private import find_function_mode, push_dispatch_mode, tree_tensors
from pytorch_grad_cam_pcasvm.tape.alias_tracker import unseen_write
from pytorch_grad_cam_pcasvm.tape.python_calls import PythonCallMode
from pytorch_grad_cam_pcasvm.tape.recorder import Recorder
from pytorch_grad_cam_pcasvm.tape.stem import MustRecordAll, OtherThreads, RandomDraws, UnrecordedPart
from pytorch_grad_cam_pcasvm.tape.tape import Tape, frozen, has_gradient


class Path:
    """The closed-form path from one or more target layers to the features.

    Args:
        backbone: the network.
        layer: dotted name of the feature layer, or the source of the features; None: the network's output.
        names: dotted names of the target layers.
        modules: all modules of the network, if known.
        attention: ``"frozen"``: the weights of attention are constants of every pass; ``"exact"``: they are not.
        needs: what for; ``"gradient"``; ``"replay"``: passes are run again from other activations, for which all
            numbers on the path are kept; ``"difference"``: that, and steps in half precision are done again in single.
    """

    def __init__(
        self,
        backbone: nn.Module,
        layer: Any,
        names: Sequence[str],
        modules: Sequence[nn.Module] | None = None,
        attention: str = "exact",
        needs: str = "replay",
    ) -> None:
        self._attention, self._single, self._replays = attention, needs == "difference", needs != "gradient"
        self._keeps_all = self._replays or attention == "frozen"
        self._backbone, self._layer, self._names = backbone, layer, list(names)
        self._modules = list_modules(backbone) if modules is None else modules

    def run(self, x: Tensor) -> ClosedFormPass:
        """Run the network once, up to the features; refuse a path that has no closed form."""
        try:
            passed = self.record(x)
            for name in self._names:
                self._check_target(passed.tape, name)
        except NoClosedFormError as error:
            raise self._with_autograd(error) from error.__cause__
        tape = passed.tape
        if self._attention == "frozen":
            tape = frozen(tape)
        if self._single:
            tape = tape.in_single()
        if tape is not passed.tape:
            # The network itself knows no frozen attention, and stays in half precision.
            passed = ClosedFormPass(tape, self._names, exact=passed)
        passed.check = lambda exact, starts: self._check_baseline(x, exact, starts)
        return passed

    def _check_target(self, tape: Tape, name: str) -> None:
        """Refuse a target layer that does not lead to the features, or leads there by a step without a rule."""
        steps, values = tape.following(tape.roots[name])
        for step in reversed(tape.leading(steps, tape.outputs)):
            if step.rule is None:
                raise no_rule(tape, step)
        if any(output in values for output in tape.outputs):
            return
        where = "the network's output" if self._layer is None else f"the features, {self._layer!r}"
        error = NoClosedFormError(f"the target layer {name!r} does not lead to {where}", "choose a layer before them")
        cut = tape.cut(name)
        if cut is not None:
            module = tape.name_module(cut.where)
            step_name = cut.name + (f" of {module!r}" if module else "")
            error = NoClosedFormError(
                f"no gradient leads from the target layer {name!r} to {where}: {step_name} passes none on",
                "choose a layer behind that",
            )
        error._autograd_helps = False
        error.tape = str(tape)
        raise error

    def _with_autograd(self, error: NoClosedFormError) -> NoClosedFormError:
        """Return a refusal with autograd as a way out, if it is one; it knows gradients, and no secants."""
        if not error._autograd_helps:
            return error
        way: str = Fix("pass jacobian='auto' to use autograd on the path", "jacobian")
        if self._replays:
            way = "use a gradient method, as ClosedFormGradCAM(net, [layer], jacobian='auto')"
        full = NoClosedFormError(error.reason, *(other for other in error.ways_out if not isinstance(other, Fix)), way)
        full.tape = error.tape
        return full

    def record(self, x: Tensor) -> ClosedFormPass:
        """Run the network once, up to the features; the pass is of the whole network, whatever the options."""
        passed, draws = self._record(x)
        draws.check_again(lambda: self._record(x)[1])
        return passed

    def _record(self, x: Tensor, *, watches_stem: bool = False) -> tuple[ClosedFormPass, RandomDraws]:
        """Run the network once with an unwatched stem; if that is unclear, again with a watched one."""
        began = start_clock()
        recorder = Recorder(keeps_all=self._keeps_all, halves=self._single)
        recorder.tape.network = self._backbone
        calls = PythonCallMode(recorder)
        x = map_input(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, x)

        def reached(name: str, output: Tensor) -> Tensor:
            first = not recorder.tape.roots
            if first and not watches_stem:
                stem.end()
            following = recorder.root(name, output)
            if first:  # behind the bookkeeping, which need not be seen
                if not watches_stem:
                    push_dispatch_mode(recorder)
                calls.__enter__()
            recorder.enabled = True
            set_gradients(True)  # if the network has switched them off here, the end of that region puts that back
            return following

        try:
            with without_inference(), Rollback() as rollback:
                rollback.note(recorder.clear)
                rollback.note_torch()
                rollback.go_below_autograd()
                if watches_stem:
                    push_dispatch_mode(recorder)
                else:
                    stem = UnrecordedPart()
                hooks = Hooks(rollback)
                calls.watch(self._modules, rollback, hooks)
                threads = OtherThreads(rollback) if self._replays else None
                copied = recorder.tracker.copy_tensor
                output = run_to_features(self._backbone, self._layer, self._names, x, reached, hooks, copied)
                if not recorder.tape.roots:  # the network has caught what ended the stem
                    raise MustRecordAll
                recorder.tape.branches |= threads is not None and threads.seen
                if find_function_mode() is not calls:
                    raise NoClosedFormError(
                        "the network leaves a TorchFunctionMode between the target layer and the features",
                        "enter it before the network runs, as in with mode: cam.explain(images)",
                    )
                calls.__exit__(None, None, None)
                passed = ClosedFormPass(recorder.finish(output), self._names)
        except MustRecordAll:
            if watches_stem:
                raise
        except Exception as error:
            if watches_stem or recorder.tape.roots:
                explained = self._explain_failure(recorder, error)
                if explained is error:
                    raise
                raise explained from error
        else:
            log_since(began, "run of the network: recorded %d steps behind %s", len(passed.tape.steps), self._names)
            return passed, recorder.draws
        LOGGER.debug("the part before %s has to be recorded, too: the network runs again", self._names)
        return self._record(x, watches_stem=True)

    def _explain_failure(self, recorder: Recorder, error: Exception) -> Exception:
        """Return the refusal that a failure of a recorded network means, or the failure itself."""
        if isinstance(error, NoClosedFormError):
            error.tape = f"{recorder.tape}\n      <-- {error.reason}".lstrip("\n")
        elif isinstance(error, RuntimeError) and "a leaf Variable that requires grad" in str(error):
            return unseen_write("an autograd.Function that marks its argument dirty, or another thread,")
        elif isinstance(error, RuntimeError) and "native::_fw_primal" in str(error):
            return NoClosedFormError(
                "the network linearises a function of its own (torch.func.linearize), whose steps cannot be seen",
                "use torch.func.jvp, or the function itself",
            )
        return error

    def _check_baseline(self, x: Tensor, passed: ClosedFormPass, starts: Mapping[int, Tensor]) -> None:
        """Refuse a path if the network takes other steps at a start.

        A tape has no control flow: only the network can tell which branches it takes at the start.

        Args:
            x: images of the pass, shape (N, ...).
            passed: the pass.
            starts: activations of the start, with one row for all images or N, by position of their target layer.

        Raises:
            NoClosedFormError: the network's output there differs.
        """
        layers = [self._names[target] for target in starts]
        rows = max(len(passed.activations[target]) for target in starts)
        starts = {target: at.expand(rows, *at.shape[1:]) if len(at) == 1 else at for target, at in starts.items()}
        expected = list(filter(has_gradient, tree_tensors(passed.rerun(starts))))
        try:
            actual = self._at_baseline(x, starts)
        except Exception as error:
            names = " and ".join(map(repr, layers))
            raise NoClosedFormError(
                f"the network cannot be run from the baseline of {names} ({error})", "choose another baseline"
            ) from error
        if len(actual) != len(expected) or not all(map(_close, actual, expected)):
            refuse_start(layers, finite=all(bool(leaf.isfinite().all()) for leaf in actual))

    def network_at(self, x: Tensor, name: str, activations: Tensor) -> list[Tensor]:
        """Return the network's floating-point outputs for other activations of a target layer."""
        return self._at_baseline(x, {self._names.index(name): activations})

    def _at_baseline(self, x: Tensor, starts: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the network's floating-point outputs for other activations of its target layers."""
        began = start_clock()
        by_name = {self._names[target]: activations for target, activations in starts.items()}

        def replaced(name: str, output: Tensor) -> Tensor:
            return torch.empty_like(output).copy_(by_name[name])

        with unchanged(self._backbone), torch.no_grad(), hooked() as hooks:
            output = run_to_features(self._backbone, self._layer, list(by_name), x, replaced, hooks)
        log_since(began, "run of the network: from a start at %s", list(by_name))
        return [tensor.detach() for tensor in tree_tensors(output) if has_gradient(tensor)]


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two outputs are the same but for rounding."""
    if actual.shape != expected.shape:
        return False
    error, size = (actual - expected).double().norm(), expected.double().norm()
    return bool(error <= torch.finfo(expected.dtype).eps ** 0.5 * size)
