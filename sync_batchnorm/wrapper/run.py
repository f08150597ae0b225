"""The runs of the replicas of a forward pass: each in a thread, in the modes of its caller, on its turn.

Whoever waits for a replica learns how it ends.

NOTE [whose thread]: A replica runs in a copy of the context of its caller, which may itself be a replica of another
wrapper, and a thread that a replica starts may inherit its context, as by default in free-threaded Python 3.14. So a
`ContextVar` alone does not say which replica a thread runs: the number of the thread must be that of the replica, too.

NOTE [without the interpreter lock]: Nothing here relies on the lock of the interpreter; free-threaded Python has none.

What two threads share is guarded in one of four ways. The lock of a `Coordinator` guards all records of its forward
pass; `_lock` in `random_states.py` guards the generators. What travels in a mailbox belongs to one thread at a time: a
`Part` to its replica until it is sent, to the master until it is answered, and to its replica again; what a backward
pass reads is complete before the answers are sent. What a replica is made of, its modules and their dictionaries
included, is made by the caller, and belongs to the thread of the replica. Tables of the process (`_made`, `_issued`,
`_looks`, `_alive`, `_numbers`, the cached functions) are changed by single operations, `setdefault` where only one
thread may win; two threads may compute the same entry, and either of the two is right.

Two things belong to the process and cannot be guarded here: the collector, which a thread only enables again if it has
disabled it itself; and the frames of other threads, which `Record.stack` reads for the error of a timeout, and which
Python 3.13 without the lock does not promise to be safe.

A free-threaded Python counts references by thread, even if it runs with the lock: an object that the caller has made
and a replica drops is freed when the caller's thread runs again, which is at most a second later (`_run_threads`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd import profiler

from ..backends.streams import current_stream
from ..meeting import PATIENCE, Coordinator, ReplicaSyncError, without_frames
from ..messages import warn_once
from ..torch_private import uncompiled
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
    contexts: Mapping[str, object] = field(default_factory=dict)  # those of the callbacks, by submodule
    modes: Sequence[Callable[[], AbstractContextManager[Any]]] = ()  # those of the caller
    default_device: torch.device | None = None  # that of the caller, where it is not the CPU
    context: Context | None = None  # that of the caller; None if the only replica runs in the thread of its caller
    random_states: RandomStates | None = None  # of replicas that take turns

    def runs(self, replicas: Sequence[nn.Module], devices: Sequence[torch.device]) -> list["Run"]:
        """Return a `Run` for each of all replicas."""
        return [Run(replica, self, i, devices[i]) for i, replica in enumerate(replicas)]

    def inherit(self, runs: Sequence["Run"]) -> None:
        """Note the modes, the default device and the context of this thread, as those of the caller of these runs."""
        grad = partial(torch.set_grad_enabled, torch.is_grad_enabled())
        modes: list[Any] = [torch.inference_mode if torch.is_inference_mode_enabled() else grad]
        accelerator = torch.accelerator.current_accelerator()
        for device_type in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            if torch.is_autocast_enabled(device_type):
                dtype, cache = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
                modes.append(partial(torch.autocast, device_type, dtype=dtype, cache_enabled=cache))
        default_device = torch.get_default_device()
        self.modes, self.context = modes, copy_context()
        self.default_device = None if default_device.type == "cpu" else default_device
        _prepared.set(list(map(ref, runs)))

    def enter_modes(self, stack: ExitStack, device: torch.device) -> None:
        """Enter the modes of the caller, in a replica on `device`, which replaces a default device of its type."""
        for mode in self.modes:
            stack.enter_context(mode())
        if self.default_device is not None:
            stack.enter_context(device if device.type == self.default_device.type else self.default_device)

    def failure(self, raised: BaseException | None, fact: Callable[[], str]) -> BaseException | None:
        """End this forward pass; return the error that the caller gets, or None.

        The text of `fact` is added to the note of a replica's own error.

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
        return without_frames(error, who, "" if isinstance(error, ReplicaSyncError) else fact())


