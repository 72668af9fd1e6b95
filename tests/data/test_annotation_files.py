"""Files of annotations as labelling tools write them: the pixels that they mean, and what is refused in words."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from pytorch_grad_cam_pcasvm.studio.cli.training import PatchOptions
from pytorch_grad_cam_pcasvm.studio.data.annotations import READ, name_annotation
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder

W, H = 20, 16
TRUE = np.zeros((H, W), np.uint8)
TRUE[2:12, 2:12] = 1
TRUE[4:6, 13:18] = 2
INSIDE, DENT = TRUE == 1, TRUE == 2


def png(inside):
    file = io.BytesIO()
    Image.fromarray(inside).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def columns(inside):
    """Return the lengths of runs down columns, zeros first, one pixel after the other."""
    counts, last = [0], False
    for pixel in inside.T.ravel().tolist():
        if pixel != last:
            counts.append(0)
        counts[-1] += 1
        last = pixel
    return counts


def rows(inside):
    return columns(inside.T)


def starts(inside):
    """Return pairs of a first pixel and a length, as Severstal has them."""
    counts, place, words = columns(inside), 1, []
    for number, count in enumerate(counts):
        words += [str(place), str(count)] * (number % 2)
        place += count
    return " ".join(words)


def coco(*annotations, images=None, **size):
    photo = {"id": 7, "file_name": "0.png"} | (size or {"width": W, "height": H})
    return json.dumps({
        "info": {"description": "", "year": 2026},
        "licenses": [],
        "categories": [{"id": 1, "name": "crack", "supercategory": ""}, {"id": 2, "name": "dent", "supercategory": ""}],
        "images": [photo] if images is None else images,
        "annotations": [
            {"id": place, "image_id": 7, "category_id": 1, "iscrowd": 0} | annotation
            for place, annotation in enumerate(annotations, 1)
        ],
    })


def labelme(*shapes, version="5.5.0", **more):
    written = [
        {"label": "crack", "points": [], "group_id": None, "description": "", "shape_type": "polygon", "flags": {}}
        | shape
        for shape in shapes
    ]
    text = {"version": version, "flags": {}, "shapes": written, "imagePath": "0.png", "imageData": None}
    return json.dumps(text | {"imageHeight": H, "imageWidth": W} | more)


def cvat(*shapes, images=None):
    image = f'<image id="0" name="0.png" width="{W}" height="{H}">{"".join(shapes)}</image>'
    meta = "<meta><task><id>3</id><name>parts</name><labels/></task></meta>"
    body = image if images is None else images
    return f'<?xml version="1.0" encoding="utf-8"?><annotations><version>1.1</version>{meta}{body}</annotations>'


def voc(*objects, source="", size=(W, H)):
    source = f"<source><database>{source}</database></source>" if source else ""
    sizes = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation><folder/><filename>0.png</filename>{source}{sizes}{''.join(objects)}</annotation>"


def thing(name, left, top, right, bottom, more=""):
    return (
        f"<object><name>{name}</name><bndbox><xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax>"
        f"<ymax>{bottom}</ymax></bndbox>{more}</object>"
    )


SQUARE, BAR = [2, 2, 12, 2, 12, 12, 2, 12], [13, 4, 18, 4, 18, 6, 13, 6]
PAIRS = [[[x, y] for x, y in zip(flat[::2], flat[1::2], strict=True)] for flat in (SQUARE, BAR)]
SHARES = [
    " ".join(f"{value / side:.6f}" for value, side in zip(flat, [W, H] * 4, strict=True)) for flat in (SQUARE, BAR)
]
TEXT = [";".join(f"{x:.2f},{y:.2f}" for x, y in pairs) for pairs in PAIRS]
ROBOFLOW = "".join(f"<x{n}>{x + 1}</x{n}><y{n}>{y + 1}</y{n}>" for n, (x, y) in enumerate(PAIRS[1], 1))
# The same crack and dent by each tool: files, as it writes them.
SAME = {
    "COCO, polygons": {"a.json": coco({"segmentation": [SQUARE]}, {"segmentation": [BAR], "category_id": 2})},
    "COCO, boxes": {"a.json": coco(
        {"segmentation": [], "bbox": [2, 2, 10, 10]}, {"bbox": [13, 4, 5, 2], "category_id": 2},
    )},
    "COCO, run lengths": {"a.json": coco(
        {"segmentation": {"size": [H, W], "counts": columns(INSIDE)}, "iscrowd": 1},
        {"segmentation": {"size": [H, W], "counts": columns(DENT)}, "category_id": 2},
    )},
    # By hand: 34 zeros; ten times 10 ones, 6 zeros between; 132 zeros at the end, each but the first three less the one
    # two before. Five bits a character: 34 = 2 + 1 * 32, 132 - 6 = 30 + 3 * 32.
    "COCO, compressed": {"a.json": coco(
        {"segmentation": {"size": [H, W], "counts": "R1:6" + "0" * 17 + "n3"}, "iscrowd": 1},
        {"segmentation": {"size": [H, W], "counts": columns(DENT)}, "category_id": 2},
    )},
    "LabelMe, polygons": {"0.json": labelme({"points": PAIRS[0]}, {"points": PAIRS[1], "label": "dent"})},
    "LabelMe 4, rectangles": {"0.json": labelme(
        {"points": [[12, 2], [2, 12]], "shape_type": "rectangle"},
        {"points": [[13, 4], [18, 6]], "shape_type": "rectangle", "label": "dent"}, version="4.5.6",
    )},
    "LabelMe 7, turned rectangles": {"0.json": labelme(
        {"points": PAIRS[0], "shape_type": "oriented_rectangle"},
        {"points": PAIRS[1], "shape_type": "rotation", "direction": 0.0, "label": "dent"}, version="7.0.1",
    )},
    "LabelMe, masks": {"0.json": labelme(
        {"points": [[2, 2], [11, 11]], "shape_type": "mask", "mask": png(INSIDE[2:12, 2:12])},
        {"points": [[13.2, 4.3], [17.6, 5.4]], "shape_type": "mask", "mask": png(DENT[4:6, 13:18]), "label": "dent"},
    )},
    "YOLO, polygons": {"0.txt": f"0 {SHARES[0]}\n1 {SHARES[1]}\n", "classes.txt": "crack\ndent\n"},
    "YOLO, boxes": {
        "0.txt": "0 0.35 0.4375 0.5 0.625\n1 0.775 0.3125 0.25 0.125 0.93\n",
        "data.yaml": "train: ../train/images\nnc: 2\nnames: ['crack', \"dent\"]  # two\n",
    },
    "Pascal VOC, original": {"0.xml": voc(
        thing("crack", 3, 3, 12, 12), thing("dent", 14, 5, 18, 6), source="The VOC2007 Database"
    )},
    "Pascal VOC, labelImg": {"0.xml": voc(
        thing("crack", 2, 2, 12, 12), thing("dent", 13, 4, 18, 6), source="Unknown"
    )},
    "Pascal VOC, Roboflow": {"0.xml": voc(
        thing("crack", 3, 3, 13, 13),
        thing("dent", 14, 5, 19, 7, f"<polygon>{ROBOFLOW}</polygon>"), source="roboflow.com"
    )},
    "CVAT, polygon and box": {"annotations.xml": cvat(
        f'<polygon label="crack" source="manual" occluded="0" points="{TEXT[0]}" z_order="0"></polygon>',
        '<box label="dent" source="manual" occluded="0" xtl="13.00" ytl="4.00" xbr="18.00" ybr="6.00" z_order="0"/>',
    )},
    "CVAT, turned box and mask": {"annotations.xml": cvat(
        '<box label="crack" occluded="0" xtl="2" ytl="2" xbr="12" ybr="12" rotation="90.0" z_order="0"/>',
        '<mask label="dent" occluded="0" rle="0, 10" left="13" top="4" width="5" height="2" z_order="0"></mask>',
    )},
    "run lengths, of Severstal": {
        "train.csv": f"ImageId,ClassId,EncodedPixels\n0.png,crack,{starts(INSIDE)}\n0.png,dent,{starts(DENT)}\n"
    },
    "run lengths, joined": {
        "train.csv": f"ImageId_ClassId,EncodedPixels\n0.png_crack,{starts(INSIDE)}\n0.png_dent,{starts(DENT)}\n"
    },
    "run lengths, of clouds": {
        "train.csv": f"Image_Label,EncodedPixels\n0.png_crack,{starts(INSIDE)}\n0.png_dent,{starts(DENT)}\n0.png_x,\n"
    },
}  # fmt: skip


def annotate(folder, files, names=("0.png",), size=(W, H), root="", **options):
    """Return the masks of photos of some names, with these files of annotations."""
    for name in names:
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(path)
    for name, text in files.items():
        path = folder / "annotated" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    paths = [folder / "photos" / name for name in names]
    return MaskFolder(folder / "annotated" / root, list(names), paths, **options)


def seen(masks, row=0, size=(H, W)):
    return masks.of(row, size, None)


def one_shape(folder, **shape):
    """Return the pixels of one shape of LabelMe's."""
    return seen(annotate(folder, {"0.json": labelme(shape)}))


