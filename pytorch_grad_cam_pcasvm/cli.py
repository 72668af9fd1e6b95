"""The command line: fit a head on a folder of images, explain another folder, browse the maps, evaluate them."""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pytorch_grad_cam_pcasvm as package

# What the commands need is imported when they run: help is asked for more often.
_METHODS = sorted(package._NAMES["cams"].split())

# What messages call what is typed here.
_TYPED = {
    "skip_bad_images=True": "--skip-bad-images",
    "verify=True": "--verify",
    "another folder as out=": "another folder as --out",
    "atlas.build(..., out=": "the atlas command (--out ",
    "reshape_transform='tokens'": "--tokens",
    "PCASVMNet(backbone, head, layer=..., pool=...)": "--features and --pool",
}

# Folders of these names are hardly classes.
_SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")
_IMBALANCED = 0.8  # the share of the largest class from which accuracy says little
_COMPARED = 50  # images, for --layer auto

_RUN = "python -m pytorch_grad_cam_pcasvm"
_EXAMPLE = f"""example:
  {_RUN} fit --images photos/train --backbone mobilenet_v2 --layer features --out head.safetensors
  {_RUN} atlas --images photos/test --backbone mobilenet_v2 --layer features --head head.safetensors --out atlas
  {_RUN} explore atlas --out explorer
  {_RUN} evaluate --images photos/test --backbone mobilenet_v2 --layer features --head head.safetensors --out evaluation
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command-line arguments; None: those that Python was started with.

    Returns:
        The exit status: 0, or 2 on an error, or 130 if interrupted.
    """
    options = _parser().parse_args(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = _told  # type: ignore[assignment]
        try:
            options.run(options)
        except KeyboardInterrupt:
            print("stopped: finished work is kept; run the same command again to resume", file=sys.stderr)
            return 130
        # Whatever a library raises: who types a command is not helped by a traceback.
        except Exception as error:
            told = " ".join(str(error).split()) or type(error).__name__
            for option, typed in _TYPED.items():
                told = told.replace(option, typed)
            print(f"error: {told}", file=sys.stderr)
            return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_RUN,
        description="Signed attention maps through a PCA and an SVM, for a folder of images.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], None], text: str, example: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example:\n  {_RUN} {name} {example}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    at = "--images photos/{} --backbone mobilenet_v2 --layer features"
    fit = command("fit", _fit, "fit scaler, PCA and SVM on the features of a folder with one folder per class",
                  at.format("train") + " --out head.safetensors")  # fmt: skip
    _of_network(fit)
    _of_reading(fit)
    fit.add_argument("--components", type=int, default=16, help="number of principal components (default: 16)")
    fit.add_argument("--kernel", default="rbf", choices=["linear", "rbf", "poly"], help="SVM kernel (default: rbf)")
    fit.add_argument("--class-weight", choices=["balanced"],
                     help="balanced: each class counts the same, however few images it has")  # fmt: skip
    fit.add_argument("--out", required=True, type=Path, metavar="FILE", help="file of the head, .safetensors")
    _of_bad_images(fit)
    build = command("atlas", _atlas, "explain every image of a folder once, and keep the maps",
                    at.format("test") + " --head head.safetensors --out atlas")  # fmt: skip
    _of_network(build)
    _of_reading(build)
    _of_maps(build)
    build.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder of the atlas")
    build.add_argument("--method", default="ContributionCAM", choices=_METHODS, metavar="NAME",
                       help="ContributionCAM (default), ClosedFormGradCAM, ...")  # fmt: skip
    build.add_argument("--engine", default="local", choices=["local", "ray"], help="where to run (default: local)")
    build.add_argument("--processes", type=int, help="number of processes, each with its share of threads or a GPU")
    _of_bad_images(build)
    build.add_argument("--verify", action="store_true", help="compare every image with what is there, not a sample")
    evaluate = command("evaluate", _evaluate, "measure whether the maps can be believed, and write a report page",
                       at.format("test") + " --head head.safetensors --out evaluation")  # fmt: skip
    _of_network(evaluate)
    _of_maps(evaluate)
    evaluate.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder of the page and its JSON")
    evaluate.add_argument("--method", action="append", choices=_METHODS, metavar="NAME",
                          help="may be repeated (default: ClosedFormGradCAM and ContributionCAM)")  # fmt: skip
    evaluate.add_argument("--batch-size", type=int, default=16, help="images to explain at a time (default: 16)")
    evaluate.add_argument("--count", type=int, default=200, help="number of images, chosen at random (default: 200)")
    evaluate.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    explore = command("explore", _explore, "write a page for browsing an atlas", "atlas --out explorer")
    explore.add_argument("atlas", type=Path, help="folder of the atlas")
    explore.add_argument("--out", type=Path, default=Path("explorer"), help="folder, or file (default: explorer)")
    explore.add_argument(
        "--head", action="append", default=[], metavar="NAME=FILE", help="another head, selectable on the page"
    )
    explore.add_argument("--single-file", action="store_true", help="write one file, easy to send")
    return parser


def _of_maps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", required=True, type=Path, metavar="FILE", help="from 'fit', Head.save or skops")
    parser.add_argument("--tokens", action="store_true", help="for a transformer: find the grid of its patches")
    begin = "where a decision is open (neutral, the default), the training images' mean, or zeros"
    parser.add_argument("--baseline", default="neutral", choices=["neutral", "mean", "zero"], help=f"start: {begin}")


def _of_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", required=True, type=Path, metavar="FOLDER", help="images, or one folder per class")
    parser.add_argument("--backbone", required=True, metavar="NAME", help="a torchvision name, or timm:NAME")
    parser.add_argument("--weights", metavar="FILE", help="state dict (default: the library's own, downloaded)")
    parser.add_argument("--layer", required=True, metavar="NAME",
                        help="layer whose activations become maps; auto: compare some on the images")  # fmt: skip
    parser.add_argument("--features", metavar="NAME", help="layer that the features come from (default: --layer)")
    parser.add_argument("--pool", default="mean", help="feature pooling: mean (default), max, gem, cls, cls+mean, none")
    parser.add_argument("--device", help="cuda or cpu (default: cuda, if there is one)")


def _of_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=64, help="images to read at a time (default: 64)")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images (default: 0)")


