"""The explorer: what the page computes against Python, in headless Chromium, and what must never happen in it."""

import base64
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from atlases import backbone, images, layer, problem
from browser import Page, complaints, expect, launched, needs_chromium, sync_playwright, visit
from PIL import Image
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.kernel_approximation import Nystroem
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC, OneClassSVM
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

pytest.importorskip("pyarrow")

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ClosedFormLayerCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    atlas,
    extract_features,
    recombined,
)
from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.stages import KernelMap
from pytorch_grad_cam_pcasvm.head.storage import Example
from pytorch_grad_cam_pcasvm.maps.recombination import decision_steps, take_tail
from pytorch_grad_cam_pcasvm.maps.results import find_nu
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.studio.atlas.explorer import write_page
from pytorch_grad_cam_pcasvm.studio.atlas.explorer.machine import json_text, machine_data, packed, rows_of_points
from pytorch_grad_cam_pcasvm.studio.atlas.explorer.page import SAVED, decided
from pytorch_grad_cam_pcasvm.studio.figures.decision import Steps

COUNT, COMPONENTS = 60, 4
HOSTILE = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(2)>", "a\u2028b & \"c\" 'd' __proto__"]


# --- atlases ----------------------------------------------------------------------------------------------------------


class Blobs(Dataset[Any]):
    """Pictures with a bright corner, another one for every class."""

    def __init__(self, classes: int, names: list[str] | None = None) -> None:
        generator = torch.Generator().manual_seed(classes)
        self.labels = [row % classes for row in range(COUNT)]
        self.images = 0.5 * torch.rand(COUNT, 3, 24, 32, generator=generator)
        for row, label in enumerate(self.labels):
            self.images[row, :, 10 * (label // 2) :, 14 * (label % 2) :][:, :10, :14] += 0.3
        if names:
            self.classes = names

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[row], self.labels[row]


def network(classes: int, names: list[str] | None, head: Any = None) -> tuple[PCASVMNet, Blobs]:
    torch.manual_seed(0)
    data = Blobs(classes, names)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 5 * 7, 12), nn.ReLU())
    backbone.eval()
    features = extract_features(backbone, torch.utils.data.DataLoader(data, 16), progress=False)[0]
    fitted = head or make_pipeline(StandardScaler(), PCA(COMPONENTS), SVC())
    return PCASVMNet(backbone, fitted.fit(features, data.labels)), data


def built(folder: Path, classes: int, method: Any, names: list[str] | None = None, head: Any = None) -> atlas.Atlas:
    net, data = network(classes, names, head)
    return atlas.build(net, data, ["1"], folder, method=method, shard_size=32, progress=False)


def heads_of(store: atlas.Atlas) -> dict[str, Any]:
    """Return heads of every kind that the page computes, on the components of an atlas."""
    p, y = store.components, store.labels
    assert y is not None
    fitted: dict[str, Any] = {
        "linear": SVC(kernel="linear"),
        "rbf": SVC(),
        "far": SVC(gamma=3000.0),
        "poly": SVC(kernel="poly", coef0=1.0),
        "sigmoid": SVC(kernel="sigmoid", gamma=0.05),
        "scaled": make_pipeline(StandardScaler(), MinMaxScaler(), SVC(gamma=2.0)),
        "linear decision": make_pipeline(StandardScaler(), LinearSVC()),
        "one vs rest": OneVsRestClassifier(make_pipeline(StandardScaler(), SVC())),
        "one vs one": OneVsOneClassifier(SVC(kernel="poly", degree=2)),
        "calibrated": CalibratedClassifierCV(SVC(), cv=2),
        "regressor": SVR(),
        "one class": OneClassSVM(gamma=0.1),
    }
    # At a support vector itself a narrow kernel has no slope: this one knows only rows that are not asked for.
    known = np.isin(np.arange(COUNT) % 10, [2, 3, 4, 5])
    return {name: head.fit(p[known], y[known]) if name == "far" else head.fit(p, y) for name, head in fitted.items()}


@pytest.fixture(scope="session", params=[2, 3], ids=lambda n: f"{n} classes")
def classes(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="session", params=[ContributionCAM, ClosedFormGradCAM], ids=["contributions", "gradient"])
def opened(
    request: pytest.FixtureRequest, classes: int, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, dict[str, Any], Path]:
    """An atlas, heads on its components, and its page."""
    folder = tmp_path_factory.mktemp("atlas")
    store = built(folder / "atlas", classes, request.param)
    heads = heads_of(store)
    return store, heads, write_page(store, folder / "page", heads=heads)


class FakeStore:
    """An atlas of made-up numbers: as much of its interface as the explorer uses."""

    def __init__(self, rows: int, components: int = 3, shape: tuple[int, ...] = (7, 7), classes: int = 3) -> None:
        rng = np.random.default_rng(0)
        self.labels = rng.integers(classes, size=rows)
        centres = 4 * rng.normal(size=(classes, components))
        self.components = centres[self.labels] + rng.normal(size=(rows, components))
        fitted = SVC().fit(self.components[:1000], self.labels[:1000])
        pca = PCA(components).fit(rng.normal(size=(50, components + 1)))
        self.head = Head.of([pca, fitted])
        self.predictions = fitted.predict(self.components[:1]).repeat(rows)
        self.ids = [str(row) for row in range(rows)]
        self.manifest = {"method": "ContributionCAM", "adds_up": True, "linear": True, "classes": None, "versions": {}}
        self.manifest |= {"target_layer": "features.2", "backbone": "CNN"}
        self.baseline_values, self.remainder = np.zeros((rows, components)), None
        self.decision_errors = None
        self.log_scale = np.zeros((rows, components))
        self.places = None
        self.count, self.shape = components, shape
        noise = rng.integers(0, 255, size=(64, 12, 12, 3), dtype=np.uint8)
        self.pictures = [self._webp(pixels) for pixels in noise]

    @staticmethod
    def _webp(pixels: np.ndarray) -> bytes:
        with tempfile.SpooledTemporaryFile() as file:
            Image.fromarray(pixels).resize((96, 96)).save(file, "WEBP")
            file.seek(0)
            return file.read()

    def __len__(self) -> int:
        return len(self.ids)

    def sure(self, _: np.ndarray) -> None:
        return None

    def names(self, values: Any) -> list[str]:
        return [f"class {value}" for value in values]

    def maps(self, rows: Any) -> SignedMaps:
        generator = torch.Generator().manual_seed(int(rows[0]))
        maps = torch.randn(len(rows), self.count, *self.shape, generator=generator)
        of_rows = {
            "values": self.components,
            "log_scale": self.log_scale,
            "baseline_values": self.baseline_values,
            "remainder": self.remainder,
        }
        tensors: dict[str, Any] = {
            name: None if array is None else torch.from_numpy(array[rows]) for name, array in of_rows.items()
        }
        targets = [PCATarget(b) for b in range(self.count)]
        weights = torch.zeros(len(rows), self.count, 0)
        return SignedMaps(
            maps=maps, weights=weights, nu=find_nu(maps), targets=targets, output=None, linear=True, **tensors
        )

    def thumbnails(self, rows: Any) -> list[bytes]:
        return [self.pictures[row % len(self.pictures)] for row in rows]

    def mean_maps(self, by: Any = None) -> Any:
        groups, counts = np.unique(by, return_counts=True)
        mean = SimpleNamespace(groups=groups.tolist(), counts=counts, maps=np.ones((len(groups), *self.shape)))
        return [mean] * self.components.shape[1]