@pytest.mark.parametrize("tool", SAME)
@pytest.mark.parametrize("as_file", [False, True])
def test_the_same_shapes_are_the_same_pixels_by_every_tool(tmp_path, tool, as_file):
    files = SAME[tool]
    first = next(iter(files))
    masks = annotate(tmp_path, files, root=first if as_file else "")
    assert name_annotation(tmp_path / "annotated" / first) == tool.partition(",")[0].rstrip(" 47")
    assert np.array_equal(seen(masks), TRUE)
    assert masks.titles == {1: "crack", 2: "dent"}
    assert masks.files == [tmp_path / "annotated" / first]
    assert PatchOptions(masks).names(None) == ["background", "crack", "dent"]
    only = annotate(tmp_path, files, only_inside=True)
    assert np.array_equal(only.find_inside(0, (H, W), None), TRUE > 0)
    said = masks.describe()
    assert said.startswith(f"masks: 1 of 1 photos have one ({tool.partition(',')[0].rstrip(' 47')})")
    are_boxes = tool in ("COCO, boxes", "YOLO, boxes", "LabelMe 4, rectangles", "LabelMe 7, turned rectangles")
    assert ("all shapes are boxes" in said) == (are_boxes or tool in ("Pascal VOC, original", "Pascal VOC, labelImg"))


