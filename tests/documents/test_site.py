"""The site: it names all that is public and nothing else, its links lead somewhere, and its snippets run.

None of this needs Sphinx.
"""

import builtins
import dataclasses
import importlib
import inspect
import re
import types
import warnings
from collections import OrderedDict
from functools import cache
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import pytorch_grad_cam
import torch
import torchvision
from PIL import Image
from pytorch_grad_cam.utils import model_targets
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torchvision.models import VisionTransformer
from torchvision.transforms.functional import to_pil_image

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import atlas, evaluation, export, figures, head, maps, methods, targets
from pytorch_grad_cam_pcasvm.runtime.errors import warn

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in (*DOCS.glob("*.md"), *DOCS.glob("how-to/*.md"))
}
TEXTS = {**PAGES, "README.md": (ROOT / "README.md").read_text(encoding="utf-8")}
NAME = package.__name__
PACKAGE = ROOT / NAME
PUBLIC = (package, head, targets, maps, methods, figures, atlas, evaluation, export)

# --- names --------------------------------------------------------------------------------------------------------


def documented():
    """Return what the pages of the API document, by full name."""
    found = set()
    for text in PAGES.values():
        module = ""
        for kind, name in re.findall(r"^\.\. ([\w:]+):: (\S+)$", text, re.MULTILINE):
            if kind == "currentmodule":
                module = name
            elif kind.startswith(("auto", "py:")):
                found.add(f"{module}.{name}")
    return found


def exists(name):
    """Return whether a dotted name can be imported, or is an attribute of what can be."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return all(part in members(found) and (found := getattr(found, part, found)) for part in parts[count:])
    return False


@cache
def members(thing):
    """Return the names of what a module or a class has; of a class, also those that only its objects have."""
    names = set(dir(thing))
    if isinstance(thing, type):
        names |= set(getattr(thing, "__annotations__", ()))
        names |= {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
        names |= set(re.findall(r"self\.(\w+)", inspect.getsource(thing)))
    return names


def code_of(text):
    """Return what stands in code, inline or in blocks of Python."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_all_that_is_public_is_documented(module):
    pages = documented()
    elsewhere = set(package.__all__) if module in (head, targets, maps, methods) else set()
    assert [name for name in module.__all__ if f"{module.__name__}.{name}" not in pages and name not in elsewhere] == []


def test_what_is_documented_exists():
    assert [name for name in documented() if not exists(name)] == []


@pytest.mark.parametrize("page", TEXTS)
def test_the_names_on_a_page_exist(page):
    text = TEXTS[page]
    names = set(re.findall(rf"\b{NAME}(?:\.\w+)+", text))
    for module, one_line, lines in re.findall(rf"from ({NAME}[\w.]*) import (?:([^(\n#]+)|\(([^)]+)\))", text):
        names |= {f"{module}.{name}" for name in re.findall(r"\w+", one_line or lines)}
    code = "\n".join(code_of(text))
    names |= {f"{NAME}.{name}" for name in re.findall(r"(?<![\w.])((?:atlas|evaluation|figures)\.[a-z_]+)\b", code)}
    names |= {f"{NAME}.figures.{name}" for name in re.findall(r"\bplot_\w+", code)}
    files = (".py", ".md", ".png", ".html", ".json", ".safetensors")
    assert sorted(name for name in names if not exists(name) and not name.endswith(files)) == []


@pytest.mark.parametrize("page", TEXTS)
def test_classes_and_attributes_on_a_page_exist(page):
    code = "\n".join(code_of(TEXTS[page]))
    known = {name for module in (*PUBLIC, pytorch_grad_cam, model_targets) for name in dir(module)} | set(
        re.findall(r"class (\w+)", code)
    )
    known |= set(dir(builtins))
    if page == "docs/architecture.md":  # which is about the package's own, too
        known |= {
            name for file in PACKAGE.rglob("*.py") for name in re.findall(r"^class (\w+)", file.read_text(), re.M)
        }
    classes = re.findall(r"(?<![\w.])[A-Z]\w*(?:CAM|Target|Maps|Effect|Error|Warning|SVMNet|Output)\b", code)
    assert sorted(set(classes) - known) == []
    objects = {
        "maps": package.SignedMaps,
        "cam": package.ClosedFormGradCAM,
        "net": package.PCASVMNet,
        "net.head": package.Head,
        "effect": package.SupportVectorEffect,
        "store": atlas.Atlas,
    }
    for name, kind in objects.items():
        found = re.findall(rf"(?<![\w./]){re.escape(name)}\.([a-z]\w*)", code)
        assert sorted(set(found) - members(kind) - {"py", "png", "safetensors"}) == [], name


