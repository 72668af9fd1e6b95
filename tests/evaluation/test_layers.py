"""Which layer: candidates on the same images, and small images pasted into others."""

import importlib

import numpy as np
import pytest
import torch
from problems import explained

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, PCASVMNet, evaluation
from pytorch_grad_cam_pcasvm.studio.evaluation.faithfulness import in_patches
from pytorch_grad_cam_pcasvm.studio.evaluation.localisation import _pasted

RANDOM = "random maps"


@pytest.fixture(scope="module")
def found():
    p = explained("pooled", "rbf", 2, size="square")
    images = p.images(12, seed=11)
    data = images, [p.labels[n % 2] for n in range(12)]
    candidates = {"early": p.backbone.features[1], "last": "features", "both": ["features.1", "features"]}
    return p, data, evaluation.layers(p.net, data, candidates, images=None, progress=False)


@pytest.mark.slow
def test_every_candidate_is_measured_as_by_hand(found):
    p, data, result = found
    # The head knows the mean where features are means; elsewhere it is that of the images given.
    x = data[0]
    with torch.no_grad():
        mean = p.backbone.features[:2](x).mean(0)
    methods = {"early": (ContributionCAM, {"mean": mean}), "last": (ContributionCAM, {})}
    for name, layer in (("early", "features.1"), ("last", "features")):
        alone = {name: methods[name]}
        by_hand = evaluation.faithfulness(
            p.net, data, [layer], alone, patches=14, images=None, progress=False, rivals=(RANDOM,)
        )
        # Random maps have the resolution of the last layer there.
        curves = by_hand.curves["deletion"][name], result.curves["deletion"][name]
        assert np.allclose(*curves, rtol=1e-6)
    measures = {row.measure for row in result.rows if row.method == "both, mean"}
    assert {"deletion", "insertion", "pasted: pointing game"} <= measures


@pytest.mark.slow
def test_one_is_recommended_in_a_sentence(found):
    _, _, result = found
    totals = {
        name: sum(result[name, kind, RANDOM].mean for kind in ("deletion", "insertion"))
        for name in ("early", "last", "both", "both, mean")
    }
    recommended = result.settings["recommended"]
    assert recommended in (["features.1"], ["features"], ["features.1", "features"])
    best = max(totals, key=totals.get)
    assert recommended == ["features"] or best != "last"
    assert str(result).startswith("layers: Recommended: ")


def test_candidates_are_compared_with_the_last_layer_image_by_image(found):
    _, _, result = found
    for kind, sign in (("deletion", -1), ("insertion", 1)):
        curves = result.curves[kind]
        for name in ("early", "both", "both, mean"):
            difference = sign * (np.mean(curves[name]) - np.mean(curves["last"]))
            assert abs(result[name, kind, "last"].mean - difference) < 1e-9
    assert all(row.method != row.against for row in result.rows)


def test_candidates_are_found_by_themselves(found):
    p, data, _ = found
    result = evaluation.layers(p.net, data[0][:6], images=None, progress=False)
    named = {row.method for row in result.rows}
    assert "features" in named
    assert any(" + features" in name for name in named)
    assert any(name.endswith(", mean") for name in named)
    assert "labels" in result.settings["not side by side"]
    options = {"images": None, "progress": False, "combine": ["shared"]}
    shared = evaluation.layers(p.net, data[0][:6], ["features.1", ["features.1", "features"]], **options)
    assert {row.method for row in shared.rows} == {"features.1", "features.1 + features"}


def test_means_that_the_head_has_are_its_own(monkeypatch):
    p, module = explained("pooled", "rbf", 2, size="square"), importlib.import_module(evaluation.layers.__module__)
    net, methods = PCASVMNet(p.backbone, p.fitted).eval(), {}
    net.head.training_set.means["features.1"] = torch.zeros(5, 1)

    def stopped(net, subject, named):
        methods.update(named)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_unfit", stopped)
    with pytest.raises(KeyboardInterrupt):
        evaluation.layers(net, p.images(6, seed=11), {"early": "features.1", "both": ["features.1", "features"]})
    # Of two layers one is missing, and so both are means of these images; of the first alone it is still the head's.
    assert methods["early"][1]["mean"] is None
    assert len(methods["both"][1]["mean"]) == 2


def test_two_and_three_layers_are_compared_together(monkeypatch):
    p, module = explained("pooled", "rbf", 2, size="square"), importlib.import_module(evaluation.layers.__module__)
    titles = []

    def stopped(net, subject, named):
        titles.extend(named)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_unfit", stopped)
    blocks = ["features.0", "features.1", "features"]
    monkeypatch.setattr(module, "find_last_blocks", lambda *_: blocks)
    with pytest.raises(KeyboardInterrupt):
        evaluation.layers(p.net, p.images(6, seed=11), progress=False)
    two, three = " + ".join(blocks[1:]), " + ".join(blocks)
    assert titles == [*blocks, two, f"{two}, mean", three, f"{three}, mean"]


def test_bad_candidates(found):
    p, data, _ = found
    with pytest.raises(ValueError, match="candidates is empty"):
        evaluation.layers(p.net, data, [], progress=False)
    with pytest.raises(ValueError, match=r"combine must name some of shared, mean, got \['sum'\]"):
        evaluation.layers(p.net, data, combine=["sum"], progress=False)
    with pytest.raises(ValueError, match="no layer 'nowhere'"):
        evaluation.layers(p.net, data, ["nowhere"], progress=False)


def test_patches_are_means_of_equal_size():
    maps = np.arange(2 * 6 * 4, dtype=float).reshape(2, 6, 4)
    patched = in_patches(maps, 3)
    for row in range(3):
        for column in range(2):
            here = np.s_[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert np.allclose(patched[here], maps[here].mean((1, 2), keepdims=True))


def test_a_pasted_image_is_where_its_mask_is():
    small, large = torch.ones(3, 20, 30), torch.zeros(3, 20, 30)
    for place in ((0.0, 0.0), (0.999, 0.999), (0.3, 0.7)):
        scene, mask = _pasted(small, large, np.array(place))
        assert mask.sum() == 7 * 11
        assert torch.equal(scene[0] > 0.5, torch.from_numpy(mask))


def test_pasted_scenes_are_explained_for_the_small_image(found):
    p, data, _ = found
    result = evaluation.localisation(
        p.net, data, ["features"], [ClosedFormGradCAM], pasted=True, images=None, progress=False
    )
    assert result.settings["pasted"]
    assert 0.1 < result.settings["chance"] < 0.16
    with pytest.raises(ValueError, match="pasted makes its own masks"):
        evaluation.localisation(p.net, data, ["features"], pasted=True, masks=np.ones((24, 8, 8)), progress=False)
