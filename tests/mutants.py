"""Do the tests notice when the mathematics is wrong? A script, not a test: ``python tests/mutants.py``.

Every mutant has one thing changed: a sign, a term or factor left out, an axis, a comparison, a minimum for a maximum, a
condition negated. The tests that run the changed function are run until one fails. Those that survive are printed; each
must be in EQUIVALENT, with the reason why no test can kill it. Mutants with a reason take longest, as no test stops
them: they are run with ``--reasons`` alone, and must survive.

Nothing is written into the tree. A process that has collected a file of tests is forked for every mutant, and gives the
package's functions their changed code. What runs at import cannot be changed so: it is run once more, and so is what
ends otherwise than EQUIVALENT says. There a process that has imported torch and its like, but not the package, is
forked, and gives the changed module to its importers.

The exit status is 1 where a survivor has no reason, or where a mutant with a reason dies or does not exist.
"""

import argparse
import ast
import atexit
import copy
import gc
import importlib
import importlib.abc
import importlib.util
import inspect
import math
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pytorch_grad_cam_pcasvm"

# File: the tests that belong to it, the quickest first.
TESTS = {
    "path/passes.py": (
        "operations facts branches secants_path recorder relevance baselines boundary_path boundary refused ways_out"
    ),
    "tape/alias_tracker.py": "ways refused changes overlapping recorder threads stem",
    "tape/aliases.py": "ways refused",
    "tape/step.py": "operations recorder refused ways facts secants_path rules",
    "tape/tape.py": "operations secants_path tiles dense",
    "path/relevance.py": "facts relevance baselines",
    "path/secants.py": "operations secants_path",
    "path/backward.py": "operations token_backward facts secants_path recorder methods rules refused",
    "path/affine.py": "operations secants_path coalitions boundary baselines",
    "rules/cotangents.py": "operations cotangents facts recorder secants_path",
    "rules/rule.py": "operations facts secants_path rules token_backward secants_head output_gradients head estimators",
    "rules/registry.py": "operations rules recorder",
    "rules/arithmetic.py": "operations rules recorder secants_path",
    "rules/attention.py": "operations rules recorder secants_path facts ways",
    "rules/linear.py": "operations rules secants_path recorder facts",
    "rules/norms.py": "operations rules secants_path recorder token_backward",
    "rules/elementwise.py": "operations rules recorder secants_path estimators ways",
    "rules/reductions.py": "operations rules secants_path recorder ways",
    "rules/sampling.py": "operations rules secants_path recorder ways",
    "rules/pooling.py": "operations rules recorder relevance secants_path",
    "rules/shapes.py": "operations rules recorder facts secants_path ways",
    "rules/indexing.py": "operations rules secants_path recorder overlapping ways",
    "tape/overlapping.py": "overlapping",
    "network/grid.py": "cells anomaly_scale patchcore",
    "network/tiling.py": "tiles",
    "network/tiles.py": "tiles",
    "path/blocks.py": "tiles",
    "head/elementwise.py": "estimators head secants_head registry",
    "head/decisions.py": "secants_head head estimators",
    "head/head.py": "head vote_and_facts alike anomalies recombination resampling",
    "head/stack.py": "conditions secants_head output_gradients targets head",
    "head/log_ratio.py": "log_ratio",
    "head/kernels.py": "secants_head kernels head",
    "head/stage.py": "hooks conditions secants_head output_gradients head estimators vote_and_facts enumerated",
    "head/stages.py": "conditions vote_and_facts secants_head output_gradients head estimators anomalies",
    "head/vote.py": "files_of_versions vote_and_facts targets head estimators registry options enumerated",
    "head/distances.py": "distances secants_head registry neighbours patchcore densities",
    "path/dual_numbers.py": "operations dual_numbers",
    "maps/recombination.py": (
        "recombination methods anomalies token_backward boundary figures mistake off_jump enumerated dense"
    ),
    "methods/method.py": "maps method",
    "starts/boundary_head.py": "boundary off_jump poles enumerated dense many_heads",
    "maps/results.py": "multiscale boundary maps",
    "starts/boundary_path.py": "boundary_path boundary off_jump poles enumerated enumerated_networks",
    "starts/run.py": "maps methods method contributions token_backward boundary tiles",
    "methods/gradient.py": "methods maps",
    "methods/heads_run.py": "many_heads",
    "methods/standard_errors.py": "many_heads",
    "head/resamples.py": "many_heads resampling",
    "methods/contributions.py": (
        "contributions baselines methods multiscale token_backward enumerated enumerated_networks branches boundary"
    ),
    "methods/perturbation.py": "methods coalitions baselines dense outputs",
    "maps/signed_maps.py": "maps",
    "network/layout.py": "token_layout axes maps token_backward layer_means tiles",
    "targets/output_gradients.py": "output_gradients targets outputs method coalitions enumerated boundary",
    "targets/rows.py": (
        "output_gradients targets outputs method coalitions anomalies enumerated dense contributions baselines boundary"
    ),
    "targets/dense.py": "dense anomalies enumerated output_gradients patchcore",
    "targets/target.py": "output_gradients method anomalies targets head contributions baselines boundary",
    "head/anomalies.py": "anomalies targets",
    "head/covariance_pca.py": "covariance_pca",
    "head/pca_distance.py": "pca_distance",
    "targets/components.py": "targets anomalies output_gradients head outputs method",
    "targets/decisions.py": "targets classes log_ratio output_gradients head outputs method boundary",
    "targets/scores.py": "targets output_gradients head outputs densities",
    "targets/catalogue.py": "classes maps targets output_gradients method meanings",
}
# Of some files only these functions are mathematics.
ONLY = {
    "methods/standard_errors.py": {"add_errors", "_ask_refit", "_send_stability", "_measure_spread"},
    "head/anomalies.py": {"residual"},
    "path/passes.py": {"ClosedFormPass"},
    "tape/step.py": {"is_random", "Step", "values_in", "_map_items"},
    "tape/alias_tracker.py": {"find_value", "is_smooth"},
    "tape/aliases.py": {"written_back", "_inverse"},
    "tape/tape.py": {"averages_positions", "is_mean", "line"},
    "rules/registry.py": {"unbroadcast", "register_slope"},
    "tape/overlapping.py": {
        *("overlapping_write", "_fill", "_added", "_masked", "_indexed", "_write_along", "_scattered", "_written"),
        *("_is_one_number", "_one_number"),
    },
    "head/stack.py": {"pullback"},
    "methods/method.py": {"_compute_jacobian"},
    "starts/run.py": {"gradients", "sums", "products", "contributions", "relevance", "_sum_images"},
    "network/tiles.py": {"merge", "pull_merge", "forward", "_cut_blocks"},
    "path/blocks.py": {"pullback", "run_from", "averages", "_list_seeing"},
    "maps/signed_maps.py": {"_part", "positive", "negative"},
    "maps/results.py": {"signed_maps", "largest", "divided", "upsample_maps", "warn_of_blanks"},
    "targets/target.py": {"differentiate_rows", "call_at_start"},
}
# These check arguments, write messages, or guess how much memory is needed.
NEVER = {"__post_init__", "__repr__", "advice", "_at", "_check_sign", "_described", "_head_of", "_no_rule"}
NEVER |= {"_check_sums", "_refuse_layers", "_refused", "_name_place", "_why_unknown", "bytes_per_target", "why_blank"}
NEVER |= {"looks_channels_last", "_in_proportion", "tell_of_fit"}

BOUND = "a bound on rounding errors, of which any near it is as good"
BLOCKS = "the size of a block, chosen for speed"
NOT_ABOVE = "no score is above the last point, where it was clamped"
EYE = "torch.eye(input.shape[axis], dtype=grad.dtype, device=grad.device)"
BAR = "the length of a progress bar"
FLAT = "a flat channel is 0 divided by whatever there is"
ROUNDING = "logsumexp takes the largest out itself: rounding alone depends on it"
SIGN = "it is 1 or -1"
UNREACHED = "nothing pulls from what does not depend on the root"
NOTHING = "zeros take no share"
TRACED = "is for exported programs, whose tests are optional"
UNSEEN = "is for accelerators, where nobody looks"
JACOBIAN = "a Jacobian is what the pullback makes of the identity, and the secant of a linear stage"
NO_RULE = "a path with a step without a rule is refused before"
REACH = "a rough bound on how many pixels further a resized one is seen"
KINK = "which side's slope a kink has differs between versions of torch"