# --- the machine as data, without a browser ---------------------------------------------------------------------------


def unpacked(array: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["base64"]), np.dtype(array["type"])).reshape(array["shape"])


def kernel_values(kernel: dict[str, Any], x: np.ndarray, points: np.ndarray) -> np.ndarray:
    if kernel["name"] == "linear":
        return x @ points.T
    if kernel["name"] == "rbf":
        return np.exp(-kernel["gamma"] * ((x[:, None] - points) ** 2).sum(-1))
    z = kernel["gamma"] * (x @ points.T) + kernel["coef0"]
    return np.tanh(z) if kernel["name"] == "sigmoid" else z ** kernel["degree"]


def decisions(data: dict[str, Any], p: np.ndarray) -> np.ndarray:
    """Return the decision values (R, P) of a machine's data, slowly and from its definition."""
    found = np.full((len(p), data["outputs"]), np.nan)
    for machine in data["machines"]:
        first = machine["first"]
        if machine["kind"] == "linear":
            weight = unpacked(machine["weight"])
            found[:, first : first + len(weight)] = p @ weight.T + unpacked(machine["bias"])
            continue
        affine, kernel, points = machine["affine"], machine["kernel"], unpacked(machine["points"])
        x = p if affine is None else p @ unpacked(affine["matrix"]).T + unpacked(affine["offset"])
        values = kernel_values(kernel, x, points)
        intercept, dual = unpacked(machine["intercept"]), unpacked(machine["dual"])
        total, i = np.tile(intercept, (len(p), 1)), 0
        for group in machine["groups"]:
            for _ in range(group["count"]):
                for r, decision in enumerate(group["decisions"]):
                    total[:, decision] += dual[r, i] * values[:, i]
                i += 1
        found[:, first : first + len(intercept)] = total
    return found


def clouds(classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(classes)
    labels = np.arange(90) % classes
    return rng.normal(size=(90, 3)) + 1.2 * rng.normal(size=(classes, 3))[labels], labels


@pytest.mark.parametrize("kernel", ["linear", "rbf", "poly", "sigmoid"])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_data_of_a_kernel_machine_gives_scikit_learns_decisions(kernel: str, classes: int) -> None:
    p, labels = clouds(classes)
    fitted = make_pipeline(StandardScaler(), SVC(kernel=kernel, coef0=0.5, decision_function_shape="ovo"))
    fitted.fit(p, labels)
    data = machine_data(Head.of(fitted.steps[1][1]), p)  # without the scaler, as fitted on components
    scaled = fitted[0].transform(p)
    expected = fitted[1].decision_function(scaled).reshape(len(p), -1)
    np.testing.assert_allclose(decisions(data, scaled), expected, atol=1e-9)
    whole = machine_data(Head.of(fitted), p)
    assert whole["machines"][0]["affine"] is not None
    np.testing.assert_allclose(decisions(whole, p), expected, atol=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ["decision", "rest", "one", "calibrated", "regressor", "one class"])
def test_data_of_other_machines_gives_scikit_learns_decisions(name: str, classes: int) -> None:
    p, labels = clouds(classes)
    fitted: Any = {
        "decision": make_pipeline(MinMaxScaler(), StandardScaler(), LinearSVC()),
        "rest": OneVsRestClassifier(make_pipeline(StandardScaler(), SVC())),
        "one": OneVsOneClassifier(SVC(kernel="poly")),
        "calibrated": CalibratedClassifierCV(SVC(decision_function_shape="ovo"), cv=2),
        "regressor": SVR(),
        "one class": OneClassSVM(),
    }[name].fit(p, labels)
    found = decisions(machine_data(Head.of(fitted), p), p)
    if name == "calibrated":
        members = [each.estimator for each in fitted.calibrated_classifiers_]
        expected = np.concatenate([each.decision_function(p).reshape(len(p), -1) for each in members], 1)
    elif name == "one":
        members = fitted.estimators_
        expected = (1 if classes == 2 else -1) * np.stack([each.decision_function(p) for each in members], 1)
    elif name == "regressor":
        expected = fitted.predict(p)[:, None]
    else:
        expected = fitted.decision_function(p).reshape(len(p), -1)
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_seeds_are_those_of_the_targets() -> None:
    p, labels = clouds(4)
    tail = Head.of(SVC().fit(p, labels))
    data = machine_data(tail, p)
    values = tail(torch.from_numpy(p)).values[-1]
    for category, row in enumerate(data["margins"]):
        found = sum(factor * values[:, int(position)] for position, factor in row)
        torch.testing.assert_close(found, tail.voting.margins(values)[:, category])
    assert data["pairs"] == [[[position, 1.0]] for position in range(6)]


def test_a_step_that_is_not_affine_is_said_to_be_beyond_the_page() -> None:
    p, labels = clouds(3)
    fitted = make_pipeline(Nystroem(n_components=8), LinearSVC()).fit(p, labels)
    assert KernelMap.__name__ in machine_data(Head.of(fitted), p)["reason"]
    clipped = make_pipeline(MinMaxScaler(clip=True), SVC()).fit(p, labels)
    assert "cannot take this head's decision apart" in machine_data(Head.of(clipped), p)["reason"]


def test_support_vectors_are_found_among_the_rows() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(500, 4))
    points = np.concatenate([rows[[7, 400, 7]] + 1e-6, rng.normal(size=(2, 4)) + 9])
    assert rows_of_points(points, rows).tolist() == [7, 400, 7, -1, -1]
    assert rows_of_points(points, rows[:0]).tolist() == [-1] * 5


def test_heads_on_other_components_are_refused(tmp_path: Path) -> None:
    store = FakeStore(20)
    wrong = SVC().fit(np.random.default_rng(0).normal(size=(10, 5)), [0, 1] * 5)
    with pytest.raises(ValueError, match="head 'mine': the head takes 5 components, but there are maps of 3"):
        write_page(store, tmp_path / "page", heads={"mine": wrong})
    assert not (tmp_path / "page").exists()


