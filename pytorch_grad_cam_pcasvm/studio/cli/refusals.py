"""Refusals of lines that cannot work, by names and headers of files, before anything is imported or downloaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.runtime.amounts import least_images
from pytorch_grad_cam_pcasvm.studio.cli.arguments import (
    CLASSIFIERS,
    GOOD_PARTS,
    MODEL,
    RUN,
    EvaluateOptions,
    FitOptions,
    write_line,
)
from pytorch_grad_cam_pcasvm.studio.cli.folders import (
    classes_in,
    find_normal,
    name_objects,
    tell_left_out,
    two_classes,
    use_drawn,
)
from pytorch_grad_cam_pcasvm.studio.data import list_photos, name_classes
from pytorch_grad_cam_pcasvm.studio.data.annotations import READ, is_read, name_annotation, refuse_unread
from pytorch_grad_cam_pcasvm.studio.data.files import describe_others, is_photo, list_files, walk
from pytorch_grad_cam_pcasvm.studio.model.description import parse_origin, read_description, read_header

_WRITER = "pytorch_grad_cam_pcasvm"  # of all its files


def refuse_missing(options: Any) -> None:
    """Refuse folders and files that are not there.

    Raises:
        FileNotFoundError: one is missing; the message says what was expected.
        NotADirectoryError: a file is named where a folder is expected.
        ValueError: it has annotations that are not read.
    """
    for name in ("images", "train", "masks", "atlas"):
        folder = getattr(options, name, None)
        if name == "masks" and folder is not None and folder.is_file() and name_annotation(folder):
            refuse_unread(folder)
            continue
        alone = name == "images" and options.name == "explain"  # which takes one photo, too
        if folder is not None and not (folder.is_dir() or (alone and folder.is_file())):
            if folder.is_file():
                more = f", or a file of annotations ({', '.join(READ)})" if name == "masks" else ""
                raise NotADirectoryError(f"{folder} is a file, but a folder is expected, such as {folder.parent}{more}")
            if name == "atlas":
                raise FileNotFoundError(
                    f"there is no atlas in {folder}: make one with '{RUN} atlas PHOTOS'{_hint_at(folder)}"
                )
            if name == "masks":
                raise FileNotFoundError(f"there is no folder of masks {folder}{_hint_at(folder)}")
            arranged = f"as in {folder / 'cat' / '1.jpg'} and {folder / 'dog' / '2.jpg'}"
            raise FileNotFoundError(
                f"there is no folder {folder}: give a folder of images, or with one folder for each "
                f"class, {arranged}{_hint_at(folder)}"
            )
    model = getattr(options, "model", None)
    if model is not None and not model.is_file():
        here = sorted(path.name for path in (model.parent.iterdir() if model.parent.is_dir() else ())
                      if path.suffix in (".safetensors", ".onnx"))  # fmt: skip
        way = _hint_at(model) or f": make one with '{RUN} fit PHOTOS'"
        if here and model == MODEL:
            way = f"; there is {', '.join(here)}: name it, --model {here[0]}"
        raise FileNotFoundError(f"there is no model {model}{way}")
    weights = getattr(options, "weights", None)
    if weights is not None and not weights.is_file():
        raise FileNotFoundError(f"there is no weights file {weights}{_hint_at(weights)}")


def _hint_at(path: Path) -> str:
    """Return which name beside a path that is missing was meant, in words; empty if none is near."""
    from difflib import get_close_matches

    near = get_close_matches(
        path.name, [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else [], n=1
    )
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def refuse_unwritable(options: Any) -> None:
    """Refuse places that cannot be written.

    Raises:
        OSError: one cannot be written; the message names it as it was typed.
    """
    from pytorch_grad_cam_pcasvm.runtime.files import check_writable

    out = getattr(options, "out", None)
    if out is not None:
        page = getattr(options, "single_file", False) and out.suffix.lower() in (".html", ".htm")
        check_writable(out, folder=not (page or options.writes_file))
    if getattr(options, "page", None) is not None:
        check_writable(options.page, folder=True)


def refuse_model(options: Any) -> None:
    """Refuse a file that is no model, and options that contradict a model's header.

    Raises:
        ValueError: it is damaged, of another kind, or has not what is to be explained.
    """
    model = getattr(options, "model", None)
    if model is None:
        return
    if model.suffix == ".onnx":
        if options.name != "explain":
            raise ValueError(
                f"--model {model} is a file from 'export', which 'explain' alone takes: name the model it was made of, "
                f"--model {MODEL}"
            )
        return
    is_own = str(read_header(model).get("format", "")).startswith(_WRITER)
    if not is_own and model.suffix not in (".skops", ".joblib", ".pkl"):
        with model.open("rb") as file:
            if file.read(1) != b"\x80":  # of a pickle, which is told as such when it is read
                raise ValueError(f"{model} is no model, or is truncated or damaged: make one with '{RUN} fit PHOTOS'")
    description = read_description(model)
    if description is not None:
        refuse_targets(options, description.classes, description.components or 0, dense=description.is_dense)
    elif options.backbone is None:
        raise ValueError(
            f"{model} is a head alone, which does not say what it was fitted behind: add --backbone NAME, or make a "
            f"model with '{RUN} fit'"
        )


def refuse_targets(options: Any, classes: Sequence[Any], components: int, *, dense: bool) -> None:
    """Refuse classes, components and positions that a head has not.

    Args:
        options: of the command line; those that it has not are not looked at.
        classes: of the head.
        components: how many it has.
        dense: whether it decides at every position.

    Raises:
        ValueError: one is typed.
    """
    if getattr(options, "at", None) is not None and not dense:
        raise ValueError("--at names a position, but this head decides once for each image: leave it out")
    if (getattr(options, "components", None) or 0) > components:
        raise ValueError(f"--components {options.components}, but the head has {components} components")
    names = [str(label) for label in classes]
    for flag, name in (("--class", "category"), ("--versus", "versus")):
        typed = getattr(options, name, None)
        if typed is not None and typed not in names:
            known_classes = f"its classes are {', '.join(names)}" if names else "it has no classes"
            raise ValueError(f"{flag}: this head has no class {typed!r}, {known_classes}")
    if getattr(options, "category", None) is not None and options.category == options.versus:
        raise ValueError(f"--class and --versus are both {options.category}: name two classes")


def refuse_photos(options: Any) -> None:
    """Refuse photos that a command has no use for, by how many there are, and by the names of their folders.

    Raises:
        ValueError: they are arranged otherwise than they must be, or too few.
    """
    if options.name != "check":  # which says it among what it finds
        tell_left_out(options)
        _refuse_wrapped(options)
    if options.name == "fit":
        _refuse_training(options)
    elif options.name in ("atlas", "evaluate") or (options.name == "explain" and options.model.suffix != ".onnx"):
        classes_in(options.images, "test")
    elif options.name == "export" and options.images is not None:
        name_classes(options.images)
    if options.name == "evaluate":
        _refuse_annotations(options.masks)
        description = read_description(options.model)
        if description is not None and not description.is_dense:
            refuse_few(options)


def _refuse_annotations(masks: Path | None) -> None:
    """Refuse a folder that is named as one of masks, and has none.

    Raises:
        FileNotFoundError: it has other files alone, which are named.
    """
    if masks is None or masks.is_file():
        return
    seen = walk(masks)[0]
    if any(is_photo(path) or is_read(path) for path in seen):
        return
    raise FileNotFoundError(f"{masks} has no masks: {describe_others(seen, masks) or 'it is empty'}")


def _refuse_wrapped(options: Any) -> None:
    """Refuse a folder whose classes are those of the single folder in it.

    Raises:
        ValueError: it is one.
    """
    root = getattr(options, "images", None)
    if root is None or not root.is_dir() or not (listing := list_files(root)).photos:
        return
    if (inside := listing.photo_folder) != root:
        line = write_line(options, options.name, images=inside)
        if options.name in ("fit", "evaluate") and options.masks is None and listing.drawn:
            line += f", or with the masks: {use_drawn(listing, listing.drawn, options)}"
        raise ValueError(f"{root} has its folders of photos in {inside}: did you mean {line}?")


def _refuse_training(options: FitOptions) -> None:
    """Refuse photos that no head can be fitted on, and what is no name of a backbone; name the class of good photos."""
    parse_origin(options.backbone)
    _take_good_photos(options)
    of_good_parts = learns_from_good_parts(options)
    if options.rate is not None and not of_good_parts and options.masks is None:
        raise ValueError(
            f"--rate is for what learns from good parts alone, such as --classifier {GOOD_PARTS[0]}, or is fitted with "
            "--masks"
        )
    if options.skip_suspicious and options.classifier != "pca":
        raise ValueError("--skip-suspicious is for --classifier pca, which learns from good photos alone: leave it out")
    classes = classes_in(options.images, "train")
    if of_good_parts:
        _refuse_several_classes(options, classes)
    elif options.masks is None:
        classes = two_classes(options, classes)
    _check_normal(options, classes, of_good_parts)
    if options.groups is not None:
        has_classes = classes is not None and not of_good_parts
        name_objects(list_photos(options.images), options.images, options.groups, has_classes=has_classes)


def _take_good_photos(options: FitOptions) -> None:
    """Let a PCA learn from a folder of good photos alone, by its name or ``--normal``, if nothing else is typed."""
    if options.classifier != type(options).classifier or options.masks is not None or options.groups is not None:
        return
    if any((options.kernel, options.C, options.gamma, options.search, options.class_weight)):
        return
    root, classes = options.images, name_classes(options.images)
    names = [root.resolve().name] if classes is None else list(classes)
    if len(names) > 1 or list_files(root).drawn is not None or (options.normal or find_normal(names)) != names[0]:
        return
    options.classifier, options.pool, options.normal = GOOD_PARTS[0], options.pool or "dense:3", None
    options.check()
    print(f"all photos are taken for good ones, being in {names[0]!r}: what is unlike them is found")


def learns_from_good_parts(options: FitOptions) -> bool:
    """Return whether the estimator learns from good parts alone, without classes."""
    if options.classifier in CLASSIFIERS:
        return options.classifier in GOOD_PARTS
    from sklearn.base import is_outlier_detector

    from pytorch_grad_cam_pcasvm.studio.cli.choosing import make_classifier

    estimator = make_classifier(options, 0)
    return is_outlier_detector(estimator) or not hasattr(estimator, "predict")


def _refuse_several_classes(options: FitOptions, classes: Sequence[str] | None) -> None:
    """Refuse images of several classes for an estimator that learns from good parts alone."""
    if options.masks is not None:
        raise ValueError(
            f"--classifier {options.classifier} learns from good parts alone: leave out --masks, and measure with "
            "evaluate --masks"
        )
    if classes is not None and len(classes) > 1 and options.groups != 1:
        raise ValueError(
            f"--classifier {options.classifier} learns from good parts alone, but {options.images} has folders of "
            f"{', '.join(classes)}: name that of the good ones, such as {options.images / classes[0]}"
        )


def _check_normal(options: FitOptions, classes: Sequence[str] | None, of_good_parts: bool) -> None:
    """Refuse a normal class that there is not; say that one may be it."""
    if options.normal is None:
        likely = find_normal(classes)
        if options.masks is not None:  # what is outside of them is the background
            return
        if likely and not of_good_parts and (options.pool or "").startswith("dense"):
            options.normal = likely
            print(f"{likely!r} is taken for the class of good photos (another: --normal)")
        elif likely and not of_good_parts:
            print(
                f"hint: if {likely!r} means that there is nothing to find, add --normal {likely}: maps then show what "
                "speaks against it"
            )
        return
    if of_good_parts:
        raise ValueError(f"--classifier {options.classifier} learns from good parts alone: leave out --normal")
    holders = {path.parent.name for path in list_photos(options.images)} if options.masks is not None else set()
    if options.normal not in (*(classes or ()), *holders):  # with masks, flat photos without one may be good
        folders = f"the folders are {', '.join(classes)}" if classes else "there are no folders of classes"
        near = [name for name in (*(classes or ()), *sorted(holders)) if name.lower() == options.normal.lower()]
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"--normal: there is no class {options.normal!r}, {folders}{meant}")


def refuse_few(options: EvaluateOptions) -> None:
    """Refuse photos that are too few for the first look, before anything is computed."""
    count = min(options.count, len(list_photos(options.images)))
    if not options.all_images and count < least_images(shares=False):
        raise ValueError(
            f"{count} photos are too few for an answer: give at least {least_images(shares=True)}, in the "
            "folder and with --count; or measure these all the same, with --all-images"
        )
