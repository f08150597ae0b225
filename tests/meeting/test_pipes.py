"""`SyncMaster` and `SlavePipe` alone: who gets what, in which order, and what can be used again."""

import copy
import gc
import pickle
import weakref

import pytest
from helpers import together
from scripted import WRAPPERS
from torch import nn, stack, tensor

from sync_batchnorm import DataParallelWithCallback, ReplicaSyncError, SlavePipe, SyncMaster


def everything(messages):
    return [(identifier, (identifier, messages)) for identifier, _ in messages]


@pytest.mark.smoke
def test_each_gets_its_own_result_and_the_master_sees_all_in_order_of_registration():
    master = SyncMaster(everything)
    slaves = [master.register_slave(identifier) for identifier in ("b", "a")]
    results = together(*[lambda s=s: s.run_slave(s.identifier * 2) for s in slaves], lambda: master.run_master("own"))
    messages = [(0, "own"), ("b", "bb"), ("a", "aa")]
    assert results == [("b", messages), ("a", messages), (0, messages)]


def test_calls_are_matched_by_their_number():
    master = SyncMaster(everything)
    slave = master.register_slave(1)
    results = together(
        lambda: [slave.run_slave(i) for i in range(200)], lambda: [master.run_master(-i) for i in range(200)]
    )
    assert [messages for _, messages in results[0]] == [[(0, -i), (1, i)] for i in range(200)]


def test_master_alone_exchanges_with_nobody_even_after_a_failure():
    def merge(messages):
        if messages[0][1] is None:
            raise ArithmeticError
        return everything(messages)

    master = SyncMaster(merge)
    assert master.nr_slaves == 0
    with pytest.raises(ArithmeticError):
        master.run_master(None)
    assert master.run_master("own") == (0, [(0, "own")])


@pytest.mark.parametrize("identifier", [0, 1])
def test_identifier_that_is_taken_is_refused(identifier):
    master = SyncMaster(everything)
    master.register_slave(1)
    with pytest.raises(ValueError, match=rf"yet, but got {identifier} twice \(a SyncMaster of its own\)"):
        master.register_slave(identifier)


def exchange(slave, master):
    return together(lambda: slave.run_slave("new"), lambda: master.run_master("own"))[1]


@pytest.mark.parametrize("used", ["both", "slave"])
def test_registering_after_use_begins_again(used):
    master = SyncMaster(everything)
    old = master.register_slave(1)
    if used == "both":
        exchange(old, master)
    else:  # The master never comes.
        errors = together(lambda: old.run_slave("old"), lambda: old.run_slave("old"))
        assert [type(error) for error in errors] == [ReplicaSyncError] * 2
    slave = master.register_slave(1)
    assert master.nr_slaves == 1
    assert exchange(slave, master) == (0, [(0, "own"), (1, "new")])


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_merge_that_fails_or_is_interrupted_is_raised_by_the_master_and_releases_the_slaves(error):
    def fails(messages):
        raise error("the merge")

    master = SyncMaster(fails)
    slaves = [master.register_slave(i) for i in (1, 2)]

    def run_master():
        with pytest.raises(error, match="the merge"):
            master.run_master(0)

    released = together(*[lambda s=s: s.run_slave(0) for s in slaves], run_master)[:2]
    released += together(*[lambda end=end: end.run(0) for end in (master, *slaves)])  # which stay broken
    assert [type(other) for other in released] == [ReplicaSyncError] * 5
    assert all(f"got {error.__name__} in replica 0; fix that error" in str(other) for other in released)


@pytest.mark.parametrize("results", [[], [(0, 1)], [(0, 1), (1, 1), (2, 1)], [(0, 1), (2, 1)]])
def test_merge_that_does_not_answer_everybody_is_refused(results):
    master = SyncMaster(lambda messages: results)
    slave = master.register_slave(1)
    released, raised = together(lambda: slave.run_slave(0), lambda: master.run_master(0))
    assert type(raised) is RuntimeError
    assert f"each of [0, 1], but got results for {[key for key, _ in results]} (a SyncMaster" in str(raised)
    assert isinstance(released, ReplicaSyncError)


