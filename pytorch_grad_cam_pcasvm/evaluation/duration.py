"""Duration: about how long checks will take, from the time that two runs of the network and of each method take."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.evaluation.faithfulness import ranks
from pytorch_grad_cam_pcasvm.evaluation.subject import Subject

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
        first += _seconds(lambda method=method: subject.explained(method, x[:1], targets[:1]))  # type: ignore[misc]
        warm += _seconds(lambda method=method: subject.explained(method, x, targets), 2) / len(x)  # type: ignore[misc]
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
