"""The recipes of `docs/migrating.md` for edited copies, and of `docs/extending.md`, equal one device."""

import types

import pytest
import torch
from conftest import device_lists
from helpers import Net, assert_equal, assert_same_results, assert_same_state, assert_same_step, doubles, twins
from repository import ROOT, blocks_of
from torch import Tensor, nn

from sync_batchnorm import DataParallelWithCallback, assert_matches_one_device, revert_model

CPUS = ["cpu"] * 2


def code_of(page: str, heading: str) -> types.ModuleType:
    """Run the Python blocks of a page from a heading on; return them as one module."""
    module = types.ModuleType("recipes")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    start = text.partition(f"\n{heading}\n")[0].count("\n")
    for block in blocks_of(ROOT / "docs" / page):
        if block.language == "python" and block.line > start:
            block.run(vars(module))
    return module


@pytest.fixture
def recipes() -> types.ModuleType:
    return code_of("migrating.md", "### Recipes for edited copies")


@pytest.fixture(scope="module")
def extending() -> types.ModuleType:
    return code_of("extending.md", "## Callbacks for modules of your own")


class Conditional(nn.Module):
    """A conditional batch norm that calls its layer as BigGAN does."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.bn, self.gain, self.bias = norm, nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, input: Tensor, condition: Tensor) -> Tensor:
        gain, bias = 1 + self.gain(condition)[..., None, None], self.bias(condition)[..., None, None]
        if type(self.bn) is nn.BatchNorm2d:
            return self.bn(input) * gain + bias
        return self.bn(input, gain=gain, bias=bias)


def test_layer_with_gain_and_bias_equals_one_device(recipes):
    plain = Conditional(nn.BatchNorm2d(3, affine=False)).double()
    synchronized = Conditional(recipes.SyncBN2d(3, affine=False)).double()
    synchronized.load_state_dict(plain.state_dict())
    parallel = DataParallelWithCallback(synchronized, CPUS)
    batch, condition, grad = doubles(5, 3, 4, 4), doubles(5, 2), doubles(5, 3, 4, 4)
    for model in (plain, parallel):
        model(batch, condition).backward(grad)
    assert_same_state(parallel, plain)
    assert_equal(synchronized.eval()(batch, condition), plain.eval()(batch, condition))
    assert_equal(synchronized.bn(batch), plain.bn(batch))


@pytest.mark.filterwarnings(r"ignore:\d+ BatchNorm")
def test_layer_that_is_reverted_has_the_statistics_of_its_replica(recipes):
    net = nn.ModuleDict({"synchronized": nn.BatchNorm2d(3), "batch_norm_no_syn": nn.BatchNorm2d(3)}).double()
    net = recipes.convert_all_but(net, "batch_norm_no_syn")
    assert type(net["batch_norm_no_syn"]) is nn.BatchNorm2d
    batch = doubles(4, 3, 2, 2)
    for name, expected in {
        "synchronized": nn.BatchNorm2d(3).double()(batch),
        "batch_norm_no_syn": torch.cat([nn.BatchNorm2d(3).double()(chunk) for chunk in batch.chunk(2)]),
    }.items():
        assert_equal(DataParallelWithCallback(net[name], CPUS)(batch), expected)


def test_layer_takes_a_name_and_model_is_converted_and_wrapped_at_once(recipes):
    layer = recipes.NamedBatchNorm2d(3, name="stem")
    assert (layer.name, layer.momentum) == ("stem", 3e-4)
    plain, parallel = twins(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double(), CPUS)
    assert_same_step(plain, recipes.convert_and_wrap(revert_model(parallel.module), CPUS), doubles(5, 3, 6, 6))


@pytest.mark.parametrize("chunk_size", [[1, 4], [3, 2]])
def test_uneven_chunks_equal_one_device(recipes, chunk_size):
    plain, parallel = twins(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double(), CPUS)
    sizes: list[int] = []
    parallel.module.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    uneven = recipes.Uneven(parallel.module, CPUS, chunk_size)
    assert_same_step(plain, uneven, doubles(5, 3, 6, 6))
    assert sorted(sizes) == sorted(chunk_size)
    assert_matches_one_device(uneven, torch.randn(5, 3, 6, 6))
    net = Net(lambda net, x, sign: x * sign)
    assert_equal(recipes.Uneven(net, CPUS, chunk_size)(batch := doubles(5, 2), sign=-1), -batch)
    with pytest.raises(TypeError, match="pass tensors by position"):
        recipes.Uneven(net, CPUS, chunk_size)(batch, sign=batch)


def _encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4))


def _net_with_queue(page: types.ModuleType) -> nn.Module:
    """Return a net that compares features with a queue of earlier ones, made as the page says."""

    class Queue(page.Connected):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.randn(12, 4))

        def merge(self, messages: list[tuple[int, Tensor]]) -> list[tuple[int, None]]:
            keys = torch.cat([part.to(self.keys.device) for _, part in messages])
            self.keys.copy_(torch.cat([self.keys[len(keys) :], keys]))
            return [(identifier, None) for identifier, _ in messages]

        def forward(self, features: Tensor) -> Tensor:
            scores = features @ self.keys.clone().T
            self.exchange(features.detach())
            return scores

    return nn.Sequential(_encoder(), Queue())


EXTENSIONS = {
    "renorm": lambda page: (page.BatchRenorm2d(3), doubles(5, 3, 4, 4)),
    "contrastive": lambda page: (page.Contrastive(_encoder()), doubles(5, 6), doubles(5, 6)),
    "codebook": lambda page: (nn.Sequential(_encoder(), page.Codebook(5, 4, decay=0.7)), doubles(5, 6)),
    "queue": lambda page: (_net_with_queue(page), doubles(5, 6)),
    "features": lambda page: (page.WithFeatures(_conv(), "2"), doubles(5, 3, 4, 4)),
    "dropout": lambda page: (nn.Sequential(_encoder(), page.WholeBatchDropout(0.5, seed=3)), doubles(5, 6)),
}


@pytest.mark.parametrize("devices", device_lists(1, 2, 3))
@pytest.mark.parametrize("name", EXTENSIONS)
def test_module_of_ones_own_equals_one_device(extending, name, devices):
    net, *inputs = EXTENSIONS[name](extending)
    inputs = [input.to(devices[0]).requires_grad_() for input in inputs]
    plain, parallel = twins(net.double(), devices)

    def step(model: nn.Module) -> list[Tensor]:
        output = model(*inputs)
        outputs = [output] if isinstance(output, Tensor) else list(output)
        upstream = [output.detach().sin() for output in outputs]
        gradients = torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)
        torch.autograd.backward(outputs, upstream, inputs=list(model.parameters()))
        return [*outputs, *gradients]

    for _ in range(3):
        assert_same_results(plain, parallel, step, 1e-12)


def grad_cam(net: Net, input: Tensor) -> Tensor:
    """Return the gradient of each sample's first score with respect to its features, made inside `forward`."""
    scores, features = net.with_features(input)
    return torch.autograd.grad(scores[:, 0].sum(), features)[0]


@pytest.mark.parametrize("devices", device_lists(2, 3))
def test_gradient_of_features_is_made_inside_in_eval_mode_and_cannot_be_outside(extending, devices):
    net = Net(grad_cam, with_features=extending.WithFeatures(_conv(), "2"))
    plain, parallel = twins(net.double().eval(), devices)
    input = doubles(5, 3, 4, 4, devices=devices)
    assert_equal(parallel(input), plain(input))
    scores, features = DataParallelWithCallback(parallel.module.with_features, devices)(input)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(scores[:, 0].sum(), features)