def test_every_format_that_is_read_is_tested():
    assert {tool.partition(",")[0].rstrip(" 47") for tool in SAME} == {*READ}


def test_kinds_of_shapes_of_labelme(tmp_path):
    y, x = np.mgrid[:H, :W] + 0.5
    circle = one_shape(tmp_path / "a", shape_type="circle", points=[[9, 8], [13, 5]])
    assert np.array_equal(circle == 1, np.hypot(x - 9, y - 8) <= 5)
    line = one_shape(tmp_path / "b", shape_type="linestrip", points=[[1.5, 1.5], [5.5, 1.5], [5.5, 4.5]])
    assert np.argwhere(line).tolist() == [*([1, k] for k in range(1, 6)), [2, 5], [3, 5], [4, 5]]
    assert one_shape(tmp_path / "c", shape_type="line", points=[[1.5, 1.5], [5.5, 1.5]]).sum() == 5
    assert np.argwhere(one_shape(tmp_path / "d", shape_type="point", points=[[3.4, 2.9]])).tolist() == [[2, 3]]
    points = one_shape(tmp_path / "e", shape_type="points", points=[[3.4, 2.9], [0, 0]])
    assert np.argwhere(points).tolist() == [[0, 0], [2, 3]]
    holes = np.array([[1, 0, 1], [0, 0, 1]], bool)
    mask = one_shape(tmp_path / "f", shape_type="mask", points=[[4, 5], [6, 6]], mask=png(holes))
    assert np.array_equal(mask[5:7, 4:7] == 1, holes)
    assert mask.sum() == holes.sum()
    none = one_shape(tmp_path / "g", shape_type=None, points=PAIRS[0])  # as of version 3
    assert np.array_equal(none == 1, INSIDE)


def test_kinds_of_shapes_of_cvat(tmp_path):
    y, x = np.mgrid[:H, :W] + 0.5
    shape = '<ellipse label="a" cx="9.00" cy="8.00" rx="6.00" ry="3.00" rotation="90.00" z_order="0"></ellipse>'
    assert np.array_equal(
        seen(annotate(tmp_path / "a", {"a.xml": cvat(shape)})) == 1, ((x - 9) / 3) ** 2 + ((y - 8) / 6) ** 2 <= 1
    )
    line = '<polyline label="a" points="1.50,1.50;5.50,1.50"></polyline><points label="b" points="0.1,0.1;9.5,9.5"/>'
    expected = np.zeros((H, W), int)
    expected[1, 1:6], expected[0, 0], expected[9, 9] = 1, 2, 2
    assert np.array_equal(seen(annotate(tmp_path / "b", {"a.xml": cvat(line)})), expected)
    part = np.array([[0, 1, 1], [1, 0, 1]], bool)
    runs = ", ".join(map(str, rows(part)))
    mask = (
        f'<mask label="a" rle="{runs}" left="4" top="7" width="3" height="2" z_order="0"><attribute name="x"/></mask>'
    )
    drawn = seen(annotate(tmp_path / "c", {"a.xml": cvat(mask)}))
    assert np.array_equal(drawn[7:9, 4:7] == 1, part)
    assert drawn.sum() == part.sum()


