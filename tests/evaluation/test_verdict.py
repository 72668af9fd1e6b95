"""Verdicts: every rule, on rows whose answer is known."""

import json

import pytest
from test_evaluation import Corner, Turned, problem

from pytorch_grad_cam_pcasvm import ContributionCAM, PCATarget, evaluation
from pytorch_grad_cam_pcasvm.studio.evaluation.localisation import CHANCE, SHARE
from pytorch_grad_cam_pcasvm.studio.evaluation.positions import POINT
from pytorch_grad_cam_pcasvm.studio.evaluation.report_page import _split_path
from pytorch_grad_cam_pcasvm.studio.evaluation.result import Estimate, Result, Row
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import ANOTHER, BLIND, HEAD, RANDOM
from pytorch_grad_cam_pcasvm.studio.evaluation.sanity import COMPONENTS, CONTRADICTING, ERROR, NOISE, SHIFT
from pytorch_grad_cam_pcasvm.studio.evaluation.verdict import DO_NOT, OPEN, USE, verdict

WON, LOST, OPEN_YET = (0.5, 0.01), (-0.5, 0.01), (0.01, 0.1)
GOOD = {
    ("faithfulness", "deletion", RANDOM): WON,
    ("faithfulness", "insertion", RANDOM): WON,
    ("faithfulness", "deletion", BLIND): WON,
    ("localisation", SHARE, ""): (0.91, 0.01),
    ("localisation", SHARE, CHANCE): WON,
    ("localisation", SHARE, RANDOM): WON,
    ("localisation", SHARE, BLIND): WON,
    ("localisation", POINT, BLIND): WON,
    ("sensitivity", COMPONENTS, ""): (0.1, 0.01),
    ("completeness", ERROR, ""): (1e-6, 1e-7),
    ("completeness", CONTRADICTING, ""): (0.0, 0.0),
    ("stability", NOISE, ""): (0.9, 0.01),
    ("stability", NOISE, RANDOM): WON,
    ("stability", SHIFT, ""): (0.9, 0.01),
}
BEGINNINGS = {USE: "Use Method ", DO_NOT: "Do not use Method ", OPEN: ("Undecided ", "It is unclear ")}
LIMITS = {COMPONENTS: 0.5, ERROR: 1e-3, CONTRADICTING: 0.1}


def judged(changes=None, *, n=40, without=(), blank=0.0, lacking=0.0, **settings):
    """Return the verdict about rows that are good but for some: each a mean and its error, and perhaps its n."""
    settings = {"tiles": 2, **settings}
    results = {}
    for (check, measure, against), numbers in (GOOD | (changes or {})).items():
        if check in without:
            continue
        mean, error, *count = numbers
        limit = LIMITS.get(measure, 0.0 if against else 0.5)
        limit = None if (check, measure, against) == ("localisation", SHARE, "") else limit
        share = measure == CONTRADICTING and not error  # a standard error of 0 is no certainty, but none of many is
        estimate = Estimate(mean, error, *(count or [n]), share=share)
        row = Row("Method", measure, against, estimate, limit, below=measure in LIMITS)
        images = {"images": n, **(settings if check == "localisation" else {})}
        results.setdefault(check, Result(check, "?", [], {"Method": blank}, images)).rows.append(row)
    return verdict("Method", "at layer4 for this head", results, lacking)


PAIRS = {key: (*GOOD[key], 7) for key in GOOD if key[0] == "localisation"}
NOTHING = {key: (float("nan"), float("nan"), 0) for key in GOOD}
OPEN_DELETION = {("faithfulness", "deletion", RANDOM): OPEN_YET}
# Rows that differ from good ones, or settings; what is to be said of them is in tests/golden/verdicts.txt.
CASES = {
    "all passes": {},
    # What decides, and fails.
    "deletion is lost": {"changes": {("faithfulness", "deletion", RANDOM): LOST}},
    "insertion is lost": {"changes": {("faithfulness", "insertion", RANDOM): LOST}},
    "evidence is worse than chance": {"changes": {("localisation", SHARE, CHANCE): LOST}},
    "evidence is worse than blind": {"changes": {("localisation", SHARE, BLIND): LOST}},
    "pointing is worse than blind": {"changes": {("localisation", POINT, BLIND): LOST}},
    "stability is lost": {"changes": {("stability", NOISE, RANDOM): LOST}},
    "maps contradict": {"changes": {("completeness", CONTRADICTING, ""): (0.52, 0.08)}},
    "maps contradict, and the rest is open": {
        "changes": OPEN_DELETION
        | {("completeness", CONTRADICTING, ""): (0.52, 0.08), ("faithfulness", "insertion", RANDOM): OPEN_YET}
    },
    # What is added.
    "deletion of blind maps is lost": {"changes": {("faithfulness", "deletion", BLIND): LOST}},
    "insertion of another head is lost": {"changes": {("faithfulness", "insertion", HEAD): LOST}},
    "localisation of another image is lost": {"changes": {("localisation", SHARE, ANOTHER): LOST}},
    "maps do not see components": {"changes": {("sensitivity", COMPONENTS, ""): (0.9, 0.01)}},
    "maps change under noise": {"changes": {("stability", NOISE, ""): (0.1, 0.01)}},
    "maps do not move": {"changes": {("stability", SHIFT, ""): (0.1, 0.01)}},
    "sums miss": {"changes": {("completeness", ERROR, ""): (0.5, 0.01)}},
    # Too little to say, or blank.
    "nine images": {"n": 9},
    "seven pairs": {"changes": PAIRS},
    "seven pairs, and deletion is lost": {"changes": PAIRS | {("faithfulness", "deletion", RANDOM): LOST}},
    "many blank maps": {"blank": 0.6},
    "blank maps alone": {"changes": NOTHING, "blank": 1.0},
    "some blank maps": {"blank": 0.2},
    # What was not measured.
    "no labels": {"without": ["localisation"]},
    "no sums": {"without": ["completeness"]},
    "neither": {"without": ["completeness", "localisation"]},
    "no pixels": {"without": ["faithfulness"]},
    # Where evidence lies.
    "four tiles": {"tiles": 4},
    "masks": {"tiles": None},
    "pasted": {"tiles": None, "pasted": True},
    # What is open.
    "colours may often be wrong": {"changes": {("completeness", CONTRADICTING, ""): (0.29, 0.1)}, "n": 24},
    "the clock ended it": {"changes": OPEN_DELETION, "lacking": 130.0},  # 40 s of each minute are for checks
    "deletion is open": {"changes": OPEN_DELETION},
    "deletion and evidence are open": {"changes": OPEN_DELETION | {("localisation", SHARE, BLIND): OPEN_YET}},
}


