"""The CAM methods: each returns signed maps of every component and decision from one run of the network.

F are the activations (T channels), d the gradient of a target with respect to them, sums over i run over positions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pytorch_grad_cam import (
    AblationCAM,
    GradCAM,
    GradCAMElementWise,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    ScoreCAM,
    ShapleyCAM,
    XGradCAM,
)
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.baselines import WithBaseline
from pytorch_grad_cam_pcasvm.cam import ClosedFormCAM, Explained
from pytorch_grad_cam_pcasvm.duals import DualNumbers
from pytorch_grad_cam_pcasvm.maps import signed_maps
from pytorch_grad_cam_pcasvm.players import Players, shapley_values
from pytorch_grad_cam_pcasvm.run import Run, at_one, summed
from pytorch_grad_cam_pcasvm.seeds import Rowwise, row_of, values_of
from pytorch_grad_cam_pcasvm.targets import SVMTarget


class ClosedFormGradCAM(ClosedFormCAM, GradCAM):
    """Grad-CAM, ``sum_t (sum_i d_t,i) F_t``: the maps of the paper (Eqs. 11 to 17).

    Selvaraju et al., Grad-CAM, arXiv 1610.02391.

    Args:
        model: a :class:`PCASVMNet`, or any network with a differentiable end, which gets pytorch-grad-cam's maps. For
            a compiled model, the module that was compiled is used, since maps need the modules themselves.
        target_layers: layers whose activations become maps, or their dotted names; their outputs are (N, T, H, W) or
            (N, T, D, H, W), if need be after ``reshape_transform``.
        reshape_transform: brings activations to (N, T, H, W), as in pytorch-grad-cam; ``"tokens"``: find the grid, and
            the tokens that belong to no patch (class, registers), by running the network on a few noise images; also
            for channels-last activations.
        jacobian: ``"closed_form"``: refuse a path without a closed form; ``"auto"``: use autograd for such a path
            only, with one warning; ``"autograd"``: always use autograd.
        attention: ``"frozen"``: treat the weights of attention, and of every other softmax, as constants, as in
            attention rollout and per-head decompositions: this explains how tokens move, not why; ``"exact"``: treat
            them as functions of the activations, as autograd does.
        max_bytes: bound on the temporary memory of a call besides the network's own; targets are processed in chunks
            of at least one. None: all at once.

    Raises:
        TypeError: the model is not a module, or the target layers are not a list of modules or names.
        ValueError: an unknown ``jacobian``, ``attention`` or ``reshape_transform``, no target layer, one that is not in
            the network, or a DataParallel.
    """

    _linear = True
    _of_heads_apart = True
    _of_means = True

    def _maps(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        activations, seeds = run.activations(layer), run.seeds(targets)
        weights = run.sums(seeds, layer).contiguous()  # not a view of one image's numbers for all of them
        return Explained(signed_maps(weights, activations), weights, seeds.values, seeds.log_scale.contiguous())


class ClosedFormHiResCAM(ClosedFormCAM, HiResCAM):
    """HiResCAM, ``sum_t d_t F_t`` position by position. Followed by a mean over positions, it equals Grad-CAM.

    Draelos and Carin, arXiv 2011.08891. Arguments as for :class:`ClosedFormGradCAM`.
    """

    _linear = True
    _of_heads_apart = True

    def _maps(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        activations, seeds = run.activations(layer), run.seeds(targets)
        maps = run.products(seeds, layer, activations, "channels")
        return Explained(maps, run.sums(seeds, layer), seeds.values, seeds.log_scale)

    def _terms(self, run: Run, layer: int, target: Rowwise, made: Explained) -> Tensor:
        return run.pullback(run.seeds([target]), layer)[:, 0] * run.activations(layer)


class ClosedFormXGradCAM(ClosedFormCAM, XGradCAM):
    """XGrad-CAM, ``sum_t w_t F_t`` with ``w_t = sum_i d_t,i F_t,i / sum_i F_t,i``, or 0 where that sum of F is 0.

    Followed by a mean over positions, it equals Grad-CAM. Fu et al., arXiv 2008.02312. Arguments as for
    :class:`ClosedFormGradCAM`.
    """

    _linear = True

    def _maps(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        activations, seeds = run.activations(layer), run.seeds(targets)
        products = run.products(seeds, layer, activations, "positions")
        total = activations.flatten(2).sum(-1, dtype=products.dtype).unsqueeze(1)
        weights = torch.where(total == 0, 0.0, products / total)
        return Explained(signed_maps(weights, activations), weights, seeds.values, seeds.log_scale)


class ClosedFormGradCAMPlusPlus(ClosedFormCAM, GradCAMPlusPlus):
    """Grad-CAM++, ``sum_t w_t F_t`` with ``w_t = sum_i relu(d_t,i) / (2 + d_t,i sum_j F_t,j)``.

    Its weights are derived for ``exp(score)``; for a component or a margin the same formula is applied.
    Chattopadhyay et al., arXiv 1710.11063, Eq. 19. Arguments as for :class:`ClosedFormGradCAM`.
    """

    def _maps(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        activations, seeds = run.activations(layer), run.seeds(targets)
        pulled = run.pullback(seeds, layer)
        grads = at_one(pulled).flatten(3)
        same = pulled[0, 0, 0].numel() // grads.shape[3]
        total = activations.flatten(2).sum(-1, dtype=grads.dtype).unsqueeze(1).unsqueeze(-1)
        size = seeds.log_scale.exp().to(grads.dtype).unsqueeze(-1).unsqueeze(-1)

        def weights(signed: Tensor) -> Tensor:
            rising = signed.relu()
            return (rising / (rising * size).mul_(total).add_(2)).sum(-1) * same

        of_target, of_opposite = weights(grads), weights(-grads)
        maps, opposite = (signed_maps(w, activations) for w in (of_target, of_opposite))
        return Explained(maps, of_target, seeds.values, seeds.log_scale, opposite)


class ClosedFormLayerCAM(ClosedFormCAM, LayerCAM):
    """LayerCAM, ``sum_t relu(d_t) F_t`` position by position.

    Jiang et al., IEEE Transactions on Image Processing 30 (2021). Arguments as for :class:`ClosedFormGradCAM`.
    """

    def _maps(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        activations, seeds = run.activations(layer), run.seeds(targets)
        rising, falling = _signs(run.pullback(seeds, layer))
        maps, opposite = (summed(part, activations, "channels") for part in (rising, falling))
        return Explained(maps, rising.flatten(3).sum(-1), seeds.values, seeds.log_scale, opposite)

    def _terms(self, run: Run, layer: int, target: Rowwise, made: Explained) -> Tensor:
        return run.pullback(run.seeds([target]), layer)[:, 0].relu() * run.activations(layer)


class ClosedFormGradCAMElementWise(ClosedFormCAM, GradCAMElementWise):
    """Element-wise Grad-CAM of pytorch-grad-cam, ``sum_t relu(d_t F_t)``.

    Arguments as for :class:`ClosedFormGradCAM`.
    """

    def _maps(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        activations, seeds = run.activations(layer), run.seeds(targets)
        grads = run.pullback(seeds, layer)
        rising, falling = _signs(grads)
        # relu(d F) = relu(d) relu(F) + relu(-d) relu(-F)
        plus, minus = activations.relu(), (-activations).relu()
        maps, opposite = (
            summed(one, plus, "channels") + summed(other, minus, "channels")
            for one, other in ((rising, falling), (falling, rising))
        )
        return Explained(maps, grads.flatten(3).sum(-1), seeds.values, seeds.log_scale, opposite)

    def _terms(self, run: Run, layer: int, target: Rowwise, made: Explained) -> Tensor:
        return (run.pullback(run.seeds([target]), layer)[:, 0] * run.activations(layer)).relu()


def _signs(grads: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``relu(d)`` and ``relu(-d)``, which stay unexpanded where d is the same at all positions."""
    return at_one(grads).relu().expand_as(grads), (-at_one(grads)).relu().expand_as(grads)


