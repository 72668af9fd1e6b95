"""The methods, once each: a row says what a test needs to know of one; tests take those with a property, or by name."""

from dataclasses import dataclass, field
from typing import Any

from pytorch_grad_cam_pcasvm import BaselineCAM, methods
from pytorch_grad_cam_pcasvm.methods.perturbation import PerturbationCAM


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        kind: its class.
        options: arguments with which it is as short as it can be.
    """

    kind: type[Any]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, net: Any, layers: Any, transform: Any = None, **options: Any) -> Any:
        return self.kind(net, layers, transform, **self.options | options)

    @property
    def has_start(self) -> bool:
        """Whether its maps are differences from a start."""
        return issubclass(self.kind, BaselineCAM)

    @property
    def runs_again(self) -> bool:
        """Whether it runs the rest of the network for each player: it has no program, and no block of tiles."""
        return issubclass(self.kind, PerturbationCAM)


_SAMPLED = {"ShapCAM": {"samples": 4}}
METHODS = {name: Method(getattr(methods, name), _SAMPLED.get(name, {})) for name in methods.__all__}
# Of a gradient, of secants from a start, and of weights that are channels' shares of these.
BASIC = ("ClosedFormGradCAM", "ContributionCAM", "LIFTCAM")
