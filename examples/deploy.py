"""An explanation in one file, used where there is no PyTorch.

    python examples/deploy.py export explainer.onnx          # with PyTorch: writes the file, from handwritten digits
    python examples/deploy.py explain explainer.onnx photo.png --out maps.png   # without: numpy, Pillow, onnxruntime

``Explainer`` is all that a server needs, to be copied.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

KEY = "pytorch_grad_cam_pcasvm"


class Explainer:
    """Explains pictures with a file from ``export.onnx``."""

    def __init__(self, path: str) -> None:
        import onnxruntime

        try:
            self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            self.about = json.loads(self.session.get_modelmeta().custom_metadata_map[KEY])
        except KeyError:
            raise ValueError(f"{path} is a model, but not an explanation: write one with export.onnx") from None
        except Exception as error:  # onnxruntime's own have no common name
            raise ValueError(f"{path} is cut short, or no ONNX model ({error})") from error
        self.colours = np.array([[*bytes.fromhex(colour)] for colour in self.about["colours"]], np.float64)
        self.names = [output.name for output in self.session.get_outputs()]

    def prepared(self, picture: Image.Image) -> np.ndarray:
        """Return a picture as the network takes it, shape (1, C, H, W)."""
        channels, height, width = self.about["input"]["shape"]
        given = picture.convert("RGB" if channels == 3 else "L").resize((width, height), Image.Resampling.BILINEAR)
        x = np.asarray(given, np.float32).reshape(height, width, channels) / 255
        mean, std = (np.float32(self.about["input"][name] or default) for name, default in (("mean", 0), ("std", 1)))
        return ((x - mean) / std).transpose(2, 0, 1)[None]

    def __call__(self, x: np.ndarray) -> dict[str, Any]:
        """Return all outputs for images (N, C, H, W), by name."""
        shape = self.about["input"]["shape"]
        if list(x.shape[1:]) != shape or x.dtype != np.float32:
            raise ValueError(
                f"images must be float32 of shape (N, {', '.join(map(str, shape))}), got {x.dtype} {x.shape}"
            )
        return dict(zip(self.names, self.session.run(self.names, {"images": x}), strict=True))

    def drawn(self, picture: Image.Image, values: np.ndarray) -> Image.Image:
        """Return a signed map (H, W) in [-1, 1] over its picture in pale grey: red raises the value, blue lowers it."""
        grey = 255 * 0.35 + 0.65 * np.asarray(picture.convert("RGB"), np.float64).mean(-1, keepdims=True)
        values = np.asarray(Image.fromarray(values.astype(np.float32)).resize(picture.size, Image.Resampling.BILINEAR))
        count = len(self.colours)
        place = np.clip((0.5 + 0.5 * values) * count, 0, count - 1).astype(int)
        opacity = 0.95 * np.abs(np.linspace(-1, 1, count)[place])[..., None] ** 0.7
        return Image.fromarray((opacity * self.colours[place] + (1 - opacity) * grey).round().astype(np.uint8))


def explain(path: Path, photo: Path, out: Path) -> None:
    """Draw a photo and its maps side by side, and say what was found."""
    explainer, picture = Explainer(str(path)), Image.open(photo)
    found = explainer(explainer.prepared(picture))
    if "label" in found and explainer.about["classes"]:
        print("predicted:", explainer.about["classes"][int(found["label"][0])])
    shown = picture.convert("RGB").resize((200, 200))
    tiles = [shown]
    for target, value, log_scale, map_, nu in zip(
        explainer.about["targets"],
        found["values"][0],
        found["log_scale"][0],
        found["maps"][0],
        found["nu"][0],
        strict=True,
    ):
        print(f"{target}: {value:.3g}" + (f" (map times exp({log_scale:.3g}))" if log_scale else ""))
        tiles.append(explainer.drawn(shown, map_ / (nu or 1.0)))
    sheet = Image.new("RGB", (210 * len(tiles) - 10, 200), "white")
    for place, tile in enumerate(tiles):
        sheet.paste(tile, (210 * place, 0))
    sheet.save(out)


def export_digits(path: Path) -> None:
    """Fit a head on a small network's features of handwritten digits, and write its explanation."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.decomposition import PCA
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC
    from torch import nn

    from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, SVMTarget, export, extract_features

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
    told = export.onnx(ContributionCAM(net, ["3"]), images[:16], path, [SVMTarget(), SVMTarget(versus="runner-up")])
    print(f"wrote {path}: at most {max(told['differences'].values()):.0e} of the largest value from explain")
    Image.fromarray((255 * images[0, 0].numpy()).astype(np.uint8)).save(path.with_suffix(".png"))


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("export", "explain"):
        command = commands.add_parser(name)
        command.add_argument("path", type=Path, help="the file")
    command.add_argument("photo", type=Path)
    command.add_argument("--out", type=Path, default=Path("maps.png"))
    options = parser.parse_args()
    if options.command == "export":
        export_digits(options.path)
    else:
        explain(options.path, options.photo, options.out)


if __name__ == "__main__":
    main()
