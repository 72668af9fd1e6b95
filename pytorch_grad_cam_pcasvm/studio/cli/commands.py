"""The commands that explain, evaluate, browse and export: each takes its options, and imports modules when it runs."""

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.network.inputs import image_and_label
from pytorch_grad_cam_pcasvm.runtime.amounts import least_images
from pytorch_grad_cam_pcasvm.runtime.files import check_folder
from pytorch_grad_cam_pcasvm.studio.cli.arguments import RUN, AtlasOptions, EvaluateOptions, ExploreOptions, write_line
from pytorch_grad_cam_pcasvm.studio.cli.copies import find_trained
from pytorch_grad_cam_pcasvm.studio.cli.folders import accuracy, describe_trained, list_bad, naming_all_bad, tell_bad
from pytorch_grad_cam_pcasvm.studio.cli.models import (
    anomaly_target,
    choose_layers,
    choose_options,
    choose_targets,
    find_coarsest,
    make_cam,
    open_model,
    read_head,
)
from pytorch_grad_cam_pcasvm.studio.cli.preparation import open_folder, resize_of_masks
from pytorch_grad_cam_pcasvm.studio.cli.refusals import refuse_few
from pytorch_grad_cam_pcasvm.studio.data.images import Images
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder
from pytorch_grad_cam_pcasvm.studio.model.preparation import make_trials, read_steps
from pytorch_grad_cam_pcasvm.studio.pictures.answers import MOVED
from pytorch_grad_cam_pcasvm.targets import SVMTarget, default_decision, describe_meaning

_SURE_OF = 64  # photos, whose maps say how much of the evidence is sure
_FEWEST = 3  # photos of which anything can be measured


def atlas(options: AtlasOptions) -> None:
    """Explain a folder, keep the maps, and write a page."""
    from pytorch_grad_cam_pcasvm.studio import atlas
    from pytorch_grad_cam_pcasvm.studio.atlas.shards import require_parquet

    require_parquet()
    model = open_model(options)
    method = getattr(package, options.method)
    *finer, layer = choose_layers(options, model)
    if finer:
        raise ValueError("an atlas is made at one layer: name it once")
    folder = open_folder(options, model.preparation, "an atlas")
    with naming_all_bad(options, folder):
        store = atlas.build(
            model.net,
            folder,
            [layer],
            options.out,
            method=method,
            patches=options.patches,
            batch_size=options.batch_size,
            workers=options.workers,
            engine=options.engine,
            processes=options.processes,
            skip_bad_images=options.skip_bad_images,
            verify=options.verify,
            **choose_options(options, [method], model, [layer])[method],
        )
    print(store)
    if store.labels is not None and store.head.classes_ is not None and store.places is None:
        try:
            print(f"{len(store)} images: {accuracy(store.names(store.labels), store.correct)}")
        except ValueError as error:  # the atlas is complete
            print(f"the accuracy is unknown: {error}")
    if store.decision_errors is not None and "above 0" in describe_meaning(SVMTarget(), store.head):
        count = int((np.abs(store.margins) < 2 * store.decision_errors).sum())
        print(f"{count} of {len(store)} decisions are open: {MOVED}")
    tell_bad(store.manifest["bad"])
    page = store.to_html(options.page or options.out / "explorer")
    print(f"open {page.resolve().as_uri()}")


def evaluate(options: EvaluateOptions) -> None:
    """Write a report of whether maps can be believed."""
    from torch.utils.data import Subset

    from pytorch_grad_cam_pcasvm.studio import evaluation
    from pytorch_grad_cam_pcasvm.studio.evaluation.report import CHECKS, USUAL

    model = open_model(options)
    net, preparation = model.net, model.preparation
    dense = net.is_dense
    if dense and options.masks is None:
        raise ValueError("a head that decides at every position is measured by true masks: add --masks DIR")
    layer, methods = _choose_methods(options, model)
    folder = open_folder(options, preparation, "evaluate")
    bad = list_bad(folder) if options.skip_bad_images else {}
    tell_bad([Images(folder, thumbnails=0).id(row) for row in bad])
    rows, note, trained = _choose_rows(options, model, folder, [row for row in range(len(folder)) if row not in bad])
    masks = None if options.masks is None else _masks(options, preparation, folder, rows, net.head.normal)
    study = evaluation.Study(
        net,
        Subset(folder, rows),
        [layer],
        methods,
        None if dense else anomaly_target(net.head),
        images=options.count,
        batch_size=options.batch_size,
        seed=options.seed,
        stop_early=not options.all_images,
        minutes=None if options.all_images else options.minutes,
    )
    if not dense:
        refuse_few(options)
    study.note = note
    print(note, end="\n" * bool(note))
    if not dense:
        with naming_all_bad(options, folder):
            _tell_accuracy(study, trained=trained)
            _tell_sureness(study, layer, methods)
    if study.minutes is not None:  # those of imports, of the network and of reading count, too
        study.minutes = max(0.0, study.minutes - (time.monotonic() - options.started) / 60)
    checks: dict[str, Any] = {name: {} for name in (CHECKS if options.checks else USUAL)}
    if masks is not None:
        checks["localisation"] = {"masks": masks, "rate": options.rate}
    if dense:
        checks = {"localisation": checks["localisation"]}
    ways = {
        name: _to_explain(options, name, of_method.get("target_layers", [layer]))
        for name, (_, of_method) in methods.items()
        if not dense
    }
    with naming_all_bad(options, folder):
        page = study.report(options.out, checks=checks, commands=ways)
    _tell_verdicts(options.out / "report.json", ways)
    print(f"open {page.resolve().as_uri()}")