def test_the_tail_of_a_head_is_what_is_behind_its_components() -> None:
    p, labels = clouds(2)
    whole = Head.of(make_pipeline(StandardScaler(), PCA(2), SVC()).fit(p, labels))
    tail = take_tail(whole, 2, whole, 3)
    assert tail is not None
    assert len(tail.stages) == 1
    assert take_tail(Head(list(whole.stages)[:2]), 2, whole, 3) is None


def test_what_heads_say_of_rows_is_what_scikit_learn_says() -> None:
    p, labels = clouds(4)
    fitted = SVC(break_ties=True).fit(p, labels)
    found = decided(Head.of(fitted), p)
    ranking = fitted.decision_function(p)
    assert (found["predictions"] == fitted.predict(p)).all()
    assert (np.stack([found["first"], found["second"]], 1) == np.argsort(-ranking)[:, :2]).all()


def test_json_stays_inside_its_script() -> None:
    text = json_text({"</script>": "\u2028<!--&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"</script>": "\u2028<!--&"}
    with pytest.raises(ValueError, match="JSON"):
        json_text(float("nan"))
    with pytest.raises(TypeError, match="int64"):
        packed(np.arange(3))


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="not empty"):
        write_page(FakeStore(5), tmp_path)
    (tmp_path / "thesis.html").write_text("<p>mine</p>")
    with pytest.raises(FileExistsError, match="not an explorer"):
        write_page(FakeStore(5), tmp_path / "thesis.html", single_file=True)
    with pytest.raises(FileExistsError, match="is a file"):
        write_page(FakeStore(5), tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    assert not list(tmp_path.glob(".*.tmp"))


def test_an_earlier_page_is_replaced(tmp_path: Path) -> None:
    page = write_page(FakeStore(300), tmp_path / "page")
    (tmp_path / "page" / "notes.txt").write_text("mine")
    assert page == tmp_path / "page" / "index.html"
    assert len(list(page.parent.glob("data/pictures-*.js"))) == 10
    page.unlink()  # as after a run that was stopped
    write_page(FakeStore(5), tmp_path / "page")
    assert page.is_file()
    assert len(list(page.parent.glob("data/pictures-*.js"))) == 1
    assert (tmp_path / "page" / "notes.txt").read_text() == "mine"


def test_one_file_has_a_name_or_a_folder(tmp_path: Path) -> None:
    assert write_page(FakeStore(5), tmp_path / "a.html", single_file=True) == tmp_path / "a.html"
    assert write_page(FakeStore(5), tmp_path / "a.html", single_file=True) == tmp_path / "a.html"
    (tmp_path / "link.html").symlink_to("a.html")
    assert write_page(FakeStore(6), tmp_path / "link.html", single_file=True) == tmp_path / "link.html"
    assert (tmp_path / "link.html").is_symlink()
    assert write_page(FakeStore(5), tmp_path / "b", single_file=True) == tmp_path / "b" / "index.html"
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["index.html"]


def test_volumes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"volumes \(4, 5, 6\).*slices"):
        write_page(FakeStore(5, shape=(4, 5, 6)), tmp_path / "page")


def test_a_page_that_cannot_be_finished_leaves_none(tmp_path: Path) -> None:
    store = FakeStore(300)
    store.thumbnails = lambda rows: 1 / 0  # type: ignore[assignment, return-value]
    for name, single in (("page", False), ("page.html", True)):
        with pytest.raises(ZeroDivisionError):
            write_page(store, tmp_path / name, single_file=single)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page"]
    assert not (tmp_path / "page" / "index.html").exists()


def test_the_sources_ask_nobody_and_evaluate_nothing() -> None:
    folder = Path(sys.modules[write_page.__module__].__file__ or "").parent
    sources = {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".js", ".css", ".html")}
    assert len(sources) > 5
    for name, text in sources.items():
        for word in (
            "http:",
            "https:",
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "@import",
        ):
            assert word not in text, f"{word} in {name}"
        assert " style=" not in text, f"an inline style in {name}"
        assert "</script" not in text or name == "index.html"
        assert " onclick=" not in text


# --- in the browser ---------------------------------------------------------------------------------------------------


