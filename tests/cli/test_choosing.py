"""What ``fit`` chooses and says of it, and thresholds of good parts: from photos to the verdict of an exported file."""

import csv
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold, StratifiedKFold, cross_val_score
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, OneClassSVM
from torch import nn
from torchvision.transforms import v2

from pytorch_grad_cam_pcasvm import Head, ResidualTarget, SVMTarget, evaluation, export, extract_features, load_model
from pytorch_grad_cam_pcasvm.head import tensor
from pytorch_grad_cam_pcasvm.head.anomalies import measure_anomaly
from pytorch_grad_cam_pcasvm.studio.cli import choosing, folders, main
from pytorch_grad_cam_pcasvm.studio.model.choices import choose_threshold

SIZE = 32


def backbone():
    """A small network, and how it wants its pictures; the command line names it."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 12, 5, 2, 2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(12, 40, 3, 2, 1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return net, v2.Compose([v2.Resize((SIZE, SIZE)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


NETWORK = ["--backbone", f"{__name__}:backbone", "--features", "1", "--device", "cpu", "--no-cache"]


def save(path, random, tint, spread=12.0):
    """Write a texture with a tint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = random.normal(128, spread, (SIZE, SIZE, 3)) + np.array(tint)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)


def make_photos(root, counts, *, apart=10.0, seed=0):
    """Write photos of some classes, which differ in their tint, and by chance."""
    random = np.random.default_rng(seed)
    for number, (name, count) in enumerate(counts.items()):
        for row in range(count):
            tint = random.normal(0, 6, 3) + apart * np.eye(3)[number % 3]
            save(root / name / f"{row:02}.png", random, tint)
    return root


def read_features(model, root):
    folder = model.preparation.folder(root)
    loader = torch.utils.data.DataLoader(folder, 16)
    return extract_features(model.net.backbone, loader, "1", pool="mean", progress=False)


def run(capsys, *words):
    """Return what a command prints, and its errors."""
    status = main([*map(str, words)])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_choice_is_told_and_stored(tmp_path, capsys):
    photos, file = make_photos(tmp_path / "photos", {"crack": 30, "good": 20}), tmp_path / "model.safetensors"
    status, told, _ = run(capsys, "fit", photos, *NETWORK, "--out", file)
    assert status == 0
    line = re.search(r"chose (\d+) components, C ([\d.]+)(, balanced classes)?, by cross-validation of 50 "
                     r"photos: AUROC (0\.\d+|1\.0+) ± (0\.\d+) \(.* components, C .*: .*\); choose yourself: "
                     "--components, --C, --class-weight", told)  # fmt: skip
    assert line
    model = load_model(file, f"{__name__}:backbone")
    chosen, score = model.about["chosen"], model.about["score"]
    assert chosen["components"] == int(line[1])
    assert chosen["C"] == float(line[2])
    assert chosen["class_weight"] == ("balanced" if line[3] else None)
    assert len(chosen["compared"]) == 2 * 2 * 2  # 8 and 16 of 40 photos in a fold, 32 in an inner one
    names = "components", "C", "class_weight"
    own = next(one for one in chosen["compared"] if all(one[name] == chosen[name] for name in names))
    assert f"{own['auroc']:.3f}" == line[4]
    assert (score["folds"], score["photos"]) == (5, 50)
    assert f"AUROC of these folds, each with a choice of its own: {score['auroc']:.3f} ± {score['error']:.3f}\n" in told
    # And again, by scikit-learn.

    features, labels = read_features(model, photos)
    for one in chosen["compared"]:
        pipeline = make_pipeline(StandardScaler(), PCA(one["components"], svd_solver="full"),
                                 SVC(C=one["C"], class_weight=one["class_weight"]))  # fmt: skip
        scores = cross_val_score(pipeline, features.astype(float), labels, cv=StratifiedKFold(5), scoring="roc_auc")
        assert one["auroc"] == pytest.approx(scores.mean(), abs=1e-6)
        assert one["error"] == pytest.approx(scores.std(ddof=1) / 5**0.5, abs=1e-6)
    assert len(model.net.head.stages[1].components) == chosen["components"]


