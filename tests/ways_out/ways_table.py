"""What a table of messages with ways out is made of, and the messages in the package's source."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pytorch_grad_cam_pcasvm
from pytorch_grad_cam_pcasvm import SignedMaps
from pytorch_grad_cam_pcasvm.network.messages import MESSAGES

PACKAGE = Path(pytorch_grad_cam_pcasvm.__file__).parent
BY_VALUES = "use ContributionCAM, which needs values alone"


@dataclass(frozen=True)
class Row:
    """A message and its ways out.

    Attributes:
        place: a file of the package and a part of the source of the call there that refuses.
        refused: what is refused.
        message: a part of the message.
        ways: for a part of each way out, a function that follows it and returns maps, or what it names; or a reason why
            it cannot be followed here.
        by_values: for an estimator without a gradient, what follows the advice to use its values.
    """

    place: str
    refused: Callable[[], Any]
    message: str
    ways: dict[str, Callable[[], Any] | str] = field(default_factory=dict)
    by_values: Callable[[], Any] | str = "as for other estimators"


def shows(result: Any) -> bool:
    """Return whether something came of it: maps that are not blank, or numbers, or an object."""
    if isinstance(result, SignedMaps):
        return bool(result.maps.isfinite().all()) and bool((result.maps != 0).any())
    if isinstance(result, Tensor | np.ndarray):
        return bool(torch.as_tensor(result).detach().isfinite().all())
    return result is not None


# What raises an error with ways out; _refuse_member is called with the advice.
REFUSING = ("refuse", "_refused", "NoClosedFormError", "NoProgramError", "_refuse_member")
# Messages that have no row, and why.
WITHOUT = {
    "network/site.py: is a layer of Keras in a module of torch": "tests/network/test_keras.py follows it",
    "network/extraction.py: needs all features at once": "tests/network/test_streaming.py follows it",
    "studio/model/fitting.py: explain has no layer by default": "tests/network/test_auto_layers.py follows it",
    "maps/signed_maps.py: these maps have no errors": "tests/methods/test_many_heads.py follows it",
    "studio/export/graph.py: there are no errors to tell": "tests/export/test_sure_export.py follows it",
    "methods/many_heads.py: cannot be exported together": "tests/methods/test_many_heads.py has each head's maps",
    "methods/gaps.py: they are lost in the rounding": "tests/methods/test_gaps.py follows it",
    "methods/gaps.py: rounding decides the head's value": "tests/methods/test_gaps.py has it, which no head here does",
    "methods/gaps.py: the network computes where it cannot be seen": "tests/methods/test_gaps.py has it",
    "studio/model/backbones.py: cannot be downloaded": "tests/cli/test_commands.py follows it",
    "studio/model/file.py: are neither beside": "tests/model/test_model.py follows it",
    "studio/model/writing.py: which no file can hold": "tests/model/test_model.py follows it",
    "studio/model/file.py: there is no model": "tests/model/test_model.py follows it",
    "studio/model/file.py: that was passed as a module": "tests/model/test_model.py follows it",
    "studio/model/file.py: runs code of yours": "tests/model/test_model.py follows it",
    "studio/model/teaching.py: has no means of the training images": "tests/model/test_teaching.py follows it",
    "head/storage.py: which kept one mean a channel": "tests/model/test_training_means.py loads such a file",
    "studio/export/outputs.py: do not add up to their values": "a guard: explain refuses what is known to end there",
    "tape/recorder.py: a function scripted by torch.jit": "tests/tape/test_scripted.py follows it",
    "starts/poles.py: rounding decides what": "tests/starts/test_poles.py follows it",
    "starts/training_mean.py: cannot be made of it": "tests/model/test_training_means.py follows it",
    "studio/model/model.py: becomes an image is not known": "tests/model/test_model.py follows it",
    "studio/model/model.py: take the batches": "tests/model/test_model.py follows it",
    "studio/model/model.py: leave out labels": "tests/model/test_model.py follows it",
    "maps/recombination.py: has no gradient, and the reduction": "tests/methods/test_enumerated.py follows it",
    "studio/cli/refusals.py: --at names a position": "tests/cli/test_dense_commands.py follows it",
    "studio/cli/models.py: start near the mean of the training images": "tests/cli/test_preparation.py follows it",
    "studio/export/outputs.py: whitening divides component": "tests/head/test_alike.py follows it",
    "studio/atlas/explorer/machine.py: take this head's decision apart": "tests/atlas/test_explorer.py follows it",
    "studio/atlas/explorer/machine.py: needs Python": "tests/methods/test_enumerated.py follows it",
    "head/enumerated.py: self.reason, *self.ways_out": "passes on why there is no closed form, which has a row",
    "head/refusals.py: and asked for its values, it fails": "tests/head/test_true_causes.py follows it",
    "head/refusals.py: and takes no features": "tests/head/test_true_causes.py shows it",
    "head/predictor.py: makes NaN or infinity of a row": "tests/head/test_true_causes.py follows it",
    "head/fit_checks.py: a list is taken for the steps": "tests/head/test_true_causes.py follows it",
    "network/loaded.py: makes NaN or infinity of": "tests/network/test_loaded.py shows it",
    "network/loaded.py: has NaN or infinite values, and so": "tests/network/test_loaded.py follows it",
    "head/refusals.py: own interface, which knows no classes": "tests/head/test_boosters.py follows it",
    "head/storage.py: has other values than when it was written": "needs two versions of a library",
    "path/backward.py: {error.reason}": "passes the message of a rule on, each of which has a row",
    "path/backward.py: (advice if self.start is None": "passes a refusal on, with the way out of every path",
    "path/record.py: error.reason, *(other": "passes a refusal on, with the way out of every path",
    "tape/python_calls.py: was optimised for inference": "is for single precision, and here all is in double",
    "path/backward.py: there is no gradient of": "as that of autograd.py",
    "path/autograd.py: autograd has no gradient of": "is for single precision, and here all is in double",
    "network/features.py: flex_attention compiles itself": "scaled_dot_product_attention is in many tests",
    "tape/tape.py: half precision is too coarse": "no step is known here that fails in single precision",
    "head/stack.py: the pullback of": "says that a pullback is wrong, and names no way out",
    "head/estimators/ensembles.py: {type(estimator).__name__} of {type(member).__name__}": "has a row for each call",
    "studio/export/files.py: {runtime} has no {name}": "needs npm and a connection",
    "starts/boundary_path.py: there are no activations of": "as starts/boundary_head.py, which has a row",
    "studio/evaluation/subject.py: the network must be a PCASVMNet": "as atlas/build.py, which has a row",
    "studio/export/explainer.py: was written by a later version": "nobody has written that version yet",
    "studio/export/explainer.py: is a model, but not an explanation": "as the rows of export.onnx, which it names",
    "studio/export/files.py: does not fit into one ONNX file": "needs a network of 2 GB",
}


# Other errors and warnings need a row where they advise a name of the package's interface.
INTERFACE = [
    *sorted(pytorch_grad_cam_pcasvm.__all__, key=len, reverse=True), "explain", "mean_activations", "pool",
    "reshape_transform", "baseline", "jacobian", r"figures\.\w+", r"atlas\.\w+", r"export\.\w+",
]  # fmt: skip
ADVICE = re.compile(
    r"\b(use|pass|call|fit|put|make|give|take|choose|start at|leave|name|write)\b[^:]*\b("
    + "|".join(INTERFACE)
    + r")\b"
)


@dataclass(frozen=True)
class Call:
    file: str
    line: int
    source: str
    needs_row: bool

    def is_at(self, place: str) -> bool:
        file, _, part = place.partition(": ")
        return self.file == file and part in self.source


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Return all nodes of the package's syntax trees, with their files."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


@cache
def calls() -> list[Call]:
    """Return every call in the package that makes an error or a warning, and every message of the table of messages."""
    told = MESSAGES.values()
    collected = [Call("network/messages.py", 0, words, ADVICE.search(words) is not None) for words in told]
    for path, node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and path.name != "errors.py":
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            refuses, other = name in REFUSING, name == "warn" or name.endswith(("Error", "Warning"))
            if refuses or other:
                source = ast.unparse(node)
                needed = refuses or ADVICE.search(source.partition("(")[2]) is not None
                collected.append(Call(path.relative_to(PACKAGE).as_posix(), node.lineno, source, needed))
    return collected


# Messages that docs/troubleshooting.md explains: each is quoted there.
ON_PAGE = [
    "path/backward.py: closed-form rule",
    "head/fit_checks.py: all training features are alike",
    "head/fit_checks.py: was fitted on one class only",
    "head/refusals.py: which it has in scikit-learn",
    "network/messages.py: does not run in a forward pass",
    "path/record.py: does not lead to",
    "studio/data/mask_search.py: by name, but",
    "tape/alias_tracker.py: another thread computes on the path",
    "tape/alias_tracker.py: which may change gradients unseen",
    "tape/alias_tracker.py: works in place on a tensor",
    "tape/overlapping.py: share one place in memory",
    "tape/recorder.py: is an autograd.Function",
    "tape/stem.py: the network draws random numbers",
]
