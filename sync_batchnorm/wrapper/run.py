"""The runs of the replicas of a forward pass: each in a thread, in the modes of its caller, on its turn.

Whoever waits for a replica learns how it ends.

NOTE [threads that stay]: cuDNN plans each convolution anew in each new thread, as torch keeps the plans by thread. That
takes the forward pass of a ResNet-50 from 6 to 51 ms (torch 2.11, H200; `docs/benchmarks/gpu`). So the thread of a
replica on an accelerator stays, idle, for the next replica on that device; there are as many as have run at once. It
serves callers with the same number of threads of torch, which a thread takes on when it begins. It ends if its replica
fails, or leaves its state other than it was: the replica of another model must not get what is on. On the CPU, where
nothing is kept by thread, it ends, too: an idle one would also keep its pool of OpenMP.

NOTE [signals]: The handler of a signal may raise an exception between any two lines of Python in the main thread. In
`Thread.start`, `Thread.join` or `Event.wait`, which release locks, it becomes "release unlocked lock", or the thread is
lost. So the caller waits in `SimpleQueue.get` only, which has no Python code, and starts a thread with `_thread`, in
which no signal is handled, to start the `Thread` of a replica. A replica itself needs one that debuggers know. The
caller refers to that weakly: at the end of a `Thread`, Python code of `threading` runs, which would lose the exception.
"""

from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
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
    """Return the coordinator of a forward pass, which makes spans in the profile if a profiler is active."""

    def span(name: str) -> AbstractContextManager[Any]:
        return profiler.record_function(f"sync_batchnorm: {name}")

    return Coordinator(list(map(str, devices)), timeout, span if profiler._is_profiler_enabled else None)


@dataclass
class ForwardPass:
    """What the replicas of one forward have in common."""

    original: nn.Module  # the wrapped module
    coordinator: Coordinator
    check_turns: Callable[[], None] = lambda: None  # raises an error if replicas cannot take turns
    modes: Sequence[Callable[[torch.device], AbstractContextManager[Any]]] = ()  # of the caller, for a replica's device
    context: Context | None = None  # that of the caller; None if the only replica runs in the thread of its caller
    random_states: RandomStates | None = None  # of replicas that take turns

    def prepare(self, replicas: Sequence[nn.Module], devices: Sequence[torch.device]) -> list["ReplicaRun"]:
        """Return the runs of all replicas; note the modes of this thread."""
        runs = [ReplicaRun(replica, self, i, devices[i]) for i, replica in enumerate(replicas)]
        self._inherit(runs)  # for replicas that are not called by `parallel_apply`
        return runs

    def apply(
        self, function: Callable[[], list[Any]], runs: Sequence["ReplicaRun"], fact: Callable[[], str]
    ) -> list[Any]:
        """Return the outputs of `function`, which makes these runs; raise the error of a replica that has failed.

        The text of `fact` is added to the note of such an error.
        """
        self._inherit(runs)
        if len(runs) == 1:
            self.context = None  # It runs in this thread, as on one device.
        self.coordinator.expect([run.number for run in runs])
        outputs: list[Any] = []
        raised: BaseException | None = None
        try:
            outputs = function()
        except BaseException as error:
            raised = error
        failure = self._failure(raised, fact)
        _prepared.set(())  # A replica that is stuck would let this pass be taken for the next one.
        if failure is not None:
            try:
                raise failure
            finally:
                del raised, failure  # Their traceback refers to this frame.
        return outputs

    def _inherit(self, runs: Sequence["ReplicaRun"]) -> None:
        """Note the modes and the context of this thread, as those of the caller of these runs."""
        is_inference, records = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        modes: list[Any] = [lambda _: torch.inference_mode() if is_inference else torch.set_grad_enabled(records)]
        for kind in _types_of_autocast():
            if torch.is_autocast_enabled(kind):
                dtype, cache = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
                autocast = partial(torch.autocast, kind, dtype=dtype, cache_enabled=cache)
                modes.append(lambda _, autocast=autocast: autocast())
        default = torch.get_default_device()
        if default.type != "cpu":  # The replica's device replaces a default device of its type.
            modes.append(lambda device: device if device.type == default.type else default)
        self.modes, self.context = modes, copy_context()
        _prepared.set(list(map(ref, runs)))

    def _failure(self, raised: BaseException | None, fact: Callable[[], str]) -> BaseException | None:
        """End this forward pass; return the error that the caller gets, or None.

        `raised` is what the call of the replicas has raised in the thread of the caller, or None. The error of a
        replica goes before it, which may be a consequence, as where an output is missing. But Ctrl-C in the thread of
        the caller is what the user wants to see.
        """
        # Asked before replicas fail because of the abort.
        who, error = self.coordinator.take_failure() or ("", raised)
        if raised is not None:
            # Late replicas would draw from the generators, and write into buffers.
            self.coordinator.abort(raised, PATIENCE)
            if self.random_states is not None:
                self.random_states.restore_caller(completed=False)
        is_interrupt = raised is not None and raised is not error and not isinstance(raised, Exception)
        if error is None or not who or is_interrupt:
            return raised
        if is_in_replica():
            return error  # The outer wrapper shows the frames of both.
        is_own = isinstance(error, Exception) and not isinstance(error, ReplicaSyncError)
        return strip_frames(error, who, fact() if is_own else "")


