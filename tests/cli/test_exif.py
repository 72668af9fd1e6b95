"""Photos that EXIF turns: new heads see them as people do, old ones as they are stored, and masks lie on both."""

import csv
import json
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin
from small import SIDE, of_fit
from torch import nn

from pytorch_grad_cam_pcasvm import ContributionCAM, Head, PCASVMNet, atlas, evaluation, export, extract_features
from pytorch_grad_cam_pcasvm.data import in_colour
from pytorch_grad_cam_pcasvm.studio import export as studio_export
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.cli.preparation import tell_crop
from pytorch_grad_cam_pcasvm.studio.data.images import Images, image_folder
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder
from pytorch_grad_cam_pcasvm.studio.model.preparation import Framed, Preparation
from pytorch_grad_cam_pcasvm.studio.pictures.read import UnreadableImageError, read_picture

ORIENTATIONS = range(1, 9)
PIXELS = np.random.default_rng(0).integers(0, 256, (10, 16, 3), np.uint8)


def stored(pixels, orientation, path):
    """Write pixels as they are, with a note how to turn them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(path, exif=exif, **({"lossless": True} if path.suffix == ".webp" else {}))
    return path


def lying(pixels, orientation):
    """Return pixels that people see so, as they are stored with an orientation: by Pillow's inverse of it."""
    turns = [None, 0, 3, 1, 5, 2, 6, 4]  # FLIP_LEFT_RIGHT, ROTATE_180, FLIP_TOP_BOTTOM, TRANSPOSE, ROTATE_90, ...
    turn = turns[orientation - 1]
    return pixels if turn is None else np.asarray(Image.fromarray(pixels).transpose(Image.Transpose(turn)))


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_pictures_are_read_as_people_see_them(tmp_path, name, orientation):
    path = stored(PIXELS, orientation, tmp_path / name)
    seen, raw = ImageOps.exif_transpose(Image.open(path)), Image.open(path)
    assert np.array_equal(np.asarray(read_picture(path)), np.asarray(seen))
    assert np.array_equal(np.asarray(in_colour(path)), np.asarray(seen))
    assert np.array_equal(np.asarray(read_picture(path, exif=False)), np.asarray(raw))
    # Whoever turns it once more, as a transform of one's own may do, does nothing.
    assert np.array_equal(np.asarray(ImageOps.exif_transpose(read_picture(path))), np.asarray(seen))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_deep_pictures_are_turned_too(tmp_path, orientation):
    path = stored((PIXELS[..., 0] * 257.0).astype(np.uint16), orientation, tmp_path / "a.png")
    grey = stored(PIXELS[..., 0], orientation, tmp_path / "b.png")
    assert np.array_equal(np.asarray(read_picture(path)), np.asarray(ImageOps.exif_transpose(Image.open(grey))))
    assert np.array_equal(np.asarray(read_picture(path, exif=False)), PIXELS[..., 0])


def test_damaged_exif_turns_nothing_and_damaged_pictures_are_refused(tmp_path):
    text = PngImagePlugin.PngInfo()
    text.add(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff\x01\x12")
    Image.fromarray(PIXELS).save(tmp_path / "a.png", pnginfo=text)
    assert np.array_equal(np.asarray(read_picture(tmp_path / "a.png")), PIXELS)
    stored(PIXELS, 9, tmp_path / "b.png")  # there is no such orientation
    assert np.array_equal(np.asarray(read_picture(tmp_path / "b.png")), PIXELS)
    path = stored(PIXELS, 6, tmp_path / "c.png")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UnreadableImageError, match=r"c\.png cannot be read"):
        read_picture(path)


# --- masks -----------------------------------------------------------------------------------------------------------


