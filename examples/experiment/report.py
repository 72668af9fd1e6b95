"""What a run leaves behind: numbers, pictures, and a page that shows them together."""

import base64
import html
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

RED, BLUE, GREY = "#b2182b", "#2166ac", "0.45"
PAPER_F1 = {
    "mnist": ("10/60,000/10,000", (0.993, 0.991), (0.986, 0.980), (0.997, 0.989)),
    "fashion-mnist": ("10/60,000/10,000", (0.925, 0.903), (0.922, 0.897), (0.988, 0.943)),
    "bloodmnist": ("8/11,959/3,421", (0.944, 0.877), (0.925, 0.873), (0.984, 0.909)),
    "cifar10": ("10/50,000/10,000", (0.899, 0.767), (0.789, 0.735), (0.892, 0.794)),
    "chest-xray": ("3/5,144/1,288", (0.966, 0.956), (0.998, 0.975), (0.998, 0.975)),
    "dog-vs-cat": ("2/18,610/4,652", (0.967, 0.931), (0.995, 0.930), (0.995, 0.931)),
}
NEARLY_ALL = 0.9  # of the test images
MODELS = ("CNN", "Lin-SVM", "RBF-SVM")


def plot_training(accuracies: Sequence[float]) -> Figure:
    """Draw the validation accuracy of every epoch, the best with a star."""
    figure = Figure(figsize=(5, 3.2), layout="tight")
    axis = figure.subplots()
    epochs = np.arange(1, len(accuracies) + 1)
    best = int(np.argmax(accuracies))
    axis.plot(epochs, accuracies, color=BLUE)
    axis.plot(epochs[best], accuracies[best], "*", markersize=14, color=RED)
    axis.set_title(f"best: epoch {epochs[best]}, {accuracies[best]:.3f}", fontsize="medium")
    axis.set(xlabel="epoch", ylabel="validation accuracy")
    axis.margins(y=0.1)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number in some format, or a dash."""
    return "–" if value is None else f"{value:{form}}"


def pair(row: dict[str, Any]) -> str:
    """Return the closeness of maps of the same image, and in brackets of another."""
    return f"{number(row['same image'])} ({number(row['another image'])})"


def f1_rows(scores: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a table in the form of the paper's: this run, and the paper's own numbers."""
    samples = scores["samples"]
    here = f"{len(scores['classes'])}/{samples['training']:,}/{samples['test']:,}"
    ours = [f"{train:.3f}/{test:.3f}" for train, test in (scores["macro F1"][model] for model in MODELS)]
    rows = [[scores["dataset"], scores["settings"]["backbone"], here, *ours]]
    if scores["dataset"] in PAPER_F1:
        counts, *values = PAPER_F1[scores["dataset"]]
        rows.append(["the paper", "vgg16", counts, *(f"{train:.3f}/{test:.3f}" for train, test in values)])
    return rows


def rows(scores: dict[str, Any]) -> list[list[str]]:
    """Return the rows of one data set in the tables of ``docs/paper.md``: scores, closeness."""
    (_, _, *ours), (_, _, *theirs) = f1_rows(scores)
    ratios = " / ".join(f"{ratio:.0f}" for ratio in scores["contribution ratios"][:3])
    close = [" / ".join(map(pair, by_component)) for by_component in scores["closeness of SVM maps"].values()]
    return [[scores["dataset"], *ours, *theirs], [scores["dataset"], ratios, *close]]


HEADER = ["data", "backbone", "classes / training / test", *(f"{model}, macro F1 training/test" for model in MODELS)]


