"""The recipes of `docs/migrating.md` and `docs/extending.md`, and others like them, equal one device."""

import types
from typing import Any

import pytest
import torch
from conftest import device_lists
from helpers import Net, assert_equal, assert_same_results, assert_same_state, assert_same_step, doubles, twins
from repository import ROOT, blocks_of
from torch import Tensor, nn

from sync_batchnorm import (
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    assert_matches_one_device,
    convert_model,
    merge_messages,
    revert_model,
    sync_moments,
)

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


class SyncBN2d(SynchronizedBatchNorm2d):
    """Is called as in BigGAN."""

    def forward(self, input: Tensor, gain: Any = 1, bias: Any = 0) -> Tensor:
        return super().forward(input) * gain + bias


class NamedBatchNorm2d(SynchronizedBatchNorm2d):
    """Has one more argument, and another default of momentum."""

    def __init__(self, num_features: int, momentum: float = 3e-4, name: str | None = None) -> None:
        super().__init__(num_features, momentum=momentum)
        self.name = name


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


def test_layer_with_gain_and_bias_equals_one_device():
    plain = Conditional(nn.BatchNorm2d(3, affine=False)).double()
    synchronized = Conditional(SyncBN2d(3, affine=False)).double()
    synchronized.load_state_dict(plain.state_dict())
    parallel = DataParallelWithCallback(synchronized, CPUS)
    batch, condition, grad = doubles(5, 3, 4, 4), doubles(5, 2), doubles(5, 3, 4, 4)
    for model in (plain, parallel):
        model(batch, condition).backward(grad)
    assert_same_state(parallel, plain)
    assert_equal(synchronized.eval()(batch, condition), plain.eval()(batch, condition))
    assert_equal(synchronized.bn(batch), plain.bn(batch))


@pytest.mark.filterwarnings(r"ignore:\d+ BatchNorm")
def test_layer_that_is_reverted_has_the_statistics_of_its_replica():
    net = nn.ModuleDict({"synchronized": nn.BatchNorm2d(3), "batch_norm_no_syn": nn.BatchNorm2d(3)}).double()
    revert_model(convert_model(net).get_submodule("batch_norm_no_syn"))
    assert type(net["batch_norm_no_syn"]) is nn.BatchNorm2d
    batch = doubles(4, 3, 2, 2)
    for name, expected in {
        "synchronized": nn.BatchNorm2d(3).double()(batch),
        "batch_norm_no_syn": torch.cat([nn.BatchNorm2d(3).double()(chunk) for chunk in batch.chunk(2)]),
    }.items():
        assert_equal(DataParallelWithCallback(net[name], CPUS)(batch), expected)


def test_layer_with_another_argument_equals_one_device():
    layer = NamedBatchNorm2d(4, name="stem").double()
    assert (layer.name, layer.momentum) == ("stem", 3e-4)
    plain, parallel = twins(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=3e-4)).double(), CPUS)
    layer.load_state_dict(plain[1].state_dict())
    parallel.module[1] = layer
    assert_same_step(plain, parallel, doubles(5, 3, 6, 6))


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


@pytest.mark.parametrize(
    ("rows", "sizes"), [(5, [1, 2, 2]), (4, [1, 2, 1]), (3, [1, 1, 1]), (2, [1, 1]), (11, [3, 4, 4])]
)
def test_uneven_chunks_of_another_batch_are_in_proportion(recipes, rows, sizes):
    plain, parallel = twins(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double(), ["cpu"] * 3)
    seen: list[int] = []
    parallel.module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    assert_same_step(plain, recipes.Uneven(parallel.module, ["cpu"] * 3, [1, 2, 2]), doubles(rows, 3, 6, 6))
    assert seen == sizes


def _encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4))


class WithQueue(nn.Module):
    """Compares features with a queue of earlier ones."""

    def __init__(self, queue: nn.Module) -> None:
        super().__init__()
        self.encoder, self.queue = _encoder(), queue

    def forward(self, input: Tensor) -> Tensor:
        features = self.encoder(input)
        return self.queue(features, features)


