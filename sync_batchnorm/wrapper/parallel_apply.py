"""Run the replicas of a forward pass, each in its own thread.

The modes of the caller's thread, such as grad mode and autocast, apply in the threads of the replicas, too. If replicas
share a device, only one replica runs at a time.

    caller's thread      apply ---> call_replicas: start threads, wait for their end ---> _failure ---> outputs or error
    replica's thread                  ReplicaRun.call: wait for a turn, enter modes, forward, coordinator.leave()

The coordinator of a forward pass is told about the end of every replica, even if the thread of the replica never starts
or is killed. The coordinator then releases the replicas that wait for this replica.

NOTE [threads that stay]: The obvious way is a new thread for each replica. But torch stores the plans of cuDNN
separately for each thread, so each new thread plans each convolution again. A forward pass of ResNet-50 then takes 51
ms in place of 6 ms (torch 2.11, H200; `docs/benchmarks/gpu`). So after a replica on an accelerator ends, its thread
stays idle, and later runs the next replica on the same device.

A new thread adopts the number of OpenMP threads of its caller (`torch.get_num_threads()`). So an idle thread serves
only callers with the same number. A thread ends if its replica fails, or leaves a setting of the thread changed, such
as autocast, because the next replica may belong to another model. On the CPU, a thread always ends with its replica:
torch stores no plans there, and an idle thread would keep its OpenMP threads alive.

NOTE [signals]: In the main thread, the handler of a signal may raise an exception between any two lines of Python code.
An example is `KeyboardInterrupt` after Ctrl-C. The obvious calls, `Thread.start`, `Thread.join` and `Event.wait`,
handle locks in Python code. If an exception interrupts such a call, the exception turns into the error "release
unlocked lock", or the thread is lost.

To be safe from such exceptions, the caller's thread waits only in `SimpleQueue.get`, which is written in C. It does not
start the thread of a replica itself. Instead, it starts a helper thread, with the low-level module `_thread`. No signal
is handled in the helper thread, so the helper can start the `Thread` object of the replica. The replica needs a
`Thread` object because debuggers do not see other threads.

The caller's thread keeps only a weak reference to the `Thread` object, so that the object is freed in another thread.
Freeing it runs Python code of `threading`, where an exception of a signal handler would be lost.
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
    """Return a coordinator for one forward pass. While torch's profiler is on, the coordinator records spans for it."""

    def span(name: str) -> AbstractContextManager[Any]:
        return profiler.record_function(f"sync_batchnorm: {name}")

    return Coordinator(list(map(str, devices)), timeout, span if profiler._is_profiler_enabled else None)


@dataclass
class ForwardPass:
    """One forward pass of a wrapper, with the state that all its replicas share."""

    original: nn.Module  # the wrapped module, from which the replicas were made
    coordinator: Coordinator
    # A function that raises an error if the replicas cannot run in turns on a shared device.
    check_turns: Callable[[], None] = lambda: None
    # Functions that set the modes of the caller's thread, such as autocast, in another thread. Each function takes a
    # device, and returns a context manager for one mode.
    modes: Sequence[Callable[[torch.device], AbstractContextManager[Any]]] = ()
    # The `contextvars` context of the caller's thread; None if a single replica runs directly in the caller's thread.
    context: Context | None = None
    # The states of random generators for each replica; None unless replicas share a device and run in turns.
    random_states: RandomStates | None = None

    def prepare(self, replicas: Sequence[nn.Module], devices: Sequence[torch.device]) -> list["ReplicaRun"]:
        """Return a `ReplicaRun` for each replica, which will run with the modes of this thread, such as grad mode."""
        runs = [ReplicaRun(replica, self, i, devices[i]) for i, replica in enumerate(replicas)]
        # The method `apply` will save the modes again. But `apply` is not called if users call the replicas themselves,
        # without `parallel_apply`.
        self._save_modes(runs)
        return runs

    def apply(
        self, function: Callable[[], list[Any]], runs: Sequence["ReplicaRun"], describe: Callable[[], str]
    ) -> list[Any]:
        """Call `function`, which runs all replicas, and return its outputs. Raise the error of a replica if one failed.

        If a replica fails, the function `describe` is called. The text that it returns is added to the note on the
        replica's error.
        """
        self._save_modes(runs)
        if len(runs) == 1:
            self.context = None  # A single replica runs in the caller's thread, with the caller's context.
        self.coordinator.expect([run.number for run in runs])
        outputs: list[Any] = []
        raised: BaseException | None = None
        try:
            outputs = function()
        except BaseException as error:
            raised = error
        failure = self._failure(raised, describe)
        # Forget the runs of this forward pass. If a replica is stuck, this forward pass does not count as over, and the
        # next forward pass would get these runs from `prepared_runs`.
        _prepared.set(())
        if failure is not None:
            try:
                raise failure
            finally:
                # The traceback of an exception refers to this frame, and the frame to the exception. Delete the
                # variables to break this reference cycle.
                del raised, failure
        return outputs

    def _save_modes(self, runs: Sequence["ReplicaRun"]) -> None:
        """Save the modes and the context of the caller's thread, for the threads in which the replicas will run."""
        is_inference, records = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        modes: list[Any] = [lambda _: torch.inference_mode() if is_inference else torch.set_grad_enabled(records)]
        for kind in _autocast_device_types():
            if torch.is_autocast_enabled(kind):
                dtype, cache = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
                autocast = partial(torch.autocast, kind, dtype=dtype, cache_enabled=cache)
                modes.append(lambda _, autocast=autocast: autocast())
        default = torch.get_default_device()
        # If the caller has set a default device (other than the CPU), a replica on a device of this type runs with its
        # own device as the default device.
        if default.type != "cpu":
            modes.append(lambda device: device if device.type == default.type else default)
        self.modes, self.context = modes, copy_context()
        _prepared.set(list(map(ref, runs)))

    def _failure(self, raised: BaseException | None, describe: Callable[[], str]) -> BaseException | None:
        """End this forward pass, and return the exception to raise in the caller's thread; None if all went well.

        `raised` is an exception that the caller's thread raised itself, or None. If a replica failed, its error is
        returned instead, because `raised` may be only a consequence of that failure: for example, an error about a
        missing output. But an interrupt of the caller's thread, such as Ctrl-C, is always returned.
        """
        # Look for the failed replica before the abort below, because the abort makes other replicas fail, too.
        who, error = self.coordinator.take_failure() or ("", raised)
        if raised is not None:
            # Before the caller continues, abort the replicas that still run. Otherwise they would draw random numbers,
            # and write into the buffers of the model.
            self.coordinator.abort(raised, PATIENCE)
            if self.random_states is not None:
                self.random_states.restore_caller(completed=False)
        is_interrupt = raised is not None and raised is not error and not isinstance(raised, Exception)
        if error is None or not who or is_interrupt:
            return raised
        if is_in_replica():
            # A wrapper that runs inside a replica of an outer wrapper leaves the note to the outer wrapper.
            return error
        is_from_user = isinstance(error, Exception) and not isinstance(error, ReplicaSyncError)
        return strip_frames(error, who, describe() if is_from_user else "")


