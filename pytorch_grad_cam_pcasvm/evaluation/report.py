"""The report: every check in one JSON, for its page."""

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.evaluation.completeness import completeness
from pytorch_grad_cam_pcasvm.evaluation.duration import expected, in_minutes
from pytorch_grad_cam_pcasvm.evaluation.faithfulness import faithfulness
from pytorch_grad_cam_pcasvm.evaluation.localisation import localisation
from pytorch_grad_cam_pcasvm.evaluation.report_page import FORMAT, as_png, page, verdicts_of
from pytorch_grad_cam_pcasvm.evaluation.result import Result
from pytorch_grad_cam_pcasvm.evaluation.sensitivity import sensitivity
from pytorch_grad_cam_pcasvm.evaluation.stability import stability
from pytorch_grad_cam_pcasvm.evaluation.subject import Subject
from pytorch_grad_cam_pcasvm.figures import plot_maps
from pytorch_grad_cam_pcasvm.network.modules import layer_name
from pytorch_grad_cam_pcasvm.runtime.errors import warn
from pytorch_grad_cam_pcasvm.runtime.files import atomically, check_writable
from pytorch_grad_cam_pcasvm.targets import SVMTarget, default_decision

CHECKS: dict[str, Callable[..., Result]] = {
    "faithfulness": faithfulness,
    "localisation": localisation,
    "sensitivity": sensitivity,
    "completeness": completeness,
    "stability": stability,
}
_LOOKED_AT = 8  # images, to find one that is a good example


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
        OSError: nothing can be written there.
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
    check_writable(file, folder=False)
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
        sentences = [judgement.sentence for judgement in verdicts_of(entries)]
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
            examples[method] = as_png(plot_maps(picture, maps.cpu(), signed=True))
        except Exception as error:  # whatever it is, the checks say it, too
            warn(f"the example of {method} was not drawn: {_reason(error)}", UserWarning)
    return examples


def _reason(error: Exception) -> str:
    expected = isinstance(error, ValueError | RuntimeError)  # such as an image that cannot be read
    return str(error) if expected else f"{type(error).__name__}: {error}"


def _write(file: Path, entries: Mapping[str, Any]) -> None:
    text = json.dumps({**entries, "verdicts": list(map(vars, verdicts_of(entries)))}, indent=1, allow_nan=False)
    with atomically(file) as whole:
        whole.write(text.encode())


def _layers(study: Subject, options: Mapping[str, Any]) -> str:
    """Return the names of the layers that a method's maps come from."""
    layers = options.get("target_layers", [study.layer])
    backbone = study.net.feature_source()[0]
    return (
        layers if isinstance(layers, str) else " + ".join(str(layer_name(backbone, layer) or layer) for layer in layers)
    )


def _pictures(result: Result) -> dict[str, str]:
    """Return the worst images of each method with their maps, numbered, as PNG; volumes and spectra are not drawn."""
    return {
        method: as_png(plot_maps(worst.images, worst.maps, signed=True, rows=range(1, len(worst.images) + 1)))
        for method, worst in result.pictures.items()
        if worst.images.dim() == 4 and worst.images.shape[1] in (1, 3)
    }