# Functions, and what is in the conditions by which they choose the quicker of two ways, or in the size of steps to one
# end: their mutants may survive.
FASTER = {
    "targets/rows.py _pull_together": (
        *(
            "head.enumerated",
            "is_traced()",
            "without apart",
            "rows.device",
            "seed.shape",
            "most //",
            "(most",
            "bytes_per_target",
        ),
    ),
    "targets/dense.py differentiate_place": ("block.size > 1",),
    "targets/dense.py _split_positions": ("is_traced()", "BYTES", "bytes_per_target"),
    "targets/dense.py group_places": ("without column.positions",),
    "methods/contributions.py SecantCAM.sampling": ("without self.max_bytes",),
    "targets/target.py call_at_start": (
        *("max(0.001", "eps ** 0.5 ->", "tolerance * (terms", ") >= tolerance", "values.abs() -> terms"),
        "values.abs() -> values",
    ),
    "targets/scores.py DensityTarget.seeds": ("y.abs()", "y0.abs()"),
    "methods/perturbation.py Players.__init__": ("grid is None",),
    "methods/perturbation.py Players.at_once": ("8 *", "max(self", "self._resumed is None"),
    # What is not kept is made again; of a head that is another one, numbers are others, too.
    "starts/boundary_head.py Boundary.holds_for": (
        *("head is", "start is", "len(tensors)", "_hooks", "_forward_pre_hooks", "tensor is", "count_writes"),
    ),
    "starts/boundary_head.py Boundary.at": ("len(self._runs)",),
    "starts/boundary_head.py Boundary._in_reach": ("point - self.", "len(way)", "float(", "facts.spread **"),
    "starts/boundary_head.py Boundary._search": ("head is", "start.unsqueeze"),
    "starts/boundary_head.py _Search.__init__": ("max(1", "_BYTES //"),
    # On the CPU nothing is copied to it.
    "starts/boundary_head.py on_cpu": ("device.type", "_hooks", "isinstance(value", "for value in shared} |"),
    "starts/boundary_head.py on_cpu.copied": ("is_floating_point",),
    # Sizes of terms, of which a tolerance is a part that is far above what rounding loses.
    "targets/dense.py _differentiate_whole": ("values.abs()", "term.abs()"),
    "targets/rows.py _at_start": ("values.abs()", "rises.abs()"),
    "targets/output_gradients.py plain_gradients": ("values.abs()", "rises.abs()"),
    # Rules of the package that keep sums have linear secants: only a user's may have another.
    "path/backward.py TapePullback.sums.keeps": ("step.rule is not None", "without linear"),
    # The directions of a linear reduction are the same everywhere.
    "head/resamples.py _find_directions": ("mean is None", "head.n_features", "without 0"),
    "path/dual_numbers.py _Constants.__torch_function__": ("_AFFINE", "is_grad_enabled"),
    "path/dual_numbers.py _linear": ("without function in", "len(args)"),
    "path/dual_numbers.py _with": ("place + 1",),
    "path/dual_numbers.py _place_of_dual": ("type(x)", "isinstance(x, Tensor)"),
    # Products of all support vectors at once, or class by class.
    "head/decisions.py KernelSVM.__init__": (
        "len(dual_coef) > 1",
        "<= _DENSE",
        "len(first) * len(support_vectors)",
    ),
    "head/log_ratio.py Line._at_once": (
        *("is_traced()", "self.start.shape", "images * self.start[:, 0].numel() ->", "-> _AT_ONCE", "max(1"),
    ),
    "path/relevance.py _shared": ("can_sync",),
    "path/backward.py TapePullback._add_cotangent": ("type(part)", "type(parts[0])"),
    "path/backward.py TapePullback._pull_arguments": ("without one.shape[dim] > 1",),
    "path/backward.py TapePullback._followed": ("without rule.same_for_all",),
    "path/backward.py TapePullback._verify": ("without key in self.tape.verified",),
    "path/affine.py AffineBeginning.isolate_players": ("not self.tape.keeps_numbers(step) ->",),
    "path/affine.py AffineBeginning.run_rows": ("without self._interchangeable",),
    "path/affine.py AffineBeginning._interchangeable": ("can_sync",),
    "path/affine.py AffineBeginning._interchangeable.repeats": (
        "tensor.shape[:1] != recorded.shape[:1]",
        "tensor - tensor[:1] -> ",
    ),
    "rules/rule.py Rule.find_tokens": ("x.numel()",),
    "rules/rule.py Rule.same_for_all": ("without on", "without dim is None", "self.secant", "self.needs"),
    "starts/boundary_path.py _solved": (
        *(
            "damping",
            "nothing",
            "without can_look",
            "eps * torch",
            "finfo(start.dtype)",
            "1e-10",
            "64 * eps",
            "2 * eps",
        ),
        *("torch.maximum(tolerance", "torch.maximum(distance"),
    ),
    "starts/boundary_path.py _solved.measure": ("slopes * x", "terms * scale"),
    "starts/boundary_path.py _measure_terms": ("grad.flatten", "torch.stack(terms)"),
    "rules/cotangents.py Cotangent.__init__": ("without size and (not grad.stride(dim + 1))",),
    "rules/cotangents.py Cotangent.times": (
        "without dim in self.same",
        "dim in self.same -> dim not in self.same",
        "dim in self.same and x.shape[dim] > 1",
        "x.shape[dim] > 1",
    ),
    "rules/cotangents.py Outer.base": ("left.dim() > self.right.dim()",),
    "rules/cotangents.py by_rows": ("matrix.", "grad.dim()"),
    "rules/cotangents.py Outer.narrow": ("len(self.shape) - 2", "length < self.shape[dim]"),
    "rules/cotangents.py Outer.sum": ("len(self.shape) - 2",),
    "rules/cotangents.py Outer.times": ("x.dim() - 2",),
    "rules/cotangents.py BehindDense.times": ("FEW",),
    "rules/cotangents.py through_sums": ("numel() == 1", "LARGE"),
    "rules/cotangents.py _products": ("_BLOCK",),
    "rules/cotangents.py by_weight": ("_MANY", "can_sync", "active is not None"),
    "rules/cotangents.py reached": ("LARGE", "can_sync", "0.8"),
}
# Mutant: why no test can kill it.
EQUIVALENT: dict[str, str] = {
    # Tiles.
    "network/tiles.py TiledNet._cut_blocks: without is_traced()": TRACED,
    "path/passes.py ClosedFormPass.run_from: without not is_traced()": TRACED,
    "path/blocks.py BlockPass._list_seeing: without not can_sync(of_tiles)": UNSEEN,
    "path/blocks.py BlockPass._list_seeing: without not self.backbone.source.dense": "saves a look at pooled features",
    "path/blocks.py BlockPass.averages: without not self.backbone.source.dense": "is asked of pooled features alone",
    "tape/overlapping.py overlapping_write: without all((_is_one_number(item) for item in (*rest, *options.values())))": (  # noqa: E501
        "what is left by several numbers is compared, and refused, too"
    ),
    "targets/dense.py _average_positions: (remainder * share).sum(0) -> (remainder * share).mean(0)": (
        "what Shapley values leave out is rounding"
    ),
    "targets/dense.py _average_positions: remainder * share -> remainder": (
        "what Shapley values leave out is rounding"
    ),
    "starts/run.py Run.products: without not layout.has_channels_first": (
        "is for transformers on tiles, whose tests are optional"
    ),
    "maps/results.py warn_of_blanks: without hidden": "a hint in a message",
    "maps/results.py warn_of_blanks: without more is None": "a hint in a message",
    # Where positions lie.
    "network/grid.py _shifted: dim + 1 -> dim - 1": "the image of any other axis does",
    "network/grid.py _shifted: abs(far[0] - (length - quarter) * ratio) <= 2 -> "
    "abs(far[0] - (length - quarter) * ratio) < 2": REACH,
    "network/grid.py _shifted: abs(near[1] - quarter * ratio) <= 2 -> abs(near[1] - quarter * ratio) < 2": REACH,
    "network/grid.py Geometry._agrees: change[2 + dim].movedim(dim, 0).reshape(grid[dim], -1).sum(1) -> "
    "change[2 + dim].movedim(dim, 0).reshape(grid[dim], -1).mean(1)": "their middle is the same in any unit",
    # What is left over of an image.
    "head/anomalies.py residual: 4 * z.shape[-1] ** 0.5 * precision.eps -> precision.eps": BOUND,
    "head/anomalies.py residual: 4 * z.shape[-1] ** 0.5 -> 4": BOUND,
    "head/anomalies.py residual: 4 * z.shape[-1] ** 0.5 -> z.shape[-1] ** 0.5": BOUND,
    "head/anomalies.py residual: rest.norm(dim=-1) > rounding -> rest.norm(dim=-1) >= rounding": BOUND,
    "head/anomalies.py residual: z.norm(dim=-1) + restored.norm(dim=-1) -> restored.norm(dim=-1)": BOUND,
    "head/anomalies.py residual: z.norm(dim=-1) + restored.norm(dim=-1) -> z.norm(dim=-1)": BOUND,
    "head/anomalies.py residual: z.shape[-1] ** 0.5 -> z.shape[-1]": BOUND,
    # The same numbers by another way.
    "head/log_ratio.py Evidence.gradient: grad.abs() <= 2 * self.gamma * shares.sum((0, 2)).unsqueeze( "
    "... ditions.bound_rounding(x) -> "
    "grad.abs() < 2 * self.gamma * shares.sum((0, 2)).unsqueeze(- ... ditions.bound_rounding(x)": BOUND,
    "head/log_ratio.py Evidence.gradient: 2 * self.gamma * shares.sum((0, 2)).unsqueeze(-1) -> 2 * self.gamma": BOUND,
    "head/log_ratio.py Evidence.gradient: 2 * self.gamma -> self.gamma": BOUND,
    "head/log_ratio.py Evidence.secant: self.log_intercept.unsqueeze(-1) -> self.log_intercept.unsqueeze(-2)": (
        "both are (2, 1, 1)"
    ),
    "head/log_ratio.py Evidence.secant: 64 * torch.finfo(x.dtype).eps * (here.abs() + at_start.abs()).sum(0) -> "
    "64 * torch.finfo(x.dtype).eps": BOUND,
    "head/log_ratio.py Evidence.secant: 64 * torch.finfo(x.dtype).eps -> torch.finfo(x.dtype).eps": BOUND,
    "head/log_ratio.py Evidence.secant: (here.abs() + at_start.abs()).sum(0) -> "
    "(here.abs() + at_start.abs()).mean(0)": BOUND,
    "head/log_ratio.py Evidence.secant: here.abs() + at_start.abs() -> here.abs()": BOUND,
    "head/log_ratio.py Evidence.secant: here.abs() + at_start.abs() -> at_start.abs()": BOUND,
    "head/log_ratio.py Evidence._compute_terms: self.log_intercept.unsqueeze(-1) -> "
    "self.log_intercept.unsqueeze(-2)": "both are (2, 1, 1)",
    "head/log_ratio.py LogRatio._list_gradient_rows: without can_sync(seed)": UNSEEN,
    "targets/decisions.py SVMTarget._find_word: without isinstance(self.versus, str)": (
        "it is compared with words, and only a word equals one"
    ),
    "targets/decisions.py LogRatioTarget._pull_back: "
    "log_scale.exp().unsqueeze(-1) -> log_scale.exp().unsqueeze(-2)": "K is 1",
    "head/log_ratio.py Evidence.secant: gap.abs() > rounding -> gap.abs() >= rounding": BOUND,
    "path/relevance.py propagate_relevance: without output in values": UNREACHED,
    "path/relevance.py _shared: x < 0 -> x <= 0": NOTHING,
    "path/relevance.py _shared: without ref.index in values": UNREACHED,
    "path/backward.py TapePullback.sums.keeps: without step.rule is not None": NO_RULE,
    "path/backward.py TapePullback._region: without step.rule is None": NO_RULE,
    "path/backward.py TapePullback._behind: without step.first != Ref(line[-1])": (
        "no step gives back the numbers or the sums of another argument than its first"
    ),
    "path/backward.py TapePullback._pull_arguments: without isinstance(one, Cotangent)": (
        "a norm is pulled back from what is one"
    ),
    "path/backward.py TapePullback._tokens: without step.rule is None": NO_RULE,
    "path/backward.py TapePullback._pair_cotangents: without isinstance(argument, Ref)": (
        "torch's tensors have a method of this name, which is no value of the tape"
    ),
    "path/backward.py TapePullback._verify: self.start is None -> self.start is not None": "it tells two apart",
    "path/backward.py TapePullback._verify: without self.start is not None": "what fails there, the walk refuses",
    "path/backward.py TapePullback._pair_cotangents: without tokens is not None": (
        "without a range of tokens, no dimension is given"
    ),
    "path/backward.py TapePullback._pull_arguments: one.shape[dim] > 1 -> one.shape[dim] >= 1": (
        "of one token the sum is what it is"
    ),
    "path/backward.py TapePullback.token_sums: self.value.narrow(dim, 0, 1) -> self.value.narrow(dim, 1, 1)": (
        "its shape is asked for"
    ),
    "tape/tape.py Tape.averages_positions: without rule.secant != 'linear'": (
        "of other steps that keep sums the gradient is not the same everywhere"
    ),
    "path/relevance.py _shared: sign > 0 -> sign >= 0": SIGN,
    "rules/cotangents.py Cotangent.__init__: without size == 1": "of one position the sum is what it is",
    "rules/cotangents.py Cotangent.along: images < tokens -> images <= tokens": "they are two dimensions",
    "rules/cotangents.py Part.narrow: last <= first -> last < first": "no position is a part, too",
    "rules/cotangents.py Part.narrow: self.inner.narrow(dim, 0, 0) -> self.inner.narrow(dim, 1, 0)": (
        "no position lies anywhere"
    ),
    "rules/cotangents.py _products: over == 'channels' -> not over == 'channels' #2": BLOCKS,
    "rules/cotangents.py _products: alone -> not alone": BLOCKS,
    "rules/cotangents.py _products: without not is_traced()": TRACED,
    "rules/cotangents.py Shared.sum: self._behind.narrow(dim, 0, 1) -> self._behind.narrow(dim, 1, 1)": (
        "they are the same along it"
    ),
    "rules/linear.py _subscripts: '...' * ('...' in left) -> '...'": "without an ellipsis it is for nothing",
    "path/secants.py through_secant: without x is not x0": "an object is equal to itself",
    "path/affine.py _is_affine: without not step.options and Ref(value) in [step.arguments[place] for place in "
    "places]": "the same numbers, row by row",
    "path/affine.py AffineBeginning.is_output: without self.end in self.tape.outputs": (
        "what no step takes is an output"
    ),
    "path/affine.py AffineBeginning._interchangeable.repeats: torch.finfo(tensor.dtype).eps ** 0.5 * "
    "tensor.abs().max() -> torch.finfo(tensor.dtype).eps ** 0.5": BOUND,
    "path/affine.py AffineBeginning._interchangeable.repeats: torch.finfo(tensor.dtype).eps ** 0.5 -> "
    "torch.finfo(tensor.dtype).eps": BOUND,
    "path/affine.py AffineBeginning._interchangeable.repeats: tensor.abs().max() -> tensor.abs().min()": BOUND,
    "path/affine.py AffineBeginning._interchangeable.repeats: tensor.abs() -> tensor": BOUND,
    "path/affine.py AffineBeginning._interchangeable.repeats: (tensor - tensor[:1]).abs() <= bound -> "
    "(tensor - tensor[:1]).abs() < bound": BOUND,
    "tape/step.py Step.resolve.cast: without tokens is not None": "without a range of tokens, no dimension is given",
    "rules/rule.py Rule.pulled: torch.ones_like(y).unsqueeze(0) -> torch.ones_like(y).unsqueeze(1)": "ones broadcast",
    "rules/rule.py Rule.pulled: _changed(args, base.args) > 1 -> _changed(args, base.args) >= 1": (
        "what a step is affine in, its derivative does not depend on"
    ),
    "rules/rule.py _changed: list | tuple -> tuple": "a step is linear in a list, or has its own secant",
    "rules/rule.py mid: list | tuple -> tuple": "a step is linear in a list, or has its own secant",
    "rules/rule.py mid: without isinstance(x, Tensor)": "only tensors are others at the baseline",
    "rules/rule.py mid: without x.is_complex()": "the package's own rules are of real numbers",
    "rules/rule.py mid: without x is not x0": "half-way between a number and itself is that number",
    "rules/rule.py quotient: (dy - slope * dx).abs() <= 4 * eps * (y.abs() + y0.abs()) -> "
    "(dy - slope * dx).abs() < 4 * eps * (y.abs() + y0.abs())": BOUND,
    "rules/rule.py quotient: 4 * eps -> eps": BOUND,
    "rules/rule.py quotient: y.abs() + y0.abs() -> y.abs()": BOUND,
    "rules/rule.py quotient: y.abs() + y0.abs() -> y0.abs()": BOUND,
    "rules/rule.py quotient: (dx == 0) & ~slope.isfinite() -> ~slope.isfinite()": (
        "where x changes, no infinite slope is near the quotient"
    ),
    "path/secants.py through_secant: without rule.secant == 'elementwise'": "an elementwise step has one value",
    "tape/step.py Step.resolve: max((torch.finfo(precision).eps for precision in floats), default=0.0) -> "
    "min((torch.finfo(precision).eps for precision in floats), default=0.0)": "an elementwise step has one dtype",
    "rules/registry.py unbroadcast: extra > 1 -> extra >= 1": "flatten(1, 1) changes nothing",
    "rules/registry.py unbroadcast: without grad.shape[dim + 1] != 1": "a sum over one number is that number",
    "rules/elementwise.py _elu: x.clamp(max=0) -> x": "where does not take what overflows",
    "rules/arithmetic.py _div_secant: other * other0 > 0 -> other * other0 >= 0": "what is divided by 0 is not finite",
    "rules/attention.py attention.heads: shared > 1 -> shared >= 1": "a sum over one number is that number",
    "rules/attention.py attention.of_group: shared > 1 -> shared >= 1": "a sum over one number is that number",
    "rules/attention.py attention.outer: min(left, right, key=Tensor.dim) -> max(left, right, key=Tensor.dim)": (
        "the same numbers, multiplied out"
    ),
    "rules/elementwise.py _sinc: x.abs() < 0.01 -> x.abs() <= 0.01": "there both are exact",
    "rules/elementwise.py _logit: x < eps -> x <= eps": KINK,
    "rules/elementwise.py _logit: x > 1 - eps -> x >= 1 - eps": KINK,
    "rules/elementwise.py celu: x > 0 -> x >= 0": "at 0 both slopes are 1",
    "rules/elementwise.py celu: x.clamp(max=0) -> x": "where does not take what overflows",
    "rules/elementwise.py hardshrink: x.abs() > lambd -> x.abs() >= lambd": KINK,
    "rules/elementwise.py softshrink: x.abs() > lambd -> x.abs() >= lambd": KINK,
    "rules/elementwise.py threshold: x > threshold -> x >= threshold": KINK,
    "rules/elementwise.py _slope_at_limit: x.clamp(min=0.0) -> x": KINK,
    "rules/sampling.py _upsampling.pull_upsampling: list | tuple -> list": "torch gives a list",
    "rules/pooling.py _expand: [value] * count -> [value]": "a list of one is repeated in the next line",
    "rules/pooling.py _max_pool.rule: without None": "torch takes an empty stride for none",
    "rules/pooling.py _unpool: y >= y0 -> y > y0": "of no change each share is 0",
    "head/elementwise.py Isotonic.__call__: len(at) - 1 -> len(at) + 1": NOT_ABOVE,
    "head/elementwise.py Isotonic.__call__: len(at) - 1 -> len(at)": NOT_ABOVE,
    # Either is right.
    "rules/elementwise.py softplus: x * beta > threshold -> x * beta >= threshold": KINK,
    "rules/elementwise.py _slope_at_limit: x.clamp(min=0.0) -> x.clamp(max=0.0)": "both have the same slope",
    "rules/elementwise.py _prelu: x > 0 -> x >= 0": KINK,
    "rules/elementwise.py rrelu: x > 0 -> x >= 0": KINK,
    "rules/elementwise.py hardswish: x >= 3 -> x > 3": KINK,
    "rules/elementwise.py hardswish: x <= -3 -> x < -3": KINK,
    "head/vote.py Vote.ranking: -self.n_classes -> self.n_classes": "of 2 C values the last C begin at C",
    "head/stages.py Scale.evaluate: y < low -> y <= low": "at the limit both are the limit",
    "head/stages.py Scale.evaluate: y > high -> y >= high": "at the limit both are the limit",
    "head/stages.py Scale.evaluate: y >= low -> y > low": KINK,
    "head/stages.py Scale.evaluate: y <= high -> y < high": KINK,
    "head/stages.py Normalise._norm_secant: norm + norm0 -> norm": "of a row of zeros the norm's secant has no part",
    "head/stages.py Normalise._norm_secant: norm + norm0 -> norm0": "of a row of zeros the norm's secant has no part",
    "head/stages.py Normalise._norm_secant: norm >= norm0 -> norm > norm0": "of equal norms either place adds up",
    "head/stages.py Projection.restoring: without self.inverse is None": "what is missing counts as None",
    "head/stages.py Projection.restoring: self.inverse.unsqueeze(1) * self.components -> self.components": (
        "of one dimension it is ones"
    ),
    "head/stage.py Conditions.bound_rounding: 16 * self.eps -> self.eps": BOUND,
    "head/stack.py Stack.pullback: without start is None": JACOBIAN,
    "head/stack.py Stack.pullback: without stage.linear": JACOBIAN,
    "head/stack.py Stack.pullback: without not short": JACOBIAN,
    "head/distances.py mean_slopes: missing.abs() > 16 * torch.finfo(x.dtype).eps * size -> "
    "missing.abs() >= 16 * torch.finfo(x.dtype).eps * size": BOUND,
    "head/distances.py mean_slopes: 16 * torch.finfo(x.dtype).eps * size -> 16 * torch.finfo(x.dtype).eps": BOUND,
    "head/distances.py mean_slopes: 16 * torch.finfo(x.dtype).eps -> torch.finfo(x.dtype).eps": BOUND,
    "head/distances.py OfPoints.secant: torch.maximum(y.abs(), y0.abs()) -> torch.minimum(y.abs(), y0.abs())": BOUND,
    "head/distances.py OfPoints.secant: y.abs() -> y": BOUND,
    "head/distances.py OfPoints.secant: y0.abs() -> y0": BOUND,
    **{
        f"head/distances.py CosineDistance.nearest: x.unsqueeze(-2) - near -> {instead}": "no slope of cosines reads it"
        for instead in ("x.unsqueeze(-2) + near", "x.unsqueeze(-2)", "-near")
    },
    "head/distances.py LocalOutlier.slopes: distances > self.radii[index] -> distances >= self.radii[index]": (
        "at a kink either slope is one"
    ),
    "head/distances.py LogDensity._exponents: squares.clamp(min=0) -> squares": BOUND,
    "head/distances.py Neighbours.secant: size + size0 -> size": BOUND,
    "head/distances.py Neighbours.secant: size + size0 -> size0": BOUND,
    "head/distances.py Neighbours.evaluate: distances.amax(-1, keepdim=True) -> "
    "distances.amin(-1, keepdim=True)": BOUND,
    "head/distances.py Neighbours.evaluate: distances.amax(-1, keepdim=True) -> "
    "distances.amax(-2, keepdim=True)": BOUND,
    "head/distances.py Neighbours._slopes: (x.unsqueeze(-2) - points).square().sum(-1) -> "
    "(x.unsqueeze(-2) - points).square().mean(-1)": "their order is the same",
    "path/dual_numbers.py _Constants.__torch_function__: without function is F.layer_norm": TRACED,
    "path/dual_numbers.py _Constants.__torch_function__: function is F.layer_norm -> "
    "function is not F.layer_norm": TRACED,
    "path/dual_numbers.py _Constants.__torch_function__: without is_traced()": "the same numbers, in pieces",
    "head/kernels.py RBF.secant: x0.shape[0] > 1 -> x0.shape[0] >= 1": "around a start of one row the start is 0",
    "head/kernels.py _times_exp: largest >= _REPRESENTABLE -> largest > _REPRESENTABLE": "a limit chosen by feel",
    "head/kernels.py _along_a_line: first < 0 -> first <= 0": "at 0 both are 1",
    "head/kernels.py _along_a_line: to_end < 1 -> to_end <= 1": "either way is exact there",
    "head/kernels.py _along_a_line: length.unsqueeze(-1) -> length.unsqueeze(-2)": "both are (N, 1, 1)",
    "targets/rows.py _describe: (part.values - before - explained) / scale -> part.values - before - explained": (
        "what Shapley values leave out is rounding"
    ),
    "targets/rows.py _describe: log_scale -> 0 * log_scale #2": "what Shapley values leave out is rounding",
    "methods/standard_errors.py add_errors: stability >= STABLE -> stability > STABLE": "a limit chosen by feel",
    "head/resamples.py Resamples.unstable: cosine < STABLE -> cosine <= STABLE": "a limit chosen by feel",
    "head/resamples.py Resamples.of: cosine >= 0 -> cosine > 0": "directions at right angles match nothing",
    "maps/recombination.py _recombined: len(samplings) * len(targets) -> len(samplings)": "they are in order already",
    "maps/recombination.py _recombined: len(samplings) * len(targets) -> len(targets)": "they are in order already",
    "methods/standard_errors.py _ask_refit.match: side > 0 -> side >= 0": "a side is 1 or -1",
    "starts/boundary_head.py Boundary.components_apart: without 0": "without components none is apart",
    "targets/rows.py _pull_back: without start is not None": (
        "without a start the first of the two steps is refused as both are"
    ),
    "methods/perturbation.py ClosedFormScoreCAM.compute: run.count * -(-count // self.batch_size) -> run.count": BAR,
    "methods/perturbation.py ClosedFormScoreCAM.compute: run.count * -(-count // self.batch_size) -> "
    "-(-count // self.batch_size)": BAR,
    "methods/perturbation.py ClosedFormScoreCAM.compute: -(-count // self.batch_size) -> "
    "-count // self.batch_size": BAR,
    "methods/perturbation.py ClosedFormScoreCAM.compute: -count // self.batch_size -> -count": BAR,
    "methods/perturbation.py ClosedFormScoreCAM.compute: -count -> count": BAR,
    "methods/perturbation.py ClosedFormScoreCAM.compute: steps > 20 -> not steps > 20": BAR,
    "methods/perturbation.py ClosedFormScoreCAM.compute: steps > 20 -> steps >= 20": BAR,
    "starts/boundary_head.py _Search._bisect: ends[low] * ends[high] > 0 -> ends[low] * ends[high] >= 0": (
        "an end at which it is 0 is the zero"
    ),
    "starts/boundary_head.py _Search._in_rounding: 1 - lengths -> -lengths": BOUND,
    "starts/boundary_head.py _Search._in_rounding: (self._evaluate_rows(x + lengths.unsqueeze(1) * step) - expe "
    "... s() <= expected.abs() / 2 -> (self._evaluate_rows(x + lengths.unsqueeze(1) * step) - expe "
    "... bs() < expected.abs() / 2": BOUND,
    "targets/catalogue.py _decision_meaning: without len(head.classes_) == 2": "of more, no two margins are opposite",
    "starts/boundary_head.py _Search.find_nearest: without value": "its zero is the start, but for rounding",
    "starts/boundary_head.py _Search.find_nearest: self._evaluate_rows(candidates) * value < 0 -> "
    "self._evaluate_rows(candidates) * value <= 0": "a sample whose value is exactly 0 is a crossing itself",
    **{
        f"starts/boundary_head.py _Search.find_nearest: start + ways[{which}] -> {instead}": "any ways beside it do"
        for which in ("0", "1:")
        for instead in (f"start - ways[{which}]", f"ways[{which}]")
    },
    "starts/boundary_head.py _Search.find_nearest: start + ways[0] -> start": "its sign is enough for a way to cross 0",
    "starts/boundary_head.py Boundary._search: on_pole -> not on_pole #2": "words of a message",
    "starts/boundary_path.py leave_jump: without run.head.enumerated is None": "what has a gradient has no jumps",
    "starts/boundary_path.py leave_jump: without is_traced()": TRACED,
    "starts/boundary_path.py leave_jump: output.head_trace.values[0].mean(0) -> "
    "output.head_trace.values[0].sum(0)": "the mean is one row",
    "methods/contributions.py ContributionCAM.compute: without can_sync(maps)": UNSEEN,
    "methods/contributions.py LIFTCAM.compute: without can_sync(weights)": UNSEEN,
    "methods/contributions.py LIFTCAM.compute: torch.cat([weights, *left], -1) -> torch.cat([weights], -1)": (
        "what Shapley values leave out is rounding"
    ),
    "methods/contributions.py ContributionCAM.compute: remainder + secants.remainder.to(remainder) -> "
    "remainder - secants.remainder.to(remainder)": "what Shapley values leave out is rounding",
    "methods/contributions.py ContributionCAM.compute: remainder + secants.remainder.to(remainder) -> "
    "remainder": "what Shapley values leave out is rounding",
    "targets/dense.py _differentiate_whole: log_scale.exp().unsqueeze(-1) -> log_scale.exp().unsqueeze(-2)": "K is 1",
    "targets/rows.py evaluate_question: without isinstance(target, PlacedTarget)": "regions are of these alone",
    "network/layout.py Layout.__call__: activations.dim() - self.dims -> -self.dims": "they count from behind",
    "network/layout.py Layout.__call__: activations.dim() - self.dims -> -self.dims #2": "they count from behind",
    "network/layout.py Layout.split_tokens: activations.dim() - self.dims -> -self.dims": "they count from behind",
    **{
        "path/passes.py ClosedFormPass.is_isolated: {identify_memory(tensor) for tensor in (*network.parameters( "
        f"... work.buffers())}} - {{None}} -> {instead}": TRACED
        for instead in ("{identify_memory(tensor) for tensor in (*network.parameters(), *network.buffers())}",)
    },
    "starts/boundary_path.py PathBoundary._reused: (values - former.goal).norm() <= former.nothing -> "
    "(values - former.goal).norm() < former.nothing": BOUND,
    "starts/boundary_path.py PathBoundary._reused: key in self._kept -> not key in self._kept": TRACED,
    "starts/boundary_path.py PathBoundary._by_components: output.head_trace.values[0].detach().mean(0) -> "
    "output.head_trace.values[0].detach().sum(0)": "the mean is one row",
    "methods/perturbation.py _masks: span > 0 -> span >= 0": FLAT,
    "methods/perturbation.py _masks: span > 0 -> span >= 0 #2": FLAT,
    "maps/signed_maps.py SignedMaps._part: sign > 0 -> sign >= 0": SIGN,
    "maps/signed_maps.py SignedMaps._part: sign > 0 -> sign >= 0 #2": SIGN,
    "rules/reductions.py median: x.median(0, keepdim=True) -> x.median(0, keepdim=not True)": (
        "a row's median is one number in either shape"
    ),
    "rules/reductions.py _extreme: sign > 0 -> sign >= 0": SIGN,
    "rules/reductions.py _of_two: sign > 0 -> sign >= 0": SIGN,
    "rules/reductions.py _with_index: sign > 0 -> sign >= 0": SIGN,
    "rules/reductions.py _with_index.rule: sign > 0 -> sign >= 0": SIGN,
    "rules/reductions.py _with_index.rule: sign > 0 -> sign >= 0 #2": SIGN,
    "rules/reductions.py _send_to_chosen: sign * (y - y0) >= 0 -> sign * (y - y0) > 0": "of no change each share is 0",
    f"rules/sampling.py _upsampling.pull_upsampling: {EYE}.unsqueeze(0) -> {EYE}.unsqueeze(1)": "each row is alone",
    "rules/norms.py normalised: s > eps -> s >= eps": KINK,
    "rules/norms.py normalised: s0 > eps -> s0 >= eps": KINK,
    "rules/norms.py vector_norm: d - input.dim() -> d": "of the input itself, either counts the same axis",
    "rules/attention.py logarithmic_mean: logits - logits.amax(dims, keepdim=True) -> logits": ROUNDING,
    "rules/attention.py logarithmic_mean: logits - logits.amax(dims, keepdim=True) -> logits + logits.amax(dims, keepdim=True)": (  # noqa: E501
        ROUNDING
    ),
}


