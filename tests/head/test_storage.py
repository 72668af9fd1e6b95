"""Heads in files."""

import copy
import hashlib
import json
import pickle

import numpy as np
import pytest
import torch
from heads import DATA
from problems import Problem, damaged
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, Head, PCASVMNet, PCATarget, SVMTarget
from pytorch_grad_cam_pcasvm.head import storage
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.storage import Example


def test_a_loaded_head_gives_bit_identical_maps(tmp_path):
    problem = Problem(classes=4)
    problem.net.head.save(tmp_path / "head.safetensors")
    net = PCASVMNet(problem.backbone, Head.load(tmp_path / "head.safetensors"), layer="classifier.4")
    expected, actual = (ClosedFormGradCAM(n, [problem.target_layer]).explain(problem.x) for n in (problem.net, net))
    assert torch.equal(actual.maps, expected.maps)
    assert net.predict(problem.x).tolist() == problem.net.predict(problem.x).tolist()
    assert net.predict(problem.x).dtype == problem.net.predict(problem.x).dtype


LABELS = [["a", "b"], [3, 7], [False, True], np.array(["x", "y"], dtype=object), [1.0, 2.0], ["\ud800", "b"]]


@pytest.mark.parametrize("labels", LABELS, ids=str)
def test_labels_of_any_dtype(labels, tmp_path):
    x, y = DATA[2]
    head = Head.of(SVC().fit(x, np.asarray(labels)[y]))
    head.save(tmp_path / "head.safetensors")
    loaded = Head.load(tmp_path / "head.safetensors").classes_
    assert loaded.tolist() == head.classes_.tolist()
    assert loaded.dtype == head.classes_.dtype


@pytest.fixture
def file(tmp_path):
    Problem().net.head.save(tmp_path / "head.safetensors")
    return tmp_path / "head.safetensors"


def test_a_link_stays_a_link(file, tmp_path):
    written = file.read_bytes()
    target, link = tmp_path / "other" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to("other/target")
    for _ in range(2):  # a target that is not there, and one that is
        Head.load(file).save(link)
        assert link.is_symlink()
        assert target.read_bytes() == written
        target.write_bytes(b"")
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_there_is_no_pickle_in_the_file(file):
    content = file.read_bytes()
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    parts = [part["part"] for part in json.loads(header["__metadata__"]["head"])]
    assert parts == ["Scale", "Projection", "KernelSVM"]


@pytest.mark.parametrize("cut", [0, 5, 300, -1])
def test_a_truncated_file_is_refused(file, cut):
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match="not a safetensors file, or is truncated"):
        Head.load(file)


def test_a_changed_file_is_refused(file):
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[-20] ^= 1
    for changed in (bytes(flipped), content.replace(b"ant", b"axt")):
        assert changed != content
        file.write_bytes(changed)
        with pytest.raises(ValueError, match="changed since it was written"):
            Head.load(file)


@pytest.mark.parametrize("what", ["head", "maps"])
def test_a_damaged_file_is_refused(what, tmp_path):
    problem = Problem()
    written = problem.net.head
    if what == "maps":
        targets = [PCATarget(1, "-"), SVMTarget("ant", versus=np.str_("cat"))]
        written = ContributionCAM(problem.net, [problem.target_layer]).explain(problem.x, targets)
    file = tmp_path / "file"
    written.save(file)
    for content in damaged(file.read_bytes()):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged|changed since") as error:
            type(written).load(file)
        assert error.type is ValueError


def test_a_foreign_file_is_refused(tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"not a file that net.head.save\(path\) wrote"):
        Head.load(tmp_path / "other.safetensors")
    (tmp_path / "text").write_text("hello " * 100)
    with pytest.raises(ValueError, match="not a safetensors file"):
        Head.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        Head.load(tmp_path / "nowhere")


def edited(file, change, form=None):
    """Write a file again after a change of its header, with a checksum that fits."""
    with safe_open(file, framework="pt") as old:
        metadata, tensors = old.metadata(), {name: old.get_tensor(name) for name in old.keys()}  # noqa: SIM118
    parts = json.loads(metadata["head"])
    change(parts)
    header = json.dumps(parts)
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors, key=lambda name: (len(name), name)):
        digest.update(f"{tensors[name].dtype}{tuple(tensors[name].shape)}".encode() + tensors[name].numpy().tobytes())
    save_file(tensors, file, {"format": form or metadata["format"], "head": header, "sha256": digest.hexdigest()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[0].update(part="Whitening"), "it has an unknown part, 'Whitening'"),
        (lambda parts: parts[2]["arguments"].pop("voting"), "missing 1 required positional argument: 'voting'"),
        (lambda parts: parts[2]["arguments"].update(rules=3), "unexpected keyword argument 'rules'"),
        (lambda parts: parts[1]["arguments"].update(mean={"tensor": "99"}), "it has no tensor '99'"),
        (lambda parts: parts[1]["arguments"].update(mean=None, components=3.0), "'float'"),
        (lambda parts: parts.append(4), "its parts are not stages"),
    ],
)
def test_a_file_that_was_edited_is_refused(file, change, message):
    edited(file, lambda parts: None)
    Head.load(file)
    edited(file, change)
    with pytest.raises(ValueError, match=f"head.safetensors is damaged, or no valid head: .*{message}.*write it again"):
        Head.load(file)


