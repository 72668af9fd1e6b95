"""Teaching: the patches that show the faults of photos in class folders, for a head of patches to learn from.

The folder of a photo says that there is a fault, and not where. Two things say where: the contributions to the decision
of a head on pooled features, which knows how faulty photos differ, and how far a patch is from those of good photos.
Their sum, each standardised, is the suspicion of a patch; the few most suspicious ones of a photo are its faults.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.methods import ContributionCAM
from pytorch_grad_cam_pcasvm.methods.many_heads import explain_heads
from pytorch_grad_cam_pcasvm.network.extraction import check_loader
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, compute_features
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.network.inputs import image_and_label
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_network
from pytorch_grad_cam_pcasvm.runtime.errors import NoBoundaryError
from pytorch_grad_cam_pcasvm.studio.model.model import Model
from pytorch_grad_cam_pcasvm.targets import SVMTarget

COUNT = 3  # patches of a photo that are its faults
GOOD = 10_000  # patches of good photos to learn from, and to measure distances to
_COMPONENTS = 64  # in which distances are measured
_SAMPLE = 20_000  # patches, which these components are fitted on
_BYTES = 1 << 28  # of a block of distances
_USUAL = 0.95  # of good photos, whose most suspicious patch is no more than that

Read = Callable[[], Iterable[tuple[Tensor, Sequence[int]]]]  # yields dense features (n, D, *grid), and photos' numbers


@dataclass(frozen=True)
class Suspicion:
    """What is suspicious in photos.

    Attributes:
        photos: their numbers, (F,).
        contributions: of each patch to the decision for the class of the photo, (F, P).
        distances: of each patch to the nearest one of good photos, (F, P).
    """

    photos: np.ndarray
    contributions: np.ndarray
    distances: np.ndarray

    def rank(self, like: "Suspicion | None" = None) -> np.ndarray:
        """Return the suspicion of each patch, (F, P): the sum of both, each standardised.

        Args:
            like: what they are standardised by; None: by themselves.
        """
        scale = self if like is None else like
        return _standardise(self.contributions, scale.contributions) + _standardise(self.distances, scale.distances)

    def pick(self, count: int) -> np.ndarray:
        """Return the positions of the most suspicious patches of each photo, the first one first, (F, count)."""
        return np.argsort(-self.rank(), 1, kind="stable")[:, :count]

    def list_doubtful(self, good: "Suspicion") -> np.ndarray:
        """Return the numbers of photos whose most suspicious patch is no more so than a good photo's."""
        usual = np.quantile(good.rank(self).max(1), _USUAL)
        return self.photos[self.rank().max(1) <= usual]


