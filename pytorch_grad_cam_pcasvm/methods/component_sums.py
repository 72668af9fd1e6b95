"""Sums of component maps: the maps of decisions, where a method is linear in the gradient or in secants."""

from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM


class ComponentSums(ClosedFormCAM):
    """A method whose maps of decisions are sums of its component maps: it is linear in the gradient, or in secants.

    Example:
        >>> [issubclass(method, ComponentSums) for method in (ClosedFormGradCAM, ClosedFormLayerCAM)]
        [True, False]
    """

    sums = "components"


class HeadSums(ComponentSums):
    """A method whose maps are sums over parts of the gradient, such as single heads of attention."""

    sums = "heads"
