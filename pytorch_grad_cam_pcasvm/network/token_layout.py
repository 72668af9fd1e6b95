"""How a layer's output lies on the image, found by observing the network."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.axes import UndecidedAxesError, UnknownAxesError, find_axes
from pytorch_grad_cam_pcasvm.network.grid import Geometry
from pytorch_grad_cam_pcasvm.network.inputs import map_input, pick_images, refuse_without_channels
from pytorch_grad_cam_pcasvm.network.layout import Layout, lay_out_maps, list_readings
from pytorch_grad_cam_pcasvm.network.modules import list_modules, unchanged
from pytorch_grad_cam_pcasvm.network.signal_axes import find_axis
from pytorch_grad_cam_pcasvm.runtime.rollback import hooked

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HALVES = (torch.float16, torch.bfloat16)


_TRANSFORM = (
    "pass a function that brings it to (N, T, H, W), such as lambda t: t[:, 1:].mT.unflatten(2, (H, W)) where there is "
    "one class token, or name a block or its norm rather than a layer inside a window"
)
_TRANSFORM_OF_SIGNALS = (
    "pass reshape_transform=lambda t: t if it is (N, C, L), or lambda t: t.mT if it is tokens (N, L, C)"
)
_layouts: "WeakKeyDictionary[nn.Module, dict[Any, Layout]]" = WeakKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # hooks do not run in compiled code
def find_token_layout(
    backbone: nn.Module,
    run: Callable[[nn.Module, Tensor], Any],
    name: str,
    x: Tensor,
    output: Tensor | None = None,
    fix: str | None = None,
    without: str = "choose an earlier layer, as ",
) -> Layout:
    """Find out how the output of a layer lies on the image.

    A copy of the network, without any hooks, runs up to the layer on noise. The grid is that of the last convolution
    before the tokens, the patch embedding; tokens that are the same for different images belong to no patch; and a
    change in a corner of the image must show in that corner of the grid.

    Args:
        backbone: the network.
        run: runs such a network on images and returns the output.
        name: name of the layer for messages, such as ``"the output of 'norm'"``.
        x: images, shape (N, C, H, W) or (N, C, D, H, W).
        output: the layer's output for them, if known.
        fix: what to do if the layout cannot be determined.
        without: what to do if no positions are left; the name of an earlier layer follows.

    Returns:
        The layout.

    Raises:
        ValueError: it cannot be determined.
    """
    # The shape is part of the key, since somebody may add tokens to the network.
    sizes = None if output is None else [*output.shape]
    if sizes is not None and x.shape[0] in sizes:  # once: a grid may have as many rows as there are images
        sizes[sizes.index(x.shape[0])] = -1
    key = (name, tuple(x.shape[1:]), x.dtype, sizes and tuple(sizes))
    layouts = _layouts.setdefault(backbone, {})
    if key not in layouts:
        refuse_without_channels(x, name)
        fix = fix or (_TRANSFORM_OF_SIGNALS if pick_images(x)[0].dim() == 3 else _TRANSFORM)
        with unchanged(backbone), torch.no_grad():
            try:
                layouts[key] = _looked_at(backbone, run, x)
            except _PooledError as error:
                shape, earlier = error.args
                way = without + (repr(earlier) if earlier else "...")
                raise ValueError(f"{name}, {shape}, has no positions or tokens left: {way}") from None
            except _UnknownError as error:
                raise ValueError(f"how {name} lies on the image cannot be determined: {error}; {fix}") from None
    return layouts[key]


class _UnknownError(Exception):
    """Why a layout cannot be known."""


class _PooledError(Exception):
    """The shape of an output that has no positions, and the last layer whose output has, or None."""


def _looked_at(backbone: nn.Module, run: Callable[[nn.Module, Tensor], Any], x: Tensor) -> Layout:
    """Return the layout that a twin of the network shows, in float32 at least if its kernels can do that."""

    def layout(twin: nn.Module, x: Tensor) -> Layout:
        probe = _Probe(twin, run, x)
        return (_Probe(twin, run, x, extra=1) if probe.ambiguous else probe).layout()

    device_type = x.device.type
    if (
        x.dtype in _HALVES
        or torch.is_autocast_enabled(device_type)
        or any(p.dtype in _HALVES for p in backbone.parameters())
    ):
        # What a corner of the image changes may be less than the rounding of such numbers.
        try:
            with torch.autocast(device_type, enabled=False):
                full = without_hooks(backbone, full=True)
                return layout(full, map_input(lambda tensor: tensor.float() if tensor.dtype in _HALVES else tensor, x))
        except (_UnknownError, _PooledError):
            raise
        except Exception:  # scripted modules, kernels of half precision alone, no memory: whatever it may be
            pass
    return layout(without_hooks(backbone), x)


def forget(layout: Layout) -> None:
    """Forget a layout, so that its networks are examined again."""
    for layouts in list(_layouts.values()):
        for key in [key for key, value in layouts.items() if value is layout]:
            del layouts[key]


def without_hooks(backbone: nn.Module, full: bool = False) -> nn.Module:
    """Return a copy of a network's modules that shares everything but hooks, in evaluation mode.

    With ``full`` all that has half precision is copied in float32.
    """

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _HALVES:
            return value.detach().float()
        if type(value) in (dict, OrderedDict):
            return type(value)((name, copied(part)) for name, part in value.items())
        return value

    # What is hooked by others is not to see noise, and other threads may need the hooks meanwhile.
    twins: dict[nn.Module, nn.Module] = {}
    for module in list_modules(backbone):
        if isinstance(module, torch.jit.ScriptModule):
            twins[module] = module
            continue
        twin = twins[module] = object.__new__(type(module))
        twin.__dict__ = {
            name: OrderedDict() if "_hooks" in name and isinstance(value, dict) else value
            for name, value in vars(module).items()
        } | {"training": False}
        if full:
            twin.__dict__ = copied(twin.__dict__)
    for module, twin in twins.items():
        if twin is not module:
            children = module._modules.items()
            twin.__dict__["_modules"] = {name: child if child is None else twins[child] for name, child in children}
            if "_orig_mod" in twin._modules:  # what is compiled runs the module itself, and none of its hooks
                twin.__dict__["forward"] = twin._modules["_orig_mod"]
    return twins[backbone]


@dataclass(frozen=True)
class _Tokens:
    """What was seen of tokens (N, L, D) on the way.

    Attributes:
        convolutions: how many of them ran before.
        constant: whether each token is the same for different images, L of them.
        change: by how much each token of each image differs from the first image's, shape (N, L).
        few_changed: whether a change in a corner of the image has reached a few tokens only.
    """

    convolutions: int
    constant: list[bool]
    change: Tensor
    few_changed: bool


class _Probe:
    """One run on a few images of noise, of which two differ from the first in one corner only."""

    def __init__(self, backbone: nn.Module, run: Callable[[nn.Module, Tensor], Any], x: Tensor, extra: int = 0) -> None:
        self._axes = pick_images(x)[0].dim() - 2
        if self._axes not in (1, 2, 3):
            raise ValueError(f"images of shape {tuple(x.shape)} have no grid: they must be (N, C, H, W)")
        self._images = map_input(partial(_changed_in_corners, [0, 1, *[0] * (self._axes + extra)], self._axes), x)
        self._sizes = [image.shape[2:] for image in pick_images(x)]
        self._shapes: list[tuple[int, ...]] = []  # the grids of what convolutions gave
        self._geometry = Geometry(self._sizes[0])
        self._seen: list[_Tokens] = []
        self._positions: dict[nn.Module, bool] = {}  # whether a module's output has any, in order
        self._backbone, self._run, self._x = backbone, run, x
        with hooked() as hooks:
            for module in list_modules(backbone):
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                hooks.before(module, lambda module, args, kwargs: self._see((*args, *kwargs.values())))
                hooks.after(module, self._after)
            self._output = run(backbone, self._images)
        self._see((self._output,))

    @property
    def ambiguous(self) -> bool:
        """Whether there are as many tokens as images."""
        return isinstance(self._output, Tensor) and self._output.shape[:2] == (len(self._images),) * 2

    def layout(self) -> Layout:
        """Return the layout of the tokens found."""
        layout = self._find_layout()
        has_cells = len(layout.grid) == self._axes
        return replace(layout, cells=self._geometry.cells(layout.grid)) if has_cells else layout

    def _find_layout(self) -> Layout:
        output, count = self._output, len(self._images)
        if isinstance(output, Tensor) and output.dim() == 2:
            raise _PooledError(f"(N, {output.shape[1]})", self._last_with_positions())
        if not isinstance(output, Tensor) or output.dim() not in (3, 4, 5):
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise _UnknownError(f"it returns {shape}, which has no positions")
        if output.dim() == 3 and self._axes == 1:
            return self._lay_out_signal(output, count)
        if output.dim() == 3:
            return self._lay_out_tokens(output, count)
        readings = list_readings(output.shape, pick_images(self._x)[0].shape) if len(output) == count else []
        if [layout.channels for layout in readings] == [1]:
            return readings[0]
        try:
            return find_axes(self._backbone, self._run, self._x, output.shape)
        except UndecidedAxesError as error:
            readings = readings if len(readings) == 1 else self._list_readings_of_convolutions(output.shape)
            if len(readings) != 1 or len(output) != count:
                raise _UnknownError(str(error)) from None
            return readings[0]
        except UnknownAxesError as error:
            raise _UnknownError(str(error)) from None

    def _list_readings_of_convolutions(self, shape: Sequence[int]) -> list[Layout]:
        """Return how an output may lie on the image by the grids of convolutions."""
        last = Layout(tuple(shape[1:-1]), len(shape), 0, len(shape) - 1)
        grids = [*self._shapes, *self._sizes]
        return [
            layout
            for layout in (lay_out_maps(shape), last)
            if any(len(g) == len(layout.grid) and _merged(g, math.prod(layout.grid)) == layout.grid for g in grids)
        ]

    def _lay_out_signal(self, output: Tensor, count: int) -> Layout:
        """Return the layout of activations that may have channels first, (N, T, L), or be tokens, (N, L, T)."""
        axes, whole = find_axis(self._backbone, self._run, self._x)
        if len(axes) != 1:
            both, none = (
                "can be read with channels first or last",
                "can be read in no way: no position follows the signal",
            )
            raise _UnknownError(f"its shape {tuple(output.shape)} {both if axes else none}")
        if axes == [2] and len(output) == count:
            return Layout(tuple(output.shape[2:]), 3, 0, 1)
        if whole and axes == [1] and len(output) == count:
            return Layout(tuple(output.shape[1:2]), 3, 0, 2)
        return self._lay_out_tokens(output, count)

    def _lay_out_tokens(self, output: Tensor, count: int) -> Layout:
        batch = [axis for axis in (0, 1) if output.shape[axis] == count]
        if len(batch) != 1:
            raise _UnknownError(f"for {count} images it returns {tuple(output.shape)} (windows in place of images?)")
        matching = [tokens for tokens in self._seen if len(tokens.constant) == output.shape[1 - batch[0]]]
        first = matching[0]  # its last is the output
        if not first.convolutions:
            raise _UnknownError("no convolution runs before its tokens to take their grid from")
        patches = self._shapes[first.convolutions - 1]
        same = first.constant
        length, extra = len(same), sum(same)
        before = next((i for i, constant in enumerate(same) if not constant), length)
        after = next((i for i, constant in enumerate(reversed(same)) if not constant), length)
        grid = _merged(patches, length - extra)
        if extra != before + after or grid is None or (extra and grid != patches):
            raise _UnknownError(
                f"its {length} tokens, {extra} of them the same for all images, are not those of a grid of "
                f"{' x '.join(map(str, patches))} patches"
            )
        # Behind attention every token has changed. Before, all of them tell whether something changes their order.
        for tokens in matching:
            of_grid = tokens.change[:, before : length - after].unflatten(1, grid)
            changed, margin = (
                (of_grid > 1e-3 * of_grid.amax(), 1) if tokens.few_changed else (_find_largest(of_grid), 0)
            )
            ordered = self._axes == 1 or _in_corners(changed, grid, margin)  # of signals, that has been seen
            if (tokens is first or tokens.few_changed) and not ordered:
                raise _UnknownError("its tokens do not lie row by row, or every token looks at the whole image")
        return Layout(grid, 3, batch[0], 2, before, after)

    def _see(self, items: Any) -> None:
        count = len(self._images)
        for item in items:
            if isinstance(item, Tensor) and item.dim() == 3 and item.is_floating_point() and count in item.shape[:2]:
                rows = item if len(item) == count else item.transpose(0, 1)
                change = (rows - rows[:1]).abs().amax(-1).double()
                least = 1e-6 * rows.abs().amax().double()
                few_changed = bool(((change[2:] > least).sum(1) <= change.shape[1] / 4).all())
                constant = (change[1] <= least).tolist()
                self._seen.append(_Tokens(len(self._shapes), constant, change, few_changed))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(module, _CONVOLUTIONS) and output.dim() == self._axes + 2:
            self._shapes.append(tuple(output.shape[2:]))
        self._geometry.see(module, args[0] if args else kwargs.get("input"), output)
        items = (output,) if isinstance(output, Tensor) else output if isinstance(output, tuple | list) else ()
        self._see(items)
        shape = next((item.shape for item in items if isinstance(item, Tensor)), None)
        if shape is not None:
            self._positions.pop(module, None)
            self._positions[module] = min(math.prod(shape[1:-1]), math.prod(shape[2:])) > 1

    def _last_with_positions(self) -> str | None:
        """Return the name of the last layer whose output has positions, and is no part of one whose output has none."""
        names = {module: name for name, module in self._backbone.named_modules()}
        without = {names[module] for module, has in self._positions.items() if not has}
        for module, has in reversed(self._positions.items()):
            parents = accumulate(names[module].split(".")[:-1], "{}.{}".format)
            if has and names[module] and not without.intersection(parents):
                return names[module]
        return None


def _changed_in_corners(rows: list[int], axes: int, x: Tensor) -> Tensor:
    """Return an image of noise and another, then the first one with other numbers in one corner for each axis."""
    if not x.is_floating_point() or x.dim() < (3 if axes == 1 else 4):
        return x[:1].expand(len(rows), *x.shape[1:])
    size = x.shape[2:]
    noise = torch.randn((3, *x.shape[1:]), generator=torch.Generator().manual_seed(0), device="cpu").to(x)
    images = noise[rows]
    for axis in range(len(size)):  # the far end of one axis, the near end of the others
        corner: list[Any] = [slice(-(-length // 4)) for length in size]
        corner[axis] = slice(-(-size[axis] // 4) * -1, None)
        images[(2 + axis, slice(None), *corner)] = 4 * noise[(2, slice(None), *corner)]
    return images


def _find_largest(change: Tensor) -> Tensor:
    """Return where each image (N, *grid) has changed most."""
    return change == change.flatten(1).amax(1).reshape(-1, *[1] * (change.dim() - 1))


def _in_corners(changed: Tensor, grid: tuple[int, ...], margin: int = 0) -> bool:
    """Return whether each image that differs in a corner has changed, (N, *grid), in that corner of the grid only.

    The corner is a quarter of every axis, as patches may leave out some pixels.
    """
    for axis in range(len(grid)):
        for other, size in enumerate(grid):
            places = changed[2 + axis].movedim(other, 0).reshape(size, -1).any(1).nonzero()[:, 0]
            distance = size - 1 - places if other == axis else places  # the far end of one axis, the near end of others
            # Of two positions one has to be left, or any order would do.
            allowed = min(-(-size // 4) + margin, max(size - 1, 1))
            if not len(places) or int(distance.amax()) >= allowed:
                return False
    return True


def _merged(grid: Any, count: int) -> tuple[int, ...] | None:
    """Return the grid, halved as often as it takes to have so many positions; None if it never has."""
    factor = 1
    while factor <= 2 * max(grid):
        sizes = tuple(-(-size // factor) for size in grid)
        if math.prod(sizes) == count:
            return sizes
        factor *= 2
    return None
