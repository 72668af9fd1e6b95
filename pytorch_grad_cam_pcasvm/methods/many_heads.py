"""Many heads on one pass: the maps of R heads that take the same features, each head's targets as further columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from pytorch_grad_cam_pcasvm.maps.results import MethodResult, average_samples
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.methods.perturbation import PerturbationCAM
from pytorch_grad_cam_pcasvm.methods.run import Asked, Run, Start, StartPlan
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, prepare_images
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.path.autograd import Pass
from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import NoProgramError
from pytorch_grad_cam_pcasvm.targets import Target
from pytorch_grad_cam_pcasvm.targets.output_gradients import join_gradients
from pytorch_grad_cam_pcasvm.targets.questions import Questions, list_default_targets, list_targets, resolve_targets


def explain_heads(
    cam: ClosedFormCAM,
    input_tensor: Any,
    heads: Sequence[Any],
    targets: Sequence[Target] | Target | None = None,
    *,
    own_starts: bool = False,
) -> list[SignedMaps]:
    """Return the signed maps of several heads on the same features, from one forward pass of the network.

    Such heads are refits of one pipeline on other photos, or other classifiers. The path from the target layer to the
    features is the same for all, so the targets of all heads pass it together.

    Args:
        cam: a method for a :class:`.PCASVMNet`, whose backbone, layer and pool are those of all heads.
        input_tensor: images, as for ``cam.explain``.
        heads: R fitted estimators, pipelines or :class:`.Head`, all fitted on features of this network, for the same
            classes.
        targets: K targets, each for all images and heads; None: every component, then the class that each head
            predicts.
        own_starts: start the contributions of each head where that head is undecided, as ``cam.explain`` of its own
            network does. Otherwise all start where the first head is undecided; ``baseline_values`` tell each head's
            values there. That takes one pass for all, and the maps of heads can be compared position by position.

    Returns:
        R SignedMaps of shape (N, K, H, W).

    Raises:
        TypeError: the method's network is no PCASVMNet, or what is given is no head.
        NoProgramError: it is called while a program is traced: export each head's maps by themselves.
        NoClosedFormError: the path has a step without a rule, or a head no closed form.
        ValueError: there are no heads; they take other numbers of features, or know other classes; there are several
            inputs with a target layer in each; or as for ``cam.explain``.

    Example:
        >>> refits = [clone(pipeline).fit(features[part], labels[part]) for part in (slice(0, 11), slice(1, 12))]
        >>> one, other = explain_heads(cam, images, refits, [PCATarget(0), SVMTarget("cat", versus="dog")])
        >>> one.maps.shape
        torch.Size([2, 2, 8, 8])
    """
    if is_traced():
        raise NoProgramError("the maps of many heads cannot be exported together: export the maps of each head")
    if not isinstance(cam.model, PCASVMNet):
        raise TypeError(f"explain_heads needs a method for a PCASVMNet, got one for {type(cam.model).__name__}")
    x = prepare_images(cam.model, input_tensor)
    if isinstance(x, Inputs) and len(cam._target_layers) > 1:
        raise ValueError("explain_heads takes one grid of maps: make a method for the target layer of one input")
    cam._refuse_layers(joined=True)
    nets = _make_nets(cam.model, heads)
    with cam._running(x) as modules:
        run = cam._run_network(x, modules)
        runs = [replace(run, model=net, output=net.head_run(run.features, x)) for net in nets]
        listed = [list_default_targets(one.output) if targets is None else list_targets(targets) for one in runs]
        questions = [resolve_targets(some, one.output) for some, one in zip(listed, runs, strict=True)]
        return explain_questions(cam, runs, questions, listed, own_starts=own_starts)


def explain_questions(
    cam: ClosedFormCAM,
    runs: Sequence[Run],
    questions: Sequence[Questions],
    targets: Sequence[Sequence[Any]],
    *,
    own_starts: bool,
) -> list[SignedMaps]:
    """Return the maps of questions to each of several heads, whose runs share a pass."""
    groups = cam._split_sampling(runs[0], questions[0])
    if own_starts or isinstance(cam, PerturbationCAM):
        found = [cam._explain_layers(run, asked, groups) for run, asked in zip(runs, questions, strict=True)]
        results = [_join_samples(cam, run, samples) for run, (samples, _) in zip(runs, found, strict=True)]
        plans = [of_head for _, of_head in found]
    else:
        own = cam._plan_starts(runs[0], questions[0])
        shared = [None if plan is None else _share_plan(plan, runs, len(questions[0])) for plan in own]
        together = HeadsRun(**{entry.name: getattr(runs[0], entry.name) for entry in fields(Run)} | {"runs": runs})
        columns = [replace(column, head=number) for number, asked in enumerate(questions) for column in asked.columns]
        whole = Questions([target for asked in questions for target in asked.targets], columns)
        of_layers = [cam._explain_layer(together, layer, whole, plan, groups) for layer, plan in enumerate(shared)]
        (joined,) = _join_samples(cam, runs[0], [list(samples) for samples in zip(*of_layers, strict=True)])
        results = [[_take_head(joined, number, len(questions[0]))] for number in range(len(runs))]
        # Where another head's starts are, decisions of this one are not 0.
        plans = [own] + [[plan and replace(plan, boundary=None) for plan in own]] * (len(runs) - 1)
    signed = [
        cam._scale(run, result, listed, plan)[0]
        for run, result, listed, plan in zip(runs, results, targets, plans, strict=True)
    ]
    cam._warnings.of_results(signed[:1], blind=False)
    return signed


def _make_nets(model: PCASVMNet, heads: Sequence[Any]) -> list[PCASVMNet]:
    """Return a network for each head, and refuse heads that do not belong together."""
    nets = [model.with_head(head) for head in heads]
    if not nets:
        raise ValueError("there are no heads to explain: give a list of fitted estimators")
    known = [None if net.head.classes_ is None else net.head.classes_.tolist() for net in nets]
    for number, classes in enumerate(known):
        if classes != known[0]:
            raise ValueError(
                f"head {number} knows the classes {classes}, the first one {known[0]}: fit all heads on the same "
                "classes"
            )
    return nets


def _join_samples(cam: ClosedFormCAM, run: Run, samples: Sequence[Sequence[MethodResult]]) -> list[MethodResult]:
    """Return the maps of several layers as one, and those of several samples as their mean."""
    joined = [cam._join(run, of_layers) for of_layers in samples]
    return [average_samples(of_samples) for of_samples in zip(*joined, strict=True)]


def _take_head(result: MethodResult, number: int, count: int) -> MethodResult:
    """Return the columns of one head, of K each."""
    return result.map_columns(lambda tensor: tensor[:, number * count : (number + 1) * count])


@dataclass(frozen=True, eq=False)
class HeadsStart(Start):
    """A start that several heads share.

    Attributes:
        of_heads: the start as each head sees it.
    """

    of_heads: Sequence[Start] = ()


@dataclass(frozen=True, eq=False)
class HeadsRun(Run):
    """A run whose questions are those of several heads.

    Attributes:
        runs: the run of each head on the same pass.
    """

    runs: Sequence[Run] = ()

    @property
    def has_one_head(self) -> bool:
        """Whether all questions are asked of one head: they are not."""
        return False

    def output_gradients(self, targets: Sequence[Any], until: int = 0) -> Asked:
        """Return the gradients of the questions of all heads."""
        return self._ask(targets, lambda number, some: self.runs[number].output_gradients(some, until))

    def secants(self, targets: Sequence[Any], layer: int, until: int = 0) -> Asked:
        """Return the secants of the questions of all heads from the start that they share."""
        start = self.starts.get(layer)

        def ask(number: int, some: Questions) -> Asked:
            own = {layer: start.of_heads[number]} if isinstance(start, HeadsStart) else {}
            return replace(self.runs[number], starts=own, sampling=self.sampling).secants(some, layer, until)

        return self._ask(targets, ask, start)

    def _ask(self, questions: Any, ask: Callable[[int, Questions], Asked], start: Start | None = None) -> Asked:
        """Return what questions ask, each of its own head, as one table."""
        of_heads: dict[int, list[int]] = {}
        for k, column in enumerate(questions.columns):
            of_heads.setdefault(column.head, []).append(k)
        parts = [ask(number, questions.take_targets(indices)) for number, indices in of_heads.items()]
        joined = join_gradients(parts, [k for indices in of_heads.values() for k in indices])
        numbers: dict[str, Any] = joined.columns
        return Asked(joined.grads, **numbers, start=start)

    def with_pass(self, recorded: Pass) -> "HeadsRun":
        """Return the explanation of another pass of the same images."""
        runs = [run.with_pass(recorded) for run in self.runs]
        return replace(self, recorded=recorded, output=runs[0].output, starts={}, runs=runs)


def _share_plan(plan: StartPlan, runs: Sequence[Run], count: int) -> StartPlan:
    """Return the plan of one head's K targets as that of the same targets of several heads."""
    groups = [
        ([number * count + k for number in range(len(runs)) for k in indices], partial(_share_start, find, runs))
        for indices, find in plan.groups
    ]
    return StartPlan(groups, None, plan.components_apart)


def _share_start(find: Callable[[], Start], runs: Sequence[Run]) -> HeadsStart:
    """Return a start of the first head as all heads see it."""
    start = find()
    of_heads = [start]
    for run in runs[1:]:
        boundary = None if start.boundary is None else start.boundary.lend(run.output.head)
        output = run.output_of(start.path.output) if start.path is not None else boundary and boundary.start
        of_heads.append(replace(start, output=output, boundary=boundary))
    return HeadsStart(start.path, start.output, start.activations, start.difference, start.boundary, of_heads)
