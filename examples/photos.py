"""Photos of several classes: where does the decision come from, and where do two components look?

The script fits a scaler, PCA(16) and an RBF SVM on the pooled features of an ImageNet network, with at most --limit
photos of each class. Of --classes classes, it explains the first test photo that is classified correctly, at --layers.
--root is a folder with ``train`` and ``test``, each with one subfolder per class; or name a data set of
``examples/paper.py`` with --dataset. It takes a minute, without a GPU:

    python examples/photos.py --root photos
    python examples/photos.py --dataset chest-xray --root covid-xray
"""

import argparse
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from experiment import datasets
from experiment.frozen import images, shown
from experiment.network import convolutions
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, extract_features, figures, mean_activations

SIZE = 224


def batches(part: datasets.Part) -> list:
    """Return images (N, 3, 224, 224), as the network takes them, and their labels, sixteen at a time."""
    rows = np.array_split(np.arange(len(part.labels)), -(-len(part.labels) // 16))
    return [(images(part, index, SIZE), torch.from_numpy(part.labels[index])) for index in rows]


def main() -> None:
    """Fit, explain one photo of each class, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="where the photos are")
    parser.add_argument("--dataset", default="folder", help="a data set of examples/paper.py (default: folder)")
    parser.add_argument("--weights", type=Path, help="file with mobilenet_v2's state_dict (default: torchvision's)")
    parser.add_argument("--layers", nargs="+", default=["features"], help="target layers (default: features)")
    parser.add_argument("--limit", type=int, default=100, help="training photos of each class (default: 100)")
    parser.add_argument("--classes", type=int, default=4, help="how many classes to draw (default: 4)")
    parser.add_argument("--out", type=Path, default=Path("photos.png"), help="the figure (default: photos.png)")
    options = parser.parse_args()

    data = datasets.load(options.dataset, options.root)
    train, test = batches(data.train.limited(options.limit)), batches(data.test.limited(25))
    conv = convolutions("mobilenet_v2", options.weights)
    backbone = nn.Sequential(OrderedDict(features=conv)).eval()
    features, labels = extract_features(backbone, train, pool="mean", progress=False)
    head = make_pipeline(StandardScaler(), PCA(16, random_state=0), SVC(class_weight="balanced")).fit(features, labels)
    net = PCASVMNet(backbone, head, pool="mean").eval()

    x, truth = torch.cat([image for image, _ in test]), np.concatenate([label for _, label in test])
    predicted = np.concatenate([net.predict(image) for image, _ in test])
    right = predicted == truth
    print(f"{right.mean():.0%} of {len(truth)} test photos are classified correctly")
    chosen = [int(np.flatnonzero(right & (truth == each))[0]) for each in np.unique(truth[right])[: options.classes]]
    mean = mean_activations(net, train, options.layers, progress=False)
    with ContributionCAM(net, options.layers, mean=mean) as cam:
        maps = cam.explain(x[chosen])
    rows = [data.classes[truth[each]] for each in chosen]
    figure = figures.plot_maps(shown(x[chosen]), maps, signed=True, components=[0, 1], rows=rows, classes=data.classes)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=100)
    print(f"{options.out}: {', '.join(rows)}")


if __name__ == "__main__":
    main()