def _choose_rows(options: EvaluateOptions, model: Any, folder: Any, rows: Sequence[int]) -> tuple[list[int], str, bool]:
    """Return the photos to measure, what to say of those that were trained on, and whether some are among them.

    They are left out, if enough others are there.

    Args:
        options: how many photos, and the seed that draws them.
        model: whose file says which were trained on.
        folder: the photos.
        rows: the numbers of those that can be read.
    """
    order = np.random.default_rng(options.seed).permutation(rows).tolist()
    new, looked = list[int](), 0
    while looked < len(order) and len(new) < options.count:
        part = order[looked : looked + options.count]
        trained = find_trained(model, [folder.paths[row] for row in part])
        new += [row for row in part if folder.paths[row] not in trained]
        looked += len(part)
    known = looked - len(new)
    least = _FEWEST if options.all_images or model.net.is_dense else least_images(shares=False)
    if not known or len(new) >= least:
        return new[: options.count], "".join(describe_trained(known, looked)), False
    note = "".join(describe_trained(known, known))
    if new:
        note = (
            f"{known} of {looked} photos were trained on, or are copies of such, and the other {len(new)} are too few: "
            "all are measured, so that no number is a test score"
        )
    return order[: options.count], note, True


def _choose_methods(options: EvaluateOptions, model: Any) -> tuple[str, dict[str, tuple[Any, dict[str, Any]]]]:
    """Return the layer that is compared, and by name the methods with their options.

    Raises:
        ValueError: several layers are named, of which no method makes one map.
    """
    net = model.net
    usual = ["ClosedFormGradCAM", "ContributionCAM"] if net.head.enumerated is None else ["ContributionCAM", "LIFTCAM"]
    methods = {name: getattr(package, name) for name in options.method or usual}
    *finer, layer = layers = choose_layers(options, model, [*methods.values()])
    method_options = {} if net.is_dense else choose_options(options, [*methods.values()], model, layers)
    combines = [method for method in method_options if issubclass(method, package.ContributionCAM)]
    if finer and not combines:
        raise ValueError("--layer names several layers, which ContributionCAM alone makes one map of: name one")
    if finer:
        layer = find_coarsest(net, layers)
        for method in combines:
            method_options[method] = {"target_layers": layers, **method_options[method]}
        if len(combines) < len(methods):
            print(f"maps of methods other than ContributionCAM are of {layer} alone")
    return layer, {name: (method, method_options.get(method, {})) for name, method in methods.items()}


def _tell_verdicts(file: Path, ways: Mapping[str, str]) -> None:
    """Say a report's verdicts, and which commands draw maps that may be used."""
    from pytorch_grad_cam_pcasvm.studio import evaluation
    from pytorch_grad_cam_pcasvm.studio.evaluation.positions import describe_localisation

    written = json.loads(file.read_text(encoding="utf-8"))
    print(*(verdict["sentence"] for verdict in written["verdicts"]), sep="\n")
    localised = written["results"].get("localisation", {})
    if "rows" in localised:
        result = evaluation.Result.from_dict(localised)
        print(*describe_localisation(result), *[result] * (not written["verdicts"]), sep="\n")
    usable = [verdict["method"] for verdict in written["verdicts"] if verdict["verdict"] == "use"]
    print(*(f"maps of {name}: {ways[name]}" for name in usable), sep="\n", end="\n" * bool(usable))


def _to_explain(options: EvaluateOptions, method: str, layers: Any) -> str:
    """Return the command that draws the maps that were evaluated."""
    return write_line(options, "explain", layer=[*layers], method=method, out="maps")


def _masks(options: Any, preparation: Any, folder: Any, rows: Sequence[int], normal: Any) -> list[Any]:
    """Return where masks of some images are inside, as the network sees them, boolean, (H, W); None: not known."""
    images, resize = Images(folder, thumbnails=0), resize_of_masks(preparation)
    names = [images.id(row) for row in range(len(images))]
    normal = normal if options.normal is None and normal in (images.names or ()) else options.normal
    masks = MaskFolder(
        options.masks,
        names,
        folder.paths,
        exif=preparation.exif,
        only_inside=True,
        normal=normal,
        page=preparation.page,
    )
    print(masks.describe())
    with naming_all_bad(options, folder):
        size = tuple(image_and_label(folder[rows[0]])[0].shape[1:])
    unknown = {*masks.unknown}
    return [None if row in unknown else masks.find_inside(row, size, resize) for row in rows]


