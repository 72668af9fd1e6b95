"""The report: every check in one JSON and one page."""

import base64
import contextlib
import html
import inspect
import io
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pytorch_grad_cam_pcasvm.evaluation.completeness import completeness
from pytorch_grad_cam_pcasvm.evaluation.duration import expected, in_minutes
from pytorch_grad_cam_pcasvm.evaluation.faithfulness import KINDS, faithfulness
from pytorch_grad_cam_pcasvm.evaluation.localisation import localisation
from pytorch_grad_cam_pcasvm.evaluation.positions import ABOUT, CENTRE, found_in_words
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
from pytorch_grad_cam_pcasvm.evaluation.sensitivity import sensitivity
from pytorch_grad_cam_pcasvm.evaluation.stability import stability
from pytorch_grad_cam_pcasvm.evaluation.subject import Subject
from pytorch_grad_cam_pcasvm.evaluation.verdict import DO_NOT, MOST_BLANK, OPEN, USE, Verdict, verdict
from pytorch_grad_cam_pcasvm.figures import plot_maps
from pytorch_grad_cam_pcasvm.network.modules import layer_name
from pytorch_grad_cam_pcasvm.runtime.errors import warn
from pytorch_grad_cam_pcasvm.runtime.files import atomically
from pytorch_grad_cam_pcasvm.targets import SVMTarget, default_decision

FORMAT = "pytorch_grad_cam_pcasvm evaluation 3"
CHECKS: dict[str, Callable[..., Result]] = {
    "faithfulness": faithfulness,
    "localisation": localisation,
    "sensitivity": sensitivity,
    "completeness": completeness,
    "stability": stability,
}
_LOOKED_AT = 8  # images, to find one that is a good example
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


def report(  # noqa: D417 - of the study its class tells
    study: Subject,
    out: str | Path,
    *,
    checks: Sequence[str] | Mapping[str, Mapping[str, Any]] = tuple(CHECKS),
    commands: Mapping[str, str] | None = None,
) -> Path:
    """Run all checks, and write ``report.json`` and ``index.html``, a self-contained page.

    With ``progress``, it prints about how long this will take, and after each check the verdict so far.

    Args:
        out: the folder to write to.
        checks: names of the checks, or a dict from these to their options, such as
            ``{"localisation": {"tiles": 4}}``.
        commands: by method, what to run to get its maps, for the page; None: a line of Python.

    Returns:
        The path of the page. Both files begin with a one-sentence verdict for each method, which the page shows with a
        picture and the line to run; all numbers are folded below. Checks that cannot be run
        (such as localisation without labels) and pictures that cannot be drawn are listed with the reason.

    Raises:
        TypeError: a check has no such option.
        ValueError: a check is unknown, or none can be run.

    Example:
        >>> study = evaluation.Study(net, (training_images, labels), ["layer2"], images=6, progress=False)
        >>> study.report("report", checks=["stability"]).name
        'index.html'
    """
    names = [checks] if isinstance(checks, str) else checks
    options = dict(names) if isinstance(names, Mapping) else {name: {} for name in names}
    unknown = [name for name in options if name not in CHECKS]
    if unknown or not options:
        raise ValueError(f"there is no check {unknown[0] if unknown else ''!r}: choose from {', '.join(CHECKS)}")
    common = [field.name for field in fields(study)][4:]  # after network, data, layers and methods
    for name, of_check in options.items():
        accepted = [*common[name == "localisation" :], *list(inspect.signature(CHECKS[name]).parameters)[1:]]
        if not set(of_check) <= set(accepted):
            wrong = next(option for option in of_check if option not in accepted)
            raise TypeError(f"the check {name!r} has no option {wrong!r}: it has {', '.join(accepted)}")
    subject = study.fresh()
    one, _ = subject.read(subject.rows[:1].tolist())
    subject.values(one, subject.targets(one))  # what no check could take is refused once
    results: dict[str, Any] = {}
    pictures: dict[str, dict[str, str]] = {}
    entries = {
        "format": FORMAT,
        "verdicts": [],
        "network": type(study.net.backbone).__name__,
        "layer": str(study.layer),
        "layers": {method: _layers(study, options) for method, (_, options) in study.named.items()},
        "target": _in_words(study.target),
        "methods": list(study.named),
        "commands": {method: (commands or {}).get(method) or _line(study, method) for method in study.named},
        "examples": _examples(subject),
        "results": results,
        "pictures": pictures,
    }
    if study.progress:
        with contextlib.suppress(Exception):  # whatever it is, the checks say it, too
            sooner = "; it stops sooner where the answer is clear" * study.stop_early
            print(f"this will take {in_minutes(expected(study, options))}{sooner}", flush=True)
    said: list[str] = []
    file = Path(out) / "report.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, of_check in options.items():
        others = {option: of_check[option] for option in of_check if option in common}
        own = {option: of_check[option] for option in of_check if option not in common}
        try:
            result = CHECKS[name](replace(study, **others) if others else study, **own)
        except Exception as error:  # whatever it is, the other checks are made
            results[name] = {"reason": _reason(error)}
            warn(f"the check {name!r} was not run: {_reason(error)}", UserWarning)
            continue
        results[name] = result.to_dict()
        _write(file, entries)  # what was found stays, whatever comes next
        try:
            pictures[name] = _pictures(result)
        except Exception as error:
            results[name]["settings"]["pictures"] = f"not drawn: {_reason(error)}"
            warn(f"the worst images of the check {name!r} were not drawn: {_reason(error)}", UserWarning)
        sentences = [judgement.sentence for judgement in _verdicts(entries)]
        if study.progress and sentences != said and name != list(options)[-1]:
            print("so far:", *sentences, sep="\n  ", flush=True)
            said = sentences
    if all("reason" in result for result in results.values()):
        raise ValueError(f"no check could be made: {next(iter(results.values()))['reason']}")
    _write(file, entries)
    return page(file)


