"""A function that was given to `torch.compile` may call synchronized layers: they are not compiled themselves."""

import subprocess
import sys
import warnings
from importlib.util import find_spec
from types import MethodType

import pytest
import torch
from helpers import Net, WithPipe, assert_same_state, assert_same_step, doubles, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from sync_batchnorm import DataParallelWithCallback, sync_moments

SECONDS = 60.0  # The first replica that is compiled imports the compiler, while the others wait.

pytestmark = [
    pytest.mark.timeout(900),
    # The compiler looks at `grad` of the parameters of replicas, which are no leaves, here and without this library.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _no_mode_left(monkeypatch):
    """Torch knows for the whole process whether a dispatch mode is on, and then compiles nothing (seen with 2.8).

    Threads that leave modes at the same time, as selective checkpoints in replicas do, may leave it so for good.
    """
    for name in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode"):
        monkeypatch.setattr(f"torch.utils._python_dispatch.{name}", False, raising=False)


@pytest.fixture(autouse=True)
def _nothing_compiled_before(monkeypatch):
    if find_spec("tqdm"):  # The compiler has progress bars, which leave a thread behind.
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.compiler.reset()
    yield
    torch.compiler.reset()


def body(function):
    """Return a convolution and a norm, and a function of them that is their forward."""
    return Net(function, conv=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4))


def replicas(net):
    # On the CPU: the simulated GPUs replace functions of torch that the compiler wants to know.
    return twins(net, ["cpu"] * 2, timeout=SECONDS)


def once(net, input):
    return torch.tanh(net.bn(torch.tanh(net.conv(input))))


def twice(net, input):
    """Call a layer in the middle, and once more."""
    return torch.tanh(net.bn(torch.relu(net.bn(net.conv(input) * 2)) + 1)) * 3


def checkpointed(net, input):
    return checkpoint(once, net, input * 2, use_reentrant=False) * 3


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_callers_train_and_evaluate_as_on_one_device(backend):
    plain, parallel = replicas(body(torch.compile(twice, backend=backend)).double())
    for training in (True, True, False, True):
        plain.train(training)
        parallel.train(training)
        assert_same_step(plain, parallel, doubles(8, 3, 4, 5))


def test_layer_is_compiled_once_and_not_in_every_forward():
    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    compiled = []
    _, parallel = replicas(body(torch.compile(once, backend=count)))
    for _ in range(3):
        parallel(torch.randn(4, 3, 4, 5))
    before = len(compiled)
    assert before
    for _ in range(10):
        parallel(torch.randn(4, 3, 4, 5))
    assert len(compiled) == before


def test_checkpoint_in_a_compiled_forward_is_exact_and_counted_as_on_one_device():
    plain, parallel = replicas(body(torch.compile(checkpointed, backend="eager")).double())
    for _ in range(2):
        data, grad = doubles(6, 3, 4, 5), doubles(6, 4, 4, 5)
        checkpointed(plain, data).backward(grad)
        parallel(data).backward(grad)
        assert_same_state(parallel, plain)


def test_compiled_backward_trains_as_on_one_device():
    plain, parallel = replicas(body(once).double())
    data, grad = doubles(6, 3, 4, 5), doubles(6, 4, 4, 5)

    @torch.compile(backend="eager")
    def train(model):
        model(data).backward(grad)

    plain(data).backward(grad)
    with torch._dynamo.config.patch(compiled_autograd=True):
        train(parallel)
    assert_same_state(parallel, plain)


@torch.compile(backend="eager")
def normalizing(net, input):
    mean, var, count = sync_moments(input * 2, net.pipe)
    return (input - mean / 2) * count + var


def test_compiled_normalization_of_ones_own_meets_the_others():
    data = doubles(6, 3)
    output = DataParallelWithCallback(WithPipe(normalizing), ["cpu"] * 3)(data)
    torch.testing.assert_close(output, (data - data.mean(0)) * 6 + (2 * data).var(0, correction=0))


def test_graph_that_must_not_break_is_refused_with_what_to_do():
    _, parallel = replicas(body(torch.compile(once, backend="eager", fullgraph=True)))
    with pytest.raises(Exception, match="got fullgraph=True; leave that out, or compile the functions between"):
        parallel(torch.randn(4, 3, 4, 5))
    parallel.eval()
    parallel(torch.randn(4, 3, 4, 5))  # where nobody is met


@pytest.mark.slow
def test_compiler_is_not_imported_by_those_who_do_not_use_it():
    program = """
import sys, torch
from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d
parallel = DataParallelWithCallback(SynchronizedBatchNorm1d(3), ["cpu"] * 2)
parallel(torch.randn(4, 3)).backward(torch.randn(4, 3))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.slow
def test_hook_that_is_a_method_is_compiled_with_its_layer():
    net = body(lambda net, x: net.bn(torch.compile(net.conv, backend="eager", fullgraph=True)(x)))
    scale = MethodType(lambda net, module, args, output: output * net.bn.weight.sum(), net)
    net.conv.register_forward_hook(scale)
    plain, parallel = replicas(net.double())
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(6, 3, 2, 2))
