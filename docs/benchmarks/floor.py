"""The least that a synchronized layer can cost: `nn.BatchNorm2d`, and a meeting of the replicas beside it."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from sync_batchnorm import CallbackContext, SyncMaster


class MeetingBatchNorm2d(nn.BatchNorm2d):
    """Normalizes with the statistics of its replica, as `nn.BatchNorm2d`, after it has waited for the others."""

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        if copy_id == 0:
            ctx.sync_master = master = SyncMaster(lambda messages: messages)
            self.meet: Any = master.run_master
        else:
            self.meet = ctx.sync_master.register_slave(copy_id).run_slave

    def forward(self, input: Tensor) -> Tensor:
        self.meet(None)
        return super().forward(input)


def with_meetings(module: nn.Module) -> nn.Module:
    """Return a copy of `module` in which every `nn.BatchNorm2d` meets its replicas."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        if type(layer) is nn.BatchNorm2d:
            layer.__class__ = MeetingBatchNorm2d
    return module
