"""Which model families have a closed form: every one with random weights, held against autograd.

    python benchmarks/families.py [--only NAME]

The last block, the last norm in front of attention and a block before them are explained in one pass. Nothing ends the
run: what is refused has its reason in the table.
"""

import argparse
import importlib.util
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measuring import normalise
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from pytorch_grad_cam_pcasvm.path.record import Path as NetworkPath

DOCS = Path(__file__).parents[1] / "docs" / "backbones.md"
HEADER = """| library | family | target layers | closed form error (float64, float32) | contributions add up to |
|---|---|---|---|---|"""
BOUNDS = {"float64": 1e-10, "float32": 1e-4, "sums": 1e-8}
NORMS = re.compile(r"(^|\.)(norm1|ln_1|layer_norm1|layernorm1|layernorm_before|norm_before|input_layernorm)$")

# fmt: off
# Family: model and side of the images; with "!" the network is built for that side.
TIMM = {
    "ViT": "vit_tiny_patch16_224 96!", "ViT, relative positions": "vit_relpos_small_patch16_224 96!",
    "ViT behind a ResNet": "vit_tiny_r_s16_p8_224 96!", "ViT, SAM": "samvit_base_patch16_224 64!",
    "ViT, Perception Encoder": "vit_pe_core_tiny_patch16_384 96!",
    "ViT, differential attention": "vit_dlittle_patch16_reg1_gap_256 96!",
    "SigLIP ViT, attention pooling": "vit_base_patch16_siglip_224 64!",
    "DINOv2 with registers": "vit_small_patch14_reg4_dinov2 112!", "DINOv3": "vit_small_patch16_dinov3 96!",
    "EVA-02": "eva02_tiny_patch14_224 112!", "NaFlexViT": "naflexvit_base_patch16_gap 64",
    "DeiT, distilled": "deit_tiny_distilled_patch16_224 96!", "BEiT": "beit_base_patch16_224 64!",
    "CaiT": "cait_xxs24_224 96!", "ConViT": "convit_tiny 96!", "CrossViT": "crossvit_tiny_240 240",
    "CoaT": "coat_lite_tiny 96!", "DaViT": "davit_tiny 112", "EdgeNeXt": "edgenext_xx_small 128",
    "EfficientFormer": "efficientformer_l1 224", "EfficientFormerV2": "efficientformerv2_s0 224",
    "EfficientViT (MIT)": "efficientvit_b0 128", "EfficientViT (MSRA)": "efficientvit_m0 224",
    "FastViT": "fastvit_t8 128", "FocalNet": "focalnet_tiny_srf 96", "GCViT": "gcvit_xxtiny 224",
    "Hiera": "hiera_tiny_224 224", "LeViT": "levit_128s 224", "MaxViT": "maxvit_rmlp_pico_rw_256 128!",
    "CoAtNet": "coatnet_pico_rw_224 96!", "MobileViT": "mobilevit_xxs 128", "MobileViTV2": "mobilevitv2_050 128",
    "MViTv2": "mvitv2_tiny 224", "NesT": "nest_tiny 224", "NextViT": "nextvit_small 96", "PiT": "pit_ti_224 224",
    "PVTv2": "pvt_v2_b0 96", "RepViT": "repvit_m0_9 128", "Sequencer": "sequencer2d_s 96!", "SHViT": "shvit_s1 128",
    "SwiftFormer": "swiftformer_xs 128", "Swin": "swin_tiny_patch4_window7_224 112!",
    "SwinV2": "swinv2_tiny_window8_256 128!", "SwinV2-CR": "swinv2_cr_tiny_224 112!", "TinyViT": "tiny_vit_5m_224 224",
    "TNT": "tnt_s_patch16_224 96!", "Twins": "twins_pcpvt_small 96!", "Visformer": "visformer_tiny 96!",
    "ViTamin": "vitamin_small_224 96!", "VOLO": "volo_d1_224 96!", "XCiT": "xcit_nano_12_p16_224 96",
    "PoolFormer": "poolformer_s12 96", "CAFormer": "caformer_s18 96", "ConvFormer": "convformer_s18 96",
    "MLP-Mixer": "mixer_s32_224 96!", "gMLP": "gmlp_ti16_224 96!", "ResMLP": "resmlp_12_224 96!",
    "ConvMixer": "convmixer_768_32 56", "ConvNeXt": "convnext_atto 96", "ConvNeXtV2": "convnextv2_atto 96",
    "InceptionNeXt": "inception_next_atto 96", "MambaOut": "mambaout_femto 96", "BotNet": "botnet26t_256 128!",
    "HaloNet": "halonet26t 256", "LambdaResNet": "lambda_resnet26t 128", "CSPNet": "cspresnet50 96",
    "DenseNet": "densenet121 96", "DLA": "dla34 96", "DPN": "dpn48b 96", "EfficientNet": "efficientnet_b0 96",
    "EfficientNet, GroupNorm": "efficientnet_b0_gn 96", "FasterNet": "fasternet_t0 96",
    "GhostNetV2": "ghostnetv2_100 96", "HGNetV2": "hgnetv2_b0 96", "HRNet": "hrnet_w18_small 96",
    "Inception": "inception_v4 112", "MixNet": "mixnet_s 96", "MobileNetV3": "mobilenetv3_small_050 96",
    "MobileNetV4": "mobilenetv4_conv_small 96", "MobileNetV4, hybrid": "mobilenetv4_hybrid_medium 96",
    "NASNet": "nasnetalarge 96", "NFNet": "eca_nfnet_l0 96", "RDNet": "rdnet_tiny 96", "RegNetY": "regnety_002 96",
    "RegNetZ, evonorm": "regnetz_b16_evos 96", "RepVGG": "repvgg_a0 96", "Res2Net": "res2net50_26w_4s 96",
    "ResNeSt": "resnest14d 96", "ResNet": "resnet26 96", "ResNet, anti-aliased": "resnetaa50 96",
    "ResNetV2": "resnetv2_50 96", "ResNetV2, GroupNorm": "resnetv2_50x1_bit 96", "ReXNet": "rexnet_100 96",
    "SelecSLS": "selecsls42b 96", "SENet": "seresnet50 96", "SKNet": "skresnet18 96", "StarNet": "starnet_s1 96",
    "TResNet": "tresnet_m 96", "VGG": "vgg11_bn 96", "VoVNet": "ese_vovnet19b_dw 96", "Xception": "xception41 96",
}
TORCHVISION = {
    "ViT": "vit_b_32 96!", "Swin": "swin_t 112", "SwinV2": "swin_v2_t 128", "MaxViT": "maxvit_t 224",
    "ConvNeXt": "convnext_tiny 96", "AlexNet": "alexnet 96", "EfficientNetV2": "efficientnet_v2_s 96",
    "GoogLeNet": "googlenet 96", "Inception": "inception_v3 299", "MNASNet": "mnasnet0_5 96",
    "MobileNetV2": "mobilenet_v2 96", "RegNet": "regnet_x_400mf 96", "ResNeXt": "resnext50_32x4d 96",
    "ShuffleNetV2": "shufflenet_v2_x0_5 96", "SqueezeNet": "squeezenet1_1 96", "VGG": "vgg11 96",
}
_VIT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 112, "patch_size": 14}
_CLIP = {**_VIT, "intermediate_size": 128}
_SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
_CONVNEXT = {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 24, 32, 48]}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViT", _CLIP), "DeiT": ("DeiT", _CLIP), "BEiT": ("Beit", {**_CLIP, "use_relative_position_bias": True}),
    "DINOv2": ("Dinov2", _VIT), "DINOv2 with registers": ("Dinov2WithRegisters", _VIT), "DINOv3": ("DINOv3ViT", _CLIP),
    "DINOv3 ConvNeXt": ("DINOv3ConvNext", {}), "CLIP": ("CLIPVision", _CLIP), "SigLIP": ("SiglipVision", _CLIP),
    "AIMv2": ("Aimv2Vision", {**_CLIP, "use_head": True}), "Swin": ("Swin", {**_SWIN, "image_size": 112}),
    "SwinV2": ("Swinv2", {**_SWIN, "image_size": 128, "window_size": 4}), "ConvNeXt": ("ConvNext", _CONVNEXT),
    "ConvNeXtV2": ("ConvNextV2", _CONVNEXT), "CvT": ("Cvt", {}), "FocalNet": ("FocalNet", {"image_size": 112}),
    "Hiera": ("Hiera", {}), "MobileViT": ("MobileViT", {"image_size": 128}), "PVTv2": ("PvtV2", {}),
    "SegFormer": ("Segformer", {}), "ResNet": ("ResNet", {}), "BiT": ("Bit", {}),
}
OPEN_CLIP = {
    "ViT": "ViT-S-32-alt", "ViT, SigLIP 2": "ViT-B-32-SigLIP2-256", "ResNet with attention pooling": "RN50",
    "CoCa": "coca_ViT-B-32", "MobileCLIP": "MobileCLIP-S1",
}
# fmt: on


