"""What private names of torch promise: where a new version breaks one, its test says which."""

import re
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import pytorch_grad_cam_pcasvm
from pytorch_grad_cam_pcasvm.runtime import torch_private as private

PRIVATE = re.compile(r"\btorch(?:\.\w+)*\._(?!_)\w|from torch[\w.]* import [^\n]*\b_[a-z]")
ATEN = torch.ops.aten


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls.append(function)
        return function(*args, **(kwargs or {}))


class Operations(private.DispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append(function)
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return "seen"


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        OwnFunction.allowed = private.allows_forward_gradients()
        return x.clone()


def test_no_other_file_takes_a_private_name_from_torch():
    root = Path(pytorch_grad_cam_pcasvm.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        if path.name != "torch_private.py"
        for line in path.read_text().splitlines()
        if PRIVATE.search(line)
    ]
    assert found == []


def test_trees_are_lists_tuples_dicts_and_named_tuples_and_none_is_a_leaf():
    tree = {"a": [1, (2, None)], "b": namedtuple("Pair", "x y")(3, "four")}
    leaves, spec = private.tree_flatten(tree)
    assert leaves == private.tree_leaves(tree) == [1, 2, None, 3, "four"]
    assert private.tree_unflatten(leaves, spec) == tree
    assert private.tree_map(str, tree) == {"a": ["1", ("2", "None")], "b": ("3", "four")}
    assert private.tree_map_only(int, lambda n: -n, tree) == {"a": [-1, (-2, None)], "b": (-3, "four")}
    x, y = torch.ones(2), torch.zeros(3)
    assert [id(one) for one in private.tree_tensors({"a": [x, 1], "b": (None, y)})] == [id(x), id(y)]
    assert [private.tree_is_leaf(some) for some in (1, None, torch.ones(2), [], {}, ())] == [True] * 3 + [False] * 3


def test_modes_of_dispatch_are_a_stack():
    assert private.count_dispatch_modes() == 0
    assert private.find_dispatch_mode() is None
    outer, inner = Operations(), Operations()
    private.push_dispatch_mode(outer)
    try:
        with inner:
            assert private.count_dispatch_modes() == 2
            assert private.find_dispatch_mode() is inner
            torch.ones(2) + 1
            with private.without_dispatch_modes():
                assert private.count_dispatch_modes() == 0
                torch.ones(2) - 1
        assert private.find_dispatch_mode() is outer
    finally:
        assert private.pop_dispatch_mode() is outer
    assert private.count_dispatch_modes() == 0
    assert inner.calls == outer.calls == [ATEN.ones.default, ATEN.add.Tensor]
    assert all(isinstance(call, private.OpOverload) for call in inner.calls)
    assert isinstance(ATEN.add, private.OpOverloadPacket)


def test_modes_of_functions_are_a_stack():
    assert private.count_function_modes() == 0
    assert private.find_function_mode() is None
    assert not private.is_function_mode_on()
    with Functions() as outer, Functions() as inner:
        assert private.count_function_modes() == 2
        assert private.find_function_mode() is private.read_function_mode(1) is inner
        assert private.read_function_mode(0) is outer
        assert private.is_function_mode_on()
        with private.without_function_modes():
            torch.ones(2)
            assert not private.is_function_mode_on()
        assert private.count_function_modes() == 2
        private.pop_function_mode()
        assert private.find_function_mode() is outer
        torch.zeros(2)
        inner.__enter__()
    assert outer.calls == [torch.zeros]
    assert inner.calls == []


def test_subclasses_do_not_see_what_they_are_shut_out_of():
    x = torch.ones(2).as_subclass(Subclass)
    assert x + 1 == "seen"
    with private.without_function_subclasses(), Functions() as mode:
        assert torch.equal(torch.Tensor.add(x, 1).as_subclass(torch.Tensor), torch.full((2,), 2.0))
    assert torch.Tensor.add in mode.calls
    with private.without_function_modes():
        assert isinstance(x + 1, torch.Tensor)


def test_keys_are_left_out_of_dispatch_and_asked():
    keys = [private.parse_dispatch_key(f"Autograd{name}") for name in ("Functionality", "Other", "NestedTensor")]
    x = torch.ones(2, requires_grad=True)
    for key in keys:
        assert not private.is_dispatch_key_excluded(key)
        private.exclude_dispatch_key(key, True)
    try:
        assert all(map(private.is_dispatch_key_excluded, keys))
        assert (x * 2).grad_fn is None
        assert torch.is_grad_enabled()
    finally:
        for key in keys:
            private.exclude_dispatch_key(key, False)
    assert (x * 2).grad_fn is not None
    draws = private.parse_dispatch_key("VmapMode")
    assert not private.is_dispatch_key_included(draws)
    private.include_dispatch_key(draws, True)
    try:
        assert private.is_dispatch_key_included(draws)
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
        with pytest.raises(RuntimeError, match="vmap"):
            torch.rand(2)
    finally:
        private.include_dispatch_key(draws, False)
    assert torch.rand(2).shape == (2,)


def test_an_operation_tells_of_which_keys_it_has_kernels():
    assert private.has_kernel("aten::add.Tensor", "CPU")
    assert not private.has_kernel("aten::add.Tensor", "CompositeImplicitAutograd")
    assert private.has_kernel("aten::reshape", "CompositeImplicitAutograd")


def test_all_switches_of_gradients_call_one_function_which_modes_see():
    for switch in (torch.no_grad, torch.enable_grad):
        with Functions() as mode, switch():
            pass
        assert private.switch_gradients in mode.calls
    names = set()

    class Watching(Functions):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is private.switch_gradients:
                names.add(sys._getframe(1).f_globals["__name__"])
            return super().__torch_function__(function, types, args, kwargs)

    with Watching(), torch.no_grad():
        pass
    with Watching():
        torch.no_grad()(lambda: None)()
    assert names
    assert names <= {*private.GRADIENT_SWITCHES}
    private.switch_gradients(False)
    assert not torch.is_grad_enabled()
    private.switch_gradients(True)
    assert torch.is_grad_enabled()


def test_forward_derivatives_are_off_in_inference_mode_and_in_functions():
    assert private.allows_forward_gradients()
    with torch.no_grad():
        assert private.allows_forward_gradients()
    with torch.inference_mode():
        assert not private.allows_forward_gradients()
    OwnFunction.apply(torch.ones(1))
    assert not OwnFunction.allowed
    assert not private.is_in_functorch()
    torch.func.vmap(lambda x: pytest.fail("not seen") if not private.is_in_functorch() else x)(torch.ones(2))


def test_a_level_of_forward_derivatives_is_left_once_and_again_opened():
    assert not private.is_in_dual_level()
    level = forward_ad.dual_level()
    level.__enter__()
    assert private.is_in_dual_level()
    private.leave_dual_level()
    assert not private.is_in_dual_level()
    with pytest.raises(RuntimeError):
        private.leave_dual_level()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(1), torch.full((1,), 3.0))
        assert forward_ad.unpack_dual(2 * dual).tangent.item() == 6


