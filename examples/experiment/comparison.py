"""Methods side by side: tables and a plot of what ``examples/which_method.py`` measures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from experiment.panels import Row, panels
from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormAblationCAM,
    ClosedFormGradCAM,
    ClosedFormGradCAMElementWise,
    ClosedFormGradCAMPlusPlus,
    ClosedFormHiResCAM,
    ClosedFormLayerCAM,
    ClosedFormScoreCAM,
    ClosedFormShapleyCAM,
    ClosedFormXGradCAM,
    ContributionCAM,
    LogRatioTarget,
    RelevanceCAM,
    ShapCAM,
    SignedMaps,
    SVMTarget,
)
from pytorch_grad_cam_pcasvm.evaluation import Estimate, Result


class LogRatioContributions(ContributionCAM):
    """Contributions to the log-ratio of a class, where its margin is asked for."""

    def explain(self, input_tensor: Tensor, targets: Any = None, **options: Any) -> SignedMaps:
        """Return the maps, with each margin's log-ratio in its place."""
        chosen = [LogRatioTarget(each.category) if isinstance(each, SVMTarget) else each for each in targets]
        return super().explain(input_tensor, chosen, **options)


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Grad-CAM (the paper's)": (ClosedFormGradCAM, {}),
    "HiResCAM": (ClosedFormHiResCAM, {}),
    "XGrad-CAM": (ClosedFormXGradCAM, {}),
    "Grad-CAM++": (ClosedFormGradCAMPlusPlus, {}),
    "LayerCAM": (ClosedFormLayerCAM, {}),
    "Element-wise Grad-CAM": (ClosedFormGradCAMElementWise, {}),
    "ShapleyCAM": (ClosedFormShapleyCAM, {}),
    "Score-CAM": (ClosedFormScoreCAM, {"batch_size": 8}),
    "Ablation-CAM": (ClosedFormAblationCAM, {}),
    "Relevance-CAM": (RelevanceCAM, {}),
    "LIFT-CAM": (LIFTCAM, {}),
    "ShapCAM": (ShapCAM, {"samples": 32}),
    "Contributions": (ContributionCAM, {}),
    "Contributions, zero": (ContributionCAM, {"baseline": "zero"}),
    "Contributions, mean": (ContributionCAM, {"baseline": "mean"}),
    "Contributions, balanced mean": (ContributionCAM, {"baseline": "balanced mean"}),
    "Contributions, log-ratio": (LogRatioContributions, {"baseline": "mean"}),  # sums over pairs may have no boundary
}
BASELINES = ["Grad-CAM (the paper's)", *(name for name in METHODS if name.startswith("Contributions"))]
OF_VALUES = ["Ablation-CAM", "Relevance-CAM", "LIFT-CAM", *BASELINES[1:]]  # without gradient, and in seconds
KINDS = ("deletion", "insertion")
RANDOM, BLIND = "random maps", "the blind map"
SHARE = "share of positive evidence"
NOTHING = Estimate(float("nan"), float("nan"), 0)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def together(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over sets, whose images are independent."""
    found = [estimate for estimate in estimates if estimate.n > 1]
    if not found:
        return NOTHING
    error = np.sqrt(np.sum([estimate.standard_error**2 for estimate in found])) / len(found)
    mean = np.mean([estimate.mean for estimate in found])
    return Estimate(float(mean), float(error), sum(estimate.n for estimate in found))


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.0f} %"


class Measured:
    """The results of all sets, by set, kind of features, head and check."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.every = results["sets"]
        self.sets = [name for name in self.every if ":" not in name] or list(self.every)
        self.heads = list(self.every[self.sets[0]]["heads"]["dense"])
        self._found = {
            (name, head, check): Result.from_dict(entry[check])
            for name, of_set in self.every.items()
            for kind in of_set["heads"].values()
            for head, entry in kind.items()
            for check in ("faithfulness", "sensitivity", "localisation")
            if check in entry
        }
        measured = {row.method for found in self._found.values() for row in found.rows}
        self.methods = [name for name in METHODS if name in measured]
        self.contradictory = [
            entry["contradictory"]
            for of_set in self.every.values()
            for kind in of_set["heads"].values()
            for entry in kind.values()
        ]

    def number(self, check: str, head: str, key: tuple[str, ...], name: str | None = None) -> Estimate:
        """Return a number of one set, or the mean over all; a check may miss it."""
        estimates = []
        for each in self.sets if name is None else [name]:
            try:
                estimates.append(self._found[each, head, check][key])  # type: ignore[index]
            except KeyError:
                estimates.append(NOTHING)
        return together(estimates)

    def blind(self, head: str, kind: str) -> float:
        """Return how much better than random maps the blind map is, in the mean over all images and sets."""
        gains = []
        for name in self.sets:
            curves = self._found[name, head, "faithfulness"].curves
            assert curves is not None
            gains.append(np.mean(curves[kind][BLIND]) - np.mean(curves[kind][RANDOM]))
        return float(np.mean(gains)) * (-1 if kind == "deletion" else 1)

    def layers(self) -> list[str]:
        """Return what is randomised, in the order of the sensitivity check."""
        found = self._found.get((self.sets[0], self.heads[0], "sensitivity"))  # not of imbalanced sets
        return list(dict.fromkeys(row.measure for row in found.rows if row.measure != "likeness")) if found else []


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return all tables in Markdown, by title.

    Args:
        results: as in ``which_method.json``.

    Returns:
        If all methods are measured: all sets together, in short and by head; randomisation; deletion and insertion, and
        two photos side by side, of each set. Then contradictory maps; if the neutral one is among them baselines, also
        of imbalanced sets; accuracies.
    """
    of = Measured(results)
    found = (of_methods(of) if of.layers() else {}) | contradictions(of) | cancellation(of)
    if "Contributions" in of.methods:
        found |= {f"Baselines, {name or 'all sets'}": baselines(of, name) for name in (None, *of.every)}
    found["Accuracy"] = table(
        ["set", "training / test images", *(f"{kind}, {head}" for kind in ("dense", "pooled") for head in of.heads)],
        [[name, f"{of_set['training images']:,} / {of_set['test images']}",
          *(f"{of_set['heads'][kind][head]['test accuracy']:.2f}" for kind in ("dense", "pooled") for head in of.heads)]
         for name, of_set in of.every.items()],
    )  # fmt: skip
    return found


def of_methods(of: Measured) -> dict[str, str]:
    """Return the tables of all methods."""
    names, heads = of.sets, of.heads
    short = [[method] for method in (*of.methods, BLIND)]
    for row in short:
        method = row[0]
        for head in heads:
            gains = [
                f"{of.blind(head, kind):+.2f}"
                if method == BLIND
                else str(of.number("faithfulness", head, (method, kind, RANDOM)))
                for kind in KINDS
            ]
            row += [" / ".join(gains), unsigned(of.number("localisation", head, (method, SHARE)))]
    found = {
        "In short": table(
            [
                "method",
                *(f"{head}: {what}" for head in heads for what in ("deletion / insertion", "side by side")),
            ],
            short,
        )
    }
    for head in heads:
        found[f"All sets, {head}"] = table(
            ["method", "deletion, than random maps", "insertion, than random maps", "deletion, than the blind map",
             "insertion, than the blind map", "like the blind map", "side by side"],
            [
                [
                    method,
                    *(str(of.number("faithfulness", head, (method, kind, rival)))
                      for rival in (RANDOM, BLIND) for kind in KINDS),
                    unsigned(of.number("sensitivity", head, (method, "likeness", BLIND))),
                    unsigned(of.number("localisation", head, (method, SHARE))),
                ]
                for method in of.methods
            ],
        )  # fmt: skip
        found[f"Randomised, {head}"] = table(
            ["method", *of.layers()],
            [[method, *(unsigned(of.number("sensitivity", head, (method, what))) for what in of.layers())]
             for method in (*of.methods, BLIND)],
        )  # fmt: skip
    for name in names:
        found[f"Deletion / insertion, {name}"] = table(
            ["method", *heads],
            [
                [
                    method,
                    *(" / ".join(str(of.number("faithfulness", head, (method, kind, RANDOM), name)) for kind in KINDS)
                      for head in heads),
                ]
                for method in of.methods
            ],
        )  # fmt: skip
        found[f"Side by side, {name}"] = table(
            ["method", *heads],
            [[method, *(unsigned(of.number("localisation", head, (method, SHARE), name)) for head in heads)]
             for method in (*of.methods, BLIND)],
        )  # fmt: skip
    return found


KIND_OF_FEATURES = ("dense", "pooled")


def share_wrong(of: Measured, chosen: Sequence[str], kind: str, head: str, method: str, key: str) -> np.ndarray:
    """Return the share of contradictory maps of each component, or of decisions, in the mean over some sets."""
    counted = [of.every[name]["heads"][kind][head]["contradictory"] for name in chosen]
    shares = [each[method][key] for each in counted if method in each]
    return np.atleast_1d(np.mean(shares, axis=0) if shares else np.nan)


def wrong(*question: Any) -> str:
    """Return what ``share_wrong`` does, in percent."""
    shares = share_wrong(*question)
    return "–" if np.isnan(shares).any() else " / ".join(percent(float(share)) for share in shares)


def contradictions(of: Measured) -> dict[str, str]:
    """Return how many maps contradict the value above them, over all sets."""
    methods = [name for name in METHODS if any(name in each for each in of.contradictory)]
    kinds, first = KIND_OF_FEATURES, of.heads[0]
    return {
        "Contradictory maps of components": table(
            ["method", *(f"{kind}: P1 / P2 / P3" for kind in kinds)],
            [[each, *(wrong(of, of.sets, kind, first, each, "components") for kind in kinds)] for each in methods],
        ),
        "Contradictory maps of decisions": table(
            ["method", *(f"{kind}, {head}" for kind in kinds for head in of.heads)],
            [
                [each, *(wrong(of, of.sets, kind, head, each, "decision") for kind in kinds for head in of.heads)]
                for each in methods
            ],
        ),
    }


def cancellation(of: Measured) -> dict[str, str]:
    """Return how much evidence cancels on the maps of heads without a gradient: median and maximum of each set."""
    columns = [(kind, head) for kind in KIND_OF_FEATURES for head in of.heads]
    rows = []
    for name in of.sets:
        entries = [of.every[name]["heads"][kind][head]["contradictory"] for kind, head in columns]
        numbers = [entry.get("Contributions", {}).get("cancellation") for entry in entries]
        rows.append([name, *("–" if pair is None else f"{pair[0]:.1f} / {pair[1]:.1f}" for pair in numbers)])
    kept = [place for place in range(1 + len(columns)) if any(row[place] != "–" for row in rows)]
    header = ["set", *(f"{kind}, {head}" for kind, head in columns)]
    if len(kept) == 1:
        return {}
    return {"Cancellation": table([header[k] for k in kept], [[row[k] for k in kept] for row in rows])}


def baselines(of: Measured, name: str | None) -> str:
    """Return a table of the baselines of contributions, of one set or over all."""

    def row(head: str, method: str) -> list[str]:
        chosen = of.sets if name is None else [name]
        shares = [wrong(of, chosen, kind, head, method, "decision") for kind in KIND_OF_FEATURES]
        gains = [of.number("faithfulness", head, (method, kind, RANDOM), name) for kind in KINDS]
        beside = of.number("localisation", head, (method, SHARE), name)
        ahead = [of.number("faithfulness", head, (method, kind, "Contributions"), name) for kind in KINDS]
        ahead += [of.number("localisation", head, (method, SHARE, "Contributions"), name)]
        return [head, method, *shares, *map(str, gains), unsigned(beside), *map(str, ahead)]

    measures = (*KINDS, "side by side")
    header = ["head", "maps", *(f"contradictory, {kind}" for kind in KIND_OF_FEATURES)]
    rows = [row(head, method) for head in of.heads for method in BASELINES]
    return table(
        [*header, *(what + against for against in ("", ", than neutral") for what in measures)],
        [each for each in rows if set(each[2:]) != {"–"}],
    )


def unsigned(estimate: Estimate) -> str:
    """Return a share or a correlation, without a plus."""
    return str(estimate).replace("+", "")


def plot(results: dict[str, Any]) -> Figure:
    """Draw the mean over all sets of every method and head: faithfulness, and the share on the right photo."""
    of = Measured(results)
    methods = [*of.methods, BLIND]
    return panels(methods, [_faithfulness(of, methods), _beside(of, methods)])


def plot_baselines(results: dict[str, Any]) -> Figure:
    """Draw the mean over all sets of Grad-CAM and every baseline: contradictory maps, then what ``plot`` shows."""
    of = Measured(results)
    methods = [name for name in BASELINES if name in of.methods]

    def shares(kind: str, head: str) -> list[Estimate]:
        return [Estimate(100 * share_wrong(of, of.sets, kind, head, each, "decision").item(), 0, 0) for each in methods]

    contradictory = Row(
        "maps that contradict the decision, in %",
        0,
        {head: {f"{kind} features": shares(kind, head) for kind in KIND_OF_FEATURES} for head in of.heads},
    )
    labels = [name.replace("Contributions, ", "") if name != "Contributions" else "neutral" for name in methods]
    return panels(labels, [contradictory, _faithfulness(of, methods), _beside(of, methods)])


def _faithfulness(of: Measured, methods: Sequence[str]) -> Row:
    def gain(head: str, method: str, kind: str) -> Estimate:
        if method == BLIND:
            return Estimate(of.blind(head, kind), float("nan"), 0)
        return of.number("faithfulness", head, (method, kind, RANDOM))

    return Row(
        "better than random maps, in standard deviations of the margin (0: chance)",
        0,
        {head: {kind: [gain(head, each, kind) for each in methods] for kind in KINDS} for head in of.heads},
    )


def _beside(of: Measured, methods: Sequence[str]) -> Row:
    return Row(
        "two photos side by side: share of the evidence on the right one (0.5: chance)",
        0.5,
        {head: {"": [of.number("localisation", head, (each, SHARE)) for each in methods]} for head in of.heads},
    )