def _renorm(page: types.ModuleType) -> nn.Module:
    """Return batch renormalization (Ioffe, 2017), made as the page says."""

    class BatchRenorm2d(page.Connected):
        merge = staticmethod(merge_messages)

        def __init__(self, num_features: int, r_max: float = 3.0, d_max: float = 5.0) -> None:
            super().__init__()
            self.r_max, self.d_max = r_max, d_max
            self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
            self.register_buffer("running_mean", torch.zeros(num_features))
            self.register_buffer("running_std", torch.ones(num_features))

        def forward(self, input: Tensor) -> Tensor:
            mean, std, weight, bias = self.running_mean, self.running_std, self.weight, self.bias
            if self.training:
                mean, var, _ = sync_moments(input, self.pipe)
                std = (var + 1e-5).sqrt()
                with torch.no_grad():
                    r = (std / self.running_std).clamp(1 / self.r_max, self.r_max)
                    d = ((mean - self.running_mean) / self.running_std).clamp(-self.d_max, self.d_max)
                    self.running_mean.lerp_(mean, 0.01)
                    self.running_std.lerp_(std, 0.01)
                weight, bias = weight * r, bias + weight * d
            return (input - mean.view(-1, 1, 1)) * (weight / std).view(-1, 1, 1) + bias.view(-1, 1, 1)

    return BatchRenorm2d(3)


def _codebook(page: types.ModuleType) -> nn.Module:
    """Return a net with a codebook (VQ-VAE) that follows the features of the whole batch, made as the page says."""

    class Codebook(page.Connected):
        def __init__(self, entries: int, size: int, decay: float) -> None:
            super().__init__()
            self.decay = decay
            self.register_buffer("entries", torch.randn(entries, size))
            self.register_buffer("counts", torch.ones(entries))
            self.register_buffer("sums", self.entries.clone())

        def merge(self, messages: list[tuple[int, tuple[Tensor, Tensor]]]) -> list[tuple[int, None]]:
            home = self.counts.device
            self.counts.lerp_(sum(counts.to(home) for _, (counts, _) in messages), 1 - self.decay)
            self.sums.lerp_(sum(sums.to(home) for _, (_, sums) in messages), 1 - self.decay)
            self.entries.copy_(self.sums / self.counts.clamp(min=1e-5)[:, None])
            return [(identifier, None) for identifier, _ in messages]

        def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
            nearest = torch.cdist(features, self.entries).argmin(1)
            quantized = self.entries[nearest]
            chosen = nn.functional.one_hot(nearest, len(self.entries)).to(features)
            self.exchange((chosen.sum(0), chosen.T @ features.detach()))
            return features + (quantized - features).detach(), (features - quantized).square().mean(1)

    return nn.Sequential(_encoder(), Codebook(5, 4, decay=0.7))


def _dropout(page: types.ModuleType) -> nn.Module:
    """Return a net whose replica 0 draws one mask for the whole batch, made as the page says."""

    class WholeBatchDropout(page.Connected):
        def __init__(self, p: float, seed: int) -> None:
            super().__init__()
            self.p, self.generator = p, torch.Generator().manual_seed(seed)

        def merge(self, messages: list[tuple[int, torch.Size]]) -> list[tuple[int, Tensor]]:
            shapes = [shape for _, shape in messages]
            whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            masks = (torch.rand(whole, generator=self.generator) >= self.p).split([shape[0] for shape in shapes])
            return [(identifier, mask) for (identifier, _), mask in zip(messages, masks, strict=True)]

        def forward(self, input: Tensor) -> Tensor:
            return input * self.exchange(input.shape).to(input.device) / (1 - self.p)

    return nn.Sequential(_encoder(), WholeBatchDropout(0.5, seed=3))


EXTENSIONS = {
    "norm": lambda page: (nn.Sequential(nn.Conv2d(3, 4, 1), page.OwnNorm2d(4)), doubles(5, 3, 4, 4)),
    "renorm": lambda page: (_renorm(page), doubles(5, 3, 4, 4)),
    "contrastive": lambda page: (page.Contrastive(_encoder()), doubles(5, 6), doubles(5, 6)),
    "codebook": lambda page: (_codebook(page), doubles(5, 6)),
    "queue": lambda page: (WithQueue(page.Queue(12, 4)), doubles(5, 6)),
    "features": lambda page: (page.WithFeatures(_conv(), "2"), doubles(5, 3, 4, 4)),
    "dropout": lambda page: (_dropout(page), doubles(5, 6)),
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