def _in_words(target: Any) -> str:
    """Return what is explained, behind "to explain"; empty for the predicted class."""
    if target == SVMTarget():
        return ""
    against = getattr(target, "versus", None)
    return f"the evidence against {against!r}" if target == SVMTarget(versus=against) else repr(target)


def _line(study: Subject, method: str) -> str:
    """Return the line of Python that makes a method's maps."""
    cam_class, options = study.named[method]
    layers = options.get("target_layers", [study.layer])
    backbone = study.net.feature_source()[0]
    names = layers if isinstance(layers, str) else [layer_name(backbone, layer) or str(layer) for layer in layers]
    others = [
        f", {name}={option!r}" if isinstance(option, str | int | float | bool) else f", {name}=..."
        for name, option in options.items()
        if name != "target_layers" and option is not None
    ]
    usual = default_decision(study.net.head) if study.net.head.decision_position is not None else None
    target = "" if study.target in (usual, None) else f", {study.target!r}"
    return f"maps = {cam_class.__name__}(net, {names!r}{''.join(others)}).explain(images{target})"


def _examples(subject: Subject) -> dict[str, str]:
    """Return a picture of the same image and its map for each method, as PNG; volumes and spectra are not drawn."""
    x, _ = subject.read(subject.rows[:_LOOKED_AT].tolist())
    if x.dim() != 4 or x.shape[1] not in (1, 3):
        return {}
    place = int(np.argmin(subject.for_normal(x)))  # the first that is not taken for the normal class
    image, (target,) = x[place : place + 1], subject.targets(x[place : place + 1])
    picture = subject.source.picture(image[0].cpu()).clamp(0, 1)[None]
    examples = {}
    for method in subject.named:
        try:
            (maps,) = subject.explained(method, image, [target])
            examples[method] = _png(plot_maps(picture, maps.cpu(), signed=True))
        except Exception as error:  # whatever it is, the checks say it, too
            warn(f"the example of {method} was not drawn: {_reason(error)}", UserWarning)
    return examples


def _reason(error: Exception) -> str:
    expected = isinstance(error, ValueError | RuntimeError)  # such as an image that cannot be read
    return str(error) if expected else f"{type(error).__name__}: {error}"


def _write(file: Path, entries: Mapping[str, Any]) -> None:
    text = json.dumps({**entries, "verdicts": list(map(vars, _verdicts(entries)))}, indent=1, allow_nan=False)
    with atomically(file) as whole:
        whole.write(text.encode())


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
    verdicts = sorted(_verdicts(entries), key=lambda judgement: (USE, OPEN, DO_NOT).index(judgement.verdict))
    sections = "\n".join(_section(name, result, entries["pictures"].get(name, {})) for name, result in results.items())
    template = string.Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    text = template.substitute(
        title="Can these maps be trusted?",
        network=f"{html.escape(entries['network'])}, maps at {html.escape(entries['layer'])}",
        verdicts="\n".join(_told(judgement, entries, results) for judgement in verdicts),
        summary="\n".join(_summary(entries["methods"], results)),
        sections=sections,
    )
    out = path.with_name("index.html")
    out.write_text(text, encoding="utf-8")
    return out


def _layers(study: Subject, options: Mapping[str, Any]) -> str:
    """Return the names of the layers that a method's maps come from."""
    layers = options.get("target_layers", [study.layer])
    backbone = study.net.feature_source()[0]
    return (
        layers if isinstance(layers, str) else " + ".join(str(layer_name(backbone, layer) or layer) for layer in layers)
    )


