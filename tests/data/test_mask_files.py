"""Masks as annotation tools write them: what is inside, which classes there are, and what is refused."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from pytorch_grad_cam_pcasvm.studio.cli.training import PatchOptions
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder

H, W = 80, 120
TRUE = np.zeros((H, W), np.uint8)
TRUE[10:40, 30:70] = 1
TRUE[50:60, 80:100] = 1
TWO = TRUE.copy()
TWO[50:60, 80:100] = 2
RED, GREEN, BORDER = (128, 0, 0), (0, 64, 0), (224, 224, 192)
_NUMBERS = np.random.default_rng(0).permutation(96).reshape(8, 12).astype(np.uint16)
INSTANCES = np.kron(_NUMBERS, np.ones((10, 10), np.uint16))  # of which every square is one
INSTANCES[:10] = INSTANCES[:, :20] = 0
NOISE = np.random.default_rng(0).integers(0, 256, (H, W, 3), np.uint8)


def grey(numbers):
    return Image.fromarray(np.asarray(numbers))


def palette(index, *colours):
    picture = Image.fromarray(index.astype(np.uint8), "P")
    picture.putpalette([number for colour in colours for number in colour])
    return picture


def coloured(numbers, *colours):
    return Image.fromarray(np.array([(0, 0, 0), *colours], np.uint8)[numbers])


def layers(picture, alpha):
    picture = picture.convert("RGB")
    picture.putalpha(Image.fromarray(np.asarray(alpha, np.uint8)))
    return picture


def smooth(colour, shape="RGB"):
    large = Image.new(shape, (4 * W, 4 * H))
    ImageDraw.Draw(large).ellipse((60, 40, 300, 260), fill=colour)
    return large.resize((W, H), Image.Resampling.BOX)


def blurred(radius):
    return grey(TRUE * 255).filter(ImageFilter.GaussianBlur(radius))


def draw_masks(folder, *files, size=(W, H), **options):
    """Return the masks of pictures named as files are: each is (path, picture), or a picture alone."""
    files = [file if isinstance(file, tuple) else (f"{n}.png", file) for n, file in enumerate(files)]
    names = [f"{n}.png" for n in range(len(files))] if "names" not in options else options.pop("names")
    for name in names:
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(path)
    for name, picture in files:
        path = folder / "masks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, **({"quality": 90} if path.suffix == ".jpg" else {}))
    options.setdefault("normal", "photos")  # on which there is nothing without a mask
    return MaskFolder(folder / "masks", names, [folder / "photos" / name for name in names], **options)


def seen(masks, row=0):
    numbers = masks.of(row, (H, W), None)
    assert numbers.dtype == np.uint8
    return numbers


WHITE = Image.new("RGB", (W, H), "white")


@pytest.mark.parametrize("mask", [
    layers(WHITE, TRUE * 255), layers(Image.new("RGB", (W, H)), TRUE * 255),
    layers(Image.new("RGB", (W, H), "red"), TRUE * 90),
    layers(coloured(TRUE, (255, 0, 0)), TRUE * 255),  # red on nothing
    layers(coloured(TRUE, (255, 0, 0)), TRUE * 128), layers(coloured(TRUE, (255, 255, 255)), TRUE * 255),
    layers(coloured(TRUE, (255, 255, 255)), TRUE * 0 + 255), layers(coloured(TRUE, (0, 0, 200)), TRUE * 0 + 255),
    grey(np.dstack([TRUE * 0 + 200, TRUE * 255])), grey(np.dstack([TRUE * 255, TRUE * 0 + 255])),
    palette(TRUE, (0, 0, 0), (255, 255, 255)), palette(1 - TRUE, (255, 255, 255), (0, 0, 0)),
    palette(TRUE * 7, *[(0, 0, 0)] * 7, (255, 255, 255)),
    palette(TRUE, (0, 0, 0), RED), palette(TRUE, (255, 255, 255), RED),
    palette(TRUE * 255, *[(k, k, k) for k in range(256)]), coloured(TRUE, (0, 0, 255)), coloured(TRUE, (1, 0, 0)),
    coloured(TRUE, (255, 255, 255)),
    *(grey(TRUE.astype(np.uint16) * number) for number in (1, 255, 256, 512, 1001, 65535)),
    grey(TRUE * 128), grey(TRUE == 1), grey(TRUE * 17),
], ids=lambda mask: mask.mode)  # fmt: skip
@pytest.mark.parametrize("only_inside", [False, True])
def test_what_is_inside_is_inside(tmp_path, mask, only_inside):
    masks = draw_masks(tmp_path, mask, only_inside=only_inside)
    assert masks.values == [1]
    assert np.array_equal(seen(masks), TRUE)


@pytest.mark.parametrize(("name", "mask"), [
    ("0.tif", grey(TRUE.astype(np.float32))), ("0.tif", grey(TRUE * np.float32(0.5))),
    ("0.tif", grey(TRUE * np.float32(256))),
    ("0.tif", grey(TRUE.astype(np.int32) * 70_000)), ("0.tif", grey(TRUE * 255).convert("1")),
    ("0.jpg", grey(TRUE * 255)), ("0.jpg", grey(TRUE * 128)), ("0.jpg", coloured(TRUE, (255, 255, 255))),
    ("0.webp", coloured(TRUE, (255, 255, 255))), ("0.bmp", coloured(TRUE, RED)),
    ("0.tif", coloured(TRUE, (255, 255, 255)).convert("CMYK")), ("0_GT.png", grey(TRUE * 255)),
    ("0_Mask.png", grey(TRUE)), ("0_seg.png", grey(TRUE)), ("0-label.PNG", grey(TRUE)), ("0/000.png", grey(TRUE)),
])  # fmt: skip
def test_files_of_other_formats_and_names(tmp_path, name, mask):
    masks = draw_masks(tmp_path, (name, mask), names=["0.png"])
    assert masks.count == 1
    assert masks.files == [tmp_path / "masks" / name]
    assert np.array_equal(seen(masks), TRUE)


@pytest.mark.parametrize("mask", [
    grey(TWO), grey(TWO.astype(np.uint16)), palette(TWO, (0, 0, 0), RED, GREEN), coloured(TWO, GREEN, RED),
    layers(coloured(TWO, GREEN, RED), (TWO > 0) * 255), layers(grey(TWO), (TWO > 0) * 255),
    palette(TWO, *[(k, k, k) for k in range(256)]), palette(TWO, (0, 0, 0), (255, 255, 255), RED),
], ids=lambda mask: mask.mode)  # fmt: skip
def test_each_class_keeps_a_number_of_its_own(tmp_path, mask):
    masks = draw_masks(tmp_path, mask)
    assert masks.values == [1, 2]
    assert np.array_equal(seen(masks), TWO)


def test_colours_that_look_alike_in_grey_are_two_classes(tmp_path):
    masks = draw_masks(tmp_path, coloured(TRUE, RED), coloured(TRUE, GREEN), grey(TRUE * 0))
    assert masks.values == [1, 2]
    assert np.array_equal(seen(masks, 0), 2 * TRUE)  # by their hexadecimal numbers
    assert np.array_equal(seen(masks, 1), TRUE)
    assert not seen(masks, 2).any()
    assert PatchOptions(masks=masks).names(None) == ["background", "#004000", "#800000"]


def test_palettes_and_colours_in_one_folder_have_the_same_classes(tmp_path):
    masks = draw_masks(tmp_path, palette(TRUE, (0, 0, 0), RED), coloured(TWO, GREEN, RED))
    assert masks.values == [1, 2]
    assert np.array_equal(seen(masks, 0), 2 * TRUE)
    assert np.array_equal(seen(masks, 1), TWO)


def test_the_borders_of_voc_are_not_labelled_in_colours_either(tmp_path):
    bordered = np.where(TRUE, 1, 0)
    bordered[9, 30:70] = bordered[40, 30:70] = 2
    expected = np.array([0, 1, 255])[bordered]
    colours = draw_masks(tmp_path / "colours", coloured(bordered, RED, BORDER))
    index = draw_masks(tmp_path / "index", palette(np.array([0, 1, 255])[bordered], (0, 0, 0), RED, *[BORDER] * 254))
    for masks in (colours, index):
        assert masks.values == [1, 255]
        assert np.array_equal(seen(masks), expected)
    assert PatchOptions(masks=colours).names(None) == ["background", "#800000"]


@pytest.mark.parametrize(("masks", "reason"), [
    ([layers(Image.fromarray(NOISE), TRUE * 255)], "both the colours and the transparency vary"),
    ([layers(coloured(TRUE, RED), NOISE[..., 0])], "both the colours and the transparency vary"),
    ([layers(coloured((np.arange(W) > 50) * np.ones_like(TRUE) + 1, RED, GREEN), TRUE * 255)], "both the"),
    ([layers(coloured(1 - TRUE, (255, 255, 255)), TRUE * 255)], "both the colours and the transparency vary"),
    ([layers(Image.fromarray(NOISE), TRUE * 0)], "transparent everywhere"),
    ([smooth((255, 0, 0))], r"colours, which are no classes|lies between two other colours"),
    ([smooth((255, 0, 0)).resize((2 * W, 2 * H), 0)], r"colours, which are no classes|lies between two other colours"),
    ([Image.fromarray(NOISE)], "colours, which are no classes"),
    ([palette(np.array([0, 1, 2])[np.clip(np.asarray(blurred(1)) // 86, 0, 2)], (0, 0, 0), (90, 0, 0), (200, 0, 0))],
     "#5A0000 in the masks .* lies between two other colours"),
    ([("0.jpg", coloured(TWO, (250, 0, 0), (0, 250, 0)))], r"0\.jpg has colours, which its format blends"),
    ([("0.jpg", grey(TWO))], "its format changes other numbers"), ([("0.jpg", grey(TRUE))], "its format changes"),
    ([("0.jpg", grey(TWO * 60))], "its format changes other numbers"),
    ([palette(1 - TRUE, RED, (0, 0, 0))], "in which black is number 1"),
    ([palette(1 - TRUE, (250, 250, 250), (5, 5, 5))], "in which black is number 1"),
    ([palette(TRUE, (0, 0, 0), RED), palette(TRUE, (0, 0, 0), GREEN)], "number 1 is #800000 in the palette of"),
    ([grey(TRUE), grey(TRUE * 255)], "white, or not labelled"),
    ([palette(TRUE, (0, 0, 0), RED), grey(TRUE * 255)], "white, or"),
    ([("0.tif", grey(np.where(TRUE, np.float32(np.nan), 0)))], "numbers from nan to nan"),
    ([("0.tif", grey(TRUE * np.float32(-1)))], "numbers from -1"),
    ([("0.tif", grey(TRUE * np.float32(1.5)))], "with fractions"),
    ([grey(TWO.astype(np.uint16) * 256)], "have the numbers 256, 512 besides 0"),
    ([grey(TRUE.astype(np.uint16) * 1001), grey(TRUE.astype(np.uint16) * 1257)], "the numbers 1001, 1257 besides"),
    ([grey(INSTANCES * 37)], "larger than those of classes"),
    ([grey((np.asarray(blurred(4)) / 2.55).astype(np.uint8))], "look like the soft edge of one class"),
    ([coloured(TRUE, RED), grey(TRUE.astype(np.uint16) * 300)], "have colours, but .* has numbers up to 300"),
])  # fmt: skip
def test_what_nobody_can_read_is_refused_by_name(tmp_path, masks, reason):
    found = draw_masks(tmp_path, *masks, names=[f"{n}.png" for n in range(len(masks))])
    with pytest.raises(ValueError, match=reason) as error:
        found.of(0, (H, W), None)
    assert str(tmp_path / "masks") in str(error.value)


def test_soft_edges_have_their_middle_at_half_of_white_in_any_depth(tmp_path):
    shades = np.asarray(blurred(2))
    file = io.BytesIO()
    grey(TRUE * 255).save(file, "JPEG", quality=75)
    masks = draw_masks(tmp_path / "noise", Image.open(file))
    assert np.array_equal(seen(masks), TRUE)
    for n, mask in enumerate((
        grey(shades), grey(shades.astype(np.uint16) * 257), grey(shades / np.float32(255)),
        layers(WHITE, shades), layers(coloured((shades > 0) * 1, (255, 0, 0)), shades),
    )):  # fmt: skip
        masks = draw_masks(tmp_path / str(n), (f"0.{'tif' if mask.mode == 'F' else 'png'}", mask), names=["0.png"])
        assert masks.values == [1]
        assert np.array_equal(seen(masks), shades > 127)


def test_inside_is_all_that_is_wanted(tmp_path):
    loco = draw_masks(
        tmp_path / "loco", ("0/000.png", grey(TRUE * 236)), ("0/001.png", grey((TWO == 2) * np.uint8(255))),
        ("1/000.png", grey(TRUE * 240)), names=["0.png", "1.png", "2.png"], only_inside=True,
    )  # fmt: skip
    assert loco.count == 2
    for row, expected in enumerate((TRUE, TRUE, 0 * TRUE)):
        assert np.array_equal(seen(loco, row), expected)
    merged = np.array([0, 236, 255], np.uint8)[TWO]
    for n, mask in enumerate((grey(merged), grey(INSTANCES * 37), coloured(TWO, RED, GREEN))):
        inside = np.asarray(mask).reshape(H, W, -1).any(-1)
        assert np.array_equal(seen(draw_masks(tmp_path / str(n), mask, only_inside=True)) > 0, inside)
    with pytest.raises(ValueError, match="which may be classes, or all mean one"):
        seen(draw_masks(tmp_path / "refused", grey(merged)))
    with pytest.raises(ValueError, match="which may be classes, or the soft edge of one"):
        seen(draw_masks(tmp_path / "unclear", grey(np.array([0, 3, 252], np.uint8)[TWO]), only_inside=True))


def test_several_masks_of_a_picture_are_taken_together(tmp_path):
    left, right = grey((TWO == 1) * np.uint8(255)), grey((TWO == 2) * np.uint8(255))
    for n, names in enumerate((("0/0.png", "0/1.png"), ("0_mask_0.png", "0_mask_1.png"), ("0/a.png", "0/b_mask.png"))):
        masks = draw_masks(tmp_path / str(n), *zip(names, (left, right), strict=True), names=["0.png", "1.png"])
        assert masks.count == 1
        assert np.array_equal(seen(masks), TRUE)
        assert not seen(masks, 1).any()
    both = draw_masks(
        tmp_path / "both",
        ("0/0.png", grey((TWO == 1) * np.uint8(1))),
        ("0/1.png", grey((TWO == 2) * np.uint8(2))),
        names=["0.png"],
    )
    assert np.array_equal(seen(both), TWO)
    contradicting = draw_masks(
        tmp_path / "other", ("0/0.png", grey(TRUE)), ("0/1.png", grey(TRUE * 2)), names=["0.png"]
    )
    with pytest.raises(ValueError, match="have the classes 1 and 2 at the same place"):
        seen(contradicting)
    for names in (("0.png", "0_mask.png"), ("0_gt.png", "0_mask.png"), ("0.png", "0/0.png")):
        with pytest.raises(ValueError, match="are masks of the same picture: delete one"):
            draw_masks(tmp_path / names[1].replace("/", ""), *zip(names, (left, right), strict=True), names=["0.png"])


def test_a_picture_is_no_mask_of_its_own(tmp_path):
    draw_masks(tmp_path, ("0_mask.png", grey(TRUE)), names=["0.png"])
    folder = tmp_path / "masks"
    Image.new("RGB", (W, H), "white").save(folder / "0.png")
    assert np.array_equal(seen(MaskFolder(folder, ["0.png"], [folder / "0.png"])), TRUE)


@pytest.mark.parametrize(
    "mask", [grey(255 - TRUE * 255), coloured(1 - TRUE, (255, 255, 255)), layers(WHITE, 255 - TRUE * 255)]
)
def test_black_defects_on_white_get_a_hint(tmp_path, mask):
    masks = draw_masks(tmp_path, mask)
    with pytest.warns(
        UserWarning, match=r"% of the masks in .* is inside: if defects are black on white there, invert"
    ):
        assert np.array_equal(seen(masks), 1 - TRUE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen(masks)  # said once
        seen(
            draw_masks(
                tmp_path / "right", grey(TRUE * 255), grey(np.full((H, W), 255, np.uint8)), *[grey(TRUE * 255)] * 3
            )
        )


def test_red_defects_on_white_get_a_hint(tmp_path):
    on_white = Image.fromarray(np.array([(255, 255, 255), RED], np.uint8)[TRUE])
    with pytest.warns(UserWarning, match="is white, which is a class; what is outside must be black"):
        seen(draw_masks(tmp_path, on_white))


class Annotation:
    """A file of Pascal VOC's annotations, with what a picture has of it here."""

    def __init__(self, *boxes, size=(W, H), text=None):
        objects = "".join(
            f"<object><name>{name}</name><difficult>0</difficult><bndbox><xmin>{left}</xmin><ymin>{top}</ymin>"
            f"<xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
            for name, left, top, right, bottom in boxes
        )
        sizes = "" if size is None else f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
        self.text = text or f"<annotation><filename>0.png</filename>{sizes}{objects}</annotation>"

    def save(self, path):
        path.write_text(self.text)