def test_rings_of_one_annotation_of_coco_are_a_union(tmp_path):
    both = coco({"segmentation": [SQUARE, [5, 5, 15, 5, 15, 15, 5, 15]]})
    assert seen(annotate(tmp_path, {"a.json": both})).sum() == 100 + 100 - 49


def test_a_photo_that_is_listed_without_shapes_has_nothing_on_it_and_another_is_unknown(tmp_path):
    listed = [{"id": n, "file_name": f"x/{n}.png", "width": W, "height": H} for n in range(2)]
    cases = {
        "COCO": {"a.json": coco({"segmentation": [SQUARE], "image_id": 0}, images=listed)},
        "LabelMe": {"0.json": labelme({"points": PAIRS[0]}), "1.json": labelme(imagePath="1.png")},
        "YOLO": {"0.txt": f"0 {SHARES[0]}", "1.txt": " \n"},
        "Pascal VOC": {"0.xml": voc(thing("a", 3, 3, 12, 12)), "1.xml": voc()},
        "CVAT": {"a.xml": cvat(images=(
            f'<image name="0.png"><polygon label="a" points="{TEXT[0]}"/></image><image name="1.png"/>'
            '<image name="2.png"><tag label="scratch" source="manual"></tag></image>'  # which does not say where
        ))},
        "run lengths": {"a.csv": f"ImageId,ClassId,EncodedPixels\n0.png,1,{starts(INSIDE)}\n1.png,1,\n"},
    }  # fmt: skip
    assert {*cases} == {*READ}
    for kind, files in cases.items():
        masks = annotate(tmp_path / kind, files, names=("0.png", "1.png", "2.png"))
        assert masks.unknown == [2]
        assert [bool(seen(masks, row).any()) for row in (0, 1)] == [True, False]
        assert (seen(masks, 2) == masks.unlabelled).all()
        said = masks.describe()
        assert said.startswith(f"masks: 2 of 3 photos have one ({kind}); on 1 of them there is nothing")
        assert "1 without one is left out, for what is on it is unknown, such as 2.png: " in said


@pytest.mark.parametrize(("name", "fits"), [
    ("0.png", True), ("a/0.png", True), ("photos/a/0.png", True), ("C:\\data\\a\\0.png", True), ("0.JPG", True),
    ("/home/me/a/0.jpeg", True), ("b/0.png", False), ("1.png", False), ("0", True), ("a/0.heic", True),
    ("images/a/0.png", True), ("10.png", False),
])  # fmt: skip
def test_photos_are_found_by_the_ends_of_their_paths(tmp_path, name, fits):
    images = [{"id": 7, "file_name": name}, {"id": 8, "file_name": "other/99.png"}]
    files = {"a.json": coco({"segmentation": [SQUARE]}, images=images)}
    if fits:
        masks = annotate(tmp_path, files, names=("a/0.png",))
        assert np.array_equal(seen(masks), INSIDE)
        assert "; 1 photo in the annotations is not in the folder, such as other/99.png" in masks.describe()
    else:
        with pytest.raises(FileNotFoundError, match=r"annotations of COCO, but none of a picture here: the first of"):
            annotate(tmp_path, files, names=("a/0.png",))


def test_labelme_names_its_photo_from_its_own_folder(tmp_path):
    files = {f"json/{part}/0.json": labelme({"points": PAIRS[0], "label": part}, imagePath=f"..\\..\\{part}\\0.png")
             for part in ("a", "b")}  # fmt: skip
    masks = annotate(tmp_path, files, names=("a/0.png", "b/0.png"))
    assert [seen(masks, row).max() for row in (0, 1)] == [1, 2]
    moved = {"0.json": labelme({"points": PAIRS[0]}, imagePath="IMG_2231.JPG")}  # renamed with its photo
    assert seen(annotate(tmp_path / "moved", moved)).any()


