"""Heads fitted on tables: columns are taken by place, so that their names must be in order."""

import re
import warnings

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import Head, PCASVMNet

ROWS = np.random.default_rng(0).normal(size=(40, 12)) * np.arange(1, 13)
LABELS = np.arange(40) % 2


def pipeline():
    return make_pipeline(StandardScaler(), PCA(3), SVC())


def fitted(names):
    """Return a pipeline as it is when it was fitted on a table with these columns."""
    head = pipeline().fit(ROWS, LABELS)
    head[0].feature_names_in_ = np.array(names, dtype=object)
    return head


@pytest.mark.parametrize("name", ["f{}", "{}", "layer4.{}", "feature_{}_mean", "v2_{}"])
def test_numbers_sorted_as_text_are_told(name):
    names = [name.format(i) for i in range(12)]
    head = fitted(sorted(names))
    with pytest.warns(UserWarning, match="StandardScaler was fitted on columns whose numbers") as told:
        PCASVMNet(nn.Identity(), head)
    (last,) = (
        i for i in range(1, 12) if sorted(names)[i - 1] == names[11]
    )  # the first that is followed by a smaller one
    assert f"{names[11]}, {sorted(names)[last]}" in str(told[0].message)


@pytest.mark.optional
def test_what_is_said_helps():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(ROWS, columns=[f"f{i}" for i in range(12)])
    table = table[sorted(table.columns)]  # as some tools save columns
    with pytest.warns(UserWarning, match="not in the order"):
        Head.of(pipeline().fit(table, LABELS))
    right = table[sorted(table.columns, key=lambda name: [*map(int, re.findall("[0-9]+", name))])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = Head.of(pipeline().fit(right, LABELS))
        Head.of(pipeline().fit(table.to_numpy(), LABELS))
    scores = head.scores(head(torch.from_numpy(ROWS)))[:, 1]
    np.testing.assert_allclose(scores, pipeline().fit(ROWS, LABELS).decision_function(ROWS), atol=1e-9)


@pytest.mark.parametrize(
    "names",
    [
        [f"f{i}" for i in range(12)],
        [f"f{i:02}" for i in range(12)],
        [f"f{3 * i + 2}" for i in range(12)],
        [*"lkjihgfedcba"],
        [f"layer{layer}_{channel}" for layer in (2, 3) for channel in range(6)],
        [f"x{x}_y{y}" for y in range(3) for x in range(4)],
        [f"mean{i}" for i in range(6)] + [f"max{i}" for i in range(6)],
        [f"{name}{i}" for i in range(6) for name in ("max", "mean")],
        ["width", "height", "area2", "area1b", *"abcdefgh"],
    ],
    ids=lambda names: names[1],
)
@pytest.mark.filterwarnings("error")
def test_names_in_order_or_without_numbers_are_not(names):
    Head.of(fitted(names))


@pytest.mark.parametrize("columns", [[f"mean{i}" for i in range(6)] + [f"max{i}" for i in (1, 0, 2, 3, 4, 5)],
                                     [f"f{i}" for i in range(12)][::-1]], ids=["a part", "backwards"])  # fmt: skip
def test_other_orders_are_told_as_well(columns):
    with pytest.warns(UserWarning, match="whose numbers are not in the order of their places"):
        Head.of(fitted(columns))


def test_lists_and_searches_are_told_once():
    names = sorted(f"f{i}" for i in range(12))
    head, search = fitted(names), GridSearchCV(pipeline(), {"svc__C": [1, 10]}).fit(ROWS, LABELS)
    search.best_estimator_[0].feature_names_in_ = np.array(names, dtype=object)
    for whole in ([head[0], head[1:]], [*head], search):
        with pytest.warns(UserWarning, match="not in the order") as told:
            Head.of(whole)
        assert len(told) == 1


@pytest.mark.filterwarnings("error")
def test_only_what_takes_the_features_counts():
    head = pipeline().fit(ROWS, LABELS)
    head[1].feature_names_in_ = np.array(sorted(f"f{i}" for i in range(12)), dtype=object)
    Head.of(head)
