"""Methods side by side: tables and a plot of what ``examples/faithfulness.py`` measures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiment.evaluation import summary
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
    RelevanceCAM,
    ShapCAM,
)

KINDS = ("deletion", "insertion")
PAPERS, BASELINES = "Grad-CAM (the paper's)", ("zero", "mean")
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    PAPERS: (ClosedFormGradCAM, {}),
    "HiResCAM": (ClosedFormHiResCAM, {}),
    "XGrad-CAM": (ClosedFormXGradCAM, {}),
    "Grad-CAM++": (ClosedFormGradCAMPlusPlus, {}),
    "LayerCAM": (ClosedFormLayerCAM, {}),
    "Element-wise Grad-CAM": (ClosedFormGradCAMElementWise, {}),
    "ShapleyCAM": (ClosedFormShapleyCAM, {}),
    "Score-CAM": (ClosedFormScoreCAM, {"batch_size": 4}),
    "Ablation-CAM, zero": (ClosedFormAblationCAM, {"baseline": "zero"}),
    "Ablation-CAM, mean": (ClosedFormAblationCAM, {"baseline": "mean"}),
    "Relevance-CAM, zero": (RelevanceCAM, {"baseline": "zero"}),
    "Relevance-CAM, mean": (RelevanceCAM, {"baseline": "mean"}),
    "LIFT-CAM, zero": (LIFTCAM, {"baseline": "zero"}),
    "LIFT-CAM, mean": (LIFTCAM, {"baseline": "mean"}),
    "ShapCAM, zero": (ShapCAM, {"baseline": "zero", "samples": 32}),
    "ShapCAM, mean": (ShapCAM, {"baseline": "mean", "samples": 32}),
    "Contributions, zero": (ContributionCAM, {"baseline": "zero"}),
    "Contributions, mean": (ContributionCAM, {"baseline": "mean"}),
}
BLIND, CHANCE = "Blind: sum of the activations", "Random maps"
ROWS = (*METHODS, BLIND, CHANCE)


def mean_and_error(values: Sequence[float | None]) -> tuple[float, float, int]:
    """Return mean, standard error, and number of what is not None."""
    found = summary(np.array([np.nan if v is None else v for v in values], float))
    mean, error = (np.nan if found[key] is None else float(found[key] or 0) for key in ("mean", "standard error"))
    return mean, error, int(found["n"] or 0)


def pm(values: Sequence[float | None], form: str = "+.2f") -> str:
    """Return mean ± standard error."""
    mean, error, count = mean_and_error(values)
    return f"{mean:{form}} ± {error:.2f}" if count > 1 else "–"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return all tables in Markdown, by title.

    Args:
        results: as in ``faithfulness.json``.

    Returns:
        All sets together; deletion and insertion of each set, and two photos side by side; what contributions are
        ahead of; both baselines; contradictory maps; accuracies.
    """
    sets = results["sets"]
    heads = list(next(iter(sets.values()))["faithfulness"])
    each = {f"{name}, {head}": [(name, head)] for name in sets for head in heads}
    groups = {
        kind: [(name, head) for name in sets for head in heads if (head == "linear") == (kind == "linear")]
        for kind in ("linear", "RBF")
    }
    groups = {kind: where for kind, where in groups.items() if where}
    places = each | {f"all sets, {kind}": where for kind, where in groups.items()}

    def cells(where: Sequence[tuple[str, str]], row: str, part: str, key: str) -> list[Any]:
        return [sets[name][part][head]["methods"][row][key] for name, head in where]

    def numbers(where: Sequence[tuple[str, str]], row: str, key: str, less: str | None) -> list[float | None]:
        """One number for each image of the sets, the mean over heads: of a method, or by how much it is ahead."""
        part = "side by side" if key == "share" else "faithfulness"
        found: list[float | None] = []
        for name in dict.fromkeys(name for name, _ in where):
            here = [place for place in where if place[0] == name]
            values = cells(here, row, part, key)
            if less is not None:
                values = [ahead(*pair) for pair in zip(values, cells(here, less, part, key), strict=True)]
            found += means(values)
        return found

    def curves(where: Sequence[tuple[str, str]], row: str, less: str | None = None) -> str:
        return " / ".join(pm(numbers(where, row, kind, less)) for kind in KINDS)

    def beside(where: Sequence[tuple[str, str]], row: str, less: str | None = None) -> str:
        shares = cells(where, row, "side by side", "blank")
        note = (
            f" ({percent(sum(shares) / len(shares))} blank)" if less is None and row in METHODS and any(shares) else ""
        )
        return pm(numbers(where, row, "share", less), ".2f" if less is None else "+.2f") + note

    def blank(where: Sequence[tuple[str, str]], row: str) -> str:
        shares = cells(where, row, "faithfulness", "blank")
        return percent(sum(shares) / len(shares)) if row in METHODS else "–"

    found = {
        "All sets": table(
            ["method", *(f"{kind}: {what}" for kind in groups for what in
                         ("deletion / insertion", "blank", "like the blind map", "side by side"))],
            [[row, *(cell for where in groups.values() for cell in
                     (curves(where, row), blank(where, row), pm(numbers(where, row, "like blind", None), ".2f"),
                      beside(where, row)))]
             for row in ROWS],
        )
    }  # fmt: skip
    for name in sets:
        here = {head: each[f"{name}, {head}"] for head in heads}
        found[f"Deletion / insertion, {name}"] = table(
            ["method", *(title for head in heads for title in (head, "blank"))],
            [[row, *(cell for where in here.values() for cell in (curves(where, row), blank(where, row)))]
             for row in ROWS],
        )  # fmt: skip
        found[f"Side by side, {name}"] = table(
            ["method", *heads], [[row, *(beside(where, row) for where in here.values())] for row in ROWS]
        )
    found["Contributions against random maps, in standard errors"] = table(
        ["set, head", *(f"{base}: {kind}" for base in BASELINES for kind in KINDS)],
        [[title, *(errors(numbers(where, f"Contributions, {base}", kind, None))
                   for base in BASELINES for kind in KINDS)]
         for title, where in places.items()],
    )  # fmt: skip
    for base in BASELINES:
        row = f"Contributions, {base}"
        found[f"Contributions from {base}, less other maps of the same images"] = table(
            ["set, head", "less Grad-CAM: deletion / insertion", "side by side",
             "less the blind map: deletion / insertion", "side by side"],
            [[title, *(cell for less in (PAPERS, BLIND) for cell in
                       (curves(where, row, less), beside(where, row, less)))]
             for title, where in places.items()],
        )  # fmt: skip
    found["Baselines: mean less zero"] = table(
        ["set, head", *(f"{method}: {what}" for method in ("Contributions", "ShapCAM", "LIFT-CAM")
                        for what in ("deletion / insertion", "side by side"))],
        [[title, *(make(where, f"{method}, mean", f"{method}, zero")
                   for method in ("Contributions", "ShapCAM", "LIFT-CAM") for make in (curves, beside))]
         for title, where in places.items()],
    )  # fmt: skip
    parts = {"dense": "faithfulness", "pooled": "side by side"}
    sources = ("Grad-CAM", *BASELINES)
    some = {name: [name] for name in sets} | ({"all sets": list(sets)} if len(sets) > 1 else {})

    def wrong(names: Sequence[str], part: str, head: str, source: str, of: str) -> str:
        shares = [sets[name][part][head]["contradictory"][source][of] for name in names]
        return " / ".join(percent(float(share)) for share in np.atleast_1d(np.mean(shares, axis=0)))

    found["Contradictory maps of components"] = table(
        ["set, features", *(f"{source}: P1 / P2 / P3" for source in sources)],
        [[f"{title}, {features}", *(wrong(names, part, heads[0], source, "components") for source in sources)]
         for title, names in some.items() for features, part in parts.items()],
    )  # fmt: skip
    found["Contradictory maps of decisions"] = table(
        ["set, features, head", *sources],
        [[f"{title}, {features}, {head}", *(wrong(names, part, head, source, "decision") for source in sources)]
         for title, names in some.items() for features, part in parts.items() for head in heads],
    )  # fmt: skip
    found["Accuracy"] = table(
        ["set", "training / test images", *(f"{features}, {head}" for features in parts for head in heads)],
        [[name, f"{of_set['training images']:,} / {of_set['test images']}",
          *(f"{of_set[part][head]['test accuracy']:.2f}" for part in parts.values() for head in heads)]
         for name, of_set in sets.items()],
    )  # fmt: skip
    return found


