"""Rewrites of a graph: operations that cost nothing in torch but much in ONNX, or that ONNX lacks."""

import torch
from torch.fx import Graph, Node

_aten = torch.ops.aten


def narrow_before_expanding(graph: Graph) -> None:
    """Narrow before expanding, which is a view in torch but in ONNX a copy of everything, to keep one number of it."""
    for node in graph.find_nodes(op="call_function", target=_aten.slice.Tensor):
        source, dim, *limits = (*node.args, 0)[: max(2, len(node.args))]
        if source.target is not _aten.expand.default or limits != [0, 1] or "val" not in source.args[0].meta:
            continue
        value, sizes = source.args[0], list(source.args[1])
        shape = value.meta["val"].shape
        dim %= len(sizes)
        own = dim - len(sizes) + len(shape)
        if own < 0 or shape[own] == 1:
            sizes[dim] = 1
            with graph.inserting_before(node):
                narrow = graph.call_function(_aten.expand.default, (value, sizes))
            narrow.meta = dict(node.meta)
            node.replace_all_uses_with(narrow)


def plain_softmaxes(graph: Graph) -> None:
    """Take the softmax of attention without a mask as it is: only a mask can leave rows of minus infinity."""
    for node in graph.find_nodes(op="call_function", target=_aten._safe_softmax.default):
        scores, dim, *dtype = node.args
        if not dtype and _behind_views(scores).target is _aten.bmm.default:
            node.target, node.args = _aten._softmax.default, (scores, dim, False)


def plain_zeros(graph: Graph) -> None:
    """Take zeros as they are, whatever their layout was while derivatives were traced."""
    strided = graph.find_nodes(op="call_function", target=_aten.as_strided.default)
    for node in strided:
        zeros, shape, *_ = node.args
        alone = len(zeros.users) == 1 and not any(user in strided for user in node.users)  # nobody writes beside it
        if zeros.target is _aten.new_zeros.default and zeros not in strided and alone:
            node.target, node.args, node.kwargs = _aten.new_zeros.default, (zeros.args[0], shape), zeros.kwargs


def _behind_views(node: Node) -> Node:
    while node.target in (_aten.view.default, _aten._unsafe_view.default, _aten.mul.Scalar):
        node = node.args[0]  # type: ignore[assignment]
    return node
