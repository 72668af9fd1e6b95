"""The recipes of docs/transformers.md run as they are printed; so does its example."""

import re
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import transformer
from reference import gap, relative
from sklearn.datasets import load_digits
from torch import nn
from towers import Tower

from pytorch_grad_cam_pcasvm import BlankMapWarning

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "transformers.md").read_text()
PACKAGE = ROOT / "pytorch_grad_cam_pcasvm"


def sections():
    """Return the python blocks of every section of the page that has any, by its title."""
    found = {}
    for section in re.split(r"^#+ ", PAGE, flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
        if blocks:
            found[section.splitlines()[0]] = blocks
    return found


def small_timm(monkeypatch):
    timm = pytest.importorskip("timm")
    create = timm.create_model

    def small(name, *, pretrained, **options):
        assert pretrained, "the recipe is of trained weights"
        return create(name, **options, embed_dim=24, num_heads=2)

    monkeypatch.setattr(timm, "create_model", small)
    return timm


def small_torchvision(monkeypatch):
    def small(weights):
        assert weights == "DEFAULT"
        return torchvision.models.VisionTransformer(224, 16, num_layers=12, num_heads=2, hidden_dim=24, mlp_dim=48)

    monkeypatch.setattr(torchvision.models, "vit_b_16", small)


def small_transformers(monkeypatch):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3}

    def dinov2(name):
        assert name == "facebook/dinov2-with-registers-small"
        return transformers.Dinov2WithRegistersModel(
            transformers.Dinov2WithRegistersConfig(**sizes, image_size=518, patch_size=14)
        )

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", dinov2)


def small_open_clip(monkeypatch):
    open_clip = pytest.importorskip("open_clip")

    def small(name, pretrained):
        assert (name, pretrained) in open_clip.list_pretrained()
        vision = open_clip.CLIPVisionCfg(layers=12, width=24, head_width=12, patch_size=32, image_size=224)
        text = open_clip.CLIPTextCfg(layers=1, width=8, heads=2, vocab_size=10)
        return open_clip.model.CLIP(16, vision, text), None, None

    monkeypatch.setattr(open_clip, "create_model_and_transforms", small)


def given(size=224):
    """Return what a recipe is given: a loader of noise of two classes, and images."""
    generator = torch.Generator().manual_seed(0)
    x, images = (torch.randn(n, 3, size, size, generator=generator) for n in (12, 2))
    labels = torch.arange(12) % 2
    return {"train_loader": list(zip(x.split(6), labels.split(6), strict=True)), "images": images}


def run(blocks, **names):
    """Run blocks as they are printed, one after the other, and return what they leave."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BlankMapWarning)  # a recipe whose maps are blank is none
        for block in blocks:
            exec(compile(block, "docs/transformers.md", "exec"), names)
    return names


def check(names, grid):
    """Check that maps are on a grid, and add up, with the tokens of no patch, to what the network gives."""
    maps, net, images = (names[name] for name in ("maps", "net", "images"))
    assert maps.maps.shape == (2, 4, *grid)
    assert bool((maps.remainder != 0).all())  # how much it is depends on the network, which is random
    assert gap(maps) < 1e-4  # the scaler divides features of 0.8 by their spread of 0.02, and enlarges rounding
    with torch.no_grad():
        again = net(torch.cat([x for x, _ in names["train_loader"]])).features
        components = net(images).components
    assert relative(again, torch.from_numpy(names["features"])) < 1e-5, "the head gets other features than in training"
    assert relative(maps.values[:, :3], components) < 1e-4
    assert float(maps.nu.min()) > 0


RECIPES = {
    "timm": (small_timm, (16, 16)),
    "torchvision": (small_torchvision, (14, 14)),
    "Hugging Face": (small_transformers, (16, 16)),
    "open_clip": (small_open_clip, (7, 7)),
    "Your own": (lambda monkeypatch: None, (14, 14)),
}


@pytest.mark.parametrize("title", RECIPES)
@pytest.mark.optional
def test_a_recipe_runs_as_it_is_printed(title, monkeypatch):
    smaller, grid = RECIPES[title]
    smaller(monkeypatch)
    (recipe,) = sections()[title]
    check(run([recipe], **given()), grid)


class Named(nn.Module):
    """A tower whose layers have the names of timm's: a class token, four registers, 16 x 16 patches."""

    def __init__(self):
        super().__init__()
        tower = Tower(before=5, depth=12, fused=True)
        self.tower, self.blocks, self.norm = tower, tower.blocks, tower.norm

    def forward(self, x):
        return self.tower(x)


