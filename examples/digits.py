"""Where a CNN, its principal components and two SVMs look on real handwritten digits.

The script trains a small CNN on the digits that come with scikit-learn, and fits PCA and an SVM (linear, then RBF) on
its second dense layer. It prints the accuracy of each and draws one figure of maps: Grad-CAM, and for the SVMs also the
contribution of every position to the decision. It needs no download and no GPU:

    python examples/digits.py
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
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

from pytorch_grad_cam_pcasvm import (
    BlankMapWarning,
    ClosedFormGradCAM,
    ContributionCAM,
    PCASVMNet,
    SignedMaps,
    extract_features,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.figures import plot_component, plot_decision, plot_maps

SIZE, SHOWN = (32, 32), (96, 96)  # of the upscaled images, and of these in a figure
COMPONENTS = 3
FEATURE_LAYER = "classifier.4"  # the second dense layer, after its ReLU: 30 features


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


def on_paper(images: Tensor) -> Tensor:
    """Return digits, (N, 1, 32, 32), as they are drawn, black on white."""
    return 1 - F.interpolate(images, SHOWN, mode="bilinear", align_corners=False)


def explained(cnn: DigitCNN, nets: dict[str, PCASVMNet], images: Tensor, mean: Tensor) -> dict[str, SignedMaps]:
    """Return the maps of the CNN, of the components, and of both SVMs by the gradient and by contributions."""
    # The ReLU before the last pooling: the weights of the maps are the same behind it, the maps coarser.
    before, behind = [cnn.features[4]], [cnn.features[2]]
    maps = {name: ClosedFormGradCAM(net, before).explain(images) for name, net in nets.items()}
    of_svms = {
        f"{name}, {method}": made[:, COMPONENTS:]
        for name, net in nets.items()
        for method, made in (
            ("Grad-CAM", maps[name]),
            ("contributions", ContributionCAM(net, behind, mean=mean).explain(images)),
        )
    }
    components = maps["linear SVM"][:, :COMPONENTS]  # the same for both SVMs
    return {"CNN, Grad-CAM": ClosedFormGradCAM(cnn, before).explain(images), "PCA, Grad-CAM": components, **of_svms}


def main() -> None:
    """Train, fit, explain, draw."""
    parser = argparse.ArgumentParser(description="PCA- and SVM-Grad-CAM on scikit-learn's handwritten digits.")
    parser.add_argument("--out", type=Path, default=Path("digits.png"), help="the figure (default: digits.png)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where maps are made (default: cuda if available)",
    )
    parser.add_argument(
        "--more", action="store_true", help="also draw one decision and one component, beside the figure"
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

    nets = {name: PCASVMNet(cnn, head, FEATURE_LAYER) for name, head in (("linear SVM", linear), ("RBF SVM", rbf))}
    mean = mean_activations(cnn, DataLoader(sets[0], 256), cnn.features[2], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BlankMapWarning)  # the figure says which maps are blank, and why
        before_maps = time.perf_counter()
        maps = explained(cnn, nets, images, mean)
        if images.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - before_maps
    pictures = on_paper(images)
    plot_maps(pictures, maps, rows=range(10), classes=range(10), signed=True).savefig(args.out)
    if args.more:
        cam = ContributionCAM(nets["RBF SVM"], [cnn.features[2]], mean=mean)
        decision = plot_decision(pictures, cam.explain(images), rbf, row=2)
        decision.savefig(args.out.with_stem(f"{args.out.stem}-decision"))
        test, truth = sets[1].tensors
        component = plot_component(cam.model, 0, test, cam=cam, labels=truth, pictures=on_paper(test))
        component.savefig(args.out.with_stem(f"{args.out.stem}-component"))
    print(f"{args.out}: {time.perf_counter() - start:.1f} s in all, of which the maps took {seconds:.3f} s")


if __name__ == "__main__":
    main()
