"""Backbones of other libraries, recorded and pulled back without a wrapper. Each needs its library, or is skipped."""

import pytest
import torch
import torchvision
from reference import gap, keep_leaves, relative
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM

SIZE = 112


def tokens(prefix, side):
    """Return what turns tokens behind some that belong to no patch into a map."""
    return lambda t: t[:, prefix:].reshape(len(t), side, side, -1).permute(0, 3, 1, 2)


def channels_last(t):
    return t.permute(0, 3, 1, 2)


def of_timm(name, layer, reshape=None, **options):
    def build():
        net = pytest.importorskip("timm").create_model(name, **options)
        return net, layer, reshape, lambda row: row[3]

    return build


def of_transformers(config, model, layer, reshape, **options):
    def build():
        library = pytest.importorskip("transformers")
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "image_size": SIZE, "patch_size": 14}
        net = getattr(library, model)(getattr(library, config)(num_hidden_layers=3, **sizes, **options))
        names = [name for name, _ in net.named_modules() if name.endswith(layer)]
        return net, names[-1], reshape, lambda row: row["pooler_output"][3]

    return build


def of_torchvision():
    net = torchvision.models.VisionTransformer(SIZE, 16, num_layers=12, num_heads=2, hidden_dim=24, mlp_dim=48)
    return net, "encoder.layers.encoder_layer_11.ln_1", tokens(1, 7), _fourth


def of_open_clip():
    library = pytest.importorskip("open_clip")
    vision = library.CLIPVisionCfg(layers=12, width=24, head_width=12, patch_size=32, image_size=SIZE)
    text = library.CLIPTextCfg(layers=1, width=8, heads=2, vocab_size=10)
    return library.model.CLIP(16, vision, text).visual, "transformer.resblocks.11.ln_1", tokens(1, SIZE // 32), _fourth


def _fourth(row):
    return row[3]


SMALL = {"embed_dim": 24, "num_heads": 2}
BACKBONES = {
    "torchvision vit": of_torchvision,
    "timm resnet50": of_timm("resnet50", "layer4.2.conv3"),
    "timm densenet121": of_timm("densenet121", "features.denseblock4.denselayer16.norm2"),
    "timm convnext": of_timm("convnext_atto", "stages.3.blocks.1"),
    "timm vit": of_timm("vit_tiny_patch16_224", "blocks.11.norm1", tokens(1, 7), img_size=SIZE, **SMALL),
    "timm vit, two blocks before": of_timm(
        "vit_tiny_patch16_224", "blocks.9.norm1", tokens(1, 7), img_size=SIZE, **SMALL
    ),
    "timm dinov2 with registers": of_timm(
        "vit_small_patch14_reg4_dinov2", "blocks.11.norm1", tokens(5, 8), img_size=SIZE, **SMALL
    ),
    "timm swin": of_timm(
        "swin_tiny_patch4_window7_224", "layers.3.blocks.1.norm1", channels_last, embed_dim=24, num_heads=(1, 2, 4, 8)
    ),
    "open_clip": of_open_clip,
    "timm dinov3": of_timm("vit_small_patch16_dinov3", "blocks.11.norm1", tokens(5, 7), img_size=SIZE, **SMALL),
    "hf siglip": of_transformers(
        "SiglipVisionConfig", "SiglipVisionModel", "layer_norm1", tokens(0, 8), intermediate_size=128
    ),
    "hf dinov2 with registers": of_transformers(
        "Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", "norm1", tokens(5, 8)
    ),
    "hf dinov2": of_transformers("Dinov2Config", "Dinov2Model", "norm1", tokens(1, 8)),
    "hf clip": of_transformers(
        "CLIPVisionConfig", "CLIPVisionModel", "layer_norm1", tokens(1, 8), intermediate_size=128
    ),
}


QUICK = {"timm dinov3", "timm swin", "open_clip", "hf dinov2 with registers", "hf clip"}  # of each sort one


@pytest.mark.optional
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BACKBONES]
)
def test_a_backbone_is_explained_without_a_wrapper(name):
    torch.manual_seed(0)
    net, layer, reshape, target = BACKBONES[name]()
    net = net.double().eval()
    for parameter in net.parameters():
        if not parameter.any():  # a classifier that begins at 0
            nn.init.normal_(parameter, std=0.1)
    size = 224 if "swin" in name else SIZE
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    maps = ClosedFormGradCAM(net, [layer], reshape).explain(x, [target])
    if reshape is not None:
        found = ClosedFormGradCAM(net, [layer], "tokens").explain(x, [target])
        assert relative(found.maps, maps.maps) < 1e-10
        added = ContributionCAM(net, [layer], "tokens").explain(x, [target])
        assert gap(added) < 1e-12
    with keep_leaves(net.get_submodule(layer)) as kept:
        output = net(x)
    rows = list(output) if isinstance(output, torch.Tensor) else [
        {"pooler_output": row} for row in output["pooler_output"]
    ]  # fmt: skip
    (grad,) = torch.autograd.grad(sum(target(row) for row in rows), kept[0])
    activations = kept[0].detach()
    if reshape is not None:
        activations, grad = reshape(activations), reshape(grad)
    weights = grad.sum((2, 3))
    assert relative(maps.weights[:, 0], weights) < 1e-10
    assert relative(maps.maps[:, 0], torch.einsum("nt,nthw->nhw", weights, activations)) < 1e-10


@pytest.mark.optional
def test_einops():
    einops = pytest.importorskip("einops")

    class Patches(nn.Module):
        """A block whose tensors are moved by einops alone, windows merged into the batch."""

        def __init__(self):
            super().__init__()
            self.conv, self.start = nn.Conv2d(3, 8, 4, 4), nn.Identity()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 5)

        def forward(self, x):
            x = self.start(self.conv(x))
            windows = einops.rearrange(x, "n c (h a) (w b) -> (n h w) (a b) c", a=2, b=2)
            q, k, v = einops.rearrange(self.qkv(windows), "m l (three heads d) -> three m heads l d", three=3, heads=2)
            weights = einops.einsum(q, k, "m h i d, m h j d -> m h i j").softmax(-1)
            mixed = einops.rearrange(einops.einsum(weights, v, "m h i j, m h j d -> m h i d"), "m h l d -> m l (h d)")
            places = einops.rearrange(mixed, "(n h w) l c -> n (h w) l c", n=len(x), h=2)
            return self.out(einops.reduce(places, "n p l c -> n c", "mean"))

    torch.manual_seed(0)
    net = Patches().double().eval()
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    found = ClosedFormGradCAM(net, ["start"]).explain(x, [_fourth])
    expected = ClosedFormGradCAM(net, ["start"], jacobian="autograd").explain(x, [_fourth])
    assert relative(found.maps, expected.maps) < 1e-12
    added = ContributionCAM(net, ["start"]).explain(x, [_fourth])
    assert gap(added) < 1e-12
