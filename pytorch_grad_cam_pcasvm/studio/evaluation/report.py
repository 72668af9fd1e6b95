"""The report: every check in one JSON, for its page; and about how long the checks will take."""

import contextlib
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies
from pytorch_grad_cam_pcasvm.network.modules import find_layer_name
from pytorch_grad_cam_pcasvm.runtime.amounts import least_images
from pytorch_grad_cam_pcasvm.runtime.errors import warn
from pytorch_grad_cam_pcasvm.runtime.files import atomically, check_writable
from pytorch_grad_cam_pcasvm.studio.evaluation.faithfulness import faithfulness, ranks
from pytorch_grad_cam_pcasvm.studio.evaluation.localisation import localisation
from pytorch_grad_cam_pcasvm.studio.evaluation.positions import POSITIONS, Regions, values_of_positions
from pytorch_grad_cam_pcasvm.studio.evaluation.report_page import FORMAT, as_png, judge_methods, page
from pytorch_grad_cam_pcasvm.studio.evaluation.result import Result
from pytorch_grad_cam_pcasvm.studio.evaluation.sanity import completeness, sensitivity, stability
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import Budget, RunningCheck, reason, take_turns
from pytorch_grad_cam_pcasvm.studio.figures import plot_maps, plot_positions
from pytorch_grad_cam_pcasvm.targets import SVMTarget, default_decision

CHECKS: dict[str, Callable[..., Result]] = {
    "faithfulness": faithfulness,
    "localisation": localisation,
    "sensitivity": sensitivity,
    "completeness": completeness,
    "stability": stability,
}
USUAL = "faithfulness", "localisation", "completeness"  # the others ask no more than whether a map depends and holds
Checks = Sequence[str] | Mapping[str, Mapping[str, Any]]
_LOOKED_AT = 8  # images, to find one that is a good example
_DRAWN = 6  # images, with the values of every position


def report(  # noqa: D417 - of the study its class tells
    study: Subject,
    out: str | Path,
    *,
    checks: Checks = USUAL,
    commands: Mapping[str, str] | None = None,
) -> Path:
    """Run the checks that decide, or others, and write ``report.json`` and ``index.html``, a self-contained page.

    With ``minutes`` the checks take turns, from look to look, and the page is written after each look; whatever stops
    them, the last page stands. Without, each is measured to its end. With ``progress``, it prints about how long this
    will take, and the verdicts so far.

    Args:
        out: the folder to write to.
        checks: names of the checks, or a dict from these to their options, such as
            ``{"localisation": {"tiles": 4}}``; ``"all"``: also sensitivity and stability.
        commands: by method, what to run to get its maps, for the page; None: a line of Python.

    Returns:
        The path of the page. Both files begin with a one-sentence verdict for each method, which the page shows with a
        picture and the line to run; all numbers are folded below. Checks that cannot be run
        (such as localisation without labels) and pictures that cannot be drawn are listed with the reason.

    Raises:
        OSError: nothing can be written there.
        TypeError: a check has no such option.
        ValueError: a check is unknown, or none can be run.

    Example:
        >>> study = evaluation.Study(net, (training_images, labels), ["layer2"], images=6, progress=False)
        >>> study.report("report", checks=["stability"]).name
        'index.html'
    """
    budget = Budget(study.minutes)
    options = _options(study, checks)
    dense = study.net.is_dense
    if study.minutes is not None and not dense:
        _refuse_few(study)
    courses = _courses(study, options)
    for course in courses:
        course.begin()  # what cannot be answered is said before anything is computed
        _warn_if_failed(course)
    if all(course.ended for course in courses):
        raise ValueError(f"no check could be made: {courses[0].not_reached}")
    file = Path(out) / "report.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    check_writable(file, folder=False)
    entries = _entries(study, list(options), commands)
    if study.progress:
        _tell_duration(study, options)
    said: list[str] = []
    for turn in take_turns(sorted(courses, key=lambda course: _order(course, study)), budget):
        if turn is not None:
            _warn_if_failed(turn)
            _draw_examples(turn, entries, budget)
            if dense and turn.result is not None and not entries["examples"]:
                entries["examples"] = _positions(study, options)
        running = not all(course.ended for course in courses)
        if turn is not None and turn.late and running:
            continue  # the next check ends at once, too
        _put_results(entries, courses, budget, running)
        if study.minutes is not None or (turn is not None and turn.result is not None):
            _write(file, entries)  # what was found stays, whatever comes next
            page(file)
        sentences = [judgement.sentence for judgement in judge_methods(entries)]
        if study.progress and sentences != said and running:
            print("so far:", *sentences, sep="\n  ", flush=True)
            said = sentences
    if all(course.error is not None for course in courses):
        raise ValueError(f"no check could be made: {courses[0].not_reached}")
    _write(file, entries)
    return page(file)


