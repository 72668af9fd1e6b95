"""Networks of torchvision and timm, from a layer in their middle: gradient, sums, contributions and replays."""

import pytest
import torch
import torchvision
from against_autograd import faults, random, tensors
from torch import nn
from torchvision import models
from torchvision.models import segmentation, video

pytestmark = pytest.mark.filterwarnings("ignore")
INCEPTION = {"init_weights": False, "aux_logits": False}
PLAIN = {"weights_backbone": None}
VIT = {"image_size": 32, "patch_size": 16, "num_layers": 3, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}

# Builder, options, size of the images.
TORCHVISION = {
    "squeezenet1_0": {},
    "squeezenet1_1": {},
    "resnet18": {},
    "densenet121": {"size": 32},
    "googlenet": INCEPTION,
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "mnasnet0_5": {},
    "shufflenet_v2_x0_5": {},
    "shufflenet_v2_x1_0": {},
    "regnet_x_400mf": {},
    "regnet_y_400mf": {},
}
SLOW_TORCHVISION = {
    "swin_t": {},
    "video.mc3_18": {"size": (4, 32, 32)},
    "segmentation.deeplabv3_mobilenet_v3_large": PLAIN,
    "segmentation.lraspp_mobilenet_v3_large": PLAIN,
    "efficientnet_b0": {},
    "swin_v2_t": {},
    "convnext_tiny": {"size": 32},
    "mobilenet_v3_large": {},
    "mnasnet1_3": {},
    "resnext50_32x4d": {},
    "resnet50": {},
    "alexnet": {},
    "vgg11": {"size": 32},
    "vgg11_bn": {"size": 32},
    "vgg16": {"size": 32},
    "resnet34": {},
    "resnet101": {},
    "wide_resnet50_2": {},
    "densenet169": {},
    "inception_v3": INCEPTION | {"size": 75},
    "efficientnet_b3": {},
    "efficientnet_v2_s": {},
    "regnet_x_1_6gf": {},
    "regnet_y_1_6gf": {},
    "convnext_small": {},
    "vit_b_32": {"size": 224},
    "swin_s": {},
    "swin_v2_s": {},
    "maxvit_t": {"size": 224},
    "segmentation.fcn_resnet50": PLAIN | {"aux_loss": True},
    "segmentation.deeplabv3_resnet50": PLAIN,
    "video.r3d_18": {"size": (4, 32, 32)},
    "video.r2plus1d_18": {"size": (4, 32, 32)},
    "video.s3d": {"size": (16, 64, 64)},
    "video.mvit_v2_s": {"size": (16, 224, 224)},
    "video.swin3d_t": {"size": (4, 64, 64)},
}

# Small ones of timm: of every family the least, with narrow layers where it takes them.
NARROW = {"embed_dim": 24, "depth": 4, "num_heads": 2, "img_size": 64}
TIMM = {
    "vit_tiny_patch16_224": NARROW,
    "vit_small_patch16_dinov3": NARROW,
    "eva02_tiny_patch14_224": NARROW | {"img_size": 56},
    "deit3_small_patch16_224": NARROW,
    "beit_base_patch16_224": NARROW,
    "swin_tiny_patch4_window7_224": {"embed_dim": 24, "num_heads": (1, 2, 4, 8), "img_size": 64, "window_size": 2},
    "mixer_s32_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
    "cait_xxs24_224": NARROW,
    "xcit_nano_12_p16_224": NARROW,
    "mobilevit_xxs": {},
    "convnext_atto": {},
    "mobilenetv4_conv_small": {},
    "ghostnet_050": {},
    "hardcorenas_a": {},
    "repvgg_a0": {},
    "test_vit": {"size": 160},
    "test_resnet": {},
    "test_efficientnet": {},
    "test_convnext": {},
    "test_byobnet": {},
}
SLOW_TIMM = {
    "poolformer_s12": {}, "levit_128s": {"size": 224}, "resnet26d": {}, "seresnet50": {}, "resnest14d": {},
    "res2net50_26w_4s": {}, "skresnet18": {}, "ecaresnet26t": {}, "resnetv2_50": {}, "resnetaa50": {},
    "cspresnet50": {}, "darknet53": {}, "dla34": {}, "dpn68": {}, "selecsls42": {}, "hrnet_w18_small": {},
    "vovnet39a": {}, "ese_vovnet19b_dw": {}, "nf_resnet50": {}, "dm_nfnet_f0": {}, "gernet_s": {}, "rexnet_100": {},
    "tinynet_e": {}, "lcnet_050": {}, "mixnet_s": {}, "fbnetc_100": {}, "spnasnet_100": {}, "semnasnet_075": {},
    "efficientnetv2_rw_t": {}, "hgnetv2_b0": {}, "repghostnet_050": {}, "fastvit_t8": {"size": 128}, "mobileone_s0": {},
    "repvit_m0_9": {}, "starnet_s1": {}, "inception_next_atto": {"size": 64}, "edgenext_xx_small": {},
    "efficientformer_l1": {"size": 224}, "efficientformerv2_s0": {"size": 224}, "efficientvit_b0": {},
    "efficientvit_m0": {"size": 224}, "mobilevitv2_050": {}, "convmixer_768_32": {}, "convnextv2_atto": {},
    "coatnet_nano_rw_224": {"size": 224}, "coat_lite_tiny": {"size": 224}, "convit_tiny": {"size": 224},
    "crossvit_tiny_240": {"size": 240}, "davit_tiny": {}, "focalnet_tiny_srf": {}, "gcvit_xxtiny": {"size": 224},
    "maxvit_rmlp_pico_rw_256": {"size": 256}, "mvitv2_tiny": {"size": 64}, "nest_tiny": {"size": 224},
    "nextvit_small": {}, "pit_ti_224": {"size": 224}, "pvt_v2_b0": {},
    "sequencer2d_s": {"size": 224}, "swinv2_cr_tiny_224": {"size": 224}, "swinv2_tiny_window8_256": {"size": 256},
    "tiny_vit_5m_224": {"size": 224}, "tnt_s_patch16_224": {"size": 224}, "tresnet_m": {},
    "twins_svt_small": {"size": 224}, "visformer_tiny": {"size": 224}, "volo_d1_224": {"size": 224},
    "gmlp_s16_224": {"size": 224}, "hiera_tiny_224": {"size": 224}, "halonet26t": {"size": 256},
    "lambda_resnet26t": {"size": 256}, "botnet26t_256": {"size": 256}, "eca_halonext26ts": {"size": 256},
    "xception41": {}, "vit_base_patch32_clip_224": {"size": 224}, "vitamin_small_224": {"size": 224},
    "samvit_base_patch16_224": {"size": 224}, "naflexvit_base_patch16_gap": {"size": 224}, "rdnet_tiny": {},
    "mambaout_femto": {}, "swiftformer_xs": {"size": 224}, "shvit_s1": {"size": 224}, "csatv2": {"size": 224},
}  # fmt: skip


