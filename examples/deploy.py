"""Export explanations to one file, and use it without PyTorch: ``python examples/deploy.py --out deployed``.

The script fits a head on handwritten digits and writes ``explainer.onnx``. Next to it, it puts ``explainer.py``, which
needs only numpy, Pillow and onnxruntime; you can copy both to wherever you need explanations. Then it explains a digit
there, in another process.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, PCATarget, SVMTarget, export, extract_features


def export_digits(folder: Path) -> None:
    """Fit a head on a small network's features of handwritten digits, and write its explanation and a digit."""
    torch.manual_seed(0)
    digits = load_digits()
    images = nn.functional.interpolate(
        torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], (32, 32), mode="bilinear"
    )
    backbone = nn.Sequential(
        nn.Conv2d(1, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 128, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    )
    features, labels = extract_features(backbone.eval(), [(images, torch.tensor(digits.target))], progress=False)
    net = PCASVMNet(backbone, make_pipeline(StandardScaler(), PCA(16), SVC()).fit(features, labels)).eval()
    targets = [SVMTarget(), SVMTarget(versus="runner-up"), PCATarget(0), PCATarget(1)]
    told = export.onnx(ContributionCAM(net, ["3"]), images[:16], folder / "explainer.onnx", targets)
    print(f"wrote {folder / 'explainer.onnx'}: within {max(told['differences'].values()):.0e} of explain")
    Image.fromarray((255 * images[0, 0].numpy()).astype(np.uint8)).save(folder / "photo.png")


def main() -> None:
    """Export here, and explain in a process that imports neither torch nor this package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("deployed"), help="folder (default: deployed)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    export_digits(out)
    export.write_reader(out / "explainer.py")
    command = [sys.executable, "explainer.py", "explainer.onnx", "photo.png", "--out", "maps.png"]
    print(f"in {out}: python {' '.join(command[1:])}", flush=True)
    subprocess.run(command, cwd=out, check=True)
    print(f"wrote {out / 'maps.png'}")


if __name__ == "__main__":
    main()
