"""Stem and path: a network split at its target layer.

The *stem* takes the input to the target layer's activations, the *path* takes these to the features. ``Path`` reads
both from a ``torch.fx`` trace and pulls gradients back through the path in closed form; ``AutogradPath`` does the
same with hooks and autograd, for networks that cannot be traced or whose path has a layer without a rule.
"""

import inspect
import math
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
import torchvision
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from pytorch_grad_cam_pcasvm import rules as layers
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.features import features_of, flatten
from pytorch_grad_cam_pcasvm.modules import uncompiled


class Pass(Protocol):
    """One forward pass, ready for pullbacks."""

    activations: list[Tensor]
    features: Tensor

    def pullback(self, grad: Tensor, target: int) -> Tensor:
        """Return the derivative with respect to ``activations[target]``.

        Args:
            grad: derivative of K targets with respect to the features, shape (N, K, D).
            target: position of the target layer.

        Returns:
            The derivative, shape (N, K, *activations.shape[1:]).
        """

    def weights(self, grad: Tensor, target: int) -> Tensor:
        """Return the sum of ``pullback`` over the positions of every channel, shape (N, K, T)."""

    def bytes_per_target(self) -> int:
        """Return about how much memory one target takes for the batch."""


class Path:
    """The closed-form path from one or more target layers to the features.

    Args:
        backbone: the network.
        layer: dotted name of the feature layer; None: the network's output.
        targets: dotted names of the target layers.

    Raises:
        NoClosedFormError: the network cannot be traced, a layer has no rule, or there is a way around a target layer.
        ValueError: a target layer is not on the way to the features.
    """

    def __init__(self, backbone: nn.Module, layer: str | None, targets: Sequence[str]) -> None:
        self._backbone, self._layer, self._targets = backbone, layer, list(targets)
        tracer = _Tracer(backbone, layer)
        graph = tracer.trace_backbone()
        self._constants = tracer.constants
        self.modules = dict(backbone.named_modules())
        features = list(graph.nodes)[-1].args[0] if layer is None else tracer.node(layer)
        if isinstance(features, list | tuple) and len(features) == 1:
            features = features[0]  # how fx returns one tensor where an argument with a default was filled in
        if not isinstance(features, fx.Node):
            raise NoClosedFormError(*_advice("the network's output is not one tensor", "name a layer"))
        self.features = features
        needed = _ancestors([features])
        order = [node for node in graph.nodes if node in needed]
        self.targets = [self._target_node(tracer, name, needed) for name in self._targets]
        first = min(self.targets, key=order.index)
        sizes = _size_nodes(order)
        dynamic = _descendants([node for node in order if node.op == "placeholder"], order) - sizes
        self.paths = [_descendants([target], order) - sizes for target in self.targets]
        for name, target, path in zip(self._targets, self.targets, self.paths, strict=True):
            for node in order:
                if node in path and node is not target:
                    self._check(name, node, path, dynamic)
        # The stem is what the first target layer needs; sizes of the input may be needed behind it, too.
        stem = _ancestors([
            first,
            *(node for node in order if node in sizes and node not in _descendants([first], order)),
        ])
        self._stem = [node for node in order if node in stem]
        self.rest = [node for node in order if node not in stem]
        self._check_inplace(graph, needed)
        self._kept_inputs = {node for node in self.rest if _is_inplace(node, self.modules)}
        # Nearly every node is a module called on one value: no time need be lost on its arguments.
        self._plain = {
            node: (self.modules[str(node.target)], node.args[0])
            for node in order
            if node.op == "call_module"
            and node.args == tuple(node.all_input_nodes)
            and len(node.args) == 1
            and not node.kwargs
            and node not in self._kept_inputs
        }
        self._last_use = _last_uses(
            self._stem, keep={*self.targets, *(a for n in self.rest for a in n.all_input_nodes)}
        )
        self._containers = [m for m in backbone.modules() if m._modules or not tracer.is_leaf(m)]
        self._leaves = [m for m in backbone.modules() if not m._modules]
        self._identity = self._current_identity()
        self.presummed: dict[fx.Node, _Presummed] = {}
        self._verified = False

    def stale(self) -> bool:
        """Return whether what was traced has changed: modules, their hooks, or numbers that a forward uses."""
        return any(m._modules for m in self._leaves) or self._identity != self._current_identity()

    def _current_identity(self) -> list[Any]:
        # Leaf modules are called as they are; of all others a trace keeps children, hooks and numbers.
        identity: list[Any] = []
        for module in self._containers:
            state = vars(module)
            for kind in _TRACED:
                identity += state[kind].values()
            if len(state) > len(_OF_EVERY_MODULE):
                own = (value for name, value in state.items() if name not in _OF_EVERY_MODULE)
                identity += [value for value in own if isinstance(value, _NUMBERS)]
        return identity

    def _check_inplace(self, graph: fx.Graph, needed: set[fx.Node]) -> None:
        """Refuse in-place layers whose result is not used (a trace drops them), or on the path their input again."""
        position = {node: index for index, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            if not node.all_input_nodes or not _is_inplace(node, self.modules):
                continue
            overwritten = node.all_input_nodes[0]
            dropped = node not in needed and overwritten in needed
            # The stem runs in place as the network does; the path runs on copies.
            again = node in self.rest and any(
                position[user] > position[node] for user in overwritten.users if user in needed
            )
            if dropped or again:
                raise NoClosedFormError(
                    *_advice(
                        f"{node.name} works in place on a tensor that is used again",
                        "write it without in-place, as in x = torch.relu(x)",
                    )
                )

    def _target_node(self, tracer: "_Tracer", name: str, needed: set[fx.Node]) -> fx.Node:
        node = tracer.node(name)
        if node not in needed:
            where = "the network's output" if self._layer is None else f"the features, {self._layer!r}"
            raise ValueError(f"the target layer {name!r} does not lead to {where}: choose a layer before them")
        return node

    def _check(self, name: str, node: fx.Node, path: set[fx.Node], dynamic: set[fx.Node]) -> None:
        """Refuse a node of the path that has no rule, or that joins in something else than the target layer."""
        kind = self._without_rule(node)
        if kind is not None:
            is_module = node.op == "call_module"
            register = f"register its Jacobian with @register_jacobian({kind})" if is_module else None
            what = f"{node.target!r} ({kind})" if is_module else kind
            raise NoClosedFormError(
                *_advice(
                    f"the path from {name!r} to the features goes through {what}, which has no closed-form rule",
                    "choose a later target layer",
                    register,
                )
            )
        around = [arg for arg in node.all_input_nodes if arg in dynamic and arg not in path]
        if around:
            raise NoClosedFormError(
                *_advice(
                    f"the target layer {name!r} is not the only way to the features: {around[0].target!s} goes around "
                    f"it and joins at {node.name}",
                    "choose the block that contains the join",
                )
            )

    def _without_rule(self, node: fx.Node) -> str | None:
        """Return the name of what a node calls if it has no rule, else None."""
        if node.op == "call_module":
            kind = type(self.modules[str(node.target)])
            return None if layers.rule_kind(kind) else kind.__name__
        if node.op == "get_attr" or layers.reading_of(node.target) is not None:
            return None
        return getattr(node.target, "__name__", str(node.target))

    def run(self, x: Tensor) -> "ClosedFormPass":
        """Run the network once, up to the features.

        Args:
            x: input, shape (N, ...).

        Returns:
            The pass.

        Raises:
            NoClosedFormError: the traced path does not give the network's own features.
        """
        if not self._verified:
            self._verify(x[:2])
        return self._run(x)

    def _run(self, x: Tensor) -> "ClosedFormPass":
        env: dict[fx.Node, Any] = {}
        for node in self._stem:
            env[node] = self._call(node, env, x)
            for used in self._last_use.get(node, ()):
                del env[used]
        for node in self.rest:
            env[node] = self._call(node, env, x)
        return ClosedFormPass(self, env)

    def _call(self, node: fx.Node, env: dict[fx.Node, Any], x: Tensor) -> Any:
        if node in self._plain:
            module, value = self._plain[node]
            return module(env[value])
        if node.op == "placeholder":
            return x if not node.args else node.args[0]
        if node.op == "get_attr":
            name = str(node.target)
            return self._constants[name] if name in self._constants else operator.attrgetter(name)(self._backbone)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node in self._kept_inputs:
            # What it would overwrite is needed again: by the maps, or by a rule.
            args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
        if node.op == "call_module":
            return self.modules[str(node.target)](*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _verify(self, x: Tensor) -> None:
        """Hold the path against the network and autograd, once: a hook or a branch on the input escapes a trace."""
        reference = AutogradPath(self._backbone, self._layer, self._targets).run(x)
        actual = self._run(x)
        if not bool(reference.features.isfinite().all()):
            return  # nothing to compare with; the maps will not be finite either
        floats = [v.dtype for v in actual.env.values() if isinstance(v, Tensor) and v.is_floating_point()]
        eps = max(torch.finfo(dtype).eps for dtype in floats)
        if x.device.type != "cpu" and torch.float32 in floats:
            eps = max(eps, 2.0**-10)  # TensorFloat-32
        tolerance = eps**0.5
        if not _close(actual.features, reference.features, tolerance):
            raise NoClosedFormError(
                *_advice(
                    "the traced path does not give the network's own features (a hook, a branch on the input, or "
                    "dropout that is always on?)"
                )
            )
        dtype = torch.promote_types(actual.features.dtype, torch.float32)
        seed = torch.linspace(-1, 1, actual.features[0].numel(), device=x.device, dtype=dtype).expand(len(x), 1, -1)
        for target, name in enumerate(self._targets):
            pulled, weights = actual.pullback(seed, target), actual.weights(seed, target)
            try:
                expected = reference.pullback(seed, target)
            except RuntimeError:
                continue  # autograd cannot differentiate a layer: its registered rule is all there is
            sums = expected.reshape(*weights.shape, -1).sum(-1)
            if not _close(pulled, expected, tolerance) or not _close(weights, sums, tolerance):
                raise NoClosedFormError(
                    *_advice(
                        f"the Jacobian of the path from {name!r} differs from autograd's (a hook, or a wrong rule or "
                        "keeps_sums in @register_jacobian?)"
                    )
                )
        self._verified = True


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether two tensors agree, relative to their size."""
    if actual.shape != expected.shape:
        return False
    return bool((actual - expected).float().norm() <= tolerance * expected.float().norm())


class ClosedFormPass:
    """One forward pass of a :class:`Path` with the values its rules need."""

    def __init__(self, path: Path, env: dict[fx.Node, Any]) -> None:
        self._path, self.env = path, env
        self.activations: list[Tensor] = [env[node] for node in path.targets]
        self.features: Tensor = flatten(env[path.features])

    def pullback(self, grad: Tensor, target: int) -> Tensor:
        """Return the derivative with respect to ``activations[target]``, shape (N, K, *activations.shape[1:])."""
        return self._pullback(grad, self._path.targets[target], self._path.paths[target])

    def _pullback(self, grad: Tensor, until: fx.Node, path: set[fx.Node]) -> Tensor:
        """Pull ``grad`` (N, K, D) back from the features to the output of the node ``until``."""
        last = self._path.features
        grads = {last: grad.unflatten(2, self.env[last].shape[1:])}
        for node in reversed(self._path.rest):
            if node is until:
                break
            if node not in grads or node not in path:
                continue
            kind, layer, inputs = self._read(node, path)
            values = tuple(self._value(item) for item in inputs)
            x = values if len(values) > 1 else values[0]
            pulled = layers.rule_of(kind)(layer, x, self.env[node], grads.pop(node))
            for item, part in zip(inputs, pulled if len(values) > 1 else (pulled,), strict=True):
                if isinstance(item, fx.Node):
                    expected = (*grad.shape[:2], *self.env[item].shape[1:])
                    if part.shape != expected:
                        raise NoClosedFormError(
                            *_advice(f"the rule of {kind.__name__} gives the shape {tuple(part.shape)}, not {expected}")
                        )
                    grads[item] = grads[item] + part if item in grads else part
        return grads[until]

    def weights(self, grad: Tensor, target: int) -> Tensor:
        """Return the sum of the pullback over the positions of every channel, shape (N, K, T).

        Layers that keep such sums (flatten, dropout, pooling) are passed without a pullback, and the sum moves into the
        weight of a first dense layer: W1 (D1, T H W) becomes (D1, T).
        """
        path, node = self._path.paths[target], self._path.targets[target]
        channels = self.env[node].shape[1]
        while (user := self._only_user(node, path)) is not None:
            kind, layer, _ = self._read(user, path)
            if kind is nn.Linear and self.env[node].dim() == 2:
                summed = self._presummed(user, layer.weight, channels, grad.dtype)
                return self._pullback(grad, user, path) @ summed
            if not layers.keeps_sums(kind, layer, self.env[node], self.env[user]):
                break
            node = user
        pulled = self._pullback(grad, node, path)
        pulled = pulled.reshape(*pulled.shape[:2], channels, -1)
        return pulled.squeeze(-1) if pulled.shape[-1] == 1 else pulled.sum(-1)

    def _presummed(self, node: fx.Node, weight: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
        # A small sum costs nothing; on an accelerator it is quick, and looking for changes would wait for the device.
        if weight.numel() < _LARGE or weight.device.type != "cpu" or weight.is_inference():
            return _sums(weight, channels, dtype)
        kept = self._path.presummed.get(node)
        if kept is None or not kept.serves(weight, channels, dtype):
            self._path.presummed[node] = kept = _Presummed.of(weight, channels, dtype)
        return kept.sums

    def _only_user(self, node: fx.Node, path: set[fx.Node]) -> fx.Node | None:
        users = [user for user in node.users if user in path]
        return users[0] if len(users) == 1 and node is not self._path.features else None

    def _read(self, node: fx.Node, path: set[fx.Node]) -> tuple[type, Any, tuple[Any, ...]]:
        """Return a node's registered class, the layer, and its inputs: nodes of the path, or values beside it."""
        if node.op == "call_module":
            module = self._path.modules[str(node.target)]
            kind = layers.rule_kind(type(module))
            assert kind is not None
            return kind, module, tuple(node.all_input_nodes)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg if arg in path else self.env[arg])
        if "input" in kwargs:
            args = (kwargs["input"], *args)
            kwargs = {name: value for name, value in kwargs.items() if name != "input"}
        reading = layers.reading_of(node.target)
        assert reading is not None
        try:
            return reading(*args, **kwargs)
        except TypeError as error:
            raise NoClosedFormError(*_advice(f"the call of {node.name} is not understood ({error})")) from error

    def _value(self, item: Any) -> Any:
        return self.env[item] if isinstance(item, fx.Node) else item

    def bytes_per_target(self) -> int:
        """Return about how much memory one target takes for the batch: a few times the widest value of the path."""
        widest = max(value.numel() for value in self.env.values() if isinstance(value, Tensor))
        return 4 * widest * torch.promote_types(self.features.dtype, torch.float32).itemsize


_LARGE = 1 << 20  # elements


def _sums(weight: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Return a dense layer's weight (D1, T P) summed over the P positions of every channel, shape (D1, T)."""
    return weight.detach().unflatten(1, (channels, -1)).sum(-1, dtype=dtype)


@dataclass(frozen=True)
class _Presummed:
    """The sums of a large weight, kept between calls, and what tells whether the weight has changed since."""

    sums: Tensor
    version: tuple[Any, ...]
    sample: Tensor

    @staticmethod
    def of(weight: Tensor, channels: int, dtype: torch.dtype) -> "_Presummed":
        version = _Presummed._version(weight, channels, dtype)
        return _Presummed(_sums(weight, channels, dtype), version, _Presummed._sample(weight))

    def serves(self, weight: Tensor, channels: int, dtype: torch.dtype) -> bool:
        # weight.data.copy_(...) leaves the version as it was: hence the sample.
        return self.version == self._version(weight, channels, dtype) and torch.equal(self.sample, self._sample(weight))

    @staticmethod
    def _version(weight: Tensor, channels: int, dtype: torch.dtype) -> tuple[Any, ...]:
        return weight.data_ptr(), weight._version, weight.shape, weight.dtype, channels, dtype

    @staticmethod
    def _sample(weight: Tensor) -> Tensor:
        """Return some thousand elements from all over the weight, always the same ones."""
        return weight.detach().reshape(-1)[_sample_positions(weight.numel())]


@lru_cache(maxsize=8)
def _sample_positions(count: int) -> Tensor:
    return torch.randint(count, (1 << 13,), generator=torch.Generator().manual_seed(0))


class AutogradPath:
    """The path by autograd: the stem runs without a graph, what follows the first target layer with one.

    Args:
        backbone: the network.
        layer: dotted name of the feature layer; None: the network's output.
        targets: dotted names of the target layers.
    """

    def __init__(self, backbone: nn.Module, layer: str | None, targets: Sequence[str]) -> None:
        self._backbone, self._layer, self._targets = backbone, layer, list(targets)

    def run(self, x: Tensor) -> "AutogradPass":
        """Run the network once, up to the features.

        Args:
            x: input, shape (N, ...).

        Returns:
            The pass.

        Raises:
            ValueError: a target layer does not run, or not before the features.
        """
        activations: dict[str, Tensor] = {}
        thread = threading.get_ident()

        def split(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, output: Any) -> Any:
                if threading.get_ident() != thread:
                    return None
                if not isinstance(output, Tensor):
                    raise TypeError(f"the target layer {name!r} gives a {type(output).__name__}, not a tensor")
                if name in activations:
                    raise ValueError(f"the target layer {name!r} runs more than once: choose the block around it")
                torch.set_grad_enabled(True)
                # A leaf of its own for the first target, and never the tensor that an in-place layer will overwrite.
                leaf = output.clone() if output.requires_grad else output.detach().clone().requires_grad_()
                activations[name] = leaf
                return leaf.clone()

            return hook

        handles = [self._backbone.get_submodule(name).register_forward_hook(split(name)) for name in self._targets]
        try:
            with torch.inference_mode(False), torch.no_grad():
                features = features_of(self._backbone, self._layer, x.clone() if x.is_inference() else x)
        finally:
            for handle in handles:
                handle.remove()
        missing = [name for name in self._targets if name not in activations]
        if missing:
            raise ValueError(
                f"the target layer {missing[0]!r} does not run before the features: choose a layer before them"
            )
        return AutogradPass([activations[name] for name in self._targets], features)


@dataclass
class AutogradPass:
    """One forward pass of an :class:`AutogradPath`."""

    activations: list[Tensor]
    features: Tensor
    _graph: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Keep the graph apart from what is shown."""
        self._graph = self.features
        self._leaves, self.activations = self.activations, [leaf.detach() for leaf in self.activations]
        self.features = self.features.detach()
        if not self._graph.requires_grad:
            raise ValueError("the features do not depend on the target layer (a detach, or no gradient on the way?)")

    def pullback(self, grad: Tensor, target: int) -> Tensor:
        """Return the derivative with respect to ``activations[target]``, shape (N, K, *activations.shape[1:])."""
        leaf = self._leaves[target]
        # Seeds far below 1 would be lost in a backbone's half precision.
        size = grad.abs().amax((0, 2), keepdim=True)
        size = torch.where(size > 0, size, 1.0)
        with torch.inference_mode(False):
            pulled = [
                torch.autograd.grad(self._graph, leaf, row.clone(), retain_graph=True, allow_unused=True)[0]
                for row in (grad / size).to(self._graph.dtype).unbind(1)
            ]
        stacked = torch.stack([torch.zeros_like(leaf) if part is None else part for part in pulled], 1).to(grad.dtype)
        return stacked * size.reshape(1, -1, *[1] * (stacked.dim() - 2))

    def weights(self, grad: Tensor, target: int) -> Tensor:
        """Return the sum of the pullback over the positions of every channel, shape (N, K, T)."""
        return self.pullback(grad, target).flatten(3).sum(-1)

    def bytes_per_target(self) -> int:
        """Return about how much memory one target takes for the batch."""
        return 4 * max(leaf.numel() * leaf.element_size() for leaf in self._leaves)


_tracing = threading.Lock()


class _Proxy(fx.Proxy):
    """A proxy that sees ``x += y``, which torch.fx records as ``x + y``: a copy of the largest tensors of a ResNet."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


class _Tracer(fx.Tracer):
    """A tracer that remembers every module's outputs, stops behind the feature layer, and leaves everything as it was.

    While it traces, torch.fx replaces ``nn.Module.__call__`` for the whole process: other threads must not notice.
    """

    def __init__(self, backbone: nn.Module, layer: str | None) -> None:
        super().__init__(autowrap_modules=(math, torchvision.ops.stochastic_depth))
        self._backbone = backbone
        self._last = None if layer is None else backbone.get_submodule(layer)
        self._outputs: dict[int, list[Any]] = {}
        self._thread = threading.get_ident()
        self.constants: dict[str, Any] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf(self, module: nn.Module) -> bool:
        """Return whether a module is called as a whole."""
        return super().is_leaf_module(module, "") or layers.rule_kind(type(module)) is not None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.is_leaf(m)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        # m.forward, not forward, which runs the hooks of a block: the host's, of a GradCAM that is open on the same
        # network, would meet a proxy. A hook that changes its block's output is found out by verification.
        output = super().call_module(m, m.forward if uncompiled(m) is m else uncompiled(m), args, kwargs)
        self._outputs.setdefault(id(m), []).append(output)
        if m is self._last:
            raise _Traced
        return output

    def trace_backbone(self) -> fx.Graph:
        """Return the graph of the backbone up to the feature layer.

        Returns:
            The graph.

        Raises:
            NoClosedFormError: the backbone cannot be traced.
        """
        backbone = self._backbone
        if isinstance(backbone, torch.jit.ScriptModule):
            raise NoClosedFormError(*_advice(f"{type(backbone).__name__} cannot be traced by torch.fx"))
        parameters = list(inspect.signature(backbone.forward).parameters.values())
        defaults = {p.name: p.default for p in parameters[1:] if p.default is not p.empty}
        with _tracing:
            modules = [m for m in backbone.modules() if not isinstance(m, torch.jit.ScriptModule)]
            before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
            try:
                return self.trace(backbone, concrete_args=defaults or None)
            except _Traced:
                return self.graph
            except Exception as error:
                raise NoClosedFormError(
                    *_advice(
                        f"{type(backbone).__name__} cannot be traced by torch.fx ({error})",
                        "where one layer is the reason, give it a rule with @register_jacobian",
                    )
                ) from error
            finally:
                # Tensor constants become attributes of what is traced, and a forward may keep a proxy of its own.
                self.constants = {name: value for name, value in vars(backbone).items() if name not in before[0][1]}
                for module, attributes, buffers in before:
                    for name in set(vars(module)) - set(attributes):
                        del vars(module)[name]
                    vars(module).update(attributes)
                    for name, buffer in buffers.items():
                        module._buffers[name] = buffer

    def node(self, name: str) -> fx.Node:
        """Return the node of a module's output.

        Args:
            name: the module's dotted name.

        Returns:
            The node.

        Raises:
            NoClosedFormError: the module does not run, or gives no tensor.
            ValueError: it runs more than once.
        """
        outputs = self._outputs.get(id(self._backbone.get_submodule(name)), [])
        if not outputs:
            parts = name.split(".")
            around = [".".join(parts[:depth]) for depth in range(1, len(parts))]
            hidden = [parent for parent in around if self.is_leaf(self._backbone.get_submodule(parent))]
            if hidden:
                raise NoClosedFormError(
                    *_advice(
                        f"the layer {name!r} is inside {hidden[0]!r}, which has no closed form", "choose another layer"
                    )
                )
            raise ValueError(f"the layer {name!r} does not run before the features: choose a layer before them")
        if len(outputs) > 1:
            raise ValueError(
                f"the layer {name!r} runs {len(outputs)} times in a forward pass: choose the block around it"
            )
        if not isinstance(outputs[0], fx.Proxy):
            raise NoClosedFormError(*_advice(f"the layer {name!r} gives a {type(outputs[0]).__name__}, not a tensor"))
        return outputs[0].node


_NUMBERS = (int, float, bool, str, type(None))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_TRACED = ("_modules", "_forward_hooks", "_forward_pre_hooks")


class _Traced(Exception):  # noqa: N818 - no error: the end of a trace
    pass


def _advice(reason: str, *ways_out: str | None) -> list[str]:
    return [reason, *(way for way in ways_out if way), "pass jacobian='auto' to use autograd on the path"]


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _descendants(roots: Sequence[fx.Node], order: Sequence[fx.Node]) -> set[fx.Node]:
    found = set(roots)
    for node in order:
        if any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _size_nodes(order: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are sizes, not tensors: they carry no gradient."""
    found: set[fx.Node] = set()
    for node in order:
        inputs = node.all_input_nodes
        if (
            (node.op == "call_method" and node.target in ("size", "dim", "numel", "ndimension", "nelement"))
            or (node.target is getattr and node.args[1] in ("shape", "ndim", "device", "dtype"))
            or (node.op == "call_function" and inputs and all(arg in found for arg in inputs))
        ):
            found.add(node)
    return found


def _last_uses(nodes: Sequence[fx.Node], keep: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the ones whose values nobody needs after it."""
    last = {arg: node for node in nodes for arg in node.all_input_nodes if arg not in keep}
    uses: dict[fx.Node, list[fx.Node]] = {}
    for arg, node in last.items():
        uses.setdefault(node, []).append(arg)
    return uses


def _is_inplace(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if name in ("iadd", "isub", "imul", "itruediv", "setitem") or (name.endswith("_") and not name.endswith("__")):
        return True
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False  # a builtin: its in-place twin has a name of its own
    return bool(bound.arguments.get("inplace", False))
