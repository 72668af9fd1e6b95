"""The command line: fit a head on a folder of images, explain another folder, browse the maps, evaluate them."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from pytorch_grad_cam_pcasvm.runtime.errors import Fix, UnstableComponentWarning, compose_message
from pytorch_grad_cam_pcasvm.studio.cli.arguments import RUN, parse_arguments
from pytorch_grad_cam_pcasvm.studio.cli.refusals import refuse_missing, refuse_model, refuse_photos, refuse_unwritable

_STARTED = time.monotonic()  # of the process, but for Python itself

# What is typed here for the ways out that are arguments in Python; "" where no option does it.
_TYPED = {
    "build": f"make one with '{RUN} atlas'",
    "jacobian": "",
    "layer": "name the layer that the features came from, and their pool, with --features and --pool",
    "not verify": "leave out --verify",
    "out": "name another folder, --out FOLDER",
    "reshape_transform": "add --tokens, for a transformer",
    "runtime": "run 'npm install onnxruntime-web', and add --runtime node_modules/onnxruntime-web",
    "skip_bad_images": "add --skip-bad-images",
    "trusted": "if you trust them and the file, add --trust for each",
    "backbone": "name it, --backbone NAME, or trust it, --trust NAME",
    "transform": "",
    "weights": "name a file of them, --weights FILE",
    "verify": "compare every image before that, with --verify",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command-line arguments; None: those that Python was started with.

    Returns:
        The exit status: 0, or 2 on an error, or 130 if interrupted.
    """
    logging.getLogger("PIL").addHandler(logging.NullHandler())  # what is wrong with a picture is said with its name
    started = time.monotonic() if "torch" in sys.modules else _STARTED  # a program may call this long after
    options = parse_arguments(list(sys.argv[1:] if arguments is None else arguments))
    options.started = started
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        warnings.simplefilter("ignore", UnstableComponentWarning)  # which fit, and each sheet, say in their own words
        try:
            refuse_missing(options)
            refuse_unwritable(options)
            options.check()
            refuse_model(options)
            _limit_threads(options.threads)
            refuse_photos(options)
            options.run()
        except KeyboardInterrupt:
            has_cache = options.resumes and not getattr(options, "no_cache", False)
            resume = ": finished work is kept; run the same command again to resume" if has_cache else ""
            print(f"stopped{resume}", file=sys.stderr)
            return 130
        # Whatever a library raises: who types a command is not helped by a traceback.
        except Exception as error:
            print(f"error: {' '.join(_words(error).split()) or type(error).__name__}", file=sys.stderr)
            return 2
    return 0


def _limit_threads(threads: int | None) -> None:
    """Let libraries compute with some threads, by default with the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "torch" in sys.modules:  # a program that calls main has chosen already
        if threads is not None:
            sys.modules["torch"].set_num_threads(threads)
        return
    # On a machine with other work, threads that wait for each other by spinning are up to a hundred times as slow.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        if threads is not None or name not in os.environ:
            os.environ[name] = str(threads or cores)


def _words(error: Exception) -> str:
    """Return the message of an error, with its ways out as they are typed here."""
    ways = getattr(error, "ways_out", None)
    if ways is None:
        return str(error)
    typed = (_TYPED[way.argument] if isinstance(way, Fix) else way for way in ways)
    return compose_message(error.reason, [way for way in typed if way])  # type: ignore[attr-defined]


def _show_warning(message: Any, category: Any, *where: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
