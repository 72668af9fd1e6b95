"""The layer sets the resolution of a map: the same decision explained at 4x4, 8x8 and 16x16 positions.

The script trains a small ResNet on scikit-learn's handwritten digits, placed anywhere on a canvas of 64x64 pixels
together with scraps of other digits, and fits PCA and an SVM on its pooled features. It takes about a minute, and needs
no download and no GPU:

    python examples/layers.py
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm import BlankMapWarning, ClosedFormGradCAM, PCASVMNet, SVMTarget, extract_features

SIZE, DIGIT, SCRAPS = 64, 20, 3  # pixels of the canvas and of a digit; scraps on a canvas


class SmallResNet(nn.Module):
    """Residual blocks at 16x16, 8x8 and 4x4 positions, average pooling to 64 features, and ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.layer1, self.layer2, self.layer3 = (block(*widths) for widths in ((16, 32), (32, 64), (64, 64)))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (N, 10) of images (N, 1, 64, 64)."""
        return self.fc(self.avgpool(self.layer3(self.layer2(self.layer1(self.stem(x))))).flatten(1))


def block(before: int, after: int) -> BasicBlock:
    """Return a residual block that halves the number of positions."""
    shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=2, bias=False), nn.BatchNorm2d(after))
    return BasicBlock(before, after, stride=2, downsample=shortcut)


def canvases(seed: int, repeats: int, digits: np.ndarray, labels: np.ndarray) -> tuple[TensorDataset, Tensor]:
    """Return every digit ``repeats`` times somewhere on a canvas with scraps of others, and masks of where it is."""
    rng = np.random.default_rng(seed)
    images = F.interpolate(torch.tensor(digits / 16, dtype=torch.float32)[:, None], (DIGIT, DIGIT), mode="bilinear")
    images = images[:, 0].repeat(repeats, 1, 1)
    canvas, places = torch.zeros(len(images), 1, SIZE, SIZE), torch.zeros(len(images), SIZE, SIZE)
    for i, image in enumerate(images):
        for _ in range(SCRAPS):
            y, x = rng.integers(0, SIZE - 6, 2)
            canvas[i, 0, y : y + 6, x : x + 6] = images[rng.integers(len(images)), 7:13, 7:13]
        y, x = rng.integers(0, SIZE - DIGIT, 2)
        canvas[i, 0, y : y + DIGIT, x : x + DIGIT] = image
        places[i, y : y + DIGIT, x : x + DIGIT] = 1
    return TensorDataset(canvas, torch.tensor(labels).repeat(repeats)), places


def train(dataset: TensorDataset, seed: int, epochs: int) -> SmallResNet:
    """Train on the CPU."""
    torch.manual_seed(seed)
    net = SmallResNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in tqdm(range(epochs), desc="training", unit="epoch"):
        for images, labels in DataLoader(dataset, 64, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
    return net.eval()


def draw(images: np.ndarray, maps: dict[str, np.ndarray], answers: list[str]) -> Figure:
    """Draw an image a row: itself, and what raises (red) and lowers (blue) the margin at each layer."""
    figure = Figure(figsize=(2.25 * (1 + len(maps)), 2.25 * len(images) + 0.85), dpi=100)
    edges = {"left": 0.035, "right": 0.93, "top": 1 - 0.8 / figure.get_figheight(), "bottom": 0.01}
    grid = figure.subplots(len(images), 1 + len(maps), gridspec_kw={**edges, "wspace": 0.05, "hspace": 0.05})
    for axes, image, answer, *signed in zip(grid, images, answers, *maps.values(), strict=True):
        axes[0].set_ylabel(answer, fontsize=13)
        for axis, values in zip(axes, (None, *signed), strict=True):
            axis.imshow(image, cmap="gray_r", vmin=0, vmax=1.6)
            axis.set(xticks=[], yticks=[])
            if values is not None:
                heat = values / max(np.abs(values).max(), 1e-30)
                axis.imshow(heat, cmap="RdBu_r", vmin=-1, vmax=1, alpha=np.abs(heat) ** 0.6 * 0.85)
    for axis, title in zip(grid[0], ("input", *maps), strict=True):
        axis.set_title(title, fontsize=13)
    bar = grid[0, -1].inset_axes((1.06, 0, 0.08, 1))
    bar.imshow(np.linspace(1, -1, 256)[:, None], cmap="RdBu_r", aspect="auto", extent=(0, 1, -1, 1))
    bar.set(xticks=[], yticks=[])
    for y, word in ((1, "for"), (-1, "against")):
        bar.text(0.5, 1.06 * y, word, ha="center", va="bottom" if y > 0 else "top", fontsize=11)
    return figure


def main() -> None:
    """Train, fit, explain at three layers, draw."""
    parser = argparse.ArgumentParser(description="The same decisions explained at layers of 4x4, 8x8, 16x16 positions.")
    parser.add_argument("--out", type=Path, default=Path("layers.png"), help="the figure (default: layers.png)")
    parser.add_argument("--epochs", type=int, default=8, help="of training (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of canvases and of the network (default: 0)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the same seed then gives the same network, however many cores there are

    digits = load_digits()
    half = np.arange(len(digits.target)) % 2 == 0
    training, _ = canvases(args.seed, 4, digits.images[half], digits.target[half])
    test, places = canvases(args.seed + 1, 1, digits.images[~half], digits.target[~half])
    backbone = train(training, args.seed, args.epochs)
    features, labels = extract_features(backbone, DataLoader(training, 256), layer="avgpool")
    head = make_pipeline(StandardScaler(), PCA(12), SVC(kernel="linear")).fit(features, labels)
    net = PCASVMNet(backbone, head, layer="avgpool").eval()

    x, truth = test.tensors
    predicted = net.predict(x)
    print(f"accuracy on {len(x)} test canvases: {(predicted == truth.numpy()).mean():.3f}")
    right = predicted == truth.numpy()
    chosen = [int(np.argmax((truth.numpy() == digit) * (1 + right))) for digit in (2, 3, 5)]
    answers = [f"a {truth[i]}" if right[i] else f"a {truth[i]}, says {predicted[i]}" for i in chosen]
    layers = {
        "layer3: 4x4\n(the last one)": backbone.layer3,
        "layer2: 8x8\n(recommended)": backbone.layer2,
        "layer1: 16x16": backbone.layer1,
    }
    maps = {}
    print("share of the evidence for the answer that lies on the digit, which covers 10 % of the canvas:")
    for title, layer in layers.items():
        with warnings.catch_warnings(), ClosedFormGradCAM(net, [layer]) as cam:
            warnings.simplefilter("ignore", BlankMapWarning)
            signed = cam.explain(x, [SVMTarget()])
            positive, negative = (part((SIZE, SIZE))[:, 0] for part in (signed.positive, signed.negative))
        maps[title] = (positive - negative)[chosen].numpy()
        share = (positive * places).sum((1, 2)) / positive.sum((1, 2))
        print(f"  {' '.join(title.split())}: {share.nanmean():.0%}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(x[chosen, 0].numpy(), maps, answers).savefig(args.out)
    print(f"{args.out} shows the same decisions at three layers")


if __name__ == "__main__":
    main()
