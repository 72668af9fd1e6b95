"""Atlases of heads with refits: how sure the decision for each image is, in the files and on the page."""

import json
import re

import numpy as np
import pytest
from atlases import images, layer, problem
from browser import complaints, expect, needs_chromium, visit
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch.utils.data import TensorDataset

pytest.importorskip("pyarrow")

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, SVMTarget, atlas, extract_features, resample_heads
from pytorch_grad_cam_pcasvm.studio.atlas.columns import ERROR, SURE
from pytorch_grad_cam_pcasvm.studio.pictures.answers import write_error

pytestmark = pytest.mark.filterwarnings("ignore::pytorch_grad_cam_pcasvm.UnstableComponentWarning")


@pytest.fixture(scope="module", params=[2, 3], ids=lambda count: f"{count} classes")
def explained(request, tmp_path_factory):
    """Return an atlas of photos, and what ``explain`` gives of the predicted class."""
    net, data = problem(classes=request.param)
    features, labels = extract_features(net.backbone, [data.tensors], progress=False)
    pipeline = make_pipeline(StandardScaler(), PCA(4), SVC()).fit(features, labels)
    net = PCASVMNet(net.backbone, pipeline).eval()
    net.head.resamples = resample_heads(pipeline, features, labels, n=5)
    photos = TensorDataset(*images(24, request.param, seed=4))
    folder = tmp_path_factory.mktemp("atlas") / "a"
    store = atlas.build(net, photos, [layer(net)], folder, method=ContributionCAM, progress=False)
    maps = ContributionCAM(net, [layer(net)]).explain(photos.tensors[0], [SVMTarget()])
    return store, maps


def test_the_files_have_what_explain_says_of_the_predicted_class(explained):
    store, maps = explained
    assert store.table.column(ERROR) == pytest.approx(maps.values_error[:, 0].numpy(), rel=1e-4)
    bound = maps.maps[:, 0].abs() / maps.error[:, 0]
    near = ((bound / bound[maps.sure()[:, 0]].min()) - 1).abs() < 1e-3
    sure = store.table.column(SURE)
    assert 0 < sure.mean() < 1
    assert not ((sure == 1) ^ maps.sure()[:, 0].numpy())[~near.numpy()].any()


def test_without_refits_there_are_none(tmp_path):
    net, data = problem()
    store = atlas.build(net, data, [layer(net)], tmp_path / "a", method=ContributionCAM, progress=False)
    assert not {SURE, ERROR} & store.manifest["columns"].keys()


@needs_chromium
def test_the_page_says_how_sure_the_decision_is(explained, tmp_path, page):
    store, maps = explained
    visit(page, store.to_html(tmp_path / "page").as_uri())
    value, error = maps.values[:, 0].numpy(), maps.values_error[:, 0].numpy()
    is_open = np.abs(value) < 2 * error
    rows = [int(np.argmax(is_open)), int(np.argmin(is_open))]
    assert is_open[rows].tolist() == [True, False]
    for row in rows:
        page.evaluate(f"atlas.view.set({{ row: {row} }})")
        facts = page.locator("#facts")
        expect(facts).to_contain_text(write_error(value[row], error[row]).replace("-", "\N{MINUS SIGN}"))
        assert (": open, other training photos might decide otherwise" in facts.text_content()) == is_open[row]
        large = page.locator("#large")
        expect(large).to_contain_text("pale and hatched: another hundred training photos might turn it around")
        found = page.evaluate(f"atlas.explain({row}).then((found) => Array.from(found.sure))")
        assert np.array_equal(found, store.table.column(SURE)[row].ravel())
    page.evaluate("atlas.view.set({ judged: 'open', colour: 'error' })")
    expect(page.locator("#count")).to_have_text(f"{is_open.sum()} of 24 images")
    expect(page.locator("#legend")).to_have_text("rightopenwrong")
    page.evaluate("atlas.view.set({ judged: 'wrong' })")
    wrong = (store.correct == 0) & ~is_open
    expect(page.locator("#count")).to_have_text(f"{wrong.sum()} of 24 images")
    page.evaluate("atlas.view.set({ judged: 'all' })")
    expect(page.locator("#help-sure")).to_contain_text("A decision within two of them from where it turns is open")
    assert page.evaluate("atlas.maps.withError(-0.01, 0.5)") == write_error(-0.01, 0.5) == "0.0 ± 0.5"
    unstable = [b + 1 for b, cosine in enumerate(store.head.resamples.stability) if cosine < 0.9]
    tiles = page.locator("#components").text_content()
    assert [int(b) for b in re.findall(r"Component (\d+): position \S+ \(not stable\)", tiles)] == unstable
    pictures, note = [], page.locator("#components-note")
    for chance in ([], [0], []):
        page.evaluate(f"atlas.data.about.unstable = {chance}; atlas.view.set({{ scale: 'one' }})")
        expect(note).to_contain_text("All on one scale")
        pictures.append(page.evaluate("document.querySelector('#components canvas').toDataURL()"))
        page.evaluate("atlas.view.set({ scale: 'own' })")
        expect(note).to_contain_text("a strongest colour of its own")
    assert pictures[0] == pictures[2] != pictures[1]  # a map of chance is hatched
    # Of others of several classes nothing is known; between two classes there is one decision.
    classes = len(store.manifest["classes"])
    asked = {"category": (int(store.predictions[rows[0]]) + 1) % classes, "row": rows[0]}
    known = page.evaluate(f"atlas.explain({rows[0]}, {json.dumps(asked)}).then((found) => Boolean(found.sure))")
    assert known == (classes == 2)
    page.evaluate(f"atlas.view.set({json.dumps(asked)})")
    expect(page.locator("#large")).to_contain_text(
        "pale and hatched" if known else "known for the predicted class against"
    )
    assert not complaints(page)