def test_a_file_of_a_newer_version_is_refused(file):
    edited(file, lambda parts: None, "pytorch_grad_cam_pcasvm head 5")
    with pytest.raises(ValueError, match="written by a newer version, or is damaged: update"):
        Head.load(file)


def test_a_stage_of_ones_own_is_not_saved(tmp_path):
    class Mine(Stage):
        reduces = True

    head = Head([Mine()])
    with pytest.raises(TypeError, match="a head with a Mine cannot be saved"):
        head.save(tmp_path / "head")


@pytest.mark.parametrize("other", [SVC(gamma=0.7), SVC(kernel="sigmoid", gamma=0.1)], ids=str)
def test_the_state_of_another_kind_of_head_is_refused(other):
    x, y = np.random.default_rng(0).normal(size=(40, 4)), np.arange(40) % 2
    head, same = (Head.of(SVC(gamma=0.1).fit(x, y)) for _ in range(2))
    same.load_state_dict(head.state_dict())
    strange = Head.of(other.fit(x, y))
    strange.stages[0].support_vectors = head.stages[0].support_vectors.clone()
    for name in ("dual_coef", "support"):
        setattr(strange.stages[0], name, getattr(head.stages[0], name).clone())
    with pytest.raises(ValueError, match="another kernel"):
        strange.load_state_dict(head.state_dict())


def test_bad_places_and_labels_are_refused(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 4))
    head = Head.of(SVC().fit(x, np.arange(40) % 2))
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        head.save(tmp_path / "none" / "head")
    with pytest.raises(ValueError, match="is a folder"):
        Head.load(tmp_path)
    dates = np.array(["2026-01-01", "2026-01-02"], dtype="datetime64[D]")
    with pytest.raises(TypeError, match="class labels of type datetime64"):
        Head.of(SVC().fit(x, dates[np.arange(40) % 2])).save(tmp_path / "head")


def test_examples_are_kept_and_change_nothing_else(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 4))
    head = Head.of(SVC().fit(x, np.arange(40) % 2))
    head.save(tmp_path / "without")
    head.examples = {3: Example("cat/ä.jpg", b"\0picture\xff"), 7: Example("dog/1.jpg")}
    head.save(tmp_path / "with")
    again = Head.load(tmp_path / "with")
    assert again.examples == head.examples
    assert Head.load(tmp_path / "without").examples == {}
    assert again.digest() == head.digest() == Head.load(tmp_path / "without").digest()
    assert Head.of(again).examples == copy.deepcopy(again).examples == head.examples
    whole = (tmp_path / "with").read_bytes()
    at = whole.index(b"dog/1.jpg")
    (tmp_path / "with").write_bytes(whole[:at] + b"D" + whole[at + 1 :])
    with pytest.raises(ValueError, match="was changed since it was written"):
        Head.load(tmp_path / "with")


@pytest.mark.parametrize("listed", ["[[1]]", "{", '[["a", "b", "c"]]', '[[1, "name", "not base64"]]'])
def test_examples_that_are_none(tmp_path, monkeypatch, listed):
    head = Head.of(SVC().fit(np.eye(4), [0, 1, 0, 1]))
    head.examples = {0: Example("cat")}
    bad = torch.frombuffer(bytearray(listed.encode()), dtype=torch.uint8)
    monkeypatch.setattr(storage.torch, "frombuffer", lambda *_, **__: bad)
    head.save(tmp_path / "head")
    with pytest.raises(ValueError, match="is damaged, or no valid head"):
        Head.load(tmp_path / "head")


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_no_length_of_a_header_makes_a_head_a_pickle(tmp_path, length):
    header = json.dumps({"__metadata__": {"format": "another"}}).encode().ljust(length)
    (tmp_path / "head").write_bytes(length.to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"is not a file that net.head.save\(path\) wrote"):
        Head.load(tmp_path / "head")
