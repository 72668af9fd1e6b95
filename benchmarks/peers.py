"""Time and peak memory of all signed component maps and the SVM map, against what a user would take instead.

    python benchmarks/peers.py [--device cuda] [--network NAME] [--batch 1 8 32] [--rounds 9] [--json FILE]

All contestants do the same work on the same network, in turns, in one process; their maps are compared before anything
is timed, and the script fails where they differ. What is printed is the median over rounds of the ratio within a round.

- *floor*: the bare forward pass up to the features, in inference mode. No maps: nothing can be faster.
- *ours*: ``ClosedFormGradCAM.explain``, and both signed parts of every map.
- *host*: pytorch-grad-cam's ``GradCAM`` on the same ``PCASVMNet``, one call for each of the 2 B + 1 maps.
- *captum*: ``LayerGradCam``, one call for each of the B + 1 signed maps.
- *torchcam*: ``GradCAM``, one forward pass, then one call for each of the B + 1 maps, its ReLU switched off.
- *sk2torch*: the pipeline converted by sk2torch behind the backbone, under the host's ``GradCAM``.
- *jacrev*: the stem without a graph, then ``torch.func.jacrev`` of the path.
- *batched*: the stem without a graph, then one batched call of autograd (``is_grads_batched``) on the path.

Transformers (with timm installed) have no cut: there the peers, who know no tokens, get the same network with the patch
tokens brought to (N, T, H, W) and back behind the target layer, *batched* lets autograd begin there, and *sk2torch* and
*jacrev* take no part.

The host, captum and sk2torch do one thing per map: they are timed for the SVM's map, and their time is multiplied. The
host's maps come upsampled, as numpy; all others at the resolution of the layer.
"""

import argparse
import copy
import importlib.util
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import sk2torch
import torch
import torchvision
from captum.attr import LayerGradCam
from measuring import noisy_head, normalise, peak_bytes, prepare, timed, vgg16_small_dense
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.image import scale_cam_image
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from torchcam.methods import GradCAM as TorchcamGradCAM

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, PCASVMNet, PCATarget, SVMTarget
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, compute_features


@dataclass(frozen=True)
class Network:
    """A backbone, cut by hand where its maps and its features are.

    ``stem`` and ``path`` are for contestants that do not find them on their own. A transformer has none, but a pool.
    """

    name: str
    build: Callable[[], nn.Module]
    target: str
    layer: str | None
    stem: Callable[[Any], nn.Module] = nn.Identity
    path: Callable[[Any], nn.Module] = nn.Identity
    pool: str | None = None
    size: int = 224
    components: tuple[int, ...] = (3, 64)


def vit(name: str) -> Callable[[], nn.Module]:
    """Return what builds a transformer of timm that gives all its tokens."""
    return lambda: importlib.import_module("timm").create_model(name, num_classes=0, global_pool="")


class Grid(nn.Module):
    """A layer whose patch tokens pass through ``maps`` as (N, T, H, W), for those who know no tokens."""

    def __init__(self, layer: nn.Module, side: int) -> None:
        super().__init__()
        self.layer, self.maps, self.side = layer, nn.Identity(), side

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        tokens = self.layer(x)
        maps = self.maps(tokens[:, 1:].mT.unflatten(2, (self.side, self.side)))
        return torch.cat([tokens[:, :1], maps.flatten(2).mT], 1)


NETWORKS = [
    Network(
        "MobileNetV2, pooled",
        torchvision.models.mobilenet_v2,
        "features.18",
        "classifier.0",
        lambda net: net.features,
        lambda net: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ),
    Network(
        "EfficientNet-B0, pooled",
        torchvision.models.efficientnet_b0,
        "features.8",
        "avgpool",
        lambda net: net.features,
        lambda net: nn.Sequential(net.avgpool, nn.Flatten()),
    ),
    Network(
        "ResNet-50, pooled",
        torchvision.models.resnet50,
        "layer4.2",
        "avgpool",
        lambda net: nn.Sequential(*list(net.children())[:-2]),
        lambda net: nn.Sequential(net.avgpool, nn.Flatten()),
    ),
    Network(
        "VGG16, classifier.4",
        torchvision.models.vgg16,
        "features.30",
        "classifier.4",
        lambda net: net.features,
        lambda net: nn.Sequential(net.avgpool, nn.Flatten(), *net.classifier[:5]),
    ),
    Network(
        "VGG16 200x200, dense 40-30-20",
        vgg16_small_dense,
        "features.30",
        "classifier.5",
        lambda net: net.features,
        lambda net: nn.Sequential(nn.Flatten(), *net.classifier[:6]),
        size=200,
        components=(3,),  # 20 features have no 64 components
    ),
    *(
        Network(f"{name}, {pool}", vit(f"{name}_patch16_224"), target, None, pool=pool)
        for name in ("vit_small", "vit_base")
        for pool, target in (("cls", "blocks.11.norm1"), ("mean", "blocks.11"))
        if importlib.util.find_spec("timm")
    ),
]
SUPPORT_VECTORS = {3: (1_000,), 64: (1_000, 10_000)}
OF_TRANSFORMERS = ["host", "captum", "torchcam", "batched"]
PEERS = ["host", "captum", "torchcam", "sk2torch", "jacrev", "batched"]
PACKAGES = ("grad-cam", "captum", "torchcam", "sk2torch", "scikit-learn", "numpy")


