"""Programs: ``explain`` as a graph of operators that runtimes have, in which the number of images is a symbol."""

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy.special
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.methods.perturbation import PerturbationCAM
from pytorch_grad_cam_pcasvm.network.inputs import checked_images, one_input
from pytorch_grad_cam_pcasvm.network.modules import find_device
from pytorch_grad_cam_pcasvm.runtime.device import keep_every_choice, traced
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError, NoProgramError
from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    DataDependentOutputException,
    DispatchMode,
    FakeTensorMode,
    enable_python_dispatcher,
)
from pytorch_grad_cam_pcasvm.studio.export.outputs import checked, name_outputs
from pytorch_grad_cam_pcasvm.targets import ClosedFormTarget, Target

aten = torch.ops.aten
_NODES = 40  # of the interpolation of erfcx
_MAP = 3.75  # what x the middle of its interval is
_BLOCK = 1 << 16  # numbers of points whose differences are taken at once


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of operators that onnxruntime lacks."""
    _interpolation()  # made here, its numbers are constants of a program
    return {
        aten._cdist_forward.default: distances,
        aten.convolution_backward.default: convolution_backward,
        aten.copy.default: lambda into, x, wait=False: x.to(into.dtype).expand(into.shape).clone(),
        aten.logsumexp.default: logsumexp,
        aten.nan_to_num.default: nan_to_num,
        aten.special_erfcx.default: erfcx,
        aten.stack.default: lambda parts, dim=0: torch.cat([part.unsqueeze(dim) for part in parts], dim),
    }


def distances(x: Tensor, points: Tensor, p: float, mode: int | None) -> Tensor:
    """Return the distances of x (N, B) from points (I, B), shape (N, I), from differences, so that nothing cancels."""
    size = max(1, _BLOCK // points.shape[-1])
    starts = range(0, points.shape[0], size)
    parts = [(x.unsqueeze(-2) - points[start : start + size]).square().sum(-1).sqrt() for start in starts]
    return torch.cat(parts, -1)


def convolution_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, mask: Sequence[bool],
) -> tuple[Tensor | None, None, None]:  # fmt: skip
    """Return the pullback of a convolution to its input, as a transposed convolution, and the other way round."""
    if transposed:
        return aten.convolution(grad, weight, None, stride, padding, dilation, False, [0], groups), None, None
    sizes = zip(input.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    left = [
        size - ((out - 1) * step - 2 * pad + wide * (kernel - 1) + 1) for size, out, kernel, step, pad, wide in sizes
    ]
    return aten.convolution(grad, weight, None, stride, padding, dilation, True, left, groups), None, None


def logsumexp(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Return ``log(sum(exp(x)))``; onnxruntime's own is wrong if the first number is minus infinity."""
    over = tuple(dims)
    top = x.amax(over, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    sums = (x - top).exp().sum(over, keepdim=True).log() + top
    return sums if keepdim else sums.squeeze(over)


def nan_to_num(x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """Return x with numbers in place of NaN and infinity."""
    limits = torch.finfo(x.dtype)
    x = torch.where(x == math.inf, limits.max if posinf is None else posinf, x)
    x = torch.where(x == -math.inf, limits.min if neginf is None else neginf, x)
    return x if nan is not None and math.isnan(nan) else torch.where(x != x, 0.0 if nan is None else nan, x)


def erfcx(x: Tensor) -> Tensor:
    """Return ``exp(x^2) erfc(x)`` for x from 0, a rational function, right to 2e-15 of its size.

    ``(1 + 2 x) erfcx(x)`` is smooth in ``t = (x - k) / (x + k)`` from -1 to 1: it is interpolated between Chebyshev's
    nodes by the barycentric formula (Shepherd and Laframboise, Mathematics of Computation 36 (1981), for t).
    """
    nodes, weights, values = (numbers.to(x) for numbers in _interpolation())
    away = ((x - _MAP) / (x + _MAP)).unsqueeze(-1) - nodes
    shares = weights / torch.where(away == 0, torch.finfo(x.dtype).tiny, away)
    return (shares @ values) / (shares.sum(-1) * (1 + 2 * x))


@cache
def _interpolation() -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes t, their barycentric weights, and the values there."""
    angles = math.pi * (np.arange(_NODES) + 0.5) / _NODES
    t = np.cos(angles)
    x = _MAP * (1 + t) / (1 - t)
    values = (1 + 2 * x) * scipy.special.erfcx(x)
    weights = (-1.0) ** np.arange(_NODES) * np.sin(angles)
    return torch.from_numpy(t), torch.from_numpy(weights), torch.from_numpy(values)


def narrow_before_expanding(graph: Graph) -> None:
    """Narrow before expanding, which is a view in torch but in ONNX a copy of everything, to keep one number of it."""
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        source, dim, *limits = (*node.args, 0)[: max(2, len(node.args))]
        if source.target is not aten.expand.default or limits != [0, 1] or "val" not in source.args[0].meta:
            continue
        value, sizes = source.args[0], list(source.args[1])
        shape = value.meta["val"].shape
        dim %= len(sizes)
        own = dim - len(sizes) + len(shape)
        if own < 0 or shape[own] == 1:
            sizes[dim] = 1
            with graph.inserting_before(node):
                narrow = graph.call_function(aten.expand.default, (value, sizes))
            narrow.meta = dict(node.meta)
            node.replace_all_uses_with(narrow)


def plain_softmaxes(graph: Graph) -> None:
    """Take the softmax of attention without a mask as it is: only a mask can leave rows of minus infinity."""
    for node in graph.find_nodes(op="call_function", target=aten._safe_softmax.default):
        scores, dim, *dtype = node.args
        if not dtype and _behind_views(scores).target is aten.bmm.default:
            node.target, node.args = aten._softmax.default, (scores, dim, False)


def plain_zeros(graph: Graph) -> None:
    """Take zeros as they are, whatever their layout was while derivatives were traced."""
    strided = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    for node in strided:
        zeros, shape, *_ = node.args
        alone = len(zeros.users) == 1 and not any(user in strided for user in node.users)  # nobody writes beside it
        if zeros.target is aten.new_zeros.default and zeros not in strided and alone:
            node.target, node.args, node.kwargs = aten.new_zeros.default, (zeros.args[0], shape), zeros.kwargs


def _behind_views(node: Node) -> Node:
    while node.target in (aten.view.default, aten._unsafe_view.default, aten.mul.Scalar):
        node = node.args[0]  # type: ignore[assignment]
    return node


_BATCH = 61  # like no other size, so that nothing is taken to be equal to it


def program(
    cam: ClosedFormCAM,
    images: Tensor,
    targets: Sequence[Target] | Target | None = None,
    *,
    size: Sequence[int] | None = None,
    errors: bool = False,
) -> ExportedProgram:
    """Return the computation of ``cam.explain(images, targets)`` as a program, for any number of images.

    The program explains the network as it is now: it has copies of all weights, and does not follow later changes. It
    can be saved (``torch.export.save``) and compiled (``torch.compile``). Called with any number of images (N, ...),
    otherwise of the shape and precision of those given, ``program.module()`` returns a dictionary:

    - ``scores`` (N, C), ``label`` (N,), the index of the predicted class, and ``components`` (N, B), if there are
      any; of dense features at every position, (N, C, h, w), (N, h, w) and (N, B, h, w);
    - ``values``, ``nu`` and ``log_scale`` (N, K), ``maps`` (N, K, H, W), and for some methods ``opposite``,
      ``baseline_values`` and ``remainder``, as in :class:`.SignedMaps`; with ``errors``, also ``error``, upsampled as
      the maps, and ``values_error``.

    Args:
        cam: any method except Score-CAM, Ablation-CAM and ShapCAM.
        images: images to try the program on, shape (N, ...).
        targets: K targets, each for all images; None: every component, then the predicted class.
        size: (H, W) to upsample maps to; None: their own resolution.
        errors: also tell the standard errors, by the head's resampled heads, which are then part of the program: with
            thirty it has about ten times as many operations, and takes four to six times as long to make.

    Returns:
        The program.

    Raises:
        NoProgramError: the method, a target or the network depends on tensor values, or needs autograd; or the program
            gives other numbers than ``explain`` for the images or for noise like them.
        TypeError: ``cam`` is not a method.
        ValueError: as for ``explain``, or the precision is not single; or there are no errors to tell.

    Example:
        >>> from pytorch_grad_cam_pcasvm.studio import export
        >>> explained = export.program(cam, images, size=(32, 32)).module()(images)
        >>> explained["maps"].shape, explained["label"].shape
        (torch.Size([2, 4, 32, 32]), torch.Size([2]))
    """
    cam = choose_errors(cam, errors)
    exported, maps, x = traced_program(cam, images, targets, size)
    with torch.no_grad():
        checked(exported.module(), cam, maps, x, size, "the program", ["report this network"])
    return exported


def choose_errors(cam: ClosedFormCAM, errors: bool) -> ClosedFormCAM:
    """Return a method whose maps have standard errors, or none.

    Raises:
        ValueError: there are to be some, and the head has no resampled heads.
    """
    if errors and getattr(getattr(cam.model, "head", None), "resamples", None) is None:
        raise ValueError(
            "there are no errors to tell, as the head has no resampled heads: fit the model with some, "
            "fit_model(..., resample=30), give it some, net.head.resamples = resample_heads(pipeline, features, "
            "labels), or leave out errors=True"
        )
    chosen = copy(cam)
    if isinstance(cam, ClosedFormCAM):
        chosen.has_errors = errors and cam.has_errors
    return chosen


def traced_program(
    cam: ClosedFormCAM,
    images: Tensor,
    targets: Sequence[Target] | Target | None,
    size: Sequence[int] | None,
    table: Mapping[Any, Callable[..., Any]] | None = None,
) -> tuple[ExportedProgram, SignedMaps, Tensor]:
    """Return the program, the maps of the images that it was tried on, and these images as the network takes them.

    Args:
        cam: the method.
        images: images to try the program on.
        targets: the targets, or None.
        size: (H, W) of the maps, or None.
        table: what to put in the place of operations, by operation.

    Raises:
        NoProgramError: as for :func:`program`.
        TypeError: ``cam`` is not a method.
        ValueError: as for ``explain``, or the precision is not single.
    """
    if not isinstance(cam, ClosedFormCAM):
        raise TypeError(
            f"a program is made of a method such as ContributionCAM(net, [layer]), got {type(cam).__name__}"
        )
    name = type(cam).__name__
    if isinstance(cam, PerturbationCAM):
        raise NoProgramError(
            f"{name} runs each image on its own, many times, which cannot be exported as one program",
            "export ContributionCAM, or a gradient method",
        )
    x = one_input(checked_images(images, cam.model), "a program").to(find_device(cam.model))
    kinds = {x.dtype, *(value.dtype for value in cam.model.parameters() if value.is_floating_point())}
    if kinds != {torch.float32} or torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            "a program computes in single precision (the head in double, as always): use net.float() and "
            "images.float(), outside of autocast"
        )
    with keep_every_choice():
        maps = cam.explain(x, targets)
    _refuse(cam, maps)
    graph, names = _graph(cam, x, maps.targets, size, table)
    exported = torch.export.export(
        _Named(graph, names), (x.new_zeros(_BATCH, *x.shape[1:]),),
        dynamic_shapes={"images": {0: Dim("batch")}}, strict=False,
    )  # fmt: skip
    return exported, maps, x


class _Named(nn.Module):
    """A graph whose outputs have names."""

    def __init__(self, graph: GraphModule, names: Sequence[str]) -> None:
        super().__init__()
        self.explained, self._names = graph, names

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._names, self.explained(images), strict=True))


def _no_autograd() -> NoProgramError:
    return NoProgramError(
        "a program has no autograd, and the path from the target layer to the features needs it",
        "choose a later target layer",
        "use jacobian='closed_form', which names the step without a closed form",
    )


def _refuse(cam: ClosedFormCAM, maps: SignedMaps) -> None:
    """Refuse maps that need autograd."""
    if cam.jacobian == "autograd":
        raise _no_autograd()
    foreign = next((target for target in maps.targets if not isinstance(target, ClosedFormTarget)), None)
    if foreign is not None:
        raise NoProgramError(
            f"{foreign!r} is a function of your own, which autograd differentiates, and a program has none",
            "use SVMTarget, PCATarget or another target of this package",
        )


class _Tangents(DispatchMode):
    """Gives zeros of forward derivatives the layout of their numbers; torch before 2.15 cannot for symbolic sizes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._new_zeros_with_same_feature_meta.default:
            like, shaped = args
            zeros = like.new_zeros(shaped.untyped_storage().nbytes() // shaped.itemsize)
            return zeros.as_strided(shaped.shape, shaped.stride(), shaped.storage_offset())
        return func(*args, **(kwargs or {}))


def _graph(
    cam: ClosedFormCAM,
    x: Tensor,
    targets: Sequence[Target],
    size: Sequence[int] | None,
    table: Mapping[Any, Callable[..., Any]] | None,
) -> tuple[GraphModule, list[str]]:
    """Return the graph of ``explain``, with copies of all weights, and the names of its outputs."""
    shapes, names = ShapeEnv(), list[str]()
    fake = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    fake.cache_enabled = False  # which loses the derivatives of views
    dims = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (x.dim() - 1)
    example = fake.from_tensor(
        torch.empty(_BATCH, *x.shape[1:], device=x.device), symbolic_context=StatelessSymbolicContext(dims)
    )

    def run(images: Tensor) -> tuple[Tensor, ...]:
        outputs = name_outputs(cam.explain(images, targets), size)
        names[:] = outputs
        return tuple(outputs.values())

    network = type(cam.model).__name__
    try:
        # Of attention, only that in single operators is in ONNX.
        with traced(), fake, _Tangents(), enable_python_dispatcher(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            graph = make_fx(run, table, _allow_non_fake_inputs=True)(example)
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        raise NoProgramError(
            f"{_place(error)} decides by the value of a number, so another image may take other steps than a program",
            "take the decision out of the network",
            "explain images in Python, cam.explain(images), which runs the network itself",
        ) from error
    except NoClosedFormError as error:
        if cam.jacobian == "auto":  # which would use autograd here
            raise _no_autograd() from error
        raise
    except NoProgramError:
        raise
    except Exception as error:  # whatever torch's tracer cannot do
        raise NoProgramError(
            f"{type(cam).__name__} cannot be traced through {network} ({str(error).splitlines()[0]})",
            "if the network does that, write it with torch's functions of tensors",
            "if its derivative does, choose a later target layer",
            "export a gradient method such as ClosedFormGradCAM",
        ) from error
    if shapes.replacements:
        raise NoProgramError(
            f"something in {network}, as len(x), int(x.shape[0]) or a loop over images, or a second derivative of "
            f"{type(cam).__name__}, is traced for {_BATCH} images only",
            "use x.shape[0], which is a symbol then",
            "where it is a second derivative, export ContributionCAM or ClosedFormGradCAM",
        )
    names_by_id = {id(value): name for name, value in [*cam.model.named_parameters(), *cam.model.named_buffers()]}
    weights = {}
    narrow_before_expanding(graph.graph)
    plain_softmaxes(graph.graph)
    plain_zeros(graph.graph)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, node.target)
        node.target = names_by_id.get(id(value), node.target).replace(".", "_")
        weights[node.target] = nn.Buffer(value.detach().clone())
    return GraphModule(weights, graph.graph), names


def _place(error: BaseException) -> str:
    """Return where in the network it happened."""
    package, libraries = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((package, libraries)) and f.line]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].line})" if own else "the network"
