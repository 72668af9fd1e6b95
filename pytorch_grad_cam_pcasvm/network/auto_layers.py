"""The trunk of a backbone: the layers that everything passes, one after another, and the last of each map size."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.features import FeatureSource, output_of
from pytorch_grad_cam_pcasvm.network.inputs import Inputs, pick_images
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, list_modules
from pytorch_grad_cam_pcasvm.network.tiling import Tiled
from pytorch_grad_cam_pcasvm.runtime.rollback import hooked

_NAMED = 3  # layers, where another is to be chosen
_FINE = 8, 16  # pixels of a position


def find_last_blocks(backbone: nn.Module, source: FeatureSource, x: Tensor) -> list[str]:
    """Return the last layer of every map size on the way to the features, from the finest to the coarsest.

    Of a transformer it is a norm before an attention; where all sizes are the same, the last two of these. Of a network
    with several inputs it is the last of each branch.

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
    norms = [name for name in norms_before_attention(backbone) if name in passed]
    if norms:
        of_size = {tuple(passed[name][1].shape[1:-1]): name for name in norms}  # the last of each
        return [list(of_size.values()) if len(of_size) > 1 else norms[-2:]]
    branches = []
    for name, module in _branches(backbone, x, passed):
        by_size: dict[tuple[int, ...], str] = {}
        for child in _trunk(module, name, passed):
            output = passed[child][1]
            size = tuple(output.shape[2:])
            if size and max(size) > 1 and output.dim() in {image.dim() for image in pick_images(x)}:
                by_size.pop(size, None)  # so that the last one counts, also in the order
                by_size[size] = child
        branches += [list(by_size.values())] if by_size else []
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
    return [name for name, (_, output) in passed.items() if "norm" in kinds[name] and output.dim() > 2][-1]


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
    strides = {name: x.shape[-1] / passed[name][1].shape[-1] for name in find_last_blocks(backbone, FeatureSource(), x)}
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


def _branches(
    backbone: nn.Module, x: Any, passed: dict[str, tuple[Sequence[Any], Tensor]]
) -> list[tuple[str, nn.Module]]:
    """Return the backbone; of several inputs, the outermost modules that take one of them, by name."""
    if not isinstance(x, Inputs):
        return [("", backbone)]
    takers = [name for name, (args, _) in passed.items() if any(arg is image for arg in args for image in x.images)]
    outermost = [name for name in takers if name and not any(name.startswith(f"{other}.") for other in takers if other)]
    return [(name, backbone.get_submodule(name)) for name in outermost]


def norms_before_attention(backbone: nn.Module) -> list[str]:
    """Return the names of the norms before attentions, in the order of the blocks."""
    norms = []
    for name, module in backbone.named_modules():
        children = [child for child, inner in module.named_children() if next(inner.parameters(), None) is not None]
        attention = next((place for place, child in enumerate(children) if "att" in child), None)
        norm = next((place for place, child in enumerate(children) if re.search("norm|ln", child)), None)
        if attention is None or norm is None:
            continue
        # Declared behind it, it is in front of it all the same if it is the first of two, but for torch's own layer.
        behind = isinstance(module, nn.TransformerEncoderLayer) and not module.norm_first
        if norm < attention or (children[norm].endswith("1") and not behind):
            norms.append(f"{name}.{children[norm]}".lstrip("."))
    return norms


def _passed(
    backbone: nn.Module, source: FeatureSource, x: Tensor
) -> tuple[dict[str, tuple[Sequence[Any], Tensor]], list[str]]:
    """Return the arguments and the output of each module that runs once, in the order in which they end.

    Modules that do not return one tensor are left out; the names of those that run several times come after it.
    """
    passed: dict[str, tuple[Sequence[Any], Tensor]] = {}
    names = {module: name for name, module in backbone.named_modules()}
    twice = dict[str, None]()

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = names[module]
        if name in passed:
            twice[name] = None
        if isinstance(output, Tensor):
            passed[name] = args, output

    with hooked() as hooks, torch.no_grad():
        for module in list_modules(backbone):
            hooks.after(module, note)
        output_of(backbone, source, x, ends=True)
    return {name: call for name, call in passed.items() if name not in twice}, list(twice)


def _trunk(module: nn.Module, name: str, passed: dict[str, tuple[Sequence[Any], Tensor]]) -> list[str]:
    """Return the names of a module's children that everything passes through, plain sequences taken apart."""
    names = {f"{name}.{child}".lstrip("."): inner for child, inner in module.named_children()}
    order = [child for child in passed if child in names]  # in which they ended
    trunk = []
    for place, child in enumerate(order):
        earlier = [passed[other][1] for other in order[:place]]
        followed = order[place + 1 : place + 2]
        first_output = passed[followed[0]][0] if followed else ()
        # What follows takes something from before: this is one of several ways.
        if any(item is tensor for item in first_output for tensor in earlier):
            continue
        inner = names[child]
        trunk += [*(_trunk(inner, child, passed) if isinstance(inner, nn.Sequential) else []), child]
    # The features may come from the middle of a sequence, which then has not ended.
    unended = [child for child, inner in names.items() if child not in passed and isinstance(inner, nn.Sequential)]
    return trunk + [block for child in unended for block in _trunk(names[child], child, passed)]