def asked(page: Page, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the page explains for several questions: {row, head, category, versus}."""
    code = """(questions) => Promise.all(questions.map(async (question) => {
        const found = await atlas.explain(question.row, question);
        return {...found, map: found.map && Array.from(found.map), seed: null,
                gradient: null, factors: null, parts: found.parts && Array.from(found.parts)};
    }))"""
    return page.evaluate(code, questions)


def compared(store: Any, head: Any, target: SVMTarget, row: int, found: dict[str, Any]) -> None:
    """Hold an answer of the page against Python's."""
    expected = store.explain([row], [target], head=head)
    value, nu, log_scale = (float(getattr(expected, name)[0, 0]) for name in ("values", "nu", "log_scale"))
    top = max(1.0, abs(value))
    assert abs(found["value"] - value) <= 1e-6 * top
    if nu == 0:
        assert found["nu"] < 1e-38  # the page computes in double precision
        return
    assert abs(np.log(found["nu"] / nu) + found["logScale"] - log_scale) < 1e-3
    shown, reference = np.array(found["map"]) / found["nu"], expected.maps[0, 0].flatten().numpy() / nu
    assert np.abs(shown - reference).max() < 1e-3
    assert np.abs(reference).max() > 0.99
    if store.manifest["adds_up"]:
        baseline = float(expected.baseline_values[0, 0])  # type: ignore[index]
        assert abs(found["baselineValue"] - baseline) <= 1e-6 * top
        assert abs(sum(found["parts"]) - (value - baseline)) <= 1e-6 * top
        total = sum(found["map"]) * np.exp(found["logScale"]) + found["remainder"]
        assert abs(total - (value - baseline)) <= 2e-2 * top  # as exact as half precision is


@needs_chromium
def test_maps_and_values_equal_pythons(opened: Any, page: Page, classes: int) -> None:
    store, heads, file = opened
    visit(page, file.as_uri())
    questions, references = [], []
    for name, head in {SAVED: None, **heads}.items():
        labels = None if name in ("regressor", "one class") else list(range(classes))
        for row in (0, 7, 31, 59):
            pairs: list[tuple[Any, Any]] = [(None, None)]
            if labels is not None:
                pairs += [(1, None), (0, 1), (labels[-1], 0), (None, "second"), (1, "second")]
            for category, versus in pairs:
                questions.append({"row": row, "head": name, "category": category, "versus": versus})
                references.append((head, SVMTarget(category, "runner-up" if versus == "second" else versus), row))
    answers = asked(page, questions)
    for (head, target, row), found in zip(references, answers, strict=True):
        compared(store, head, target, row, found)
    blank = sum(found["nu"] == 0 for found in answers)
    assert blank < len(answers) / 20
    assert not complaints(page)


@needs_chromium
def test_an_rbf_machine_far_away_is_not_blank(opened: Any, page: Page) -> None:
    store, heads, file = opened
    visit(page, file.as_uri())
    rows = [row for row in range(COUNT) if row % 10 not in (2, 3, 4, 5)]
    found = asked(page, [{"row": row, "head": "far", "category": 1} for row in rows])
    assert all(each["nu"] > 0 for each in found)
    if not store.manifest["adds_up"]:
        assert any(each["logScale"] < -745 for each in found)  # where exp gives 0 in double precision, too
    for row, each in zip(rows, found, strict=True):
        compared(store, heads["far"], SVMTarget(1), row, each)


@needs_chromium
@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "one file"])
def test_hostile_names_stay_text_and_nothing_is_asked_for(
    single_file: bool, page: Page, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    store = built(folder / "atlas", 3, ContributionCAM, HOSTILE)
    heads = {HOSTILE[1]: SVC(kernel="linear").fit(store.components, store.labels)}
    out = folder / ("page.html" if single_file else "page")
    file = write_page(store, out, heads=heads, single_file=single_file)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    visit(page, file.as_uri() + "#colour=prediction&head=1&style=split")
    for drawn in ("#lowest canvas", "#means canvas"):
        page.locator(drawn).first.wait_for()
    assert page.locator("#category option").all_text_contents()[1:] == HOSTILE
    assert page.locator("#head option:checked").text_content() == HOSTILE[1]
    expect(page.locator("body img")).to_have_count(0)
    assert page.evaluate("[...document.scripts].filter((script) => script.text.startsWith('alert')).length") == 0
    assert all(url.startswith("file://") for url in requests), requests  # Playwright leaves out "data:"
    assert single_file == (len(requests) == 1)
    assert not complaints(page)
    # The policy would not let it, either.
    refused = """new Promise((resolve) => {
        addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
        fetch("https://example.invalid/").catch(() => setTimeout(() => resolve("not by the policy"), 1000));
    })"""
    assert page.evaluate(refused) == "connect-src"
    inline = """new Promise((resolve) => {
        addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
        const script = document.createElement("script");
        script.textContent = "window.hacked = true";
        document.body.append(script);
        setTimeout(() => resolve("nothing"), 1000);
    })"""
    assert page.evaluate(inline).startswith("script-src")
    assert page.evaluate("window.hacked") is None


@needs_chromium
def test_keys_and_links_move_the_view(opened: Any, page: Page) -> None:
    store, _, file = opened
    visit(page, file.as_uri() + "#row=5&x=2&y=3&opacity=80&class=1&judged=right&low=-100")
    chosen = {"row": 5, "x": 2, "y": 3, "opacity": 80, "low": -100}
    assert chosen.items() <= page.evaluate("({...atlas.view.current, headData: null})").items()
    right = np.flatnonzero((store.labels == 1) & (store.predictions == 1))
    assert page.evaluate("atlas.view.selected().length") == len(right)
    page.evaluate(f"atlas.view.set({{row: {right[0]}}})")
    order = right[np.argsort(store.components[right, 2], kind="stable")]
    at = list(order).index(right[0])
    key, expected = ("ArrowRight", order[at + 1]) if at + 1 < len(order) else ("ArrowLeft", order[at - 1])
    page.locator("#scatter").press(key)
    expect(page).to_have_url(re.compile(f"row={expected}"))
    expect(page.locator("#image-id")).to_contain_text(f"(row {expected})")
    expect(page.locator("#live")).to_contain_text(f"Image {store.ids[expected]}.")
    page.evaluate("location.hash = '#row=2&x=junk&component=99&class=400'")
    expect(page).to_have_url(file.as_uri() + "#row=2&by=label")  # all others as they are by default
    # In a row of pictures, too: Enter chooses.
    second = int(np.argsort(-store.components[:, 0])[1])
    button = page.locator("#highest button").nth(1)
    # Not the row of before, whose filters were others.
    expect(button).to_have_attribute("aria-label", re.compile(rf"\b{store.ids[second]}, component 1 "))
    page.locator("#highest button").first.press("ArrowRight")
    expect(button).to_be_focused()
    button.press("Enter")
    expect(page.locator("#image-id")).to_contain_text(f"(row {second})")
    assert not complaints(page)


@needs_chromium
def test_everything_has_a_name_for_screen_readers(opened: Any, page: Page) -> None:
    page.set_viewport_size({"width": 400, "height": 900})
    visit(page, opened[2].as_uri())
    for drawn in ("#lowest canvas", "#bars tr"):
        page.locator(drawn).first.wait_for()
    nameless = page.evaluate("""[...document.querySelectorAll("button, select, input, canvas")].filter((each) =>
        !each.closest("[hidden]") && !each.getAttribute("aria-label") && !each.textContent.trim()
        && !each.closest("label") && each.getAttribute("aria-hidden") !== "true").map((each) => each.outerHTML)""")
    assert not nameless
    expect(page.locator("html")).to_have_attribute("lang", "en")
    # Nothing is wider than a narrow window.
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@needs_chromium
def test_support_vectors_are_shown_with_their_parts(opened: Any, page: Page, classes: int) -> None:
    store, heads, file = opened
    visit(page, file.as_uri() + "#head=2&category=1")
    page.locator("#vectors .tile").first.wait_for()
    found = page.evaluate("""(async () => {
        const head = await atlas.data.head(2), found = await atlas.explain(0, {head: 2, category: 1});
        return atlas.machine.vectorParts(head.machine, found.seed, atlas.data.pointOf(0).p);
    })()""")
    effect = Head.of(heads["rbf"]).support_vector_effect(torch.from_numpy(store.components[:1]), 1)
    expected = {int(i): float(part) for i, part in zip(effect.indices, effect.decision[0, 0], strict=True) if part}
    assert {each["training"]: pytest.approx(each["part"], abs=1e-9) for each in found["parts"]} == expected
    # It was fitted on the rows themselves.
    assert all(each["row"] == each["training"] for each in found["parts"])
    sizes = [abs(each["part"]) for each in found["parts"]]
    assert sizes == sorted(sizes, reverse=True)


def wrong(store: Any, head: Any) -> np.ndarray:
    said = store.predictions if head is None else head.predict(store.components)
    return np.flatnonzero(said != store.labels)


def explained_mistake(page: Page, number: int, row: int) -> dict[str, Any]:
    """Return what the page says of a row that a head gets wrong."""
    page.evaluate(f"atlas.view.set({{head: {number}, row: {row}, why: true}})")
    return page.evaluate(f"""(async () => {{
        for (let frame = 0; frame < 1000 && atlas.view.current.headData.number !== {number}; frame++)
            await new Promise(requestAnimationFrame);
        const here = atlas.mistake.classes(), found = await atlas.mistake.explained(here);
        const maps = await atlas.data.mapsOf({row}), {{ labels }} = atlas.data.about;
        const near = (label) => atlas.neighbours.nearest({row}, (other) => atlas.data.labels[other] === label, 5);
        const part = (b) => [...atlas.explanation.partMap(found, {row}, maps, [b])];
        return {{...found, ...here, head: null, map: null, parts: found.parts && [...found.parts],
                 maps: found.parts && [...found.parts.keys()].map(part),
                 tipped: found.parts && atlas.mistake.tipping(found),
                 near: [here.predicted, here.truth].map((name) => near(labels.indexOf(name)))}};
    }})()""")


def mistake_compared(store: Any, head: Any, row: int, found: dict[str, Any]) -> None:
    """Hold the view of a mistake against what the figure draws, and what it is made of."""
    fitted = Head.of(store.head if head is None else head)
    said = store.predictions[row] if head is None else head.predict(store.components[[row]])[0]
    predicted, truth = said.item(), store.labels[row].item()
    assert [found["predicted"], found["truth"]] == [str(predicted), str(truth)]
    between = float(store.explain([row], [SVMTarget(predicted, versus=truth)], head=fitted).values)
    np.testing.assert_allclose(found["value"], between, rtol=1e-6, atol=1e-6)
    for label, near in zip((predicted, truth), found["near"], strict=True):
        distances = np.linalg.norm(store.components - store.components[row], axis=1)
        distances[(store.labels != label) | (np.arange(len(store)) == row)] = np.inf
        order = np.argsort(distances, kind="stable")[:5]
        assert [other for other, _ in near] == order.tolist()
        np.testing.assert_allclose([distance for _, distance in near], distances[order], rtol=1e-9)
    if not store.manifest["adds_up"]:
        assert found["parts"] is None
        return
    target = SVMTarget(predicted, versus=truth)
    steps = Steps.of(store.maps([row]), fitted, target, COMPONENTS)
    top = max(1.0, abs(steps.value))
    assert abs(found["value"] - steps.value) <= 1e-6 * top
    assert abs(found["baselineValue"] - steps.start) <= 1e-6 * top
    assert abs(sum(found["parts"]) + found["baselineValue"] - found["value"]) <= 1e-6 * top
    for part in steps.parts:
        (b,) = part.components
        expected = part.map.flatten().numpy() * np.exp(steps.log_scale)
        shown = np.array(found["maps"][b]) * np.exp(found["logScale"])
        np.testing.assert_allclose(shown, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
        assert abs(found["parts"][b] - part.rise) <= 2e-2 * top  # as exact as half precision is
    secants, start, log_scale = decision_steps(store.maps([row]), fitted, target)
    parts = (secants[0] * (torch.from_numpy(store.components[row]) - start[0]) * log_scale.exp()).numpy()
    np.testing.assert_allclose(found["parts"], parts, rtol=0, atol=1e-6 * top)
    if steps.value > 0:  # the fewest, from the largest on
        left = steps.value - np.concatenate([[0.0], np.cumsum(np.sort(parts[parts > 0])[::-1])])
        enough = np.flatnonzero(left <= 1e-6 * steps.value)
        assert found["tipped"] == (np.argsort(-parts)[: enough[0]].tolist() if len(enough) else None)


@needs_chromium
def test_the_view_of_a_mistake_equals_the_figure(opened: Any, page: Page) -> None:
    store, heads, file = opened
    visit(page, file.as_uri())
    seen = 0
    for number, (name, head) in enumerate({SAVED: None, **heads}.items()):
        for row in [] if name in ("regressor", "one class") else wrong(store, head)[:4].tolist():
            mistake_compared(store, head, row, explained_mistake(page, number, row))
            seen += 1
    assert seen > 6
    assert not complaints(page)


@needs_chromium
def test_the_parts_of_a_mistake_lead_from_where_both_classes_are_even(page: Page, tmp_path: Path) -> None:
    net, data = problem()  # features are means over positions
    store = atlas.build(net, data, [layer(net)], tmp_path / "atlas", progress=False)
    few = SVC().fit(store.components[:12], store.labels[:12])  # wrong quite often
    visit(page, write_page(store, tmp_path / "page", heads={"few": few}).as_uri())
    seen = 0
    for number, head in enumerate([None, few]):
        for row in wrong(store, head)[:6].tolist():
            found = explained_mistake(page, number, row)
            mistake_compared(store, head, row, found)
            seen += abs(found["baselineValue"]) < 1e-6 * abs(found["value"])
            assert np.abs(np.sum(found["maps"], axis=1) - found["parts"]).max() < 2e-2 * max(map(abs, found["parts"]))
    assert seen > 6
    expect(page.locator("#mistake-key")).to_contain_text("from 0, where the two are even, to ")
    assert not complaints(page)


@needs_chromium
@pytest.mark.parametrize("classes", [2, 3])
def test_evidence_against_the_normal_class_is_shown_first(page: Page, tmp_path: Path, classes: int) -> None:
    net, data = problem(classes=classes)
    store = atlas.build(net, data, [layer(net)], tmp_path / "atlas", progress=False)
    predicted = [int((store.predictions == label).argmax()) for label in (0, 1)]  # normal, and not
    visit(page, store.to_html(tmp_path / "page", normal=0).as_uri())
    for row in predicted:
        answer = page.evaluate(
            f"atlas.explain({row}, {{versus: atlas.view.current.versus}}).then(({{value}}) => value)"
        )
        assert answer == pytest.approx(float(store.explain([row], SVMTarget(versus=0)).values), rel=1e-4, abs=1e-6)
        assert (answer < 0) == (store.predictions[row] == 0)
    expect(page.locator("#category option:checked")).to_have_text("anything but 0")
    page.select_option("#category", "0")
    expect(page).to_have_url(re.compile("versus=null"))
    page.select_option("#category", "null")
    expect(page).not_to_have_url(re.compile("versus"))
    expect(page.locator("#bars thead")).to_contain_text("its change")
    expect(page.locator("#facts")).to_contain_text(": above 0 is ")
    assert not re.search("Euclidean|[Ss]upport vector|Intercept|nu |P−", page.locator("main").inner_text())
    page.check("#math")
    expect(page.locator("#bars thead")).to_contain_text("secant g")
    expect(page.locator("#vectors-title")).to_have_text("Strongest support vectors")
    expect(page.locator("#near-where")).to_contain_text("Euclidean")
    assert "math=true" in page.url
    page.goto("about:blank")
    visit(page, (tmp_path / "page" / "index.html").as_uri())
    expect(page.locator("#math")).to_be_checked()  # it is remembered
    page.uncheck("#math")
    assert page.evaluate("atlas.palette.opacityOf(1)") == 0.75  # the photo stays visible under a strong map
    with pytest.raises(ValueError, match="is not a class"):
        store.to_html(tmp_path / "page", normal="good")
    assert not complaints(page)


@needs_chromium
def test_the_nearest_patches_of_other_images_are_shown(page: Page, tmp_path: Path) -> None:
    x, labels = images(30)
    net = backbone()
    rows, _ = extract_features(net, [x], net[0], pool="dense", progress=False)
    head = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(rows, rows[:, 0] > np.median(rows[:, 0]))
    dense = PCASVMNet(net, head, net[0], pool="dense").eval()
    store = atlas.build(dense, TensorDataset(x, labels), [net[0]], tmp_path / "atlas", progress=False)
    distances = np.linalg.norm(store.components - store.components[5], axis=1)
    distances[store.rows == store.rows[5]] = np.inf
    visit(page, store.to_html(tmp_path / "page").as_uri() + "#row=5")
    page.locator("#near .tile").nth(9).wait_for()
    expect(page.locator("#near .tile")).to_have_count(10)
    expect(page.locator("#title")).to_have_text("Atlas of 120 patches")
    expect(page.locator("#near-title")).to_have_text("Nearest patches of other images")
    expect(page.locator("#image-id")).to_contain_text(f"1 {tuple(store.places[5].tolist())}")
    page.locator("#near button").first.click()
    expect(page.locator("#image-id")).to_contain_text(f"(row {distances.argmin()})")
    assert not complaints(page)


@needs_chromium
@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "one file"])
def test_the_view_of_a_mistake_is_offered_where_there_is_one(
    single_file: bool, page: Page, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mistake")
    store = built(folder / "atlas", 3, ContributionCAM, names := ["ant", "second", "cat"])
    assert store.labels is not None
    few = SVC().fit(store.components[:9], store.labels[:9])  # wrong quite often
    out = folder / ("page.html" if single_file else "page")
    file = write_page(store, out, heads={"few": few}, single_file=single_file)
    said = few.predict(store.components)
    row = next(row for row in wrong(store, few).tolist() if 1 in (said[row], store.labels[row]))
    right = int(np.flatnonzero(said == store.labels)[0])
    predicted, truth = (names[int(label)] for label in (said[row], store.labels[row]))
    visit(page, file.as_uri() + f"#head=1&row={row}")
    why, panel = page.locator("#why"), page.locator("#mistake-panel")
    expect(why).to_be_visible()
    expect(why).to_have_text(f"Why not {truth}?")
    expect(panel).to_be_hidden()
    why.click()
    page.locator("#mistake .tile, #near-truth .tile").nth(10).wait_for()
    expect(panel).to_be_visible()
    expect(page).to_have_url(re.compile("why=true"))
    expect(page.locator("#mistake-title")).to_have_text(f"Why {predicted}, and not {truth}?")
    note = page.locator("#mistake-note")
    expect(note).to_have_text(re.compile(rf"^Predicted: {predicted}\. Labelled: {truth}\. Between "))
    expect(page.locator("#mistake-key")).to_contain_text(f"Red favours {predicted}, blue favours {truth}")
    # The amounts below the maps, after the first, which is all of them, are the parts of all components.
    lines = page.locator("#mistake .line:nth-child(3)").all_text_contents()
    whole, *amounts = [float(line.split(",")[0].replace("\N{MINUS SIGN}", "-")) for line in lines]
    assert len(amounts) == COMPONENTS
    assert sum(amounts) == pytest.approx(whole, abs=0.01 * max(map(abs, amounts)))
    assert [abs(each) for each in amounts] == sorted(map(abs, amounts), reverse=True)
    assert all(line.endswith(predicted if float(line[0] + "1") > 0 else truth)
               for line in (each.replace("\N{MINUS SIGN}", "-") for each in lines))  # fmt: skip
    expect(page.locator("#near-note")).to_contain_text("not necessarily training images")
    # A neighbour can be gone to; where nothing is wrong, nothing is offered.
    label = int(store.labels[row])
    near = page.evaluate(f"atlas.neighbours.nearest({row}, (other) => atlas.data.labels[other] === {label}, 1)[0][0]")
    page.locator("#near-truth button").first.click()
    expect(page.locator("#image-id")).to_contain_text(f"(row {near})")
    page.evaluate(f"atlas.view.set({{row: {right}}})")
    expect(why).to_be_hidden()
    expect(panel).to_be_hidden()
    assert not complaints(page)


@needs_chromium
def test_what_is_not_known_of_a_mistake_is_said(page: Page, tmp_path: Path) -> None:
    store = FakeStore(60)
    some = store.labels < 2
    knows_two = SVC().fit(store.components[some], store.labels[some])
    file = write_page(store, tmp_path / "page", heads={"two": knows_two})
    row = int(np.flatnonzero(store.labels == 2)[0])
    visit(page, file.as_uri() + f"#head=1&row={row}&why=true")
    expect(page.locator("#mistake-note")).to_have_text("This head has no class class 2.")
    expect(page.locator("#near-truth .tile")).to_have_count(5)
    assert not complaints(page)


@needs_chromium
def test_names_of_images_do_not_repeat_their_class(page: Page, tmp_path: Path) -> None:
    store = FakeStore(20)
    names = [
        "{0}/{1}_0007.jpg",
        "test/{0}/7.jpg",
        "x\\{0}\\7.jpg",
        "site A/patient 7/scan.png",
        "7",
        f"{'long' * 10}.png",
    ]
    expected = ["{1}_0007.jpg", "{0} · test/7.jpg", "{0} · x/7.jpg", "{0} · site A/patient 7/scan.png", "{0} · 7"]
    expected.append("{0} · …" + ("long" * 10 + ".png")[-31:])
    of = [f"class {label}" for label in store.labels]
    store.ids = [names[row % 6].format(of[row], of[row].upper()) for row in range(20)]
    visit(page, write_page(store, tmp_path / "page").as_uri())
    found = page.evaluate("atlas.data.ids.map((_, row) => atlas.panels.titleOf(row))")
    assert found == [expected[row % 6].format(of[row], of[row].upper()) for row in range(20)]
    page.locator("#highest .line wbr").first.wait_for(state="attached")
    assert not complaints(page)


@needs_chromium
def test_gradients_and_secants_equal_those_of_the_kernels(page: Page, tmp_path: Path) -> None:
    """Anywhere: on support vectors, far from all, with a baseline at the same place, near it and far away."""
    visit(page, write_page(FakeStore(5), tmp_path / "page").as_uri())
    rng = np.random.default_rng(1)
    p, labels = clouds(2)
    points = [p[0], p[1], 5 * rng.normal(size=3), 40 * rng.normal(size=3), 1e-3 * rng.normal(size=3)]
    starts = [np.zeros(3), p[0], p[1] * (1 + 1e-9), p[2], 30 * rng.normal(size=3)]
    machines = [SVC(gamma=gamma) for gamma in (1e-6, 0.01, 1.0, 30.0, 1e4)]
    machines += [SVC(kernel="poly", degree=degree, coef0=2.0) for degree in (1, 2, 5)]
    machines += [SVC(kernel="sigmoid", gamma=gamma, coef0=-1.0) for gamma in (0.01, 1.0, 8.0)]
    blank = 0
    for fitted in machines:
        head = Head.of(fitted.fit(p, labels))
        found = page.evaluate(f"""(() => {{
            const whole = atlas.machine.read({json.dumps(machine_data(head, p))}), seed = Float64Array.of(1);
            const numbers = ({{gradient, logScale}}) => ({{gradient: [...gradient], logScale}});
            return {json.dumps([point.tolist() for point in points])}.map((p) => [
                numbers(atlas.machine.gradient(whole, seed, p)),
                ...{json.dumps([start.tolist() for start in starts])}.map(
                    (p0) => numbers(atlas.machine.gradient(whole, seed, p, p0))),
            ]);
        }})()""")
        for point, answers in zip(points, found, strict=True):
            for start, answer in zip([None, *starts], answers, strict=True):
                trace, at = (None if x is None else head(torch.from_numpy(x[None])) for x in (point, start))
                grad, log_scale = head.pullback(trace, {1: None}, at)  # type: ignore[arg-type]
                expected = grad[0, 0].numpy()
                size = np.abs(expected).max()
                blank += size == 0  # on a support vector, all others being far away
                ratio = np.exp(answer["logScale"] - float(log_scale[0, 0]))
                np.testing.assert_allclose(
                    np.array(answer["gradient"]) * ratio, expected, atol=1e-7 * size if size else 1e-12
                )
    assert blank < 10  # of 330


@needs_chromium
@pytest.mark.parametrize("baseline", ["neutral", "zero"])
def test_a_forests_decisions_for_the_predicted_class_equal_pythons(page: Page, tmp_path: Path, baseline: str) -> None:
    net, data = network(3, None)
    store = atlas.build(net, data, ["1"], tmp_path / "atlas", baseline=baseline, progress=False)
    forest = RandomForestClassifier(20, random_state=0).fit(store.components, store.labels)
    file = write_page(store, tmp_path / "page", heads={"forest": forest})
    visit(page, file.as_uri() + "#head=1")
    rows = (0, 7, 31, 59)
    answers = asked(page, [{"row": row, "head": "forest", "category": None, "versus": None} for row in rows])
    for row, found in zip(rows, answers, strict=True):
        compared(store, forest, SVMTarget(), row, found)
    assert any(found["nu"] for found in answers)
    expect(page.locator("#bars table")).to_have_count(1)
    expect(page.locator("#vectors-panel")).to_be_hidden()
    other = asked(page, [{"row": 0, "head": "forest", "category": 0, "versus": 1}])[0]
    assert "RandomForestClassifier needs Python" in other["reason"]
    assert not complaints(page)


@needs_chromium
def test_heads_that_the_page_cannot_compute_are_said_to_be_so(page: Page, tmp_path: Path) -> None:
    store = built(tmp_path / "atlas", 3, ClosedFormGradCAM)
    beyond = make_pipeline(Nystroem(n_components=8), LinearSVC()).fit(store.components, store.labels)
    file = write_page(store, tmp_path / "page", heads={"beyond": beyond})
    visit(page, file.as_uri() + "#head=1&colour=error")
    expect(page.locator("#parts-note")).to_contain_text("cannot take this head's decision apart")
    page.locator("#components canvas").first.wait_for()
    row = wrong(store, beyond)[0]
    page.evaluate(f"atlas.view.set({{row: {row}, why: true}})")
    expect(page.locator("#mistake-note")).to_contain_text("cannot take this head's decision apart")
    expect(page.locator("#near-truth .tile")).to_have_count(5)
    right = int((beyond.predict(store.components) == store.labels).sum())
    page.evaluate("atlas.view.set({judged: 'right'})")
    expect(page.locator("#count")).to_have_text(re.compile(f"^{right} of"))
    assert not complaints(page)


@needs_chromium
def test_methods_that_are_not_linear_show_components_alone(page: Page, tmp_path: Path) -> None:
    store = built(tmp_path / "atlas", 3, ClosedFormLayerCAM)
    file = write_page(store, tmp_path / "page")
    visit(page, file.as_uri())
    expect(page.locator("#parts-note")).to_contain_text("not a sum of component maps")
    # Both signs have a map of their own.
    expect(page.locator("#components canvas")).to_have_count(8)
    expect(page.locator("#large canvas")).to_have_count(1)
    page.evaluate(f"atlas.view.set({{row: {wrong(store, None)[0]}, why: true}})")
    expect(page.locator("#mistake-note")).to_contain_text("do not add up to it")
    expect(page.locator("#mistake .tile")).to_have_count(1)
    assert not complaints(page)


@needs_chromium
def test_a_head_without_a_machine_shows_components_alone(page: Page, tmp_path: Path) -> None:
    store = built(tmp_path / "atlas", 3, ContributionCAM, head=make_pipeline(StandardScaler(), PCA(1)))
    file = write_page(store, tmp_path / "page")
    visit(page, file.as_uri())
    page.locator("#components canvas").first.wait_for()
    for name in ("parts-panel", "vectors-panel", "decision-controls"):
        expect(page.locator(f"#{name}")).to_be_hidden()
    assert not complaints(page)


@needs_chromium
def test_factors_of_components_and_what_is_not_on_the_maps_take_part(page: Page, tmp_path: Path) -> None:
    store, rng = FakeStore(30), np.random.default_rng(3)
    store.log_scale[4:] = [0.0, -2.0, -900.0]  # as behind a KernelPCA, far from all points
    store.log_scale[8:] = [-900.0, -901.0, -950.0]
    store.remainder = rng.normal(size=(30, 3))  # type: ignore[assignment]
    store.baseline_values = rng.normal(size=(30, 3))  # another one for every image
    visit(page, write_page(store, tmp_path / "page").as_uri())
    rows = [0, 4, 5, 8, 29]
    answers = asked(page, [{"row": row, "category": 1, "versus": 0} for row in rows])
    whole = store.maps(np.arange(30))
    expected = recombined(whole, Head(list(store.head.stages)[1:]), SVMTarget(1, 0))
    for row, found in zip(rows, answers, strict=True):
        nu, log_scale = float(expected.nu[row, 0]), float(expected.log_scale[row, 0])
        assert abs(np.log(found["nu"] / nu) + found["logScale"] - log_scale) < 1e-3
        reference = expected.maps[row, 0].flatten().numpy() / nu
        np.testing.assert_allclose(np.array(found["map"]) / found["nu"], reference, atol=1e-3)
        remainder = float(expected.remainder[row, 0]) * np.exp(log_scale)  # type: ignore[index]
        assert found["remainder"] == pytest.approx(remainder, rel=1e-5)
        assert found["baselineValue"] == pytest.approx(float(expected.baseline_values[row, 0]))  # type: ignore[index]
    assert not complaints(page)


@needs_chromium
def test_without_labels_and_pictures_the_rest_works(page: Page, tmp_path: Path) -> None:
    store = FakeStore(40)
    store.labels = None
    store.pictures = [b""]
    visit(page, write_page(store, tmp_path / "page").as_uri() + "#colour=error&class=1")
    expect(page.locator("#legend span")).to_have_count(3)  # the predicted classes
    predicted = store.head.labels(Head(list(store.head.stages)[1:])(torch.from_numpy(store.components)))
    assert page.evaluate("atlas.view.selected().length") == (predicted == 1).sum()
    page.locator("#highest canvas").nth(3).wait_for()
    expect(page.locator("#judged")).to_be_hidden()
    page.evaluate("atlas.view.set({why: true})")
    expect(page).to_have_url(re.compile("why=true"))
    expect(page.locator("#why")).to_be_hidden()
    expect(page.locator("#mistake-panel")).to_be_hidden()
    assert not complaints(page)


@needs_chromium
def test_labels_that_are_numbers_have_a_scale_and_no_classes(page: Page, tmp_path: Path) -> None:
    store = FakeStore(40)
    store.labels = store.components[:, 0] ** 2
    store.head = Head.of([PCA(3).fit(np.eye(4)), SVR().fit(store.components, store.labels)])
    store.predictions = store.labels
    file = write_page(store, tmp_path / "page")
    visit(page, file.as_uri())
    expect(page.locator("#legend span")).to_have_count(5)
    expect(page.locator("#class")).to_be_hidden()
    expect(page.locator("#category")).to_be_hidden()
    expect(page.locator("#facts")).to_contain_text("Predicted value")
    page.locator("#bars tr").nth(3).wait_for()
    assert not complaints(page)


@needs_chromium
def test_a_missing_file_is_named(page: Page, tmp_path: Path) -> None:
    file = write_page(FakeStore(20), tmp_path / "page")
    (file.parent / "data" / "maps-00000.js").unlink()
    visit(page, file.as_uri())
    expect(page.locator("#problem")).to_contain_text("data/maps-00000.js is missing")


@needs_chromium
def test_maps_are_read_from_the_right_chunk(page: Page, tmp_path: Path) -> None:
    store = FakeStore(530, components=5, shape=(33, 31))
    file = write_page(store, tmp_path / "page")
    assert len(list((file.parent / "data").glob("maps-*.js"))) > 8
    visit(page, file.as_uri())
    for row in (0, 31, 32, 255, 256, 400, 529):
        block = row // 256 * 256
        maps = store.maps(np.arange(block, min(block + 256, 530)))
        found = page.evaluate(f"atlas.data.mapsOf({row}).then((found) => [...found.maps.slice(-3), ...found.nu])")
        expected = maps.maps[row - block, -1].flatten()[-3:] / maps.nu[row - block, -1]
        np.testing.assert_allclose(found[:3], expected, atol=1e-3)
        np.testing.assert_allclose(found[3:], maps.nu[row - block], rtol=1e-6)


# --- how long it takes: no test, since no test asserts a time ---------------------------------------------------------


def measure_opening(rows: int = 10_000, single_file: bool = False) -> None:
    """Print how long a page of so many images takes to be written and to open, and what memory it takes.

    From the repository: ``PYTHONPATH=tests python tests/atlas/test_explorer.py``.
    """
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        start = time.perf_counter()
        file = write_page(FakeStore(rows, components=16), Path(folder) / "page", single_file=single_file)
        written = time.perf_counter() - start
        size = sum(path.stat().st_size for path in file.parent.rglob("*") if path.is_file())
        browser = launched(playwright)
        page = browser.new_page()
        start = time.perf_counter()
        visit(page, file.as_uri())
        page.locator("#highest canvas").first.wait_for()
        seconds = time.perf_counter() - start
        opened = page.evaluate("performance.getEntriesByName('open')[0].startTime") / 1000
        before = _memory()
        for k in range(40):  # far apart, so that other files are read
            page.evaluate(f"atlas.view.set({{row: {k * (rows // 40)}, component: {k % 16}}})")
            page.evaluate("new Promise((resolve) => setTimeout(resolve, 60))")
        after = _memory()
        browser.close()
    kind = "one file" if single_file else "folder"
    print(f"{kind}, {rows} rows: written in {written:.1f} s, {size / 2**20:.0f} MiB")
    print(f"  can be used after {opened:.2f} s, all drawn after {seconds:.2f} s, largest process {before:.0f} MiB")
    print(f"  after 40 images far apart {after:.0f} MiB")


def _memory() -> float:
    """Return the resident memory of the largest process of Chromium, the page's own, in MiB."""
    found = subprocess.run(["ps", "-C", "chromium", "-o", "rss="], capture_output=True, text=True, check=True).stdout
    return max(map(int, found.split())) / 1024


if __name__ == "__main__":
    measure_opening()
    measure_opening(single_file=True)


@needs_chromium
def test_training_images_that_are_not_in_the_atlas_come_with_the_head(page: Page, tmp_path: Path) -> None:
    store = FakeStore(30)
    rows = store.components[:30] + 1e-3  # none of them is a support vector
    store.components = rows
    support = store.head.stages[-1].support.tolist()
    tiles = page.locator("#vectors .tile")
    for known in (support, support[:1], []):
        hostile = "</script><img src=x onerror=alert(2)>.jpg"
        store.head.examples = {row: Example(f"cat/{row}{hostile}", store.pictures[row % 64]) for row in known}
        visit(page, write_page(store, tmp_path / f"page{len(known)}", single_file=len(known) == 1).as_uri())
        tiles.first.wait_for()
        shown = [re.search(rf"cat/(\d+){re.escape(hostile)}", text) for text in tiles.all_text_contents()]
        drawn = [tile.locator("canvas").count() for tile in tiles.all()]
        assert [bool(each) for each in shown] == [count == 1 for count in drawn]
        assert {int(each[1]) for each in shown if each} <= set(known)
        note = page.locator("#vectors-note").text_content()
        assert ("Some are not in this atlas" in note) == (not all(shown))
        if known == support:
            assert all(shown)  # and drawn: of noise, not of one colour
            painted = "(all) => all.map((each) => new Set(each.getContext('2d').getImageData(0, 0, 40, 40).data).size)"
            assert min(tiles.locator("canvas").evaluate_all(painted)) > 20
        assert not complaints(page)
