"""Pictures of any depth, as every command reads them, and the part of them that a network sees."""

import pickle
import struct
import subprocess
import sys
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from torchvision.transforms import functional

from pytorch_grad_cam_pcasvm import export
from pytorch_grad_cam_pcasvm.studio.data.images import Images
from pytorch_grad_cam_pcasvm.studio.pictures.frames import choose_rim, frame_picture, normalise_picture
from pytorch_grad_cam_pcasvm.studio.pictures.read import UnreadableImageError, read_picture

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
    export.write_reader(tmp_path / "copied.py")
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
    assert (
        np.abs(
            normalise_picture(frame_picture(picture, (16, 24), None, interpolation), mean, std) - image(stretched)
        ).max()
        < 1e-6
    )
    part = min(16 / size[0], 24 / size[1])
    inner = [max(1, round(part * side)) for side in size]
    top, left = (16 - inner[0]) // 2, (24 - inner[1]) // 2
    padding = [left, top, 24 - inner[1] - left, 16 - inner[0] - top]
    padded = functional.pad(functional.resize(picture, inner, how), padding, fill=tuple(choose_rim(mean, 3)))
    given = normalise_picture(frame_picture(picture, (16, 24), "pad", interpolation, choose_rim(mean, 3)), mean, std)
    assert np.abs(given - image(padded)).max() < 1e-6
    if inner[1] < 24:
        assert np.abs(given[:, 8, 0]).max() < 0.01  # the rim is 0 for the network, but for 8 bits
    cut = functional.center_crop(functional.resize(picture, 18, how), 16)
    assert (
        np.abs(normalise_picture(frame_picture(picture, (16, 16), 18, interpolation), mean, std) - image(cut)).max()
        < 1e-6
    )


@pytest.mark.parametrize(("mean", "channels", "rim"), [(None, 1, 0), (None, 3, (0, 0, 0)), ([0.5], 1, 128)])
def test_the_colour_of_a_frame(mean, channels, rim):
    assert choose_rim(mean, channels) == rim


COLOURS = np.random.default_rng(4).integers(0, 65536, (9, 14, 3)).astype(np.uint16)


def png(path, pixels, kind):
    """Write a PNG of 16 bits, as Pillow does not: kind 2 is RGB, 4 grey and transparency, 6 RGB and transparency."""
    height, width = pixels.shape[:2]
    raw = b"".join(b"\0" + row.tobytes() for row in pixels.astype(">u2"))
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    content = (struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(content))
    return path


