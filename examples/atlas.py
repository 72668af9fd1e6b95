"""Explain a whole data set once, and browse it: the 1,797 digits that come with scikit-learn.

The script trains a small CNN, fits PCA and an RBF SVM on its features, explains every image once, and writes a page
that shows what each component means, where every decision looks, and which support vectors drive it. It needs no
download and no GPU:

    python examples/atlas.py
"""

import argparse
import time
from pathlib import Path

import torch
from digits import FEATURE_LAYER, digit_sets, train_cnn
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch.utils.data import ConcatDataset, DataLoader

from pytorch_grad_cam_pcasvm import PCASVMNet, atlas, extract_features

COMPONENTS = 8


def main() -> None:
    """Train, fit, explain, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/atlas"), help="folder of the atlas and its page")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    start = time.perf_counter()
    torch.set_num_threads(1)  # a network this small is faster so
    train, test = digit_sets(options.seed)
    cnn = train_cnn(train, options.seed, options.epochs)
    features, labels = extract_features(cnn, DataLoader(train, 64), FEATURE_LAYER)
    reduction = make_pipeline(StandardScaler(), PCA(COMPONENTS)).fit(features)
    components = reduction.transform(features)
    machines = {kernel: SVC(kernel=kernel).fit(components, labels) for kernel in ("rbf", "linear")}

    net = PCASVMNet(cnn, [reduction, machines["rbf"]], FEATURE_LAYER).eval()
    # Test images first, then those that the machines were fitted on, so that support vectors have pictures.
    digits = ConcatDataset([test, train])
    store = atlas.build(net, digits, ["features.5"], options.out / "store", picture=on_paper)
    page = store.to_html(options.out / "page", heads={"linear": machines["linear"]})

    low, high = store.extremes(component=0, count=8)
    print(f"\n{store}")
    print(f"component 1, lowest: digits {store.labels[low].tolist()}, highest: {store.labels[high].tolist()}")
    wrong = store.disagreements()
    print(f"wrong: {len(wrong)} of {len(store)}; the most decided one is row {wrong[0] if len(wrong) else None}")
    print(f"{time.perf_counter() - start:.0f} s; open {page.resolve().as_uri()}")


def on_paper(image: torch.Tensor) -> torch.Tensor:
    """Return a digit, (1, 32, 32), as it is drawn, black on white."""
    return 1 - image


if __name__ == "__main__":
    main()