def _of_bad_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-bad-images", action="store_true", help="list images that cannot be read, and continue")


def _fit(options: Any) -> None:
    import numpy as np
    from sklearn.base import clone
    from sklearn.decomposition import PCA
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    from pytorch_grad_cam_pcasvm.data import Images

    if options.components < 1:
        raise ValueError("--components must be positive")
    if options.out.suffix != ".safetensors":
        raise ValueError(f"--out must end in .safetensors, got {options.out}")
    if not options.out.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {options.out.parent}")
    _refuse_splits(options.images, ("train", "training"))
    backbone, transform = _backbone(options)
    images = Images(options.images, transform, thumbnails=False)
    if images.names is None:
        raise ValueError(f"{options.images} has no classes: give a folder with one folder of images for each class")
    features, numbers, bad = _features(options, backbone, images)
    if options.components > min(features.shape):
        raise ValueError(
            f"{len(features)} images with {features.shape[1]} features have fewer components: lower --components"
        )
    labels = np.array(images.names)[numbers]
    svm = SVC(kernel=options.kernel, class_weight=options.class_weight)
    head = make_pipeline(StandardScaler(), PCA(options.components, random_state=0), svm)
    package.Head.of(head.fit(features, labels)).save(options.out)
    counts = Counter(labels.tolist())
    shares = ", ".join(f"{name} {count} ({count / len(labels):.0%})" for name, count in counts.items())
    print(f"{len(counts)} classes: {shares}")
    _tell_bad(bad)
    folds = StratifiedKFold(min(5, *counts.values())) if min(counts.values()) > 1 else None
    if folds is None:
        print("no cross-validation, which needs two images of each class")
    elif min(len(rest) for rest, _ in folds.split(features, labels)) < options.components:
        print(f"no cross-validation: its parts have fewer than {options.components} images, lower --components")
    else:
        guessed = cross_val_predict(clone(head), features, labels, cv=folds)
        print(f"{folds.n_splits}-fold cross-validation: {_accuracy(labels.tolist(), labels == guessed)}")
    training = head.score(features, labels)
    print(f"{training:.0%} correct on the images it was fitted on: training accuracy, not a test score")
    ((largest, count),) = counts.most_common(1)
    if count > _IMBALANCED * len(labels) and options.class_weight is None:
        print(
            f"hint: to call every image {largest!r} would be {count / len(labels):.0%} correct, too. Look at the "
            "balanced accuracy, and try --class-weight balanced"
        )
    print(f"wrote {options.out}: {options.components} components")


