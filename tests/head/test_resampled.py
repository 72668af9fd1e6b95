"""Pipelines with samplers, which change only the training set: imbalanced-learn's, and stand-ins for them."""

import numpy as np
import pytest
import torch
from problems import closed_form
from reference import relative
from sklearn.base import BaseEstimator
from sklearn.decomposition import PCA
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from test_head import DATA, QUERY, expected_scores, scores

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError

X, LABELS = DATA[2]


class Half(BaseEstimator):
    """A sampler: it leaves most of the training set out."""

    def fit(self, x, y):
        self.n_features_in_ = x.shape[1]
        return self

    def fit_resample(self, x, y):
        return self.fit(x, y) and (x[::3], y[::3])


class Sampling(Pipeline):
    """As imblearn.pipeline.Pipeline: samplers are run in fit, and passed over by all that predicts."""

    __module__ = "imblearn.pipeline"

    def fit(self, x, y):
        for _, step in self.steps:
            if hasattr(step, "fit_resample"):
                x, y = step.fit_resample(x, y)
            else:
                x = step.fit(x, y).transform(x) if hasattr(step, "transform") else step.fit(x, y)
        return self

    def decision_function(self, x):
        for _, step in self.steps[:-1]:
            x = step.transform(x) if hasattr(step, "transform") else x
        return self.steps[-1][1].decision_function(x)


def steps(sampler):
    return [("scaler", StandardScaler()), ("sampler", sampler), ("pca", PCA(3)), ("machine", SVC())]


@pytest.mark.parametrize("whole", [True, False], ids=["pipeline", "list of its steps"])
def test_samplers_are_left_out(whole):
    pipeline = Sampling(steps(Half())).fit(X, LABELS)
    head = Head.of(pipeline if whole else [step for _, step in pipeline.steps])
    assert relative(scores(head, QUERY), expected_scores(pipeline, QUERY)) < 1e-12
    plain = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(X, LABELS)
    assert relative(scores(head, QUERY), expected_scores(plain, QUERY)) > 1e-3  # which was fitted on all images


def test_a_pipeline_of_ones_own_and_what_predicts_are_not_left_out():
    class Own(Sampling):
        __module__ = "mine"

        def decision_function(self, x):
            return -super().decision_function(x)

    class Predicting(Half):
        def predict(self, x):
            return np.zeros(len(x))

    with pytest.raises(NoClosedFormError, match="Own is a Pipeline with a decision_function of its own"):
        closed_form(Own(steps(Half())).fit(X, LABELS))
    with pytest.raises(NoClosedFormError, match="Predicting has no closed-form Jacobian"):
        closed_form([PCA(3).fit(X), Predicting().fit(PCA(3).fit_transform(X), LABELS)])


@pytest.mark.optional
def test_pipelines_of_imbalanced_learn():
    pytest.importorskip("imblearn")
    from imblearn.over_sampling import RandomOverSampler
    from imblearn.pipeline import Pipeline as Resampled

    kept = (LABELS[0] == LABELS) | (np.arange(len(X)) % 3 == 0)
    pipeline = Resampled(steps(RandomOverSampler(random_state=0))).fit(X[kept], LABELS[kept])
    head = Head.of(pipeline)
    assert relative(scores(head, QUERY), expected_scores(pipeline, QUERY)) < 1e-12
    assert head.labels(head(torch.tensor(QUERY))).tolist() == pipeline.predict(QUERY).tolist()