def _types_of_autocast() -> Sequence[str]:
    """Return the types of device for which autocast may be on."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class ReplicaRun:
    """The run of one replica. It tells the coordinator how the replica ends, whatever its thread does with an error."""

    def __init__(self, replica: nn.Module, forward_pass: ForwardPass, number: int, device: torch.device) -> None:
        self.replica, self.forward_pass, self.number, self.device = replica, forward_pass, number, device
        self.stream: torch.cuda.Stream | None = None  # on which it computes, instead of that of its thread

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the replica, or what the `parallel_apply` of a subclass calls in its place, which calls the replica."""
        if self.forward_pass.coordinator.runs_here(self.number):
            return function(*args, **kwargs)
        context = self.forward_pass.context
        if context is None:
            return self._begin(function, args, kwargs)
        return context.copy().run(self._begin, function, args, kwargs)  # Two threads cannot run in one context.

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
                except StopIteration as error:  # It would end a loop of the caller as if that were at its end: PEP 479.
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
    """What `replicate` returns for a replica: it looks like the replica, and a call of it runs the replica, once."""

    _sync_run: ReplicaRun
    _sync_called: Callable[..., Any]  # the replica, or what the `parallel_apply` of a subclass calls in its place

    def __init__(self, run: ReplicaRun, called: Callable[..., Any] | None = None) -> None:
        # Not that of `nn.Module`: parameters, submodules and hooks are the replica's too.
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
    """Call each `ReplicaHandle` of a forward pass in a thread of its own, or a single one in this thread.

    Return the outputs in order, with None for a replica that has failed; the coordinator knows its error. No `kwargs`
    mean no keyword arguments.
    """
    # Here, not in the threads: what an iterator of the user's raises would be lost there, and the others would wait.
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
    if len(streams) == len(runs):
        _run_threads(work, runs)
    else:
        _run_in_turns(work, runs)
    return outputs


def _run_threads(work: Callable[[int], None], runs: Sequence[ReplicaRun]) -> None:
    """Run `work` of each place in `runs` in a thread, until all have ended, or those that have not are given up."""
    coordinator = runs[0].forward_pass.coordinator
    ended: SimpleQueue[int] = SimpleQueue()
    begin = partial(_begin_in_thread, work, ended)
    threads = {i: begin(i, run) for i, run in enumerate(runs)}
    while threads and not coordinator.has_given_up:
        try:
            places = [ended.get(timeout=1.0)]
        except Empty:  # Something outside may have ended a thread, which then tells nothing.
            places = [i for i, thread in threads.items() if _has_ended(thread())]
        for i in places:
            if coordinator.lose_thread(runs[i].number):
                threads[i] = begin(i, runs[i])
            else:
                threads.pop(i, None)


