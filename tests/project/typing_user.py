"""Code as a user writes it, with every public name: `test_packaging.py` checks its types with ``mypy --strict``.

It also runs, as a program. A ``type: ignore`` here stands where a mistake must be noticed: mypy complains if it is not.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, assert_type

import torch
from torch import Tensor, nn

from sync_batchnorm import (
    CallbackContext,
    DataParallelWithCallback,
    ReplicaSyncError,
    SlavePipe,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    SyncMaster,
    assert_matches_one_device,
    assert_synchronized,
    convert_model,
    execute_replication_callbacks,
    merge_messages,
    patch_replication_callback,
    patch_sync_batchnorm,
    revert_model,
    set_sbn_eps_mode,
    sync_moments,
)


def merge(messages: list[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
    return [(identifier, len(messages)) for identifier, _ in messages]


class Centered(nn.Module):
    pipe: SyncMaster | SlavePipe | None = None
    counter: SyncMaster | SlavePipe | None = None

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        if copy_id == 0:
            ctx.masters = self.pipe, self.counter = SyncMaster(merge_messages), SyncMaster(merge)
        else:
            self.pipe, self.counter = (master.register_slave(copy_id) for master in ctx.masters)

    def forward(self, input: Tensor) -> Tensor:
        mean, var, count = sync_moments(input, self.pipe)
        assert_type(mean, Tensor)
        assert_type(var, Tensor)
        assert_type(count, int)
        pipe = self.counter
        if pipe is not None:
            replicas = pipe.run_master(None) if isinstance(pipe, SyncMaster) else pipe.run_slave(None)
            input = input * float(replicas)
        return input - mean


def train() -> None:
    layer = SynchronizedBatchNorm2d(8, momentum=None, eps_mode="clamp", group_size=2)
    net = convert_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), layer), eps_mode="clamp", group_size=None)
    assert_type(net, nn.Sequential)
    parallel = DataParallelWithCallback(net, ["cpu"] * 2, output_device="cpu", dim=0, timeout=60.0)
    wrapped: nn.DataParallel[Any] = parallel
    assert_synchronized(parallel)
    assert_matches_one_device(nn.Linear(2, 2), torch.ones(4, 2), loss=torch.sum, replicas=4, kwargs={})
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    try:
        output: Tensor = wrapped(torch.randn(4, 3, 8, 8))
    except ReplicaSyncError as error:
        raise RuntimeError(f"the replicas could not meet: {error}") from error
    output.square().mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert_type(revert_model(net), nn.Sequential)


def build() -> list[nn.modules.batchnorm._BatchNorm]:
    set_sbn_eps_mode("plus")
    with patch_sync_batchnorm():
        patched: nn.BatchNorm2d = nn.BatchNorm2d(8)
    layers: list[nn.modules.batchnorm._BatchNorm] = [
        SynchronizedBatchNorm(8, process_group=None),
        SynchronizedBatchNorm1d(8, 1e-5, 0.1, True, True, torch.device("cpu"), torch.float64),
        SynchronizedBatchNorm3d(8, affine=False, track_running_stats=False),
    ]
    as_torch: nn.BatchNorm1d | nn.BatchNorm3d = SynchronizedBatchNorm1d(8)
    return [*layers, patched, as_torch]


def wrap() -> None:
    existing = nn.DataParallel(Centered())
    assert_type(patch_replication_callback(existing, timeout=1.5), nn.DataParallel[Centered])
    execute_replication_callbacks([Centered(), Centered()])
    DataParallelWithCallback(Centered(), [torch.device("cpu"), "cpu"])(torch.ones(2, 1))


def mistakes() -> None:
    """Pass what the library refuses; never called."""
    net = nn.Linear(2, 2)
    convert_model(net, "clamp")  # type: ignore[call-arg, arg-type]
    convert_model(net, group_size="2")  # type: ignore[arg-type]
    assert_matches_one_device(net, torch.sum, loss=3.0)  # type: ignore[arg-type]
    set_sbn_eps_mode(None)  # type: ignore[arg-type]
    patch_replication_callback(net)  # type: ignore[type-var]
    DataParallelWithCallback(net, [0], None, 0, 3.0)  # type: ignore[call-arg]
    SynchronizedBatchNorm2d(8, sync=True)  # type: ignore[call-arg]
    SyncMaster(len)  # type: ignore[arg-type]
    message: str = convert_model(net)  # type: ignore[assignment]
    print(message)


if __name__ == "__main__":
    train()
    build()
    wrap()
