"""Pictures of any depth, as every command reads them, and the part of them that a network sees."""

import pickle
import shutil
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from torchvision.transforms import functional

from pytorch_grad_cam_pcasvm.data.images import Images
from pytorch_grad_cam_pcasvm.export import explainer
from pytorch_grad_cam_pcasvm.export.explainer import UnreadableImageError, choose_rim, framed, normalised, read_picture

GREYS = np.random.default_rng(0).integers(0, 256, (9, 14), np.uint8)


def written(path, pixels, **options):
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.mark.parametrize(("name", "pixels", "whites"), [
    ("a.png", GREYS, {}),
    ("a.tif", GREYS, {"white_level": 4095, "float_white": 1.0}),  # which say nothing of 8 bits
    ("a.png", (GREYS * 257.0).astype(np.uint16), {}),
    ("a.tif", (GREYS * 257.0).astype(np.uint16), {}),
    ("a.png", (GREYS * 16.0).astype(np.uint16), {"white_level": 16 * 255}),
    ("a.tif", GREYS.astype(np.int32) * (2**31 // 255), {}),
    ("a.tif", (GREYS / 255).astype(np.float32), {"float_white": 1.0}),
    ("a.tif", GREYS.astype(np.float32), {"float_white": 255.0}),
])  # fmt: skip
def test_the_same_greys_in_any_depth(tmp_path, name, pixels, whites):
    picture = read_picture(written(tmp_path / name, pixels), **whites)
    assert picture.mode == "L"
    assert np.array_equal(np.asarray(picture), GREYS)


def test_a_pgm_says_itself_what_is_white(tmp_path):
    (tmp_path / "a.pgm").write_bytes(b"P5 14 9 4080\n" + (GREYS * 16.0).astype(">u2").tobytes())
    for whites in ({}, {"white_level": 4095}):
        assert np.array_equal(np.asarray(read_picture(tmp_path / "a.pgm", **whites)), GREYS)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_colours_are_those_of_pillow(tmp_path, mode):
    colours = np.random.default_rng(1).integers(0, 256, (9, 14, 3), np.uint8)
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    Image.fromarray(colours).convert(mode).save(path)
    picture, expected = read_picture(path), Image.open(path)
    assert picture.mode == ("L" if mode in ("1", "L", "LA") else "RGB")
    for wanted in ("L", "RGB"):
        assert np.array_equal(np.asarray(picture.convert(wanted)), np.asarray(expected.convert(wanted)))


def tiff(path, pixels, sample_format=1, photometric=1):
    """Write a TIFF of one strip, as Pillow does not of all kinds."""
    height, width = pixels.shape
    bits = 8 * pixels.dtype.itemsize
    fields = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height,
              279: pixels.nbytes, 339: sample_format}  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    content = (
        struct.pack("<2sHI", b"II", 42, 8 + pixels.nbytes) + pixels.astype(pixels.dtype.newbyteorder("<")).tobytes()
    )
    path.write_bytes(content + struct.pack("<H", len(fields)) + entries + bytes(4))
    return path


@pytest.mark.parametrize(("pixels", "whites"), [
    (GREYS, {}), ((GREYS * 257.0).astype(np.uint16), {}), ((GREYS * 16.0).astype(np.uint16), {"white_level": 4080}),
    ((GREYS / 255).astype(np.float32), {"float_white": 1.0}),
])  # fmt: skip
def test_tiffs_whose_0_is_white(tmp_path, pixels, whites):
    kind = 3 if pixels.dtype.kind == "f" else 1
    assert np.array_equal(np.asarray(read_picture(tiff(tmp_path / "a.tif", pixels, kind, 0), **whites)), 255 - GREYS)
    assert np.array_equal(np.asarray(read_picture(tiff(tmp_path / "a.tif", pixels, kind, 1), **whites)), GREYS)


def test_unsigned_integers_of_32_bits(tmp_path):
    pixels = (GREYS.astype(np.int64) * (2**32 // 255)).astype(np.uint32)
    assert np.array_equal(np.asarray(read_picture(tiff(tmp_path / "a.tif", pixels))), GREYS)


def test_a_white_level_is_for_grey_pictures(tmp_path):
    rows = np.random.default_rng(3).integers(0, 4096, (2, 3 * 2), np.uint16).astype(">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    content = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    assert read_picture(tmp_path / "a.png").mode == "RGB"
    with pytest.raises(UnreadableImageError, match="its colours have 16 bits, and a white level is for grey pictures"):
        read_picture(tmp_path / "a.png", white_level=4095)


def test_what_is_white_in_one_picture_is_in_another(tmp_path):
    bright, dark = (written(tmp_path / f"{top}.png", np.full((4, 4), top, np.uint16)) for top in (60_000, 6_000))
    assert [np.asarray(read_picture(path)).max() for path in (bright, dark)] == [233, 23]


@pytest.mark.parametrize(("pixels", "whites", "reason"), [
    (np.full((4, 4), 5000, np.uint16), {"white_level": 4095}, "its numbers go from 5000 to 5000, but 0 is black and 4"),
    (np.full((4, 4), -1, np.int32), {}, "its numbers go from -1 to -1, but 0 is black and 2.14748e"),
    (np.full((4, 4), 0.5, np.float32), {}, "its numbers are floating-point, and nothing says which is white: save"),
    (np.full((4, 4), 1.5, np.float32), {"float_white": 1.0}, "its numbers go from 1.5 to 1.5, but 0 is black and 1 wh"),
    (np.full((4, 4), np.nan, np.float32), {"float_white": 1.0}, "its numbers go from nan to nan"),
])  # fmt: skip
def test_numbers_that_nobody_can_call_a_grey(tmp_path, pixels, whites, reason):
    path = written(tmp_path / "a.tif", pixels)
    with pytest.raises(UnreadableImageError, match=f"a.tif cannot be read: {reason}") as caught:
        read_picture(path, **whites)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # from a worker
    images = Images(tmp_path, lambda picture: torch.zeros(1, 2, 2))
    if not whites:
        assert images.read([0]).bad[0].startswith(reason)


def test_whatever_pillow_raises_names_the_file(tmp_path):
    Image.new("1", (20000, 10000)).save(tmp_path / "large.png")
    comment = PngImagePlugin.PngInfo()
    comment.add_text("comment", "x" * (PngImagePlugin.MAX_TEXT_CHUNK + 1), zip=True)
    Image.new("L", (4, 4)).save(tmp_path / "comment.png", pnginfo=comment)
    (tmp_path / "short.png").write_bytes(b"no picture")
    for name, kind in (
        ("large", "it has more pixels than Pillow takes: make it smaller"),
        ("comment", "ValueError"),
        ("short", "UnidentifiedImage"),
    ):
        with pytest.raises(UnreadableImageError, match=rf"{name}.png cannot be read: {kind}"):
            read_picture(tmp_path / f"{name}.png")
    with pytest.raises(UnreadableImageError, match=r"nowhere.png cannot be read: FileNotFoundError"):
        read_picture(tmp_path / "nowhere.png")


def test_the_reader_is_one_file_to_copy(tmp_path):
    shutil.copy(explainer.__file__, tmp_path / "copied.py")
    written(tmp_path / "a.png", (GREYS * 257.0).astype(np.uint16))
    code = "import sys; sys.path.insert(0, '.'); import copied; print(sum(copied.read_picture('a.png').tobytes()))"
    code += "; print(*sys.modules)"
    run = [sys.executable, "-I", "-c", code]
    total, modules = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert int(total) == GREYS.sum(dtype=int)
    assert not {"torch", "pytorch_grad_cam_pcasvm"} & set(modules.split())


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(57, 34), (20, 41), (30, 30)])
def test_what_a_network_sees(size, interpolation):
    picture = Image.fromarray(np.random.default_rng(2).integers(0, 256, (*size, 3), np.uint8))
    mean, std, how = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4], functional.InterpolationMode(interpolation)

    def image(seen):
        return functional.normalize(functional.to_tensor(seen), mean, std).numpy()

    stretched = functional.resize(picture, [16, 24], how)
    assert np.abs(normalised(framed(picture, (16, 24), None, interpolation), mean, std) - image(stretched)).max() < 1e-6
    part = min(16 / size[0], 24 / size[1])
    inner = [max(1, round(part * side)) for side in size]
    top, left = (16 - inner[0]) // 2, (24 - inner[1]) // 2
    padding = [left, top, 24 - inner[1] - left, 16 - inner[0] - top]
    padded = functional.pad(functional.resize(picture, inner, how), padding, fill=tuple(choose_rim(mean, 3)))
    given = normalised(framed(picture, (16, 24), "pad", interpolation, choose_rim(mean, 3)), mean, std)
    assert np.abs(given - image(padded)).max() < 1e-6
    if inner[1] < 24:
        assert np.abs(given[:, 8, 0]).max() < 0.01  # the rim is 0 for the network, but for 8 bits
    cut = functional.center_crop(functional.resize(picture, 18, how), 16)
    assert np.abs(normalised(framed(picture, (16, 16), 18, interpolation), mean, std) - image(cut)).max() < 1e-6


@pytest.mark.parametrize(("mean", "channels", "rim"), [(None, 1, 0), (None, 3, (0, 0, 0)), ([0.5], 1, 128)])
def test_the_colour_of_a_frame(mean, channels, rim):
    assert choose_rim(mean, channels) == rim
