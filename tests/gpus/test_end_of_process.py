"""How a process with simulated GPUs ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit
import os
import queue
import sys
import threading

import simulated_gpus

simulated_gpus.simulate(1)
import torch

sys.setswitchinterval(1000)  # a thread gets the GIL only where another one waits
droppers, at_exit, dropped = queue.SimpleQueue(), threading.Lock(), threading.Lock()
at_exit.acquire()
dropped.acquire()
main = threading.get_ident()


class Held:  # a backward pass has it, and the thread that drops the pass last runs this
    def __del__(self):
        droppers.put(threading.get_ident())
        if threading.get_ident() != main:
            at_exit.acquire()
            for _ in range(1000):
                os.stat("/")  # gives the GIL up and takes it again: the thread ends only where others wait for it
            dropped.release()


class Last:  # deleted when Python no longer gives the GIL to other threads
    def __del__(self, wait=dropped.acquire):
        wait(timeout=10)


sys.deleted_late = Last()
weight = torch.ones(3, device="cuda", requires_grad=True)
dropper = main
while dropper == main:
    torch._C._stash_obj_in_tls("held", Held())
    weight.sum().backward()
    torch._C._stash_obj_in_tls("held", None)
    dropper = droppers.get()
atexit.register(at_exit.release)
print("dropped by a thread of the engine")
"""


@pytest.mark.cuda
@pytest.mark.simulated
@pytest.mark.timeout(900)
def test_thread_of_autograd_that_drops_a_backward_pass_late_does_not_end_the_process():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "dropped by a thread of the engine\n", "")
