"""The page of a report: one screen of verdicts, and all numbers folded below."""

import base64
import functools
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pytorch_grad_cam_pcasvm.runtime.files import atomically
from pytorch_grad_cam_pcasvm.studio.evaluation.faithfulness import KINDS
from pytorch_grad_cam_pcasvm.studio.evaluation.positions import ABOUT, CENTRE, describe_localisation
from pytorch_grad_cam_pcasvm.studio.evaluation.result import (
    BLANK,
    FAILED,
    PASSED,
    TOO_FEW,
    UNDECIDED,
    Result,
    Row,
    in_words,
    number,
)
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import BLIND
from pytorch_grad_cam_pcasvm.studio.evaluation.verdict import DO_NOT, MOST_BLANK, OPEN, USE, Verdict, verdict
from pytorch_grad_cam_pcasvm.studio.pages import render

FORMAT = "pytorch_grad_cam_pcasvm evaluation 3"
NOT_PASSED = (BLANK, FAILED, UNDECIDED, TOO_FEW)
IF_IT_FAILS = {
    "faithfulness": "the pixels marked as important matter no more than those of the control. Against random maps: "
    "do not use this method here. Only against a map that ignores the decision: the object fills the picture, and "
    "localisation says more.",
    "localisation": "the map shows where something is, but not which class it supports. Do not use it to compare "
    "classes.",
    "sensitivity": "the map hardly depends on what was randomised. If only the head is affected, the map shows what "
    "the network sees rather than what the SVM decides; the component maps say more.",
    "completeness": "the map does not add up to the value it explains, so sums over regions mean nothing. Maps that "
    "contradict the decision are mostly blue for the class that is predicted: do not use this method here.",
    "stability": "small changes to the image change the map: average over noise (smoothed), or use a coarser layer.",
}
_TIMES = {  # by the state of a report
    "running": "So far, after {spent:.0f} s of at most {whole:.0f} s; this page is written again after each look",
    "late": "The time of {whole:.0f} s was over before {late} had measured all that may be needed",
    "ended": "Measured in {spent:.0f} s, of at most {whole:.0f} s: the time ended nothing",
}
_LEADS = {  # by verdict: its look, what its rows did, and what is said before a command; none: there is no command
    USE: (PASSED, "Decided by", "To draw such maps:"),
    DO_NOT: (FAILED, "Decided by", ""),
    OPEN: ("open", "Open:", "To draw such maps all the same:"),
}


def page(written: str | Path) -> Path:
    """Write the page of a report again, from its JSON file.

    Args:
        written: path of ``report.json``.

    Returns:
        The path of the page, ``index.html`` beside it.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not the JSON of a report.

    Example:
        >>> study = evaluation.Study(net, (training_images, labels), ["layer2"], images=6, progress=False)
        >>> path = study.report("report", checks=["stability"])
        >>> written = evaluation.page("report/report.json")
    """
    path = Path(written)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        entries = None
    if not isinstance(entries, dict) or entries.get("format") != FORMAT:
        raise ValueError(f"{path} is not a report of this version: make one with evaluation.report(..., out=FOLDER)")
    results = _results(entries)
    verdicts = sorted(judge_methods(entries), key=lambda judgement: (USE, OPEN, DO_NOT).index(judgement.verdict))
    notes = [entries.get("note"), _time(entries.get("time"), entries["results"])]
    text = render(
        "evaluation/report.html",
        title="Can these maps be trusted?",
        notes=[note for note in notes if note],
        network=entries["network"],
        layer=entries["layer"],
        verdicts=[_describe_verdict(judgement, entries, results) for judgement in verdicts]
        or [_describe_positions(entries, results)],
        summary=_summarise(entries["methods"], results),
        sections=[_describe_check(name, result, entries["pictures"].get(name, {})) for name, result in results.items()],
    )
    out = path.with_name("index.html")
    with atomically(out) as whole:  # a page that is open stands until the next one is complete
        whole.write(text.encode())
    return out


def _time(seconds: Mapping[str, Any] | None, results: Mapping[str, Any]) -> str:
    """Return how long was measured and how many images each check took, in a sentence; empty without a budget."""
    if seconds is None:
        return ""
    counts = [
        f"{name} {result['settings']['measured'] if 'settings' in result else 'none'}"
        for name, result in results.items()
    ]
    state = "running" if seconds["running"] else "late" if seconds["late"] else "ended"
    how = _TIMES[state].format(spent=seconds["seconds"], whole=seconds["of"], late=", ".join(seconds["late"]))
    return f"{how}. Measured: {'; '.join(counts)}."


