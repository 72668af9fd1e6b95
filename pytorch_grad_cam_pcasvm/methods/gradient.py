"""Gradient methods.

F are the activations (T channels), d is the gradient of a target with respect to them, and i runs over positions.
"""

import torch
from pytorch_grad_cam import (
    GradCAM,
    GradCAMElementWise,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    ShapleyCAM,
    XGradCAM,
)
from torch import Tensor
from torch.autograd import forward_ad

from pytorch_grad_cam_pcasvm.maps.results import MethodResult, signed_maps
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM, ComponentSums, HeadSums
from pytorch_grad_cam_pcasvm.path.dual_numbers import DualNumbers
from pytorch_grad_cam_pcasvm.rules.cotangents import Cotangent
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.starts.run import Run, by_image
from pytorch_grad_cam_pcasvm.targets.questions import Questions


class ClosedFormGradCAM(HeadSums, GradCAM):
    """Grad-CAM, ``sum_t (sum_i d_t,i) F_t``: the maps of the paper (Eqs. 11 to 17).

    Selvaraju et al., Grad-CAM, arXiv 1610.02391.
    """

    def host_divisor(self, activations: Tensor) -> int:
        return activations[0, 0].numel()  # the host's weights are means over positions

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        activations, output_gradients = run.activations(layer), run.output_gradients(targets)
        weights = run.sums(output_gradients, layer).contiguous()  # not a view of one image's numbers for all of them
        return MethodResult(
            signed_maps(weights, activations), weights, output_gradients.values, output_gradients.log_scale.contiguous()
        )


class ClosedFormHiResCAM(HeadSums, HiResCAM):
    """HiResCAM, ``sum_t d_t F_t`` position by position; it equals Grad-CAM if a mean over positions follows.

    Draelos and Carin, arXiv 2011.08891.
    """

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        activations, output_gradients = run.activations(layer), run.output_gradients(targets)
        maps = run.products(output_gradients, layer, activations, "channels")
        return MethodResult(
            maps, run.sums(output_gradients, layer), output_gradients.values, output_gradients.log_scale
        )

    def terms(self, run: Run, layer: int, questions: Questions, result: MethodResult) -> Tensor:
        return run.gradients(run.output_gradients(questions), layer).dense()[0] * run.activations(layer)


class ClosedFormXGradCAM(ComponentSums, XGradCAM):
    """XGrad-CAM, ``sum_t w_t F_t`` with ``w_t = sum_i d_t,i F_t,i / sum_i F_t,i``, or 0 where that sum of F is 0.

    It equals Grad-CAM if a mean over positions follows the layer. Fu et al., arXiv 2008.02312.
    """

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        activations, output_gradients = run.activations(layer), run.output_gradients(targets)
        products = run.products(output_gradients, layer, activations, "positions")
        total = activations.flatten(2).sum(-1, dtype=products.dtype).unsqueeze(1)
        weights = torch.where(total == 0, 0.0, products / total)
        return MethodResult(
            signed_maps(weights, activations), weights, output_gradients.values, output_gradients.log_scale
        )


class ClosedFormGradCAMPlusPlus(ClosedFormCAM, GradCAMPlusPlus):
    """Grad-CAM++, ``sum_t w_t F_t`` with ``w_t = sum_i relu(d_t,i) / (2 + d_t,i sum_j F_t,j)``.

    The weights were derived for ``exp(score)``; for a component or a margin, the same formula is used. Chattopadhyay et
    al., arXiv 1710.11063, Eq. 19.
    """

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        activations, output_gradients = run.activations(layer), run.output_gradients(targets)
        gradients = run.gradients(output_gradients, layer)
        ones = [1] * (activations.dim() - 1)
        total = activations.flatten(2).sum(-1, dtype=gradients.dtype).unflatten(1, (-1, *ones[1:]))
        size = output_gradients.log_scale.exp().to(gradients.dtype).T.unflatten(1, (-1, *ones))

        def weights(sign: int) -> Tensor:
            def share(grad: Tensor) -> Tensor:
                rising = (sign * grad).relu()
                return rising / (rising * size).mul_(total).add_(2)

            return by_image(gradients.map(share).over_positions())

        of_target, of_opposite = weights(1), weights(-1)
        maps, opposite = (signed_maps(w, activations) for w in (of_target, of_opposite))
        return MethodResult(maps, of_target, output_gradients.values, output_gradients.log_scale, opposite)


