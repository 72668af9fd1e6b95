"""Time of PatchCore's maps and scores, against anomalib's on the same features and the same bank.

    python benchmarks/patchcore.py [--stored 1000 5000 20000] [--batch 8] [--rounds 7]

torchvision's ResNet-18 with random weights, layers 2 and 3, means over 3x3 neighbours, at 224x224. anomalib's bank is
taken as it is, so that numbers are the same (but for maps, which it upsamples by repetition). Here, *maps and scores*
are ``net(images)``, ``anomaly_map(output, size=, blur=4)`` and ``anomaly_score(output, neighbours=9)``, in double
precision behind the network, in anomalib its forward pass, in single. Ratios of times in turns, the median over rounds
with quartiles. Needs anomalib; PyTorch must be able to run it, which is why it is no dependency.
"""

import argparse
from functools import partial

import numpy as np
import torch
from anomalib.models.image.patchcore.torch_model import PatchcoreModel
from measuring import prepare, timed
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from pytorch_grad_cam_pcasvm import PCASVMNet

_SAME = 1e-3  # relative difference of scores, of single precision


def ours(net: PCASVMNet, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return maps and scores."""
    output = net(x)
    return net.anomaly_map(output, size=x.shape[2:], blur=4), net.anomaly_score(output, neighbours=9)


def main() -> None:
    """Compare scores, and print a Markdown table of times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", type=int, nargs="+", default=[1000, 5000, 20000])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device, _ = prepare("cpu", ["anomalib", "scikit-learn"])
    torch.manual_seed(0)
    model = PatchcoreModel(["layer2", "layer3"], backbone="resnet18", pre_trained=False, num_neighbors=9)
    images = torch.randn(32, 3, 224, 224)
    with torch.no_grad():
        model.train()
        rows = torch.cat([model(part) for part in images.split(8)])
    model.eval()
    x = torch.randn(arguments.batch, 3, 224, 224)
    print("| stored patches | anomalib s | here / anomalib |\n" + "|---" * 3 + "|")
    for count in arguments.stored:
        model.memory_bank = rows[torch.randperm(len(rows))[:count]].clone()
        head = NearestNeighbors(n_neighbors=1).fit(model.memory_bank.numpy())
        backbone = model.feature_extractor.feature_extractor
        net = PCASVMNet(backbone, head, ["layer2", "layer3"], pool=("dense", 3)).eval()
        with torch.no_grad():
            scores, expected = ours(net, x)[1], model(x).pred_score.numpy()
            if not np.allclose(scores, expected, rtol=_SAME):
                raise RuntimeError(f"scores differ: {scores} here, {expected} in anomalib")
            contestants = [partial(model, x), partial(ours, net, x)]
            rounds = np.array([[timed(one, device) for one in contestants] for _ in range(arguments.rounds)])
        low, middle, high = np.quantile(rounds[:, 1] / rounds[:, 0], [0.25, 0.5, 0.75])
        print(f"| {count:,} | {np.median(rounds[:, 0]):.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) |", flush=True)


if __name__ == "__main__":
    main()