def enlivened(net, x):
    """Return the network without what hides a part of it: weights of 0, layer scales of 1e-6, other statistics."""
    generator = torch.Generator().manual_seed(1)
    net = net.double().eval().requires_grad_(requires_grad=False)
    for parameter in net.parameters():
        if parameter.abs().max() < 1e-3:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train().momentum = 0.9
    with torch.no_grad():
        net(x)
    for norm in norms:
        norm.eval().running_var.add_(0.1)
    return net


def middle(net, x):
    """Return the name of a layer in the middle that runs once, and behind which nothing else of the images is used."""
    order, outputs = [], {}

    def note(name):
        def noted(module, args, out):
            order.append(name)
            outputs[name] = out.shape if isinstance(out, torch.Tensor) else ()

        return noted

    handles = [module.register_forward_hook(note(name)) for name, module in net.named_modules() if name]
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()
    fitting = [
        name
        for name in order
        if order.count(name) == 1 and len(outputs[name]) >= 3 and len(x) == outputs[name][0] < outputs[name].numel() / 8
    ]
    wanted = int(0.7 * len(fitting))
    for name in sorted(fitting, key=lambda name: abs(fitting.index(name) - wanted))[:40]:
        handle = net.get_submodule(name).register_forward_hook(lambda module, args, out: out.detach())
        with torch.enable_grad():
            alone = not any(y.requires_grad for y in tensors(net(x.clone().requires_grad_())))
        handle.remove()
        if alone:
            return name
    raise AssertionError(f"{type(net).__name__} has no layer that all goes through")


def hold(net, size):
    size = (size, size) if isinstance(size, int) else size
    x = random(2, 3, *size, seed=1)
    net = enlivened(net, torch.cat([x, random(2, 3, *size, seed=3)]))
    name = middle(net, x)
    kept = []
    handle = net.get_submodule(name).register_forward_hook(lambda module, args, out: kept.append(out.clone()))
    with torch.no_grad():
        net(random(2, 3, *size, seed=2))
    handle.remove()
    start = kept[0]
    # torch's own gradient of a hard sigmoid has a constant in float32.
    hard = any("Hard" in type(module).__name__ for module in net.modules())
    found = faults(net, name, x, [start, start[:1]], tokens=start.dim() == 3, tolerance=1e-7 if hard else 1e-9)
    assert not found, f"{type(net).__name__} from {name!r}: " + "; ".join(found)


def slow(names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", [*TORCHVISION, *slow(SLOW_TORCHVISION)])
def test_a_network_of_torchvision(name):
    options = dict((TORCHVISION | SLOW_TORCHVISION)[name])
    size = options.pop("size", 64)
    module = {"segmentation": segmentation, "video": video}.get(name.partition(".")[0], models)
    hold(getattr(module, name.rpartition(".")[2])(weights=None, num_classes=7, **options), size)


def test_a_vision_transformer_of_torchvision():
    hold(torchvision.models.VisionTransformer(num_classes=7, **VIT), 32)


@pytest.mark.optional
@pytest.mark.parametrize("name", [*TIMM, *slow(SLOW_TIMM)])
def test_a_network_of_timm(name):
    timm = pytest.importorskip("timm")
    options = dict((TIMM | SLOW_TIMM)[name])
    size = options.pop("size", options.get("img_size", 64))
    if name not in timm.list_models():
        pytest.skip(f"timm {timm.__version__} has no {name}")
    hold(timm.create_model(name, num_classes=7, **options), size)