def test_what_may_be_of_several_photos_is_refused(tmp_path):
    polygon = {"segmentation": [SQUARE]}
    two = ("a/0.png", "b/0.png")
    with pytest.raises(
        ValueError, match=r"a\.json has annotations of 0\.png, which may be a/0\.png and b/0\.png: name"
    ):
        annotate(tmp_path / "1", {"a.json": coco(polygon)}, names=two)
    with pytest.raises(ValueError, match=r"0\.txt has annotations of 0, which may be a/0\.png and b/0\.png"):
        annotate(tmp_path / "2", {"0.txt": f"0 {SHARES[0]}"}, names=two)
    images = [{"id": 7, "file_name": "x/0.png"}, {"id": 8, "file_name": "y/0.png"}]
    with pytest.raises(ValueError, match=r"both say what is on 0\.png \(as x/0\.png and y/0\.png\): keep one"):
        annotate(tmp_path / "3", {"a.json": coco(polygon, images=images)})
    with pytest.raises(ValueError, match=r"1\.json says that it is of 0\.png, but has the name of 1\.png: rename it"):
        annotate(tmp_path / "4", {"1.json": labelme({"points": PAIRS[0]})}, names=("0.png", "1.png"))
    with pytest.raises(
        ValueError, match=r"annotations of COCO, such as .*a\.json and YOLO, such as .*0\.txt: name a f"
    ):
        annotate(tmp_path / "5", {"a.json": coco(polygon), "0.txt": f"0 {SHARES[0]}"})
    assert annotate(tmp_path / "5", {}, root="a.json").count == 1  # as the message says
    others = {"x.txt": "notes", "package.json": '{"name": "x"}'}
    kinds = annotate(tmp_path / "6", {"0.txt": f"0 {SHARES[0]}", "classes.txt": "crack"} | others)
    assert kinds.count == 1
    assert "; not read: 1 .json, 1 .txt, such as package.json" in kinds.describe()


YAML = {
    "names: [crack, 'a, dent']": {0: "crack", 1: "a, dent"},
    'names:\n  - crack\n  - "a dent"\n': {0: "crack", 1: "a dent"},
    "names:\n- crack\n- dent # small\nnc: 2": {0: "crack", 1: "dent"},
    "path: x\nnames:  # by number\n\n  # first\n  0: crack\n  1: dent\n\ntrain: y": {0: "crack", 1: "dent"},
    "names: {0: crack, 1: 'dent'}": {0: "crack", 1: "dent"},
    "names: ['crack',\n        'dent']\nnc: 2": {0: "crack", 1: "dent"},
}


@pytest.mark.parametrize("text", YAML)
@pytest.mark.parametrize("place", ["data.yaml", "labels/data.yaml", "../data.yaml"])
def test_names_of_yolo_in_yaml(tmp_path, text, place):
    line = f"0 {SHARES[0]}\n1 {SHARES[1]}"
    masks = annotate(tmp_path, {"labels/train/0.txt": line, place: text}, root="labels/train" * (place[0] != "."))
    if place[0] == ".":
        masks = annotate(tmp_path, {"0.txt": line, "labels/train/0.txt": ""}, root="0.txt")
    assert masks.titles == {number + 1: name for number, name in enumerate(sorted(YAML[text].values()))}
    assert f"; classes have the names of {tmp_path}" in masks.describe()


def test_yolo_without_names_has_numbers_and_poses_have_boxes(tmp_path):
    masks = annotate(tmp_path / "a", {"0.txt": f"10 {SHARES[0]}\n2 {SHARES[1]}"})
    assert masks.titles == {1: "2", 2: "10"}
    assert "; no file has names of classes, but numbers" in masks.describe()
    pose = {"0.txt": "0 0.35 0.4375 0.5 0.625 0.1 0.2 2 0.3 0.3 2", "data.yaml": "kpt_shape: [2, 3]\nnames: [a]"}
    assert np.array_equal(seen(annotate(tmp_path / "b", pose)) == 1, INSIDE)


def test_thin_shapes_are_there_and_said(tmp_path):
    files = {"a.json": coco({"segmentation": [[3.1, 4.1, 3.3, 4.1, 3.2, 4.3]]}, {"bbox": [8, 9, 0, 0]})}
    masks = annotate(tmp_path, files)
    with pytest.warns(
        UserWarning, match=r"2 shapes are too thin for a pixel, such as annotation 1, 'crack' on 0\.png: th"
    ):
        pixels = seen(masks)
    assert np.argwhere(pixels).tolist() == [[4, 3], [9, 8]]


