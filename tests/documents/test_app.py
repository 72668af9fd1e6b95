"""The app: what its endpoint answers for a photo is what the network and scikit-learn's numbers say."""

import app
import numpy as np
import pytest
import torch
import torchvision
from atlases import folder
from PIL import Image
from torchvision.transforms.functional import normalize, to_tensor

from pytorch_grad_cam_pcasvm import Head, PCASVMNet
from pytorch_grad_cam_pcasvm.studio.cli import main

_OF_NOISE = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def given(weights, tmp_path_factory):
    """Photos, and a model that was fitted on them."""
    root = tmp_path_factory.mktemp("app")
    photos, model = folder(root / "photos", 8), root / "model.safetensors"
    network = ["--backbone", "squeezenet1_1", "--weights", str(weights), "--features", "features"]
    assert main(["fit", str(photos), *network, "--components", "3", "--out", str(model)]) == 0
    return photos, model


@pytest.mark.optional
@_OF_NOISE
def test_a_dropped_photo_is_explained(given, weights):
    pytest.importorskip("gradio")
    client = pytest.importorskip("gradio_client")
    photos, model = given
    file = photos / "cat" / "0.png"
    blocks = app.page(app.answers_of(app.parsed([str(model)])))
    _, url, _ = blocks.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    try:
        caller = client.Client(url, verbose=False)
        said, scores, components, *pictures = caller.predict(client.handle_file(file), 1, api_name="/explain")
    finally:
        blocks.close()
    backbone = torchvision.models.squeezenet1_1(weights=None)
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    net = PCASVMNet(backbone, Head.load(model), "features", pool="mean").eval()
    picture = Image.open(file).convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
    output = net(normalize(to_tensor(picture), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])[None])
    assert said.startswith(f"**{output.labels()[0]}**")
    assert [row[0] for row in scores["data"]] == ["cat", "dog"]
    assert [row[0] for row in components["data"]] == ["P1", "P2", "P3"]
    for rows, expected in ((scores, output), (components, output.components)):
        np.testing.assert_allclose([row[1] for row in rows["data"]], expected.detach()[0].numpy(), rtol=1e-3)
    for picture in pictures:  # the maps, and how they add up to the decision
        with Image.open(picture) as shown:
            colours = np.asarray(shown.convert("RGB")).astype(int)
        assert shown.width > 800
        assert (abs(colours[..., 0] - colours[..., 2]) > 100).mean() > 0.001  # red and blue, not an empty sheet


@_OF_NOISE
def test_a_photo_that_cannot_be_read_is_refused(given):
    answers = app.answers_of(app.parsed([str(given[1])]))
    answers.model.transform = lambda photo: torch.full((3, 8, 8), float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        answers(next(given[0].rglob("*.png")), -1)
    with pytest.raises(OSError, match=r"photo.png cannot be read: FileNotFoundError"):
        answers("photo.png", -1)


def test_a_model_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr("sys.argv", ["app.py", "none.safetensors"])
    with pytest.raises(SystemExit, match=r"error: there is no model none\.safetensors"):
        app.main()
