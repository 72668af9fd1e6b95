"""Text in a corner of one class: what ``check`` says of it, and where it says nothing."""

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from test_choosing import run

from pytorch_grad_cam_pcasvm.studio.cli.corner_text import find_text


def draw(number, text="", at=(20, 16), size=28, colour=False):
    """Return a picture like a scan: a bright body on dark ground, with noise; and text in a corner."""
    drawn = np.random.default_rng(number)
    y, x = np.mgrid[:400, :400]
    body = 140 * np.exp(-((x - 200) ** 2 + (y - 220) ** 2) / 2 / 70**2) + 14
    picture = Image.fromarray((body + drawn.normal(0, 3, body.shape)).clip(0, 255).astype(np.uint8))
    if text:
        ImageDraw.Draw(picture).text(at, text, fill=235, font=ImageFont.load_default(size))
    return Image.merge("RGB", [picture, picture, picture.point(lambda v: v // 2)]) if colour else picture


def test_text_is_found_in_its_corner_of_grey_pictures():
    assert find_text(draw(0)) == (False, False, False, False)
    assert find_text(draw(0, "L 12:30")) == (True, False, False, False)
    assert find_text(draw(0, "R", at=(350, 345), size=40)) == (False, False, False, True)
    assert find_text(draw(0, "L 12:30").convert("RGB")) == (True, False, False, False)
    assert find_text(draw(0, "L 12:30", colour=True)) is None


@pytest.mark.parametrize("others", ["", "R 08:15"])
def test_check_says_which_class_has_text_in_a_corner(others, tmp_path, capsys):
    for number in range(16):
        label, text = ("sick", "L 12:30") if number % 2 else ("well", others)
        (tmp_path / label).mkdir(exist_ok=True)
        draw(number, text).save(tmp_path / label / f"{number}.png")
    status, told, _ = run(capsys, "check", tmp_path)
    assert status == 0
    said = "hint: the top left corner looks like text in 8 of 8 pictures of sick, and in 0 of 8 others"
    assert (said in told) == (not others)
    assert told.count("looks like text") == (not others)
