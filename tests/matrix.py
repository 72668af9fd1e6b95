"""Does onnxruntime, in a process of its own, give what ``explain`` gives? A script: ``python tests/matrix.py``.

Networks x heads x methods x targets: each is exported, and run by a process without torch and this package on 1, 3 and
7 images, of which none was used for tracing. Printed is the largest difference, as a part of the largest value (of the
size of each map, its logarithm). Where it is above 1e-5, since a small map may be the difference of large terms, both
are compared with explain in double precision. The exit status is 1 where a file differs by more than 1e-5 from that.
"""

import argparse
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "export"), str(Path(__file__).parent)]

import numpy as np
import torch
import torchvision
from cams import BASIC, METHODS
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from test_program import CASES, made

from pytorch_grad_cam_pcasvm import PCASVMNet, export, extract_features, mean_activations
from pytorch_grad_cam_pcasvm.studio.export.outputs import compared, name_outputs

LARGEST = 1e-5
COUNTS = (1, 3, 7)
# Networks that people use: the target layer, and where features come from.
NETWORKS = {
    "resnet18": ("layer4", "avgpool"),
    "mobilenet_v2": ("features", "features"),
    "mobilenet_v3_small": ("features", "avgpool"),
    "efficientnet_b0": ("features", "avgpool"),
    "densenet121": ("features", "features"),
    "vgg11_bn": ("features", "classifier.4"),
    "squeezenet1_1": ("features", "features"),
    "convnext_tiny": ("features", "avgpool"),
    "regnet_y_400mf": ("trunk_output", "avgpool"),
    "swin_t": ("features", "avgpool"),
    "vit_b_32": ("encoder.layers.encoder_layer_10", "getitem"),
}
_RUN = """
import sys, numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1] + "/explainer.onnx", providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]
for count in sys.argv[2:]:
    x = np.load(f"{sys.argv[1]}/x{count}.npy")
    np.savez(f"{sys.argv[1]}/found{count}.npz", **dict(zip(names, session.run(names, {"images": x}))))
assert not {"torch", "sklearn", "pytorch_grad_cam_pcasvm"} & set(sys.modules)
"""


def pictures(count: int, side: int) -> torch.Tensor:
    """Return images of many colours and contrasts, or a network with random weights sees no difference between them."""
    return torch.randn(count, 3, side, side) * 3 * torch.rand(count, 1, 1, 1) + torch.randn(count, 3, 1, 1)


def named(network: str, method: str):
    """Return a method on a network of torchvision, images that it was not fitted on, and targets."""
    torch.manual_seed(0)
    side = 96 if network == "vit_b_32" else 64
    options = {"image_size": side} if network == "vit_b_32" else {}
    backbone = torchvision.models.get_model(network, weights=None, **options).eval()
    layer, features = NETWORKS[network]
    x = pictures(30, side)
    where = None if features == "getitem" else features
    if where is None:
        backbone.heads = torch.nn.Identity()
    pool = "mean" if where == layer else None if where == "classifier.4" or where is None else "mean"
    rows = extract_features(backbone, [x], where, pool=pool, progress=False)[0]
    head = make_pipeline(StandardScaler(), PCA(4), SVC(gamma=0.01)).fit(rows, np.arange(30) % 3)
    net = PCASVMNet(backbone, head, where, pool=pool).eval()
    transform = "tokens" if network in ("vit_b_32", "swin_t") else None
    given = {}
    if method == "ContributionCAM":
        given["mean"] = mean_activations(net, [x], layer, progress=False)
    return METHODS[method](net, [layer], transform, **given), pictures(2, side), None


def largest(found: list[dict[str, np.ndarray]], expected: list[dict[str, torch.Tensor]]) -> float:
    """Return the largest difference of any output, as a part of its largest value for any image."""
    ours = {name: np.concatenate([each[name] for each in found]) for name in expected[0]}
    return max(compared(ours, {name: torch.cat([each[name] for each in expected]) for name in ours}).values())


def difference(case: tuple[str, ...]) -> tuple[float, str]:
    """Return the largest difference of a case over all outputs and numbers of images, and why there is none."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        cam, x, targets = made(*case) if len(case) == 4 else named(*case)
        with tempfile.TemporaryDirectory() as folder:
            export.onnx(cam, x, f"{folder}/explainer.onnx", targets)
            for count in COUNTS:
                np.save(f"{folder}/x{count}.npy", pictures(count, x.shape[-1]).numpy())
            subprocess.run([sys.executable, "-c", _RUN, folder, *map(str, COUNTS)], check=True)
            batches = [torch.from_numpy(np.load(f"{folder}/x{count}.npy")) for count in COUNTS]
            expected = [name_outputs(cam.explain(images, targets)) for images in batches]
            found = [dict(np.load(f"{folder}/found{count}.npz")) for count in COUNTS]
        worst = largest(found, expected)
        if worst <= LARGEST:
            return worst, ""
        cam.model.double()
        exact = [name_outputs(cam.explain(images.double(), targets)) for images in batches]
        own = largest([{name: x.numpy() for name, x in each.items()} for each in expected], exact)
        ours = largest(found, exact)
        return ours, f"from explain {worst:.1e}; in double precision: the file {ours:.1e}, explain {own:.1e}"
    except Exception as error:  # the others are run all the same
        return np.inf, f"{type(error).__name__}: {error}"


def main() -> int:
    """Run all cases, and return whether one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="cases with this in their names, or one of these: a|b")
    options = parser.parse_args()
    cases = [*CASES, *((network, method) for network in NETWORKS for method in BASIC)]
    cases = [case for case in cases if any(name in ", ".join(case) for name in options.only.split("|"))]
    failed = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for case, (worst, why) in zip(cases, pool.map(difference, cases), strict=True):
            failed += not worst <= LARGEST
            print(f"{worst:.1e}  {', '.join(case)}  {why[:300]}", flush=True)
    print(f"{len(cases)} cases, {failed} above {LARGEST:.0e}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
