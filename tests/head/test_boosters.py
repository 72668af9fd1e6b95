"""Boosters of XGBoost's and LightGBM's own interfaces: what is said, and whether following it helps."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError

ROWS = np.random.default_rng(0).normal(size=(80, 6))
LABELS = (ROWS[:, 0] > 0).astype(int)
REDUCTION = PCA(3).fit(ROWS)
COMPONENTS = REDUCTION.transform(ROWS)
SAVED = "XGBClassifier() (or XGBRegressor()) and model.load_model('booster.json')"
WRAPPED = (
    "wrap it in a class with classes_, decision_function(rows), booster.predict(rows, raw_score=True), and predict"
)


class Wrapped:
    """What the message of LightGBM's says, written down."""

    classes_ = np.array([0, 1])

    def __init__(self, booster):
        self.booster = booster

    def decision_function(self, rows):
        return self.booster.predict(rows, raw_score=True)

    def predict(self, rows):
        return (self.decision_function(rows) > 0).astype(int)


def booster(library, objective="binary sigmoid:1"):
    """Return what looks like a booster of a library."""

    def predict(self, rows, raw_score=False):
        if library == "xgboost":
            raise TypeError(("Expecting data to be a DMatrix object, got: ", type(rows)))
        raw = np.sign(np.asarray(rows)[:, 0]) + np.sign(np.asarray(rows)[:, 1] - 0.3) / 2
        return raw if raw_score or objective == "regression" else 1 / (1 + np.exp(-raw))

    members = {"__module__": f"{library}.basic", "predict": predict}
    members["dump_model"] = lambda self, num_iteration=None: {"objective": objective}
    return type("Booster", (), members)()


@pytest.mark.parametrize(
    ("library", "way"), [("xgboost", SAVED), ("lightgbm", WRAPPED), ("lightgbm", "LGBMClassifier")]
)
@pytest.mark.parametrize("alone", [True, False])
def test_the_message_names_what_helps(library, way, alone):
    parts = booster(library) if alone else [REDUCTION, booster(library)]
    with pytest.raises(
        NoClosedFormError, match=f"Booster is {library}'s own interface, which knows no classes"
    ) as told:
        Head.of(parts)
    assert way in str(told.value)
    assert "PCA" not in str(told.value)


def test_boosters_that_regress_are_explained():
    head = Head.of([REDUCTION, booster("lightgbm", "regression")])
    values = head(torch.from_numpy(ROWS)).values[-1][:, 0]
    np.testing.assert_allclose(values, booster("lightgbm", "regression").predict(COMPONENTS))


def test_a_wrapped_booster_is_explained():
    head = Head.of([REDUCTION, Wrapped(booster("lightgbm"))])
    values = head.scores(head(torch.from_numpy(ROWS)))[:, 1]
    np.testing.assert_allclose(values, booster("lightgbm").predict(COMPONENTS, raw_score=True))


@pytest.mark.optional
def test_what_is_said_of_xgboost_helps(tmp_path):
    xgboost = pytest.importorskip("xgboost")
    native = xgboost.train({"objective": "binary:logistic"}, xgboost.DMatrix(COMPONENTS, LABELS), 12)
    with pytest.raises(NoClosedFormError, match="load_model"):
        Head.of([REDUCTION, native])
    native.save_model(tmp_path / "booster.json")
    model = xgboost.XGBClassifier()
    model.load_model(tmp_path / "booster.json")
    head = Head.of([REDUCTION, model])
    expected = native.predict(xgboost.DMatrix(COMPONENTS), output_margin=True)
    np.testing.assert_allclose(head.scores(head(torch.from_numpy(ROWS)))[:, 1], expected, rtol=1e-6)
    assert head.classes_.tolist() == [0, 1]


@pytest.mark.optional
@pytest.mark.parametrize("objective", ["binary", "multiclass", "regression"])
def test_what_is_said_of_lightgbm_helps(objective):
    lightgbm = pytest.importorskip("lightgbm")
    options = {"objective": objective, "verbose": -1} | ({"num_class": 2} if objective == "multiclass" else {})
    native = lightgbm.train(options, lightgbm.Dataset(COMPONENTS, LABELS), 12)
    if objective == "regression":
        values = Head.of([REDUCTION, native])(torch.from_numpy(ROWS)).values[-1][:, 0]
        np.testing.assert_allclose(values, native.predict(COMPONENTS), rtol=1e-9)
        return
    with pytest.raises(NoClosedFormError, match="fit LGBMClassifier"):
        Head.of([REDUCTION, native])
    if objective == "binary":
        head = Head.of([REDUCTION, Wrapped(native)])
        values = head.scores(head(torch.from_numpy(ROWS)))[:, 1]
        np.testing.assert_allclose(values, native.predict(COMPONENTS, raw_score=True), rtol=1e-9)
