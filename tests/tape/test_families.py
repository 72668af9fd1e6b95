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

# Name: options of its builder, and the size of images.
TORCHVISION = {
    "alexnet": {},
    "vgg11_bn": {},
    "convnext_tiny": {},
    "efficientnet_b0": {},
    "inception_v3": INCEPTION | {"size": 96},
    "swin_t": {},
    "squeezenet1_1": {},
    "resnet18": {},
    "densenet121": {"size": 32},
    "googlenet": INCEPTION,
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "mnasnet0_5": {},
    "shufflenet_v2_x0_5": {},
    "regnet_x_400mf": {},
    "regnet_y_400mf": {},
}

SMALL = {"squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5"}  # the others are slow

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


# One of each sort; the others are slow only as they are many.
QUICK = {
    "vit_small_patch16_dinov3",
    "swin_tiny_patch4_window7_224",
    "xcit_nano_12_p16_224",
    "mobilevit_xxs",
    "ghostnet_050",
}


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


@pytest.mark.parametrize(
    "name", [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in TORCHVISION]
)
def test_a_network_of_torchvision(name):
    options = dict(TORCHVISION[name])
    size = options.pop("size", 64)
    module = {"segmentation": segmentation, "video": video}.get(name.partition(".")[0], models)
    hold(getattr(module, name.rpartition(".")[2])(weights=None, num_classes=7, **options), size)


def test_a_vision_transformer_of_torchvision():
    hold(torchvision.models.VisionTransformer(num_classes=7, **VIT), 32)


@pytest.mark.optional
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TIMM]
)
def test_a_network_of_timm(name):
    timm = pytest.importorskip("timm")
    options = dict(TIMM[name])
    size = options.pop("size", options.get("img_size", 64))
    if name not in timm.list_models():
        pytest.skip(f"timm {timm.__version__} has no {name}")
    hold(timm.create_model(name, num_classes=7, **options), size)
