"""Layer-wise relevance propagation (RelevanceCAM): every step against its rule, written out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from problems import explained
from reference import (
    activations_of,
    integrated_gradient,
    margins_by_formula,
    relative,
    relevance_of_dense,
    with_activations,
)
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pytorch_grad_cam_pcasvm import NoClosedFormError, PCASVMNet, RelevanceCAM, SVMTarget, register_jacobian
from pytorch_grad_cam_pcasvm.path.record import Path


@pytest.mark.parametrize("rectified", [True, False], ids=["rectified", "negative activations"])
@pytest.mark.parametrize("head", ["linear", "rbf"])
def test_relevance_is_shared_out_by_the_z_plus_rule(head: str, rectified: bool) -> None:
    p = explained("relu", head, rectified=rectified)
    f = activations_of(p.net, p.layer, p.x)
    features = p.backbone(p.x)
    at_zeros = with_activations(p.backbone, p.layer, p.x, torch.zeros_like(f))
    share = integrated_gradient(lambda q: margins_by_formula(p.fitted, q)[:, 1], at_zeros, features, nodes=100)
    tail = list(p.backbone.tail)
    expected = torch.stack([relevance_of_dense(tail, *image) for image in zip(f, share, strict=True)])
    maps = RelevanceCAM(p.net, [p.layer]).explain(p.x, [SVMTarget("bee")])
    assert relative(maps.weights[:, 0], expected.sum((2, 3))) < 1e-9
    assert relative(maps.maps[:, 0], torch.einsum("nt,nthw->nhw", expected.sum((2, 3)), f)) < 1e-9


def test_relevance_moves_with_the_largest_and_passes_a_batch_norm_unchanged() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    tail = nn.Sequential(norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    backbone = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *tail).double().eval()
    x = torch.randn(40, 2, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        f = backbone[0](x[:5])
        features, at_zeros = backbone(x), tail(torch.zeros_like(f))
        _, places = F.max_pool2d(tail[:2](f), 2, return_indices=True)
    head = SVC(kernel="linear").fit(features.numpy(), np.arange(40) % 2)
    share = torch.from_numpy(head.coef_) * (features[:5] - at_zeros)
    expected = F.max_unpool2d(share.reshape(5, 4, 3, 3), places, 2).sum((2, 3))
    maps = RelevanceCAM(PCASVMNet(backbone, head), ["0"]).explain(x[:5], [SVMTarget(1)])
    assert relative(maps.weights[:, 0], expected) < 1e-9


def test_relevance_is_kept_on_its_way() -> None:
    # The z+ rule has nothing to share out to where no input speaks for an output: here all do.
    p = explained("relu", "linear", rectified=True, n=2)
    f = activations_of(p.net, p.layer, p.x)
    at_zeros = with_activations(p.backbone, p.layer, p.x, torch.zeros_like(f))
    share = integrated_gradient(lambda q: margins_by_formula(p.fitted, q)[:, 1], at_zeros, p.backbone(p.x), nodes=2)
    weights = RelevanceCAM(p.net, [p.layer]).explain(p.x, [SVMTarget("bee")]).weights[:, 0]
    assert relative(weights.sum(1), share.sum(1)) < 1e-9


# --- single steps -----------------------------------------------------------------------------------------------------


class Steps(nn.Module):
    """A target layer that changes nothing, and what follows it."""

    def __init__(self, function: Callable[[Tensor], Any], before: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.earlier, self.start, self.function, self.before = nn.Identity(), nn.Identity(), function, before

    def forward(self, x: Tensor) -> Any:
        x = self.earlier(x)
        if self.before is None:
            return self.function(self.start(x))
        return self.function(self.start(x), self.before(x))


X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def relevance_of(net: Steps, *seeds: Tensor | None, names: tuple[str, ...] = ("start",)) -> Tensor:
    """Return the relevance of the last target layer for seeds of the outputs, from a baseline of zeros."""
    with torch.no_grad():
        passed = Path(net, None, names).run(X)
        last = len(names) - 1
        return passed.relevance(seeds, last, passed.run_from({last: torch.zeros_like(X)}))


def ones(*shape: int) -> Tensor:
    return torch.ones(1, *shape, dtype=torch.float64)


def test_means_are_shared_by_what_their_positive_inputs_give() -> None:
    positive = X.clamp(min=0)
    expected = (positive / positive.sum(2, keepdim=True)).nan_to_num() * X.mean(2, keepdim=True)
    assert relative(relevance_of(Steps(lambda x: x.mean(2)), ones(2, 3))[0], expected) < 1e-12


@pytest.mark.parametrize("container", [list, tuple])
def test_relevance_moves_with_its_number(container: Callable[..., Any]) -> None:
    # Each part of the output is a part of x, or the constant in between, which takes no share.
    joined = Steps(lambda x: torch.cat(container([x[:, :1], torch.ones(2, 2, 4, dtype=x.dtype), x[:, 1:]]), 1))
    assert relative(relevance_of(joined, ones(2, 5, 4))[0], X) < 1e-12


def test_relevance_moves_along_an_index_of_the_activations() -> None:
    weights = torch.arange(1.0, 5, dtype=torch.float64).expand(1, 2, 3, 4)
    with torch.no_grad():
        passed = Path(Steps(lambda x: x.gather(2, x.argsort(2))), None, ["start"]).run(X)
        found = passed.relevance([weights], 0, passed.run_from({0: X / 2}))[0]  # in the same order
    ranks = X.argsort(2).argsort(2)
    assert relative(found, X / 2 * (ranks + 1)) < 1e-12


def test_a_constant_factor_takes_no_share() -> None:
    for function in (lambda x: x * 2, lambda x: 2 * x, lambda x: x.clone().mul_(2), lambda x: torch.mul(x, 2)):
        assert relative(relevance_of(Steps(function), ones(2, 3, 4))[0], 2 * X.clamp(min=0)) < 1e-12
    net = Steps(lambda x, gate: x.clamp(min=0) * gate, before=lambda x: x.abs() + 1)
    found = relevance_of(net, ones(2, 3, 4), names=("earlier", "start"))[0]
    assert relative(found, relevance_of(net, ones(2, 3, 4))[0]) < 1e-12
    assert relative(found, X.clamp(min=0) * (X.abs() + 1)) < 1e-12


def test_two_factors_take_half_each() -> None:
    net = Steps(lambda x: x.clamp(min=0) * (3 * x.clamp(max=0).abs() + 3 * x.clamp(min=0)))
    assert relative(relevance_of(net, ones(2, 3, 4))[0], 3 * X.clamp(min=0) ** 2) < 1e-12


@pytest.mark.parametrize("relevance", ["moved", "shared"])
def test_an_argument_without_a_gradient_takes_no_share(relevance: str, rules: None) -> None:
    @register_jacobian(torch.copysign, relevance=relevance)
    def copysign(input: Tensor, other: Tensor, *, y: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        return grad * torch.sign(input * other), None

    found = relevance_of(Steps(lambda x: torch.copysign(x, x * x)), ones(2, 3, 4))[0]
    assert relative(found, X if relevance == "moved" else X.clamp(min=0)) < 1e-12


def test_outputs_that_are_not_asked_for_and_do_not_depend_on_the_layer() -> None:
    net = Steps(lambda x, other: {"asked": 3 * x.clamp(min=0), "not": x.sum(2), "other": other}, before=lambda x: x * 2)
    found = relevance_of(net, ones(2, 3, 4), None, ones(2, 3, 4), names=("earlier", "start"))[0]
    assert relative(found, 3 * X.clamp(min=0)) < 1e-12


def test_steps_without_a_rule_are_refused() -> None:
    with pytest.raises(NoClosedFormError, match="has no rule of relevance"):
        relevance_of(Steps(lambda x: x / (1 + x.abs())), ones(2, 3, 4))
    with pytest.raises(NoClosedFormError, match="has no rule of relevance"):
        relevance_of(Steps(lambda x: F.linear(x, x[0, 0].expand(5, 4))), ones(2, 3, 5))
    with pytest.raises(NoClosedFormError, match="has no rule of relevance"):  # x is but a bias
        relevance_of(Steps(lambda x: F.linear(ones(4)[0], ones(2, 4)[0], x[0, 0, :2])), ones(2))
