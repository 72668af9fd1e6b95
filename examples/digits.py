"""Where a CNN, its principal components and two SVMs look on real handwritten digits.

A small CNN is trained on the digits that come with scikit-learn; PCA and an SVM (linear, then RBF) are fitted on its
second dense layer. The script prints how well each classifies and writes one figure of maps. No download, no GPU:

    python examples/digits.py
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm import BlankMapWarning, ClosedFormGradCAM, PCASVMNet, SignedMaps, extract_features

SIZE = (32, 32)  # of the upscaled images
COMPONENTS = 3
FAINT = 0.15  # a map whose largest value is below this share of nu says so
FEATURE_LAYER = "classifier.4"  # the second dense layer, after its ReLU: 30 features
HOW_TO_READ = (
    "$P^+$ raises a component, $P^-$ lowers it; a pair shares its scale, from 0 to $\\nu$.\n"
    "Grad-CAM and SVM: what speaks for the predicted digit, each stretched to full range."
)


class DigitCNN(nn.Module):
    """Two convolutions, 32x32 -> 8x8, then dense layers of 40, 30, 20 and 10 units."""

    def __init__(self) -> None:
        super().__init__()
        # Without a bias, empty paper gives no activation, and so no heat.
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, padding=2, bias=False), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 5, padding=2, bias=False), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(32 * 8 * 8, 40), nn.ReLU(inplace=True)),
            *(nn.Linear(40, 30), nn.ReLU(inplace=True)),
            *(nn.Linear(30, 20), nn.ReLU(inplace=True)),
            nn.Linear(20, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (N, 10) of images (N, 1, 32, 32)."""
        return self.classifier(self.features(x))