def colour_tiff(path, pixels, *, order="<", planar=False, tags=None):
    """Write colours of 16 bits to a TIFF of one strip, or of one for each colour."""
    height, width, channels = pixels.shape
    stored = np.moveaxis(pixels, -1, 0) if planar else pixels
    data, count = stored.astype(f"{order}u2").tobytes(), channels if planar else 1
    end = 8 + len(data)  # where what does not fit into an entry lies: bits, then places and lengths of strips
    places = [8 + n * len(data) // count for n in range(count)]
    fields = {256: (4, [width]), 257: (4, [height]), 258: (3, [16] * channels), 259: (3, [1]), 262: (3, [2]),
              273: (4, places), 277: (3, [channels]), 278: (4, [height]), 279: (4, [len(data) // count] * count),
              284: (3, [1 + planar])} | (tags or {})  # fmt: skip
    later, entries = b"", b""
    for tag, (kind, values) in sorted(fields.items()):
        packed = struct.pack(f"{order}{len(values)}{'H' if kind == 3 else 'I'}", *values)
        value = packed.ljust(4, b"\0")
        if len(packed) > 4:
            value, later = struct.pack(f"{order}I", end + len(later)), later + packed
        entries += struct.pack(f"{order}HHI", tag, kind, len(values)) + value
    mark = b"II" if order == "<" else b"MM"
    head = mark + struct.pack(f"{order}HI", 42, end + len(later))
    path.write_bytes(head + data + later + struct.pack(f"{order}H", len(fields)) + entries + bytes(4))
    return path


@pytest.mark.parametrize("write", [
    lambda path, pixels: png(path, pixels, 2), lambda path, pixels: png(path, np.dstack([pixels, pixels[..., 0]]), 6),
    colour_tiff, partial(colour_tiff, order=">"), partial(colour_tiff, planar=True),
    partial(colour_tiff, planar=True, order=">"),
])  # fmt: skip
@pytest.mark.parametrize(("top", "white"), [(65535, None), (65535, 65535), (4095, 4095), (1023, 1023)])
def test_colours_of_more_than_8_bits_are_read_whole(tmp_path, write, top, white):
    pixels = (COLOURS.astype(int) % (top + 1)).astype(np.uint16)
    picture = read_picture(write(tmp_path / "a.img", pixels), white_level=white)
    assert picture.mode == "RGB"
    assert np.array_equal(np.asarray(picture), np.rint(pixels * (255 / top)).astype(np.uint8))


@pytest.mark.parametrize(("extra", "fourth", "is_read"), [
    (0, "varied", False), (0, "opaque", False), (1, "varied", False), (2, "varied", False), (2, "opaque", True),
    (2, "cut out", True), (None, "opaque", False),
])  # fmt: skip
@pytest.mark.parametrize("bits", [8, 16])
def test_a_fourth_channel_is_left_out_only_if_it_is_a_transparency(tmp_path, extra, fourth, is_read, bits):
    """As infrared of drones and satellites, which GDAL writes as a transparency."""
    channel = {"varied": COLOURS[..., 1], "opaque": np.full_like(COLOURS[..., 0], 65535)}
    channel["cut out"] = np.where(COLOURS[..., 1] > 30000, 65535, 0).astype(np.uint16)
    pixels = np.dstack([COLOURS, channel[fourth]])
    path = tmp_path / "a.tif"
    tags = {} if extra is None else {338: (3, [extra])}
    if bits == 16:
        colour_tiff(path, pixels, tags=tags)
    else:
        stored = (pixels >> 8).astype(np.uint8).view("<u2").reshape(9, 7, 4)
        colour_tiff(path, stored, tags=tags | {256: (4, [14]), 258: (3, [8] * 4)})
    if is_read:
        shown = np.asarray(read_picture(path)).astype(int)
        assert np.array_equal(shown, np.rint(COLOURS / 257) if bits == 16 else COLOURS >> 8)
        return
    with pytest.raises(UnreadableImageError, match="4 channels") as caught:
        read_picture(path)
    assert "(grey) or 3 (RGB)" in str(caught.value)
    assert read_picture(colour_tiff(path, COLOURS)).mode == "RGB"


def test_grey_of_16_bits_with_transparency_is_read_whole(tmp_path):
    pixels = COLOURS[..., :2] % 4096
    picture = read_picture(png(tmp_path / "a.png", pixels, 4), white_level=4095)
    assert np.array_equal(np.asarray(picture), np.rint(pixels[..., 0] * (255 / 4095)).astype(np.uint8))


def test_a_planar_tiff_is_turned_as_others_are(tmp_path):
    tags = {274: (3, [6])}
    one, other = (
        np.asarray(read_picture(colour_tiff(tmp_path / f"{planar}.tif", COLOURS, planar=planar, tags=tags)))
        for planar in (False, True)
    )
    assert np.array_equal(one, np.rot90(np.rint(COLOURS / 257).astype(np.uint8), -1))
    assert np.array_equal(one, other)


def test_colours_beyond_the_white_level_are_refused(tmp_path):
    with pytest.raises(UnreadableImageError, match=r"its numbers go from \d+ to 6\d+, but 0 is black and 4095 white"):
        read_picture(png(tmp_path / "a.png", COLOURS, 2), white_level=4095)


@pytest.mark.optional
def test_a_planar_tiff_that_pillow_garbles_is_refused_until_it_is_saved_otherwise(tmp_path):
    path = tmp_path / "a.tif"
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(path, np.moveaxis(COLOURS, -1, 0), photometric="rgb", planarconfig="separate", compression="zlib")
    with pytest.raises(UnreadableImageError, match="save them pixel by pixel, or without compression"):
        read_picture(path)
    tifffile.imwrite(path, COLOURS, photometric="rgb", compression="zlib")
    assert np.array_equal(np.asarray(read_picture(path)), np.rint(COLOURS / 257).astype(np.uint8))


def test_a_page_is_read_that_is_named(tmp_path):
    pages = [Image.fromarray(np.full((4, 5), value, np.uint8)) for value in (10, 20, 30)]
    path = tmp_path / "a.tif"
    pages[0].save(path, save_all=True, append_images=pages[1:])
    with pytest.raises(
        UnreadableImageError, match="it has 3 pages, and nobody knows which is the picture: name it, --p"
    ):
        read_picture(path)
    assert [np.asarray(read_picture(path, page=page)).max() for page in (1, 2, 3)] == [10, 20, 30]
    with pytest.raises(UnreadableImageError, match="it has 3 pages, and page 4 is asked for"):
        read_picture(path, page=4)
    pages[0].save(path)
    assert np.asarray(read_picture(path, page=1)).max() == 10
    small = pages[1].resize((2, 2))
    small.encoderinfo = {"tiffinfo": {254: 1}}  # a smaller copy of the first page, as of Photoshop
    pages[0].save(path, save_all=True, append_images=[small])
    if Image.open(path).n_frames == 2:
        assert np.asarray(read_picture(path)).shape == (4, 5)


def test_a_tiff_of_many_channels_says_so(tmp_path):
    many = np.zeros((4, 5, 13), np.uint16)
    with pytest.raises(
        UnreadableImageError, match="Pillow does not read a TIFF of 13 channels of 16 bits, of compressio"
    ):
        read_picture(colour_tiff(tmp_path / "a.tif", many))
    images = Images(tmp_path, lambda picture: torch.zeros(1, 2, 2))
    with pytest.raises(
        ValueError, match=r"none of the 1 images in .* can be read: a\.tif \(Pillow does not read a TIFF o"
    ):
        images.first()
