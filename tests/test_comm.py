"""`SyncMaster` and `SlavePipe` alone: who gets what, in which order, and what can be used again."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest

from sync_batchnorm import ReplicaSyncError, SlavePipe, SyncMaster
from sync_batchnorm.comm import joining
from sync_batchnorm.coordinator import Coordinator


def everything(messages):
    return [(identifier, (identifier, messages)) for identifier, _ in messages]


def together(*bodies):
    """Run each body in a thread and return their results, or the errors that they raised."""
    outcomes = [None] * len(bodies)

    def run(i):
        try:
            outcomes[i] = bodies[i]()
        except Exception as error:
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


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


def test_master_alone_meets_nobody():
    master = SyncMaster(everything)
    assert master.nr_slaves == 0
    assert master.run_master("own") == (0, [(0, "own")])


def test_result_of_none_is_delivered():
    master = SyncMaster(lambda messages: [(identifier, None) for identifier, _ in messages])
    slave = master.register_slave(1)
    assert together(lambda: slave.run_slave(1), lambda: master.run_master(0)) == [None, None]


@pytest.mark.parametrize("identifier", [0, 1])
def test_identifier_that_is_taken_is_refused(identifier):
    master = SyncMaster(everything)
    master.register_slave(1)
    with pytest.raises(ValueError, match=rf"yet, but got {identifier} twice \(a SyncMaster of its own\)"):
        master.register_slave(identifier)


@pytest.mark.parametrize("used", ["master", "slave"])
def test_registering_after_use_begins_anew(used):
    master = SyncMaster(everything)
    old = master.register_slave(1)
    if used == "master":
        together(lambda: old.run_slave("old"), lambda: master.run_master("old"))
    else:
        old._coordinator.timeout = 0.01
        with pytest.raises(TimeoutError):
            old.run_slave("old")
    slave = master.register_slave(1)
    assert master.nr_slaves == 1
    assert together(lambda: slave.run_slave("new"), lambda: master.run_master("own"))[1] == (
        0,
        [(0, "own"), (1, "new")],
    )


def test_reduction_that_fails_is_raised_by_the_master_and_releases_the_slaves():
    def fails(messages):
        raise ArithmeticError("the reduction")

    master = SyncMaster(fails)
    slaves = [master.register_slave(i) for i in (1, 2)]
    *released, raised = together(*[lambda s=s: s.run_slave(0) for s in slaves], lambda: master.run_master(0))
    assert isinstance(raised, ArithmeticError)
    assert all(isinstance(error, ReplicaSyncError) for error in released)
    assert all("got ArithmeticError in replica 0; fix that error" in str(error) for error in released)


@pytest.mark.parametrize("results", [[], [(0, 1)], [(0, 1), (1, 1), (2, 1)]])
def test_reduction_that_does_not_answer_everybody_is_refused(results):
    master = SyncMaster(lambda messages: results)
    slave = master.register_slave(1)
    released, raised = together(lambda: slave.run_slave(0), lambda: master.run_master(0))
    text = f"to return one result for each of [0, 1], but got results for {[key for key, _ in results]} (a SyncMaster"
    assert type(raised) is RuntimeError
    assert text in str(raised)
    assert isinstance(released, ReplicaSyncError)


def test_broken_exchange_stays_broken():
    master = SyncMaster(everything)
    slave = master.register_slave(1)
    slave._coordinator.abort(OSError())
    for _ in range(2):
        with pytest.raises(ReplicaSyncError, match="got OSError in its thread; this replica was only released"):
            slave.run_slave(0)
        with pytest.raises(ReplicaSyncError, match="got OSError in its thread"):
            master.run_master(0)


def test_names_of_a_forward_are_taken_where_it_is_made():
    coordinator = Coordinator(["cpu", "cpu"], timeout=0.01)
    with joining(coordinator, 0, "layer"):
        master = SyncMaster(everything)
    with joining(coordinator, 1, "layer"):
        slave = master.register_slave(1)
    assert repr(master) == "SyncMaster(layer, 1 slaves)"
    assert repr(slave) == "SlavePipe(1, layer)"
    with pytest.raises(TimeoutError, match=r"replica 1 on device cpu waits for replica 0 on .*\(layer, call 1\)"):
        slave.run_slave(0)


def test_names_of_a_forward_end_with_it():
    with joining(Coordinator(), 0, "layer"):
        pass
    assert repr(SyncMaster(everything)) == "SyncMaster(a SyncMaster of its own, 0 slaves)"


def test_registering_after_use_begins_anew_in_the_same_forward_too():
    coordinator = Coordinator(["cpu", "cpu"])
    with joining(coordinator, 0, "layer"):
        master = SyncMaster(everything)
    for _ in range(2):
        with joining(coordinator, 1, "layer"):
            slave = master.register_slave(1)
        together(lambda slave=slave: slave.run_slave("slave"), lambda: master.run_master("own"))
    assert repr(master) == "SyncMaster(layer, 1 slaves)"


def test_master_kept_from_forward_to_forward_takes_the_slaves_of_each():
    master = SyncMaster(everything)  # made in the constructor of a module
    for number in (4, 2, 3):
        coordinator = Coordinator(["cpu"] * number)
        slaves = []
        for replica in range(1, number):
            with joining(coordinator, replica, "layer"):
                slaves.append(master.register_slave(replica))
        results = together(lambda: master.run_master(0), *[lambda s=s: s.run_slave(s.identifier) for s in slaves])
        assert [identifier for identifier, _ in results] == list(range(number))
        assert all(messages == [(i, i) for i in range(number)] for _, messages in results)


def test_pickled_master_keeps_its_callback_only():
    master = SyncMaster(everything)
    master.register_slave(1)
    for twin in (pickle.loads(pickle.dumps(master)), copy.deepcopy(master)):
        assert twin.nr_slaves == 0
        assert twin.run_master("own") == (0, [(0, "own")])


def test_pickled_pipe_is_none():
    pipe = SyncMaster(everything).register_slave(1)
    assert isinstance(pipe, SlavePipe)
    assert pickle.loads(pickle.dumps(pipe)) is None
    assert copy.deepcopy({"pipe": pipe}) == {"pipe": None}


def test_messages_of_a_completed_call_are_not_kept():
    master = SyncMaster(everything)
    slave = master.register_slave(1)
    together(lambda: [slave.run_slave(i) for i in range(3)], lambda: [master.run_master(i) for i in range(3)])
    assert master._sync_group.exchanges == {}