@pytest.mark.parametrize(("typed", "wanted"), [
    (["--components", "4", "--C", "2", "--class-weight", "none"], ""),
    (["--components", "4", "--C", "2"], "--class-weight"),
    (["--C", "2", "--class-weight", "balanced"], "--components"),
    (["--classifier", "sklearn.linear_model:LogisticRegression"], "--components"),
    (["--kernel", "linear", "--components", "8"], "--C, --class-weight"),
])  # fmt: skip
def test_what_is_typed_is_kept(tmp_path, capsys, typed, wanted):
    photos, file = make_photos(tmp_path / "photos", {"crack": 30, "good": 20}), tmp_path / "model.safetensors"
    status, told, error = run(capsys, "fit", photos, *NETWORK, *typed, "--out", file)
    assert status == 0, error
    found = re.search(r"chose (\d+) components.*choose yourself: (.*)", told)
    about = load_model(file, f"{__name__}:backbone").about
    if not wanted:
        assert found is None
        assert "chosen" not in about
        assert "each with a choice" not in told
    else:
        assert found[2] == wanted
    if "--components" in typed:
        assert f"wrote {file}: {typed[typed.index('--components') + 1]} components" in told
        assert found is None or found[1] == typed[typed.index("--components") + 1]
    assert 0 <= about["score"]["auroc"] <= 1


def test_few_photos_choose_nothing(tmp_path, capsys):
    photos, file = make_photos(tmp_path / "photos", {"crack": 9, "good": 20}), tmp_path / "model.safetensors"
    status, told, _ = run(capsys, "fit", photos, *NETWORK, "--out", file)
    assert status == 0
    assert ("nothing is chosen, for which each class needs 10 photos: 16 components, C 1 (choose yourself: "
            "--components, --C, --class-weight)") in told  # fmt: skip
    assert "chosen" not in load_model(file, f"{__name__}:backbone").about
    assert "5-fold cross-validation" in told


