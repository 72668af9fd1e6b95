"""Chosen patches: a picture of the patches that are taken for faults, to be looked at before they are believed."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MOST = 40  # photos
_COLUMNS = 5
_SIDE = 226  # pixels of a photo
_GAP, _LINE, _HEAD = 10, 20, 58
_MARK, _DOUBT, _TEXT = (255, 210, 0), (180, 30, 40), (30, 30, 30)


def draw_chosen(
    file: Path, folder: Any, picked: Sequence[tuple[int, str, Any]], grid: Sequence[int], doubtful: Sequence[int]
) -> int:
    """Draw photos with the outlines of the patches that are taken for their faults, doubtful ones first.

    Args:
        file: where to write.
        folder: the photos.
        picked: number, class and positions of the patches of each faulty photo, the most suspicious photo first.
        grid: (h, w), the shape of the positions.
        doubtful: the numbers of the photos whose patches are hardly suspicious.

    Returns:
        The number of photos that are drawn.
    """
    from PIL import Image, ImageDraw, ImageFont

    from pytorch_grad_cam_pcasvm.data.images import Images

    order = [one for one in picked if one[0] in doubtful][: _MOST // 2]
    rest = [one for one in picked if one[0] not in doubtful]
    rest = rest[:: max(1, -(-len(rest) // (_MOST - len(order))))]  # from the most to the least suspicious
    order += rest
    images = Images(folder, thumbnails=_SIDE)
    columns, lines = min(_COLUMNS, len(order)), -(-len(order) // _COLUMNS)
    width = max(760, columns * (_SIDE + _GAP) + _GAP)
    sheet = Image.new("RGB", (width, _HEAD + lines * (_SIDE + _LINE + _GAP) + _GAP), "white")
    draw, font, large = ImageDraw.Draw(sheet), ImageFont.load_default(13), ImageFont.load_default(17)
    draw.text((_GAP, 8), "Outlined: the patches that are taken for faults. Look before you believe them.",
              _TEXT, font=large)  # fmt: skip
    doubts = f", {len(doubtful)} doubtful, which come first" if doubtful else ""
    told = f"{len(order)} of {len(picked)} photos with a fault{doubts}"
    draw.text((_GAP, 33), told, _TEXT, font=font)
    for place, (number, name, positions) in enumerate(order):
        batch = images.read([number])
        if not batch.thumbnails:
            continue
        photo = Image.open(io.BytesIO(batch.thumbnails[0])).convert("RGB")
        x, y = _GAP + place % _COLUMNS * (_SIDE + _GAP), _HEAD + place // _COLUMNS * (_SIDE + _LINE + _GAP)
        sheet.paste(photo, (x, y))
        for position in positions:
            row, column = divmod(int(position), grid[1])
            box = [
                x + column * photo.width / grid[1] - 3,
                y + row * photo.height / grid[0] - 3,
                x + (column + 1) * photo.width / grid[1] + 3,
                y + (row + 1) * photo.height / grid[0] + 3,
            ]
            draw.rectangle([box[0] - 1, box[1] - 1, box[2] + 1, box[3] + 1], outline=(0, 0, 0), width=1)
            draw.rectangle(box, outline=_MARK, width=1)
        is_doubtful = number in doubtful
        words = ("doubtful: " if is_doubtful else f"{name}: ") + Path(images.id(number)).name
        while draw.textlength(words, font) > _SIDE and len(words) > 9:
            words = words[:-2].rstrip("\N{HORIZONTAL ELLIPSIS}") + "\N{HORIZONTAL ELLIPSIS}"
        draw.text((x, y + photo.height + 3), words, _DOUBT if is_doubtful else _TEXT, font=font)
    sheet.save(file)
    return len(order)