def means(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the mean of each column over the rows that have it."""
    found = ([value for value in column if value is not None] for column in zip(*rows, strict=True))
    return [sum(column) / len(column) if column else None for column in found]


def ahead(first: Sequence[float | None], second: Sequence[float | None]) -> list[float | None]:
    """Return differences, None where there is no number."""
    return [None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)]


def percent(share: float | None) -> str:
    """Return a share in percent."""
    return "–" if share is None else f"{100 * share:.0f} %"


def errors(values: Sequence[float | None]) -> str:
    """Return a mean in standard errors, and whether it passes three."""
    mean, error, _ = mean_and_error(values)
    return f"{mean / error:+.1f}{' ✓' if mean >= 3 * error else ''}" if error > 0 else "–"


def plot(results: dict[str, Any]) -> Figure:
    """Draw deletion and insertion of every method, a panel for each set and head."""
    sets = results["sets"]
    heads = next(iter(sets.values()))["faithfulness"]
    figure = Figure(figsize=(10.5, 0.7 + 3.4 * len(sets)), layout="constrained")
    grid = figure.subplots(len(sets), len(heads), sharex="row", sharey=True, squeeze=False)
    for axes, (name, of_set) in zip(grid, sets.items(), strict=True):
        for axis, (head, entry) in zip(axes, of_set["faithfulness"].items(), strict=True):
            for kind, colour, shift in (("deletion", "#b2182b", -0.17), ("insertion", "#2166ac", 0.17)):
                found = [mean_and_error(entry["methods"][row][kind])[:2] for row in ROWS]
                means, bars = np.array(found).T
                axis.errorbar(
                    means, np.arange(len(ROWS)) + shift, xerr=bars, fmt="o" if kind == "deletion" else "D",
                    color=colour, markersize=3.2, linewidth=1, label=kind,
                )  # fmt: skip
            axis.axvline(0, color="0.5", linewidth=0.8)
            axis.set_title(f"{name}, {head}", fontsize="small")
            axis.set_yticks(range(len(ROWS)), ROWS, fontsize=6.5)
            axis.tick_params(axis="x", labelsize="x-small")
            axis.grid(axis="y", color="0.92")
            axis.spines[["top", "right"]].set_visible(False)
    grid[0, 0].invert_yaxis()
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
    figure.supxlabel("better than random maps by, in standard deviations of the margin (mean ± standard error)",
                     fontsize="small")  # fmt: skip
    return figure