def _options(study: Subject, checks: Sequence[str] | Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the options of each check, which it has."""
    names: Any = [checks] if isinstance(checks, str) else checks
    names = CHECKS if names == ["all"] else names
    options = dict(names) if isinstance(names, Mapping) and names is not CHECKS else {name: {} for name in names}
    unknown = [name for name in options if name not in CHECKS]
    if unknown or not options:
        raise ValueError(f"there is no check {unknown[0] if unknown else ''!r}: choose from {', '.join(CHECKS)}")
    for name, of_check in options.items():
        accepted = [*_common(study)[name == "localisation" :], *list(inspect.signature(CHECKS[name]).parameters)[1:]]
        if not set(of_check) <= set(accepted):
            wrong = next(option for option in of_check if option not in accepted)
            raise TypeError(f"the check {name!r} has no option {wrong!r}: it has {', '.join(accepted)}")
    return options


def _common(study: Subject) -> list[str]:
    """Return the options of a study that each check can have its own of."""
    return [field.name for field in fields(study)[4:] if field.name != "minutes"]  # after what is measured


def _courses(study: Subject, options: Mapping[str, Mapping[str, Any]]) -> list[RunningCheck]:
    """Return the checks, none of which has begun."""
    courses = []
    for name, of_check in options.items():
        common = {option: of_check[option] for option in of_check if option in _common(study)}
        own = {option: of_check[option] for option in of_check if option not in common}
        subject = replace(study, **common) if common else study
        steps = inspect.unwrap(CHECKS[name])(subject, **own)
        courses.append(RunningCheck(name, steps, subject.stop_early))
    return courses


def _order(course: RunningCheck, study: Subject) -> bool:
    """Return the key that sorts checks: where the time is short, the quickest comes first."""
    return study.minutes is not None and course.name != "completeness"


def _entries(study: Subject, checks: Sequence[str], commands: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the entries of a report besides its results."""
    dense = study.net.is_dense
    subject = study if dense else study.fresh()
    one, _ = subject.read(subject.rows[:1].tolist())
    if not dense:
        subject.values(one, subject.targets(one))  # what no check could take is refused once
    methods = [] if dense else list(study.named)
    return {
        "format": FORMAT,
        "note": study.note,
        "verdicts": [],
        "network": type(study.net.backbone).__name__,
        "layer": str(study.layer),
        "layers": {method: _join(_layers(study, study.named[method][1])) for method in methods},
        "target": _in_words(study.target),
        "methods": methods,
        "commands": {method: (commands or {}).get(method) or _line(study, method) for method in methods},
        "examples": {} if dense else _examples(subject),
        "results": {},
        "pictures": {},
    }


def _refuse_few(study: Subject) -> None:
    """Refuse images that are too few for the first look; say where they are too few for every answer."""
    count, first, least = len(study.rows), least_images(shares=False), least_images(shares=True)
    if count < first:
        raise ValueError(
            f"{count} images are too few for an answer: the first look is at {first}; give at least {least}, or "
            "minutes=None to measure these all the same"
        )
    if not study.progress or study.net.head.decision_position is None:
        return
    forgiving = least_images(shares=True, contradicting=1)
    if count < least:
        print(f"{count} images may show that maps are not to be used, but not that they may: {least} would do")
    elif count < forgiving:
        print(
            f"{count} images may show that maps are to be used only if no map contradicts the decision: with one that "
            f"does it stays open; {forgiving} images bear one"
        )


def _positions(study: Subject, options: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a picture of images with a mask and of their values at every position, as PNG."""
    masks = options["localisation"].get("masks")
    try:
        x, _ = study.read(study.rows[:1].tolist())
        inside = Regions.of(len(study.source), masks).draw(study.rows.tolist(), tuple(x.shape[2:]))
        shown = np.flatnonzero(inside.reshape(len(inside), -1).any(1))[:_DRAWN]
        rows = study.rows[shown].tolist()
        x, _ = study.read(rows)
        anomalies = tells_anomalies(study.net.head)
        figure = plot_positions(
            torch.stack([study.source.picture(image.cpu().float()).clamp(0, 1) for image in x]),
            values_of_positions(study.net, x, options["localisation"].get("category"), study.normal),
            masks=inside[shown],
            anomaly=anomalies,
            titles=[study.source.id(row) for row in rows],
            label="anomaly" if anomalies else "margin",
        )
        return {POSITIONS: as_png(figure)}
    except Exception as error:  # the numbers stand
        warn(f"the values of every position were not drawn: {reason(error)}", UserWarning)
        return {}


def _tell_duration(study: Subject, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Say how long it will take."""
    sooner = "; it stops sooner where the answer is clear" * study.stop_early
    if study.minutes is not None:
        minutes = study.minutes
        amount = f"{minutes:.1f} minutes" if minutes >= 1 else f"{60 * minutes:.0f} seconds"
        sentence = f"this will take at most {amount} more{sooner}" if minutes else "the time is over already: --minutes"
        print(sentence, flush=True)
        return
    with contextlib.suppress(Exception):  # whatever it is, the checks say it, too
        print(f"this will take {in_minutes(expected(study, options))}{sooner}", flush=True)


def _put_results(entries: dict[str, Any], courses: Sequence[RunningCheck], budget: Budget, running: bool) -> None:
    """Put the results so far into the entries of a report."""
    results = entries["results"]
    for course in courses:
        results[course.name] = {"reason": course.not_reached} if course.result is None else course.result.to_dict()
    if budget.seconds is not None:
        late = [course.name for course in courses if course.late]
        entries["time"] = {"seconds": budget.spent, "of": budget.seconds, "running": running, "late": late}
        entries["time"]["lacking"] = round(sum(course.lacking for course in courses), 1)


def _draw_examples(course: RunningCheck, entries: dict[str, Any], budget: Budget) -> None:
    """Draw the worst images of a check that has ended, if there is time; the reserve is for that and for the page."""
    if course.result is None or not course.ended:
        return
    if not budget.fits(2 * budget.drawing, reserve=0):
        course.result.settings["pictures"] = "not drawn: the time was over"
        return
    start = budget.clock()
    try:
        entries["pictures"][course.name] = _pictures(course.result)
    except Exception as error:
        course.result.settings["pictures"] = f"not drawn: {reason(error)}"
        warn(f"the worst images of the check {course.name!r} were not drawn: {reason(error)}", UserWarning)
    budget.drawing = max(budget.drawing, budget.clock() - start)


def _warn_if_failed(course: RunningCheck) -> None:
    if course.error is not None:
        warn(f"the check {course.name!r} was not run: {reason(course.error)}", UserWarning)


def _in_words(target: Any) -> str:
    """Return the explained target in words, behind "to explain"; empty for the predicted class."""
    if target == SVMTarget():
        return ""
    against = getattr(target, "versus", None)
    return f"the evidence against {against!r}" if target == SVMTarget(versus=against) else repr(target)


def _line(study: Subject, method: str) -> str:
    """Return the line of Python that makes a method's maps."""
    cam_class, options = study.named[method]
    names = _layers(study, options)
    option_words = [
        f", {name}={option!r}" if isinstance(option, str | int | float | bool) else f", {name}=..."
        for name, option in options.items()
        if name != "target_layers" and option is not None
    ]
    usual = default_decision(study.net.head) if study.net.head.decision_position is not None else None
    target = "" if study.target in (usual, None) else f", {study.target!r}"
    return f"maps = {cam_class.__name__}(net, {names!r}{''.join(option_words)}).explain(images{target})"


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
            examples[method] = as_png(plot_maps(picture, maps.cpu(), signed=True))
        except Exception as error:  # whatever it is, the checks say it, too
            warn(f"the example of {method} was not drawn: {reason(error)}", UserWarning)
    return examples


def _write(file: Path, entries: Mapping[str, Any]) -> None:
    text = json.dumps({**entries, "verdicts": list(map(vars, judge_methods(entries)))}, indent=1, allow_nan=False)
    with atomically(file) as whole:
        whole.write(text.encode())


def _layers(study: Subject, options: Mapping[str, Any]) -> str | list[str]:
    """Return the names of the layers that a method's maps come from, or a word for them."""
    layers = options.get("target_layers", [study.layer])
    backbone = study.net.feature_source()[0]
    return layers if isinstance(layers, str) else [find_layer_name(backbone, layer) or str(layer) for layer in layers]


def _join(layers: str | list[str]) -> str:
    return layers if isinstance(layers, str) else " + ".join(layers)


def _pictures(result: Result) -> dict[str, str]:
    """Return the worst images of each method with their maps, numbered, as PNG; volumes and spectra are not drawn."""
    return {
        method: as_png(plot_maps(worst.images, worst.maps, signed=True, rows=range(1, len(worst.images) + 1)))
        for method, worst in result.pictures.items()
        if worst.images.dim() == 4 and worst.images.shape[1] in (1, 3)
    }


_FRACTIONS, _KINDS = 3, 2  # of deletion and insertion
_BESIDES = 1.5  # times as long as what is counted, for reading images, and for enlarging and comparing maps
_LAYERS, _DRAWS = 3, 10  # of the sensitivity check


def expected(study: Subject, checks: Mapping[str, Mapping[str, Any]]) -> float:
    """Return about how many seconds checks take on all images.

    A few images are run and explained. From there it is counted: how often each check runs the network, explains an
    image, or explains one with another head, which looks for a new baseline.

    Args:
        study: what will be measured.
        checks: the options of each, by name; of these only ``masks`` counts.
    """
    subject = study.fresh()
    x, _ = subject.read(subject.rows[: min(4, subject.batch_size)].tolist())
    targets = subject.targets(x)
    run = _seconds(lambda: subject.values(x, targets), 2) / len(x)
    first, warm = 0.0, 0.0  # of all methods, for an image: with a new head, and with one that was explained before
    for method in subject.named:
        first += _seconds(partial(subject.explained, method, x[:1], targets[:1]))
        warm += _seconds(partial(subject.explained, method, x, targets), 2) / len(x)
    maps = np.random.default_rng(0).random((len(x), *x.shape[2:]))
    ranking = _seconds(lambda: ranks(maps, maps)) / len(x)
    sources = 2 + 3 * len(subject.named)  # random and blind maps; those of the method, of others, of a random head
    batches = -(-len(subject.rows) // subject.batch_size)
    images = len(subject.rows)
    of_maps = images * (2 * warm + first)  # of the image, of another one, and of a random head
    with_masks = checks.get("localisation", {}).get("masks") is not None
    seconds = {
        "faithfulness": images * (run + sources * (ranking + _FRACTIONS * _KINDS * run)),
        # Half as many scenes, twice as wide; or maps of three questions.
        "localisation": images * (run + 2 * warm) + of_maps if with_masks else images * run + of_maps,
        "sensitivity": batches * min(_DRAWS, subject.batch_size) * _LAYERS * first,
        "completeness": images * run,
        "stability": images * 2 * warm,
    }
    shared = of_maps if set(checks) - {"localisation"} else 0.0  # made for the first, and kept
    return _BESIDES * (shared + sum(seconds[name] for name in checks))


def in_minutes(seconds: float) -> str:
    """Return a duration as people say it."""
    minutes = round(seconds / 60)
    return "less than a minute" if seconds < 50 else f"about {max(minutes, 1)} minute{'s' * (minutes > 1)}"


def _seconds(call: Callable[[], Any], runs: int = 1) -> float:
    """Return the time of a call, the last of some."""
    for _ in range(runs):
        start = time.perf_counter()
        call()
        duration = time.perf_counter() - start
    return duration