def _results(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of each check, or why it was not made."""
    return {
        name: result["reason"] if "reason" in result else Result.from_dict(result)
        for name, result in entries["results"].items()
    }


def judge_methods(entries: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdict about each method."""
    measured = {name: result for name, result in _results(entries).items() if isinstance(result, Result)}
    layers, target = entries.get("layers", {}), entries.get("target", "")
    explained = f"to explain {target}" if target else "for this head"
    lacking = entries.get("time", {}).get("lacking", 0.0)
    verdicts = [
        verdict(method, f"at {layers.get(method, entries['layer'])} {explained}", measured, lacking)
        for method in entries["methods"]
    ]
    failed = entries["results"].get("faithfulness", {}).get("reason", "")
    timed = "time" in entries and ("the time was over" in failed or "still to come" in failed)
    why = f" {failed[0].upper()}{failed[1:]}." if timed else f" These cannot be measured here: {failed}." * bool(failed)
    return [
        replace(judgement, sentence=judgement.sentence + why * (judgement.verdict == OPEN)) for judgement in verdicts
    ]


def _describe_verdict(judgement: Verdict, entries: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page says of a method: with a picture, and a command if it may be used."""
    method, localised = judgement.method, results.get("localisation")
    mark, lead, before_command = _LEADS[judgement.verdict]
    found = []
    if isinstance(localised, Result):
        of_method = [row for row in localised.rows if row.method.split(ABOUT)[0] in (method, BLIND, CENTRE)]
        found = describe_localisation(replace(localised, rows=of_method))
    examples = entries["examples"]
    return {
        "mark": mark,
        "sentences": [judgement.sentence],
        "found": found,
        "pictures": {f"an image and its map by {method}": examples[method]} if method in examples else {},
        "before_command": before_command,
        "command": before_command and entries["commands"][method],
        "reasons": judgement.decided_by and f"{lead} {'; '.join(judgement.decided_by)}",
    }


def _describe_positions(entries: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page says of a head that decides at every position, with pictures."""
    localised = results.get("localisation")
    sentences = describe_localisation(localised) if isinstance(localised, Result) else [f"Undecided: {localised}."]
    pictures = {f"images, their masks and the values of {name}": png for name, png in entries["examples"].items()}
    return {"mark": "open", "sentences": sentences, "found": [], "pictures": pictures, "command": "", "reasons": ""}


def _summarise(methods: Sequence[str], results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each method and check, in words: method, check, mark, verdict, what did not pass.

    Failures are never left out.
    """
    lines: list[tuple[str, ...]] = []
    for method in methods:
        for name, result in results.items():
            if isinstance(result, str):
                continue
            rows = [row for row in result.rows if row.method == method and row.verdict]
            failures = {
                verdict: [_describe_comparison(row) for row in rows_of]
                for verdict in NOT_PASSED
                if (rows_of := [row for row in rows if row.verdict == verdict])
            }
            counts = [f"{len(comparisons)} {verdict}" for verdict, comparisons in failures.items()]
            summary = f"{', '.join(counts)} (of {len(rows)})" if failures else PASSED if rows else "not judged"
            blank = result.blank.get(method, 0.0)
            is_well = rows and not failures and blank <= MOST_BLANK
            mark = FAILED if FAILED in failures or BLANK in failures else PASSED if is_well else "note"
            also = f", {blank:.0%} of the maps are blank" if blank else ""
            list_of = ". ".join(
                f"{verdict.capitalize()}: {'; '.join(comparisons)}" for verdict, comparisons in failures.items()
            )
            missing = result.settings.get("not measured")
            list_of += f"{'. ' if failures else ''}Not measured: {missing}" if missing else ""
            lines.append((method, name, mark, summary + also, list_of))
    not_run = [(name, result) for name, result in results.items() if isinstance(result, str)]
    return lines + [("all", name, "note", "not run", reason) for name, reason in not_run]


def _describe_comparison(row: Row) -> str:
    """Return the comparison of a row in words."""
    return in_words(row.measure) + (f" against {in_words(row.against)}" if row.against else "")


def _describe_check(name: str, result: Any, pictures: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page says of a check: its question, its rows, its curves and the worst images."""
    title = name.capitalize()
    if isinstance(result, str):
        return {"title": title, "sentences": [f"Not run: {result}"], "if_it_fails": "", "curves": "", "pictures": []}
    settings = ", ".join(
        f"{key}: {f'{value:.3g}' if isinstance(value, float) else value}"
        for key, value in result.settings.items()
        if value is not None and value is not False and key != "alarms"
    )
    return {
        "title": title,
        "sentences": [result.question.capitalize(), *describe_localisation(result)],
        "if_it_fails": IF_IT_FAILS[name],
        "rows": [_write_row(row) for row in result.rows],
        "settings": settings,
        "curves": _curves(json.dumps(result.curves)) if result.curves else "",
        "pictures": [
            (method, png, [(path, _split_path(path)) for path in result.names[method]])
            for method, png in pictures.items()
        ],
    }


def _split_path(path: str) -> list[str]:
    """Return the parts of an image's path between which a line may break.

    Folders with which the file's name begins, as in cats/cat.12.jpg, are left out.
    """
    *folders, file = path.split("/")
    shown = [folder for folder in folders if not file.lower().startswith(folder.lower().removesuffix("s"))]
    return re.split("(?<=[/_-])", "/".join([*shown, file]))


def _write_row(row: Row) -> tuple[list[str], str, str]:
    """Return the cells of a comparison, with the look of its verdict, and that."""
    mark = {PASSED: PASSED, FAILED: FAILED, BLANK: FAILED}.get(row.verdict, "note")
    words = [in_words(name) for name in (row.method, row.measure, row.against)]
    return [*words, number(row), str(row.estimate.n)], mark, row.verdict


@functools.lru_cache(maxsize=1)  # a page is written again after each look, of whatever check
def _curves(drawn: str) -> str:
    curves = json.loads(drawn)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axis, measure in zip(figure.subplots(1, 2, sharey=True), KINDS, strict=True):
        for name, values in curves[measure].items():
            axis.plot(curves["fractions"], values, marker="o", markersize=3, label=in_words(name))
        axis.set_title(
            f"{measure}: part of the image {'removed' if measure == 'deletion' else 'kept'}", fontsize="medium"
        )
        axis.grid(color="0.92")
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("change in the value, in\nstandard deviations over the images")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return as_png(figure)


def as_png(figure: Figure) -> str:
    """Return a figure as a PNG, in base64."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    return base64.b64encode(file.getvalue()).decode()
