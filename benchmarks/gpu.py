"""A day with a GPU: the CUDA tests, then ratios of three networks, as one section of Markdown.

    benchmarks/gpu.sh [--wheels DIR] [--device cpu] [--small] [--out FILE]

Each part is a process with a limit of its own, to which comes what the parts before have left. One that fails, or is
cut off, is printed as failed, with the rows that it had. The bare network is the backbone up to its features, in
inference mode; whoever is timed takes turns with it, and the median over rounds of the ratio within a round is given,
with its quartiles. An explanation is that of three components and the predicted class. The host makes seven signed maps
for these; it makes two of them, and its time is scaled up.
"""

import argparse
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from kernels import counted
from measuring import environment, noisy_head, normalise, peak_bytes, prepare, timed
from pytorch_grad_cam import GradCAM
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.models.vision_transformer import VisionTransformer

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    export,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.network.features import compute_features
from pytorch_grad_cam_pcasvm.version import __version__

ROOT = Path(__file__).resolve().parents[1]
METHODS = {"Grad-CAM": ClosedFormGradCAM, "contributions": ContributionCAM}
SIGNED = [*(PCATarget(b, sign) for b in range(3) for sign in ("+", "-")), SVMTarget()]
ROW = "row: "  # begins a line of a part's output that the section is made of


def make_resnet(small: bool) -> nn.Module:
    """Return ResNet-50, or a small one."""
    return ResNet(Bottleneck, [1, 1, 1, 1]) if small else torchvision.models.resnet50(weights=None)