@cache
def _autocast_device_types() -> Sequence[str]:
    """Return the device types with an autocast setting of their own: "cpu", and the type of the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class ReplicaRun:
    """The run of one replica in a forward pass. It tells the coordinator when the replica begins and how it ends.

    If the replica raises an error, the coordinator gets this error, even if a function around the replica catches it.
    """

    def __init__(self, replica: nn.Module, forward_pass: ForwardPass, number: int, device: torch.device) -> None:
        self.replica, self.forward_pass, self.number, self.device = replica, forward_pass, number, device
        # The CUDA stream on which the replica runs: the current stream of the caller's thread. If None, the replica
        # uses the current stream of its own thread.
        self.stream: torch.cuda.Stream | None = None

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the replica: call `function` with the modes of the caller's thread, and return its output.

        `function` is the replica, or a function of the user that calls the replica. Each replica runs once in a forward
        pass, and a second call raises an error. An exception is a call from inside the running replica, in its own
        thread: it just calls `function`.
        """
        if self.forward_pass.coordinator.runs_here(self.number):
            return function(*args, **kwargs)
        context = self.forward_pass.context
        if context is None:
            return self._begin(function, args, kwargs)
        # Each replica needs its own copy of the context: a `Context` cannot be entered in two threads at the same time.
        return context.copy().run(self._begin, function, args, kwargs)

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
                # In the caller's thread, a `StopIteration` would silently end a loop of the caller, see PEP 479.
                except StopIteration as error:
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
    """A stand-in for a replica: `replicate` returns a list of such handles in place of the replicas.

    A handle has the attributes of its replica. A call of the handle runs the replica, which is possible only once. If a
    user's `parallel_apply` puts a function around the replica, the handle calls this function (`called`).
    """

    _sync_run: ReplicaRun
    _sync_called: Callable[..., Any]

    def __init__(self, run: ReplicaRun, called: Callable[..., Any] | None = None) -> None:
        # Do not call `nn.Module.__init__`: it would give the handle empty dictionaries of parameters, submodules and
        # hooks, which would hide those of the replica.
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
    """Call each replica in its own thread, and return the outputs in the order of replicas.

    If there is only one replica, it is called in the caller's thread. The output of a failed replica is None, and the
    coordinator stores its error. `inputs` and `kwargs` hold the positional and keyword arguments of each replica;
    `kwargs` may also be None or empty.
    """
    # The arguments may be iterators of the user. Read them to the end here, in the caller's thread. In the thread of a
    # replica, an exception of such an iterator would be lost, and the other replicas would wait for this replica.
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
    """Call `work(i)` for each run `i`, in a thread of its own, and return when all these calls have ended.

    If some replicas do not end after an error, the coordinator gives up after a while, and this function returns.
    """
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
            # A thread that was killed from outside never reports its end in the queue, so check the threads themselves.
            indices = [i for i, thread in threads.items() if _has_ended(thread())]
        for i in indices:
            if coordinator.lose_thread(runs[i].number):
                threads[i] = begin(i, runs[i])
            else:
                threads.pop(i, None)


