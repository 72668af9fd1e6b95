"""Writes ``measurements.md``, and the pictures of it, from the numbers that the examples left beside this file.

python docs/measurements.py
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import good_photos  # noqa: E402 - beside what was put on the path
import small_things  # noqa: E402
import which_layer  # noqa: E402
from experiment import comparison  # noqa: E402

HEAD = """\
# Measurements

All numbers behind [Which maps can be believed?](which-maps.md), which also says how they were measured, behind
[Choosing layers](layers.md) and [Defects](how-to/defects.md). `python docs/measurements.py` writes this page and its
pictures from the JSON files that `examples/which_method.py`, `examples/which_layer.py`, `examples/small_things.py` and
`examples/good_photos.py` leave.

Deletion and insertion: by how much the margin falls further, or stays higher, than with a control (random maps, or the
blind map), in standard deviations of the margin; above 0 is better. Side by side: share of the positive evidence for
a class on its own photo; 0.5 is chance. Means ± standard errors. In sets whose names end in ":10", the training set has
ten images of one class for each of another.
"""

SMALL = """\
`examples/small_things.py` says what the sets and heads are. AUROC of photos and of pixels, AUPRO up to 0.3 false
positives, share of faulty photos whose strongest pixel is in a fault, and share of faults found where at most RATES
good photos raise a false alarm, the fewest that can be told. Of pooled features, the contributions to a fault are the
values of pixels.

"""


GOOD = """\
`examples/good_photos.py` says what the sets and detectors are. Good photos are drawn five times; means with standard
errors. Numbers kept: of the detector; seconds: to score all test photos on one core.

"""


def found(name: str) -> Any:
    """Return the numbers of one run."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def describe_small_things() -> str:
    """Return the section of small things."""
    rows = found("small_things")
    rates = sorted({f"1 of {round(1 / row['rate'])}" for row in rows})
    return SMALL.replace("RATES", " or ".join(rates)) + small_things.write_table(rows)


def page() -> str:
    """Return the page in Markdown."""
    methods, baselines = (comparison.tables(found(name)) for name in ("which_method", "which_baseline"))
    baselines["Accuracy, baselines"] = baselines.pop("Accuracy")  # of a run of its own
    kept = {title: table for title, table in methods.items() if title not in baselines} | baselines
    kept |= {f"Trees, {title}": table for title, table in comparison.tables(found("which_trees")).items()}
    kept |= {f"Layers, {title}": table for title, table in which_layer.tables(found("which_layer")).items()}
    together = which_layer.tables(found("which_layers_together"))
    kept |= {f"Layers together, {title}": table for title, table in together.items() if "half" not in title}
    kept |= {"Small things": describe_small_things()}
    kept |= {"A handful of good photos": GOOD + good_photos.write_table(found("good_photos"))}
    return HEAD + "".join(f"\n## {title}\n\n{table}\n" for title, table in kept.items())


if __name__ == "__main__":
    (HERE / "measurements.md").write_text(page(), encoding="utf-8")
    for name, figure in {
        "which_method": comparison.plot(found("which_method")),
        "which_baseline": comparison.plot_baselines(found("which_baseline")),
        "which_trees": comparison.plot(found("which_trees")),
        "which_layer": which_layer.plot(
            found("which_layer"), {"chest-xray": "chest X-rays", "dog-vs-cat": "dogs and cats"}
        ),
    }.items():
        figure.savefig(HERE / f"{name}.png", dpi=100)
