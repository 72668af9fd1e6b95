"""Verdicts: may a method be used for a head? One sentence each, decided by a few of the checks.

Tables say which words belong to which measures, and templates make a sentence of them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytorch_grad_cam_pcasvm.studio.evaluation.faithfulness import KINDS
from pytorch_grad_cam_pcasvm.studio.evaluation.localisation import CHANCE, SHARE
from pytorch_grad_cam_pcasvm.studio.evaluation.positions import POINT
from pytorch_grad_cam_pcasvm.studio.evaluation.result import (
    BLANK,
    FAILED,
    FEW,
    PASSED,
    TOO_FEW,
    UNDECIDED,
    Result,
    Row,
    in_words,
    number,
)
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import BLIND, RANDOM
from pytorch_grad_cam_pcasvm.studio.evaluation.sanity import CONTRADICTING, ERROR, NOISE, SHIFT
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import HOPELESS, chance_of_clarity

USE, DO_NOT, OPEN = "use", "do not use", "undecided"
MOST_BLANK = 0.5  # of the maps, beyond which a method is of no use
_FAITHFUL = [("faithfulness", measure, RANDOM) for measure in KINDS]
_LOCAL = [("localisation", SHARE, CHANCE), ("localisation", SHARE, BLIND)]
_REQUIRED = [*_FAITHFUL, *_LOCAL, ("completeness", CONTRADICTING, "")]


class _Clause(NamedTuple):
    """What is said of the rows of a check.

    Attributes:
        check: the check.
        measures: of these rows; empty: all of the check.
        text: a template. ``{measures}`` and ``{rivals}`` are listed as the rows have them, ``{all_rivals}`` by name;
            ``{mean}`` is that of the last row; ``{than}``, ``{share}``, ``{place}`` and ``{blank}`` are of the verdict.
    """

    check: str
    measures: Collection[str]
    text: str


_DECIDING = (  # of rows that failed, or are unclear, and decide
    _Clause("completeness", (CONTRADICTING,), "{mean:.0%} of its maps contradict the decision"),
    _Clause("faithfulness", (), "{measures} {are} {than} with random maps"),
    _Clause("localisation", (SHARE,), "it puts {share:.0%} of the evidence {place}, {than} {rivals}"),
    _Clause("localisation", (POINT,), "it has its largest value {place}, {than} {rivals}"),
    _Clause("stability", (), "its maps are {than} random maps in stability ({measures})"),
)
_BESIDES = (  # of rows that failed, and do not decide
    *(_Clause("faithfulness", (measure,), "{measures} is worse than with {rivals}") for measure in KINDS),
    _Clause("localisation", (), "it localises worse than {all_rivals}"),
    _Clause("completeness", (), "its maps do not add up"),
    _Clause("sensitivity", (), "its maps hardly change with {measures}"),
    _Clause("stability", (NOISE,), "its maps change under noise"),
    _Clause("stability", (SHIFT,), "its maps do not move with the image"),
)
_UNMEASURED = {  # by check, where it was not made
    "localisation": "whether it tells classes apart",
    "completeness": "whether its maps contradict the decision",
}
_BLANK = "{blank:.0%} of its maps are blank"
_ALL_BLANK = "none of its maps has evidence for it"
_SHARE = "puts {share:.0%} of the evidence {place}"
_SENTENCES = {
    USE: "Use {method} {where}: it {praise}{unmeasured}{but}.",
    DO_NOT: "Do not use {method} {where}: {reasons}.",
    "few": "It is unclear whether to use {method} {where}: {count} are too few; at least {least} are needed.",
    "missing": "It is unclear whether to use {method} {where}: {missing} against random maps {were} not measured.",
    OPEN: "Undecided whether to use {method} {where}: {reasons}. {more}",
}
_MORE = {  # images
    "time": "The time was over before all images were measured: raising --minutes by {minutes} may do.",
    "hopeless": "Even twice as many images would hardly settle it.",
    "images": "More images may settle it.",
}
_TILES = {2: ("two", "pairs"), 4: ("four", "groups of four")}


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


def verdict(method: str, where: str, results: Mapping[str, Result], lacking: float = 0.0) -> Verdict:
    """Return the verdict about a method.

    Args:
        method: the method.
        where: its layer and what it explains, as in ``"at layer4 for this head"``.
        results: what was found, by the name of the check.
        lacking: for how many seconds more the checks would run that the clock ended.

    Returns:
        *Do not use*: most maps are blank, or it failed against random maps in any check, against chance or the blind
        map in localisation, or too many maps contradict the decision. *Use*: none of that, and it passed deletion and
        insertion against random maps and, where they were measured, the share of evidence against chance and the blind
        map, and the share of maps that contradict a decision. *Undecided*: anything else, in particular with fewer than
        ten images. No other check decides; those that failed, or were not run, are added to *use*.
    """
    evidence = _Evidence(method, where, results)
    judged = [(check, row) for check, row in evidence.rows if row.verdict]
    required = [(check, row) for check, row in judged if (check, row.measure, row.against) in _REQUIRED]
    words = UNDECIDED, TOO_FEW, BLANK
    unclear, too_few, unseen = ([(check, row) for check, row in required if row.verdict == word] for word in words)
    against = [(check, row) for check, row in evidence.rows if row.verdict == FAILED and _can_veto(check, row)]
    most_blank = evidence.blank > MOST_BLANK
    measured = {(check, row.measure, row.against) for check, row in required}
    missing = [measure for _, measure, _ in _FAITHFUL if ("faithfulness", measure, RANDOM) not in measured]
    blank = evidence.images >= FEW and (most_blank or bool(unseen))
    if blank or against:
        clauses = [evidence.write(_BLANK) if most_blank else _ALL_BLANK] if blank else []
        clauses += evidence.list_clauses(_DECIDING, against, than="worse than")
        clauses += evidence.list_clauses(_DECIDING, unclear, than="not clearly better than")
        return evidence.judge(DO_NOT, DO_NOT, against + unclear, reasons="; ".join(clauses))
    if 0 < evidence.images < FEW or too_few:
        counts = {evidence.count_images(check, row) for check, row in too_few}
        count = f"{evidence.images} images" if evidence.images < FEW else " and ".join(sorted(counts))
        return evidence.judge(OPEN, "few", too_few if evidence.images >= FEW else [], count=count, least=FEW)
    if missing:
        return evidence.judge(OPEN, "missing", [], missing=_list(missing), were=_was(missing))
    if unclear:
        clauses = evidence.list_clauses(_DECIDING, unclear, than="not clearly better than")
        hopeless = any(chance_of_clarity(row, 0.5) < HOPELESS for _, row in unclear)
        more = _MORE["time" if lacking else "hopeless" if hopeless else "images"]
        more = more.format(minutes=math.ceil(lacking / 40))  # of a minute, 40 s are for checks
        return evidence.judge(OPEN, OPEN, unclear, reasons="; ".join(clauses), more=more)
    return evidence.judge(
        USE, USE, required, praise=_list(evidence.list_praise()), unmeasured=evidence.name_unmeasured(),
        but=evidence.name_failures(),
    )  # fmt: skip


def _can_veto(check: str, row: Row) -> bool:
    """Return whether a method that fails a row is not to be used, whatever else it passes."""
    local = check == "localisation" and row.against in (CHANCE, BLIND)
    return local or row.against == RANDOM or row.measure == CONTRADICTING


class _Evidence:
    """What all checks found about one method, in words."""

    def __init__(self, method: str, where: str, results: Mapping[str, Result]) -> None:
        self.method, self.where, self.results = method, where, results
        self.rows = [(check, row) for check, result in results.items() for row in result.rows if row.method == method]
        self.blank = max((result.blank.get(method, 0.0) for result in results.values()), default=0.0)
        self.images = min((int(result.settings.get("images", FEW)) for result in results.values()), default=0)

    def judge(self, verdict: str, sentence: str, rows: Sequence[tuple[str, Row]], **words: Any) -> Verdict:
        """Return a verdict, decided by rows, with one of the sentences and the words in it."""
        reasons = []
        for _, row in rows:
            against = f" against {in_words(row.against)}" if row.against else ""
            reasons.append(f"{in_words(row.measure)}{against}: {number(row)}, n = {row.estimate.n} ({row.verdict})")
        reasons += [f"{self.blank:.0%} of the maps are blank"] if self.blank else []
        text = _SENTENCES[sentence].format(method=self.method, where=self.where, **words)
        return Verdict(self.method, verdict, text, reasons)

    def write(self, template: str, **words: Any) -> str:
        """Return a template with its words, of which the share and the place of the evidence are known where needed."""
        if "{share" in template:
            words["share"] = self.results["localisation"][self.method, SHARE].mean
        if "{place" in template:
            words["place"] = self._name_place()
        return template.format(blank=self.blank, **words)

    def list_clauses(self, table: Sequence[_Clause], rows: Sequence[tuple[str, Row]], than: str = "") -> list[str]:
        """Return the clauses of a table that some of the rows belong to."""
        clauses = []
        for check, measures, text in table:
            own = [row for name, row in rows if name == check and (not measures or row.measure in measures)]
            if not own:
                continue
            names = list(dict.fromkeys(in_words(row.measure) for row in own))
            rivals = list(dict.fromkeys(in_words(row.against) for row in own))
            clauses.append(self.write(
                text, measures=_list(names), are="is" if len(names) == 1 else "are", rivals=_list(rivals),
                all_rivals=_list(sorted(rivals)), mean=own[-1].estimate.mean, than=than,
            ))  # fmt: skip
        return clauses

    def list_praise(self) -> list[str]:
        """Return the parts of the praise of a method that may be used."""
        sums = [row for _, row in self.rows if row.measure == ERROR and not row.against]
        parts = ["beats random maps in deletion and insertion"]
        parts += ["adds up"] if sums and sums[0].verdict == PASSED else []
        return [*parts, self.write(_SHARE)] if "localisation" in self.results else parts

    def name_unmeasured(self) -> str:
        """Return the questions that no check has answered; empty if there are none."""
        parts = [words for check, words in _UNMEASURED.items() if check not in self.results]
        return f"; {_list(parts)} {_was(parts)} not measured" if parts else ""

    def name_failures(self) -> str:
        """Return the failures that do not decide; empty if there are none."""
        parts = self.list_clauses(_BESIDES, [(check, row) for check, row in self.rows if row.verdict == FAILED])
        parts += [self.write(_BLANK)] if self.blank >= 0.005 else []
        return f"; but {_list(sorted(parts))}" if parts else ""

    def count_images(self, check: str, row: Row) -> str:
        """Return how many images a row is of."""
        settings = self.results[check].settings
        unit = "images"
        if check == "localisation":
            tiles = _TILES.get(settings.get("tiles", 0))
            unit = f"{tiles[1]} of images" if tiles else "images with a mask"
            unit = "pasted images" if settings.get("pasted") and not tiles else unit
        return f"{row.estimate.n} {unit}"

    def _name_place(self) -> str:
        """Return where the evidence for a class should be."""
        settings = self.results["localisation"].settings
        if settings.get("pasted"):
            return "on the pasted image"
        tiles = _TILES.get(settings.get("tiles", 0))
        return f"on the right one of {tiles[0]} images" if tiles else "inside the masks"


def _was(parts: Sequence[Any]) -> str:
    return "was" if len(parts) == 1 else "were"


def _list(parts: Sequence[str]) -> str:
    """Return parts as people list them."""
    if len(parts) < 2:
        return "".join(parts)
    comma = "," if len(parts) > 2 or any(" and " in part for part in parts) else ""
    return f"{', '.join(parts[:-1])}{comma} and {parts[-1]}"
