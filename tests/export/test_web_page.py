"""The page for browsers: the numbers of ``explain``, pictures as Pillow has them, and no word to any server."""

import base64
import io
import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from browser import needs_chromium
from PIL import Image
from test_program import made

from pytorch_grad_cam_pcasvm import export

pytestmark = pytest.mark.optional
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="session")
def runtime(tmp_path_factory):
    """onnxruntime-web, from npm."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, "onnxruntime-web"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"npm has no onnxruntime-web: {found.stderr[-200:]}")
    return folder / "node_modules" / "onnxruntime-web"


def dropped(browser, picture, name="photo.png"):
    """Give the page a picture, as if it had been dropped, and return what it says of it."""
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned on a screen, which no network sees
    picture.save(file, name.split(".")[-1].replace("jpg", "jpeg"), exif=exif, lossless=True)
    given = base64.b64encode(file.getvalue()).decode()
    browser.run(f"explainer.add([new File([Uint8Array.from(atob('{given}'), c => c.charCodeAt(0))], '{name}')])")
    file.seek(0)
    return Image.open(file), browser.run("document.getElementById('status').textContent")


@needs_chromium
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (("dense", "RBF", "ContributionCAM", "default"), {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}),
        (("pooled", "two classes", "ClosedFormLayerCAM", "default"), {"resize": 11, "interpolation": "bicubic"}),
        (("pooled", "RBF", "ClosedFormGradCAM", "default"), {"resize": "pad", "mean": [0.4, 0.5, 0.6]}),
        (("tokens", "RBF", "ClosedFormGradCAM", "classes"), {"interpolation": "bicubic"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_page_gives_what_explain_gives(case, options, tmp_path, runtime, browser):
    cam, x, targets = made(*case)
    told = export.onnx(cam, x, tmp_path / "explainer.onnx", targets, **options)
    page = export.page(tmp_path / "explainer.onnx", tmp_path / "page", runtime, title="<b>Cats & dogs</b>")
    reader = export.Explainer(tmp_path / "explainer.onnx")
    browser.open(page.as_uri(), name="explainer")
    assert browser.run("document.querySelector('h1').textContent") == "<b>Cats & dogs</b>"
    pixels = np.random.default_rng(0).integers(0, 256, (13, 29, 3), np.uint8)
    for count, name in enumerate(("a.png", "b.webp", "c.jpg"), 1):
        picture, said = dropped(browser, Image.fromarray(np.roll(pixels, count, 0)[: 13 - count]), name)
        assert said == f"{count} explained"
        seen = np.array(browser.run("Array.from(explainer.photos[0].seen)"))
        assert np.array_equal(seen, np.asarray(reader.seen(picture)).ravel())
        expected = cam.explain(torch.from_numpy(reader.prepared(picture)[None]), targets)
        for output in ("values", "maps"):
            found = np.array(browser.run(f"explainer.photos[0].found.{output}.data"))
            wanted = getattr(expected, output).double().numpy().ravel()
            assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert browser.run("document.querySelectorAll('.photo').length") == 3
    assert browser.run("document.querySelectorAll('.photo .tile').length") == 3 * (1 + len(told["targets"]))
    pictures = "Array.from(document.querySelectorAll('.tile canvas'), (each) => each.toDataURL()).join()"
    for control, value in (("scale", "target"), ("opacity", "0.3")):
        before = browser.run(pictures)
        setting = f"Object.assign(document.getElementById('{control}'), {{value: '{value}'}})"
        browser.run(f"{setting}.dispatchEvent(new Event('input'))")
        assert browser.run(pictures) != before
    assert not browser.complaints
    assert all(url.startswith((tmp_path.as_uri(), "blob:")) for url in browser.requests)
    refused = "fetch('https://example.org').then(() => 'sent', () => 'refused')"
    assert browser.run(refused) == "refused"


@needs_chromium
def test_what_is_no_picture_is_said_and_the_rest_goes_on(tmp_path, runtime, browser):
    cam, x, _ = made("pooled", "RBF", "ClosedFormGradCAM", "default")
    export.onnx(cam, x, tmp_path / "explainer.onnx")
    page = export.page(tmp_path / "explainer.onnx", tmp_path / "page", runtime)
    browser.open(page.as_uri(), name="explainer")
    browser.run("explainer.add([new File(['no picture'], 'text.png')])")
    assert "text.png is not a picture" in browser.run("document.getElementById('status').textContent")
    assert "transparent" in dropped(browser, Image.new("RGBA", (9, 9), (255, 0, 0, 128)))[1]
    assert dropped(browser, Image.new("RGB", (9, 9), "red"))[1] == "1 explained"
    (tmp_path / "page" / "data" / "model0.js").unlink()
    browser.open(page.as_uri(), name="explainer")
    assert "model0.js is missing" in browser.run("document.getElementById('status').textContent")


@needs_chromium
def test_pictures_of_16_bits_where_the_white_level_is_another(tmp_path, runtime, browser):
    cam, x, _ = made("pooled", "RBF", "ClosedFormGradCAM", "default")
    deep = Image.fromarray(np.full((9, 9), 4095, np.uint16))
    for white_level, said in (
        (4095, "a.png has 16 bits, which this page cannot scale as the network expects"),
        (None, "1 explained"),
    ):
        export.onnx(cam, x, tmp_path / "explainer.onnx", white_level=white_level)
        page = export.page(tmp_path / "explainer.onnx", tmp_path / "page", runtime)
        browser.open(page.as_uri(), name="explainer")
        file = io.BytesIO()
        deep.save(file, "png")
        given = base64.b64encode(file.getvalue()).decode()
        browser.run(f"explainer.add([new File([Uint8Array.from(atob('{given}'), c => c.charCodeAt(0))], 'a.png')])")
        assert said in browser.run("document.getElementById('status').textContent")


def test_a_page_is_written_where_nothing_else_is_lost(tmp_path):
    cam, x, _ = made("pooled", "RBF", "ClosedFormGradCAM", "default")
    model, out, runtime = tmp_path / "explainer.onnx", tmp_path / "page", tmp_path / "runtime"
    export.onnx(cam, x, model)
    with pytest.raises(FileNotFoundError, match="npm install onnxruntime-web"):
        export.page(model, out, runtime)
    assert not out.exists()
    runtime.mkdir()
    for name in ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"):
        (runtime / name).write_bytes(b"wasm" * 10)
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(FileExistsError, match="no earlier page"):
        export.page(model, out, runtime)
    (out / "mine.txt").unlink()
    for _ in range(2):  # the second replaces the first
        assert export.page(model, out, runtime) == out / "index.html"
    parts = (out / "data" / "model0.js").read_text().split('"')
    assert base64.b64decode(parts[3]) == model.read_bytes()
    about = (out / "data" / "about0.js").read_text().split('"')[3]
    assert json.loads(base64.b64decode(about))["page"]["parts"] == {"model": 1, "glue": 1, "wasm": 1}
