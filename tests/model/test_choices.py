"""Choices by cross-validation: their scores against scikit-learn's own, their folds, and what is simplest."""

import itertools

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm.studio.model import choices
from pytorch_grad_cam_pcasvm.studio.model.choices import (
    Candidate,
    allowed_components,
    can_choose,
    choose_head,
    pick_simplest,
    reduce_rows,
    score_pairs,
    split_folds,
    take_part,
)


def rows(count=60, width=40, classes=2, signal=1.0, seed=0):
    """Return features of which a few directions know the classes, and labels."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    features = random.normal(size=(count, width)) * np.linspace(3, 0.5, width)
    features[:, :classes] += signal * np.eye(classes)[labels] * 3
    return features @ np.linalg.qr(random.normal(size=(width, width)))[0], labels


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (40, 40)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_first_columns_are_those_of_a_smaller_pca(shape, dtype):
    random = np.random.default_rng(0)
    features = (random.normal(size=shape) @ np.diag(np.linspace(5, 0.1, shape[1]))).astype(dtype)
    others = random.normal(size=(7, shape[1]))
    reduced, rest = reduce_rows(features.astype(float), others, 16)
    for count in (1, 8, 16):
        pipeline = make_pipeline(StandardScaler(), PCA(count, svd_solver="full")).fit(features.astype(float))
        np.testing.assert_allclose(reduced[:, :count], pipeline.transform(features.astype(float)), atol=1e-9)
        np.testing.assert_allclose(rest[:, :count], pipeline.transform(others), atol=1e-9)


def test_rows_of_fewer_dimensions_than_components():
    random = np.random.default_rng(0)
    features = random.normal(size=(20, 3)) @ random.normal(size=(3, 50))
    reduced, others = reduce_rows(features, features[:4] + 1, 10)
    assert np.isfinite(reduced).all()
    assert np.isfinite(others).all()
    np.testing.assert_allclose(reduced[:, 3:], 0, atol=1e-6)


def test_no_more_components_than_rows():
    features, labels = rows(26)
    reduced, others = reduce_rows(features[:6], features[6:], 8)
    assert reduced.shape == (6, 6)
    assert others.shape == (20, 6)
    assert choose_head(features, labels, SVC(), [{"C": 1.0}, {"C": 10.0}], [18]).chosen.components == 18


def test_score_of_two_classes_is_that_of_scikit_learn():
    random = np.random.default_rng(1)
    for _ in range(20):
        labels = random.integers(0, 2, 30)
        score = random.integers(-4, 5, 30) / 2  # with ties
        expected = roc_auc_score(labels, score)
        assert score_pairs(np.stack([-score, score], 1), labels) == pytest.approx(expected, abs=1e-12)
        probabilities = (score - score.min() + 0.5) / (score.max() - score.min() + 1)
        both = np.stack([1 - probabilities, probabilities], 1)
        assert score_pairs(both, labels) == pytest.approx(roc_auc_score(labels, both[:, 1]), abs=1e-12)


def test_score_of_pairs_is_that_of_scikit_learn_where_the_other_class_is_constant():
    # Scikit-learn orders the rows of a pair by the score of either class, here by their difference: the same where the
    # rows of a pair do not differ in the score of the third.
    labels, random = np.repeat([0, 1, 2], 6), np.random.default_rng(0)
    probabilities = np.full((18, 3), 0.1)
    probabilities[labels == 2, 2] = 0.8
    probabilities[:12, 2] = 0.2
    probabilities[:12, 0] = random.uniform(0.15, 0.65, 12)
    probabilities[:12, 1] = 0.8 - probabilities[:12, 0]
    for order in itertools.permutations(range(3)):
        told = np.empty_like(probabilities)
        told[:, order] = probabilities
        expected = roc_auc_score(np.array(order)[labels], told, multi_class="ovo")
        assert 0.5 < expected < 1
        assert score_pairs(told, np.array(order)[labels]) == pytest.approx(expected, abs=1e-12)


def test_score_of_pairs_is_the_mean_of_all_pairs():
    random = np.random.default_rng(2)
    labels, scores = random.integers(0, 4, 80), random.normal(size=(80, 4))
    areas = []
    for a, b in itertools.combinations(range(4), 2):
        wins = [
            float(scores[i, a] - scores[i, b] > scores[j, a] - scores[j, b])
            for i, j in itertools.product(np.flatnonzero(labels == a), np.flatnonzero(labels == b))
        ]
        areas.append(np.mean(wins))
        of_pair = np.isin(labels, (a, b))
        told = roc_auc_score(labels[of_pair] == a, (scores[:, a] - scores[:, b])[of_pair])
        assert areas[-1] == pytest.approx(told, abs=1e-12)
    assert score_pairs(scores, labels) == pytest.approx(np.mean(areas), abs=1e-12)
    assert np.isnan(score_pairs(scores[:3], np.zeros(3, int)))


@pytest.mark.parametrize("weight", [None, "balanced"])
@pytest.mark.parametrize("cost", [1.0, 10.0])
@pytest.mark.parametrize("count", [8, 16])
def test_table_is_that_of_cross_val_score(count, cost, weight):
    features, labels = rows(60, signal=0.4)
    settings = [{"C": c, "class_weight": w} for c in (1.0, 10.0) for w in (None, "balanced")]
    choice = choose_head(features, labels, SVC(), settings, [8, 16])
    own = next(one for one in choice.candidates
               if one.components == count and one.settings == {"C": cost, "class_weight": weight})  # fmt: skip
    pipeline = make_pipeline(StandardScaler(), PCA(count, svd_solver="full"), SVC(C=cost, class_weight=weight))
    scores = cross_val_score(pipeline, features, labels, cv=StratifiedKFold(5), scoring="roc_auc")
    assert own.score == pytest.approx(scores.mean(), abs=1e-12)
    assert own.error == pytest.approx(scores.std(ddof=1) / 5**0.5, abs=1e-12)


def test_score_told_is_of_choices_made_anew():
    features, labels = rows(80, signal=0.35, seed=3)
    settings = [{"C": cost} for cost in (1.0, 10.0, 100.0)]
    choice = choose_head(features, labels, SVC(), settings, [8, 16])
    scores, predicted = [], np.empty_like(labels)
    for fit, test in StratifiedKFold(5).split(features, labels):
        table = []
        for count, setting in itertools.product([8, 16], settings):
            pipeline = make_pipeline(StandardScaler(), PCA(count, svd_solver="full"), SVC(**setting))
            inner = cross_val_score(pipeline, features[fit], labels[fit], cv=StratifiedKFold(5), scoring="roc_auc")
            table.append((inner.mean(), inner.std(ddof=1) / 5**0.5, pipeline))
        best = max(table, key=lambda one: one[0])
        pipeline = next(one[2] for one in table if one[0] >= best[0] - best[1]).fit(features[fit], labels[fit])
        scores.append(roc_auc_score(labels[test], pipeline.decision_function(features[test])))
        predicted[test] = pipeline.predict(features[test])
    assert choice.score == pytest.approx(np.mean(scores), abs=1e-12)
    assert choice.error == pytest.approx(np.std(scores, ddof=1) / 5**0.5, abs=1e-12)
    assert (choice.predicted == predicted).all()


def test_nothing_is_learnt_from_noise():
    told = []
    for seed in range(8):
        features, labels = rows(40, signal=0, seed=seed)
        told.append(choose_head(features, labels, SVC(), [{"C": c} for c in (1.0, 10.0, 100.0)], [8, 16]).score)
    assert abs(np.mean(told) - 0.5) < 4 * np.std(told, ddof=1) / len(told) ** 0.5
    assert np.mean(told) < 0.6


def test_few_choices_cost_nothing():
    features, labels = rows(60)
    choice = choose_head(features, labels, SVC(), [{"C": 2.0}], [4])
    pipeline = make_pipeline(StandardScaler(), PCA(4, svd_solver="full"), SVC(C=2.0))
    assert (choice.predicted == cross_val_predict(pipeline, features, labels, cv=StratifiedKFold(5))).all()
    assert len(choice.candidates) == 1
    assert choice.score == pytest.approx(choice.chosen.score, abs=1e-12)


def test_simplest_within_one_standard_error():
    table = [Candidate(8, {}, 0.90, 0.01), Candidate(16, {"C": 1}, 0.94, 0.01), Candidate(16, {"C": 10}, 0.955, 0.01),
             Candidate(32, {}, 0.96, 0.02), Candidate(64, {}, np.nan, np.nan)]  # fmt: skip
    assert pick_simplest(table) is table[1]
    assert pick_simplest([table[4], table[0]]) is table[0]
    assert pick_simplest([table[4]]) is table[4]
    exact = [Candidate(8, {}, 0.999, 0.1), Candidate(16, {}, 1.0, 0.0)]
    assert pick_simplest(exact) is exact[1]


def test_components_that_the_data_allow():
    assert allowed_components(choices.COMPONENTS, 100, 1280) == [8, 16, 32, 64]
    assert allowed_components(choices.COMPONENTS, 64, 1280) == [8, 16, 32]
    assert allowed_components(choices.COMPONENTS, 5, 1280) == [4]
    features, labels = rows(30)
    choice = choose_head(features, labels, SVC())  # 24 rows of an outer fold, 19 of an inner one
    assert {one.components for one in choice.candidates} == {8, 16}


@pytest.mark.parametrize("classifier", [LogisticRegression(), RandomForestClassifier(10, random_state=0)])
def test_other_classifiers_and_names(classifier):
    features, labels = rows(60, classes=3, signal=3.0)
    names = np.array(["cat", "dog", "elk"])[labels]
    choice = choose_head(features, names, classifier, components=[8])
    assert set(choice.predicted) <= set(names)
    assert (choice.predicted == names).mean() > 0.5
    assert 0.6 < choice.score <= 1


def test_objects_stay_together():
    labels = np.tile([0, 1], 30)
    groups = np.arange(60) // 6
    for fit, test in split_folds(labels, groups):
        assert not set(groups[fit]) & set(groups[test])
    expected = list(StratifiedGroupKFold(5).split(labels, labels, groups))
    assert all((a[1] == b[1]).all() for a, b in zip(split_folds(labels, groups), expected, strict=True))
    with pytest.raises(ValueError, match="two photos, or objects, of each class"):
        split_folds(np.array([0, 0, 1, 1]), np.array([0, 1, 2, 2]))


def test_copies_of_an_object_are_worth_nothing():
    random = np.random.default_rng(0)
    groups = np.tile(np.arange(20), 4)
    labels = groups % 2
    objects = random.normal(size=(20, 40))
    features = objects[groups] + 0.01 * random.normal(size=(80, 40))
    apart = choose_head(features, labels, SVC(C=10.0), components=[8])
    together = choose_head(features, labels, SVC(C=10.0), components=[8], groups=groups)
    assert apart.score > 0.95
    assert together.score < 0.85
    choice = choose_head(features, labels, SVC(), [{"C": 1.0}, {"C": 10.0}], [4, 8], groups=groups)
    for fit, test in choice.folds:
        assert not set(groups[fit]) & set(groups[test])


def test_few_photos_or_objects():
    labels = np.repeat([0, 1], [30, 9])
    assert not can_choose(labels, None)
    labels = np.repeat([0, 1], [30, 10])
    assert can_choose(labels, None)
    assert not can_choose(labels, np.r_[np.arange(30), np.repeat([40, 41], 5)])
    assert can_choose(labels, np.r_[np.arange(30), np.repeat([40, 41, 42, 43, 44], 2)])


def test_part_of_a_large_set(monkeypatch):
    labels = np.repeat([0, 1, 2], [6000, 3000, 20])
    part = take_part(labels, None, 900, 0)
    assert np.bincount(labels[part]).tolist() == [599, 299, 20]
    assert (np.diff(part) > 0).all()
    assert not np.array_equal(part, take_part(labels, None, 900, 1))
    groups = np.arange(len(labels)) // 10
    part = take_part(labels, groups, 900, 0)
    sizes = np.bincount(groups[part])
    assert ((sizes == 10) | (sizes == 0)).sum() >= len(sizes) - 3  # the last of each class is cut
    assert (take_part(labels[:50], None, 900, 0) == np.arange(50)).all()
    monkeypatch.setattr(choices, "_MOST", 50)
    features, labels = rows(400)
    choice = choose_head(features, labels, SVC(), components=[4])
    assert len(choice.rows) == 100
    assert len(choice.predicted) == 100
    assert choice.score > 0.7


@pytest.mark.parametrize("classes", [3, 4])
def test_scores_of_pairs_are_no_scores_of_classes(classes):
    features, labels = rows(90, 20, classes, signal=2.0)
    by_shape = {
        shape: choose_head(features, labels, SVC(decision_function_shape=shape), components=[8])
        for shape in ("ovr", "ovo")
    }
    assert by_shape["ovo"].score == by_shape["ovr"].score > 0.8
    fitted = SVC(decision_function_shape="ovo").fit(features, labels)
    choices.read_scores(make_pipeline(fitted), features, classes)
    assert fitted.decision_function_shape == "ovo"  # it is the user's
