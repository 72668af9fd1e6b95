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


def test_the_studio_uses_public_names_but_for_the_exceptions():
    listed = [name for names in EXCEPTIONS.values() for name in names]
    assert sorted(private_names()) == sorted(listed)
    assert len(listed) <= MOST
    assert not set(listed) & PUBLIC


def test_every_folder_is_of_the_core_or_of_the_studio():
    core = {"head", "maps", "methods", "network", "path", "rules", "runtime", "tape", "targets"}
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
