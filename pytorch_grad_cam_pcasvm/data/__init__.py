"""Images and labels from any source."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytorch_grad_cam_pcasvm.data.images import Images, in_colour

__all__ = ["Images", "in_colour"]


def __getattr__(name: str) -> Any:
    """Return a public name: torch, which these need, is imported when one is asked for, and not for file names."""
    if name in __all__:
        from pytorch_grad_cam_pcasvm.data import images

        return getattr(images, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
