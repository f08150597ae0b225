"""Replicas on the CPU and on repeated devices: what `torch.nn.DataParallel` does with distinct accelerators."""

import copy
import threading
from queue import SimpleQueue

import pytest
import torch
from conftest import CUDA_COUNT, device_lists
from helpers import (
    TwoLayers,
    are_distinct_gpus,
    as_devices,
    as_torch_names,
    assert_equal,
    assert_same_state,
    assert_same_step,
    doubles,
    twins,
)
from simulated_gpus import is_simulated
from torch import nn

from sync_batchnorm import DataParallelWithCallback, SynchronizedBatchNorm1d, local_parallel
from sync_batchnorm.local_parallel import as_device, needs_own_parallel, parallel_apply


class Shapes(nn.Module):
    """Notes the arguments of each replica: tensors by their shape."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, *args, **kwargs):
        def shape(tree):
            if isinstance(tree, torch.Tensor):
                return tuple(tree.shape)
            if isinstance(tree, dict):
                return {key: shape(value) for key, value in tree.items()}
            return tree

        self.seen.append(([shape(arg) for arg in args], shape(kwargs)))


def seen_by_replicas(device_ids, *args, **kwargs):
    module = Shapes()
    assert DataParallelWithCallback(module, device_ids)(*args, **kwargs) is None
    return module.seen


def test_call_without_arguments_runs_once():
    assert seen_by_replicas(["cpu"] * 3) == [([], {})]


def test_keyword_arguments_alone_are_cut_into_chunks():
    assert (
        seen_by_replicas(["cpu"] * 2, input=torch.zeros(4, 3), flag=True) == [([], {"input": (2, 3), "flag": True})] * 2
    )


def test_call_without_tensors_runs_on_every_device():
    assert seen_by_replicas(["cpu"] * 2, 5, text="x") == [([5], {"text": "x"})] * 2


def test_empty_containers_reach_every_replica():
    arguments = {"tensor": torch.zeros(4, 1), "list": [], "tuple": (), "dict": {}}
    assert (
        seen_by_replicas(["cpu"] * 2, arguments)
        == [([{"tensor": (2, 1), "list": [], "tuple": (), "dict": {}}], {})] * 2
    )


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)], ids=str)
def test_tensors_that_cannot_be_cut_together_are_refused(sizes):
    first, second = (torch.zeros(size, 2) for size in sizes)
    parallel = DataParallelWithCallback(Shapes(), ["cpu"] * 2)
    message = r"expected tensors that make equally many chunks along dimension 0, but got \[\(\d, 2\), \(\d, 2\)\]"
    with pytest.raises(ValueError, match=message):
        parallel(first, second)
    with pytest.raises(ValueError, match=message):
        parallel(first, other=second)


def test_scalar_arguments_are_refused():
    with pytest.raises(
        ValueError, match=r"but got \[\(4,\), \(\)\], which make \[2, 0\] of 2; give every tensor a row"
    ):
        DataParallelWithCallback(Shapes(), ["cpu"] * 2)(torch.zeros(4), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"but got \[\(\)\], which make \[0\] of 2"):
        DataParallelWithCallback(Shapes(), ["cpu"] * 2)(torch.tensor(1.0))


def test_parameter_that_no_replica_uses_has_no_gradient():
    class Unused(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.unused = nn.Parameter(torch.zeros(3))

    plain, parallel = twins(Unused().double(), ["cpu"] * 3)
    assert_same_step(plain, parallel, doubles(6, 3))


def test_failure_of_the_lowest_replica_is_raised_in_whichever_order_they_fail(monkeypatch):
    recorded = threading.Event()

    class Telling(SimpleQueue):
        def put(self, item):
            if item == 0:  # the first replica is through, so its failure is known
                recorded.set()
            super().put(item)

    def fails_at_once():
        raise LookupError("of the first")

    def fails_later():
        assert recorded.wait(5)
        raise ValueError("of the second")

    monkeypatch.setattr(local_parallel, "SimpleQueue", Telling)
    with pytest.raises(LookupError, match=r"(?s)Caught LookupError in replica 0 on device cpu\..*of the first"):
        parallel_apply([fails_at_once, fails_later], [(), ()], [{}, {}], [torch.device("cpu")] * 2)


def test_thread_of_a_replica_ends_when_all_replicas_are_through():
    threads = []
    begun = threading.Event()

    def returns_at_once():
        threads.append(threading.current_thread())
        begun.set()

    def returns_later():
        begun.wait()
        threads[0].join(0.2)
        return threads[0].is_alive()

    replicas = [returns_at_once, returns_later]
    assert parallel_apply(replicas, [(), ()], [{}, {}], [torch.device("cpu")] * 2) == [None, True]
    assert not threads[0].is_alive()


def test_thread_that_cannot_be_started_leaves_no_other_behind(monkeypatch):
    before, start, started = threading.active_count(), threading.Thread.start, []

    def start_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        parallel_apply([int, int], [(), ()], [{}, {}], [torch.device("cpu")] * 2)
    started[0].join(5)
    assert threading.active_count() == before


@pytest.mark.cuda
@pytest.mark.skipif(CUDA_COUNT < 2, reason="needs two GPUs")
@pytest.mark.parametrize("devices", [[0, 0, 1], [1, 0, 1, 0]], ids=str)
def test_some_replicas_may_share_a_gpu(devices):
    plain, parallel = twins(TwoLayers().double(), devices)
    assert_same_step(plain, parallel, doubles(8, 3, 6, 6, devices=devices))


@pytest.mark.cuda
@pytest.mark.skipif(CUDA_COUNT < 2, reason="needs two GPUs")
def test_replicas_that_share_one_of_several_gpus_share_its_parameters():
    replicas = local_parallel.replicate(nn.Linear(2, 2).cuda(), as_devices([0, 1, 0, 1]), False)
    for first, second in (replicas[::2], replicas[1::2]):
        assert second.weight.data_ptr() == first.weight.data_ptr()


def test_single_device_takes_tensors_of_any_sizes():
    assert seen_by_replicas(["cpu"], torch.zeros(4, 2), torch.zeros(3)) == [([(4, 2), (3,)], {})]


def test_without_accelerator_and_devices_the_module_runs_directly(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    plain, parallel = TwoLayers(), DataParallelWithCallback(copy.deepcopy(TwoLayers()), [])
    parallel.module.load_state_dict(plain.state_dict())
    assert_equal(parallel(torch.ones(2, 3, 6, 6)), plain(torch.ones(2, 3, 6, 6)))
    assert (parallel.device_ids, parallel.dim) == ([], 0)


class WithBuffers(nn.Module):
    """Multiplies by a buffer that takes a gradient and adds one that does not."""

    def __init__(self, factor):
        super().__init__()
        self.register_buffer("factor", factor)
        self.register_buffer("offset", torch.ones(3, dtype=factor.dtype, device=factor.device))
        self.seen = []

    def forward(self, input):
        self.seen.append((self.factor.requires_grad, self.offset.requires_grad))
        return input * self.factor.sin() + self.offset


@pytest.mark.parametrize("devices", device_lists(1, 3))
def test_buffers_that_require_grad_get_it(devices):
    def run(factor, input):
        return DataParallelWithCallback(WithBuffers(factor), devices)(input)

    inputs = [doubles(*shape, devices=devices).requires_grad_() for shape in ((3,), (4, 3))]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("devices", device_lists(1, 2))
def test_nothing_in_replicas_requires_grad_under_no_grad(devices):
    parallel = DataParallelWithCallback(WithBuffers(doubles(3, devices=devices).requires_grad_()), devices)
    output = parallel(doubles(4, 3, devices=devices))
    with torch.no_grad():
        parallel(doubles(4, 3, devices=devices))
    first, last = parallel.module.seen[: len(devices)], parallel.module.seen[len(devices) :]
    assert output.requires_grad
    assert first == [(True, False)] * len(devices)
    # One device runs the module itself, and on distinct GPUs torch's `replicate` hands the first replica the tensors of
    # the module themselves. The replicas note what they see in any order.
    own = len(devices) == 1 or are_distinct_gpus(devices)
    assert sorted(last, reverse=True) == [(i == 0 and own, False) for i in range(len(devices))]


class Lists(nn.Module):
    """Keeps parameters in containers."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.randn(3) for _ in range(2)])
        self.dict = nn.ParameterDict({"scale": torch.randn(3)})
        self.bn = nn.BatchNorm1d(3)

    def forward(self, input):
        parameters = [*self.list, self.dict["scale"]]
        assert all(parameter.requires_grad for parameter in parameters)
        assert all((parameter.grad_fn is not None) == hasattr(self, "_is_replica") for parameter in parameters)
        return self.bn(input) * self.list[0] + self.list[1] * self.dict["scale"]


