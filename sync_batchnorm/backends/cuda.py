"""Batch normalization on CUDA, with the operators that `torch.nn.SyncBatchNorm` uses.

NOTE [tried on CUDA]: The host's time of a step is the number of operators and of launches. These do not pay:

- torch's own gather and scatter of vectors, instead of one copy for each device: 4 to 8 % of a step more;
- both vectors sent one by one, without `cat`: as many launches on two GPUs, more on others;
- sums added up one by one, without `cat` and `sum`: one operator less on two GPUs, more launches on others;
- `stack` in place of `cat`, or `foreach_copy` for a single copy: 1 to 2 % of a layer more each;
- workspaces in the backward pass alone: a third of what they bring in both;
- one lease for all that a replica sends in a forward pass, or that all send in a backward pass: 0 to 1 % of a layer on
  two and four GPUs, 3 % on eight, for twelve lines;
- means and inverse deviations as two views by `as_strided`, and a counter that adds a kept tensor in place of a number:
  1 % at most, which measurements do not tell from nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import (
    Backend,
    BackwardInput,
    BatchStatistics,
    Counts,
    ForwardInput,
    Gradients,
    LayerArguments,
    Pair,
    format_of,
    invstd_of,
    memory_for_output,
    per_channel,
)
from .workspaces import Lease, Workspace, move_pair

__all__: list[str] = []


class Cuda(Backend):
    """The statistics of a replica are its mean and ``1 / sqrt(var + eps)``, of a single piece: ``(C,)`` each."""

    def statistics(self, input: Tensor, eps: float) -> tuple[Pair, Tensor | None]:
        return torch.batch_norm_stats(input, eps), None

    def empty_statistics(self, input: Tensor) -> Pair:
        zeros, _ = super().empty_statistics(input)
        return zeros, torch.ones_like(zeros)  # which the kernel that merges divides by

    def merge(
        self,
        statistics: Sequence[Pair],
        counts: Counts,
        total: int | Tensor,
        layer: LayerArguments,
        workspace: Workspace,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Merge and update the running statistics with one operator, unless it cannot update them."""
        if isinstance(total, int) and total == 0:
            return super().merge(statistics, counts, total, layer, workspace)
        (means, invstds), vector = _stacked(statistics, counts, workspace)
        eps, running, momentum, buffers = layer.eps, layer.running, 0.0, (None, None)
        if running is not None and running.suits(means.dtype):
            # This operator, unlike `update`, does not change the version counters of what it updates.
            momentum, buffers, running = running.count_call(), (running.mean, running.var), None
        mean, invstd = torch.batch_norm_gather_stats_with_counts(means, means, invstds, *buffers, momentum, eps, vector)
        clamped = None
        if layer.clamps or running is not None:
            var = (invstd.pow(-2) - eps).clamp_(min=0)
            if running is not None:
                running.update(mean, var, total)
            if layer.clamps:
                invstd, clamped = invstd_of(var, eps, True)
        return mean, invstd, clamped

    def normalize(self, calls: Sequence[ForwardInput], batch: BatchStatistics) -> list[Tensor]:
        outputs: list[Tensor] = []
        for call in calls:
            input, weight, bias = call.input, call.layer.weight, call.layer.bias
            mean, invstd = batch.mean_invstd[input.device]
            if not input.numel():
                output = memory_for_output(input)
            elif input.is_contiguous() and 1 not in input.shape:  # Then the operator makes memory in the right format.
                output = torch.batch_norm_elemt(input, weight, bias, mean, invstd, 0.0)
            else:
                output = memory_for_output(input)
                torch.batch_norm_elemt(input, weight, bias, mean, invstd, 0.0, out=output)
            outputs.append(output)
        return outputs

    def gradients(self, parts: Sequence[BackwardInput], batch: BatchStatistics) -> Sequence[Gradients]:
        sums: list[Pair] = []
        of_parameters: list[tuple[Tensor | None, Tensor | None]] = []
        for part in parts:
            if part.grad_output is None or not part.input.numel():
                of_parameters.append((None, None))
            else:
                pair, grad_weight, grad_bias = _sums(part, part.grad_output, batch)
                sums.append(move_pair(pair, batch.master, batch.lease.pools))
                of_parameters.append((grad_weight, grad_bias))
        if not any([part.wants_input for part in parts]):
            return [(None, *grads) for grads in of_parameters]

        devices, count = tuple(batch.mean_invstd), batch.elements
        lease = Lease(batch.lease.pools, devices, (sums or [batch.mean_invstd[batch.master]])[0][0])
        totals = batch.totals(sums, lease.workspace)
        if isinstance(count, Tensor):
            totals, count = totals / count, 1
        terms, pairs = lease.workspace.broadcast(totals, devices), zip(parts, of_parameters, strict=True)
        return [(_input_gradient(part, terms[part.input.device], count, batch), *grads) for part, grads in pairs]


