"""The meta device, which has shapes and no numbers: whatever asks for one fails there."""

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, PCASVMNet


class Traffic(TorchDispatchMode):
    """Records what goes between the host and a device, of which "meta" has the rules and nothing else."""

    def __init__(self):
        super().__init__()
        self.operations, self.seen = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        given, made = (
            {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
            for tree in ((args, kwargs), result)
        )
        # A list of numbers becomes a tensor by lift_fresh; whatever asks for a number fails on "meta".
        if "cpu" in given | made or "lift_fresh" in str(func):
            self.seen.append(str(func))
        return result


class NoLooks(TorchDispatchMode):
    """Refuses what would make a GPU wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), "it looks"
        return func(*args, **(kwargs or {}))


def on_meta(backbone, layer, target, width, components=4, svm=None):
    """Return what explains a network without numbers: shapes, devices and operations are there."""
    rng = np.random.default_rng(0)
    head = make_pipeline(StandardScaler(), PCA(components), svm or SVC())
    head.fit(rng.normal(size=(40, width)), np.array(["ant", "bee", "cat", "dog"])[np.arange(40) % 4])
    net = PCASVMNet(backbone.eval(), head, layer=layer).to("meta")
    return ClosedFormGradCAM(net, [net.backbone.get_submodule(target)])
