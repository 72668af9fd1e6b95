"""Every way to compute between two layers: gradient, sums, secants and replays are those of autograd."""

import pytest
import torch
from against_autograd import Path, Refused, faults
from way import WAYS, Net, X
from ways import BRANCHES

# What has no rule, or no secant, and is refused by its name: each may get one.
REFUSED = {
    *("addbmm", "cross", "block_diag", "nansum, nanmean", "logcumsumexp"),
    *("cdist, inf", "pdist", "losses", "determinant", "inverse", "solve", "max_unpool1d", "max_unpool2d"),
    *("max_unpool2d of something else", "max_unpool3d", "torch.i0", "torch.deg2rad"),
    *("torch.lgamma", "torch.digamma", "powers", "masked_scatter"),
    *("scatter_reduce mean", "scatter_reduce amax", "diag_embed", "cummax", "cummin"),
    *("clamp by tensors", "roi_pool", "ps_roi_align"),
}
if torch.__version__ < "2.9":  # which writes into the statistics that it reads, in evaluation mode, too
    REFUSED.add("nn.InstanceNorm2d, tracking")
pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says of parts that it will drop
QUICK, COMBINED = (), (pytest.mark.slow, pytest.mark.combination)
CASES = [  # each way to one end, and to the other in the slow run
    pytest.param(name, end, marks=COMBINED if way.combined or (number + place) % 2 else QUICK)
    for number, (name, way) in enumerate(WAYS.items())
    for place, end in enumerate(("flat", "pooled"))
]


@pytest.mark.parametrize(("name", "end"), CASES)
def test_a_way_is_exact(name, end):
    way = WAYS[name]
    net = Net(way, end)
    try:
        options = {"tolerance": way.tolerance, "gated": way.gated, "jumps": way.jumps}
        found = faults(net, "stem", X, net.starts(near=way.near), **options)
    except Refused as error:
        found = [f"refused, {error}"]
    if name in REFUSED:
        assert found, f"{name} is exact: take it off the list"
        assert all("refused" in fault for fault in found), found
        return
    assert not found, f"{name}: " + "; ".join(found)


@pytest.mark.parametrize("name", BRANCHES)
def test_a_baseline_on_another_branch_is_refused(name):
    net = Net(WAYS[f"a branch: {name}"], "flat")
    with torch.no_grad():
        passed = Path(net, None, ["stem"]).run(X)
        other = BRANCHES[name][1](passed.activations[0])
        with pytest.raises(Refused):
            passed.run_from({0: other})