@dataclass
class Result:
    """A family, and its errors or the reason why it is refused."""

    library: str
    name: str
    layers: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    coarse: bool = False  # whether the network computes in float32 in any case, and so does autograd

    def holds(self, *what: str) -> bool:
        """Return whether errors are there, and within their bounds."""
        return all(self.errors.get(each, math.inf) <= BOUNDS["float32" if self.coarse else each] for each in what)


def families() -> Iterator[tuple[str, str, Callable[[], tuple[nn.Module, int]]]]:
    """Yield the families of all libraries that are here, and what builds a network and tells its images' side."""
    tables = ("timm", TIMM, by_name), ("torchvision", TORCHVISION, by_name)
    tables += ("transformers", TRANSFORMERS, of_transformers), ("open_clip", OPEN_CLIP, of_open_clip)
    for library, table, build in tables:
        if importlib.util.find_spec(library) is None:
            print(f"{library} is not installed: its families are left out")
            continue
        module = importlib.import_module(library)
        yield from ((library, name, partial(build, module, given)) for name, given in table.items())


def by_name(library: Any, given: str) -> tuple[nn.Module, int]:
    """Return a network, of timm's without classifier, and the side of its images."""
    model, side = given.rstrip("!").split()
    of_timm = library.__name__ == "timm"
    options = {"img_size" if of_timm else "image_size": int(side)} if "!" in given else {}
    create = partial(library.create_model, num_classes=0) if of_timm else library.models.get_model
    return create(model, **options), int(side)


