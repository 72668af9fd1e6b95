"""The trunk of a backbone: the layers that everything passes, one after another, and the last of each map size."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.features import FeatureSource, flatten, output_of
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, pick_images
from pytorch_grad_cam_pcasvm.network.keras_network import KerasNetwork, is_keras
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, list_modules
from pytorch_grad_cam_pcasvm.network.runner import Visit
from pytorch_grad_cam_pcasvm.network.tiling import Tiled
from pytorch_grad_cam_pcasvm.runtime.rollback import hooked
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_leaves, tree_tensors

_NAMED = 3  # layers, where another is to be chosen
_FINE = 8, 16  # pixels of a position
_BYPASSED = 1e-3  # of the difference of two images' features: what may come of rounding


def find_last_blocks(backbone: nn.Module, source: FeatureSource, x: Tensor) -> list[str]:
    """Return the last layer of every map size on the way to the features, from the finest to the coarsest.

    Of a transformer it is a norm before an attention, or where a named pool takes features from patches alone, the
    block of one; where all sizes are the same, the last two of these. Of a network with several inputs it is the last
    of each branch.

    Args:
        backbone: the network, in evaluation mode.
        source: where its features come from.
        x: images, shape (N, ...).

    Returns:
        Dotted names of layers with more than one position.

    Raises:
        ValueError: there is none.

    Example:
        >>> find_last_blocks(backbone, FeatureSource.of(backbone, None), images)
        ['layer1', 'layer2']
    """
    return [name for branch in last_blocks_by_branch(backbone, source, x) for name in branch]


def last_blocks_by_branch(backbone: nn.Module, source: FeatureSource, x: Tensor) -> list[list[str]]:
    """Return the :func:`find_last_blocks` of each branch of a network: of one with several inputs there are several."""
    x = x[:1]
    if isinstance(backbone, Tiled):
        branches = last_blocks_by_branch(*_look_at_tiles(backbone, x))
        return [[backbone.prefix + name for name in branch] for branch in branches]
    passed, _ = _passed(backbone, source, x)
    norms = [name for name in norms_before_attention(backbone) if name in passed and passed[name].is_tensor]
    if all(part.of_patches for part in source.parts or (source,)):  # part of which passes a norm by
        blocks = [norm.rpartition(".")[0] for norm in norms]
        norms = [name for name in blocks if name in passed and passed[name].is_tensor] or norms
    if norms:
        of_size = {tuple(passed[name].output.shape[1:-1]): name for name in norms}  # the last of each
        return [list(of_size.values()) if len(of_size) > 1 else norms[-2:]]
    branches = list[list[str]]()
    for more in (0, 1):  # axes than the images have: a signal whose electrodes are added up as a picture, (N, T, 1, L)
        dims = {image.dim() + more for image in pick_images(x)}
        for name, module in () if branches else _branches(backbone, x, passed):
            by_size: dict[tuple[int, ...], str] = {}
            sure_of_all = not isinstance(module, KerasNetwork)  # whose taps do not tell what they take
            for child, sure in reversed(_trunk(module, name, passed, sure_of_all)):  # the last one of each size counts
                output = passed[child].output
                size = tuple(output.shape[2:])
                is_foreign = is_keras(backbone.get_submodule(child))  # whose channels are where Keras has them
                mappable = (
                    size and not is_foreign and max(size) > 1 and output.dim() in dims and (1 in size or not more)
                )
                if mappable and size not in by_size and (sure or _is_passed(backbone, source, x, child)):
                    by_size[size] = child
            branches += [list(by_size.values())[::-1]] if by_size else []
    if not branches:
        raise ValueError("no layer of this backbone has positions that a map could be made of: name the target layers")
    return branches


def last_features(backbone: nn.Module, x: Tensor) -> str:
    """Return the layer that features come from where none is named: the last block; of a transformer its last norm.

    Args:
        backbone: the network, in evaluation mode.
        x: images, shape (N, ...).

    Raises:
        ValueError: no block has positions.
    """
    whole = FeatureSource()
    blocks = find_last_blocks(backbone, whole, x)
    if not norms_before_attention(backbone):
        return blocks[-1]
    passed, _ = _passed(backbone, whole, x[:1])
    kinds = {name: type(module).__name__.lower() for name, module in backbone.named_modules()}
    return [
        name for name, call in passed.items() if "norm" in kinds[name] and call.is_tensor and call.output.dim() > 2
    ][-1]


def refuse_unmappable(
    backbone: nn.Module, source: FeatureSource, layers: Sequence[str], x: Any, form: str = "the layer {!r}"
) -> None:
    """Refuse layers that cannot have maps: they do not run before the features, or have no positions.

    Args:
        backbone: the network.
        source: where its features come from.
        layers: their names.
        x: images of the kind to come, shape (N, ...).
        form: of a layer in messages.

    Raises:
        ValueError: there is one; the message names layers that do.
    """
    names = [name for name, _ in backbone.named_modules() if name]
    before: dict[str, Any] = {}
    with evaluation_mode(backbone), torch.no_grad(), hooked() as hooks:
        for name in {*names, *layers}:
            hooks.after_call(backbone, name, before.__setitem__)
        output_of(backbone, source, x, ends=True)
    for layer in layers:
        output = before.get(layer)
        flat = isinstance(output, Tensor) and output.dim() < 3
        if layer in before and not flat:
            continue
        problem = "has no positions on the image" if flat else f"does not run before the features, {source}"
        able = [name for name, tensor in before.items() if isinstance(tensor, Tensor) and tensor.dim() > 2]
        block = able[-1].rpartition(".")[0] if able else ""
        last = [name for name in able if name.rpartition(".")[0] == block][-_NAMED:]
        hint = f": name a layer that does, such as {', '.join(last)}" if last else ""
        raise ValueError(f"{form.format(layer)} {problem}{hint}")


def fine_features(backbone: nn.Module, x: Tensor) -> list[str]:
    """Return the layers that features of patches come from where none is named: the last blocks at strides 8 and 16.

    Args:
        backbone: the network, in evaluation mode.
        x: images, shape (N, C, H, W).

    Returns:
        Their names, the finer one first; empty: there are none, as in a transformer.
    """
    if norms_before_attention(backbone):
        return []
    passed, _ = _passed(backbone, FeatureSource(), x[:1])
    strides = {
        name: x.shape[-1] / passed[name].output.shape[-1] for name in find_last_blocks(backbone, FeatureSource(), x)
    }
    return [name for name, stride in strides.items() if round(stride) in _FINE]


def repeated_blocks(backbone: nn.Module, source: FeatureSource, x: Tensor) -> list[str]:
    """Return the names of blocks with weights that run several times on the way to the features, the outermost ones.

    Args:
        backbone: the network, in evaluation mode.
        source: where its features come from.
        x: images, shape (N, ...).
    """
    if isinstance(backbone, Tiled):
        return [backbone.prefix + name for name in repeated_blocks(*_look_at_tiles(backbone, x[:1]))]
    _, repeated = _passed(backbone, source, x[:1])
    with_weights = [name for name in repeated if next(backbone.get_submodule(name).parameters(), None) is not None]
    return [name for name in with_weights if not any(name.startswith(f"{other}.") for other in with_weights) and name]


def _look_at_tiles(backbone: Tiled, x: Tensor) -> tuple[nn.Module, FeatureSource, Tensor]:
    """Return the network that runs on tiles, the source of its features, and the first tile of images."""
    tile = backbone.find_tiling(x).cut(x)[:1]
    return backbone.net, backbone.source.at(backbone.net, tile), tile


def _branches(backbone: nn.Module, x: Any, passed: "dict[str, _Call]") -> list[tuple[str, nn.Module]]:
    """Return the backbone; of several inputs, the outermost modules that take one of them, by name."""
    if not isinstance(x, Inputs):
        return [("", backbone)]
    takers = [name for name, call in passed.items() if call.is_tensor and call.takes(x.images)]
    outermost = [name for name in takers if name and not any(name.startswith(f"{other}.") for other in takers if other)]
    return [(name, backbone.get_submodule(name)) for name in outermost]


def norms_before_attention(backbone: nn.Module) -> list[str]:
    """Return the names of the norms before attentions, in the order of the blocks."""
    norms = []
    for name, module in backbone.named_modules():
        children = [child for child, inner in module.named_children() if next(inner.parameters(), None) is not None]
        attention = next((number for number, child in enumerate(children) if "att" in child), None)
        norm = next((number for number, child in enumerate(children) if re.search("norm|ln", child)), None)
        if attention is None or norm is None:
            continue
        # Declared behind it, it is in front of it all the same if it is the first of two, but for torch's own layer.
        behind = isinstance(module, nn.TransformerEncoderLayer) and not module.norm_first
        if norm < attention or (children[norm].endswith("1") and not behind):
            norms.append(f"{name}.{children[norm]}".lstrip("."))
    return norms


@dataclass(frozen=True)
class _Call:
    """A call of a module.

    Attributes:
        args: its arguments.
        output: what it returned.
    """

    args: Any
    output: Any

    @property
    def is_tensor(self) -> bool:
        """Whether it returned one tensor."""
        return isinstance(self.output, Tensor)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the output, as an encoder returns one for each size of maps."""
        return tree_tensors(self.output)

    def takes(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether some of these tensors are among the arguments."""
        ids = set(map(id, tensors))
        return any(id(leaf) in ids for leaf in tree_leaves(self.args))


def _passed(backbone: nn.Module, source: FeatureSource, x: Tensor) -> tuple[dict[str, _Call], list[str]]:
    """Return the calls of modules that run once, in the order in which they end, and the names of the others.

    Those that have begun and not ended, as the features come from their middle, come last.
    """
    passed: dict[str, _Call] = {}
    names = {module: name for name, module in backbone.named_modules()}
    began, twice = dict[str, Any](), dict[str, None]()

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = names[module]
        if name in passed:
            twice[name] = None
        passed[name] = _Call((args, kwargs), output)

    with hooked() as hooks, torch.no_grad():
        for module in list_modules(backbone):
            hooks.before(module, lambda module, *args: began.setdefault(names[module], args))
            hooks.after(module, note)
        output_of(backbone, source, x, ends=True)
    unended = {name: _Call(args, None) for name, args in began.items() if name not in passed}
    return {name: call for name, call in (passed | unended).items() if name not in twice}, list(twice)


def _trunk(module: nn.Module, name: str, passed: dict[str, _Call], sure: bool = True) -> list[tuple[str, bool]]:
    """Return the names of a module's children that everything passes through, and whether that is sure.

    Plain sequences are taken apart. So are modules that do not run themselves, such as lists, those that do not return
    one tensor, as encoders do, and those that have not ended: what they do with the parts has to be tried.
    """
    names = _list_children(module, name, passed)
    order = [child for child in passed if child in names]  # in which they ended
    trunk = []
    for number, child in enumerate(order):
        call = passed[child]
        earlier = [
            tensor
            for other in order[:number]
            for tensor in passed[other].tensors
            if passed[other].is_tensor or tensor is not call.output  # picked out of several
        ]
        # What follows takes something from before: this is one of several ways.
        if any(passed[followed].takes(earlier) for followed in order[number + 1 : number + 2]):
            continue
        inner, is_tensor = names[child], call.is_tensor
        known = sure and child.rpartition(".")[0] == name
        if isinstance(inner, nn.Sequential) or not is_tensor:
            trunk += _trunk(inner, child, passed, known and isinstance(inner, nn.Sequential))
        trunk += [(child, known)] if is_tensor else []
    return trunk


def _list_children(module: nn.Module, name: str, passed: dict[str, _Call]) -> dict[str, nn.Module]:
    """Return the children of a module by full name; a child that does not run is replaced by its own children."""
    children: dict[str, nn.Module] = {}
    for child, inner in module.named_children():
        full = f"{name}.{child}".lstrip(".")
        children |= {full: inner} if full in passed else _list_children(inner, full, passed)
    return children


def _is_passed(backbone: nn.Module, source: FeatureSource, x: Any, name: str) -> bool:
    """Return whether nothing bypasses a layer: its output for another image leads to the features of that image."""
    if isinstance(x, Inputs):
        return False
    other = torch.randn(x.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(x)
    kept = list[Tensor]()

    def features(images: Tensor, visit: Visit = lambda *_: None) -> Tensor:
        return flatten(output_of(backbone, source, images, {name: visit}, ends=True))

    with torch.no_grad():
        own, expected = features(x), features(other, lambda _, output: kept.append(output.clone()))
        mixed = features(x, lambda *_: kept[0])
    return float((mixed - expected).norm()) <= _BYPASSED * float((own - expected).norm())
