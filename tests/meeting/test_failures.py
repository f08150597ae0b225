"""Nothing hangs, every failure says who and why, and after it the next forward is right: each kind of failure."""

import copy
import dataclasses
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from conftest import first_in_smoke, slow
from helpers import Net, WithPipe, assert_equal, end_from_outside
from scripted import (
    WRAPPERS,
    OneThread,
    OwnForward,
    R,
    Scripted,
    TorchStyle,
    assert_next_forward_is_right,
    batch,
    raising,
    scripted,
)
from torch import Tensor, nn

from sync_batchnorm import (
    DataParallelWithCallback,
    ReplicaSyncError,
    SynchronizedBatchNorm,
    SyncMaster,
    patch_replication_callback,
)


def assert_is_of_replica(
    error: BaseException, kind: type[BaseException], replica: int, parallel: nn.DataParallel
) -> None:
    """Check that an error has reached the caller as itself; a wrapper that starts its threads itself adds no note."""
    assert type(error) is kind
    assert str(error) == "the cause"
    if not isinstance(parallel, OwnForward):
        assert error.__notes__[-1].startswith(f"Caught {kind.__name__} in replica {replica} on device cpu.\n")
        assert error.__notes__[-1].endswith(": the cause")


COMPLETED = {"before": (0, 0), "between": (1, 0), "after": (1, 1)}


@pytest.mark.parametrize("place", first_in_smoke(COMPLETED))
@pytest.mark.parametrize("replica", [0, 1, *slow(2)])
def test_exception_of_a_replica_reaches_the_caller_as_itself(wrap, replica, place):
    parallel = wrap(scripted((replica, place, raising(LookupError("the cause")))))
    with pytest.raises((LookupError, ReplicaSyncError)) as caught:
        parallel(*batch())
    if isinstance(parallel, OwnForward) and isinstance(caught.value, ReplicaSyncError):
        assert f"but got LookupError in replica {replica} on device cpu; fix that error" in str(caught.value)
    else:
        assert_is_of_replica(caught.value, LookupError, replica, parallel)
    assert_next_forward_is_right(parallel, COMPLETED[place])