@dataclass
class Mutant:
    """One node of a file's syntax tree and what stands there instead."""

    name: str
    file: str
    node: ast.expr
    instead: ast.expr
    lines: list[int]  # where the functions around it begin, the innermost first
    tests: dict[str, dict[str, float]] = field(default_factory=dict)  # by test file: seconds by test


# --- what is changed ------------------------------------------------------------------------------------------------

# fmt: off
DIMS = {
    "sum", "mean", "amax", "amin", "argmax", "argmin", "any", "all", "softmax", "flatten", "unflatten", "unsqueeze",
    "squeeze", "transpose", "movedim", "cat", "stack", "split", "chunk", "unbind", "gather", "scatter", "scatter_add",
    "index_add", "index_copy", "norm", "vector_norm", "roll", "select", "narrow",
}
DROPPED = {
    "transpose", "movedim", "permute", "abs", "sqrt", "square", "exp", "log", "relu", "clamp", "sign", "reversed",
    "flip",
}
# fmt: on
TWINS = {"min": "max", "amin": "amax", "argmin": "argmax", "minimum": "maximum"}
TWINS |= {b: a for a, b in TWINS.items()} | {"sum": "mean", "mean": "sum"}
COMPARISONS = {ast.Gt: ast.GtE, ast.Lt: ast.LtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
COMPARISONS |= {b: a for a, b in COMPARISONS.items()}
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arg)


