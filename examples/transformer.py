"""Where a Vision Transformer looks, with class token or patch features, on one picture and on two side by side.

The script trains a tiny transformer with a class token and four registers from scratch, and fits a scaler, PCA and an
RBF SVM on its class token, on the mean of its patches, and on both. Then it puts two test pictures of different classes
side by side: how much of the evidence for a class lies on its own picture? It prints a Markdown table for several
target layers and methods, and draws two figures. scikit-learn's handwritten digits need no file; blood cells need the
file of BloodMNIST. It takes about five minutes on one core, without a GPU:

    python examples/transformer.py
    python examples/transformer.py --dataset bloodmnist --root bloodmnist.npz
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import datasets
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm import (
    BaselineWarning,
    BlankMapWarning,
    ClosedFormGradCAM,
    ContributionCAM,
    PCASVMNet,
    SignedMaps,
    SVMTarget,
    extract_features,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.figures import plot_maps

SIZE, PATCH, SHOWN = 32, 4, 128  # pixels of a picture, of a patch, and of a picture in a figure
WIDTH, HEADS, DEPTH, REGISTERS, COMPONENTS = 64, 4, 3, 4, 8
POOLS = {"class token": "cls", "mean of patches": "mean", "both": "cls+mean"}
FIRST, LAST = "blocks.0", f"blocks.{DEPTH - 1}"
LAYERS = {"last block": LAST, "first norm of the last block": f"{LAST}.norm1", "first block": FIRST}
METHODS: dict[str, Any] = {
    "Grad-CAM": lambda mean: (ClosedFormGradCAM, {}),
    "contributions": lambda mean: (ContributionCAM, {"baseline": mean}),
    "frozen attention": lambda mean: (ContributionCAM, {"baseline": mean, "attention": "frozen"}),
}


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens, shape (N, L, D), after they have looked at one another."""
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class TinyTransformer(nn.Module):
    """Patches of 4x4 pixels behind a class token and registers; its output are all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.prefix = nn.Parameter(0.02 * torch.randn(1, 1 + REGISTERS, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, WIDTH, SIZE // PATCH, SIZE // PATCH))
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens (N, 1 + 4 + patches, D) of images (N, 3, H, W) in [0, 1]."""
        patches = self.patches(4 * x - 2)
        # Images of another size stretch the positions, as in other libraries.
        patches = patches + F.interpolate(self.positions, patches.shape[2:], mode="bilinear", align_corners=False)
        tokens = torch.cat([self.prefix.expand(len(x), -1, -1), patches.flatten(2).mT], 1)
        return self.norm(self.blocks(tokens))