def _features(options: Any, backbone: Any, images: Any) -> tuple[Any, Any, list[str]]:
    """Return features, class numbers, and the names of images that cannot be read and were left out."""
    from torch.utils.data import DataLoader, Subset

    def extracted(data: Any) -> tuple[Any, Any]:
        loader = DataLoader(data, batch_size=options.batch_size, num_workers=options.workers)
        return package.extract_features(backbone, loader, _source(options), pool=_pool(options))

    try:
        return *extracted(images.data), []
    except (OSError, SyntaxError) as error:  # which image was it?
        bad: dict[int, str] = {}
        for row in range(len(images)):
            bad |= images.read([row]).bad
            if bad and not options.skip_bad_images:
                ((row, why),) = bad.items()
                what = f"{images.id(row)} cannot be read ({why}): mend or delete it, or add --skip-bad-images"
                raise OSError(what) from error
        if not bad:
            raise
    good = [row for row in range(len(images)) if row not in bad]
    if not good:
        raise ValueError(f"none of the {len(images)} images in {options.images} can be read")
    return *extracted(Subset(images.data, good)), [images.id(row) for row in bad]


def _tell_bad(names: Sequence[str]) -> None:
    if names:
        shown = ", ".join(names)
        print(f"{len(names)} image{'s' if len(names) > 1 else ''} skipped, which cannot be read: {shown}")


def _accuracy(labels: Sequence[Any], correct: Any) -> str:
    """Return what part is correct: of N images, of each class on average, and of each class."""
    counts, hits = Counter(labels), Counter(label for label, is_hit in zip(labels, correct, strict=True) if is_hit)
    of_class = {label: hits[label] / count for label, count in sorted(counts.items())}
    balanced = sum(of_class.values()) / len(of_class)
    by_class = ", ".join(f"{label} {part:.0%}" for label, part in of_class.items())
    return f"{hits.total() / len(labels):.0%} correct, balanced accuracy {balanced:.0%} ({by_class})"


def _refuse_splits(root: Path, wanted: Sequence[str]) -> None:
    """Refuse a folder whose folders are named as the parts of a data set, and say which of them was meant."""
    from pytorch_grad_cam_pcasvm.data import class_folders

    folders = class_folders(root) if root.is_dir() else []
    splits = [name for name in folders if name.lower() in _SPLITS]
    if splits and (len(splits) > 1 or splits == folders):  # one among others may be a class: bus, car, train
        meant = next((name for name in splits if name.lower() in wanted), splits[0])
        named = " and ".join([", ".join(splits[:-1]), splits[-1]] if len(splits) > 1 else splits)
        looks = "look like splits, not classes" if len(splits) > 1 else "looks like a split, not a class"
        are = "folders are" if len(splits) > 1 else "only folder is"
        raise ValueError(f"the {are} named {named}, which {looks}: did you mean --images {root / meant}?")


