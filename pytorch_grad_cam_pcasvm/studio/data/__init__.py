"""Images and labels from any source; and, without torch, which files are photos, and which classes folders are."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_grad_cam_pcasvm.runtime.errors import warn
from pytorch_grad_cam_pcasvm.studio.data.files import Listing, list_files

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.studio.data.images import Images, in_colour
    from pytorch_grad_cam_pcasvm.studio.data.region_files import write_regions

__all__ = ["Images", "in_colour", "write_regions"]
PHOTOS = ".jpg, .png, .webp, ..."


def __getattr__(name: str) -> Any:
    """Return a public name: torch, which most need, is imported when one is asked for, and not for file names."""
    if name == "write_regions":
        from pytorch_grad_cam_pcasvm.studio.data import region_files

        return region_files.write_regions
    if name in __all__:
        from pytorch_grad_cam_pcasvm.studio.data import images

        return getattr(images, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, also of what is imported when it is asked for."""
    return sorted({*globals(), *__all__})


def list_photos(root: Path) -> list[Path]:
    """Return the pictures in a folder and in its folders that are no masks, in order; of a picture's file, this one."""
    return list_files(root).photos


def class_folders(root: str | Path) -> list[str]:
    """Return the names of the folders with photos in a folder, in order; empty if it has none."""
    return list_files(root).classes


def name_classes(root: Path) -> list[str] | None:
    """Return the names of the classes in a folder, or None where the images have none.

    Raises:
        ValueError: there are no images, or some of them lie beside the folders of others.
    """
    listing = list_files(root)
    if not listing.photos:
        raise ValueError(describe_none(listing))
    names = [] if root.is_file() else listing.classes
    if names and listing.beside:
        raise ValueError(
            f"{root} has both images, such as {listing.beside[0].name}, and folders of images: put all into "
            f"{arranged(root)}"
        )
    return names or None


def describe_none(listing: Listing) -> str:
    """Say that a folder has no photos, and what it has, or where to put them."""
    found = listing.describe()
    way = "; ".join(found) if found else f"put them there, or into {arranged(listing.root)}"
    return f"the folder {listing.root} has no images ({PHOTOS}): {way}"


def image_paths(paths: Any) -> list[Path]:
    """Return the files of pictures: of a folder all in it, in the order of their names; of a file or a list, these.

    Raises:
        FileNotFoundError: some are missing, all of which are named, or a folder has no pictures.
    """
    if isinstance(paths, str | PathLike):
        root = Path(paths)
        if root.is_dir():
            listing = list_files(root)
            if not listing.photos:
                raise FileNotFoundError(describe_none(listing))
            if listing.masks:
                warn(listing.describe()[0], UserWarning)
            return listing.photos
        paths = [root]
    files = [Path(path) for path in paths]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"there are no files {', '.join(missing)}: name pictures, or a folder of them")
    return files


def arranged(root: Path) -> str:
    """Describe how images of several classes are arranged."""
    return f"one folder for each class, as in {root / 'cat' / '1.jpg'} and {root / 'dog' / '2.jpg'}"
