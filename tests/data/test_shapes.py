"""Shapes as pixels: polygons, ellipses, lines and run lengths, against what is drawn by hand, and pycocotools."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pytorch_grad_cam_pcasvm.studio.data.drawings import Drawing, Shape
from pytorch_grad_cam_pcasvm.studio.data.polygons import fill_ring, walk_line
from pytorch_grad_cam_pcasvm.studio.data.run_lengths import (
    compress_counts,
    draw_counts,
    expand_counts,
    find_counts,
)
from pytorch_grad_cam_pcasvm.studio.data.shapes import Canvas, Ellipse, Polyline, Rings, Runs, Stored

SQUARE = [(2, 2), (12, 2), (12, 12), (2, 12)]


def draw(form, width=20, height=16, **scale):
    """Return the pixels of a form on a whole photo."""
    patch = form.draw(Canvas(width, height, **scale))
    pixels = np.zeros((height, width), bool)
    rows, columns = patch.inside.shape
    pixels[patch.top : patch.top + rows, patch.left : patch.left + columns] = patch.inside
    return pixels


def shown(pixels):
    return ["".join(".#"[one] for one in row) for row in pixels.astype(int)]


def filled(ring, width, height):
    return draw(Rings([np.array(ring, float)]), width, height)


def centres_inside(ring, width, height):
    """Return which centres of pixels are inside, one after the other, by the crossings of a ray to the right."""
    pixels = np.zeros((height, width), bool)
    for row in range(height):
        for column in range(width):
            x, y, inside = column + 0.5, row + 0.5, False
            for (x0, y0), (x1, y1) in zip(ring, [*ring[1:], ring[0]], strict=True):
                inside ^= bool((y0 > y) != (y1 > y) and x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
            pixels[row, column] = inside
    return pixels


def border(pixels):
    """Return how many pixels have a neighbour on the other side."""
    near = np.pad(pixels, 1, mode="edge")
    sides = near[:-2, 1:-1], near[2:, 1:-1], near[1:-1, :-2], near[1:-1, 2:]
    return int(np.logical_or.reduce([side != pixels for side in sides]).sum())


def test_a_square_of_area_100_has_100_pixels():
    expected = np.zeros((16, 20), bool)
    expected[2:12, 2:12] = True
    for ring in (SQUARE, SQUARE[::-1], SQUARE[2:] + SQUARE[:2]):
        assert np.array_equal(filled(ring, 20, 16), expected)
    assert np.array_equal(draw(Rings.from_edges(2, 2, 12, 12)), expected)


def test_polygons_are_their_pixels_centres():
    assert shown(filled([(0, 0), (6, 0), (0, 6)], 7, 6)) == [
        "#####..",
        "####...",
        "###....",
        "##.....",
        "#......",
        ".......",
    ]
    bow = [(0, 0), (8, 4), (8, 0), (0, 4)]  # crosses itself
    assert shown(filled(bow, 8, 4)) == ["#......#", "###..###", "###..###", "#......#"]
    bridge = [(0, 0), (9, 0), (9, 9), (0, 9), (0, 0), (3, 3), (3, 6), (6, 6), (6, 3), (3, 3)]  # a hole, as COCO has it
    assert filled(bridge, 9, 9).sum() == 81 - 9
    star = [(10, 0), (16, 19), (0, 7), (20, 7), (4, 19)]
    assert not filled(star, 20, 20)[10, 10]  # even-odd: its middle is outside


def test_polygons_are_close_to_exact_centres_and_clipped_to_the_photo():
    random, differ, edge = np.random.default_rng(0), 0, 0
    for _ in range(12):
        ring = random.uniform(-8, 40, (random.integers(3, 8), 2)).tolist()
        pixels, exact = filled(ring, 34, 29), centres_inside(ring, 34, 29)
        differ, edge = differ + (pixels != exact).sum(), edge + border(exact)
    assert differ < 0.06 * edge  # corners are rounded to fifths of a pixel
    huge = fill_ring(np.array([(-1e9, -1e9), (1e9, -1e9), (1e9, 1e9), (-1e9, 1e9)]), 5, 4)
    assert huge[2].shape == (4, 5)
    assert huge[2].all()


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pycocotools with numpy 2
def test_polygons_and_run_lengths_are_those_of_pycocotools():
    masks = pytest.importorskip("pycocotools.mask")
    random = np.random.default_rng(0)
    for spread in (3, 60, 900):
        for _ in range(200):
            width, height = random.integers(1, 90, 2).tolist()
            ring = random.normal(40, spread, (random.integers(3, 12), 2)).round(random.integers(0, 4))
            coded = masks.merge(masks.frPyObjects([ring.ravel().tolist()], height, width))
            theirs = masks.decode(coded).astype(bool)
            top, left, inside = fill_ring(ring, width, height)
            ours = np.zeros((height, width), bool)
            ours[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
            assert np.array_equal(ours, theirs)
            counts = find_counts(theirs)
            assert compress_counts(counts).encode() == coded["counts"]
            assert expand_counts(coded["counts"].decode()) == counts
            assert np.array_equal(draw_counts(counts, width, height), theirs)


def test_run_lengths_go_down_columns_or_along_rows_and_begin_with_zeros():
    inside = np.array([[0, 1, 0], [0, 1, 1]], bool)
    assert find_counts(inside) == [2, 2, 1, 1]  # 0 0 | 1 1 | 0 1
    assert find_counts(inside, by_column=False) == [1, 1, 2, 2]  # 0 1 0 | 0 1 1
    assert find_counts(~inside) == [0, 2, 2, 1, 1]
    assert find_counts(np.zeros((2, 3), bool)) == [6]
    for by_column in (True, False):
        for mask in (inside, ~inside, inside | True):
            counts = find_counts(mask, by_column=by_column)
            assert np.array_equal(draw_counts(counts, 3, 2, by_column=by_column), mask)
    assert np.array_equal(draw_counts([2, 1], 3, 2), [[0, 1, 0], [0, 0, 0]])


def test_compressed_run_lengths_are_numbers_of_five_bits():
    """By hand: 6 bits a character, from "0" on; the fourth number and on are less the one two before."""
    assert compress_counts([6]) == "6"
    assert compress_counts([5, 20, 3, 20, 2]) == "5d030O"  # 20 = 20 + 0 * 32, more; 20 - 20 = 0; 2 - 3 = -1
    assert expand_counts("5d030O") == [5, 20, 3, 20, 2]
    random = np.random.default_rng(0)
    for size in (1, 40, 3000, 1 << 22):
        counts = random.integers(0, size, 40).tolist()
        assert expand_counts(compress_counts(counts)) == counts


@pytest.mark.parametrize(("text", "reason"), [
    ("5d", "end within a number"), ("5 0", "with ' '"), ("5é", "with 'é'"), ("O", "a run of -1 pixels"),
    ("oooooooooooo0", "with 'o'"), ("ooooooO", "a run of"),
])  # fmt: skip
def test_compressed_run_lengths_that_cannot_be_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        expand_counts(text)


@pytest.mark.parametrize("counts", [[4, 3], [1 << 80, 1], [3, -1, 2]])
def test_runs_longer_than_a_mask_are_refused(counts):
    with pytest.raises(ValueError, match=r"has runs? of|has a run of"):
        draw_counts(counts, 3, 2)


def test_thin_shapes_mark_the_pixels_that_they_pass():
    speck = Rings([np.array([(3.1, 4.1), (3.3, 4.1), (3.2, 4.3)])])
    assert np.argwhere(draw(speck)).tolist() == [[4, 3]]
    assert speck.draw(Canvas(20, 16)).is_thin
    hair = draw(Rings([np.array([(1, 5.9), (15, 6.0), (15, 6.1)])]))
    assert hair[5:7].any(0)[1:15].all()
    assert hair.sum() < 32
    two = Rings([np.array(SQUARE, float), np.array([(17.1, 1.1), (17.2, 1.1), (17.2, 1.2)])])
    assert draw(two).sum() == 101  # a union
    assert two.draw(Canvas(20, 16)).is_thin
    assert not Rings.from_edges(2, 2, 12, 12).draw(Canvas(20, 16)).is_thin
    assert np.argwhere(draw(Ellipse((6.2, 3.1), (0.1, 0.1)))).tolist() == [[3, 6]]
    assert np.argwhere(draw(Ellipse((6.2, 3.1), (0, 2)))).tolist() == [[row, 6] for row in (1, 2, 3, 4, 5)]
    assert np.argwhere(draw(Rings.from_edges(20, 16, 20, 16))).tolist() == [[15, 19]]  # the very corner


def test_ellipses_are_their_pixels_centres():
    y, x = np.mgrid[:16, :20] + 0.5
    assert np.array_equal(draw(Ellipse((9, 8), (6, 3))), ((x - 9) / 6) ** 2 + ((y - 8) / 3) ** 2 <= 1)
    assert np.array_equal(draw(Ellipse((9, 8), (6, 3), 90)), ((x - 9) / 3) ** 2 + ((y - 8) / 6) ** 2 <= 1)
    down = draw(Ellipse((9, 8), (7, 1), 45))  # clockwise: from the upper left to the lower right
    assert down[5, 6]
    assert down[10, 11]
    assert not down[10, 6]
    assert not down[5, 11]
    assert draw(Ellipse((0, 0), (1e8, 1e8))).all()


def test_a_turned_box_is_turned_clockwise_around_its_centre():
    assert np.array_equal(draw(Rings.from_edges(4, 6, 14, 10, 90)), draw(Rings.from_edges(7, 3, 11, 13)))
    turned = draw(Rings.from_edges(2, 7, 18, 9, 45))
    assert turned[4, 6]
    assert turned[11, 13]
    assert not turned[11, 6]


def test_lines_and_points_have_the_pixels_that_they_pass():
    line = draw(Polyline(np.array([(1.5, 1.5), (6.5, 1.5), (6.5, 4.5)])), 8, 6)
    assert shown(line) == ["........", ".######.", "......#.", "......#.", "......#.", "........"]
    points = draw(Polyline(np.array([(1.5, 1.5), (6.5, 4.5)]), is_joined=False), 8, 6)
    assert np.argwhere(points).tolist() == [[1, 1], [4, 6]]
    assert np.array_equal(walk_line(np.array([(-1e9, -1e9), (1e9, 1e9)]), 4, 4)[2], np.eye(4))
    assert not draw(Polyline(np.array([(-5.0, -5.0), (-1.0, 3.0)]))).any()


def test_masks_of_a_part_lie_in_it():
    part = np.array([[1, 0, 1], [0, 1, 1]], bool)
    expected = np.zeros((16, 20), bool)
    expected[4:6, 7:10] = part
    runs = Runs(find_counts(part, by_column=False), (3, 2), (7, 4), by_column=False)
    data = io.BytesIO()
    Image.fromarray(part).save(data, "PNG")
    stored = Stored(Path("a.json"), data.getvalue(), (7, 4))
    for form in (runs, stored):
        assert np.array_equal(draw(form), expected)
        doubled = draw(form, 40, 32, x=2.0, y=2.0)
        assert np.array_equal(doubled, expected.repeat(2, 0).repeat(2, 1))
        with pytest.raises(ValueError, match="a mask of 3 x 2 pixels on a photo of 1 x 1"):
            draw(form, 1, 1)
    half = Runs(find_counts(np.ones((6, 6), bool)), (6, 6), (3, 3))  # from 1.5 to 4.5
    assert np.argwhere(draw(half, 10, 8, x=0.5, y=0.5)).min(0).tolist() == [1, 1]
    assert draw(half, 10, 8, x=0.5, y=0.5).sum() == 9
    assert draw(Runs(half.counts, (6, 6), (4, 4)), 4, 3, x=0.2, y=0.2).sum() == 1  # the centres of 2.5 and 7.5
    beyond = Runs(find_counts(part), (3, 2), (-1, 15))
    assert np.argwhere(draw(beyond)).tolist() == [[15, 1]]
    tiny = np.zeros((64, 64), bool)
    tiny[33, 33] = True  # which no pixel of the small photo is nearest to
    small = draw(Runs(find_counts(tiny), (64, 64)), 8, 8, x=1 / 8, y=1 / 8)
    assert np.argwhere(small).tolist() == [[4, 4]]


def test_shapes_are_drawn_in_the_size_of_the_photo_and_the_smaller_one_wins():
    large, small = Rings.from_edges(0, 0, 8, 8), Rings.from_edges(2, 2, 4, 4)
    shapes = [Shape("b", "shape 1", small), Shape("a", "shape 2", large), Shape("c", "shape 3", small)]
    pixels, thin = Drawing(Path("x.json"), ["x"], shapes, (10, 10)).draw({"a": 1, "b": 2, "c": 3}, (20, 20))
    expected = np.zeros((20, 20), int)
    expected[:16, :16], expected[4:8, 4:8] = 1, 3  # of equal ones the later
    assert np.array_equal(pixels, expected)
    assert not thin


@pytest.mark.parametrize(("form", "size", "reason"), [
    (Rings.from_edges(30, 0, 40, 9), None, "shape 1 in x.json, 'a' on x, has no pixels on the photo of 20 x 16"),
    (Ellipse((-9, -9), (1, 1)), None, "has no pixels on the photo"),
    (Runs([64], (8, 8)), None, "has no pixels on the photo"),
    (Runs([0, 10**9], (10**5, 10**4)), None, "has a mask of 100000 x 10000 pixels on a photo of 20 x 16: export"),
    (Stored(Path("x"), b"no picture", (0, 0)), None, "has a mask that cannot be read"),
    (Runs([0, 400], None), None, "has runs of 400 pixels, but 20 x 16 are 320: export the annotations anew"),
    (Rings.from_edges(0, 0, 9, 9), (10**7, 10**7), "says that x has 10000000 x 10000000 pixels, more than a photo has"),
])  # fmt: skip
def test_shapes_without_pixels_and_sizes_of_no_photo_are_refused(form, size, reason):
    drawing = Drawing(Path("x.json"), ["x"], [Shape("a", "shape 1", form)], size)
    with pytest.raises(ValueError, match=reason):
        drawing.draw({"a": 1}, (20, 16))
