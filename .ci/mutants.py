"""Break the package in one place at a time, and run the tests that must notice: ``python .ci/mutants.py``.

A mutant is a small change that a test should notice: another comparison, operator or constant, an exchange of
arguments, a condition that always or never holds, a statement or lock that is gone; never in texts and annotations.
Each mutant of a random sample is tried in a copy of the repository, on the CPU and on simulated GPUs: first with the
quick tests of the files and folders that are named like its file, then with those of the others, then with the slow
tests of the former. Prints each mutant and how it ended; exits with 1 if fewer than 95 of 100 have died.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns(".git", ".venv", ".nox", ".*_cache", "__pycache__", "build", "out")  # not in a copy
PLACES = {"cpu": (), "4 gpus": ("--simulated-gpus", "4")}  # with the options of pytest
JOBS = os.cpu_count() or 1
LIMIT = 1200.0  # seconds, after which tests that hang are killed
# Mutants that were read, as they are printed but for the line, and why no test can notice them. A quick test fails for
# one that is no mutant any more.
EQUIVALENT: dict[str, str] = {
    "meeting/coordinator.py: Coordinator.abort: `monotonic() < deadline` -> "
    "`monotonic() <= deadline`": "at one instant only",
    "meeting/coordinator.py: Coordinator._waited: `now > since + self.timeout + LATE` -> "
    "`now >= since + self.timeout + LATE`": "at one instant only",
    "layers/layer.py: _SynchronizedBatchNorm._forward_synchronized: `connection.master_device` -> "
    "`False`": "the master copies the statistics itself, later",
    "meeting/coordinator.py: Coordinator._waited: `self._turn_since > since` -> "
    "`self._turn_since >= since`": "at one instant only",
    'meeting/coordinator.py: Coordinator.begin: `self._lock` -> `__import__("contextlib").nullcontext()`': "a break "
    "just then",
    "meeting/coordinator.py: Coordinator._find_deadlock: `peer not in seen` -> `True`": "it only saves time, since the "
    "first cycle breaks the forward pass",
    "meeting/coordinator.py: Coordinator.leave: `other.waits_in is not None` -> `True`": "it never is None "
    "in those that wait",
    "meeting/coordinator.py: Coordinator.send: `self.span is None and pause is None` -> `False`": "it only saves time",
    "meeting/coordinator.py: Coordinator.abort: `not replica.ended` -> `True`": "no message says it after a break",
    "wrapper/callbacks.py: _uses_batch: `0` -> `1`": "anything but None",
    "wrapper/callbacks.py: execute_replication_callbacks: `is_in_replica()` -> `True`": "it is looked at again",
    "wrapper/data_parallel.py: _ReplicationMixin.replicate: `is_in_replica()` -> `True`": "it is looked at again",
    "__main__.py: check_parity: `9` -> `10`": "images of any size do",
    "__main__.py: check_parity: `9` -> `10` (2)": "images of any size do",
    "__main__.py: check_parity: `1.5` -> `3.0`": "weights of any size do",
    "__main__.py: check_parity: `0` -> `1`": "any seed does",
    "__main__.py: parsed_devices: `0` -> `False`": "the same number",
    "backends/cpu.py: _sums: `sums[:, 1].addcmul_(sums[:, 0], (rounded - mean) * invstd)` -> "
    "`sums[:, 1].addcmul_((rounded - mean) * invstd, sums[:, 0])`": "the same product",
    "call/processes.py: gather_statistics: `dist.all_gather_into_tensor` -> `False`": "its name in an older torch",
    "backends/cpu.py: module: `0.1` -> `0.2`": "a momentum of nothing that is kept",
    "backends/cpu.py: affine: `input.dtype == slope.dtype and not input.is_contiguous()` -> "
    "`True`": "the slower of two operators",
    "backends/cpu.py: affine: `input.dtype == slope.dtype and not input.is_contiguous()` -> "
    "`False`": "the slower of two operators",
    "backends/cpu.py: affine: `input.dtype == slope.dtype and not input.is_contiguous()` -> "
    "`input.dtype == slope.dtype or not input.is_contiguous()`": "the slower of two operators",
    "backends/cpu.py: affine: `input.dtype == slope.dtype` -> `True`": "the slower of two operators",
    "backends/cpu.py: affine: `input.dtype == slope.dtype` -> "
    "`input.dtype != slope.dtype`": "the slower of two operators",
    "backends/cpu.py: affine: `not input.is_contiguous()` -> `True`": "the slower of two operators",
    "backends/cpu.py: affine: `not input.is_contiguous()` -> `input.is_contiguous()`": "the slower of two operators",
    "backends/cpu.py: module: `2048` -> `2049`": "a width that is as good",
    "backends/cpu.py: affine: `0` -> `1`": "memory that the operator does not use in eval mode",
    "backends/cpu.py: _common_terms: `torch.addcmul(offset, slope, mean, value=-1)` -> "
    "`torch.addcmul(offset, mean, slope, value=-1)`": "the same product",
    "backends/cuda.py: Cuda.normalize: `0.0` -> `1.0`": "an eps that the operator does not use beside an invstd",
    'call/processes.py: module: `hasattr(os, "register_at_fork")` -> `True`': "it is False on Windows only",
    'wrapper/random_states.py: module: `hasattr(os, "register_at_fork")` -> `True`': "it is False on Windows only",
    "backends/streams.py: in_order_with_engine: `0` -> `1`": "all devices are of one kind",
    "backends/cpu.py: is_precise: `lowest.item() >= -eps` -> `lowest.item() > -eps`": "at one value only",
    "backends/cpu.py: exact_moments: `0.0` -> `1.0`": "any finite shift does, where the mean is not finite",
    "backends/cpu.py: exact_moments: `0.0` -> `1.0` (2)": "any finite shift does, where the mean is not finite",
    "backends/cpu.py: exact_moments: `0.0` -> `1.0` (3)": "any finite shift does, where the mean is not finite",
    "backends/cpu.py: gradient_sums: `0.0` -> `1.0`": "an eps that the operator does not use beside an invstd",
    "backends/base.py: sent_to: `True` -> `False`": "by the code of torch, no copy between GPUs makes the host wait",
    "backends/base.py: _input_gradient: `True` -> `False`": "the host may wait for a copy",
    "backends/base.py: _fractions: `len(set(sizes)) == 1` -> `False`": "fractions that are all equal",
    "tools/comparing.py: module: `1e-6` -> `2e-06`": "both are far from rounding, and from what a cause makes differ",
    "tools/comparing.py: module: `1e-9` -> `2e-09`": "both are far from rounding, and from what a cause makes differ",
    "tools/comparing.py: module: `1e99` -> `2e+99`": "any number does that is far above the tolerance",
    "tools/comparing.py: gap: `not math.isfinite(difference)` -> `True`": "it only saves time",
    "tools/comparing.py: gap: `difference <= TOLERANCE * floor` -> `False`": "it only saves a look at the values",
    "tools/comparing.py: gap: `difference <= TOLERANCE * floor` -> `difference < TOLERANCE * floor`": "at one value",
    "tools/comparing.py: gap: `relative > TOLERANCE` -> `relative >= TOLERANCE`": "at one value only",
    "tools/comparing.py: gap: `return 0.0` -> `pass`": "it only saves a look at the values",
    "tools/comparing.py: gap: `(actual - expected).nan_to_num(NOT_FINITE, NOT_FINITE, -NOT_FINITE)` -> "
    "`(actual - expected).nan_to_num(NOT_FINITE, -NOT_FINITE, NOT_FINITE)`": "the absolute value is taken",
    "tools/comparing.py: gap: `-NOT_FINITE` -> `NOT_FINITE`": "the absolute value is taken",
    "tools/comparing.py: largest: `math.isfinite(value)` -> `False`": "it only saves time",
    "tools/comparing.py: module: `Rows(0, 1, 1)` -> `Rows(1, 0, 1)`": "it cuts nothing away, either",
    "tools/comparing.py: module: `1` -> `2` (2)": "it cuts nothing away, either",
    "tools/comparing.py: gap: `1.0` -> `2.0`": "any size does, where all values are zero on one device",
    "tools/comparing.py: _numbers: `tensor.layout != torch.strided` -> `True`": "a dense tensor stays what it is",
    "tools/explaining.py: Steps._different_outputs_and_loss: `gap(many.loss, one.loss, max(one.slack, TOLERANCE * "
    "largest(*one.outputs)))` -> `gap(one.loss, many.loss, max(one.slack, TOLERANCE * largest(*one.outputs)))`": "it "
    "differs, by some size, if the other does",
    "tools/explaining.py: Steps._different_gradients: `gap(actual, expected, floor)` -> "
    "`gap(expected, actual, floor)`": "it differs, by some size, if the other does",
    "tools/explaining.py: Steps._different_outputs_and_loss: `abs(ratio - 1) < 0.01` -> "
    "`abs(ratio - 1) <= 0.01`": "at one value only",
    "tools/explaining.py: Steps._cause_in_scalars: `gap(weights @ of_replicas, of_one)` -> "
    "`gap(of_one, weights @ of_replicas)`": "it differs, by some size, if the other does",
    "tools/explaining.py: Steps._cause_in_gradient: `ratio < 1` -> `ratio <= 1`": "at one value only",
    "tools/explaining.py: Steps._cause: `gap(many.get(name, one[name]), one[name])` -> "
    "`gap(one[name], many.get(name, one[name]))`": "it differs, by some size, if the other does",
    "tools/explaining.py: _cause_in_call: `_computes_otherwise(difference, converted, call.module)` -> "
    "`_computes_otherwise(difference, call.module, converted)`": "each differs from the other",
    "tools/explaining.py: _computes_otherwise: `difference.probe.tells_apart(converted, original)` -> "
    "`difference.probe.tells_apart(original, converted)`": "each differs from the other",
    "tools/explaining.py: _dependence: `difference.probe is None` -> `False`": "the error is caught, to the same "
    "effect",
    "tools/explaining.py: _computes_otherwise: `difference.probe is not None` -> `True`": "the error is caught, to the "
    "same effect",
    "tools/moments.py: _answers: `True` -> `False`": "the host may wait for a copy",
    "tools/moments.py: _answers: `True` -> `False` (2)": "the host may wait for a copy",
    "tools/moments.py: _answers: `1` -> `2` (5)": "no elements are divided by any number, one is refused",
    "tools/probing.py: Probe.dependence.differs: `gap(_selected(o, d, where, total), _selected(e, d, here, total))` -> "
    "`gap(_selected(e, d, here, total), _selected(o, d, where, total))`": "each differs from the other",
    "tools/probing.py: Probe.dependence: `gap(_selected(e, d, here, total), o)` -> "
    "`gap(o, _selected(e, d, here, total))`": "each differs from the other",
    "tools/probing.py: Probe.tells_apart: `zip(self._outputs(module, everywhere), self._outputs(other, everywhere), "
    "strict=True)` -> `zip(self._outputs(other, everywhere), self._outputs(module, everywhere), "
    "strict=True)`": "each differs from the other",
    "tools/probing.py: Probe.tells_apart: `gap(actual, expected)` -> `gap(expected, actual)`": "each differs from the "
    "other",
    'tools/probing.py: Probe._outputs: `torch.no_grad()` -> `__import__("contextlib").nullcontext()`': "it only saves "
    "memory",
    "tools/recording.py: Trace.__init__: `0` -> `1`": "what is around all calls has a key that nobody reads",
    'tools/recording.py: Trace.__init__: `_Running(None, ("", 0), Counter(), None, None)` -> '
    "`_Running(('', 0), None, Counter(), None, None)`": "what is around all calls is no module",
    "tools/recording.py: InReplica._gap: `number == kept.number` -> `False`": "it only saves time",
    "tools/one_device.py: assert_matches_one_device: `0` -> `1`": "there are two, at least",
    "tools/one_device.py: _random_loss: `len(outputs) > len(grads)` -> `len(outputs) >= len(grads)`": "one alone is "
    "itself",
    "tools/one_device.py: _random_loss: `loss + weighted.sum().real` -> `loss - weighted.sum().real`": "another random "
    "gradient",
    "tools/one_device.py: _random_loss: `(tensor if tensor.shape == grad.shape else tensor.double().mean()) * grad` -> "
    "`(tensor if tensor.shape == grad.shape else tensor.double().mean()) / grad`": "another random gradient",
    "wrapper/scatter_gather.py: scatter: `leaves is None` -> `True`": "it only saves time",
    "backends/cpu.py: _split: `-1` -> `1`": "it only saves time to compute several rows side by side",
    "layers/layer.py: _SynchronizedBatchNorm: `0` -> `1`": "any number that unconverted layers share",
    "call/node.py: _SyncBatchNorm.backward: `not all(ctx.needs_input_grad[3:])` -> `True`": "it only saves time",
    "call/processes.py: module: `1` -> `2`": "any number does to begin with",
    "call/saved.py: graph_source: `0` -> `1`": "a tensor of any size does",
    "call/exchange.py: sync_batch_norm: `input.is_leaf` -> `True`": "an alias more",
    "call/exchange.py: _on_all: `device not in pairs` -> `True`": "the same numbers, in other memory of the master",
    "wrapper/random_states.py: _generators: `1` -> `2`": "the state of a neighbour, which nobody uses, goes along",
    "wrapper/data_parallel.py: _ReplicationMixin.replicate: `0.0` -> `1.0`": "no replica runs yet",
    "wrapper/random_states.py: _generators: `0` -> `False`": "the same number",
    **{
        f'wrapper/random_states.py: RandomStates.{name}: `_lock` -> `__import__("contextlib").nullcontext()`': why
        for name in ("__init__", "begin_turn", "restore_caller")
        for why in ["only if the garbage collector runs at one instant"]
    },
    "refusals.py: checked_timeout: `0 < timeout <= threading.TIMEOUT_MAX` -> "
    "`0 < timeout < threading.TIMEOUT_MAX`": "at one value only",
    "__main__.py: module: `5.0` -> `10.0`": "any time that is far below the budget does",
    "call/recomputation.py: _recall: `_are_equal(call.statistics, statistics)` -> "
    "`_are_equal(statistics, call.statistics)`": "the same",
    "call/recomputation.py: _recall: `_are_equal(call.mean_invstd, first.mean_invstd)` -> "
    "`_are_equal(first.mean_invstd, call.mean_invstd)`": "the same",
    "call/recomputation.py: _are_equal: `map(torch.equal, map(torch.nan_to_num, one), "
    "map(torch.nan_to_num, other))` -> "
    "`map(torch.equal, map(torch.nan_to_num, other), map(torch.nan_to_num, one))`": "the same",
    "torch_private.py: uncompiled.run: `disabled is None` -> `True`": "it only saves time to keep the function",
    "wrapper/devices.py: check_copies: `65536` -> `65537`": "any number of them does",
    "wrapper/devices.py: check_copies: `65536 + i` -> `65536 - i`": "any number of them does",
    "wrapper/copies.py: _copies: `0` -> `1`": "any name of a group that is no id of a tensor",
    "wrapper/copies.py: _Broadcast.backward: `not grads_of[i][0].is_complex()` -> `True`": "only NCCL refuses them",
    "wrapper/copies.py: _Broadcast.backward: `not torch.is_grad_enabled()` -> `True`": "only NCCL's have no graph",
    "wrapper/copies.py: _Broadcast.backward: `0` -> `1`": "all gradients of a tensor are complex, or none is",
    "backends/cuda.py: _input_gradient: `not input.is_contiguous()` -> `True`": "torch makes it contiguous too",
    "backends/base.py: per_channel: `like.dim() > 2` -> `True`": "a view of the same shape",
    "backends/base.py: per_channel: `like.dim() > 2` -> `like.dim() >= 2`": "a view of the same shape",
    "backends/base.py: BatchStatistics.divisor: `1` -> `2`": "no elements have sums of zero, one is refused",
    "backends/base.py: Backend.merge: `1` -> `2`": "no elements have sums of zero, one is refused",
    "backends/base.py: invstd_of: `var < eps` -> `var <= eps`": "at one value only",
    "backends/cuda.py: module: `1e-30` -> `2e-30`": "any number does that is nearly zero",
    "backends/cuda.py: _counts: `len(_made) >= 1024` -> `False`": "it only bounds the memory",
    "backends/cuda.py: _counts: `len(_made) >= 1024` -> `len(_made) > 1024`": "any bound of the memory does",
    "backends/cuda.py: _counts: `1024` -> `1025`": "any bound of the memory does",
    "backends/streams.py: are_default: `other == device` -> `False`": "the same stream is asked for twice",
    "meeting/coordinator.py: Coordinator.has_given_up: `monotonic() > self._end_of_patience` -> "
    "`monotonic() >= self._end_of_patience`": "at one instant only",
    "meeting/coordinator.py: Coordinator.abort: `sleep(0.01)` -> `pass`": "it only saves the processor",
    "meeting/coordinator.py: Coordinator.abort: `0.01` -> `0.02`": "any short time does",
    "meeting/coordinator.py: Coordinator._find_deadlock: `seen.add(peer)` -> "
    "`pass`": "it only saves time, since the first cycle breaks the forward pass",
    "wrapper/copies.py: _copy_attributes: `original.__dict__` -> `True`": "it only saves time",
    "wrapper/copies.py: _build: `sys._is_gil_enabled()` -> `False`": "only Python 3.13 and later have it",
    "wrapper/copies.py: _build: `children or bound` -> `True`": "it only saves time",
    "wrapper/copies.py: _build: `hooks` -> `True`": "it only saves time",
    'wrapper/copies.py: _copy: `getattr(replicate, "__func__", None) is not nn.Module._replicate_for_data_parallel` -> '
    "`True`": "torch does the same in more time",
    "call/exchange.py: _exchange_on_default_streams: `are_default(here, master)` -> `False`": "it only saves time",
    "call/exchange.py: _exchange_on_default_streams: `are_default(here, master)` -> "
    "`are_default(master, here)`": "the same",
    "layers/layer.py: _let_torch_check: "
    "`tensor.dtype == dtype and tensor.device == device and tensor.shape == shape` -> "
    "`False`": "it only saves time",
    "layers/layer.py: _let_torch_check: `torch.no_grad()` -> "
    '`__import__("contextlib").nullcontext()`': "nobody uses what is returned",
    "layers/layer.py: _let_torch_check: `0.0` -> `1.0`": "a momentum of copies that nobody uses",
    "__main__.py: check_parity: `0.5` -> `1.0`": "weights of any size do",
    "__main__.py: check_parity: `torch.manual_seed(0)` -> `pass`": "any numbers do",
    "__main__.py: check_parity: `nn.Sequential(nn.BatchNorm2d(16), nn.SiLU(), nn.BatchNorm2d(16))` -> "
    "`nn.Sequential(nn.BatchNorm2d(16), nn.BatchNorm2d(16), nn.SiLU())`": "any net does",
    "__main__.py: check_parity: `zip(in_replicas, on_one_device, strict=True)` -> "
    "`zip(on_one_device, in_replicas, strict=True)`": "one divides by the other of two values that are nearly equal",
    "__main__.py: check_parity: `1.0` -> `2.0`": "the least value to divide by is any that is not small",
    "__main__.py: check_parity: `largest <= TOLERANCES[dtype]` -> `largest < TOLERANCES[dtype]`": "at one value only",
    "call/processes.py: module: `0` -> `1`": "any number does to begin with",
    "call/processes.py: Peers: `0` -> `1`": "any number that all processes share",
    "call/node.py: _SyncBatchNorm.backward: `3` -> "
    "`4`": "autograd drops what it does not need, but for tensors that are None",
    "wrapper/trees.py: leaves_of: `type(tree) is list and {*map(type, tree)} == {Tensor}` -> "
    "`False`": "it only saves time",
    "wrapper/trees.py: leaves_of: `return tree` -> `pass`": "it only saves time",
    "wrapper/trees.py: _add_leaves: `tree is like` -> `False`": "the same children in the same order",
    "wrapper/trees.py: _rebuilt_dataclass: `getattr(made, name) is not item` -> `True`": "it sets what is there",
    "wrapper/scatter_gather.py: scatter: `leaves is tree` -> `False`": "it only saves time",
    "wrapper/scatter_gather.py: _are_equal: `return False` -> `pass`": "None is as false",
    "wrapper/scatter_gather.py: _differences: `_are_equal(first, other)` -> `_are_equal(other, first)`": "the same",
    "wrapper/arguments.py: number_of_chunks: `len(leaves) > len(inputs) + len(kwargs)` -> `True`": "it only saves time",
    "wrapper/arguments.py: number_of_chunks: `len(leaves) > len(inputs) + len(kwargs)` -> "
    "`len(leaves) >= len(inputs) + len(kwargs)`": "it only saves time",
    "wrapper/arguments.py: number_of_chunks: `len(inputs) + len(kwargs)` -> "
    "`len(inputs) - len(kwargs)`": "it only saves time",
    "wrapper/arguments.py: module: `2` -> `3`": "any number does that no list is long",
    "wrapper/threads.py: _run_in_turns: `before != after` -> `True`": "it only saves time",
    "wrapper/threads.py: _versions: `0` -> `1`": "any number does",
    "wrapper/devices.py: check_copies: `len(devices) < 2` -> "
    "`False`": "it only saves time, since one device makes no pair",
    'wrapper/devices.py: check_copies: `next(iter(devices)).type == "cuda"` -> '
    "`True`": "no other kind of accelerator is simulated",
    "wrapper/devices.py: check_copies: `0` -> `1`": "no other kind of accelerator is simulated",
    "meeting/records.py: ReplicaState: `True` -> `False`": "slots save memory and time",
    "refusals.py: warn: `frame.f_back is not None` -> `True`": "no stack is of the package and torch alone",
    "refusals.py: check_replicable: `0` -> `1`": "a tensor of any size does",
    "refusals.py: check_replicable: `compiled_type` -> `True`": "it only saves time",
    "layers/check.py: assert_synchronized: `1` -> `False`": "no number of replicas is less than either",
    "wrapper/random_states.py: RandomStates.__init__: `seed + replica_id` -> `seed - replica_id`": "other seeds",
    "wrapper/random_states.py: RandomStates.restore_caller: `map(torch.equal, states, self._at_first[i])` -> "
    "`map(torch.equal, self._at_first[i], states)`": "the same",
    "backends/base.py: Backend.gradients: `torch.is_grad_enabled()` -> "
    "`True`": "it only saves time: the statistics have the same values",
    "backends/cpu.py: Cpu.statistics: `not is_precise(mean, var, eps)` -> "
    "`True`": "it only saves time: pieces that are precise are so together",
    "backends/cpu.py: gradient_sums: `grad_output.stride() != input.stride()` -> "
    "`True`": "a copy that has the same strides again",
    "wrapper/copies.py: _build: `has_lock` -> `False`": "it only saves objects",
    "wrapper/data_parallel.py: _ReplicationMixin.replicate: `len(set(devices)) < len(devices)` -> "
    "`True`": "only replicas that take turns ask for it",
    "wrapper/data_parallel.py: _ReplicationMixin.replicate: `len(set(devices)) < len(devices)` -> "
    "`len(set(devices)) <= len(devices)`": "only replicas that take turns ask for it",
    "call/exchange.py: _exchange: `type(part.saved) is not Saved` -> `True`": "it only saves memory",
    "call/exchange.py: _merge: `part.weight is not first.weight` -> "
    "`True`": "equal weights may be taken for different ones, which takes longer",
    "call/node.py: make_node: `any([tensor is not None and tensor.requires_grad for tensor in tensors])` -> "
    "`True`": "it only saves time",
    "meeting/coordinator.py: module: `300.0` -> `600.0`": "any long time does",
    "meeting/coordinator.py: module: `1.0` -> `2.0` (2)": "any time does that is about a second",
    "meeting/coordinator.py: Coordinator._wait: `0.0` -> `1.0`": "a second later",
    "call/node.py: make_node: `tensor.requires_grad` -> `True`": "it only saves time",
    'layers/conversion.py: _is_batch_norm: `{"num_features", "running_mean", "running_var"} <= names` -> '
    "`{'num_features', 'running_mean', 'running_var'} < names`": "a module has other attributes, too",
    'layers/conversion.py: unregistered: `attribute == "_modules"` -> `False`': "it only saves time",
    'wrapper/copies.py: _set_hooks: `state["_backward_hooks"]` -> `True`': "it only saves time",
    "wrapper/replica.py: _refuse_unless_its_own: `replica is None` -> `False`": "its caller has asked",
    "backends/base.py: Backend.empty_statistics: `1` -> `2`": "no elements in one piece or in two",
    "meeting/coordinator.py: Coordinator.failure: `self._lock` -> "
    '`__import__("contextlib").nullcontext()`': "only if a replica that was taken for stuck ends at one instant",
    "backends/streams.py: _record_on_current_streams: `value.is_cuda` -> `True`": "all tensors there are on GPUs",
    "wrapper/trees.py: rebuilt: `kind in (list, tuple)` -> `False`": "it only saves time",
    "wrapper/data_parallel.py: _ReplicationMixin.parallel_apply: `0` -> `1` (4)": "all replicas are of one class",
}

# The mutants.

OPPOSITES: dict[type[ast.AST], type[Any]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
}
SPECIAL = ("__", "if TYPE_", "if sys.version_info")  # which are not run, or not by this Python
SYMMETRIC = ("isinstance", "issubclass", "max", "min", "torch.mul")  # or refuse other arguments
SYMMETRIC += ("torch.equal", "torch.promote_types", "math.isclose", "suppress", "_agree", "_differ", "_is_stale")
NESTING = (ast.If, ast.For, ast.While, ast.ExceptHandler)
DROPPED = (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break, ast.For)
NO_LOCK = '__import__("contextlib").nullcontext()'


class Mutant(NamedTuple):
    """One change; with the number of its line, which is only where it is today."""

    file: str
    line: int
    change: str
    source: str  # of the file, with the change

    def __str__(self) -> str:
        return f"{self.file}: {self.change}"


def walk(node: ast.AST, around: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the nodes that may change, each with those around it, the nearest first."""
    special = isinstance(node, (ast.Assign, ast.AnnAssign, ast.If)) and ast.unparse(node).startswith(SPECIAL)
    # Of `zip`, whose arguments are equally long, and of caches, which are large enough.
    sizes = isinstance(node, ast.keyword) and node.arg in ("strict", "maxsize")
    if special or sizes or isinstance(node, ast.JoinedStr):
        return
    yield node, around
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in ("annotation", "returns"):
                yield from walk(child, (node, *around))