def test_parameter_lists_and_dicts_reach_the_replicas(devs):
    plain, parallel = twins(Lists().double(), devs)
    assert_same_step(plain, parallel, doubles(6, 3, devices=devs))


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}], ids=str)
@pytest.mark.parametrize("devices", device_lists(2))
def test_key_errors_keep_type_text_and_traceback(devices, failing):
    class Lookup(nn.Module):
        def forward(self, input):
            if int(input[0]) in failing:
                raise KeyError("no such key")
            return input

    device = as_devices(devices)[0]
    with pytest.raises(KeyError) as caught:
        DataParallelWithCallback(Lookup(), devices)(torch.arange(2.0, device=device))
    text = str(caught.value)
    assert f"Caught KeyError in replica {min(failing)} on device {as_torch_names(devices, min(failing))}" in text
    assert "Original Traceback" in text
    assert "\n" in text
    assert 'raise KeyError("no such key")' in text


@pytest.mark.parametrize("devices", device_lists(2))
def test_outputs_are_gathered_on_the_output_device(devices):
    module = nn.Linear(3, 2).to(as_devices(devices)[0])
    data = torch.randn(4, 3, device=as_devices(devices)[0])
    for output_device, expected in ((None, as_devices(devices)[0]), (devices[1], as_devices(devices)[1])):
        parallel = DataParallelWithCallback(module, devices, output_device)
        assert parallel(data).device == expected
    assert_equal(parallel(data).cpu(), module(data).cpu())


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_cpu_has_one_name(name):
    assert as_device(name) == torch.device("cpu")
    plain, parallel = twins(TwoLayers().double(), ["cpu", "cpu"])
    parallel = DataParallelWithCallback(parallel.module, [name, "cpu"])
    assert_same_step(plain, parallel, doubles(4, 3, 6, 6))


