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

    def update(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Count a call, and move towards its statistics in place.

        Args:
            mean: of the batch, ``(C,)``.
            var: of the batch, biased, ``(C,)``; the running variance moves towards the unbiased one.
            count: elements a channel; with none, the call is only counted.
        """
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # the cumulative average
                factor = 1.0 / float(self.num_batches_tracked)
        if self.mean is None or self.var is None or not count:
            return
        factor = 0.0 if factor is None else factor
        unbiased = var * (count / (count - 1))
        # Through `data`, which counts no new version, as the kernel of torch counts none: the backward of an earlier
        # forward in eval mode, which has saved these buffers, must not refuse to run.
        self.mean.data.lerp_(mean.to(self.mean.dtype), factor)
        self.var.data.lerp_(unbiased.to(self.var.dtype), factor)
