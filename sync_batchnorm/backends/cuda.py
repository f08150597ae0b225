"""Batch normalization on CUDA, with the operators that `torch.nn.SyncBatchNorm` uses.

The time of a training step depends on the host, which launches the kernels, rather than on the kernels themselves. So
this file uses few operators and kernel launches, even if the kernels then compute more than necessary. NOTE [tried on
CUDA], at the end of the file, lists changes that gained nothing.
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
    format_of,
    memory_for_output,
    per_channel,
)
from .workspaces import Lease, Pair, Workspace, move_pair

__all__: list[str] = []


class Cuda(Backend):
    """Batch normalization on CUDA.

    The statistics of one replica's input are two vectors ``(C,)``: the mean, and ``1 / sqrt(var + eps)`` in place of
    the variance. Both vectors are computed from the whole input, not from pieces of it.
    """

    def statistics(self, input: Tensor, eps: float) -> tuple[Pair, Tensor | None]:
        return torch.batch_norm_stats(input, eps), None

    def empty_statistics(self, input: Tensor) -> Pair:
        zeros, _ = super().empty_statistics(input)
        return zeros, torch.ones_like(zeros)  # The merge kernel divides by the second vector, so it must not be zero.

    def merge(
        self,
        statistics: Sequence[Pair],
        counts: Counts,
        total: int | Tensor,
        layer: LayerArguments,
        workspace: Workspace | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Merge the statistics, and update the running statistics, by a single operator.

        For some options, such as ``momentum=None``, the operator cannot update the running statistics. Then update them
        by further operators.
        """
        if isinstance(total, int) and total == 0:
            return super().merge(statistics, counts, total, layer, workspace)
        if isinstance(counts, Tensor):
            # The merge kernel divides by the number of elements in the input of the first process. If this number is
            # zero, pass a tiny number instead.
            (means, invstds), count_vector = statistics[0], counts.clamp(min=1e-30)
        else:
            workspace = workspace or Workspace()
            rows = workspace.stack([pair for pair, count in zip(statistics, counts, strict=True) if count])
            count_vector = _count_vector(rows.device, tuple(filter(None, counts)), rows.dtype)
            # The means and the inverse deviations of the K replicas whose inputs are not empty, ``(K, C)`` each.
            means, invstds = workspace.halves
        running, momentum, buffers = layer.running, 0.0, (None, None)
        if running is not None and running.momentum is not None and getattr(running.mean, "dtype", 0) == means.dtype:
            # The merge operator updates the running mean and variance. It leaves their version counters as they are,
            # and so does `RunningStatistics.update`.
            if running.num_batches_tracked is not None:
                running.num_batches_tracked.add_(1)
            momentum, buffers, running = running.momentum, (running.mean, running.var), None
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            means, means, invstds, *buffers, momentum, layer.eps, count_vector
        )
        clamped = None
        if layer.clamps or running is not None:
            var = (invstd.pow(-2) - layer.eps).clamp_(min=0)
            if running is not None:
                running.update(mean, var, total)
            if layer.clamps:
                invstd, clamped = var.clamp(min=layer.eps).rsqrt(), var < layer.eps
        return mean, invstd, clamped

    def normalize(self, calls: Sequence[ForwardInput], batch: BatchStatistics) -> list[Tensor]:
        outputs: list[Tensor] = []
        for call in calls:
            input, weight, bias = call.input, call.layer.weight, call.layer.bias
            mean, invstd = batch.mean_invstd[input.device]
            if not input.numel():
                output = memory_for_output(input)
            elif input.is_contiguous() and 1 not in input.shape:
                # If the input is contiguous, and no dimension has size 1, the operator allocates the output in the
                # right memory format.
                output = torch.batch_norm_elemt(input, weight, bias, mean, invstd, 0.0)
            else:
                output = memory_for_output(input)
                torch.batch_norm_elemt(input, weight, bias, mean, invstd, 0.0, out=output)
            outputs.append(output)
        return outputs

    def gradients(self, replicas: Sequence[BackwardInput], batch: BatchStatistics) -> Sequence[Gradients]:
        master = batch.master_device
        sums: list[Pair] = []
        parameter_grads: list[tuple[Tensor | None, Tensor | None]] = []
        for replica in replicas:
            if replica.grad_output is None or not replica.input.numel():
                parameter_grads.append((None, None))
            else:
                pair, grad_weight, grad_bias = _sums(replica, replica.grad_output, batch)
                is_there = replica.input.device == master
                sums.append(pair if is_there else move_pair(pair, master, batch.lease.pools))
                parameter_grads.append((grad_weight, grad_bias))
        if not any([replica.wants_input for replica in replicas]):
            return [(None, *grads) for grads in parameter_grads]

        devices, count = tuple(batch.mean_invstd), batch.elements
        vector, _ = sums[0] if sums else batch.mean_invstd[master]
        lease = Lease(batch.lease.pools, devices, vector)
        totals = batch.totals(sums, lease.workspace)
        if isinstance(count, Tensor):
            totals, count = totals / count, 1
        on_devices, results = lease.workspace.broadcast(totals, devices), []
        for replica, grads in zip(replicas, parameter_grads, strict=True):
            results.append((_input_gradient(replica, on_devices[replica.input.device], count, batch), *grads))
        return results