def test_hooks_of_all_modules_are_found_and_forgotten():
    assert not private.has_global_hook()
    assert not private.has_global_backward_hook()
    ran = []
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, args: ran.append(module))
    try:
        assert private.has_global_hook()
        assert not private.has_global_backward_hook()
        (number,) = private.global_forward_pre_hooks
        module = nn.Identity()
        module(1)
        private.global_forward_pre_hooks.pop(number)
        module(1)
        assert ran == [module]
        assert not private.has_global_hook()
    finally:
        handle.remove()
    for register in ("register_module_full_backward_hook", "register_module_full_backward_pre_hook"):
        handle = getattr(nn.modules.module, register)(lambda *args: None)
        assert private.has_global_backward_hook()
        handle.remove()
        assert not private.has_global_backward_hook()


class Frames(nn.Module):
    """Keeps what lies on the stack while it runs, or its child does."""

    def forward(self, x):
        self.codes, frame = {}, sys._getframe()
        while frame is not None:
            self.codes[frame.f_code] = dict(frame.f_locals)
            frame = frame.f_back
        return x.clone()


def test_frames_tell_the_module_that_is_called():
    module = Frames()
    module(torch.ones(1))
    assert module.codes[private.MODULE_CALL_CODE]["self"] is module


def test_a_backward_hook_puts_its_function_around_what_a_module_takes():
    seen = []

    class Watching(private.DispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            frame = sys._getframe()
            while frame is not None:
                seen.append(frame.f_code)
                frame = frame.f_back
            return function(*args, **(kwargs or {}))

    module = nn.Identity()
    module.register_full_backward_hook(lambda *args: None)
    x = torch.ones(1, requires_grad=True)
    with Watching():
        y = module(x)
    assert private.BACKWARD_HOOK_CODE in seen
    assert type(y.grad_fn).__name__ == f"{private.BackwardHookFunction.__name__}Backward"


def test_scripts_are_compiled_further_or_not():
    before = private.is_optimizing_scripts()
    try:
        for value in (False, True):
            private.optimize_scripts(value)
            assert private.is_optimizing_scripts() is value
    finally:
        private.optimize_scripts(before)


def test_compiled_code_has_the_frames_of_the_compiler_around_it():
    module = Frames()
    module.forward = torch._dynamo.disable(module.forward)
    torch.compile(module, backend="eager")(torch.ones(1))
    names = {code.co_filename.replace("\\", "/") for code in module.codes}
    assert any(name.endswith(f"{private.COMPILER_FRAMES.replace('.', '/')}.py") for name in names)
    assert private.COMPILER_FRAMES in sys.modules
    assert all(name in sys.modules for name in private.COMPILER)
    checkpoint(module, torch.ones(1), use_reentrant=False)


@pytest.mark.parametrize("projected", [0, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_is_decomposed(projected, bidirectional):
    torch.manual_seed(0)
    net = nn.LSTM(4, 5, num_layers=2, bidirectional=bidirectional, batch_first=True, proj_size=projected).double()
    x, count = torch.randn(3, 6, 4, dtype=torch.float64), 4 if bidirectional else 2
    start = torch.randn(count, 3, projected or 5).double(), torch.randn(count, 3, 5).double()
    with torch.no_grad():
        expected, states = net(x, start)
        weights = private.split_lstm_weights(net._flat_weights, True, bool(projected))
        output, found = private.stack_lstm_layers(
            x, list(zip(*start, strict=True)), weights, True, 2, 0.0, False, bidirectional, True, private.lstm_layer
        )
    assert torch.allclose(output, expected, rtol=1e-10, atol=1e-12)
    for which, state in enumerate(states):
        stacked = torch.stack([one[which] for one in found]).reshape(state.shape)
        assert torch.allclose(stacked, state, rtol=1e-10, atol=1e-12)


def test_decompositions_by_overload_give_the_same_numbers():
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    found = private.decomposition_table[ATEN.addcmul.default](x, y, y, value=2)
    assert torch.allclose(found, x + 2 * y * y)


@pytest.mark.skipif(
    not hasattr(private.DispatchMode, "supports_higher_order_operators"), reason="this torch refuses it under any mode"
)
def test_a_conditional_reaches_modes_of_dispatch_as_one_operator():
    """With its condition, two graphs and what they take; in a program, as only there a network still has one."""
    seen = []

    class Watching(private.DispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is not private.cond_op:
                return function(*args, **(kwargs or {}))
            seen.append(args)
            predicate, on_true, on_false, operands = args
            return (on_true if predicate else on_false)(*operands)

    class Branching(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    program = torch.export.export(Branching(), (torch.ones(2),)).module()
    for x in (torch.ones(2), -torch.ones(2)):
        with Watching():
            assert torch.equal(program(x), 2 * x)
    assert len(seen) == 2


def test_fake_tensors_have_shapes_and_no_numbers():
    with private.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 3))
        assert isinstance(x, private.FakeTensor)
        assert (x @ x.mT).shape == (2, 2)
        with pytest.raises(private.DataDependentOutputException):
            x.sum().item()
    with private.enable_python_dispatcher():
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
