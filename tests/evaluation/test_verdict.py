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


def test_what_passes_is_to_be_used_and_says_why():
    found = judged()
    assert found.verdict == USE
    assert found.sentence == (
        "Use Method at layer4 for this head: it beats random maps in deletion and insertion, adds up, and puts 91% of "
        "the evidence on the right one of two images."
    )
    assert [row.split(":")[0] for row in found.decided_by] == [
        "deletion against random maps",
        "insertion against random maps",
        "share of positive evidence against chance",
        "share of positive evidence against a map that ignores the decision",
        "maps that contradict the decision",
    ]


@pytest.mark.parametrize(
    ("row", "numbers", "why"),
    [
        (("faithfulness", "deletion", RANDOM), LOST, "deletion is worse than with random maps"),
        (("faithfulness", "insertion", RANDOM), LOST, "insertion is worse than with random maps"),
        (
            ("localisation", SHARE, CHANCE),
            LOST,
            "it puts 91% of the evidence on the right one of two images, worse than chance",
        ),
        (
            ("localisation", SHARE, BLIND),
            LOST,
            "it puts 91% of the evidence on the right one of two images, worse than a map that ignores the decision",
        ),
        (
            ("localisation", POINT, BLIND),
            LOST,
            "it has its largest value on the right one of two images, worse than a map that ignores the decision",
        ),
        (("stability", NOISE, RANDOM), LOST, "its maps are worse than random maps in stability (the image with noise)"),
        (("completeness", CONTRADICTING, ""), (0.52, 0.08), "52% of its maps contradict the decision"),
    ],
)
def test_what_fails_a_check_that_decides_is_not_to_be_used(row, numbers, why):
    found = judged({row: numbers})
    assert found.verdict == DO_NOT
    assert found.sentence == f"Do not use Method at layer4 for this head: {why}."
    assert len(found.decided_by) == 1
    assert found.decided_by[0].startswith(row[1])


def test_what_is_open_is_told_beside_what_failed():
    found = judged({
        ("completeness", CONTRADICTING, ""): (0.52, 0.08),
        ("faithfulness", "deletion", RANDOM): OPEN_YET,
        ("faithfulness", "insertion", RANDOM): OPEN_YET,
    })
    assert found.sentence == (
        "Do not use Method at layer4 for this head: 52% of its maps contradict the decision; deletion and insertion "
        "are not clearly better than with random maps."
    )
    assert len(found.decided_by) == 3


@pytest.mark.parametrize("row", [row for row in GOOD if row[:2] != ("localisation", POINT)])
def test_no_method_is_to_be_used_that_has_not_passed_what_decides(row):
    decides = row[2] in (RANDOM, CHANCE) or row[:3] == ("localisation", SHARE, BLIND)
    required = row[1] == CONTRADICTING or (decides and row[0] != "stability" and row != ("localisation", SHARE, RANDOM))
    if row[1] != SHARE or row[2]:
        limit = LIMITS.get(row[1], 0.0 if row[2] else 0.5)
        assert (judged({row: (limit, 0.1)}).verdict == OPEN) is required


@pytest.mark.parametrize(
    ("row", "numbers", "but"),
    [
        (("faithfulness", "deletion", BLIND), LOST, "deletion is worse than with a map that ignores the decision"),
        (
            ("faithfulness", "insertion", HEAD),
            LOST,
            "insertion is worse than with the map of a classifier that has learned nothing",
        ),
        (("localisation", SHARE, ANOTHER), LOST, "it localises worse than the map of another image"),
        (
            ("sensitivity", COMPONENTS, ""),
            (0.9, 0.01),
            "its maps hardly change with components replaced by random directions",
        ),
        (("stability", NOISE, ""), (0.1, 0.01), "its maps change under noise"),
        (("stability", SHIFT, ""), (0.1, 0.01), "its maps do not move with the image"),
    ],
)
def test_other_checks_that_fail_are_added(row, numbers, but):
    found = judged({row: numbers})
    assert found.verdict == USE
    assert found.sentence.endswith(f"; but {but}.")