def test_files_on_the_page_of_the_architecture_exist():
    names = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", TEXTS["docs/architecture.md"])
    assert len(names) > 50
    assert [name for name in names if not any((root / name).exists() for root in (PACKAGE, ROOT, ROOT / "tests"))] == []


@pytest.mark.slow
def test_every_estimator_that_is_converted_is_in_the_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    found = set(re.findall(r"`(\w+)`", importlib.import_module("tables").estimators()))
    table = PAGES["docs/heads.md"].split("<!-- estimators -->")[1].split("<!-- end -->")[0]
    assert len(found) > 40
    assert found <= set(re.findall(r"`(\w+)`", table))  # older versions of scikit-learn have fewer


@pytest.mark.optional
def test_the_references_are_those_of_the_bibliography_and_each_is_cited(monkeypatch):
    pytest.importorskip("pybtex")
    monkeypatch.syspath_prepend(str(DOCS))
    assert PAGES["docs/references.md"] == importlib.import_module("references").page()
    cited = set(re.findall(r"references\.md#([\w-]+)", "".join(TEXTS.values())))
    assert anchors(PAGES["docs/references.md"]) - {"references"} == cited


# --- links --------------------------------------------------------------------------------------------------------


def anchors(text):
    """Return the anchors of a page's headings, as MyST and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TEXTS)
def test_the_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"```(?!\{toctree).*?```", "", TEXTS[page], flags=re.DOTALL)
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_in_the_table_of_contents():
    tables = re.findall(r"```\{toctree\}\n(.*?)```", "".join(PAGES.values()), re.DOTALL)
    entries = re.findall(r"^[\w/-]+$", "\n".join(tables), re.MULTILINE)
    assert {f"docs/{entry}.md" for entry in entries} - {"docs/auto_examples/index.md"} == set(PAGES) - {"docs/index.md"}


# --- snippets -----------------------------------------------------------------------------------------------------

START = "docs/getting-started.md"
HOW_TO = [f"how-to/{page.stem}" for page in sorted(DOCS.glob("how-to/*.md"))]
# The others are tested with their subject: test_store.py, test_transformers.py.
OTHERS = ("evaluating", "reading", "mistake", "layers", "methods", "heads", "extending", "export", *HOW_TO)
SNIPPETS = ["README.md", START, *(f"docs/{page}.md" for page in OTHERS)]
LONG = ("reading", "evaluating", "mistake", "how-to/volumes", "how-to/defects")
MARKS = {f"docs/{page}.md": pytest.mark.slow for page in LONG}
MARKS |= {page: pytest.mark.optional for page in SNIPPETS if "export" in page or "onnx" in page}


def run(page, names):
    """Run the snippets of a page as they are printed, but for those that say that they are not run."""
    text = re.sub(r"<!-- not run.*?-->\n```python\n.*?```", "", TEXTS[page], flags=re.DOTALL)
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", package.CoarseMapWarning)  # photos of 64x64 pixels, not 224: 2x2 positions
        exec(compile(code, page, "exec"), names)
    return names


@pytest.fixture
def estimators():
    """Forget, at the end, the estimators that a page registers."""
    registry = inspect.getclosurevars(package.stage_for.register).nonlocals["registry"]
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)
    package.stage_for._clear_cache()


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Return what a reader has after the first page: three kinds of animals, a small ResNet, a head."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, 64, 64, generator=generator)
    animals = ["cat", "dog", "elk"] * 4
    for row, animal in enumerate(animals):
        x[row, :, :32] += "cde".index(animal[0])
    given = {
        "dataset": list(zip(x, animals, strict=True)),
        "labels_of_images": animals[:2],
        "features_of_images": lambda backbone: backbone(given["images"]).detach().numpy(),
    }
    # resnet18 has two blocks in each layer.
    resnet = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 2, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchvision.models, "resnet18", lambda weights: resnet if weights else None)
        resize = torchvision.transforms.Resize
        patch.setattr(torchvision.transforms, "Resize", lambda size: resize((64, 64)))  # small, for the time
        given["folder"] = tmp_path_factory.mktemp("started")
        patch.chdir(given["folder"])
        for row, (image, animal) in enumerate(zip(x, animals, strict=True)):
            for part in ("train", "test"):
                folder = Path("photos", part, animal)
                folder.mkdir(parents=True, exist_ok=True)
                to_pil_image(image.sigmoid()).save(folder / f"{row}.png")
        patch.setitem(mpl.rcParams, "figure.dpi", 50)
        return run(START, given)


def small():
    """Return a network and images for a page that evaluates or exports, which a ResNet takes too long for."""
    x, labels = torch.randn(12, 3, 16, 16), np.array(["cat", "dog", "elk"] * 4)
    layers = OrderedDict(layer4=nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.ReLU()), pool=nn.AdaptiveAvgPool2d(1))
    backbone = nn.Sequential(layers).append(nn.Flatten())
    features = backbone(x).detach().numpy()
    head = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, labels)
    net = package.PCASVMNet(backbone, head).eval()
    given = {"net": net, "dataset": [*zip(x, labels, strict=True)], "images": x[:2], "labels": labels}
    return given | {"head": head, "features": features}


def mistaken(started):
    """Return what the page of a mistake is given: an image that is said to be of another class."""
    images, labels = zip(*started["dataset"], strict=True)
    x, (predicted,) = torch.stack(images), started["net"].predict(images[0][None])
    return {
        "image": x[0],
        "truth": "cat" if predicted != "cat" else "dog",
        "training_images": x,
        "training_labels": labels,
        "picture": x[0].sigmoid(),
        "training_pictures": x.sigmoid(),
    }


def resampled(started):
    """Return what the page of methods is given: twice the images, as bootstrap samples need eight of each class."""
    return {"features": np.tile(started["features"], (2, 1)), "labels": np.tile(started["labels"], 2)}


def exported(started):
    """Return what the page of exporting is given: a photo, and files in the place of onnxruntime-web's."""
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(started["folder"] / "photo.jpg")
    runtime = started["folder"] / "node_modules" / "onnxruntime-web"
    runtime.mkdir(parents=True, exist_ok=True)
    for name in ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"):
        (runtime / name).write_bytes(b"")
    return small()