class ClosedFormShapleyCAM(ClosedFormCAM, ShapleyCAM):
    """ShapleyCAM, ``sum_t w_t F_t`` with ``w_t = sum_i (d - H F / 2)_t,i``, H the Hessian of the target.

    The product H F is the derivative of the closed-form gradient along F; where path and head are linear it is 0 and
    the map equals Grad-CAM's. Cai, arXiv 2501.06261. Arguments as for :class:`ClosedFormGradCAM`.
    """

    _of_means = True

    def _maps(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        activations = run.activations(layer)
        with DualNumbers():
            moved = run.along(layer, run.passed.activations[layer])
            seeds = moved.seeds(targets)
            sums = moved.sums(seeds, layer)
            (values, _), (log_scale, of_scale) = map(forward_ad.unpack_dual, (seeds.values, seeds.log_scale))
            weights, product = forward_ad.unpack_dual(sums)
            if product is not None:
                weights = weights - product / 2
            if of_scale is not None:  # of the factor that was taken out
                weights = weights - forward_ad.unpack_dual(sums).primal * of_scale.unsqueeze(-1).to(sums.dtype) / 2
        return Explained(signed_maps(weights, activations), weights, values, log_scale)


class ClosedFormAblationCAM(WithBaseline, ClosedFormCAM, AblationCAM):
    """Ablation-CAM, ``sum_t w_t F_t`` with ``w_t`` the target's value minus that without channel t.

    Only what follows the first nonlinear step is evaluated for every channel. The paper divides by the value, and so
    does pytorch-grad-cam; for a negative value that would invert the map, so here nothing is divided.
    Desai and Ramaswamy, WACV 2020. Arguments as for :class:`ClosedFormGradCAM`.

    Args:
        baseline: what replaces an ablated channel (see :class:`ContributionCAM`).
    """

    def _explained(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        activations = run.activations(layer)
        players = Players(run, layer, self._difference(run, layer), "channels", targets, self.max_bytes)
        values, weights = [], []
        for image in range(len(run)):
            origin, rows = players.of(image)
            value = players.values(image, origin.unsqueeze(0))
            values.append(value)
            weights.append((value - players.values(image, origin - rows)).T)
        weight = torch.stack(weights).to(run.dtype)
        value = torch.cat(values)
        return Explained(signed_maps(weight, activations), weight, value, torch.zeros_like(value))


class ClosedFormScoreCAM(ClosedFormCAM, ScoreCAM):
    """Score-CAM, ``sum_t w_t F_t`` with ``w_t`` the rise of the target when the image is masked by channel t.

    ``w_t = value(image * mask_t) - value(0 * image)``, mask_t the channel upsampled and scaled to [0, 1]. All targets
    share the T runs of the network. Wang et al., arXiv 1910.01279. Arguments as for :class:`ClosedFormGradCAM`.

    Args:
        softmax: apply a softmax over the channels to the weights, as pytorch-grad-cam does; for components and margins
            it saturates, and what lowers a target is lost.
        channels: use only this many channels as masks, those with the largest variance over the positions, and give
            the others no weight, which approximates the paper's method; None: all.
        batch_size: batch size of the masked runs.

    Raises:
        ValueError: ``channels`` or ``batch_size`` is not a positive integer, or as for :class:`ClosedFormGradCAM`.
    """

    _predicted = SVMTarget()

    def __init__(
        self,
        model: Any,
        target_layers: Any,
        reshape_transform: Any = None,
        *,
        softmax: bool = False,
        channels: int | None = None,
        batch_size: int = 16,
        jacobian: str = "closed_form",
        max_bytes: int | None = None,
    ) -> None:
        for name, number in (("channels", channels), ("batch_size", batch_size)):
            if not (number is None and name == "channels") and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} must be a positive integer, got {number!r}")
        super().__init__(model, target_layers, reshape_transform, jacobian=jacobian, max_bytes=max_bytes)
        self.softmax, self.channels, self.batch_size = softmax, channels, batch_size

    def _explained(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        activations = run.activations(layer)
        count = min(self.channels or activations.shape[1], activations.shape[1])
        chosen = activations.flatten(2).float().var(2, correction=0).topk(count).indices
        blank = self.model(torch.zeros_like(run.images[:1]))
        steps = len(run) * -(-count // self.batch_size)
        values, weights = [], []
        with tqdm(total=steps, desc="Score-CAM", disable=None if steps > 20 else True, leave=False) as bar:
            for image in range(len(run)):
                scores = []
                for part in chosen[image].split(self.batch_size):
                    masked = run.images[image] * _masks(activations[image, part], run.images.shape[2:])
                    scores.append(values_of(run.output, targets, image, self.model(masked)))
                    bar.update()
                rise = torch.cat(scores) - values_of(run.output, targets, image, blank)
                # A softmax of the falls is not the opposite of one of the rises.
                signs = (rise.softmax(0), (-rise).softmax(0)) if self.softmax else (rise,)
                none = rise.new_zeros(activations.shape[1], rise.shape[1])
                weights.append([none.index_copy(0, chosen[image], each).T for each in signs])
                values.append(values_of(run.output, targets, image, row_of(run.output, image)))
        of_signs = [torch.stack(each).to(run.dtype) for each in zip(*weights, strict=True)]
        maps, *opposite = (signed_maps(weight, activations) for weight in of_signs)
        value = torch.cat(values)
        return Explained(maps, of_signs[0], value, torch.zeros_like(value), *opposite)


def _masks(channels: Tensor, size: Sequence[int]) -> Tensor:
    """Return channels (M, H, W) upsampled to the image and brought to [0, 1], shape (M, 1, *size)."""
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    up = F.interpolate(channels.unsqueeze(1), tuple(size), mode=mode, align_corners=True)  # as the host
    low, high = up.flatten(1).amin(1), up.flatten(1).amax(1)
    low, span = (v.reshape(-1, *[1] * (up.dim() - 1)) for v in (low, high - low))
    return torch.where(span > 0, (up - low) / torch.where(span > 0, span, 1.0), 0.0)


class ContributionCAM(WithBaseline, ClosedFormCAM):
    """Maps that add up: what every position contributes to the change from a baseline to the image.

    ``c = sum_t (F - F0)_t J_t``, J the product of the secant Jacobians of path and head between F0 and F, so that
    ``maps.sum((2, 3)) + baseline_values == values`` to rounding (sums times ``exp(log_scale)``). Followed by a mean
    over positions, it is the integrated gradient of the whole head, in closed form (Sundararajan et al., arXiv
    1703.01365); through ReLU and max pooling it is the rescale rule of DeepLIFT (Shrikumar et al., arXiv 1704.02685).
    Unlike the gradient it does not fade where a kernel machine is flat. Arguments as for :class:`ClosedFormGradCAM`.

    Args:
        baseline: F0, where contributions start. ``"zero"``: no activation at all; ``"mean"``: the mean of the training
            set, which the head knows if the features are means over positions (the maps of a component then sum to its
            value, and red means positive); activations as the layer returns them, shape (T,), (T, H, W) or
            (N, T, H, W), for tokens (L, D) or (N, L, D), for example from :func:`mean_activations`; or an image of the
            same shape as the explained ones, which is run through the network. With ``attention="frozen"`` the
            baseline, and so ``baseline_values``, is evaluated with the image's own attention weights.

    Raises:
        TypeError: the baseline is neither one of these names nor a tensor.
        ValueError: it is another name, or has NaN or infinite values; on computing a map: it has another shape, or the
            mean is not known.
    """

    _linear = True
    _of_heads_apart = True

    def _maps(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        at = self._at_baseline(run, layer)
        seeds = run.seeds(targets, at.output)
        maps, remainder = run.contributions(seeds, layer, at.difference, at.path)
        weights = run.sums(seeds, layer, at.path)
        return Explained(
            maps, weights, seeds.values, seeds.log_scale, baseline_values=seeds.baseline_values, remainder=remainder
        )

    def _terms(self, run: Run, layer: int, target: Rowwise, made: Explained) -> Tensor:
        at = self._at_baseline(run, layer)
        return run.pullback(run.seeds([target], at.output), layer, at.path)[:, 0] * run.shaped(at.difference, layer)


class LIFTCAM(WithBaseline, ClosedFormCAM):
    """LIFT-CAM, ``sum_t w_t F_t`` with ``w_t = sum_i c_t,i`` the contribution of channel t (:class:`ContributionCAM`).

    Jung and Oh, arXiv 2102.05228. Arguments as for :class:`ClosedFormGradCAM`.

    Args:
        baseline: where contributions start, as for :class:`ContributionCAM`.
    """

    def _maps(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        at = self._at_baseline(run, layer)
        seeds = run.seeds(targets, at.output)
        weights = run.products(seeds, layer, run.shaped(at.difference, layer), "positions", at.path)
        return Explained(signed_maps(weights, run.activations(layer)), weights, seeds.values, seeds.log_scale)


class RelevanceCAM(WithBaseline, ClosedFormCAM):
    """Relevance-CAM, ``sum_t w_t F_t`` with ``w_t = sum_i R_t,i``, R the relevance of the activations.

    R is layer-wise relevance propagation on the path (z+ rule). The paper covers networks that end in a softmax, not
    a PCA or SVM; here the relevance of the features is their contribution: the secants of the head times the features'
    difference from the baseline. Lee et al., CVPR 2021. Arguments as for :class:`ClosedFormGradCAM`.

    Args:
        baseline: where contributions to the head start, as for :class:`ContributionCAM`.
    """

    def _maps(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        at = self._at_baseline(run, layer)
        seeds = run.seeds(targets, at.output)
        weights = run.relevance(seeds, layer, at.path).flatten(3).sum(-1)
        return Explained(signed_maps(weights, run.activations(layer)), weights, seeds.values, seeds.log_scale)


class ShapCAM(WithBaseline, ClosedFormCAM):
    """Shapley values of positions: the mean rise of the target when a position joins the others in random order.

    They add up as contributions do: ``maps.sum((2, 3)) + baseline_values == values``. Positions that are absent take
    the activations of the baseline. With up to 12 positions the values are exact, over all subsets; with more, orders
    are sampled, each together with its reverse, with ``standard_errors`` for every position. Zheng et al., arXiv
    2208.03608. Arguments as for :class:`ClosedFormGradCAM`.

    Args:
        samples: number of orders to draw, even.
        seed: random seed of the orders.
        baseline: what replaces an absent position, as for :class:`ContributionCAM`.

    Raises:
        TypeError: ``seed`` is not an integer.
        ValueError: ``samples`` is not an even number of at least 4.
    """

    def __init__(
        self,
        model: Any,
        target_layers: Any,
        reshape_transform: Any = None,
        *,
        samples: int = 64,
        seed: int = 0,
        baseline: Any = "zero",
        jacobian: str = "closed_form",
        attention: str = "exact",
        max_bytes: int | None = None,
    ) -> None:
        if not isinstance(samples, int) or samples < 4 or samples % 2:
            raise ValueError(f"samples must be an even number, at least 4 (orders come in pairs), got {samples!r}")
        if not isinstance(seed, int):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        super().__init__(
            model,
            target_layers,
            reshape_transform,
            baseline=baseline,
            jacobian=jacobian,
            attention=attention,
            max_bytes=max_bytes,
        )
        self.samples, self.seed = samples, seed

    def _explained(self, run: Run, layer: int, targets: Sequence[Any]) -> Explained:
        shape = run.activations(layer).shape[2:]
        players = Players(run, layer, self._difference(run, layer), "positions", targets, self.max_bytes)
        # The same orders for every image: its map does not depend on the others.
        parts = [
            shapley_values(players, image, self.samples, torch.Generator().manual_seed(self.seed))
            for image in range(len(run))
        ]
        maps, errors, values, baseline_values = (torch.stack(column) for column in zip(*parts, strict=True))
        maps, errors = (numbers.unflatten(-1, shape).to(run.dtype) for numbers in (maps, errors))
        weights = maps.new_zeros(*maps.shape[:2], 0)  # channels have none
        none = torch.zeros_like(values)  # tokens of no patch stay as they are, also at the baseline
        return Explained(
            maps, weights, values, none, None, baseline_values, remainder=none.to(maps), standard_errors=errors
        )

    def _terms(self, run: Run, layer: int, target: Rowwise, made: Explained) -> Tensor:
        raise ValueError(
            "eigen_smooth takes a principal component over channels, but the players of ShapCAM are positions"
        )
