"""BaselineCAM: a method with a baseline, where contributions start, or which stands in for missing parts."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.starts.baseline import Baseline
from pytorch_grad_cam_pcasvm.starts.run import Run, StartPlan
from pytorch_grad_cam_pcasvm.targets import SVMTarget
from pytorch_grad_cam_pcasvm.targets.questions import Questions


class BaselineCAM(ClosedFormCAM):
    """A method with a baseline.

    Args:
        baseline: F0, where contributions start, or what replaces a channel or position that is left out. ``"neutral"``:
            where the target is undecided, so that a map adds up to the value itself: for a component, the mean of the
            training set; for a margin or a decision between classes, a point on the decision boundary near that mean,
            the same for all images. A regressor starts at the mean. ``"zero"``: no activation at all; ``"mean"``: the
            mean of the training set, whatever the target's value there. Or activations as the layer returns them, shape
            (T,), (T, H, W) or (N, T, H, W), for tokens (L, D) or (N, L, D); or an image of the same shape as the
            explained ones, which is run through the network. With ``attention="frozen"``, the baseline, and therefore
            ``baseline_values``, is evaluated with the image's own attention weights.
        mean: the mean of the training set at the target layer, from :func:`.mean_activations`, for ``"neutral"`` and
            ``"mean"``; for several target layers, a list of these. None: derived from the head, if the features are
            means over positions of the target layer (``"neutral"`` then always has the head's means over positions,
            and takes from this mean how they vary), or if :func:`.fit_model` has stored the layer's means with it;
            otherwise ``"neutral"`` starts at zeros, with a warning. For images of another size, its mean over positions
            is used if the features are pooled; others are refused.

    Raises:
        TypeError: the baseline is neither one of these names nor a tensor, or the mean is not a tensor.
        ValueError: the baseline is another name, or the baseline or the mean has NaN or infinite values. When a map is
            computed: the baseline has the wrong shape, the mean is unknown, or that of images of another size, or there
            is no decision boundary within reach of it.

    Example:
        >>> isinstance(ContributionCAM(net, ["layer2"]), BaselineCAM)
        True
    """

    needs = "difference"
    # Whether maps from the training mean can be moved to another start by the same at all positions.
    moves_starts = False
    _predicted = SVMTarget()

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module | str] | str,
        reshape_transform: Callable[[Tensor], Tensor] | str | None = None,
        *,
        baseline: str | Tensor = "zero",
        mean: Tensor | Sequence[Tensor] | None = None,
        jacobian: str = "closed_form",
        attention: str = "exact",
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(
            model, target_layers, reshape_transform, jacobian=jacobian, attention=attention, max_bytes=max_bytes
        )
        self._starts = Baseline(baseline, mean)

    @property
    def baseline(self) -> str | Tensor:
        """The baseline; may be reassigned."""
        return self._starts.baseline

    @baseline.setter
    def baseline(self, baseline: str | Tensor) -> None:
        self._starts.baseline = baseline

    @property
    def mean(self) -> Sequence[Tensor] | None:
        """The means of the training set, one for each target layer, or None; may be reassigned."""
        return self._starts.means

    @mean.setter
    def mean(self, mean: Tensor | Sequence[Tensor] | None) -> None:
        self._starts.means = mean

    def _plan_starts(self, run: Run, questions: Questions) -> list[StartPlan | None]:
        if run.has_branches and self.adds_up:
            return [*self._starts.plan_together(run, questions, self._warnings)]
        plan = partial(self._starts.plan, run, questions=questions, warnings=self._warnings, moves=self.moves_starts)
        return [plan(layer) for layer in range(len(run.layers))]