def test_search_chooses_cost_and_width_alone(tmp_path, capsys):
    photos, file = make_photos(tmp_path / "photos", {"crack": 20, "good": 20}), tmp_path / "model.safetensors"
    status, told, _ = run(capsys, "fit", photos, *NETWORK, "--search", "--out", file)
    assert status == 0
    assert "--search chooses C and gamma alone: 16 components (choose yourself: --components)" in told
    assert "search: --C" in told
    assert not re.search("^chose ", told, re.MULTILINE)
    status, _, error = run(capsys, "fit", photos, "--search", "--groups", "2", "--out", file)
    assert status == 2
    assert "--search does not keep photos of one object together" in error


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Photos of ten objects of each class, five of each object, which are all but the same."""
    root, random = tmp_path_factory.mktemp("objects"), np.random.default_rng(0)
    for name in ("crack", "good"):
        for part in range(10):
            tint = random.normal(21 * (name == "good"), 15, 3)  # a good score is followed by no hints
            for row in range(5):
                save(root / name / f"part{part:02}{name[0]}" / f"{row}.png", random, tint, spread=3.0)
    return root


def test_photos_of_an_object_stay_together(objects, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    options = ["--components", "8", "--C", "10", "--out", file]
    status, told, _ = run(capsys, "fit", objects, *NETWORK, *options, "--groups", "2")
    assert status == 0
    model = load_model(file, f"{__name__}:backbone")
    features, labels = read_features(model, objects)
    own = np.arange(100) // 5

    pipeline = make_pipeline(StandardScaler(), PCA(8, svd_solver="full"), SVC(C=10.0))
    scores = cross_val_score(pipeline, features.astype(float), labels, groups=own, scoring="roc_auc",
                             cv=StratifiedGroupKFold(5))  # fmt: skip
    assert model.about["score"]["auroc"] == pytest.approx(scores.mean(), abs=1e-6)
    assert model.about["score"]["groups"] == 2
    typed = ["--C", "10", "--class-weight", "none"]  # the number of components alone is chosen
    status, told, _ = run(capsys, "fit", objects, *NETWORK, *typed, "--groups", "2", "--out", file)
    assert re.search("by cross-validation of 100 photos in 20 objects", told)


@pytest.mark.parametrize(("level", "said"), [
    ("1", "--groups 1 is the folders of the classes in"),
    ("3", r"--groups 3: .*crack/part00c/0\.png has no folder at level 3 below .*, only crack/part00c"),
    ("0", "must be at least 1"),
])  # fmt: skip
def test_levels_that_there_are_not(objects, tmp_path, capsys, level, said):
    try:
        status, _, error = run(capsys, "fit", objects, "--groups", level, "--out", tmp_path / "model.safetensors")
    except SystemExit as exit_:
        status, error = exit_.code, capsys.readouterr().err
    assert status == 2
    assert re.search(said, error)


def test_a_score_says_of_how_few_photos_it_is(capsys):
    labels, guessed = np.array(["cat"] * 12 + ["dog"] * 2), np.array(["cat"] * 14)
    found = {"rows": np.arange(14), "predicted": guessed, "folds": [0, 1], "candidates": [0]}
    choosing.tell_score(SimpleNamespace(groups=None), SimpleNamespace(**found, score=1.0, error=0.0), labels)
    assert "AUROC of these folds: 1.000 \N{PLUS-MINUS SIGN} 0.000, which rests on 2 photos of dog\n" in (
        capsys.readouterr().out
    )
    assert choosing.explain_poor(labels, guessed) == "dog not found"
    guessed[12:] = ["dog", "cat"]
    assert choosing.explain_poor(np.append(labels, ["dog"] * 2), np.append(guessed, ["cat"] * 2)) == "dog hardly found"


def test_the_same_file_twice_is_one_photo(tmp_path):
    random = np.random.default_rng(0)
    paths = [tmp_path / name for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png", "b/2.png")]
    for path in paths[:3]:
        save(path, random, [0, 0, 0])
    assert folders.group_photos(paths[:3]) is None
    for path in paths[3:]:
        path.write_bytes(paths[0].read_bytes())
    assert folders.group_photos(paths).tolist() == [0, 1, 2, 0, 0]
    joined = folders.group_photos(paths, ["x", "x", "y", "z", "y"])  # and what is of one object with one of them
    assert joined.tolist() == [0, 0, 0, 0, 0]
    assert folders.group_photos(paths[:3], ["x", "y", "x"]).tolist() == [0, 1, 0]


@pytest.mark.slow
def test_next_step_after_a_poor_score_was_tried(tmp_path, capsys):
    photos = make_photos(tmp_path / "photos", {"crack": 14, "good": 60}, apart=5.0)
    options = ["--class-weight", "none", "--components", "4", "--C", "0.05"]
    status, told, _ = run(capsys, "fit", photos, *NETWORK, *options, "--out", tmp_path / "model.safetensors")
    assert status == 0
    hint = re.search(r"hint: crack \w+ found\. Tried on the same features: (.*) has a balanced accuracy of (\d+)%, "
                     r"and this one (\d+)%; (?:add it|type it in place of (.*))\n", told)  # fmt: skip
    assert hint
    assert int(hint[2]) > int(hint[3]) + 2
    dropped = (hint[4] or "").split(" and ")
    again = [word for flag, value in zip(options[::2], options[1::2], strict=True) if flag not in dropped
             for word in (flag, value)]  # fmt: skip
    status, told, error = run(
        capsys, "fit", photos, *NETWORK, *again, *hint[1].split(), "--out", tmp_path / "model.safetensors"
    )
    assert status == 0, error
    found = int(re.search(r"balanced accuracy (\d+)%", told)[1])
    assert found > int(hint[3]) + 2


def test_next_step_where_nothing_helps(tmp_path, capsys):
    photos = make_photos(tmp_path / "photos", {"crack": 20, "good": 20}, apart=0.0, seed=3)
    status, told, _ = run(
        capsys, "fit", photos, *NETWORK, "--components", "4", "--C", "1", "--out", tmp_path / "model.safetensors"
    )
    assert status == 0
    assert "hint: " in told
    if "Tried on the same features" not in told:
        assert re.search(r"On the same features, --kernel linear \(\d+%\).* no better\. Try --pool max", told)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("options", [[], ["--components", "2"], ["--classifier", "forest"], ["--groups", "2"]])
def test_very_few_photos(tmp_path, capsys, count, options):
    random, photos = np.random.default_rng(1), tmp_path / "photos"
    for name, row in ((name, row) for name in ("crack", "plain") for row in range(count)):
        save(photos / name / f"part{row % 2}" / f"{row}.png", random, [0, 0, 0])
    status, told, error = run(capsys, "fit", photos, *NETWORK, *options, "--out", tmp_path / "model.safetensors")
    assert status == 0, error
    assert count > 1 or "no cross-validation" in told
    assert "hint: " not in told or "More photos are most likely to help: each class needs 10" in told


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Good parts, one of them twice, and parts to look at."""
    root, random = tmp_path_factory.mktemp("parts"), np.random.default_rng(0)
    for row in range(15):
        save(root / "good" / f"{row:02}.png", random, random.normal(0, 4, 3))
    (root / "good" / "15.png").write_bytes((root / "good" / "03.png").read_bytes())
    for row in range(4):
        save(root / "test" / f"good{row}.png", random, random.normal(0, 4, 3))
        save(root / "test" / f"odd{row}.png", random, [60, -60, 0])
    return root


