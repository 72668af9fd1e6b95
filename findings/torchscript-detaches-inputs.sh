#!/usr/bin/env bash
# TorchScript: what a scripted function shows to a TorchDispatchMode depends on how it ran before.
#
# Guess: below autograd a mode sees the operations that the code has, sigmoid and mul, and torch.jit's
#   optimized_execution(False) makes sure of that.
# Versions: torch 2.14.1 (CPU), Python 3.11.
# Behaviour: after runs with gradients TorchScript keeps a graph that it differentiates by itself. Of an argument that
#   requires gradients a mode then sees an aten.detach first, and the operations on what was detached: to whoever
#   follows gradients through the operations, they are cut off, beside a skip without a word. optimized_execution(False)
#   changes nothing once there is such a graph. Of an argument that requires none the graph is left aside, and the
#   operations are as before. Autograd itself is right all the time.
# Output seen:
#   before any run:        ['sigmoid', 'mul']
#   after runs, requiring: ['detach', 'sigmoid', 'mul', 'detach', ...], the same without optimisation
#   after runs, plain:     ['sigmoid', 'mul']
# Exit status: 1 if any of that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "torch==2.14.1" "numpy<2.5"
cat >"$folder/run.py" <<'PYTHON'
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def scripted():
    return torch.jit.CompilationUnit("def swish(x): return x * torch.sigmoid(x)\n").swish


def seen(function, requires_grad, optimised=True):
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_(requires_grad)
    mode = Seen()
    with torch.jit.optimized_execution(optimised), torch._C._AutoDispatchBelowAutograd(), mode:
        function(x)
    return mode.names


before, function = seen(scripted(), True), scripted()
x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
for _ in range(3):
    gradient = torch.autograd.grad(function(x).sum(), x)[0]
after, plain = seen(function, True), seen(function, False)
unoptimised = seen(function, True, optimised=False)
sigmoid = torch.sigmoid(x)
right = torch.allclose(gradient, sigmoid + x * sigmoid * (1 - sigmoid))
print(torch.__version__, "before any run:       ", before)
print(torch.__version__, "after runs, requiring:", after)
print(torch.__version__, "the same, unoptimised:", unoptimised)
print(torch.__version__, "after runs, plain:    ", plain)
print(torch.__version__, "autograd is right:    ", right)
sys.exit(
    not (
        before == plain == ["sigmoid", "mul"]
        and after[:3] == unoptimised[:3] == ["detach", "sigmoid", "mul"]
        and right
    )
)
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