def of_transformers(transformers: Any, given: tuple[str, dict[str, Any]]) -> tuple[nn.Module, int]:
    """Return a network, and the side of its images."""
    config = getattr(transformers, f"{given[0]}Config")(**given[1])
    side = getattr(config, "image_size", 112)
    return getattr(transformers, f"{given[0]}Model")(config), side if isinstance(side, int) else side[0]


def of_open_clip(open_clip: Any, model: str) -> tuple[nn.Module, int]:
    """Return the visual tower, and the side of its images."""
    net = open_clip.create_model(model).visual
    return net, net.image_size if isinstance(net.image_size, int) else net.image_size[0]


def layers_of(net: nn.Module, x: Tensor) -> list[str]:
    """Return the last norm in front of attention, the last block, and one before: those that run once and give maps."""
    ran: dict[str, list[Any]] = {}
    names = {module: name for name, module in net.named_modules() if name}
    with register_module_forward_hook(lambda m, a, y: ran.setdefault(names.get(m, ""), []).append(y)), torch.no_grad():
        net(x)
    ran.pop("", None)

    def is_map(y: Any) -> bool:  # of every image, and of more than one position
        return isinstance(y, Tensor) and y.dim() > 2 and len(y) % len(x) == 0 and min(y.shape[1:]) > 1

    maps = [name for name, (y, *again) in ran.items() if not again and is_map(y)]
    numbered = [name for name in maps if name.rpartition(".")[2].isdigit()]
    blocks = [name for name in numbered if len(list(net.get_submodule(name).modules())) > 3] or numbered or maps
    first = blocks[int(0.6 * len(blocks))]
    norms = [name for name in maps[maps.index(first) :] if NORMS.search(name)]
    return list(dict.fromkeys([first, *norms[-1:], blocks[-1]]))


def lively(net: nn.Module, side: int) -> nn.Module:
    """Give what begins at 0, or next to it, and BatchNorms other numbers: a block that adds nothing tests little."""
    for parameter in (p for p in net.parameters() if p.numel() and p.abs().max() < 1e-2):
        nn.init.normal_(parameter, std=0.1)
    return normalise(net, torch.randn(4, 3, side, side)).requires_grad_(False)


def explained(output: Any) -> list[Tensor]:
    """Return the tensors of an output that are features: the pooled ones, where they have a name."""
    pooled = output.get("pooler_output") if hasattr(output, "get") else None
    return [leaf for leaf in tree_leaves(output if pooled is None else pooled) if isinstance(leaf, Tensor)]


