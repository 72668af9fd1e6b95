"""reshape_transform: the user's word on how the activations of a target layer are arranged."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.features import output_of
from pytorch_grad_cam_pcasvm.network.inputs import pick_images
from pytorch_grad_cam_pcasvm.network.layout import Layout, lay_out_maps
from pytorch_grad_cam_pcasvm.network.tiling import Tiled, look_inside
from pytorch_grad_cam_pcasvm.network.token_layout import find_token_layout, looks_channels_last
from pytorch_grad_cam_pcasvm.runtime.errors import Way, refuse, warn


def layout_by(
    transform: Any, backbone: nn.Module, name: str, x: Tensor, activations: Tensor, once: Callable[[Any], bool]
) -> Layout:
    """Return how the activations of a target layer are arranged.

    Args:
        transform: ``reshape_transform``: ``"tokens"``, a user's function, or None.
        backbone: the network.
        name: name of the layer.
        x: images, shape (N, ...).
        activations: the layer's output for them.
        once: whether a layer and a shape are asked for the first time, as a hint is given once.

    Returns:
        What brings them to the shape of maps.

    Raises:
        ValueError: the layout cannot be determined, or the channels seem to come last.
    """
    tiling = backbone.find_tiling(x) if isinstance(backbone, Tiled) else None
    if tiling is not None:
        network, inner, tiles = look_inside(backbone, name, x)
        row = layout_by(transform, network, inner, tiles, activations, once)
        return replace(row, crops=tiling.place(row(activations[:1]).shape[2:]))

    def layout() -> Layout:
        output_name = f"the output of {name!r}"
        return find_token_layout(
            backbone, lambda net, images: output_of(net, name, images), output_name, x, activations
        )

    if transform == "tokens":
        return layout()
    if transform is None:
        if all(looks_channels_last(activations.shape, image.shape) for image in pick_images(x)):
            refuse(
                ValueError,
                f"the activations of {name!r}, {tuple(activations.shape)}, seem to have their channels last",
                Way("pass reshape_transform='tokens', or lambda t: t if they come first", "reshape_transform"),
            )
        if activations.dim() == 3 and pick_images(x)[0].dim() == 3:
            _refuse_tokens(layout, name, activations)
        return lay_out_maps(activations.shape)
    if once((name, x.shape[1:], activations.shape[1:])):
        _hint_at_other_tokens(transform, name, activations, layout)

    def guarded(activations: Tensor) -> Tensor:
        try:
            return transform(activations)
        except Exception as error:
            token_layout = _tokens(layout)
            way = "" if token_layout is None else f"; they are {_words(token_layout)}: use reshape_transform='tokens'"
            raise ValueError(
                f"reshape_transform fails on the activations of {name!r}, {tuple(activations.shape)}: {error}{way}"
            ) from error

    return Layout((), activations.dim(), function=guarded)


def _refuse_tokens(layout: Callable[[], Layout], name: str, activations: Tensor) -> None:
    """Refuse activations of signals that are tokens, (N, L, T), and not (N, T, L)."""
    if _tokens(layout) is not None:
        refuse(
            ValueError,
            f"the activations of {name!r}, {tuple(activations.shape)}, are tokens of the signals, whose channels come "
            "last",
            Way("pass reshape_transform='tokens'", "reshape_transform"),
        )


def _tokens(layout: Callable[[], Layout]) -> Layout | None:
    """Return the layout of tokens, or None where it cannot be known or there are none."""
    try:
        token_layout = layout()
    except Exception:  # it is for a hint only: what it may be does not matter
        return None
    return None if token_layout.tokens is None else token_layout


def _words(layout: Layout) -> str:
    assert layout.tokens is not None
    _, before, patches = layout.tokens
    words = f"{before + patches + layout.after} tokens: {patches} patches"
    words += f" after {before} other{'s' if before > 1 else ''}" if before else ""
    return words + (f", and {layout.after} after them" if layout.after else "")


def _hint_at_other_tokens(
    function: Callable[[Tensor], Tensor], name: str, activations: Tensor, layout: Callable[[], Layout]
) -> None:
    """Say once if a function that only picks tokens, (N, L, D), takes other tokens than the patches'."""
    if activations.dim() != 3:
        return
    numbers = torch.arange(1.0, activations.shape[1] + 1, device=activations.device)  # 0 may be padding
    try:
        picked = function(numbers.reshape(1, -1, 1).repeat(len(activations), 1, activations.shape[2])).flatten(2)
    except Exception:  # not on such numbers: then nothing is known
        return
    taken = picked[0, 0].long() - 1
    is_pick = torch.equal(picked, (taken + 1).to(picked).expand_as(picked)) and len(taken.unique()) == len(taken)
    if not is_pick or int(taken.min()) < 0 or int(taken.max()) >= len(numbers):
        return
    token_layout = _tokens(layout)
    if token_layout is None or token_layout.batch != 0 or token_layout.tokens is None:
        return
    first, count = token_layout.tokens[1:]
    if sorted(taken.tolist()) != list(range(first, first + count)):
        some = "" if int(taken.max() - taken.min()) == len(taken) - 1 else f"{len(taken)} of "
        warn(
            f"reshape_transform takes {some}the tokens {int(taken.min())} to {int(taken.max())} of {name!r}, but the "
            f"patches seem to be {first} to {first + count - 1} ({_words(token_layout)}): if that is not intended, use "
            "reshape_transform='tokens'",
            UserWarning,
        )
