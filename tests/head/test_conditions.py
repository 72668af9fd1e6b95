"""Conditions of a pullback reach stages with what these saved; measures are those of the numbers that a head has."""

from itertools import product

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.decisions import KernelSVM, LinearDecision
from pytorch_grad_cam_pcasvm.head.kernels import RBF
from pytorch_grad_cam_pcasvm.head.measures import list_measures
from pytorch_grad_cam_pcasvm.head.stage import GROUPS, USUAL, Sampling, Stage, split_sampling
from pytorch_grad_cam_pcasvm.head.stages import Affine, Chain, KernelMap, Normalise, Projection, Scale, Select, Union
from pytorch_grad_cam_pcasvm.head.vote import one_vs_rest

FEATURES = np.random.default_rng(0).normal(size=(60, 14))
LABELS = np.arange(60) % 2


def test_a_stage_that_calls_its_base_class_hands_on_how_exactly_its_input_is_known() -> None:
    seen = []

    class Own(KernelSVM):
        def pullback(self, saved, grad):  # type: ignore[no-untyped-def]
            seen.append(saved.conditions)
            return super().pullback(saved, grad)

    head = Head.of(make_pipeline(StandardScaler(), SVC(gamma=1e4)).fit(FEATURES, LABELS))
    head.stages[-1].__class__ = Own
    trace = head(torch.tensor(FEATURES[:3]).float())
    grad, _ = head.pullback(trace, {2: torch.ones(1, 1, 1, dtype=torch.float64)})
    (conditions,) = seen
    assert conditions.eps == torch.finfo(torch.float32).eps
    assert torch.equal(conditions.errors(), head.errors(trace, 1))
    assert not grad.any()  # on a support vector nothing is left but rounding
    assert trace.saved[1].conditions.errors is None  # what was saved is as it was


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scale() -> Scale:
    return Scale(rand(4, seed=0), torch.tensor([0.5, -2.0, 3.0, 1.0]).double(), rand(4, seed=1))


# Of several stages in a row the last alone adds errors up.
STAGES: dict[str, Stage] = {
    "scale": scale(),
    "projection": Projection(rand(3, 4, seed=2), rand(4, seed=3), torch.tensor([0.5, -2.0, 3.0]).double()),
    "affine": Affine(rand(3, 4, seed=4), rand(3, seed=5)),
    "select": Select(torch.tensor([2, 0, 2]), 4),
    "chain": Chain([scale(), Select(torch.tensor([3, 1]), 4), Affine(rand(5, 2, seed=6), rand(5, seed=7))]),
    "union": Union([Chain([scale()]), Chain([scale(), Affine(rand(2, 4, seed=8), rand(2, seed=9))])]),
}


@pytest.mark.parametrize("name", STAGES)
def test_errors_are_those_of_the_worst_signs(name: str) -> None:
    stage, x, errors = STAGES[name], rand(3, 4, seed=10), rand(3, 4, seed=11).abs()
    moved = [stage.evaluate(x + torch.tensor(signs) * errors)[0] for signs in product([-1.0, 1.0], repeat=4)]
    expected = (torch.stack(moved) - stage.evaluate(x)[0]).abs().amax(0)
    torch.testing.assert_close(stage.errors(errors), expected, rtol=1e-12, atol=1e-12)


def test_errors_behind_a_stage_that_knows_none_are_not_known() -> None:
    errors = torch.ones(1, 4).double()
    assert Chain([Normalise("l2"), scale()]).errors(errors) is None
    assert Union([Chain([scale()]), Chain([Normalise("l2")])]).errors(errors) is None


def test_numbers_of_single_precision_are_as_exact_as_is_usual() -> None:
    x = rand(50, 4, seed=12) * 10
    assert ((x.float().double() - x).abs() <= USUAL.bound_rounding(x)).all()


def test_stages_inside_of_others_are_told_the_errors_of_their_own_input() -> None:
    seen = []

    class Own(KernelMap):
        def pullback(self, saved, grad):  # type: ignore[no-untyped-def]
            seen.append(saved.conditions)
            return super().pullback(saved, grad)

    def kernel_map(seed: int) -> Own:
        return Own(RBF(0.3), rand(6, 4, seed=seed), rand(6, 2, seed=seed + 1), rand(2, seed=seed + 2), False)

    first = Projection(rand(4, 4, seed=20), rand(4, seed=21), torch.ones(4).double())
    affine = Affine(rand(4, 4, seed=22), rand(4, seed=23))
    both = Union([Chain([kernel_map(30)]), Chain([Chain([affine, scale()]), kernel_map(40)])])
    decision = LinearDecision(rand(3, 4, seed=24), rand(3, seed=25), one_vs_rest(3), list("abc"))
    head = Head([first, both, Scale(*(torch.ones(4).double(),) * 3), decision])
    trace = head(rand(2, 4, seed=26))
    head.pullback(trace, {4: None})
    into_union = head.errors(trace, 0) @ first.components.abs().T
    expected = into_union, into_union @ affine.weight.abs().T / torch.tensor([0.5, 2.0, 3.0, 1.0]).double()
    for conditions, errors in zip(seen, expected, strict=True):
        assert conditions.eps == torch.finfo(torch.float64).eps
        torch.testing.assert_close(conditions.errors(), errors, rtol=1e-12, atol=0.0)


def test_groups_of_permutations_have_the_mean_of_all() -> None:
    head = Head.of(RandomForestClassifier(5, random_state=0).fit(FEATURES, LABELS))
    trace, start = (head(torch.tensor(rows)) for rows in (FEATURES[:2], FEATURES[2:3]))
    seeds = {1: torch.eye(trace.values[1].shape[1], dtype=torch.float64)[None, :1]}

    def slopes(sampling: Sampling) -> torch.Tensor:
        return head.pullback(trace, seeds, start, 0, sampling)[0]

    sampling = Sampling(32, seed=3)
    groups = split_sampling(head.enumerated, sampling)
    assert len(groups) == GROUPS
    assert split_sampling(None, sampling) == [sampling]
    assert torch.allclose(torch.stack([slopes(group) for group in groups]).mean(0), slopes(sampling), atol=1e-12)
    assert not torch.equal(slopes(groups[0]), slopes(groups[1]))


@pytest.mark.parametrize("change", ["load", "move"])
def test_measures_are_decided_again_for_other_numbers(change: str) -> None:
    head, other = (Head.of(make_pipeline(StandardScaler(), PCA(3)).fit(rows)) for rows in (FEATURES, 3 * FEATURES + 1))
    before = head.measures
    assert head.measures is before
    if change == "load":
        head.load_state_dict(other.state_dict())
    else:
        head.to("cpu")
    assert head.measures is not before
    for mine, expected in zip(head.measures, list_measures(list(head.stages), 14), strict=True):
        rows = mine.place.read_rows(head(torch.tensor(FEATURES)).values)
        assert mine[:2] == expected[:2]
        np.testing.assert_array_equal(mine.distances(rows), expected.distances(rows))
