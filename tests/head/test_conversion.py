"""Conversion: a pipeline is listed once; the table's rows, of users and of estimators that hold others; blank maps."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.ensemble import BaggingRegressor
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.linear_model import Ridge
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from pytorch_grad_cam_pcasvm import Head, PCATarget, SVMTarget, stage_for
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput

ROWS = np.random.default_rng(0).normal(size=(60, 5))
LABELS = (ROWS[:, 0] > 0).astype(int)
QUERY = torch.from_numpy(ROWS[:7] + 0.1)


class Steps(list):
    """Steps that note who reads them."""

    readers = ()

    def __iter__(self):
        self.readers = (*self.readers, Path(inspect.currentframe().f_back.f_code.co_filename).name)
        return super().__iter__()


def test_a_pipeline_is_listed_once():
    pipeline = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(ROWS, LABELS)
    pipeline.steps = steps = Steps(pipeline.steps)
    head = Head.of(pipeline)
    # For its stages once; the other is Fit, which holds its estimators to see whether they are fitted again.
    assert steps.readers == ("convert.py", "fit_checks.py")
    assert relative(head.scores(head(QUERY))[:, -1], pipeline.decision_function(QUERY.numpy())) < 1e-10


NESTED = {
    "calibrated": (CalibratedClassifierCV(SVC(), cv=3), "predict_proba"),
    "bag": (BaggingRegressor(Ridge(), n_estimators=3, random_state=0), "predict"),
    "union": (FeatureUnion([("a", PCA(2)), ("b", StandardScaler())]), "transform"),
}


@pytest.mark.parametrize("name", NESTED)
def test_the_table_has_the_stage_of_an_estimator_that_holds_others(name):
    estimator, method = NESTED[name]
    stage = stage_for(estimator.fit(ROWS, LABELS))
    values, _ = stage.evaluate(QUERY)
    values = stage.voting.probabilities(values) if name == "calibrated" else values
    expected = getattr(estimator, method)(QUERY.numpy())
    assert relative(values.reshape(7, -1), expected.reshape(7, -1)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("first", ["stage_for.register(kind, own)", "Head.of(PCA(2).fit(x))"])
def test_a_users_row_takes_precedence_whenever_it_is_registered(first):
    # In a process of its own: that of the tests has converted others, and must keep the package's rows.
    code = f"""
import numpy as np, torch
from sklearn.decomposition import PCA
from sklearn.pipeline import FeatureUnion
from sklearn.preprocessing import StandardScaler
from pytorch_grad_cam_pcasvm import Head, stage_for
from pytorch_grad_cam_pcasvm.head import Scale
x = np.random.default_rng(0).normal(size=(20, 3))
own = lambda estimator: Scale(torch.zeros(3).double(), torch.full((3,), 4.0).double(), torch.zeros(3).double())
for kind, made in ((StandardScaler, StandardScaler()), (FeatureUnion, FeatureUnion([("a", StandardScaler())]))):
    {first}
    stage_for.register(kind, own)
    made.fit(x)
    head = Head.of([made, PCA(2).fit(made.transform(x))])
    assert torch.equal(head(torch.from_numpy(x)).values[1], torch.from_numpy(x) / 4), kind
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_decision_without_a_gradient_is_a_stage_that_says_what_is_asked_of_all():
    tree = DecisionTreeClassifier(max_depth=1, random_state=0)
    pipeline = make_pipeline(PCA(3), tree).fit(ROWS, LABELS)
    asked, closed = Head.of(pipeline), Head.of(make_pipeline(PCA(3), SVC()).fit(ROWS, LABELS))
    assert [len(stage.asked_estimators) for stage in asked.stages] == [0, 1]
    assert asked.enumerated is asked.stages[-1]
    assert closed.enumerated is None
    assert [head.stages[-1].has_poles for head in (asked, closed)] == [False, False]
    assert not asked.stages[-1].is_sampled
    output = HeadOutput.of(asked, asked(QUERY))
    blank = "none of its components changes the decision between the start and the image"
    assert SVMTarget(1).why_blank(output[0]) == blank
    assert SVMTarget(1).why_blank(HeadOutput.of(closed, closed(QUERY))[0]) is None


def test_a_kernel_inside_of_a_decision_is_no_reduction():
    # One of three classes is asked for its values; its kernels have parameters, as estimators do.
    classes = np.arange(60) % 3
    head = Head.of(GaussianProcessClassifier().fit(ROWS, classes))
    assert head.enumerated is not None
    assert not head.hides_reduction
    with pytest.raises(ValueError, match="needs a head with a PCA, but this one has none: use SVMTarget"):
        PCATarget(0)(HeadOutput.of(head, head(QUERY)))
    assert Head.of(make_pipeline(PCA(3), GaussianProcessClassifier()).fit(ROWS, classes)).hides_reduction