@pytest.mark.parametrize("size", [(W, H), (2 * W, 2 * H), None])
def test_sizes_of_the_photo_that_was_annotated(tmp_path, size):
    scale = 2 if size == (2 * W, 2 * H) else 1
    photo = {} if size is None else {"width": size[0], "height": size[1]}
    files = {"a.json": coco({"segmentation": [[scale * value for value in SQUARE]]}, **photo or {"license": 1})}
    assert np.array_equal(seen(annotate(tmp_path, files)) == 1, INSIDE)
    with pytest.raises(
        ValueError, match=r"has 21 x 16 pixels, but its picture 20 x 16: was it cropped or turned since"
    ):
        seen(annotate(tmp_path / "other", {"a.json": coco({"segmentation": [SQUARE]}, width=21, height=16)}))


@pytest.mark.parametrize("exif", [True, False])
@pytest.mark.parametrize("as_seen", [True, False])
def test_photos_on_their_side_have_annotations_as_seen_or_as_stored(tmp_path, exif, as_seen):
    size = {"width": W, "height": H} if as_seen else {"width": H, "height": W}
    masks = annotate(tmp_path, {"a.json": coco({"segmentation": [[0, 0, 9, 0, 9, 4, 0, 4]]}, **size)}, exif=exif)
    stored = Image.new("RGB", (H, W))
    stored.getexif()[0x0112] = 6  # people see it turned clockwise
    stored.save(tmp_path / "photos" / "0.png", exif=stored.getexif())
    drawn = np.zeros((H, W) if as_seen else (W, H), int)
    drawn[:4, :9] = 1
    turned = drawn if as_seen else np.rot90(drawn, -1)
    expected = turned if exif else np.rot90(turned)
    assert np.array_equal(seen(masks, 0, expected.shape), expected)
    table = annotate(tmp_path / "csv", {"a.csv": f"ImageId,EncodedPixels\n0.png,{starts(INSIDE)}\n"})
    stored.save(tmp_path / "csv" / "photos" / "0.png", exif=stored.getexif())
    with pytest.raises(ValueError, match=r"lies on its side, by EXIF, and .*a\.csv does not say whether its runs"):
        seen(table)


def test_annotations_beside_photos_and_masks_beside_them(tmp_path):
    (tmp_path / "set" / "labels").mkdir(parents=True)
    for name in ("0.png", "1.png"):
        Image.new("RGB", (W, H)).save(tmp_path / "set" / name)
    (tmp_path / "set" / "labels" / "0.txt").write_text(f"0 {SHARES[0]}")
    names, paths = ["0.png"], [tmp_path / "set" / "0.png"]
    assert MaskFolder(tmp_path / "set", names, paths).count == 1  # 1.png is a photo of another part
    Image.fromarray(TRUE).save(tmp_path / "set" / "labels" / "0_mask.png")
    with pytest.raises(ValueError, match=r"has annotations, .*0\.txt, and masks, .*0_mask\.png: keep one kind"):
        MaskFolder(tmp_path / "set", names, paths)
    assert MaskFolder(tmp_path / "set" / "labels" / "0.txt", names, paths).count == 1
    (tmp_path / "set" / "labels" / "0.txt").rename(tmp_path / "set" / "labels" / "9.txt")  # of another photo
    assert MaskFolder(tmp_path / "set" / "labels", names, paths).files == [tmp_path / "set" / "labels" / "0_mask.png"]


