"""Signed maps: weights times activations, their signs, their shared scale, and their upsampling."""

import json
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, field, replace
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import storage
from pytorch_grad_cam_pcasvm.maps.results import MethodResult, check_finite, divided, per_map, warn_of_blanks
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.runtime.columns import OptionalPlain, OptionalScaled, Scaled, join_rows, list_columns
from pytorch_grad_cam_pcasvm.runtime.device import can_sync
from pytorch_grad_cam_pcasvm.runtime.pictures import as_pictures, overlaid
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from pytorch_grad_cam_pcasvm.targets import PCATarget, decoded, encoded

SCALES = ("map", "target", "none")
FORMATS = tuple(f"pytorch_grad_cam_pcasvm maps {version}" for version in (1, 2, 3))


class Share(NamedTuple):
    """Which part of the evidence on each map lies inside of a region, from 0 to 1; NaN where there is none.

    Attributes:
        positive: of what raises the target, shape (N, K).
        negative: of what lowers it, (N, K).
        total: of both, (N, K).
        error: one standard error of ``total``, by resampled heads, (N, K); None without them, of maps from files,
            and of methods with ``opposite``.

    Example:
        >>> maps.share(torch.ones(32, 32)).total[0, 0]
        tensor(1.)
    """

    positive: Tensor
    negative: Tensor
    total: Tensor
    error: Tensor | None