class Unprintable(SyntaxError):
    """Python cannot format its traceback."""

    lineno = property(lambda self: {}["no line"])


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Has two arguments and no message, and refuses attributes and notes."""

    code: int
    reason: str


class WithText(Exception):
    """Has one note, and that not in a list, so that nothing adds another."""

    def __init__(self) -> None:
        super().__init__("the cause")
        self.__notes__ = "of the user"


def _of_user() -> ValueError:
    error = ValueError("the cause")
    error.batch = 7
    error.__cause__ = LookupError("what caused it")
    error.__cause__.__cause__ = error
    error.add_note("of the user")
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "attributes": _of_user,
    "arguments": lambda: Frozen(3, "the cause"),
    "unprintable": lambda: Unprintable("the cause"),
    "group": lambda: ExceptionGroup("the cause", [ValueError("one"), OSError("two")]),
    "exit": lambda: SystemExit(3),
}


@pytest.mark.parametrize("everywhere", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("name", list(ERRORS))
def test_exception_of_a_replica_is_the_object_that_the_caller_gets(name, everywhere):
    def fail(model: Scripted, x: Tensor) -> None:
        raise error

    error = ERRORS[name]()
    before = copy.copy(vars(error)), error.args, error.__cause__
    parallel = WRAPPERS["wrapper"](scripted(*[(i, "between", fail) for i in (range(R) if everywhere else [1])]))
    for _ in range(3):  # The notes of one object do not pile up.
        with pytest.raises(type(error)) as caught:
            parallel(*batch())
        assert caught.value is error
        *notes, note = error.__notes__
        after = {name: value for name, value in vars(error).items() if name != "__notes__"}
        assert (after | ({"__notes__": notes} if notes else {}), error.args, error.__cause__) == before
        assert note.startswith(f"Caught {type(error).__name__} in replica {0 if everywhere else 1} on device cpu.\n")
        assert "in fail\n" in note
        assert ("what caused it" in note) == (name == "attributes")
    assert_next_forward_is_right(parallel, (3, 0))


@pytest.mark.parametrize("name", [*ERRORS, "text"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_exception_of_a_master_callback_is_the_object_that_the_caller_gets(name, wrapped):
    def callback(messages: Any) -> Any:
        raise error

    error = WithText() if name == "text" else ERRORS[name]()
    exchanging = WithPipe(lambda net, x: net.pipe.run(x), callback=callback)
    with pytest.raises(type(error)) as caught:
        WRAPPERS["wrapper"](exchanging)(torch.zeros(R)) if wrapped else SyncMaster(callback).run_master(1)
    assert caught.value is error
    if name == "text":  # It gets no notes, and so it keeps its frames.
        assert error.__notes__ == "of the user"
        assert traceback.extract_tb(error.__traceback__)[-1].name == "callback"
        return
    notes = [note.partition("\n")[0] for note in getattr(error, "__notes__", ())]
    if name == "attributes":
        assert notes.pop(0) == "of the user"
    if name not in ("exit", "arguments"):  # which is no failure of the exchange, and which refuses notes
        where = "WithPipe" if wrapped else "a SyncMaster of its own"
        assert notes.pop(0) == f"Raised in the exchange of {where}, call 1."
    assert notes == [f"Caught {type(error).__name__} in replica 0 on device cpu."] * wrapped


def test_exception_of_a_replica_holds_no_frames_of_it_nor_do_its_causes():
    def fail(model: Scripted, x: Tensor) -> None:
        activation = x * 2
        activations.append(weakref.ref(activation))
        with suppress(ValueError):
            raise member
        try:
            raise context
        except LookupError:
            raise ExceptionGroup("the group", [member]) from OSError()

    activations: list[Any] = []
    member, context = ValueError("raised in the replica"), LookupError("raised there, too")
    with pytest.raises(ExceptionGroup) as caught:
        WRAPPERS["wrapper"](scripted((1, "between", fail)))(*batch())
    assert [activation() for activation in activations] == [None]
    shown = "".join(traceback.format_exception(caught.value))
    assert "raise ExceptionGroup" in shown
    assert member.__traceback__ is context.__traceback__ is None


def test_exception_that_crosses_two_wrappers_shows_the_lines_of_both():
    def outer(model: Scripted, x: Tensor) -> None:
        inner(*batch())

    inner = WRAPPERS["wrapper"](scripted((0, "between", raising(ValueError("the cause")))))
    inner.module.eval()
    with pytest.raises(ValueError, match="the cause") as caught:
        WRAPPERS["wrapper"](scripted((0, "between", outer)))(*batch())
    (note,) = caught.value.__notes__
    assert note.index("in outer\n") < note.index("in step\n")


def test_exception_raised_while_being_released_gives_way_to_the_original(wrap):
    def cleans_up_badly(model: Scripted, x: Tensor) -> None:
        try:
            model.stem(x)
        finally:
            {}["not there"]

    parallel = wrap(scripted((0, "before", cleans_up_badly), (2, "before", raising(ArithmeticError("the cause")))))
    with pytest.raises((ArithmeticError, KeyError)) as caught:
        parallel(*batch())
    if isinstance(parallel, OwnForward):  # It raises the error of the lowest replica.
        assert type(caught.value) is KeyError
    else:
        assert_is_of_replica(caught.value, ArithmeticError, 2, parallel)
    assert_next_forward_is_right(parallel, (0, 0))


@pytest.mark.parametrize("place", list(COMPLETED))
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("name", ["wrapper", "patched", "own-parallel_apply"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of threads of the user's own
def test_exception_that_is_no_exception_reaches_the_caller(name, error, place):
    parallel = WRAPPERS[name](scripted((1, place, raising(error))))
    with pytest.raises(type(error)):
        parallel(*batch())
    assert_next_forward_is_right(parallel, COMPLETED[place])


WHO = r"replica \d on device cpu"
LEFT = (
    rf"call {{layer}} the same number of times, but replica {{who}} on device cpu left its forward while {WHO}( and "
    rf"{WHO})* waits? for it \({{layer}}, call {{call}}\); make every replica call every .* in every forward pass"
)
LOOP = "; if it is called for each sample, pass group_size=1 to convert_model, or call it once for all: another model"
DIVERGED = rf"same layer, but got (?=.*replica {{who}} on device cpu in {{one}}).*{WHO} in {{other}}.*in the same order"
SWAPPED = DIVERGED.format(one="head, call 1", other=r"stem\.0, call 1", who="{who}")
AGAIN = DIVERGED.format(one=r"stem\.0, call 2", other="head, call 1", who="{who}") + LOOP


def repeats(model: Scripted, x: Tensor) -> None:
    model.stem(x)


DIVERGENCES = {  # where, what a replica does there, what is said, and the calls that complete
    "leaves-before": ("before", lambda model, x: x, LEFT.format(layer=r"stem\.0", who="{who}", call=1), (0, 0)),
    "leaves-between": ("between", lambda model, x: x, LEFT.format(layer="head", who="{who}", call=1), (1, 0)),
    "skips": ("before", lambda model, x: model.head(x), SWAPPED, (0, 0)),
    "swaps": ("before", lambda model, x: (model.head(x), model.stem(x))[1], SWAPPED, (0, 0)),
    "repeats": ("between", repeats, AGAIN, (1, 0)),
    "repeats-last": ("after", repeats, LEFT.format(layer=r"stem\.0", who="[0-2]", call=2) + LOOP, (1, 1)),
}


@pytest.mark.parametrize("replica", [0, 1, *slow(2)])
@pytest.mark.parametrize("what", first_in_smoke(DIVERGENCES))
def test_replicas_that_diverge_are_named_with_their_layers(wrap, what, replica):
    place, step, text, calls = DIVERGENCES[what]
    parallel = wrap(scripted((replica, place, step)))
    with pytest.raises(ReplicaSyncError, match=text.replace("{who}", str(replica)) + "$") as caught:
        parallel(*batch())
    assert not isinstance(caught.value, TimeoutError)
    assert_next_forward_is_right(parallel, calls)


def disagreeing(net, x: Tensor, replica: Tensor) -> Tensor:
    """Changes a layer without parameters, or its input, in the last replica."""
    return net.bn(net.change(net.bn, x) if int(replica[0]) == R - 1 else x)


DISAGREEMENTS = {
    "channels": (lambda bn, x: x[:, :3], r"\(2, 3\) of torch.float64 \(eps=1e-05\)"),
    "dimensions": (lambda bn, x: x[..., None], r"\(2, 4, 1\) of torch.float64 \(eps=1e-05\)"),
    "dtype": (lambda bn, x: x.float(), r"\(2, 4\) of torch.float32 \(eps=1e-05\)"),
    "eps": (lambda bn, x: (setattr(bn, "eps", 0.5), x)[1], r"\(eps=0.5\)"),
    "eps_mode": (lambda bn, x: (setattr(bn, "eps_mode", "clamp"), x)[1], r"\(eps=1e-05, clamp\)"),
}


@pytest.mark.smoke
@pytest.mark.parametrize(("change", "odd"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_replicas_that_disagree_are_told_what_they_have(wrap, change, odd):
    bn = SynchronizedBatchNorm(4, affine=False, track_running_stats=False)
    parallel = wrap(Net(disagreeing, bn=bn, change=change))
    text = (
        rf"(?s)same dtype.*got \(2, 4\) of torch.float64 \(eps=1e-05\) on cpu in replica 0.*{odd} on cpu in replica 2"
    )
    with pytest.raises(ValueError, match=text) as caught:
        parallel(*batch())
    shown = "".join([str(caught.value), *caught.value.__notes__])  # The text may hold that of a replica.
    assert shown.count("Raised in the exchange of bn, call 1.") == 1
    parallel.module.change = lambda bn, x: x
    x, replica = batch()
    assert_equal(parallel(x, replica), parallel.module(x, replica), "output of the next forward")


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["wrapper", *slow("patched")])
def test_replica_that_is_stuck_is_named_with_its_stack_and_not_waited_for(name):
    release = threading.Event()

    def is_stuck(model: Scripted, x: Tensor) -> None:
        release.wait()

    parallel = WRAPPERS[name](scripted((1, "between", is_stuck)), timeout=2.0)  # Threads may take a second to start.
    text = (
        rf"expected all replicas within 2 seconds, but {WHO}( and {WHO})? waits? for replica 1 on device cpu, which "
        r"is still running( and .*)? \(head, call 1\); pass a longer timeout= if it is only slow$"
    )
    with pytest.raises(TimeoutError, match=text) as caught:
        parallel(*batch())
    assert isinstance(caught.value, ReplicaSyncError)
    stack, _ = caught.value.__notes__
    assert stack.startswith("Stack of replica 1 on device cpu at the timeout:\n")
    assert "in is_stuck\n    release.wait()\n" in stack
    assert_next_forward_is_right(parallel, (1, 0))
    release.set()


def test_replicas_that_run_one_after_another_are_told_to_use_threads():
    parallel = patch_replication_callback(OneThread(scripted(), R), timeout=0.1)
    text = r"replica 2 .*, which has not started \(stem\.0, call 1\); .*, and run each replica in its own thread"
    with pytest.raises(TimeoutError, match=text):
        parallel(*batch())


@pytest.mark.parametrize("base", [DataParallelWithCallback, TorchStyle])
def test_replicas_that_are_called_again_are_refused(base):
    class Twice(base):
        def parallel_apply(self, *args: Any) -> list[Any]:
            super().parallel_apply(*args)
            return super().parallel_apply(*args)

    parallel = patch_replication_callback(Twice(scripted(), R if base is TorchStyle else ["cpu"] * R))
    text = r"expected each replica to run once, but replica \d on device cpu was called twice; call replicate again for"
    with pytest.raises(RuntimeError, match=text):
        parallel(*batch())


def test_layer_that_is_called_after_its_forward_is_refused():
    parallel = WRAPPERS["wrapper"](scripted())
    replicas: list[Scripted] = []
    parallel.module.steps = {(i, "before"): lambda model, x: replicas.append(model) for i in range(R)}
    inputs = batch()
    parallel(*inputs)
    for replica in replicas:
        with pytest.raises(ReplicaSyncError, match=r"replica \d on device cpu left its forward while replica"):
            replica.head(inputs[0][:2])
    assert_next_forward_is_right(parallel, (1, 1))


def test_exit_of_the_only_replica_names_it_and_holds_no_frames():
    parallel = DataParallelWithCallback(Net(lambda net, x: raising(SystemExit(3))(net, x)), ["cpu"] * 2)
    with pytest.raises(SystemExit) as caught:
        parallel(torch.randn(1, 3))
    (note,) = caught.value.__notes__
    assert note.startswith("Caught SystemExit in replica 0 on device cpu.")
    assert "call_replicas" in note
    assert "call_replicas" not in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_error_of_a_thread_that_cannot_start_reaches_the_caller(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    parallel = WRAPPERS["wrapper"](scripted())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            parallel(*batch())
    assert_next_forward_is_right(parallel, (0, 0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_replica_that_has_not_begun_when_its_thread_ends_runs_in_another_one(monkeypatch):
    def start_and_end(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)  # The others stay as they are.
        work, run = threading.Event(), thread.run
        thread.run = lambda: work.wait() and run()
        start(thread)
        end_from_outside(thread)
        work.set()

    start = threading.Thread.start
    parallel = WRAPPERS["wrapper"](scripted())
    monkeypatch.setattr(threading.Thread, "start", start_and_end)
    assert_next_forward_is_right(parallel, (0, 0))