def with_(node: Any, **fields: Any) -> str:
    """Return the text of a node with other fields."""
    return ast.unparse(type(node)(**vars(node) | fields))


def changes(node: Any, around: Sequence[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    """Yield what can stand instead of a node, or of a part of it."""
    conditions = [node.test] if isinstance(node, (ast.If, ast.IfExp)) else getattr(node, "ifs", [])
    yield from ((condition, constant) for condition in conditions for constant in ("True", "False"))
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            yield node, with_(node, ops=[*node.ops[:i], OPPOSITES[type(operator)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BoolOp):
        yield node, with_(node, op=OPPOSITES[type(node.op)]())
        yield from ((value, str(isinstance(node.op, ast.And))) for value in node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, ast.unparse(node.operand)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPPOSITES and "'" not in ast.unparse(node):
        yield node, with_(node, op=OPPOSITES[type(node.op)]())
    elif isinstance(node, ast.Call) and ast.unparse(node.func) not in SYMMETRIC:
        for i, (one, other) in enumerate(pairwise(node.args)):
            if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
                yield node, with_(node, args=[*node.args[:i], other, one, *node.args[i + 2 :]])
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        opposite = not node.value if isinstance(node.value, bool) else node.value + 1
        yield node, repr(opposite if isinstance(node.value, int) else 2 * node.value or 1.0)
    elif isinstance(node, ast.With):
        yield from ((item.context_expr, NO_LOCK) for item in node.items if item.optional_vars is None)
    call = isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom))
    stored = isinstance(node, ast.Assign) and not any(isinstance(target, ast.Name) for target in node.targets)
    nested = isinstance(node, ast.Return) and any(isinstance(outer, NESTING) for outer in around)  # not the last one
    if isinstance(node, DROPPED) or call or stored or nested:
        yield node, "pass"


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield the mutants of a file, each with as many lines as the file."""
    encoded, known, numbers = source.encode(), {source}, Counter[str]()
    starts = [0, *accumulate(len(line) for line in encoded.splitlines(keepends=True))]
    for parent, around in walk(ast.parse(source)):
        for node, text in changes(parent, around):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before = encoded[begin:end].decode()
            filled = text + "\n" * (before.count("\n") - text.count("\n"))
            filled = f"({filled})" if isinstance(node, ast.expr) else filled
            changed = (encoded[:begin] + filled.encode() + encoded[end:]).decode()
            if changed in known or text == ast.unparse(node):
                continue
            known.add(changed)
            outer = (parent, *around)
            names = [part.name for part in reversed(outer) if isinstance(part, (ast.FunctionDef, ast.ClassDef))]
            change = f"{'.'.join(names) or 'module'}: `{' '.join(before.split())}` -> `{text}`"
            numbers[change] += 1
            number = f" ({numbers[change]})" if numbers[change] > 1 else ""  # of those that read alike
            yield Mutant(file, node.lineno, change + number, changed)


def all_mutants() -> list[Mutant]:
    """Return the mutants of the package, in a fixed order."""
    package = ROOT / "sync_batchnorm"
    files = {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}
    return [mutant for file, source in files.items() for mutant in mutants_of(file, source)]


# The tests.


def tests_for(file: str) -> tuple[list[str], list[str]]:
    """Return the files of tests that are, or whose folder is, named like a file of the package; and the others."""
    names = {part.strip("_") for part in Path(file).with_suffix("").parts}
    near: list[str] = []
    far: list[str] = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.name == "test_cited_code.py":  # which compares texts, so that it would notice every mutant
            continue
        is_near = names & {path.parent.name, path.stem.removeprefix("test_")}
        (near if is_near else far).append(str(path.relative_to(ROOT)))
    return near, far


def run_pytest(root: Path, *arguments: str) -> str:
    """Run pytest in a copy up to the first failure; return its line, or an empty text if there is none."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *arguments]
    env = os.environ | {"PYTHONPATH": str(root)}
    with (root / "output").open("w") as file:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=file, stderr=file, start_new_session=True)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LIMIT)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with the programs that tests have started
    if process.wait() in (0, 5):  # 5 if no test is for this place
        return ""
    lines = (root / "output").read_text().splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), f"status {process.returncode}")


