"""A number that the network reads from a size, or from memory, is the same at the baseline, or refused there."""

import io
import pickle

import pytest
import torch
from against_autograd import Path, Reference, Refused, faults, inner, tensors
from way import Net, Way, X

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {
    "len of nonzero": lambda h: h / (1 + len((h > 0).nonzero())),
    "numel of a selection": lambda h: h / (1 + h[h > 0].numel()),
    "where": lambda h: h / (1 + torch.where(h > 0)[0].shape[0]),
    "argwhere": lambda h: h / (1 + torch.argwhere(h > 0).shape[0]),
    "masked select": lambda h: h / (1 + torch.masked_select(h, h > 0).size(0)),
    "unique": lambda h: h / len(torch.unique((h.detach() * 2).round())),
    "unique, consecutive": lambda h: h / len(torch.unique_consecutive((h.detach() * 2).round())),
    "bincount": lambda h: h / len(torch.bincount((h.detach().abs() * 3).long().flatten())),
    "repeat interleave": lambda h: (
        h / torch.arange(3).repeat_interleave((h.detach().mean((1, 2, 3)) > 0).long() + 1).shape[0]
    ),
    "one hot": lambda h: h / torch.nn.functional.one_hot((h.detach().abs() * 3).long().flatten()).shape[1],
    "a part whose size is read": lambda h: torch.stack([
        t[:, : max(1, len((t[0, 0] > 0).nonzero()))].mean((1, 2)) for t in h
    ]),
    "a branch": lambda h: h.sin() if h[h > 0.9].shape[0] > 150 else h * 2,
    "nms": lambda h: h / (1 + len(torch.ops.torchvision.nms(boxes(h), h[:, 0, 0, 0].detach(), 0.1))),
    "values of a sparse tensor": lambda h: h / (1 + h.relu().detach().to_sparse().values().shape[0]),
    "indices of a sparse tensor": lambda h: h / (1 + h.relu().detach().to_sparse().coalesce().indices().shape[1]),
    "columns of a sparse matrix": lambda h: h / (1 + len(h.relu().detach().flatten(1).to_sparse_csr().col_indices())),
    "nnz": lambda h: h / (1 + h.relu().detach().to_sparse()._nnz()),
    "storage": lambda h: h * torch.tensor(first_numbers(h).untyped_storage().tolist()[:8]).double().mean(),
    "pickle": lambda h: h * pickle.loads(pickle.dumps(h.detach().clone())).mean(),
    "torch.save": lambda h: h * loaded(h).mean(),
}
# Of activations of which other numbers are positive, larger than 1, and so on.
OTHER = [torch.full((1, 6, 7, 7), 0.7).double(), torch.zeros(1, 6, 7, 7).double(), 3 * torch.ones(1, 6, 7, 7).double()]


def first_numbers(h):
    return h.detach()[..., 0, 0].contiguous()  # of each channel: a list of all bytes takes long


def boxes(h):
    corner = h.detach()[:, :2].mean((2, 3))
    return torch.cat([corner, corner + 1], 1)


def loaded(h):
    file = io.BytesIO()
    torch.save(h.detach().clone(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("case", SIZES)
def test_gradients_are_exact_and_baselines_exact_or_refused(case):
    net, wrong = Net(Way(SIZES[case]), "flat"), []
    assert not faults(net, "stem", X)
    reference = Reference(net, "stem", X)
    activations, output, seeds, _ = reference.gradient()
    for start in [*OTHER, activations]:
        with torch.no_grad():
            passed = Path(net, None, ["stem"]).run(X)
            try:
                base = passed.run_from({0: start})
            except Refused:
                continue
            pulled = passed.pullback(seeds, 0, base).dense()
        change = [y - before for y, before in zip(tensors(output), tensors(reference.run(start)), strict=True)]
        terms, sides = (pulled * (activations - start)).flatten(1), inner(seeds, change)
        error = (terms.sum(1) - sides.sum(1)).abs() / (terms.abs().sum(1) + sides.abs().sum(1) + 1e-200)
        wrong += [float(error.max())] if not error.max() < 1e-9 else []
    assert not wrong


def test_a_size_that_stays_the_same_is_no_reason_to_refuse():
    net = Net(Way(SIZES["len of nonzero"]), "flat")
    with torch.no_grad():
        passed = Path(net, None, ["stem"]).run(X)
        passed.run_from({0: 2 * passed.activations[0]})
        with pytest.raises(Refused, match="sizes after the target layer depend on the activations"):
            passed.run_from({0: passed.activations[0] + 0.5})