BAD = [
    # COCO
    ({"a.json": coco({"segmentation": [SQUARE]})[:-9]}, "annotations .*a.json cannot be read .*: is the file cut off"),
    ({"a.json": '[{"image_id": 7, "category_id": 1, "segmentation": []}]'}, "a list, as of results of a detector: ex"),
    ({"a.json": '{"images": 3, "annotations": []}'}, "which has lists of images, annotations, categories, but some"),
    ({"a.json": coco(images=[{"id": 7}])}, 'image 1 of "images" in .*a.json has no "file_name"'),
    ({"a.json": coco(images=[{"id": 7, "file_name": "0.png"}] * 2)}, '2 images in .*a.json have one "id", 7: give'),
    ({"a.json": coco({"image_id": 8, "bbox": [1, 1, 2, 2]})}, 'annotation 1 in .* is of image 8, which "images" has'),
    ({"a.json": coco({"category_id": 9, "bbox": [1, 1, 2, 2]})}, 'annotation 1 .* category 9, which "categories" has'),
    ({"a.json": coco({"segmentation": [[1, 1, 5]]})}, r"annotation 1 in .* no pairs of numbers, \[1, 1, 5\]"),
    ({"a.json": coco({"segmentation": [[1, 1, 5, 5]]})}, "has 2 points, but needs 3: delete it, or draw it anew"),
    ({"a.json": coco({"segmentation": [[1, 1, 5, 5, 1e99, 3]]})}, "points that are no pairs of numbers"),
    ({"a.json": coco({"segmentation": "x"})}, 'a "segmentation" that is no polygon and no run lengths, x'),
    ({"a.json": coco({"keypoints": [1, 2, 2]})}, 'no "segmentation", and no "bbox" of x, y, width and height: is the'),
    ({"a.json": coco({"bbox": [1, 1, -2, 2]})}, 'has no "segmentation", and no "bbox"'),
    ({"a.json": coco({"bbox": [50, 1, 2, 2]})}, "annotation 1 in .*, 'crack' on 0.png, has no pixels on the photo"),
    ({"a.json": coco({"segmentation": {"size": [W, H], "counts": [W * H]}})}, r'the "size" \[20, 16\] \(height, width'),
    ({"a.json": coco({"segmentation": {"counts": [W * H]}})}, 'run lengths of the "size" None'),
    ({"a.json": coco({"segmentation": {"size": [H, W], "counts": [3, 4]}})}, "of 7 pixels, but 20 x 16 are 320: is it"),
    ({"a.json": coco({"segmentation": {"size": [H, W], "counts": [3, -4]}})}, "neither a text nor a list of whole nu"),
    ({"a.json": coco({"segmentation": {"size": [H, W], "counts": "5d"}})}, "annotation 1 in .* cut off: export the"),
    ({"a.json": coco({"segmentation": {"size": [H, W], "counts": [W * H]}})}, "has no pixels on the photo"),
    ({"a.json": coco({"segmentation": {"size": [10**6, 10**6], "counts": [10**12]}}, width=10**6, height=10**6)},
     "1000000 x 1000000 pixels, but its picture 20 x 16"),
    ({"a.json": coco({"segmentation": {"size": [8 * 10**6, 10**7], "counts": [8 * 10**13]}}, license=1)},
     "says that 0.png has 10000000 x 8000000 pixels, more than a photo has"),
    # LabelMe
    ({"0.json": labelme({"points": PAIRS[0]})[:60]}, "0.json cannot be read"),
    ({"0.json": '{"shapes": {}}'}, 'is no file of LabelMe\'s, for it has no list of "shapes"'),
    ({"0.json": labelme({"points": PAIRS[0], "label": ""})}, 'shape 1 in .*0.json has no "label": name its class'),
    ({"0.json": labelme({"points": [[1, 2]]})}, "shape 1 in .*, a polygon, has 1 point, but needs 3"),
    ({"0.json": labelme({"points": PAIRS[0], "shape_type": "cuboid"})}, "is a 'cuboid', which is not read, but polyg"),
    ({"0.json": labelme({"points": [[2, 2], [4, 4]], "shape_type": "mask", "mask": "§"})}, "no text in base64"),
    ({"0.json": labelme({"points": [[2, 2], [4, 4]], "shape_type": "mask", "mask": "aaaa"})}, "a mask that cannot be"),
    ({"0.json": labelme({"points": [[2, 2], [9, 9]], "shape_type": "mask", "mask": png(INSIDE)})},
     r"a mask of 20 x 16 pixels in a box from \(2, 2\) to \(9, 9\): draw it anew"),
    # YOLO
    ({"0.txt": f"0 {SHARES[0]}", "1.txt": "0 0.1 0.2"}, "line 1 in .*1.txt has 2 numbers behind its class: a box"),
    ({"0.txt": f"0 {SHARES[0]}", "1.txt": "0 3 5 7 9"}, "line 1 in .*1.txt has the number 9, but they are shares"),
    ({"0.txt": f"0 {SHARES[0]}", "1.txt": "crack 0.1 0.1 0.1 0.1"}, "has not the number of a class and shares"),
    ({"0.txt": f"2 {SHARES[0]}", "classes.txt": "a\nb"}, "is of class 2, for which .*classes.txt has no name"),
    ({"0.txt": f"0 {SHARES[0]}", "data.yaml": "names: &x"}, "data.yaml has no names of classes that can be read"),
    # Pascal VOC
    ({"0.xml": voc(thing("a", 30, 3, 39, 9))}, "object 1 in .*0.xml, 'a' on 0, has no pixels on the photo of 20 x 16"),
    ({"0.xml": voc("<object><name>a</name><polygon><x1>3</x1></polygon></object>")}, "points that are no pairs"),
    # CVAT
    ({"a.xml": cvat('<cuboid label="a" xtl1="3"/>')}, "shape 1 of 0.png in .* is a <cuboid>, which is not read"),
    ({"a.xml": cvat('<box label="a" xtl="3"/>')}, "shape 1 of 0.png in .* has no number ytl, but None"),
    ({"a.xml": cvat('<box xtl="3"/>')}, "shape 1 of 0.png in .*a.xml has no label: name its class"),
    ({"a.xml": cvat('<polygon label="a" points="3,4;5"/>')}, "has points that are no pairs of numbers"),
    ({"a.xml": cvat('<mask label="a" rle="3, x" left="1" top="1" width="2" height="2"/>')}, "are no whole numbers"),
    ({"a.xml": cvat('<mask label="a" rle="3, 3" left="1" top="1" width="2" height="2"/>')}, "of 6 pixels, but 2 x 2"),
    ({"a.xml": cvat('<mask label="a" rle="0, 60000" left="1" top="1" width="300" height="200"/>')},
     "shape 1 of 0.png in .* has a mask of 300 x 200 pixels on a photo of 20 x 16"),
    ({"a.xml": cvat(images='<track id="0" label="a"/>')}, "has tracks through a video: export 'CVAT for images'"),
    ({"a.xml": cvat(images="<image/>")}, "image 1 in .*a.xml has no name"),
    # run lengths
    ({"a.csv": "x,EncodedPixels\n0.png,1 2\n"}, "has the columns x, EncodedPixels: ImageId, ClassId and"),
    ({"a.csv": "ImageId,ClassId,EncodedPixels\n0.png,,1 2\n"}, "row 2 in .*a.csv, 0.png, , 1 2, has no photo"),
    ({"a.csv": "ImageId,EncodedPixels\n0.png,1 2 3\n"}, "row 2 in .* has the runs 1 2 3, but pairs"),
    ({"a.csv": "ImageId,EncodedPixels\n0.png," + "9" * 5000 + " 1\n"}, "has the runs 9999"),
    ({"a.csv": "ImageId,EncodedPixels\n0.png,-1\n"}, "has the runs -1, but pairs"),
    ({"a.csv": "ImageId,EncodedPixels\n0.png,9 3 8 2\n"}, "from pixel 8 on, but the one before it ends at 11"),
    ({"a.csv": "ImageId,EncodedPixels\n0.png,0 3\n"}, "a run from pixel 0 on, but the one before it ends at 0"),
    ({"a.csv": "ImageId,EncodedPixels\n0.png,319 3\n"}, "row 2 in .*a.csv, '1' on 0.png, has runs of 321 pixels"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "reason"), BAD)
