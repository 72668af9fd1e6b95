"""A page that explains photos in the browser: a folder that opens from the file system and contacts no server."""

import base64
import json
import shutil
from os import PathLike
from pathlib import Path

from pytorch_grad_cam_pcasvm.export.explainer import Explainer
from pytorch_grad_cam_pcasvm.runtime.errors import Way, refuse
from pytorch_grad_cam_pcasvm.runtime.files import atomically, check_folder, name_path

_PACKAGE = Path(__file__).parent
MARK = "pytorch_grad_cam_pcasvm explainer"  # in the style sheet of every page
_PART = 12 << 20  # bytes of a file in one script
_RUNTIME = {
    "runtime": "ort.wasm.min.js", "glue": "ort-wasm-simd-threaded.mjs", "wasm": "ort-wasm-simd-threaded.wasm",
}  # fmt: skip


def page(
    model: str | PathLike[str], out: str | PathLike[str], runtime: str | PathLike[str], *, title: str | None = None
) -> Path:
    """Write a page that explains photos in the browser, with a file from :func:`onnx` and without a server.

    The folder opens from the file system, offline. Photos that are dropped on the page are prepared as by Pillow (with
    the file's ``resize`` and ``interpolation``), explained by onnxruntime-web on one thread, and shown with scores and
    signed maps. Nothing leaves the computer: the page's own security policy forbids contact with any server.

    Args:
        model: the file from :func:`onnx`.
        out: a new or empty folder, or one with an earlier page, which is replaced.
        runtime: the folder of the npm package onnxruntime-web; ``npm install onnxruntime-web`` creates
            ``node_modules/onnxruntime-web``. 15 MB of it are copied.
        title: the title of the page; None: "Explain a photo".

    Returns:
        The path of the page.

    Raises:
        FileExistsError: the folder contains something else.
        FileNotFoundError: the runtime is missing.
        ImportError: the ``[export]`` extra is not installed.
        ValueError: the file is not an explanation, or not one of pictures.

    Example:
        >>> export.page("explainer.onnx", "page", "node_modules/onnxruntime-web")  # doctest: +SKIP
        PosixPath('page/index.html')
    """
    model, out, runtime = Path(model), Path(out), Path(runtime)
    about = Explainer(model).about
    shape = about["input"]["shape"]
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ValueError(f"{model} explains images of shape {tuple(shape)}, and browsers read pictures: (1 or 3, H, W)")
    files = runtime_files(runtime) | {"model": model}
    check_folder(out, "page.css", MARK, "page")
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    (out / "index.html").unlink(missing_ok=True)
    # First of all, so that a folder whose writing was stopped is known as one of a page.
    script = files.pop("runtime")
    for source in (_PACKAGE / "page.css", _PACKAGE / "page.js", script):
        with name_path(out / source.name):
            shutil.copyfile(source, out / source.name)
    for old in data.glob("*.js"):
        old.unlink()
    parts = {name: _write(data, name, file.read_bytes()) for name, file in files.items()}
    for name in ("sample", "measured"):  # which the page has no use for
        about.pop(name, None)
    about["page"] = {"title": title or "Explain a photo", "parts": parts}
    _write(data, "about", json.dumps(about).encode())
    with atomically(out / "index.html") as file:  # only now is it a page
        file.write((_PACKAGE / "page.html").read_bytes())
    return out / "index.html"


def runtime_files(runtime: Path) -> dict[str, Path]:
    """Return the files of onnxruntime-web that a page needs.

    Raises:
        FileNotFoundError: a file is missing.
    """
    files = {}
    for key, name in _RUNTIME.items():
        path = next((path for path in (runtime / "dist" / name, runtime / name) if path.is_file()), None)
        if path is None:
            install = "run 'npm install onnxruntime-web', and pass runtime='node_modules/onnxruntime-web'"
            refuse(FileNotFoundError, f"{runtime} has no {name}", Way(install, "runtime"))
        files[key] = path
    return files


def _write(data: Path, name: str, content: bytes) -> int:
    """Write bytes as scripts, which are all that a page from the file system may read, and return how many."""
    starts = range(0, len(content), _PART)
    for part, start in enumerate(starts):
        encoded = base64.b64encode(content[start : start + _PART]).decode()
        with name_path(data / f"{name}{part}.js"):
            (data / f"{name}{part}.js").write_text(f'explainer.receive("{name}", "{encoded}");\n')
    return len(starts)
