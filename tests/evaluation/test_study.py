"""Study: the numbers of the single functions, from maps that are made once."""

import inspect
import json
import pickle
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch.utils.data import Dataset

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, PCASVMNet, PCATarget, evaluation
from pytorch_grad_cam_pcasvm.studio.evaluation.report import CHECKS
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Made

OPTIONS = {
    "faithfulness": {"fractions": (0.5,)},
    "localisation": {"masks": np.tile([0, 0, 6, 6], (60, 1))},
    "sensitivity": {"layers": 1},
    "completeness": {},
    "stability": {"shift": 0.1},
}
QUIET = {"images": 12, "progress": False}


class Counted(ContributionCAM):
    """Contributions that count what they explain."""

    calls: ClassVar[list[int]] = []

    def explain(self, x, targets, **options):
        self.calls.append(len(x))
        return super().explain(x, targets, **options)


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(Counted, "calls", [])
    return Counted.calls


@pytest.mark.parametrize("target", [None, PCATarget(1)])
@pytest.mark.slow
def test_a_study_finds_what_the_functions_find(corner, target, tmp_path):
    net, x, labels = corner
    call = [net, (x, labels), ["features"], [ContributionCAM, ClosedFormGradCAM]]
    few = QUIET | {"images": 4}  # every report draws every image of every measure and method
    study = evaluation.Study(*call, target, **few)
    expected = {}
    for check, options in OPTIONS.items():
        explained = {} if check == "localisation" else {"target": target}
        expected[check] = getattr(evaluation, check)(*call, **explained, **options, **few).to_dict()
        assert getattr(study, check)(**options).to_dict() == expected[check]
    for report in (
        study.report(tmp_path / "study", checks=OPTIONS),
        evaluation.report(*call, target=target, out=tmp_path / "function", checks=OPTIONS, **few),
    ):
        found = json.loads(report.with_name("report.json").read_text())["results"]
        assert found == json.loads(json.dumps(expected))
    assert (tmp_path / "study" / "index.html").read_text() == (tmp_path / "function" / "index.html").read_text()


@pytest.mark.slow
def test_measures_of_the_same_images_share_their_maps(corner, calls, tmp_path):
    study = evaluation.Study(*corner[:2], ["features"], [Counted], PCATarget(0), **QUIET)
    study.completeness()
    assert sum(calls) == 3 * 12  # each image, the one before it, and each with a head of its own
    study.faithfulness(fractions=(0.5,))
    study.sensitivity(layers=0)
    assert sum(calls) == 3 * 12
    study.stability()
    assert sum(calls) == 5 * 12  # and the two changed images
    study.report(tmp_path, checks={"completeness": {}, "faithfulness": {"fractions": (0.5,)}})
    assert sum(calls) == 5 * 12 + 1  # the example of a page
    study.report(tmp_path, checks={"completeness": {"seed": 1}})  # other images
    assert sum(calls) == 8 * 12 + 2


def test_masks_share_the_maps_of_the_predicted_classes_and_scenes_have_their_own(corner, calls):
    net, x, labels = corner
    study = evaluation.Study(net, (x, labels), ["features"], [Counted], **QUIET)
    study.completeness()
    before = sum(calls)
    study.localisation(masks=OPTIONS["localisation"]["masks"])
    assert sum(calls) == before
    for _ in range(2):
        scenes = study.localisation(tiles=4).settings["scenes"]
        assert sum(calls) == before + 3 * scenes


class Moving(Dataset):
    """Images that are others whenever they are read."""

    def __init__(self, x):
        self.x, self.generator = x, torch.Generator().manual_seed(0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row] + torch.randn(self.x[row].shape, generator=self.generator)


def test_images_that_change_are_explained_again(corner, calls):
    study = evaluation.Study(corner[0], Moving(corner[1]), ["features"], [Counted], PCATarget(0), **QUIET)
    found = [study.completeness().to_dict() for _ in range(2)]
    assert sum(calls) == 2 * 3 * 12
    assert found[0]["rows"] != found[1]["rows"]