def test_what_is_said_of_rows_whose_answer_is_known(golden):
    told = []
    for name, case in CASES.items():
        found = judged(**case)
        assert found.sentence.startswith(BEGINNINGS[found.verdict])
        told.append("\n".join([f"{name}: {found.verdict}", found.sentence, *(f"- {row}" for row in found.decided_by)]))
    golden("verdicts", "\n\n".join(told) + "\n")


@pytest.mark.parametrize("row", [row for row in GOOD if row[:2] != ("localisation", POINT)])
def test_no_method_is_to_be_used_that_has_not_passed_what_decides(row):
    decides = row[2] in (RANDOM, CHANCE) or row[:3] == ("localisation", SHARE, BLIND)
    required = row[1] == CONTRADICTING or (decides and row[0] != "stability" and row != ("localisation", SHARE, RANDOM))
    if row[1] != SHARE or row[2]:
        limit = LIMITS.get(row[1], 0.0 if row[2] else 0.5)
        assert (judged({row: (limit, 0.1)}).verdict == OPEN) is required


@pytest.mark.parametrize("n", [3, 9])
@pytest.mark.parametrize("changes", [{}, {("faithfulness", "deletion", RANDOM): LOST}])
def test_nothing_can_be_said_of_fewer_than_ten_images(n, changes):
    for blank in (0.0, 1.0):
        found = judged(changes, n=n, blank=blank)
        assert found.verdict == OPEN
        assert found.sentence.startswith("It is unclear whether to use Method at layer4 for this head: ")
        assert found.sentence.endswith(f": {n} images are too few; at least 10 are needed.")


@pytest.mark.parametrize("target", [None, PCATarget(0)])
@pytest.mark.slow
def test_a_report_begins_with_its_verdicts(target, tmp_path):
    net, x, _ = problem(Corner())
    methods = {"<i>": ContributionCAM, "turned": (Turned, {"target_layers": [net.backbone.features[0]]})}
    study = evaluation.Study(net, x, ["features"], methods, target, images=40, progress=False)
    page = study.report(tmp_path, checks={"faithfulness": {"rivals": [RANDOM]}, "completeness": {}}).read_text()
    entries = json.loads((tmp_path / "report.json").read_text())
    good, bad = entries["verdicts"]
    assert list(entries)[:2] == ["format", "verdicts"]
    what = "for this head" if target is None else "to explain PCATarget(0)"
    assert good["sentence"].startswith(f"Use <i> at features {what}: it beats random maps in deletion")
    assert bad["sentence"].startswith(f"Do not use turned at features.0 {what}: ")
    assert ("100% of its maps contradict the decision" in bad["sentence"]) is (target is None)
    body = page.split("</h1>")[1]
    first, second = (body.index(start) for start in ("Use &lt;i&gt; at features", "Do not use turned at features.0"))
    assert first < second < body.index("<table")
    assert "Decided by deletion against random maps: +" in body


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("17", "17"),
        ("cats/cats_123.jpg", "cats_123.jpg"),
        ("dogs/dog.4381.jpg", "dog.4381.jpg"),
        ("Dogs/nested/dog-1.jpg", "nested/dog-1.jpg"),
        ("dogs/IMG_1.jpg", "dogs/IMG_1.jpg"),  # which tells the class
        ("a&b/<1>.jpg", "a&b/<1>.jpg"),
    ],
)
def test_a_file_is_named_without_telling_its_class_twice(path, shown):
    assert "".join(_split_path(path)) == shown


def test_a_long_name_breaks_at_its_signs():
    assert _split_path("Viral Pneumonia/a-b_c.png") == ["Viral Pneumonia/", "a-", "b_", "c.png"]