def make_vgg(small: bool) -> nn.Module:
    """Return VGG16, or a small network of its shape."""
    if not small:
        return torchvision.models.vgg16(weights=None)
    blocks = [(nn.Conv2d(m, n, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for m, n in ((3, 16), (16, 32), (32, 64))]
    features = nn.Sequential(*(layer for block in blocks for layer in block))
    dense = nn.Sequential(nn.Linear(64 * 4, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 64), nn.ReLU())
    pooled = {"features": features, "avgpool": nn.AdaptiveAvgPool2d(2), "flatten": nn.Flatten(), "classifier": dense}
    return nn.Sequential(OrderedDict(pooled))


def make_vit(small: bool) -> nn.Module:
    """Return ViT-B/16, or a small one, whose output is its class token."""
    net = VisionTransformer(64, 16, 1, 2, 32, 64) if small else torchvision.models.vit_b_16(weights=None)
    net.heads = nn.Identity()
    return net


def make_grid(tokens: Tensor) -> Tensor:
    """Return tokens behind a class token, (N, 1 + L, D), as (N, D, H, W) of a square, for the host."""
    side = int((tokens.shape[1] - 1) ** 0.5)
    return tokens[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Network:
    """A network, the layer its features come from, the layer of the maps (full size, small), and whether of tokens."""

    make: Callable[[bool], nn.Module]
    layer: str
    targets: tuple[str, str]
    tokens: bool = False


NETWORKS = {
    "ResNet-50": Network(make_resnet, "avgpool", ("layer4.2", "layer4.0")),
    "VGG16": Network(make_vgg, "classifier.4", ("features.30", "features.8")),
    "ViT-B/16": Network(
        make_vit, "heads", ("encoder.layers.encoder_layer_11.ln_1", "encoder.layers.encoder_layer_0.ln_1"), tokens=True
    ),
}


@dataclass(frozen=True)
class Part:
    """A part of the day, and its limit in seconds."""

    name: str
    seconds: int


# In all, with the start of the script, less than eight minutes.
PARTS = [
    Part("CUDA tests", 100),
    *(Part(f"{name}, eager", 40) for name in NETWORKS),
    *(Part(f"{name}, compiled", 80) for name in NETWORKS),
]


class Subject:
    """A network with a head and its methods, on a device.

    Args:
        name: of the network.
        device: where.
        small: whether it is a small one.
    """

    def __init__(self, name: str, device: torch.device, small: bool) -> None:
        torch.manual_seed(0)
        network = NETWORKS[name]
        self.layer, self.target, self.tokens = network.layer, network.targets[small], network.tokens
        self.batches = (2,) if small else (1, 8, 64)
        self.rounds = 3 if small else 15
        self.device, self.small = device, small
        side = 64 if small else 224
        self.images = torch.randn(max(16, *self.batches), 3, side, side, device=device)
        self.backbone = normalise(network.make(small).to(device), self.images[:16])
        with torch.inference_mode():
            features = compute_features(self.backbone, self.layer, self.images[:16]).double().cpu().numpy()
        self.net = PCASVMNet(self.backbone, noisy_head(features, 3, 200), layer=self.layer).eval()
        mean = mean_activations(self.net, [self.images[:16]], self.target, progress=False)
        transform = "tokens" if self.tokens else None
        self.methods = {
            name: method(self.net, [self.target], transform, **({"mean": mean} if method is ContributionCAM else {}))
            for name, method in METHODS.items()
        }

    def run_bare(self, x: Tensor) -> Tensor:
        """Return the features."""
        with torch.inference_mode():
            return compute_features(self.backbone, self.layer, x)

    def measure(self, calls: dict[str, Callable[[Tensor], Any]], count: int) -> dict[str, dict[str, Any]]:
        """Return what calls take with so many images, each in comparison with the bare network."""
        x = self.images[:count].clone()
        contestants = {name: partial(call, x) for name, call in {"bare": self.run_bare, **calls}.items()}
        for call in contestants.values():
            call()
            call()
        rounds = []
        for number in range(self.rounds):
            # Every second round runs backwards: whoever comes first pays for what the one before left behind.
            order = list(contestants)[:: 1 if number % 2 else -1]
            rounds.append({name: timed(contestants[name], self.device) for name in order})
        peaks = {
            name: statistics.median(peak_bytes(call, self.device) for _ in range(1 if self.small else 3))
            for name, call in contestants.items()
        }
        kernels = {name: self.count_kernels(name, call) for name, call in contestants.items()}
        return {
            name: {
                "images": count,
                "bare, ms": 1e3 * statistics.median(seconds["bare"] for seconds in rounds),
                "explain / bare": summarise([seconds[name] / seconds["bare"] for seconds in rounds]),
                "kernels (bare)": " ".join((
                    "?" if kernels[name] is None else str(kernels[name]),
                    f"({kernels['bare']})",
                )),
                "memory / bare": peaks[name] / max(1, peaks["bare"]),
            }
            for name in calls
        }

    def count_kernels(self, name: str, call: Callable[[], Any]) -> int | None:
        """Return the launches of a call; on a CPU the operations that are no views, which a compiled program hides."""
        if self.device.type == "cuda":
            return count_launches(call)
        return None if name == "compiled" else counted(call).total()


def count_launches(call: Callable[[], Any]) -> int | None:
    """Return the kernels that a call launches on a GPU; None where the profiler sees none."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    launches = sum(
        row.count for row in profile.key_averages() if row.key.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
    )
    return launches or None


def summarise(ratios: list[float]) -> str:
    """Return the median of ratios, and their quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def compare(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a part of the largest number."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def measure_eager(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of images and method; of Grad-CAM in comparison with the host, too."""
    layer = subject.backbone.get_submodule(subject.target)
    host = GradCAM(subject.net, [layer], make_grid if subject.tokens else None)
    ours = subject.methods["Grad-CAM"]
    for count in subject.batches:
        rows = subject.measure({name: method.explain for name, method in subject.methods.items()}, count)
        x = subject.images[:count].clone()
        target = [SVMTarget()] * count
        difference = compare(torch.as_tensor(ours(x, target)), torch.as_tensor(host(x, target)))
        ratios = []
        for _ in range(3):
            seconds = timed(lambda x=x: [host(x, [one] * len(x)) for one in (SIGNED[0], SIGNED[-1])], subject.device)
            ratios.append(len(SIGNED) / 2 * seconds / timed(lambda x=x: ours.explain(x), subject.device))
        for name, row in rows.items():
            of_host = {"host / ours": statistics.median(ratios), "difference": difference}
            yield {"method": name, **row, **(of_host if name == "Grad-CAM" else {})}


def measure_compiled(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of images and method: the method as a program, compiled."""
    # Where it only has to run, without a compiler.
    backend = "eager" if subject.small else "inductor"
    names = list(subject.methods)[: 1 if subject.small else None]

    @cache
    def compile_program(name: str) -> Any:
        program = export.program(subject.methods[name], subject.images[:2]).module()
        return torch.compile(program, dynamic=True, backend=backend)

    # One image is compiled anew: at the end, if there is time.
    for last in (False, True):
        for name, count in itertools.product(names, [count for count in subject.batches if (count == 1) == last]):
            program, x = compile_program(name), subject.images[:count]

            def run(x: Tensor, program: Any = program) -> Any:
                with torch.no_grad():
                    return program(x)

            difference = compare(run(x)["maps"], subject.methods[name].explain(x).maps)
            row = subject.measure({"compiled": run}, count)["compiled"]
            yield {"method": name, **row, "difference": difference}


def run_networks(name: str, device: torch.device, small: bool) -> None:
    """Run a part about a network, and print its rows."""
    prepare(str(device))
    warnings.simplefilter("ignore")
    network, how = name.split(", ")
    measure = measure_eager if how == "eager" else measure_compiled
    for row in measure(Subject(network, device, small)):
        print(ROW + json.dumps({"network": network, "as": how, **row}), flush=True)


def list_tests() -> list[str]:
    """Return the files with tests that need a GPU."""
    return sorted(
        str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in file.read_text()
    )


def make_command(part: Part, options: argparse.Namespace) -> list[str]:
    """Return the command of a part."""
    if part.name == "CUDA tests":
        workers = ["--numprocesses", "4"] if importlib.util.find_spec("xdist") and options.device != "cpu" else []
        flags = ["--quiet", "-m", "cuda", "--tb", "short", "-p", "no:cacheprovider", *workers]
        return [sys.executable, "-m", "pytest", *flags, *list_tests()]
    small = ["--small"] if options.small else []
    return [sys.executable, __file__, "--part", part.name, "--device", options.device, *small]


def run_part(part: Part, limit: float, options: argparse.Namespace) -> tuple[str, str | None]:
    """Run a part in a process of its own; return what it printed, and why it failed, or None."""
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            make_command(part, options), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
            reason = f"exit status {status}" if status else None
        except subprocess.TimeoutExpired:
            reason = f"cut off after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # and its compilers
                process.wait()
        file.seek(0)
        return file.read(), reason


def read_rows(text: str) -> list[dict[str, Any]]:
    """Return the rows of a part's output."""
    return [json.loads(line.removeprefix(ROW)) for line in text.splitlines() if line.startswith(ROW)]


def write_table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a table of Markdown, with a column for each name in any of them."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        [f"{row[c]:.3g}" if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns] for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *cells])


def describe_machine(device: torch.device) -> str:
    """Return hardware and versions."""
    found = environment(device, ["grad-cam", "scikit-learn"]) | {"CPU cores": os.cpu_count(), "package": __version__}
    if device.type == "cuda":
        found |= {
            "devices": torch.cuda.device_count(),
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
        }
        found["TF32 in convolutions"] = torch.backends.cudnn.allow_tf32
    return ", ".join(f"{name} {value}" for name, value in found.items())


def write_section(outcomes: list[tuple[Part, float, str, str | None]], command: str, machine: str) -> str:
    """Return the day as a section of Markdown."""
    lines = [f"## A day with a GPU, {date.today()}", "", f"`{command}`: {machine}.", ""]
    lines += ["| part | seconds | |", "|---|---|---|"]
    lines += [f"| {part.name} | {seconds:.0f} | {f'FAILED: {reason}' if reason else 'ran'} |"
              for part, seconds, _, reason in outcomes]  # fmt: skip
    tests, *networks = outcomes
    told = [line for line in tests[2].splitlines() if line.startswith(("FAILED", "ERROR"))]
    lines += ["", f"CUDA tests: {tests[2].strip().splitlines()[-1] if tests[2].strip() else 'no output'}", ""]
    lines += [f"- `{line}`" for line in told] + [""] * bool(told)
    rows = [row for _, _, text, _ in networks for row in read_rows(text)]
    if rows:
        lines += [
            "The bare network is the backbone up to its features. An explanation is that of three components and the",
            "predicted class; times are medians of ratios within a round, with quartiles; memory is the peak on top of",
            "what was held before. The difference is to the host's map (eager) or to `explain` (compiled), as a part",
            "of the largest number. Kernels are launches, on a CPU operations that are no views.",
            "",
            write_table(rows),
            "",
        ]
    for part, _, text, reason in outcomes:
        if reason:
            kept = [line for line in text.splitlines() if not line.startswith(ROW)][-25:]
            lines += [f"{part.name} failed, {reason}:", "", "```", *kept, "```", ""]
    return "\n".join(lines)


def main() -> None:
    """Run all parts, or one, of which only rows are printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="small networks, few images, no compiler: it runs, that is all"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.md"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: pass --device cpu --small to see that it runs")
    if options.part:
        run_networks(options.part, device, options.small)
        return
    outcomes: list[tuple[Part, float, str, str | None]] = []
    begin, planned = time.monotonic(), 0
    for part in PARTS:
        planned += part.seconds
        start = time.monotonic()
        text, reason = run_part(part, begin + planned - start, options)
        outcomes.append((part, time.monotonic() - start, text, reason))
        print(f"{part.name}: {reason or 'ran'}, {outcomes[-1][1]:.0f} s", file=sys.stderr, flush=True)
    given = " ".join(["benchmarks/gpu.sh", *sys.argv[1:]])
    section = write_section(outcomes, given, describe_machine(device))
    options.out.write_text(section)
    print(section)
    sys.exit(any(reason for *_, reason in outcomes))


if __name__ == "__main__":
    main()