def variants(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what may stand in the place of an expression."""
    match node:
        case ast.BinOp(left=a, op=ast.Add() | ast.Sub() as op, right=b):
            added = isinstance(op, ast.Add)
            yield ast.BinOp(a, ast.Sub() if added else ast.Add(), b)
            yield a
            yield b if added else ast.UnaryOp(ast.USub(), b)
        case ast.BinOp(left=a, op=ast.Mult() | ast.BitAnd() | ast.BitOr(), right=b):
            yield a
            yield b
        case ast.BinOp(left=a, op=ast.Div() | ast.FloorDiv() | ast.Mod() | ast.Pow() | ast.MatMult()):
            yield a
        case ast.UnaryOp(op=ast.USub() | ast.Invert(), operand=a) if dimension(node) is None:
            yield a
        case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in COMPARISONS:
            yield ast.Compare(a, [COMPARISONS[type(op)]()], [b])
        case ast.Attribute(value=a, attr="T" | "mT"):
            yield a
        case ast.Name(id="log_scale", ctx=ast.Load()) | ast.Attribute(attr="log_scale", ctx=ast.Load()):
            yield ast.BinOp(ast.Constant(0), ast.Mult(), node)
        case ast.Subscript(value=ast.Attribute(attr="shape") as a, slice=index) if dimension(index) is not None:
            yield ast.Subscript(a, other(index), node.ctx)
        case ast.Call():
            yield from variants_of_call(node)


def variants_of_call(call: ast.Call) -> Iterator[ast.expr]:
    function, args, keywords = call.func, call.args, call.keywords
    method = isinstance(function, ast.Attribute)
    name = function.attr if method else getattr(function, "id", "")
    of_torch = method and isinstance(function.value, ast.Name) and function.value.id == "torch"
    if name in DROPPED and (of_torch or not method):
        yield args[0]
    elif name in DROPPED:
        yield function.value
    if name in TWINS and method:
        yield ast.Call(ast.Attribute(function.value, TWINS[name], ast.Load()), args, keywords)
    elif name in ("min", "max"):
        yield ast.Call(ast.Name(TWINS[name], ast.Load()), args, keywords)
    if name == "where" and len(args) == 3:
        yield ast.Call(function, [args[0], args[2], args[1]], keywords)
    if name in DIMS:
        for i, arg in enumerate(args):
            if dimension(arg) is not None:
                yield ast.Call(function, [*args[:i], other(arg), *args[i + 1 :]], keywords)
    for i, arg in enumerate(args):
        if isinstance(arg, ast.List) and len(arg.elts) > 1 and method:
            for j in range(len(arg.elts)):
                fewer = ast.List([*arg.elts[:j], *arg.elts[j + 1 :]], ast.Load())
                yield ast.Call(function, [*args[:i], fewer, *args[i + 1 :]], keywords)
    for i, keyword in enumerate(keywords):
        instead = None
        if keyword.arg == "dim" and dimension(keyword.value) is not None:
            instead = ast.keyword("dim", other(keyword.value))
        elif keyword.arg in ("min", "max"):
            instead = ast.keyword(TWINS[keyword.arg], keyword.value)
        elif keyword.arg in ("keepdim", "accumulate", "zero_is_second"):
            instead = ast.keyword(keyword.arg, ast.UnaryOp(ast.Not(), keyword.value))
        if instead is not None:
            yield ast.Call(function, args, [*keywords[:i], instead, *keywords[i + 1 :]])


def dimension(node: ast.AST) -> int | None:
    """Return the number that a node is, or None."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
    return None


def other(node: ast.AST) -> ast.Constant:
    """Return another dimension than a node gives."""
    return ast.Constant({-1: -2, -2: -1, 0: 1, 1: 0}.get(dimension(node), dimension(node) - 1))


def mutants_of(file: str, tree: ast.Module) -> list[Mutant]:
    """Return all mutants of a file, in the order of its text."""
    found: list[tuple[str, ast.expr, ast.expr, list[int]]] = []

    def add(scope: tuple[str, ...], node: ast.expr, instead: ast.expr, lines: list[int], text: str = "") -> None:
        text = text or f"{shown(node)} -> {shown(instead)}"
        found.append((f"{file} {'.'.join(scope)}: {text}", node, instead, lines))

    def visit(node: ast.AST, scope: tuple[str, ...], lines: list[int], allowed: bool) -> None:
        if isinstance(node, SKIPPED) or (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "warn"):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if node.name in NEVER:
                    return
                scope = (*scope, node.name)
                allowed = allowed or node.name in ONLY[file] if file in ONLY else isinstance(node, ast.FunctionDef)
            if not isinstance(node, ast.ClassDef):
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                lines = [first, *lines]
        if isinstance(node, ast.Dict) and not scope and file not in ONLY:  # a table: its rows are functions with names
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Lambda):
                    visit(value, (str(key.value),), lines, allowed=True)
            return
        of_message = isinstance(node, ast.If) and all(isinstance(part, ast.Raise) for part in node.body)
        if allowed:
            tests = node.ifs if isinstance(node, ast.comprehension) else []
            if isinstance(node, ast.If | ast.While | ast.IfExp) and not of_message:
                tests = [node.test]
            for test in tests:
                add(scope, test, ast.UnaryOp(ast.Not(), test), lines)
            for i, value in enumerate(node.values if isinstance(node, ast.BoolOp) else ()):
                rest = [*node.values[:i], *node.values[i + 1 :]]
                instead = ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0]
                add(scope, node, instead, lines, f"without {shown(value)}")
            for instead in variants(node):
                add(scope, node, instead, lines)  # type: ignore[arg-type]
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or (of_message and name == "test"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, scope, lines, allowed)

    visit(tree, (), [], False)
    # What is negated as a whole need not be negated in its comparison, too.
    seen: Counter[str] = Counter()
    mutants, done = [], set()
    for name, node, instead, lines in found:
        key = (id(node), meaning(instead))
        if key in done:
            continue
        done.add(key)
        seen[name] += 1
        mutants.append(Mutant(name if seen[name] == 1 else f"{name} #{seen[name]}", file, node, instead, lines))
    return mutants


