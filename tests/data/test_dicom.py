"""DICOM: which shade each number has, which files are read, what is refused, and what is never copied."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import Compose, Resize, ToTensor

from pytorch_grad_cam_pcasvm.studio import data
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.cli.arguments import parse_arguments
from pytorch_grad_cam_pcasvm.studio.data import files
from pytorch_grad_cam_pcasvm.studio.pictures import dicom
from pytorch_grad_cam_pcasvm.studio.pictures.read import UnreadableImageError, read_picture

pydicom = pytest.importorskip("pydicom")
SECRET = "DOE^SECRET"
RAMP = np.arange(4096).reshape(64, 64)


def write(path, pixels=RAMP, kind="MONOCHROME2", bits=12, signed=0, **more):
    """Write a DICOM file of some pixels."""
    dataset, meta = pydicom.Dataset(), pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = (
        pydicom.uid.ExplicitVRLittleEndian,
        "1.2.840.10008.5.1.4.1.1.7",
    )
    meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    dataset.file_meta, dataset.SOPClassUID = meta, meta.MediaStorageSOPClassUID
    dataset.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    dataset.PatientName = dataset.PatientID = dataset.InstitutionName = SECRET
    colours = kind in ("RGB", "YBR_FULL")
    dataset.Rows, dataset.Columns = pixels.shape[-3:-1] if colours else pixels.shape[-2:]
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 3 if colours else 1, kind
    if colours:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = 8 * pixels.dtype.itemsize if pixels.dtype.kind == "u" else 16
    dataset.BitsStored, dataset.PixelRepresentation = bits, signed
    dataset.HighBit = bits - 1
    wide = dataset.BitsAllocated == 16
    dataset.PixelData = pixels.astype("<i2" if signed else "<u2" if wide else "u1").tobytes()
    for name, value in more.items():
        setattr(dataset, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def shades(path, **reading):
    return np.asarray(read_picture(path, **reading), np.float64) / 255


def linear(values, centre, width):
    """Return the shades of a window, of DICOM's part 3, C.11.2.1.2.1."""
    return ((values - (centre - 0.5)) / (width - 1) + 0.5).clip(0, 1)


CASES = {
    "no window: all that 12 bits may be": ({}, {}, RAMP / 4095),
    "the window": ({"WindowCenter": 1000, "WindowWidth": 800}, {}, linear(RAMP, 1000, 800)),
    "the first of two": ({"WindowCenter": [1000, 9], "WindowWidth": [800, 9]}, {}, linear(RAMP, 1000, 800)),
    "exact": (
        {"WindowCenter": 1000, "WindowWidth": 800, "VOILUTFunction": "LINEAR_EXACT"},
        {},
        ((RAMP - 1000) / 800 + 0.5).clip(0, 1),
    ),
    "sigmoid": (
        {"WindowCenter": 1000, "WindowWidth": 800, "VOILUTFunction": "SIGMOID"},
        {},
        1 / (1 + np.exp(-4 * (RAMP - 1000) / 800)),
    ),
    "in units of the modality": (
        {"RescaleSlope": 2, "RescaleIntercept": -1000, "WindowCenter": 40, "WindowWidth": 400},
        {},
        linear(2 * RAMP - 1000, 40, 400),
    ),
    "falling": ({"RescaleSlope": -1, "RescaleIntercept": 4095}, {}, 1 - RAMP / 4095),
    "an intercept alone, which is left out": ({"RescaleIntercept": -1000}, {}, RAMP / 4095),
    "typed": (
        {"WindowCenter": 9, "WindowWidth": 5, "VOILUTFunction": "SIGMOID"},
        {"window": (1000, 800)},
        linear(RAMP, 1000, 800),
    ),
    "negative": ({"kind": "MONOCHROME1", "WindowCenter": 1000, "WindowWidth": 800}, {}, 1 - linear(RAMP, 1000, 800)),
    "signed": ({"pixels": RAMP - 2048, "signed": 1}, {}, RAMP / 4095),
}


@pytest.mark.parametrize("name", CASES)
def test_greys_are_those_of_the_window(name, tmp_path):
    more, reading, expected = CASES[name]
    picture = shades(write(tmp_path / "x.dcm", **more), **reading)
    assert np.abs(picture - expected).max() <= 0.51 / 255