@pytest.mark.slow
def test_no_more_maps_are_kept_than_there_is_room_for(corner, calls):
    study = evaluation.Study(*corner[:2], ["features"], [Counted], PCATarget(0), **QUIET)
    expected = study.completeness().to_dict()
    count = sum(calls)
    for room, again in ((0, count), (1, count), (2**28, 0), (4 * 12 * 144, None)):
        study.made = Made(room)
        assert study.completeness().to_dict() == expected
        calls.clear()
        assert study.completeness().to_dict() == expected
        assert sum(calls) == again if again is not None else 0 < sum(calls) < count


def test_measures_do_not_mix_what_they_find(corner):
    net, x, labels = corner
    masks = np.zeros((60, 12, 12))
    masks[:30, :6, :6] = 1
    study = evaluation.Study(net, (x, labels), ["features"], [ContributionCAM], **QUIET)
    first = study.completeness()
    assert study.localisation(masks=masks).settings["images"] < 12
    again = study.completeness()
    assert again.to_dict() == first.to_dict()
    assert "not measured" not in again.settings


def test_a_head_without_classes_is_told_what_to_do(corner):
    net, x, _ = corner
    only = PCASVMNet(net.backbone, PCA(2).fit(net.backbone(x).detach().numpy()))
    study = evaluation.Study(only, x, ["features"], **QUIET)
    with pytest.raises(ValueError, match=r"pass target=PCATarget\(0\)"):
        study.faithfulness()
    with pytest.raises(ValueError, match="measure faithfulness instead"):
        study.localisation()


@pytest.mark.parametrize("name", [*CHECKS, "report"])
def test_the_functions_take_the_arguments_of_a_study_and_of_its_measure(name):
    function, own = getattr(evaluation, name), inspect.signature(getattr(evaluation.Study, name)).parameters
    study = inspect.signature(evaluation.Study).parameters
    parameters = inspect.signature(function).parameters
    assert list(parameters)[:4] == ["net", "data", "target_layers", "methods"]
    assert set(parameters) == set(list(own)[1:]) | set(study) - ({"target"} if name == "localisation" else set())
    defaults = {key: parameter.default for key, parameter in {**own, **study}.items() if key in parameters}
    defaults["images"] = 100 if name in ("sensitivity", "stability") else 200
    assert {key: parameter.default for key, parameter in parameters.items()} == defaults
    assert pickle.loads(pickle.dumps(function)) is function
    with pytest.raises(TypeError, match="unexpected keyword argument 'image'"):
        function(None, None, None, image=5, **{"out": "."} if name == "report" else {})


class AskedError(Exception):
    """Raised in place of a measurement."""


@pytest.mark.parametrize("name", [*CHECKS, "report"])
def test_the_functions_hand_on_every_argument(name, corner, monkeypatch):
    values = {"images": 4, "batch_size": 3, "seed": 5, "progress": False, "transform": len, "normal": None,
              "stop_early": True, "minutes": 7.0, "target": PCATarget(1)}  # fmt: skip
    function, parameters = getattr(evaluation, name), inspect.signature(getattr(evaluation, name)).parameters
    own = {key: object() for key in inspect.signature(getattr(evaluation.Study, name)).parameters if key != "study"}

    def measure(study, *args, **options):
        given = {key: getattr(study, key) for key in values if key in parameters}
        assert given == {key: value for key, value in values.items() if key in parameters}
        assert list(study.named) == ["ContributionCAM"]
        assert [*args, *options.values()] == [own[key] for key in [*[*own][: len(args)], *options]]
        assert len(args) + len(options) == len(own)
        raise AskedError

    monkeypatch.setattr(evaluation.Study, name, measure)
    net, x, labels = corner
    of_study = {key: value for key, value in values.items() if key in parameters}
    with pytest.raises(AskedError):
        function(net, (x, labels), ["features"], [ContributionCAM], **of_study, **own)
