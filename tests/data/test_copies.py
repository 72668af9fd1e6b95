"""Copies of photos: found by their pictures and names; photos that are merely alike are none."""

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy.fft import dctn

from pytorch_grad_cam_pcasvm.data.copies import (
    find_copies,
    find_near,
    hash_picture,
    join_pairs,
    parse_hashes,
    read_hashes,
    separate_alike,
    write_hashes,
)


def draw(seed, size=(160, 120)):
    """Return a photo with details of all sizes."""
    random, width, height = np.random.default_rng(seed), *size
    waves = random.normal(size=(height, width, 3)) / (1 + np.add.outer(np.arange(height), np.arange(width)))[..., None]
    pixels = dctn(waves, axes=(0, 1), norm="ortho")
    low, high = np.percentile(pixels, (1, 99))
    return Image.fromarray((255 * np.clip((pixels - low) / (high - low), 0, 1)).astype(np.uint8))


def group(folder, photos):
    """Return which of the photos are copies, by their names, having saved them."""
    for name, photo in photos.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        photo.save(folder / name)
    paths = sorted(folder / name for name in photos)
    hashes, bad = read_hashes(paths)
    assert not bad
    return [[paths[row].relative_to(folder).as_posix() for row in own] for own in find_copies(paths, hashes)]


def save_again(photo):
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=40)
    return Image.open(file).convert("RGB")


@pytest.mark.parametrize("turn", [None, *Image.Transpose], ids=str)
@pytest.mark.parametrize(
    "change",
    [save_again, lambda photo: photo.resize((71, 95)), lambda photo: ImageEnhance.Brightness(photo).enhance(0.8)],
)
def test_a_photo_that_is_turned_and_saved_again_is_a_copy(tmp_path, turn, change):
    photo = draw(0)
    other = change(photo if turn is None else photo.transpose(turn))
    assert group(tmp_path, {"a/x.png": photo, "b/y.jpg": other, "a/z.png": draw(1)}) == [["a/x.png", "b/y.jpg"]]


def test_bits_of_a_hash_are_the_signs_of_waves_and_turned_ones_have_them_elsewhere(tmp_path):
    photo = draw(2, (64, 64)).convert("L")
    signs = dctn(np.asarray(photo, float), norm="ortho")[:16, :16] > 0
    signs[0, 0] = False
    own = hash_picture(photo, tmp_path)
    assert (np.unpackbits(own).reshape(16, 16) == signs).all()
    for turn in Image.Transpose:
        assert find_near(own[None], hash_picture(photo.transpose(turn), tmp_path)[None], most=3)[0].tolist() == [[0, 0]]
    pairs, far = find_near(np.stack([own, hash_picture(draw(3), tmp_path), own ^ np.array([7] + [0] * 31, np.uint8)]))
    assert (pairs.tolist(), far.tolist()) == ([[0, 2]], [3.0])


@pytest.mark.parametrize(
    "names",
    [
        ("17_jpg.rf.0a1b2c3d4e.png", "17_jpg.rf.9f8e7d6c5b.png", "17_jpg.rf.00000000ff.png"),
        ("17.png", "17_aug1.png", "17_aug2.png"),
        ("17_crop1.png", "17_crop2.png", "17_crop_3.png"),
        ("x.png", "copy of x.png", "x - Copy (2).png"),
        ("dog-7.png", "dog-7_rot15.png", "dog-7 hflip.png"),
        ("crop1_x.png", "crop2_x.png", "x.png"),
    ],
)
def test_names_say_which_photos_are_parts_of_one(tmp_path, names):
    photos = {name: draw(number) for number, name in enumerate(names)}  # pictures as different as crops are
    others = {f"other{number}.png": draw(10 + number) for number in range(5)}
    assert group(tmp_path, photos | others) == [sorted(names)]


@pytest.mark.parametrize(
    "form", ["IMG_{:04}.png", "good_{:03}.png", "{}.png", "part ({}).png", "crop_{}.png", "wall_crop{}.png"]
)
def test_photos_that_are_merely_numbered_are_no_copies(tmp_path, form):
    assert group(tmp_path, {f"good/{form.format(number)}": draw(number) for number in range(12)}) == []


def test_a_beginning_and_numbers_are_confirmed_by_the_pictures(tmp_path):
    photos = {}
    for number in range(3):
        photo = draw(number)
        copies = photo, ImageOps.mirror(photo), photo.rotate(20)
        photos |= {f"a/{number}_{place}.png": copy for place, copy in enumerate(copies)}
        photos |= {f"b/{number}_{place}.png": draw(10 + 3 * number + place) for place in range(3)}
    assert group(tmp_path, photos) == [[f"a/{number}_{place}.png" for place in range(3)] for number in range(3)]