def _sums(replica: BackwardInput, grad_output: Tensor, batch: BatchStatistics) -> tuple[Pair, Tensor | None, Tensor]:
    """Compute the gradients of one replica's weight and bias, and the two sums over its input that the input gradients
    need.

    The sums are ``sum dy`` and ``sum dy * (x - mean)``, where dy is the gradient of the output. If the parameters of
    replicas differ, dy is the gradient of the output times the weight.
    """
    mean, invstd = batch.mean_invstd[replica.input.device]
    weight = replica.weight
    sum_dy, sum_dy_xmu, grad_weight, _ = torch.batch_norm_backward_reduce(
        grad_output, replica.input, mean, invstd, weight, True, weight is not None, False
    )
    if batch.parameters_differ and weight is not None:
        return (sum_dy * weight, sum_dy_xmu * weight), grad_weight, sum_dy
    return (sum_dy, sum_dy_xmu), grad_weight, sum_dy


def _input_gradient(replica: BackwardInput, totals: Pair, count: int, batch: BatchStatistics) -> Tensor | None:
    """Return the gradient of one replica's input, or None if the backward pass does not need it.

    `totals` holds the two sums of `_sums`, added up over all replicas. Divided by `count`, they are means over the
    whole batch.
    """
    input, grad_output, weight = replica.input, replica.grad_output, replica.weight
    if not replica.wants_input:
        return None
    if input.numel() == 0:
        return torch.zeros_like(input)
    if grad_output is None:
        grad_output = torch.zeros_like(input)
    elif batch.parameters_differ and weight is not None:
        grad_output = (grad_output * per_channel(weight, input)).to(input.dtype)
    if not input.is_contiguous():
        # Convert `grad_output` to the memory format of the input. Without this conversion, the gradient of a
        # channels_last input would be contiguous.
        grad_output = grad_output.contiguous(memory_format=format_of(input))
    mean, invstd = batch.mean_invstd[input.device]
    if batch.parameters_differ:
        weight = None
    elif weight is not None and weight.dtype != mean.dtype:
        # For a contiguous input, `batch_norm_backward_elemt` requires the same dtype for weight and mean.
        weight = weight.to(mean.dtype)
    count_vector = _count_vector(input.device, (count,), torch.int32)
    return torch.batch_norm_backward_elemt(grad_output, input, mean, invstd, weight, totals[0], totals[1], count_vector)


_count_vectors: dict[tuple[torch.Stream, tuple[int, ...], torch.dtype], Tensor] = {}


def _count_vector(device: torch.device, counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return `counts` as a vector on `device`. Use the vector only on the stream that is current now."""
    stream = torch.accelerator.current_stream(device.index)
    vector = _count_vectors.get((stream, counts, dtype))
    if vector is None:
        # Let kernels fill the vector. A copy of a list from the host would make the host wait.
        with torch.inference_mode(False):
            vector = torch.cat([torch.full((1,), count, dtype=dtype, device=device) for count in counts])
        if len(_count_vectors) >= 1024:
            _count_vectors.clear()
        # Keep the vector for later calls, but only if its values are there now. During the capture of a CUDA graph,
        # they are written only when the graph is replayed. In `FakeTensorMode`, they are never written.
        if type(vector) is Tensor and not torch.cuda.is_current_stream_capturing():
            _count_vectors[stream, counts, dtype] = vector
    return vector


# NOTE [tried on CUDA]: These changes gain nothing.
#
# - torch's own gather and scatter of vectors, instead of one copy for each device: 4 to 8 % more of a step;
# - a copy for each of the two vectors, without `cat`: as many launches on two GPUs, more on others;
# - sums added up one by one, without `cat` and `sum`: one operator less on two GPUs, more launches on others;
# - `stack` in place of `cat`, or `foreach_copy` for a single copy: 1 to 2 % more of a layer each;
# - workspaces in the backward pass only: a third of the gain of workspaces in both passes;
# - one lease for all vectors that a replica sends in a forward pass, or all replicas in a backward pass: 0 to 1 % of a
#   layer on two and four GPUs, 3 % on eight, for twelve lines;
# - means and inverse deviations as two views by `as_strided`, and a counter that adds a kept tensor in place of a
#   number: 1 % at most, which is within the noise.
