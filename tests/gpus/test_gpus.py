"""What only GPUs have: streams of the caller's own, several devices, half precision; the numbers stay those of one GPU.

On simulated GPUs each of these tests also fails on a race and on memory that is reused while another stream may still
use it, which is what most of them are about; on real GPUs they compare numbers.
"""

import contextlib
import copy
import functools
import itertools
import threading
import weakref

import pytest
import torch
from conftest import CUDA_COUNT, device_lists, needs_two_gpus
from helpers import (
    Net,
    Operators,
    TwoLayers,
    are_distinct_gpus,
    as_devices,
    assert_equal,
    assert_same_results,
    assert_same_state,
    assert_same_step,
    doubles,
    end_from_outside,
    in_threads,
    twins,
)
from streams import on_a_side_stream
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from sync_batchnorm import DataParallelWithCallback, convert_model, patch_replication_callback
from sync_batchnorm.backends import cuda

pytestmark = [
    pytest.mark.cuda,
    # The engine notes it where parameters were made on another stream than the one that first uses them, and waits.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]


def gpu_lists(*sizes):
    return [devices for devices in device_lists(*sizes) if devices.id.startswith("cuda")]


def follow_defaults(streams):
    for stream in streams:
        stream.wait_stream(torch.cuda.default_stream(stream.device))


def defaults_follow(streams):
    for stream in streams:
        torch.cuda.default_stream(stream.device).wait_stream(stream)


@contextlib.contextmanager
def current(streams):
    """Make the streams current on their devices; the current device stays what it is."""
    device = torch.cuda.current_device()
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(torch.cuda.device(device))
        yield


SIDES = {"first": slice(1), "others": slice(1, None), "all": slice(None)}


def side_streams(devices, side):
    """Return a new stream for some of the distinct devices."""
    return [torch.cuda.Stream(device) for device in list(dict.fromkeys(as_devices(devices)))[SIDES[side]]]


def used_here(tensors):
    """Let the current streams use what others have made, and may free while they do; return it."""
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensors


@pytest.mark.parametrize("devices", [d for d in gpu_lists(2, 4) if are_distinct_gpus(d.values[0])])
def test_backward_finds_the_stream_that_a_hook_has_left_on_another_gpu(devices):
    def leave(stream):
        with torch.cuda.device(devices[-1]):
            found.append(torch.cuda.current_stream().stream_id)
            torch.cuda.set_stream(stream)

    def forward(net, input):
        output = net.bn(input)
        if input.device.index == 0:
            side, default = torch.cuda.Stream(devices[-1]), torch.cuda.default_stream(devices[-1])
            output.grad_fn.register_prehook(lambda _: leave(side))
            output.grad_fn.register_hook(lambda _, __: leave(default))
        return on_a_side_stream(nn.Softplus(), output)  # So no gradient is ready on the default stream of its device.

    found = []
    plain, parallel = twins(Net(forward, bn=nn.BatchNorm2d(3)).double(), devices)
    assert_same_step(plain, parallel, doubles(2 * len(devices), 3, 4, 5, devices=devices))
    default, side = found[-2:]  # of the wrapper, which comes last
    assert default == 0 != side


@pytest.mark.parametrize("devices", gpu_lists(2))
def test_gradients_made_on_streams_of_replicas_may_be_added_up_on_others(devices):
    net = Net(lambda net, input: on_a_side_stream(net.bn, input), bn=nn.BatchNorm2d(4))
    plain, parallel = twins(net.double(), devices)
    data, grad = (doubles(4, 4, 5, 5, devices=devices) for _ in range(2))

    def step(model):
        input = data.clone().requires_grad_()
        output = model(input)
        for again in (True, False):
            output.backward(grad, retain_graph=again)
        return [input.grad]

    assert_same_results(plain, parallel, step)


@pytest.mark.parametrize("records", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("devices", gpu_lists(1, 2, 4))
def test_outputs_on_side_streams_are_those_of_one_gpu(devices, side, records):
    plain, parallel = twins(TwoLayers().double(), devices)
    wrappers = [parallel]
    if len(devices) == 1 or are_distinct_gpus(devices):  # Torch refuses several replicas on one GPU.
        wrappers.append(patch_replication_callback(nn.DataParallel(copy.deepcopy(parallel.module), devices)))
    batches = [doubles(8, 3, 7, 6, devices=devices) for _ in range(3)]
    with torch.set_grad_enabled(records):
        expected = [plain(data) for data in batches][-1]
        for wrapper in wrappers:
            streams = side_streams(devices, side)
            follow_defaults(streams)
            with current(streams):
                for data in batches:  # Each frees what the one before has used, while the streams may still be busy.
                    output = wrapper(data)
            defaults_follow(streams)
            assert_equal(*used_here((output, expected)))
            assert_same_state(wrapper, plain)


@pytest.mark.parametrize("threads", [False, True], ids=["one-thread", "two-threads"])
@pytest.mark.parametrize("devices", gpu_lists(1, 2, 4))
def test_calls_on_streams_of_their_own_need_no_order(devices, threads):
    net = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Tanh())  # Several calls may run at a time.
    plain, parallel = twins(net.double(), devices)
    batches = [doubles(9, 3, 4, 5, devices=devices) for _ in range(2)]
    sides = [side_streams(devices, "all") for _ in batches]
    outputs = [None, None]
    follow_defaults(itertools.chain(*sides))

    def call(i):
        with current(sides[i]):
            for _ in range(3):
                outputs[i] = parallel(batches[i])

    calls = [functools.partial(call, i) for i in range(2)]
    in_threads(*calls) if threads else [call() for call in calls]
    defaults_follow(itertools.chain(*sides))
    for output, batch in zip(used_here(outputs), batches, strict=True):
        assert_equal(output, plain(batch))


@pytest.mark.skipif(CUDA_COUNT < 4, reason="needs four GPUs")
@pytest.mark.parametrize("threads", [False, True], ids=["one-thread", "two-threads"])
def test_wrappers_on_disjoint_gpus_train_as_one_device_each(threads):
    lists = [[0, 1], [3, 2]]  # the first of a list is the one that merges
    pairs = [twins(TwoLayers().double(), devices) for devices in lists]

    def train(*order):
        for i in order:
            assert_same_step(*pairs[i], doubles(4, 3, 6, 6, devices=lists[i]))

    if threads:
        in_threads(functools.partial(train, *[0] * 5), functools.partial(train, *[1] * 5))
    else:
        train(*[0, 1] * 3)


@pytest.mark.skipif(CUDA_COUNT < 3, reason="needs three GPUs")
def test_outputs_may_be_gathered_on_a_third_gpu():
    plain, parallel = twins(TwoLayers().double(), [0, 1], output_device=2)
    gathered = []
    parallel.register_forward_hook(lambda module, args, output: gathered.append(output.device) or output.to("cuda:0"))
    assert_same_step(plain, parallel, doubles(6, 3, 7, 6, devices=[0]))
    assert gathered == [torch.device("cuda", 2)]


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU tensor is deprecated")  # as torch's own scatter does
@pytest.mark.parametrize("devices", gpu_lists(1, 2, 4))
def test_inputs_may_be_on_the_cpu(devices):
    plain, parallel = twins(TwoLayers().double(), devices)
    plain.register_forward_pre_hook(lambda module, args: args[0].to(as_devices(devices)[0]))
    assert_same_step(plain, parallel, doubles(9, 3, 7, 6))


@pytest.mark.parametrize("on_cpu", [0, 1])
def test_replicas_of_which_one_normalizes_on_the_cpu_are_told(on_cpu):
    def moves(net, input, replica):
        return net.bn(input.cpu() if replica[0] == on_cpu else input)

    bn = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    parallel = DataParallelWithCallback(convert_model(Net(moves, bn=bn)), [0, 0])
    places = ["cpu", "cuda:0"] if on_cpu == 0 else ["cuda:0", "cpu"]
    text = rf"inputs with the same dtype, device type.* {places[0]} in replica 0.* {places[1]} in replica 1; give"
    with pytest.raises(ValueError, match=text):
        parallel(torch.randn(4, 3).cuda(), torch.arange(2).repeat_interleave(2).cuda())


@needs_two_gpus
def test_replica_that_is_stuck_on_a_gpu_is_not_waited_for():
    release = threading.Event()

    def forward(net, input):
        if input.device.index:
            release.wait()
        return net.bn(input)

    parallel = DataParallelWithCallback(convert_model(Net(forward, bn=nn.BatchNorm1d(3)).cuda()), [0, 1], timeout=0.5)
    with pytest.raises(TimeoutError, match="replica 1 on device cuda:1, which is still running"):
        parallel(torch.randn(4, 3, device="cuda"))
    release.set()


def test_vectors_of_counts_are_kept_unless_they_are_many_or_a_graph_captures_them(monkeypatch):
    monkeypatch.setattr(cuda, "_count_vectors", {})
    counts = functools.partial(cuda._count_vector, torch.device("cuda", 0), dtype=torch.float32)
    assert [counts((number,)).tolist() for number in range(1100)] == [[number] for number in range(1100)]
    assert len(cuda._count_vectors) < 1025
    assert counts((3, 4)) is counts((3, 4))
    with FakeTensorMode():
        counts((7, 8))
    assert type(counts((7, 8))) is torch.Tensor
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert counts((5, 6)) is not counts((5, 6))


def test_threads_of_replicas_stay_for_the_next_pass_unless_it_fails_and_keep_nothing(monkeypatch):
    monkeypatch.setattr("sync_batchnorm.wrapper.parallel_apply._idle", {})
    threads, inputs = [], []

    def forward(net, input):
        threads.append(threading.current_thread())
        inputs.append(weakref.ref(input))
        if net.fails and len(input) == 1:  # the last of unequal chunks
            raise LookupError("as told")
        return net.bn(input)

    parallel = DataParallelWithCallback(convert_model(Net(forward, bn=nn.BatchNorm1d(3)).cuda()), [0, 0, 0])
    for fails in (False, False, True, False, False):
        parallel.module.fails = fails
        with pytest.raises(LookupError) if fails else contextlib.nullcontext():
            parallel(torch.randn(5, 3, device="cuda"))
    first, second, failed, third, fourth = [set(threads[i : i + 3]) for i in range(0, 15, 3)]
    assert first == second == failed
    assert third == fourth
    assert len(first | third) == 6
    assert not any(reference() is not None for reference in inputs)


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


LEFT_ON = {
    "nothing": lambda: None,
    "autocast": lambda: torch.set_autocast_enabled("cuda", True),
    "autocast of the CPU": lambda: torch.set_autocast_enabled("cpu", True),
    "type of autocast": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "cache of autocast": lambda: torch.set_autocast_cache_enabled(False),
    "default device": lambda: torch.set_default_device("meta"),
    "function mode": lambda: FunctionMode().__enter__(),
    "dispatch mode": lambda: Operators().__enter__(),
    "hooks on saved tensors": lambda: torch.autograd.graph.save_on_cpu().__enter__(),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.fixture
def _number_of_threads():
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@pytest.mark.usefixtures("_number_of_threads")
@pytest.mark.parametrize("left", LEFT_ON)
@needs_two_gpus
def test_thread_in_which_forward_leaves_something_on_serves_no_other_replica(left, monkeypatch):
    monkeypatch.setattr("sync_batchnorm.wrapper.parallel_apply._idle", {})
    threads = []

    def note(net, input):
        threads.append(threading.current_thread())
        output = net.bn(input)
        LEFT_ON[net.left]()
        return output

    for net in (Net(note, bn=nn.BatchNorm1d(3), left=left) for left in (left, "nothing")):
        DataParallelWithCallback(convert_model(net.cuda()), [0, 1])(torch.randn(4, 3, device="cuda"))
    assert (set(threads[:2]) == set(threads[2:])) is (left == "nothing")


@pytest.mark.usefixtures("_number_of_threads")
@needs_two_gpus
def test_replicas_use_as_many_threads_of_torch_as_their_caller():
    numbers = []
    net = Net(lambda net, input: (numbers.append(torch.get_num_threads()), net.bn(input))[1], bn=nn.BatchNorm1d(3))
    parallel = DataParallelWithCallback(convert_model(net.cuda()), [0, 1])
    for number in (1, 2, 1):
        torch.set_num_threads(number)
        parallel(torch.randn(4, 3, device="cuda"))
    assert numbers == [1, 1, 2, 2, 1, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("when", ["idle", "before it is idle"])
@needs_two_gpus
def test_pass_after_threads_were_ended_from_outside_is_right(when, monkeypatch):
    monkeypatch.setattr("sync_batchnorm.wrapper.parallel_apply._idle", idle := {})
    plain, parallel = twins(nn.BatchNorm1d(3).double(), [0, 1])
    assert_same_step(plain, parallel, doubles(5, 3, devices=[0]))
    for thread, works in itertools.chain(*idle.values()):
        end_from_outside(thread)
        if when == "before it is idle":
            works.put(None)
            thread.join()
    assert_same_step(plain, parallel, doubles(5, 3, devices=[0]))
