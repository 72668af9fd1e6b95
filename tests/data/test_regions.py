"""Regions for labelling tools: their outlines have the same pixels again, by our readers and by hand."""

import doctest
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from scipy import ndimage

from pytorch_grad_cam_pcasvm import data
from pytorch_grad_cam_pcasvm.studio.data.contours import outline_region, split_regions, trace_rings
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder
from pytorch_grad_cam_pcasvm.studio.data.region_files import TOOLS, RegionFiles, find_regions, write_regions

NAMES = {1: "crack", 2: "dent"}


def read(lines):
    return np.array([[".#".index(one) for one in line] for line in lines.split()])


ODD = {
    "one pixel": read("... .#. ..."),
    "a whole photo": read("#### ####"),
    "corners that touch": read("##.. ##.. ..## ..##"),
    "the other corners": read("..## ..## ##.. ##.."),
    "a checkerboard": np.indices((7, 9)).sum(0) % 2,
    "a hole": read("##### #...# #.#.# #...# #####"),
    "holes that touch": read("##### #.#.# ##.## #.#.# #####"),
    "a hole at a corner of the rim": read("###. #.#. ##.# ####"),
    "holes beside each other": read("####### #.#.#.# ####### #.#.#.# #######"),
    "a ring in a ring": read("####### #.....# #.###.# #.#.#.# #.###.# #.....# #######"),
    "at the rim": read("#..# .... #.##"),
    "a line": read("...... ###### ......"),
}


def make_noise(seed):
    """Return numbers of two classes, of many regions and holes."""
    rng = np.random.default_rng(seed)
    smooth = ndimage.uniform_filter(rng.random((rng.integers(8, 40), rng.integers(8, 40))), int(rng.integers(1, 4)))
    return np.digitize(smooth, np.quantile(smooth, [0.45, 0.8]))


CASES = ODD | {f"noise {seed}": make_noise(seed) for seed in range(12)}


def centres_inside(ring, width, height):
    """Return the pixels whose centres have an odd number of edges of a ring on their right."""
    inside = np.zeros((height, width), int)
    for (x, y), (_, end) in zip(ring, np.roll(ring, -1, 0), strict=True):
        rows = (np.arange(height) + 0.5 > min(y, end)) & (np.arange(height) + 0.5 < max(y, end))
        inside += rows[:, None] & (np.arange(width) + 0.5 < x)
    return inside % 2 == 1


def flood(inside):
    """Return the connected parts of a mask, each as a set of pixels."""
    left, parts = {(int(y), int(x)) for y, x in np.argwhere(inside)}, []
    while left:
        part, waiting = set(), [left.pop()]
        while waiting:
            y, x = waiting.pop()
            part.add((y, x))
            near = {(y + down, x + along) for down in (-1, 0, 1) for along in (-1, 0, 1)} & left
            left -= near
            waiting += near
        parts.append(part)
    return parts


@pytest.mark.parametrize("case", CASES)
def test_an_outline_has_the_pixels_of_its_region(case):
    inside = CASES[case] > 0
    height, width = inside.shape
    found = []
    for top, left, part in split_regions(inside):
        ring = outline_region(part) + (left, top)  # noqa: RUF005
        drawn = centres_inside(ring, width, height)
        found.append({(int(y), int(x)) for y, x in np.argwhere(drawn)})
        steps = np.roll(ring, -1, 0) - ring
        assert ((steps == 0).sum(1) == 1).all()  # along edges of pixels
        holes = ndimage.label(np.pad(~part, 1, constant_values=True))[1] - 1
        assert len(trace_rings(part)) == 1 + holes
        assert holes or (steps[:, 0] == 0)[::2].all() != (steps[:, 0] == 0)[1::2].all()  # no corner that is none
    assert sorted(map(sorted, found)) == sorted(map(sorted, flood(inside)))


def read_again(folder, file, arrays, **options):
    """Return the masks of photos, as ``--masks`` reads them."""
    for name, array in arrays.items():
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", array.shape[::-1]).save(path)
    return MaskFolder(file, [*arrays], [folder / "photos" / name for name in arrays], **options)


@pytest.mark.parametrize("tool", TOOLS)
def test_regions_that_are_read_again_are_the_same_pixels(tmp_path, tool):
    arrays = {f"{('a', 'b/c')[place % 2]}/{place}.png": CASES[case] for place, case in enumerate(CASES)}
    arrays["b/none.png"] = np.zeros((5, 6), int)
    file = data.write_regions(arrays, tmp_path / "out", tool, names=NAMES, photos=tmp_path / "photos")
    masks = read_again(tmp_path, file, arrays)
    assert masks.titles == NAMES
    assert masks.unknown == []
    for row, array in enumerate(arrays.values()):
        np.testing.assert_array_equal(masks.of(row, array.shape, None), array)
    said = masks.describe()
    assert said.startswith(f"masks: {len(arrays)} of {len(arrays)} photos have one (")
    assert "on 1 of them there is nothing" in said
    assert "boxes" not in said


@pytest.mark.parametrize("tool", TOOLS)
def test_long_outlines_are_read_again_the_same(tmp_path, tool):
    array = np.zeros((40, 5999), int)
    array[3:, ::2] = array[3] = 1  # a comb, whose line is longer than what is read to know a format
    array[0, -1] = array[0, 0] = 2
    file = write_regions({"0.png": array}, tmp_path / "out", tool, names=NAMES)
    np.testing.assert_array_equal(read_again(tmp_path, file, {"0.png": array}).of(0, array.shape, None), array)


