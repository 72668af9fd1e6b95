"""Conditions of a pullback reach stages with what these saved; measures are those of the numbers that a head has."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.decisions import KernelSVM
from pytorch_grad_cam_pcasvm.head.measures import list_measures
from pytorch_grad_cam_pcasvm.head.stage import GROUPS, Sampling, split_sampling

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
