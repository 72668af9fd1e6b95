"""Regions that ``explain`` writes for a labelling tool."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_grad_cam_pcasvm.studio.data.mask_files import turned
from pytorch_grad_cam_pcasvm.studio.pictures.read import open_picture, read_orientation
from pytorch_grad_cam_pcasvm.studio.pictures.regions import mark_regions, refuse_marks

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.studio.data.region_files import RegionFiles


class Suggestions:
    """Regions of photos, collected while they are drawn.

    Args:
        out: the folder for the files.
        tool: the format; None: nothing is collected.
    """

    def __init__(self, out: Path, tool: str | None) -> None:
        self._files: RegionFiles | None = None
        self._by_half = False
        if tool is not None:
            from pytorch_grad_cam_pcasvm.studio.data import region_files

            self._files = region_files.RegionFiles(out, tool)

    def check_model(self, about: dict[str, Any], *, knows_frame: bool = True) -> None:
        """Refuse a model whose maps have no regions, before any is made.

        Args:
            about: what sheets are made of.
            knows_frame: whether it is known which part of a photo the network sees.

        Raises:
            ValueError: they have none, or nobody knows where on the photo they lie.
        """
        if self._files is None:
            return
        refuse_marks(about)
        if not knows_frame:
            raise ValueError(
                "--regions needs to know which part of a photo the network sees, and nothing says so of a transform of "
                "your own: let the function return the network alone, and fit again, with --resize pad or without"
            )

    def add(
        self,
        name: str,
        file: Path,
        picture: Any,
        answers: Any,
        outputs: Any,
        row: int,
        frame: Any,
        *,
        reading: Mapping[str, Any],
    ) -> None:
        """Add the regions of a photo.

        Args:
            name: its path in the folder of photos.
            file: the photo.
            picture: the photo, as it is drawn.
            answers: of the explanation.
            outputs: the outputs.
            row: which of their images it is.
            frame: the part of the picture that the network saw.
            reading: how photos are read, as of :class:`.Preparation`: with ``exif`` they are turned as it says.
        """
        if self._files is None:
            return
        marks = mark_regions(answers, outputs, row, picture.size, frame)
        orientation = 1 if reading.get("exif") else _find_orientation(file, reading.get("page"))
        numbers, values = (turned(pixels, orientation) for pixels in (marks.numbers, marks.values))
        self._by_half |= marks.is_sure is False
        self._files.add(name, file, numbers, marks.names, values)

    def write(self) -> None:
        """Write the files, and say which they are."""
        if self._files is None:
            return
        file, count, photos = self._files.write(), self._files.count, self._files.count_photos
        regions, on = f"{count} region{'s' * (count != 1)}", f"{photos} photo{'s' * (photos != 1)}"
        half = "evidence of at least half of the largest, as nothing says what is sure; " * self._by_half
        print(f"wrote {regions} on {on}: {file} ({half}read them again with --masks {shlex.quote(str(file))})")


def _find_orientation(file: Path, page: int | None) -> int:
    """Return how a labelling tool turns a photo that is drawn as it is stored."""
    with open_picture(file, page) as stored:
        stored.load()
        return read_orientation(stored)
