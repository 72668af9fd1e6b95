"""The page of a report: one screen of verdicts, and all numbers folded below."""

import base64
import functools
import html
import io
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pytorch_grad_cam_pcasvm.evaluation.faithfulness import KINDS
from pytorch_grad_cam_pcasvm.evaluation.positions import ABOUT, CENTRE, describe_localisation
from pytorch_grad_cam_pcasvm.evaluation.result import (
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
from pytorch_grad_cam_pcasvm.evaluation.rivals import BLIND
from pytorch_grad_cam_pcasvm.evaluation.verdict import DO_NOT, MOST_BLANK, OPEN, USE, Verdict, verdict
from pytorch_grad_cam_pcasvm.runtime.files import atomically

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
    sections = "\n".join(_section(name, result, entries["pictures"].get(name, {})) for name, result in results.items())
    notes = [entries.get("note"), _time(entries.get("time"), entries["results"])]
    paragraphs = [_write_verdict(judgement, entries, results) for judgement in verdicts] or [
        _write_positions(entries, results)
    ]
    template = string.Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    text = template.substitute(
        title="Can these maps be trusted?",
        time="\n".join(f'<p class="note">{html.escape(note)}</p>' for note in notes if note),
        network=f"{html.escape(entries['network'])}, maps at {html.escape(entries['layer'])}",
        verdicts="\n".join(paragraphs),
        summary="\n".join(_summary(entries["methods"], results)),
        sections=sections,
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


def _write_verdict(judgement: Verdict, entries: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return a verdict as HTML, with a picture, and a command if the method may be used."""
    examples, commands, localised = entries["examples"], entries["commands"], results.get("localisation")
    mark, lead, before_command = _LEADS[judgement.verdict]
    parts = [f"<p>{html.escape(judgement.sentence)}</p>"]
    if isinstance(localised, Result):
        of_method = [row for row in localised.rows if row.method.split(ABOUT)[0] in (judgement.method, BLIND, CENTRE)]
        parts += [
            f"<div>{html.escape(sentence)}</div>"
            for sentence in describe_localisation(replace(localised, rows=of_method))
        ]
    if judgement.method in examples:
        parts.append(_image(examples[judgement.method], f"an image and its map by {judgement.method}"))
    if before_command:
        parts.append(f"<div>{before_command}</div><pre>{html.escape(commands[judgement.method])}</pre>")
    if judgement.decided_by:
        reasons = html.escape("; ".join(judgement.decided_by))
        parts.append(f"<details><summary>the numbers</summary><p>{lead} {reasons}.</p></details>")
    return f'<li class="verdict {mark}">{"".join(parts)}</li>'


def _write_positions(entries: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return the results of a head that decides at every position as HTML, with a picture."""
    localised = results.get("localisation")
    sentences = describe_localisation(localised) if isinstance(localised, Result) else [f"Undecided: {localised}."]
    parts = [f"<p>{html.escape(sentence)}</p>" for sentence in sentences]
    parts += [_image(png, f"images, their masks and the values of {name}") for name, png in entries["examples"].items()]
    return f'<li class="verdict open">{"".join(parts)}</li>'


def _summary(methods: Sequence[str], results: Mapping[str, Any]) -> list[str]:
    """Return a line for each method and check, in words; failures are never left out."""
    lines = []
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
            lines.append(
                f'<tr><th scope="row">{html.escape(method)}</th><td>{name}</td><td class="{mark}">{summary}{also}</td>'
                f"<td>{html.escape(list_of)}</td></tr>"
            )
    for name, result in results.items():
        if isinstance(result, str):
            lines.append(f'<tr><th scope="row">all</th><td>{name}</td><td class="note">not run</td>'
                         f"<td>{html.escape(result)}</td></tr>")  # fmt: skip
    return lines


def _describe_comparison(row: Row) -> str:
    """Return the comparison of a row in words."""
    return in_words(row.measure) + (f" against {in_words(row.against)}" if row.against else "")


def _section(name: str, result: Any, pictures: Mapping[str, str]) -> str:
    head = f"<details><summary>{name.capitalize()}</summary>"
    if isinstance(result, str):
        return f"{head}<p>Not run: {html.escape(result)}</p></details>"
    rows = "\n".join(_row(row) for row in result.rows)
    parts = [
        f"{head}<p>{html.escape(result.question.capitalize())}</p>",
        *(f"<p>{html.escape(sentence)}</p>" for sentence in describe_localisation(result)),
        f"<p><strong>If it fails:</strong> {IF_IT_FAILS[name]}</p>",
        '<table><thead><tr><th scope="col">method</th><th scope="col">measure</th><th scope="col">against</th>'
        '<th scope="col">mean ± standard error</th><th scope="col">n</th><th scope="col"></th></tr></thead>',
        f"<tbody>{rows}</tbody></table>",
    ]
    settings = ", ".join(
        f"{key}: {f'{value:.3g}' if isinstance(value, float) else value}"
        for key, value in result.settings.items()
        if value is not None and value is not False and key != "alarms"
    )
    parts.append(f'<p class="note">{html.escape(settings)}</p>')
    if result.curves:
        parts.append(_image(_curves(json.dumps(result.curves)), "Deletion and insertion curves"))
    parts += [
        f"<h3>Worst images, {html.escape(method)}</h3>{_image(picture, f'the worst images of {method}')}"
        f"<ol>{''.join(map(_shorten_path, result.names[method]))}</ol>"
        for method, picture in pictures.items()
    ]
    return "\n".join([*parts, "</details>"])


def _shorten_path(path: str) -> str:
    """Return the path of an image as HTML, without folders that its name begins with, as in cats/cat.12.jpg."""
    *folders, file = path.split("/")
    shown = [folder for folder in folders if not file.lower().startswith(folder.lower().removesuffix("s"))]
    short = "/".join([*shown, file])
    title = f' title="{html.escape(path)}"' if shown != folders else ""
    breaks = re.sub("([/_-])", r"\1<wbr>", html.escape(short))
    return f"<li{title}>{breaks}</li>"


def _row(row: Row) -> str:
    mark = {PASSED: PASSED, FAILED: FAILED, BLANK: FAILED}.get(row.verdict, "note")
    words = [in_words(name) for name in (row.method, row.measure, row.against)]
    cells = (*words, number(row), str(row.estimate.n))
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}<td class='{mark}'>{row.verdict}</td></tr>"


def _image(png: str, alt: str) -> str:
    return f'<img src="data:image/png;base64,{png}" alt="{html.escape(alt)}">'


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
