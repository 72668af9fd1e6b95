"""Photos that are unlike the training set, on the command line."""

import csv
import re

import numpy as np
from PIL import Image
from test_choosing import NETWORK, make_photos, run


def test_explain_says_which_photos_are_unlike_with_the_reason(tmp_path, capsys):
    root, model, out = (
        make_photos(tmp_path / "photos", {"a": 20, "b": 20}),
        tmp_path / "m.safetensors",
        tmp_path / "maps",
    )
    page = np.zeros((32, 32, 3), np.uint8)
    page[::4] = 255
    Image.fromarray(page).save(tmp_path / "page.png")
    status, told, _ = run(capsys, "fit", root, *NETWORK, "--components", "4", "--resample", "0", "--out", model)
    assert status == 0
    assert (
        "explain says which photos are unlike these: what lies farther outside of all components than 1 in 41" in told
    )
    trusted = ["--model", model, "--trust", NETWORK[1], "--device", "cpu", "--out", out]
    for photo, is_odd in ((tmp_path / "page.png", True), (root / "b" / "07.png", False)):
        status, said, _ = run(capsys, "explain", photo, *trusted)
        assert status == 0
        (row,) = csv.DictReader((out / "values.csv").open())
        assert (
            bool(re.fullmatch(r"unlike the training pictures: .* \(\d+\.\d\d times the limit\)", row["note"])) == is_odd
        )
        assert ("1 of 1 pictures is unlike the training pictures" in said) == is_odd