def test_devices_are_local_if_torch_would_refuse_them():
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert not needs_own_parallel(gpus)
    assert needs_own_parallel([gpus[0], gpus[0]])
    assert needs_own_parallel([torch.device("cpu")])


def test_unknown_devices_are_refused_in_the_words_of_torch():
    with pytest.raises(RuntimeError, match="Expected one of cpu"):
        DataParallelWithCallback(nn.Linear(2, 2), ["nowhere"])


def test_devices_of_different_kinds_are_refused():
    with pytest.raises(ValueError, match=r"expected device_ids of one kind, but got \['cpu', 'cuda:0'\]"):
        DataParallelWithCallback(nn.Linear(2, 2), ["cpu", "cuda:0"])


def test_module_on_the_wrong_device_is_refused_in_the_words_of_torch():
    parallel = DataParallelWithCallback(nn.Linear(2, 2, device="meta"), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device cpu"):
        parallel(torch.zeros(4, 2))


@pytest.mark.skipif(is_simulated(), reason="simulated GPUs have no sparse tensors")
@pytest.mark.parametrize("devices", device_lists(3))
def test_sparse_gradients_stay_sparse_and_add_up(devices):
    plain, parallel = twins(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.BatchNorm1d(4)).double(), devices)
    indices = torch.randint(5, (6, 4), device=as_devices(devices)[0])
    grad = doubles(6, 4, 3, devices=devices)
    for module in (plain, parallel):
        module(indices).backward(grad)
    weight = parallel.module[0].weight
    assert weight.grad.is_sparse
    assert_equal(weight.grad.to_dense(), plain[0].weight.grad.to_dense())


@pytest.mark.parametrize("devices", device_lists(2))
def test_replicas_share_parameters_and_only_the_first_has_the_buffers(devices):
    _, parallel = twins(nn.BatchNorm1d(3), devices)
    first, second = parallel.replicate(parallel.module, parallel.device_ids)
    assert first.weight.data_ptr() == parallel.module.weight.data_ptr()
    assert first.running_mean.data_ptr() == parallel.module.running_mean.data_ptr()
    assert second.running_mean.data_ptr() != parallel.module.running_mean.data_ptr()
    if first.weight.device == second.weight.device:
        assert second.weight.data_ptr() == parallel.module.weight.data_ptr()
    for replica in (first, second):
        assert not list(replica.parameters())
        assert replica.weight.grad_fn is not None