DENSE = ["--pool", "dense", "--sample", "1.0"]
KINDS = {
    "neighbours": [*DENSE, "--classifier", "neighbours", "--components", "8", "--coreset", "1.0"],
    "residual": [*DENSE, "--classifier", "residual", "--components", "8"],
    "pooled": ["--classifier", "sklearn.svm:OneClassSVM", "--components", "8"],
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def tested(parts, request):
    """A model of good parts, its file, and what fit needs for it."""
    file = parts / f"{request.param}.safetensors"
    assert main(["fit", str(parts / "good"), *NETWORK, *KINDS[request.param], "--out", str(file)]) == 0
    return load_model(file, f"{__name__}:backbone"), file, request.param


def test_threshold_is_that_of_photos_left_out(parts, tested):
    model, _, kind = tested
    dense = kind != "pooled"
    photos = model.read(parts / "good")
    rows, _ = extract_features(model.net.backbone, [photos], "1", pool="dense" if dense else "mean", progress=False)
    photo = np.arange(16).repeat(len(rows) // 16)
    own = np.r_[np.arange(15), 3][photo]
    fit = np.flatnonzero(photo < 15) if kind == "neighbours" else np.arange(len(rows))  # a coreset has nothing twice

    last = {"neighbours": [NearestNeighbors(n_neighbors=1)], "residual": [], "pooled": [OneClassSVM()]}[kind]
    scores = np.empty(16)
    for others, left_out in GroupKFold(5).split(rows[fit], groups=own[fit]):
        head = Head.of(make_pipeline(StandardScaler(), PCA(8, random_state=0), *last).fit(rows[fit[others]]))
        for number in np.flatnonzero(np.isin(np.r_[np.arange(15), 3], own[fit[left_out]])):
            scores[number] = measure_anomaly(head, head.values_of(tensor(rows[photo == number]))).max()
    assert scores[3] == scores[15]
    expected = choose_threshold(scores, 0.01, np.r_[np.arange(15), 3])
    assert (expected.rate, expected.count) == (1 / 16, 15)
    assert model.threshold == pytest.approx(expected.score, rel=1e-6)
    assert model.net.head.training_set.preparation["threshold"]["rate"] == 1 / 16


TRUSTED = ["--trust", f"{__name__}:backbone", "--device", "cpu"]


def explained_rows(capsys, photos, out, *options):
    """Return the rows of what ``explain`` writes of photos."""
    status, _, error = run(capsys, "explain", photos, *options, "--out", out)
    assert status == 0, error
    with (out / "values.csv").open() as values:
        return list(csv.DictReader(values))


def test_explain_says_pass_or_fail(parts, tested, tmp_path, capsys):
    model, file, kind = tested
    rows = explained_rows(capsys, parts / "test", tmp_path / "maps", "--model", file, *TRUSTED)
    scores = model.net.anomaly_score(model.read(parts / "test"))
    assert [row["verdict"] for row in rows] == ["pass" if score <= model.threshold else "fail" for score in scores]
    assert {row["threshold"] for row in rows} == {f"{model.threshold:.9g}"}
    if kind != "residual":
        assert [row["verdict"] for row in rows if row["image"].startswith("odd")] == ["fail"] * 4
    page, failed = (tmp_path / "maps" / "index.html").read_text(), sum(row["verdict"] == "fail" for row in rows)
    assert f"{failed} of 8 fail: their anomaly is above the threshold." in page
    assert page.count("<b>fail: anomaly") == failed
    assert page.count("<b>pass: anomaly") == 8 - failed


@pytest.mark.optional
def test_an_exported_file_says_pass_or_fail_as_its_model_does(parts, tested, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    model, file, _ = tested
    rows = explained_rows(capsys, parts / "test", tmp_path / "maps", "--model", file, *TRUSTED)
    line = tmp_path / "line.onnx"
    status, _, error = run(capsys, "export", parts / "good", "--model", file, *TRUSTED, "--out", line)
    assert status == 0, error
    explainer = export.Explainer(line)
    assert explainer.about["threshold"] == model.threshold
    for row in rows:
        outputs = explainer(explainer.prepared(explainer.read(parts / "test" / row["image"]))[None])
        assert explainer.passes(outputs) == (row["verdict"] == "pass")
    again = explained_rows(capsys, parts / "test", tmp_path / "again", "--model", line)
    assert [row["verdict"] for row in again] == [row["verdict"] for row in rows]


def test_what_is_said_of_a_threshold(parts, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    status, told, _ = run(capsys, "fit", parts / "good", *NETWORK, *KINDS["pooled"], "--out", file)
    assert status == 0
    assert re.search(r"threshold \S+: photos above it fail, at most 1 in 16 of new good ones, by the scores of 15 good "
                     r"photos that were left out, a fifth at a time; for 1 in 100, 99 good photos are needed",
                     told)  # fmt: skip
    status, told, _ = run(capsys, "fit", parts / "good", *NETWORK, *KINDS["pooled"], "--rate", "0.1", "--out", file)
    assert re.search(
        r"1 in 10 of new good ones, by the scores of 15 good photos that were left out, a fifth at a time\n", told
    )
    with pytest.raises(SystemExit):
        main(["fit", str(parts / "good"), "--rate", "1"])
    assert "--rate" in capsys.readouterr().err
    assert load_model(file, f"{__name__}:backbone").threshold is not None


def test_objects_of_good_parts_are_left_out_together(objects, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    options = [*NETWORK, *KINDS["pooled"], "--out", file]
    status, told, error = run(capsys, "fit", objects / "good", *options, "--groups", "1")
    assert status == 0, error
    assert "at most 1 in 11 of new good ones, by the scores of 10 objects" in told
    together = load_model(file, f"{__name__}:backbone").threshold
    status, _, error = run(capsys, "fit", objects / "good", *options)
    assert status == 2
    assert "learns from good parts alone" in error
    features, _ = read_features(load_model(file, f"{__name__}:backbone"), objects / "good")

    scores, own = np.empty(50), np.arange(50) // 5
    for others, left_out in GroupKFold(5).split(features, groups=own):
        pipeline = make_pipeline(StandardScaler(), PCA(8, random_state=0), OneClassSVM()).fit(features[others])
        scores[left_out] = -pipeline.decision_function(features[left_out])
    assert together == pytest.approx(scores.max(), rel=1e-5)


@pytest.mark.parametrize("classifier", ["residual", "neighbours", "sklearn.svm:OneClassSVM"])
def test_evaluate_measures_what_explain_shows_of_good_parts(parts, classifier, tmp_path, capsys, monkeypatch):
    studies = []

    def report(study, out, **options):
        studies.append(study)
        raise RuntimeError("measured")

    monkeypatch.setattr(evaluation.Study, "report", report)
    monkeypatch.chdir(tmp_path)
    own = ["--classifier", classifier, "--components", "8", "--out", "model.safetensors"]
    status, told, error = run(capsys, "fit", parts / "good", *NETWORK, *own)
    assert status == 0, error
    assert "evaluate it with --masks" in told
    options = ["--trust", f"{__name__}:backbone", "--device", "cpu", "--all-images"]
    status, _, error = run(capsys, "evaluate", parts / "test", *options)
    assert (status, error.split("\r")[-1].strip()) == (2, "error: measured")  # behind a bar of progress
    (study,) = studies
    assert study.target == (ResidualTarget() if classifier == "residual" else SVMTarget(sign="-"))
    x = study.read([0, 1])[0]
    assert study.explained("ContributionCAM", x, study.targets(x))[0].maps.any()