def pictures(name: str, root: Path, limit: int, seed: int) -> tuple[list[str], TensorDataset, TensorDataset]:
    """Return the names of the classes, a training and a test set: images (N, 3, 32, 32) in [0, 1] and labels."""
    if name == "digits":
        digits = load_digits()
        images = torch.tensor(1 - digits.images / 16, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
        images = F.interpolate(F.pad(images, (1, 1, 1, 1), value=1.0), (SIZE, SIZE), mode="bilinear")
        labels = torch.tensor(digits.target)
        parts = train_test_split(np.arange(len(labels)), test_size=0.3, stratify=digits.target, random_state=seed)
        train, test = (TensorDataset(images[part], labels[part]) for part in parts)
        return [f"a {digit}" for digit in range(digits.target.max() + 1)], train, test
    data = datasets.load(name, root, limit=limit, seed=seed)
    sets = []
    for part in (data.train, data.test):
        pixels = [np.asarray(part.read(i).resize((SIZE, SIZE)), dtype=np.float32) for i in range(len(part.labels))]
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255
        sets.append(TensorDataset(images, torch.tensor(part.labels)))
    return list(data.classes), *sets


def train(dataset: TensorDataset, classes: int, seed: int, steps: int) -> TinyTransformer:
    """Train on the CPU; class token and mean of patches each have a classifier, so that both learn to be features."""
    torch.manual_seed(seed)
    net, heads = TinyTransformer(), nn.ModuleList(nn.Linear(WIDTH, classes) for _ in range(2))
    optimizer = torch.optim.AdamW([*net.parameters(), *heads.parameters()], weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    images, labels = dataset.tensors
    for step in tqdm(range(steps), desc="training", unit="step"):
        chosen = torch.randint(len(images), (64,))
        dy, dx = torch.randint(-PATCH, PATCH + 1, (2,)).tolist()
        batch = F.pad(images[chosen], (PATCH,) * 4, mode="replicate").roll((dy, dx), (2, 3))
        batch, wanted = batch[..., PATCH:-PATCH, PATCH:-PATCH], F.one_hot(labels[chosen], classes).float()
        if step % 2:  # two pictures and both labels: of one at a time it would not learn to keep things apart
            batch, wanted = torch.cat(batch.chunk(2), 3), (wanted[:32] + wanted[32:]) / 2
        tokens = net(batch)
        features = tokens[:, 0], tokens[:, 1 + REGISTERS :].mean(1)
        loss = sum(F.cross_entropy(head(q), wanted) for head, q in zip(heads, features, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def explain(method: str, net: PCASVMNet, layer: str, mean: Tensor, x: Tensor, targets: Sequence[Any]) -> SignedMaps:
    """Return the maps of many images, a few at a time; mean: the activations that contributions begin from."""
    kind, options = METHODS[method](mean)
    cam = kind(net, [layer], "tokens", **options)
    return SignedMaps.cat([cam.explain(part, targets) for part in x.split(16)])


def side_by_side(images: Tensor, pairs: np.ndarray) -> Tensor:
    """Return the pictures of pairs (P, 2), one beside the other."""
    return torch.cat([images[pairs[:, 0]], images[pairs[:, 1]]], 3)


def shares_on_own(maps: Tensor, of_pair: Tensor) -> np.ndarray:
    """Return how much of the evidence for each of two classes (P, 2) lies on its picture, of maps (P, C, H, W)."""
    positive = maps[torch.arange(len(maps))[:, None], of_pair].double().relu()
    left, right = (half.sum((2, 3)) for half in positive.chunk(2, 3))
    return (torch.stack([left[:, 0], right[:, 1]], 1) / (left + right)).numpy()


def cell(shares: np.ndarray) -> str:
    """Return mean and standard error over pairs, and how many maps had no positive evidence at all."""
    blank = np.isnan(shares)
    if blank.all():
        return "blank"
    of_pairs = np.nanmean(shares[~blank.all(1)], 1)
    text = f"{of_pairs.mean():.2f} ± {of_pairs.std(ddof=1) / len(of_pairs) ** 0.5:.2f}"
    return f"{text} ({blank.mean():.0%} blank)" if blank.any() else text


def table(nets: dict[str, Any], accuracies: dict[str, float], wide: Tensor, of_pair: Tensor, usual: Tensor) -> str:
    """Return the shares of all features, target layers and methods in Markdown; usual: pairs of the training set."""
    targets = [SVMTarget(label) for label in nets["both"].head.classes_.tolist()]
    columns = ("feature", "test accuracy", "target layer", *METHODS, "not on the map")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    means = {layer: mean_activations(nets["both"], [usual], layer, progress=False) for layer in LAYERS.values()}
    for feature, net in nets.items():
        for title, layer in LAYERS.items():
            made = {name: explain(name, net, layer, means[layer], wide, targets) for name in METHODS}
            cells = [cell(shares_on_own(maps.maps, of_pair)) for maps in made.values()]
            added = made["contributions"]
            off, on = added.remainder.abs().double(), added.maps.abs().sum((2, 3)).double()
            start = (feature, f"{accuracies[feature]:.3f}", f"{title}, `{layer}`")
            lines.append(f"| {' | '.join((*start, *cells, f'{(off / (off + on)).mean():.0%}'))} |")
    return "\n".join(lines)


def drawn(images: Tensor) -> Tensor:
    """Return pictures as large as figures show them."""
    return F.interpolate(images, scale_factor=SHOWN // SIZE, mode="bicubic", align_corners=False).clamp(0, 1)


def main() -> None:
    """Train, fit, measure, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits", help="or as examples/paper.py names them (default: digits)")
    parser.add_argument("--root", type=Path, default=Path("data"), help="where its files are (default: data)")
    parser.add_argument("--out", type=Path, default=Path("transformers.png"), help="the figure (transformers.png)")
    parser.add_argument("--steps", type=int, default=900, help="of training, 64 images each (default: 900)")
    parser.add_argument("--limit", type=int, default=2000, help="images per class (default: 2000)")
    parser.add_argument("--pairs", type=int, default=60, help="of pictures side by side (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of splits, of the network, of pairs (default: 0)")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.set_num_threads(1)  # the same seed then gives the same network, however many cores there are
    for category in (BlankMapWarning, BaselineWarning):  # blank maps are counted, and all start at the mean
        warnings.simplefilter("ignore", category)

    names, training, test = pictures(args.dataset, args.root, args.limit, args.seed)
    backbone = train(training, len(names), args.seed, args.steps)
    images, truth = test.tensors
    nets, accuracies, right = {}, {}, torch.ones(len(truth), dtype=torch.bool)
    for feature, pool in POOLS.items():
        loaders = (DataLoader(part, 256) for part in (training, test))
        rows, of_tests = (extract_features(backbone, each, pool=pool, progress=False) for each in loaders)
        head = make_pipeline(StandardScaler(), PCA(COMPONENTS), SVC()).fit(rows[0], np.array(names)[rows[1]])
        nets[feature] = PCASVMNet(backbone, head, pool=pool).eval()
        correct = torch.from_numpy(head.predict(of_tests[0]) == np.array(names)[of_tests[1]])
        accuracies[feature], right = float(correct.double().mean()), right & correct

    rng = np.random.default_rng(args.seed)
    candidates = np.flatnonzero(right.numpy())
    pairs = np.array([rng.choice(candidates, 2, replace=False) for _ in range(4 * args.pairs)])
    pairs = pairs[truth[pairs[:, 0]] != truth[pairs[:, 1]]][: args.pairs]
    of_names = torch.from_numpy(np.searchsorted(nets["both"].head.classes_, np.array(names)))
    print(f"{len(training)} training and {len(test)} test pictures, {len(pairs)} pairs of those that all SVMs know\n")
    usual = side_by_side(training.tensors[0], rng.integers(len(training), size=(256, 2)))
    print(table(nets, accuracies, side_by_side(images, pairs), of_names[truth[pairs]], usual), flush=True)

    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = {label: candidates[truth[candidates].numpy() == label] for label in range(len(names))}
    known = [label for label in (0, 1, 3, 5, 7) if len(found.get(label, ())) > 2]
    chosen = [int(found[label][1]) for label in known]
    mean = mean_activations(backbone, [training.tensors[0][:1000]], FIRST, progress=False)
    maps = {}
    for method, feature in [(method, "class token") for method in METHODS] + [("contributions", "mean of patches")]:
        maps[f"{method}, {feature}"] = explain(method, nets[feature], FIRST, mean, images[chosen], [SVMTarget()])
    rows = [names[label] for label in known]
    plot_maps(drawn(images[chosen]), maps, rows=rows, classes=sorted(names), signed=True).savefig(args.out)

    # The same two classes in every pair, so that a column is about one of them.
    one, other = known[:2]
    pairs = np.array([found[one][:3], found[other][:3]]).T
    pairs[1] = pairs[1, ::-1].copy()
    wide, targets = side_by_side(images, pairs), [SVMTarget(names[label]) for label in (one, other)]
    maps = {}
    for title, layer in list(LAYERS.items())[1:]:
        mean = mean_activations(backbone, [usual], layer, progress=False)
        maps[title] = explain("contributions", nets["class token"], layer, mean, wide, targets)
    plot_maps(drawn(wide), maps, signed=True, compare=False).savefig(args.out.with_stem(f"{args.out.stem}-pairs"))
    print(f"\n{args.out}: {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
