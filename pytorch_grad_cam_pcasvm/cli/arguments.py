"""The arguments of the command line."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli import commands, exporting
from pytorch_grad_cam_pcasvm.cli.fitting import fit
from pytorch_grad_cam_pcasvm.cli.networks import RUN

# What the commands need is imported when they run: help is asked for more often.
_METHODS = sorted(package._NAMES["methods"].split())

_EXAMPLE = f"""example:
  {RUN} fit --images photos/train --backbone mobilenet_v2 --layer features --out head.safetensors
  {RUN} atlas --images photos/test --backbone mobilenet_v2 --layer features --head head.safetensors --out atlas
  {RUN} explore atlas --out explorer
  {RUN} evaluate --images photos/test --backbone mobilenet_v2 --layer features --head head.safetensors --out evaluation
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; the parsed options have ``run``, which runs the command."""
    parser = argparse.ArgumentParser(
        prog=RUN,
        description="Signed attention maps through a PCA and an SVM, for a folder of images.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    places = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], None], text: str, example: str) -> argparse.ArgumentParser:
        added = places.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example:\n  {RUN} {name} {example}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    at = "--images photos/{} --backbone mobilenet_v2 --layer features"
    fitted = command("fit", fit, "fit a scaler, a PCA and an SVM on the features of images, in one folder per class",
                  at.format("train") + " --out head.safetensors")  # fmt: skip
    of_network(fitted, fits=True)
    _of_reading(fitted)
    fitted.add_argument("--components", type=int, default=16, help="number of principal components (default: 16)")
    fitted.add_argument("--kernel", default="rbf", choices=["linear", "rbf", "poly"], help="SVM kernel (default: rbf)")
    fitted.add_argument("--C", type=float, help="SVM: cost of a mistake (default: 1)")
    fitted.add_argument("--gamma", type=_gamma, help="SVM: width of the kernel (default: scale)")
    fitted.add_argument(
        "--search", action="store_true", help="choose C and gamma among twelve pairs, by cross-validation"
    )
    fitted.add_argument("--class-weight", choices=["balanced"],
                     help="balanced: every class counts the same, however few images it has")  # fmt: skip
    fitted.add_argument("--out", required=True, type=Path, metavar="FILE", help="file for the head (.safetensors)")
    fitted.add_argument("--no-pictures", action="store_true",
                        help="do not store names and small pictures of the support vectors with the head")  # fmt: skip
    _of_bad_images(fitted)
    build = command("atlas", commands.atlas, "explain every image in a folder once, and store the maps",
                    at.format("test") + " --head head.safetensors --out atlas")  # fmt: skip
    of_network(build)
    _of_reading(build)
    of_maps(build)
    build.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder for the atlas")
    of_method(build)
    build.add_argument("--engine", default="local", choices=["local", "ray"], help="where to run (default: local)")
    build.add_argument("--processes", type=int, help="number of processes, each with its share of the threads or a GPU")
    _of_bad_images(build)
    build.add_argument("--verify", action="store_true", help="compare all images with existing shards, not a sample")
    evaluate = command("evaluate", commands.evaluate,
                       "measure whether the maps can be trusted, and write a report page",
                       at.format("test") + " --head head.safetensors --out evaluation")  # fmt: skip
    of_network(evaluate)
    of_maps(evaluate)
    evaluate.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder for the page and its JSON")
    evaluate.add_argument("--method", action="append", choices=_METHODS, metavar="NAME",
                          help="method; may be repeated (default: ClosedFormGradCAM and ContributionCAM)")  # fmt: skip
    evaluate.add_argument("--batch-size", type=int, default=16, help="images to explain at a time (default: 16)")
    evaluate.add_argument("--count", type=int, default=200, help="number of images, chosen at random (default: 200)")
    evaluate.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    explore = command("explore", commands.explore, "write a page for browsing an atlas", "atlas --out explorer")
    explore.add_argument("atlas", type=Path, help="folder of the atlas")
    explore.add_argument("--out", type=Path, default=Path("explorer"), help="folder or file (default: explorer)")
    explore.add_argument(
        "--head", action="append", default=[], metavar="NAME=FILE", help="another head for the page; may be repeated"
    )
    explore.add_argument("--single-file", action="store_true", help="write a single file, which is easy to send")
    written = command("export", exporting.export, "write a single file that computes scores and maps without PyTorch",
                      at.format("test") + " --head head.safetensors --out explainer.onnx")  # fmt: skip
    of_network(written, needs_images=False)
    of_maps(written)
    of_method(written)
    written.set_defaults(batch_size=16)
    written.add_argument("--components", type=int, help="number of components to map, from the first on (default: all)")
    written.add_argument("--out", required=True, type=Path, metavar="FILE", help="file to write (.onnx)")
    written.add_argument("--page", type=Path, metavar="FOLDER", help="also write a page that explains photos")
    written.add_argument("--runtime", type=Path, default=Path("node_modules/onnxruntime-web"), metavar="FOLDER",
                         help="for --page: from npm install (default: node_modules/onnxruntime-web)")  # fmt: skip
    explain = command("explain", exporting.explain, "draw maps with a file from 'export', without PyTorch",
                      "--model explainer.onnx --images photos/test --out maps")  # fmt: skip
    explain.add_argument("--model", required=True, type=Path, metavar="FILE", help="file from 'export' (.onnx)")
    explain.add_argument("--images", required=True, type=Path, metavar="FOLDER", help="images, in any subfolders")
    explain.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder for pictures and values.csv")
    _of_bad_images(explain)
    return parser


def _gamma(text: str) -> Any:
    try:
        return text if text in ("scale", "auto") else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"scale, auto or a number is expected, got {text!r}") from None


def of_maps(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which maps: of which head, from which start."""
    parser.add_argument("--head", required=True, type=Path, metavar="FILE", help="head from 'fit', Head.save or skops")
    parser.add_argument("--tokens", action="store_true", help="for transformers: find the grid of the patches")
    begin = "where a target is undecided (neutral, the default), the mean of the training images, or zeros"
    parser.add_argument("--baseline", default="neutral", choices=["neutral", "mean", "zero"], help=f"start: {begin}")
    parser.add_argument("--train", type=Path, metavar="FOLDER",
                        help="images that the head was fitted on: for layers whose means it lacks")  # fmt: skip


