"""Children of the process that runs the tests: they start at once, where a new Python would import torch first."""

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

__all__ = ["Ended", "fork", "forked", "let_python_swallow", "needs_fork"]

# Seconds after which the system ends a child that hangs: later than the process of its test has ended, which prints the
# stacks. Then nobody waits for the child any more.
LONGEST = 1200

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork a process")


class Ended(NamedTuple):
    """How a child ended: 0 if its body returned, 1 if it raised; and all that it has printed, a traceback last."""

    status: int
    output: str


def let_python_swallow(kind: type[BaseException]) -> None:
    """Print nothing where Python ignores an exception of a signal: in a destructor, or a callback of a weakref."""

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, kind):
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def fork(body: Callable[[], object], output: int) -> int:
    """Run `body` in the main thread of a child, which writes to the file descriptor `output`; return its number.

    Nothing runs at the end of the child: whether Python would wait for its threads is for the body to say.
    """
    numbers = list[int]()
    # A thread that has used the pool of libgomp leaves a child without its threads, which would wait for them for ever.
    thread = threading.Thread(target=lambda: numbers.append(_fork(body, output)))
    thread.start()
    thread.join()
    return numbers[0]


def _fork(body: Callable[[], object], output: int) -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads at a fork. Those of a test run wait, and hold nothing that a child needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(LONGEST)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Two threads that are the first of a child to ask for torch's pool of threads race for it, under any wrapper:
        # "Invalid thread pool!" (torch 2.13, `caffe2::pthreadpool`). Here the main thread asks first.
        torch.set_num_threads(torch.get_num_threads())
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def forked(body: Callable[[], object], interrupt_at: str | None = None) -> Ended:
    """Run `body` in a child, and wait for its end; send it Ctrl-C when it prints a certain line."""
    read, write = os.pipe()
    child = fork(body, write)
    os.close(write)
    lines = []
    try:
        with os.fdopen(read) as output:
            for line in output:
                lines.append(line)
                if line.rstrip("\n") == interrupt_at:
                    os.kill(child, signal.SIGINT)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), "".join(lines))