def meaning(node: ast.expr) -> str:
    """Return the text of an expression, the same for ``not a == b`` and ``a != b``."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Compare(left=a, ops=[op], comparators=[b])) if isinstance(
            op, ast.Eq | ast.NotEq | ast.In | ast.NotIn | ast.Is | ast.IsNot
        ):
            return ast.unparse(ast.Compare(a, [COMPARISONS[type(op)]()], [b]))
    return ast.unparse(node)


def shown(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 90 else f"{text[:60]} ... {text[-25:]}"


# --- how it is run --------------------------------------------------------------------------------------------------


def compile_mutant(mutant: Mutant, tree: ast.Module, *, keeps_names: bool = False) -> CodeType:
    """Return the code of a file with one node changed; with its names, so that a function that is there can take it."""
    instead = copy.deepcopy(mutant.instead)
    if keeps_names:
        instead = ast.copy_location(ast.IfExp(ast.Constant(True), instead, mutant.node), mutant.node)

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return instead if node is mutant.node else super().visit(node)

    return compile(ast.fix_missing_locations(Swap().visit(tree)), str(ROOT / PACKAGE / mutant.file), "exec")


class Mutated(importlib.abc.MetaPathFinder):
    """Gives a module with one node changed to whoever imports it."""

    def __init__(self, mutant: Mutant, tree: ast.Module) -> None:
        self.module = f"{PACKAGE}.{mutant.file[:-3].replace('/', '.')}"
        self.path = str(ROOT / PACKAGE / mutant.file)
        self.code = compile_mutant(mutant, tree)

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self.module:
            return None
        loader = SourceFileLoader(name, self.path)
        loader.get_code = lambda fullname: self.code  # type: ignore[method-assign]
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


def list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and all that are within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from list_codes(constant)


def place_of(code: CodeType) -> tuple[str, str, int]:
    """Return the file, name and line of a code."""
    return code.co_filename, code.co_name, code.co_firstlineno


def of_import(code: CodeType) -> tuple[object, ...]:
    """Return the instructions, names and constants of a module or class; its functions are left out."""
    constants = [type(c) if isinstance(c, CodeType) else (type(c), c) for c in code.co_consts]
    return code.co_code, code.co_names, constants


def change_functions(
    mutant: Mutant, tree: ast.Module, functions: dict[tuple[str, str, int], list[FunctionType]]
) -> None:
    """Give the functions of a module the code of a mutant.

    Raises:
        ValueError: it is not only functions that change.
    """
    before = list_codes(compile(tree, str(ROOT / PACKAGE / mutant.file), "exec"))
    pairs = list(zip(before, list_codes(compile_mutant(mutant, tree, keeps_names=True)), strict=True))
    count = Counter(old for old, _ in pairs)
    for old, new in pairs:
        if old == new:
            continue
        if not old.co_flags & inspect.CO_OPTIMIZED:  # of a module or class
            if of_import(old) != of_import(new):
                raise ValueError("it runs at import")
        elif count[old] > 1:
            raise ValueError("two functions have the same code")
        else:
            for function in functions.get(place_of(old), ()):
                if function.__code__ == old:  # of several in one line
                    function.__code__ = new


class Forked:
    """A plugin of pytest: forks a process for every mutant, which runs the tests that call it, likely killers first."""

    def __init__(self, mutants: list[Mutant], trees: dict[str, ast.Module], result: Path) -> None:
        self.mutants, self.trees, self.result = mutants, trees, result
        self.paths = list(dict.fromkeys(path for mutant in mutants for path in mutant.tests))
        self.name = f"{len(mutants)} of {mutants[0].file}"

    def pytest_runtestloop(self, session) -> bool:  # type: ignore[no-untyped-def]
        items = {item.nodeid: item for item in session.items}
        functions = defaultdict(list)
        gc.unfreeze()  # what is frozen is not listed
        for function in gc.get_objects():
            if type(function) is FunctionType and function.__code__.co_filename.startswith(str(ROOT / PACKAGE)):
                functions[place_of(function.__code__)].append(function)
        gc.freeze()
        ends: dict[str, str] = {}
        killers: list[str] = []  # the latest first
        for mutant in self.mutants:
            seconds = {test: time for of_path in mutant.tests.values() for test, time in of_path.items()}
            tests = sorted(seconds, key=lambda test: (test not in killers[:5], seconds[test]))
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                signal.alarm(60 + int(5 * sum(seconds.values())))
                status = 3
                try:
                    change_functions(mutant, self.trees[mutant.file], functions)
                    status = self.run(session, [items[test] for test in tests], writing)
                except ValueError:
                    pass
                finally:
                    os._exit(status)
            os.close(writing)
            killer = os.read(reading, 1 << 16).decode()
            os.close(reading)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if killer:
                killers = [killer, *(test for test in killers if test != killer)]
            ends[mutant.name] = {0: "survived", 3: "import", -signal.SIGALRM: "clock"}.get(status, "killed")
            self.result.write_bytes(pickle.dumps(ends))
        return True

    @staticmethod
    def run(session, items: list, writing: int) -> int:  # type: ignore[no-untyped-def]
        """Return 1 if a test fails, whose name is written into a pipe."""
        session.items[:] = items
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                os.write(writing, item.nodeid.encode())
                return 1
        return 0


class Chosen:
    """A plugin of pytest: runs tests of these names alone, the quickest first."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.seconds), key=lambda i: self.seconds[i.nodeid])