def _results(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each check found, or why it was not made."""
    return {
        name: result["reason"] if "reason" in result else Result.from_dict(result)
        for name, result in entries["results"].items()
    }


def _verdicts(entries: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdict about each method."""
    measured = {name: result for name, result in _results(entries).items() if isinstance(result, Result)}
    layers, target = entries.get("layers", {}), entries.get("target", "")
    explained = f"to explain {target}" if target else "for this head"
    verdicts = [
        verdict(method, f"at {layers.get(method, entries['layer'])} {explained}", measured)
        for method in entries["methods"]
    ]
    failed = entries["results"].get("faithfulness", {}).get("reason")
    why = f" These cannot be measured here: {failed}." if failed else ""
    return [
        replace(judgement, sentence=judgement.sentence + why * (judgement.verdict == OPEN)) for judgement in verdicts
    ]


def _told(judgement: Verdict, entries: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return a verdict as HTML, with a picture, and what to run if the method may be used."""
    examples, commands, localised = entries["examples"], entries["commands"], results.get("localisation")
    mark = {USE: PASSED, DO_NOT: FAILED}.get(judgement.verdict, "open")
    lead = "Open:" if judgement.verdict == OPEN else "Decided by"
    parts = [f"<p>{html.escape(judgement.sentence)}</p>"]
    if isinstance(localised, Result):
        of_method = [row for row in localised.rows if row.method.split(ABOUT)[0] in (judgement.method, BLIND, CENTRE)]
        parts += [
            f"<div>{html.escape(sentence)}</div>" for sentence in found_in_words(replace(localised, rows=of_method))
        ]
    if judgement.method in examples:
        parts.append(_image(examples[judgement.method], f"an image and its map by {judgement.method}"))
    if judgement.verdict != DO_NOT:
        lead_in = "To draw such maps:" if judgement.verdict == USE else "To draw such maps all the same:"
        parts.append(f"<div>{lead_in}</div><pre>{html.escape(commands[judgement.method])}</pre>")
    if judgement.decided_by:
        reasons = html.escape("; ".join(judgement.decided_by))
        parts.append(f"<details><summary>the numbers</summary><p>{lead} {reasons}.</p></details>")
    return f'<li class="verdict {mark}">{"".join(parts)}</li>'


def _summary(methods: Sequence[str], results: Mapping[str, Any]) -> list[str]:
    """Return a line for each method and check, in words; what did not pass is never left out."""
    lines = []
    for method in methods:
        for name, result in results.items():
            if isinstance(result, str):
                continue
            rows = [row for row in result.rows if row.method == method and row.verdict]
            failures = {
                verdict: [_compared(row) for row in rows_of]
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


def _compared(row: Row) -> str:
    """Return what a row is of, in words."""
    return in_words(row.measure) + (f" against {in_words(row.against)}" if row.against else "")


def _section(name: str, result: Any, pictures: Mapping[str, str]) -> str:
    head = f"<details><summary>{name.capitalize()}</summary>"
    if isinstance(result, str):
        return f"{head}<p>Not run: {html.escape(result)}</p></details>"
    rows = "\n".join(_row(row) for row in result.rows)
    parts = [
        f"{head}<p>{html.escape(result.question.capitalize())}</p>",
        *(f"<p>{html.escape(sentence)}</p>" for sentence in found_in_words(result)),
        f"<p><strong>If it fails:</strong> {IF_IT_FAILS[name]}</p>",
        '<table><thead><tr><th scope="col">method</th><th scope="col">measure</th><th scope="col">against</th>'
        '<th scope="col">mean ± standard error</th><th scope="col">n</th><th scope="col"></th></tr></thead>',
        f"<tbody>{rows}</tbody></table>",
    ]
    settings = ", ".join(
        f"{key}: {f'{value:.3g}' if isinstance(value, float) else value}"
        for key, value in result.settings.items()
        if value is not None and value is not False
    )
    parts.append(f'<p class="note">{html.escape(settings)}</p>')
    if result.curves:
        parts.append(_image(_curves(result), "Deletion and insertion curves"))
    parts += [
        f"<h3>Worst images, {html.escape(method)}</h3>{_image(picture, f'the worst images of {method}')}"
        f"<ol>{''.join(map(_name, result.names[method]))}</ol>"
        for method, picture in pictures.items()
    ]
    return "\n".join([*parts, "</details>"])


def _name(path: str) -> str:
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


def _curves(result: Result) -> str:
    curves = result.curves
    assert curves is not None
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
    return _png(figure)


def _pictures(result: Result) -> dict[str, str]:
    """Return the worst images of each method with their maps, numbered, as PNG; volumes and spectra are not drawn."""
    return {
        method: _png(plot_maps(worst.images, worst.maps, signed=True, rows=range(1, len(worst.images) + 1)))
        for method, worst in result.pictures.items()
        if worst.images.dim() == 4 and worst.images.shape[1] in (1, 3)
    }


def _png(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    return base64.b64encode(file.getvalue()).decode()
