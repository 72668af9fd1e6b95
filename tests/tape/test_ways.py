"""Every way to compute between two layers: gradient, sums, secants and replays are those of autograd."""

import pytest
import torch
from against_autograd import Path, Refused, faults
from way import WAYS, Net, X
from ways import BRANCHES

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
    assert not found, f"{name}: " + "; ".join(found)


@pytest.mark.parametrize("name", BRANCHES)
def test_a_baseline_on_another_branch_is_refused(name):
    net = Net(WAYS[f"a branch: {name}"], "flat")
    with torch.no_grad():
        passed = Path(net, None, ["stem"]).run(X)
        other = BRANCHES[name][1](passed.activations[0])
        with pytest.raises(Refused):
            passed.run_from({0: other})
