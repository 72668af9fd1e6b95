"""The page for browsers: the numbers of ``explain``, pictures as Pillow has them, and no word to any server."""

import base64
import io
import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from browser import complaints, expect, needs_chromium, visit
from PIL import Image, ImageOps
from test_program import made
from test_sure_export import make_sure

from pytorch_grad_cam_pcasvm import export
from pytorch_grad_cam_pcasvm.studio.pictures.answers import write_error

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


def chosen(page, picture, name="photo.png"):
    """Give the page a picture, and return it as it was given."""
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned on a screen, which only networks see whose file says so
    picture.save(file, name.split(".")[-1].replace("jpg", "jpeg"), exif=exif, lossless=True)
    page.set_input_files("#files", {"name": name, "mimeType": "image/*", "buffer": file.getvalue()})
    return Image.open(file)


@needs_chromium
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (("dense", "rbf", "ContributionCAM", "default"), {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}),
        (("pooled", "two classes", "ClosedFormLayerCAM", "default"), {"resize": 11, "interpolation": "bicubic"}),
        (("pooled", "rbf", "ClosedFormGradCAM", "default"), {"resize": "pad", "mean": [0.4, 0.5, 0.6], "exif": True}),
        pytest.param(
            ("tokens", "rbf", "ClosedFormGradCAM", "classes"), {"interpolation": "bicubic"}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_page_gives_what_explain_gives(case, options, tmp_path, runtime, page):
    cam, x, targets = made(*case)
    told = export.onnx(cam, x, tmp_path / "explainer.onnx", targets, **options)
    file = export.page(tmp_path / "explainer.onnx", tmp_path / "page", runtime, title="<b>Cats & dogs</b>")
    reader = export.Explainer(tmp_path / "explainer.onnx")
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    visit(page, file.as_uri(), name="explainer")
    expect(page.locator("h1")).to_have_text("<b>Cats & dogs</b>")
    expect(page.locator("#sure")).to_contain_text("exported without errors")
    pixels = np.random.default_rng(0).integers(0, 256, (13, 29, 3), np.uint8)
    for count, name in enumerate(("a.png", "b.webp", "c.jpg"), 1):
        picture = chosen(page, Image.fromarray(np.roll(pixels, count, 0)[: 13 - count]), name)
        picture = ImageOps.exif_transpose(picture) if options.get("exif") else picture
        expect(page.locator("#status")).to_have_text(f"{count} explained")
        seen = np.array(page.evaluate("Array.from(explainer.photos[0].seen)"))
        assert np.array_equal(seen, np.asarray(reader.seen(picture)).ravel())
        expected = cam.explain(torch.from_numpy(reader.prepared(picture)[None]), targets)
        for output in ("values", "maps"):
            found = np.array(page.evaluate(f"explainer.photos[0].found.{output}.data"))
            wanted = getattr(expected, output).double().numpy().ravel()
            assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    expect(page.locator(".photo")).to_have_count(3)
    expect(page.locator(".photo .tile")).to_have_count(3 * (1 + len(told["targets"])))
    canvases, pixels_of = page.locator(".tile canvas"), "(all) => all.map((each) => each.toDataURL())"
    pictures = [canvases.evaluate_all(pixels_of)]
    page.locator("#scale").select_option("target")
    pictures.append(canvases.evaluate_all(pixels_of))
    page.locator("#opacity").fill("0.3")
    assert pictures[0] != pictures[1] != canvases.evaluate_all(pixels_of)
    assert not complaints(page)
    assert all(url.startswith((tmp_path.as_uri(), "blob:")) for url in requests)
    refused = "fetch('https://example.org').then(() => 'sent', () => 'refused')"
    assert page.evaluate(refused) == "refused"


@needs_chromium
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytorch_grad_cam_pcasvm.UnstableComponentWarning")
def test_the_page_says_how_sure_maps_are_as_sheets_do(tmp_path, runtime, page):
    cam, x, targets = make_sure("pooled", "two classes", "ContributionCAM", "default")
    as_noise = {"mean": [0.5] * 3, "std": [0.29] * 3}  # like what the head was fitted on
    export.onnx(cam, x, tmp_path / "sure.onnx", targets, errors=True, **as_noise)
    reader = export.Explainer(tmp_path / "sure.onnx")
    visit(page, export.page(tmp_path / "sure.onnx", tmp_path / "page", runtime).as_uri(), name="explainer")
    expect(page.locator("#sure")).to_contain_text("Pale and hatched: another hundred training photos")
    pixels = np.random.default_rng(1).integers(0, 256, (200, 8, 8, 3), np.uint8)
    found = reader(np.stack([reader.prepared(Image.fromarray(one)) for one in pixels]))
    ratios = np.abs(found["values"][:, -1] / found["values_error"][:, -1])
    verdicts = set()
    for count, row in enumerate((ratios.argmin(), ratios.argmax()), 1):
        picture = chosen(page, Image.fromarray(pixels[row]))
        expect(page.locator("#status")).to_have_text(f"{count} explained")
        found = reader(reader.prepared(picture)[None])
        card = page.locator(".photo").first
        captions = card.locator(".tile > span").all_text_contents()[1:]
        assert len(captions) == len(reader.about["titles"])
        for k, caption in enumerate(captions):
            value, error = found["values"][0, k], found["values_error"][0, k]
            said = "(not stable)" if np.isnan(error) else write_error(value, error)
            assert said in caption.replace("\N{MINUS SIGN}", "-")
        heading = card.locator("h2").text_content()
        assert heading.startswith("photo.png: open, ") == reader.is_open(found)
        verdicts.add(reader.is_open(found))
        # The colour of a place that is not sure is a fifth of its own between the lines: close to the photo's grey.
        height, width = found["sure"].shape[2:]
        url = card.locator("canvas").evaluate_all("(all) => all[all.length - 2].toDataURL()")
        drawn = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).convert("RGB")
        for (row, column), sure in np.ndenumerate(found["sure"][0, -1]):
            y, x_ = (int((place + 0.5) * 224 / cells) for place, cells in ((row, height), (column, width)))
            x_ += next(step for step in range(12) if 0.4 < ((x_ + step + y) * 20 / 224) % 1 < 0.9)
            value = found["maps"][0, -1, row, column] / found["nu"][0, -1]
            colour = drawn.getpixel((x_, y))
            if abs(value) > 0.5:
                assert (max(colour) - min(colour) > 60) == sure
    assert verdicts == {True, False}
    assert not complaints(page)


