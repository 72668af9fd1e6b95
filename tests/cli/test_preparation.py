"""What the network sees of the pictures in a folder, what is kept of a training set, and what is said of both."""

import csv
import errno
import importlib
import re
import shutil
import struct
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from reference import relative
from small import SIDE, of_fit
from torchvision import transforms
from torchvision.transforms.functional import normalize, resize, to_tensor

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import ContributionCAM, Head, PCASVMNet, SVMTarget, atlas, extract_features
from pytorch_grad_cam_pcasvm.data import in_colour
from pytorch_grad_cam_pcasvm.studio.atlas import shards
from pytorch_grad_cam_pcasvm.studio.atlas.run import Job
from pytorch_grad_cam_pcasvm.studio.cli import main, training
from pytorch_grad_cam_pcasvm.studio.cli.preparation import _tell_depth
from pytorch_grad_cam_pcasvm.studio.model.preparation import Preparation

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def noise(number, size=(20, 32), channels=3):
    return np.random.default_rng(number).integers(0, 256, (*size, *([channels] if channels > 1 else [])), np.uint8)


@pytest.fixture(scope="module")
def long_photos(tmp_path_factory):
    """Photos whose classes differ at the left and right rim alone, which a crop of the middle does not see."""
    root = tmp_path_factory.mktemp("long")
    for number in range(12):
        pixels = noise(number, (20, 40)) // 4
        pixels[:, :8] += np.uint8(150 * (number % 2))
        save(root / ["good", "hole"][number % 2] / f"{number}.png", pixels)
    return root


@pytest.fixture
def run(weights, tmp_path, monkeypatch, capsys):
    """Runs a command with a small network; returns its exit status, what it printed, and its error."""
    monkeypatch.setattr(training, "cache_folder", lambda: tmp_path / "cache")
    options = {"--backbone": "squeezenet1_1", "--weights": str(weights), "--layer": "features"}

    def command(name, photos, *others, **changes):
        network = options | {f"--{key}": str(value) for key, value in changes.items()}
        words = [word for pair in network.items() for word in pair]
        words = of_fit(words) if name == "fit" and "--features" not in others and "auto" not in words else words
        code = main([name, str(photos), *words, *map(str, others)])
        printed = capsys.readouterr()
        return SimpleNamespace(code=code, out=printed.out, err=printed.err)

    return command


@pytest.fixture
def fitted(run, long_photos, tmp_path):
    """Fits a head on photos; returns it, and what was printed."""

    def fit(*options, photos=long_photos, name="head.safetensors", **changes):
        done = run("fit", photos, "--components", "3", "--out", tmp_path / name, *options, **changes)
        assert done.code == 0, done.err
        return tmp_path / name, done.out

    return fit


def expected_features(weights, photos, prepared):
    backbone = torchvision.models.squeezenet1_1(weights=None).eval()
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    x = torch.stack([prepared(Image.open(path).convert("RGB")) for path in sorted(photos.rglob("*.png"))])
    return extract_features(backbone, [x], "features", pool="mean", progress=False)[0]


def stretch(picture):
    return normalize(to_tensor(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR)), *IMAGENET)


