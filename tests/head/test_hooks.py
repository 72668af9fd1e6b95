"""Hooks on the parts of a head."""

import pytest
import torch
from heads import pulled_back, trace_of
from reference import relative
from sklearn.decomposition import PCA
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from test_head import QUERY, fitted

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError
from pytorch_grad_cam_pcasvm.head import HeadTrace
from pytorch_grad_cam_pcasvm.head.stages import Chain, Projection, Scale


def hooked_head(kind):
    """Return a head and a module of it to hook: a stage, one inside a chain, a member, or the head itself."""
    machine = OneVsRestClassifier(make_pipeline(StandardScaler(), SVC())) if kind in ("nested", "member") else SVC()
    head = Head.of(fitted([StandardScaler(), PCA(4)], machine, 3))
    chosen = {
        "stage": lambda: head.stages[1],
        "decision": lambda: head.stages[2],
        "nested": lambda: head.stages[2].members[1].stages[0],
        "member": lambda: head.stages[2].members[1],
        "head": lambda: head,
    }
    return head, chosen[kind]()


def doubled(output):
    if isinstance(output, torch.Tensor):
        return output * 2
    return HeadTrace([output.values[0], *(value * 2 for value in output.values[1:])], output.saved)


def write(output):
    for tensor in [output] if isinstance(output, torch.Tensor) else output.values:
        tensor.mul_(2)


CHANGES = {
    "returned output": lambda m: m.register_forward_hook(lambda module, args, output: doubled(output)),
    "returned input": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "written output": lambda m: m.register_forward_hook(lambda module, args, output: write(output)),
    "written input": lambda m: m.register_forward_pre_hook(lambda module, args: write(args[0])),
    "backward": lambda m: m.register_full_backward_hook(lambda module, into, out: None),
    "before backward": lambda m: m.register_full_backward_pre_hook(lambda module, out: None),
}
KINDS = ["stage", "decision", "nested", "member", "head"]


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_only_look_run(kind):
    head, module = hooked_head(kind)
    before = trace_of(head, QUERY)
    seeds = {3: torch.ones(1, 1, 3).double()}
    expected = pulled_back(head, before, seeds)
    seen = []
    module.register_forward_pre_hook(lambda module, args: seen.append(args))
    module.register_forward_hook(lambda module, args, output: seen.append((*args, output)))
    module.register_forward_hook(lambda module, args, kwargs, output: seen.append(output), with_kwargs=True)
    trace = trace_of(head, QUERY)
    assert [len(args) for args in seen[:2]] == [1, 2]
    if kind in ("stage", "decision"):
        position = KINDS.index(kind) + 1
        assert torch.equal(seen[0][0], trace.values[position])
        assert torch.equal(seen[1][1], trace.values[position + 1])
    if kind == "head":
        assert seen[1][1] is trace
    assert all(map(torch.equal, trace.values, before.values))
    assert torch.equal(pulled_back(head, trace, seeds), expected)
    with torch.inference_mode():
        assert torch.equal(pulled_back(head, head(torch.tensor(QUERY)), seeds), expected)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning")
def test_hooks_that_change_something_have_no_closed_form(kind, change):
    head, module = hooked_head(kind)
    before = trace_of(head, QUERY)
    CHANGES[change](module)
    query = torch.tensor(QUERY)
    trace = trace_of(head, query)
    assert torch.equal(query, torch.tensor(QUERY))
    assert torch.equal(trace.values[-1], before.values[-1]) == ("backward" in change)
    name = type(module).__name__
    with pytest.raises(NoClosedFormError, match=rf"a hook on {name}.*backbone, or register a stage that"):
        head.pullback(trace, {3: torch.ones(1, 1, 3).double()})
    if kind in ("decision", "nested", "member"):  # components are not behind it
        assert relative(pulled_back(head, trace, {2: None}), pulled_back(head, before, {2: None})) == 0


@pytest.mark.parametrize(
    ("kind", "change"),
    [("decision", lambda output: output.unsqueeze_(0)), ("head", lambda output: output.values.append(None))],
    ids=["shape", "count"],
)
def test_hooks_that_change_what_an_output_is_made_of_have_no_closed_form(kind, change):
    head, module = hooked_head(kind)

    def alter(module, args, output):
        change(output)

    module.register_forward_hook(alter)
    with pytest.raises(NoClosedFormError, match=f"a hook on {type(module).__name__}"):
        head.pullback(trace_of(head, QUERY), {3: torch.ones(1, 1, 3).double()})


def test_hooks_on_every_module_see_the_stages():
    head, _ = hooked_head("nested")
    names = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, args, output: names.append(type(m)))
    trace = trace_of(head, QUERY)
    handle.remove()
    assert {Head, Projection, Scale, Chain} <= set(names)
    assert pulled_back(head, trace, {2: None}).any()
