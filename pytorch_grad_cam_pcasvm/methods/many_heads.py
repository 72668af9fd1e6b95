"""Many heads on one pass: the maps of R heads that take the same features, each head's targets as further columns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pytorch_grad_cam_pcasvm.maps.results import average_samples
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.methods.heads_run import explain_together
from pytorch_grad_cam_pcasvm.methods.perturbation import PerturbationCAM
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, prepare_images
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import NoProgramError
from pytorch_grad_cam_pcasvm.starts.run import Run
from pytorch_grad_cam_pcasvm.targets import Target
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
        ValueError: there are no heads; they take other numbers of features, or know other classes; some have a gradient
            and others none, without ``own_starts``; there are several
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
        if own_starts or isinstance(cam, PerturbationCAM):
            signed = [_explain_apart(cam, *of_head) for of_head in zip(runs, questions, listed, strict=True)]
        else:
            if len({net.head.enumerated is None for net in nets}) > 1:
                raise ValueError(
                    "some heads have a gradient and others, such as forests, have none: let each start by itself, "
                    "own_starts=True, or explain the ones and the others by calls of their own"
                )
            sampled = [cam._sample(runs[0], some) for some in questions]
            results, plans = explain_together(cam, runs[0], sampled[0], runs, sampled)
            # Where another head's starts are, decisions of this one are not 0.
            others = [plan and replace(plan, boundary=None) for plan in plans]
            signed = [
                cam._scale(run, [average_samples(result, len(some))], some, others if number else plans)[0]
                for number, (run, result, some) in enumerate(zip(runs, results, listed, strict=True))
            ]
    cam._warnings.of_results(signed[:1], blind=False)
    return signed


def _explain_apart(cam: ClosedFormCAM, run: Run, questions: Questions, targets: Sequence[Any]) -> SignedMaps:
    """Return the maps of one head, from its own starts, on a pass that is shared."""
    results, plans = cam._explain_layers(run, cam._sample(run, questions))
    (joined,) = cam._join(run, results)
    return cam._scale(run, [average_samples(joined, len(questions))], targets, plans)[0]


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