def test_pickled_master_keeps_its_callback_only_and_a_pickled_pipe_is_none():
    master = SyncMaster(everything)
    pipe = master.register_slave(1)
    for twin in (pickle.loads(pickle.dumps(master)), copy.deepcopy(master)):
        assert twin.nr_slaves == 0
        assert twin.run_master("own") == (0, [(0, "own")])
    assert isinstance(pipe, SlavePipe)
    assert pickle.loads(pickle.dumps(pipe)) is None
    assert copy.deepcopy({"pipe": pipe}) == {"pipe": None}


def mean_of_all(messages):
    return [(identifier, stack([message for _, message in messages]).mean()) for identifier, _ in messages]


class KeepsMasters(nn.Module):
    """Keeps a `SyncMaster` for each group of copies, as modules do that were written for other libraries."""

    def __init__(self, group_size):
        super().__init__()
        self.group_size = group_size
        self.masters = [SyncMaster(mean_of_all) for _ in range(4)]
        self.pipe = None

    def __data_parallel_replicate__(self, ctx, copy_id):
        group, place = divmod(copy_id, self.group_size)
        if place == 0 or self.group_size == 2:  # The others may put it there again.
            setattr(ctx, f"master_{group}", self.masters[group])
        self.pipe = getattr(ctx, f"master_{group}")
        if place:
            self.pipe = self.pipe.register_slave(copy_id)

    def forward(self, x):
        return x * 0 + (self.pipe or self.masters[0]).run(x.mean())


def assert_groups_get_their_means(parallel, number, group_size):
    x = tensor([[1.0], [10.0], [100.0], [1000.0]])[:number]
    expected = [x[i // group_size * group_size :][:group_size].mean() for i in range(number)]
    assert parallel(x).flatten().tolist() == pytest.approx([float(mean) for mean in expected])


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_kept_master_serves_every_number_of_chunks(name):
    parallel = WRAPPERS[name](KeepsMasters(4))
    for number in (2, 1, 3, 1, 1, 2, 3):
        assert_groups_get_their_means(parallel, number, 4)


def test_kept_masters_of_two_groups_serve_every_forward():
    parallel = DataParallelWithCallback(KeepsMasters(2), ["cpu"] * 4)
    for number in (4, 4, 3, 1, 2, 4) * 5:
        assert_groups_get_their_means(parallel, number, 2)


def test_kept_master_that_is_not_put_into_the_context_is_refused():
    class Forgets(KeepsMasters):
        def __data_parallel_replicate__(self, ctx, copy_id):
            if copy_id:
                self.pipe = self.masters[0].register_slave(copy_id)

    parallel = DataParallelWithCallback(Forgets(2), ["cpu"] * 2)
    text = r"but got one of another \(Forgets, replica 1\); put it into the context in the callback of its replica"
    with pytest.raises(RuntimeError, match=text):
        parallel(tensor([[1.0], [10.0]]))


def test_kept_master_does_not_keep_the_messages_of_a_forward_that_failed():
    class Message:
        pass

    class Fails(KeepsMasters):
        def forward(self, x):
            if x > 1:
                raise LookupError
            message = Message()
            sent.append(weakref.ref(message))
            return self.pipe.run(message)

    sent, parallel = [], DataParallelWithCallback(Fails(4), ["cpu"] * 3)
    with pytest.raises(LookupError):
        parallel(tensor([[0.0], [1.0], [10.0]]))
    gc.collect()
    assert [reference() for reference in sent] == [None, None]


def test_kept_master_that_no_replica_has_called_serves_the_user_after_the_forward():
    class Idle(KeepsMasters):
        def forward(self, x):
            return x

    keeps = Idle(2)
    DataParallelWithCallback(keeps, ["cpu"] * 2)(tensor([[1.0], [10.0]]))
    slave = keeps.masters[0].register_slave(1)
    assert together(lambda: slave.run(tensor(1.0)), lambda: keeps.masters[0].run(tensor(3.0))) == [2.0, 2.0]