@needs_chromium
def test_what_is_no_picture_is_said_and_the_rest_goes_on(written, tmp_path, runtime, page):
    file = export.page(written().path, tmp_path / "page", runtime)
    visit(page, file.as_uri(), name="explainer")
    page.set_input_files("#files", {"name": "text.png", "mimeType": "image/png", "buffer": b"no picture"})
    expect(page.locator("#status")).to_contain_text("text.png is not a picture")
    chosen(page, Image.new("RGBA", (9, 9), (255, 0, 0, 128)))
    expect(page.locator("#status")).to_contain_text("transparent")
    chosen(page, Image.new("RGB", (9, 9), "red"))
    expect(page.locator("#status")).to_have_text("1 explained")
    (tmp_path / "page" / "data" / "model0.js").unlink()
    visit(page, file.as_uri(), name="explainer")
    expect(page.locator("#status")).to_contain_text("model0.js is missing")


@needs_chromium
def test_pictures_of_16_bits_where_the_white_level_is_another(written, tmp_path, runtime, page):
    deep = Image.fromarray(np.full((9, 9), 4095, np.uint16))
    for white_level, said in (
        ({"white_level": 4095}, "a.png has 16 bits, which this page cannot scale as the network expects"),
        ({}, "1 explained"),
    ):
        file = export.page(written(**white_level).path, tmp_path / "page", runtime)
        visit(page, file.as_uri(), name="explainer")
        chosen(page, deep, "a.png")
        expect(page.locator("#status")).to_contain_text(said)


def test_a_page_is_written_where_nothing_else_is_lost(written, tmp_path):
    model, out, runtime = written().path, tmp_path / "page", tmp_path / "runtime"
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
