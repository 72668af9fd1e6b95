"""Ctrl-C and signals at random moments: what one call leaves behind, the next one puts right."""

import contextlib
import gc
import random
import signal
import sys
import threading
import time

import pytest
import torch
from problems import Problem
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ClosedFormShapleyCAM,
    ContributionCAM,
    PCATarget,
    extract_features,
)
from pytorch_grad_cam_pcasvm.network import modules
from pytorch_grad_cam_pcasvm.runtime import rollback
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, forbid_sync, keep_every_choice, may_choose
from pytorch_grad_cam_pcasvm.tape.python_calls import PythonCallMode
from pytorch_grad_cam_pcasvm.tape.recorder import Recorder, explain_unseen, explanation

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread"
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def state(net):
    return {
        "training": [module.training for module in net.modules()],
        "hooks": [len(getattr(module, name)) for module in net.modules() for name in HOOKS],
        "global hooks": len(torch_module._global_forward_pre_hooks),
        "attributes": [sorted(vars(module)) for module in net.modules()],
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), forward_ad._current_level),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "below autograd": str(torch._C._dispatch_tls_local_exclude_set()),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "open": (len(rollback._open), len(modules._evaluating), len(modules._eager_users)),
        "stance": torch._dynamo.eval_frame._stance.stance,
    }


def list_calls(problem):
    """Return what a user may call, first with methods that were used before."""
    net, x = problem.net, problem.x
    loader = [(x, torch.zeros(len(x)))]
    methods = (ClosedFormGradCAM, ContributionCAM, ClosedFormShapleyCAM)
    used = [method(net, [problem.target_layer]) for method in methods]
    return [
        *[lambda cam=cam: cam.explain(x) for cam in used],
        *[lambda method=method: method(net, [problem.target_layer]).explain(x) for method in methods],
        lambda: ClosedFormGradCAM(net, [problem.target_layer], jacobian="autograd").explain(x),
        lambda: used[0](x, [PCATarget(0)] * len(x)),
        lambda: net.predict(x),
        lambda: extract_features(problem.backbone, loader, layer="classifier.4", progress=False),
    ]


def interrupted(count, seed):
    """Interrupt calls at random moments; return how many were, and how often something was left after the next."""
    problem = Problem(seed=2)
    net, x, calls = problem.net, problem.x, list_calls(problem)
    expected = calls[0]().maps
    times = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    rng, hits, left = random.Random(seed), 0, []
    error = KeyboardInterrupt

    def strike(*_):
        raise error

    before_all = signal.signal(signal.SIGALRM, strike)
    try:
        for _ in range(count):
            number = rng.randrange(len(calls))
            error = rng.choice([KeyboardInterrupt, TimeoutError])
            net.train(rng.random() < 0.5)
            problem.backbone.features[0].train(rng.random() < 0.5)
            before = state(net)
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-5, rng.random() * times[number]))
                calls[number]()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except (KeyboardInterrupt, TimeoutError):
                signal.setitimer(signal.ITIMER_REAL, 0)
                hits += 1
            net.predict(x)
            after = state(net)
            left += [(number, name, value, after[name]) for name, value in before.items() if value != after[name]]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before_all)
    assert torch.equal(calls[0]().maps, expected)
    return hits, left


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a signal in a destructor is lost
def test_the_next_call_puts_right_what_an_interrupt_left(count):
    hits, left = interrupted(count, seed=count)
    assert hits > count / 4
    assert not left


def test_gradients_are_switched_only_where_that_is_undone(monkeypatch):
    """An interrupt in ``__exit__`` of torch's own contexts leaves gradients off, with nobody to switch them on."""
    calls, enter, without = list_calls(Problem(seed=2)), torch.no_grad.__enter__, []

    def entered(self):
        without.extend([] if rollback._open else [sys._getframe(1).f_code.co_name])
        return enter(self)

    monkeypatch.setattr(torch.no_grad, "__enter__", entered)
    for call in calls:
        call()
    assert not without


def test_what_a_torch_context_brings_back_after_an_interrupt_is_removed():
    """torch sets a mode aside for calls of its own, in a context that an interrupt can leave open."""
    problem = Problem()
    with rollback.Rollback():
        PythonCallMode(Recorder()).__enter__()
    assert torch._C._len_torch_function_stack() == 1
    problem.net.predict(problem.x)
    assert torch._C._len_torch_function_stack() == 0


def test_what_an_interrupt_leaves_to_the_garbage_collector_ends_in_no_other_call():
    """A context whose end was interrupted ends when its generator is freed, which may be during the next call."""

    @contextlib.contextmanager
    def explaining():
        with rollback.Rollback() as noted:
            explain_unseen(noted)
            yield

    def begun(*contexts):
        for context in contexts:
            context.__enter__()
        return contexts

    with rollback.Rollback() as noted:
        noted.note_torch()
        noted.set_variable(explanation, None)
        left = begun(explaining(), keep_every_choice(), forbid_sync(), Recorder()._listening())
    following, zero = Recorder(), torch.zeros(())
    with rollback.Rollback() as noted, forbid_sync():
        noted.note_torch()
        noted.set_variable(explanation, following)
        with following:
            del left
            gc.collect()
            assert _get_current_dispatch_mode() is following
            assert explanation.get() is following
            assert not can_sync(zero)
    assert can_sync(zero)
    assert may_choose(zero)


def test_a_call_whose_end_never_came():
    problem = Problem()
    problem.net.train()
    before = state(problem.net)

    def call():
        noted = rollback.Rollback().__enter__()
        noted.note(problem.net.train, True)
        problem.net.eval()

    call()
    assert len(rollback._open) == 1
    with modules.evaluation_mode(problem.net):
        assert len(rollback._open) == 1  # its own
        problem.net.predict(problem.x)  # one inside does not take the one around for such
        assert len(rollback._open) == 1
    assert state(problem.net) == before
    # What the user may have changed since is left alone.
    counted = nn.BatchNorm1d(2)
    state_of_random = torch.get_rng_state()

    def begin():
        modules.unchanged(counted).__enter__()

    begin()
    counted(torch.randn(5, 2))
    problem.net.predict(problem.x)
    assert counted.num_batches_tracked == 1
    assert not torch.equal(torch.get_rng_state(), state_of_random)
    assert not rollback._open


def test_undoing_is_tried_again():
    done, signals = [], [KeyboardInterrupt()]

    def undo():
        if signals:
            raise signals.pop()
        done.append(1)

    noted = rollback.Rollback().__enter__()
    noted.note(done.append, 2)
    noted.note(undo)
    with pytest.raises(KeyboardInterrupt):
        noted.__exit__()
    assert done == [1, 2]
    assert not rollback._open


def test_other_threads_are_left_alone_while_they_live(monkeypatch):
    # Its lock and the interpreter's wait for each other where the garbage collector comes in between (gh-106883).
    monkeypatch.delattr(sys, "_current_frames")
    done, begun, end = [], threading.Event(), threading.Event()

    def run():
        rollback.Rollback().__enter__().note(done.append, 1)
        begun.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        with rollback.Rollback():
            assert not done
    finally:
        end.set()
        thread.join()
    with rollback.Rollback():
        assert done == [1]
