"""Sphinx: the site of the package, ``python -m sphinx -W --keep-going -b html docs docs/_build/html``.

The gallery shows the examples without running them, which takes minutes; ``-D plot_gallery=1`` runs those that need no
download.
"""

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

import tables  # noqa: E402 - beside this file
from docutils import nodes  # noqa: E402
from docutils.utils.math.latex2mathml import tex2mathml  # noqa: E402

from pytorch_grad_cam_pcasvm import __version__  # noqa: E402

project = "pytorch_grad_cam_pcasvm"
copyright = "the authors of pytorch_grad_cam_pcasvm"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_examples", "paper/*.md", "auto_examples/*.py", "sg_execution_times.rst"]
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

autoclass_content = "both"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

tables.examples(ROOT / "examples", HERE / "_examples")
sphinx_gallery_conf = {
    "examples_dirs": "_examples",
    "gallery_dirs": "auto_examples",
    "plot_gallery": False,
    "filename_pattern": r"/\d\d_(digits|atlas|layers|volume)\.py$",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "notebook_extensions": set(),
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
}

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "pytorch_grad_cam_pcasvm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False


def setup(app: Any) -> None:
    """Show files from elsewhere in the repository, lead links to them to their pages here, and write formulas."""
    app.connect("source-read", _from_elsewhere)
    # Browsers draw MathML by themselves, without a script from somewhere.
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))


def _formula(translator: Any, node: Any) -> None:
    block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=block)
    translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def _from_elsewhere(app: Any, page: str, source: list[str]) -> None:
    file = {"changelog": ROOT / "CHANGELOG.md", "results": ROOT / "benchmarks" / "RESULTS.md"}.get(page)
    if file is not None:
        source[0] = file.read_text(encoding="utf-8").replace("](scaling.png", "](../benchmarks/scaling.png")
    shown = re.sub(r"\]\((\.\./)?(docs/|benchmarks/(?=RESULTS))", "](", source[0])
    source[0] = shown.replace("](RESULTS.md", "](results.md")
