"""Training of the dense layers on frozen features, and what the trained network makes of them."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from tqdm.auto import tqdm

from experiment.frozen import FrozenFeatures
from experiment.problems import RunError


@dataclass
class Training:
    """The course of a training.

    Attributes:
        accuracies: validation accuracy after each epoch.
        best: state of the dense layers after the best epoch.
    """

    accuracies: list[float] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)

    @property
    def best_epoch(self) -> int:
        """The epoch of the largest validation accuracy, from 1."""
        return int(np.argmax(self.accuracies)) + 1


def train(
    dense: nn.Module,
    features: FrozenFeatures,
    labels: np.ndarray,
    *,
    epochs: int,
    patience: int,
    rate: float,
    batch: int,
    seed: int,
    device: str,
    checkpoint: Path,
) -> Training:
    """Train the dense layers by stochastic gradient descent, and leave them in the state of the best epoch.

    A fifth of the training set is held out for validation. Every epoch is kept in a checkpoint, and an interrupted
    training goes on from it; the batches of an epoch depend on the seed and its number alone.

    Args:
        dense: the dense layers.
        features: of the training images.
        labels: of the training images, shape (R,).
        epochs: the most epochs.
        patience: stop where the validation accuracy has not grown for so many epochs.
        rate: learning rate.
        batch: images in a batch.
        seed: of split and batches.
        device: where to train.
        checkpoint: a file of this training; if it is of a longer one, that is kept, and another written.

    Returns:
        The course of the training.

    Raises:
        RunError: the training diverged, or the disk is full.
    """
    fit, validation = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=seed)
    targets = torch.from_numpy(labels).to(device)
    optimizer = torch.optim.SGD(dense.parameters(), lr=rate)
    course = Training()
    saved = _saved(checkpoint, device)
    if saved is not None and len(saved["accuracies"]) > epochs:
        checkpoint = checkpoint.with_stem(f"{checkpoint.stem}-{epochs}")  # the longer training is kept
        saved = _saved(checkpoint, device)
    if saved is not None:
        course = Training(saved["accuracies"], saved["best"])
        dense.load_state_dict(saved["state"])
    progress = tqdm(total=epochs, initial=len(course.accuracies), desc="training", unit="epoch")
    while len(course.accuracies) < epochs and not _stalled(course, patience):
        order = np.random.default_rng((seed, len(course.accuracies))).permutation(fit)
        dense.train()
        for start in range(0, len(order), batch):
            index = order[start : start + batch]
            optimizer.zero_grad()
            F.cross_entropy(dense(features.batch(index, device)), targets[index]).backward()
            optimizer.step()
        if not all(bool(parameter.isfinite().all()) for parameter in dense.parameters()):
            raise RunError(f"the training diverged in epoch {len(course.accuracies) + 1}: lower --rate")
        accuracy = float((scores(dense, features, validation, device).argmax(1) == labels[validation]).mean())
        course.accuracies.append(accuracy)
        if course.best_epoch == len(course.accuracies):
            course.best = {key: value.detach().clone() for key, value in dense.state_dict().items()}
        _save({"state": dense.state_dict(), **vars(course)}, checkpoint)
        progress.update()
        progress.set_postfix(validation=f"{accuracy:.3f}", best=f"{max(course.accuracies):.3f}")
    progress.close()
    dense.load_state_dict(course.best)
    dense.eval()
    return course


def _stalled(course: Training, patience: int) -> bool:
    return bool(course.accuracies) and len(course.accuracies) - course.best_epoch >= patience


def _saved(file: Path, device: str) -> dict[str, Any] | None:
    """Return a checkpoint, or None where there is none that can be read."""
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except FileNotFoundError:
        return None
    except Exception:  # torch.load raises whatever the bytes of a damaged file lead to
        print(f"{file} is damaged: training starts anew", flush=True)
        return None


def _save(state: dict[str, Any], file: Path) -> None:
    """Write a checkpoint at once or not at all."""
    beside = file.with_suffix(".new")
    try:
        torch.save(state, beside)
    except RuntimeError as error:  # torch's word for a full disk
        raise RunError(f"the checkpoint {file} could not be written ({error}): make room, and start again") from error
    os.replace(beside, file)


@torch.inference_mode()
def scores(dense: nn.Module, features: FrozenFeatures, index: np.ndarray, device: str) -> np.ndarray:
    """Return what layers give for some rows of features, shape (len(index), ...).

    Args:
        dense: the dense layers, or the first of them.
        features: of the images.
        index: which rows.
        device: where the layers are.

    Returns:
        Their output.
    """
    training = dense.training
    dense.eval()
    parts = [dense(features.batch(rows, device)).cpu().numpy() for rows in np.array_split(index, len(index) // 256 + 1)]
    dense.train(training)
    return np.concatenate(parts)