class Watched:
    """A plugin of pytest: notes which functions of the package every test calls, and how long it takes."""

    def __init__(self) -> None:
        self.calls: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.test, self.failed = "", []
        self.inside = str(ROOT / PACKAGE) + os.sep

    def note(self, frame, event, arg):  # type: ignore[no-untyped-def]
        code = frame.f_code
        if code.co_filename.startswith(self.inside):
            self.calls[self.test].add((code.co_filename[len(self.inside) :], code.co_firstlineno))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid
        self.started = time.monotonic()
        sys.settrace(self.note)

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] = time.monotonic() - self.started
        self.test = ""


def tested(paths: Iterable[str], *plugins: object) -> int:
    """Run test files; return pytest's exit status."""
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--assert=plain", "--rootdir", str(ROOT)]
    options += ["-m", "combination or not (slow or optional)"]
    return int(pytest.main([*options, *paths], plugins=list(plugins)))


def watched(path: str, result: Path) -> int:
    """Write down what the tests of a file call."""
    plugin = Watched()
    sys.settrace(plugin.note)
    status = tested([path], plugin)
    sys.settrace(None)
    result.write_bytes(pickle.dumps((dict(plugin.calls), dict(plugin.seconds), plugin.failed)))
    return status


def killed(mutant: Mutant, tree: ast.Module) -> int:
    """Return 0 if no test fails."""
    sys.meta_path.insert(0, Mutated(mutant, tree))
    # 5: no such test, which kills nothing.
    return any(tested([path], Chosen(seconds)) not in (0, 5) for path, seconds in mutant.tests.items())


