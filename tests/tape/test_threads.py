"""What other threads compute on the path is refused by name; their constants, and skips of the stem, are explained."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from against_autograd import Path, Refused, faults, random
from torch import nn
from way import Net, Way, X

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
POOL = ThreadPoolExecutor(1)


@pytest.fixture(scope="module", autouse=True)
def _pool():
    """A thread that runs before any explanation, and ends here: what others do is looked at in every explanation."""
    with POOL:
        POOL.submit(int).result()
        yield


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def in_the_pool(function):
    return POOL.submit(function).result()


@torch.jit.script
def forked(h):
    future = torch.jit.fork(torch.tanh, h)
    return torch.jit.wait(future) + h


class Forks(nn.Module):
    def forward(self, h):
        future = torch.jit.fork(torch.tanh, h)
        return torch.jit.wait(future) * 2


FORKS = torch.jit.script(Forks())


def filled_by_a_thread(h):
    buffer = torch.zeros_like(h)
    in_a_thread(lambda: buffer[:, :2].copy_(h[:, :2].tanh()))
    return buffer + h


def of_a_view(h):
    view = h.sin().view(h.shape)[:, 1:]
    return in_a_thread(lambda: view.tanh()) * view


REFUSED = {
    "a thread": lambda h: in_a_thread(lambda: h.tanh() * 2) + h,
    "a pool that was started before": lambda h: in_the_pool(lambda: h.sin().relu()) * h,
    "two results of a pool": lambda h: sum(POOL.map(lambda function: function(h), [torch.sin, torch.cos])),
    "the output itself": lambda h: in_a_thread(lambda: h * 2),
    "a view": lambda h: in_a_thread(lambda: h[:, :2]) + 1,
    "of a view": of_a_view,
    "into a buffer": filled_by_a_thread,
    "a scripted fork": lambda h: forked(h.sin()),
    "a fork in a scripted module": lambda h: FORKS(h) + h,
}


STARTS = [torch.zeros(1, 6, 7, 7).double(), random(3, 6, 7, 7, seed=3)]


def behind(function):
    return Net(Way(function), "flat")


@pytest.mark.parametrize("case", REFUSED)
def test_what_another_thread_computes_on_the_path_is_refused(case):
    with torch.no_grad(), pytest.raises(Refused, match="another thread computes on the path"):
        Path(behind(REFUSED[case]), None, ["stem"]).run(X)


EXPLAINED = {
    "constants": lambda h: in_a_thread(lambda: torch.arange(6.0).double().reshape(6, 1, 1) * 2) * h.sin(),
    "weights": lambda h: h * in_a_thread(lambda: WEIGHT.exp()),
    "a fork outside of scripted code": lambda h: torch.jit.wait(torch.jit.fork(torch.tanh, h)) + h,
}
WEIGHT = nn.Parameter(torch.linspace(0, 1, 6).double().reshape(6, 1, 1))


@pytest.mark.parametrize("case", EXPLAINED)
def test_what_depends_on_no_target_layer_is_a_constant(case):
    assert not faults(behind(EXPLAINED[case]), "stem", X, STARTS)


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.beside, self.out = (
            layer.double() for layer in (nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3), nn.Linear(6, 4))
        )

    def forward(self, x):
        skip = in_a_thread(lambda: self.beside(x))
        return self.out((self.stem(x).sin() * skip).mean((2, 3)))


def test_a_skip_around_the_target_layer_stays_a_constant():
    assert not faults(Skips().eval(), "stem", X, STARTS)


def test_values_that_a_network_keeps_require_no_gradients_afterwards():
    kept = []
    net = behind(lambda h: kept.extend([h, h.sin(), h[:, 1:]]) or h.tanh())
    kept.clear()
    with torch.no_grad():
        Path(net, None, ["stem"]).run(X)
    assert len(kept) == 3
    assert not any(tensor.requires_grad for tensor in kept)


def _hooked(h):
    tripled = h * 1.5
    if tripled.requires_grad:
        tripled.register_hook(lambda grad: 3 * grad)
    return tripled.sin()


def _hooked_unless_a_leaf(h):
    tripled = h * 1.5
    if not tripled.is_leaf:
        tripled.register_hook(lambda grad: 3 * grad)
    return tripled.sin()


def _hooked_by_its_graph(h):
    tripled = h * 1.5
    if tripled.grad_fn is not None:
        tripled.grad_fn.register_prehook(lambda grads: (3 * grads[0],))
    return tripled.sin()


@pytest.mark.parametrize("function", [_hooked, _hooked_unless_a_leaf, _hooked_by_its_graph])
def test_a_hook_for_gradients_that_asks_whether_there_are_any_is_refused(function):
    with torch.no_grad(), pytest.raises(Refused, match="may change gradients unseen"):
        Path(behind(function), None, ["stem"]).run(X)


def test_numbers_are_read_as_in_a_network_that_needs_no_gradients():
    with torch.no_grad():
        passed = Path(
            behind(lambda h: h * float(h.numpy().mean()) + torch.tensor([h[0, 0, 0, 0], 1.0]).sum()), None, ["stem"]
        )
        passed.run(X)


def _quiet(function):
    """Return a function that records no graph."""
    return torch.no_grad()(function)


def filled(h, run):
    kept = torch.zeros_like(h)
    run(_quiet(lambda: kept.copy_(h.data.tanh())))
    return kept + h


UNSEEN = {
    "a number": lambda h, run: h * run(lambda: h.mean().item()),
    "numbers": lambda h, run: h * torch.tensor(run(lambda: h.detach().mean((2, 3)).tolist())).double()[..., None, None],
    "a mask": lambda h, run: h * run(lambda: h > 0.5),
    "places": lambda h, run: h.flatten(1).gather(1, run(lambda: h.flatten(1).argmax(1, keepdim=True))),
    "without gradients": lambda h, run: run(_quiet(lambda: h.tanh() * 2)) + h,
    "without a graph": lambda h, run: run(lambda: h.detach().tanh()) + h,
    "into a buffer": filled,
    "a decision": lambda h, run: h.sin() if run(lambda: bool(h.mean() > 0)) else h * 2,
}


@pytest.mark.parametrize("run", [in_a_thread, in_the_pool])
@pytest.mark.parametrize("case", UNSEEN)
def test_what_another_thread_computes_without_a_graph_is_the_same_at_the_baseline_or_refused(case, run):
    net = behind(lambda h: UNSEEN[case](h, run))
    assert not faults(net, "stem", X)  # as for autograd, it is a constant
    with torch.no_grad():
        passed = Path(net, None, ["stem"]).run(X)
        passed.run_from({0: passed.activations[0].clone()})
        with pytest.raises(Refused, match="another thread computes on them"):
            passed.run_from({0: -passed.activations[0]})


def alive(monkeypatch, *others):
    """Let the only threads that are alive be this one and some others; those of the tests themselves are, too."""
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), *others])


@pytest.mark.parametrize("name", [None, "QueueFeederThread", "tqdm_monitor"])
def test_one_thread_costs_nothing_nor_do_those_that_feed_workers_or_look_after_progress_bars(name, monkeypatch):
    alive(monkeypatch, *([] if name is None else [threading.Thread(name=name)]))
    with torch.no_grad():
        assert not Path(behind(torch.sin), None, ["stem"]).run(X).tape.branches
        alive(monkeypatch, threading.Thread(name="any other"))
        assert Path(behind(torch.sin), None, ["stem"]).run(X).tape.branches


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("case", ["filled", "number"])
def test_what_a_thread_writes_is_compared_at_the_baseline_whether_it_was_alive_or_starts(case, others, monkeypatch):
    function, run = UNSEEN[{"filled": "into a buffer", "number": "a number"}[case]], [in_a_thread, in_the_pool][others]
    alive(monkeypatch, *list(POOL._threads)[:others])
    passed = Path(behind(lambda h: function(h, run)), None, ["stem"]).run(X)
    with torch.no_grad(), pytest.raises(Refused, match="another thread computes on them"):
        passed.run_from({0: -passed.activations[0]})


def test_a_profile_of_new_threads_is_left_as_it_was(monkeypatch):
    alive(monkeypatch)
    profiled = []
    threading.setprofile(lambda *_: profiled.append(threading.get_ident()))
    try:
        with torch.no_grad():
            Path(behind(lambda h: h * in_a_thread(lambda: h.mean().item())), None, ["stem"]).run(X)
        assert profiled
        profiled.clear()
        in_a_thread(int)
        assert profiled
    finally:
        threading.setprofile(None)