def _begin_in_thread(work: Callable[[int], None], ended: "SimpleQueue[int]", i: int, run: ReplicaRun) -> "ref[Thread]":
    """Run `work(i)` in a thread, then put `i` into `ended`; return the thread."""
    # A forked child has none of its parent's threads.
    idle = _idle.setdefault((getpid(), run.device, torch.get_num_threads()), [])
    try:
        while not (taken := idle.pop())[0].is_alive():
            pass
        thread, works = taken
        works.put((work, ended, i, run))
    except IndexError:
        works, name = SimpleQueue(), f"replicas on {run.device}"
        works.put((work, ended, i, run))  # First: otherwise, a signal could leave a thread without work.
        # After Ctrl-C in the caller, a busy daemon thread does not block exit.
        thread = Thread(target=_work_and_stay, args=(works, idle, run.device), name=name, daemon=True)
        start_new_thread(_start, (thread, ended, i, run))
    return ref(thread)


def _start(thread: Thread, ended: "SimpleQueue[int]", i: int, run: ReplicaRun) -> None:
    """Start a thread, in a thread that no signal interrupts: see NOTE [signals]."""
    try:
        thread.start()
    except BaseException as error:
        run.forward_pass.coordinator.leave(run.number, error)
        ended.put(i)


def _has_ended(thread: Thread | None) -> bool:
    """Return whether a thread has ended; one without a number has not begun yet."""
    return thread is None or (thread.ident is not None and not thread.is_alive())


def _work_and_stay(works: "SimpleQueue[Any]", idle: list[Any], device: torch.device) -> None:
    """Do one work after another, in a thread that is idle in between; see NOTE [threads that stay] for its end."""
    state, stays = _thread_state(), True
    while stays:
        work, ended, i, run = works.get()
        try:
            work(i)
            stays = device.type != "cpu" and _thread_state() == state
        except BaseException as error:  # which the run has told, unless something outside wants to end this thread
            run.forward_pass.coordinator.leave(run.number, error)
            stays = False
        del work, run  # which refer to inputs and outputs
        if stays:
            idle.append((current_thread(), works))
        ended.put(i)
        del ended


def _thread_state() -> tuple[Any, ...]:
    """Return the settings of this thread that `forward` may leave other than they were."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _types_of_autocast()]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), saved_tensors_hooks(True)
    counts = count_function_modes(), count_dispatch_modes(), torch.get_num_threads()  # A default device is a mode.
    return autocast, torch.is_autocast_cache_enabled(), modes, counts


# Idle threads, each with the queue of its works, by process, device, and the number of threads that torch uses in each.
_idle: dict[tuple[int, torch.device, int], list[tuple[Thread, "SimpleQueue[Any]"]]] = {}


def _run_in_turns(work: Callable[[int], None], runs: Sequence[ReplicaRun]) -> None:
    """Run replicas that share devices one at a time; each draws from random states of its own."""
    forward_pass = runs[0].forward_pass
    forward_pass.check_turns()
    changes = ParameterChanges(forward_pass.original)
    devices = {run.number: run.device for run in runs}
    forward_pass.random_states = states = RandomStates(devices)

    def begin_turn(number: int) -> None:
        changes.look()
        states.begin_turn(number)

    forward_pass.coordinator.take_turns(list(devices), begin_turn)
    _run_threads(work, runs)
    states.restore_caller()
    changes.warn(len(runs))


# The runs of the forward pass that was made or called last in this context. Weak references: a thread that a replica
# has started may keep its context longer than the forward pass lasts.
_prepared: ContextVar[Sequence["ref[ReplicaRun]"]] = ContextVar("sync_batchnorm_prepared", default=())


def prepared_runs() -> list[ReplicaRun]:
    """Return the runs of the forward pass that was made or called last in this context, unless it has ended."""
    runs = [run for reference in _prepared.get() if (run := reference()) is not None]
    return [run for run in runs if not run.forward_pass.coordinator.is_over]
