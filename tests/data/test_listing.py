"""Files below a folder: which are photos, masks of photos, hidden, or of another format, and what is said of them."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from pytorch_grad_cam_pcasvm.studio import data
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.data import files
from pytorch_grad_cam_pcasvm.studio.data.annotations import name_annotation
from pytorch_grad_cam_pcasvm.studio.data.files import list_files
from pytorch_grad_cam_pcasvm.studio.data.images import Images, image_folder
from pytorch_grad_cam_pcasvm.studio.data.mask_search import has_few_colours
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder

W, H = 40, 30


def photo(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(90, 160, (H, W, 3), np.uint8))


def mask(seed, inside=255):
    """Return a mask with a rectangle, whose place is the seed's."""
    pixels = np.zeros((H, W), np.uint8)
    y, x = np.random.default_rng(seed).integers(0, 15, 2)
    pixels[y : y + 8, x : x + 12] = inside
    return Image.fromarray(pixels)


def put(root, **pictures):
    """Write pictures by their paths, dots in the place of slashes: ``{"good/a.png": picture}``."""
    for name, picture in pictures.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path) if isinstance(picture, Image.Image) else path.write_bytes(picture)
    return root


def names(root, paths):
    return [path.relative_to(root).as_posix() for path in paths]


def two_classes(root):
    pictures = {f"good/g{n}.jpg": photo(n) for n in range(4)} | {f"scratch/s{n}.jpg": photo(9 + n) for n in range(4)}
    return put(root, **pictures)


# The place of the mask of photo s0.jpg, and the folder that --masks names.
LAYOUTS = {
    "in a folder beside images": ("images/s{}.jpg", "masks/s{}.png", "masks"),
    "in a folder beside images, of any capitals": ("images/s{}.jpg", "Ground_Truth/s{}.png", "Ground_Truth"),
    "labels": ("imgs/s{}.jpg", "labels/s{}.png", "labels"),
    "annotations": ("photos/s{}.jpg", "annotations/s{}_mask.png", "annotations"),
    "voc": ("JPEGImages/s{}.jpg", "SegmentationClass/s{}.png", "SegmentationClass"),
    "of a part": ("train/s{}.jpg", "train_masks/s{}_mask.gif", "train_masks"),
    "beside the classes": ("scratch/s{}.jpg", "masks/scratch/s{}.png", "masks"),
    "beside the classes, flat": ("scratch/s{}.jpg", "GT/s{}.png", "GT"),
    "in the class": ("scratch/s{}.jpg", "scratch/masks/s{}.png", "scratch/masks"),
    "beside the photo": ("scratch/s{}.jpg", "scratch/s{}_mask.png", ""),
    "beside the photo, KolektorSDD2": ("s{}.jpg", "s{}_GT.png", ""),
    "beside the photo, seg": ("scratch/s{}.jpg", "scratch/s{}-seg.png", ""),
    "beside the photo, a dot": ("scratch/s{}.jpg", "scratch/s{}.mask.png", ""),
    "beside the photo, in front": ("scratch/s{}.jpg", "scratch/mask_s{}.png", ""),
    "several of a photo": ("scratch/s{}.jpg", "ground_truth/scratch/s{}/000.png", "ground_truth"),
    "below the folder of images": ("images/scratch/s{}.jpg", "masks/scratch/s{}.png", "masks"),
}