def test_numbers_are_those_of_copies_where_names_and_pictures_of_several_agree(tmp_path):
    photos = {}
    for number in range(8):
        photo = draw(number)
        copies = photo, ImageOps.flip(photo), photo.rotate(20), photo.crop((50, 40, 160, 120))  # two are alike
        photos |= {f"a/{number}_{place}.png": copy for place, copy in enumerate(copies)}
        photos |= {f"b/{number}_{place}.png": draw(10 + 4 * number + place) for place in range(4)}
    photos["b/0_1.png"] = ImageOps.flip(photos["b/0_0.png"])  # one of four says nothing of the others
    photos |= {f"a/series_{number}.png": draw(100 + number) for number in range(9)}  # a tenth of which is alike
    photos["a/series_9.png"] = ImageOps.flip(photos["a/series_0.png"])
    found = group(tmp_path, photos)
    assert found == [
        *([f"a/{number}_{place}.png" for place in range(4)] for number in range(8)),
        ["a/series_0.png", "a/series_9.png"],
        ["b/0_0.png", "b/0_1.png"],
    ]


def test_photos_of_one_scene_are_no_copies(tmp_path):
    """As in inspection: one light and one part, with other grain and faults."""
    random = np.random.default_rng(0)
    scene = 120 + 60 * np.exp(-np.hypot(*np.mgrid[-1:1:120j, -1:1:160j]))
    photos = {}
    for number in range(12):
        pixels = scene + random.normal(0, 6, scene.shape)
        pixels[20 + 5 * number, 30:100] -= 40  # a scratch
        photos[f"{number}.png"] = Image.fromarray(pixels.astype(np.uint8))
    photos |= {f"black{number}.png": Image.new("L", (90 + number, 90)) for number in range(3)}
    assert group(tmp_path, photos) == []


def test_one_file_twice_is_a_copy_whatever_it_shows(tmp_path):
    photos = {f"{name}.png": Image.new("RGB", (40, 40), "grey") for name in "ab"}
    assert group(tmp_path, photos) == [["a.png", "b.png"]]


def test_pictures_that_cannot_be_read_have_the_reason_of_the_reader(tmp_path):
    for name in ("a.jpg", "b.png"):
        (tmp_path / name).write_bytes(b"no photo")
    draw(0).save(tmp_path / "c.jpg")
    (tmp_path / "d.jpg").write_bytes((tmp_path / "c.jpg").read_bytes()[:2000])
    _, bad = read_hashes(sorted(tmp_path.iterdir()))
    assert sorted(bad) == [0, 1, 3]
    assert "UnidentifiedImageError" in bad[0]
    assert "truncated" in bad[3]


def test_hashes_survive_a_file_and_old_files_have_none():
    hashes = np.random.default_rng(0).integers(0, 256, (5, 32), np.uint8)
    assert (parse_hashes(write_hashes(hashes)) == hashes).all()
    for text in (None, "", "no base 64!", "AAAA", 7):
        assert parse_hashes(text).shape == (0, 32)


def test_pairs_are_joined():
    assert join_pairs([(3, 4), (1, 2), (2, 5), (4, 3), (5, 6), (6, 1)]) == [[1, 2, 5, 6], [3, 4]]


def draw_scene(folder, count, sigma, seed=0):
    """Write photos of one part under a fixed camera, every other one with a fault, as their paths."""
    random, scene = np.random.default_rng(seed), np.asarray(draw(5, (258, 258)).convert("L"), float)
    for number in range(2 * count):
        y, x = random.integers(0, 3, 2)
        pixels = scene[y : y + 256, x : x + 256] + random.normal(0, sigma, (256, 256))
        if number % 2:
            y, x = random.integers(0, 236, 2)
            pixels[y : y + 20, x : x + 20] -= 60
        path = folder / ("good", "crack")[number % 2] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    return sorted(folder.rglob("*.png"))


@pytest.mark.parametrize("sigma", [4, 8])
@pytest.mark.parametrize("count", [5, 12, 20])
def test_photos_under_a_fixed_camera_are_copies_by_names_and_files_alone(tmp_path, count, sigma):
    paths = draw_scene(tmp_path, count, sigma)
    assert find_near(read_hashes(paths)[0])[0].size  # which small pictures alone take for copies
    hashes, alike = separate_alike(paths, read_hashes(paths)[0])
    assert (alike, find_copies(paths, hashes)) == ([*range(2 * count)], [])
    (tmp_path / "good" / "000_copy.png").write_bytes((tmp_path / "good" / "002.png").read_bytes())  # a copy by both
    paths = sorted(tmp_path.rglob("*.png"))
    found = find_copies(paths, separate_alike(paths, read_hashes(paths)[0])[0])
    assert [[paths[row].name for row in own] for own in found] == [["000.png", "000_copy.png", "002.png"]]


def test_versions_of_a_photo_among_others_are_no_scene(tmp_path):
    for number in range(30):
        draw(number).save(tmp_path / f"{number:02}.png")
    for number, turn in enumerate([*Image.Transpose][:2]):
        draw(0).transpose(turn).save(tmp_path / f"x{number}.png")
    for number in range(9):  # one file, which is no series
        (tmp_path / f"y{number}.png").write_bytes((tmp_path / "07.png").read_bytes())
    paths = sorted(tmp_path.iterdir())
    hashes, alike = separate_alike(paths, read_hashes(paths)[0])
    assert (alike, [len(own) for own in find_copies(paths, hashes)]) == ([], [3, 10])