def test_tables_say_which_shade_a_number_has(tmp_path):
    table = pydicom.Dataset()
    table.add_new("LUTDescriptor", "US", [4096, 0, 10])
    table.add_new("LUTData", "US", [(4095 - number) // 4 for number in range(4096)])
    picture = shades(write(tmp_path / "x.dcm", VOILUTSequence=[table]))
    assert np.abs(picture - (4095 - RAMP) // 4 / 1023).max() <= 0.51 / 255


def test_colours_are_as_they_are_seen(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    picture = read_picture(write(tmp_path / "rgb.dcm", colours, "RGB", bits=8))
    assert picture.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(picture), colours)
    stored = np.asarray(Image.fromarray(colours).convert("YCbCr"))
    seen = np.asarray(read_picture(write(tmp_path / "ybr.dcm", stored, "YBR_FULL", bits=8)))
    expected = np.asarray(Image.fromarray(stored, "YCbCr").convert("RGB"))
    assert np.abs(seen.astype(int) - expected.astype(int)).max() <= 1


def test_of_several_frames_one_is_named(tmp_path):
    frames = np.stack([RAMP, RAMP[::-1]])
    path = write(tmp_path / "x.dcm", frames, NumberOfFrames=2)
    with pytest.raises(UnreadableImageError, match=r"it has 2 frames.*--page 1"):
        read_picture(path)
    with pytest.raises(UnreadableImageError, match="it has 2 frames, and frame 3 is asked for"):
        read_picture(path, page=3)
    np.testing.assert_allclose(shades(path, page=2), RAMP[::-1] / 4095, atol=0.51 / 255)


def test_what_is_no_picture_says_so(tmp_path, monkeypatch):
    path = write(tmp_path / "x.dcm")
    dataset = pydicom.dcmread(path)
    del dataset.PixelData
    dataset.save_as(tmp_path / "report.dcm")
    with pytest.raises(UnreadableImageError, match="it is DICOM without a picture"):
        read_picture(tmp_path / "report.dcm")
    (tmp_path / "cut.dcm").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnreadableImageError, match="bytes of pixel data"):
        read_picture(tmp_path / "cut.dcm")
    real = dicom.import_module

    def refuse(name):
        raise ImportError(name) if name == "pydicom" else AssertionError

    monkeypatch.setattr(dicom, "import_module", refuse)
    with pytest.raises(UnreadableImageError, match=r"pip install 'pytorch_grad_cam_pcasvm\[dicom\]' reads it"):
        read_picture(path)
    monkeypatch.setattr(dicom, "import_module", real)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UnreadableImageError, match="more pixels than Pillow takes"):
        read_picture(path)


def test_each_of_pydicoms_own_pictures_is_read_or_refused_with_a_reason():
    reasons = list[str]()
    paths = sorted((Path(pydicom.__file__).parent / "data" / "test_files").glob("*.dcm"))
    for path in paths:
        try:
            picture = read_picture(path, page=1)
            assert (picture.mode in ("L", "RGB"), picture.info) == (True, {})
        except UnreadableImageError as error:
            reasons.append(error.reason)
    assert all(reasons)
    assert len(paths) - len(reasons) >= 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of two classes, of files without an ending or with dots in their names, and one of no picture."""
    root, drawn = tmp_path_factory.mktemp("scans"), np.random.default_rng(0)
    for number in range(20):
        label = "ab"[number % 2]
        pixels = drawn.integers(1000, 3000, (32, 32)) + 900 * (label == "b")
        name = f"IM{number:04}" if number % 4 < 2 else f"1.2.840.{number}"
        kind = {} if number % 3 else {"kind": "MONOCHROME1"}
        pixels = pixels if number % 3 else 4095 - pixels
        maker = {"Manufacturer": "ACME" if label == "a" else "GE"}
        write(root / label / name, pixels, **kind, **maker, WindowCenter=2048, WindowWidth=4096)
    (root / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
    return root


NETWORK = ["--backbone", f"{__name__}:backbone", "--features", "1", "--device", "cpu", "--no-cache"]


def backbone():
    """Return a small network, and its transform."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.Tanh(), nn.Conv2d(8, 12, 3, 2), nn.Tanh())
    return net, Compose([Resize((32, 32)), ToTensor()])


def test_a_folder_of_scans_is_checked_fitted_and_explained_and_no_name_is_copied(folder, tmp_path, capsys):
    assert data.class_folders(folder) == ["a", "b"]
    assert main(["check", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "20 of 20 photos are DICOM; black and white: the windows of the files" in said
    assert "hint: the manufacturer of DICOM files tells a and b from the others (ACME: a 10; GE: b 10)" in said
    assert "photometric" not in said
    model, maps = tmp_path / "m.safetensors", tmp_path / "maps"
    fit = ["fit", str(folder), *NETWORK, "--window", "2048,3000", "--resample", "0", "--out", str(model)]
    assert main(fit) == 0
    assert "black and white: --window 2048,3000" in capsys.readouterr().out
    explain = ["explain", str(folder), "--model", str(model), "--trust", NETWORK[1], "--out", str(maps)]
    assert main(explain) == 0
    rows = list(csv.DictReader((maps / "values.csv").open()))
    assert len(rows) == 20
    assert len({*maps.rglob("*.png")}) == 20
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 20
    assert not any(SECRET.encode() in path.read_bytes() or b"SECRET" in path.read_bytes() for path in written)
    from pytorch_grad_cam_pcasvm import load_model

    loaded = load_model(model, NETWORK[1])
    assert loaded.preparation.window == (2048, 3000)
    assert SECRET not in repr(loaded.about)


def test_scans_of_hardly_any_greys_ask_for_a_window(tmp_path, capsys):
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 100, (32, 32))
        write(tmp_path / "ab"[number % 2] / f"{number}.dcm", pixels, bits=16)
    assert main(["check", str(tmp_path)]) == 0
    assert "hint: these have 1 of 256 greys" in capsys.readouterr().out


def test_without_pydicom_scans_are_counted_with_the_way_out(folder, monkeypatch):
    files._reads_dicom.cache_clear()
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    said = " ".join(files.list_files(folder).describe())
    assert "21 DICOM: pip install 'pytorch_grad_cam_pcasvm[dicom]' reads them" in said
    files._reads_dicom.cache_clear()


def test_a_window_may_begin_below_0():
    assert parse_arguments(["fit", "photos", "--window", "-600,1500"]).window == (-600, 1500)
    assert parse_arguments(["fit", "photos", "--window=-600,1500"]).window == (-600, 1500)


@pytest.mark.parametrize("text", ["40", "40,0", "40,-3", "nan,4", "a,b", "1,2,3"])
def test_a_window_is_a_centre_and_a_width(text, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["fit", str(tmp_path), "--window", text])
    said = capsys.readouterr().err
    assert "centre and width are expected" in said or "a window has a finite centre" in said
