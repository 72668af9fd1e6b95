"""Resampled heads: what a bootstrap sample holds, and what refits keep."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import Head, HeadOutput, resample_heads
from pytorch_grad_cam_pcasvm.head.resampling import _draw_sample

ROWS = np.random.default_rng(0).normal(size=(60, 8)) + np.arange(60)[:, None] % 3
LABELS = np.array(["ant", "bee", "cat"])[np.arange(60) % 3]
PIPELINE = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(ROWS, LABELS)


def values(heads):
    with torch.no_grad():
        return torch.stack([head(torch.from_numpy(ROWS)).values[-1] for head in heads])


def test_a_seed_gives_the_same_heads_and_another_one_others():
    one, same, other = (values(resample_heads(PIPELINE, ROWS, LABELS, n=3, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert len({float(head.sum()) for head in one}) == 3


def test_more_heads_begin_with_the_same_ones():
    assert torch.equal(
        values(resample_heads(PIPELINE, ROWS, LABELS, n=2)), values(resample_heads(PIPELINE, ROWS, LABELS, n=3))[:2]
    )


def test_refits_are_those_of_scikit_learn():
    (head, _) = resample_heads(PIPELINE, ROWS, LABELS, n=2)
    sample = _draw_sample(np.arange(60), LABELS, np.random.default_rng([0, 0]))
    expected = clone(PIPELINE).fit(ROWS[sample], LABELS[sample]).decision_function(ROWS)
    scores = HeadOutput.of(head, head(torch.from_numpy(ROWS)))
    np.testing.assert_allclose(scores.detach().numpy(), expected, atol=1e-9)


def test_a_sample_has_as_many_of_each_class():
    uneven = np.repeat(["a", "b"], [45, 15])
    sample = _draw_sample(np.arange(60), uneven, np.random.default_rng(0))
    assert len(sample) == 60
    assert (uneven[sample] == "b").sum() == 15
    assert len(set(sample)) < 60


def test_groups_are_drawn_whole():
    groups = np.arange(60) // 6
    classes = groups % 2
    sample = _draw_sample(groups, classes, np.random.default_rng(0))
    drawn, counts = np.unique(sample, return_counts=True)
    for group in range(10):
        assert len(set(counts[groups[drawn] == group])) <= 1
        assert (groups[drawn] == group).sum() in (0, 6)
    assert (classes[groups[sample] * 6] == 1).sum() == 30


def test_groups_of_several_classes_are_drawn_until_all_are_there():
    groups, classes = np.arange(60) // 6, (np.arange(60) >= 54).astype(int)  # the last group alone has class 1
    classes[53] = 1
    for seed in range(20):
        assert set(classes[_draw_sample(groups, classes, np.random.default_rng(seed))]) == {0, 1}


def test_a_share_of_the_variance_keeps_the_number_that_it_gave():
    pipeline = make_pipeline(StandardScaler(), PCA(0.8), SVC()).fit(ROWS, LABELS)
    heads = resample_heads(pipeline, ROWS, LABELS, n=4)
    assert {head.stages[head.component_position - 1].n_outputs for head in heads} == {pipeline[1].n_components_}


def test_estimators_without_a_seed_get_one_and_others_keep_theirs():
    forest = make_pipeline(StandardScaler(), RandomForestClassifier(5)).fit(ROWS, LABELS)
    assert torch.equal(*(values(resample_heads(forest, ROWS, LABELS, n=2)) for _ in range(2)))
    assert forest[-1].random_state is None


@pytest.mark.parametrize("kind", ["search", "list", "one"])
def test_what_a_head_can_be_made_of_can_be_refitted(kind):
    fitted = {
        "search": GridSearchCV(clone(PIPELINE), {"svc__C": [1.0, 2.0]}, cv=2).fit(ROWS, LABELS),
        "list": [step for _, step in PIPELINE.steps],
        "one": SVC().fit(ROWS, LABELS),
    }[kind]
    assert len(resample_heads(fitted, ROWS, LABELS, n=2)) == 2


def test_a_regressor_needs_no_classes():
    fitted = make_pipeline(StandardScaler(), PCA(3), Ridge()).fit(ROWS, ROWS[:, 0])
    assert values(resample_heads(fitted, ROWS, ROWS[:, 0], n=2)).shape == (2, 60, 1)


def test_what_cannot_be_resampled_is_refused():
    with pytest.raises(TypeError, match="does not hold the estimators that it was made of: pass the fitted pipeline"):
        resample_heads(Head.of(PIPELINE), ROWS, LABELS)
    few = np.r_[0:60:3, 1:22:3, 2:60:3]
    with pytest.raises(ValueError, match=r"there are 7 photos \(or groups\) of the class 'bee'"):
        resample_heads(PIPELINE, ROWS[few], LABELS[few])
    with pytest.raises(ValueError, match=r"there are 2 photos \(or groups\) of the class 'ant'"):
        resample_heads(PIPELINE, ROWS, LABELS, groups=np.arange(60) % 6)
    with pytest.raises(ValueError, match="there are 59 labels for 60 rows"):
        resample_heads(PIPELINE, ROWS, LABELS[:-1])
    with pytest.raises(ValueError, match="n must be an integer of at least 2"):
        resample_heads(PIPELINE, ROWS, LABELS, n=1)
    head = Head.of(PIPELINE)
    with pytest.raises(ValueError, match="a spread, which needs two resampled heads at least, got 1"):
        head.resamples = [PIPELINE]
    other = clone(PIPELINE).fit(ROWS, LABELS == "ant")
    with pytest.raises(ValueError, match="must take the same features as the head, and know the same classes"):
        head.resamples = [PIPELINE, other]
    for fewer, count in ((make_pipeline(StandardScaler(), SVC()), 0), (make_pipeline(PCA(2), SVC()), 2)):
        with pytest.raises(ValueError, match=f"resampled head 1 has {count} components, the head has 3: fit them"):
            head.resamples = [PIPELINE, fewer.fit(ROWS, LABELS)]


@pytest.mark.parametrize("kind", ["svm", "forest"])
def test_resampled_heads_are_in_the_file_of_a_head(kind, tmp_path):
    last = SVC() if kind == "svm" else RandomForestClassifier(4, random_state=0)
    fitted = make_pipeline(StandardScaler(), PCA(3), last).fit(ROWS, LABELS)
    head = Head.of(fitted)
    head.save(tmp_path / "alone.safetensors")
    head.resamples = resample_heads(fitted, ROWS, LABELS, n=3)
    head.save(tmp_path / "head.safetensors")
    read = Head.load(tmp_path / "head.safetensors")
    torch.testing.assert_close(values(read.resamples.heads), values(head.resamples.heads), rtol=1e-5, atol=1e-5)
    assert read.resamples.matches == head.resamples.matches
    assert torch.equal(values([read]), values([head]))
    assert read.digest() == head.digest()
    if kind == "svm":  # estimators are written with ids of their objects
        read.save(tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "head.safetensors").read_bytes()
    # Earlier versions refuse what they would leave out.
    with safe_open(tmp_path / "head.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pytorch_grad_cam_pcasvm head 4"
    assert Head.load(tmp_path / "alone.safetensors").resamples is None
