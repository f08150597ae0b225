"""All state belongs to one forward: several wrappers, threads, wrappers in wrappers, batches of any size."""

import copy
import functools

import pytest
from helpers import Net, assert_equal, in_threads
from scripted import WRAPPERS, R, Scripted, assert_next_forward_is_right, batch, scripted
from torch import Tensor

from sync_batchnorm import ReplicaSyncError, SynchronizedBatchNorm1d


def test_replica_that_is_given_no_input_is_named_at_once():
    parallel = WRAPPERS["wrapper"](scripted())
    replicas = parallel.replicate(parallel.module, ["cpu"] * R)
    parts = list(zip(*(inputs.chunk(R) for inputs in batch()), strict=True))
    text = r"to call stem\.0 the same number of times, but replica 2 on device cpu was given no input while"
    with pytest.raises(ReplicaSyncError, match=text):
        parallel.parallel_apply(replicas[:2], parts[:2], [{}] * 2)


def recursive(net, x: Tensor, depth: int = 2) -> Tensor:
    """Calls itself, as some models do at test time to average over a flipped input."""
    return net.bn(x + net(x, depth - 1)) if depth else net.bn(x)


def test_module_that_calls_itself_has_left_only_at_the_end(wrap):
    module = Net(recursive, bn=SynchronizedBatchNorm1d(4)).double()
    x, _ = batch()
    expected = copy.deepcopy(module)(x)
    assert_equal(wrap(module)(x), expected, "output")


def test_one_wrapper_in_several_user_threads_is_right(wrap):
    model = scripted()
    model.stem[0].track_running_stats = model.head.track_running_stats = False  # who comes last is up to the threads
    parallel, plain = wrap(model), copy.deepcopy(model)
    inputs = [batch() for _ in range(4)]

    def train(i: int) -> None:
        for _ in range(5):
            assert_equal(parallel(*inputs[i]), expected[i], f"output of thread {i}")

    expected = [plain(*pair).detach() for pair in inputs]
    in_threads(*[functools.partial(train, i) for i in range(4)])


def test_layer_in_a_thread_of_the_replica_meets_the_others():
    def in_a_thread(model: Scripted, x: Tensor) -> Tensor:
        (output,) = in_threads(lambda: model.head(model.stem(x) * 2))
        return output

    parallel = WRAPPERS["wrapper"](scripted(*[(i, "before", in_a_thread) for i in range(R)]))
    assert_next_forward_is_right(parallel, (0, 0))
    parallel.module.steps = {(i, "before"): in_a_thread for i in range(R)}
    x, replica = batch()
    expected = copy.deepcopy(parallel.module).stem[0](x).detach()
    assert_equal(parallel(x, replica), copy.deepcopy(parallel.module).head(expected * 2), "output")