@pytest.mark.parametrize("size", [(W, H), None, (0, 0), (2 * W, 2 * H)])
def test_boxes_of_voc(tmp_path, size):
    scale = 2 if size == (2 * W, 2 * H) else 1
    large, small = ("scratch", 31, 11, 70, 40), ("dent", 41, 21, 50.2, 30)
    large = (large[0], *(scale * (edge - 1) + 1 for edge in large[1:3]), *(scale * edge for edge in large[3:]))
    small = (small[0], *(scale * (edge - 1) + 1 for edge in small[1:3]), *(scale * edge for edge in small[3:]))
    files = [("0.xml", Annotation(small, large, size=size)), ("1.xml", Annotation(size=size))]
    masks = draw_masks(tmp_path, *files, names=["0.png", "1.png", "2.png"])
    expected = np.zeros((H, W), np.uint8)
    expected[10:40, 30:70] = 2
    expected[20:30, 40:50] = 1  # the smaller box, although it comes first
    assert (masks.values, masks.titles, masks.count) == ([1, 2], {1: "dent", 2: "scratch"}, 2)
    assert (seen(masks) == expected).all()
    assert not seen(masks, 1).any()
    assert not seen(masks, 2).any()
    assert PatchOptions(masks).names(None) == ["background", "dent", "scratch"]
    inside = MaskFolder(masks.root, masks.names, masks._paths, only_inside=True, normal="photos")
    assert (seen(inside) == (expected > 0)).all()


