"""What every benchmark needs: a head with a given number of support vectors, seconds, peak memory, the machine."""

import ctypes
import gc
import importlib.metadata
import itertools
import platform
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm import BlankMapWarning, ContributionCAM

_TOLERANCE = 1e-3  # of the largest value, in float32


def vgg16_small_dense() -> nn.Module:
    """Return the network of the paper: VGG16 with dense layers of 40, 30, 20 and 10 behind its 6x6 maps."""
    net = torchvision.models.vgg16(weights=None)
    net.avgpool = nn.Identity()
    sizes = [512 * 6 * 6, 40, 30, 20]
    dense = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    net.classifier = nn.Sequential(*dense, nn.Linear(20, 10))
    return net


def normalise(backbone: nn.Module, images: Tensor) -> nn.Module:
    """Give the BatchNorms of an untrained network the statistics of images: else its activations fade to 1e-9."""
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # an average over all batches
    with torch.no_grad():
        backbone.train()(images)
    return backbone.eval()


def noisy_head(features: np.ndarray, components: int, support_vectors: int, classes: int = 2) -> Any:
    """Return scaler, PCA and RBF SVM whose labels are noise, so that nearly every sample is a support vector."""
    rng = np.random.default_rng(0)
    samples = features[rng.integers(len(features), size=support_vectors + support_vectors // 30)]
    samples = samples + features.std(0) * rng.normal(size=samples.shape)
    labels = rng.integers(classes, size=len(samples))
    return make_pipeline(StandardScaler(), PCA(components, random_state=0), SVC(cache_size=1000)).fit(samples, labels)


def check_sums(cam: ContributionCAM, x: Tensor, targets: list[Any]) -> None:
    """Compare the sums of maps with values.

    Raises:
        RuntimeError: they differ.
    """
    maps = cam.explain(x, targets)
    beside = 0 if maps.remainder is None else maps.remainder
    sums = (maps.maps.sum((2, 3)) + beside) * maps.log_scale.exp() + maps.baseline_values
    error = float((sums - maps.values).abs().max() / maps.values.abs().max())
    if not error <= _TOLERANCE:
        raise RuntimeError(f"maps add up to another value: by {error:.2g}")


def prepare(device: str, packages: Iterable[str] = ()) -> tuple[torch.device, dict[str, Any]]:
    """Set the allocator, silence the blank maps of random networks, print the machine; return device and machine."""
    _keep_freed_memory()
    warnings.simplefilter("ignore", BlankMapWarning)
    machine = environment(torch.device(device), packages)
    print(", ".join(f"{name} {value}" for name, value in machine.items()) + "\n")
    return torch.device(device), machine


def _keep_freed_memory() -> None:
    """Let glibc keep the memory that tensors free, as a process that has run for long does.

    By default it gives large blocks back at once, or not, depending on what else lies in the heap, and touching fresh
    pages again took two thirds of a forward pass of MobileNetV2: ratios of two such times are a matter of luck.

    Raises:
        RuntimeError: the C library refuses.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        if not (libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30) and libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)):
            raise RuntimeError("this C library does not let its allocator be set: ratios would be a matter of luck")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call."""
    synchronise(device)
    start = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait for an accelerator."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the most memory that one call held on top of what was held before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes.

    Args:
        field: its name.

    Returns:
        Bytes.

    Raises:
        RuntimeError: there is no such field.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status: memory is measured on Linux only")


def environment(device: torch.device, packages: Iterable[str]) -> dict[str, Any]:
    """Return hardware, threads and versions."""
    hardware = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    elif cpuinfo.exists():
        models = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        hardware = models[0] if models else hardware
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchvision", *packages)}
    return {"hardware": hardware, "threads": torch.get_num_threads(), "python": platform.python_version(), **versions}