@pytest.mark.slow
def test_the_other_blocks_of_the_page_run_one_after_the_other():
    found = sections()
    others = [title for title in found if title not in RECIPES]
    assert others == [
        "Transformers",
        "What is on the map, and what is not",
        "Frozen attention",
        "Maps of single heads",
        "Error messages",
    ]
    torch.manual_seed(0)
    names = run(found["Transformers"], backbone=Named().eval(), **given(64))
    check(names, (16, 16))
    by_layout = names["maps"]
    names = run([block for title in others[1:] for block in found[title]], **names)
    # Relative to what is added, which is a hundred times as large as some of the sums.
    size = by_layout.maps.abs().sum((2, 3)) + by_layout.remainder.abs()
    size = size * by_layout.log_scale.exp() + by_layout.baseline_values.abs()
    assert ((names["total"] - by_layout.values).abs() < 1e-4 * size).all()
    assert relative(names["frozen"].maps, by_layout.maps) > 1e-3, "attention makes no difference here"
    apart = names["apart"]
    assert apart.heads.shape == (2, 4, 2, 16, 16)
    assert relative(apart.heads.sum(2), apart.maps) < 1e-4
    assert names["most"].shape == (2, 4)
    # The function by hand is of the tower that the page speaks of: registers left out, patches row by row.
    check(names, (16, 16))
    assert names["maps"] is not by_layout
    assert relative(names["maps"].maps, by_layout.maps) < 1e-5


def test_the_page_says_what_the_errors_say():
    text = PAGE[PAGE.index("## Error messages") :]
    messages = re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)
    source = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    assert len(messages) == 5
    assert [message for message in messages if message not in source] == []


def example(monkeypatch, out, *options):
    monkeypatch.setattr("sys.argv", ["transformer.py", "--out", str(out), "--pairs", "3", *options])
    threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():  # the example's own filter ends with it
            transformer.main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_example_runs(tmp_path, monkeypatch, capsys):
    digits = load_digits()
    few = np.flatnonzero(digits.target < 3)[:150]
    few = types.SimpleNamespace(images=digits.images[few], target=digits.target[few])
    monkeypatch.setattr(transformer, "load_digits", lambda: few)
    monkeypatch.setattr(transformer, "WIDTH", 16)
    example(monkeypatch, tmp_path / "new" / "t.png", "--steps", "20")
    for name in ("t.png", "t-pairs.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 3 * 3
    blind = [row for row in rows if "blank |" in row]
    assert blind == [row for row in rows if "| class token |" in row and "last block, `blocks.2`" in row]


def test_shares_on_ones_own_picture():
    maps = torch.zeros(2, 3, 2, 4)
    maps[0, 2, :, :2], maps[0, 2, 0, 2], maps[0, 2, 1, 3] = 1.0, 4.0, -9.0  # left 4, right 4, and some against it
    maps[0, 0, 1, 3] = 2.0  # all of it on the right
    maps[1, 1, 0, 0] = -1.0  # nothing for it
    maps[1, 0, 0, 0], maps[1, 0, 0, 3] = 3.0, 1.0
    shares = transformer.shares_on_own(maps, torch.tensor([[2, 0], [1, 0]]))
    np.testing.assert_allclose(shares, [[0.5, 1.0], [np.nan, 0.25]])
    assert transformer.cell(shares) == "0.50 ± 0.25 (25% blank)"
    assert transformer.cell(np.full((2, 2), np.nan)) == "blank"
