"""The contract: folders of the studio use public names of the core, but for a list of exceptions."""

import ast
from pathlib import Path

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import head, maps, methods, targets

ROOT = Path(package.__file__).parent
STUDIO = {"atlas", "cli", "data", "evaluation", "export", "figures", "model"}
PUBLIC = {name for module in (package, head, targets, maps, methods) for name in module.__all__}
MOST = 25

# Names of the core that the studio uses and nobody else should, by what they are needed for.
EXCEPTIONS = {
    "fitting and reading models": {
        "BlockMeans", "LayerMeans", "check_loader", "collect_features", "fine_features", "last_features",
        "refuse_unmappable", "parse_pool", "write_pool", "storage", "tile_network", "scale_photo",
    },
    "images and labels of any data set": {"LABEL_KEYS", "image_and_label", "label_patches"},
    "a pass of the network": {"checked_images", "one_input", "output_of", "HeadRun", "select_positions"},
    "maps of an atlas and of a page": {"Boundary", "at_place", "take_tail"},
    "warnings, each given once": {"TOLD_ONCE", "WarnOnce"},
}  # fmt: skip


def private_names():
    """Return the private names of the core that files of the studio import."""
    names = set()
    for file in ROOT.rglob("*.py"):
        if file.relative_to(ROOT).parts[0] not in STUDIO:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(f"{package.__name__}."):
                continue
            if node.module.split(".")[1] not in STUDIO | {"runtime", "version"}:
                names |= {alias.name for alias in node.names} - PUBLIC
    return names


def test_the_studio_uses_public_names_but_for_the_exceptions():
    listed = [name for names in EXCEPTIONS.values() for name in names]
    assert sorted(private_names()) == sorted(listed)
    assert len(listed) <= MOST
    assert not set(listed) & PUBLIC


def test_every_folder_is_of_the_core_or_of_the_studio():
    folders = {file.parent.relative_to(ROOT).parts[0] for file in ROOT.rglob("*.py") if file.parent != ROOT}
    core = {"calculus", "head", "maps", "methods", "network", "path", "rules", "runtime", "tape", "targets"}
    assert folders == STUDIO | core
