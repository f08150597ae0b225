"""Run the replicas of a forward pass: each in its own thread, with the modes of the caller, and in turn on one device.

    caller's thread      apply ---> call_replicas: start threads, wait for their end ---> _failure ---> outputs or error
    replica's thread                  ReplicaRun.call: wait for a turn, enter modes, forward, report end to coordinator

The coordinator learns about the end of every replica, even if its thread never starts or is killed, because other
replicas may wait for this one.

NOTE [threads that stay]: The obvious way is a new thread for each replica. But torch keeps the plans of cuDNN by
thread, so each new thread plans each convolution again: a forward pass of ResNet-50 takes 51 ms in place of 6 ms (torch
2.11, H200; `docs/benchmarks/gpu`). So the thread of a replica on an accelerator stays, idle, for the next replica on
this device. A thread adopts `torch.get_num_threads()` when it begins, so it serves only callers with the same number.
It ends if its replica fails or changes a setting of the thread, such as grad mode: the next replica may be another
model's. On the CPU, torch keeps nothing by thread, and an idle thread would keep its OpenMP pool, so the thread ends
with its replica.

NOTE [signals]: The handler of a signal may raise an exception between any two lines of Python in the main thread. The
obvious calls, `Thread.start`, `Thread.join` and `Event.wait`, release locks in Python. An exception there becomes
"release unlocked lock", or the thread is lost. So the caller waits only in `SimpleQueue.get`, which is written in C. It
starts a helper thread with `_thread`, where no signal is handled, and the helper starts the `Thread` of the replica; it
is a `Thread`, as debuggers do not see others. The caller keeps only a weak reference to it: Python code of `threading`
runs where a `Thread` object is freed, and would lose the exception.
"""

from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import cache, partial
from os import getpid
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd import profiler

from ..backends.streams import current_stream
from ..current_replica import context_run, is_in_replica
from ..meeting import PATIENCE, Coordinator, ReplicaSyncError, strip_frames
from ..torch_private import count_dispatch_modes, count_function_modes, saved_tensors_hooks
from .lost_state import ParameterChanges
from .random_states import RandomStates

__all__: list[str] = []


def new_coordinator(devices: Sequence[torch.device], timeout: float) -> Coordinator:
    """Return the coordinator of a forward pass. It records profiler spans if a profiler is active."""

    def span(name: str) -> AbstractContextManager[Any]:
        return profiler.record_function(f"sync_batchnorm: {name}")

    return Coordinator(list(map(str, devices)), timeout, span if profiler._is_profiler_enabled else None)


@dataclass
class ForwardPass:
    """The state shared by all replicas of one forward pass."""

    original: nn.Module  # the wrapped module
    coordinator: Coordinator
    check_turns: Callable[[], None] = lambda: None  # raises an error if replicas cannot take turns
    modes: Sequence[Callable[[torch.device], AbstractContextManager[Any]]] = ()  # the caller's; argument: the device
    context: Context | None = None  # the caller's; None if a single replica runs in the caller's thread
    random_states: RandomStates | None = None  # if replicas take turns

    def prepare(self, replicas: Sequence[nn.Module], devices: Sequence[torch.device]) -> list["ReplicaRun"]:
        """Return a run for each replica, with the modes of this thread."""
        runs = [ReplicaRun(replica, self, i, devices[i]) for i, replica in enumerate(replicas)]
        self._save_modes(runs)  # Users may call the replicas without `parallel_apply`.
        return runs

    def apply(
        self, function: Callable[[], list[Any]], runs: Sequence["ReplicaRun"], describe: Callable[[], str]
    ) -> list[Any]:
        """Call `function`, which calls the replicas, and return its outputs; raise the error of a failed replica.

        `describe` returns a text for the note of this error.
        """
        self._save_modes(runs)
        if len(runs) == 1:
            self.context = None  # A single replica runs in this thread.
        self.coordinator.expect([run.number for run in runs])
        outputs: list[Any] = []
        raised: BaseException | None = None
        try:
            outputs = function()
        except BaseException as error:
            raised = error
        failure = self._failure(raised, describe)
        _prepared.set(())  # If a replica is stuck, `prepared_runs` would give its pass to the next call.
        if failure is not None:
            try:
                raise failure
            finally:
                del raised, failure  # Their tracebacks refer to this frame: a cycle.
        return outputs

    def _save_modes(self, runs: Sequence["ReplicaRun"]) -> None:
        """Save the modes and the context of this thread, the caller's, for the threads of the runs."""
        is_inference, records = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        modes: list[Any] = [lambda _: torch.inference_mode() if is_inference else torch.set_grad_enabled(records)]
        for kind in _autocast_device_types():
            if torch.is_autocast_enabled(kind):
                dtype, cache = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
                autocast = partial(torch.autocast, kind, dtype=dtype, cache_enabled=cache)
                modes.append(lambda _, autocast=autocast: autocast())
        default = torch.get_default_device()
        if default.type != "cpu":  # A default device of the replica's type becomes the replica's device.
            modes.append(lambda device: device if device.type == default.type else default)
        self.modes, self.context = modes, copy_context()
        _prepared.set(list(map(ref, runs)))

    def _failure(self, raised: BaseException | None, describe: Callable[[], str]) -> BaseException | None:
        """End this forward pass, and return the error to raise, or None.

        `raised` is the exception of the caller's thread, or None. The error of a replica takes precedence, as
        `raised` may be a consequence, such as an error about a missing output. An interrupt in the caller's thread,
        such as Ctrl-C, goes before both.
        """
        # First: the abort below makes other replicas fail, too.
        who, error = self.coordinator.take_failure() or ("", raised)
        if raised is not None:
            # Replicas that still run would draw random numbers, and write into buffers.
            self.coordinator.abort(raised, PATIENCE)
            if self.random_states is not None:
                self.random_states.restore_caller(completed=False)
        is_interrupt = raised is not None and raised is not error and not isinstance(raised, Exception)
        if error is None or not who or is_interrupt:
            return raised
        if is_in_replica():
            return error  # The outer wrapper adds the note, with the frames of both.
        is_from_user = isinstance(error, Exception) and not isinstance(error, ReplicaSyncError)
        return strip_frames(error, who, describe() if is_from_user else "")