def _sums(part: BackwardInput, grad_output: Tensor, batch: BatchStatistics) -> tuple[Pair, Tensor | None, Tensor]:
    """Return the two sums of one replica, and the gradients of its weight and bias."""
    mean, invstd = batch.mean_invstd[part.input.device]
    weight = part.weight
    sum_dy, sum_dy_xmu, grad_weight, _ = torch.batch_norm_backward_reduce(
        grad_output, part.input, mean, invstd, weight, True, weight is not None, False
    )
    if batch.parameters_differ and weight is not None:
        return (sum_dy * weight, sum_dy_xmu * weight), grad_weight, sum_dy
    return (sum_dy, sum_dy_xmu), grad_weight, sum_dy


def _stacked(statistics: Sequence[Pair], counts: Counts, workspace: Workspace) -> tuple[Pair, Tensor]:
    """Return mean and invstd of all pieces that have elements, ``(P, C)`` each, and their counts, ``(P,)``."""
    if isinstance(counts, Tensor):  # The kernel that merges would divide by that of a first process without elements.
        return statistics[0], counts.clamp(min=1e-30)
    rows = workspace.stack([pair for pair, count in zip(statistics, counts, strict=True) if count])
    return workspace.halves, _counts(rows.device, tuple(filter(None, counts)), rows.dtype)


def _input_gradient(part: BackwardInput, terms: Pair, count: int, batch: BatchStatistics) -> Tensor | None:
    """Return the gradient of the input of one replica; `terms` are the sums of all, `count` what to divide them by."""
    input, grad_output, weight = part.input, part.grad_output, part.weight
    if not part.wants_input:
        return None
    if input.numel() == 0:
        return torch.zeros_like(input)
    if grad_output is None:
        grad_output = torch.zeros_like(input)
    elif batch.parameters_differ and weight is not None:
        grad_output = (grad_output * per_channel(weight, input)).to(input.dtype)
    if not input.is_contiguous():  # or the gradient of a channels_last input would be contiguous
        grad_output = grad_output.contiguous(memory_format=format_of(input))
    mean, invstd = batch.mean_invstd[part.input.device]
    if batch.parameters_differ:
        weight = None
    elif weight is not None and weight.dtype != mean.dtype:  # Contiguous inputs need one dtype.
        weight = weight.to(mean.dtype)
    counts = _counts(part.input.device, (count,), torch.int32)
    return torch.batch_norm_backward_elemt(grad_output, input, mean, invstd, weight, terms[0], terms[1], counts)


_made: dict[tuple[torch.Stream, tuple[int, ...], torch.dtype], Tensor] = {}


def _counts(device: torch.device, counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return `counts` as a vector on `device`, for use on its current stream alone."""
    stream = torch.accelerator.current_stream(device.index)
    vector = _made.get((stream, counts, dtype))
    if vector is None:
        # Kernels fill it: to copy a list to the device, the host would have to wait.
        with torch.inference_mode(False):
            vector = torch.cat([torch.full((1,), count, dtype=dtype, device=device) for count in counts])
        if len(_made) >= 1024:
            _made.clear()
        # A CUDA graph fills its tensors only when it is replayed, and `FakeTensorMode` never does.
        if type(vector) is Tensor and not torch.cuda.is_current_stream_capturing():
            _made[stream, counts, dtype] = vector
    return vector