def end_of(mutant: Mutant, base: Path) -> tuple[str, str]:
    """Try a mutant; return how it ended, and why."""
    if str(mutant) in EQUIVALENT:
        return "equivalent", EQUIVALENT[str(mutant)]
    near, far = tests_for(mutant.file)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "copy"
        shutil.copytree(base, root)
        (root / "sync_batchnorm" / mutant.file).write_text(mutant.source)
        for marks, files in (("not slow", near), ("not slow", far), ("slow", near)):
            for place, options in PLACES.items():
                failure = run_pytest(root, "-m", marks, *options, *files) if files else ""
                if failure:
                    return "killed", f"by {failure} ({place})"
    return "survived", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="how many mutants to try (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (default: 1)")
    parser.add_argument("--file", default="", help="only mutants whose file, function or change contains this")
    options = parser.parse_args()
    mutants = [mutant for mutant in all_mutants() if options.file in str(mutant)]
    chosen = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    print(f"{len(mutants)} mutants, of which {len(chosen)} are tried, with seed {options.seed}", flush=True)
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(JOBS) as pool:
        base = Path(folder)
        shutil.copytree(ROOT, base, ignore=IGNORED, dirs_exist_ok=True)
        for place in PLACES.values():
            if failure := run_pytest(base, *place):
                sys.exit(f"The tests fail without a mutant: {failure}")
        for mutant, (end, detail) in zip(chosen, pool.map(lambda mutant: end_of(mutant, base), chosen), strict=True):
            counts[end] += 1
            print(f"{end:11} {mutant.file}:{mutant.line}: {mutant.change}\n            {detail}", flush=True)
    print(f"{counts['killed']} of {len(chosen) - counts['equivalent']} that are not equivalent died: {dict(counts)}")
    return int(counts["killed"] < 0.95 * (len(chosen) - counts["equivalent"]))


if __name__ == "__main__":
    sys.exit(main())
