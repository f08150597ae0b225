"""The self-check: what it reports, how it ends, and what happens to checks that hang; programs imitate GPUs."""

from __future__ import annotations

import json
import os
import runpy
import sys
import textwrap
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import device_lists
from helpers import as_devices
from simulated_gpus import is_simulated

from sync_batchnorm import DataParallelWithCallback, convert_model, selfcheck
from sync_batchnorm import __main__ as command
from sync_batchnorm.selfcheck import Finding, Item, items_for, run

PAIR = [Item("copy", ("cuda:0", "cuda:1")), Item("copy", ("cuda:1", "cuda:0"))]

# A program in place of the checks, as a command for `run`: it finds what its body yields for each item.
PROGRAM = """
import json, os, sys, time
def say(ok, result):
    print("finding: " + json.dumps([ok, result]), flush=True)
{before}
say(True, "ready")
for kind, devices in json.loads(sys.argv[1]):
    print("what libraries print")
    {body}
"""


def program(body: str, before: str = "") -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(body=body, before=before)]


def soon(seconds: float = 60.0) -> float:
    return monotonic() + seconds


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there are three GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(command, "describe", lambda device: "a GPU that is played")


def play(monkeypatch: pytest.MonkeyPatch, broken: dict[str, str]) -> list[Item]:
    """Let the items that `broken` names, with their result, fail, and all others succeed; return what is run."""
    ran: list[Item] = []

    def fake(items: list[Item], deadline: float) -> list[Finding]:
        ran.extend(items)
        return [Finding(item, str(item) not in broken, broken.get(str(item), "12.0 GB/s")) for item in items]

    monkeypatch.setattr(command, "run", fake)
    return ran


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = command.main(["--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_table_of_this_machine_is_all_right(capsys):
    status = command.main(["--devices", "cpu,cpu,cpu"])
    output, progress = capsys.readouterr()
    lines = output.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert {len(line) for line in table} == {len(table[0])}
    assert {line.count("|") for line in table} == {4}
    rows = dict(line.split("|")[1:3] for line in table)
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    assert rows["torch"] == torch.__version__
    assert rows["replicas on"] == "cpu, cpu, cpu"
    assert rows["parity in float32"].endswith("allowed 1e-04")
    assert rows["parity in float64"].endswith("allowed 1e-10")
    assert "ms synchronized" in rows["time"]
    assert lines[-1].startswith("All is right, after ")
    assert status == 0
    assert progress.splitlines() == ["parity in float32 ...", "parity in float64 ...", "time ..."]


@pytest.mark.watchdog(60)
def test_module_runs_as_a_program_and_prints_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sync_batchnorm", "--json", "--devices", "cpu,cpu"])
    monkeypatch.delitem(sys.modules, command.__name__)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sync_batchnorm", run_name="__main__")
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert report["ok"] is True
    assert report["replicas"] == ["cpu", "cpu"]
    assert [check["check"] for check in report["checks"]] == ["parity in float32", "parity in float64", "time"]
    assert report["versions"]["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["advice"] == []


def test_seconds_are_those_of_the_checks(monkeypatch, capsys):
    play(monkeypatch, {})
    clock = iter([100.0, 102.5])
    monkeypatch.setattr(command, "monotonic", lambda: next(clock))
    assert report_of(capsys, "--devices", "cpu,cpu")[1]["seconds"] == 2.5


def test_devices_are_described_by_what_their_kind_tells(monkeypatch):
    def properties(device):
        return SimpleNamespace(name=f"GPU {device}", total_memory=24 * 2**30)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(command.platform, "processor", lambda: "a chip")
    assert command.describe("cuda:1") == "GPU cuda:1, 24 GiB"
    assert command.describe("mps:0") == "a chip"
    assert command.describe("cpu") == f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"


def test_layer_that_does_not_synchronize_is_found(monkeypatch, capsys):
    monkeypatch.setattr(selfcheck, "convert_model", lambda model: model)
    status, report = report_of(capsys, "--devices", "cpu,cpu")
    assert status == 1
    assert {check["check"]: check["ok"] for check in report["checks"]} == {
        "parity in float32": False,
        "parity in float64": False,
        "time": True,
    }
    assert "report this table" in report["advice"][0]


def move_twice_as_fast(layer):
    layer.momentum *= 2


def freeze_weight(layer):
    layer.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [move_twice_as_fast, freeze_weight])
def test_layer_that_differs_in_anything_else_is_found(monkeypatch, change):
    def convert(model):
        change(convert_model(model)[0])
        return model

    monkeypatch.setattr(selfcheck, "convert_model", convert)
    ok, _ = selfcheck.check_parity("float64", ["cpu", "cpu"])
    assert not ok


def test_numbers_that_are_nan_are_found(monkeypatch):
    errors = iter([1e-9, float("nan")])
    monkeypatch.setattr(selfcheck, "_difference", lambda *_: next(errors))
    ok, result = selfcheck.check_parity("float32", ["cpu", "cpu"])
    assert not ok
    assert "largest difference nan" in result


def test_exception_in_a_check_becomes_its_result(monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(selfcheck, "check_parity", fail)
    finding = selfcheck.check(Item("float32", ("cpu", "cpu")))
    assert finding == (Item("float32", ("cpu", "cpu")), False, "RuntimeError: no memory left")


@pytest.mark.parametrize(
    ("devices", "error"),
    [
        ("", r"expected devices as in 0,1 or cpu,cpu, but got '' in ''"),
        ("0;1", r"expected devices as in 0,1 or cpu,cpu, but got '0;1'"),
        ("cpu,banana", r"but got 'banana' in 'cpu,banana'"),
        ("cpu,-1", r"but got '-1' in 'cpu,-1'"),
        ("cpu", r"expected at least two devices, but got 'cpu'; .* as in cpu,cpu"),
        ("cpu,0", r"expected devices of one kind, but got 'cpu,0'"),
        ("meta,0", r"expected devices of one kind, but got 'meta,0'"),
        ("0,3", r"expected devices of this machine, but got cuda:3, and torch .* finds 3 CUDA devices"),
        ("cuda:0,cuda:7", r"expected devices of this machine, but got cuda:7"),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_bad_devices_end_with_a_sentence(devices, error, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--devices", devices])
    output, text = capsys.readouterr()
    assert ended.value.code == 2
    assert not output
    assert "Traceback" not in text
    with pytest.raises(ValueError, match=error):
        command.parsed_devices(devices)
    assert text.splitlines()[-1].startswith("python -m sync_batchnorm: error: expected ")


def test_interrupt_ends_without_a_traceback(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupt)
    assert command.main(["--devices", "cpu,cpu"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("count", "devices"), [(0, ["cpu", "cpu"]), (1, ["cuda:0", "cuda:0"]), (2, ["cuda:0", "cuda:1"])]
)
def test_devices_found_are_every_gpu_or_two_replicas(count, devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert command.found_devices() == devices


def test_every_ordered_pair_of_gpus_is_checked_once():
    links, library = items_for(["cuda:0", "cuda:1", "cuda:2", "cuda:0"])
    assert [str(item) for item in links] == [
        "copy cuda:0 -> cuda:1",
        "copy cuda:0 -> cuda:2",
        "copy cuda:1 -> cuda:0",
        "copy cuda:1 -> cuda:2",
        "copy cuda:2 -> cuda:0",
        "copy cuda:2 -> cuda:1",
        "broadcast to all",
    ]
    assert [item.kind for item in library] == ["float32", "float64", "time"]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_replicas_of_one_device_have_no_copies_to_check(device):
    assert items_for([device] * 3)[0] == []


@pytest.mark.usefixtures("gpus")
def test_gpus_that_are_connected_go_on_to_parity(monkeypatch, capsys):
    ran = play(monkeypatch, {})
    status, report = report_of(capsys)
    assert status == 0
    assert report["devices"] == dict.fromkeys(["cuda:0", "cuda:1", "cuda:2"], "a GPU that is played")
    assert [item.kind for item in ran] == ["copy"] * 6 + ["broadcast", "float32", "float64", "time"]
    assert not report["advice"]


@pytest.mark.usefixtures("gpus")
def test_broken_copy_names_the_pair_and_the_gpus_that_work(monkeypatch, capsys):
    ran = play(monkeypatch, {"copy cuda:1 -> cuda:0": "9 of 64 values arrive wrong"})
    status, report = report_of(capsys)
    assert status == 1
    assert {item.kind for item in ran} == {"copy", "broadcast"}
    assert [check["check"] for check in report["checks"] if not check["ok"]] == [
        "copy cuda:1 -> cuda:0",
        "parity in float32",
        "parity in float64",
        "time",
    ]
    assert "iommu=pt" in report["advice"][0]
    assert "CUDA_VISIBLE_DEVICES=0,2." in report["advice"][1]


@pytest.mark.usefixtures("gpus")
def test_gpus_that_work_are_named_as_the_environment_names_them(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8932f937,2")
    play(monkeypatch, {"copy cuda:0 -> cuda:2": "hangs"})
    _, report = report_of(capsys)
    assert "CUDA_VISIBLE_DEVICES=5,GPU-8932f937." in report["advice"][1]
    assert report["versions"]["CUDA_VISIBLE_DEVICES"] == "5,GPU-8932f937,2"


@pytest.mark.usefixtures("gpus")
def test_broken_broadcast_asks_for_the_setting_of_nccl(monkeypatch, capsys):
    play(monkeypatch, {"broadcast to all": "hangs"})
    status, report = report_of(capsys)
    assert status == 1
    assert "NCCL_P2P_DISABLE=1" in report["advice"][0]


@pytest.mark.usefixtures("gpus")
def test_failure_is_marked_in_the_table_and_followed_by_advice(monkeypatch, capsys):
    play(monkeypatch, {"copy cuda:0 -> cuda:1": "RuntimeError: a | b\nc"})
    assert command.main([]) == 1
    output = capsys.readouterr().out
    row = next(line for line in output.splitlines() if line.startswith("| copy cuda:0 -> cuda:1"))
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["RuntimeError: a / b c", "NO"]
    assert "Something is wrong, after " in output
    assert output.rstrip().endswith("device_ids=[0, 0].")


def test_findings_of_another_process_arrive():
    findings = run(PAIR, soon(), program('say(devices[0] == "cuda:0", "from " + devices[0])'))
    assert findings == [Finding(PAIR[0], True, "from cuda:0"), Finding(PAIR[1], False, "from cuda:1")]


def test_hung_copy_is_stopped_and_the_rest_is_checked():
    body = 'devices[0] == "cuda:1" or time.sleep(1000); say(True, "fine")'
    findings = run(PAIR, soon(), program(body), silence=1.0)
    assert findings == [Finding(PAIR[0], False, "hangs, no end after 1 seconds"), Finding(PAIR[1], True, "fine")]


def test_crash_in_a_copy_is_told_and_the_rest_is_checked():
    findings = run(PAIR, soon(), program('devices[0] == "cuda:1" or os._exit(7); say(True, "fine")'))
    assert findings == [Finding(PAIR[0], False, "its process ended with status 7"), Finding(PAIR[1], True, "fine")]


def test_line_that_a_crash_cuts_off_is_no_finding():
    findings = run(PAIR[:1], soon(), program('print("finding: [tr", end="", flush=True); os._exit(7)'))
    assert findings == [Finding(PAIR[0], False, "its process ended with status 7")]


def test_time_before_the_first_line_is_no_silence():
    findings = run(PAIR[:1], soon(), program('say(True, "fine")', before="time.sleep(1.5)"), silence=1.0)
    assert findings == [Finding(PAIR[0], True, "fine")]


def test_time_that_is_over_ends_all_checks():
    findings = run(PAIR, soon(0.5), program("time.sleep(1000)"), silence=1000.0)
    assert findings == [
        Finding(PAIR[0], False, "did not end before the time was over"),
        Finding(PAIR[1], False, "not checked, the time was over"),
    ]


@pytest.mark.slow
def test_no_process_is_left_of_a_hung_copy(tmp_path):
    file = tmp_path / "process"
    body = f"open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    run(PAIR[:1], soon(), program(body), silence=1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


@pytest.mark.watchdog(120)
@pytest.mark.slow
def test_checks_run_as_a_program_of_their_own():
    module = [sys.executable, "-m", "sync_batchnorm.selfcheck"]
    kinds = ("copy", "broadcast", "float64")
    copied, broadcast, parity = run([Item(kind, ("cpu", "cpu")) for kind in kinds], soon(100.0), module)
    assert copied.ok
    assert copied.result.endswith(" GB/s")
    assert not broadcast.ok  # NCCL does not support the CPU; the error is the result.
    assert parity.ok


@pytest.mark.slow  # It takes half a gigabyte.
def test_copy_is_told_with_its_rate(monkeypatch):
    times = iter([1000.0, 1000.5] * 2)
    monkeypatch.setattr(selfcheck, "perf_counter", lambda: next(times))
    assert selfcheck.check_copy("cpu", "cpu") == (True, "0.1 GB/s")  # 64 MiB in half a second


def test_copy_that_arrives_wrong_is_found(monkeypatch):
    to = torch.Tensor.to

    def lose_the_last(tensor, *args, **kwargs):
        copied = to(tensor, *args, **kwargs).clone()
        copied[-1] = 0
        return copied

    monkeypatch.setattr(torch.Tensor, "to", lose_the_last)
    assert selfcheck.check_copy("cpu", "cpu") == (False, "1 of 64 values arrive wrong")


@pytest.mark.parametrize("devices", device_lists(2))
def test_parity_is_checked_with_the_devices_that_are_given(devices):
    assert selfcheck.check_parity("float64", list(map(str, as_devices(devices))))[0]


def test_parity_is_checked_with_replicas_of_unequal_size(monkeypatch):
    sizes = set()

    def convert(model):
        model[0].register_forward_pre_hook(lambda layer, args: sizes.add(len(args[0])))
        return convert_model(model)

    monkeypatch.setattr(selfcheck, "convert_model", convert)
    selfcheck.check_parity("float64", ["cpu", "cpu"])
    assert sizes == {1, 2}


@pytest.mark.slow
@pytest.mark.watchdog(120)
def test_findings_before_a_crash_of_the_checks_are_kept(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = """
        import os, sys
        from sync_batchnorm import selfcheck

        def check(item):
            if item.devices[0] == "cuda:1":
                os._exit(7)
            return selfcheck.Finding(item, True, "fine")

        selfcheck.check = check
        selfcheck.main(sys.argv[1])
    """
    findings = run(PAIR, soon(), [sys.executable, "-c", textwrap.dedent(code)])
    assert findings == [Finding(PAIR[0], True, "fine"), Finding(PAIR[1], False, "its process ended with status 7")]


@pytest.mark.parametrize(
    ("wrong", "finding"), [([], (True, "3 devices")), ([1, 2], (False, "arrives wrong on cuda:1, cuda:2"))]
)
def test_broadcast_that_arrives_wrong_names_the_devices(monkeypatch, wrong, finding):
    def broadcast(sent, devices):
        return [sent + 1 if device.index in wrong else sent for device in devices]

    monkeypatch.setattr(torch.nn.parallel.comm, "broadcast", broadcast)
    assert selfcheck.check_broadcast(["cpu", "cuda:1", "cuda:2"]) == finding


@pytest.mark.skipif(is_simulated(), reason="the checks run in processes of their own, which have no simulated GPUs")
@pytest.mark.cuda
@pytest.mark.watchdog(60)
def test_gpus_of_this_machine_are_all_right(capsys):
    status, report = report_of(capsys)
    assert status == 0, report


def test_input_gradient_that_is_wrong_is_a_difference(monkeypatch):
    class Doubling(DataParallelWithCallback):
        def forward(self, input):
            return super().forward(input + (input - input.detach()))

    assert selfcheck._difference(torch.float64, ["cpu"] * 2, 3, 4) < 1e-10
    monkeypatch.setattr(selfcheck, "DataParallelWithCallback", Doubling)
    assert selfcheck._difference(torch.float64, ["cpu"] * 2, 3, 4) > 1e-3


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_time_of_a_layer_is_taken_on_two_gpus():
    assert "ms synchronized" in selfcheck.check_time(["cuda:0", "cuda:1"])


def test_gradient_that_is_missing_is_a_difference():
    tensor = torch.ones(3)
    assert selfcheck._error(tensor, None) == selfcheck._error(None, tensor) == float("inf")
    assert selfcheck._error(tensor, tensor) == 0.0
