"""Building an atlas: plan, refuse a plan that does not fit, compute the missing shards."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import storage
from pytorch_grad_cam_pcasvm.methods import ContributionCAM
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_layer_name
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime import digests
from pytorch_grad_cam_pcasvm.studio.atlas import disk, run
from pytorch_grad_cam_pcasvm.studio.atlas.explainer import ImageExplainer, PatchExplainer
from pytorch_grad_cam_pcasvm.studio.atlas.shards import require_parquet
from pytorch_grad_cam_pcasvm.studio.atlas.store import Atlas, load
from pytorch_grad_cam_pcasvm.studio.data.images import THUMBNAIL, Batch, Images
from pytorch_grad_cam_pcasvm.targets import SVMTarget, Target, encoded


def build(
    net: PCASVMNet,
    dataset: Any,
    target_layers: Sequence[nn.Module | str],
    out: str | Path,
    *,
    method: type[ClosedFormCAM] = ContributionCAM,
    targets: Sequence[Target] | None = None,
    patches: int = 4,
    transform: Callable[[Any], Tensor] | None = None,
    picture: Callable[[Tensor], Tensor] | None = None,
    exif: bool | None = None,
    thumbnails: bool = True,
    batch_size: int = 64,
    block: int | None = None,
    shard_size: int | None = None,
    workers: int = 0,
    engine: str = "local",
    processes: int | None = None,
    skip_bad_images: bool = False,
    verify: bool = False,
    progress: bool = True,
    **options: Any,
) -> Atlas:
    """Explain a whole data set once and save the result as an atlas.

    To resume an interrupted build, run it again with the same arguments: existing shards are not computed again. If
    several builds write into one folder, on a file system with locks, one works and the others wait, with a warning.
    The numbers do not depend on the engine, ``batch_size`` or ``shard_size``.

    Args:
        net: a :class:`PCASVMNet` whose head has a reduction. Where it acts on every position, rows are patches.
        dataset: a map-style data set of ``(image, label)`` pairs, of images, or of dicts with ``image`` and ``label``;
            a Hugging Face ``Dataset`` with an image column; or a folder of images or with one subfolder per class.
        target_layers: a list with the one layer, or its dotted name, whose activations become maps.
        out: the folder of the atlas; every machine must have access to it.
        method: a class of :mod:`~pytorch_grad_cam_pcasvm.methods`.
        targets: targets to store besides the components; None: the predicted class if the method's maps of decisions
            are not sums of component maps, otherwise none (see :meth:`Atlas.explain`).
        patches: of a head for every position, ``pool="dense"``, how many patches of each image become rows: of each
            predicted class the one with the largest margin, or the least normal one, and others at random. Maps are
            those of targets at the patch.
        transform: turns a PIL image into a tensor for the network; for a folder or a data set of PIL images.
        picture: turns a tensor for the network, (C, H, W), into a picture in [0, 1], for thumbnails; None: undo the
            transform's Normalize, or if it has none, stretch each image from its smallest to its largest value.
        exif: turn the photos of a folder as their EXIF orientation says; None: as the head says, and if it says
            nothing, not. A data set of your own does as it likes.
        thumbnails: store a picture of each image, at most 96x96 pixels (about 2 kB), for :meth:`Atlas.to_html`.
        batch_size: number of images that a process reads ahead.
        block: number of images that the network gets at once; the last block is filled up with copies. The last bits of
            the numbers depend on it. None: 16, on CUDA 64; of a head for every position one.
        shard_size: rows per shard, rounded up to a multiple of ``block``. None: a sixteenth of the images, at most
            2,048, and fewer for large maps.
        workers: number of processes that read images, for each process that explains.
        engine: ``"local"``, or ``"ray"``: a cluster, or this machine if there is none (``pip install
            'pytorch_grad_cam_pcasvm[ray]'``).
        processes: number of processes that explain: for ``"local"``, on this machine, each with its share of the
            threads or its own GPU; for ``"ray"``, actors. None: one, or as many as the cluster has GPUs, or half its
            CPUs.
        skip_bad_images: leave out images that cannot be read, and list them in the manifest.
        verify: compare every image and label with those that existing shards were made from. False: compare all labels,
            if the data set is a folder, a list, a ``TensorDataset``, an unformatted Hugging Face ``Dataset`` or a
            ``Subset`` of one; a sample of the images, with their labels (the first of each shard and up to three
            others); and images in folders whose file size has changed.
        progress: show a progress bar, with the rate and the remaining time.
        **options: options of the method, such as ``reshape_transform`` or ``baseline``.

    Returns:
        The atlas.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the folder contains another atlas, or shards made from other images or labels (the message says what
            differs), or an argument has an invalid value.
        ImportError: pyarrow is missing.
        NoClosedFormError: the path has a step without a rule.
        RuntimeError: an image cannot be read, or a process died; finished shards are kept.
        OSError: a shard cannot be written, for example because the disk is full; finished shards are kept.

    Example:
        >>> store = atlas.build(net, dataset, ["layer2"], out="atlas", progress=False)
    """
    require_parquet()
    if torch.is_autocast_enabled(find_device(net).type):
        raise ValueError("build an atlas outside autocast, which would not apply to other processes")
    numbers = {"batch_size": batch_size, "patches": patches, "shard_size": shard_size, "block": block}
    _check(net, target_layers, method, engine, numbers | {"processes": processes})
    layer = str(find_layer_name(net.feature_source()[0], target_layers[0]))
    turned = net.head.exif if exif is None else exif
    images = Images(dataset, transform, picture, thumbnails=THUMBNAIL if thumbnails else 0, exif=turned)
    # The components of several patches are many targets already.
    block = block or (1 if net.is_dense else run.BLOCK.get(find_device(net).type, run.BLOCK["cuda"]))
    first = run.read_first(images)
    with evaluation_mode(net), torch.no_grad():
        output = net(first.images.to(find_device(net)))
    if output.components is None:
        raise ValueError(
            "an atlas is made of components, but this head has none: put a PCA in front, as in "
            "make_pipeline(StandardScaler(), PCA(16), SVC()); of good photos alone, fit --classifier residual has one"
        )
    _check_targets(targets or (), patches if net.is_dense else None)
    of_rows = partial(PatchExplainer, patches) if net.is_dense else ImageExplainer
    explainer = of_rows(net, method, layer, options, targets or [], output.components.shape[1], block)
    probe = explainer(first)
    if targets is None and not explainer.linear and output.decision is not None:
        explainer = of_rows(net, method, layer, options, [SVMTarget()], output.components.shape[1], block)
        probe = explainer(first)
    shard_size = run.choose_shard_size(shard_size, probe, len(images), block)
    kinds: dict[str, str] = {}
    for name in ("label", "prediction"):
        if name in probe and probe[name][0] is not None:
            kinds[name] = run.find_kind(probe[name][0], name)
    entries = _entries(images, explainer, first, probe, kinds, shard_size)
    folder = Path(out)
    job = run.Job(
        images,
        explainer,
        folder.absolute(),
        disk.FORMAT,
        disk.digest_manifest(entries),
        shard_size,
        batch_size,
        tuple(first.images.shape[1:]),
        kinds,
        skip_bad_images,
    )
    net.head.tell_of_fit(always=True)
    making = run.BuildOptions(engine, processes, workers, verify, progress)
    with run.completed(folder, job, entries, making, explainer.cam._warnings, net.head):
        return load(folder, trusted=storage.own_types(net.head.stages))


def _check(
    net: Any,
    target_layers: Any,
    method: Any,
    engine: str,
    numbers: Mapping[str, Any],
) -> None:
    if not isinstance(net, PCASVMNet):
        raise TypeError(f"an atlas is made of a PCASVMNet, got {type(net).__name__}: use PCASVMNet(backbone, head)")
    if net.head.decision_position is not None and net.head.voting.about == "outputs":
        raise ValueError(
            "an atlas keeps one prediction for each image, but the head has several outputs: fit a head for each of "
            "them, or explain images with cam.explain"
        )
    if not (isinstance(method, type) and issubclass(method, ClosedFormCAM)):
        raise TypeError(f"method must be a class of the package, such as ContributionCAM, got {method!r:.80}")
    if not isinstance(target_layers, list | tuple) or len(target_layers) != 1:
        raise ValueError(
            f"an atlas of {method.__name__} is made at one layer: target_layers must be a list of one layer, such as "
            f"[backbone.features[-1]], got {target_layers!r:.80}"
        )
    if engine not in ("local", "ray"):
        raise ValueError(f"engine must be 'local' or 'ray', got {engine!r}")
    for name, number in numbers.items():
        if not (number is None and name not in ("batch_size", "patches")) and (
            not isinstance(number, int) or number < 1
        ):
            raise ValueError(f"{name} must be a positive integer, got {number!r}")


def _check_targets(targets: Sequence[Target], patches: int | None) -> None:
    """Refuse targets that cannot be stored, and, where rows are patches, targets with a place of their own."""
    for target in targets:
        if isinstance(encoded(target), str):
            raise TypeError(
                f"an atlas keeps maps of the package's own targets only, such as SVMTarget, got {target!r:.80}"
            )
        if patches is not None and getattr(target, "at", None) is not None:
            raise ValueError(f"an atlas chooses the patches itself, patches={patches}: leave at= out of {target!r:.80}")


def _entries(
    images: Images,
    explainer: ImageExplainer,
    first: Batch,
    probe: Mapping[str, Any],
    kinds: Mapping[str, str],
    shard_size: int,
) -> dict[str, Any]:
    """Return a build's entries of the manifest."""
    net, method = explainer.net, explainer.method
    backbone, source = net.feature_source()
    classes = net.head.classes_
    options, training_set = explainer.options, net.head.training_set
    takes = "mean" in inspect.signature(method).parameters and options.get("mean") is None
    if takes and (mean := training_set.means.get(explainer.target_layer)) is not None:
        options = options | {"mean": mean}
    return {
        "format": disk.FORMAT,
        "backbone": type(backbone).__name__,
        "weights": digests.digest_of_module(backbone),
        "head": net.head.digest(),
        "features": repr(source),
        "pool": digests.described(net.pool),
        "target_layer": explainer.target_layer,
        "method": method.__name__ if method.__module__.startswith(__name__.partition(".")[0]) else repr(method),
        "options": _options(method, options),
        "targets": [encoded(target) for target in explainer.targets[explainer.components :]],
        "linear": explainer.linear,
        "neutral": explainer.neutral,
        "adds_up": "baseline_values" in probe,
        **run.describe_images(images, first, probe, kinds, explainer.block, shard_size),
        "classes": None if classes is None else classes.tolist(),
        "thumbnails": images.thumbnails,
        "preparation": training_set.preparation,
        "first": {name: probe[name][0].tolist() for name in ("components", "scores", "nu")},
    } | ({"patches": explainer.patches} if isinstance(explainer, PatchExplainer) else {})


def _options(method: type[ClosedFormCAM], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a method, with the defaults of missing ones."""
    parameters = inspect.signature(method).parameters.items()
    defaults = {name: parameter.default for name, parameter in parameters if parameter.default is not parameter.empty}
    return {name: digests.described(option) for name, option in {**defaults, **options}.items()}
