"""The frozen convolutional features of a data set, computed once and kept on disk in half precision."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm.auto import tqdm

from experiment.datasets import Part
from experiment.problems import RunError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


def prepared(image: Image.Image, size: int) -> Tensor:
    """Return an image as the network takes it, shape (3, size, size)."""
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    return torch.from_numpy((pixels - np.float32(MEAN)) / np.float32(STD)).permute(2, 0, 1)


def shown(x: Tensor) -> np.ndarray:
    """Return prepared images (N, 3, H, W) as they are looked at: (N, H, W, 3) in [0, 1]."""
    return np.clip(x.permute(0, 2, 3, 1).cpu().numpy() * np.float32(STD) + np.float32(MEAN), 0, 1)


def images(part: Part, index: Any, size: int) -> Tensor:
    """Return some images as the network takes them, shape (len(index), 3, size, size)."""
    return torch.stack([prepared(part.read(int(i)), size) for i in index])


class FrozenFeatures:
    """The convolutional features of one part of a data set, memory-mapped: shape (R, T, M, N), float16.

    They are appended to a file batch by batch, so that an interrupted run goes on where it stopped.

    Args:
        part: the images.
        convolutions: the frozen network.
        size: side of the square input.
        folder: where the file is kept.
        settings: what else the features depend on; they name the file.
        title: of the progress bar.
        device: where the network runs.
        batch: images at a time.
    """

    def __init__(
        self,
        part: Part,
        convolutions: nn.Module,
        size: int,
        folder: Path,
        settings: dict[str, Any],
        title: str,
        device: str,
        batch: int = 32,
    ) -> None:
        with torch.no_grad():
            self.shape = tuple(convolutions(torch.zeros(1, 3, size, size, device=device)).shape[1:])
        key = json.dumps({**settings, "size": size, "images": list(part.digests), "title": title}, sort_keys=True)
        file = folder / f"{title}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.float16"
        width = int(np.prod(self.shape))
        done = file.stat().st_size // (2 * width) if file.exists() else 0
        if done < len(part.labels):
            done -= done % batch  # the last bit may depend on the batch
        needed = 2 * width * (len(part.labels) - done)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise RunError(
                f"the features of the {title} images need {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB "
                "are free: name another folder with --cache, or take fewer images with --limit"
            )
        if done < len(part.labels):
            self._compute(part, convolutions, size, file, done, width, title, device, batch)
        self.rows = np.memmap(file, np.float16, "r", shape=(len(part.labels), *self.shape))

    def _compute(
        self,
        part: Part,
        convolutions: nn.Module,
        size: int,
        file: Path,
        done: int,
        width: int,
        title: str,
        device: str,
        batch: int,
    ) -> None:
        convolutions = convolutions.to(memory_format=torch.channels_last)  # three times as fast on a CPU
        file.touch()
        with file.open("r+b") as stream, torch.inference_mode():
            stream.truncate(done * 2 * width)
            stream.seek(0, 2)
            bar = tqdm(total=len(part.labels), initial=done, desc=f"{title} features", unit="image")
            for start in range(done, len(part.labels), batch):
                x = images(part, range(start, min(start + batch, len(part.labels))), size)
                maps = convolutions(x.to(device, memory_format=torch.channels_last)).contiguous().half().cpu().numpy()
                if not np.isfinite(maps).all():
                    raise RunError("the convolutional features do not fit in half precision: take other --weights")
                stream.write(maps.tobytes())
                bar.update(len(x))
            bar.close()

    def batch(self, index: np.ndarray, device: str) -> Tensor:
        """Return some rows as float32, shape (len(index), T, M, N)."""
        return torch.from_numpy(self.rows[index]).to(device).float()
