"""The self-check: what it reports, how it ends, and what happens to checks that hang; functions imitate GPUs."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import device_lists
from forks import forked, needs_fork
from helpers import as_devices
from simulated_gpus import is_simulated

from sync_batchnorm import DataParallelWithCallback, convert_model
from sync_batchnorm import __main__ as command
from sync_batchnorm.__main__ import Item, check_devices, run, supervised

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

ROOT = Path(__file__).parents[1]
COPIES = [f"copy cuda:{a} -> cuda:{b}" for a in range(3) for b in range(3) if a != b]
LIBRARY = ["parity in float32", "parity in float64", "time"]
COSTS = ["host time a layer", "launches a layer"]


def soon(seconds: float = 60.0) -> float:
    return monotonic() + seconds


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there are three GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(command, "describe", lambda device: "a GPU that is played")


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks run in processes that start at once, with all that is replaced here, and hang after half a second."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork a process")
    monkeypatch.setattr(command, "PROCESSES", multiprocessing.get_context("fork"))
    monkeypatch.setattr(command, "SILENCE", 0.5)


def play(monkeypatch: pytest.MonkeyPatch, broken: dict[str, str]) -> list[str]:
    """Let the checks that `broken` names, with their result, fail, and all others succeed; return what is run."""
    ran: list[str] = []

    def fake(items, deadline, meanwhile=()):
        ran.extend(item.name for item in items)
        return {item: (item.name not in broken, broken.get(item.name, "12.0 GB/s")) for item in items}

    monkeypatch.setattr(command, "run", fake)
    return ran


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = command.main(["--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def copies(*functions: Any) -> list[Item]:
    """Return checks of GPUs which are these functions."""
    return [Item(f"copy {i}", ("cuda:0", "cuda:1"), function) for i, function in enumerate(functions)]


def fine(*_: Any) -> tuple[bool, str]:
    return True, "fine"


def hang(*_: Any) -> Any:
    time.sleep(1000)


def test_table_of_this_machine_is_all_right(capsys):
    status = command.main(["--devices", "cpu,cpu,cpu"])
    output, progress = capsys.readouterr()
    *table, _, verdict, last = output.splitlines()
    assert {(len(line), line.count("|")) for line in table} == {(len(table[0]), 4)}
    rows = dict(map(str.strip, line.split("|")[1:3]) for line in table)
    assert rows["torch"] == torch.__version__
    assert rows["replicas on"] == "cpu, cpu, cpu"
    assert rows["parity in float32"].endswith("allowed 1e-04")
    assert rows["parity in float64"].endswith("allowed 1e-10")
    assert "ms synchronized" in rows["time"]
    assert [line.split("|")[3].strip() for line in table[-4:]] == ["", "yes", "yes", "yes"]
    assert verdict.startswith("All is right, after ")
    assert "paste all of this text" in last
    assert status == 0
    assert progress.splitlines() == [f"{name} ..." for name in LIBRARY]


@needs_fork
def test_module_runs_as_a_program_and_prints_json():
    def body():
        sys.argv, sys.stderr = ["sync_batchnorm", "--json", "--devices", "cpu,cpu"], io.StringIO()
        del sys.modules[command.__name__]
        runpy.run_module("sync_batchnorm", run_name="__main__")

    status, output = forked(body)
    report = json.loads(output)
    assert (status, report["ok"], report["replicas"], report["advice"]) == (0, True, ["cpu", "cpu"], [])
    assert [check["check"] for check in report["checks"]] == LIBRARY
    assert report["versions"]["Python"] == ".".join(map(str, sys.version_info[:3]))


def test_devices_are_described_by_what_their_kind_tells(monkeypatch):
    def properties(device):
        return SimpleNamespace(name=f"GPU {device}", total_memory=24 * 2**30)

    count, reached = 1, {("cuda:1", 0), ("cuda:1", 2)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair in reached)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(command.platform, "processor", lambda: "a chip")
    assert command.describe("cuda:0") == "GPU cuda:0, 24 GiB"
    count = 3
    assert command.describe("cuda:0") == "GPU cuda:0, 24 GiB, peer-to-peer with none"
    assert command.describe("cuda:1") == "GPU cuda:1, 24 GiB, peer-to-peer with 0 2"
    assert command.describe("mps:0") == "a chip"
    assert command.describe("cpu") == f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"


def test_layer_that_does_not_synchronize_is_found(monkeypatch, capsys):
    monkeypatch.setattr(command, "convert_model", lambda model: model)
    status, report = report_of(capsys, "--devices", "cpu,cpu")
    assert status == 1
    assert [check["ok"] for check in report["checks"]] == [False, False, True]
    assert "report this" in report["advice"][0]


def move_twice_as_fast(model):
    model[0].momentum *= 2


def freeze_weight(model):
    model[0].weight.requires_grad_(False)


def double_input_gradient(model):
    model[0].register_full_backward_hook(lambda layer, grads, _: (2 * grads[0],))


@pytest.mark.parametrize("change", [move_twice_as_fast, freeze_weight, double_input_gradient])
def test_layer_that_differs_in_anything_else_is_found(monkeypatch, change):
    def convert(model):
        change(convert_model(model))
        return model

    monkeypatch.setattr(command, "convert_model", convert)
    assert not command.check(Item("parity", ("cpu", "cpu"), partial(command.check_parity, "float64")))[0]


def test_numbers_that_are_nan_once_are_found(monkeypatch):
    factors = iter([1.0, float("nan"), 1.0, 1.0])

    class Failing(DataParallelWithCallback):
        def forward(self, input):
            return super().forward(input) * next(factors)

    monkeypatch.setattr(command, "DataParallelWithCallback", Failing)
    ok, result = command.check_parity("float32", ["cpu", "cpu"])
    assert not ok
    assert "largest difference nan" in result


def test_exception_in_a_check_becomes_its_result():
    def fail(devices):
        raise RuntimeError(f"no memory left on {devices[0]}")

    assert command.check(Item("time", ("cpu",), fail)) == (False, "RuntimeError: no memory left on cpu")


@pytest.mark.parametrize(
    ("devices", "error"),
    [
        ("", r"expected devices as in 0,1 or cpu,cpu, but got ''"),
        ("0;1", r"expected devices as in 0,1 or cpu,cpu, but got '0;1'"),
        ("cpu,banana", r"but got 'cpu,banana'"),
        ("cpu,-1", r"but got 'cpu,-1'"),
        ("cpu", r"expected at least two devices, but got 'cpu'; .* as in cpu,cpu"),
        ("cpu,0", r"expected devices of one kind, but got 'cpu,0'"),
        ("meta,0", r"expected devices of one kind, but got 'meta,0'"),
        ("0,3", r"expected devices of this machine, but got '0,3', and torch .* finds 3 CUDA devices"),
        ("cuda:0,cuda:7", r"expected devices of this machine, but got 'cuda:0,cuda:7'"),
    ],
)
def test_bad_devices_end_with_a_sentence(gpus, devices, error, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--devices", devices])
    output, text = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert "Traceback" not in text
    with pytest.raises(ValueError, match=error):
        command.parsed_devices(devices)
    assert text.splitlines()[-1].startswith("python -m sync_batchnorm: error: expected ")


@pytest.mark.parametrize(("count", "devices"), [(0, "cpu,cpu"), (1, "cuda:0,cuda:0"), (2, "cuda:0,cuda:1")])
def test_devices_found_are_every_gpu_or_two_replicas(count, devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert command.found_devices() == devices
    assert command.parsed_devices(devices) == tuple(devices.split(","))


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "mps:0"])
def test_replicas_of_one_device_have_no_connections_to_check(device, monkeypatch):
    ran = play(monkeypatch, {})
    check_devices((device,) * 3, soon())
    assert ran == [name for name in LIBRARY if "mps" not in device or "float64" not in name]


def test_gpus_that_are_connected_go_on_to_the_library(gpus, monkeypatch, capsys):
    ran = play(monkeypatch, {})
    clock = iter([100.0, 102.54])
    monkeypatch.setattr(command, "monotonic", lambda: next(clock))
    status, report = report_of(capsys)
    assert (status, report["seconds"], report["advice"]) == (0, 2.5, [])
    assert report["devices"] == dict.fromkeys(["cuda:0", "cuda:1", "cuda:2"], "a GPU that is played")
    assert ran == [*COPIES, "broadcast to all", *LIBRARY, *COSTS, "NCCL, two processes"]


@pytest.mark.parametrize(
    ("variable", "broken", "working"),
    [("", "copy cuda:1 -> cuda:0", "0,2"), ("5,GPU-8932f937,2", "copy cuda:0 -> cuda:2", "5,GPU-8932f937")],
)
def test_broken_copy_names_the_pair_and_the_gpus_that_work(gpus, variable, broken, working, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    ran = play(monkeypatch, {broken: "9 of 64 values arrive wrong"})
    status, report = report_of(capsys, "--devices", "0,1,2,0")
    assert status == 1
    assert ran == [*COPIES, "broadcast to all", "NCCL, two processes"]
    assert [check["check"] for check in report["checks"] if not check["ok"]] == [broken, *LIBRARY, *COSTS]
    assert "iommu=pt" in report["advice"][0]
    assert f"CUDA_VISIBLE_DEVICES={working}." in report["advice"][1]
    assert report["versions"]["CUDA_VISIBLE_DEVICES"] == variable


@pytest.mark.parametrize("broken", ["broadcast to all", "NCCL, two processes"])
def test_nccl_that_is_broken_asks_for_its_setting(gpus, broken, monkeypatch, capsys):
    ran = play(monkeypatch, {broken: "hangs"})
    status, report = report_of(capsys)
    assert status == 1
    assert ("time" in ran) == (broken != "broadcast to all")
    assert "NCCL_P2P_DISABLE=1" in report["advice"][0]


def test_failure_is_marked_in_the_table_and_followed_by_advice(gpus, monkeypatch, capsys):
    play(monkeypatch, {"copy cuda:0 -> cuda:1": "RuntimeError: a | b\nc"})
    assert command.main([]) == 1
    output = capsys.readouterr().out
    row = next(line for line in output.splitlines() if line.startswith("| copy cuda:0 -> cuda:1"))
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["RuntimeError: a / b c", "NO"]
    assert "Something is wrong, after " in output
    assert output.splitlines()[-2].endswith("device_ids=[0, 0].")


@pytest.mark.parametrize(
    ("check", "result"),
    [
        (lambda _: (False, "wrong"), (False, "wrong")),
        (hang, (False, "hangs, no end after 0.5 seconds")),
        (lambda _: os._exit(7), (False, "its process ended with status 7")),
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), (False, "its process ended with status -9")),
    ],
    ids=["wrong", "hangs", "exits", "crashes"],
)
def test_copy_that_is_not_right_is_told_and_the_rest_is_checked(forking, check, result):
    items = copies(fine, check, fine)
    assert list(run(items, soon()).items()) == list(zip(items, [fine(), result, fine()], strict=True))
    assert not multiprocessing.active_children()


def test_time_that_is_over_ends_all_checks(forking, monkeypatch):
    monkeypatch.setattr(command, "SILENCE", 1000.0)
    hung, other = run(copies(hang, fine), soon(0.5)).values()
    assert hung[1].startswith("hangs, no end after 0.")
    assert other == (False, "not checked, the time was over")
    assert set(run(copies(fine), soon(-1.0)).values()) == {other}


def test_import_of_torch_in_a_process_is_no_silence(forking, monkeypatch):
    work = command.work
    monkeypatch.setattr(command, "work", lambda *args: (time.sleep(0.8), work(*args)))
    assert list(run(copies(fine), soon()).values()) == [fine()]


def test_interrupt_ends_hung_checks_without_a_traceback(forking, gpus, monkeypatch):
    monkeypatch.setattr(command, "SILENCE", 1000.0)
    monkeypatch.setattr(command, "check_copy", hang)
    ended = forked(lambda: print(command.main([])), interrupt_at=f"{COPIES[0]} ...")
    assert ended == (0, f"{COPIES[0]} ...\ninterrupted\n130\n")


def test_what_libraries_print_is_no_part_of_the_report(forking, capfd):
    run(copies(lambda _: (bool(os.write(1, b"NCCL version")), "")), soon())
    output, errors = capfd.readouterr()
    assert not output
    assert "NCCL version" in errors


@pytest.mark.watchdog(120)
@pytest.mark.slow
def test_checks_run_in_processes_of_their_own():
    checks = [command.check_copy, command.check_broadcast, partial(command.check_parity, "float64")]
    results = supervised([[Item("", ("cpu", "cpu"), check) for check in checks]], soon(100.0))
    assert [ok for ok, _ in results] == [True, False, True]  # NCCL does not support the CPU; the error is the result.


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (0, (True, "2 devices")),
        (1, (False, "2 of 2097152 values arrive wrong")),
        pytest.param(None, (False, "hangs, no end after 3.0 seconds"), marks=pytest.mark.slow),
    ],
)
def test_tensors_of_two_processes_are_added_up(forking, error, result, monkeypatch):
    start, add_up = torch.distributed.init_process_group, torch.distributed.all_reduce

    def imitated(tensor):
        add_up(tensor)
        if tensor.dim():
            tensor[0] += hang() if error is None else error

    monkeypatch.setattr(command, "SILENCE", 3.0)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: start("gloo", **options))
    monkeypatch.setattr(torch.distributed, "all_reduce", imitated)
    for name in ("check_copy", "check_broadcast", "check_parity", "check_cost"):
        monkeypatch.setattr(command, name, fine)
    check = command.check_nccl
    monkeypatch.setattr(command, "check_nccl", lambda store, rank, devices: check(store, rank, ["cpu", "cpu"]))
    *others, (item, found) = check_devices(("cuda:0", "cuda:1"), soon()).items()
    assert (item.name, item.devices, found) == ("NCCL, two processes", ("cuda:0", "cuda:1"), result)
    assert [found for _, found in others] == [fine()] * 8
    assert not multiprocessing.active_children()


def test_what_torch_does_not_have_is_no_error(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(command, "supported_activities", set)
    assert command.check_nccl("", 0, ["cuda:0", "cuda:1"]) == (True, "not available in this torch")
    assert command.check_cost("launches", (4, 3, 2), ["cpu", "cpu"]) == (True, "not available in this torch")


@pytest.mark.slow  # It takes half a gigabyte.
def test_copy_is_told_with_its_rate(monkeypatch):
    times = iter([1000.0, 1000.5] * 2)
    monkeypatch.setattr(command, "perf_counter", lambda: next(times))
    assert command.check_copy(["cpu", "cpu"]) == (True, "0.1 GB/s")  # 64 MiB in half a second


def test_copy_that_arrives_wrong_is_found(monkeypatch):
    to = torch.Tensor.to

    def lose_the_last(tensor, *args, **kwargs):
        copied = to(tensor, *args, **kwargs).clone()
        copied[-1] = 0
        return copied

    monkeypatch.setattr(torch.Tensor, "to", lose_the_last)
    assert command.check_copy(["cpu", "cpu"]) == (False, "1 of 64 values arrive wrong")


@pytest.mark.parametrize(
    ("wrong", "result"), [([], (True, "3 devices")), ([1, 2], (False, "arrives wrong on cuda:1, cuda:2"))]
)
def test_broadcast_that_arrives_wrong_names_the_devices(monkeypatch, wrong, result):
    def broadcast(sent, devices):
        return [sent + 1 if device.index in wrong else sent for device in devices]

    monkeypatch.setattr(torch.nn.parallel.comm, "broadcast", broadcast)
    assert command.check_broadcast(["cpu", "cuda:1", "cuda:2"]) == result


@pytest.mark.parametrize("devices", device_lists(2))
def test_parity_is_checked_with_the_devices_that_are_given(devices):
    assert command.check_parity("float64", list(map(str, as_devices(devices))))[0]


def test_parity_is_checked_with_replicas_of_unequal_size(monkeypatch):
    sizes = set()

    def convert(model):
        model[0].register_forward_pre_hook(lambda layer, args: sizes.add(len(args[0])))
        return convert_model(model)

    monkeypatch.setattr(command, "convert_model", convert)
    command.check_parity("float64", ["cpu", "cpu"])
    assert sizes == {1, 2}


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("time", "1500.00 ms synchronized, 1000.00 ms not, 1.50 times, (8, 3, 2, 2)"),
        ("host", "4500.00 ms synchronized, 2250.00 ms not, 2.00 times, (8, 3, 2, 2)"),
    ],
)
def test_cost_is_that_of_one_layer_with_gpus_in_the_fastest_step_or_without_in_a_usual_one(monkeypatch, kind, result):
    clock = [0.0]
    costs = iter([cost for step in range(8, 0, -1) for cost in (4.0 * step, 2.0 * step)])  # synchronized, and not
    monkeypatch.setattr(command, "perf_counter", lambda: sum(clock))
    monkeypatch.setattr(command, "wait_for", lambda devices: clock.append(2.0))
    monkeypatch.setattr(command, "step", lambda *_: clock.append(next(costs)))
    assert command.check_cost(kind, (4, 3, 2), ["cpu", "cpu"]) == (True, result)


def test_launches_are_the_events_of_gpus_for_a_layer(monkeypatch):
    def event(device, is_span=False):
        return SimpleNamespace(device_type=SimpleNamespace(name=device), is_user_annotation=is_span)

    counts = iter([9, 7, 6, 2])

    def profile(**_):
        events = [event("CPU"), event("CUDA", True)] + [event("CUDA")] * next(counts)
        return nullcontext(SimpleNamespace(events=lambda: events))

    monkeypatch.setattr(command, "supported_activities", lambda: {torch.profiler.ProfilerActivity.CUDA})
    monkeypatch.setattr(command, "profile", profile)
    result = "1.5 synchronized, 0.5 not, kernels and copies on all GPUs"
    assert command.check_cost("launches", (4, 3, 2), ["cpu", "cpu"]) == (True, result)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["time", "host", "launches"])
def test_cost_of_a_layer_is_measured_on_two_gpus(kind):
    ok, result = command.check_cost(kind, (2, 3, 4), ["cuda:0", "cuda:1"])
    assert ok
    assert " synchronized, " in result or result.startswith("not available")


# The threads of autograd for GPUs do not survive a fork, so it is a Python that has not computed anything.
SIMULATED = """
import multiprocessing, os, sys
sys.path.insert(0, "tests")
from simulated_gpus import simulate
simulate(int(os.environ["SIMULATED_GPUS"]))
from sync_batchnorm import __main__ as command
command.PROCESSES = multiprocessing.get_context("fork")
sys.exit(command.main())
"""


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.watchdog(120)
def test_gpus_of_this_machine_are_all_right():
    program = ["-c", SIMULATED] if is_simulated() else ["-m", "sync_batchnorm"]
    ended = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    several = torch.cuda.device_count() > 1
    assert all((name in ended.stdout) == several for name in (*COSTS, "NCCL, two processes", "peer-to-peer"))