def _tell_accuracy(study: Any, *, trained: bool) -> None:
    """Say how many images of a study are classified correctly, if their folders are named as the head's classes.

    Args:
        study: reads the images.
        trained: whether some were trained on.
    """
    names, classes = study.source.names, study.net.head.classes_
    if names is None or classes is None or not set(names) & set(classes.tolist()):
        return
    labels, correct = list[Any](), list[bool]()
    for images, numbers, _ in study.batches("accuracy"):
        true_labels = [names[number] for number in numbers]
        labels += true_labels
        correct += [label == guess for label, guess in zip(true_labels, study.predicted(images), strict=True)]
    print(f"{len(labels)} images: {accuracy(labels, correct)}{': training accuracy, not a test score' * trained}")


def _tell_sureness(study: Any, layer: str, methods: Mapping[str, tuple[Any, dict[str, Any]]]) -> None:
    """Say, also in the report, how much of the contributions is sure, if the head has resampled heads."""
    from pytorch_grad_cam_pcasvm.studio.evaluation.sureness import describe_sureness

    head = study.net.head
    if head.resamples is None or head.decision_position is None or "ContributionCAM" not in methods:
        return
    method, of_method = methods["ContributionCAM"]
    cam = method(study.net, **{"target_layers": [layer]} | of_method)
    batches = islice((images for images, _, _ in study.batches("sure")), -(-_SURE_OF // study.batch_size))
    words = describe_sureness(cam, batches, anomaly_target(head) or default_decision(head))
    print(words)
    study.note += f"{study.note and '; '}{words}"


def explore(options: ExploreOptions) -> None:
    """Write the page of an atlas."""
    from pytorch_grad_cam_pcasvm.studio.atlas.shards import require_parquet

    require_parquet()
    heads = {}
    for argument in options.head:
        name, _, path = argument.partition("=")
        if not path:
            raise ValueError(f"--head takes NAME=FILE, got {argument!r}")
        heads[name] = read_head(Path(path), options.trust)
    from pytorch_grad_cam_pcasvm.studio import atlas

    page = atlas.load(options.atlas, options.trust).to_html(
        options.out, heads=heads or None, single_file=options.single_file
    )
    print(f"open {page.resolve().as_uri()}")


_TRIED = 4  # images
_OTHER = (
    "the backbone's transform does more than resize pictures, crop and normalise (an image processor may resize "
    "tensors, which rounds otherwise): use export.onnx from Python"
)


def export(options: Any) -> None:
    """Write an explanation as one file, and a page around it."""
    from pytorch_grad_cam_pcasvm.studio import export
    from pytorch_grad_cam_pcasvm.studio.export.files import MARK, runtime_files

    if options.page:
        runtime_files(options.runtime)  # before anything takes long
        check_folder(options.page, "page.css", MARK, "page")
    model = open_model(options)
    net, preparation = model.net, model.preparation
    if preparation.varies:
        raise ValueError(
            f"{options.model} was fitted with --tile, so that photos of different size have images of different size, "
            "and a file takes one: fit with --tiles, such as --tiles 3x2"
        )
    if options.errors and net.head.resamples is None:
        raise ValueError(
            f"--errors, but {options.model} has no refits that tell them: fit again without --resample 0, on 8 photos "
            "a class or more, or leave out --errors"
        )
    if net.head.enumerated is not None:
        name = net.head.enumerated.predictor.name
        raise ValueError(f"{name} runs outside of PyTorch, and is in no such file: draw its maps with '{RUN} explain'")
    transform, steps = preparation.transform, preparation.steps or read_steps(preparation.transform)
    if steps is None:
        raise ValueError(_OTHER)
    cam = make_cam(options, model)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8))
    with warnings.catch_warnings():
        if options.images is None:
            warnings.simplefilter("ignore", package.OutsideTrainingWarning)
            x = torch.stack([transform(picture.rotate(90 * turn)) for turn in range(_TRIED)])
        else:
            x = Images(preparation.folder(options.images), thumbnails=0).first(_TRIED)
        metadata = export.onnx(
            cam, x, options.out, choose_targets(options, net), **steps, **preparation.reading,
            errors=options.errors, progress=True,
        )  # fmt: skip
    explainer = export.Explainer(options.out)
    if not all(np.allclose(explainer.prepared(one), transform(one), atol=1e-4) for one in make_trials(steps)):
        options.out.unlink()
        raise ValueError(_OTHER)
    print(f"wrote {options.out}: maps of {_list_titles(metadata['titles'])}")
    if net.head.resamples is not None and not options.errors:
        print("its maps do not say how sure they are: --errors, which takes four to six times as long")
    print(f"differs from PyTorch by at most {max(metadata['differences'].values()):.0e} of the largest value")
    if options.page:
        print(f"open {export.page(options.out, options.page, options.runtime).resolve().as_uri()}")


def _list_titles(titles: list[str]) -> str:
    """Return the titles of maps as a list in words, components as one."""
    decision_titles = [title for title in titles if not title.startswith("component ")]
    count = len(titles) - len(decision_titles)
    components = [titles[0] if count == 1 else f"{count} components"] if count else []
    return ", ".join([*components, *decision_titles])