def test_a_sum_that_misses_is_no_praise():
    found = judged({("completeness", ERROR, ""): (0.5, 0.01)})
    assert "adds up" not in found.sentence
    assert found.sentence.endswith("; but its maps do not add up.")


@pytest.mark.parametrize("n", [3, 9])
@pytest.mark.parametrize("changes", [{}, {("faithfulness", "deletion", RANDOM): LOST}])
def test_nothing_can_be_said_of_fewer_than_ten_images(n, changes):
    for blank in (0.0, 1.0):
        found = judged(changes, n=n, blank=blank)
        assert found.verdict == OPEN
        assert found.sentence.startswith("It is unclear whether to use Method at layer4 for this head: ")
        assert found.sentence.endswith(f": {n} images are too few; at least 10 are needed.")


def test_too_few_pairs_are_told_apart_from_images():
    pairs = {key: (*GOOD[key], 7) for key in GOOD if key[0] == "localisation"}
    assert judged(pairs).sentence.endswith(": 7 pairs of images are too few; at least 10 are needed.")
    assert len(judged(pairs).decided_by) == 2
    failed = judged(pairs | {("faithfulness", "deletion", RANDOM): LOST})
    assert failed.verdict == DO_NOT  # of enough images


def test_blank_maps_are_not_to_be_used():
    found = judged(blank=0.6)
    assert found.sentence == "Do not use Method at layer4 for this head: 60% of its maps are blank."
    assert found.decided_by == ["60% of the maps are blank"]
    nothing = {key: (float("nan"), float("nan"), 0) for key in GOOD}
    assert judged(nothing, blank=1.0).verdict == DO_NOT
    assert judged(blank=0.2).sentence.endswith("; but 20% of its maps are blank.")


def test_what_was_not_measured_is_told():
    no_labels = judged(without=["localisation"])
    assert no_labels.verdict == USE
    assert no_labels.sentence.endswith("adds up; whether it tells classes apart was not measured.")
    no_sums = judged(without=["completeness"])
    assert no_sums.sentence.endswith("; whether its maps contradict the decision was not measured.")
    neither = judged(without=["completeness", "localisation"])
    assert neither.sentence.endswith(
        "whether it tells classes apart and whether its maps contradict the decision were not measured."
    )
    no_pixels = judged(without=["faithfulness"])
    assert no_pixels.verdict == OPEN
    assert no_pixels.sentence.endswith("deletion and insertion against random maps were not measured.")


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"tiles": 4}, "on the right one of four images"),
        ({"tiles": None}, "inside the masks"),
        ({"tiles": None, "pasted": True}, "on the pasted image"),
    ],
)
def test_where_evidence_lies_is_told_as_it_was_measured(settings, where):
    assert judged(**settings).sentence.endswith(f"and puts 91% of the evidence {where}.")


def test_colours_that_may_often_be_wrong_are_no_green_light():
    found = judged({("completeness", CONTRADICTING, ""): (0.29, 0.1)}, n=24)
    assert found.verdict == OPEN
    assert found.sentence.endswith(": 29% of its maps contradict the decision. More images may settle it.")


def test_what_the_clock_ended_says_how_many_minutes_would_do():
    open_yet = {("faithfulness", "deletion", RANDOM): OPEN_YET}
    found = judged(open_yet, lacking=130.0)  # 40 s of each minute are for checks
    assert found.sentence.endswith("The time was over before all images were measured: raising --minutes by 4 may do.")
    assert "--minutes" not in judged(open_yet).sentence


def test_an_open_question_is_told():
    found = judged({("faithfulness", "deletion", RANDOM): OPEN_YET, ("localisation", SHARE, BLIND): OPEN_YET})
    assert found.sentence == (
        "Undecided whether to use Method at layer4 for this head: deletion is not clearly better than with random "
        "maps; it puts 91% of the evidence on the right one of two images, not clearly better than a map that "
        "ignores the decision. Even twice as many images would hardly settle it."
    )


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