def _atlas(options: Any) -> None:
    from pytorch_grad_cam_pcasvm import atlas

    _refuse_splits(options.images, ("test", "testing"))
    net, transform = _network(options)
    method = getattr(package, options.method)
    layer = _layer(options, net, transform)
    store = atlas.build(
        net,
        options.images,
        [layer],
        options.out,
        method=method,
        transform=transform,
        batch_size=options.batch_size,
        workers=options.workers,
        engine=options.engine,
        processes=options.processes,
        skip_bad_images=options.skip_bad_images,
        verify=options.verify,
        **_options(options, [method], net, layer, transform)[method],
    )
    print(store)
    if store.labels is not None and store.head.classes_ is not None:
        try:
            print(f"{len(store)} images: {_accuracy(store.names(store.labels), store.correct)}")
        except ValueError as error:  # the atlas is complete
            print(f"whether they are classified correctly cannot be told: {error}")
    _tell_bad(store.manifest["bad"])
    print(f"browse it: {_RUN} explore {options.out}")


def _evaluate(options: Any) -> None:
    from pytorch_grad_cam_pcasvm import evaluation

    for name, least in (("count", 1), ("batch_size", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    _refuse_splits(options.images, ("test", "testing"))
    net, transform = _network(options)
    names = options.method or ["ClosedFormGradCAM", "ContributionCAM"]
    methods = {name: getattr(package, name) for name in names}
    layer = _layer(options, net, transform)
    given = _options(options, [*methods.values()], net, layer, transform)
    study = evaluation.Study(
        net,
        options.images,
        [layer],
        {name: (method, given[method]) for name, method in methods.items()},
        images=options.count,
        batch_size=options.batch_size,
        seed=options.seed,
        transform=transform,
    )
    _tell_accuracy(study)
    print(f"open {study.report(options.out).resolve().as_uri()}")


def _tell_accuracy(study: Any) -> None:
    """Say how many images of a study are classified correctly, if their folders are named as the head's classes."""
    names, classes = study.source.names, study.net.head.classes_
    if names is None or classes is None or not set(names) & set(classes.tolist()):
        return
    labels, correct = [], []
    for images, numbers, _ in study.batches("accuracy"):
        found = [names[number] for number in numbers]
        labels += found
        correct += [label == guess for label, guess in zip(found, study.net.predict(images).tolist(), strict=True)]
    print(f"{len(labels)} images: {_accuracy(labels, correct)}")


def _layer(options: Any, net: Any, transform: Any) -> str:
    """Return the target layer: the one named, or the one that is recommended after comparing them on the images."""
    if options.layer != "auto":
        return options.layer
    from pytorch_grad_cam_pcasvm import evaluation
    from pytorch_grad_cam_pcasvm.data import Images
    from pytorch_grad_cam_pcasvm.model.modules import device_of, evaluating
    from pytorch_grad_cam_pcasvm.model.trunk import last_blocks

    images = Images(options.images, transform, thumbnails=False)
    x = next((read.images for row in range(len(images)) if (read := images.read([row])).rows), None)
    if x is None:
        raise ValueError(f"none of the {len(images)} images in {options.images} can be read")
    x = x.to(device_of(net))
    backbone, source = net.feature_source(x)
    with evaluating(net):
        candidates = last_blocks(backbone, source, x)[-4:]
    if images.names is None:
        print(f"layer: {candidates[-1]}, the last; with a folder of images for each class layers are compared")
        return candidates[-1]
    reshape = "tokens" if options.tokens else None
    settings = {"images": _COMPARED, "batch_size": min(options.batch_size, 16), "transform": transform}
    found = evaluation.layers(net, options.images, candidates, reshape_transform=reshape, **settings)
    print(found.question)
    return found.settings["recommended"][0]


def _options(options: Any, methods: Sequence[type], net: Any, layer: str, transform: Any) -> dict[type, dict[str, Any]]:
    """Return the options of each method; with the mean at the layer where the head does not know it."""
    from pytorch_grad_cam_pcasvm.cams.baselines import WithBaseline

    common = {"reshape_transform": "tokens"} if options.tokens else {}
    start = {"baseline": options.baseline}
    needed = options.baseline != "zero" and any(issubclass(method, WithBaseline) for method in methods)
    if needed and (options.tokens or layer != _source(options) or options.pool != "mean"):
        from pytorch_grad_cam_pcasvm.data import Images

        images = Images(options.images, transform, thumbnails=False)
        # Of a fixed size: an atlas that is resumed has to start at the same numbers.
        parts = (images.read([*range(len(images))[first : first + 16]]) for first in range(0, len(images), 16))
        start["mean"] = package.mean_activations(net, (part.images for part in parts if part.rows), layer)
        print(f"contributions start near the mean of these images at {layer}")
    return {method: common | (start if issubclass(method, WithBaseline) else {}) for method in methods}


def _explore(options: Any) -> None:
    from pytorch_grad_cam_pcasvm import atlas

    heads = {}
    for given in options.head:
        name, _, path = given.partition("=")
        if not path:
            raise ValueError(f"--head takes NAME=FILE, got {given!r}")
        heads[name] = _head(Path(path))
    page = atlas.load(options.atlas).to_html(options.out, heads=heads or None, single_file=options.single_file)
    print(f"open {page.resolve().as_uri()}")


def _network(options: Any) -> tuple[Any, Callable[[Any], Any]]:
    head = _head(options.head)  # before weights are downloaded
    backbone, transform = _backbone(options)
    return package.PCASVMNet(backbone, head, _source(options), pool=_pool(options)), transform


def _source(options: Any) -> str:
    """Return the name of the layer that the features come from."""
    if options.layer == "auto" and not options.features:
        raise ValueError("--layer auto finds the layer of the maps: name that of the features with --features")
    return options.features or options.layer


def _pool(options: Any) -> str | None:
    return None if options.pool == "none" else options.pool


def _head(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no head {path}: make one with '{_RUN} fit', or net.head.save(path)")
    if path.suffix != ".skops":
        return package.Head.load(path)
    try:
        from skops import io
    except ImportError as error:
        raise ImportError("a head in a .skops file needs skops: pip install skops") from error
    return io.load(path)


def _backbone(options: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a network in evaluation mode, and the transform that its weights were trained with."""
    library, _, name = options.backbone.rpartition(":")
    given = options.weights is not None
    if library == "timm":
        try:
            import timm
            from timm import data
        except ImportError as error:
            raise ImportError("timm:NAME needs timm: pip install timm") from error
        net = timm.create_model(name, pretrained=not given, num_classes=0)
        transform: Any = data.create_transform(**data.resolve_model_data_config(net))  # type: ignore[attr-defined]
    elif not library:
        import torchvision

        if name not in torchvision.models.list_models():
            near = get_close_matches(name, torchvision.models.list_models(), n=1)
            hint = f"did you mean {near[0]!r}? For" if near else "for"
            raise ValueError(f"torchvision has no backbone {name!r}; {hint} one from timm: --backbone timm:{name}")
        weights = torchvision.models.get_model_weights(name).DEFAULT
        try:
            net = torchvision.models.get_model(name, weights=None if given else weights)
        except OSError as error:
            raise OSError(f"the weights cannot be downloaded ({error}): give a file, --weights FILE") from error
        transform = weights.transforms()
    else:
        raise ValueError(f"--backbone must be a torchvision name, or timm:NAME, got {options.backbone!r}")
    if given:
        state = _state(Path(options.weights))
        try:
            net.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(
                f"{options.weights} has no weights of {name}: it begins with {next(iter(state), 'nothing')!r}, and "
                f"{next(iter(net.state_dict()))!r} is expected"
            ) from error
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return net.eval().to(device), transform


def _state(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no weights file {path}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def _told(message: Any, category: Any, *where: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