def test_boxes_of_one_class_have_its_name_or_that_of_their_folders(tmp_path):
    masks = draw_masks(tmp_path, ("0.xml", Annotation(("dent", 1, 1, W, 2))))
    assert PatchOptions(masks).names(None) == ["background", "dent"]
    assert PatchOptions(masks).names(["crack", "hole"]) == ["background", "crack", "hole"]
    assert seen(masks).sum() == 2 * W


@pytest.mark.parametrize(("files", "error", "reason"), [
    ([("0.xml", Annotation(text="<annotation>"))], OSError, "0.xml cannot be read"),
    ([("0.xml", Annotation(text="<svg/>"))], OSError, "no file in .* is the mask of a picture: .* it has 1 .xml"),
    ([("0.xml", Annotation(text="<svg/>")), ("1.xml", Annotation())], ValueError, "<annotation>, but <svg>: export"),
    ([("0.xml", Annotation(("", 1, 1, 9, 9)))], ValueError, "object 1 in .*0.xml has no <name>"),
    ([("0.xml", Annotation(("a", 1, "", 9, 9)))], ValueError, "no <bndbox> of xmin"),
    ([("0.xml", Annotation(("a", 9, 1, 3, 9)))], ValueError, "'a', has no pixels: x from 9 to 3"),
    ([("0.xml", Annotation())], ValueError, "have no names of classes"),
    ([("0.xml", Annotation(("a", 1, 1, 9, 9), size=(W, W)))], ValueError, "120 x 120 pixels, but its picture 120 x 80"),
    ([("0.xml", Annotation(("a", 1, 1, 9, 9))), ("1.png", grey(TRUE))], ValueError, "keep one kind in a folder"),
    ([("0.xml", Annotation(*((str(n), 1, 1, 9, 9) for n in range(101))))], ValueError, "have 101 names of classes"),
])  # fmt: skip
def test_what_are_no_boxes_is_refused(tmp_path, files, error, reason):
    with pytest.raises(error, match=reason):
        seen(draw_masks(tmp_path, *files))
