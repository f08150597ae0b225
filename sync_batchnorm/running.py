"""The running statistics of a layer, and how one call moves them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__: list[str] = []


class RunningStatistics(NamedTuple):
    """The buffers of a layer, for the master to update: right after a meeting, while its peers wake up."""

    mean: Tensor | None
    var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None

    def count_call(self) -> float:
        """Count a call; return the momentum, which is zero for a cumulative average."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return self.momentum or 0.0

    def update(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """Count a call, and move towards its statistics in place.

        Args:
            mean: of the batch, ``(C,)``.
            var: of the batch, biased, ``(C,)``; the running variance moves towards the unbiased one.
            count: elements per channel.
        """
        momentum = self.count_call()
        if self.mean is None or self.var is None:
            return
        # Through `data`, which counts no new version, as the kernel of torch counts none: the backward of an earlier
        # forward in eval mode, which has saved these buffers, must not refuse to run.
        for buffer, value in ((self.mean, mean), (self.var, var * (count / (count - 1)))):
            step: Tensor | float = momentum
            if self.momentum is None and self.num_batches_tracked is not None:
                # A tensor: so the host does not wait for the counter.
                step = self.num_batches_tracked.to(buffer.dtype).reciprocal()
            buffer.data.lerp_(value.to(buffer.dtype), step)