def _begin_in_thread(work: Callable[[int], None], ended: "SimpleQueue[int]", i: int, run: ReplicaRun) -> "ref[Thread]":
    """Begin to run `work(i)` in an idle or new thread, and return a weak reference to this thread.

    When the work ends, the thread puts `i` into the queue `ended`.
    """
    # Idle threads are stored by process, because a forked child process does not have the threads of its parent.
    idle = _idle.setdefault((getpid(), run.device, torch.get_num_threads()), [])
    try:
        while not (taken := idle.pop())[0].is_alive():
            pass
        thread, works = taken
        works.put((work, ended, i, run))
    except IndexError:
        works, name = SimpleQueue(), f"replicas on {run.device}"
        # Put the work into the queue before the thread starts. If the thread started first, and a signal interrupted
        # this function before the next line, the thread would wait for work forever.
        works.put((work, ended, i, run))
        # The thread is a daemon, because a busy thread must not block the exit of Python after Ctrl-C in the caller.
        thread = Thread(target=_work_and_stay, args=(works, idle, run.device), name=name, daemon=True)
        start_new_thread(_start, (thread, ended, i, ref(run)))
    return ref(thread)


def _start(thread: Thread, ended: "SimpleQueue[int]", i: int, run: "ref[ReplicaRun]") -> None:
    """Start the thread of a replica. This function itself runs in a helper thread, see NOTE [signals].

    `run` is a weak reference. The helper thread may live longer than the replica, and a strong reference in the helper
    thread would keep the tensors of the replica alive.
    """
    try:
        thread.start()
    except BaseException as error:
        if (waiting := run()) is not None:
            waiting.forward_pass.coordinator.leave(waiting.number, error)
        ended.put(i)


def _has_ended(thread: Thread | None) -> bool:
    """Return whether a thread has ended. A thread that has not started yet (its `ident` is None) has not ended."""
    return thread is None or (thread.ident is not None and not thread.is_alive())


def _work_and_stay(works: "SimpleQueue[Any]", idle: list[Any], device: torch.device) -> None:
    """Run the replicas from the queue `works` one after another. This is the main function of a replica's thread.

    After a replica on an accelerator, the thread enters itself in `idle` and waits for the next work, see
    NOTE [threads that stay].
    """
    may_stay = device.type != "cpu"
    state = _thread_state() if may_stay else ()
    stays = True
    while stays:
        work, ended, i, run = works.get()
        try:
            work(i)
            stays = may_stay and _thread_state() == state
        except BaseException as error:
            # Tell the coordinator about the error. Usually the `ReplicaRun` did so already, but not if the thread was
            # killed from outside.
            run.forward_pass.coordinator.leave(run.number, error)
            stays = False
        # The variables `work` and `run` refer to the inputs and outputs of the replica. Delete the variables, because
        # an idle thread must not keep the inputs and outputs alive.
        del work, run
        if stays:
            idle.append((current_thread(), works))
        ended.put(i)
        del ended


def _thread_state() -> tuple[Any, ...]:
    """Return the settings of torch in this thread that a `forward` may change and not restore, such as autocast."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _autocast_device_types()]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), saved_tensors_hooks(True)
    # Count the function modes and dispatch modes that are active. A default device is such a mode.
    counts = count_function_modes(), count_dispatch_modes(), torch.get_num_threads()
    return autocast, torch.is_autocast_cache_enabled(), modes, counts


# Idle threads that wait for the next replica, each with the queue from which it takes its work. The keys are (id of the
# process, device of the replicas, number of OpenMP threads).
_idle: dict[tuple[int, torch.device, int], list[tuple[Thread, "SimpleQueue[Any]"]]] = {}


def _run_in_turns(work: Callable[[int], None], runs: Sequence[ReplicaRun]) -> None:
    """Run replicas that share devices: one at a time, each with its own states of the random generators."""
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


# Weak references to the `ReplicaRun` objects of the latest call of `replicate` or `parallel_apply` in this context.
# Strong references would keep the objects alive, because threads started by user code may keep the context after the
# forward pass.
_prepared: ContextVar[Sequence["ref[ReplicaRun]"]] = ContextVar("sync_batchnorm_prepared", default=())


def prepared_runs() -> list[ReplicaRun]:
    """Return the `ReplicaRun` objects of the latest call of `replicate` or `parallel_apply` in this context.

    Return an empty list if the forward pass of the latest call is over.
    """
    runs = [run for reference in _prepared.get() if (run := reference()) is not None]
    return [run for run in runs if not run.forward_pass.coordinator.is_over]
