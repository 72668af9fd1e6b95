"""The command line: fit a head on a folder of images, explain another folder, browse the maps, evaluate them."""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from pytorch_grad_cam_pcasvm.cli.arguments import parser

# What messages call what is typed here.
_TYPED = {
    "skip_bad_images=True": "--skip-bad-images",
    "verify=True": "--verify",
    "another folder as out=": "another folder as --out",
    "atlas.build(..., out=": "the atlas command (--out ",
    "runtime='node_modules/onnxruntime-web'": "--runtime node_modules/onnxruntime-web",
    "reshape_transform='tokens'": "--tokens",
    "PCASVMNet(backbone, head, layer=..., pool=...)": "--features and --pool",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command-line arguments; None: those that Python was started with.

    Returns:
        The exit status: 0, or 2 on an error, or 130 if interrupted.
    """
    options = parser().parse_args(arguments)
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


def _told(message: Any, category: Any, *where: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