def with_mask(folder, orientation, size, drawn, own=1):
    """Return a photo with a bright spot and its mask: drawn on it as people see it, or as it is stored."""
    raw = np.full((*size, 3), 60, np.uint8)
    raw[2:7, 4:12] = 250
    photo = stored(raw, orientation, folder / "photos" / "a.png")
    base = raw if drawn == "stored" else np.asarray(ImageOps.exif_transpose(Image.open(photo)))
    stored((base[..., 0] > 150).astype(np.uint8) * 255, own, folder / "masks" / "a.png")
    return photo


@pytest.mark.parametrize("exif", [True, False])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("size", [(20, 32), (32, 32)])
def test_masks_and_photos_meet(tmp_path, orientation, size, exif):
    drawings = [("seen", 1), ("stored", orientation)]  # with the photo's own EXIF
    drawings += [("stored", 1)] if orientation > 4 and size[0] != size[1] else []
    for number, (drawn, own) in enumerate(drawings):
        photo = with_mask(tmp_path / str(number), orientation, size, drawn, own)
        picture = np.asarray(read_picture(photo, exif=exif))
        masks = MaskFolder(tmp_path / str(number) / "masks", ["a.png"], [photo], exif=exif)
        assert np.array_equal(masks.of(0, picture.shape[:2], None) > 0, picture[..., 0] > 150)


def test_a_mask_that_fits_in_no_position_is_refused(tmp_path):
    photo = with_mask(tmp_path, 6, (20, 32), "seen", own=6)  # turned twice
    with pytest.raises(ValueError, match="but its picture 20 x 32: save it in the picture's size"):
        MaskFolder(tmp_path / "masks", ["a.png"], [photo]).of(0, (32, 20), None)


# --- heads -----------------------------------------------------------------------------------------------------------


