"""The reader of exported files as one file, which needs neither this package nor PyTorch."""

import ast
from os import PathLike
from pathlib import Path

from pytorch_grad_cam_pcasvm.runtime.files import atomically

_STUDIO = Path(__file__).resolve().parents[1]
_MODULES = (
    "pictures/dicom_files.py", "pictures/dicom.py", "pictures/read.py", "pictures/frames.py", "pictures/panels.py",
    "pictures/answers.py", "pictures/sheets.py", "export/explainer.py",
)  # fmt: skip


def write_reader(path: str | PathLike[str] = "explainer.py") -> Path:
    """Write :class:`Explainer` to one file, to explain pictures where neither this package nor PyTorch is installed.

    The file needs numpy, Pillow and onnxruntime. It is a module, and a script: ``python explainer.py explainer.onnx
    photo.png --out maps.png``.

    Args:
        path: the file to write.

    Returns:
        The file's path.

    Raises:
        OSError: it cannot be written.

    Example:
        >>> export.write_reader("explainer.py").name
        'explainer.py'
    """
    path = Path(path)
    sources = [(_STUDIO / name).read_text(encoding="utf-8") for name in _MODULES]
    imports = sorted({line for source in sources for line in _list_imports(source)})
    documentation = ast.get_docstring(ast.parse(sources[-1]), clean=False)
    parts = [f'"""{documentation}"""', "\n".join(imports), *map(_cut_imports, sources)]
    with atomically(path) as file:
        file.write(("\n\n\n".join(parts) + "\n").encode())
    return path


def _list_imports(source: str) -> list[str]:
    """Return what a module imports from elsewhere, a line for each name."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    package = __name__.partition(".")[0]
    return [
        ast.unparse(ast.Import([name]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [name], 0))
        for node in nodes
        if isinstance(node, ast.Import) or str(node.module).partition(".")[0] != package
        for name in node.names
    ]


def _cut_imports(source: str) -> str:
    """Return a module without its documentation and imports, which stand at its top."""
    end = max(node.end_lineno or 0 for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom))
    return "\n".join(source.splitlines()[end:]).strip()