class ClosedFormLayerCAM(ClosedFormCAM, LayerCAM):
    """LayerCAM, ``sum_t relu(d_t) F_t`` position by position.

    Jiang et al., IEEE Transactions on Image Processing 30 (2021).
    """

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        activations, output_gradients = run.activations(layer), run.output_gradients(targets)
        rising, falling = _signs(run.gradients(output_gradients, layer))
        maps, opposite = (by_image(part.times(activations, [1])) for part in (rising, falling))
        return MethodResult(
            maps, by_image(rising.over_positions()), output_gradients.values, output_gradients.log_scale, opposite
        )

    def terms(self, run: Run, layer: int, questions: Questions, result: MethodResult) -> Tensor:
        return run.gradients(run.output_gradients(questions), layer).dense()[0].relu() * run.activations(layer)


class ClosedFormGradCAMElementWise(ClosedFormCAM, GradCAMElementWise):
    """The element-wise Grad-CAM of pytorch-grad-cam, ``sum_t relu(d_t F_t)``."""

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        activations, output_gradients = run.activations(layer), run.output_gradients(targets)
        gradients = run.gradients(output_gradients, layer)
        rising, falling = _signs(gradients)
        # relu(d F) = relu(d) relu(F) + relu(-d) relu(-F)
        plus, minus = activations.relu(), (-activations).relu()
        maps, opposite = (
            by_image(one.times(plus, [1]) + other.times(minus, [1]))
            for one, other in ((rising, falling), (falling, rising))
        )
        return MethodResult(
            maps, by_image(gradients.over_positions()), output_gradients.values, output_gradients.log_scale, opposite
        )

    def terms(self, run: Run, layer: int, questions: Questions, result: MethodResult) -> Tensor:
        return (run.gradients(run.output_gradients(questions), layer).dense()[0] * run.activations(layer)).relu()


def _signs(gradients: Cotangent) -> tuple[Cotangent, Cotangent]:
    """Return ``relu(d)`` and ``relu(-d)``."""
    return gradients.map(torch.relu), gradients.map(lambda grad: (-grad).relu())


class ClosedFormShapleyCAM(ClosedFormCAM, ShapleyCAM):
    """ShapleyCAM, ``sum_t w_t F_t`` with ``w_t = sum_i (d - H F / 2)_t,i``, H the Hessian of the target.

    The product H F is the derivative of the closed-form gradient along F. If path and head are linear, it is 0, and the
    map equals Grad-CAM's. Cai, arXiv 2501.06261.
    """

    needs = "replay"

    def host_divisor(self, activations: Tensor) -> int:
        return activations[0, 0].numel()  # the host's weights are means over positions

    def compute(self, run: Run, layer: int, targets: Questions) -> MethodResult:
        activations = run.activations(layer)
        with DualNumbers():
            runs_along = _run_along(run, layer, run.recorded.activations[layer])
            output_gradients = runs_along.output_gradients(targets)
            sums = runs_along.sums(output_gradients, layer)
            (values, _), (log_scale, of_scale) = map(
                forward_ad.unpack_dual, (output_gradients.values, output_gradients.log_scale)
            )
            weights, product = forward_ad.unpack_dual(sums)
            if product is not None:
                weights = weights - product / 2
            if of_scale is not None:  # of the factor that was taken out
                weights = weights - forward_ad.unpack_dual(sums).primal * of_scale.unsqueeze(-1).to(sums.dtype) / 2
        return MethodResult(signed_maps(weights, activations), weights, values, log_scale)


def _run_along(run: Run, layer: int, direction: Tensor) -> Run:
    """Return the same run as a function of its activations, whose tensors carry the derivative along a direction.

    Raises:
        NoClosedFormError: it is called under autocast, or a function on the path has no forward derivative.
    """
    if torch.is_autocast_enabled(run.images.device.type):
        raise NoClosedFormError(
            "second derivatives cannot be computed under torch.autocast", "call the method outside it"
        )
    # A copy, as what was made in inference mode takes no derivative.
    activations = forward_ad.make_dual(run.recorded.activations[layer].clone(), direction)
    try:
        return run.replay(layer, activations)
    except NotImplementedError as error:  # torch's own
        if "jvp" not in str(error):
            raise
        raise NoClosedFormError(
            f"second derivatives need the jvp of each autograd.Function on the path ({str(error).splitlines()[0]})",
            "define it, as in @staticmethod def jvp(ctx, x)",
            "use a method of first derivatives, as ClosedFormGradCAM",
        ) from error
