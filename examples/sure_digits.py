"""What is sure of a map: a digit as an SVM explains it that has learned from few others, and from many.

The CNN has seen all digits but 3 and 8; an SVM on its features tells these two apart. Refits on other samples of the
same digits say which part of a map other digits might turn around. It needs no download and no GPU:

    python examples/sure_digits.py
"""

import argparse
from pathlib import Path

import torch
from digits import digit_sets, on_paper, train_cnn
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch.utils.data import DataLoader, Subset, TensorDataset

from pytorch_grad_cam_pcasvm import SVMTarget, figures, fit_model

FEW, MANY = 20, 120  # digits of each of the two classes


def choose(dataset: TensorDataset, *, others: bool = False) -> TensorDataset:
    """Return the 3 and 8 of a data set, or all other digits."""
    images, labels = dataset.tensors
    wanted = ((labels == 3) | (labels == 8)) ^ others
    return TensorDataset(images[wanted], labels[wanted])


def take(dataset: TensorDataset, count: int) -> DataLoader:
    """Return the first digits of each class."""
    labels = dataset.tensors[1]
    rows = torch.cat([(labels == digit).nonzero()[:count, 0] for digit in (3, 8)])
    return DataLoader(Subset(dataset, rows.tolist()), batch_size=60)


def main() -> None:
    """Train, fit, explain and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("sure_digits.png"))
    options = parser.parse_args()
    train, test = digit_sets(0)
    cnn = train_cnn(choose(train, others=True), 0)
    train, test = choose(train), choose(test)
    images, labels = test.tensors
    shown = images[[int((labels == digit).nonzero()[place]) for digit, place in ((3, 0), (8, 1))]]
    maps = {}
    for count in (FEW, MANY):
        head = make_pipeline(StandardScaler(), PCA(5), SVC())
        model = fit_model(cnn, take(train, count), head, layer="features.5", pool="mean", progress=False)
        told = model.explain(shown, [SVMTarget(3, versus=8)], layers=["features.5"])
        maps[f"learned from {2 * count} digits"] = told
        share = (told.maps.abs() * told.sure()).sum() / told.maps.abs().sum()
        right = (model.net(images).predicted() == (labels == 8)).float().mean()
        print(f"{2 * count} digits: {right:.0%} of others right, {share:.0%} of the evidence sure")
    figures.plot_maps(on_paper(shown), maps, signed=True).savefig(options.out, dpi=75)


if __name__ == "__main__":
    main()