def by_autograd(net: nn.Module, names: list[str], x: Tensor, seeds: list[Tensor]) -> list[Tensor]:
    """Return the derivatives of two targets with respect to every target layer, as torch has them."""
    modules, kept = {net.get_submodule(name): name for name in names}, {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if module not in modules:
            return None
        leaf = output.clone() if output.requires_grad else output.detach().clone().requires_grad_()
        return kept.setdefault(modules[module], leaf).clone()

    # Torch's own derivative of hardsigmoid multiplies by 1/6 in float32, also in float64.
    twin = mock.patch.object(F, "hardsigmoid", lambda x, inplace=False: F.relu6(x + 3) / 6)
    with register_module_forward_hook(keep), twin:
        outputs = explained(net(x))
    leaves = [kept[name] for name in names]
    rows = [torch.autograd.grad(outputs, leaves, row, retain_graph=True) for row in zip(*seeds, strict=True)]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


def measured(library: str, name: str, build: Callable[[], tuple[nn.Module, int]]) -> Result:
    """Return what a family gives."""
    result = Result(library, name)
    torch.manual_seed(0)
    try:
        net, side = build()
        net, x = lively(net, side), torch.randn(2, 3, side, side)
        result.layers = layers_of(net, x)
        for dtype in (torch.float32, torch.float64):
            compare(result, net.to(dtype), x.to(dtype))
    except Exception as error:
        result.refused["gradient"] = reason_of(error)
    return result


def compare(result: Result, net: nn.Module, x: Tensor) -> None:
    """Note the error of one precision; of float64, that of contributions, too."""
    path, twice = NetworkPath(net, None, result.layers), x.dtype == torch.float64
    with torch.no_grad():
        passed = path.run(x) if twice else path.record(x)
    seeds = {id(leaf): torch.randn(2, *leaf.shape, dtype=x.dtype) for leaf in explained(passed.output)}
    expected = by_autograd(net, result.layers, x, list(seeds.values()))
    of_output = [seeds.get(id(leaf)) for leaf in passed.tape.leaves]
    with torch.no_grad():
        pulled = [passed.pullback(of_output, target).dense() for target in range(len(expected))]
        errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(pulled, expected, strict=True)]
        result.errors["float64" if twice else "float32"] = float(torch.stack(errors).max())
        result.coarse = twice and any(value.dtype == torch.float32 for value in passed.tape.values)
        try:
            if twice:
                gaps = [missing(passed, of_output, target) for target in range(len(expected))]
                result.errors["sums"] = float(torch.stack(gaps).max())
        except Exception as error:
            result.refused["sums"] = reason_of(error)


def missing(passed: Any, seeds: list[Tensor | None], target: int) -> Tensor:
    """Return how far contributions from a baseline of zeros are from the difference of outputs, relative to both."""
    x = passed.activations[target]
    base = passed.started({target: torch.zeros_like(x[:1])})
    terms = (passed.pullback(seeds, target, base).dense() * x).flatten(1)
    outputs = zip(seeds, passed.tape.leaves, tree_leaves(base.output), strict=True)
    change = [(seed * (y - y0)).flatten(1) for seed, y, y0 in outputs if seed is not None]
    gap = terms.sum(1) - sum(each.sum(1) for each in change)
    return (gap.abs() / (terms.abs().sum(1) + sum(each.abs().sum(1) for each in change))).max()


def reason_of(error: Exception) -> str:
    """Return one line on why a family is refused."""
    return getattr(error, "reason", f"{type(error).__name__}: {error}").strip().splitlines()[0].replace("|", "\\|")


def row(result: Result) -> str:
    """Return a line of the table."""

    def shown(*names: str) -> str:
        wrong = " (float32 inside)" * result.coarse if result.holds(*names) else " **too large**"
        return ", ".join(f"{result.errors[name]:.0e}" for name in names) + wrong

    first = f"| {result.library} | {result.name} | {', '.join(f'`{name}`' for name in result.layers)} |"
    if "gradient" in result.refused:
        return f"{first} refused: {result.refused['gradient']} | |"
    sums = shown("sums") if "sums" in result.errors else f"refused: {result.refused['sums']}"
    return f"{first} {shown('float64', 'float32')} | {sums} |"


def main() -> None:
    """Run all families, or some, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families whose library or name has this in it; nothing is written")
    only = parser.parse_args().only.lower()
    warnings.filterwarnings("ignore")
    found = []
    print(HEADER)
    for library, name, build in families():
        if only in f"{library} {name}".lower():
            found.append(measured(library, name, build))
            print(row(found[-1]), flush=True)
    closed = [result for result in found if result.holds("float64", "float32")]
    added = sum(result.holds("sums") for result in closed)
    counts = ", ".join(f"{n} of {library}" for library, n in Counter(result.library for result in found).items())
    total = (
        f"**{len(closed)} of {len(found)} families have a closed form**; contributions add up for {added} ({counts})."
    )
    print(f"\n{total}")
    if not only:
        before, heading, _ = DOCS.read_text(encoding="utf-8").partition("## Families\n\n")
        text = "\n".join([before + heading + total, "", HEADER, *map(row, found)])
        DOCS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