def _measure_share(evidence: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted share of evidence of one sign, over the last two dimensions."""
    return (evidence * weights).sum((-2, -1)) / evidence.sum((-2, -1))


@dataclass(repr=False, eq=False, init=False)
class SignedMaps(MethodResult):
    """The signed maps of K targets for each of N images, with their weights, values and the network's output.

    For Grad-CAM, ``maps[n, k] = sum_t weights[n, k, t] F^t`` (P_b = e_b^T F in the paper); for the other methods, see
    their classes in :mod:`~pytorch_grad_cam_pcasvm.methods`. Maps and weights are divided by ``exp(log_scale)``, which
    differs from 1 only if the gradient is too small for a float, for example far from every support vector of an RBF
    SVM.

    ``len(maps)`` is N. ``maps[images]`` and ``maps[images, targets]`` select images and targets by integers, slices,
    lists or masks. Dimensions are kept, so ``maps[0]`` has N = 1. Slices share memory with ``maps``.

    Attributes:
        maps: raw signed maps at the target layer's resolution, shape (N, K, H, W) or (N, K, D, H, W).
        weights: channel weights, shape (N, K, T): gradients summed over positions (e_b, Eq. 11; s, Eq. 16), or the
            method's own weights; for a method with separate weights for every position, their sums over positions;
            (N, K, 0) if channels have no weights.
        values: the targets' values, shape (N, K).
        nu: the largest value of each map over both signs (nu_b in the paper), shape (N, K).
        log_scale: natural logarithm of the factor taken out of maps, weights and nu, shape (N, K); usually 0.
        targets: the K targets.
        output: the network's output from the same forward pass: a :class:`HeadOutput`, or whatever the network returns.
        opposite: maps of the negated targets, shape (N, K, H, W), for methods in which these are not ``-maps``; else
            None.
        baseline_values: for maps that add up, the targets' values at the baseline, shape (N, K):
            ``(maps.sum((2, 3)) + remainder) * exp(log_scale) + baseline_values == values``; else None.
        remainder: for maps that add up, the contribution of activations that are not on the map (class tokens,
            registers, other branches), shape (N, K); else None.
        standard_errors: for maps that are means over samples, shape (N, K, H, W); else None.
        heads: with ``explain(heads=True)``, a map for each head of the first attention layer after the target layer,
            shape (N, K, heads, H, W); they add up to ``maps``. Else None.
        linear: whether maps of decisions are sums of component maps (see :func:`recombined`).
        neutral: whether :func:`recombined` can also start each decision where its value is 0. This needs features that
            are means over positions: changing the baseline then subtracts the same amount at every position.
        layers: dotted names of the target layers.
        effects: for decisions of a head without a gradient, the sum over components of the sizes of their Shapley
            values, shape (N, K), 0 for other targets; else None. See :attr:`cancellation`.
        error: if the head has resampled heads, one standard error of the maps, shape (N, K, H, W): the standard
            deviation of the maps of heads that were fitted on bootstrap samples of the photos. NaN for components that
            are not stable; None without resampled heads. See :meth:`sure`.
        values_error: one standard error of the values, shape (N, K); else None.
        resampled: the mean of the maps of the resampled heads, shape (N, K, H, W), which is nearer to the truth than
            the map of one head; else None.

    Example:
        >>> maps = cam.explain(images)
        >>> maps[0, :3].maps.shape  # of the first image and the three components
        torch.Size([1, 3, 8, 8])
    """

    nu: Scaled = field(kw_only=True)
    targets: Sequence[Any] = field(kw_only=True)
    output: Any = field(kw_only=True)
    linear: bool = False
    neutral: bool = False
    layers: Sequence[str] = ()
    _warnings: Any = None  # of what made them, where no number may be looked at yet
    _between: Sequence[str] = ()  # for maps from a file or from `recombined`, whose output has no head
    _width: int | None = None  # likewise
    _stability: OptionalPlain = None  # (N, K), the same for all images; NaN of what is no component
    _resamples: int = 0
    _refits: OptionalScaled = None  # the maps of the resampled heads, (N, K, R, H, W)

    def __init__(
        self,
        maps: Tensor,
        weights: Tensor,
        values: Tensor,
        nu: Tensor,
        log_scale: Tensor,
        targets: Sequence[Any],
        output: Any,
        opposite: Tensor | None = None,
        baseline_values: Tensor | None = None,
        remainder: Tensor | None = None,
        standard_errors: Tensor | None = None,
        heads: Tensor | None = None,
        linear: bool = False,
        neutral: bool = False,
        layers: Sequence[str] = (),
        effects: Tensor | None = None,
        error: Tensor | None = None,
        values_error: Tensor | None = None,
        resampled: Tensor | None = None,
        _warnings: Any = None,
        _between: Sequence[str] = (),
        _width: int | None = None,
        _stability: Tensor | None = None,
        _resamples: int = 0,
        _refits: Tensor | None = None,
    ) -> None:
        vars(self).update({name: value for name, value in locals().items() if name != "self"})

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __repr__(self) -> str:
        dtype = str(self.maps.dtype).removeprefix("torch.")
        shape = tuple(self.maps.shape)
        where = f" at {' + '.join(self.layers)}" if len(self.layers) > 1 else ""
        return f"SignedMaps({shape} {dtype} on {self.maps.device}{where}, {_shorten_targets(self.targets)})"

    def __len__(self) -> int:
        return len(self.maps)

    def __getitem__(self, index: Any) -> "SignedMaps":
        if isinstance(index, tuple) and len(index) != 2:
            raise IndexError(f"maps are chosen by maps[images] or maps[images, targets], got {len(index)} indices")
        images, chosen = index if isinstance(index, tuple) else (index, slice(None))
        n = _as_positions(images, len(self), "images")
        k = _as_positions(chosen, len(self.targets), "targets")
        targets = self.targets[k] if isinstance(k, slice) else [self.targets[position] for position in k]
        output = _take_rows(self.output, n, len(self))
        return self.map_columns(lambda tensor: tensor[n][:, k], targets=targets, output=output)

    @staticmethod
    def cat(parts: Sequence["SignedMaps"]) -> "SignedMaps":
        """Return the maps of several batches as one; they must have the same targets, resolution and device.

        The output is a HeadOutput if all parts come from the same head, else plain scores.

        Raises:
            TypeError: a part is not a SignedMaps.
            ValueError: there are no parts, or their targets, shapes or devices differ.

        Example:
            >>> SignedMaps.cat([cam.explain(batch) for batch in images.split(1)]).maps.shape
            torch.Size([2, 4, 8, 8])
        """
        parts = list(parts)
        if not parts:
            raise ValueError("there are no maps to join: give at least one SignedMaps")
        first = parts[0]
        for part in parts:
            if not isinstance(part, SignedMaps):
                raise TypeError(f"SignedMaps.cat joins SignedMaps, got {type(part).__name__}")
            if list(part.targets) != list(first.targets):
                raise ValueError(
                    f"maps of different targets cannot be joined, {first.targets} and {part.targets}: give every "
                    "call of explain the same list of targets"
                )
            if part.columns.keys() != first.columns.keys() or part._traits != first._traits:
                raise ValueError("maps of different methods cannot be joined: make them all with one method")
            _check_shapes("maps", first.maps, part.maps)
            _check_shapes("weights", first.weights, part.weights)
            if part.maps.device != first.maps.device:
                raise ValueError(f"maps on {first.maps.device} and {part.maps.device}: move them, as with .cpu()")
        return join_rows(parts, output=_joined([part.output for part in parts]))

    def to(self, where: torch.device | torch.dtype | str | int) -> "SignedMaps":
        """Return the maps on another device or in another precision, without needless copies.

        A device applies to everything, including the output. A floating-point dtype applies to maps, remainders,
        standard errors, weights and nu; the values, ``log_scale`` and the output keep the precision of the head.

        Raises:
            ValueError: the dtype is not a floating-point dtype.
        """
        if isinstance(where, torch.dtype):
            if not where.is_floating_point:
                raise ValueError(f"maps hold signed fractions, which {where} cannot represent: use a floating dtype")
            scaled: Any = {name: tensor.to(where) for name, tensor in self.scaled_columns.items()}
            return replace(self, **scaled)

        def move(tensor: Any) -> Any:
            return tensor.moved(where) if isinstance(tensor, HeadOutput) else tensor.to(where)

        return self.map_columns(move, output=tree_map_only(Tensor, move, self.output))

    def cpu(self) -> "SignedMaps":
        """Return the maps on the CPU."""
        return self.to("cpu")

    def save(self, path: str | PathLike[str]) -> None:
        """Save the maps to a safetensors file, without pickle; :meth:`load` reads it.

        The file stores the tensors by name, and the targets in its header. The output is stored as ``output.scores``
        and, if present, ``output.components``, ``output.margins`` and ``output.features`` (for a network that returns
        several tensors, ``output.0``, ``output.1``, ...). The head is not included. For a target from outside this
        package, only its name is stored.

        Raises:
            TypeError: a target's label is not a string, number or boolean.
            FileNotFoundError: the folder does not exist.

        Example:
            >>> maps.save("maps.safetensors")
            >>> SignedMaps.load("maps.safetensors").maps.equal(maps.maps)
            True
        """
        kept = {name: tensor for name, tensor in self.columns.items() if name != "_refits"}
        tensors = kept | _name_tensors(self.output)
        storage.write(
            path,
            tensors,
            {
                "format": FORMATS[-1],
                "targets": json.dumps([encoded(t) for t in self.targets]),
                "linear": json.dumps(self.linear),
                "neutral": json.dumps(self.neutral),
                "layers": json.dumps(list(self.layers)),
                "between": json.dumps(list(self.between)),
                "width": json.dumps(self.width),
                "resamples": json.dumps(self._resamples),
            },
        )

    @staticmethod
    def load(path: str | PathLike[str]) -> "SignedMaps":
        """Return the maps from a file written by :meth:`save`, on the CPU and bit for bit the same.

        ``output`` is a plain tensor of the scores, because the head is not in the file (for a network that returns
        several tensors, a list). A target from outside this package becomes a string, its name.

        Raises:
            ValueError: the file is truncated, was modified, does not contain maps, or comes from a later version.
            FileNotFoundError: the file does not exist.
        """
        metadata, tensors = storage.read(path, "maps.save(path)", FORMATS)
        try:
            targets = [decoded(target) for target in json.loads(metadata["targets"])]
            numbered = [tensors[f"output.{i}"] for i in range(len(tensors)) if f"output.{i}" in tensors]
            output = tensors.get("output.scores", numbered)
            columns: Any = {name: tensors[name] for name in list_columns(SignedMaps) if name in tensors}
            flags: Any = {name: json.loads(metadata.get(name, "false")) for name in ("linear", "neutral")}
            layers, between = (tuple(json.loads(metadata.get(name, "[]"))) for name in ("layers", "between"))
            features = tensors.get("output.features")  # which tell it in files of earlier versions
            flags["_resamples"] = json.loads(metadata.get("resamples", "0"))
            flags["_width"] = json.loads(metadata.get("width", "null")) or (
                None if features is None else features.shape[1]
            )
            return SignedMaps(**columns, targets=targets, output=output, layers=layers, _between=between, **flags)
        except Exception as error:  # whatever a damaged file without a checksum leads to
            raise ValueError(f"{path} is damaged, or no valid file of maps: {error}; write it again") from error

    @property
    def between(self) -> Sequence[str]:
        """Names of the steps between components and classifier in the head that made the maps, as of a second scaler.

        Example:
            >>> maps.between
            ()
        """
        known = self._between or self._width is not None or not isinstance(self.output, HeadOutput)
        return self._between if known else self.output.head.between

    @property
    def width(self) -> int | None:
        """The number of features that the components were made of; None: not known.

        Example:
            >>> maps.width
            8
        """
        if self._width is not None or not isinstance(self.output, HeadOutput):
            return self._width
        features = self.output.features
        return self.output.head.n_features if features is None else features.shape[1]

    @property
    def _traits(self) -> tuple[Any, ...]:
        return self.linear, self.neutral, tuple(self.layers)

    @property
    def sums(self) -> Tensor:
        """The sum of each map and its remainder, float64, (N, K): of maps that add up, the value minus the start's.

        Example:
            >>> maps = ContributionCAM(net, ["layer2"]).explain(images)
            >>> torch.allclose(maps.sums + maps.baseline_values, maps.values, atol=1e-4)
            True
        """
        sums = self.maps.flatten(2).sum(-1, dtype=torch.float64)
        return (sums if self.remainder is None else sums + self.remainder) * self.log_scale.double().exp()

    @property
    def cancellation(self) -> Tensor | None:
        """How much of the component maps cancels in a decision, shape (N, K), for a head without a gradient; else None.

        It is the sum of ``abs(maps)`` divided by that of the components' effects: at most about 1 where all components
        look at the same places in the same way, and large where strong colours of opposite signs lie beside each other
        and hardly change the decision.

        Example:
            >>> maps.cancellation is None  # the decision of an SVM has a gradient
            True
        """
        if self.effects is None:
            return None
        size = self.maps.flatten(2).abs().sum(-1).to(self.effects) * self.log_scale.exp()
        return torch.where(self.effects > 0, size / self.effects, 0.0)

    @property
    def stability(self) -> Tensor | None:
        """How stable the component of each target is, shape (K,): NaN for other targets; None without resampled heads.

        It is the mean squared cosine of its direction with those of the components that match it in the resampled
        heads. Two components of equal variance, which may turn into each other, have 0.82; a dominant one has 0.99.
        Below 0.9 a component is not stable, and a map of it is one of chance.

        Example:
            >>> maps.stability is None  # this head has no resampled heads
            True
        """
        return None if self._stability is None or not len(self) else self._stability[0]

    def sure(self, level: float = 0.95) -> Tensor:
        """Return where the sign of a map is sure, a mask of shape (N, K, H, W).

        There, 0 lies outside of the interval ``maps +- t * error``, with the quantile t of Student's distribution for
        the number of resampled heads.

        Args:
            level: the probability with which such an interval covers the map of a head that was fitted on endless
                photos, between 0 and 1.

        Raises:
            ValueError: the head has no resampled heads, or the level is not between 0 and 1.

        Example:
            >>> sure = maps.sure(0.99)  # doctest: +SKIP
        """
        if self.error is None:
            raise ValueError(
                "these maps have no errors: fit the model with resampled heads, fit_model(..., resample=30), or give "
                "the head some, net.head.resamples = resample_heads(pipeline, features, labels)"
            )
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level!r}")
        return self.maps.abs() > float(student.ppf((1 + level) / 2, self._resamples - 1)) * self.error

    def share(self, mask: Any) -> "Share":
        """Return which part of the evidence on each map lies inside of a region.

        A position that is partly inside counts in part.

        Args:
            mask: the region on the images as the network sees them: numbers from 0 (outside) to 1, or booleans, shape
                (H, W), one for all images, or (N, H, W).

        Returns:
            The shares, with their errors.

        Raises:
            ValueError: the mask has another shape, is coarser than the maps, or has other numbers; maps are of volumes.

        Example:
            >>> left = torch.zeros(32, 32)
            >>> left[:, :16] = 1
            >>> maps.share(left).total.shape
            torch.Size([2, 4])
        """
        weights = self._weigh_positions(mask)
        against = -self.maps if self.opposite is None else self.opposite
        total = self.maps.abs() if self.opposite is None else self.maps.relu() + against.relu()
        error = None
        if self._refits is not None and self.opposite is None:  # of which refits make no opposite
            spread = _measure_share(self._refits.abs(), weights.unsqueeze(2)).std(2)
            error = torch.where(self.values_error.isnan(), torch.nan, spread)  # type: ignore[union-attr]
        positive, negative, both = (_measure_share(part, weights) for part in (self.maps.relu(), against.relu(), total))
        return Share(positive, negative, both, error)

    def _weigh_positions(self, mask: Any) -> Tensor:
        """Return how much of each position is inside of a mask, (N or 1, 1, H, W)."""
        inside = torch.as_tensor(mask).to(self.maps)
        size = tuple(self.maps.shape[2:])
        if self.maps.dim() != 4 or inside.dim() not in (2, 3) or (inside.dim() == 3 and len(inside) != len(self)):
            raise ValueError(
                f"a region is a mask (H, W), or ({len(self)}, H, W) with one for each image, and maps have the "
                f"shape (N, K, H, W); got {tuple(inside.shape)} for maps {tuple(self.maps.shape)}"
            )
        if inside.shape[-2] < size[0] or inside.shape[-1] < size[1]:
            raise ValueError(
                f"the mask has {tuple(inside.shape[-2:])} pixels, and maps {size}: give the images' pixels"
            )
        if can_sync(inside) and not bool(((inside >= 0) & (inside <= 1)).all()):
            raise ValueError("a mask has numbers from 0 (outside) to 1 (inside): divide, or compare with 0")
        grid = inside.reshape(-1, 1, *inside.shape[-2:])
        return torch.nn.functional.interpolate(grid, size, mode="area")

    def positive(self, size: Sequence[int] | None = None, scale: str = "map") -> Tensor:
        """Return ``P^+ = relu(maps)``, which raises each target, shape ``(N, K, *size)``, in [0, 1] unless raw.

        P^+ and P^- share one scale.

        Args:
            size: (H, W) to upsample to (bilinear, as in pytorch-grad-cam); None: the resolution of the maps.
            scale: ``"map"``: divide by nu of each image and target; ``"target"``: divide by the largest nu of each
                target in the batch, so that images are comparable; ``"none"``: raw values.

        Raises:
            ValueError: the scale is unknown, or the size has the wrong length.

        Example:
            >>> maps.positive(size=(32, 32)).shape
            torch.Size([2, 4, 32, 32])
        """
        return self._part(1.0, size, scale)

    def negative(self, size: Sequence[int] | None = None, scale: str = "map") -> Tensor:
        """Return ``P^- = relu(-maps)``, or ``relu(opposite)``, which lowers each target; see :meth:`positive`."""
        return self._part(-1.0, size, scale)

    def overlay(self, pictures: Any, scale: str = "map") -> np.ndarray:
        """Return signed maps over grey pictures, in the figures' colours: red raises a target, blue lowers it.

        Strong colours mean large values; 0 is transparent.

        Args:
            pictures: the images as people see them, one for each explained image, shape (N, H, W, 3), (N, 3, H, W),
                (N, 1, H, W) or (N, H, W), in [0, 1] or uint8; maps are upsampled to their size (bilinear, as in
                pytorch-grad-cam).
            scale: where the colour scale ends: ``"map"``: at nu of each image and target; ``"target"``: at the largest
                nu of each target in the batch, so that images are comparable.

        Returns:
            Images for matplotlib's ``imshow`` and PIL's ``Image.fromarray``: uint8, shape (N, K, H, W, 3).

        Raises:
            ValueError: the number or shape of the pictures does not fit, their values are outside [0, 1], the maps are
                of volumes or not finite, or the scale is unknown.

        Example:
            >>> maps.overlay(images).shape
            (2, 4, 32, 32, 3)
        """
        drawn = as_pictures(pictures)
        if self.maps.dim() != 4 or len(drawn) != len(self):
            raise ValueError(
                f"{len(drawn)} pictures for maps of shape {tuple(self.maps.shape)}: give one of each image, and maps "
                "of shape (N, K, H, W); figures.plot_volume draws those of volumes"
            )
        if scale not in SCALES[:2]:
            raise ValueError(f"scale must be one of {SCALES[:2]} for colours, got {scale!r}")
        check_finite(self.maps)
        warn_of_blanks(self.maps, self.nu, lambda image, k: self.targets[k], self.output)
        signed = self.maps if self.opposite is None else self.maps.relu() - self.opposite.relu()
        values = upsample_maps(self._on_scale(signed, scale).float(), drawn.shape[1:3]).cpu().numpy()
        colours = np.empty((*values.shape, 3), np.uint8)
        for of_image, picture, maps in zip(colours, drawn, values, strict=True):
            for k, image_map in enumerate(maps):
                of_image[k] = (255 * overlaid(picture, image_map)).round()
        return colours

    def numpy(self) -> np.ndarray:
        """Return the raw signed maps, which must be finite, as an array, shape (N, K, H, W); waits for the device."""
        check_finite(self.maps)
        warn_of_blanks(self.maps, self.nu, lambda image, k: self.targets[k], self.output)
        if self._warnings is not None:
            self._warnings.of_maps(self)
        return self.maps.cpu().numpy()

    def _part(self, sign: float, size: Sequence[int] | None, scale: str) -> Tensor:
        if scale not in SCALES:
            raise ValueError(f"scale must be one of {SCALES}, got {scale!r}")
        spatial = self.maps.dim() - 2
        if size is not None and (not isinstance(size, list | tuple) or len(size) != spatial):
            raise ValueError(f"size must have {spatial} numbers for these maps, got {size}")
        negated = -self.maps if self.opposite is None else self.opposite
        part = torch.relu(self.maps if sign > 0 else negated)
        if can_sync(self.maps):
            name = "P+" if sign > 0 else "P-"
            warn_of_blanks(part, self.nu, lambda image, k: self.targets[k], self.output, f"{name} of ")
        if scale != "none":
            part = self._on_scale(part, scale)
        return part if size is None else upsample_maps(part, size)

    def _on_scale(self, maps: Tensor, scale: str) -> Tensor:
        """Return maps or their parts divided by nu of each, or by the largest of a target."""
        maps = divided(maps, self.nu)
        if scale == "map":
            return maps
        size_of_map = self.nu.log() + self.log_scale
        largest = size_of_map.amax(0, keepdim=True)
        factor = torch.where(largest.isfinite(), (size_of_map - largest).exp(), 0.0).to(maps.dtype)
        return maps * per_map(factor, maps)


def _as_positions(index: Any, count: int, noun: str) -> slice | list[int]:
    """Return an index along a dimension, an integer, a slice, integers or a mask, as one that keeps the dimension."""
    if isinstance(index, slice):
        return index
    array = index.cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    positions = array.reshape(-1).tolist()
    if array.dtype == bool and array.ndim == 1:
        if len(array) != count:
            raise IndexError(f"a mask of {len(array)} {noun} for {count}: give one value for each")
        return [position for position, chosen in enumerate(positions) if chosen]
    if positions and (array.dtype.kind not in "iu" or array.ndim > 1):
        raise TypeError(f"{noun} are chosen by an integer, a slice, a list of integers or a mask, got {index!r:.80}")
    for position in positions:
        if not -count <= position < count:
            raise IndexError(f"there are {count} {noun}, numbered from 0: {position} is out of range")
    positions = [position % count for position in positions]
    return positions if array.ndim else slice(positions[0], positions[0] + 1)


def _shorten_targets(targets: Sequence[Any]) -> str:
    """Return targets in a few words: components 0, 1, ... as their number, and the first of the others."""
    first = next((k for k, target in enumerate(targets) if target != PCATarget(k)), len(targets))
    first = 0 if first == 1 else first
    words = [f"{first} components"] * bool(first) + [str(target) for target in targets[first:]]
    if len(words) > 3:
        words[3:] = [f"{len(words) - 3} more"]
    *most, last = words or ["no targets"]
    return f"{', '.join(most)} and {last}" if most else last


def _check_shapes(name: str, first: Tensor, other: Tensor) -> None:
    if first.shape[1:] != other.shape[1:]:
        raise ValueError(
            f"{name} of shapes {tuple(first.shape[1:])} and {tuple(other.shape[1:])} per image cannot be joined: they "
            "must be of images of one size, one target layer and one network"
        )


def _take_rows(output: Any, index: slice | list[int], count: int) -> Any:
    """Return the output of some of N images: of every tensor in it that has a row for each."""
    if isinstance(output, HeadOutput):
        return output.rows(index)
    return tree_map_only(Tensor, lambda tensor: tensor[index] if tensor.shape[:1] == (count,) else tensor, output)


def _joined(outputs: list[Any]) -> Any:
    """Return the outputs of several batches as one."""
    heads = [output.head if isinstance(output, HeadOutput) else None for output in outputs]
    if heads[0] is not None and all(head is heads[0] for head in heads):
        return HeadOutput.cat(outputs)
    leaves, structures = zip(*map(tree_flatten, outputs), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise ValueError("outputs of different structure cannot be joined: they must be of one network")
    joined = []
    for group in zip(*leaves, strict=True):
        batched = all(isinstance(leaf, Tensor) and leaf.dim() for leaf in group)
        for leaf in group if batched else ():
            _check_shapes("output", group[0], leaf)
        joined.append(torch.cat(group) if batched else group[0])
    return tree_unflatten(joined, structures[0])


def _name_tensors(output: Any) -> dict[str, Tensor]:
    """Return the tensors of an output by their names in a file."""
    if not isinstance(output, Tensor):
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        return {f"output.{number}": tensor for number, tensor in enumerate(tensors)}
    extras = {name: getattr(output, name, None) for name in ("components", "margins", "features")}
    entries = {f"output.{name}": tensor for name, tensor in extras.items() if tensor is not None}
    return {"output.scores": output.as_subclass(Tensor), **entries}


@dataclass(frozen=True, repr=False, eq=False)
class Jacobians:
    """The full Jacobians of Algorithm 1, in closed form; i runs over the positions of a feature map, row by row.

    Attributes:
        components: dp_b / dx_i^t, shape (N, T, B, H W), or None without a reduction.
        margins: da_c / dx_i^t for the margin of every class (for an ordinary classifier, for its C outputs), shape
            (N, T, C, H W), or None without an SVM. Divided by ``exp(log_scale)``.
        log_scale: natural logarithm of the factor taken out of ``margins``, shape (N, C), or None; usually 0.
        activations: the feature maps F^t, shape (N, T, H, W).
        output: the network's output from the same forward pass.

    Example:
        >>> jacobians = cam.jacobians(images)
        >>> jacobians.components.shape, jacobians.margins.shape
        (torch.Size([2, 8, 3, 64]), torch.Size([2, 8, 3, 64]))
    """

    components: Tensor | None
    margins: Tensor | None
    log_scale: Tensor | None
    activations: Tensor
    output: Tensor
