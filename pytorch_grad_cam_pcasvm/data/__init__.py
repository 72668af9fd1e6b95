"""Images and labels from any source; and, without torch, which files are photos, and which classes folders are."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.data.images import Images, in_colour

__all__ = ["Images", "in_colour"]


def __getattr__(name: str) -> Any:
    """Return a public name: torch, which these need, is imported when one is asked for, and not for file names."""
    if name in __all__:
        from pytorch_grad_cam_pcasvm.data import images

        return getattr(images, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision reads


def is_photo(path: Path) -> bool:
    """Return whether a file is a picture, by its name."""
    return path.suffix.lower() in SUFFIXES


def list_photos(root: Path) -> list[Path]:
    """Return the pictures in a folder and in its folders, in order; of the file of a picture, this one."""
    return [root] if root.is_file() else sorted(filter(is_photo, root.rglob("*")))


def class_folders(root: str | Path) -> list[str]:
    """Return the names of the folders with images in a folder, in order; empty if it has none."""
    folders = (path for path in Path(root).iterdir() if path.is_dir())
    return sorted(path.name for path in folders if any(map(is_photo, path.rglob("*"))))


def name_classes(root: Path) -> list[str] | None:
    """Return the names of the classes in a folder, or None where the images have none.

    Raises:
        ValueError: there are no images, or some of them lie beside the folders of others.
    """
    photos = list_photos(root)
    if not photos:
        raise ValueError(
            f"the folder {root} has no images (.jpg, .png, .webp, ...): put them there, or into {arranged(root)}"
        )
    beside = [path for path in photos if path.parent == root or path == root]
    if len(beside) == len(photos):
        return None
    if beside:
        raise ValueError(
            f"{root} has both images, such as {beside[0].name}, and folders of images: put all into {arranged(root)}"
        )
    return class_folders(root)


def image_paths(paths: Any) -> list[Path]:
    """Return the files of pictures: of a folder all in it, in the order of their names; of a file or a list, these.

    Raises:
        FileNotFoundError: some are missing, all of which are named, or a folder has no pictures.
    """
    if isinstance(paths, str | PathLike):
        root = Path(paths)
        if root.is_dir():
            files = list_photos(root)
            if not files:
                raise FileNotFoundError(f"the folder {root} has no images (.jpg, .png, .webp, ...)")
            return files
        paths = [root]
    files = [Path(path) for path in paths]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"there are no files {', '.join(missing)}: name pictures, or a folder of them")
    return files


def arranged(root: Path) -> str:
    """Describe how images of several classes are arranged."""
    return f"one folder for each class, as in {root / 'cat' / '1.jpg'} and {root / 'dog' / '2.jpg'}"