def _standardise(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    result: np.ndarray = (values - like.mean()) / max(float(like.std()), np.finfo(np.float64).tiny)
    return result


def choose_patches(
    model: Any,
    loader: Iterable[Any],
    layer: str | nn.Module | Sequence[str | nn.Module] | None,
    *,
    pool: Any = "dense",
    backbone: nn.Module | None = None,
    normal: Any = None,
    layers: Sequence[Any] | None = None,
    count: int = COUNT,
    good: int = GOOD,
    seed: int = 0,
    progress: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return patches of faulty photos that show the fault, and patches of good photos, to fit a head of patches on.

    No masks are needed: a model of pooled features, such as ``fit_model(backbone, loader, SVC(), layer="layer4",
    pool="mean")``, knows how faulty photos differ. Of each faulty photo those patches are taken that have the largest
    sum of two numbers, each standardised: the contribution to the model's decision, and the distance to the nearest
    patch of a good photo, among 64 components. It is assumed that what distinguishes faulty photos is the fault: where
    they have another background, or were taken by another camera, that is what is learned. So look at the patches. A
    model that tells photos badly points elsewhere: take one whose AUROC of photos left out is 0.8 or more.

    Args:
        model: of photos: a :class:`Model`, or a :class:`.PCASVMNet`.
        loader: yields ``(images, labels)``, the photos that the model was fitted on; all features are held in memory.
        layer: where the features of patches come from, as for :func:`.extract_features`; fine ones find small faults.
        pool: ``"dense"``, or ``("dense", 3)`` for means over 3x3 neighbours.
        backbone: the network that features of patches come from, such as a dense :class:`.TiledNet`; None: the model's.
        normal: the class of good photos; None: the model's.
        layers: the layers of contributions; None: those of ``layer`` that the model has means of, or else its own.
        count: patches of each faulty photo.
        good: patches of all good photos, equally many of each.
        seed: random seed of these.
        progress: show a progress bar.

    Returns:
        Rows of features, (R, D), labels, (R,), and places, (R, 3): image, row, column; the faults first.

    Raises:
        ValueError: there is no normal class, there are only good photos, or none; or the features are not dense.

    Example:
        >>> model = fit_model(backbone, loader, SVC(), layer="layer2", pool="mean", normal="cat", progress=False)
        >>> rows, labels, places = choose_patches(model, loader, "layer2", count=2, good=40, progress=False)
        >>> rows.shape, places.shape
        ((56, 8), (56, 3))
    """
    net = model.net if isinstance(model, Model) else model
    normal = net.head.normal if normal is None else normal
    _check_normal(net, normal)
    check_loader(loader)
    dense_net = net.backbone if backbone is None else find_network(backbone)
    source = FeatureSource.of(dense_net, layer, pool)
    if not source.dense:
        raise ValueError(f"patches are rows of positions: pool='dense' is expected, or ('dense', 3), got {pool!r}")
    layers = _choose_layers(net, model, source) if layers is None else layers
    tokens: Any = {"reshape_transform": "tokens"} if isinstance(model, Model) and model.tokens else {}
    features, labels, maps = list[Tensor](), list[Any](), dict[int, Tensor]()
    with ContributionCAM(net, layers, **tokens) as cam:
        for batch in tqdm(loader, desc="patches", unit="batch", disable=not progress):
            x, names = image_and_label(batch)
            if names is None:
                raise ValueError("the loader yields no labels: let it yield (images, labels)")
            x = x.to(find_device(net.backbone))
            own = np.asarray(names.cpu() if isinstance(names, Tensor) else names).reshape(-1).tolist()
            with evaluation_mode(dense_net), torch.no_grad():
                features.append(compute_features(dense_net, source.at(dense_net, x), x).cpu())
            faulty = [n for n, name in enumerate(own) if name != normal]
            (explained,) = explain_faults(
                cam, [net.head], x[faulty], [own[n] for n in faulty], normal, features[-1].shape[2:]
            )
            maps |= {len(labels) + n: one for n, one in zip(faulty, explained, strict=True)}
            labels += own
    dense, names = torch.cat(features), np.array(labels)
    faults, rest = np.array(sorted(maps)), (names == normal).nonzero()[0]
    if not len(faults) or not len(rest):
        raise ValueError(
            f"photos with a fault and good ones, of the class {normal!r}, are needed, but the labels are "
            f"{sorted(set(labels), key=str)}"
        )

    def read() -> Iterator[tuple[Tensor, Sequence[int]]]:
        yield dense, range(len(dense))

    distances = measure_distances(reduce_patches(read, len(dense), seed), faults, rest, np.zeros(len(dense), int), seed)
    suspicion = Suspicion(faults, torch.stack([maps[n] for n in faults.tolist()]).flatten(1).numpy(), distances[..., 0])
    places = np.concatenate([
        np.stack([np.repeat(faults, count), suspicion.pick(count).ravel()], 1),
        draw_places(rest, dense[0, 0].numel(), good, seed),
    ])  # fmt: skip
    rows = dense.flatten(2)[places[:, 0], :, places[:, 1]].numpy()
    grid = np.stack(np.unravel_index(places[:, 1], tuple(dense.shape[2:])), 1)
    return rows, names[places[:, 0]], np.concatenate([places[:, :1], grid], 1)


def _check_normal(net: Any, normal: Any) -> None:
    classes = [] if net.head.classes_ is None else net.head.classes_.tolist()
    if normal is None or normal not in classes:
        raise ValueError(
            f"normal={normal!r} is no class of the model, which has {classes}: name that of good photos, normal="
        )


def _choose_layers(net: Any, model: Any, source: FeatureSource) -> list[str]:
    """Return the layers of contributions: the patches' own, or the layers of the model's maps."""
    means = net.head.training_set.means
    layers = [part.layer for part in source.parts or (source,) if part.layer and part.layer in means]
    if not layers and isinstance(model, Model):
        layers = [name for name in model.layers if name in means]
    if not layers:
        raise ValueError(
            "the model has no means of the training images at these layers: make it with fit_model, or name the layers "
            "of contributions, layers="
        )
    return layers


def explain_faults(
    cam: ContributionCAM,
    heads: Sequence[Any],
    images: Tensor,
    labels: Sequence[Any],
    normal: Any,
    grid: Sequence[int],
) -> Tensor:
    """Return the contributions to the decision for the class of each photo, against the normal one, (L, n, *grid).

    Args:
        cam: a method; where its head is undecided nowhere near the training mean, it starts at this mean.
        heads: of L models of photos, which share the network, and start where the method's head does.
        images: faulty ones, shape (n, ...).
        labels: the class of each.
        normal: the class of good photos.
        grid: the shape of the positions of the patches.
    """
    maps = torch.zeros(len(heads), len(images), *grid)
    for label in dict.fromkeys(labels):
        own, targets = torch.tensor([name == label for name in labels]), [SVMTarget(label, versus=normal)]
        try:
            explained = explain_heads(cam, images[own], heads, targets)
        except NoBoundaryError:
            cam.baseline = "mean"
            explained = explain_heads(cam, images[own], heads, targets)
        for of_head, found in zip(maps, explained, strict=True):
            of_head[own] = upsample_maps(found.maps.float().cpu(), tuple(grid))[:, 0]
    return maps


def reduce_patches(read: Read, count: int, seed: int = 0) -> Tensor:
    """Return the first 64 components of all patches, (N, P, B), float32, in which distances are measured.

    Scaler and PCA are fitted on a part of the patches, equally many of each photo, without labels.

    Args:
        read: yields the features of all photos.
        count: N, the number of photos.
        seed: random seed of the part.
    """
    random, parts = np.random.default_rng(seed), list[Tensor]()
    for features, _ in read():
        rows = features.flatten(2)
        for photo in rows:
            part = random.permutation(photo.shape[1])[: max(1, _SAMPLE // count)]
            parts.append(photo[:, part].T)
    sample = torch.cat(parts).double().numpy()
    components = min(_COMPONENTS, *sample.shape)
    reduction = make_pipeline(StandardScaler(), PCA(components, random_state=0)).fit(sample)
    scaler, pca = (step for _, step in reduction.steps)
    axes = torch.from_numpy((pca.components_ / scaler.scale_).T).float()
    shift = torch.from_numpy(reduction.transform(np.zeros((1, sample.shape[1])))).float()
    reduced = torch.zeros(count, 0)
    for features, photos in read():
        rows = features.flatten(2).mT.float() @ axes + shift
        if not reduced.numel():
            reduced = torch.zeros(count, *rows.shape[1:])
        reduced[list(photos)] = rows
    return reduced


def measure_distances(
    reduced: Tensor,
    photos: np.ndarray,
    good: np.ndarray,
    parts: np.ndarray,
    seed: int = 0,
    objects: np.ndarray | None = None,
) -> np.ndarray:
    """Return the distance of each patch to the nearest one of good photos of other objects, in each part of these.

    So the distances to the photos of a fold are the smallest of all parts but one, and need not be measured again.

    Args:
        reduced: the patches of all photos, (N, P, B).
        photos: the numbers of the photos whose patches are measured, (F,).
        good: the numbers of the good photos.
        parts: the number of the part of each photo, from 0 on, (N,).
        seed: random seed of the patches of good photos that are compared, equally many of each.
        objects: the number of the object of each photo, (N,); None: they all differ.

    Returns:
        Shape (F, P, number of parts), float32; infinity: there is no such photo in this part.
    """
    objects = np.arange(len(reduced)) if objects is None else objects
    places = draw_places(good, reduced.shape[1], GOOD, seed)
    places = places[np.argsort(parts[places[:, 0]], kind="stable")]
    bank = reduced[places[:, 0], places[:, 1]]
    own, part = torch.from_numpy(objects[places[:, 0]]), parts[places[:, 0]]
    bounds = {number: np.flatnonzero(part == number)[[0, -1]] + [0, 1] for number in np.unique(part).tolist()}
    distances = torch.full((len(photos), reduced.shape[1], int(parts.max()) + 1), torch.inf)
    norms, positions = bank.square().sum(1), reduced.shape[1]
    block = max(1, _BYTES // (4 * positions * len(bank)))
    for start in range(0, len(photos), block):
        some = photos[start : start + block]
        x = reduced[some].flatten(0, 1)
        squares = torch.addmm(norms, x, bank.T, alpha=-2) + x.square().sum(1, keepdim=True)
        same = torch.from_numpy(objects[some]).repeat_interleave(positions)[:, None] == own
        squares = squares.clamp_(min=0).masked_fill_(same, torch.inf)
        for number, (first, last) in bounds.items():
            nearest = squares[:, first:last].amin(1).sqrt()
            distances[start : start + block, :, number] = nearest.unflatten(0, (len(some), positions))
    return distances.numpy()


def draw_places(photos: np.ndarray, positions: int, count: int, seed: int = 0) -> np.ndarray:
    """Return about so many patches, drawn at random, equally many of each photo: (R, 2), photo and position."""
    random, per_photo = np.random.default_rng(seed), max(1, min(positions, count // len(photos)))
    return np.concatenate([
        np.stack([np.full(per_photo, photo), np.sort(random.permutation(positions)[:per_photo])], 1) for photo in photos
    ])  # fmt: skip


def gather_rows(read: Read, places: np.ndarray) -> np.ndarray:
    """Return the features of patches, (R, D), in the order of their places.

    Args:
        read: yields the features of photos, of each of those that the patches are in.
        places: photo and position of each, (R, 2).
    """
    order, parts = [], []
    for features, photos in read():
        for photo, own in zip(photos, features.flatten(2), strict=True):
            wanted = np.flatnonzero(places[:, 0] == int(photo))
            order.append(wanted)
            parts.append(own[:, places[wanted, 1]].T.cpu().numpy())
    numbers = np.concatenate(order)
    assert len(numbers) == len(places)
    return np.concatenate(parts)[np.argsort(numbers)]
