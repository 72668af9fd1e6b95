"""The arguments of the command line."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli import commands, drawing, exporting
from pytorch_grad_cam_pcasvm.cli.fitting import fit
from pytorch_grad_cam_pcasvm.cli.networks import RUN

# What the commands need is imported when they run: help is asked for more often.
_METHODS = sorted(package._NAMES["methods"].split())

_AT = "--images photos/{} --backbone mobilenet_v2 --layer features"
_NETWORK = "--backbone mobilenet_v2 --layer features"
_EXAMPLE = f"""example, of photos with one folder per class:
  {RUN} fit --images photos/train {_NETWORK} --out head.safetensors
  {RUN} explain --images photos/test {_NETWORK} --head head.safetensors --out maps
  {RUN} evaluate --images photos/test {_NETWORK} --head head.safetensors --out evaluation
  {RUN} atlas --images photos/test {_NETWORK} --head head.safetensors --out atlas
  {RUN} explore atlas --out explorer
  {RUN} export --images photos/test {_NETWORK} --head head.safetensors --out line.onnx
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; the parsed options have ``run``, which runs the command."""
    parser = argparse.ArgumentParser(
        prog=RUN,
        description="Signed attention maps through a PCA and a classifier, for a folder of images.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    places = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_fit, _add_explain, _add_evaluate, _add_atlas, _add_explore, _add_export):  # as they are used
        add(places)
    return parser


def _command(places: Any, name: str, run: Callable[[Any], None], text: str, example: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = places.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  {RUN} {name} {example}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # writes_file: --out is a file; resumes: what is finished is kept, and not done again.
    command.set_defaults(run=run, writes_file=False, resumes=False)
    return command


def _add_fit(places: Any) -> None:
    text = "fit scaler, PCA and classifier on folders of photos: a head"
    example = _AT.format("train") + " --out head.safetensors"
    example += f"\n  {RUN} fit {_AT.format('good')} --pool dense:3 --classifier neighbours --out parts.safetensors"
    command = _command(places, "fit", fit, text, example)
    of_network(command, fits=True)
    _of_reading(command)
    command.add_argument("--classifier", default="svm", metavar="NAME",
                         help="svm (default), forest, boosting, or module:Class of scikit-learn's kind; of good parts "
                         "alone: neighbours (distance to the nearest), residual (what a PCA leaves out)")  # fmt: skip
    command.add_argument("--components", type=int,
                         help="number of principal components (default: 16; 8 for forest and boosting, 64 for "
                         "neighbours)")  # fmt: skip
    command.add_argument("--normal", metavar="CLASS",
                         help="the class that is an absence, such as good: maps then show the evidence for any other "
                         "class against it, also where it is predicted")  # fmt: skip
    command.add_argument("--masks", type=Path, metavar="DIR",
                         help="--pool dense: pictures of where classes are, to label patches")  # fmt: skip
    command.add_argument("--purity", type=float, default=0.0, metavar="SHARE",
                         help="--masks: leave out patches less of which has one label (default: 0)")  # fmt: skip
    command.add_argument("--sample", type=_amount, metavar="NUMBER",
                         help="--pool dense: patches of each image, a number or a fraction (default: as many as are "
                         "20,000 in all, for neighbours 50,000)")  # fmt: skip
    command.add_argument("--coreset", type=_amount, metavar="NUMBER",
                         help="patches to keep, far from each other, a number or a fraction (default: all; of "
                         "neighbours 0.1)")  # fmt: skip
    command.add_argument("--kernel", choices=["linear", "rbf", "poly"], help="SVM kernel (default: rbf)")
    command.add_argument("--C", type=float, help="SVM: cost of a mistake (default: 1)")
    command.add_argument("--gamma", type=_gamma, help="SVM: width of the kernel (default: scale)")
    command.add_argument(
        "--search", action="store_true", help="choose C and gamma among twelve pairs, by cross-validation"
    )
    command.add_argument(
        "--class-weight", choices=["balanced"], help="balanced: every class counts the same, however few images it has"
    )
    command.add_argument("--out", required=True, type=Path, metavar="FILE", help="file for the head (.safetensors)")
    command.set_defaults(writes_file=True, resumes=True)
    command.add_argument("--no-pictures", action="store_true",
                        help="do not store names and small pictures of the support vectors with the head")  # fmt: skip
    _of_engine(command)
    _of_bad_images(command)


def _add_atlas(places: Any) -> None:
    text = "explain a whole folder once: files for explore"
    example = _AT.format("test") + " --head head.safetensors --out atlas"
    command = _command(places, "atlas", commands.atlas, text, example)
    of_network(command)
    _of_reading(command)
    of_maps(command)
    command.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder for the atlas")
    command.set_defaults(resumes=True)
    of_method(command)
    command.add_argument("--patches", type=int, default=4, metavar="NUMBER",
                         help="--pool dense: patches to keep of each image (default: 4)")  # fmt: skip
    _of_engine(command)
    _of_bad_images(command)
    command.add_argument("--verify", action="store_true", help="compare all images with existing shards, not a sample")


def _add_evaluate(places: Any) -> None:
    text = "measure whether maps can be trusted: a report page"
    example = _AT.format("test") + " --head head.safetensors --out evaluation"
    command = _command(places, "evaluate", commands.evaluate, text, example)
    of_network(command)
    of_maps(command)
    command.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder for the page and its JSON")
    command.add_argument("--masks", type=Path, metavar="DIR",
                         help="pictures of where defects are, named as the images; none where is none")  # fmt: skip
    command.add_argument("--method", action="append", choices=_METHODS, metavar="NAME",
                          help="method; may be repeated (default: ClosedFormGradCAM and ContributionCAM; without a "
                          "gradient ContributionCAM and LIFTCAM)")  # fmt: skip
    command.add_argument("--batch-size", type=int, default=16, help="images to explain at a time (default: 16)")
    command.add_argument("--count", type=int, default=200, help="number of images, chosen at random (default: 200)")
    command.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    command.add_argument("--minutes", type=float, default=2, metavar="NUMBER",
                         help="how long it may take (default: 2); the page stands after the first look")  # fmt: skip
    command.add_argument("--all-images", action="store_true",
                         help="measure all of these, also where a part of them gives a clear answer, however long it "
                         "takes")  # fmt: skip


def _add_explore(places: Any) -> None:
    text = "browse an atlas: a page that works offline"
    command = _command(places, "explore", commands.explore, text, "atlas --out explorer")
    command.add_argument("atlas", type=Path, help="folder of the atlas")
    command.add_argument("--out", type=Path, default=Path("explorer"), help="folder or file (default: explorer)")
    _of_trust(command)
    command.add_argument(
        "--head", action="append", default=[], metavar="NAME=FILE", help="another head for the page; may be repeated"
    )
    command.add_argument("--single-file", action="store_true", help="write a single file, which is easy to send")


def _add_export(places: Any) -> None:
    text = "make one file that explains photos without PyTorch"
    example = _AT.format("test") + " --head head.safetensors --out explainer.onnx"
    command = _command(places, "export", exporting.export, text, example)
    of_network(command, needs_images=False)
    of_maps(command)
    of_method(command)
    command.set_defaults(batch_size=16)
    _of_targets(
        command, "number of components to map, from the first on (default: all; none of heads at every position)"
    )
    command.add_argument("--out", required=True, type=Path, metavar="FILE", help="file to write (.onnx)")
    command.set_defaults(writes_file=True)
    command.add_argument("--page", type=Path, metavar="FOLDER", help="also write a page that explains photos")
    command.add_argument("--runtime", type=Path, default=Path("node_modules/onnxruntime-web"), metavar="FOLDER",
                         help="for --page: from npm install (default: node_modules/onnxruntime-web)")  # fmt: skip


def _add_explain(places: Any) -> None:
    text = "draw the maps of photos: pictures, a table and a gallery"
    example = _AT.format("test") + " --head head.safetensors --out maps"
    example += f"\n  {RUN} explain --images photos/test --model explainer.onnx --out maps"
    command = _command(places, "explain", drawing.explain, text, example)
    command.add_argument("--model", type=Path, metavar="FILE", help="file from 'export' (.onnx), in place of a head")
    of_network(command, needs_backbone=False)
    of_maps(command, needs_head=False)
    of_method(command)
    _of_targets(command, "number of components to draw, those that carry most of the decision; 0: none (default: 3; of "
                "heads at every position none)")  # fmt: skip
    command.add_argument("--outline", action="store_true",
                         help="surround the strongest evidence by lines, in place of colours over it")  # fmt: skip
    command.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder for pictures and values.csv")
    command.add_argument("--batch-size", type=int, default=16, help="images to explain at a time (default: 16)")
    _of_bad_images(command)


def _gamma(text: str) -> Any:
    try:
        return text if text in ("scale", "auto") else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"scale, auto or a number is expected, got {text!r}") from None


def _place(text: str) -> str | tuple[int, ...]:
    parts = text.split(",")
    if text != "max" and not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"a position such as 3,4, or max, is expected, got {text!r}")
    return text if text == "max" else tuple(map(int, parts))


def _amount(text: str) -> int | float:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number or a fraction is expected, got {text!r}") from None


def of_maps(parser: argparse.ArgumentParser, needs_head: bool = True) -> None:
    """Add the arguments that say which maps: of which head, from which start."""
    help_text = "head from 'fit', Head.save or skops"
    parser.add_argument("--head", required=needs_head, type=Path, metavar="FILE", help=help_text)
    _of_trust(parser)
    parser.add_argument("--tokens", action="store_true", help="for transformers: find the grid of the patches")
    begin = "where a target is undecided (neutral, the default), the mean of the training images, or zeros"
    parser.add_argument("--baseline", default="neutral", choices=["neutral", "mean", "zero"], help=f"start: {begin}")
    parser.add_argument("--train", type=Path, metavar="FOLDER",
                        help="images that the head was fitted on: for layers whose means it lacks")  # fmt: skip


def of_method(parser: argparse.ArgumentParser) -> None:
    """Add the method."""
    parser.add_argument("--method", default="ContributionCAM", choices=_METHODS, metavar="NAME",
                        help="ContributionCAM (default), ClosedFormGradCAM, ...")  # fmt: skip


def of_network(
    parser: argparse.ArgumentParser, needs_images: bool = True, fits: bool = False, needs_backbone: bool = True
) -> None:
    """Add the arguments that define a network, and how pictures are prepared for it."""
    help_text = "folder of images, or with one subfolder per class" + " (default: noise)" * (not needs_images)
    parser.add_argument("--images", required=needs_images, type=Path, metavar="FOLDER", help=help_text)
    parser.add_argument("--backbone", required=needs_backbone, metavar="NAME",
                        help="a torchvision model, timm:NAME, or module:function that returns your own")  # fmt: skip
    parser.add_argument("--weights", metavar="FILE", help="state dict (default: the library's weights, downloaded)")
    if fits:
        parser.add_argument("--layer", required=True, metavar="NAME", help="layer that the features come from")
    else:
        parser.add_argument("--layer", required=needs_backbone, action="append", metavar="NAME",
                            help="layer of the maps; may be repeated: finer ones say where; auto: compare layers on "
                            "the images")  # fmt: skip
    features = "the same as --layer" if fits else "layer that the features come from (default: as the head was fitted)"
    parser.add_argument("--features", action="append", metavar="NAME", help=features + "; may be repeated")
    parser.add_argument("--pool",
                        help="feature pooling: mean, max, gem, cls, cls+mean, none; dense: the head decides at every "
                        "position (dense:3: of means over 3x3 neighbours); default: "
                        + ("mean" if fits else "as the head was fitted"))  # fmt: skip
    parser.add_argument("--resize", choices=["stretch", "pad", "crop"],
                        help="what the network sees: the whole picture, stretched to a square or in a frame, or only "
                        "its middle (default: " + ("stretch" if fits else "as the head was fitted") + ")")  # fmt: skip
    parser.add_argument("--white-level", type=float, metavar="NUMBER",
                        help="white in pictures of 16 bits, such as 4095 (default: 65535)")  # fmt: skip
    parser.add_argument("--no-cache", action="store_true", help="do not keep features, or use those that were kept")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if available)")
    parser.set_defaults(skip_bad_images=False, workers=0)


def _of_targets(parser: argparse.ArgumentParser, components: str) -> None:
    parser.add_argument("--class", dest="category", metavar="CLASS",
                        help="the class to explain (default: the predicted one; of heads fitted with --normal any "
                        "other against the normal one; at every position each but the background)")  # fmt: skip
    parser.add_argument("--versus", metavar="CLASS", help="explain the evidence for a class against this one")
    parser.add_argument("--components", type=int, metavar="NUMBER", help=components)
    parser.add_argument("--at", type=_place, metavar="PLACE",
                        help="--pool dense: which position to explain, ROW,COLUMN or max, the strongest of each image "
                        "(default: max)")  # fmt: skip


def _of_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="append", default=[], metavar="TYPE",
                        help="type of estimator that the head's file may have, besides those that are known to be "
                        "harmless; may be repeated")  # fmt: skip


def _of_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=64, help="number of images to read at a time (default: 64)")
    parser.add_argument("--workers", type=int, default=0, help="number of processes that read images (default: 0)")


def _of_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", default="local", choices=["local", "ray"], help="where to run (default: local)")
    parser.add_argument(
        "--processes", type=int, help="number of processes, each with its share of the threads or a GPU"
    )


def _of_bad_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-bad-images", action="store_true", help="list images that cannot be read, and continue")
