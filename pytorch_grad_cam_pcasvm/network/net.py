"""A backbone and its fitted head as one network, from image to scores."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.anomalies import anomaly_range, measure_anomaly, reweighted
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, Layer, ask_anew, compute_features, flatten
from pytorch_grad_cam_pcasvm.network.grid import AnomalyMaps, Grid, blurred, rows_of
from pytorch_grad_cam_pcasvm.network.inputs import (
    check_rows,
    check_tensor,
    checked_images,
    make_inputs,
    measure_picture,
)
from pytorch_grad_cam_pcasvm.network.keras_network import arrange_images
from pytorch_grad_cam_pcasvm.network.modules import (
    evaluation_mode,
    find_device,
    find_network,
    refuse_parallel,
    uncompiled,
)
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput, HeadRun, PlainOutput, find_grid
from pytorch_grad_cam_pcasvm.network.pools import keeps_positions
from pytorch_grad_cam_pcasvm.runtime.errors import warn


class PCASVMNet(nn.Module):
    """A torch backbone and the scikit-learn estimators fitted on its features, as one differentiable network.

    The backbone's modules are used, not copied: ``target_layers=[backbone.layer4[-1]]`` works. Modules after ``layer``
    are run for the first images only, to see whether the layer runs again. ``torch.compile(net)`` gives the same
    scores.

    Args:
        backbone: the network that the features came from. For a compiled network, the original module is used, because
            hooks, layers and maps need the modules themselves.
        head: a fitted estimator, a ``Pipeline``, a search object (its ``best_estimator_``), a list of fitted
            estimators in order, or a :class:`Head`.
        layer: the module of the backbone, or its dotted name, whose output, flattened from dim 1, the head was fitted
            on; None: the backbone's own output. For a Hugging Face model, it may also be the name of an output field,
            such as ``"last_hidden_state"``. For a list of layers, the features are concatenated; a target layer that
            does not come before all of them gives maps of only what goes through it. Of a layer that runs several
            times, name a call, as in ``"pool#2"``.
        pool: how positions or tokens are reduced to one row of features: None, ``"mean"``, ``"max"``, ``"gem"``,
            ``"cls"``, ``"cls+mean"`` or a function (see :func:`extract_features`); or ``"dense"``: the head is applied
            to each position.

    Raises:
        TypeError: the backbone is no module, or a program made by ``torch.jit`` or ``torch.export``; or the head is not
            made of estimators.
        ValueError: the backbone has no such layer, or is a DataParallel; the head is empty; or the pool is unknown.
        NotFittedError: an estimator is not fitted.
        NoClosedFormError: an estimator has no closed-form Jacobian.

    Example:
        >>> pipeline = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, labels)
        >>> net = PCASVMNet(backbone, pipeline).eval()
        >>> net(images).shape, net.predict(images).tolist()
        (torch.Size([2, 3]), ['cat', 'dog'])
    """

    def __init__(
        self, backbone: nn.Module, head: Any, layer: Layer | Sequence[Layer] | None = None, *, pool: Any = None
    ) -> None:
        super().__init__()
        network = find_network(backbone)
        refuse_parallel(backbone)
        self.backbone = network
        self.head = Head.of(head).to(find_device(backbone))
        source = FeatureSource.of(self.backbone, layer, pool)
        ask_anew(self.backbone)
        self.layer: Any = source.where
        self.pool = pool
        self._warned_of_training = False

    def forward(self, x: Tensor) -> HeadOutput:
        """Return the scores of a batch.

        Args:
            x: the input, shape (N, ...), or a tuple or dict of several inputs, as in ``explain``.

        Returns:
            Scores, shape (N, C), float64: scikit-learn's ``decision_function`` (for two classes, the columns are
            [-a, a]). For a head without a classifier, the output of its last stage: the components, shape (N, B). With
            ``pool="dense"``, these of every position, shape (N, C, h, w).

        Raises:
            TypeError: the input is not a tensor.
            ValueError: the backbone gives several rows of features, or too many, for each image; or the layer runs more
                than once, and no call of it is named.
        """
        x = arrange_images(self, make_inputs(x))
        check_tensor(x, "images")
        self._warn_of_training()
        backbone, source = self.feature_source(x)
        features = compute_features(backbone, source, x)
        check_rows(features, x)
        return self.of_features(features, x)

    def with_head(self, head: Any) -> "PCASVMNet":
        """Return a network of the same backbone, layer and pool, which it shares, with another head.

        Args:
            head: a fitted estimator, pipeline, search or list, or a :class:`Head`, on the same features.

        Raises:
            TypeError: the head is not made of estimators.
            NoClosedFormError: an estimator has no closed-form Jacobian.

        Example:
            >>> net.with_head(clone(pipeline).set_params(svc__C=9.0).fit(features, labels))(images).shape
            torch.Size([2, 3])
        """
        network = copy.copy(self)
        network._modules = dict(self._modules)
        network.head = Head.of(head).to(find_device(self.backbone))
        return network

    @property
    def is_dense(self) -> bool:
        """Whether the head decides at every position, as with ``pool="dense"``."""
        return keeps_positions(self.pool)

    def feature_source(self, x: Tensor | None = None) -> tuple[nn.Module, FeatureSource]:
        """Return the current backbone and the source of its features, with a pool for images like x."""
        backbone = uncompiled(self.backbone)
        source = FeatureSource.of(backbone, self.layer, self.pool, checked=True)
        return backbone, source if x is None else source.at(backbone, x)

    def of_features(self, features: Tensor, x: Any = None) -> HeadOutput:
        """Return the scores for features, shape (N, D); of dense ones, (N, D, h, w), of images x."""
        return self.head_run(features, x).output()

    def head_run(self, features: Tensor, x: Any = None) -> HeadRun:
        """Return the head's run for features, as for :meth:`of_features`."""
        if not torch.compiler.is_compiling():
            self.head.tell_of_fit()
        if not self.is_dense:
            return HeadRun(self.head, self.head(features))
        grid = Grid(tuple(features.shape[2:]), ())
        if x is not None:
            grid = Grid(grid.shape, measure_picture(x), self.feature_source(x)[1].cells)
        return HeadRun(self.head, self.head.values_of(rows_of(features)), grid)

    def predict(self, x: Tensor) -> np.ndarray:
        """Return the predicted labels of a batch, as ``head.predict`` would (without a classifier, the components).

        Args:
            x: the input, shape (N, ...).

        Returns:
            Labels, shape (N,), of the dtype of ``classes_``; with ``pool="dense"``, (N, h, w).

        Raises:
            TypeError: the input is not a floating-point tensor.
            ValueError: the input is not a batch, or has NaN or infinite values.
        """
        x = checked_images(x, self.backbone)
        with evaluation_mode(self), torch.no_grad():
            return self(x).labels()

    def anomaly_map(
        self, x: Tensor | HeadOutput, *, size: Sequence[int] | None = None, blur: float | None = None
    ) -> np.ndarray:
        """Return how anomalous each position is: larger the less it is like the training set.

        It is minus the head's value: of a :class:`~sklearn.neighbors.NearestNeighbors` the mean distance to the nearest
        training patches, of a KMeans that to the nearest centre, of a KernelDensity minus the log-density, of outlier
        detectors minus their ``decision_function``. Without a decision, it is what no component keeps, as of
        :class:`.ResidualTarget`.

        Args:
            x: the input, shape (N, ...), or what the network returned for it, which then does not run again.
            size: (H, W) to upsample maps to (bilinear); None: their own resolution.
            blur: standard deviation of a Gaussian that smooths them then, in pixels; PatchCore takes 4. None: none.

        Returns:
            The maps, shape (N, h, w), or (N, H, W). :func:`.plot_positions` draws them, and some of them, on the scale
            of the training set, :meth:`anomaly_range`.

        Raises:
            TypeError: the input is not a floating-point tensor.
            ValueError: features are not dense, or the head's value does not tell what is normal; or the input is not a
                batch, or has NaN or infinite values.

        Example:
            >>> good, _ = extract_features(backbone, loader, "layer2", pool="dense", progress=False)
            >>> parts = PCASVMNet(backbone, NearestNeighbors(n_neighbors=3).fit(good), "layer2", pool="dense").eval()
            >>> parts.anomaly_map(images).shape
            (2, 8, 8)
        """
        if not self.is_dense:
            raise ValueError("anomaly_map needs a head on positions, pool='dense': use anomaly_score")
        output = self._read_output(x)
        grid = find_grid(output)
        if size is not None and (not isinstance(size, list | tuple) or len(size) != len(grid.shape)):
            raise ValueError(f"size must have {len(grid.shape)} numbers, those of the pictures, got {size!r}")
        maps = measure_anomaly(self.head, output.head_trace).unflatten(0, (-1, 1, *grid.shape))
        maps = maps if size is None else grid.spread(maps, size)
        maps = maps if blur is None else blurred(maps, blur)
        return AnomalyMaps.of(maps[:, 0].detach().cpu().numpy(), self.head, grid.cells if size is None else None)

    def anomaly_range(self) -> tuple[float, float] | None:
        """Return where the colours of anomalies start and end, whatever pictures are drawn.

        They end at three times what rows of the training set reach that are left out of it, so that photos like these
        are dark, alone and beside a defect. The command line's ``fit`` leaves out whole photos; of a bank from
        elsewhere the distances are those of its rows to the nearest different ones.

        Returns:
            The ends, or None: nothing is known of the training set's anomalies.

        Example:
            >>> good, _ = extract_features(backbone, loader, "layer2", pool="dense", progress=False)
            >>> parts = PCASVMNet(backbone, NearestNeighbors(n_neighbors=3).fit(good), "layer2", pool="dense").eval()
            >>> low, high = parts.anomaly_range()
        """
        return anomaly_range(self.head)

    def anomaly_score(self, x: Tensor | HeadOutput, k: int = 1, *, neighbours: int | None = None) -> np.ndarray:
        """Return how anomalous each image is: minus the head's value, or of dense features the mean of the k highest.

        With ``neighbours``, it is PatchCore's score (Roth et al., CVPR 2022): the distance d of the most anomalous
        patch to its nearest training patch m, times ``1 - exp(d) / sum_j exp(d_j)``, where d_j are its distances to the
        ``neighbours`` training patches nearest to m, which is one of them.

        Args:
            x: the input, shape (N, ...), or what the network returned for it.
            k: how many positions count.
            neighbours: PatchCore's b, usually 9, for a :class:`~sklearn.neighbors.NearestNeighbors` of dense features.

        Returns:
            The scores, shape (N,).

        Raises:
            TypeError: the input is not a floating-point tensor.
            ValueError: the head's value does not tell what is normal, or it is none of distances to training patches,
                for ``neighbours``, which are fewer than 2, or given with ``k``; or the input is not a batch, or has NaN
                or infinite values.

        Example:
            >>> good, _ = extract_features(backbone, loader, "layer2", pool="dense", progress=False)
            >>> parts = PCASVMNet(backbone, NearestNeighbors(n_neighbors=3).fit(good), "layer2", pool="dense").eval()
            >>> output = parts(images)  # the network runs once for both
            >>> parts.anomaly_map(output).shape, parts.anomaly_score(output, k=5).shape
            ((2, 8, 8), (2,))
        """
        if neighbours is not None and k != 1:
            raise ValueError("k= and neighbours= are different scores of an image: give one of them")
        output = self._read_output(x)
        if neighbours is not None:
            values = reweighted(self.head, output.head_trace, output.grid, neighbours)
        else:
            values = measure_anomaly(self.head, output.head_trace)
            if output.grid is not None:
                count = output.grid.count
                values = values.unflatten(0, (-1, count)).topk(min(k, count), 1).values.mean(1)
        return values.detach().cpu().numpy()

    def _read_output(self, x: Tensor | HeadOutput) -> HeadOutput:
        """Return the network's output for an input, or the output that it is.

        Raises:
            ValueError: it is the output of another head, or of a single image.
        """
        if isinstance(x, HeadOutput):
            if x.head is not self.head or not x.is_batch:
                raise ValueError("this is no output of this network for a batch: pass the images, or net(images)")
            return x
        x = checked_images(x, self.backbone)
        with evaluation_mode(self), torch.no_grad():
            return self(x)

    def _warn_of_training(self) -> None:
        """Warn once that a network in training mode gives other scores than in the evaluation mode of the fit."""
        if self._warned_of_training or not self.backbone.training or torch.compiler.is_compiling():
            return
        random = [m for m in self.backbone.modules() if m.training and _differs_in_training(m)]
        if random:
            self._warned_of_training = True
            warn(
                f"the backbone is in training mode, in which its {type(random[0]).__name__} gives different features "
                "from those the head was fitted on: call net.eval()",
                UserWarning,
            )


def network_output(network: nn.Module, output: Any, count: int, x: Any = None) -> HeadRun | PlainOutput:
    """Return a network's output in the form that methods ask: a head's run for a PCASVMNet, or the plain output.

    Args:
        network: the network.
        output: of an ordinary network, or of a backbone, whose rows are features.
        count: number of images N.
        x: images of their shape, for dense features.
    """
    if not isinstance(network, PCASVMNet):
        return PlainOutput(output, count)
    return network.head_run(output if network.is_dense else flatten(output), x)


def _differs_in_training(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase | nn.modules.dropout._DropoutNd) or (
        "Drop" in type(module).__name__ and not isinstance(module, nn.Identity)
    )