def fail_unchanged(mutants: list[Mutant], jobs: int) -> list[str]:
    """Return the files of tests of which some fail in a forked process without a mutant, and would kill any."""
    tests: dict[str, dict[str, float]] = defaultdict(dict)
    for mutant in mutants:
        for path, seconds in mutant.tests.items():
            tests[path] |= seconds
    nothing = ast.Constant(None)
    unchanged = [Mutant(path, path, nothing, nothing, [], {path: of}) for path, of in tests.items()]
    ends = run_forked(unchanged, {path: ast.parse("") for path in tests}, jobs)
    return [path for path, end in ends.items() if end != "survived"]


def run_forked(mutants: list[Mutant], trees: dict[str, ast.Module], jobs: int) -> dict[str, str]:
    """Return how every mutant ends: "killed", "survived", out of time ("clock") or not to be changed so ("import")."""
    groups = defaultdict(list)
    for mutant in mutants:
        if mutant.tests:
            groups[mutant.file].append(mutant)
    parts = [of[i : i + 60] for of in groups.values() for i in range(0, len(of), 60)]
    ends = dict.fromkeys((mutant.name for mutant in mutants), "survived")  # whatever no test calls
    with tempfile.TemporaryDirectory() as folder:
        plugins = [Forked(of, trees, Path(folder) / str(number)) for number, of in enumerate(parts)]
        work = [(lambda plugin=plugin: tested(plugin.paths, plugin), math.inf) for plugin in plugins]

        def done(number: int, status: int | None) -> None:
            plugin = plugins[number]
            found = pickle.loads(plugin.result.read_bytes()) if plugin.result.exists() else {}
            ends.update({mutant.name: found.get(mutant.name, "import") for mutant in plugin.mutants})
            lived = [f"  {ends[m.name]}: {m.name}" for m in plugin.mutants if m.lines and ends[m.name] != "killed"]
            print(f"ran {plugin.name}", *lived, sep="\n", flush=True)

        in_children(work, jobs, done)
    return ends