def test_what_a_file_of_coco_says(tmp_path):
    numbers, values = np.zeros((6, 9), int), np.full((6, 9), 9.0)
    numbers[1:4, 2:5], numbers[5, 8], numbers[0, 0] = 1, 1, 2
    values[numbers == 1], values[2, 3], values[5, 8], values[0, 0] = 0.1, 1.23456789, np.nan, -2
    arrays = {"a/0.png": numbers, "a/1.png": 0 * numbers}
    scores = {"a/0.png": values, "a/1.png": values}
    file = write_regions(arrays, tmp_path, names=NAMES | {3: "hair"}, values=scores)
    assert file == tmp_path / "regions.json"
    text = json.loads(file.read_text())
    assert "suggestions" in text["info"]["description"]
    assert text["images"] == [
        {"id": 1, "file_name": "a/0.png", "width": 9, "height": 6},
        {"id": 2, "file_name": "a/1.png", "width": 9, "height": 6},
    ]
    assert text["categories"] == [{"id": n, "name": name} for n, name in enumerate(("crack", "dent", "hair"), 1)]
    square, one, corner = text["annotations"]
    assert square == {
        "id": 1, "image_id": 1, "category_id": 1, "segmentation": [[2, 1, 5, 1, 5, 4, 2, 4]], "bbox": [2, 1, 3, 3],
        "area": 9, "iscrowd": 0, "score": 1.23457,
    }  # fmt: skip
    assert (one["bbox"], one["area"], one["score"]) == ([8, 5, 1, 1], 1, 0)
    assert (corner["category_id"], corner["bbox"], corner["score"]) == (2, [0, 0, 1, 1], -2)


def test_what_files_of_labelme_say(tmp_path):
    numbers = np.zeros((6, 9), bool)
    numbers[1:4, 2:5] = True
    arrays = {"a/0.png": numbers, "1.png": ~numbers & False}
    values = {name: np.full((6, 9), 0.25) for name in arrays}
    folder = write_regions(arrays, tmp_path / "out", "labelme", values=values, photos=tmp_path / "photos")
    text = json.loads((folder / "a" / "0.json").read_text())
    assert text == {
        "version": "5.5.0", "flags": {}, "imageData": None, "imageHeight": 6, "imageWidth": 9,
        "imagePath": "../../../photos/a/0.png", "shapes": [{
            "label": "region", "points": [[2, 1], [5, 1], [5, 4], [2, 4]], "group_id": None, "flags": {},
            "description": "score 0.25, area 9", "shape_type": "polygon",
        }],
    }  # fmt: skip
    assert (folder / "a" / text["imagePath"]).resolve() == (tmp_path / "photos" / "a" / "0.png").resolve()
    assert json.loads((folder / "1.json").read_text())["shapes"] == []


@pytest.mark.parametrize("name", ["crack", "a: b # c", "it's", 'an "edge"', "Riß", "no", "5"])
def test_names_of_yolos_classes_are_read_again(tmp_path, name):
    numbers = np.ones((4, 4), int)
    folder = write_regions({"0.png": numbers}, tmp_path / "out", "yolo", names={4: name, 1: "other"})
    said = yaml.safe_load((tmp_path / "out" / "data.yaml").read_text(encoding="utf-8"))
    assert said == {"names": {0: name, 1: "other"}}
    assert (folder / "0.txt").read_text() == "1 0 0 1 0 1 1 0 1\n"
    drawn = write_regions({"0.png": 4 * numbers}, tmp_path / "out", "yolo", names={4: name, 1: "other"})
    assert read_again(tmp_path, drawn, {"0.png": numbers}).titles == {1: name}


@pytest.mark.parametrize("tool", TOOLS)
def test_photos_that_differ_by_their_ending_have_files_of_their_own(tmp_path, tool):
    one, other = np.zeros((2, 5, 6), int)
    one[1:3, 1:3], other[0, 4] = 1, 2
    arrays = {"a/b/c/d/0.png": one, "a/b/c/d/0.jpg": other}  # far below the names of YOLO's classes
    file = write_regions(arrays, tmp_path / "out", tool, names=NAMES, photos=tmp_path / "photos")
    masks = read_again(tmp_path, file, arrays)
    for row, array in enumerate(arrays.values()):
        np.testing.assert_array_equal(masks.of(row, array.shape, None), array)
    assert masks.titles == NAMES


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"regions are written for coco, labelme, yolo, got 'voc'"):
        RegionFiles(tmp_path, "voc")
    with pytest.raises(ValueError, match=r"of 0\.png have the shape \(2, 3, 1\): \(H, W\) is expected"):
        write_regions({"0.png": np.zeros((2, 3, 1))}, tmp_path)
    with pytest.raises(ValueError, match=r"the shape \(2, 3\), and its values \(3, 2\)"):
        write_regions({"0.png": np.zeros((2, 3))}, tmp_path, values={"0.png": np.zeros((3, 2))})
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_regions({"0.png": np.zeros((2, 3))}, tmp_path / "file")


def test_without_names_or_values_there_are_none():
    (region,) = find_regions(np.ones((2, 3), bool), {1: "a"})
    assert (region.score, region.area, region.box) == (None, 6, [0, 0, 3, 2])
    assert find_regions(np.ones((2, 3), int), {2: "a"}) == []


def test_the_example_of_regions_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = doctest.DocTestFinder(exclude_empty=True).find(write_regions, globs={"np": np})
    example.globs["write_regions"] = write_regions
    assert doctest.DocTestRunner().run(example).failed == 0
    assert Path("suggestions/regions.json").is_file()
