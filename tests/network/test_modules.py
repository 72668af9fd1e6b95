"""Names of layers, parallel copies, and a network that is left as it was."""

import copy
from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from problems import Backbone
from torch import nn

from pytorch_grad_cam_pcasvm.network.modules import find_layer_name, refuse_parallel, unchanged


class Writer(nn.Module):
    """A network whose forward pass writes wherever it can."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(3, 3)
        self.steps = 0
        self.last = None
        self.seen = []
        self.table = {"a": [1, {"b": {2}}], "gone": 3}
        self.order = OrderedDict(x=1, y=2)
        self.counts = defaultdict(int)
        self.recent = deque([1, 2], maxlen=2)
        self.pair = ([0], torch.zeros(2))
        self.plain = torch.ones(3)
        self.lost = "here"
        self.loose = [nn.BatchNorm1d(3)]
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("rebound", torch.zeros(3))
        self.register_buffer("through_data", torch.zeros(3))
        self.register_buffer("swapped", torch.zeros(3))
        with torch.inference_mode():
            self.inference = torch.zeros(3)

    def forward(self, x):
        self.steps += 1
        self.last = x
        self.seen.append(x)
        self.table["a"][1]["b"].add(5)
        self.table["a"][0] = 2
        self.table["new"] = x
        del self.table["gone"]
        self.order.move_to_end("x")
        self.counts["calls"] += 1
        self.recent.append(x)
        self.pair[0].append(1)
        self.pair[1].add_(1)
        self.plain *= 2
        del self.lost
        self.fresh = torch.rand(2)
        self.loose[0](x)
        self.mean.add_(1)
        self.rebound = self.rebound + 1
        self.through_data.data += 1
        self.swapped.data = torch.ones(5, dtype=torch.float64)
        with torch.inference_mode():
            self.inference += 1
        self.extra = nn.Linear(1, 1)
        self.dense = nn.Linear(3, 3)
        self.register_buffer("late", torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_forward_hook(print)
        return self.dense(x)


def described(value, seen=()):
    """Describe all that hangs on a module: identities, numbers, orders."""
    if isinstance(value, torch.Tensor):
        return id(value), value.data_ptr(), value.dtype, value.tolist()
    if isinstance(value, nn.Module):
        state = {name: item for name, item in vars(value).items() if "hook" not in name}
        return id(value), list(value.state_dict()), {name: described(item) for name, item in state.items()}
    if isinstance(value, dict):
        return id(value), [(key, described(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return id(value), [described(item) for item in value]
    return id(value), sorted(value) if isinstance(value, set) else value


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_a_forward_pass_writes_is_put_back(mode):
    network = Writer()
    before, random = described(network), torch.get_rng_state()
    with mode(), unchanged(network):
        network(torch.ones(2, 3))
        assert network.steps == 1
        assert network.swapped.dtype == torch.float64
    assert described(network) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert len(network._forward_hooks) == 1  # hooks are left alone


def test_an_error_inside_comes_out_and_all_is_put_back():
    network = Writer()
    before, random = described(network), torch.get_rng_state()
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), unchanged(network):  # noqa: PT012
            network(torch.ones(2, 3))
            raise error
        assert described(network) == before
        assert torch.equal(torch.get_rng_state(), random)


def test_a_graph_of_the_users_is_not_spoilt():
    network = nn.BatchNorm1d(3).eval()
    x = torch.randn(4, 3, requires_grad=True)
    loss = network(x).square().sum()
    versions = [buffer._version for buffer in network.buffers()]
    with unchanged(network):
        network(x)
    loss.backward()
    assert [buffer._version for buffer in network.buffers()] == versions


def test_statistics_in_training_mode_are_put_back():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    before = described(network)
    x = torch.randn(2, 3, 6, 6)
    with unchanged(network):
        first = network(x)
    assert described(network) == before
    with unchanged(network):
        assert torch.equal(network(x), first), "the random state was not put back"


def test_flags_that_a_network_sets_are_put_back():
    class Setting(Backbone):
        def forward(self, x):
            self.features.train()
            return super().forward(x)

    network = Setting().eval()
    with unchanged(network):
        network(torch.ones(2, 3, 12, 12))
    assert not any(module.training for module in network.modules())


def test_a_parametrized_module():
    network = nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 5)), nn.Linear(5, 2)).train()
    network[0].parametrizations.weight.original.data.copy_(torch.eye(5, 3))  # not those that its vectors are made for
    before = described(network)
    x = torch.ones(2, 3)
    with unchanged(network):
        network(x)
        assert described(network) != before
    assert described(network) == before
    network(x)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and its tracer talks
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 3, 6, 6))])
def test_a_scripted_module_inside(make):
    network = nn.Sequential(make(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()), nn.ReLU()).train()
    before = [buffer.tolist() for buffer in network.buffers()]
    with unchanged(network):
        network(torch.ones(2, 3, 6, 6))
        assert [buffer.tolist() for buffer in network.buffers()] != before
    assert [buffer.tolist() for buffer in network.buffers()] == before
    refuse_parallel(network)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_lazy_module_stays_what_its_first_pass_made_it():
    network = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())
    with unchanged(network):
        network(torch.ones(2, 3, 6, 6))
    assert type(network[0]) is nn.Conv2d
    assert network[0].in_channels == 3
    assert network(torch.ones(2, 3, 6, 6)).shape == (2, 4, 4, 4)


def test_odd_tensors_do_no_harm():
    network = nn.Identity()
    network.sparse = torch.eye(3).to_sparse()
    network.meta = torch.ones(3, device="meta")
    network.expanded = torch.ones(1).expand(3)
    network.missing = torch.tensor([torch.nan, 1.0])
    network.empty = torch.empty(0)
    network.itself = network.__dict__
    network.register_buffer("nothing", None)
    network.register_parameter("none", None)
    before = dict(vars(network))
    with unchanged(network):
        network(torch.ones(1))
        network.missing[1] = 2
    assert vars(network).keys() == before.keys()
    assert all(vars(network)[name] is value for name, value in before.items())
    assert network.missing[1] == 1


def test_parameters_are_not_copied():
    network = nn.Linear(3, 3)
    weight = network.weight
    with unchanged(network), torch.no_grad():
        network.weight += 1
        after = network.weight.clone()
        network.weight = nn.Parameter(torch.zeros(3, 3))
    assert network.weight is weight
    assert torch.equal(weight, after)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_random_state_of_a_device_is_put_back():
    network = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3)).cuda().train()
    before, random = described(network), torch.cuda.get_rng_state()
    with unchanged(network):
        network(torch.ones(4, 3, device="cuda"))
    assert described(network) == before
    assert torch.equal(torch.cuda.get_rng_state(), random)


@pytest.mark.parametrize("layer", [None, ""])
def test_no_layer_is_the_network_itself(layer):
    network = Backbone()
    assert find_layer_name(network, layer) is None
    assert find_layer_name(network, network) is None


def test_a_layer_by_an_alias_or_itself():
    network = Backbone()
    network.neck = network.classifier
    network.block = nn.ModuleList([network.classifier[3]])
    for layer in ("classifier.3", "neck.3", "block.0", network.neck[3]):
        assert find_layer_name(network, layer) == "classifier.3"


@pytest.mark.parametrize("layer", ["classifier.9", "classifier.0.weight", "classifier.0.weight.x", "nothing", 4])
def test_no_such_layer(layer):
    with pytest.raises(
        ValueError, match=f"Backbone has no layer {layer!r}; .*ts last layers are: [a-z].*classifier.5$"
    ):
        find_layer_name(Backbone(), layer)


def test_a_layer_of_a_copy_is_not_in_the_network():
    network = Backbone()
    with pytest.raises(ValueError, match="this Linear object is not in this Backbone"):
        find_layer_name(network, copy.deepcopy(network).classifier[3])


def test_parallel_copies_are_refused():
    network = Backbone()
    refuse_parallel(network)
    with pytest.raises(ValueError, match=r"DataParallel runs copies on other devices.*: pass model\.module$"):
        refuse_parallel(nn.DataParallel(network))
    network.features = nn.DataParallel(network.features)
    with pytest.raises(
        ValueError, match=r"DataParallel runs copies .*: put the \.module of each DataParallel in its place"
    ):
        refuse_parallel(network)