def in_children(
    work: list[tuple[Callable[[], int], float]], jobs: int, done: Callable[[int, int | None], None], loud: bool = False
) -> None:
    """Run every function in a child process; tell ``done`` its number and exit status, None if it ran out of time."""
    running: dict[int, tuple[int, float]] = {}
    left = list(enumerate(work))[::-1]
    while left or running:
        while left and len(running) < jobs:
            number, (function, limit) = left.pop()
            child = os.fork()
            if not child:
                run_and_exit(function, loud)
            running[child] = number, time.monotonic() + limit
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            done(running.pop(child)[0], os.waitstatus_to_exitcode(status))
            continue
        for child, (number, deadline) in list(running.items()):
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                del running[child]
                done(number, None)
        time.sleep(0.02)


def run_and_exit(function: Callable[[], int], loud: bool) -> None:
    status = 1
    try:
        os.setsid()
        if not loud:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
        status = int(function())
    finally:
        os._exit(status)


def choose_tests(mutants: list[Mutant], jobs: int) -> bool:
    """Find the tests of every mutant; return whether all tests pass as long as nothing is changed."""
    paths = sorted({path for mutant in mutants for path in test_files(mutant.file)})
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / str(number) for number in range(len(paths))]  # tests have absolute paths
        work = [(lambda p=p, r=r: watched(p, r), 1200.0) for p, r in zip(paths, results, strict=True)]
        in_children(work, jobs, lambda number, status: failed.append(paths[number]) if status else None)
        calls, seconds = {}, {}
        for path, result in zip(paths, results, strict=True):
            calls[path], seconds[path], names = pickle.loads(result.read_bytes()) if result.exists() else ({}, {}, [])
            failed += names
    if failed:
        print("these tests fail without a mutant:", *failed)
        return False
    for mutant in mutants:
        for path in test_files(mutant.file):
            of_path = calls[path]
            for line in mutant.lines:
                tests = {test for test, called in of_path.items() if test and (mutant.file, line) in called}
                if tests or (mutant.file, line) in of_path.get("", ()):  # what runs at import concerns every test
                    mutant.tests[path] = {t: s for t, s in seconds[path].items() if t in tests or not tests}
                    break
    return True


def test_files(file: str) -> list[str]:
    return [str(path) for name in TESTS[file].split() for path in (ROOT / "tests").rglob(f"test_{name}.py")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants with this in their names, or one of these: a|b")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--reasons", action="store_true", help="only those that have a reason to survive")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    options = parser.parse_args()
    begun = time.monotonic()

    def chosen(name: str) -> bool:
        return any(part in name for part in options.only.split("|"))

    trees = {file: ast.parse((ROOT / PACKAGE / file).read_text()) for file in TESTS}
    of_files = [m for file, tree in trees.items() for m in mutants_of(file, tree) if chosen(m.name)]
    mutants = [m for m in of_files if (reason_of(m.name) is not None) == options.reasons]
    if options.list:
        print(*(mutant.name for mutant in mutants), sep="\n")
        return 0
    import_all()
    if not choose_tests(mutants, options.jobs):
        return 1
    print(f"{len(mutants)} mutants, after {time.monotonic() - begun:.0f} s", flush=True)
    failed = fail_unchanged(mutants, options.jobs)
    if failed:
        print("some of these tests fail in a forked process without a mutant:", *failed)
        return 1
    ends = run_forked(mutants, trees, options.jobs)

    def is_doubtful(name: str) -> bool:
        if ends[name] == "killed":
            return name in EQUIVALENT
        return ends[name] == "import" or (ends[name] == "survived" and reason_of(name) is None)

    again = [mutant for mutant in mutants if is_doubtful(mutant.name)]
    print(f"{len(again)} of them once more, after {time.monotonic() - begun:.0f} s", flush=True)

    def done(number: int, status: int | None) -> None:
        ends[again[number].name] = {None: "clock", 0: "survived"}.get(status, "killed")

    work = []
    for mutant in again:
        limit = 60 + 5 * sum(sum(seconds.values()) for seconds in mutant.tests.values())
        work.append((lambda mutant=mutant: killed(mutant, trees[mutant.file]), limit))
    in_children(work, options.jobs, done)
    survivors = {name for name, end in ends.items() if end == "survived"}
    ran_out = [name for name, end in ends.items() if end == "clock"]
    for mutant in mutants:
        if mutant.name in survivors:
            count = sum(map(len, mutant.tests.values()))
            print(f"survived :{mutant.node.lineno} {mutant.name}  [{reason_of(mutant.name) or f'{count} tests'}]")
    print(*(f"out of time {name}" for name in ran_out), sep="\n")
    names, expected = {mutant.name for mutant in mutants}, {name for name in EQUIVALENT if chosen(name)}
    new = sorted(name for name in survivors if reason_of(name) is None)
    died, gone = sorted((expected & names) - survivors), sorted(expected - {mutant.name for mutant in of_files})
    for what, listed in (("SURVIVED", new), ("DIED, BUT HAS A REASON", died), ("DOES NOT EXIST", gone)):
        for name in listed:
            print(f"{what}: {name}")
    print(
        f"{len(mutants)} mutants: {len(mutants) - len(survivors)} killed ({len(ran_out)} by the clock), "
        f"{len(survivors) - len(new)} equivalent, {len(new)} survived; {time.monotonic() - begun:.0f} s"
    )
    return bool(new or died or gone)


def reason_of(name: str) -> str | None:
    function, _, change = name.partition(": ")
    if any(part in change for part in FASTER.get(function, ())):
        return "the same numbers by another way, chosen for speed, or the size of a tolerance"
    return EQUIVALENT.get(name)


def import_all() -> None:
    """Import what takes long, but not the package."""
    for name in ("hypothesis", "matplotlib.pyplot", "mpmath", "pytest", "pytorch_grad_cam", "torchvision"):
        importlib.import_module(name)
    for name in ("calibration", "ensemble", "kernel_approximation", "multiclass", "pipeline", "svm"):
        importlib.import_module(f"sklearn.{name}")
    from _pytest.config import default_plugins

    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import torch

    torch.set_num_threads(1)  # a pool of threads would not live through a fork
    gc.freeze()  # nothing of this is garbage before the end
    atexit.register(gc.unfreeze)
    assert not any(name.split(".")[0] == PACKAGE for name in sys.modules)


if __name__ == "__main__":
    sys.exit(main())