class Run(nn.Module):
    """The run of one replica: whoever calls replicas calls this, once. Its attributes are those of the replica.

    It tells the coordinator how the replica ends, whatever its thread does with an error.
    """

    _sync_replica: nn.Module
    _sync_pass: ForwardPass
    _sync_number: int
    _sync_device: torch.device
    _sync_called: Callable[..., Any]  # the replica, or what the `parallel_apply` of a subclass calls in its place
    _sync_stream: torch.cuda.Stream | None = None  # on which it computes, instead of that of its thread

    def __init__(self, replica: nn.Module, forward_pass: ForwardPass, number: int, device: torch.device) -> None:
        # Not that of `nn.Module`: parameters, submodules and hooks are the replica's too.
        self.__dict__.update(_sync_replica=replica, _sync_pass=forward_pass, _sync_number=number, _sync_device=device)
        self.__dict__["_sync_called"] = replica

    def _sync_calling(self, function: Callable[..., Any]) -> "Run":
        """Return a run in place of this one that calls `function`, which may call this one, in place of the replica."""
        run = Run(self._sync_replica, self._sync_pass, self._sync_number, self._sync_device)
        run.__dict__["_sync_called"] = function
        return run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync_replica, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sync_replica, name, value)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self._sync_replica.named_modules(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._sync_pass.coordinator.runs_here(self._sync_number):  # in what is called in its place
            return self._sync_replica(*args, **kwargs)
        context = self._sync_pass.context
        if context is None:
            return self._sync_call(*args, **kwargs)
        return context.copy().run(self._sync_call, *args, **kwargs)  # Two threads cannot run in one context.

    forward = __call__

    def _sync_call(self, *args: Any, **kwargs: Any) -> Any:
        coordinator, number = self._sync_pass.coordinator, self._sync_number
        _prepared.set(())
        token = _current.set(ref(self))
        try:
            with coordinator.begin(number), ExitStack() as stack:
                if self._sync_stream is not None:
                    stack.enter_context(torch.cuda.stream(self._sync_stream))
                self._sync_pass.enter_modes(stack, self._sync_device)
                try:
                    output = self._sync_called(*args, **kwargs)
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
            _current.reset(token)


def call_replicas(runs: Sequence[Run], inputs: Any, kwargs: Any) -> list[Any]:
    """Call each `Run` of a forward pass in a thread of its own, or a single one in this thread.

    Return the outputs in order, with None for a replica that has failed; the coordinator knows its error. No `kwargs`
    mean no keyword arguments.
    """
    kwargs = kwargs or [{} for _ in inputs]
    calls = [(args if isinstance(args, (list, tuple)) else (args,), kwargs[i]) for i, args in enumerate(inputs)]
    if len(runs) == 1:
        return [runs[0](*calls[0][0], **calls[0][1])]
    outputs: list[Any] = [None] * len(runs)

    def work(i: int) -> None:
        with suppress(BaseException):  # The run has told the coordinator.
            args, kwargs_of_run = calls[i]
            outputs[i] = runs[i](*args, **kwargs_of_run)

    streams = {device: current_stream(device) for device in {run._sync_device for run in runs}}
    for run in runs:
        vars(run)["_sync_stream"] = streams[run._sync_device]
    if len(streams) == len(runs):
        _run_threads(work, runs)
    else:
        _run_in_turns(work, runs)
    return outputs


def _run_threads(work: Callable[[int], None], runs: Sequence[Run]) -> None:
    """Run `work` of each place in `runs` in a thread, until all have ended, or those that have not are given up."""
    coordinator = runs[0]._sync_pass.coordinator
    # After Ctrl-C in the caller, a busy daemon thread does not block exit.
    threads = [Thread(target=work, args=(i,), daemon=True) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not coordinator.has_given_up:
            thread.join(1.0)


def _run_in_turns(work: Callable[[int], None], runs: Sequence[Run]) -> None:
    """Run replicas that share devices one at a time; each draws from random states of its own."""
    forward_pass = runs[0]._sync_pass
    before = _versions(forward_pass.original)
    devices = {run._sync_number: run._sync_device for run in runs}
    forward_pass.random_states = states = RandomStates(devices)
    forward_pass.coordinator.take_turns(list(devices), states.begin_turn)
    _run_threads(work, runs)
    states.restore_caller()
    after = _versions(forward_pass.original)  # may have other names: forward() can add parameters to the module
    changed = [name for name, version in before.items() if after.get(name, version) != version]
    if changed:
        warn_once(
            f"forward() modified parameters {changed} in place; each of the {len(runs)} replicas, which share "
            "their memory, repeated the change; make it a buffer, or change it outside forward()"
        )


def _versions(module: nn.Module) -> dict[str, int]:
    """Return the version of each parameter, a number that grows with every change in place of the same memory."""
    parameters = module.named_parameters()
    return {name: 0 if parameter.is_inference() else parameter._version for name, parameter in parameters}


# A weak reference: a thread that a replica has started may keep its context longer than the forward pass lasts.
_current: ContextVar["ref[Run] | None"] = ContextVar("sync_batchnorm_run", default=None)

# The runs of the forward pass that was made or called last in this context, also weakly.
_prepared: ContextVar[Sequence["ref[Run]"]] = ContextVar("sync_batchnorm_prepared", default=())


def prepared_runs() -> list[Run]:
    """Return the runs of the forward pass that was made or called last in this context, unless it has ended."""
    runs = [run for reference in _prepared.get() if (run := reference()) is not None]
    return [run for run in runs if not run._sync_pass.coordinator.is_over]


def current_run() -> Run | None:
    """Return the run of the replica that this thread runs, or None; see NOTE [whose thread]."""
    reference = _current.get()
    run = None if reference is None else reference()
    is_here = run is not None and run._sync_pass.coordinator.runs_here(run._sync_number)
    return run if is_here else None


def is_in_replica() -> bool:
    """Return whether this thread runs a replica."""
    return current_run() is not None


# As `torch.compiler.assume_constant_result` does, which would import the compiler. It cannot trace a `ContextVar`, and
# so keeps the answer of the first call: what it has compiled outside of replicas does not ask again inside.
vars(is_in_replica).update(_dynamo_marked_constant=True)


def raise_foreign_layer(foreign: nn.Module) -> None:
    """Raise an error if this is the thread of a replica to which a layer or wrapper that trains does not belong."""
    if is_in_replica():
        _refuse_unless_its_own(foreign)


@uncompiled  # The compiler knows no threads.
def _refuse_unless_its_own(foreign: nn.Module) -> None:
    run = current_run()
    if run is None or any(module is foreign for module in run.modules()):
        return
    forward_pass = run._sync_pass
    who = forward_pass.coordinator.who(run._sync_number)
    name = next((name for name, module in forward_pass.original.named_modules() if module is foreign), None)
    which = name or type(foreign).__name__
    whose = "which belongs to no replica" if name is None else "of the original module instead of its own copy"
    raise RuntimeError(
        f"{who} called {which}, {whose}: every replica would train it with its own chunk of the batch. Usual causes: "
        "(1) a plain list or dict: use nn.ModuleList or nn.ModuleDict; (2) a replaced forward of the model: replace "
        "that of the DataParallel; (3) a layer or wrapper outside the model: make it a submodule, or call its eval()"
    )