def digit_sets(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: images (N, 1, 32, 32) in [0, 1] and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    with_margin = F.pad(images, (1, 1, 1, 1))
    images = F.interpolate(with_margin, SIZE, mode="bilinear", align_corners=False)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.3, stratify=digits.target, random_state=seed)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train_cnn(dataset: TensorDataset, seed: int, epochs: int = 20) -> DigitCNN:
    """Train on the CPU, where the same seed gives the same network."""
    torch.manual_seed(seed)
    cnn = DigitCNN()
    optimizer = torch.optim.Adam(cnn.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    for _ in tqdm(range(epochs), desc="training", unit="epoch"):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(cnn(images), labels).backward()
            optimizer.step()
    return cnn.eval()


def fit_head(kernel: str, features: np.ndarray, labels: np.ndarray) -> Pipeline:
    """Fit what comes behind the CNN: scaling, PCA and an SVM."""
    return make_pipeline(StandardScaler(), PCA(COMPONENTS), SVC(kernel=kernel)).fit(features, labels)


@torch.no_grad()
def cnn_predictions(cnn: DigitCNN, dataset: TensorDataset, device: str) -> np.ndarray:
    """Return the digits that the CNN alone predicts."""
    return cnn(dataset.tensors[0].to(device)).argmax(1).cpu().numpy()


def print_f1(labels: Sequence[np.ndarray], predictions: dict[str, list[np.ndarray]]) -> None:
    """Print the macro F1 of every classifier on the training and the test set."""
    print(f"\n{'macro F1':<12}{'train':>8}{'test':>8}")
    for name, predicted in predictions.items():
        scores = [f1_score(truth, guess, average="macro") for truth, guess in zip(labels, predicted, strict=True)]
        print(f"{name:<12}" + "".join(f"{score:>8.3f}" for score in scores))
    print()


def one_image_per_digit(labels: np.ndarray, predictions: Sequence[np.ndarray]) -> list[int]:
    """Return for each digit the first image that most classifiers (if possible all) get right."""
    right = np.sum([guess == labels for guess in predictions], axis=0)
    return [int(np.argmax(np.where(labels == digit, right, -1))) for digit in range(10)]


def heat_colours() -> ListedColormap:
    """Return colours from transparent to dark red: the digit shows through where a map is small."""
    colours = mpl.colormaps["YlOrRd"](np.linspace(0.2, 1, 256))
    colours[:, 3] = np.linspace(0, 1, 256) ** 0.5 * 0.9
    return ListedColormap(colours)


def draw_digit(axis: Axes, digit: np.ndarray, darkness: float) -> None:
    """Draw the digit in grey on white."""
    axis.imshow(digit, cmap="gray_r", vmin=0, vmax=1 / darkness, interpolation="bilinear")
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_color("0.75")


def draw_map(axis: Axes, digit: np.ndarray, heat: Tensor, if_blank: str) -> None:
    """Draw a map in [0, 1] over the digit, and say why where nothing is to be seen."""
    draw_digit(axis, digit, darkness=0.4)
    axis.imshow(heat.cpu().numpy(), cmap=heat_colours(), vmin=0, vmax=1, interpolation="bilinear")
    strongest = float(heat.max())
    if strongest < FAINT:
        note = f"at most\n{np.ceil(100 * strongest):.0f}% of $\\nu$" if strongest > 0 else if_blank
        axis.text(0.5, 0.5, note, transform=axis.transAxes, ha="center", va="center", fontsize=12)


def draw_scale(axis: Axes, nu: float) -> None:
    """Draw the colours from 0 to nu."""
    axis.imshow(np.linspace(1, 0, 256)[:, None], cmap=heat_colours(), aspect="auto", extent=(0, 1, 0, 1))
    axis.set_xticks([])
    axis.yaxis.tick_right()
    axis.set_yticks([0, 1], labels=["0", f"{nu:.2g}"], fontsize="small")
    for label, alignment in zip(axis.get_yticklabels(), ("bottom", "top"), strict=True):
        label.set_va(alignment)


def draw_component(axes: Sequence[Axes], digit: np.ndarray, maps: SignedMaps, row: int, component: int) -> None:
    """Draw P_b^+ and P_b^- of one image, and the scale that they share."""
    nu = float(maps.nu[row, component])
    parts = (maps.positive(SIZE), "all evidence\nnegative"), (maps.negative(SIZE), "all evidence\npositive")
    for axis, (part, if_blank) in zip(axes, parts, strict=True):
        draw_map(axis, digit, part[row, component], if_blank if nu > 0 else "no gradient")
    draw_scale(axes[1].inset_axes((1.06, 0, 0.1, 1)), nu)


def draw_decision(axis: Axes, digit: np.ndarray, maps: SignedMaps, row: int, predicted: int) -> None:
    """Draw what speaks for the predicted digit, stretched to its own maximum as Grad-CAM does."""
    heat = maps.positive(SIZE)[row, -1]
    if_blank = "all evidence\nnegative" if maps.nu[row, -1] > 0 else "no gradient"
    draw_map(axis, digit, heat / heat.max().clamp(min=1e-30), if_blank)
    if predicted != row:
        axis.text(0.04, 0.96, f"says {predicted}", transform=axis.transAxes, va="top", fontsize="small", weight="bold")


def draw_figure(digits: np.ndarray, maps: dict[str, SignedMaps], predicted: dict[str, np.ndarray]) -> Figure:
    """Draw one row for each digit 0-9: input, Grad-CAM of the CNN, the components, and both SVMs."""
    columns = ["input", "Grad-CAM"]
    for number in range(1, COMPONENTS + 1):
        columns += [f"$P_{number}^+$", f"$P_{number}^-$", "$\\nu$"]
    columns += ["linear\nSVM", "RBF\nSVM"]
    figure = Figure(figsize=(14.5, 13.2), dpi=100)
    figure.suptitle(HOW_TO_READ, y=0.99, fontsize="large")
    widths = [0.58 if name == "$\\nu$" else 1.0 for name in columns]
    edges = {"left": 0.03, "right": 0.995, "top": 0.88, "bottom": 0.01, "wspace": 0.06, "hspace": 0.06}
    grid = figure.subplots(len(digits), len(columns), width_ratios=widths, gridspec_kw=edges)
    for axis, name in zip(grid[0], columns, strict=True):
        axis.set_title(name, fontsize="medium")
    for row, (axes, digit) in enumerate(zip(grid, digits, strict=True)):
        draw_digit(axes[0], digit, darkness=1.0)
        axes[0].set_ylabel(str(row), rotation=0, ha="right", va="center")
        for axis, name in ((axes[1], "CNN"), (axes[-2], "linear SVM"), (axes[-1], "RBF SVM")):
            draw_decision(axis, digit, maps[name], row, predicted[name][row])
        for component in range(COMPONENTS):
            left = 2 + 3 * component
            draw_component(axes[left : left + 2], digit, maps["linear SVM"], row, component)  # the same for both SVMs
            axes[left + 2].set_axis_off()
    return figure


def main() -> None:
    """Train, fit, explain, draw."""
    parser = argparse.ArgumentParser(description="PCA- and SVM-Grad-CAM on scikit-learn's handwritten digits.")
    parser.add_argument("--out", type=Path, default=Path("digits.png"), help="the figure (default: digits.png)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where maps are made (default: cuda if available)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the CNN (default: 0)")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    torch.set_num_threads(1)  # the same seed then gives the same network, however many cores there are

    sets = digit_sets(args.seed)
    cnn = train_cnn(sets[0], args.seed).to(args.device)
    features, labels = zip(*(extract_features(cnn, DataLoader(part, 256), FEATURE_LAYER) for part in sets), strict=True)
    linear, rbf = (fit_head(kernel, features[0], labels[0]) for kernel in ("linear", "rbf"))
    predictions = {
        "CNN": [cnn_predictions(cnn, part, args.device) for part in sets],
        "linear SVM": [linear.predict(rows) for rows in features],
        "RBF SVM": [rbf.predict(rows) for rows in features],
    }
    print_f1(labels, predictions)
    on_test = {name: test for name, (_, test) in predictions.items()}
    chosen = one_image_per_digit(labels[1], list(on_test.values()))
    images = sets[1].tensors[0][chosen].to(args.device)

    models = {
        "CNN": cnn,
        "linear SVM": PCASVMNet(cnn, linear, FEATURE_LAYER),
        "RBF SVM": PCASVMNet(cnn, rbf, FEATURE_LAYER),
    }
    with warnings.catch_warnings(), mpl.rc_context({"font.size": 16}):
        warnings.simplefilter("ignore", BlankMapWarning)  # the figure says which maps are blank, and why
        before_maps = time.perf_counter()
        # The ReLU before the last pooling: the weights of the maps are the same behind it, the maps coarser.
        maps = {name: ClosedFormGradCAM(model, [cnn.features[4]]).explain(images) for name, model in models.items()}
        if images.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - before_maps
        figure = draw_figure(images[:, 0].cpu().numpy(), maps, {name: test[chosen] for name, test in on_test.items()})
        figure.savefig(args.out)
    print(f"{args.out}: {time.perf_counter() - start:.1f} s in all, of which the maps took {seconds:.3f} s")


if __name__ == "__main__":
    main()