@pytest.mark.parametrize("devices", device_lists(2))
def test_modules_and_tensors_under_two_names_stay_one(devices):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
            self.alias = self.one
            self.bn = nn.BatchNorm1d(3)
            self.other.weight, self.other.bias = self.one.weight, self.bn.bias

        def forward(self, input):
            assert self.alias is self.one
            return self.bn(self.other(self.alias(input)))

    plain, parallel = twins(Tied().double(), devices)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, parallel)]
    for _ in range(2):
        assert_same_step(plain, parallel, doubles(4, 3, devices=devices))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(parallel, plain)


def test_zero_grad_in_a_replica_warns():
    class Clearing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, input):
            self.zero_grad()
            return input

    with pytest.warns(UserWarning, match=r"Calling \.zero_grad\(\) from a module created with nn\.DataParallel"):
        DataParallelWithCallback(Clearing(), ["cpu"] * 2)(torch.zeros(2))


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")  # but with simulated GPUs
def test_recurrent_layers_run_in_replicas(devs):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            # Not an LSTM, whose kernels simulated GPUs lack.
            self.rnn, self.bn = nn.RNN(3, 4, 2, batch_first=True), nn.BatchNorm1d(4)

        def forward(self, input):
            self.rnn.flatten_parameters()
            return self.bn(self.rnn(input)[0].transpose(1, 2))

    plain, parallel = twins(Recurrent().double(), devs)
    assert_same_step(plain, parallel, doubles(6, 5, 3, devices=devs))


def test_uninitialized_lazy_modules_are_refused_in_the_words_of_torch():
    parallel = DataParallelWithCallback(nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3)), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match="Modules with uninitialized parameters can't be used with `DataParallel`"):
        parallel(torch.zeros(4, 2))


class CountingThreads(nn.Module):
    """Notes how many intra-op threads a replica has, from when its caller has its own again."""

    def __init__(self, restored):
        super().__init__()
        self.restored, self.counts = restored, []

    def forward(self, input):
        self.restored.wait()
        self.counts.append(torch.get_num_threads())
        return input


class SettingThreads(nn.Module):
    """Notes how many intra-op threads a replica begins with, and takes another number at once."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def forward(self, input):
        self.counts.append(torch.get_num_threads())
        torch.set_num_threads(1)
        return input


def test_replica_that_sets_its_intra_op_threads_leaves_those_of_its_peers():
    before, parallel = torch.get_num_threads(), DataParallelWithCallback(SettingThreads(), ["cpu"] * 3)
    try:
        for _ in range(20):
            torch.set_num_threads(6)
            parallel(torch.zeros(3))
        assert parallel.module.counts == [2] * 60
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("started", range(3))
def test_thread_that_cannot_be_started_leaves_others_their_intra_op_threads(monkeypatch, started, error):
    """As where a process may have no more threads, or at Ctrl-C: those that were started end, later ones have all."""
    start, number, later, before = threading.Thread.start, [], [], torch.get_num_threads()

    def fails(thread):
        number.append(thread)
        if len(number) > started:
            raise error("can't start new thread")
        start(thread)

    parallel = DataParallelWithCallback(SynchronizedBatchNorm1d(3), ["cpu"] * 3)
    try:
        torch.set_num_threads(3)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            with pytest.raises(error, match="can't start new thread"):
                parallel(torch.randn(6, 3))
        for thread in number[:started]:
            thread.join()
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
        assert parallel(torch.randn(6, 3)).shape == (6, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("available", "share"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_replicas_divide_the_intra_op_threads_of_their_caller(available, share, monkeypatch):
    def note(number):
        original(number)
        if number == available:
            restored.set()

    before, original, restored = torch.get_num_threads(), torch.set_num_threads, threading.Event()
    monkeypatch.setattr(torch, "set_num_threads", note)
    parallel = DataParallelWithCallback(CountingThreads(restored), ["cpu"] * 2)
    later = []
    try:
        torch.set_num_threads(available)
        if available > share:
            restored.clear()
        parallel(torch.zeros(2))
        assert parallel.module.counts == [share, share]
        assert torch.get_num_threads() == available
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [available]
    finally:
        torch.set_num_threads(before)
