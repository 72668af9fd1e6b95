"""The contract: folders of the studio use public names of the core, but for a list of exceptions."""

import ast
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import head, maps, methods, targets

ROOT = Path(package.__file__).parent
FACES = {"atlas", "cli", "data", "evaluation", "export", "figures"}  # modules that hand on names of the studio
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
    for file in (ROOT / "studio").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(f"{package.__name__}."):
                continue
            if node.module.split(".")[1] not in {"studio", "runtime", "version"}:
                names |= {alias.name for alias in node.names} - PUBLIC
    return names


def list_imports(file, root):
    """Return the files below a package that a file imports, at its top or inside of functions."""
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} imports by dots"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name if locate(name, root) else node.module for name in members}
        else:
            continue
        imported |= {locate(module, root) for module in modules} - {None, file}
    return imported


def locate(module, root):
    """Return the file of a module of a package; None if it is none."""
    place = root.parent / module.replace(".", "/")
    files = [place.with_suffix(".py"), place / "__init__.py"]
    return next((file for file in files if file.is_file() and root in file.parents), None)


def find_circles(root, files):
    """Return the circles of imports among files, each as the names of all files that reach one another."""
    imports = {file: list_imports(file, root) & {*files} for file in files}

    def reach(file):
        reached, waiting = set(), [file]
        while waiting:
            new = imports[waiting.pop()] - reached
            reached |= new
            waiting += new
        return reached

    reached = {file: reach(file) for file in files}
    circles = {frozenset(other for other in reached[file] if file in reached[other]) for file in files} - {frozenset()}
    return sorted(sorted(str(file.relative_to(root)) for file in circle) for circle in circles)


def test_no_files_of_the_core_import_one_another():
    files = [file for file in ROOT.rglob("*.py") if "studio" not in file.parts and file.parent != ROOT]
    assert find_circles(ROOT, files) == []
    # A module that is imported by its name would hide a circle.
    by_name = [file.name for file in files if "import_module(" in file.read_text() or "__import__(" in file.read_text()]
    assert by_name == []


def test_the_head_is_built_by_floors():
    floors = ["table.py", "estimators", "convert.py", "head.py"]
    for number, floor in enumerate(floors):
        files = [*(ROOT / "head" / floor).glob("*.py")] or [ROOT / "head" / floor]
        below = {path for file in files for path in list_imports(file, ROOT)}
        assert not {name for path in below for name in path.relative_to(ROOT).parts} & {*floors[number + 1 :]}, floor


def test_a_circle_is_found_with_its_names(tmp_path):
    root = tmp_path / "house"
    (root / "room").mkdir(parents=True)
    written = {
        "top.py": "from house.room.table import row\n",
        "room/__init__.py": "from house.room import table\n",
        "room/table.py": "def row():\n    from house.room.convert import convert\n",
        "room/convert.py": "import house.room.checks\n",
        "room/checks.py": "from house.room import table\n",
    }
    for name, source in written.items():
        (root / name).write_text(source)
    circle = ["room/checks.py", "room/convert.py", "room/table.py"]
    assert find_circles(root, [root / name for name in written]) == [circle]


def test_the_studio_uses_public_names_but_for_the_exceptions():
    listed = [name for names in EXCEPTIONS.values() for name in names]
    assert sorted(private_names()) == sorted(listed)
    assert len(listed) <= MOST
    assert not set(listed) & PUBLIC


def test_every_folder_is_of_the_core_or_of_the_studio():
    core = {"head", "maps", "methods", "network", "path", "rules", "runtime", "starts", "tape", "targets"}
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {"studio", "export"} | core
    studio = {"atlas", "cli", "data", "evaluation", "export", "figures", "model", "pictures"}
    assert {path.parent.name for path in ROOT.glob("studio/*/__init__.py")} == studio


def test_the_core_runs_without_the_studio(tmp_path):
    shutil.copytree(ROOT, tmp_path / ROOT.name, ignore=shutil.ignore_patterns("studio", "__pycache__"))
    code = f"""
import sys, numpy as np, torch, {ROOT.name} as package
from torch import nn
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from {ROOT.name} import head, maps, methods, targets
for module in (head, maps, methods, targets):
    [getattr(module, name) for name in module.__all__]
core = [name for name in package.__all__ if not package._PLACES.get(name, "").startswith("studio")]
[getattr(package, name) for name in core]
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
x, labels = torch.randn(20, 3, 8, 8), np.arange(20) % 2
features, labels = package.extract_features(net, [(x, torch.tensor(labels))], progress=False)
model = package.PCASVMNet(net, make_pipeline(PCA(2), SVC()).fit(features, labels))
maps = package.ContributionCAM(model, ["1"]).explain(x[:2], [package.PCATarget(0), package.SVMTarget(1)])
assert torch.allclose(maps.sums, maps.values, atol=1e-5)
print(package.__file__, len(core), [name for name in sys.modules if "studio" in name])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / ROOT.name}")
    assert done.stdout.endswith(" []\n")


def test_faces_hand_on_what_the_api_lists():
    for name in FACES:
        face = import_module(f"{package.__name__}.{name}")
        room = import_module(f"{package.__name__}.studio.{name}")
        assert all(getattr(face, public) is getattr(room, public) for public in face.__all__)
        assert face.__all__ == getattr(room, "__all__", ["main"])