def test_broken_annotations_are_refused_with_their_place_and_a_way_out(tmp_path, files, reason):
    with pytest.raises((ValueError, OSError), match=reason):
        seen(annotate(tmp_path, files, names=("0.png", "1.png")))


def places_in(entry):
    """Yield all places in a file of JSON: what has it, and its key there."""
    for key in entry if isinstance(entry, dict) else range(len(entry)):
        yield entry, key
        if isinstance(entry[key], dict | list):
            yield from places_in(entry[key])


@pytest.mark.parametrize("tool", ["COCO, run lengths", "LabelMe, masks"])
def test_no_value_in_a_file_raises_an_error_of_python_s_own(tmp_path, tool):
    ((name, text),) = SAME[tool].items()
    entry, told = json.loads(text), []
    for holder, key in [*places_in(entry)]:
        kept = holder[key]
        for value in (None, 10**30, {"a": 1}) if isinstance(holder, dict) or len(holder) < 5 else ("x",):
            holder[key] = value
            try:
                seen(annotate(tmp_path, {name: json.dumps(entry)}))
            except (ValueError, OSError) as error:
                told.append(str(error))
        holder[key] = kept
    assert len(told) > 20
    assert all(str(tmp_path) in message for message in told)


@pytest.mark.parametrize("name", ["crack", "spåret"])
def test_a_mark_at_the_start_and_letters_of_any_language(tmp_path, name):
    assert annotate(tmp_path / "a", {"0.json": "\ufeff" + labelme({"points": PAIRS[0], "label": name})}).titles == {
        1: name
    }
    (tmp_path / "a" / "annotated" / "0.json").write_bytes(b'{"shapes": [], "x": "\xe9"}')
    with pytest.raises(ValueError, match="is no text in UTF-8"):
        annotate(tmp_path / "a", {})