class Columns(nn.Module):
    """Components and margin of the predicted class side by side, (N, B + 1), for peers that take columns."""

    def __init__(self, net: PCASVMNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns of images."""
        output = self.net(x)
        return columns(output.components, output.decision)


class Sk2torchColumns(nn.Module):
    """The same columns, from what sk2torch makes of the pipeline."""

    def __init__(self, network: Network, backbone: nn.Module, head: Any) -> None:
        super().__init__()
        self.features = nn.Sequential(network.stem(backbone), network.path(backbone))
        self.reduction, self.machine = sk2torch.wrap(head[:-1]), sk2torch.wrap(head[-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns of images."""
        components = self.reduction.transform(self.features(x).double())
        return columns(components, self.machine.decision_function(components).unsqueeze(-1))


def columns(components: Tensor, decision: Tensor) -> Tensor:
    """Return components and the margin of the predicted class: of two classes it is |a|."""
    return torch.cat([components, decision.abs()], -1)


Map = tuple[int, str, np.ndarray]  # target, sign, the host's maps (N, H, W)


@dataclass(frozen=True)
class Contestant:
    """Something that makes maps: signed ones, (N, k, H, W), or the host's.

    Args:
        run: makes them.
        share: the part of the whole work that ``run`` does.
        first: the first of the targets that it does, of B + 1.
    """

    run: Callable[[], Any]
    share: float = 1.0
    first: int = 0


def contestants(network: Network, backbone: nn.Module, head: Any, x: Tensor, sampled: int = 1) -> dict[str, Contestant]:
    """Return the floor, ours, and the peers, by name.

    Args:
        network: where to cut.
        backbone: the network.
        head: the fitted pipeline.
        x: images.
        sampled: how many maps they make who make one at a time: the SVM's, and of the components before it.

    Returns:
        What can be run.
    """
    net = PCASVMNet(backbone, head, layer=network.layer, pool=network.pool).eval()
    stem, path, layer = network.stem(backbone), network.path(backbone), backbone.get_submodule(network.target)
    ours = ClosedFormGradCAM(net, [layer], None if network.pool is None else "tokens")
    source = net.feature_source(x)[1]
    if network.pool is None:
        converted = Sk2torchColumns(network, backbone, head).to(x.device)
    else:
        gridded = copy.deepcopy(backbone)
        block, _, last = network.target.rpartition(".")
        grid = Grid(gridded.get_submodule(network.target), gridded.patch_embed.grid_size[0])
        setattr(gridded.get_submodule(block), last, grid)
        net, layer = PCASVMNet(gridded, head, pool=network.pool).eval(), grid.maps
        net(x[:1])  # finds the class token
    joined = Columns(net)
    b = head[-2].n_components_
    sample = range(b + 1 - sampled, b + 1)

    def floor() -> Tensor:
        with torch.inference_mode():
            return path(stem(x)) if network.pool is None else compute_features(backbone, source, x)

    def explain() -> Tensor:
        maps = ours.explain(x)
        maps.positive(), maps.negative()
        return maps.maps

    def by_host() -> list[Map]:
        with GradCAM(net, [layer]) as cam:
            return [
                (b, "+", cam(x, [SVMTarget()] * len(x))) if k == b else (k, "-", cam(x, [PCATarget(k, "-")] * len(x)))
                for k in sample
            ]

    def by_sk2torch() -> list[Map]:
        with GradCAM(converted, [layer]) as cam:
            return [(k, "+", cam(x, [ClassifierOutputTarget(k)] * len(x))) for k in sample]

    def by_captum() -> Tensor:
        captum = LayerGradCam(joined, layer)
        return torch.cat([captum.attribute(x, target=k).detach() for k in sample], 1)

    def by_torchcam() -> Tensor:
        with TorchcamGradCAM(joined, layer) as cam:
            cam._relu = False  # signed maps, from half the calls
            scores = joined(x)
            return torch.stack([cam(k, scores, normalized=False, retain_graph=True)[0] for k in range(b + 1)], 1)

    def of_path(activations: Tensor) -> Tensor:
        values = net.head(path(activations)).values
        return columns(values[net.head.component_position], values[-1])

    def weighted(jacobian: Tensor, activations: Tensor) -> Tensor:
        weights = jacobian.flatten(3).sum(-1).transpose(0, 1)
        return (weights @ activations.flatten(2)).unflatten(2, activations.shape[2:])

    def by_jacrev() -> Tensor:
        with torch.no_grad():
            activations = stem(x)
            return weighted(torch.func.jacrev(lambda a: of_path(a).sum(0))(activations), activations)

    def by_batched() -> Tensor:
        with torch.no_grad():
            activations = stem(x)
        leaf = activations.clone().requires_grad_()
        total = of_path(leaf).sum(0)
        seeds = torch.eye(b + 1, dtype=total.dtype, device=x.device)
        (jacobian,) = torch.autograd.grad(total, leaf, seeds, is_grads_batched=True)
        return weighted(jacobian, activations)

    def by_batched_behind() -> Tensor:
        kept: list[Tensor] = []

        def begin(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            kept.append(output.detach().requires_grad_())
            return kept[0].clone()

        handle = layer.register_forward_hook(begin)
        net.requires_grad_(False)  # no graph in front of the layer
        total = joined(x).sum(0)
        handle.remove()
        seeds = torch.eye(b + 1, dtype=total.dtype, device=x.device)
        (jacobian,) = torch.autograd.grad(total, kept[0], seeds, is_grads_batched=True)
        net.requires_grad_(True)
        return weighted(jacobian, kept[0].detach())

    found = {
        "floor": Contestant(floor),
        "ours": Contestant(explain),
        "host": Contestant(by_host, sampled / (2 * b + 1), sample[0]),
        "captum": Contestant(by_captum, sampled / (b + 1), sample[0]),
        "torchcam": Contestant(by_torchcam),
    }
    if network.pool is not None:
        return found | {"batched": Contestant(by_batched_behind)}
    return found | {
        "sk2torch": Contestant(by_sk2torch, sampled / (2 * b + 1), sample[0]),
        "jacrev": Contestant(by_jacrev),
        "batched": Contestant(by_batched),
    }


def difference(name: str, contestant: Contestant, ours: Tensor, size: tuple[int, int]) -> float:
    """Return the largest difference between a contestant's maps and ours, each on the scale of its largest value.

    Args:
        name: the contestant's.
        contestant: what makes the maps.
        ours: signed maps, shape (N, B + 1, H, W).
        size: (W, H) of the host's maps.

    Returns:
        The difference.

    Raises:
        ValueError: they are different maps.
    """
    maps = contestant.run()
    if isinstance(maps, list):
        found = 0.0
        ours = ours / ours[0, 0].numel()  # the host's weights are means, and its scaling adds 1e-7
        for k, sign, theirs in maps:
            part = torch.relu(ours[:, k] if sign == "+" else -ours[:, k])
            # A map that is blank, or nearly, is stretched by the host to noise of its own.
            shown = part.flatten(1).amax(1) > 1e-3 * ours[:, k].flatten(1).abs().amax(1)
            expected = scale_cam_image(scale_cam_image(part.cpu().numpy(), size))  # once per layer, once for all
            if not shown.any():
                raise ValueError(f"{name}: the maps of target {k} are blank, nothing can be compared")
            found = float(np.maximum(found, np.abs(theirs - expected)[shown.cpu().numpy()].max()))
    else:
        expected = ours[:, contestant.first :]

        def unit(signed: Tensor) -> Tensor:
            return signed / signed.flatten(2).abs().amax(-1)[..., None, None]

        found = float((unit(maps) - unit(expected)).abs().max())
    if not found < TOLERANCE:
        raise ValueError(f"{name} gives other maps: they differ by {found:.2g}, at most {TOLERANCE:.0e} was expected")
    return found


TOLERANCE = 1e-3  # float32 networks, maps in [-1, 1]


def measure(
    network: Network, batches: list[int], rounds: int, device: torch.device, peers: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row of results for every head and batch.

    Args:
        network: what is explained.
        batches: numbers of images.
        rounds: how often the floor and ours are timed; three times as often for a single image.
        device: where.
        peers: who takes part besides the floor and ours.

    Yields:
        What was measured: the seconds of every round, the peak bytes, the differences of the maps.
    """
    torch.manual_seed(0)
    images = torch.randn(max(8, *batches), 3, network.size, network.size, device=device)
    backbone = normalise(network.build().to(device), images[:8])
    with torch.no_grad():
        source = FeatureSource(network.layer, None, network.pool).at(backbone, images)
        features = compute_features(backbone, source, images).cpu().numpy()
    peers = peers if network.pool is None else [name for name in peers if name in OF_TRANSFORMERS]
    for components in network.components:
        for support_vectors in SUPPORT_VECTORS[components]:
            head = noisy_head(features, components, support_vectors)
            compared = contestants(network, backbone, head, images[:2].clone(), sampled=2)
            ours = compared["ours"].run()
            size = (network.size, network.size)
            differences = {name: difference(name, compared[name], ours, size) for name in peers}
            for batch in batches:
                found = contestants(network, backbone, head, images[:batch].clone())
                racing = {name: found[name] for name in ("floor", "ours", *peers)}
                maps = found["ours"].run()
                seconds = timed_in_turns(racing, rounds if batch > 1 else 3 * rounds, device)
                peaks = {}
                for name, c in racing.items():
                    backbone.zero_grad()  # what a call leaves behind counts as its own
                    peaks[name] = statistics.median(peak_bytes(c.run, device) for _ in range(1 if name in peers else 3))
                yield {
                    "network": network.name,
                    "components": components,
                    "support vectors": len(head[-1].support_),
                    "batch": batch,
                    "differences": differences,
                    "seconds": seconds,
                    "map bytes": 2 * maps.numel() * maps.element_size(),
                    "peak bytes": peaks,
                }


def timed_in_turns(racing: dict[str, Contestant], rounds: int, device: torch.device) -> dict[str, list[float | None]]:
    """Return the seconds of every round. The peers, who are slow, take part in three of them."""
    seconds: dict[str, list[float | None]] = {name: [] for name in racing}
    for index in range(rounds):
        # Every second round runs backwards: whoever comes first pays for what the one before left behind.
        names = list(racing) if index % 2 else list(racing)[::-1]
        for name in names:
            takes_part = name in ("floor", "ours") or index % math.ceil(rounds / 3) == 0
            seconds[name].append(timed(racing[name].run, device) / racing[name].share if takes_part else None)
    return seconds


def ratios(numerator: list[float | None], denominator: list[float | None]) -> list[float]:
    """Return the quartiles of the ratio within a round: first, median, third."""
    pairs = [(a, b) for a, b in zip(numerator, denominator, strict=True) if a is not None and b is not None]
    return np.percentile([a / b for a, b in pairs], [25, 50, 75]).tolist()


def case(row: dict[str, Any]) -> list[str]:
    """Return the cells that say what was measured."""
    return [row["network"], str(row["components"]), str(row["support vectors"]), str(row["batch"])]


def time_cells(row: dict[str, Any], peers: list[str]) -> list[str]:
    """Return a line of the table of times."""
    seconds = row["seconds"]
    low, middle, high = ratios(seconds["ours"], seconds["floor"])
    of_peers = [f"{ratios(seconds[p], seconds['ours'])[1]:.3g}" if p in seconds else "–" for p in peers]
    return [
        *case(row),
        f"{1e3 * statistics.median(seconds['floor']):.4g}",
        f"{middle:.3f} ({low:.3f}–{high:.3f})",
        *of_peers,
    ]


def memory_cells(row: dict[str, Any], peers: list[str]) -> list[str]:
    """Return a line of the table of peak memory."""
    peaks = row["peak bytes"]
    of_peers = [f"{peaks[name] / peaks['ours']:.2g}" if name in peaks else "–" for name in peers]
    beside = (peaks["ours"] - row["map bytes"]) / peaks["floor"]
    return [*case(row), f"{peaks['floor'] / 1e6:.0f}", f"{beside:.2f}", *of_peers]


def line(cells: list[str]) -> str:
    """Return a line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run the networks and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", default="", help="only networks whose name contains this")
    parser.add_argument("--components", type=int, nargs="+", default=[3, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--rounds", type=int, default=9, help="three times as many for a single image")
    parser.add_argument("--json", type=Path, help="write every measurement to this file, too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # sk2torch reads attributes that scikit-learn will remove
    device, machine = prepare(arguments.device, PACKAGES)
    peers = arguments.peers
    rows: list[dict[str, Any]] = []
    what, against = ["network", "B", "SVs", "N"], [f"{name} / ours" for name in peers]
    print(line([*what, "floor, ms", "ours / floor", *against]) + "\n|" + "---|" * (6 + len(peers)))
    for network in NETWORKS:
        if arguments.network.lower() not in network.name.lower():
            continue
        network = replace(network, components=tuple(b for b in network.components if b in arguments.components))
        for row in measure(network, arguments.batch, arguments.rounds, device, peers):
            print(line(time_cells(row, peers)), flush=True)
            rows.append(row)
            if arguments.json:
                arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    print("\nPeak memory:\n")
    print(line([*what, "floor, MB", "(ours - maps) / floor", *against]) + "\n|" + "---|" * (6 + len(peers)))
    print("\n".join(line(memory_cells(row, peers)) for row in rows))
    largest = {name: max(row["differences"].get(name, 0.0) for row in rows) for name in peers}
    print("\nlargest difference from ours, of maps in [-1, 1]:", {name: f"{d:.1e}" for name, d in largest.items()})


if __name__ == "__main__":
    main()