@pytest.mark.parametrize(("of_photo", "of_mask", "folder"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_masks_are_no_photos_and_have_the_pixels_of_their_files(tmp_path, of_photo, of_mask, folder):
    put(tmp_path, **{of_photo.format(n): photo(n) for n in range(4)}, **{of_mask.format(n): mask(n) for n in range(4)})
    listing = list_files(tmp_path)
    assert names(tmp_path, listing.photos) == [of_photo.format(n) for n in range(4)]
    assert len(listing.masks) == 4
    assert listing.mask_folder == tmp_path / folder
    (line,) = listing.describe()
    assert line.startswith("left out: 4 pictures are masks, such as ")
    assert line.endswith(f"use them with --masks {tmp_path / folder}")
    masks = MaskFolder(listing.mask_folder, names(tmp_path, listing.photos), listing.photos)
    assert (masks.count, masks.unknown) == (4, [])
    for n in range(4):
        assert np.array_equal(masks.of(n, (H, W), None), np.asarray(mask(n)) // 255)
    with pytest.warns(UserWarning, match="4 pictures are masks"):
        assert data.image_paths(tmp_path) == listing.photos
    with pytest.warns(UserWarning, match="4 pictures are masks"):
        assert len(Images(tmp_path, lambda picture: torch.zeros(3, 2, 2))) == 4


def test_a_folder_of_images_beside_its_masks_is_no_class(tmp_path):
    put(tmp_path, **{f"images/{n}.jpg": photo(n) for n in range(3)}, **{f"masks/{n}.png": mask(n) for n in range(3)})
    assert data.name_classes(tmp_path) is None
    put(tmp_path, **{f"good/g{n}.jpg": photo(n) for n in range(3)})
    assert data.name_classes(tmp_path) == ["good", "images"]


def test_classes_in_a_folder_beside_masks_are_proposed_with_their_masks(tmp_path, capsys):
    put(tmp_path, **{f"images/{name}/{name}{n}.jpg": photo(n) for name in ("good", "crack") for n in range(3)})
    put(tmp_path, **{f"masks/crack/crack{n}.png": mask(n) for n in range(3)})
    assert main(["check", str(tmp_path)]) == 0
    told, way = capsys.readouterr().out, f"pcasvm-cam fit {tmp_path}/images --pool dense:3 --masks {tmp_path}/masks\n"
    assert f"to use them: {way}" in told
    assert told.endswith(f"next: {way}")
    photos = list_files(tmp_path / "images").photos
    assert data.class_folders(tmp_path / "images") == ["crack", "good"]
    masks = MaskFolder(tmp_path / "masks", names(tmp_path / "images", photos), photos)
    assert (masks.count, masks.unknown) == (3, [])


def test_the_folder_of_all_masks_is_named(tmp_path):
    """Masks of two classes have one folder above them; of two masks of each photo, those of one kind are enough."""
    for n in range(3):
        put(tmp_path / "a", **{f"{name}/{n}.jpg": photo(n) for name in ("dent", "hole")})
        put(tmp_path / "a", **{f"{name}/masks/{n}.png": mask(n) for name in ("dent", "hole")})
        put(tmp_path / "b", **{f"JPEGImages/{n}.jpg": photo(n)})
        put(tmp_path / "b", **{f"Segmentation{kind}/{n}.png": mask(n) for kind in ("Class", "Object")})
    assert list_files(tmp_path / "a").mask_folder == tmp_path / "a"
    listing = list_files(tmp_path / "b")
    assert (listing.mask_folder, len(listing.masks)) == (tmp_path / "b" / "SegmentationClass", 6)
    for root in ("a", "b"):
        listing = list_files(tmp_path / root)
        assert MaskFolder(listing.mask_folder, names(tmp_path / root, listing.photos), listing.photos).unknown == []


def test_the_command_that_uses_masks_names_the_part_of_the_data_set(tmp_path, capsys):
    """As of MVTec, whose masks are of photos to test on, and of parts with masks of their own."""
    for n in range(3):
        put(tmp_path / "a", **{f"{place}/{n:03}.png": photo(n) for place in ("train/good", "test/good", "test/bent")})
        put(tmp_path / "a", **{f"ground_truth/bent/{n:03}_mask.png": mask(n)})
        put(tmp_path / "b", **{f"{part}/images/{n}.jpg": photo(n) for part in ("train", "test")})
        put(tmp_path / "b", **{f"{part}/masks/{n}.png": mask(n) for part in ("train", "test")})
    for root, line in (
        ("a", "evaluate {0}/a/test --masks {0}/a/ground_truth"),
        ("b", "fit {0}/b/train --pool dense:3 --masks {0}/b/train/masks"),
    ):
        assert main(["check", str(tmp_path / root)]) == 0
        assert f"to use them: pcasvm-cam {line.format(tmp_path)}\n" in capsys.readouterr().out
    photos = list_files(tmp_path / "a" / "test").photos
    masks = MaskFolder(tmp_path / "a" / "ground_truth", names(tmp_path / "a" / "test", photos), photos)
    assert (masks.count, masks.unknown) == (3, [])
    assert np.array_equal(masks.of(1, (H, W), None), np.asarray(mask(1)) // 255)


@pytest.mark.parametrize(("picture", "few"), [
    (mask(0), True), (mask(0, 1), True), (Image.new("L", (W, H)), True), (photo(0), False),
    (photo(0).filter(ImageFilter.GaussianBlur(4)), False),
    (Image.fromarray(np.random.default_rng(0).normal(120, 3, (H, W)).astype(np.uint8)), False),  # grey, low contrast
    (Image.fromarray(np.kron(np.arange(600, dtype=np.uint16).reshape(20, 30), np.ones((20, 20), np.uint16))), False),
    (mask(0).resize((400, 300), Image.Resampling.BICUBIC), True),  # soft edges
    (mask(0).convert("P"), True), (Image.merge("RGB", [mask(0), mask(1), mask(2)]), True),
])  # fmt: skip
def test_masks_have_few_colours_in_areas(tmp_path, picture, few):
    picture.save(tmp_path / "a.png")
    assert has_few_colours(tmp_path / "a.png") == few


def test_masks_beside_photos_of_low_contrast_are_not_taken_for_a_class(tmp_path):
    for n in range(3):
        metal = np.random.default_rng(n).normal(200, 5, (60, 80)).astype(np.uint8)
        put(tmp_path, **{f"train_img/{n}.jpg": Image.fromarray(metal), f"train_lab/{n}.png": mask(n).resize((80, 60))})
    with pytest.raises(ValueError, match="are photos by name, but have few colours"):
        list_files(tmp_path)


def test_masks_in_jpeg_are_black_and_white(tmp_path):
    mask(0).resize((400, 300)).save(tmp_path / "a.jpg", quality=75)
    photo(0).resize((400, 300)).save(tmp_path / "b.jpg", quality=75)
    assert has_few_colours(tmp_path / "a.jpg")
    assert not has_few_colours(tmp_path / "b.jpg")
    metal = np.random.default_rng(0).normal(200, 5, (240, 320))  # bright, of low contrast, with a black hole
    metal[100:140, 100:140] = 5
    Image.fromarray(metal.astype(np.uint8)).save(tmp_path / "c.jpg", quality=75)
    assert not has_few_colours(tmp_path / "c.jpg")


def test_photos_in_a_folder_of_masks_are_refused_with_both_readings(tmp_path):
    two_classes(tmp_path)
    put(tmp_path, **{f"masks/s{n}.png": photo(n) for n in range(4)})
    message = (
        r"masks are masks by name, but s0\.png has as many colours as a photo: if they are photos, rename the fold"
    )
    with pytest.raises(ValueError, match=message) as caught:
        list_files(tmp_path)
    assert "if they are masks, save them as PNG, in few colours" in str(caught.value)
    (tmp_path / "masks").rename(tmp_path / "dented")
    assert data.class_folders(tmp_path) == ["dented", "good", "scratch"]
    (tmp_path / "dented").rename(tmp_path / "masks")
    put(tmp_path, **{f"masks/s{n}.png": mask(n) for n in range(4)})
    assert data.class_folders(tmp_path) == ["good", "scratch"]


def test_masks_of_no_photo_and_of_another_shape_are_refused(tmp_path):
    two_classes(tmp_path)
    put(tmp_path, **{f"masks/other{n}.png": mask(n) for n in range(4)})
    with pytest.raises(ValueError, match=r"4 of 4 have the name of no photo, such as other3\.png"):
        list_files(tmp_path)
    put(tmp_path / "b", **{f"x{n}.jpg": photo(n) for n in range(2)}, **{"x0_mask.png": mask(0).resize((W, W))})
    with pytest.raises(
        ValueError, match=r"x0_mask\.png has another shape than its photo: if they are photos, rename th"
    ):
        list_files(tmp_path / "b")
    mask(0).resize((2 * H, 2 * W)).save(tmp_path / "b" / "x0_mask.png")  # on its side, and larger
    assert names(tmp_path / "b", list_files(tmp_path / "b").photos) == ["x0.jpg", "x1.jpg"]


@pytest.mark.parametrize("place", ["truth/s{}.png", "scratch/s{}_bw.png"])
def test_masks_that_are_not_named_so_are_refused_with_both_readings(tmp_path, place):
    two_classes(tmp_path)
    put(tmp_path, **{place.format(n): mask(n) for n in range(4)})
    with pytest.raises(ValueError, match="are photos by name, but have few colours") as caught:
        list_files(tmp_path)
    way = (
        f"rename the folder to {tmp_path / 'masks'}" if "truth" in place else "end their names in _mask in place of _bw"
    )
    assert way in str(caught.value)
    for n in range(4):
        wanted = tmp_path / ("masks/s{}.png" if "truth" in place else "scratch/s{}_mask.png").format(n)
        wanted.parent.mkdir(exist_ok=True)
        (tmp_path / place.format(n)).rename(wanted)
    assert len(list_files(tmp_path).masks) == 4


def test_classes_of_drawings_with_the_same_names_are_classes(tmp_path):
    put(tmp_path, **{f"{name}/{n}.png": mask(n) for name in ("one", "two") for n in range(3)})
    assert data.class_folders(tmp_path) == ["one", "two"]


def test_classes_of_drawings_one_of_which_is_named_as_masks_are_refused_with_both_readings(tmp_path):
    put(tmp_path, **{f"{name}/{n}.png": mask(n) for name in ("label", "logo") for n in range(6)})
    with pytest.raises(
        ValueError, match=r"label are masks by name, but 0\.png in .*logo has few colours, too"
    ) as caught:
        list_files(tmp_path)
    assert f"if both are photos, rename the folder {tmp_path / 'label'}; if " in str(caught.value)
    assert f"move all masks out of {tmp_path}, and name them with --masks" in str(caught.value)
    (tmp_path / "logo").rename(tmp_path / "images")  # of which the others are masks
    assert names(tmp_path, list_files(tmp_path).photos) == [f"images/{n}.png" for n in range(6)]
    (tmp_path / "images").rename(tmp_path / "logo")
    (tmp_path / "label").rename(tmp_path / "tags")
    assert data.class_folders(tmp_path) == ["logo", "tags"]


def test_faces_with_a_mask_are_photos(tmp_path):
    put(tmp_path, **{f"{name}/{name}{n}.jpg": photo(n) for name in ("with_mask", "without_mask") for n in range(3)})
    assert data.class_folders(tmp_path) == ["with_mask", "without_mask"]
    alone = put(tmp_path / "alone", **{f"mask/{n}.jpg": photo(n) for n in range(2)})
    assert len(list_files(alone).photos) == 2  # of which photos could they be masks?


HIDDEN = [
    ".ipynb_checkpoints/s0-checkpoint.png", "good/.ipynb_checkpoints/g0.png", "__MACOSX/good/._g0.jpg", "good/._g1.jpg",
    "@tmp/a.jpg", "@Recycle/b.jpg", "good/@sharebin/c.jpg", "good/~$g0.jpg",
    "$RECYCLE.BIN/a.jpg", "System Volume Information/b.jpg", "scratch/@eaDir/s0.jpg/SYNOPHOTO_THUMB_M.jpg",
    "lost+found/c.png", "Thumbs.db", "good/desktop.ini", ".git/x.png", "#recycle/d.jpg", "good/.DS_Store",
]  # fmt: skip


@pytest.mark.parametrize("hidden", HIDDEN)
def test_hidden_and_foreign_files_are_no_photos_and_counted(tmp_path, hidden):
    put(two_classes(tmp_path), **{hidden: photo(0) if hidden.endswith(("g", "G")) else b"\0\5\x16\7"})
    listing = list_files(tmp_path)
    assert (listing.classes, len(listing.photos), names(tmp_path, listing.hidden)) == (["good", "scratch"], 8, [hidden])
    (line,) = listing.describe()
    assert line.startswith("ignored: 1 file that is hidden or of another system (")
    images = image_folder(tmp_path, lambda picture: torch.zeros(3, 2, 2))
    assert (images.classes, len(images)) == (["good", "scratch"], 8)
    assert len(data.image_paths(tmp_path)) == 8


def test_names_of_people_with_signs_are_not_hidden(tmp_path):
    signs = ["$10", "$5", "@home", "~a"]
    put(tmp_path, **{f"{name}/{first}{n}.jpg": photo(n) for name in signs for n, first in enumerate("@$~x")})
    listing = list_files(tmp_path)
    assert (listing.classes, len(listing.photos), listing.hidden) == (signs, 16, [])


def test_what_lies_below_a_hidden_folder_that_is_named_is_not_hidden(tmp_path):
    root = two_classes(tmp_path / ".cache" / "photos")
    assert len(list_files(root).photos) == 8


def test_a_folder_with_the_ending_of_a_picture_is_no_picture(tmp_path, capsys):
    put(two_classes(tmp_path / "a"), **{"good/old.jpg/x.jpg": photo(30)})
    (tmp_path / "a" / "scratch" / "empty.png").mkdir()
    assert len(list_files(tmp_path / "a").photos) == 9
    assert main(["check", str(tmp_path / "a")]) == 0
    assert "broken" not in capsys.readouterr().out


def test_a_folder_that_is_a_link_is_followed_but_not_round_and_round(tmp_path):
    root = two_classes(tmp_path / "a")
    put(tmp_path / "b", **{"x.jpg": photo(1)})
    os.symlink(tmp_path / "b", root / "dent")
    os.symlink(root, root / "good" / "again")
    assert (data.class_folders(root), len(list_files(root).photos)) == (["dent", "good", "scratch"], 9)


@pytest.fixture
def no_pydicom(monkeypatch):
    files._reads_dicom.cache_clear()
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    yield
    files._reads_dicom.cache_clear()


def test_all_files_of_other_formats_are_counted(no_pydicom, tmp_path, capsys):
    dicom = bytes(128) + b"DICM"
    files = {"good/a.heic": b"x", "good/b.HEIC": b"x", "good/c.npy": b"x", "notes.docx": b"x", "scratch/IM0001": dicom}
    put(two_classes(tmp_path), **files)
    assert main(["check", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "not read: 2 .heic, 1 .docx, 1 .npy, 1 without an ending, such as good/a.heic; 1 DICOM: pip" in said
    assert "; save .heic, .npy as PNG\n" in said


def test_a_folder_of_dicom_alone_says_what_is_there_and_what_to_do(no_pydicom, tmp_path, capsys):
    put(
        tmp_path,
        **{f"normal/IM{n}": bytes(128) + b"DICM" for n in range(3)},
        **{"nodule/1.2.840.5": bytes(128) + b"DICM"},
    )
    for command in ("check", "fit"):
        assert main([command, str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert "has no images (.jpg, .png, .webp, ...): not read: 3 without an ending, 1 .5, such as no" in said
        assert "4 DICOM: pip install 'pytorch_grad_cam_pcasvm[dicom]' reads them" in said
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert "## Photos are DICOM" in page


ANNOTATIONS = {
    "COCO": (
        "a.json",
        '{"info": {}, "images": [{"id": 1, "file_name": "s0.jpg"}], "annotations": [], "categories": []}',
    ),
    "LabelMe": ("s0.json", '{"version": "5.5.0", "flags": {}, "shapes": [], "imagePath": "s0.jpg", "imageData": null}'),
    "YOLO": ("s0.txt", "0 0.47 0.39 0.31 0.16\n1 0.1 0.2 0.3 0.4 0.5 0.6\n"),
    "CVAT": ("a.xml", "<?xml version='1.0'?><annotations><version>1.1</version><image name='s0.jpg'/></annotations>"),
    "run lengths": ("train.csv", "ImageId,ClassId,EncodedPixels\ns0.jpg,1,1301 10\n"),
    "Pascal VOC": ("s0.xml", "<annotation></annotation>"),
}
# Those that are not read, and what is to be done.
OTHERS = {
    "VIA": (
        "via.json",
        '{"s0.jpg1": {"filename": "s0.jpg", "regions": [{"shape_attributes": {"name": "rect"}}]}}',
        "export them as COCO (Annotation > Export Annotations, COCO format)",
    ),
    "Label Studio": (
        "ls.json",
        '[{"id": 1, "annotations": [{"id": 2, "completed_by": 1, "result": []}], "data": {"image": "s0.jpg"}}]',
        "export them as COCO, YOLO, or 'Brush labels to PNG'",
    ),
    "SuperAnnotate": (
        "sa.json",
        '{"metadata": {"name": "s0.jpg"}, "instances": [{"type": "polygon", "className": "a", "points": []}]}',
        "turn them into COCO with its own tool, superannotate.export_annotation",
    ),
    None: ("readme.txt", "Photos of 2024, see 0 and 1.\n", ""),
}


@pytest.mark.parametrize(("kind", "file"), ANNOTATIONS.items())
def test_annotations_are_masks_as_a_folder_and_as_a_file(tmp_path, capsys, kind, file):
    name, text = file
    put(two_classes(tmp_path / "photos"))
    put(tmp_path / "ann", **{name: text.encode()})
    assert name_annotation(tmp_path / "ann" / name) == kind
    for masks in (tmp_path / "ann", tmp_path / "ann" / name):
        assert main(["check", str(tmp_path / "photos"), "--masks", str(masks)]) == 0
        said = capsys.readouterr().out
        assert f"masks: 1 of 8 photos have one ({kind})" in said
        assert "on 4 without one, of the normal class, there is nothing; 3 without one are left out" in said
        assert said.endswith(f"next: pcasvm-cam fit {tmp_path / 'photos'} --pool dense:3 --masks {masks}\n")


@pytest.mark.parametrize(("kind", "file"), OTHERS.items())
def test_annotations_that_are_not_read_are_named_with_what_to_do(tmp_path, capsys, kind, file):
    name, text, way = file
    put(two_classes(tmp_path / "photos"))
    put(tmp_path / "ann", **{name: text.encode()})
    assert name_annotation(tmp_path / "ann" / name) == kind
    assert main(["check", str(tmp_path / "photos"), "--masks", str(tmp_path / "ann")]) == 0
    said = capsys.readouterr().out
    assert f"it has 1 {Path(name).suffix}, such as {name}" in said
    assert (f"; 1 {kind} (such as {name}): {way}\n" in said) == (kind is not None)
    assert main(["check", str(tmp_path / "photos"), "--masks", str(tmp_path / "ann" / name)]) == 2
    said = capsys.readouterr().err
    if kind is None:
        assert (
            f"{name} is a file, but a folder is expected, such as {tmp_path / 'ann'}, or a file of annotations (COCO, L"
            in said
        )
    else:
        assert f"{name} has annotations of {kind}, which are not read as they are: {way}" in said


@pytest.mark.parametrize(("files", "said"), [
    ({"scratch/s0.xml": b"<annotation><object/></annotation>"}, ("1 file has", "Pascal VOC", "scratch/s0.xml", "")),
    ({"labels/s0.txt": b"0 .5 .5 .1 .1", "labels/s1.txt": b"", "labels/classes.txt": b"a"},
     ("2 files have", "YOLO", "labels/s0.txt", "/labels")),
    ({"result/coco.json": b'{"images": [], "annotations": []}', "result/s0.txt": b"0 .5 .5 .1 .1"},
     ("2 files have", "COCO, YOLO", "result/coco.json", "/result/coco.json")),
])  # fmt: skip
def test_annotations_beside_photos_are_told_with_the_command_that_uses_them(tmp_path, capsys, files, said):
    put(two_classes(tmp_path), **files)
    assert main(["check", str(tmp_path)]) == 0
    are, kind, first, place = said
    way = f"{are} annotations ({kind}), such as {first}; to use them: pcasvm-cam fit {tmp_path} --pool dense:3"
    told = capsys.readouterr().out
    assert f"{way} --masks {tmp_path}{place}\n" in told
    assert "not read" not in told


@pytest.mark.parametrize("ending", ["jfif", "jpe", "jp2", "tga", "gif", "avif"])
def test_formats_that_pillow_opens_by_itself_are_read(tmp_path, ending):
    if ending == "avif":
        pytest.importorskip("PIL._avif")
    picture = Image.new("RGB", (W, H), (200, 40, 90))
    picture.save(tmp_path / f"a.{ending}", format={"jfif": "JPEG", "jpe": "JPEG"}.get(ending))
    (path,) = list_files(tmp_path).photos
    assert np.abs(np.asarray(data.in_colour(path)).astype(int) - np.asarray(picture)).max() < 4


def test_the_first_frame_of_an_animation_is_read_and_told(tmp_path, capsys):
    root = two_classes(tmp_path / "a")
    frames = [photo(n).quantize(64) for n in range(3)]
    frames[0].save(root / "good" / "x.gif", save_all=True, append_images=frames[1:])
    assert np.array_equal(np.asarray(data.in_colour(root / "good" / "x.gif")), np.asarray(frames[0].convert("RGB")))
    assert main(["check", str(root)]) == 0
    assert "moving: 1 photo, such as good/x.gif; the first frame is taken" in capsys.readouterr().out


def test_a_mask_with_the_name_of_its_photo_is_known_by_what_it_shows(tmp_path, capsys):
    put(two_classes(tmp_path), **{"scratch/s1.png": mask(1), "good/g1.png": photo(1)})  # g1.jpg, saved again
    listing = list_files(tmp_path)
    assert names(tmp_path, listing.masks) == ["scratch/s1.png"]
    assert listing.mask_folder == tmp_path
    assert main(["check", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "classes: good 5, scratch 4\n" in told
    assert "left out: 1 picture is a mask, such as scratch/s1.png; to use them: pcasvm-cam fit" in told
    assert "2 photos look like copies of 1 (" in told
    assert "good/g1.jpg = good/g1.png" in told
    masks = MaskFolder(tmp_path, names(tmp_path, listing.photos), listing.photos)
    assert [name for name, file in zip(masks.names, masks.files, strict=True) if file] == ["scratch/s1.jpg"]
    assert np.array_equal(masks.of(masks.names.index("scratch/s1.jpg"), (H, W), None), np.asarray(mask(1)) // 255)


def test_a_mask_of_its_photos_name_among_many_is_one_where_the_photo_is_flat(tmp_path):
    """A photo with a hole has few colours, too: of one such pair nobody can say which is the mask."""
    flat = Image.fromarray(np.where(np.asarray(mask(3)) > 0, 8, 200).astype(np.uint8))
    put(tmp_path, **{f"a/{n}.png": photo(n) for n in range(4)}, **{f"a/{n}.bmp": mask(n) for n in range(4)})
    put(tmp_path, **{"a/3.png": flat})
    assert names(tmp_path, list_files(tmp_path).masks) == [f"a/{n}.bmp" for n in range(4)]
    for n in range(3):
        (tmp_path / f"a/{n}.bmp").unlink()
    with pytest.raises(ValueError, match=r"3\.bmp and .*3\.png have one name, and few colours both: if one is the mas"):
        list_files(tmp_path)
    (tmp_path / "a/3.bmp").rename(tmp_path / "a/3_mask.bmp")
    assert names(tmp_path, list_files(tmp_path).masks) == ["a/3_mask.bmp"]
    (tmp_path / "a/3_mask.bmp").rename(tmp_path / "a/other.bmp")
    assert list_files(tmp_path).masks == []


def test_masks_in_a_folder_of_any_name_are_not_taken_for_a_class_by_one_flat_photo(tmp_path):
    put(tmp_path, **{f"img/{n}.png": photo(n) for n in range(6)}, **{f"zzz/{n}.png": mask(n) for n in range(6)})
    put(tmp_path, **{"img/3.png": Image.new("L", (W, H), 200)})
    with pytest.raises(ValueError, match="zzz are photos by name, but have few colours"):
        list_files(tmp_path)
    (tmp_path / "zzz").rename(tmp_path / "lbl")
    listing = list_files(tmp_path)
    assert (listing.classes, listing.mask_folder) == ([], tmp_path / "lbl")


def test_a_single_folder_of_classes_beside_masks_is_opened(tmp_path):
    put(tmp_path, **{f"a/images/{c}/{n}.jpg": photo(n) for c in ("good", "crack") for n in range(2)})
    put(tmp_path, **{f"a/masks/crack/{n}.png": mask(n) for n in range(2)})
    for root in (tmp_path, tmp_path / "a"):
        listing = list_files(root)
        assert (listing.photo_folder, listing.classes) == (tmp_path / "a" / "images", ["crack", "good"])
    with pytest.warns(UserWarning, match="2 pictures are masks"):
        images = Images(tmp_path, lambda picture: torch.zeros(3, 2, 2))
    assert (images.names, images.labels(range(4))) == (["crack", "good"], [0, 0, 1, 1])
    listing = list_files(put(tmp_path / "b", **{f"good/part{n}/{n}.jpg": photo(n) for n in range(2)}))
    assert (listing.photo_folder, listing.classes) == (tmp_path / "b", ["good"])
    assert list_files(tmp_path / "a" / "images" / "good" / "0.jpg").classes == []


def test_boxes_in_a_folder_of_their_own_are_named_by_it(tmp_path, capsys):
    """And lists of names, as of VOC, are no annotations of YOLO."""
    box = b"".join(
        b"<%s>%d</%s>" % (edge, 1 + 8 * (n > 1), edge) for n, edge in enumerate((b"xmin", b"ymin", b"xmax", b"ymax"))
    )
    box = b"<annotation><object><name>crack</name><bndbox>" + box + b"</bndbox></object></annotation>"
    put(tmp_path, **{f"JPEGImages/{n:03}.jpg": photo(n) for n in range(6)})
    put(tmp_path, **{f"Annotations/{n:03}.xml": box for n in range(6)})
    put(tmp_path, **{"ImageSets/Main/train.txt": b"\n".join(b"%03d" % n for n in range(6))})
    assert main(["check", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.endswith(f"next: pcasvm-cam fit {tmp_path} --pool dense:3 --masks {tmp_path}/Annotations\n")
    assert "not read: 1 .txt, such as ImageSets/Main/train.txt\n" in told
    listing = list_files(tmp_path)
    masks = MaskFolder(listing.drawn, names(tmp_path, listing.photos), listing.photos)
    assert (masks.count, masks.titles) == (6, {1: "crack"})


def test_the_ending_of_a_packed_volume_is_told_whole(tmp_path, capsys):
    put(two_classes(tmp_path), **{f"scratch/v{n}.nii.gz": b"\x1f\x8b" for n in range(2)})
    assert main(["check", str(tmp_path)]) == 0
    assert "not read: 2 .nii.gz, such as scratch/v0.nii.gz; save .nii.gz as PNG\n" in capsys.readouterr().out