def pad(picture):
    frame = Image.new("RGB", (SIDE, SIDE), (124, 116, 104))
    frame.paste(picture.resize((SIDE, SIDE // 2), Image.Resampling.BILINEAR), (0, SIDE // 4))
    return normalize(to_tensor(frame), *IMAGENET)


def crop(picture):
    return torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()(picture)


# --- which part of a picture the network sees ------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "prepared"), [
    *(pytest.param(*given, marks=pytest.mark.slow) for given in (([], stretch), (["--resize", "stretch"], stretch))),
    pytest.param(["--resize", "pad"], pad, marks=pytest.mark.slow), (["--resize", "crop"], crop),
])  # fmt: skip
def test_a_head_is_fitted_on_what_is_said(fitted, weights, long_photos, options, prepared):
    path, printed = fitted(*options)
    head = Head.load(path)
    features = expected_features(weights, long_photos, prepared)
    assert np.allclose(head.feature_mean.numpy(), features.mean(0), rtol=1e-5, atol=1e-6 * features.max())
    assert head.training_set.preparation["resize"] == (options[-1] if options else "stretch")
    seen = (
        "the transform cuts off the rim: the network sees 40% of each picture; to let it see all, add --resize stretch"
    )
    assert (seen in printed) == (prepared is crop)


@pytest.mark.slow
def test_the_network_sees_a_defect_at_the_rim(fitted):
    for resized, share in (("stretch", 100), ("pad", 100), ("crop", None)):
        found = re.search(r"balanced accuracy (\d+)%", fitted("--resize", resized)[1])
        assert (int(found[1]) == share) if share else int(found[1]) < 90


@pytest.mark.slow
def test_every_command_does_what_the_head_says(fitted, run, long_photos, tmp_path, weights):
    stretched, _ = fitted("--resize", "stretch")
    padded, _ = fitted("--resize", "pad", name="padded.safetensors")
    for head, prepared in ((stretched, stretch), (padded, pad)):
        done = run("atlas", long_photos, "--model", head, "--out", tmp_path / prepared.__name__)
        assert done.code == 0, done.err
        store = atlas.load(tmp_path / prepared.__name__)
        features = expected_features(weights, long_photos, prepared)
        head = Head.load(head)
        trace = head(torch.from_numpy(features))
        assert np.allclose(store.components, trace.values[head.component_position], rtol=1e-3, atol=1e-3)
        assert store.manifest["preparation"]["resize"] == prepared.__name__
        assert Head.load(tmp_path / prepared.__name__ / "head.safetensors").training_set.preparation["resize"]
    for command in ("atlas", "evaluate", "export"):
        few = ["--all-images"] if command == "evaluate" else []
        done = run(command, long_photos, "--model", stretched, "--out", tmp_path / "no", "--resize", "crop", *few)
        assert done.code == 2
        assert "--resize crop, but the model was fitted with stretch: leave it out" in done.err


@pytest.mark.slow
def test_a_head_that_says_nothing_means_the_crop(fitted, run, long_photos, tmp_path, weights):
    head = Head.load(fitted("--resize", "crop")[0])
    head.training_set.preparation = None
    head.save(tmp_path / "old.safetensors")
    assert b"pytorch_grad_cam_pcasvm head 2" in (tmp_path / "old.safetensors").read_bytes()
    done = run("atlas", long_photos, "--model", tmp_path / "old.safetensors", "--out", tmp_path / "atlas")
    assert done.code == 0, done.err
    store = atlas.load(tmp_path / "atlas")
    trace = head(torch.from_numpy(expected_features(weights, long_photos, crop)))
    assert np.allclose(store.components, trace.values[head.component_position], rtol=1e-3, atol=1e-3)
    assert store.manifest["preparation"] is None
    # Version 0.3 would crop what such a head was not fitted on, and refuses to read it.
    assert b"pytorch_grad_cam_pcasvm model 1" in fitted()[0].read_bytes()


OWN = """
import torchvision
from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

def network(*steps):
    return torchvision.models.squeezenet1_1(weights=None), Compose([*steps, ToTensor(), Normalize([0.5] * 3, [1] * 3)])

def cropping():
    return network(CenterCrop((20, 20)), Resize((64, 64)))

def whole():
    return network(Resize((64, 64)))

def alone():
    return network()[0]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module with networks of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "rims.py").write_text(OWN)
    yield
    sys.modules.pop("rims", None)


@pytest.mark.slow
def test_a_transform_of_ones_own_is_kept_and_said_to_crop(own, fitted, run, long_photos, tmp_path):
    head, printed = fitted(backbone="rims:cropping")
    assert "the transform cuts off the rim: the network sees 48% of each picture\n" in printed
    assert Head.load(head).training_set.preparation["resize"] is None
    assert "cuts off" not in fitted(backbone="rims:whole", name="whole.safetensors")[1]
    done = run("fit", long_photos, "--out", tmp_path / "a.safetensors", "--resize", "pad", backbone="rims:whole")
    assert "--resize pad, but the transform of rims:whole is your own and decides that: leave it out" in done.err
    done = run("atlas", long_photos, "--model", head, "--out", tmp_path / "atlas", backbone="rims:alone")
    assert "was fitted with a transform of your own, or none, which no file can hold: name" in done.err
    assert run("atlas", long_photos, "--model", head, "--out", tmp_path / "atlas", backbone="rims:cropping").code == 0
    stretched, _ = fitted(backbone="rims:alone", name="stretched.safetensors")  # which the model knows, whatever comes
    assert run("atlas", long_photos, "--model", stretched, "--out", tmp_path / "no", backbone="rims:whole").code == 0
    assert atlas.load(tmp_path / "no").manifest["preparation"]["resize"] == "stretch"


@pytest.mark.parametrize(("steps", "share"), [
    ([transforms.CenterCrop((100, 160))], 0.25), ([transforms.Resize((64, 64))], 1.0), ([transforms.Pad(4)], 1.0),
    ([transforms.CenterCrop((200, 160)), transforms.Resize((64, 64))], 0.5),
])  # fmt: skip
@pytest.mark.parametrize("standardised", [False, True])
def test_the_share_that_is_seen(steps, share, standardised):
    last = [transforms.Normalize(*IMAGENET)] if standardised else []
    transform = transforms.Compose([*steps, transforms.ToTensor(), *last])
    assert Preparation(transform, None, None).share_seen(320, 200) == pytest.approx(share, abs=0.04)


# --- which number is white -------------------------------------------------------------------------------------------


def deep(root, of_cats, of_dogs, whole=True):
    """Write the same pictures of two classes, with other numbers for each."""
    for number in range(8):
        grey = noise(number // 2, channels=1)
        for name, scaled in (("cat", of_cats), ("dog", of_dogs)):
            path = root / name / f"{number}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(scaled(grey)).save(path)
    return root


def test_8_and_16_bits_are_the_same_pictures(fitted, tmp_path):
    photos = deep(tmp_path / "p", lambda grey: grey, lambda grey: (grey * 257.0).astype(np.uint16))
    printed = fitted(photos=photos)[1]
    assert "8 of 16 pictures have more than 8 bits: the largest number of their type is white\n" in printed
    assert (
        "hint: only pictures of 'dog' have more than 8 bits: a head may learn that, and not what they show\n" in printed
    )
    assert "so they are dark" not in printed
    correct = int(re.search(r"cross-validation: (\d+)% correct", printed)[1])
    assert correct <= 50  # there is nothing to tell them apart by


def test_files_of_one_folder_are_no_classes(tmp_path, capsys):
    paths = []
    for number, scaled in enumerate((lambda grey: grey, lambda grey: (grey * 257.0).astype(np.uint16))):
        paths.append(tmp_path / f"{number}.tif")
        Image.fromarray(scaled(noise(number, channels=1))).save(paths[-1])
    _tell_depth({paths[1]: 65535.0}, paths, tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_pictures_of_12_bits_in_16(fitted, run, tmp_path):
    photos = deep(tmp_path / "p", lambda grey: (grey * 16.0).astype(np.uint16), lambda grey: grey)
    printed = fitted(photos=photos)[1]
    dark = "hint: no number of these is larger than 4080, so they are dark: try fit --white-level 4095\n"
    assert dark in printed
    head, printed = fitted("--white-level", "4080", photos=photos)
    assert "so they are dark" not in printed
    assert Head.load(head).training_set.preparation["white_level"] == 4080
    assert int(re.search(r"cross-validation: (\d+)% correct", printed)[1]) <= 50
    done = run("atlas", photos, "--model", head, "--out", tmp_path / "atlas", "--white-level", "65535")
    assert "--white-level 65535, but the model was fitted with 4080: leave it out, or fit again" in done.err
    done = run("fit", photos, "--white-level", "4000", "--out", tmp_path / "no.safetensors")
    assert re.search(r"--white-level 4000 is too low: .*cat/\d.tif has numbers up to 4080\n", done.err)
    shallow = deep(tmp_path / "shallow", lambda grey: grey, lambda grey: grey)
    head, _ = fitted(photos=shallow)
    told = run("atlas", photos, "--model", head, "--out", tmp_path / "dark").out
    assert (
        "they are dark: fit the model again, with --white-level 4095, which changes nothing for photos of 8 b" in told
    )


def test_photos_of_12_bits_are_read_by_a_model_of_8_bits_that_is_fitted_again(run, tmp_path, capsys):
    kinds = (lambda grey: grey, lambda grey: (grey.astype(float) ** 2 / 255).astype(np.uint8))
    shallow = deep(tmp_path / "shallow", *kinds)
    photos = deep(
        tmp_path / "deep", *[lambda grey, k=k: (k(grey) * (4095 / 255)).round().astype(np.uint16) for k in kinds]
    )
    options = ["--components", "3", "--C", "1", "--white-level", "4095", "--out"]
    heads = []
    for number, more in enumerate((["--out"], options[-3:], options[-3:])):
        model = tmp_path / f"{number}.safetensors"
        assert run("fit", photos if number == 2 else shallow, "--components", "3", "--C", "1", *more, model).code == 0
        heads.append(Head.load(model))
    for name in heads[0].state_dict():
        assert torch.equal(heads[0].state_dict()[name], heads[1].state_dict()[name])  # of 8 bits nothing changed
        torch.testing.assert_close(heads[1].state_dict()[name], heads[2].state_dict()[name], rtol=1e-4, atol=1e-4)
    said = []
    for model in ("0", "1"):
        out = ["--model", str(tmp_path / f"{model}.safetensors"), "--out", str(tmp_path / model)]
        assert main(["explain", str(photos), *out]) == 0
        said.append(capsys.readouterr().out)
    assert "fit the model again, with --white-level 4095" in said[0]
    assert "so they are dark" not in said[1]
    rows = [[*csv.DictReader((tmp_path / "1" / "values.csv").open())]]
    assert main(["explain", str(shallow), *out[:-1], str(tmp_path / "same")]) == 0
    rows.append([*csv.DictReader((tmp_path / "same" / "values.csv").open())])
    assert rows[0] == rows[1]


def test_check_and_fit_agree_what_is_white_in_floats(run, tmp_path, capsys):
    for top, white in ((1.0, 1), (255.0, 255), (100.0, 255)):
        photos = deep(tmp_path / str(top), *[lambda grey, top=top: (grey * (top / 255)).astype(np.float32)] * 2)
        assert main(["check", str(photos)]) == 0
        said = capsys.readouterr().out
        assert (
            f"floating-point: 16 photos, such as cat/0.tif, with numbers up to {white}; fit takes {white} for" in said
        )
        assert "65535" not in said
        done = run("fit", photos, "--components", "2", "--C", "1", "--out", tmp_path / "m.safetensors")
        assert f": {white} is white\n" in done.out


def colours_of_16_bits(path, pixels):
    """Write a PNG of colours of 16 bits, as Pillow does not."""
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, 2, 0, 0, 0)
    raw = b"".join(b"\0" + row.tobytes() for row in pixels.astype(">u2"))
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    parts = (struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in chunks)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize(("top", "white"), [(1023, 1023), (4000, 4095), (16383, 16383)])
def test_colours_of_10_to_14_bits_are_told_and_read_whole(run, tmp_path, capsys, top, white):
    photos = tmp_path / "p"
    for number in range(8):
        pixels = noise(number).astype(np.int64)
        pixels[0, 0] = 255
        colours_of_16_bits(photos / ["cat", "dog"][number % 2] / f"{number}.png", np.rint(pixels * (top / 255)))
    assert main(["check", str(photos)]) == 0
    said = capsys.readouterr().out
    assert f"dark: no photo of more than 8 bits has larger numbers than {white}: fit --white-level {white}\n" in said
    assert said.endswith(f"next: pcasvm-cam fit {photos} --white-level {white}\n")
    options = ["--components", "2", "--C", "1", "--out", tmp_path / "m.safetensors"]
    done = run("fit", photos, *options)
    assert (
        f"hint: no number of these is larger than {top}, so they are dark: try fit --white-level {white}\n" in done.out
    )
    done = run("fit", photos, *options, "--white-level", white)
    assert (done.code, "so they are dark" in done.out) == (0, False)
    read = np.asarray(in_colour(photos / "cat" / "0.png", white_level=white))
    pixels = noise(0).astype(np.int64)
    pixels[0, 0] = 255
    assert np.array_equal(read, np.rint(np.rint(pixels * (top / 255)) * (255 / white)).astype(np.uint8))


def test_numbers_below_0_are_told_by_every_command_and_no_white_level_is_advised(fitted, run, tmp_path, capsys):
    photos = deep(tmp_path / "p", *[lambda grey: grey.astype(np.int32) * 4 - 704] * 2)
    reason = "cat/0.tif (its numbers go from -704 to 3"
    assert main(["check", str(photos)]) == 0
    said = capsys.readouterr().out
    assert f"broken: {reason}" in said
    assert "--white-level" not in said
    done = run("fit", photos, "--components", "3", "--out", tmp_path / "no.safetensors")
    assert f"none of the 16 images in {photos} can be read: {reason}" in done.err
    assert "add a constant to those of all pictures" in done.err
    assert "--white-level" not in done.out
    head, _ = fitted(
        photos=deep(tmp_path / "mended", *[lambda grey: (grey.astype(np.int32) * 4).astype(np.uint16)] * 2)
    )
    assert reason in run("explain", photos, "--model", head, "--out", tmp_path / "maps").err


def test_a_page_that_is_named_is_read_by_all_commands(run, tmp_path, capsys):
    for number in range(8):
        path = tmp_path / "p" / ["cat", "dog"][number % 2] / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        pages = [Image.fromarray(noise(number + 50 * page, channels=1)) for page in range(2)]
        pages[0].save(path, save_all=True, append_images=pages[1:])
    photos, model = tmp_path / "p", tmp_path / "m.safetensors"
    assert main(["check", str(photos)]) == 0
    assert "broken: cat/0.tif (it has 2 pages, and nobody knows which is the picture: na" in capsys.readouterr().out
    done = run("fit", photos, "--components", "2", "--C", "1", "--out", model)
    assert "cat/0.tif (it has 2 pages" in done.err
    assert main(["check", str(photos), "--page", "2"]) == 0
    assert capsys.readouterr().out.endswith(f"next: pcasvm-cam fit {photos} --page 2\n")
    assert run("fit", photos, "--components", "2", "--C", "1", "--page", "2", "--out", model).code == 0
    assert Head.load(model).training_set.preparation["page"] == 2
    out = ["--model", model, "--out", tmp_path / "maps"]
    assert main(["explain", str(photos), *map(str, out)]) == 0
    with (tmp_path / "maps" / "values.csv").open() as file:
        paged = [row["predicted"] for row in csv.DictReader(file)]
    for path in photos.rglob("*.tif"):
        Image.fromarray(noise(int(path.stem) + 50, channels=1)).save(path)
    assert main(["explain", str(photos), *map(str, out), "--page", "1"]) == 0
    with (tmp_path / "maps" / "values.csv").open() as file:
        assert [row["predicted"] for row in csv.DictReader(file)] == paged


@pytest.mark.slow
@pytest.mark.parametrize("white", [1.0, 255.0])
def test_what_is_white_in_floats_is_decided_once(fitted, run, tmp_path, white):
    photos = deep(tmp_path / "p", lambda grey: (grey * (white / 255)).astype(np.float32), lambda grey: grey)
    head, printed = fitted(photos=photos)
    assert f"8 of 16 pictures have floating-point numbers, to {white:g}: {white:g} is white\n" in printed
    assert Head.load(head).training_set.preparation["float_white"] == white
    assert int(re.search(r"cross-validation: (\d+)% correct", printed)[1]) <= 50
    dark = deep(tmp_path / "dark", lambda grey: (grey * (0.5 / 255)).astype(np.float32), lambda grey: grey)
    assert run("atlas", dark, "--model", head, "--out", tmp_path / "atlas").code == 0  # as dark as they are
    values = atlas.load(tmp_path / "atlas").components
    cats, dogs = values[:8], values[8:]
    assert np.abs(cats - dogs).max() > 0.1 * np.abs(values).max()


def test_floats_of_two_kinds_and_others_are_refused(run, tmp_path):
    photos = deep(tmp_path / "p", lambda grey: (grey / 255).astype(np.float32), lambda grey: grey.astype(np.float32))
    options = ["--out", tmp_path / "head.safetensors", "--components", "3"]
    done = run("fit", photos, *options)
    assert "floating-point pictures must all go to 1, or all to 255, but the largest numbers of cat/" in done.err
    shutil.rmtree(photos)
    photos = deep(tmp_path / "p", lambda grey: grey * np.float32(100), lambda grey: grey)
    done = run("fit", photos, *options)
    assert "cat/0.tif (its numbers go from 0 to 2" in done.err
    assert "but 0 is black and 255 white)" in done.err
    done = run("fit", photos, *options, "--skip-bad-images")
    assert "only images of 'dog' can be read, but a classifier needs two classes" in done.err


@pytest.mark.slow
def test_bad_pictures_are_named_and_skipped_whatever_is_wrong_with_them(fitted, run, tmp_path):
    photos = deep(tmp_path / "p", lambda grey: grey, lambda grey: 255 - grey)
    Image.new("1", (20000, 10000)).save(photos / "cat" / "3.png")
    (photos / "dog" / "9.jpg").write_bytes(b"no picture")
    done = run("fit", photos, "--out", tmp_path / "head.safetensors")
    assert (
        "2 photos cannot be read: cat/3.png (it has more pixels than Pillow takes: make it smaller, or cut it up), dog"
        in done.err
    )
    assert "or add --skip-bad-images" in done.err
    _, printed = fitted("--skip-bad-images", photos=photos)
    assert "skipped 2 images that cannot be read: cat/3.png, dog/9.jpg\n" in printed
    _, printed = fitted("--skip-bad-images", photos=photos)  # from the cache
    assert "skipped 2 images that cannot be read: cat/3.png, dog/9.jpg\n" in printed
    done = run("fit", photos, "--out", tmp_path / "head.safetensors")
    assert "2 photos cannot be read: cat/3.png (" in done.err


# --- means of layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["features.7", "features.10"])  # which a head has means of, or has not
@pytest.mark.slow
def test_contributions_at_inner_layers_do_not_depend_on_the_pictures_at_hand(
    fitted, run, long_photos, tmp_path, weights, inner
):
    head, _ = fitted("--batch-size", "5")
    means = Head.load(head).training_set.means
    backbone = torchvision.models.squeezenet1_1(weights=None).eval()
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    x = torch.stack([stretch(Image.open(path).convert("RGB")) for path in sorted(long_photos.rglob("*.png"))])
    expected = package.mean_activations(backbone, [x], inner, progress=False)
    options = ["--model", head, "--features", "features", "--baseline", "mean"]
    if inner in means:
        assert torch.allclose(means[inner], expected, rtol=1e-4, atol=1e-6)
    else:
        done = run("atlas", long_photos, *options, "--out", tmp_path / "no", layer=inner)
        told = (
            f"contributions at '{inner}' start near the mean of the training images there, which {head} does not hold"
        )
        assert told in done.err
        options += ["--train", long_photos]
    few = tmp_path / "few" / "good"
    few.mkdir(parents=True)
    shutil.copy(sorted((long_photos / "good").iterdir())[1], few / "0.png")
    for photos, out in ((long_photos, "all"), (tmp_path / "few", "one")):
        done = run("atlas", photos, *options, "--out", tmp_path / out, layer=inner)
        assert done.code == 0, done.err
    # Not of the first photo: at a kink of its path, rounding alone moves a map by 8 %.
    every, one = (atlas.load(tmp_path / out).maps([row]).maps for out, row in (("all", 1), ("one", 0)))
    assert float((one - every).abs().max() / every.abs().max()) < 2e-3  # half precision
    net = PCASVMNet(backbone, Head.load(head), "features", pool="mean").eval()
    by_hand = ContributionCAM(net, [inner], baseline="mean", mean=expected).explain(x[1:2])
    assert float((one - by_hand.maps[:, :3]).abs().max() / by_hand.maps.abs().max()) < 2e-3
    if inner in means:
        by_head = ContributionCAM(net, [inner], baseline="mean").explain(x[1:2])
        assert relative(by_head.maps, by_hand.maps) < 1e-3


@pytest.mark.parametrize("behind", ["features", "features.12"])  # the block around the features, and a later one
def test_layers_behind_the_features_have_no_use_for_training_images(fitted, run, long_photos, tmp_path, behind):
    head, _ = fitted(layer="features.10")
    for options in ([], ["--train", long_photos]):
        done = run("atlas", long_photos, "--model", head, "--out", tmp_path / "atlas", *options, layer=behind)
        assert done.code == 2
        assert f"--layer {behind} does not run before the features, 'features.10': name a layer that does" in done.err
        assert done.err.endswith("such as features.8, features.9, features.10\n")


def test_means_of_another_network_are_refused(fitted, long_photos):
    head = Head.load(fitted()[0])
    inner = next(name for name in head.training_set.means if name != "features")
    head.training_set.means[inner] = torch.zeros(5, 31, 31)
    net = PCASVMNet(torchvision.models.squeezenet1_1(weights=None), head, "features", pool="mean").eval()
    with pytest.raises(
        ValueError, match=r"has a mean of shape \(5, 31, 31\), but .* returns \(\d+, 31, 31\) for an image: it is"
    ):
        ContributionCAM(net, [inner]).explain(torch.randn(1, 3, SIDE, SIDE), [SVMTarget()])


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_second_head_does_not_run_the_network(fitted, long_photos, tmp_path, monkeypatch):
    first, printed = fitted()
    assert "features: taken from" not in printed
    monkeypatch.setattr(atlas, "extract", lambda *_, **__: pytest.fail("ran"))
    second, printed = fitted("--kernel", "linear", name="linear.safetensors")
    assert "features: taken from" in printed
    assert Head.load(second).digest() != Head.load(first).digest()
    again, _ = fitted(name="again.safetensors")
    assert again.read_bytes() == first.read_bytes()
    monkeypatch.undo()


@pytest.mark.slow
def test_an_interrupted_fit_goes_on_where_it_stopped(fitted, run, tmp_path, monkeypatch):
    for number in range(20):
        save(tmp_path / "p" / "ab"[number % 2] / f"{number:02}.png", noise(number) // (1 + number % 2))
    write, written = Job._write, []

    def stopping(job, shard, columns, bad):
        if written == [0]:
            raise RuntimeError("stopped")
        write(job, shard, columns, bad)
        written.append(shard)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "_write", stopping)
        assert run("fit", tmp_path / "p", "--components", "3", "--out", tmp_path / "no.safetensors").code == 2
    monkeypatch.setattr(Job, "_write", lambda *args: (write(*args), written.append(args[1]))[0])
    again, _ = fitted(photos=tmp_path / "p", name="again.safetensors")
    assert written == [0, 1]
    assert again.read_bytes() == fitted("--no-cache", photos=tmp_path / "p")[0].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--processes", "--workers"])
def test_processes_and_workers_extract_the_same(fitted, option):
    one, two = fitted("--no-cache")[0], fitted("--no-cache", option, "2", name="two.safetensors")[0]
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["--pool", "--no-cache", "--resize", "a file", "another", "cut", "damage", "weights"]
)
def test_features_are_extracted_anew_where_anything_differs(fitted, long_photos, tmp_path, change, weights):
    photos = shutil.copytree(long_photos, tmp_path / "photos")
    fitted(photos=photos)
    options, changes = [], {}
    match change:
        case "--no-cache":
            options = ["--no-cache"]
        case "--resize":
            options = ["--resize", "pad"]
        case "--pool":
            options = ["--pool", "max"]
        case "a file":
            save(photos / "good" / "0.png", noise(77))
        case "another":
            save(photos / "good" / "99.png", noise(78))
        case "cut" | "damage":
            file = next((tmp_path / "cache").glob("*/part-00000.npz"))
            written = bytearray(file.read_bytes())
            written[len(written) // 2] ^= 1
            file.write_bytes(written if change == "damage" else written[:-9])
        case "weights":
            state = torch.load(weights, weights_only=True)
            torch.save({name: tensor + 1e-3 for name, tensor in state.items()}, tmp_path / "other.pth")
            changes = {"weights": tmp_path / "other.pth"}
    assert "features: taken from" not in fitted(*options, photos=photos, **changes)[1]
    if change != "--no-cache":
        assert "features: taken from" in fitted(*options, photos=photos, **changes)[1]


CODE = """
import torchvision
from torch import nn
from torchvision.transforms import Compose, Grayscale, Resize, ToTensor

SCALE, STEPS = {scale}, {steps}

def network():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Identity(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net[1].register_forward_hook(lambda module, args, output: output * SCALE)
    return net, Compose([*STEPS, Resize((32, 32)), ToTensor()])
"""


@pytest.mark.parametrize("changed", [{"scale": "-3.0"}, {"steps": "[Grayscale(3)]"}])
def test_features_of_other_code_are_extracted_anew(run, tmp_path, monkeypatch, changed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    for number in range(8):  # the first one is grey, and tells nothing of colours
        save(
            tmp_path / "p" / "ab"[number % 2] / f"{number}.png",
            noise(number) if number else np.full((20, 20, 3), 99, np.uint8),
        )
    torch.manual_seed(0)
    torch.save({"0.weight": torch.randn(8, 3, 3, 3), "0.bias": torch.randn(8)}, tmp_path / "own.pth")
    printed = []
    for code in ({}, {}, changed):
        sys.modules.pop("hooked_net", None)
        (tmp_path / "hooked_net.py").write_text(CODE.format(**{"scale": "1.0", "steps": "[]"} | code))
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        options = ["--components", "2", "--features", "1", "--out", tmp_path / "head.safetensors"]
        done = run(
            "fit", tmp_path / "p", *options, backbone="hooked_net:network", weights=tmp_path / "own.pth", layer="1"
        )
        assert done.code == 0, done.err
        printed.append("features: taken from" in done.out)
    assert printed == [False, True, False]
    sys.modules.pop("hooked_net", None)


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(fitted, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert fitted()[1].endswith("(leave out with --no-pictures)\n")


@pytest.mark.slow
def test_a_full_disk_is_no_reason_to_fail(fitted, tmp_path, monkeypatch):
    write = shards.write_shard

    def full(folder, *rest):
        if (tmp_path / "cache") in folder.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, *rest)

    monkeypatch.setattr(importlib.import_module("pytorch_grad_cam_pcasvm.studio.atlas.run"), "write_shard", full)
    assert fitted()[1].endswith("(leave out with --no-pictures)\n")
    assert not list((tmp_path / "cache").glob("*/"))


# --- what is said of a head ------------------------------------------------------------------------------------------


def test_a_good_score_needs_no_hint(fitted):
    assert "hint" not in fitted("--resize", "stretch", "--normal", "good")[1]


def test_a_class_can_be_an_absence(fitted, run, long_photos, tmp_path):
    assert "hint: if 'good' means that there is nothing to find, add --normal good" in fitted()[1]
    head, _ = fitted("--normal", "good", name="normal.safetensors")
    assert Head.load(head).normal == "good"
    assert run("fit", long_photos, "--normal", "fine", "--out", head).code == 2
    for options, heading in (
        ([], "against good"), (["--class", "good"], "good"), (["--class", "hole", "--versus", "good"], "hole / good"),
    ):  # fmt: skip
        options = ["--model", head, "--components", "0", "--out", tmp_path / "maps", *options]
        assert run("explain", long_photos, *options).code == 0
        with (tmp_path / "maps" / "values.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert heading in rows[0]
        for row in rows:
            assert (float(row[heading]) > 0) == (row["predicted"] == ("good" if heading == "good" else "hole"))
    done = run("explain", long_photos, "--model", head, "--class", "fine", "--out", tmp_path / "maps")
    assert "--class: this head has no class 'fine', its classes are good, hole" in done.err


def test_cost_and_gamma(fitted, run, long_photos, tmp_path):
    svm = Head.load(fitted("--C", "0.01", "--gamma", "0.5")[0]).stages[-1]
    assert svm.kernel.gamma == pytest.approx(0.5)
    assert float(svm.dual_coef.abs().max()) <= 0.01
    with pytest.raises(SystemExit):
        run("fit", long_photos, "--C", "0", "--out", tmp_path / "a.safetensors")
    done = run("fit", long_photos, "--out", tmp_path / "a.safetensors", layer="auto")
    assert "--layer auto compares layers on photos to explain: name one here, or leave it out" in done.err
    done = run("fit", long_photos, "--search", "--C", "2", "--out", tmp_path / "a.safetensors")
    assert "--search chooses C and gamma: leave out --C and --gamma" in done.err
    with pytest.raises(SystemExit):
        run("fit", long_photos, "--gamma", "wide", "--out", tmp_path / "a.safetensors")


@pytest.mark.slow
def test_a_search_is_scikit_learns(fitted, weights, long_photos):
    from sklearn.decomposition import PCA
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    head, printed = fitted("--search")
    features = expected_features(weights, long_photos, stretch)
    labels = np.repeat(["good", "hole"], 6)
    components = make_pipeline(StandardScaler(), PCA(3, random_state=0)).fit_transform(features)
    gammas = [factor / (3 * components.var()) for factor in (0.1, 1, 10)]
    grid = {"C": [0.1, 1.0, 10.0, 100.0], "gamma": gammas}
    search = GridSearchCV(SVC(), grid, scoring="balanced_accuracy", cv=StratifiedKFold(4)).fit(components, labels)
    chosen = re.search(
        r"search: --C (\S+) --gamma (\S+) is the best of 12, with a balanced accuracy of (\d+)%", printed
    )
    assert float(chosen[3]) == pytest.approx(100 * search.best_score_, abs=1)
    (usual,) = [
        score
        for score, values in zip(search.cv_results_["mean_test_score"], search.cv_results_["params"], strict=True)
        if values == {"C": 1.0, "gamma": gammas[1]}
    ]
    assert f"that of C=1 and gamma=scale is {usual:.0%}\n" in printed
    assert float(chosen[1]) == pytest.approx(search.best_params_["C"], rel=1e-2)
    assert float(chosen[2]) == pytest.approx(search.best_params_["gamma"], rel=1e-2)
    assert Head.load(head).stages[-1].kernel.gamma == pytest.approx(search.best_params_["gamma"], rel=1e-3)


@pytest.mark.parametrize(("count", "code"), [pytest.param(10, 0, marks=pytest.mark.slow), (6, 0), (4, 2)])
def test_a_search_among_few(run, tmp_path, count, code):
    for number in range(count):
        save(tmp_path / "p" / "ab"[number % 2] / f"{number}.png", noise(number))
    done = run("fit", tmp_path / "p", "--search", "--components", "2", "--out", tmp_path / "head.safetensors")
    assert done.code == code, done.err
    assert (code == 0) == ("search: --C" in done.out)
    assert "warning" not in done.err
    assert code == 0 or "--search compares by cross-validation, for which a class has too few images" in done.err


def test_the_resized_picture_is_the_one_of_pillow():
    assert torch.equal(
        stretch(Image.fromarray(noise(0))),
        normalize(to_tensor(resize(Image.fromarray(noise(0)), [SIDE, SIDE])), *IMAGENET),
    )
