"""The self-check: what it reports, on which devices, and that it ends when a check hangs."""

from __future__ import annotations

import os
import re
import runpy
import sys
import threading
from unittest.mock import Mock

import pytest
import torch
from forks import forked, needs_fork
from helpers import as_devices

from sync_batchnorm import DataParallelWithCallback, convert_model, revert_model
from sync_batchnorm import __main__ as command
from sync_batchnorm.__main__ import check_parity

LIBRARY = ["parity in float32", "parity in float64"]


@pytest.mark.smoke
def test_report_of_this_machine_is_all_right(devices, capsys):
    names = list(map(str, as_devices(devices)))
    status = command.main(["--devices", ",".join(names)])
    *lines, empty, verdict, last = capsys.readouterr().out.splitlines()
    facts = {line[:23].strip(): line[24:] for line in lines}
    assert (facts["torch"], facts["replicas on"]) == (torch.__version__, ", ".join(names))
    assert names[0] == "cpu" or facts[names[0]] == torch.cuda.get_device_name(names[0])
    for name, bound in zip(LIBRARY, ("1e-04", "1e-10"), strict=True):
        assert re.fullmatch(f"right, .* {bound}", facts[name])
    assert (status, empty) == (0, "")
    assert verdict.startswith("All is right, after ")
    assert "paste all of this text" in last


@needs_fork
def test_module_runs_as_a_program():
    def body():
        sys.argv = ["sync_batchnorm", "--devices", "cpu,cpu"]
        del sys.modules[command.__name__]
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_module("sync_batchnorm", run_name="__main__")

    status, output = forked(body)
    assert status == 0
    assert "\nAll is right, after " in output


@pytest.mark.parametrize(("cuda", "hip"), [("13.0", None), (None, "7.1"), (None, None)])
def test_check_that_raises_is_wrong_and_the_rest_is_checked(cuda, hip, monkeypatch, capsys):
    def parity(devices, dtype):
        if dtype == "float32":
            raise RuntimeError("no memory\n  left")
        return "12.0"

    monkeypatch.setattr(command, "check_parity", parity)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert command.main(["--devices", "cpu,cpu"]) == 1
    *facts, first, second, _, verdict, _ = capsys.readouterr().out.splitlines()
    assert f"{'CUDA':23} {cuda or hip or 'none'}" in facts
    assert [first, second] == [f"{LIBRARY[0]:23} WRONG, RuntimeError: no memory left", f"{LIBRARY[1]:23} right, 12.0"]
    assert verdict.startswith("Something is wrong, after ")
    command.check(["mps", "mps"])
    assert LIBRARY[1] not in capsys.readouterr().out


@pytest.mark.parametrize("devices", ["", "0;1", "cpu,banana", "cpu,-1", "cpu", "cpu,0", "meta,0", "0,3", "cuda,cuda:7"])
def test_bad_devices_end_with_a_sentence(devices, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(SystemExit) as ended:
        command.main(["--devices", devices])
    output, text = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    error = text.splitlines()[-1]
    assert error.startswith("python -m sync_batchnorm: error: argument --devices: expected at least two replicas, all ")
    assert error.endswith(f"but got {devices!r}; torch {torch.__version__} finds 3 CUDA devices")


FOUND = [(0, "", "cpu cpu"), (1, "", "cuda:0 cuda:0"), (2, "", "cuda:0 cuda:1")]
NAMED = [(3, "2, cuda", "cuda:2 cuda"), (0, "mps,mps", "mps mps")]


@pytest.mark.parametrize(("count", "named", "devices"), FOUND + NAMED)
def test_replicas_are_on_the_devices_named_or_found(count, named, devices, monkeypatch):
    called = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(command, "check", called.append)
    command.main(["--devices", named] if named else [])
    assert called == [devices.split()]


@needs_fork
def test_check_that_hangs_ends_the_program_with_its_stack():
    def hangs(*args):
        threading.Event().wait()

    def body():
        os.dup2(sys.stdout.fileno(), 2)
        command.check_parity, command.BUDGET = hangs, 0.1
        command.main(["--devices", "cpu,cpu"])

    assert command.BUDGET < 30  # which the page promises
    status, output = forked(body)
    assert status == 1
    assert f"{LIBRARY[0]:23} Timeout (0:00:00.1" in output
    assert " in hangs\n" in output


CHANGES = {
    "unsynchronized": revert_model,
    "momentum": lambda model: setattr(model[0], "momentum", 0.2),
    "frozen weight": lambda model: model[0].weight.requires_grad_(False),
    "lost weight": lambda model: model[0].weight.data.fill_(1.0),
    "input gradient": lambda model: model[0].register_full_backward_hook(lambda layer, grads, _: (2 * grads[0],)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.filterwarnings(r"ignore:\d+ BatchNorm")
def test_layer_that_differs_in_anything_is_found(monkeypatch, change):
    def convert(model):
        change(convert_model(model))
        return model

    monkeypatch.setattr(command, "convert_model", convert)
    with pytest.raises((RuntimeError, AttributeError)):  # The gradient of a frozen weight is None.
        check_parity(["cpu", "cpu"], "float64")


def test_numbers_that_are_nan_once_are_found(monkeypatch):
    factors, forward = iter([1.0, float("nan")]), DataParallelWithCallback.forward
    monkeypatch.setattr(DataParallelWithCallback, "forward", lambda *args: forward(*args) * next(factors))
    with pytest.raises(RuntimeError, match="largest difference nan"):
        check_parity(["cpu", "cpu"], "float32")


def test_parity_is_that_of_chunks_of_unequal_size(monkeypatch):
    step = Mock(side_effect=command.step)
    monkeypatch.setattr(command, "step", step)
    check_parity(["cpu"] * 3, "float64")
    for call in step.call_args_list:
        assert {len(chunk) for chunk in call.args[1].chunk(3)} == {1, 2}
