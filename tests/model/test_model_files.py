"""Files of models that are hostile, damaged or of another version: refused by name, and nothing in them is run."""

import json
import sys

import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torchvision.transforms import v2

from pytorch_grad_cam_pcasvm import Head, fit_model, load_model
from pytorch_grad_cam_pcasvm.head import storage
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.model.description import Origin, parse_origin, read_description

TRANSFORM = v2.Compose([v2.Resize((16, 16)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
LABELS = torch.arange(24) % 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The strings and the tensors of a model's file."""
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    x = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(0)) + LABELS.reshape(-1, 1, 1, 1)
    head = make_pipeline(StandardScaler(), PCA(3), SVC())
    fit_model(network(), [(x, LABELS)], head, transform=TRANSFORM, resample=0, progress=False).save(path)
    strings, tensors = storage.read(path, "x", [storage.MODEL])
    del strings["sha256"]
    return strings, tensors


@pytest.fixture
def write(written, tmp_path):
    """Write the file with other strings, another description, or other tensors, and a checksum that fits."""

    def write_other(description=None, tensors=None, **strings):
        path = tmp_path / "other.safetensors"
        before, others = written
        if description is not None:
            own = description if isinstance(description, str) else json.dumps(description)
            strings["model"] = own
        storage.write(path, others | (tensors or {}), before | strings)
        return path

    return write_other


def described(written, **changes):
    return json.loads(written[0]["model"]) | changes


def test_the_file_as_it_was_is_read(written, write):
    path = write()
    assert load_model(path, network(), TRANSFORM).classes == [0, 1, 2]
    description = read_description(path)
    assert description.backbone == Origin("", "Sequential")
    assert (description.classes, description.components, description.layers) == ([0, 1, 2], 3, ["1"])
    assert json.loads(description.to_json()) == described(written)


# --- nothing is run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backbone",
    [
        {"library": "torchvision", "name": "evil_module:boom"},
        pytest.param({"library": "timm", "name": "evil_module:boom"}, marks=pytest.mark.optional),
        {"library": "evil_module", "name": "boom"},
        {"library": "function", "name": "evil_module:boom"},
        pytest.param({"library": "timm", "name": "hf-hub:evil/x"}, marks=pytest.mark.optional),
        pytest.param({"library": "timm", "name": "resnet18", "weights": "hf-hub:evil/x"}, marks=pytest.mark.optional),
        pytest.param({"library": "timm", "name": "resnet18", "weights": "local-dir:/tmp"}, marks=pytest.mark.optional),
        pytest.param(
            {"library": "timm", "name": "resnet18", "weights": "vit_tiny_patch16_224.augreg_in21k"},
            marks=pytest.mark.optional,
        ),
        {"library": "torchvision", "name": "../resnet18"},
    ],
    ids=lambda backbone: f"{backbone['library']} {backbone['name']} {backbone.get('weights', '')}",
)
def test_no_file_runs_code_or_fetches_what_it_likes(backbone, written, write, tmp_path, monkeypatch, capsys):
    timm = pytest.importorskip("timm") if backbone["library"] == "timm" else None
    if timm is not None:
        monkeypatch.setattr(timm, "create_model", lambda *args, **kwargs: pytest.fail("made"))
    (tmp_path / "evil_module.py").write_text("open('ran', 'w').close()\ndef boom(): pass\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    path = write(described(written, backbone={"weights": None, "file": None} | backbone))
    with pytest.raises(ValueError, match=r"damaged, or no valid model|names a backbone that runs code of yours"):
        load_model(path)
    assert main(["explain", "photos", "--model", str(path)]) == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert "evil_module" not in sys.modules


def test_names_that_are_typed_have_one_meaning():
    assert parse_origin("resnet18") == Origin("torchvision", "resnet18")
    assert parse_origin("timm:resnet18.a1_in1k") == Origin("timm", "resnet18.a1_in1k")
    assert parse_origin("package.module:make") == Origin("function", "package.module:make")
    for origin in (parse_origin("resnet18"), parse_origin("timm:resnet18"), parse_origin("a:b")):
        assert parse_origin(origin.typed) == origin == Origin.from_json(origin.to_json())
    for typed in ("timm:hf-hub:evil/x", "timm:hf_hub/x", "torchvision:resnet18", "a/b", "module:", ":function"):
        with pytest.raises(ValueError, match="a backbone is a torchvision name"):
            parse_origin(typed)


# --- damage is named --------------------------------------------------------------------------------------------------

WRONG = (None, 5, "x", [], {}, [1], {"a": 1})
HARMLESS = {  # what may be so
    "kind": ("x",), "layers": ([],), "components": (None, 5), "about": ({}, {"a": 1}), "layer": (None,),
}  # fmt: skip


@pytest.mark.parametrize("field", [
    "backbone", "kind", "weights", "probe", "layer", "pool", "layers", "tokens", "inputs", "classes", "components",
    "about",
])  # fmt: skip
def test_fields_that_are_missing_or_of_another_type_are_named(field, written, write):
    without = described(written)
    del without[field]
    with pytest.raises(ValueError, match=f"damaged, or no valid model: its description has no '{field}'"):
        load_model(write(without), network())
    for value in WRONG:
        path = write(described(written, **{field: value}))
        if value in HARMLESS.get(field, ()):
            load_model(path, network())
            continue
        with pytest.raises(ValueError, match=r"damaged|has other weights|has no layer|layer must be"):
            load_model(path, network())


SHAPE = {"name": None, "dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ("{", "Expecting property name"),
        ("[]", "its description is \\[\\], and no mapping"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("1" * 5000, "damaged"),
        ({"inputs": [SHAPE | {"shape": [3, 100_000, 100_000]}]}, "an input of \\[3, 100000, 100000\\]"),
        ({"inputs": [SHAPE | {"shape": [3, -16, 16]}]}, "sides of an input are \\[3, -16, 16\\]"),
        ({"inputs": [SHAPE | {"shape": [3, 16, 16], "dtype": "nn"}]}, "of the dtype 'nn'"),
        ({"inputs": [SHAPE | {"shape": [5, 16, 16]}]}, "does not run on what .* was fitted on"),
        ({"probe": {"noise": [0.0], "picture": [0.0]}}, "the features of noise are others"),
        ({"probe": {"noise": [0.0]}}, "its probe has no picture, but it says how these are prepared"),
        ({"probe": {"noise": ["a"]}}, "numbers of the probe"),
        ({"layers": ["nope"]}, "has no layer 'nope'"),
        ({"classes": ["a", "b"]}, "its classes are \\['a', 'b'\\], but those of the head \\[0, 1, 2\\]"),
    ],
)
def test_descriptions_that_cannot_be_are_refused(changes, told, written, write):
    changes = changes if isinstance(changes, str) else described(written, **changes)
    with pytest.raises(ValueError, match=told) as error:
        load_model(write(changes), network(), TRANSFORM)
    assert "head.save" not in str(error.value)


STEPS = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize": None, "interpolation": "bilinear"}


@pytest.mark.parametrize(
    ("preparation", "told"),
    [
        ([], "no mapping"),
        (5, "no mapping"),
        ({"steps": 5}, "has the steps 5"),
        ({"resize": "crop", "steps": {}}, "sides of pictures are None"),
        ({"resize": "x"}, "the resize 'x'"),
        ({"resize": "crop", "size": [16], "steps": STEPS}, "sides of pictures are \\[16\\]"),
        ({"resize": "crop", "size": [16, 1 << 20], "steps": STEPS}, "sides of pictures"),
        ({"resize": "crop", "size": [16, 16], "steps": STEPS | {"foo": 1}}, "an unknown 'foo'"),
        ({"resize": "crop", "size": [16, 16], "steps": STEPS | {"std": [0, 1, 1]}}, "the std \\[0, 1, 1\\]"),
        ({"resize": "crop", "size": [16, 16], "steps": STEPS | {"interpolation": "x"}}, "interpolation 'x'"),
        ({"white_level": "x"}, "the white_level 'x'"),
        ({"exif": "yes"}, "the exif 'yes'"),
        ({"threshold": 5}, "its threshold is 5"),
        ({"threshold": {"score": "a", "rate": 0.1, "wanted": 0.1, "count": 3}}, "the score 'a'"),
        ({"normal": "zz"}, "its normal class is 'zz'"),
    ],
)
def test_preparations_that_cannot_be_are_refused(preparation, told, write):
    with pytest.raises(ValueError, match=told) as error:
        load_model(write(tensors={"preparation": storage._as_tensor(preparation)}), network())
    assert "damaged" in str(error.value)
    assert "head.save" not in str(error.value)


@pytest.mark.parametrize(
    "means",
    [
        *(torch.zeros(5, 1, 1), torch.full((6, 1, 1), float("nan")), torch.zeros(6, 1, 1, dtype=torch.int64)),
        *(torch.zeros(6), torch.zeros(6, 1)),
    ],
)
def test_means_of_something_else_are_refused(means, write):
    with pytest.raises(ValueError, match="its means of '1' are not those of this backbone"):
        load_model(write(tensors={"activations/1": means}), network())


def test_a_newer_version_is_named_as_such(write, tmp_path):
    path = write(format="pytorch_grad_cam_pcasvm model 3")
    for read in (lambda: load_model(path, network()), lambda: Head.load(path), lambda: read_description(path)):
        with pytest.raises(ValueError, match="was written by a newer version"):
            read()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"is a folder: name the file that model\.save"):
        load_model(tmp_path / "folder", network())
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(ValueError, match=r"make one with model\.save"):
        load_model(tmp_path / "broken.safetensors", network())