@pytest.mark.parametrize("doubt", [package.BaselineWarning, package.CoarseMapWarning, package.OutsideTrainingWarning])
def test_a_snippet_that_raises_a_doubt_fails(doubt):
    names = {"warn": warn, "doubt": doubt}
    with pytest.raises(doubt, match="of a snippet"):
        exec("warn('of a snippet', doubt)", names)


@pytest.mark.parametrize("page", [pytest.param(page, marks=MARKS.get(page, ())) for page in SNIPPETS])
def test_the_snippets_of_a_page_run(page, started, estimators, rules, monkeypatch):
    if "export" in page or "onnx" in page:
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(started["folder"])
    monkeypatch.setattr(torchvision.models, "resnet18", lambda weights: started["backbone"])
    monkeypatch.setattr(torchvision.models, "vit_b_16", lambda weights: VisionTransformer(64, 16, 12, 2, 16, 16))
    given = {"docs/evaluating.md": small, "docs/mistake.md": lambda: mistaken(started)}
    given |= {"docs/methods.md": lambda: resampled(started)}
    given |= {"docs/export.md": lambda: exported(started), "docs/how-to/onnx.md": small}
    names = (
        dict(started) if page == START else run(page, {} if page == "README.md" else started | given.get(page, dict)())
    )
    started["net"].head.resamples = None  # as the page of methods leaves some
    maps = names["maps"]
    assert isinstance(maps, package.SignedMaps)
    assert bool(maps.maps.isfinite().all())
    assert not any(isinstance(value, types.ModuleType) and value.__name__ == "sphinx" for value in names.values())


def test_no_page_with_snippets_is_forgotten():
    elsewhere = {"docs/atlas.md", "docs/transformers.md", "docs/troubleshooting.md"}
    assert {page for page, text in PAGES.items() if "```python" in text} == set(SNIPPETS[1:]) | elsewhere