def of_method(parser: argparse.ArgumentParser) -> None:
    """Add the method."""
    parser.add_argument("--method", default="ContributionCAM", choices=_METHODS, metavar="NAME",
                        help="ContributionCAM (default), ClosedFormGradCAM, ...")  # fmt: skip


def of_network(parser: argparse.ArgumentParser, needs_images: bool = True, fits: bool = False) -> None:
    """Add the arguments that define a network, and how pictures are prepared for it."""
    help_text = "folder of images, or with one subfolder per class" + " (default: noise)" * (not needs_images)
    parser.add_argument("--images", required=needs_images, type=Path, metavar="FOLDER", help=help_text)
    parser.add_argument("--backbone", required=True, metavar="NAME",
                        help="a torchvision model, timm:NAME, or module:function that returns your own")  # fmt: skip
    parser.add_argument("--weights", metavar="FILE", help="state dict (default: the library's weights, downloaded)")
    layer = "layer that the features come from" if fits else "layer of the maps; auto: compare several on the images"
    parser.add_argument("--layer", required=True, metavar="NAME", help=layer)
    features = "the same as --layer" if fits else "layer that the features come from (default: --layer)"
    parser.add_argument("--features", metavar="NAME", help=features)
    parser.add_argument("--pool", default="mean", help="feature pooling: mean (default), max, gem, cls, cls+mean, none")
    parser.add_argument("--resize", choices=["stretch", "pad", "crop"],
                        help="what the network sees: the whole picture, stretched to a square or in a frame, or only "
                        "its middle (default: " + ("stretch" if fits else "as the head was fitted") + ")")  # fmt: skip
    parser.add_argument("--white-level", type=float, metavar="NUMBER",
                        help="white in pictures of 16 bits, such as 4095 (default: 65535)")  # fmt: skip
    parser.add_argument("--no-cache", action="store_true", help="do not keep features, or use those that were kept")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if available)")
    parser.set_defaults(skip_bad_images=False, workers=0)


def _of_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=64, help="number of images to read at a time (default: 64)")
    parser.add_argument("--workers", type=int, default=0, help="number of processes that read images (default: 0)")


def _of_bad_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-bad-images", action="store_true", help="list images that cannot be read, and continue")