def backbone():
    """A small network; the command line names it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 12, 5, 4, 2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(12, 16, 3, 4, 1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


NETWORK = ["--backbone", "test_exif:backbone", "--layer", "1"]
TRANSFORM = Framed((SIDE, SIDE), None, "bilinear", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Photos of every orientation; the same as people see them, and as they are stored, both without EXIF; masks."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    report = import_module("pytorch_grad_cam_pcasvm.studio.evaluation.report")
    monkeypatch.setattr(report, "USUAL", ("faithfulness", "localisation"))  # the others take their time
    random = np.random.default_rng(0)
    for number in range(8):
        pixels, mask = random.integers(0, 90, (24, 40, 3), np.uint8), np.zeros((24, 40), np.uint8)
        pixels[:, :14] += np.uint8(150 * (number % 2))  # at the left, where people see them
        mask[:, :14] = 255 * (number % 2)
        name, orientation = f"{['good', 'spot'][number % 2]}/{number:02}.png", number + 1
        photo = stored(lying(pixels, orientation), orientation, tmp_path / "photos" / name)
        assert np.array_equal(np.asarray(ImageOps.exif_transpose(Image.open(photo))), pixels)
        for kind, plain, drawn in (
            ("seen", pixels, mask), ("raw", lying(pixels, orientation), lying(mask, orientation)),
        ):  # fmt: skip
            stored(plain, 1, tmp_path / kind / name)
            stored(drawn, 1, tmp_path / f"masks-{kind}" / name)
    return tmp_path


def run(command, folder, *options):
    network = of_fit(NETWORK) if command == "fit" and "--features" not in options else NETWORK
    assert main([command, str(folder), *network, *map(str, options)]) == 0


def fitted(photos, name, out):
    run("fit", photos / name, "--components", 3, "--out", photos / out)
    return photos / out


def silent(path, out):
    """Write the head again as one that says nothing of EXIF."""
    head = Head.load(path)
    del head.training_set.preparation["exif"]
    head.save(out)
    return out


def values(folder):
    with (folder / "values.csv").open() as file:
        return [[row[0], *map(float, row[3:-1])] for row in list(csv.reader(file))[1:]]


def what_commands_find(photos, name, head, masks):
    """Return the values of explain, the components of an atlas, and what evaluate measures; and the atlas."""
    run("explain", photos / name, "--model", head, "--out", photos / f"maps-{name}")
    run("atlas", photos / name, "--model", head, "--out", photos / f"atlas-{name}")
    options = ["--masks", photos / f"masks-{masks}", "--out", photos / f"page-{name}", "--count", 4, "--all-images"]
    run("evaluate", photos / name, "--model", head, *options, "--method", "ContributionCAM")
    store = atlas.load(photos / f"atlas-{name}")
    report = json.loads((photos / f"page-{name}" / "report.json").read_text())["results"]
    rows = [report[check]["rows"] for check in ("faithfulness", "localisation")]
    return [values(photos / f"maps-{name}"), store.components.tolist(), rows], store


def test_a_new_head_sees_photos_as_people_do(photos):
    path = fitted(photos, "photos", "photos.safetensors")
    head = Head.load(path)
    assert head.exif
    assert head.training_set.preparation["exif"] is True
    assert head.digest() == Head.load(fitted(photos, "seen", "seen.safetensors")).digest()
    found, store = what_commands_find(photos, "photos", path, "seen")
    assert found == what_commands_find(photos, "seen", path, "seen")[0]
    assert store.manifest["preparation"]["exif"] is True
    assert Head.load(photos / "atlas-photos" / "head.safetensors").exif
    # In Python, of a folder: the head says how it is read.
    net = PCASVMNet(backbone().eval(), head, "1", pool="mean")
    options = {"transform": TRANSFORM, "progress": False}
    in_python = atlas.build(net, photos / "photos", ["1"], photos / "in-python", **options)
    assert np.allclose(in_python.components, store.components, atol=1e-5)
    raw = atlas.build(net, photos / "photos", ["1"], photos / "as-stored", exif=False, **options)
    assert not np.allclose(raw.components, in_python.components, atol=0.1)
    with pytest.raises(ValueError, match="exif: "):
        atlas.build(net, photos / "photos", ["1"], photos / "as-stored", **options)
    study = evaluation.Study(net, photos / "photos", ["1"], **options)
    assert torch.equal(study.read([4])[0], Images(photos / "seen", TRANSFORM).read([4]).images)


@pytest.mark.slow
def test_a_head_that_says_nothing_sees_photos_as_they_are_stored(photos):
    head = silent(fitted(photos, "raw", "raw.safetensors"), photos / "old.safetensors")
    assert not Head.load(head).exif
    found, store = what_commands_find(photos, "photos", head, "seen")
    assert found == what_commands_find(photos, "raw", head, "raw")[0]
    assert "exif" not in store.manifest
    for exif, reads in ((False, "raw"), (True, "seen")):
        expected = Images(photos / reads, TRANSFORM).read(range(8)).images
        assert torch.equal(Images(photos / "photos", TRANSFORM, exif=exif).read(range(8)).images, expected)
        assert torch.equal(image_folder(photos / "photos", TRANSFORM, exif=exif)[4][0], expected[4])


def test_patches_are_labelled_by_masks_of_turned_photos(photos):
    options = ["--pool", "dense", "--classifier", "svm", "--components", 3, "--no-pictures"]
    digests = []
    for name in ("photos", "seen"):
        run("fit", photos / name, "--masks", photos / "masks-seen", *options, "--out", photos / "dense.safetensors")
        digests.append(Head.load(photos / "dense.safetensors").digest())
    assert digests[0] == digests[1]


def test_features_that_were_kept_are_not_those_of_another_way_of_reading(photos, capsys):
    new = fitted(photos, "photos", "new.safetensors")
    capsys.readouterr()
    fitted(photos, "photos", "again.safetensors")
    assert "features: taken from" in capsys.readouterr().out
    head = Head.load(new)
    head.training_set.means.clear()  # which commands then take from the training images
    head.save(new)
    means = ["--layer", "0", "--features", "1", "--train", photos / "photos"]
    for head, taken in ((silent(new, photos / "old.safetensors"), False), (new, True)):
        run("explain", photos / "photos", "--model", head, "--out", photos / "maps", *means)
        assert ("features: taken from" in capsys.readouterr().out) == taken


def test_features_of_a_folder_in_python(photos):
    kept = []
    for number, (name, exif) in enumerate([("photos", True), ("seen", False), ("photos", False), ("raw", False)]):
        stored_features = atlas.extract(
            backbone().eval(), photos / name, "1", pool="mean", out=photos / f"kept-{number}", exif=exif,
            transform=TRANSFORM, progress=False,
        )  # fmt: skip
        kept.append(extract_features(backbone().eval(), stored_features, "1", pool="mean", progress=False)[0])
    assert np.array_equal(kept[0], kept[1])
    assert np.array_equal(kept[2], kept[3])
    assert not np.allclose(kept[0], kept[2], atol=1e-2)


def test_the_crop_of_a_turned_photo(tmp_path, capsys):
    def transform(picture):  # the left 10 columns
        pixels = np.asarray(picture.convert("RGB")).transpose(2, 0, 1) / 255
        return torch.from_numpy(np.ascontiguousarray(pixels[:, :, :10]))

    path = stored(np.zeros((16, 40, 3), np.uint8), 6, tmp_path / "long.png")  # 16 pixels wide where people see it
    for exif, share in ((True, 9 / 15), (False, 9 / 39)):  # between the centres of pixels
        tell_crop(Preparation(transform, None, None, exif=exif), [path])
        assert f"sees {share:.0%}" in capsys.readouterr().out


@pytest.mark.optional
def test_exported_files_read_as_their_head_does(photos):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    new = fitted(photos, "photos", "new.safetensors")
    for head, kind in ((new, "seen"), (silent(new, photos / "old.safetensors"), "raw")):
        model = photos / f"{kind}.onnx"
        assert main(["export", *NETWORK, "--model", str(head), "--out", str(model)]) == 0
        explainer = export.Explainer(model)
        said = explainer.about["format"], explainer.about["input"].get("exif")
        assert said == ((3, True) if kind == "seen" else (2, None))
        for path in sorted((photos / "photos").rglob("*.png")):
            plain = photos / kind / path.relative_to(photos / "photos")
            assert np.array_equal(np.asarray(explainer.read(path)), np.asarray(Image.open(plain)))
        for name in ("photos", kind):
            options = ["--model", model, photos / name, "--out", photos / f"{kind}-of-{name}"]
            assert main(["explain", *map(str, options)]) == 0
        assert values(photos / f"{kind}-of-photos") == values(photos / f"{kind}-of-{kind}")
    # In Python, of the head that says so, or as told.
    cam = ContributionCAM(PCASVMNet(backbone().eval(), Head.load(new), "1", pool="mean"), ["1"])
    x = Images(photos / "seen", TRANSFORM).read(range(2)).images
    for exif, said in ((None, True), (True, True), (False, None)):
        assert export.onnx(cam, x, photos / "python.onnx", exif=exif)["input"].get("exif") == said


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_turns_pixels_as_pillow_does(tmp_path):
    code = (Path(studio_export.__file__).parent / "page.js").read_text()
    function = code[
        code.index("  function upright(") : code.index("  /** Returns the part of a photo that the network")
    ]
    rgba = np.random.default_rng(0).integers(0, 256, (3, 5, 4), np.uint8)
    call = f"[1,2,3,4,5,6,7,8,9].map((n) => upright(Uint8ClampedArray.from({rgba.ravel().tolist()}), 5, 3, n))"
    script = f"{function}; console.log(JSON.stringify({call}.map(([all, w, h]) => [Array.from(all), w, h])))"
    printed = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout
    for orientation, (pixels, width, height) in enumerate(json.loads(printed), 1):
        seen = ImageOps.exif_transpose(Image.open(stored(rgba, orientation, tmp_path / "a.png")))
        assert np.array_equal(np.reshape(pixels, (height, width, 4)), np.asarray(seen))
