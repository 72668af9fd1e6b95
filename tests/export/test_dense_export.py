"""Programs, files and pages of dense heads: the numbers of ``explain`` at every position, and pictures of them."""

import json

import numpy as np
import pytest
import torch
from browser import complaints, expect, needs_chromium, visit
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from test_web_page import chosen, runtime  # noqa: F401 - a fixture
from torch import nn

from pytorch_grad_cam_pcasvm import (
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    ResidualTarget,
    SVMTarget,
    export,
    extract_features,
)
from pytorch_grad_cam_pcasvm.studio.export import outputs as titles_module

pytestmark = pytest.mark.optional
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

REGION = np.zeros((8, 12), bool)
REGION[2:5, 3:9] = True
QUESTIONS = {
    "classes": (SVC(gamma=0.15), None),
    "places": (
        SVC(gamma=0.15),
        [PCATarget(1, at=(3, 4)), SVMTarget("hole", at=REGION), SVMTarget(at=REGION), SVMTarget("crack", at="max")],
    ),
    "anomalies": (NearestNeighbors(n_neighbors=3), [SVMTarget(sign="-", at="max"), SVMTarget(at=(2, 3))]),
    "residual": (None, [ResidualTarget(at="max"), PCATarget(0)]),
}


def explained(name):
    """Return a method, photos, and targets, for a network of 8 x 12 positions."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.Tanh(), nn.Conv2d(6, 7, 1), nn.Softplus()).eval()
    x = torch.randn(4, 3, 16, 24)
    rows, _ = extract_features(backbone, [x], pool="dense", progress=False)
    labels = np.array(["crack", "fine", "hole"])[(rows[:, 0] > 0.7).astype(int) + (rows[:, 3] > 0.7)]
    estimator, targets = QUESTIONS[name]
    pipeline = make_pipeline(StandardScaler(), PCA(3), *([] if estimator is None else [estimator])).fit(rows, labels)
    net = PCASVMNet(backbone, pipeline, pool="dense").eval()
    return ContributionCAM(net, ["1"]), x, targets


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name != "residual" else ()) for name in QUESTIONS]
)
def test_a_file_gives_scores_and_maps_of_every_position(name, tmp_path):
    cam, x, targets = explained(name)
    about = export.onnx(cam, x, tmp_path / "explainer.onnx", targets)
    assert max(about["differences"].values()) < 2e-5
    reader, net = export.Explainer(tmp_path / "explainer.onnx"), cam.model
    images = torch.randn(3, 3, 16, 24, generator=torch.Generator().manual_seed(1))
    outputs = reader(images.numpy())
    maps, output = cam.explain(images, targets), net(images)
    assert np.abs(outputs["maps"] - maps.maps.numpy()).max() <= 1e-5 * maps.maps.abs().max()
    assert np.abs(outputs["values"] - maps.values.numpy()).max() <= 1e-5 * maps.values.abs().max()
    assert np.abs(outputs["scores"] - output.detach().numpy()).max() <= 1e-5 * output.abs().max()
    assert np.abs(outputs["components"] - output.components.detach().numpy()).max() <= 1e-5
    if name in ("classes", "places"):
        labels = np.array(about["classes"])[outputs["label"]]
        assert np.array_equal(labels, net.predict(images))
        names, counts = np.unique(labels[0], return_counts=True)
        assert reader.predicted(outputs) == names[counts.argmax()]
    else:
        expected = net.anomaly_map(images)
        assert np.abs(outputs["anomaly"] - expected).max() <= 1e-5 * np.abs(expected).max()
        ends = net.anomaly_map(x)
        expected = [ends.min(), ends.max()]  # of a PCA alone, whose training set is not known
        if name == "anomalies":  # how far rows of the bank are from the three nearest others
            bank = net.head.stages[2].points.numpy()
            left_out = NearestNeighbors(n_neighbors=3).fit(bank).kneighbors()[0].mean(1)
            expected = [0, 3 * np.quantile(left_out, 0.999)]
        assert np.allclose(about["anomaly_range"], expected, rtol=1e-5)


def test_titles_say_where():
    for name, titles in {
        "places": ["component 2 at (3, 4)", "hole in a region", "decided class in a region",
                   "crack where strongest"],
        "anomalies": ["anomaly where strongest", "normality at (2, 3)"],
    }.items():  # fmt: skip
        cam, _, targets = explained(name)
        assert titles_module.about(targets, cam.model)["titles"] == titles


@pytest.mark.slow
def test_a_sheet_shows_what_is_decided_where(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    photo = Image.fromarray(pixels)
    for name, decided in (("places", "class"), ("anomalies", "anomaly")):
        cam, images, targets = explained(name)
        export.onnx(cam, images, tmp_path / "explainer.onnx", targets)
        reader = export.Explainer(tmp_path / "explainer.onnx")
        outputs = reader(reader.prepared(photo)[None])
        picture, written, legend = reader.positions(Image.new("RGB", (120, 80), "white"), outputs)
        assert written == f"where: {decided} at every position"
        drawn = np.asarray(picture)[5::10, 5::10].astype(int)
        where = np.zeros((8, 12), bool)
        (corner,) = reader.strongest(outputs)
        where[corner] = True  # in the outline
        assert outputs["evidence"][0, 0].argmax() == where.argmax()
        if name == "places":  # a colour for each class, the same as in the legend
            colours = {name.split(",")[0]: np.array(colour) for colour, name in legend}
            for row, column in np.ndindex(8, 12):
                colour = colours[reader.about["classes"][outputs["label"][0, row, column]]]
                shown = 0.55 * colour + 0.45 * 255
                assert where[row, column] or np.abs(drawn[row, column] - shown).max() <= 1
        else:  # good patches have no colour, and the most anomalous is the brightest
            values = outputs["anomaly"][0]
            assert ((drawn == 255).all(-1) >= (values < legend.low) & ~where).all()
            assert legend.low == pytest.approx(2 / 3 * reader.about["usual"])
            assert legend.high >= max(values.max(), reader.about["anomaly_range"][1] * 0.99)
            heat = np.array([[*bytes.fromhex(colour)] for colour in reader.about["heat"]], float)
            colours, opacity = legend.paint(np.linspace(legend.low, legend.high, 99), heat)
            assert (np.diff(colours.sum(-1)) >= 0).all()
            assert (np.diff(opacity[:, 0]) >= 0).all()
        (k,) = reader.about["strongest"]
        assert outputs["evidence"][0, 0].max() == pytest.approx(outputs["values"][0, k], rel=1e-5)
        y, x = (10 * place + 5 for place in corner)
        ring = np.asarray(picture)[max(0, y - 10) : y + 10, max(0, x - 10) : x + 10].reshape(-1, 3).tolist()
        assert ring.count([0, 0, 0]) > 40
        sheet = reader.sheet(photo, outputs)
        assert sheet.width == 3 * 468 + 10


@needs_chromium
@pytest.mark.parametrize("name", ["places", pytest.param("anomalies", marks=pytest.mark.slow)])
def test_the_page_shows_what_is_decided_where(name, tmp_path, runtime, page):  # noqa: F811
    cam, x, targets = explained(name)
    export.onnx(cam, x, tmp_path / "explainer.onnx", targets)
    file = export.page(tmp_path / "explainer.onnx", tmp_path / "page", runtime)
    visit(page, file.as_uri(), name="explainer")
    reader = export.Explainer(tmp_path / "explainer.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    picture = chosen(page, Image.fromarray(pixels), "a.png")
    expect(page.locator("#status")).to_have_text("1 explained")
    outputs = reader(reader.prepared(picture)[None])
    output = "label" if name == "places" else "anomaly"
    numbers = np.array(page.evaluate(f"explainer.photos[0].found.{output}.data"))
    assert np.allclose(numbers, outputs[output].ravel(), rtol=1e-4, atol=1e-5)
    tile = page.locator(".tile").nth(1)
    expect(tile).to_contain_text(f"Where: {'class' if name == 'places' else 'anomaly'} at every position")
    expect(page.locator(".tile", has_text="Why: what of the photo made the outlined patch so")).to_have_count(1)
    if name == "places":
        shares = [f"{name}, {share:.1%}" for name, share in reader.shares(outputs).items() if share]
        assert tile.locator(".class").all_inner_texts() == shares
        assert page.locator("h2").inner_text() == "a.png"
    expect(page.locator(".tile")).to_have_count(2 + len(targets))
    assert json.loads(page.evaluate("JSON.stringify(explainer.photos[0].found.scores.dims)"))[2:] == [8, 12]
    page.locator("#scale").select_option("target")
    page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
    assert not complaints(page)