@cache
def _autocast_device_types() -> Sequence[str]:
    """Return the types of devices with an autocast mode of their own."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class ReplicaRun:
    """The run of one replica. The coordinator learns how it ends, even if its thread swallows the error."""

    def __init__(self, replica: nn.Module, forward_pass: ForwardPass, number: int, device: torch.device) -> None:
        self.replica, self.forward_pass, self.number, self.device = replica, forward_pass, number, device
        self.stream: torch.cuda.Stream | None = None  # the caller's; None: the current stream of its thread

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `function`, the replica or a user's function around it, as this run: once, with the caller's modes."""
        if self.forward_pass.coordinator.runs_here(self.number):
            return function(*args, **kwargs)
        context = self.forward_pass.context
        if context is None:
            return self._begin(function, args, kwargs)
        return context.copy().run(self._begin, function, args, kwargs)  # A context runs in one thread only.

    def _begin(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        coordinator, number = self.forward_pass.coordinator, self.number
        _prepared.set(())
        token = context_run.set(ref(self))
        try:
            with coordinator.begin(number), ExitStack() as stack:
                if self.stream is not None:
                    stack.enter_context(torch.cuda.stream(self.stream))
                for mode in self.forward_pass.modes:
                    stack.enter_context(mode(self.device))
                try:
                    output = function(*args, **kwargs)
                except StopIteration as error:  # It would end a loop in the caller without an error, see PEP 479.
                    raise RuntimeError(
                        f"{coordinator.who(number)} raised StopIteration, as next() does at the end of an "
                        "iterator; catch it in forward(), or give next() a default"
                    ) from error
            coordinator.leave(number)
            return output
        except BaseException as error:
            coordinator.leave(number, error)
            raise
        finally:
            context_run.reset(token)


class ReplicaHandle(nn.Module):
    """A stand-in for a replica, returned by `replicate`: it has the attributes of the replica, and its call runs it.

    A replica runs once. If a user's `parallel_apply` puts a function around the handles, `called` is this function.
    """

    _sync_run: ReplicaRun
    _sync_called: Callable[..., Any]

    def __init__(self, run: ReplicaRun, called: Callable[..., Any] | None = None) -> None:
        # `nn.Module.__init__` would give the handle parameters, submodules and hooks of its own.
        self.__dict__.update(_sync_run=run, _sync_called=called or run.replica)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync_run.replica, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sync_run.replica, name, value)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self._sync_run.replica.named_modules(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._sync_run.call(self._sync_called, args, kwargs)

    forward = __call__


def call_replicas(handles: Sequence[ReplicaHandle], inputs: Any, kwargs: Any) -> list[Any]:
    """Call each replica in its own thread, a single replica in this thread, and return the outputs in order.

    The output of a failed replica is None; the coordinator has its error. `kwargs` may be None or empty.
    """
    # Consume the user's iterators here: an exception in a thread would be lost, and the other replicas would wait.
    all_args = [args if isinstance(args, (list, tuple)) else (args,) for args in inputs]
    all_kwargs = list(kwargs) if kwargs else [{} for _ in all_args]
    if not len(handles) == len(all_args) == len(all_kwargs):
        raise ValueError(
            f"expected arguments for each of {len(handles)} replicas, but got {len(all_args)} positional and "
            f"{len(all_kwargs)} keyword ones; pass as many of both to parallel_apply, as scatter returns them"
        )

    if len(handles) == 1:
        return [handles[0](*all_args[0], **all_kwargs[0])]

    def work(i: int) -> None:
        outputs[i] = handles[i](*all_args[i], **all_kwargs[i])

    runs = [handle._sync_run for handle in handles]
    outputs: list[Any] = [None] * len(runs)
    streams: dict[torch.device, Any] = {}
    for run in runs:
        run.stream = streams.setdefault(run.device, current_stream(run.device))
    (_run_threads if len(streams) == len(runs) else _run_in_turns)(work, runs)
    return outputs


def _run_threads(work: Callable[[int], None], runs: Sequence[ReplicaRun]) -> None:
    """Call `work(i)` for each run in a thread, and return when all have ended, or when the coordinator has given up."""
    coordinator = runs[0].forward_pass.coordinator
    ended: SimpleQueue[int] = SimpleQueue()
    begin = partial(_begin_in_thread, work, ended)
    threads = {i: begin(i, run) for i, run in enumerate(runs)}
    while threads:
        try:
            indices = [ended.get(timeout=1.0)]
        except Empty:
            if coordinator.has_given_up:
                return
            # A thread that was killed from outside puts nothing into the queue.
            indices = [i for i, thread in threads.items() if _has_ended(thread())]
        for i in indices:
            if coordinator.lose_thread(runs[i].number):
                threads[i] = begin(i, runs[i])
            else:
                threads.pop(i, None)


def _begin_in_thread(work: Callable[[int], None], ended: "SimpleQueue[int]", i: int, run: ReplicaRun) -> "ref[Thread]":
    """Run `work(i)` in an idle or new thread, then put `i` into `ended`; return the thread."""
    # By process: in a forked child, the threads of its parent do not exist.
    idle = _idle.setdefault((getpid(), run.device, torch.get_num_threads()), [])
    try:
        while not (taken := idle.pop())[0].is_alive():
            pass
        thread, works = taken
        works.put((work, ended, i, run))
    except IndexError:
        works, name = SimpleQueue(), f"replicas on {run.device}"
        works.put((work, ended, i, run))  # Before the start: a signal in between would leave a thread without work.
        # A daemon: after Ctrl-C in the caller, a busy thread must not block the exit of Python.
        thread = Thread(target=_work_and_stay, args=(works, idle, run.device), name=name, daemon=True)
        start_new_thread(_start, (thread, ended, i, ref(run)))
    return ref(thread)


def _start(thread: Thread, ended: "SimpleQueue[int]", i: int, run: "ref[ReplicaRun]") -> None:
    """Start the thread of a replica, from a thread without signals; see NOTE [signals].

    The replica may end before this thread, which would keep its tensors alive. So `run` is a weak reference.
    """
    try:
        thread.start()
    except BaseException as error:
        if (waiting := run()) is not None:
            waiting.forward_pass.coordinator.leave(waiting.number, error)
        ended.put(i)


def _has_ended(thread: Thread | None) -> bool:
    """Return whether a thread has ended. A thread without `ident` has not started yet."""
    return thread is None or (thread.ident is not None and not thread.is_alive())


def _work_and_stay(works: "SimpleQueue[Any]", idle: list[Any], device: torch.device) -> None:
    """Run the works in a queue one after another, as the target of a thread; see NOTE [threads that stay]."""
    may_stay = device.type != "cpu"
    state = _thread_state() if may_stay else ()
    stays = True
    while stays:
        work, ended, i, run = works.get()
        try:
            work(i)
            stays = may_stay and _thread_state() == state
        except BaseException as error:  # Usually the run has reported it, but not if the thread is killed from outside.
            run.forward_pass.coordinator.leave(run.number, error)
            stays = False
        del work, run  # They refer to inputs and outputs.
        if stays:
            idle.append((current_thread(), works))
        ended.put(i)
        del ended


def _thread_state() -> tuple[Any, ...]:
    """Return the settings of this thread that a `forward` may change and leave changed."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _autocast_device_types()]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), saved_tensors_hooks(True)
    counts = count_function_modes(), count_dispatch_modes(), torch.get_num_threads()  # A default device is a mode.
    return autocast, torch.is_autocast_cache_enabled(), modes, counts


# Idle threads with their queues of works, by process, device, and number of OpenMP threads.
_idle: dict[tuple[int, torch.device, int], list[tuple[Thread, "SimpleQueue[Any]"]]] = {}


def _run_in_turns(work: Callable[[int], None], runs: Sequence[ReplicaRun]) -> None:
    """Run replicas that share devices one at a time, each with its own random states."""
    forward_pass = runs[0].forward_pass
    forward_pass.check_turns()
    changes = ParameterChanges(forward_pass.original)
    forward_pass.random_states = states = RandomStates({run.number: run.device for run in runs})

    def begin_turn(number: int) -> None:
        if changes.watched:
            changes.look()
        states.begin_turn(number)

    forward_pass.coordinator.take_turns([run.number for run in runs], begin_turn)
    _run_threads(work, runs)
    states.restore_caller()
    changes.warn(len(runs))


# The runs of the latest `replicate` or `parallel_apply` in this context. Weak references, as threads from user code may
# keep the context alive after the forward pass.
_prepared: ContextVar[Sequence["ref[ReplicaRun]"]] = ContextVar("sync_batchnorm_prepared", default=())


def prepared_runs() -> list[ReplicaRun]:
    """Return the runs of the latest `replicate` or `parallel_apply` in this context, unless the pass has ended."""
    runs = [run for reference in _prepared.get() if (run := reference()) is not None]
    return [run for run in runs if not run.forward_pass.coordinator.is_over]
