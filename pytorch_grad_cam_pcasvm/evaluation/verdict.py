"""Verdicts: may a method be used for a head? One sentence each, decided by a few of the checks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytorch_grad_cam_pcasvm.evaluation.consistency import CONTRADICTING, ERROR, NOISE
from pytorch_grad_cam_pcasvm.evaluation.faithfulness import KINDS
from pytorch_grad_cam_pcasvm.evaluation.localisation import CHANCE, SHARE
from pytorch_grad_cam_pcasvm.evaluation.positions import POINT
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
from pytorch_grad_cam_pcasvm.evaluation.rivals import BLIND, RANDOM
from pytorch_grad_cam_pcasvm.evaluation.statistics import FEW
from pytorch_grad_cam_pcasvm.evaluation.turns import HOPELESS, chance_of_clarity

USE, DO_NOT, OPEN = "use", "do not use", "undecided"
MOST_BLANK = 0.5  # of the maps, beyond which a method is of no use
_FAITHFUL = [("faithfulness", measure, RANDOM) for measure in KINDS]
_LOCAL = [("localisation", SHARE, CHANCE), ("localisation", SHARE, BLIND)]
_REQUIRED = [*_FAITHFUL, *_LOCAL, ("completeness", CONTRADICTING, "")]


@dataclass(frozen=True)
class Verdict:
    """Whether a method may be used.

    Attributes:
        method: the method.
        verdict: ``"use"``, ``"do not use"`` or ``"undecided"``.
        sentence: the verdict in a sentence, with its reason.
        decided_by: the rows that decided, in words.
    """

    method: str
    verdict: str
    sentence: str
    decided_by: list[str]


class _Found:
    """What all checks found about one method."""

    def __init__(self, method: str, results: Mapping[str, Result]) -> None:
        self.method, self.results = method, results
        self.rows = [(check, row) for check, result in results.items() for row in result.rows if row.method == method]
        judged = [(check, row) for check, row in self.rows if row.verdict]
        self.required = [(check, row) for check, row in judged if (check, row.measure, row.against) in _REQUIRED]
        self.blank = max((result.blank.get(method, 0.0) for result in results.values()), default=0.0)
        self.images = min((int(result.settings.get("images", FEW)) for result in results.values()), default=0)

    def with_verdict(self, verdict: str, rows: Iterable[tuple[str, Row]]) -> list[tuple[str, Row]]:
        return [(check, row) for check, row in rows if row.verdict == verdict]


def verdict(method: str, where: str, results: Mapping[str, Result]) -> Verdict:
    """Return the verdict about a method.

    Args:
        method: the method.
        where: its layer and what it explains, as in ``"at layer4 for this head"``.
        results: what was found, by the name of the check.

    Returns:
        *Do not use*: most maps are blank, or it failed against random maps in any check, against chance or the blind
        map in localisation, or too many maps contradict the decision. *Use*: none of that, and it passed deletion and
        insertion against random maps and, where they were measured, the share of evidence against chance and the blind
        map, and the share of maps that contradict a decision. *Undecided*: anything else, in particular with fewer than
        ten images. No other check decides; those that failed, or were not run, are added to *use*.
    """
    evidence = _Found(method, results)
    against = [(check, row) for check, row in evidence.rows if row.verdict == FAILED and _can_veto(check, row)]
    unclear = evidence.with_verdict(UNDECIDED, evidence.required)
    too_few = evidence.with_verdict(TOO_FEW, evidence.required)
    blank = evidence.images >= FEW and (
        evidence.blank > MOST_BLANK or bool(evidence.with_verdict(BLANK, evidence.required))
    )
    measured = {(check, row.measure, row.against) for check, row in evidence.required}
    missing = [measure for _, measure, _ in _FAITHFUL if ("faithfulness", measure, RANDOM) not in measured]
    whether = f"whether to use {method} {where}"
    if blank or against:
        all_blank = f"{evidence.blank:.0%} of its maps are blank"
        clauses = (
            [all_blank if evidence.blank > MOST_BLANK else "none of its maps has evidence for it"] if blank else []
        )
        clauses += _clauses(evidence, against, "worse than") + _clauses(evidence, unclear, "no better than")
        return _make_verdict(evidence, DO_NOT, f"Do not use {method} {where}: {'; '.join(clauses)}.", against + unclear)
    if 0 < evidence.images < FEW or too_few:
        counts = {_counted(evidence, check, row) for check, row in too_few}
        few_of = f"{evidence.images} images" if evidence.images < FEW else " and ".join(sorted(counts))
        sentence = f"It is unclear {whether}: {few_of} are too few; at least {FEW} are needed."
        return _make_verdict(evidence, OPEN, sentence, too_few if evidence.images >= FEW else [])
    if missing:
        sentence = f"It is unclear {whether}: {_listed(missing)} against random maps {_was(missing)} not measured."
        return _make_verdict(evidence, OPEN, sentence, [])
    if unclear:
        clauses = _clauses(evidence, unclear, "not clearly better than")
        hopeless = any(chance_of_clarity(row, 0.5) < HOPELESS for _, row in unclear)
        seconds = sum(result.settings.get("seconds_for_all", 0.0) for result in results.values())
        more = "More images may settle it."
        if seconds:
            more = f"The time was over before all images were measured: --minutes {math.ceil(seconds / 40) + 1} may do."
        elif hopeless:
            more = "Even twice as many images would hardly settle it."
        sentence = f"Undecided {whether}: {'; '.join(clauses)}. {more}"
        return _make_verdict(evidence, OPEN, sentence, unclear)
    sentence = f"Use {method} {where}: it {_praise(evidence)}{_but(evidence)}."
    return _make_verdict(evidence, USE, sentence, evidence.required)


def _can_veto(check: str, row: Row) -> bool:
    """Return whether a method that fails a row is not to be used, whatever else it passes."""
    local = check == "localisation" and row.against in (CHANCE, BLIND)
    return local or row.against == RANDOM or row.measure == CONTRADICTING


def _make_verdict(evidence: _Found, verdict: str, sentence: str, rows: Sequence[tuple[str, Row]]) -> Verdict:
    reasons = []
    for _, row in rows:
        against = f" against {in_words(row.against)}" if row.against else ""
        reasons.append(f"{in_words(row.measure)}{against}: {number(row)}, n = {row.estimate.n} ({row.verdict})")
    if evidence.blank:
        reasons.append(f"{evidence.blank:.0%} of the maps are blank")
    return Verdict(evidence.method, verdict, sentence, reasons)


def _clauses(evidence: _Found, rows: Sequence[tuple[str, Row]], than: str) -> list[str]:
    """Return clauses about rows that did not pass, one for each check and measure, or each rival."""
    clauses = []
    share = [row for _, row in rows if row.measure == CONTRADICTING]
    clauses += [f"{row.estimate.mean:.0%} of its maps contradict the decision" for row in share]
    kinds = [row.measure for check, row in rows if check == "faithfulness"]
    clauses += [f"{_listed(kinds)} {'is' if len(kinds) == 1 else 'are'} {than} with random maps"] if kinds else []
    for measure in (SHARE, POINT):
        rivals = [in_words(row.against) for check, row in rows if check == "localisation" and row.measure == measure]
        if rivals:
            phrase = _describe_share(evidence) if measure == SHARE else f"has its largest value {_place(evidence)}"
            clauses.append(f"it {phrase}, {than} {_listed(rivals)}")
    stability_measures = [row.measure for check, row in rows if check == "stability"]
    clauses += (
        [f"its maps are {than} random maps in stability ({_listed(stability_measures)})"] if stability_measures else []
    )
    return clauses


def _praise(evidence: _Found) -> str:
    """Return the praise of a method that may be used."""
    error = [row for _, row in evidence.rows if row.measure == ERROR and not row.against]
    parts = ["beats random maps in deletion and insertion"]
    parts += ["adds up"] if error and error[0].verdict == PASSED else []
    local = "localisation" in evidence.results
    unknown = [] if local else ["whether it tells classes apart"]
    unknown += [] if "completeness" in evidence.results else ["whether its maps contradict the decision"]
    praise = _listed([*parts, _describe_share(evidence)] if local else parts)
    return f"{praise}; {_listed(unknown)} {_was(unknown)} not measured" if unknown else praise


def _but(evidence: _Found) -> str:
    """Return the failures that do not decide; empty if there are none."""
    failed = evidence.with_verdict(FAILED, evidence.rows)
    parts = []
    for measure in KINDS:
        rivals = [in_words(row.against) for check, row in failed if check == "faithfulness" and row.measure == measure]
        parts += [f"{measure} is worse than with {_listed(rivals)}"] if rivals else []
    rivals = sorted({in_words(row.against) for check, row in failed if check == "localisation"})
    parts += [f"it localises worse than {_listed(rivals)}"] if rivals else []
    parts += ["its maps do not add up"] if any(check == "completeness" for check, _ in failed) else []
    unchanged = [in_words(row.measure) for check, row in failed if check == "sensitivity"]
    parts += [f"its maps hardly change with {_listed(unchanged)}"] if unchanged else []
    stability_measures = {row.measure for check, row in failed if check == "stability"}
    parts += [
        f"its maps {'change under noise' if measure == NOISE else 'do not move with the image'}"
        for measure in stability_measures
    ]
    parts += [f"{evidence.blank:.0%} of its maps are blank"] if evidence.blank >= 0.005 else []
    return f"; but {_listed(sorted(parts))}" if parts else ""


def _place(evidence: _Found) -> str:
    settings = evidence.results["localisation"].settings
    if settings.get("pasted"):
        return "on the pasted image"
    tiles = {2: "two", 4: "four"}.get(settings.get("tiles"))  # type: ignore[arg-type]
    return f"on the right one of {tiles} images" if tiles else "inside the masks"


def _describe_share(evidence: _Found) -> str:
    share = evidence.results["localisation"][evidence.method, SHARE].mean
    return f"puts {share:.0%} of the evidence {_place(evidence)}"


def _counted(evidence: _Found, check: str, row: Row) -> str:
    """Return how many images a row is of."""
    if check != "localisation":
        return f"{row.estimate.n} images"
    settings = evidence.results[check].settings
    tiles = {2: "pairs", 4: "groups of four"}.get(settings.get("tiles"))  # type: ignore[arg-type]
    unit = f"{tiles} of images" if tiles else "pasted images" if settings.get("pasted") else "images with a mask"
    return f"{row.estimate.n} {unit}"


def _was(parts: Sequence[Any]) -> str:
    return "was" if len(parts) == 1 else "were"


def _listed(parts: Sequence[str]) -> str:
    """Return parts as people list them."""
    if len(parts) < 2:
        return "".join(parts)
    comma = "," if len(parts) > 2 or any(" and " in part for part in parts) else ""
    return f"{', '.join(parts[:-1])}{comma} and {parts[-1]}"