def collapses(scores: dict[str, Any]) -> list[str]:
    """Return in words which classifiers answer (nearly) always the same, or never find a class, in the test set."""
    found = []
    for model, matrix in scores["test confusion, by true class"].items():
        counts = np.array(matrix)  # true class, predicted class
        predicted, true = counts.sum(0) / counts.sum(), counts.sum(1) / counts.sum()
        favourite = int(predicted.argmax())
        never = [f"{scores['classes'][c]} ({counts[c].sum()} images)" for c in np.flatnonzero(counts.diagonal() == 0)]
        none = f"none of the test images of {', '.join(never)} (recall 0)"
        if predicted[favourite] >= NEARLY_ALL and true[favourite] < NEARLY_ALL * predicted[favourite]:
            answer = scores["classes"][favourite]
            found.append(
                f"{model} has collapsed: it answers {answer} for {predicted[favourite]:.0%} of the test images, where "
                f"{true[favourite]:.0%} are{f', and finds {none}' if never else ''}. Its maps explain one answer, "
                "whatever the image is."
            )
        elif never:
            found.append(f"{model} finds {none}.")
    return found


def mistakes(scores: dict[str, Any]) -> list[str]:
    """Return in words which of the shown images are misclassified, and by which classifiers."""
    return [
        f"The image of {answer['class']} is misclassified: "
        + ", ".join(f"{model} says {answer['predicted'][model]}" for model in _wrong(answer))
        + ". What explains a wrong answer is no evidence for the class."
        for answer in scores["shown"]
        if _wrong(answer)
    ]


def row_title(answer: dict[str, Any]) -> str:
    """Return the class of a shown image, and who gets it wrong."""
    return answer["class"] + (f" (wrong: {', '.join(_wrong(answer))})" if _wrong(answer) else "")


def _wrong(answer: dict[str, Any]) -> list[str]:
    return [model for model in MODELS if answer["predicted"][model] != answer["class"]]


def page(scores: dict[str, Any], figures: dict[str, tuple[str, bytes]]) -> str:
    """Return a page that shows the numbers and the figures, in one file that needs no other.

    Args:
        scores: as in ``scores.json``.
        figures: caption and PNG by file name.

    Returns:
        HTML.
    """
    close = [[name, *map(pair, rows)] for name, rows in scores["closeness of SVM maps"].items()]
    components = [f"P{b + 1} ({ratio:.0f} %)" for b, ratio in enumerate(scores["contribution ratios"])]
    settings = ", ".join(f"{key}: {value}" for key, value in scores["settings"].items())
    pictures = "\n".join(
        f'<figure><img src="data:image/png;base64,{base64.b64encode(png).decode()}" alt="{html.escape(caption)}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, png in figures.values()
    )
    collapsed = collapses(scores) or ["Each classifier finds images of every class: none has collapsed."]
    misclassified = mistakes(scores) or ["All images shown are classified correctly by the CNN and by both SVMs."]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>PCA- and SVM-Grad-CAM: {html.escape(scores["dataset"])}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }} td, th {{ padding: .3rem .8rem; border-bottom: 1px solid #ccc;
text-align: left }} figure {{ margin: 2rem 0 }} img {{ max-width: 100% }} figcaption {{ color: #555 }}
details {{ color: #555 }} .warning {{ border-left: .3rem solid #b2182b; padding-left: .8rem }}
</style></head><body>
<h1>PCA- and SVM-Grad-CAM: {html.escape(scores["dataset"])}</h1>
{_table(HEADER, f1_rows(scores))}
<p>Best epoch {scores["best epoch"]} of {len(scores["validation accuracy"])}. Duplicates dropped:
{scores["samples"]["duplicates dropped"]}.</p>
{_notes(collapsed, bool(collapses(scores)))}
<details><summary>Settings</summary><p>{html.escape(settings)}</p></details>
<h2>Figures</h2>
{_notes(misclassified, bool(mistakes(scores)))}
{pictures}
<h2>Like the dominant component?</h2>
<p>Absolute correlation of the map of each SVM's predicted class with the map of each component (share of variance),
mean over the test set; in brackets with that component's map of another image:</p>
{_table(["SVM", *components[: len(close[0]) - 1]], close)}
</body></html>
"""


def _notes(sentences: Sequence[str], are_warnings: bool) -> str:
    kind = ' class="warning"' if are_warnings else ""
    return "\n".join(f"<p{kind}>{html.escape(sentence)}</p>" for sentence in sentences)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in row)

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', header)}</tr>\n{body}</table>"
