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
from multiprocessing import connection
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest
import torch
from conftest import device_lists
from forks import forked, needs_fork
from helpers import as_devices
from simulated_gpus import is_simulated

from sync_batchnorm import DataParallelWithCallback, convert_model, revert_model
from sync_batchnorm import __main__ as command
from sync_batchnorm.__main__ import check_cost, check_parity, outcome, supervised

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

ROOT = Path(__file__).parents[1]
COPIES = [f"copy cuda:{a} -> cuda:{b}" for a in range(3) for b in range(3) if a != b]
NCCL = ["NCCL broadcast to all", "NCCL between processes"]
LIBRARY = ["parity in float32", "parity in float64", "cost, synchronized", "cost, not synchronized"]


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that there are three GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(command, "describe", lambda device: "imitated")


@pytest.fixture
def forking(monkeypatch):
    """Let checks run in processes that start at once, with all that is replaced here, and hang after half a second."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork a process")
    monkeypatch.setattr(command, "PROCESSES", multiprocessing.get_context("fork"))
    monkeypatch.setattr(command, "SILENCE", 0.5)


def imitate(monkeypatch, broken):
    """Let the checks that `broken` names, with their result, fail, and all others succeed."""

    def results(checks, deadline):
        return {name: (name not in broken, broken.get(name, "12.0 GB/s")) for name in checks}

    monkeypatch.setattr(command, "supervised", results)


def report_of(capsys, *arguments):
    status = command.main(["--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


# Functions of checks, which other processes find by their names.


def fine(*_):
    return True, "fine"


def wrong():
    return False, "wrong"


def hang(*_):
    time.sleep(1000)


def hang_late(*_):
    # Since Python 3.14, a signal that finds a process forked by a thread outside of a system call is lost. So those
    # who wait for this check have to be in their wait when the signal comes.
    time.sleep(0.2)
    print("hangs", flush=True)
    hang()


def leave():
    os._exit(7)


def crash():
    os.kill(os.getpid(), signal.SIGKILL)


def write_as_a_library():
    os.write(1, b"NCCL version")
    return fine()


def start_slowly():
    time.sleep(0.4)


def supervise(*functions, seconds=60.0):
    """Do checks of these functions, and of several at once where it is a list; return what came of each."""
    checks = {str(i): function if isinstance(function, list) else [function] for i, function in enumerate(functions)}
    return list(supervised(checks, monotonic() + seconds).values())


def test_report_of_this_machine_is_all_right(capsys):
    status = command.main(["--devices", "cpu,cpu,cpu"])
    output, progress = capsys.readouterr()
    *lines, empty, verdict, last = output.splitlines()
    facts = {line[:23].strip(): line[24:] for line in lines}
    assert facts["torch"] == torch.__version__
    assert facts["replicas on"] == "cpu, cpu, cpu"
    assert [facts[f"parity in {dtype}"].split()[-1] for dtype in ("float32", "float64")] == ["1e-04", "1e-10"]
    assert [(name, facts[name].split()[0]) for name in list(facts)[-4:]] == [(name, "right,") for name in LIBRARY]
    assert (status, empty) == (0, "")
    assert verdict.startswith("All is right, after ")
    assert "paste all of this text" in last
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
    assert command.describe("cuda:0") == "GPU cuda:0, 24 GiB"
    count = 3
    assert command.describe("cuda:0") == "GPU cuda:0, 24 GiB, peer-to-peer with none"
    assert command.describe("cuda:1") == "GPU cuda:1, 24 GiB, peer-to-peer with 0 2"
    assert command.describe("cpu").endswith(f", {os.cpu_count()} cores, {torch.get_num_threads()} threads")


@pytest.mark.parametrize("devices", ["", "0;1", "cpu,banana", "cpu,-1", "cpu", "cpu,0", "meta,0", "0,3", "cuda,cuda:7"])
def test_bad_devices_end_with_a_sentence(gpus, devices, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--devices", devices])
    output, text = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    error = text.splitlines()[-1]
    assert error.startswith("python -m sync_batchnorm: error: argument --devices: expected at least two replicas, all ")
    assert error.endswith(f"but got {devices!r}; torch {torch.__version__} finds 3 CUDA devices")


@pytest.mark.parametrize(
    ("count", "arguments", "devices"),
    [
        (0, [], ["cpu", "cpu"]),
        (1, [], ["cuda:0", "cuda:0"]),
        (3, [], ["cuda:0", "cuda:1", "cuda:2"]),
        (3, ["--devices", "2, cuda"], ["cuda:2", "cuda:0"]),
        (0, ["--devices", "mps,mps"], ["mps:0", "mps:0"]),
    ],
)
def test_replicas_are_on_the_devices_named_or_found(gpus, count, arguments, devices, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(command, "check_devices", lambda devices, deadline: {})
    assert report_of(capsys, *arguments)[1]["replicas"] == devices


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        ("cpu,cpu,cpu", LIBRARY),
        ("mps,mps", [name for name in LIBRARY if "float64" not in name]),
        ("0,0", LIBRARY),
        ("0,1,2,0", [*COPIES, *NCCL, *LIBRARY]),
    ],
)
def test_checks_are_those_of_the_kind_and_number_of_devices(gpus, devices, names, monkeypatch, capsys):
    imitate(monkeypatch, {})
    monkeypatch.setattr(command, "outcome", lambda name, function: (True, "12.0 GB/s"))
    clock = iter([100.0, 102.54])
    monkeypatch.setattr(command, "monotonic", lambda: next(clock))
    status, report = report_of(capsys, "--devices", devices)
    assert (status, report["ok"], report["seconds"], report["advice"]) == (0, True, 2.5, [])
    assert list(report["devices"]) == list(dict.fromkeys(report["replicas"]))
    assert report["checks"] == [{"check": name, "ok": True, "result": "12.0 GB/s"} for name in names]


@pytest.mark.parametrize(
    ("broken", "advice"),
    [
        (COPIES[1:], "iommu=pt"),
        ([COPIES[2], *NCCL, *LIBRARY], "iommu=pt"),
        (NCCL, "NCCL_P2P_DISABLE=1"),
        (NCCL[1:], "NCCL_P2P_DISABLE=1"),
        (LIBRARY[1:], "Please report this"),
        (LIBRARY[3:], "Please report this"),
    ],
)
def test_advice_is_for_what_is_wrong_first(gpus, broken, advice, monkeypatch, capsys):
    imitate(monkeypatch, dict.fromkeys(broken, "hangs"))
    status, report = report_of(capsys)
    assert (status, report["ok"]) == (1, False)
    assert [check["check"] for check in report["checks"] if not check["ok"]] == broken
    assert advice in report["advice"][0]


def test_failure_is_marked_and_followed_by_advice(gpus, monkeypatch, capsys):
    imitate(monkeypatch, {COPIES[0]: "RuntimeError: a\n  b"})
    assert command.main([]) == 1
    output = capsys.readouterr().out
    assert f"\n{COPIES[0]}   WRONG, RuntimeError: a b\n" in output
    assert "\nSomething is wrong, after 0.0 seconds.\nCopies between GPUs do not work" in output


def test_exception_in_a_check_becomes_its_result():
    def fail():
        raise RuntimeError("no memory left")

    assert outcome("cost", fail) == (False, "RuntimeError: no memory left")


@pytest.mark.parametrize(
    ("check", "result"),
    [
        (wrong, "wrong"),
        (hang, "hangs, no end after 0.5 seconds"),
        (leave, "its process ended"),
        (crash, "its process ended"),
    ],
)
def test_check_that_is_not_right_is_told_and_the_rest_is_checked(forking, check, result):
    assert supervise(fine, check, fine) == [fine(), (False, result), fine()]
    # A process that has ended counts as active until the thread of its executor, too, has learned of the end.
    left = [process.sentinel for process in multiprocessing.active_children()]
    assert len(connection.wait(left, 0.0)) == len(left)


def test_time_that_is_over_ends_all_checks(forking, monkeypatch):
    monkeypatch.setattr(command, "SILENCE", 1000.0)
    hung, other = supervise(hang, fine, seconds=0.5)
    assert hung[1].startswith("hangs, no end after 0.")
    assert other == (False, "not checked, the time was over")


def test_import_of_torch_in_a_process_is_no_silence(forking, monkeypatch):
    monkeypatch.setattr(command, "start_worker", start_slowly)  # twice: it is also what the first call runs
    assert supervise(fine) == [fine()]


def test_interrupt_ends_hung_checks_without_a_traceback(forking, gpus, monkeypatch):
    monkeypatch.setattr(command, "SILENCE", 1000.0)
    monkeypatch.setattr(command, "check_copy", hang_late)
    ended = forked(lambda: print(command.main([])), interrupt_at="hangs")
    assert ended == (0, f"{COPIES[0]} ...\nhangs\ninterrupted\n130\n")


def test_what_libraries_print_is_no_part_of_the_report(forking, capfd):
    assert supervise(write_as_a_library) == [fine()]
    output, errors = capfd.readouterr()
    assert not output
    assert "NCCL version" in errors


@pytest.mark.watchdog(120)
@pytest.mark.slow
def test_checks_run_in_processes_of_their_own():
    copy, broadcast = partial(command.check_copy, "cpu", "cpu"), partial(command.check_broadcast, ["cpu", "cpu"])
    results = supervise(copy, broadcast, partial(check_parity, ["cpu", "cpu"], "float64"), seconds=100.0)
    assert [ok for ok, _ in results] == [True, False, True]  # NCCL does not support the CPU; the error is the result.


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (0, (True, "cpu and cpu")),
        (1, (False, "1 of 1048576 values arrive wrong")),
        pytest.param(None, (False, "hangs, no end after 3.0 seconds"), marks=pytest.mark.slow),
    ],
)
def test_tensors_of_two_processes_are_added_up(forking, error, result, monkeypatch, tmp_path):
    start, add_up = torch.distributed.init_process_group, torch.distributed.all_reduce

    def imitated(tensor):
        add_up(tensor)
        if torch.distributed.get_rank() == 1:
            tensor[0] += hang() if error is None else error

    monkeypatch.setattr(command, "SILENCE", 3.0)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: start("gloo", **options))
    monkeypatch.setattr(torch.distributed, "all_reduce", imitated)
    ranks = [partial(command.check_nccl, ["cpu", "cpu"], rank, str(tmp_path / "store")) for rank in range(2)]
    assert supervise(ranks, fine) == [result, fine()]


def test_nccl_that_torch_does_not_have_is_no_error(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert command.check_nccl(["cuda:0", "cuda:1"], 0, "") == (True, "not available in this torch")


@pytest.mark.slow  # It takes half a gigabyte.
def test_copy_is_told_with_its_rate(monkeypatch):
    times = iter([1000.0, 1000.5] * 2)
    monkeypatch.setattr(command, "perf_counter", lambda: next(times))
    assert command.check_copy("cpu", "cpu") == (True, "0.1 GB/s")  # 64 MiB in half a second


def test_copy_that_arrives_wrong_is_found(monkeypatch):
    to = torch.Tensor.to

    def lose_the_last(tensor, *args, **kwargs):
        copied = to(tensor, *args, **kwargs).clone()
        copied[-1] = 0
        return copied

    monkeypatch.setattr(torch.Tensor, "to", lose_the_last)
    assert command.check_copy("cpu", "cpu") == (False, "1 of 64 values arrive wrong")


@pytest.mark.parametrize(
    ("wrong", "result"), [([], (True, "3 devices")), ([1, 2], (False, "arrives wrong on cuda:1, cuda:2"))]
)
def test_broadcast_that_arrives_wrong_names_the_devices(monkeypatch, wrong, result):
    def broadcast(sent, devices):
        return [sent + 1 if device.index in wrong else sent for device in devices]

    monkeypatch.setattr(torch.nn.parallel.comm, "broadcast", broadcast)
    assert command.check_broadcast(["cpu", "cuda:1", "cuda:2"]) == result


@pytest.mark.parametrize("devices", device_lists(2))
def test_library_is_checked_on_the_devices_that_are_given(devices):
    devices = list(map(str, as_devices(devices)))
    assert check_parity(devices, "float64")[0]
    ok, result = check_cost(devices, True)
    assert ok
    assert (" ms, host " in result) == ("launches" in result) == (devices[0] != "cpu")


def stay_unsynchronized(model):
    revert_model(model)


def move_twice_as_fast(model):
    model[0].momentum *= 2


def freeze_weight(model):
    model[0].weight.requires_grad_(False)


def double_input_gradient(model):
    model[0].register_full_backward_hook(lambda layer, grads, _: (2 * grads[0],))


@pytest.mark.parametrize("change", [stay_unsynchronized, move_twice_as_fast, freeze_weight, double_input_gradient])
@pytest.mark.filterwarnings("ignore:expected batch norms that synchronize")
def test_layer_that_differs_in_anything_is_found(monkeypatch, change):
    def convert(model):
        change(convert_model(model))
        return model

    monkeypatch.setattr(command, "convert_model", convert)
    assert not outcome("parity", partial(check_parity, ["cpu", "cpu"], "float64"))[0]


def test_numbers_that_are_nan_once_are_found(monkeypatch):
    factors = iter([1.0, float("nan"), 1.0, 1.0])

    class Failing(DataParallelWithCallback):
        def forward(self, input):
            return super().forward(input) * next(factors)

    monkeypatch.setattr(command, "DataParallelWithCallback", Failing)
    ok, result = check_parity(["cpu", "cpu"], "float32")
    assert not ok
    assert "largest difference nan" in result


def test_parity_is_checked_with_replicas_of_unequal_size(monkeypatch):
    sizes = set()

    def convert(model):
        model[0].register_forward_pre_hook(lambda layer, args: sizes.add(len(args[0])))
        return convert_model(model)

    monkeypatch.setattr(command, "convert_model", convert)
    check_parity(["cpu", "cpu"], "float64")
    assert sizes == {1, 2}


def test_costs_of_both_kinds_of_layers_are_named(monkeypatch):
    monkeypatch.setattr(command, "check_parity", fine)
    monkeypatch.setattr(command, "check_cost", lambda devices, synchronized: (synchronized, ""))
    found = command.check_devices(["cpu", "cpu"], 0.0)
    assert (found["cost, synchronized"], found["cost, not synchronized"]) == ((True, ""), (False, ""))


@pytest.mark.parametrize("synchronized", [True, False])
def test_cost_is_measured_with_and_without_synchronization(monkeypatch, synchronized):
    steps, num_threads = [], [4]

    def step(net, input, grad):
        steps.append((type(net.module[0]).__name__, len(net.module), input.shape, num_threads[-1]))

    monkeypatch.setattr(command, "step", step)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", num_threads.append)
    assert check_cost(["cpu", "cpu"], synchronized)[0]
    name = "SynchronizedBatchNorm2d" if synchronized else "BatchNorm2d"
    assert steps == [(name, 10, (8, 128, 28, 28), 2)] * 8
    assert num_threads == [4, 2, 4]


@pytest.mark.parametrize(
    ("launches", "has_profiler", "counted"),
    [(15, True, "1.5 launches"), (0, True, "launches not available"), (15, False, "launches not available")],
)
def test_cost_on_gpus_is_that_of_one_layer(monkeypatch, launches, has_profiler, counted):
    clock, costs = [0.0], iter(range(8, -1, -1))

    def event(device, is_span=False):
        return SimpleNamespace(device_type=SimpleNamespace(name=device), is_user_annotation=is_span)

    events = [event("CPU"), event("CUDA", True)] + [event("CUDA")] * launches
    activities = {torch.profiler.ProfilerActivity.CUDA} if has_profiler else set()
    monkeypatch.setattr(command, "perf_counter", lambda: sum(clock))
    monkeypatch.setattr(command, "wait_for", lambda devices: clock.append(2.0))  # seconds on the GPUs
    monkeypatch.setattr(command, "step", lambda *_: clock.append(next(costs)))  # on the host
    monkeypatch.setattr(command, "supported_activities", lambda: activities)
    monkeypatch.setattr(command, "profile", lambda **_: nullcontext(SimpleNamespace(events=lambda: events)))
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)
    monkeypatch.setattr(torch, "randn", lambda *_, device: torch.zeros(2))
    assert check_cost(["cuda:0", "cuda:1"], True) == (True, f"650.00 ms, host 450.00 ms, {counted}")


# The threads of autograd for GPUs do not survive a fork, so it is a Python that has not computed anything.
SIMULATED = """
import multiprocessing, os, sys
sys.path.insert(0, "tests")
from simulated_gpus import simulate
simulate(int(os.environ["SIMULATED_GPUS"]))
from sync_batchnorm import __main__ as command
command.PROCESSES = multiprocessing.get_context("fork")
os._exit(command.main())
"""


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.watchdog(60)
def test_gpus_of_this_machine_are_all_right():
    program = ["-c", SIMULATED] if is_simulated() else ["-m", "sync_batchnorm"]
    ended = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(" ms, host ") == ended.stdout.count("launches") == 2
    several = torch.cuda.device_count() > 1
    assert all((name in ended.stdout) == several for name in (*NCCL, "copy cuda:0 -> cuda:1", "peer-to-peer"))
